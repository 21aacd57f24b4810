"""The contracts: with backends, `check_backend` and its protocol; and with maps."""

# Star arguments.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import types
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn_numpy
from linattn import _generic
from linattn._driver import backward, forward
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.testing import check_backend
from linattn.testing._blocks import blocks, leaves
from linattn.typing import (
    Backend,
    BlockTier,
    Declined,
    FeatureMap,
    MapAttributes,
    Partial,
    Services,
    State,
    WholeTier,
    implements,
)

ROOT = Path(__file__).resolve().parents[1]
GENERIC = [
    *("plan", "reduce_block", "read_block", "scan_block", "exact_block"),
    *("read_block_vjp", "reduce_block_vjp", "scan_vjp"),
]


def backend(**functions):
    """Make a backend of someone else."""
    module = types.ModuleType("third_party")
    vars(module).update(functions, __all__=list(functions))
    return module


# Backends that keep it --------------------------------------------------------------------------


def test_numpy_keeps_it():
    report = check_backend(linattn_numpy)
    assert report.passed, str(report)
    assert report.reservation == ""


def test_a_third_party_keeps_it():
    module = backend(**{name: getattr(_generic, name) for name in GENERIC})
    report = check_backend(module, num_problems=30)
    assert report.passed, str(report)
    assert {row.check for row in report.rows} == {"names", *GENERIC}


def test_no_argument_is_beyond_float32():
    """ReLU rows that see no key but one of e^-100 have gradients of e^100."""
    largest = np.finfo(np.float32).max
    for block in blocks(np.random.default_rng(1), 90):
        for array in leaves(tuple(block.arguments.values())):
            if array.dtype.kind == "f":
                assert_array_equal(
                    np.isfinite(array) & (np.abs(array) > largest), False, err_msg=block.name
                )


def test_what_is_declined_is_counted_with_its_reasons():
    def read_block(query_spec, tokens, state, want_log):
        if tokens.x.shape[-2] > 4:
            return Declined("n is above 4")
        return _generic.read_block(query_spec, tokens, state, want_log)

    def reduce_block(key_spec, tokens, values_and_one, state):
        return NotImplemented

    report = check_backend(
        backend(read_block=read_block, reduce_block=reduce_block), num_problems=8
    )
    assert report.passed
    rows = {row.check: row for row in report.rows}
    assert "declined: n is above 4" in rows["read_block"].detail
    assert rows["reduce_block"].result == "skipped"
    assert report.reservation == "Never compared: reduce_block."
    assert max(len(line) for line in str(report).splitlines()) <= 80


# Backends that break it: a line each --------------------------------------------------------------


def sums_one_percent_off(key_spec, tokens, values_and_one, state):
    after = _generic.reduce_block(key_spec, tokens, values_and_one, state)
    return after._replace(kvz=after.kvz * 1.01)


def parameter_renamed(key_spec, tokens, values, state):
    return _generic.reduce_block(key_spec, tokens, values, state)


def mask_ignored(key_spec, tokens, values_and_one, state):
    return _generic.reduce_block(key_spec, tokens._replace(log_weight=None), values_and_one, state)


def state_changed_in_place(key_spec, tokens, values_and_one, state):
    after = _generic.reduce_block(key_spec, tokens, values_and_one, state)
    state.kvz[...] = after.kvz
    return after


def wrong_dtype(key_spec, tokens, values_and_one, state):
    after = _generic.reduce_block(key_spec, tokens, values_and_one, state)
    return after._replace(kvz=after.kvz.astype(np.float64), log_scale=after.log_scale.astype("f8"))


def wrong_log_scale(key_spec, tokens, values_and_one, state):
    after = _generic.reduce_block(key_spec, tokens, values_and_one, state)
    return after._replace(log_scale=after.log_scale + 0.1)


def length_forgotten(key_spec, tokens, values_and_one, state):
    return _generic.reduce_block(key_spec, tokens, values_and_one, state)._replace(length=0)


def want_log_ignored(query_spec, tokens, state, want_log):
    part = _generic.read_block(query_spec, tokens, state, want_log)
    return Partial(part.num_den, part.log * 0)


def broadcast_heads_raise(query_spec, tokens, state, want_log):
    if tokens.x.shape[:-2] != state.kvz.shape[:-2]:
        raise ValueError("heads differ")
    return _generic.read_block(query_spec, tokens, state, want_log)


def far_states_add_up(query_spec, tokens, state, want_log):
    kvz = state.kvz * np.exp(state.log_scale)[..., None]
    near = State(kvz, np.where(state.log_scale > -np.inf, 0, state.log_scale), state.length)
    return _generic.read_block(query_spec, tokens, near, want_log)


def adjoint_not_added(query_spec, tokens, state, grad_output, adjoint):
    nothing = adjoint._replace(kvz=adjoint.kvz * 0, log_scale=adjoint.log_scale - np.inf)
    return _generic.read_block_vjp(query_spec, tokens, state, grad_output, nothing)


def one_by_one_for_one(query_spec, key_spec, query, key, values_and_one, state, want_log):
    return Declined("one head at a time", by_head=True)


def later_keys_seen(query_spec, key_spec, query, key, values_and_one, state, want_log):
    after = _generic.reduce_block(key_spec, key, values_and_one, state)
    return _generic.read_block(query_spec, query, after, want_log), after


def returns_a_tuple(query_spec, tokens, state, want_log):
    return tuple(_generic.read_block(query_spec, tokens, state, want_log))


def tasks_lost(problem):
    return _generic.plan(problem)._replace(tasks=[])


def pullback_of_its_output(problem):
    output, state, log = forward.solve(problem, return_state=True)

    def pullback(cotangent):
        return backward.pull(problem, cotangent).query + 0 * output, *[None] * 3

    return output, state, log, pullback


