"""hypothesis strategies: shapes, scales and an integer seed are drawn, never noise.

Arrays come in any array-API namespace (``xp=``), so that one property runs on every library.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from linattn import feature_maps as maps
from linattn._checks import check_flag
from linattn.sampling import SAMPLERS
from linattn.typing import Array

__all__ = ["feature_maps", "norm_bounded_vectors", "query_key_value"]

_SEEDS = st.integers(0, 2**32 - 1)
_SOFTMAX = (maps.PositiveFeatures, maps.HyperbolicFeatures, maps.TrigonometricFeatures)


def _array(xp: ModuleType, host: Any, dtype: str) -> Array:
    return xp.asarray(host.astype(dtype))


@st.composite
def query_key_value(
    draw: st.DrawFn,
    *,
    xp: ModuleType = np,
    dtype: str = "float64",
    max_length: int = 40,
    max_dim: int = 8,
    dim: int | None = None,
    same_length: bool = False,
    max_scale: float = 3.0,
) -> tuple[Array, Array, Array]:
    """Draw query (..., L, d), key (..., S, d) and value (..., S, e), which belong together.

    Parameters
    ----------
    xp : module, optional
        Array namespace. Default NumPy.
    dtype : str, optional
        Name of a dtype that NumPy has as well. Default "float64".
    max_length, max_dim : int, optional
        Largest L and S; largest d and e. Default 40 and 8.
    dim : int, optional
        d; drawn by default.
    same_length : bool, optional
        L = S, as causal attention needs. Default False.
    max_scale : float, optional
        Largest standard deviation of query and key. Default 3.

    Returns
    -------
    strategy of tuple
        Leading axes are none, a batch, or batch and heads, with axes of 1 in key and value now
        and then (grouped queries). Lengths are at least 1.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from linattn.testing import query_key_value
    >>> @settings(max_examples=5, database=None, deadline=None)
    ... @given(query_key_value(same_length=True))
    ... def test(arrays):
    ...     assert arrays[0].shape[-2] == arrays[1].shape[-2]
    >>> test()
    """
    same_length = check_flag("same_length", same_length)
    lead = draw(st.sampled_from([(), (2,), (2, 3), (1, 2)]))
    grouped = draw(st.booleans())
    key_lead = tuple(1 for _ in lead[-1:]) if grouped and lead else lead[-1:]
    key_lead = (*lead[:-1], *key_lead)
    keys = draw(st.integers(1, max_length))
    queries = keys if same_length else draw(st.integers(1, max_length))
    d = draw(st.integers(1, max_dim)) if dim is None else dim
    e = draw(st.integers(1, max_dim))
    scale = max_scale * draw(st.sampled_from([1.0, 0.0, 0.1, 0.3]))
    rng = np.random.default_rng(draw(_SEEDS))
    query = scale * rng.standard_normal((*lead, queries, d))
    key = scale * rng.standard_normal((*key_lead, keys, d))
    value = rng.standard_normal((*key_lead, keys, e))
    return _array(xp, query, dtype), _array(xp, key, dtype), _array(xp, value, dtype)


@st.composite
def norm_bounded_vectors(
    draw: st.DrawFn,
    *,
    num: int = 3,
    dim: int | None = None,
    max_dim: int = 8,
    max_norm: float = 0.25,
    xp: ModuleType = np,
    dtype: str = "float64",
) -> Array:
    """Draw ``(num, dim)`` vectors by direction and radius, none longer than ``max_norm``.

    Parameters
    ----------
    num : int, optional
        Vectors. Default 3.
    dim : int, optional
        Drawn up to ``max_dim`` by default.
    max_dim : int, optional
        Default 8.
    max_norm : float, optional
        Default 0.25: with ``scale=1`` two of them have ``v = |x + y|^2 <= 1/4``, where tests of
        means are sharp.
    xp : module, optional
        Array namespace. Default NumPy.
    dtype : str, optional
        Name of a dtype that NumPy has as well. Default "float64".

    Returns
    -------
    strategy of array

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from linattn.testing import norm_bounded_vectors
    >>> @settings(max_examples=5, database=None, deadline=None)
    ... @given(norm_bounded_vectors(num=2, dim=4))
    ... def test(vectors):
    ...     assert vectors.shape == (2, 4)
    >>> test()
    """
    d = draw(st.integers(1, max_dim)) if dim is None else dim
    fractions = draw(st.lists(st.sampled_from([1.0, 0.5, 0.1, 0.0]), min_size=num, max_size=num))
    rng = np.random.default_rng(draw(_SEEDS))
    directions = rng.standard_normal((num, d))
    directions /= np.maximum(np.linalg.norm(directions, axis=-1, keepdims=True), 1e-300)
    # Rounding in the cast must not carry a vector over the bound.
    radii = max_norm * (1 - 1e-3) * np.array(fractions)
    return _array(xp, radii[:, None] * directions, dtype)


@st.composite
def feature_maps(
    draw: st.DrawFn,
    *,
    dim: int | None = None,
    max_dim: int = 6,
    samplers: tuple[str, ...] | None = None,
    softmax_kernel: bool | None = None,
) -> maps.BaseFeatureMap:
    """Draw a shipped feature map.

    Parameters
    ----------
    dim : int, optional
        Drawn up to ``max_dim`` by default.
    max_dim : int, optional
        Default 6.
    samplers : tuple of str, optional
        Names of samplers. Default those that are unbiased.
    softmax_kernel : bool, optional
        True for maps of ``exp(scale x.y)`` only, False for others only. Default both.

    Returns
    -------
    strategy of feature map
        With up to three blocks of rows, a whole number or not.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from linattn.testing import feature_maps
    >>> @settings(max_examples=5, database=None, deadline=None)
    ... @given(feature_maps(dim=4))
    ... def test(feature_map):
    ...     assert getattr(feature_map, "dim", None) in (None, 4)
    >>> test()
    """
    if softmax_kernel is not None:
        softmax_kernel = check_flag("softmax_kernel", softmax_kernel)
    d = draw(st.integers(1, max_dim)) if dim is None else dim
    if samplers is None:
        samplers = tuple(sorted(name for name, known in SAMPLERS.items() if known.unbiased))
    rows = draw(st.integers(1, 3 * d))
    common: dict[str, Any] = {
        "sampler": draw(st.sampled_from(samplers)),
        "rng": draw(_SEEDS),
    }
    kinds = ("softmax", "tilted") * (softmax_kernel is not False)
    kinds += ("activation", "coordinates") * (softmax_kernel is not True)
    match draw(st.sampled_from(kinds)):
        case "softmax":
            cls = draw(st.sampled_from(_SOFTMAX))
            m = rows if cls is maps.PositiveFeatures else 2 * rows
            return cls(d, m, scale=draw(st.sampled_from([None, 1.0])), **common)
        case "tilted":
            A = draw(st.sampled_from([0.0, -0.05, -0.2]))
            return maps.GeneralizedExponentialFeatures(d, 2 * rows, A=A, **common)
        case "activation":
            name = draw(st.sampled_from(["relu", "heaviside", "squared_relu"]))
            return maps.ActivationFeatures(d, rows, activation=name, **common)
    return draw(st.sampled_from([maps.EluFeatures, maps.ReluFeatures]))(d)
