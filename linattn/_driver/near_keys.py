"""Exact keys that are added to the rows of a walk: sinks, and near keys of one-token windows.

Sinks are the first keys of a sequence. The walk masks them; `Sinks` adds their exact weights.

A window of one token makes the keys at offsets -1, 0 and 1 from a query exact (causal: -1 and 0).
The walk reads every key by the map. Then `Exchange` subtracts each near pair's weight by the map
and adds its exact weight. It raises `Cancelled` if this subtraction loses many digits of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    add_key_blocks,
    block_slices,
    decay_blocks,
    decay_of_rows,
    in_map_coordinates,
    key_blocks,
    raw_tokens,
    token_block,
    values_and_one_block,
)
from linattn._driver.pairs import biased_keys, biased_queries, offset_bias
from linattn._driver.specs import innermost
from linattn._generic.decay import decay_since, fade
from linattn._generic.exact import exact_pairs
from linattn._generic.features import query_features, row_features
from linattn._generic.numerics import finite_shift
from linattn.typing import (
    Array,
    ColumnNormalized,
    Partial,
    Problem,
    SeparateDenominator,
    State,
    Tokens,
)
from linattn.typing._shifts import largest

MAX_SHARE = 4.0
"""Largest accepted ratio of a row's subtracted weights to its denominator after the exchange."""


def without_sinks(problem: Problem) -> Problem:
    """Return the problem with its sinks masked, and no sinks."""
    xp, device = problem.xp, array_api_compat.device(problem.key)
    counts = (xp.arange(problem.key.shape[-2], device=device) >= problem.exact.sinks)[:, None]
    mask = counts if problem.weights.key_mask is None else problem.weights.key_mask & counts
    weights, exact = problem.weights._replace(key_mask=mask), problem.exact._replace(sinks=0)
    return problem.replace(weights=weights, exact=exact)


class Sinks(NamedTuple):
    """The first keys of a sequence, exact for every query that may see them."""

    problem: Problem
    log_decay: Array | None
    """Sum of the log decays up to each key, ``(..., S, 1)``; None without decay."""

    @classmethod
    def of(cls, problem: Problem) -> Sinks:
        """Return the sinks of a problem, with cumulative sums of its log decays."""
        if problem.weights.log_decay is None:
            return cls(problem, None)
        rows = slice(0, problem.key.shape[-2])
        return cls(problem, decay_since(decay_of_rows(problem, rows)))

    @property
    def keys(self) -> slice:
        """Rows of the sinks, at most all keys."""
        return slice(0, min(self.problem.exact.sinks, self.problem.key.shape[-2]))

    def add(self, rows: slice, part: Partial) -> Partial:
        """Return ``part``, the sums of some queries over other keys, with the sinks added."""
        problem = self.problem
        if not self.keys.stop:
            return part
        spec = problem.query_spec if problem.exact.spec is None else problem.exact.spec
        spec, query = biased_queries(problem, spec, raw_tokens(problem, "query", rows, 0))
        key = biased_keys(problem, raw_tokens(problem, "key", self.keys, 0))
        pairs = values_and_one_block(problem, self.keys), self.visible(rows), self.bias(rows)
        more = exact_pairs(spec, query, key, *pairs, problem.policy.lazy)
        return _generic.combine(part, more)

    def visible(self, rows: slice) -> Array:
        """Return the mask of the sinks that some queries see, ``(n, s)``; None if they see all."""
        problem, sees, key = self.problem, self.problem.sees, np.arange(self.keys.stop)
        seen = np.ones((rows.stop - rows.start, len(key)), bool)
        if sees.key_stop is not None:
            seen &= key < sees.key_stop[rows][:, None]
        if not sees.ahead:
            seen &= key <= np.arange(rows.start, rows.stop)[:, None] + sees.query_start
        device = array_api_compat.device(problem.key)
        return None if seen.all() else problem.xp.asarray(seen, device=device)

    def bias(self, rows: slice) -> Array:
        """Return log weights of queries and sinks: decay or relative bias; None if all are 0."""
        if self.log_decay is None:
            return offset_bias(self.problem, rows, self.keys)
        xp = self.problem.xp
        keys = xp.matrix_transpose(self.log_decay[..., self.keys, :])
        return xp.astype(-xp.abs(self.log_decay[..., rows, :] - keys), self.problem.dtype)

    def added(
        self, state: State, sinks: State, block_size: int, functions: BlockFunctions
    ) -> State:
        """Return ``state``, the state of all other keys, with the sinks added.

        ``sinks``: an empty state, to which the sinks are added first.
        """
        problem = self.problem
        rest = slice(self.keys.stop, problem.key.shape[-2])
        for after in add_key_blocks(problem, sinks, self.keys, 0, block_size, functions):
            sinks = after
        if problem.weights.log_decay is not None:
            sinks = fade(sinks, problem.xp.sum(decay_of_rows(problem, rest), axis=-2))
        merged = _generic.merge(state, sinks)
        return merged._replace(length=state.length)


