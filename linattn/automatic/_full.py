"""Full attention with landmarks: each head gets the number that it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import array_api_compat
import numpy as np

from linattn._arrays import device_array
from linattn._driver import forward
from linattn._driver.clusters import AssignedKeys
from linattn._driver.problem import linear_problem
from linattn.automatic._costs import (
    PROBES,
    choice_rows_of,
    first_features,
    may_be_in_vain,
    num_rows_of,
    window_of,
)
from linattn.automatic._curves import (
    Clusters,
    ErrorCurve,
    KeyClusters,
    Landmarks,
    clusters_and_missing,
    error_curve,
)
from linattn.automatic._heads import Given, Heads, join_heads
from linattn.automatic._order import CHOICE_ROWS, MIN_ORDERED
from linattn.automatic._report import Answer, HeadRecord
from linattn.automatic._search import (
    LEVELS,
    PROBABILITY,
    Found,
    choose_landmarks,
    largest_trial,
    rows_wanted,
)
from linattn.automatic._tokens import HostTokens, TokensOfHeads, query_mask_of
from linattn.feature_maps import LandmarkFeatures
from linattn.feature_maps._landmark_fit import take_inputs
from linattn.functional import linear_attention
from linattn.typing import Array, Problem, State

__all__ = ["MAX_FITS", "Search", "attend", "is_worth_a_search", "some_heads"]

MAX_FITS = 2
"""Trials of a head, which share the probability to fail: with a window, two without it."""


def is_worth_a_search(given: Given) -> bool:
    """Whether landmarks may be tried; with a tolerance a useless trial must be cheap enough."""
    problem, num_rows = given.problem, num_rows_of(given.problem, given.tolerance)
    if not largest_trial(problem, given.tolerance, num_rows):
        return False
    if given.tolerance is None:
        return True
    return may_be_in_vain(problem, first_features(problem, given.tolerance))


def attend(given: Given) -> Answer:
    """Attend with landmarks if they are cheap and accurate enough, else exactly."""
    if given.tolerance is not None and given.problem.query.shape[-2] >= MIN_ORDERED:
        exact = given.problem.exact._replace(choice_rows=CHOICE_ROWS)
        given = given._replace(problem=given.problem.replace(exact=exact))
    num_rows = num_rows_of(given.problem, given.tolerance)
    mask = query_mask_of(given.problem, given.key_mask)
    tokens = HostTokens(given.problem, mask, num_rows, given.generator)
    search = Search(given, tokens, orders=tokens)
    found = choose_landmarks(
        given.problem,
        given.num_heads,
        given.tolerance,
        num_rows,
        search.try_landmarks,
        first=first_features(given.problem, given.tolerance),
    )
    return Answer(search.output(found), search.records(found))


class Search:
    """Fits of one call.

    Parameters
    ----------
    given : Given
        Arguments of full attention.
    tokens : TokensOfHeads
        Tokens and rows that judge the heads.
    parts : int
        Number of searches of one call, which share the probability to fail.
    earlier : Given or None
        Queries that landmarks are fitted to; None for the queries of ``given``.
    orders : HostTokens or None
        Gives the order in which queries choose clusters together; None if each chooses alone.
    """

    def __init__(
        self,
        given: Given,
        tokens: TokensOfHeads,
        *,
        parts: int = 1,
        earlier: Given | None = None,
        orders: HostTokens | None = None,
    ) -> None:
        self.given = given
        self.tokens = tokens
        self._orders = orders
        # With exact clusters a window is hardly ever worth the time to judge it.
        self.window = window_of(given.problem) if given.tolerance is None else 0
        self._fitted_to = given if earlier is None else earlier
        self._known: LandmarkFeatures | None = None
        self._probability = 1 - (1 - PROBABILITY) / (MAX_FITS * (2 if self.window else 1) * parts)

    def fit(self, m: int, chosen: Sequence[int]) -> LandmarkFeatures:
        """Fit m landmarks to some heads; for all heads leading axes are as in the call."""
        given, problem = self.given, self.given.problem
        heads = given.heads(chosen)
        all_heads = len(chosen) == given.num_heads
        fitted = self.tokens.fitted
        if not all_heads:
            fitted = np.broadcast_to(fitted, (*problem.lead, fitted.shape[-1]))
            fitted = fitted.reshape(given.num_heads, -1)[np.asarray(chosen)]
        inputs = take_inputs(
            self._fitted_to.heads(chosen).query,
            heads.key,
            heads.key_mask,
            problem.xp.asarray(fitted, device=array_api_compat.device(problem.query)),
            given.scale,
            heads.key_bias,
        )
        known = self._known
        if known is not None and not all_heads:
            known = some_heads(known, problem.lead, chosen)
        # A step more lowers errors by a twentieth and takes half as long as all the rest.
        options: Any = {"lloyd_steps": 1, "by_distance": True, "known": known}
        phi = LandmarkFeatures._fit(inputs, m, PROBES, given.generator, **options)
        if known is None:
            self._known = phi
        return phi

    def try_landmarks(
        self, m: int, chosen: Sequence[int]
    ) -> tuple[LandmarkFeatures, list[ErrorCurve]]:
        """Fit m landmarks to some heads, and judge them."""
        given, phi = self.given, self.fit(m, chosen)
        lead = given.problem.lead if len(chosen) == given.num_heads else (len(chosen),)
        curves: list[ErrorCurve] = []
        wanted = self._wanted(m)
        for head, index in zip(chosen, np.ndindex(lead), strict=True):
            whole = given.unravel(head)
            dtype = np.float64 if given.problem.dtype == given.problem.xp.float64 else np.float32
            landmarks = Landmarks.of(phi, lead, index, dtype)
            clusters = self._drawn_clusters(whole, landmarks)
            tokens = self.tokens.head(whole)
            if self._orders is not None and choice_rows_of(given.problem, m) > 1:
                choosers = self._orders.choosers(given.unravel(head), tokens.rows)
                tokens = tokens._replace(choosers=choosers)
            curve = error_curve(
                tokens,
                landmarks,
                scale=given.scale,
                levels=tuple(count for count in LEVELS if 2 * count <= m),
                exact_window=self.window or None,
                probability=self._probability,
                rows_wanted=wanted,
                clusters=clusters,
            )
            curves.append(curve)
        return phi, curves

    def _drawn_clusters(self, index: tuple[int, ...], landmarks: Landmarks) -> Clusters | None:
        """Draw the rows of a head by the first landmarks; return the clusters used for it."""
        tokens, scale = self._orders, self.given.scale
        if tokens is None or tokens.is_drawn(index):
            return None
        own_logits = tokens.own_logits(index, scale)
        if own_logits is None:
            return None
        keys = tokens.keys(index)
        clusters, missing = clusters_and_missing(
            keys, landmarks, scale, tokens.query(index), own_logits
        )
        tokens.draw(index, missing)
        return clusters

    def _wanted(self, m: int) -> Callable[[ErrorCurve], int] | None:
        """Return the number of rows that judge a head; None for all rows."""
        problem, tolerance = self.given.problem, self.given.tolerance
        if tolerance is None or self._fitted_to is not self.given:
            return None
        most, num_rows = m, num_rows_of(problem, tolerance)
        if m == first_features(problem, tolerance):
            most = largest_trial(problem, tolerance, num_rows)
        return partial(rows_wanted, problem, (m, most), tolerance, num_rows)

    def output(self, found: Found) -> Array:
        """Attend to each head with the method chosen for it."""
        return join_heads(self.given, self.groups(found, range(self.given.num_heads)))

    def groups(
        self, found: Found, wanted: Sequence[int], **options: Any
    ) -> list[tuple[Sequence[int], Any]]:
        """Attend to some heads; yield groups of heads with one choice, and their outputs.

        ``options`` are keyword arguments that linear and exact attention share.
        """
        given = self.given
        groups = defaultdict(list)
        for head in wanted:
            choice = found.choices[head]
            groups[choice.trial, choice.clusters, choice.window].append(head)
        parts: list[tuple[Sequence[int], Any]] = []
        for (i, clusters, window), chosen in groups.items():
            if i < 0:
                parts.append((chosen, given.exact(chosen, **options)))
                continue
            trial = found.trials[i]
            places = [trial.heads.index(head) for head in chosen]
            lead = given.problem.lead if len(trial.heads) == given.num_heads else ()
            keys = [x for x in (trial.curves[place].keys for place in places) if x is not None]
            phi = trial.fit
            at_hand = not window and len(keys) == len(chosen)
            if len(chosen) < len(trial.heads) or (at_hand and len(lead) > 1):
                phi = some_heads(phi, lead, places)
            if at_hand:
                part = self._attend_by(keys, phi, chosen, clusters, **options)
            else:
                heads = given.heads(chosen)
                part = linear_attention(
                    heads.query,
                    heads.key,
                    heads.value,
                    phi,
                    key_mask=heads.key_mask,
                    key_bias=heads.key_bias,
                    exact_window=window or None,
                    exact_clusters=clusters or None,
                    **options,
                )
            parts.append((chosen, part))
        return parts

    def _attend_by(
        self,
        keys: Sequence[KeyClusters],
        phi: LandmarkFeatures,
        chosen: Sequence[int],
        clusters: int,
        *,
        return_log_normalizer: bool = False,
    ) -> Any:
        """Attend to some heads with the same clusters that they were judged with."""
        given, heads = self.given, self.given.flat_heads(chosen)
        assigned = _assigned_keys(given.problem, keys)
        options: Any = {"want_log": return_log_normalizer}
        if not clusters:
            none = heads.key[..., :0, :], heads.value[..., :0, :]
            problem = linear_problem(heads.query, *none, phi, **options)
            output, _, log = forward.solve(
                problem.replace(state=assigned.state), return_state=False
            )
            return (output, log) if return_log_normalizer else output
        heads, phi = _with_bias_in_keys(given.problem, heads, phi)
        rows, query, orders = choice_rows_of(given.problem, phi.num_features), heads.query, None
        if self._orders is not None and rows > 1:
            orders = np.stack([self._orders.order(given.unravel(head)) for head in chosen])
            query = given.rows_at(query, orders)
        options |= {"key_mask": heads.key_mask, "exact_clusters": clusters}
        problem = linear_problem(query, heads.key, heads.value, phi, **options)
        exact = problem.exact._replace(assigned=assigned, choice_rows=rows)
        problem = problem.replace(exact=exact)
        output, _, log = forward.solve(problem, return_state=False)
        if orders is not None:
            places = np.empty((len(chosen), heads.query.shape[-2]), np.intp)
            np.put_along_axis(places, orders, np.arange(orders.shape[-1])[None], axis=-1)
            output = given.rows_at(output, places)
        return (output, log) if return_log_normalizer else output

    def records(self, found: Found) -> list[HeadRecord]:
        """Return a record for each head."""
        records = []
        for head, (choice, work) in enumerate(zip(found.choices, found.work, strict=True)):
            if choice.trial >= 0:
                m = found.trials[choice.trial].num_features
                record = HeadRecord(
                    m, choice.clusters, choice.window, choice.error, choice.bound, work
                )
            else:
                last = next(trial for trial in reversed(found.trials) if head in trial.heads)
                curve = last.curves[last.heads.index(head)]
                error, bound = float(curve.error[-1, -1]), float(curve.bound[-1, -1])
                record = HeadRecord(0, 0, 0, error, bound, work)
            records.append(record)
        return records


def _with_bias_in_keys(
    problem: Problem, heads: Heads, phi: LandmarkFeatures
) -> tuple[Heads, LandmarkFeatures]:
    """Append the biases to the keys as a coordinate: blocks of backends take no bias.

    ``s q.k + b = s (q, 1).(k, b / s)``. Landmarks have 0 there: the state has the biases in it.
    """
    if heads.key_bias is None:
        return heads, phi
    xp, query, key = problem.xp, heads.query, heads.key
    bias = xp.broadcast_to(heads.key_bias, key.shape[:-1])[..., None]
    seen = xp.isfinite(bias)
    bias = xp.astype(xp.where(seen, bias, xp.zeros_like(bias)) / phi.scale, key.dtype)
    mask = seen[..., 0] if heads.key_mask is None else seen[..., 0] & heads.key_mask
    heads = heads._replace(
        query=xp.concat([query, xp.ones_like(query[..., :1])], axis=-1),
        key=xp.concat([key, bias], axis=-1),
        key_mask=mask,
        key_bias=None,
    )
    wide = [np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) for x in (phi.landmarks, phi.probes)]
    metric = np.pad(phi.metric, [(0, 0)] * (phi.metric.ndim - 2) + [(0, 1)] * 2)
    metric[..., -1, -1] = 1
    landmarks, probes = wide
    arrays: Any = {"used": phi.used, "scale": phi.scale}
    return heads, LandmarkFeatures(landmarks, probes, phi.log_normalizers, metric, **arrays)


def _assigned_keys(problem: Problem, heads: Sequence[KeyClusters]) -> AssignedKeys:
    """Stack the clusters of some heads, in the problem's library."""
    S, m = problem.key.shape[-2], len(heads[0].bias)
    of_key = np.full((len(heads), S), m)
    for indices, head in zip(of_key, heads, strict=True):
        indices[head.positions] = head.of_key
    device = array_api_compat.device(problem.key)
    bias, kvz, log_scale = (
        device_array(np.stack(arrays), problem.xp, problem.dtype, device)
        for arrays in zip(*((x.bias, x.kvz, x.log_scale) for x in heads), strict=True)
    )
    return AssignedKeys(of_key, bias, State(kvz, log_scale, S))


def some_heads(
    phi: LandmarkFeatures, lead: tuple[int, ...], chosen: Sequence[int]
) -> LandmarkFeatures:
    """Take the landmarks of some heads."""
    arrays = {}
    for name, axes in (
        ("landmarks", 2),
        ("probes", 2),
        ("log_normalizers", 1),
        ("metric", 2),
        ("used", 1),
    ):
        array = getattr(phi, name)
        trailing = array.shape[array.ndim - axes :]
        whole = np.broadcast_to(array, (*(lead or array.shape[: array.ndim - axes]), *trailing))
        arrays[name] = whole.reshape(-1, *trailing)[np.asarray(chosen)]
    return LandmarkFeatures(**arrays, scale=phi.scale)
