"""Checked arguments of a call, and selections of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn._driver.problem import exact_problem
from linattn.functional import softmax_attention
from linattn.typing import Array, Problem

__all__ = ["Given", "Heads", "join_heads"]


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

    def heads(self, chosen: Sequence[int]) -> Heads:
        """Take some heads."""
        problem = self.problem
        arrays = problem.query, problem.key, problem.value
        if len(chosen) == self.num_heads:
            return Heads(*arrays, self.key_mask, self.key_bias)
        return self.flat_heads(chosen)

    def flat_heads(self, chosen: Sequence[int]) -> Heads:
        """Take some heads, or all, with one leading axis."""
        problem = self.problem
        arrays = problem.query, problem.key, problem.value
        query, key, value = (self._taken(x, chosen) for x in arrays)
        weights = (
            None if x is None else self._taken(x, chosen)[..., 0]
            for x in (problem.weights.key_mask, problem.weights.key_bias)
        )
        return Heads(query, key, value, *weights)

    def only(self, chosen: Sequence[int]) -> Given:
        """Return the arguments of some heads."""
        if len(chosen) == self.num_heads:
            return self
        return self._of(self.heads(chosen), is_causal=self.problem.sees.is_causal)

    def with_bias_in_keys(self) -> Given:
        """Append the biases to the keys as a coordinate: ``s q.k + b = s (q, 1).(k, b / s)``."""
        if self.key_bias is None:
            return self
        xp, heads = self.problem.xp, self.heads(range(self.num_heads))
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
        return self._of(heads, is_causal=self.problem.sees.is_causal)

    def rectangle(self, rows: slice, keys: slice) -> Given:
        """Return the arguments of full attention of some queries to some keys."""
        query, key, value, mask, bias = self.heads(range(self.num_heads))
        weights = (x if x is None or x.shape[-1] == 1 else x[..., keys] for x in (mask, bias))
        heads = Heads(query[..., rows, :], key[..., keys, :], value[..., keys, :], *weights)
        return self._of(heads, is_causal=False)

    def _of(self, heads: Heads, *, is_causal: bool) -> Given:
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
        whole = self.problem.xp.broadcast_to(x, (*self.problem.lead, *x.shape[-2:]))
        return self.flat(whole, chosen)

    def flat(self, x: Array, chosen: Sequence[int]) -> Array:
        """Take some elements of flattened leading axes."""
        xp = self.problem.xp
        index = xp.asarray(np.asarray(chosen), device=array_api_compat.device(x))
        return xp.take(xp.reshape(x, (-1, *x.shape[-2:])), index, axis=0)

    def unravel(self, head: int) -> tuple[int, ...]:
        """Index of a head in the leading axes."""
        return tuple(int(i) for i in np.unravel_index(head, self.problem.lead))

    def exact(self, chosen: Sequence[int], **options: Any) -> Any:
        """Return exact attention of some heads, with options of ``softmax_attention``."""
        query, key, value, mask, bias = self.heads(chosen)
        options = {"is_causal": self.problem.sees.is_causal} | options
        return softmax_attention(
            query, key, value, key_mask=mask, key_bias=bias, scale=self.scale, **options
        )


def join_heads(given: Given, groups: list[tuple[Sequence[int], Array]]) -> Array:
    """Put the outputs of groups of heads into the order of the heads."""
    xp, lead = given.problem.xp, given.problem.lead
    if len(groups) == 1:
        output = groups[0][1]
    else:
        # Each is copied once.
        parts = {head: part[i, ...] for heads, part in groups for i, head in enumerate(heads)}
        output = xp.stack([parts[head] for head in sorted(parts)], axis=0)
    return xp.reshape(output, (*lead, *output.shape[-2:]))
