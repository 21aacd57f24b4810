"""Multi-head attention: projections around any attention function."""

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
    r"""Return multi-head attention of tokens to themselves, or to a memory.

    .. math::
        y = W_o \, [o_1, \ldots, o_H] + b_o, \qquad
        o_h = \mathrm{attention}(W^q_h x + b^q_h, \; W^k_h z + b^k_h, \; W^v_h z + b^v_h)

    with z = x, or the memory. Letters: ``L`` tokens, ``S`` tokens of the memory, ``D`` width,
    ``H`` heads of dim d, ``G`` heads of keys.

    Parameters
    ----------
    params : dict
        Names as in ``torch.nn.MultiheadAttention``. ``in_proj_weight`` (H d + 2 G d, D) has the
        rows of queries, keys and values in this order; ``out_proj.weight`` is (D, H d);
        ``in_proj_bias`` and ``out_proj.bias`` are optional. d and G follow from the shapes: H d may
        differ from D, and if G is below H each key serves H / G successive heads. Optional
        ``q_norm.weight`` and ``k_norm.weight`` normalize queries and keys before positions, as
        :func:`rms_norm`: (d,) for each head (Qwen 3, Gemma 3), or (H d,) and (G d,) for all heads
        together (OLMo 2). torch's ``add_zero_attn=True`` is not supported. A state dict does not
        record it: such a model gives other numbers without an error.
    x : array, (..., L, D)
        Floats of any array-API library.
    memory : array, (..., S, D), optional
        Tokens that keys and values are projected from. Default x.
    num_heads : int
        H.
    attention : Attention, optional
        :class:`SoftmaxAttention`, the default, :class:`LinearAttention`,
        :class:`LandmarkAttention`, :class:`AutomaticAttention` or :class:`BoundedAttention`.
    positions : Rotary or Alibi, optional
        Position encoding inside the heads. Default: none.
    is_causal : bool, optional
        Token i sees tokens 0..i only. Default False.
    key_mask : boolean array, (S,) or memory.shape[:-1] with axes of 1, optional
        True = attend. (torch's ``key_padding_mask`` is its negation.)
    eps : float, optional
        ``eps`` of the norms of queries and keys. Default 1e-6.
    initial_state : AttentionState, optional
        State that an earlier call returned: a causal stream continues after its tokens.
    return_state : bool, optional
        Also return the state from which a stream continues. Default False.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x; or the tuple ``(output, state)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear`. Shapes do not fit the number of heads; a state is given or wanted without
        ``is_causal``, with a memory or with a mask.
    NotImplementedError
        The attention cannot run as a stream.

    Notes
    -----
    Time O(L D^2), plus the time of the attention.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; Ainslie et al., "GQA" (2023)
    for grouped heads.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import feature_maps, layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> linear = layers.LinearAttention(feature_maps.EluFeatures())
    >>> options = {"num_heads": 2, "attention": linear, "is_causal": True}
    >>> whole = layers.multi_head_attention(params, x, **options)
    >>> start, state = layers.multi_head_attention(params, x[:, :3], return_state=True, **options)
    >>> rest = layers.multi_head_attention(params, x[:, 3:], initial_state=state, **options)
    >>> bool(np.allclose(np.concatenate([start, rest], axis=1), whole, atol=1e-6))
    True
    """
    heads = Heads(num_heads, attention, positions, eps)
    return_state = _checks.check_flag("return_state", return_state)
    if initial_state is None and not return_state:
        scope = Scope(is_causal, key_mask)
        return _heads.attend(params, x, memory, heads, scope, differentiate=False)[0]
    if not is_causal or memory is not None or key_mask is not None:
        raise ValueError(
            "initial_state and return_state must come with is_causal=True, without memory and "
            "without key_mask: they are of a causal stream of tokens"
        )
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
    """Return the output of :func:`multi_head_attention` and a function that computes its gradients.

    Parameters
    ----------
    params, x, memory, num_heads, attention, positions, is_causal, key_mask, eps
        As for :func:`multi_head_attention`.

    Returns
    -------
    output : array, (..., L, D)
        Output of :func:`multi_head_attention`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``. With a memory, its gradient follows.

    Raises
    ------
    NotImplementedError
        The attention has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.multi_head_attention_vjp(params, x, num_heads=2)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> sorted(grad_params)
    ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
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
        Source of the numbers.
    dim : int
        D, a multiple of H; heads have the dim D / H.
    num_heads : int
        H.
    num_key_heads : int, optional
        G, a divisor of H. Default H.
    qk_norm : bool, optional
        Whether queries and keys of each head are normalized. Default False.
    bias, dtype : optional
        As for :func:`init_linear`.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_multi_head_attention(np.random.default_rng(0), 8, 2)
    >>> sorted(params)
    ['in_proj_bias', 'in_proj_weight', 'out_proj.bias', 'out_proj.weight']
    """
    dim = _checks.check_positive_int("dim", dim)
    heads = _checks.check_positive_int("num_heads", num_heads)
    keys = heads if num_key_heads is None else num_key_heads
    keys = _checks.check_positive_int("num_key_heads", keys)
    if dim % heads or heads % keys:
        raise ValueError(
            f"num_heads must divide dim and be a multiple of num_key_heads, got {heads} for dim "
            f"{dim} and {keys} heads of keys"
        )
    rows = dim + 2 * keys * (dim // heads)
    parts = {
        "in_proj_": init_linear(rng, dim, rows, bias=bias, dtype=dtype),
        "out_proj.": init_linear(rng, dim, dim, bias=bias, dtype=dtype),
    }
    for name in ("q_norm.", "k_norm.") if _checks.check_flag("qk_norm", qk_norm) else ():
        parts[name] = init_norm(dim // heads, bias=False, dtype=dtype)
    return join(parts)
