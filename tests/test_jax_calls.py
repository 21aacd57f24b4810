"""What JAX does with `linattn.interop.jax`: compilations, and the table of docs/gradients.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
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
QUERY, WAY, *KV = rng.normal(size=(4, 2, 2)) / 2
QUERIES = np.stack([QUERY, -QUERY])
GATE, BETA = rng.uniform(size=(2, 2))


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    """Double precision, and little time of XLA: what is compiled here runs once."""
    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    with jax.enable_x64(True):
        jax.config.update(flag, True)
        yield
        jax.config.update(flag, before)


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


@pytest.mark.parametrize("length", [4, 700])
def test_an_eager_call_and_its_gradient_are_numpys(length):
    """It was 228 compilations for 33 tokens; what is left brings arrays from one to the other."""
    given, cotangent = tokens(length), jax.numpy.ones((length, 2))
    hosts = [np.asarray(x) for x in given]
    with at_most(12), linattn.explain() as report:
        output, pullback = jax.vjp(
            lambda *x: interop.linear_attention(*x, PHI, is_causal=True), *given
        )
        gradients = pullback(cotangent)
    assert report.ran("home") == {"numpy"}
    want, pull = linear_vjp(*hosts, PHI, is_causal=True)
    for got, wanted in zip((output, *gradients), (want, *pull(np.ones((length, 2)))), strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is true in chunks of 128 tokens, in chunks of 2."""
    from linattn._driver import traced
    from linattn._recurrence import walk

    monkeypatch.setattr(traced, "CHUNK", 2)
    monkeypatch.setattr(walk, "TRACED_CHUNKS", 1)
    clear_caches()
    yield
    clear_caches()


@pytest.mark.usefixtures("short_chunks")
def test_a_long_call_is_compiled_as_one_chunk():
    """It was 446 compilations for 600 tokens; gradients by all arrays, and through the states."""
    query, key, value, cotangent = np.random.default_rng(2).normal(size=(4, 2, 7, 2))
    options: Any = {"key_bias": cotangent[0, :, 0], "log_decay": np.array([-0.1, -0.5])}
    lengths, both = np.array([7, 3]), {"is_causal": True, "return_state": True}
    first = plain(query[:, :3], key[:, :3], value[:, :3], PHI, **both)[1]
    log_scale = jax.numpy.asarray(first.log_scale)

    def attend(qkv: Any, kvz: Any, options: Any) -> Any:
        before, more = (
            first._replace(kvz=kvz, log_scale=log_scale),
            {"key_lengths": lengths, **options, **both},
        )
        output, state = interop.linear_attention(*qkv, PHI, initial_state=before, **more)
        return (output, state.kvz), state

    given = jax.tree.map(jax.numpy.asarray, ((query, key, value), first.kvz, options))
    with at_most(20):
        (output, kvz), pullback, state = jax.vjp(jax.jit(attend), *given, has_aux=True)
    options |= {"initial_state": first, "key_lengths": lengths, **both}
    (want, after), pull = linear_vjp(query, key, value, PHI, **options)
    agree(output, want)
    agree(state.log_decay, after.log_decay)
    assert state[2:4] == after[2:4]
    agree(linattn.read_state(given[0][0], state, PHI), linattn.read_state(query, after, PHI))
    # Two states of one meaning may have two scales.
    scale = np.exp(after.log_scale - np.asarray(state.log_scale))[..., None]
    *qkv, of_state, of_bias, of_decay = pull(cotangent, scale * np.asarray(kvz))
    agree(pullback((jax.numpy.asarray(cotangent), kvz)), (qkv, of_state, [of_bias, of_decay]))


@pytest.mark.usefixtures("short_chunks")
def test_the_gradient_of_a_long_recurrence_is_compiled_as_one_chunk():
    rule: Any = {"update_rule": "gated"}

    def attend(query: Any, key: Any, value: Any, log_decay: Any) -> Any:
        return interop.linear_recurrence(query, key, value, log_decay=log_decay, **rule)

    for length in (7, 9):
        rows = tokens(length)
        decay = -abs(rows[0])
        with at_most(12):
            gradients = jax.vjp(jax.jit(attend), *rows, decay)[1](rows[0])
        *hosts, decay = map(np.asarray, (*rows, decay))
        pull = linattn.linear_recurrence_vjp(*hosts, log_decay=decay, **rule)[1]
        agree(gradients, pull(hosts[0]))


