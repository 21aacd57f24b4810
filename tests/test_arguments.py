"""Arguments of public functions: what is wrong is refused by name, before any work."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import linattn
import linattn.automatic
import linattn.baselines
import linattn.diagnostics
import linattn.gradients
import linattn.interop
import linattn.layers
import linattn.reference
import linattn.sklearn
import linattn.stream
import linattn.testing
import linattn.testing.moments
import linattn.testing.strategies
from linattn import feature_maps as maps
from linattn.typing import Features
from tests.attentions import (
    DIM,
    LENGTH,
    MAPS,
    PHI,
    every_attention,
    filled_state,
    in_library,
    some_attentions,
    tokens,
)
from tests.entries import (
    every_argument,
    every_entry,
    every_state_call,
    good_state,
    saying,
    state_calls,
    word,
)

QUERY, KEY, VALUE = np.random.default_rng(0).standard_normal((3, 6, 4))
QKV = (QUERY, KEY, VALUE)
TOKENS = (QUERY, KEY)
LANDMARKS = maps.LandmarkFeatures.fit(*TOKENS, num_features=2, num_probes=4, rng=0)
PROJECTION = np.ones((3, 4))
any_map: Any = maps  # so that no type checker sees what is wrong


def _drawn(strategy: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **flag: strategy(**flag).example()


def _interop(framework: str, function: str, *options: Any, **more: Any) -> Callable[..., Any]:
    def call(**flag: Any) -> Any:
        module = importlib.import_module(f"linattn.interop.{framework}")
        library = importlib.import_module({"jax": "jax.numpy"}.get(framework, framework))
        return getattr(module, function)(*map(library.asarray, QKV), *options, **more, **flag)

    return call


def _module_of_torch(**flag: Any) -> Any:
    module = importlib.import_module("linattn.interop.torch").Attention
    return module(4, 2, maps.EluFeatures(), **flag)


def _call_of_module(**flag: Any) -> Any:
    return _module_of_torch()(importlib.import_module("torch").ones(2, 4), **flag)


LINEAR = (*QKV, maps.EluFeatures())
SQUARE, COLUMN = np.ones((6, 6)), np.ones((6, 1))
# Published attentions: the arrays that they take by position, and what else they need.
BASELINES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "aft_full": (QKV, {"position_bias": SQUARE}),
    "aft_local": (QKV, {"position_bias": SQUARE, "window_size": 2}),
    "aft_simple": (QKV, {}),
    "bigbird": (QKV, {"block_size": 2}),
    "clustered": (QKV, {"num_clusters": 2}),
    "compressive": (QKV, {"block_size": 2, "memory_size": 2, "compressed_size": 2}),
    "dense_synthesizer": (
        (QUERY, VALUE),
        {
            "hidden_weight": np.ones((4, 4)),
            "hidden_bias": np.ones(4),
            "weight": np.ones((6, 4)),
            "bias": np.ones(6),
        },
    ),
    "external": ((QUERY,), {"key_memory": KEY, "value_memory": VALUE}),
    "factorized_dense_synthesizer": (
        (QUERY, VALUE),
        {"first_weight": np.ones((2, 4)), "second_weight": np.ones((3, 4))},
    ),
    "factorized_random_synthesizer": ((VALUE,), {"left": COLUMN, "right": COLUMN}),
    "fixed": (QKV, {"stride": 2}),
    "improved_clustered": (QKV, {"num_clusters": 2}),
    "linformer": (QKV, {"num_landmarks": 2}),
    "local_window": (QKV, {"window_size": 2}),
    "longformer": (QKV, {"window_size": 2}),
    "nystromformer": (QKV, {"num_landmarks": 2}),
    "random_synthesizer": ((VALUE,), {"logits": SQUARE}),
    "reformer": (QKV, {"num_buckets": 2}),
    "routing": (QKV, {"num_clusters": 2}),
    "strided": (QKV, {"stride": 2}),
    "thinformer": (QKV, {}),
    "top_k": (QKV, {"num_keys": 2}),
    "truncated_svd": (QKV, {"rank": 2}),
    "wildcat": (QKV, {"num_keys": 2}),
}
ONE_LAYER: dict[str, Any] = {"num_heads": 2}
DRAW = np.random.default_rng(0)
_init: Any = linattn.layers
ENCODER, DECODER = _init.init_encoder(DRAW, 1, 4, 2), _init.init_decoder(DRAW, 1, 4, 2)
MODEL = _init.init_language_model(DRAW, 7, 1, 4, 2)
LAYER = {name.removeprefix("layers.0."): array for name, array in ENCODER.items()}
CAUSAL_LAYER = {name.removeprefix("layers.0."): array for name, array in DECODER.items()}
HEADS = {name.removeprefix("self_attn."): array for name, array in LAYER.items() if "self" in name}
X = QUERY.astype(np.float32)
# Layers: what they take by position, and what else they need.
NORM = {"weight": np.ones(X.shape[-1], X.dtype)}
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "causal_convolution": (({"weight": np.ones((X.shape[-1], 1, 2), X.dtype)}, X), {}),
    "decoder": ((DECODER, X), ONE_LAYER),
    "decoder_layer": ((CAUSAL_LAYER, X), ONE_LAYER),
    "decoder_layer_vjp": ((CAUSAL_LAYER, X), ONE_LAYER),
    "decoder_vjp": ((DECODER, X), ONE_LAYER),
    "encoder": ((ENCODER, X), ONE_LAYER),
    "encoder_layer": ((LAYER, X), ONE_LAYER),
    "encoder_layer_vjp": ((LAYER, X), ONE_LAYER),
    "encoder_vjp": ((ENCODER, X), ONE_LAYER),
    "gated_rms_norm": ((NORM, X, X), {}),
    "gated_rms_norm_vjp": ((NORM, X, X), {}),
    "init_decoder": ((DRAW, 1, 4, 2), {}),
    "init_decoder_layer": ((DRAW, 4, 2), {}),
    "init_encoder": ((DRAW, 1, 4, 2), {}),
    "init_feed_forward": ((DRAW, 4), {}),
    "init_language_model": ((DRAW, 7, 1, 4, 2), {}),
    "init_linear": ((DRAW, 4, 4), {}),
    "init_multi_head_attention": ((DRAW, 4, 2), {}),
    "init_norm": ((4,), {}),
    "language_model": ((MODEL, np.arange(5)), ONE_LAYER),
    "multi_head_attention": ((HEADS, X), ONE_LAYER),
    "multi_head_attention_vjp": ((HEADS, X), ONE_LAYER),
}


SEQUENCE = {"update_rule": "linear"}
RANDOM = maps.PositiveFeatures(4, rng=0)
AXES: dict[str, Any] = {"A": np.zeros(4), "transform": np.eye(4)}
FITTED = (LANDMARKS.landmarks, LANDMARKS.probes, LANDMARKS.log_normalizers, LANDMARKS.metric)
# Every public function with flags: what it takes by position, and what else it needs.
TAKEN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "automatic.attention": (QKV, {}),
    "functional.linear_attention": (LINEAR, {}),
    "functional.softmax_attention": (QKV, {}),
    "gradients.linear_attention_vjp": (LINEAR, {}),
    "gradients.softmax_attention_vjp": (QKV, {}),
    "positions.rotary": ((QUERY,), {}),
    "recurrences.linear_recurrence": (QKV, SEQUENCE),
    "recurrences.linear_recurrence_vjp": (QKV, SEQUENCE),
    "reference.kernel_attention": (LINEAR, {}),
    "reference.kernel_sums": (LINEAR, {}),
    "reference.softmax_attention": (QKV, {}),
    "diagnostics.attention_weights": (TOKENS, {"rows": [0]}),
    "diagnostics.crossover_length": ((4, 4, 4), {}),
    "diagnostics.denominators": ((*TOKENS, maps.EluFeatures()), {}),
    "diagnostics.held_out_error": ((VALUE,), {"query": QUERY, "key": KEY, "value": VALUE}),
    "diagnostics.attended_norms": (TOKENS, {}),
    "diagnostics.recommend_num_features": ((*TOKENS, RANDOM), {"tolerance": 0.5}),
    "diagnostics.relative_variance": ((*TOKENS, RANDOM), {}),
    "feature_maps.CalibratedFeatures.calibrate": (
        (QKV,),
        {"num_features": 2, "num_steps": 1, "batch_size": 1},
    ),
    "feature_maps.DenseExponentialFeatures": ((4, 8), AXES),
    "feature_maps.DenseExponentialFeatures.calibrate": ((TOKENS,), {"num_features": 8}),
    "feature_maps.DenseExponentialFeatures.fit": (TOKENS, {"num_features": 8}),
    "feature_maps.DenseExponentialFeatures.from_projection": ((PROJECTION,), AXES),
    "feature_maps.GeneralizedExponentialFeatures": ((4, 8), {}),
    "feature_maps.GeneralizedExponentialFeatures.fit": (TOKENS, {"num_features": 8}),
    "feature_maps.GeneralizedExponentialFeatures.from_projection": ((PROJECTION,), {}),
    "feature_maps.LandmarkFeatures": (FITTED, {}),
    "feature_maps.LandmarkFeatures.fit": (TOKENS, {"num_features": 2}),
    "feature_maps.RandomFourierFeatures": ((4, 8), {}),
    "feature_maps.RandomFourierFeatures.from_projection": ((PROJECTION,), {}),
    "kernels.mmd": ((QUERY, QUERY), {"bandwidth": 1.0}),
    "testing.assert_batch_independent": ((maps.EluFeatures(),), {}),
    "testing.assert_mask_is_slice": ((maps.EluFeatures(),), {}),
    "testing.batteries.haar": ((lambda rng, rows, dim: np.eye(rows, dim),), {}),
    "testing.check_recurrence": ((linattn.reference.recurrence,), SEQUENCE),
    "testing.moments.block_kurtosis": (("positive", 1.0, 4, 4), {}),
    "stream.attend": ((*QKV, np.zeros((6, 4)), maps.EluFeatures()), {}),
    **{f"baselines.{name}": call for name, call in BASELINES.items()},
    **{f"layers.{name}": call for name, call in LAYERS.items()},
}


def _called(path: str, given: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda **flag: _named(path)(*given, **options, **flag)


FLAGGED: dict[str, Callable[..., Any]] = {
    **{path: _called(path, *call) for path, call in TAKEN.items()},
    "interop.jax.linear_attention": _interop("jax", "linear_attention", maps.EluFeatures()),
    "interop.jax.linear_recurrence": _interop("jax", "linear_recurrence", **SEQUENCE),
    "interop.jax.softmax_attention": _interop("jax", "softmax_attention"),
    "interop.torch.Attention": _module_of_torch,
    "interop.torch.Attention.forward": _call_of_module,
    "interop.torch.linear_attention": _interop("torch", "linear_attention", maps.EluFeatures()),
    "interop.torch.linear_recurrence": _interop("torch", "linear_recurrence", **SEQUENCE),
    "interop.torch.softmax_attention": _interop("torch", "softmax_attention"),
    "sklearn.RandomFeatures": lambda **flag: linattn.sklearn.RandomFeatures(**flag).fit(QUERY),
    "testing.strategies.feature_maps": _drawn(linattn.testing.strategies.feature_maps),
    "testing.strategies.query_key_value": _drawn(linattn.testing.strategies.query_key_value),
}


# Protocols: what they are given others have checked.
INSIDE = "linattn.typing"


def _public_modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(linattn.__path__, "linattn."):
        if any(part.startswith("_") for part in found.name.split(".")) or ".cli" in found.name:
            continue
        if f"{found.name}.".startswith(f"{INSIDE}."):
            continue
        if found.name.startswith("linattn.interop."):
            pytest.importorskip(found.name.split(".")[2])
        module = importlib.import_module(found.name)
        if hasattr(module, "__all__"):
            yield module


def _callables(owner: Any) -> Iterator[Callable[..., Any]]:
    """Functions of a module or class; of a class what makes one of it, too."""
    names = owner.__all__ if inspect.ismodule(owner) else [n for n in vars(owner) if n[0] != "_"]
    for name in names:
        member = getattr(owner, name)
        if inspect.isroutine(member):
            yield member
        # Records of results take their attributes as they are.
        elif inspect.isclass(member) and not (
            issubclass(member, tuple) or hasattr(member, "__dataclass_fields__")
        ):
            yield member.__init__
            yield from _callables(member)


def _where(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _flags(function: Callable[..., Any]) -> list[str]:
    """Names of a function's boolean parameters, those of what it wraps included."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    kinds = ("bool", "bool | None", "bool | Literal['lower_right']")
    return [p.name for p in parameters if str(p.annotation).replace('"', "'") in kinds]


