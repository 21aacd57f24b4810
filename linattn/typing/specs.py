"""Specs: feature maps described as records, which every backend evaluates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

from linattn.typing._shifts import largest
from linattn.typing.records import Array, Features, Tokens, one_line

__all__ = [
    "ELU_PLUS_ONE",
    "HEAVISIDE",
    "RELU",
    "SQUARED_RELU",
    "Activation",
    "Affine",
    "Assigned",
    "ColumnNormalized",
    "Corrected",
    "Exact",
    "Exponential",
    "MapSpec",
    "Normalized",
    "Opaque",
    "Pointwise",
    "SeparateDenominator",
    "Spec",
]


@dataclass(frozen=True)
class Activation:
    """A named pointwise function of a :class:`Pointwise` spec.

    A backend recognizes a function by the whole record (``spec.f == RELU``), and never by its name,
    which a caller may choose freely. A copy of a record is equal to it.

    Attributes
    ----------
    name : str
        Name in messages.
    apply : callable
        ``apply(u, xp) -> (values, log)``: ``f(u) = values * exp(log)``, log ``(..., n, 1)`` or
        None. It may widen the last axis (cosine and sine).
    vjp : callable or None
        ``vjp(u, g, xp) -> grad_u``: the cotangent of ``f(u)``, given as ``g * exp(-log)``, pulled
        back to u. None where f has no derivative to use.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Activation, Pointwise
    >>> square = Activation("square", lambda u, xp: (u * u, None), lambda u, g, xp: 2 * u * g)
    >>> Pointwise(square, np.ones((8, 16))).f.name
    'square'
    """

    __repr__ = one_line

    name: str
    apply: Callable[[Array, ModuleType], tuple[Array, Array | None]]
    vjp: Callable[[Array, Array, ModuleType], Array] | None = None


def _elu_plus_one(u: Array, xp: ModuleType) -> tuple[Array, Array]:
    # A row of large negative numbers would underflow to no feature at all; its largest
    # coordinate goes to the log, which is 0 for every row that has a positive one.
    row = largest(u, keepdims=True)
    zero = xp.zeros_like(u)
    log = xp.minimum(row, xp.zeros_like(row))
    # No minimum: of two equal numbers autograd gives each half of the gradient.
    return xp.where(u > 0, u + 1, xp.exp(xp.where(u > 0, zero, u) - log)), log


def _relu(u: Array, xp: ModuleType) -> tuple[Array, None]:
    return xp.maximum(u, xp.zeros_like(u)), None


def _heaviside(u: Array, xp: ModuleType) -> tuple[Array, None]:
    # What is not finite has no sign: NaN, where a comparison would give a plausible 0 or 1.
    return xp.where(u > 0, xp.ones_like(u), xp.zeros_like(u)) + (u - u), None


def _squared_relu(u: Array, xp: ModuleType) -> tuple[Array, None]:
    positive = xp.maximum(u, xp.zeros_like(u))
    return positive * positive, None


def _elu_plus_one_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    # Where a row's log is not 0 no coordinate is positive, and the derivative is the value.
    values, _ = _elu_plus_one(u, xp)
    return g * xp.where(u > 0, xp.ones_like(u), values)


def _relu_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    return xp.where(u > 0, g, xp.zeros_like(u))


def _squared_relu_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    return 2 * g * xp.maximum(u, xp.zeros_like(u))


ELU_PLUS_ONE = Activation("elu_plus_one", _elu_plus_one, _elu_plus_one_vjp)
"""``u + 1`` where u > 0, ``exp(u)`` elsewhere."""


HEAVISIDE = Activation("heaviside", _heaviside)
"""1 where u > 0, 0 elsewhere; it has no gradient."""


RELU = Activation("relu", _relu, _relu_vjp)
"""``max(u, 0)``."""


SQUARED_RELU = Activation("squared_relu", _squared_relu, _squared_relu_vjp)
"""``max(u, 0)^2``."""


@dataclass(frozen=True, eq=False)
class Exponential:
    """Spec of a positive exponential map: ``log phi = x P - x.(Q x) / 2 + col``.

    Attributes
    ----------
    P : Array
        ``(..., d, r)``, r = m, or m / 2 when paired.
    Q : float or Array
        The curvature: a number, or ``(..., d, d)``.
    col : Array
        ``(..., m)``: ``-log(m) / 2``, log importance weights and the like.
    paired : bool
        Whether the second half of the columns uses ``-P``.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.PositiveFeatures(8, num_features=16, rng=0)
    >>> phi.query_spec(np, np.float32, None)
    Exponential(P=<float32 (8, 16)>, Q=0.3536, col=<float32 (16,)>, paired=False)
    """

    __repr__ = one_line

    P: Array
    Q: Array | float
    col: Array
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Pointwise:
    """Spec of a pointwise map: ``phi = factor * (f(x P + bias) + offset) * exp(quad |x|^2)``.

    Attributes
    ----------
    f : Activation
        The function.
    P : Array or float
        ``(..., d, r)``, or a number that multiplies every coordinate (no projection).
    bias : Array or None
        ``(..., r)``.
    quad : float or None
        The curvature of the row's log.
    offset : float
        Added to every feature; only for activations whose log is None.
    factor : float or Array
        Multiplies every feature, or each column, ``(..., m)``.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> spec = linattn.feature_maps.ReluFeatures().query_spec(np, np.float32, None)
    >>> spec.f == linattn.typing.RELU, spec.P
    (True, 1.0)
    """

    __repr__ = one_line

    f: Activation
    P: Array | float
    bias: Array | None = None
    quad: float | None = None
    offset: float = 0.0
    factor: Array | float = 1.0


@dataclass(frozen=True, eq=False)
class Opaque:
    """Spec of a map that only the map itself can evaluate.

    Attributes
    ----------
    fn : callable
        ``fn(tokens) -> Features``. It need not know about ``tokens.log_weight``, which is added
        outside.
    vjp : callable or None
        ``vjp(tokens, cotangent) -> grad_x``: the cotangents of what ``fn`` returned, a
        ``Features``, pulled back to ``tokens.x``. ``cotangent.values`` is None where the values
        are; ``cotangent.log`` is None where it is zero. None: the map has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Features, Opaque, Tokens
    >>> spec = Opaque(lambda tokens: Features(None, tokens.x**2))
    >>> spec.fn(Tokens(np.ones((5, 8)), None, 0))
    Features(log=None, values=<float64 (5, 8)>)
    """

    __repr__ = one_line

    fn: Callable[[Tokens], Features]
    vjp: Callable[[Tokens, Features], Array] | None = None


@dataclass(frozen=True, eq=False)
class Assigned:
    """Spec of a sparse key side: each key has one feature, at the column it is assigned to.

    The column is ``a = argmax_c (x P + bias)_c`` and its log feature
    ``log sum_i exp((x probes)_i + offset_i + table_ia)``; all other features are 0. With
    ``dense`` the p terms ``exp(x probes + offset)`` follow as columns of their own.

    Attributes
    ----------
    P : Array
        ``(..., d, m)``.
    bias : Array
        ``(..., m)``; -inf for a column that takes no key.
    probes : Array
        ``(..., d, p)``.
    offset : Array
        ``(..., p)``.
    table : Array
        ``(..., p, m)``, finite.
    dense : bool
        Whether there are m + p columns.
    landmarks : Array or None
        ``(..., m, d)``: landmark of each column, if keys may also be weighed exactly.
    metric : Array or None
        ``(..., d, d)``: symmetric metric of the distances to landmarks.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, _ = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=16, rng=0)
    >>> spec = phi.key_spec(np, np.float64, None)
    >>> spec.P.shape, spec.table.shape
    ((8, 16), (50, 16))
    """

    __repr__ = one_line

    P: Array
    bias: Array
    probes: Array
    offset: Array
    table: Array
    dense: bool = False
    landmarks: Array | None = None
    metric: Array | None = None


@dataclass(frozen=True, eq=False)
class Normalized:
    """Spec of an exponential map divided by its own sum over the columns, to a power.

    ``log phi = u - power log sum_r exp(u_r) + x.tilt`` with ``u = x P + col``.

    Attributes
    ----------
    P : Array
        ``(..., d, m)``.
    col : Array
        ``(..., m)``.
    power : Array
        ``(..., 1, 1)``.
    tilt : Array
        ``(..., d, 1)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Normalized
    >>> rng = np.random.default_rng(0)
    >>> P, tilt = rng.standard_normal((8, 16)), np.zeros((8, 1))
    >>> Normalized(P, np.zeros(16), np.ones((1, 1)), tilt).power.shape
    (1, 1)
    """

    __repr__ = one_line

    P: Array
    col: Array
    power: Array
    tilt: Array


@dataclass(frozen=True, eq=False)
class Affine:
    """A change of coordinates before a spec: ``x' = (x - shift) transform``, and a log weight.

    The driver applies it to the tokens, so that block bodies only ever see the spec inside.

    Attributes
    ----------
    spec : Spec
        The spec that is evaluated at ``x'``.
    shift : Array
        ``(..., 1, d)``.
    transform : Array
        ``(..., d, d)``.
    weight : Array
        ``(..., d, 1)``: the log weight of a token is ``(x - shift).weight + offset``.
    offset : Array
        ``(..., 1, 1)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import RELU, Affine, Pointwise
    >>> shift, weight = np.zeros((1, 8)), np.zeros((8, 1))
    >>> spec = Affine(Pointwise(RELU, 1.0), shift, 2 * np.eye(8), weight, np.zeros((1, 1)))
    >>> spec.transform.shape
    (8, 8)
    """

    __repr__ = one_line

    spec: Spec
    shift: Array
    transform: Array
    weight: Array
    offset: Array


@dataclass(frozen=True, eq=False)
class ColumnNormalized:
    """Spec of a column-normalized read: every column of the state divided by its own normalizer.

    ``out = sum_r phi_r (kv_r / z_r) / sum_r phi_r`` over the columns that have seen a key. The
    driver divides: block bodies only ever see the spec inside and a divided state, and are not
    asked for causal blocks.

    Attributes
    ----------
    spec : Spec
        Spec of the queries; exponential (``values`` None), as the key side is.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import ColumnNormalized, Exponential
    >>> ColumnNormalized(Exponential(np.ones((8, 16)), 0.0, np.zeros(16))).spec.paired
    False
    """

    __repr__ = one_line

    spec: Spec


@dataclass(frozen=True, eq=False)
class Corrected:
    """Spec of queries that read a least-squares correction of the state, under a guard.

    The state has m + p columns, the spec inside m. With ``N = diag(exp(half_log))``, S the first m
    columns of the state and Y the others, queries read ``S_1 = N^-1 matrix [N S, Y]``. A query for
    which it cannot be trusted reads S. The driver does both: block bodies only ever see the spec
    inside and a state of m columns, and are not asked for causal blocks.

    Attributes
    ----------
    spec : Spec
        Spec of the queries; exponential (``values`` None), as the key side is.
    half_log : Array
        ``(..., m)``.
    matrix : Array
        ``(..., m, m + p)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Corrected, Exponential
    >>> spec = Exponential(np.ones((8, 16)), 0.0, np.zeros(16))
    >>> Corrected(spec, np.zeros(16), np.ones((16, 48))).matrix.shape
    (16, 48)
    """

    __repr__ = one_line

    spec: Spec
    half_log: Array
    matrix: Array


@dataclass(frozen=True, eq=False)
class SeparateDenominator:
    """Spec of queries that read numerators and denominators from different features.

    Numerators come from the first half of the features, denominators from the second. The driver
    separates them: block bodies only ever see the spec inside, and are not asked for causal blocks.

    Attributes
    ----------
    spec : Spec
        Spec of the queries, both halves.

    Examples
    --------
    >>> from linattn.typing import RELU, Pointwise, SeparateDenominator
    >>> SeparateDenominator(Pointwise(RELU, 1.0)).spec.f == RELU
    True
    """

    __repr__ = one_line

    spec: Spec


@dataclass(frozen=True)
class Exact:
    """Spec of exact attention with weights ``exp(scale q.k)``: no features, no state.

    Attributes
    ----------
    scale : float
        Multiplies every logit.

    Examples
    --------
    >>> from linattn.typing import Exact
    >>> Exact(0.125)
    Exact(scale=0.125)
    """

    scale: float


Spec: TypeAlias = Exponential | Pointwise | Assigned | Normalized | Opaque


MapSpec: TypeAlias = Spec | Affine | ColumnNormalized | Corrected | SeparateDenominator
"""Specs that a feature map may return for a side; block bodies are given a ``Spec``."""
