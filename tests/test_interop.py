"""Gradients of frameworks: their own through the generic code, and linattn's in their place."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps
from tests import option_draws
from tests.attentions import maps
from tests.test_fuzz_options import called

pytestmark = pytest.mark.frameworks

# Arrays are unpacked into their places, which no type checker can follow.
linear: Any = linattn.linear_attention
linear_vjp: Any = linattn.linear_attention_vjp
softmax_vjp: Any = linattn.softmax_attention_vjp

DIM = 4
_RNG = np.random.default_rng(1)
MAPS: dict[str, Any] = {
    **maps(DIM, 16, "positive", "hyperbolic", "activation", "elu", "relu", "taylor"),
    "fourier": feature_maps.RandomFourierFeatures(DIM, 256, bandwidth=3.0, rng=0),
    "fourier-normalized": feature_maps.RandomFourierFeatures(DIM, 256, normalize=True, rng=0),
    "squared-relu": feature_maps.ActivationFeatures(DIM, 32, activation="squared_relu", rng=0),
    "polynomial": feature_maps.PolynomialFeatures(DIM, 4),
    "cosformer": feature_maps.CosformerFeatures(DIM, max_length=64),
    "hedgehog": feature_maps.HedgehogFeatures(_RNG.standard_normal((3, DIM))),
    "reparametrized": feature_maps.Reparametrized(
        feature_maps.PositiveFeatures(DIM, 16, rng=0), np.full(DIM, 0.3), np.full(DIM, -0.1)
    ),
    "calibrated": feature_maps.CalibratedFeatures(
        *(_RNG.standard_normal(shape) for shape in ((3, DIM), 3, (3, DIM), 3)),
        tilt=np.zeros(DIM),
        power=0.8,
    ),
}
FEW = ("positive", "elu", "taylor", "reparametrized")
KINKED = {"fourier-normalized", "relu", "activation", "squared-relu"}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax() -> Any:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jax.config.update("jax_enable_x64", True)
    return jax


def load(framework: str) -> Any:
    return importlib.import_module(f"linattn.interop.{framework}")


def inputs(length=13, others=13):
    """Query, key, value, a cotangent, and a mask that leaves the first queries nothing."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 3, length, DIM))
    key, value = rng.standard_normal((2, 2, 1, others, DIM))  # heads share a key and a value
    grad = rng.standard_normal((2, 3, length, DIM))
    mask = rng.random((2, 1, others)) < 0.7
    mask[0, 0, :3] = False
    return (query, key, value), grad, mask


def agree(gradients, expected, tolerance=1e-10):
    for gradient, wanted in zip(gradients, expected, strict=True):
        gradient = np.asarray(gradient)
        assert gradient.shape == wanted.shape
        assert np.linalg.norm(gradient - wanted) <= tolerance * np.linalg.norm(wanted)


# torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", FEW)
def test_torch_differentiates_the_generic_path_and_the_function(torch, name, is_causal):
    interop = load("torch")
    arrays, grad, mask = inputs()
    settings = {"is_causal": is_causal, "chunk_size": 5}
    _, pullback = linear_vjp(*arrays, MAPS[name], key_mask=mask, **settings)
    expected = pullback(grad)
    for function in (linear, interop.linear_attention):
        leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
        output = function(*leaves, MAPS[name], key_mask=torch.tensor(mask), **settings)
        output.backward(torch.tensor(grad))
        agree([leaf.grad for leaf in leaves], expected)


VISIBLE: list[dict[str, Any]] = [
    {"prefix_length": 3},
    {"key_stop": np.array([[0, 1, 2, 2, 5, 7, 8, 9, 9], [9] * 9])[:, None]},
    {"cu_seqlens": [0, 4, 9], "is_causal": True},
    {"key_lengths": [[4], [9]]},
]


