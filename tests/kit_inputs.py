"""Mistakes that small inputs hide: they need lengths, heads, dtypes, gates or masks of their own.

`tests/test_kit_mutations.py` runs them.
"""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import testing
from linattn.testing import _recurrence_checks
from linattn.typing import Features

SEED = 0
PAIRS: list[Any] = []


def mutation(name, assertion, valid, wrong, *, check):
    """Add a pair, for `mutation` of the tests."""
    PAIRS.append((name, assertion, valid, wrong, check))


def square(x):
    return np.sum(x * x, axis=-1, keepdims=True)


def read(phi, kv, z):
    return np.einsum("...m,...me->...e", phi, kv) / np.sum(phi * z, axis=-1, keepdims=True)


def outer(psi, value):
    return psi[..., :, None] * value[..., None, :]


def one_step(query, key, value, state):
    kv, z = (0.0, 0.0) if state is None else state
    psi = np.exp(key)
    state = (kv + outer(psi, value), z + psi)
    return read(np.exp(query), *state), state


def whole(phi, psi, value):
    return read(phi, np.swapaxes(psi, -1, -2)[..., None, :, :] @ value[..., None, :, :],
                np.sum(psi, axis=-2, keepdims=True))  # fmt: skip


def masked(query, key, value, key_mask=True):
    keep = np.asarray(key_mask)[..., None]
    psi, value = np.where(keep, np.exp(key), 0), np.where(keep, value, 0)
    return whole(np.exp(query), psi, value)


def logs(x):
    return x - square(x) / 2


