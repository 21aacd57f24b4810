"""Like queries that choose clusters together, and clusters that are found once."""

# mypy: disable-error-code="arg-type, call-arg"

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn._driver import forward
from linattn._driver.problem import linear_problem
from linattn.automatic import _costs, _curves, _full
from linattn.automatic._order import CHOICE_ROWS, order_of_queries
from linattn.feature_maps import LandmarkFeatures


def of_centres(length, heads=2, dim=8, seed=0):
    """Keys and queries around many centres: few queries of each, anywhere in the sequence."""
    rng = np.random.default_rng(seed)
    centres = 4 * rng.standard_normal((heads, 40, dim))
    which = rng.integers(40, size=length)
    query, key = (centres[:, which] + rng.standard_normal((heads, length, dim)) for _ in range(2))
    return query, key, rng.standard_normal((heads, length, dim)) + 1


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_queries_choose_together_by_their_weights_over_their_largest(xp, scale):
    """Of which some are so small beside the largest that nobody chooses them."""
    if xp.name in {"dask", "jax"}:
        pytest.skip("not by content")
    rng, m, count, rows = np.random.default_rng(0), 12, 3, 4
    query, key, value = rng.standard_normal((3, 2, 60, 4))
    mask = rng.random(60) < 0.8
    phi = LandmarkFeatures.fit(
        query, key, num_features=m, num_probes=30, key_mask=mask, scale=scale / 2, rng=0
    )
    problem = linear_problem(
        *(xp.array(x) for x in (query, key, value)),
        phi,
        key_mask=xp.array(mask),
        exact_clusters=count,
    )
    part = problem.replace(exact=problem.exact._replace(choice_rows=rows))
    found, _, _ = forward.solve(part, return_state=False)
    for h in range(2):
        logs = np.where(mask, phi.key_features(key).log[h].max(axis=-1), -np.inf)
        column = phi.key_features(key).log[h].argmax(axis=-1)
        of = [mask & (column == c) for c in range(m)]
        apart = key[h] - phi.landmarks[h][column]
        squares = np.einsum("nd,de,ne->n", apart, phi.metric[h], apart)
        largest = np.array([logs[of[c]].max(initial=-np.inf) for c in range(m)])
        # Mean weights in units of the largest, and root mean square distances.
        spread = np.array(
            [
                np.exp(logs[keys] - top).mean() * np.sqrt(squares[keys].mean()) if keys.any() else 0
                for keys, top in zip(of, largest, strict=True)
            ]
        )
        far = phi.scale * query[h] @ phi.landmarks[h].T
        own = far + largest
        scores = np.exp(own - own.max(axis=-1, keepdims=True)).reshape(-1, rows, m).sum(1) * spread
        rank = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
        is_exact = np.repeat((rank < count) & (scores > 4e-18), rows, axis=0)[:, column]
        logits = np.where(is_exact, phi.scale * query[h] @ key[h].T, far[:, column] + logs)
        logits = np.where(mask, logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        want = weights @ value[h] / weights.sum(axis=-1, keepdims=True)
        assert_allclose(xp.numpy(found)[h], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_what_is_judged_is_what_is_computed(monkeypatch, generic, together):
    """By the same clusters and queries that choose together; heads share keys, some are masked."""
    judged = []

    def curve(head, landmarks, **options):
        judged.append((len(landmarks.b), head))
        return _curves.error_curve(head, landmarks, **options)

    monkeypatch.setattr(_full, "error_curve", curve)
    monkeypatch.setattr(_full, "rows_wanted", lambda *_: 1502)
    monkeypatch.setattr(_full, "MIN_ORDERED", 1000)
    monkeypatch.setattr(_costs, "MIN_SHARED", 64 if together else 2048)
    monkeypatch.setattr(_costs, "MAX_SEARCH", 4.0)
    query, key, value = of_centres(1502)
    query, key, value = query[:, None], key[:1, None], value[:1, None]
    mask = np.random.default_rng(0).random(1502) < 0.9
    options: Any = dict(scale=0.25, key_mask=mask)
    with linattn.without_backends() if generic else nullcontext():
        output, report = linattn.attention(
            query, key, value, **options, tolerance=0.3, rng=2, return_report=True
        )
    exact = linattn.softmax_attention(query, key, value, **options)
    assert_array_less(0, report.head_clusters)
    assert output.shape == query.shape
    for h, m in enumerate(report.head_features[:, 0]):
        (head,) = (
            head
            for of, head in judged
            if of == m and np.array_equal(head.query, query[h, 0, head.rows])
        )
        assert (head.choosers is not None) == together
        apart = (output - exact)[h, 0, head.rows]
        squares, units = (np.sum(x**2, axis=-1) for x in (apart, exact[h, 0, head.rows]))
        found, _ = head.error_and_bound(squares, units, 0.95)
        assert_allclose(report.error[h, 0], found, rtol=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_what_masked_queries_hold_does_not_matter_to_others(monkeypatch, garbage):
    """They choose no clusters with those that count, of which each head has another number."""
    monkeypatch.setattr(_full, "MIN_ORDERED", 1000)
    monkeypatch.setattr(_costs, "MIN_SHARED", 64)
    monkeypatch.setattr(_costs, "MAX_SEARCH", 4.0)
    query, key, value = of_centres(1502)
    mask = np.random.default_rng(0).random((2, 1502)) < [[0.9], [0.7]]
    options: Any = dict(scale=0.25, key_mask=mask, tolerance=0.2)
    outputs = []
    for filler in (query, garbage):
        tokens = np.where(mask[..., None], query, filler), key, value
        output, report = linattn.attention(*tokens, **options, rng=2, return_report=True)
        assert_array_less(0, report.head_clusters)
        outputs.append(output[mask])
    assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_are_chosen_alike_get_their_own_rows_back(monkeypatch, masked):
    """Both in one group, in an order that is longer than the sequence, its runs filled up."""
    monkeypatch.setattr(_full, "MIN_ORDERED", 1000)
    monkeypatch.setattr(_costs, "MIN_SHARED", 64)
    monkeypatch.setattr(_costs, "MAX_SEARCH", 4.0)
    query, key, value = of_centres(1502, heads=1)
    value = np.concatenate([value, -value])
    mask = np.random.default_rng(0).random(1502) < 0.9 if masked else None
    options: Any = dict(scale=0.25, key_mask=mask)
    output, report = linattn.attention(
        query, key, value, **options, tolerance=0.2, rng=2, return_report=True
    )
    assert_array_less(0, report.head_clusters)
    assert_allclose(output[1], -output[0], rtol=1e-12)
    exact = linattn.softmax_attention(query, key, value, **options)
    seen = np.ones(1502, bool) if mask is None else mask
    assert np.linalg.norm((output - exact)[:, seen]) < 0.2 * np.linalg.norm(exact[:, seen])


def test_like_queries_follow_each_other():
    rng = np.random.default_rng(0)
    of_query = rng.permutation(np.repeat(np.arange(500), CHOICE_ROWS))
    query = rng.standard_normal((500, 16))[of_query]
    order = order_of_queries(query, rng.standard_normal((300, 16)), np.ones(4000, bool))
    assert_array_equal(np.sort(order), np.arange(4000))
    runs = of_query[order].reshape(-1, CHOICE_ROWS)
    # By chance one in eight.
    assert np.mean(runs == runs[:, :1]) > 0.4


def test_alike_are_queries_whose_weights_vary_alike():
    """Not those near each other where keys are all the same, be they far from 0 there."""
    rng = np.random.default_rng(0)
    of_query = rng.permutation(np.repeat(np.arange(500), CHOICE_ROWS))
    query, key = rng.standard_normal((4000, 24)), rng.standard_normal((300, 24))
    query[:, :3] = rng.standard_normal((500, 3))[of_query]
    key[:, 3:] = 1e-3 * key[:, 3:] + 50
    order = order_of_queries(query, key, np.ones(4000, bool))
    runs = of_query[order].reshape(-1, CHOICE_ROWS)
    assert np.mean(runs == runs[:, :1]) > 0.4


@pytest.mark.parametrize("length", [1, 5, 130, 1001])
def test_queries_that_do_not_count_come_last(length):
    rng = np.random.default_rng(length)
    query, key = rng.standard_normal((2, length, 4))
    counts = rng.random(length) < 0.7
    query[~counts] = np.nan
    order = order_of_queries(query, key, counts)
    assert_array_equal(np.sort(order), np.arange(length))
    assert_array_less(0, counts[order[: counts.sum()]])
    # Nobody is alike where there is no key, or no query.
    assert_array_equal(order_of_queries(query, key[:0], counts), np.arange(length))
    assert_array_equal(order_of_queries(query, key, counts & False), np.arange(length))
