"""Attention from files to a file: what ``linattn attend`` does."""

from __future__ import annotations

import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _files, diagnostics
from linattn.cli import report, stores
from linattn.cli.cluster import BLOCKS_AT_ONCE, ClusterInputs, connected
from linattn.cli.compare import CHECKED_ROWS, relative_error
from linattn.cli.errors import CommandError, RunError
from linattn.cli.exact import KEYS, ExactInputs, ExactMap, attend_exactly
from linattn.cli.maps import Choice, find_map, is_map
from linattn.cli.tables import memory
from linattn.cli.text import count, duration, reason
from linattn.stream._inputs import Inputs, check_inputs, release_pages
from linattn.stream._run import Run
from linattn.stream._run import run as run_blocks
from linattn.typing import State

__all__ = ["Settings", "Summary", "run"]

MAX_BLOCK_ROWS, MAX_BLOCK_BYTES = 65536, 2**28
"""Rows of a block, and bytes of all its arrays, unless the user says otherwise."""

SAMPLE_RUNS, SAMPLE_ROWS = 32, 256
"""Runs of rows, evenly spaced, that a map is fitted to, and rows of each."""

TOLERANCE = 0.1
"""Largest error of a head, as for :func:`linattn.attention`."""

EXACT = "exact"

SECONDS = 60.0
"""Between two checkpoints."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """What one run does; the fields are the options of the command."""

    files: tuple[Path, ...]
    out: Path
    map: str
    num_features: int | None = None
    causal: bool = False
    mask: Path | None = None
    window: int | None = None
    start_state: Path | None = None
    save_state: Path | None = None
    check: int | None = None
    tolerance: float = TOLERANCE
    block_size: int | None = None
    seed: int = 0
    workers: int | None = None
    scheduler: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        """Check what the options' types do not say."""
        least = {"num_features": 1, "window": 1, "check": 1, "block_size": 1, "workers": 1}
        for name, minimum in {**least, "seed": 0}.items():
            number = getattr(self, name)
            if number is not None and number < minimum:
                option = f"--{name.replace('_', '-')}"
                raise CommandError(f"{option}: want a whole number >= {minimum}, got {number}")
        if not self.tolerance > 0:
            raise CommandError(f"--tolerance: want a number > 0, got {self.tolerance}")
        if self.check is not None and self.start_state is not None:
            raise CommandError("--check: not with --start-state, whose keys are not in the files")
        if self.workers is not None and self.scheduler is not None:
            raise CommandError("--workers: not with --scheduler, which has workers of its own")
        if self.on_cluster and self.window is not None:
            raise CommandError("--window: not on a cluster, where blocks do not see each other")

    @property
    def on_cluster(self) -> bool:
        """Whether tasks of Dask do the work."""
        return self.workers is not None or self.scheduler is not None

    def command(self) -> str:
        """Return the command line that goes on with this run."""
        line = ["linattn", "attend", *map(str, self.files)]
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            is_default = value is None or value is False or value == TOLERANCE
            if name in ("files", "resume") or is_default:
                continue
            line += [option] if value is True else [option, str(value)]
        return shlex.join([*line, "--resume"])


class Summary(NamedTuple):
    """What the last line tells."""

    settings: Settings
    num_tokens: int
    seconds: float
    peak_bytes: int | None
    errors: NDArray[Any] | None
    """Of each head; None where nothing could be checked."""

    @property
    def is_above(self) -> bool:
        """Whether a head has a larger error than the tolerance, or rows that are not finite."""
        worst = 0.0 if self.errors is None else self.errors.max()
        return bool(worst > self.settings.tolerance or np.isinf(worst))

    @property
    def failure(self) -> str:
        """Why the output is not known to be within the tolerance; "" if it is."""
        out, tolerance = self.settings.out, self.settings.tolerance
        if self.settings.start_state is not None and tolerance < np.inf:
            return f"{out}: its error is not known; --tolerance inf accepts that"
        if self.errors is None or not self.is_above:
            return ""
        return (
            f"{out}: the error of {self.settings.map}, {self.errors.max():.2g}, is above the "
            f"tolerance {tolerance:g}; the file is kept. Try more --num-features, another --map, "
            f"or --map exact; --tolerance inf is for a model trained with this map"
        )

    def record(self) -> dict[str, Any]:
        """Return it as dictionaries, lists and numbers."""
        return {
            "settings": asdict(self.settings),
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "checked_rows": self._checked_rows,
            "errors": None if self.errors is None else self.errors.tolist(),
            "within_tolerance": not self.failure,
        }

    @property
    def _checked_rows(self) -> int:
        wanted = self.settings.check or CHECKED_ROWS
        return 0 if self.errors is None else min(wanted, self.num_tokens)

    def __str__(self) -> str:
        """Return the line."""
        rate = self.num_tokens / max(self.seconds, 1e-9)
        text = (
            f"{self.settings.out}: {count(self.num_tokens, 'token')} by {self.settings.map} in "
            f"{duration(self.seconds)} ({rate:,.0f} a second)"
        )
        if self.peak_bytes is not None:
            text += f", peak memory {memory(self.peak_bytes)}"
        if self.settings.start_state is not None:
            return f"{text}; not checked: the keys of {self.settings.start_state} are in no file"
        if self.errors is None:
            return f"{text}; nothing to check"
        worst = f", worst head {self.errors.max():.2g}" if self.errors.size > 1 else ""
        judged = "above" if self.is_above else "within"
        return (
            f"{text}; {judged} the tolerance {self.settings.tolerance:g}: error against exact "
            f"attention on {count(self._checked_rows, 'row')}: {np.median(self.errors):.2g}{worst}"
        )


