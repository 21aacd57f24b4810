"""Attention as layers of transformers call it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from linattn.functional import linear_attention, softmax_attention
from linattn.interop import torch as of_torch
from linattn.interop._visibility import Visibility
from linattn.interop.transformers._cache import StateLayer
from linattn.interop.transformers._masks import EAGER, KEYS, MaskOfPairs, given_mask, reject
from linattn.typing import FeatureMap


class _Call(NamedTuple):
    """Arguments of one attention. Queries are (batch, H, L, d), or (batch, G, H / G, L, d)."""

    query: Any
    key: Any
    value: Any
    options: dict[str, Any]
    """Of :func:`linattn.softmax_attention`, masks included."""
    scale: float
    mask: Visibility
    cache: StateLayer | None
    extra: dict[str, Any]
    """Sinks and biases."""


# Tensors that a layer may give. Those that are not for attention have done their work in the mask.
_KNOWN = {"s_aux", "position_bias", "position_ids", "token_type_ids", "mm_token_type_ids"}
_KNOWN |= {"cache_position", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k"}


def attend_in_layer(
    attend: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    **given: Any,
) -> tuple[Any, None]:
    """Attend. Called by the layers of transformers, with these names."""
    for problem, is_there in {
        "dropout of attention weights": given.get("dropout"),
        "softcap of logits": given.get("softcap") is not None,
        "output_attentions": given.get("output_attentions"),
    }.items():
        if is_there:
            reject(problem, f"switch it off, or {EAGER}")
    for name, array in given.items():
        if isinstance(array, torch.Tensor) and name not in _KNOWN:
            reject(f"keyword {name}=, which a layer gave a tensor of shape {tuple(array.shape)}")
    cache = given.get("linattn_layer") or getattr(key, "_linattn_layer", None)
    if isinstance(attention_mask, MaskOfPairs):
        _check_sizes(attention_mask, query, key, cache)
        mask = attention_mask.said
    else:
        mask = given_mask(attention_mask, module, query, key, given.get("is_causal"))
    extra = {name: given.get(name) for name in ("s_aux", "position_bias")}
    scale = given.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    packed = given.get("cu_seq_lens_q")
    if packed is not None and len(packed) > 2 and "cu_seqlens" not in mask.options:
        reject("cu_seq_lens_q= without position_ids=", "pass both, and use_cache=False")
    if given.get("sliding_window"):
        mask = mask._replace(is_window=True)
    shape, before = (*query.shape[:-1], value.shape[-1]), mask.before
    query = torch.nn.functional.pad(query, (0, 0, before, 0)) if before else query
    out = attend(_call(query, key, value, mask, scale, cache, extra))
    if mask.is_flat:
        out = out.unflatten(-2, (query.shape[0], query.shape[-2])).movedim(-3, 0)
    out = out[..., before:, :].reshape(shape)
    return out.transpose(1, 2).contiguous(), None


def _check_sizes(mask: Any, query: Any, key: Any, cache: Any) -> None:
    found = query.shape[-2], key.shape[-2] + (cache.before if cache else 0)
    if found != tuple(mask.shape[-2:]):
        problem = f"queries and keys of lengths {found} beside a mask of {tuple(mask.shape[-2:])}"
        if cache is None:
            reject(problem)
        reject(
            f"StateCache for {problem}",
            f"{KEYS}, or in an encoder-decoder EncoderDecoderCache(StateCache(), DynamicCache())",
        )


def _call(
    query: Any, key: Any, value: Any, mask: Visibility, scale: float, cache: Any, extra: Any
) -> _Call:
    """Group heads; give masks the axes of heads."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        query = query.unflatten(1, (key.shape[1], group))
        key, value = key.unsqueeze(2), value.unsqueeze(2)
    options, keys = dict(mask.options), mask.key_mask
    if mask.is_flat:
        query, key, value = (x.movedim(0, -3).flatten(-3, -2) for x in (query, key, value))
        keys = None if keys is None else keys.reshape(1, -1)
    elif cache is not None:
        keys = None if keys is None else keys[:, -key.shape[-2] :]
    elif mask.num_keys < key.shape[-2]:
        key, value = (x[..., : mask.num_keys, :] for x in (key, value))
        keys = None if keys is None else keys[:, : mask.num_keys]
    heads = (1,) * (query.ndim - 2 - (not mask.is_flat))
    if keys is not None:
        options["key_mask"] = keys.reshape(*keys.shape[: not mask.is_flat], *heads, keys.shape[-1])
    stops = options.get("key_stop")
    if stops is not None and stops.ndim == 2:
        options["key_stop"] = stops.reshape(len(stops), *heads, -1)
    return _Call(query, key, value, options, scale, mask, cache, extra)


