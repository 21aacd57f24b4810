"""linattn, called as a user calls it; ``OMP_NUM_THREADS`` says how many threads it may use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

import linattn
from benchmarks.peers import oracle
from benchmarks.peers.problem import Floats, Inputs, Prepared
from benchmarks.peers.registry import GRADIENT, TEXT
from linattn.feature_maps import (
    EluFeatures,
    HyperbolicFeatures,
    LandmarkFeatures,
    PositiveFeatures,
)
from linattn.typing import FeatureMap

__all__ = ["prepare"]


def prepare(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Prepare a peer of this module."""
    if kind == "decode":
        return _decode(name, inputs)
    if kind in GRADIENT:
        return _gradient(name, kind, inputs)
    if kind in TEXT:
        return _text(name, inputs)
    phi = _feature_map(name, inputs)
    is_causal = kind == "causal"

    def wanted() -> Floats:
        weights = _weights(name, phi, inputs.query, inputs.key)
        return oracle.attention(weights, inputs.value, is_causal=is_causal)

    return Prepared(
        lambda: linattn.linear_attention(
            inputs.query, inputs.key, inputs.value, phi, is_causal=is_causal
        ),
        wanted,
    )


def _gradient(name: str, kind: str, inputs: Inputs) -> Prepared:
    """Forward pass and pullback, or the pullback alone."""
    phi = PositiveFeatures(inputs.sizes.dim, inputs.sizes.features, rng=0)
    arrays, is_causal = (inputs.query, inputs.key, inputs.value), kind.startswith("causal")

    def forward() -> tuple[Floats, Callable[[Floats], tuple[Floats, ...]]]:
        return linattn.linear_attention_vjp(*arrays, phi, is_causal=is_causal)

    def both() -> tuple[Floats, ...]:
        output, pull = forward()
        return output, *pull(inputs.cotangent)

    def wanted() -> Floats:
        results = oracle.recipe_vjp(inputs, phi.projection, is_causal=is_causal)
        return np.stack(results[1:] if is_alone else results)

    is_alone = name == "linattn-pullback"
    _, pullback = forward()
    call = partial(pullback, inputs.cotangent) if is_alone else both
    return Prepared(call, wanted, np.stack)


def _text(name: str, inputs: Inputs) -> Prepared:
    """Softmax attention fitted to its sequence: by so many landmarks, or as many as it needs."""
    query, key, value = inputs.text

    def landmarks() -> Floats:
        phi = LandmarkFeatures.fit(query, key, num_features=64, rng=0)
        return linattn.linear_attention(query, key, value, phi, exact_window=32)

    def tolerated() -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # where it takes exact attention
            return linattn.attention(query, key, value, tolerance=0.1, rng=0)

    call = {"linattn-landmarks": landmarks, "linattn-attention": tolerated}[name]
    return Prepared(call, partial(oracle.softmax_attention, *inputs.text))


def _feature_map(name: str, inputs: Inputs) -> FeatureMap:
    if name == "linattn-elu":
        return EluFeatures()
    hyperbolic = name == "linattn-hyperbolic"
    cls = HyperbolicFeatures if hyperbolic else PositiveFeatures
    return cls(inputs.sizes.dim, inputs.sizes.features, rng=0)


def _weights(name: str, phi: FeatureMap, query: Floats, key: Floats) -> Floats:
    """Kernel weights by the formula of the map, with the map's own rows."""
    if isinstance(phi, EluFeatures):
        q, k = oracle.elu_plus_one(query), oracle.elu_plus_one(key)
    else:
        features = oracle.hyperbolic if name == "linattn-hyperbolic" else oracle.exponentials
        assert isinstance(phi, PositiveFeatures | HyperbolicFeatures)
        q, k = (features(x, phi.projection) for x in (query, key))
    return q @ k.swapaxes(-1, -2)


def _decode(name: str, inputs: Inputs) -> Prepared:
    """One token after a context; the decoder's state goes on from call to call."""
    sizes = inputs.sizes
    phi = PositiveFeatures(sizes.dim, sizes.features, rng=0)
    empty = linattn.init_state(
        phi, sizes.dim, batch_shape=(sizes.batch, sizes.heads), like=inputs.key
    )
    state = linattn.update_state(empty, inputs.key, inputs.value, phi)
    query, key, value = inputs.token

    def wanted() -> Floats:
        q, keys, values = oracle.next_token(inputs)
        weights = _weights(name, phi, q, keys)
        return oracle.attention(weights, values, is_causal=False)[..., 0, :]

    if name == "linattn-decoder":
        decoder = linattn.Decoder(phi, state)
        return Prepared(lambda: decoder.step(query, key, value), wanted)
    return Prepared(lambda: linattn.decode_step(query, key, value, state, phi)[0], wanted)