@pytest.mark.parametrize("options", VISIBLE, ids=lambda options: next(iter(options)))
def test_torch_sees_what_the_call_says(torch, options):
    interop = load("torch")
    arrays, grad, _ = inputs(9, 9)
    (expected_out, after), pullback = linear_vjp(
        *arrays, MAPS["positive"], **options, return_state=True
    )
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    out, state = interop.linear_attention(*leaves, MAPS["positive"], **options, return_state=True)
    assert (tuple(state.kvz.shape), state.length) == (after.kvz.shape, after.length)
    out.backward(torch.tensor(grad))
    np.testing.assert_allclose(out.detach().numpy(), expected_out, rtol=1e-9, atol=1e-12)
    agree([leaf.grad for leaf in leaves], pullback(grad))


def test_jax_sees_what_the_call_says(jax):
    interop, options = load("jax"), VISIBLE[2]
    arrays, grad, _ = inputs(9, 9)
    _, pullback = linear_vjp(*arrays, MAPS["positive"], **options)

    def loss(*arrays):
        return (interop.linear_attention(*arrays, MAPS["positive"], **options) * grad).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*map(jax.numpy.asarray, arrays))
    agree(gradients, pullback(grad))


def test_torch_states_carry_gradients(torch):
    interop = load("torch")
    arrays, grad, _ = inputs()
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    feature_map = MAPS["positive"]
    first, second = ([x[..., rows, :] for x in leaves] for rows in (slice(0, 6), slice(6, None)))
    out, state = interop.linear_attention(*first, feature_map, is_causal=True, return_state=True)
    assert state.length == 6
    rest = interop.linear_attention(*second, feature_map, is_causal=True, initial_state=state)
    torch.cat([out, rest], dim=-2).backward(torch.tensor(grad))
    _, pullback = linear_vjp(*arrays, feature_map, is_causal=True)
    agree([leaf.grad for leaf in leaves], pullback(grad))


def test_torch_refuses_what_it_cannot_do(torch):
    interop = load("torch")
    arrays, _, _ = inputs()
    query, key, value = (torch.tensor(a, requires_grad=True) for a in arrays)
    steps = feature_maps.ActivationFeatures(DIM, 8, activation="heaviside", rng=0)
    with pytest.raises(NotImplementedError, match="steps"):
        interop.linear_attention(query, key, value, steps)
    for call in (
        lambda query: interop.linear_attention(query, key, value, MAPS["positive"]),
        lambda query: interop.softmax_attention(query, key, value),
    ):
        gradient = torch.func.grad(lambda query, call=call: call(query).square().sum())
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.func.grad(lambda query, of=gradient: of(query).square().sum())(query.detach())


def test_torch_keeps_only_the_arguments(torch):
    """What autograd saves for the backward pass, in bytes of the arguments."""
    interop = load("torch")
    leaves = [torch.randn(2, 512, 8, requires_grad=True) for _ in range(3)]
    feature_map = feature_maps.PositiveFeatures(8, 64, rng=0)
    kept = {}
    for function in (linear, interop.linear_attention):
        saved: dict[int, int] = {}

        def pack(tensor: Any, saved: dict[int, int] = saved) -> Any:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output: Any = function(*leaves, feature_map, is_causal=True)
        kept[function] = sum(saved.values()) / sum(leaf.nbytes for leaf in leaves)
        del output
    assert max(kept.values()) <= 1


# JAX --------------------------------------------------------------------------------------------


