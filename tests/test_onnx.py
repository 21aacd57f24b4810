"""From NumPy to ONNX Runtime: linattn on arrays of ndonnx, which build a graph."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import linattn
from linattn import feature_maps, layers
from tests.attentions import MAPS
from tests.test_readme import examples

pytestmark = pytest.mark.frameworks

ndx: Any = pytest.importorskip("ndonnx", reason="ndonnx is not installed")
runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
interop: Any = pytest.importorskip("linattn.interop.onnx", reason="ndonnx is not installed")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_torch.md"
PHI = feature_maps.PositiveFeatures(4, 8, rng=0)
KEY = np.zeros((6, 4), np.float32)
LARGEST = {"batch": 4, "length": 12}
linear: Any = linattn.linear_attention


def session_of(model: Any) -> Any:
    content = model.SerializeToString()
    assert len(content) < 2**20
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its errors are raised, too
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def drawn(arguments: Mapping[str, Any], sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Moderate numbers for each argument; those of a mask keep the first key."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, shape in arguments.items():
        array = rng.random([sizes.get(n, n) for n in shape], dtype=np.float32)
        signed = name in ("query", "key", "value", "x")
        arrays[name] = array - np.float32(0.5) if signed else array
        if name == "key_mask":
            arrays[name] = array + (np.arange(array.shape[-1]) == 0) > 0.4
    return arrays


class Case(NamedTuple):
    """A row of the page: a function of ndonnx, its inputs, and the same in NumPy."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    expected: Callable[..., Any] | None = None
    dtypes: dict[str, str] | None = None


def inputs(*shape: Any, **more: Any) -> dict[str, Any]:
    return {"query": shape, "key": shape, "value": shape, **more}


def scanned(query: Any, key: Any, value: Any, kvz: Any, log_scale: Any) -> Any:
    def step(state: Any, query: Any, key: Any, value: Any) -> Any:
        before = linattn.State(state[0], state[1], 0)
        output, after = linattn.decode_step(query, key, value, before, PHI)
        return (after.kvz, after.log_scale), output

    (kvz, log_scale), output = interop.scan(step, [kvz, log_scale], [query, key, value], axis=1)
    return output, kvz * ndx.exp(log_scale)[..., None]


def causal(query: Any, key: Any, value: Any, kvz: Any, log_scale: Any) -> Any:
    state = linattn.State(kvz, log_scale, 0)
    output, after = linear(
        query, key, value, PHI, is_causal=True, initial_state=state, return_state=True
    )
    # Shifts of a state cancel; those of two libraries may differ.
    return output, after.kvz * np.exp(after.log_scale)[..., None]


RULES = {
    "linear": (),
    "gated": ("log_decay",),
    "delta": ("beta",),
    "gated_delta": ("log_decay", "beta"),
}


def recurrences(whole: bool) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, state: Any, **gates: Any) -> Any:
        results = []
        for rule, names in RULES.items():
            options = {name: -gates[name] if name == "log_decay" else gates[name] for name in names}
            if whole:
                results += linattn.linear_recurrence(
                    *(query, key, value),
                    update_rule=rule,
                    initial_state=state,
                    return_state=True,
                    **options,
                )
                continue

            def step(states: Any, *token: Any, rule: Any = rule, names: Any = names) -> Any:
                gates = dict(zip(names, token[3:], strict=True))
                output, after = linattn.recurrence_step(
                    *token[:3], *states, update_rule=rule, **gates
                )
                return [after], output

            sequences = [query, key, value, *options.values()]
            (after,), output = interop.scan(step, [state], sequences, axis=1)
            results += [output, after]
        return results

    return attend


TOKENS = inputs("batch", "length", 4)
STATE = {"kvz": ("batch", 8, 5), "log_scale": ("batch", 8)}
CASES: dict[str, Case] = {
    "`linear_attention`, `key_mask`": Case(
        lambda **given: linear(**given, feature_map=feature_maps.EluFeatures()),
        {**TOKENS, "key_mask": ("batch", "length")},
        dtypes={"key_mask": "bool"},
    ),
    "`softmax_attention`": Case(linattn.softmax_attention, TOKENS),
    "causal `linear_attention` with states: `decode_step` in `scan`": Case(
        scanned, TOKENS | STATE, causal
    ),
    "`linear_recurrence`, four rules, with states: `recurrence_step` in `scan`": Case(
        recurrences(False),
        {
            **TOKENS,
            "state": ("batch", 4, 4),
            **dict.fromkeys(("log_decay", "beta"), ("batch", "length")),
        },
        recurrences(True),
    ),
    "causal `linear_attention`": Case(
        lambda **qkv: linear(**qkv, feature_map=PHI, is_causal=True), inputs("batch", 2, 4)
    ),
}


def named(case: Case) -> list[str]:
    return [n for n in LARGEST if any(n in shape for shape in case.arguments.values())]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_model_gives_the_numbers_of_numpy_at_all_sizes(case):
    largest = {name: LARGEST[name] for name in named(case)}
    session = session_of(interop.export(case.function, case.arguments, largest, dtypes=case.dtypes))
    for batch, length in ((4, 12), (1, 1), (3, 10)):
        arrays = drawn(case.arguments, {"batch": batch, "length": length})
        want = (case.expected or case.function)(**arrays)
        for got, true in zip(
            session.run(None, arrays),
            want if isinstance(want, tuple | list) else [want],
            strict=True,
        ):
            np.testing.assert_allclose(got, true, atol=2e-6, rtol=2e-6)
    for name, size in largest.items():
        arrays = drawn(case.arguments, {"batch": 2, "length": 2, name: size + 1})
        with pytest.raises(Exception, match="out of data bounds"):
            session.run(None, arrays)


