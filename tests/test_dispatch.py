"""Which code runs: backends by entry point, the generic path, and the settings of a context."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc"

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import threading
import types
from contextvars import copy_context

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_numpy
from linattn import _dispatch, _generic, _settings
from linattn._driver import problem
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.testing._caches import clear_caches
from linattn.typing import Declined, Exact, Partial, Plan, Problem, State
from tests.attentions import inputs

PHI = EluFeatures()
BLOCK_TIER = ["reduce_block", "read_block", "scan_block", "exact_block", "plan"]
WHOLE_TIER = ["attention", "decode"]


def tokens(length=10, dtype=np.float64):
    return inputs(length, 4, lead=(2,), dtype=dtype)


def run_everything():
    """Call each public function once; return how often what should be dispatched."""
    query, key, value = tokens()
    linattn.linear_attention(query, key, value, PHI, chunk_size=5)
    linattn.linear_attention(query, key, value, PHI, is_causal=True, chunk_size=5)
    linattn.softmax_attention(query, key, value)
    state = linattn.init_state(PHI, 4, batch_shape=(2,), like=key)
    state = linattn.update_state(state, key, value, PHI)
    linattn.read_state(query, state, PHI)
    linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, PHI)
    linattn.Decoder(PHI, state).step(query[:, 0], key[:, 0], value[:, 0])


# Backends that are registered --------------------------------------------------------------------


def test_registered_backends():
    backends = linattn.registered_backends()
    assert backends["numpy"] == "linattn_numpy"
    assert backends["cupy"] == "linattn_cupy"
    backends["numpy"] = "changed"
    assert linattn.registered_backends()["numpy"] == "linattn_numpy"


class Fakes:
    """Backends of a test, registered for NumPy in place of the real one."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.calls = []

    def register(self, *entries):
        found = [importlib.metadata.EntryPoint(n, v, "linattn.backends") for n, v in entries]

        def entry_points(*, group):
            assert group == "linattn.backends"
            return importlib.metadata.EntryPoints(found)

        self._monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        clear_caches()

    def backend(self, **functions):
        """Register a module of these functions, each call of which is noted."""
        module = types.ModuleType("fake_backend")
        for name, function in functions.items():
            setattr(module, name, self._noting(name, function))
        self._monkeypatch.setitem(sys.modules, "fake_backend", module)
        self.register(("numpy", "fake_backend"))

    def _noting(self, name, function):
        def noting(*args):
            self.calls.append(name)
            return function(*args)

        return noting


@pytest.fixture
def fakes(monkeypatch):
    yield Fakes(monkeypatch)
    monkeypatch.undo()
    clear_caches()


def not_implemented(*args):
    return NotImplemented


def declined(*args):
    return Declined("not today")


@pytest.mark.parametrize("name", BLOCK_TIER)
def test_a_backend_is_called_for_what_it_defines(fakes, name):
    fakes.backend(**{name: getattr(_generic, name)})
    run_everything()
    assert set(fakes.calls) == {name}


def test_what_a_backend_is_given(fakes):
    # The arguments of the protocol, in its order, for each function.
    given = {}

    def taking(name):
        def take(*args):
            given[name] = args
            return NotImplemented

        return take

    fakes.backend(**{name: taking(name) for name in [*BLOCK_TIER, *WHOLE_TIER]})
    run_everything()
    for name in BLOCK_TIER:
        parameters = inspect.signature(getattr(_generic, name)).parameters.values()
        required = [p for p in parameters if p.default is p.empty]
        assert len(required) <= len(given[name]) <= len(parameters)
    assert isinstance(given["plan"][0], Problem)
    assert isinstance(given["attention"][0], Problem)
    assert isinstance(given["decode"][0].state, State)
    assert isinstance(given["exact_block"][0], Exact)
    assert isinstance(given["reduce_block"][-1], State)


