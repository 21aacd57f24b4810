"""Inputs of the landmark fit: samples of tokens, and normalizers of probe queries.

Small arrays (samples, landmarks, probes) are NumPy on the host, so that every array library gets
the same answer. The whole sequence of keys is read block by block in its own library.
Letters: ``C`` sampled tokens, ``m`` landmarks, ``p`` probes, ``d`` dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _dispatch, _numerics
from linattn._driver.blocks import block_slices, raw_tokens
from linattn._driver.pairs import Pairs, biased_keys, biased_queries, join
from linattn._driver.problem import exact_problem
from linattn._driver.weights import mask_and_bias
from linattn.feature_maps._clusters import centroids
from linattn.feature_maps._dask_rows import compute_rows
from linattn.typing import Array, Tokens, Weights
from linattn.typing._shifts import constant

Floats = NDArray[np.float64]
Rows = NDArray[Any]

# Logits worked on at once, of all heads, for the cache; and keys, for few calls.
MAX_BLOCK_ELEMENTS, MIN_BLOCK_ROWS = 1 << 18, 128

MIN_SAMPLED = 1024
"""Tokens in a sample, or 16 for each landmark; shorter sequences are taken whole."""


class Inputs(NamedTuple):
    """Checked arguments of a fit; masks and biases are ``(..., n, 1)``."""

    xp: ModuleType
    dtype: Any
    scale: float
    query: Array
    key: Array
    query_mask: Array | None
    key_mask: Array | None
    key_bias: Array | None


def is_concrete(array: Array) -> bool:
    """Whether an array's values can be read: not for traced arrays, nor for lazy Dask arrays."""
    if array_api_compat.is_dask_array(array):
        return False
    try:
        # An array of ndonnx without values becomes an object of no axes.
        return bool(_arrays.to_numpy(array[..., :0]).ndim == array.ndim)
    except Exception:
        return False


def strata(n: int, noise: Floats) -> NDArray[np.intp]:
    """Position of one of n tokens in each of equal strata, or of all where there are fewer."""
    if n <= len(noise):
        return np.arange(n)
    positions = (np.arange(len(noise)) + noise) * (n / len(noise))
    return np.minimum(positions.astype(np.intp), n - 1)


def draw_heads(
    given: Inputs, key_strata: Floats, query_strata: Floats
) -> tuple[tuple[int, ...], dict[tuple[int, ...], tuple[Rows, Rows, Rows]]]:
    """Leading axes, and samples of each head: queries, keys and log weights of keys.

    One token from each stratum of those that a head sees, in the accumulation dtype; one at the
    origin where there is none, with log weight -inf. O(C d) memory beyond what a mask needs.
    """
    lead, heads = np.broadcast_shapes(given.query.shape[:-2], given.key.shape[:-2]), {}
    wide = [
        None if x is None else given.xp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in given[3:]
    ]
    for head in np.ndindex(lead):
        query, key, query_mask, key_mask, bias = (
            None if x is None else x[(*head, ...)] for x in wide
        )
        rows = _positions(query, query_mask, query_strata)
        of_keys = _positions(key, key_mask, key_strata)
        x, y = _take(given, query, rows), _take(given, key, of_keys)
        log = np.full(len(y), 0.0 if len(of_keys) else -np.inf, y.dtype)
        if bias is not None and len(of_keys):
            log = _take(given, bias, of_keys)[:, 0]
        heads[head] = x, y, log
    return lead, heads


def _positions(x: Any, mask: Array | None, noise: Floats) -> NDArray[np.intp]:
    if mask is None:
        return strata(int(x.shape[0]), noise)
    seen = np.flatnonzero(_arrays.to_numpy(mask))
    return seen[strata(len(seen), noise)]


def _take(given: Inputs, x: Array, positions: NDArray[np.intp]) -> NDArray[Any]:
    dtype = np.float64 if given.dtype == given.xp.float64 else np.float32
    if not len(positions):
        return np.zeros((1, x.shape[-1]), dtype)
    where = given.xp.asarray(positions, device=array_api_compat.device(x))
    taken = _arrays.to_numpy(given.xp.take(x, where, axis=0)).astype(dtype, copy=False)
    _check_finite(np.isfinite(taken).all())
    return taken


def _check_finite(finite: Any) -> None:
    if not finite:
        raise ValueError(
            "query and key must be finite where they are not masked, and their logits too, got "
            "NaN or inf"
        )


def stacked(
    heads: Sequence[NDArray[Any]], lead: tuple[int, ...], width: int
) -> tuple[Floats, NDArray[np.bool_]]:
    """Stack matrices of at most ``width`` rows, filled up with 0; also which rows they have."""
    whole = np.zeros((len(heads), width, heads[0].shape[-1]))
    for place, rows in zip(whole, heads, strict=True):
        place[: len(rows)] = rows
    used = np.arange(width) < np.array([len(rows) for rows in heads])[:, None]
    return whole.reshape(*lead, width, -1), used.reshape(*lead, width)


