"""What an object must have to be a feature map."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from linattn.typing.records import Array, Features

__all__ = ["FeatureMap"]


@runtime_checkable
class FeatureMap(Protocol):
    """What linear attention needs of a feature map; any object with these will do.

    ``num_features`` is the number of columns, None meaning "as many as the inputs have
    coordinates". A map that has ``query_spec(xp, dtype, device)`` and ``key_spec(...)`` as well is
    evaluated by the backends from those records; otherwise the two methods here are called on
    blocks of tokens. A method ``fingerprint()`` that returns a string, another one for every map
    that gives other features, lets states be told from those of other maps; it is called whenever
    a state is checked.
    """

    @property
    def num_features(self) -> int | None:
        """Columns m."""
        ...

    def query_features(self, x: Array) -> Features:
        """Features of queries ``(..., n, d)``."""
        ...

    def key_features(self, x: Array) -> Features:
        """Features of keys ``(..., n, d)``."""
        ...
