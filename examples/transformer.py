"""A small transformer in NumPy: the model, its gradients and its text, for both training examples.

No framework: a layer is a function that returns its output and a pullback, as
`linattn.linear_attention_vjp` does, and a gradient is the pullbacks called in reverse. The
parameters are one long vector, of which the matrices are views, so that an optimizer is a few lines
and a finite difference can be taken along any direction.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.typing import FeatureMap, State

Floats: TypeAlias = NDArray[Any]
Tokens: TypeAlias = NDArray[np.int64]
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


class Attention:
    """Causal attention of each layer, with a pullback.

    Parameters
    ----------
    kind : str
        ``"elu"`` and ``"favor"`` are linear, ``"softmax"`` is exact, ``"none"`` leaves it out.
    layers, dim : int
        Layers of the model, dim of a head.
    num_features, seed : int
        Of the random features of FAVOR+.
    """

    def __init__(self, kind: Kind, layers: int, dim: int, num_features: int, seed: int) -> None:
        self.kind = kind
        self.maps: list[FeatureMap] = []
        self._layers, self._dim, self._num_features = layers, dim, num_features
        self._rng = np.random.default_rng(seed)
        if kind == "elu":
            self.maps = [EluFeatures(dim) for _ in range(layers)]
        self.redraw()

    def redraw(self) -> None:
        """Draw other random features, if there are any."""
        if self.kind == "favor":
            self.maps = [
                PositiveFeatures(self._dim, num_features=self._num_features, rng=self._rng)
                for _ in range(self._layers)
            ]

    def vjp(
        self, layer: int, query: Floats, key: Floats, value: Floats
    ) -> tuple[Floats, Callable[[Floats], tuple[Floats, ...]]]:
        """Return the output, (documents, heads, L, dim), and its pullback."""
        if self.kind == "softmax":
            return linattn.softmax_attention_vjp(query, key, value, is_causal=True)
        return linattn.linear_attention_vjp(query, key, value, self.maps[layer], is_causal=True)


# --- 2. Layers: an output and a pullback ---------------------------------------------------------


def linear(x: Floats, W: Floats) -> tuple[Floats, Pullback]:
    """``x W``; the pullback returns the gradients by x and W."""

    def pullback(g: Floats) -> tuple[Floats, Floats]:
        return g @ W.T, x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])

    return x @ W, pullback


def layer_norm(x: Floats, scale: Floats, shift: Floats) -> tuple[Floats, Pullback]:
    """Mean 0 and variance 1 of each row, then scale and shift; gradients by all three."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(variance + 1e-5)
    normal = centred * inverse

    def pullback(g: Floats) -> tuple[Floats, Floats, Floats]:
        rows = tuple(range(g.ndim - 1))
        scaled = g * scale
        along = np.mean(scaled * normal, axis=-1, keepdims=True)
        grad = inverse * (scaled - scaled.mean(axis=-1, keepdims=True) - normal * along)
        return grad, (g * normal).sum(axis=rows), g.sum(axis=rows)

    return normal * scale + shift, pullback


def squared_relu(x: Floats) -> tuple[Floats, Pullback]:
    """``max(x, 0)^2``: a non-linearity that needs no exponential."""
    positive = np.maximum(x, 0)
    return positive * positive, lambda g: 2 * positive * g


def embed(table: Floats, tokens: Tokens) -> tuple[Floats, Pullback]:
    """Rows of a table. The gradient by the table is a product with the rows of an identity."""

    def pullback(g: Floats) -> Floats:
        chosen = np.zeros((tokens.size, len(table)), g.dtype)
        chosen[np.arange(tokens.size), tokens.ravel()] = 1
        return chosen.T @ g.reshape(tokens.size, -1)

    return table[tokens], pullback


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


# --- 3. The model --------------------------------------------------------------------------------


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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter."""
        d = self.dim
        shapes: dict[str, tuple[int, ...]] = {"position": (self.length, d)}
        for tap in range(self.taps):
            shapes[f"embedding.{tap}"] = (self.vocabulary, d)
        for layer in range(self.layers):
            shapes |= {
                f"{layer}.norm_1.scale": (d,),
                f"{layer}.norm_1.shift": (d,),
                f"{layer}.qkv": (d, 3 * d),
                f"{layer}.out": (d, d),
                f"{layer}.norm_2.scale": (d,),
                f"{layer}.norm_2.shift": (d,),
                f"{layer}.up": (d, 4 * d),
                f"{layer}.down": (4 * d, d),
            }
        return shapes | {"norm.scale": (d,), "norm.shift": (d,), "head": (d, self.vocabulary)}


def views(flat: Floats, shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Return the named parts of one long vector; writing into them writes into it."""
    ends = [0, *np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()]
    parts = zip(shapes.items(), pairwise(ends), strict=True)
    return {name: flat[begin:end].reshape(shape) for (name, shape), (begin, end) in parts}


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


