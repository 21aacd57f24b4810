"""Draw attention with two to five options at a time, from one integer; say what may be refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linattn import State, feature_maps
from tests import dense_oracle

__all__ = [
    "Case",
    "draw_gradient",
    "draw_linear",
    "draw_long",
    "draw_long_gradient",
    "draw_recurrence",
    "draw_softmax",
    "refusals",
]

RULES = ("is_causal", "key_stop", "prefix_length", "causal_block")
RETURNS = ("return_state", "return_log_normalizer", "return_states_every")
NARROW = ("float16", "bfloat16")
SOFTMAX_KERNELS = (
    "PositiveFeatures",
    "HyperbolicFeatures",
    "GeneralizedExponentialFeatures",
    "DenseExponentialFeatures",
    "CalibratedFeatures",
    "TrigonometricFeatures",
    "LandmarkFeatures",
    "Reparametrized",
)
SHORT, LONG = 24, 260
"""Lengths of most cases, and of those that several blocks and groups of blocks need."""

LARGEST_SIZE = 30
"""log10 of the largest values and cotangents, and of the smallest."""

Rng = np.random.Generator


@dataclass
class Case:
    """A call: arrays in float64 that its dtype holds exactly, the map and the options."""

    seed: int
    kind: str
    query: Any
    key: Any
    value: Any
    feature_map: Any
    options: dict[str, Any]
    dtype: str = "float64"
    library: str = "numpy"
    returns: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None
    size_of_grad: float = 1.0
    size_of_value: float = 1.0
    """Of a recurrence, in which outputs and states have it too."""

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens" in self.options

    @property
    def wide(self) -> str:
        """The dtype of sums and states."""
        return "float64" if "float64" in (self.dtype, self.precision) else "float32"

    @property
    def option(self) -> str:
        """The rule by which queries do not see all keys, "" for none."""
        return next((name for name in RULES if name in self.options), "")

    def __repr__(self) -> str:
        shown = {name: brief(value) for name, value in self.options.items()}
        shapes = [x.shape for x in (self.query, self.key, self.value)]
        return (
            f"{self.kind}, {self.dtype} in {self.library}, {self.feature_map!r}, {shapes}, "
            f"{shown | self.returns}"
        )


def brief(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size < 4 else f"{value.dtype}{value.shape}"
    if isinstance(value, tuple) and not isinstance(value, State):
        return tuple(brief(part) for part in value)
    return value


def rounded(x: Any, dtype: str) -> Any:
    """Return float64 numbers that a narrower dtype holds."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32)
        return np.asarray((bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64))
    return np.asarray(np.asarray(x).astype(dtype).astype(np.float64))


# ---------------------------------------------------------------- pieces


def axes(rng: Rng, lead: tuple[int, ...], keep: float = 0.6) -> tuple[int, ...]:
    """Draw leading axes that broadcast to these: all, fewer, some of length 1."""
    if rng.random() < keep:
        return lead
    first = int(rng.integers(0, len(lead) + 1))
    return tuple(1 if rng.random() < 0.3 else n for n in lead[first:])


def ones(rng: Rng, shape: tuple[int, ...], chance: float = 0.3) -> tuple[int, ...]:
    """Draw axes of 1 among these."""
    return tuple(1 if rng.random() < chance else n for n in shape)


