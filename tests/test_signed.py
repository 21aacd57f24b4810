"""Maps of both signs: where many denominators have cancelled, a call says so, once."""

from __future__ import annotations

import re
import warnings
from typing import Any

import array_api_compat
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn import feature_maps as maps
from linattn import reference, testing
from linattn.testing.check import CHECKS
from tests.attentions import DIM, Attention, fetched, in_library, tokens
from tests.every_map import OF_EACH_CLASS

SIGNED = maps.RandomFourierFeatures(DIM, 16, rng=0)
POSITIVE = maps.PositiveFeatures(DIM, 16, rng=0)
SAID = r"^\d+ of \d+ denominators are negative: .* positive map"


def _arrays(xp, length=70, spread=3.0) -> Any:
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, length, DIM))
    return [xp.array(x, "float64") for x in (spread * query, spread * key, value)]


def _share(query, key, **options):
    return linattn.diagnostics.denominators(query, key, SIGNED, **options).negative.mean()


def _state(phi, k, v) -> Any:
    empty = linattn.init_state(phi, DIM, batch_shape=(2,), like=k)
    return linattn.update_state(empty, k, v, feature_map=phi)


def _full(**options):
    return lambda q, k, v, phi: linattn.linear_attention(q, k, v, phi, **options)


def _causal(**options):
    return _full(is_causal=True, **options)


WAYS: dict[str, Any] = {
    "full": _full(),
    "causal": _causal(),
    "blocks": _full(chunk_size=7),
    "packed": _full(cu_seqlens=[0, 3, 10, 10, 70]),
    "packed causal": _causal(cu_seqlens=[0, 3, 10, 10, 70]),
    "packed state": _causal(cu_seqlens=[0, 3, 10, 70], return_state=True),
    "stops": _full(key_stop=np.arange(1, 71)),
    "decay": _causal(log_decay=-0.01),
    "states": _causal(return_state=True, return_states_every=20),
    "log normalizer": _full(return_log_normalizer=True),
    "gradients": lambda q, k, v, phi: linattn.linear_attention_vjp(q, k, v, phi),
    "read": lambda q, k, v, phi: linattn.read_state(q, _state(phi, k, v), phi),
    "decode": lambda q, k, v, phi: linattn.decode_step(
        q[:, LATE, :], k[:, LATE, :], v[:, LATE, :], _state(phi, k, v), phi
    ),
    "decoder": lambda q, k, v, phi: linattn.Decoder(phi, _state(phi, k, v)).step(
        q[:, LATE, :], k[:, LATE, :], v[:, LATE, :]
    ),
}
LATE = 5
"""A token whose denominator is negative."""


class Undeclared:
    """A map that does not say whether its features are positive."""

    def __init__(self, feature_map):
        self.num_features, self.dim = feature_map.num_features, feature_map.dim
        self.query_features = feature_map.query_features
        self.key_features = feature_map.key_features
        self.query_spec, self.key_spec = feature_map.query_spec, feature_map.key_spec


class WithoutSpecs(Undeclared):
    """Without specs, as most maps of users are."""

    def __init__(self, feature_map):
        super().__init__(feature_map)
        del self.query_spec, self.key_spec


class Declared(WithoutSpecs):
    positive = False


KINDS = {"undeclared": Undeclared, "opaque": WithoutSpecs, "declared": Declared}


def _inspects(xp):
    return not xp.name.startswith(("dask", "cupy"))


def _has_gradients(way, feature_map):
    return way != "gradients" or hasattr(feature_map, "query_spec")


