"""Gated and delta recurrences: against the loop, in every way to cut them, and their gradients."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call"

from __future__ import annotations

import importlib

import numpy as np
import pytest

import linattn
from linattn.reference import recurrence
from tests import dense_oracle

RULES = ("linear", "gated", "delta", "gated_delta")
KINDS = [(rule, False) for rule in RULES] + [("gated", True), ("gated_delta", True)]
KINDS += [("dplr", True)]
IDS = [f"{rule}{'-channels' if by_channel else ''}" for rule, by_channel in KINDS]
RTOL = {"float64": 1e-11, "float32": 5e-6}

kinds = pytest.mark.parametrize(("rule", "by_channel"), KINDS, ids=IDS)


def problem(
    rule, by_channel=False, *, length=70, lead=(2, 3), dim=5, value_dim=4, decay=0.5, seed=0
):
    """Random arguments: keys of norm 1, log decays of mean `-decay`, betas in [0, 2]."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, *lead, length, dim))
    arguments = {
        "query": query,
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((*lead, length, value_dim)),
        "initial_state": rng.standard_normal((*lead, dim, value_dim)),
    }
    if "gated" in rule or rule == "dplr":
        shape = (*lead, length, dim) if by_channel else (*lead, length)
        arguments["log_decay"] = -decay * rng.exponential(size=shape)
    if "delta" in rule:
        arguments["beta"] = 2 * rng.random((*lead, length))
    if rule == "dplr":
        read = rng.standard_normal((*lead, length, dim))
        arguments["read_key"] = read / np.linalg.norm(read, axis=-1, keepdims=True)
        arguments["erase_key"] = arguments["read_key"] + 0.1 * rng.standard_normal(read.shape)
        arguments["beta"] = rng.random((*lead, length, dim) if by_channel else (*lead, length))
    return arguments


def order_of(arguments):
    """Names of the arguments in the order of their gradients."""
    names = ("query", "key", "value", "log_decay", "beta", "erase_key", "read_key", "initial_state")
    return [name for name in names if name in arguments]


def rows(arguments, start, stop, by_channel):
    """Arguments of some of the tokens."""
    part = dict(arguments)
    for name in set(part) - {"initial_state"}:
        has_dim = axes_of(name, part, by_channel) == 2
        part[name] = part[name][(..., slice(start, stop), *([slice(None)] if has_dim else []))]
    return part


def axes_of(name, arguments, by_channel):
    """Number of last axes that an argument has beside its leading ones."""
    if name == "beta":
        return 1 + (by_channel and "read_key" in arguments)
    return 1 + by_channel if name == "log_decay" else 2


def error(got, want):
    """Largest difference, in terms of the largest entry but at least 1."""
    assert got.shape == want.shape
    return np.max(np.abs(got - want), initial=0) / np.max(np.abs(want), initial=1)


def assert_as_loop(arguments, rule, dtype="float64", roundings=1, **options):
    """Compare with the loop, of the backend and of the generic code."""
    arrays = {name: array.astype(dtype) for name, array in arguments.items()}
    want = recurrence(**{n: a.astype(np.float64) for n, a in arrays.items()}, update_rule=rule)
    options |= {"update_rule": rule, "return_state": True}
    results = [linattn.linear_recurrence(**arrays, **options)]
    with linattn.without_backends():
        results.append(linattn.linear_recurrence(**arrays, **options))
    for got in results:
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == dtype
            assert error(ours, theirs) < roundings * RTOL[dtype]


# The oracle -----------------------------------------------------------------------------------


