"""Attention from one zarr store to another, of data larger than the memory of a Dask cluster.

    python -m benchmarks.beyond_memory --folder DIR [--limit-mib 400] [--times 4] [--rows 32000]

2 heads, d = e = 64, m = 256, float32. Query, key and value, ``--times`` as large together as the
memory that a local cluster of two processes may use, are written to stores in the folder. Full and
causal attention are computed from there to a third place by one call each, on a cluster of its own.
Prints what Dask's own counters say was spilled to disk, the most memory that a worker held and the
seconds, and compares the last block with float64 in memory. Everything that was made is removed.
Needs the extra ``dask``, and on disk four thirds of the data.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import linattn

HEADS, DIM, NUM_FEATURES = 2, 64, 256
WORKERS = 2
TOLERANCE = 5e-6

attend: Any = linattn.linear_attention
da: Any = importlib.import_module("dask.array")
dask: Any = importlib.import_module("dask")
distributed: Any = importlib.import_module("distributed")
zarr: Any = importlib.import_module("zarr")


class Use(NamedTuple):
    """What a worker used."""

    spilled: int
    """Values written to disk for want of memory."""
    peak: int
    """Bytes that its process held at most."""


def use(dask_worker: Any) -> Use:
    """Ask a worker, on it."""
    spilled = int(dask_worker.data.cumulative_metrics["disk-write", "count"])
    return Use(spilled, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def make(folder: Path, tokens: int, rows: int) -> None:
    """Write query, key and value to stores, and make one for the output."""
    rng = np.random.default_rng(0)
    shape, chunks = (HEADS, tokens, DIM), (HEADS, rows, DIM)
    for name in ("query", "key", "value", "output"):
        array = zarr.create_array(
            folder / name, shape=shape, chunks=chunks, dtype="float32", compressors=None
        )
        for start in range(0, tokens, rows) if name != "output" else ():
            size = min(rows, tokens - start)
            block = rng.standard_normal((HEADS, size, DIM), dtype=np.float32)
            array[:, start : start + size] = block


def run(folder: Path, phi: Any, is_causal: bool, limit: int) -> tuple[float, list[Use]]:
    """Attend on a cluster of its own; the seconds, and what its workers used."""
    inputs = [da.from_zarr(folder / name) for name in ("query", "key", "value")]
    cluster = distributed.LocalCluster(
        n_workers=WORKERS,
        threads_per_worker=1,
        memory_limit=limit,
        local_directory=str(folder),
        dashboard_address=None,
    )
    with cluster, distributed.Client(cluster) as client:
        start = perf_counter()
        output = attend(*inputs, phi, is_causal=is_causal)
        da.store(output, zarr.open_array(folder / "output", mode="r+"), lock=False)
        return perf_counter() - start, list(client.run(use).values())


def last_rows(folder: Path, phi: Any, rows: int) -> list[Any]:
    """Attend with the last block in float64, block by block in memory: full and causal."""
    query, key, value = (zarr.open_array(folder / n, mode="r") for n in ("query", "key", "value"))
    last = query.shape[1] - rows
    with linattn.config(precision="float64"):
        state = linattn.init_state(phi, DIM, like=key[:, :1])
        for start in range(0, last, rows):
            block = slice(start, start + rows)
            state = linattn.update_state(state, key[:, block], value[:, block], phi)
        arrays = [array[:, last:] for array in (query, key, value)]
        return [attend(*arrays, phi, is_causal=i, initial_state=state) for i in (False, True)]


def main() -> None:
    """Print a line for each kind of attention."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit-mib", type=int, default=400)
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=32_000)
    options = parser.parse_args()
    limit, row = options.limit_mib << 20, 3 * HEADS * DIM * 4
    blocks = -(-int(options.times * WORKERS * limit) // (row * options.rows))
    tokens = blocks * options.rows
    phi = linattn.feature_maps.PositiveFeatures(DIM, num_features=NUM_FEATURES, rng=0)
    print(
        f"{tokens:,} tokens in {blocks} blocks, {tokens * row / 2**20:,.0f} MiB of inputs, "
        f"{WORKERS} workers of {options.limit_mib} MiB; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        make(folder, tokens, options.rows)
        for is_causal, want in enumerate(last_rows(folder, phi, options.rows)):
            seconds, uses = run(folder, phi, bool(is_causal), limit)
            got = zarr.open_array(folder / "output", mode="r")[:, -options.rows :]
            found = np.abs(got - want).max() / np.abs(want).max()
            if not found < TOLERANCE:
                raise AssertionError(f"off by {found:.2g}")
            print(
                f"{'causal' if is_causal else 'full'}: {seconds:.0f} s, "
                f"{sum(each.spilled for each in uses)} values spilled, at most "
                f"{max(each.peak for each in uses) / 2**20:.0f} MiB in a worker, error {found:.1g}"
            )


if __name__ == "__main__":
    main()
