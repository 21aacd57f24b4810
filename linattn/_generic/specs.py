"""What a spec is made of: its arrays and their leading axes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from linattn.typing import (
    Affine,
    Assigned,
    ColumnNormalized,
    Corrected,
    Exponential,
    MapSpec,
    Normalized,
    Pointwise,
)

__all__ = ["PARAMETER_AXES", "spec_lead"]

PARAMETER_AXES: dict[type, dict[str, int]] = {
    Affine: {"shift": 2, "transform": 2, "weight": 2, "offset": 2},
    Assigned: {"P": 2, "bias": 1, "probes": 2, "offset": 1, "table": 2},
    Corrected: {"half_log": 1, "matrix": 2},
    Exponential: {"P": 2, "Q": 2, "col": 1},
    Normalized: {"P": 2, "col": 1, "power": 2, "tilt": 2},
    Pointwise: {"P": 2, "bias": 1, "factor": 1},
}
"""Axes of each array of a spec after its leading ones; what is None or a number has none."""


_leads: WeakKeyDictionary[MapSpec, tuple[int, ...]] = WeakKeyDictionary()


def spec_lead(spec: MapSpec) -> tuple[int, ...]:
    """Leading axes (heads) of a spec's parameters; remembered, since specs are kept by maps."""
    lead = _leads.get(spec)
    if lead is None:
        lead = _leads[spec] = _spec_lead(spec)
    return lead


def _spec_lead(spec: MapSpec) -> tuple[int, ...]:
    inside = spec_lead(spec.spec) if isinstance(spec, Affine | ColumnNormalized | Corrected) else ()
    shapes = [inside]
    for name, axes in PARAMETER_AXES.get(type(spec), {}).items():
        array = getattr(spec, name)
        if array is not None and not isinstance(array, float):
            shapes.append(tuple(array.shape[:-axes]))
    return np.broadcast_shapes(*shapes)
