"""Streams of layers, text from models, and their files."""

# Options by name, and params as dictionaries.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, operator, union-attr"

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from linattn import feature_maps, layers

DIM, HEADS, VOCABULARY = 8, 4, 11
ELU = layers.LinearAttention(feature_maps.EluFeatures())
FAVOR = layers.LinearAttention(feature_maps.PositiveFeatures(2, num_features=8, rng=0))
DECAY = layers.LinearAttention(feature_maps.EluFeatures(), log_decay=[-0.1, -0.2, 0.0, -1.0])
STREAMS = {
    "softmax": layers.SoftmaxAttention(),
    "window": layers.SoftmaxAttention(window=3),
    "elu": ELU,
    "favor": FAVOR,
    "decay": DECAY,
    "bounded": layers.BoundedAttention(8, block_size=2),
}
# Maps that know where a token is: a decay beside them is another test's.
PLACED = {
    "rotated": layers.LinearAttention(feature_maps.RotatedFeatures(feature_maps.EluFeatures(2))),
    "cosformer": layers.LinearAttention(feature_maps.CosformerFeatures(2, max_length=30)),
}


def rng(seed=0):
    return np.random.default_rng(seed)


def model(**kind):
    """Draw a decoder-only model of two layers with grouped heads."""
    kind = {"num_key_heads": 2, "dtype": np.float64, **kind}
    return layers.init_language_model(rng(), VOCABULARY, 2, DIM, HEADS, **kind)


# Streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [None, layers.Rotary(), layers.Alibi()], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_in_parts_is_the_whole(xp_any_shape, name, placed):
    xp = xp_any_shape
    if name == "bounded" and isinstance(placed, layers.Alibi):
        placed = None
    drawn = layers.init_decoder(rng(), 2, DIM, HEADS, num_key_heads=2, dtype=np.float64)
    params = {n: xp.array(array) for n, array in drawn.items()}
    options = {"num_heads": HEADS, "attention": STREAMS[name], "positions": placed}
    x = xp.array(rng(1).standard_normal((2, 12, DIM)))
    whole = layers.decoder(params, x, **options)
    state, parts = None, []
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 11), (11, 12)):
        out, state = layers.decoder(
            params, x[:, begin:end, :], initial_state=state, return_state=True, **options
        )
        parts.append(xp.numpy(out))
    assert state.length == 12
    xp.assert_like(out, x, shape=(2, 1, DIM))
    assert_allclose(np.concatenate(parts, axis=1), xp.numpy(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("placed", [None, layers.Alibi()], ids=str)
@pytest.mark.parametrize("size", [1, 300])
def test_single_tokens_in_float16_are_accumulated_in_float32(placed, size):
    """Logits, and sums of weights, that float16 does not hold."""
    attention = layers.SoftmaxAttention(scale=np.float64(100.0))
    drawn = layers.init_multi_head_attention(rng(), DIM, HEADS, dtype=np.float64)
    params = {n: (10 * array).astype(np.float16) for n, array in drawn.items()}
    x = rng(1).standard_normal((4, DIM)).astype(np.float16) * np.float16(size) / np.float16(100)
    options = {"num_heads": HEADS, "attention": attention, "positions": placed, "is_causal": True}
    whole = layers.multi_head_attention(params, x, **options)
    state, parts = None, []
    for token in np.split(x, 4):
        out, state = layers.multi_head_attention(
            params, token, initial_state=state, return_state=True, **options
        )
        parts.append(out)
    assert_allclose(np.concatenate(parts), whole, rtol=2e-3, atol=2e-3 * abs(whole).max())
    assert whole.dtype == parts[0].dtype == np.float16


@pytest.mark.parametrize("name", STREAMS)
def test_streams_go_on_from_one_state_without_a_trace(name):
    params = layers.init_decoder(rng(), 1, DIM, HEADS, dtype=np.float64)
    options = {"num_heads": HEADS, "attention": STREAMS[name], "return_state": True}
    x, draft = rng(1).standard_normal((2, 9, DIM))
    whole, _ = layers.decoder(params, x, **options)
    _, state = layers.decoder(params, x[:5], **options)
    _, state = layers.decoder(params, x[5:6], initial_state=state, **options)
    other = state
    for row, other_row, wanted in zip(x[6:], draft[6:], whole[6:], strict=True):
        out, state = layers.decoder(params, row[None], initial_state=state, **options)
        _, other = layers.decoder(params, other_row[None], initial_state=other, **options)
        assert_allclose(out[0], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 6, 9])
@pytest.mark.parametrize("num_key_heads", [HEADS, 2])
@pytest.mark.parametrize(
    "attention",
    [ELU, layers.SoftmaxAttention(), [ELU, FAVOR], layers.AutomaticAttention(), *PLACED.values()],
    ids=str,
)
def test_a_memory_is_in_the_state(attention, num_key_heads, length):
    """Whole and in parts queries are at their own positions, whatever the memory's length is."""
    kind = {"has_memory": True, "num_key_heads": num_key_heads, "dtype": np.float64}
    params = layers.init_decoder(rng(), 2, DIM, HEADS, **kind)
    x, memory = rng(1).standard_normal((2, 9, DIM)), rng(2).standard_normal((2, length, DIM))
    mask = rng(3).random((2, length)) < 0.6
    options = {"num_heads": HEADS, "cross_attention": attention, "memory_mask": mask}
    for own in (layers.SoftmaxAttention(), PLACED["rotated"], PLACED["cosformer"]):
        options["attention"] = own
        whole = layers.decoder(params, x, memory, **options)
        out, state = layers.decoder(params, x[:, :4], memory, return_state=True, **options)
        parts = [out]
        for begin, end in ((4, 5), (5, 6), (6, 9)):
            out, state = layers.decoder(
                params, x[:, begin:end], initial_state=state, return_state=True, **options
            )
            parts.append(out)
        assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-11, atol=1e-12)
    first = {n.removeprefix("layers.0."): p for n, p in params.items() if n.startswith("layers.0")}
    if isinstance(attention, list):
        options["cross_attention"] = attention[0]
    whole = layers.decoder_layer(first, x, memory, **options)
    _, kept = layers.decoder_layer(first, x[:, :6], memory, return_state=True, **options)
    rest = layers.decoder_layer(first, x[:, 6:], initial_state=kept, **options)
    assert_allclose(rest, whole[:, 6:], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["elu", "window"])
