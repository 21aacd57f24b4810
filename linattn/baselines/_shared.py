"""What the baselines share: checked inputs, softmax, attention to keys chosen on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, cast

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._numerics import finite_shift, ignore_fp_warnings
from linattn.typing import Array, ArrayT
from linattn.typing._shifts import largest

MAX_GATHERED = 1 << 22
"""Numbers of keys and values that are gathered at once."""


class Inputs(NamedTuple):
    """Checked inputs in the accumulation dtype, leading axes broadcast.

    Attributes
    ----------
    xp : module
        Their namespace.
    query : array, (..., L, d)
        Times the scale of the logits.
    key, value : array, (..., S, d) and (..., S, e)
        As they came.
    scale : float
        What the query is multiplied by.
    """

    xp: ModuleType
    query: Array
    key: Array
    value: Array
    scale: float

    @property
    def device(self) -> Any:
        """Where the arrays are."""
        return array_api_compat.device(self.query)

    @property
    def lengths(self) -> tuple[int, int]:
        """L and S."""
        return self.query.shape[-2], self.key.shape[-2]

    def output(self, query: ArrayT, array: Array) -> ArrayT:
        """Return an output in the dtype of the query as it came."""
        dtype = cast("Any", query).dtype
        return cast("ArrayT", self.xp.astype(array, dtype, copy=False))

    def array(self, host: NDArray[Any]) -> Array:
        """Return floats of the host in this library and dtype, integers and booleans as such."""
        if host.dtype.kind == "f":
            return _arrays.device_array(host, self.xp, self.query.dtype, self.device)
        return self.xp.asarray(host, device=self.device)


def prepare(
    query: Any, key: Any, value: Any, scale: float | None = None, *, aligned: bool = False
) -> Inputs:
    """Check what all baselines take; ``aligned`` ones need as many queries as keys."""
    xp, (query, key, value) = _checks.check_arrays(query=query, key=key, value=value)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one dim (last axis), got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have one length (axis -2), got {shapes}")
    if not query.shape[-2] or not key.shape[-2]:
        raise ValueError(f"query and key must have at least one token, got {shapes}")
    if aligned and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"query and key must have one length, got {shapes}; this attention is defined by "
            f"positions, which queries and keys share"
        )
    lead = _checks.check_leading_axes(
        query=tuple(query.shape[:-2]), key=tuple(key.shape[:-2]), value=tuple(value.shape[:-2])
    )
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    factor = _checks.check_finite_number("scale", scale, positive=True)
    if 0 in lead:
        raise ValueError(f"query, key and value must have at least one head, got {shapes}")
    dtype = _arrays.accumulation_dtype(xp, query.dtype, None)
    q, k, v = (
        xp.broadcast_to(xp.astype(a, dtype, copy=False), (*lead, *a.shape[-2:]))
        for a in (query, key, value)
    )
    return Inputs(xp, q * factor, k, v, factor)


def full_only(name: str, is_causal: Any, why: str) -> None:
    """Reject causal use of an attention that sees the whole sequence."""
    if _checks.check_flag("is_causal", is_causal):
        raise ValueError(f"{name} is for full attention: {why}; is_causal must be False, got True")


def causal_only(name: str, is_causal: Any) -> None:
    """Reject full use of an attention that was published as a causal one."""
    if not _checks.check_flag("is_causal", is_causal):
        raise ValueError(
            f"{name} was published for causal attention: is_causal must be True, got False"
        )


def check_matrix(name: str, array: Any, like: Array, shape: tuple[int, ...]) -> Array:
    """Check an array of parameters of the library of ``like`` with these last axes."""
    array = _checks.check_like_key(name, array, like)
    lead, last = tuple(array.shape[: -len(shape)]), tuple(array.shape[-len(shape) :])
    if last != shape:
        raise ValueError(f"{name} must have last axes {shape}, got shape {tuple(array.shape)}")
    _checks.check_leading_axes(**{name: lead, "inputs": tuple(like.shape[:-2])})
    xp = _arrays.namespace(array)
    dtype = _arrays.accumulation_dtype(xp, like.dtype, None)
    return xp.astype(array, dtype, copy=False)


def softmax(logits: Array, xp: ModuleType) -> Array:
    """Softmax over the last axis; zeros in rows of nothing but -inf."""
    with ignore_fp_warnings():
        weights = xp.exp(logits - finite_shift(largest(logits, keepdims=True), xp))
        total = xp.sum(weights, axis=-1, keepdims=True)
        return weights / xp.where(total == 0, xp.ones_like(total), total)


def logits_of(inputs: Inputs, is_causal: bool = False) -> Array:
    """Logits of all pairs, ``(..., L, S)``; -inf where a causal query sees no key."""
    xp = inputs.xp
    logits = xp.matmul(inputs.query, xp.matrix_transpose(inputs.key))
    return hide_later(logits, xp) if is_causal else logits


def hide_later(logits: Array, xp: ModuleType) -> Array:
    """Put -inf where a key comes after the query."""
    seen = np.tri(*logits.shape[-2:]) > 0
    seen = xp.asarray(seen, device=array_api_compat.device(logits))
    return xp.where(seen, logits, xp.full_like(logits, -xp.inf))


def attend_to(inputs: Inputs, index: NDArray[Any]) -> Array:
    """Softmax attention of each query to its own list of keys.

    Parameters
    ----------
    inputs : Inputs
        Of S keys.
    index : ndarray of int, (..., L, c)
        Keys of each query, without repetition; -1 for none. A row of nothing but -1 gives 0.

    Returns
    -------
    array, (..., L, e)
        In the accumulation dtype. Time O(L c (d + e)); memory is bounded.
    """
    xp, query, key, value, *_ = inputs
    lead, (L, d), (S, e) = tuple(query.shape[:-2]), query.shape[-2:], value.shape[-2:]
    H = math.prod(lead)
    index = np.broadcast_to(index, (*lead, *index.shape[-2:])).reshape(H, L, -1)
    head = S * np.arange(H)[:, None, None]
    query = xp.reshape(query, (H, L, d))
    key, value = xp.reshape(key, (H * S, d)), xp.reshape(value, (H * S, e))
    rows = max(1, MAX_GATHERED // (H * index.shape[-1] * (d + e)))
    blocks = []
    for start in range(0, L, rows):
        chosen = index[:, start : start + rows]
        places = inputs.array((np.maximum(chosen, 0) + head).ravel())
        keys = xp.reshape(xp.take(key, places, axis=0), (*chosen.shape, d))
        values = xp.reshape(xp.take(value, places, axis=0), (*chosen.shape, e))
        stop = start + chosen.shape[1]
        logits = xp.matmul(keys, query[:, start:stop, ...][..., None])[..., 0]
        hidden = xp.full_like(logits, -xp.inf)
        weights = softmax(xp.where(inputs.array(chosen >= 0), logits, hidden), xp)
        blocks.append(xp.matmul(weights[..., None, :], values)[..., 0, :])
    return xp.reshape(xp.concat(blocks, axis=1), (*lead, L, e))


def attend(inputs: Inputs, key: Array, value: Array) -> Array:
    """Softmax attention of all queries to other keys, ``(..., m, d)`` with ``(..., m, e)``."""
    xp = inputs.xp
    logits = xp.matmul(inputs.query, xp.matrix_transpose(key))
    return xp.matmul(softmax(logits, xp), value)


def heads(*arrays: Array) -> list[tuple[NDArray[np.float64], ...]]:
    """Return the heads of some arrays on the host, in float64, an entry for each head."""
    host = [_arrays.to_numpy(a).astype(np.float64) for a in arrays]
    return list(zip(*(a.reshape(-1, *a.shape[-2:]) for a in host), strict=True))


def alike(generator: np.random.Generator) -> Iterator[np.random.Generator]:
    """Yield the generator again and again, in the state that it has now: one for each head."""
    state = generator.bit_generator.state
    while True:
        generator.bit_generator.state = state
        yield generator


def one_hot(labels: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    """Return indicators ``(..., n, num)`` of labels ``(..., n)``."""
    return np.asarray(labels[..., None] == np.arange(num), dtype=np.float64)


def segment_means(length: int, num: int) -> NDArray[np.float64]:
    """Means of runs of tokens whose lengths differ by at most one, as a matrix (num, length)."""
    segment = one_hot(np.arange(length) * num // length, num)
    return np.asarray((segment / segment.sum(axis=0)).T)
