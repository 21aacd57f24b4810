"""The pullback of exact pairs: in softmax attention, and near a query in an exact window.

Pairs are weighed again, with the scales of their rows. In a window a row reads several sources on
one scale, so that its cotangent is found first, by a forward pass. Each source is then pulled back
apart, and its gradients are added: near pairs, each again from queries and keys, what is far to the
right, and what is far to the left.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from linattn._driver.blocks import raw_tokens, transient_values_block
from linattn._driver.gradient_rows import GradientWalk
from linattn._driver.linear_vjps import Scan, given_rows, row_numbers
from linattn._driver.pairs import is_banded, keys_of_rows, offset_bias, rows_of_keys, visible_pairs
from linattn._driver.softmax import short_rows, softmax_rows
from linattn._driver.walks import Step
from linattn._generic.block_vjps import row_cotangent, row_scale
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Problem, RowScale, State, Tokens

__all__ = ["pull_exact", "pull_window"]

MAX_ROWS = 512
"""Tokens of a step: the pairs of so many queries and keys are held at once."""


def pull_window(walk: GradientWalk) -> Iterator[State]:
    """Pull back, and yield the adjoint after each step; the last is that of the state before."""
    problem, bias = walk.problem.replace(want_log=True), walk.problem.weights.relative_bias
    numbers = yield from row_numbers(walk._replace(problem=problem))
    walk = walk._replace(problem=problem, block_size=min(walk.block_size, MAX_ROWS))
    blocks = _blocks(walk)
    yield from _pull_near(walk, blocks, numbers)
    left, right = (None, None) if bias is None else (bias.table[..., :1], bias.table[..., -1:])
    share = 1
    if problem.sees.ahead:
        steps = _far_steps(blocks[::-1])
        yield from Scan(walk._replace(share=1), numbers, True, steps, right).walk_back(None)
        share = 2
    # The scan from the start is the last, whose adjoint is that of the state before.
    steps = _far_steps(blocks)
    yield from Scan(walk._replace(share=share), numbers, False, steps, left).walk_back(None)


def _blocks(walk: GradientWalk) -> list[list[slice]]:
    """Blocks of the window's length, each cut into steps."""
    length, w = walk.problem.query.shape[-2], walk.problem.exact.window
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
            for keys in _beside(blocks, i, after=problem.sees.ahead):
                if problem.sees.ahead or keys.start < rows.stop:
                    pairs = _pairs(walk, rows, keys, numbers)
                    gradient = gradient + walk.functions.exact_query_vjp(*pairs)
            walk.write_query(rows, gradient)
            yield None
    for i, block in enumerate(blocks):
        for keys in block:
            key, values_and_one = _keys(walk, keys)
            gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
            for rows in _beside(blocks, i, before=problem.sees.ahead):
                if problem.sees.ahead or keys.start < rows.stop:
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
    return (problem.exact.spec, query, *_keys(walk, keys), row.g1, log, visible)


# Softmax attention --------------------------------------------------------------------------------


def pull_exact(walk: GradientWalk) -> Iterator[None]:
    """Softmax attention: every query reads its keys again, then every key its queries."""
    problem, functions = walk.problem, walk.functions
    xp, spec, lead = problem.xp, problem.query_spec, problem.state_lead
    walk = walk._replace(block_size=short_rows(problem, walk.block_size))
    all_rows = walk.query_slices()
    scales = yield from _row_scales(walk, all_rows)
    for rows, scale in zip(all_rows, scales, strict=True):
        query = raw_tokens(problem, "query", rows, 0)
        grad_num_den = row_cotangent(scale, walk.grad_output(rows))
        gradient = xp.zeros_like(query.x)
        for keys in walk.key_slices(keys_of_rows(problem, rows)):
            block = (*_raw_keys(walk, keys), grad_num_den)
            pairs = _pair_logs(problem, rows, keys, scale)
            gradient = gradient + functions.exact_query_vjp(spec, query, *block, *pairs)
        walk.write_query(rows, gradient)
        yield
    for keys in walk.key_slices(slice(0, problem.key.shape[-2])):
        key, values_and_one = _raw_keys(walk, keys)
        gradients = [xp.zeros_like(key.x), xp.zeros_like(values_and_one)]
        seen_by = rows_of_keys(problem, keys)
        for rows, scale in zip(all_rows, scales, strict=True):
            if rows.stop <= seen_by.start or rows.start >= seen_by.stop:
                continue
            grad_num_den = row_cotangent(scale, walk.grad_output(rows))
            query, pairs = (
                raw_tokens(problem, "query", rows, 0),
                _pair_logs(problem, rows, keys, scale),
            )
            more = functions.exact_key_vjp(spec, query, key, values_and_one, grad_num_den, *pairs)
            gradients = [x + sum_to(y, lead, 2) for x, y in zip(gradients, more, strict=True)]
        walk.write_key(keys, values_and_one, *gradients)
        yield


def _row_scales(walk: GradientWalk, all_rows: list[slice]) -> Generator[None, None, list[RowScale]]:
    """Scales of all rows of softmax attention, block by block."""
    problem, functions, scales = walk.problem, walk.functions, []
    for rows, part in softmax_rows(problem, walk.block_size, functions):
        scales.append(row_scale(part, walk.grad_output(rows)))
        yield
    if not is_banded(problem):
        return scales
    numbers = [problem.xp.concat(list(each), axis=-2) for each in zip(*scales, strict=True)]
    return [RowScale(*(each[..., rows, :] for each in numbers)) for rows in all_rows]


def _raw_keys(walk: GradientWalk, rows: slice) -> tuple[Tokens, Array]:
    values_and_one = transient_values_block(walk.problem, rows, walk.functions)
    return raw_tokens(walk.problem, "key", rows, 0), values_and_one


def _pair_logs(problem: Problem, rows: slice, keys: slice, scale: RowScale) -> tuple[Array, Array]:
    """Log scale of a block's pairs, their bias taken off, and which of them count, None for all."""
    log, bias = scale.log, offset_bias(problem, rows, keys)
    log = log if bias is None else log - bias
    return log, visible_pairs(problem, rows, keys)
