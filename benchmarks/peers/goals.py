"""What a run is meant to show, and whether it did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.peers.record import Cell, Record
from benchmarks.peers.registry import ATTENTION, GRADIENT, LOOPS, PEERS, TEXT

__all__ = ["MIN_GAIN", "Goal", "goals"]

Measured = tuple[float, str]
"""A ratio, and what it is of."""

ANY = range(1 << 40)

MAX_BY_SCALE = {"full": 1.4, "causal": 3.0}
"""Times as long that a call may take where queries and keys are multiplied by some number."""

MIN_GAIN = 0.95
"""Time on one thread over that on more, below which more threads are slower."""


class Goal(NamedTuple):
    """What is wanted of every ratio of a kind, and the one that is furthest from it."""

    of: str
    wanted: str
    worst: float
    where: str
    is_met: bool

    @property
    def told(self) -> str:
        """The worst, and a word if it will not do."""
        return f"{self.worst:.2f}" + ("" if self.is_met else " MISSED")


def goals(record: Record) -> Iterator[Goal]:
    """Yield every goal that the record has numbers for."""
    for of, bound, measured in _with_lower_bounds(record):
        ratio, where = min(measured, default=(None, ""))
        if ratio is not None:
            yield Goal(of, f"≥ {bound:.2f}", ratio, where, ratio >= bound)
    for mode, bound in MAX_BY_SCALE.items():
        ratio, where = max(_by_scale(record, mode), default=(None, ""))
        if ratio is not None:
            yield Goal(f"time by scale, {mode}", f"≤ {bound:.2f}", ratio, where, ratio <= bound)


def _with_lower_bounds(record: Record) -> Iterator[tuple[str, float, Iterator[Measured]]]:
    """Yield names, bounds, and every ratio: others' time over linattn's, or gains of threads."""
    formulas, exact = ("jax-favor", "performer"), "torch-exact"
    yield "NumPy loop, 512 tokens", 0.97, _others(record, LOOPS, ATTENTION, ANY[512:1024])
    yield "NumPy loop, 1,024 and more", 1.0, _others(record, LOOPS, ATTENTION, ANY[1024:])
    yield "same recipe, torch ops", 1.0, _others(record, ["torch-favor"], ATTENTION)
    yield "elu+1, torch ops", 1.0, _others(record, ["torch-elu"], ATTENTION)
    yield "JAX, performer-pytorch", 1.0, _others(record, formulas, ATTENTION)
    yield "exact, full, 1,024 and more", 1.0, _others(record, [exact], ["full"], ANY[1024:])
    yield "exact, causal, 1,500 and more", 1.0, _others(record, [exact], ["causal"], ANY[1500:])
    yield "exact, text, 2,048 and more", 1.0, _others(record, ["torch-text"], TEXT, ANY[2048:])
    yield "gradients, torch autograd", 1.3, _others(record, ["torch-chunks"], GRADIENT)
    yield "gradients, torch by hand", 1.0, _others(record, ["torch-backward"], GRADIENT)
    yield "gradients, JAX by hand", 2.0, _others(record, ["jax-backward"], GRADIENT)
    yield "one thread over more", MIN_GAIN, _gains(record)
    yield "one thread over more, 4,096", 1.7, _gains(record, ANY[4096:])


def _others(
    record: Record, peers: Iterable[str], kinds: Iterable[str], lengths: range = ANY
) -> Iterator[Measured]:
    for timing in record.timings:
        peer, kind, length, _ = timing.cell
        if peer in peers and kind in kinds and length in lengths:
            ratio = record.ratio(timing.cell, timing.cell._replace(peer=PEERS[peer].beside))
            if ratio is not None:
                yield ratio, _told(timing.cell)


def _gains(record: Record, lengths: range = ANY) -> Iterator[Measured]:
    for timing in record.timings:
        peer, _, length, threads = timing.cell
        if threads > 1 and peer.startswith("linattn") and length in lengths:
            ratio = record.ratio(timing.cell._replace(threads=1), timing.cell)
            if ratio is not None:
                yield ratio, _told(timing.cell)


def _by_scale(record: Record, mode: str) -> Iterator[Measured]:
    for item in record.scaled:
        if item.case.endswith(mode):
            for ratio, scale in zip(item.ratios(), item.scales[1:], strict=True):
                yield ratio, f"{item.case}, {item.dtype}, {item.path}, at {scale:g}"


def _told(cell: Cell) -> str:
    threads = f", {cell.threads} threads" if cell.threads > 1 else ""
    return f"{PEERS[cell.peer].label}, {cell.kind}, {cell.length:,}{threads}"