def test_the_loop_by_hand():
    """Two tokens, d = e = 1: every rule on paper."""
    one = np.ones((2, 1))
    tokens = {"query": one, "key": [[1.0], [0.5]], "value": [[4.0], [3.0]], "scale": 1.0}
    half = np.log([0.5, 0.25])
    wanted = {"linear": [6.0, 7.5], "gated": [5.0, 2.75], "delta": [3.0, 3.75]}
    gates = {"linear": {}, "gated": {"log_decay": half}, "delta": {"beta": [0.5, 1.0]}}
    wanted["gated_delta"] = [2.5, 1.96875]
    gates["gated_delta"] = {"log_decay": half, "beta": [0.5, 1.0]}
    for rule in RULES:
        output, state = recurrence(**tokens, **gates[rule], update_rule=rule, initial_state=[[2.0]])
        np.testing.assert_allclose(output[:, 0], wanted[rule], rtol=1e-15)
        np.testing.assert_allclose(state[0, 0], wanted[rule][1], rtol=1e-15)


def test_the_loop_rejects_what_does_not_fit():
    x = np.ones((3, 2))
    with pytest.raises(ValueError, match="update_rule must be linear, gated"):
        recurrence(x, x, x, update_rule="rwkv")
    with pytest.raises(ValueError, match="beta must be an array"):
        recurrence(x, x, x, update_rule="delta")
    with pytest.raises(ValueError, match="log_decay must be None"):
        recurrence(x, x, x, update_rule="linear", log_decay=x[:, 0])
    with pytest.raises(TypeError, match="arrays must be real"):
        recurrence(1j * x, x, x, update_rule="linear")


# Against the loop -----------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_long_sequences_keep_their_digits(rule, by_channel, dtype):
    """5,000 tokens with decays from e^-0.0005 on."""
    a = problem(rule, by_channel, length=5000, lead=(), dim=16, decay=5e-4)
    assert_as_loop(a, rule, dtype)


@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_beta_at_its_ends(rule, dtype):
    for value in (0.0, 1.0, 2.0):
        a = problem(rule, length=300, dim=8)
        a["beta"] = np.full_like(a["beta"], value)
        assert_as_loop(a, rule, dtype)
    # All keys the same: powers of the triangle would have terms of 1e17.
    a = problem(rule, length=100, dim=8)
    a["beta"] = np.full_like(a["beta"], 2.0)
    a["key"] = np.broadcast_to(a["key"][..., :1, :], a["key"].shape)
    # At 2 no rounding is forgotten: 6.4e-6 on a processor without AVX-512.
    assert_as_loop(a, rule, dtype, roundings=2)


@pytest.mark.parametrize("dim", [16, 64])
def test_rounding_of_reflections_adds_up_slowly(xp_any_shape, dim):
    """At beta = 2 nothing is forgotten, the rounding of no token either: a loop loses 3e-6."""
    xp = xp_any_shape
    a = problem("delta", length=2000, lead=(2,), dim=dim, seed=dim)
    a["beta"] = np.full_like(a["beta"], 2.0)
    arrays = {name: array.astype(np.float32) for name, array in a.items()}
    want, _ = recurrence(**arrays, update_rule="delta")
    given = {name: xp.array(array, "float32") for name, array in arrays.items()}
    got = linattn.linear_recurrence(**given, update_rule="delta")
    assert error(xp.numpy(got), want) < RTOL["float32"]


# Every way to cut it --------------------------------------------------------------------------


@kinds
def test_no_later_token_is_felt(rule, by_channel):
    a = problem(rule, by_channel, length=150)
    before = linattn.linear_recurrence(**a, update_rule=rule)
    for t in (1, 63, 64, 100):
        b = {name: array.copy() for name, array in a.items()}
        later = rows(b, t, 150, by_channel)
        for name in ("query", "key", "value"):
            later[name][...] *= -3.0
        after = linattn.linear_recurrence(**b, update_rule=rule)
        np.testing.assert_array_equal(after[..., :t, :], before[..., :t, :])
        assert error(after[..., t:, :], before[..., t:, :]) > 0.01