def _at(path: str) -> Callable[..., Any]:
    if path.startswith("interop"):
        framework = path.split(".")[1]
        pytest.importorskip(framework)
        importlib.import_module(f"linattn.interop.{framework}")
    found = _named(path)
    return found.__init__ if inspect.isclass(found) else found


def _named(path: str) -> Any:
    found: Any = linattn
    for name in path.split("."):
        found = getattr(found, name)
    return found


CASES = [
    pytest.param(
        path, marks=[pytest.mark.frameworks] if path.startswith("interop") else [], id=path
    )
    for path in FLAGGED
]


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize("wrong", ["no", 0, 1.0, np.array([True]), "None"], ids=repr)
@pytest.mark.parametrize("path", CASES)
def test_flags_are_true_or_false(path, wrong):
    names = _flags(_at(path))
    assert names
    for name in names:
        with pytest.raises(TypeError, match=f"^{name} must be True(,| or) .*, got "):
            FLAGGED[path](**{name: wrong})


@pytest.mark.frameworks
def test_every_flag_is_among_them():
    found = {_where(f) for module in _public_modules() for f in _callables(module) if _flags(f)}
    assert found == {_where(_at(path)) for path in FLAGGED}


ONE_HEAD = QKV[1][None, :5, :]


@pytest.mark.parametrize(
    "call",
    [
        lambda mask: linattn.linear_attention(
            *(ONE_HEAD,) * 3, maps.EluFeatures(), key_mask=mask, is_causal=True
        ),
        lambda mask: linattn.softmax_attention(*(ONE_HEAD,) * 3, key_mask=mask),
        lambda mask: linattn.attention(*(ONE_HEAD,) * 3, key_mask=mask),
        lambda mask: linattn.update_state(
            linattn.init_state(maps.EluFeatures(), 4, batch_shape=(3,), like=ONE_HEAD),
            *(ONE_HEAD,) * 2,
            maps.EluFeatures(),
            key_mask=mask,
        ),
        lambda mask: maps.LandmarkFeatures.fit(*(ONE_HEAD,) * 2, num_features=2, key_mask=mask),
        lambda mask: linattn.CoresetAttention(2).extend(*(ONE_HEAD,) * 3, key_mask=mask),
    ],
    ids=["linear", "softmax", "attention", "update_state", "landmarks", "coreset"],
)
@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 5), (1,), (3, 1)], ids=str)
def test_a_mask_does_not_widen_the_keys(call, shape):
    with pytest.raises(ValueError, match=r"key_mask must have shape \(5,\).*got \("):
        call(np.ones(shape, dtype=bool))


