"""The driver of gradients: problems, packed ones and heads apart, each pulled back by its steps.

Everything is computed again from query, key and value; beside the gradients themselves only some
states of the forward pass are stored, or what a backend's own pullback keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import array_api_compat

from linattn import _arrays, _checks, _dispatch
from linattn._dispatch import block_functions
from linattn._driver import traced
from linattn._driver.blocks import take, take_problem, task_index
from linattn._driver.gradient_rows import (
    Checkpoints,
    GradientRows,
    Pullback,
    arguments_of,
    empty_adjoint,
)
from linattn._driver.linear_vjps import pull_linear
from linattn._driver.packed import Batch, PackedRows, batches, join_sequences
from linattn._driver.pair_vjps import pull_exact, pull_parts
from linattn._driver.runner import head_tasks, initial_state, join_tasks, planned, run_tasks
from linattn._generic import units
from linattn._generic.feature_vjps import check_differentiable, sum_to
from linattn._generic.hierarchical import pad
from linattn._home import at_home, exact, home_of, node
from linattn.typing import Array, Cotangent, Exponential, Index, Pointwise, Problem, State


class Gradients(NamedTuple):
    """Gradients, each with the shape of its argument; ``state``: by ``kvz``, or None."""

    query: Array
    key: Array
    value: Array
    state: Array
    key_bias: Array = None
    """``(..., S, 1)``, or None without a bias."""
    log_decay: Array = None
    """``(..., S, 1)``, or None without a decay."""


def checkpoints_for(problem: Problem) -> Checkpoints | None:
    """Return an empty store of checkpoints if a backend pulls back a whole block, else None."""
    specs = (problem.query_spec, problem.key_spec)
    one_state = problem.mode == "full" and problem.sees.cu_seqlens is None
    walked = one_state or problem.mode == "causal"
    covered = walked and problem.normalize and problem.weights.log_decay is None
    if not covered or not all(isinstance(s, Exponential | Pointwise) for s in specs):
        return None
    home = home_of(problem.query)
    xp = problem.xp if home is None else home.namespace
    pulled = any(_dispatch.find(name, xp) for name in ("scan_vjp", "attention_pullback"))
    return Checkpoints(xp) if pulled else None


def state_cotangent(grad_state: Any, log_scale: Array, problem: Problem) -> State | None:
    """Return the cotangent of the last state: ``grad_state exp(-log_scale)``."""
    if grad_state is None:
        return None
    if log_scale is None:
        raise ValueError(
            "grad_state needs return_state=True: without it there is no state to have one"
        )
    shape = (*log_scale.shape, problem.value.shape[-1] + 1)
    _checks.check_cotangent("grad_state", grad_state, "state.kvz", shape, log_scale)
    xp = problem.xp
    # -inf stays, for what has no key: by a sign, because Dask's expressions have no `where`, and
    # take numbers for float64.
    sign = 2 * xp.astype(log_scale == -xp.inf, log_scale.dtype, copy=False) - 1
    log = xp.astype(sign * log_scale, log_scale.dtype, copy=False)
    return State(grad_state, log, 0)


def _pull_by_torch(*arguments: Any) -> Gradients | None:
    found = exact.pull(*arguments)
    if found is None:
        return None
    query, key, value = found
    return Gradients(query, key, value, None)


@at_home(_pull_by_torch)
def pull(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None = None
) -> Gradients:
    """Return the gradients of attention; ``checkpoints``: states of the forward pass."""
    checkpoints = checkpoints and checkpoints.of(problem)
    value = units.value_log(problem, whole=True)
    if not _are_far_apart(problem, cotangent, value):
        return _pull_in_units(problem, cotangent, value, checkpoints)
    output, numerators, normalizers = _in_three(cotangent)
    parts = [
        _pull_in_units(problem, output, value, checkpoints),
        _pull_in_units(problem, numerators, value, checkpoints),
        _pull_in_units(problem, normalizers, 0, None),
    ]
    sums = (None if x is None else x + y + z for x, y, z in zip(*parts, strict=True))
    return Gradients(*sums)


def _are_far_apart(problem: Problem, cotangent: Cotangent, value: Any) -> bool:
    """Whether no unit suits the cotangents of output, numerators and normalizers together.

    Normalizers are divided by the units of values too. Numbers of lazy arrays are not read.
    """
    output, state = cotangent
    if state is None or problem.policy.lazy:
        return False
    sizes = [(output, 0), (state.kvz[..., :-1], 0), (state.kvz[..., -1:], value)]
    return units.are_far_apart(sizes, units.heads_of(problem))


def _in_three(cotangent: Cotangent) -> tuple[Cotangent, Cotangent, Cotangent]:
    """Divide into the cotangents of the output, and of a state's numerators and normalizers."""
    output, state = cotangent
    assert state is not None
    xp, zeros = _arrays.namespace(output), _arrays.namespace(output).zeros_like
    numerators, normalizers = state.kvz[..., :-1], state.kvz[..., -1:]
    first = xp.concat([numerators, zeros(normalizers)], axis=-1)
    second = xp.concat([zeros(numerators), normalizers], axis=-1)
    return (
        Cotangent(output, None),
        Cotangent(zeros(output), state._replace(kvz=first)),
        Cotangent(zeros(output), state._replace(kvz=second)),
    )


