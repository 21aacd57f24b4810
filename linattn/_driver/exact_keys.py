"""Which keys a query weighs exactly beside a map: near ones, and those of chosen clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linattn import _arrays, _checks
from linattn._driver.options import Options
from linattn._driver.relative_bias import check_relative_bias
from linattn._driver.visibility import Visibility
from linattn._driver.wrappers import innermost, peel_affine
from linattn.typing import (
    Array,
    Assigned,
    Corrected,
    Exact,
    Exponential,
    MapSpec,
    RelativeBias,
)

__all__ = ["exact_fields"]


def exact_fields(
    arrays: Sequence[Array],
    dtype: Any,
    feature_map: Any,
    specs: tuple[MapSpec, MapSpec],
    options: Options,
    sees: Visibility,
) -> dict[str, Any]:
    """Fields of a problem that say which keys are exact, and what near and far ones weigh more."""
    query, key, _ = arrays
    window, count = options.exact_window, options.exact_clusters
    if window is not None:
        sees.check_one_sequence("exact_window", query, key)
        # A window longer than the sequence is all of it, and need not be filled up.
        longest = max(1, int(query.shape[-2]), int(key.shape[-2]))
        window = min(_checks.check_positive_int("exact_window", window), longest)
    if count is not None:
        count = _checks.check_positive_int("exact_clusters", count)
    for name, given in (("exact_window", window), ("exact_clusters", count)):
        if given is not None:
            _check_weights(name, feature_map, peel_affine(specs[0])[0])
    if count is not None:
        _check_clusters(query, feature_map, specs, options)
        count = min(count, feature_map.num_features)
    is_exact = window is not None or count is not None
    near_spec = Exact(feature_map.scale) if is_exact else None
    return {
        "exact_window": window,
        "exact_clusters": count,
        "near_spec": near_spec,
        "relative_bias": _checked_bias(arrays, dtype, options),
    }


def _checked_bias(arrays: Sequence[Array], dtype: Any, options: Options) -> RelativeBias | None:
    """Check a bias of offsets, of which only those of near keys may differ."""
    names = "query", "key", "value"
    leads = {name: tuple(x.shape[:-2]) for name, x in zip(names, arrays, strict=True)}
    bias = check_relative_bias(
        options.window_bias,
        options.far_bias,
        query=arrays[0],
        lead=_checks.check_leading_axes(**leads),
        dtype=dtype,
    )
    if bias is None:
        return None
    if options.exact_window is None or bias.reach > options.exact_window:
        message = (
            f"window_bias must have 2 r + 1 numbers with r no larger than exact_window, for keys "
            f"further away have one bias a side, got r = {bias.reach} and "
            f"exact_window={options.exact_window}; for biases of all pairs use softmax_attention"
        )
        raise ValueError(message)
    return bias


def _check_weights(name: str, feature_map: Any, query_spec: MapSpec) -> None:
    """Check that exact keys and others are of one kernel."""
    if not getattr(feature_map, "softmax_kernel", False):
        message = (
            f"{name} needs a feature map of the softmax kernel exp(scale q.k), so that exact and "
            f"other keys are weighed alike, got {feature_map!r}"
        )
        raise ValueError(message)
    if isinstance(query_spec, Corrected):
        message = (
            f"{name} needs a feature map with weights that are not corrected as a whole, got "
            f"{feature_map!r}; fit it with corrected=False"
        )
        raise ValueError(message)


def _check_clusters(
    query: Array, feature_map: Any, specs: tuple[MapSpec, MapSpec], options: Options
) -> None:
    query_spec, key_spec = map(innermost, specs)
    is_clustered = isinstance(key_spec, Assigned) and key_spec.landmarks is not None
    if not (is_clustered and isinstance(query_spec, Exponential)):
        message = (
            f"exact_clusters needs a feature map that assigns keys to landmarks, such as "
            f"LandmarkFeatures.fit(query, key), got {feature_map!r}"
        )
        raise ValueError(message)
    if options.state is not None:
        message = (
            f"{options.state_name} must be None under exact_clusters, got a state: the keys in it "
            f"are summed up, and cannot be weighed one by one"
        )
        raise ValueError(message)
    if _arrays.is_lazy(query):
        message = (
            f"exact_clusters needs arrays whose values can be inspected, to sort keys by cluster, "
            f"got {type(query).__name__}; convert query, key and value to NumPy's or torch's"
        )
        raise TypeError(message)