# Maps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: any_map.LandmarkFeatures(64), TypeError, r"LandmarkFeatures\.fit\(query, key\)"),
        (lambda: any_map.CalibratedFeatures(64), TypeError, r"CalibratedFeatures\.calibrate"),
        (lambda: any_map.PositiveFeatures(64, seed=0), TypeError, "a seed is given as rng="),
        (lambda: any_map.EluFeatures(seed=0), TypeError, "takes dim, scale: .*'seed'$"),
        (
            lambda: any_map.PositiveFeatures(),
            TypeError,
            "takes dim, num_features, .*: missing .*'dim'",
        ),
        (
            lambda: any_map.PolynomialFeatures(64, 10),
            ValueError,
            "make 718,406,958,841; take a lower",
        ),
        (lambda: any_map.TaylorFeatures(64, 8), ValueError, "at most 1,048,576 columns"),
        (lambda: any_map.PolynomialFeatures(1, 2000), ValueError, "degree must be at most 1000"),
        (lambda: any_map.TaylorFeatures(1, 500), ValueError, "order must be at most 170"),
        (
            lambda: any_map.Reparametrized(maps.PositiveFeatures),
            TypeError,
            "got the class Positive",
        ),
    ],
)
def test_maps_say_what_they_take(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_columns_of_a_polynomial_up_to_the_bound():
    assert maps.PolynomialFeatures(64, 4).num_features == 814_385
    assert maps.PolynomialFeatures(2, 1000).num_features == 501_501
    assert maps.TaylorFeatures(1, 170).num_features == 171


class Mine:
    """A map of the user's, with what its methods return given."""

    num_features = 8
    specs = "one pair, left and right"

    def __init__(self, make):
        self.make = make

    def query_features(self, x):
        return self.make(x)

    key_features = query_features


def _wide(x):
    return np.concatenate([x * x, np.ones_like(x)], axis=-1)


def _ways(feature_map):
    """Ways in which a map's features are asked for."""
    state = linattn.init_state(feature_map, 4, like=QUERY)
    return [
        lambda: linattn.linear_attention(*QKV, feature_map),
        lambda: linattn.linear_attention(*QKV, feature_map, is_causal=True),
        lambda: linattn.update_state(state, KEY, VALUE, feature_map),
        lambda: linattn.decode_step(QUERY[0], KEY[0], VALUE[0], state, feature_map),
        lambda: linattn.Decoder(feature_map, state).step(QUERY[0], KEY[0], VALUE[0]),
    ]


def test_an_attribute_named_specs_is_the_users():
    feature_map = Mine(lambda x: Features(None, _wide(x)))
    for is_causal in (False, True):
        output = linattn.linear_attention(*QKV, feature_map, is_causal=is_causal)
        expected = linattn.reference.kernel_attention(*QKV, feature_map, is_causal=is_causal)
        np.testing.assert_allclose(output, expected, atol=1e-12)
    for call in _ways(feature_map):
        call()


@pytest.mark.parametrize("backends", [True, False], ids=["numpy", "generic"])
@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (_wide, TypeError, r"Features\(log, values\), got ndarray; return Features\(None, values"),
        (lambda x: (None, _wide(x)), TypeError, "got tuple"),
        (lambda x: None, TypeError, "got NoneType"),
        (lambda x: Features(None, x), ValueError, r"8\), .* num_features=8, got values \(\d, 4\)"),
        (lambda x: Features(x, None), ValueError, r"got values None and log \(\d, 4\)"),
        (lambda x: Features(None, None), ValueError, "got values None and log None"),
        (lambda x: Features(_wide(x), _wide(x)), ValueError, r"log None or \(\.\.\., \d, 1\)"),
        (lambda x: Features(None, _wide(x)[..., :1, :].mean(-2)), ValueError, r"got values \(8,\)"),
    ],
    ids=["array", "tuple", "none", "narrow", "narrow log", "empty", "two", "flat"],
)
def test_features_of_the_users_maps_are_checked(make, error, said, backends):
    with contextlib.nullcontext() if backends else linattn.without_backends():
        for call in _ways(Mine(make)):
            with pytest.raises(error, match=r"^(query|key)_features\(x\) must .*" + said):
                call()


