"""A small causal transformer on `linattn.layers`, and its text, for both training examples.

No framework: a layer is a function that returns its output and a pullback, and a gradient is the
pullbacks called in reverse. What is done here is what is not in `linattn.layers`: an embedding of
several bytes, parameters to start from that make a short training enough, and a check of what is
generated.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from linattn import layers
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.typing import FeatureMap

Floats: TypeAlias = NDArray[Any]
Tokens: TypeAlias = NDArray[np.int64]
Params: TypeAlias = dict[str, Floats]
Pullback: TypeAlias = Callable[[Floats], Any]
Kind: TypeAlias = Literal["elu", "favor", "softmax", "none"]

LABELS: dict[Kind, str] = {
    "elu": "elu+1",
    "favor": "FAVOR+",
    "softmax": "softmax",
    "none": "no attention",
}


PAGE = 4096
"""Bytes of the text that are held out together."""


class ExampleError(Exception):
    """What went wrong, in one line."""


# --- 1. Attention --------------------------------------------------------------------------------


class NoAttention(layers.Attention):
    """Attention that sees nothing: zeros, to compare with."""

    def vjp(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> tuple[Any, Pullback]:
        """Return zeros, whose gradients are zeros."""
        return np.zeros_like(value), lambda g: tuple(map(np.zeros_like, (query, key, value)))

    def extend(
        self, query: Any, key: Any, value: Any, cache: Any, scope: layers.Scope
    ) -> tuple[Any, Any]:
        """Return zeros, and nothing to keep."""
        return np.zeros_like(value), None


class Attention:
    """Causal attention of each layer.

    Parameters
    ----------
    kind : str
        ``"elu"`` and ``"favor"`` are linear, ``"softmax"`` is exact, ``"none"`` leaves it out.
    num_layers, dim : int
        Layers of the model, dim of a head.
    num_features, seed : int
        Of the random features of FAVOR+.
    """

    def __init__(self, kind: Kind, num_layers: int, dim: int, num_features: int, seed: int) -> None:
        self.kind = kind
        self.maps: list[FeatureMap] = []
        self._num_layers, self._dim, self._num_features = num_layers, dim, num_features
        self._rng = np.random.default_rng(seed)
        if kind == "elu":
            self.maps = [EluFeatures(dim) for _ in range(num_layers)]
        self.redraw()

    def redraw(self) -> None:
        """Draw other random features, if there are any."""
        if self.kind == "favor":
            self.maps = [
                PositiveFeatures(self._dim, num_features=self._num_features, rng=self._rng)
                for _ in range(self._num_layers)
            ]

    def by_layer(self) -> list[layers.Attention]:
        """Return what the layers take as their ``attention``."""
        if self.maps:
            return [layers.LinearAttention(phi) for phi in self.maps]
        one = layers.SoftmaxAttention() if self.kind == "softmax" else NoAttention()
        return [one] * self._num_layers


# --- 2. The model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer.

    Attributes
    ----------
    vocabulary, length : int
        Different tokens, and how many of them a document has at most.
    dim, heads, layers : int
        Width of the model, heads of a layer, layers.
    taps : int
        A position's embedding is a sum over this many tokens, itself and those before it, each by
        a table of its own: what a short convolution would see.
    period : int, optional
        Positions so far apart start with the same code. Default `length`: none do.
    amplitude : float
        Of the waves that positions start with; bytes start with a standard deviation of 1/2.
    sharpness : float
        Of queries and keys at the start: at 1 a token attends to tokens that are like it, near 0 at
        all alike.
    """

    vocabulary: int
    length: int
    dim: int = 128
    heads: int = 4
    layers: int = 2
    taps: int = 1
    period: int | None = None
    amplitude: float = 1.0
    sharpness: float = 1.0


def wave_positions(length: int, dim: int, period: int) -> Floats:
    """Return the sines and cosines of the waves that fit into a period: nearly orthogonal codes.

    A shift by any distance is the same linear map at every position, so that one matrix learns to
    look so many tokens back.
    """
    number = min(dim, period) // 2
    angles = 2 * math.pi / period * np.arange(length)[:, None] * (1 + np.arange(number))
    codes = np.zeros((length, dim))
    codes[:, : 2 * number] = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return codes


