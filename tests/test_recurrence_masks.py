"""Padding and states on the way of recurrences: against sequences that were cut by hand."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn
from linattn.reference import recurrence
from linattn.testing import assert_gradient
from tests.test_recurrences import IDS, KINDS, axes_of, order_of, problem, rows

recur = linattn.linear_recurrence
recur_vjp = linattn.linear_recurrence_vjp
kinds = pytest.mark.parametrize(("rule", "by_channel"), KINDS, ids=IDS)

BATCH, HEADS = 3, 2
RTOL = {"float64": 1e-11, "float32": 1e-5, "float16": 4e-3}


def mask_of(kind, length, rng):
    """Mask of tokens, ``(batch, 1, length)``: padded inside, left or right."""
    lengths, place = rng.integers(0, length + 1, (BATCH, 1, 1)), np.arange(length)
    if kind == "inside":
        return rng.random((BATCH, 1, length)) < 0.6
    return place < lengths if kind == "right" else place >= lengths


def spoilt(a, mask, by_channel):
    """Arguments with numbers in masked tokens that nothing may read: NaN, and decays above 0."""
    found = dict(a)
    for name in set(a) - {"query", "initial_state"}:
        counts = mask[..., None] if axes_of(name, a, by_channel) == 2 else mask
        found[name] = np.where(counts, a[name], 7.0 if name == "log_decay" else np.nan)
    return found


def cut(a, mask, i, by_channel, stop=None):
    """Arguments of one sequence without the tokens that are masked, up to one of them."""
    kept = np.flatnonzero(mask[i, 0][:stop])
    one = {name: array[i] for name, array in a.items()}
    for name in set(one) - {"initial_state"}:
        axis = -axes_of(name, a, by_channel)
        one[name] = np.take(one[name], kept, axis=axis)
    return one, kept


def close(got, want, dtype="float64"):
    assert got.shape == want.shape
    size = max(1.0, np.abs(want).max(initial=0))
    assert np.abs(got - want).max(initial=0) <= RTOL[dtype] * size


def assert_as_cut(results, a, mask, rule, by_channel, interval, dtype="float64"):
    output, state, states = results
    assert len(states) == mask.shape[-1] // interval
    for i in range(BATCH):
        part, kept = cut(a, mask, i, by_channel)
        want, last = recurrence(**part, update_rule=rule)
        close(output[i][:, kept], want, dtype)
        close(state[i], last, dtype)
        for j, on_the_way in enumerate(states, 1):
            part, _ = cut(a, mask, i, by_channel, j * interval)
            close(on_the_way[i], recurrence(**part, update_rule=rule)[1], dtype)


@kinds
@settings(max_examples=6)
@given(data=st.data())
def test_masked_tokens_are_as_if_they_were_cut_out(rule, by_channel, data):
    length = data.draw(st.integers(0, 70), "length")
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    dtype = data.draw(st.sampled_from(sorted(RTOL)), "dtype")
    interval = data.draw(st.integers(1, 80), "interval")
    chunk_size = data.draw(st.sampled_from([None, 1, 5, 64]), "chunk size")
    backends = data.draw(st.booleans(), "backends")
    a = problem(rule, by_channel, length=length, lead=(BATCH, HEADS), seed=seed)
    rng = np.random.default_rng(seed)
    kind = data.draw(st.sampled_from(["inside", "left", "right", "lengths"]), "mask")
    mask = mask_of("right" if kind == "lengths" else kind, length, rng)
    masked = {"key_lengths": mask.sum(axis=-1)} if kind == "lengths" else {"key_mask": mask}
    tokens = ("query", "key", "value")
    wide = "float64" if dtype == "float64" else "float32"
    arrays = {name: array.astype(dtype if name in tokens else wide) for name, array in a.items()}
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    with nullcontext() if backends else linattn.without_backends():
        results = recur(
            **spoilt(arrays, mask, by_channel),
            **masked,
            update_rule=rule,
            return_state=True,
            return_states_every=interval,
            chunk_size=chunk_size,
        )
    assert results[0].dtype == dtype
    assert_as_cut(results, exact, mask, rule, by_channel, interval, dtype)


@kinds
def test_gradients_are_of_the_tokens_that_count(rule, by_channel):
    """By finite differences through output, state and states on the way, and 0 where masked."""
    rng = np.random.default_rng(0)
    a = problem(rule, by_channel, length=11, lead=(BATCH, HEADS))
    mask, names = mask_of("inside", 11, rng), order_of(a)
    weights = [rng.standard_normal((BATCH, HEADS, 5, 4)) for _ in range(4)]
    options = {"update_rule": rule, "key_mask": mask, "return_states_every": 4}

    def stacked(results):
        # One array: outputs where tokens count, and all states.
        output, state, states = results
        output = np.where(mask[..., None], output, 0)
        scaled = [x * w for x, w in zip((state, *states), weights, strict=False)]
        return np.concatenate([output.ravel(), *(x.ravel() for x in scaled)])

    def function(*arrays):
        return stacked(recur(**dict(zip(names, arrays, strict=True)), **options, return_state=True))

    def vjp(*arrays):
        given = dict(zip(names, arrays, strict=True))
        results, pullback = recur_vjp(**given, **options, return_state=True)

        def pull(grad):
            sizes = np.cumsum([x.size for x in (results[0], results[1], *results[2])])[:-1]
            output, *states = np.split(grad, sizes)
            output = np.where(mask[..., None], output.reshape(results[0].shape), 0)
            states = [x.reshape(w.shape) * w for x, w in zip(states, weights, strict=False)]
            return pullback(output, states[0], states[1:])

        return stacked(results), pull

    decays = a.pop("log_decay", None)
    if decays is not None:
        a["log_decay"] = decays - 0.1  # steps keep them below 0
    assert_gradient(function, vjp, *(a[name] for name in names))
    (output, _, states), pullback = recur_vjp(
        **spoilt(a, mask, by_channel), **options, return_state=True
    )
    found = pullback(np.where(mask[..., None], output, 0), None, [None] * len(states))
    for name, gradient in zip(names, found, strict=True):
        np.testing.assert_array_equal(np.isfinite(gradient), True)
        if name not in ("query", "initial_state"):
            counts = mask[..., None] if axes_of(name, a, by_channel) == 2 else mask
            np.testing.assert_array_equal(np.where(counts, 0, gradient), 0)


@pytest.mark.parametrize(("rule", "by_channel"), [("gated_delta", False), ("dplr", True)])
def test_every_library(xp, rule, by_channel):
    a = problem(rule, by_channel, length=7, lead=(BATCH, HEADS))
    mask = mask_of("inside", 7, np.random.default_rng(1))
    arrays = {name: xp.array(array) for name, array in a.items()}
    masked = {"key_mask": xp.array(mask)}
    options = {"update_rule": rule, "return_state": True, "return_states_every": 4}
    results = recur(**arrays, **masked, **options)
    on_host = (*map(xp.numpy, results[:2]), [xp.numpy(state) for state in results[2]])
    assert_as_cut(on_host, a, mask, rule, by_channel, 4)
    if xp.name == "jax" or (xp.name == "dask" and rule == "dplr"):
        return  # graphs of many small operations
    _, pullback = recur_vjp(**arrays, **masked, **options)
    _, wanted = recur_vjp(**a, key_mask=mask, **options)
    cotangents = np.sin(on_host[0]), np.sin(on_host[1]), [np.sin(x) for x in on_host[2]]
    given = [xp.array(x) for x in cotangents[:2]], [xp.array(x) for x in cotangents[2]]
    for got, want in zip(pullback(*given[0], given[1]), wanted(*cotangents), strict=True):
        close(xp.numpy(got), want)


@pytest.mark.frameworks
@pytest.mark.parametrize("through", ["linattn", "interop"])
@pytest.mark.parametrize(("rule", "by_channel"), [("gated_delta", False), ("dplr", True)])
def test_torch_differentiates_through_masks_and_states(rule, by_channel, through):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    function = recur
    if through == "interop":
        function = pytest.importorskip("linattn.interop.torch").linear_recurrence
    a = problem(rule, by_channel, length=13, lead=(BATCH, HEADS))
    mask = mask_of("inside", 13, np.random.default_rng(1))
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


@kinds
def test_packed_sequences_with_masked_tokens(rule, by_channel):
    a = problem(rule, by_channel, length=30, lead=(2,))
    del a["initial_state"]
    mask = np.random.default_rng(2).random(30) < 0.5
    borders = [0, 9, 9, 30]
    options = {"update_rule": rule, "return_state": True}
    output, states = recur(**a, key_mask=mask, cu_seqlens=borders, **options)
    for i, (start, stop) in enumerate(pairwise(borders)):
        part = rows(a, start, stop, by_channel)
        want, state = recur(**part, key_mask=mask[start:stop], **options)
        close(output[:, start:stop], want)
        close(states[i], state)


@kinds
def test_a_masked_step_leaves_the_state_unchanged(rule, by_channel):
    a = problem(rule, by_channel, length=1, lead=(BATCH, HEADS))
    mask = np.array([[True], [False], [True]])
    token = {
        name: np.squeeze(array, -axes_of(name, a, by_channel))
        for name, array in spoilt(a, mask[..., None], by_channel).items()
        if name != "initial_state"
    }
    whole = {name: np.squeeze(a[name], -axes_of(name, a, by_channel)) for name in token}
    step = partial(linattn.recurrence_step, state=a["initial_state"], update_rule=rule)
    output, state = step(**token, key_mask=mask)
    want, after = step(**whole)
    np.testing.assert_array_equal(state[1], a["initial_state"][1])
    close(output[1], np.einsum("hd,hde->he", token["query"][1], state[1]) / 5**0.5)
    for i in (0, 2):
        close(output[i], want[i])
        close(state[i], after[i])


def test_rejected_drafts_are_rolled_back():
    """Sequences continue from any state on the way, as often as one likes."""
    a = problem("gated_delta", length=20)
    options = {"update_rule": "gated_delta"}
    output, states = recur(**a, **options, return_states_every=5)
    rest = rows(a, 10, 20, False) | {"initial_state": states[1]}
    for _ in range(2):
        close(recur(**rest, **options), output[..., 10:, :])


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
