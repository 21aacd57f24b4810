"""Inputs of the landmark fit: samples of tokens, and normalizers of probe queries.

Small arrays (samples, landmarks, probes) are NumPy on the host, so that every array library gets
the same answer. The whole sequence of keys is read block by block in its own library.
Letters: ``C`` sampled tokens, ``m`` landmarks, ``p`` probes, ``d`` dim.
"""

from __future__ import annotations

from math import prod, sqrt
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _dispatch
from linattn._driver.blocks import block_slices, raw_tokens
from linattn._driver.pairs import biased_keys, biased_queries
from linattn._driver.problem import exact_problem
from linattn._driver.weights import mask_and_bias
from linattn.typing import Array, Tokens, Weights
from linattn.typing._shifts import constant

__all__ = [
    "Inputs",
    "Sample",
    "cycled",
    "draw_samples",
    "is_concrete",
    "log_normalizers",
    "log_sum",
    "probe_normalizers",
    "query_metric",
    "sample_size",
    "stratified_subset",
    "take_inputs",
]

Floats = NDArray[np.float64]

# Logits worked on at once, of all heads, for the cache; and keys, for few calls.
MAX_BLOCK_ELEMENTS, MIN_BLOCK_ROWS = 1 << 18, 128


class Sample(NamedTuple):
    """Tokens taken from a sequence; slots that a head has no token for hold 0.

    Attributes
    ----------
    x : ndarray, (..., C, d)
        The tokens, in the accumulation dtype.
    valid : ndarray of bool, (..., C)
        Slots that hold a token; leading axes like the mask, 1 or equal to the ones of x.
    log_weight : ndarray, (..., C), or None
        Log weights of tokens, 0 in slots that hold none; None where all are 0.
    """

    x: NDArray[Any]
    valid: NDArray[np.bool_]
    log_weight: NDArray[Any] | None = None


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


def _with_values(**named: Any) -> list[Any]:
    """Reject traced arrays, return Dask arrays unchanged, and detach the others from gradients.

    Raises
    ------
    TypeError
        An array has no values to inspect.
    """
    for name, array in named.items():
        if array is None or not _arrays.is_lazy(array) or array_api_compat.is_dask_array(array):
            continue
        if not is_concrete(array):
            message = (
                f"{name} must have values to fit to, got a traced {type(array).__name__}; fit "
                f"outside of the traced function and use the map inside"
            )
            raise TypeError(message)
    return [None if array is None else constant(array) for array in named.values()]


def is_concrete(array: Array) -> bool:
    """Whether an array's values can be read: not for traced arrays, nor for lazy Dask arrays."""
    if array_api_compat.is_dask_array(array):
        return False
    try:
        _arrays.to_numpy(array[..., :0])
    except Exception:
        return False
    return True


def sample_size(m: int) -> int:
    """Tokens that a sample holds at most; shorter sequences are taken whole."""
    return max(16 * m, 1024)


def draw_sample(x: Array, mask: Array | None, noise: Floats, xp: ModuleType) -> Sample:
    """Take all visible tokens, or one from each of ``len(noise)`` equal strata of them.

    Position ``(i + noise_i) n / C`` of n visible tokens: O(C) memory beyond what a mask needs.
    """
    visible = None if mask is None else _arrays.to_numpy(mask)[..., 0]
    lead = () if visible is None else visible.shape[:-1]
    rows = [_ranks(x, visible, index, noise) for index in np.ndindex(lead)]
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    width = max(1, int(counts.max(initial=0)))
    positions = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        positions[i, : len(row)] = row
    valid = (np.arange(width) < counts[:, None]).reshape(*lead, width)
    if len(rows) == 1:
        taken = _take(x, positions[0], xp)
    else:
        taken = np.empty((*x.shape[:-2], width, x.shape[-1]), _host_dtype(x, xp))
        for i, index in enumerate(np.ndindex(lead)):
            pairs = zip(index, lead, strict=True)
            # Strict libraries want an index for each axis, or an ellipsis.
            of_mask = (slice(None) if n == 1 else slice(j, j + 1) for j, n in pairs)
            heads: tuple[Any, ...] = (*of_mask, ...)
            taken[heads] = _take(x[heads], positions[i], xp)
    if not valid.all():
        taken = np.where(valid[..., None], taken, taken.dtype.type(0))
    return Sample(taken, valid)


