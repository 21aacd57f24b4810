"""`linattn.testing.batteries`: a right estimator passes, and three planted mistakes each are found.

Right ones fail in at most 1e-7 of all runs, all tests together.
"""

# Star arguments, lambdas with defaults.
# mypy: disable-error-code="arg-type, misc"

from __future__ import annotations

from collections.abc import Callable
from math import gamma, pi, sqrt
from typing import Any, NamedTuple

import numpy as np
import pytest

from linattn.feature_maps import PositiveFeatures, SignFeatures
from linattn.testing import batteries

D = 8


def haar(dim, rng):
    q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
    return q * np.sign(np.diag(r))


def raw_qr(dim, rng):
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


def always_a_rotation(dim, rng):
    q = haar(dim, rng)
    return q * np.where(np.arange(dim) == 0, np.sign(np.linalg.det(q)), 1.0)


def one_matrix_with_random_signs(dim, rng):
    return haar(dim, np.random.default_rng(0)) * rng.choice([-1.0, 1.0], dim)


def blocks(num, dim, rng, norms):
    rows = np.concatenate([haar(dim, rng) for _ in range(-(-num // dim))])[:num]
    return rows * norms(rng.standard_normal((num, dim)))


def chi(normal):
    return np.linalg.norm(normal, axis=-1, keepdims=True)


def hadamard(dim):
    H = np.ones((1, 1))
    while len(H) < dim:
        H = np.block([[H, H], [H, -H]])
    return H


def srht(x, rng, *, size=16, scale=None):
    dim = x.shape[-1]
    flips, rows = rng.choice([-1.0, 1.0], dim), rng.choice(dim, size)
    scale = 1 / sqrt(size) if scale is None else scale
    return scale * (x * flips) @ hadamard(dim).T[:, rows]


def count_sketch(x, rng, signs=True):
    dim, size = x.shape[-1], 8
    S = np.zeros((dim, size))
    S[np.arange(dim), rng.integers(size, size=dim)] = rng.choice([-1.0, 1.0], dim) if signs else 1
    return x @ S


def one_bit(keys, rng, constant, rows=haar):
    S = rows(keys.shape[-1], rng)
    return constant * chi(keys) * (np.sign(keys @ S.T) @ S)


def exact(dim):
    return sqrt(pi) * gamma((dim + 1) / 2) / (dim * gamma(dim / 2))


def usual(dim):
    return sqrt(pi / (2 * dim))


def hutchinson(matrix, rng, probe):
    z = probe(rng, len(matrix))
    return z @ matrix @ z


def rademacher(rng, dim):
    return rng.choice([-1.0, 1.0], dim)


def bfloat16(x, rng, add):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + add(bits, rng)) & np.uint32(0xFFFF0000)).view(np.float32)


def uniform_bits(bits, rng):
    return rng.integers(2**16, size=bits.shape, dtype=np.uint32)


def a_coin(bits, rng):
    up = (bits & 0xFFFF > 0) & (rng.integers(2, size=bits.shape) > 0)
    return np.where(up, np.uint32(0xFFFF), np.uint32(0))


def half_of_even(bits, rng):
    return np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))


def exponentials(x, y, rng, *, m=32, rows=None):
    """Positive features with a shift by the largest exponent, as softmax_kernel has it."""
    dim = x.shape[-1]
    omega = rng.standard_normal((m, dim)) if rows is None else rows(m, dim, rng)
    features = []
    for a, axis in ((x, -1), (y, None)):
        log = a @ omega.T - 0.5 * np.sum(a * a, axis=-1, keepdims=True)
        top = np.max(a @ omega.T, axis=axis, keepdims=True)
        features.append(np.exp(log - top))
    return features


def softmax_kernel(x, y):
    return np.exp(x @ y.T)


def wrong_key_shift(x, y, rng):
    phi, psi = exponentials(x, y, rng)
    return phi, psi / np.max(psi, axis=-1, keepdims=True)


class Case(NamedTuple):
    battery: Callable[..., Any]
    options: dict[str, Any]
    right: Any
    wrong: dict[str, tuple[Any, str]]
    """Mistakes, and a row that must fail."""


FEW = {"num_draws": 1500}

