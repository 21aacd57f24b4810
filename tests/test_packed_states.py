"""States of packed sequences: one for each along the first axis, and not taken for others."""

# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import State
from linattn.feature_maps import EluFeatures
from tests.entries import saying

DIM, VALUE_DIM, LENGTH = 4, 3, 7
PHI = EluFeatures()

LEADS: dict[str, tuple[tuple[int, ...], ...]] = {
    "value has heads": ((), (), (2,)),
    "all have heads": ((2,), (2,), (2,)),
    "nothing": ((), (), ()),
}


def tokens(leads, seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    dims = (DIM, DIM, VALUE_DIM)
    return [rng.standard_normal((*a, length, d)) for a, d in zip(leads, dims, strict=True)]


def at(state, i):
    decay = None if state.log_decay is None else state.log_decay[i]
    return State(state.kvz[i], state.log_scale[i], state.length, None, decay)


def test_merged_decays_have_the_axes_of_the_merged_state(numpy_path):
    """Also where the state with fewer axes, or one without decay, gives them."""
    arrays = tokens(LEADS["value has heads"])
    narrow = [arrays[0], arrays[1], arrays[2][0]]
    for borders in (None, [0, 3, 7]):
        call: dict[str, Any] = {"is_causal": True, "cu_seqlens": borders, "return_state": True}
        wide = linattn.linear_attention(*arrays, PHI, **call)[1]
        fading = linattn.linear_attention(*narrow, PHI, **call, log_decay=-0.5)[1]
        for first, second in ((wide, fading), (fading, wide)):
            merged = linattn.merge_states(first, second)
            assert merged.log_decay is not None
            assert merged.log_decay.shape == merged.kvz.shape[:-2] == wide.kvz.shape[:-2]
            for i in range(0 if borders is None else 2):
                one = linattn.merge_states(at(first, i), at(second, i))
                assert_allclose(merged.kvz[i], one.kvz)
                assert_allclose(merged.log_scale[i], one.log_scale)
                if one.log_decay is not None:
                    assert_allclose(merged.log_decay[i], one.log_decay)
            if borders is None:
                again = linattn.linear_attention(*arrays, PHI, **call, initial_state=merged)[1]
                assert_allclose(again.log_decay, merged.log_decay)


def packed_state(n=2, leads="all have heads", **options):
    borders = np.linspace(0, LENGTH, n + 1).astype(int)
    arrays = tokens(LEADS[leads])
    call: dict[str, Any] = {"return_state": True, "cu_seqlens": borders, **options}
    return linattn.linear_attention(*arrays, PHI, **call)[1]


def unpacked_state(**options):
    return linattn.linear_attention(
        *tokens(LEADS["all have heads"]), PHI, return_state=True, **options
    )[1]


def calls_of(leads, **options):
    """Public functions that take a state beside arrays of these leading axes."""
    query, key, value = tokens(leads)
    step = [a[..., 0, :] for a in (query, key, value)]
    return {
        "linear_attention": lambda state: linattn.linear_attention(
            query, key, value, PHI, initial_state=state, **options
        ),
        "linear_attention_vjp": lambda state: linattn.linear_attention_vjp(
            query, key, value, PHI, initial_state=state, **options
        ),
        "update_state": lambda state: linattn.update_state(state, key, value, PHI),
        "read_state": lambda state: linattn.read_state(query, state, PHI),
        "decode_step": lambda state: linattn.decode_step(*step, state, PHI),
        "Decoder": lambda state: linattn.Decoder(PHI, state).step(*step),
    }


def test_a_state_carries_its_number_of_sequences():
    assert unpacked_state().num_sequences == 0
    assert packed_state(3).num_sequences == 3
    assert "num_sequences=3" in repr(packed_state(3))
    assert "num_sequences" not in repr(unpacked_state())
    like = np.ones(DIM)
    nothing = linattn.init_state(PHI, VALUE_DIM, batch_shape=(2, 2), like=like)
    assert packed_state(2).num_sequences == 2
    query, key, value = tokens(LEADS["all have heads"])
    options = {"cu_seqlens": [0, 3, 7], "return_state": True, "initial_state": nothing}
    assert linattn.linear_attention(query, key, value, PHI, **options)[1].num_sequences == 2


@pytest.mark.parametrize(
    "made",
    [
        unpacked_state(),
        unpacked_state(is_causal=True, log_decay=-0.5),
        linattn.update_state(
            linattn.init_state(PHI, VALUE_DIM, batch_shape=(2,), like=np.ones(DIM)),
            *tokens(LEADS["all have heads"])[1:],
            PHI,
        ),
        linattn.linear_attention(
            *tokens(LEADS["all have heads"]), PHI, is_causal=True, return_states_every=2
        )[1][0],
    ],
    ids=["full", "causal", "updated", "on the way"],
)
@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_vjp"])
def test_an_unpacked_state_is_not_one_of_each_sequence(name, made):
    """Its heads, as many as there are sequences, would be taken for them."""
    call = calls_of(LEADS["all have heads"], cu_seqlens=[0, 3, 7])[name]
    with pytest.raises(ValueError, match=saying("initial_state must be", "num_sequences=2")):
        call(made)
    call(made._replace(num_sequences=2))
    call(State(made.kvz, made.log_scale, made.length))


@pytest.mark.parametrize("leads", ["all have heads", "nothing"])
def test_sequences_go_on_as_a_batch(leads):
    """And as packed sequences again: the state stays one of them."""
    state = packed_state(2, leads)
    lead = LEADS[leads][1]
    query, key, value = tokens([(2, *lead)] * 3, 4)
    _, after = linattn.linear_attention(
        query, key, value, PHI, is_causal=True, initial_state=state, return_state=True
    )
    decoder = linattn.Decoder(PHI, state)
    stepped = state
    for t in range(LENGTH):
        step = [a[..., t, :] for a in (query, key, value)]
        decoder.step(*step)
        stepped = linattn.decode_step(*step, stepped, PHI)[1]
    states = after, decoder.state, stepped, linattn.update_state(state, key, value, PHI)
    flat = [np.concatenate([a[0], a[1]], axis=-2) for a in (query, key, value)]
    borders = [0, LENGTH, 2 * LENGTH]
    for same in states:
        assert same.num_sequences == 2
        assert_allclose(same.kvz, after.kvz)
        linattn.linear_attention(*flat, PHI, cu_seqlens=borders, initial_state=same)
        assert linattn.read_state(query, same, PHI).shape == value.shape
    wanted = linattn.linear_attention(
        *flat, PHI, is_causal=True, cu_seqlens=borders, initial_state=state, return_state=True
    )[1]
    assert_allclose(wanted.kvz, after.kvz)


def test_an_axis_in_front_is_not_that_of_the_sequences():
    state = packed_state(2, "nothing")
    after = linattn.update_state(state, *tokens([(2, 2)] * 3, 4)[1:], PHI)
    assert after.kvz.shape[:2] == (2, 2)
    assert after.num_sequences == 0


def test_states_of_other_sequences_do_not_merge():
    two, three, whole = packed_state(2), packed_state(3), unpacked_state()
    for pair in ((two, whole), (whole, two), (two, three)):
        with pytest.raises(ValueError, match=saying("first and second", "num_sequences")):
            linattn.merge_states(*pair)
    assert linattn.merge_states(two, two).num_sequences == 2
    assert linattn.merge_states(whole, whole).num_sequences == 0
    nothing = linattn.init_state(PHI, VALUE_DIM, batch_shape=(2, 2), like=np.ones(DIM))
    for pair in ((two, nothing), (nothing, two)):
        merged = linattn.merge_states(*pair)
        assert merged.num_sequences == 2
        assert_array_equal(merged.kvz, two.kvz)
    unknown = State(two.kvz, two.log_scale, two.length)
    assert linattn.merge_states(unknown, unknown).num_sequences is None
    assert linattn.merge_states(two, unknown).num_sequences == 2


@pytest.mark.parametrize("state", [packed_state(2), unpacked_state(), State(*packed_state()[:3])])
def test_files_keep_it(tmp_path, state):
    linattn.save_state(tmp_path / "state.npz", state, PHI)
    loaded = linattn.load_state(tmp_path / "state.npz", PHI)
    assert loaded.num_sequences == state.num_sequences
    assert_array_equal(loaded.kvz, state.kvz)


def test_damaged_files_of_it_are_errors(tmp_path):
    path, state = tmp_path / "state.npz", packed_state(2)
    linattn.save_state(path, state._replace(num_sequences=5), PHI)
    with pytest.raises(linattn.StateFileError, match="num_sequences do not fit"):
        linattn.load_state(path)


@pytest.mark.frameworks
def test_jax_carries_it():
    jax = pytest.importorskip("jax")
    interop = pytest.importorskip("linattn.interop.jax")
    arrays = [jax.numpy.asarray(a) for a in tokens(LEADS["all have heads"])]
    borders = [0, 3, 7]
    for attend in (linattn.linear_attention, interop.linear_attention):
        call: dict[str, Any] = {"return_state": True, "is_causal": True, "log_decay": -0.5}
        _, packed = attend(*arrays, PHI, cu_seqlens=borders, **call)
        _, whole = attend(*arrays, PHI, **call)
        assert (packed.num_sequences, whole.num_sequences) == (2, 0)
        for state, options in ((packed, {}), (whole, {"cu_seqlens": borders})):
            with pytest.raises(ValueError, match=saying("initial_state", "cu_seqlens")):
                attend(*arrays, PHI, **options, initial_state=state)

    def again(state, options):
        return attend(*arrays, PHI, **options, initial_state=state, **call)[1]

    # Within a trace nothing is compared; what comes out of it is known again.
    traced = jax.jit(lambda state: again(state, {"cu_seqlens": borders}))(packed)
    assert int(traced.num_sequences) == 2
    with pytest.raises(ValueError, match=saying("initial_state", "cu_seqlens")):
        again(traced, {})
    carried, _ = jax.lax.scan(lambda state, _: (again(state, {}), None), whole, None, 2)
    assert int(carried.num_sequences) == 0
    merged = jax.jit(linattn.merge_states)(packed, packed)
    assert int(merged.num_sequences) == 2
    nothing = linattn.init_state(PHI, VALUE_DIM, batch_shape=(2,), like=arrays[1])

    def add(state, row):
        key, value = (a[:, None] for a in row)
        return linattn.update_state(state, key, value, PHI), None

    rows = tuple(jax.numpy.moveaxis(a, 1, 0) for a in arrays[1:])
    for before in (nothing, nothing._replace(num_sequences=None)):
        assert jax.lax.scan(add, before, rows)[0].kvz.shape == nothing.kvz.shape
    stacked = jax.tree.map(lambda *a: jax.numpy.stack(a), whole, whole)
    joined = State(stacked.kvz, stacked.log_scale, whole.length, *stacked[3:])
    linattn.linear_attention(*arrays, PHI, cu_seqlens=borders, initial_state=joined)


@pytest.mark.frameworks
def test_torch_carries_it():
    torch = pytest.importorskip("torch")
    interop = pytest.importorskip("linattn.interop.torch")
    arrays = [torch.tensor(a, requires_grad=True) for a in tokens(LEADS["value has heads"])]
    call: dict[str, Any] = {"return_state": True, "is_causal": True, "log_decay": -0.5}
    halves = [[a.detach()[..., i:j, :] for a in arrays] for i, j in ((0, 3), (3, 7))]
    wanted = [linattn.linear_attention(*half, PHI, **call)[1] for half in halves]
    for attend in (linattn.linear_attention, interop.linear_attention):
        _, packed = attend(*arrays, PHI, cu_seqlens=[0, 3, 7], **call)
        _, whole = attend(*arrays, PHI, **call)
        assert (packed.num_sequences, whole.num_sequences) == (2, 0)
        assert_allclose(packed.log_decay, np.stack([s.log_decay for s in wanted]))
        for state, options in ((packed, {}), (whole, {"cu_seqlens": [0, 3, 7]})):
            with pytest.raises(ValueError, match=saying("initial_state", "cu_seqlens")):
                attend(*arrays, PHI, **options, initial_state=state)
        output, after = attend(*arrays, PHI, cu_seqlens=[0, 3, 7], **call, initial_state=packed)
        (output.sum() + after.kvz.sum()).backward()


@pytest.mark.parametrize("lengths", [3, [3, 4], np.array([3])])
def test_lengths_of_packed_sequences_are_their_borders(lengths):
    """They would count along the packed axis, through borders."""
    arrays, options = tokens(LEADS["all have heads"]), {"cu_seqlens": [0, 3, 7]}
    for call in (
        lambda **o: linattn.linear_attention(*arrays, PHI, **o),
        lambda **o: linattn.linear_attention_vjp(*arrays, PHI, **o),
        lambda **o: linattn.softmax_attention(*arrays, **o),
        lambda **o: linattn.softmax_attention_vjp(*arrays, **o),
    ):
        call(**options)
        with pytest.raises(ValueError, match=saying("key_lengths must be None", "key_mask")):
            call(**options, key_lengths=lengths)
