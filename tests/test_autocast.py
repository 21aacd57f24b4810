"""Inside ``torch.autocast``: inputs are cast as torch casts them, and nothing inside is."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import diagnostics, feature_maps, layers, positions
from tests.attentions import maps

pytestmark = pytest.mark.frameworks

LENGTH, DIM, WIDTH = 40, 4, 3
PHI = feature_maps.EluFeatures()
POSITIVE = feature_maps.PositiveFeatures(DIM, 16, rng=0)
DTYPES = ["bfloat16", "float16"]
# What transformers' Llama gives: rotary leaves queries and keys in float32, values are narrow.
MIXED = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 1)]

# Arrays are unpacked into their places, which no type checker can follow.
lib: Any = linattn
linear = lib.linear_attention

torch: Any = None


@pytest.fixture(autouse=True)
def _torch() -> None:
    """Import torch when the first test runs, not when tests are collected."""
    globals()["torch"] = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def dtype(request: Any) -> Any:
    return getattr(torch, request.param)


every_dtype = pytest.mark.parametrize("dtype", DTYPES, indirect=True)


def tensors() -> tuple[Any, Any, Any]:
    """Queries, keys, and values of mean 10, which cancel in gradients."""
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 2, LENGTH, DIM)).astype(np.float32)
    value = (10 + rng.standard_normal((2, LENGTH, WIDTH))).astype(np.float32)
    return torch.asarray(query), torch.asarray(key), torch.asarray(value)


def gates() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    log_decay, beta = rng.random((2, 2, LENGTH)).astype(np.float32)
    return {"log_decay": torch.asarray(-log_decay), "beta": torch.asarray(beta)}


def bias() -> Any:
    return torch.asarray(np.random.default_rng(2).standard_normal((2, LENGTH)).astype(np.float32))


def flat(result: Any) -> list[Any]:
    """All tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for item in result for tensor in flat(item)]
    return []


def same(got: Any, want: Any) -> None:
    """Check that results have the same bits and dtypes, whatever they consist of."""
    got, want = flat(got), flat(want)
    assert [a.dtype for a in got] == [a.dtype for a in want]
    assert len(got) > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.detach().double().numpy(), b.detach().double().numpy())


def decoded(q: Any, k: Any, v: Any) -> Any:
    state = linattn.init_state(PHI, WIDTH, batch_shape=(2,), like=q)
    decoder = linattn.Decoder(PHI, state)
    outputs = []
    for i in range(4):
        token = q[:, i], k[:, i], v[:, i]
        output, state = lib.decode_step(*token, state, PHI)
        outputs += [output, decoder.step(*token)]
    return outputs, state, decoder.state


def by_states(q: Any, k: Any, v: Any) -> Any:
    empty = linattn.init_state(POSITIVE, WIDTH, batch_shape=(2,), like=q)
    halves = [
        lib.update_state(empty, k[:, rows], v[:, rows], POSITIVE, log_decay=-0.1)
        for rows in (slice(0, 20), slice(20, None))
    ]
    merged = linattn.merge_states(*halves)
    return halves, merged, linattn.read_state(q, merged, POSITIVE)


def merged_parts(q: Any, k: Any, v: Any) -> Any:
    parts = [
        lib.softmax_attention(q, k[:, rows], v[:, rows], return_log_normalizer=True)
        for rows in (slice(0, 10), slice(10, None))
    ]
    return lib.merge_outputs(parts)


def recurrent_steps(q: Any, k: Any, v: Any) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    state, outputs = torch.zeros(2, DIM, WIDTH, dtype=wide), []
    for i in range(3):
        at = {name: gate[:, i] for name, gate in gates().items()}
        output, state = lib.recurrence_step(
            q[:, i], k[:, i], v[:, i], state, update_rule="gated_delta", **at
        )
        outputs.append(output)
    return outputs, state


def bounded(q: Any, k: Any, v: Any) -> Any:
    stream = lib.CoresetAttention(8, block_size=4, rng=0)
    return stream.extend(q, k, v), stream.step(q[:, 0], k[:, 0], v[:, 0])


def interop() -> Any:
    return importlib.import_module("linattn.interop.torch")


