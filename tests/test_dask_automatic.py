"""attention() over Dask arrays: it chooses by a sample and all keys, and its output is lazy."""

# mypy: disable-error-code="arg-type, call-arg, misc"

import warnings
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.automatic import _costs, _dask
from linattn.feature_maps import _dask_rows
from tests.dask_arrays import Recorded, chunkings, close, lazily, one_thread, refuse
from tests.test_automatic import clustered, error, one_hard_head

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

__all__ = ["one_thread"]

LENGTH, ROWS = 2560, 640
SAMPLED, RUNS = 512, 16


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """A search on short sequences, for short tests, and a sample that is a part of these."""
    monkeypatch.setattr(_costs, "MAX_SEARCH", 1.2)
    monkeypatch.setattr(_dask_rows, "MIN_NUM_ROWS", SAMPLED)
    monkeypatch.setattr(_dask_rows, "NUM_RUNS", RUNS)


def attend(arrays, **options):
    output, report = linattn.attention(*arrays, rng=0, return_report=True, **options)
    return output, report


def judged(arrays, got, report, *, exact=None, tolerance=0.1, rtol=0.6):
    """Errors are within the tolerance, and what the report says of them."""
    exact = linattn.softmax_attention(*arrays) if exact is None else exact
    found = error(got, exact)
    assert (found <= tolerance).all()
    linear = report.head_features > 0
    assert_allclose(report.error[linear], found[linear], rtol=rtol, atol=1e-6)
    assert (report.bound >= report.error).all()


# What is chosen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2], ids=["heads in chunks", "heads together"])
@pytest.mark.parametrize("tolerance", [0.1, None])
def test_it_chooses_as_in_memory(heads, tolerance):
    arrays = clustered(LENGTH, dtype=np.float32)
    lazy = lazily(arrays, ROWS, heads)
    output, report = attend(lazy, tolerance=tolerance)
    assert output.chunks == (*lazy[0].chunks[:-1], (arrays[2].shape[-1],))
    _, want = attend(arrays, tolerance=tolerance)
    assert report[:3] == want[:3]
    for name in ("head_methods", "head_features", "head_windows", "head_pairs"):
        assert_array_equal(getattr(report, name), getattr(want, name))
    assert report.cost == want.cost
    assert_allclose(report.error, want.error, rtol=0.6)
    judged(arrays, output.compute(), report)


@pytest.mark.parametrize("heads", [1, 2], ids=["heads in chunks", "heads together"])
def test_a_head_that_landmarks_do_not_fit_is_exact(heads):
    arrays = one_hard_head(LENGTH)
    message = "tolerance=0.1 takes exact attention for 1 of 2 heads"
    with pytest.warns(UserWarning, match=message) as caught:
        output, report = attend(lazily(arrays, ROWS, heads))
    told = [w.filename for w in caught if "tolerance" in str(w.message)]
    assert told == [__file__]
    assert report.head_methods.tolist() == ["landmarks", "exact"]
    got, want = output.compute(), linattn.softmax_attention(*arrays)
    close(got[1], want[1])
    judged(arrays, got, report, exact=want)


def test_without_a_tolerance_an_output_that_is_far_off_warns():
    with pytest.warns(UserWarning, match=r"of head \(1,\) is estimated at"):
        _, report = attend(lazily(one_hard_head(LENGTH), ROWS), tolerance=None)
    assert report.error[1] > 0.1


@pytest.mark.parametrize("heads", [(2, 2), (4,)], ids=str)
def test_a_head_may_have_more_landmarks_than_another(heads):
    """Heads of leading axes in one chunk or several, in groups of another order."""
    easy, hard = clustered(LENGTH, heads=1), clustered(LENGTH, heads=2, seed=1)
    arrays = [np.concatenate([x, y, x])[None] for x, y in zip(easy, hard, strict=True)]
    arrays[0][:, 1:3] *= 3
    lazy = [da.from_array(x, chunks=(1, heads, ROWS, -1)) for x in arrays]
    errors = attend(lazy, tolerance=1.0)[1].error[0]
    # What the worst head is expected to have with twice as many, and more than the others have.
    tolerance = 0.95 * float(errors.max())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="tolerance=")
        output, report = attend(lazy, tolerance=tolerance)
    assert len(set(report.head_features[0])) > 1
    assert output.chunks == ((1,), heads, lazy[0].chunks[-2], (8,))
    judged(arrays, output.compute(), report, tolerance=tolerance)


