"""What the operator computes: linear attention, softmax attention and recurrences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from linattn import _generic, recurrences
from linattn._driver import forward
from linattn._driver.problem import exact_problem, map_specs, num_features_of
from linattn.gradients import differentiable_problem, pullback_of
from linattn.interop.torch._node import KINDS, Call, Named
from linattn.typing import Array, Recurrence, State

NOT_OPTIONS = ("query", "key", "value", "kvz", "log_scale", "far_bias[0]", "far_bias[1]")
OF_STATE = ("feature_map", "return_state", "fingerprint", "num_sequences")


def _options(named: Named, call: Call) -> Named:
    given = {**call.constants, **named}
    return {n: a for n, a in given.items() if n not in (*NOT_OPTIONS, *OF_STATE)}


def _lead(*names: str, named: Named) -> Any:
    return torch.broadcast_shapes(*(named[name].shape[:-2] for name in names if name in named))


def _accumulation_dtype(named: Named, call: Call) -> Any:
    wide = call.policy.precision == "float64" or named["query"].dtype == torch.float64
    return torch.float64 if wide else torch.float32


def _linear_problem(named: Named, call: Call, length: int) -> Any:
    state, constants = None, call.constants
    if "kvz" in named:
        known = {name: constants[name] for name in ("fingerprint", "num_sequences")}
        state = State(named["kvz"], named["log_scale"], length, **known)
    query, key, value = (named[name] for name in ("query", "key", "value"))
    options = _options(named, call)
    feature_map = constants["feature_map"]
    options["initial_state"] = state
    return differentiable_problem(query, key, value, feature_map, **options)


def _solve_linear(named: Named, call: Call, length: int) -> list[Array]:
    problem = _linear_problem(named, call, length)
    wanted = call.constants["return_state"]
    output, state, _ = forward.solve(problem, return_state=wanted)
    return [output] if state is None else [output, state.kvz, state.log_scale]


def _pull_linear(named: Named, results: Any, cotangents: Any, call: Call, length: int) -> Named:
    weights = {name: named.get(name) for name in ("key_bias", "log_decay")}
    pullback = pullback_of(_linear_problem(named, call, length), weights, *results)
    names = [n for n in ("query", "key", "value", "kvz", *weights) if n in named]
    return dict(zip(names, pullback(*cotangents), strict=True))


def _linear_shapes(named: Named, call: Call) -> list[Any]:
    query, key, value = (named[name] for name in ("query", "key", "value"))
    constants, dim, e = call.constants, key.shape[-1], value.shape[-1]
    feature_map, borders = constants["feature_map"], constants["cu_seqlens"]
    leads = [_lead("key", "value", named=named)]
    specs = map_specs(feature_map, np, np.float64, "cpu")
    leads += map(_generic.spec_lead, specs)
    if "kvz" in named:
        leads.append(named["kvz"].shape[0 if borders is None else 1 : -2])
    state_lead = torch.broadcast_shapes(*leads)
    lead = torch.broadcast_shapes(query.shape[:-2], state_lead)
    shapes = [((*lead, query.shape[-2], e), query.dtype)]
    if constants["return_state"]:
        m = num_features_of(feature_map, "query and key", int(dim))
        front = state_lead if borders is None else (len(borders) - 1, *state_lead)
        dtype = _accumulation_dtype(named, call)
        shapes += [((*front, m, e + 1), dtype), ((*front, m), dtype)]
    return shapes


def _exact_problem(named: Named, call: Call) -> Any:
    options = _options(named, call)
    if "far_bias[0]" in named or "far_bias[1]" in named or "far_bias[0]" in call.constants:
        both = {**call.constants, **named}
        sides = [both.get(f"far_bias[{i}]") for i in range(2)]
        if any(side is not None for side in sides):
            options["far_bias"] = tuple(sides)
    return exact_problem(*(named[name] for name in ("query", "key", "value")), **options)


def _solve_softmax(named: Named, call: Call, _: int) -> list[Array]:
    return [forward.solve(_exact_problem(named, call), return_state=False)[0]]


def _pull_softmax(named: Named, _: Any, cotangents: Any, call: Call, length: int) -> Named:
    weights = {"key_bias": named.get("key_bias")}
    gradients = pullback_of(_exact_problem(named, call), weights)(*cotangents)
    names = [name for name in ("query", "key", "value", "key_bias") if name in named]
    return dict(zip(names, gradients, strict=True))


def _softmax_shapes(named: Named, _: Call) -> list[Any]:
    query, lead = named["query"], _lead("query", "key", "value", named=named)
    return [((*lead, query.shape[-2], named["value"].shape[-1]), query.dtype)]


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
    query, key, value = (named[name] for name in ("query", "key", "value"))
    borders, leads = call.constants["cu_seqlens"], [_lead("key", "value", named=named)]
    for name in Recurrence.TOKENS[3:]:
        if name in named:
            leads.append(named[name].shape[: -2 if named[name].ndim == key.ndim else -1])
    if "initial_state" in named:
        leads.append(named["initial_state"].shape[0 if borders is None else 1 : -2])
    state_lead = torch.broadcast_shapes(*leads)
    lead, e = torch.broadcast_shapes(query.shape[:-2], state_lead), value.shape[-1]
    shapes = [((*lead, query.shape[-2], e), query.dtype)]
    interval = call.constants["return_states_every"]
    front = state_lead if borders is None else (len(borders) - 1, *state_lead)
    if interval is not None:
        front = (int(call.constants["return_state"]) + key.shape[-2] // interval, *state_lead)
    if call.constants["return_state"] or (interval is not None and front[0]):
        shapes.append(((*front, key.shape[-1], e), _accumulation_dtype(named, call)))
    return shapes


KINDS["linear"] = (_solve_linear, _pull_linear, _linear_shapes)
KINDS["softmax"] = (_solve_softmax, _pull_softmax, _softmax_shapes)
KINDS["recurrence"] = (_solve_recurrence, _pull_recurrence, _recurrence_shapes)
