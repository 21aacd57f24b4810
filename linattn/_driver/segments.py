"""One long sequence as segments side by side: their states merge."""

from __future__ import annotations

from itertools import pairwise

from linattn import _generic
from linattn._driver.walks import (
    StoreState,
    WriteRows,
    initial_state,
    read_blocks,
    run_walk,
    scan_blocks,
    update,
)
from linattn.typing import Index, Partial, Plan, Problem, State

__all__ = ["in_segments"]


def in_segments(problem: Problem, plan: Plan, put: WriteRows, store: StoreState | None) -> State:
    """Do one task as segments of the sequence side by side: their states merge.

    Full: states of the segments of keys, then reads of the segments of queries. Causal: states of
    all segments but the last, then each segment from the state of all before it; the keys of
    these segments are read twice.
    """
    before = initial_state(problem)
    keys = _segments(problem.key.shape[-2], plan)
    queries = keys if problem.is_causal else _segments(problem.query.shape[-2], plan)
    reduced = keys[:-1] if problem.is_causal else keys
    nothing = initial_state(problem.replace(state=None))
    states = [before] * (len(keys) + 1)

    def reduce(i: int) -> None:
        with _generic.ignore_fp_warnings():
            start = State(nothing.kvz, nothing.log_scale, before.length + keys[i].start)
            after = update(_segment(problem, keys[i]), start, plan.block_size)
            length = keys[i].stop - keys[i].start
            states[i + 1] = State(after.kvz, after.log_scale, length)

    def read(i: int) -> None:
        rows = queries[i]

        def put_later(task: Index, some: slice, part: Partial) -> None:
            put(task, slice(rows.start + some.start, rows.start + some.stop), part)

        def store_later(task: Index, row: int, state: State) -> None:
            if store is not None:
                store(task, rows.start + row, state)

        with _generic.ignore_fp_warnings():
            part = _segment(problem, rows)
            if problem.is_causal:
                walk = scan_blocks(part, states[i], (), plan.block_size, put_later, store_later)
                after = run_walk(walk, states[i])
                if i + 1 == len(keys):
                    states[-1] = after
            else:
                start = before.length + rows.start
                walk = read_blocks(part, states[-1], start, (), plan.block_size, put_later)
                run_walk(walk, states[-1])

    plan.run(reduce, range(len(reduced)))
    with _generic.ignore_fp_warnings():
        for i in range(len(reduced)):
            states[i + 1] = _generic.merge(states[i], states[i + 1])
    plan.run(read, range(len(queries)))
    return states[-1]


def _segments(length: int, plan: Plan) -> list[slice]:
    """Segments of whole blocks, as equal as they can be."""
    count = -(-length // plan.block_size)
    edges = [
        min(count * i // plan.segments * plan.block_size, length) for i in range(plan.segments)
    ]
    edges.append(length)
    return [slice(start, stop) for start, stop in pairwise(edges) if start < stop]


def _segment(problem: Problem, rows: slice) -> Problem:
    """Take some rows of a problem whose state is handed around beside it."""
    mask = None if problem.key_mask is None else problem.key_mask[..., rows, :]
    sides = {name: getattr(problem, name)[..., rows, :] for name in ("query", "key", "value")}
    return problem.replace(key_mask=mask, **sides)
