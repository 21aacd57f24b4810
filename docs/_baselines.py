"""Pictures of docs/baselines.md: the weights of one head as each attention has them.

``python docs/_baselines.py`` draws them into docs/images. Weights are attention to the rows of the
identity: each output is then a row of the weight matrix. What is learned is drawn at random here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import baselines, feature_maps

Floats: TypeAlias = NDArray[np.float64]

IMAGES = Path(__file__).parent / "images"
LENGTH, KEYS = 64, 16
"""Tokens, and the keys, landmarks or columns that a query meets."""

# Of the shipped sample: near tokens, contents and the first token all have weight in this head.
QUERY, KEY = (x[0, 3, :LENGTH].astype(float) for x in linattn.datasets.pretrained_qkv()[:2])
VALUE = np.eye(LENGTH)


def weights(call: Callable[..., Any], **options: Any) -> Floats:
    """Weights of an attention to this head."""
    return np.asarray(call(QUERY, KEY, VALUE, **options))


def by_map(phi: Any, **options: Any) -> Floats:
    return np.asarray(linattn.linear_attention(QUERY, KEY, VALUE, phi, **options))


def landmarks(window: int | None) -> Floats:
    phi = feature_maps.LandmarkFeatures.fit(QUERY, KEY, num_features=KEYS, rng=0)
    return by_map(phi, exact_window=window)


def coreset() -> Floats:
    stream = linattn.CoresetAttention(KEYS, block_size=8, rng=0)
    return np.asarray(stream.extend(QUERY, KEY, VALUE))


def channel(call: Callable[..., Any], **options: Any) -> Floats:
    """Weights of an attention-free transformer in the first channel, gates open."""
    key = np.repeat(KEY[:, :1], LENGTH, axis=1)
    return np.asarray(call(np.full((LENGTH, LENGTH), 50.0), key, VALUE, **options))


def drawn(*shape: int, size: float = 1.0) -> Floats:
    return size * np.random.default_rng(1).standard_normal(shape)


def dense() -> Floats:
    hidden = {"hidden_weight": drawn(32, 32), "hidden_bias": drawn(32)}
    last = {"weight": drawn(LENGTH, 32, size=0.1), "bias": drawn(LENGTH)}
    return np.asarray(baselines.dense_synthesizer(QUERY, VALUE, **hidden, **last))


def factorized_dense() -> Floats:
    lists = {"first_weight": drawn(8, 32), "second_weight": drawn(8, 32, size=0.5)}
    return np.asarray(baselines.factorized_dense_synthesizer(QUERY, VALUE, **lists))


def random() -> Floats:
    logits = drawn(LENGTH, LENGTH)
    return np.asarray(baselines.random_synthesizer(VALUE, logits=logits))


def factorized_random() -> Floats:
    left, right = drawn(2, LENGTH, 4)
    return np.asarray(baselines.factorized_random_synthesizer(VALUE, left=left, right=right))


def external() -> Floats:
    memory = {"key_memory": drawn(KEYS, 32, size=0.5), "value_memory": np.eye(KEYS)}
    return np.asarray(baselines.external(QUERY, **memory))


B = baselines
NEAR = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
CASES: dict[str, Callable[[], Floats]] = {
    "exact": lambda: weights(linattn.softmax_attention),
    "exact-causal": lambda: weights(linattn.softmax_attention, is_causal=True),
    "landmarks": lambda: landmarks(None),
    "landmarks-window": lambda: landmarks(8),
    "coreset": coreset,
    "random-features": lambda: by_map(feature_maps.PositiveFeatures(32, KEYS, rng=0)),
    "local_window": lambda: weights(B.local_window, window_size=KEYS // 2),
    "strided": lambda: weights(B.strided, stride=8),
    "fixed": lambda: weights(B.fixed, stride=8, num_summary=1),
    "longformer": lambda: weights(B.longformer, window_size=7, num_global=2),
    "bigbird": lambda: weights(B.bigbird, block_size=3, num_global=1, num_random=2, rng=0),
    "linformer": lambda: weights(B.linformer, num_landmarks=KEYS),
    "nystromformer": lambda: weights(B.nystromformer, num_landmarks=KEYS),
    "clustered": lambda: weights(B.clustered, num_clusters=KEYS, rng=0),
    "improved_clustered": lambda: weights(
        B.improved_clustered, num_clusters=KEYS // 2, num_keys=KEYS // 2, rng=0
    ),
    "reformer": lambda: weights(B.reformer, num_buckets=8, num_rounds=2, rng=0),
    "routing": lambda: weights(B.routing, num_clusters=4, rng=0),
    "dense_synthesizer": dense,
    "factorized_dense_synthesizer": factorized_dense,
    "random_synthesizer": random,
    "factorized_random_synthesizer": factorized_random,
    "aft_full": lambda: channel(B.aft_full, position_bias=drawn(LENGTH, LENGTH)),
    "aft_local": lambda: channel(B.aft_local, position_bias=2 - NEAR / 4.0, window_size=8),
    "aft_simple": lambda: channel(B.aft_simple),
    "compressive": lambda: weights(
        B.compressive, block_size=8, memory_size=8, compressed_size=4, rate=4
    ),
    "external": external,
    "wildcat": lambda: weights(B.wildcat, num_keys=KEYS, rng=0),
    "thinformer": lambda: weights(B.thinformer, oversampling=1, rng=0),
    "truncated_svd": lambda: weights(B.truncated_svd, rank=KEYS),
    "top_k": lambda: weights(B.top_k, num_keys=KEYS),
}
"""Weights by the names of their pictures."""


def draw(name: str, folder: Path = IMAGES) -> Path:
    """Draw one matrix: dark is heavy, red is negative."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matrix = CASES[name]()
    # Small weights show too: square roots, with their signs, on a scale that all pictures share.
    shown = np.sign(matrix) * np.sqrt(np.abs(matrix))
    colors = "RdGy" if matrix.min() < -1e-6 else "Greys"
    least = -0.8 if colors == "RdGy" else 0
    figure = Figure(figsize=(1.1, 1.1 * matrix.shape[0] / LENGTH))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    shape = {"interpolation": "nearest", "aspect": "auto"}
    axes.imshow(shown, cmap=colors, vmin=least, vmax=0.8, **shape)
    axes.set_xticks([])
    axes.set_yticks([])
    path = folder / f"which-{name.replace('_', '-')}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


if __name__ == "__main__":
    for case in CASES:
        print(draw(case))
