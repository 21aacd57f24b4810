"""Softmax attention of some rows: every block of keys is one more part of them."""

from __future__ import annotations

import array_api_compat

from linattn._dispatch import BlockFunctions
from linattn._driver.blocks import block_slices, raw_tokens, transient_values_block
from linattn._driver.token_blocks import biased_keys, biased_queries
from linattn._generic.hierarchical import exact_causal_block
from linattn.typing import Partial, Problem, Tokens

__all__ = ["exact_rows", "no_keys_seen"]


def exact_rows(
    problem: Problem, rows: slice, block_size: int, functions: BlockFunctions
) -> Partial:
    """Softmax attention of some rows: every block of keys is one more part of them."""
    spec, query = biased_queries(problem, raw_tokens(problem, "query", rows, 0))
    part = None
    if problem.is_causal:
        key = biased_keys(problem, raw_tokens(problem, "key", rows, 0))
        values_and_one = transient_values_block(problem, rows, functions)
        part = exact_causal_block(spec, query, key, values_and_one, functions.exact_block)
    for keys in block_slices(
        rows.start if problem.is_causal else problem.key.shape[-2], block_size
    ):
        key = biased_keys(problem, raw_tokens(problem, "key", keys, 0))
        values_and_one = transient_values_block(problem, keys, functions)
        if part is None:
            part = functions.exact_block(spec, query, key, values_and_one)
        else:
            part = functions.exact_more(spec, query, key, values_and_one, part)
    return no_keys_seen(problem, query) if part is None else part


def no_keys_seen(problem: Problem, query: Tokens) -> Partial:
    """Partial of queries that see no key, with all leading axes of the output."""
    shape = (*problem.lead, query.x.shape[-2], problem.value.shape[-1] + 1)
    device = array_api_compat.device(query.x)
    num_den = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    return Partial(num_den, num_den[..., -1:] - problem.xp.inf)
