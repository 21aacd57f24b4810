"""Full attention of Dask arrays by landmarks: fitted to a sample of rows, judged on all keys.

What is computed is a sample of rows, and in one pass over keys and values for each number of
landmarks that is tried the states of these, in the first also the exact rows of held-out queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn._driver.exact_problem import exact_problem
from linattn.automatic._costs import num_rows_of, window_of
from linattn.automatic._curves import ErrorCurve, Landmarks
from linattn.automatic._dask_heads import Box, boxes_of, join_boxes, lead_chunks
from linattn.automatic._full import MAX_FITS, Search, is_worth_a_search, some_heads
from linattn.automatic._heads import Given, Heads
from linattn.automatic._report import Answer
from linattn.automatic._search import PROBABILITY, Found, choose_landmarks
from linattn.automatic._tokens import Head, HostTokens, query_mask_of
from linattn.feature_maps import LandmarkFeatures
from linattn.feature_maps._dask_rows import compute, compute_on_host, draw_runs, take_runs
from linattn.functional import linear_attention, softmax_attention
from linattn.state import init_state, read_state, update_state
from linattn.typing import Array, Problem, State

__all__ = ["attend", "is_worth_a_search"]

Floats = NDArray[np.float64]


def attend(given: Given) -> Answer:
    """Attention by landmarks where that is cheap and near, exact elsewhere."""
    problem = given.problem
    # What is wrong with chunks is said before anything is computed.
    softmax_attention(problem.query[..., :1, :], problem.key, problem.value)
    rows = sample_rows(given)
    search = DaskSearch(given, rows)
    found = choose_landmarks(
        problem, given.num_heads, given.tolerance, rows.num_held_out, search.try_landmarks
    )
    return Answer(search.output(found), search.of_sample.records(found))


class Rows(NamedTuple):
    """Rows of a call, on the host.

    Attributes
    ----------
    given : Given
        The call with these rows alone.
    query_mask : boolean array or None
        Queries of them that count.
    of_query, of_key : ndarray of int
        Where they are in the sequences; the windows of these queries are among these keys.
    num_held_out : int
        Queries of each head to judge by.
    """

    given: Given
    query_mask: NDArray[np.bool_] | None
    of_query: NDArray[np.intp]
    of_key: NDArray[np.intp]
    num_held_out: int


def sample_rows(given: Given) -> Rows:
    """Compute a sample of rows: the same ones whatever the chunks."""
    problem, generator = given.problem, given.generator
    mask = query_mask_of(problem, given.key_mask)
    mask = None if mask is None else problem.xp.asarray(mask)[..., None]
    of_query = draw_runs(problem.query, mask, 0, generator)
    if problem.query.shape[-2] == problem.key.shape[-2]:
        of_key = _with_windows(of_query, window_of(problem), problem.key.shape[-2])
    else:
        of_key = draw_runs(problem.key, problem.key_mask, 0, generator)
    query, mask, key, value, key_mask, key_bias = compute_on_host(
        None if x is None else take_runs(x, runs)
        for x, runs in (
            (problem.query, of_query),
            (mask, of_query),
            (problem.key, of_key),
            (problem.value, of_key),
            (problem.key_mask, of_key),
            (problem.key_bias, of_key),
        )
    )
    key_mask, key_bias = (None if x is None else x[..., 0] for x in (key_mask, key_bias))
    sampled = exact_problem(
        query, key, value, scale=given.scale, key_mask=key_mask, key_bias=key_bias
    )
    return Rows(
        given._replace(problem=sampled, key_mask=key_mask, key_bias=key_bias),
        None if mask is None else mask[..., 0],
        _positions(of_query, problem.query.shape[-2]),
        _positions(of_key, problem.key.shape[-2]),
        num_rows_of(problem),
    )


def _with_windows(runs: list[slice], window: int, length: int) -> list[slice]:
    """Add to runs of queries the keys that their exact windows hold."""
    if runs == [slice(None)]:
        return runs
    joined: list[slice] = []
    for run in runs:
        start = max(0, (run.start // window - 1) * window)
        stop = min(length, (-(-run.stop // window) + 1) * window)
        if joined and start <= joined[-1].stop:
            start = joined.pop().start
        joined.append(slice(start, stop))
    return joined


def _positions(runs: list[slice], length: int) -> NDArray[np.intp]:
    return np.concatenate([np.arange(length)[run] for run in runs])


class Sums(NamedTuple):
    """Outputs of rows, (..., h, e), and the logs of their denominators, (..., h)."""

    output: Floats
    log: Floats

    @classmethod
    def on_host(cls, output: Array, log: Array) -> Self:
        """Take arrays of any library."""
        return cls(*(_arrays.to_numpy(x).astype(np.float64) for x in (output, log)))


class DaskSearch:
    """Fits of one call, and the states of all keys that they were judged by."""

    def __init__(self, given: Given, rows: Rows) -> None:
        tokens = HostTokens(rows.given.problem, rows.query_mask, rows.num_held_out, given.generator)
        self.given = given
        self.of_sample = Search(rows.given, tokens)
        self._boxes = boxes_of(given.problem)
        self._window = window_of(given.problem) if _has_whole_windows(given.problem) else 0
        self._heads = [_in_place(tokens.head(index), rows, given.problem) for index in tokens]
        self._states: list[State] = []
        self._exact: Sums | None = None

    def try_landmarks(
        self, m: int, chosen: Sequence[int]
    ) -> tuple[LandmarkFeatures, list[ErrorCurve]]:
        """Fit m landmarks to some heads, and judge them by a pass over all keys."""
        lead = self.given.problem.lead if len(chosen) == self.given.num_heads else ()
        phi = some_heads(self.of_sample.fit(m, chosen), lead, range(len(chosen)))
        state, exact = self._pass_over_keys(phi, chosen)
        self._states.append(state)
        sums = _read(self._held_out(chosen), state, phi)
        curves = []
        for i, head in enumerate(chosen):
            tokens = self._heads[head]
            rows = slice(len(tokens.query))
            part = Sums(sums.output[i, rows], sums.log[i, rows])
            ways = [part.output]
            if self._window:
                landmarks = Landmarks.of(phi, (len(chosen),), (i,), tokens.query.dtype)
                ways.append(_with_window(part, tokens, landmarks, self.given.scale, self._window))
            # Without a key all outputs are 0, and there may be no row to show it.
            sees_keys = bool(exact.log[head, 0] > -np.inf)
            curves.append(_curve(tokens, np.stack(ways), exact.output[head, rows], sees_keys))
        return phi, curves

    def _held_out(self, chosen: Sequence[int]) -> NDArray[Any]:
        """Return queries to judge by, and zeros where a head has fewer than others."""
        queries = [self._heads[head].query for head in chosen]
        shape = len(queries), max(1, *map(len, queries)), queries[0].shape[-1]
        held_out = np.zeros(shape, queries[0].dtype)
        for rows, query in zip(held_out, queries, strict=True):
            rows[: len(query)] = query
        return held_out

    def _groups(self, chosen: Sequence[int]) -> list[tuple[Box, list[int]]]:
        groups = [(box, [head for head in box.heads if head in chosen]) for box in self._boxes]
        return [(box, heads) for box, heads in groups if heads]

    def _pass_over_keys(self, phi: LandmarkFeatures, chosen: Sequence[int]) -> tuple[State, Sums]:
        """Compute the states of some heads, and the exact rows of all if they are not known."""
        lazy: list[Array] = []
        groups = self._groups(chosen)
        for box, heads in groups:
            _, key, value, mask, bias = box.taken(self.given, heads)
            of_heads = some_heads(phi, (), [chosen.index(head) for head in heads])
            nothing = init_state(of_heads, value.shape[-1], batch_shape=(len(heads),), like=key)
            state = update_state(nothing, key, value, of_heads, key_mask=mask, key_bias=bias)
            lazy += [state.kvz, state.log_scale]
        if self._exact is None:
            *fields, exact, log = compute([*lazy, *self._exact_rows()])
            flat = (-1, *exact.shape[-2:])
            self._exact = Sums.on_host(exact.reshape(flat), log.reshape(flat[:-1]))
        else:
            fields = compute(lazy)
        xp = array_api_compat.array_namespace(fields[0])
        order = np.argsort([chosen.index(head) for _, heads in groups for head in heads])
        kvz, log_scale = (_take(xp.concat(f, axis=0), order) for f in (fields[::2], fields[1::2]))
        state = State(kvz, log_scale, self.given.problem.key.shape[-2])
        return state, self._exact

    def _exact_rows(self) -> Any:
        """Attend exactly with the held-out queries of all heads, lazily."""
        problem = self.given.problem
        rows = self._held_out(range(self.given.num_heads)).astype(problem.query.dtype)
        rows = problem.xp.asarray(rows.reshape(*problem.lead, *rows.shape[-2:]))
        return softmax_attention(
            rows.rechunk((*lead_chunks(problem), -1, -1)),
            problem.key,
            problem.value,
            key_mask=None if problem.key_mask is None else problem.key_mask[..., 0],
            key_bias=None if problem.key_bias is None else problem.key_bias[..., 0],
            scale=self.given.scale,
            return_log_normalizer=True,
        )

    def output(self, found: Found) -> Array:
        """Attend lazily to each head as was chosen for it."""
        all_heads = range(self.given.num_heads)
        if all(choice.trial < 0 for choice in found.choices):
            return self.given.exact(all_heads)
        outputs = []
        for box, heads in self._groups(all_heads):
            ways = defaultdict(list)
            for head in heads:
                ways[found.choices[head].trial, found.choices[head].window].append(head)
            parts = [
                (chosen, self._attend(found, i, window, box.taken(self.given, chosen), chosen))
                for (i, window), chosen in ways.items()
            ]
            outputs.append(box.joined(parts))
        return join_boxes(self.given.problem, outputs)

    def _attend(
        self, found: Found, i: int, window: int, heads: Heads, chosen: Sequence[int]
    ) -> Array:
        """Attend to some heads by the fit of one trial, or exactly."""
        query, key, value, mask, bias = heads
        if i < 0:
            scale = self.given.scale
            return softmax_attention(query, key, value, key_mask=mask, key_bias=bias, scale=scale)
        trial = found.trials[i]
        places = [trial.heads.index(head) for head in chosen]
        phi = some_heads(trial.fit, (), places)
        if window:
            weights: Any = {"key_mask": mask, "key_bias": bias}
            return linear_attention(query, key, value, phi, **weights, exact_window=window)
        state = self._states[i]
        kvz, log_scale = (
            self.given.problem.xp.asarray(_take(field, places))
            for field in (state.kvz, state.log_scale)
        )
        return read_state(query, State(kvz, log_scale, state.length), phi)


def _has_whole_windows(problem: Problem) -> bool:
    """Whether an exact window goes by blocks in these chunks."""
    rows, window = problem.key.chunks[-2], window_of(problem)
    if not window or problem.query.chunks[-2] != rows or (len(rows) > 1 and 0 in rows):
        return False
    return not any(n % window for n in rows[:-1])


def _in_place(tokens: Head, rows: Rows, problem: Problem) -> Head:
    """Return sampled tokens of a head with their positions in the sequences."""
    return tokens._replace(
        rows=rows.of_query[tokens.rows],
        positions=rows.of_key[tokens.positions],
        all_rows=tokens.all_rows and len(rows.of_query) == problem.query.shape[-2],
    )


def _take(x: Array, places: Any) -> Array:
    xp = array_api_compat.array_namespace(x)
    return xp.take(x, xp.asarray(places, device=array_api_compat.device(x)), axis=0)


def _read(query: NDArray[Any], state: State, phi: LandmarkFeatures) -> Sums:
    """Read states of all keys on the host."""
    kvz, log_scale = (_arrays.to_numpy(x) for x in (state.kvz, state.log_scale))
    query = query.astype(kvz.dtype)
    heads, e = len(query), kvz.shape[-1] - 1
    output, log = linear_attention(
        query,
        np.empty((heads, 0, query.shape[-1]), query.dtype),
        np.empty((heads, 0, e), query.dtype),
        phi,
        initial_state=State(kvz, log_scale, state.length),
        return_log_normalizer=True,
    )
    return Sums.on_host(output, log)


def _with_window(
    part: Sums, tokens: Head, landmarks: Landmarks, scale: float, window: int
) -> Floats:
    """Put near keys' exact weights into the place of their landmarks'."""
    if not len(tokens.key):
        return part.output
    near = (tokens.rows // window - 1)[:, None] * window + np.arange(3 * window)
    found = np.minimum(np.searchsorted(tokens.positions, near), len(tokens.positions) - 1)
    index, log = landmarks.assign(tokens.key)
    query = tokens.query.astype(np.float64)[..., None]
    exact = scale * (tokens.key[found] @ query)[..., 0]
    by_landmark = (landmarks.b[index[found]] @ query)[..., 0] + log[found]
    if tokens.key_bias is not None:
        exact, by_landmark = (x + tokens.key_bias[found] for x in (exact, by_landmark))
    shift = np.maximum(part.log, exact.max(axis=-1))
    gained, replaced = (np.exp(x - shift[:, None]) for x in (exact, by_landmark))
    gained = np.where(tokens.positions[found] == near, gained - replaced, 0)
    sums = (gained[:, None, :] @ tokens.values_and_one[found])[:, 0]
    whole = np.exp(part.log - shift)
    numerator = whole[:, None] * part.output + sums[:, :-1]
    return np.asarray(numerator / (whole + sums[:, -1])[:, None])


def _curve(tokens: Head, outputs: Floats, exact: Floats, sees_keys: bool) -> ErrorCurve:
    """Errors of the ways to attend to a head, none of which has exact clusters."""
    if not sees_keys:
        return ErrorCurve(np.zeros((len(outputs), 1)), np.zeros((len(outputs), 1)), np.zeros(1))
    squares, units = np.sum((outputs - exact) ** 2, axis=-1), np.sum(exact**2, axis=-1)
    probability = 1 - (1 - PROBABILITY) / (MAX_FITS * len(outputs))
    error, bound = tokens.error_and_bound(squares, units, probability)
    return ErrorCurve(error[:, None], bound[:, None], np.zeros(1))
