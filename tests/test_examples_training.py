"""The examples that train: gradients of the whole model, generation and commands."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("typer", reason="the examples are commands")
from rich.console import Console
from typer.testing import CliRunner

FOLDER = Path(__file__).resolve().parents[1] / "examples"
KINDS = ["elu", "favor", "softmax", "none"]


@pytest.fixture(scope="module", autouse=True)
def folder():
    """As Python does for a script: its folder is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield
        for name in ("transformer", "training", "train_copy", "train_bytes", "digits", "reverse"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def transformer(folder):
    return importlib.import_module("transformer")


@pytest.fixture(scope="module")
def training(folder):
    return importlib.import_module("training")


@pytest.fixture(scope="module")
def train_copy(folder):
    return importlib.import_module("train_copy")


@pytest.fixture(scope="module")
def train_bytes(folder):
    return importlib.import_module("train_bytes")


def make_model(transformer, kind, *, taps=2, seed=0, dtype=np.float64):
    sizes = transformer.Sizes(vocabulary=11, length=9, dim=12, heads=3, layers=2, taps=taps)
    attention = transformer.Attention(kind, num_layers=2, dim=4, num_features=6, seed=seed)
    model = transformer.Transformer(sizes, attention, seed, dtype)
    # Away from where it starts: there, queries and keys are alike.
    rng = np.random.default_rng(seed)
    for array in model.params.values():
        array += 0.1 * rng.standard_normal(array.shape)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_whole_model(transformer, kind):
    model = make_model(transformer, kind)
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(11, size=(3, 9)), rng.integers(11, size=(3, 6))
    _, gradient = model.loss(tokens, targets)
    start = {name: array.copy() for name, array in model.params.items()}
    assert gradient.keys() == start.keys()
    used = 0
    for name, array in model.params.items():
        direction = rng.standard_normal(array.shape)
        losses = []
        for step in (1e-5, -1e-5):
            array[...] = start[name] + step * direction
            losses.append(model.loss(tokens, targets)[0])
        array[...] = start[name]
        difference = (losses[0] - losses[1]) / 2e-5
        along = np.sum(gradient[name] * direction)
        assert_allclose(along, difference, rtol=1e-6, atol=1e-9, err_msg=name)
        used += difference != 0
    # Without attention its norm and matrices have no gradient, in both layers.
    assert used == len(start) - (6 if kind == "none" else 0)
    number = sum(array.size for array in start.values())
    assert model.num_parameters == number - (2 * 12 * (1 + 4 * 12) if kind == "none" else 0)


def test_only_tokens_before_count(transformer):
    for kind in KINDS:
        model = make_model(transformer, kind)
        tokens = np.random.default_rng(0).integers(10, size=(2, 9))
        changed = tokens.copy()
        changed[:, 6] = 10
        before, after = (model.logits(t)[0] for t in (tokens, changed))
        assert_allclose(before[:, :6], after[:, :6], rtol=1e-10)
        assert np.abs(before - after)[:, 6:].max(axis=(0, 2)).min() > 1e-6 or kind == "none"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taps", [1, 3])
def test_generation_is_the_forward_pass(transformer, kind, taps):
    model = make_model(transformer, kind, taps=taps)
    prompt = [3, 1, 4]
    written, logits = transformer.generate(model, prompt, 6)
    at_once = model.logits(np.asarray([[*prompt, *written[:-1]]]), last=6)[0][0]
    assert_allclose(logits, at_once, rtol=1e-9, atol=1e-12)
    assert_array_equal(written, at_once.argmax(axis=-1))
    assert "Check: 6 tokens" in transformer.check_generated(model, prompt, written, logits)
    written[2] = (written[2] + 1) % 11
    with pytest.raises(transformer.ExampleError, match="generated token 2 "):
        transformer.check_generated(model, prompt, written, logits)


def test_training_lowers_the_loss_and_redraws(transformer, training):
    model = make_model(transformer, "favor", dtype=np.float32)
    before = model.attention.maps[1].projection
    row = np.arange(9)

    def batches(rng):
        tokens = (row + rng.integers(10, size=(4, 1))) % 10
        return tokens, (tokens + 1) % 10

    losses = training.train(
        model, batches, steps=60, rate=1e-2, redraw=25, seed=0, console=Console(quiet=True)
    )
    assert len(losses) == 60
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert not np.array_equal(model.attention.maps[1].projection, before)


@pytest.mark.parametrize(
    ("name", "options", "measure"),
    [
        ("train_copy", ["--attention", "favor", "--redraw", "1", "--documents", "2"], "accuracy"),
        ("train_bytes", ["--attention", "elu", "--prompt", "if "], "bits_per_byte"),
    ],
)
def test_commands(transformer, monkeypatch, tmp_path, name, options, measure):
    module = importlib.import_module(name)
    text, held_out = transformer.topic_bytes()
    monkeypatch.setattr(module, "topic_bytes", lambda: (text[:9000], held_out[:600]))
    result = CliRunner().invoke(module.app, [*options, "--steps", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "generated by linattn.decode_step are those of the forward pass" in result.output
    record = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert len(record["losses_bits"]) == 2
    assert 0 <= record[measure] < 9
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_prompt_that_does_not_fit(train_bytes):
    result = CliRunner().invoke(train_bytes.app, ["--prompt", "x" * 128])
    assert result.exit_code == 2
    assert "--prompt: want 1 to 127 bytes, got 128" in result.output


@pytest.fixture(scope="module")
def reverse(folder):
    return importlib.import_module("reverse")


def test_a_string_is_reversed_by_what_the_forward_pass_says(reverse, training, transformer):
    model, rng = reverse.Reverser(0), np.random.default_rng(0)
    adam, losses = training.Adam(model.params, 1e-2, 12), []
    for _ in range(12):
        loss, gradient = model.loss(reverse.task(rng, 8))
        assert gradient.keys() == model.params.keys()
        adam.step(gradient)
        losses.append(loss)
    assert losses[-1] < 0.9 * losses[0]
    strings = reverse.task(np.random.default_rng(1), 5)
    lengths = (strings != reverse.END).sum(axis=1)
    assert all(set(row[: 16 - n]) <= {reverse.END} for row, n in zip(strings, lengths, strict=True))
    written = model.write(strings)
    start = np.full((5, 1), reverse.END)
    read = np.concatenate([start, written[:, :-1]], axis=1)
    params = transformer.part(model.params, "decoder.")
    memory = model.encode(strings)[0]
    logits = reverse.layers.language_model(params, read, memory, **model._decoding)
    ended = np.cumsum(read[:, 1:] == reverse.END, axis=1) > 0
    before = np.concatenate([np.ones((5, 1), bool), ~ended], axis=1)
    assert_array_equal(logits.argmax(axis=-1)[before], written[before])


def test_reverse_as_a_command(reverse):
    result = CliRunner().invoke(reverse.app, ["--steps", "1", "--text", "abc"])
    assert result.exit_code == 0, result.output
    assert "Accuracy on 500 new strings: 0.0" in result.output
    result = CliRunner().invoke(reverse.app, ["--text", "Abc"])
    assert result.exit_code == 2
    assert "--text: want 1 to 16 letters of a to z, got 'Abc'" in result.output


def test_digits_are_drawn(folder, tmp_path):
    for name in ("sklearn", "threadpoolctl"):
        pytest.importorskip(name, reason=f"{name}, of the extra examples, is not installed")
    digits = importlib.import_module("digits")
    pixels, held_out = digits.images()
    assert (len(pixels), held_out.shape) == (1500, (297, 64))
    assert_array_equal(digits.read(held_out)[:, 1:], held_out[:, :-1])
    assert_array_equal(digits.in_a_row(held_out[:2])[:8, 9:17], held_out[1].reshape(8, 8))
    assert_array_equal(digits.Model.trained("elu", 0, 1).draw(2) < 17, np.ones((2, 64), bool))
    sizes = digits.QUICK._replace(steps=3, lengths=(16, 64))
    digits.run(sizes, tmp_path, Console(quiet=True))
    record = json.loads((tmp_path / "digits.json").read_text(encoding="utf-8"))
    assert [model["kind"] for model in record["models"]] == list(digits.KINDS)
    assert all(1.5 < model["bits"] < 5 for model in record["models"])
    assert 2 < record["independent_bits"] < 3
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
