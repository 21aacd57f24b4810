"""Features of a block for its gradients, and their cotangents pulled back to tokens.

For exponential maps, elu + 1 and ReLU. A block with moderate exponents is *unshifted*: nothing is
subtracted before ``exp``. A key's row term multiplies ``[v, 1]``, and a query's row scale its
cotangent.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import numpy as np

from linattn.typing import RELU, Declined, Exponential, Pointwise, Spec, Tokens
from linattn_numpy import limits
from linattn_numpy.buffers import Floats
from linattn_numpy.features import (
    FeatureMaker,
    are_moderate,
    log_offsets,
    preactivations,
    row_term,
    supports_pointwise,
)
from linattn_numpy.products import transposed

NO_VJP = Declined("NumPy has its own gradients of exponential maps, elu + 1 and ReLU only")


def has_vjp(spec: Spec) -> TypeGuard[Exponential | Pointwise]:
    """Whether the features of a spec are pulled back here."""
    return isinstance(spec, Exponential) or (
        supports_pointwise(spec) and (spec.f == RELU or spec.offset == 0.0)
    )


class Unshifted(NamedTuple):
    """Unshifted features of a block: ``phi = weights * exp(col + row)``."""

    weights: Floats
    col: Floats
    row: Floats | None
    """Log that all features of a key share, ``(..., n, 1)``; None for 0."""
    max_log: float
    """Log of the largest weight, at least 0."""


def unshifted_features(
    spec: Exponential | Pointwise, tokens: Tokens, name: str
) -> Unshifted | Declined:
    """Return features in buffers called ``name``, "query" or "key".

    Decline exponents above MAX_VJP_EXPONENT, and keys whose row terms are far apart. Those of
    queries cancel.
    """
    if not are_moderate(spec, tokens.x).all():
        return limits.LARGE_EXPONENTS
    maker = FeatureMaker(spec, tokens.x, tokens.x.shape[-2], name, by_rows=True)
    highest = maker.make(tokens.x, inspect=True)
    weights = maker.features.reshape(*maker.features.shape[:-2], -1)
    if highest > limits.MAX_VJP_EXPONENT[weights.itemsize]:
        return Declined(f"exponents or features of {name} are out of the range of unshifted ones")
    row = row_term(spec, tokens) if name == "key" else None
    if row is not None and limits.are_far_apart(row - row.max(axis=-2, keepdims=True)):
        return limits.SMALL_SHARES
    return Unshifted(weights, log_offsets(spec, weights.dtype), row, highest)


def features_vjp(
    spec: Spec,
    x: Floats,
    weights: Floats,
    cotangent: Floats,
    total: Floats | None,
    least: float = 0.0,
) -> Floats:
    """Pull the cotangent of the features ``weights`` back to tokens; overwrite ``cotangent``.

    ``total``: sum of the products of features and cotangents over a row, None for 0. ``least``:
    smallest products that are not 0, if weights have been rounded to multiples of it.
    """
    if isinstance(spec, Exponential):
        cotangent = limits.in_place(np.multiply, cotangent, weights)
        if least:
            limits.rounded(cotangent, least)
        r = spec.P.shape[-1]
        if spec.paired:
            cotangent[..., :r] -= cotangent[..., r:]
        gradient = np.asarray(np.matmul(cotangent[..., :r], transposed(spec.P)))
        if total is None or (isinstance(spec.Q, float) and spec.Q == 0.0):
            return gradient
        Q = spec.Q if isinstance(spec.Q, float) else (spec.Q + transposed(spec.Q)) / 2
        curved = Q * x if isinstance(Q, float) else x @ Q
        return limits.in_place(np.subtract, gradient, total * curved)
    assert isinstance(spec, Pointwise)
    if spec.f == RELU:
        # The sign is taken from the inputs: in a feature, the offset may round a small input away.
        slopes, factor = preactivations(spec, x, "inputs") > 0, spec.factor
    else:
        slopes, factor = np.minimum(weights, spec.factor), 1.0
    cotangent = limits.in_place(np.multiply, cotangent, slopes)
    if isinstance(spec.P, float):
        cotangent *= factor * spec.P
        return cotangent.copy()
    return np.asarray(np.matmul(cotangent, transposed(spec.P) * factor))


def sum_to(x: Floats, lead: tuple[int, ...]) -> Floats:
    """Sum over leading axes along which an array with leading axes ``lead`` was broadcast."""
    shape = x.shape[:-2]
    if shape == lead:
        return x
    extra = len(shape) - len(lead)
    axes = [extra + i for i, n in enumerate(lead) if n != shape[extra + i]]
    summed = x.sum(axis=(*range(extra), *axes), keepdims=True)
    return np.asarray(summed.reshape(*lead, *x.shape[-2:]))
