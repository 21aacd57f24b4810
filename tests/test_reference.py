"""The oracles against plain Python loops, known answers and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from linattn.reference import kernel_attention, kernel_sums, softmax_attention
from linattn.typing import Features
from tests.attentions import normals

METHODS = ["softmax", "kernel", "positive map", "signed map"]


class Map:
    """A feature map of given functions, each ``x -> (log, values)``."""

    num_features = None

    def __init__(self, on_query, on_key=None):
        self.on_query, self.on_key = on_query, on_key or on_query

    def query_features(self, x):
        return Features(*self.on_query(x))

    def key_features(self, x):
        return Features(*self.on_key(x))


def positive(x):
    """Exponential features: exp(x), exp(-x), exp(2 x) of each coordinate."""
    return np.concatenate([x, -x, 2 * x], axis=-1), None


def signed(x):
    """Features of both signs on a scale that differs from row to row."""
    return (x * x).sum(axis=-1, keepdims=True) / 2, np.concatenate([np.cos(x), np.sin(x)], axis=-1)


def exp_kernel(scale=None):
    return lambda x, y: np.exp((x.shape[-1] ** -0.5 if scale is None else scale) * x @ y.mT)


def attend(method, query, key, value, **options):
    if method == "softmax":
        return softmax_attention(query, key, value, **options)
    kernels = {"kernel": exp_kernel(), "positive map": Map(positive), "signed map": Map(signed)}
    return kernel_attention(query, key, value, kernels[method], **options)


def plain_loops(query, key, value, weight, is_causal=False, key_mask=None, visible=None, bias=None):
    """Attention of ``weight(q_i, k_j)`` as its definition says, in Python floats."""
    leading = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    mask = np.ones(key.shape[:-1], dtype=bool) if key_mask is None else key_mask
    mask = np.broadcast_to(mask, (*leading, key.shape[-2]))
    query, key, value = (np.broadcast_to(a, leading + a.shape[-2:]) for a in (query, key, value))
    pairs = np.broadcast_to(
        True if visible is None else visible, (*leading, *query.shape[-2:-1], key.shape[-2])
    )
    bias = np.broadcast_to(0.0 if bias is None else bias, pairs.shape)
    out = np.zeros((*leading, query.shape[-2], value.shape[-1]))
    for head in np.ndindex(*leading):
        for i in range(query.shape[-2]):
            numerator = [0.0] * value.shape[-1]
            denominator = 0.0
            for j in range(key.shape[-2]):
                if mask[(*head, j)] and pairs[(*head, i, j)] and (j <= i or not is_causal):
                    w = weight(query[(*head, i)].tolist(), key[(*head, j)].tolist())
                    w *= math.exp(bias[(*head, i, j)])
                    denominator += w
                    for c in range(value.shape[-1]):
                        numerator[c] += w * float(value[(*head, j, c)])
            for c in range(value.shape[-1]):
                out[(*head, i, c)] = numerator[c] / denominator if denominator else 0.0
    return out


def softmax_weight(q, k):
    return math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)))


def positive_weight(q, k):
    return sum(
        math.exp(a + b) + math.exp(-a - b) + math.exp(2 * (a + b))
        for a, b in zip(q, k, strict=True)
    )


def signed_weight(q, k):
    scale = math.exp(sum(a * a + b * b for a, b in zip(q, k, strict=True)) / 2)
    return scale * sum(math.cos(a - b) for a, b in zip(q, k, strict=True))


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        ("softmax", softmax_weight),
        ("kernel", softmax_weight),
        ("positive map", positive_weight),
    ],
)
@given(data=st.data())
def test_equals_plain_loops(draws, method, weight, data):
    case = data.draw(draws.cases(max_length=12))
    length, rng = case.key.shape[-2], np.random.default_rng(0)
    visible = rng.random((case.query.shape[-2], length)) < 0.6
    bias = np.where(rng.random((1, length)) < 0.9, rng.standard_normal((1, length)), -np.inf)
    options = {"is_causal": case.is_causal, "key_mask": case.key_mask}
    options["visible"] = data.draw(st.sampled_from([None, visible]))
    options["bias"] = data.draw(st.sampled_from([None, bias, np.where(visible, bias, 0.5)]))
    # Plain loops do not shift: at scale 10 their exponentials would overflow.
    query, key = (x / max(case.scale, 1) for x in (case.query, case.key))
    out = attend(method, query, key, case.value, **options)
    assert out.shape == case.output_shape
    assert out.dtype == np.float64
    expected = plain_loops(query, key, case.value, weight, **options)
    assert_allclose(out, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
def test_signed_sums_equal_plain_loops(is_causal):
    query, key, value = normals((2, 5, 3), (2, 5, 3), (2, 5, 2))
    mask = np.array([[True, False, True, True, True], [False, True, True, True, False]])
    sums = kernel_sums(query, key, value, Map(signed), is_causal=is_causal, key_mask=mask)
    rows = [(h, i) for h in range(2) for i in range(5)]
    for h, i in rows:
        seen = [j for j in range(5) if mask[h, j] and (j <= i or not is_causal)]
        weights = [signed_weight(query[h, i].tolist(), key[h, j].tolist()) for j in seen]
        absolute = []
        for j in seen:
            scale = math.exp((query[h, i] @ query[h, i] + key[h, j] @ key[h, j]) / 2)
            q, k = (np.abs(signed(x)[1]) for x in (query[h, i], key[h, j]))
            absolute.append(scale * float(q @ k))
        true = [field[h, i] * np.exp(sums.log_scale[h, i]) for field in sums[:4]]
        bound = 1e-14 * sum(absolute)
        values = value[h, seen].reshape(len(seen), 2)
        assert_allclose(true[0], np.array(weights) @ values, rtol=0, atol=3 * bound)
        assert_allclose(true[1], [sum(weights)], rtol=0, atol=bound)
        assert_allclose(true[2], np.array(absolute) @ np.abs(values), rtol=1e-13)
        assert_allclose(true[3], [sum(absolute)], rtol=1e-13)
    # The cosines do change sign here: the absolute sums are not the sums.
    assert (sums.absolute_denominator > 1.01 * np.abs(sums.denominator)).any()


def test_sums_of_a_kernel_are_on_their_own_scale():
    query, key, value = normals((4, 3), (7, 3), (7, 2))
    weights = np.sin(query @ key.T)
    sums = kernel_sums(query, key, value, lambda x, y: np.sin(x @ y.mT))
    assert_array_equal(sums.log_scale, 0)
    assert_allclose(sums.numerator, weights @ value, rtol=1e-13)
    assert_allclose(sums.denominator[:, 0], weights.sum(axis=1), rtol=1e-13)
    assert_allclose(sums.absolute_numerator, np.abs(weights) @ np.abs(value), rtol=1e-13)
    assert_allclose(sums.absolute_denominator[:, 0], np.abs(weights).sum(axis=1), rtol=1e-13)


def test_known_answers():
    # Weights exp(0) = 1 and exp(ln 3) = 3: the answer is (1 * 8 + 3 * 4) / 4 = 5.
    query, key, value = [[1.0]], [[0.0], [math.log(3)]], [[8.0], [4.0]]
    assert_allclose(softmax_attention(query, key, value), [[5.0]], rtol=1e-15)
    assert_allclose(kernel_attention(query, key, value, exp_kernel(1)), [[5.0]], rtol=1e-15)
    # Twice the scale squares the weights: (1 * 8 + 9 * 4) / 10.
    assert_allclose(softmax_attention(query, key, value, scale=2.0), [[4.4]], rtol=1e-15)
    # The default scale is 1 / sqrt(4): a logit of 2 ln 3 becomes ln 3.
    query, key = [[1.0, 1, 1, 1]], [[0.0] * 4, [math.log(3) / 2] * 4]
    assert_allclose(softmax_attention(query, key, value), [[5.0]], rtol=1e-15)
    # elu(x) + 1 of (2, -ln 2) is (3, 1/2); against (3, 1/2) 9.25, against (1, 1) 3.5.
    elu = Map(lambda x: (None, np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))))
    out = kernel_attention(
        [[2.0, -math.log(2)]], [[2.0, -math.log(2)], [0.0, 0.0]], [[51.0], [0.0]], elu
    )
    assert_allclose(out, [[51 * 9.25 / 12.75]], rtol=1e-15)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_features_may_span_any_range(offset):
    # phi_r(q) phi_r(k) = exp(x_r + y_r): huge on one side, tiny on the other, different for each r.
    query, key, value = normals((5, 3), (6, 3), (6, 2))
    gauge = np.array([1e4, 0.0, -1e4])
    shifted = Map(lambda x: (x + gauge, None), lambda y: (y - gauge + offset, None))
    plain = Map(lambda x: (x, None))
    sums, expected = (kernel_sums(query, key, value, m) for m in (shifted, plain))
    assert_allclose(
        kernel_attention(query, key, value, shifted),
        kernel_attention(query, key, value, plain),
        rtol=1e-10,
    )
    assert_allclose(sums.log_scale, expected.log_scale + offset, rtol=1e-15, atol=1e-11)


def test_each_row_has_a_scale_of_its_own():
    # Rows whose weights differ by a factor of e^20000, and a key that is e^-10000 of the others.
    query, key = np.array([[1e4], [-1e4]]), np.array([[0.0], [0.0], [-1e4]])
    value = np.array([[1.0], [3.0], [100.0]])
    additive = Map(lambda x: (x, None))
    assert_allclose(kernel_attention(query, key, value, additive), [[2.0], [2.0]], rtol=1e-15)
    assert kernel_sums(query, key, value, additive).log_scale.tolist() == [[1e4], [-1e4]]
    alternating = Map(lambda x: (x, np.ones_like(x)), lambda y: (y, np.array([[1.0], [-2], [5]])))
    # A log of 1e4 has an ulp of 1.8e-12.
    assert_allclose(kernel_attention(query, key, value, alternating), [[5.0], [5.0]], rtol=1e-11)


def test_large_logits_are_finite():
    query, key = np.array([[1e3]]), np.array([[1e3], [1e3 - 1e-3 * math.log(3)], [-1e3]])
    out = softmax_attention(query, key, [[8.0], [4.0], [7.0]], scale=1.0)
    assert_allclose(out, [[7.0]], rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_keys_and_values_leave_no_trace(method, bad):
    query, key, value = normals((2, 6, 3), (2, 6, 3), (2, 6, 2))
    mask = np.array([[True, True, False, True, False, True], [True] * 4 + [False] * 2])
    for options in ({}, {"is_causal": True}):
        clean = attend(method, query, key, value, key_mask=mask, **options)
        spoiled_key, spoiled_value = key.copy(), value.copy()
        spoiled_key[~mask] = spoiled_value[~mask] = bad
        out = attend(method, query, spoiled_key, spoiled_value, key_mask=mask, **options)
        assert_array_equal(out, clean)
        assert_array_equal(np.isfinite(out), True)
    # The mask is a slice.
    sliced = attend(method, query[0], key[0][mask[0]], value[0][mask[0]])
    assert_allclose(attend(method, query, key, value, key_mask=mask)[0], sliced, rtol=1e-14)


def test_kernels_never_see_what_is_masked():
    seen = []

    def kernel(x, y):
        seen.append(y)
        return np.exp(x @ y.mT)

    kernel_attention([[1.0]], [[np.nan], [2.0]], [[1.0], [1.0]], kernel, key_mask=[False, True])
    assert seen[0].tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_visible_key_are_zero(method):
    query, key, value = normals((3, 4, 2), (3, 4, 2), (3, 4, 5))
    mask = np.ones((3, 4), dtype=bool)
    mask[0], mask[1, :2] = False, False
    out = attend(method, query, key, value, key_mask=mask, is_causal=True)
    empty = np.zeros((3, 4), dtype=bool)
    empty[0], empty[1, :2] = True, True
    assert_array_equal(out[empty], 0)
    assert_array_equal(out[~empty] != 0, True)
    assert attend(method, query, key[:, :0], value[:, :0]).tolist() == np.zeros((3, 4, 5)).tolist()


def test_sums_of_an_empty_row():
    sums = kernel_sums([[1.0]], [[1.0]], [[1.0]], Map(positive), key_mask=[False])
    assert [field.item() for field in sums] == [0, 0, 0, 0, -np.inf]


@pytest.mark.parametrize("method", METHODS)
def test_empty_axes(method):
    assert attend(method, *normals((0, 2), (3, 2), (3, 4))).shape == (0, 4)
    assert attend(method, *normals((0, 5, 2), (0, 3, 2), (0, 3, 4))).shape == (0, 5, 4)
    assert attend(method, *normals((5, 2), (3, 2), (3, 0))).shape == (5, 0)


def test_zero_denominators_give_zero_and_nan_stays():
    relu = Map(lambda x: (None, np.maximum(x, 0)))
    query, key = np.array([[-1.0], [1.0]]), np.array([[2.0], [1.0]])
    out = kernel_attention(query, key, np.array([[3.0], [6.0]]), relu)
    assert_allclose(out, [[0.0], [4.0]], rtol=1e-15)
    out = kernel_attention(query, key, np.array([[np.nan, 3.0], [6.0, 6.0]]), relu)
    assert_allclose(out, [[np.nan, 0.0], [np.nan, 4.0]], rtol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(method, where):
    query, key, value = normals((2, 6, 3), (2, 6, 3), (2, 6, 2))
    clean = attend(method, query, key, value, is_causal=True)
    {"key": key, "value": value}[where][1, 3, 0] = np.nan
    out = attend(method, query, key, value, is_causal=True)
    assert_array_equal(out[0], clean[0])
    assert_array_equal(out[1, :3], clean[1, :3])
    columns = slice(None) if where == "key" else slice(1)
    assert_array_equal(out[1, 3:, columns], np.nan)
    assert_array_equal(attend(method, query, key, value)[1, :, columns], np.nan)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_query_spoils_its_own_row(method, bad):
    query, key, value = normals((6, 3), (6, 3), (6, 2))
    clean = attend(method, query, key, value)
    query[2, 1] = bad
    with np.errstate(all="ignore"):
        out = attend(method, query, key, value)
    assert_array_equal(out[2], np.nan)
    assert_array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))


def test_a_map_may_bring_heads_of_its_own():
    query, key, value = normals((4, 2), (5, 2), (5, 3))
    per_head = np.array([1.0, 2.0, 3.0])[:, None, None]
    out = kernel_attention(query, key, value, Map(lambda x: (per_head * x, None)))
    assert out.shape == (3, 4, 3)
    for h in range(3):
        single = kernel_attention(query, key, value, Map(lambda x, h=h: ((h + 1) * x, None)))
        assert_allclose(out[h], single, rtol=1e-14)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f8", np.int64, np.longdouble])
def test_always_float64(method, dtype):
    arrays = [(4 * a).astype(dtype) for a in normals((4, 2), (5, 2), (5, 3))]
    out = attend(method, *arrays)
    assert out.dtype == np.float64
    assert out.dtype.isnative
    assert_array_equal(out, attend(method, *(a.astype(np.float64) for a in arrays)))


@pytest.mark.parametrize("method", METHODS)
def test_inputs_are_not_written(method):
    arrays = normals((4, 2), (5, 2), (5, 3))
    kept = [a.copy() for a in arrays]
    for array in arrays:
        array.flags.writeable = False
    attend(method, *arrays, key_mask=np.array([True, False, True, True, True]))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, kept, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((4, 2), (5, 2), (5, 3)), {"is_causal": True}, "is_causal: want .* one length"),
        (((4, 2), (5, 3), (5, 3)), {}, "query and key: want the same last axis"),
        (((4, 0), (5, 0), (5, 3)), {}, "query and key: want the same last axis >= 1"),
        (((4, 2), (5, 2), (6, 3)), {}, "key and value: want the same length"),
        (((4, 2), (5, 2), (5,)), {}, r"value: want shape \(\.\.\., length, dim\), got \(5,\)"),
        (((4, 2), (5, 2), (5, 3)), {"key_mask": np.ones(4, bool)}, r"key_mask: .*, got \(4,\)"),
        (
            ((4, 2), (2, 3, 5, 2), (5, 3)),
            {"key_mask": np.ones((3, 5), bool)},
            r"key_mask: want shape \(5,\), or 3 axes each 1 or equal to \(2, 3, 5\), got \(3, 5\)",
        ),
        (((4, 2), (1, 5, 2), (5, 3)), {"key_mask": np.ones((2, 5), bool)}, "key_mask: want shape"),
        (
            ((4, 2), (5, 2), (5, 3)),
            {"visible": np.ones((5, 4), bool)},
            r"visible: want last axes \(4, 5\), got shape \(5, 4\)",
        ),
        (
            ((4, 2), (5, 2), (5, 3)),
            {"bias": np.ones((4, 4))},
            r"bias: want last axes \(4, 5\), or 1, got shape \(4, 4\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(method, shapes, options, message):
    with pytest.raises(ValueError, match=message):
        attend(method, *normals(*shapes), **options)


@pytest.mark.parametrize("method", METHODS)
def test_types_that_do_not_fit_are_refused(method):
    query, key, value = normals((4, 2), (5, 2), (5, 3))
    with pytest.raises(TypeError, match="key: want real numbers, got dtype complex128"):
        attend(method, query, key + 0j, value)
    with pytest.raises(TypeError, match="value: want real numbers, got dtype object"):
        attend(method, query, key, value.astype(object))
    with pytest.raises(TypeError, match=r"key_mask: want dtype bool .* got float64"):
        attend(method, query, key, value, key_mask=np.ones(5))
    with pytest.raises(TypeError, match=r"visible: want dtype bool .* got float64"):
        attend(method, query, key, value, visible=np.ones((4, 5)))
