"""Checked arguments of a call, and selections of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn._driver.problem import exact_problem
from linattn.automatic._costs import ROWS
from linattn.functional import softmax_attention
from linattn.feature_maps._clusters import power_of_two
from linattn.typing import Array, Problem

__all__ = ["Given", "Heads", "Places", "own_index", "rows_of"]

Places = slice | NDArray[np.intp]

LEAST_LOG = -80.0
"""Smallest log weight that is not clipped: numbers that are not normal take ten times as long."""


class Heads(NamedTuple):
    """Arrays of some heads: the caller's arrays for all heads, else with one leading axis."""

    query: Array
    key: Array
    value: Array
    key_mask: Array | None
    key_bias: Array | None


class Given(NamedTuple):
    """Arguments of a call, checked."""

    problem: Problem
    key_mask: Array | None
    scale: float
    tolerance: float | None
    generator: np.random.Generator
    key_bias: Array | None = None

    @property
    def num_heads(self) -> int:
        """Heads of the output."""
        return int(np.prod(self.problem.lead, dtype=np.int64))

    @property
    def heads(self) -> Heads:
        """Arrays of all heads."""
        problem = self.problem
        return Heads(problem.query, problem.key, problem.value, self.key_mask, self.key_bias)

    def only(self, chosen: Sequence[int]) -> Given:
        """Return the arguments of some heads, with one leading axis."""
        problem = self.problem
        arrays = problem.query, problem.key, problem.value
        query, key, value = (self._taken(x, chosen) for x in arrays)
        mask, bias = (
            None if x is None else self._taken(x, chosen)[..., 0]
            for x in (problem.weights.key_mask, problem.weights.key_bias)
        )
        heads = Heads(query, key, value, mask, bias)
        return self.of(heads, is_causal=problem.sees.is_causal)

    def with_bias_in_keys(self) -> Given:
        """Append the biases to the keys as a coordinate: ``s q.k + b = s (q, 1).(k, b / s)``."""
        if self.key_bias is None:
            return self
        xp, heads = self.problem.xp, self.heads
        query, key, bias = heads.query, heads.key, self.problem.weights.key_bias
        seen = xp.isfinite(bias)
        mask = seen[..., 0] if heads.key_mask is None else seen[..., 0] & heads.key_mask
        bias = xp.where(seen, bias, xp.zeros_like(bias)) / self.scale
        lead = np.broadcast_shapes(key.shape[:-2], bias.shape[:-2])
        bias = xp.broadcast_to(xp.astype(bias, key.dtype), (*lead, key.shape[-2], 1))
        heads = heads._replace(
            query=xp.concat([query, xp.ones_like(query[..., :1])], axis=-1),
            key=xp.concat([xp.broadcast_to(key, (*lead, *key.shape[-2:])), bias], axis=-1),
            key_mask=mask,
            key_bias=None,
        )
        return self.of(heads, is_causal=self.problem.sees.is_causal)

    def rectangle(self, rows: Places, keys: slice) -> Given:
        """Return the arguments of full attention of some queries to some keys."""
        query, key, value, mask, bias = self.heads
        weights = (x if x is None or x.shape[-1] == 1 else x[..., keys] for x in (mask, bias))
        query = rows_of(self.problem.xp, query, rows)
        heads = Heads(query, key[..., keys, :], value[..., keys, :], *weights)
        return self.of(heads, is_causal=False)

    def of(self, heads: Heads, *, is_causal: bool) -> Given:
        problem = exact_problem(
            heads.query,
            heads.key,
            heads.value,
            scale=self.scale,
            is_causal=is_causal,
            key_mask=heads.key_mask,
            key_bias=heads.key_bias,
        )
        return self._replace(problem=problem, key_mask=heads.key_mask, key_bias=heads.key_bias)

    def _taken(self, x: Array, chosen: Sequence[int]) -> Array:
        axes = tuple(x.shape[:-2])
        places = [own_index(self.problem.lead, self.unravel(head), axes) for head in chosen]
        return self.problem.xp.stack([x[(*place, ...)] for place in places], axis=0)

    def unravel(self, head: int) -> tuple[int, ...]:
        """Index of a head in the leading axes."""
        return tuple(int(i) for i in np.unravel_index(head, self.problem.lead))

    def exact(self, rows: Places | None = None, *, want_log: bool = False) -> Any:
        """Return exact attention of all heads, of ascending rows if some are given."""
        query, key, value, mask, bias = self.heads
        options: dict[str, Any] = {"is_causal": self.problem.sees.is_causal}
        whole = rows is None or (isinstance(rows, slice) and rows == slice(0, query.shape[-2]))
        if rows is not None and not whole:
            if options["is_causal"]:
                return self._causal_rows(np.arange(key.shape[-2])[rows], want_log)
            query = rows_of(self.problem.xp, query, rows)
        options |= {"scale": self.scale, "return_log_normalizer": want_log}
        return softmax_attention(query, key, value, key_mask=mask, key_bias=bias, **options)

    def _causal_rows(self, places: NDArray[np.intp], want_log: bool) -> Any:
        """Return some rows of causal attention: on the host, as a mask of pairs is slow elsewhere.

        O(h S (d + e)) time for h rows, O(ROWS S) memory a head.
        """
        problem, xp = self.problem, self.problem.xp
        if 2 * len(places) > problem.query.shape[-2]:
            # All rows take less time than these.
            output, log = self.exact(want_log=True)
            output, log = rows_of(xp, output, places), rows_of(xp, log[..., None], places)[..., 0]
            return (output, log) if want_log else output
        heads = self.heads
        wide = (xp.astype(x, problem.dtype) for x in (heads.query, heads.key, heads.value))
        query, key, value = map(_arrays.to_numpy, wide)
        weights = np.zeros((1, 1), key.dtype)
        if heads.key_bias is not None:
            weights = weights + _arrays.to_numpy(xp.astype(heads.key_bias, problem.dtype))
        if heads.key_mask is not None:
            weights = np.where(_arrays.to_numpy(heads.key_mask), weights, -np.inf)
        weights = np.broadcast_to(weights, (*weights.shape[:-1], key.shape[-2]))[..., None, :]
        seen = np.swapaxes(weights > -np.inf, -1, -2)
        key, value = np.where(seen, key, 0), np.where(seen, value, 0)
        # In units of 1 no sum leaves the range.
        unit = power_of_two(np.abs(value).max(initial=0)).astype(value.dtype)
        lead, h, e = problem.lead, len(places), value.shape[-1]
        outputs, logs = np.zeros((*lead, h, e), key.dtype), np.zeros((*lead, h), key.dtype)
        for start in range(0, h, ROWS):
            rows = places[start : start + ROWS]
            first, stop, part = rows[0], rows[-1] + 1, slice(start, start + ROWS)
            x = query[..., rows, :] * key.dtype.type(self.scale)
            logits = x @ np.swapaxes(key[..., :stop, :], -1, -2) + weights[..., :stop]
            hidden = np.arange(first, stop) > rows[:, None]
            np.copyto(logits[..., first:], -np.inf, where=hidden)
            top = logits.max(axis=-1, keepdims=True)
            logits -= np.where(top > -np.inf, top, 0)
            np.copyto(logits, -np.inf, where=logits < LEAST_LOG)
            total = np.exp(logits, out=logits).sum(axis=-1, keepdims=True)
            found = logits @ (value[..., :stop, :] / unit) / np.where(total > 0, total, 1)
            outputs[..., part, :] = found * unit
            with np.errstate(divide="ignore"):
                logs[..., part] = (np.log(total) + top)[..., 0]
        device = array_api_compat.device(heads.query)
        output, log = (_arrays.device_array(x, xp, problem.dtype, device) for x in (outputs, logs))
        output = xp.astype(output, heads.query.dtype)
        return (output, log) if want_log else output


def rows_of(xp: Any, x: Array, rows: Places) -> Array:
    """Take rows of an array: a view, if they are a slice."""
    if isinstance(rows, slice):
        return x[..., rows, :]
    index = xp.asarray(rows, device=array_api_compat.device(x))
    return xp.take(x, index, axis=-2)


def own_index(
    lead: tuple[int, ...], index: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the index of a head in leading axes that are broadcast."""
    where = index[len(lead) - len(axes) :]
    return tuple(0 if n == 1 else i for i, n in zip(where, axes, strict=True))