def test_jax_maps_pullbacks_over_batches(jax):
    arrays, grad, mask = inputs()
    settings = {"is_causal": True, "chunk_size": 8}
    _, pullback = linear_vjp(*arrays, MAPS["positive"], key_mask=mask, **settings)
    points = [jax.numpy.asarray(a) for a in (*arrays, grad, mask)]

    def pulled(query, key, value, grad, mask):
        return linear_vjp(query, key, value, MAPS["positive"], key_mask=mask, **settings)[1](grad)

    agree(jax.jit(jax.vmap(pulled))(*points), pullback(grad))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_jax_takes_the_arrays_of_numpy(jax, kind):
    interop, (arrays, grad, mask) = load("jax"), inputs()
    options: dict[str, Any] = {"key_mask": mask}
    if kind == "linear":
        options["feature_map"] = MAPS["positive"]
    else:
        options |= {"window_bias": np.arange(3.0), "far_bias": (np.asarray(-0.5), np.asarray(0.5))}
    function = getattr(interop, f"{kind}_attention")
    pullback = {"linear": linear_vjp, "softmax": softmax_vjp}[kind](*arrays, **options)
    expected = pullback[1](grad)

    def attend(*points):
        return function(*points, **options)

    assert isinstance(attend(*arrays), jax.Array)
    agree([attend(*arrays)], pullback[:1])
    # JAX hands NumPy's arrays to the function, its pullback and back as classes of its own.
    agree(jax.vjp(attend, *arrays)[1](grad), expected)
    agree(jax.vjp(attend, *map(jax.numpy.asarray, arrays))[1](grad), expected)
    query, *others = arrays

    def loss(query):
        return (attend(query, *others) * grad).sum()

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        agree([gradient(query)], expected[:1])


def test_jax_takes_a_state_of_numpy(jax):
    interop, (arrays, grad, _) = load("jax"), inputs()
    feature_map = MAPS["positive"]
    _, state = linear(*arrays, feature_map, return_state=True)
    expected, pullback = linear_vjp(*arrays, feature_map, initial_state=state)

    def attend(*points):
        return interop.linear_attention(*points, feature_map, initial_state=state)

    agree([attend(*arrays)], [expected])
    agree(jax.vjp(attend, *arrays)[1](grad), pullback(grad)[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: np.ma.masked_array(x), "query must be an ordinary array, got numpy.ma"),
        (lambda x: x.tolist(), "query must be an array of NumPy.*, got list"),
        (lambda x: x.astype(int), "query must have dtype float16.*, got int"),
    ],
    ids=["masked", "list", "int"],
)
def test_jax_refuses_what_the_function_refuses(jax, change, message):
    (query, key, value), _, _ = inputs()
    for function, options in (("linear_attention", (MAPS["elu"],)), ("softmax_attention", ())):
        with pytest.raises(TypeError, match=message):
            getattr(load("jax"), function)(change(query), key, value, *options)
    with pytest.raises(TypeError, match=r"initial_state must be a linattn\.State, got int"):
        load("jax").linear_attention(query, key, value, MAPS["elu"], initial_state=3)


@pytest.mark.parametrize("name", ["positive", "taylor", "cosformer", "hedgehog"])
def test_closed_forms_of_traced_arrays_say_that_they_are_of_the_host(jax, name):
    point = jax.numpy.asarray(inputs()[0][0])
    with pytest.raises(TypeError, match=r"x must have values, got a traced.*outside of jax\.jit"):
        jax.jit(MAPS[name].kernel)(point, point)


def test_diagnostics_of_traced_arrays_say_that_they_are_of_the_host(jax):
    point = jax.numpy.asarray(inputs()[0][0])

    @jax.jit
    def norms(x):
        return linattn.diagnostics.attended_norms(x, x)

    with pytest.raises(TypeError, match="must have values, got a traced"):
        norms(point)


BIASED = np.linspace(-1, 1, 9)
BIASED[4] = -np.inf
SEEN: list[dict[str, Any]] = [
    {"prefix_length": 3, "key_bias": BIASED},
    {"causal_block": 4},
    {"key_stop": np.array([0, 1, 2, 2, 5, 7, 8, 9, 9])},
    {"cu_seqlens": [0, 4, 9], "is_causal": True, "key_bias": BIASED},
    {"local_window_size": (2, 1), "key_bias": BIASED},
    {
        "key_lengths": np.array([[4], [9]]),
        "window_bias": np.linspace(-1, 1, 15).reshape(3, 5),
        "far_bias": (-0.5, np.array([0.3, -np.inf, 0.1])),
    },
    {"sinks": 2, "local_window_size": (2, 0), "is_causal": True},
]