@pytest.mark.parametrize("answer", [not_implemented, declined])
@pytest.mark.parametrize("name", [*BLOCK_TIER, *WHOLE_TIER])
def test_what_is_declined_falls_back(fakes, name, answer):
    query, key, value = tokens()
    with linattn.without_backends():
        expected = [
            linattn.linear_attention(query, key, value, PHI, is_causal=c) for c in (False, True)
        ]
        exact = linattn.softmax_attention(query, key, value)
    fakes.backend(**{name: answer})
    run_everything()
    assert set(fakes.calls) == {name}
    for is_causal, out in enumerate(expected):
        again = linattn.linear_attention(query, key, value, PHI, is_causal=bool(is_causal))
        assert_array_equal(again, out)
    assert_array_equal(linattn.softmax_attention(query, key, value), exact)


def test_steps_and_gradients_that_are_declined_fall_back(fakes):
    query, key, value = tokens()
    step = (query[:, 0], key[:, 0], value[:, 0])
    state = linattn.init_state(PHI, 4, batch_shape=(2,), like=key)

    def results():
        output, pullback = linattn.linear_attention_vjp(query, key, value, PHI, is_causal=True)
        return linattn.Decoder(PHI, state).step(*step), *pullback(output)

    with linattn.without_backends():
        expected = results()
    names = ("stepper", "attention_vjp", "scan_vjp", "reduce_block")
    fakes.backend(**dict.fromkeys(names, declined))
    for ours, theirs in zip(results(), expected, strict=True):
        assert_array_equal(ours, theirs)
    assert set(fakes.calls) == set(names)


def test_heads_that_are_declined_together_are_done_one_by_one(fakes):
    shapes = []

    def scan_block(*args):
        shapes.append(args[5].kvz.shape[:-2])
        if shapes[-1] != (1,):
            return Declined("heads differ", by_head=True)
        return _generic.scan_block(*args)

    fakes.backend(scan_block=scan_block)
    out, state = linattn.linear_attention(*tokens(), PHI, is_causal=True, return_state=True)
    with linattn.explain() as report:
        linattn.linear_attention(*tokens(), PHI, is_causal=True)
    with linattn.without_backends():
        want, after = linattn.linear_attention(*tokens(), PHI, is_causal=True, return_state=True)
    assert shapes[:3] == [(2,), (1,), (1,)]
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state.kvz, after.kvz, rtol=1e-12, atol=1e-14)
    assert ("block", "scan_block", "driver", "heads differ", 1) in report.choices


def test_what_a_block_function_returns_is_used(fakes):
    def zero_read(query_spec, tokens, state, want_log):
        part = _generic.read_block(query_spec, tokens, state, want_log)
        return Partial(part.num_den * 0 + 2, part.log)

    fakes.backend(read_block=zero_read)
    assert_array_equal(linattn.linear_attention(*tokens(), PHI), np.ones((2, 10, 4)))
    # Causal attention scans; it does not read.
    assert_array_equal(linattn.linear_attention(*tokens(), PHI, is_causal=True) != 1, True)


def test_the_plan_of_a_backend_is_followed(fakes):
    sizes, tasks, runs = [], [(slice(0, 1),), (slice(1, 2),)], []

    def run(work, todo):
        runs.append(list(todo))
        for task in reversed(todo):
            work(task)

    def reduce_block(key_spec, block, values_and_one, state):
        sizes.append(block.x.shape[:2])
        return _generic.reduce_block(key_spec, block, values_and_one, state)

    fakes.backend(plan=lambda problem: Plan(4, tasks, run), reduce_block=reduce_block)
    query, key, value = tokens()
    out, state = linattn.linear_attention(query, key, value, PHI, return_state=True)
    assert runs == [tasks]
    assert sizes == [(1, 4), (1, 4), (1, 2)] * 2
    with linattn.without_backends():
        expected, expected_state = linattn.linear_attention(
            query, key, value, PHI, return_state=True
        )
        causal, causal_state = linattn.linear_attention(
            query, key, value, PHI, is_causal=True, return_state=True
        )
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state.kvz, expected_state.kvz, rtol=1e-12, atol=1e-13)
    assert state.length == 10
    out, state = linattn.linear_attention(query, key, value, PHI, is_causal=True, return_state=True)
    np.testing.assert_allclose(out, causal, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state.kvz, causal_state.kvz, rtol=1e-12, atol=1e-13)


