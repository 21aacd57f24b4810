"""Sums and choices of the NumPy backend's clusters, which sort: beside what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_less

pytest.importorskip("linattn_numpy")

from linattn import _generic
from linattn._driver.problem import linear_problem
from linattn.feature_maps import LandmarkFeatures
from linattn.typing import Clusters, Declined, State, Tokens
from linattn_numpy import tuning
from linattn_numpy.assigned import sums_by_feature
from linattn_numpy.clusters import _largest, choose_block
from tests.attentions import assert_at_most


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("m", "count"), [(5, 5), (64, 1), (513, 20), (1024, 9), (1024, 400)])
def test_the_largest_are_those_of_sorted_rows(m, count, dtype):
    x = np.random.default_rng(m + count).standard_normal((2, 3, m)).astype(dtype)
    x[0, 0, : m // 2] = -np.inf
    expected = x >= np.sort(x, axis=-1)[..., m - count, None]
    np.testing.assert_array_equal(_largest(x, count), expected)


@pytest.mark.parametrize("n", [tuning.MIN_SORTED_ROWS - 1, tuning.MIN_SORTED_ROWS])
@pytest.mark.parametrize(("lead", "value_lead"), [((), ()), ((2, 1), (3,)), ((3,), ())])
@pytest.mark.parametrize("m", [7, 40_000])
def test_sums_by_feature_are_those_of_the_keys_of_each(n, lead, value_lead, m):
    rng = np.random.default_rng(n)
    index = rng.integers(m - 1, size=(*lead, n))
    log, values = 3 * rng.standard_normal((*lead, n, 1)), rng.standard_normal((*value_lead, n, 4))
    log[..., index[(0,) * len(lead)] == 2, :] = -np.inf
    sums, top = sums_by_feature(index, log, values, m)
    whole = np.broadcast_shapes(lead, value_lead)
    index, log = np.broadcast_to(index, (*whole, n)), np.broadcast_to(log, (*whole, n, 1))
    values = np.broadcast_to(values, (*whole, n, 4))
    for head in np.ndindex(whole):
        for c in np.unique([*index[head], m - 1]):
            keys = index[head] == c
            expected = np.exp(log[head][keys]).T @ values[head][keys]
            scale = np.exp(np.broadcast_to(top, (*whole, m))[head][c])
            found = np.broadcast_to(sums, (*whole, m, 4))[head][c]
            np.testing.assert_allclose(scale * found, expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limits", [(), (4, 3), (10, 1)])
@pytest.mark.parametrize("count", [1, 20])
def test_visits_are_the_queries_of_each_cluster_that_has_keys(count, limits):
    """Queries are sorted by the clusters that they chose, however many these are."""
    rng, n, m = np.random.default_rng(count), 300, 40
    chosen = np.argsort(np.argsort(rng.random((n, m)), axis=-1), axis=-1) < count
    bounds = np.cumsum(np.append(0, rng.integers(3, size=m)))
    found = np.zeros((n, bounds[-1]), int)
    keys = np.zeros((bounds[-1], 4))
    clusters = Clusters(Tokens(keys, None, 0), keys, bounds, np.arange(len(keys)))
    for rows, of_keys in clusters.visits(chosen, *limits):
        assert_array_less(0, np.diff(rows))
        found[rows, of_keys] += 1
        if limits:
            assert_at_most(len(rows), max(limits[1], limits[0] // len(keys[of_keys])))
    expected = np.repeat(chosen, np.diff(bounds), axis=-1)
    np.testing.assert_array_equal(found, expected)


def test_columns_that_nobody_chose_keep_their_digits_however_small():
    """Beside a chosen one that is larger by more than floats hold: its keys may be far smaller."""
    rng, m = np.random.default_rng(0), 12
    query, key = (rng.standard_normal((40, 4)).astype(np.float32) for _ in range(2))
    phi = LandmarkFeatures.fit(query, key, num_features=m, num_probes=30, scale=60.0, rng=0)
    spec = linear_problem(query, key, key, phi).query_spec
    state = State(np.ones((m, 5), np.float32), np.zeros(m, np.float32), 40)
    arguments = spec, Tokens(query, None, 0), state, np.zeros(m, np.float32), 1, None
    found = choose_block(*arguments)
    assert not isinstance(found, Declined)
    (chosen, rest), (want_chosen, want) = found, _generic.choose_block(*arguments)
    np.testing.assert_array_equal(chosen, want_chosen)
    log, expected = (np.log(part.num_den[..., -1:]) + part.log for part in (rest, want))
    np.testing.assert_allclose(log, expected, rtol=1e-5, atol=1e-4)
