"""Attention of linattn in the models of transformers, and a cache that holds states.

:func:`register` adds an attention to those that ``attn_implementation=`` chooses from::

    from linattn.interop.transformers import register

    register()
    model.set_attn_implementation("linattn")

Masks are translated to masks of keys, stops, windows or packed sequences. No array of all pairs of
tokens is made. With a feature map :func:`register` adds linear attention, and :class:`StateCache`
is its cache for ``model.generate``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

try:
    import torch
    import transformers
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import cache_utils, masking_utils
    from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
except ImportError as error:
    message = (
        "linattn.interop.transformers needs torch and transformers, one of which is not installed: "
        "pip install torch transformers"
    )
    raise ImportError(message) from error

from linattn.functional import linear_attention, softmax_attention
from linattn.interop import _visibility
from linattn.interop import torch as of_torch
from linattn.interop._visibility import Visibility
from linattn.typing import FeatureMap, State

__all__ = ["StateCache", "register"]


def register(
    feature_map: FeatureMap | None = None,
    *,
    name: str | None = None,
    exact_window: int | None = None,
    sinks: int | None = None,
) -> str:
    r"""Add an attention to those that the models of transformers choose from, and return its name.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Linear attention with this map, for heads of its dim. Default: exact attention,
        :func:`linattn.softmax_attention`.
    name : str, optional
        What ``attn_implementation=`` will be. Default "linattn", with a map "linattn_linear".
    exact_window, sinks : int, optional
        With a map: nearby keys, and the first keys, count exactly, as for
        :func:`linattn.linear_attention`. Default: none.

    Returns
    -------
    str
        The name.

    Raises
    ------
    ImportError
        When this module is imported: torch or transformers is missing.
    TypeError
        A map that is none; a window or sinks without a map.

    Notes
    -----
    The model then calls it with queries (batch, H, L, d), keys (batch, G, S, d) and a mask. It
    serves causal, full and prefix attention, sliding windows, chunks, padding, packed sequences,
    grouped heads, sinks (GPT-OSS) and biases of the distance (T5). The gradient is linattn's own,
    in linear memory. Sinks and biases use torch's autograd, which stores each block.

    It raises NotImplementedError for dropout of weights, soft caps of logits,
    ``output_attentions``, masks and biases of other patterns, models that compute with their mask,
    and any tensor that a layer gives by a name that is not known here (``indices=`` of sparse
    attention). Linear attention also raises it for biases.

    Linear attention multiplies queries by the model's scaling times ``sqrt(d)``, which is 1 in most
    models: maps of the softmax kernel then see the logits of the model. Layers with a sliding
    window attend exactly to the keys of the window, which takes linear time, and to no others. A
    sink of GPT-OSS adds its weight to the denominator, beside the weights of the map.

    transformers describes a mask by a function of two positions. Causal masks, full masks and
    windows are recognized without reading them. Other patterns are read off the function, some rows
    at a time: time O(L S) once for each forward pass, not for each layer, and memory O(L + S).
    ``torch.compile`` compiles whole models with recognized masks; other masks, sinks and biases
    break the graph. To compile the whole graph, give an ``attention_mask`` or a cache: otherwise
    transformers looks for packed sequences in ``position_ids``.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.interop.transformers import register
    >>> register()
    'linattn'
    >>> register(EluFeatures())
    'linattn_linear'
    """
    options = {"exact_window": exact_window, "sinks": sinks}
    near = {option: number for option, number in options.items() if number is not None}
    if feature_map is None:
        if near:
            message = (
                f"feature_map must be given with {near}: all keys of exact attention are exact"
            )
            raise TypeError(message)
        name, attend = name or "linattn", _softmax
    elif not isinstance(feature_map, FeatureMap):
        message = (
            f"feature_map must be one of linattn.feature_maps, such as EluFeatures(), got "
            f"{feature_map!r}; leave it out for exact attention"
        )
        raise TypeError(message)
    else:
        name, attend = name or "linattn_linear", partial(_linear, feature_map, near)
    transformers.AttentionInterface.register(name, partial(_attention, attend))
    transformers.AttentionMaskInterface.register(name, _mask)
    return name


# Masks -------------------------------------------------------------------------------------------


class _Said(NamedTuple):
    """What a mask of pairs says."""

    seen: Visibility
    key_mask: Any = None
    """(batch, S) boolean."""
    is_window: bool = False
    """Whether it hides keys far before a query, even if all keys are near so far."""


def _computed(*_: Any, **__: Any) -> Any:
    _refuse("mask of pairs that a model can compute with")


class _Pairs(BlockMask):  # type: ignore[misc]
    """Stands for a mask of pairs, (batch, 1, L, S), which is never made.

    transformers passes a BlockMask to layers unchanged. A model that computes with it is refused.
    """

    dtype, ndim, shape = torch.bool, 4, None
    __getitem__ = __invert__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _computed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __bool__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __iter__ = __len__ = __torch_function__ = _computed
    __hash__, __repr__, __str__ = object.__hash__, object.__repr__, object.__repr__

    def __init__(self, shape: tuple[int, ...], device: Any, read: Any) -> None:
        self.shape, self.device, self._read = shape, device, read
        self._said: _Said | None = None

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            _computed()
        raise AttributeError(name)

    @property
    def said(self) -> _Said:
        """What it says, read by the first layer that uses it: some masks are used by none."""
        if self._said is None:
            self._said = self._read()
        return self._said

    def to(self, *_: Any, **__: Any) -> _Pairs:
        """Stay."""
        return self


def _mask(batch_size: int, q_length: int, kv_length: int, **given: Any) -> Any:
    """Return what a layer gets as its mask. Called by transformers, with these names."""
    # A static cache changes its number of tokens in place: read it before the layers do.
    offsets = int(given.get("q_offset", 0)), given.get("kv_offset", 0)
    padding = given.get("attention_mask")
    if padding is not None:
        padding = masking_utils.prepare_padding_mask(padding, kv_length, offsets[1])
        padding = padding[:, offsets[1] : offsets[1] + kv_length].to(torch.bool)
        # Values are unknown while a graph is compiled.
        if not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    shape, device = (batch_size, 1, q_length, kv_length), given.get("device", "cpu")
    names = {"mask_function", "use_vmap", "device"}
    how = {name: option for name, option in given.items() if name in names}
    return _Pairs(shape, device, partial(_say, shape, offsets, padding, device, how))


def _say(shape: Any, offsets: Any, padding: Any, device: Any, how: dict[str, Any]) -> _Said:
    """Read a mask of transformers from its function: by symbols, or else row by row."""
    bounds = _bounds_of(how["mask_function"])
    seen = None if bounds is None else _band(bounds, shape, offsets[0] - offsets[1])
    if seen is None:
        rows = partial(_rows, shape, offsets, how)
        seen, padding = _read(rows, shape, device, padding)
    return _Said(seen, padding, bounds is not None and bounds.low > -_FAR)


_FAR = 1 << 60


class _Bounds(NamedTuple):
    """A query sees the keys from ``low`` to ``high`` positions after its own."""

    low: int = -_FAR
    high: int = _FAR
    device: Any = None

    def __and__(self, other: _Bounds) -> _Bounds:
        return _Bounds(max(self.low, other.low), min(self.high, other.high))

    def __bool__(self) -> bool:
        raise TypeError

    def to(self, _: Any) -> _Bounds:
        """Stay."""
        return self


class _Position:
    """A sum of unknown positions: ``terms`` are the numbers of keys and of queries, and a constant.

    A function of masks that is called with positions returns bounds, or raises. A compiled graph
    can do so, where values of the function would be tensors that it cannot read.
    """

    def __init__(self, *terms: int) -> None:
        self.terms = terms

    def new_ones(self, *_: Any, **__: Any) -> _Bounds:
        """Return bounds that hide nothing."""
        return _Bounds()

    def __sub__(self, other: Any) -> _Position:
        terms = (0, 0, other) if isinstance(other, int) else other.terms
        return _Position(*(a - b for a, b in zip(self.terms, terms, strict=True)))

    def __ge__(self, other: Any) -> _Bounds:
        *signs, ahead = (self - other).terms
        if signs == [1, -1]:
            return _Bounds(low=-ahead)
        if signs == [-1, 1]:
            return _Bounds(high=ahead)
        if min(*signs, ahead) < 0:
            raise TypeError
        return _Bounds()  # Positions are not negative.

    def __gt__(self, other: Any) -> Any:
        return self - 1 >= other

    def __le__(self, other: Any) -> Any:
        return _Position(0, 0, 0) - (self - other) >= 0

    def __abs__(self) -> _Size:
        return _Size(self)

    def __eq__(self, other: object) -> bool:
        raise TypeError


class _Size(NamedTuple):
    """The absolute value of a difference of positions."""

    of: _Position

    def __le__(self, width: Any) -> Any:
        return (self.of <= width) & (self.of >= -width)


def _bounds_of(function: Any) -> _Bounds | None:
    """Return the bounds that a function of masks stands for, None for any other function."""
    try:
        found = function(None, None, _Position(0, 1, 0), _Position(1, 0, 0))
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None
    return found if isinstance(found, _Bounds) else None


def _band(bounds: _Bounds, shape: Any, offset: int) -> Visibility | None:
    """Return the options of bounds, with the first query at position ``offset`` of the keys."""
    (low, high, _), (length, num_keys) = bounds, shape[-2:]
    left = None if offset + length + low <= 1 else -low
    if left is None and offset + 1 + high >= num_keys:
        return Visibility({}, num_keys)
    stop = offset + length
    if high == 0 and stop <= num_keys and low <= 0 and (length > 1 or left is None):
        options: dict[str, Any] = {"is_causal": True if length == stop else "lower_right"}
        if left is not None:
            options["local_window_size"] = (left, 0)
        return Visibility(options if length > 1 else {}, stop)
    if low <= 0 <= high and (offset, length) == (0, num_keys):
        return Visibility({"local_window_size": (left, None if high >= length else high)}, length)
    return None


def _rows(shape: Any, offsets: Any, how: dict[str, Any], block: slice) -> Any:
    """Evaluate a mask of transformers for some queries, (batch or 1, queries, S)."""
    sizes = shape[0], block.stop - block.start, shape[-1], offsets[0] + block.start, offsets[1]
    rows = masking_utils.sdpa_mask(*sizes, allow_is_causal_skip=False, **how)
    if type(rows) is not torch.Tensor:
        _refuse("masks read from values, in an exported graph", "give it an attention_mask")
    # The same for all of a batch: a view of one.
    rows = rows if rows.stride(0) else rows[:1]
    return rows[:, 0].cpu().numpy()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read(rows: Any, shape: Any, device: Any, padding: Any) -> tuple[Visibility, Any]:
    """Read which keys queries see; one query sees any keys at all, by a mask of keys."""
    length, num_keys = shape[-2:]
    if length != 1:
        seen = _visibility.read_rows(rows, length, num_keys)
        return _refuse("masks of this pattern") if seen is None else seen, padding
    row = torch.as_tensor(rows(slice(0, 1))[:, 0], device=device)
    if not bool(row.any(-1).all()):
        _refuse("masks that hide all keys")
    if bool(row.all()):
        return Visibility({}, num_keys), padding
    return Visibility({"row": True}, num_keys), row if padding is None else row & padding


def _given_mask(mask: Any, module: Any, query: Any, key: Any, is_causal: Any) -> _Said:
    """Read what a layer gives in the place of a mask of ours."""
    length, num_keys = query.shape[-2], key.shape[-2]
    if mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if is_causal and length > 1 and length != num_keys:
            _refuse(f"causal attention of {length} queries to {num_keys} keys without a mask")
        return _Said(Visibility({"is_causal": True} if is_causal and length > 1 else {}, num_keys))
    if mask.ndim != 4 or mask.shape[1] != 1:
        _refuse(f"masks of shape {tuple(mask.shape)}, one for each head")
    if mask.dtype != torch.bool:
        is_seen = mask == 0
        if not bool((is_seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            _refuse("masks of other numbers than 0 and the least one")
        mask = is_seen
    if not bool(mask.any()):
        _refuse("masks that hide all keys")
    return _dense(mask.expand(-1, -1, length, num_keys))


def _dense(mask: Any) -> _Said:
    """Read a mask (batch, 1, L, S) that a user or a model made: padding and a pattern in one."""
    length, num_keys = mask.shape[-2:]
    keys, position = mask[:, 0].any(1), torch.arange(num_keys, device=mask.device)
    for options, ahead in (({}, num_keys), ({"is_causal": "lower_right"}, 0)):
        for block in _visibility.blocks_of_rows(length, num_keys):
            last = position[num_keys - length :][block, None] + ahead
            rows = mask[:, 0, block]
            # A query that sees nothing is of padding, and may see anything.
            same = rows == ((position <= last) & keys[:, None])
            if not bool((same | ~rows.any(-1, keepdim=True)).all()):
                break
        else:
            options = options if length > 1 else {}
            return _Said(Visibility(options, num_keys), None if bool(keys.all()) else keys)
    read = _read(lambda block: mask[:, 0, block].cpu().numpy(), mask.shape, mask.device, None)
    return _Said(*read)


# Attention ---------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Arguments of one attention. Queries are (batch, H, L, d), or (batch, G, H / G, L, d)."""

    query: Any
    key: Any
    value: Any
    options: dict[str, Any]
    """Of :func:`linattn.softmax_attention`, masks included."""
    scale: float
    mask: _Said
    cache: _StateLayer | None
    extra: dict[str, Any]
    """Sinks and biases."""


