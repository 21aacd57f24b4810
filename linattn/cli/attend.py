"""Attention from files to a file: what ``linattn attend`` does."""

from __future__ import annotations

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _files, diagnostics
from linattn.cli import report, stores
from linattn.cli.cluster import BLOCKS_AT_ONCE, ClusterInputs, connected
from linattn.cli.errors import CommandError, RunError
from linattn.cli.maps import Choice, find_map, is_map
from linattn.cli.tables import memory
from linattn.cli.text import count, duration, reason
from linattn.stream._inputs import Inputs, check_inputs, release_pages
from linattn.stream._run import Run
from linattn.stream._run import run as run_blocks
from linattn.typing import State

__all__ = ["Settings", "Summary", "run"]

MAPS = {
    "favor+": "PositiveFeatures",
    "hyperbolic": "HyperbolicFeatures",
    "trigonometric": "TrigonometricFeatures",
    "relu-performer": "ActivationFeatures",
    "elu+1": "EluFeatures",
    "relu": "ReluFeatures",
    "landmarks": "LandmarkFeatures",
}
"""Names that ``linattn compare`` gives to maps."""

MAX_BLOCK_ROWS, MAX_BLOCK_BYTES = 65536, 2**28
"""Rows of a block, and bytes of all its arrays, unless the user says otherwise."""

SAMPLE_RUNS, SAMPLE_ROWS = 32, 256
"""Runs of rows, evenly spaced, that a map is fitted to, and rows of each."""

CHECKED_KEYS = 16384
"""Keys of a block of exact rows."""

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
                message = f"{option}: want a whole number >= {minimum}, got {number}"
                raise CommandError(message)
        if self.check is not None and self.start_state is not None:
            message = "--check: not with --start-state, whose keys are not in the files"
            raise CommandError(message)
        if self.workers is not None and self.scheduler is not None:
            message = "--workers: not with --scheduler, which has workers of its own"
            raise CommandError(message)
        if self.on_cluster and self.window is not None:
            message = "--window: not on a cluster, where blocks do not see each other"
            raise CommandError(message)

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
            if name in ("files", "resume") or value is None or value is False:
                continue
            line += [option] if value is True else [option, str(value)]
        return shlex.join([*line, "--resume"])


class Summary(NamedTuple):
    """What the last line tells."""

    num_tokens: int
    seconds: float
    peak_bytes: int | None
    errors: NDArray[Any] | None
    num_rows: int

    def __str__(self) -> str:
        """Return the line."""
        rate = self.num_tokens / max(self.seconds, 1e-9)
        text = (
            f"{count(self.num_tokens, 'token')} in {duration(self.seconds)} ({rate:,.0f} a second)"
        )
        if self.peak_bytes is not None:
            text += f", peak memory {memory(self.peak_bytes)}"
        if self.errors is not None:
            worst = f", worst head {self.errors.max():.2g}" if self.errors.size > 1 else ""
            rows = count(self.num_rows, "row")
            text += (
                f"; error against exact attention on {rows}: {np.median(self.errors):.2g}{worst}"
            )
        return text


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
    out.check(resume=settings.resume)
    query, key, value = stores.open_inputs(settings.files)
    mask = None if settings.mask is None else stores.open_array(settings.mask)
    if settings.save_state is not None:
        _check_own_file(settings.save_state, settings, out)
        report.check_file("--save-state", settings.save_state)
    start = time.perf_counter()
    with _as_command_errors():
        phi = _feature_map(settings, query, key)
        before = None
        if settings.start_state is not None:
            before = linattn.load_state(settings.start_state, phi)
        weights = {} if mask is None else {"key_mask": mask}
        kind = ClusterInputs if settings.on_cluster else Inputs
        inputs = kind(query, key, value, phi, weights, settings.causal, settings.window)
        _, shape = check_inputs(inputs, before)
    place: AbstractContextManager[None] = nullcontext()
    if settings.on_cluster:
        place = connected(settings.workers, settings.scheduler)
    with place:
        array = out.open(shape, query)
        state = _solve(settings, inputs, before, out, array, progress, warn)
    seconds = time.perf_counter() - start
    if settings.save_state is not None:
        with _as_run_errors(f"{settings.save_state}: cannot be written"):
            linattn.save_state(settings.save_state, state, phi)
    errors, num_rows = None, 0
    if settings.check is not None and 0 not in (*shape, inputs.key.shape[-2]):
        rows = diagnostics.held_out_rows(shape[-2], settings.check, settings.seed)
        errors, num_rows = _errors(inputs, array, rows), len(rows)
    return Summary(shape[-2], seconds, _peak_bytes(), errors, num_rows)


