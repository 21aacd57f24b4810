"""Feature maps: what linear attention puts in the place of the exponential of the logits.

Random maps of the softmax kernel: :class:`PositiveFeatures`, :class:`HyperbolicFeatures`,
:class:`GeneralizedExponentialFeatures`, :class:`DenseExponentialFeatures`,
:class:`TrigonometricFeatures`; :class:`Reparametrized` shows any of them other coordinates.
Frozen features fitted to sample inputs: :class:`CalibratedFeatures`.
Fitted to a sequence: :class:`LandmarkFeatures`.
Random maps of other kernels: :class:`RandomFourierFeatures`, :class:`ActivationFeatures`,
:class:`SignFeatures`.
Deterministic maps: :class:`EluFeatures`, :class:`ReluFeatures`, :class:`SoftmaxFeatures`,
:class:`TaylorFeatures`, :class:`PolynomialFeatures`, :class:`CosformerFeatures`,
:class:`HedgehogFeatures`. Any map rotated by the position: :class:`RotatedFeatures`.
"""

from __future__ import annotations

from linattn.feature_maps._base import BaseFeatureMap
from linattn.feature_maps.calibrated import CalibratedFeatures
from linattn.feature_maps.cosformer import CosformerFeatures
from linattn.feature_maps.elementwise import ActivationFeatures, EluFeatures, ReluFeatures
from linattn.feature_maps.exponential import (
    DenseExponentialFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
)
from linattn.feature_maps.fourier import RandomFourierFeatures
from linattn.feature_maps.hedgehog import HedgehogFeatures
from linattn.feature_maps.landmarks import LandmarkFeatures
from linattn.feature_maps.normalized import SoftmaxFeatures
from linattn.feature_maps.polynomial import PolynomialFeatures, TaylorFeatures
from linattn.feature_maps.reparametrized import Reparametrized
from linattn.feature_maps.rotated import RotatedFeatures
from linattn.feature_maps.signs import SignFeatures
from linattn.feature_maps.trigonometric import TrigonometricFeatures

__all__ = [
    "ActivationFeatures",
    "BaseFeatureMap",
    "CalibratedFeatures",
    "CosformerFeatures",
    "DenseExponentialFeatures",
    "EluFeatures",
    "GeneralizedExponentialFeatures",
    "HedgehogFeatures",
    "HyperbolicFeatures",
    "LandmarkFeatures",
    "PolynomialFeatures",
    "PositiveFeatures",
    "RandomFourierFeatures",
    "ReluFeatures",
    "Reparametrized",
    "RotatedFeatures",
    "SignFeatures",
    "SoftmaxFeatures",
    "TaylorFeatures",
    "TrigonometricFeatures",
]
