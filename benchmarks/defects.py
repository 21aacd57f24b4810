"""What seven habits of linear-attention code cost, each next to linattn on the same inputs.

The habits are written out here from their formulas, in NumPy and float64 unless a row says
otherwise. Prints the table of README.md. Run it with::

    python benchmarks/defects.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures

Array = NDArray[np.float64]

DIM = 32
COLUMNS = 256
EPSILON = 1e-4


class Row(NamedTuple):
    """One habit: what is often done, what that costs, and what linattn does."""

    habit: str
    cost: str
    ours: str


def sample() -> tuple[Array, Array, Array]:
    """Return the real sample as 24 heads of 256 tokens."""
    query, key, value = linattn.datasets.pretrained_qkv(np.float64)
    shape = (24, 256, DIM)
    return query.reshape(shape), key.reshape(shape), value.reshape(shape)


def gaussians() -> tuple[Array, Array, Array]:
    """Return standard normal inputs of the sample's shape."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 24, 256, DIM))
    return query, key, value


def favor() -> PositiveFeatures:
    """Return the random map that the rows share."""
    return PositiveFeatures(DIM, COLUMNS, rng=0)


def stabilized(x: Array, epsilon: float, *, is_query: bool) -> Array:
    """FAVOR+ features shifted by their largest exponent, plus epsilon.

    A query is shifted by the largest ``w.x`` of its own, all keys by the largest of all keys.
    """
    x = x * DIM**-0.25
    exponent = x @ favor().projection.T
    shift = exponent.max(axis=-1 if is_query else (-2, -1), keepdims=True)
    half_norm = np.sum(x * x, axis=-1, keepdims=True) / 2
    return np.asarray((np.exp(exponent - half_norm - shift) + epsilon) * COLUMNS**-0.5)


def pairwise(weights: Array, value: Array) -> Array:
    """Attention from its weights, ``(..., L, S)``."""
    return np.asarray(weights @ value / weights.sum(axis=-1, keepdims=True))


def stabilized_attention(
    query: Array, key: Array, value: Array, epsilon: float, *, is_causal: bool
) -> Array:
    """Attention with :func:`stabilized` features."""
    queries = stabilized(query, epsilon, is_query=True)
    weights = queries @ stabilized(key, epsilon, is_query=False).swapaxes(-1, -2)
    return pairwise(np.tril(weights) if is_causal else weights, value)


def distance(output: Array, wanted: Array) -> Array:
    """Relative Frobenius distance of each head."""
    axes = (-2, -1)
    return np.asarray(
        np.linalg.norm(output - wanted, axis=axes) / np.linalg.norm(wanted, axis=axes)
    )


def orthogonal_rows() -> Row:
    """Mean of the kernel estimate along ``z = (1, ..., 1) / sqrt(d)``, relative to the kernel."""
    raw: list[str] = []
    fixed: list[str] = []
    for dim, draws in ((8, 20_000), (16, 10_000), (64, 1_000)):
        rng = np.random.default_rng(0)
        z = np.full(dim, dim**-0.5)
        q = np.linalg.qr(rng.standard_normal((draws, dim, dim)))[0].swapaxes(-1, -2)
        norms = np.linalg.norm(rng.standard_normal((draws, dim, dim)), axis=-1, keepdims=True)
        ours = linattn.sampling.orthogonal(dim, dim, rng, batch_shape=(draws,))
        for rows, found in ((q * norms, raw), (ours, fixed)):
            ratio = np.exp(rows @ z - 0.5).mean(axis=-1)
            error = ratio.std(ddof=1) / draws**0.5
            found.append(f"{100 * (ratio.mean() - 1):+.1f} ± {100 * error:.1f} %")
    return Row(
        "orthogonal rows straight from a QR, signs not fixed",
        f"kernel estimates off by {', '.join(raw)} (d = 8, 16, 64), whatever the number of columns",
        ", ".join(fixed),
    )


def epsilon_in_features() -> Row:
    """Distance of attention to the mean of the values, with epsilon and without."""
    query, key, value = sample()
    mean = np.broadcast_to(value.mean(axis=-2, keepdims=True), value.shape)
    padded = stabilized_attention(query, key, value, EPSILON, is_causal=False)
    ours = linattn.linear_attention(query, key, value, favor())
    return Row(
        f"`exp(...) + {EPSILON:g}` as features, against division by 0",
        f"on the real sample attention is the unweighted mean of the values, to "
        f"{np.median(distance(padded, mean)):.4f}",
        f"no epsilon: the same features are {np.median(distance(ours, mean)):.2f} away from that "
        f"mean",
    )


