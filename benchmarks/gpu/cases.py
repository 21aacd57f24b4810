"""What is checked: operations, maps, dtypes, sizes, masks, states, graphs and hard inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

__all__ = ["BOUNDS", "DTYPES", "MAPS", "Case", "cases", "drawn", "small", "telling_first"]

BOUNDS = {"float32": 1e-5, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Largest relative error, as the norm of the difference over the norm of what is wanted."""

DTYPES = tuple(BOUNDS)
MAPS = ("favor", "hyperbolic", "elu", "relu")
STEPS = ("decode_step", "decoder", "decoder_graph")


@dataclass(frozen=True)
class Case:
    """One check: an operation, sizes, options; float32 arrays are multiplied in TF32 as "tf32"."""

    name: str
    feature_map: str
    dtype: str
    operation: str = "attention"
    """Or "softmax", "gradient", "decode_step", "decoder"; "graph" and "decoder_graph" replay."""
    is_causal: bool = False
    lead: tuple[int, ...] = (2, 3)
    """Leading axes of queries."""
    one_key_head: bool = False
    """The last of them is shared by all queries."""
    distinct: int = 0
    """So many heads of the first axis have numbers of their own, and are compared; 0 for all."""
    queries: int = 700
    keys: int = 700
    """Another length in full attention only."""
    dim: int = 64
    features: int = 256
    value_dim: int = 64
    moved_axes: bool = False
    """Arrays are views of (..., N, heads, d)."""
    per_head: bool = False
    """Each head has a projection."""
    masked: bool = False
    """Keys are masked, with NaN where they are."""
    continued: bool = False
    """A second call continues from the state of the first half of the keys."""
    all_outputs: bool = False
    """The state and the log normalizer are asked for."""
    window: int = 0
    """Tokens of a window of keys that are weighed exactly; 0 for none."""
    decay: float = 0.0
    """Weights decay by exp of at most minus this from token to token; 0 for none."""
    hard: str = ""
    """Inputs: "jump", keys of vanishing weight before usual ones, so that rows are computed again;
    "nan" in one key, which no earlier row may see; "blind", the first keys masked."""

    @property
    def bound(self) -> float:
        """Largest error that passes; gradients and strong decays round twice."""
        return (2 if self.operation == "gradient" or self.decay > 1 else 1) * BOUNDS[self.dtype]

    @property
    def row_bound(self) -> float:
        """Largest error of a row that passes: a wrong row of many hardly moves the norm of all."""
        return 10 * self.bound

    @property
    def kernel(self) -> str | None:
        """A kernel that must have run, so that no generic code takes its place unnoticed."""
        if self.operation in STEPS:
            return "decode"
        if self.operation == "softmax" or self.window:
            return "softmax_rows"
        if self.dtype in ("float16", "bfloat16"):
            return "causal_rows" if self.is_causal else "read_states"
        if self.operation == "gradient":
            return "pull_weights"
        if self.is_causal and self.one_key_head:
            return None  # left to generic code: queries that share a state
        return "finish_rows" if self.is_causal else "query_weights"


def cases() -> Iterator[Case]:
    """Yield every case, the basic ones of all dtypes first."""
    for dtype in DTYPES:
        for feature_map in MAPS:
            for is_causal in (False, True):
                yield _case(feature_map, dtype, "basic", is_causal=is_causal)
    for dtype in DTYPES:
        for feature_map in ("favor", "elu"):
            yield from _variations(feature_map, dtype)
            yield from _large(feature_map, dtype)


def _variations(feature_map: str, dtype: str) -> Iterator[Case]:
    yield _case(feature_map, dtype, "cross", queries=300)
    for is_causal in (False, True):
        for what in (
            {"masked": True},
            {"continued": True},
            {"one_key_head": True},
            {"all_outputs": True},
            {"moved_axes": True},
        ):
            yield _case(feature_map, dtype, *what, is_causal=is_causal, **what)
        # Lengths below and beside those of tiles, dims that fill none, three leading axes.
        yield _case(feature_map, dtype, "one", is_causal=is_causal, queries=1, keys=1)
        yield replace(
            _case(feature_map, dtype, "odd", is_causal=is_causal, queries=131, keys=131),
            lead=(2, 1, 3),
            dim=40,
            features=72,
            value_dim=24,
        )
        gradient = {"operation": "gradient", "queries": 300, "keys": 300, "is_causal": is_causal}
        yield _case(feature_map, dtype, "gradient", **gradient)
        yield _case(feature_map, dtype, "one_key_head gradient", one_key_head=True, **gradient)
        hidden = {"hard": "blind", "masked": True, "all_outputs": True}
        yield _case(feature_map, dtype, "blind", is_causal=is_causal, **hidden)
    yield _case(feature_map, dtype, "decode_step", operation="decode_step")
    yield _case(feature_map, dtype, "decoder", operation="decoder")
    yield _case(feature_map, dtype, "decoder_graph", operation="decoder_graph")
    if dtype in ("float16", "bfloat16"):  # cuBLAS is not captured
        for is_causal in (False, True):
            yield _case(feature_map, dtype, "graph", operation="graph", is_causal=is_causal)
    else:
        yield _case(feature_map, dtype, "decayed", is_causal=True, decay=0.1)
    if dtype in ("float32", "tf32") and feature_map == "favor":
        yield _case(feature_map, dtype, "window", is_causal=True, window=64, masked=True)
        for is_causal in (False, True):
            softmax = {"operation": "softmax", "masked": True}
            yield _case(feature_map, dtype, "softmax", is_causal=is_causal, **softmax)
    yield _case(feature_map, dtype, "nan", is_causal=True, hard="nan")
    if feature_map == "favor":
        yield _case(feature_map, dtype, "jump", is_causal=True, hard="jump")
        yield _case(feature_map, dtype, "per_head", is_causal=True, per_head=True, features=48)