TILE_ROWS = 512
"""Rows that `Exchange` takes at a time, so that they stay in cache."""


class Cancelled(ArithmeticError):
    """An exchange would lose digits of a row: sum far keys without the near keys instead."""


def without_window(problem: Problem) -> Problem | None:
    """Return the problem without its window; None if `Exchange` cannot restore the window."""
    specs = innermost(problem.query_spec), problem.query_spec
    divides = any(isinstance(spec, ColumnNormalized | SeparateDenominator) for spec in specs)
    exact, sees, weights = problem.exact, problem.sees, problem.weights
    known = exact.window == 1 and weights.relative_bias is None and not divides
    if not known or problem.policy.lazy or 0 in problem.lead:
        return None
    alone = weights.log_decay is None and sees.ahead
    if exact.clusters is not None and not alone:
        return None
    if not sees.ahead:
        # The near keys are the last ones that a query sees: it reads the state before them.
        stops = np.arange(problem.query.shape[-2]) + sees.query_start - 1
        sees = sees._replace(right=None, key_stop=np.clip(stops, 0, problem.key.shape[-2]))
        if weights.log_decay is not None:
            decay = decay_of_rows(problem, slice(0, problem.key.shape[-2]))
            weights = weights._replace(log_decay=decay)
    exact = exact._replace(window=None)
    return problem.replace(exact=exact, sees=sees, weights=weights, want_log=True)