def _host_dtype(x: Array, xp: ModuleType) -> Any:
    return np.float64 if x.dtype == xp.float64 else np.float32


def _ranks(
    x: Array, visible: NDArray[np.bool_] | None, index: tuple[int, ...], noise: Floats
) -> NDArray[np.int64]:
    among = None if visible is None else np.flatnonzero(visible[index])
    n = int(x.shape[-2]) if among is None else len(among)
    if n <= len(noise):
        return np.arange(n) if among is None else among
    strata = (np.arange(len(noise)) + noise) * (n / len(noise))
    ranks = np.minimum(strata.astype(np.int64), n - 1)
    return ranks if among is None else among[ranks]


def _take(x: Array, positions: NDArray[np.int64], xp: ModuleType) -> NDArray[Any]:
    where = xp.asarray(positions, device=array_api_compat.device(x))
    taken = _arrays.to_numpy(xp.take(x, where, axis=-2))
    return taken.astype(_host_dtype(x, xp), copy=False)


def stratified_subset(sample: Sample, num: int, noise: Floats) -> Sample:
    """Take one token from each of ``num`` equal strata of a sample, or all where there are fewer.

    A head without any token gets one at the origin: uniform attention.
    """
    lead = sample.valid.shape[:-1]
    count = np.sum(sample.valid, axis=-1, keepdims=True)
    num = min(num, sample.valid.shape[-1])
    # Tokens stand in the first slots of a head; one with fewer than num has one in each of these.
    chosen = np.floor((np.arange(num) + noise[:num]) * (count / num)).astype(np.int64)
    chosen = np.where(count > num, np.minimum(chosen, count - 1), np.arange(num))
    valid = np.take_along_axis(sample.valid, chosen, axis=-1)
    # A slot without a token holds 0: the origin.
    valid[..., 0] = True
    chosen = np.broadcast_to(chosen, (*sample.x.shape[:-2], chosen.shape[-1])) if lead else chosen
    if not lead:
        return Sample(sample.x[..., chosen, :], valid)
    return Sample(np.take_along_axis(sample.x, chosen[..., None], axis=-2), valid)


def query_metric(sample: Sample) -> Floats:
    """Covariance of queries, ``(..., d, d)``, of mean variance 1, and 1e-6 of the identity.

    ``(k - k') . (metric (k - k'))`` is, up to a factor, the variance over queries of the difference
    of two keys' logits. Clusters do not depend on the factor, and without it no scale of queries
    leaves the range of float32.
    """
    x = sample.x.astype(np.float64)
    d = x.shape[-1]
    count = np.maximum(np.sum(sample.valid, axis=-1), 1)[..., None, None]
    x -= np.sum(x, axis=-2, keepdims=True) / count
    if not sample.valid.all():
        x *= sample.valid[..., None]
    covariance = np.swapaxes(x, -1, -2) @ x
    mean = np.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / d
    return np.asarray(covariance / np.where(mean > 0, mean, 1.0) + 1e-6 * np.eye(d))


