"""`linattn compare --baselines`: published attentions beside the maps; log weights of keys."""

from __future__ import annotations

import json
import math
import shlex
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("typer", reason="the command needs the extra cli")

import linattn
from linattn import reference
from linattn.cli import compare, inputs, methods, run
from linattn.cli.method import Sizes, exact_multiplications
from linattn.cli.published import PUBLISHED
from tests import command
from tests.command import assert_refused, call, passed, save

LENGTH, KEYS = 96, 24


row = partial(command.row, num_features=64)
REFERENCES = [
    row("uniform", 0.5, 0.0, kind="reference", num_features=None),
    row("exact", 0.0, 1.0, kind="reference", num_features=None),
]


@pytest.fixture(scope="module")
def structured(tmp_path_factory):
    """Keys in clusters, tokens alike their neighbours: something for everyone."""
    rng = np.random.default_rng(3)
    query, key = np.cumsum(rng.standard_normal((2, 2, LENGTH, 8)), axis=-2).astype(np.float32) / 3
    value = rng.standard_normal((2, LENGTH, 4), np.float32)
    folder = tmp_path_factory.mktemp("inputs")
    return save(folder / "mine.npz", query=query, key=key, value=value)


OPTIONS = ["--num-features", KEYS, "--lengths", "64", "--draws", 1, "--time-budget", 1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_command(structured, tmp_path, is_causal):
    options = [*OPTIONS, *(["--causal"] if is_causal else [])]
    result = passed("compare", "--baselines", "--input", structured, *options, "--out", tmp_path)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert (
        max(len(line) for line in lines if not line.startswith(("Verdict", "Input", "Writ"))) <= 80
    )
    assert "…" not in result.stdout
    record = json.loads((tmp_path / "compare.json").read_text())
    measured = {entry["method"]: entry for entry in record["errors"]}
    fitting = {m.name for m in PUBLISHED if m.causal in (None, is_causal)}
    assert fitting <= set(measured)
    assert all(measured[name]["failure"] == "" for name in fitting)
    assert {measured[m.name]["kind"] for m in PUBLISHED if m.name in fitting} == {
        "published",
        "bound",
    }
    for entry in record["errors"]:
        assert entry["method"] == "uniform" or entry["cost"] > 0
    assert set(record["left_out"]) == {m.label for m in PUBLISHED if m.name not in fitting}
    told = " ".join(result.stdout.split())
    assert "Not measured: " in told
    assert "Synthesizer, AFT and external memory, whose parameters are learned." in told
    assert ("for full attention only" if is_causal else "for causal attention only") in told
    assert "Of published attentions " in lines[-1]
    assert "bounds: truncated SVD " in lines[-1]
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "frontier.png" in lines[-2]
    assert "--baselines" in record["command"]


def test_published_attentions_by_name(structured, tmp_path):
    words = ["compare", "--input", structured, *OPTIONS, "--out", tmp_path, "--maps"]
    result = passed(*words, "longformer,landmarks")
    assert "Longformer" in result.stdout
    assert "BigBird" not in result.stdout
    assert "Not measured" not in result.stdout
    assert (tmp_path / "frontier.png").exists()
    record = json.loads((tmp_path / "compare.json").read_text())
    passed(*shlex.split(record["command"])[1:-1], tmp_path / "again")
    second = json.loads((tmp_path / "again" / "compare.json").read_text())
    assert [e["heads"] for e in second["errors"]] == [e["heads"] for e in record["errors"]]
    only = passed(*words, "longformer")
    assert only.stdout.splitlines()[-1].startswith("Verdict: Of published attentions Longformer")
    assert_refused(call(*words, "strided"), "--maps: strided is for causal attention only")


@pytest.mark.parametrize("method", PUBLISHED, ids=lambda m: m.name)
@pytest.mark.parametrize("length", [40, 256])
def test_about_so_many_keys_are_met(method, length):
    """Of a pattern each query meets m keys on average; all rows are averages of values."""
    is_causal = method.causal is True
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, length, 8))
    make = method.make(query, key, 32, np.random.default_rng(0))
    weights = make(query, key, np.eye(length)[None], is_causal=is_causal)
    assert weights.shape == (1, length, length)
    assert_array_equal(np.isfinite(weights), True)
    if is_causal:
        assert np.abs(np.triu(weights[0], 1)).max() == 0
    by_pattern = {"local-window", "strided", "longformer", "bigbird", "top-k", "fixed"}
    if method.name in by_pattern and length == 256:
        rows = np.sum(weights[0] > 0, axis=-1)
        typical = float(np.median(rows))
        assert 0.6 * 32 <= typical <= 1.1 * 32, typical
        sizes = Sizes(length, length, 8, 4, 32, is_causal)
        if method.kind != "bound":
            counted = rows.sum() * (8 + 4)
            assert counted <= 1.05 * method.multiplications(sizes)
            assert counted >= 0.7 * method.multiplications(sizes)


