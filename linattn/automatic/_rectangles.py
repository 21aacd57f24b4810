"""Attention by clusters in rectangles, and exact attention of what remains.

Full attention is one rectangle. Causal attention is cut in squares: the later half of the queries
sees all keys of the earlier half, and each half is cut again. Clusters of a square are found from
keys and queries before the queries of the square: no output depends on a later token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays
from linattn._driver.clusters import AssignedKeys
from linattn._driver.forward import attend_assigned
from linattn.automatic._costs import ALONE, may_be_in_vain
from linattn.automatic._heads import Given, Places, rows_of
from linattn.automatic._search import Choice
from linattn.automatic._tokens import Rectangle
from linattn.feature_maps import LandmarkFeatures
from linattn.merging import merge_outputs
from linattn.typing import Array, Problem, State

Choices = dict[Rectangle, Choice]
"""Clusters of one head; it is exact elsewhere."""


def rectangles_of(given: Given, num_rows: int) -> dict[Rectangle, Problem]:
    """Return the rectangles in which clusters may be tried, largest first."""
    L, S = (int(x.shape[-2]) for x in (given.problem.query, given.problem.key))
    whole = Rectangle(0, L, 0, S)
    if not given.problem.sees.is_causal:
        is_tried = given.tolerance is None or may_be_in_vain(given.problem, num_rows)
        return {whole: given.problem} if is_tried else {}
    found, ends = {}, [(0, L)] if L else []
    for start, stop in ends:
        where = Rectangle((start + stop) // 2, stop, start, (start + stop) // 2)
        square = given.rectangle(slice(where.first, stop), slice(start, where.first)).problem
        if may_be_in_vain(square, num_rows * (stop - where.first) // L):
            found[where] = square
            ends += [(start, where.first), (where.first, stop)]
    return found


def attend(given: Given, choices: Sequence[Choices], rows: Places) -> Array:
    """Return ascending rows of attention by clusters; ``given`` has one leading axis."""
    length = int(given.problem.query.shape[-2])
    places = np.arange(length)[rows]
    if given.problem.sees.is_causal:
        return _triangle(given, choices, places, 0, length)[0]
    (where,) = choices[0]
    return _rectangle(given, choices, places, where)[0]


def _triangle(
    given: Given, choices: Sequence[Choices], places: Any, start: int, stop: int
) -> tuple[Array, Array]:
    """Return causal attention of some queries from ``start`` on, and its log normalizer."""
    middle = (start + stop) // 2
    where, keys = Rectangle(middle, stop, start, middle), slice(start, stop)
    if not any(where in of_head for of_head in choices):
        part = given.rectangle(keys, keys)
        part = part.of(part.heads, is_causal=True)
        return part.exact(_as_slice(places - start), want_log=True)  # type: ignore[no-any-return]
    border = np.searchsorted(places, middle)
    parts = []
    if border:
        parts.append(_triangle(given, choices, places[:border], start, middle))
    if border < len(places):
        late = places[border:]
        both = [_rectangle(given, choices, late, where)]
        both.append(_triangle(given, choices, late, middle, stop))
        parts.append(merge_outputs(both))
    xp = given.problem.xp
    outputs, logs = zip(*parts, strict=True)
    return xp.concat(outputs, axis=-2), xp.concat(logs, axis=-1)


def _as_slice(places: Any) -> Places:
    """Return consecutive places as a slice, whose rows are a view."""
    if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
        return slice(int(places[0]), int(places[-1]) + 1)
    return np.asarray(places)


def _rectangle(
    given: Given, choices: Sequence[Choices], places: Any, where: Rectangle
) -> tuple[Array, Array]:
    """Return full attention of some queries to all keys of a rectangle, and its log normalizer."""
    rows, groups, xp = _as_slice(places), defaultdict(list), given.problem.xp
    for head, of_head in enumerate(choices):
        choice = of_head.get(where)
        groups[choice and (choice.trial.num_features, choice.num_exact)].append(head)
    part = given.rectangle(rows, slice(where.start, where.stop))
    parts: dict[int, tuple[Array, Array]] = {}
    same_place = None
    if not given.problem.sees.is_causal and given.problem.query.shape[-2] == where.stop:
        same_place = rows_of(xp, given.problem.key, rows)
    for way, heads in groups.items():
        part_of_heads = part.only(heads) if len(groups) > 1 else part
        if way is None:
            found = part_of_heads.exact(want_log=True)
        else:
            of_heads = [choices[head][where] for head in heads]
            keys = None if same_place is None else xp.stack([same_place[h, ...] for h in heads])
            found = _by_clusters(part_of_heads, of_heads, keys, places)
        parts |= {head: (found[0][i, ...], found[1][i, ...]) for i, head in enumerate(heads)}
    output, log = (xp.stack([parts[head][i] for head in sorted(parts)]) for i in range(2))
    return output, log


def _by_clusters(
    given: Given, choices: Sequence[Choice], same_place: Array | None, places: Any
) -> tuple[Array, Array]:
    """Attend to all keys by clusters, of one number for all heads.

    ``same_place``: the key at the position of each query, which raises its cluster, or None.
    """
    problem, xp = given.problem, given.problem.xp
    m, num_exact = choices[0].trial.num_features + ALONE, choices[0].num_exact
    phi, assigned = _map_and_keys(given, choices, m)
    if num_exact and same_place is not None:
        log = xp.astype(problem.query, problem.dtype) * xp.astype(same_place, problem.dtype)
        log = given.scale * _arrays.to_numpy(xp.sum(log, axis=-1, keepdims=True))
        column = assigned.of_key[:, places]
        log = np.where(column[..., None] < m, log, -np.inf)
        assigned = assigned._replace(raised=(np.minimum(column, m - 1), log))
    tokens = problem.query, problem.key, problem.value
    return attend_assigned(*tokens, phi, assigned, num_exact, given.key_mask)


def _map_and_keys(
    given: Given, choices: Sequence[Choice], m: int
) -> tuple[LandmarkFeatures, AssignedKeys]:
    """Stack the clusters of heads: a map of queries, and the keys in the problem's library."""
    problem, (S, d) = given.problem, given.problem.key.shape[-2:]
    n, e = len(choices), problem.value.shape[-1]
    of_key, centre = np.full((n, S), m), np.zeros((n, m, d))
    log_scale, bias = np.full((2, n, m), -np.inf)
    kvz = np.zeros((n, m, e + 1))
    for i, choice in enumerate(choices):
        x = choice.trial.clusters
        if x is not None:
            C = len(x.starts)
            of_key[i, x.positions], centre[i, :C] = x.of_key, x.centre / given.scale
            log_scale[i, :C], bias[i, :C], kvz[i, :C] = x.log_scale, x.bias, x.sums
    # A map of queries alone: its probes would weigh keys.
    probe = np.zeros((1, d))
    used = log_scale > -np.inf
    used[:, 0] |= ~used.any(axis=-1)
    phi = LandmarkFeatures(centre, probe, np.zeros(1), np.eye(d), used=used, scale=given.scale)
    device = array_api_compat.device(problem.key)
    bias, kvz, log_scale = (
        _arrays.device_array(x, problem.xp, problem.dtype, device) for x in (bias, kvz, log_scale)
    )
    return phi, AssignedKeys(of_key, bias, State(kvz, log_scale, S))