def _large(feature_map: str, dtype: str) -> Iterator[Case]:
    """Dims of 128, values wider than 64, and so many long heads that blocks walk several tiles."""
    for is_causal in (False, True):
        options: dict[str, object] = {"is_causal": is_causal}
        dims = {"dim": 128, "value_dim": 128}
        yield _case(feature_map, dtype, "d128", **options, **dims)
        yield _case(feature_map, dtype, "wide", **options, value_dim=136)
        long = {"lead": (64,), "distinct": 3, **options}
        yield _case(feature_map, dtype, "long", **long, queries=4000, keys=4000)
        options["operation"] = "gradient"
        lengths = {"queries": 300, "keys": 300}
        yield _case(feature_map, dtype, "d128 gradient", **options, **lengths, **dims, features=128)
        yield _case(feature_map, dtype, "wide gradient", **options, **lengths, value_dim=72)
        long["operation"] = "gradient"
        yield _case(feature_map, dtype, "long gradient", **long, queries=2000, keys=2000)


def _case(feature_map: str, dtype: str, *what: str, **options: object) -> Case:
    kind = "causal" if options.get("is_causal") else "full"
    words = what if options.get("operation") in STEPS else (*what, kind)
    name = " ".join([dtype, feature_map, *(word.replace("_", " ") for word in words)])
    return Case(name, feature_map, dtype, **options)  # type: ignore[arg-type]


TELLING = ("bfloat16 favor", "float32 favor", "float16 elu", "bfloat16 relu")
"""What is run first; the rest follows."""


def telling_first() -> list[Case]:
    """Return every case, the most telling ones first."""
    places = {words: i for i, words in enumerate(TELLING)}
    return sorted(cases(), key=lambda x: places.get(f"{x.dtype} {x.feature_map}", len(places)))


def drawn(seed: int) -> Case:
    """Return a case of any shape and with any options that kernels take together."""
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    is_causal, length = pick(False, True), int(rng.integers(1, 200))
    case = Case(
        name=f"seed {seed}",
        feature_map=pick(*MAPS),
        dtype=pick("float16", "bfloat16", "float32"),
        operation=pick("attention", "attention", "attention", "gradient", "decode_step", "decoder"),
        is_causal=is_causal,
        lead=pick((1,), (2,), (2, 1, 2)),
        queries=length if is_causal else int(rng.integers(1, 200)),
        keys=length,
        dim=pick(8, 16, 24, 40, 48, 64, 96, 128),
        features=pick(2, 6, 16, 40, 64, 100, 130, 200, 256),
        value_dim=pick(8, 16, 40, 64, 72, 128, 200),
        moved_axes=pick(False, False, True),
        one_key_head=pick(False, False, True),
    )
    if case.operation in STEPS:
        return replace(case, queries=150, keys=150, is_causal=False, one_key_head=False)
    per_head = case.feature_map == "favor" and not case.one_key_head and pick(False, True)
    masked = pick(False, True)
    case = replace(case, per_head=per_head, masked=masked, hard=pick("", "blind") if masked else "")
    if case.operation == "gradient":
        # Tokens of few dims often share no feature of ReLU, which generic code pulls back.
        # Gradients by few keys are sums that cancel, by one key nothing but rounding.
        return _longer(replace(case, dim=max(48, case.dim), hard=""), 40)
    case = _longer(replace(case, all_outputs=pick(False, True), continued=pick(False, True)), 2)
    kind = pick("", "decay", "window", "softmax")
    if not kind or case.dtype != "float32" or case.one_key_head:
        return case
    if kind == "softmax":
        return replace(case, operation="softmax", continued=False, per_head=False)
    if kind == "decay":
        return replace(case, is_causal=True, queries=case.keys, decay=pick(0.1, 2.0, 20.0))
    known = case.feature_map if case.feature_map in ("favor", "hyperbolic") else "favor"
    case = replace(case, is_causal=True, queries=case.keys, continued=False, feature_map=known)
    case = replace(case, window=pick(32, 64))
    return _longer(case, case.window)


def _longer(case: Case, by: int) -> Case:
    return replace(case, queries=case.queries + by, keys=case.keys + by)


def small(case: Case) -> Case:
    """Return a case of few heads and tokens; those of many heads walk several tiles."""
    if case.distinct:
        return replace(case, lead=(2,), distinct=0, queries=300, keys=300, dim=32, features=128)
    lead = (1, 2) if case.lead == (2, 3) else case.lead
    lengths = {700: 150, 300: 90, 131: 77}
    queries, keys = (lengths.get(n, n) for n in (case.queries, case.keys))
    return replace(case, lead=lead, queries=queries, keys=keys)
