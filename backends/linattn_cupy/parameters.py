"""Feature maps as the kernels take them: a family, a projection, offsets and a curvature."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from linattn.typing import ELU_PLUS_ONE, RELU, Array, Exponential, Pointwise
from linattn_cupy import device
from linattn_cupy.device import cupy

FAMILIES = {"exponential": 0, "elu_plus_one": 1, "relu": 2}
"""Option MAP of the kernels."""

ACTIVATIONS = (ELU_PLUS_ONE, RELU)
"""Functions that the kernels support; a caller's function may have the name of one of them."""


class Parameters(NamedTuple):
    """One side of a map on the device: ``log phi = x omega - curvature |x|^2 / 2 + col``.

    ``projection``: omega, (spec heads, m, d) in 16 bits, (spec heads, d, m) in float32; None for
    maps of coordinates. ``col``, (spec heads, m): log factors, -inf for padding. ``lead``: leading
    axes of the map's parameters.
    """

    projection: Array
    col: Array
    curvature: float
    lead: tuple[int, ...]


def family_of(spec: Any) -> str:
    """Name of the family of a spec; UnsupportedError for one that no kernel takes."""
    if isinstance(spec, Exponential):
        device.require(isinstance(spec.Q, float), "the map has more than one curvature")
        return "exponential"
    is_supported = (
        isinstance(spec, Pointwise)
        and spec.f in ACTIVATIONS
        and isinstance(spec.P, float)
        and spec.P == 1.0
        and spec.bias is None
        and spec.quad is None
        and spec.offset == 0.0
        and isinstance(spec.factor, float)
        and spec.factor > 0.0
    )
    device.require(is_supported, "no kernel evaluates this map")
    return str(spec.f.name)


def num_features_of(spec: Any, dim: int) -> int:
    """Return the number of features of a spec of a supported family."""
    return int(spec.col.shape[-1]) if isinstance(spec, Exponential) else dim


_cached: WeakKeyDictionary[Any, dict[Any, Parameters]] = WeakKeyDictionary()


def parameters_of(spec: Any, like: Array, dim: int, num_features: int) -> Parameters:
    """Parameters in an array's dtype, padded to these sizes; cached as long as the spec lives.

    Specs of one map belong to one device and stream, and so do these.
    """
    cached = _cached.setdefault(spec, {})
    variant = (str(like.dtype), dim, num_features)
    if variant not in cached:
        cached[variant] = _make(spec, like, dim, num_features)
    return cached[variant]


def _make(spec: Any, like: Array, dim: int, num_features: int) -> Parameters:
    if isinstance(spec, Pointwise):
        col = cupy.full((1, num_features), -math.inf, "float32")
        col[:, : min(like.shape[-1], num_features)] = math.log(spec.factor)
        return Parameters(None, col, 0.0, ())
    lead = tuple(spec.P.shape[:-2]) if spec.P.ndim > spec.col.ndim else tuple(spec.col.shape[:-1])
    heads = math.prod(lead)
    d, r = spec.P.shape[-2:]
    m = spec.col.shape[-1]
    projection = cupy.zeros((heads, dim, num_features), "float32")
    by_coordinate = projection.reshape(*lead, dim, num_features)
    by_coordinate[..., :d, :r] = spec.P
    if spec.paired:
        by_coordinate[..., :d, r:m] = -by_coordinate[..., :d, :r]
    if like.dtype != projection.dtype:
        projection = cupy.ascontiguousarray(projection.astype(like.dtype).swapaxes(-1, -2))
    col = cupy.full((heads, num_features), -math.inf, "float32")
    col.reshape(*lead, num_features)[..., :m] = spec.col
    return Parameters(projection, col, float(spec.Q), lead)
