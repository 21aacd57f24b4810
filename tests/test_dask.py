"""Dask arrays in, lazy Dask arrays out: a few tasks a block, nothing computed, chunks kept."""

import importlib.util
import math
import pickle
import subprocess
import sys
import warnings
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_allclose

import linattn
from linattn.feature_maps import (
    LandmarkFeatures,
    PositiveFeatures,
)
from tests.attentions import full_and_causal
from tests.dask_arrays import (
    MAPS,
    D,
    E,
    Recorded,
    assert_reads_are_fused,
    chunkings,
    close,
    compare,
    in_dask,
    lazily,
    one_thread,
    recorded,
    refuse,
    states_agree,
    tokens,
)

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

__all__ = ["one_thread"]

attend: Any = linattn.linear_attention


@full_and_causal
@pytest.mark.parametrize("tolerance", [None, 0.3])
def test_attention_that_chooses_is_exact_and_lazy(is_causal, tolerance):
    arrays = tokens(2560)
    options: dict[str, Any] = {"is_causal": is_causal, "tolerance": tolerance, "rng": 0}
    with dask.config.set(scheduler=refuse):
        output, report = linattn.attention(*lazily(arrays, 640), return_report=True, **options)
    assert report.method == "exact"
    want = linattn.softmax_attention(*arrays, is_causal=is_causal)
    close(output.compute(), want, tol=1e-5)


# Right for any chunks -----------------------------------------------------------------------------


def earlier(phi, seed=1, **options):
    """A state of twenty tokens."""
    return attend(*tokens(20, seed=seed), phi, return_state=True, **options)[1]


@pytest.mark.parametrize("name", MAPS)
@full_and_causal
@settings(max_examples=5, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), masked=st.booleans(), streamed=st.booleans())
def test_any_chunks_give_the_call_in_memory(name, is_causal, data, seed, masked, streamed):
    length = data.draw(st.integers(0, 60), "length")
    rows = data.draw(chunkings(length), "rows")
    heads = data.draw(st.sampled_from([1, 2]), "heads in a chunk")
    rng, options = np.random.default_rng(seed), dict[str, Any]()
    if masked:
        options["key_mask"] = rng.random(length) < 0.7
        options["key_bias"] = rng.standard_normal((1, length)).astype(np.float32)
    if streamed:
        options["initial_state"] = earlier(MAPS[name], seed + 1)
    flags: Any = {"is_causal": is_causal, "return_state": True, "return_log_normalizer": True}
    arrays = tokens(length, seed=seed)
    got = compare(arrays, rows, MAPS[name], options, heads=heads, **flags)
    assert got[0].chunks == (((1, 1) if heads == 1 else (2,)), rows, (E,))


@full_and_causal
@settings(max_examples=5, deadline=None)
@given(data=st.data(), leads=st.sampled_from([((), (3,)), ((1,), (3,)), ((2, 1), (2, 3))]))
def test_no_tokens_and_a_state_in_other_chunks(is_causal, data, leads):
    """The chunks that heads of no tokens come in are not those of the state: it is handed on."""
    phi = MAPS["elu"]
    of_heads, of_state = (
        data.draw(chunkings(3), name) for name in ("heads", "chunks of the state")
    )
    shapes = [(*lead, 0, n) for lead, n in zip((*leads, leads[1]), (D, D, E), strict=True)]
    earlier = np.random.default_rng(0).standard_normal((3, *leads[1], 4, D))
    state = attend(*earlier[:2], earlier[2, ..., :E], phi, return_state=True)[1]

    def lazy(array, axis, chunks):
        heads = {array.ndim + axis: chunks} if array.shape[axis:][:1] == (3,) else {}
        return da.from_array(array, chunks=heads)

    given = state._replace(
        kvz=lazy(state.kvz, -3, of_state), log_scale=lazy(state.log_scale, -2, of_state)
    )
    arrays = [lazy(np.zeros(shape), -3, of_heads) for shape in shapes]
    got = attend(*arrays, phi, is_causal=is_causal, initial_state=given, return_state=True)
    output, after = dask.compute(*got)
    assert output.shape == got[0].shape == (*leads[1], 0, E)
    np.testing.assert_array_equal(after.kvz, state.kvz)
    np.testing.assert_array_equal(after.log_scale, state.log_scale)


