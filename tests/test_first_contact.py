"""The first contact with a GPU, without one: its formulas are right, and it can fail."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

import linattn
from benchmarks.gpu import cases, first_contact, formulas, library, parity


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", cases.MAPS)
def test_formulas_are_what_the_library_computes(name, is_causal):
    rng = np.random.default_rng(0)
    query, grad = (rng.standard_normal((2, 3, 40, width)) for width in (16, 9))
    key, value = (rng.standard_normal((2, 1, 40, width)) for width in (16, 9))
    mask = rng.random((2, 1, 40)) < 0.7
    mask[..., :5] = False
    phi = parity.feature_map_of(name, 16, 32)
    rows = phi.projection * 16**-0.25 if name in ("favor", "hyperbolic") else None
    formula = formulas.Formula(name, rows)
    options = {"is_causal": is_causal, "key_mask": mask}
    output, state, norm = linattn.linear_attention(
        query, key, value, phi, return_state=True, return_log_normalizer=True, **options
    )
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi, **options)
    seen = mask[..., None, :] & (np.tri(40, dtype=bool) if is_causal else True)
    wanted = formulas.attend(formula, query, key, value, seen)
    np.testing.assert_allclose(output, wanted.output, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(norm, wanted.log_normalizer, rtol=1e-10, atol=1e-12)
    kept = formulas.state(formula, key, value, mask)
    np.testing.assert_allclose(state.kvz * np.exp(state.log_scale)[..., None], kept, rtol=1e-10)
    pulled = formulas.gradients(formula, query, key, value, seen, grad)
    for found, gradient in zip(pullback(grad), pulled, strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-12)


def test_one_wrong_row_of_many_does_not_pass():
    wanted = np.ones((64, 4000, 8))
    got = wanted.copy()
    got[33, 1234] = 0
    assert parity.relative_error(got, wanted) < cases.BOUNDS["bfloat16"]
    assert parity.row_error(got, wanted) == pytest.approx(1)
    got[33, 1234] = np.nan
    assert not parity.row_error(got, wanted) <= np.inf
    assert parity.row_error(got[1:], wanted) == np.inf


@pytest.fixture
def watched(monkeypatch, tmp_path, capfd):
    """Watch processes that run a program in the place of items; return exit code and lines."""
    script = tmp_path / "items.py"

    def command(*words):
        return [sys.executable, str(script), *words[words.index("--only") + 1 :]]

    monkeypatch.setattr(first_contact, "_command", command)

    def watch(program, names="abc", seconds=60.0):
        script.write_text("import os, sys\nleft = sys.argv[1:]\n" + program)
        code = first_contact._watch(list(names), seconds, few=True)
        return code, capfd.readouterr().out.splitlines()

    return watch


RUN_ALL = """
for name in left:
    print("begun", name, flush=True)
    print("FAIL " if name in "{}" else "ok   ", name + ": said", flush=True)
"""


def test_items_that_fail_are_printed_again(watched):
    code, said = watched(RUN_ALL.format("b"))
    assert code == 1
    assert said[:6] == [
        x for n in "abc" for x in (f"begun {n}", f"{'FAIL' if n == 'b' else 'ok  '}  {n}: said")
    ]
    assert said[6].startswith("----- 1 of 3 failed, ")
    assert said[7:] == ["FAIL  b: said"]
    code, said = watched(RUN_ALL.format(""))
    assert (code, len(said)) == (0, 7)


def test_an_item_that_ends_its_process_fails_and_the_rest_goes_on(watched):
    dies = "if left[0] == 'b':\n    print('begun b', flush=True)\n    os._exit(7)\n"
    code, said = watched(dies + "left = left[:1]\n" + RUN_ALL.format("") + "sys.exit(3)\n")
    assert code == 1
    assert "ok    c: said" in said
    assert said[-1] == "FAIL  b: its process ended with code 7"


def test_processes_that_run_nothing_fail_once(watched):
    code, said = watched("sys.exit(5)")
    assert code == 1
    assert said[0] == said[-1] == "FAIL  a: its process ended with code 5"
    assert said[1] == "----- 2 of 3 not run: b; c"


def test_what_time_left_out_is_printed(watched):
    code, said = watched("left = left[:2]\n" + RUN_ALL.format(""))
    assert code == 0
    assert said[4] == "----- 1 of 3 not run: c"
    code, said = watched(RUN_ALL.format(""), seconds=0.0)
    assert code == 1
    assert said[0] == "----- 3 of 3 not run: a; b; c"


class HostLibrary:
    """NumPy arrays in the place of CuPy's, and generic code in that of kernels."""

    def __init__(self):
        self.launches = []
        self.waits = False

    def array(self, host, dtype):
        return host.copy()

    def numpy(self, array):
        return np.asarray(array, np.float64)

    def poison(self, byte):
        pass


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, True),
        ({"relative_error": 2e-5}, False),
        ({"relative_error": float("nan")}, False),
        ({"row_error": 2.0}, False),
        ({"_same": False}, False),
    ],
)
def test_lines_of_items(monkeypatch, capfd, changed, passed):
    for name, result in changed.items():
        monkeypatch.setattr(parity, name, lambda *pair, result=result: result)
    monkeypatch.setattr(library, "CupyLibrary", lambda poisoned: HostLibrary())
    monkeypatch.setattr(library, "register", lambda: False)
    # No kernel has to run there.
    (case,) = [c for c in cases.cases() if c.name == "float32 favor one key head causal"]
    assert first_contact._run({case.name: case}, time.time() + 60, few=True) == 0
    begun, line = capfd.readouterr().out.splitlines()
    assert begun == f"begun {case.name}"
    assert line.startswith(f"{'ok  ' if passed else 'FAIL'}  {case.name}: output ")
    assert f"same bits {changed.get('_same', True)}" in line
