"""`linattn compare`: errors, times, the verdict and the pictures."""

from __future__ import annotations

import json
import math
import re
import shlex
import tracemalloc
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

import linattn
from linattn import reference
from linattn.cli import (
    compare,
    inputs,
    method,
    methods,
    plots,
    sweep,
    tables,
    timing,
)
from tests.command import SMALL, assert_refused, call, passed, row, save


@pytest.fixture
def file(tmp_path):
    return save(tmp_path / "mine.npz")


@pytest.fixture
def small(file):
    return inputs.load(file)


UNIFORM = row("uniform", 0.5, kind="reference")
EXACT = row("exact", 0.0, kind="reference")


class TestCompare:
    def test_sample(self, tmp_path):
        out = tmp_path / "out"
        result = passed("compare", "--maps", "favor+,elu+1", *SMALL, "--out", out)
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        tables_end = next(i for i, line in enumerate(lines) if line.startswith("Crossover"))
        assert max(map(len, lines[1:tables_end])) <= 80
        for text in ("FAVOR+", "elu + 1", "uniform attention", "exact softmax", "24 heads"):
            assert text in result.stdout
        assert "hyperbolic" not in result.stdout
        assert lines[-1].startswith("Verdict: ")
        assert lines[-1].endswith(
            ": use exact softmax attention. Judged on all of them: 24 heads, 256 tokens, dim 32."
        )
        assert "judged" not in lines[-1]
        for name in ("error.png", "time.png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG\r\n")
        record = json.loads((out / "compare.json").read_text())
        assert record["versions"]["linattn"] == linattn.__version__
        assert record["input"]["heads"] == 24
        draws = {entry["method"]: entry["heads"] for entry in record["errors"]}
        assert list(draws) == ["favor+", "elu+1", "uniform", "attention", "exact"]
        assert [len(heads) for heads in draws.values()] == [5, 1, 1, 1, 1]
        assert {len(heads) for one in draws.values() for heads in one} == {24}
        assert record["verdict"]["sentence"] in lines[-1]
        # No map is good enough: the time curve is of the one that the verdict names.
        assert f"Verdict: {record['lengths']['label']} " in lines[-1]
        assert sorted(path.name for path in out.iterdir()) == [
            "compare.json",
            "error.png",
            "time.png",
        ]

    @pytest.mark.parametrize("kind", ["npy", "compressed", "zarr"])
    def test_files_of_every_kind_that_attend_takes(self, tmp_path, monkeypatch, kind):
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(5)
        arrays: dict[str, Any] = {
            name: rng.standard_normal((2, 20, 8), np.float32) for name in inputs.NAMES
        }
        if kind == "npy":
            files = [f"{name}.npy" for name in arrays]
            for file, array in zip(files, arrays.values(), strict=True):
                np.save(file, array)
        elif kind == "zarr":
            zarr = pytest.importorskip("zarr", reason="zarr is not installed")
            files = ["mine.zarr"]
            for name, array in arrays.items():
                zarr.open_group("mine.zarr").create_array(name, data=array)
        else:
            files = ["mine.npz"]
            np.savez_compressed("mine.npz", **arrays)
        result = passed("compare", *files, "--maps", "relu", *SMALL, "--out", "out")
        assert result.stdout.startswith(f"Input: {' '.join(files)}\n")
        assert re.search(r"^Verdict: [A-Z].*\.$", result.stdout, re.MULTILINE)
        record = json.loads((tmp_path / "out" / "compare.json").read_text())
        assert record["input"]["heads"] == 2
        assert shlex.split(record["command"])[2 : 2 + len(files)] == files
        loaded = inputs.load(*map(Path, files))
        for found, array in zip(loaded.arrays, arrays.values(), strict=True):
            np.testing.assert_array_equal(found, array)

    def test_command_in_the_record_repeats_the_run(self, file, tmp_path):
        first, second = tmp_path / "a b", tmp_path / "second"
        options = ["--input", file, "--causal", "--seed", 7, "--max-heads", 2, *SMALL]
        options += ["--maps", "favor+,elu+1"]
        passed("compare", *options, "--out", first)
        record = json.loads((first / "compare.json").read_text())
        words = shlex.split(record["command"])
        assert words[0] == "linattn"
        assert words[-1] == str(first)
        passed(*words[1:-1], second)
        again = json.loads((second / "compare.json").read_text())
        assert [e["heads"] for e in again["errors"]] == [e["heads"] for e in record["errors"]]
        passed("compare", *options, "--seed", 8, "--out", second)
        other = json.loads((second / "compare.json").read_text())
        assert other["errors"][0]["heads"] != record["errors"][0]["heads"]

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(
        "method", [*methods.METHODS, *methods.REFERENCES], ids=lambda m: m.name
    )
    def test_every_method_against_the_oracle(self, small, method, is_causal):
        exact = compare.exact_output(small, is_causal=is_causal)
        truth = reference.softmax_attention(
            small.query, small.key, small.value, is_causal=is_causal
        )
        np.testing.assert_allclose(exact, truth, rtol=1e-12, atol=1e-12)
        if method.obstacle(is_causal=is_causal, aligned=True):
            pytest.skip("of no use there")
        case = compare.Case(method, 8 if method.has_num_features else None)
        arrays = (small.query, small.key, small.value)
        if method.held_out:  # fitted to ten of the twenty tokens, judged on the others
            arrays = tuple(x[:, 10:] for x in arrays)
            truth = reference.softmax_attention(*arrays, is_causal=is_causal)
        output = compare.prepare(case, small, seed=0)(*arrays, is_causal=is_causal)
        errors = [
            np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            for ours, theirs in zip(output, truth, strict=True)
        ]
        measured = compare.measure(case, small, exact, is_causal=is_causal, seed=0, draws=1)
        np.testing.assert_allclose(measured.heads, [errors], rtol=1e-6, atol=1e-9)
        assert measured.median == pytest.approx(np.median(errors), abs=1e-9)
        assert measured.percentile_90 == pytest.approx(np.quantile(errors, 0.9), abs=1e-9)
        if not method.held_out:
            checked = compare.error_on_rows(case, small, is_causal=is_causal, seed=0)
            assert checked == pytest.approx(measured.median, rel=1e-6, abs=1e-9)
        if method is methods.EXACT:
            assert max(errors) < 1e-6
        if method is methods.UNIFORM:
            sees = np.tril(np.ones((20, 20))) if is_causal else np.ones((20, 20))
            mean = sees / sees.sum(axis=1, keepdims=True) @ small.value
            np.testing.assert_allclose(output, mean, atol=1e-6)

    def test_attention_measures_what_it_did(self, small, monkeypatch):
        """Its tolerance, its own error, and the cost that its report gives."""

        def pretend(query, key, value, *, tolerance, return_report, **options):
            assert (tolerance, return_report) == (0.1, True)
            output = linattn.softmax_attention(query, key, value, is_causal=options["is_causal"])
            return 1.25 * output, types.SimpleNamespace(cost=0.37)

        monkeypatch.setattr(linattn, "attention", pretend)
        exact = compare.exact_output(small, is_causal=True)
        case = compare.Case(methods.AUTOMATIC, None)
        row = compare.measure(case, small, exact, is_causal=True, seed=0, draws=1)
        assert (row.kind, row.cost) == ("reference", 0.37)
        assert row.median == pytest.approx(0.25, abs=1e-6)

    @pytest.mark.parametrize("change", ["like the first", "unlike", "no time", "no map"])
    def test_what_was_judged_is_said(self, tmp_path, change):
        """The recommendation holds for all tokens, or says for which."""
        rng = np.random.default_rng(0)
        clusters = 2 * rng.standard_normal((8, 16))
        tokens = clusters[rng.integers(8, size=(3, 400))] + 0.05 * rng.standard_normal((3, 400, 16))
        if change == "unlike":
            tokens[:, 100:] = 1.5 * rng.standard_normal((3, 300, 16))
        path = save(tmp_path / "in.npz", query=tokens, key=tokens, value=tokens)
        words = ["--maps", "relu" if change == "no map" else "landmarks", "--num-features", "16"]
        words += ["--lengths", "64", "--max-tokens", "100", "--max-heads", "2"]
        words += ["--time-budget", "0" if change == "no time" else "9", "--out", tmp_path]
        result = passed("compare", path, *words)
        verdict = json.loads((tmp_path / "compare.json").read_text())["verdict"]
        sentence = verdict["sentence"]
        assert f"Verdict: {sentence}" == result.stdout.splitlines()[-1]
        assert "This was judged on 2 of 3 heads, the first 100 of 400 tokens" in sentence
        on_all = "; on all tokens the median error of landmarks with 16 columns is "
        assert (on_all in sentence) == (change in ("like the first", "unlike"))
        if change in ("no time", "no map"):
            assert sentence.endswith("only: --max-heads 3 --max-tokens 400 judges all.")
            return
        inside = compare.Case(methods.select(("landmarks",))[0], 16)
        given = inputs.limited(inputs.load(path), max_heads=2, max_tokens=400, is_causal=False)
        error = compare.error_on_rows(inside, given, is_causal=False, seed=0)
        assert f"{on_all}{error:.2g}" in sentence
        assert verdict["good_enough"] == (error <= 0.1) == (change == "like the first")
        if change == "unlike":
            assert verdict["use"] == "exact"
            assert sentence.endswith("use exact softmax attention, or linattn.attention().")

    @pytest.mark.parametrize("lengths", [(30, 120), (200, 50)])
    def test_cross_attention_is_timed_as_it_is_given(self, tmp_path, monkeypatch, lengths):
        rng = np.random.default_rng(0)
        query = rng.standard_normal((1, lengths[0], 8))
        key = rng.standard_normal((1, lengths[1], 8))
        path = save(tmp_path / "in.npz", query=query, key=key, value=key)
        timed = []

        def note(call, **limits):
            given = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))
            timed.append((len(given["query"].cell_contents), len(given["key"].cell_contents)))
            return timing.Timing(1.0 / len(timed), 1, 0.0)

        monkeypatch.setattr(sweep, "fastest", note)
        words = ["--maps", "relu", "--lengths", "60,120,240", "--out", tmp_path]
        result = passed("compare", path, *words)
        wanted = {(round(n * lengths[0] / lengths[1]), n) for n in (60, 120, 240)}
        assert set(timed) == wanted
        record = json.loads((tmp_path / "compare.json").read_text())["lengths"]
        assert record["sizes"] == list(lengths)
        told = " ".join(result.stdout.split())
        assert f"Queries: {lengths[0]} for every {lengths[1]} keys." in told
        assert re.search(r"┃ +keys ┃ +this map ┃", result.stdout)
        assert re.search(r"Crossover: .* \d+ keys", told)

    @pytest.mark.parametrize(
        ("given", "found"),
        [("FAVOR+", "favor+"), ("EluFeatures", "elu+1"), ("Landmarks+Window", "landmarks+window"),
         ("BigBird", "bigbird")],
    )  # fmt: skip
    def test_names_in_any_case(self, given, found):
        assert [each.name for each in methods.select((given,))] == [found]

    def test_names_that_are_near(self, file):
        result = call("compare", file, "--maps", "favour,relu,elu")
        assert_refused(result, "got favour; did you mean favor+?, elu; did you mean elu+1")
        result = call("verify", "positivfeatures")
        assert_refused(result, "got positivfeatures; did you mean PositiveFeatures")

    def test_draws_are_different_and_all_count(self, small):
        case = compare.Case(methods.select(("favor+",))[0], 16)
        exact = compare.exact_output(small, is_causal=False)
        found = compare.measure(case, small, exact, is_causal=False, seed=0, draws=3)
        assert len(set(found.heads)) == 3
        assert found.median == pytest.approx(np.median(found.heads))
        assert found.percentile_90 == pytest.approx(np.quantile(found.heads, 0.9))
        fewer = compare.measure(case, small, exact, is_causal=False, seed=0, draws=2)
        assert fewer.heads == found.heads[:2]

    def test_a_window_over_all_keys_is_no_approximation(self, tmp_path):
        """64 tokens in blocks of 32: every key is near, so that no error is left to be seen."""
        rng = np.random.default_rng(0)
        query, key, value = rng.standard_normal((3, 2, 64, 16), np.float32)
        path = save(tmp_path / "in.npz", query=query, key=key, value=value)
        options = ["--num-features", "16", "--lengths", "8", "--out", tmp_path]
        result = passed("compare", "--input", path, *options)
        verdict = json.loads((tmp_path / "compare.json").read_text())["verdict"]
        assert verdict["use"] == "exact"
        assert not verdict["good_enough"]
        assert "window" not in verdict["best"]
        assert "measure them on more tokens" in verdict["sentence"]
        assert "0.000†" in result.stdout or "e-07†" in result.stdout
        told = " ".join(result.stdout.split())
        assert "† more than 50% of the pairs need no approximation" in told

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"query": np.zeros((20, 8))}, "query is all zero"),
            ({"key": np.zeros((20, 8))}, "key is all zero"),
            ({"value": np.zeros((20, 4))}, "value is all zero"),
            (
                {"key": np.ones((1, 8)), "value": np.ones((1, 4)), "query": np.ones((1, 8))},
                "there is one key only",
            ),
            (
                {"value": 1 + 0.01 * np.eye(20, 4)},
                "even uniform attention has a median error of 0.0",
            ),
        ],
        ids=["query", "key", "value", "one token", "values alike"],
    )
    def test_inputs_on_which_any_map_would_do(self, tmp_path, change, reason):
        path = save(tmp_path / "in.npz", **change)
        options = ["--maps", "favor+", "--num-features", "16", "--lengths", "8", "--out", tmp_path]
        result = passed("compare", "--input", path, *options)
        assert result.stdout.splitlines()[-1].startswith(f"Verdict: none: {reason}")
        verdict = json.loads((tmp_path / "compare.json").read_text())["verdict"]
        assert (verdict["best"], verdict["use"], verdict["good_enough"]) == (None, "", False)

    def test_swapped_axes_are_asked_about(self, tmp_path):
        rng = np.random.default_rng(0)
        query, key, value = rng.standard_normal((3, 40, 4, 8), np.float32)
        options = ["--maps", "relu,elu+1", "--lengths", "8", "--out", tmp_path]
        path = save(tmp_path / "in.npz", query=query, key=key, value=value)
        result = passed("compare", "--input", path, *options)
        question = (
            "query (40, 4, 8) is read as 40 heads of 4 tokens; did you mean 40 tokens of 4 heads? "
            "Then save numpy.swapaxes(x, -3, -2) of each array"
        )
        assert question in result.stderr.splitlines()[0]
        assert question in result.stdout.splitlines()[-1]
        swapped = [np.swapaxes(x, -3, -2) for x in (query, key, value)]
        save(path, query=swapped[0], key=swapped[1], value=swapped[2])
        result = call("compare", "--input", path, *options)
        assert result.stderr == ""
        assert "did you mean" not in result.stdout

    def test_a_method_that_fails_is_a_row(self, tmp_path, monkeypatch):
        """Landmarks refuse the keys, the others are measured all the same."""

        def refuse(*arguments, **options):
            raise ValueError("keys that landmarks refuse")

        monkeypatch.setattr(linattn.feature_maps.LandmarkFeatures, "fit", refuse)
        path = save(tmp_path / "in.npz")
        options = ["--num-features", "16", "--lengths", "8", "--out", tmp_path / "out"]
        result = passed("compare", "--input", path, *options)
        text = " ".join(result.stdout.split())
        assert "Failed: landmarks with 16 columns" in text
        errors = json.loads((tmp_path / "out" / "compare.json").read_text())["errors"]
        failed = {entry["method"] for entry in errors if entry["failure"]}
        assert failed == {"landmarks", "landmarks+window"}
        assert all(entry["median"] is None for entry in errors if entry["failure"])
        only = call("compare", "--input", path, "--maps", "landmarks", *options)
        assert_refused(only, "every map fails; landmarks with 16 columns: ")

    def test_a_method_out_of_memory_is_a_row(self, small):
        def attend(*arguments, **options):
            raise MemoryError

        greedy = method.Method("greedy", "greedy", lambda *arguments: attend, False)
        exact = small.value.astype(np.float64)
        case = compare.Case(greedy, None)
        found = compare.measure(case, small, exact, is_causal=False, seed=0, draws=3)
        assert found.failure == "MemoryError"
        assert found.median == math.inf
        assert not found.may_win

    def test_points_that_fail_are_named(self, file, tmp_path, monkeypatch):
        """Memory that does not suffice for the longest sequence costs a point, not the run."""
        attend = linattn.linear_attention

        def limited(query, *arguments, **options):
            if query.shape[-2] > 64:
                raise MemoryError
            return attend(query, *arguments, **options)

        monkeypatch.setattr(linattn, "linear_attention", limited)
        options = ["--maps", "elu+1", "--lengths", "64,128", "--out", tmp_path]
        result = passed("compare", "--input", file, *options)
        assert "Left out: elu + 1 at 128 tokens fails: MemoryError." in result.stdout


