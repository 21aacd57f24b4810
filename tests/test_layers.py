"""Layers: array libraries, gradients by finite differences, options, mistakes."""

# Options by name, and params as dictionaries.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, operator, union-attr"

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import feature_maps, layers, positions, reference

ELU = layers.LinearAttention(feature_maps.EluFeatures())
FAVOR = layers.LinearAttention(feature_maps.PositiveFeatures(2, num_features=8, rng=0))
DIM, HEADS = 8, 4


ACTIVATIONS = ["relu", "squared_relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
ACTIVATIONS += ["swiglu", "geglu", "geglu_tanh"]


def rng(seed=0):
    return np.random.default_rng(seed)


PLACES: dict[str, dict[str, Any]] = {
    "norms of outputs": {"norm_output": True},
    "norms on both sides": {"norm_output": True, "norm_first": True},
    "side by side": {"parallel": True, "norm_first": True, "activation": "gelu"},
}


def normal(params, seed=0):
    """Draw other parameters of the same shapes, so that no bias is 0 and no scale is 1."""
    draw = rng(seed)
    return {name: draw.normal(0, 0.5, array.shape) for name, array in params.items()}


def each_array(xp, arrays, dtype="float64"):
    return {name: xp.array(array, dtype) for name, array in arrays.items()}


# Each layer: parameters, inputs and options, as (function, params, inputs, options) ---------------


def cases():
    x, memory = rng(1).standard_normal((2, 2, 5, DIM))
    tokens = rng(2).integers(0, 7, (2, 5))
    f64 = {"dtype": np.float64}
    linear = normal(layers.init_linear(rng(), DIM, 6, **f64))
    norm = normal(layers.init_norm(DIM, **f64))
    table = normal(layers.init_embedding(rng(), 7, DIM, num_positions=6, **f64))
    heads = normal(layers.init_multi_head_attention(rng(), DIM, HEADS, num_key_heads=2, **f64))
    mask = np.array([[True, True, False, True, True], [True, False, True, True, False]])
    found = {
        "linear": ("linear", linear, [x], {}),
        "linear, no bias": ("linear", {"weight": linear["weight"]}, [x], {}),
        "layer_norm": ("layer_norm", norm, [x], {}),
        "rms_norm": ("rms_norm", {"weight": norm["weight"]}, [x], {"eps": 1e-5}),
        "embedding": ("embedding", table, [tokens], {"start": 1}),
        "sinusoidal": ("embedding", table, [tokens], {"positions": "sinusoidal"}),
        "grouped heads": ("multi_head_attention", heads, [x], {"num_heads": HEADS}),
        "memory": (
            "multi_head_attention",
            heads,
            [x, memory[:, :3]],
            {"num_heads": HEADS, "key_mask": mask[:, :3]},
        ),
    }
    for activation in ACTIVATIONS:
        params = normal(layers.init_feed_forward(rng(), DIM, 6, activation=activation, **f64))
        found[activation] = ("feed_forward", params, [x], {"activation": activation})
    attentions = {
        "softmax": layers.SoftmaxAttention(),
        "window": layers.SoftmaxAttention(window=2),
        "elu": ELU,
        "decay": layers.LinearAttention(feature_maps.EluFeatures(), log_decay=[-0.1, 0, -0.3, -1]),
        "favor": FAVOR,
    }
    for name, attention in attentions.items():
        options = {"num_heads": HEADS, "attention": attention, "is_causal": True}
        if name in ("softmax", "elu"):
            options["positions"] = layers.Alibi()
        elif name != "decay":
            options["positions"] = layers.Rotary()
        found[name] = ("multi_head_attention", heads, [x], options)
    for first in (False, True):
        options = {"num_heads": HEADS, "attention": FAVOR, "norm_first": first}
        options |= {"key_mask": mask, "activation": "swiglu", "norm": "rms_norm"}
        kind = {"hidden_dim": 6, "activation": "swiglu", "norm": "rms_norm", **f64}
        params = normal(layers.init_encoder(rng(), 2, DIM, HEADS, final_norm=first, **kind))
        found[f"encoder, {first}"] = ("encoder", params, [x], options)
        options = {"num_heads": HEADS, "norm_first": first, "memory_mask": mask[:, :3]}
        options["activation"] = "gelu"
        params = layers.init_decoder(rng(), 2, DIM, HEADS, has_memory=True, final_norm=first, **f64)
        found[f"decoder, {first}"] = ("decoder", normal(params), [x, memory[:, :3]], options)
    kind = {"tied": True, "num_positions": 5, **f64}
    params = normal(layers.init_language_model(rng(), 7, 1, DIM, HEADS, **kind))
    options = {"num_heads": HEADS, "attention": FAVOR, "positions": layers.Rotary()}
    options |= {"activation": "gelu", "embedding_scale": 3.0}
    found["tied"] = ("language_model", params, [tokens], options)
    kind = {"has_memory": True, **f64}
    params = normal(layers.init_language_model(rng(), 7, 1, DIM, HEADS, **kind))
    found["head"] = ("language_model", params, [tokens, memory[:, :3]], options)
    return found | cases_of_norms(heads, x, memory[:, :3], mask)


def cases_of_norms(heads, x, memory, mask):
    """Norms of queries and keys, and each place of the norms of a layer."""
    found: dict[str, Any] = {}
    f64 = {"dtype": np.float64}
    kind = {"hidden_dim": 6, "num_key_heads": 2, "qk_norm": True, **f64}
    for name, chosen in PLACES.items():
        both = chosen.get("norm_first", False) and "norm_output" in chosen
        params = normal(layers.init_encoder(rng(), 2, DIM, HEADS, norm_output=both, **kind))
        found[name] = ("encoder", params, [x], {"num_heads": HEADS, "key_mask": mask, **chosen})
    shared = {n: p for n, p in params.items() if "norm2" not in n}
    found["one norm"] = ("encoder", shared, [x], {"num_heads": HEADS, **chosen})
    wide = {"q_norm.weight": rng().random(DIM), "k_norm.weight": rng().random(DIM // 2)}
    options = {"num_heads": HEADS, "eps": 1e-3}
    found["norms of all heads"] = ("multi_head_attention", heads | wide, [x], options)
    memory_only = [x, memory]
    found["norms, memory"] = ("multi_head_attention", heads | wide, memory_only, options)
    return found


CASES = cases()


def call(name, params, inputs, options, suffix=""):
    return getattr(layers, name + suffix)(params, *inputs, **options)


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case):
    name, params, inputs, options = CASES[case]
    out, pullback = call(name, params, inputs, options, "_vjp")
    assert_allclose(out, call(name, params, inputs, options), rtol=1e-13, atol=1e-13)
    draw = rng(3)
    grad = draw.standard_normal(out.shape)
    grads, *by_inputs = pullback(grad)
    assert {n: g.shape for n, g in grads.items()} == {n: p.shape for n, p in params.items()}
    smooth = [array for array in inputs if array.dtype.kind == "f"]
    assert [g.shape for g in by_inputs] == [array.shape for array in smooth]

    def loss(step, ways_params, ways):
        moved = {n: p + step * ways_params.get(n, 0) for n, p in params.items()}
        steps = iter(ways)
        there = [a + step * next(steps) if a.dtype.kind == "f" else a for a in inputs]
        return np.sum(call(name, moved, there, options) * grad)

    def slope(*ways):
        h = 3e-4
        near, far = (loss(s, *ways) - loss(-s, *ways) for s in (h, 2 * h))
        return (8 * near - far) / (12 * h)

    still = [np.zeros_like(array) for array in smooth]
    for n, g in grads.items():
        way = draw.standard_normal(g.shape)
        assert np.sum(g * way) == pytest.approx(slope({n: way}, still), rel=1e-7, abs=1e-8)
    ways = [draw.standard_normal(array.shape) for array in smooth]
    wanted = sum(np.sum(g * way) for g, way in zip(by_inputs, ways, strict=True))
    assert wanted == pytest.approx(slope({}, ways), rel=1e-7, abs=1e-8)


# Array libraries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case", ["grouped heads", "gelu", "decoder, True", "encoder, False", "head"]
)
def test_every_library_gives_the_same(xp, case, dtype):
    if xp.name == "dask" and (case not in ("gelu", "grouped heads") or dtype == "float32"):
        pytest.skip("dask: the graph of a whole model takes a minute to build")
    name, params, inputs, options = CASES[case]
    here = [xp.array(a, dtype if a.dtype.kind == "f" else None) for a in inputs]
    options = {
        key: xp.array(value) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }
    there = each_array(xp, params, dtype)
    out, pullback = call(name, there, here, options, "_vjp")
    wanted, pull = call(*CASES[case], "_vjp")
    xp.assert_like(out, next(iter(there.values())), shape=wanted.shape)
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-11}
    assert_allclose(xp.numpy(out), wanted, **close)
    grads, *by_inputs = pullback(out)
    grads_wanted, *by_inputs_wanted = pull(wanted)
    for n, g in grads.items():
        xp.assert_like(g, there[n])
        assert_allclose(xp.numpy(g), grads_wanted[n], **close, err_msg=n)
    for g, w in zip(by_inputs, by_inputs_wanted, strict=True):
        assert_allclose(xp.numpy(g), w, **close)


