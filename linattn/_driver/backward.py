"""The driver of gradients: walks over blocks, forwards for queries and backwards for keys.

Everything is computed again from query, key and value; beside the gradients themselves only a
state, and causal three numbers a row or some states of the forward pass, are stored. Block bodies
come from :mod:`linattn._dispatch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays, _dispatch, _generic
from linattn._driver.blocks import block_slices, raw_tokens, token_block, values_and_one_block
from linattn._driver.checkpoints import Checkpoints
from linattn._driver.exact import exact_rows
from linattn._driver.tasks import Name, take, take_problem, task_index, task_name
from linattn._driver.walks import initial_state, update
from linattn._driver.wrappers import is_column_normalized, read_spec, read_spec_vjp
from linattn._generic.block_vjps import row_cotangent, row_scale
from linattn._generic.column_means import column_normalized_key_vjp, column_normalized_query_vjp
from linattn._generic.feature_vjps import change_coordinates_vjp, sum_to
from linattn.typing import (
    Affine,
    Array,
    Cotangent,
    Exact,
    Exponential,
    Index,
    Pointwise,
    Problem,
    RowScale,
    State,
    Tokens,
)

__all__ = ["Gradients", "checkpoints_for", "pull"]


class Gradients(NamedTuple):
    """Gradients with the shapes of their arguments; ``state`` is that of ``kvz``, or None."""

    query: Array
    key: Array
    value: Array
    state: Array


class _Sum:
    """Rows to which tasks add in turn."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Array] = {}

    def shares(self, turn: int, share: Array, xp: Any) -> Iterator[Array]:
        """Yield the shares whose turn has come, with one more."""
        if turn > self._next:
            # A backend may make its next block in the same place.
            self._early[turn] = xp.asarray(share, copy=True)
            return
        while share is not None:
            yield share
            self._next += 1
            share = self._early.pop(self._next, None)


class _Rows:
    """Where rows of one gradient go: summed over the axes along which its argument was broadcast.

    Where several tasks add to one row, they do it one at a time in the accumulation dtype and in
    the order of the tasks, whichever is done first: sums are the same in every bit from run to run.
    A share that comes before its turn is kept until then, so that nobody waits: of tasks that run
    side by side, a part of a head's gradient each.
    """

    def __init__(self, problem: Problem, like: Array, tasks: Sequence[Index]) -> None:
        self._xp, self._dtype = problem.xp, like.dtype
        self._shape = tuple(like.shape)
        self._blocks: dict[int, Array] = {}
        self._array = None
        self._lock = Lock()
        lead = self._shape[:-2]
        self._shared = len(tasks) > 1 and any(
            n > 1 and (back > len(lead) or lead[-back] == 1)
            for back, n in enumerate(reversed(problem.state_lead), start=1)
        )
        self._turns: dict[Name, int] = {}
        self._sums: dict[tuple[Name, int], _Sum] = {}
        if self._shared:
            count: Counter[Name] = Counter()
            for task in tasks:
                place = task_name(task_index(lead, 0, task))
                self._turns[task_name(task)] = count[place]
                count[place] += 1
        if not problem.lazy or 0 in self._shape or 0 in problem.lead:
            device = array_api_compat.device(like)
            dtype = problem.dtype if self._shared else like.dtype
            self._array = problem.xp.zeros(self._shape, dtype=dtype, device=device)

    def put(self, task: Index, rows: slice, block: Array) -> None:
        xp = self._xp
        if self._array is None:
            block = sum_to(block, self._shape[:-2], 2)
            self._blocks[rows.start] = xp.astype(block, self._dtype, copy=False)
            return
        if 0 in self._shape:
            return
        index = (*task_index(self._shape, 2, task)[:-2], rows, slice(None))
        block = sum_to(block, tuple(self._array[index].shape[:-2]), 2)
        if self._shared:
            place = task_name(index[: len(self._shape) - 2]), rows.start
            with self._lock:
                sums = self._sums.setdefault(place, _Sum())
                for share in sums.shares(self._turns[task_name(task)], block, xp):
                    self._array[index] += share
        else:
            self._array[index] = xp.astype(block, self._dtype, copy=False)

    def result(self) -> Array:
        if self._array is None:
            ordered = [self._blocks[start] for start in sorted(self._blocks)]
            return self._xp.concat(ordered, axis=-2)
        return self._xp.astype(self._array, self._dtype, copy=False)


class _Out(NamedTuple):
    """Where the gradients of one problem go."""

    query: _Rows
    key: _Rows
    value: _Rows


