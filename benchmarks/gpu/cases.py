"""What parity is checked on: operations, maps, dtypes, masks, states and hard inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["BOUNDS", "DTYPES", "MAPS", "Case", "cases"]

BOUNDS = {"float32": 1e-5, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Largest relative error, as the norm of the difference over the norm of what is wanted."""

DTYPES = tuple(BOUNDS)
MAPS = ("favor", "hyperbolic", "elu", "relu")


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes
    ----------
    name : str
        Unique among cases.
    feature_map, dtype : str
        From ``MAPS`` and ``DTYPES``; tf32 are float32 arrays.
    operation : str
        "attention", "decode_step", "decoder" or "gradient".
    lead : tuple of int
        Leading axes of queries.
    one_key_head : bool
        Whether the last of them is shared by all queries.
    queries, keys : int
        Lengths, equal for all but full attention.
    masked : bool
        Whether keys are masked, with NaN where they are.
    continued : bool
        Whether a second call continues from the state of the first half of the keys.
    everything : bool
        Whether the state and the log normalizer are asked for.
    hard : str
        "jump": keys of vanishing weight, then usual ones, so that rows are computed again. "nan":
        NaN in one key, which no earlier row may see.
    """

    name: str
    feature_map: str
    dtype: str
    operation: str = "attention"
    is_causal: bool = False
    lead: tuple[int, ...] = (2, 3)
    one_key_head: bool = False
    queries: int = 700
    keys: int = 700
    dim: int = 64
    features: int = 256
    value_dim: int = 64
    masked: bool = False
    continued: bool = False
    all_outputs: bool = False
    hard: str = ""

    @property
    def bound(self) -> float:
        """Largest error that passes."""
        return BOUNDS[self.dtype]

    @property
    def kernel(self) -> str | None:
        """A kernel that must have run, so that no generic code takes its place unnoticed."""
        if self.operation in ("decode_step", "decoder"):
            return "decode"
        if self.dtype in ("float16", "bfloat16"):
            return "causal_rows" if self.is_causal else "read_states"
        if self.is_causal and self.one_key_head:
            return None  # left to generic code: queries that share a state
        return "finish_rows" if self.is_causal else "query_weights"


def cases(*, quick: bool = False) -> Iterator[Case]:
    """Yield every case, the basic ones of all dtypes first; quick: one dtype of each path."""
    dtypes = ("float32", "bfloat16") if quick else DTYPES
    for dtype in dtypes:
        for feature_map in MAPS:
            for is_causal in (False, True):
                yield _case(feature_map, dtype, "basic", is_causal=is_causal)
    for dtype in dtypes:
        for feature_map in ("favor", "elu"):
            yield from _variations(feature_map, dtype)


def _variations(feature_map: str, dtype: str) -> Iterator[Case]:
    yield _case(feature_map, dtype, "cross", queries=300)
    for is_causal in (False, True):
        for what in (
            {"masked": True},
            {"continued": True},
            {"one_key_head": True},
            {"all_outputs": True},
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
        gradient = {"operation": "gradient", "queries": 300, "keys": 300}
        yield _case(feature_map, dtype, "gradient", is_causal=is_causal, **gradient)
    yield _case(feature_map, dtype, "decode_step", operation="decode_step")
    yield _case(feature_map, dtype, "decoder", operation="decoder")
    yield _case(feature_map, dtype, "nan", is_causal=True, hard="nan")
    if feature_map == "favor":
        yield _case(feature_map, dtype, "jump", is_causal=True, hard="jump")


def _case(feature_map: str, dtype: str, *what: str, **options: object) -> Case:
    kind = "causal" if options.get("is_causal") else "full"
    words = what if options.get("operation") in ("decode_step", "decoder") else (*what, kind)
    name = " ".join([dtype, feature_map, *(word.replace("_", " ") for word in words)])
    return Case(name, feature_map, dtype, **options)  # type: ignore[arg-type]