def test_tasks_take_their_part_of_everything_that_has_heads(fakes):
    # Leading axes of 1 stay whole: a shared key, a map and a mask per head, a state.
    tasks = [(slice(None), slice(h, h + 1)) for h in range(3)]
    fakes.backend(plan=lambda problem: Plan(4, tasks, _generic.run_in_order))
    rng = np.random.default_rng(0)
    phi = PositiveFeatures.from_projection(rng.standard_normal((3, 5, 4)))
    query = rng.standard_normal((2, 3, 10, 4))
    key, value = rng.standard_normal((2, 1, 10, 4)), rng.standard_normal((3, 10, 2))
    mask = rng.random((2, 1, 10)) < 0.8
    for is_causal in (False, True):
        state = None
        for _ in range(2):
            call = (query, key, value, phi)
            options = {
                "is_causal": is_causal,
                "key_mask": mask,
                "initial_state": state,
                "return_state": True,
                "return_log_normalizer": True,
            }
            out, after, norm = linattn.linear_attention(*call, **options)
            with linattn.without_backends():
                expected, expected_after, expected_norm = linattn.linear_attention(*call, **options)
            np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-13)
            np.testing.assert_allclose(norm, expected_norm, rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(after.kvz, expected_after.kvz, rtol=1e-11, atol=1e-13)
            assert after.length == expected_after.length
            state = after


# The whole tier ---------------------------------------------------------------------------------


def test_the_whole_tier_answers_for_everything(fakes):
    problems = []
    fixed = State(np.zeros((2, 4, 5)), np.zeros((2, 4)), 77)

    def attention(problem):
        problems.append(problem)
        return problem.query * 0 + 5, fixed, problem.query[..., 0] * 0 + 6

    def decode(problem):
        problems.append(problem)
        return problem.query[..., 0, :] * 0 + 7, fixed

    def never(*args):
        pytest.fail("the block tier was used")

    fakes.backend(attention=attention, decode=decode, **dict.fromkeys(BLOCK_TIER, never))
    query, key, value = tokens()
    out, state, norm = linattn.linear_attention(
        query,
        key,
        value,
        PHI,
        is_causal=True,
        key_mask=np.ones(10, dtype=bool),
        return_state=True,
        return_log_normalizer=True,
        chunk_size=3,
    )
    assert_array_equal(out, 5)
    # The core alone adds whose state it is.
    assert state.kvz is fixed.kvz
    assert state.log_scale is fixed.log_scale
    assert state.length == fixed.length
    assert_array_equal(norm, 6)
    (problem,) = problems
    assert problem.query is query
    assert problem.sees.is_causal is True
    assert problem.policy.chunk_size == 3
    assert problem.want_log is True
    assert problem.policy.lazy is False
    assert problem.num_features == 4
    assert problem.state is None
    assert problem.lead == problem.state_lead == (2,)
    assert problem.weights.key_mask.shape == (1, 10, 1)
    assert_array_equal(linattn.softmax_attention(query, key, value), 5)
    assert isinstance(problems[-1].query_spec, Exact)

    out, after = linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], fixed, PHI)
    assert_array_equal(out, 7)
    assert after.kvz is fixed.kvz
    assert problems[-1].state is fixed
    decoder = linattn.Decoder(PHI, fixed)
    assert_array_equal(decoder.step(query[:, 0], key[:, 0], value[:, 0]), 7)
    assert_array_equal(decoder.state.kvz, fixed.kvz)
    assert decoder.state.length == fixed.length


def test_the_whole_tier_answers_for_gradients(fakes):
    seen = []
    query, key, value = tokens()
    answer = (query + 1, key + 2, value + 3, None)

    def attention_vjp(problem, cotangent):
        seen.append((problem, cotangent))
        return answer

    fakes.backend(attention_vjp=attention_vjp)
    out, pullback = linattn.linear_attention_vjp(query, key, value, PHI, is_causal=True)
    gradients = pullback(out)
    assert all(x is y for x, y in zip(gradients, answer, strict=False))
    ((problem, cotangent),) = seen
    assert len(gradients) == 3
    assert problem.key is key
    assert cotangent.output is out
    assert cotangent.state is None

    fakes.backend(attention_vjp=lambda *_: NotImplemented)
    expected = pullback(out)
    with linattn.without_backends():
        for x, y in zip(pullback(out), expected, strict=True):
            assert_array_equal(x, y)
    assert fakes.calls == ["attention_vjp"] * 2


