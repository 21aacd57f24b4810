"""Causal attention by landmarks in squares: exact where it must be, and blind to later tokens."""

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_less

import linattn
from linattn._driver.problem import exact_problem
from linattn.automatic import _call, _costs, _rectangles, _search
from linattn.automatic._heads import Given
from linattn.automatic._tokens import HostTokens, Rectangle
from tests.attentions import assert_at_most

LENGTH, SQUARES = 400, [(0, 200, 400), (0, 100, 200), (200, 300, 400)]


def tokens(length=LENGTH, heads=(2,), dim=4, seed=0):
    return np.random.default_rng(seed).standard_normal((3, *heads, length, dim))


def given_of(arrays, mask=None, bias=None):
    options: Any = dict(scale=None, is_causal=True, key_mask=mask, key_bias=bias)
    problem = exact_problem(*arrays, **options)
    scale = problem.query.shape[-1] ** -0.5
    return Given(problem, mask, scale, 0.1, np.random.default_rng(0), bias)


def squares_with(monkeypatch, given, level, num_rows=64, squares=SQUARES, features=64):
    """Records and the choices of all heads: so many exact clusters, whatever their errors are."""
    problems = {
        Rectangle(middle, stop, start, middle): given.with_bias_in_keys()
        .rectangle(slice(middle, stop), slice(start, middle))
        .problem
        for start, middle, stop in squares
    }
    monkeypatch.setattr(_call, "rectangles_of", lambda *args: problems)
    call, chosen, totals = _call.Call(given), [], []
    call._tokens = HostTokens(call._problem, given.key_mask, given.generator)
    for number in range(given.num_heads):
        index = given.unravel(number)
        rows = call._tokens.rows(index, num_rows)
        totals.append((rows, call._total(rows, *call._exact(number, rows.places)[1:])))
        trials = {x: call._trial(index, rows, totals[-1][1], x, features) for x in problems}
        chosen.append({x: _search.Choice(t, t.levels.index(level)) for x, t in trials.items()})
    return call, chosen, totals


def attended(call, chosen, heads=(0, 1), rows=slice(0, LENGTH)):
    return _rectangles.attend(call._wide.only(heads), [chosen[h] for h in heads], rows)


def judged(call, output, totals):
    return [
        call._judge(rows, output[i][rows.places], total.output)
        for i, (rows, total) in enumerate(totals)
    ]


