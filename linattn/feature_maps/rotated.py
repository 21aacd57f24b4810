"""Rotation behind the map, as in RoFormer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from linattn import _arrays, _checks
from linattn._driver.problem import check_feature_map, map_specs
from linattn._generic import evaluate, spec_lead
from linattn._numerics import finite_shift
from linattn.feature_maps._base import BaseFeatureMap
from linattn.positions import rotary
from linattn.typing import (
    Array,
    ColumnNormalized,
    Corrected,
    FeatureMap,
    Features,
    MapSpec,
    Opaque,
    SeparateDenominator,
    Tokens,
)

__all__ = ["RotatedFeatures"]


class RotatedFeatures(BaseFeatureMap):
    r"""Any map with its features rotated by the position, in numerators only.

    .. math::
        o_i = \frac{\sum_j R_i \phi(q_i) \cdot R_j \psi(k_j) \, v_j}
        {\sum_j \phi(q_i) \cdot \psi(k_j)}

    with the rotation R of :func:`linattn.positions.rotary`. Letters: ``m`` features of the map
    inside.

    Parameters
    ----------
    feature_map : FeatureMap
        The map inside, with an even number of features. Best a positive one: denominators are its.
    base : float, optional
        As for :func:`linattn.positions.rotary`. Default 10,000.

    Attributes
    ----------
    feature_map, base
        As above.
    dim : int or None
        As in the map inside.
    num_features : int
        2 m: the rotated features, from which numerators are read, then the features without
        rotation, for denominators. A state has both.
    positive : bool
        False: a rotated product may be negative, so that weights of both signs occur, and a row's
        do not add up to 1. An output is no average of the values.
    unbiased, causal : bool
        What may be relied on.

    Raises
    ------
    TypeError, ValueError
        Not a feature map, or one without a number of features of its own; an odd number of them; a
        map with parameters for each head, or whose reads are column-normalized or corrected; a base
        that is not positive.

    Notes
    -----
    Positions count from 0, or from ``state.length`` where a state is given, as for
    :class:`CosformerFeatures`: a sequence that is to follow another has to be added to its state.
    With ``is_causal="lower_right"`` the last query stands where the last key does.

    It is not softmax attention with rotary embeddings: for that rotate queries and keys first, by
    :func:`linattn.positions.rotary`, and give them to any map. Time and memory are twice as much as
    for the map inside, and causal blocks always go by divide and conquer. No gradient of linattn's
    own.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), eq. 19.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures, RotatedFeatures
    >>> RotatedFeatures(EluFeatures(64))
    RotatedFeatures(feature_map=EluFeatures(dim=64, scale=1.0), base=10000.0)
    """

    positive = False
    unbiased = True
    """Whether ``estimate`` equals ``kernel``, as in the map inside."""
    _parameters = ("feature_map", "base")

    feature_map: Any
    num_features: int
    base: float

    def __init__(self, feature_map: FeatureMap, *, base: float = 10_000) -> None:
        check_feature_map(feature_map)
        m = feature_map.num_features
        if m is None or m % 2:
            raise ValueError(
                f"feature_map must have an even num_features, which are rotated in pairs, got {m}; "
                f"give the map a dim or num_features that is even"
            )
        for spec in map_specs(feature_map, np, np.float64, "cpu"):
            if isinstance(spec, ColumnNormalized | Corrected | SeparateDenominator):
                raise TypeError(
                    f"feature_map must be a map that is read feature by feature, got "
                    f"{feature_map!r}, whose reads are {type(spec).__name__}"
                )
            if spec_lead(spec):
                raise ValueError(
                    f"feature_map must have one set of parameters for all heads, got one for each "
                    f"of {spec_lead(spec)}"
                )
        self._set(
            feature_map=feature_map,
            base=_checks.check_finite_number("base", base, positive=True),
            dim=getattr(feature_map, "dim", None),
            num_features=2 * m,
            scale=getattr(feature_map, "scale", 1.0),
            causal=getattr(feature_map, "causal", True),
        )

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the query side, which tells numerators from denominators."""
        return SeparateDenominator(self._both_halves(0, xp, dtype, device))

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the key side: rotated features, then features without rotation."""
        return self._both_halves(1, xp, dtype, device)

    def _both_halves(self, side: int, xp: ModuleType, dtype: Any, device: Any) -> Opaque:
        inside = map_specs(self.feature_map, xp, dtype, device)[side]

        def features(tokens: Tokens) -> Features:
            log, values = evaluate(inside, tokens._replace(log_weight=None))
            if values is None:
                row = finite_shift(xp.max(log, axis=-1, keepdims=True), xp)
                log, values = row, xp.exp(log - row)
            # A traced position has no value.
            count = np if isinstance(tokens.start, int) else xp
            positions = count.arange(values.shape[-2]) + tokens.start
            rotated = rotary(values, positions, base=self.base)
            return Features(log, xp.concat([rotated, values], axis=-1))

        return Opaque(features)

    def kernel(self, x: Array, y: Array) -> Array:
        """Weights of numerators, x at positions 0..n-1 and y at 0..s-1.

        ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """
        return self.estimate(x, y)

    @_arrays.on_array_device
    def estimate(self, x: Array, y: Array) -> Array:
        """Return the weights of numerators; see :meth:`kernel`."""
        xp, (x, y) = self._check(x=x, y=y)
        m = self.num_features // 2
        (log_x, rows_x), (log_y, rows_y) = self.query_features(x), self.key_features(y)
        products = xp.matmul(rows_x[..., :m], xp.matrix_transpose(rows_y[..., :m]))
        scale = xp.exp(log_x + xp.matrix_transpose(log_y))
        return xp.astype(products * scale, x.dtype, copy=False)
