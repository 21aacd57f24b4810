"""Keys of the clusters that a query chooses exactly, all others by the map, one normalizer.

The clusters are the columns of a map that assigns each key to one. What a query reads by the map
is a sum over the columns that it has not chosen; nothing is ever subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _generic
from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import (
    add_block,
    block_slices,
    change_keys,
    flat_rows,
    in_map_coordinates,
    raw_tokens,
    split,
    take,
    take_state,
    token_block,
    values_and_one_block,
)
from linattn._driver.pairs import Read, no_keys_seen
from linattn._generic.hierarchical import pad
from linattn.typing import Array, Clusters, Index, Partial, Problem, State, Tokens


@dataclass(frozen=True)
class ExactClusters:
    """Keys of all heads in clusters, and how queries choose some of them."""

    problem: Problem
    functions: BlockFunctions
    assigned: AssignedKeys
    heads: NDArray[Any]
    """Clusters of each head, with the leading axes of the state."""

    def choose(
        self, problem: Problem, query: Tokens, state: State, bias: Array
    ) -> tuple[NDArray[np.bool_], Partial]:
        """Choose clusters for queries; also return what they read from the state of all others."""
        tokens = in_map_coordinates(problem.replace(want_log=True), "query", query)
        args = problem.query_spec, tokens, state, bias, problem.exact.clusters
        raised = self.assigned.raised
        if raised is not None:
            rows = slice(query.start, query.start + query.x.shape[-2])
            raised = raised[0][..., rows], raised[1][..., rows, :]
        return self.functions.choose_block(*args, raised)  # type: ignore[no-any-return]

    def add(self, query: Tokens, chosen: NDArray[np.bool_], part: Partial) -> Partial:
        """Add the keys of the chosen clusters, ``(..., n, m)``, to the rest."""
        problem, xp = self.problem, self.problem.xp
        if 0 in problem.lead:
            return no_keys_seen(problem, query)
        x, num_den, log = (
            xp.broadcast_to(a, (*problem.lead, *a.shape[-2:]))
            for a in (query.x, part.num_den, part.log)
        )
        chosen = np.broadcast_to(chosen, (*problem.lead, *chosen.shape[-2:]))
        clusters = np.broadcast_to(self.heads, problem.lead)
        parts = [
            self._clusters_block(head)(
                problem.exact.spec,
                Tokens(x[(*head, ...)], None, query.start),
                chosen[head],
                clusters[head],
                problem.exact.window,
                Partial(num_den[(*head, ...)], log[(*head, ...)]),
            )
            for head in np.ndindex(problem.lead)
        ]
        num_den, log = xp.stack([p.num_den for p in parts]), xp.stack([p.log for p in parts])
        return Partial(*(xp.reshape(a, (*problem.lead, *a.shape[-2:])) for a in (num_den, log)))

    def _clusters_block(self, head: tuple[int, ...]) -> Any:
        """Block function of a head: the generic one with a bias, which backends do not take."""
        problem, xp = self.problem, self.problem.xp
        bias, decay = problem.weights.relative_bias, problem.weights.log_decay
        if bias is None and decay is None:
            return self.functions.clusters_block
        device = array_api_compat.device(problem.key)

        def bias_of(offset: NDArray[np.intp]) -> Array:
            """Log weight of keys at an offset from their query, outside its window."""
            if bias is None:
                rate = xp.broadcast_to(xp.astype(decay, problem.dtype), (*problem.lead, 1, 1))
                distance = xp.asarray(abs(offset), dtype=problem.dtype, device=device)
                return distance * rate[(*head, ...)]
            table = xp.broadcast_to(bias.table, (*problem.lead, bias.table.shape[-1]))
            table = table[(*head, ...)]
            return xp.where(xp.asarray(offset < 0, device=device), table[0], table[-1])

        return partial(_generic.clusters_block, bias_of=bias_of)


class ChosenKeys(NamedTuple):
    """A source: the keys of the chosen clusters, and the states of all other keys."""

    clusters: ExactClusters
    query: Tokens
    """On one axis, without blocks."""
    reads: list[Read]

    def read(
        self, problem: Problem, functions: BlockFunctions, query: Tokens, so_far: Partial | None
    ) -> Partial:
        """Add both to the sums ``so_far`` of the near keys."""
        assert so_far is not None
        bias = self.clusters.assigned.bias[..., None, :]
        for states, log in self.reads:
            # A query chooses by its features and the clusters alone: the same in every state.
            chosen, rest = self.clusters.choose(problem, query, states, bias)
            if log is not None:
                rest = Partial(rest.num_den, rest.log + log)
            so_far = _generic.combine(so_far, rest)
        n, (total, size) = self.query.x.shape[-2], query.x.shape[-3:-1]
        lead, m = chosen.shape[:-3], chosen.shape[-1]
        chosen = chosen.reshape(*lead, total * size, m)[..., :n, :]
        part = self.clusters.add(self.query, chosen, flat_rows(so_far, n))
        return Partial(*(split(pad(x, total * size), size) for x in part[:2]))


class AssignedKeys(NamedTuple):
    """The column that each key is assigned to, and the bias and state of all columns.

    Attributes
    ----------
    of_key : ndarray of int, (..., S)
        Column of each key, m of a masked one; on the host.
    bias : Array, (..., m)
        Added to a query's log features before it chooses clusters.
    state : State
        After all keys.
    raised : tuple of ndarray (..., L), (..., L, 1), or None
        A column for each query, on the host, such as that of its own key, and the least score of
        this column where the query chooses clusters.
    """

    of_key: NDArray[np.intp]
    bias: Array
    state: State
    raised: tuple[NDArray[np.intp], NDArray[Any]] | None = None

    def of_task(self, task: Index) -> Self:
        """Take a task's share."""
        of_key, bias = (take(x, 1, task) for x in (self.of_key, self.bias))
        raised = self.raised and (take(self.raised[0], 1, task), take(self.raised[1], 2, task))
        return type(self)(of_key, bias, take_state(self.state, task), raised)


