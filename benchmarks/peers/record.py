"""What a run found, as it is kept in JSON, and what follows from it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.limits import limit_seconds, product_shapes
from benchmarks.peers.problem import Sizes
from benchmarks.peers.registry import PEERS

__all__ = [
    "MIN_CORE_SHARE",
    "Cell",
    "Check",
    "Crossover",
    "LeftOut",
    "Memory",
    "Record",
    "Scaled",
    "Timing",
    "reference",
]

MIN_CORE_SHARE = 0.95
"""A turn on one thread that got less of its core than this was disturbed."""


class Cell(NamedTuple):
    """One thing to time."""

    peer: str
    kind: str
    length: int
    threads: int


def reference(cell: Cell) -> Cell:
    """Return what a cell is compared with: linattn's, or for linattn's its own on one thread."""
    beside = PEERS[cell.peer].beside
    return cell._replace(threads=1) if beside == cell.peer else cell._replace(peer=beside)


@dataclass(frozen=True)
class Check:
    """How far a peer was from the oracle, relative to the largest number wanted."""

    peer: str
    kind: str
    threads: int
    error: float


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median of each round.

    ``shares`` is how much processor time the child got in each round, of what its threads could
    have had. On one thread anything below 1 went to other work of the machine. ``beside``: seconds
    of its :func:`reference` in each round, the mean of a turn just before and one just after; empty
    where there were none.
    """

    peer: str
    kind: str
    length: int
    threads: int
    rounds: tuple[float, ...]
    shares: tuple[float, ...]
    beside: tuple[float, ...] = ()

    @property
    def cell(self) -> Cell:
        """What was timed."""
        return Cell(self.peer, self.kind, self.length, self.threads)

    @property
    def seconds(self) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Memory:
    """Bytes that a call takes at most beyond inputs and output.

    ``resident`` is the growth of the process, ``traced`` what tracemalloc saw, for peers in NumPy.
    """

    peer: str
    kind: str
    length: int
    threads: int
    resident: int
    traced: int | None