def test_an_eager_stream_is_that_of_numpy():
    """Positions go on, and the length stays an integer."""
    phi, rows, state, want = feature_maps.CosformerFeatures(2, max_length=20), tokens(2), None, None
    hosts = [np.asarray(x) for x in rows]
    options = {"is_causal": True, "return_state": True}
    for _ in range(2):
        got, state = interop.linear_attention(*rows, phi, initial_state=state, **options)
        expected, want = plain(*hosts, phi, initial_state=want, **options)
        agree(got, expected)
        agree(linattn.read_state(rows[0], state, phi), linattn.read_state(hosts[0], want, phi))
        assert type(state.length) is int
        assert state[2:4] == want[2:4]


def test_an_eager_call_makes_no_nan_that_jax_would_report():
    """Inside, rows that see nothing yet are NaN before they are chosen among."""
    rows: Any = [jax.numpy.asarray(x) for x in (QUERY, *KV)]
    with jax.debug_nans(True):
        for call in (CALLS["linear, causal"], CALLS["softmax, causal"]):
            agree(call(interop, *rows), call(linattn, QUERY, *KV))
        agree(CALLS["linear"](linattn, *rows), CALLS["linear"](linattn, QUERY, *KV))
        nothing = linattn.softmax_attention(*rows, key_mask=jax.numpy.array([False, False]))
    agree(nothing, np.zeros((2, 2)))


def test_a_decay_makes_no_nan_that_jax_would_report():
    rows: Any = [jax.numpy.asarray(x) for x in (QUERY, *KV)]
    options: dict[str, Any] = {"is_causal": True, "log_decay": -0.1}
    attend: Any = linattn.linear_attention_vjp
    with jax.debug_nans(True):
        output, pullback = attend(*rows, PHI, **options)
        gradients = pullback(rows[0])
    want, pull_back = attend(QUERY, *KV, PHI, **options)
    agree((output, *gradients), (want, *pull_back(QUERY)))


def test_broadcasting_works_where_users_let_it_raise():
    """Leading axes broadcast by design; the flag is for the user's own code."""
    rows: Any = [jax.numpy.asarray(x) for x in (QUERIES, *KV)]
    with jax.numpy_rank_promotion("raise"):
        lengths = interop.softmax_attention(
            rows[1], rows[2], rows[2], key_lengths=jax.numpy.array(2)
        )
        for library in (interop, linattn):
            agree(library.softmax_attention(*rows), linattn.softmax_attention(QUERIES, *KV))
        with pytest.raises(ValueError, match="could not be broadcast"):
            rows[0] + rows[1]
    agree(lengths, linattn.softmax_attention(KV[0], KV[1], KV[1]))


def test_traced_code_obeys_a_later_precision():
    rows = [x.astype("float32") for x in tokens(2)]

    def state(*given: Any) -> Any:
        return plain(*given, PHI, return_state=True)[1].kvz

    for traced in (jax.jit(state), jax.checkpoint(state)):
        for precision, wanted in ((None, "float32"), ("float64", "float64"), (None, "float32")):
            with linattn.config(precision=precision):
                assert traced(*rows).dtype == wanted


# The table --------------------------------------------------------------------------------------


def _linear(is_causal: bool) -> Any:
    return lambda of, *qkv: of.linear_attention(*qkv, PHI, is_causal=is_causal)


def _softmax(is_causal: bool) -> Any:
    return lambda of, *qkv: of.softmax_attention(*qkv, is_causal=is_causal)


def _recurrence(rule: str, **gates: Any) -> Any:
    def attend(of: Any, *qkv: Any) -> Any:
        kind = type(qkv[1])
        given = {n: jax.numpy.asarray(g) if kind is not np.ndarray else g for n, g in gates.items()}
        return of.linear_recurrence(*qkv, update_rule=rule, **given)

    return attend


CALLS: dict[str, Any] = {
    "linear": _linear(False),
    "linear, causal": _linear(True),
    "softmax": _softmax(False),
    "softmax, causal": _softmax(True),
    "recurrence": _recurrence("gated_delta", log_decay=-GATE, beta=BETA),
}


def slope(function: Any, x: Any) -> Any:
    """Derivative of a function of NumPy along `WAY`, by central differences."""
    return (function(x + 1e-5 * WAY) - function(x - 1e-5 * WAY)) / 2e-5


