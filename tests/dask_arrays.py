"""Dask arrays for tests: made in any chunks, read by counting sources, compared with NumPy's.

Importing this skips the test file where Dask is not installed.
"""

import itertools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps import (
    CosformerFeatures,
    EluFeatures,
    PositiveFeatures,
    SoftmaxFeatures,
)

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

D, E = 8, 5
MAPS = {
    "positive": PositiveFeatures(D, 16, rng=0),
    "elu": EluFeatures(D),
    "softmax": SoftmaxFeatures(D),
    "cosformer": CosformerFeatures(D, max_length=400),
}


def tokens(length, *, heads=2, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((heads, length, n)).astype(dtype) for n in (D, D, E))


def lazily(arrays, rows, heads=1):
    """Dask arrays of NumPy's, in chunks of these rows and so many heads."""
    return tuple(da.from_array(a, chunks=(min(heads, len(a)), rows, a.shape[-1])) for a in arrays)


@st.composite
def chunkings(draw, length):
    """Any way to cut a length, empty chunks included."""
    cuts = draw(st.lists(st.integers(0, length), max_size=5))
    ends = [0, *sorted(cuts), length]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def refuse(*args, **kwargs):
    raise AssertionError("computed while the graph was built")


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def close(got, want, *, tol=2e-6):
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
    assert_allclose(got, want, rtol=tol, atol=tol * scale)


def states_agree(got, want):
    """What two states stand for, whatever their scales, and what else they carry."""
    assert (got.length, got.fingerprint) == (want.length, want.fingerprint)
    assert (got.log_decay is None) == (want.log_decay is None)
    if want.log_decay is not None:
        close(got.log_decay, want.log_decay)
    finite = np.isfinite(want.log_scale)
    assert_array_equal(np.isfinite(got.log_scale), finite)
    shift = np.where(finite, got.log_scale, 0) - np.where(finite, want.log_scale, 0)
    close(got.kvz * np.exp(shift)[..., None], want.kvz, tol=4e-6)


def in_dask(option):
    """Dask's array of an array, in one chunk; a number, or what is read while building, is one."""
    if isinstance(option, linattn.State):
        kvz, log_scale, decay = map(in_dask, (option.kvz, option.log_scale, option.log_decay))
        return option._replace(kvz=kvz, log_scale=log_scale, log_decay=decay)
    if isinstance(option, tuple):
        return tuple(map(in_dask, option))
    is_array = isinstance(option, np.ndarray) and option.dtype.kind in "fb"
    return da.from_array(option) if is_array else option


def compare(arrays, rows, phi, options=None, *, heads=1, tol=2e-6, chunked=None, **flags):
    """Assert that a call on chunks gives what it gives in memory; return its lazy results."""
    maps = [] if phi is None else [phi]
    attend: Any = linattn.linear_attention if maps else linattn.softmax_attention
    want = attend(*arrays, *maps, **(options or {}), **flags)
    chunked = lazily(arrays, rows, heads) if chunked is None else chunked
    given = {name: in_dask(option) for name, option in (options or {}).items()}
    with dask.config.set(scheduler=refuse):
        got = attend(*chunked, *maps, **given, **flags)
    results, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for one, other in zip(dask.compute(*results), wanted, strict=True):
        if isinstance(other, linattn.State):
            states_agree(one, other)
        else:
            assert one.dtype == other.dtype
            close(one, other, tol=tol)
    return got


class Recorded:
    """An array whose reads are noted."""

    def __init__(self, array, reads):
        self.array, self.reads = array, reads
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, index):
        self.reads.append(index[-2].start)
        return self.array[index]


def recorded(reads):
    """Forty tokens in chunks of ten, whose reads are noted."""
    arrays = zip(tokens(40), reads, "qkv", strict=True)
    return [
        da.from_array(Recorded(a, r), chunks=(2, 10, -1), name=name, meta=a[:0, :0, :0])
        for a, r, name in arrays
    ]


def assert_reads_are_fused(arrays):
    """Nothing that is read is a task of its own, which would wait in a worker's memory."""
    keys = {key for x in arrays for key in x.__dask_graph__() if isinstance(key, tuple)}
    assert not [key for key in keys if key[0].startswith(("q", "k", "v"))]
    return keys
