"""Softmax attention of blocks of queries: every block of keys is one more part of them."""

from __future__ import annotations

from collections.abc import Iterator

import array_api_compat

from linattn._dispatch import BlockFunctions, is_declined
from linattn._driver.blocks import block_slices, raw_tokens, transient_values_block
from linattn._driver.stops import Step, steps_of
from linattn._driver.token_blocks import biased_keys, biased_queries
from linattn._generic.hierarchical import exact_causal_block
from linattn.typing import Array, Exact, Partial, Problem, Tokens

__all__ = ["exact_parts", "no_keys_seen"]


def exact_parts(
    problem: Problem, block_size: int, functions: BlockFunctions
) -> Iterator[tuple[slice, Partial]]:
    """Softmax attention of all queries, in blocks: their rows, and their sums over the keys."""
    if problem.key_stop is not None:
        for step in steps_of(problem, block_size):
            if step.num_queries:
                yield step.queries, _of_step(problem, step, block_size, functions)
        return
    for rows in block_slices(problem.query.shape[-2], block_size):
        keys = rows if problem.is_causal else slice(problem.key.shape[-2], problem.key.shape[-2])
        yield rows, _of_step(problem, Step(keys, rows), block_size, functions)


def _of_step(problem: Problem, step: Step, block_size: int, functions: BlockFunctions) -> Partial:
    """Attend from the queries of a step to its keys, causally, and to all keys before these."""
    alone = step.problem(problem)
    spec, query = biased_queries(problem, raw_tokens(alone, "query", slice(0, None), 0))
    part = None
    if step.num_keys:
        key = biased_keys(alone, raw_tokens(alone, "key", slice(0, None), 0))
        values_and_one = transient_values_block(alone, slice(0, None), functions)
        part = _causal(spec, query, key, values_and_one, functions)
        part = step.queries_of_part(part)
        if step.positions is not None:
            _, query = biased_queries(problem, raw_tokens(problem, "query", step.queries, 0))
    for keys in block_slices(step.keys.start, block_size):
        key = biased_keys(problem, raw_tokens(problem, "key", keys, 0))
        values_and_one = transient_values_block(problem, keys, functions)
        if part is None:
            part = functions.exact_block(spec, query, key, values_and_one)
        else:
            part = functions.exact_more(spec, query, key, values_and_one, part)
    return no_keys_seen(problem, query) if part is None else part


def _causal(
    spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, functions: BlockFunctions
) -> Partial:
    """Causal attention of a block, by a backend as that of a band, else hierarchically."""
    block = spec, query, key, values_and_one
    band_block, n = functions.backend_alone("band_block"), query.x.shape[-2]
    part = None if band_block is None else band_block(*block, (1 - n, 0))
    if part is None or is_declined(part):
        return exact_causal_block(*block, functions.exact_block)
    return part  # type: ignore[no-any-return]


def no_keys_seen(problem: Problem, query: Tokens) -> Partial:
    """Partial of queries that see no key, with all leading axes of the output."""
    shape = (*problem.lead, query.x.shape[-2], problem.value.shape[-1] + 1)
    device = array_api_compat.device(query.x)
    num_den = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    return Partial(num_den, num_den[..., -1:] - problem.xp.inf)
