"""Landmarks of Dask arrays: fitted to a sample of rows, which alone are computed, and once."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

import linattn
from linattn.feature_maps import (
    CalibratedFeatures,
    DenseExponentialFeatures,
    LandmarkFeatures,
    _dask_rows,
)
from tests.dask_arrays import D, chunkings, close, lazily, one_thread, refuse, tokens

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

__all__ = ["one_thread"]

attend: Any = linattn.linear_attention
fit: Any = LandmarkFeatures.fit
sample: Any = LandmarkFeatures.sample
MAKERS = [pytest.param(make, id=make.__name__) for make in (fit, sample)]

LENGTH, ROWS, RUNS = 20480, 8192, 128
M = 8


def same(first, second):
    assert type(first) is type(second)
    assert first.fingerprint() == second.fingerprint()


@pytest.fixture
def computed(monkeypatch):
    """The arrays that each call of `dask.compute` returned."""
    calls: list[Any] = []
    compute = dask.compute

    def noting(*arrays, **options):
        values = compute(*arrays, **options)
        calls.append([x for x in values if x is not None])
        return values

    monkeypatch.setattr(dask, "compute", noting)
    return calls


def counted(array, rows, counts):
    """The array in chunks of these rows; the number of rows of each that is computed is noted."""

    def block(x):
        counts.append(x.shape[-2])
        return x

    lazy = da.from_array(array, chunks=(len(array), rows, array.shape[-1]))
    return lazy.map_blocks(block, dtype=array.dtype, meta=array[:0, :0, :0])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("rows", [16, 5120])
def test_blocks_of_a_sample_are_computed_once(make, rows, computed):
    query, key, _ = tokens(LENGTH)
    counts: tuple[list[int], list[int]] = ([], [])
    lazy = [counted(x, rows, c) for x, c in zip((query, key), counts, strict=True)]
    phi = make(*lazy, num_features=M, rng=0)
    assert len(computed) == 1
    assert [x.shape for x in computed[0]] == [(2, ROWS, D)] * 2
    for x, of_blocks in zip(computed[0], counts, strict=True):
        assert len(of_blocks) == 4 if rows == 5120 else sum(of_blocks) <= ROWS + 2 * RUNS * rows
        assert x.dtype == np.float32
    same(phi, make(*computed[0], num_features=M, rng=0))


@pytest.mark.parametrize("make", MAKERS)
def test_short_sequences_are_taken_whole(make):
    arrays = tokens(ROWS)[:2]
    bias = np.random.default_rng(1).standard_normal(ROWS).astype(np.float32)
    options = {"key_mask": bias > -1, "key_bias": bias, "query_mask": bias < 1}
    lazy = {name: da.from_array(array, chunks=999) for name, array in options.items()}
    same(
        make(*lazily(arrays, 999), num_features=M, rng=0, **lazy),
        make(*arrays, num_features=M, rng=0, **options),
    )


@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_chunks_give_the_same_map(data, seed):
    query, key, _ = tokens(LENGTH, seed=seed)
    phi, other = (
        fit(
            *(lazily([x], data.draw(chunkings(LENGTH)), heads=heads)[0] for x in (query, key)),
            num_features=M,
            rng=seed,
        )
        for heads in (1, 2)
    )
    same(phi, other)


def test_rows_are_from_all_of_the_sequence_and_by_seed(computed):
    position = np.broadcast_to(np.arange(LENGTH, dtype=np.float32)[:, None], (LENGTH, D))
    lazy = da.from_array(position / LENGTH, chunks=(3000, D))
    for seed in (0, 0, 1):
        fit(lazy, lazy, num_features=M, rng=seed)
    rows = [[np.rint(x[:, 0] * LENGTH).astype(int) for x in call] for call in computed]
    for call in rows:
        for x in call:
            runs = x.reshape(RUNS, -1)
            stratum = LENGTH // RUNS
            # A run that reaches the end of its stratum goes on where that begins.
            steps = np.diff(runs, axis=1, append=runs[:, :1] + stratum)
            assert_array_equal(np.sort(steps)[:, :-1], 1)
            assert_array_less(0, np.diff(x))
            for rows_of_run in (runs[:, 0], runs[:, -1]):
                assert (rows_of_run // stratum).tolist() == list(range(RUNS))
        assert not np.array_equal(*call)
    assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_tokens_at_regular_places_are_drawn_as_often_as_others():
    """The first of every 160 rows, the length of a stratum: of a window of text, say."""
    stratum, seeds = LENGTH // RUNS, 8
    rows = da.from_array(np.arange(LENGTH)[:, None], chunks=LENGTH)
    odds = ROWS / LENGTH
    for place in (0, stratum // 2, stratum - 1):
        drawn = 0
        for seed in range(seeds):
            runs = _dask_rows.draw_runs(rows, None, 0, np.random.default_rng(seed))
            taken = np.concatenate([np.arange(LENGTH)[run] for run in runs])
            drawn += int((taken % stratum == place).sum())
        # A binomial number: 5 standard deviations are passed with a probability of 6e-7.
        count = seeds * RUNS
        assert abs(drawn - odds * count) < 5 * np.sqrt(odds * (1 - odds) * count)


def test_rows_that_count_for_no_head_are_left_out(computed):
    """Two heads see the first tokens, or a few beyond: all of these, and no more."""
    query, key, _ = tokens(LENGTH)
    few = np.zeros((2, LENGTH), dtype=bool)
    few[0, :300] = few[1, 100:1000] = few[1, -7:] = True
    masks = {"key_mask": few, "query_mask": few[:1] | few[1:]}
    lazy = {name: da.from_array(mask, chunks=(1, 3000)) for name, mask in masks.items()}
    phi = fit(*lazily((query, key), 3000), num_features=M, rng=0, **lazy)
    *masks_read, taken = computed
    assert [x.shape for (x,) in masks_read] == [(LENGTH,)] * 2
    seen = few.any(axis=0)
    wanted = query, key, masks["query_mask"][..., None], few[..., None]
    for x, array in zip(taken, wanted, strict=True):
        assert_array_equal(x, array[:, seen])
    want = fit(query, key, num_features=M, rng=0, **masks)
    assert_allclose(phi.log_normalizers, want.log_normalizers, rtol=1e-5)
    assert_allclose(phi.landmarks, want.landmarks, rtol=1e-5)


def test_masked_rows_within_a_run_go_along(computed):
    arrays, every_second = tokens(LENGTH)[:2], np.arange(LENGTH) % 2 == 0
    lazy = da.from_array(every_second, chunks=3000)
    phi = fit(*lazily(arrays, 5120), num_features=M, rng=0, key_mask=lazy)
    _, (query, key, mask) = computed
    assert (query.shape[1], mask.sum()) == (ROWS, ROWS)
    # Between rows of a run, but not between the parts of one that goes on in front.
    assert 2 * ROWS - 2 * RUNS <= key.shape[1] <= 2 * ROWS - RUNS
    same(phi, fit(query, key, num_features=M, rng=0, key_mask=mask[..., 0]))


def test_a_mask_of_no_token():
    arrays, none = tokens(LENGTH)[:2], np.zeros(LENGTH, dtype=bool)
    phi = fit(
        *lazily(arrays, 5120), num_features=M, rng=0, key_mask=da.from_array(none, chunks=5120)
    )
    assert_array_equal(phi.used, 0)


def test_more_landmarks_take_more_rows(computed):
    fit(*lazily(tokens(LENGTH)[:2], 5120), num_features=600, num_probes=9, lloyd_steps=0, rng=0)
    assert [x.shape[-2] for x in computed[0]] == [9600] * 2


def test_nothing_more_is_computed():
    arrays = tokens(LENGTH, dtype=np.float64)
    lazy = lazily(arrays, 4000, heads=2)
    phi = fit(*lazy[:2], num_features=M, rng=0)
    with dask.config.set(scheduler=refuse):
        output = attend(*lazy, phi, exact_window=16)
    with pytest.warns(UserWarning, match="feature_map was fitted to other keys"):
        want = attend(*arrays, phi, exact_window=16)
    close(output.compute(), want, tol=1e-10)


def closed_form(samples):
    return CalibratedFeatures.calibrate(samples, num_features=M, rng=0)


def learned(samples):
    return CalibratedFeatures.calibrate(samples, num_features=M, rng=0, learn=True, num_steps=1)


def tilts(samples):
    return DenseExponentialFeatures.calibrate(samples, num_features=2 * D, rng=0)


@pytest.mark.parametrize("calibrate", [closed_form, learned, tilts])
def test_a_map_is_calibrated_on_a_sample(calibrate, computed):
    length, rows = (500, 500) if calibrate is learned else (LENGTH, ROWS)
    arrays = tokens(length)
    phi = calibrate(lazily(arrays, 3000))
    (taken,) = computed
    whole, found = (x[0][0].astype(np.float64).sum(axis=-1) for x in (arrays, taken))
    places = np.flatnonzero(np.isin(whole, found))
    assert len(places) == rows
    for x, array in zip(taken, arrays, strict=True):
        assert_array_equal(x, array[:, places])
    if calibrate is not tilts:
        same(phi, calibrate(tuple(taken)))


def test_shapes_of_samples_are_checked_before_any_is_computed():
    query, key, value = lazily(tokens(LENGTH), 3000)
    with dask.config.set(scheduler=refuse), pytest.raises(ValueError, match="of one length"):
        CalibratedFeatures.calibrate((query, key, value[:, 1:]))