@pytest.mark.parametrize("is_corrected", [False, True])
def test_landmarks_that_were_fitted_before(is_corrected):
    rng = np.random.default_rng(0)
    tokens = {n: rng.random((6, 4), dtype=np.float32) for n in ("query", "key", "value")}
    phi = feature_maps.LandmarkFeatures.fit(
        tokens["query"], tokens["key"], num_features=4, corrected=is_corrected, rng=0
    )
    model = interop.export(
        lambda **given: linear(**given, feature_map=phi), dict.fromkeys(tokens, (6, 4))
    )
    (got,) = session_of(model).run(None, tokens)
    np.testing.assert_allclose(got, linear(**tokens, feature_map=phi), rtol=1e-5, atol=1e-5)


def test_the_page_shows_what_is_tested():
    table = PAGE.read_text(encoding="utf-8").partition("| call | sizes that vary |")[2]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE)
    want = [(name, ", ".join(named(case))) for name, case in CASES.items()]
    assert rows == [("`layers.encoder`, the file above", "batch, length"), *want]


def test_features_of_every_map():
    def features(query: Any, key: Any) -> Any:
        found = [phi.query_features(query) for phi in MAPS.values()]
        found += [phi.key_features(key) for phi in MAPS.values()]
        return [array for both in found for array in both if array is not None]

    arguments = {"query": (2, 3, 4), "key": (2, 3, 4)}
    arrays = drawn(arguments, {})
    found = session_of(interop.export(features, arguments)).run(None, arrays)
    for got, want in zip(found, features(**arrays), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


LOADED = """
import sys
import numpy as np
{example}
np.savez("found.npz", x=x, output=output)
assert not {{"linattn", "ndonnx", "onnx"}} & set(sys.modules)
"""


def test_the_encoder_of_the_page_needs_no_linattn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, written),) = examples(PAGE, "ndonnx")
    ((_, loaded),) = examples(PAGE, "onnxruntime")
    names: dict[str, Any] = {}
    exec(written, names)
    subprocess.run([sys.executable, "-c", LOADED.format(example=loaded)], check=True)
    with np.load("found.npz") as found:
        want = layers.encoder(names["params"], found["x"], **names["options"])
        np.testing.assert_allclose(found["output"], want, atol=2e-6)
    weights = sum(array.nbytes for array in names["params"].values())
    assert Path("model.onnx").stat().st_size < weights + 2**20


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: sum((x[:, i : i + 1, :] for i in range(x.shape[1])), x),
            "the number of its operations depends",
        ),
        (lambda x: x * x.shape[1] ** -0.5, r"numbers of shape \(\) that depend on them"),
        (
            lambda x: x + ndx.asarray(np.ones((x.shape[1], 4)).cumsum(0)[::-1]),
            r"of shape \(16, 4\)",
        ),
        (lambda x: x[:, : x.shape[1] // 2, :], "the integer 8 .* has no one reason"),
        (lambda x: ndx.log(x) if x.shape[1] % 2 else ndx.exp(x), "its operation .* depends"),
    ],
)
def test_what_depends_on_a_size_otherwise_is_named_by_an_error(function, reason):
    message = f"one graph for all sizes of length, but .*{reason}.*; give that axis a fixed size"
    with pytest.raises(NotImplementedError, match=message):
        interop.export(function, {"x": (1, "length", 4)}, {"length": 16})


def test_examples_of_docstrings_run():
    assert doctest.testmod(interop).failed == 0


def test_arguments_of_export():
    with pytest.raises(ValueError, match=r"largest must have the size of .*, got none of 'n'"):
        interop.export(abs, {"x": ("n", 4)})
    with pytest.raises(ValueError, match=r"largest\['n'\] must be at least 4, got 3"):
        interop.export(abs, {"x": ("n", 4)}, {"n": 3})
    query = ndx.argument(shape=(2, None, 4), dtype=ndx.float32)
    with pytest.raises(ValueError, match=r"query must have a known shape, .*interop.onnx.export"):
        linear(query, query, query, PHI)


@pytest.mark.parametrize(
    ("library", "remedy"),
    [("mlx.core", r"numpy\.asarray\(query\)"), ("sparse.numba_backend", r"query\.todense\(\)")],
)
def test_libraries_are_refused_by_name(library, remedy):
    kind = type("array", (SimpleNamespace,), {"__module__": library})
    with pytest.raises(TypeError, match=f"got {library.partition('.')[0]}.array; .*{remedy}"):
        linear(kind(shape=(2, 4), ndim=2), KEY, KEY, PHI)


def test_sparse_matrices_are_refused_by_name():
    matrix = pytest.importorskip("scipy.sparse", reason="SciPy is not installed").eye(4)
    with pytest.raises(TypeError, match=r"got scipy\..*; .*query\.toarray\(\)"):
        linear(matrix, KEY, KEY, PHI)
