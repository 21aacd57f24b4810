"""The driver: every mode of attention is a walk over blocks, written once for every backend.

It cleans masked tokens, walks the blocks, accepts a causal block or redoes it exactly, combines
parts on different scales, and puts rows where they belong. Block bodies and the plan come from
:mod:`linattn._dispatch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise, product
from typing import Any, TypeAlias

import array_api_compat

from linattn import _dispatch, _generic
from linattn._blocks import (
    Rows,
    blocks,
    divide,
    log_normalizer,
    token_block,
    transient_values_block,
)
from linattn._corrected import guarded, widened
from linattn._halves import exact_halves, scan_exact
from linattn._kept import Kept
from linattn._means import scan_means
from linattn._tasks import at, take, take_problem, take_state
from linattn._window import walk_window
from linattn.typing import (
    HEAD_BY_HEAD,
    Array,
    ColumnNormalized,
    Corrected,
    Exact,
    Index,
    Partial,
    Plan,
    Problem,
    Spec,
    State,
    Tokens,
)

__all__ = ["exact_rows", "initial_state", "reading", "solve", "step", "update"]

_Put: TypeAlias = Callable[[Index, slice, Partial], None]
_Offer: TypeAlias = Callable[[Index, int, State], None]


LONGEST_REFUSED = 512
"""Tokens of a causal block that is not cut where a backend refuses it: then it costs its square."""

SMALL_VALUES = 2.0**10
"""Rounding units that underflow may take of the largest value that a row sees: 1e-4 in float32.