def _check_own_file(path: Path, settings: Settings, out: stores.Output) -> None:
    """Check that saving the state replaces no file but --start-state."""
    for other in (*settings.files, settings.mask, settings.out, out.checkpoint):
        if other is None:
            continue
        is_one = path.resolve() == other.resolve()
        if is_one or (path.exists() and other.exists() and path.samefile(other)):
            message = f"--save-state {path}: is the file of {other} too; name another"
            raise CommandError(message)


def _solve(
    settings: Settings,
    inputs: Inputs,
    before: State | None,
    out: stores.Output,
    array: Any,
    progress: Progress,
    warn: Callable[[str], None],
) -> State:
    """Attend on this machine; what was begun can be gone on with, and says so."""
    begun = False

    def notify(done: int, total: int) -> None:
        nonlocal begun
        begun = True
        progress(done, total)

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            size = settings.block_size or _block_size(inputs, array)
            if settings.on_cluster:
                size *= BLOCKS_AT_ONCE
            state = run_blocks(inputs, array, before, Run(size, out.checkpoint, SECONDS, notify))
    except (TypeError, ValueError, OSError, MemoryError) as error:
        broke_off = begun or (isinstance(error, OSError) and not out.begins)
        if broke_off and not isinstance(error, _files.StateFileError):
            message = f"{_said(error)}; {_go_on(settings)}"
            raise RunError(message) from None
        if out.begins:
            out.discard()
        raise CommandError(_said(error)) from None
    except KeyboardInterrupt:
        message = f"interrupted; {_go_on(settings)}"
        raise KeyboardInterrupt(message) from None
    if caught:
        warn(str(caught[0].message))
    return state


def _go_on(settings: Settings) -> str:
    return f"go on with: {settings.command()}"


def _said(error: BaseException) -> str:
    """Return an error as a sentence for the user."""
    if isinstance(error, MemoryError):
        return "not enough memory: try a smaller --block-size"
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        return f"{name}{error.strerror or error}"
    return reason(cast("Exception", error))


@contextmanager
def _as_command_errors() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OSError, MemoryError) as error:
        raise CommandError(_said(error)) from None


@contextmanager
def _as_run_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        message = f"{what}: {_said(error)}"
        raise RunError(message) from None


def _feature_map(settings: Settings, query: Any, key: Any) -> Any:
    """Make the map of that name for these inputs, fitted to rows of them where it is fitted."""
    name = MAPS.get(settings.map, settings.map)
    dim = int(query.shape[-1]) if len(query.shape) else 0
    given = Choice(
        dim, settings.num_features, None, settings.seed, lambda: (_sample(query), _sample(key))
    )
    found = find_map(name, given)
    return found if is_map(found) else found(np.random.default_rng(settings.seed))


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


def _block_size(inputs: Inputs, out: Any) -> int:
    arrays = (inputs.query, inputs.key, inputs.value, out)
    row: int = sum(prod(a.shape[:-2]) * a.shape[-1] * np.dtype(a.dtype).itemsize for a in arrays)
    return max(1, min(MAX_BLOCK_ROWS, MAX_BLOCK_BYTES // max(1, row)))


def _errors(inputs: Inputs, out: Any, rows: NDArray[np.intp]) -> NDArray[Any]:
    """Error of each head on some rows, which attend exactly to all keys, a block at a time."""
    query = _rows(inputs.query, rows)
    length = inputs.key.shape[-2]

    def parts() -> Iterator[tuple[Any, Any]]:
        for start in range(0, length, CHECKED_KEYS):
            keys = slice(start, min(start + CHECKED_KEYS, length))
            stops = np.clip(rows + 1 - start, 0, keys.stop - start)
            yield linattn.softmax_attention(
                query,
                *(inputs.rows(name, keys).astype(np.float64) for name in ("key", "value")),
                key_stop=stops if inputs.is_causal else None,
                return_log_normalizer=True,
                **inputs.weights_of(keys),
            )

    exact = None
    for part in parts():
        exact = part if exact is None else linattn.merge_outputs([exact, part])
        release_pages(inputs.query, inputs.key, inputs.value, out)
    assert exact is not None
    difference = _rows(out, rows) - exact[0]
    sums = [np.sum(x * x, axis=(-2, -1)) for x in (difference, exact[0])]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.sqrt(sums[0] / sums[1]))


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
