"""Attention of linattn in the models of transformers, and a cache that holds states.

:func:`register` adds an attention to those that ``attn_implementation=`` chooses from::

    from linattn.interop.transformers import register

    register()
    model.set_attn_implementation("linattn")

Masks are translated to masks of keys, stops, windows or packed sequences. No array of all pairs of
tokens is made. With a feature map :func:`register` adds linear attention, and :class:`StateCache`
is its cache for ``model.generate``.
"""

from __future__ import annotations

from functools import partial

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(
        "linattn.interop.transformers needs torch and transformers, one of which is not installed: "
        "pip install torch transformers"
    ) from error

from linattn.interop.transformers._attention import attend_in_layer, linear, softmax
from linattn.interop.transformers._cache import StateCache
from linattn.interop.transformers._masks import make_mask
from linattn.typing import FeatureMap

__all__ = ["StateCache", "register"]


def register(
    feature_map: FeatureMap | None = None,
    *,
    name: str | None = None,
    exact_window: int | None = None,
    sinks: int | None = None,
) -> str:
    r"""Add an attention to those that the models of transformers choose from, and return its name.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Linear attention with this map, for heads of its dim. Default: exact attention,
        :func:`linattn.softmax_attention`.
    name : str, optional
        What ``attn_implementation=`` will be. Default "linattn", with a map "linattn_linear".
    exact_window, sinks : int, optional
        With a map: nearby keys, and the first keys, count exactly, as for
        :func:`linattn.linear_attention`. Default: none.

    Returns
    -------
    str
        The name.

    Raises
    ------
    ImportError
        When this module is imported: torch or transformers is missing.
    TypeError
        A map that is none; a window or sinks without a map.

    Notes
    -----
    The model then calls it with queries (batch, H, L, d), keys (batch, G, S, d) and a mask. It
    serves causal, full and prefix attention, sliding windows, chunks, padding, packed sequences,
    grouped heads, sinks (GPT-OSS) and biases of the distance (T5). The gradient is linattn's own,
    in linear memory. Sinks and biases use torch's autograd, which stores each block.

    It raises NotImplementedError for dropout of weights, soft caps of logits,
    ``output_attentions``, masks and biases of other patterns, models that compute with their mask,
    and any tensor that a layer gives by a name that is not known here (``indices=`` of sparse
    attention). Linear attention also raises it for biases.

    Linear attention multiplies queries by the model's scaling times ``sqrt(d)``, which is 1 in most
    models: maps of the softmax kernel then see the logits of the model. Layers with a sliding
    window attend exactly to the keys of the window, which takes linear time, and to no others. A
    sink of GPT-OSS adds its weight to the denominator, beside the weights of the map.

    transformers describes a mask by a function of two positions. Causal masks, full masks and
    windows are recognized without reading them. Other patterns are read off the function, some rows
    at a time: time O(L S) once for each forward pass, not for each layer, and memory O(L + S).
    ``torch.compile`` compiles whole models with recognized masks; other masks, sinks and biases
    break the graph. To compile the whole graph, give an ``attention_mask`` or a cache: otherwise
    transformers looks for packed sequences in ``position_ids``.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.interop.transformers import register
    >>> register()
    'linattn'
    >>> register(EluFeatures())
    'linattn_linear'
    """
    options = {"exact_window": exact_window, "sinks": sinks}
    near = {option: number for option, number in options.items() if number is not None}
    if feature_map is None:
        if near:
            raise TypeError(
                f"feature_map must be given with {near}: all keys of exact attention are exact"
            )
        name, attend = name or "linattn", softmax
    elif not isinstance(feature_map, FeatureMap):
        raise TypeError(
            f"feature_map must be one of linattn.feature_maps, such as EluFeatures(), got "
            f"{feature_map!r}; leave it out for exact attention"
        )
    else:
        name, attend = name or "linattn_linear", partial(linear, feature_map, near)
    transformers.AttentionInterface.register(name, partial(attend_in_layer, attend))
    transformers.AttentionMaskInterface.register(name, make_mask)
    return name
