"""Every operation against dense formulas in float64 on the host, on poisoned memory, twice.

What is wanted is computed by :mod:`benchmarks.gpu.formulas` from the numbers that the inputs hold
after they were rounded to their dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from benchmarks.gpu import formulas
from benchmarks.gpu.cases import STEPS, Case
from benchmarks.gpu.library import GENERIC, CupyLibrary, host_dtype
from linattn.feature_maps import EluFeatures, HyperbolicFeatures, PositiveFeatures, ReluFeatures

__all__ = ["call_of", "check", "feature_map_of", "host_inputs", "relative_error", "row_error"]

POISONS = (0xFF, 0)
"""Bytes in free memory before each run: NaN in every dtype, then zeros."""

NUM_STEPS = 20
PRIMED = 100
"""Tokens in the state before steps."""

LARGE_COORDINATE = 50.0
"""Coordinates of keys whose log weights are about -1e4."""

JUMP, NAN_ROW, BLIND = 40, 130, 70
"""Where usual keys begin, where the NaN is, and how many first keys nobody sees."""

Floats = NDArray[Any]
Results = dict[str, Any]


class Inputs(NamedTuple):
    """Arguments of a case, on the host or the device."""

    query: Any
    key: Any
    value: Any
    gradient: Any
    mask: Any
    decay: Any


def feature_map_of(name: str, dim: int, features: int) -> Any:
    """Make the map of that name, with rows of seed 0."""
    if name == "favor":
        return PositiveFeatures(dim, num_features=features, rng=0)
    if name == "hyperbolic":
        return HyperbolicFeatures(dim, num_features=features, rng=0)
    return {"elu": EluFeatures, "relu": ReluFeatures}[name]()


def _map_of(case: Case) -> Any:
    if case.per_head:
        rows = np.random.default_rng(0).standard_normal((*case.lead, case.features, case.dim))
        return PositiveFeatures.from_projection(rows)
    return feature_map_of(case.feature_map, case.dim, case.features)


def _formula_of(case: Case, phi: Any) -> formulas.Formula:
    """Return the formula of a map, its rows in the precision in which kernels have them."""
    if case.feature_map in ("elu", "relu"):
        return formulas.Formula(case.feature_map)
    rows = (np.asarray(phi.projection) * case.dim**-0.25).astype(np.float32)
    if case.operation not in STEPS:
        rows = rows.astype(host_dtype(case.dtype))
    return formulas.Formula(case.feature_map, rows.astype(np.float64))


def relative_error(got: Floats, wanted: Floats) -> float:
    """Norm of the difference over the norm of what is wanted; NaN or another shape never passes."""
    if got.shape != wanted.shape:
        return float("inf")
    largest = float(np.max(np.abs(wanted), initial=0.0)) or 1.0
    size = float(np.linalg.norm(wanted / largest)) or 1.0
    return float(np.linalg.norm((got - wanted) / largest)) / size


def row_error(got: Floats, wanted: Floats) -> float:
    """Largest norm of a row's difference over the norm of the row, or of the mean row if larger."""
    if got.shape != wanted.shape:
        return float("inf")
    norms = np.linalg.norm(wanted, axis=-1)
    size = np.maximum(norms, np.sqrt(np.mean(norms**2)) or 1.0)
    return float(np.max(np.linalg.norm(got - wanted, axis=-1) / size, initial=0.0))


def check(library: CupyLibrary, case: Case) -> dict[str, Any]:
    """Run a case twice and compare, with what is wanted and bitwise with each other."""
    phi, host = _map_of(case), host_inputs(case)
    inputs = Inputs(*(_on_device(library, case, array) for array in host))
    runs, seconds = [], 0.0
    library.launches.clear()
    library.findings()
    for number, byte in enumerate(POISONS):
        library.poison(byte)
        # A launch that waits has its kernel named if that faults; one that does not is as usual.
        library.waits = number == 0
        begun = time.perf_counter()
        runs.append(_fetch(library, _run(case, phi, inputs)))
        seconds = time.perf_counter() - begun
    kernels = sorted(set(library.launches))
    with np.errstate(all="ignore"):
        wanted = _wanted(case, _formula_of(case, phi), host)
        pairs = {name: _pair(case, name, runs[0], wanted) for name in wanted}
        errors = {name: relative_error(*pair) for name, pair in pairs.items()}
        rows = {name: row_error(*pair) for name, pair in pairs.items()}
    same_bits = all(_same(runs[0], run) for run in runs[1:])
    if "replayed" in wanted:
        same_bits = same_bits and runs[0]["replayed"].tobytes() == runs[0]["output"].tobytes()
    close = all(bool(error <= case.bound) for error in errors.values())
    close = close and all(bool(error <= case.row_bound) for error in rows.values())
    expected = case.kernel is None or (case.kernel in kernels and GENERIC not in kernels)
    findings = library.findings()
    return {
        "errors": errors,
        "bound": case.bound,
        "row_errors": rows,
        "row_bound": case.row_bound,
        "deterministic": same_bits,
        "kernels": kernels,
        "seconds": seconds,
        "findings": findings,
        "passed": close and same_bits and expected and not findings,
    }