def test_what_is_returned_is_new():
    a = problem("gated_delta")
    before = {name: array.copy() for name, array in a.items()}
    _, state = linattn.linear_recurrence(**a, update_rule="gated_delta", return_state=True)
    state += 1
    nothing = rows(a, 0, 0, False)
    output, state = linattn.linear_recurrence(
        **nothing, update_rule="gated_delta", return_state=True
    )
    assert output.shape == (2, 3, 0, 4)
    state += 1
    for name, array in a.items():
        np.testing.assert_array_equal(array, before[name])


def test_precision_of_the_settings():
    a = {name: array.astype(np.float32) for name, array in problem("gated_delta").items()}
    del a["initial_state"]
    with linattn.config(precision="float64"):
        output, state = linattn.linear_recurrence(**a, update_rule="gated_delta", return_state=True)
    assert (output.dtype, state.dtype) == (np.float32, np.float64)
    assert error(state, recurrence(**a, update_rule="gated_delta")[1]) < 1e-13


# Gradients ------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0])
def test_gradients_keep_their_digits_at_any_decay(rule, by_channel, decay):
    """By a complex step through the loop, relative to the largest: those of decays may be e^-50."""
    rng = np.random.default_rng(1)
    a = problem(rule, by_channel, length=11, lead=(2,), decay=decay)
    a["query"] = rng.standard_normal((3, 2, 11, 5))  # several queries of one key
    grads = rng.standard_normal((3, 2, 11, 4)), rng.standard_normal((2, 5, 4))
    given = {"update_rule": rule, "return_state": True}
    pulled = [
        linattn.linear_recurrence_vjp(**a, **given, chunk_size=size)[1](*grads) for size in (4, 64)
    ]
    for name, *found in zip(order_of(a), *pulled, strict=True):
        direction = rng.standard_normal(a[name].shape)
        run = dense_oracle.recurrence(**a | {name: a[name] + 1e-30j * direction}, update_rule=rule)
        want = 1e30 * np.imag((grads[0] * run.output).sum() + (grads[1] * run.state).sum())
        for ours in found:
            assert ours.shape == a[name].shape
            largest = np.abs(ours).max() * np.abs(direction).sum()
            assert abs((ours * direction).sum() - want) <= 1e-12 * largest, name


# Published recurrences ------------------------------------------------------------------------


def run_onnx(engine, inputs, **attributes):
    """Run ONNX's operator LinearAttention once, by its reference or by ONNX Runtime."""
    reason = f"{engine} is not installed"
    onnx = pytest.importorskip("onnx", reason=reason)
    runtime = pytest.importorskip(engine, reason=reason)
    if onnx.defs.onnx_opset_version() < 27:
        pytest.skip(f"onnx {onnx.__version__} has no LinearAttention")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    names = ["query", "key", "value", "past_state", "decay", "beta"]
    slots = [name if name in inputs else "" for name in names]
    node = helper.make_node("LinearAttention", slots, ["output", "state"], **attributes)
    graph = helper.make_graph(
        [node],
        "recurrence",
        [helper.make_tensor_value_info(name, kind, x.shape) for name, x in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name in ("output", "state")],
    )
    opset = [helper.make_opsetid("", 27)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=11)
    if engine == "onnx":
        return importlib.import_module("onnx.reference").ReferenceEvaluator(model).run(None, inputs)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


@pytest.mark.parametrize("engine", ["onnx", "onnxruntime"])
@pytest.mark.parametrize(("rule", "by_channel"), KINDS[:-1], ids=IDS[:-1])
def test_the_operator_of_onnx(engine, rule, by_channel):
    """Packed (B, T, H D), with two query heads for each of the three heads of states."""
    batch, length, heads, group, dim, value_dim = 2, 19, 3, 2, 6, 4
    a = problem(rule, by_channel, length=length, lead=(batch, heads, 1), dim=dim)
    a["query"] = np.random.default_rng(1).standard_normal((batch, heads, group, length, dim))
    a = {name: array.astype(np.float32) for name, array in a.items()}

    def packed(x):
        return np.moveaxis(x, 3, 1).reshape(batch, length, -1)

    inputs = {name: packed(a[name]) for name in ("query", "key", "value")}
    inputs["past_state"] = a["initial_state"].reshape(batch, heads, dim, value_dim)
    if "log_decay" in a:
        inputs["decay"] = packed(a["log_decay"])
    if "beta" in a:
        inputs["beta"] = packed(a["beta"])
    sizes = {"q_num_heads": heads * group, "kv_num_heads": heads}
    output, state = run_onnx(engine, inputs, update_rule=rule, **sizes)
    ours, after = linattn.linear_recurrence(**a, update_rule=rule, return_state=True)
    assert error(packed(ours), output) < 5e-6
    assert error(after.reshape(state.shape), state) < 5e-6


