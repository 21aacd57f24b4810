"""What the operator computes: linear attention, softmax attention and recurrences.

`linattn.interop.torch._node` calls a :class:`Kind` to compute a call, to pull it back, to say the
shapes of its results while torch traces it, and to make of them what the caller gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from linattn import _generic, recurrences
from linattn._arrays import has_float64
from linattn._driver import forward
from linattn._driver.problem import exact_problem, map_specs, num_features_of
from linattn._driver.stamps import axes_behind_first
from linattn._fingerprints import map_fingerprint
from linattn.gradients import differentiable_problem, pullback_of
from linattn.typing import Array, Problem, Recurrence, State

if TYPE_CHECKING:
    from linattn.interop.torch._node import Call

Named = dict[str, Any]
TOKENS = ("query", "key", "value")
DIFFERENTIABLE = (*Recurrence.TOKENS, "kvz", "initial_state", "key_bias")
_NOT_OPTIONS = (*TOKENS, "kvz", "log_scale", "fingerprint", "num_sequences", "return_state")


class Kind(NamedTuple):
    """How to compute calls of one function."""

    solve: Callable[[Named, Call, int], list[Array]]
    """Results; the length of the state before the call comes last."""
    pull: Callable[[Named, Any, Any, Call, int], Named]
    """Gradients by name, of the tensors, the scale of the state and the cotangents."""
    shapes: Callable[[Named, Call], list[Any]]
    """The shape and dtype of each result."""
    answer: Callable[[list[Array], Named], Any]
    """What the caller gets, of the results and the arguments of the call."""


def _options(named: Named, call: Call) -> Named:
    given = {**call.constants, **named}
    return {n: a for n, a in given.items() if n not in _NOT_OPTIONS}


def _accumulation_dtype(named: Named, call: Call) -> Any:
    wide = call.policy.precision == "float64" or named["query"].dtype == torch.float64
    return torch.float64 if wide else torch.float32


def _output(named: Named, call: Call, leads: Any = (), before: Any = None) -> Any:
    """Shape and dtype of the output, and the leading axes of the states after a call."""
    query, key, value = (named[name] for name in TOKENS)
    borders = call.constants["cu_seqlens"]
    if before is not None:
        leads = [*leads, before.shape[0 if borders is None else 1 : -2]]
    lead = torch.broadcast_shapes(key.shape[:-2], value.shape[:-2], *leads)
    front = lead if borders is None else (len(borders) - 1, *lead)
    outer = torch.broadcast_shapes(query.shape[:-2], lead)
    return ((*outer, query.shape[-2], value.shape[-1]), query.dtype), front


# Attention --------------------------------------------------------------------------------------


def _linear_problem(named: Named, call: Call, length: int) -> Problem:
    options = _options(named, call)
    if "kvz" in named:
        known = {name: call.constants[name] for name in ("fingerprint", "num_sequences")}
        options["initial_state"] = State(named["kvz"], named["log_scale"], length, **known)
    return differentiable_problem(*(named[name] for name in TOKENS), **options)


def _exact_problem(named: Named, call: Call, _: int) -> Problem:
    options = _options(named, call)
    sides = [options.pop(f"far_bias[{i}]", None) for i in range(2)]
    if any(side is not None for side in sides):
        options["far_bias"] = tuple(sides)
    return exact_problem(*(named[name] for name in TOKENS), **options)


def _solve(problem_of: Any, named: Named, call: Call, length: int) -> list[Array]:
    problem, wanted = problem_of(named, call, length), call.returns_scale
    output, state, _ = forward.attend(problem, return_state=wanted)
    return [output, state.kvz, state.log_scale] if wanted and state is not None else [output]


def _pull(
    problem_of: Any, named: Named, scale: Any, cotangents: Any, call: Call, length: int
) -> Named:
    weights = {name: named.get(name) for name in ("key_bias", "log_decay")}
    pullback = pullback_of(problem_of(named, call, length), weights, *scale)
    names = [n for n in (*TOKENS, "kvz", *weights) if n in named]
    return dict(zip(names, pullback(*cotangents), strict=True))


def _shapes(named: Named, call: Call) -> list[Any]:
    feature_map: Any = call.constants.get("feature_map")
    specs = () if feature_map is None else map_specs(feature_map, np, np.float64, "cpu")
    leads = map(_generic.spec_lead, specs)
    output, front = _output(named, call, leads, named.get("kvz"))
    if not call.returns_scale:
        return [output]
    m = num_features_of(feature_map, "query and key", int(named["key"].shape[-1]))
    e, dtype = named["value"].shape[-1], _accumulation_dtype(named, call)
    return [output, ((*front, m, e + 1), dtype), ((*front, m), dtype)]


def _answer(results: list[Array], named: Named) -> Any:
    if len(results) == 1:
        return results[0]
    output, kvz, log_scale = results
    return output, _state_after(kvz, log_scale, named)


def _state_after(kvz: Array, log_scale: Array, named: Named) -> State:
    """Return the state after a call, with its length and fingerprint."""
    before, key, decay, borders = (
        named[name] for name in ("initial_state", "key", "log_decay", "cu_seqlens")
    )
    ends = [0, key.shape[-2]] if borders is None else [int(end) for end in borders]
    pairs = [*pairwise(ends)]
    length = max(stop - start for start, stop in pairs)
    count = 0 if borders is None else len(pairs)
    digits = _fingerprint(named["feature_map"])
    fingerprint = int(digits) if digits else None
    decays = [] if decay is None else [_total_decay(decay, key, pairs, packed=bool(count))]
    if before is not None:
        length, fingerprint = before.length + length, before.fingerprint
        decays += [] if before.log_decay is None else [before.log_decay]
        if not count:
            same = before.num_sequences is None or before.kvz.ndim == kvz.ndim
            count = before.num_sequences if same else 0
    lead, total = kvz.shape[:-2], None
    if decays:
        if borders is not None:
            decays = [x[axes_behind_first(len(lead) - x.ndim)] for x in decays]
        total = sum(decays[1:], decays[0]).to(kvz.dtype).expand(lead).contiguous()
    return State(kvz, log_scale.detach(), length, fingerprint, total, count)


def _total_decay(decay: Any, key: Array, pairs: Any, *, packed: bool) -> Array:
    """Log decay of all tokens; of packed sequences each, along a first axis."""
    if not isinstance(decay, torch.Tensor):
        decay = key.new_full((1,) * (key.ndim - 1), decay, dtype=widest(key.device.type))
    decay = decay.to(widest(key.device.type))
    if decay.ndim == 0:
        decay = decay.reshape((1,) * (key.ndim - 1))
    if decay.ndim < key.ndim - 1:
        decay = decay[..., None]
    if decay.shape[-1] == 1:
        totals = [decay[..., 0] * (stop - start) for start, stop in pairs]
    else:
        totals = [decay[..., start:stop].sum(-1) for start, stop in pairs]
    return torch.stack(totals) if packed else totals[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fingerprint(feature_map: Any) -> str:
    """Return the short fingerprint of a map in digits: of an integer torch makes a variable."""
    found = map_fingerprint(feature_map)
    return "" if found is None else str(found)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def widest(device: str) -> torch.dtype:
    """Return float64, or float32 where a device has none."""
    return torch.float64 if has_float64(torch.empty(0, device=device)) else torch.float32


# Recurrences ------------------------------------------------------------------------------------


def _solve_recurrence(named: Named, call: Call, _: int) -> list[Array]:
    answer: Any = recurrences.linear_recurrence(**{**call.constants, **named})
    if call.constants["return_states_every"] is not None:
        return [*answer[:-1], *answer[-1]]
    return [*answer] if call.constants["return_state"] else [answer]


def _pull_recurrence(named: Named, _: Any, cotangents: Any, call: Call, length: int) -> Named:
    pullback = recurrences.linear_recurrence_vjp(**{**call.constants, **named})[1]
    grad_output, *rest = cotangents
    grad_state = rest.pop(0) if call.constants["return_state"] else None
    names = [name for name in (*Recurrence.TOKENS, "initial_state") if name in named]
    return dict(zip(names, pullback(grad_output, grad_state, rest or None), strict=True))


def _recurrence_shapes(named: Named, call: Call) -> list[Any]:
    key, step = named["key"], call.constants["return_states_every"]
    gates = [named[name] for name in Recurrence.TOKENS[3:] if name in named]
    leads = [x.shape[: -2 if x.ndim == key.ndim else -1] for x in gates]
    output, front = _output(named, call, leads, named.get("initial_state"))
    shape = (*front, key.shape[-1], named["value"].shape[-1])
    count = int(key.shape[-2] // step) if step else 0
    count += int(call.constants["return_state"])
    return [output, *[(shape, _accumulation_dtype(named, call))] * count]


def _recurrence_answer(results: list[Array], named: Named) -> Any:
    output, *states = results
    extra: list[Any] = [states.pop(0)] if named["return_state"] else []
    extra += [] if named["return_states_every"] is None else [states]
    return (output, *extra) if extra else output


def _of_attention(problem_of: Any) -> Kind:
    return Kind(partial(_solve, problem_of), partial(_pull, problem_of), _shapes, _answer)


KINDS = {
    "linear": _of_attention(_linear_problem),
    "softmax": _of_attention(_exact_problem),
    "recurrence": Kind(_solve_recurrence, _pull_recurrence, _recurrence_shapes, _recurrence_answer),
}
