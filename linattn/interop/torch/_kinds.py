"""What the operator computes: linear attention, softmax attention and recurrences.

`linattn.interop.torch._node` calls a :class:`Kind` to compute a call, to pull it back, to say the
shapes of its results while torch traces it, and to make of them what the caller gets.
"""

from __future__ import annotations

from collections.abc import Callable
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
from linattn.typing import Array, FeatureMap, Recurrence, State

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
    """Shape and dtype of the output, leading axes of the states after a call, and of one state."""
    query, key, value = (named[name] for name in TOKENS)
    borders = call.constants["cu_seqlens"]
    if before is not None:
        leads = [*leads, before.shape[0 if borders is None else 1 : -2]]
    lead = torch.broadcast_shapes(key.shape[:-2], value.shape[:-2], *leads)
    front = lead if borders is None else (len(borders) - 1, *lead)
    outer = torch.broadcast_shapes(query.shape[:-2], lead)
    return ((*outer, query.shape[-2], value.shape[-1]), query.dtype), front, lead


# Linear attention -------------------------------------------------------------------------------


def _linear_problem(named: Named, call: Call, length: int) -> Any:
    options = _options(named, call)
    if "kvz" in named:
        known = {name: call.constants[name] for name in ("fingerprint", "num_sequences")}
        options["initial_state"] = State(named["kvz"], named["log_scale"], length, **known)
    return differentiable_problem(*(named[name] for name in TOKENS), **options)


def _solve_linear(named: Named, call: Call, length: int) -> list[Array]:
    problem = _linear_problem(named, call, length)
    wanted = call.constants["return_state"]
    output, state, _ = forward.attend(problem, return_state=wanted)
    return [output] if state is None else [output, state.kvz, state.log_scale]


def _pull_linear(named: Named, scale: Any, cotangents: Any, call: Call, length: int) -> Named:
    weights = {name: named.get(name) for name in ("key_bias", "log_decay")}
    pullback = pullback_of(_linear_problem(named, call, length), weights, *scale)
    names = [n for n in (*TOKENS, "kvz", *weights) if n in named]
    return dict(zip(names, pullback(*cotangents), strict=True))


def _linear_shapes(named: Named, call: Call) -> list[Any]:
    feature_map = call.constants["feature_map"]
    leads = map(_generic.spec_lead, map_specs(feature_map, np, np.float64, "cpu"))
    output, front, _ = _output(named, call, leads, named.get("kvz"))
    if not call.constants["return_state"]:
        return [output]
    m = num_features_of(feature_map, "query and key", int(named["key"].shape[-1]))
    e, dtype = named["value"].shape[-1], _accumulation_dtype(named, call)
    return [output, ((*front, m, e + 1), dtype), ((*front, m), dtype)]


def _linear_answer(results: list[Array], named: Named) -> Any:
    output, *parts = results
    return (output, _state_after(*parts, named)) if named["return_state"] else output


def _state_after(kvz: Array, log_scale: Array, named: Named) -> State:
    """Return the state after a call, with its length and fingerprint."""
    before, key, decay, borders = (
        named[name] for name in ("initial_state", "key", "log_decay", "cu_seqlens")
    )
    ends = [0, key.shape[-2]] if borders is None else [int(end) for end in borders]
    pairs = [*pairwise(ends)]
    length = max(stop - start for start, stop in pairs)
    count = 0 if borders is None else len(pairs)
    fingerprint = _fingerprint(named["feature_map"])
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


def _fingerprint(feature_map: FeatureMap) -> int | None:
    """Return the short fingerprint of a map, None for a map that has none."""
    digits = _digits(feature_map)
    return int(digits) if digits else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _digits(feature_map: Any) -> str:
    """Return the fingerprint in digits: of an integer torch would make a variable."""
    return str(map_fingerprint(feature_map) or "")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def widest(device: str) -> torch.dtype:
    """Return float64, or float32 where a device has none."""
    return torch.float64 if has_float64(torch.empty(0, device=device)) else torch.float32


# Softmax attention ------------------------------------------------------------------------------


def _exact_problem(named: Named, call: Call) -> Any:
    options = _options(named, call)
    sides = [options.pop(f"far_bias[{i}]", None) for i in range(2)]
    if any(side is not None for side in sides):
        options["far_bias"] = tuple(sides)
    return exact_problem(*(named[name] for name in TOKENS), **options)


def _solve_softmax(named: Named, call: Call, _: int) -> list[Array]:
    return [forward.attend(_exact_problem(named, call), return_state=False)[0]]


def _pull_softmax(named: Named, _: Any, cotangents: Any, call: Call, length: int) -> Named:
    weights = {"key_bias": named.get("key_bias")}
    gradients = pullback_of(_exact_problem(named, call), weights)(*cotangents)
    names = [name for name in (*TOKENS, "key_bias") if name in named]
    return dict(zip(names, gradients, strict=True))


def _softmax_shapes(named: Named, call: Call) -> list[Any]:
    return [_output(named, call)[0]]


def _softmax_answer(results: list[Array], _: Named) -> Array:
    return results[0]


# Recurrences ------------------------------------------------------------------------------------


def _solve_recurrence(named: Named, call: Call, _: int) -> list[Array]:
    answer: Any = recurrences.linear_recurrence(**{**call.constants, **named})
    if call.constants["return_states_every"] is not None:
        # One array: two results have gradients.
        states = [*answer[1:-1], *answer[-1]]
        return [answer[0], torch.stack(states)] if states else [answer[0]]
    return [*answer] if call.constants["return_state"] else [answer]


def _pull_recurrence(named: Named, _: Any, cotangents: Any, call: Call, length: int) -> Named:
    pullback = recurrences.linear_recurrence_vjp(**{**call.constants, **named})[1]
    grad_output, *rest = cotangents
    if call.constants["return_states_every"] is not None:
        rest = [grad for grads in rest for grad in grads]
    grad_state = rest.pop(0) if call.constants["return_state"] else None
    names = [name for name in (*Recurrence.TOKENS, "initial_state") if name in named]
    return dict(zip(names, pullback(grad_output, grad_state, rest or None), strict=True))


def _recurrence_shapes(named: Named, call: Call) -> list[Any]:
    key, returns_state = named["key"], call.constants["return_state"]
    gates = [named[name] for name in Recurrence.TOKENS[3:] if name in named]
    leads = [x.shape[: -2 if x.ndim == key.ndim else -1] for x in gates]
    output, front, lead = _output(named, call, leads, named.get("initial_state"))
    interval = call.constants["return_states_every"]
    if interval is not None:
        front = (int(returns_state) + key.shape[-2] // interval, *lead)
    if not returns_state and (interval is None or not front[0]):
        return [output]
    of_states = (*front, key.shape[-1], named["value"].shape[-1])
    return [output, (of_states, _accumulation_dtype(named, call))]


def _recurrence_answer(results: list[Array], named: Named) -> Any:
    output, *states = results
    every = named["return_states_every"] is not None
    if every:
        states = [state for stacked in states for state in stacked]
    extra: list[Any] = [states.pop(0)] if named["return_state"] else []
    extra += [states] if every else []
    return (output, *extra) if extra else output


KINDS = {
    "linear": Kind(_solve_linear, _pull_linear, _linear_shapes, _linear_answer),
    "softmax": Kind(_solve_softmax, _pull_softmax, _softmax_shapes, _softmax_answer),
    "recurrence": Kind(_solve_recurrence, _pull_recurrence, _recurrence_shapes, _recurrence_answer),
}
