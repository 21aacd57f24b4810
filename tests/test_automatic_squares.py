"""Causal attention by landmarks in squares: exact where it must be, and blind to later tokens."""

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less

import linattn
from linattn._driver.problem import exact_problem
from linattn.automatic import _causal, _costs, _search, _squares
from linattn.automatic._heads import Given
from linattn.automatic._report import HeadRecord
from tests.attentions import assert_at_most

LENGTH, SQUARES = 400, [(0, 200, 400), (0, 100, 200), (200, 300, 400)]


def tokens(length=LENGTH, heads=(2,), dim=4, seed=0):
    return np.random.default_rng(seed).standard_normal((3, *heads, length, dim))


def given_of(arrays, mask=None, bias=None):
    options: Any = dict(scale=None, is_causal=True, key_mask=mask, key_bias=bias)
    problem = exact_problem(*arrays, **options)
    scale = problem.query.shape[-1] ** -0.5
    return Given(problem, mask, scale, 0.1, np.random.default_rng(0), bias)


def squares_with(monkeypatch, given, clusters, num_rows=64, squares=SQUARES):
    """Squares with so many exact clusters for all heads, whatever their errors are."""

    def choose_all(self, tolerances):
        return [_search.Choice(x, x.levels.index(clusters), _costs.Work()) for x in self.first]

    monkeypatch.setattr(_squares._SquareSearch, "choose_all", choose_all)
    squares = [_squares.Square(*ends) for ends in squares]
    rows = _squares.CausalRows(given.with_bias_in_keys(), num_rows, squares)
    return rows, _squares.Squares(rows, squares, 0.1)