class Transformer:
    """A causal transformer: pre-norm blocks, several heads, learned positions.

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
    parameters : array, (number,)
        All of them; change them in place.
    """

    def __init__(
        self, sizes: Sizes, attention: Attention, seed: int, dtype: Any = np.float32
    ) -> None:
        self.sizes, self.attention = sizes, attention
        self.shapes = sizes.shapes()
        self.parameters = np.zeros(sum(math.prod(s) for s in self.shapes.values()), dtype)
        self._weights = views(self.parameters, self.shapes)
        rng = np.random.default_rng(seed)
        for name, weight in self._weights.items():
            if name.endswith("scale"):
                weight[...] = 1
            elif weight.ndim == 2:
                weight[...] = rng.standard_normal(weight.shape) / math.sqrt(weight.shape[0])
        for tap in range(sizes.taps):
            table = self._weights[f"embedding.{tap}"]
            table[...] = 0.5 * rng.standard_normal(table.shape) / math.sqrt(sizes.taps)
        period = sizes.period or sizes.length
        waves = wave_positions(sizes.length, sizes.dim, period)
        self._weights["position"][...] = sizes.amplitude * waves
        self._weights["head"] *= 0.1
        for layer in range(sizes.layers):
            self._weights[f"{layer}.out"] *= 0.3
            self._weights[f"{layer}.down"] *= 0.3
            # Queries start as keys are: a token attends to tokens that are like it.
            query, key, _ = np.split(self._weights[f"{layer}.qkv"], 3, axis=1)
            key *= sizes.sharpness
            query[...] = key

    @property
    def num_parameters(self) -> int:
        """How many parameters are used: without attention, its own are not."""
        unused = ("norm_1.scale", "norm_1.shift", "qkv", "out")
        is_none = self.attention.kind == "none"
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if not (is_none and name.partition(".")[2] in unused)
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
            ``pullback(grad_logits) -> gradient``, a vector like `parameters`.
        """
        length = tokens.shape[1]
        begin = 0 if last is None else length - last
        x, pull_embeddings = self._embed(tokens)

        def attend(layer: int, qkv: Floats) -> tuple[Floats, Pullback]:
            query, key, value = self._split(qkv)
            heads, pull = self.attention.vjp(layer, query, key, value)
            return merge(heads), lambda g: self._merge_gradients(pull(self._split_heads(g)))

        pulls = []
        for layer in range(self.sizes.layers):
            x, pull_block = self._block(layer, x, attend)
            pulls.append(pull_block)
        out, pull_head = self._head(x[:, begin:])

        def pullback(grad_logits: Floats) -> Floats:
            gradient = np.zeros_like(self.parameters)
            into = views(gradient, self.shapes)
            g = np.zeros_like(x)
            g[:, begin:] = pull_head(grad_logits, into)
            for pull in reversed(pulls):
                g = pull(g, into)
            pull_embeddings(g, into)
            return gradient

        return out, pullback

    def loss(self, tokens: Tokens, targets: Tokens) -> tuple[float, Floats]:
        """Return the mean loss in nats and its gradient; targets belong to the last positions."""
        logits, pullback = self.logits(tokens, targets.shape[1])
        loss, grad_logits = cross_entropy(logits, targets)
        return loss, pullback(grad_logits)

    def _embed(self, tokens: Tokens) -> tuple[Floats, Callable[..., None]]:
        length = tokens.shape[1]
        x = np.repeat(self._weights["position"][None, :length], len(tokens), axis=0)
        pulls = []
        for tap in range(min(self.sizes.taps, length)):
            rows, pull = embed(self._weights[f"embedding.{tap}"], tokens[:, : length - tap])
            x[:, tap:] += rows
            pulls.append(pull)

        def pullback(g: Floats, into: dict[str, Floats]) -> None:
            into["position"][:length] = g.sum(axis=0)
            for tap, pull in enumerate(pulls):
                into[f"embedding.{tap}"][...] = pull(g[:, tap:])

        return x, pullback

    def _block(self, layer: int, x: Floats, attend: Any) -> tuple[Floats, Callable[..., Floats]]:
        """Attention, then two matrices and a non-linearity, each added to what came in."""
        weights = {name: self._weights[f"{layer}.{name}"] for name in ("qkv", "out", "up", "down")}
        if self.attention.kind != "none":
            normal, pull_norm_1 = self._norm(f"{layer}.norm_1", x)
            qkv, pull_qkv = linear(normal, weights["qkv"])
            heads, pull_attend = attend(layer, qkv)
            attended, pull_out = linear(heads, weights["out"])
            x = x + attended
        normal, pull_norm_2 = self._norm(f"{layer}.norm_2", x)
        wide, pull_up = linear(normal, weights["up"])
        active, pull_active = squared_relu(wide)
        inner, pull_down = linear(active, weights["down"])

        def pullback(g: Floats, into: dict[str, Floats]) -> Floats:
            h, into[f"{layer}.down"][...] = pull_down(g)
            h, into[f"{layer}.up"][...] = pull_up(pull_active(h))
            g = g + pull_norm_2(h, into)
            if self.attention.kind == "none":
                return g
            h, into[f"{layer}.out"][...] = pull_out(g)
            h, into[f"{layer}.qkv"][...] = pull_qkv(pull_attend(h))
            return g + pull_norm_1(h, into)

        return x + inner, pullback

    def _head(self, x: Floats) -> tuple[Floats, Callable[..., Floats]]:
        normal, pull_norm = self._norm("norm", x)
        logits, pull_linear = linear(normal, self._weights["head"])

        def pullback(g: Floats, into: dict[str, Floats]) -> Floats:
            h, into["head"][...] = pull_linear(g)
            return pull_norm(h, into)

        return logits, pullback

    def _norm(self, name: str, x: Floats) -> tuple[Floats, Callable[..., Floats]]:
        scale, shift = self._weights[f"{name}.scale"], self._weights[f"{name}.shift"]
        out, pull = layer_norm(x, scale, shift)

        def pullback(g: Floats, into: dict[str, Floats]) -> Floats:
            g, into[f"{name}.scale"][...], into[f"{name}.shift"][...] = pull(g)
            return g

        return out, pullback

    def _split_heads(self, x: Floats) -> Floats:
        """(..., L, heads * dim) to (..., heads, L, dim)."""
        return x.reshape(*x.shape[:-1], self.sizes.heads, -1).swapaxes(-2, -3)

    def _split(self, qkv: Floats) -> list[Floats]:
        """(..., L, 3 * heads * dim) to three of (..., heads, L, dim)."""
        return [self._split_heads(part) for part in np.split(qkv, 3, axis=-1)]

    def _merge_gradients(self, gradients: tuple[Floats, ...]) -> Floats:
        return np.concatenate([merge(gradient) for gradient in gradients], axis=-1)

    # --- one token at a time ---

    def start(self) -> list[State]:
        """Return the states of linear attention that have seen nothing, one a layer."""
        dim = self.sizes.dim // self.sizes.heads
        like = self.parameters[:dim]
        return [
            linattn.init_state(phi, dim, batch_shape=(self.sizes.heads,), like=like)
            for phi in self.attention.maps
        ]

    def step(self, tokens: Sequence[int], states: list[State]) -> Floats:
        """Return the logits after the last token; `states`, of those before it, are replaced.

        Time and memory do not depend on how many tokens there were.
        """
        x = self._weights["position"][len(tokens) - 1].copy()
        for tap, token in enumerate(tokens[: -self.sizes.taps - 1 : -1]):
            x += self._weights[f"embedding.{tap}"][token]

        def attend(layer: int, qkv: Floats) -> tuple[Floats, None]:
            query, key, value = qkv.reshape(3, self.sizes.heads, -1)
            heads, states[layer] = linattn.decode_step(
                query, key, value, states[layer], self.attention.maps[layer]
            )
            return heads.reshape(-1), None

        for layer in range(self.sizes.layers):
            x, _ = self._block(layer, x, attend)
        return self._head(x)[0]


def merge(heads: Floats) -> Floats:
    """(..., heads, L, dim) to (..., L, heads * dim)."""
    x = heads.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], -1)


# --- 4. Generating -------------------------------------------------------------------------------


def generate(model: Transformer, prompt: Sequence[int], number: int) -> tuple[list[int], Floats]:
    """Continue a prompt by the likeliest token, `number` times.

    Returns
    -------
    tokens : list of int
        What follows the prompt.
    logits : array, (number, vocabulary)
        Each is the largest of its row. Linear attention is read from its states, one
        `linattn.decode_step` a token and layer; other attention runs over everything again.
    """
    tokens, rows = list(prompt), []
    if model.attention.maps:
        states = model.start()
        for end in range(1, len(tokens)):
            model.step(tokens[:end], states)
    for _ in range(number):
        if model.attention.maps:
            row = model.step(tokens, states)
        else:
            row = model.logits(np.asarray([tokens]), last=1)[0][0, 0]
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
    way = "linattn.decode_step" if model.attention.maps else "one forward pass each"
    return (
        f"Check: {len(tokens)} tokens generated by {way} are those of the forward pass over the "
        f"whole text; logits differ by {largest:.0e} at most."
    )


# --- 5. Text ------------------------------------------------------------------------------------


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
