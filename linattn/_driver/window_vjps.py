"""The pullback of exact windows: near pairs, and far keys on either side through states.

A row reads several sources on one scale, so that its cotangent is found first, by a forward pass.
Each source is then pulled back apart, and its gradients are added: near pairs, each again from
queries and keys, what is far to the right, and what is far to the left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn._driver.blocks import raw_tokens, transient_values_block
from linattn._driver.gradient_rows import GradientWalk
from linattn._driver.linear_vjps import Scan, given_rows, row_numbers
from linattn._driver.pairs import offset_bias, visible_pairs
from linattn._driver.stops import Step
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, State, Tokens

__all__ = ["pull_window"]

MAX_ROWS = 512
"""Tokens of a step: the pairs of so many queries and keys are held at once."""


def pull_window(walk: GradientWalk) -> Iterator[State]:
    """Pull back, and yield the adjoint after each step; the last is that of the state before."""
    problem, bias = walk.problem.replace(want_log=True), walk.problem.relative_bias
    numbers = yield from row_numbers(walk._replace(problem=problem))
    walk = walk._replace(problem=problem, block_size=min(walk.block_size, MAX_ROWS))
    blocks = _blocks(walk)
    yield from _pull_near(walk, blocks, numbers)
    left, right = (None, None) if bias is None else (bias.table[..., :1], bias.table[..., -1:])
    share = 1
    if not problem.is_causal:
        steps = _far_steps(blocks[::-1])
        yield from Scan(walk._replace(share=1), numbers, True, steps, right).walk_back(None)
        share = 2
    # The scan from the start is the last, whose adjoint is that of the state before.
    steps = _far_steps(blocks)
    yield from Scan(walk._replace(share=share), numbers, False, steps, left).walk_back(None)


def _blocks(walk: GradientWalk) -> list[list[slice]]:
    """Blocks of the window's length, each cut into steps."""
    length, w = walk.problem.query.shape[-2], walk.problem.exact_window
    assert w is not None
    return [walk.key_slices(slice(i, min(i + w, length))) for i in range(0, length, w)]


def _far_steps(blocks: list[list[slice]]) -> list[Step]:
    """Let the queries of each block read the keys before the block beside it."""
    steps, none = [], slice(0, 0)
    for i in range(len(blocks) + 1):
        if i < len(blocks):
            steps += [Step(none, rows) for rows in blocks[i]]
        if i:
            steps += [Step(keys, none) for keys in blocks[i - 1]]
    return steps


# Near pairs -------------------------------------------------------------------------------------


def _pull_near(walk: GradientWalk, blocks: list[list[slice]], numbers: Array) -> Iterator[Any]:
    """Every query reads its near keys again, then every key its queries."""
    # Near keys are weighed in the coordinates of the caller.
    problem = walk.problem.replace(query_change=None, key_change=None)
    walk, xp = walk._replace(problem=problem), problem.xp
    for i, block in enumerate(blocks):
        for rows in block:
            gradient = xp.zeros_like(raw_tokens(problem, "query", rows, 0).x)
            for keys in _beside(blocks, i, after=not problem.is_causal):
                if not problem.is_causal or keys.start < rows.stop:
                    pairs = _pairs(walk, rows, keys, numbers)
                    gradient = gradient + walk.functions.exact_query_vjp(*pairs)
            walk.write_query(rows, gradient)
            yield None
    for i, block in enumerate(blocks):
        for keys in block:
            key, values_and_one = _keys(walk, keys)
            gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
            for rows in _beside(blocks, i, before=not problem.is_causal):
                if not problem.is_causal or keys.start < rows.stop:
                    more = walk.functions.exact_key_vjp(*_pairs(walk, rows, keys, numbers))
                    gradients = [
                        x + sum_to(y, problem.state_lead, 2)
                        for x, y in zip(gradients, more, strict=True)
                    ]
            walk.write_key(keys, _keys(walk, keys)[1], *gradients)
            yield None


def _beside(
    blocks: list[list[slice]], i: int, *, before: bool = True, after: bool = True
) -> list[slice]:
    """Return steps of a block and of those beside it."""
    near = blocks[max(i - before, 0) : i + 1 + after]
    return [rows for block in near for rows in block]


def _keys(walk: GradientWalk, keys: slice) -> tuple[Tokens, Array]:
    values_and_one = transient_values_block(walk.problem, keys, walk.functions)
    return raw_tokens(walk.problem, "key", keys, 0), values_and_one


def _pairs(walk: GradientWalk, rows: slice, keys: slice, numbers: Array) -> tuple[Any, ...]:
    """Arguments of the block functions for pairs of queries and keys."""
    problem, row = walk.problem, given_rows(walk, rows, numbers)
    visible, bias = visible_pairs(problem, rows, keys), offset_bias(problem, rows, keys)
    log = row.log if bias is None else row.log - bias
    query = raw_tokens(problem, "query", rows, 0)
    return (problem.near_spec, query, *_keys(walk, keys), row.g1, log, visible)
