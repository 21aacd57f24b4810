"""Weights of keys and pairs beside the map: check their options, return fields of a problem."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import array_api_compat

from linattn import _arrays, _checks
from linattn._driver.options import Options, check_one_sequence
from linattn._driver.specs import innermost
from linattn._generic.specs import peel_affine
from linattn.typing import (
    Array,
    Assigned,
    Corrected,
    Exact,
    ExactKeys,
    Exponential,
    MapSpec,
    RelativeBias,
    Visible,
    Weights,
)


def weights_of(
    xp: ModuleType, arrays: Sequence[Array], dtype: Any, options: Options, sees: Visible
) -> Weights:
    """Check which keys count, and how much, beside the map; not biases of offsets."""
    query, key, _ = arrays
    mask, bias = mask_and_bias(
        xp, key, dtype, options.key_mask, options.key_bias, query_len=query.shape[-2]
    )
    if options.key_lengths is not None:
        inside = _checks.check_key_lengths(options.key_lengths, key, xp)
        mask = inside if mask is None else mask & inside
    return Weights(mask, bias, _log_decay(xp, arrays, dtype, options, sees))


def _log_decay(
    xp: ModuleType, arrays: Sequence[Array], dtype: Any, options: Options, sees: Visible
) -> Array | None:
    """Check how the state decays: with time, or in full attention with distance."""
    if options.log_decay is None:
        return None
    query, key, _ = arrays
    decay = _checks.check_state_decay(options.log_decay, key, xp, dtype)
    if options.exact_clusters is not None and options.exact_window is None:
        raise ValueError(
            f"exact_clusters needs exact_window under log_decay, got exact_clusters="
            f"{options.exact_clusters} alone: near keys, which decay least, must be exact too"
        )
    if options.window_bias is not None:
        raise ValueError(
            "window_bias must be None with log_decay: both are weights of offsets; use one of the "
            "two, softmax_attention for any bias of offsets"
        )
    if not (sees.ahead and options.reads):
        return decay
    lengths = query.shape[-2], key.shape[-2]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"under log_decay query and key must have equal length, got {lengths[0]} and "
            f"{lengths[1]}: they are one sequence, in which weights decay with distance"
        )
    if decay.shape[-2] != 1:
        raise ValueError(
            f"log_decay must be a number or one a head in full attention, where it acts in both "
            f"directions, got shape {tuple(options.log_decay.shape)}, one a token; use is_causal"
        )
    return decay


def mask_and_bias(
    xp: ModuleType, key: Array, dtype: Any, key_mask: Any, key_bias: Any, *, query_len: int
) -> tuple[Array | None, Array | None]:
    """Check which keys count and how much; a key of bias -inf is masked as any other."""
    if key_mask is not None:
        key_mask = _checks.check_key_mask(key_mask, key, xp, query_len=query_len)
    if key_bias is None:
        return key_mask, None
    key_bias = _checks.check_key_bias(key_bias, key, xp, dtype, query_len=query_len)
    counts = key_bias > -xp.inf
    if _arrays.is_lazy(key_bias) or not bool(xp.all(counts)):
        key_mask = counts if key_mask is None else key_mask & counts
    return key_mask, key_bias


# Log weights of offsets ---------------------------------------------------------------------------


def check_relative_bias(
    options: Options, query: Array, lead: tuple[int, ...], dtype: Any
) -> RelativeBias | None:
    """Check the bias of near offsets and the two of farther ones; join them into one table."""
    window_bias, far_bias = options.window_bias, options.far_bias
    if window_bias is None:
        if far_bias is not None:
            raise ValueError(
                "far_bias needs window_bias: it is the bias of the offsets beyond window_bias"
            )
        return None
    xp = _arrays.namespace(query)
    table = _checks.check_array("window_bias", window_bias)
    _checks.check_together("query", query, "window_bias", table)
    _checks.check_log_weights("window_bias", table)
    _check_lead("window_bias", tuple(table.shape[:-1]), lead)
    if table.shape[-1] % 2 == 0:
        raise ValueError(
            f"window_bias must have a last axis of 2 r + 1, for offsets of keys from -r to r, got "
            f"{tuple(table.shape)}"
        )
    table = xp.astype(table, dtype, copy=False)
    ends = (table[..., :1], table[..., -1:])
    if far_bias is not None:
        ends = _far_ends(far_bias, query, lead, dtype)
    shape = _checks.check_leading_axes(
        window_bias=tuple(table.shape[:-1]),
        **{f"far_bias[{i}]": tuple(end.shape[:-1]) for i, end in enumerate(ends)},
    )
    # Dask's expressions have no `broadcast_to`.
    nothing = xp.zeros((*shape, 1), dtype=dtype, device=array_api_compat.device(query))
    return RelativeBias(xp.concat([part + nothing for part in (ends[0], table, ends[1])], axis=-1))


def _far_ends(far_bias: Any, query: Array, lead: tuple[int, ...], dtype: Any) -> Any:
    """Check two biases, numbers or arrays of heads; each gets an axis for its one offset."""
    if not isinstance(far_bias, tuple | list) or len(far_bias) != 2:
        raise TypeError(
            f"far_bias must be a pair (left, right), each a number or an array with one for each "
            f"head, got {far_bias!r}"
        )
    xp, ends = _arrays.namespace(query), []
    for i, end in enumerate(far_bias):
        name = f"far_bias[{i}]"
        # A scalar of NumPy is a number beside any library.
        if array_api_compat.is_array_api_obj(end) and not isinstance(end, numbers.Real):
            _checks.check_together("query", query, name, end)
            _checks.check_log_weights(name, end)
            _check_lead(name, tuple(end.shape), lead)
            ends.append(xp.astype(end, dtype, copy=False)[..., None])
        else:
            left_out = isinstance(end, numbers.Real) and end == -float("inf")
            number = -float("inf") if left_out else _checks.check_finite_number(name, end)
            device = array_api_compat.device(query)
            ends.append(xp.full((1,), number, dtype=dtype, device=device))
    return ends


def _check_lead(name: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    fits = len(shape) <= len(lead) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(lead), strict=False)
    )
    if not fits:
        raise ValueError(
            f"leading axes of {name} must broadcast to those of the output, {lead}, got {shape}"
        )


# Keys that are weighed exactly --------------------------------------------------------------------


def exact_keys(
    arrays: Sequence[Array],
    feature_map: Any,
    specs: tuple[MapSpec, MapSpec],
    options: Options,
    sees: Visible,
) -> ExactKeys:
    """Check which keys are exact beside a map."""
    query, key, _ = arrays
    window, count = options.exact_window, options.exact_clusters
    if window is not None:
        check_one_sequence("exact_window", sees, query, key)
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
    spec, sinks = Exact(feature_map.scale) if is_exact else None, _checked_sinks(options)
    return ExactKeys(window, count, spec, sinks=sinks)


def _checked_sinks(options: Options) -> int:
    """Check sinks of linear attention, whose state holds no single keys."""
    sinks = check_sinks(options.sinks, exact_window=options.exact_window)
    if sinks and options.initial_state is not None:
        raise ValueError(
            f"sinks must be 0 with {options.state_name}, got {options.sinks}: a state has summed "
            f"up the first keys of its stream; merge_outputs adds them to attention over the others"
        )
    return sinks


def check_sinks(sinks: Any, **window: Any) -> int:
    """Check how many first keys are exact, or seen, beside a window of this name."""
    [(name, given)] = window.items()
    if hasattr(sinks, "shape") and sinks.shape:
        raise TypeError(
            f"sinks must be an integer, how many keys from the first one all queries see exactly, "
            f"got an array of shape {tuple(sinks.shape)}; learned logits of sinks are added to the "
            f"log normalizer, see return_log_normalizer"
        )
    count = 0 if sinks is None else _checks.check_positive_int("sinks", sinks, least=0)
    if count and given is None:
        raise ValueError(
            f"sinks must be 0 without {name}, got {sinks}: they are keys outside of a window that "
            f"are read like keys in it"
        )
    return count


def check_reach(bias: RelativeBias | None, exact_window: int | None) -> None:
    """Check that a bias of offsets differs for near keys only."""
    if bias is not None and (exact_window is None or bias.reach > exact_window):
        raise ValueError(
            f"window_bias must have 2 r + 1 numbers with r no larger than exact_window, for keys "
            f"further away have one bias a side, got r = {bias.reach} and "
            f"exact_window={exact_window}; for biases of all pairs use softmax_attention"
        )


def _check_weights(name: str, feature_map: Any, query_spec: MapSpec) -> None:
    """Check that exact keys and others are of one kernel."""
    if not getattr(feature_map, "softmax_kernel", False):
        raise ValueError(
            f"{name} needs a feature map of the softmax kernel exp(scale q.k), so that exact and "
            f"other keys are weighed alike, got {feature_map!r}"
        )
    if isinstance(query_spec, Corrected):
        raise ValueError(
            f"{name} needs a feature map with weights that are not corrected as a whole, got "
            f"{feature_map!r}; fit it with corrected=False"
        )


def _check_clusters(
    query: Array, feature_map: Any, specs: tuple[MapSpec, MapSpec], options: Options
) -> None:
    query_spec, key_spec = map(innermost, specs)
    is_clustered = isinstance(key_spec, Assigned) and key_spec.landmarks is not None
    if not (is_clustered and isinstance(query_spec, Exponential)):
        raise ValueError(
            f"exact_clusters needs a feature map that assigns keys to landmarks, such as "
            f"LandmarkFeatures.fit(query, key), got {feature_map!r}"
        )
    if options.initial_state is not None:
        raise ValueError(
            f"{options.state_name} must be None under exact_clusters, got a state: the keys in it "
            f"are summed up, and cannot be weighed one by one"
        )
    if _arrays.is_lazy(query):
        raise TypeError(
            f"exact_clusters needs arrays whose values can be inspected, to sort keys by cluster, "
            f"got {type(query).__name__}; convert query, key and value to NumPy's or torch's"
        )