STATE = {"return_state": True}
CALLS: dict[str, Any] = {
    "full": lambda *a: linear(*a, PHI, **STATE, return_log_normalizer=True),
    "causal": lambda *a: linear(*a, PHI, **STATE, is_causal=True, return_states_every=10),
    "random": lambda *a: linear(*a, POSITIVE, **STATE, is_causal=True, chunk_size=8),
    "biased": lambda *a: linear(*a, PHI, is_causal=True, key_bias=bias()),
    "decayed": lambda *a: linear(*a, PHI, **STATE, is_causal=True, log_decay=gates()["log_decay"]),
    "packed": lambda *a: linear(*a, PHI, **STATE, is_causal=True, cu_seqlens=[0, 3, 3, LENGTH]),
    "window": lambda *a: linear(*a, POSITIVE, exact_window=8),
    "numerators": lambda *a: linear(*a, PHI, normalize=False),
    "softmax": lambda *a: lib.softmax_attention(*a, is_causal=True, return_log_normalizer=True),
    "softmax-window": lambda *a: lib.softmax_attention(*a, local_window_size=4),
    "merged": merged_parts,
    "states": by_states,
    "decoding": decoded,
    "automatic": lambda *a: lib.attention(*a, rng=0),
    "coreset": bounded,
    "recurrence": lambda *a: lib.linear_recurrence(
        *a, update_rule="gated_delta", **gates(), **STATE
    ),
    "recurrence-step": recurrent_steps,
    "interop": lambda *a: interop().linear_attention(*a, PHI, is_causal=True, **STATE),
    "interop-softmax": lambda *a: interop().softmax_attention(*a, key_bias=bias()),
}


@pytest.mark.parametrize(
    ("mixed", "dtype"), list(zip(MIXED, 2 * DTYPES, strict=True)), indirect=["dtype"]
)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_inputs_that_were_cast_before(name, dtype, mixed):
    inputs = tensors()
    narrow = [array.to(dtype) for array in inputs]
    given = [narrow[i] if is_narrow else inputs[i] for i, is_narrow in enumerate(mixed)]
    with torch.autocast("cpu", dtype=dtype):
        got = CALLS[name](*given)
    assert flat(got)[0].dtype == (torch.float32 if name == "states" else dtype)
    same(got, CALLS[name](*narrow))


@pytest.mark.parametrize("name", CALLS)
def test_float64_is_not_cast(name):
    inputs = [array.double() for array in tensors()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = CALLS[name](*inputs)
    same(got, CALLS[name](*inputs))


def test_float64_among_narrower_inputs_is_an_error():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="one dtype"):
        linear(query, key, value.double(), PHI)


def test_a_nested_context_that_is_off_casts_nothing():
    inputs = tensors()
    off = torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), off:
        got = linear(*inputs, PHI)
    same(got, linear(*inputs, PHI))


def test_the_context_of_another_device_casts_nothing():
    inputs = tensors()
    torch.set_autocast_enabled("cuda", True)
    try:
        got = linear(*inputs, PHI)
    finally:
        torch.set_autocast_enabled("cuda", False)
    same(got, linear(*inputs, PHI))


def test_the_context_is_as_it_was_after_a_call_and_after_an_error():
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear(query, key, value, PHI)
        with pytest.raises(ValueError, match="one length"):
            linear(query, key[:, 1:], value, PHI)
        assert torch.is_autocast_enabled("cpu")
        assert (query @ query.mT).dtype == torch.bfloat16


def test_a_call_that_does_not_fit_says_so_inside_as_outside():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="positional"):
        linear(*tensors(), PHI, True)


# Gradients.

DIFFERENTIABLE = [
    *("full", "causal", "random", "biased", "decayed", "packed", "softmax", "softmax-window"),
    *("states", "decoding", "recurrence", "recurrence-step"),
    *("interop", "interop-softmax"),
]


def gradients(name: str, given: list[Any], forward: Any, backward: Any) -> tuple[Any, ...]:
    leaves = [array.clone().requires_grad_() for array in given]
    with forward:
        results = CALLS[name](*leaves)
    with backward:
        loss = sum((a.float() ** 2).sum() for a in flat(results) if a.requires_grad)
        found: tuple[Any, ...] = torch.autograd.grad(loss, leaves)
    return found


@pytest.mark.parametrize(
    ("is_inside", "dtype"),
    [(False, "bfloat16"), (True, "float16")],
    ids=["backward-outside", "backward-inside"],
    indirect=["dtype"],
)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_inputs_that_were_cast_before(name, dtype, is_inside):
    query, key, value = tensors()
    given = [query, key, value.to(dtype)]
    off, on = torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=dtype)
    got = gradients(name, given, on, on if is_inside else off)
    narrow = gradients(name, [array.to(dtype) for array in given], off, off)
    same(got, [a.to(b.dtype) for a, b in zip(narrow, given, strict=True)])


