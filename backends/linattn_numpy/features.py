"""Features of a block of tokens in buffers: unshifted tile by tile, or the logs of a whole block.

The row term (curvature and log weight) of unshifted features is left out: it goes onto ``[v, 1]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, log
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from linattn.typing import (
    ELU_PLUS_ONE,
    RELU,
    Declined,
    Exact,
    Exponential,
    Pointwise,
    Spec,
    Tokens,
)
from linattn_numpy import limits, tuning
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.products import broadcast_lead, product, transposed
from linattn_numpy.tiles import head_tiles, moveaxis

Supported: TypeAlias = Exponential | Pointwise
"""Specs whose features are made here."""


MIN_ELU = {size: log(2 * least) for size, least in limits.LEAST.items()}
"""Smallest inputs of ``exp`` in ``elu + 1``, if a sample of them has smaller ones."""


class FeatureMaker:
    """Makes the features of tiles of ``n`` tokens, one tile after the other in the same buffer.

    The features are in ``weights``, ``(..., h, n, m / h)``, unshifted: a feature beyond the range
    is inf or 0. A paired map has two sign halves, h = 2, in separate arrays, which take half the
    time of halves of rows. ``factors``, ``(..., m)``: factors of the features. ``by_rows``:
    ``features`` are ``(..., n, h, m / h)``, the halves side by side. ``of_halves``: the weights,
    without the axis of h if the map is not paired.
    """

    weights: Floats

    def __init__(
        self,
        spec: Supported,
        x: Floats,
        n: int,
        name: str,
        *,
        factors: Floats | None = None,
        by_rows: bool = False,
    ) -> None:
        self._spec, self._halves = spec, num_sign_halves(spec)
        *lead, j = _inputs_shape(spec, x)
        shape = (*lead, n, self._halves, j) if by_rows else (self._halves, *lead, n, j)
        self.features = buffer(name, shape, x.dtype)
        self.weights = moveaxis(self.features, -2 if by_rows else 0, -3)
        self._first, self._last = self.weights[..., 0, :, :], self.weights[..., -1, :, :]
        self.of_halves = self.weights if self._halves == 2 else self._first
        self._scaling = None
        if factors is not None:
            factors = factors.reshape(*factors.shape[:-1], self._halves, 1, j)
            whole = np.broadcast_shapes(self.weights.shape, factors.shape)
            self._scaling = self.weights, factors
            if whole != self.weights.shape:
                self.weights = buffer(name + "_scaled", whole, x.dtype)
        self._inputs = name + "_inputs"

    def make(self, x: Floats, *, inspect: bool) -> float:
        """Make the features of a tile; return the log of the largest, at least 0, if inspected.

        Return inf, without features, for an inspected tile that must be max-stabilized.
        """
        spec = self._spec
        if isinstance(spec, Pointwise):
            x = preactivations(spec, x, self._inputs)
        else:
            x = np.matmul(x, spec.P, out=self._first)
        log = _max_log(spec, x) if inspect else 0.0
        if log == inf:
            return log
        if isinstance(spec, Pointwise):
            least = MIN_ELU[x.itemsize]
            if spec.f == ELU_PLUS_ONE and (x if inspect else x[..., ::8, :]).min() < least:
                x = x.clip(least)
            activate(spec, x, self._first)
        else:
            np.exp(x, out=x)
            if self._halves == 2:
                np.divide(1.0, x, out=self._last)
        if self._scaling is not None:
            np.multiply(*self._scaling, out=self.weights)
        return log


def feature_tiles(
    spec: Supported, x: Floats, name: str, *leads: tuple[int, ...]
) -> Iterator[tuple[Any, Any, Floats]]:
    """Yield the features of a block tile by tile, so that they are still in cache when used.

    Yields an index of heads, an index of rows, and the features of these tokens: ``(..., n, m)``,
    or ``(..., 2, n, m / 2)`` of a paired map. The next tile overwrites them.
    """
    makers: dict[tuple[int, ...], FeatureMaker] = {}
    for heads, place in tiles_by_head(spec, x, tuning.TILE_ELEMENTS, 1, *leads):
        tile = x[place]
        maker = makers.get(tile.shape) or FeatureMaker(spec, tile, tile.shape[-2], name)
        makers[tile.shape] = maker
        maker.make(tile, inspect=False)
        yield heads, place, maker.of_halves


def tiles_by_head(
    spec: Supported, x: Floats, elements: int, min_rows: int, *leads: tuple[int, ...]
) -> Sequence[tuple[Any, Any]]:
    """Return indices of heads and of rows, by tiles of at most ``elements`` features.

    If all heads share one map, and all arrays have the same leading axes, a tile is whole heads or
    a part of one head, then without leading axes. Otherwise it is some rows of all heads.
    """
    *lead, m = features_shape(spec, x)
    has_one_map = isinstance(spec.P, float) or spec.P.ndim == 2
    are_apart = has_one_map and all(list(other) == lead for other in (x.shape[:-2], *leads))
    return head_tiles(tuple(lead), x.shape[-2], elements // m, min_rows, are_apart)


def features_shape(spec: Supported, x: Floats) -> tuple[int, ...]:
    """Shape of the features of tokens, without the axis of tokens."""
    *lead, j = _inputs_shape(spec, x)
    return *lead, num_sign_halves(spec) * j


def _inputs_shape(spec: Supported, x: Floats) -> tuple[int, ...]:
    """Shape of the inputs of a map's function, without the axis of tokens."""
    if isinstance(spec.P, float):
        return *x.shape[:-2], x.shape[-1]
    return *broadcast_lead(x.shape[:-2], spec.P.shape[:-2]), spec.P.shape[-1]


