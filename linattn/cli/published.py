"""The attentions of ``linattn.baselines`` as ``linattn compare`` measures them.

With m each query meets about m keys, landmarks or clusters: what a method's own parameters have to
be for that is said here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from linattn import baselines
from linattn.cli.method import Attend, Method, Sizes
from linattn.typing import Array

__all__ = ["NEED_TRAINING", "PUBLISHED"]

NEED_TRAINING = "Synthesizer, AFT and external memory, whose parameters are learned"
"""What of `linattn.baselines` has no meaning on the inputs of another model."""

Options: TypeAlias = Callable[[Sizes], dict[str, Any]]

ROUNDS, BITS, STEPS, RATE = 4, 63, 10, 4
"""Of hashing; of clusters, their steps; tokens of a mean."""


def _made(function: Callable[..., Array], options: Options, *, is_random: bool) -> Any:
    """Return what `Method.make` is: parameters follow from the lengths of each call."""

    def make(
        query: Array, key: Array, num_features: int | None, rng: np.random.Generator
    ) -> Attend:
        seed = {"rng": int(rng.integers(2**63))} if is_random else {}

        def attend(
            query: Array, key: Array, value: Array, *, is_causal: bool, key_bias: Any = None
        ) -> Array:
            dims = query.shape[-1], value.shape[-1]
            sizes = Sizes(query.shape[-2], key.shape[-2], *dims, num_features or 1, is_causal)
            return function(query, key, value, is_causal=is_causal, **options(sizes), **seed)

        return attend

    return make


def _method(
    name: str,
    label: str,
    function: Callable[..., Array],
    options: Options,
    multiplications: Callable[[Sizes], float],
    **given: Any,
) -> Method:
    is_random = given.pop("is_random", False)
    return Method(
        name,
        label,
        _made(function, options, is_random=is_random),
        is_random=is_random,
        about=f"linattn.baselines.{function.__name__}",
        kind=given.pop("kind", "published"),
        takes_key_bias=False,
        multiplications=multiplications,
        max_features=lambda num_keys: num_keys - 1,
        **given,
    )


def _pairs(sizes: Sizes, seen: float) -> float:
    """Return the multiplications of queries that each meet `seen` keys."""
    return sizes.L * seen * (sizes.d + sizes.e)


def _window(sizes: Sizes) -> dict[str, Any]:
    return {"window_size": sizes.m - 1 if sizes.is_causal else (sizes.m - 1) // 2}


def _stride(sizes: Sizes) -> dict[str, Any]:
    """Solve l + S / l = m; if that has no solution, the cheapest l."""
    S, m = sizes.S, sizes.m
    if m * m < 4 * S:
        return {"stride": max(1, math.isqrt(S))}
    return {"stride": round((m + math.sqrt(m * m - 4 * S)) / 2)}


def _strided_cost(sizes: Sizes) -> float:
    stride: int = _stride(sizes)["stride"]
    return _pairs(sizes, stride + 1 + sizes.S / (2 * stride))


def _blocks_and_summaries(sizes: Sizes) -> dict[str, Any]:
    """Have half of the keys in a token's own block on average, half in summaries."""
    return {"stride": sizes.m, "num_summary": max(1, round(sizes.m**2 / sizes.S))}


def _fixed_cost(sizes: Sizes) -> float:
    options = _blocks_and_summaries(sizes)
    stride, count = int(options["stride"]), int(options["num_summary"])
    return _pairs(sizes, stride / 2 + count * sizes.S / (2 * stride))


