"""From NumPy to ONNX Runtime: linattn on arrays of ndonnx, which build a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps

pytestmark = pytest.mark.frameworks

ndx: Any = pytest.importorskip("ndonnx", reason="ndonnx is not installed")
runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

QKV = np.random.default_rng(0).standard_normal((3, 2, 6, 4), dtype=np.float32) / 2
GATE = np.random.default_rng(1).random((2, 6), dtype=np.float32)
PHI = feature_maps.PositiveFeatures(4, 8, rng=0)
linear: Any = linattn.linear_attention


def exported(call: Any, *arrays: Any) -> list[Any]:
    """Results of the graph of a call in onnxruntime."""
    given = {f"x{i}": ndx.argument(shape=a.shape, dtype=ndx.float32) for i, a in enumerate(arrays)}
    results = call(*given.values())
    model = ndx.build(given, {f"y{i}": a for i, a in enumerate(results)})
    content = model.SerializeToString()
    assert len(content) < 2**20
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, dict(zip(given, arrays, strict=True)))
    return found


def check(call: Any, *arrays: Any) -> None:
    for got, want in zip(exported(call, *arrays), call(*arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


CALLS: dict[str, Any] = {
    "elu": lambda *qkv: [linear(*qkv, feature_maps.EluFeatures())],
    "positive": lambda *qkv: [linear(*qkv, PHI)],
    "taylor, of both signs": lambda *qkv: [linear(*qkv, feature_maps.TaylorFeatures(4))],
    "causal": lambda *qkv: [linear(*qkv, PHI, is_causal=True)],
    "softmax": lambda *qkv: [linattn.softmax_attention(*qkv)],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_gives_the_numbers_of_numpy(name):
    check(CALLS[name], *QKV)


@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_a_token_of_a_recurrence(rule):
    state = np.zeros((2, 4, 4), dtype=np.float32) + 0.1

    def call(*given: Any) -> Any:
        query, key, value, state, gate = given
        gates = {"log_decay": -gate, "beta": gate} if rule == "gated_delta" else {}
        return linattn.recurrence_step(query, key, value, state, update_rule=rule, **gates)

    tokens = [array[:, 0] for array in QKV]
    if rule == "linear":
        check(lambda *given: call(*given, None), *tokens, state)
    else:
        check(call, *tokens, state, GATE[:, 0])


def test_a_step_of_decoding_takes_and_returns_its_state():
    _, state = linear(*QKV, PHI, return_state=True)

    def call(query: Any, key: Any, value: Any, kvz: Any, log_scale: Any) -> Any:
        before = linattn.State(kvz, log_scale, 6)
        output, after = linattn.decode_step(query, key, value, before, PHI)
        return output, after.kvz, after.log_scale

    arrays = (*(array[:, 0] for array in QKV), state.kvz, state.log_scale)
    # The shifts may differ: they cancel.
    (got, *after), (want, *known) = exported(call, *arrays), call(*arrays)
    np.testing.assert_allclose(got, want, atol=2e-6)
    sums, true = (kvz * np.exp(shift)[..., None] for kvz, shift in (after, known))
    np.testing.assert_allclose(sums, true, rtol=2e-6, atol=2e-6)


def test_unknown_lengths_are_refused_by_name():
    query = ndx.argument(shape=(2, None, 4), dtype=ndx.float32)
    with pytest.raises(ValueError, match=r"query must have a known shape, got \(2, None, 4\)"):
        linear(query, query, query, PHI)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("mlx.core", r"numpy\.asarray\(query\)"), ("sparse.numba_backend", r"query\.todense\(\)")],
)
def test_libraries_are_refused_by_name(library, remedy):
    kind = type("array", (SimpleNamespace,), {"__module__": library})
    with pytest.raises(TypeError, match=f"got {library.partition('.')[0]}.array; .*{remedy}"):
        linear(kind(shape=(2, 4), ndim=2), QKV[0], QKV[0], PHI)


def test_sparse_matrices_are_refused_by_name():
    matrix = pytest.importorskip("scipy.sparse", reason="SciPy is not installed").eye(4)
    with pytest.raises(TypeError, match=r"got scipy\..*; .*query\.toarray\(\)"):
        linear(matrix, QKV[0], QKV[0], PHI)
