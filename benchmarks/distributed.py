"""Time of attention on Dask arrays beside the same call on NumPy arrays in memory.

    python -m benchmarks.distributed [--tokens 500000] [--rounds 5] [--page docs/dask.md]

2 heads, d = e = 64, m = 256, float32, on threads of this machine, BLAS on one thread. Dask arrays
lie in memory in their blocks before a clock starts; graphs are made within the time. All are called
in turn, in an order that changes from round to round: a time is the median over rounds, a ratio the
median of the ratios within a round. Times are those of the clock, as several threads are at work:
the record has the load of the machine. Tasks and the time to make them are counted for each block;
what a task costs the scheduler, and how long one waits for another, are those of empty tasks on a
local cluster of two processes. From these parts comes what a cluster would take.

Prints the section of the page; ``--page`` puts it there and draws the picture, ``--from-record``
without measuring. Needs the extras ``dask`` and ``cli``; takes four minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import linattn
from benchmarks.peers.machine import describe

HEADS, DIM, NUM_FEATURES = 2, 64, 256
KINDS = ("full", "causal")
ROWS = (8_000, 16_000, 32_000, 64_000)
TOLERANCE = 2e-6
EMPTY_TASKS, CHAIN = 3000, 300

Call = Callable[[], Any]

attend: Any = linattn.linear_attention
da: Any = importlib.import_module("dask.array")


def lazily(arrays: Any, rows: int) -> list[Any]:
    """Return Dask arrays of all heads in chunks of these rows."""
    return [da.from_array(x, chunks=(HEADS, rows, DIM), name=False) for x in arrays]


def attention(arrays: Any, phi: Any, is_causal: bool, threads: int | None = None) -> Any:
    """Call the library on any arrays."""
    with linattn.config(num_threads=threads):
        return attend(*arrays, phi, is_causal=is_causal)


def on_dask(lazy: Any, phi: Any, is_causal: bool, threads: int) -> Any:
    """Build the graph and compute it; outputs stay in their blocks, as a pipeline has them."""
    output = attention(lazy, phi, is_causal)
    return output.persist(scheduler="threads", num_workers=threads)


def in_turn(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the times of each call, all called in turn in an order that changes."""
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in map(str, rng.permutation(list(calls))):
            start = perf_counter()
            calls[name]()
            times[name].append(perf_counter() - start)
    return times


def compare(arrays: Any, phi: Any, is_causal: bool, rounds: int) -> dict[str, Any]:
    """Time one kind of attention: blocks of several lengths, and one thread and two."""
    call = partial(attention, arrays, phi, is_causal)
    lazy = {rows: partial(on_dask, lazily(arrays, rows), phi, is_causal) for rows in ROWS}
    calls: dict[str, Call] = {f"NumPy, {n} threads": partial(call, n) for n in (1, 2)}
    calls |= {f"Dask, {rows} rows, 2 threads": partial(lazy[rows], 2) for rows in ROWS}
    calls["Dask, 32000 rows, 1 threads"] = partial(lazy[32_000], 1)
    whole = call(2)
    error = float(np.abs(lazy[32_000](2).compute() - whole).max() / np.abs(whole).max())
    if not error < TOLERANCE:
        raise AssertionError(f"off by {error:.2g}")
    times = in_turn(calls, rounds)
    base = times["NumPy, 2 threads"]
    return {
        "seconds": {name: statistics.median(each) for name, each in times.items()},
        "over NumPy on 2 threads": {
            name: statistics.median(a / b for a, b in zip(each, base, strict=True))
            for name, each in times.items()
        },
        "error": error,
    }


def graph(phi: Any, is_causal: bool, blocks: int = 1000) -> dict[str, float]:
    """Count tasks of a long sequence, and time what makes them."""
    token = da.zeros((HEADS, 200 * blocks, DIM), chunks=(HEADS, 200, DIM), dtype="float32")
    start = perf_counter()
    output = attention([token, token, token], phi, is_causal)
    seconds = perf_counter() - start
    tasks = len(dict(output.__dask_graph__())) - len(dict(token.__dask_graph__()))
    return {"tasks a block": tasks / blocks, "milliseconds a block": 1e3 * seconds / blocks}