One unit would have ordinary rows inspected twice, for their first values are hardly all of size 1.
"""

# Accepting a block ------------------------------------------------------------------------------


def _refused(
    part: Partial, log_weight: Array, values_and_one: Array, state: State, m: int
) -> Array:
    """Heads ``(..., 1, 1)`` with a row that the block's common shift may have spoilt, or None.

    A row is accepted if it is finite and its denominator, times ``SMALL_VALUES`` times the size of
    the values that it sees where that is below 1, is at least ``(tiny / eps) (m N + z)``, N tokens
    so far and z the normalizers of the state: what underflow can have taken from it, at most
    ``tiny (m N + z)``, is then below rounding. A row that sees no key at all is accepted too. A
    column of values that the state has lost to NaN or inf is past repair, and so is a head whose
    normalizers it has lost; the other columns are not.
    """
    xp = _generic.namespace(part.num_den)
    info = xp.finfo(part.num_den.dtype)
    n = part.num_den.shape[-2]
    # A backend's state may be on a scale of which its normalizers are not bounded by the tokens.
    terms = m * (state.length + n) + xp.sum(xp.abs(state.z), axis=-1)[..., None, None]
    floor = float(info.smallest_normal) / float(info.eps) * terms
    denominator, one = xp.abs(part.num_den[..., -1:]), xp.ones_like(values_and_one[..., :1, :1])
    # All rows see the first values: hardly ever must others be inspected.
    first = xp.min(xp.abs(values_and_one[..., :1, :]), axis=-1, keepdims=True)
    large = denominator * xp.minimum(SMALL_VALUES * first, one) >= floor
    lost = ~xp.isfinite(part.num_den)
    if bool(xp.all(large & ~xp.any(lost, axis=-1, keepdims=True))):
        return None
    seen = _values_seen(values_and_one, state)
    small = denominator * xp.minimum(SMALL_VALUES * seen, one) < floor
    accepted = ~xp.any(small & (seen != 0), axis=-1, keepdims=True)
    if log_weight is not None:
        sees = xp.cumulative_sum(xp.astype(log_weight > -xp.inf, xp.int64), axis=-2) > 0
        before = xp.any(state.log_scale > -xp.inf, axis=-1)[..., None, None]
        accepted = accepted | ~(sees | before)
    alive = xp.all(xp.isfinite(state.kvz), axis=-2, keepdims=True)
    accepted = accepted & ~xp.any(lost & alive, axis=-1, keepdims=True)
    refused = ~xp.all(accepted, axis=-2, keepdims=True)
    log_finite = xp.all(state.log_scale < xp.inf, axis=-1)[..., None, None]
    refused = refused & alive[..., -1:] & log_finite
    return refused if bool(xp.any(refused)) else None


def _values_seen(values_and_one: Array, state: State) -> Array:
    """Size of the ``[v, 1]`` that each row sees, ``(..., n, e + 1)``; 0 where all are.

    No more than the largest: the mean of the block's own, or of those in a column of the state.
    """
    xp, sizes = _generic.namespace(values_and_one), abs(values_and_one)
    count = xp.cumulative_sum(xp.ones_like(sizes[..., :1]), axis=-2)
    own = xp.cumulative_sum(sizes, axis=-2) / count
    z = xp.abs(state.kvz[..., -1:])
    before = xp.where(z == 0, xp.zeros_like(state.kvz), xp.abs(state.kvz) / z)
    return xp.maximum(own, xp.max(before, axis=-2, keepdims=True))


def _causal_block(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    specs = (problem.query_spec, problem.key_spec)
    if isinstance(problem.query_spec, ColumnNormalized):
        return scan_means(problem, query, key, values_and_one, state)
    if problem.lazy:
        return scan_exact(*specs, query, key, values_and_one, state)
    special: Any = _dispatch.whole_function("scan_block", problem.xp)
    answer: Any = NotImplemented
    if special is not None:
        answer = special(*specs, query, key, values_and_one, state, problem.want_log)
        if answer is HEAD_BY_HEAD:
            return _head_by_head(problem, query, key, values_and_one, state)
        if answer is NotImplemented and values_and_one.shape[-2] > LONGEST_REFUSED:
            return _in_halves(problem, query, key, values_and_one, state)
    if answer is NotImplemented:
        answer = _generic.scan_block(*specs, query, key, values_and_one, state, problem.want_log)
    part, after = answer
    if part.accepted:
        return part, after
    refused = _refused(part, key.log_weight, values_and_one, state, problem.num_features)
    if refused is None:
        return part, after
    redone, _ = scan_exact(*specs, query, key, values_and_one, state)
    where = problem.xp.where
    return Partial(
        where(refused, redone.num_den, part.num_den), where(refused, redone.log, part.log)
    ), after


def _head_by_head(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """Do the heads of a causal block one by one, so that a far one costs the others nothing."""
    xp, lead, n = problem.xp, problem.lead, values_and_one.shape[-2]
    like = dict(dtype=problem.dtype, device=array_api_compat.device(values_and_one))
    part = Partial(
        xp.empty((*lead, n, values_and_one.shape[-1]), **like), xp.empty((*lead, n, 1), **like)
    )
    after = State(xp.empty_like(state.kvz), xp.empty_like(state.log_scale), state.length + n)
    for index in product(*map(range, problem.state_lead)):
        # An axis of 1 stays whole, as in plans: queries may have more along it.
        task = tuple(
            slice(i, i + 1) if size > 1 else slice(None)
            for i, size in zip(index, problem.state_lead, strict=True)
        )
        own, own_after = _causal_block(
            take_problem(problem, task),
            _take_tokens(query, task),
            _take_tokens(key, task),
            take(values_and_one, 2, task),
            take_state(state, task),
        )
        where = at(tuple(part.num_den.shape), 2, task)
        part.num_den[where], part.log[where] = own.num_den, own.log
        after.kvz[at(tuple(after.kvz.shape), 2, task)] = own_after.kvz
        after.log_scale[at(tuple(after.log_scale.shape), 1, task)] = own_after.log_scale
    return part, after


def _take_tokens(tokens: Tokens, task: Index) -> Tokens:
    return Tokens(take(tokens.x, 2, task), take(tokens.log_weight, 2, task), tokens.start)


def _in_halves(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """Do a causal block that a backend refuses as two shorter ones."""
    xp, n = problem.xp, values_and_one.shape[-2]
    sums: list[Array] = []
    logs: list[Array] = []
    for rows in (slice(0, n // 2), slice(n // 2, n)):
        half, keys = _rows_of(query, rows), _rows_of(key, rows)
        part, state = _causal_block(problem, half, keys, values_and_one[..., rows, :], state)
        # A backend may make the next part in the same place.
        sums.append(xp.asarray(part.num_den, copy=True))
        logs.append(xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1)))
    return Partial(xp.concat(sums, axis=-2), xp.concat(logs, axis=-2)), state


def _rows_of(tokens: Tokens, rows: slice) -> Tokens:
    log_weight = None if tokens.log_weight is None else tokens.log_weight[..., rows, :]
    return Tokens(tokens.x[..., rows, :], log_weight, tokens.start + rows.start)


def reading(problem: Problem, state: State) -> tuple[Spec, State]:
    """Spec and state of a plain read."""
    if isinstance(problem.query_spec, ColumnNormalized):
        return problem.query_spec.spec, _generic.column_means(state)
    if isinstance(problem.query_spec, Corrected):
        return problem.query_spec.spec, widened(problem.query_spec, state)
    return problem.query_spec, state


# Walks: they stop after each block, and give the state there -----------------------------------


def initial_state(problem: Problem) -> State:
    """State before the first key of a problem, with all its leading axes."""
    m, e = problem.num_features, problem.value.shape[-1]
    if problem.state is None:
        like = problem.xp.empty(
            (0,), dtype=problem.dtype, device=array_api_compat.device(problem.key)
        )
        return _generic.empty_state(problem.state_lead, m, e, like)
    xp, state = problem.xp, problem.state
    kvz = xp.broadcast_to(state.kvz, (*problem.state_lead, m, e + 1))
    log_scale = xp.broadcast_to(state.log_scale, (*problem.state_lead, m))
    return State(kvz, log_scale, state.length)


def update(problem: Problem, state: State, block_size: int) -> State:
    """Add all keys and values of a problem to a state, block by block."""
    return _last(_updates(problem, state, block_size), state)


def _updates(problem: Problem, state: State, block_size: int) -> Iterator[State]:
    """Add a problem's keys and values to a state: the state after each block."""
    reduce_block = _dispatch.block_function("reduce_block", problem.xp)
    start = state.length
    for rows in blocks(problem.key.shape[-2], block_size):
        # No name holds a block while the next is made, here and below.
        state = reduce_block(
            problem.key_spec,
            token_block(problem, "key", rows, start),
            transient_values_block(problem, rows),
            state,
        )
        yield state