def lengths(rng: Rng, most: int = SHORT) -> int:
    kind = rng.random()
    if kind < 0.08:
        return int(rng.integers(0, 3))
    return int(rng.integers(most // 8, most)) if kind < 0.96 else int(rng.integers(60, 200))


def draw_map(rng: Rng, d: int, lead: tuple[int, ...], wanted: set[str]) -> Any:
    """Draw a map, with heads of its own where it has some."""
    softmax = ["positive", "hyperbolic", "trigonometric", "tilted", "calibrated", "landmarks"]
    others = [
        "elu",
        "relu",
        "activation",
        "cosformer",
        "rotated",
        "softmax",
        "hedgehog",
        "fourier",
        "own",
    ]
    if "exact_clusters" in wanted and rng.random() < 0.95:
        softmax = ["landmarks"]
    elif wanted & set(RULES):
        softmax = softmax[:-1]
    known = softmax if wanted & {"exact_window", "exact_clusters"} else softmax + others
    if "signs" in wanted:
        known = [name for name in known if name not in ("trigonometric", "fourier", "own")]
    name = str(rng.choice(known if rng.random() < 0.97 else softmax + others))
    seed, m = int(rng.integers(2**31)), 2 * int(rng.integers(1, 5))
    scale = float(rng.choice([0.5, 1.0]))
    heads = axes(rng, lead, 0.3)
    by_name = {
        "positive": lambda: positive(d, m, scale, seed, heads),
        "hyperbolic": lambda: feature_maps.HyperbolicFeatures(d, m, scale=scale, rng=seed),
        "trigonometric": lambda: feature_maps.TrigonometricFeatures(d, 32, scale=0.3, rng=seed),
        "fourier": lambda: feature_maps.RandomFourierFeatures(d, 16, bandwidth=2.0, rng=seed),
        "tilted": lambda: tilted(d, m, scale, seed),
        "calibrated": lambda: calibrated(rng, d, m, scale, heads),
        "activation": lambda: feature_maps.ActivationFeatures(
            d, m, activation=str(rng.choice(["relu", "squared_relu"])), scale=scale, rng=seed
        ),
        "elu": lambda: feature_maps.EluFeatures(scale=scale),
        "relu": lambda: feature_maps.ReluFeatures(scale=scale),
        "softmax": lambda: feature_maps.SoftmaxFeatures(scale=scale),
        "cosformer": lambda: feature_maps.CosformerFeatures(d, max_length=512, scale=scale),
        "rotated": lambda: feature_maps.RotatedFeatures(
            feature_maps.PositiveFeatures(d, m, scale=scale, rng=seed)
            if rng.random() < 0.5 or d % 2
            else feature_maps.EluFeatures(d)
        ),
        "hedgehog": lambda: feature_maps.HedgehogFeatures(
            0.5 * rng.standard_normal((*heads, 3, d)),
            key_weights=0.5 * rng.standard_normal((*heads, 3, d)),
        ),
        "landmarks": lambda: feature_maps.LandmarkFeatures(
            rng.standard_normal((*heads, m, d)),
            rng.standard_normal((*heads, 5, d)),
            rng.standard_normal((*heads, 5)),
            np.eye(d) + 0.1,
            scale=scale,
        ),
        "own": lambda: dense_oracle.OwnFeatures(d, m, rng),
    }
    return by_name[name]()


def positive(d: int, m: int, scale: float, seed: int, heads: tuple[int, ...]) -> Any:
    """Draw FAVOR+, one in four with an own set of rows and change of coordinates for each head."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.75:
        return feature_maps.PositiveFeatures(d, m, scale=scale, rng=seed)
    rows, (shift, other) = rng.standard_normal((*heads, m, d)), rng.standard_normal((2, *heads, d))
    phi = feature_maps.PositiveFeatures.from_projection(rows, scale=scale)
    transform = np.eye(d) + 0.1 * rng.standard_normal((*heads, d, d))
    return feature_maps.Reparametrized(phi, 0.3 * shift, 0.3 * other, transform)


def tilted(d: int, m: int, scale: float, seed: int) -> Any:
    """Draw exponential features of one tilt, or of one for each axis of a basis."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"scale": scale, "rng": seed}
    A = -0.3 * rng.random(d)
    if rng.random() < 0.5:
        return feature_maps.GeneralizedExponentialFeatures(d, m, A=float(A[0]), **options)
    T = np.eye(d) + 0.2 * rng.standard_normal((d, d))
    return feature_maps.DenseExponentialFeatures(d, m, A=A, transform=T, **options)


def calibrated(rng: Rng, d: int, m: int, scale: float, heads: tuple[int, ...]) -> Any:
    """Draw features around centroids."""
    return feature_maps.CalibratedFeatures(
        rng.standard_normal((*heads, m, d)),
        *(0.5 * rng.standard_normal((*heads, *shape)) for shape in ((m,), (m, d), (m,))),
        tilt=0.5 * rng.standard_normal((*heads, d)),
        power=float(rng.choice([0.5, 1])),
        scale=scale,
    )


def map_lead(phi: Any) -> tuple[int, ...]:
    name = type(phi).__name__
    if name == "HedgehogFeatures":
        return tuple(phi.weights.shape[:-2])
    if name == "Reparametrized":
        return tuple(phi.transform.shape[:-2])
    if name == "CalibratedFeatures":
        return tuple(phi.centroids.shape[:-2])
    return tuple(phi.landmarks.shape[:-2]) if name == "LandmarkFeatures" else ()


def stretch(rng: Rng, case: Case) -> None:
    """Add a number to all logits or log weights; draw the sizes of values and cotangents."""
    d, phi = case.query.shape[-1], case.feature_map
    offset, where = float(rng.uniform(-300, 300)), rng.random()
    # Gradients by a state are on its scale, which float16 may not hold.
    offset = offset / 60 if case.dtype == "float16" else offset
    state = case.options.get("initial_state")
    scale = float(case.options.get("scale") or (getattr(phi, "scale", None) or d**-0.5))
    if where < 0.2 and (phi is None or type(phi).__name__ in SOFTMAX_KERNELS):
        size = abs(offset / scale) ** 0.5
        case.query[..., 0], case.key[..., 0] = (
            rounded(x, case.dtype) for x in (size, np.sign(offset * scale) * size)
        )
    elif where < 0.4 and "key_bias" in case.options and case.options.get("normalize", True):
        case.options["key_bias"] = rounded(case.options["key_bias"] + offset, case.dtype)
        if state is not None:
            log_scale = rounded(state.log_scale + offset, case.wide)
            case.options["initial_state"] = state = state._replace(log_scale=log_scale)
    if case.dtype in NARROW or rng.random() < 0.8:
        return
    log_size, log_grad = rng.uniform(-LARGEST_SIZE, LARGEST_SIZE, 2)
    # Gradients have the size of the product.
    log_grad = np.clip(log_size + log_grad, -LARGEST_SIZE, LARGEST_SIZE) - log_size
    size, case.size_of_grad = 10**log_size, 10**log_grad
    case.value = rounded(size * case.value, case.dtype)
    if state is not None:
        kvz = np.concatenate([size * state.kvz[..., :-1], state.kvz[..., -1:]], axis=-1)
        case.options["initial_state"] = state._replace(kvz=rounded(kvz, case.wide))


def draw_memory(rng: Rng, case: Case, lead: tuple[int, ...], dim: int) -> State:
    """Draw a state: that of some keys, in a gauge of its own, or of none."""
    phi, e = case.feature_map, case.value.shape[-1]
    count = int(rng.integers(0, 5))
    lead, memories = axes(rng, lead, 0.5), []
    for _ in range(len(case.options["cu_seqlens"]) - 1 if case.is_packed else 1):
        key, value = (rng.standard_normal((*lead, count, n)) for n in (dim, e))
        memories.append(dense_oracle.evaluate(key[..., :0, :], key, value, phi).memory)
    kvz, log_scale = (np.stack([memory[i] for memory in memories]) for i in range(2))
    if not case.is_packed:
        kvz, log_scale = kvz[0], log_scale[0]
    shift = np.where(np.isfinite(log_scale), rng.uniform(-3, 3, log_scale.shape), 0)
    dtype = case.wide
    log_scale = rounded(log_scale + shift, dtype)
    kvz = rounded(kvz * np.exp(-shift)[..., None], dtype)
    decay = None
    if "log_decay" in case.options and rng.random() < 0.5:
        decay = rounded(-rng.random(kvz.shape[:-2]), dtype)
    return State(kvz, log_scale, count + int(rng.integers(0, 3)), None, decay)


def draw_stops(rng: Rng, L: int, S: int, lead: tuple[int, ...]) -> Any:
    shape = axes(rng, lead, 0.3) if rng.random() < 0.4 else ()
    return np.sort(rng.integers(0, S + 1, (*shape, L)), axis=-1)


def borders(rng: Rng, length: int) -> Any:
    """Draw one to four sequences, some of them empty."""
    inside = rng.integers(0, length + 1, int(rng.integers(0, 4)))
    return np.sort(np.concatenate([[0, length], inside]))


def draw_weights(rng: Rng, names: set[str], case: Case, lead: tuple[int, ...]) -> None:
    """Options with numbers for keys: masks, lengths, biases, decays; NaN where a mask hides it."""
    shape, S = case.key.shape[:-1], case.key.shape[-2]
    options = case.options
    if "key_mask" in names:
        like = (S,) if rng.random() < 0.3 else ones(rng, shape)
        options["key_mask"] = rng.random(like) < rng.choice([0.7, 0.9, 0.2])
    if "key_lengths" in names:
        like = () if rng.random() < 0.3 else ones(rng, shape[:-1])
        drawn = rng.integers(0, S + 1, like)
        options["key_lengths"] = drawn if like else int(drawn)
    if "key_bias" in names:
        like = (S,) if rng.random() < 0.3 else ones(rng, shape)
        bias = rng.standard_normal(like)
        if rng.random() < 0.4:
            bias = np.where(rng.random(like) < 0.2, -np.inf, bias)
        options["key_bias"] = rounded(bias, case.dtype)
    if "log_decay" in names:
        kind, size = rng.random(), float(rng.choice([0.1, 1.0, 5.0]))
        if kind < 0.3:
            options["log_decay"] = -size * float(rng.random())
        else:
            full = shape if kind < 0.7 and case.option == "is_causal" else shape[:-1]
            options["log_decay"] = rounded(-size * rng.random(ones(rng, full)), case.dtype)


def hide(rng: Rng, case: Case) -> None:
    """Put NaN or inf where masked keys and their values are."""
    mask = dense_oracle.scenes(case.query, case.key, case.value, None, **case.options)
    hidden = np.concatenate(
        [~scene.mask + np.zeros(scene.key.shape[-2], bool) for scene in mask], -1
    )
    for name in ("key", "value"):
        array = getattr(case, name)
        rows: Any = np.broadcast_to(hidden, np.broadcast_shapes(hidden.shape, array.shape[:-1]))
        extra = rows.ndim - (array.ndim - 1)
        rows = rows.all(axis=tuple(range(extra)))
        for axis, n in enumerate(array.shape[:-1]):
            if n == 1 != rows.shape[axis]:
                rows = rows.all(axis=axis, keepdims=True)
        setattr(case, name, np.where(rows[..., None], rng.choice([np.nan, np.inf]), array))


# ---------------------------------------------------------------- cases


def draw_tokens(
    rng: Rng, seed: int, kind: str, names: set[str], most: int = SHORT
) -> tuple[Case, tuple[int, ...]]:
    axis = int(rng.choice([0, 1, 1, 2, 2]))
    lead = tuple(int(n) for n in rng.choice([1, 2, 3], axis))
    lead = lead if most == SHORT else lead[:1]
    L, d, e = lengths(rng, most), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    other = rng.random() < (0.6 if names & {"key_stop", "lower_right"} else 0.08)
    S = lengths(rng, most) if other or not names - {"key_mask", "key_bias", "key_lengths"} else L
    if names & {"key_stop", "lower_right"} and rng.random() < 0.15:
        far = L + int(rng.integers(0, 501))
        L, S = (L, far) if rng.random() < 0.7 else (far, L)
    dtype = str(rng.choice(["float64"] * 6 + ["float32"] * 3 + [*NARROW]))
    sizes = (
        [1, 0.3, 3, 20] if names & {"exact_window", "local_window_size"} else [1, 1, 1, 0.1, 3, 20]
    )
    size = 1.0 if "normalize" in names else float(rng.choice(sizes))
    if dtype in NARROW:
        size = min(size, 3.0)
    if "signs" in names or dtype == "float16":
        size = min(size, 1.0)
    keep = float(rng.choice([1.0, 0.3]))
    shapes = [(*axes(rng, lead, keep), n, last) for n, last in ((L, d), (S, d), (S, e))]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    q, k, v = (rounded(x, dtype) for x in (size * q, size * k, v))
    known = ["numpy"] * 10 + ["without backends"] * 6 + ["array-api-strict", "torch"] * 2 + ["dask"]
    library = str(rng.choice(known))
    if library == "dask" and (dtype == "float16" or max(L, S) > 64):
        library = "numpy"
    if dtype == "bfloat16":
        library = "torch"
    case = Case(seed, kind, q, k, v, None, {}, dtype, library)
    if np.random.default_rng([seed, 10]).random() < 0.2:
        case.precision = "float64"
    return case, lead


def share(case: Case) -> None:
    """Let heads whose stops may differ share queries or values, where keys have all axes."""
    rng = np.random.default_rng([case.seed, 8])
    for name in ("query", "value"):
        array = getattr(case, name)
        lead = case.key.shape[:-2]
        fits = np.broadcast_shapes(lead, array.shape[:-2]) == lead and rng.random() < 0.5
        ones: Any = (slice(0, 1),) * (array.ndim - 2) if fits else ...
        setattr(case, name, array[ones])


def put_rule(rng: Rng, names: set[str], case: Case, lead: tuple[int, ...]) -> None:
    options, L, S = case.options, case.query.shape[-2], case.key.shape[-2]
    if "is_causal" in names:
        options["is_causal"] = True
    if "lower_right" in names:
        options["is_causal"] = "lower_right"
    if "key_stop" in names:
        options["key_stop"] = draw_stops(rng, L, S, lead)
        share(case)
    if "prefix_length" in names:
        shape = axes(rng, lead, 0.3) if rng.random() < 0.4 else ()
        drawn = rng.integers(0, S + 1, shape)
        options["prefix_length"] = drawn if shape else int(drawn)
    if "causal_block" in names:
        options["causal_block"] = int(rng.integers(1, 7))
    if "cu_seqlens" in names:
        options["cu_seqlens"] = borders(rng, S)


def put_offsets(rng: Rng, names: set[str], case: Case, lead: tuple[int, ...], most: int) -> None:
    if "window_bias" not in names:
        if "far_bias" in names:
            case.options["far_bias"] = (0.5, -0.5)
        return
    reach = int(rng.integers(0, most + 1))
    bias = rng.standard_normal((*axes(rng, lead, 0.4), 2 * reach + 1))
    if rng.random() < 0.2:
        bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
    case.options["window_bias"] = rounded(bias, case.dtype)
    if "far_bias" in names:
        ends = [rounded(rng.standard_normal(axes(rng, lead, 0.3)), case.dtype) for _ in range(2)]
        numbers = rng.random(2) < 0.5
        ends = [float(end.flat[0]) if n else end for n, end in zip(numbers, ends, strict=True)]
        case.options["far_bias"] = tuple(ends)


LINEAR = {
    "is_causal": 5,
    "lower_right": 1,
    "key_stop": 2,
    "prefix_length": 1,
    "causal_block": 1,
    "cu_seqlens": 3,
    "key_mask": 2,
    "key_lengths": 1,
    "key_bias": 2,
    "log_decay": 4,
    "normalize": 1,
    "exact_window": 3,
    "window_bias": 1,
    "far_bias": 0.5,
    "exact_clusters": 1.5,
    "sinks": 1.5,
    "initial_state": 3,
}
SOFTMAX = {
    "is_causal": 4,
    "lower_right": 1,
    "key_stop": 2,
    "prefix_length": 1,
    "causal_block": 1,
    "cu_seqlens": 2,
    "key_mask": 2,
    "key_lengths": 1,
    "key_bias": 2,
    "local_window_size": 3,
    "sinks": 1.5,
    "window_bias": 2,
    "far_bias": 1,
    "scale": 1,
}


def pick(rng: Rng, table: Mapping[str, float]) -> set[str]:
    """Draw two to five options."""
    chances = np.array(list(table.values())) / sum(table.values())
    count = int(rng.integers(2, 6))
    return {str(name) for name in rng.choice(list(table), count, replace=False, p=chances)}


def _linear(rng: Rng, seed: int, names: set[str], most: int = SHORT) -> Case:
    if names & {"window_bias", "sinks"}:
        names |= {"exact_window"}
    case, lead = draw_tokens(rng, seed, "linear", names, most)
    d, options = case.query.shape[-1], case.options
    case.feature_map = draw_map(rng, d, lead, names)
    keys = (case.key.shape[:-2], case.value.shape[:-2], map_lead(case.feature_map))
    put_rule(rng, names, case, np.broadcast_shapes(*keys))
    if "exact_window" in names:
        options["exact_window"] = int(rng.choice([1, 1, *range(1, 10)])) * (most // SHORT)
    if "sinks" in names:
        options["sinks"] = int(rng.integers(0, 7))
    if "exact_clusters" in names:
        options["exact_clusters"] = int(rng.integers(1, 5))
    put_offsets(rng, names, case, out_lead(case, of_map=False), options.get("exact_window", 2))
    draw_weights(rng, names, case, lead)
    if "normalize" in names:
        options["normalize"] = False
    if "initial_state" in names:
        options["initial_state"] = draw_memory(rng, case, lead, d)
    if rng.random() < 0.5:
        options["chunk_size"] = int(rng.choice([1, 2, 3, 5, 8, 16, 64]))
    stretch(rng, case)
    hide(rng, case)
    return case


def out_lead(case: Case, *, of_map: bool = True, of_query: bool = True) -> tuple[int, ...]:
    """Leading axes of the output, or of the state."""
    shapes = [case.key.shape[:-2], case.value.shape[:-2]]
    if of_query:
        shapes.append(case.query.shape[:-2])
    if of_map:
        shapes.append(map_lead(case.feature_map))
        state = case.options.get("initial_state")
        if state is not None:
            shapes.append(state.kvz.shape[1 if case.is_packed else 0 : -2])
    return tuple(np.broadcast_shapes(*shapes))


def draw_linear(seed: int, most: int = SHORT) -> Case:
    """Draw linear attention; one in sixteen of what is refused is kept."""
    rng = np.random.default_rng(seed)
    while True:
        case = _linear(rng, seed, pick(rng, LINEAR), most)
        returns = rng.random(3) < (0.6, 0.4, 0.2)
        case.returns = {
            name: True for name, wanted in zip(RETURNS[:2], returns[:2], strict=True) if wanted
        }
        if returns[2] and case.option == "is_causal":
            case.returns["return_states_every"] = int(rng.integers(1, 9))
        if not refusals(case) or rng.random() < 1 / 16:
            return case


def draw_softmax(seed: int, most: int = SHORT) -> Case:
    """Draw exact attention."""
    rng = np.random.default_rng(seed)
    while True:
        names = pick(rng, SOFTMAX)
        names |= {"local_window_size"} if "sinks" in names else set()
        case, lead = draw_tokens(rng, seed, "softmax", names, most)
        keys = (case.key.shape[:-2], case.value.shape[:-2])
        put_rule(rng, names, case, np.broadcast_shapes(*keys))
        put_offsets(rng, names, case, out_lead(case, of_map=False), 6)
        draw_weights(rng, names - {"log_decay"}, case, lead)
        if "scale" in names:
            case.options["scale"] = float(rng.uniform(-1, 2))
        if "local_window_size" in names:
            left, right = (int(n) * (most // SHORT) for n in rng.integers(0, 9, 2))
            sizes: list[Any] = [left, (left, right), (left, None), (None, right)]
            case.options["local_window_size"] = sizes[int(rng.integers(4))]
        if "sinks" in names:
            case.options["sinks"] = int(rng.integers(0, 7))
        if rng.random() < 0.4:
            case.returns = {"return_log_normalizer": True}
        stretch(rng, case)
        hide(rng, case)
        if not refusals(case) or rng.random() < 1 / 16:
            return case


GRADIENT = {name: weight for name, weight in LINEAR.items() if name != "exact_clusters"}


def draw_gradient(seed: int, most: int = SHORT) -> Case:
    """Draw what gradients are known of, in float64 or float32."""
    rng = np.random.default_rng(seed)
    while True:
        if rng.random() < 0.25:
            case = draw_softmax(int(rng.integers(2**62)), most)
            case.returns = {}
        else:
            case = _linear(rng, seed, pick(rng, GRADIENT), most)
            if no_gradient(case) or (refusals(case) and rng.random() > 1 / 16):
                continue
            if rng.random() < 0.5:
                case.returns = {"return_state": True}
        case.seed = seed
        return case


def draw_long(seed: int) -> Case:
    """Draw either kind of attention of hundreds of tokens."""
    return draw_softmax(seed, LONG) if seed % 4 == 0 else draw_linear(seed, LONG)


def draw_long_gradient(seed: int) -> Case:
    """Draw what gradients are known of, of hundreds of tokens."""
    return draw_gradient(seed, LONG)


def draw_recurrence(seed: int) -> Case:
    """Draw a gated or delta recurrence with whatever it may have."""
    rng = np.random.default_rng(seed)
    case, lead = draw_tokens(rng, seed, "recurrence", {"signs"})
    length = case.query.shape[-2]
    case.key, case.value = (
        rng.standard_normal((*x.shape[:-2], length, x.shape[-1])) for x in (case.key, case.value)
    )
    norms = np.linalg.norm(case.key, axis=-1, keepdims=True)
    case.key, case.value = (rounded(x, case.dtype) for x in (case.key / norms, case.value))
    rule = str(rng.choice(["linear", "gated", "delta", "gated_delta", "dplr"]))
    options: dict[str, Any] = {"update_rule": rule}
    shape, d = case.key.shape[:-1], case.key.shape[-1]

    def of_tokens(by_channel: bool) -> tuple[int, ...]:
        like = ones(rng, shape)
        return (*like, d) if by_channel and rng.random() < 0.5 else like

    if "gated" in rule or (rule == "dplr" and rng.random() < 0.7):
        decay = -2 * rng.random(of_tokens(True))
        if rng.random() < 0.3:
            decay = np.where(rng.random(decay.shape) < 0.1, rng.choice([-np.inf, -50]), decay)
        options["log_decay"] = rounded(decay, case.dtype)
    if "delta" in rule or (rule == "dplr" and rng.random() < 0.7):
        options["beta"] = rounded(rng.random(of_tokens(rule == "dplr")), case.dtype)
    if rule == "dplr":
        read = rng.standard_normal((*shape, d))
        read /= np.linalg.norm(read, axis=-1, keepdims=True)
        options["read_key"] = rounded(read, case.dtype)
        options["erase_key"] = rounded(read + 0.1 * rng.standard_normal(read.shape), case.dtype)
    if rng.random() < 0.3:
        options["cu_seqlens"] = borders(rng, length).tolist()
    if rng.random() < 0.4:
        first = (len(options["cu_seqlens"]) - 1,) if "cu_seqlens" in options else ()
        like = (*first, *axes(rng, lead, 0.5), d, case.value.shape[-1])
        options["initial_state"] = rounded(rng.standard_normal(like), case.wide)
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0.1, 1))
    if rng.random() < 0.5:
        options["chunk_size"] = int(rng.choice([1, 2, 4, 16]))
    case.options = options
    more = np.random.default_rng([seed, 8])
    if more.random() < 0.2:
        # Queries that share a state, along an axis before all others.
        case.query = rounded(more.standard_normal((3, *lead, length, d)), case.dtype)
    if case.dtype not in NARROW and more.random() < 0.3:
        case.size_of_value = 2.0 ** int(more.integers(-90, 91))
        case.value = case.value * case.size_of_value
        if "initial_state" in options:
            options["initial_state"] = options["initial_state"] * case.size_of_value
    hide_tokens(rng, case)
    if not case.is_packed and rng.random() < 0.3:
        case.returns["return_states_every"] = int(rng.integers(1, length + 3))
    return case


def hide_tokens(rng: Rng, case: Case) -> None:
    """Mask tokens of a recurrence, and put NaN where nothing may read."""
    options, shape = case.options, case.key.shape[:-1]
    kind = rng.random()
    counts = np.ones((), bool)
    if kind < 0.3:
        like = shape[-1:] if rng.random() < 0.3 else ones(rng, shape)
        counts = options["key_mask"] = rng.random(like) < rng.choice([0.5, 0.9])
    if 0.2 < kind < 0.5 and not case.is_packed:
        options["key_lengths"] = rng.integers(0, shape[-1] + 1, ones(rng, shape[:-1]))
        counts = counts & (np.arange(shape[-1]) < options["key_lengths"][..., None])
    if kind > 0.5:
        return
    counts = np.broadcast_to(counts, shape)
    case.key = np.where(counts[..., None], case.key, np.nan)
    for name in ("read_key", "erase_key"):
        if name in options:
            options[name] = np.where(counts[..., None], options[name], np.nan)
    nowhere: Any = ~counts.any(axis=tuple(range(counts.ndim - 1)))
    case.value[..., nowhere, :] = np.nan
    for name in {"log_decay", "beta"} & set(options):
        by_channel = options[name].ndim == case.key.ndim
        rows = np.moveaxis(options[name], -2 if by_channel else -1, 0)
        if len(rows) == len(nowhere):
            rows[nowhere] = 7.0 if name == "log_decay" else np.nan


# ---------------------------------------------------------------- what may be refused


def no_gradient(case: Case) -> bool:
    name = type(case.feature_map).__name__
    columns = name == "SoftmaxFeatures" and not case.options.get("normalize", True)
    return name in ("RotatedFeatures", "OwnFeatures") or columns


def refusals(case: Case) -> list[str]:
    """Say why a call must raise, by the rules of the docstrings; nothing where it may not."""
    return [*_refused_rules(case), *_refused_weights(case), *_refused_exact(case)]


def _refused_rules(case: Case) -> list[str]:
    given, why = [name for name in RULES if name in case.options], []
    L, S = case.query.shape[-2], case.key.shape[-2]
    if len(given) > 1:
        why.append("two rules")
    lower_right = case.options.get("is_causal") == "lower_right"
    equal = [name for name in given if name != "key_stop" and not lower_right]
    equal += [name for name in case.options if name == "cu_seqlens"]
    windows = ("exact_window", "local_window_size", "window_bias")
    equal += [] if given else [name for name in case.options if name in windows]
    if L != S and equal:
        why.append("lengths differ")
    if case.is_packed and (has_stops(case) or "key_lengths" in case.options):
        why.append("packed sequences with stops or lengths")
    if given and type(case.feature_map).__name__ == "LandmarkFeatures":
        why.append("a map that has seen the whole sequence")
    return why


def has_stops(case: Case) -> bool:
    """Whether a rule is one of stops; "lower_right" of equal lengths is causal."""
    lower_right = case.options.get("is_causal") == "lower_right"
    unequal = case.query.shape[-2] != case.key.shape[-2]
    return case.option not in ("", "is_causal") or (lower_right and unequal)


def is_causal(case: Case) -> bool:
    """Whether each query sees the keys up to its own, by whatever rule."""
    L, S = case.query.shape[-2], case.key.shape[-2]
    if not case.option or (has_stops(case) and (case.is_packed or L != S)):
        return False
    scene = dense_oracle.scenes(case.query, case.key, case.value, None, **case.options)[0]
    if not has_stops(case):
        return True
    # Stops at the last key are those of full attention first.
    return bool((scene.stops == np.arange(L) + 1).all() and not (scene.stops == S).all())


def _refused_weights(case: Case) -> list[str]:
    options, why = case.options, []
    L, S = case.query.shape[-2], case.key.shape[-2]
    decay, causal = options.get("log_decay"), is_causal(case)
    if decay is not None:
        if has_stops(case) or "window_bias" in options or (L != S and not causal):
            why.append("decay without time")
        by_token = getattr(decay, "ndim", 0) == case.key.ndim - 1 and decay.shape[-1] != 1
        if not causal and by_token:
            why.append("decay of tokens in full attention")
        if type(case.feature_map).__name__ in ("SoftmaxFeatures", "RotatedFeatures"):
            why.append("decay of a state that is divided")
        if "exact_clusters" in options and "exact_window" not in options:
            why.append("decay with clusters alone")
    if "return_states_every" in case.returns:
        others = ("exact_window", "exact_clusters", "cu_seqlens")
        if not causal or any(name in options for name in others):
            why.append("states on the way")
    return why


def _refused_exact(case: Case) -> list[str]:
    options, why = case.options, []
    name = type(case.feature_map).__name__
    exact = [name for name in ("exact_window", "exact_clusters") if name in options]
    if exact and name not in SOFTMAX_KERNELS:
        why.append("exact keys of another kernel")
    if "far_bias" in options and "window_bias" not in options:
        why.append("far_bias alone")
    if options.get("sinks") and "initial_state" in options:
        why.append("sinks of a stream that has gone on")
    if "exact_clusters" in options and has_stops(case):
        why.append("clusters with stops")
    alone = name != "LandmarkFeatures" or "initial_state" in options or case.is_packed
    if "exact_clusters" in options and (alone or case.library == "dask"):
        why.append("clusters without landmarks, with a state, packed or lazy")
    return why
