"""Masks of transformers, and the options that say the same.

transformers calls :func:`make_mask`; the attention of a layer reads its result, or another mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

from linattn.interop._visibility import WIDE, Visibility, band_of, bounds_of, read_rows

EAGER = 'use model.set_attn_implementation("eager")'
KEYS = "use a DynamicCache"


def reject(problem: str, remedy: str = EAGER) -> Any:
    raise NotImplementedError(
        f"attn_implementation must suit the model: linattn has no {problem}; {remedy}"
    )


def _computed(*_: Any, **__: Any) -> Any:
    reject("mask of pairs that a model can compute with")


class MaskOfPairs(BlockMask):  # type: ignore[misc]
    """Stands for a mask of pairs, (batch, 1, L, S), which is never made.

    transformers passes a BlockMask to layers unchanged. A model that computes with it is rejected.
    """

    dtype, ndim, shape = torch.bool, 4, None
    __getitem__ = __invert__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _computed
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __bool__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __iter__ = __len__ = __torch_function__ = _computed
    __hash__, __repr__, __str__ = object.__hash__, object.__repr__, object.__repr__

    def __init__(self, shape: tuple[int, ...], device: Any, read: Any) -> None:
        self.shape, self.device, self._read = shape, device, read
        self._said: Visibility | None = None

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.Tensor, name) and not name.startswith("__"):
            _computed()
        raise AttributeError(name)

    @property
    def said(self) -> Visibility:
        """What it says, read by the first layer that uses it: some masks are used by none."""
        if self._said is None:
            self._said = self._read()
        return self._said

    def to(self, *_: Any, **__: Any) -> MaskOfPairs:
        """Stay."""
        return self


def make_mask(batch_size: int, q_length: int, kv_length: int, **given: Any) -> Any:
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
    return MaskOfPairs(shape, device, partial(_say, shape, offsets, padding, device, how))


def _say(shape: Any, offsets: Any, padding: Any, device: Any, how: dict[str, Any]) -> Visibility:
    """Read a mask of transformers from its function: by symbols, or else row by row."""
    bounds = bounds_of(how["mask_function"])
    seen = None if bounds is None else band_of(bounds, shape, offsets[0] - offsets[1])
    if seen is None:
        seen = _read(partial(_rows, shape, offsets, how), shape, device, padding)
    else:
        seen = seen._replace(key_mask=padding)
    return seen._replace(is_window=bounds is not None and bounds.low > -WIDE)


def _rows(shape: Any, offsets: Any, how: dict[str, Any], block: slice) -> Any:
    """Evaluate a mask of transformers for some queries, (batch or 1, queries, S)."""
    sizes = shape[0], block.stop - block.start, shape[-1], offsets[0] + block.start, offsets[1]
    rows = masking_utils.sdpa_mask(*sizes, allow_is_causal_skip=False, **how)
    if type(rows) is not torch.Tensor:
        reject("masks read from values, in an exported graph", "give it an attention_mask")
    # The same for all of a batch: a view of one.
    rows = rows if rows.stride(0) else rows[:1]
    return rows[:, 0].cpu().numpy()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _read(rows: Any, shape: Any, device: Any, padding: Any = None) -> Visibility:
    """Read which keys queries see; one query sees any keys at all, by a mask of keys."""
    length, num_keys = shape[-2:]
    if length != 1:
        seen: Visibility = read_rows(rows, length, num_keys) or reject("masks of this pattern")
        return seen._replace(key_mask=padding)
    row = torch.as_tensor(rows(slice(0, 1))[:, 0], device=device)
    if not bool(row.any(-1).all()):
        reject("masks that hide all keys")
    if bool(row.all()):
        return Visibility({}, num_keys, key_mask=padding)
    row = row if padding is None else row & padding
    return Visibility({"row": True}, num_keys, key_mask=row)


def given_mask(mask: Any, module: Any, query: Any, key: Any, is_causal: Any) -> Visibility:
    """Read what a layer gives in the place of a mask of ours."""
    length, num_keys = query.shape[-2], key.shape[-2]
    if mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if is_causal and length > 1 and length != num_keys:
            reject(f"causal attention of {length} queries to {num_keys} keys without a mask")
        return Visibility({"is_causal": True} if is_causal and length > 1 else {}, num_keys)
    if mask.ndim != 4 or mask.shape[1] != 1:
        reject(f"masks of shape {tuple(mask.shape)}, one for each head")
    if mask.dtype != torch.bool:
        is_seen = mask == 0
        if not bool((is_seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            reject("masks of other numbers than 0 and the least one")
        mask = is_seen
    if not bool(mask.any()):
        reject("masks that hide all keys")
    return _dense(mask.expand(-1, -1, length, num_keys))


def _dense(mask: Any) -> Visibility:
    """Read a mask (batch, 1, L, S) that a user or a model made: padding and a pattern in one."""
    length, num_keys = mask.shape[-2:]
    rows, position = mask[:, 0], torch.arange(num_keys, device=mask.device)
    keys = rows.any(1)
    for options, ahead in (({}, num_keys), ({"is_causal": "lower_right"}, 0)):
        last = position[num_keys - length :, None] + ahead
        # A query that sees nothing is of padding, and may see anything.
        same = rows == ((position <= last) & keys[:, None])
        if bool((same | ~rows.any(-1, keepdim=True)).all()):
            options = options if length > 1 else {}
            return Visibility(options, num_keys, key_mask=None if bool(keys.all()) else keys)
    seen: Visibility = _read(lambda block: rows[:, block].cpu().numpy(), mask.shape, mask.device)
    return seen
