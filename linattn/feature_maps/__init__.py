"""Feature maps: what linear attention puts in the place of the exponential of the logits.

Random maps of the softmax kernel: :class:`PositiveFeatures`, :class:`HyperbolicFeatures`,
:class:`TrigonometricFeatures`. Kernels of their own: :class:`EluFeatures`,
:class:`ReluFeatures`, :class:`ActivationFeatures`.
"""

from __future__ import annotations

from linattn.feature_maps._base import BaseFeatureMap
from linattn.feature_maps.elementwise import ActivationFeatures, EluFeatures, ReluFeatures
from linattn.feature_maps.exponential import (
    DenseExponentialFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
)
from linattn.feature_maps.reparametrized import Reparametrized
from linattn.feature_maps.trigonometric import TrigonometricFeatures

__all__ = [
    "ActivationFeatures",
    "BaseFeatureMap",
    "DenseExponentialFeatures",
    "EluFeatures",
    "GeneralizedExponentialFeatures",
    "HyperbolicFeatures",
    "PositiveFeatures",
    "ReluFeatures",
    "Reparametrized",
    "TrigonometricFeatures",
]