class Exchange(NamedTuple):
    """Turns rows of a problem without its window into rows of an exact window of one token.

    Causal rows have read far keys only, all others the near ones too: those are subtracted.
    """

    problem: Problem
    start: int
    """Position of the problem's first key: the number of tokens in the initial state."""

    def __call__(self, rows: slice, part: Partial, is_exact: Any = None) -> Partial:
        """Return ``part`` with exact weights of the near pairs of ``rows``.

        ``is_exact(rows, keys)``: mask of the pairs that are exact already, in chosen clusters.
        Raises `Cancelled` if a row loses digits.
        """
        xp, parts = self.problem.xp, []
        log = xp.broadcast_to(part.log, (*part.log.shape[:-2], *part.num_den.shape[-2:-1], 1))
        for tile in block_slices(rows.stop - rows.start, TILE_ROWS):
            of = slice(rows.start + tile.start, rows.start + tile.stop)
            share = Partial(part.num_den[..., tile, :], log[..., tile, :])
            parts.append(self._exchanged(of, share, is_exact)[:2])
        if len(parts) == 1:
            return Partial(*parts[0])
        return Partial(*(xp.concat(list(x), axis=-2) for x in zip(*parts, strict=True)))

    def _exchanged(self, rows: slice, part: Partial, is_exact: Any) -> Partial:
        """Exchange the near pairs of one tile of rows; ``part`` has a scale for each row."""
        problem, xp, n = self.problem, self.problem.xp, rows.stop - rows.start
        first = rows.start + problem.sees.query_start - 1
        blocks = first, first + n + 2, 1, self.start, problem.key.shape[-2]
        tokens, values_and_one = key_blocks(problem, *blocks)
        tokens = tokens.each(lambda x: x[..., 0, :])
        near = [
            (slice(1 + i, 1 + i + n), self._seen(rows, i, is_exact) + self._decay(rows, i))
            for i in ((-1, 0, 1) if problem.sees.ahead else (-1, 0))
        ]
        exact = [self._exact(rows, tokens, of) + log for of, log in near]
        values = [values_and_one[..., of, 0, :] for of, _ in near]
        if not problem.sees.ahead:
            top = finite_shift(xp.maximum(*exact), xp)
            sums = sum(xp.exp(x - top) * v for x, v in zip(exact, values, strict=True))
            far_keys = Partial(part.num_den, part.log + self._decay_of_far(rows))
            return _generic.combine(far_keys, Partial(sums, top))
        top = part.log
        for log in exact:
            top = xp.maximum(top, log)
        top = finite_shift(top, xp)
        num_den, sizes, ratios, m = (
            part.num_den * xp.exp(part.log - top),
            *self._by_map(rows, tokens, near),
        )
        share, largest = 0, 0
        for log, by_map, ratio, value in zip(exact, sizes, ratios, values, strict=True):
            size = xp.exp(by_map - top)
            weight = size * ratio
            num_den = num_den + (xp.exp(log - top) - weight) * value
            share, largest = share + xp.abs(weight), largest + size
        _check(num_den, share, largest, m, xp)
        return Partial(num_den, top)

    def _by_map(
        self, rows: slice, tokens: Tokens, near: list[tuple[slice, Array]]
    ) -> tuple[list[Array], list[Array], int]:
        """Return near pairs' weights by the map, as logs of sizes and ratios; and m."""
        problem, xp = self.problem, self.problem.xp
        query = token_block(problem, "query", rows, self.start)
        features, log_row = query_features(problem.query_spec, query)
        features = _weights(features.log, features.values)
        mapped = row_features(problem.key_spec, in_map_coordinates(problem, "key", tokens))
        log = largest(mapped.log, keepdims=True)
        keys = _weights(mapped.log - finite_shift(log, xp), mapped.values)
        sizes = [log_row + log[..., of, :] + hidden for of, hidden in near]
        ratios = [xp.vecdot(features, keys[..., of, :])[..., None] for of, _ in near]
        return sizes, ratios, int(features.shape[-1])

    def _exact(self, rows: slice, keys: Tokens, of: slice) -> Array:
        """Return the exact log weight of query i of ``rows`` with near key ``of.start + i``."""
        problem, xp = self.problem, self.problem.xp
        assert problem.exact.spec is not None
        x = raw_tokens(problem, "query", rows, self.start).x * problem.exact.spec.scale
        logit = xp.vecdot(x, keys.x[..., of, :])[..., None]
        return logit if keys.log_weight is None else logit + keys.log_weight[..., of, :]

    def _seen(self, rows: slice, offset: int, is_exact: Any) -> Array:
        """Return 0 for pairs to exchange at an offset and -inf for others; 0.0 if all are 0.

        Others are hidden by ``key_stop``, or exact already.
        """
        problem, seen = self.problem, np.ones((rows.stop - rows.start, 1), bool)
        key = np.arange(rows.start, rows.stop) + problem.sees.query_start + offset
        if problem.sees.key_stop is not None:
            seen &= (key < problem.sees.key_stop[rows])[:, None]
        if is_exact is not None:
            seen = seen & ~is_exact(rows, key)
        if seen.all():
            return 0.0
        xp, device = problem.xp, array_api_compat.device(problem.key)
        return xp.asarray(np.where(seen, 0.0, -np.inf), dtype=problem.dtype, device=device)

    def _decay(self, rows: slice, offset: int) -> Array:
        """Return the log decay of the pairs at an offset of -1, 0 or 1.

        A causal key before a query decays by the query's log decay. Attention to both sides has
        one log decay for all tokens of a head.
        """
        if self.problem.weights.log_decay is None or not offset:
            return 0.0
        return self.problem.xp.astype(decay_of_rows(self.problem, rows), self.problem.dtype)

    def _decay_of_far(self, rows: slice) -> Array:
        """Return the log decay from the last far key of each causal row to the row."""
        problem, xp = self.problem, self.problem.xp
        if problem.weights.log_decay is None:
            return 0.0
        decay = decay_blocks(problem, rows.start - 1, rows.stop, 1)[..., 0, :]
        return xp.astype(decay[..., :-1, :] + decay[..., 1:, :], problem.dtype)


def _weights(log: Array, values: Array | None) -> Array:
    """Return the features ``values * exp(log)``; ``exp(log)`` if ``values`` is None."""
    weights = _arrays.namespace(log).exp(log)
    return weights if values is None else weights * values


def _check(num_den: Array, share: Array, largest: Array, m: int, xp: Any) -> None:
    """Raise `Cancelled` if a row lost digits, is not finite, or lost an underflowed product.

    ``share``: sum of the subtracted weights; ``largest``: sum of the largest products of features
    that they may have; ``m``: number of features, whose products may underflow.
    """
    info, den = xp.finfo(num_den.dtype), xp.abs(num_den[..., -1:])
    vanished = largest * (m * float(info.smallest_normal) / float(info.eps))
    accepted = (share <= MAX_SHARE * den) & (vanished <= den)
    if not (bool(xp.all(accepted)) and bool(xp.all(xp.isfinite(num_den)))):
        raise Cancelled
