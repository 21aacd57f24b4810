"""Calls whose gradients torch asks for: one node of its tape, forward and backward at home.

The node keeps the arrays of the problem and some states, as a pullback of
:func:`linattn.linear_attention_vjp` does. A backward pass that is to be differentiated again
(``create_graph=True``) repeats the call by code of torch. So does every call that the driver has no
pullback for, or in which torch asks for a gradient by another array, such as a parameter of a map.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from linattn._driver import backward, forward
from linattn._generic.feature_vjps import check_differentiable, sum_to
from linattn._home import arrays_of, home_of
from linattn._recurrence import walk
from linattn._torch_exact import Kept
from linattn.typing import Array, Cotangent, Problem, Recurrence, State

Arrays = dict[str, Array]


class _Kind(NamedTuple):
    """What can be differentiated of a kind of problem, and how."""

    arrays: Callable[[Any], Arrays]
    """Arrays of a problem that have a gradient, by name; None for those that it lacks."""
    insert: Callable[[Any, Arrays], Any]
    """Return the problem with other arrays."""
    solve: Callable[..., tuple[list[Array], Any]]
    """``solve(problem, return_state)``: the results, and what the pullback wants of it."""
    pull: Callable[..., Arrays]
    """``pull(problem, kept, results, *cotangents)``: gradients by name."""


def solve(problem: Problem, *, return_state: bool) -> tuple[Array, State | None, Array | None]:
    """Do what the driver does, as one node of torch's tape where torch asks for gradients."""
    if not _is_taped(problem) or not _has_pullback(problem):
        return forward.solve(problem, return_state=return_state)
    output, *rest = _apply(_ATTENTION, problem, return_state)
    if not return_state:
        return output, None, None
    (kvz, log_scale), before = rest, 0 if problem.state is None else problem.state.length
    return output, State(kvz, log_scale, before + problem.key.shape[-2]), None


def solve_recurrence(problem: Recurrence) -> tuple[Array, Array]:
    """Do what the walk of a recurrence does, as :func:`solve`."""
    if not _is_taped(problem):
        return walk.solve(problem)
    output, state = _apply(_RECURRENCE, problem, True)
    return output, state


def _is_taped(problem: Any) -> bool:
    """Whether torch asks for gradients, by arrays of the problem that have one, and at home."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(problem.query, torch.Tensor) or not torch.is_grad_enabled():
        return False
    home, arrays = home_of(problem.query), arrays_of(problem)
    if home is None or arrays is None:
        return False
    kind = _RECURRENCE if isinstance(problem, Recurrence) else _ATTENTION
    wanted = {id(x) for x in arrays if x.requires_grad}
    if not wanted or not wanted <= {id(x) for x in kind.arrays(problem).values()}:
        return False
    with torch.no_grad():
        return home.covers(problem)


def _has_pullback(problem: Problem) -> bool:
    if problem.want_log or problem.exact.clusters is not None or 0 in problem.lead:
        return False
    try:
        for spec in (problem.query_spec, problem.key_spec) if problem.num_features else ():
            check_differentiable(spec, problem.feature_map)
        backward.check_window(problem)
    except NotImplementedError:
        return False
    return True


def _apply(kind: _Kind, problem: Any, return_state: bool) -> Any:
    arrays = {name: x for name, x in kind.arrays(problem).items() if x is not None}
    bare = kind.insert(problem, dict.fromkeys(arrays))
    call = _Call(kind, bare, return_state, tuple(arrays))
    return _node().apply(call, *arrays.values())


class _Call(NamedTuple):
    """A call without its arrays."""

    kind: _Kind
    bare: Any
    return_state: bool
    names: tuple[str, ...]

    @property
    def keeps_output(self) -> bool:
        """Whether the pullback reads the output: that of exact attention does."""
        return isinstance(self.bare, Problem) and not self.bare.num_features

    def problem(self, tensors: Any) -> Any:
        return self.kind.insert(self.bare, dict(zip(self.names, tensors, strict=True)))


@cache
def _node() -> Any:
    torch: Any = sys.modules["torch"]

    class Attend(torch.autograd.Function):  # type: ignore[misc]
        """Attention, or a recurrence, of torch's tensors."""

        @staticmethod
        def forward(ctx: Any, call: _Call, *tensors: Array) -> Any:
            results, ctx.kept = call.kind.solve(call.problem(tensors), call.return_state)
            ctx.call = call
            ctx.save_for_backward(*tensors, *results[0 if call.keeps_output else 1 :])
            ctx.mark_non_differentiable(*results[2:])
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *cotangents: Array) -> Any:
            call, count = ctx.call, len(ctx.call.names)
            tensors, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            results = results if call.keeps_output else (None, *results)
            problem = call.problem(tensors)
            if torch.is_grad_enabled():
                return None, *_pull_by_torch(call, problem, tensors, results, cotangents)
            found = call.kind.pull(problem, ctx.kept, results, *cotangents)
            return None, *(found[name] for name in call.names)

    return Attend


