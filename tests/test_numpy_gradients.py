"""Gradients by the NumPy backend: each of its branches against the generic code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import array_api_compat.numpy
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_numpy
from linattn._driver import gradient_rows
from linattn.feature_maps import (
    ActivationFeatures,
    DenseExponentialFeatures,
    EluFeatures,
    HedgehogFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    ReluFeatures,
)
from linattn.typing import Declined, Exponential
from linattn_numpy import block_vjps, causal_scales, causal_vjps, planning, tuning
from tests.attentions import assert_at_most

# Arrays are unpacked into their places, which no type checker can follow.
linear_vjp: Any = linattn.linear_attention_vjp

D = 8
_RNG = np.random.default_rng(5)
EXPONENTIAL = {
    "positive": PositiveFeatures(D, 24, rng=0),
    "hyperbolic": HyperbolicFeatures(D, 32, rng=0),
    "weighted": PositiveFeatures.from_projection(
        _RNG.standard_normal((20, D)), log_weights=_RNG.standard_normal(20)
    ),
    "per-head": PositiveFeatures.from_projection(_RNG.standard_normal((3, 20, D))),
    "dense": DenseExponentialFeatures(
        D, 16, A=-0.05 * np.arange(D), transform=_RNG.standard_normal((D, D)), rng=0
    ),
    "hedgehog": HedgehogFeatures(0.5 * np.eye(D), bias=_RNG.standard_normal(D)),
}
POINTWISE = {
    "activation": ActivationFeatures(D, 24, rng=0),
    "unprojected": ActivationFeatures(D, sampler=None, epsilon=0.1),
    "elu": EluFeatures(scale=0.5),
    "relu": ReluFeatures(scale=2.0),
}


@pytest.fixture
def calls(monkeypatch):
    """Count how often the branches of the backend set up a block, and how often none does."""
    counts = {"unshifted": 0, "stabilized": 0, "cut": 0, "generic": 0}

    def counted(module, name, branch):
        inner = getattr(module, name)

        def outer(*args):
            answer = inner(*args)
            if branch == "generic":
                counts[branch] += isinstance(answer, Declined)
            else:
                counts[branch] += not isinstance(answer, Declined)
            return answer

        monkeypatch.setattr(module, name, outer)

    def stabilize(block, state, runs):
        counts["cut"] += any(run.size <= 4 < run.rows.stop - run.rows.start for run in runs)
        return causal_scales.stabilize(block, state, runs)

    monkeypatch.setattr(causal_vjps, "stabilize", stabilize)
    for module in (causal_vjps, block_vjps):
        counted(module, "unshifted_features", "unshifted")
    counted(causal_vjps, "_unshifted_rows", "unshifted")
    counted(block_vjps, "log_features", "stabilized")
    counted(causal_vjps, "stabilize", "stabilized")
    for name in ("read_block_vjp", "reduce_block_vjp", "scan_vjp"):
        counted(linattn_numpy, name, "generic")
    return counts


def inputs(n=150, scale=1.0, heads=(3,), dtype=np.float64):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, *heads, n, D))
    return [a.astype(dtype) for a in (query * scale, key * scale, value)]


def both(arrays, feature_map, tolerance=1e-11, **options):
    """Gradients by the backend and by the generic code, of the output and of the state; agreed."""
    answers, top = [], None
    for run in (linattn.without_backends, linattn.config):
        with run():
            (output, state), pullback = linear_vjp(
                *arrays, feature_map, return_state=True, **options
            )
            rng = np.random.default_rng(1)
            grad = rng.standard_normal(output.shape).astype(output.dtype)
            grad_state = 1e-3 * rng.standard_normal(state.kvz.shape).astype(output.dtype)
            # The same cotangent of the state's value, whatever scale the state is on.
            top = state.log_scale.max() if top is None else top
            answers.append(pullback(grad, grad_state * np.exp(state.log_scale - top)[..., None]))
    if tolerance is not None:
        agree(answers[1], answers[0], tolerance)
    return answers[1]


def agree(first, second, tolerance=1e-11):
    size = max(np.abs(b).max() for b in second)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("name", EXPONENTIAL)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_exponential_branches_equal_the_generic_code(name, is_causal, scale, calls):
    both(inputs(scale=scale), EXPONENTIAL[name], 1e-10, is_causal=is_causal)
    if scale == 1:
        assert calls["generic"] == 0 < calls["unshifted"]
        # The row terms of this one are far apart.
        assert (calls["stabilized"] > 0) == (name == "dense")
    elif name != "hedgehog":
        assert calls["stabilized"] > 0


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("is_causal", [False, True])
def test_pointwise_branches_equal_the_generic_code(name, is_causal, calls):
    arrays = inputs()
    arrays[0], arrays[1] = arrays[0] + 0.5, arrays[1] + 0.5  # no query without a feature
    both(arrays, POINTWISE[name], is_causal=is_causal)
    assert calls["generic"] == 0 < calls["unshifted"]


def test_a_state_on_far_scales_is_taken_along():
    query, key, value = inputs(40)
    phi = EXPONENTIAL["positive"]
    for size in (0.1, 30.0):
        _, state = linattn.linear_attention(query, key * size, value, phi, return_state=True)
        for is_causal in (False, True):
            both((query, key, value), phi, 1e-10, is_causal=is_causal, initial_state=state)


@pytest.mark.parametrize(
    ("rows", "copies"), [(1.0, 1), (0.2, 1), (1.0, 40)], ids=["stabilized", "unshifted", "wide"]
)
def test_a_block_that_would_lose_digits_is_done_by_token(rows, copies, calls):
    # Features of short keys late in the block are far larger than those of the early, long ones.
    query, key, value = inputs(64, heads=(), dtype=np.float32)
    value = np.tile(value, copies)
    key[:20] *= 12
    projection = rows * np.random.default_rng(0).standard_normal((24, D))
    phi: Any = PositiveFeatures.from_projection(projection)
    answers = []
    for dtype in (np.float32, np.float64):
        _, pullback = linear_vjp(
            *(a.astype(dtype) for a in (query, key, value)), phi, is_causal=True
        )
        answers.append(pullback(value.astype(dtype)))
    assert calls["cut"] > 0
    for a, b in zip(*answers, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_threads_give_the_same_bits():
    arrays = inputs(700, heads=(4,), dtype=np.float32)
    arrays[2] = arrays[2][:1]  # one value for all heads: tasks add to the same rows
    phi = PositiveFeatures(D, 64, rng=0)
    answers = []
    for threads in (1, 4):
        with linattn.config(num_threads=threads):
            output, pullback = linear_vjp(*arrays, phi, is_causal=True)
            answers.append(pullback(output))
    for a, b in zip(answers[0][:2], answers[1][:2], strict=True):
        np.testing.assert_array_equal(a, b)
    agree([answers[0][2]], [answers[1][2]], 1e-6)


@pytest.mark.parametrize("mode", ["full", "causal", "grouped", "softmax"])
def test_blocks_of_tasks_are_done_in_any_order_on_any_thread(mode, monkeypatch):
    """So that a thread that is done takes over what is left of another's task."""
    monkeypatch.setattr(tuning, "MIN_SEGMENTED_ROWS", 0)
    monkeypatch.setattr(tuning, "MAX_BLOCK_ELEMENTS", 1)
    arrays = inputs(700, heads=(3, 2), dtype=np.float32)
    if mode == "grouped":
        arrays[1:] = (x[:, :1] for x in arrays[1:])
    phi = PositiveFeatures(D, 24, rng=0)
    vjp = partial(linear_vjp, feature_map=phi, is_causal=mode != "full", chunk_size=100)
    _, pullback = (linattn.softmax_attention_vjp if mode == "softmax" else vjp)(*arrays)
    grad_output = np.ones((3, 2, 700, D), np.float32) * arrays[0][..., :1]
    want = pullback(grad_output)
    counts = []

    def run(threads, work, tasks):
        rng, done = np.random.default_rng(0), object()
        walks = [work(task) for task in tasks]
        # As the function in whose place this stands: threads of BLAS share products otherwise.
        with ThreadPoolExecutor(3) as pool, linattn_numpy.limited_threads():
            while walks:
                i = rng.integers(len(walks))
                counts.append(len(walks))
                if pool.submit(next, walks[i], done).result() is done:
                    del walks[i]

    monkeypatch.setattr(planning, "run", run)
    for x, y in zip(pullback(grad_output), want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert counts[0] > 2
    assert len(counts) > 2 * counts[0]


# Both sides of a block at once ------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """Answers of the function for both sides of a block: True where it did the block."""
    answers: list[bool] = []
    inner = linattn_numpy.scan_vjp

    def outer(*args):
        answer = inner(*args)
        answers.append(not isinstance(answer, Declined))
        return answer

    monkeypatch.setattr(linattn_numpy, "scan_vjp", outer)
    return answers


@pytest.mark.parametrize("n", [1, 33, 64, 300])
@pytest.mark.parametrize("name", ["positive", "hyperbolic", "weighted", "per-head", "dense"])
def test_unshifted_blocks_are_done_at_once(name, n, at_once):
    both(inputs(n), EXPONENTIAL[name], is_causal=True, chunk_size=64)
    assert at_once == 3 * -(-n // 64) * [True] or at_once == -(-n // 64) * [True]


@pytest.mark.parametrize("name", POINTWISE)
def test_unshifted_blocks_of_pointwise_features_are_done_at_once(name, at_once):
    both(inputs(300), POINTWISE[name], is_causal=True, chunk_size=64)
    # A query whose features are all 0 has no denominator.
    assert at_once.count(True) >= (3 if name == "relu" else 5)


@pytest.mark.parametrize("row", [10, 100, 290])
def test_a_stabilized_block_between_unshifted_ones(row, at_once, calls):
    """A token outside the range of exp: its block is stabilized, the adjoint changes its scale."""
    query, key, value = inputs(300)
    query[:, row] *= 300
    key[:, row] *= 3
    both((query, key, value), EXPONENTIAL["positive"], 1e-10, is_causal=True, chunk_size=64)
    assert set(at_once) == {True}
    assert min(calls["unshifted"], calls["stabilized"]) > 0


def test_rising_keys_change_the_scale_of_the_adjoint(at_once):
    """Later keys weigh e^30 times as much as earlier ones, in one stream."""
    query, key, value = inputs(300)
    key = key * np.linspace(6, 0.1, 300)[:, None]
    both((query, key, value), EXPONENTIAL["positive"], 1e-10, is_causal=True, chunk_size=64)
    assert True in at_once


@pytest.mark.parametrize("most", [32, 4, 3, 2])
def test_states_between_checkpoints_are_recomputed(most, at_once, monkeypatch):
    """At most so many are stored, and at most so many recomputed, of a few of which others are."""
    monkeypatch.setattr(gradient_rows, "MAX_STATES", most)
    monkeypatch.setattr(gradient_rows, "MAX_SHARE", 100.0)
    both(inputs(310, heads=()), EXPONENTIAL["positive"], is_causal=True, chunk_size=32)
    assert len(at_once) == 10


def test_segments_on_several_threads_store_checkpoints(at_once, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    with linattn.config(num_threads=2):
        both(inputs(1100, heads=()), EXPONENTIAL["positive"], is_causal=True, chunk_size=32)
    assert at_once == 35 * [True]


def test_checkpoints_are_small_beside_the_arguments(monkeypatch):
    kept = gradient_rows.Checkpoints(array_api_compat.numpy)
    monkeypatch.setattr("linattn._driver.backward.Checkpoints", lambda _: kept)
    arrays = [np.zeros((2, 4096, 16), np.float32)] * 3
    feature_map = PositiveFeatures(16, 512, rng=0)
    linear_vjp(*arrays, feature_map, is_causal=True)
    states = [state for one in kept._states.values() for state in one.values()]
    size = sum(state.kvz.nbytes for state in states)
    assert 0 < size <= sum(a.nbytes for a in arrays) / 4


def test_pullback_without_checkpoints_of_the_forward_pass(at_once):
    arrays = inputs(300)
    with linattn.without_backends():
        output, pullback = linear_vjp(
            *arrays, EXPONENTIAL["positive"], is_causal=True, chunk_size=64
        )
        wanted = pullback(output)
    agree(pullback(output), wanted)
    assert at_once == 3 * 5 * [True] or at_once == 5 * [True]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_full_pullback_reads_the_state_of_its_forward_pass(threads, monkeypatch):
    feature_map = EXPONENTIAL["positive"]
    query, key, value = inputs(150, heads=(2, 3))
    before = linattn.init_state(feature_map, D, batch_shape=(2, 1), like=key)
    before = linattn.update_state(before, 2 * key[:, :1], -value[:, :1], feature_map)
    mask = np.random.default_rng(2).random(150) < 0.5
    arrays = query, key[:, :1], value[:, :1]
    options: dict[str, Any] = {"key_mask": mask, "initial_state": before, "chunk_size": 64}
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    with linattn.without_backends():
        wanted = linear_vjp(*arrays, feature_map, **options)[1](query)
    with linattn.config(num_threads=threads):
        _, pullback = linear_vjp(*arrays, feature_map, **options)
        monkeypatch.delattr("linattn._driver.lines.add_block")
        agree(pullback(query), wanted)


def test_a_returned_state_may_be_changed_before_the_pullback():
    arrays, feature_map = inputs(), EXPONENTIAL["positive"]
    (_, state), pullback = linear_vjp(*arrays, feature_map, return_state=True)
    state.kvz[...] = np.nan
    agree(pullback(arrays[0]), linear_vjp(*arrays, feature_map)[1](arrays[0]))


# Float32 against float64 ------------------------------------------------------------------------


def single_and_double(arrays, feature_map, **options):
    """Gradients of float32 arrays by the backend, and by the generic code in float64."""
    singles = [a.astype(np.float32) for a in arrays]
    grad = np.random.default_rng(1).standard_normal(np.shape(arrays[0])).astype(np.float32)
    got = linear_vjp(*singles, feature_map, **options)[1](grad)
    with linattn.without_backends():
        doubles = [a.astype(np.float64) for a in singles]
        return got, linear_vjp(*doubles, feature_map, **options)[1](grad.astype(np.float64))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sampler", ["gaussian", None])
def test_relu_inputs_are_told_by_their_sign_at_every_width(is_causal, sampler):
    """Beside the offset a small input is rounded away, and float32 of the offset may round up."""
    for m in (*range(1, 33), 100, 257, 512) if sampler else range(1, 17):
        phi = ActivationFeatures(4 if sampler else m, m, sampler=sampler, rng=m)
        rng = np.random.default_rng(m)
        shape = (12, 4 if sampler else m)
        arrays = rng.standard_normal(shape), rng.standard_normal(shape), rng.standard_normal(shape)
        got, want = single_and_double(arrays, phi, is_causal=is_causal, chunk_size=6)
        for a, b in zip(got, want, strict=True):
            # With one feature the gradient of queries is 0.
            assert np.linalg.norm(a - b) <= 1e-4 * max(float(np.linalg.norm(b)), 0.1), m


@pytest.mark.parametrize("name", ["hedgehog", "positive"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "n", "chunk_size"),
    [((2,), (2,), 1900, None), ((2,), (2,), 50, 1), ((1,), (2,), 50, 1), ((2, 3), (2, 1), 50, 1)],
    ids=["heads", "heads, one token a block", "shared query", "shared keys"],
)
def test_one_large_key_in_one_of_several_heads(name, heads, key_heads, n, chunk_size):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((*heads, n, D))
    key, value = rng.standard_normal((2, *key_heads, n, D))
    key.reshape(-1, n, D)[-1, n // 2, 0] = 100
    phi = HedgehogFeatures(np.eye(D)) if name == "hedgehog" else EXPONENTIAL[name]
    options = {"is_causal": True, "chunk_size": chunk_size}
    singles = [a.astype(np.float32) for a in (query, key, value)]
    grad = rng.standard_normal((*np.broadcast_shapes(heads, key_heads), n, D)).astype(np.float32)
    got = linear_vjp(*singles, phi, **options)[1](grad)
    with linattn.without_backends():
        doubles = [a.astype(np.float64) for a in singles]
        want = linear_vjp(*doubles, phi, **options)[1](grad.astype(np.float64))
    for a, b in zip(got, want, strict=True):
        assert_array_equal(np.isfinite(a), True)
        heads_of = (a - b).reshape(-1, n * D), b.reshape(-1, n * D)
        error, size = (np.linalg.norm(x, axis=-1) for x in heads_of)
        assert_at_most(error, 1e-5 * size)


def test_a_head_without_a_row_that_has_gradients_beside_one_that_has():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 40, D))
    query[0] = -1
    key[0] = 1
    for chunk_size in (None, 1):
        options = {"is_causal": True, "chunk_size": chunk_size}
        got, want = single_and_double([query, key, value], POINTWISE["relu"], **options)
        agree(got, want, 1e-5)
        assert not any(gradient[0].any() for gradient in got)
        assert got[1][1].any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e5, 1e8])