def test_100_000_tokens_stream_in_constant_memory(name):
    """What is held after 20,000 tokens is held after 100,000; the peak is that of one part."""
    params = layers.init_language_model(rng(), VOCABULARY, 1, DIM, 2)
    options = {"num_heads": 2, "attention": STREAMS[name], "return_state": True}
    options |= {"positions": layers.Rotary(), "norm_first": True}
    tokens, state, held, peaks = rng(1).integers(0, VOCABULARY, 4000), None, [], []
    tracemalloc.start()
    for _ in range(25):
        tracemalloc.reset_peak()
        _, state = layers.language_model(params, tokens, initial_state=state, **options)
        current, peak = tracemalloc.get_traced_memory()
        held.append(current)
        peaks.append(peak)
    tracemalloc.stop()
    assert state.length == 100_000
    # A float32 a token would be 320 kB.
    assert abs(held[-1] - held[4]) < 40_000
    # It varies with the threads; 80,000 tokens more of it would be five times as much.
    assert max(peaks[5:]) < 1.5 * max(peaks[:5])


# Text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placed", [None, "sinusoidal", layers.Rotary(), layers.Alibi()], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_generating_by_state_is_generating_by_recomputing(name, placed):
    if name == "bounded" and isinstance(placed, layers.Alibi):
        placed = None
    params = model(num_positions=20 if placed is None else None, tied=placed == "sinusoidal")
    options = {"num_heads": HEADS, "attention": STREAMS[name], "positions": placed}
    prompt = rng(1).integers(0, VOCABULARY, (3, 5))
    found = layers.generate(params, prompt, 9, **options)
    whole = np.concatenate([prompt, found], axis=1)
    logits = layers.language_model(params, whole, **options)[:, 4:-1]
    assert_array_equal(found, logits.argmax(axis=-1))
    alone = layers.generate(params, prompt[1], 9, **options)
    assert_array_equal(alone, found[1])


@pytest.mark.parametrize("placed", [None, "sinusoidal"])
@pytest.mark.parametrize("parts", [[5], [1, 2], [8]], ids=str)
def test_logits_of_a_stream_are_those_of_the_whole(placed, parts):
    params = model(num_positions=20 if placed is None else None)
    options = {"num_heads": HEADS, "attention": ELU, "positions": placed}
    tokens = rng(1).integers(0, VOCABULARY, (3, 9))
    state, found = None, []
    for part in np.split(tokens, parts, axis=1):
        logits, state = layers.language_model(
            params, part, initial_state=state, return_state=True, **options
        )
        found.append(logits)
    whole = layers.language_model(params, tokens, **options)
    assert_allclose(np.concatenate(found, axis=1), whole, rtol=1e-10, atol=1e-12)


