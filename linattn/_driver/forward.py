"""The forward pass: every mode of attention is a walk over blocks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from linattn import _dispatch, _generic
from linattn._driver.blocks import Rows, token_block
from linattn._driver.checkpoints import Checkpoints
from linattn._driver.segments import in_segments
from linattn._driver.tasks import take_problem, task_index
from linattn._driver.walks import (
    _walk_window,
    initial_state,
    update,
    walk_causal,
    walk_exact,
    walk_full,
)
from linattn._driver.wrappers import read_spec
from linattn._generic.states import divide, log_normalizer
from linattn.typing import Array, Exact, Index, Partial, Problem, State

__all__ = ["solve", "step"]


def solve(
    problem: Problem, *, return_state: bool, checkpoints: Checkpoints | None = None
) -> tuple[Array, State | None, Array | None]:
    """Run a problem: (output, state after it, log normalizer), the last two where asked for.

    ``checkpoints`` stores states of a causal problem on the way.
    """
    whole = _dispatch.whole_function("attention", problem.xp)
    if whole is not None:
        answer: Any = whole(problem)
        if not _dispatch.is_declined(answer):
            return answer  # type: ignore[no-any-return]

    plan = _dispatch.block_function("plan", problem.xp)(problem)
    if checkpoints is not None:
        # Checkpoints stand before the blocks of the pullback.
        plan = plan.for_gradients()
    output = Rows(problem, problem.value.shape[-1], problem.query.dtype)
    norms = Rows(problem, 1, problem.dtype) if problem.want_log else None
    states: list[tuple[Index, State]] = []
    store = None if checkpoints is None else partial(checkpoints.store, problem, plan.block_size)
    if isinstance(problem.query_spec, Exact):
        walk: Any = walk_exact
    elif problem.exact_window is not None:
        walk = _walk_window
    else:
        walk = partial(walk_causal, store=store) if problem.is_causal else walk_full

    def put(task: Index, rows: slice, part: Partial) -> None:
        output.write_divided(task, rows, part)
        if norms is not None:
            norms.put(task, rows, log_normalizer(part, problem))

    def steps(task: Index) -> Iterator[None]:
        part = take_problem(problem, task)
        walked, state = walk(part, task, plan.block_size, put), None
        while True:
            try:
                with _generic.ignore_fp_warnings():
                    state = next(walked)
            except StopIteration:
                break
            yield
        if return_state:
            states.append((task, initial_state(part) if state is None else state))

    def work(task: Index) -> Iterator[None] | None:
        if plan.resumable:
            return steps(task)
        for _ in steps(task):
            pass
        return None

    if plan.segments > 1 and walk not in (walk_exact, _walk_window):
        state = in_segments(problem, plan, put, store)
        states.append(((), state))
    else:
        plan.run(work, plan.tasks)
    output.warn_of_signs(stacklevel=4)
    norm = None if norms is None else norms.result()[..., 0]
    return output.result(), _join(problem, states) if return_state else None, norm


def _join(problem: Problem, states: list[tuple[Index, State]]) -> State:
    """Put the states of all tasks into one that shares no memory with the caller's."""
    xp = problem.xp
    if len(states) == 1:
        state = states[0][1]
        if problem.key.shape[-2]:
            return state
        kvz, log_scale = (xp.asarray(a, copy=True) for a in (state.kvz, state.log_scale))
        return State(kvz, log_scale, state.length)
    whole = initial_state(problem.replace(state=None))
    for task, state in states:
        whole.kvz[task_index(tuple(whole.kvz.shape), 2, task)] = state.kvz
        whole.log_scale[task_index(tuple(whole.log_scale.shape), 1, task)] = state.log_scale
    before = 0 if problem.state is None else problem.state.length
    return State(whole.kvz, whole.log_scale, before + problem.key.shape[-2])


def step(problem: Problem, state: State) -> tuple[Array, State]:
    """One token: add its key and value to the state, then read with its query.

    The read sees the token itself and nothing later, so it needs no check.
    """
    whole = _dispatch.whole_function("decode", problem.xp)
    if whole is not None:
        # The caller's problem mostly has the state already.
        same = problem.state is state
        answer: Any = whole(problem if same else problem.replace(state=state))
        if not _dispatch.is_declined(answer):
            return answer  # type: ignore[no-any-return]
    one = slice(0, 1)
    start = state.length
    with _generic.ignore_fp_warnings():
        state = update(problem, initial_state(problem.replace(state=state)), 1)
        read_block = _dispatch.block_function("read_block", problem.xp)
        tokens = token_block(problem, "query", one, start)
        query_spec, seen = read_spec(problem, state)
        part = read_block(query_spec, tokens, seen, problem.want_log)
        output = problem.xp.astype(divide(part), problem.query.dtype, copy=False)
    return output[..., 0, :], state