def softmax(call: _Call) -> Any:
    """Exact attention, with sinks and biases of the distance where the model has them."""
    if call.cache is not None and call.mask.is_window:
        reject("window of exact keys in StateCache()", "use StateCache(model.config)")
    if call.cache is not None:
        reject("StateCache for exact attention", KEYS)
    options = {name: x for name, x in call.options.items() if name != "row"}
    options["scale"] = call.scale
    sinks, bias = call.extra["s_aux"], call.extra["position_bias"]
    if bias is not None:
        options |= _bias(bias, call)
    arrays = (call.query, call.key, call.value)
    if sinks is None:
        attend = of_torch.softmax_attention if bias is None else _softmax_attention
        return attend(*arrays, **options)
    out, total = _softmax_attention(*arrays, return_log_normalizer=True, **options)
    return _beside_sinks(out, total, sinks, call)


# A compiled graph breaks here once, and not inside of them.
_linear_attention = torch.compiler.disable(linear_attention)
_softmax_attention = torch.compiler.disable(softmax_attention)


def _beside_sinks(out: Any, total: Any, sinks: Any, call: _Call) -> Any:
    """Return outputs beside sinks: keys of value 0, with which all others share the weight."""
    sinks = sinks.to(total.dtype).reshape(*call.query.shape[-len(total.shape[1:]) - 1 : -2], 1)
    return out * torch.sigmoid(total - sinks)[..., None].to(out.dtype)


def _bias(bias: Any, call: _Call) -> dict[str, Any]:
    """Return the options of a bias (1, H, L, S) that depends on the distance alone."""
    length, num_keys = call.query.shape[-2], call.key.shape[-2]
    if not bias.requires_grad and not bool(bias.any()):
        return {}
    bias = bias[..., :num_keys]
    if bias.shape[0] != 1 or call.mask.before or "cu_seqlens" in call.options:
        reject("position_bias that differs in a batch")
    bias = bias[0].reshape(*call.query.shape[1:-2], length, num_keys)
    if length == 1:
        return {"key_bias": bias[..., 0, :].expand(*call.key.shape[:-2], -1)}
    if not bool((bias[..., 1:, 1:] == bias[..., :-1, :-1]).all()):
        reject("position_bias that is not one of the distance")
    # From the distance 1 - L, in the first column, to S - 1, in the first row.
    by_distance = torch.cat([bias[..., 0].flip(-1)[..., :-1], bias[..., 0, :]], -1)
    radius = max(length, num_keys) - 1
    ends = (radius + 1 - length, radius + 1 - num_keys)
    if call.options.get("is_causal") == "lower_right":
        # Query i stands at i + S - L: all distances are less by S - L.
        ends = ends[::-1]
    return {"window_bias": torch.nn.functional.pad(by_distance, ends)}


def linear(feature_map: FeatureMap, near: dict[str, int], call: _Call) -> Any:
    """Linear attention, after the state of a cache if there is one; exact in a sliding window."""
    if call.mask.is_window or "local_window_size" in call.options:
        return softmax(call)
    bias = call.extra["position_bias"]
    if bias is not None and (bias.requires_grad or bool(bias.any())):
        reject("linear attention with position_bias")
    options = {name: x for name, x in call.options.items() if name != "row"}
    query, sinks, cache = call.query, call.extra["s_aux"], call.cache
    factor = call.scale * query.shape[-1] ** 0.5
    arrays = (query if abs(factor - 1) < 1e-6 else query * factor, call.key, call.value)
    if cache is not None:
        _check_stream(call, cache, near)
        options |= {"is_causal": True, "initial_state": cache.state, "return_state": True}
    elif near and query.shape[-2] == 1:
        options["is_causal"] = "lower_right"
    if sinks is None and not near:
        found = of_torch.linear_attention(*arrays, feature_map, **options)
    else:
        options |= near | {"return_log_normalizer": sinks is not None}
        found = _linear_attention(*arrays, feature_map, **options)
    out, *rest = found if isinstance(found, tuple) else (found,)
    if cache is not None:
        cache.state, cache.attended = rest[0], cache.length
    return out if sinks is None else _beside_sinks(out, rest[-1], sinks, call)


def _check_stream(call: _Call, cache: StateLayer, near: Any) -> None:
    """Check that a state can hold what this layer has seen."""
    for problem, is_there in {
        "with exact_window": near,
        "where a layer attends twice to the keys of one update": cache.attended != cache.before,
        "where a query sees not all keys before it": "row" in call.options,
        "where attention is not causal": call.query.shape[-2] > 1
        and not call.options.get("is_causal"),
        "for packed sequences": set(call.options) - {"is_causal", "key_mask", "row"},
    }.items():
        if is_there:
            reject(f"StateCache {problem}", KEYS)
