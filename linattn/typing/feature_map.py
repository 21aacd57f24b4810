"""The protocol of a feature map: the methods that it must have, and the optional ones."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from linattn.typing.records import Array, Features
from linattn.typing.specs import MapSpec

__all__ = ["FeatureMap", "MapAttributes"]


@runtime_checkable
class FeatureMap(Protocol):
    """The attributes that a feature map must have; any object with these will do.

    All other attributes that linattn reads are optional: :class:`MapAttributes`. A map may have
    more of its own.

    Examples
    --------
    >>> from linattn.typing import FeatureMap, Features
    >>> class Squares:
    ...     num_features = None
    ...
    ...     def query_features(self, x):
    ...         return Features(None, x**2)
    ...
    ...     key_features = query_features
    >>> isinstance(Squares(), FeatureMap)
    True
    """

    @property
    def num_features(self) -> int | None:
        """Features m; None for as many as the inputs have coordinates."""
        ...

    def query_features(self, x: Array) -> Features:
        """Features of queries ``(..., n, d)``."""
        ...

    def key_features(self, x: Array) -> Features:
        """Features of keys ``(..., n, d)``."""
        ...


class MapAttributes(Protocol):
    """Optional attributes of a feature map; each may be there without the others.

    Examples
    --------
    >>> import linattn
    >>> phi = linattn.feature_maps.PositiveFeatures(8, num_features=16, rng=0)
    >>> phi.dim, phi.positive, phi.unbiased, phi.causal
    (8, True, True, True)
    """

    @property
    def dim(self) -> int | None:
        """Coordinates d of the inputs, which are checked; None (the default) for any number."""
        ...

    @property
    def scale(self) -> float:
        """Scale of the logits, by default 1; a window and a change of coordinates need it."""
        ...

    @property
    def softmax_kernel(self) -> bool:
        """Whether ``phi(q).psi(k)`` is about ``exp(scale q.k)``, size included; default False.

        Only then may near keys be exact beside it.
        """
        ...

    @property
    def causal(self) -> bool:
        """Whether the map may be used causally: it has not seen the sequence; default True."""
        ...

    @property
    def positive(self) -> bool:
        """Whether no feature is negative, so that no denominator is and none is counted.

        A map without this attribute may be signed: calls warn where denominators are negative.
        """
        ...

    @property
    def unbiased(self) -> bool:
        """Whether ``estimate`` has ``kernel`` as its mean, for the kit and the diagnostics."""
        ...

    @property
    def sampler(self) -> Any:
        """Name or record of the sampler that drew the projection, for the test kit."""
        ...

    @property
    def projection(self) -> Any:
        """Rows that were drawn; a map with rows that were given cannot be redrawn, says the kit."""
        ...

    @property
    def feature_map(self) -> FeatureMap:
        """The map inside, of one that only changes coordinates, for the diagnostics."""
        ...

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the query side, from which backends evaluate it; only with ``key_spec``.

        Without the two the methods of :class:`FeatureMap` are called on blocks of tokens.
        """
        ...

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the key side."""
        ...

    def fingerprint(self) -> str:
        """Return another string for every map that gives other features.

        A state stores a hash of it, by which a call with another map is rejected. Each check of a
        state calls this method.
        """
        ...

    def kernel(self, x: Array, y: Array) -> Array:
        """Kernel ``(..., n, s)`` that the features approximate."""
        ...

    def estimate(self, x: Array, y: Array) -> Array:
        """Estimate of the kernel by these features."""
        ...

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of the estimate over draws."""
        ...

    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of the estimate over draws."""
        ...

    def redraw(self, rng: Any) -> FeatureMap:
        """Return the map as another draw."""
        ...
