"""What JAX does with `linattn.interop.jax`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps
from linattn.testing._caches import clear_caches

pytestmark = pytest.mark.frameworks

jax: Any = pytest.importorskip("jax", reason="jax is not installed")
interop: Any = pytest.importorskip("linattn.interop.jax", reason="jax is not installed")

plain: Any = linattn.linear_attention
linear_vjp: Any = linattn.linear_attention_vjp
PHI = feature_maps.PositiveFeatures(2, 4, rng=0)
rng = np.random.default_rng(0)
QKV = list(rng.normal(size=(3, 2, 5, 2)) / 2)
WAY = rng.normal(size=(2, 5, 2))
GATE, BETA = rng.uniform(size=(2, 2, 5))


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def agree(got: Any, want: Any, error: float = 1e-6) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=error, atol=error)


# Compilations -----------------------------------------------------------------------------------

_seen: list[str] = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: _seen.append(name))


@contextlib.contextmanager
def at_most(count: int) -> Iterator[None]:
    event = "/jax/core/compile/backend_compile_duration"
    before = _seen.count(event)
    yield
    assert _seen.count(event) - before <= count


def tokens(length: int) -> list[Any]:
    return [jax.numpy.asarray(x) for x in np.random.default_rng(1).normal(size=(3, length, 2))]


def test_an_eager_call_is_compiled_as_one():
    """It was 228 compilations for 33 tokens."""
    clear_caches()
    first, second, cotangent = tokens(9), tokens(10), jax.numpy.ones((10, 2))
    same = feature_maps.PositiveFeatures(2, 4, rng=0)
    with at_most(12):
        output = interop.linear_attention(*first, PHI, is_causal=True)
    agree(output, plain(*map(np.asarray, first), PHI, is_causal=True))
    with at_most(0):
        interop.linear_attention(*first, same, is_causal=True)
    with at_most(3):
        pullback = jax.vjp(lambda *x: interop.linear_attention(*x, PHI, is_causal=True), *second)[1]
        gradients = pullback(cotangent)
    hosts = [np.asarray(x) for x in second]
    expected = linear_vjp(*hosts, PHI, is_causal=True)[1](np.ones((10, 2)))
    agree(gradients, expected)
    with at_most(0):
        jax.vjp(lambda *x: interop.linear_attention(*x, PHI, is_causal=True), *second)[1](cotangent)


def test_calls_of_other_options_share_nothing():
    """Among options that are equal, or were changed in place, and maps of one hash."""
    query, key, value = tokens(6)
    host = [np.asarray(x) for x in (query, key, value)]
    stops = np.array([1, 2, 3, 4, 5, 6])
    for _ in range(2):
        got = interop.softmax_attention(query, key, value, key_stop=stops)
        agree(got, linattn.softmax_attention(*host, key_stop=stops))
        stops[0] = 0
    # The function of the first call, for another shape: it holds a copy.
    got = interop.softmax_attention(
        query[None], key, value, key_stop=stops + np.eye(6, dtype=int)[0]
    )
    agree(got[0], linattn.softmax_attention(*host, is_causal=True))
    for seed in range(3):
        phi = PHI.redraw(seed)
        agree(interop.linear_attention(query, key, value, phi), plain(*host, phi))
    agree(interop.softmax_attention(*host, scale=1), linattn.softmax_attention(*host, scale=1))
    with pytest.raises(TypeError, match="scale must be"):
        interop.softmax_attention(*host, scale=True)


def test_maps_of_others_may_change():
    """Nothing says that a map that is not linattn's own stays what it is."""

    class Changing(feature_maps.EluFeatures):
        gain = 1.0

        def query_spec(self, *where: Any) -> Any:
            return feature_maps.EluFeatures(scale=self.gain).query_spec(*where)

    phi, rows = Changing(), tokens(4)
    for Changing.gain in (1.0, 2.0):
        expected = plain(*rows, feature_maps.EluFeatures(scale=Changing.gain))
        agree(interop.linear_attention(*rows, phi), expected)


def test_an_eager_stream_is_that_of_numpy():
    """Positions go on, and the length stays an integer."""
    phi, rows, state, want = feature_maps.CosformerFeatures(2, max_length=20), tokens(4), None, None
    hosts = [np.asarray(x) for x in rows]
    options = {"is_causal": True, "return_state": True}
    for _ in range(3):
        got, state = interop.linear_attention(*rows, phi, initial_state=state, **options)
        expected, want = plain(*hosts, phi, initial_state=want, **options)
        agree(got, expected)
        agree(linattn.read_state(rows[0], state, phi), linattn.read_state(hosts[0], want, phi))
        assert type(state.length) is int
        assert state[2:4] == want[2:4]
