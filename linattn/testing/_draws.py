"""How the kit draws: maps one after another, and the pairs of vectors where they are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._evidence import (
    MalformedFeaturesError,
    UntestableError,
    check_function,
    name_of,
    on_host,
)
from linattn.typing import Array, ColumnNormalized, FeatureMap, Features, SeparateDenominator

Floats = NDArray[np.float64]

MapOrFactory = FeatureMap | Callable[[np.random.Generator], FeatureMap]
"""A map with ``redraw(rng)``, a deterministic map, or ``factory(rng)`` that makes a map."""


class MapSource:
    """Where maps come from: redrawn, made by a factory, or always the same one."""

    def __init__(self, map_or_factory: Any, rng: Seed) -> None:
        self.rng = as_generator(rng)
        self.factory: Callable[[np.random.Generator], Any] | None = None
        if _is_map(map_or_factory):
            self.first = map_or_factory
            if _redraws(map_or_factory, self.rng):
                self.factory = map_or_factory.redraw
            elif getattr(map_or_factory, "projection", None) is not None:
                raise UntestableError(
                    f"map_or_factory must be a map that can be redrawn, or factory(rng) that makes "
                    f"one, got {map_or_factory!r}, whose projection was given: one draw shows "
                    f"nothing of a mean"
                )
        elif callable(map_or_factory):
            self.factory = map_or_factory
            self.first = _first_of(map_or_factory, self.rng)
            if not _is_map(self.first):
                raise TypeError(
                    f"map_or_factory must be a feature map or factory(rng) that returns one, got "
                    f"a callable that returns {type(self.first).__name__}"
                )
        else:
            raise TypeError(
                f"map_or_factory must be a feature map, with num_features, query_features and "
                f"key_features, or factory(rng) that makes one, got {name_of(map_or_factory)}"
            )

    @property
    def is_random(self) -> bool:
        """Whether another draw may be another map."""
        return self.factory is not None

    def draw(self) -> Any:
        """Return the next map."""
        return self.first if self.factory is None else self.factory(self.rng)

    def products(self, x: Array, y: Array, num_draws: int) -> Floats:
        """Return estimates ``(draws, pairs, ...)`` at pairs ``(pairs, ..., 1, d)``."""
        count = num_draws if self.is_random else 1
        return np.stack([feature_products(self.draw(), x, y)[..., 0, 0] for _ in range(count)])


def _is_map(candidate: Any) -> bool:
    if isinstance(candidate, type):
        return False
    return callable(getattr(candidate, "query_features", None)) and callable(
        getattr(candidate, "key_features", None)
    )


def _first_of(factory: Any, rng: np.random.Generator) -> Any:
    """Call a factory; one that does not take an rng is no factory."""
    name = getattr(factory, "__name__", name_of(factory))
    wanted = "map_or_factory must be a feature map or factory(rng) that makes one"
    try:
        inspect.signature(factory).bind(rng)
    except TypeError as error:
        raise TypeError(
            f"{wanted}, got {name}, which does not take one argument: {error}"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    try:
        return factory(rng)
    except (TypeError, ValueError) as error:
        if not isinstance(factory, type):
            raise
        raise TypeError(
            f"{wanted}, got the class {name}; make one, {name}(...): {error}"
        ) from error


def check_map_or(
    feature_map: Any, argument: str, function: Any = None, call: str = "(query, key, value)"
) -> None:
    """Check a map, and the function that may take its place; None stands for not given."""
    if function is not None:
        check_function(argument, function, call)
    if feature_map is None or _is_map(feature_map):
        return
    message = (
        f"feature_map must be a feature map, with num_features, query_features and key_features, "
        f"got {name_of(feature_map)}"
    )
    if isinstance(feature_map, type):
        message += f"; make one, {feature_map.__name__}(...)"
    elif callable(feature_map) and argument:
        message += f"; give a function as {argument}="
    raise TypeError(message)


def _redraws(feature_map: Any, rng: np.random.Generator) -> bool:
    redraw = getattr(feature_map, "redraw", None)
    if redraw is None:
        return False
    try:
        redraw(rng)
    except (AttributeError, NotImplementedError, ValueError):
        return False
    return True


def checked_features(feature_map: Any, side: str, x: Array) -> Features:
    """Call ``query_features`` or ``key_features``, and check the form of what comes.

    Raises
    ------
    MalformedFeaturesError
        Not a pair of a log and values, one of them None at most, or not a row for each vector.
    """
    what = f"{type(feature_map).__name__}.{side}"
    features = getattr(feature_map, side)(x)
    if not (isinstance(features, tuple) and len(features) == 2):
        raise MalformedFeaturesError(
            f"{what} must return Features(log, values), got {type(features).__name__}; for an "
            f"array of features return Features(None, array), for the logarithms of features "
            f"Features(logarithms, None)"
        )
    log, values = features
    widths = {"log": log, "values": values}
    for name, part in widths.items():
        if part is not None and (np.ndim(part) < 2 or np.shape(part)[-2] != x.shape[-2]):
            raise MalformedFeaturesError(
                f"{what} must return {name} of shape (..., {x.shape[-2]}, features) for vectors of "
                f"shape {tuple(x.shape)}, got {np.shape(part)}"
            )
    if log is None and values is None:
        raise MalformedFeaturesError(f"{what} must return a log or values, got None for both")
    if log is not None and values is not None and np.shape(log)[-1] != 1:
        raise MalformedFeaturesError(
            f"{what} must return a log of shape (..., n, 1) beside values, got {np.shape(log)}"
        )
    return Features(log, values)


def width(features: Features) -> int:
    """Count the features of a vector."""
    return int(np.shape(features.log if features.values is None else features.values)[-1])


def _logs_and_values(features: Features) -> tuple[Floats, Floats]:
    """Split features into a log for each row and values of moderate size."""
    values = None if features.values is None else on_host(features.values)
    if features.log is None:
        assert values is not None
        return np.zeros_like(values[..., :1]), values
    log = on_host(features.log)
    row = np.max(log, axis=-1, keepdims=True)
    row = np.where(np.isfinite(row), row, 0.0)
    weights = np.exp(log - row)
    return row, weights if values is None else weights * values


def feature_products(feature_map: Any, x: Array, y: Array) -> Floats:
    """``phi(x) . psi(y)`` of the features themselves, whatever the map's ``estimate`` says."""
    query = checked_features(feature_map, "query_features", x)
    key = checked_features(feature_map, "key_features", y)
    if width(query) != width(key):
        raise MalformedFeaturesError(
            f"query_features and key_features must give as many features, got {width(query)} and "
            f"{width(key)}"
        )
    (log_x, unit_x), (log_y, unit_y) = _logs_and_values(query), _logs_and_values(key)
    products = np.matmul(unit_x, np.swapaxes(unit_y, -1, -2))
    with np.errstate(over="ignore"):
        return np.asarray(products * np.exp(log_x + np.swapaxes(log_y, -1, -2)))