def _pull_by_torch(
    call: _Call, problem: Any, tensors: Any, before: Any, cotangents: Any
) -> list[Array]:
    """Gradients that can be differentiated again: the call once more, on torch's tape."""
    torch: Any = sys.modules["torch"]
    results, _ = call.kind.solve(problem, call.return_state, taped=True)
    if len(results) == 3:
        # On the scale that the caller has.
        log = torch.where(before[2] == -torch.inf, 0, results[2] - before[2])
        results[1] = results[1] * torch.exp(log)[..., None]
    wanted = [x for x in tensors if x.requires_grad]
    pairs = zip(results[:2], cotangents, strict=False)
    used = [(result, grad) for result, grad in pairs if result.requires_grad]
    outputs, grads = zip(*used, strict=True)
    options = {"create_graph": True, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, wanted, grads, **options))
    return [next(found) if x.requires_grad else None for x in tensors]


# Attention ----------------------------------------------------------------------------------------


def _attention_arrays(problem: Problem) -> Arrays:
    state, weights = problem.state, problem.weights
    return {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "key_bias": weights.key_bias,
        "log_decay": weights.log_decay,
        "state": None if state is None else state.kvz,
    }


def _with_arrays(problem: Problem, arrays: Arrays) -> Problem:
    of_weights = {n: arrays[n] for n in ("key_bias", "log_decay") if n in arrays}
    changes: dict[str, Any] = {n: arrays[n] for n in ("query", "key", "value") if n in arrays}
    if problem.state is not None and "state" in arrays:
        changes["state"] = problem.state._replace(kvz=arrays["state"])
    return problem.replace(weights=problem.weights._replace(**of_weights), **changes)


def _solve(problem: Problem, return_state: bool, *, taped: bool = False) -> Any:
    if not problem.num_features:
        exact = problem.replace(want_log=not taped)
        output, _, log = forward.solve(exact, return_state=False)
        return [output], log
    checkpoints = None if taped else backward.checkpoints_for(problem)
    output, state, _ = forward.solve(problem, return_state=return_state, checkpoints=checkpoints)
    results = [output]
    if return_state:
        assert state is not None
        results += [state.kvz, state.log_scale]
    return results, checkpoints


def _pull(problem: Problem, kept: Any, results: Any, grad: Array, *grad_state: Array) -> Arrays:
    of_state = None
    if len(results) == 3:
        of_state = backward.state_cotangent(grad_state[0], results[2], problem)
    if not problem.num_features:
        kept = Kept(results[0], kept)
    found = backward.pull(problem, Cotangent(grad, of_state), kept)._asdict()
    decay = problem.weights.log_decay
    if decay is not None:
        found["log_decay"] = sum_to(found["log_decay"], tuple(decay.shape), 0).to(decay.dtype)
    return found


_ATTENTION = _Kind(_attention_arrays, _with_arrays, _solve, _pull)


# Recurrences --------------------------------------------------------------------------------------

_NAMES = ("query", "key", "value", "log_decay", "beta", "initial_state")


def _recurrence_arrays(problem: Recurrence) -> Arrays:
    return {name: getattr(problem, name) for name in _NAMES}


def _with_recurrence_arrays(problem: Recurrence, arrays: Arrays) -> Recurrence:
    return replace(problem, **arrays)


def _solve_recurrence(problem: Recurrence, _: bool, *, taped: bool = False) -> Any:
    if taped:
        return [*walk.solve(problem)], None
    output, state, before = walk.solve_for_pullback(problem)
    return [output, state], before


def _pull_recurrence(
    problem: Recurrence, before: Any, _: Any, grad_output: Array, grad_state: Array
) -> Arrays:
    found = dict(zip(_NAMES, walk.pull_back(problem, before, grad_output, grad_state), strict=True))
    arrays = _recurrence_arrays(problem)
    return {
        name: None if x is None else sum_to(x, tuple(arrays[name].shape), 0).to(arrays[name].dtype)
        for name, x in found.items()
    }


_RECURRENCE = _Kind(
    _recurrence_arrays, _with_recurrence_arrays, _solve_recurrence, _pull_recurrence
)