# Tensors that a layer may give. Those that are not for attention have done their work in the mask.
_KNOWN = {"s_aux", "position_bias", "position_ids", "token_type_ids", "mm_token_type_ids"}
_KNOWN |= {"cache_position", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k"}


def _attention(
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
            _refuse(problem, f"switch it off, or {_EAGER}")
    for name, array in given.items():
        if isinstance(array, torch.Tensor) and name not in _KNOWN:
            _refuse(f"keyword {name}=, which a layer gave a tensor of shape {tuple(array.shape)}")
    cache = given.get("linattn_layer") or getattr(key, "_linattn_layer", None)
    if isinstance(attention_mask, _Pairs):
        _check_sizes(attention_mask, query, key, cache)
        mask = attention_mask.said
    else:
        mask = _given_mask(attention_mask, module, query, key, given.get("is_causal"))
    extra = {name: given.get(name) for name in ("s_aux", "position_bias")}
    scale = given.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    packed = given.get("cu_seq_lens_q")
    if packed is not None and len(packed) > 2 and "cu_seqlens" not in mask.seen.options:
        _refuse("cu_seq_lens_q= without position_ids=", "pass both, and use_cache=False")
    if given.get("sliding_window"):
        mask = mask._replace(is_window=True)
    shape, before = (*query.shape[:-1], value.shape[-1]), mask.seen.before
    query = torch.nn.functional.pad(query, (0, 0, before, 0)) if before else query
    out = attend(_call(query, key, value, mask, scale, cache, extra))
    if mask.seen.is_flat:
        out = out.unflatten(-2, (query.shape[0], query.shape[-2])).movedim(-3, 0)
    out = out[..., before:, :].reshape(shape)
    return out.transpose(1, 2).contiguous(), None


_EAGER = 'use model.set_attn_implementation("eager")'
_KEYS = "use a DynamicCache"


def _refuse(problem: str, remedy: str = _EAGER) -> Any:
    message = f"attn_implementation must suit the model: linattn has no {problem}; {remedy}"
    raise NotImplementedError(message)


def _check_sizes(mask: Any, query: Any, key: Any, cache: Any) -> None:
    found = query.shape[-2], key.shape[-2] + (cache.before if cache else 0)
    if found != tuple(mask.shape[-2:]):
        problem = f"queries and keys of lengths {found} beside a mask of {tuple(mask.shape[-2:])}"
        if cache is None:
            _refuse(problem)
        _refuse(
            f"StateCache for {problem}",
            f"{_KEYS}, or in an encoder-decoder EncoderDecoderCache(StateCache(), DynamicCache())",
        )


def _call(
    query: Any, key: Any, value: Any, mask: _Said, scale: float, cache: Any, extra: Any
) -> _Call:
    """Group heads; give masks the axes of heads."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        query = query.unflatten(1, (key.shape[1], group))
        key, value = key.unsqueeze(2), value.unsqueeze(2)
    seen, keys = mask.seen, mask.key_mask
    options = dict(seen.options)
    if seen.is_flat:
        query, key, value = (x.movedim(0, -3).flatten(-3, -2) for x in (query, key, value))
        keys = None if keys is None else keys.reshape(1, -1)
    elif cache is not None:
        keys = None if keys is None else keys[:, -key.shape[-2] :]
    elif seen.num_keys < key.shape[-2]:
        key, value = (x[..., : seen.num_keys, :] for x in (key, value))
        keys = None if keys is None else keys[:, : seen.num_keys]
    heads = (1,) * (query.ndim - 2 - (not seen.is_flat))
    if keys is not None:
        options["key_mask"] = keys.reshape(*keys.shape[: not seen.is_flat], *heads, keys.shape[-1])
    stops = options.get("key_stop")
    if stops is not None and stops.ndim == 2:
        options["key_stop"] = stops.reshape(len(stops), *heads, -1)
    return _Call(query, key, value, options, scale, mask, cache, extra)


def _softmax(call: _Call) -> Any:
    """Exact attention, with sinks and biases of the distance where the model has them."""
    if call.cache is not None and call.mask.is_window:
        _refuse("window of exact keys in StateCache()", "use StateCache(model.config)")
    if call.cache is not None:
        _refuse("StateCache for exact attention", _KEYS)
    options = {name: x for name, x in call.options.items() if name != "row"}
    options["scale"] = call.scale
    sinks, bias = call.extra["s_aux"], call.extra["position_bias"]
    if bias is not None:
        options |= _bias(bias, call)
    arrays = (call.query, call.key, call.value)
    if sinks is None and bias is None:
        return of_torch.softmax_attention(*arrays, **options)
    if sinks is None:
        return _softmax_attention(*arrays, **options)
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
    if bias.shape[0] != 1 or call.mask.seen.before or "cu_seqlens" in call.options:
        _refuse("position_bias that differs in a batch")
    bias = bias[0].reshape(*call.query.shape[1:-2], length, num_keys)
    if length == 1:
        return {"key_bias": bias[..., 0, :].expand(*call.key.shape[:-2], -1)}
    if not bool((bias[..., 1:, 1:] == bias[..., :-1, :-1]).all()):
        _refuse("position_bias that is not one of the distance")
    # From the distance 1 - L, in the first column, to S - 1, in the first row.
    by_distance = torch.cat([bias[..., 0].flip(-1)[..., :-1], bias[..., 0, :]], -1)
    radius = max(length, num_keys) - 1
    ends = (radius + 1 - length, radius + 1 - num_keys)
    if call.options.get("is_causal") == "lower_right":
        # Query i stands at i + S - L: all distances are less by S - L.
        ends = ends[::-1]
    return {"window_bias": torch.nn.functional.pad(by_distance, ends)}


def _linear(feature_map: FeatureMap, near: dict[str, int], call: _Call) -> Any:
    """Linear attention, after the state of a cache if there is one; exact in a sliding window."""
    if call.mask.is_window or "local_window_size" in call.options:
        return _softmax(call)
    bias = call.extra["position_bias"]
    if bias is not None and (bias.requires_grad or bool(bias.any())):
        _refuse("linear attention with position_bias")
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


def _check_stream(call: _Call, cache: _StateLayer, near: Any) -> None:
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
            _refuse(f"StateCache {problem}", _KEYS)


# Cache -------------------------------------------------------------------------------------------


class _StateLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.state: State | None = None
        self.before = self.length = self.attended = 0
        """Numbers of tokens: before the last update, after it, and in the state."""

    @property
    def keys(self) -> Any:
        """Raise: some models read keys without an update."""
        return _refuse("keys in a StateCache", _KEYS)

    @keys.setter
    def keys(self, _: Any) -> None:
        pass

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the first attention makes the state."""
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **given: Any) -> Any:
        """Return these keys and values alone; the attention finds this layer by its keywords."""
        if self.attended != self.length:
            message = (
                "a StateCache must be read by linear attention of linattn, and was not by the last "
                'tokens; use model.set_attn_implementation("linattn_linear"), or a DynamicCache if '
                "transformers warns that the model's attention cannot be chosen"
            )
            raise RuntimeError(message)
        self.is_initialized = True
        self.before, self.length = self.length, self.length + key_states.shape[-2]
        # transformers gives the attention's keywords to be changed in place. Few models do not, and
        # attend to these very keys.
        given.get("kwargs", {})["linattn_layer"] = self
        key_states = key_states.view_as(key_states)
        key_states._linattn_layer = self
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are of all tokens so far."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no bound."""
        return -1

    def _select(self, choose: Any) -> None:
        if self.state is not None:
            kvz, log_scale = choose(self.state.kvz), choose(self.state.log_scale)
            self.state = self.state._replace(kvz=kvz, log_scale=log_scale)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let the states follow their beams."""
        self._select(lambda array: array.index_select(0, beam_idx.to(array.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the state of each sequence."""
        self._select(lambda array: array.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the states of these sequences."""
        self._select(lambda array: array[indices])

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.before, self.length, self.attended = None, 0, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: a state cannot forget its last tokens."""
        if tokens_to_remove:
            _refuse("way to take tokens out of a StateCache", _KEYS)

    def offload(self) -> None:
        """Stay: a state is small."""

    def prefetch(self) -> None:
        """Stay."""


class _MixedLayer(_StateLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The state of one layer that also has a recurrence of the model's own (Falcon-H1)."""

    is_croppable = False
    lazy_initialization = LinearAttentionLayer.lazy_initialization

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let both states follow their beams."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        _StateLayer.reorder_cache(self, beam_idx)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        _StateLayer.reset(self)


class _Layers(list[Any]):
    """Layers that are made when they are first updated."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            message = (
                "a StateCache must know the layers of this model; use StateCache(model.config)"
            )
            raise ValueError(message)
        return super().__getitem__(index)


class StateCache(cache_utils.Cache):  # type: ignore[misc]
    """A cache for ``model.generate`` that holds a :class:`linattn.State` for each layer.

    It takes the place of cached keys and values where attention is linear: its size does not grow.
    Beams are reordered. It cannot be cropped, which assisted generation needs. A new cache is
    empty, and serves one model.

    Parameters
    ----------
    config : PretrainedConfig, optional
        ``model.config``, which says what each layer caches. Needed for hybrid models (Qwen3-Next,
        Kimi-Linear, Bamba, Falcon-H1), whose other layers keep their own states, and for models
        with sliding windows (Gemma 3, GPT-OSS), whose layers keep the keys of the window. Default:
        a state for each layer.

    Raises
    ------
    NotImplementedError
        In the forward pass: exact attention, a window without ``config``, full attention, a layer
        that attends twice to the same keys (DiffLlama), a cropped cache.
    RuntimeError
        At the second forward pass with another attention than this module's.
    ValueError
        A hybrid model without ``config``.

    Notes
    -----
    Memory for each sequence and layer: G m (e + 2) numbers, with G heads of keys, m features and
    values of dim e.

    Encoder-decoders take ``EncoderDecoderCache(StateCache(), DynamicCache())`` of transformers,
    which holds the keys of the encoder in its second part.

    Examples
    --------
    >>> from linattn.interop.transformers import StateCache
    >>> StateCache().get_seq_length()
    0
    """

    def __init__(self, config: Any = None) -> None:
        if config is None:
            super().__init__(layer_class_to_replicate=_StateLayer)
            self.layers = _Layers()
            return
        layers = transformers.DynamicCache(config=config).layers
        for i, layer in enumerate(layers):
            if type(layer) is cache_utils.DynamicLayer:
                layers[i] = _StateLayer()
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                layers[i] = _MixedLayer(layer.number_of_states)
        super().__init__(layers=layers)