@pytest.mark.parametrize("seen", ["all", "masked", "weighted"])
def test_landmarks_that_are_as_many_as_keys_are_exact(monkeypatch, seen):
    """Each key is its own landmark: nothing is left to be approximated."""
    monkeypatch.setattr(_squares, "MIN_FEATURES", 256)
    arrays = tokens(LENGTH)
    rng, options = np.random.default_rng(1), dict[str, Any]()
    if seen == "masked":
        options["mask"] = rng.random((2, LENGTH)) < 0.7
    elif seen == "weighted":
        bias = rng.standard_normal((2, LENGTH))
        options["bias"] = np.where(rng.random((2, LENGTH)) < 0.7, bias, -np.inf)
    given = given_of(arrays, **options)
    _, squares = squares_with(monkeypatch, given, 0)
    named: Any = {f"key_{name}": array for name, array in options.items()}
    exact = linattn.softmax_attention(*arrays, is_causal=True, **named)
    assert_allclose(squares.attend(range(2)), exact, rtol=1e-9, atol=1e-11)
    assert_allclose(squares.attend([1]), exact[1:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("clusters", [0, 4])
def test_the_error_is_that_of_the_output(monkeypatch, clusters):
    """With all rows held out: of one square by its curve, of any by the output."""
    arrays = tokens()
    given = given_of(arrays)
    rows, squares = squares_with(monkeypatch, given, clusters, LENGTH, SQUARES[:1])
    output = squares.attend(range(2))
    exact = linattn.softmax_attention(*arrays, is_causal=True)
    square = np.sum((output - exact) ** 2, axis=(-2, -1))
    error = np.sqrt(square / np.sum(exact**2, axis=(-2, -1)))
    assert_array_less(1e-3, error)
    assert_allclose([record.error for record in squares.records()], error, rtol=1e-6)
    judged = [rows.judge((i,), output[i], 0.9) for i in range(2)]
    assert_allclose(judged, np.stack([error, error], axis=-1), rtol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_landmarks_are_near_in_what_queries_see(monkeypatch, masked):
    """Which two of the sixteen axes of keys count is known from queries that count alone."""
    query, key, value = tokens(dim=16)
    mask = np.random.default_rng(1).random((2, LENGTH)) < 0.7 if masked else None
    query[..., 2:] = 0
    if mask is not None:
        query[~mask] = 30 * tokens(dim=16, seed=2)[0][~mask]
    errors = []
    for size in (1.0, 0.0):
        given = given_of((3 * query, key * ([1.0] * 2 + [size] * 14), value), mask)
        rows, squares = squares_with(monkeypatch, given, 0, LENGTH)
        output = squares.attend(range(2))
        errors.append([rows.judge((i,), output[i], 0.9)[0] for i in range(2)])
    assert_allclose(errors[0], errors[1], rtol=0.3)


@pytest.mark.parametrize("overfitted", [[0, 1], [0], [1]])
def test_what_is_near_only_where_it_was_chosen_by_is_not_taken(monkeypatch, overfitted):
    """The rows that the choice was made by say little of the others; what is near is taken."""
    arrays = tokens()
    exact = linattn.softmax_attention(*arrays, is_causal=True)
    near = 1.001 * exact

    class Overfitted:
        def __init__(self, rows, squares, tolerance):
            self.rows = [rows.tokens.head((i,), 64).rows for i in range(2)]

        def records(self):
            return [HeadRecord(64, 0, 0.0, 0.0, _costs.Work())] * 2

        def attend(self, heads):
            output = near.copy()
            for i in overfitted:
                output[i] = 0
                output[i, self.rows[i]] = exact[i, self.rows[i]]
            return output

    monkeypatch.setattr(_causal, "Squares", Overfitted)
    monkeypatch.setattr(_costs, "MAX_ROWS", 1 / 2)
    answer = _causal.attend(given_of(arrays))
    for i, head in enumerate(answer.heads):
        assert head.num_features == (0 if i in overfitted else 64)
        assert (head.bound > 0.1) == (i in overfitted)
        assert_allclose(answer.output[i], (exact if i in overfitted else near)[i], rtol=1e-12)


@pytest.mark.parametrize("start", [399, 250, 120])
def test_no_output_depends_on_a_later_token(monkeypatch, start):
    arrays = tokens()
    changed = arrays.copy()
    changed[..., start:, :] = tokens(seed=1)[..., start:, :] * 3
    outputs = [
        squares_with(monkeypatch, given_of(x), 2)[1].attend(range(2)) for x in (arrays, changed)
    ]
    # Which queries are worked out together may differ, and so may last bits.
    assert_allclose(outputs[0][:, :start], outputs[1][:, :start], rtol=1e-11, atol=1e-14)
    assert abs(outputs[0][:, start:] - outputs[1][:, start:]).max() > 0.1


@pytest.mark.parametrize("scale", [0.001, 0.03, 0.3, 3, 30, np.inf])
@pytest.mark.parametrize("spread", [0, 1, 6])
def test_allowed_errors_add_up_to_the_tolerance_or_are_the_first(scale, spread):
    """What the squares that need nothing leave is shared by the others."""
    sizes = np.array([4.0, 2, 2, 1, 1, 1, 1])
    noise = np.random.default_rng(0).random(7)
    first = scale * noise**spread if np.isfinite(scale) else np.full(7, np.inf)
    allowed = _squares._allowed_errors(first, sizes, 0.1)
    assert_at_most(allowed, first)
    total = np.sqrt(np.sum(allowed**2))
    assert_allclose(total, min(0.1, np.sqrt(np.sum(first**2))), rtol=1e-12)
    more = allowed < first
    shares = allowed[more] ** 2 / (np.minimum(first, 1e6) * sizes)[more]
    assert_allclose(shares, shares[:1].repeat(len(shares)), rtol=1e-9)
    if scale == 0.3 and spread == 6:
        assert 0 < more.sum() < 7


def test_long_sequences_meet_the_tolerance_in_squares(monkeypatch):
    """Sharp heads, for which few clusters are not near: exact clusters, and one report."""
    monkeypatch.setattr(_costs, "MAX_SEARCH", 0.8)
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((2, 40, 8))
    which = rng.integers(40, size=6000)
    key = centres[:, which] + 0.3 * rng.standard_normal((2, 6000, 8))
    query = 2 * centres[:, which] + rng.standard_normal((2, 6000, 8))
    value = rng.standard_normal((2, 40, 8))[:, which] + 0.3 * rng.standard_normal((2, 6000, 8))
    arrays = [x.astype(np.float32) for x in (query, key, value)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output, report = linattn.attention(
            *arrays, is_causal=True, tolerance=0.15, rng=0, return_report=True
        )
    exact = linattn.softmax_attention(*arrays, is_causal=True)
    error = np.linalg.norm(output - exact, axis=(-2, -1)) / np.linalg.norm(exact, axis=(-2, -1))
    assert report.method == "landmarks"
    assert report.head_methods.tolist() == ["landmarks"] * 2
    assert report.head_windows.tolist() == [0, 0]
    assert report.cost < 1.2
    assert_array_less(error, 0.15)
    assert_array_less(1e-3, error)
    assert_allclose(report.error, error, rtol=0.5)
    assert_at_most(report.bound, 0.15)
