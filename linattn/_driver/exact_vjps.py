"""The pullback of softmax attention: pairs are weighed again, with the scales of their rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from linattn._driver.blocks import raw_tokens, transient_values_block
from linattn._driver.gradient_rows import GradientWalk
from linattn._driver.pairs import (
    is_banded,
    keys_of_rows,
    offset_bias,
    rows_of_keys,
    visible_pairs,
)
from linattn._driver.softmax import short_rows, softmax_rows
from linattn._generic.block_vjps import row_cotangent, row_scale
from linattn._generic.feature_vjps import sum_to
from linattn.typing import Array, Problem, RowScale, Tokens

__all__ = ["pull_exact"]


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