def call_of(library: CupyLibrary, case: Case) -> Callable[[], Results]:
    """Return the calls of a case on arrays of the device; they give all results by name."""
    inputs = Inputs(*(_on_device(library, case, array) for array in host_inputs(case)))
    return partial(_run, case, _map_of(case), inputs)


def _on_device(library: CupyLibrary, case: Case, array: Any) -> Any:
    if array is None or not case.moved_axes or array.ndim < len(case.lead) + 2:
        return None if array is None else library.array(array, case.dtype)
    return library.array(array.swapaxes(-2, -3), case.dtype).swapaxes(-2, -3)


def host_inputs(case: Case) -> Inputs:
    """Draw the arguments of a case, with seed 0, rounded to its dtype."""
    rng = np.random.default_rng(0)
    lead = (case.distinct, *case.lead[1:]) if case.distinct else case.lead
    key_lead = (*lead[:-1], 1) if case.one_key_head else lead
    query = rng.standard_normal((*lead, case.queries, case.dim))
    key = rng.standard_normal((*key_lead, case.keys, case.dim))
    value = rng.standard_normal((*key_lead, case.keys, case.value_dim))
    gradient = rng.standard_normal((*lead, case.queries, case.value_dim))
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
        if case.hard == "blind":
            mask[..., :BLIND] = False
        hidden = ~np.broadcast_to(mask, key.shape[:-1])
        key[hidden], value[hidden] = np.nan, np.nan
    decay = None
    if case.decay:
        decay = (-case.decay * rng.random((*lead, case.keys))).astype(np.float32)
    arrays = [a.astype(host_dtype(case.dtype)) for a in (query, key, value, gradient)]
    if case.distinct:
        arrays = [np.resize(a, (*case.lead, *a.shape[1:])) for a in arrays]
    return Inputs(arrays[0], arrays[1], arrays[2], arrays[3], mask, decay)


def _run(case: Case, phi: Any, inputs: Inputs) -> Results:
    with linattn.config(precision="tf32") if case.dtype == "tf32" else nullcontext():
        return _steps(case, phi, inputs) if case.operation in STEPS else _attend(case, phi, inputs)


