"""Packed sequences as they lie: which go so, that they are right, and what is declined."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
import linattn_numpy
from linattn import reference
from linattn.feature_maps import (
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
)
from linattn.typing import Features, Opaque, Tokens

D = 8
MAPS = {
    "positive": PositiveFeatures(D, 24, rng=0),
    "hyperbolic": HyperbolicFeatures(D, 24, rng=0),
    "elu": EluFeatures(D),
    "relu": ReluFeatures(D),
}
# Short and long beside the features, alike and not; none.
BORDERS = np.cumsum([0, 3, 3, 200, 200, 1, 0, 137, 300, 40, 5])
BOUNDS = {np.float64: 1e-11, np.float32: 3e-5}


def inputs(length, lead=(2,), scale=1.0, dtype=float):
    query, key, value = np.random.default_rng(length).standard_normal((3, *lead, length, D))
    return [x.astype(dtype) for x in (scale * query, scale * key, value)]


def attend(arrays: Any, name: str, borders: Any = BORDERS, **options: Any) -> Any:
    query, key, value = arrays
    return linattn.linear_attention(query, key, value, MAPS[name], cu_seqlens=borders, **options)


def dense(arrays, name, borders=BORDERS, **options):
    """Each sequence by the dense formula."""
    parts = [[x[..., i:j, :].astype(float) for x in arrays] for i, j in itertools.pairwise(borders)]
    rows = [reference.kernel_attention(q, k, v, MAPS[name], **options) for q, k, v in parts]
    return np.concatenate(rows, axis=-2)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_against_the_dense_formula(name, is_causal, dtype):
    arrays = inputs(BORDERS[-1], scale=0.5, dtype=dtype)
    with linattn.explain() as report:
        out = attend(arrays, name, is_causal=is_causal)
    # A row of ReLU features may see nothing.
    assert name == "relu" or report.ran("sequences_block") == {"linattn_numpy"}
    want = dense(arrays, name, is_causal=is_causal)
    assert_allclose(out, want, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_sequences_that_begin_in_one_sub_block_after_a_long_one():
    borders = np.cumsum([0, 200, 3, 3, 200, 5, 2, 1, 137])
    arrays = inputs(borders[-1], scale=0.5)
    out = attend(arrays, "positive", borders, is_causal=True)
    want = dense(arrays, "positive", borders, is_causal=True)
    assert_allclose(out, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_log_normalizers_are_those_of_each_sequence(is_causal):
    arrays, borders = inputs(18), [0, 5, 8, 16, 18]
    options: Any = {"is_causal": is_causal, "return_log_normalizer": True}
    with linattn.explain() as report:
        found = attend(arrays, "positive", borders, **options)[1]
    assert report.ran("sequences_block") == {"linattn_numpy"}
    for i, j in itertools.pairwise(borders):
        alone = [x[..., i:j, :] for x in arrays]
        want = attend(alone, "positive", None, **options)[1]
        assert_allclose(found[..., i:j], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("what", ["far", "jump", "nan", "faint", "low"])
def test_what_is_declined_is_done_otherwise(what, is_causal, monkeypatch):
    answers = []

    def noting(*args, inner=linattn_numpy.sequences_block):
        answers.append(inner(*args))
        return answers[-1]

    monkeypatch.setattr(linattn_numpy, "sequences_block", noting)
    borders = np.arange(0, 193, 24)
    query, key, value = inputs(192, dtype=np.float32)
    options: dict[str, Any] = {}
    if what == "far":
        query, key = 20 * query, 20 * key
    elif what == "jump":
        key[..., 30:40, :] *= 30
    elif what == "nan":
        value[..., 50, :] = np.nan
    else:
        # The first keys of a sequence weigh next to nothing beside its last.
        bias = -200.0 if what == "faint" else -70.0
        options["key_bias"] = np.where(np.arange(192) % 24 < 3, bias, 0.0).astype(np.float32)
    arrays = query, key, value
    out = attend(arrays, "positive", borders, is_causal=is_causal, **options)
    assert answers
    # Who sees all keys of a sequence sees some that weigh.
    if what != "low" or is_causal:
        assert all(isinstance(answer, linattn.typing.Declined) for answer in answers)
    with linattn.without_backends():
        double = [x.astype(float) for x in arrays]
        options = {name: x.astype(float) for name, x in options.items()}
        want = attend(double, "positive", borders, is_causal=is_causal, **options)
    others = np.arange(192) // 24 != 50 // 24 if what == "nan" else slice(None)
    bound = 3e-3 if what in ("far", "jump") else 3e-5
    top = np.abs(want[..., others, :]).max()
    assert_allclose(out[..., others, :] / top, want[..., others, :] / top, atol=bound)


class PerHead:
    """A map of one's own: parameters for each head, and features that know their position."""

    num_features = 6
    positive = True

    def __init__(self, heads: int) -> None:
        self.P: Any = np.random.default_rng(5).standard_normal((heads, D, 6)) / 4

    def query_spec(self, xp: Any, dtype: Any, device: Any) -> Opaque:
        return Opaque(self.features, self.pull_back)

    key_spec = query_spec

    def query_features(self, x: Any) -> Features:
        return self.features(Tokens(x, None, 0))

    key_features = query_features

    def features(self, tokens: Tokens) -> Features:
        at = tokens.start + np.arange(tokens.x.shape[-2])
        return Features(None, np.exp(tokens.x @ self.P + np.cos(at)[:, None]))

    def pull_back(self, tokens: Tokens, cotangent: Features) -> Any:
        return (cotangent.values * self.features(tokens).values) @ self.P.swapaxes(-2, -1)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("borders", [[0, 4, 8, 12], [0, 3, 12], [0, 1, 1, 5, 9, 12]])
def test_parameters_of_heads_do_not_meet_sequences(borders, is_causal, heads):
    phi, (query, key, value) = PerHead(heads), inputs(12, lead=(heads,))
    key, grad = key[:1], value[::-1].copy()
    options: Any = {"is_causal": is_causal, "return_state": True}
    vjp: Any = linattn.linear_attention_vjp
    (out, states), pull = vjp(query, key, value, phi, cu_seqlens=borders, **options)
    gradients = pull(grad)
    for number, rows in enumerate(map(slice, borders, borders[1:])):
        alone = (x[:, rows] for x in (query, key, value))
        (wanted, state), pull_alone = vjp(*alone, phi, **options)
        assert_allclose(out[:, rows], wanted, rtol=1e-12)
        assert_allclose(states.kvz[number], state.kvz, rtol=1e-12)
        for found, one in zip(gradients, pull_alone(grad[:, rows]), strict=True):
            assert_allclose(found[:, rows], one, rtol=1e-10, atol=1e-12)
