"""Queries, keys and values to compare on: the shipped sample or a file of the user's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from linattn import datasets
from linattn.cli.errors import CommandError
from linattn.cli.stores import BIAS, NAMES, open_inputs
from linattn.cli.text import count

__all__ = [
    "BIAS",
    "NAMES",
    "NOISE",
    "Inputs",
    "continued",
    "limited",
    "load",
    "sample",
    "size_text",
]

NOISE = 0.1
"""Noise on repeated tokens, in units of each coordinate's standard deviation."""

FloatArray: TypeAlias = npt.NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Attention inputs, one row of the first axis per head.

    Attributes
    ----------
    source : str
        Where they come from.
    query, key, value : ndarray
        ``(H, L, d)``, ``(H, S, d)``, ``(H, S, e)``, all float32 or all float64, finite.
    left_out : tuple of str
        What of the source is not here, in words.
    question : str
        What the user may have meant otherwise; else empty.
    longer : Inputs or None
        More tokens of the first head, for the time curves.
    key_bias : ndarray or None
        ``(H, S)`` log weights of keys, of the same dtype; -inf leaves a key out.
    """

    source: str
    query: FloatArray
    key: FloatArray
    value: FloatArray
    left_out: tuple[str, ...] = ()
    question: str = ""
    longer: Inputs | None = None
    key_bias: FloatArray | None = None

    @property
    def arrays(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.query.shape[1], self.key.shape[1]

    def tokens(self, chosen: slice) -> Inputs:
        """Return the inputs with these tokens only."""
        query, key, value = (array[:, chosen] for array in self.arrays)
        bias = None if self.key_bias is None else self.key_bias[:, chosen]
        return replace(self, query=query, key=key, value=value, key_bias=bias)

    @property
    def degenerate(self) -> str:
        """Why every map gives the same output, or nothing is to be given; "" if not."""
        if self.key.shape[-2] == 1:
            return "there is one key only"
        for name in NAMES:
            if not getattr(self, name).any():
                return f"{name} is all zero"
        return ""

    def describe(self) -> dict[str, str | int | bool | tuple[str, ...]]:
        """Return source, sizes and dtype under the names that the JSON file uses."""
        return {
            "source": self.source,
            "heads": self.query.shape[0],
            "query_length": self.query.shape[1],
            "key_length": self.key.shape[1],
            "dim": self.query.shape[2],
            "value_dim": self.value.shape[2],
            "dtype": str(self.query.dtype),
            "key_bias": self.key_bias is not None,
            "left_out": self.left_out,
            "question": self.question,
        }


def sample() -> Inputs:
    """Return the shipped sample: real attention inputs of a trained sentence encoder."""
    query, key, value = (
        array.reshape(-1, *array.shape[-2:]) for array in datasets.pretrained_qkv()
    )
    # The first head of both: layer 1, head 0.
    first = [array[0, :1] for array in datasets.pretrained_long_qkv()]
    longer = Inputs("linattn.datasets.pretrained_long_qkv()", first[0], first[1], first[2])
    return Inputs("linattn.datasets.pretrained_qkv()", query, key, value, longer=longer)


def load(*paths: Path) -> Inputs:
    """Read query, key and value and check them: three .npy files, an .npz file or a zarr store.

    Leading axes broadcast and become heads. float16 is computed in float32; nothing is ever
    unpickled. A fourth array of one file, key_bias, may hold log weights of keys.

    Raises
    ------
    CommandError
        The file cannot be read, or holds no such arrays.
    """
    opened = open_inputs(paths, whole=True).items()
    found = {name: np.asarray(array[...]) for name, array in opened}
    path = " ".join(map(str, paths))
    of_arrays = zip(NAMES, paths * len(NAMES), strict=False)
    query, key, value = (_checked(str(file), name, found[name]) for name, file in of_arrays)
    key_bias = _checked_bias(path, found[BIAS], key) if BIAS in found else None
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.shape[-1] != key.shape[-1]:
        raise CommandError(f"{path}: want query and key of one dim (last axis), got {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise CommandError(
            f"{path}: want key and value of one length (second last axis), got {shapes}"
        )
    try:
        of_bias = () if key_bias is None else key_bias.shape[:-1]
        batch = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2], of_bias)
    except ValueError:
        raise CommandError(f"{path}: want leading axes that broadcast, got {shapes}") from None
    question = _question(query.shape)
    dtype = np.result_type(query, key, value, np.float32)
    query, key, value = (
        np.broadcast_to(array, batch + array.shape[-2:])
        .reshape(-1, *array.shape[-2:])
        .astype(dtype, copy=False)
        for array in (query, key, value)
    )
    if key_bias is not None:
        whole = np.broadcast_to(key_bias, (*batch, key_bias.shape[-1]))
        key_bias = whole.reshape(-1, key_bias.shape[-1]).astype(dtype, copy=False)
    return Inputs(path, query, key, value, question=question, key_bias=key_bias)


def size_text(inputs: Inputs) -> str:
    """Return heads, tokens and dim, for people."""
    heads, num_queries, dim = inputs.query.shape
    num_keys = inputs.key.shape[-2]
    length = (
        count(num_keys, "token")
        if num_queries == num_keys
        else f"{count(num_queries, 'query', 'queries')} and {count(num_keys, 'key')}"
    )
    return f"{count(heads, 'head')}, {length}, dim {dim}"


def limited(inputs: Inputs, *, max_heads: int, max_tokens: int, is_causal: bool) -> Inputs:
    """Keep the first tokens and heads evenly spaced among all, and say what was left out.

    Raises
    ------
    CommandError
        Causal attention is asked for and the lengths differ.
    """
    heads, query_length, _ = inputs.query.shape
    key_length = inputs.key.shape[1]
    if is_causal and query_length != key_length:
        raise CommandError(
            f"--causal: want query and key of one length, got {query_length} and {key_length} "
            f"in {inputs.source}"
        )
    left_out = []
    chosen: slice | npt.NDArray[np.intp] = slice(None)
    if heads > max_heads:
        chosen = np.linspace(0, heads - 1, max_heads).round().astype(np.intp)
        left_out.append(f"{heads - max_heads} of {heads} heads (--max-heads {max_heads})")
    for name, length in (("query", query_length), ("key", key_length)):
        if length > max_tokens:
            left_out.append(
                f"{length - max_tokens} of {length} {name} tokens (--max-tokens {max_tokens})"
            )
    query, key, value = (
        np.ascontiguousarray(array[chosen, :max_tokens])
        for array in (inputs.query, inputs.key, inputs.value)
    )
    bias = inputs.key_bias
    if bias is not None:
        bias = np.ascontiguousarray(bias[chosen, :max_tokens])
    inputs = replace(inputs, query=query, key=key, value=value, key_bias=bias)
    return replace(inputs, left_out=tuple(left_out))


def continued(
    inputs: Inputs, length: int, rng: np.random.Generator, num_queries: int | None = None
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray | None]:
    """Return one head of the inputs at any length: query, key, value and bias ``(length, ...)``.

    The first tokens are the head's own. Each further token repeats one of them, drawn at random
    (query, key and value of one position together where the lengths agree), plus Gaussian noise of
    `NOISE` times the standard deviation of each coordinate over the head. Biases are repeated
    unchanged. Of queries there may be another number.
    """
    query, key, value = inputs.query[0], inputs.key[0], inputs.value[0]
    key_index = _positions(key.shape[0], length, rng)
    if query.shape[0] == key.shape[0]:
        query_index = key_index
    else:
        query_index = _positions(query.shape[0], num_queries or length, rng)
    return (
        _with_noise(query, query_index, rng),
        _with_noise(key, key_index, rng),
        _with_noise(value, key_index, rng),
        None if inputs.key_bias is None else inputs.key_bias[0, key_index],
    )


def _positions(available: int, length: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    repeated = rng.integers(available, size=max(0, length - available))
    return np.concatenate([np.arange(min(available, length)), repeated])


def _with_noise(
    tokens: FloatArray, index: npt.NDArray[np.intp], rng: np.random.Generator
) -> FloatArray:
    out = tokens[index]
    fresh = out[tokens.shape[0] :]
    fresh += rng.standard_normal(fresh.shape, dtype=fresh.dtype) * (NOISE * tokens.std(axis=0))
    return out


def _question(shape: tuple[int, ...]) -> str:
    """Ask about an axis of heads longer than the axis of tokens: often they are swapped."""
    if len(shape) < 3 or shape[-3] <= shape[-2]:
        return ""
    outer, inner = shape[-3:-1]
    return (
        f"query {shape} is read as {count(outer, 'head')} of {count(inner, 'token')}; did you mean "
        f"{count(outer, 'token')} of {count(inner, 'head')}? Then save "
        "numpy.swapaxes(x, -3, -2) of each array: axes are (..., length, dim)"
    )


def _checked_bias(path: str, array: npt.NDArray[np.generic], key: FloatArray) -> FloatArray:
    """Check log weights of keys: one for each, -inf for a key that is left out."""
    if array.ndim == 0 or array.shape[-1] != key.shape[-2]:
        raise CommandError(
            f"{path}: {BIAS}: want shape (..., length) with the length of key, got {array.shape} "
            f"and key {key.shape}"
        )
    hidden = np.equal(array, -np.inf)
    if np.all(hidden, axis=-1).any():
        raise CommandError(
            f"{path}: {BIAS}: want a key that is not left out in each head, got -inf for all"
        )
    finite = _checked(path, BIAS, np.atleast_2d(np.where(hidden, array.dtype.type(0), array)))
    return np.where(hidden, finite.dtype.type(-np.inf), finite.reshape(array.shape))


def _checked(path: str, name: str, array: npt.NDArray[np.generic]) -> FloatArray:
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise CommandError(f"{path}: {name}: want float16, float32 or float64, got {array.dtype}")
    if array.ndim < 2:
        raise CommandError(f"{path}: {name}: want shape (..., length, dim), got {array.shape}")
    if array.size == 0:
        raise CommandError(
            f"{path}: {name}: want at least one head, one token and one dim, got {array.shape}"
        )
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise CommandError(
            f"{path}: {name}: want finite numbers, got {bad} NaN or infinite of {array.size}"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)
