"""Decoders: causal layers with or without a memory, stacks of them, and streams."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from linattn import _checks
from linattn.layers import _blocks
from linattn.layers._blocks import DecoderOptions, DecoderState, InitOptions, LayerState, Masks
from linattn.layers._params import Params, Result, join, takes, with_pullback
from linattn.layers.attention import init_multi_head_attention
from linattn.layers.dense import init_feed_forward, init_norm
from linattn.typing import Array

__all__ = [
    "decoder",
    "decoder_layer",
    "decoder_layer_vjp",
    "decoder_vjp",
    "init_decoder",
    "init_decoder_layer",
]


@overload
def decoder_layer(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: LayerState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DecoderOptions],
) -> Array: ...


@overload
def decoder_layer(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: LayerState | None = None,
    return_state: Literal[True],
    **options: Unpack[DecoderOptions],
) -> tuple[Array, LayerState]: ...


@takes(DecoderOptions)
def decoder_layer(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: LayerState | None = None,
    return_state: bool = False,
    **options: Unpack[DecoderOptions],
) -> Any:
    r"""Apply causal self-attention, attention to a memory if there is one, and feed-forward.

    .. math::
        h = \mathrm{norm}_1(x + \mathrm{attention}(x)), \quad
        g = \mathrm{norm}_2(h + \mathrm{attention}(h, \mathrm{memory})), \quad
        y = \mathrm{norm}_3(g + \mathrm{feed\_forward}(g))

    as ``torch.nn.TransformerDecoderLayer`` without dropout, or with the norms first as in
    :func:`encoder_layer`. Without a memory it is :func:`encoder_layer`, with the same two norms.
    Letters: ``L`` tokens, ``S`` tokens of the memory, ``D`` width.

    Parameters
    ----------
    params : dict
        As for :func:`encoder_layer`. With a memory also the parameters of
        :func:`multi_head_attention` after ``multihead_attn.``, and of a third norm.
    x : array, (..., L, D)
        Floats of any array-API library.
    memory : array, (..., S, D), optional
        Output of an encoder.
    is_causal : bool, optional
        Token i sees tokens 0..i only. Default True.
    key_mask : boolean array, (L,) or x.shape[:-1] with axes of 1, optional
        True = attend.
    memory_mask : boolean array, (S,) or memory.shape[:-1] with axes of 1, optional
        Mask of the memory; True = attend.
    initial_state : LayerState, optional
        State that an earlier call returned: the stream continues after its tokens. It contains the
        memory, which need not be given again.
    return_state : bool, optional
        Also return the state from which a stream continues. Default False.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x; or the tuple ``(output, state)``.

    Other Parameters
    ----------------
    num_heads : int
        As for :func:`encoder_layer`.
    attention, positions, activation, norm_first, norm_output, parallel, norm, eps : optional
        As for :func:`encoder_layer`.
    cross_attention : Attention, optional
        Attention to the memory. Default: `attention`, without `positions`. Query i is at position
        i, in a stream too; the tokens of the memory are at 0, 1, ...

    Raises
    ------
    TypeError, ValueError
        As :func:`encoder_layer`. A state is given or wanted without ``is_causal``, or with a mask
        of tokens.
    NotImplementedError
        The attention cannot run as a stream.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_decoder_layer(np.random.default_rng(0), 8, 2, has_memory=True)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> layers.decoder_layer(params, x, x, num_heads=2).shape
    (2, 5, 8)
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask, memory_mask)
    return_state = _checks.check_flag("return_state", return_state)
    if initial_state is None and not return_state:
        return _blocks.layer(params, x, memory, chosen, masks, differentiate=False)[0]
    y, state = _blocks.stream_layer(params, x, memory, chosen, masks, initial_state)
    return (y, state) if return_state else y


@takes(DecoderOptions)
@with_pullback
def decoder_layer_vjp(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    **options: Unpack[DecoderOptions],
) -> Result:
    """Return the output of :func:`decoder_layer` and a function that computes its gradients.

    Parameters
    ----------
    params, x, memory, is_causal, key_mask, memory_mask, **options
        As for :func:`decoder_layer`.

    Returns
    -------
    output : array, (..., L, D)
        Output of :func:`decoder_layer`.
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
    >>> params = layers.init_decoder_layer(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.decoder_layer_vjp(params, x, num_heads=2)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> grad_params.keys() == params.keys()
    True
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask, memory_mask)
    return _blocks.layer(params, x, memory, chosen, masks, differentiate=True)


@takes(InitOptions)
def init_decoder_layer(
    rng: np.random.Generator,
    dim: int,
    num_heads: int,
    *,
    has_memory: bool = False,
    **options: Unpack[InitOptions],
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`decoder_layer`.

    Parameters
    ----------
    rng, dim, num_heads, **options
        As for :func:`init_encoder_layer`.
    has_memory : bool, optional
        Whether the layer attends to a memory. Default False.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_decoder_layer(np.random.default_rng(0), 8, 2)
    >>> len(params)
    12
    """
    keys, hidden = options.get("num_key_heads"), options.get("hidden_dim")
    activation = options.get("activation", "relu")
    norm = _blocks.check_norm(options.get("norm", "layer_norm"))
    kind: dict[str, Any] = {
        "bias": options.get("bias", True),
        "dtype": options.get("dtype", np.float32),
    }
    attentions = ["self_attn."]
    if _checks.check_flag("has_memory", has_memory):
        attentions.append("multihead_attn.")
    parts = {
        name: init_multi_head_attention(
            rng, dim, num_heads, num_key_heads=keys, qk_norm=options.get("qk_norm", False), **kind
        )
        for name in attentions
    }
    parts[""] = init_feed_forward(rng, dim, hidden, activation=activation, **kind)
    shifts = kind["bias"] and norm == "layer_norm"
    places = ["", "_output"] if options.get("norm_output") else [""]
    for number in range(len(attentions) + 1):
        for place in places:
            norm_of = init_norm(dim, bias=shifts, dtype=kind["dtype"])
            parts[f"norm{number + 1}{place}."] = norm_of
    return join(parts)