def not_called(query_spec, tokens, state, want_log):
    return None


DEFECTS = [
    (
        "reduce_block",
        sums_one_percent_off,
        r"state.kvz exp\(log_scale\)\[.*\] is .*, want .*tokens",
    ),
    ("reduce_block", parameter_renamed, "has the parameters key_spec, tokens, values, state, want"),
    ("reduce_block", mask_ignored, r"state.kvz .*(masked|log weights).*"),
    ("reduce_block", state_changed_in_place, r"changes an argument of shape \(.*\) in place"),
    ("reduce_block", wrong_dtype, "returns a state in float64, want float32"),
    ("reduce_block", wrong_log_scale, r"state.kvz exp\(log_scale\)"),
    ("reduce_block", length_forgotten, "state.length is 0, want"),
    ("read_block", want_log_ignored, r"partial.num_den exp\(log\)"),
    ("read_block", broadcast_heads_raise, r"raises ValueError: heads differ \(.* of query"),
    ("read_block", far_states_add_up, r"partial.num_den.*100 above"),
    ("read_block", returns_a_tuple, "returns .*want partial|is a tuple, want a Partial"),
    ("read_block_vjp", adjoint_not_added, r"adjoint.kvz exp\(log_scale\)"),
    ("scan_block", later_keys_seen, r"partial.num_den"),
    ("scan_block", one_by_one_for_one, "declines by head what has one head"),
    ("attention_pullback", pullback_of_its_output, "gradient of query.* is nan, want"),
    ("plan", tasks_lost, "tasks do not hold every head once"),
    ("reed_block", not_called, "reed_block is no function of .*Backend; did you mean read_block?"),
]


@pytest.mark.parametrize(
    ("name", "function", "message"), DEFECTS, ids=[case[1].__name__ for case in DEFECTS]
)
def test_a_defect_is_found_and_placed(name, function, message):
    report = check_backend(backend(**{name: function}), num_problems=30, on_fail="return")
    failed = [row for row in report.rows if row.result == "FAILED"]
    assert [row.check for row in failed] == ["names" if name == "reed_block" else name]
    assert re.search(message, failed[0].detail), failed[0].detail


# The protocol -------------------------------------------------------------------------------------


def tier(*protocols):
    return {n for protocol in protocols for n in vars(protocol) if not n.startswith("_")}


def test_every_block_function_has_a_generic_one_with_the_parameters_of_the_contract():
    for name in tier(BlockTier):
        wanted = inspect.signature(getattr(Backend, name)).parameters
        got = inspect.signature(getattr(_generic, name)).parameters
        assert list(got)[: len(wanted)] == list(wanted), name


@pytest.mark.parametrize("backend", ["linattn_numpy", "linattn_cupy"])
def test_a_type_checker_sees_every_function_of_a_backend(backend):
    text = (ROOT / "backends" / backend / "__init__.py").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "(\w+)",$', text, re.MULTILINE))
    checked = set(re.findall(r"^    implements\(Backend\.(\w+)\)\(\1\)$", text, re.MULTILINE))
    assert checked == listed & tier(WholeTier, BlockTier, Services)
    assert len(checked) > 8


def test_a_function_comes_back_from_its_declaration():
    assert implements(Backend.plan)(_generic.plan) is _generic.plan


def test_the_docs_list_every_function_of_the_contract():
    spec = importlib.util.spec_from_file_location("contract_table", ROOT / "docs" / "_contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "typing.md").read_text(encoding="utf-8")
    assert page.count(module.MARKER) == 1
    shown = module.on_page_markdown(page)
    assert module.MARKER not in shown
    for name in tier(WholeTier, BlockTier, Services):
        parameters = ", ".join(inspect.signature(getattr(Backend, name)).parameters)
        assert f"| `{name}({parameters})` | " in shown
    assert "(self" not in module.table()


# Feature maps -----------------------------------------------------------------------------------


def named(node):
    """Name of a variable or attribute, "" for what has none."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def read_of_maps():
    """Attributes that the code reads of an object that it calls `feature_map`, and where."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "linattn").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name: object = None
            if isinstance(node, ast.Attribute) and named(node.value).endswith("feature_map"):
                name = node.attr
            elif isinstance(node, ast.Call) and named(node.func) in ("getattr", "hasattr"):
                of, what = node.args[0], node.args[1]
                if named(of).endswith("feature_map") and isinstance(what, ast.Constant):
                    name = what.value
            if isinstance(name, str) and not name.startswith("_"):
                found.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_attribute_that_is_read_of_a_map_is_in_a_protocol():
    declared = tier(FeatureMap, MapAttributes)
    # Of maps of one class, which the reader has made sure of.
    own = {"landmarks", "log_normalizers", "metric", "probes", "used"}
    own |= {"key_shift", "query_shift", "transform", "specs", "max_length", "map"}
    read = read_of_maps()
    assert set(read) - declared - own == set(), {name: read[name] for name in set(read) - declared}
    assert len(read) > 15


def test_every_attribute_of_the_protocols_is_read():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "linattn").rglob("*.py"))
    for name in tier(FeatureMap, MapAttributes):
        assert re.search(rf'\.{name}\b|"{name}"', text), name


def test_maps_of_the_library_have_what_they_say():
    for phi in (PositiveFeatures(4, 8, rng=0), EluFeatures()):
        assert isinstance(phi, FeatureMap)
        for name in ("dim", "scale", "softmax_kernel", "causal", "positive", "unbiased"):
            assert getattr(phi, name) is None or isinstance(getattr(phi, name), bool | int | float)
