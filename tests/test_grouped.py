"""Grouped queries in torch's layout: the error says how linattn takes them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import linattn
from linattn.baselines import linformer
from linattn.feature_maps import EluFeatures, PositiveFeatures
from tests.entries import saying

DIM = 4
PHI = EluFeatures()
RANDOM = PositiveFeatures(DIM, 8, rng=0)
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((2, heads, 5, DIM)) for heads in (8, 2, 2))
STATE = linattn.linear_attention(KEY, KEY, VALUE, PHI, return_state=True)[1]
OF_RANDOM = linattn.linear_attention(KEY, KEY, VALUE, RANDOM, return_state=True)[1]
CALLS = {
    "linear_attention": lambda q, k, v: linattn.linear_attention(q, k, v, PHI, is_causal=True),
    "linear_attention_vjp": lambda q, k, v: linattn.linear_attention_vjp(q, k, v, PHI)[0],
    "exact_window": lambda q, k, v: linattn.linear_attention(q, k, v, RANDOM, exact_window=2),
    "softmax_attention": lambda q, k, v: linattn.softmax_attention(q, k, v),
    "softmax_attention_vjp": lambda q, k, v: linattn.softmax_attention_vjp(q, k, v)[0],
    "attention": lambda q, k, v: linattn.attention(q, k, v, rng=0),
    "linear_recurrence": lambda q, k, v: linattn.linear_recurrence(q, k, v, update_rule="linear")[
        0
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_says_how_to_give_grouped_queries(name):
    call = CALLS[name]
    wanted = ["must broadcast", r"query \(2, 8\)", r"\(2, 2, 4, \.\.\.\)", r"key\[:, :, None\]"]
    with pytest.raises(ValueError, match=saying(*wanted)):
        call(QUERY, KEY, VALUE)
    grouped = call(QUERY.reshape(2, 2, 4, 5, DIM), KEY[:, :, None], VALUE[:, :, None])
    repeated = call(QUERY, *(np.repeat(a, 4, axis=1) for a in (KEY, VALUE)))
    assert_allclose(grouped.reshape(repeated.shape), repeated, atol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: linattn.read_state(QUERY, STATE, PHI),
        lambda: linattn.decode_step(QUERY[..., 0, :], KEY[..., 0, :], VALUE[..., 0, :], STATE, PHI),
        lambda: linattn.diagnostics.effective_features(QUERY, OF_RANDOM, RANDOM),
        lambda: linattn.diagnostics.relative_variance(QUERY, KEY, RANDOM),
        lambda: linformer(QUERY, KEY, VALUE, projection=np.ones((3, 5))),
        lambda: RANDOM.estimate(QUERY, KEY),
        lambda: RANDOM.kernel(QUERY, KEY),
    ],
)
def test_others_say_it_too(call):
    with pytest.raises(ValueError, match=saying("must broadcast", r"\(2, 2, 4, \.\.\.\)", "None")):
        call()


def test_no_hint_where_nothing_is_grouped():
    odd = RNG.standard_normal((2, 3, 5, DIM))
    with pytest.raises(ValueError, match=r"got query \(2, 8\), key \(2, 3\), value \(2, 3\)$"):
        linattn.linear_attention(QUERY, odd, odd, PHI)