# What attention is asked for ---------------------------------------------------------------------


def heads_of(x, params):
    """Queries, keys and values of heads, the obvious way: (batch, heads, L, d)."""
    q, k, v = np.split(x @ params["in_proj_weight"].T + params["in_proj_bias"], 3, axis=-1)
    return [a.reshape(*x.shape[:-1], HEADS, -1).swapaxes(-2, -3) for a in (q, k, v)]


def around(params, heads):
    """Merge heads and project out."""
    merged = heads.swapaxes(-2, -3)
    merged = merged.reshape(*merged.shape[:-2], DIM)
    return merged @ params["out_proj.weight"].T + params["out_proj.bias"]


MAP = feature_maps.PositiveFeatures(DIM // HEADS, num_features=16, rng=0)
DIRECT = {
    "softmax": (
        layers.SoftmaxAttention(scale=0.3),
        lambda q, k, v, **o: linattn.softmax_attention(q, k, v, scale=0.3, **o),
    ),
    "window": (
        layers.SoftmaxAttention(window=4),
        lambda q, k, v, **o: linattn.softmax_attention(q, k, v, local_window_size=4, **o),
    ),
    "linear": (
        layers.LinearAttention(MAP),
        lambda q, k, v, **o: linattn.linear_attention(q, k, v, MAP, **o),
    ),
    "linear and window": (
        layers.LinearAttention(MAP, exact_window=4),
        lambda q, k, v, **o: linattn.linear_attention(q, k, v, MAP, exact_window=4, **o),
    ),
    "decay": (
        layers.LinearAttention(MAP, log_decay=-0.2),
        lambda q, k, v, **o: linattn.linear_attention(q, k, v, MAP, log_decay=-0.2, **o),
    ),
    "automatic": (
        layers.AutomaticAttention(rng=0),
        lambda q, k, v, **o: linattn.attention(q, k, v, rng=0, **o),
    ),
    "bounded": (
        layers.BoundedAttention(8, block_size=4, rng=0),
        lambda q, k, v, key_mask, is_causal: linattn.CoresetAttention(
            8, block_size=4, rng=0
        ).extend(q, k, v, key_mask=key_mask),
    ),
    "landmarks": (
        layers.LandmarkAttention(5, exact_window=4, exact_clusters=2, rng=0),
        lambda q, k, v, key_mask, is_causal: linattn.linear_attention(
            q,
            k,
            v,
            feature_maps.LandmarkFeatures.fit(q, k, num_features=5, key_mask=key_mask, rng=0),
            key_mask=key_mask,
            exact_window=4,
            exact_clusters=2,
        ),
    ),
}


@pytest.mark.parametrize("name", DIRECT)
def test_heads_compute_what_they_are_asked_for(name):
    attention, direct = DIRECT[name]
    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS))
    x, mask = rng(1).standard_normal((2, 40, DIM)), rng(2).random((2, 40)) < 0.8
    is_causal = name != "landmarks"
    options = {"num_heads": HEADS, "attention": attention, "is_causal": is_causal}
    found = layers.multi_head_attention(params, x, key_mask=mask, **options)
    heads = direct(*heads_of(x, params), key_mask=mask[:, None], is_causal=is_causal)
    assert_allclose(found, around(params, heads), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "linear", "decay"])
