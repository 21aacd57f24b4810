"""Multi-head attention: projections around any attention."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.layers import _heads
from linattn.layers._heads import AttentionState, Heads, Positions
from linattn.layers._params import Params, Result, join, takes, with_pullback
from linattn.layers.attentions import Attention, Scope, SoftmaxAttention
from linattn.layers.dense import init_linear, init_norm
from linattn.typing import Array

__all__ = [
    "init_multi_head_attention",
    "multi_head_attention",
    "multi_head_attention_vjp",
]

EXACT = SoftmaxAttention()


@overload
def multi_head_attention(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    num_heads: int,
    attention: Attention = ...,
    positions: Positions = None,
    is_causal: bool = False,
    key_mask: Array | None = None,
    eps: float = 1e-6,
    initial_state: AttentionState | None = None,
    return_state: Literal[False] = False,
) -> Array: ...


@overload
def multi_head_attention(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    num_heads: int,
    attention: Attention = ...,
    positions: Positions = None,
    is_causal: bool = False,
    key_mask: Array | None = None,
    eps: float = 1e-6,
    initial_state: AttentionState | None = None,
    return_state: Literal[True],
) -> tuple[Array, AttentionState]: ...


@takes()
def multi_head_attention(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    num_heads: int,
    attention: Attention = EXACT,
    positions: Positions = None,
    is_causal: bool = False,
    key_mask: Array | None = None,
    eps: float = 1e-6,
    initial_state: AttentionState | None = None,
    return_state: bool = False,
) -> Any:
    r"""Attend to the same tokens, or to those of a memory, in several heads.

    .. math::
        y = W_o \, [o_1, \ldots, o_H] + b_o, \qquad
        o_h = \mathrm{attention}(W^q_h x + b^q_h, \; W^k_h z + b^k_h, \; W^v_h z + b^v_h)

    with z = x, or the memory. Letters: ``L`` tokens, ``S`` tokens of the memory, ``D`` width,
    ``H`` heads of dim d, ``G`` heads of keys.

    Parameters
    ----------
    params : dict
        As those of ``torch.nn.MultiheadAttention``: ``in_proj_weight`` (H d + 2 G d, D), the rows
        of queries, keys and values in this order, ``out_proj.weight`` (D, H d) and, optional,
        ``in_proj_bias`` and ``out_proj.bias``. H d need not be D, and with G below H a key serves
        H / G heads, one after the other: both are read off the shapes. Optional too, norms of the
        queries and the keys before positions, as :func:`rms_norm`: ``q_norm.weight`` and
        ``k_norm.weight``, (d,) for each head (Qwen 3, Gemma 3), or (H d,) and (G d,) for all heads
        together (OLMo 2). torch's ``add_zero_attn=True`` has no name in a state dict, and is not
        known here: such a model gives other numbers.
    x : array, (..., L, D)
        Floats of any array-API library.
    memory : array, (..., S, D), optional
        What keys and values are made of. Default x.
    num_heads : int
        H.
    attention : Attention, optional
        What the heads compute: :class:`SoftmaxAttention`, the default, :class:`LinearAttention`,
        :class:`LandmarkAttention`, :class:`AutomaticAttention` or :class:`BoundedAttention`.
    positions : Rotary or Alibi, optional
        How heads see positions. Default: not at all.
    is_causal : bool, optional
        Token i sees tokens 0..i only. Default False.
    key_mask : boolean array, (S,) or memory.shape[:-1] with axes of 1, optional
        True = attend. (torch's ``key_padding_mask`` is its negation.)
    eps : float, optional
        Of the norms of queries and keys. Default 1e-6.
    initial_state : AttentionState, optional
        What an earlier call returned: a causal stream goes on after its tokens.
    return_state : bool, optional
        Also return what a stream goes on from. Default False.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x; or the tuple ``(output, state)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`; shapes that do not fit so many heads; a state without ``is_causal``, with
        a memory or with a mask.
    NotImplementedError
        A state from an attention that has none.

    Notes
    -----
    Time O(L D^2) and that of the attention.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; Ainslie et al., "GQA" (2023)
    for grouped heads.
    """
    heads = Heads(num_heads, attention, positions, eps)
    return_state = _checks.check_flag("return_state", return_state)
    if initial_state is None and not return_state:
        scope = Scope(is_causal, key_mask)
        return _heads.attend(params, x, memory, heads, scope, differentiate=False)[0]
    if not is_causal or memory is not None or key_mask is not None:
        message = (
            "initial_state and return_state must come with is_causal=True, without memory and "
            "without key_mask: they are of a causal stream of tokens"
        )
        raise ValueError(message)
    out, state = _heads.stream(params, x, heads, initial_state)
    return (out, state) if return_state else out


@takes()
@with_pullback
def multi_head_attention_vjp(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    num_heads: int,
    attention: Attention = EXACT,
    positions: Positions = None,
    is_causal: bool = False,
    key_mask: Array | None = None,
    eps: float = 1e-6,
) -> Result:
    """Return :func:`multi_head_attention` and its pullback.

    Parameters
    ----------
    params, x, memory, num_heads, attention, positions, is_causal, key_mask, eps
        As for :func:`multi_head_attention`.

    Returns
    -------
    output : array, (..., L, D)
        That of :func:`multi_head_attention`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``, and then, if there is one, the gradient
        by the memory.

    Raises
    ------
    NotImplementedError
        An attention without a gradient.
    """
    heads = Heads(num_heads, attention, positions, eps)
    scope = Scope(is_causal, key_mask)
    return _heads.attend(params, x, memory, heads, scope, differentiate=True)


@takes()
def init_multi_head_attention(
    rng: np.random.Generator,
    dim: int,
    num_heads: int,
    *,
    num_key_heads: int | None = None,
    qk_norm: bool = False,
    bias: bool = True,
    dtype: Any = np.float32,
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`multi_head_attention`, each product as :func:`init_linear`.

    Parameters
    ----------
    rng : numpy.random.Generator
        Where the numbers come from.
    dim : int
        D, a multiple of H; heads have the dim D / H.
    num_heads : int
        H.
    num_key_heads : int, optional
        G, which divides H. Default H.
    qk_norm : bool, optional
        Whether each head has norms of queries and keys. Default False.
    bias, dtype : optional
        As for :func:`init_linear`.

    Returns
    -------
    dict
        NumPy arrays.
    """
    dim = _checks.check_positive_int("dim", dim)
    heads = _checks.check_positive_int("num_heads", num_heads)
    keys = heads if num_key_heads is None else num_key_heads
    keys = _checks.check_positive_int("num_key_heads", keys)
    if dim % heads or heads % keys:
        message = (
            f"num_heads must divide dim and be a multiple of num_key_heads, got {heads} for dim "
            f"{dim} and {keys} heads of keys"
        )
        raise ValueError(message)
    rows = dim + 2 * keys * (dim // heads)
    parts = {
        "in_proj_": init_linear(rng, dim, rows, bias=bias, dtype=dtype),
        "out_proj.": init_linear(rng, dim, dim, bias=bias, dtype=dtype),
    }
    for name in ("q_norm.", "k_norm.") if _checks.check_flag("qk_norm", qk_norm) else ():
        parts[name] = init_norm(dim // heads, bias=False, dtype=dtype)
    return join(parts)
