"""Layers of transformers on arrays of any library: pure functions over dictionaries of arrays.

Every layer is a function ``f(params, *inputs, **options)``. ``params`` is a dictionary with the
names of torch's state dictionaries. ``f_vjp`` takes the same arguments and returns the output and
``pullback(grad_output) -> (grad_params, *grad_inputs)``. ``init_f(rng, ...)`` draws parameters.

One token at a time: :func:`linear`, :func:`feed_forward`, :func:`layer_norm`, :func:`rms_norm`,
:func:`embedding`. Attention: :func:`multi_head_attention` with ``attention=`` one of
:class:`SoftmaxAttention`, :class:`LinearAttention`, :class:`LandmarkAttention`,
:class:`AutomaticAttention`, :class:`BoundedAttention`, and ``positions=`` :class:`Rotary` or
:class:`Alibi`. Around a recurrence: :func:`causal_convolution`, :func:`gated_rms_norm`. Models:
:func:`encoder_layer`, :func:`decoder_layer`, :func:`encoder`, :func:`decoder`,
:func:`language_model`; :func:`generate`. Files: :func:`load_safetensors`,
:func:`save_safetensors`.
"""

from __future__ import annotations

from linattn.layers._blocks import DecoderState, LayerState
from linattn.layers._heads import AttentionState
from linattn.layers.attention import (
    init_multi_head_attention,
    multi_head_attention,
    multi_head_attention_vjp,
)
from linattn.layers.attentions import (
    Alibi,
    Attention,
    AutomaticAttention,
    BoundedAttention,
    LandmarkAttention,
    LinearAttention,
    Rotary,
    Scope,
    SoftmaxAttention,
)
from linattn.layers.decoders import (
    decoder,
    decoder_layer,
    decoder_layer_vjp,
    decoder_vjp,
    init_decoder,
    init_decoder_layer,
)
from linattn.layers.dense import (
    feed_forward,
    feed_forward_vjp,
    init_feed_forward,
    init_linear,
    init_norm,
    layer_norm,
    layer_norm_vjp,
    linear,
    linear_vjp,
    rms_norm,
    rms_norm_vjp,
)
from linattn.layers.embeddings import embedding, embedding_vjp, init_embedding
from linattn.layers.encoders import (
    encoder,
    encoder_layer,
    encoder_layer_vjp,
    encoder_vjp,
    init_encoder,
    init_encoder_layer,
)
from linattn.layers.generation import (
    generate,
    init_language_model,
    language_model,
    language_model_vjp,
)
from linattn.layers.recurrent import (
    causal_convolution,
    causal_convolution_vjp,
    gated_rms_norm,
    gated_rms_norm_vjp,
)
from linattn.layers.storage import load_safetensors, save_safetensors

__all__ = [
    "Alibi",
    "Attention",
    "AttentionState",
    "AutomaticAttention",
    "BoundedAttention",
    "DecoderState",
    "LandmarkAttention",
    "LayerState",
    "LinearAttention",
    "Rotary",
    "Scope",
    "SoftmaxAttention",
    "causal_convolution",
    "causal_convolution_vjp",
    "decoder",
    "decoder_layer",
    "decoder_layer_vjp",
    "decoder_vjp",
    "embedding",
    "embedding_vjp",
    "encoder",
    "encoder_layer",
    "encoder_layer_vjp",
    "encoder_vjp",
    "feed_forward",
    "feed_forward_vjp",
    "gated_rms_norm",
    "gated_rms_norm_vjp",
    "generate",
    "init_decoder",
    "init_decoder_layer",
    "init_embedding",
    "init_encoder",
    "init_encoder_layer",
    "init_feed_forward",
    "init_language_model",
    "init_linear",
    "init_multi_head_attention",
    "init_norm",
    "language_model",
    "language_model_vjp",
    "layer_norm",
    "layer_norm_vjp",
    "linear",
    "linear_vjp",
    "load_safetensors",
    "multi_head_attention",
    "multi_head_attention_vjp",
    "rms_norm",
    "rms_norm_vjp",
    "save_safetensors",
]
