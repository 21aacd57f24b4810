"""Samples that maps are calibrated on: checked, copied to float64, pooled to the heads of keys.

A sample is one sequence, ``(query, key)`` or ``(query, key, value)`` with heads as leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.feature_maps._dask_rows import compute_sequence

Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """One sequence: x and y are queries and keys times ``sqrt(scale)``."""

    x: Floats
    y: Floats
    value: Floats | None


class Samples(NamedTuple):
    """Sequences of one dim and one set of heads."""

    sequences: list[Sample]
    heads: tuple[int, ...]
    """Leading axes of the keys."""
    dim: int
    scale: float


def check_samples(
    samples: Any, scale: Any, generator: np.random.Generator, *, with_value: bool = False
) -> Samples:
    """Check samples, and copy them to the host; of Dask arrays rows that the generator draws.

    Raises
    ------
    TypeError
        Not sequences of arrays; as :func:`linattn.linear_attention` for each.
    ValueError
        No sample, no token, NaN or inf, shapes that do not fit each other or the other samples;
        ``with_value`` and a sample without values.
    """
    sequences = [samples] if _is_sample(samples) else samples
    if not isinstance(sequences, Sequence) or not all(map(_is_sample, sequences)):
        raise TypeError(
            f"samples must be a list of sequences, each a tuple (query, key) or (query, key, "
            f"value) of arrays, got {type(samples).__name__}"
        )
    if not sequences:
        raise ValueError("samples must hold at least one sequence, got none")
    arrays = [
        _check_sample(f"samples[{i}]", s, with_value, generator) for i, s in enumerate(sequences)
    ]
    lead, dim = _signature(arrays[0])
    for i, sample in enumerate(arrays):
        if _signature(sample) != (lead, dim):
            raise ValueError(
                f"samples must have one dim and the same leading axes (heads); a batch is given as "
                f"a list of its sequences; samples[0] has {lead} and dim {dim}, samples[{i}] "
                f"{_signature(sample)[0]} and dim {_signature(sample)[1]}"
            )
    scale = 1 / sqrt(dim) if scale is None else scale
    scale = _checks.check_finite_number("scale", scale, positive=True)
    root = sqrt(scale)
    scaled = [Sample(root * x, root * y, value) for x, y, value in arrays]
    return Samples(scaled, arrays[0].y.shape[:-2], dim, scale)


def _is_sample(given: Any) -> bool:
    return (
        isinstance(given, tuple | list)
        and len(given) in (2, 3)
        and all(hasattr(array, "ndim") for array in given)
    )


def _signature(sample: Sample) -> tuple[list[tuple[int, ...]], int]:
    arrays = [a for a in sample if a is not None]
    return [a.shape[:-2] for a in arrays], sample.x.shape[-1]


def _check_sample(
    name: str, given: Any, with_value: bool, generator: np.random.Generator
) -> Sample:
    names = [f"{name} {part}" for part in ("query", "key", "value")[: len(given)]]
    if with_value and len(given) < 3:
        raise ValueError(
            f"{name} must be (query, key, value) to learn from values, got (query, key)"
        )
    _, checked = _checks.check_arrays(**dict(zip(names, given, strict=True)))
    query, key, *_ = checked
    lengths = {a.shape[-2] for a in checked[1:]}
    if query.shape[-1] != key.shape[-1] or len(lengths) > 1 or 0 in query.shape or 0 in key.shape:
        raise ValueError(
            f"{name} must have query and key of one dim, key and value of one length, and at least "
            f"one token, got shapes {[tuple(a.shape) for a in checked]}"
        )
    leads = {label: tuple(a.shape[:-2]) for label, a in zip(names, checked, strict=True)}
    _checks.check_leading_axes(**leads)
    arrays: list[Floats] = []
    for label, array in zip(names, compute_sequence(checked, generator), strict=True):
        copy = _arrays.to_numpy(array).astype(np.float64)
        if not np.isfinite(copy).all():
            raise ValueError(
                f"{label} must be finite, got NaN or inf; a sample holds valid tokens only: leave "
                f"masked ones out"
            )
        arrays.append(copy)
    query, key, *value = arrays
    return Sample(query, key, value[0] if value else None)


def pool_heads(x: Floats, heads: tuple[int, ...]) -> Floats:
    """Bring queries ``(..., n, d)`` to the heads of the keys, those that share one end to end.

    An axis that the keys have not, or have as 1, becomes part of the tokens; one that the queries
    have not is broadcast.
    """
    lead = x.shape[:-2]
    x = x[(None,) * (len(heads) - len(lead))]
    full = (1,) * (x.ndim - 2 - len(heads)) + heads
    shared = [axis for axis, size in enumerate(full) if size == 1]
    separate = [axis for axis, size in enumerate(full) if size != 1]
    x = np.transpose(x, (*separate, *shared, x.ndim - 2, x.ndim - 1))
    n = int(np.prod(x.shape[len(separate) : -1], dtype=int))
    x = x.reshape(*x.shape[: len(separate)], n, x.shape[-1])
    x = np.broadcast_to(x, (*(full[axis] for axis in separate), *x.shape[-2:]))
    return x.reshape(*heads, *x.shape[-2:])