def softmax_case(options):
    """Arrays of a call, and its output and gradients without a framework."""
    arrays, grad, _ = inputs(9, 9)
    output, pullback = softmax_vjp(*arrays, **options)
    if "key_bias" in options:
        arrays = (*arrays, options["key_bias"])
    return arrays, grad, output, pullback(grad)


def in_library(options, make):
    """Arrays of a framework for those that it may differentiate or trace."""
    options = {name: option for name, option in options.items() if name != "key_bias"}
    if "window_bias" in options:
        left, right = options["far_bias"]
        options |= {
            "window_bias": make(options["window_bias"]),
            "far_bias": (left, make(right)),
        }
    return options


@pytest.mark.parametrize("options", SEEN, ids=lambda options: next(iter(options)))
def test_softmax_attention_of_torch_sees_what_the_call_says(torch, options):
    interop = load("torch")
    arrays, grad, expected_out, expected = softmax_case(options)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    query, key, value, *bias = leaves
    weights = dict(zip(("key_bias",), bias, strict=False))
    settings = in_library(options, lambda a: torch.tensor(a, requires_grad=True))
    out = interop.softmax_attention(query, key, value, **weights, **settings)
    out.backward(torch.tensor(grad))
    np.testing.assert_allclose(out.detach().numpy(), expected_out, rtol=1e-10, atol=1e-12)
    agree([leaf.grad for leaf in leaves], expected)


@pytest.mark.parametrize("options", [SEEN[3], SEEN[5]], ids=lambda o: next(iter(o)))
def test_softmax_attention_of_jax_sees_what_the_call_says(jax, options):
    interop = load("jax")
    arrays, grad, expected_out, expected = softmax_case(options)

    def attend(query, key, value, *bias):
        weights = dict(zip(("key_bias",), bias, strict=False))
        settings = in_library(options, jax.numpy.asarray)
        return interop.softmax_attention(query, key, value, **weights, **settings)

    out, vjp = jax.vjp(jax.jit(attend), *map(jax.numpy.asarray, arrays))
    agree([out], [expected_out])
    agree(vjp(jax.numpy.asarray(grad)), expected)


# Names ------------------------------------------------------------------------------------------


def test_the_backward_pass_is_done_in_the_precision_of_the_forward_pass(torch, jax):
    phi = MAPS["elu"]
    arrays = [x.astype(np.float32) for x in inputs(3, 3)[0]]

    def loss(framework, like, query, key, value):
        with linattn.config(precision="float64"):
            state = linattn.init_state(phi, DIM, batch_shape=(2, 1), like=like)
            output, after = load(framework).linear_attention(
                query, key, value, phi, is_causal=True, initial_state=state, return_state=True
            )
        log = after.log_scale
        if framework == "torch":
            scale = torch.exp(log.detach())
        else:
            scale = jax.numpy.exp(jax.lax.stop_gradient(log))
        return (output**2).sum() + (after.kvz[..., :-1] * scale[..., None]).sum()

    tensors = [torch.asarray(x).requires_grad_() for x in arrays]
    loss("torch", tensors[0].detach(), *tensors).backward()
    rows = [jax.numpy.asarray(x) for x in arrays]
    gradients = jax.jit(jax.grad(lambda *qkv: loss("jax", rows[0], *qkv), argnums=(0, 1, 2)))(*rows)
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)
    agree(gradients, [tensor.grad.numpy() for tensor in tensors], 1e-6)


def flat(results):
    """List what a call returns: arrays, and what states know of themselves."""
    if not isinstance(results, tuple | list):
        return [results]
    return [x for each in results for x in flat(each)]


