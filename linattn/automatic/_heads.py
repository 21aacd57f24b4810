"""Checked arguments of a call, and selections of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._driver.problem import exact_problem
from linattn.automatic._tokens import HostTokens, Rectangle, Rows, causal_rows, own_index
from linattn.functional import softmax_attention
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Problem

Places = slice | NDArray[np.intp]


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
                places = np.arange(key.shape[-2])[rows]
                if not want_log and 2 * len(places) > key.shape[-2]:
                    # All rows take less time than these.
                    return rows_of(self.problem.xp, self.exact(), places)
                found = self._causal_rows(places)
                return found if want_log else found[0]
            query = rows_of(self.problem.xp, query, rows)
        options |= {"scale": self.scale, "return_log_normalizer": want_log}
        return softmax_attention(query, key, value, key_mask=mask, key_bias=bias, **options)

    def _causal_rows(self, places: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return some rows of causal attention: on the host, as a mask of pairs is slow elsewhere.

        O(h S (d + e)) time for h rows, O(ROWS S) memory a head.
        """
        wide, lead = self.with_bias_in_keys(), self.problem.lead
        tokens = HostTokens(wide.problem, wide.key_mask, self.generator)
        rows, where = Rows(places, None), Rectangle(*2 * (0, self.problem.query.shape[-2]))
        heads = (tokens.head(self.unravel(i), rows, where) for i in range(self.num_heads))
        found = np.stack([causal_rows(head, self.scale) for head in heads])
        found, xp = found.reshape(*lead, *found.shape[-2:]), self.problem.xp
        device = array_api_compat.device(self.problem.query)
        whole = _arrays.device_array(found, xp, self.problem.dtype, device)
        return xp.astype(whole[..., :-1], self.problem.query.dtype), whole[..., -1]


def check_given(
    heads: Heads, is_causal: bool, scale: float | None, tolerance: float | None, rng: Seed
) -> Given:
    """Check the arguments of a call."""
    query, key, value, mask, bias = heads
    weights = {"key_mask": mask, "key_bias": bias}
    remedy = "pass equal lengths"
    problem = exact_problem(
        query, key, value, scale=scale, is_causal=is_causal, remedy=remedy, **weights
    )
    if _arrays.is_differentiated(query, key, value, bias):
        # Clusters are found on the host, and have no gradient.
        problem = problem.replace(policy=problem.policy._replace(lazy=True))
    scale = problem.query.shape[-1] ** -0.5 if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    if tolerance is not None:
        tolerance = _checks.check_finite_number("tolerance", tolerance, positive=True)
    return Given(problem, mask, scale, tolerance, as_generator(rng), bias)


def rows_of(xp: Any, x: Array, rows: Places) -> Array:
    """Take rows of an array: a view, if they are a slice."""
    if isinstance(rows, slice):
        return x[..., rows, :]
    index = xp.asarray(rows, device=array_api_compat.device(x))
    return xp.take(x, index, axis=-2)