def test_positions_are_those_of_the_oracle(name, is_causal):
    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS))
    x = rng(1).standard_normal((2, 9, DIM))
    q, k, v = heads_of(x, params)
    distance = abs(np.arange(9)[:, None] - np.arange(9))
    slopes = positions.alibi_slopes(HEADS)[:, None, None]
    attention = layers.SoftmaxAttention() if name == "softmax" else DIRECT[name][0]
    own = -0.2 * distance if name == "decay" else np.zeros((9, 9))

    def wanted(q, k, bias):
        if name == "softmax":
            out = reference.softmax_attention(q, k, v, is_causal=is_causal, bias=bias)
        else:
            out = reference.kernel_attention(q, k, v, MAP.estimate, is_causal=is_causal, bias=bias)
        return around(params, out)

    options = {"num_heads": HEADS, "attention": attention, "is_causal": is_causal}
    found = layers.multi_head_attention(params, x, positions=layers.Alibi(), **options)
    assert_allclose(found, wanted(q, k, own - slopes * distance), rtol=1e-10, atol=1e-12)
    rotary = layers.Rotary(base=100, interleaved=True)
    found = layers.multi_head_attention(params, x, positions=rotary, **options)
    q, k = (positions.rotary(a, base=100, interleaved=True) for a in (q, k))
    assert_allclose(found, wanted(q, k, own), rtol=1e-10, atol=1e-12)