def sort_keys(
    problem: Problem, state: State, block_size: int, functions: BlockFunctions
) -> tuple[ExactClusters, State]:
    """Sort keys and values by their clusters; also the state after them.

    O(S m (d + e)) time, O(S (d + e)) memory.
    """
    assigned = problem.exact.assigned
    if assigned is None:
        assigned = _assign_keys(problem, state, block_size, functions)
    heads = _clusters(problem, assigned.of_key)
    return ExactClusters(problem, functions, assigned, heads), assigned.state


def choosing_by_sinks(
    problem: Problem, masked: Problem, state: State, block_size: int, functions: BlockFunctions
) -> Problem:
    """Return ``masked``, a problem without its sinks; these influence the choice of clusters.

    ``state``: an empty state of the problem.
    """
    args = state, block_size, functions
    sinks = change_keys(
        problem, lambda rows: rows[..., : min(problem.exact.sinks, rows.shape[-2]), :]
    )
    assigned = _assign_keys(masked, *args, _clusters_of_keys(sinks, *args))
    return masked.replace(exact=masked.exact._replace(assigned=assigned))


def _assign_keys(
    problem: Problem,
    state: State,
    block_size: int,
    functions: BlockFunctions,
    sinks: _KeyClusters | None = None,
) -> AssignedKeys:
    """Assign the keys; ``sinks``: keys of no cluster that influence the choice of clusters."""
    keys, m = _clusters_of_keys(problem, state, block_size, functions), problem.num_features
    of_key, distance, unbiased = keys[:3]
    if sinks is not None:
        of_key, distance = (
            np.concatenate(x, axis=-1) for x in zip(keys[:2], sinks[:2], strict=True)
        )
        unbiased = _generic.merge(unbiased, sinks.unbiased)
    log_sums = _arrays.to_numpy(problem.xp.log(unbiased.kvz[..., -1]) + unbiased.log_scale)
    bias = _bias(of_key, distance, np.broadcast_to(log_sums, (*problem.state_lead, m)))
    device = array_api_compat.device(problem.key)
    return AssignedKeys(
        keys.of_key, _arrays.device_array(bias, problem.xp, problem.dtype, device), keys.state
    )