class TestError:
    def test_scale_does_not_matter(self):
        rng = np.random.default_rng(0)
        exact = rng.standard_normal((2, 5, 3))
        output = exact + 0.1 * rng.standard_normal(exact.shape)
        want = np.linalg.norm(output - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
        for scale in (1.0, 1e-200, 1e200):
            np.testing.assert_allclose(compare.relative_error(output * scale, exact * scale), want)

    def test_zero_and_not_finite(self):
        exact = np.zeros((4, 2, 2))
        exact[2:] = 1
        output = exact.copy()
        output[1, 0, 0] = 1
        output[2, 0, 0] = np.nan
        np.testing.assert_array_equal(
            compare.relative_error(output, exact), [0, math.inf, math.inf, 0]
        )

    def test_a_head_that_is_not_finite_counts_as_the_worst(self, small):
        def attend(query, key, value, *, is_causal, key_bias=None):
            output = value.copy()
            output[:2] = np.nan
            return output

        broken = method.Method("broken", "broken", lambda *arguments: attend, False)
        exact = small.value.astype(np.float64)
        found = compare.measure(
            compare.Case(broken, None), small, exact, is_causal=False, seed=0, draws=3
        )
        assert found.median == 0
        assert found.percentile_90 == math.inf
        assert found.heads == ((math.inf, math.inf, 0, 0, 0, 0),)


class TestVerdict:
    def test_good_enough(self):
        verdict = compare.judge([row("a", 0.1, num_features=64), row("b", 0.3), UNIFORM, EXACT])
        assert verdict.good_enough
        assert (verdict.best, verdict.num_features, verdict.median) == ("a", 64, 0.1)
        assert verdict.sentence.startswith("A with 64 columns is the cheapest map that is good")

    def test_the_cheapest_of_the_good(self):
        rows = [row("a", 0.02), replace(row("b", 0.08), seconds=0.5), row("c", 0.3)]
        assert compare.judge([*rows, UNIFORM, EXACT]).best == "b"

    def test_what_was_judged_on_other_tokens_does_not_win(self):
        rows = [row("a", 0.2), row("b", 0.01, held_out=True)]
        assert compare.judge([*rows, UNIFORM, EXACT]).best == "a"

    def test_exact_attention_that_is_faster_wins(self):
        rows = [replace(row("a", 0.02, num_features=64), seconds=0.029), UNIFORM]
        crossed = sweep.Crossover("crossed", 1723.0, (1024, 2048))
        verdict = compare.judge([*rows, replace(EXACT, seconds=0.0062)], crossed)
        assert (verdict.best, verdict.good_enough, verdict.use) == ("a", True, "exact")
        assert (
            "but exact attention is faster on these tokens (6.20 ms; the map 29.0 ms): "
            "use exact softmax attention." in verdict.sentence
        )
        assert "faster one from about 1,700 tokens on" in verdict.sentence

    def test_a_map_that_is_faster_wins(self):
        rows = [replace(row("a", 0.02), seconds=0.002), UNIFORM, replace(EXACT, seconds=0.0062)]
        verdict = compare.judge(rows)
        assert verdict.use == "map"
        assert verdict.sentence.endswith("it takes 2.00 ms, exact softmax attention 6.20 ms.")

    @pytest.mark.parametrize("ratio", [0.93, 1.0, 1.08])
    def test_a_tie_with_exact_attention(self, ratio):
        rows = [replace(row("a", 0.02), seconds=0.01 * ratio), UNIFORM]
        verdict = compare.judge([*rows, replace(EXACT, seconds=0.01)])
        assert verdict.use == "exact"
        assert "exact attention is about as fast on these tokens" in verdict.sentence

    def test_ties_between_maps(self):
        rows = [row("a", 0.05), replace(row("b", 0.08), seconds=1.05), row("c", 0.3), UNIFORM]
        assert "tied in time with B)" in compare.judge([*rows, EXACT]).sentence
        rows = [row("a", 0.3), row("b", 0.31), row("c", 0.32), row("d", 0.325), UNIFORM]
        sentence = compare.judge([*rows, EXACT]).sentence
        assert sentence.startswith("A is the best map (tied with B and C and 1 more) but not good")

    def test_a_tie_with_uniform_attention(self):
        sentence = compare.judge([row("a", 0.48), UNIFORM, EXACT]).sentence
        assert "hardly better than uniform attention (median error 0.48 against 0.50)" in sentence

    @pytest.mark.parametrize("share", [0.49, 0.51])
    def test_what_approximated_little_does_not_win(self, share):
        rows = [row("a", 0.2), row("b", 1e-7, exact_share=share), UNIFORM, EXACT]
        verdict = compare.judge(rows)
        assert verdict.best == ("b" if share < 0.5 else "a")
        assert ("on more tokens" in verdict.sentence) == (share > 0.5)

    def test_nothing_approximated_enough(self):
        verdict = compare.judge([row("b", 1e-7, exact_share=1.0), UNIFORM, EXACT])
        assert (verdict.best, verdict.use) == (None, "")
        assert verdict.sentence.startswith("none: no map approximated enough to be judged.")

    @pytest.mark.parametrize("length", [1, 31, 32, 64, 65, 96, 200, 256])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_share_of_exact_pairs(self, length, is_causal):
        index = np.arange(length)
        block = index // methods.WINDOW
        seen = np.tril(np.ones((length, length))) if is_causal else np.ones((length, length))
        near = np.abs(block[:, None] - block) <= 1
        (window,) = (m for m in methods.METHODS if m.name == "landmarks+window")
        want = (near * seen).sum() / seen.sum()
        assert window.exact_share(length, 0, is_causal) == pytest.approx(want)
        assert window.exact_share(length, length, is_causal) == 1

    @pytest.mark.parametrize("length", [40, 96, 97, 200])
    def test_a_coreset_of_few_tokens_holds_every_key(self, length):
        """What is said to be exact is exact, and one block later it is not."""
        (coreset,) = methods.select(("coreset",))
        rng = np.random.default_rng(0)
        query, key, value = rng.standard_normal((3, 1, length, 4))
        given = inputs.Inputs("", query, key, value)
        exact = compare.exact_output(given, is_causal=True)
        output = compare.prepare(compare.Case(coreset, 32), given, seed=0)(
            query, key, value, is_causal=True
        )
        held = math.sqrt(coreset.exact_share(length, 32, True)) * length
        error = np.abs(output - exact).max(axis=(0, 2))
        assert error[: round(held)].max() < 1e-12
        assert round(held) == length or error[round(held) :].max() > 1e-3

    def test_not_good_enough(self):
        verdict = compare.judge([row("a", 0.2), row("b", 0.11), UNIFORM, EXACT])
        assert not verdict.good_enough
        assert verdict.sentence.startswith("B is the best map but not good enough")
        assert verdict.sentence.endswith("use exact softmax attention.")

    def test_no_better_than_uniform(self):
        verdict = compare.judge([row("a", 0.6), row("b", 0.55), UNIFORM, EXACT])
        assert "B is the best map but no better than uniform attention" in verdict.sentence
        assert verdict.sentence.endswith("use exact softmax attention.")

    def test_nothing_finite(self):
        verdict = compare.judge([row("a", math.inf), UNIFORM, EXACT])
        assert verdict.best is None
        assert verdict.sentence == "no map gave a finite error: use exact softmax attention."


class TestSweep:
    lengths = (256, 512, 1024, 2048)

    def test_crossover_of_power_laws_is_exact(self):
        linear = {length: 3e-6 * length for length in self.lengths}
        exact = {length: 5e-9 * length**2 for length in self.lengths}
        found = sweep.crossover(linear, exact)
        assert found.status == "crossed"
        assert found.length == pytest.approx(600)
        assert found.between == (512, 1024)

    def test_below_and_not_reached(self):
        fast = dict.fromkeys(self.lengths, 1.0)
        slow = dict.fromkeys(self.lengths, 2.0)
        assert sweep.crossover(fast, slow) == sweep.Crossover("below", None, (None, 256))
        assert sweep.crossover(slow, fast) == sweep.Crossover("not reached", None, (2048, None))
        assert sweep.crossover(fast, {}) == sweep.Crossover("not measured")

    def test_after_noise_the_last_crossing_counts(self):
        linear = dict.fromkeys(self.lengths, 1.0)
        exact = dict(zip(self.lengths, (0.5, 2.0, 0.5, 2.0), strict=True))
        found = sweep.crossover(linear, exact)
        assert found.between == (1024, 2048)
        assert found.length == pytest.approx(1024 * math.sqrt(2))

    def test_budget_decides_what_is_measured(self, monkeypatch):
        """Times of the pretended calls: 1 ms and 4 ms at 1024 tokens, growing by power laws."""

        def attend(curve):
            def run(query, key, value, *, is_causal, key_bias):
                calls.append((curve, len(query)))

            return run

        def pretend(call, **limits):
            call()
            curve, length = calls[-1]
            unit = {"linear": 1e-3, "exact": 4e-3}[curve]
            seconds = unit * (length / 1024) ** sweep.EXPONENTS[curve]
            return timing.Timing(seconds, 1, seconds)

        monkeypatch.setattr(sweep, "fastest", pretend)
        calls: list[tuple[str, int]] = []
        told: list[str] = []
        lengths = [1024 * 2**k for k in range(5)]
        found = sweep.sweep(
            [*[np.zeros((lengths[-1], 2))] * 3, None],
            lengths,
            {"linear": attend("linear"), "exact": attend("exact")},
            label="x",
            num_real=8,
            is_causal=False,
            time_budget=0.36,
            notify=told.append,
        )
        # Exact takes 4, 16, 64 ms; its 256 ms at 8,192 tokens would fit into the 261 ms that are
        # left, but not leave the 16 ms that linear needs for 16,384 tokens.
        assert sorted(found.seconds("linear")) == lengths
        assert sorted(found.seconds("exact")) == lengths[:3]
        assert [(p.curve, p.length) for p in found.left_out] == [("exact", 8192), ("exact", 16384)]
        assert found.left_out[0].expected_seconds == pytest.approx(0.256)
        assert found.lengths == tuple(lengths)
        assert len(told) == 2 * len(lengths)
        assert max(length for curve, length in calls if curve == "exact") == 4096
        text = tables.left_out_text(found)
        assert "exact softmax at 8,192 tokens (expected 256 ms)" in text
        assert ", 16,384 tokens (expected 1.0 s)" in text

    @pytest.mark.parametrize(
        ("exact", "text"),
        [
            ({256: 1.0, 512: 4.0}, "from about 360 tokens on (interpolated between 256 and 512)"),
            ({256: 3.0, 512: 4.0}, "Crossover: below 256 tokens"),
            ({256: 1.0, 512: 1.5}, "not reached; exact attention was faster at 512 tokens"),
        ],
    )
    def test_sentences(self, exact, text):
        points = [sweep.Point("exact", length, time, 1) for length, time in exact.items()]
        points += [sweep.Point("linear", length, 2.0, 1) for length in exact]
        found = sweep.Sweep("x", tuple(points), (), 1.0, 8)
        assert text in tables.crossover_text(found)
        assert tables.left_out_text(found) == ""


class TestMeasuring:
    def test_peak_memory_counts_the_call_only(self):
        before = np.ones(10**6)
        peak = timing.peak_memory(lambda: (np.empty(10**6), None)[1])
        assert 8e6 <= peak < 8.2e6
        assert before.nbytes == 8e6

    def test_peak_memory_while_somebody_else_traces(self):
        tracemalloc.start()
        try:
            before = np.ones(10**6)
            peak = timing.peak_memory(lambda: (np.empty(10**5), None)[1])
            assert tracemalloc.is_tracing()
        finally:
            tracemalloc.stop()
        assert 8e5 <= peak < 1e6 < before.nbytes


class TestPictures:
    def test_a_curve_that_failed_is_named(self, small):
        found = sweep.Sweep("x", (), (sweep.LeftOut("linear", 64, 0.0, "no memory"),), 1.0, 8)
        figure = plots.time_figure(found, small, is_causal=False)
        assert figure.texts[0].get_text() == "Left out: x at 64 tokens (failed)"
        assert tables.left_out_text(found) == "Left out: x at 64 tokens fails: no memory."
