"""`torch.func.vmap` of the operators: a batch is one more leading axis.

Importing this module registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from linattn.interop.torch._kinds import TOKENS
from linattn.interop.torch._node import SHAPES, Call, find
from linattn.typing import Array

CORE_AXES = {
    **dict.fromkeys((*TOKENS, "kvz", "initial_state"), 2),
    **dict.fromkeys(("log_scale", "key_mask", "key_bias", "beta"), 1),
}
"""Axes behind the leading ones; `log_decay` has none, one or two."""


def _register_vmap(op: Any, shapes: Any) -> None:
    @op.register_vmap  # type: ignore[untyped-decorator]
    def _(info: Any, in_dims: Any, tensors: Any, length: Any, name: str) -> Any:
        call, axes, size = find(name), in_dims[0], info.batch_size
        if _fits(call):
            found = op(_aligned(call, tensors, axes, size), length, name)
            wanted = shapes(call, _element(tensors, axes, 0))
            results = [x.reshape(size, *shape) for x, (shape, _) in zip(found, wanted, strict=True)]
        else:
            each = [op(_element(tensors, axes, i), length, name) for i in range(size)]
            results = [torch.stack(parts) for parts in zip(*each, strict=True)]
        return results, [0] * len(results)


for _op, _shapes in SHAPES.items():
    _register_vmap(_op, _shapes)


def _fits(call: Call) -> bool:
    """Whether the leading axes of all tensors align to the right."""
    return (
        call.constants.get("cu_seqlens") is None
        and call.constants.get("key_lengths") is None
        and all(name in CORE_AXES or name == "log_decay" for name in call.names)
    )


def _element(tensors: Sequence[Array], axes: Any, index: int) -> list[Array]:
    return [a if d is None else a.select(d, index) for a, d in zip(tensors, axes, strict=True)]


def _aligned(call: Call, tensors: Sequence[Array], axes: Any, size: int) -> list[Array]:
    """Give every tensor an axis for the batch in front, and then equally many leading axes."""
    whole = [
        a[None].expand(size, *a.shape) if d is None else a.movedim(d, 0)
        for a, d in zip(tensors, axes, strict=True)
    ]
    named, (scale, cotangents) = call.named(whole), call.after(whole)
    cores = [
        CORE_AXES.get(name, max(0, x.ndim - named["key"].ndim + 2)) for name, x in named.items()
    ]
    rank = max(x.ndim - 1 - core for x, core in zip(named.values(), cores, strict=True))
    cores += [1] * len(scale) + [2] * len(cotangents)
    return [
        x.reshape(size, *[1] * (rank - (x.ndim - 1 - core)), *x.shape[1:])
        for x, core in zip(whole, cores, strict=True)
    ]
