"""One long sequence as segments side by side: their states merge."""

from __future__ import annotations

from itertools import pairwise

from linattn import _generic
from linattn._driver.modifiers import total_decay
from linattn._driver.walks import Walk, initial_state, read_blocks, run_walk, scan_blocks, update
from linattn._generic.decay import fade
from linattn.typing import Plan, State

__all__ = ["run_segments"]


def run_segments(walk: Walk, plan: Plan) -> State:
    """Do a whole problem as segments of the sequence side by side; return the state after it.

    Full: states of the segments of keys, then reads of the segments of queries. Causal: states of
    all segments but the last, then each segment from the state of all before it; the keys of
    these segments are reduced twice.
    """
    problem = walk.problem
    before = initial_state(problem)
    keys = _segments(problem.key.shape[-2], plan)
    causal = problem.mode == "causal"
    queries = keys if causal else _segments(problem.query.shape[-2], plan)
    reduced = keys[:-1] if causal else keys
    nothing = initial_state(problem.replace(state=None))
    states = [before] * (len(keys) + 1)

    def reduce(i: int) -> None:
        with _generic.ignore_fp_warnings():
            start = State(nothing.kvz, nothing.log_scale, before.length + keys[i].start)
            segment = walk.segment(keys[i]).problem
            after = update(segment, start, plan.block_size, walk.functions)
            states[i + 1] = State(after.kvz, after.log_scale, keys[i].stop - keys[i].start)

    def read(i: int) -> None:
        with _generic.ignore_fp_warnings():
            segment = walk.segment(queries[i])
            if not causal:
                start = before.length + queries[i].start
                run_walk(read_blocks(segment, states[-1], start), states[-1])
                return
            after = run_walk(scan_blocks(segment, states[i]), states[i])
            if i + 1 == len(keys):
                states[-1] = after

    plan.run(reduce, range(len(reduced)))
    with _generic.ignore_fp_warnings():
        for i in range(len(reduced)):
            earlier = states[i]
            if problem.log_decay is not None:
                earlier = fade(earlier, total_decay(problem, keys[i])[..., None])
            states[i + 1] = _generic.merge(earlier, states[i + 1])
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
