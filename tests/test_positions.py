"""Rotary embeddings, sinusoids and slopes, against their definitions; and what they promise."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

import cmath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from linattn.feature_maps import PositiveFeatures
from linattn.positions import alibi_slopes, rotary, sinusoidal
from linattn.testing import statistics


def rotated_by_definition(x, positions, base=10_000.0, interleaved=False, dim=None):
    """Rotate pair by pair as complex numbers, in Python."""
    r = x.shape[-1] if dim is None else dim
    out = x.copy()
    positions = np.broadcast_to(positions, x.shape[:-1])
    for token in np.ndindex(*x.shape[:-1]):
        for c in range(r // 2):
            a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + r // 2)
            turn = cmath.exp(1j * float(positions[token]) * base ** (-2 * c / r))
            pair = complex(x[(*token, a)], x[(*token, b)]) * turn
            out[(*token, a)], out[(*token, b)] = pair.real, pair.imag
    return out


@given(data=st.data())
def test_rotary_is_its_definition(xp_any_shape, draws, data):
    xp = xp_any_shape
    rng = np.random.default_rng(data.draw(draws.seeds))
    length, half = data.draw(draws.lengths(9)), data.draw(st.integers(1, 4))
    x = rng.standard_normal((2, 3, length, 2 * half + data.draw(st.integers(0, 3))))
    lead = data.draw(st.sampled_from([(), (3,), (2, 1)]))
    positions = rng.integers(-1000, 1000, (*lead, length)).astype(
        data.draw(st.sampled_from(["int64", "float64"]))
    )
    options = {"base": 500.0, "interleaved": data.draw(st.booleans()), "dim": 2 * half}
    out = rotary(xp.array(x), xp.array(positions), **options)
    xp.assert_like(out, xp.array(x))
    expected = rotated_by_definition(x, positions, **options)
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=1e-14)
    back = rotary(out, xp.array(-positions), **options)
    assert_allclose(xp.numpy(back), x, rtol=0, atol=2e-15)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rotary_of_every_library(xp, dtype):
    x = np.random.default_rng(0).standard_normal((2, 7, 6)).astype(dtype)
    array = xp.array(x)
    out = rotary(array)
    xp.assert_like(out, array)
    expected = rotated_by_definition(x.astype(np.float64), np.arange(7))
    eps = np.finfo(dtype).eps
    assert_allclose(xp.numpy(out), expected, rtol=4 * eps, atol=4 * eps)
    assert_array_equal(xp.numpy(rotary(array, range(7))), xp.numpy(out))


@pytest.mark.parametrize("dtype", ["int64", "uint32", "float64", None])
@pytest.mark.parametrize("position", [2**24 + 1, 2**25 + 1, 10**8 + 3])
def test_positions_beyond_the_integers_of_float32(xp, position, dtype):
    at = np.array([position, position + 1], dtype=dtype)
    positions = [position, position + 1] if dtype is None else at
    if dtype in {"int64", "float64"}:
        positions = xp.array(at)
    out = rotary(xp.array(np.ones((2, 2))), positions)
    cos, sin = np.cos(at.astype(np.float64)), np.sin(at.astype(np.float64))
    assert_allclose(xp.numpy(out), np.stack([cos - sin, cos + sin], axis=-1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_see_differences_of_positions_only(interleaved):
    query, key = np.random.default_rng(1).standard_normal((2, 40, 16))
    at = np.arange(40)

    def products(shift):
        q, k = (rotary(x, at + shift, interleaved=interleaved) for x in (query, key))
        return q @ k.T

    assert_allclose(products(123_456), products(0), rtol=0, atol=2e-9)
    assert_allclose(products(0.25), products(0), rtol=0, atol=1e-13)
    assert_allclose(rotary(query, at)[0], query[0], rtol=0)  # position 0 is no rotation


def test_no_drift_in_float32_at_position_a_million():
    x = np.random.default_rng(2).standard_normal((16, 32))
    at = 1_000_000 + np.arange(16)
    expected = rotated_by_definition(x, at)
    out = rotary(x.astype(np.float32), at)
    assert_allclose(out, expected, rtol=0, atol=1e-6)


@pytest.mark.frameworks
def test_traced_positions():
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(3).standard_normal((2, 5, 8)).astype(np.float32)

    def attend(x, positions):
        return rotary(x, positions)

    out = jax.jit(attend)(jax.numpy.asarray(x), jax.numpy.arange(5) + 7)
    assert out.dtype == x.dtype
    assert_allclose(np.asarray(out), rotary(x, np.arange(5) + 7), rtol=0, atol=5e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_take_the_place_of_those_of_the_base(interleaved):
    x = np.random.default_rng(5).standard_normal((2, 4, 10))
    options = {"interleaved": interleaved}
    by_base = rotary(x, base=50.0, dim=6, **options)
    given = 50.0 ** (-np.arange(0, 6, 2) / 6)
    for dim in (None, 6):
        assert_array_equal(rotary(x, frequencies=given, dim=dim, **options), by_base)
    stretched = rotary(x, frequencies=given / 4, **options)
    assert_allclose(stretched, rotary(x, np.arange(4) / 4, base=50.0, dim=6, **options), rtol=1e-12)


def test_the_pullback_of_a_rotation_is_the_other_way_round():
    """<g, R x> = <R^T g, x> for every g and x."""
    g, x = np.random.default_rng(4).standard_normal((2, 9, 10))
    at = 3 * np.arange(9)
    assert_allclose(np.sum(g * rotary(x, at)), np.sum(rotary(g, -at) * x), rtol=1e-13)


@pytest.mark.parametrize("rotates", ["queries and keys", "keys only"])
def test_random_features_are_unbiased_under_rotation(rotates):
    """FAVOR+ of rotated queries and keys has exp(s q.R k) as its mean; false alarms: 1e-9."""
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((2, 6, 8)) / 2
    at = 5 * np.arange(6)
    q, k = rotary(query, at) if rotates == "queries and keys" else query, rotary(key, at)
    phi = PositiveFeatures(8, 16, rng=0)
    apart = [rotated_by_definition(key, at - t) for t in at]
    truth = np.exp(phi.scale * np.stack([q @ k.T for q, k in zip(query, apart, strict=True)]))
    draws = np.stack([phi.redraw(seed).estimate(q, k) for seed in rng.integers(2**32, size=1500)])
    test = statistics.score_test(draws - truth, phi.variance(q, k), false_alarm_rate=1e-9)
    assert test.passed == (rotates == "queries and keys")


# Slopes and sinusoids ---------------------------------------------------------------------------


def reference_slopes(heads):
    """What the code of the paper does, a recursion over powers of two."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-8 / heads)
        return [start * start**i for i in range(heads)]
    closest = 1
    while 2 * closest <= heads:
        closest *= 2
    return reference_slopes(closest) + reference_slopes(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 25, 32, 40])
