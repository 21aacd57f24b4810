"""Gradients in float32 against float64, of all maps, at sizes and scales that nobody chose.

`pytest -m fuzz` runs this file, in about two minutes; any other run leaves it out.

A row of a gradient is right if it is finite and its error is below 1e-4 of its size, or below what
float32 cannot help. That is what the same gradient in float64 changes by if its inputs are rounded
to float32; and, since `dq = sum_j a_j g.(v_j - out) grad log w_j` is a sum of terms of which there
may be next to nothing left, a few roundings of such a term: of 1, and of an exponent where features
are exponentials, times `|g| |v|` and the slope of log features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import linattn
from linattn import feature_maps

pytestmark = pytest.mark.fuzz

Floats = NDArray[np.float64]

TOLERANCE = 1e-4
ROUNDINGS = 30
"""What rounding each input once does, so often: intermediate results are rounded too."""

TERMS = 6
"""What rounding each term of a sum once does: 5.4 on a processor without AVX-512."""

EPS = 2.0**-24


class Sizes(NamedTuple):
    """What a map is made of."""

    d: int
    m: int
    seed: int

    def normal(self, *shape: int) -> Floats:
        return np.random.default_rng(self.seed).standard_normal(shape)

    def even(self) -> int:
        return self.m + self.m % 2


def projected(cls: Any, **more: Any) -> Callable[[Sizes], Any]:
    def make(size: Sizes) -> Any:
        m = size.even() if cls in PAIRED and more.get("antithetic", True) else size.m
        return cls(size.d, m, sampler="gaussian", rng=size.seed, **more)

    return make


def dense(size: Sizes) -> Any:
    A = -0.1 * np.random.default_rng(size.seed).random(size.d)
    T = np.eye(size.d) + 0.2 * size.normal(size.d, size.d)
    return feature_maps.DenseExponentialFeatures(
        size.d, size.even(), A=A, transform=T, sampler="gaussian", rng=size.seed
    )


def landmarks(size: Sizes) -> Any:
    query, key = size.normal(2, 40, size.d)
    return feature_maps.LandmarkFeatures.fit(
        query, key, num_features=min(size.m, 30), num_probes=16, rng=size.seed
    )


def calibrated(size: Sizes) -> Any:
    d, m = size.d, size.m
    W = size.normal(2, m, d) / np.sqrt(d)
    b = size.normal(2, m)
    return feature_maps.CalibratedFeatures(W[0], b[0], W[1], b[1], tilt=0.1 * b[0, :1] * W[0, 0])


def reparametrized(size: Sizes) -> Any:
    d = size.d
    shift = size.normal(2, d)
    transform = np.eye(d) + 0.1 * size.normal(d, d)
    inside = feature_maps.PositiveFeatures(d, size.m, sampler="gaussian", rng=size.seed)
    return feature_maps.Reparametrized(inside, 0.3 * shift[0], 0.3 * shift[1], transform)


def hedgehog(size: Sizes) -> Any:
    W = size.normal(2, size.m, size.d)
    return feature_maps.HedgehogFeatures(
        W[0] / np.sqrt(size.d), key_weights=W[1] / np.sqrt(size.d), bias=0.3 * W[0, :, 0]
    )


PAIRED = (
    feature_maps.HyperbolicFeatures,
    feature_maps.GeneralizedExponentialFeatures,
    feature_maps.TrigonometricFeatures,
    feature_maps.RandomFourierFeatures,
)
MAPS: dict[str, Callable[[Sizes], Any]] = {
    "positive": projected(feature_maps.PositiveFeatures),
    "hyperbolic": projected(feature_maps.HyperbolicFeatures),
    "generalized": projected(feature_maps.GeneralizedExponentialFeatures, A=-0.05),
    "one-sided": projected(feature_maps.GeneralizedExponentialFeatures, A=-0.3, antithetic=False),
    "dense": dense,
    "trigonometric": projected(feature_maps.TrigonometricFeatures),
    "fourier": projected(feature_maps.RandomFourierFeatures),
    "relu-projected": projected(feature_maps.ActivationFeatures),
    "relu-bare": projected(feature_maps.ActivationFeatures, epsilon=0.0),
    "squared-relu": projected(feature_maps.ActivationFeatures, activation="squared_relu"),
    "elu": lambda size: feature_maps.EluFeatures(),
    "relu": lambda size: feature_maps.ReluFeatures(),
    "softmax": lambda size: feature_maps.SoftmaxFeatures(),
    "taylor": lambda size: feature_maps.TaylorFeatures(size.d),
    "polynomial": lambda size: feature_maps.PolynomialFeatures(min(size.d, 6), 2, c=0.5),
    "cosformer": lambda size: feature_maps.CosformerFeatures(size.d, max_length=256),
    "hedgehog": hedgehog,
    "landmarks": landmarks,
    "calibrated": calibrated,
    "reparametrized": reparametrized,
}


class Case(NamedTuple):
    """Inputs that float32 holds exactly, and how to call with them."""

    feature_map: Any
    query: Floats
    key: Floats
    value: Floats
    grad: Floats
    options: dict[str, Any]

    def gradients(self, dtype: str = "float64", array: Any = np.asarray, **more: Any) -> Any:
        """Gradients of query, key and value, in float64 by the generic code."""
        options = self.options | more
        mask = options.pop("key_mask", None)
        if mask is not None:
            options["key_mask"] = array(mask)
        arrays = [array(np.asarray(x, dtype)) for x in self[1:5]]
        pull: Any = linattn.linear_attention_vjp
        return pull(*arrays[:3], self.feature_map, **options)[1](arrays[3])

    def exact(self) -> list[Floats]:
        with linattn.without_backends():
            return list(self.gradients())

    def rounded(self, rng: np.random.Generator) -> Case:
        """Inputs a rounding of float32 away."""
        query, key, value, grad = (x * (1 + EPS * rng.uniform(-1, 1, x.shape)) for x in self[1:5])
        return self._replace(query=query, key=key, value=value, grad=grad)


WIDTHS = st.sampled_from([1, 2, 3, 5, 8, 32, 48, 64, 96, 128, 300, 320, 384, 512])
SCALES = [0.01, 0.1, 1.0, 3.0, 30.0]


@st.composite
def cases(draw: st.DrawFn, name: str, most: int = 130) -> Case:
    seed = draw(st.integers(0, 2**32 - 1))
    d = draw(st.integers(1, 16))
    if name == "polynomial":
        d = min(d, 6)
    phi = MAPS[name](Sizes(d, draw(WIDTHS | st.integers(1, 512)), seed))
    n, e = draw(st.integers(2, most)), draw(st.integers(1, 9))
    scales = np.array(draw(st.lists(st.sampled_from(SCALES), min_size=3, max_size=3)))
    lead, key_lead = draw(st.sampled_from([((3,), (3,)), ((2, 3), (1, 3)), ((1,), (3,))]))
    rng = np.random.default_rng(seed)
    scales = scales[:, None, None]
    query = rng.standard_normal((*lead, n, d)) * (scales if lead[-1] == 3 else 1.0)
    key = rng.standard_normal((*key_lead, n, d)) * scales
    value = rng.standard_normal((*key_lead, n, e))
    shape = (*np.broadcast_shapes(lead, key_lead), n, e)
    # One key of one head far larger than the rest.
    key[..., draw(st.integers(0, 2)), draw(st.integers(0, n - 1)), :] *= draw(
        st.sampled_from([1.0, 1.0, 10.0, 100.0])
    )
    options: dict[str, Any] = {
        "is_causal": draw(st.booleans()) and phi.causal,
        "chunk_size": draw(st.sampled_from([None, None, 1, 7, 64])),
    }
    if draw(st.booleans()):
        options["key_mask"] = rng.random(n) < 0.8
    arrays = (query, key, value, rng.standard_normal(shape))
    query, key, value, grad = (x.astype(np.float32).astype(np.float64) for x in arrays)
    return Case(phi, query, key, value, grad, options)


def norms(x: Any) -> Floats:
    return np.asarray(np.linalg.norm(np.asarray(x, np.float64), axis=-1))


def slope_and_exponent(features: Callable[[Any], Any], x: Floats) -> tuple[Floats, Floats]:
    """How fast log features of each token change, and how large they are."""
    rng = np.random.default_rng(1)
    log, values = features(x)
    # A landmark's key has one feature.
    exponent = np.zeros(x.shape[:-1])
    if log is not None:
        exponent = np.where(np.isfinite(log), np.abs(log), 0).max(axis=-1)
    slope = np.zeros(x.shape[:-1])
    for _ in range(3):
        move = 1e-6 * (1 + np.abs(x).max()) * rng.choice([-1, 1], x.shape[-1])
        (log_a, values_a), (log_b, values_b) = features(x + move), features(x - move)
        change: Any = 0.0
        if log is not None:
            both = np.isfinite(log_a) & np.isfinite(log_b)
            change = np.abs(np.subtract(log_a, log_b, where=both, out=np.zeros_like(log_a)))
            change = change.max(axis=-1)
        if values is not None:
            top = np.abs(values).max(axis=-1)
            change = change + np.abs(values_a - values_b).max(axis=-1) / np.where(top, top, 1)
        slope = np.maximum(slope, change / (2 * np.abs(move[0])))
    return slope, exponent


def unavoidable(case: Case) -> list[Any]:
    """What a rounding of float32 does to a term of each row."""
    phi = case.feature_map
    (slope_q, exponent_q), (slope_k, exponent_k) = (
        slope_and_exponent(phi.query_features, case.query),
        slope_and_exponent(phi.key_features, case.key),
    )
    relative = 1 + exponent_q.max(axis=-1, keepdims=True) + exponent_k.max(axis=-1, keepdims=True)
    if not phi.positive:
        relative = relative * cancellation(case) ** 2
    terms = relative * norms(case.grad).max() * norms(case.value).max()
    weight = np.sqrt(case.query.shape[-2])
    return [
        broadcast_to(EPS * terms * slope, x) * (1 if x is case.query else weight)
        for slope, x in ((slope_q, case.query), (slope_k, case.key))
    ] + [broadcast_to(EPS * relative * norms(case.grad).max(), case.value)]


def cancellation(case: Case) -> Floats:
    """How much larger the terms of the worst denominator of a head are than it is."""
    rows = []
    for side, x in (("query", case.query), ("key", case.key)):
        log, values = getattr(case.feature_map, f"{side}_features")(x)
        log = np.zeros((1, 1)) if log is None else log - log.max(axis=-2, keepdims=True)
        rows.append(values * np.exp(log if side == "key" else 0 * log))
    phi, psi = rows
    weights, most = phi @ psi.swapaxes(-1, -2), norms(phi)[..., None] * norms(psi)[..., None, :]
    seen = np.ones(weights.shape[-2:])
    if case.options["is_causal"]:
        seen = np.tril(seen)
    if "key_mask" in case.options:
        seen = seen * case.options["key_mask"]
    seen = seen[seen.any(axis=-1)]
    some = slice(case.query.shape[-2] - seen.shape[0], None)
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = (most[..., some, :] * seen).sum(-1) / np.abs((weights[..., some, :] * seen).sum(-1))
    return np.asarray(np.nan_to_num(worst, nan=1e30, posinf=1e30).max(axis=-1, keepdims=True))


def broadcast_to(x: Floats, like: Floats) -> Floats:
    """Largest over axes that an argument lacks."""
    while x.ndim > like.ndim - 1:
        x = x.max(axis=0)
    for axis, n in enumerate(like.shape[:-1]):
        if n == 1 != x.shape[axis]:
            x = x.max(axis=axis, keepdims=True)
    return x


def assert_right(case: Case, got: Any) -> None:
    want, least = case.exact(), unavoidable(case)
    rng = np.random.default_rng(0)
    with linattn.without_backends():
        changed = [case.rounded(rng).gradients() for _ in range(2)]
    for i, side in enumerate(("query", "key", "value")):
        assert_array_equal(np.isfinite(got[i]), True, err_msg=f"grad_{side} is not finite")
        error, size = norms(got[i] - want[i]), norms(want[i])
        noise = np.max([norms(other[i] - want[i]) for other in changed], axis=0)
        # Rows of a block share their sums: the noise of a head's other rows is in each.
        noise = noise + np.median(noise, axis=-1, keepdims=True)
        size = np.maximum(size, np.median(size, axis=-1, keepdims=True))
        excess = error / (TOLERANCE * size + ROUNDINGS * noise + TERMS * least[i] + 1e-30)
        where = tuple(int(j) for j in np.unravel_index(np.argmax(excess), excess.shape))
        assert excess[where] <= 1, (
            f"grad_{side} is {excess[where]:.3g} times as wrong as it may be at row {where}: "
            f"{error[where]:.3g}, size {size[where]:.3g}, noise {noise[where]:.3g}, a term's "
            f"{np.broadcast_to(least[i], error.shape)[where]:.3g}"
        )


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=20)
@given(data=st.data())
def test_float32_gradients_on_numpy(name, data):
    case = data.draw(cases(name))
    assert_right(case, case.gradients("float32"))


@pytest.mark.parametrize("name", MAPS)
@settings(max_examples=6)
@given(data=st.data())
def test_float32_gradients_by_the_generic_code(name, data):
    case = data.draw(cases(name))
    with linattn.without_backends():
        assert_right(case, case.gradients("float32"))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("library", ["array_api_strict", "torch"])
@settings(max_examples=2)
@given(data=st.data())
def test_float32_gradients_in_other_libraries(library, name, data):
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    case = data.draw(cases(name, 40))
    got = case.gradients("float32", xp.asarray)
    assert_right(case, [np.asarray(gradient) for gradient in got])
