"""Inputs that `linattn.attention` is judged on: models, photographs, colours, series, heavy tails.

Each function returns a :class:`Case` of a length; :data:`INPUTS` names them. Nothing is downloaded:

* "minilm" runs all-MiniLM-L6-v2 on CPython's manual if its weights are installed
  (examples/minilm_model.py says how), else takes the shipped long sample, tiled with noise; "minilm
  code", "minilm German" and so on are other texts (texts.py), and need the weights;
* "whisper" reads queries, keys and values of a speech encoder from the file of arrays that the
  environment variable ``LINATTN_WHISPER`` names: each ``(heads, L, 64)``, whose names begin with q,
  k and v. ``python -m benchmarks.speech --arrays FILE`` writes one. Windows on end make it longer,
  with noise where they are used again;
* photographs and colours are scikit-image's, without its network. Other photographs and colours,
  other series and other tails, "... held out", are for judging only: no number in the code was
  chosen by them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

import linattn

__all__ = ["INPUTS", "Case", "FilledUp", "errors", "text"]

Floats = NDArray[Any]

NOISE = 0.05
"""Standard deviation of what is added to tokens that are used again, over that of the tokens."""

PHOTOGRAPHS = ("camera", "coins", "moon", "page")
HELD_OUT = ("brick", "grass", "gravel", "retina")


class Case(NamedTuple):
    """Arguments of one call.

    Attributes
    ----------
    query, key, value : ndarray, (heads, length, d), (heads, length, e)
        float32.
    options : dict
        ``scale`` and ``key_bias``, where they are not those of default.
    """

    query: Floats
    key: Floats
    value: Floats
    options: dict[str, Any]

    def exact(self) -> Floats:
        """Exact attention."""
        output = linattn.softmax_attention(self.query, self.key, self.value, **self.options)
        return np.asarray(output)


def text(length: int) -> tuple[Floats, Floats, Floats]:
    """Six heads of the shipped sample, a token for each byte of an English text, with noise."""
    from pydoc_data.topics import topics

    letters = "".join(topics[name] for name in sorted(topics)).encode()[:length]
    tokens = np.frombuffer(letters, dtype=np.uint8)
    rng = np.random.default_rng(0)
    arrays = [x[1, :6] for x in linattn.datasets.pretrained_qkv()]
    noisy = [x[:, tokens] + 0.2 * x.std() * rng.standard_normal((6, length, 32)) for x in arrays]
    query, key, value = (x.astype(np.float32) for x in noisy)
    return query, key, value


def errors(output: Floats, exact: Floats) -> NDArray[np.float64]:
    """Relative error of each head."""
    square = np.sum((output.astype(float) - exact) ** 2, axis=(-2, -1))
    return np.asarray(np.sqrt(square / np.sum(exact.astype(float) ** 2, axis=(-2, -1))))


class FilledUp:
    """`linattn.attention` on short sequences as if they were long, and what its heads took.

    Masked tokens fill a sequence up to a length, so that a call searches for a way that is cheaper
    than exact attention of this length.

    Attributes
    ----------
    heads, exact : int
        Heads of all calls, and how many of them were exact.
    report : AttentionReport
        Of the last call.
    """

    report: linattn.automatic.AttentionReport

    def __init__(self, tolerance: float | None, length: int, seed: int) -> None:
        self.length, self.heads, self.exact = length, 0, 0
        self._options: Any = {"tolerance": tolerance, "rng": seed, "return_report": True}

    def __call__(
        self,
        query: Floats,
        key: Floats,
        value: Floats,
        *,
        key_bias: Floats | None = None,
        scale: float | None = None,
    ) -> Floats:
        """Attend."""
        tokens = key.shape[-2]
        more = (0, max(0, self.length - tokens))
        none = [(0, 0)] * (key.ndim - 2)
        filled = [np.pad(x, [*none, more, (0, 0)]) for x in (query, key, value)]
        options = self._options | {"key_mask": np.arange(tokens + more[1]) < tokens, "scale": scale}
        if key_bias is not None:
            options["key_bias"] = np.pad(key_bias, [*none, more])
        output, self.report = linattn.attention(*filled, **options)
        self.heads += self.report.head_methods.size
        self.exact += int(np.sum(self.report.head_methods == "exact"))
        return np.ascontiguousarray(output[..., :tokens, :])


def _case(arrays: list[Floats]) -> Case:
    query, key, value = arrays
    return Case(query, key, value, {})


def _on_end(parts: list[Floats], length: int, seed: int) -> list[Floats]:
    """Query, key and value of a length, of windows on end; noise where they are used again."""
    rng, longer = np.random.default_rng(seed), []
    for x in parts:
        n = x.shape[-2]
        place = np.arange(length) % n
        taken = x[:, place].astype(np.float32)
        again = (np.arange(length) >= n)[:, None]
        noise = NOISE * x.astype(np.float32).std() * rng.standard_normal(taken.shape)
        longer.append((taken + again * noise).astype(np.float32))
    return longer


def minilm(length: int, seed: int = 0, kind: str = "manual") -> list[Case]:
    """Two layers of all-MiniLM-L6-v2, a case each, on windows of 512 tokens on end."""
    from benchmarks import texts

    try:
        layers = texts.inputs(kind, length, [1, 4], seed)[:, :, ::3]
        return [_case([np.ascontiguousarray(x) for x in layer]) for layer in layers]
    except texts.minilm.ExampleError:
        if kind != "manual":
            raise
        sample = [np.asarray(x) for x in linattn.datasets.pretrained_long_qkv()]
        return [_case(_on_end([x[i] for x in sample], length, seed)) for i in range(2)]


def whisper(length: int, seed: int = 0) -> list[Case]:
    """Layers of a speech encoder, a case each."""
    if "LINATTN_WHISPER" not in os.environ:
        raise SystemExit(
            "whisper: LINATTN_WHISPER must name a file that benchmarks.speech --arrays writes"
        )
    with np.load(Path(os.environ["LINATTN_WHISPER"])) as arrays:
        layers = sorted(name[1:] for name in arrays if name.startswith("q"))
        found = [[arrays[part + layer] for part in "qkv"] for layer in layers]
    return [_case(_on_end(parts, length, seed)) for parts in found]


def photographs(
    length: int, seed: int = 0, size: int = 7, width: float = 0.08, *, names: Any = PHOTOGRAPHS
) -> list[Case]:
    """Non-local means: each pixel of a noisy photograph is the mean of those with like patches."""
    from skimage import data

    side, cases = int(length**0.5), []
    for name in names:
        whole = np.asarray(getattr(data, name)())
        whole = whole if whole.ndim == 2 else whole[..., 1]
        top, left = min(100, whole.shape[0] - side), min(100, whole.shape[1] - side)
        clean = whole[top : top + side, left : left + side].astype("f4") / 255
        noise = np.random.default_rng(seed).normal(size=clean.shape).astype("f4")
        noisy = clean + np.float32(0.1) * noise
        padded = np.pad(noisy, size // 2, mode="reflect")
        patches = sliding_window_view(padded, (size, size)).reshape(1, -1, size**2)
        cases.append(_mean_shift(patches, noisy.reshape(1, -1, 1), 1 / (size * width)))
    return cases


def _mean_shift(points: Floats, values: Floats, factor: float) -> Case:
    """Means weighted by ``exp(-|factor (x - y)|^2)``: a bias for each key."""
    query = (points - points.mean()).astype(np.float32)
    scale = 2 * factor**2
    bias = -0.5 * scale * (query**2).sum(-1)
    return Case(query, query, values.astype(np.float32), {"scale": scale, "key_bias": bias})


def colours(length: int, seed: int = 0, *, names: Any = ("astronaut", "coffee")) -> list[Case]:
    """Mean shift of the colours of a photograph, d = e = 3."""
    from skimage import data

    cases = []
    for name in names:
        pixels = getattr(data, name)().reshape(-1, 3).astype("f4") / 255
        chosen = np.random.default_rng(seed).choice(len(pixels), length, replace=False)
        points = pixels[chosen][None]
        cases.append(_mean_shift(points, points, 1 / (0.1 * 2**0.5)))
    return cases


def lorenz(length: int, rng: np.random.Generator) -> Floats:
    """First coordinate of Lorenz' attractor, with noise."""
    position, path = np.ones(3), []
    for _ in range(length):
        for _ in range(5):
            x, y, z = position
            step = np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 * z / 3])
            position = position + 0.01 * step
        path.append(position[0])
    return np.array(path) / 8 + 0.1 * rng.standard_normal(length)


