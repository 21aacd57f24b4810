"""Full attention by clusters: each head gets the number that it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import array_api_compat
import numpy as np

from linattn._arrays import device_array
from linattn._driver import forward
from linattn._driver.clusters import AssignedKeys
from linattn._driver.problem import linear_problem
from linattn.automatic._costs import (
    MIN_FEATURES,
    MIN_HELD_OUT,
    cost_of,
    exact_pairs,
    fit_work,
    may_be_in_vain,
    num_rows_of,
    read_work,
    spare_of,
)
from linattn.automatic._fit import Clusters
from linattn.automatic._heads import Given, join_heads
from linattn.automatic._report import Answer, HeadRecord
from linattn.automatic._search import UNCHECKED, Choice, Searcher
from linattn.automatic._tokens import HostTokens, query_mask_of
from linattn.feature_maps import LandmarkFeatures
from linattn.typing import Problem, State

__all__ = ["attend", "groups_of", "is_worth_a_search", "record_of"]


def is_worth_a_search(given: Given) -> bool:
    """Whether clusters may be tried; with a tolerance a useless trial must be cheap enough."""
    problem = given.problem
    if given.tolerance is not None:
        first = cost_of(fit_work(problem, MIN_FEATURES, MIN_HELD_OUT), problem)
        return may_be_in_vain(problem) and first <= spare_of(problem, given.num_heads)
    whole = fit_work(problem, MIN_FEATURES, num_rows_of(problem))
    whole = whole.plus(read_work(problem, MIN_FEATURES, UNCHECKED / MIN_FEATURES))
    return cost_of(whole, problem) <= exact_pairs(problem)


def attend(given: Given) -> Answer:
    """Attend by clusters if they are cheap and accurate enough, else exactly."""
    wide, mask = given.with_bias_in_keys(), query_mask_of(given.problem, given.key_mask)
    tokens = HostTokens(wide.problem, mask, given.generator)
    search = Searcher(wide.problem, given.scale, tokens, given.generator)
    choices, spare = [], spare_of(wide.problem, given.num_heads)
    exact_cost = exact_pairs(wide.problem)
    first = cost_of(fit_work(wide.problem, MIN_FEATURES, MIN_HELD_OUT), wide.problem)
    for index in tokens:
        if given.tolerance is None:
            choices.append(search.unchecked(index, MIN_FEATURES))
        elif first > spare:
            choices.append(Choice.untried(wide.problem))
        else:
            trial = search.trial(index, MIN_FEATURES, MIN_HELD_OUT)
            choices.append(search.choose(index, given.tolerance, trial))
            spare += exact_cost - cost_of(choices[-1].work, wide.problem)
    groups = groups_of(wide, choices, range(given.num_heads), diagonal=True)
    exact = [head for head, choice in enumerate(choices) if choice.level < 0]
    if exact:
        groups.append((exact, given.exact(exact)))
    return Answer(join_heads(given, groups), [record_of(choice) for choice in choices])


def record_of(choice: Choice) -> HeadRecord:
    """Return the record of one head; of the most exact clusters if it is exact."""
    error, bound = (float(x[choice.level]) for x in choice.trial.curve[:2])
    return HeadRecord(choice.num_features, choice.num_exact, error, bound, choice.work)


def groups_of(
    given: Given, choices: Sequence[Choice], wanted: Sequence[int], **options: Any
) -> list[tuple[Sequence[int], Any]]:
    """Attend to heads that are not exact; return groups of heads alike, and their outputs."""
    groups = defaultdict(list)
    for head in wanted:
        choice = choices[head]
        if choice.level >= 0:
            groups[choice.num_features, choice.num_exact].append(head)
    parts: list[tuple[Sequence[int], Any]] = []
    for way, heads in groups.items():
        clusters = [choices[head].trial.clusters for head in heads]
        parts.append((heads, _attend_by(given, clusters, heads, *way, **options)))
    return parts


def _attend_by(
    given: Given,
    clusters: Sequence[Clusters | None],
    chosen: Sequence[int],
    m: int,
    num_exact: int,
    *,
    diagonal: bool = False,
    return_log_normalizer: bool = False,
) -> Any:
    """Attend to some heads with the clusters that they were judged with."""
    heads = given.flat_heads(chosen)
    phi, assigned = _map_and_keys(given.problem, given.scale, clusters, m)
    diagonal = diagonal and given.problem.query.shape[-2] == given.problem.key.shape[-2]
    options: Any = {"want_log": return_log_normalizer}
    if num_exact:
        options |= {"key_mask": heads.key_mask, "exact_clusters": num_exact}
        problem = linear_problem(heads.query, heads.key, heads.value, phi, **options)
        exact = problem.exact._replace(assigned=assigned._replace(diagonal=diagonal))
        problem = problem.replace(exact=exact)
    else:
        none = heads.key[..., :0, :], heads.value[..., :0, :]
        problem = linear_problem(heads.query, *none, phi, **options).replace(state=assigned.state)
    output, _, log = forward.solve(problem, return_state=False)
    return (output, log) if return_log_normalizer else output


def _map_and_keys(
    problem: Problem, scale: float, heads: Sequence[Clusters | None], m: int
) -> tuple[LandmarkFeatures, AssignedKeys]:
    """Stack the clusters of some heads: a map of queries, and the keys in the problem's library."""
    (S, d), e = problem.key.shape[-2:], problem.value.shape[-1]
    of_key, centre = np.full((len(heads), S), m), np.zeros((len(heads), m, d))
    log_scale, bias = np.full((2, len(heads), m), -np.inf)
    kvz = np.zeros((len(heads), m, e + 1))
    for i, x in enumerate(heads):
        if x is not None:
            C = len(x.starts)
            of_key[i, x.positions], centre[i, :C] = x.of_key, x.centre / scale
            log_scale[i, :C], bias[i, :C], kvz[i, :C] = x.log_scale, x.bias, x.sums
    # A map of queries alone: its probes would weigh keys.
    probe = np.zeros((1, d))
    used = log_scale > -np.inf
    used[:, 0] |= ~used.any(axis=-1)
    phi = LandmarkFeatures(centre, probe, np.zeros(1), np.eye(d), used=used, scale=scale)
    device = array_api_compat.device(problem.key)
    bias, kvz, log_scale = (
        device_array(x, problem.xp, problem.dtype, device) for x in (bias, kvz, log_scale)
    )
    return phi, AssignedKeys(of_key, bias, State(kvz, log_scale, S))