CASES = {
    "haar": Case(
        batteries.haar,
        {"shapes": ((2, 2), (3, 3), (4, 4)), **FEW},
        haar,
        {
            "signs of QR not fixed": (raw_qr, "mean"),
            "rotations alone": (always_a_rotation, "determinant"),
            "one matrix with random signs": (one_matrix_with_random_signs, "products"),
            "rows too long": (lambda dim, rng: 1.01 * haar(dim, rng), "orthonormal"),
        },
    ),
    "isotropic": Case(
        batteries.isotropic,
        {"shapes": ((4, 4), (8, 4)), **FEW},
        lambda num, dim, rng: blocks(num, dim, rng, chi),
        {
            "fixed norms": (
                lambda num, dim, rng: blocks(num, dim, rng, lambda g: sqrt(dim)), "4 x 4"
            ),
            "norms of one": (lambda num, dim, rng: blocks(num, dim, rng, lambda g: 1), "8 x 4"),
            "positive rows": (lambda num, dim, rng: abs(rng.normal(size=(num, dim))), "4 x 4"),
        },
    ),
    "sketch": Case(
        batteries.sketch,
        {"dims": (8, 16)},
        srht,
        {
            "scale of SRHT": (
                lambda x, rng: srht(x, rng, scale=sqrt(1 / x.shape[-1])), "d = 8"
            ),
            "scaled by 1 / m": (lambda x, rng: srht(x, rng, scale=1 / 16), "d = 16"),
            "buckets without signs": (lambda x, rng: count_sketch(x, rng, signs=False), "d = 8"),
        },
    ),
    "quantizer": Case(
        batteries.quantizer,
        {"dims": (8,)},
        lambda keys, rng: one_bit(keys, rng, exact(keys.shape[-1])),
        {
            "constant of Gaussian rows": (
                lambda keys, rng: one_bit(keys, rng, usual(keys.shape[-1])), "scale, d = 8"
            ),
            "norms left out": (
                lambda keys, rng: one_bit(keys, rng, exact(keys.shape[-1])) / chi(keys),
                "products, d = 8",
            ),
            "rounded to nearest": (
                lambda keys, rng: np.round(4 * keys) / 4 + 0 * rng.random(), "products, d = 8"
            ),
        },
    ),
    "trace": Case(
        batteries.trace,
        {},
        lambda matrix, rng: hutchinson(matrix, rng, rademacher),
        {
            "uniform probes": (
                lambda A, rng: hutchinson(A, rng, lambda r, d: r.uniform(-1, 1, d)), "identity"
            ),
            "probes of zeros and ones": (
                lambda A, rng: hutchinson(A, rng, lambda r, d: 2**0.5 * r.integers(0, 2, d)),
                "ones",
            ),
            "one probe for all coordinates": (
                lambda A, rng: hutchinson(A, rng, lambda r, d: np.full(d, r.choice([-1, 1]))),
                "ones",
            ),
        },
    ),
    "stochastic_rounding": Case(
        batteries.stochastic_rounding,
        {},
        lambda x, rng: bfloat16(x, rng, uniform_bits),
        {
            "to nearest, even": (lambda x, rng: bfloat16(x, rng, half_of_even), "ties"),
            "a coin for every number": (
                lambda x, rng: bfloat16(x, rng, a_coin),
                "between",
            ),
            "noise of one sign": (
                lambda x, rng: np.abs(bfloat16(x, rng, uniform_bits)), "ties"
            ),
            "the spacing above a power of two": (
                lambda x, rng: np.floor(x * 128 + rng.random(x.shape)) / 128, "powers of two"
            ),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_right_one_passes(name):
    case = CASES[name]
    report = case.battery(case.right, **case.options)
    assert report.passed
    assert report.false_alarm_rate == 1e-9
    assert {row.result for row in report.rows} == {"passed"}, str(report)
    assert max(len(line) for line in str(report).splitlines()) <= 80
    assert "a right estimator fails with probability at most 1e-09" in " ".join(str(report).split())


@pytest.mark.parametrize(
    ("name", "mistake"), [(name, mistake) for name, case in CASES.items() for mistake in case.wrong]
)
def test_planted_mistakes_are_found(name, mistake):
    case = CASES[name]
    draw, row = case.wrong[mistake]
    report = case.battery(draw, on_fail="return", **case.options)
    results = {found.check: found.result for found in report.rows}
    assert results[row] == "FAILED", str(report)


def test_each_has_three_mistakes():
    assert set(CASES) | {"BatteryReport", "normalized"} == set(batteries.__all__)
    assert all(len(case.wrong) >= 3 for case in CASES.values())


class TestNormalized:
    """Features that are right up to a factor of each row, which depends on the draw."""

    def test_a_right_one_passes(self):
        assert batteries.normalized(exponentials, softmax_kernel).passed
        phi = PositiveFeatures(4, 32, scale=1.0, rng=0)

        def ours(x, y, rng):
            drawn = phi.redraw(rng)
            return np.exp(drawn.query_features(x).log), np.exp(drawn.key_features(y).log)

        assert batteries.normalized(ours, softmax_kernel, num_draws=2000).passed

    @pytest.mark.parametrize(
        "draw",
        [
            lambda x, y, rng: exponentials(
                x, y, rng, rows=lambda m, d, r: blocks(m, d, r, lambda g: 1)
            ),
            wrong_key_shift,
        ],
        ids=["norms of one", "a shift for each key"],
    )
    def test_planted_mistakes_are_found(self, draw):
        with pytest.raises(AssertionError, match=r"ratios +FAILED"):
            batteries.normalized(draw, softmax_kernel)

    def test_features_of_both_signs_are_untestable(self):
        report = batteries.normalized(
            lambda x, y, rng: (np.cos(x), np.sin(y)), softmax_kernel, on_fail="return"
        )
        assert report.rows[0].result == "skipped"
        assert "features must be positive" in report.rows[0].detail


class TestArguments:
    def test_one_two_or_three_arguments(self):
        def tall(num, dim, rng):
            q = haar(max(num, dim), rng)
            return q[:num, :dim]

        for draw in (tall, lambda rng: tall(5, 3, rng), lambda rng: tall(3, 5, rng)):
            assert batteries.haar(draw, **FEW).passed
        assert batteries.haar(always_a_rotation, rotations=True, **FEW).passed
        with pytest.raises(AssertionError, match="determinant"):
            batteries.haar(haar, rotations=True, **FEW)

    def test_a_function_that_cannot_be_called_so(self):
        for draw in (lambda: 0, lambda a, b, c, d: 0, 3):
            with pytest.raises(TypeError, match="draw must be a function"):
                batteries.haar(draw)
        for battery in (batteries.sketch, batteries.trace, batteries.stochastic_rounding):
            with pytest.raises(TypeError, match="draw must be a function"):
                battery(lambda rng: 0)

    def test_wrong_shapes_and_options(self):
        with pytest.raises(ValueError, match=r"matrix of shape \(2, 2\), got \(3, 3\)"):
            batteries.haar(lambda dim, rng: haar(3, rng), **FEW)
        with pytest.raises(ValueError, match="on_fail must be"):
            batteries.trace(lambda A, rng: 0.0, on_fail="warn")
        with pytest.raises(ValueError, match="grid must be one of bfloat16, float16, integer"):
            batteries.stochastic_rounding(lambda x, rng: x, grid="int8")

    def test_what_raises_is_a_row(self):
        report = batteries.trace(lambda A, rng: 1 / 0, on_fail="return")
        assert "raises ZeroDivisionError" in report.rows[0].detail

    @pytest.mark.parametrize("grid", ["integer", "float16"])
    def test_grids(self, grid):
        def rounded(x, rng):
            if grid == "integer":
                return np.floor(x + rng.random(x.shape))
            low, high = neighbours(x.astype(np.float64))
            share = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)
            return np.where(rng.random(x.shape) < share, high, low).astype(np.float16)

        def neighbours(x):
            near = x.astype(np.float16)
            below = np.where(near > x, np.nextafter(near, np.float16(-np.inf)), near)
            above = np.where(near < x, np.nextafter(near, np.float16(np.inf)), near)
            return below.astype(np.float64), above.astype(np.float64)

        assert batteries.stochastic_rounding(rounded, grid=grid, **FEW).passed
        with pytest.raises(AssertionError, match="ties"):
            batteries.stochastic_rounding(
                lambda x, rng: np.round(x) if grid == "integer" else x.astype(np.float16),
                grid=grid,
                **FEW,
            )
        assert batteries.stochastic_rounding(
            lambda x, rng: np.floor(x + rng.random(x.shape)),
            grid=lambda x: (np.floor(x), np.ceil(x)),
            **FEW,
        ).passed


@pytest.mark.parametrize("sampler", ["gaussian", "orthogonal"])
def test_one_bit_keys(sampler):
    """The worked example: our map passes, and so does what it restores."""

    def dots(query, key, rng):
        phi = SignFeatures(query.shape[-1], rng=rng, sampler=sampler)
        log, signs = phi.key_features(key)
        return np.sum(phi.query_features(query).values * signs * np.exp(log), axis=-1)

    assert batteries.quantizer(dots, dims=(8,), num_draws=1500).passed