def run(settings: Settings, progress: Progress, warn: Callable[[str], None]) -> Summary:
    """Do what the settings say.

    Raises
    ------
    CommandError
        What was given cannot be used; nothing has been written.
    RunError
        The run broke off; its output so far stays.
    KeyboardInterrupt
        It was interrupted, and can be resumed.
    """
    out = stores.Output(settings.out)
    if not out.is_zarr:
        _check_own_file("--out", settings.out, (*settings.files, settings.mask))
    out.check(resume=settings.resume)
    opened = stores.open_inputs(settings.files)
    query, key, value = (opened[name] for name in stores.NAMES)
    weights = {name: opened[name] for name in (stores.BIAS,) if name in opened}
    if settings.mask is not None:
        weights["key_mask"] = stores.open_array(settings.mask)
    if settings.save_state is not None:
        taken = (*settings.files, settings.mask, settings.out, out.checkpoint)
        _check_own_file("--save-state", settings.save_state, taken)
        report.check_file("--save-state", settings.save_state)
    start = time.perf_counter()
    with _as_command_errors(settings):
        # Shapes and dtypes, before a map is fitted.
        inputs = Inputs(query, key, value, ExactMap(), weights, settings.causal, None)
        check_inputs(inputs, None)
        try:
            phi = _feature_map(settings, inputs)
        except CommandError:
            _check_finite(inputs)
            raise
        before = None
        if settings.start_state is not None:
            before = linattn.load_state(settings.start_state, phi)
        kind = ClusterInputs if settings.on_cluster else Inputs
        if isinstance(phi, ExactMap):
            _check_exact(settings)
            kind = ExactInputs
        inputs = kind(query, key, value, phi, weights, settings.causal, settings.window)
        _, shape = check_inputs(inputs, before)
    with connected(settings.workers, settings.scheduler) if settings.on_cluster else nullcontext():
        with _as_command_errors(settings):
            _check_finite(inputs)
        array = out.open(shape, inputs.query)
        found: list[Summary] = []

        def finish(state: State) -> None:
            seconds = time.perf_counter() - start
            if settings.save_state is not None:
                linattn.save_state(settings.save_state, state, phi)
            errors = _errors(settings, inputs, array)
            found.append(Summary(settings, shape[-2], seconds, _peak_bytes(), errors))

        def attend(notify: Progress) -> None:
            size = settings.block_size or _block_size(*inputs[:3], array)
            size *= BLOCKS_AT_ONCE if settings.on_cluster else 1
            how = Run(size, out.checkpoint, SECONDS, notify, finish)
            run_blocks(inputs, array, before, how)

        _solve(settings, out, attend, progress, warn)
    return found[0]


