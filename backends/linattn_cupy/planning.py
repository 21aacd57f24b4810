"""How long a block is: enough tokens to fill the device, few enough for the memory promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from linattn.typing import Exact, Plan, Problem
from linattn_cupy import device, products
from linattn_cupy.parameters import family_of

MAX_WORKSPACE = 256 * 2**20
SHARE_OF_DEVICE = 128
"""Bytes that a block may take, and the share of the device's memory that it may take at most.

A share of all memory, not of free memory, so that a call always has the same bits.
"""

GRADIENT_SHARE = 2
"""Bytes that gradients may take, over those of a block."""

TILE, CAUSAL_TILE, DECAY_TILE = 512, 128, 32
"""Tokens of a tile of float32: many in a product, causal few in its square.

Keys that decay have one scale in a tile: few, so that the first is not drowned by the last.
"""

MIN_BLOCK, MAX_BLOCK = 32, 8192
MAX_CAUSAL_BLOCK = 256
EXACT_BLOCK = 1024
WINDOW_BLOCK = 2048
"""Tokens of a block of the generic code."""


class Block(NamedTuple):
    """Some rows, and of how many each tile of them is."""

    rows: slice
    tile: int


def blocks_of(length: int, tokens: int, *, is_causal: bool, tile: int | None = None) -> list[Block]:
    """Cut a sequence into equal blocks of at most `tokens` tokens, all of whole tiles.

    The remainder is a block of one tile.
    """
    if tile is None:
        tile = CAUSAL_TILE if is_causal else TILE
    tile = min(tile, tokens, length)
    whole = length // tile
    count = -(-whole // (tokens // tile))
    size = tile * -(-whole // count)
    end = tile * whole
    blocks = [Block(slice(i, min(i + size, end)), tile) for i in range(0, end, size)]
    return blocks if end == length else [*blocks, Block(slice(end, length), length - end)]


def tokens_of(problem: Problem) -> int:
    """Tokens of a block of float32: the caller's choice, or what fits the workspace."""
    if problem.policy.chunk_size is not None:
        return problem.policy.chunk_size
    m, e, d = problem.num_features, problem.value.shape[-1], problem.query.shape[-1]
    if problem.sees.is_causal:
        # Features of both sides; scores; states before tiles; values and numerators.
        tile = _causal_tile(problem)
        numbers = 2 * m + tile + m * (2 * e + 1) // tile + 2 * e
    else:
        numbers = m + m * e // TILE + e
    return _fitting(problem, 4 * (numbers + d))


def _causal_tile(problem: Problem) -> int:
    return CAUSAL_TILE if problem.weights.log_decay is None else DECAY_TILE


def causal_blocks(problem: Problem) -> list[Block]:
    """Blocks of causal attention in float32."""
    length, tile = problem.key.shape[-2], _causal_tile(problem)
    return blocks_of(length, tokens_of(problem), is_causal=True, tile=tile)


def gradient_tokens_of(problem: Problem) -> int:
    """Tokens of a block of float32 gradients: the caller's choice, or what fits their workspace."""
    if problem.policy.chunk_size is not None:
        return problem.policy.chunk_size
    m, e = problem.num_features, problem.value.shape[-1]
    # Features of both sides, and gradients by those of one; values, cotangents and outputs.
    numbers = 3 * m + 3 * e
    if problem.sees.is_causal:
        # Scores; states before tiles, and adjoints after them.
        numbers += CAUSAL_TILE + m * (2 * e + 4) // CAUSAL_TILE
    return _fitting(problem, 4 * numbers, GRADIENT_SHARE)


def gradient_blocks(problem: Problem) -> list[Block]:
    """Blocks of keys of float32 gradients, and of a forward pass that keeps states for them."""
    tokens, is_causal = gradient_tokens_of(problem), problem.sees.is_causal
    return blocks_of(problem.key.shape[-2], tokens, is_causal=is_causal)


def window_tokens_of(problem: Problem, window: int) -> int:
    """Tokens of a block of keys beside an exact window, a multiple of it."""
    m, e = problem.num_features, problem.value.shape[-1]
    # Features of both sides; states before tiles and of tiles; values and numerators.
    numbers = 2 * m + m * (2 * e + 1) // window + 2 * e
    return max(1, _fitting(problem, 4 * numbers) // window) * window


def scores_of(
    heads: int, length: int, size: int, start: int | None
) -> Iterator[tuple[slice, slice]]:
    """Yield heads and rows whose scores fit the workspace, to all keys.

    Causal: to those up to the rows' own places, the first of which is ``start``.
    """
    fitting = _workspace() // 4
    group = max(1, min(heads, fitting // (MIN_BLOCK * size)))
    for head in range(0, heads, group):
        row = 0
        while row < length:
            pairs = fitting // min(group, heads - head)
            count = pairs // size
            if start is not None and start + row < size:
                # n (start + row + n) pairs.
                half = (start + row) / 2
                count = max(count, int(math.sqrt(half * half + pairs) - half))
            count = min(max(count // MIN_BLOCK * MIN_BLOCK, MIN_BLOCK), length - row)
            yield slice(head, min(head + group, heads)), slice(row, row + count)
            row += count


def _workspace() -> int:
    return int(min(MAX_WORKSPACE, device.memory_bytes() // SHARE_OF_DEVICE))


def _fitting(problem: Problem, token_bytes: int, share: int = 1) -> int:
    """Tokens that fit the workspace, given the bytes of a token of each head."""
    return max(MIN_BLOCK, share * _workspace() // (token_bytes * max(1, math.prod(problem.lead))))


def plan(problem: Problem) -> Plan:
    """All heads in one task: every kernel has work for the whole device."""
    run = _run_in_tf32 if problem.policy.tf32 else _run
    generic = problem.policy.chunk_size or _generic_block(problem)
    size = tokens_of(problem) if _has_kernels(problem) else generic
    return Plan(size, [()], run, backward_size=generic)


def _has_kernels(problem: Problem) -> bool:
    """Whether blocks are done by matrix products and the kernels between them."""
    if problem.mode != "full" or str(np.dtype(problem.dtype)) != "float32":
        return False
    try:
        family_of(problem.query_spec)
        family_of(problem.key_spec)
    except device.UnsupportedError:
        return False
    return True


def _generic_block(problem: Problem) -> int:
    if isinstance(problem.query_spec, Exact):
        return EXACT_BLOCK
    if problem.exact.window is not None:
        return WINDOW_BLOCK
    width = max(1, problem.num_features) + problem.value.shape[-1] + problem.query.shape[-1]
    # Both sides.
    tokens = _fitting(problem, 2 * np.dtype(problem.dtype).itemsize * width)
    block = min(MAX_CAUSAL_BLOCK if problem.sees.is_causal else MAX_BLOCK, tokens)
    return 1 << (block.bit_length() - 1)


def _run(work: Callable[[Any], None], tasks: Sequence[Any]) -> None:
    for task in tasks:
        work(task)


def _run_in_tf32(work: Callable[[Any], None], tasks: Sequence[Any]) -> None:
    with products.tf32():
        _run(work, tasks)