@settings(max_examples=5, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), kind=st.sampled_from(["all", "heads", "tokens"]))
def test_decay_through_any_chunks(data, seed, kind):
    rows = data.draw(chunkings(50), "rows")
    arrays, phi = tokens(50, seed=seed), MAPS["positive"]
    shape = {"all": (), "heads": (2,), "tokens": (2, 50)}[kind]
    decay = -np.random.default_rng(seed).exponential(0.1, shape)
    options = {"log_decay": decay if shape else float(decay)}
    _, state = compare(arrays, rows, phi, options, is_causal=True, return_state=True)
    _, want = attend(*arrays, phi, **options, is_causal=True, return_state=True)
    states = dask.compute(state)[0], want
    after = [linattn.update_state(x, arrays[1], arrays[2], phi, log_decay=-0.1) for x in states]
    close(*(linattn.read_state(arrays[0], x, phi) for x in after))


@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), is_causal=st.booleans())
def test_softmax_attention_in_any_chunks(data, seed, is_causal):
    length = data.draw(st.integers(1, 40), "length")
    rows, rng = data.draw(chunkings(length), "rows"), np.random.default_rng(seed)
    options: dict[str, Any] = {
        "key_mask": rng.random(length) < 0.7,
        "key_bias": rng.standard_normal((1, length)).astype(np.float32),
    }
    flags: Any = {"is_causal": is_causal, "return_log_normalizer": True}
    got = compare(tokens(length, seed=seed), rows, None, options, **flags)
    assert tuple(filter(None, got[0].chunks[-2])) == tuple(filter(None, rows))


@full_and_causal
def test_softmax_attention_of_half_precision_has_its_dtype(is_causal):
    arrays = tokens(30, dtype=np.float16)
    output = compare(arrays, (9, 21), None, tol=2e-3, is_causal=is_causal)
    assert output.dtype == np.float16


def window_options(length, window, rng):
    """What goes along with a window, and tells keys apart, by its kind."""
    numbers = rng.standard_normal((3, 1, 2 * window + 1)).astype(np.float32)
    return {
        "plain": {},
        "masked": {
            "key_mask": rng.random(length) < 0.7,
            "key_bias": rng.standard_normal((1, length)).astype(np.float32),
        },
        "offsets": {"window_bias": numbers[0], "far_bias": (-1.0, 1.0)},
        "offsets of heads": {
            "window_bias": numbers[:2, 0, 1:-1],
            "far_bias": (numbers[2, 0, :1], -math.inf),
        },
        "near keys alone": {"window_bias": numbers[0], "far_bias": (-math.inf, -math.inf)},
        "decay": {"log_decay": -0.1},
        "decay of tokens": {"log_decay": -rng.exponential(0.1, (2, length))},
    }


KINDS = [*window_options(1, 1, np.random.default_rng(0))]


@full_and_causal
def test_far_keys_have_the_bias_of_their_side(is_causal):
    options: Any = {"window_bias": np.linspace(-1, 1, 11, dtype=np.float32)}
    flags: Any = {"exact_window": 5, "far_bias": (-1.0, 1.0), "is_causal": is_causal}
    compare(tokens(40), 10, MAPS["positive"], options, **flags)


@settings(max_examples=6, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), window=st.integers(1, 9), streamed=st.booleans())
@full_and_causal
def test_a_window_through_chunks_of_whole_blocks(is_causal, data, seed, window, streamed):
    kinds = KINDS if is_causal else [kind for kind in KINDS if "decay" not in kind]
    # Without a block, the window is longer than the sequence.
    cuts = data.draw(st.lists(st.integers(1, 6), max_size=4), "blocks")
    rows = (*(window * n for n in cuts), data.draw(st.integers(1, window), "rows of the last"))
    kind = data.draw(st.sampled_from(kinds), "kind")
    rng, phi = np.random.default_rng(seed), MAPS["positive"]
    options: dict[str, Any] = window_options(sum(rows), window, rng)[kind]
    if streamed:
        options["initial_state"] = earlier(phi, seed + 1)
    flags: Any = {"is_causal": is_causal, "exact_window": window, "return_log_normalizer": True}
    got = compare(tokens(sum(rows), seed=seed), rows, phi, options, return_state=True, **flags)
    assert got[0].chunks[-2] == rows