def _walk_full(problem: Problem, task: Index, block_size: int, put: _Put) -> Iterator[State]:
    state = before = initial_state(problem)
    for state in _updates(problem, before, block_size):
        yield state
    yield from _reads(problem, state, before.length, task, block_size, put)


def _reads(
    problem: Problem, state: State, start: int, task: Index, block_size: int, put: _Put
) -> Iterator[State]:
    """Read a state with all queries of a problem: the state again after each block."""
    read_block = _dispatch.block_function("read_block", problem.xp)
    query_spec, seen = reading(problem, state)
    for rows in blocks(problem.query.shape[-2], block_size):
        part = read_block(
            query_spec, token_block(problem, "query", rows, start), seen, problem.want_log
        )
        put(task, rows, guarded(part) if isinstance(problem.query_spec, Corrected) else part)
        del part
        yield state


def _walk_causal(
    problem: Problem, task: Index, block_size: int, put: _Put, offer: _Offer | None
) -> Iterator[State]:
    return _scans(problem, initial_state(problem), task, block_size, put, offer)


def _scans(
    problem: Problem,
    state: State,
    task: Index,
    block_size: int,
    put: _Put,
    offer: _Offer | None,
) -> Iterator[State]:
    """Go through a problem causally: the state after each block."""
    start = state.length
    for rows in blocks(problem.query.shape[-2], block_size):
        if offer is not None:
            offer(task, rows.start, state)
        part, state = _causal_block(
            problem,
            token_block(problem, "query", rows, start),
            token_block(problem, "key", rows, start),
            transient_values_block(problem, rows),
            state,
        )
        put(task, rows, part)
        del part
        yield state


def _walk_exact(problem: Problem, task: Index, block_size: int, put: _Put) -> Iterator[None]:
    for rows in blocks(problem.query.shape[-2], block_size):
        put(task, rows, exact_rows(problem, rows, block_size))
        yield None


def _last(walk: Iterator[State], state: State) -> State:
    """Finish a walk: the state after it, or the one before it where there is no block."""
    return deque(chain([state], walk), maxlen=1).pop()


def exact_rows(problem: Problem, rows: slice, block_size: int) -> Partial:
    """Softmax attention of some rows: every block of keys is one more part of them."""
    spec, xp = problem.query_spec, problem.xp
    exact_block = _dispatch.block_function("exact_block", xp)
    exact_more = _dispatch.block_function("exact_more", xp)
    query = token_block(problem, "query", rows, 0)
    part = None
    if problem.is_causal:
        key = token_block(problem, "key", rows, 0)
        part = exact_halves(spec, query, key, transient_values_block(problem, rows))
    for others in blocks(rows.start if problem.is_causal else problem.key.shape[-2], block_size):
        key = token_block(problem, "key", others, 0)
        values_and_one = transient_values_block(problem, others)
        if part is None:
            part = exact_block(spec, query, key, values_and_one)
        else:
            part = exact_more(spec, query, key, values_and_one, part)
    return _nothing(problem, query) if part is None else part


def _walk_window(problem: Problem, task: Index, block_size: int, put: _Put) -> Iterator[State]:
    yield walk_window(problem, initial_state(problem), block_size, partial(put, task))


