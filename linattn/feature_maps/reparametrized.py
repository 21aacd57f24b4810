"""Exact changes of coordinates that leave softmax attention unchanged."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks
from linattn._driver.problem import check_feature_map
from linattn.feature_maps._base import BaseFeatureMap
from linattn.sampling import Seed
from linattn.typing import Affine, Array

__all__ = ["Reparametrized"]

Floats = NDArray[np.float64]


class Reparametrized(BaseFeatureMap):
    r"""A map of the softmax kernel seen through shifted, transformed queries and keys.

    .. math::
        e^{s\, q \cdot k} = e^{s\, q \cdot b}\, e^{s\, c \cdot (k - b)}\, e^{s\, q' \cdot k'},
        \qquad q' = M^T (q - c), \quad k' = M^{-1} (k - b)

    The map inside sees q' and k'. The weight of each key, ``s c.(k - b)``, is exact and stays in
    the log domain; the factor of each query cancels in attention. Letters: ``d`` dim, ``c`` query
    shift, ``b`` key shift, ``M`` transform, ``s`` scale of the map inside.

    Parameters
    ----------
    feature_map : feature map
        A map of ``exp(scale x.y)`` or an approximation of it (:class:`TaylorFeatures`).
    query_shift : array_like, (..., d), optional
        c; leading axes are heads. Default 0.
    key_shift : array_like, (..., d), optional
        b. Default 0.
    transform : array_like, (..., d, d), optional
        M, invertible. Default the identity.

    Attributes
    ----------
    feature_map, query_shift, key_shift, transform
        As above, float64, read-only.
    dim, num_features, scale, positive, unbiased, causal
        As in the map inside.

    Raises
    ------
    TypeError, ValueError
        A map of another kernel; shapes that do not fit; NaN or inf; an M without inverse.

    Notes
    -----
    Softmax attention is unchanged; the error of an approximation is not. Positive maps depend on
    ``b + c`` alone: ``v = s |q' + k'|^2``. Shifts taken from the sequence itself see all of it:
    for causal use take them from other data. Time O(n d^2) more than the map inside.

    References
    ----------
    Derived in this project. Balanced transforms: Likhosherstov et al., "FAVOR#" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import PositiveFeatures, Reparametrized
    >>> inside = PositiveFeatures(4, rng=0)
    >>> phi = Reparametrized(inside, query_shift=np.ones(4), key_shift=-np.ones(4))
    >>> phi.num_features
    8
    """

    softmax_kernel = True
    positive: bool  # type: ignore[misc]
    feature_map: BaseFeatureMap
    query_shift: Floats
    key_shift: Floats
    transform: Floats
    _inverse: Floats
    _parameters = ("feature_map", "query_shift", "key_shift", "transform")

    def __init__(
        self,
        feature_map: Any,
        query_shift: ArrayLike | None = None,
        key_shift: ArrayLike | None = None,
        transform: ArrayLike | None = None,
    ) -> None:
        check_feature_map(feature_map)
        if not getattr(feature_map, "softmax_kernel", False):
            raise TypeError(
                f"feature_map must be a map of the softmax kernel, such as PositiveFeatures(dim), "
                f"got {feature_map!r}"
            )
        d = feature_map.dim
        c = _checks.check_parameter(
            "query_shift", np.zeros(d) if query_shift is None else query_shift, (d,)
        )
        b = _checks.check_parameter(
            "key_shift", np.zeros(d) if key_shift is None else key_shift, (d,)
        )
        M = _checks.check_parameter(
            "transform", np.eye(d) if transform is None else transform, (d, d)
        )
        if not np.all(np.linalg.cond(M) < 1 / np.finfo(np.float64).eps):
            raise ValueError("transform must be invertible, and is not")
        self._set(
            feature_map=feature_map,
            query_shift=c,
            key_shift=b,
            transform=M,
            _inverse=np.linalg.inv(M),
            dim=d,
            num_features=feature_map.num_features,
            scale=feature_map.scale,
            positive=getattr(feature_map, "positive", False),
            unbiased=feature_map.unbiased,
            causal=feature_map.causal,
        )

    def redraw(self, rng: Seed = None) -> Self:
        """Return the same change of coordinates around a redrawn map.

        Raises
        ------
        ValueError
            The map inside cannot be redrawn.
        """
        inside: Any = self.feature_map
        return type(self)(inside.redraw(rng), self.query_shift, self.key_shift, self.transform)

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Affine:
        """Spec of the query side: the log weight is ``s q.b``."""
        inside: Any = self.feature_map.query_spec(xp, dtype, device)
        offset = np.sum(self.query_shift * self.key_shift, axis=-1)
        arrays = (self.query_shift, self.transform, self.key_shift, offset)
        return self._affine(inside, *arrays, xp=xp, dtype=dtype, device=device)

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Affine:
        """Spec of the key side: the log weight is ``s c.(k - b)``."""
        inside: Any = self.feature_map.key_spec(xp, dtype, device)
        transform = np.swapaxes(self._inverse, -1, -2)
        arrays = (self.key_shift, transform, self.query_shift, 0.0)
        return self._affine(inside, *arrays, xp=xp, dtype=dtype, device=device)

    def _affine(
        self,
        inside: Any,
        shift: Floats,
        transform: Floats,
        weight: Floats,
        offset: Any,
        **where: Any,
    ) -> Affine:
        return Affine(
            inside,
            shift=_arrays.device_array(shift[..., None, :], **where),
            transform=_arrays.device_array(transform, **where),
            weight=_arrays.device_array(self.scale * weight[..., :, None], **where),
            offset=_arrays.device_array(self.scale * np.asarray(offset)[..., None, None], **where),
        )

    def _changed(self, x: Floats, y: Floats) -> tuple[Floats, Floats, Floats]:
        """Change queries and keys; also the log of what their kernel is multiplied with."""
        q, k = x - self.query_shift[..., None, :], y - self.key_shift[..., None, :]
        log_query = np.sum(x * self.key_shift[..., None, :], axis=-1)[..., :, None]
        log_key = np.sum(k * self.query_shift[..., None, :], axis=-1)[..., None, :]
        inverse = np.swapaxes(self._inverse, -1, -2)
        return q @ self.transform, k @ inverse, self.scale * (log_query + log_key)

    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel: ``exp(scale x.y)``, or what the map inside makes of it; shapes as there."""
        return self._through(self.feature_map.kernel, 1, x, y)

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of the estimate; see the map inside.

        Raises
        ------
        NotImplementedError
            The map inside does not know its own.
        """
        return self._through(self.feature_map.mean, 1, x, y)

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate; see the map inside.

        Raises
        ------
        NotImplementedError
            The map inside does not know its own.
        """
        return self._through(self.feature_map.variance, 2, x, y)

    def _through(self, function: Any, power: int, x: Array, y: Array) -> Array:
        def closed_form(a: Floats, b: Floats) -> Floats:
            a, b, log_factor = self._changed(a, b)
            inside = function(a, b)
            # What is 0 or infinite inside stays so, whatever the factor's exponential is.
            log = np.log(np.abs(inside)) + power * log_factor
            return np.asarray(np.sign(inside) * np.exp(log))

        return self._on_host(closed_form, x, y)
