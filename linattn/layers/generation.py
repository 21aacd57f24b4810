"""Language models: logits of the next token, and generation of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Unpack, overload

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.layers import _blocks
from linattn.layers._blocks import DecoderState, InitOptions, Masks, ModelOptions
from linattn.layers._cache import check_state
from linattn.layers._params import (
    Params,
    Part,
    Result,
    as_part,
    join,
    split,
    takes,
    with_pullback,
)
from linattn.layers.decoders import init_decoder
from linattn.layers.dense import init_linear, product
from linattn.layers.embeddings import embedding_vjp, init_embedding
from linattn.sampling import Seed, as_generator
from linattn.typing import Array

__all__ = ["generate", "init_language_model", "language_model", "language_model_vjp"]


@overload
def language_model(
    params: Params,
    tokens: Array,
    memory: Array | None = None,
    *,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: Literal[False] = False,
    **options: Unpack[ModelOptions],
) -> Array: ...


@overload
def language_model(
    params: Params,
    tokens: Array,
    memory: Array | None = None,
    *,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: Literal[True],
    **options: Unpack[ModelOptions],
) -> tuple[Array, DecoderState]: ...


@takes(ModelOptions)
def language_model(
    params: Params,
    tokens: Array,
    memory: Array | None = None,
    *,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    initial_state: DecoderState | None = None,
    return_state: bool = False,
    **options: Unpack[ModelOptions],
) -> Any:
    r"""Return logits of the next token at each position: embedding, causal decoder, product.

    .. math::
        \log p(\mathrm{token}_{t + 1} = c \mid \mathrm{token}_{0 \ldots t})
        = z_{t c} - \log \sum_{c'} e^{z_{t c'}}

    Letters: ``L`` tokens, ``V`` different ones, ``D`` width.

    Parameters
    ----------
    params : dict
        Parameters of :func:`embedding` after ``embedding.``, of :func:`decoder`, and of
        :func:`linear` after ``head.``. Without a head the embedding is tied: logits are products
        with its rows.
    tokens : integer array, (..., L)
        Tokens, of the library of the parameters.
    memory : array, (..., S, D), optional
        Output of an encoder.
    key_mask, memory_mask
        As for :func:`decoder`.
    initial_state, return_state
        As for :func:`decoder`: a stream of tokens continues, with its positions.

    Returns
    -------
    array, (..., L, V)
        In the library, dtype and device of the parameters; or the tuple ``(logits, state)``.

    Other Parameters
    ----------------
    positions : Rotary, Alibi or "sinusoidal", optional
        Positions inside the heads, or sinusoids added to the embedding. Learned positions are added
        if the embedding has them.
    embedding_scale : float, optional
        As `scale` for :func:`embedding`. A tied head uses the unscaled rows. Default 1.
    num_heads : int
        As for :func:`decoder_layer`.
    attention, cross_attention, activation, norm_first, norm_output, parallel, norm, eps : optional
        As for :func:`decoder`.

    Raises
    ------
    TypeError, ValueError
        As :func:`embedding` and :func:`decoder`.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import feature_maps, layers
    >>> params = layers.init_language_model(np.random.default_rng(0), 256, 2, 32, 4)
    >>> model = {"num_heads": 4, "positions": layers.Rotary(), "norm_first": True}
    >>> model["attention"] = layers.LinearAttention(feature_maps.EluFeatures())
    >>> tokens = np.frombuffer(b"attention", np.uint8).astype(np.int64)
    >>> layers.language_model(params, tokens, **model).shape
    (9, 256)
    >>> layers.generate(params, tokens, 20, **model).shape
    (20,)
    """
    masks = Masks(True, key_mask, memory_mask)
    return_state = _checks.check_flag("return_state", return_state)
    if initial_state is None and not return_state:
        return _model(params, tokens, memory, masks, options, differentiate=False)[0]
    y, state = _stream(params, tokens, memory, masks, initial_state, options)
    logits = _logits(params, y)[0]
    return (logits, state) if return_state else logits


@takes(ModelOptions)
@with_pullback
def language_model_vjp(
    params: Params,
    tokens: Array,
    memory: Array | None = None,
    *,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    **options: Unpack[ModelOptions],
) -> Result:
    """Return the output of :func:`language_model` and a function that computes its gradients.

    Parameters
    ----------
    params, tokens, memory, key_mask, memory_mask, **options
        As for :func:`language_model`.

    Returns
    -------
    output : array, (..., L, V)
        Output of :func:`language_model`.
    pullback : callable
        ``pullback(grad_output) -> (grad_params,)``: tokens have no gradient. With a memory, its
        gradient follows.

    Raises
    ------
    NotImplementedError
        The attention has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_language_model(np.random.default_rng(0), 256, 1, 8, 2)
    >>> tokens = np.frombuffer(b"attention", np.uint8).astype(np.int64)
    >>> logits, pullback = layers.language_model_vjp(params, tokens, num_heads=2)
    >>> (grad_params,) = pullback(logits)  # of |logits|^2 / 2
    >>> grad_params.keys() == params.keys()
    True
    """
    masks = Masks(True, key_mask, memory_mask)
    return _model(params, tokens, memory, masks, options, differentiate=True)


@takes(InitOptions)
def init_language_model(
    rng: np.random.Generator,
    num_tokens: int,
    num_layers: int,
    dim: int,
    num_heads: int,
    *,
    num_positions: int | None = None,
    tied: bool = False,
    has_memory: bool = False,
    final_norm: bool = True,
    **options: Unpack[InitOptions],
) -> dict[str, NDArray[Any]]:
    """Draw the parameters of :func:`language_model`.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of the numbers.
    num_tokens : int
        V.
    num_layers, dim, num_heads, has_memory, final_norm, **options
        As for :func:`init_decoder`, but `final_norm` is True by default.
    num_positions : int, optional
        Number of learned positions. Default: none.
    tied : bool, optional
        Without a head: the embedding gives the logits too. Its standard deviation is then
        ``D ** -0.5``, else 1. Default False.

    Returns
    -------
    dict
        NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_language_model(np.random.default_rng(0), 256, 1, 8, 2)
    >>> params["embedding.weight"].shape, params["head.weight"].shape
    ((256, 8), (256, 8))
    """
    dtype = options.get("dtype", np.float32)
    dim = _checks.check_positive_int("dim", dim)
    scale = dim**-0.5 if _checks.check_flag("tied", tied) else 1.0
    size: dict[str, Any] = {"num_positions": num_positions, "scale": scale}
    parts = {
        "embedding.": init_embedding(rng, num_tokens, dim, dtype=dtype, **size),
        "": init_decoder(
            rng,
            num_layers,
            dim,
            num_heads,
            has_memory=has_memory,
            final_norm=final_norm,
            **options,
        ),
    }
    if not tied:
        parts["head."] = init_linear(rng, dim, num_tokens, bias=False, dtype=dtype)
    return join(parts)


@takes(ModelOptions)
def generate(
    params: Params,
    tokens: Array,
    num_tokens: int,
    memory: Array | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    rng: Seed = None,
    key_mask: Array | None = None,
    memory_mask: Array | None = None,
    **options: Unpack[ModelOptions],
) -> Array:
    r"""Generate tokens one at a time with :func:`language_model`.

    .. math::
        p_c \propto e^{z_c / T}

    over all tokens c, or only the most likely. Letters: ``L`` tokens of the prompt, ``n`` new
    tokens, ``V`` different tokens, ``T`` temperature.

    Parameters
    ----------
    params : dict
        As for :func:`language_model`.
    tokens : integer array, (..., L)
        Prompts of at least one token; each sequence is continued separately.
    num_tokens : int
        n, the largest number of new tokens.
    memory, memory_mask
        As for :func:`language_model`.
    key_mask : boolean array, (L,) or tokens.shape with axes of 1, optional
        True = a token, False = padding. Prompts of different lengths are padded on either side.
        Padding is removed: each prompt is continued as it would be alone, from position 0. Default:
        no padding.
    temperature : float, optional
        T. At 0, the default, the most likely token is taken.
    top_k : int, optional
        Draw only from the k most likely tokens.
    top_p : float, optional
        Draw only from the fewest tokens whose probabilities, after `top_k`, sum to at least p.
    stop : int, optional
        A sequence ends with this token, and is filled with it. Generation ends when all sequences
        have ended. Default: none.
    rng : int, Generator, SeedSequence or None, optional
        Seed or generator for the draws.
    **options
        As for :func:`language_model`.

    Returns
    -------
    integer array, (..., n) or shorter
        The new tokens, in the library, dtype and device of the prompts.

    Raises
    ------
    TypeError, ValueError
        As :func:`language_model`. A prompt is empty; the dtype of the tokens is too small for V;
        top_k or top_p is given at temperature 0; key_mask has another shape or dtype; logits are
        NaN.
    NotImplementedError
        The attention cannot run as a stream.

    Notes
    -----
    One call of the model reads the whole prompt. With :class:`LinearAttention` each new token then
    takes the same time, and memory does not grow. With :class:`SoftmaxAttention` keys and values
    are stored, and a token takes time O(L + n). Prompts of one length run together, different
    lengths one after the other. Tokens are chosen on the host, with one uniform number each.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), section 3.4; Fan, Lewis and Dauphin,
    "Hierarchical Neural Story Generation" (2018), for top-k; Holtzman et al., "The Curious Case of
    Neural Text Degeneration" (2020), section 3.1, for top-p.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import layers
    >>> params = layers.init_language_model(np.random.default_rng(0), 256, 1, 8, 2)
    >>> tokens = np.frombuffer(b"attention", np.uint8).astype(np.int64)
    >>> layers.generate(params, tokens, 20, num_heads=2, temperature=1.0, rng=0).shape
    (20,)
    """
    number = _checks.check_positive_int("num_tokens", num_tokens, least=0)
    choose = _Sampler.checked(temperature, top_k, top_p, rng)
    params = as_part(params)
    tokens = _checks.check_array("tokens", tokens)
    _check_holds_all(tokens, _parts(params)[0]["weight"].shape[0])
    if not tokens.shape[-1]:
        raise ValueError("tokens must hold at least one token to go on from, got none")
    if stop is not None:
        stop = _checks.check_positive_int("stop", stop, least=0)
    xp, device, shape = _arrays.namespace(tokens), array_api_compat.device(tokens), tokens.shape
    of_memory = memory, memory_mask
    if key_mask is None:
        found = _continued(params, tokens, number, of_memory, (choose, stop), options)
    else:
        found = np.full((math.prod(shape[:-1]), number), stop or 0, np.int64)
        longest = 0
        for rows, prompts in _by_length(tokens, key_mask):
            of_rows = _rows_of(of_memory, rows, shape)
            new = _continued(params, prompts, number, of_rows, (choose, stop), options)
            found[rows, : new.shape[1]] = new
            longest = max(longest, new.shape[1])
        found = found[:, :longest]
    return xp.asarray(found.reshape(*shape[:-1], found.shape[1]), dtype=tokens.dtype, device=device)


def _continued(
    params: Part,
    tokens: Array,
    number: int,
    of_memory: tuple[Any, Any],
    choice: tuple[_Sampler, int | None],
    options: ModelOptions,
) -> NDArray[np.int64]:
    """Continue prompts of one length; return a row of new tokens for each, on the host."""
    (memory, memory_mask), (choose, stop) = of_memory, choice
    xp, lead = _arrays.namespace(tokens), tuple(tokens.shape[:-1])
    device, dtype = array_api_compat.device(tokens), tokens.dtype
    found = np.empty((math.prod(lead), number), np.int64)
    ended = np.zeros(len(found), np.bool_)
    state, masks, last = None, Masks(True, None, memory_mask), tokens
    for i in range(number):
        y, state = _stream(params, last, memory, masks, state, options)
        if not i:
            state = _blocks.for_steps(state, _chosen(options)[1])
        logits = _arrays.to_numpy(_logits(params, y[..., -1:, :])[0], "logits")
        found[:, i] = choose(logits.reshape(len(found), logits.shape[-1]).astype(np.float64))
        if stop is not None:
            found[ended, i] = stop
            ended |= found[:, i] == stop
            if ended.all():
                return found[:, : i + 1]
        last = xp.asarray(found[:, i].reshape(*lead, 1), dtype=dtype, device=device)
    return found


def _by_length(tokens: Array, key_mask: Array) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """For each length yield the rows of that length, and their tokens without padding."""
    xp, device, shape = _arrays.namespace(tokens), array_api_compat.device(tokens), tokens.shape
    mask = _checks.check_key_mask(key_mask, tokens[..., None], xp, query_len=None, of="key")
    held = np.broadcast_to(_arrays.to_numpy(mask)[..., 0], shape).reshape(-1, shape[-1])
    lengths = held.sum(-1)
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise ValueError(
            f"key_mask must leave a token of each sequence, got none of sequence {row}"
        )
    flat = xp.reshape(tokens, (math.prod(shape),))
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        places = np.nonzero(held[rows])[1].reshape(len(rows), length) + rows[:, None] * shape[-1]
        prompts = xp.take(flat, xp.asarray(places.ravel(), device=device))
        yield rows, xp.reshape(prompts, places.shape)


def _rows_of(
    of_memory: tuple[Any, Any], rows: NDArray[np.int64], shape: tuple[int, ...]
) -> tuple[Any, Any]:
    """Return the memory and its mask for some sequences of the batch."""
    found = []
    for array, ndim in zip(of_memory, (2, 1), strict=True):
        if array is None or array.ndim == ndim:
            found.append(array)
            continue
        xp, device = _arrays.namespace(array), array_api_compat.device(array)
        array = xp.broadcast_to(array, (*shape[:-1], *array.shape[array.ndim - ndim :]))
        array = xp.reshape(array, (math.prod(shape[:-1]), *array.shape[array.ndim - ndim :]))
        found.append(xp.take(array, xp.asarray(rows, device=device), axis=0))
    return found[0], found[1]


def _check_holds_all(tokens: Array, num: int) -> None:
    """Check that the dtype of the prompt can hold all tokens of the model."""
    xp = _arrays.namespace(tokens)
    if xp.isdtype(tokens.dtype, "integral") and xp.iinfo(tokens.dtype).max < num - 1:
        raise ValueError(
            f"tokens must have a dtype that holds all of {num} tokens, got {tokens.dtype}; convert "
            f"them to int64"
        )


class _Sampler(NamedTuple):
    """Chooses tokens from logits, with temperature, top-k and top-p."""

    temperature: float
    top_k: int | None
    top_p: float | None
    rng: np.random.Generator

    @classmethod
    def checked(cls, temperature: Any, top_k: Any, top_p: Any, rng: Seed) -> _Sampler:
        """Check the arguments of :func:`generate`."""
        temperature = _checks.check_finite_number("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if top_k is not None:
            top_k = _checks.check_positive_int("top_k", top_k)
        if top_p is not None:
            top_p = _checks.check_finite_number("top_p", top_p, positive=True)
            if top_p > 1:
                raise ValueError(f"top_p must be at most 1, got {top_p}")
        if not temperature and (top_k, top_p) != (None, None):
            raise ValueError(
                "temperature must be above 0 where top_k or top_p is given, got 0, which takes the "
                "likeliest token; give temperature=1.0 to draw"
            )
        return cls(temperature, top_k, top_p, as_generator(rng))

    def __call__(self, logits: NDArray[np.float64]) -> NDArray[np.int64]:
        """Choose one token for each row of logits (n, V)."""
        if np.isnan(logits).any():
            raise ValueError(
                "logits must be numbers, got NaN: parameters or memory hold NaN or overflow"
            )
        if not self.temperature:
            likeliest: NDArray[np.int64] = np.argmax(logits, axis=-1)
            return likeliest
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : self.top_k]
        scaled = np.take_along_axis(logits, order, axis=-1) / self.temperature
        weights = np.exp(scaled - scaled[:, :1])
        ends = np.cumsum(weights, axis=-1)
        total = ends[:, -1:]
        if self.top_p is not None:
            # Up to and with the first token at which the sum reaches p.
            number = np.argmax(ends >= self.top_p * total, axis=-1)
            total = np.take_along_axis(ends, number[:, None], axis=-1)
        drawn = self.rng.random((len(logits), 1)) * total
        chosen = np.argmax(ends > drawn, axis=-1)
        picked: NDArray[np.int64] = np.take_along_axis(order, chosen[:, None], axis=-1)[:, 0]
        return picked


def _parts(params: Params) -> list[Part]:
    """Split parameters into embedding, head and decoder."""
    return split(params, "embedding.", "head.", "")


def _model(
    params: Params,
    tokens: Array,
    memory: Array | None,
    masks: Masks,
    options: ModelOptions,
    *,
    differentiate: bool,
) -> Result:
    """Apply the model to all tokens; the pullback works only with ``differentiate=True``."""
    of_embedding, _, of_decoder = _parts(params)
    added, chosen = _chosen(options)
    x, pull_embedding = embedding_vjp(of_embedding, tokens, **added)
    y, pull_decoder = _blocks.stack(
        of_decoder, x, memory, chosen, masks, differentiate=differentiate
    )
    logits, pull_logits = _logits(params, y)

    def pullback(grad_output: Array) -> tuple[Any, ...]:
        grads, tied, grad = pull_logits(grad_output)
        grads_decoder, grad, *by_memory = pull_decoder(grad)
        (grads_embedding,) = pull_embedding(grad)
        if tied is not None:
            grads_embedding["weight"] = grads_embedding["weight"] + tied
        of_all = {"embedding.": grads_embedding, "": grads_decoder, "head.": grads}
        return join(of_all), *by_memory

    return logits, pullback


def _stream(
    params: Params,
    tokens: Array,
    memory: Array | None,
    masks: Masks,
    state: DecoderState | None,
    options: ModelOptions,
) -> tuple[Array, DecoderState]:
    """Return the decoder's output at the next tokens of a stream."""
    of_embedding, _, of_decoder = _parts(params)
    added, chosen = _chosen(options)
    check_state(state, DecoderState)
    start = 0 if state is None else state.length
    x = embedding_vjp(of_embedding, tokens, start=start, **added)[0]
    return _blocks.stream_stack(of_decoder, x, memory, chosen, masks, state)


def _chosen(options: ModelOptions) -> tuple[dict[str, Any], _blocks.Options]:
    """Split options into those for the embedding and for the layers."""
    chosen: dict[str, Any] = {**options}
    added: dict[str, Any] = {"scale": chosen.pop("embedding_scale", 1.0)}
    if options.get("positions") == "sinusoidal":
        added["positions"] = chosen.pop("positions")
    return added, _blocks.options_of(**chosen)


def _logits(params: Params, y: Array) -> tuple[Array, Any]:
    """Return logits, and a pullback to the head, or the tied embedding, and to y."""
    of_embedding, head, _ = _parts(params)
    if head:
        logits, pull = product(head, y)

        def pullback(grad: Array) -> tuple[Any, ...]:
            grads, grad_y = pull(grad)
            return grads, None, grad_y

        return logits, pullback
    logits, pull_tied = product({"weight": of_embedding["weight"]}, y)

    def pullback_tied(grad: Array) -> tuple[Any, ...]:
        grads, grad_y = pull_tied(grad)
        return {}, grads["weight"], grad_y

    return logits, pullback_tied