def first_params(sizes: Sizes, rng: np.random.Generator, dtype: Any = np.float32) -> Params:
    """Draw parameters from which a short training is enough."""
    params = layers.init_decoder(
        rng, sizes.layers, sizes.dim, sizes.heads, final_norm=True, bias=False, dtype=dtype
    )
    params |= named("head.", layers.init_linear(rng, sizes.dim, sizes.vocabulary, bias=False))
    for name, weight in params.items():
        if weight.ndim == 2:
            small = {"out_proj": 0.3, "linear2": 0.3, "head": 0.1}.get(name.split(".")[-2], 1.0)
            drawn = rng.standard_normal(weight.shape) / math.sqrt(weight.shape[1])
            params[name] = (small * drawn).astype(dtype)
        if name.endswith("in_proj_weight"):
            # Queries start as keys are: a token attends to tokens that are like it.
            query, key, _ = np.split(params[name], 3)
            key *= sizes.sharpness
            query[...] = key
    scale = 0.5 / math.sqrt(sizes.taps)
    for tap in range(sizes.taps):
        table = layers.init_embedding(rng, sizes.vocabulary, sizes.dim, scale=scale, dtype=dtype)
        params |= named(f"embedding.{tap}.", table)
    waves = wave_positions(sizes.length, sizes.dim, sizes.period or sizes.length)
    params["embedding.0.position.weight"] = (sizes.amplitude * waves).astype(dtype)
    return params


def part(params: Params, prefix: str) -> Params:
    """Return the parameters whose names begin so, without that beginning."""
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}


def named(prefix: str, params: Params) -> Params:
    """Put a beginning before names."""
    return {prefix + name: array for name, array in params.items()}


class Transformer:
    """A causal transformer: pre-norm layers without biases, learned positions.

    Parameters
    ----------
    sizes : Sizes
        Its sizes.
    attention : Attention
        What its heads compute.
    seed : int
        Of the parameters it starts from.
    dtype : dtype, optional
        float64 is for checks.

    Attributes
    ----------
    params : dict of str to array
        All of them; an optimizer changes them in place.
    """

    def __init__(
        self, sizes: Sizes, attention: Attention, seed: int, dtype: Any = np.float32
    ) -> None:
        self.sizes, self.attention = sizes, attention
        self.params = first_params(sizes, np.random.default_rng(seed), dtype)

    @property
    def num_parameters(self) -> int:
        """How many parameters are used: without attention, its own are not."""
        is_none = self.attention.kind == "none"
        return sum(
            array.size
            for name, array in self.params.items()
            if not (is_none and ("self_attn" in name or "norm1" in name))
        )

    def logits(self, tokens: Tokens, last: int | None = None) -> tuple[Floats, Pullback]:
        """Return logits of the next token and a pullback to the gradient by all parameters.

        Parameters
        ----------
        tokens : array, (documents, L)
            The tokens so far.
        last : int, optional
            Only at so many positions, those at the end.

        Returns
        -------
        logits : array, (documents, last, vocabulary)
            At each position, of the token that follows it.
        pullback : callable
            ``pullback(grad_logits) -> gradient``, a dictionary like `params`.
        """
        begin = 0 if last is None else tokens.shape[1] - last
        x, pull_embeddings = self._embed(tokens)
        y, pull_decoder = layers.decoder_vjp(self._decoder(), x, **self._options())
        out, pull_head = layers.linear_vjp(part(self.params, "head."), y[:, begin:])

        def pullback(grad_logits: Floats) -> Params:
            by_y = np.zeros_like(y)
            by_head, by_y[:, begin:] = pull_head(grad_logits)
            by_decoder, by_x = pull_decoder(by_y)
            return pull_embeddings(by_x) | by_decoder | named("head.", by_head)

        return out, pullback

    def loss(self, tokens: Tokens, targets: Tokens) -> tuple[float, Params]:
        """Return the mean loss in nats and its gradient; targets belong to the last positions."""
        logits, pullback = self.logits(tokens, targets.shape[1])
        loss, grad_logits = cross_entropy(logits, targets)
        return loss, pullback(grad_logits)

    def step(
        self, tokens: Tokens, state: layers.DecoderState | None = None
    ) -> tuple[Floats, layers.DecoderState]:
        """Return the logits after the last token, and the state after it.

        Tokens are all there were; a state, of all but those at the end, spares going over them
        again. With linear attention it does not grow.
        """
        x, _ = self._embed(tokens[None], 0 if state is None else state.length)
        y, state = layers.decoder(
            self._decoder(), x, initial_state=state, return_state=True, **self._options()
        )
        return layers.linear(part(self.params, "head."), y[0, -1:])[0], state

    def _decoder(self) -> Params:
        return {k: v for k, v in self.params.items() if k.startswith(("layers.", "norm."))}

    def _options(self) -> dict[str, Any]:
        return {
            "num_heads": self.sizes.heads,
            "attention": self.attention.by_layer(),
            "norm_first": True,
            "activation": "squared_relu",
        }

    def _embed(self, tokens: Tokens, start: int = 0) -> tuple[Floats, Callable[[Floats], Params]]:
        """Embed the tokens from a position on."""
        length, pulls = tokens.shape[1], []
        x: Floats = np.zeros(())
        for tap in range(min(self.sizes.taps, length)):
            first = max(tap, start)
            tables = part(self.params, f"embedding.{tap}.")
            seen = tokens[:, first - tap : length - tap]
            rows, pull = layers.embedding_vjp(tables, seen, start=0 if tap else start)
            if tap:
                x[:, first - start :] += rows
            else:
                x = rows
            pulls.append(pull)

        def pullback(g: Floats) -> Params:
            gradient = {k: np.zeros_like(v) for k, v in self.params.items() if "embedding" in k}
            for tap, pull in enumerate(pulls):
                gradient |= named(f"embedding.{tap}.", pull(g[:, tap:])[0])
            return gradient

        return x, pullback


