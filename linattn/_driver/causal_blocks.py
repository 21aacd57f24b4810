"""A causal block is accepted, or done again where one scale was not enough."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import array_api_compat

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions, is_declined
from linattn._driver.blocks import (
    take,
    take_problem,
    take_state,
    task_index,
)
from linattn._driver.specs import is_column_normalized
from linattn._generic.causal import scan_features
from linattn._generic.column_means import read_means, scan_column_normalized, scan_on_one_scale
from linattn._generic.decay import fade, faded_rows, near_one
from linattn._generic.features import evaluate, query_features, row_features
from linattn._generic.hierarchical import scan_hierarchical
from linattn._generic.loops import ACCEPTED
from linattn._generic.separate import scan_separate
from linattn._generic.states import absorb, read
from linattn._numerics import LEAST, LIFT
from linattn.typing import (
    Array,
    Declined,
    Features,
    Partial,
    Problem,
    SeparateDenominator,
    State,
    Tokens,
)

UNDERFLOWED = Declined("rows underflowed: redone hierarchically", by_head=True)

MAX_DECLINED_TOKENS = 512
"""Longest causal block that the generic code does whole where a backend has declined it.

Its time and memory grow with the square of its length.
"""

MAX_DECAYED_TOKENS = 64
"""Longest causal block with a decay that is done again whole if rows of it are rejected.

A longer block is cut: its rejected rows see only keys that have decayed far, and the state before a
shorter block is closer to them.
"""

SMALL_VALUES = 2.0**10
"""Rounding units that underflow may take of the largest value that a row sees: 1e-4 in float32.