def lead_axes(feature_map: Any, dim: int) -> tuple[int, ...]:
    """Leading axes of a map's own parameters (heads), () for most maps."""
    log, values = checked_features(feature_map, "key_features", np.zeros((1, dim)))
    return tuple(np.shape(log if values is None else values)[:-2])


SIDES = ("query_features", "key_features")


def feature_rows(feature_map: Any, side: str, x: Array) -> Floats:
    """Features of moderate vectors as numbers."""
    log, values = _logs_and_values(checked_features(feature_map, side, x))
    return np.asarray(values * np.exp(log))


def has_negative_features(feature_map: Any, dim: int) -> bool:
    """Whether some features of moderate vectors are negative, so that sums of them may cancel."""
    x = np.random.default_rng(0).standard_normal((33, dim))
    return any(np.nanmin(feature_rows(feature_map, side, x)) < 0 for side in SIDES)


def has_positions(feature_map: Any, dim: int) -> bool:
    """Whether one vector has other features at another position."""
    rows = feature_rows(feature_map, "key_features", np.full((3, dim), 0.5))
    return not np.allclose(rows, rows[..., :1, :], rtol=1e-9, atol=0)


def need_pair_kernel(feature_map: Any) -> None:
    """Raise an error for maps whose estimate for a pair depends on other keys."""
    spec, name = _query_spec(feature_map), type(feature_map).__name__
    if isinstance(spec, ColumnNormalized):
        raise UntestableError(
            f"the weights of {name} depend on all keys, each column being divided by its own "
            f"normalizer: a pair has no estimate of its own"
        )
    if isinstance(spec, SeparateDenominator):
        raise UntestableError(
            f"{name} has features for numerators and others for denominators: a pair has two "
            f"estimates"
        )


def need_one_denominator(feature_map: Any) -> None:
    """Refuse maps whose denominators are not the sums of the weights of their numerators."""
    if isinstance(_query_spec(feature_map), SeparateDenominator):
        raise UntestableError(f"{type(feature_map).__name__} divides by the sum of other weights")


def _query_spec(feature_map: Any) -> Any:
    make_spec = getattr(feature_map, "query_spec", None)
    if make_spec is None:
        return None
    x = np.zeros((1, 1))
    xp = array_api_compat.array_namespace(x)
    return make_spec(xp, xp.float64, array_api_compat.device(x))


def standard_pairs(dim: int, scale: float, seed: int) -> tuple[Floats, Floats]:
    r"""Pairs of vectors at which the kit tests a mean or a variance, unless it is given others.

    Parameters
    ----------
    dim : int
        d.
    scale : float
        Of the map; 1 for maps that have none.
    seed : int
        Of the directions in general position; messages name it.

    Returns
    -------
    x, y : ndarray, (P, d)
        P is 8, and one more for each power of 2 between 1 and d.

    Raises
    ------
    TypeError, ValueError
        A dim that is not a positive integer, a scale that is not positive.

    Notes
    -----
    ``scale |x + y|^2 <= 1/2``, or ``y = -x``. Along the diagonal with both signs, along the first
    and the last axis, and along the diagonals of the first 2, 4, 8, ... coordinates: rows of a QR
    without its signs have their bias there, whatever their number. In general position with unequal
    norms. And opposite vectors, long ones too, where positive features have no variance.

    Examples
    --------
    >>> from linattn.testing import standard_pairs
    >>> x, y = standard_pairs(dim=4, scale=1.0, seed=0)
    >>> x.shape
    (9, 4)
    """
    _checks.check_positive_int("dim", dim)
    _checks.check_finite_number("scale", scale, positive=True)
    r = np.sqrt(0.5 / scale) / 2
    counts = [2**k for k in range(1, dim.bit_length()) if 2**k < dim]
    diagonals = [np.where(np.arange(dim) < k, 1 / np.sqrt(k), 0.0) for k in (*counts, dim)]
    diagonal = diagonals[-1]
    first, last = np.eye(dim)[0], np.eye(dim)[-1]
    general = np.random.default_rng(seed).standard_normal((4, dim))
    general /= np.linalg.norm(general, axis=-1, keepdims=True)
    along = [*diagonals, -diagonal, first, -last]
    x = [*along, 1.2 * general[0], general[1], diagonal, 4 * general[2]]
    y = [*along, 0.6 * general[3], 0.3 * general[1], -diagonal, -4 * general[2]]
    return r * np.array(x), r * np.array(y)
