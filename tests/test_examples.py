"""The parts of the examples that need neither weights nor pictures from elsewhere."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn.layers

pytest.importorskip("typer", reason="the examples are commands")

from typer.testing import CliRunner

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        # As Python does for a script: its folder is on the path.
        patch.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def minilm():
    return load("minilm")


@pytest.fixture(scope="module")
def minilm_model():
    return load("minilm_model")


@pytest.fixture(scope="module")
def denoise():
    return load("denoise")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("landmarks", "landmarks:64"),
        ("landmarks:16,window=8", "landmarks:16,window=8"),
        ("window", "window,window=32"),
        ("exact", "exact"),
    ],
)
def test_methods_are_read(minilm, text, shown):
    assert str(minilm.parse_method(text)) == shown


@pytest.mark.parametrize("text", ["none", "exact:3", "coreset,window=2", "favor:0", "favor:x"])
def test_what_is_no_method(minilm, text):
    with pytest.raises(minilm.ExampleError, match="--attention"):
        minilm.parse_method(text)


def test_layers_are_read(minilm):
    assert minilm.parse_layers("0,3-5") == (0, 3, 4, 5)
    with pytest.raises(minilm.ExampleError, match="--layers: want layers out of 0-5"):
        minilm.parse_layers("6")


def test_window_attention(minilm_model):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 20, 4))
    out = minilm_model.WindowAttention(8)(query, key, value, linattn.layers.Scope())
    near = abs(np.arange(20)[:, None] // 8 - np.arange(20) // 8) <= 1
    weights = np.exp(query @ key.swapaxes(-1, -2) / 2) * near
    assert_allclose(out, weights @ value / weights.sum(axis=-1, keepdims=True), rtol=1e-12)


def words(text):
    """A tokenizer: 1, a number a word, 2."""
    return [1, *(3 + int(word) for word in text.split()), 2]


@pytest.fixture(scope="module")
def small_encoder(minilm_model):
    """The model with one layer and 20 tokens, of random weights."""
    rng = np.random.default_rng(3)
    part = linattn.layers.init_encoder(rng, 1, 384, minilm_model.HEADS, hidden_dim=16)
    rows = {"weight": 20, "position.weight": minilm_model.LENGTH}
    norm = {"norm.weight": np.ones(384, np.float32), "norm.bias": np.zeros(384, np.float32)}
    drawn = {f"embedding.{k}": rng.standard_normal((n, 384), np.float32) for k, n in rows.items()}
    return minilm_model.Encoder(
        {**part, **norm, **drawn, "types": rng.standard_normal((2, 384), np.float32)}
    )


def alone(encoder, texts):
    """Embed each text by itself, without padding."""
    return [encoder(np.asarray([words(text)]))[0] for text in texts]


def test_a_document_is_the_mean_over_the_tokens_of_its_parts(minilm_model):
    rng = np.random.default_rng(1)
    table = rng.standard_normal((20, 384))
    texts = [" ".join(map(str, rng.integers(0, 17, n))) for n in (3, 700, 0, 254, 255, 40, 1)]

    def means(tokens, mask):
        assert tokens.shape[1] <= minilm_model.LENGTH
        return np.asarray([table[t[m]].mean(axis=0) for t, m in zip(tokens, mask, strict=True)])

    found = minilm_model.embed(means, texts, words, batch=3)
    for text, embedding in zip(texts, found, strict=True):
        inner = words(text)[1:-1]
        num_parts = max(1, -(-len(inner) // 254))
        total = table[inner].sum(axis=0) + num_parts * table[[1, 2]].sum(axis=0)
        assert_allclose(embedding, total / np.linalg.norm(total), atol=1e-6)
    assert minilm_model.embed(means, [], words).shape == (0, 384)


def test_texts_that_are_padded_are_embedded_as_alone(minilm_model, small_encoder):
    texts = ["3 1 4 1 5", "9 2 6", "5 3 5 8 9 7 9 3 2"]
    found = minilm_model.embed(small_encoder.means, texts, words)
    assert_allclose(found, alone(small_encoder, texts), atol=1e-6)
    assert abs(found[0] @ found[1]) < 0.99


@pytest.mark.parametrize("by_line", [False, True])
def test_files_are_embedded(minilm, small_encoder, tmp_path, monkeypatch, by_line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minilm.model, "load", lambda: (small_encoder, words))
    Path("a.txt").write_text("1 2\n\n3 4 5\n", encoding="utf-8")
    Path("b.txt").write_text("6", encoding="utf-8")
    options = ["--lines"] if by_line else []
    result = CliRunner().invoke(minilm.app, ["embed", "a.txt", "b.txt", "--out", "o", *options])
    assert result.exit_code == 0, result.output
    with np.load("o") as saved:
        names, found = saved["names"].tolist(), saved["embeddings"]
    texts = {"a.txt": "1 2 3 4 5", "b.txt": "6"}
    if by_line:
        texts = {"a.txt:1": "1 2", "a.txt:3": "3 4 5", "b.txt:1": "6"}
    assert names == list(texts)
    assert_allclose(found, alone(small_encoder, texts.values()), atol=1e-6)


def test_a_file_that_is_no_text(minilm, small_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(minilm.model, "load", lambda: (small_encoder, words))
    (tmp_path / "a").write_bytes(b"\xff\xfe\x80")
    for name in ("a", "none"):
        result = CliRunner().invoke(minilm.app, ["embed", str(tmp_path / name)])
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("minilm.py: error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["exact", "uniform", "window", "favor", "landmarks", "coreset"])
def test_every_method_attends(minilm, name):
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 3, 40, 8)).astype("f4")
    sample = [(query[0], key[0], value[0])]
    method = minilm.parse_method(name if name in {"exact", "uniform", "window"} else f"{name}:8")
    is_causal = name == "coreset"
    scope = linattn.layers.Scope(is_causal=is_causal)
    out = minilm.make_attention(method, sample, (0, 0))(query, key, value, scope)
    assert out.shape == value.shape
    assert out.dtype == np.float32
    exact = linattn.softmax_attention(query, key, value, is_causal=is_causal)
    limit = 1e-5 if name == "exact" else 1.5
    assert np.median(minilm.relative_error(out, exact)) < limit


def test_pixels_attend_by_their_distance(denoise):
    features = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    value = np.random.default_rng(1).random((30, 3)).astype(np.float32)
    query, key = denoise.queries_and_keys(features, 0.7)
    out = linattn.softmax_attention(query, key, value, scale=1.0)
    square = ((features[:, None] - features) ** 2).sum(axis=-1)
    weights = np.exp(-square / (2 * 0.7**2))
    assert_allclose(out, weights @ value / weights.sum(axis=1, keepdims=True), rtol=1e-4)
    linear = denoise.denoise(query, key, value, 30, 0)
    assert_allclose(linear, out, rtol=1e-4)
    windowed = denoise.denoise(query, key, value, 30, 0, 8)
    assert_allclose(windowed, out, rtol=1e-4)
    near = abs(np.arange(30)[:, None] // 8 - np.arange(30) // 8) <= 1
    weights = weights * near
    alone = denoise.window_alone(query, key, value, 8)
    assert_allclose(alone, weights @ value / weights.sum(axis=1, keepdims=True), rtol=1e-4)


def test_pixels_stand_tile_by_tile(denoise):
    """Every pixel once; a tile is a block, and tiles that follow each other touch."""
    side = denoise.TILE
    height, width = 2 * side, 3 * side
    order = denoise.tile_order(height, width)
    assert sorted(order) == list(range(height * width))
    tiles = (order // width // side, order % width // side)
    blocks = [
        tuple(zip(*(axis[i : i + side**2] for axis in tiles), strict=True))
        for i in range(0, height * width, side**2)
    ]
    assert all(len(set(block)) == 1 for block in blocks)
    path = [block[0] for block in blocks]
    assert path == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    picture = np.random.default_rng(0).random((height, width, 3)).astype(np.float32)
    pixels = picture.reshape(-1, 3)[order]
    assert_array_equal(denoise.in_rows(pixels, order, picture), picture)


def test_the_picture_is_better_for_it(denoise, tmp_path, capsys):
    """What the table says, on a piece: attention beats the blur, and is near to exact attention."""
    for name in ("sklearn", "scipy", "skimage"):
        pytest.importorskip(name, reason=f"{name}, of the extra examples, is not installed")
    denoise.run(denoise.load_picture()[100:196, 200:328], 0.22, 64, 100, 0, tmp_path)
    record = json.loads((tmp_path / "denoise.json").read_text())
    noisy, blur, _, _, _, ours = record["results"]
    assert ours["db"] > blur["db"] > noisy["db"]
    assert ours["error"] < blur["error"]
    assert ours["sample_db"] > record["exact_sample_db"] - 1
    assert "exact attention" in capsys.readouterr().out


def test_kernel_regression_prints_its_tables(tmp_path, capsys):
    for name in ("sklearn", "scipy", "threadpoolctl"):
        pytest.importorskip(name, reason=f"{name}, of the extra examples, is not installed")
    example = load("kernel_regression")
    example.WIDTH, example.GAMMAS = 64, (1.0,)
    sizes = example.QUICK._replace(rows=1000, widths=(64,), statsmodels_queries=2)
    example.run(sizes, 0, tmp_path)
    record = json.loads((tmp_path / "kernel_regression.json").read_text())
    for results in record["regression"].values():
        ours, given, *_ = results
        assert ours["error"] == given["error"]
    first, *_, last = (found["from_exact"]["64"] for found in record["landmarks"])
    assert last < first  # landmarks fail where the bandwidth is narrow
    assert record["shipped"]["kernel"][1] > record["shipped"]["linear"][1]
    errors = {found["name"]: found["kernel_error"][0] for found in record["features"]}
    assert errors["orthogonal rows"] < errors["gaussian rows"]
    assert max(map(len, capsys.readouterr().out.splitlines()[:-1])) <= 80
