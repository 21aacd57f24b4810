"""Causal sums of the NumPy backend, piece by piece, against sums over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linattn_numpy.tiles import tiles
from linattn_numpy.triangles import Triangles
from linattn_numpy.tuning import SUB_BLOCK_ROWS

LEADS = [
    ((), (), (), ()),
    ((2,), (2,), (2,), (2,)),
    ((2, 3), (1, 3), (2, 1), (1, 1)),
    ((3,), (), (), (3,)),
    ((), (2,), (1,), ()),
    ((2, 1), (3,), (3,), (1, 3)),
]


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("length", "size", "count"), [(12, 4, 3), (5, 5, 1), (8, 4, 1), (6, 2, 2)])
def test_sums_of_pieces_are_sums_over_pairs(lead, halves, length, size, count):
    rng = np.random.default_rng(0)
    n, r, e = length * count, 3, 5
    q, k = (rng.standard_normal((*axes, halves, n, r)) for axes in lead[:2])
    v = rng.standard_normal((*lead[2], n, e))
    start = rng.standard_normal((*lead[3], halves * r, e))
    some_q, some_k = (np.empty((*x.shape[:-2], length, x.shape[-1])) for x in (q, k))
    sums = Triangles(some_q, some_k, v.shape[:-2], start, size)
    out = np.empty((*sums.lead, n, e))
    for i, (values, part) in enumerate(zip(sums.split(v), sums.split(out), strict=True)):
        rows = slice(i * length, (i + 1) * length)
        some_q[...], some_k[...] = (x[..., rows, :] for x in (q, k))
        sums.add(values, part)

    whole_q, whole_k = (
        np.swapaxes(x, -3, -2).reshape(*x.shape[:-3], n, halves * r) for x in (q, k)
    )
    weights = np.tril(whole_q @ np.swapaxes(whole_k, -1, -2))
    np.testing.assert_allclose(out, weights @ v + whole_q @ start, rtol=0, atol=1e-12)
    after = start + np.swapaxes(whole_k, -1, -2) @ v
    np.testing.assert_allclose(sums.state(), np.broadcast_to(after, sums.state().shape), atol=1e-12)
    kept = sums.state()
    sums.add(sums.split(v)[-1], sums.split(out)[-1])
    assert not np.array_equal(sums.state(), kept)


@given(n=st.integers(0, 5000), most=st.integers(0, 3000))
def test_pieces_are_all_rows_in_order(n, most):
    at = 0
    for rows, length, size in tiles(n, most):
        assert rows.start == at < rows.stop
        assert (rows.stop - rows.start) % length == 0 == length % size
        assert length <= max(most, size)
        assert size == SUB_BLOCK_ROWS or rows.stop == n
        at = rows.stop
    assert at == n
