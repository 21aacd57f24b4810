"""Layers of float16 and bfloat16 accumulate in float32."""

# Options by name, and params as dictionaries.
# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, operator, union-attr"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from linattn import layers
from tests.test_layers import CASES, call, rng

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
# Layers round what they hand on, a dozen times one after the other in a model.
ROUNDINGS = {"linear": 1, "layer_norm": 1, "rms_norm": 1, "feed_forward": 1, "embedding": 1}

libraries = pytest.mark.parametrize(
    ("library", "dtype", "size"),
    [
        *(("numpy", "float16", size) for size in (0.01, 1, 100)),
        ("numpy", "bfloat16", 100),
        pytest.param("torch", "float16", 100, marks=pytest.mark.frameworks),
        pytest.param("torch", "bfloat16", 0.01, marks=pytest.mark.frameworks),
    ],
)


def narrowed(library, dtype, array):
    """The array in this dtype, and the same numbers in float64."""
    if array.dtype.kind != "f":
        return made(library, array), array
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    rounded = array.astype(kind)
    if library == "torch":
        torch = pytest.importorskip("torch")
        tensor = torch.asarray(rounded.astype(np.float32)).to(getattr(torch, dtype))
        return tensor, rounded.astype(np.float64)
    return made(library, rounded), rounded.astype(np.float64)


def made(library, array):
    return pytest.importorskip("torch").asarray(array) if library == "torch" else array


def wide(array):
    return np.asarray(array.float() if hasattr(array, "float") else array).astype(np.float64)


@libraries
@pytest.mark.parametrize("case", [n for n in CASES if n != "sinusoidal"])
def test_layers_and_gradients_are_those_of_float64(library, dtype, case, size):
    name, params, inputs, options = CASES[case]
    # These grow by the square, or lose features below the range of float32.
    squares = ("squared_relu", "swiglu", "geglu", "geglu_tanh", "elu", "decay")
    size = min(size, 10) if case in squares else size
    inputs = [size * a if a.dtype.kind == "f" else a for a in inputs]
    pairs = {n: narrowed(library, dtype, array) for n, array in params.items()}
    given = [narrowed(library, dtype, array) for array in inputs]
    masks = {n: made(library, o) if "mask" in n else o for n, o in options.items()}
    out, pull = call(
        name, {n: a for n, (a, _) in pairs.items()}, [a for a, _ in given], masks, "_vjp"
    )
    want, pull_wide = call(
        name, {n: a for n, (_, a) in pairs.items()}, [a for _, a in given], options, "_vjp"
    )
    grad, grad_wide = narrowed(library, dtype, rng(5).standard_normal(want.shape))
    grads, *by_inputs = pull(grad)
    wanted, *wanted_inputs = pull_wide(grad_wide)
    found = [out, *grads.values(), *by_inputs]
    tolerance = ROUNDINGS.get(name, 50) * EPS[dtype]
    rights = [want, *wanted.values(), *wanted_inputs]
    # What cancels has the rounding of what it was made of.
    floor = 1e-2 * max(np.abs(right).max() for right in rights[1:]) + 1e-5
    for array, right in zip(found, rights, strict=True):
        assert str(array.dtype).endswith(dtype)
        atol = tolerance * max(np.abs(right).max(), floor)
        assert_allclose(wide(array), right, rtol=tolerance, atol=atol)


def test_what_the_norms_square_is_not_lost():
    weight = {"weight": np.ones(4, np.float16)}
    x = np.full((1, 4), 300, np.float16) * np.array([1, -1, 1, -1], np.float16)
    for norm in (layers.rms_norm, layers.layer_norm):
        for scale in (1e-4, 1, 200):
            out = norm(weight, x * np.float16(scale), eps=1e-12)
            assert_allclose(out, np.sign(x), atol=2e-3)