def checkpoints_for(problem: Problem) -> Checkpoints | None:
    """Something to keep states in, where a backend can do a block of this problem as a whole."""
    specs = (problem.query_spec, problem.key_spec)
    if not problem.is_causal or not all(isinstance(s, Exponential | Pointwise) for s in specs):
        return None
    return None if _dispatch.whole_function("scan_vjp", problem.xp) is None else Checkpoints()


def pull(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None = None
) -> Gradients:
    """Gradients of a problem of linear attention; with states of its forward pass at hand."""
    whole = _dispatch.whole_function("attention_vjp", problem.xp)
    if whole is not None:
        answer: Any = whole(problem, cotangent)
        if not _dispatch.is_declined(answer):
            return Gradients(*answer)

    plan = _dispatch.block_function("plan", problem.xp)(problem).for_gradients()
    arrays = (problem.query, problem.key, problem.value)
    out = _Out(*(_Rows(problem, array, plan.tasks) for array in arrays))
    states: list[tuple[Index, Array]] = []
    if isinstance(problem.query_spec, Exact):
        walk: Any = walk_exact
    else:
        walk = walk_causal if problem.is_causal else walk_full

    def work(task: Index) -> None:
        with _generic.ignore_fp_warnings():
            mine = take_problem(problem, task)
            adjoint = walk(
                mine, _take_cotangent(cotangent, task), out, task, plan.block_size, checkpoints
            )
        if problem.state is not None:
            states.append((task, _state_gradient(initial_state(mine), adjoint)))

    plan.run(work, plan.tasks)
    state = None if problem.state is None else _join(problem, states)
    return Gradients(out.query.result(), out.key.result(), out.value.result(), state)


def _take_cotangent(cotangent: Cotangent, task: Index) -> Cotangent:
    output, state = cotangent
    if state is not None:
        state = State(take(state.kvz, 2, task), take(state.log_scale, 1, task), 0)
    return Cotangent(take(output, 2, task), state)


# Walks ------------------------------------------------------------------------------------------


def walk_full(
    problem: Problem,
    cotangent: Cotangent,
    out: _Out,
    task: Index,
    block_size: int,
    _: Checkpoints | None,
) -> State:
    """Let queries read the state of all keys, and the adjoint of all queries read keys."""
    before = initial_state(problem)
    start = before.length
    state = update(problem, before, block_size)
    query_spec, seen = read_spec(problem, state)
    adjoint = _empty_adjoint(problem, state)
    read_block_vjp = _block("read_block_vjp", problem)
    for rows in _query_blocks(problem, block_size):
        grad = _grad_block(problem, cotangent, rows)
        tokens = token_block(problem, "query", rows, start)
        gradient, adjoint = read_block_vjp(query_spec, tokens, seen, grad, adjoint)
        out.query.put(task, rows, _unchanged(problem.query_change, gradient, None))
    adjoint = read_spec_vjp(problem, adjoint, state)
    if cotangent.state is not None:
        adjoint = _generic.merge(adjoint, _broadcast(cotangent.state, adjoint))
    reduce_block_vjp = _block("reduce_block_vjp", problem)
    for rows in block_slices(problem.key.shape[-2], block_size):
        tokens, values_and_one = (
            token_block(problem, "key", rows, start),
            values_and_one_block(problem, rows),
        )
        gradients = reduce_block_vjp(problem.key_spec, tokens, values_and_one, adjoint)
        _put_keys(problem, out, task, rows, values_and_one, *gradients)
    return adjoint


def walk_causal(
    problem: Problem,
    cotangent: Cotangent,
    out: _Out,
    task: Index,
    block_size: int,
    checkpoints: Checkpoints | None,
) -> State:
    """One scan forwards for queries, and one backwards for keys; with checkpoints one for both."""
    specs = (problem.query_spec, problem.key_spec)
    state = initial_state(problem)
    start = state.length
    adjoint = _empty_adjoint(problem, state)
    if cotangent.state is not None:
        adjoint = _generic.merge(adjoint, _broadcast(cotangent.state, adjoint))
    if is_column_normalized(problem):
        return _walk_means(problem, cotangent, out, task, block_size, state, adjoint)
    every = list(_query_blocks(problem, block_size))
    if checkpoints is not None:
        segments = checkpoints.segments(problem, block_size, task, every, state)
        if segments is not None:
            return _walk_back(problem, cotangent, out, task, segments, adjoint)
    scales: list[RowScale] = []
    scan_query_vjp = _block("scan_query_vjp", problem)
    for rows in every:
        tokens = _token_blocks(problem, rows, start)
        grad = _grad_block(problem, cotangent, rows)
        gradient, scale, state = scan_query_vjp(*specs, *tokens, state, grad)
        out.query.put(task, rows, _unchanged(problem.query_change, gradient, None))
        scales.append(scale)
    scan_key_vjp = _block("scan_key_vjp", problem)
    for rows in reversed(every):
        tokens, scale = _token_blocks(problem, rows, start), scales.pop()
        g1 = row_cotangent(scale, _grad_block(problem, cotangent, rows))
        *gradients, adjoint = scan_key_vjp(*specs, *tokens, adjoint, g1, scale.log)
        _put_keys(problem, out, task, rows, tokens[2], *gradients)
    return adjoint


