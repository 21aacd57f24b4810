"""Maps of both signs: where many denominators have cancelled, a call says so, once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import feature_maps as maps
from linattn import reference
from tests.attentions import DIM, Attention, fetched, in_library, tokens

SIGNED = maps.RandomFourierFeatures(DIM, 16, rng=0)
POSITIVE = maps.PositiveFeatures(DIM, 16, rng=0)
SAID = r"^\d+ of \d+ denominators are negative: .* positive map"


def _arrays(xp, length=70, spread=3.0) -> Any:
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, length, DIM))
    return [xp.array(x, "float64") for x in (spread * query, spread * key, value)]


def _share(query, key, **options):
    return linattn.diagnostics.denominators(query, key, SIGNED, **options).negative.mean()


WAYS: dict[str, Any] = {
    "full": lambda q, k, v, phi: linattn.linear_attention(q, k, v, phi),
    "causal": lambda q, k, v, phi: linattn.linear_attention(q, k, v, phi, is_causal=True),
    "blocks": lambda q, k, v, phi: linattn.linear_attention(q, k, v, phi, chunk_size=7),
    "gradients": lambda q, k, v, phi: linattn.linear_attention_vjp(q, k, v, phi),
    "read": lambda q, k, v, phi: linattn.read_state(
        q,
        linattn.update_state(
            linattn.init_state(phi, DIM, batch_shape=(2,), like=k), k, v, feature_map=phi
        ),
        phi,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_warning_a_call(xp, way):
    if xp.name.startswith(("dask", "jax", "cupy")):
        pytest.skip(f"{xp.name}: its values are not inspected")
    query, key, value = _arrays(xp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WAYS[way](query, key, value, SIGNED)
    assert [w.category for w in caught] == [UserWarning]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=SAID):
        WAYS[way](query, key, value, SIGNED)


@pytest.mark.parametrize("way", WAYS)
def test_silent_for_positive_maps_and_for_averages(xp_any_shape, way):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAYS[way](*_arrays(xp_any_shape), POSITIVE)
        # Near tokens have a kernel near 1, which 16 features do not make negative.
        WAYS[way](*_arrays(xp_any_shape, spread=0.1), SIGNED)


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
    assert np.isnan(fetched(xp, norm)).all()


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
