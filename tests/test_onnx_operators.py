"""Operators of ONNX for models with a state: its own cases, and models that `export` writes."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import layers

onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed")
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(onnx.defs.onnx_opset_version() < 27, reason="onnx has no opset 27"),
]

CASES = "onnx.backend.test.case.node"
NUMBER = {"causal_conv_with_state": 13, "linear_attention": 14}
RTOL = {"float16": 2e-3, "float32": 5e-6}


def node_cases(topic):
    """Cases of the operator that are not written out in primitives: a node and two lists each."""
    package = importlib.import_module(CASES)
    importlib.import_module(f"{CASES}.{topic}")
    found = [case for case in package._NodeTestCases if case.name.startswith(f"test_{topic}")]
    for case in found:
        (node, *others), ((inputs, outputs),) = case.model.graph.node, case.data_sets
        if not others:
            filled = dict(zip([name for name in node.input if name], inputs, strict=True))
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            yield case.name, filled, attributes, outputs


def close(got, want):
    assert got.dtype == want.dtype
    size = max(1, np.abs(want).max(initial=0))
    np.testing.assert_allclose(got, want, atol=size * RTOL[want.dtype.name], rtol=0)


def test_its_cases_of_the_convolution():
    count = 0
    for _, given, attributes, (output, state) in node_cases("causal_conv_with_state"):
        count += 1
        activation = attributes.get("activation", b"none").decode()
        params = {name: given[name] for name in ("weight", "bias") if name in given}
        before = given.get("past_state")
        ours, after = layers.causal_convolution(
            params,
            np.swapaxes(given["input"], 1, 2),
            activation={"none": None, "swish": "silu"}.get(activation, activation),
            state=None if before is None else np.swapaxes(before, 1, 2),
            return_state=True,
        )
        close(np.swapaxes(ours, 1, 2), output)
        np.testing.assert_array_equal(np.swapaxes(after, 1, 2), state)
    assert count == NUMBER["causal_conv_with_state"]


def test_its_cases_of_linear_attention():
    count = 0
    for _, given, attributes, (output, state) in node_cases("linear_attention"):
        count += 1
        kv_heads, heads = attributes["kv_num_heads"], attributes["q_num_heads"]
        batch, length, _ = given["query"].shape

        def per_head(x, n, batch=batch, length=length, heads=kv_heads):
            return np.moveaxis(x.reshape(batch, length, heads, n, -1), 1, 3)

        arrays = {"query": per_head(given["query"], heads // kv_heads)}
        arrays |= {name: per_head(given[name], 1) for name in ("key", "value")}
        if "decay" in given:
            by_channel = given["decay"].shape[-1] != kv_heads
            decay = per_head(given["decay"], 1)
            arrays["log_decay"] = decay if by_channel else decay[..., 0]
        if "beta" in given:
            beta = np.broadcast_to(given["beta"], (batch, length, kv_heads))
            arrays["beta"] = per_head(beta, 1)[..., 0]
        if "past_state" in given:
            arrays["initial_state"] = given["past_state"].astype(np.float32)[:, :, None]
        ours, after = linattn.linear_recurrence(
            **arrays,
            update_rule=attributes.get("update_rule", b"gated_delta").decode(),
            scale=attributes.get("scale", 0.0) or None,
            return_state=True,
        )
        close(np.moveaxis(ours, 3, 1).reshape(output.shape), output)
        close(after[:, :, 0].astype(state.dtype), state)
    assert count == NUMBER["linear_attention"]


def arguments(rule, query_lead, lead, by_channel, has_state):
    rng = np.random.default_rng(0)
    length, dim, value_dim = 9, 4, 3
    found = {
        "query": rng.standard_normal((*query_lead, length, dim)),
        "key": rng.standard_normal((*lead, length, dim)) / 2,
        "value": rng.standard_normal((*lead, length, value_dim)),
    }
    if "gated" in rule:
        found["log_decay"] = -rng.random((*lead, length, dim) if by_channel else (*lead, length))
    if "delta" in rule:
        found["beta"] = rng.random((*lead, length))
    if rule == "dplr":
        found |= {"erase_key": found["key"], "read_key": found["key"]}
    if has_state:
        found["initial_state"] = rng.standard_normal((*lead, dim, value_dim))
    return {name: array.astype(np.float32) for name, array in found.items()}


def call(rule, arrays):
    return linattn.linear_recurrence(**arrays, update_rule=rule, scale=0.3, return_state=True)


def exported(rule, arrays, *, varies=True, **options):
    """Return a model for batches and lengths that vary, or of the shapes of the arrays."""
    interop = pytest.importorskip("linattn.interop.onnx", reason="ndonnx is not installed")
    shapes, ndim = {}, arrays["key"].ndim
    for name, array in arrays.items():
        shape = list(array.shape)
        if varies and name != "initial_state":
            shape[-1 if array.ndim < ndim else -2] = "length"
        if varies and ndim > 2:
            shape[0] = "batch"
        shapes[name] = shape
    largest = {"length": 16, "batch": 4}
    named = {name: largest[name] for name in largest if varies and (ndim > 2 or name == "length")}

    return interop.export(lambda **given: call(rule, given), shapes, named, **options)


def runs(model, arrays):
    onnx.checker.check_model(model, full_check=True)
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    providers = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(model.SerializeToString(), providers=providers)
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    return [session.run(None, arrays), evaluator.run(None, arrays)]


def operators(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    ("rule", "query_lead", "lead", "by_channel", "has_state"),
    [
        ("linear", (2, 3), (2, 3), False, True),
        ("gated", (2,), (2,), True, True),
        ("delta", (), (), False, False),
        ("gated_delta", (2, 3, 2), (2, 3, 1), True, True),
        ("gated_delta", (2, 2, 3), (2, 1, 3), False, True),
    ],
)
def test_export_writes_the_operator(rule, query_lead, lead, by_channel, has_state):
    arrays = arguments(rule, query_lead, lead, by_channel, has_state)
    model = exported(rule, arrays)
    assert operators(model).count("LinearAttention") == 1
    want = call(rule, arrays)
    for results in runs(model, arrays):
        for got, wanted in zip(results, want, strict=True):
            close(got, wanted)


@pytest.mark.parametrize(
    ("rule", "query_lead", "lead", "options"),
    [
        ("gated", (2,), (2,), {"opset_version": 21}),
        ("dplr", (2,), (2,), {}),
        ("linear", (3, 2), (1, 2), {}),
    ],
)
def test_a_call_that_is_no_operator_stays_primitives(rule, query_lead, lead, options):
    """Of an older set, of a rule that it lacks, and where queries share the axis of batches."""
    arrays = arguments(rule, query_lead, lead, False, True)
    model = exported(rule, arrays, varies=False, **options)
    assert "LinearAttention" not in operators(model)
    want = call(rule, arrays)
    for got, wanted in zip(runs(model, arrays)[0], want, strict=True):
        close(got, wanted)


def test_an_opset_that_there_is_not():
    arrays = arguments("linear", (), (), False, False)
    for version in (20, onnx.defs.onnx_opset_version() + 1):
        with pytest.raises(ValueError, match="opset_version must be"):
            exported("linear", arrays, opset_version=version)
