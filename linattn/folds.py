"""The driver: every mode of attention is a walk over blocks, written once for every backend.

It cleans masked tokens, walks the blocks, accepts a causal block or redoes it exactly, combines
parts on different scales, and puts rows where they belong. Block bodies and the plan come from
:mod:`linattn._dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import array_api_compat

from linattn import _dispatch, _generic
from linattn.typing import (
    Affine,
    Array,
    ColumnMeans,
    Exact,
    Exponential,
    Features,
    Index,
    Partial,
    Pointwise,
    Problem,
    Spec,
    State,
    Tokens,
)

__all__ = ["scan_exact", "solve", "step", "token_block", "update"]

AnySpec = TypeVar("AnySpec", bound="Spec | ColumnMeans | Exact")
_Put: TypeAlias = Callable[[Index, slice, Partial], None]


# Leading axes -----------------------------------------------------------------------------------


def _at(shape: tuple[int, ...], trailing: int, task: Index) -> tuple[slice, ...]:
    """Index of a task in an array of this shape: axes of 1 stay whole, trailing axes too."""
    index = [slice(None)] * len(shape)
    lead = len(shape) - trailing
    for back in range(1, min(lead, len(task)) + 1):
        if shape[lead - back] != 1:
            index[lead - back] = task[-back]
    return tuple(index)


def _take_lead(lead: tuple[int, ...], task: Index) -> tuple[int, ...]:
    index = _at(lead, 0, task)
    return tuple(len(range(*s.indices(size))) for s, size in zip(index, lead, strict=True))


def _take(array: Any, trailing: int, task: Index) -> Any:
    if not task or array is None or isinstance(array, float):
        return array
    return array[_at(tuple(array.shape), trailing, task)]


def _take_spec(spec: AnySpec, task: Index) -> AnySpec:
    if isinstance(spec, Exponential):
        return replace(
            spec,
            P=_take(spec.P, 2, task),
            Q=_take(spec.Q, 2, task),
            col=_take(spec.col, 1, task),
        )
    if isinstance(spec, Pointwise):
        return replace(
            spec,
            P=_take(spec.P, 2, task),
            bias=_take(spec.bias, 1, task),
            factor=_take(spec.factor, 1, task),
        )
    if isinstance(spec, ColumnMeans):
        return replace(spec, spec=_take_spec(spec.spec, task))
    return spec


def _take_change(affine: Affine | None, task: Index) -> Affine | None:
    if affine is None:
        return None
    names = ("shift", "transform", "weight", "offset")
    return replace(affine, **{name: _take(getattr(affine, name), 2, task) for name in names})


def _take_problem(problem: Problem, task: Index) -> Problem:
    if not task:
        return problem
    state = problem.state
    return replace(
        problem,
        query=_take(problem.query, 2, task),
        key=_take(problem.key, 2, task),
        value=_take(problem.value, 2, task),
        key_mask=_take(problem.key_mask, 2, task),
        query_spec=_take_spec(problem.query_spec, task),
        key_spec=_take_spec(problem.key_spec, task),
        state_lead=_take_lead(problem.state_lead, task),
        lead=_take_lead(problem.lead, task),
        query_change=_take_change(problem.query_change, task),
        key_change=_take_change(problem.key_change, task),
        state=None if state is None else _take_state(state, task),
    )


def _take_state(state: State, task: Index) -> State:
    return State(_take(state.kvz, 2, task), _take(state.log_scale, 1, task), state.length)


# Blocks of tokens -------------------------------------------------------------------------------


def _blocks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def token_block(problem: Problem, side: str, rows: slice, start: int) -> Tokens:
    """Tokens of one block of queries or keys; masked keys are zeros of log weight -inf."""
    xp = problem.xp
    source = problem.query if side == "query" else problem.key
    x = xp.astype(source[..., rows, :], problem.dtype, copy=False)
    tokens = Tokens(x, None, start + rows.start)
    if side == "query":
        affine, weighted = problem.query_change, problem.want_log
    else:
        affine, weighted = problem.key_change, True
        if problem.key_mask is not None:
            mask = problem.key_mask[..., rows, :]
            zero = xp.zeros_like(mask, dtype=problem.dtype)
            log_weight = xp.where(mask, zero, zero - xp.inf)
            tokens = Tokens(xp.where(mask, x, zero), log_weight, tokens.start)
    return tokens if affine is None else _generic.change(affine, tokens, weighted=weighted)


def _v1_block(problem: Problem, rows: slice) -> Array:
    """``[v, 1]``, so that numerator and denominator come out of one product."""
    xp = problem.xp
    v = xp.astype(problem.value[..., rows, :], problem.dtype, copy=False)
    if problem.key_mask is not None:
        mask = problem.key_mask[..., rows, :]
        v = xp.where(mask, v, xp.zeros_like(mask, dtype=problem.dtype))
    return xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)


# Rows of the result -----------------------------------------------------------------------------


class _Rows:
    """Where finished rows go: a preallocated array, or a list for arrays that cannot be set."""

    def __init__(self, problem: Problem, width: int, dtype: Any) -> None:
        self._xp = problem.xp
        self._shape = (*problem.lead, problem.query.shape[-2], width)
        self._blocks: list[Array] = []
        self._array = None
        if not problem.lazy or 0 in self._shape:
            device = array_api_compat.device(problem.query)
            self._array = problem.xp.empty(self._shape, dtype=dtype, device=device)
        self._dtype = dtype

    def put(self, task: Index, rows: slice, block: Array) -> None:
        block = self._xp.astype(block, self._dtype, copy=False)
        if self._array is None:
            self._blocks.append(block)
        elif 0 not in self._shape:
            index = _at(self._shape, 2, task)[:-2]
            self._array[(*index, rows, slice(None))] = block

    def result(self) -> Array:
        return self._xp.concat(self._blocks, axis=-2) if self._array is None else self._array


def _divide(part: Partial, problem: Problem) -> Array:
    """Numerator over denominator; exactly 0 where the denominator is, NaN where it overflowed."""
    xp = problem.xp
    numerator, denominator = part.nd[..., :-1], part.nd[..., -1:]
    empty = denominator == 0
    infinite = xp.abs(denominator) == xp.inf
    divisor = xp.where(infinite, xp.full_like(denominator, float("nan")), denominator)
    output = numerator / xp.where(empty, xp.ones_like(divisor), divisor)
    return xp.where(empty & xp.isfinite(numerator), xp.zeros_like(output), output)


def _log_normalizer(part: Partial, problem: Problem) -> Array:
    return part.log + problem.xp.log(part.nd[..., -1:])


# Halves: causal attention whose every gauge holds visible keys only ------------------------------


def _halves(x: Array, half: int, side: int) -> Array:
    """Left (0) or right (1) halves of all stretches of ``2 half`` tokens: a new axis before -2."""
    if x is None:
        return None
    xp = _generic.namespace(x)
    *lead, n, width = x.shape
    return xp.reshape(x, (*lead, n // (2 * half), 2, half, width))[..., side, :, :]


def _on_right_halves(part: Partial, n: int) -> Partial:
    """Spread rows of right halves over all ``n`` rows; left halves see nothing."""
    xp = _generic.namespace(part.nd)

    def spread(right: Array, left: Array) -> Array:
        both = xp.concat([left, right], axis=-2)
        return xp.reshape(both, (*both.shape[:-3], n, both.shape[-1]))

    nothing = xp.full_like(part.log, -float("inf"))
    return Partial(spread(part.nd, xp.zeros_like(part.nd)), spread(part.log, nothing))


def _levels(n: int) -> Iterator[int]:
    half = 1
    while half < n:
        yield half
        half *= 2


def _pad(x: Array, size: int, fill: float = 0.0) -> Array:
    """Append rows of one number; None stays None."""
    if x is None or x.shape[-2] == size:
        return x
    xp = _generic.namespace(x)
    shape = (*x.shape[:-2], size - x.shape[-2], x.shape[-1])
    return xp.concat([x, xp.full_like(xp.broadcast_to(x[..., :1, :], shape), fill)], axis=-2)


def scan_exact(
    query_spec: Spec, key_spec: Spec, query: Tokens, key: Tokens, v1: Array, state: State
) -> tuple[Partial, State]:
    """Causal attention of a block in which no row's scale depends on a later key.

    Each token reads itself and the incoming state; then in ``log2(n)`` levels right halves read
    left halves, and a row's parts are combined by their own logs. No branch depends on data.
    O(n m (d + e log n)) time, O(n m) memory.
    """
    n = v1.shape[-2]
    size = 1 << (n - 1).bit_length()
    # Features are padded, not tokens: a map may refuse positions past the end.
    log, values = _generic.row_features(query_spec, query)
    queries = Features(_pad(log, size), _pad(values, size))
    log, values = _generic.row_features(key_spec, key)
    keys = Features(_pad(log, size, -float("inf")), _pad(values, size))
    v1 = _pad(v1, size)
    part = _generic.combine(_own_tokens(queries, keys, v1), _generic.read(queries, state))
    for half in _levels(size):
        left = Features(_halves(keys.log, half, 0), _halves(keys.values, half, 0))
        right = Features(_halves(queries.log, half, 1), _halves(queries.values, half, 1))
        seen = _generic.absorb(left, _halves(v1, half, 0), None)
        part = _generic.combine(part, _on_right_halves(_generic.read(right, seen), size))
    after = _generic.absorb(keys, v1, state)
    after = State(after.kvz, after.log_scale, state.length + n)
    return Partial(part.nd[..., :n, :], part.log[..., :n, :]), after


def _own_tokens(queries: Features, keys: Features, v1: Array) -> Partial:
    xp = _generic.namespace(v1)
    e = queries.log + keys.log
    row = xp.max(e, axis=-1, keepdims=True)
    weights = xp.exp(e - _generic.finite_shift(row, xp))
    for values in (queries.values, keys.values):
        weights = weights if values is None else weights * values
    return Partial(xp.sum(weights, axis=-1, keepdims=True) * v1, row)


# Accepting a block ------------------------------------------------------------------------------


def _refused(part: Partial, log_weight: Array, state: State, m: int) -> Array:
    """Heads ``(..., 1, 1)`` with a row that the block's common shift may have spoilt, or None.

    A row is sound if it is finite and its denominator is at least ``(tiny / eps) m N``, N tokens
    so far: what underflow can have taken from it, at most ``tiny m N``, is then below rounding.
    A row that sees no key at all is sound too. A head whose state is not finite is past repair.
    """
    xp = _generic.namespace(part.nd)
    info = xp.finfo(part.nd.dtype)
    n = part.nd.shape[-2]
    floor = float(info.smallest_normal) / float(info.eps) * m * (state.length + n)
    sound = xp.abs(part.nd[..., -1:]) >= floor
    if log_weight is not None:
        sees = xp.cumulative_sum(xp.astype(log_weight > -xp.inf, xp.int64), axis=-2) > 0
        before = xp.any(state.log_scale > -xp.inf, axis=-1)[..., None, None]
        sound = sound | ~(sees | before)
    sound = sound & xp.all(xp.isfinite(part.nd), axis=-1, keepdims=True)
    refused = ~xp.all(sound, axis=-2, keepdims=True)
    if not bool(xp.any(refused)):
        return None
    kvz_finite = xp.all(xp.isfinite(state.kvz), axis=(-2, -1), keepdims=True)
    log_finite = xp.all(state.log_scale < xp.inf, axis=-1)[..., None, None]
    refused = refused & kvz_finite & log_finite
    return refused if bool(xp.any(refused)) else None


def _causal_block(
    problem: Problem, query: Tokens, key: Tokens, v1: Array, state: State
) -> tuple[Partial, State]:
    specs = (problem.query_spec, problem.key_spec)
    if isinstance(problem.query_spec, ColumnMeans):
        return _scan_means(problem, query, key, v1, state)
    if problem.lazy:
        return scan_exact(*specs, query, key, v1, state)
    scan_block = _dispatch.block_function("scan_block", problem.xp)
    part, after = scan_block(*specs, query, key, v1, state, problem.want_log)
    refused = _refused(part, key.log_weight, state, problem.num_features)
    if refused is None:
        return part, after
    redone, _ = scan_exact(*specs, query, key, v1, state)
    where = problem.xp.where
    return Partial(where(refused, redone.nd, part.nd), where(refused, redone.log, part.log)), after


# Column means: reads that divide each column by its own normaliser ------------------------------


def _scan_means(
    problem: Problem, query: Tokens, key: Tokens, v1: Array, state: State
) -> tuple[Partial, State]:
    """Causal attention of a block whose queries read means.

    With ``phi_ir / z_ir`` for ``phi_ir``, ``z_ir`` the normaliser of column r up to token i, it is
    an ordinary causal read.
    """
    log_q = _generic.evaluate(problem.query_spec, query).log
    log_k = _generic.evaluate(problem.key_spec, key).log
    answer = None if problem.lazy else _means_on_one_scale(log_q, log_k, v1, state)
    return _means_by_halves(log_q, log_k, v1, state) if answer is None else answer


def _means_on_one_scale(
    log_q: Array, log_k: Array, v1: Array, state: State
) -> tuple[Partial, State] | None:
    """One scale for each column and all rows; None where an early row would lose digits to it.

    Weights lost to underflow are below rounding of a normaliser of at least ``eps^2``, and that
    bounds the exponents, whose rounding a weight multiplies. O(n m (d + e) + n^2 (m + e)) time.
    """
    xp = _generic.namespace(v1)
    c = xp.maximum(state.log_scale, xp.max(log_k, axis=-2))
    shift = _generic.finite_shift(c, xp)
    weights_k = xp.exp(log_k - shift[..., None, :])
    before = state.kvz * xp.exp(state.log_scale - shift)[..., None]
    z = xp.cumulative_sum(weights_k, axis=-2) + before[..., None, :, -1]
    if not bool(xp.all(z >= float(xp.finfo(z.dtype).eps) ** 2)):
        return None
    row = xp.max(log_q, axis=-1, keepdims=True)
    weights_q = xp.exp(log_q - row) / z
    scores = xp.tril(xp.matmul(weights_q, xp.matrix_transpose(weights_k)))
    nd = xp.matmul(scores, v1) + xp.matmul(weights_q, before)
    if not bool(xp.all(xp.isfinite(nd))):
        return None
    after = before + xp.matmul(xp.matrix_transpose(weights_k), v1)
    return Partial(nd, row), State(after, c, state.length + v1.shape[-2])


def _means_by_halves(log_q: Array, log_k: Array, v1: Array, state: State) -> tuple[Partial, State]:
    """As :func:`scan_exact`: no row's scale depends on a later key, no branch on data.

    O(n m (d + e log n)) time, O(n m) memory.
    """
    n = v1.shape[-2]
    size = 1 << (n - 1).bit_length()
    log_q, log_k, v1 = _pad(log_q, size), _pad(log_k, size, -float("inf")), _pad(v1, size)
    xp = _generic.namespace(v1)
    before = State(state.kvz[..., None, :, -1:], state.log_scale[..., None, :], 0)
    z = _generic.merge(before, _running(State(xp.ones_like(log_k)[..., None], log_k, 0)))
    top = _generic.finite_shift(z.log_scale, xp)
    empty = z.z == 0
    log_q = log_q - xp.log(xp.where(empty, xp.ones_like(z.z), z.z))
    part = _own_tokens(Features(log_q, None), Features(log_k - top, None), v1)
    part = _generic.combine(part, _read_at(log_q, top, state))
    for half in _levels(size):
        left = Features(_halves(log_k, half, 0), None)
        seen = _generic.absorb(left, _halves(v1, half, 0), None)
        right = _read_at(_halves(log_q, half, 1), _halves(top, half, 1), seen)
        part = _generic.combine(part, _on_right_halves(right, size))
    after = _generic.absorb(Features(log_k, None), v1, state)
    after = State(after.kvz, after.log_scale, state.length + n)
    return Partial(part.nd[..., :n, :], part.log[..., :n, :]), after


def _read_at(log_q: Array, top: Array, state: State) -> Partial:
    """Read a state with features ``exp(log_q - top)``."""
    # The two scales of keys first: they may be large, and their difference hardly is.
    log = log_q + (state.log_scale[..., None, :] - top)
    zero = _generic.namespace(top).zeros_like(state.log_scale)
    return _generic.read(Features(log, None), State(state.kvz, zero, 0))


def _running(each: State) -> State:
    """Merge the states of tokens, log scales ``(..., n, m)``, each with all before it.

    Pairs are merged, their running states found in the same way, and every other token filled
    in: 2 n merges for n a power of two.
    """
    n, m = each.log_scale.shape[-2:]
    if n == 1:
        return each
    xp = _generic.namespace(each.kvz)
    first = State(each.kvz[..., ::2, :, :], each.log_scale[..., ::2, :], 0)
    second = State(each.kvz[..., 1::2, :, :], each.log_scale[..., 1::2, :], 0)
    pairs = _running(_generic.merge(first, second))
    nothing = _generic.empty_state(tuple(first.kvz.shape[:-3]), m, 0, first.kvz)
    kvz = xp.concat([nothing.kvz[..., None, :, :], pairs.kvz[..., :-1, :, :]], axis=-3)
    log_scale = xp.concat([nothing.log_scale[..., None, :], pairs.log_scale[..., :-1, :]], axis=-2)
    others = _generic.merge(State(kvz, log_scale, 0), first)
    kvz = xp.stack([others.kvz, pairs.kvz], axis=-3)
    log_scale = xp.stack([others.log_scale, pairs.log_scale], axis=-2)
    return State(xp.reshape(kvz, each.kvz.shape), xp.reshape(log_scale, each.log_scale.shape), 0)


def _reading(problem: Problem, state: State) -> tuple[Spec, State]:
    """Spec and state of a plain read."""
    if isinstance(problem.query_spec, ColumnMeans):
        return problem.query_spec.spec, _generic.column_means(state)
    return problem.query_spec, state


# Walks ------------------------------------------------------------------------------------------


def _initial_state(problem: Problem) -> State:
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
    reduce_block = _dispatch.block_function("reduce_block", problem.xp)
    start = state.length
    for rows in _blocks(problem.key.shape[-2], block_size):
        tokens = token_block(problem, "key", rows, start)
        state = reduce_block(problem.key_spec, tokens, _v1_block(problem, rows), state)
    return state


def _walk_full(problem: Problem, task: Index, block_size: int, put: _Put) -> State:
    state = _initial_state(problem)
    start = state.length
    state = update(problem, state, block_size)
    read_block = _dispatch.block_function("read_block", problem.xp)
    query_spec, seen = _reading(problem, state)
    for rows in _blocks(problem.query.shape[-2], block_size):
        tokens = token_block(problem, "query", rows, start)
        put(task, rows, read_block(query_spec, tokens, seen, problem.want_log))
    return state


def _walk_causal(problem: Problem, task: Index, block_size: int, put: _Put) -> State:
    state = _initial_state(problem)
    start = state.length
    for rows in _blocks(problem.query.shape[-2], block_size):
        query = token_block(problem, "query", rows, start)
        key = token_block(problem, "key", rows, start)
        part, state = _causal_block(problem, query, key, _v1_block(problem, rows), state)
        put(task, rows, part)
    return state


def _walk_exact(problem: Problem, task: Index, block_size: int, put: _Put) -> None:
    """Softmax attention: every block of keys is one more part of a block of queries."""
    spec, xp = problem.query_spec, problem.xp
    exact_block = _dispatch.block_function("exact_block", xp)
    keys_len = problem.key.shape[-2]
    for rows in _blocks(problem.query.shape[-2], block_size):
        query = token_block(problem, "query", rows, 0)
        part = None
        if problem.is_causal:
            key = token_block(problem, "key", rows, 0)
            part = _exact_halves(problem, query, key, _v1_block(problem, rows))
        for others in _blocks(rows.start if problem.is_causal else keys_len, block_size):
            key = token_block(problem, "key", others, 0)
            more = exact_block(spec, query, key, _v1_block(problem, others))
            part = more if part is None else _generic.combine(part, more)
        if part is None:
            part = _nothing(problem, query)
        put(task, rows, part)


def _nothing(problem: Problem, query: Tokens) -> Partial:
    shape = (*problem.lead, query.x.shape[-2], problem.value.shape[-1] + 1)
    device = array_api_compat.device(query.x)
    nd = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    return Partial(nd, nd[..., -1:] - problem.xp.inf)


def _exact_halves(problem: Problem, query: Tokens, key: Tokens, v1: Array) -> Partial:
    """Causal softmax attention within a block: each token itself, then right halves read left."""
    spec, xp, n = problem.query_spec, problem.xp, v1.shape[-2]
    exact_block = _dispatch.block_function("exact_block", xp)
    size = 1 << (n - 1).bit_length()
    log_weight = key.log_weight
    if log_weight is None and n < size:
        log_weight = xp.zeros_like(key.x[..., :1])
    query = Tokens(_pad(query.x, size), None, 0)
    key = Tokens(_pad(key.x, size), _pad(log_weight, size, -float("inf")), 0)
    v1 = _pad(v1, size)
    logit = xp.sum(query.x * key.x, axis=-1, keepdims=True) * spec.scale
    logit = logit + (logit - logit)
    logit = logit if key.log_weight is None else logit + key.log_weight
    part = Partial(v1 + xp.zeros_like(logit), logit)
    for half in _levels(size):
        right = Tokens(_halves(query.x, half, 1), None, 0)
        left = Tokens(_halves(key.x, half, 0), _halves(key.log_weight, half, 0), 0)
        seen = exact_block(spec, right, left, _halves(v1, half, 0))
        part = _generic.combine(part, _on_right_halves(seen, size))
    return Partial(part.nd[..., :n, :], part.log[..., :n, :])


def solve(problem: Problem, *, return_state: bool) -> tuple[Array, State | None, Array | None]:
    """Run a problem: (output, state after it, log normaliser), the last two where asked for."""
    whole = _dispatch.whole_function("attention", problem.xp)
    if whole is not None:
        answer: Any = whole(problem)
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]

    plan = _dispatch.block_function("plan", problem.xp)(problem)
    output = _Rows(problem, problem.value.shape[-1], problem.query.dtype)
    norms = _Rows(problem, 1, problem.dtype) if problem.want_log else None
    states: list[tuple[Index, State]] = []
    if isinstance(problem.query_spec, Exact):
        walk: Any = _walk_exact
    else:
        walk = _walk_causal if problem.is_causal else _walk_full

    def put(task: Index, rows: slice, part: Partial) -> None:
        output.put(task, rows, _divide(part, problem))
        if norms is not None:
            norms.put(task, rows, _log_normalizer(part, problem))

    def work(task: Index) -> None:
        with _generic.quiet():
            state = walk(_take_problem(problem, task), task, plan.block_size, put)
        if return_state:
            states.append((task, state))

    plan.run(work, plan.tasks)
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
    whole = _initial_state(replace(problem, state=None))
    for task, state in states:
        whole.kvz[_at(tuple(whole.kvz.shape), 2, task)] = state.kvz
        whole.log_scale[_at(tuple(whole.log_scale.shape), 1, task)] = state.log_scale
    before = 0 if problem.state is None else problem.state.length
    return State(whole.kvz, whole.log_scale, before + problem.key.shape[-2])


def step(problem: Problem, state: State) -> tuple[Array, State]:
    """One token: add its key and value to the state, then read with its query.

    The read sees the token itself and nothing later, so it needs no check.
    """
    whole = _dispatch.whole_function("decode", problem.xp)
    if whole is not None:
        answer: Any = whole(replace(problem, state=state))
        if answer is not NotImplemented:
            return answer  # type: ignore[no-any-return]
    one = slice(0, 1)
    start = state.length
    with _generic.quiet():
        state = update(problem, _initial_state(replace(problem, state=state)), 1)
        read_block = _dispatch.block_function("read_block", problem.xp)
        tokens = token_block(problem, "query", one, start)
        query_spec, seen = _reading(problem, state)
        part = read_block(query_spec, tokens, seen, problem.want_log)
        output = _divide(part, problem)
    output = problem.xp.astype(output, problem.query.dtype, copy=False)
    return output[..., 0, :], state
