"""Gradients of Dask arrays: block by block, nothing computed, those of the call in memory."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.testing import assert_array_equal

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures, SoftmaxFeatures
from tests.dask_arrays import (
    D,
    E,
    assert_reads_are_fused,
    chunkings,
    close,
    in_dask,
    lazily,
    one_thread,
    recorded,
    refuse,
    tokens,
)

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

__all__ = ["one_thread"]

attend: Any = linattn.linear_attention
vjp: Any = linattn.linear_attention_vjp

MAPS = {
    "positive": PositiveFeatures(D, 16, rng=0),
    "elu": EluFeatures(D),
    "softmax": SoftmaxFeatures(D),
}


def numbers(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compare(arrays, rows, phi, options, *, seed=0, heads=1, tol=2e-6, **flags):
    """Assert that gradients of chunks are those of the whole arrays; return the lazy ones."""
    lazy = {name: in_dask(x) for name, x in options.items()}
    output, pullback = vjp(*arrays, phi, **options, **flags)
    grad_output = numbers(output.shape, seed).astype(output.dtype)
    want = pullback(grad_output)
    given = (*arrays, grad_output)
    chunks = {-2: rows, **({-3: heads} if heads else {})}
    chunked = [da.from_array(array).rechunk(chunks) for array in given]
    with dask.config.set(scheduler=refuse):
        _, lazy_pullback = vjp(*chunked[:3], phi, **lazy, **flags)
        got = lazy_pullback(chunked[3])
    for gradient, wanted in zip(dask.compute(*got), want, strict=True):
        assert gradient.dtype == wanted.dtype
        close(gradient, wanted, tol=tol)
    return got


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@settings(max_examples=5, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(MAPS)),
    seed=st.integers(0, 99),
    weighted=st.booleans(),
    scale=st.sampled_from([1, 4]),
)
def test_any_chunks_give_the_gradients_in_memory(is_causal, data, name, seed, weighted, scale):
    length = data.draw(st.integers(1, 40), "length")
    rows = data.draw(chunkings(length), "rows")
    query, key, value = tokens(length, heads=1, seed=seed)
    options: dict[str, Any] = {}
    if weighted:
        options["key_mask"] = np.random.default_rng(seed).random(length) < 0.7
        options["key_bias"] = numbers((1, length), seed)
    flags: Any = {"is_causal": is_causal, "seed": seed}
    got = compare((query, scale * key, value), rows, MAPS[name], options, tol=4e-6, **flags)
    assert [each.chunks[-2] for each in got[:3]] == [rows, rows, rows]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [(9, 0, 20, 11), (1,) * 40], ids=["chain", "groups"])
def test_through_states(is_causal, rows):
    """Gradients flow into the initial state, and out of the one that is returned."""
    arrays, phi = tokens(40), MAPS["positive"]
    if len(rows) > 10:
        arrays = tuple(array[:1] for array in arrays)
    heads = len(arrays[0])
    earlier = attend(*tokens(20, seed=1, heads=heads), phi, return_state=True)[1]
    lazy_earlier = in_dask(earlier)
    flags: Any = {"is_causal": is_causal, "return_state": True}
    (output, state), pullback = vjp(*arrays, phi, initial_state=earlier, **flags)
    (_, lazy_state), lazy_pullback = vjp(
        *lazily(arrays, rows), phi, initial_state=lazy_earlier, **flags
    )
    grad_output, grad_state = numbers(output.shape, 2), numbers(state.kvz.shape, 3)
    # The same derivative by the state, on the scale that the lazy one has.
    moved = grad_state * np.exp(lazy_state.log_scale.compute() - state.log_scale)[..., None]
    want = pullback(grad_output, grad_state)
    got = lazy_pullback(*lazily((grad_output,), rows), da.from_array(moved))
    for gradient, wanted in zip(dask.compute(*got), want, strict=True):
        close(gradient, wanted)


@pytest.mark.parametrize("rows", [(9, 0, 20, 11), (1,) * 40], ids=["one group", "groups"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 40)], ids=["all", "heads", "tokens"])
def test_through_decay(shape, rows):
    decay = -np.random.default_rng(0).exponential(0.3, shape)
    options = {"log_decay": decay if shape else float(decay)}
    arrays = tokens(40, dtype=np.float64)
    flags: Any = {"is_causal": True, "heads": 2, "tol": 1e-12}
    compare(arrays, rows, MAPS["positive"], options, **flags)


@pytest.mark.parametrize("rows", [(9, 0, 20, 11), (1,) * 40], ids=["one group", "groups"])
@pytest.mark.parametrize("weights", [(), ("log_decay",), ("key_bias",), ("log_decay", "key_bias")])
def test_heads_that_only_the_state_has(rows, weights):
    given = {"log_decay": -abs(numbers(40, 1)), "key_bias": numbers(40, 2)}
    state = attend(*tokens(20, seed=1, heads=3), MAPS["positive"], return_state=True)[1]
    options = {name: given[name] for name in weights} | {"initial_state": state}
    arrays = tuple(array[0] for array in tokens(40, heads=3))
    compare(arrays, rows, MAPS["positive"], options, heads=(), tol=1e-5, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [(1,), (0, 1), (1, 0, 0)], ids=str)
def test_one_key_among_chunks_of_none(rows, is_causal):
    options = {"key_bias": numbers((1, 1), 0)}
    if is_causal:
        options["log_decay"] = -np.ones((1, 1), np.float32)
    compare(tokens(1, heads=1), rows, MAPS["positive"], options, is_causal=is_causal)


@pytest.mark.parametrize("case", ["full", "causal", "decay"])
def test_heads_broadcast_in_chunks_of_some(case):
    query, key, value = tokens(30, heads=4, dtype=np.float64)
    arrays = query[None], key[:1], value[None, :1]
    options = {"key_bias": np.random.default_rng(0).standard_normal((1, 30))}
    if case == "decay":
        options["log_decay"] = -np.random.default_rng(0).random((1, 30))
    flags: Any = {"is_causal": case != "full", "heads": 2, "tol": 1e-12}
    got = compare(arrays, (9, 15, 6), MAPS["positive"], options, **flags)
    assert [each.shape for each in got[:4]] == [(1, 4, 30, D), (1, 30, D), (1, 1, 30, E), (1, 30)]


def test_numbers_that_are_broadcast_to_all_keys():
    options = {
        "key_mask": np.array([[True], [False]]),
        "key_bias": numbers((2, 1), 0),
        "log_decay": np.array(-0.3),
    }
    compare(tokens(9), (4, 5), MAPS["elu"], options, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_keys_in_several_chunks_beside_a_state(is_causal):
    phi, length = MAPS["elu"], 0 if is_causal else 3
    arrays = tokens(length)[0], *tokens(0)[1:]
    state = attend(*tokens(4), phi, return_state=True)[1]
    grad_output = numbers((2, length, E), 0)
    flags: Any = {"is_causal": is_causal}
    want = vjp(*arrays, phi, initial_state=state, **flags)[1](grad_output)
    given = in_dask(state)
    rows = (0, 0) if is_causal else (1, 2)
    query, cotangent = lazily((arrays[0], grad_output), rows, 2)
    lazy = (query, *lazily(arrays[1:], (0, 0), 2))
    got = vjp(*lazy, phi, initial_state=given, **flags)[1](cotangent)
    for gradient, wanted in zip(dask.compute(*got), want, strict=True):
        close(gradient, wanted)


@pytest.mark.parametrize("blocks", [5, 9, 13])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_groups_of_groups_of_blocks(monkeypatch, is_causal, blocks):
    monkeypatch.setattr("linattn_dask.states.MAX_CHAIN", 2)
    compare(tokens(2 * blocks, seed=blocks), 2, MAPS["positive"], {}, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_numerators_and_half_precision(is_causal):
    phi = MAPS["positive"]
    compare(tokens(30), (9, 21), phi, {}, is_causal=is_causal, normalize=False)
    half = tokens(30, dtype=np.float16)
    compare(half, (9, 21), phi, {}, is_causal=is_causal, tol=2e-3)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [7, 50], ids=["groups", "chain"])
def test_at_most_eight_tasks_a_block_beyond_those_of_the_call(is_causal, rows):
    lazy = lazily(tokens(700), rows)
    (grad_output,) = lazily((numbers((2, 700, E), 0),), rows)
    if hasattr(lazy[0], "expr"):
        pytest.skip("Dask does not optimize several arrays as expressions")
    output, pullback = vjp(*lazy, MAPS["positive"], is_causal=is_causal)
    gradients = pullback(grad_output)
    # As they are run: Dask drops what only gives a block of another array its name.
    of_call, of_both = (
        len({key for array in dask.optimize(*arrays) for key in array.__dask_graph__()})
        for arrays in ([output, grad_output], [output, grad_output, *gradients])
    )
    assert of_both - of_call <= 8 * 2 * -(-700 // rows)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_rows_are_read_within_the_tasks_of_the_pullback(is_causal):
    reads: list[list[int]] = [[], [], []]
    lazy = recorded(reads)
    if hasattr(lazy[0], "expr"):
        pytest.skip("arrays as expressions are read once")
    _, pullback = vjp(*lazy, MAPS["positive"], is_causal=is_causal)
    cotangent = da.from_array(numbers((2, 40, E), 0), chunks=(2, 10, E))
    gradients = pullback(cotangent)
    assert_reads_are_fused(dask.optimize(*gradients))
    dask.compute(*gradients)
    rows = [0, 10, 20, 30]
    assert sorted(reads[0]) == rows
    passes = [*rows, *rows, *rows[:3]] if is_causal else [*rows, *rows]
    assert sorted(reads[1]) == sorted(reads[2]) == sorted(passes)


def test_a_cotangent_in_other_chunks():
    lazy = lazily(tokens(60), 30)
    _, pullback = vjp(*lazy, MAPS["positive"])
    got = dask.compute(*pullback(lazy[2].rechunk((1, 20, E))))
    for one, other in zip(got, dask.compute(*pullback(lazy[2])), strict=True):
        assert_array_equal(one, other)


def test_packed_sequences():
    options = {"cu_seqlens": [0, 13, 13, 40]}
    compare(tokens(40), (9, 0, 20, 11), MAPS["positive"], options, is_causal=True)
