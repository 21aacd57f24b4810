"""All options of attention together, against one dense formula: outputs, states and gradients.

What the formula says of every option, no other file says again: chunks, streams, packed sequences,
masks, grouped heads, decay, windows, sinks and clusters, short and long, in float16 to float64 with
sums of either width, in NumPy with its backend and without, array-api-strict, torch and Dask.
Beside it: what a query does not see does not reach it, and arguments stay as they are.

The suite runs some cases, `pytest -m fuzz` others. A case is drawn from an integer, and
named with it when it fails; to see one again, or to run 10,000 others, in about eight minutes::

    python -m tests.test_fuzz_options linear 1234
    python -m tests.test_fuzz_options --cases 7200 --gradients 1400 --first 1000000
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import pytest

import linattn
from linattn import State
from linattn_numpy import tuning
from tests import dense_oracle, option_draws
from tests.option_draws import Case, out_lead, refusals

REFUSALS = (ValueError, TypeError, NotImplementedError)
ARGUMENTS = re.compile(
    r"is_causal|key_|prefix_length|causal_block|cu_seqlens|log_decay|normalize|state|chunk_size|"
    r"exact_|sinks|window_bias|far_bias|local_window_size|query and key|feature_map"
)
LEAST = {"float64": 1e-300, "float32": 1e-44, "float16": 2.0**-24, "bfloat16": 1e-40}
LEAST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}
MOST = {"float64": 1e300, "float32": 1e36, "float16": 6e4, "bfloat16": 1e36}
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDINGS = 64


class Wrong(AssertionError):
    """Something differs from the dense formula, or is refused that should not be."""


def fail(text: str) -> NoReturn:
    raise Wrong(text)


# ---------------------------------------------------------------- arrays of other libraries


def library(case: Case) -> Any:
    """Return the array namespace of a case; NumPy where its library is not installed."""
    if case.library == "array-api-strict":
        import array_api_strict

        return array_api_strict
    if case.library == "torch":
        try:
            import torch
        except ImportError:
            case.library = "numpy"
            case.dtype = case.dtype.replace("bfloat16", "float32")
        else:
            return torch
    if case.library == "dask":
        return pytest.importorskip("dask.array")
    return np


def in_chunks(case: Case, x: Any, has_rows: bool) -> Any:
    """Return a Dask array: rows of tokens in two chunks or one, alike in all arrays of a case."""
    rng = np.random.default_rng([case.seed, 5])
    several, cut = rng.random() < 0.5, rng.random()
    chunks: list[Any] = list(x.shape)
    if several and has_rows and x.shape[-2] > 1:
        first = 1 + int(cut * (chunks[-2] - 1))
        chunks[-2] = (first, chunks[-2] - first)
    return library(case).from_array(x, chunks=tuple(chunks))


def arrays_of(case: Case) -> Callable[..., Any]:
    """`make(x, dtype=...)`: arrays of the library of a case, in its dtype."""
    xp = library(case)
    strict = case.library == "array-api-strict"
    if strict and case.dtype == "float16":
        case.dtype = "float32"

    def make(x: Any, dtype: str | None = None) -> Any:
        if isinstance(x, State):
            wide = case.wide
            decay = None if x.log_decay is None else make(x.log_decay, wide)
            kvz, log_scale = make(x.kvz, wide), make(x.log_scale, wide)
            return x._replace(kvz=kvz, log_scale=log_scale, log_decay=decay)
        if isinstance(x, tuple):
            return tuple(make(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.kind not in "fb":
            return x
        wide = getattr(xp, dtype or case.dtype) if x.dtype.kind == "f" else xp.bool
        if case.library == "dask":
            has_rows = any(x is each for each in (case.query, case.key, case.value))
            return in_chunks(case, x.astype(wide), has_rows)
        array = xp.asarray(np.array(x), dtype=wide)
        if xp is np:
            array.flags.writeable = False
        return array

    return make


def host(x: Any) -> Any:
    x = x.compute(scheduler="synchronous") if hasattr(x, "compute") else x
    if str(getattr(x, "dtype", "")).endswith("bfloat16"):
        x = x.float()
    return np.asarray(x, dtype=np.float64)


def backends(case: Case) -> Any:
    return linattn.without_backends() if case.library == "without backends" else nullcontext()


# ---------------------------------------------------------------- comparing


def expect(name: str, got: Any, want: Any, tolerance: Any, shape: tuple[int, ...]) -> None:
    """Compare numbers; where even the tolerance has no number there is nothing to be right."""
    got, want = host(got), np.broadcast_to(np.real(want), shape)
    if got.shape != tuple(shape):
        fail(f"{name} has shape {got.shape}, want {tuple(shape)}")
    tolerance = np.broadcast_to(tolerance, shape)
    with np.errstate(invalid="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0, abs(got - want))
        wrong = ~(error <= tolerance) & np.isfinite(tolerance)
    if wrong.any():
        excess = np.where(wrong, np.nan_to_num(error / tolerance, nan=np.inf), 0)
        at = tuple(int(i) for i in np.unravel_index(np.argmax(excess), shape))
        fail(
            f"{name}{list(at)} is {got[at]:.9g}, want {want[at]:.9g}, {tolerance[at]:.2g} allowed; "
            f"{wrong.sum()} of {wrong.size} are wrong"
        )


def rounding(case: Case, result: Any) -> float:
    """Relative error of a sum of weights."""
    return ROUNDINGS * EPS[case.wide] * (2 + float(result.exponents))


def expect_output(case: Case, got: Any, want: Any, name: str = "output") -> None:
    lead = out_lead(case)
    shape = (*lead, case.query.shape[-2], case.value.shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        tolerance = rounding(case, want) * want.condition + EPS[case.dtype] * abs(want.output)
    # A denominator that may as well be 0 has no right quotient.
    if case.options.get("normalize", True):
        doubtful = want.doubt * rounding(case, want) > 1e-2
        tolerance = np.where(doubtful[..., None], np.inf, tolerance)
    # A numerator on its true scale may overflow.
    tolerance = np.where(abs(want.output) > MOST[case.dtype], np.inf, tolerance)
    expect(name, got, want.output, tolerance + LEAST[case.dtype], shape)


def expect_log(case: Case, got: Any, want: Any) -> None:
    shape = (*out_lead(case), case.query.shape[-2])
    doubt = want.doubt * rounding(case, want)
    tolerance = np.where(doubt > 1e-2, np.inf, doubt + rounding(case, want))
    expect("log_normalizer", got, want.log_normalizer, tolerance, shape)


def expect_state(case: Case, got: State, want: Any, decay: Any, name: str = "state") -> None:
    """Compare a state of any gauge, its length and its log decay."""
    lead = out_lead(case, of_query=False)
    if case.is_packed:
        lead = (len(case.options["cu_seqlens"]) - 1, *lead)
    kvz, log_scale = host(got.kvz), host(got.log_scale)
    c = np.where(np.isfinite(want.memory.log_scale), want.memory.log_scale, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        gauge = np.exp(log_scale - c)[..., None]
        kvz = kvz * gauge
    tolerance = rounding(case, want) * (abs(want.absolute) + abs(want.memory.kvz))
    # A value times a weight may be smaller than what the state's dtype holds.
    tolerance = tolerance + LEAST_NORMAL[case.wide] * np.maximum(gauge, 1)
    if type(case.feature_map).__name__ == "RotatedFeatures" and case.dtype != "float64":
        # Its features have one scale in all: what is fainter than 2^-85 on it is left out.
        tolerance = tolerance + 2.0**-85 * np.max(abs(want.absolute), axis=-2, keepdims=True)
    shape = (*lead, *want.memory.kvz.shape[-2:])
    expect(f"{name}.kvz", kvz, want.memory.kvz, tolerance, shape)
    # Of packed sequences it is that of the longest, which cuts do not add up to.
    known = name == "state" or not case.is_packed
    if known and int(got.length) != want.memory.length:
        fail(f"{name}.length is {got.length}, want {want.memory.length}")
    if decay is None:
        if got.log_decay is not None:
            fail(f"{name}.log_decay is {got.log_decay}, want None")
    elif got.log_decay is None:
        fail(f"{name}.log_decay is None")
    else:
        eps = rounding(case, want) * (1 + abs(decay))
        expect(f"{name}.log_decay", got.log_decay, decay, eps, lead)


def total_decay(case: Case, options: dict[str, Any] | None = None) -> Any:
    """Sum of the log decays of all tokens, those of a state before included."""
    options = case.options if options is None else options
    state, total = options.get("initial_state"), None
    lead = out_lead(case, of_query=False)
    if state is not None and state.log_decay is not None:
        total = state.log_decay
        if case.is_packed:
            total = np.stack([np.broadcast_to(each, lead) for each in total])
    if options.get("log_decay") is not None:
        parts = dense_oracle.scenes(case.query, case.key, case.value, None, **options)
        sums = [(part.decay + np.zeros(part.key.shape[-2])).sum(-1) for part in parts]
        here: Any = sums[0]
        if case.is_packed:
            here = np.stack([np.broadcast_to(s, lead) for s in sums])
        total = here if total is None else total + here
    return total


# ---------------------------------------------------------------- one case


def oracle(case: Case, **changes: Any) -> Any:
    arguments = {"query": case.query, "key": case.key, "value": case.value, **case.options}
    arguments.update(changes)
    arguments.pop("chunk_size", None)
    return dense_oracle.evaluate(feature_map=case.feature_map, **arguments)


def called(case: Case, function: Any, **more: Any) -> Any:
    """Call the library with a case."""
    make = arrays_of(case)
    arrays = [make(x) for x in (case.query, case.key, case.value)]
    if case.feature_map is not None:
        arrays.append(case.feature_map)
    wide = {"initial_state": case.wide}
    options = {name: make(option, wide.get(name)) for name, option in case.options.items()}
    with linattn.config(precision=case.precision):
        return function(*arrays, **options, **more)


def attempt(case: Case, function: Any, **more: Any) -> Any:
    """Call, and judge a refusal: None where it was right."""
    why = refusals(case)
    try:
        results = called(case, function, **more)
    except REFUSALS as error:
        if (why or case.library == "dask") and ARGUMENTS.search(str(error)):
            return None
        raise
    if why:
        fail(f"was not refused: {', '.join(why)}")
    return results


def is_close_choice(case: Case, want: Any) -> bool:
    return bool(want.tie < 4 * rounding(case, want))


def check_forward(case: Case) -> str:
    """Compare everything that a call returns."""
    linear = case.kind == "linear"
    function = linattn.linear_attention if linear else linattn.softmax_attention
    results = attempt(case, function, **case.returns)
    if results is None:
        return "refused"
    want = oracle(case)
    if is_close_choice(case, want):
        return "too close"
    results = list(results) if case.returns else [results]
    output = results.pop(0)
    if case.dtype not in str(output.dtype):
        fail(f"output has dtype {output.dtype}, want {case.dtype}")
    expect_output(case, output, want)
    if case.returns.get("return_state"):
        expect_state(case, results.pop(0), want, total_decay(case))
    if case.returns.get("return_log_normalizer"):
        expect_log(case, results.pop(0), want)
    if "return_states_every" in case.returns:
        check_states(case, results.pop(0))
    return "compared"


# ---------------------------------------------------------------- what is not seen


def check_unseen(case: Case) -> str:
    """Spoil one key and its value: NaN in the rows that see it, and in no other."""
    S = case.key.shape[-2]
    if "exact_clusters" in case.options or not S or refusals(case):
        return "refused"
    at = int(np.random.default_rng([case.seed, 6]).integers(S))
    function = linattn.linear_attention if case.kind == "linear" else linattn.softmax_attention
    try:
        clean = host(called(case, function))
    except REFUSALS:
        if case.library != "dask":
            raise
        return "refused"
    key, value = case.key.copy(), case.value.copy()
    value[..., at, :] = key[..., at, :] = np.nan
    spoiled = Case(**{**vars(case), "key": key, "value": value})
    # Dask computes here, and NumPy warns.
    with np.errstate(invalid="ignore" if case.library == "dask" else "warn"):
        out = host(called(spoiled, function))
    sees = np.broadcast_to(rows_that_see(case, at), clean.shape[:-1])
    want = oracle(case)
    tolerance = 2 * (rounding(case, want) * want.condition + EPS[case.dtype] * abs(want.output))
    tolerance = np.where((want.doubt * rounding(case, want) > 1e-2)[..., None], np.inf, tolerance)
    shape = (int((~sees).sum()), clean.shape[-1])
    tolerance = (tolerance + np.zeros(clean.shape) + LEAST[case.dtype])[~sees]
    expect("an output of what is not spoiled", out[~sees], clean[~sees], tolerance, shape)
    if "log_decay" not in case.options and not np.isnan(out[sees]).all():
        fail(f"key {at} is NaN, and the rows that see it are not")
    return "compared"


def rows_that_see(case: Case, at: int) -> Any:
    """Return for each query whether it sees a key, `(..., L)`."""
    rows, first = [], 0
    for scene in dense_oracle.scenes(
        case.query, case.key, case.value, case.feature_map, **case.options
    ):
        S = scene.key.shape[-2]
        seen = dense_oracle.seen_pairs(scene)
        pairs = dense_oracle.pair_weights(scene)[0]
        seen = seen & (np.real(pairs) > -np.inf) & np.ones((*out_lead(case), 1, 1), bool)
        here = first <= at < first + S
        rows.append(seen[..., at - first] if here else np.zeros(seen.shape[:-1], bool))
        first += S
    return np.concatenate(rows, axis=-1)


def check_states(case: Case, states: list[State]) -> None:
    interval, L = case.returns["return_states_every"], case.query.shape[-2]
    if len(states) != L // interval:
        fail(f"{len(states)} states on the way, want {L // interval}")
    for i, state in enumerate(states):
        prefix = part_of(case, np.arange((i + 1) * interval), None)
        expect_state(prefix, state, oracle(prefix), total_decay(prefix), f"states[{i}]")


def part_of(case: Case, rows: Any, borders: Any) -> Case:
    """Return some tokens of a case, in packed sequences where there are borders."""
    S, options = case.key.shape[-2], dict(case.options)
    for name in ("key_mask", "key_bias", "log_decay"):
        row = options.get(name)
        by_token = getattr(row, "ndim", 0) == case.key.ndim - 1 or name != "log_decay"
        if row is not None and by_token and row.shape[-1] == S:
            options[name] = row[..., rows]
    if "key_lengths" in options:
        first = int(rows[0]) if len(rows) else 0
        kept = np.clip(np.asarray(options["key_lengths"]) - first, 0, len(rows))
        options["key_lengths"] = kept if kept.ndim else int(kept)
    if borders is not None:
        options["cu_seqlens"] = borders
    query = case.query if case.query.shape[-2] != S else case.query[..., rows, :]
    tokens = query, case.key[..., rows, :], case.value[..., rows, :]
    kinds: dict[str, Any] = {n: getattr(case, n) for n in ("dtype", "library", "precision")}
    return Case(case.seed, case.kind, *tokens, case.feature_map, options, **kinds)


def halves(case: Case, rng: np.random.Generator) -> tuple[Any, ...]:
    """Cut each sequence in two; also say which tokens came into which."""
    S = case.key.shape[-2]
    borders = case.options["cu_seqlens"] if case.is_packed else np.array([0, S])
    cuts = np.array([rng.integers(a, b + 1) for a, b in pairwise(borders)])
    parts, rows = [], []
    for first, last in ((borders[:-1], cuts), (cuts, borders[1:])):
        ends = np.concatenate([[0], np.cumsum(last - first)])
        of = [np.arange(a, b) for a, b in zip(first, last, strict=True)]
        rows.append(np.concatenate(of).astype(np.int64))
        parts.append(part_of(case, rows[-1], ends if case.is_packed else None))
    parts[1].options.pop("initial_state", None)
    return parts[0], parts[1], *rows


MOVING = ("CosformerFeatures", "RotatedFeatures")
FOR_UPDATES = ("key_mask", "key_bias", "key_lengths", "log_decay")


def check_stream(case: Case) -> None:
    """Cut sequences: what states continue and merge to is the dense formula of the whole."""
    options, rng = case.options, np.random.default_rng([case.seed, 1])
    if {"exact_window", "exact_clusters"} & set(options) or option_draws.has_stops(case):
        return
    moves = type(case.feature_map).__name__ in MOVING
    kinds = ["merge"] * (not moves) + ["update"] * (not case.is_packed)
    if options.get("is_causal"):
        kinds += ["resume"] * (not (moves and case.is_packed))
        steps_fit = case.query.shape[-2] <= 24 and "key_lengths" not in options
        kinds += ["steps", "decoder"] * (steps_fit and not case.is_packed)
    if not kinds or case.feature_map is None:
        return
    kind = str(rng.choice(kinds))
    first, second, *rows = halves(case, rng)
    output, state = called(first, linattn.linear_attention, return_state=True)
    want = oracle(case)
    state, later = CONTINUE[kind](case, second, state)
    expect_state(case, state, want, total_decay(case), kind)
    if later is not None:
        both = np.concatenate([host(output), host(later)], axis=-2)
        order = np.argsort(np.concatenate(rows), kind="stable")
        expect_output(case, both[..., order, :], want, kind)
    if not case.is_packed:
        check_read(case, state)


def resume(case: Case, second: Case, state: State) -> Any:
    def run(*arrays: Any, **options: Any) -> Any:
        options["initial_state"] = state
        return linattn.linear_attention(*arrays, **options, return_state=True)

    output, state = called(second, run)
    return state, output


def update(case: Case, second: Case, state: State) -> Any:
    make = arrays_of(case)
    options = {name: make(x) for name, x in second.options.items() if name in FOR_UPDATES}
    arrays = make(second.key), make(second.value)
    return linattn.update_state(state, *arrays, case.feature_map, **options), None


def merge(case: Case, second: Case, state: State) -> Any:
    """Merge with the state of the second part alone, by itself of all leading axes."""
    lead = out_lead(case, of_query=False)
    second.value = np.array(np.broadcast_to(second.value, (*lead, *second.value.shape[-2:])))
    later = called(second, linattn.linear_attention, return_state=True)[1]
    return linattn.merge_states(state, later), None


def steps(case: Case, second: Case, state: State, decoder: Any = None) -> Any:
    """Decode token by token; a masked token is one of bias -inf."""
    make, options = arrays_of(case), second.options
    step: Any = linattn.decode_step
    rows, S, lead = [], second.key.shape[-2], second.key.shape[:-2]
    bias, decay = None, options.get("log_decay")
    if "key_bias" in options or "key_mask" in options:
        bias = options.get("key_bias", np.zeros(())) + np.zeros((*lead, S))
        bias = np.where(options.get("key_mask", np.True_), bias, -np.inf)
    for t in range(S):
        weights = {} if bias is None else {"key_bias": make(np.asarray(bias[..., t]))}
        if decay is not None:
            by_token = getattr(decay, "ndim", 0) == second.key.ndim - 1
            if by_token:
                decay = np.broadcast_to(decay, (*decay.shape[:-1], S))
            weights["log_decay"] = make(np.asarray(decay[..., t])) if by_token else make(decay)
        tokens = [make(x[..., t, :]) for x in (second.query, second.key, second.value)]
        if decoder is None:
            row, state = step(*tokens, state, second.feature_map, **weights)
        else:
            row, state = decoder.step(*tokens, **weights), decoder.state
        rows.append(host(row)[..., None, :])
    return state, decoded(case, rows)


def decoded(case: Case, rows: list[Any]) -> Any:
    """Join rows; None where they are another thing than what is to be compared."""
    if not case.options.get("normalize", True):
        return None
    nothing = np.zeros((*out_lead(case), 0, case.value.shape[-1]))
    return np.concatenate([nothing, *rows], axis=-2)


def decoder(case: Case, second: Case, state: State) -> Any:
    return steps(case, second, state, linattn.Decoder(case.feature_map, state))


CONTINUE: dict[str, Callable[[Case, Case, State], Any]] = {
    "resume": resume,
    "update": update,
    "merge": merge,
    "steps": steps,
    "decoder": decoder,
}


def check_read(case: Case, state: State) -> None:
    """Read the last state with all queries: all keys, each decayed until the end."""
    if type(case.feature_map).__name__ in MOVING:
        return
    plain = {n: x for n, x in case.options.items() if n not in ("is_causal", "normalize")}
    got = linattn.read_state(arrays_of(case)(case.query), state, case.feature_map)
    want = dense_oracle.read(case.query, case.key, case.value, case.feature_map, **plain)
    expect_output(Case(**{**vars(case), "options": plain}), got, want, "read")


# ---------------------------------------------------------------- gradients


def check_gradient(case: Case) -> str:
    """Compare directional derivatives: by the pullback, and by a complex step of the formula."""
    linear = case.kind == "linear"
    function = linattn.linear_attention_vjp if linear else linattn.softmax_attention_vjp
    results = attempt(case, function, **case.returns)
    if results is None:
        return "refused"
    want = oracle(case)
    with np.errstate(invalid="ignore"):
        doubt = float(np.max(want.doubt, initial=1))
    is_large = abs(want.output).max(initial=0) > MOST[case.dtype]
    if doubt > 1e3 or is_large or is_close_choice(case, want):
        return "too close"
    forward, pullback = results
    output, state = forward if case.returns else (forward, None)
    expect_output(case, output, want)
    rng, make = np.random.default_rng([case.seed, 2]), arrays_of(case)
    shape = (*out_lead(case), case.query.shape[-2], case.value.shape[-1])
    grad = option_draws.rounded(case.size_of_grad * rng.standard_normal(shape), case.dtype)
    cotangents, gauge = [make(grad)], None
    if state is not None:
        expect_state(case, state, want, total_decay(case))
        wide = case.wide
        grad_state = case.size_of_grad * rng.standard_normal(tuple(state.kvz.shape))
        grad_state = option_draws.rounded(grad_state, wide)
        cotangents.append(make(grad_state, wide))
        gauge = grad_state, host(state.log_scale)
    try:
        gradients = list(pullback(*cotangents))
    except REFUSALS:
        if case.library == "dask":
            return "refused"
        raise
    names = ["query", "key", "value"]
    names += ["initial_state"] if case.options.get("initial_state") is not None else []
    names += [name for name in ("key_bias", "log_decay") if name in case.options]
    names = names if linear else [name for name in names if name != "log_decay"]
    if len(gradients) != len(names):
        fail(f"{len(gradients)} gradients, want those of {names}")
    for name, gradient in zip(names, gradients, strict=True):
        derivative(case, name, gradient, (grad, gauge), doubt)
    return "compared"


def derivative(case: Case, name: str, gradient: Any, cotangents: Any, doubt: float) -> None:
    """Compare one gradient along one random direction."""
    rng = np.random.default_rng([case.seed, 3])
    of = case.options.get(name, None) if name not in ("query", "key", "value") else None
    point = getattr(case, name) if of is None else of
    numbers = point.kvz if isinstance(point, State) else np.asarray(point)
    gradient = host(gradient)
    if gradient.shape != numbers.shape:
        fail(f"grad_{name} has shape {gradient.shape}, want {numbers.shape}")
    if not np.isfinite(gradient).all():
        fail(f"grad_{name} is not finite")
    direction = rng.standard_normal(numbers.shape)
    moved = np.where(np.isfinite(numbers), numbers, 0) + 1e-30j * direction
    moved = np.where(np.isfinite(numbers), moved, numbers)
    if isinstance(point, State):
        moved = point._replace(kvz=moved)
    result = oracle(case, **{name: moved})
    grad, gauge = cotangents
    loss = (grad * result.output).sum()
    sizes = float((abs(grad) * abs(result.output)).sum())
    if gauge is not None:
        grad_state, log_scale = gauge
        c = result.memory.log_scale
        with np.errstate(invalid="ignore"):
            factor = np.where(np.isfinite(c) & np.isfinite(log_scale), np.exp(c - log_scale), 0)
        loss = loss + (grad_state * factor[..., None] * result.memory.kvz).sum()
        sizes += float((abs(grad_state) * factor[..., None] * result.absolute).sum())
    want, got = float(np.imag(loss)) * 1e30, float((gradient * direction).sum())
    terms = float((abs(gradient) * abs(direction)).sum()) + abs(want) + sizes
    terms *= doubt**2 * (1 + float(abs(np.where(np.isfinite(numbers), numbers, 0)).max(initial=0)))
    tolerance = (
        rounding(case, result) * 16 * terms + EPS[case.dtype] * abs(gradient * direction).sum()
    )
    # Gradients are multiplied by other numbers than weights, which may be large.
    tolerance += LEAST[case.dtype] * 1e7 * abs(direction).sum()
    if not abs(got - want) <= tolerance:
        fail(f"grad_{name} along a direction is {got:.9g}, want {want:.9g}")


# ---------------------------------------------------------------- recurrences


def check_recurrence(case: Case) -> str:
    """Compare a recurrence, its states and gradients with the loop; and its parts."""
    options, wide, function = case.options, case.wide, linattn.linear_recurrence_vjp
    results, pullback = called(case, function, **case.returns, return_state=True)
    output, state, *more = results
    states = more[0] if more else []
    dtypes = [str(x.dtype).rpartition(".")[2] for x in (output, state)]
    if dtypes != [case.dtype, wide]:
        fail(f"output and state have dtypes {dtypes}, want {case.dtype} and {wide}")
    arrays = {"query": case.query, "key": case.key, "value": case.value}
    want = dense_oracle.recurrence(**arrays, **options, **case.returns)
    want = want._replace(size=max(want.size, case.size_of_value))
    size = ROUNDINGS * EPS[wide] * (case.size_of_value + want.size)
    tolerance = size + EPS[case.dtype] * abs(want.output)
    expect("output", output, want.output, tolerance, want.output.shape)
    if len(states) != len(want.states):
        fail(f"{len(states)} states on the way, want {len(want.states)}")
    for got, exact in zip([state, *states], [want.state, *want.states], strict=True):
        expect("state", got, exact, size, exact.shape)
    if not case.is_packed:
        try:
            check_parts(case, want, tolerance, size)
        except REFUSALS:
            if case.library != "dask":
                raise
    return check_pulled(case, want, pullback)


def check_pulled(case: Case, want: Any, pullback: Any) -> str:
    """Compare gradients of a recurrence with complex steps through the loop."""
    options, make, wide = case.options, arrays_of(case), case.wide
    arrays = {"query": case.query, "key": case.key, "value": case.value}
    rng, eps = np.random.default_rng([case.seed, 4]), ROUNDINGS * EPS[wide]
    numbers = [want.output, want.state, *want.states]
    grads = [option_draws.rounded(rng.standard_normal(x.shape), case.dtype) for x in numbers]
    pulled = [make(grads[0]), *(make(grad, wide) for grad in grads[1:])]
    try:
        found = list(pullback(*pulled[:2], *([pulled[2:]] if case.returns else [])))
    except REFUSALS:
        # Dask has gradients of one chunk only.
        if case.library == "dask":
            return "compared"
        raise
    gates = ("log_decay", "beta", "erase_key", "read_key", "initial_state")
    names = [*arrays, *(name for name in gates if name in options)]
    for name, gradient in zip(names, found, strict=True):
        point: Any = arrays.get(name, options.get(name))
        gradient = host(gradient)
        if gradient.shape != point.shape:
            fail(f"grad_{name} has shape {gradient.shape}, want {point.shape}")
        if np.where(np.isnan(point), gradient, 0).any():
            fail(f"grad_{name} is not 0 where a token is masked")
        direction = np.where(np.isfinite(point), rng.standard_normal(point.shape), 0)
        moved = {**arrays, **options, name: point + 1e-30j * direction}
        after = dense_oracle.recurrence(**moved, **case.returns)
        ends = [after.output, after.state, *after.states]
        loss = sum((grad * x).sum() for grad, x in zip(grads, ends, strict=True))
        derivative, got = float(np.imag(loss)) * 1e30, float((gradient * direction).sum())
        terms = float(abs(gradient * direction).sum()) + abs(derivative)
        # By values, of which outputs are a linear function, it is as large as if they were of 1.
        unit = case.size_of_value if name in ("value", "initial_state") else 1.0
        terms += want.size / unit * (1 + want.output.size)
        if not abs(got - derivative) <= (eps + EPS[case.dtype]) * 16 * terms:
            fail(f"grad_{name} along a direction is {got:.9g}, want {derivative:.9g}")
    return "compared"


def check_parts(case: Case, want: Any, tolerance: Any, size: float) -> None:
    """Cut a sequence in two: the second goes on from a state, as a whole or token by token."""
    length, rng = case.query.shape[-2], np.random.default_rng([case.seed, 7])
    cut = int(rng.integers(0, length + 1))
    tokens = {"query": case.query, "key": case.key, "value": case.value, **case.options}
    lengths = tokens.pop("key_lengths", None)
    if lengths is not None:
        inside = np.arange(length) < lengths[..., None]
        tokens["key_mask"] = inside & tokens.get("key_mask", np.True_)
    make, rest = arrays_of(case), {"update_rule": tokens.pop("update_rule")}
    for name in {"scale", "chunk_size", "initial_state"} & set(tokens):
        rest[name] = tokens.pop(name)
    if "initial_state" in rest:
        rest["initial_state"] = make(rest["initial_state"], case.wide)

    def taken(where: Any) -> dict[str, Any]:
        """Tokens of all arguments; those with a number for all tokens keep it."""
        found = {}
        for name, x in tokens.items():
            channels = (name not in ("log_decay", "beta", "key_mask")) | (x.ndim == case.key.ndim)
            axis = x.ndim - 1 - (channels and name != "key_mask")
            one = x.shape[axis] == 1 and length != 1
            at: Any = (0 if isinstance(where, int) else slice(None)) if one else where
            found[name] = make(np.asarray(x[(slice(None),) * axis + (at,)]))
        return found

    output, state = linattn.linear_recurrence(**taken(slice(0, cut)), **rest, return_state=True)
    rows = [host(output)]
    if length - cut > 30 or rng.random() < 0.5:
        rest["initial_state"] = state
        output, state = linattn.linear_recurrence(
            **taken(slice(cut, None)), **rest, return_state=True
        )
        rows.append(host(output))
    else:
        given = {name: rest[name] for name in ("update_rule", "scale") if name in rest}
        for t in range(cut, length):
            output, state = linattn.recurrence_step(**taken(t), state=state, **given)
            rows.append(host(output)[..., None, :])
    lead = want.output.shape[:-2]
    rows = [np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in rows]
    expect("parts", np.concatenate(rows, axis=-2), want.output, tolerance, want.output.shape)
    expect("state of parts", state, want.state, size, want.state.shape)


# ---------------------------------------------------------------- running


def check_linear(case: Case) -> str:
    said = check_forward(case)
    if said == "compared":
        try:
            check_stream(case)
        except REFUSALS as error:
            # Parts may be in chunks that the whole was not.
            if case.library != "dask" or not ARGUMENTS.search(str(error)):
                raise
    return said


KINDS: dict[str, tuple[Callable[[int], Case], Callable[[Case], str]]] = {
    "linear": (option_draws.draw_linear, check_linear),
    "softmax": (option_draws.draw_softmax, check_forward),
    "long": (option_draws.draw_long, check_linear),
    "gradient": (option_draws.draw_gradient, check_gradient),
    "long_gradient": (option_draws.draw_long_gradient, check_gradient),
    "unseen": (option_draws.draw_linear, check_unseen),
    "unseen_exact": (option_draws.draw_softmax, check_unseen),
    "recurrence": (option_draws.draw_recurrence, check_recurrence),
}


def run(kind: str, seed: int) -> tuple[str, str]:
    """Try one case: what came of it, and the complaint or ""."""
    draw, check = KINDS[kind]
    case = draw(seed)
    try:
        with warnings.catch_warnings(), backends(case), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore", UserWarning)
            if seed % 4 == 1:
                # Each head is a task of its own.
                patch.setattr(tuning, "MAX_BLOCK_ELEMENTS", 1)
                patch.setattr(tuning, "MAX_BATCHED_ELEMENTS", 1)
            with linattn.config(precision=case.precision):
                return check(case), ""
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            str(error)
            if isinstance(error, Wrong)
            else (f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        )
        return "failed", f"python -m tests.test_fuzz_options {kind} {seed}\n  {case!r}\n  {text}"


def run_all(kind: str, seeds: range, most: int = 3) -> tuple[Counter[str], list[str]]:
    """Try many cases; stop after so many failures."""
    counts: Counter[str] = Counter()
    complaints: list[str] = []
    for seed in seeds:
        said, complaint = run(kind, seed)
        counts[said] += 1
        complaints += [complaint] if complaint else []
        if len(complaints) == most:
            break
    return counts, complaints


# How many cases the suite has of each kind, in how many tests, and the least share of those that
# are compared, neither refused nor too close to call; `-m fuzz` has one more such test.
SUITE = {
    "linear": (300, 2, 0.8),
    "softmax": (500, 1, 0.8),
    "long": (320, 2, 0.8),
    "gradient": (300, 2, 0.7),
    "long_gradient": (100, 1, 0.7),
    "unseen": (150, 1, 0.6),
    "unseen_exact": (150, 1, 0.7),
    "recurrence": (150, 1, 1.0),
}
QUICK = {"linear"}


@pytest.mark.parametrize(
    ("kind", "seeds", "share"),
    [
        pytest.param(
            kind,
            range(part * count // parts, (part + 1) * count // parts),
            share,
            id=f"{kind}-{part}",
            marks=pytest.mark.fuzz if part >= parts else pytest.mark.quick if kind in QUICK else [],
        )
        for kind, (count, parts, share) in SUITE.items()
        for part in range(parts + 1)
    ],
)
def test_what_is_drawn_is_the_dense_formula(kind, seeds, share):
    counts, complaints = run_all(kind, seeds)
    assert not complaints, "\n".join(complaints)
    assert counts["compared"] >= share * len(seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=KINDS, help="of one case")
    parser.add_argument("seed", nargs="?", type=int, help="of one case")
    parser.add_argument("--cases", type=int, default=0, help="a quarter of them exact attention")
    parser.add_argument("--gradients", type=int, default=0)
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    given = parser.parse_args()
    if given.kind:
        said, complaint = run(given.kind, given.seed)
        print(complaint or f"{said}: {KINDS[given.kind][0](given.seed)!r}")
        return 1 if complaint else 0
    code = 0
    exact = given.cases // 4
    sizes = {"linear": given.cases - exact, "softmax": exact, "gradient": given.gradients}
    sizes["recurrence"] = given.gradients
    sizes["long"] = sizes["long_gradient"] = given.gradients // 4
    for kind, size in sizes.items():
        begun = time.monotonic()
        counts, complaints = run_all(kind, range(given.first, given.first + size), 10**9)
        print(*complaints, sep="\n")
        print(f"{kind}: {dict(counts)}, {time.monotonic() - begun:.0f} s", flush=True)
        code |= bool(complaints)
    return code


if __name__ == "__main__":
    sys.exit(main())
