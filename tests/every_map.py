"""One map of each class, and of each form that has code of its own: what all maps must do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from linattn import feature_maps as maps
from tests.attentions import DIM, MAPS, tokens

INSIDE = maps.PositiveFeatures(DIM, 8, rng=0)
SAMPLE = tokens(dtype="float64")
ROWS = np.random.default_rng(2).standard_normal((2, 6, DIM))

OF_EACH_CLASS: dict[str, Any] = {
    **MAPS,
    "negative": maps.ActivationFeatures(DIM, 8, epsilon=-1.0, rng=0),
    "cosformer": maps.CosformerFeatures(DIM, max_length=64),
    "dense": maps.DenseExponentialFeatures(
        DIM, 8, A=np.zeros(DIM), transform=np.eye(DIM), sampler="gaussian", rng=0
    ),
    "generalized": maps.GeneralizedExponentialFeatures(DIM, 8, A=-0.1, rng=0),
    "hedgehog": maps.HedgehogFeatures(np.eye(DIM)),
    "landmarks": maps.LandmarkFeatures.fit(*SAMPLE[:2], num_features=4, num_probes=8, rng=0),
    "polynomial": maps.PolynomialFeatures(DIM, degree=2),
    "fourier": maps.RandomFourierFeatures(DIM, 8, bandwidth=3.0, rng=0),
    "reparametrized": maps.Reparametrized(INSIDE, query_shift=np.ones(DIM)),
    "reparametrized-signed": maps.Reparametrized(
        maps.TrigonometricFeatures(DIM, 8, rng=0), query_shift=np.ones(DIM)
    ),
    "rotated": maps.RotatedFeatures(maps.EluFeatures(DIM)),
    "signs": maps.SignFeatures(DIM, 8, rng=0),
    "softmax": maps.SoftmaxFeatures(DIM),
    "taylor": maps.TaylorFeatures(DIM),
}
EVERY: dict[str, Any] = {
    **OF_EACH_CLASS,
    "gaussian": maps.PositiveFeatures(DIM, 6, scale=0.7, sampler="gaussian", rng=1),
    "weights": maps.PositiveFeatures.from_projection(ROWS[0], log_weights=np.linspace(-1, 1, 6)),
    "heads": maps.HyperbolicFeatures.from_projection(ROWS),
    "heaviside": maps.ActivationFeatures(DIM, 8, activation="heaviside", epsilon=0.1, rng=0),
    "squared-relu": maps.ActivationFeatures(DIM, 8, activation="squared_relu", scale=2.0, rng=0),
    "offset": maps.ActivationFeatures(sampler=None, epsilon=0.25, scale=2.0),
    "calibrated": maps.CalibratedFeatures.calibrate(SAMPLE, num_features=4),
    "elu-scaled": maps.EluFeatures(DIM, scale=2.0),
    "homogeneous": maps.PolynomialFeatures(DIM, 3, 0.0, scale=0.5),
    "fourier-normalized": maps.RandomFourierFeatures(
        DIM, 8, bandwidth=2.0, kernel="matern32", normalize=True, rng=0
    ),
    "relu-scaled": maps.ReluFeatures(DIM, scale=0.5),
}
ignored = pytest.mark.filterwarnings(
    "ignore:feature_map was fitted", "ignore:.* denominators are negative"
)