def _pull_in_units(
    problem: Problem, cotangent: Cotangent, value: Any, checkpoints: Checkpoints | None
) -> Gradients:
    """Do as `pull`; ``value``: log2 of the units of values."""
    cotangent, grad = _in_units(cotangent, units.heads_of(problem), value)
    found = _pull(units.in_units(problem, value), cotangent, checkpoints)
    if isinstance(value, int) and isinstance(grad, int):
        return found
    # Gradients are linear in cotangents, and in values too but for values and numerators.
    logs = dict.fromkeys(found._fields, value + grad) | {"value": grad, "state": 0}
    scaled = {
        name: units.times_power(x, logs[name], in_place=True) for name, x in found._asdict().items()
    }
    scaled["state"] = units.numerators_times(found.state, grad, value + grad)
    return Gradients(**scaled)


def _in_units(cotangent: Cotangent, heads: tuple[int, ...], value: Any) -> tuple[Cotangent, Any]:
    """Return cotangents in units of a power of 2, with values in units of ``2^value``; its log2."""
    output, state = cotangent
    log = units.unit_log(heads, output, None if state is None else state.kvz, whole=True)
    if state is not None:
        kvz = units.numerators_times(state.kvz, -log, -log - value)
        state = state._replace(kvz=kvz)
    return Cotangent(units.times_power(output, -log), state), log


def _pull(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None = None
) -> Gradients:
    if 0 in problem.lead:
        return _pull_state(problem, cotangent)
    if traced.covers(problem):
        return _pull_loop(problem, cotangent)
    if problem.sees.cu_seqlens is not None:
        return _pull_packed(problem, cotangent, checkpoints)
    if problem.sees.key_stop is not None and problem.sees.key_stop.ndim > 1:
        return _pull_heads(problem, cotangent)
    pullback = None if checkpoints is None else checkpoints.pullback
    if pullback is not None:
        answer: Any = pullback(cotangent)
        if not _dispatch.is_declined(answer):
            return Gradients(*answer)
    # No backend pulls back an exact window; what a pullback declined, another would decline.
    by_blocks = problem.mode == "window" or pullback is not None
    whole = None if by_blocks else _dispatch.whole_function("attention_vjp", problem)
    if whole is not None:
        answer = whole(problem, cotangent)
        if not _dispatch.is_declined(answer):
            return Gradients(*answer)

    functions = block_functions(problem.xp)
    # No segments: a causal segment needs the adjoint of all tokens after it, which takes half as
    # long as the whole pullback. One head alone is done on one thread.
    plan = functions.plan(planned(problem)).for_gradients()
    rows = {
        name: GradientRows(problem, array, plan.tasks)
        for name, array in arguments_of(problem).items()
    }
    states: list[tuple[Index, Array]] = []
    several = problem.mode in ("window", "two-sided")

    def pull_task(task: Index) -> Iterator[State | None]:
        part, part_cotangent = take_problem(problem, task), _take_cotangent(cotangent, task)
        whole = Pullback(part, part_cotangent, functions, plan.block_size, task, rows)
        if problem.mode == "exact":
            yield from pull_exact(whole)
            return
        in_parts = several or problem.weights.log_decay is not None
        pull = whole.in_parts() if in_parts else whole
        for adjoint in pull_parts(pull) if several else pull_linear(pull, checkpoints):
            yield adjoint
        if in_parts:
            whole.finish(pull)
        if problem.state is not None:
            states.append((task, _state_gradient(initial_state(part), adjoint)))

    run_tasks(plan, pull_task)
    state = None if problem.state is None else _join(problem, states)
    return Gradients(state=state, **{name: each.result() for name, each in rows.items()})