@pytest.mark.parametrize("name", ["interop", "interop-softmax"])
def test_backward_of_interop_inside_of_what_ran_forward_outside(name):
    given = list(tensors())
    off, on = torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)
    same(gradients(name, given, off, on), gradients(name, given, off, off))


def test_a_gradient_in_place_of_the_context_leaves_the_rest_of_the_graph_in_it():
    weight = torch.eye(WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear(*tensors(), PHI) @ weight
        output.float().sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert weight.grad.dtype == torch.float32


def test_gradients_of_gradients_inside():
    query, key, value = (array[0, :3] for array in tensors())

    def second(*given: Any) -> Any:
        leaf = given[0].clone().requires_grad_()
        loss = (linear(leaf, *given[1:], PHI).float() ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad((gradient.float() ** 2).sum(), leaf)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = second(query, key, value)
    want = second(*(array.bfloat16() for array in (query, key, value)))
    np.testing.assert_allclose(got, want.float(), rtol=0.02)


def test_functional_gradients_inside():
    query, key, value = tensors()

    def loss(query: Any, key: Any, value: Any) -> Any:
        return (linear(query, key, value, PHI).float() ** 2).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.grad(loss)(query, key, value)
    narrow = [array.bfloat16() for array in (query, key, value)]
    same(got, torch.func.grad(loss)(*narrow).float())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_calls_and_their_gradients_inside():
    query, key, value = tensors()
    compiled = torch.compile(lambda *a: linear(*a, PHI), backend="aot_eager")
    results = []
    for function in (compiled, lambda *a: linear(*a, PHI)):
        leaf = query.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = function(leaf, key, value)
        results.append((output, torch.autograd.grad((output.float() ** 2).sum(), leaf)[0]))
    for compiled_one, eager_one in zip(*results, strict=True):
        assert compiled_one.dtype == eager_one.dtype
        torch.testing.assert_close(compiled_one, eager_one, rtol=2.0**-6, atol=2.0**-6)


VJPS: dict[str, Any] = {
    "linear": lambda *a: lib.linear_attention_vjp(*a, PHI, is_causal=True, key_bias=bias()),
    "softmax": lambda *a: lib.softmax_attention_vjp(*a),
    "recurrence": lambda *a: lib.linear_recurrence_vjp(*a, update_rule="gated_delta", **gates()),
}


@pytest.mark.parametrize(
    ("is_inside", "dtype"),
    [(False, "float16"), (True, "bfloat16")],
    ids=["pullback-outside", "pullback-inside"],
    indirect=["dtype"],
)
@pytest.mark.parametrize("name", VJPS)
def test_pullbacks_are_those_of_inputs_that_were_cast_before(name, dtype, is_inside):
    query, key, value = tensors()
    narrow = [array.to(dtype) for array in (query, key, value)]
    with torch.autocast("cpu", dtype=dtype):
        output, pullback = VJPS[name](query, key, value.to(dtype))
    want_output, want_pullback = VJPS[name](*narrow)
    same(output, want_output)
    with torch.autocast("cpu", dtype=dtype, enabled=is_inside):
        got = pullback(grad_output=output.float())
    want = want_pullback(want_output)
    kinds = [query.dtype, key.dtype, dtype, *(array.dtype for array in want[3:])]
    same(got, [array.to(kind) for array, kind in zip(want, kinds, strict=True)])


@pytest.mark.parametrize("name", VJPS)
def test_a_pullback_from_outside_runs_inside(name):
    output, pullback = VJPS[name](*tensors())
    want = pullback(output)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = pullback(output)
    same(got, want)


# What is no attention is not cast: the same bits inside and outside.

MAPS: dict[str, Any] = {
    "elu": PHI,
    "positive": POSITIVE,
    **maps(DIM, 16, "hyperbolic", "fourier", "taylor", "softmax"),
    "normalized": feature_maps.RandomFourierFeatures(DIM, 16, normalize=True, rng=0),
    "polynomial": feature_maps.PolynomialFeatures(DIM, 4),
    "rotated": feature_maps.RotatedFeatures(feature_maps.EluFeatures(DIM)),
}
METHODS = ["query_features", "key_features", "kernel", "estimate", "variance"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MAPS)
def test_methods_of_maps_compute_as_outside(name, method):
    query, key, _ = tensors()
    given = [query, key][: 1 if method.endswith("features") else 2]
    function = getattr(MAPS[name], method)
    try:
        want = function(*given)
    except NotImplementedError:
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = function(*given)
    same(tuple(a for a in got if a is not None) if isinstance(got, tuple) else got, want)


def test_fits_positions_and_diagnostics_compute_as_outside():
    query, key, value = tensors()
    state = linear(query, key, value, POSITIVE, return_state=True)[1]

    def computed() -> list[Any]:
        fitted = feature_maps.LandmarkFeatures.fit(query, key, num_features=4, rng=0)
        error = diagnostics.output_error(query, state, POSITIVE)
        return [positions.rotary(query), fitted.estimate(query, key), error.variance, error.bias]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = computed()
    same([torch.as_tensor(a) for a in got], [torch.as_tensor(a) for a in computed()])


# Layers follow torch's: products give the dtype of the context, norms and sums float32.

WIDTH_OF_MODEL, HEADS, VOCABULARY = 16, 4, 11
ATTENTIONS = {
    "linear": layers.LinearAttention(PHI),
    "softmax": layers.SoftmaxAttention(),
}


def parameters(init: Any, *sizes: int, **options: Any) -> dict[str, Any]:
    drawn = init(np.random.default_rng(3), *sizes, **options)
    return {name: torch.asarray(array) for name, array in drawn.items()}


def activations() -> Any:
    rng = np.random.default_rng(4)
    return torch.asarray(rng.standard_normal((2, 12, WIDTH_OF_MODEL)).astype(np.float32))


def words() -> Any:
    return torch.asarray(np.random.default_rng(5).integers(0, VOCABULARY, (2, 12)))


@every_dtype
@pytest.mark.parametrize("norm", [layers.layer_norm, layers.rms_norm])
def test_norms_give_float32(norm, dtype):
    params = {"weight": torch.linspace(0.5, 2, WIDTH_OF_MODEL)}
    x = activations().to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        got = norm(params, x)
    same(got, norm(params, x.float()))


@pytest.mark.parametrize("is_inside", [False, True], ids=["pullback-outside", "pullback-inside"])
@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_gradients_of_an_encoder_have_the_dtypes_of_its_parameters(attention, is_inside):
    options: dict[str, Any] = {"num_heads": HEADS, "attention": attention, "is_causal": True}
    params = parameters(layers.init_encoder, 2, WIDTH_OF_MODEL, HEADS, norm="rms_norm")
    options["norm"] = "rms_norm"
    leaves = {name: array.clone().requires_grad_() for name, array in params.items()}
    on = {"dtype": torch.bfloat16, "enabled": is_inside}
    grad = torch.ones(2, 12, WIDTH_OF_MODEL) * torch.linspace(-1, 1, WIDTH_OF_MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, pullback = layers.encoder_vjp(params, activations(), **options)
        by_torch = layers.encoder(leaves, activations(), **options)
    with torch.autocast("cpu", **on):
        got, by_x = pullback(grad)
        found = dict(zip(leaves, torch.autograd.grad(by_torch, leaves.values(), grad), strict=True))
    want, want_by_x = layers.encoder_vjp(params, activations(), **options)[1](grad)
    same(output, by_torch)
    for a, b, c in [(by_x, want_by_x, by_x), *((got[n], want[n], found[n]) for n in want)]:
        assert a.dtype == torch.float32
        scale = float(b.abs().max()) + 1e-3
        np.testing.assert_allclose(a / scale, b / scale, atol=0.1)
        np.testing.assert_allclose(c / scale, b / scale, atol=0.1)


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_language_model_streams_as_it_computes_whole(attention):
    options: dict[str, Any] = {"num_heads": HEADS, "attention": attention}
    params = parameters(layers.init_language_model, VOCABULARY, 2, WIDTH_OF_MODEL, HEADS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = layers.language_model(params, words(), **options)
        _, state = layers.language_model(params, words()[:, :10], return_state=True, **options)
        parts = []
        for i in (10, 11):
            one = words()[:, i : i + 1]
            part, state = layers.language_model(
                params, one, initial_state=state, return_state=True, **options
            )
            parts.append(part)
        made = layers.generate(params, words(), 3, temperature=0, **options)
    assert whole.dtype == torch.bfloat16
    assert made.shape == (2, 3)
    np.testing.assert_allclose(torch.cat(parts, dim=1).float(), whole[:, 10:].float(), atol=0.1)


# Baselines.