def test_generating_with_a_memory_is_recomputing():
    params = model(has_memory=True)
    prompt, memory = rng(1).integers(0, VOCABULARY, (3, 2)), rng(2).standard_normal((3, 6, DIM))
    mask = rng(3).random((3, 6)) < 0.6
    for attention in (ELU, layers.SoftmaxAttention(), *PLACED.values()):
        options = {"num_heads": HEADS, "attention": attention, "memory_mask": mask}
        found = layers.generate(params, prompt, 7, memory, **options)
        whole = np.concatenate([prompt, found], axis=1)
        logits = layers.language_model(params, whole, memory, **options)[:, 1:-1]
        assert_array_equal(found, logits.argmax(axis=-1))


def test_tokens_are_of_the_library_of_the_prompt(xp):
    if xp.name == "dask":
        pytest.skip("dask: a token is chosen on the host, and reads all of the graph so far")
    params = {name: xp.array(array) for name, array in model().items()}
    prompt = xp.array(rng(1).integers(0, VOCABULARY, (2, 3)))
    found = layers.generate(params, prompt, 4, num_heads=HEADS, attention=ELU)
    xp.assert_like(found, prompt, shape=(2, 4))


def shares(**options):
    """Return how often each of four tokens is drawn, where all logits are those of one row."""
    params = layers.init_language_model(rng(), 4, 1, 1, 1, dtype=np.float64)
    params |= {"norm.weight": np.zeros(1), "norm.bias": np.ones(1)}
    params["head.weight"] = np.log([[0.4], [0.3], [0.2], [0.1]])
    prompt = np.zeros((20_000, 1), np.int64)
    found = layers.generate(params, prompt, 1, num_heads=1, rng=1, **options)
    return np.bincount(found[:, 0], minlength=4) / len(found)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"temperature": 1.0, "top_k": 2}, [0.4, 0.3, 0, 0]),
        ({"temperature": 1.0, "top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 1.0, "top_p": 0.65}, [0.4, 0.3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [0.4, 0.3, 0.2, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(options, weights):
    """A seed that is fixed; 5 standard deviations of a share are 0.018 at most."""
    wanted = np.array(weights) / sum(weights)
    found = shares(**options)
    assert_allclose(found, wanted, atol=0.018)
    assert_array_equal(found[wanted == 0], 0)


def test_a_seed_repeats_a_text():
    params, prompt = model(), np.zeros((2, 1), np.int64)
    first, again, other = (
        layers.generate(params, prompt, 30, num_heads=HEADS, temperature=1.0, rng=seed)
        for seed in (0, np.random.default_rng(0), 1)
    )
    assert_array_equal(first, again)
    assert (first != other).any()


def test_a_sequence_stops_at_a_token():
    params, prompt = model(), rng(1).integers(0, VOCABULARY, (3, 4))
    options = {"num_heads": HEADS, "temperature": 1.0, "rng": 3}
    free = layers.generate(params, prompt, 200, **options)
    stopped = layers.generate(params, prompt, 200, stop=2, **options)
    ends = (free == 2).argmax(axis=1)
    assert_array_equal(free[range(3), ends], 2)
    assert stopped.shape == (3, ends.max() + 1)
    first = ends.argmin()
    assert_array_equal(stopped[first, : ends[first] + 1], free[first, : ends[first] + 1])
    for row, end in zip(stopped, (stopped == 2).argmax(axis=1), strict=True):
        assert_array_equal(row[end:], 2)


def test_no_token_more_is_no_token():
    found = layers.generate(model(), np.zeros((2, 3), np.int64), 0, num_heads=HEADS)
    assert found.shape == (2, 0)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "temperature must be above 0", {"top_k": 3}),
        (ValueError, "temperature must be at least 0, got -1.0", {"temperature": -1.0}),
        (ValueError, "top_p must be at most 1, got 1.5", {"temperature": 1.0, "top_p": 1.5}),
        (ValueError, "top_k must be at least 1, got 0", {"temperature": 1.0, "top_k": 0}),
        (TypeError, "num_tokens must be an integer", {"num_tokens": 2.5}),
        (ValueError, "at least one token", {"tokens": np.zeros((2, 0), np.int64)}),
        (TypeError, "tokens must be integers, got dtype float64", {"tokens": np.zeros((2, 1))}),
        (ValueError, "below 11, the rows of .*got 0 to 11", {"tokens": np.array([[0, 11]])}),
        (
            NotImplementedError,
            r"AutomaticAttention.* must go on token by token here, and cannot",
            {"attention": layers.AutomaticAttention()},
        ),
        (ValueError, "attention must be one, or one for each", {"attention": [ELU]}),
        (ValueError, "a row for each position, 7 of them, got 6", {"num_tokens": 7}),
    ],
)
def test_mistakes_in_generating(error, message, change):
    arguments = {"tokens": np.zeros((2, 1), np.int64), "num_tokens": 4, "num_heads": HEADS}
    params = model(num_positions=6)
    with pytest.raises(error, match=message):
        layers.generate(params, **(arguments | change))