def test_grouped_heads_are_repeated_keys():
    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS, num_key_heads=2))
    dim, x = DIM // HEADS, rng(1).standard_normal((2, 9, DIM))
    repeated = dict(params)
    for name in ("in_proj_weight", "in_proj_bias"):
        queries, rest = np.split(params[name], [DIM])
        groups = rest.reshape(4, dim, *rest.shape[1:]).repeat(2, axis=0)
        repeated[name] = np.concatenate([queries, groups.reshape(-1, *rest.shape[1:])])
    for attention in (layers.SoftmaxAttention(), ELU, layers.LandmarkAttention(4, rng=0)):
        options = {"num_heads": HEADS, "attention": attention}
        found = layers.multi_head_attention(params, x, **options)
        wanted = layers.multi_head_attention(repeated, x, **options)
        assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_landmarks_are_constants_in_the_gradient():
    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS))
    x = rng(1).standard_normal((9, DIM))
    query, key, _ = heads_of(x, params)
    phi = feature_maps.LandmarkFeatures.fit(query, key, num_features=4, rng=0)
    results = []
    for attention in (layers.LandmarkAttention(4, rng=0), layers.LinearAttention(phi)):
        options = {"num_heads": HEADS, "attention": attention}
        out, pullback = layers.multi_head_attention_vjp(params, x, **options)
        results.append((out, pullback(out)))
    (out, (grads, by_x)), (wanted, (wanted_grads, wanted_by_x)) = results
    assert_allclose(out, wanted, rtol=1e-12)
    assert_allclose(by_x, wanted_by_x, rtol=1e-9, atol=1e-12)
    for name, gradient in grads.items():
        assert_allclose(gradient, wanted_grads[name], rtol=1e-9, atol=1e-12)