def num_sign_halves(spec: Spec | Exact) -> int:
    """2 for a paired map, whose other half of features are reciprocals; else 1."""
    return 2 if isinstance(spec, Exponential) and spec.paired else 1


def _max_log(spec: Supported, u: Floats) -> float:
    """Log of the largest feature, at least 0; inf if the tile must be max-stabilized."""
    low, high = float(u.min()), float(u.max())
    if isinstance(spec, Exponential):
        reach = max(high, -low)
        return reach if reach <= limits.MAX_EXPONENT[u.itemsize] else inf
    # Sums and products of features far from 1 would leave the range of float32.
    is_large = spec.offset != 0.0 or spec.f != RELU or high > 1 / limits.MAX_FEATURE
    if not (is_large and -inf < low and high < limits.MAX_FEATURE):
        return inf
    return log(max(1.0, (max(high, 0.0) + 1 + abs(spec.offset)) * spec.factor))


def are_moderate(spec: Supported, x: Floats) -> Any:
    """Whether a few tokens of each head have small exponents, so that all tokens may have.

    The tokens are in the middle, because windows and sequences are padded at their ends. The
    answer for a head does not depend on the other heads.
    """
    if isinstance(spec, Pointwise):
        return np.True_
    num_rows = max(tuning.MIN_SAMPLED_ROWS, tuning.SAMPLED_ELEMENTS // spec.P.shape[-1])
    start = x.shape[-2] // 2
    u = np.matmul(x[..., start : start + num_rows, :], spec.P)
    limit = tuning.MAX_SAMPLED_SHARE * limits.MAX_EXPONENT[u.itemsize]
    return np.abs(u).max(axis=(-2, -1)) <= limit


def supports(spec: Spec | Exact) -> TypeGuard[Supported]:
    """Whether the features of a spec are made here."""
    return isinstance(spec, Exponential) or supports_pointwise(spec)


def unsupported(*specs: Spec) -> Declined:
    """Say which of these specs are left to the generic code."""
    spec = next(spec for spec in specs if not supports(spec))
    kind = f"Pointwise, {spec.f.name}" if isinstance(spec, Pointwise) else type(spec).__name__
    return Declined(f"no features on NumPy for specs of kind {kind}")


def supports_pointwise(spec: Spec | Exact) -> TypeGuard[Pointwise]:
    """Whether a spec is one of the pointwise maps that are made here."""
    return (
        isinstance(spec, Pointwise)
        and spec.f in (ELU_PLUS_ONE, RELU)
        and spec.quad is None
        and spec.bias is None
        and isinstance(spec.factor, float)
    )


def preactivations(spec: Pointwise, x: Floats, name: str) -> Floats:
    """Return the inputs of a map's function; without P, ``x`` itself."""
    if isinstance(spec.P, float):
        return x if spec.P == 1.0 else np.multiply(x, spec.P, out=buffer(name, x.shape, x.dtype))
    return product(x, spec.P, name)


def activate(spec: Pointwise, u: Floats, out: Floats) -> Floats:
    """Write features into ``out``, which must not overlap the inputs ``u``."""
    if spec.f == RELU:
        _positive(u, out)
    else:
        # exp(u) lies above u + 1, and below 1 where u is negative: the smaller of exp(u) and
        # max(u, 0) + 1 is the function on both sides, even if exp(u) is inf. It comes first,
        # because it computes while u comes from memory.
        np.exp(u, out=out)
        linear = _positive(u, buffer("more", u.shape, u.dtype))
        np.add(linear, 1, out=linear)
        np.minimum(out, linear, out=out)
    if spec.offset != 0.0:
        out += spec.offset
    if spec.factor != 1.0:
        out *= spec.factor
    return out


def least_of(*specs: Spec) -> dict[int, float]:
    """Smallest factors that are not 0, beside unshifted features of these specs."""
    is_low = any(isinstance(spec, Pointwise) and spec.f == ELU_PLUS_ONE for spec in specs)
    return limits.LEAST if is_low else limits.FADED


def floor_of(dtype: Any, *specs: Spec) -> float:
    """`limits.floor_of`, or what it is if features of ``elu + 1`` are at least 2 ``LEAST``."""
    if least_of(*specs) is limits.FADED:
        return limits.floor_of(dtype)
    factors = (spec.factor for spec in specs if isinstance(spec, Pointwise))
    return limits.weights_floor(dtype) * max(1.0, *factors)


def _positive(u: Floats, out: Floats) -> Floats:
    """Put ``max(u, 0)`` into ``out``, by the faster of two ways."""
    if u.size < tuning.MIN_CLIPPED_ELEMENTS:
        return np.maximum(u, 0, out=out)
    return u.clip(0, inf, out=out)


def log_offsets(spec: Supported, dtype: Any) -> Floats:
    """Return the logs of features minus the logs of their unshifted weights, row terms left out."""
    return np.asarray(spec.col) if isinstance(spec, Exponential) else np.zeros(1, dtype)


def row_term(spec: Spec | Exact, tokens: Tokens) -> Floats | None:
    """Log that all features of a token share, ``(..., n, 1)``; None for 0; NaN past range."""
    row: Floats | None = tokens.log_weight
    if isinstance(spec, Exponential):
        x = tokens.x
        curved, factor = (x, spec.Q) if isinstance(spec.Q, float) else (x @ spec.Q, 1.0)
        quad = np.vecdot(x, curved)[..., None] * (-0.5 * factor)
        quad += quad - quad
        row = quad if row is None else quad + row
    return row


def log_features(spec: Exponential, tokens: Tokens, name: str) -> Floats:
    """Full log features of a block, but for ``col``, in a buffer."""
    row = row_term(spec, tokens)
    assert row is not None
    return exponents(spec, tokens.x, row, name)


def exponents(
    spec: Exponential, x: Floats, addend: Floats, name: str, *, ordered_by_feature: bool = False
) -> Floats:
    """Return ``x P + addend``, or ``[x P, -x P] + addend`` for a paired map.

    The result is in a buffer, unless ``addend`` has more leading axes (of a state) than the
    product. ``ordered_by_feature``: the numbers of one feature are adjacent in memory. With many
    tokens, elementwise steps are then fewer and longer.
    """
    r, lead, n = spec.P.shape[-1], broadcast_lead(x.shape[:-2], spec.P.shape[:-2]), x.shape[-2]
    m = r * num_sign_halves(spec)
    u = buffer(name, (*lead, m, n) if ordered_by_feature else (*lead, n, m), x.dtype)
    u = transposed(u) if ordered_by_feature else u
    last = np.matmul(x, spec.P, out=u[..., -r:])
    if not limits.size_bound(x) * limits.size_bound(spec.P) < limits.MAX_READ[x.itemsize]:
        # An exponent may overflow in a part of its sum, and is then not known to be small.
        last += last - last
    lead = broadcast_lead(lead, addend.shape[:-2])
    out = u if lead == u.shape[:-2] else np.empty((*lead, n, m), u.dtype)
    if spec.paired:
        np.add(addend[..., :r], last, out=out[..., :r])
    (np.subtract if spec.paired else np.add)(addend[..., -r:], last, out=out[..., -r:])
    return out


def row_log(spec: Spec, tokens: Tokens, log: Floats, want_log: bool) -> Floats:
    """Log scale of the rows of queries; with ``want_log`` it includes their row terms."""
    if not want_log:
        return log
    row = row_term(spec, tokens)
    if row is not None:
        return log + row
    return np.broadcast_to(log, (*log.shape[:-2], tokens.x.shape[-2], 1))