def test_logits_of_nan_are_no_token():
    params = model()
    params["head.weight"] = params["head.weight"] * np.nan
    with pytest.raises(ValueError, match="logits must be numbers, got NaN"):
        layers.generate(params, np.zeros((1, 1), np.int64), 2, num_heads=HEADS)


@pytest.mark.parametrize(
    "change", [{"is_causal": False}, {"key_mask": np.ones(3, bool)}], ids=["full", "masked"]
)
def test_a_stream_is_causal_and_has_no_mask(change):
    params = layers.init_decoder(rng(), 1, DIM, HEADS)
    x = np.ones((3, DIM), np.float32)
    with pytest.raises(ValueError, match="must come with is_causal=True"):
        layers.decoder(params, x, num_heads=HEADS, return_state=True, **change)
    with pytest.raises(ValueError, match="must come with is_causal=True"):
        layers.multi_head_attention(
            layers.init_multi_head_attention(rng(), DIM, HEADS),
            x,
            num_heads=HEADS,
            return_state=True,
            **({"is_causal": True} | change),
        )


def test_a_state_is_of_as_many_layers():
    x, options = np.ones((3, DIM), np.float32), {"num_heads": HEADS, "return_state": True}
    _, state = layers.decoder(layers.init_decoder(rng(), 1, DIM, HEADS), x, **options)
    two = layers.init_decoder(rng(), 2, DIM, HEADS)
    with pytest.raises(ValueError, match="of a decoder with 2 layers, got 1"):
        layers.decoder(two, x, initial_state=state, **options)


def test_a_state_is_of_the_same_function_and_attention():
    drawn = layers.init_decoder(rng(), 1, DIM, HEADS, dtype=np.float64)
    one = {n.removeprefix("layers.0."): array for n, array in drawn.items()}
    attend = {n.removeprefix("self_attn."): a for n, a in one.items() if "self_attn" in n}
    x = rng(1).standard_normal((2, 5, DIM))
    options = {"num_heads": HEADS, "attention": ELU}
    calls = {
        "DecoderState": lambda **more: layers.decoder(drawn, x, **options | more),
        "LayerState": lambda **more: layers.decoder_layer(one, x, **options | more),
        "AttentionState": lambda **more: layers.multi_head_attention(
            attend, x, is_causal=True, **options | more
        ),
    }
    states = {name: call(return_state=True)[1] for name, call in calls.items()}
    assert {type(state).__name__ for state in states.values()} == set(calls)
    calls["DecoderState "] = lambda initial_state, **more: layers.language_model(
        model(), np.arange(3), initial_state=initial_state, **options | more
    )
    for wanted, call in calls.items():
        for state in (*states.values(), states["AttentionState"].cache, (1, 2), {}, "state"):
            got = type(state).__name__
            if got != wanted.strip():
                text = f"object of type {wanted.strip()}, got {got}; pass the state"
                with pytest.raises(TypeError, match=f"initial_state must hold an {text}"):
                    call(initial_state=state)
        for name, other in STREAMS.items():
            if name in ("softmax", "bounded") and wanted in states:
                with pytest.raises(TypeError, match=r"initial_state .* got State; pass the state"):
                    call(initial_state=states[wanted], attention=other)


