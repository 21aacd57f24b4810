"""Masks: masked rows are exact zeros, masked tokens leave no trace, and wrong masks are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import pytest

import linattn
from tests.attentions import (
    HEADS,
    LENGTH,
    PHI,
    every_attention,
    in_library,
    some_attentions,
    state_of,
    tokens,
)
from tests.entries import CPU, DEVICE1, on_device, saying, word


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_masked_key_is_not_the_largest_whatever_the_others(xp, is_causal):
    """Beside it, the logits of all others are so small that their exponentials are 0."""
    query, key, value = tokens(dtype="float64")
    query, key = 0 * query + 30, 0 * key - 30
    mask = np.arange(LENGTH) != 2
    out = linattn.softmax_attention(
        *in_library(xp, (query, key, value)), key_mask=xp.array(mask), is_causal=is_causal
    )
    means = np.cumsum(mask[:, None] * value, axis=-2) / np.cumsum(mask)[:, None]
    want = means if is_causal else np.broadcast_to(means[:, -1:], means.shape)
    np.testing.assert_allclose(xp.numpy(out), want, rtol=1e-12)


MASK = np.array([[True, False, True, True, False, True], [False, True, True, True, True, True]])


def poisoned_where(mask, bad, *arrays):
    """Copies that hold something bad where the mask is False."""
    return [np.where(mask[..., None], array, array.dtype.type(bad)) for array in arrays]


@every_attention
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_masked_keys_and_values_leave_no_bit(attend, bad):
    query, key, value = tokens()
    clean = attend(query, key, value, key_mask=MASK)
    out = attend(query, *poisoned_where(MASK, bad, key, value), key_mask=MASK)
    np.testing.assert_array_equal(out, clean)
    attend.check(out, query, key, value, tolerance=1e-5, key_mask=MASK)


BAD_MASKS = {
    "integers": (TypeError, ["boolean", "int64", "mask == 1"], np.ones(LENGTH, dtype=np.int64)),
    "floats": (
        TypeError,
        ["boolean", "float32", "mask == 0 .* to logits"],
        np.zeros(LENGTH, dtype=np.float32),
    ),
    "list": (TypeError, ["array", word("list")], [True] * LENGTH),
    "bool": (TypeError, ["array", word("bool")], True),
    "no axes": (TypeError, ["axes", "0-d"], np.array(True)),
    "masked": (
        TypeError,
        ["ordinary array", "MaskedArray"],
        np.ma.array(np.ones(LENGTH, dtype=bool)),
    ),
    "short": (ValueError, [r"\(6,\)", r"\(5,\)"], np.ones(LENGTH - 1, dtype=bool)),
    "one for all": (ValueError, [r"\(6,\)", r"\(1,\)"], np.ones(1, dtype=bool)),
    "other heads": (ValueError, [r"\(2, 6\)", r"\(3, 6\)"], np.ones((3, LENGTH), dtype=bool)),
    "too many axes": (
        ValueError,
        [r"\(2, 6\)", r"\(1, 2, 6\)", re.escape("mask[:, None, :]")],
        np.ones((1, HEADS, LENGTH), dtype=bool),
    ),
    "column": (
        ValueError,
        [r"\(2, 6\)", r"\(2, 6, 1\)"],
        np.ones((HEADS, LENGTH, 1), dtype=bool),
    ),
}


@pytest.mark.parametrize("name", ["linear", "softmax", "update"])
@pytest.mark.parametrize("kind", BAD_MASKS)
def test_bad_masks(name, kind):
    query, key, value = tokens()
    error, said, mask = BAD_MASKS[kind]
    call: Callable[[], Any] = {
        "linear": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "softmax": lambda: linattn.softmax_attention(query, key, value, key_mask=mask),
        "update": lambda: linattn.update_state(
            state_of(PHI, like=key, batch_shape=(HEADS,)), key, value, PHI, key_mask=mask
        ),
    }[name]
    with pytest.raises(error, match=saying(word("key_mask"), *said)):
        call()


@every_attention
@pytest.mark.parametrize("shape", [(4, LENGTH), (1, 4, LENGTH), (HEADS, 4, LENGTH)], ids=str)
def test_mask_of_pairs(attend, shape):
    query, key, value = tokens()
    match = saying(
        word("key_mask"), re.escape(str(shape)), r"pair|each query", "cannot be honoured"
    )
    with pytest.raises(ValueError, match=match) as caught:
        attend(query[:, :4], key, value, key_mask=np.ones(shape, dtype=bool), is_causal=False)
    if attend.feature_map is None:
        # It must not send the caller to the function that was called.
        assert "softmax attention" not in str(caught.value)
        assert "linear attention never" not in str(caught.value)


@pytest.mark.parametrize("name", ["linear", "softmax", "update"])
def test_mask_on_another_device(name):
    query, key, value = map(on_device(DEVICE1), tokens())
    mask = on_device(CPU)(np.ones(LENGTH, dtype=bool))
    call: Callable[[], Any] = {
        "linear": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "softmax": lambda: linattn.softmax_attention(query, key, value, key_mask=mask),
        "update": lambda: linattn.update_state(
            state_of(PHI, like=key, batch_shape=(HEADS,)), key, value, PHI, key_mask=mask
        ),
    }[name]
    with pytest.raises(ValueError, match=saying(word("key_mask"), "CPU_DEVICE", "device1")):
        call()


@some_attentions
def test_mask_of_another_namespace(attend):
    mask = array_api_strict.asarray(np.ones(LENGTH, dtype=bool))
    match = saying(word("key_mask"), r"\bnumpy\b", r"\barray_api_strict\b")
    with pytest.raises(TypeError, match=match):
        attend(*tokens(), key_mask=mask)