# Bad input ------------------------------------------------------------------------------------


def attempt(error_type, match, rule="gated_delta", **changes):
    a = {**problem("gated_delta", length=6), **changes}
    with pytest.raises(error_type, match=match):
        linattn.linear_recurrence(**a, update_rule=rule)


def test_bad_arguments():
    a = problem("gated_delta", length=6)
    attempt(
        ValueError, "update_rule must be one of linear, gated, delta, gated_delta", rule="mamba"
    )
    attempt(ValueError, "log_decay must be None for update_rule='delta'", rule="delta")
    attempt(ValueError, "beta must be given for update_rule='gated_delta', got None", beta=None)
    attempt(ValueError, "log_decay must be at most 0, got 0.9", log_decay=np.full((2, 3, 6), 0.9))
    attempt(ValueError, "beta must have a number for each token", beta=np.ones((2, 3, 5)))
    attempt(ValueError, "with as many; got", log_decay=-np.ones((2, 3, 6, 4)))
    attempt(ValueError, "one length", value=a["value"][..., :5, :])
    attempt(ValueError, "one dim", query=a["query"][..., :4])
    attempt(ValueError, r"must have shape \(..., 5, 4\)", initial_state=np.zeros((4, 5)))
    attempt(ValueError, "accumulation dtype", initial_state=np.zeros((5, 4), np.float32))
    attempt(ValueError, "leading axes must broadcast", beta=np.ones((5, 3, 6)))
    attempt(ValueError, "chunk_size must be at least 1", chunk_size=0)
    attempt(TypeError, "beta must be an array", beta=0.5)
    attempt(TypeError, "beta must have dtype", beta=np.ones((2, 3, 6), int))
    attempt(TypeError, "scale must be a real number", scale="1")
    attempt(TypeError, "return_state must be True or False", return_state=1)


def test_bad_borders():
    for borders in ([0, 5], [1, 6], [0, 4, 3, 6], [6], []):
        attempt(ValueError, "cu_seqlens must rise from 0 to the length, 6", cu_seqlens=borders)
    attempt(TypeError, "cu_seqlens must be integers, got dtype float64", cu_seqlens=[0.0, 6.0])
    attempt(ValueError, "initial_state must have an axis of 3 in front", cu_seqlens=[0, 2, 4, 6])


def test_bad_cotangents():
    a = problem("delta", length=6)
    output, pullback = linattn.linear_recurrence_vjp(**a, update_rule="delta")
    with pytest.raises(ValueError, match="grad_output must have the shape of output"):
        pullback(output[..., :2])
    with pytest.raises(ValueError, match="grad_state must be None without return_state"):
        pullback(output, a["initial_state"])


def test_a_bad_step():
    a = {
        name: array[..., 0, :]
        for name, array in problem("linear").items()
        if name != "initial_state"
    }
    with pytest.raises(ValueError, match=r"initial_state must have shape"):
        linattn.recurrence_step(**a, state=np.zeros((3, 3)), update_rule="linear")
    with pytest.raises(TypeError, match="beta must be an array"):
        linattn.recurrence_step(**a, state=np.zeros((5, 4)), update_rule="delta", beta=1.0)