@pytest.mark.parametrize("kind", ["linattn", *KINDS])
@pytest.mark.parametrize("way", WAYS)
def test_one_warning_a_call(xp, way, kind):
    if not _inspects(xp):
        pytest.skip(f"{xp.name}: its values are not inspected")
    feature_map = SIGNED if kind == "linattn" else KINDS[kind](SIGNED)
    if not _has_gradients(way, feature_map):
        return
    arrays = _arrays(xp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WAYS[way](*arrays, feature_map)
    assert [w.category for w in caught] == [UserWarning]
    assert caught[0].filename == __file__
    negative, rows = (int(x) for x in str(caught[0].message).split(" denom")[0].split(" of "))
    assert 0 < negative <= rows <= 140


@pytest.mark.parametrize("way", WAYS)
def test_silent_for_positive_maps_and_for_averages(xp_any_shape, way):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for phi in (POSITIVE, Undeclared(POSITIVE), WithoutSpecs(POSITIVE)):
            if _has_gradients(way, phi):
                WAYS[way](*_arrays(xp_any_shape), phi)
        # Near tokens have a kernel near 1, which 16 features do not make negative.
        WAYS[way](*_arrays(xp_any_shape, spread=0.1), SIGNED)


@pytest.mark.parametrize("positive", [None, False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows_of_maps_that_do_not_say(positive, is_causal):
    """An exact window needs the softmax kernel, whose trigonometric features cancel as well."""
    inside = maps.TrigonometricFeatures(DIM, 8, rng=0)
    phi: Any = Undeclared(inside)
    phi.softmax_kernel, phi.scale = True, inside.scale
    if positive is not None:
        phi.positive = positive
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        query, key, value = _arrays_of_numpy()
        linattn.linear_attention(query, key, value, phi, is_causal=is_causal, exact_window=2)
    assert len(caught) == (not positive)


def test_blocks_of_dask_warn_when_they_are_computed():
    dask = pytest.importorskip("dask.array")
    query, key, value = (dask.from_array(x, chunks=(1, 35, -1)) for x in _arrays_of_numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: Any = linattn.linear_attention(query, key, value, WithoutSpecs(SIGNED), is_causal=True)
    with pytest.warns(UserWarning, match=SAID):
        out.compute(scheduler="synchronous")


class Pairs:
    """A signed map in the functions that every library has."""

    num_features = 2 * DIM

    def query_features(self, x):
        xp = array_api_compat.array_namespace(x)
        return linattn.typing.Features(None, xp.concat([xp.cos(x), xp.sin(x)], axis=-1))

    key_features = query_features


@pytest.mark.frameworks
def test_values_that_are_traced_are_not_read():
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")

    def attend(query, key, value):
        return linattn.linear_attention(query, key, value, Pairs())

    module: Any = torch.nn.Module
    forward = {"forward": lambda _, *given: attend(*given)}
    Attention = type("Attention", (module,), forward)
    arrays = _arrays_of_numpy()
    with pytest.warns(UserWarning, match=SAID):
        expected = attend(*arrays)
    tensors = tuple(map(torch.asarray, arrays))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* denominators")
        empty = attend(*(x.to("meta") for x in tensors))
        exported = torch.export.export(Attention(), tensors).module()(*tensors)
        with jax.enable_x64(True):
            traced = jax.jit(attend)(*map(jax.numpy.asarray, arrays))
    assert tuple(empty.shape) == expected.shape
    for output in (exported, traced):
        np.testing.assert_allclose(output, expected, rtol=1e-9)


@pytest.mark.parametrize("feature_map", OF_EACH_CLASS.values(), ids=OF_EACH_CLASS)
def test_maps_of_linattn_say_what_they_are(feature_map):
    skip = {*CHECKS} - {"features", "signs"}
    report = testing.check_feature_map(feature_map, skip=skip, length=33)
    detail = next(row.detail for row in report.rows if row.check == "signs")
    assert feature_map.positive in (True, False)
    assert detail.startswith("positive" if feature_map.positive else "signed: denominators may")


def test_every_map_of_linattn_is_tried():
    tried = {type(phi).__name__ for phi in OF_EACH_CLASS.values()}
    assert tried == {*maps.__all__} - {"BaseFeatureMap", "CalibratedFeatures"}


def _own(values, **attributes):
    """A map of one's own, whose features are what a function makes."""

    def features(_, x):
        return linattn.typing.Features(None, values(x))

    names = {"num_features": 8, "dim": 4, "query_features": features, "key_features": features}
    return type("Own", (), {**names, **attributes})()


def _fourier(x):
    angles = x @ np.random.default_rng(0).standard_normal((4, 4))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


def _squares(x):
    return np.concatenate([x, x + 1], axis=-1) ** 2


def _negative_far_out(x):
    return np.concatenate([x + 6, 6 - x], axis=-1)


@pytest.mark.parametrize(
    ("values", "stated", "result", "words"),
    [
        (_fourier, {}, "passed", "signed: denominators may cancel; .*; undeclared: .* = False"),
        (_fourier, {"positive": False}, "passed", "signed: denominators may cancel; .* negative"),
        (_fourier, {"positive": True}, "FAILED", "declared wrongly: positive is True"),
        (_negative_far_out, {"positive": True}, "FAILED", "declared wrongly: positive is True"),
        (_squares, {}, "passed", "no feature is negative here; undeclared: .* = True"),
        (_squares, {"positive": False}, "passed", "no feature is negative here"),
        (_squares, {"positive": True}, "passed", "positive"),
    ],
)
def test_the_kit_says_which_signs_features_have(values, stated, result, words):
    skip = set(CHECKS) - {"signs"}
    report = testing.check_feature_map(_own(values, **stated), skip=skip, on_fail="return")
    row = next(row for row in report.rows if row.check == "signs")
    assert row.result == result
    assert re.search(words, row.detail), row.detail
    assert ("undeclared" in row.detail) == (not stated)
    assert max(map(len, str(report).splitlines())) <= 80


def test_what_is_counted_is_what_the_diagnostic_counts():
    query, key, value = _arrays_of_numpy()
    mask = np.arange(70) % 3 > 0
    mask[:10] = False  # rows that see no key, causal, are no rows that have cancelled
    for is_causal in (False, True):
        with pytest.warns(UserWarning, match=SAID) as caught:
            linattn.linear_attention(query, key, value, SIGNED, is_causal=is_causal, key_mask=mask)
        negative, rows = (int(x) for x in str(caught[0].message).split(" denom")[0].split(" of "))
        _, log = linattn.linear_attention(
            query,
            key,
            value,
            SIGNED,
            is_causal=is_causal,
            key_mask=mask,
            return_log_normalizer=True,
        )
        assert (negative, rows) == (np.isnan(log).sum(), log.size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _share(query, key, is_causal=is_causal, key_mask=mask) > 0.01


def _arrays_of_numpy():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 70, DIM))
    return 3 * query, 3 * key, value


@pytest.mark.parametrize(("negative", "warns"), [(1, False), (2, True)])
def test_one_row_in_a_hundred_is_passed_over(negative, warns):
    class Signs:
        num_features = 1
        positive = False

        def query_features(self, x):
            return linattn.typing.Features(None, x)

        def key_features(self, x):
            return linattn.typing.Features(None, np.ones_like(x))

    query = np.ones((100, 1))
    query[:negative] = -1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linattn.linear_attention(query, query, query, Signs())
    assert bool(caught) == warns


def test_the_command_and_the_kit_do_not_warn():
    pytest.importorskip("typer")
    from linattn.cli.methods import METHODS
    from linattn.testing import assert_batch_independent

    method = next(method for method in METHODS if method.name == "trigonometric")
    query, key, value = _arrays_of_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.make(query, key, 16, np.random.default_rng(0))(query, key, value, is_causal=False)
        assert_batch_independent(maps.RandomFourierFeatures(DIM, 4, bandwidth=0.1, rng=0))


@pytest.mark.parametrize("is_causal", [False, True])
def test_negative_denominator_is_not_clamped(xp, is_causal):
    phi = maps.TrigonometricFeatures.from_projection([[1.0]], scale=1.0)
    query = np.zeros((2, 1))
    key, value = np.array([[2.0], [0.5]]), np.array([[1.0], [3.0]])
    weights = np.exp(key[:, 0] ** 2 / 2) * np.cos(key[:, 0])
    out, norm = linattn.linear_attention(
        *in_library(xp, (query, key, value)),
        phi,
        is_causal=is_causal,
        return_log_normalizer=True,
    )
    full = (weights @ value) / weights.sum()
    assert weights.sum() < 0
    expected = np.stack([value[0] if is_causal else full, full])
    np.testing.assert_allclose(xp.numpy(out), expected, rtol=1e-10)
    assert_array_equal(fetched(xp, norm), np.nan)


def test_log_normalizer_tells_where_the_denominator_is_negative():
    phi = maps.TrigonometricFeatures(DIM, 2, rng=0)
    query, key, value = tokens(length=60, dtype="float64")
    query, key = 3 * query, 3 * key
    out, norm = linattn.linear_attention(query, key, value, phi, return_log_normalizer=True)
    sums = reference.kernel_sums(query, key, value, phi)
    negative = sums.denominator[..., 0] < 0
    assert negative.any()
    assert not negative.all()
    np.testing.assert_array_equal(np.isnan(norm), negative)
    Attention("", phi, False).check(out, query, key, value, tolerance=1e-11)