def _check_exact(settings: Settings) -> None:
    """Check that no option is given that exact attention has no use for."""
    for name in ("num_features", "window", "start_state", "save_state", "workers", "scheduler"):
        if getattr(settings, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')}: not with --map exact")


def _check_finite(inputs: Inputs) -> None:
    """Name the first number that is not finite: it would spread to other rows."""
    for name in stores.NAMES:
        array = getattr(inputs, name)
        length, size = array.shape[-2], _block_size(array)
        for start in range(0, length, size):
            rows = slice(start, min(start + size, length))
            if isinstance(inputs, ClusterInputs):
                bad = ~inputs.finite(name, rows)
            else:
                bad = ~np.isfinite(inputs.rows(name, rows)).all(axis=-1)
            remedy = "mend it"
            if name != "query":
                mask = np.asarray(inputs.weights_of(rows).get("key_mask", [True]))
                bad &= mask if mask.shape == bad.shape else mask.reshape(-1, mask.shape[-1]).any(0)
                remedy += ", or hide its token by --mask"
            for *lead, row in np.argwhere(bad).tolist():
                index = (*lead, start + row)
                numbers = np.asarray(array[index])
                column = int(np.argmin(np.isfinite(numbers)))
                where = [*index, column]
                raise ValueError(
                    f"{name} must be finite, got {numbers[column]} at {where}; {remedy}"
                )
        release_pages(array)


def _check_own_file(option: str, path: Path, taken: Iterable[Path | None]) -> None:
    """Check that a file that is written is none of the others."""
    for other in taken:
        if other is None:
            continue
        is_one = path.resolve() == other.resolve()
        if is_one or (path.exists() and other.exists() and path.samefile(other)):
            raise CommandError(f"{option} {path}: is the file of {other} too; name another")


def _solve(
    settings: Settings,
    out: stores.Output,
    attend: Callable[[Progress], None],
    progress: Progress,
    warn: Callable[[str], None],
) -> None:
    """Attend; what was begun can be gone on with, and says so."""
    begun = False

    def notify(done: int, total: int) -> None:
        nonlocal begun
        begun = True
        progress(done, total)

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attend(notify)
    except Exception as error:
        broke_off = begun or (isinstance(error, OSError) and not out.begins)
        if broke_off and not isinstance(error, _files.StateFileError):
            raise RunError(f"{_said(error)}; go on with: {settings.command()}") from None
        if out.begins:
            out.discard()
        raise CommandError(_with_files(settings, _said(error))) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; go on with: {settings.command()}") from None
    if caught:
        warn(str(caught[0].message))


def _said(error: BaseException) -> str:
    """Return an error as a sentence for the user."""
    if isinstance(error, MemoryError):
        return "not enough memory: try a smaller --block-size, or fewer --num-features"
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        return f"{name}{error.strerror or error}"
    said = reason(cast("Exception", error))
    is_ours = isinstance(error, TypeError | ValueError | CommandError | RunError)
    # Maps of the user's may raise anything.
    return said if is_ours else f"{type(error).__name__}: {said}"


def _with_files(settings: Settings, text: str) -> str:
    """Put the files before what is said about arrays."""
    # One file may hold all three.
    named: dict[str, Any] = dict(zip(stores.NAMES, settings.files * 3, strict=False))
    named["initial_state"] = settings.start_state
    alone = {"out must": settings.out, "key_mask must": settings.mask}
    found = [file for begin, file in alone.items() if text.startswith(begin)]
    found = found or [file for name, file in named.items() if re.search(rf"\b{name}\b", text)]
    return f"{', '.join(dict.fromkeys(map(str, found)))}: {text}" if found else text


@contextmanager
def _as_command_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CommandError(_with_files(settings, _said(error))) from None


def _feature_map(settings: Settings, inputs: Inputs) -> Any:
    """Make the map of that name for these inputs, fitted to rows of them where it is fitted."""

    def sample() -> dict[str, Any]:
        rows = {"query": _sample(inputs.query), "key": _sample(inputs.key)}
        for name, weight in inputs.weights.items():
            if weight.shape[-1] != 1:
                weight = _sample(weight[..., None])[..., 0]
            rows[name] = weight > 0 if name == "key_mask" else weight
        return rows

    if settings.map.casefold() == EXACT:
        return ExactMap()
    dim = int(inputs.query.shape[-1])
    choice = Choice(dim, settings.num_features, None, settings.seed, sample, also=(EXACT,))
    found = find_map(settings.map, choice)
    if is_map(found):
        return found
    try:
        return found(np.random.default_rng(settings.seed))
    except Exception as error:
        raise CommandError(
            f"--map {settings.map}: it raised {type(error).__name__}: {error}"
        ) from None


def _sample(array: Any) -> NDArray[Any]:
    """Read runs of rows, evenly spaced, in the dtype of the computation."""
    length = array.shape[-2]
    starts = np.linspace(0, max(0, length - SAMPLE_ROWS), SAMPLE_RUNS).astype(int)
    runs, stop = [], 0
    for start in starts.tolist():
        first, stop = max(start, stop), min(start + SAMPLE_ROWS, length)
        if first < stop:
            runs.append(np.asarray(array[..., first:stop, :]))
    rows = np.concatenate(runs, axis=-2) if runs else np.asarray(array[..., :0, :])
    return rows.astype(np.result_type(rows.dtype, np.float32))


def _block_size(*arrays: Any) -> int:
    row: int = sum(prod(a.shape[:-2]) * a.shape[-1] * np.dtype(a.dtype).itemsize for a in arrays)
    return max(1, min(MAX_BLOCK_ROWS, MAX_BLOCK_BYTES // max(1, row)))


def _errors(settings: Settings, inputs: Inputs, out: Any) -> NDArray[Any] | None:
    """Return the error of each head on some rows; None where there is nothing to compare."""
    if settings.start_state is not None or 0 in (*out.shape, inputs.key.shape[-2]):
        return None
    number = settings.check or CHECKED_ROWS
    rows = diagnostics.held_out_rows(out.shape[-2], number, settings.seed)
    size = min(KEYS, _block_size(inputs.key, inputs.value))
    return relative_error(
        _rows(out, rows), attend_exactly(inputs, _rows(inputs.query, rows), rows, size)
    )


def _rows(array: Any, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    found = [np.asarray(array[..., row : row + 1, :]) for row in rows.tolist()]
    return np.concatenate(found, axis=-2).astype(np.float64)


def _peak_bytes() -> int | None:
    """Peak memory of this process, where the system reports it."""
    try:
        import resource
    except ImportError:
        return None
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
