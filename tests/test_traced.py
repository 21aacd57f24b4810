"""Plain functions under ``jax.jit``: a loop over chunks, the same program at every length."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc, no-untyped-call"

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import linattn
from linattn._driver import traced as traced_loops
from linattn._driver.problem import linear_problem
from linattn.feature_maps import (
    CosformerFeatures,
    EluFeatures,
    PositiveFeatures,
    RotatedFeatures,
    SoftmaxFeatures,
    TrigonometricFeatures,
)

pytestmark = pytest.mark.frameworks

DIM, LENGTH = 4, 300
RNG = np.random.default_rng(0)
HOST = RNG.standard_normal((3, 2, LENGTH, DIM))
MASK, BIAS = RNG.random((2, LENGTH)) > 0.2, RNG.standard_normal((2, LENGTH))
DECAY = -RNG.random((2, LENGTH)) / 20
MAPS: dict[str, Any] = {
    "positive": PositiveFeatures(DIM, 8, rng=0),
    "elu": EluFeatures(),
    "cosformer": CosformerFeatures(DIM, max_length=2000),
    "rotated": RotatedFeatures(EluFeatures(DIM)),
    "columns": SoftmaxFeatures(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True, "return_state": True, "return_log_normalizer": True},
    "full, masks": {"key_mask": MASK, "key_bias": BIAS, "return_state": True},
    "causal, masks": {"is_causal": True, "key_mask": MASK, "key_bias": BIAS},
    "decay": {"is_causal": True, "log_decay": DECAY, "return_state": True},
    "one decay, sums": {"is_causal": True, "log_decay": -0.01, "normalize": False},
}
STOPS = np.sort(RNG.integers(0, LENGTH + 1, LENGTH))
BORDERS = [0, 7, 7, 200, 290, LENGTH]
BIASES = {"window_bias": RNG.standard_normal((2, 9)), "far_bias": (0.1, 0.2)}
LOOPS: dict[str, dict[str, Any]] = {
    "stops": {"key_stop": STOPS, "key_mask": MASK, "return_state": True},
    "prefix": {"prefix_length": 40, "key_bias": BIAS, "return_log_normalizer": True},
    "packed, causal": {"cu_seqlens": BORDERS, "is_causal": True, "key_mask": MASK},
    "packed, decay": {"cu_seqlens": BORDERS, "is_causal": True, "log_decay": DECAY},
    "packed, full": {"cu_seqlens": BORDERS, "key_bias": BIAS, "return_log_normalizer": True},
    "window, causal": {"exact_window": 5, "is_causal": True, "return_state": True},
    "window, sinks": {"exact_window": 150, "is_causal": True, "sinks": 3, "key_bias": BIAS},
    "window, decay": {"exact_window": 16, "is_causal": True, "log_decay": DECAY},
    "window, full": {"exact_window": 40, "key_mask": MASK, "return_state": True, **BIASES},
    "window, fading": {"exact_window": 40, "log_decay": -0.02, "return_log_normalizer": True},
    "two sides": {"log_decay": -0.02, "return_state": True},
    "window, stops": {"exact_window": 20, "key_stop": STOPS, "sinks": 3, "return_state": True},
    "window, far ahead": {
        **{"exact_window": 10, "key_stop": np.minimum(2 * np.arange(LENGTH) + 40, LENGTH)},
        **BIASES,
    },
    "window, prefix": {"exact_window": 9, "prefix_length": 40, "key_mask": MASK, **BIASES},
    "window, packed": {
        **{"exact_window": 12, "is_causal": True, "cu_seqlens": BORDERS, "log_decay": DECAY},
        **{"sinks": 2, "return_state": True},
    },
    "window, packed, full": {"exact_window": 4, "cu_seqlens": BORDERS, "log_decay": -0.02},
    "packed, two sides": {"cu_seqlens": BORDERS, "log_decay": -0.02, "return_state": True},
}
PLACED: dict[str, dict[str, Any]] = {
    "stops": {"key_stop": STOPS, "key_mask": MASK},
    "packed": {"cu_seqlens": BORDERS, "is_causal": True, "key_bias": BIAS},
}
EXACT: dict[str, dict[str, Any]] = {
    "full": {"return_log_normalizer": True},
    "causal": {"is_causal": True},
    "masks": {"is_causal": True, "key_mask": MASK, "key_bias": BIAS, "return_log_normalizer": True},
    "stops": {"key_stop": STOPS},
    "window": {"local_window_size": (30, 2), "return_log_normalizer": True, **BIASES},
    "window, sinks": {"local_window_size": 9, "is_causal": True, "sinks": 4, "key_bias": BIAS},
    "packed": {"cu_seqlens": BORDERS, "local_window_size": 6, "sinks": 3, "key_mask": MASK},
}
RULES: dict[str, dict[str, Any]] = {
    "gated": {"log_decay": DECAY},
    "gated_delta": {"log_decay": DECAY, "beta": -20 * DECAY},
}


@pytest.fixture
def jax():
    """Double precision, and little time of XLA: what is compiled here runs once."""
    module = pytest.importorskip("jax")
    module.config.update("jax_enable_x64", True)
    flag = "jax_disable_most_optimizations"
    before = module.config.read(flag)
    module.config.update(flag, True)
    yield module
    module.config.update(flag, before)


def traced(jax, function, arrays, options, *phi):
    """Call under jit; arrays among the options are traced too, but for stops."""
    moving = {n: x for n, x in options.items() if hasattr(x, "shape") and n != "key_stop"}
    fixed = {n: x for n, x in options.items() if n not in moving}
    return jax.jit(lambda x, o: function(*x, *phi, **o, **fixed))(tuple(arrays), moving)


def numbers(result):
    """Arrays of a result, a state on its true scale."""
    found = []
    for x in result if type(result) in (tuple, list) else [result]:
        if isinstance(x, linattn.State):
            assert int(x.length) in (LENGTH, LENGTH - 107, LENGTH - 100)
            x = np.asarray(x.kvz) * np.exp(np.asarray(x.log_scale))[..., None]
        found.append(np.asarray(x))
    return found


def agree(got, want, tolerance=1e-11):
    for x, y in zip(numbers(got), numbers(want), strict=True):
        size = np.abs(y[np.isfinite(y)]).max()
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * size)


# Each program takes a second to compile: all options with one map, and each map with masks.
FEW = ("causal, masks", "full, masks")


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n, phi in MAPS.items() for o in (OPTIONS if n == "positive" else FEW)
     if phi.causal or "causal" not in o],
)  # fmt: skip
def test_linear_attention_is_numpys(jax, name, options):
    phi, options = MAPS[name], OPTIONS[options]
    want = linattn.linear_attention(*HOST, phi, **options)
    agree(traced(jax, linattn.linear_attention, HOST, options, phi), want)


@pytest.mark.parametrize("options", LOOPS)
def test_windows_stops_and_packed_sequences_are_numpys(jax, options):
    phi, options = MAPS["positive"], LOOPS[options]
    want = linattn.linear_attention(*HOST, phi, **options)
    agree(traced(jax, linattn.linear_attention, HOST, options, phi), want)


def test_decay_over_any_number_of_last_tokens():
    """As a window of one token needs it: from the second token on, and from the first."""
    problem = linear_problem(*HOST, MAPS["positive"], is_causal=True, log_decay=DECAY)
    gap = np.arange(LENGTH) % 7
    gap[:3] += [0, 1, 0]
    want = [DECAY[:, i + 1 - n : i + 1].sum(axis=-1) for i, n in enumerate(gap)]
    got = traced_loops._elapsed(problem, gap)[..., 0]
    np.testing.assert_allclose(got, np.stack(want, axis=-1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["cosformer", "rotated"])
@pytest.mark.parametrize("options", PLACED)
def test_maps_of_positions_are_numpys(jax, name, options):
    """Tokens that are moved keep their positions."""
    phi, options = MAPS[name], PLACED[options]
    want = linattn.linear_attention(*HOST, phi, **options)
    agree(traced(jax, linattn.linear_attention, HOST, options, phi), want)


@pytest.mark.parametrize(("name", "window"), [("positive", 7), ("cosformer", None)])
def test_lower_right_is_numpys(jax, name, window):
    """Beside a window the first queries may see no key; others stand at the last positions."""
    query, (_, key, value) = HOST[0], HOST[..., 60:, :]
    if window is None:
        query, (_, key, value) = query[..., 60:, :], HOST
    options: dict[str, Any] = {"is_causal": "lower_right", "exact_window": window}
    want = linattn.linear_attention(query, key, value, MAPS[name], **options)
    call = partial(linattn.linear_attention, **options)
    agree(traced(jax, call, (query, key, value), {}, MAPS[name]), want)


@pytest.mark.parametrize("interval", [64, 50, 1000])
def test_states_on_the_way_are_numpys(jax, interval):
    options: dict[str, Any] = {"return_states_every": interval}
    attend = partial(linattn.linear_attention, is_causal=True, **options)
    recur = partial(linattn.linear_recurrence, update_rule="gated", **options)
    for call, more, phi in ((attend, {}, [MAPS["positive"]]), (recur, {"log_decay": DECAY}, [])):
        want = call(*HOST, *phi, **more)
        found = traced(jax, call, HOST, more, *phi)
        agree(found[0], want[0])
        for x, y in zip(found[1], want[1], strict=True):
            if isinstance(y, linattn.State):
                assert x.length == y.length
                x, y = (s.kvz * np.exp(s.log_scale)[..., None] for s in (x, y))
            np.testing.assert_allclose(x, y, rtol=1e-11)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_packed_states_go_on(jax, lead):
    """Some states have no axis of heads."""
    phi, borders = MAPS["positive"], np.array(BORDERS)
    kvz = np.exp(RNG.standard_normal((5, *lead, 8, DIM + 1)))
    state = linattn.State(kvz, np.zeros(kvz.shape[:-1]), 7)
    for options in ({"is_causal": True}, {}):
        options |= {"cu_seqlens": borders.tolist(), "return_state": True}
        want = linattn.linear_attention(*HOST, phi, initial_state=state, **options)

        def attend(sums, *x, options=options):
            before = linattn.State(*sums, 7)
            return linattn.linear_attention(*x, phi, initial_state=before, **options)

        agree(jax.jit(attend)(state[:2], *HOST), want)


@pytest.mark.parametrize("borders", [None, BORDERS])
@pytest.mark.parametrize("rule", RULES)
def test_recurrences_are_numpys(jax, rule, borders):
    """States before have no axis of heads: of packed sequences, theirs is no such axis."""
    options = {"update_rule": rule, "return_state": True, "cu_seqlens": borders, **RULES[rule]}
    state = RNG.standard_normal((1 if borders is None else len(borders) - 1, DIM, DIM))
    options["initial_state"] = state if borders else state[0]
    want = linattn.linear_recurrence(*HOST, **options)
    agree(traced(jax, linattn.linear_recurrence, HOST, options), want)


@pytest.mark.parametrize("options", EXACT)
def test_exact_attention_is_numpys(jax, options):
    options = EXACT[options]
    want = linattn.softmax_attention(*HOST, **options)
    agree(traced(jax, linattn.softmax_attention, HOST, options), want)


def test_a_state_without_heads_goes_on(jax):
    """Its features are as many as there are heads."""
    phi = PositiveFeatures(DIM, 2, rng=0)
    kvz = np.exp(RNG.standard_normal((2, DIM + 1)))
    for options in ({"is_causal": True}, {}, {"key_stop": STOPS}):

        def attend(kvz, *x, options=options):
            before = linattn.State(kvz, 0 * kvz[..., 0], 7)
            return linattn.linear_attention(*x, phi, initial_state=before, **options)

        agree(jax.jit(attend)(kvz, *HOST), attend(kvz, *HOST))


def test_packed_sequences_of_signed_features_are_numpys(jax):
    """Nobody counts negative denominators in a program."""
    phi, options = TrigonometricFeatures(DIM, 32, scale=0.1, rng=0), {"cu_seqlens": BORDERS}
    want = linattn.linear_attention(*HOST, phi, log_decay=-0.02, **options)
    agree(
        traced(jax, partial(linattn.linear_attention, **options), HOST, {"log_decay": -0.02}, phi),
        want,
    )


def test_a_state_goes_on(jax):
    phi = MAPS["cosformer"]
    whole = linattn.linear_attention(*HOST, phi, is_causal=True)
    _, state = linattn.linear_attention(*HOST[..., :100, :], phi, return_state=True)

    def rest(state, *arrays):
        return linattn.linear_attention(*arrays, phi, is_causal=True, initial_state=state)

    length = state.length
    call = jax.jit(lambda sums, *x: rest(linattn.State(*sums, length, state.fingerprint), *x))
    agree(call(state[:2], *HOST[..., 100:, :]), whole[..., 100:, :])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["positive", "exact"])
def test_gradients_are_numpys(jax, name, is_causal):
    phi = [] if name == "exact" else [MAPS[name]]
    kind = "softmax" if name == "exact" else "linear"
    call = getattr(linattn, f"{kind}_attention")
    options = {"is_causal": is_causal, "key_mask": MASK}
    mask = jax.numpy.asarray(MASK)

    def loss(query, key, value, bias):
        weights = {"key_mask": mask, "key_bias": bias}
        output = call(query, key, value, *phi, is_causal=is_causal, **weights)
        return (output * HOST[0]).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*HOST, BIAS)
    pullback = getattr(linattn, f"{kind}_attention_vjp")(*HOST, *phi, key_bias=BIAS, **options)[1]
    agree(found, pullback(HOST[0]), 1e-9)


PULLED: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix and window": ("linear", LOOPS["window, prefix"]),
    "packed": ("linear", LOOPS["packed, causal"]),
    "stops": ("softmax", EXACT["stops"]),
}


@pytest.mark.parametrize("name", PULLED)
def test_pullbacks_are_loops_too(jax, name):
    kind, options = PULLED[name]
    phi = [MAPS["positive"]] if kind == "linear" else []
    pulled, call = (getattr(linattn, f"{kind}_attention{end}") for end in ("_vjp", ""))
    want = pulled(*HOST, *phi, **options)[1](HOST[0])
    moving = {n: x for n, x in options.items() if hasattr(x, "shape") and n != "key_stop"}
    fixed = {n: x for n, x in options.items() if n not in moving}

    def through(x, moving):
        return pulled(*x, *phi, **fixed, **moving)[1](jax.numpy.asarray(HOST[0]))

    def loss(x, moving):
        return (call(*x, *phi, **fixed, **moving) * HOST[0]).sum()

    agree(jax.jit(through)(HOST, moving), want, 1e-10)
    agree([*jax.jit(jax.grad(loss))(HOST, moving)], want, 1e-10)


COUNTED = {
    **{f"linear, {name}": (MAPS["positive"], o) for name, o in LOOPS.items()},
    **{f"{name}, causal": (phi, {"is_causal": True}) for name, phi in MAPS.items()},
    **{f"cosformer, {name}": (MAPS["cosformer"], o) for name, o in PLACED.items()},
    "positive, full": (MAPS["positive"], {}),
    **{f"softmax, {name}": (None, o) for name, o in EXACT.items()},
    **{f"recurrence, {name}": (name, o) for name, o in RULES.items()},
    "recurrence, packed": ("gated", RULES["gated"] | {"cu_seqlens": BORDERS}),
}
SHORT, LONG = 515, 2051


DIFFERENTIATED = (
    *("positive, causal", "positive, full", "linear, window, full", "linear, stops"),
    *("linear, window, stops", "linear, window, packed", "linear, packed, two sides"),
    *("cosformer, stops", "softmax, causal", "softmax, window"),
    *("recurrence, gated_delta", "recurrence, packed"),
)
PULLED_BACK = ("positive, causal", "linear, window, stops", "softmax, packed", "recurrence, packed")


def operations(program):
    """Count the operations of a program, those of its loops and branches too."""
    count = len(program.eqns)
    for equation in program.eqns:
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inside = getattr(part, "jaxpr", part)
                count += operations(inside) if hasattr(inside, "eqns") else 0
    return count


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "") for name in COUNTED]
    + [(name, "grad") for name in DIFFERENTIATED]
    + [(name, "_vjp") for name in PULLED_BACK],
)
def test_the_program_has_as_many_operations_at_every_length(jax, name, how):
    """It is compiled in seconds, as they are few."""
    phi, options = COUNTED[name]
    fixed = {n: x for n, x in options.items() if not n.startswith("return")}

    def stretched(name, x, length):
        """Rows of an option, as many as there are tokens; borders and stops at their places."""
        if isinstance(x, list):
            return [b * length // LENGTH for b in x]
        if hasattr(x, "shape") and x.shape[-1] == LENGTH:
            rows = np.resize(x, (*x.shape[:-1], length))
            return np.sort(rows) * length // LENGTH if name == "key_stop" else rows
        return x

    def count(length):
        given = {n: stretched(n, x, length) for n, x in fixed.items()}
        moving = {n: given.pop(n) for n in [*given] if n in ("key_mask", "key_bias", *BIASES)}
        moving |= {
            n: given.pop(n) for n in [*given] if hasattr(given[n], "dtype") and n != "key_stop"
        }
        kind, more = "softmax_attention", []
        if isinstance(phi, str):
            kind, given["update_rule"] = "linear_recurrence", phi
        elif phi is not None:
            kind, more = "linear_attention", [phi]
        call = getattr(linattn, kind + how.removeprefix("grad"))

        def attend(x, options):
            found = call(x, x, x, *more, **given, **options)
            return found[1](x) if how == "_vjp" else found.sum()

        function = jax.grad(attend) if how == "grad" else attend
        return operations(jax.make_jaxpr(function)(np.ones((2, length, DIM)), moving).jaxpr)

    assert count(LONG) == count(SHORT) < 5000


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_that_later_keys_hide_is_exact(jax, dtype):
    """The other arm of the branch."""
    phi = PositiveFeatures(64, 64, rng=0)
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, LENGTH, 64))
    key[:, :200] *= 40
    want = linattn.linear_attention(query, key, value, phi, is_causal=True)
    given = [x.astype(dtype) for x in (query, key, value)]
    got = traced(jax, linattn.linear_attention, given, {"is_causal": True}, phi)
    np.testing.assert_allclose(got, want, atol=1e-5 if dtype == "float32" else 1e-12)
    if dtype == "float32":
        return
    gradients = jax.jit(
        jax.grad(lambda *x: linattn.linear_attention(*x, phi, is_causal=True).sum(), (0, 1, 2))
    )(query, key, value)
    pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=True)[1]
    for found, wanted in zip(gradients, pullback(np.ones_like(want)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-9 * np.abs(wanted).max())


def test_a_small_denominator_has_a_gradient(jax):
    """Rows so small are accepted: of their square nothing is left."""
    query, key, value = HOST[..., :140, :]
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    key[:, :100] *= 14

    def loss(*x):
        return linattn.linear_attention(*x, MAPS["positive"], is_causal=True).sum()

    given = [x.astype("float32") for x in (query, key, value)]
    output, pullback = linattn.linear_attention_vjp(
        query, key, value, MAPS["positive"], is_causal=True
    )
    want = pullback(np.ones_like(output))
    agree(jax.jit(jax.grad(loss, (0, 1, 2)))(*given), want, 1e-4)
    torch, found = pytest.importorskip("torch"), []
    for dtype in ("float32", "float64"):
        leaves = [torch.tensor(x.astype(dtype), requires_grad=True) for x in (query, key, value)]
        output = linattn.linear_attention(*leaves, MAPS["positive"], is_causal=True)
        once = torch.autograd.grad((output**2).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in once), leaves))
    agree(*found, 1e-2)


@pytest.mark.parametrize("name", ["positive", "elu", "exact", "window"])
def test_no_hidden_nan_reaches_a_row_and_every_other_does(jax, name):
    options: dict[str, Any] = {"is_causal": True}
    if name == "window":
        options = {"local_window_size": (290, 0)}
    phi = [MAPS[name]] if name in MAPS else []
    call = linattn.linear_attention if phi else linattn.softmax_attention
    compiled = jax.jit(lambda *x: call(*x, *phi, **options))
    for which in (1, 2):
        given = HOST.copy()
        given[which, :, 250:] = np.nan
        want = call(*given, *phi, **options)
        hidden = np.broadcast_to(np.arange(LENGTH)[:, None] >= 250, want.shape)
        np.testing.assert_array_equal(np.isnan(want), hidden)
        np.testing.assert_array_equal(np.isnan(compiled(*given)), hidden)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_under_a_far_bias_of_minus_infinity_stays(jax, is_causal):
    stops = np.minimum(12 * (np.arange(LENGTH) // 12 + 1), LENGTH)
    options: dict[str, Any] = {"is_causal": True} if is_causal else {"key_stop": stops}
    options |= {"exact_window": 2, "window_bias": np.zeros(5), "far_bias": (-np.inf, -np.inf)}
    for which in (1, 2):
        given = HOST.copy()
        given[which, :, 45] = np.nan
        want = linattn.linear_attention(*given, MAPS["positive"], **options)
        assert 0 < np.isnan(want[0, :, 0]).sum() < 8
        got = traced(jax, linattn.linear_attention, given, options, MAPS["positive"])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("name", ["positive", "elu", "exact"])
def test_no_hidden_nan_reaches_a_gradient(jax, name):
    """A product with a weight of 0 would make NaN of it."""
    given, phi = HOST.copy(), [MAPS[name]] if name in MAPS else []
    given[1:, ~MASK] = np.nan
    kind = "linear" if phi else "softmax"
    call, options = getattr(linattn, f"{kind}_attention"), {"is_causal": True, "key_mask": MASK}
    output, pullback = getattr(linattn, f"{kind}_attention_vjp")(*given, *phi, **options)
    options["key_mask"] = jax.numpy.asarray(MASK)
    gradients = jax.grad(lambda *x: call(*x, *phi, **options).sum(), (0, 1, 2))
    arrays, want = [*map(jax.numpy.asarray, given)], pullback(np.ones_like(output))
    assert all(np.isfinite(x).all() for x in want)
    agree(gradients(*arrays), want, 1e-12)
    agree(jax.jit(gradients)(*arrays), want)


def test_batches_are_mapped(jax):
    phi = MAPS["positive"]

    def attend(query, key, value):
        return linattn.linear_attention(query, key, value, phi, is_causal=True)

    agree(jax.jit(jax.vmap(attend))(*HOST), attend(*HOST))
    tangents = HOST[::-1].copy()
    _, slope = jax.jit(lambda *x: jax.jvp(attend, x, tuple(tangents)))(*HOST)
    ahead, behind = (attend(*(HOST + step * tangents)) for step in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, atol=1e-6)


def test_what_is_not_compiled_makes_no_program_of_its_own(jax):
    """Eager gradients would compile a loop anew in every call."""
    phi, seen = MAPS["elu"], []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: seen.append(name == event)
    )
    x = jax.numpy.asarray(HOST[0][:, :150])
    slope = jax.grad(lambda a: linattn.linear_attention(a, a, a, phi, is_causal=True).sum())
    slope(x)
    before = sum(seen)
    slope(x)
    assert sum(seen) == before