# Right for any arrays -----------------------------------------------------------------------------


@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 9), masked=st.booleans(), cross=st.booleans())
def test_any_chunks(data, seed, masked, cross):
    """Masks and biases of all kinds, queries of another length, and heads that share a key."""
    arrays = clustered(LENGTH, seed=seed, dtype=np.float32)
    arrays = (arrays[0][:, : LENGTH - 99 * cross], arrays[1][:1], arrays[2][:1])
    options: dict[str, Any] = {}
    if masked:
        rng = np.random.default_rng(seed)
        options["key_mask"] = rng.random(LENGTH) < 0.9
        options["key_bias"] = rng.standard_normal((1, LENGTH)).astype(np.float32)
    lazy = {name: da.from_array(x, chunks=700) for name, x in options.items()}
    tolerance = data.draw(st.sampled_from([0.1, None]))
    outputs = []
    for name in ("chunks", "other chunks"):
        rows = data.draw(chunkings(LENGTH), name)
        of_query = data.draw(chunkings(LENGTH - 99), "of queries") if cross else rows
        query = lazily(arrays[:1], of_query, data.draw(st.sampled_from([1, 2])))
        tokens = (*query, *lazily(arrays[1:], rows))
        output, report = attend(tokens, **lazy, tolerance=tolerance)
        assert report.method == "landmarks"
        assert output.chunks[-2] == of_query
        outputs.append(output.compute())
        exact = linattn.softmax_attention(*arrays, **options)
        judged(arrays, outputs[-1], report, exact=exact)
    close(*outputs, tol=1e-4)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 2)], ids=str)
def test_leading_axes(lead):
    arrays = [x.reshape(*lead, LENGTH, 8) for x in clustered(LENGTH, heads=int(np.prod(lead)))]
    chunks = (*((1, 0, 1) if n == 2 else (1,) for n in lead), ROWS, -1)
    output, report = attend([da.from_array(x, chunks=chunks) for x in arrays], tolerance=None)
    assert report.error.shape == lead
    assert output.shape == (*lead, LENGTH, 8)
    assert output.dtype == np.float64
    judged(arrays, output.compute(), report)


def test_a_head_of_which_nothing_is_seen():
    arrays = clustered(LENGTH, dtype=np.float32)
    mask = np.stack([np.arange(LENGTH) < 0, np.arange(LENGTH) < 2400])
    output, report = attend(lazily(arrays, ROWS), key_mask=da.from_array(mask, chunks=(2, 999)))
    assert report.head_methods.tolist() == ["landmarks"] * 2
    got, want = output.compute(), linattn.softmax_attention(*arrays, key_mask=mask)
    assert_array_equal(got[0], 0)
    assert (error(got[1:], want[1:]) < 0.1).all()


@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
@pytest.mark.parametrize("sampled", [SAMPLED, 2 * LENGTH], ids=["a sample", "all rows"])
def test_what_is_judged_is_what_is_computed(monkeypatch, sampled):
    """With a window and without, at the ends of the sequence, too."""
    monkeypatch.setattr(_dask_rows, "MIN_NUM_ROWS", sampled)
    arrays, rng = clustered(LENGTH), np.random.default_rng(0)
    options: Any = dict(key_mask=rng.random(LENGTH) < 0.9, key_bias=rng.standard_normal(LENGTH))
    curve, try_landmarks = _dask._curve, _dask.DaskSearch.try_landmarks
    noted: list[Any] = []

    def noting(tokens, outputs, *rest):
        noted.append((tokens.rows, outputs))
        return curve(tokens, outputs, *rest)

    def noting_fit(self, m, chosen):
        phi, curves = try_landmarks(self, m, chosen)
        noted.append((phi, self._window))
        return phi, curves

    monkeypatch.setattr(_dask, "_curve", noting)
    monkeypatch.setattr(_dask.DaskSearch, "try_landmarks", noting_fit)
    lazy = {name: da.from_array(x, chunks=ROWS) for name, x in options.items()}
    attend(lazily(arrays, ROWS), **lazy)
    *of_heads, (phi, window) = noted[:3]
    in_memory: Any = linattn.linear_attention
    for way, exact_window in enumerate([None, window]):
        want = in_memory(*arrays, phi, **options, exact_window=exact_window)
        for h, (rows, outputs) in enumerate(of_heads):
            assert_allclose(outputs[way], want[h, rows], rtol=1e-6, atol=1e-9)
    ends = [(rows < window).any() and (rows >= LENGTH - window).any() for rows, _ in of_heads]
    assert any(ends) or sampled < LENGTH


