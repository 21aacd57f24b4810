"""The walk over a recurrence: groups of chunks, forwards and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn._arrays import is_staged
from linattn._dispatch import find, is_declined, whole_function
from linattn._generic import units
from linattn._generic.feature_vjps import sum_to
from linattn._generic.loops import Layout, flat, padded, scan, whole_run
from linattn._home import at_home, node, wants_gradients
from linattn._numerics import DECAYED, exp_or_zero, ignore_fp_warnings
from linattn._recurrence.chunks import Chunks, pull_back_chunks, scan_chunks
from linattn._recurrence.decay import chunk_decay, no_decay, one_part
from linattn._recurrence.problem import sequences
from linattn.typing import Array, Recurrence

GROUP_SIZE = 2**18
"""Entries of the triangles of a group, all heads and chunks together: they stay in a cache."""


TRACED_CHUNKS = 2
"""Chunks of a group that JAX compiles."""


class _Group(NamedTuple):
    """Chunks that are solved together."""

    rows: slice
    chunk_size: int
    """A power of two; a last chunk that is shorter is filled up with tokens that do nothing."""


def _groups(problem: Recurrence) -> list[_Group]:
    length, c = problem.key.shape[-2], _power_of_two(problem.chunk_size)
    heads = max(1, math.prod(problem.lead))
    rows = c * max(1, GROUP_SIZE // (heads * c * c))
    whole = length - length % c
    groups = [_Group(slice(i, min(i + rows, whole)), c) for i in range(0, whole, rows)]
    if whole < length:
        groups.append(_Group(slice(whole, length), _power_of_two(length - whole)))
    return groups


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _chunked(problem: Recurrence, tokens: Array, group: _Group) -> Array:
    """Tokens of a group as ``(..., g, c, n)`` in the accumulation dtype, zeros after the last."""
    xp = problem.xp
    tokens = xp.astype(tokens[..., group.rows, :], problem.dtype, copy=False)
    *lead, length, n = tokens.shape
    missing = -length % group.chunk_size
    if missing:
        device = array_api_compat.device(tokens)
        zeros = xp.zeros((*lead, missing, n), dtype=problem.dtype, device=device)
        tokens = xp.concat([tokens, zeros], axis=-2)
    count = (length + missing) // group.chunk_size
    return one_part(xp.reshape(tokens, (*lead, count, group.chunk_size, n)))


def _tokens(problem: Recurrence, chunked: Array, group: _Group) -> Array:
    """Back from ``(..., g, c, n)`` to the tokens ``(..., rows, n)`` that there are."""
    *lead, count, c, n = chunked.shape
    tokens = problem.xp.reshape(chunked, (*lead, count * c, n))
    return tokens[..., : group.rows.stop - group.rows.start, :]


def _chunks(problem: Recurrence, group: _Group) -> Chunks:
    chunked: Iterator[Any] = (
        None if x is None else _chunked(problem, x, group) for x in _tokens_of(problem)
    )
    query, key, value, log_decay, beta, erase_key, read_key = chunked
    decay = no_decay(key) if log_decay is None else chunk_decay(log_decay)
    return Chunks(problem.scale * query, key, value, beta, decay, erase_key, read_key)


def _tokens_of(problem: Recurrence) -> list[Any]:
    return [getattr(problem, name) for name in problem.TOKENS]


def _initial_state(problem: Recurrence) -> Array:
    shape = (*problem.state_lead, problem.key.shape[-1], problem.value.shape[-1])
    device = array_api_compat.device(problem.key)
    zeros = problem.xp.zeros(shape, dtype=problem.dtype, device=device)
    # A sum shares no memory with the caller's state, and stays on a framework's tape.
    return zeros if problem.initial_state is None else problem.initial_state + zeros


@at_home()
def solve(problem: Recurrence) -> tuple[Array, Array]:
    """Output and state after the last token, by the backend if it does the problem."""
    problem, log = units.recurrence_in_units(problem)
    output, state = _solve(problem)
    return units.times_power(output, log), units.times_power(state, log)


def _solve(problem: Recurrence) -> tuple[Array, Array]:
    xp = problem.xp
    if _is_looped(problem):
        return _scan_groups(problem)
    if problem.borders is not None:
        outputs, states = zip(*map(_solve, sequences(problem)), strict=True)
        return xp.concat(outputs, axis=-2), xp.stack(states)
    answer = _whole("recurrence", problem)
    return _solve_in_groups(problem)[:2] if answer is None else (answer[0], answer[1])


def _whole(name: str, problem: Recurrence, *cotangents: Array) -> Any:
    """Answer of the backend, or None."""
    whole = whole_function(name, problem)
    if whole is None:
        return None
    with ignore_fp_warnings():
        answer: Any = whole(problem, *cotangents)
    return None if is_declined(answer) else answer


@at_home()
def solve_for_pullback(problem: Recurrence) -> tuple[Array, Array, list[Any] | None]:
    """Output, state after the last token, and the states before groups, for a pullback.

    The states before groups are None if the backend has its own pullback.
    """
    problem, log = units.recurrence_in_units(problem)
    output, state, before = _solve_for_pullback(problem)
    return units.times_power(output, log), units.times_power(state, log), before


def _solve_for_pullback(problem: Recurrence) -> tuple[Array, Array, list[Any] | None]:
    xp = problem.xp
    if _is_looped(problem):
        return *_scan_groups(problem), None
    if problem.borders is not None:
        solved = [_solve_for_pullback(sequence) for sequence in sequences(problem)]
        outputs, states, before = zip(*solved, strict=True)
        return xp.concat(outputs, axis=-2), xp.stack(states), list(before)
    if find("recurrence_vjp", xp) is None:
        return _solve_in_groups(problem)
    return *_solve(problem), None


def _solve_in_groups(problem: Recurrence) -> tuple[Array, Array, list[Any]]:
    xp = problem.xp
    with ignore_fp_warnings():
        state = _initial_state(problem)
        device = array_api_compat.device(problem.value)
        like: dict[str, Any] = {"dtype": problem.query.dtype, "device": device}
        parts = [xp.zeros((*problem.lead, 0, problem.value.shape[-1]), **like)]
        before_groups = []
        for group in _groups(problem):
            before_groups.append(state)
            output, state = scan_chunks(_chunks(problem, group), state)
            parts.append(xp.astype(_tokens(problem, output, group), like["dtype"], copy=False))
        return xp.concat(parts, axis=-2), state, before_groups


def _is_looped(problem: Recurrence) -> bool:
    """Whether JAX compiles a problem of more than one group."""
    arrays = problem.query, problem.key, problem.value
    return problem.key.shape[-2] > TRACED_CHUNKS * problem.chunk_size and any(
        map(is_staged, arrays)
    )


def solve_in_loop(problem: Recurrence, interval: int) -> tuple[Array, list[Array]] | None:
    """Output, and states after every ``interval`` tokens and the last; None if not in a loop."""
    if not _is_looped(problem):
        return None
    length = problem.key.shape[-2]
    borders = [*range(0, length, interval), length]
    problem, log = units.recurrence_in_units(problem)
    output, states = _scan_groups(replace(problem, borders=borders), interval)
    return units.times_power(output, log), [units.times_power(x, log) for x in states]


def _scan_groups(problem: Recurrence, interval: int | None = None) -> tuple[Array, Array]:
    """Solve equal groups in a loop, which JAX compiles alike at every length.

    ``interval``: tokens between borders at which the state goes on.
    """
    xp, length, borders = problem.xp, problem.key.shape[-2], problem.borders
    size, layout = TRACED_CHUNKS * _power_of_two(problem.chunk_size), None
    if borders is not None:
        runs = [whole_run(*ends) for ends in pairwise(borders)]
        layout, places = Layout.of(runs, len(runs), size)
        size = layout.size
        if interval is not None:
            # Only the first run begins anew.
            layout = layout._replace(starts=layout.starts + interval * layout.sums)
        before, lead = problem.initial_state, (len(runs), *problem.state_lead)
        if before is not None and interval is None:
            # States may have fewer axes of heads than others, all behind that of the sequences.
            ones = (1,) * (len(lead) + 2 - before.ndim)
            before = xp.reshape(before, (len(runs), *ones, *before.shape[1:]))
        problem = replace(problem, state_lead=lead, initial_state=before)
    group = _Group(slice(0, size), size // TRACED_CHUNKS)

    def placed(x: Array) -> Array:
        if layout is None:
            return padded(x, -length % size)
        taken = xp.take(x, xp.asarray(np.maximum(layout.keys, 0)), axis=-2)
        return xp.where(xp.asarray(layout.keys[:, None] >= 0), taken, xp.zeros_like(taken))

    def step(state: Array, _: Any, tokens: dict[str, Array]) -> tuple[Array, Array]:
        output, state = scan_chunks(_chunks(replace(problem, **tokens), group), state)
        return state, xp.astype(_tokens(problem, output, group), problem.query.dtype, copy=False)

    given = {name: getattr(problem, name) for name in problem.TOKENS}
    tokens = {name: placed(x) for name, x in given.items() if x is not None}
    state, rows = scan(step, _initial_state(problem), tokens, layout, size)
    output = flat(rows)[..., :length, :]
    if layout is not None:
        output = xp.take(flat(rows), xp.asarray(np.concatenate(places)), axis=-2)
    return output, state


@at_home()
def pull_back(
    problem: Recurrence, before: list[Any] | None, grad_output: Array, grad_state: Array
) -> list[Array]:
    """Gradients by the arrays of tokens, in the order of `Recurrence.TOKENS`, and initial state.

    In the accumulation dtype, None for arguments not given. ``before`` is the third result of
    :func:`solve_for_pullback`, or None; ``grad_state`` may be None.
    """
    problem, value = units.recurrence_in_units(problem)
    log = units.unit_log(units.recurrence_heads(problem), grad_output, grad_state)
    grads = [units.times_power(x, -log) for x in (grad_output, grad_state)]
    found = _pull_back(problem, before, *grads)
    # Gradients of values and of the state before them are linear in cotangents alone.
    logs = [log if i in (2, len(found) - 1) else log + value for i in range(len(found))]
    return [units.times_power(x, each) for x, each in zip(found, logs, strict=True)]


def _pull_back(
    problem: Recurrence, before: list[Any] | None, grad_output: Array, grad_state: Array
) -> list[Array]:
    xp = problem.xp
    if _is_looped(problem):
        return _pull_loop(problem, grad_output, grad_state)
    if problem.borders is not None:
        assert before is not None
        gradients = [
            _pull_back(
                sequence,
                states,
                grad_output[..., start:stop, :],
                None if grad_state is None else grad_state[i, ...],
            )
            for i, (sequence, states, (start, stop)) in enumerate(
                zip(sequences(problem), before, pairwise(problem.borders), strict=True)
            )
        ]
        *of_tokens, of_state = zip(*gradients, strict=True)
        joined = [None if part[0] is None else xp.concat(part, axis=-2) for part in of_tokens]
        return [*joined, None if of_state[0] is None else xp.stack(of_state)]
    if before is None:
        answer = _whole("recurrence_vjp", problem, grad_output, grad_state)
        if answer is not None:
            *of_tokens, of_state = answer
            return [*of_tokens, *[None] * (len(problem.TOKENS) - len(of_tokens)), of_state]
        before = _solve_in_groups(problem)[2]
    arrays = _tokens_of(problem)
    given = [index for index, array in enumerate(arrays) if array is not None]
    parts = {index: [xp.astype(arrays[index][..., :0, :], problem.dtype)] for index in given}
    with ignore_fp_warnings():
        if grad_state is None:
            grad_state = xp.zeros_like(_initial_state(problem))
        for group, state in zip(reversed(_groups(problem)), reversed(before), strict=True):
            grad = _chunked(problem, grad_output, group)
            of_group, grad_state = pull_back_chunks(
                _chunks(problem, group), state, grad, grad_state
            )
            for index in given:
                gradient = _tokens(problem, of_group[index], group)
                parts[index].append(sum_to(gradient, tuple(arrays[index].shape[:-2]), 2))
        together: list[Array] = [
            xp.concat(parts[index][::-1], axis=-2) if index in parts else None
            for index in range(len(arrays))
        ]
        together[0] = problem.scale * together[0]
        if problem.initial_state is None:
            return [*together, None]
        return [*together, sum_to(grad_state, tuple(problem.initial_state.shape[:-2]), 2)]


def _pull_loop(problem: Recurrence, grad_output: Array, grad_state: Array) -> list[Array]:
    """Let JAX differentiate its loop."""
    given = {name: x for name, x in _tape_arrays(problem).items() if x is not None}
    results, pullback = sys.modules["jax"].vjp(
        lambda arrays: _scan_groups(_with_arrays(problem, arrays)), given
    )
    if grad_state is None:
        grad_state = problem.xp.zeros_like(results[1])
    (found,) = pullback((problem.xp.astype(grad_output, results[0].dtype), grad_state))
    return [found.get(name) for name in _NAMES]


@at_home()
def step(problem: Recurrence) -> tuple[Array, Array]:
    """Take one token, L = 1: its output ``(..., e)`` and the state after it."""
    xp, dtype, log = problem.xp, problem.dtype, 0
    if not units.is_moderate(problem.value):
        problem, log = units.recurrence_in_units(problem)
    with ignore_fp_warnings():
        state = _initial_state(problem)
        query, key, value = (
            xp.astype(row, dtype, copy=False) for row in (problem.query, problem.key, problem.value)
        )
        erased = None
        if problem.read_key is not None:
            read_key, erase_key = (
                xp.astype(row, dtype, copy=False) for row in (problem.read_key, problem.erase_key)
            )
            erased = xp.matrix_transpose(erase_key) * xp.matmul(read_key, state)
        if problem.log_decay is not None:
            remaining = exp_or_zero(xp.astype(problem.log_decay, dtype, copy=False), least=DECAYED)
            state = xp.matrix_transpose(remaining) * state
        if problem.beta is not None:
            beta = xp.astype(problem.beta, dtype, copy=False)
            value = beta * (value - xp.matmul(key, state))
        written = xp.matrix_transpose(key) * value
        state = state + (written if erased is None else written - erased)
        output = xp.matmul(problem.scale * query, state)
        output = xp.astype(output[..., 0, :], problem.query.dtype, copy=False)
        return units.token_times(output, log), units.times_power(state, log)


# On torch's tape -------------------------------------------------------------------------------

_NAMES = (*Recurrence.TOKENS, "initial_state")


def _tape_arrays(problem: Recurrence) -> dict[str, Array]:
    return {name: getattr(problem, name) for name in _NAMES}


def _with_arrays(problem: Recurrence, arrays: dict[str, Array]) -> Recurrence:
    return replace(problem, **arrays)


def _solve_node(problem: Recurrence, _: bool, *, taped: bool = False) -> Any:
    if taped:
        return [*solve(problem)], None
    output, state, before = solve_for_pullback(problem)
    return [output, state], before


def _pull_node(
    problem: Recurrence, before: Any, _: Any, grad_output: Array, grad_state: Array
) -> dict[str, Array]:
    found = dict(zip(_NAMES, pull_back(problem, before, grad_output, grad_state), strict=True))
    arrays = _tape_arrays(problem)

    def like(x: Array, array: Array) -> Array:
        summed = sum_to(x, tuple(array.shape), 0)
        return problem.xp.astype(summed, array.dtype, copy=False)

    return {n: None if x is None else like(x, arrays[n]) for n, x in found.items()}


def attend(problem: Recurrence) -> tuple[Array, Array]:
    """Do as `solve`, as one node of torch's tape if torch asks for gradients."""
    if wants_gradients(problem):
        kind = node.Kind(_tape_arrays, _with_arrays, _solve_node, _pull_node)
        found = node.on_tape(kind, problem, True)
        if found is not None:
            output, state = found
            return output, state
    return solve(problem)