@pytest.mark.parametrize(
    "attention", [DECAY, layers.SoftmaxAttention(window=1), layers.LandmarkAttention()], ids=str
)
def test_a_memory_that_needs_the_whole_sequence_is_no_state(attention):
    """By distance, or by what is fitted to all queries: a part would give other numbers."""
    params = layers.init_decoder(rng(), 1, DIM, HEADS, has_memory=True)
    x = np.ones((3, DIM), np.float32)
    options = {"num_heads": HEADS, "cross_attention": attention}
    layers.decoder(params, x, x, **options)
    with pytest.raises(NotImplementedError, match="give cross_attention= another one"):
        layers.decoder(params, x, x, return_state=True, **options)


# Files -------------------------------------------------------------------------------------------


def test_parameters_come_back_from_a_file(xp, tmp_path):
    if xp.name == "dask":
        pytest.skip("dask: an array without values")
    params, path = model(), tmp_path / "model.safetensors"
    layers.save_safetensors(path, {name: xp.array(array) for name, array in params.items()})
    found = layers.load_safetensors(path)
    assert found.keys() == params.keys()
    for name, array in found.items():
        assert array.dtype == np.float64
        assert_array_equal(array, params[name])


def test_names_are_mapped_and_arrays_joined(tmp_path):
    path = tmp_path / "model.safetensors"
    parts = {name: rng(i).standard_normal((3, 2)) for i, name in enumerate("qkv")}
    layers.save_safetensors(path, parts | {"other": np.ones(1)})
    found = layers.load_safetensors(path, {"in_proj_weight": ["q", "k", "v"], "first": "q"})
    assert found.keys() == {"in_proj_weight", "first"}
    assert_array_equal(found["in_proj_weight"], np.concatenate(list(parts.values())))
    assert_array_equal(found["first"], parts["q"])
    with pytest.raises(ValueError, match=r"mapping must name arrays of the file, got 'x'.*'k'"):
        layers.load_safetensors(path, {"first": "x"})


@pytest.mark.parametrize(
    ("mapping", "error"),
    [
        (["q"], TypeError),
        ({"first": None}, TypeError),
        ({"first": ["q", 3]}, TypeError),
        ({1: "q"}, TypeError),
        ({"first": []}, ValueError),
        ({"first": ["q", "x"]}, ValueError),
    ],
    ids=str,
)
def test_a_mapping_is_of_names(tmp_path, mapping, error):
    path = tmp_path / "model.safetensors"
    layers.save_safetensors(path, {"q": np.ones(2), "k": np.ones(2)})
    with pytest.raises(error, match=r"^mapping.* must "):
        layers.load_safetensors(path, mapping)


@pytest.mark.parametrize(
    "params",
    [
        [np.ones(2)],
        {1: np.ones(2)},
        {"q": [1.0]},
        {"q": np.ones(2, complex)},
        {"q": np.array(["a"])},
        {"q": np.array([None])},
    ],
    ids=str,
)
def test_only_arrays_by_name_are_saved(tmp_path, params):
    path = tmp_path / "model.safetensors"
    with pytest.raises(TypeError, match=r"^params.* must "):
        layers.save_safetensors(path, params)
    assert not path.exists()


@pytest.mark.parametrize("placed", [None, layers.Rotary(), layers.Alibi()], ids=str)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("name", STREAMS | PLACED | {"automatic": 0, "landmarks": 0})
def test_no_tokens_and_no_sequences(shape, name, placed):
    automatic, landmarks = layers.AutomaticAttention(), layers.LandmarkAttention(2, rng=0)
    others = {"automatic": automatic, "landmarks": landmarks}
    attention = (STREAMS | PLACED | others)[name]
    if isinstance(placed, layers.Alibi) and name in ("bounded", "rotated", *others):
        placed = None
    options = {"num_heads": HEADS, "attention": attention, "positions": placed}
    x = np.ones((*shape, DIM))
    params = layers.init_decoder(rng(), 1, DIM, HEADS, num_key_heads=2, dtype=np.float64)
    if name != "landmarks":
        assert layers.decoder(params, x, **options).shape == x.shape
    if name != "bounded":
        assert layers.encoder(params, x, **options).shape == x.shape
    if name not in others:
        lead, end = shape[:-1], layers.decoder(params, x, return_state=True, **options)[1]
        more = rng(1).standard_normal((*lead, 2, DIM))
        going_on = layers.decoder(params, more, initial_state=end, **options)
        assert going_on.shape == more.shape
        if not shape[-1]:
            assert_allclose(going_on, layers.decoder(params, more, **options), rtol=1e-12)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("placed", [None, layers.Rotary(), layers.Alibi()], ids=str)