@dataclass(frozen=True)
class Scaled:
    """Processor seconds of a call by scales of queries and keys, the first of them 1, in rounds."""

    case: str
    dtype: str
    path: str
    length: int
    scales: tuple[float, ...]
    rounds: tuple[tuple[float, ...], ...]

    def ratios(self) -> list[float]:
        """Return times at the other scales over that at 1: medians of the rounds' ratios."""
        by_scale = list(zip(*self.rounds, strict=True))
        return [
            statistics.median(x / first for x, first in zip(taken, by_scale[0], strict=True))
            for taken in by_scale[1:]
        ]


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and why; no length where a peer could not start."""

    peer: str
    kind: str
    length: int | None
    threads: int
    reason: str


@dataclass(frozen=True)
class Crossover:
    """The length from which one peer is faster than another.

    ``length`` is None where the curves do not meet within ``lowest`` and ``highest``; then
    ``is_ahead`` says which side the whole range lies on.
    """

    length: float | None
    is_ahead: bool
    lowest: int
    highest: int


@dataclass
class Record:
    """A whole run."""

    machine: dict[str, Any]
    sizes: Sizes
    settings: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write JSON."""
        content = asdict(self) | {"sizes": self.sizes._asdict()}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read what :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            machine=content["machine"],
            sizes=Sizes(**content["sizes"]),
            settings=content["settings"],
            checks=[Check(**item) for item in content["checks"]],
            timings=[Timing(**_with_tuples(item)) for item in content["timings"]],
            memory=[Memory(**item) for item in content["memory"]],
            scaled=[Scaled(**_with_tuples(item)) for item in content.get("scaled", [])],
            left_out=[LeftOut(**item) for item in content["left_out"]],
        )

    def timing(self, peer: str, kind: str, length: int, threads: int) -> Timing | None:
        """Return what was timed there, if it was."""
        wanted = Cell(peer, kind, length, threads)
        return next((timing for timing in self.timings if timing.cell == wanted), None)

    def lengths(self, kind: str) -> list[int]:
        """Return the lengths at which a kind was timed."""
        return sorted({timing.length for timing in self.timings if timing.kind == kind})

    def threads(self) -> list[int]:
        """Return the numbers of threads."""
        return sorted({timing.threads for timing in self.timings})

    def curve(self, peer: str, kind: str, threads: int) -> dict[int, float]:
        """Return seconds by length."""
        found = (self.timing(peer, kind, length, threads) for length in self.lengths(kind))
        return {timing.length: timing.seconds for timing in found if timing is not None}

    def ratio(self, cell: Cell, other: Cell) -> float | None:
        """Return how many times the other's time a cell took: median of the rounds' ratios.

        Where one is the reference of the other, by its turns around the other's.
        """
        ours, theirs = self.timing(*cell), self.timing(*other)
        if ours is None or theirs is None:
            return None
        first, second = ours.rounds, theirs.rounds
        if ours.beside and other == reference(cell):
            second = ours.beside
        elif theirs.beside and cell == reference(other):
            first = theirs.beside
        return statistics.median([a / b for a, b in zip(first, second, strict=True)])

    def pullback_share(self, kind: str, length: int, threads: int) -> float | None:
        """Return how many times the forward pass linattn's pullback takes: median of the rounds."""
        both = self.timing("linattn-favor", kind, length, threads)
        pullback = self.timing("linattn-pullback", kind, length, threads)
        if both is None or pullback is None:
            return None
        pairs = zip(pullback.rounds, both.rounds, strict=True)
        return statistics.median([p / (b - p) for p, b in pairs if b > p] or [math.inf])

    def rate(self, peer: str, kind: str, length: int) -> float | None:
        """Flops a second of a product, or exponentials, on one thread in one length's rotation."""
        timing = self.timing(peer, kind, length, 1)
        if timing is None:
            return None
        if kind == "exp":
            return float(self.settings["exponentials"]) / timing.seconds
        return 2 * math.prod(product_shapes(self.sizes)[kind]) / timing.seconds

    def limit_fraction(
        self, peer: str, kind: str, length: int, *, small: bool = False
    ) -> float | None:
        """Return how much of the limit on one thread a peer of linattn reached.

        The median over rounds of what each gave by its own rates: a machine that is slower for a
        while is so for the limit as well. ``small``: products may be in small ones.
        """
        feature_map = PEERS[peer].feature_map
        timing = self.timing(peer, kind, length, 1)
        shapes = product_shapes(self.sizes)
        if not small:
            del shapes["small"]
        found = {name: self.timing("numpy-rates", name, length, 1) for name in (*shapes, "exp")}
        known = {name: rate for name, rate in found.items() if rate is not None}
        exp = known.pop("exp", None)
        if feature_map is None or timing is None or not known or exp is None:
            return None
        fractions = []
        for turn, seconds in enumerate(timing.rounds):
            limit = limit_seconds(
                feature_map,
                self.sizes,
                length,
                is_causal=kind == "causal",
                sgemm=max(
                    2 * math.prod(shapes[name]) / rate.rounds[turn] for name, rate in known.items()
                ),
                exp=float(self.settings["exponentials"]) / exp.rounds[turn],
            )
            fractions.append(limit / seconds)
        return statistics.median(fractions)

    def growth(self, peer: str, kind: str, threads: int) -> tuple[float, int, int] | None:
        """Return the exponent of the length in the time, and the lengths it is taken between.

        From 4,096 tokens on, where the fixed cost of a call is small.
        """
        curve = self.curve(peer, kind, threads)
        long = [length for length in curve if length >= 4096]
        if len(long) < 2:
            return None
        low, high = long[0], long[-1]
        return math.log(curve[high] / curve[low]) / math.log(high / low), low, high

    def crossover(self, peer: str, other: str, kind: str, threads: int) -> Crossover | None:
        """Return from where on a peer is faster than another, between lengths by their powers."""
        ratios = dict(self._log_ratios(peer, other, kind, threads))
        if not ratios:
            return None
        lengths = list(ratios)
        slower = [place for place, length in enumerate(lengths) if ratios[length] > 0]
        if not slower or slower[-1] == len(lengths) - 1:
            return Crossover(None, not slower, lengths[0], lengths[-1])
        low, high = lengths[slower[-1]], lengths[slower[-1] + 1]
        share = ratios[low] / (ratios[low] - ratios[high])
        at = math.exp(math.log(low) + share * math.log(high / low))
        return Crossover(at, True, lengths[0], lengths[-1])

    def _log_ratios(
        self, peer: str, other: str, kind: str, threads: int
    ) -> Iterator[tuple[int, float]]:
        for length in self.lengths(kind):
            ratio = self.ratio(
                Cell(peer, kind, length, threads), Cell(other, kind, length, threads)
            )
            if ratio is not None:
                yield length, math.log(ratio)


def _with_tuples(item: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuple(x) for name, x in item.items()}


def _tuple(x: Any) -> Any:
    return tuple(map(_tuple, x)) if isinstance(x, list) else x
