"""Run the comparison: ``python -m benchmarks.peers --help``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers import numbers, scales
from benchmarks.peers.in_numpy import EXPONENTIALS
from benchmarks.peers.machine import describe, slug
from benchmarks.peers.page import RESULTS
from benchmarks.peers.problem import Sizes
from benchmarks.peers.record import Record
from benchmarks.peers.registry import ATTENTION, DECODE, GRADIENT, PEERS, RATES, TEXT
from benchmarks.peers.rotation import Budget, Runner
from benchmarks.peers.tables import joined, tables


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Time linattn beside other ways to compute the same attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_problems(parser.add_argument)
    _add_scales(parser.add_argument)
    _add_cores(parser.add_argument)
    _add_limits(parser.add_argument)
    options = parser.parse_args(arguments)
    if max(options.threads) > len(options.cores):
        parser.error(f"--threads {max(options.threads)} needs as many --cores, got {options.cores}")
    return options


def _add_problems(add: Callable[..., Any]) -> None:
    """Add what is computed, and by whom."""
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="NAME", help=_names())
    add("--lengths", type=_positive, nargs="*", default=[4096], metavar="N", help="tokens")
    add(
        "--gradients",
        type=_positive,
        nargs="*",
        default=[4096],
        metavar="N",
        help="tokens of output and gradients",
    )
    add(
        "--contexts",
        type=_positive,
        nargs="*",
        default=[1024, 16384],
        metavar="N",
        help="tokens before the one that is decoded",
    )
    add(
        "--texts",
        type=_positive,
        nargs="*",
        default=[4096],
        metavar="N",
        help="tokens of a text in softmax attention, exact or fitted to it",
    )
    add(
        "--memory",
        type=_positive,
        nargs="*",
        default=[16384, 65536],
        metavar="N",
        help="tokens at which memory is measured, in processes that are not timed",
    )
    add("--batch", type=_positive, default=1)
    add("--heads", type=_positive, default=8)
    add("--dim", type=_positive, default=64)
    add("--features", type=_positive, default=256)


def _add_cores(add: Callable[..., Any]) -> None:
    """Add where it is computed."""
    add(
        "--threads",
        type=_positive,
        nargs="+",
        default=[1],
        metavar="T",
        help="threads of each peer; several counts take turns in one rotation",
    )
    add(
        "--cores",
        type=int,
        nargs="+",
        default=_cores(),
        metavar="C",
        help="cores to be pinned to, the first T of them for T threads",
    )


def _add_scales(add: Callable[..., Any]) -> None:
    """Add scales of inputs, and how many tokens these are of."""
    add(
        "--scales",
        type=float,
        nargs="*",
        default=[1, 2, 3, 4, 6, 8, 12, 16],
        metavar="S",
        help="what queries and keys are multiplied by, to time linattn by it; 1 is always there",
    )
    add("--scale-length", type=_positive, default=4096, metavar="N", help="tokens of these")


def _add_limits(add: Callable[..., Any]) -> None:
    """Add how long it may take, how much it may need, and where results go."""
    add("--rounds", type=_positive, default=7, help="turns of each peer at each length")
    add("--turn-seconds", type=float, default=0.3, help="how long a turn is")
    add(
        "--call-seconds",
        type=float,
        default=10.0,
        help="leave out what takes longer, or would by what a shorter length took",
    )
    add(
        "--length-seconds",
        type=float,
        default=120.0,
        help="begin no further round of a length after so long, but for the first three",
    )
    add(
        "--memory-gib",
        type=float,
        default=8.0,
        help="leave out what would need more: inputs of all peers and workspace of one",
    )
    add("--out", type=Path, default=RESULTS, help="folder of the record and its picture")


def _names() -> str:
    return f"which peers: {', '.join(PEERS)}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want a positive number, got {text}")
    return number


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, time, measure, print and write."""
    options = _arguments(arguments)
    sizes = Sizes(options.batch, options.heads, options.dim, options.features)
    budget = Budget(
        options.memory_gib * 2**30,
        options.call_seconds,
        options.turn_seconds,
        options.rounds,
        options.length_seconds,
    )
    settings = {"exponentials": EXPONENTIALS, **budget._asdict()}
    record = Record(describe(options.cores), sizes, settings)
    threads = sorted(set(options.threads))
    say = partial(print, flush=True)
    runner = Runner(record, options.peers, threads, options.cores, budget, say)
    try:
        runner.check()
        record.machine["libraries"] = runner.libraries(options.peers[0], threads[0])
        for length in sorted(set(options.lengths)):
            runner.time(sizes, length, ATTENTION + RATES)
        for length in sorted(set(options.gradients)):
            runner.time(sizes, length, GRADIENT)
        for context in sorted(set(options.contexts)):
            runner.time(sizes, context, DECODE)
        for length in sorted(set(options.texts)):
            runner.time(sizes, length, TEXT)
    finally:
        runner.close()
    for length in sorted(set(options.memory)):
        runner.measure_memory(sizes, length, threads[0])
    if options.scales:
        scales.measure(record, options.scale_length, options.scales, options.cores, say)

    print()
    print(joined(tables(record)))
    if options.scales:
        print()
        print(numbers.table(numbers.ratios(options.scale_length, options.rounds)))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{slug(record.machine['cpu'])}.json"
    record.write(path)
    print(f"wrote {path}")
    if find_spec("matplotlib") is not None:
        from benchmarks.peers.plot import picture

        picture(record, path.with_suffix(".png"), threads=threads[0])
        print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
