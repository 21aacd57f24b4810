"""One run: the steps of a walk, checkpoints between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from linattn._files import Path
from linattn.stream._checkpoint import Checkpoint
from linattn.stream._checksums import Checksums
from linattn.stream._inputs import Inputs, check_inputs, prepare_output, release_pages
from linattn.stream._storage import check_storage
from linattn.stream._walks import Place, walk_of
from linattn.typing import State


class Run(NamedTuple):
    """How a call is worked off; the fields are arguments of :func:`linattn.stream.attend`."""

    block_size: int
    checkpoint: Path | None
    seconds: float
    progress: Callable[[int, int], None] | None
    finish: Callable[[State], None] | None = None
    """Called with the state after the last key, while the checkpoint is still there."""


def run(inputs: Inputs, out: Any, initial_state: State | None, how: Run) -> State:
    """Check a call, resume its checkpoint if there is one, and return the state after it."""
    begin, shape = check_inputs(inputs, initial_state)
    arrays = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    check_storage(out, {**arrays, **inputs.weights}, initial_state, how.checkpoint)
    block_size = prepare_output(out, shape, inputs, how.block_size)
    checksums = None if how.checkpoint is None else Checksums()
    walk = walk_of(inputs._replace(checksums=checksums), out, begin, block_size)
    place = Place(0, walk.begin)
    saved = None
    if how.checkpoint is not None and checksums is not None:
        saved = Checkpoint(how.checkpoint, walk, block_size, checksums)
        place = saved.load_or_begin(place)
    rows = [stop - start for start, stop in walk.rows]
    done, total = sum(rows[: place.step]), sum(rows)
    last = time.monotonic()
    try:
        while place.step < len(rows):
            place = walk.step(place)
            if checksums is not None:
                place = place._replace(num_records=len(checksums.records))
            done += rows[place.step - 1]
            release_pages(inputs.query, inputs.key, inputs.value, out, *inputs.weights.values())
            if saved is not None and time.monotonic() - last >= how.seconds:
                saved.save(place)
                last = time.monotonic()
            if how.progress is not None:
                how.progress(done, total)
        if how.finish is not None:
            how.finish(walk.last(place))
    except BaseException:
        if saved is not None:
            saved.save_if_possible(place)
        raise
    if saved is not None:
        saved.remove()
    return walk.last(place)