@pytest.mark.parametrize("wrong", [8.0, "8", 0, True])
def test_the_number_of_features_of_the_users_maps_is_checked(wrong):
    feature_map = Mine(lambda x: Features(None, _wide(x)))
    feature_map.num_features = wrong
    with pytest.raises((TypeError, ValueError), match=r"feature_map\.num_features must be"):
        linattn.linear_attention(*QKV, feature_map)


def test_dir_shows_what_is_for_users():
    shown = set(dir(linattn))
    assert shown >= set(linattn.__all__)
    assert not shown & {"Any", "TYPE_CHECKING", "annotations", "importlib"}


# Arrays, states and sizes ------------------------------------------------------------------------


@every_entry
def test_entries_take_valid_arrays(entry):
    entry.call(np.asarray, **entry.arrays())


NUMBERS = [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)]
RANDOM_MAPS = (
    maps.PositiveFeatures,
    maps.HyperbolicFeatures,
    maps.TrigonometricFeatures,
    maps.ActivationFeatures,
)
UNPROJECTED = partial(maps.ActivationFeatures, sampler=None)
SIZED: dict[str, list[Callable[[Any], Any]]] = {
    "dim": [*RANDOM_MAPS, maps.EluFeatures, maps.ReluFeatures, UNPROJECTED],
    "num_features": [partial(make, 4) for make in RANDOM_MAPS],
    "value_dim": [lambda size: linattn.init_state(PHI, size, like=np.ones(DIM))],
    "chunk_size": [lambda size: linattn.linear_attention(*tokens(), PHI, chunk_size=size)],
}