def test_the_error_is_that_on_all_keys(monkeypatch):
    """Keys that are not in the sample draw all attention: landmarks know nothing of them."""
    query, key, value = clustered(LENGTH, dtype=np.float32)
    noted: list[Any] = []
    sample_rows = _dask.sample_rows

    def noting(given):
        noted.append(sample_rows(given))
        return noted[-1]

    monkeypatch.setattr(_dask, "sample_rows", noting)
    attend(lazily((query, key, value), ROWS))
    unseen = np.setdiff1d(np.arange(LENGTH), noted[0].of_key)[::7]
    assert len(unseen) > 50
    rng = np.random.default_rng(1)
    key[:, unseen] = 3 * rng.standard_normal((2, len(unseen), 8))
    value[:, unseen] *= rng.choice([-9, 9], (len(unseen), 1))
    with pytest.warns(UserWarning, match="takes exact attention, in quadratic time"):
        output, report = attend(lazily((query, key, value), ROWS))
    assert report.method == "exact"
    assert_array_equal(noted[1].of_key, noted[0].of_key)
    close(output.compute(), linattn.softmax_attention(query, key, value), tol=1e-5)


# What is computed, and when -----------------------------------------------------------------------


def recorded(arrays, rows):
    """Dask arrays, and the number of rows of each that is read."""
    reads: tuple[list[Any], ...] = ([], [], [])
    pairs = zip(arrays, reads, "qkv", strict=True)
    chunks = (len(arrays[0]), rows, -1)
    return reads, [
        da.from_array(Recorded(x, r), chunks=chunks, name=name, meta=x[:0, :0, :0])
        for x, r, name in pairs
    ]


def test_a_sample_and_one_pass_over_keys_are_computed():
    arrays, rows = clustered(LENGTH, dtype=np.float32), 40
    reads, lazy = recorded(arrays, rows)
    output, report = attend(lazy)
    assert report.head_windows.tolist() == [0, 0]
    blocks = LENGTH // rows
    of_query, of_key, of_value = (len(r) for r in reads)
    assert of_query <= 2 * RUNS
    assert blocks < of_key == of_value <= blocks + 5 * RUNS
    for read in reads:
        read.clear()
    with dask.config.set(scheduler=refuse):
        output[..., :rows, :]
    output[..., :rows, :].compute()
    assert reads == ([0], [], [])


def test_no_more_than_a_sample_comes_to_the_client(monkeypatch):
    arrays = clustered(8 * LENGTH, dtype=np.float32)
    largest: list[int] = []
    compute = dask.compute

    def noting(*given, **options):
        values = compute(*given, **options)
        largest.extend(x.shape[-2] for x in values if x is not None and x.ndim == 3)
        return values

    monkeypatch.setattr(dask, "compute", noting)
    attend(lazily(arrays, ROWS))
    assert SAMPLED <= max(largest) <= 4 * SAMPLED


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"is_causal": True, "tolerance": None}],
    ids=["short", "causal", "causal, no tolerance"],
)
def test_nothing_is_computed_where_nothing_is_chosen(options):
    arrays = clustered(LENGTH if options else 100, dtype=np.float32)
    with dask.config.set(scheduler=refuse):
        output, report = attend(lazily(arrays, ROWS), **options)
    assert report.method == "exact"
    want = linattn.softmax_attention(*arrays, is_causal="is_causal" in options)
    close(output.compute(), want, tol=1e-5)


def test_chunks_that_do_not_fit_are_refused_before_anything_is_computed():
    lazy = list(lazily(clustered(LENGTH), ROWS))
    lazy[2] = lazy[2].rechunk({-2: 700})
    message = r"key and value must have equal chunks along axis -2, .*rechunk"
    with dask.config.set(scheduler=refuse), pytest.raises(ValueError, match=message):
        attend(lazy)


@pytest.mark.parametrize("heads", [1, 2], ids=["heads in chunks", "heads together"])
def test_at_most_eight_tasks_a_block(heads):
    lazy = lazily(clustered(LENGTH, dtype=np.float32), 40, heads)
    output, _ = attend(lazy)
    assert len(output.__dask_graph__()) <= 8 * int(np.prod(output.numblocks))