# Registration -----------------------------------------------------------------------------------


def test_two_packages_may_not_claim_one_library(fakes):
    fakes.register(("numpy", "linattn_numpy"), ("cupy", "linattn_cupy"), ("numpy", "other_numpy"))
    match = "'numpy': linattn_numpy and other_numpy; uninstall one"
    with pytest.raises(RuntimeError, match=match):
        linattn.registered_backends()
    with pytest.raises(RuntimeError, match=match):
        linattn.linear_attention(*tokens(), PHI)
    # The generic path needs nobody's package.
    with linattn.without_backends():
        linattn.linear_attention(*tokens(), PHI)


def test_one_package_seen_twice_is_one_package(fakes):
    # A source tree and its installation, both on the path.
    fakes.register(("numpy", "linattn_numpy"), ("numpy", "linattn_numpy"))
    assert linattn.registered_backends() == {"numpy": "linattn_numpy"}


def test_backends_of_third_parties_are_found_by_the_library(fakes, monkeypatch):
    strict = pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    module = types.ModuleType("third_party")
    seen = []

    def plan(problem):
        seen.append(problem.xp)
        return NotImplemented

    module.plan = plan
    monkeypatch.setitem(sys.modules, "third_party", module)
    fakes.register(("array_api_strict", "third_party"))
    linattn.linear_attention(*tokens(), PHI)
    assert seen == []
    linattn.linear_attention(*(strict.asarray(a) for a in tokens()), PHI)
    assert seen == [strict]


def test_a_backend_that_cannot_be_imported_says_so(fakes):
    fakes.register(("numpy", "no_such_backend"))
    assert linattn.registered_backends() == {"numpy": "no_such_backend"}
    with pytest.raises(ModuleNotFoundError, match="no_such_backend"):
        linattn.linear_attention(*tokens(), PHI)


# Both paths are what they say --------------------------------------------------------------------


def test_no_dispatch_without_backends(fakes):
    fakes.backend(**{name: getattr(_generic, name) for name in BLOCK_TIER})
    run_everything()
    assert len(fakes.calls) > len(BLOCK_TIER)
    fakes.calls.clear()
    with linattn.without_backends():
        run_everything()
        assert fakes.calls == []
        with linattn.without_backends():
            run_everything()
        run_everything()
    assert fakes.calls == []
    with pytest.raises(ZeroDivisionError), linattn.without_backends():
        1 / 0  # noqa: B018
    run_everything()
    assert fakes.calls


def test_the_numpy_backend_runs_by_default_and_not_without_backends():
    names = ("reduce_values", "read_output", *BLOCK_TIER, *WHOLE_TIER)
    defined = [name for name in names if hasattr(linattn_numpy, name)]
    assert defined, "the NumPy backend replaces nothing"
    with linattn.explain() as report:
        run_everything()
        # Beside an exact window blocks are summed and read by themselves.
        arrays = np.random.default_rng(0).standard_normal((3, 300, 4))
        linattn.linear_attention(*arrays, PositiveFeatures(4, 16, rng=0), exact_window=64)
    assert all("linattn_numpy" in report.ran(name) for name in defined)
    with linattn.without_backends(), linattn.explain() as report:
        run_everything()
    assert {choice.code for choice in report.choices} == {"generic", "driver"}


def test_the_suite_runs_both_ways(xp):
    # The parameter of `xp` that names the generic path is on it, and the others are not.
    assert _dispatch._mode.get().backends is (xp.name != "numpy-without-backends")


# Explanations -----------------------------------------------------------------------------------


