"""Exact keys that are added to the rows of a walk: sinks, and near keys of one-token windows.

Sinks, the first keys of a sequence, are masked for the walk and added to its rows.

For a window of one token, the walk reads every key by the map. Then each near pair is exchanged:
its exact weight minus its weight by the map is added to the row. A block is accepted if this
cancels few digits of every row.
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

__all__ = ["Cancelled", "Exchange", "Sinks", "without_sinks", "without_window"]

MAX_SHARE = 4.0
"""Most that near pairs may have weighed by the map, over the row's denominator without them."""


def without_sinks(problem: Problem) -> Problem:
    """Problem whose sinks are masked."""
    xp, device = problem.xp, array_api_compat.device(problem.key)
    counts = (xp.arange(problem.key.shape[-2], device=device) >= problem.exact.sinks)[:, None]
    mask = counts if problem.weights.key_mask is None else problem.weights.key_mask & counts
    weights, exact = problem.weights._replace(key_mask=mask), problem.exact._replace(sinks=0)
    return problem.replace(weights=weights, exact=exact)


class Sinks(NamedTuple):
    """The first keys of a sequence, exact for every query that may see them."""

    problem: Problem
    log_decay: Array | None
    """Of each key up to its position, ``(..., S, 1)``."""

    @classmethod
    def of(cls, problem: Problem) -> Sinks:
        """Sum up how the keys of a problem decay."""
        if problem.weights.log_decay is None:
            return cls(problem, None)
        rows = slice(0, problem.key.shape[-2])
        return cls(problem, decay_since(decay_of_rows(problem, rows)))

    @property
    def keys(self) -> slice:
        """Where the sinks are."""
        return slice(0, min(self.problem.exact.sinks, self.problem.key.shape[-2]))

    def add(self, rows: slice, part: Partial) -> Partial:
        """Add the sinks to ``part``, the sums of some queries over all other keys."""
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
        """Which sinks some queries see, ``(n, s)``; None for all."""
        problem, sees, key = self.problem, self.problem.sees, np.arange(self.keys.stop)
        seen = np.ones((rows.stop - rows.start, len(key)), bool)
        if sees.key_stop is not None:
            seen &= key < sees.key_stop[rows][:, None]
        if not sees.ahead:
            seen &= key <= np.arange(rows.start, rows.stop)[:, None] + sees.query_start
        device = array_api_compat.device(problem.key)
        return None if seen.all() else problem.xp.asarray(seen, device=device)

    def bias(self, rows: slice) -> Array:
        """Log weights of pairs by how far apart they are; None for 0."""
        if self.log_decay is None:
            return offset_bias(self.problem, rows, self.keys)
        xp = self.problem.xp
        keys = xp.matrix_transpose(self.log_decay[..., self.keys, :])
        return xp.astype(-xp.abs(self.log_decay[..., rows, :] - keys), self.problem.dtype)

    def added(
        self, state: State, sinks: State, block_size: int, functions: BlockFunctions
    ) -> State:
        """Add the sinks to the state of all other keys; ``sinks`` is an empty state."""
        problem = self.problem
        rest = slice(self.keys.stop, problem.key.shape[-2])
        for after in add_key_blocks(problem, sinks, self.keys, 0, block_size, functions):
            sinks = after
        if problem.weights.log_decay is not None:
            sinks = fade(sinks, problem.xp.sum(decay_of_rows(problem, rest), axis=-2))
        merged = _generic.merge(state, sinks)
        return merged._replace(length=state.length)


TILE_ROWS = 512
"""Rows of one step of an exchange of near weights."""


class Cancelled(ArithmeticError):
    """Raised where a row would lose digits: its far keys must be summed without the near ones."""


def without_window(problem: Problem) -> Problem | None:
    """Problem that reads near keys by the map too; None where they cannot be exchanged."""
    specs = innermost(problem.query_spec), problem.query_spec
    divides = any(isinstance(spec, ColumnNormalized | SeparateDenominator) for spec in specs)
    exact, sees, weights = problem.exact, problem.sees, problem.weights
    known = exact.window == 1 and weights.relative_bias is None and not divides
    if not known or problem.policy.lazy or 0 in problem.lead:
        return None
    alone = weights.log_decay is None and sees.ahead
    if exact.clusters is not None and (exact.choice_rows > 1 or not alone):
        return None
    if sees.query_start and not sees.ahead:
        stops = np.arange(1, problem.query.shape[-2] + 1) + sees.query_start
        sees = sees._replace(right=None, key_stop=np.clip(stops, 0, problem.key.shape[-2]))
    return problem.replace(exact=exact._replace(window=None), sees=sees, want_log=True)


