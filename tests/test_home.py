"""Calls on torch's and JAX's CPU arrays run on NumPy, in their memory: NumPy's bits, no copy."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, call-overload, misc, no-untyped-call"

from __future__ import annotations

import importlib
import inspect
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import EluFeatures, PositiveFeatures, ReluFeatures
from tests import option_draws, test_fuzz_options

pytestmark = pytest.mark.frameworks

DIM, LENGTH = 4, 70
PHI, ELU = PositiveFeatures(DIM, 8, rng=0), EluFeatures()


@pytest.fixture(params=["torch", "jax"])
def library(request):
    """Return functions that make an array of a library, and NumPy's of it."""
    module = pytest.importorskip(request.param)
    if request.param == "jax":
        module.config.update("jax_enable_x64", True)
        return module.numpy.asarray
    return module.asarray


def arrays(dtype="float32", count=3, lead=(2, 3), length=LENGTH):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*lead, length, DIM)).astype(dtype) for _ in range(count)]


def flat(x: Any) -> list[Any]:
    """All arrays of a result, as NumPy's."""
    if isinstance(x, tuple | list):
        return [array for part in x for array in flat(part)]
    if not hasattr(x, "ndim"):
        return []
    return [np.asarray(x.detach() if hasattr(x, "detach") else x)]


def decoded(query, key, value):
    decoder = linattn.Decoder(PHI, linattn.init_state(PHI, DIM, batch_shape=(2, 3), like=query))
    rows = [decoder.step(query[..., i, :], key[..., i, :], value[..., i, :]) for i in range(9)]
    return rows, decoder.state


def stepped(query, key, value):
    """Without leading axes, a sum of decays is a number."""
    state, decay = None, -0.1 * key[0, 0, :, 0] ** 2
    for i in range(3):
        token = query[0, 0, i], key[0, 0, i], value[0, 0, i]
        state = linattn.init_state(PHI, DIM, like=query) if state is None else state
        output, state = linattn.decode_step(*token, state, PHI, log_decay=decay[i])
    return output, state


def streamed(query, key, value):
    state = linattn.init_state(PHI, DIM, batch_shape=(2, 3), like=key)
    state = linattn.update_state(state, key, value, PHI)
    both = linattn.merge_states(state, state)
    return linattn.read_state(query, both, PHI), both


def pulled(function, query, key, value, *phi, **options):
    output, pullback = function(query, key, value, *phi, **options)
    return output, pullback(value)


