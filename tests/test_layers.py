"""Layers: array libraries, gradients by finite differences, options, mistakes."""

# Options by name, and params as dictionaries.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, no-untyped-call"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from linattn import feature_maps, layers

ELU = layers.LinearAttention(feature_maps.EluFeatures())
FAVOR = layers.LinearAttention(feature_maps.PositiveFeatures(2, num_features=8, rng=0))
DIM, HEADS = 8, 4


def rng(seed=0):
    return np.random.default_rng(seed)


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
    for activation in ("relu", "gelu", "gelu_tanh", "swiglu"):
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
    options["activation"] = "gelu"
    found["tied"] = ("language_model", params, [tokens], options)
    kind = {"has_memory": True, **f64}
    params = normal(layers.init_language_model(rng(), 7, 1, DIM, HEADS, **kind))
    found["head"] = ("language_model", params, [tokens, memory[:, :3]], options)
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
        h = 1e-3
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
    name, params, inputs, options = CASES[case]
    if xp.name == "dask":
        pytest.skip("dask: its matmul of chunked axes of other lengths")
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