@full_and_causal
def test_a_window_through_many_blocks(is_causal):
    """Edges of groups are merged first; one number for all keys goes along."""
    options = {"key_bias": np.asarray([[0.5], [3.0]], dtype=np.float32)}
    flags: Any = {"is_causal": is_causal, "exact_window": 2}
    compare(tokens(70), 2, MAPS["positive"], options, heads=2, **flags)


@pytest.mark.parametrize("blocks", [5, 9, 13])
@pytest.mark.parametrize("window", [None, 2], ids=["no window", "window"])
@full_and_causal
def test_groups_of_groups_of_blocks(monkeypatch, is_causal, window, blocks):
    """Chains as short as can be: every level of the scans has a rest."""
    monkeypatch.setattr("linattn_dask.states.MAX_CHAIN", 2)
    flags: dict[str, Any] = {"is_causal": is_causal, "exact_window": window}
    compare(tokens(2 * blocks, seed=blocks), 2, MAPS["positive"], heads=2, **flags)


@full_and_causal
def test_numerators(is_causal):
    compare(tokens(30), (9, 21), MAPS["positive"], is_causal=is_causal, normalize=False)


def test_a_bias_that_leaves_out_the_left_alone():
    lazy = lazily(tokens(24), 8)
    bias: Any = {"window_bias": da.zeros(5, dtype=np.float32), "far_bias": (-math.inf, 0.0)}
    output = attend(*lazy, MAPS["positive"], exact_window=4, **bias)
    with pytest.raises(
        ValueError, match=r"far_bias must leave out .* compute\(\) the arrays first"
    ):
        output.compute()


def test_a_window_where_a_chunk_has_no_heads():
    arrays = tokens(24)
    lazy = [da.from_array(x, chunks=((0, 2), (8, 16), -1)) for x in arrays]
    got = attend(*lazy, MAPS["positive"], exact_window=4)
    close(got.compute(), attend(*arrays, MAPS["positive"], exact_window=4))


def test_two_passes_are_the_one_call():
    phi, arrays, rows = MAPS["positive"], tokens(100), 30
    query, key, value = lazily(arrays, rows)
    states = dask.persist(
        attend(query, key, value, phi, is_causal=True, return_states_every=rows)[1]
    )[0]
    starts = range(0, 100, rows)
    blocks = [
        attend(
            *(x[:, start : start + rows] for x in (query, key, value)),
            phi,
            is_causal=True,
            initial_state=state,
        )
        for start, state in zip(starts, [None, *states], strict=True)
    ]
    output = da.concatenate(blocks, axis=-2)
    assert output.chunks == (*query.chunks[:2], (E,))
    close(output.compute(), attend(*arrays, phi, is_causal=True))


def test_heads_broadcast():
    query, key, value = tokens(40, heads=4)
    arrays = query, key[:1], value[:2].repeat(2, 0)
    assert compare(arrays, 15, MAPS["positive"], heads=2).chunks == ((2, 2), (15, 15, 10), (E,))


@pytest.mark.parametrize("decays", [(None, -0.4), (-0.3, None), (-0.3, -0.4), (None, None)])
@pytest.mark.parametrize("borders", [None, [0, 20, 32]])
def test_merged_states_are_numpys(decays, borders):
    """What came first fades by the decay of what came second; fingerprints and order count."""
    phi, arrays = MAPS["positive"], tokens(64, dtype=np.float64)
    call: dict[str, Any] = {"is_causal": True, "return_state": True, "cu_seqlens": borders}
    wanted, lazy = [], []
    for rows, decay in zip((slice(32), slice(32, None)), decays, strict=True):
        half = [a[:, rows] for a in arrays]
        wanted.append(attend(*half, phi, log_decay=decay, **call)[1])
        lazy.append(attend(*lazily(half, 10), phi, log_decay=decay, **call)[1])
    for order in (slice(None), slice(None, None, -1)):
        host, got = linattn.merge_states(*wanted[order]), linattn.merge_states(*lazy[order])
        assert (got.length, got.fingerprint) == (host.length, host.fingerprint)
        assert got.num_sequences == host.num_sequences
        kvz, log_scale, decay = dask.compute(got.kvz, got.log_scale, got.log_decay)
        wanted_sums = host.kvz * np.exp(host.log_scale)[..., None]
        assert_allclose(kvz * np.exp(log_scale)[..., None], wanted_sums, rtol=1e-10)
        if host.log_decay is None:
            assert decay is None
        else:
            assert_allclose(decay, host.log_decay)
    other = PositiveFeatures(D, 24, rng=99)
    state = attend(*lazily([a[:, :32] for a in arrays], 10), other, **call)[1]
    state = state._replace(kvz=lazy[0].kvz, log_scale=lazy[0].log_scale)
    with pytest.raises(ValueError, match="first and second must be states of one feature map"):
        linattn.merge_states(lazy[0], state)


