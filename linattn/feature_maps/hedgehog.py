"""Learned exponential features: exp(W x) and exp(-W x) with weights trained elsewhere."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn.feature_maps._base import BaseFeatureMap
from linattn.typing import Array, Exponential

__all__ = ["HedgehogFeatures"]

Floats = NDArray[np.float64]


class HedgehogFeatures(BaseFeatureMap):
    r"""Hedgehog: exponentials of a learned linear layer, with both signs.

    .. math::
        \phi(q) = [e^{W q + b}, \; e^{-W q - b}], \qquad
        \psi(k) = [e^{W' k + b'}, \; e^{-W' k - b'}]

    Letters: ``d`` dim, ``r`` rows of W, ``m = 2 r`` features.

    Parameters
    ----------
    weights : array_like, (..., r, d)
        W; leading axes are heads, each with weights of its own.
    bias : array_like, (..., r), optional
        b. Default 0.
    key_weights : array_like, (..., r, d), optional
        W'. Default W.
    key_bias : array_like, (..., r), optional
        b'. Default b where W' is W, else 0.

    Attributes
    ----------
    weights, bias, key_weights, key_bias : ndarray
        As above, float64, read-only.
    dim, num_features : int
        d and 2 r.
    scale : float
        1: the weights hold any other.
    positive, unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    ValueError
        Shapes that do not fit, NaN or inf.

    Notes
    -----
    Deterministic: the kernel is ``2 sum_r cosh(w_r.q + w'_r.k + b_r + b'_r)``, its variance 0.
    The kernel approximates whatever the weights were trained for. They are given, not trained here:
    an attention of a pretrained model needs weights fitted to that model, one for each head.

    This is the map of exponentials. Implementations that put a softmax over the features in their
    place divide a key's features by their sum, which changes the weight of that key: that is
    another map. For a query the sum cancels.

    Time O(n m d), memory O(n m). Features of any size are safe: they stay in the log domain.

    References
    ----------
    Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax
    Mimicry" (2024), the feature map of one-layer MLPs with exponentials and its negation.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import HedgehogFeatures
    >>> HedgehogFeatures(np.eye(64))  # doctest: +ELLIPSIS
    HedgehogFeatures(dim=64, num_features=128, fingerprint=...)
    """

    positive = True
    unbiased = True
    _parameters = ("weights", "bias", "key_weights", "key_bias")

    dim: int
    num_features: int
    _heads: tuple[int, ...]
    weights: Floats
    bias: Floats
    key_weights: Floats
    key_bias: Floats

    def __init__(
        self,
        weights: ArrayLike,
        *,
        bias: ArrayLike | None = None,
        key_weights: ArrayLike | None = None,
        key_bias: ArrayLike | None = None,
    ) -> None:
        W = _checks.check_parameter("weights", weights)
        if W.ndim < 2 or 0 in W.shape[-2:]:
            raise ValueError(f"weights must have shape (..., rows, dim), got {W.shape}")
        r, d = W.shape[-2:]
        b = np.zeros(r) if bias is None else _checks.check_parameter("bias", bias, (r,))
        key_W = (
            W
            if key_weights is None
            else _checks.check_parameter("key_weights", key_weights, (r, d))
        )
        key_b = b if key_weights is None else np.zeros(r)
        if key_bias is not None:
            key_b = _checks.check_parameter("key_bias", key_bias, (r,))
        heads = _checks.check_leading_axes(
            weights=W.shape[:-2],
            bias=b.shape[:-1],
            key_weights=key_W.shape[:-2],
            key_bias=key_b.shape[:-1],
        )
        self._set(
            dim=d,
            num_features=2 * r,
            scale=1.0,
            _heads=heads,
            weights=W,
            bias=b,
            key_weights=key_W,
            key_bias=key_b,
        )

    def _repr_parameters(self) -> dict[str, Any]:
        """Show sizes instead of the numbers of the weights."""
        shown: dict[str, Any] = {"dim": self.dim, "num_features": self.num_features}
        return {**shown, "heads": self._heads} if self._heads else shown

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the query side: ``P = W^T``, no curvature, ``col = [b, -b]``."""
        return _spec(self.weights, self.bias, xp, dtype, device)

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the key side: the same of W' and b'."""
        return _spec(self.key_weights, self.key_bias, xp, dtype, device)

    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """

        def closed_form(a: Floats, b: Floats) -> Floats:
            u = a @ np.swapaxes(self.weights, -1, -2) + self.bias[..., None, :]
            w = b @ np.swapaxes(self.key_weights, -1, -2) + self.key_bias[..., None, :]
            total = np.zeros(())
            for column in range(self.num_features // 2):
                total = total + np.cosh(u[..., :, None, column] + w[..., None, :, column])
            return 2 * total

        return self._on_host(closed_form, x, y)


def _spec(weights: Floats, bias: Floats, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
    # Zero curvature: the exponents are linear in the token.
    return Exponential(
        _arrays.device_array(np.swapaxes(weights, -1, -2), xp, dtype, device),
        0.0,
        _arrays.device_array(np.concatenate([bias, -bias], axis=-1), xp, dtype, device),
        paired=True,
    )