def test_an_explanation_says_who_answered_and_why_not_the_backend(fakes):
    def reduce_block(key_spec, block, values_and_one, state):
        if block.x.shape[-2] < 5:
            return Declined("n is below 5")
        return _generic.reduce_block(key_spec, block, values_and_one, state)

    fakes.backend(reduce_block=reduce_block, exact_block=not_implemented)
    with linattn.explain() as report:
        linattn.linear_attention(*tokens(), PHI, chunk_size=8)
        linattn.softmax_attention(*tokens())
    rows = {(c.function, c.code): c for c in report.choices}
    assert rows["attention", "driver"] == (
        "whole",
        "attention",
        "driver",
        "fake_backend has none",
        2,
    )
    assert rows["reduce_block", "fake_backend"] == ("block", "reduce_block", "fake_backend", "", 1)
    assert rows["reduce_block", "generic"] == (
        "block",
        "reduce_block",
        "generic",
        "n is below 5",
        1,
    )
    assert rows["exact_block", "generic"].reason == "not said"
    assert rows["read_block", "generic"].reason == "fake_backend has none"
    assert report.ran("reduce_block") == {"fake_backend", "generic"}
    assert report.ran("scan_block") == set()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["tier", "function", "ran", "calls", "why", "not", "the", "backend"]
    assert any(line.split()[:4] == ["block", "reduce_block", "generic", "1"] for line in lines)


def test_an_explanation_of_what_has_no_backend(fakes):
    fakes.register()
    with linattn.explain() as report:
        linattn.linear_attention(*tokens(), PHI, is_causal=True)
    assert {c.reason for c in report.choices} == {"no backend for numpy"}
    with linattn.without_backends(), linattn.explain() as report:
        linattn.linear_attention(*tokens(), PHI, is_causal=True)
    assert {c.reason for c in report.choices} == {"inside without_backends()"}


def _arrays_in(argument):
    if isinstance(argument, tuple):
        return [array for part in argument for array in _arrays_in(part)]
    return [argument] if isinstance(argument, np.ndarray) else []