def test_update_read_and_merge_states_lazily():
    phi, (query, key, value) = MAPS["positive"], tokens(60)
    lazy_query, lazy_key, lazy_value = lazily((query, key, value), 16)
    with dask.config.set(scheduler=refuse):
        nothing = linattn.init_state(phi, E, batch_shape=(2,), like=lazy_query)
        halves = [
            linattn.update_state(nothing, lazy_key[:, rows], lazy_value[:, rows], phi)
            for rows in (slice(32), slice(32, None))
        ]
        merged = linattn.merge_states(*halves)
        output = linattn.read_state(lazy_query, merged, phi)
    assert output.chunks == (*lazy_query.chunks[:2], (E,))
    assert merged.length == 60
    close(output.compute(), attend(query, key, value, phi))


# Graphs -------------------------------------------------------------------------------------------


@full_and_causal
@pytest.mark.parametrize("rows", [7, 50], ids=["tree", "chain"])
def test_at_most_eight_tasks_a_block(is_causal, rows):
    lazy = lazily(tokens(700), rows)
    with dask.config.set(scheduler=refuse):
        output = attend(*lazy, MAPS["positive"], is_causal=is_causal)
    blocks = 2 * -(-700 // rows)
    of_inputs = sum(len(array.__dask_graph__()) for array in lazy)
    assert len(dict(output.__dask_graph__())) - of_inputs <= 8 * blocks


@full_and_causal
def test_the_same_inputs_give_the_same_names(is_causal):
    first, second = (
        attend(*lazily(tokens(100), 30), PositiveFeatures(D, 16, rng=0), is_causal=is_causal)
        for _ in range(2)
    )
    other = attend(*lazily(tokens(100), 30), PositiveFeatures(D, 16, rng=1), is_causal=is_causal)
    assert first.name == second.name != other.name


@pytest.mark.parametrize(
    ("options", "of_states"),
    [
        ({}, []),
        ({"is_causal": True}, [0, 10, 20]),
        ({"exact_window": 5}, [0, 10, 20, 30] * 2),
        ({"exact_window": 5, "is_causal": True}, [0, 10, 20]),
    ],
    ids=["full", "causal", "window", "causal window"],
)
def test_rows_are_read_within_the_tasks_that_need_them(options, of_states):
    """Nothing that was read waits in a worker's memory: keys are read once a pass."""
    reads: list[list[int]] = [[], [], []]
    lazy = recorded(reads)
    if hasattr(lazy[0], "expr"):
        pytest.skip("arrays as expressions are read once")
    (output,) = dask.optimize(attend(*lazy, MAPS["positive"], **options))
    keys = assert_reads_are_fused([output])
    names = ("read-block", "causal-block", "window-block")
    assert sum(any(name in key[0] for name in names) for key in keys) == 4
    close(output.compute(optimize_graph=False), attend(*tokens(40), MAPS["positive"], **options))
    assert sorted(reads[0]) == [0, 10, 20, 30]
    assert sorted(reads[1]) == sorted(reads[2]) == sorted([0, 10, 20, 30, *of_states])


def test_what_is_stored_in_another_order_of_axes_is_read_as_often():
    reads: list[list[int]] = [[], [], []]
    stored = [np.swapaxes(array, 0, 1) for array in tokens(40)]
    lazy = [
        da.from_array(Recorded(array, r), chunks=(10, 2, -1), name=name, meta=array[:0, :0, :0])
        for array, r, name in zip(stored, reads, "qkv", strict=True)
    ]
    if hasattr(lazy[0], "expr"):
        pytest.skip("arrays as expressions are read once")
    arrays = [x.transpose(1, 0, 2) for x in lazy]
    (output,) = dask.optimize(attend(*arrays, MAPS["positive"], is_causal=True))
    assert not [key for key in dict(output.__dask_graph__()) if "transpose" in str(key)]
    want = attend(*tokens(40), MAPS["positive"], is_causal=True)
    close(output.compute(optimize_graph=False), want)
    assert [len(r) for r in reads] == [4, 7, 7]


def test_a_slice_computes_only_the_blocks_that_it_needs():
    for rows, blocks in [(20, 10), (4, 50)]:
        reads: list[list[int]] = [[], [], []]
        lazy = [
            da.from_array(Recorded(a, r), chunks=(2, rows, -1), name=False, meta=a[:0, :0, :0])
            for a, r in zip(tokens(200), reads, strict=True)
        ]
        output = attend(*lazy, MAPS["positive"], is_causal=True)
        output[..., :3, :].compute()
        assert [set(r) for r in reads] == [{0}, {0}, {0}]
        last = rows * (blocks - 3)
        output[..., last : last + 1, :].compute()
        assert set(reads[0]) == {0, last}
        assert set(reads[1]) == set(reads[2]) == set(range(0, last + 1, rows))


def test_inside_a_task_threads_are_one(monkeypatch):
    seen: list[Any] = []

    def noting(query, *args, **kwargs):
        with linattn.config() as current:
            seen.append(current)
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(linattn, "linear_attention", noting)
    with linattn.config(precision="float64"):
        output = attend(*lazily(tokens(50), 20), MAPS["positive"])
    assert output.compute().dtype == np.float32
    assert {(s.num_threads, s.precision) for s in seen} == {(1, "float64")}


# Chunks that do not fit the work ------------------------------------------------------------------

HEADS: dict[str, Any] = {
    "projections": PositiveFeatures.from_projection(
        np.random.default_rng(1).standard_normal((3, 16, D))
    ),
    "landmarks": LandmarkFeatures.fit(
        *np.random.default_rng(2).standard_normal((2, 3, 30, D)), num_features=6, rng=0
    ),
}


@pytest.mark.parametrize("window", [{}, {"exact_window": 8}], ids=["no window", "window"])
@pytest.mark.parametrize("rows", [(3, 0, 17, 20), 40])
@pytest.mark.parametrize("name", ["positive", *HEADS])
@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
def test_windows_across_chunks_and_heads_apart(name, rows, window):
    arrays = tokens(40, heads=3)
    options, sizes = {"key_bias": arrays[2][..., 0]}, lazily(arrays, rows)[0].chunks[:-1]
    flags: Any = {"return_log_normalizer": True, **window}
    got = compare(arrays, rows, (MAPS | HEADS)[name], options, **flags)
    assert [each.chunks[:2] for each in got] == [sizes, sizes]


@pytest.mark.parametrize(
    ("borders", "chunks"),
    [([0, 0, 0, 12], (2, 12)), ([0, 4, 4, 4, 8, 12, 12], (1, 3)), ([0, 12], (1, 12))],
)
@pytest.mark.parametrize(
    ("name", "options"),
    [("positive", {"log_decay": -0.1}), ("projections", {}), (None, {})],
    ids=["positive-decay", "projections", "softmax"],
)
def test_packed_sequences_of_several_heads(name, options, chunks, borders):
    arrays = tokens(12, heads=3)
    options = {"is_causal": True, "cu_seqlens": borders, **options}
    phi = None if name is None else (MAPS | HEADS)[name]
    compare(arrays, chunks[1], phi, heads=chunks[0], **options)
    if name is None:
        return
    lazy = lazily(arrays, chunks[1], heads=chunks[0])
    vjp: Any = linattn.linear_attention_vjp
    lazy_output, pullback = vjp(*lazy, phi, **options)
    output, of_numpy = vjp(*arrays, phi, **options)
    grad_output = da.from_array(output, chunks=lazy_output.chunks)
    got = dask.compute(*pullback(grad_output))
    for one, other in zip(got, of_numpy(output), strict=True):
        close(one, other, tol=1e-5)


@full_and_causal
def test_packed_sequences_of_a_map_that_knows_positions(is_causal):
    flags: Any = {"cu_seqlens": [0, 4, 8, 12], "return_log_normalizer": True}
    compare(tokens(12), 5, MAPS["cosformer"], is_causal=is_causal, **flags)


@pytest.mark.parametrize("num_keys", [0, 12])
def test_each_gradient_of_full_attention_is_computed_alone(num_keys):
    """Of a state before, or without keys, Dask fused tasks and left some out."""
    phi, (query, *rest) = MAPS["elu"], tokens(12)
    key, value = (x[:, :num_keys] for x in rest)
    empty = linattn.init_state(phi, E, batch_shape=(2,), like=key)
    before = linattn.update_state(empty, rest[0], rest[1], phi)
    attend: Any = linattn.linear_attention_vjp
    wanted = linattn.linear_attention_vjp(query, key, value, phi, initial_state=before)
    lazy = *lazily([query], 5, heads=2), *lazily([key, value], 7, heads=2)
    output, pullback = attend(*lazy, phi, initial_state=in_dask(before))
    of_numpy = wanted[1](np.ones_like(wanted[0]))
    for gradient, want in zip(pullback(da.ones_like(output)), of_numpy, strict=True):
        close(gradient.compute(), want, tol=1e-5)


def test_gradients_with_decay_ignore_masked_keys_that_are_nan():
    arrays, mask = tokens(12), np.arange(12) < 9
    arrays[1][:, 9:] = np.nan
    options: dict[str, Any] = {"is_causal": True, "log_decay": -0.1}
    lazy = lazily(arrays, 5)
    attend: Any = linattn.linear_attention_vjp
    output, pullback = attend(*lazy, MAPS["elu"], key_mask=da.from_array(mask), **options)
    gradients = dask.compute(*pullback(da.ones_like(output)))
    want, of_numpy = attend(*arrays, MAPS["elu"], key_mask=mask, **options)
    for gradient, other in zip(gradients, of_numpy(np.ones_like(want)), strict=True):
        close(gradient, other, tol=1e-5)


def test_as_many_packed_sequences_as_heads_of_a_map():
    """Their axis is no axis of heads."""
    arrays = tokens(12, heads=3)
    lazy = [a[:, None] for a in lazily(arrays, 12, heads=3)]
    arrays = [a[:, None] for a in arrays]
    compare(arrays, 12, HEADS["projections"], chunked=lazy, cu_seqlens=[0, 4, 8, 12])


@pytest.mark.parametrize("rows", [10, 3])
def test_a_state_of_heads_that_tokens_lack(rows):
    phi, arrays = MAPS["elu"], tokens(30, heads=1)
    like = tokens(4, heads=3, seed=1)
    empty = linattn.init_state(phi, E, batch_shape=(2, 3), like=like[0])
    options = {"initial_state": linattn.update_state(empty, like[1], like[2], phi)}
    chunked = [a[0] for a in lazily(arrays, rows)]
    compare([a[0] for a in arrays], rows, phi, options, chunked=chunked, is_causal=True)


@full_and_causal
@pytest.mark.parametrize("borders", [None, [0, 0], [0, 0, 0]])
def test_no_keys_of_heads_that_a_state_lacks(is_causal, borders):
    """The state that comes back has the leading axes of the keys."""
    phi, arrays = MAPS["elu"], tokens(0, heads=3)
    state = attend(*(x[0] for x in tokens(4, seed=1)), phi, return_state=True)[1]
    options: dict[str, Any] = {"is_causal": is_causal, "return_state": True}
    if borders is not None:
        options["cu_seqlens"] = borders
        count = len(borders) - 1
        state = state._replace(
            kvz=np.stack([state.kvz] * count),
            log_scale=np.stack([state.log_scale] * count),
            num_sequences=count,
        )
    got = compare(arrays, 10, phi, {"initial_state": state}, **options)[1]
    assert got.kvz.shape == got.kvz.compute().shape


def test_no_query_beside_keys_in_a_window():
    phi, (query, key, value) = MAPS["positive"], tokens(20)
    options: dict[str, Any] = {"exact_window": 2, "return_state": True}
    options["key_stop"] = np.zeros(0, dtype=np.int64)
    want = attend(query[..., :0, :], key, value, phi, **options)
    lazy = lazily((key, value), 20)
    got = attend(da.from_array(query[..., :0, :]), *lazy, phi, **options)
    assert got[0].shape == want[0].shape
    states_agree(dask.compute(got[1])[0], want[1])


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({"query": (2, 50, 4)}, r"query must be in one chunk along its last axis, got .*rechunk"),
        ({"value": (2, 25, E)}, r"key and value must have equal chunks along axis -2, .*rechunk"),
        ({"query": (2, 25, D)}, r"key and query must have equal chunks along axis -2, .*rechunk"),
        ({"query": (1, 50, D)}, r"must have equal chunks along axis -3, .*rechunk"),
    ],
)
def test_chunks_that_do_not_fit(chunks, message):
    names = ("query", "key", "value")
    arrays = [
        da.from_array(a, chunks=chunks.get(name, (2, 50, a.shape[-1])))
        for name, a in zip(names, tokens(100), strict=True)
    ]
    with pytest.raises(ValueError, match=message):
        attend(*arrays, MAPS["positive"], is_causal=True)