def _walk_back(
    problem: Problem,
    cotangent: Cotangent,
    out: _Out,
    task: Index,
    segments: list[tuple[State, list[slice]]],
    adjoint: State,
) -> State:
    """Pull back through queries and keys of a block at once, from the last block to the first.

    ``segments``: blocks, and the state before the first of each.
    """
    specs = (problem.query_spec, problem.key_spec)
    start = segments[0][0].length
    scan_vjp = _scan_vjp(problem)
    reduce_block = _dispatch.block_function("reduce_block", problem.xp)
    for first, every in reversed(segments):
        states = [first]
        for rows in every[:-1]:
            key, values_and_one = (
                token_block(problem, "key", rows, start),
                values_and_one_block(problem, rows),
            )
            states.append(reduce_block(problem.key_spec, key, values_and_one, states[-1]))
        for rows in reversed(every):
            tokens, grad = (
                _token_blocks(problem, rows, start),
                _grad_block(problem, cotangent, rows),
            )
            args = (*specs, *tokens, states.pop(), adjoint, grad)
            gradient, grad_key, grad_values_and_one, adjoint = scan_vjp(*args)
            out.query.put(task, rows, _unchanged(problem.query_change, gradient, None))
            _put_keys(problem, out, task, rows, tokens[2], grad_key, grad_values_and_one)
    return adjoint


def _scan_vjp(problem: Problem) -> Any:
    """Gradients of a block by both sides: a backend's, with those of one side each behind it."""
    scan_query_vjp, scan_key_vjp = (
        _block(name, problem) for name in ("scan_query_vjp", "scan_key_vjp")
    )

    def one_by_one(*args: Any) -> Any:
        *block, state, adjoint, grad = args
        gradient, scale, _ = scan_query_vjp(*block, state, grad)
        g1 = row_cotangent(scale, grad)
        return gradient, *scan_key_vjp(*block, adjoint, g1, scale.log)

    return _dispatch.block_function("scan_vjp", problem.xp, one_by_one)


def _walk_means(
    problem: Problem,
    cotangent: Cotangent,
    out: _Out,
    task: Index,
    block_size: int,
    state: State,
    adjoint: State,
) -> State:
    """As :func:`walk_causal`, for column-normalized reads: keeps the state before each block."""
    specs = (problem.query_spec, problem.key_spec)
    start = state.length
    before: list[State] = []
    every = list(_query_blocks(problem, block_size))
    reduce_block = _dispatch.block_function("reduce_block", problem.xp)
    for rows in every:
        tokens = _token_blocks(problem, rows, start)
        grad = _grad_block(problem, cotangent, rows)
        out.query.put(task, rows, column_normalized_query_vjp(*specs, *tokens, state, grad))
        before.append(state)
        state = reduce_block(problem.key_spec, *tokens[1:], state)
    for rows in reversed(every):
        tokens = _token_blocks(problem, rows, start)
        grad = _grad_block(problem, cotangent, rows)
        *gradients, adjoint = column_normalized_key_vjp(
            *specs, *tokens, before.pop(), adjoint, grad
        )
        _put_keys(problem, out, task, rows, tokens[2], *gradients)
    return adjoint


def _token_blocks(problem: Problem, rows: slice, start: int) -> tuple[Tokens, Tokens, Array]:
    """Return queries, keys and ``[v, 1]`` of a causal block."""
    query = token_block(problem, "query", rows, start)
    key = token_block(problem, "key", rows, start)
    return query, key, values_and_one_block(problem, rows)