def test_an_attention_of_your_own():
    class Uniform(layers.Attention):
        """Every key alike."""

        def __call__(self, query, key, value, scope):
            return np.broadcast_to(value.mean(axis=-2, keepdims=True), query.shape)

    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS))
    x = rng(1).standard_normal((9, DIM))
    found = layers.multi_head_attention(params, x, num_heads=HEADS, attention=Uniform())
    value = heads_of(x, params)[2]
    wanted = around(params, np.broadcast_to(value.mean(-2, keepdims=True), value.shape))
    assert_allclose(found, wanted, rtol=1e-12)
    with pytest.raises(NotImplementedError, match="must have gradients here, and has none"):
        layers.multi_head_attention_vjp(params, x, num_heads=HEADS, attention=Uniform())


def test_each_layer_may_have_its_attention():
    params = normal(layers.init_encoder(rng(), 2, DIM, HEADS, dtype=np.float64))
    x = rng(1).standard_normal((9, DIM))
    found = layers.encoder(params, x, num_heads=HEADS, attention=[ELU, FAVOR])
    for i, attention in enumerate((ELU, FAVOR)):
        prefix = f"layers.{i}."
        part = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
        x = layers.encoder_layer(part, x, num_heads=HEADS, attention=attention)
    assert_allclose(found, x, rtol=1e-12)


