"""The NumPy backend: each of its branches against the generic code, and its threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_numpy
from linattn._driver import forward
from linattn._driver.problem import linear_problem
from linattn.feature_maps import (
    ActivationFeatures,
    CosformerFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    SoftmaxFeatures,
)
from linattn.typing import (
    ELU_PLUS_ONE,
    Activation,
    Declined,
    Features,
    Opaque,
    Pointwise,
    Tokens,
)
from linattn_numpy import causal, planning, threads, tuning
from linattn_numpy.blas import Blas
from linattn_numpy.buffers import buffer
from tests.attentions import maps

D = 8
MAPS = {
    **maps(D, 24, "positive", "activation", "elu", "relu"),
    **maps(D, 32, "hyperbolic"),
    "weighted": PositiveFeatures.from_projection(
        np.random.default_rng(5).standard_normal((20, D)),
        log_weights=np.random.default_rng(6).standard_normal(20),
    ),
    "per-head": PositiveFeatures.from_projection(
        np.random.default_rng(7).standard_normal((3, 20, D))
    ),
    "plain-activation": ActivationFeatures(D, sampler=None),
}


def inputs(n, scale=1.0, heads=(3,), seed=0):
    rng = np.random.default_rng(seed)
    query, key, value = rng.standard_normal((3, *heads, n, D))
    return query * scale, key * scale, value


def agree(first, second, tolerance=1e-12):
    scale = np.abs(second).max()
    np.testing.assert_allclose(first, second, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_every_branch_equals_the_generic_code(name, is_causal, masked, scale, calls):
    # Of seed 0 two keys weigh alike by exponents of 3e5, which either path rounds by 5e-11.
    query, key, value = inputs(150, scale, seed=1)
    mask = np.random.default_rng(1).random((3, 150)) > 0.4 if masked else None
    options = dict(
        is_causal=is_causal, key_mask=mask, return_state=True, return_log_normalizer=True
    )
    out, state, norm = linattn.linear_attention(query, key, value, MAPS[name], **options)
    taken = dict(calls)
    with linattn.without_backends():
        want, want_state, want_norm = linattn.linear_attention(
            query, key, value, MAPS[name], **options
        )
    agree(out, want)
    finite = np.isfinite(want_norm)
    assert_array_equal(finite, np.isfinite(norm))
    np.testing.assert_allclose(norm[finite], want_norm[finite], rtol=1e-12, atol=1e-12)
    agree(
        linattn.read_state(query, state, MAPS[name]),
        linattn.read_state(query, want_state, MAPS[name]),
    )
    if isinstance(MAPS[name], PositiveFeatures | HyperbolicFeatures):
        assert taken["stabilized"] > 0 if scale > 1 else taken["stabilized"] == 0 or masked
        assert taken["generic"] == 0


def test_a_rejected_unshifted_block_is_done_again_stabilized(calls):
    # Long keys late in the block pull the common scale away from the early ones.
    query, key, value = (x.astype(np.float32) for x in inputs(64, heads=()))
    key[40:] *= 9
    phi = PositiveFeatures(D, 24, rng=0)
    out = linattn.linear_attention(query, key, value, phi, is_causal=True)
    assert calls == {"unshifted": 0, "stabilized": 1, "generic": 0}
    want = linattn.reference.kernel_attention(query, key, value, phi, is_causal=True)
    agree(out, want, 3e-6)


@pytest.mark.parametrize(
    ("phi", "change", "reason", "by_head"),
    [
        (CosformerFeatures(D, max_length=600), lambda x: x, "specs of kind", False),
        (EluFeatures(), lambda x: 1e20 * x, "out of the range", False),
        (PositiveFeatures(D, 600, rng=0), lambda x: 40 * x, "far apart", True),
    ],
)
def test_a_declined_scan_says_why(phi, change, reason, by_head):
    x = change(inputs(600, heads=(2,))[0])
    specs = phi.query_spec(np, x.dtype, None), phi.key_spec(np, x.dtype, None)
    state = linattn.init_state(phi, D, batch_shape=(2,), like=x)
    tokens, values_and_one = Tokens(x, None, 0), np.ones((*x.shape[:-1], 3))
    answer = linattn_numpy.scan_block(*specs, tokens, tokens, values_and_one, state, False)
    assert isinstance(answer, Declined)
    assert reason in answer.reason
    assert answer.by_head == by_head


def test_blocks_in_range_take_no_shift(calls):
    query, key, value = (x.astype(np.float32) for x in inputs(600, heads=()))
    phi = PositiveFeatures(D, 24, rng=0)
    linattn.linear_attention(query, key, value, phi, is_causal=True, chunk_size=256)
    assert calls == {"unshifted": 3, "stabilized": 0, "generic": 0}


SEGMENTED = MAPS | {
    "cosformer": CosformerFeatures(D, max_length=300),
    "means": SoftmaxFeatures(D),
    "decay": MAPS["positive"],
}


@pytest.mark.parametrize("name", SEGMENTED)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_segments_side_by_side_equal_the_whole(name, is_causal, with_state, monkeypatch):
    phi = SEGMENTED[name]
    heads = (3,) if name == "per-head" else ()
    query, key, value = inputs(250, heads=heads)
    if not is_causal:
        query = query[..., :130, :]
    mask = np.random.default_rng(1).random(250) > 0.3
    before = None
    if with_state:
        before = linattn.init_state(phi, D, batch_shape=heads, like=key)
        before = linattn.update_state(before, key[..., :40, :], value[..., :40, :], phi)
    options = dict(
        is_causal=is_causal,
        key_mask=mask,
        initial_state=before,
        return_state=True,
        return_log_normalizer=name != "cosformer",
        chunk_size=7,
    )
    if name == "decay" and is_causal:
        # No segment fades as another one does.
        options["log_decay"] = -np.random.default_rng(2).random(250) / 10
    want = linattn.linear_attention(query, key, value, phi, **options)
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    monkeypatch.setattr(planning, "head_parts", lambda lead, heads: [()])
    monkeypatch.setattr(tuning, "MIN_SEGMENTED_ROWS", 1)
    monkeypatch.setattr(tuning, "MIN_SEGMENTED_CAUSAL_ROWS", 1)
    cut = []
    inner = forward.run_segments

    def counting(*args):
        cut.append(1)
        return inner(*args)

    monkeypatch.setattr(forward, "run_segments", counting)
    with linattn.config(num_threads=3):
        found = linattn.linear_attention(query, key, value, phi, **options)
    assert cut == [1]
    agree(found[0], want[0])
    assert found[1].length == want[1].length
    true = [s.kvz * np.exp(s.log_scale)[..., None] for s in (found[1], want[1])]
    agree(*true)
    if len(want) == 3:
        np.testing.assert_allclose(found[2], want[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [4096, 5000])
def test_threads_share_a_single_head_that_is_no_longer_than_a_block(length, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    seen = []
    inner = forward._segments

    def spy(*args):
        seen.append([rows.stop - rows.start for rows in inner(*args)])
        return inner(*args)

    monkeypatch.setattr(forward, "_segments", spy)
    query, key, value = inputs(length, heads=())
    phi = PositiveFeatures(D, 24, rng=0)
    with linattn.config(num_threads=1):
        want = linattn.linear_attention(query, key, value, phi)
    assert not seen
    with linattn.config(num_threads=2):
        agree(linattn.linear_attention(query, key, value, phi), want)
    assert seen == 2 * [{4096: [2048, 2048], 5000: [2560, 2440]}[length]]


def test_threads_shorten_no_block_that_they_do_not_share(monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    phi = PositiveFeatures(D, 256, rng=0)
    query, key, value = inputs(4096, heads=())
    sizes = []
    for count in (1, 8):
        with linattn.config(num_threads=count):
            window = planning.plan(linear_problem(query, key, value, phi, exact_window=8))
            full = planning.plan(linear_problem(query, key, value, phi))
        sizes.append((window.segments, window.block_size, full.backward_size))
    assert sizes[0] == sizes[1]
    assert full.segments == 8


@pytest.mark.parametrize("dim", [2, 8])
def test_what_underflows_unseen_is_noticed(dim):
    """First rows see distant keys only, of small weights, against which their queries point."""
    phi = PositiveFeatures(dim, 48, rng=0)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        query, key, value = 0.1 * rng.standard_normal((3, 50, dim))
        far = dim**0.25 * rng.uniform(9, 15)
        direction = rng.standard_normal(dim) + rng.uniform(0, 0.5) * rng.standard_normal((40, dim))
        key[:40] = far * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
        query[:40] = -rng.uniform(-0.2, 1.5) * key[0]
        arrays = [x.astype(np.float32) for x in (query, key, value)]
        query, key, value = arrays
        out = linattn.linear_attention(query, key, value, phi, is_causal=True)
        query, key, value = (x.astype(float) for x in arrays)
        with linattn.without_backends():
            want = linattn.linear_attention(query, key, value, phi, is_causal=True)
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("phi", "scale"), [(PositiveFeatures(D, 256, rng=0), -1e3), (EluFeatures(), 1e12)]
)
def test_only_the_rejected_part_of_a_long_block_is_done_again(phi, scale, calls):
    query, key, value = (x[0] for x in inputs(2048, heads=(1,)))
    key[1500:1510] *= scale
    out = linattn.linear_attention(query, key, value, phi, is_causal=True)
    assert calls["unshifted"] == 2  # of 1,024 and 512 tokens
    assert calls["stabilized"] == isinstance(phi, PositiveFeatures)
    with linattn.without_backends():
        agree(out, linattn.linear_attention(query, key, value, phi, is_causal=True))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_threads_change_no_bit(count, is_causal, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    monkeypatch.setattr(tuning, "MAX_BLOCK_ELEMENTS", 1)
    query, key, value = inputs(300, heads=(2, 3))
    phi = PositiveFeatures(D, 24, rng=0)
    seen = set()
    scan = causal._scan_unshifted

    def spy(*args):
        seen.add(threading.current_thread().name)
        return scan(*args)

    monkeypatch.setattr(causal, "_scan_unshifted", spy)
    options = dict(is_causal=is_causal, return_state=True, return_log_normalizer=True)
    with linattn.config(num_threads=1):
        want, want_state, want_norm = linattn.linear_attention(query, key, value, phi, **options)
    seen.clear()
    with linattn.config(num_threads=count):
        out, state, norm = linattn.linear_attention(query, key, value, phi, **options)
    if is_causal:
        assert 1 <= len(seen) <= count
    for got, wanted in ((out, want), (state.kvz, want_state.kvz), (norm, want_norm)):
        assert_array_equal(got, wanted)
    assert state.length == want_state.length


GROUPS = {
    "short": ((2, 4), (2, 4), 600, PositiveFeatures(D, 256, rng=0)),
    "one axis": ((5,), (5,), 600, PositiveFeatures(D, 256, rng=0)),
    "axis of 1": ((2, 1, 2), (2, 1, 2), 600, PositiveFeatures(D, 256, rng=0)),
    "more queries": ((4, 3), (1, 3), 600, PositiveFeatures(D, 256, rng=0)),
    "more queries between": ((2, 3, 2), (2, 1, 2), 600, PositiveFeatures(D, 256, rng=0)),
    "fewer columns": ((6,), (6,), 600, PositiveFeatures(D, 64, rng=0)),
    "paired": ((6,), (6,), 545, HyperbolicFeatures(D, 128, rng=0)),
    "long": ((3,), (3,), 4200, PositiveFeatures(D, 256, rng=0)),
    "a row left": ((8,), (8,), 513, PositiveFeatures(D, 256, rng=0)),
    "elu": ((8,), (8,), 513, EluFeatures()),
    "columns of each head": (
        (4,),
        (4,),
        600,
        PositiveFeatures.from_projection(
            np.random.default_rng(7).standard_normal((4, 256, D)),
            log_weights=np.random.default_rng(8).standard_normal((4, 256))
            * [[0.0], [1.0], [0.0], [1.0]],
        ),
    ),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, "far") for name in GROUPS),
        *((name, "none") for name in ("one axis", "paired", "elu")),
        *((name, "large") for name in ("short", "more queries", "paired", "columns of each head")),
    ],
)
def test_heads_that_share_a_task_do_not_share_their_fate(name, change, calls, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    query_lead, lead, n, phi = GROUPS[name]
    query = inputs(n, heads=query_lead)[0]
    _, key, value = inputs(n, heads=lead, seed=1)
    first = (0,) * len(lead)
    if change == "far":
        # One head needs a shift.
        key[first][100:110] *= -1e3
    if change == "large":
        # Exponents of one head are out of range.
        query[(0,) * len(query_lead)] *= 60

    def attend(count):
        with linattn.config(num_threads=count):
            return linattn.linear_attention(
                query,
                key,
                value,
                phi,
                is_causal=True,
                return_state=True,
                return_log_normalizer=True,
            )

    with linattn.config(num_threads=1):
        plan = planning.plan(linear_problem(query, key, value, phi, is_causal=True))
    assert len(plan.tasks) < np.prod(lead)
    found = [attend(count) for count in (1, 2, 8)]
    with linattn.without_backends():
        want, want_state, want_norm = attend(1)
    want_logs = np.log(want_state.z) + want_state.log_scale
    for out, state, norm in found:
        assert_array_equal(out, found[0][0])
        assert_array_equal(state.kvz, found[0][1].kvz)
        agree(out, want, 1e-10)
        agree(norm, want_norm, 1e-10)
        agree(np.log(state.z) + state.log_scale, want_logs, 1e-10)
        assert state.length == want_state.length
    assert calls["unshifted"] > 0


def test_heads_of_which_only_some_have_even_columns_have_their_own_bits(monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    phi = GROUPS["columns of each head"][-1]
    query, key, value = inputs(600, heads=(4,))
    _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    # The first block is below the scale of the state: a factor that is not 1.
    state = linattn.State(state.kvz, state.log_scale + 3, state.length)
    found = []
    for count in (1, 2, 4):
        with linattn.config(num_threads=count):
            found.append(
                linattn.linear_attention(
                    query, key, value, phi, is_causal=True, initial_state=state
                )
            )
    assert_array_equal(found[0], found[1])
    assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("phi", [PositiveFeatures(D, 64, rng=0), HyperbolicFeatures(D, 64, rng=0)])
@pytest.mark.parametrize("has_state", [False, True])
def test_heads_out_of_range_are_done_together_with_their_own_bits(phi, has_state, calls):
    query, key, value = (x.astype(np.float32) for x in inputs(300, heads=(2, 3)))
    query, key = 24 * query, 24 * key
    key[0, 1, 100:110] *= 3
    mask = np.arange(300) > 3
    state: Any = None
    if has_state:
        state = linattn.init_state(phi, D, batch_shape=(2, 3), like=key)
        state = linattn.update_state(state, 0.5 * key, value, phi)
    calls["stabilized"] = 0

    def attend(query, key, value, state):
        options: Any = dict(is_causal=True, key_mask=mask, initial_state=state)
        with linattn.config(num_threads=1):
            return linattn.linear_attention(query, key, value, phi, **options)

    out = attend(query, key, value, state)
    # The scales of a state are not those of unshifted blocks.
    assert calls["stabilized"] == (6 if has_state else 1)
    for head in product(range(2), range(3)):
        own = state and state._replace(kvz=state.kvz[head], log_scale=state.log_scale[head])
        assert_array_equal(out[head], attend(query[head], key[head], value[head], own))
    with linattn.without_backends():
        if has_state:
            kvz, log_scale = state.kvz.astype(float), state.log_scale.astype(float)
            state = state._replace(kvz=kvz, log_scale=log_scale)
        query, key, value = (x.astype(float) for x in (query, key, value))
        want = attend(query, key, value, state)
    # Rounding of the largest log.
    agree(out, want, 1e-7 * np.square(key).sum(axis=-1).max())


def test_a_backward_pass_keeps_its_own_tasks():
    query, key, value = inputs(600, heads=(2, 4))
    phi = PositiveFeatures(D, 256, rng=0)
    with linattn.config(num_threads=1):
        plan = planning.plan(linear_problem(query, key, value, phi, is_causal=True))
    assert len(plan.tasks) < len(plan.for_gradients().tasks) == 8


@pytest.mark.parametrize("n", [40, 600])
def test_sides_of_which_one_is_paired(n):
    paired, single = HyperbolicFeatures(D, 64, rng=0), PositiveFeatures(D, 64, rng=0)
    for query_map, key_map in ((paired, single), (single, paired)):

        class Mixed:
            num_features = 64
            query_spec, key_spec = query_map.query_spec, key_map.key_spec
            query_features, key_features = query_map.query_features, key_map.key_features

        query, key, value = inputs(n, heads=(3,))
        out = linattn.linear_attention(query, key, value, Mixed(), is_causal=True)
        with linattn.without_backends():
            agree(out, linattn.linear_attention(query, key, value, Mixed(), is_causal=True))


def test_segments_of_queries_may_be_more_than_those_of_keys(monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    query = inputs(3 * tuning.MIN_SEGMENTED_ROWS, heads=())[0]
    _, key, value = inputs(100, heads=(), seed=1)
    phi = PositiveFeatures(D, 32, rng=0)
    with linattn.config(num_threads=4):
        assert planning.plan(linear_problem(query, key, value, phi)).segments == 4
        out = linattn.linear_attention(query, key, value, phi)
    with linattn.without_backends():
        agree(out, linattn.linear_attention(query, key, value, phi), 1e-10)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_tasks_run_side_by_side(count):
    barrier, done = threading.Barrier(count), []

    def work(task):
        barrier.wait(30)
        done.append((task, threading.current_thread().name))

    threads.run(count, work, range(count))
    assert sorted(task for task, _ in done) == list(range(count))
    assert len({name for _, name in done}) == count


def test_the_last_tasks_are_done_round_robin():
    begun, lock = [], threading.Lock()

    def work(task):
        for step in range(3):
            with lock:
                begun.append((task, step))
            yield

    count, last = 40, tuning.ROUND_ROBIN_TASKS * 2
    threads.run(2, work, range(count))
    assert sorted(begun) == [(task, step) for task in range(count) for step in range(3)]
    for task in range(count):
        assert [step for other, step in begun if other == task] == [0, 1, 2]
    for i in range(1, len(begun) + 1):
        steps = dict(begun[:i])
        # No more than these are ever unfinished, each of which holds a state.
        assert sum(step < 2 for step in steps.values()) <= last + 2
    first = [i for i, (task, step) in enumerate(begun) if task >= count - last and step == 0]
    second = [i for i, (task, step) in enumerate(begun) if task >= count - last and step == 1]
    # The other thread may be late with one.
    assert sum(i > min(second) for i in first) <= 1


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_a_head_may_be_done_by_one_thread_after_the_other(is_causal, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    monkeypatch.setattr(tuning, "MIN_SEGMENTED_ROWS", 0)
    monkeypatch.setattr(tuning, "MAX_BLOCK_ELEMENTS", 1)
    query, key, value = inputs(900, heads=(3,))
    phi = PositiveFeatures(D, 32, rng=0)

    def attend(count):
        with linattn.config(num_threads=count):
            return linattn.linear_attention(
                query, key, value, phi, is_causal=is_causal, chunk_size=128, return_state=True
            )

    problem = linear_problem(query, key, value, phi, is_causal=is_causal, chunk_size=128)
    assert planning.plan(problem).resumable
    assert len(planning.plan(problem).tasks) == 3
    want, want_state = attend(1)
    for _ in range(20):
        out, state = attend(2)
        assert_array_equal(out, want)
        assert_array_equal(state.kvz, want_state.kvz)


def test_calls_from_within_tasks_do_not_wait_for_each_other():
    done = []

    def outer(task):
        threads.run(3, lambda inner: done.append((task, inner)), range(4))

    threads.run(3, outer, range(6))
    assert sorted(done) == [(i, j) for i in range(6) for j in range(4)]


@pytest.mark.parametrize("form", ["opaque", "activation"])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("inner", [False, True], ids=["full inside", "causal inside"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_side_of_a_map_may_call_attention_itself(form, side, is_causal, inner):
    """The inner call must not write over the values that the outer one has laid out."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 300, D))

    def smoothed(x):
        return np.exp(linattn.linear_attention(x, x, 7 * x, EluFeatures(), is_causal=inner))

    def plain(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    on_query, on_key = (smoothed, plain) if side == "query" else (plain, smoothed)

    def spec(features):
        if features is plain:
            return Pointwise(ELU_PLUS_ONE, P=1.0)
        if form == "opaque":
            return Opaque(lambda tokens: Features(None, smoothed(tokens.x)))
        return Pointwise(Activation("smoothed", lambda u, xp: (smoothed(u), None)), P=1.0)

    class OneSide:
        num_features = D

        def query_spec(self, xp, dtype, device):
            return spec(on_query)

        def key_spec(self, xp, dtype, device):
            return spec(on_key)

        def query_features(self, x):
            return Features(None, on_query(x))

        def key_features(self, x):
            return Features(None, on_key(x))

    # In one block, so that what the map returns does not depend on blocks.
    options: dict[str, Any] = dict(is_causal=is_causal)
    out = linattn.linear_attention(query, key, value, OneSide(), chunk_size=300, **options)
    agree(out, linattn.reference.kernel_attention(query, key, value, OneSide(), **options), 1e-9)


def test_threads_see_the_settings_of_the_caller():
    barrier, seen = threading.Barrier(3), []

    def work(task):
        barrier.wait(30)
        with linattn.config() as settings:
            seen.append(settings.precision)

    with linattn.config(precision="float64"):
        threads.run(3, work, range(3))
    assert seen == ["float64"] * 3


class FakeController:
    """Stands in for threadpoolctl: one library, with one number of threads for the process."""

    def __init__(self):
        self.num_threads = 7
        self.taken = 0
        self.lib_controllers = [self]

    def set_num_threads(self, number):
        self.taken += number == 1
        self.num_threads = number


def test_blas_limit_is_taken_once_and_given_back_by_the_last(monkeypatch):
    blas, fake = Blas(), FakeController()
    monkeypatch.setattr("linattn_numpy.blas.controller", lambda: fake)
    with blas.one_thread():
        assert fake.num_threads == 1
        with blas.one_thread():
            assert (fake.num_threads, fake.taken) == (1, 1)
        assert fake.num_threads == 1
    assert fake.num_threads == 7
    with pytest.raises(KeyError), blas.one_thread():
        raise KeyError
    assert fake.num_threads == 7


FORKS = """
import os
import signal
import sys
import threading
import linattn_numpy.blas
from linattn_numpy.blas import Blas

class Controller:
    num_threads = 7

    def set_num_threads(self, number):
        Controller.num_threads = number

Controller.lib_controllers = [Controller()]

def forked(expected):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            assert Controller.num_threads == expected, Controller.num_threads
            with blas.one_thread():
                assert Controller.num_threads == 1, Controller.num_threads
            assert Controller.num_threads == expected, Controller.num_threads
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        if expected == 7:
            os._exit(0)
        return "child"
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
    assert Controller.num_threads == 1, Controller.num_threads
    return "parent"

blas = Blas()
linattn_numpy.blas.controller = Controller
held, done = threading.Event(), threading.Event()

def hold():
    with blas.one_thread():
        held.set()
        done.wait()

# Another thread holds the limit: the child has no such thread, and all of its BLAS.
thread = threading.Thread(target=hold)
thread.start()
held.wait()
try:
    forked(7)
finally:
    done.set()
    thread.join()
assert Controller.num_threads == 7, Controller.num_threads
# The thread that forks holds it, and gives it back in parent and child.
with blas.one_thread():
    forked(1)
assert Controller.num_threads == 7, Controller.num_threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="numpy: this platform has no fork")
def test_blas_limit_of_another_thread_ends_with_a_fork():
    finished = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_blas_setting_of_the_user_survives_a_call():
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="extra 'threads' not installed")
    query, key, value = inputs(50)
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        linattn.linear_attention(query, key, value, PositiveFeatures(D, rng=0))
        assert [pool["num_threads"] for pool in threadpoolctl.threadpool_info()] == before


@pytest.mark.parametrize(
    ("asked", "environment", "controller", "number"),
    [
        (None, "3", True, 3),
        (None, "3,2", True, 3),
        (5, "3", True, 5),
        (None, "3", False, 1),
        (5, "3", False, 5),
    ],
)
def test_number_of_threads(asked, environment, controller, number, monkeypatch):
    found = object() if controller else None
    monkeypatch.setattr("linattn_numpy.planning.controller", lambda: found)
    monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert planning.num_threads(asked) == number
    monkeypatch.setenv("OMP_NUM_THREADS", "no number")
    assert planning.num_threads(asked) >= 1


def test_long_buffers_are_freed():
    small = buffer("test_name", (10, 10), np.float64)
    assert np.shares_memory(buffer("test_name", (5, 7), np.float64), small)
    long = buffer("test_name", (1000, 1000), np.float64)
    assert np.shares_memory(buffer("test_name", (10, 10), np.float64), small)
    assert not np.shares_memory(buffer("test_name", (1000, 1000), np.float64), long)
    assert buffer("test_name", (10, 10), np.float32).dtype == np.float32


def workspace(phi, heads, length, is_causal):
    """Bytes that a thread which has nothing yet needs at most, beyond inputs and output."""
    query, key, value = np.random.default_rng(0).standard_normal(
        (3, heads, length, 64), dtype=np.float32
    )
    found = []

    def run():
        tracemalloc.start()
        try:
            with linattn.config(num_threads=1):
                out = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
            found.append(tracemalloc.get_traced_memory()[1] - out.nbytes)
        finally:
            tracemalloc.stop()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "phi",
    [PositiveFeatures(64, 256, rng=0), HyperbolicFeatures(64, 256, rng=0), EluFeatures()],
    ids=["positive", "hyperbolic", "elu"],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_workspace_is_small_and_does_not_grow(phi, is_causal):
    workspace(phi, 1, 64, is_causal)  # what is imported at the first call
    short, long = (workspace(phi, 2, length, is_causal) for length in (4096, 16384))
    assert max(short, long) <= 8 * 2**20
    assert long - short < 2**20
    for heads, length in ((8, 1024), (64, 100)):
        assert workspace(phi, heads, length, is_causal) <= 8 * 2**20


@pytest.mark.parametrize(("sign", "factor"), [(-1, 1e-20), (1, 1e20), (1, 1e25), (1, 1)])
def test_values_of_any_size_come_through_an_unshifted_block(sign, factor):
    """Features of exp(+-28) times these values leave the range of float32."""
    rng = np.random.default_rng(0)
    phi = PositiveFeatures.from_projection(np.ones((2, 1)), scale=1.0)
    key = (28 * sign + 0.1 * rng.standard_normal((40, 1))).astype(np.float32)
    value = (factor * rng.standard_normal((40, 3))).astype(np.float32)
    out = linattn.linear_attention(key, key, value, phi)
    want = linattn.reference.kernel_attention(key, key, value, phi)
    agree(out / factor, want / factor, 5e-5)


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_numerators_beyond_the_range_are_read_again(size):
    """Features of exp(22) times sums of the larger values are, and denominators are not."""
    rng = np.random.default_rng(0)
    phi = PositiveFeatures.from_projection(np.ones((2, 1)), scale=1.0)
    query, key = 0.1 * rng.standard_normal((2, 40, 1), dtype=np.float32)
    query += 22
    value = rng.standard_normal((40, 3), dtype=np.float32)
    out = linattn.linear_attention(query, key, np.float32(size) * value, phi)
    agree(out / size, linattn.reference.kernel_attention(query, key, value, phi), 5e-5)


def test_columns_far_below_the_top_one_are_read_with_a_shift():
    """Column 0 is 104 above the others by its weights, and 116 below them for this query."""
    weights = np.array([0.0, -104.0, -105.0])
    phi = PositiveFeatures.from_projection(np.eye(3), scale=1.0, log_weights=weights)
    query = np.array([[-29.0, 29, 28]], dtype=np.float32)
    key = np.array([[-29.0, 29, 28], [-29, 28, 29]], dtype=np.float32)
    value = np.array([[1.0], [2]], dtype=np.float32)
    out = linattn.linear_attention(query, key, value, phi)
    agree(out, linattn.reference.kernel_attention(query, key, value, phi), 1e-5)


@pytest.mark.parametrize(("own", "gap"), [((-45, 85), 106), ((-40, 80), 100)])
def test_a_key_with_large_features_far_below_the_top_row_counts(own, gap):
    """Its share exp(-gap) underflows; its features exp(80) make up for it."""
    phi = PositiveFeatures.from_projection(np.array([[1.0, 0]]), scale=1.0)

    def key_of(u, half_square):
        return [u, np.sqrt(2 * half_square - u * u)]

    rows = [(own[0], 8192), (own[1], 8192 + gap), (own[1], 8193 + gap)]
    key = np.array([key_of(*row) for row in rows], dtype=np.float32)
    value = np.array([[1], [2], [4]], dtype=np.float32)
    query = np.zeros((1, 2), dtype=np.float32)
    out = linattn.linear_attention(query, key, value, phi)
    agree(out, linattn.reference.kernel_attention(query, key, value, phi), 1e-3)


def test_a_feature_far_below_the_largest_counts_for_a_query_that_reads_it():
    projection = np.zeros((2, 3))
    projection[:, :2] = np.eye(2)
    phi = PositiveFeatures.from_projection(projection, scale=1.0)

    def key_of(*u):
        return [*u, np.sqrt(2 * 16384 - np.square(u).sum())]

    key = np.array([key_of(100, -80), key_of(-80, -3)], dtype=np.float32)
    value = np.array([[1], [2]], dtype=np.float32)
    for u in ((-20, 86), (-30, 78)):
        query = np.array([[*u, 0]], dtype=np.float32)
        out = linattn.linear_attention(query, key, value, phi)
        agree(out, linattn.reference.kernel_attention(query, key, value, phi), 5e-4)


def test_a_state_with_large_sums_refuses_small_denominators():
    """Sums of 256 exp(29.9) that underflow would outweigh a denominator above (tiny / eps) m N."""
    projection = np.zeros((3, 4))
    projection[:, :3] = np.eye(3)
    phi = PositiveFeatures.from_projection(projection, scale=1.0)

    def key_of(*u, half_square):
        return [*u, np.sqrt(2 * half_square - np.square(u).sum())]

    n, R = 256, 8192.0
    query, key, value = np.zeros((n + 2, 4)), np.zeros((n + 2, 4)), np.zeros((n + 2, 1))
    key[:n], value[:n] = key_of(-29, 29.9, -29, half_square=R), 1
    key[0], value[0] = key_of(-29, -29, 0, half_square=R), 2
    key[n + 1] = key_of(60, -70, -70, half_square=R - 64)
    query[n] = [-40, -16.5, 18, 0]
    mask = np.arange(n + 2) != n
    q, k, v = (x.astype(np.float32) for x in (query, key, value))
    options: dict[str, Any] = dict(is_causal=True, key_mask=mask)
    out = linattn.linear_attention(q, k, v, phi, chunk_size=n, **options)
    want = linattn.reference.kernel_attention(q, k, v, phi, **options)
    agree(out[n], want[n], 4e-4)


@pytest.mark.parametrize("name", ["positive", "elu", "relu"])
def test_a_state_is_an_array_of_its_own(name):
    """Not of the map's parameters spread over the heads, and not of the state before."""
    phi = MAPS[name]
    _, key, value = inputs(100)
    states = [linattn.init_state(phi, D, batch_shape=(3,), like=key)]
    for _ in range(2):
        states.append(linattn.update_state(states[-1], key, value, phi))
        states.append(linattn.decode_step(key[:, 0], key[:, 0], value[:, 0], states[-1], phi)[1])
    for before, after in pairwise(states):
        for array, other in zip(after[:2], before[:2], strict=True):
            assert array.flags.writeable
            assert not np.shares_memory(array, other)


def test_a_state_is_made_where_no_query_has_a_batch():
    _, key, value = inputs(20, heads=(1,))
    options: dict[str, Any] = dict(return_state=True)
    out, state = linattn.linear_attention(key[:0], key, value, EluFeatures(), **options)
    assert out.shape == (0, 20, D)
    with linattn.without_backends():
        _, want = linattn.linear_attention(key[:0], key, value, EluFeatures(), **options)
    agree(
        linattn.read_state(key, state, EluFeatures()), linattn.read_state(key, want, EluFeatures())
    )
    assert state.z.min() > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_later_keys_of_softmax_attention_with_larger_logits(is_causal, dtype, monkeypatch):
    """On the scale of earlier keys the exponentials of later ones overflow."""
    added = []

    def more(*args, inner=linattn_numpy.exact_more):
        part = inner(*args)
        added.append(not isinstance(part, Declined))
        return part

    monkeypatch.setattr(linattn_numpy, "exact_more", more)
    largest = np.log(np.finfo(dtype).max)
    rng = np.random.default_rng(0)
    n = 1200
    for growth in (0, largest - 20, largest + 2, 3 * largest):
        query, (key, value) = np.ones((n, 2)), rng.standard_normal((2, n, 2))
        key *= 0.1
        # Later keys first where causal rows go on from their own block to earlier ones.
        key[slice(0, 400) if is_causal else slice(800, n), 0] += growth
        arrays = [a.astype(dtype) for a in (query, key, value)]
        out = linattn.softmax_attention(*arrays, scale=1.0, is_causal=is_causal)
        want = linattn.reference.softmax_attention(*arrays, scale=1.0, is_causal=is_causal)
        agree(out, want, (20 + growth) * np.finfo(dtype).eps)
        assert added
        assert all(added)
        added.clear()


@pytest.mark.parametrize(
    ("dtype", "gap", "size"),
    [(np.float32, gap, 1e-32) for gap in (19, 21, 30, 50)]
    + [(np.float64, gap, 1e-278) for gap in (79, 81, 94)],
)
def test_a_column_of_a_state_far_below_a_causal_block(dtype, gap, size):
    """Small values of earlier keys would underflow on the scale of the block's top column.

    The queries weigh up that the state's second column is so far below the block's first.
    """
    n, shift = 64, gap / 2
    rng = np.random.default_rng(0)
    noise, value = 0.2 * rng.standard_normal((2 * n, 3)), size * rng.standard_normal((2 * n, 3))
    query, key = noise + np.array([-shift, shift, 0]), noise * [1, 1, 0]
    key[n:] += [shift, -shift, 0]
    # Norms apart, logs of the columns are -gap, -gap in the state and 0, -gap in the block.
    key[:n, 2] = np.sqrt(shift**2 * 2 + gap)
    phi = PositiveFeatures.from_projection(np.eye(3)[:2], scale=1.0)
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    out = linattn.linear_attention(q, k, v, phi, is_causal=True, chunk_size=n)
    logs = [x.astype(np.float64) @ np.eye(3)[:, :2] for x in (q, k)]
    logs[1] -= np.square(k.astype(np.float64)).sum(axis=-1, keepdims=True) / 2
    pairs = np.logaddexp.reduce(logs[0][:, None, :] + logs[1][None, :, :], axis=-1)
    pairs = np.where(np.tri(2 * n, dtype=bool), pairs, -np.inf)
    weights = np.exp(pairs - pairs.max(axis=-1, keepdims=True))
    want = weights @ v.astype(np.float64) / weights.sum(axis=-1, keepdims=True)
    agree(out / np.float64(size), want / size, 1e-5 if dtype == np.float32 else 2e-13)
