"""Records: what a caller's own activation is, whatever its name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import linattn
from linattn.typing import (
    ELU_PLUS_ONE,
    HEAVISIDE,
    RELU,
    SQUARED_RELU,
    Activation,
    Features,
    Pointwise,
)
from tests.attentions import inputs

OWN = (ELU_PLUS_ONE, HEAVISIDE, RELU, SQUARED_RELU)
NAMES = [activation.name for activation in OWN]


def softplus(u, xp):
    return xp.log1p(xp.exp(u)), None


def softplus_vjp(u, g, xp):
    return g / (1 + xp.exp(-u))


class Mapped:
    """A map of a caller: `f(x P)` of both sides."""

    def __init__(self, activation: Activation, P: Any = 1.0) -> None:
        self._activation, self._P = activation, P
        self.num_features = None if isinstance(P, float) else P.shape[-1]

    def query_spec(self, xp, dtype, device):
        P = self._P if isinstance(self._P, float) else xp.asarray(self._P, dtype=dtype)
        return Pointwise(self._activation, P)

    key_spec = query_spec

    def query_features(self, x):
        values, log = self._activation.apply(x @ self._P if self.num_features else x * self._P, np)
        return Features(log, values)

    key_features = query_features


def tokens(dtype="float32", d=16, lead=(2,)):
    return inputs(40, d, lead=lead, dtype=dtype)


def everything(phi: Mapped, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """All that a backend may do about a map."""
    answers = {}
    for is_causal in (False, True):
        output, pullback = linattn.linear_attention_vjp(
            query, key, value, phi, is_causal=is_causal, return_state=False
        )
        answers[f"{is_causal=}"] = linattn.linear_attention(
            query, key, value, phi, is_causal=is_causal
        )
        answers[f"output, {is_causal=}"] = output
        for side, gradient in zip("qkv", pullback(value), strict=False):
            answers[f"d{side}, {is_causal=}"] = gradient
    state = linattn.init_state(phi, key.shape[-1], batch_shape=key.shape[:-2], like=key)
    decoder = linattn.Decoder(phi, state)
    steps, stepped = [], []
    for i in range(key.shape[-2]):
        q, k, v = (x[..., i, :] for x in (query, key, value))
        out, state = linattn.decode_step(q, k, v, state, phi)
        steps.append(out)
        stepped.append(decoder.step(q, k, v))
    answers["decode_step"], answers["Decoder"] = np.stack(steps, -2), np.stack(stepped, -2)
    return answers


def assert_own_function(name: str, P: Any, d: int) -> None:
    """A function behind any name is used: the answers are those of another name's."""
    given = tokens(d=d)
    found = everything(Mapped(Activation(name, softplus, softplus_vjp), P), *given)
    doubles = [x.astype(np.float64) for x in given]
    with linattn.without_backends():
        other = Mapped(Activation("softplus", softplus, softplus_vjp), P)
        wanted = everything(other, *doubles)
    for what, want in wanted.items():
        np.testing.assert_allclose(found[what], want, atol=2e-5, rtol=0, err_msg=what)


@pytest.mark.parametrize("name", [*NAMES, "exponential", "cos_sin", "softplus"])
@pytest.mark.parametrize("projected", [False, True])
def test_an_activation_of_ones_own_may_have_any_name(name, projected):
    P = np.random.default_rng(1).standard_normal((16, 12)) / 4 if projected else 1.0
    assert_own_function(name, P, 16)


def test_a_function_called_heaviside_has_its_gradient():
    phi = Mapped(Activation("heaviside", softplus, softplus_vjp))
    query, key, value = tokens("float64")
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi)
    assert np.abs(pullback(value)[0]).max() > 0


@pytest.mark.parametrize("activation", OWN, ids=NAMES)
def test_a_copy_of_an_activation_is_equal(activation):
    copies = [pickle.loads(pickle.dumps(activation)), copy.copy(activation)]
    for other in [*copies, copy.deepcopy(activation)]:
        assert other == activation
    assert Activation(activation.name, softplus, softplus_vjp) != activation


@pytest.mark.parametrize("activation", [ELU_PLUS_ONE, RELU], ids=lambda a: a.name)
def test_a_copy_of_an_activation_takes_the_same_path(activation):
    given = tokens()
    first = everything(Mapped(activation), *given)
    second = everything(Mapped(pickle.loads(pickle.dumps(activation))), *given)
    for what, want in first.items():
        np.testing.assert_array_equal(second[what], want, err_msg=what)


class Calls:
    """A function that uses attention itself: rooms that a block is using must not be its."""

    def __call__(self, u, xp):
        inner = u[..., :4] * 0 + 3
        linattn.linear_attention(inner, inner, inner, Mapped(RELU), is_causal=True)
        return softplus(u, xp)


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_of_any_name_may_call_attention_itself(name):
    query, key, value = tokens("float64")
    for is_causal in (False, True):
        out = linattn.linear_attention(
            query, key, value, Mapped(Activation(name, Calls())), is_causal=is_causal
        )
        plain = Mapped(Activation("softplus", softplus))
        want = linattn.linear_attention(query, key, value, plain, is_causal=is_causal)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)


class Biased(Mapped):
    """`relu(x P + bias)` of both sides."""

    def __init__(self, P: Any, bias: Any) -> None:
        super().__init__(RELU, P)
        self.bias = bias

    def query_spec(self, xp, dtype, device):
        P, bias = (xp.asarray(a, dtype=dtype, device=device) for a in (self._P, self.bias))
        return Pointwise(RELU, P, bias)

    key_spec = query_spec


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_bias_is_added(xp_any_shape, is_causal):
    xp, rng = xp_any_shape, np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 9, 4))
    P, bias = rng.standard_normal((4, 6)), rng.standard_normal(6) + 1
    q, k, v = (xp.array(x, "float64") for x in (query, key, value))
    out = linattn.linear_attention(q, k, v, Biased(P, bias), is_causal=is_causal)
    phi, psi = (np.maximum(x @ P + bias, 0) for x in (query, key))
    weights = phi @ np.swapaxes(psi, -1, -2)
    weights = np.tril(weights) if is_causal else weights
    want = weights @ value / weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(xp.numpy(out), want, rtol=1e-12, atol=1e-13)