@pytest.mark.parametrize("size", [DIM // HEADS, DIM])
def test_norms_of_heads_have_their_eps(size):
    """They undo a factor on queries and keys, if eps has its square."""
    params = normal(layers.init_multi_head_attention(rng(), DIM, HEADS, dtype=np.float64))
    params |= {f"{side}_norm.weight": rng(3).random(size) for side in "qk"}
    x, factors = rng(1).standard_normal((5, DIM)), np.repeat([10.0, 10.0, 1.0], DIM)
    larger = params | {
        "in_proj_weight": factors[:, None] * params["in_proj_weight"],
        "in_proj_bias": factors * params["in_proj_bias"],
    }
    found = layers.multi_head_attention(larger, x, num_heads=HEADS, eps=50.0)
    wanted, other = (
        layers.multi_head_attention(params, x, num_heads=HEADS, eps=eps) for eps in (0.5, 50.0)
    )
    assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    assert np.abs(found - other).max() > 1e-6


def test_a_decoder_layer_is_its_sublayers_with_its_options():
    """Norms of heads too, in attention to a memory as in attention to itself."""
    kind: Any = {"has_memory": True, "qk_norm": True, "dtype": np.float64}
    params = normal(layers.init_decoder_layer(rng(), DIM, HEADS, **kind))
    (x, memory), options = rng(2).standard_normal((2, 3, DIM)), {"num_heads": HEADS, "eps": 0.5}
    found, wanted = layers.decoder_layer(params, x, memory, **options), x
    for i, (prefix, *more) in enumerate((("self_attn.",), ("multihead_attn.", memory), ("",)), 1):
        own = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
        if prefix:
            kind = options | {"is_causal": not more}
            wanted = wanted + layers.multi_head_attention(own, wanted, *more, **kind)
        else:
            own = {n: p for n, p in own.items() if n.startswith("linear")}
            wanted = wanted + layers.feed_forward(own, wanted)
        norm = {name: params[f"norm{i}.{name}"] for name in ("weight", "bias")}
        wanted = layers.layer_norm(norm, wanted, eps=0.5)
    assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_each_layer_may_have_its_positions():
    params = normal(layers.init_encoder(rng(), 2, DIM, HEADS, dtype=np.float64))
    places = [layers.Rotary(), layers.Rotary(base=7.0, interleaved=True)]
    wanted = X
    for i, place in enumerate(places):
        of_layer = {n.removeprefix(f"layers.{i}."): p for n, p in params.items() if f".{i}." in n}
        wanted = layers.encoder_layer(of_layer, wanted, num_heads=HEADS, positions=place)
    out = layers.encoder(params, X, num_heads=HEADS, positions=places)
    assert_allclose(out, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="positions must be one, or one for each of the 2 layers"):
        layers.encoder(params, X, num_heads=HEADS, positions=places[:1])


def test_gelu_is_right_to_its_tail():
    x = np.concatenate([np.linspace(-30, 10, 1001), [0.0, -0.0, -1e-300, 1e-8]])
    eye = {"linear1.weight": np.eye(1), "linear2.weight": np.eye(1)}
    wanted = [0.5 * t * math.erfc(-t / math.sqrt(2)) for t in x]
    found = layers.feed_forward(eye, x[:, None], activation="gelu")[:, 0]
    assert_allclose(found, wanted, rtol=1e-12, atol=1e-300)
    narrow = {name: array.astype(np.float32) for name, array in eye.items()}
    found = layers.feed_forward(narrow, x[:, None].astype(np.float32), activation="gelu")[:, 0]
    assert_allclose(found, wanted, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_take_numbers_of_any_size(activation):
    params, is_gated = {f"linear{i}.weight": np.eye(1) for i in (1, 2, 3)}, "glu" in activation
    if not is_gated:
        del params["linear3.weight"]
    x = np.array([[-1e5], [-800.0], [800.0], [1e5], [np.nan]])
    out, pullback = layers.feed_forward_vjp(params, x, activation=activation)
    wanted = np.where(x < 0, 0, x * x if is_gated or activation == "squared_relu" else x)
    assert_allclose(out, wanted, atol=1e-12)
    assert_array_equal(np.isfinite(pullback(np.ones_like(out))[1][:-1]), True)


# Parameters --------------------------------------------------------------------------------------


def test_parameters_are_drawn_from_an_explicit_generator():
    first, again = (layers.init_language_model(rng(5), 7, 2, DIM, HEADS) for _ in range(2))
    assert first.keys() == again.keys()
    for name, array in first.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, again[name])
    with pytest.raises(TypeError, match=r"rng must be a numpy.random.Generator, got int"):
        layers.init_linear(0, 3, 4)


def test_what_is_drawn_has_the_variance_it_should():
    x = rng(1).standard_normal((4096, 64))
    assert 0.8 < layers.linear(layers.init_linear(rng(), 64, 64), np.float32(x)).var() < 1.2
    table = layers.init_embedding(rng(), 100, 64, num_positions=5, scale=0.5)
    assert table["weight"].std() == pytest.approx(0.5, rel=0.05)
    assert table["position.weight"].shape == (5, 64)


def test_parameters_of_a_layer_have_the_names_of_torch():
    names = layers.init_decoder(rng(), 1, DIM, HEADS, has_memory=True, final_norm=True)
    wanted = {f"layers.0.norm{i}.{part}" for i in (1, 2, 3) for part in ("weight", "bias")}
    wanted |= {f"layers.0.linear{i}.{part}" for i in (1, 2) for part in ("weight", "bias")}
    for heads in ("self_attn", "multihead_attn"):
        wanted |= {f"layers.0.{heads}.{part}" for part in ("in_proj_weight", "in_proj_bias")}
        wanted |= {f"layers.0.{heads}.out_proj.{part}" for part in ("weight", "bias")}
    assert names.keys() == wanted | {"norm.weight", "norm.bias"}


# Mistakes ----------------------------------------------------------------------------------------

X = np.ones((2, 3, DIM))
W2, NARROW = {"linear2.weight": np.ones((DIM, 5))}, {"norm2.bias": np.ones(DIM, np.float32)}
DECAY_OF_3 = {"attention": layers.LinearAttention(feature_maps.EluFeatures(), [-1.0] * 3)}
INTOLERANT = {"attention": layers.AutomaticAttention(tolerance=-1.0)}
BOUNDED = {"attention": layers.BoundedAttention()}
SLOPED = {"attention": layers.LandmarkAttention(), "positions": layers.Alibi()}


def layer_params(**change):
    """Parameters of an encoder layer, with one changed, or left out where it is None."""
    params = layers.init_encoder_layer(rng(), DIM, HEADS, dtype=np.float64) | change
    return {name: array for name, array in params.items() if array is not None}


@pytest.mark.parametrize(
    ("error", "message", "params", "options"),
    [
        (ValueError, r"have 'linear2.weight', got 'linear2.bias'", {"linear2.weight": None}, {}),
        (ValueError, r"got 'gate.weight'; an option", {"gate.weight": np.ones(3)}, {}),
        (ValueError, r"params\['linear2.weight'\] must have a last axis of 32", W2, {}),
        (ValueError, r"x and params\['norm2.bias'\] must have one dtype", NARROW, {}),
        (TypeError, r"params\['norm1.weight'\] must be an array", {"norm1.weight": [1.0]}, {}),
        (ValueError, "num_heads must cut the projections into heads, got 3", {}, {"num_heads": 3}),
        (ValueError, "num_heads must be at least 1, got 0", {}, {"num_heads": 0}),
        (TypeError, "unexpected keyword argument 'heads'", {}, {"heads": 4}),
        (
            TypeError,
            r"attention must be one of linattn.layers, .*got 'elu'",
            {},
            {"attention": "elu"},
        ),
        (TypeError, r"positions must be one of linattn.layers", {}, {"positions": "rotary"}),
        (
            ValueError,
            "activation must be one of relu, squared_relu, gelu",
            {},
            {"activation": "tanh"},
        ),
        (ValueError, "params must have 'linear3.weight'", {}, {"activation": "swiglu"}),
        (ValueError, "norm must be one of layer_norm, rms_norm", {}, {"norm": "batch"}),
        (ValueError, "norm_first must be True with parallel", {}, {"parallel": True}),
        (ValueError, "eps must be a positive finite number", {}, {"eps": 0.0}),
        (ValueError, r"key_mask must have shape \(3,\)", {}, {"key_mask": np.ones((2, 4), bool)}),
        (TypeError, "key_mask must be boolean", {}, {"key_mask": np.ones((2, 3))}),
        (ValueError, r"log_decay must be a number or one for each of the 4 heads", {}, DECAY_OF_3),
        (NotImplementedError, "is causal, got is_causal=False", {}, BOUNDED),
        (ValueError, "tolerance must be a positive", {}, INTOLERANT),
        (ValueError, r"positions must not be Alibi\(\) with LandmarkAttention", {}, SLOPED),
    ],
)
def test_mistakes(error, message, params, options):
    with pytest.raises(error, match=message):
        layers.encoder_layer(layer_params(**params), X, **({"num_heads": HEADS} | options))


def public_functions():
    found = {name: getattr(layers, name) for name in layers.__all__ if name[0].islower()}
    return {n: f for n, f in found.items() if "safetensors" not in n}


@pytest.mark.parametrize("name", public_functions())
def test_an_option_that_there_is_not_is_named_beside_those_that_there_are(name):
    function = public_functions()[name]
    wanted = inspect.signature(function).parameters
    with pytest.raises(TypeError, match=rf"^{name}\(\) got .* 'dropout'; it takes ") as error:
        function(dropout=0.1)
    listed = str(error.value).partition("it takes ")[2].split(", ")
    assert set(wanted) - {"options"} <= set(listed)
    if "options" in wanted:
        assert {"activation", "norm"} <= set(listed)


def test_mistakes_are_told_with_the_whole_name():
    params = layers.init_encoder(rng(), 2, DIM, HEADS, dtype=np.float64)
    del params["layers.1.self_attn.in_proj_weight"]
    with pytest.raises(ValueError, match=r"have 'layers.1.self_attn.in_proj_weight'"):
        layers.encoder(params, X, num_heads=HEADS)
    params = {n: p for n, p in params.items() if not n.startswith("layers.0")}
    with pytest.raises(ValueError, match=r"without a gap, got no 'layers.0'"):
        layers.encoder(params, X, num_heads=HEADS)
    with pytest.raises(TypeError, match="params must be a dictionary of arrays by name, got list"):
        layers.linear([np.ones((3, DIM))], X)


def test_a_gradient_of_another_shape():
    params = layer_params()
    _, pullback = layers.encoder_layer_vjp(params, X, num_heads=HEADS)
    with pytest.raises(ValueError, match="grad_output must have the shape of output"):
        pullback(np.ones((2, 3, 1)))
