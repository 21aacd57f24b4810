"""Whole recurrences: heads over threads, and in each a walk over chunks, tile by tile.

In a chunk with the state S before it, N the products of keys below the diagonal times beta::

    U = (I + N)^-1 diag(beta) (V - K_before S)      or V itself, without the delta rule
    O = [Q_before, A] [S; U]
    S' = G S + K_after^T U

Letters: ``h`` heads of a task, ``r`` queries that share a state, ``g`` chunks of ``c`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product, repeat
from math import prod
from typing import Any

import numpy as np

from linattn.typing import Declined, Recurrence
from linattn_numpy import limits, tuning
from linattn_numpy.buffers import Floats, buffer
from linattn_numpy.planning import num_threads
from linattn_numpy.products import transposed
from linattn_numpy.recurrence_chunks import Chunks, inside, unit_lower_inverse
from linattn_numpy.threads import run


def recurrence(problem: Recurrence) -> tuple[Floats, Floats] | Declined:
    """Return the outputs, and the state after the last token."""
    (length, d), e = problem.key.shape[-2:], problem.value.shape[-1]
    lead = problem.lead
    if 0 in (*lead, length, d, e):
        return limits.EMPTY
    padded = (1,) * (len(lead) - len(problem.state_lead)) + problem.state_lead
    # Queries along an axis that no state has share it.
    shared = [axis for axis, n in enumerate(padded) if n < lead[axis]]
    order = [axis for axis in range(len(lead)) if axis not in shared] + shared
    distinct = tuple(lead[axis] for axis in order[: len(lead) - len(shared)])
    last = (len(lead), len(lead) + 1)

    def of_states(tokens: Any) -> Any:
        if tokens is None:
            return None
        whole = np.broadcast_to(tokens, (*padded, *tokens.shape[-2:]))
        return whole.squeeze(axis=tuple(shared))

    tokens = [of_states(getattr(problem, name)) for name in Chunks._fields[1:]]
    query = np.broadcast_to(problem.query, (*lead, length, d)).transpose(*order, *last)
    # With beta = 2 nothing is forgotten, not even rounding errors.
    short = problem.beta is not None and d <= limits.MAX_SHORT_KEY
    state = np.zeros((*distinct, d, e), np.float64 if short else problem.dtype)
    if problem.initial_state is not None:
        state[...] = of_states(problem.initial_state)
    output = np.empty((*query.shape[:-1], e), problem.query.dtype)

    def work(task: Any) -> None:
        h = len(state[task])
        of_task = [None if x is None else x[task] for x in tokens]
        out = output[task].reshape(h, -1, length, e)
        _walk(problem, [query[task].reshape(h, -1, length, d), *of_task], state[task], out)

    flops = 6.0 * prod(lead) * length * d * e
    threads = num_threads(problem.num_threads) if flops >= tuning.MIN_PARALLEL_FLOPS else 1
    run(threads, work, _tasks(distinct, threads))
    inverse = np.argsort(order)
    state = state.reshape(*problem.state_lead, d, e).astype(problem.dtype, copy=False)
    return output.transpose(*inverse, *last), state


def _tasks(distinct: tuple[int, ...], threads: int) -> list[Any]:
    """Return indices of the heads of each task: some along the longest axis."""
    if not distinct:
        return [(None,)]
    n = max(distinct)
    axis = distinct.index(n)
    share = -(-n // max(1, threads * n // prod(distinct)))
    heads = min(share, tuning.RECURRENCE_HEADS)
    parts: list[Any] = [range(size) for size in distinct]
    parts[axis] = [slice(i, i + heads) for i in range(0, n, heads)]
    return list(product(*parts))


def _walk(problem: Recurrence, tokens: list[Any], state: Floats, output: Floats) -> None:
    """Write the outputs of some heads, and their states after the last token.

    ``tokens``: the fields of ``Chunks`` before they are cut, queries ``(h, r, L, d)``; ``state``:
    the state before the first token, ``(h, d, e)``, which is overwritten.
    """
    length = output.shape[-2]
    most = tuning.CHUNK_ROWS if problem.beta is None else tuning.SOLVED_CHUNK_ROWS
    c = min(most, 1 << (min(problem.chunk_size, length) - 1).bit_length())
    size = max(c, tuning.RECURRENCE_TILE_ROWS // len(state) // c * c)
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        out = output[..., rows, :]
        *lead, n, e = out.shape
        chunked: Iterator[Any] = (
            None if x is None else _chunked(x[..., rows, :], name, c, state.dtype)
            for name, x in zip(Chunks._fields, tokens, strict=True)
        )
        chunks = Chunks(*chunked)
        if out.dtype == state.dtype and n % c == 0:
            _scan(chunks, problem.scale, state, out.reshape(*lead, n // c, c, e))
        else:
            padded = buffer("output", (*lead, -(-n // c), c, e), state.dtype)
            _scan(chunks, problem.scale, state, padded)
            out[...] = padded.reshape(*lead, -1, e)[..., :n, :]


def _chunked(tokens: Floats, name: str, c: int, dtype: Any) -> Floats:
    """Tokens as ``(..., g, c, w)``: a view where BLAS takes it, else a copy, zeros at the end."""
    *lead, n, w = tokens.shape
    in_rows = tokens.strides[-1] == tokens.itemsize and tokens.strides[-2] >= w * tokens.itemsize
    if n % c != 0 or tokens.dtype != dtype or not in_rows:
        copy = buffer(name, (*lead, -(-n // c) * c, w), dtype)
        copy[..., :n, :] = tokens
        copy[..., n:, :] = 0
        tokens = copy
    return tokens.reshape(*lead, -1, c, w)


def _scan(chunks: Chunks, scale: float, state: Floats, output: Floats) -> None:
    """Write outputs ``(h, r, g, c, e)``, and overwrite ``state`` by the state after the chunks."""
    made = inside(chunks, scale)
    inverse = None
    if made.pairs is not None and chunks.beta is not None:
        inverse = unit_lower_inverse(made.pairs)
        inverse *= transposed(chunks.beta)
    h, g, c, d = chunks.key.shape
    e = chunks.value.shape[-1]
    # One above the other: one product reads both.
    both = buffer("state and values", (h, 1, d + c, e), state.dtype)
    read, stored = both[:, 0, :d], both[:, 0, d:]
    # Rows of a whole array are multiplied by numbers of their own in half the time.
    by_channel = chunks.log_decay is not None and chunks.log_decay.shape[-1] > 1
    here = buffer("state", state.shape, state.dtype) if by_channel else read
    here[...] = state
    found = buffer("found", (h, c, e), state.dtype)
    added = buffer("added", (h, d, e), state.dtype)
    arrays = (output, chunks.value, inverse, *made[:3], made.value, made.enter, made.total)
    by_chunk = (repeat(None, g) if x is None else np.moveaxis(x, -3, 0) for x in arrays)
    for step in zip(*by_chunk, strict=True):
        out, value, solve, reads, before, after, factor, enter, total = step
        if enter is not None:
            here *= enter
        if by_channel:
            read[...] = here
        if factor is not None:
            value = np.multiply(value, factor, out=stored)
        elif solve is None:
            stored[...] = value
        if solve is not None:
            np.matmul(before, here, out=found)
            np.subtract(value, found, out=found)
            np.matmul(solve, found, out=stored)
        np.matmul(reads, both, out=out)
        if total is not None:
            here *= total
        here += np.matmul(transposed(after), stored, out=added)
    np.multiply(here, 1 if made.leave is None else made.leave, out=state)
