"""`torch.func.vmap` of the operator: a batch is one more leading axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from linattn.interop.torch._node import (
    DIFFERENTIABLE,
    KINDS,
    TOKENS,
    Call,
    attend,
    find,
    pull_back,
)
from linattn.typing import Array

CORE_AXES = {
    **dict.fromkeys((*TOKENS, "kvz", "initial_state"), 2),
    **dict.fromkeys(("log_scale", "key_mask", "key_bias", "beta"), 1),
}
"""Axes behind the leading ones; `log_decay` has none, one or two."""


def _core_axes(name: str, tensor: Array, key_ndim: int) -> int:
    return max(0, tensor.ndim - key_ndim + 2) if name == "log_decay" else CORE_AXES[name]


def _fits(call: Call) -> bool:
    """Whether the leading axes of all tensors align to the right."""
    return (
        call.constants.get("cu_seqlens") is None
        and call.constants.get("key_lengths") is None
        and all(name in CORE_AXES or name == "log_decay" for name in call.names)
    )


def _first(tensors: Sequence[Array], axes: Any) -> list[Array]:
    """Move the axis of the batch to the front; None is left."""
    return [a if d is None else a.movedim(d, 0) for a, d in zip(tensors, axes, strict=True)]


def _element(tensors: Sequence[Array], axes: Any, index: int) -> list[Array]:
    return [a if d is None else a.select(d, index) for a, d in zip(tensors, axes, strict=True)]


def _looped(info: Any, function: Callable[[int], list[Array]]) -> tuple[list[Array], list[int]]:
    results = [function(i) for i in range(info.batch_size)]
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)


def _aligned(call: Call, tensors: Sequence[Array], axes: Any, size: int) -> list[Array]:
    """Give every tensor an axis for the batch in front, and then equally many leading axes."""
    moved = [
        a[None].expand(size, *a.shape) if d is None else a
        for a, d in zip(_first(tensors, axes), axes, strict=True)
    ]
    named = dict(zip(call.names, moved, strict=True))
    key_ndim = named["key"].ndim - 1
    cores = [_core_axes(n, a[0], key_ndim) for n, a in named.items()]
    rank = max(a.ndim - 1 - core for a, core in zip(moved, cores, strict=True))
    return [_padded(a, core, rank) for a, core in zip(moved, cores, strict=True)]


def _padded(tensor: Array, core: int, rank: int) -> Array:
    missing = rank - (tensor.ndim - 1 - core)
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])


@attend.register_vmap  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: Any, tensors: Any, length: Any, name: str) -> Any:
    call, axes, size = find(name), in_dims[0], info.batch_size
    if not _fits(call):
        return _looped(info, lambda i: attend(_element(tensors, axes, i), length, name))
    shapes = KINDS[call.kind][2](call.named(_element(tensors, axes, 0)), call)
    results = attend(_aligned(call, tensors, axes, size), length, name)
    found = [a.reshape(size, *shape) for a, (shape, _) in zip(results, shapes, strict=True)]
    return found, [0] * len(found)


@pull_back.register_vmap  # type: ignore[untyped-decorator]
def _(
    info: Any, in_dims: Any, tensors: Any, results: Any, cotangents: Any, length: Any, name: str
) -> Any:
    call, size = find(name), info.batch_size
    axes, of_results, of_cotangents = in_dims[:3]
    if not _fits(call):
        return _looped(
            info,
            lambda i: pull_back(
                _element(tensors, axes, i),
                _element(results, of_results, i),
                _element(cotangents, of_cotangents, i),
                *(length, name),
            ),
        )
    aligned = _aligned(call, tensors, axes, size)
    key = aligned[call.names.index("key")]
    padded = []
    for group, dims, core in ((results, of_results, 1), (cotangents, of_cotangents, 2)):
        wide = [
            a[None].expand(size, *a.shape) if d is None else a
            for a, d in zip(_first(group, dims), dims, strict=True)
        ]
        padded.append([_padded(a, core, key.ndim - 3) for a in wide])
    gradients = pull_back(aligned, *padded, length, name)
    sources = [a for n, a in call.named(_element(tensors, axes, 0)).items() if n in DIFFERENTIABLE]
    found = [a.reshape(size, *b.shape) for a, b in zip(gradients, sources, strict=True)]
    return found, [0] * len(found)