@pytest.mark.parametrize("empty", ["queries", "keys", "heads"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_block_function_is_given_what_is_empty(empty, is_causal, monkeypatch):
    sizes: list[int] = []
    whole = ("reduce_values", "read_output")
    for name in (*whole, "reduce_block", "read_block", "scan_block", "exact_block"):
        function = getattr(linattn_numpy, name)

        def noted(*args, function=function):
            sizes.extend(array.size for array in _arrays_in(args))
            return function(*args)

        monkeypatch.setattr(linattn_numpy, name, noted)
    query, key, value = tokens()
    linattn.linear_attention(query, key, value, PHI)
    assert min(sizes) > 0
    if empty == "heads":
        query, key, value = query[:0], key[:1], value[:1]
    if empty == "queries" or (is_causal and empty == "keys"):
        query = query[:, :0]
    if empty == "keys" or (is_causal and empty == "queries"):
        key, value = key[:, :0], value[:, :0]
    with linattn.explain() as report:
        output = linattn.linear_attention(query, key, value, PHI, is_causal=is_causal)
    assert output.shape == query.shape
    assert_array_equal(output, 0)
    assert min(sizes) > 0
    if empty == "heads":
        assert "an axis has length 0" in {choice.reason for choice in report.choices}


def test_an_explanation_changes_no_bit_and_ends():
    query, key, value = tokens(300, "float32")
    for scale in (1, 40):
        args = (scale * query, scale * key, value, PositiveFeatures(4, 16, rng=0))
        expected = linattn.linear_attention(*args, is_causal=True)
        with linattn.explain() as report:
            assert_array_equal(linattn.linear_attention(*args, is_causal=True), expected)
        counted = report.choices
        assert counted
        linattn.linear_attention(*args, is_causal=True)
        assert report.choices == counted


def test_an_explanation_holds_in_threads_of_a_plan_and_not_outside():
    query, key, value = (np.concatenate([x] * 4) for x in tokens(2000))
    with linattn.config(num_threads=2), linattn.explain() as report:
        linattn.linear_attention(query, key, value, PHI)
        in_a_thread(lambda: linattn.softmax_attention(*tokens()))
        with linattn.explain() as inner:
            linattn.softmax_attention(*tokens())
    assert report.ran("reduce_values") == report.ran("read_output") == {"linattn_numpy"}
    assert report.ran("exact_block") == set()
    assert inner.ran("exact_block") == {"linattn_numpy"}


def test_an_explanation_of_steps():
    query, key, value = tokens()
    step = (query[:, 0], key[:, 0], value[:, 0])
    state = linattn.init_state(PHI, 4, batch_shape=(2,), like=key)
    decoder = linattn.Decoder(PHI, state)
    decoder.step(*step)
    with linattn.explain() as report:
        for _ in range(3):
            decoder.step(*step)
        linattn.decode_step(*step, state, PHI)
    assert report.choices == (
        ("whole", "stepper", "linattn_numpy", "", 3),
        ("whole", "decode", "linattn_numpy", "", 1),
    )


def test_an_explanation_of_heads_that_are_done_again():
    rng = np.random.default_rng(0)
    query, key = 40 * rng.standard_normal((2, 2, 100, 8)).astype("float32")
    phi = PositiveFeatures(8, 16, rng=0)
    with linattn.without_backends(), linattn.explain() as report:
        linattn.linear_attention(query, key, query, phi, is_causal=True)
    again = [c for c in report.choices if c.function == "scan_block" and c.code == "driver"]
    assert [c.reason for c in again] == ["rows underflowed: redone hierarchically"]


# Settings ---------------------------------------------------------------------------------------


def test_config_nests_and_ends():
    outside = _settings.current_settings()
    with linattn.config(num_threads=3) as outer:
        assert (outer.num_threads, outer.precision) == (3, outside.precision)
        with linattn.config(precision="float64") as inner:
            # None leaves a setting as it is.
            assert (inner.num_threads, inner.precision) == (3, "float64")
            assert _settings.current_settings() == inner
            with linattn.config(num_threads=1) as innermost:
                assert (innermost.num_threads, innermost.precision) == (1, "float64")
        assert _settings.current_settings() == outer
        with pytest.raises(ZeroDivisionError), linattn.config(num_threads=2):
            1 / 0  # noqa: B018
        assert _settings.current_settings() == outer
    assert _settings.current_settings() == outside


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
        ({"num_threads": -2}, ValueError, "num_threads must be at least 1, got -2"),
        ({"num_threads": True}, TypeError, "num_threads must be a positive integer, got True"),
        ({"num_threads": 1.0}, TypeError, "num_threads must be a positive integer, got 1.0"),
        ({"num_threads": "2"}, TypeError, "num_threads must be a positive integer"),
        ({"precision": "float32"}, ValueError, "precision must be 'float64', 'tf32' or None"),
        ({"precision": np.float64}, ValueError, "precision must be 'float64', 'tf32' or None"),
    ],
)
def test_config_refuses(options, error, match):
    before = _settings.current_settings()
    with pytest.raises(error, match=match), linattn.config(**options):
        pytest.fail("entered")
    assert _settings.current_settings() == before


def test_settings_reach_the_backend(fakes):
    problems = []

    def plan(problem):
        problems.append(problem)
        return NotImplemented

    fakes.backend(plan=plan)
    linattn.linear_attention(*tokens(), PHI)
    with linattn.config(num_threads=2):
        linattn.linear_attention(*tokens(), PHI)
        linattn.softmax_attention(*tokens())
    assert [p.policy.num_threads for p in problems] == [None, 2, 2]
    assert problems[0].dtype == np.float64


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_precision_float64_accumulates_in_float64(dtype):
    query, key, value = tokens(3000, dtype)
    wide = [a.astype(np.float64) for a in (query, key, value)]
    for is_causal in (False, True):
        with linattn.config(precision="float64"):
            out, state, norm = linattn.linear_attention(
                query,
                key,
                value,
                PHI,
                is_causal=is_causal,
                return_state=True,
                return_log_normalizer=True,
            )
            exact = linattn.softmax_attention(query[:, :50], key[:, :50], value[:, :50])
        expected, expected_state = linattn.linear_attention(
            *wide, PHI, is_causal=is_causal, return_state=True
        )
        assert out.dtype == dtype
        assert exact.dtype == dtype
        assert state.kvz.dtype == state.log_scale.dtype == norm.dtype == np.float64
        # Not one bit lost before the last rounding.
        assert_array_equal(out, expected.astype(dtype))
        assert_array_equal(state.kvz, expected_state.kvz)
        if dtype == "float32":
            narrow = linattn.linear_attention(query, key, value, PHI, is_causal=is_causal)
            assert (narrow != out).any()