def query_metric(query: NDArray[Any]) -> Floats:
    """Covariance of queries, ``(d, d)``, of mean variance 1, and 1e-6 of the identity.

    ``(k - k') . (metric (k - k'))`` is, up to a factor, the variance over queries of the difference
    of two keys' logits. Clusters do not depend on the factor, and without it no scale of queries
    leaves the range of float32.
    """
    x = query.astype(np.float64)
    x -= x.mean(axis=0)
    covariance, d = x.T @ x, x.shape[-1]
    return np.asarray(covariance / (np.trace(covariance) / d or 1.0) + 1e-6 * np.eye(d))


def fit_landmarks(
    given: Inputs, m: int, p: int, steps: int, generator: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Find the arrays that a map of m landmarks and p probes is made of."""
    size = max(16 * m, MIN_SAMPLED)
    # As many numbers for every length, so that padding changes none of them.
    key_strata, query_strata, query_order = generator.random((3, max(size, p)))
    gumbel = generator.gumbel(size=size)
    given = compute_rows(given, max(size, p), generator)
    with _numerics.ignore_fp_warnings(), _dispatch.limited_threads():
        lead, heads = draw_heads(given, key_strata[:size], query_strata)
        chosen = [x[strata(len(x), query_order[:p])] for x, *_ in heads.values()]
        probes, counts = stacked(chosen, lead, max(map(len, chosen)))
        weights = Weights(given.key_mask, given.key_bias)
        lognorm = log_normalizers(given.scale * probes, given.key, given.dtype, weights)
        _check_finite((lognorm < np.inf).all())
        # A head that sees no key: its landmarks are all unused, and any normalizer will do.
        lognorm = np.where(counts, np.where(lognorm == -np.inf, 0.0, lognorm), np.inf)
        metric, found = np.empty((*lead, *probes.shape[-1:] * 2)), []
        for head, (query, key, log_weight) in heads.items():
            # Sums of the squared attention of probes to each key.
            A = (2 * given.scale * probes[head]).astype(key.dtype) @ key.T
            A -= (2 * lognorm[head][:, None] - 2 * log_weight.astype(np.float64)).astype(key.dtype)
            sums = np.exp(A, out=A).sum(axis=0)
            metric[head] = query_metric(query)
            seen = key[log_weight > -np.inf]
            found.append(centroids(seen, sums, metric[head], gumbel, m, steps=steps))
    landmarks, used = stacked(found, lead, m)
    arrays = {"landmarks": landmarks, "probes": probes, "log_normalizers": lognorm}
    return arrays | {"metric": metric, "used": used}


def log_normalizers(probes: Floats, key: Array, dtype: Any, weights: Weights) -> Floats:
    """``log sum_j exp(probe.k_j + bias_j)`` over visible keys, ``(..., p)``; -inf if there is none.

    Softmax attention without values. O(S p d) time, memory that does not grow with S.
    """
    problem = exact_problem(key, key, key, scale=1.0, is_causal=False, key_mask=None)
    problem, xp = problem.replace(dtype=dtype, weights=weights), problem.xp
    x = _arrays.device_array(probes, xp, dtype, array_api_compat.device(key))
    spec, rows = biased_queries(problem, problem.query_spec, Tokens(x, None, 0))
    lead = np.broadcast_shapes(probes.shape[:-2], problem.state_lead)
    size = max(MIN_BLOCK_ROWS, MAX_BLOCK_ELEMENTS // max(1, prod(lead) * probes.shape[-2]))
    blocks = block_slices(int(key.shape[-2]), size)
    keys = (biased_keys(problem, raw_tokens(problem, "key", block, 0)) for block in blocks)
    sources = (Pairs(spec, tokens, xp.ones_like(tokens.x[..., :1])) for tokens in keys)
    part = join(problem, _dispatch.BlockFunctions(xp), rows, sources)
    assert part is not None
    return _arrays.to_numpy(part.log + xp.log(part.num_den))[..., 0].astype(np.float64)


def take_inputs(
    query: Any, key: Any, key_mask: Any, query_mask: Any, scale: Any, key_bias: Any = None
) -> Inputs:
    """Check the arguments of a fit; arrays of Dask stay lazy."""
    xp, (query, key) = _checks.check_arrays(query=query, key=key)
    if query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape:
        raise ValueError(
            f"query and key must have one dim and at least one token, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), key=tuple(key.shape[:-2]))
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    dtype = _arrays.accumulation_dtype(xp, query.dtype, None)
    key_mask, key_bias = mask_and_bias(
        xp, key, dtype, key_mask, key_bias, query_len=query.shape[-2]
    )
    if query_mask is not None:
        query_mask = _checks.check_key_mask(query_mask, query, xp, query_len=None, of="query")
    given = {"query": query, "key": key, "query_mask": query_mask}
    given |= {"key_mask": key_mask, "key_bias": key_bias}
    for name, x in given.items():
        if not (x is None or array_api_compat.is_dask_array(x) or is_concrete(x)):
            raise TypeError(
                f"{name} must have values to fit to, got a traced {type(x).__name__}; fit "
                f"outside of the traced function and use the map inside"
            )
    arrays = {name: None if x is None else constant(x) for name, x in given.items()}
    return Inputs(xp, dtype, scale, **arrays)


def log_sum(x: Floats, axis: int) -> Floats:
    """Log of the sum of exponentials along an axis, which stays."""
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    terms = x - top
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.sum(np.exp(terms, out=terms), axis=axis, keepdims=True)) + top)
