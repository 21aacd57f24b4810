"""Every operation against float64 on the host, on poisoned memory, several times.

What is wanted is computed by the generic code on NumPy, in float64, from the numbers that the
inputs hold after they were rounded to their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from benchmarks.gpu.cases import Case
from benchmarks.gpu.library import Library
from benchmarks.gpu.record import Item
from linattn.feature_maps import EluFeatures, HyperbolicFeatures, PositiveFeatures, ReluFeatures

__all__ = [
    "RUNS",
    "Inputs",
    "check",
    "feature_map_of",
    "host_inputs",
    "items",
    "precision",
    "relative_error",
    "run",
]

RUNS = 3
STEPS = 20
PRIMED = 100
"""Tokens in the state before steps."""

LARGE_COORDINATE = 50.0
"""Coordinates of keys whose log weights are about -1e4."""

JUMP, NAN_ROW = 40, 130
"""Where usual keys begin, and where the NaN is."""

Floats = NDArray[Any]
Results = dict[str, Any]


class Inputs(NamedTuple):
    """Arguments of a case, on the host or the device."""

    query: Any
    key: Any
    value: Any
    gradient: Any
    mask: Any


def items(library: Library, cases: Iterator[Case]) -> Iterator[Item]:
    """Yield a check a case."""
    for case in cases:
        yield Item(case.name, partial(check, library, case))


def feature_map_of(name: str, dim: int, features: int) -> Any:
    """Make the map of that name, with rows of seed 0."""
    if name == "favor":
        return PositiveFeatures(dim, num_features=features, rng=0)
    if name == "hyperbolic":
        return HyperbolicFeatures(dim, num_features=features, rng=0)
    return {"elu": EluFeatures, "relu": ReluFeatures}[name]()


def relative_error(got: Floats, wanted: Floats) -> float:
    """Norm of the difference over the norm of what is wanted; NaN or another shape never passes."""
    if got.shape != wanted.shape:
        return float("inf")
    largest = float(np.max(np.abs(wanted), initial=0.0)) or 1.0
    size = float(np.linalg.norm(wanted / largest)) or 1.0
    return float(np.linalg.norm((got - wanted) / largest)) / size


def check(library: Library, case: Case) -> dict[str, Any]:
    """Run a case ``RUNS`` times and compare, with what is wanted and bitwise with each other."""
    phi = feature_map_of(case.feature_map, case.dim, case.features)
    host = host_inputs(case)
    query, key, value, gradient = (library.array(a, case.dtype) for a in host[:4])
    mask = None if host.mask is None else library.array(host.mask, case.dtype)
    inputs = Inputs(query, key, value, gradient, mask)
    runs = []
    library.launches.clear()
    for _ in range(RUNS):
        library.poison()
        with precision(case):
            runs.append(_fetch(library, run(case, phi, inputs)))
    kernels = sorted(set(library.launches))
    rounded = Inputs(
        library.numpy(inputs.query),
        library.numpy(inputs.key),
        library.numpy(inputs.value),
        library.numpy(inputs.gradient),
        host.mask,
    )
    with linattn.without_backends(), np.errstate(all="ignore"):
        wanted = _numbers(run(case, phi, rounded))
    errors = {name: _error(case, name, runs[0], wanted) for name in wanted}
    deterministic = all(_same(runs[0], run) for run in runs[1:])
    close = all(bool(error <= case.bound) for error in errors.values())
    expected = case.kernel is None or case.kernel in kernels
    return {
        "dtype": case.dtype,
        "errors": errors,
        "bound": case.bound,
        "deterministic": deterministic,
        "kernels": kernels,
        "passed": close and deterministic and expected,
    }


def precision(case: Case) -> AbstractContextManager[Any]:
    """Enter this around the calls of a case."""
    return linattn.config(precision="tf32") if case.dtype == "tf32" else nullcontext()


def host_inputs(case: Case) -> Inputs:
    """Draw the arguments of a case, with seed 0."""
    rng = np.random.default_rng(0)
    key_lead = (*case.lead[:-1], 1) if case.one_key_head else case.lead
    query = rng.standard_normal((*case.lead, case.queries, case.dim))
    key = rng.standard_normal((*key_lead, case.keys, case.dim))
    value = rng.standard_normal((*key_lead, case.keys, case.value_dim))
    gradient = rng.standard_normal((*case.lead, case.queries, case.value_dim))
    mask = None
    if case.hard == "jump":
        # One key over and over: rows of them do not depend on the rounding of its logits.
        key[..., :JUMP, :] = LARGE_COORDINATE
    if case.hard == "nan":
        key[..., NAN_ROW, 0] = np.nan
    if case.masked:
        mask = rng.random((*key_lead[:1], *(1 for _ in key_lead[1:]), case.keys)) < 0.8
        mask[..., -case.keys // 4 :] = False
        mask[..., 0] = True
        hidden = ~np.broadcast_to(mask, key.shape[:-1])
        key[hidden], value[hidden] = np.nan, np.nan
    return Inputs(query, key, value, gradient, mask)


def run(case: Case, phi: Any, inputs: Inputs) -> Results:
    """Make the calls of a case; return all that comes out, by name."""
    if case.operation in ("decode_step", "decoder"):
        return _steps(case, phi, inputs)
    query, key, value, gradient, mask = inputs
    options: dict[str, Any] = {"is_causal": case.is_causal}
    if case.operation == "gradient":
        output, pullback = linattn.linear_attention_vjp(query, key, value, phi, **options)
        names = ("grad_query", "grad_key", "grad_value")
        return {"output": output, **dict(zip(names, pullback(gradient), strict=True))}
    if mask is not None:
        options["key_mask"] = mask
    if case.continued:
        half = case.keys // 2
        rows = half if case.is_causal else case.queries
        first = (query[..., :rows, :], key[..., :half, :], value[..., :half, :])
        output, state = linattn.linear_attention(*first, phi, return_state=True, **options)
        options |= {"initial_state": state, "return_state": True}
        rest = query[..., half:, :] if case.is_causal else query
        arrays = (rest, key[..., half:, :], value[..., half:, :])
        second, state = linattn.linear_attention(*arrays, phi, **options)
        return {"first": output, "output": second, "state": state}
    if case.all_outputs:
        options |= {"return_state": True, "return_log_normalizer": True}
        output, state, norm = linattn.linear_attention(query, key, value, phi, **options)
        return {"output": output, "state": state, "norm": norm}
    return {"output": linattn.linear_attention(query, key, value, phi, **options)}


def _steps(case: Case, phi: Any, inputs: Inputs) -> Results:
    query, key, value = inputs[:3]
    state = linattn.init_state(phi, case.value_dim, batch_shape=case.lead, like=query)
    state = linattn.update_state(state, key[..., :PRIMED, :], value[..., :PRIMED, :], phi)
    results: Results = {}
    decoder = linattn.Decoder(phi, state)
    for step in range(STEPS):
        q, k, v = (array[..., PRIMED + step, :] for array in (query, key, value))
        if case.operation == "decoder":
            results[f"step {step}"] = decoder.step(q, k, v)
        else:
            results[f"step {step}"], state = linattn.decode_step(q, k, v, state, phi)
    results["state"] = decoder.state if case.operation == "decoder" else state
    return results


def _fetch(library: Library, results: Results) -> dict[str, Floats]:
    fetched = {
        name: x._replace(kvz=library.numpy(x.kvz), log_scale=library.numpy(x.log_scale))
        if isinstance(x, linattn.State)
        else library.numpy(x)
        for name, x in results.items()
    }
    return _numbers(fetched)


def _numbers(results: Results) -> dict[str, Floats]:
    """Put states on their true scale: how they are split into sums and scales may differ."""
    with np.errstate(all="ignore"):
        return {
            name: x.kvz * np.exp(x.log_scale)[..., None] if isinstance(x, linattn.State) else x
            for name, x in results.items()
        }


def _same(first: dict[str, Floats], second: dict[str, Floats]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def _error(case: Case, name: str, got: dict[str, Floats], wanted: dict[str, Floats]) -> float:
    if name not in got:
        return float("inf")
    if case.hard == "nan":
        if not np.isnan(got[name][..., NAN_ROW:, :]).all():
            return float("inf")  # a plausible number made of NaN
        rows = (..., slice(NAN_ROW), slice(None))
        return relative_error(got[name][rows], wanted[name][rows])
    return relative_error(got[name], wanted[name])