With one unit ordinary rows would be inspected twice, as their first values are seldom of size 1.
"""


def rejected_rows(
    part: Partial, log_weight: Array, values_and_one: Array, state: State, m: int
) -> Array:
    """Return rows ``(..., n, 1)`` that underflowed on the block's common shift, or None.

    A row is accepted if it is finite and its denominator is at least ``(loss / eps) (m N + z)``:
    N tokens so far, z the sum of the state's normalizers. Underflow takes at most
    ``loss (m N + z)``, which is then below rounding: each of two factors up to 1 may have lost
    ``2^-LIFT LEAST``. If ``SMALL_VALUES`` times the values that the row sees is below 1, the
    denominator is multiplied by it first. A row that sees no key is accepted too. A column of
    values with NaN or inf in the state cannot be repaired, nor can a head with such normalizers;
    neither rejects a row.
    """
    xp = _arrays.namespace(part.num_den)
    if bool(_accepted_at_once(part, values_and_one, state, m)):
        return None
    rejected = ~_accepted(part, log_weight, values_and_one, state, m)
    return rejected if bool(xp.any(rejected)) else None


def _accepted(
    part: Partial, log_weight: Array, values_and_one: Array, state: State, m: int
) -> Array:
    """Whether rows ``(..., n, 1)`` are accepted by all the values that they see."""
    xp, floor = _arrays.namespace(part.num_den), _floor(part, state, m)
    denominator, ones = xp.abs(part.num_den[..., -1:]), xp.ones_like(values_and_one[..., :1, :1])
    not_finite = ~xp.isfinite(part.num_den)
    seen = _values_seen(values_and_one, state)
    small = denominator * xp.minimum(SMALL_VALUES * seen, ones) < floor
    accepted = ~xp.any(small & (seen != 0), axis=-1, keepdims=True)
    if log_weight is not None:
        sees = _sums_so_far(xp.astype(log_weight > -xp.inf, part.num_den.dtype)) > 0
        before = xp.any(state.log_scale > -xp.inf, axis=-1)[..., None, None]
        accepted = accepted | ~(sees | before)
    alive = xp.all(xp.isfinite(state.kvz), axis=-2, keepdims=True)
    accepted = accepted & ~xp.any(not_finite & alive, axis=-1, keepdims=True)
    log_finite = xp.all(state.log_scale < xp.inf, axis=-1)[..., None, None]
    return accepted | ~(alive[..., -1:] & log_finite)


def _floor(part: Partial, state: State, m: int) -> Array:
    """Least denominator of a row of :func:`rejected_rows`."""
    xp, bits = _arrays.namespace(part.num_den), _arrays.dtype_bits(part.num_den.dtype)
    loss = 2 * LEAST[bits] * 2.0 ** -LIFT[bits]
    # A backend's state may be on a scale where the tokens do not bound its normalizers.
    terms = m * (state.length + part.num_den.shape[-2])
    terms = terms + xp.sum(xp.abs(state.z), axis=-1)[..., None, None]
    return loss / float(xp.finfo(part.num_den.dtype).eps) * terms


def _accepted_at_once(part: Partial, values_and_one: Array, state: State, m: int) -> Array:
    """Whether all rows are accepted by their own numbers and the first values; ``()``."""
    xp = _arrays.namespace(part.num_den)
    ones = xp.ones_like(values_and_one[..., :1, :1])
    denominator = xp.abs(part.num_den[..., -1:])
    # All rows see the first values, so others are seldom inspected.
    first = xp.min(xp.abs(values_and_one[..., :1, :]), axis=-1, keepdims=True)
    large = denominator * xp.minimum(SMALL_VALUES * first, ones) >= _floor(part, state, m)
    # One number that is not finite makes the sum of its column so.
    return xp.all(large) & xp.all(xp.isfinite(xp.sum(part.num_den, axis=-2)))


def _values_seen(values_and_one: Array, state: State) -> Array:
    """Size of the ``[v, 1]`` that each row sees, ``(..., n, e + 1)``; 0 where all are.

    A lower bound on the largest: means of the block's values, and of those in each feature.
    """
    xp, sizes = _arrays.namespace(values_and_one), abs(values_and_one)
    block_mean = _sums_so_far(sizes) / _sums_so_far(xp.ones_like(sizes[..., :1]))
    z = xp.abs(state.kvz[..., -1:])
    before = xp.where(z == 0, xp.zeros_like(state.kvz), xp.abs(state.kvz) / z)
    return xp.maximum(block_mean, xp.max(before, axis=-2, keepdims=True))


def _sums_so_far(x: Array) -> Array:
    """Sum up to each row; XLA makes a program of many steps of a cumulative sum."""
    xp, n = _arrays.namespace(x), x.shape[-2]
    if _arrays.is_staged(x):
        return xp.matmul(xp.tril(xp.ones((n, n), dtype=x.dtype)), x)
    return xp.cumulative_sum(x, axis=-2)


def causal_block(
    problem: Problem,
    functions: BlockFunctions,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
) -> tuple[Partial, State]:
    """Causal attention of a block after a state, every row accepted; also the state after it."""
    specs = (problem.query_spec, problem.key_spec)
    block: Any = query, key, values_and_one, state
    if is_column_normalized(problem):
        return scan_column_normalized(problem, *block)
    if isinstance(problem.query_spec, SeparateDenominator):
        return scan_separate(*specs, *block)
    if problem.policy.lazy:
        return scan_hierarchical(*specs, *block)
    n = size = values_and_one.shape[-2]
    whole, start = None, 0
    while start < n:
        rows = slice(start, min(start + size, n))
        tokens = query.rows(rows), key.rows(rows), values_and_one[..., rows, :]
        answer = _scanned(problem, functions, (*specs, *tokens, state))
        if answer is None:
            # The next part is likely to be too long for the same reason.
            size = -(-(rows.stop - start) // 2)
            continue
        part, state = answer
        if rows == slice(0, n):
            return part, state
        if whole is None:
            whole = _empty_partial(problem, n, values_and_one)
        # A backend may make the next part in the same place.
        whole.num_den[..., rows, :], whole.log[..., rows, :] = part.num_den, part.log
        start = rows.stop
    assert whole is not None
    return whole, state


def staged_block(
    problem: Problem, query: Tokens, key: Tokens, values_and_one: Array, state: State
) -> tuple[Partial, State]:
    """Scan a block that JAX traces: its rows, and the state after it.

    On one scale, or token by token if a row is then rejected: no row's scale then depends on a
    later key. Both are compiled, and one is run; under ``jax.vmap`` both are.
    """
    query_spec, key_spec = problem.query_spec, problem.key_spec
    if isinstance(query_spec, SeparateDenominator):

        def scan(*block: Any) -> tuple[Partial, State]:
            weight = None if key.log_weight is None else key.log_weight[..., None, :, :]
            of_block: Any = *block, None, weight
            return _scan_staged(*of_block)

        tokens = query, key, values_and_one, state
        return scan_separate(query_spec, key_spec, *tokens, scan)
    if is_column_normalized(problem):
        queries, keys = evaluate(query_spec, query), evaluate(key_spec, key)
        block = queries, keys, values_and_one, state
        fast = scan_on_one_scale(queries.log, keys.log, values_and_one, state)
        return _one_of(*fast, lambda: _token_by_token(*block, None, read_means))
    queries, log_row = query_features(query_spec, query)
    block = queries, row_features(key_spec, key), values_and_one, state
    part, after = _scan_staged(*block, key.log_decay, key.log_weight)
    return part._replace(log=part.log + log_row), after


def _scan_staged(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    state: State,
    log_decay: Array,
    log_weight: Array,
) -> tuple[Partial, State]:
    """Scan a block that has been evaluated."""
    block = queries, keys, values_and_one, state, log_decay
    part, after = scan_features(*block)
    jax, m = sys.modules["jax"], state.kvz.shape[-2]
    part_, values, before = jax.lax.stop_gradient((part, values_and_one, state))
    is_fine = _accepted_at_once(part_, values, before, m)

    def look() -> Array:
        return jax.numpy.all(_accepted(part_, log_weight, values, before, m))

    accepted = jax.lax.cond(is_fine, lambda: is_fine, look)
    return _one_of(part, after, accepted, lambda: _token_by_token(*block))


def _one_of(
    part: Partial, after: State, accepted: Array, exact: Callable[[], tuple[Partial, State]]
) -> tuple[Partial, State]:
    """Return these rows and this state if the rows are accepted, or else what a function finds."""
    jax = sys.modules["jax"]
    accepted = import_module("jax.ad_checkpoint").checkpoint_name(accepted, ACCEPTED)

    def arrays(part: Partial, after: State) -> tuple[Array, ...]:
        log = jax.numpy.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
        return part.num_den, log, *after[:2]

    found = jax.lax.cond(
        accepted, lambda: arrays(part, after), jax.checkpoint(lambda: arrays(*exact()))
    )
    num_den, log, kvz, log_scale = found
    return Partial(num_den, log), State(kvz, log_scale, after.length)


def _token_by_token(
    queries: Features,
    keys: Features,
    values_and_one: Array,
    state: State,
    log_decay: Array | None,
    read: Callable[[Features, State], Partial] = read,
) -> tuple[Partial, State]:
    """Read the state after each token."""
    jax = sys.modules["jax"]

    def step(sums: Any, token: Any) -> Any:
        # Arrays with an axis of one token.
        queries, keys, decay, value = token
        before = State(sums[0], sums[1], 0)
        if decay is not None:
            before = fade(before, decay[..., 0, :])
        after = absorb(keys, value, before)
        part = read(queries, after)
        log = jax.numpy.broadcast_to(part.log, (*part.num_den.shape[:-1], 1))
        return tuple(after[:2]), (part.num_den[..., 0, :], log[..., 0, :])

    tokens = queries, keys, log_decay, values_and_one
    moved = jax.tree.map(lambda a: jax.numpy.moveaxis(a[..., None, :], -3, 0), tokens)
    sums, rows = jax.lax.scan(step, tuple(state[:2]), moved)
    part = Partial(*(jax.numpy.moveaxis(x, 0, -2) for x in rows))
    return part, State(sums[0], sums[1], state.length + values_and_one.shape[-2])


def _scanned(
    problem: Problem, functions: BlockFunctions, block: Any
) -> tuple[Partial, State] | None:
    """Scan a block, every row accepted; None if it is declined or rejected and must be cut."""
    _, _, query, key, values_and_one, state = block
    xp = problem.xp
    name = "scan_block" if key.log_decay is None else "scan_decayed_block"
    scan_block: Any = functions.backend_alone(name)
    answer: Any = NotImplemented if scan_block is None else scan_block(*block, problem.want_log)
    if isinstance(answer, Declined) and answer.by_head:
        return _each_head(problem, functions, query, key, values_and_one, state)
    if is_declined(answer):
        if scan_block is not None and values_and_one.shape[-2] > MAX_DECLINED_TOKENS:
            return None
        answer = getattr(_generic, name)(*block, problem.want_log)
    part, after = answer
    if part.accepted:
        return part, after
    rejected = rejected_rows(part, key.log_weight, values_and_one, state, problem.num_features)
    if rejected is not None:
        functions.note(name, UNDERFLOWED)
        if key.log_decay is not None:
            if key.log_weight is not None and not bool(xp.any(key.log_weight > -xp.inf)):
                return _only_read(problem, functions, query, key.log_decay, state)
            if values_and_one.shape[-2] > MAX_DECAYED_TOKENS:
                return None
        part = _redone(problem, block, part, rejected)
    return part, after


def _only_read(
    problem: Problem, functions: BlockFunctions, query: Tokens, log_decay: Array, state: State
) -> tuple[Partial, State]:
    """Read a state that decays while all keys are masked."""
    before, log = near_one(state)
    part = functions.read_block(problem.query_spec, query, before, problem.want_log)
    part = part._replace(log=faded_rows(part.log + log, log_decay))
    after = fade(state, problem.xp.sum(log_decay, axis=-2))
    return part, State(after.kvz, after.log_scale, state.length + query.x.shape[-2])


def _redone(problem: Problem, block: Any, part: Partial, rejected: Array) -> Partial:
    """Compute the rejected rows of a causal block again, with the rows before the last of them."""
    xp, n = problem.xp, rejected.shape[-2]
    place = xp.arange(1, n + 1, dtype=xp.int64, device=array_api_compat.device(rejected))[:, None]
    last = xp.max(xp.where(rejected, place, xp.zeros_like(place)))
    # At least one is rejected; a simulated device, which computes nothing, may not say so twice.
    rows = slice(0, max(1, int(last)))
    query_spec, key_spec, query, key, values_and_one, state = block
    query, key, values_and_one = (
        query.rows(rows),
        key.rows(rows),
        values_and_one[..., rows, :],
    )
    again, _ = scan_hierarchical(query_spec, key_spec, query, key, values_and_one, state)

    def joined(new: Array, old: Array) -> Array:
        old = xp.broadcast_to(old, (*part.num_den.shape[:-1], old.shape[-1]))
        first = xp.where(rejected[..., rows, :], new, old[..., rows, :])
        return xp.concat([first, old[..., rows.stop :, :]], axis=-2)

    return Partial(joined(again.num_den, part.num_den), joined(again.log, part.log))


def _each_head(
    problem: Problem,
    functions: BlockFunctions,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    state: State,
) -> tuple[Partial, State]:
    """Scan the heads of a block one at a time, so that one stabilized head slows no other."""
    xp, n = problem.xp, values_and_one.shape[-2]
    part = _empty_partial(problem, n, values_and_one)
    after = State(xp.empty_like(state.kvz), xp.empty_like(state.log_scale), state.length + n)
    for index in product(*map(range, problem.state_lead)):
        # An axis of 1 stays whole, as in plans: queries may have more along it.
        task = tuple(
            slice(i, i + 1) if size > 1 else slice(None)
            for i, size in zip(index, problem.state_lead, strict=True)
        )
        share = partial(take, trailing=2, task=task)
        head_part, head_after = causal_block(
            take_problem(problem, task),
            functions,
            query.each(share),
            key.each(share),
            take(values_and_one, 2, task),
            take_state(state, task),
        )
        where = task_index(tuple(part.num_den.shape), 2, task)
        part.num_den[where], part.log[where] = head_part.num_den, head_part.log
        after.kvz[task_index(tuple(after.kvz.shape), 2, task)] = head_after.kvz
        after.log_scale[task_index(tuple(after.log_scale.shape), 1, task)] = head_after.log_scale
    return part, after


def _empty_partial(problem: Problem, n: int, values_and_one: Array) -> Partial:
    """Return an uninitialized partial of ``n`` tokens, which the parts of a block fill."""
    like = dict(dtype=problem.dtype, device=array_api_compat.device(values_and_one))
    shapes = ((*problem.lead, n, width) for width in (values_and_one.shape[-1], 1))
    return Partial(*(problem.xp.empty(shape, **like) for shape in shapes))