def test_slopes_are_those_of_the_paper(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert_allclose(slopes, reference_slopes(heads), rtol=1e-14)


def test_sinusoids_are_those_of_the_paper():
    table = sinusoidal(50, 6)
    for t in range(50):
        for c in range(3):
            angle = t / 10_000 ** (2 * c / 6)
            assert_allclose(table[t, 2 * c : 2 * c + 2], [np.sin(angle), np.cos(angle)], rtol=1e-12)


# Mistakes ---------------------------------------------------------------------------------------

X = np.zeros((2, 5, 6))
MISTAKES = [
    (lambda: rotary(X, np.arange(4)), ValueError, r"positions must have shape \(5,\), .*\(4,\)"),
    (
        lambda: rotary(X, np.zeros((3, 5))),
        ValueError,
        r"positions must have .*\(2, 5\), got \(3, 5\)",
    ),
    (lambda: rotary(X, 3), ValueError, r"positions must have shape \(5,\), .*got \(\)"),
    (lambda: rotary(X, np.full(5, np.nan)), ValueError, "positions must be finite"),
    (lambda: rotary(X, [True] * 5), TypeError, "positions must be integers or real .*bool"),
    (lambda: rotary(X, ["a"] * 5), TypeError, "positions must be integers or real"),
    (lambda: rotary(X, dim=3), ValueError, "dim must be even, .*got 3"),
    (lambda: rotary(X, dim=8), ValueError, "dim must be at most 6, got 8"),
    (lambda: rotary(np.zeros((5, 3))), ValueError, "dim must be even, .*got 3"),
    (lambda: rotary(X, base=0), ValueError, "base must be a positive finite number, got 0"),
    (lambda: rotary(X, frequencies=[1.0] * 4), ValueError, "frequencies must be .* 3 at most"),
    (
        lambda: rotary(X, dim=4, frequencies=[1.0]),
        ValueError,
        r"frequencies .* 2, got shape \(1,\)",
    ),
    (lambda: rotary(X, frequencies=[np.inf]), ValueError, "frequencies must be finite"),
    (lambda: rotary(X, frequencies=1.0), ValueError, r"frequencies must be .*got shape \(\)"),
    (lambda: rotary(X, dim=3, frequencies=[1.0]), ValueError, "dim must be even, .*got 3"),
    (lambda: rotary(X, interleaved=1), TypeError, "interleaved must be True or False"),
    (lambda: rotary(X.astype(int)), TypeError, "x must have dtype float16"),
    (lambda: alibi_slopes(0), ValueError, "heads must be at least 1, got 0"),
    (lambda: alibi_slopes(2.0), TypeError, "heads must be a positive integer"),
    (lambda: sinusoidal(4, 3), ValueError, "dim must be even.*got 3"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