@pytest.mark.parametrize("below", [55, 64, 68, 74, 76, 79])
def test_small_features_of_queries(below, size, is_causal):
    """Their denominators are normal numbers, and a cotangent over one of them is no number."""
    query, key, value, grad = np.random.default_rng(0).standard_normal((4, 40, D))
    query = 0.1 * query - below
    arrays = [a.astype(np.float32) for a in (query, key, value, size * grad)]
    phi, options = EluFeatures(scale=1.0), {"is_causal": is_causal}
    got = linear_vjp(*arrays[:3], phi, **options)[1](arrays[3])
    with linattn.without_backends():
        doubles = [a.astype(np.float64) for a in arrays]
        want = linear_vjp(*doubles[:3], phi, **options)[1](doubles[3])
    agree(got, want, 1e-5)


@pytest.mark.parametrize("size", [1.0, 1e5])
@pytest.mark.parametrize("gap", [15, 25, 60, 76, 84, 88, 90, 92, 94, 96])
@pytest.mark.parametrize("exponent", [0, 25], ids=["unshifted", "stabilized"])
def test_rows_far_below_the_later_keys_of_their_block(exponent, gap, size, calls):
    """On the scale of those keys their denominators, and what is over these, leave float32."""
    query, key, value, grad = 0.3 * np.random.default_rng(0).standard_normal((4, 40, D))
    norm = np.sqrt(2 * gap)
    key[:20, -1] = norm
    query[:, 0], query[:, -1] = exponent, 0
    projection = np.random.default_rng(1).standard_normal((16, D))
    projection[:, 0], projection[:, -1] = 1, 0
    phi = PositiveFeatures.from_projection(projection, scale=1.0)
    arrays = [a.astype(np.float32) for a in (query, key, value, size * grad)]
    options = {"is_causal": True}
    got = linear_vjp(*arrays[:3], phi, **options)[1](arrays[3])
    if exponent:
        # The least accepted denominator is that of a row some 20 below.
        assert (calls["cut"] > 0) == (gap > 20)
    with linattn.without_backends():
        doubles = [a.astype(np.float64) for a in arrays]
        want = linear_vjp(*doubles[:3], phi, **options)[1](doubles[3])
    agree(got, want, 2e-5)


