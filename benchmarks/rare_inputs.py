"""Inputs in which few rows or keys of a head carry much of its output, and near duplicates.

Each head is drawn: keys around centres, queries that see them more or less sharply, values with a
mean or without one. Then a few queries are turned to a few keys until these have nearly all of
their weight (*rare retrieval*), or tokens are overwritten by near copies of others (*near
duplicates*: also queries that all read one key, or keys like others). Each kind has several forms,
which the seeds take in turn. `benchmarks.tolerance` takes these inputs by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.real_inputs import Case, _case

__all__ = ["RARE"]

Floats = NDArray[Any]

Draw = Callable[[int, int], list[Case]]

HEADS = 12
MARGIN = 3.0
"""Log of the weight of the keys that a query retrieves over the weight of all others, at least."""


def plain(length: int, rng: np.random.Generator) -> list[Floats]:
    """Return queries, keys and values of heads of one width, of a spread and sharpness each."""
    d = int(rng.choice([16, 32, 64]))
    arrays = []
    for _ in range(HEADS):
        m, spread = int(rng.choice([12, 24, 48])), rng.uniform(0.1, 0.5)
        centres, values = rng.standard_normal((2, m, d))
        of_key, of_query = rng.integers(m, size=(2, length))
        if rng.random() < 0.5:
            of_query = of_key
        key = centres[of_key] + spread * rng.standard_normal((length, d))
        query = centres[of_query] + rng.uniform(0, 1) * rng.standard_normal((length, d))
        value = values[of_key] + rng.uniform(0, 0.5) * rng.standard_normal((length, d))
        arrays.append((rng.uniform(0.5, 1.5) * query, key, value + rng.uniform(0, 1.5)))
    return [np.stack(x) for x in zip(*arrays, strict=True)]


def retrieval(
    length: int,
    seed: int = 0,
    *,
    keys: str = "random",
    readers: int = 1,
    needles: int = 1,
    within: tuple[float, float] = (0, 1),
    share: float | None = None,
    larger: tuple[float, float] = (3, 5),
) -> list[Case]:
    """4 to 16 queries a head that each read one key, whose values are larger than all others.

    ``keys``: in "random" directions, "large" multiples of usual keys, "far" from their centre, or
    "usual" ones. ``readers``: queries of each needle; ``needles``: keys of each of these queries.
    ``within``: where these tokens are. ``share``: of all queries, in the place of 4 to 16.
    """
    rng = np.random.default_rng(seed + 5)
    query, key, value = plain(length, rng)
    d = query.shape[-1]
    for q, k, v in zip(query, key, value, strict=True):
        count = int(rng.integers(4, 17)) if share is None else int(share * length)
        readers = min(readers, count)
        groups, among = count // readers, np.arange(*(int(x * length) for x in within))
        tokens = np.sort(rng.choice(among, groups * (needles + readers), replace=False))
        # Keys before their queries, which may be causal.
        of_keys = tokens[: groups * needles].reshape(groups, needles)
        of_queries = tokens[groups * needles :].reshape(groups, readers)
        usual, direction = k[of_keys[:, :1]], rng.standard_normal((groups, 1, d))
        if keys == "random":
            usual = rng.uniform(1, 1.5) * direction
        elif keys == "far":
            usual = usual + direction
        elif keys == "large":
            usual = rng.uniform(2, 3) * usual
        if keys != "usual":
            k[of_keys] = usual + 0.1 * rng.standard_normal((groups, needles, d))
        size = rng.uniform(*larger, (groups, needles, 1))
        v[of_keys] = size * v[rng.integers(length, size=(groups, needles))]
        _turn(q, k, of_keys, of_queries, rng)
    return [_case([x.astype(np.float32) for x in (query, key, value)])]


def _turn(query: Floats, key: Floats, of_keys: Floats, of_queries: Floats, rng: Any) -> None:
    """Turn queries to keys, until these have nearly all of their weight."""
    scale, mean = query.shape[-1] ** -0.5, key.mean(axis=0)
    covariance = np.cov(key.T)
    ridge = 10 ** rng.uniform(-1.5, 0) * np.trace(covariance) / len(covariance)
    inverse = np.linalg.inv(covariance + ridge * np.eye(len(mean)))
    for keys, readers in zip(of_keys, of_queries, strict=True):
        direction = inverse @ (key[keys].mean(axis=0) - mean)
        direction /= np.linalg.norm(direction)
        along, apart = scale * key @ direction, np.ones(len(key), bool)
        apart[keys] = False
        for i in readers:
            own, size = scale * key @ query[i], 1.0
            for size in 1.15 ** np.arange(36):
                logits = own + size * along
                far = logits[apart]
                if logits[keys].min() > np.log(np.exp(far - far.max()).sum()) + far.max() + MARGIN:
                    break
            query[i] += size * direction


def duplicates(
    length: int, seed: int = 0, *, of: str = "queries", share: float = 0.02, copied: int = 1
) -> list[Case]:
    """Near copies of a few tokens in the place of a share of all: queries, keys or both.

    ``copied``: how many tokens are copied; 0 copies each of them once. Values stay.
    """
    rng = np.random.default_rng(seed + 7)
    arrays = plain(length, rng)
    for query, key, _ in zip(*arrays, strict=True):
        count = max(2, int(share * length))
        places = rng.choice(length, count, replace=False)
        sources = rng.integers(length, size=copied or count)[np.arange(count) % (copied or count)]
        noise = 10 ** rng.uniform(-4, -1.5)
        if of in ("queries", "both"):
            query[places] = query[sources] * (rng.uniform(1, 3) if copied else 1)
        if of in ("keys", "both"):
            key[places] = key[sources]
        for x in (query, key):
            x[places] += noise * x.std() * rng.standard_normal((count, x.shape[-1]))
    return [_case([x.astype(np.float32) for x in arrays])]


RETRIEVAL: tuple[Draw, ...] = (
    retrieval,
    partial(retrieval, keys="far"),
    partial(retrieval, keys="large"),
    partial(retrieval, keys="usual"),
    partial(retrieval, readers=4),
    partial(retrieval, needles=4),
    partial(retrieval, within=(0.9, 1)),
    partial(retrieval, within=(0, 0.1), keys="far"),
    partial(retrieval, share=0.02, larger=(1, 1)),
)
DUPLICATES: tuple[Draw, ...] = (
    partial(duplicates, copied=0),
    duplicates,
    partial(duplicates, of="keys", copied=3),
    partial(duplicates, of="keys", copied=0),
    partial(duplicates, of="both", copied=8),
    partial(duplicates, of="both", copied=0),
    partial(retrieval, share=0.02, larger=(1, 1), keys="usual"),
    partial(retrieval, share=0.02, larger=(1, 1), keys="usual", readers=10**6),
)


def _in_turn(kinds: tuple[Draw, ...], length: int, seed: int) -> list[Case]:
    return kinds[seed % len(kinds)](length, seed)


RARE: dict[str, Draw] = {
    "rare retrieval": partial(_in_turn, RETRIEVAL),
    "near duplicates": partial(_in_turn, DUPLICATES),
}