def _pull_loop(problem: Problem, cotangent: Cotangent) -> Gradients:
    """Let JAX differentiate its loop."""
    xp, of_state = problem.xp, cotangent.state

    def solve(arrays: dict[str, Array]) -> Any:
        part, functions = _with_arrays(problem, arrays), block_functions(xp)
        output, state, _ = traced.solve(part, functions, of_state is not None)
        if of_state is None or state is None:
            return output, None
        log = state.log_scale + of_state.log_scale
        log = xp.where(state.log_scale == -xp.inf, xp.zeros_like(log), log)
        return output, state.kvz * xp.exp(log)[..., None]

    given = {name: x for name, x in _tape_arrays(problem).items() if x is not None}
    (output, _), pullback = sys.modules["jax"].vjp(solve, given)
    grad = xp.astype(cotangent.output, output.dtype, copy=False)
    (found,) = pullback((grad, None if of_state is None else of_state.kvz))
    return Gradients(**{name: found.get(name) for name in Gradients._fields})


def _pull_state(problem: Problem, cotangent: Cotangent) -> Gradients:
    """Gradients of an output without heads: only the cotangent of the state contributes."""
    xp, device = problem.xp, array_api_compat.device(problem.query)
    if cotangent.state is None or 0 in problem.state_lead:
        state = None if problem.state is None else xp.zeros_like(problem.state.kvz)
        arguments = arguments_of(problem)
        return Gradients(state=state, **{k: xp.zeros_like(x) for k, x in arguments.items()})
    # One query in place of none; its output is not used.
    shape = (*problem.state_lead, problem.query.shape[-2], problem.value.shape[-1])
    query = xp.zeros(problem.query.shape[-2:], dtype=problem.query.dtype, device=device)
    unread = xp.zeros(shape, dtype=problem.query.dtype, device=device)
    part = problem.replace(query=query, lead=problem.state_lead)
    found = _pull(part, cotangent._replace(output=unread))
    return found._replace(query=xp.zeros_like(problem.query))


def _pull_packed(
    problem: Problem, cotangent: Cotangent, checkpoints: Checkpoints | None
) -> Gradients:
    """Gradients of the sequences of a packed problem."""
    rows = {
        name: PackedRows(problem, tuple(array.shape), array.dtype)
        for name, array in arguments_of(problem).items()
    }
    states: list[tuple[Batch, Array]] = []
    for number, batch in enumerate(batches(problem)):
        part = batch.problem(problem, keeps_state=cotangent.state is not None)
        store = None if checkpoints is None else checkpoints.part(number)
        gradients = _pull(part, batch.cotangent(cotangent), store)
        for name, each in rows.items():
            # A backend may return one number for all tokens, if its gradient is summed later.
            each.write(batch, pad(getattr(gradients, name), batch.longest))
        states.append((batch, gradients.state))
    state = None if problem.state is None else join_sequences(problem, states, 2)
    return Gradients(state=state, **{name: each.result() for name, each in rows.items()})


def _pull_heads(problem: Problem, cotangent: Cotangent) -> Gradients:
    """Gradients where heads have different ``key_stop``: one pullback for each task of heads."""
    tasks, xp, wholes = head_tasks(problem), problem.xp, arguments_of(problem)
    # Gradients of what heads share are rounded once, when all are added.
    names = ("query", "key", "value")
    wide = problem.replace(**{n: xp.astype(wholes[n], problem.dtype, copy=False) for n in names})
    parts = [_pull(take_problem(wide, task), _take_cotangent(cotangent, task)) for task in tasks]
    if problem.state is not None:
        wholes["state"] = problem.state.kvz
    joined: dict[str, Array] = {"state": None}
    for name, x in wholes.items():
        found = join_tasks(tasks, [getattr(part, name) for part in parts], tuple(x.shape[:-2]))
        joined[name] = xp.astype(found, x.dtype, copy=False)
    return Gradients(**joined)