def log_normalizers(
    probes: Floats,
    key: Array,
    mask: Array | None,
    dtype: Any,
    xp: ModuleType,
    key_bias: Array | None = None,
) -> Floats:
    """``log sum_j exp(probe.k_j + bias_j)`` over visible keys, ``(..., p)``; -inf if there is none.

    Softmax attention to ones. O(S p d) time, memory that does not grow with S.
    """
    rows = Tokens(_arrays.device_array(probes, xp, dtype, array_api_compat.device(key)), None, 0)
    problem = exact_problem(key, key, key, scale=1.0, is_causal=False, key_mask=None)
    problem = problem.replace(dtype=dtype, weights=Weights(mask, key_bias))
    functions, part = _dispatch.BlockFunctions(xp), None
    spec, rows = biased_queries(problem, problem.query_spec, rows)
    width = prod(np.broadcast_shapes(probes.shape[:-2], problem.state_lead)) * probes.shape[-2]
    size = max(MIN_BLOCK_ROWS, MAX_BLOCK_ELEMENTS // max(1, width))
    for block in block_slices(int(key.shape[-2]), size):
        tokens = biased_keys(problem, raw_tokens(problem, "key", block, 0))
        ones = xp.ones_like(tokens.x[..., :1])
        if part is None:
            part = functions.exact_block(spec, rows, tokens, ones)
        else:
            part = functions.exact_more(spec, rows, tokens, ones, part)
    assert part is not None
    return _arrays.to_numpy(part.log + xp.log(part.num_den))[..., 0].astype(np.float64)


def take_inputs(
    query: Any, key: Any, key_mask: Any, query_mask: Any, scale: Any, key_bias: Any = None
) -> Inputs:
    """Check the arguments of a fit; arrays of Dask stay lazy."""
    xp, (query, key) = _checks.check_arrays(query=query, key=key)
    if query.shape[-1] != key.shape[-1] or 0 in query.shape or 0 in key.shape:
        message = (
            f"query and key must have one dim and at least one token, got shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
        raise ValueError(message)
    _checks.check_leading_axes(query=tuple(query.shape[:-2]), key=tuple(key.shape[:-2]))
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    dtype = _arrays.accumulation_dtype(xp, query.dtype, None)
    key_mask, key_bias = mask_and_bias(
        xp, key, dtype, key_mask, key_bias, query_len=query.shape[-2]
    )
    if query_mask is not None:
        query_mask = _checks.check_key_mask(query_mask, query, xp, query_len=None, of="query")
    query, key, query_mask, key_bias, key_mask = _with_values(
        query=query, key=key, query_mask=query_mask, key_bias=key_bias, key_mask=key_mask
    )
    return Inputs(xp, dtype, scale, query, key, query_mask, key_mask, key_bias)


def draw_samples(given: Inputs, key_strata: Floats, query_strata: Floats) -> tuple[Sample, Sample]:
    """Sample keys and queries, one from each stratum."""
    keys = draw_sample(given.key, given.key_mask, key_strata, given.xp)
    if given.key_bias is not None:
        bias = given.xp.broadcast_to(given.key_bias, (*given.key.shape[:-1], 1))
        drawn = draw_sample(bias, given.key_mask, key_strata, given.xp)
        keys = keys._replace(log_weight=drawn.x[..., 0])
    queries = draw_sample(given.query, given.query_mask, query_strata, given.xp)
    _check_finite(bool(np.isfinite(queries.x).all() and np.isfinite(keys.x).all()))
    return keys, queries


def probe_normalizers(given: Inputs, probes: Sample) -> Floats:
    """Log normalizers of probes over all keys; inf where a head has no such probe."""
    scaled = given.scale * probes.x
    lognorm = log_normalizers(
        scaled, given.key, given.key_mask, given.dtype, given.xp, given.key_bias
    )
    _check_finite(not (np.isnan(lognorm) | (lognorm == np.inf)).any())
    # A head that sees no key: its landmarks are all unused, and any normalizer will do.
    lognorm = np.where(lognorm == -np.inf, 0.0, lognorm)
    return np.where(probes.valid, lognorm, np.inf)


def _check_finite(finite: bool) -> None:
    if not finite:
        message = (
            "query and key must be finite where they are not masked, and their logits too, got "
            "NaN or inf"
        )
        raise ValueError(message)


def cycled(sample: Sample, num: int) -> Floats:
    """Repeat the tokens of a sample cyclically up to a given number."""
    counts = np.maximum(np.sum(sample.valid, axis=-1, keepdims=True), 1)
    index = np.broadcast_to(np.arange(num) % counts, (*sample.x.shape[:-2], num))
    return np.take_along_axis(sample.x, index[..., None], axis=-2)


def log_sum(x: Floats, axis: int) -> Floats:
    """Log of the sum of exponentials along an axis, which stays."""
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    terms = x - top
    return np.asarray(np.log(np.sum(np.exp(terms, out=terms), axis=axis, keepdims=True)) + top)