class Lopsided:
    """An exponential map whose curvature is no symmetric matrix."""

    num_features = 6

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.P, self.Q = rng.standard_normal((4, 6)), rng.standard_normal((4, 4)) / 4

    def query_spec(self, xp: Any, dtype: Any, device: Any) -> Exponential:
        return Exponential(self.P.astype(dtype), self.Q.astype(dtype), np.zeros(6, dtype))

    key_spec = query_spec

    def query_features(self, x: Any) -> Any:
        raise NotImplementedError

    key_features = query_features


@pytest.mark.parametrize("is_causal", [False, True])
def test_curvature_need_not_be_symmetric(is_causal):
    query, key, value = np.random.default_rng(1).standard_normal((3, 2, 40, 4))
    grads = []
    for context in (nullcontext(), linattn.without_backends()):
        with context:
            output, pullback = linattn.linear_attention_vjp(
                query, key, value, Lopsided(), is_causal=is_causal
            )
            grads.append(pullback(output))
    for mine, other in zip(*grads, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_step_cut_in_two_beside_a_whole_one(head, num_threads):
    """Heads that share keys: the scale of one is rejected, and its blocks are halved."""
    rng, phi = np.random.default_rng(0), EluFeatures()
    query, value, cotangent = rng.standard_normal((3, 2, 2048, 64)).astype(np.float32)
    key = rng.standard_normal((1, 2048, 64)).astype(np.float32)
    query[head, ::2] = -70
    with linattn.config(num_threads=num_threads):
        _, pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=True)
        found = pullback(cotangent)[1]
    alone = np.zeros_like(found)
    for i in (slice(0, 1), slice(1, 2)):
        _, pullback = linattn.linear_attention_vjp(query[i], key, value[i], phi, is_causal=True)
        alone = alone + pullback(cotangent[i])[1]
    np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6 * abs(alone).max())


@pytest.mark.parametrize("lead", [(), (2,)])
def test_heads_in_tasks_of_their_own_share_keys(lead, monkeypatch):
    """Keys without an axis that tasks are cut along: their gradients are added."""
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    rng = np.random.default_rng(0)
    query, value, grad = rng.standard_normal((3, 4, 2, 50, 4))
    key, phi = rng.standard_normal((*lead, 50, 4)), PositiveFeatures(4, 8, rng=0)
    whole = np.array(np.broadcast_to(key, query.shape))
    with linattn.config(num_threads=4):
        found = linattn.linear_attention_vjp(query, key, value, phi)[1](grad)[1]
    each = linattn.linear_attention_vjp(query, whole, value, phi)[1](grad)[1]
    want = each.sum(axis=tuple(range(2 - len(lead))))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)