class _Keys(NamedTuple):
    """Keys of some positions, their features on scales of their own, and ``[v, 1]``."""

    x: Array
    log_weight: Array
    features: Array
    log: Array
    values_and_one: Array


class Exchange(NamedTuple):
    """Turns rows that read all keys by the map into rows of an exact window of one token."""

    problem: Problem
    start: int
    """Position of the first key for the map."""

    def __call__(self, rows: slice, part: Partial, is_exact: Any = None) -> Partial:
        """Exchange the weights of near pairs of some rows, a few rows at a time, to stay in cache.

        ``is_exact(rows, keys)`` says which pairs the rows have read exactly already.
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
        problem, xp = self.problem, self.problem.xp
        query = token_block(problem, "query", rows, self.start)
        features, log_row = query_features(problem.query_spec, query)
        features = _weights(features.log, features.values)
        keys = self._keys(rows)
        exact, by_map, ratios, values = [], [], [], []
        for offset in (-1, 0, 1) if problem.sees.ahead else (-1, 0):
            of = slice(1 + offset, 1 + offset + rows.stop - rows.start)
            seen, decay = self._seen(rows, offset, is_exact), self._decay(rows, offset)
            exact.append(self._exact(rows, keys, of) + seen + decay)
            by_map.append(log_row + keys.log[..., of, :] + seen + decay)
            ratios.append(xp.sum(features * keys.features[..., of, :], axis=-1, keepdims=True))
            values.append(keys.values_and_one[..., of, :])
        top = part.log
        for log in exact:
            top = xp.maximum(top, log)
        top = finite_shift(top, xp)
        num_den, by_map = part.num_den * xp.exp(part.log - top), [xp.exp(x - top) for x in by_map]
        share, largest = 0, 0
        for log, size, ratio, value in zip(exact, by_map, ratios, values, strict=True):
            weight = size * ratio
            num_den = num_den + (xp.exp(log - top) - weight) * value
            share, largest = share + xp.abs(weight), largest + size
        _check(num_den, share, largest, int(features.shape[-1]), xp)
        return Partial(num_den, top)

    def _keys(self, rows: slice) -> _Keys:
        problem, first = self.problem, rows.start + self.problem.sees.query_start - 1
        blocks = first, first + rows.stop - rows.start + 2, 1, self.start
        tokens, values_and_one = key_blocks(problem, *blocks, problem.key.shape[-2])
        x, log_weight = tokens.x[..., 0, :], tokens.log_weight
        log_weight = problem.xp.zeros_like(x[..., :1]) if log_weight is None else log_weight[..., 0]
        tokens = Tokens(x, log_weight, tokens.start)
        mapped = row_features(problem.key_spec, in_map_coordinates(problem, "key", tokens))
        log = problem.xp.max(mapped.log, axis=-1, keepdims=True)
        weights = _weights(mapped.log - finite_shift(log, problem.xp), mapped.values)
        return _Keys(x, log_weight, weights, log, values_and_one[..., 0, :])

    def _exact(self, rows: slice, keys: _Keys, of: slice) -> Array:
        """Log weight of each query's pair with its key."""
        problem, xp = self.problem, self.problem.xp
        assert problem.exact.spec is not None
        x = raw_tokens(problem, "query", rows, self.start).x * problem.exact.spec.scale
        logit = xp.sum(x * keys.x[..., of, :], axis=-1, keepdims=True)
        return logit + keys.log_weight[..., of, :]

    def _seen(self, rows: slice, offset: int, is_exact: Any) -> Array:
        """Log weight, 0 or -inf, of pairs at an offset; a number where it is 0 for all."""
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
        """Log weight by which pairs at an offset have decayed."""
        if self.problem.weights.log_decay is None or not offset:
            return 0.0
        return self.problem.xp.astype(decay_of_rows(self.problem, rows), self.problem.dtype)


def _weights(log: Array, values: Array | None) -> Array:
    weights = _arrays.namespace(log).exp(log)
    return weights if values is None else weights * values


def _check(num_den: Array, share: Array, largest: Array, m: int, xp: Any) -> None:
    """Check that rows have kept their digits, and that no product of features has vanished."""
    info, den = xp.finfo(num_den.dtype), xp.abs(num_den[..., -1:])
    vanished = largest * (m * float(info.smallest_normal) / float(info.eps))
    accepted = (share <= MAX_SHARE * den) & (vanished <= den)
    if not (bool(xp.all(accepted)) and bool(xp.all(xp.isfinite(num_den)))):
        raise Cancelled
