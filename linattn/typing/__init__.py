"""Records and protocols: the words in which maps, the driver and backends talk to each other.

Shape letters used everywhere: ``L`` queries, ``S`` keys, ``n`` tokens of one block, ``d`` dim,
``m`` features, ``e`` value dim. The sequence axis is always -2; ``...`` are leading axes (batch,
heads), which broadcast.
"""

from __future__ import annotations

from linattn.typing.backend import Backend, BlockTier, Services, Stepper, WholeTier, implements
from linattn.typing.feature_map import FeatureMap, MapAttributes
from linattn.typing.problems import Plan, Problem, Recurrence, RelativeBias
from linattn.typing.records import (
    Array,
    ArrayT,
    Clusters,
    Cotangent,
    Declined,
    Features,
    Index,
    Partial,
    RowScale,
    State,
    Tokens,
)
from linattn.typing.specs import (
    ELU_PLUS_ONE,
    HEAVISIDE,
    RELU,
    SQUARED_RELU,
    Activation,
    Affine,
    Assigned,
    ColumnNormalized,
    Corrected,
    Exact,
    Exponential,
    MapSpec,
    Normalized,
    Opaque,
    Pointwise,
    SeparateDenominator,
    Spec,
)

__all__ = [
    "ELU_PLUS_ONE",
    "HEAVISIDE",
    "RELU",
    "SQUARED_RELU",
    "Activation",
    "Affine",
    "Array",
    "ArrayT",
    "Assigned",
    "Backend",
    "BlockTier",
    "Clusters",
    "ColumnNormalized",
    "Corrected",
    "Cotangent",
    "Declined",
    "Exact",
    "Exponential",
    "FeatureMap",
    "Features",
    "Index",
    "MapAttributes",
    "MapSpec",
    "Normalized",
    "Opaque",
    "Partial",
    "Plan",
    "Pointwise",
    "Problem",
    "Recurrence",
    "RelativeBias",
    "RowScale",
    "SeparateDenominator",
    "Services",
    "Spec",
    "State",
    "Stepper",
    "Tokens",
    "WholeTier",
    "implements",
]
