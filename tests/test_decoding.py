"""The NumPy backend one token at a time: streams whose state is not read, scale jumps, forks."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import reference
from linattn.feature_maps import (
    DenseExponentialFeatures,
    EluFeatures,
    HedgehogFeatures,
    PositiveFeatures,
    TaylorFeatures,
)
from linattn.typing import Declined
from linattn_numpy.decoding import Stepper
from linattn_numpy.limits import MAX_LOG_LEAD
from linattn_numpy.tuning import MAX_BUFFERED_TOKENS
from tests.attentions import inputs, maps

D, E = 8, 5
rng = np.random.default_rng(11)
MAPS = {
    **maps(D, 24, "positive", "activation", "elu", "relu"),
    **maps(D, 32, "hyperbolic"),
    "per-head": PositiveFeatures.from_projection(
        np.random.default_rng(7).standard_normal((2, 20, D))
    ),
    "two sides": HedgehogFeatures(
        0.3 * rng.standard_normal((20, D)), key_weights=0.3 * rng.standard_normal((20, D))
    ),
    "two sides, per-head": HedgehogFeatures(
        0.3 * rng.standard_normal((2, 20, D)), key_weights=0.3 * rng.standard_normal((2, 20, D))
    ),
    "curved": DenseExponentialFeatures(
        D, 24, A=np.full(D, 0.05), transform=np.eye(D) + 0.1 * rng.standard_normal((D, D)), rng=0
    ),
}
every_map = pytest.mark.parametrize("name", MAPS)


def tokens(length, seed=0, dtype=np.float64):
    return inputs(length, D, E, lead=(2,), seed=seed, dtype=dtype)


def stream(phi, query, key, value, decoder=None):
    if decoder is None:
        like = key[:, 0]
        state = linattn.init_state(phi, value.shape[-1], batch_shape=key.shape[:-2], like=like)
        decoder = linattn.Decoder(phi, state)
    steps = [decoder.step(query[:, t], key[:, t], value[:, t]) for t in range(key.shape[-2])]
    return np.stack(steps, axis=-2), decoder


@every_map
def test_a_stream_whose_state_nobody_reads(name):
    query, key, value = tokens(3 * MAX_BUFFERED_TOKENS + 7)
    out, decoder = stream(MAPS[name], query, key, value)
    assert isinstance(decoder._stepper, Stepper)
    want = reference.kernel_attention(query, key, value, MAPS[name], is_causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-12)
    assert decoder.state.length == 3 * MAX_BUFFERED_TOKENS + 7


@pytest.mark.parametrize("lead", [(), (3,), (3, 2)])
def test_any_number_of_leading_axes(lead):
    phi = MAPS["positive"]
    draw = np.random.default_rng(5)
    query, key = draw.standard_normal((2, *lead, MAX_BUFFERED_TOKENS + 5, D))
    value = draw.standard_normal((*lead, MAX_BUFFERED_TOKENS + 5, E))
    state = linattn.init_state(phi, E, batch_shape=lead, like=key)
    decoder = linattn.Decoder(phi, state)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)
    for t in range(MAX_BUFFERED_TOKENS + 5):
        token = query[..., t, :], key[..., t, :], value[..., t, :]
        out, state = linattn.decode_step(*token, state, phi)
        np.testing.assert_allclose(out, want[..., t, :], rtol=0, atol=1e-12)
        out = decoder.step(*token)
        np.testing.assert_allclose(out, want[..., t, :], rtol=0, atol=1e-12)
    assert isinstance(decoder._stepper, Stepper)


def test_steps_of_several_streams_in_turn():
    """What is kept from one functional step to the next is of its own kind and scale only."""
    query, key, value = tokens(6)
    empty = {
        name: linattn.init_state(phi, E, batch_shape=(2,), like=key) for name, phi in MAPS.items()
    }
    states = {(name, factor): empty[name] for name in MAPS for factor in (3.0, 0.5)}
    for t in range(6):
        for name, factor in states:
            token = query[:, t], factor * key[:, t], value[:, t]
            out, after = linattn.decode_step(*token, states[name, factor], MAPS[name])
            states[name, factor] = after
            seen = factor * key[:, : t + 1], value[:, : t + 1]
            want = reference.kernel_attention(query[:, t : t + 1], *seen, MAPS[name])
            np.testing.assert_allclose(out, want[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
def test_a_high_key_that_cannot_be_read_spoils_nothing(name, monkeypatch):
    """The state was put on its scale; it goes back to where it was."""

    def interrupted(*args):
        raise KeyboardInterrupt

    phi = MAPS[name]
    query, key, value = tokens(12)
    key[:, :6] *= 6
    bad = value[:, 6].copy()
    bad[1, 2] = np.nan
    _, decoder = stream(phi, query[:, :6], key[:, :6], value[:, :6])
    stepper = decoder._stepper
    before = stepper.state
    assert isinstance(stepper.step(query[:, 6], key[:, 6], bad), Declined)
    for was, now in zip(before, stepper.state, strict=True):
        np.testing.assert_array_equal(was, now)
    monkeypatch.setattr(stepper, "_buffer_and_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.step(query[:, 6], key[:, 6], value[:, 6])
    monkeypatch.undo()
    for was, now in zip(before, stepper.state, strict=True):
        np.testing.assert_array_equal(was, now)
    out, _ = stream(phi, query[:, 6:], key[:, 6:], value[:, 6:], decoder)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)
    np.testing.assert_allclose(out, want[:, 6:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scales_that_jump(name, dtype):
    query, key, value = tokens(90, dtype=dtype)
    key[:, :10] *= 6
    key[:, 20:25] *= 6
    key[:, 50:] *= 0.1
    key[:, 70:] *= 40
    out, decoder = stream(MAPS[name], query, key, value)
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    want = linattn.linear_attention(q, k, v, MAPS[name], is_causal=True)
    tolerance = {np.float64: 1e-11, np.float32: 3e-5}[dtype]
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance)
    assert isinstance(decoder._stepper, Stepper)
    assert decoder._stepper._buffered.max() <= np.exp(MAX_LOG_LEAD)


@pytest.mark.parametrize("factor", [1e3, -1e3])
def test_queries_beyond_the_range_are_stabilized(factor):
    query, key, value = tokens(2 * MAX_BUFFERED_TOKENS + 3)
    phi = PositiveFeatures(D, 24, rng=0)
    query[:, 5:9] = factor * np.abs(phi.projection[0]) * np.sign(phi.projection[0])
    outs, decoder = stream(phi, query[:, :7], key[:, :7], value[:, :7])
    assert not decoder._stepper._reads_unshifted
    more, _ = stream(phi, query[:, 7:], key[:, 7:], value[:, 7:], decoder)
    assert isinstance(decoder._stepper, Stepper)
    assert decoder._stepper._reads_unshifted
    with linattn.without_backends():
        want = linattn.linear_attention(query, key, value, phi, is_causal=True)
    out = np.concatenate([outs, more], axis=-2)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-10)


def test_a_read_of_what_has_underflowed_is_stabilized():
    """All columns that a query sees are far below 1, some beyond the range of float32."""
    rows = np.zeros((3, D))
    rows[0, 0], rows[1, 0], rows[2, 0] = 1.0, 1.02, 2.0
    phi = PositiveFeatures.from_projection(rows)
    query, key, value = tokens(20, dtype=np.float32)
    query[:, 10:] = 0
    query[:, 10:, 0] = -98 * D**0.25
    out, decoder = stream(phi, query, key, value)
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    want = linattn.linear_attention(q, k, v, phi, is_causal=True)
    assert isinstance(decoder._stepper, Stepper)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-4)


def test_a_higher_key_leaves_the_buffer_as_it_is(monkeypatch):
    """Only the features whose scale rises are multiplied; no product adds tokens to the state."""
    counted, flush = itertools.count(), Stepper._flush
    monkeypatch.setattr(Stepper, "_flush", lambda self: (next(counted), flush(self)))
    raised, rescale = [], Stepper._rescale

    def counting(self, factor):
        raised.append(int((factor != 1).sum()))
        return rescale(self, factor)

    monkeypatch.setattr(Stepper, "_rescale", counting)
    query, key, value = tokens(6 * MAX_BUFFERED_TOKENS, dtype=np.float32)
    out, _ = stream(MAPS["positive"], query, 6 * key, value)
    assert next(counted) < 6 < len(raised)
    assert np.median(raised) < 16
    q, k, v = (x.astype(np.float64) for x in (query, 6 * key, value))
    want = linattn.linear_attention(q, k, v, MAPS["positive"], is_causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["positive", "hyperbolic"])
@pytest.mark.parametrize("log", [-60, 40])
def test_sums_of_any_size_on_their_scale(name, log):
    """Small weights are clipped only beside sums on which this has no effect."""
    phi = MAPS[name]
    query, key, value = tokens(3 * MAX_BUFFERED_TOKENS, dtype=np.float32)
    query, key = 2 * query, 2 * key
    state = linattn.init_state(phi, E, batch_shape=(2,), like=key)
    state = linattn.update_state(state, key[:, :9], value[:, :9], phi)
    moved = np.where(np.arange(state.log_scale.shape[-1]) % 3, np.float32(log), 0)
    kvz = state.kvz * np.exp(moved)[:, None]
    state = state._replace(kvz=kvz, log_scale=state.log_scale - moved)
    decoder, out = linattn.Decoder(phi, state), np.empty((2, 2, query.shape[1], E))
    for t in range(9, query.shape[1]):
        token = query[:, t], key[:, t], value[:, t]
        out[0, :, t] = decoder.step(*token)
        out[1, :, t], state = linattn.decode_step(*token, state, phi)
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    want = linattn.linear_attention(q, k, v, phi, is_causal=True)
    np.testing.assert_allclose(out[:, :, 9:], np.stack([want, want])[:, :, 9:], rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["positive", "elu", "taylor"])
@pytest.mark.parametrize("steps", [0, 3, MAX_BUFFERED_TOKENS + 1])
def test_states_and_copies_do_not_follow_their_decoder(name, steps):
    """One that shares memory with the decoder changes when that goes on, or changes it."""
    phi = (MAPS | {"taylor": TaylorFeatures(D)})[name]
    query, key, value = tokens(steps + 2 * MAX_BUFFERED_TOKENS + 3)
    state = linattn.init_state(phi, E, batch_shape=(2,), like=key)
    decoder = linattn.Decoder(phi, state)
    if steps:
        stream(phi, query[:, :steps], key[:, :steps], value[:, :steps], decoder)
    taken, fork = decoder.state, copy.copy(decoder)
    kept, written = copy.deepcopy(taken), decoder.state
    written.kvz[...] = written.log_scale[...] = 7
    rest = [x[:, steps:] for x in (query, key, value)]
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)[:, steps:]
    np.testing.assert_allclose(
        stream(phi, rest[0], rest[1], rest[2], decoder)[0], want, rtol=0, atol=1e-12
    )
    for same in (taken, fork.state):
        for now, then in zip(same, kept, strict=True):
            np.testing.assert_array_equal(now, then)
    np.testing.assert_allclose(
        stream(phi, rest[0], rest[1], rest[2], fork)[0], want, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", ["positive", "elu", "taylor"])
def test_a_decoder_raises_nothing_of_numpy(name):
    """Buffered tokens are added when the state is asked for: products may underflow."""
    phi = (MAPS | {"taylor": TaylorFeatures(D)})[name]
    query, key, value = tokens(5, dtype=np.float32)
    key[:, 1:] *= 5
    value *= np.float32(1e-38)
    state = linattn.init_state(phi, E, batch_shape=(2,), like=key)
    decoder = linattn.Decoder(phi, state)
    with np.errstate(all="raise"):
        stream(phi, query, key, value, decoder)
        assert decoder.state.length == 5
        assert copy.copy(decoder).state.length == 5
        assert "length=5" in repr(decoder)


def test_a_step_does_not_ask_how_its_state_is_stored():
    phi = MAPS["positive"]
    query, key, value = tokens(30)
    empty = linattn.init_state(phi, E, batch_shape=(2,), like=key[:, 0])
    state = linattn.update_state(empty, key[:, :-1], value[:, :-1], phi)
    columns = np.swapaxes(np.ascontiguousarray(np.swapaxes(state.kvz, -1, -2)), -1, -2)
    last = query[:, -1], key[:, -1], value[:, -1]
    answers = [
        linattn.decode_step(*last, state._replace(kvz=kvz), phi)
        for kvz in (np.ascontiguousarray(state.kvz), columns)
    ]
    (out, after), (other_out, other_after) = answers
    np.testing.assert_array_equal(out, other_out)
    np.testing.assert_array_equal(after.kvz, other_after.kvz)
    want = reference.kernel_attention(query, key, value, phi, is_causal=True)[:, -1]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-12)
    all_keys = linattn.update_state(empty, key, value, phi)
    scale = np.exp(after.log_scale - all_keys.log_scale)[..., None]
    np.testing.assert_allclose(after.kvz * scale, all_keys.kvz, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "fork", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_forks_go_on_by_themselves(fork):
    phi = MAPS["positive"]
    query, key, value = tokens(60)
    _, decoder = stream(phi, query[:, :20], key[:, :20], value[:, :20])
    other = fork(decoder)
    stream(phi, query[:, 20:40], -key[:, 20:40], value[:, 20:40], other)
    out, _ = stream(phi, query[:, 20:], key[:, 20:], value[:, 20:], decoder)
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)[:, 20:]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["positive", "elu"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_is_left_to_the_generic_code(name, bad, where):
    phi = MAPS[name]
    arrays = tokens(12)
    arrays[where][1, 6, 0] = bad
    out, _ = stream(phi, *arrays)
    with linattn.without_backends():
        want, _ = stream(phi, *arrays)
    np.testing.assert_allclose(out, want, rtol=1e-11, atol=1e-12)
    assert_array_equal(np.isfinite(out[:, :6]), True)


def test_other_problems_are_left_to_the_generic_code():
    query, key, value = tokens(2)
    _, decoder = stream(TaylorFeatures(D), query, key, value)
    assert decoder._stepper is None
    phi = MAPS["positive"]
    state = linattn.init_state(phi, E, batch_shape=(2, 1), like=key[:, 0])
    decoder = linattn.Decoder(phi, state)
    grouped = np.stack([query, -query], axis=1)
    out = decoder.step(grouped[..., 0, :], key[:, None, 0], value[:, None, 0])
    assert out.shape == (2, 2, E)
    assert decoder._stepper is None


def test_leaving_the_backend_in_the_middle():
    phi = MAPS["positive"]
    query, key, value = tokens(30)
    _, decoder = stream(phi, query[:, :10], key[:, :10], value[:, :10])
    with linattn.without_backends():
        middle, _ = stream(phi, query[:, 10:20], key[:, 10:20], value[:, 10:20], decoder)
        assert not isinstance(decoder._stepper, Stepper)
    last, _ = stream(phi, query[:, 20:], key[:, 20:], value[:, 20:], decoder)
    assert isinstance(decoder._stepper, Stepper)
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)
    found = np.concatenate([middle, last], axis=1)
    np.testing.assert_allclose(found, want[:, 10:], rtol=0, atol=1e-12)


def test_an_error_leaves_the_stream_as_it_was():
    phi = MAPS["positive"]
    query, key, value = tokens(3)
    _, decoder = stream(phi, query[:, :2], key[:, :2], value[:, :2])
    with pytest.raises(ValueError, match="coordinates"):
        decoder.step(query[:, 2, :4], key[:, 2, :4], value[:, 2])
    out = decoder.step(query[:, 2], key[:, 2], value[:, 2])
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)[:, 2]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-12)
    assert isinstance(decoder._stepper, Stepper)  # the steps after it are as fast as those before


def token_and_state(phi: Any, dtype: Any = np.float32) -> tuple[Any, Any, Any, Any]:
    query, key, value = (x[:, 0].astype(dtype) for x in tokens(1))
    state = linattn.init_state(phi, E, batch_shape=(2,), like=key)
    return query, key, value, state


BAD_STEPS: dict[str, Any] = {
    "dim": lambda q, k, v, s: (q[:, :4], k[:, :4], v, s),
    "one dim": lambda q, k, v, s: (q, k[:, :4], v, s),
    "dtype": lambda q, k, v, s: (q, k, v.astype(np.float64), s),
    "dtype of the state": lambda q, k, v, s: (q, k, v, token_and_state(MAPS["elu"], np.float64)[3]),
    "value": lambda q, k, v, s: (q, k, v[:, :2], s),
    "leading axes": lambda q, k, v, s: (q, k[:1].repeat(3, axis=0), v, s),
    "list": lambda q, k, v, s: (q, k.tolist(), v, s),
    "masked": lambda q, k, v, s: (np.ma.masked_array(q), k, v, s),
    "no state": lambda q, k, v, s: (q, k, v, None),
    "arrays of a state": lambda q, k, v, s: (q, k, v, (s.kvz, s.log_scale)),
    "columns": lambda q, k, v, s: (q, k, v, token_and_state(MAPS["positive"])[3]),
}


@pytest.mark.parametrize("bad", BAD_STEPS)
def test_a_step_after_a_good_one_is_checked_like_the_first(bad):
    phi = EluFeatures()
    good = token_and_state(phi)
    query, key, value, state = BAD_STEPS[bad](*good)
    linattn.decode_step(*token_and_state(MAPS["relu"]), MAPS["relu"])
    with pytest.raises((TypeError, ValueError)) as first:
        linattn.decode_step(query, key, value, state, phi)
    linattn.decode_step(*good, phi)
    with pytest.raises((TypeError, ValueError)) as later:
        linattn.decode_step(query, key, value, state, phi)
    assert (type(later.value), str(later.value)) == (type(first.value), str(first.value))


def test_a_step_after_one_of_another_kind_is_its_own():
    steps = [
        (MAPS["positive"], np.float32, None),
        (PositiveFeatures(D, 24, rng=1), np.float32, None),
        (MAPS["positive"], np.float32, None),
        (MAPS["positive"], np.float64, None),
        (MAPS["positive"], np.float64, "float64"),
    ]
    for phi, dtype, precision in steps:
        query, key, value, state = token_and_state(phi, dtype)
        with linattn.config(precision=precision):
            out, after = linattn.decode_step(query, key, value, state, phi)
        with linattn.without_backends():
            want, wanted = linattn.decode_step(query, key, value, state, phi)
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        assert out.dtype == want.dtype
        np.testing.assert_allclose(out, want, rtol=0, atol=tolerance)
        np.testing.assert_allclose(
            after.kvz * np.exp(after.log_scale)[..., None],
            wanted.kvz * np.exp(wanted.log_scale)[..., None],
            rtol=100 * tolerance,
        )
    phi = EluFeatures()
    step = token_and_state(phi)
    linattn.decode_step(*step, phi)
    with linattn.config(precision="float64"), pytest.raises(ValueError, match="accumulation"):
        linattn.decode_step(*step, phi)


def test_a_map_with_one_spec_for_all_dtypes():
    class Relu:
        num_features = None
        spec = MAPS["relu"].query_spec(np, np.float64, None)

        def query_spec(self, xp, dtype, device):
            return self.spec

        key_spec = query_spec
        query_features, key_features = MAPS["relu"].query_features, MAPS["relu"].key_features

    phi = Relu()
    for dtype in (np.float32, np.float64, np.float32):
        query, key, value, state = token_and_state(phi, dtype)
        out, after = linattn.decode_step(query, key, value, state, phi)
        assert out.dtype == after.kvz.dtype == after.log_scale.dtype == dtype
        want = linattn.decode_step(query, key, value, state, MAPS["relu"])[0]
        np.testing.assert_array_equal(out, want)


def test_a_step_that_is_left_to_others_spoils_nothing():
    # All features of these keys are far below what a state on the log scale 0 can hold.
    phi = EluFeatures()
    query, key, value = (x.astype(np.float32) for x in tokens(20))
    key -= 100
    start = linattn.init_state(phi, E, batch_shape=(2,), like=key[:, 0])
    start = linattn.update_state(start, key[:, :10], value[:, :10], phi)
    rest = [x[:, 10:] for x in (query, key, value)]
    out, _ = stream(phi, rest[0], rest[1], rest[2], linattn.Decoder(phi, start))
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    want = linattn.linear_attention(q, k, v, phi, is_causal=True)[:, 10:]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


def test_small_keys_after_none_were_seen():
    phi = EluFeatures()
    query, key, value = tokens(12)
    key[:, :6] -= 600
    out, _ = stream(phi, query, key, value)
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-11)
