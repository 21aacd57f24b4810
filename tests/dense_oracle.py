"""All options of attention as one dense formula, in float64 or complex numbers.

Every pair of a query and a key has a weight, a sum over the features of a map, times the
exponential of a number for that pair: bias, decay and offset in one. Outputs, normalizers and
states are sums of these weights. No block, no walk, no code of the library: of a feature map its
parameters are read and nothing else.

The formula is analytic, but for choices that are made by real parts. A derivative along a direction
is therefore the imaginary part at a point moved by ``1e-30 i``, exact to rounding: what gradients
are held to.

Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``m`` features, ``e`` value dim; leading axes
broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "MAPS",
    "Memory",
    "OwnFeatures",
    "Result",
    "Scene",
    "attention",
    "evaluate",
    "read",
    "recurrence",
    "scenes",
]

Array = Any


class Side(NamedTuple):
    """Features ``values * exp(log)`` of the tokens of one side, each ``(..., n, m)``.

    `sizes` are what the rounding of a value is relative to, where it is a difference or a cosine.
    """

    log: Array
    values: Array
    sizes: Array = None


class Memory(NamedTuple):
    """Sums over keys seen before, ``kvz * exp(log_scale)``, and how many positions they took."""

    kvz: Array
    log_scale: Array
    length: int = 0


@dataclass(frozen=True)
class Scene:
    """One sequence and all that changes its weights.

    `stops`: ``(..., L)``, how many leading keys a query sees. `decay`: ``(..., S)``; `counts` says
    how it acts: "causal" between key and query, "full" by distance, "end" from the key to the end.
    `offsets`: a bias ``(..., 2 r + 1)`` and those of either side, ``(...)``. `local`: how many keys
    to the left and right are seen. `sinks`: the first so many are seen too, and exact. `scale`
    alone, without a map, is softmax attention.
    """

    query: Array
    key: Array
    value: Array
    feature_map: Any = None
    scale: float = 1.0
    stops: Array = None
    mask: Array = None
    bias: Array = None
    decay: Array = None
    counts: str = "full"
    memory: Memory | None = None
    normalize: bool = True
    window: int | None = None
    clusters: int | None = None
    offsets: tuple[Array, Array, Array] | None = None
    local: tuple[int, int] | None = None
    sinks: int = 0
    query_start: int = 0


class Result(NamedTuple):
    """What attention returns, and what rounding may do to it.

    `condition`, ``(..., L, e)``: absolute terms of an output; `doubt`, ``(..., L)``, those of a
    denominator over it; `exponents`: the largest logarithm that was added up. `tie` is how close a
    choice was: a smaller one is anybody's.
    """

    output: Array
    log_normalizer: Array
    denominator: Array
    memory: Memory
    absolute: Array
    condition: Array
    doubt: Array
    exponents: float
    tie: float


def real(x: Array) -> Array:
    return np.real(x)


def top(x: Array, axis: Any) -> Array:
    """Largest real part, 0 where there is nothing but -inf; never NaN."""
    most = real(x).max(axis=axis, keepdims=True, initial=-np.inf)
    return np.where(np.isfinite(most), most, 0.0)


def log_sum(x: Array, axis: int) -> Array:
    c = top(x, axis)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - c).sum(axis=axis, keepdims=True)) + c


def square(x: Array) -> Array:
    return (x * x).sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------- maps, from their parameters


def _exponential(phi: Any, x: Array, signs: tuple[int, ...], half: float = -0.5) -> Array:
    u = np.sqrt(phi.scale) * (x @ np.swapaxes(phi.projection, -1, -2))
    u = np.concatenate([sign * u for sign in signs], axis=-1)
    return u + half * phi.scale * square(x) - np.log(u.shape[-1]) / 2


def _positive(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    return Side(_exponential(phi, x, (1,)), None)


def _hyperbolic(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    return Side(_exponential(phi, x, (1, -1)), None)


def _generalized(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    """The tilt of a head, or of each of its axes after a change of basis."""
    A, W, d = np.asarray(phi.A), phi.projection, x.shape[-1]
    A = A[..., None, :] if hasattr(phi, "transform") else A[..., None, None] + np.zeros(d)
    if hasattr(phi, "transform"):
        T = phi.transform
        x = x @ (np.linalg.inv(T) if is_key else np.swapaxes(T, -1, -2))
    x = np.sqrt(phi.scale) * x
    u = (np.sqrt(1 - 4 * A) * x) @ np.swapaxes(W, -1, -2)
    log = (np.log(1 - 4 * A) / 4 + A * W**2).sum(-1)[..., None, :] - square(x) / 2
    log = np.concatenate([log + u, log - u], axis=-1)
    return Side(log - np.log(log.shape[-1]) / 2, None)


def _calibrated(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    if not is_key:
        logits = phi.scale * (x @ np.swapaxes(phi.centroids, -1, -2))
        return Side(logits + phi.query_bias[..., None, :], None)
    z = x @ np.swapaxes(phi.key_weights, -1, -2) + phi.key_bias[..., None, :]
    power = np.asarray(phi.power)[..., None, None]
    return Side(z - power * log_sum(z, -1) + x @ phi.tilt[..., :, None], None)


def _activation(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    W, power = np.sqrt(phi.scale) * phi.projection.T, {"relu": 1, "squared_relu": 2}
    u, size = x @ W, abs(real(x)) @ abs(W)
    n, m = power[phi.activation], np.sqrt(u.shape[-1])
    values = np.where(real(u) > 0, u, 0) ** n + phi.epsilon
    return Side(None, values / m, (size**n + phi.epsilon) / m)


def _elu(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    u = np.sqrt(phi.scale) * x
    return Side(np.where(real(u) > 0, np.log1p(np.where(real(u) > 0, u, 0)), u), None)


def _relu(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    u = np.sqrt(phi.scale) * x
    return Side(None, np.where(real(u) > 0, u, 0))


def _trigonometric(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    u = np.sqrt(phi.scale) * (x @ phi.projection.T)
    values = np.concatenate([np.cos(u), np.sin(u)], axis=-1) / np.sqrt(u.shape[-1])
    return Side(phi.scale * square(x) / 2 + 0 * values, values, _phases(u))


def _phases(u: Array) -> Array:
    size = (1 + abs(real(u))) / np.sqrt(u.shape[-1])
    return np.concatenate([size, size], axis=-1)


def _fourier(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    u = x @ phi.projection.T / phi.bandwidth
    values = np.concatenate([np.cos(u), np.sin(u)], axis=-1) / np.sqrt(u.shape[-1])
    return Side(None, values, _phases(u))


def _cosformer(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    u = np.sqrt(phi.scale) * x
    u = np.where(real(u) > 0, u, 0)
    angle = (np.pi * at / (2 * phi.max_length))[:, None]
    return Side(None, np.concatenate([u * np.cos(angle), u * np.sin(angle)], axis=-1))


def _rotated(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    """Rotate pairs of features ``(r, r + m / 2)`` by the position; keep the plain ones too."""
    log, values, _ = side(phi.feature_map, x, at, is_key=is_key)
    values = values * np.exp(log - top(log, -1))
    half = values.shape[-1] // 2
    angle = at[:, None] * phi.base ** (-np.arange(half) / half)
    a, b = values[..., :half], values[..., half:]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    both = (abs(real(a)) + abs(real(b))) * (1 + abs(angle))
    sizes = np.concatenate([both, both, abs(real(values))], axis=-1)
    values = np.concatenate([*turned, values], axis=-1)
    return Side(top(log, -1) + 0 * values, values, sizes)


def _reparametrized(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    """Features of the map inside at other coordinates, times an exact factor of the token."""
    shift, other, M = phi.query_shift, phi.key_shift, phi.transform
    if is_key:
        moved = x - other[..., None, :]
        factor, x = moved @ shift[..., :, None], moved @ np.swapaxes(np.linalg.inv(M), -1, -2)
    else:
        factor, x = x @ other[..., :, None], (x - shift[..., None, :]) @ M
    log, values, sizes = side(phi.feature_map, x, at, is_key=is_key)
    return Side(log + phi.scale * factor, values, sizes)


def _softmax(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    return Side(np.sqrt(phi.scale) * x, None)


def _hedgehog(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    W, b = (phi.key_weights, phi.key_bias) if is_key else (phi.weights, phi.bias)
    u = x @ np.swapaxes(W, -1, -2) + b[..., None, :]
    return Side(np.concatenate([u, -u], axis=-1), None)


def _distances(phi: Any, x: Array) -> Array:
    """Squared distance in the metric of every key to every landmark, ``(..., n, m)``."""
    apart = x[..., :, None, :] - phi.landmarks[..., None, :, :]
    apart = np.where(
        phi.used[..., None, :], ((apart @ phi.metric[..., None, :, :]) * apart).sum(-1), np.inf
    )
    return real(apart)


def _landmark(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    b = np.swapaxes(phi.landmarks, -1, -2)
    if not is_key:
        return Side(phi.scale * (x @ b), None)
    place = _distances(phi, x).argmin(axis=-1)[..., None]
    chosen = place == np.arange(b.shape[-1])
    log_A = phi.scale * (x @ np.swapaxes(phi.probes, -1, -2)) - phi.log_normalizers[..., None, :]
    log_Phi = phi.scale * (phi.probes @ b) - phi.log_normalizers[..., :, None]
    of_key = chosen.astype(float) @ np.swapaxes(log_Phi, -1, -2)
    log_g = log_sum(log_A + of_key, -1) - log_sum(2 * of_key, -1)
    return Side(np.where(chosen, log_g, -np.inf), None)


class OwnFeatures:
    """A map written by a user: two linear layers, of both signs, in whatever library."""

    positive = False

    def __init__(self, dim: int, num_features: int, rng: np.random.Generator) -> None:
        self.dim, self.num_features = dim, num_features
        self.weights = rng.standard_normal((2, dim, num_features))

    def query_features(self, x: Any) -> Any:
        return self._features(x, 0)

    def key_features(self, x: Any) -> Any:
        return self._features(x, 1)

    def _features(self, x: Any, which: int) -> Any:
        import array_api_compat

        from linattn.typing import Features

        xp = array_api_compat.array_namespace(x)
        device = array_api_compat.device(x)
        return Features(None, 1 + x @ xp.asarray(self.weights[which], dtype=x.dtype, device=device))


def _own(phi: Any, x: Array, at: Array, is_key: bool) -> Side:
    W = phi.weights[int(is_key)]
    return Side(None, 1 + x @ W, 1 + abs(real(x)) @ abs(W))


MAPS = {
    "PositiveFeatures": _positive,
    "HyperbolicFeatures": _hyperbolic,
    "GeneralizedExponentialFeatures": _generalized,
    "DenseExponentialFeatures": _generalized,
    "CalibratedFeatures": _calibrated,
    "ActivationFeatures": _activation,
    "EluFeatures": _elu,
    "ReluFeatures": _relu,
    "TrigonometricFeatures": _trigonometric,
    "RandomFourierFeatures": _fourier,
    "CosformerFeatures": _cosformer,
    "RotatedFeatures": _rotated,
    "Reparametrized": _reparametrized,
    "SoftmaxFeatures": _softmax,
    "HedgehogFeatures": _hedgehog,
    "LandmarkFeatures": _landmark,
    "OwnFeatures": _own,
}


def side(phi: Any, x: Array, at: Array, *, is_key: bool) -> Side:
    log, values, sizes = MAPS[type(phi).__name__](phi, x, at, is_key)
    if log is None:
        log = np.zeros_like(values, dtype=float)
    if values is None:
        values = np.ones_like(log)
    return Side(log, values, abs(real(values)) if sizes is None else sizes)


# ---------------------------------------------------------------- one sequence


def seen_pairs(scene: Scene) -> Array:
    """Which pairs count, ``(..., L, S)``."""
    L, S = scene.query.shape[-2], scene.key.shape[-2]
    i, j = scene.query_start + np.arange(L)[:, None], np.arange(S)
    seen = np.ones((L, S), dtype=bool)
    if scene.stops is not None:
        seen = seen & (j < scene.stops[..., None])
    if scene.local is not None:
        left, right = scene.local
        seen = seen & (((i - left <= j) & (j <= i + right)) | (j < scene.sinks))
    if scene.mask is not None:
        seen = seen & scene.mask[..., None, :]
    return seen


def pair_weights(scene: Scene) -> tuple[Array, Array, Array]:
    """Log weight of pairs, of what came before, and of keys at the end of the sequence."""
    L, S = scene.query.shape[-2], scene.key.shape[-2]
    i, j = np.arange(L)[:, None], np.arange(S)
    pairs: Array = np.zeros((L, S))
    before: Array = np.zeros(L)
    at_end: Array = np.zeros(S)
    if scene.bias is not None:
        bias = np.where(real(scene.bias) > -np.inf, scene.bias, 0)
        pairs, at_end = pairs + bias[..., None, :], at_end + bias
    if scene.decay is not None:
        total = np.cumsum(scene.decay + np.zeros(S), axis=-1)
        last = total[..., -1:] if S else np.zeros(1)
        at_end = at_end + last - total
        if scene.counts == "full":
            one = scene.decay[..., :1, None] if S else np.zeros((1, 1))
            pairs, before = pairs + one * abs(i - j), before + one[..., 0] * (1 + np.arange(L))
        elif scene.counts == "end":
            pairs, before = pairs + (last - total)[..., None, :], before + last
        else:
            pairs = pairs + np.where(j <= i, total[..., :, None] - total[..., None, :], 0)
            before = before + total
    if scene.offsets is not None:
        table, left, right = scene.offsets
        reach, i = table.shape[-1] // 2, scene.query_start + i
        inside = table[..., np.clip(j - i, -reach, reach) + reach]
        far = np.where(j < i, left[..., None, None], right[..., None, None])
        pairs = pairs + np.where(abs(j - i) <= reach, inside, far)
        before = before + left[..., None]
    return pairs, before, at_end


def near_pairs(scene: Scene) -> Array:
    """Pairs of one block of w tokens, or of two blocks side by side."""
    L, S = scene.query.shape[-2], scene.key.shape[-2]
    if scene.window is None:
        return np.full((L, S), scene.feature_map is None)
    w, i = scene.window, scene.query_start + np.arange(L)
    return (abs(i[:, None] // w - np.arange(S) // w) <= 1) | (np.arange(S) < scene.sinks)


def chosen_pairs(scene: Scene, log_g: Array) -> tuple[Array, float]:
    """Pairs whose key is in a cluster that the query has chosen, and how close the choice was.

    A query chooses by ``s q.b_c + log mean g_j + log(mean |k_j - b_c|^2) / 2``, means over the
    keys of a cluster that are in no mask.
    """
    phi, count = scene.feature_map, min(scene.clusters or 0, scene.feature_map.num_features)
    apart = _distances(phi, scene.key)
    member = apart.argmin(axis=-1)[..., None] == np.arange(phi.landmarks.shape[-2])
    counts = member if scene.mask is None else member & scene.mask[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        number = counts.sum(axis=-2, keepdims=True)
        log_mean = log_sum(np.where(counts, real(log_g), -np.inf), -2) - np.log(number)
        squares = np.where(counts, np.where(member, apart, 0), 0).sum(-2, keepdims=True) / number
        scores = scene.scale * real(scene.query) @ np.swapaxes(phi.landmarks, -1, -2)
        scores = np.where(number > 0, scores + log_mean + np.log(squares) / 2, -np.inf)
    ordered = np.sort(scores, axis=-1)[..., ::-1]
    chosen = scores >= ordered[..., count - 1 : count]
    tie = np.inf
    if count < ordered.shape[-1]:
        with np.errstate(invalid="ignore"):
            gap = ordered[..., count - 1] - ordered[..., count]
        tie = float(np.nanmin(gap, initial=np.inf))
    # Also between landmarks, for the keys.
    if apart.shape[-1] > 1 and apart.size:
        two = np.sort(apart, axis=-1)[..., :2]
        tie = min(tie, float(((two[..., 1] - two[..., 0]) / (1 + two[..., 1])).min()))
    return (chosen[..., :, None, :] & member[..., None, :, :]).any(-1), tie


def columns(feature_map: Any, m: int) -> tuple[slice, slice]:
    """Features that numerators are made of, and those of denominators."""
    if type(feature_map).__name__ == "RotatedFeatures":
        return slice(0, m // 2), slice(m // 2, m)
    return slice(None), slice(None)


def attention(scene: Scene) -> Result:
    """Attention of one sequence by its dense weights."""
    seen = seen_pairs(scene)
    clean = scene
    if scene.mask is not None:
        clean = replace(
            scene,
            key=np.where(scene.mask[..., None], scene.key, 0),
            value=np.where(scene.mask[..., None], scene.value, 0),
        )
    L, S = scene.query.shape[-2], scene.key.shape[-2]
    start = 0 if scene.memory is None else scene.memory.length
    if scene.feature_map is None:
        nothing = np.zeros((L, 0)), np.zeros((S, 0))
        q, k = (Side(x, x, x) for x in nothing)
    else:
        places = start + scene.query_start + np.arange(L), start + np.arange(S)
        q = side(scene.feature_map, scene.query, places[0], is_key=False)
        k = side(scene.feature_map, clean.key, places[1], is_key=True)
    return _sums(clean, seen, q, k)


def _sums(scene: Scene, seen: Array, q: Side, k: Side) -> Result:
    pairs, before, at_end = pair_weights(scene)
    near, tie = near_pairs(scene), np.inf
    if scene.clusters is not None:
        chosen, tie = chosen_pairs(scene, k.log)
        near = near | chosen
    m, e = q.log.shape[-1], scene.value.shape[-1]
    memory = scene.memory or Memory(np.zeros((m, e + 1)), np.full(m, -np.inf))
    far = q.log[..., :, None, :] + k.log[..., None, :, :] + pairs[..., None]
    far = np.where(seen[..., None], far, -np.inf)
    old = q.log + before[..., None] + memory.log_scale[..., None, :]
    if type(scene.feature_map).__name__ == "SoftmaxFeatures":
        far, old = _by_columns(q, far, old, memory.kvz[..., -1])
    far = np.where(near[..., None], -np.inf, far)
    exact = scene.scale * (scene.query @ np.swapaxes(scene.key, -1, -2)) + pairs
    exact = np.where(seen & near, exact, -np.inf)
    c = np.maximum(real(exact).max(-1, initial=-np.inf), real(old).max(-1, initial=-np.inf))
    c = np.maximum(c, real(far).max((-1, -2), initial=-np.inf))
    c = np.where(np.isfinite(c), c, 0)
    logs = [x[np.isfinite(x)] for x in map(real, (q.log, k.log, pairs, before, at_end, exact))]
    exponents = max(float(abs(x).max(initial=0)) for x in logs)
    far, old = np.exp(far - c[..., None, None]), np.exp(old - c[..., None])
    terms = q.values[..., :, None, :] * k.values[..., None, :, :] * far
    exact = np.exp(exact - c[..., None])
    weights = terms, exact, q.values * old
    sizes = (q.sizes[..., :, None, :] * k.sizes[..., None, :, :] * abs(far)).sum(-1)
    sizes = sizes + abs(exact), q.sizes * abs(old)
    return _divided(scene, (weights, sizes), memory.kvz, c)._replace(
        **_state(scene, k, at_end), exponents=exponents, tie=float(tie)
    )


def _divided(scene: Scene, weights: Any, kvz: Array, c: Array) -> Result:
    """Numerators by denominators, of the weights of pairs and of what came before."""
    (terms, exact, old), (sizes, size_of_old) = weights
    up, down = columns(scene.feature_map, old.shape[-1])
    v = scene.value
    num = (terms[..., up].sum(-1) + exact) @ v + old[..., up] @ kvz[..., up, :-1]
    den = (terms[..., down].sum(-1) + exact).sum(-1)
    den = den + (old[..., down] @ kvz[..., down, -1:])[..., 0]
    condition = sizes @ abs(v) + size_of_old @ abs(kvz[..., :-1])
    doubt = sizes.sum(-1) + (size_of_old @ abs(kvz[..., -1:]))[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_normalizer = np.where(real(den) < 0, np.nan, np.log(den) + c)
    inverse = np.where(den == 0, 0, 1 / np.where(den == 0, 1, den))
    doubt = doubt * abs(inverse)
    if scene.normalize:
        output, condition = num * inverse[..., None], condition * abs(inverse)[..., None]
        condition = condition + abs(output) * doubt[..., None]
    else:
        factor = np.exp(c)[..., None]
        output, condition = num * factor, condition * factor
    nothing = Memory(0, 0)
    return Result(output, log_normalizer, den, nothing, 0, condition, doubt, 0, 0)


def _by_columns(q: Side, far: Array, old: Array, z: Array) -> tuple[Array, Array]:
    """Divide the keys of each feature by their sum, as a query sees it."""
    keys, before = far - q.log[..., :, None, :], old - q.log
    c = np.maximum(real(keys).max(-2, initial=-np.inf), real(before))
    c = np.where(np.isfinite(c), c, 0)
    total = np.exp(keys - c[..., None, :]).sum(-2) + np.exp(before - c) * z[..., None, :]
    with np.errstate(divide="ignore"):
        log_total = np.where(total == 0, 0, np.log(np.where(total == 0, 1, total)) + c)
    return far - log_total[..., None, :], old - log_total


def _state(scene: Scene, k: Side, at_end: Array) -> dict[str, Any]:
    """Sums over all keys as they are after the last one, and the sums of their absolute terms."""
    S = scene.key.shape[-2]
    logs = k.log + at_end[..., None]
    if scene.mask is not None:
        logs = np.where(scene.mask[..., None], logs, -np.inf)
    c = real(logs).max(-2, initial=-np.inf)
    old = None
    if scene.memory is not None:
        total: Array = np.zeros(())
        if scene.decay is not None:
            total = (scene.decay + np.zeros(S)).sum(-1)
        old = scene.memory.log_scale + total[..., None]
        c = np.maximum(c, real(old))
    c0 = np.where(np.isfinite(c), c, 0)
    decayed = np.exp(logs - c0[..., None, :])
    rows, sizes = (np.swapaxes(x * decayed, -1, -2) for x in (k.values, k.sizes))
    v1 = np.concatenate([scene.value, np.ones_like(scene.value[..., :1])], axis=-1)
    kvz, absolute, length = rows @ v1, abs(sizes) @ abs(v1), S
    if scene.memory is not None:
        kept = np.exp(old - c0)[..., None] * scene.memory.kvz
        kvz, absolute = kvz + kept, absolute + abs(kept)
        length = S + scene.memory.length
    c = np.broadcast_to(c, kvz.shape[:-1])
    return {"memory": Memory(kvz, c, length), "absolute": absolute}


# ---------------------------------------------------------------- from options to sequences


def scenes(query: Array, key: Array, value: Array, feature_map: Any, **options: Any) -> list[Scene]:
    """Each of the packed sequences, or the one, with the options that a call has."""
    state, borders = options.get("initial_state"), options.get("cu_seqlens")
    scale: Any = options.get("scale") or getattr(feature_map, "scale", 1.0)
    if feature_map is None and options.get("scale") is None:
        scale = query.shape[-1] ** -0.5
    whole = Scene(query, key, value, feature_map, scale)
    whole = replace(
        whole,
        mask=_mask(key, options),
        bias=options.get("key_bias"),
        decay=_decay(key, options.get("log_decay")),
        normalize=options.get("normalize", True),
        window=options.get("exact_window"),
        clusters=options.get("exact_clusters"),
        offsets=_offsets(options),
        local=_local(options.get("local_window_size")),
        sinks=options.get("sinks") or 0,
    )
    if borders is None:
        memory = None if state is None else Memory(state.kvz, state.log_scale, state.length)
        return [_with_stops(replace(whole, memory=memory), options)]
    parts = []
    for n, (a, b) in enumerate(pairwise(borders)):
        part = _rows(whole, a, b)
        if state is not None:
            part = replace(part, memory=Memory(state.kvz[n], state.log_scale[n], state.length))
        parts.append(_with_stops(part, options))
    return parts


def _rows(scene: Scene, a: int, b: int) -> Scene:
    """Tokens a to b of everything that has a number for each token."""
    S = scene.key.shape[-2]
    tokens = {"query": scene.query[..., a:b, :], "key": scene.key[..., a:b, :]}
    tokens["value"] = scene.value[..., a:b, :]
    for name in ("mask", "bias", "decay"):
        row = getattr(scene, name)
        if row is not None:
            tokens[name] = np.broadcast_to(row, (*row.shape[:-1], S))[..., a:b]
    return replace(scene, **tokens)


def _mask(key: Array, options: dict[str, Any]) -> Array:
    S = key.shape[-2]
    mask = np.ones(S, dtype=bool)
    if options.get("key_mask") is not None:
        mask = mask & options["key_mask"]
    if options.get("key_lengths") is not None:
        mask = mask & (np.arange(S) < np.asarray(options["key_lengths"])[..., None])
    if options.get("key_bias") is not None:
        mask = mask & (real(options["key_bias"]) > -np.inf)
    return mask


def _decay(key: Array, decay: Any) -> Array:
    if decay is None:
        return None
    decay = np.asarray(decay)
    return decay if decay.ndim == key.ndim - 1 else decay[..., None]


def _offsets(options: dict[str, Any]) -> Any:
    table = options.get("window_bias")
    if table is None:
        return None
    left, right = options.get("far_bias") or (table[..., 0], table[..., -1])
    return table, np.asarray(left), np.asarray(right)


def _local(size: Any) -> Any:
    if size is None:
        return None
    sides = size if isinstance(size, tuple) else (size, size)
    return tuple(np.inf if side is None else side for side in sides)


def _with_stops(scene: Scene, options: dict[str, Any]) -> Scene:
    """Which keys the queries of one sequence see, and how decays act among them."""
    L, S = scene.query.shape[-2], scene.key.shape[-2]
    place = np.arange(L) + 1
    if options.get("is_causal"):
        start = S - L if options["is_causal"] == "lower_right" else 0
        return replace(scene, stops=place + start, query_start=start, counts="causal")
    if options.get("key_stop") is not None:
        scene = replace(scene, stops=np.asarray(options["key_stop"]))
    if options.get("prefix_length") is not None:
        prefix = np.asarray(options["prefix_length"])[..., None]
        scene = replace(scene, stops=np.maximum(prefix, place))
    if options.get("causal_block") is not None:
        block = options["causal_block"]
        scene = replace(scene, stops=np.minimum(block * -(-place // block), S))
    # A decay is taken where such stops are those of a causal sequence, and nowhere else.
    return scene if scene.stops is None else replace(scene, counts="causal")


def evaluate(query: Array, key: Array, value: Array, feature_map: Any, **options: Any) -> Result:
    """Attention of arguments as the library takes them, in float64 NumPy or complex numbers."""
    parts = [attention(scene) for scene in scenes(query, key, value, feature_map, **options)]
    return parts[0] if options.get("cu_seqlens") is None else joined(parts)


def read(query: Array, key: Array, value: Array, feature_map: Any, **options: Any) -> Result:
    """All keys as they are after the last one, read by all queries."""
    [scene] = scenes(query, key, value, feature_map, **options)
    return attention(replace(scene, counts="end"))


def joined(parts: list[Result]) -> Result:
    """Outputs end to end; states along a first axis, of the length of the longest."""
    rows = {}
    for name in ("output", "log_normalizer", "denominator", "condition", "doubt"):
        arrays, axis = [getattr(part, name) for part in parts], -1
        if name in ("output", "condition"):
            axis = -2
        rows[name] = np.concatenate(arrays, axis=axis)
    memory = Memory(
        np.stack([part.memory.kvz for part in parts]),
        np.stack([part.memory.log_scale for part in parts]),
        max(part.memory.length for part in parts),
    )
    return parts[0]._replace(
        **rows,
        memory=memory,
        absolute=np.stack([part.absolute for part in parts]),
        exponents=max(part.exponents for part in parts),
        tie=min(part.tie for part in parts),
    )


# ---------------------------------------------------------------- recurrences


class Run(NamedTuple):
    """Outputs of a recurrence, its last states, those on the way, and the largest number."""

    output: Array
    state: Array
    states: list[Array]
    size: float


def recurrence(query: Array, key: Array, value: Array, update_rule: str, **options: Any) -> Run:
    """Token by token: decay, what the state returns for the key, what is written, the output."""
    L, d = key.shape[-2:]
    scale, borders = options.get("scale"), options.get("cu_seqlens")
    scale = d**-0.5 if scale is None else scale
    state, interval = options.get("initial_state"), options.get("return_states_every")
    decay, beta = (options.get(name) for name in ("log_decay", "beta"))
    if decay is not None and decay.ndim < key.ndim:
        decay = decay[..., None]
    read, erase = options.get("read_key"), options.get("erase_key")
    if read is not None and erase is not None:
        rates = 1.0 if beta is None else beta if beta.ndim == key.ndim else beta[..., None]
        erase, beta = rates * erase, None
    beta = None if beta is None else beta[..., None, None]
    counts = np.ones((*key.shape[:-1], 1, 1), bool)
    if options.get("key_mask") is not None:
        counts = counts & options["key_mask"][..., None, None]
    if options.get("key_lengths") is not None:
        ends = np.asarray(options["key_lengths"])[..., None]
        counts = counts & (np.arange(L) < ends)[..., None, None]
    leads = [x.shape[:-2] for x in (key, value)]
    leads += [x.shape[:-2] for x in (decay, read, erase) if x is not None]
    leads += [] if beta is None else [beta.shape[:-3]]
    if state is not None:
        leads.append(state.shape[1 if borders is not None else 0 : -2])
    lead = np.broadcast_shapes(*leads)
    nothing = np.zeros((*lead, d, value.shape[-1]))
    starts = [0, L] if borders is None else [int(border) for border in borders]
    out_lead = np.broadcast_shapes(query.shape[:-2], lead)
    rows, last, size = [np.zeros((*out_lead, 0, value.shape[-1]))], [], 0.0
    states: list[Array] = []
    for n, (a, b) in enumerate(pairwise(starts)):
        S = nothing + (0 if state is None else state if borders is None else state[n])
        for t in range(a, b):
            before, gone = S, 0.0
            if read is not None and erase is not None:
                gone = (read[..., t, :, None] * S).sum(-2, keepdims=True) * erase[..., t, :, None]
            if decay is not None:
                S = S * np.exp(decay[..., t if decay.shape[-2] > 1 else 0, :])[..., None]
            k, v = key[..., t, :, None], value[..., t, None, :]
            if "delta" in update_rule:
                v = v - (k * S).sum(-2, keepdims=True)
            if beta is not None:
                v = v * beta[..., t if beta.shape[-3] > 1 else 0, :, :]
            here = counts[..., t, :, :]
            S = np.where(here, S + k * v - gone, before)
            out = scale * (query[..., t, :, None] * S).sum(-2, keepdims=True)
            rows.append(out + np.zeros((*out_lead, 1, 1)))
            written = np.where(here, k * v, 0)
            size = max(size, *(float(abs(x).max(initial=0)) for x in (S, out, written)))
            if interval is not None and (t + 1) % interval == 0:
                states.append(S)
        last.append(S)
    whole = last[0] if borders is None else np.stack(last)
    return Run(np.concatenate(rows, axis=-2), whole, states, size)