RECUR: Any = {"update_rule": "delta"}
CALLS: dict[str, Any] = {
    "full": lambda *x: linattn.linear_attention(*x, PHI),
    "causal, state": lambda *x: linattn.linear_attention(
        *x, PHI, is_causal=True, return_state=True, return_log_normalizer=True
    ),
    "states": lambda *x: linattn.linear_attention(*x, ELU, is_causal=True, return_states_every=20),
    "window": lambda *x: linattn.linear_attention(*x, PHI, exact_window=8, sinks=2),
    "packed": lambda *x: linattn.linear_attention(
        *x, PHI, is_causal=True, cu_seqlens=[0, 9, 40, LENGTH]
    ),
    "decay": lambda *x: linattn.linear_attention(*x, ELU, is_causal=True, log_decay=-0.1),
    "a window of softmax": lambda *x: linattn.softmax_attention(*x, local_window_size=5),
    "decoder": decoded,
    "stream": streamed,
    "steps with decay": stepped,
    "pullback": partial(pulled, linattn.linear_attention_vjp, feature_map=PHI, is_causal=True),
    "pullback of relu": partial(pulled, linattn.linear_attention_vjp, feature_map=ReluFeatures()),
    "recurrence": lambda *x: linattn.linear_recurrence(
        *x, **RECUR, beta=0.5 * x[0][..., 0] ** 0, return_state=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bits_of_numpy(library, name):
    host = arrays()
    call = CALLS[name]
    with linattn.explain() as report:
        found = call(*map(library, host))
    assert report.ran("home") == {"numpy"}
    for got, want in zip(flat(found), flat(call(*host)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("seed", range(100))
def test_drawn_calls_of_all_options_have_numpys_bits(seed):
    torch = pytest.importorskip("torch")
    case = option_draws.draw_linear(seed)
    case.library, case.dtype = "numpy", "float64" if case.dtype == "float64" else "float32"
    if option_draws.refusals(case) or type(case.feature_map).__name__ == "OwnFeatures":
        pytest.skip("is refused, or of a map of a user's")

    def run(library):
        case.library = library
        return test_fuzz_options.called(case, linattn.linear_attention, **case.returns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        found, want = run("torch"), run("numpy")
    output = found[0] if case.returns else found
    assert isinstance(output, torch.Tensor)
    np.testing.assert_array_equal(output, want[0] if case.returns else want)
    for got, wanted in zip(flat(found), flat(want), strict=True):
        # The sum of all decays is the library's own.
        np.testing.assert_allclose(got, wanted, rtol=1e-6 if got.dtype == np.float32 else 1e-15)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_gradients_of_all_options_are_numpys(library, seed):
    """By one node of torch's tape, or of JAX's; outputs of exact attention are torch's own."""
    case = option_draws.draw_gradient(seed)
    case.returns = {}
    if case.dtype == "bfloat16":
        pytest.skip("no dtype of NumPy")
    if option_draws.refusals(case) or option_draws.no_gradient(case) or not case.query.size:
        pytest.skip("is refused, or has no gradient")
    kind = "linear_attention" if case.kind == "linear" else "softmax_attention"
    host = ("key_stop", "prefix_length", "cu_seqlens", "key_lengths")

    def made(x):
        if isinstance(x, linattn.State):
            return x._replace(kvz=library(x.kvz.copy()), log_scale=library(x.log_scale.copy()))
        if isinstance(x, tuple):
            return tuple(map(made, x))
        # Some of the drawn ones are read-only.
        return library(x.copy()) if isinstance(x, np.ndarray) else x

    case.library = "numpy"
    case.precision = None
    make, wide = test_fuzz_options.arrays_of(case), case.wide
    options = {n: make(x, wide if n == "initial_state" else None) for n, x in case.options.items()}
    qkv = [make(x) for x in (case.query, case.key, case.value)]
    phi = [] if case.feature_map is None else [case.feature_map]
    output, pullback = getattr(linattn, f"{kind}_vjp")(*qkv, *phi, **options)
    cotangent = np.random.default_rng(seed).standard_normal(output.shape).astype(output.dtype)
    given = {n: x if n in host else made(x) for n, x in options.items()}
    # Gradients of a state come in between.
    present = [n for n in ("key_bias", "log_decay") if n in options]
    pulled = pullback(cotangent)
    of_weights = dict(zip(reversed(present), reversed(pulled), strict=False))
    weights = [n for n in present if np.ndim(options[n]) > 0]
    want = [*pulled[:3], *(of_weights[n] for n in weights)]
    arrays = [library(x.copy()) for x in (*qkv, *(options[n] for n in weights))]

    def attend(query, key, value, *given_weights):
        more = given | dict(zip(weights, given_weights, strict=True))
        return getattr(linattn, kind)(query, key, value, *phi, **more)

    with linattn.explain() as report:
        if hasattr(arrays[0], "requires_grad_"):
            leaves = [x.requires_grad_() for x in arrays]
            attend(*leaves).backward(library(cotangent))
            found = [x.grad for x in leaves]
            torch = pytest.importorskip("torch")
            door = getattr(importlib.import_module("linattn.interop.torch"), kind)
            if {*given} <= {*inspect.signature(door).parameters}:
                more = given | dict(zip(weights, leaves[3:], strict=True))
                output = door(*leaves[:3], *phi, **more)
                again = torch.autograd.grad(output, leaves, library(cotangent))
                for got, wanted in zip(again, found, strict=True):
                    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        else:
            jax = pytest.importorskip("jax")
            found = jax.vjp(attend, *arrays)[1](library(cotangent))
    assert report.ran("home") <= {"numpy", "torch"}
    assert report.ran("home")
    for got, wanted in zip(flat(list(found)), want, strict=True):
        size = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        tolerance = 1e-4 if case.dtype == "float32" else 1e-10
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype(library, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wide = arrays()
    host = [x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for x in wide]
    module = pytest.importorskip(library.__module__.partition(".")[0])
    kind = getattr(module if hasattr(module, "Tensor") else module.numpy, dtype)
    want = linattn.linear_attention(*host, PHI, is_causal=True)
    with linattn.explain() as report:
        got = linattn.linear_attention(*(library(x, dtype=kind) for x in wide), PHI, is_causal=True)
    assert got.dtype == kind
    assert report.ran("home") == {"numpy"}
    got = np.asarray(got.double() if hasattr(got, "detach") else got).astype(np.float64)
    np.testing.assert_array_equal(got, want.astype(np.float64))


class Squares:
    """A map of a user's, in torch's own functions."""

    num_features, dim, positive = DIM, DIM, True

    def query_features(self, x):
        return linattn.typing.Features(None, x.square())

    key_features = query_features


def test_a_map_of_a_users_own_gets_the_arrays_it_is_given():
    torch = pytest.importorskip("torch")
    given = [*map(torch.asarray, arrays("float64"))]
    for phi in (Squares(), linattn.feature_maps.RotatedFeatures(Squares())):
        with linattn.explain() as report:
            output = linattn.linear_attention(*given, phi)
        assert isinstance(output, torch.Tensor)
        assert not report.ran("home")


def test_nothing_is_copied_and_nothing_shared(library):
    host = arrays(length=4000)
    inputs = [library(x) for x in host]
    phi = EluFeatures()

    def extra(given):
        linattn.linear_attention(*given, phi, is_causal=True)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            out = linattn.linear_attention(*given, phi, is_causal=True)
            return tracemalloc.get_traced_memory()[1] - before, out
        finally:
            tracemalloc.stop()

    with linattn.config(num_threads=1):
        (of_numpy, _), (used, out) = extra(host), extra(inputs)
    assert used <= of_numpy + 60_000
    for x in inputs:
        assert not np.shares_memory(np.asarray(out), np.asarray(x))


def test_a_state_that_is_returned_is_not_the_one_that_came(library):
    query, key, value = map(library, arrays())
    state = linattn.linear_attention(query, key, value, PHI, return_state=True)[1]
    none = [x[..., :0, :] for x in (query, key, value)]
    after = linattn.linear_attention(*none, PHI, initial_state=state, return_state=True)[1]
    assert not np.shares_memory(np.asarray(after.kvz), np.asarray(state.kvz))


def test_views_with_any_strides():
    torch = pytest.importorskip("torch")
    host = arrays(length=2 * LENGTH)
    given = [torch.from_numpy(x)[..., ::2, :] for x in host]
    want = linattn.linear_attention(*(x[..., ::2, :] for x in host), PHI, is_causal=True)
    np.testing.assert_array_equal(linattn.linear_attention(*given, PHI, is_causal=True), want)
    row = torch.from_numpy(host[0][:, :1]).expand(2, 3, 2 * LENGTH, DIM)
    got = linattn.linear_attention(row, row, row, PHI)
    want = linattn.linear_attention(*[np.ascontiguousarray(row)] * 3, PHI)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_second_derivative_and_the_first_beside_a_map_that_learns():
    torch = pytest.importorskip("torch")
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 6, DIM, dtype=torch.float64)]
    bias = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    decay = (-torch.rand(2, 6, dtype=torch.float64)).requires_grad_()

    def attend(query, key, value, bias, decay):
        options = {"is_causal": True, "key_bias": bias, "log_decay": decay, "return_state": True}
        output, state = linattn.linear_attention(query, key, value, PHI, **options)
        return output, state.kvz * torch.exp(state.log_scale)[..., None]

    assert type(attend(*leaves, bias, decay)[0].grad_fn).__name__ == "AttendBackward"
    assert torch.autograd.gradcheck(attend, (*leaves, bias, decay), fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, (*leaves, bias, decay), fast_mode=True)

    def recur(query, key, value, decay):
        return linattn.linear_recurrence(query, key, value, update_rule="gated", log_decay=decay)

    assert type(recur(*leaves, decay).grad_fn).__name__ == "AttendBackward"
    assert torch.autograd.gradcheck(recur, (*leaves, decay), fast_mode=True)
    assert torch.autograd.gradgradcheck(recur, (*leaves, decay), fast_mode=True)
    soft = partial(linattn.softmax_attention, is_causal=True)
    assert soft(*leaves).shape == leaves[0].shape
    assert torch.autograd.gradcheck(soft, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(soft, leaves, fast_mode=True)


@pytest.mark.parametrize(
    "options",
    [
        {"cu_seqlens": [0, 4, 17, 30], "normalize": False},
        # torch differentiates this one: no pullback has a gradient through the log normalizer.
        {"is_causal": True, "normalize": False, "return_log_normalizer": True},
    ],
)
def test_gradients_through_states_are_numpys(options):
    """Lengths are those of the longest sequence, and ``log_scale`` is constant."""
    torch = pytest.importorskip("torch")
    host, decay = [x[..., :30, :] for x in arrays("float64")], np.array(-0.7)
    options = dict(options)
    wants_log = options.pop("return_log_normalizer", False)
    attend = partial(linattn.linear_attention, return_state=True, **options)
    vjp = partial(linattn.linear_attention_vjp, return_state=True, **options)
    (output, state), pull = vjp(*host, PHI, log_decay=decay)
    leaves = [torch.tensor(x, requires_grad=True) for x in (*host, decay)]
    more: dict[str, Any] = {"return_log_normalizer": True} if wants_log else {}
    with linattn.explain() as report:
        got, after, *log = attend(*leaves[:3], PHI, log_decay=leaves[3], **more)
    assert len(log) == wants_log
    assert report.ran("home") == (set() if wants_log else {"numpy"})
    assert after.length == state.length
    assert not after.log_scale.requires_grad
    np.testing.assert_allclose(got.detach(), output, rtol=1e-9)
    grad = np.random.default_rng(1).standard_normal(state.kvz.shape)
    found = torch.autograd.grad(after.kvz, leaves, torch.tensor(grad), allow_unused=True)
    gauge = np.exp(np.asarray(after.log_scale) - state.log_scale)[..., None]
    _, *want = pull(np.zeros_like(output), grad / gauge)
    for x, wanted in zip(found[1:], want, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-7, atol=1e-7 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["linear", "exact"])
def test_a_batch_of_nothing_has_gradients(kind):
    torch = pytest.importorskip("torch")
    leaves = [torch.zeros(0, 5, DIM, requires_grad=True) for _ in range(3)]
    phi = [PHI] if kind == "linear" else []
    call = linattn.linear_attention if phi else linattn.softmax_attention
    call(*leaves, *phi, is_causal=True).sum().backward()
    assert all(x.grad.shape == x.shape for x in leaves)


@pytest.mark.parametrize("kind", ["linear", "exact"])
def test_gradients_of_many_cotangents_at_once(kind):
    torch = pytest.importorskip("torch")
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 6, DIM, dtype=torch.float64)]
    phi = [ELU] if kind == "linear" else []
    call = linattn.linear_attention if phi else linattn.softmax_attention
    output = call(*leaves, *phi, is_causal=True)
    many = torch.randn(4, *output.shape, dtype=torch.float64)
    options: dict[str, Any] = {"retain_graph": True}
    found = torch.autograd.grad(output, leaves, many, is_grads_batched=True, **options)
    for i, one in enumerate(many):
        want = torch.autograd.grad(output, leaves, one, **options)
        for got, wanted in zip(found, want, strict=True):
            torch.testing.assert_close(got[i], wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["linear", "exact", "recurrence"])
def test_checkpointing(kind, use_reentrant):
    torch = pytest.importorskip("torch")
    leaves = [x.requires_grad_() for x in torch.randn(3, 2, 6, DIM, dtype=torch.float64)]

    def attend(query, key, value):
        if kind == "recurrence":
            return linattn.linear_recurrence(query, key, value, update_rule="linear")
        if kind == "linear":
            return linattn.linear_attention(query, key, value, PHI, is_causal=True)
        return linattn.softmax_attention(query, key, value)

    want = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
    again = partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=use_reentrant)
    again(*leaves).square().sum().backward()
    for leaf, wanted in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


EXACT: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"scale": -0.7},
    "mask": {"key_mask": np.arange(LENGTH) % 3 > 0},
    "bias": {"key_bias": np.linspace(-300, 300, LENGTH)},
    "both": {
        "key_mask": np.arange(LENGTH) % 3 > 0,
        "key_bias": np.where(np.arange(LENGTH) % 5, 1.0, -np.inf),
    },
}