DRAWN: dict[str, Any] = {
    "linear_attention": option_draws.draw_linear,
    "softmax_attention": option_draws.draw_softmax,
    "linear_recurrence": option_draws.draw_recurrence,
}


@pytest.mark.filterwarnings("ignore:feature_map was fitted to other keys")
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_calls_of_torch_are_the_plain_ones(torch, name):
    """Results, on a tape too, and their shapes, which torch asks for before it has them."""
    function, plain, count = getattr(load("torch"), name), getattr(linattn, name), 0

    def taped(*given, **options):
        return plain(*(x.requires_grad_() for x in given[:3]), *given[3:], **options)

    known = inspect.signature(function).parameters
    for seed in range(100):
        case = DRAWN[name](seed)
        # States of a map of others may be on other scales.
        is_own = type(case.feature_map).__name__ == "OwnFeatures"
        is_known = (case.options | case.returns).keys() <= known.keys()
        is_narrow, refused = case.dtype in option_draws.NARROW, option_draws.refusals(case)
        if is_own or is_narrow or refused or not is_known:
            continue
        results, count = [], count + 1
        on_tape = function if option_draws.no_gradient(case) else taped
        for case.library, each in (("numpy", plain), ("torch", function), ("torch", on_tape)):
            results.append(flat(called(case, each, **case.returns)))
        with torch._subclasses.FakeTensorMode():
            fake = flat(called(case, function, **case.returns))
        tolerance = 1e-8 if case.dtype == "float64" else 1e-3
        for want, got, again, promised in zip(*results, fake, strict=True):
            if not hasattr(want, "dtype"):
                assert got == again == promised == want, case
                continue
            assert got.shape == promised.shape, case
            assert str(got.dtype) == str(promised.dtype) == f"torch.{want.dtype}", case
            atol = tolerance * np.abs(want[np.isfinite(want)]).max(initial=0)
            for x in (got, again.detach()):
                np.testing.assert_allclose(x, want, rtol=tolerance, atol=atol, err_msg=repr(case))
    assert count > 15


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_signatures_are_those_of_the_functions(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    module = load(framework)
    functions = [name for name in module.__all__ if name != "Attention"]
    assert {"linear_attention", "softmax_attention"} <= {*functions}
    assert module.__doc__
    no_gradient = {
        "linear_attention": {
            *("return_log_normalizer", "return_states_every"),
            *("exact_window", "exact_clusters", "window_bias", "far_bias", "sinks"),
        },
        "softmax_attention": {"return_log_normalizer"},
        "linear_recurrence": set[str](),
    }
    for name in functions:
        function = getattr(module, name)
        own = [*inspect.signature(function).parameters]
        known = inspect.signature(getattr(linattn, name)).parameters
        if framework == "jax":  # whose functions pass all others on
            assert own[-1] == "options"
            assert {*own[:-1]} < {*known}
            continue
        assert own == [parameter for parameter in known if parameter not in no_gradient[name]]
        assert inspect.getdoc(function)


@pytest.mark.parametrize("name", sorted({*MAPS} - KINKED))
def test_gradients_of_frameworks_where_tokens_are_zero(torch, jax, name):
    """As those of padding: a maximum of two equals would give each half of the gradient."""
    arrays, grad, _ = inputs()
    for array in arrays:
        array[..., 2:5, :] = 0
        array[..., ::2, 1] = 0
    for is_causal in (False, True):
        expected = linear_vjp(*arrays, MAPS[name], is_causal=is_causal)[1](grad)[:3]

        def attend(*given, is_causal=is_causal):
            return linear(*given, MAPS[name], is_causal=is_causal)

        tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
        attend(*tensors).backward(torch.tensor(grad))
        agree([tensor.grad for tensor in tensors], expected)
        # Seconds to compile: for one map of each kind, and of causal attention for one.
        if name == "positive" or (not is_causal and name in {"elu", "taylor", "cosformer"}):
            agree(jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3]))(*arrays, grad), expected)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_states_of_frameworks_know_their_map(framework):
    library = pytest.importorskip(framework, reason=f"{framework} is not installed")
    interop, feature_map = load(framework), feature_maps.PositiveFeatures(DIM, 12, rng=0)
    other = feature_map.redraw(1)
    make = library.tensor if framework == "torch" else library.numpy.asarray
    arrays = [make(a) for a in inputs()[0]]
    for linear_of in (interop.linear_attention, linear):
        _, state = linear_of(*arrays, feature_map, return_state=True)
        _, after = linear_of(*arrays, feature_map, initial_state=state, return_state=True)
        number = linattn.init_state(feature_map, 1, like=arrays[1]).fingerprint
        assert state.fingerprint == after.fingerprint == number
        with pytest.raises(ValueError, match="got one of another map"):
            linear_of(*arrays, other, initial_state=state)
        foreign = linattn.State(*state[:3])
        answer = linear_of(*arrays, other, initial_state=foreign, return_state=True)
        assert answer[1].fingerprint is None
    with pytest.raises(TypeError, match=r"initial_state must be a linattn\.State"):
        interop.linear_attention(*arrays, feature_map, initial_state=tuple(state[:3]))


