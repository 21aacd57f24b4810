"""Outputs over different keys merge into that over all of them."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps import PositiveFeatures
from linattn.reference import softmax_attention


def parts_of(arrays, cuts, attend):
    """Outputs and log normalizers over the keys between cuts."""
    query, key, value = arrays
    return [
        attend(query, key[..., a:b, :], value[..., a:b, :], return_log_normalizer=True)
        for a, b in pairwise(cuts)
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parts_make_the_whole(xp, dtype):
    host = np.random.default_rng(0).standard_normal((3, 2, 12, 4)).astype(dtype)
    arrays = [xp.array(x) for x in host]
    parts = parts_of(arrays, (0, 3, 3, 11, 12), linattn.softmax_attention)
    out, log = linattn.merge_outputs(parts)
    xp.assert_like(out, arrays[0])
    assert log.dtype == parts[0][1].dtype
    bound = 8 * np.finfo(dtype).eps
    assert_allclose(xp.numpy(out), softmax_attention(*host.astype(np.float64)), rtol=0, atol=bound)
    again, log_again = linattn.merge_outputs([parts[0], linattn.merge_outputs(parts[1:])])
    assert_allclose(xp.numpy(again), xp.numpy(out), rtol=0, atol=bound)
    assert_allclose(xp.numpy(log_again), xp.numpy(log), rtol=0, atol=1e-6)


def test_far_scales_and_rows_without_keys():
    """Logits of 1e4 in one part, and rows that see no key of a part, whatever it holds there."""
    query, key, value = np.random.default_rng(1).standard_normal((3, 20, 4))
    key[10:] *= 1e4
    parts = parts_of((query, key, value), (0, 10, 20), linattn.softmax_attention)
    whole = linattn.softmax_attention(query, key, value)
    assert_allclose(linattn.merge_outputs(parts)[0], whole, rtol=1e-11, atol=1e-12)
    output, log = (x.copy() for x in parts[0])
    output[3:5], log[3:5] = np.nan, -np.inf
    merged, merged_log = linattn.merge_outputs([(output, log), parts[1]])
    assert_allclose(merged[3:5], parts[1][0][3:5], rtol=1e-15)
    assert_array_equal(merged_log[3:5], parts[1][1][3:5])
    nothing, no_log = linattn.merge_outputs([(output, log), (output, log)])
    assert_array_equal(nothing[3:5], 0)
    assert_array_equal(no_log[3:5], -np.inf)
    log[7] = np.nan
    assert_array_equal(linattn.merge_outputs([(output, log), parts[1]])[0][7], np.nan)


def test_exact_and_linear_parts_of_one_kernel():
    """Some keys exactly and the others by a map, and heads that share a part broadcast."""
    query, key, value = np.random.default_rng(2).standard_normal((3, 2, 30, 8)) / 2
    phi = PositiveFeatures(8, 32, rng=0)
    near = linattn.softmax_attention(query, key[:1, :9], value[:1, :9], return_log_normalizer=True)
    far = linattn.linear_attention(query, key[:, 9:], value[:, 9:], phi, return_log_normalizer=True)
    weights = np.concatenate(
        [
            np.exp(phi.scale * query @ np.broadcast_to(key[:1, :9], (2, 9, 8)).mT),
            phi.estimate(query, key[:, 9:]),
        ],
        axis=-1,
    )
    values = np.concatenate([np.broadcast_to(value[:1, :9], (2, 9, 8)), value[:, 9:]], axis=-2)
    out, log = linattn.merge_outputs([near, far])
    assert_allclose(out, weights @ values / weights.sum(axis=-1, keepdims=True), rtol=1e-12)
    assert_allclose(log, np.log(weights.sum(axis=-1)), rtol=1e-12)


OUT, LOG = np.zeros((2, 5, 3)), np.zeros((2, 5))
MISTAKES = [
    ([], ValueError, "at least one"),
    ([OUT], TypeError, "pairs .*got ndarray"),
    ([(OUT, LOG[0])], ValueError, r"parts.0..1. must be .*\(2, 5\), got \(5,\)"),
    ([(OUT, LOG), (OUT[:, :4], LOG[:, :4])], ValueError, "one length and value dim"),
    ([(OUT, LOG), (OUT.astype("f4"), LOG)], ValueError, "one dtype"),
    ([(OUT, LOG > 0)], TypeError, r"parts.0..1. must have dtype float16"),
    ([(OUT, [0.0])], TypeError, r"parts.0..1. must be an array"),
]


@pytest.mark.parametrize(("parts", "error", "message"), MISTAKES)
def test_mistakes_are_named(parts, error, message):
    with pytest.raises(error, match=message):
        linattn.merge_outputs(parts)