@pytest.mark.parametrize("seen", ["all", "masked", "weighted"])
def test_landmarks_that_are_as_many_as_keys_are_exact(monkeypatch, seen):
    """Each key is its own landmark: nothing is left to be approximated."""
    arrays = tokens(LENGTH)
    rng, options = np.random.default_rng(1), dict[str, Any]()
    if seen == "masked":
        options["mask"] = rng.random((2, LENGTH)) < 0.7
    elif seen == "weighted":
        bias = rng.standard_normal((2, LENGTH))
        options["bias"] = np.where(rng.random((2, LENGTH)) < 0.7, bias, -np.inf)
    given = given_of(arrays, **options)
    call, chosen, _ = squares_with(monkeypatch, given, 0, features=256)
    named: Any = {f"key_{name}": array for name, array in options.items()}
    exact = linattn.softmax_attention(*arrays, is_causal=True, **named)
    assert_allclose(attended(call, chosen), exact, rtol=1e-9, atol=1e-11)
    assert_allclose(attended(call, chosen, [1]), exact[1:], rtol=1e-9, atol=1e-11)
    some = np.sort(rng.choice(LENGTH, 60, replace=False))
    found = attended(call, chosen, rows=some)
    assert_allclose(found, exact[:, some], rtol=1e-9, atol=1e-11)
    assert_allclose(given.only([1]).exact(some), exact[1:, some], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("clusters", [0, 4])
def test_the_error_is_that_of_the_output(monkeypatch, clusters):
    """With all rows held out: of one square by its curve, of any by the output."""
    arrays = tokens()
    given = given_of(arrays)
    call, chosen, totals = squares_with(monkeypatch, given, clusters, LENGTH, SQUARES[:1])
    output = attended(call, chosen)
    exact = linattn.softmax_attention(*arrays, is_causal=True)
    square = np.sum((output - exact) ** 2, axis=(-2, -1))
    error = np.sqrt(square / np.sum(exact**2, axis=(-2, -1)))
    assert_array_less(1e-3, error)
    of_curves = [x.trial.curve.error[x.level] for of_head in chosen for x in of_head.values()]
    assert_allclose(of_curves, error, rtol=1e-6)
    found = judged(call, output, totals)
    assert_allclose(found, np.stack([error, error], axis=-1), rtol=1e-9)


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
        call, chosen, totals = squares_with(monkeypatch, given, 0, LENGTH)
        errors.append([found[0] for found in judged(call, attended(call, chosen), totals)])
    assert_allclose(errors[0], errors[1], rtol=0.3)


@pytest.mark.parametrize("overfitted", [[0, 1], [0], [1]])
def test_what_is_near_only_where_it_was_chosen_by_is_not_taken(monkeypatch, overfitted):
    """The rows that the choice was made by say little of the others; what is near is taken."""
    arrays = tokens(6000)
    exact = linattn.softmax_attention(*arrays, is_causal=True)
    near, seen = 1.001 * exact, dict[int, Any]()
    exact_rows = _call.Call._exact

    def watched(self, number, places):
        # The first time these are the rows of trials.
        seen.setdefault(number, places)
        return exact_rows(self, number, places)

    def attend(given, choices, rows):
        head = int(np.argmin([abs(given.problem.query[0] - x).sum() for x in arrays[0]]))
        heads = [head] if len(choices) == 1 else range(2)
        output = near[heads].copy()
        for i, number in enumerate(heads):
            if number in overfitted:
                output[i] = 0
                output[i, seen[number]] = exact[number, seen[number]]
        return output[:, rows]

    def choose(self, index, rows, total, trials):
        ((where, trial), *_) = trials.items()
        return {where: _search.Choice(trial, 0)}, 1500, _costs.Work()

    monkeypatch.setattr(_costs, "MAX_SEARCH", 0.5)
    monkeypatch.setattr(_call, "MAX_VAIN", 2.0)
    monkeypatch.setattr(_call, "MAX_PROMISED", 4.0)
    monkeypatch.setattr(_call.Call, "_exact", watched)
    monkeypatch.setattr(_call.Call, "_choose", choose)
    monkeypatch.setattr(_call, "attend", attend)
    output, records = _call.Call(given_of(arrays)).attend()
    for i, record in enumerate(records):
        assert record.num_features == (0 if i in overfitted else 64)
        assert (record.bound > 0.1) == (i in overfitted)
        apart = np.linalg.norm(output[i] - (exact if i in overfitted else near)[i], axis=-1)
        # Rows that judged are exact.
        assert np.mean(apart > 1e-9) < (0 if i in overfitted else 0.3) + 1e-12
        assert_allclose(output[i], exact[i], rtol=1.01e-3)


@pytest.mark.parametrize("start", [399, 250, 120])
def test_no_output_depends_on_a_later_token(monkeypatch, start):
    arrays = tokens()
    changed = arrays.copy()
    changed[..., start:, :] = tokens(seed=1)[..., start:, :] * 3
    outputs = [attended(*squares_with(monkeypatch, given_of(x), 2)[:2]) for x in (arrays, changed)]
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
    allowed = _call.allowed_errors(first, sizes, 0.1)
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
    monkeypatch.setattr(_costs, "MAX_SEARCH", 0.5)
    monkeypatch.setattr(_call, "MAX_VAIN", 2.0)
    monkeypatch.setattr(_call, "MAX_PROMISED", 4.0)
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