def _nothing(problem: Problem, query: Tokens) -> Partial:
    shape = (*problem.lead, query.x.shape[-2], problem.value.shape[-1] + 1)
    device = array_api_compat.device(query.x)
    num_den = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    return Partial(num_den, num_den[..., -1:] - problem.xp.inf)


# Segments ---------------------------------------------------------------------------------------


def _in_segments(problem: Problem, plan: Plan, put: _Put, offer: _Offer | None) -> State:
    """Do one task as segments of the sequence side by side: their states merge.

    Full: states of the segments of keys, then reads of the segments of queries. Causal: states of
    all segments but the last, then each segment from the state of all before it; the keys of
    these segments are looked at twice.
    """
    before = initial_state(problem)
    keys = _segments(problem.key.shape[-2], plan)
    queries = keys if problem.is_causal else _segments(problem.query.shape[-2], plan)
    reduced = keys[:-1] if problem.is_causal else keys
    nothing = initial_state(problem.replace(state=None))
    states = [before] * (len(keys) + 1)

    def reduce(i: int) -> None:
        with _generic.quiet():
            start = State(nothing.kvz, nothing.log_scale, before.length + keys[i].start)
            after = update(_segment(problem, keys[i]), start, plan.block_size)
            length = keys[i].stop - keys[i].start
            states[i + 1] = State(after.kvz, after.log_scale, length)

    def read(i: int) -> None:
        rows = queries[i]

        def put_later(task: Index, some: slice, part: Partial) -> None:
            put(task, slice(rows.start + some.start, rows.start + some.stop), part)

        def offer_later(task: Index, row: int, state: State) -> None:
            if offer is not None:
                offer(task, rows.start + row, state)

        with _generic.quiet():
            part = _segment(problem, rows)
            if problem.is_causal:
                walk = _scans(part, states[i], (), plan.block_size, put_later, offer_later)
                after = _last(walk, states[i])
                if i + 1 == len(keys):
                    states[-1] = after
            else:
                start = before.length + rows.start
                walk = _reads(part, states[-1], start, (), plan.block_size, put_later)
                _last(walk, states[-1])

    plan.run(reduce, range(len(reduced)))
    with _generic.quiet():
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


def solve(
    problem: Problem, *, return_state: bool, kept: Kept | None = None
) -> tuple[Array, State | None, Array | None]:
    """Run a problem: (output, state after it, log normalizer), the last two where asked for.

    ``kept``: takes states of a causal problem on the way.
    """
    whole = _dispatch.whole_function("attention", problem.xp)
    if whole is not None:
        answer: Any = whole(problem)
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]

    plan = _dispatch.block_function("plan", problem.xp)(problem)
    if kept is not None:
        # What is kept stands before the blocks of the pullback.
        plan = plan.for_gradients()
    output = Rows(problem, problem.value.shape[-1], problem.query.dtype)
    norms = Rows(problem, 1, problem.dtype) if problem.want_log else None
    states: list[tuple[Index, State]] = []
    offer = None if kept is None else partial(kept.offer, problem, plan.block_size)
    if isinstance(problem.query_spec, Exact):
        walk: Any = _walk_exact
    elif problem.exact_window is not None:
        walk = _walk_window
    else:
        walk = partial(_walk_causal, offer=offer) if problem.is_causal else _walk_full

    def put(task: Index, rows: slice, part: Partial) -> None:
        output.put_divided(task, rows, part)
        if norms is not None:
            norms.put(task, rows, log_normalizer(part, problem))

    def steps(task: Index) -> Iterator[None]:
        part = take_problem(problem, task)
        walked, state = walk(part, task, plan.block_size, put), None
        while True:
            try:
                with _generic.quiet():
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

    if plan.segments > 1 and walk not in (_walk_exact, _walk_window):
        state = _in_segments(problem, plan, put, offer)
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
        whole.kvz[at(tuple(whole.kvz.shape), 2, task)] = state.kvz
        whole.log_scale[at(tuple(whole.log_scale.shape), 1, task)] = state.log_scale
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
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]
    one = slice(0, 1)
    start = state.length
    with _generic.quiet():
        state = update(problem, initial_state(problem.replace(state=state)), 1)
        read_block = _dispatch.block_function("read_block", problem.xp)
        tokens = token_block(problem, "query", one, start)
        query_spec, seen = reading(problem, state)
        part = read_block(query_spec, tokens, seen, problem.want_log)
        output = problem.xp.astype(divide(part), problem.query.dtype, copy=False)
    return output[..., 0, :], state
