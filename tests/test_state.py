"""States: step == chunk == whole, merging, decoding, prefixes, and what a state may not do."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, call-arg, call-overload"

from __future__ import annotations

import copy
import hashlib
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import (
    Decoder,
    State,
    decode_step,
    init_state,
    linear_attention,
    merge_states,
    read_state,
    reference,
    update_state,
)
from linattn.feature_maps import (
    ActivationFeatures,
    EluFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    TrigonometricFeatures,
)
from tests.attentions import OwnMap, makers, normals

MAPS = makers(
    *("positive", "hyperbolic", "activation", "activation-unprojected", "elu", "relu", "own")
)
DIM, VALUE_DIM = 6, 3

every_map = pytest.mark.parametrize("name", MAPS)


def tokens(length, *lead, seed=0):
    return normals(
        (*lead, length, DIM), (*lead, length, DIM), (*lead, length, VALUE_DIM), seed=seed
    )


def meaning(state):
    """What a state stands for: log of the scale that its largest entry has, and the rest."""
    with np.errstate(divide="ignore"):
        log = np.log(np.abs(state.kvz)) + state.log_scale[..., None]
    top = np.max(log, initial=-np.inf)
    return top, np.sign(state.kvz) * np.exp(log - (top if np.isfinite(top) else 0))


def assert_same_state(actual, expected, *, bound=1e-12):
    """Assert that two states stand for the same sums; their gauges may differ."""
    assert actual.length == expected.length
    assert actual.kvz.shape == expected.kvz.shape
    top, sums = meaning(actual)
    expected_top, expected_sums = meaning(expected)
    assert_allclose(top, expected_top, rtol=0, atol=bound * max(1, abs(expected_top)))
    assert_allclose(sums, expected_sums, rtol=0, atol=bound)


# One stream, cut in any way ----------------------------------------------------------------------


@every_map
@pytest.mark.parametrize("factor", [1, 40])
def test_merging_is_associative_and_commutative_with_an_identity(numpy_path, name, factor):
    phi = MAPS[name](DIM)
    if name == "own":
        factor = min(factor, 10)
    empty = init_state(phi, VALUE_DIM, like=np.ones(DIM))
    states = []
    for seed in range(3):
        _, key, value = tokens(20, seed=seed)
        # The second stretch lies on another scale altogether.
        states.append(update_state(empty, key * (factor if seed == 1 else 1), value, phi))
    a, b, c = states
    left, right = merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c))
    bound = 1e-12 * np.abs(right.kvz).max()
    assert_allclose(left.kvz, right.kvz, rtol=0, atol=bound)
    assert_allclose(left.log_scale, right.log_scale, rtol=1e-15)
    assert left.length == right.length == 60
    for first, second in [(a, b), (b, c), (a, empty)]:
        one, other = merge_states(first, second), merge_states(second, first)
        assert_array_equal(one.kvz, other.kvz)
        assert_array_equal(one.log_scale, other.log_scale)
        assert one.length == other.length
    for state in (a, b, empty):
        same = merge_states(state, empty)
        assert_array_equal(same.kvz, state.kvz)
        assert_array_equal(same.log_scale, state.log_scale)
        assert same.length == state.length


# Every library ----------------------------------------------------------------------------------


def test_stream_in_every_library(xp):
    phi = PositiveFeatures(DIM, 2 * DIM, rng=1)
    host = tokens(5, 2)
    query, key, value = (xp.array(a, "float32") for a in host)
    state = init_state(phi, VALUE_DIM, batch_shape=(2,), like=key)
    xp.assert_like(state.kvz, key, shape=(2, 2 * DIM, VALUE_DIM + 1))
    xp.assert_like(state.log_scale, key, shape=(2, 2 * DIM))
    assert_array_equal(xp.numpy(state.log_scale), -np.inf)
    assert_array_equal(xp.numpy(state.kvz), 0)

    state = update_state(state, key[:, :2, :], value[:, :2, :], phi)
    xp.assert_like(state.kvz, key, shape=(2, 2 * DIM, VALUE_DIM + 1))
    decoder = Decoder(phi, state)
    for t in (2, 3):
        token = (query[:, t, :], key[:, t, :], value[:, t, :])
        out, state = decode_step(*token, state, phi)
        xp.assert_like(out, key, shape=(2, VALUE_DIM))
        xp.assert_like(state.kvz, key, shape=(2, 2 * DIM, VALUE_DIM + 1))
        assert_allclose(xp.numpy(decoder.step(*token)), xp.numpy(out), rtol=0, atol=1e-6)
    last = update_state(
        init_state(phi, VALUE_DIM, batch_shape=(2,), like=key), key[:, 4:, :], value[:, 4:, :], phi
    )
    merged = merge_states(state, last)
    assert merged.length == 5
    out = read_state(query, merged, phi)
    xp.assert_like(out, key, shape=(2, 5, VALUE_DIM))
    expected = reference.kernel_attention(*(a.astype(np.float32) for a in host), phi)
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_of_half_precision_are_float32(xp, dtype):
    phi = EluFeatures()
    key = xp.array(np.ones((4, DIM)), dtype)
    value = xp.array(np.ones((4, VALUE_DIM)), dtype)
    state = update_state(init_state(phi, VALUE_DIM, like=key), key, value, phi)
    merged = merge_states(state, state)
    out, stepped = decode_step(key[0, :], key[0, :], value[0, :], merged, phi)
    for s in (state, merged, stepped):
        assert s.kvz.dtype == s.log_scale.dtype == xp.dtype("float32")
    for array in (out, read_state(key, stepped, phi)):
        assert array.dtype == key.dtype
        assert_array_equal(xp.numpy(array), 1)


# Decoding ---------------------------------------------------------------------------------------


def test_decoder_takes_steps_of_changing_shape_and_dtype(numpy_path):
    phi = EluFeatures()
    decoder = Decoder(phi, init_state(phi, VALUE_DIM, like=np.ones(DIM, dtype=np.float32)))
    one, value = np.ones(DIM, dtype=np.float32), np.ones(VALUE_DIM, dtype=np.float32)
    assert decoder.step(one, one, value).dtype == np.float32
    halves = [a.astype(np.float16) for a in (one, one, value)]
    assert decoder.step(*halves).dtype == np.float16
    queries = np.ones((5, DIM), dtype=np.float32)
    assert decoder.step(queries, one, value).shape == (5, VALUE_DIM)
    # A step that is refused leaves the state as it was.
    before = decoder.state
    with pytest.raises(ValueError, match="accumulation dtype"):
        decoder.step(*(a.astype(np.float64) for a in (one, one, value)))
    with pytest.raises(ValueError, match="dim"):
        decoder.step(one, one, value[:2])
    with pytest.raises(TypeError, match="must be an array"):
        decoder.step(one, one, [1.0, 2.0, 3.0])
    for now, then in zip(decoder.state, before, strict=True):
        assert_array_equal(now, then)
    assert before.length == 3
    assert_array_equal(decoder.step(one, one, value), 1)


@pytest.mark.parametrize("step", ["function", "decoder"])
def test_a_step_adds_no_leading_axes(numpy_path, step):
    """Five tokens would be taken for five streams, each from the state of one."""
    phi = PositiveFeatures(DIM, 2 * DIM, rng=1)

    def take(lead, query, key, value):
        state = init_state(phi, VALUE_DIM, batch_shape=lead, like=np.ones(DIM))
        if step == "decoder":
            return Decoder(phi, state).step(query, key, value)
        return decode_step(query, key, value, state, phi)[0]

    query, key, value = tokens(5)
    for lead, arrays in {
        (): (query, key, value),
        (1,): (query, key, value),
        (5, 1): (query, key, value),
        (3,): tokens(5, 3),
        (4,): tokens(1, 4),
    }.items():
        with pytest.raises(ValueError, match="one token, no length axis"):
            take(lead, *arrays)
    message = r"got key \(\), value \(5,\) and state \(\);"
    with pytest.raises(ValueError, match=message):
        take((), query[0], key[0], value)
    # Several queries of one key, and one key for several heads.
    assert take((), query, key[0], value[0]).shape == (5, VALUE_DIM)
    assert take((5,), query, key[0], value).shape == (5, VALUE_DIM)
    assert take((2, 5), query, key, value).shape == (2, 5, VALUE_DIM)


# Leading axes and lengths -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phi", "columns"),
    [
        (PositiveFeatures(DIM, 9, rng=0), 9),
        (HyperbolicFeatures(DIM, 8, rng=0), 8),
        (EluFeatures(DIM), DIM),
        (EluFeatures(), DIM),
        (OwnMap(DIM), 2 * DIM),
    ],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("batch_shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float16", "float32"), ("float32", "float32"), ("float64",) * 2]
)
def test_init_state(phi, columns, batch_shape, dtype, state_dtype):
    state = init_state(phi, 4, batch_shape=batch_shape, like=np.ones((5, DIM), dtype=dtype))
    assert state.kvz.shape == (*batch_shape, columns, 5)
    assert state.log_scale.shape == (*batch_shape, columns)
    assert state.kvz.dtype == state.log_scale.dtype == state_dtype
    assert_array_equal(state.kvz, 0)
    assert_array_equal(state.log_scale, -np.inf)
    assert state.length == 0
    assert_array_equal(read_state(np.ones((3, DIM), dtype=dtype), state, phi), 0)


# Whose state it is ------------------------------------------------------------------------------


def used_with(state, phi):
    """Return every call that takes a state, on tokens that fit it."""
    query, key, value = tokens(4)
    return {
        "update": lambda: update_state(state, key, value, phi),
        "read": lambda: read_state(query, state, phi),
        "full": lambda: linear_attention(query, key, value, phi, initial_state=state),
        "causal": lambda: linear_attention(
            query, key, value, phi, is_causal=True, initial_state=state
        ),
        "gradients": lambda: linattn.linear_attention_vjp(
            query, key, value, phi, initial_state=state
        ),
        "step": lambda: decode_step(query[0], key[0], value[0], state, phi),
        "decoder": lambda: Decoder(phi, state),
    }


def state_of(phi, seed=0, length=5):
    _, key, value = tokens(length, seed=seed)
    return update_state(init_state(phi, VALUE_DIM, like=key), key, value, phi)


CALLS = list(used_with(None, None))
OTHER = PositiveFeatures(DIM, 2 * DIM, rng=2)


def phi_number(phi):
    return init_state(phi, 1, like=np.ones(DIM)).fingerprint


@pytest.mark.parametrize("call", CALLS)
def test_a_state_in_foreign_byte_order_is_taken(numpy_path, call):
    phi = PositiveFeatures(DIM, 2 * DIM, rng=1)
    state = state_of(phi)
    turned = state._replace(**{n: getattr(state, n).astype(">f8") for n in ("kvz", "log_scale")})
    answers = [used_with(s, phi)[call]() for s in (state, turned)]
    if call == "decoder":
        for decoder in answers:
            decoder.step(np.ones(DIM), np.ones(DIM), np.ones(VALUE_DIM))
        answers = [decoder.state for decoder in answers]
    outputs = [a[0] if isinstance(a, tuple) else a for a in answers]
    assert outputs[1].dtype.isnative
    assert_array_equal(outputs[0], outputs[1])
    for merged in (merge_states(state, turned), merge_states(turned, state)):
        assert merged.kvz.dtype == np.float64
        assert_same_state(merged, merge_states(state, state))


def test_states_of_two_maps_do_not_merge(numpy_path):
    first, second = (state_of(PositiveFeatures(DIM, 2 * DIM, rng=rng)) for rng in (1, 2))
    message = rf"one feature map, got the fingerprints {first[3]} and {second[3]};"
    with pytest.raises(ValueError, match=message):
        merge_states(first, second)
    foreign = second._replace(fingerprint=None)
    assert merge_states(first, foreign).fingerprint == first.fingerprint
    assert merge_states(foreign, first).fingerprint == first.fingerprint
    assert merge_states(foreign, foreign).fingerprint is None


@pytest.mark.parametrize("name", ["positive", "elu"])
def test_every_state_knows_its_map(numpy_path, name):
    phi = MAPS[name](DIM)
    query, key, value = tokens(9)
    empty = init_state(phi, VALUE_DIM, like=key)
    known = empty.fingerprint
    assert type(known) is int
    assert 0 <= known < 2**31
    batch = np.stack([key, key])
    options: list[dict[str, Any]] = [{}, {"is_causal": True}]
    if name == "positive":
        options.append({"exact_window": 2})
    after = [
        linear_attention(query, key, value, phi, return_state=True, **option)[1]
        for option in options
    ]
    after += [
        update_state(empty, key, value, phi),
        update_state(empty, key[:0], value[:0], phi),
        linear_attention(query, key, value, phi, initial_state=empty, return_state=True)[1],
        linear_attention(batch, batch, value, phi, initial_state=empty, return_state=True)[1],
        linattn.linear_attention_vjp(query, key, value, phi, return_state=True)[0][1],
        merge_states(empty, empty),
        decode_step(query[0], key[0], value[0], empty, phi)[1],
    ]
    decoder = Decoder(phi, empty)
    for _ in range(3):
        after += [decoder.state, copy.copy(decoder).state]
        decoder.step(query[0], key[0], value[0])
    with linattn.without_backends():
        decoder.step(query[0], key[0], value[0])
    after += [decoder.state, pickle.loads(pickle.dumps(decoder)).state]
    assert [state.fingerprint for state in after] == [known] * len(after)


def test_every_library_carries_fingerprints(xp):
    phi = PositiveFeatures(DIM, 2 * DIM, rng=1)
    query, key, value = (xp.array(a) for a in tokens(5))
    state = init_state(phi, VALUE_DIM, like=key)
    state = linear_attention(query, key, value, phi, initial_state=state, return_state=True)[1]
    state = decode_step(query[0, :], key[0, :], value[0, :], state, phi)[1]
    decoder = Decoder(phi, update_state(state, key, value, phi))
    decoder.step(query[0, :], key[0, :], value[0, :])
    assert decoder.state.fingerprint == phi_number(phi)
    with pytest.raises(ValueError, match="got one of another map"):
        read_state(query, decoder.state, OTHER)


def test_maps_without_a_fingerprint_make_states_of_unknown_origin():
    class Marked(OwnMap):
        def fingerprint(self):
            return f"mine, {self.num_features}"

    class Unrelated(OwnMap):
        fingerprint = 5

    local = ActivationFeatures(DIM, 2 * DIM, activation=lambda u: u, rng=0)
    for phi in (OwnMap(DIM), Unrelated(DIM), local):
        state = state_of(phi)
        assert state.fingerprint is None
        assert_array_equal(read_state(np.ones((1, DIM)), state, phi).shape, (1, VALUE_DIM))
    marked = state_of(Marked(DIM))
    assert marked.fingerprint == state_of(Marked(DIM)).fingerprint is not None
    # Not known to be another one.
    read_state(np.ones((1, DIM)), marked, OwnMap(DIM))
    with pytest.raises(ValueError, match="got one of another map"):
        read_state(np.ones((1, DIM)), marked, MAPS["positive"](DIM))


def test_maps_that_differ_by_less_than_float32_holds_are_two():
    # Integers: float32 holds them and nothing within 1e-9 of them.
    rows = np.random.default_rng(0).integers(1, 9, (2 * DIM, DIM))
    first, second = (PositiveFeatures.from_projection(rows + step) for step in (0, 1e-9))
    assert first.fingerprint() != second.fingerprint()
    with pytest.raises(ValueError, match="got one of another map"):
        read_state(np.ones((1, DIM)), state_of(first), second)


def test_fingerprints_fit_the_integers_of_jax():
    """Of 32 bits one of these would be too large in all but 2^-20 of all ways to draw maps."""
    numbers = {phi_number(EluFeatures(scale=scale)) for scale in range(1, 21)}
    assert len(numbers) == 20
    assert all(0 <= number < 2**31 for number in numbers)


def test_a_fingerprint_is_made_once_and_not_pickled(monkeypatch):
    phi = PositiveFeatures(DIM, 2 * DIM, rng=1)
    before = pickle.dumps(phi)
    known = phi.fingerprint()
    assert pickle.dumps(phi) == before
    monkeypatch.setattr(hashlib, "sha256", None)
    assert phi.fingerprint() == known
    with pytest.raises(TypeError):
        PositiveFeatures(DIM, 2 * DIM, rng=1).fingerprint()


# What is shown ----------------------------------------------------------------------------------


def test_a_state_shows_shapes_in_place_of_numbers():
    phi = PositiveFeatures(64, 256, rng=1)
    state = init_state(phi, 64, batch_shape=(2,), like=np.ones(64, dtype=np.float32))
    number = state.fingerprint
    assert repr(state) == (
        f"State(kvz=<float32 (2, 256, 65)>, log_scale=<float32 (2, 256)>, length=0, "
        f"fingerprint={number})"
    )
    assert repr(State(None, None, None)) == (
        "State(kvz=None, log_scale=None, length=None, fingerprint=None)"
    )
    assert f"fingerprint={number})" in repr(phi)


def test_two_seeds_look_different():
    shown = {repr(PositiveFeatures(DIM, 2 * DIM, rng=rng)) for rng in (0, 1, 2, 2)}
    assert len(shown) == 3
    assert max(map(len, shown)) < 130


def test_a_decoder_shows_its_map_and_how_far_it_is(numpy_path):
    for phi in (PositiveFeatures(DIM, 2 * DIM, rng=1), EluFeatures()):
        decoder = Decoder(phi, init_state(phi, VALUE_DIM, like=np.ones(DIM)))
        for length in range(3):
            assert repr(decoder) == f"Decoder({phi!r}, {decoder.state!r})"
            assert f"length={length}, " in repr(decoder)
            decoder.step(np.ones(DIM), np.ones(DIM), np.ones(VALUE_DIM))
        with linattn.without_backends():
            decoder.step(np.ones(DIM), np.ones(DIM), np.ones(VALUE_DIM))
            assert f"length={4}, " in repr(decoder)


# What is refused --------------------------------------------------------------------------------


def test_an_overflow_of_float16_in_one_step_says_no_more_than_in_many():
    """The denominator of a signed map may be small; the output is inf, without a warning."""
    phi = TrigonometricFeatures(1, 2, rng=0)
    projection = float(phi.projection[0, 0])
    key = np.array([[0.0], [1.0]], dtype=np.float16)
    query = np.array([[np.pi / projection * 0.5 + 0.5]] * 2, dtype=np.float16)
    value = np.array([[6e4], [-6e4]], dtype=np.float16)
    with np.errstate(all="raise"):
        whole = linear_attention(query, key, value, phi, is_causal=True)
        before = linear_attention(query[:1], key[:1], value[:1], phi, return_state=True)[1]
        out, _ = decode_step(query[1], key[1], value[1], before, phi)
    assert_array_equal(np.abs(whole[1]), np.inf)
    assert_array_equal(out, whole[1])


@pytest.mark.parametrize("backend", [True, False], ids=["backend", "generic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "phi", [EluFeatures(), PositiveFeatures(4, 8, rng=0)], ids=["elu", "positive"]
)
def test_an_infinite_denominator_is_no_answer(phi, dtype, backend):
    """Numerators over it would be zeros, which look like an average of the values."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(dtype)
    with linattn.config() if backend else linattn.without_backends(), np.errstate(invalid="ignore"):
        state = update_state(init_state(phi, 4, batch_shape=(2,), like=key), key, value, phi)
        state.z[0] = np.inf
        token = query[:, 0], key[:, 0], value[:, 0]
        outputs = {
            "read_state": read_state(query, state, phi),
            "decode_step": decode_step(*token, state, phi)[0],
            "Decoder": Decoder(phi, state).step(*token),
            "causal": linear_attention(query, key, value, phi, is_causal=True, initial_state=state),
            "full": linear_attention(query, key, value, phi, initial_state=state),
        }
    for function, output in outputs.items():
        assert_array_equal(output[0], np.nan, err_msg=function)
        assert_array_equal(np.isfinite(output[1]), True, err_msg=function)