@pytest.mark.parametrize("size", [1, 60])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("name", EXACT)
def test_exact_attention_is_torchs_own(name, lead, size):
    torch = pytest.importorskip("torch")
    host = [size * x for x in arrays("float64", 2, lead)] + arrays("float64", 1, lead)
    options = EXACT[name]
    want, pull = linattn.softmax_attention_vjp(*host, **options)
    given = [torch.from_numpy(x).requires_grad_() for x in host]
    tensors = {n: torch.asarray(x) if hasattr(x, "shape") else x for n, x in options.items()}
    with linattn.explain() as report:
        output = linattn.softmax_attention(*given, **tensors)
    assert report.ran("home") == {"torch"}
    np.testing.assert_allclose(output.detach(), want, atol=1e-11)
    grads = torch.autograd.grad(output, given, torch.ones_like(output))
    for got, wanted in zip(grads, pull(np.ones_like(want))[:3], strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-9 * size)
    detached = [x.detach() for x in given]
    _, norm = linattn.softmax_attention(*detached, **tensors, return_log_normalizer=True)
    want = linattn.softmax_attention(*host, **options, return_log_normalizer=True)[1]
    np.testing.assert_allclose(norm, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "axes", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 1, 2, 0)]
)
def test_exact_attention_of_any_strides(axes):
    torch = pytest.importorskip("torch")
    host = np.random.default_rng(0).standard_normal((3, 3, 4, 5, 6))
    given = [torch.from_numpy(x).permute(*axes) for x in host]
    want = linattn.softmax_attention(*(x.transpose(axes) for x in host))
    np.testing.assert_allclose(linattn.softmax_attention(*given), want, atol=1e-12)
    row = torch.from_numpy(host[0, :1]).expand(3, 4, 5, 6)
    want = linattn.softmax_attention(*[row.numpy()] * 3, is_causal=True)
    got = linattn.softmax_attention(row, row, row, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("hidden", [np.nan, np.inf])
@pytest.mark.parametrize("side", [1, 2], ids=["key", "value"])
def test_what_torchs_operator_would_get_wrong_is_numpys(side, hidden):
    torch = pytest.importorskip("torch")
    query, key, value = tokens = arrays("float64")
    tokens[side][..., LENGTH // 2 :, :] = hidden
    want = linattn.softmax_attention(query, key, value, is_causal=True)
    given = list(map(torch.from_numpy, (query, key, value)))
    got = linattn.softmax_attention(*given, is_causal=True)
    np.testing.assert_array_equal(got[..., : LENGTH // 2, :], want[..., : LENGTH // 2, :])
    mask = np.arange(LENGTH) < LENGTH // 2
    want = linattn.softmax_attention(query, key, value, key_mask=mask)
    got = linattn.softmax_attention(*given, key_mask=torch.from_numpy(mask))
    np.testing.assert_array_equal(got, want)
    none = torch.zeros(LENGTH, dtype=torch.bool)
    got = linattn.softmax_attention(*given, key_mask=none)
    np.testing.assert_array_equal(got, np.zeros(got.shape))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_where_it_must_not_be_home():
    torch = pytest.importorskip("torch")
    given = list(map(torch.from_numpy, arrays("float64", lead=(2,), length=9)))

    def homes(call):
        with linattn.explain() as report:
            call()
        return report.ran("home")

    attend = partial(linattn.linear_attention, feature_map=ELU)
    assert homes(lambda: attend(*given)) == {"numpy"}
    assert not homes(lambda: torch.func.vmap(attend)(*given))
    assert not homes(lambda: torch.func.jvp(attend, tuple(given), tuple(given)))
    assert not homes(lambda: attend(*(x.to("meta") for x in given)))
    with linattn.without_backends():
        assert not homes(lambda: attend(*given))
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(attend)(*given)
    np.testing.assert_allclose(graph(*(2 * x for x in given)), attend(*(2 * x for x in given)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], given[1])
        out = attend(dual, *given[1:])
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["linear", "softmax", "recurrence"])
def test_any_call_is_mapped(kind):
    """Arrays of options too, by ``torch.func.vmap``: what it gives one by one."""
    torch, count = pytest.importorskip("torch"), 0
    functions = linattn.linear_attention, linattn.softmax_attention, linattn.linear_recurrence
    function = functions[["linear", "softmax", "recurrence"].index(kind)]
    for seed in range(320, 345):
        case = test_fuzz_options.KINDS[kind][0](seed)
        phi = [case.feature_map] if kind == "linear" else []
        fixed, mapped = dict(case.options), {}
        for name, value in case.options.items():
            if getattr(value, "dtype", np.dtype("i")).kind in "fb" or name == "key_lengths":
                mapped[name] = torch.tensor(np.stack([fixed.pop(name)] * 2))
        host = case.query, case.key, case.value
        pairs = [[x, x[..., ::-1].copy()] for x in host]
        try:
            want = [function(*one, *phi, **case.options) for one in zip(*pairs, strict=True)]
        except test_fuzz_options.REFUSALS:
            continue
        if "exact_clusters" in fixed:
            continue
        given = [torch.tensor(np.stack(pair)) for pair in pairs]
        call = partial(called, function, phi, tensors(fixed))
        found = torch.func.vmap(call)(given, mapped)
        scale = np.max(np.abs(want), initial=0, where=np.isfinite(want))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-9 * scale, err_msg=repr(case))
        count += 1
    assert count > 15
    if kind != "recurrence":
        with pytest.raises(TypeError, match=r"prefix_length must have values, .* torch.func.vmap"):
            torch.func.vmap(lambda n: function(*host, *phi, prefix_length=n))(torch.arange(3))


@pytest.mark.parametrize("name", ["prefix_length", "key_stop", "cu_seqlens"])
def test_integers_of_torch_are_read_while_it_differentiates(name):
    torch = pytest.importorskip("torch")
    stops = {"prefix_length": 4, "key_stop": list(range(1, 10)), "cu_seqlens": [0, 4, 9]}[name]
    query, key, value = map(torch.from_numpy, arrays("float64", lead=(2,), length=9))

    def loss(query, given):
        return linattn.linear_attention(query, key, value, PHI, **{name: given}).square().sum()

    want = torch.func.grad(lambda x: loss(x, stops))(query)
    gradient = torch.func.grad(lambda x: loss(x, torch.tensor(stops)))
    np.testing.assert_array_equal(gradient(query), want)
    np.testing.assert_allclose(torch.func.vmap(gradient)(query[None])[0], want, atol=1e-12)


def called(function, phi, fixed, arrays, mapped):
    return function(*arrays, *phi, **fixed, **mapped)


def tensors(x: Any) -> Any:
    """Arrays inside options as torch's."""
    if isinstance(x, dict):
        return {name: tensors(value) for name, value in x.items()}
    if isinstance(x, tuple):
        parts = map(tensors, x)
        return type(x)(*parts) if isinstance(x, linattn.State) else tuple(parts)
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        return pytest.importorskip("torch").tensor(x)
    return x