def pull_exact(query, key, value, phi):
    return linattn.softmax_attention_vjp(query, key, value)[1](value)


def pull_by_stops(query, key, value, phi):
    return linattn.linear_attention_vjp(query, key, value, phi, prefix_length=9)[1](value)


REFUSED: dict[str, Any] = {
    "log_decay without": lambda q, k, v, phi: attend(q, k, v, phi, log_decay=-0.1),
    ".* log_decay without is_causal, beside a window": lambda q, k, v, phi: attend(
        q, k, v, phi, log_decay=-0.1, exact_window=10
    ),
    "local_window_size": lambda q, k, v, phi: linattn.softmax_attention(
        q, k, v, local_window_size=(3, 3)
    ),
    ".* features that depend on the position": lambda q, k, v, phi: attend(
        q, k, v, MAPS["cosformer"], prefix_length=9
    ),
    "gradients of softmax attention": pull_exact,
    "gradients of key_stop, prefix_length": pull_by_stops,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("length", "rows"), [(60, 30), (1100, 1100)], ids=["chunks", "rows"])
def test_what_is_not_done_by_blocks_is_refused(name, length, rows):
    lazy = lazily(tokens(length), rows)
    message = rf"must be one chunk of at most 1024 rows for {name}.*compute\(\)"
    with dask.config.set(scheduler=refuse), pytest.raises(ValueError, match=message):
        REFUSED[name](*lazy, MAPS["positive"])


