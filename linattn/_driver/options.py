"""Options of linear attention, listed once for all that take them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

from linattn.typing import Array, State

__all__ = ["GradientOptions", "InteropOptions", "Options", "SoftmaxOptions", "WindowOptions"]


class InteropOptions(TypedDict, total=False):
    """Types of those that torch's and JAX's gradients take too, for overloads."""

    log_decay: Array | float | None
    normalize: bool
    is_causal: bool | Literal["lower_right"]
    key_mask: Array | None
    key_bias: Array | None
    key_lengths: Any
    key_stop: Any
    prefix_length: Any
    causal_block: int | None
    cu_seqlens: Any
    initial_state: State | None
    chunk_size: int | None


class GradientOptions(InteropOptions, total=False):
    """Types of those of :func:`linattn.linear_attention_vjp`."""

    exact_window: int | None
    window_bias: Array | None
    far_bias: tuple[Any, Any] | None


class WindowOptions(GradientOptions, total=False):
    """Types of those of :func:`linattn.linear_attention`."""

    exact_clusters: int | None


class SoftmaxOptions(TypedDict, total=False):
    """Types of those of :func:`linattn.softmax_attention`."""

    scale: float | None
    is_causal: bool | Literal["lower_right"]
    key_mask: Array | None
    key_bias: Array | None
    key_lengths: Any
    key_stop: Any
    prefix_length: Any
    causal_block: int | None
    cu_seqlens: Any
    local_window_size: int | tuple[int | None, int | None] | None
    window_bias: Array | None
    far_bias: tuple[Any, Any] | None


class Options(NamedTuple):
    """What linear attention is called with beside arrays and map, by the names it has here."""

    is_causal: Any = False
    key_mask: Any = None
    key_bias: Any = None
    key_lengths: Any = None
    key_stop: Any = None
    prefix_length: Any = None
    causal_block: Any = None
    cu_seqlens: Any = None
    log_decay: Any = None
    normalize: Any = True
    state: Any = None
    state_name: str = "initial_state"
    chunk_size: Any = None
    want_log: Any = False
    exact_window: Any = None
    exact_clusters: Any = None
    window_bias: Any = None
    far_bias: Any = None
    one_token: bool = False
    """Whether key and value may not add leading axes to the state."""
    reads: bool = True
    """Whether there are queries at all."""