def stabilizer_of_all_keys() -> Row:
    """Largest change of earlier causal outputs when the last key is multiplied by 1.5."""
    query, key, value = gaussians()
    louder = key.copy()
    louder[:, -1] *= 1.5

    def leak(attention: Callable[[Array], Array]) -> float:
        before, after = (attention(keys)[:, :-1] for keys in (key, louder))
        return float(np.max(np.abs(after - before)) / np.sqrt(np.mean(before**2)))

    theirs = leak(lambda k: stabilized_attention(query, k, value, EPSILON, is_causal=True))
    ours = leak(
        lambda k: np.asarray(linattn.linear_attention(query, k, value, favor(), is_causal=True))
    )
    return Row(
        f"one shift for all keys, and that {EPSILON:g}",
        f"the last key times 1.5 moves earlier causal outputs by up to {theirs:.1f} times their "
        f"rms",
        f"{ours:.1g}",
    )


def redraw_on_every_call() -> Row:
    """Distance between two calls on the same inputs."""
    query, key, value = sample()
    phi = favor()
    first = linattn.linear_attention(query, key, value, phi)
    again = linattn.linear_attention(query, key, value, phi)
    redrawn = linattn.linear_attention(query, key, value, phi.redraw(1))
    return Row(
        "a new projection on every call",
        f"two calls on one input differ by {np.median(distance(redrawn, first)):.2f} of the output",
        f"{np.max(np.abs(again - first)):.1g}: a map is drawn once, from a seed",
    )


def mask_on_values() -> Row:
    """Distance to attention over the kept half of the keys."""
    query, key, value = sample()
    kept = np.arange(256) < 128
    phi = EluFeatures()
    wanted = linattn.linear_attention(query, key[:, :128], value[:, :128], phi)
    half_masked = pairwise(np.asarray(phi.estimate(query, key)), value * kept[:, None])
    masked = linattn.linear_attention(query, key, value, phi, key_mask=kept)
    return Row(
        "padding masked in the values only",
        f"half of the keys padded: outputs off by {np.median(distance(half_masked, wanted)):.2f}",
        f"{np.max(distance(masked, wanted)):.1g}: a mask is a slice",
    )


def undoing_by_subtraction() -> Row:
    """Float32 error of causal outputs whose states were found by subtracting from the last one."""
    query, key, value = sample()
    phi = EluFeatures()
    wanted = linattn.linear_attention(query, key, value, phi, is_causal=True)
    q, k, v = (x.astype(np.float32) for x in (query, key, value))
    weights_q, weights_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    v1 = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)
    terms = weights_k[..., :, None] * v1[..., None, :]
    state = np.zeros_like(terms[:, 0])
    for t in range(256):
        state = state + terms[:, t]
    undone = np.empty_like(v)
    for t in reversed(range(256)):
        sums = (weights_q[:, t, None] @ state)[:, 0]
        undone[:, t] = sums[..., :-1] / sums[..., -1:]
        state = state - terms[:, t]
    ours = linattn.linear_attention(q, k, v, phi, is_causal=True)

    def worst(output: Any) -> float:
        errors = np.linalg.norm(output - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        return float(errors.max())

    return Row(
        "earlier states found by subtracting (float32)",
        f"an output row is off by up to {worst(undone):.0e}",
        f"{worst(ours):.0e}: states are only ever added",
    )


def sums_in_float16() -> Row:
    """Count of 4096 equal keys, summed in float16."""
    ones = np.ones((4096, 1), dtype=np.float16)
    theirs = np.cumsum(ones, axis=0, dtype=np.float16)[-1, 0]
    _, norm = linattn.linear_attention(
        ones, ones, ones, EluFeatures(), is_causal=True, return_log_normalizer=True
    )
    return Row(
        "sums in the float16 of the keys",
        f"4096 equal keys add up to {theirs:.0f}",
        f"{np.exp(norm[-1] - norm[0]):.0f}: states are float32",
    )


ROWS = (
    orthogonal_rows,
    epsilon_in_features,
    stabilizer_of_all_keys,
    redraw_on_every_call,
    mask_on_values,
    undoing_by_subtraction,
    sums_in_float16,
)


def table() -> list[str]:
    """Return the lines of a Markdown table."""
    rows = [Row("what is often done", "what it costs", "linattn"), Row("---", "---", "---")]
    rows += [row() for row in ROWS]
    return [f"| {row.habit} | {row.cost} | {row.ours} |" for row in rows]


if __name__ == "__main__":
    print("\n".join(table()))
