"""Loops over chunks of tokens, which JAX compiles alike at every length."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn._arrays import namespace
from linattn.typing import Array

Integers = NDArray[np.int64]

CHUNK = 128
"""Tokens of a chunk."""

MIN_CHUNK, MAX_PADDED = 16, 1.25
"""Chunks become shorter, down to the one, while runs in whole chunks have more tokens than the
other times as many as there are."""


ACCEPTED = "accepted"
"""Name of what a step decides by its rows: kept for the gradient, not found again."""


class Run(NamedTuple):
    """Numbers of keys and of queries in one order, and how many keys each query reads."""

    keys: Integers
    queries: Integers
    stops: Integers


def whole_run(first: int, stop: int) -> Run:
    """Return the run of a causal sequence."""
    rows = np.arange(first, stop)
    return Run(rows, rows, rows - first + 1)


class Layout(NamedTuple):
    """Common places of keys and queries, in chunks; a query reads what is not after it in its run.

    Each run begins with a chunk of its own.
    """

    size: int
    """Tokens of a chunk."""
    keys: Integers
    """Number of the key at each place, -1 for none."""
    queries: Integers
    sums: Integers
    """Number of the sums that each chunk goes on with."""
    starts: Integers
    """Tokens of its run before each chunk; sums begin anew at 0."""

    @classmethod
    def of(cls, runs: list[Run], num_sums: int, size: int = CHUNK) -> tuple[Layout, list[Integers]]:
        """Lay out runs; also return the places of the queries of each.

        Run i begins with the i-th sums and leaves them; from the last on, all have the last.
        """
        within = [_places(run) for run in runs]
        lengths = np.array([max(x.max(initial=-1) for x in places) + 1 for places in within])
        while size > MIN_CHUNK and (-(-lengths // size) * size).sum() > MAX_PADDED * lengths.sum():
            size //= 2
        counts = -(-lengths // size)
        firsts = np.cumsum(counts) - counts
        keys, queries = np.full((2, counts.sum() * size), -1)
        found = []
        for run, first, (key_places, places) in zip(runs, firsts * size, within, strict=True):
            keys[first + key_places], queries[first + places] = run.keys, run.queries
            found.append(first + places)
        number = np.arange(counts.sum()) - np.repeat(firsts, counts)
        sums = np.minimum(np.repeat(np.arange(len(runs)), counts), num_sums - 1)
        return cls(size, keys, queries, sums, number * size), found


def _places(run: Run) -> tuple[Integers, Integers]:
    """Put each query at or after the last key before its stop, and before all others."""
    readers = np.bincount(run.stops, minlength=len(run.keys) + 1)
    between = np.maximum(readers[1:-1], 1)
    keys = readers[0] + np.append(0, np.cumsum(between))[: len(run.keys)]
    within = np.arange(len(run.stops)) - np.searchsorted(run.stops, run.stops)
    return keys, np.append(0, keys)[run.stops] + within


def padded(x: Array, count: int) -> Array:
    """Put rows of zeros after the others; None stays None."""
    if x is None or not count:
        return x
    xp = namespace(x)
    return xp.concat([x, xp.zeros((*x.shape[:-2], count, x.shape[-1]), dtype=x.dtype)], axis=-2)


def cut(x: Array, size: int) -> Array:
    """Cut rows into chunks, on a first axis."""
    xp = namespace(x)
    return xp.moveaxis(xp.reshape(x, (*x.shape[:-2], -1, size, x.shape[-1])), -3, 0)


def flat(x: Array) -> Array:
    """Join chunks of rows again."""
    x = namespace(x).moveaxis(x, 0, -3)
    return namespace(x).reshape(x, (*x.shape[:-3], -1, x.shape[-1]))


def scan(
    step: Any, first: Any, tokens: Any, layout: Layout | None = None, size: int = CHUNK
) -> tuple[Any, Any]:
    """Run ``step(sums, start, chunk)`` over chunks of rows of tokens: the last sums, and all rows.

    ``first``: sums before them; with a layout several, and so are the last. ``size``: tokens of a
    chunk, unless a layout says.
    """
    jax = sys.modules["jax"]
    size = size if layout is None else layout.size
    chunks = jax.tree.map(lambda x: cut(x, size), tokens)
    policy = jax.checkpoint_policies.save_only_these_names(ACCEPTED)
    again = jax.checkpoint(lambda sums, chunk: step(sums, *chunk), policy=policy)
    if layout is None:
        starts = size * np.arange(jax.tree.leaves(chunks)[0].shape[0])
        sums, rows = jax.lax.scan(again, first, (starts, chunks))
        return sums, rows

    def of_run(carry: Any, chunk: Any) -> Any:
        (sums, all_sums), (number, *chunk) = carry, chunk
        begun = jax.tree.map(lambda x: x[number], first)
        sums = jax.tree.map(lambda x, y: jax.numpy.where(chunk[0] == 0, x, y), begun, sums)
        sums, rows = again(sums, chunk)
        # Not in what is computed again, which keeps its arguments.
        return (sums, jax.tree.map(lambda x, y: x.at[number].set(y), all_sums, sums)), rows

    carry = jax.tree.map(lambda x: x[0], first), first
    (_, sums), rows = jax.lax.scan(of_run, carry, (layout.sums, layout.starts, chunks))
    return sums, rows