def seasons(length: int, rng: np.random.Generator) -> Floats:
    """Hours of a load: a day's and a week's period, a random level, and a rare jump."""
    hour, level = np.arange(length), 0.1 * rng.standard_normal(length)
    level += np.where(rng.random(length) < 1 / 500, rng.standard_normal(length), 0)
    for i in range(1, length):
        level[i] += 0.97 * level[i - 1]
    day, week = np.sin(2 * np.pi * hour / 24), hour % 168 < 120
    found: Floats = day * (0.5 + week) + level + 0.1 * rng.standard_normal(length)
    return found


def delays(
    length: int, seed: int = 0, before: int = 8, after: int = 1, *, series: Any = lorenz
) -> list[Case]:
    """Kernel regression of the next values of a series on those before."""
    path = series(length + before + after - 1, np.random.default_rng(seed + 3))
    points = sliding_window_view(path[:-after], before)[None, :length]
    values = sliding_window_view(path[before:], after)[None, :length]
    return [_mean_shift(points, values, 2 / before**0.5)]


def student(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Student's t with 2.5 degrees of freedom, without its sign."""
    return np.abs(rng.standard_t(2.5, shape))


def pareto(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Half of them of a Pareto law, the others log-normal."""
    odd = rng.random(shape) < 0.5
    return np.where(odd, rng.pareto(2, shape), np.exp(0.8 * rng.standard_normal(shape)))


def heavy_tails(length: int, seed: int = 0, *, sizes: Any = student) -> list[Case]:
    """Tokens around 24 centres, each times a size drawn from a law with a heavy tail."""
    rng, heads = np.random.default_rng(seed + 2), 4
    centres = rng.standard_normal((heads, 24, 16))
    which = rng.integers(24, size=length)
    arrays = []
    for spread in (0.5, 0.3):
        x = centres[:, which] + spread * rng.standard_normal((heads, length, 16))
        arrays.append(x * sizes(rng, (heads, length, 1)))
    value = rng.standard_normal((heads, 24, 16))[:, which] + 1
    value = value + 0.3 * rng.standard_normal(value.shape)
    return [_case([x.astype(np.float32) for x in (*arrays, value)])]


KINDS_OF_TEXT = ("code", "licences", "docstrings", "tables", "changes", "German")

INPUTS: dict[str, Callable[[int, int], list[Case]]] = {
    "minilm": minilm,
    "whisper": whisper,
    "photographs": photographs,
    "colours": colours,
    "delays": delays,
    "heavy tails": heavy_tails,
    **{f"minilm {kind}": partial(minilm, kind=kind) for kind in KINDS_OF_TEXT},
    "photographs held out": partial(photographs, names=HELD_OUT),
    "colours held out": partial(colours, names=("chelsea", "rocket")),
    "delays held out": partial(delays, series=seasons),
    "heavy tails held out": partial(heavy_tails, sizes=pareto),
}