def test_large_inputs_are_measured_while_there_is_time(structured, tmp_path, monkeypatch):
    words = ["compare", "--baselines", "--input", structured, *OPTIONS, "--out", tmp_path]
    monkeypatch.setattr(run, "MAX_MULTIPLICATIONS", 3e5)
    result = passed(*words)
    told = " ".join(result.stdout.split())
    assert "bound: truncated SVD with 24 keys" in told
    assert "too many multiplications, take fewer tokens or heads" in told
    monkeypatch.setattr(run, "MAX_MULTIPLICATIONS", 4e9)
    monkeypatch.setattr(run, "PUBLISHED_SECONDS", 0.0)
    result = call(*words)
    assert "no time left of 0 s" in " ".join(result.stdout.split())
    record = json.loads((tmp_path / "compare.json").read_text())
    assert {entry["kind"] for entry in record["errors"]} <= {"map", "reference", "published"}
    assert "WildCat with 24 keys" in record["left_out"]
    monkeypatch.setattr(run, "MAX_MULTIPLICATIONS", 0.0)
    assert_refused(call(*words, "--maps", "wildcat,thinformer"), "nothing could be measured; ")


def test_exact_attention_costs_what_it_does():
    assert exact_multiplications(Sizes(10, 20, 3, 4, 0, False)) == 10 * 20 * 7
    assert exact_multiplications(Sizes(10, 10, 3, 4, 0, True)) == 55 * 7


def test_the_frontier():
    rows = [
        row("dear", 0.2, 0.9),
        row("cheap", 0.5, 0.1, kind="published"),
        row("middle", 0.3, 0.4, kind="published"),
        row("worse", 0.4, 0.5),
        row("small", 0.001, 0.2, exact_share=0.9),
        row("bound", 0.01, 0.3, kind="bound"),
        *REFERENCES,
    ]
    assert [r.method for r in compare.frontier(rows)] == ["cheap", "middle", "dear"]


def test_the_sentence_about_published_attentions():
    rows = [
        row("a", 0.2, 0.9),
        row("other", 0.1, 0.9, num_features=128),
        row("p", 0.15, 0.4, kind="published"),
        row("q", 0.35, 0.4, kind="published"),
        row("s", 1e-9, 0.4, kind="published", exact_share=1.0),
        row("bound: best", 0.01, 0.3, kind="bound"),
        *REFERENCES,
    ]
    sentence = compare.judge(rows).sentence
    assert sentence.endswith(
        " Of published attentions P with 64 keys comes nearest (median error 0.15, 40% of the "
        "multiplications of exact attention); with as many A has 0.2 (90%); bounds: BOUND: BEST "
        "0.01."
    )
    assert "published" not in compare.judge([row("a", 0.2, 0.9), *REFERENCES]).sentence


# Log weights of keys ----------------------------------------------------------------------------


