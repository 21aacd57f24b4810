"""A cache of transformers that holds states."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from linattn.interop.transformers._masks import KEYS, reject
from linattn.typing import State


class StateLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """The state of one layer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.state: State | None = None
        self.before = self.length = self.attended = 0
        """Numbers of tokens: before the last update, after it, and in the state."""

    @property
    def keys(self) -> Any:
        """Raise: some models read keys without an update."""
        return reject("keys in a StateCache", KEYS)

    @keys.setter
    def keys(self, _: Any) -> None:
        pass

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the first attention makes the state."""
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **given: Any) -> Any:
        """Return these keys and values alone; the attention finds this layer by its keywords."""
        if self.attended != self.length:
            raise RuntimeError(
                "a StateCache must be read by linear attention of linattn, and was not by the last "
                'tokens; use model.set_attn_implementation("linattn_linear"), or a DynamicCache if '
                "transformers warns that the model's attention cannot be chosen"
            )
        self.is_initialized = True
        self.before, self.length = self.length, self.length + key_states.shape[-2]
        # transformers gives the attention's keywords to be changed in place. Few models do not, and
        # attend to these very keys.
        given.get("kwargs", {})["linattn_layer"] = self
        key_states = key_states.view_as(key_states)
        key_states._linattn_layer = self
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are of all tokens so far."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no bound."""
        return -1

    def _select(self, choose: Any) -> None:
        if self.state is not None:
            kvz, log_scale = choose(self.state.kvz), choose(self.state.log_scale)
            self.state = self.state._replace(kvz=kvz, log_scale=log_scale)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let the states follow their beams."""
        self._select(lambda array: array.index_select(0, beam_idx.to(array.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the state of each sequence."""
        self._select(lambda array: array.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the states of these sequences."""
        self._select(lambda array: array[indices])

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.before, self.length, self.attended = None, 0, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise: a state cannot forget its last tokens."""
        if tokens_to_remove:
            reject("way to take tokens out of a StateCache", KEYS)

    def offload(self) -> None:
        """Stay: a state is small."""

    def prefetch(self) -> None:
        """Stay."""


class _MixedLayer(StateLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The state of one layer that also has a recurrence of the model's own (Falcon-H1)."""

    is_croppable = False
    lazy_initialization = LinearAttentionLayer.lazy_initialization

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let both states follow their beams."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        StateLayer.reorder_cache(self, beam_idx)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        StateLayer.reset(self)


class _Layers(list[Any]):
    """Layers that are made when they are first updated."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            raise ValueError(
                "a StateCache must know the layers of this model; use StateCache(model.config)"
            )
        return super().__getitem__(index)


class StateCache(cache_utils.Cache):  # type: ignore[misc]
    """A cache for ``model.generate`` that holds a :class:`linattn.State` for each layer.

    It takes the place of cached keys and values where attention is linear: its size does not grow.
    Beams are reordered. It cannot be cropped, which assisted generation needs. A new cache is
    empty, and serves one model.

    Parameters
    ----------
    config : PretrainedConfig, optional
        ``model.config``, which says what each layer caches. Needed for hybrid models (Qwen3-Next,
        Kimi-Linear, Bamba, Falcon-H1), whose other layers keep their own states, and for models
        with sliding windows (Gemma 3, GPT-OSS), whose layers keep the keys of the window. Default:
        a state for each layer.

    Raises
    ------
    NotImplementedError
        In the forward pass: exact attention, a window without ``config``, full attention, a layer
        that attends twice to the same keys (DiffLlama), a cropped cache.
    RuntimeError
        At the second forward pass with another attention than this module's.
    ValueError
        A hybrid model without ``config``.

    Notes
    -----
    Memory for each sequence and layer: G m (e + 2) numbers, with G heads of keys, m features and
    values of dim e.

    Encoder-decoders take ``EncoderDecoderCache(StateCache(), DynamicCache())`` of transformers,
    which holds the keys of the encoder in its second part.

    Examples
    --------
    >>> from linattn.interop.transformers import StateCache
    >>> StateCache().get_seq_length()
    0
    """

    def __init__(self, config: Any = None) -> None:
        if config is None:
            super().__init__(layer_class_to_replicate=StateLayer)
            self.layers = _Layers()
            return
        layers = transformers.DynamicCache(config=config).layers
        for i, layer in enumerate(layers):
            if type(layer) is cache_utils.DynamicLayer:
                layers[i] = StateLayer()
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                layers[i] = _MixedLayer(layer.number_of_states)
        super().__init__(layers=layers)