def walk_exact(
    problem: Problem,
    cotangent: Cotangent,
    out: _Out,
    task: Index,
    block_size: int,
    _: Checkpoints | None,
) -> None:
    """Softmax attention: every query reads all keys again, then every key all queries."""
    xp, spec, lead = problem.xp, problem.query_spec, problem.state_lead
    every = list(_query_blocks(problem, block_size))
    scales: list[RowScale] = []
    exact_query_vjp = _block("exact_query_vjp", problem)
    for rows in every:
        grad, query = _grad_block(problem, cotangent, rows), raw_tokens(problem, "query", rows, 0)
        scale = row_scale(exact_rows(problem, rows, block_size), grad)
        g1, gradient = row_cotangent(scale, grad), xp.zeros_like(query.x)
        for others in block_slices(
            rows.stop if problem.is_causal else problem.key.shape[-2], block_size
        ):
            key, values_and_one = (
                raw_tokens(problem, "key", others, 0),
                values_and_one_block(problem, others),
            )
            visible = _visible(problem, rows, others)
            gradient = gradient + exact_query_vjp(
                spec, query, key, values_and_one, g1, scale.log, visible
            )
        out.query.put(task, rows, gradient)
        scales.append(scale)
    exact_key_vjp = _block("exact_key_vjp", problem)
    for others in block_slices(problem.key.shape[-2], block_size):
        key, values_and_one = (
            raw_tokens(problem, "key", others, 0),
            values_and_one_block(problem, others),
        )
        gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
        for rows, scale in zip(every, scales, strict=True):
            if problem.is_causal and rows.stop <= others.start:
                continue
            g1 = row_cotangent(scale, _grad_block(problem, cotangent, rows))
            query, visible = raw_tokens(problem, "query", rows, 0), _visible(problem, rows, others)
            more = exact_key_vjp(spec, query, key, values_and_one, g1, scale.log, visible)
            gradients = [x + sum_to(y, lead, 2) for x, y in zip(gradients, more, strict=True)]
        _put_keys(problem, out, task, others, values_and_one, *gradients)


def _visible(problem: Problem, rows: slice, others: slice) -> Array:
    """Which keys of a block which queries see; None for all."""
    if not problem.is_causal or others.stop <= rows.start + 1:
        return None
    xp, device = problem.xp, array_api_compat.device(problem.key)
    query = xp.arange(rows.start, rows.stop, device=device)
    return xp.arange(others.start, others.stop, device=device) <= query[:, None]


def _block(name: str, problem: Problem) -> Any:
    return _dispatch.block_function(name, problem.xp)


def _query_blocks(problem: Problem, block_size: int) -> Any:
    """Blocks of queries; none where no row reaches the output."""
    return block_slices(0 if 0 in problem.lead else problem.query.shape[-2], block_size)


def _grad_block(problem: Problem, cotangent: Cotangent, rows: slice) -> Array:
    return problem.xp.astype(cotangent.output[..., rows, :], problem.dtype, copy=False)


def _unchanged(affine: Affine | None, gradient: Array, weight: Array) -> Array:
    return gradient if affine is None else change_coordinates_vjp(affine, gradient, weight)


def _put_keys(
    problem: Problem,
    out: _Out,
    task: Index,
    rows: slice,
    values_and_one: Array,
    grad_key: Array,
    grad_values_and_one: Array,
) -> None:
    """Pull gradients of keys back to the caller's; those of masked keys are exactly 0."""
    xp, affine, grad_value = problem.xp, problem.key_change, grad_values_and_one[..., :-1]
    if affine is not None:
        weight = xp.sum(values_and_one * grad_values_and_one, axis=-1, keepdims=True)
        grad_key = change_coordinates_vjp(affine, grad_key, weight)
    if problem.key_mask is not None:
        mask = problem.key_mask[..., rows, :]
        grad_key = xp.where(mask, grad_key, xp.zeros_like(grad_key))
        grad_value = xp.where(mask, grad_value, xp.zeros_like(grad_value))
    out.key.put(task, rows, grad_key)
    out.value.put(task, rows, grad_value)


# States -----------------------------------------------------------------------------------------


def _empty_adjoint(problem: Problem, like: State) -> State:
    m, e = problem.num_features, problem.value.shape[-1]
    return _generic.empty_state(problem.state_lead, m, e, like.kvz)


def _broadcast(state: State, like: State) -> State:
    xp = _arrays.namespace(like.kvz)
    kvz = xp.broadcast_to(state.kvz, tuple(like.kvz.shape))
    return State(kvz, xp.broadcast_to(state.log_scale, tuple(like.log_scale.shape)), 0)


def _state_gradient(before: State, adjoint: State) -> Array:
    """Cotangent of a state's ``kvz``, its log scale held constant."""
    xp = _arrays.namespace(adjoint.kvz)
    return adjoint.kvz * xp.exp(adjoint.log_scale + before.log_scale)[..., None]


def _join(problem: Problem, states: list[tuple[Index, Array]]) -> Array:
    """Put the state gradients of all tasks together, with the shape of the caller's state."""
    assert problem.state is not None
    lead = tuple(problem.state.kvz.shape[:-2])
    if len(states) == 1:
        return sum_to(states[0][1], lead, 2)
    whole = initial_state(problem.replace(state=None)).kvz
    for task, gradient in states:
        whole[task_index(tuple(whole.shape), 2, task)] = gradient
    return sum_to(whole, lead, 2)