def cross_entropy(logits: Floats, targets: Tokens) -> tuple[float, Floats]:
    """Return the mean of ``-log p(target)`` in nats and its gradient by the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=-1, keepdims=True)
    at = targets[..., None]
    loss = np.mean(np.log(total) - np.take_along_axis(shifted, at, axis=-1), dtype=np.float64)
    p /= total
    np.put_along_axis(p, at, np.take_along_axis(p, at, axis=-1) - 1, axis=-1)
    p /= targets.size
    return float(loss), p


# --- 3. Generating -------------------------------------------------------------------------------


def generate(model: Transformer, prompt: Sequence[int], number: int) -> tuple[list[int], Floats]:
    """Continue a prompt by the likeliest token, `number` times.

    Returns
    -------
    tokens : list of int
        What follows the prompt.
    logits : array, (number, vocabulary)
        Each is the largest of its row. Layers go on from a state: of linear attention by
        `linattn.decode_step`, of exact attention with all keys and values so far.
    """
    tokens, rows, state = list(prompt), [], None
    for _ in range(number):
        row, state = model.step(np.asarray(tokens), state)
        rows.append(row)
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :], np.stack(rows)


def check_generated(
    model: Transformer, prompt: Sequence[int], tokens: Sequence[int], logits: Floats
) -> str:
    """Check that the model over the whole text would have chosen what was generated.

    Raises
    ------
    ExampleError
        It would not.
    """
    whole = np.asarray([[*prompt, *tokens[:-1]]])
    at_once = model.logits(whole, last=len(tokens))[0][0]
    wrong = np.flatnonzero(at_once.argmax(axis=-1) != np.asarray(tokens))
    if wrong.size:
        message = f"generated token {wrong[0]} is not the one that the whole text gives"
        raise ExampleError(message)
    largest = float(np.max(np.abs(at_once - logits)))
    way = "linattn.decode_step" if model.attention.maps else "one token at a time"
    return (
        f"Check: {len(tokens)} tokens generated by {way} are those of the forward pass over the "
        f"whole text; logits differ by {largest:.0e} at most."
    )


# --- 4. Text ------------------------------------------------------------------------------------


def topic_bytes() -> tuple[Tokens, Tokens]:
    """Return CPython's help topics as bytes, those to train on and every tenth page held out.

    Topics quote one another: a paragraph is kept where it comes first.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
    text = as_tokens("\n\n".join(dict.fromkeys(paragraphs)).encode())
    is_held_out = np.arange(text.size) // PAGE % 10 == 9
    return text[~is_held_out], text[is_held_out]


def as_tokens(text: bytes) -> Tokens:
    """Bytes as numbers."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def as_text(tokens: Sequence[int] | Tokens) -> str:
    """Bytes as text on one line."""
    return ascii(bytes(map(int, tokens)).decode(errors="replace"))[1:-1]


def windows(text: Tokens, starts: Tokens, length: int) -> Tokens:
    """Return the excerpts of `length` bytes that begin at `starts`."""
    return text[starts[:, None] + np.arange(length)]
