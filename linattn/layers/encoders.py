"""Encoders: layers of self-attention and feed-forward, and stacks of them."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from linattn.layers import _blocks
from linattn.layers._blocks import InitOptions, LayerOptions, Masks
from linattn.layers._params import Params, Result, takes, with_pullback
from linattn.layers.decoders import init_decoder, init_decoder_layer
from linattn.typing import Array

__all__ = [
    "encoder",
    "encoder_layer",
    "encoder_layer_vjp",
    "encoder_vjp",
    "init_encoder",
    "init_encoder_layer",
]


@takes(LayerOptions)
def encoder_layer(
    params: Params,
    x: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    **options: Unpack[LayerOptions],
) -> Array:
    r"""Apply self-attention and feed-forward, as ``torch.nn.TransformerEncoderLayer``, no dropout.

    .. math::
        h = \mathrm{norm}_1(x + \mathrm{attention}(x)), \qquad
        y = \mathrm{norm}_2(h + \mathrm{feed\_forward}(h))

    or with the norms first

    .. math::
        h = x + \mathrm{attention}(\mathrm{norm}_1(x)), \qquad
        y = h + \mathrm{feed\_forward}(\mathrm{norm}_2(h)).

    With ``norm_output=True`` the output of a sublayer f is normalized before it is added,

    .. math::
        h = x + \mathrm{norm}(f(x)), \qquad h = x + \mathrm{norm}'(f(\mathrm{norm}(x)))
        \ \text{(norms first)},

    and with ``parallel=True`` all sublayers see the same tokens,

    .. math::
        y = x + \mathrm{attention}(\mathrm{norm}_1(x)) + \mathrm{feed\_forward}(\mathrm{norm}_2(x)).

    Letters: ``L`` tokens, ``D`` width.

    Parameters
    ----------
    params : dict
        Names as in torch: parameters of :func:`multi_head_attention` after ``self_attn.``,
        parameters of :func:`feed_forward`, and norms ``norm1.weight``, ``norm1.bias``,
        ``norm2.weight`` and ``norm2.bias``. With ``norm_first`` and ``norm_output`` also
        ``norm1_output.*`` and ``norm2_output.*``. With ``parallel`` the second norm is optional:
        without it the first serves both.
    x : array, (..., L, D)
        Floats of any array-API library.
    is_causal : bool, optional
        Token i sees tokens 0..i only: the layer of a decoder without a memory. Default False.
    key_mask : boolean array, (L,) or x.shape[:-1] with axes of 1, optional
        True = attend.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x.

    Other Parameters
    ----------------
    num_heads : int
        As for :func:`multi_head_attention`.
    attention, positions : optional
        As for :func:`multi_head_attention`.
    activation : str, optional
        As for :func:`feed_forward`. Default "relu".
    norm_first : bool, optional
        Norms before the sublayers (pre-norm), not after the sums (post-norm). Default False.
    norm_output : bool, optional
        Norms of the outputs of sublayers, before they are added, as in OLMo 2. With ``norm_first``
        norms on both sides, as in Gemma 2 and 3. Default False.
    parallel : bool, optional
        Attention and feed-forward of the same tokens, as in GPT-NeoX, Phi and Cohere; needs
        ``norm_first``. Default False.
    norm : {"layer_norm", "rms_norm"}, optional
        Which norm. Default "layer_norm".
    eps : float, optional
        ``eps`` of all norms, of queries and keys too. Default 1e-5.

    Raises
    ------
    TypeError, ValueError
        As :func:`multi_head_attention`, :func:`feed_forward` and the norms; an unknown option.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), section 3.1; Xiong et al., "On Layer
    Normalization in the Transformer Architecture" (2020), table 1, for both places of norms.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_encoder_layer(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> layers.encoder_layer(params, x, num_heads=2, norm_first=True).shape
    (2, 5, 8)
    """
    masks = Masks(is_causal, key_mask)
    chosen = _blocks.options_of(**options)
    return _blocks.layer(params, x, None, chosen, masks, differentiate=False)[0]


@takes(LayerOptions)
@with_pullback
def encoder_layer_vjp(
    params: Params,
    x: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    **options: Unpack[LayerOptions],
) -> Result:
    """Return the output of :func:`encoder_layer` and a function that computes its gradients.

    Parameters
    ----------
    params, x, is_causal, key_mask, **options
        As for :func:`encoder_layer`.

    Returns
    -------
    output : array, (..., L, D)
        Output of :func:`encoder_layer`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Raises
    ------
    NotImplementedError
        The attention has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_encoder_layer(np.random.default_rng(0), 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.encoder_layer_vjp(params, x, num_heads=2)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> grad_params.keys() == params.keys()
    True
    """
    masks = Masks(is_causal, key_mask)
    chosen = _blocks.options_of(**options)
    return _blocks.layer(params, x, None, chosen, masks, differentiate=True)


@takes(InitOptions)
def init_encoder_layer(
    rng: np.random.Generator, dim: int, num_heads: int, **options: Unpack[InitOptions]
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`encoder_layer`.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    dim, num_heads : int
        D and the number of heads, which divides D.

    Returns
    -------
    dict
        NumPy arrays.

    Other Parameters
    ----------------
    hidden_dim : int, optional
        Hidden dim of the feed-forward layer. Default 4 D.
    num_key_heads : int, optional
        As for :func:`init_multi_head_attention`.
    activation, norm : optional
        As for :func:`encoder_layer`.
    norm_output : bool, optional
        Whether there are also norms ``norm1_output`` and so on, which ``norm_first`` together with
        ``norm_output`` needs. Default False.
    qk_norm : bool, optional
        As for :func:`init_multi_head_attention`. Default False.
    bias, dtype : optional
        As for :func:`init_linear`.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_encoder_layer(np.random.default_rng(0), 8, 2)
    >>> len(params)
    12
    """
    return init_decoder_layer(rng, dim, num_heads, **options)


@takes(LayerOptions)
def encoder(
    params: Params,
    x: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    **options: Unpack[LayerOptions],
) -> Array:
    """Apply the layers of an encoder one after the other, as ``torch.nn.TransformerEncoder``.

    Parameters
    ----------
    params : dict
        Parameters of :func:`encoder_layer` after ``layers.0.``, ``layers.1.`` and so on, and
        optionally of a last norm, ``norm.weight`` and ``norm.bias``.
    x : array, (..., L, D)
        Floats of any array-API library.
    is_causal, key_mask, **options
        As for :func:`encoder_layer`, the same for all layers. ``attention`` and ``positions`` may
        also be lists with one item for each layer.

    Returns
    -------
    array, (..., L, D)
        In the library, dtype and device of x.

    Raises
    ------
    TypeError, ValueError
        As :func:`encoder_layer`; the numbers of the layers have a gap.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import feature_maps, layers
    >>> rng = np.random.default_rng(0)
    >>> params = layers.init_encoder(rng, 2, 32, 4)
    >>> x = rng.standard_normal((8, 100, 32), dtype=np.float32)
    >>> linear = layers.LinearAttention(feature_maps.EluFeatures())
    >>> layers.encoder(params, x, num_heads=4, attention=linear).shape
    (8, 100, 32)
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask)
    return _blocks.stack(params, x, None, chosen, masks, differentiate=False)[0]


@takes(LayerOptions)
@with_pullback
def encoder_vjp(
    params: Params,
    x: Array,
    *,
    is_causal: bool = False,
    key_mask: Array | None = None,
    **options: Unpack[LayerOptions],
) -> Result:
    """Return the output of :func:`encoder` and a function that computes its gradients.

    Parameters
    ----------
    params, x, is_causal, key_mask, **options
        As for :func:`encoder`.

    Returns
    -------
    output : array, (..., L, D)
        Output of :func:`encoder`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params, grad_x)``.

    Raises
    ------
    NotImplementedError
        The attention has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_encoder(np.random.default_rng(0), 2, 8, 2)
    >>> x = np.ones((2, 5, 8), np.float32)
    >>> output, pullback = layers.encoder_vjp(params, x, num_heads=2)
    >>> grad_params, grad_x = pullback(output)  # of |output|^2 / 2
    >>> grad_params.keys() == params.keys()
    True
    """
    chosen, masks = _blocks.options_of(**options), Masks(is_causal, key_mask)
    return _blocks.stack(params, x, None, chosen, masks, differentiate=True)


@takes(InitOptions)
def init_encoder(
    rng: np.random.Generator,
    num_layers: int,
    dim: int,
    num_heads: int,
    *,
    final_norm: bool = False,
    **options: Unpack[InitOptions],
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`encoder`.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    num_layers : int
        Number of layers.
    dim, num_heads, **options
        As for :func:`init_encoder_layer`.
    final_norm : bool, optional
        Whether there is a last norm, as pre-norm models have (``norm_first``). Default False.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_encoder(np.random.default_rng(0), 2, 8, 2)
    >>> len(params)
    24
    """
    return init_decoder(rng, num_layers, dim, num_heads, final_norm=final_norm, **options)
