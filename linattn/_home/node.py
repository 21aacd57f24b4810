"""Calls whose gradients torch or JAX asks for: one node of its tape, forward and backward at home.

The driver calls :func:`on_tape`, for attention and for recurrences; so do the eager calls of
:mod:`linattn.interop.torch`.

The node keeps the arrays of the problem and some states, as a pullback of
:func:`linattn.linear_attention_vjp` does. A backward pass that is to be differentiated again
(``create_graph=True``), or mapped, repeats the call by code of the library. So does every call that
the driver has no pullback for, or in which there is a gradient by another array, such as a
parameter of a map. JAX's node is of eager reverse mode: JAX itself differentiates calls that it
compiles or maps, and forward mode. What torch compiles or transforms is the operator of
:mod:`linattn.interop.torch`, or generic code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn._arrays import dtype_bits
from linattn._generic.feature_vjps import sum_to
from linattn._home import home_of, primal
from linattn.typing import Array, Problem

Arrays = dict[str, Array]


class Kind(NamedTuple):
    """What can be differentiated of a kind of problem, and how."""

    arrays: Callable[[Any], Arrays]
    """Arrays of a problem that have a gradient, by name; None for those that it lacks."""
    insert: Callable[[Any, Arrays], Any]
    """Return the problem with other arrays."""
    solve: Callable[..., tuple[list[Array], Any]]
    """``solve(problem, return_state)``: the results, and intermediate ones for the pullback."""
    pull: Callable[..., Arrays]
    """``pull(problem, stored, needed, *cotangents)``: gradients by name."""


def on_tape(kind: Kind, problem: Any, return_state: bool) -> Any:
    """Return the results of a problem, as one node of the tape.

    None if not all gradients that are asked for are of arrays of this kind, or not all is at home.
    """
    arrays = {name: x for name, x in kind.arrays(problem).items() if x is not None}
    values = {name: primal(x) for name, x in arrays.items()}
    home = home_of(values["query"])
    if home is None or not home.covers(kind.insert(problem, values)):
        return None
    bare = kind.insert(problem, dict.fromkeys(arrays))
    call = _Call(kind, bare, return_state, tuple(arrays))
    if array_api_compat.is_jax_array(problem.query):
        return _apply_jax(sys.modules["jax"], call, tuple(arrays.values()))
    return _node().apply(call, *arrays.values())


class _Call(NamedTuple):
    """A call without its arrays."""

    kind: Kind
    bare: Any
    return_state: bool
    names: tuple[str, ...]

    def needed(self, results: list[Array]) -> list[Array]:
        """Return the result that a pullback reads: the scale of a state, or the exact output."""
        is_exact = isinstance(self.bare, Problem) and not self.bare.num_features
        return results[:1] if is_exact else results[2:]

    def problem(self, tensors: Any) -> Any:
        return self.kind.insert(self.bare, dict(zip(self.names, tensors, strict=True)))


@cache
def _node() -> Any:
    torch: Any = sys.modules["torch"]

    class Attend(torch.autograd.Function):  # type: ignore[misc]
        """Attention, or a recurrence, of torch's tensors."""

        @staticmethod
        def forward(ctx: Any, call: _Call, *tensors: Array) -> Any:
            results, ctx.stored = call.kind.solve(call.problem(tensors), call.return_state)
            needed = call.needed(results)
            ctx.call, ctx.count = call, len(tensors) + len(needed)
            # torch's checkpointing counts them: float64 keeps one more, lest it is another's again.
            marks = [tensors[0].new_empty(0)] * (dtype_bits(call.bare.dtype) == 64)
            ctx.save_for_backward(*tensors, *needed, *marks)
            ctx.mark_non_differentiable(*results[2:])
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *cotangents: Array) -> Any:
            call, count = ctx.call, len(ctx.call.names)
            # Once: torch's checkpointing gives them once.
            saved = ctx.saved_tensors[: ctx.count]
            tensors, needed = saved[:count], saved[count:]
            again, home = torch.is_grad_enabled(), home_of(tensors[0])
            # torch computes in the mode of whoever starts the backward pass.
            with torch.autocast(tensors[0].device.type, enabled=False), np.errstate(all="ignore"):
                if again or home is None or not home.covers(cotangents):
                    with torch.enable_grad():
                        found = _pull_again(call, tensors, needed, cotangents, again)
                    return None, *found
                found = call.kind.pull(call.problem(tensors), ctx.stored, needed, *cotangents)
                return None, *(found[name] for name in call.names)

    return Attend


def _again(call: _Call, tensors: Any, needed: Any) -> list[Array]:
    """Return the results that have gradients once more, by code of the library."""
    problem = call.problem(tensors)
    results, _ = call.kind.solve(problem, call.return_state, taped=True)
    if len(results) == 3:
        # On the scale that the caller has.
        xp, log = problem.xp, results[2] - needed[0]
        log = xp.where(needed[0] == -xp.inf, xp.zeros_like(log), log)
        results[1] = results[1] * xp.exp(log)[..., None]
    return results[:2]


def _pull_again(call: _Call, tensors: Any, needed: Any, grads: Any, again: bool) -> list[Array]:
    """Gradients by the call once more, on torch's tape; ``again``: to be differentiated too."""
    torch: Any = sys.modules["torch"]
    wanted = [x for x in tensors if x.requires_grad]
    pairs = zip(_again(call, tensors, needed), grads, strict=False)
    used = [(result, grad) for result, grad in pairs if result.requires_grad]
    outputs, grads = zip(*used, strict=True)
    options = {"create_graph": again, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, wanted, grads, **options))
    return [next(found) if x.requires_grad else None for x in tensors]


def _apply_jax(jax: Any, call: _Call, arrays: tuple[Array, ...]) -> Any:
    stored: Any = None

    def forward(*arrays: Array) -> Any:
        nonlocal stored
        results, stored = call.kind.solve(call.problem(arrays), call.return_state)
        return tuple(results), (arrays, call.needed(results))

    def backward(saved: Any, cotangents: Any) -> Any:
        arrays, needed = saved
        home = home_of(arrays[0])
        if home is None or not home.covers(cotangents):
            pullback = jax.vjp(lambda *x: _again(call, x, needed), *arrays)[1]
            return pullback(list(cotangents[:2]))
        found = call.kind.pull(call.problem(arrays), stored, needed, *cotangents)
        pairs = [(found[name], x) for name, x in zip(call.names, arrays, strict=True)]
        return tuple(sum_to(grad, tuple(x.shape), 0).astype(x.dtype) for grad, x in pairs)

    attend = jax.custom_vjp(lambda *arrays: forward(*arrays)[0])
    attend.defvjp(forward, backward)
    return attend(*arrays)