@pytest.mark.parametrize(("size", "error"), NUMBERS)
@pytest.mark.parametrize("name", SIZED)
def test_bad_sizes(name, size, error):
    for call in SIZED[name]:
        with pytest.raises(error, match=saying(word(name), "must be", re.escape(repr(size)))):
            call(size)


@pytest.mark.parametrize("make", [maps.HyperbolicFeatures, maps.TrigonometricFeatures])
def test_odd_num_features_of_a_paired_map(make):
    with pytest.raises(ValueError, match=saying(word("num_features"), "even", "7")):
        make(4, 7)


@every_argument
def test_dim_zero(entry, argument):
    arrays = entry.arrays()
    arrays[argument] = arrays[argument][..., :0]
    with pytest.raises(ValueError, match=saying(word(argument), "at least 1", r"\b0[,)]")):
        entry.call(np.asarray, **arrays)


@pytest.mark.parametrize(
    ("batch_shape", "error"),
    [
        ((-1,), ValueError),
        (3, TypeError),
        ((1.5,), TypeError),
        ((True,), TypeError),
        ((False,), TypeError),
        ((0.0,), TypeError),
        ("ab", TypeError),
    ],
)
def test_bad_batch_shape(batch_shape, error):
    with pytest.raises(error, match=saying(word("batch_shape"), "must be")):
        linattn.init_state(PHI, 3, batch_shape=batch_shape, like=np.ones(DIM))


