"""A recurrence in parts, each after the state of the one before: the states on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from linattn import _checks
from linattn._arrays import namespace
from linattn._recurrence.problem import tokens_of
from linattn._recurrence.walk import pull_back
from linattn.typing import Array, Recurrence


def parts_of(problem: Recurrence, interval: Any) -> list[Recurrence]:
    """Cut a problem after every ``interval`` tokens; None leaves it whole."""
    if interval is None:
        return [problem]
    interval = _checks.check_positive_int("return_states_every", interval)
    if problem.borders is not None:
        raise ValueError(
            f"return_states_every must be None with cu_seqlens, got {interval}; call "
            f"linear_recurrence for each sequence"
        )
    length = problem.key.shape[-2]
    starts = range(0, max(1, length), interval)
    return [tokens_of(problem, slice(i, min(i + interval, length))) for i in starts]


def solve_parts(parts: list[Recurrence], solve: Callable[[Recurrence], Any]) -> Any:
    """Return the output, the states after all parts, and the parts after their states.

    Last come lists of what else ``solve`` returns of each.
    """
    found: list[Any] = []
    for part in parts:
        solved = replace(part, initial_state=found[-1][1]) if found else part
        output, state, *before = solve(solved)
        found.append((output, state, solved, before))
    outputs, *of_parts = map(list, zip(*found, strict=True))
    return joined(outputs), *of_parts


def pull_back_parts(
    parts: list[Recurrence],
    before: list[Any],
    grad_output: Array,
    grad_state: Array | None,
    grad_states: Sequence[Array | None],
) -> list[Array]:
    """Gradients as of :func:`pull_back`; ``grad_states`` are by states after the first parts."""
    found: list[list[Array]] = []
    stop = grad_output.shape[-2]
    for i in reversed(range(len(parts))):
        given = [g for g in (grad_state, *grad_states[i : i + 1]) if g is not None]
        grad_state = sum(given[1:], given[0]) if given else None
        start = stop - parts[i].key.shape[-2]
        *tokens, grad_state = pull_back(
            parts[i], before[i][0], grad_output[..., start:stop, :], grad_state
        )
        found.append(tokens)
        stop = start
    gradients = [None if x[0] is None else joined(x[::-1]) for x in zip(*found, strict=True)]
    return [*gradients, grad_state]


def joined(tokens: Sequence[Array]) -> Array:
    """Join arrays along the axis of tokens."""
    return tokens[0] if len(tokens) == 1 else namespace(tokens[0]).concat(tokens, axis=-2)