def gradient(call: Any, query: Any) -> Any:
    """Gradient of the sum of squares by the query, in NumPy, by central differences."""
    steps = 1e-5 * np.eye(query.size).reshape(-1, *query.shape)
    ends = (call(linattn, query + sign * steps, *KV) for sign in (1, -1))
    plus, minus = ((end**2).sum((-2, -1)) for end in ends)
    return ((plus - minus) / 2e-5).reshape(query.shape)


def squares(call: Any) -> Any:
    return lambda query: (call(interop, query, *KV) ** 2).sum()


def outputs(call: Any) -> Any:
    return np.stack([call(linattn, query, *KV) for query in QUERIES])


def gradients(call: Any) -> Any:
    return np.stack([gradient(call, query) for query in QUERIES])


def _jit(call: Any) -> None:
    agree(jax.jit(lambda query: call(interop, query, *KV))(QUERY), call(linattn, QUERY, *KV))


def _grad(call: Any) -> None:
    agree(jax.grad(squares(call))(QUERY), gradient(call, QUERY))


def _vmap(call: Any) -> None:
    agree(jax.vmap(lambda query: call(interop, query, *KV))(QUERIES), outputs(call))


def _vmap_of_grad(call: Any) -> None:
    agree(jax.vmap(jax.grad(squares(call)))(QUERIES), gradients(call))


def _scan(call: Any) -> None:
    def step(carry: Any, query: Any) -> Any:
        return carry, call(interop, query, *KV)

    agree(jax.lax.scan(step, 0.0, QUERIES)[1], outputs(call))


def _remat(call: Any) -> None:
    agree(jax.grad(jax.checkpoint(squares(call)))(QUERY), gradient(call, QUERY))


def _jvp(call: Any) -> None:
    point = (jax.numpy.asarray(QUERY),), (jax.numpy.asarray(WAY),)
    got = jax.jvp(jax.jit(lambda query: call(interop, query, *KV)), *point)[1]
    agree(got, slope(lambda query: call(linattn, query, *KV), QUERY))


def _linearize(call: Any) -> None:
    query, way = map(jax.numpy.asarray, (QUERY, WAY))
    _, apply = jax.linearize(lambda query: call(interop, query, *KV), query)
    agree(apply(way), slope(lambda query: call(linattn, query, *KV), QUERY))


def _hessian(call: Any) -> None:
    """Forward over reverse, along one direction."""
    query, way = map(jax.numpy.asarray, (QUERY, WAY))
    derivative = jax.jit(jax.grad(squares(call)))
    got = jax.jit(lambda query: jax.jvp(derivative, (query,), (way,))[1])(query)
    expected = slope(lambda query: gradient(call, query), QUERY)
    agree(got, expected, 1e-4)


RUNS: dict[str, Callable[[Any], None]] = {
    "`jax.jit`": _jit,
    "`jax.grad`": _grad,
    "`jax.vmap`": _vmap,
    "`vmap` of `grad`": _vmap_of_grad,
    "`jax.lax.scan`": _scan,
    "`jax.checkpoint`": _remat,
    "`jax.linearize`": _linearize,
    "`jax.jvp`": _jvp,
    "`jax.hessian`": _hessian,
}


# All are one custom function of JAX: the rows that never look inside are run once.
INSIDE = dict.fromkeys(("`jax.jvp`", "`jax.hessian`"), [*CALLS][1::2] + [*CALLS][4:])


@pytest.mark.parametrize(
    ("run", "name"), [(run, name) for run in RUNS for name in INSIDE.get(run, ["linear, causal"])]
)
def test_jax_runs(run, name):
    RUNS[run](CALLS[name])


def test_the_page_shows_what_runs():
    page = (Path(__file__).parents[1] / "docs" / "gradients.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row in RUNS] == list(RUNS)


def test_sparse_arrays_are_refused_by_name():
    from jax.experimental import sparse

    matrix = sparse.BCOO.fromdense(jax.numpy.eye(2))
    for call in CALLS.values():
        with pytest.raises(TypeError, match=r"query must be .*got BCOO; .* query\.todense\(\)"):
            call(linattn, matrix, *map(jax.numpy.asarray, KV))
        with pytest.raises(TypeError, match=r"query must be .*got BCOO; .* query\.todense\(\)"):
            call(interop, matrix, *map(jax.numpy.asarray, KV))