def _attend(case: Case, phi: Any, inputs: Inputs) -> Results:
    query, key, value, gradient, mask, decay = inputs
    options: dict[str, Any] = {"is_causal": case.is_causal}
    if case.operation == "graph":
        captured = partial(linattn.linear_attention, feature_map=phi, **options)
        arrays = (query, key, value)
        other = tuple(array[..., ::-1, :] for array in arrays)
        return {"output": captured(*arrays), "replayed": _replayed(captured, [other, arrays])[1]}
    options |= {"exact_window": case.window} if case.window else {}

    def call(function: Callable[..., Any], rows: slice, keys: slice, *maps: Any) -> Any:
        by_key = {"key_mask": mask, "log_decay": decay}
        given = {name: x[..., keys] for name, x in by_key.items() if x is not None}
        arrays = (query[..., rows, :], key[..., keys, :], value[..., keys, :])
        return function(*arrays, *maps, **options, **given)

    rows = keys = slice(None)
    if case.operation == "gradient":
        output, pullback = call(linattn.linear_attention_vjp, rows, keys, phi)
        names = ("grad_query", "grad_key", "grad_value")
        return {"output": output, **dict(zip(names, pullback(gradient), strict=True))}
    if case.operation == "softmax":
        options |= {"return_log_normalizer": True}
        output, norm = call(linattn.softmax_attention, rows, keys)
        return {"output": output, "norm": norm}
    attend, results = linattn.linear_attention, Results()
    if not (case.continued or case.all_outputs):
        return {"output": call(attend, rows, keys, phi)}
    options |= {"return_state": True}
    if case.continued:
        half = slice(case.keys // 2)
        first = call(attend, half if case.is_causal else rows, half, phi)
        results["first"], options["initial_state"] = first
        keys = slice(half.stop, None)
        rows = keys if case.is_causal else rows
    options |= {"return_log_normalizer": case.all_outputs}
    found = ("output", "state", "norm")[: 2 + case.all_outputs]
    results |= dict(zip(found, call(attend, rows, keys, phi), strict=True))
    return results | {"length": results["state"].length}


def _replayed(call: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """Capture a call on the first of some arguments, and replay it on the others."""
    import cupy

    import linattn_cupy

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        own = [array.copy() for array in arguments[0]]
        captured = linattn_cupy.capture(call, *own)
        outputs = [captured.output.copy()]
        for arrays in arguments[1:]:
            for array, numbers in zip(own, arrays, strict=True):
                array[...] = numbers
            captured.launch()
            outputs.append(captured.output.copy())
        stream.synchronize()
    return outputs


def _steps(case: Case, phi: Any, inputs: Inputs) -> Results:
    query, key, value = inputs[:3]
    state = linattn.init_state(phi, case.value_dim, batch_shape=case.lead, like=query)
    state = linattn.update_state(state, key[..., :PRIMED, :], value[..., :PRIMED, :], phi)
    tokens: Any = [
        tuple(array[..., PRIMED + step, :] for array in (query, key, value))
        for step in range(NUM_STEPS)
    ]
    if case.operation == "decode_step":
        outputs = []
        for q, k, v in tokens:
            output, state = linattn.decode_step(q, k, v, state, phi)
            outputs.append(output)
        return {"steps": outputs, "state": state}
    decoder = linattn.Decoder(phi, state)
    if case.operation == "decoder":
        return {"steps": [decoder.step(*token) for token in tokens], "state": decoder.state}
    return {"steps": _replayed(decoder.step, tokens), "state": decoder.state}


def _wanted(case: Case, formula: formulas.Formula, host: Inputs) -> dict[str, Floats]:
    """Return what the formulas give for a case."""
    query, key, value, grad = (a[: case.distinct or None].astype(np.float64) for a in host[:4])
    kept = np.ones(key.shape[:-1], bool)
    if host.mask is not None:
        kept = np.broadcast_to(host.mask, kept.shape)
        key, value = (np.where(kept[..., None], array, 0) for array in (key, value))
    seen = kept[..., None, :]
    if case.is_causal or case.operation in STEPS:
        seen = seen & np.tri(query.shape[-2], key.shape[-2], dtype=bool)
    if case.operation == "gradient":
        output = formulas.attend(formula, query, key, value, seen).output
        pulled = formulas.gradients(formula, query, key, value, seen, grad)
        names = ("grad_query", "grad_key", "grad_value")
        return {"output": output, **dict(zip(names, pulled, strict=True))}
    exact: Any = case.operation == "softmax"
    if case.window:
        # Whole tiles: that of the query, and the one before it.
        tiles = [np.arange(x.shape[-2]) // case.window for x in (query, key)]
        exact = tiles[0][:, None] - tiles[1] <= 1
    total = np.zeros(1) if host.decay is None else np.cumsum(host.decay.astype(np.float64), -1)
    bias = total[..., :, None] - total[..., None, :]
    whole = formulas.attend(formula, query, key, value, seen, bias, exact)
    if case.operation in STEPS:
        end = PRIMED + NUM_STEPS
        kept[..., end:] = False
        steps = np.moveaxis(whole.output[..., PRIMED:end, :], -2, 0)
        return {"steps": steps, "state": formulas.state(formula, key, value, kept)}
    if case.operation == "graph":
        return {"output": whole.output, "replayed": whole.output}
    half = case.keys // 2
    rows = slice(half if case.continued and case.is_causal else 0, None)
    results = {"output": whole.output[..., rows, :]}
    if case.all_outputs or case.operation == "softmax":
        results["norm"] = whole.log_normalizer[..., rows]
    if case.continued:
        early = seen & (np.arange(case.keys) < half)
        first = formulas.attend(formula, query, key, value, early, bias).output
        results["first"] = first[..., :half, :] if case.is_causal else first
    if case.operation != "softmax" and (case.continued or case.all_outputs):
        weights = kept * np.exp(total[..., -1:] - total)
        results["state"] = formulas.state(formula, key, value, weights)
        results["length"] = np.full((1, 1), float(case.keys))
    return results


def _fetch(library: CupyLibrary, results: Results) -> dict[str, Floats]:
    """Copy to the host; states on their true scale: how they are split may differ."""

    def fetched(x: Any) -> Floats:
        if isinstance(x, int):
            return np.full((1, 1), float(x))
        if isinstance(x, linattn.State):
            scale = np.exp(library.numpy(x.log_scale))
            return np.asarray(library.numpy(x.kvz) * scale[..., None])
        return np.stack([fetched(one) for one in x]) if isinstance(x, list) else library.numpy(x)

    with np.errstate(all="ignore"):
        return {name: fetched(x) for name, x in results.items()}


def _same(first: dict[str, Floats], second: dict[str, Floats]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def _pair(
    case: Case, name: str, found: dict[str, Floats], wanted: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Return what a call gave and what is wanted, the numbers that are compared."""
    got, want = found[name], wanted[name]
    if case.distinct:
        want = np.resize(want, (*case.lead, *want.shape[1:]))
    if name == "norm":
        # Of the sums themselves, each a row; that of no key is 0.
        got, want = (
            np.where(got == want, 1, np.exp(got - want))[..., None],
            np.ones((*want.shape, 1)),
        )
    if case.hard == "nan":
        made_of_nan = np.isnan(got[..., NAN_ROW:, :]).all()
        got, want = got[..., :NAN_ROW, :], want[..., :NAN_ROW, :]
        if not made_of_nan:
            got = np.full(want.shape, np.inf)  # a plausible number made of NaN
    return got, want