@overload
def decoder(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[DecoderOptions],
) -> Array: ...


@overload
def decoder(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: Literal[True],
    **options: Unpack[DecoderOptions],
) -> tuple[Array, DecoderState]: ...


@takes(DecoderOptions)
def decoder(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: bool = False,
    **options: Unpack[DecoderOptions],
) -> Any:
    """Apply the layers of a decoder one after the other, as ``torch.nn.TransformerDecoder``.

    Parameters
    ----------
    params : dict
        Parameters of :func:`decoder_layer` after ``layers.0.``, ``layers.1.`` and so on, and
        optionally of a last norm, ``norm.weight`` and ``norm.bias``.
    x : array, (..., L, D)
        Floats of any array-API library.
    memory : array, (..., S, D), optional
        Output of an encoder. Without it this is a decoder-only model.
    is_causal, key_mask, memory_mask
        As for :func:`decoder_layer`.
    initial_state : DecoderState, optional
        State that an earlier call returned: the stream continues after its tokens, by one token or
        more. It contains the memory, which need not be given again.
    return_state : bool, optional
        Also return the state from which a stream continues. Default False.
    **options
        As for :func:`decoder_layer`, the same for all layers. ``attention``, ``cross_attention``
        and ``positions`` may also be lists with one item for each layer.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x; or the tuple ``(output, state)``.

    Raises
    ------
    TypeError, ValueError
        As :func:`decoder_layer`. The numbers of the layers have a gap; the state has another number
        of layers.
    NotImplementedError
        The attention cannot run as a stream.

    Notes
    -----
    With :class:`LinearAttention` neither the state nor the time for a token grows. With
    :class:`SoftmaxAttention` the state holds all keys and values, or only the last ones with a
    window.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_decoder(np.random.default_rng(0), 2, 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> whole = layers.decoder(params, x, num_heads=2)
    >>> _, state = layers.decoder(params, x[:, :4], num_heads=2, return_state=True)
    >>> last = layers.decoder(params, x[:, 4:], num_heads=2, initial_state=state)
    >>> bool(np.allclose(last, whole[:, 4:], atol=1e-6))
    True
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask, memory_mask)
    return_state = _checks.check_flag("return_state", return_state)
    if initial_state is None and not return_state:
        return _blocks.stack(params, x, memory, chosen, masks, differentiate=False)[0]
    y, state = _blocks.stream_stack(params, x, memory, chosen, masks, initial_state)
    return (y, state) if return_state else y


@takes(DecoderOptions)
@with_pullback
def decoder_vjp(
    params: Params,
    x: Array,
    memory: Array | None = None,
    *,
    is_causal: bool = True,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    **options: Unpack[DecoderOptions],
) -> Result:
    """Return the output of :func:`decoder` and a function that computes its gradients.

    Parameters
    ----------
    params, x, memory, is_causal, key_mask, memory_mask, **options
        As for :func:`decoder`.

    Returns
    -------
    output : array, (..., L, D)
        Output of :func:`decoder`.
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
    >>> params = layers.init_decoder(np.random.default_rng(0), 2, 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.decoder_vjp(params, x, num_heads=2)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> grad_params.keys() == params.keys()
    True
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask, memory_mask)
    return _blocks.stack(params, x, memory, chosen, masks, differentiate=True)


@takes(InitOptions)
def init_decoder(
    rng: np.random.Generator,
    num_layers: int,
    dim: int,
    num_heads: int,
    *,
    has_memory: bool = False,
    final_norm: bool = False,
    **options: Unpack[InitOptions],
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`decoder`.

    Parameters
    ----------
    rng, num_layers, dim, num_heads, final_norm, **options
        As for :func:`init_encoder`.
    has_memory : bool, optional
        Whether the layers attend to a memory. Default False.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_decoder(np.random.default_rng(0), 2, 8, 2)
    >>> len(params)
    24
    """
    number = _checks.check_positive_int("num_layers", num_layers)
    parts = {
        f"layers.{i}.": init_decoder_layer(rng, dim, num_heads, has_memory=has_memory, **options)
        for i in range(number)
    }
    if _checks.check_flag("final_norm", final_norm):
        shifts = options.get("bias", True) and options.get("norm", "layer_norm") == "layer_norm"
        parts["norm."] = init_norm(dim, bias=shifts, dtype=options.get("dtype", np.float32))
    return join(parts)
