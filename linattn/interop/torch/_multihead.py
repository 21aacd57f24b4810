"""Attention in the place of a `torch.nn.MultiheadAttention`, and called as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from linattn.interop._visibility import read_rows
from linattn.interop.torch._module import Attention, padding_options
from linattn.typing import Array


class MultiheadAttention(Attention):
    """The module that :meth:`Attention.from_multihead` returns."""

    def __init__(self, module: Any, attention: Any) -> None:
        _check_module(module, attention)
        bias = module.in_proj_bias is not None
        super().__init__(module.embed_dim, module.num_heads, attention, bias=bias, device="meta")
        self.in_proj_weight, self.in_proj_bias = module.in_proj_weight, module.in_proj_bias
        self.out_proj = module.out_proj
        for name in ("batch_first", "dropout", "head_dim", "kdim", "vdim", "add_zero_attn"):
            setattr(self, name, getattr(module, name))
        self.bias_k = self.bias_v = None
        # torch's layers ask for it before they compute with the weights, without this module.
        self._qkv_same_embed_dim = False
        self.train(module.training)

    def forward(  # type: ignore[override]
        self,
        query: Array,
        key: Array,
        value: Array,
        key_padding_mask: Array | None = None,
        need_weights: bool = True,
        attn_mask: Array | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Array, Array | None]:
        """Attend; arguments and results are those of ``torch.nn.MultiheadAttention``."""
        if query.is_nested and self.batch_first and query is key and key is value:
            return self._nested(query), None
        is_turned = query.ndim == 3 and not self.batch_first
        if is_turned:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check_shapes(query, key, value, key_padding_mask, attn_mask)
        q, k, v = self._heads(query, key, value)
        attend = self._attend(q, k, key_padding_mask, attn_mask, is_causal)
        weights = None
        if need_weights:
            unit = torch.eye(k.shape[-2], dtype=v.dtype, device=v.device)
            weights = attend(unit.expand(*v.shape[:-2], *unit.shape))
            output = self._joined(weights @ v)
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            output = self._joined(attend(v))
        return output.transpose(0, 1) if is_turned else output, weights

    def _attend(
        self, q: Array, k: Array, ignored: Array | None, mask: Array | None, is_causal: bool
    ) -> Callable[[Array], Array]:
        """Return the attention as a function of values."""
        dropout = self.dropout if self.training else 0.0
        size = q.shape[-2], k.shape[-2]
        if self.feature_map is not None and dropout:
            raise NotImplementedError(NO_DROPOUT)
        if self.feature_map is None and (mask is not None or dropout):
            if mask is None and is_causal:
                mask = torch.ones(size, dtype=torch.bool, device=q.device).triu(1)
            if mask is not None and mask.ndim == 3 and q.ndim == 4:
                mask = mask.unflatten(0, (-1, self.num_heads))
            biases = [] if mask is None else [_as_bias(mask, q)]
            biases += [] if ignored is None else [_as_bias(ignored[..., None, None, :], q)]
            bias = sum(biases[1:], biases[0]) if biases else None
            dense = nn.functional.scaled_dot_product_attention
            return lambda v: dense(q, k, v, attn_mask=bias, dropout_p=dropout)
        options: dict[str, Any] = {"is_causal": is_causal}
        if mask is not None and not (is_causal and torch.compiler.is_compiling()):
            options, count = _options_of(mask, self.num_heads)
            k, ignored = k[..., :count, :], None if ignored is None else ignored[..., :count]
        options |= padding_options(ignored)
        return lambda v: self._function(q, k, v[..., : k.shape[-2], :], **options)[0]

    def _nested(self, x: Array) -> Array:
        """Attend to sequences of unlike lengths, as ``torch.nn.TransformerEncoder`` packs them."""
        lengths = [len(rows) for rows in x.unbind()]
        padded = x.to_padded_tensor(0.0)
        position = torch.arange(padded.shape[1], device=x.device)
        ignored = position >= torch.tensor(lengths, device=x.device)[:, None]
        output = self(padded, padded, padded, ignored, need_weights=False)[0]
        rows = [each[:length] for each, length in zip(output, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows)

    def _check_shapes(
        self, query: Array, key: Array, value: Array, ignored: Array | None, mask: Array | None
    ) -> None:
        lead, (length, _), count = query.shape[:-2], query.shape[-2:], key.shape[-2]
        heads = (self.num_heads * (lead[0] if lead else 1), length, count)
        wanted: dict[str, Any] = {
            "query": (query, [(*lead[:1], length, self.embed_dim)]),
            "key": (key, [(*lead, count, self.embed_dim)]),
            "value": (value, [(*lead, count, self.embed_dim)]),
            "key_padding_mask": (ignored, [(*lead, count)]),
            "attn_mask": (mask, [(length, count), heads]),
        }
        for name, (tensor, shapes) in wanted.items():
            if tensor is not None and tuple(tensor.shape) not in shapes:
                shown = " or ".join(str(tuple(shape)) for shape in shapes)
                raise ValueError(f"{name} must have shape {shown}, got {tuple(tensor.shape)}")


NO_DROPOUT = (
    "module must have no dropout: linear attention forms no weights to drop, got dropout > 0 in "
    "training; set dropout = 0.0 on it, or call eval()"
)


def _check_module(module: Any, attention: Any) -> None:
    if type(module) is not nn.MultiheadAttention:
        raise TypeError(
            f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}; make an "
            f"Attention and load the weights"
        )
    hooks = module._forward_hooks or module._forward_pre_hooks
    missing = {
        "kdim and vdim": module.in_proj_weight is None,
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "hooks (as of pruning)": hooks,
    }
    for name, is_there in missing.items():
        if is_there:
            raise NotImplementedError(
                f"module must have no {name}, which linattn has not, got a module with it"
            )
    if module.dropout and module.training and attention != "softmax":
        raise NotImplementedError(NO_DROPOUT)


def _as_bias(mask: Array, like: Array) -> Array:
    """Return a mask as numbers to add to scores; True hides."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _options_of(mask: Array, num_heads: int) -> tuple[dict[str, Any], int]:
    """Return the options of linear attention that say the same as a mask, and how many keys."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    seen = None
    if mask.dtype == torch.bool or not mask[~hidden].any():
        host = (~hidden).reshape(-1, *mask.shape[-2:]).cpu().numpy()
        seen = read_rows(lambda rows: host[:, rows], *mask.shape[-2:])
    if seen is None or seen.is_flat or "local_window_size" in seen.options:
        raise NotImplementedError(
            "attn_mask must show each query the keys up to some key, as causal masks do, got "
            "others or other numbers than 0 and -inf: linear attention forms no pairs to mask; "
            "make the module with attention='softmax'"
        )
    stops = seen.options.get("key_stop")
    if stops is not None and stops.ndim == 2 and len(stops) > num_heads:
        seen.options["key_stop"] = stops.reshape(-1, num_heads, stops.shape[-1])
    return seen.options, seen.num_keys