@every_state_call
def test_state_calls_take_a_valid_state(name):
    state_calls()[name][1](good_state(np.asarray))


NOT_STATES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tuple": (TypeError, lambda good: tuple(good)),
    "None fields": (TypeError, lambda good: linattn.State(None, None, 0)),
    "None log_scale": (TypeError, lambda good: good._replace(log_scale=None)),
    "lists": (TypeError, lambda good: linattn.State([[0.0]], [0.0], 0)),
    "integers": (
        (TypeError, ValueError),
        lambda good: good._replace(kvz=np.zeros(good.kvz.shape, dtype=int)),
    ),
    "other columns": (
        ValueError,
        lambda good: linattn.State(good.kvz[1:], good.log_scale[1:], good.length),
    ),
    "other values": (ValueError, lambda good: good._replace(kvz=good.kvz[:, 1:])),
    "other log_scale": (ValueError, lambda good: good._replace(log_scale=good.log_scale[1:])),
    "no axes": (
        (TypeError, ValueError),
        lambda good: good._replace(kvz=np.zeros((), dtype=good.kvz.dtype)),
    ),
}


@every_state_call
@pytest.mark.parametrize("kind", NOT_STATES)
def test_broken_states(name, kind):
    if (name, kind) == ("read_state", "other values"):
        pytest.skip("read_state takes the value dim from the state")
    argument, call = state_calls()[name]
    error, spoil = NOT_STATES[kind]
    # Two states that do not fit each other: either may be named.
    named = word(argument) if not argument.startswith("first") else "(first|second)"
    with pytest.raises(error, match=saying(named, "must|leading axes")):
        call(spoil(good_state(np.asarray)))


