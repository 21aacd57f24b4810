"""What is faster on a machine is measured, or asked for, and changes rounding alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linattn
from linattn.feature_maps import HyperbolicFeatures, PositiveFeatures
from linattn_numpy import choices, features, products, tuning

PRODUCTS = products.KINDS
SINGLE = np.dtype(np.float32)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_found", {})
    for variable in ("LINATTN_SMALL_PRODUCTS", "LINATTN_EXP2"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [((0.5, 1.1), ("read",)), ((1.0, 0.5), ("project",)), ((0.6, 0.6), ()), ((1, 1), PRODUCTS)],
)
def test_slow_small_products_are_not_chosen(
    gains: tuple[float, float],
    wanted: tuple[str, ...],
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = iter(gains)
    monkeypatch.setattr(products, "_gain", lambda *sizes: next(given))
    # The second time nothing is measured.
    for _ in range(2):
        assert products.small_products(np.dtype("f4")) == wanted
    monkeypatch.setenv("LINATTN_EXP2", "")
    assert products.kernel_status() == (
        f"products cut into small ones: {', '.join(wanted) or 'none'}; "
        "exponentials in float32 by exp (LINATTN_EXP2, measured)"
    )


def test_gain_is_a_ratio_of_least_times(monkeypatch: pytest.MonkeyPatch) -> None:
    # The usual way takes 6 at least, the other 2.
    seconds = iter([9.0, 3.0, 6.0, 2.0] + (tuning.MEASURED_TURNS - 2) * [7.0, 4.0])

    class Timer:
        def __init__(self, compute: Any) -> None: ...

        def timeit(self, number: int) -> float:
            return next(seconds) * number

    monkeypatch.setattr(choices, "Timer", Timer)
    assert products._gain(256, 8, 16, np.dtype("f8")) == 3.0


@pytest.mark.parametrize(
    ("asked", "wanted"), [("", ()), ("read", ("read",)), (" read , project", PRODUCTS)]
)
def test_small_products_can_be_asked_for(
    asked: str, wanted: tuple[str, ...], undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINATTN_SMALL_PRODUCTS", asked)
    monkeypatch.setattr(products, "_gain", None)
    assert set(products.small_products(np.dtype("f4"))) == set(wanted)
    assert products.kernel_status().endswith("(LINATTN_SMALL_PRODUCTS, measured)")


def test_unknown_small_products_are_an_error(
    undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINATTN_SMALL_PRODUCTS", "read,sums")
    with pytest.raises(ValueError, match=r"must be some of project, read, .* got 'read,sums'"):
        products.small_products(np.dtype("f4"))


@pytest.mark.parametrize(("times", "wanted"), [(1.2, np.exp), (1.3, np.exp2)])
def test_powers_of_2_are_chosen_where_they_take_less_time(
    times: float, wanted: np.ufunc, undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gain(usual: Any, other: Any) -> float:
        compared.append((usual.func, other.func))
        return times

    compared: list[Any] = []
    monkeypatch.setattr(choices, "gain", gain)
    # The second time nothing is measured.
    for _ in range(2):
        assert choices.power_and_unit(SINGLE)[0] is wanted
    assert compared == [(np.exp, np.exp2)]


@pytest.mark.parametrize(("asked", "wanted"), [("", "exp"), (" float32", "exp2")])
def test_powers_of_2_can_be_asked_for(
    asked: str, wanted: str, undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINATTN_EXP2", asked)
    monkeypatch.setenv("LINATTN_SMALL_PRODUCTS", "")
    monkeypatch.setattr(choices, "gain", None)
    assert choices.power_and_unit(np.dtype(np.float64)) == (np.exp, 1.0)
    assert products.kernel_status() == (
        "products cut into small ones: none; "
        f"exponentials in float32 by {wanted} (LINATTN_SMALL_PRODUCTS, LINATTN_EXP2)"
    )


def test_unknown_dtypes_of_powers_are_an_error(
    undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINATTN_EXP2", "float64")
    with pytest.raises(ValueError, match=r"LINATTN_EXP2 must be some of float32, .* got 'float64'"):
        choices.power_and_unit(SINGLE)


MAPS = {
    "positive": PositiveFeatures(16, 64, rng=0),
    "hyperbolic": HyperbolicFeatures(16, 64, rng=0),
}


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0, 8.0, 16.0])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("asked", ["", "float32"], ids=["exp", "exp2"])
def test_either_base_gives_the_oracles_output(
    asked: str,
    name: str,
    is_causal: bool,
    scale: float,
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LINATTN_EXP2", asked)
    phi, rng = MAPS[name], np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, 300, 16), np.float32) for _ in range(3))
    q, k = q * scale**0.5, k * scale**0.5
    got = linattn.linear_attention(q, k, v, phi, is_causal=is_causal)
    want = linattn.reference.kernel_attention(q, k, v, phi, is_causal=is_causal)
    assert np.abs(got - want).max() < 1e-5


@pytest.mark.parametrize("name", MAPS)
def test_largest_log_is_natural_in_either_base(
    name: str, undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(3).standard_normal((50, 16), np.float32)
    spec = MAPS[name].key_spec(np, SINGLE, None)
    logs, made = [], []
    for asked in ("", "float32"):
        monkeypatch.setattr(choices, "_found", {})
        monkeypatch.setenv("LINATTN_EXP2", asked)
        maker = features.FeatureMaker(spec, x, len(x), "key")
        logs.append(maker.make(x, inspect=True))
        made.append(maker.weights.copy())
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)
    assert np.abs(made[0] / made[1] - 1).max() < 1e-5
    assert (made[0] != made[1]).any()
