"""How near landmarks and an exact window come to attention with biases of offsets.

    python benchmarks/offsets.py

Median and largest relative error of a head against exact attention with the same bias, on the real
samples, with 64 landmarks: T5 has a bias of its own, of deviation 2, for each offset up to 32 and
one for all further on either side; ALiBi has a slope a head. In both the bias of far keys is exact,
so that all error is that of landmarks; exact clusters lower it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import LandmarkFeatures

Array = NDArray[Any]

REACH = 32
CASES = [(32, 32), (64, 16), (32, 16), (32, 8), (32, None), (None, None)]
"""Window and clusters; without a window T5's bias is left out too."""


def real_sample(*, long: bool = False, dtype: Any = np.float32) -> list[Array]:
    """Query, key and value of all heads: 24 of 256 tokens, or 4 of 2,560."""
    load: Any = linattn.datasets.pretrained_long_qkv if long else linattn.datasets.pretrained_qkv
    return [x.reshape(-1, *x.shape[-2:]) for x in load(dtype=dtype)]


def biases(kind: str, query: Array) -> tuple[dict[str, Any], Array]:
    """Options of linear attention for a bias, and the ``window_bias`` of exact attention."""
    heads, length = query.shape[:2]
    if kind == "T5":
        table = 2 * np.random.default_rng(9).standard_normal((heads, 2 * REACH + 1))
        table = table.astype(query.dtype)
        return {"window_bias": table}, table
    slopes = linattn.positions.alibi_slopes(heads).astype(query.dtype)
    distance = abs(np.arange(1 - length, length))
    return {"log_decay": -slopes}, -slopes[:, None] * distance


def head_errors(
    kind: str, arrays: list[Array], phi: Any, window: int | None, clusters: int | None
) -> Array:
    """Relative error of each head."""
    options, bias = biases(kind, arrays[0])
    exact = linattn.softmax_attention(*arrays, window_bias=bias)
    if window is None:
        options.pop("window_bias", None)
    options |= {"exact_window": window, "exact_clusters": clusters}
    query, key, value = arrays
    out: Array = linattn.linear_attention(query, key, value, phi, **options)
    off, size = (np.linalg.norm(x, axis=(-2, -1)) for x in (out - exact, exact))
    return np.asarray(off / size)


def main() -> None:
    """Print a table."""
    print("| window | clusters | T5, 256 tokens | ALiBi | T5, 2,560 tokens | ALiBi |")
    print("| --- | --- | --- | --- | --- | --- |")
    samples = [real_sample(), real_sample(long=True)]
    maps = [LandmarkFeatures.fit(*arrays[:2], num_features=64, rng=0) for arrays in samples]
    for window, clusters in CASES:
        cells = [str(window or "none"), str(clusters or "none")]
        for arrays, phi in zip(samples, maps, strict=True):
            for kind in ("T5", "ALiBi"):
                errors = head_errors(kind, arrays, phi, window, clusters)
                cells.append(f"{np.median(errors):.4f} ({errors.max():.3f})")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
