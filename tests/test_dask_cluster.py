"""Two worker processes, one of which is killed on the way."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn.feature_maps import PositiveFeatures

da: Any = pytest.importorskip("dask.array")
distributed: Any = pytest.importorskip("distributed")

# What a worker that is killed leaves open is closed by the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

attend: Any = linattn.linear_attention
D = 32
PHI = PositiveFeatures(D, 32, rng=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Two processes of one thread; what they spill goes into a folder of the tests."""
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            memory_limit="1GiB",
            local_directory=str(tmp_path_factory.mktemp("spilled")),
            dashboard_address=None,
            silence_logs=50,
        ) as local,
        distributed.Client(local) as connected,
    ):
        yield connected


class Source:
    """An array whose blocks are all the same; it kills the worker that first reads a marked one."""

    def __init__(self, block, length, mark=None, start=None):
        self.block, self.mark, self.start = block, mark, start
        self.shape, self.dtype, self.ndim = (length, D), block.dtype, 2

    def __getitem__(self, index):
        rows = index[0]
        if rows.start == self.start and not os.path.exists(self.mark):
            with open(self.mark, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return self.block[: rows.stop - rows.start].copy()


def lazy(source, name):
    rows = len(source.block)
    return da.from_array(source, chunks=(rows, D), name=name, meta=source.block[:0])


def blocks(rows):
    return np.random.default_rng(0).standard_normal((3, rows, D), dtype=np.float32)


def test_a_killed_worker_changes_no_bit(client, tmp_path):
    rows, length = 3000, 30_000
    query, key, value = (Source(block, length) for block in blocks(rows))
    arrays = [lazy(s, name) for s, name in zip((query, key, value), "qkv", strict=True)]
    want = attend(*arrays, PHI, is_causal=True).compute(scheduler="synchronous")
    mark = tmp_path / "killed"
    arrays[1] = lazy(Source(key.block, length, str(mark), 5 * rows), "killing")
    output = attend(*arrays, PHI, is_causal=True)
    got = client.compute(output).result(timeout=90)
    assert mark.exists()
    assert_array_equal(got, want)
