"""Padding and states on the way of recurrences: their gradients, drafts, and what cannot be."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import numpy as np
import pytest

import linattn
from tests.test_recurrences import order_of, problem

recur = linattn.linear_recurrence
recur_vjp = linattn.linear_recurrence_vjp

BATCH, HEADS = 3, 2


def close(got, want):
    assert got.shape == want.shape
    size = max(1.0, np.abs(want).max(initial=0))
    assert np.abs(got - want).max(initial=0) <= 1e-11 * size


@pytest.mark.frameworks
@pytest.mark.parametrize("through", ["linattn", "interop"])
@pytest.mark.parametrize(("rule", "by_channel"), [("gated_delta", False), ("dplr", True)])
def test_torch_differentiates_through_masks_and_states(rule, by_channel, through):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    function = recur
    if through == "interop":
        function = pytest.importorskip("linattn.interop.torch").linear_recurrence
    a = problem(rule, by_channel, length=13, lead=(BATCH, HEADS))
    mask = np.random.default_rng(1).random((BATCH, 1, 13)) < 0.6
    options = {"update_rule": rule, "return_state": True, "return_states_every": 5}
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in a.items()}
    output, state, states = function(**tensors, key_mask=torch.tensor(mask), **options)
    sum((x**2).sum() / 2 for x in (output, state, *states)).backward()
    (output, state, states), pullback = recur_vjp(**a, key_mask=mask, **options)
    for name, want in zip(order_of(a), pullback(output, state, states), strict=True):
        close(tensors[name].grad.numpy(), want)


@pytest.mark.frameworks
@pytest.mark.parametrize("through", ["linattn", "interop"])
def test_jax_differentiates_through_masks_and_states(through):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jax.config.update("jax_enable_x64", True)
    function = recur
    if through == "interop":
        function = pytest.importorskip("linattn.interop.jax").linear_recurrence
    a = problem("dplr", True, length=3, lead=(BATCH, 1))
    lengths = np.array([[3], [0], [2]])
    options = {"update_rule": "dplr", "return_states_every": 2, "chunk_size": 2}

    def loss(arrays, lengths):
        output, states = function(**arrays, key_lengths=lengths, **options)
        return sum((x**2).sum() / 2 for x in (output, *states))

    found = jax.jit(jax.grad(loss))(a, lengths)
    (output, states), pullback = recur_vjp(**a, key_lengths=lengths, **options)
    for name, want in zip(order_of(a), pullback(output, None, states), strict=True):
        close(np.asarray(found[name]), want)


def test_what_cannot_be():
    a = problem("gated_delta", length=6)
    del a["initial_state"]
    for error, message, options in (
        (TypeError, "key_mask must be boolean", {"key_mask": np.ones(6)}),
        (ValueError, r"key_mask must have shape \(6,\)", {"key_mask": np.ones(5, bool)}),
        (ValueError, "key_lengths must be between 0 and", {"key_lengths": 7}),
        (ValueError, "key_lengths must be None with", {"key_lengths": 2, "cu_seqlens": [0, 6]}),
        (ValueError, "every must be None", {"return_states_every": 2, "cu_seqlens": [0, 6]}),
        (ValueError, "every must be at least 1", {"return_states_every": 0}),
        (ValueError, "log_decay must be at most 0", {"log_decay": np.ones(6), "key_lengths": 1}),
        (ValueError, "erase_key must be None for update_rule='gated", {"erase_key": a["key"]}),
    ):
        with pytest.raises(error, match=message):
            recur(**a | options, update_rule="gated_delta")
    (output, states), pullback = recur_vjp(**a, update_rule="gated_delta", return_states_every=2)
    with pytest.raises(
        ValueError, match="grad_states must have an array or None for each of the 3"
    ):
        pullback(output, None, states[:2])
    with pytest.raises(ValueError, match=r"grad_states\[1\] must have the shape of a state"):
        pullback(output, None, [None, states[0][..., :2], None])