@pytest.mark.frameworks
def test_precision_float64_needs_a_library_that_has_it():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    try:
        x = jax.numpy.ones((4, 4), dtype="float32")
        with (
            linattn.config(precision="float64"),
            pytest.raises(ValueError, match="float64 switched on, which jax has not"),
        ):
            linattn.linear_attention(x, x, x, PHI)
    finally:
        jax.config.update("jax_enable_x64", before)


def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_threads_do_not_inherit():
    def seen():
        return _settings.current_settings(), _dispatch._mode.get().backends

    default = in_a_thread(seen)
    with linattn.config(num_threads=3, precision="float64"), linattn.without_backends():
        assert seen() == ((3, "float64"), False)
        assert in_a_thread(seen) == default == ((None, None), True)
        # Unless they are given the context.
        context = copy_context()
        assert in_a_thread(lambda: context.run(seen)) == ((3, "float64"), False)


# Descriptions of calls ----------------------------------------------------------------------------


@pytest.fixture
def described(monkeypatch):
    """Problems that were described, and not taken from the last call."""
    made = []

    def noted(*args, describe=problem._describe):
        made.append(describe(*args))
        return made[-1]

    monkeypatch.setattr(problem, "_describe", noted)
    clear_caches()
    return made


def test_a_call_like_the_last_one_is_not_described_again(described):
    for seed in range(3):
        query, key, value = (x + seed for x in tokens())
        output = linattn.linear_attention(query, key, value, PHI)
        phi_q, phi_k = (np.exp(np.minimum(x, 0)) + np.maximum(x, 0) for x in (query, key))
        weights = phi_q @ phi_k.mT
        expected = weights @ value / weights.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(output, expected, rtol=1e-9)
    assert len(described) == 1


def streamed(*x):
    before = linattn.update_state(linattn.init_state(PHI, 4, like=x[1]), *x[1:], PHI)
    return linattn.linear_attention(*x, PHI, initial_state=before)


OTHERS = {
    "length": lambda *x: linattn.linear_attention(*(a[1:] for a in x), PHI),
    "dtype": lambda *x: linattn.linear_attention(*(a.astype(np.float32) for a in x), PHI),
    "bytes": lambda *x: linattn.linear_attention(*(a.astype(">f8") for a in x), PHI),
    "map": lambda *x: linattn.linear_attention(*x, EluFeatures()),
    "causal": lambda *x: linattn.linear_attention(*x, PHI, is_causal=True),
    "numerators": lambda *x: linattn.linear_attention(*x, PHI, normalize=False),
    "log": lambda *x: linattn.linear_attention(*x, PHI, return_log_normalizer=True)[0],
    "mask": lambda *x: linattn.linear_attention(*x, PHI, key_mask=np.arange(10) < 5),
    "chunks": lambda *x: linattn.linear_attention(*x, PHI, chunk_size=3),
    "state": streamed,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_call_is_described_anew(described, other):
    arrays = [x[0] for x in tokens()]
    expected = other(*arrays)
    first = linattn.linear_attention(*arrays, PHI)
    count = len(described)
    np.testing.assert_array_equal(other(*arrays), expected)
    assert len(described) > count
    np.testing.assert_array_equal(linattn.linear_attention(*arrays, PHI), first)


def test_settings_are_of_this_call(described):
    arrays = tokens(10, np.float32)
    usual = linattn.linear_attention(*arrays, PHI, return_state=True)[1]
    with linattn.config(precision="float64"):
        precise = linattn.linear_attention(*arrays, PHI, return_state=True)[1]
    assert [usual.kvz.dtype, precise.kvz.dtype] == [np.float32, np.float64]
    assert len(described) == 2