class _KeyClusters(NamedTuple):
    """Column of each key, m of a masked one, its squared distance, and sums of the keys."""

    of_key: NDArray[np.intp]
    distance: NDArray[Any]
    unbiased: State
    """Without the bias of keys."""
    state: State


def _clusters_of_keys(
    problem: Problem, state: State, block_size: int, functions: BlockFunctions
) -> _KeyClusters:
    lead, m = problem.state_lead, problem.num_features
    # A bias of keys changes no choice, unless it masks a key.
    alike = problem.replace(weights=problem.weights._replace(key_bias=None))
    indices, distances, unbiased = [np.zeros((*lead, 0), np.intp)], [np.zeros((*lead, 0))], state
    for rows in block_slices(problem.key.shape[-2], block_size):
        tokens, values = token_block(alike, "key", rows, 0), values_and_one_block(problem, rows)
        if problem.weights.key_bias is not None:
            state = add_block(problem, rows, token_block(problem, "key", rows, 0), state, functions)
        unbiased, index, distance = functions.assign_block(
            problem.key_spec, tokens, values, unbiased
        )
        if tokens.log_weight is not None:
            # Masked keys are in no cluster.
            masked = _arrays.to_numpy(tokens.log_weight)[..., 0] == -np.inf
            index = np.where(masked, m, index)
        indices.append(np.broadcast_to(index, (*lead, index.shape[-1])))
        distances.append(np.broadcast_to(distance, (*lead, distance.shape[-1])))
    biased = unbiased if problem.weights.key_bias is None else state
    joined = np.concatenate(indices, axis=-1), np.concatenate(distances, axis=-1)
    return _KeyClusters(*joined, unbiased, biased)


def _bias(
    index: NDArray[np.intp], distance: NDArray[Any], log_sums: NDArray[Any]
) -> NDArray[np.float64]:
    """Log of the mean weight of a cluster's keys times their root mean square distance.

    With a query's log features it is the first-order size of the error in such a key's attention.
    """
    m = log_sums.shape[-1]
    bias = np.full(log_sums.shape, -np.inf)
    for head in np.ndindex(log_sums.shape[:-1]):
        count = np.bincount(index[head], minlength=m + 1)[:m]
        total = np.bincount(index[head], weights=distance[head], minlength=m + 1)[:m]
        mean = np.maximum(total, 0) / np.maximum(count, 1)
        sizes = log_sums[head] - np.log(np.maximum(count, 1)) + np.log(mean) / 2
        bias[head] = np.where(count > 0, sizes, -np.inf)
    return bias


def _clusters(problem: Problem, index: NDArray[np.intp]) -> NDArray[Any]:
    """Sort the keys of each head."""
    xp, lead, m = problem.xp, problem.state_lead, problem.num_features
    device, whole = array_api_compat.device(problem.key), slice(0, problem.key.shape[-2])
    key, values_and_one = raw_tokens(problem, "key", whole, 0), values_and_one_block(problem, whole)
    weight = None if problem.weights.key_bias is None else key.log_weight
    arrays = [
        None if a is None else xp.broadcast_to(a, (*lead, *a.shape[-2:]))
        for a in (key.x, weight, values_and_one)
    ]
    found = np.empty(lead, dtype=object)
    for head in np.ndindex(lead):
        order = np.argsort(index[head], kind="stable")
        bounds = np.searchsorted(index[head], np.arange(m + 1), sorter=order)
        order = order[: bounds[-1]]
        where = xp.asarray(order, device=device)
        x, log, values = (
            None if a is None else xp.take(a[(*head, ...)], where, axis=0) for a in arrays
        )
        found[head] = Clusters(Tokens(x, log, 0), values, bounds, order)
    return found