@every_state_call
@pytest.mark.parametrize("state", [None, 0, "state", np.zeros(3), linattn.State], ids=repr)
def test_no_state_at_all(name, state):
    argument, call = state_calls()[name]
    if state is None and argument == "initial_state":
        return
    with pytest.raises(TypeError, match=saying(word(argument), "linattn.State", "got")):
        call(state)


@every_argument
@pytest.mark.parametrize(
    "subclass",
    [np.matrix, np.ma.array, lambda a: a.view(np.recarray)],
    ids=["matrix", "masked", "recarray"],
)
def test_subclasses_that_mean_more(entry, argument, subclass):
    arrays = entry.arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        arrays[argument] = subclass(arrays[argument])
    came = re.escape(type(arrays[argument]).__name__)
    with pytest.raises(TypeError, match=saying(word(argument), "ordinary array", came, "convert")):
        entry.call(np.asarray, **arrays)


@every_argument
@pytest.mark.parametrize(
    "thing",
    [
        [[1.0, 2.0], [3.0, 4.0]],
        3.5,
        True,
        "array",
        None,
        np.float32(3.0),
        np.str_("a"),
        memoryview(b"ab"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_no_arrays(entry, argument, thing):
    arrays = entry.arrays()
    arrays[argument] = thing
    came = word(type(thing).__name__)
    match = saying(word(argument), "array", came, rf"asarray\({argument}\)")
    with pytest.raises(TypeError, match=match):
        entry.call(np.asarray, **arrays)


@every_argument
def test_no_axes(entry, argument):
    arrays = entry.arrays()
    arrays[argument] = np.asarray(np.float32(2.0))
    with pytest.raises(TypeError, match=saying(word(argument), "axes", "0-d")):
        entry.call(np.asarray, **arrays)


@every_argument
def test_one_axis_where_a_length_is_needed(entry, argument):
    if len(entry.shapes[argument]) < 2 or argument == "like":
        return
    arrays = entry.arrays()
    arrays[argument] = arrays[argument][0]
    came = re.escape(str(arrays[argument].shape))
    with pytest.raises(ValueError, match=saying(word(argument), "at least 2 axes", came)):
        entry.call(np.asarray, **arrays)


@some_attentions
def test_no_axes_in_every_library(xp, attend):
    query, _, value = in_library(xp, tokens())
    with pytest.raises(TypeError, match=saying(word("key"), "axes", "0-d")):
        attend(query, xp.array(np.float32(1)), value)
    with pytest.raises(TypeError, match=saying(word("key"), "array", word("list"))):
        attend(query, [[1.0]], value)


@some_attentions
@pytest.mark.parametrize(("queries", "keys"), [(1, LENGTH), (LENGTH, 2), (0, LENGTH), (LENGTH, 0)])
def test_causal_needs_equal_lengths(xp, attend, queries, keys):
    query, key, value = in_library(xp, tokens())
    match = saying("causal", "query", "key", word(str(queries)), word(str(keys)))
    remedy = "equal lengths?"
    if attend.feature_map is not None:
        remedy = saying("initial_state", "read_state", "equal length")
    with pytest.raises(ValueError, match=match + saying(remedy)):
        attend(query[:, :queries, :], key[:, :keys, :], value[:, :keys, :], is_causal=True)


@every_attention
def test_shapes_that_do_not_fit(attend):
    query, key, value = tokens()
    longer, wider = tokens(length=7), tokens(dim=5)
    heads = tokens(lead=(3,))
    cases = [
        ((wider[0], key, value), ["query", "key", r"\(2, 6, 5\)|\b5\b", r"\(2, 6, 4\)|\b4\b"]),
        ((query, wider[1], value), ["query", "key", r"\(2, 6, 4\)", r"\(2, 6, 5\)"]),
        ((query, key, longer[2]), ["key", "value", r"\(2, 6, 4\)", r"\(2, 7, 3\)"]),
        ((heads[0], key, value), ["leading axes", r"query \(3,\)", r"key \(2,\)"]),
        ((query, heads[1], value), ["leading axes", r"key \(3,\)", r"value \(2,\)"]),
        ((query, key, heads[2]), ["leading axes", r"value \(3,\)", r"key \(2,\)"]),
    ]
    for arrays, said in cases:
        with pytest.raises(ValueError, match=saying(*said)):
            attend(*arrays)


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "trigonometric", "activation"])
def test_inputs_of_another_dim_than_the_map(name):
    phi = MAPS[name]
    query, key, value = tokens(dim=5)
    state = filled_state(phi)
    calls = [
        lambda: linattn.linear_attention(query, key, value, phi),
        lambda: linattn.update_state(state, key, value, phi),
        lambda: linattn.read_state(query, state, phi),
        lambda: linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, phi),
        lambda: phi.query_features(query),
        lambda: phi.kernel(query, key),
        lambda: phi.estimate(query, key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=saying("query|key|x", word("4"), word("5"), "dim")):
            call()


def test_pairs_of_different_dim():
    x, y = np.ones((2, 3)), np.ones((2, 4))
    for phi in (MAPS["elu"], MAPS["relu"]):
        for method in (phi.kernel, phi.estimate, phi.variance):
            with pytest.raises(
                ValueError, match=saying(word("x"), word("y"), r"\(2, 3\)", r"\(2, 4\)")
            ):
                method(x, y)


def test_heads_of_a_map_that_do_not_fit():
    phi = maps.PositiveFeatures.from_projection(np.ones((3, 8, DIM)))
    query, key, value = tokens()
    with pytest.raises(
        ValueError, match=saying("leading axes", "feature_map", r"\(3,\)", r"\(2,\)")
    ):
        linattn.linear_attention(query, key, value, phi)
    with pytest.raises(
        ValueError, match=saying("leading axes", "feature_map", r"\(3,\)", r"\(2,\)")
    ):
        linattn.init_state(phi, 3, batch_shape=(2,), like=query)


def test_heads_of_a_state_that_do_not_fit():
    query, key, value = tokens()
    state = filled_state(PHI, lead=(3,))
    calls = [
        lambda: linattn.linear_attention(query, key, value, PHI, initial_state=state),
        lambda: linattn.update_state(state, key, value, PHI),
        lambda: linattn.read_state(query, state, PHI),
        lambda: linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, PHI),
        lambda: linattn.merge_states(state, filled_state(PHI)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=saying("leading axes", r"\(3,\)", r"\(2,\)")):
            call()


@pytest.mark.parametrize(
    "feature_map", [None, "elu", 3, maps.PositiveFeatures, maps.EluFeatures, np.exp, ()], ids=repr
)
def test_no_feature_map(feature_map):
    query, key, value = tokens(lead=())
    state = filled_state(PHI, lead=())
    calls = [
        lambda: linattn.linear_attention(query, key, value, feature_map),
        lambda: linattn.init_state(feature_map, 3, like=query),
        lambda: linattn.update_state(state, key, value, feature_map),
        lambda: linattn.read_state(query, state, feature_map),
        lambda: linattn.decode_step(query[0], key[0], value[0], state, feature_map),
        lambda: linattn.Decoder(feature_map, state),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=saying(word("feature_map"), "must have", "got")):
            call()


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (True, TypeError),
        ("1", TypeError),
        (1j, TypeError),
        (np.ones(1), TypeError),
        (np.nan, ValueError),
        (np.inf, ValueError),
    ],
    ids=repr,
)
def test_bad_scale(scale, error):
    with pytest.raises(error, match=saying(word("scale"), "must be", "got")):
        linattn.softmax_attention(*tokens(), scale=scale)
    for make in (partial(maps.PositiveFeatures, 4), maps.EluFeatures, maps.ReluFeatures):
        with pytest.raises(error, match=saying(word("scale"), "must be", "got")):
            make(scale=scale)