def full(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


# Inputs that small tests have not: lengths, heads, dtypes, runs of masked keys.


def by_blocks(query, key, value, key_mask=True, guard=True):
    """Softmax attention that takes up blocks of 32 keys, as kernels do."""
    visible = np.broadcast_to(np.asarray(key_mask), key.shape[-2:-1])
    key, value = (np.where(visible[:, None], x, 0) for x in (key, value))
    largest: Any = -np.inf
    norm: Any = 0.0
    total: Any = 0.0
    for start in range(0, key.shape[-2], 32):
        block = np.s_[..., start : start + 32, :]
        scores = query @ np.swapaxes(key[block], -1, -2)
        scores = np.where(visible[start : start + 32], scores, -np.inf)
        now = np.maximum(largest, np.max(scores, axis=-1, keepdims=True))
        shift = np.where(np.isneginf(now), 0, now) if guard else now
        weights, kept = np.exp(scores - shift), np.exp(largest - shift)
        norm = norm * kept + np.sum(weights, axis=-1, keepdims=True)
        total, largest = total * kept + weights @ value[block], now
    return total / norm


def by_blocks_of_nan(query, key, value, key_mask=True):
    """The first block that is masked whole: exp(-inf + inf)."""
    return by_blocks(query, key, value, key_mask, guard=False)


def masked_in_the_numerator(query, key, value, key_mask=True):
    """The mask multiplies the weights after their sum was taken, beyond 64 keys."""
    keep = np.broadcast_to(np.asarray(key_mask), key.shape[-2:-1])
    late = np.arange(len(keep)) >= 64
    psi = np.where((keep | late)[:, None], np.exp(key), 0)
    z = np.sum(psi, axis=-2, keepdims=True)
    psi, value = np.where(keep[:, None], psi, 0), np.where(keep[:, None], value, 0)
    return read(np.exp(query), (np.swapaxes(psi, -1, -2) @ value)[..., None, :, :], z)


def seen(query, key, value, is_causal=True, *, visible=None):
    n = key.shape[-2]
    weights = np.exp(query @ np.swapaxes(key, -1, -2) / 2)
    weights = np.where(np.tri(n, dtype=bool) if visible is None else visible(n), weights, 0)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def one_token_ahead_from(first):
    def visible(n):
        return np.tri(n, dtype=bool) | (
            np.tri(n, k=1, dtype=bool) & (np.arange(n) >= first)[:, None]
        )

    return partial(seen, visible=visible)


def last_block_is_open(n):
    """The triangle is left out in a last block of 128 that is not full."""
    block = np.arange(n) // 128
    late = (block == n // 128) & (n % 128 > 0) & (n > 128)
    return np.tri(n, dtype=bool) | (late & late[:, None])


def keys_of_head(pick):
    def attention(query, key, value, is_causal=True):
        heads = np.arange(key.shape[1]) if key.ndim > 3 else None
        moved = key if heads is None else key[:, pick(heads)]
        return full(query, moved, value)

    return attention


def first_256_keys(query, key, value):
    return full(query, key[..., :256, :], value[..., :256, :])


def sixteen_columns(query, key, value):
    return full(query, key, value * (np.arange(value.shape[-1]) < 16))


def summed_in_float16(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    narrow = np.float16 if weights.dtype == np.float32 else weights.dtype
    norm = np.cumsum(weights, axis=-1, dtype=narrow)[..., -1:]
    return weights @ value / norm


def faded(query, key, value, is_causal=True):
    """Weights that fade with the distance, 1 / (1 + i - j)."""
    i = np.arange(key.shape[-2], dtype=query.dtype)
    weights = np.exp(query @ np.swapaxes(key, -1, -2) / 2) / (1 + np.abs(i[:, None] - i))
    weights = np.tril(weights)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def faded_step(query, key, value, state, most=10**6):
    before = state or (key[..., None, :][..., :0, :], value[..., None, :][..., :0, :])
    last = key[..., None, :], value[..., None, :]
    keys, values = (np.concatenate(pair, axis=-2) for pair in zip(before, last, strict=True))
    distance = np.minimum(np.arange(keys.shape[-2], dtype=query.dtype)[::-1], most)
    weights = np.exp(query[..., None, :] @ np.swapaxes(keys, -1, -2) / 2) / (1 + distance)
    return (weights @ values / np.sum(weights, axis=-1, keepdims=True))[..., 0, :], (keys, values)


def chunked(query, key, value, is_causal=True, lost=None):
    """Chunks of 64 with a state; the one before chunk `lost` is lost."""
    outputs: list[Any] = []
    kv: Any = 0.0
    z: Any = 0.0
    for index, start in enumerate(range(0, key.shape[-2], 64)):
        if index == lost:
            kv, z = 0.0, 0.0
        q, k, v = (x[..., start : start + 64, :] for x in (query, key, value))
        psi = np.exp(k)
        sums = kv + np.cumsum(outer(psi, v), axis=-3), z + np.cumsum(psi, axis=-2)
        outputs.append(read(np.exp(q), *sums))
        kv, z = sums[0][..., -1:, :, :], sums[1][..., -1:, :]
    return np.concatenate(outputs, axis=-2)


ATTENTION: dict[str, Any] = {
    "NaN from a first block that is masked whole": (
        testing.assert_mask_is_slice, by_blocks, by_blocks_of_nan,
    ),
    "a mask in the numerator alone, beyond 64 keys": (
        testing.assert_mask_is_slice, masked, masked_in_the_numerator,
    ),
    "a leak after token 300": (testing.assert_causal, seen, one_token_ahead_from(300)),
    "a last block without its triangle": (
        testing.assert_causal, seen, partial(seen, visible=last_block_is_open),
    ),
    "keys of the next head": (
        testing.assert_batch_independent,
        keys_of_head(lambda h: h),
        keys_of_head(lambda h: (h + 1) % len(h)),
    ),
    "keys beyond 256 left out": (testing.assert_permutation_invariant, full, first_256_keys),
    "a sum in float16 for float32": (
        testing.assert_permutation_invariant, full, summed_in_float16,
    ),
    "columns beyond 16 left out": (
        partial(testing.assert_normalized, magnitudes=(0.5,)), full, sixteen_columns,
    ),
    "a state that the third chunk does not get": (
        partial(testing.assert_streaming, step=one_step), chunked, partial(chunked, lost=2),
    ),
}  # fmt: skip
for name, (assertion, right, wrong) in ATTENTION.items():
    check = getattr(assertion, "func", assertion).__name__
    mutation(
        name,
        lambda attention, assertion=assertion: assertion(attention=attention, rng=SEED),
        right,
        wrong,
        check=check,
    )
mutation(
    "distances counted up to 128",
    lambda step: testing.assert_streaming(attention=faded, step=step, rng=SEED),
    faded_step,
    partial(faded_step, most=128),
    check="assert_streaming",
)


class Exponentials:
    """exp(x), exp(-x), and a change of the vectors."""

    num_features, dim, positive = 8, 4, True

    def __init__(self, change=lambda x: x):
        self.change = change

    def query_features(self, x):
        x = self.change(x)
        return Features(None, np.concatenate([np.exp(x), np.exp(-x)], axis=-1))

    key_features = query_features


def unit_over_heads(x):
    norm = np.sqrt(1 + np.sum(x * x, axis=1, keepdims=True))
    return x / norm if x.ndim > 3 else x


MAPS = {
    "a map wrong in float32": lambda x: x * np.float32(1.001) if x.dtype == np.float32 else x,
    "float16 within a map for float32": (
        lambda x: x.astype(np.float16).astype(x.dtype) if x.dtype == np.float32 else x
    ),
    "a map wrong after 300 tokens": lambda x: x - 0.01 * (np.arange(x.shape[-2]) >= 300)[:, None],
    "a map wrong with an axis of heads": unit_over_heads,
}
for name, change in MAPS.items():
    mutation(
        name,
        lambda phi: only_row(testing.check_feature_map, "features", phi),
        Exponentials(),
        Exponentials(change),
        check="features",
    )


def only_row(check, name, *subject, **options):
    """Run one row of a table; raise as the table does."""
    known = _recurrence_checks.CHECKS if check is testing.check_recurrence else testing.check.CHECKS
    report = check(*subject, skip=[other for other in known if other != name], **options)
    (detail,) = (row.detail for row in report.rows if row.check == name)
    return testing.Evidence(name, detail)


# Kernels of recurrences.

ours = partial(linattn.linear_recurrence, update_rule="gated_delta", return_state=True)


def gated_delta(query, key, value, log_decay, beta, initial_state=None, **wrong):
    """Loop over tokens, `(B, H, L, d)`; `wrong` replaces a line."""
    shape = (*key.shape[:2], key.shape[3], value.shape[3])
    state = np.zeros(shape, np.float32) if initial_state is None else initial_state
    scale = wrong.get("scale", lambda d, e: d**-0.5)(*shape[2:])
    length, outputs = key.shape[2], []
    for t in range(length):
        q, k, v, g, b = (x[:, :, t] for x in (query, key, value, log_decay, beta))
        state = wrong.get("before", lambda state, t: state)(state, t)
        gate = wrong.get("gate", lambda g, t, n: np.exp(g))(g, t, length)[..., None]
        k, v, b = wrong.get("token", lambda k, v, b, t: (k, v, b))(k, v, b[..., None], t)
        state = gate[..., None] * state
        state = (
            state + k[..., None] * (b * (v - np.einsum("bhd,bhde->bhe", k, state)))[..., None, :]
        )
        state = wrong.get("after", lambda state: state)(state)
        outputs.append(np.einsum("bhd,bhde->bhe", scale * q, state))
    return np.stack(outputs, axis=2), state


def memory_read_in_a_row(*tokens, **gates):
    """As if arrays were contiguous: the strides are ignored."""

    def flat(x):
        base = x if x.base is None else x.base
        return base.ravel()[: x.size].reshape(x.shape)

    return gated_delta(*map(flat, tokens), **{name: flat(x) for name, x in gates.items()})


class Remembering:
    """Keeps the output for the shape of the last call."""

    def __init__(self):
        self.outputs = {}

    def __call__(self, *tokens, **gates):
        output, state = gated_delta(*tokens, **gates)
        return self.outputs.setdefault(output.shape, output), state


KERNELS: dict[str, Any] = {
    "a log decay of 0 taken for a token left out": (
        "decay", {"gate": lambda g, t, n: np.where(g == 0, 0, np.exp(g))},
    ),
    "key channels beyond 8 left out": (
        "sizes", {"token": lambda k, v, b, t: (k * (np.arange(k.shape[-1]) < 8), v, b)},
    ),
    "value columns beyond 64 left out": (
        "sizes", {"token": lambda k, v, b, t: (k, v * (np.arange(v.shape[-1]) < 64), b)},
    ),
    "1 / sqrt(e) for 1 / sqrt(d)": ("loop", {"scale": lambda d, e: e**-0.5}),
    "a state that the third chunk of 512 does not get": (
        "loop", {"before": lambda state, t: 0 * state if t == 1024 else state},
    ),
    "no gate at the end of a last chunk that is not full": (
        "loop", {"gate": lambda g, t, n: np.exp(g) if n % 64 == 0 or t < n - 1 else 1 + 0 * g},
    ),
    "beta of batch element 0": ("loop", {"token": lambda k, v, b, t: (k, v, 0 * b + b[:1])}),
    "gates of head 0": ("loop", {"gate": lambda g, t, n: np.exp(0 * g + g[:, :1])}),
}  # fmt: skip
for name, (check, lines) in KERNELS.items():
    mutation(
        name,
        partial(only_row, testing.check_recurrence, check, update_rule="gated_delta"),
        gated_delta,
        partial(gated_delta, **lines),
        check=check,
    )
for name, check, subject in (
    ("strides ignored", "strided", memory_read_in_a_row),
    ("outputs of the call before", "inputs", Remembering()),
):
    mutation(
        name,
        partial(only_row, testing.check_recurrence, check, update_rule="gated_delta"),
        gated_delta,
        subject,
        check=check,
    )


def grouped(query, key, value, log_decay, initial_state=None, *, transposed=False):
    """The gated rule in the layout of ONNX: two query heads for each head of the state."""
    batch, length, heads = log_decay.shape
    k, v = (np.moveaxis(x.reshape(batch, length, heads, 1, -1), 1, 3) for x in (key, value))
    q = query.reshape(batch, length, *((2, heads) if transposed else (heads, 2)), k.shape[-1])
    q = np.transpose(q, (0, 3, 2, 1, 4) if transposed else (0, 2, 3, 1, 4))
    output, state = linattn.linear_recurrence(
        q, k, v, log_decay=np.moveaxis(log_decay, 1, 2)[:, :, None], update_rule="gated",
        initial_state=None if initial_state is None else initial_state[:, :, None],
        return_state=True,
    )  # fmt: skip
    return np.moveaxis(output, 3, 1).reshape(batch, length, -1), state[:, :, 0]


mutation(
    "grouped heads transposed",
    partial(
        only_row, testing.check_recurrence, "loop", update_rule="gated", layout="onnx",
        lengths=(5, 70),
    ),
    grouped,
    partial(grouped, transposed=True),
    check="loop",
)  # fmt: skip


def sixteen_bits(*tokens, channels=128, **gates):
    query, key, value = (x.astype(np.float32) for x in tokens)
    return ours(query, key * (np.arange(key.shape[-1]) < channels), value, **gates)


def tried_in_16_bits(kernel, dtype="bfloat16"):
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    options = {"dtype": dtype, "dim": 128, "value_dim": 128, "lengths": (64, 320)}
    return only_row(testing.check_recurrence, "loop", kernel, update_rule="gated_delta", **options)


mutation(
    "key channels beyond 64 left out, in bfloat16 of d = 128",
    tried_in_16_bits,
    sixteen_bits,
    partial(sixteen_bits, channels=64),
    check="loop",
)


# Their gradients.


def gradients(change=lambda named, gates: named, *, last=True, rule="gated_delta"):
    """Return our pullback, whose gradients `change` changes."""

    def vjp(*tokens, **gates):
        results, pullback = linattn.linear_recurrence_vjp(
            *tokens, **gates, update_rule=rule, return_state=True
        )

        def pulled(grad_output, grad_state):
            found = pullback(grad_output, grad_state if last else 0 * grad_state)
            named = dict(zip(("query", "key", "value", *gates), found, strict=True))
            return list(change(named, gates).values())

        return results, pulled

    return vjp


def where(name, condition):
    """A gradient that is 0 where an argument is as told."""

    def change(named, gates):
        return named | {name: np.where(condition(gates[name]), 0, named[name])}

    return change


def cut_between(size):
    """No gradient goes from one chunk of tokens to the one before it."""

    def vjp(*tokens, **gates):
        length, state = tokens[1].shape[2], gates.get("initial_state")
        outputs, pullbacks, cuts = [], [], range(0, length, size)
        for start in cuts:
            part = [x[:, :, start : start + size] for x in tokens]
            own = {
                n: x[:, :, start : start + size] for n, x in gates.items() if n != "initial_state"
            }
            if state is not None:
                own["initial_state"] = state
            (output, state), pullback = gradients()(*part, **own)
            outputs.append(output)
            pullbacks.append(pullback)

        def pulled(grad_output, grad_state):
            found = [
                pullback(grad_output[:, :, start : start + size], grad_state * (start == cuts[-1]))
                for start, pullback in zip(cuts, pullbacks, strict=True)
            ]
            joined = [np.concatenate(x, axis=2) for x in zip(*(f[:5] for f in found), strict=True)]
            return joined + ([found[0][5]] if "initial_state" in gates else [])

        return (np.concatenate(outputs, axis=2), state), pulled

    return vjp


GRADIENTS = {
    "a gate's gradient clamped below e^-5": gradients(where("log_decay", lambda g: g < -5)),
    "no gate's gradient at 0": gradients(where("log_decay", lambda g: g == 0)),
    "no gradient between chunks of 256": cut_between(256),
    "no gradient by beta above 1": gradients(where("beta", lambda b: b > 1)),
    "no gradient by keys where there is no initial state": gradients(
        lambda named, gates: named | {"key": named["key"] * ("initial_state" in gates)}
    ),
    "no gradient of values beyond 64 columns": gradients(
        lambda named, gates: (
            named | {"value": named["value"] * (np.arange(named["value"].shape[-1]) < 64)}
        )
    ),
    "no gradient through the final state": gradients(last=False),
}
for name, vjp in GRADIENTS.items():
    mutation(
        name,
        lambda vjp: only_row(
            testing.check_recurrence, "gradient", ours, vjp=vjp, update_rule="gated_delta"
        ),
        gradients(),
        vjp,
        check="gradient",
    )