def test_jax_traces_fingerprints(jax):
    """Within a trace a fingerprint has no value: it is carried on, and not compared."""
    feature_map = feature_maps.PositiveFeatures(DIM, 12, rng=0)
    other = feature_map.redraw(1)
    query, key, value = (jax.numpy.asarray(a) for a in inputs()[0])
    state = linattn.init_state(feature_map, value.shape[-1], batch_shape=key.shape[:-2], like=key)

    @jax.jit
    def step(query, key, value, state):
        return linattn.decode_step(query, key, value, state, feature_map)

    _, after = step(query[..., 0, :], key[..., 0, :], value[..., 0, :], state)
    assert after.fingerprint == state.fingerprint
    linattn.read_state(query, after, feature_map)
    with pytest.raises(ValueError, match="got one of another map"):
        linattn.read_state(query, after, other)
    with pytest.raises(ValueError, match="one feature map"):
        linattn.merge_states(after, linattn.init_state(other, DIM, batch_shape=(2, 1), like=key))
    jax.jit(lambda s: linattn.read_state(query, s, other))(after)

    for start in (state, linattn.State(*state[:3])):
        tokens = [jax.numpy.moveaxis(a, -2, 0) for a in (query, key, value)]
        last, rows = jax.lax.scan(lambda s, token: step(*token, s)[::-1], start, tokens)
        expected = linattn.linear_attention(query, key, value, feature_map, is_causal=True)
        agree([jax.numpy.moveaxis(rows, 0, -2)], [expected])
        assert last.fingerprint == start.fingerprint


def test_recurrences_of_jax(jax):
    """As the pullback, states and gates among them; and one by one."""
    interop, jnp = load("jax"), jax.numpy
    rng = np.random.default_rng(0)
    arrays = list(rng.standard_normal((3, 2, 5, DIM)) / 2)
    named = {"log_decay": -rng.random((2, 5)), "beta": rng.random((2, 5))}
    named |= {"initial_state": rng.standard_normal((2, DIM, DIM))}
    options: Any = {"update_rule": "gated_delta", "return_state": True}
    recurrence_vjp: Any = linattn.linear_recurrence_vjp
    results, pullback = recurrence_vjp(*arrays, **named, **options)
    names = [*named]
    given = [*map(jnp.asarray, arrays), *(jnp.asarray(named[name]) for name in names)]

    def attend(query, key, value, *rest):
        given = dict(zip(names, rest, strict=True))
        return interop.linear_recurrence(query, key, value, **given, **options)

    got, pull = jax.vjp(jax.jit(attend), *given)
    agree(got, results)
    agree(pull(tuple(got)), pullback(*results))
    agree(jax.jit(jax.vmap(attend))(*given), results)