@pytest.fixture
def biased(tmp_path):
    bias = np.random.default_rng(2).normal(size=(3, 20)).astype(np.float32)
    bias[:, [3, 7]] = -np.inf
    return save(tmp_path / "biased.npz", key_bias=bias), bias


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("method", [*methods.METHODS, *methods.REFERENCES], ids=lambda m: m.name)
def test_every_method_takes_a_key_bias(biased, method, is_causal):
    """Errors are those against the oracle with the bias; a key of -inf can hold anything."""
    if method.obstacle(is_causal=is_causal, aligned=True, has_key_bias=True):
        pytest.skip("of no use there")
    path, bias = biased
    given = inputs.load(path)
    assert given.key_bias is not None
    np.testing.assert_array_equal(given.key_bias, np.tile(bias, (2, 1)))
    pairs = given.key_bias[:, None, :]
    exact = compare.exact_output(given, is_causal=is_causal)
    truth = reference.softmax_attention(*given.arrays, is_causal=is_causal, bias=pairs)
    np.testing.assert_allclose(exact, truth, rtol=1e-12, atol=1e-12)
    case = compare.Case(method, 6 if method.has_num_features else None)
    attend = compare.prepare(case, given, seed=0)
    output = attend(*given.arrays, is_causal=is_causal, key_bias=given.key_bias)
    changed = given.value.copy()
    changed[:, [3, 7]] = 100.0
    again = attend(given.query, given.key, changed, is_causal=is_causal, key_bias=given.key_bias)
    np.testing.assert_allclose(again, output, atol=1e-4)
    without = attend(*given.arrays, is_causal=is_causal)
    assert np.abs(without - output).max() > 1e-2
    if method is methods.EXACT:
        np.testing.assert_allclose(output, truth, atol=1e-5)
    if method is methods.UNIFORM:
        nothing = np.zeros_like(given.query)
        arrays = (nothing, given.key, given.value)
        mean = reference.softmax_attention(*arrays, is_causal=is_causal, bias=pairs)
        np.testing.assert_allclose(output, mean, atol=1e-5)


def test_the_command_with_a_key_bias(biased, tmp_path):
    path, _ = biased
    options = ["--num-features", "6", "--lengths", "16,40", "--out", tmp_path / "out"]
    passed("compare", "--baselines", "--input", path, *options)
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert record["input"]["key_bias"] is True
    assert set(record["left_out"].values()) == {"is for causal attention only", "takes no key_bias"}
    medians = {entry["method"]: entry["median"] for entry in record["errors"]}
    assert medians["exact"] < 1e-5
    assert "landmarks" in medians
    refused = call("compare", "--input", path, "--maps", "longformer", *options)
    assert_refused(refused, "--maps: longformer takes no key_bias")


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (np.zeros(19, np.float32), "key_bias: want shape (..., length) with the length of key"),
        (np.zeros(20, np.int64), "key_bias: want float16, float32 or float64, got int64"),
        (np.full(20, -np.inf, np.float32), "want a key that is not left out in each head"),
        (np.full(20, np.nan, np.float32), "key_bias: want finite numbers, got 20 NaN"),
        (np.full(20, np.inf, np.float32), "key_bias: want finite numbers, got 20 NaN or infinite"),
        (np.zeros((5, 20), np.float32), "want leading axes that broadcast"),
    ],
)
def test_a_wrong_key_bias(tmp_path, bias, text):
    path = save(tmp_path / "in.npz", key_bias=bias)
    assert_refused(call("compare", "--input", path, "--out", tmp_path / "out"), text)


def test_a_key_bias_goes_with_its_keys(biased):
    path, _ = biased
    given = inputs.load(path)
    *_, key_length = given.key.shape[:2]
    assert key_length == 20
    query, key, value, bias = inputs.continued(given, 200, np.random.default_rng(0))
    assert given.key_bias is not None
    assert bias is not None
    nearest = np.linalg.norm(key[:, None] - given.key[0], axis=-1).argmin(axis=1)
    same = bias == given.key_bias[0, nearest]
    assert same.mean() > 0.95
    kept = inputs.limited(given, max_heads=2, max_tokens=5, is_causal=False)
    np.testing.assert_array_equal(kept.key_bias, given.key_bias[[0, 5], :5])
    assert math.isfinite(float(linattn.softmax_attention(query, key, value, key_bias=bias).sum()))