def test_packed_sequences_are_graphs_of_their_own():
    arrays, phi = tokens(90), MAPS["positive"]
    lazy = lazily(arrays, 40)
    flags: Any = {"is_causal": True, "cu_seqlens": [0, 30, 30, 60, 90]}
    with dask.config.set(scheduler=refuse):
        output = attend(*lazy, phi, **flags)
    assert len(dict(output.__dask_graph__())) <= 2 * 3 * 25
    close(output.compute(), attend(*arrays, phi, **flags))


def test_unknown_lengths():
    query, key, value = lazily(tokens(100), 50)
    key = key[:, key[0, :, 0] > 0]
    with pytest.raises(ValueError, match=r"key must have a known shape, got .*compute_chunk_sizes"):
        attend(query, key, value, MAPS["positive"])


def test_short_chunks_are_warned_of_once(monkeypatch):
    import linattn_dask.layout

    monkeypatch.setattr(linattn_dask.layout, "_warned", [])
    lazy = lazily(tokens(100), 50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            attend(*lazy, MAPS["positive"])
    assert [w.filename for w in caught] == [__file__]
    assert "rechunk to" in str(caught[0].message)


# Dask's arrays as expressions ---------------------------------------------------------------------


def test_arrays_as_expressions_give_the_same():
    """In a process of its own: Dask chooses its arrays when it is imported."""
    if importlib.util.find_spec("dask.array._array_expr") is None:
        pytest.skip(f"arrays as expressions are no part of dask {dask.__version__}")
    program = """
import sys, dask
dask.config.set({"array.query-planning": sys.argv[1] == "True", "scheduler": "synchronous"})
import pytest
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
    # Such arrays have no take, which gathers packed sequences.
    chosen = "decay or lazily or names or slice or whole_blocks or stops or another"
    chosen = f"({chosen}) and not packed and not borders1 and not dtype and not full and not groups"
    others = ("dask_gradients.py", "dask_landmarks.py", "dask_stops.py")
    files = (__file__, *(__file__.replace("dask.py", other) for other in others))
    done = subprocess.run(
        [sys.executable, "-c", program, "True", *files, "-k", chosen],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_maps_name_graphs_by_their_fingerprint():
    phi = PositiveFeatures(D, 16, rng=0)
    same = pickle.loads(pickle.dumps(phi))
    assert dask.tokenize.tokenize(phi) == dask.tokenize.tokenize(same)
    assert dask.tokenize.tokenize(phi) != dask.tokenize.tokenize(phi.redraw(1))