@pytest.mark.parametrize("attention", [layers.SoftmaxAttention(), ELU], ids=["softmax", "elu"])
def test_no_tokens_have_gradient_zero(shape, attention, placed):
    params = model()
    options = {"num_heads": HEADS, "attention": attention, "positions": placed}
    tokens = np.zeros(shape, np.int64)
    out, pull = layers.language_model_vjp(params, tokens, **options)
    assert out.shape == (*shape, VOCABULARY)
    (grads,) = pull(out)
    assert {n: g.shape for n, g in grads.items()} == {n: p.shape for n, p in params.items()}
    assert not any(np.any(grad) for grad in grads.values())
    if shape[-1]:
        assert layers.generate(params, tokens, 4, **options).shape == (*shape[:-1], 4)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_small_integers_do_not_hold_all_tokens(dtype):
    """300 tokens, those given below 128: what is drawn, and the gradient, would wrap around."""
    params = layers.init_language_model(rng(), 300, 1, DIM, HEADS)
    tokens = np.arange(5, dtype=dtype)
    with pytest.raises(
        ValueError, match=f"dtype that holds all of 300 tokens, got {dtype.__name__}"
    ):
        layers.generate(params, tokens, 3, num_heads=HEADS, attention=ELU)
    table = {"weight": np.zeros((300, 2))}
    (grads,) = layers.embedding_vjp(table, tokens)[1](np.ones((5, 2)))
    assert_array_equal(grads["weight"][:, 0], np.arange(300) < 5)


def test_arrays_of_a_file_that_cannot_be_put_together(tmp_path):
    pytest.importorskip("safetensors", reason="files need the extra layers")
    path = tmp_path / "m.safetensors"
    header = {"w": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\x3c")
    with pytest.raises(ValueError, match="must hold arrays of NumPy's dtypes, got 'w'"):
        layers.load_safetensors(path)
    layers.save_safetensors(path, {"a": np.ones((2, 3)), "b": np.ones((2, 4))})
    for wanted in (["a", "b"], []):
        with pytest.raises(ValueError, match=r"mapping\['x'\] must name arrays that go behind"):
            layers.load_safetensors(path, {"x": wanted})


def test_what_is_no_safetensors_file(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match="text is not a safetensors file"):
        layers.load_safetensors(path)
    with pytest.raises(FileNotFoundError):
        layers.load_safetensors(tmp_path / "nothing")
    with pytest.raises(TypeError, match="must be an array of NumPy"):
        layers.save_safetensors(path, {"a": [1.0]})
    assert path.read_bytes() == b"not a model at all"


# Prompts of unlike lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("memory", [False, True])
def test_padded_prompts_go_on_as_they_would_alone(side, memory):
    draw = np.random.default_rng(0)
    kind = {"num_positions": 20, "has_memory": memory}
    params = layers.init_language_model(draw, 11, 2, 16, 4, **kind)
    lengths, width = [3, 5, 1, 3], 5
    places = np.arange(width)
    mask = np.array([places < n if side == "right" else places >= width - n for n in lengths])
    tokens = np.where(mask, draw.integers(0, 11, mask.shape), 0)
    of_memory = [draw.standard_normal((4, 6, 16), dtype=np.float32)] if memory else []
    seen = {"memory_mask": draw.random((4, 6)) < 0.7} if memory else {}
    options = {"num_heads": 4, "positions": layers.Alibi()}
    for stop in (None, 5):
        found = layers.generate(
            params, tokens, 9, *of_memory, key_mask=mask, stop=stop, **seen, **options
        )
        longest = 0
        for i in range(4):
            alone = {name: m[i] for name, m in seen.items()}
            given = (tokens[i][mask[i]], 9, *(m[i] for m in of_memory))
            new = layers.generate(params, *given, stop=stop, **alone, **options)
            assert_array_equal(found[i, : len(new)], new)
            assert_array_equal(found[i, len(new) :], stop)
            longest = max(longest, len(new))
        assert found.shape == (4, longest)
    mask[2] = False
    with pytest.raises(ValueError, match=r"key_mask must leave a token .* none of sequence 2"):
        layers.generate(params, tokens, 3, *of_memory, key_mask=mask, **options)
