"""The order in which children are told to compute, and what may run at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import NamedTuple

from benchmarks.peers.problem import Sizes
from benchmarks.peers.processes import Child, PeerError
from benchmarks.peers.record import (
    MIN_CORE_SHARE,
    Cell,
    Check,
    LeftOut,
    Memory,
    Record,
    Timing,
    reference,
)
from benchmarks.peers.registry import ATTENTION, DECODE, PEERS, RATES, TEXT

__all__ = ["Budget", "Runner", "order", "side_by_side"]

MIN_ROUNDS = 3
"""Rounds that are made however long they take."""

RETRIES = 3
"""Turns on one thread that other work of the machine disturbed are taken again so often."""

LONGEST_RETRIED = 1.0
"""Seconds of a call above which a turn is taken as it comes: a long one is never undisturbed."""

Say = Callable[[str], None]


class Budget(NamedTuple):
    """What a run may take.

    ``bytes`` is for the inputs of all children that take turns and the workspace of one; a call
    that takes longer than ``call_seconds``, or would by what a shorter one took, is left out; a
    turn of a child in a round is about ``turn_seconds`` long. No round begins ``length_seconds``
    after the first of a length, beyond some that are made in any case.
    """

    bytes: float
    call_seconds: float
    turn_seconds: float
    rounds: int
    length_seconds: float


def order(count: int, turn: int) -> list[int]:
    """Return who goes when in a round: each one begins in turn, and every other round goes back."""
    places = [(turn + i) % count for i in range(count)]
    return places[::-1] if turn % 2 else places


def side_by_side(
    able: Mapping[tuple[str, int], Sequence[str]], wanted: Sequence[str], length: int
) -> list[Cell]:
    """Return what is timed, kind by kind, each peer of linattn with those compared with it.

    The machine is another one a second later. Decoding a token is not work for several threads,
    and landmarks are asked of one core: they are timed on the fewest.
    """
    fewest = min((threads for _, threads in able), default=1)
    names = [name for name, _ in able]

    def place(who: tuple[str, int]) -> tuple[int, int]:
        name, threads = who
        beside = PEERS[name].beside
        return names.index(beside if (beside, threads) in able else name), threads

    return [
        Cell(name, kind, length, threads)
        for kind in wanted
        for name, threads in sorted(able, key=place)
        if kind in able[name, threads] and not (kind in DECODE + TEXT and threads > fewest)
    ]


class _Turn(NamedTuple):
    seconds: float
    share: float
    beside: float | None
    """Seconds of the reference around it."""


class Runner:
    """Checks, times and measures peers in their children, and keeps what it finds in a record."""

    def __init__(
        self,
        record: Record,
        names: Sequence[str],
        threads: Sequence[int],
        cores: Sequence[int],
        budget: Budget,
        say: Say,
    ) -> None:
        self.record = record
        self._budget = budget
        self._cores = cores
        self._say = say
        self._children = {
            (name, t): Child(name, t, cores)
            for t in threads
            for name in names
            if t == 1 or not PEERS[name].on_one_thread
        }
        self._able: dict[tuple[str, int], list[str]] = {}

    def close(self) -> None:
        """End all children."""
        for child in self._children.values():
            child.close()

    def check(self) -> None:
        """Compare every peer with its oracle; one that fails is left out, and the run goes on."""
        for (name, threads), child in self._children.items():
            able = self._able.setdefault((name, threads), [])
            for kind in PEERS[name].kinds:
                try:
                    error = child.ask("check", kind)
                    wanted = PEERS[name].tolerance
                    if not error <= wanted:
                        raise PeerError(
                            f"error {error:.1e} on the small input, wanted {wanted:.0e}"
                        )
                except PeerError as failure:
                    self._leave_out(name, kind, None, threads, str(failure))
                else:
                    able.append(kind)
                    self.record.checks.append(Check(name, kind, threads, error))

    def libraries(self, name: str, threads: int) -> object:
        """Return what threadpoolctl sees in a child; nothing where it did not start."""
        try:
            return self._children[name, threads].ask("about")
        except (PeerError, KeyError):
            return []

    def time(self, sizes: Sizes, length: int, wanted: Sequence[str]) -> None:
        """Time every able peer at one length, round by round, and forget the inputs.

        ``wanted``: kinds that take turns with one another.
        """
        cells = side_by_side(self._able, wanted, length)
        children = len({(cell.peer, cell.threads) for cell in cells})
        ready = [cell for cell in cells if self._prepare(sizes, cell, children)]
        rounds: dict[Cell, list[_Turn]] = {cell: [] for cell in ready}
        begun = perf_counter()
        for turn in range(self._budget.rounds):
            if turn >= MIN_ROUNDS and perf_counter() - begun > self._budget.length_seconds:
                break
            self._round([ready[place] for place in order(len(ready), turn)], rounds)
        for cell, turns in rounds.items():
            seconds_of, shares, beside = zip(*turns, strict=True)
            known = () if None in beside else beside
            self.record.timings.append(Timing(*cell, seconds_of, shares, known))
        for key in {(cell.peer, cell.threads) for cell in rounds}:
            self._children[key].ask("release")
        taken = perf_counter() - begun
        self._say(f"timed {len(rounds)} calls at {length:,} tokens in {taken:.0f} s")

    def _round(self, cells: Sequence[Cell], rounds: dict[Cell, list[_Turn]]) -> None:
        """Give each cell a turn, and its reference one before and one after, if it has another.

        A turn of a reference is shared by the cells on either side of it.
        """
        last: tuple[Cell | None, tuple[float, float] | None] = (None, None)
        for cell in cells:
            other = reference(cell)
            has_other = other != cell and other in rounds
            before = None
            if has_other and cell in rounds:
                before = last[1] if last[0] == other else self._attempt(other, rounds)
            turn = self._attempt(cell, rounds)
            if turn is None:
                continue
            after = self._attempt(other, rounds) if has_other else None
            beside = None if before is None or after is None else (before[0] + after[0]) / 2
            rounds[cell].append(_Turn(*turn, beside))
            last = (other, after) if has_other else (cell, turn)

    def _attempt(self, cell: Cell, rounds: dict[Cell, list[_Turn]]) -> tuple[float, float] | None:
        """Take a turn; a cell that fails is left out of all others."""
        if cell not in rounds:
            return None
        try:
            return self._turn(cell)
        except PeerError as failure:
            self._leave_out(*cell, str(failure))
            del rounds[cell]
            return None

    def _turn(self, cell: Cell) -> tuple[float, float]:
        """Return seconds and share of the core of a turn, the least disturbed of a few."""
        best = (0.0, -1.0)
        for _ in range(1 + RETRIES):
            seconds, share = self._child(cell).ask("time", cell.kind, self._budget.turn_seconds)
            best = max(best, (seconds, share / cell.threads), key=lambda taken: taken[1])
            if share >= MIN_CORE_SHARE or cell.threads > 1 or seconds > LONGEST_RETRIED:
                break
        return best

    def measure_memory(self, sizes: Sizes, length: int, threads: int) -> None:
        """Measure workspace, each figure in a fresh process that is not timed."""
        for (name, count), kinds in self._able.items():
            for kind in kinds:
                cell = Cell(name, kind, length, threads)
                if count != threads or kind not in ATTENTION:
                    continue
                reason = self._too_large(sizes, cell, 1) or self._too_slow(cell)
                if reason:
                    self._leave_out(*cell, f"memory not measured: {reason}")
                    continue
                try:
                    resident = self._growth(cell, sizes, "resident")
                    ours = name.startswith("linattn")
                    traced = self._growth(cell, sizes, "traced") if ours else None
                except PeerError as failure:
                    self._leave_out(*cell, str(failure))
                else:
                    self.record.memory.append(Memory(*cell, resident, traced))
        self._say(f"measured memory at {length:,} tokens")

    def _growth(self, cell: Cell, sizes: Sizes, method: str) -> int:
        with closing(Child(cell.peer, cell.threads, self._cores)) as child:
            return int(child.ask("memory", cell.kind, sizes, cell.length, method))

    def _prepare(self, sizes: Sizes, cell: Cell, children: int) -> bool:
        reason = self._too_large(sizes, cell, children) or self._too_slow(cell)
        if not reason:
            try:
                seconds = self._child(cell).ask("prepare", cell.kind, sizes, cell.length)
            except PeerError as failure:
                reason = str(failure)
            else:
                if seconds > self._budget.call_seconds:
                    reason = f"a call takes {seconds:.1f} of {self._budget.call_seconds:.0f} s"
        if reason:
            self._leave_out(*cell, reason)
        return not reason

    def _child(self, cell: Cell) -> Child:
        return self._children[cell.peer, cell.threads]

    def _too_large(self, sizes: Sizes, cell: Cell, children: int) -> str:
        tokens = sizes.batch * sizes.heads * cell.length
        inputs = 4.0 * tokens * 4 * sizes.dim * children
        needed = inputs + 4.0 * tokens * PEERS[cell.peer].numbers_a_token(sizes)
        if needed <= self._budget.bytes or _is_rate(cell.peer):
            return ""
        return f"would need {needed / 2**30:.1f} of {self._budget.bytes / 2**30:.1f} GiB"

    def _too_slow(self, cell: Cell) -> str:
        shorter = {
            length: seconds
            for length, seconds in self.record.curve(cell.peer, cell.kind, cell.threads).items()
            if length <= cell.length
        }
        if not shorter or _is_rate(cell.peer):
            return ""
        length, seconds = max(shorter.items())
        power = 2 if PEERS[cell.peer].is_quadratic else 1
        expected = seconds * (cell.length / length) ** power
        if expected <= self._budget.call_seconds:
            return ""
        return f"a call would take about {expected:.0f} of {self._budget.call_seconds:.0f} s"

    def _leave_out(
        self, peer: str, kind: str, length: int | None, threads: int, reason: str
    ) -> None:
        self.record.left_out.append(LeftOut(peer, kind, length, threads, reason))
        where = "" if length is None else f" at {length:,} tokens"
        self._say(f"left out: {PEERS[peer].label}, {kind}{where}: {reason}")


def _is_rate(name: str) -> bool:
    return PEERS[name].kinds == RATES