def _window_and_global(sizes: Sizes) -> dict[str, Any]:
    count = max(1, sizes.m // 16)
    return {"num_global": count, "window_size": max(0, (sizes.m - count - 1) // 2)}


def _longformer_cost(sizes: Sizes) -> float:
    count: int = _window_and_global(sizes)["num_global"]
    return _pairs(sizes, sizes.m) + count * sizes.S * (sizes.d + sizes.e)


def _bigbird_cost(sizes: Sizes) -> float:
    size = max(1, sizes.m // 8)
    return _pairs(sizes, 8 * size) + 2 * size * sizes.S * (sizes.d + sizes.e)


def _random_linformer_cost(sizes: Sizes) -> float:
    return _pairs(sizes, sizes.m) + sizes.S * sizes.m * (sizes.d + sizes.e)


def _nystrom_cost(sizes: Sizes) -> float:
    L, S, d, e, m, _ = sizes
    return (L + S) * m * (d + e) + m * m * d + 4 * 6 * m**3 + L * m * m


def _clustered_cost(sizes: Sizes, num_clusters: int = 0) -> float:
    count = num_clusters or sizes.m
    return count * sizes.S * (sizes.d + sizes.e) + sizes.L * sizes.d * BITS


def _half(sizes: Sizes) -> int:
    return max(1, sizes.m // 2)


def _improved_cost(sizes: Sizes) -> float:
    return _clustered_cost(sizes, _half(sizes)) + _pairs(sizes, _half(sizes))


def _hashing(sizes: Sizes) -> dict[str, Any]:
    """Each of `ROUNDS` rounds has its share of the keys; buckets as in the paper, c = 2 L / b."""
    size = max(1, sizes.m // (2 * ROUNDS))
    buckets = 2 * max(1, sizes.S // size)
    return {"num_rounds": ROUNDS, "chunk_size": size, "num_buckets": buckets}


def _reformer_cost(sizes: Sizes) -> float:
    options = _hashing(sizes)
    projected = ROUNDS * sizes.L * sizes.d * int(options["num_buckets"]) / 2
    return _pairs(sizes, ROUNDS * 2 * int(options["chunk_size"])) + projected


def _routes(sizes: Sizes) -> dict[str, Any]:
    return {"num_clusters": max(1, round(sizes.S / sizes.m)), "num_steps": STEPS}


def _routing_cost(sizes: Sizes) -> float:
    k: int = _routes(sizes)["num_clusters"]
    return k * sizes.m**2 * (sizes.d + sizes.e) + 2 * sizes.L * k * sizes.d * (1 + STEPS)


def _memories(sizes: Sizes) -> dict[str, Any]:
    """Put a quarter of the keys into the block, half into the memory, a quarter into means."""
    size = max(RATE, sizes.m // (4 * RATE) * RATE)
    return {"block_size": size, "memory_size": 2 * size, "compressed_size": size, "rate": RATE}


def _wildcat_cost(sizes: Sizes) -> float:
    return sizes.S * sizes.m * (sizes.d + sizes.m + sizes.e) + _pairs(sizes, sizes.m)


def _oversampling(sizes: Sizes) -> dict[str, Any]:
    """Return g such that 2^g sqrt(n) is next to m, n being the largest power of 4 up to S."""
    root = 2 ** ((sizes.S.bit_length() - 1) // 2)
    return {"oversampling": max(0, round(math.log2(sizes.m / root)))}


def _thinformer_cost(sizes: Sizes) -> float:
    rounds = (sizes.S.bit_length() - 1) // 2
    g: int = _oversampling(sizes)["oversampling"]
    halving = float(4 ** (g + 1 + rounds)) * max(0, rounds - g) * (sizes.d + sizes.e)
    return halving + _pairs(sizes, min(4**rounds, 2 ** (g + rounds)))


def _svd_cost(sizes: Sizes) -> float:
    return sizes.L * sizes.S * (sizes.d + min(sizes.L, sizes.S))


def _top_k_cost(sizes: Sizes) -> float:
    return sizes.L * (sizes.S * sizes.d + sizes.m * sizes.e)


def _share(num_keys: int, num_features: int, is_causal: bool) -> float:
    """Return the share of exact pairs where each query meets `num_features` keys exactly."""
    return min(1.0, num_features / num_keys)


def _met_cost(sizes: Sizes) -> float:
    return _pairs(sizes, sizes.m)


SEEN: dict[str, Any] = {"aligned": True, "exact_share": _share}
CAUSAL: dict[str, Any] = {**SEEN, "causal": True}
FULL: dict[str, Any] = {"causal": False}
DRAWN: dict[str, Any] = {**FULL, "is_random": True}

PUBLISHED: tuple[Method, ...] = (
    _method("local-window", "local window", baselines.local_window, _window, _met_cost, **SEEN),
    _method("strided", "strided pattern", baselines.strided, _stride, _strided_cost, **CAUSAL),
    _method(
        "fixed", "fixed pattern", baselines.fixed, _blocks_and_summaries, _fixed_cost, **CAUSAL
    ),
    _method(
        "longformer",
        "Longformer",
        baselines.longformer,
        _window_and_global,
        _longformer_cost,
        **SEEN | FULL,
    ),
    _method(
        "bigbird",
        "BigBird",
        baselines.bigbird,
        lambda sizes: {"block_size": max(1, sizes.m // 8)},
        _bigbird_cost,
        **SEEN | DRAWN,
    ),
    _method(
        "linformer",
        "Linformer, means",
        baselines.linformer,
        lambda sizes: {"num_landmarks": sizes.m},
        _met_cost,
        **FULL,
    ),
    _method(
        "linformer-random",
        "Linformer, random",
        baselines.linformer,
        lambda sizes: {"num_landmarks": sizes.m, "projection": "random"},
        _random_linformer_cost,
        **DRAWN,
    ),
    _method(
        "nystromformer",
        "Nyströmformer",
        baselines.nystromformer,
        lambda sizes: {"num_landmarks": min(sizes.m, sizes.L)},
        _nystrom_cost,
        **FULL,
    ),
    _method(
        "clustered",
        "clustered",
        baselines.clustered,
        lambda sizes: {"num_clusters": min(sizes.m, sizes.L)},
        _clustered_cost,
        **DRAWN,
    ),
    _method(
        "improved-clustered",
        "improved clustered",
        baselines.improved_clustered,
        lambda sizes: {"num_clusters": min(_half(sizes), sizes.L), "num_keys": _half(sizes)},
        _improved_cost,
        **DRAWN,
    ),
    _method(
        "reformer", "Reformer", baselines.reformer, _hashing, _reformer_cost, is_random=True, **SEEN
    ),
    _method(
        "routing", "routing", baselines.routing, _routes, _routing_cost, is_random=True, **SEEN
    ),
    _method(
        "compressive", "compressive memory", baselines.compressive, _memories, _met_cost, **CAUSAL
    ),
    _method(
        "wildcat",
        "WildCat",
        baselines.wildcat,
        lambda sizes: {"num_keys": sizes.m},
        _wildcat_cost,
        **DRAWN,
    ),
    _method(
        "thinformer", "Thinformer", baselines.thinformer, _oversampling, _thinformer_cost, **DRAWN
    ),
    _method(
        "truncated-svd",
        "bound: truncated SVD",
        baselines.truncated_svd,
        lambda sizes: {"rank": min(sizes.m, sizes.L)},
        _svd_cost,
        kind="bound",
    ),
    _method(
        "top-k",
        "bound: largest keys",
        baselines.top_k,
        lambda sizes: {"num_keys": sizes.m},
        _top_k_cost,
        kind="bound",
        exact_share=_share,
    ),
)
"""Each as its paper has it, at m keys a query."""
