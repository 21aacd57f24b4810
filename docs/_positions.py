"""Pictures of docs/positions.md: weights of pairs as linattn computes them, and the dense ones.

``python docs/_positions.py`` draws them into docs/images. Weights are attention to the rows of the
identity: each output is then a row of the weight matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures, RotatedFeatures
from linattn.positions import alibi_slopes, rotary

Floats: TypeAlias = NDArray[np.float64]

IMAGES = Path(__file__).parent / "images"
LENGTH, DIM = 48, 8

QUERY, KEY = 0.5 * np.random.default_rng(1).standard_normal((2, LENGTH, DIM))
VALUE = np.eye(LENGTH)
PHI = PositiveFeatures(DIM, 4096, rng=0)
OFFSET = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
"""j - i of every pair."""


def dense(visible: Any = None, bias: Any = None, query: Any = QUERY, key: Any = KEY) -> Floats:
    """Weights of the oracle, which visits every pair."""
    return linattn.reference.softmax_attention(query, key, VALUE, visible=visible, bias=bias)


def linear(query: Any = QUERY, key: Any = KEY, **options: Any) -> Floats:
    """Weights of linear attention, far keys by 4,096 random features."""
    return np.asarray(linattn.linear_attention(query, key, VALUE, PHI, **options))


def key_bias() -> tuple[Floats, Floats]:
    bias = 2 * np.sin(np.arange(LENGTH) / 4)
    return linear(key_bias=bias), dense(bias=np.broadcast_to(bias, OFFSET.shape))


def rotated_inputs() -> tuple[Floats, Floats]:
    q, k = (rotary(0.7 * np.ones_like(x) + x / 4, base=100) for x in (QUERY, KEY))
    return linear(q, k), dense(query=q, key=k)


def rotated_features() -> tuple[Floats, Floats]:
    phi = RotatedFeatures(EluFeatures(DIM), base=100)
    weights = phi.kernel(QUERY, KEY)
    total = EluFeatures(DIM).kernel(QUERY, KEY).sum(axis=-1, keepdims=True)
    return np.asarray(linattn.linear_attention(QUERY, KEY, VALUE, phi)), weights / total


def prefix() -> tuple[Floats, Floats]:
    visible = np.arange(LENGTH) <= np.maximum(np.arange(LENGTH), 17)[:, None]
    return linear(prefix_length=18), dense(visible)


def causal_blocks() -> tuple[Floats, Floats]:
    block = np.arange(LENGTH) // 8
    return linear(causal_block=8), dense(block <= block[:, None])


def packed() -> tuple[Floats, Floats]:
    borders = [0, 8, 20, 24, 48]
    number = np.repeat(np.arange(4), np.diff(borders))
    weights = linear(cu_seqlens=borders, is_causal=True)
    return weights, dense((number == number[:, None]) & (OFFSET <= 0))


def alibi() -> tuple[Floats, Floats]:
    slope = alibi_slopes(8)[2]
    bias = slope * np.arange(LENGTH)
    computed = linattn.softmax_attention(QUERY, KEY, VALUE, is_causal=True, key_bias=bias)
    return np.asarray(computed), dense(OFFSET <= 0, -slope * np.abs(OFFSET))


def decay() -> tuple[Floats, Floats]:
    return linear(log_decay=-0.1), dense(bias=-0.1 * np.abs(OFFSET))


def sliding_window() -> tuple[Floats, Floats]:
    computed = linattn.softmax_attention(QUERY, KEY, VALUE, local_window_size=(10, 4))
    return np.asarray(computed), dense((OFFSET >= -10) & (OFFSET <= 4))


def window_bias() -> tuple[Floats, Floats]:
    near, far = 2 * np.cos(np.arange(-8, 9)), (-1.0, 1.0)
    inside = near[np.clip(OFFSET, -8, 8) + 8]
    bias = np.where(np.abs(OFFSET) <= 8, inside, np.where(OFFSET < 0, *far))
    return linear(exact_window=8, window_bias=near, far_bias=far), dense(bias=bias)


def global_tokens() -> tuple[Floats, Floats]:
    count, size = 3, 6
    others = np.arange(LENGTH) >= count
    first = linattn.softmax_attention(QUERY, KEY[:count], VALUE[:count], return_log_normalizer=True)
    near = linattn.softmax_attention(
        QUERY, KEY, VALUE, key_mask=others, local_window_size=size, return_log_normalizer=True
    )
    computed, _ = linattn.merge_outputs([first, near])
    computed[:count] = linattn.softmax_attention(QUERY[:count], KEY, VALUE)
    is_global = np.minimum(np.arange(LENGTH), np.arange(LENGTH)[:, None]) < count
    return computed, dense((np.abs(OFFSET) <= size) | is_global)


CASES: dict[str, Callable[[], tuple[Floats, Floats]]] = {
    "key-bias": key_bias,
    "rotary": rotated_inputs,
    "rotated-features": rotated_features,
    "prefix": prefix,
    "causal-blocks": causal_blocks,
    "packed": packed,
    "alibi": alibi,
    "decay": decay,
    "sliding-window": sliding_window,
    "window-bias": window_bias,
    "global-tokens": global_tokens,
}
"""Pictures by the names of their files: what linattn computes, and what it stands for."""


def draw(name: str, folder: Path = IMAGES) -> Path:
    """Draw one picture: on the left what linattn computes, on the right the dense weights."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matrices = CASES[name]()
    most = max(float(np.abs(matrix).max()) for matrix in matrices)
    signed = min(float(matrix.min()) for matrix in matrices) < 0
    figure = Figure(figsize=(3.4, 1.75), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, matrix, title in zip(
        figure.subplots(1, 2), matrices, ("linattn", "dense"), strict=True
    ):
        # Small weights show too: square roots, with their signs.
        shown = np.sign(matrix) * np.sqrt(np.abs(matrix) / most)
        colors = "RdBu_r" if signed else "Greys"
        axes.imshow(shown, cmap=colors, vmin=-1 if signed else 0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    path = folder / f"weights-{name}.png"
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


if __name__ == "__main__":
    for case in CASES:
        print(draw(case))
