"""Tasks, block lengths and threads for NumPy."""

from __future__ import annotations

import os
from functools import partial
from math import inf, prod

import numpy as np

from linattn.typing import ColumnNormalized, Exact, Plan, Problem
from linattn_numpy import tuning
from linattn_numpy.blas import controller
from linattn_numpy.features import supports
from linattn_numpy.threads import run
from linattn_numpy.tiles import head_parts, part_sizes


def plan(problem: Problem) -> Plan:
    """Plan a task for each head or batch of short heads, cache-sized blocks, threads over tasks."""
    block = problem.policy.chunk_size or _block_rows(problem)
    is_long = _flops(problem) >= tuning.MIN_PARALLEL_FLOPS
    threads = num_threads(problem.policy.num_threads) if is_long else 1
    at_once = _longest_step(problem, block)
    heads = _heads_in_cache(problem, at_once, threads)
    backward_tasks = head_parts(problem.state_lead, heads)
    batched = _batched_heads(problem, at_once, threads)
    are_apart = problem.sees.cu_seqlens is not None and not problem.sees.is_causal
    if are_apart:
        batched = _shared(problem, tuning.PACKED_BLOCK_ROWS // tuning.MAX_TILED_BLOCK_ROWS, threads)
    heads = max(heads, batched)
    tasks = head_parts(problem.state_lead, heads)
    if are_apart:
        most = tuning.PACKED_BLOCK_ROWS // min(heads, max(1, prod(problem.state_lead)))
        block = min(tuning.MAX_TILED_BLOCK_ROWS, most)
    if problem.sees.cu_seqlens is not None:
        # As many blocks as threads, if there are fewer tasks.
        block = min(block, max(1, -(-int(problem.key.shape[-2]) * len(tasks) // threads)))
    causal, full = tuning.MIN_SEGMENTED_CAUSAL_ROWS, tuning.MIN_SEGMENTED_ROWS
    # Other modes are not cut along the sequence.
    least = {"causal": causal, "full": full}.get(problem.mode, inf)
    segments = threads if len(tasks) == 1 and _longest(problem) >= least else 1
    backward = min(block, _rows(problem, tuning.MAX_BLOCK_ELEMENTS, tuning.MAX_BLOCK_ROWS))
    if segments > 1 and problem.policy.chunk_size is None:
        # A segment is of whole blocks.
        multiple = tuning.SEGMENT_MULTIPLE
        block = min(block, multiple * -(-_longest(problem) // (multiple * segments)))
    resumable = _longest(problem) >= full
    return Plan(block, tasks, partial(run, threads), segments, backward, backward_tasks, resumable)


def _longest(problem: Problem) -> int:
    if problem.sees.cu_seqlens is not None and not problem.sees.is_causal:
        return int(np.diff(problem.sees.cu_seqlens).max(initial=0))
    return max(int(problem.query.shape[-2]), int(problem.key.shape[-2]))


def _longest_step(problem: Problem, block: int) -> int:
    """Longest run of keys or queries between stops, if runs are long; else the block length."""
    if problem.sees.key_stop is None or not problem.sees.key_stop.size:
        return block
    stops, readers = np.unique(problem.sees.key_stop, return_counts=True)
    runs = np.concatenate([np.diff(stops, prepend=0), readers])
    return min(block, int(runs.max())) if np.median(runs) >= tuning.MIN_BATCHED_RUN else block


def _block_rows(problem: Problem) -> int:
    if isinstance(problem.query_spec, Exact):
        return tuning.EXACT_BLOCK_ROWS
    if problem.exact.clusters is not None:
        return tuning.CLUSTERS_BLOCK_ROWS
    if problem.exact.window is not None:
        is_small = not problem.sees.is_causal or problem.num_features <= tuning.MAX_DECAYED_FEATURES
        is_long = 4 * problem.exact.window > problem.num_features
        if problem.weights.log_decay is not None and is_small and is_long:
            return tuning.DECAYED_WINDOW_BLOCK_ROWS
        most = _rows(problem, tuning.MAX_TILED_BLOCK_ELEMENTS, tuning.MAX_WINDOW_BLOCK_ROWS)
        fits = not problem.sees.is_causal and _longest(problem) <= most
        return tuning.MAX_WINDOW_BLOCK_ROWS if fits else tuning.MIN_WINDOW_BLOCK_ROWS
    if problem.sees.is_causal and isinstance(problem.query_spec, ColumnNormalized):
        return tuning.COLUMN_NORMALIZED_BLOCK_ROWS
    if problem.sees.is_causal and not (supports(problem.query_spec) and supports(problem.key_spec)):
        return _rows(problem, tuning.MAX_BLOCK_ELEMENTS // 2, tuning.MAX_BLOCK_ROWS // 2)
    return _rows(problem, tuning.MAX_TILED_BLOCK_ELEMENTS, tuning.MAX_TILED_BLOCK_ROWS)


def _rows(problem: Problem, max_elements: int, max_rows: int) -> int:
    return max(tuning.MIN_BLOCK_ROWS, min(max_elements // max(1, problem.num_features), max_rows))


def _heads_in_cache(problem: Problem, block: int, threads: int) -> int:
    """Heads of a task whose features, or whose pairs in a window, fit the cache together."""
    longest = max(1, _longest(problem))
    if problem.sees.local_window is not None:
        pairs = longest * min(longest, sum(problem.sees.local_window) + 1)
        return _shared(problem, tuning.MAX_BAND_ELEMENTS // pairs, threads)
    width = problem.num_features or longest
    # A causal block has features of both sides, and states of all its sub-blocks.
    sides = 2 if problem.sees.is_causal else 1
    most = tuning.MAX_BLOCK_ELEMENTS // (sides * width * min(longest, block))
    return _shared(problem, most, threads) if _are_apart(problem) else max(1, most)


def _are_apart(problem: Problem) -> bool:
    """Whether the bits of a head do not depend on the other heads of its task."""
    size = _longest(problem) * problem.num_features
    return not problem.sees.is_causal or size >= tuning.MIN_APART_ELEMENTS


def _batched_heads(problem: Problem, block: int, threads: int) -> int:
    """Heads batched into one task, so that Python works once for all of them.

    The count is limited by the cache. A rejected causal block is done head by head, so that
    batches change no bit.
    """
    specs = problem.query_spec, problem.key_spec
    is_cut = problem.exact.window is not None or problem.policy.chunk_size is not None
    if is_cut or not _are_apart(problem) or not all(supports(spec) for spec in specs):
        return 1
    rows = max(tuning.MIN_BATCHED_ROWS, min(_longest(problem), block))
    # A causal block also has the states after its sub-blocks.
    rows += problem.num_features * (2 if problem.sees.is_causal else 1)
    max_heads = tuning.MAX_BATCHED_ELEMENTS // (rows * (problem.value.shape[-1] + 1))
    if problem.mode == "full" and problem.weights.key_mask is None and not problem.want_log:
        max_heads *= tuning.FULL_BATCHES
    return _shared(problem, max_heads, threads)


def _shared(problem: Problem, max_heads: int, threads: int) -> int:
    """Heads of a task, at most ``max_heads``, so that no thread does more than its share."""
    heads = prod(problem.state_lead)
    if threads > 1 and _longest(problem) >= tuning.MIN_SEGMENTED_CAUSAL_ROWS:
        # Two long tasks a thread: one on a slow core has something to hand on.
        max_heads = min(max_heads, -(-heads // (2 * threads)))
    # Tasks of one size, as far as can be.
    batches = -(-heads // max(1, max_heads))
    for batch in range(-(-heads // max(1, batches)), 1, -1):
        sizes = part_sizes(problem.state_lead, batch)
        count = prod(-(-n // size) for n, size in zip(problem.state_lead, sizes, strict=True))
        if min(heads, -(-count // threads) * prod(sizes)) <= -(-heads // threads):
            return batch
    return 1


def _flops(problem: Problem) -> float:
    heads = prod(problem.lead)
    queries, keys = int(problem.query.shape[-2]), int(problem.key.shape[-2])
    width = int(problem.query.shape[-1] + problem.value.shape[-1])
    is_exact = isinstance(problem.query_spec, Exact)
    pairs = queries * keys if is_exact else (queries + keys) * problem.num_features
    return 2.0 * heads * pairs * width


def num_threads(asked: int | None) -> int:
    """Threads allowed: the caller's setting, else OMP_NUM_THREADS, else the cores.

    Our threads together with threads of BLAS are slower than either. So the default is 1
    without threadpoolctl, which holds BLAS at one thread.
    """
    if asked is not None:
        return asked
    if controller() is None:
        return 1
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