def cost_of_tasks() -> dict[str, float]:
    """Time empty tasks on a local cluster of two processes: many at once, and in a chain."""
    distributed: Any = importlib.import_module("distributed")

    def empty(*_: object) -> int:
        return 0

    local = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with local, distributed.Client(local) as client:
        client.submit(empty).result()
        start = perf_counter()
        distributed.wait(client.persist(da.zeros(EMPTY_TASKS, chunks=1)))
        many = perf_counter() - start
        start = perf_counter()
        last = client.submit(empty, pure=False)
        for _ in range(CHAIN):
            last = client.submit(empty, last, pure=False)
        last.result()
        chain = perf_counter() - start
    return {"many": 1e6 * many / EMPTY_TASKS, "chain": 1e6 * chain / CHAIN}


def on_paper(
    record: dict[str, Any], is_causal: bool, rows: int, workers: int, tokens: float
) -> dict[str, float]:
    """Predict a cluster of workers of one thread from the parts that were measured."""
    kind = "causal" if is_causal else "full"
    blocks = tokens / rows
    row = record[kind]["seconds"]["Dask, 32000 rows, 1 threads"] / record["tokens"]
    waits = 2 * math.sqrt(blocks) if is_causal else math.log(blocks, 8)
    tasks = record["graph"][kind]["tasks a block"] * blocks
    parts = {
        "blocks": blocks,
        "bytes of states": 4 * NUM_FEATURES * (DIM + 1) * HEADS * blocks,
        "work": row * tokens / workers,
        "scheduler": 1e-6 * record["microseconds a task"]["many"] * tasks,
        "waiting": 1e-6 * record["microseconds a task"]["chain"] * waits,
    }
    # A scheduler and its workers are at work side by side; what waits for a state does not overlap.
    return parts | {"seconds": max(parts["work"], parts["scheduler"]) + parts["waiting"]}


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Return the record of a run."""
    from threadpoolctl import threadpool_limits

    shape = (3, HEADS, tokens, DIM)
    arrays = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    phi = linattn.feature_maps.PositiveFeatures(DIM, num_features=NUM_FEATURES, rng=0)
    cores = sorted(os.sched_getaffinity(0))
    record: dict[str, Any] = {"machine": describe(cores), "tokens": tokens, "rounds": rounds}
    record["load before"] = os.getloadavg()[0]
    record["graph"] = {kind: graph(phi, kind == "causal") for kind in KINDS}
    record["microseconds a task"] = cost_of_tasks()
    copies = in_turn({"": partial(lazily, arrays, 32_000)}, rounds)
    record["seconds to copy"] = statistics.median(copies[""])
    with threadpool_limits(1):
        for kind in KINDS:
            record[kind] = compare(arrays, phi, kind == "causal", rounds)
    record["load after"] = os.getloadavg()[0]
    record["on paper"] = {
        kind: {
            str(rows): on_paper(record, kind == "causal", rows, 1000, 1e9)
            for rows in (32_000, 256_000)
        }
        for kind in KINDS
    }
    return record


def main() -> None:
    """Write a record, print the section of the page, and renew the page."""
    from benchmarks.distributed_page import draw, replace_section, section

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    default = Path(__file__).parent / "results" / "distributed.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--from-record", action="store_true")
    options = parser.parse_args()
    if not options.from_record:
        record = measure(options.tokens, options.rounds)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record = json.loads(options.out.read_text(encoding="utf-8"))
    print(section(record))
    if options.page is not None:
        replace_section(options.page, record)
        draw(record, options.page.parent / "images" / "dask.png")


if __name__ == "__main__":
    main()