def _take_cotangent(cotangent: Cotangent, task: Index) -> Cotangent:
    output, state = cotangent
    if state is not None:
        state = State(take(state.kvz, 2, task), take(state.log_scale, 1, task), 0)
    return Cotangent(take(output, 2, task), state)


# States -----------------------------------------------------------------------------------------


def _state_gradient(before: State, adjoint: State) -> Array:
    """Cotangent of a state's ``kvz``, its log scale held constant."""
    xp = _arrays.namespace(adjoint.kvz)
    return adjoint.kvz * xp.exp(adjoint.log_scale + before.log_scale)[..., None]


def _join(problem: Problem, states: list[tuple[Index, Array]]) -> Array:
    """Put the state gradients of all tasks together, with the shape of the caller's state."""
    assert problem.state is not None
    lead = tuple(problem.state.kvz.shape[:-2])
    if len(states) == 1:
        return sum_to(states[0][1], lead, 2)
    whole = empty_adjoint(problem, problem.state).kvz
    for task, gradient in states:
        whole[task_index(tuple(whole.shape), 2, task)] = gradient
    return sum_to(whole, lead, 2)


# On torch's tape -------------------------------------------------------------------------------


def _tape_arrays(problem: Problem) -> dict[str, Array]:
    state, weights = problem.state, problem.weights
    return {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "key_bias": weights.key_bias,
        "log_decay": weights.log_decay,
        "state": None if state is None else state.kvz,
    }


def _with_arrays(problem: Problem, arrays: dict[str, Array]) -> Problem:
    of_weights = {n: arrays[n] for n in ("key_bias", "log_decay") if n in arrays}
    changes: dict[str, Any] = {n: arrays[n] for n in ("query", "key", "value") if n in arrays}
    if problem.state is not None and "state" in arrays:
        changes["state"] = problem.state._replace(kvz=arrays["state"])
    return problem.replace(weights=problem.weights._replace(**of_weights), **changes)


def _solve(solve: Any, problem: Problem, return_state: bool, *, taped: bool = False) -> Any:
    if not problem.num_features:
        logged = problem.replace(want_log=not taped)
        output, _, log = solve(logged, return_state=False)
        return [output], log
    checkpoints = None if taped else checkpoints_for(problem)
    output, state, _ = solve(problem, return_state=return_state, checkpoints=checkpoints)
    results = [output]
    if return_state:
        assert state is not None
        results += [state.kvz, state.log_scale]
    return results, checkpoints


def _pull_node(
    problem: Problem, stored: Any, needed: Any, grad: Array, *grad_state: Array
) -> dict[str, Array]:
    of_state = None
    if not problem.num_features:
        stored = exact.Forward(needed[0], stored)
    elif needed:
        of_state = state_cotangent(grad_state[0], needed[0], problem)
    found = pull(problem, Cotangent(grad, of_state), stored)._asdict()
    decay = problem.weights.log_decay
    if decay is not None:
        summed = sum_to(found["log_decay"], tuple(decay.shape), 0)
        found["log_decay"] = problem.xp.astype(summed, decay.dtype, copy=False)
    return found


def on_tape(
    solve: Any, problem: Problem, return_state: bool
) -> tuple[Array, State | None, Array | None] | None:
    """Return what ``solve`` does, as one node of torch's tape; None without a pullback for it."""
    kind = node.Kind(_tape_arrays, _with_arrays, partial(_solve, solve), _pull_node)
    found = node.on_tape(kind, problem, return_state) if _has_pullback(problem) else None
    if found is None:
        return None
    output, *rest = found
    if not return_state:
        return output, None, None
    (kvz, log_scale), before = rest, 0 if problem.state is None else problem.state.length
    return output, State(kvz, log_scale, before + problem.longest), None


def _has_pullback(problem: Problem) -> bool:
    if problem.exact.clusters is not None:
        return False
    try:
        for spec in (problem.query_spec, problem.key_spec) if problem.num_features else ():
            check_differentiable(spec, problem.feature_map)
    except NotImplementedError:
        return False
    return True
