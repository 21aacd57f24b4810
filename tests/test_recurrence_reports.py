"""Mistakes that others have reported in kernels of recurrences: `check_recurrence` names them.

Each mutant is named by what its report says.
"""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc"

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import linattn
from linattn.testing import check_recurrence
from linattn.testing._recurrence_checks import CHECKS

RULE = "gated_delta"
ours = partial(linattn.linear_recurrence, update_rule=RULE, return_state=True)
ours_vjp = partial(linattn.linear_recurrence_vjp, update_rule=RULE)


def only(*names):
    return [name for name in CHECKS if name not in names]


def by_chunks(query, key, value, beta, initial_state=None, *, chunk, solve):
    """Return the delta rule by chunks; `solve(X)` inverts `I + X`, X strictly lower triangular."""
    scale, length = key.shape[-1] ** -0.5, key.shape[-2]
    shape = (*key.shape[:-2], key.shape[-1], value.shape[-1])
    state = np.zeros(shape, key.dtype) + (0 if initial_state is None else initial_state)
    outputs = []
    for start in range(0, length, chunk):
        q, k, v = (x[..., start : start + chunk, :] for x in (query, key, value))
        b = beta[..., start : start + chunk, None]
        inverse = solve(np.tril(b * (k @ np.swapaxes(k, -1, -2)), -1))
        new = inverse @ (b * (v - k @ state))
        outputs.append(scale * (q @ state + np.tril(q @ np.swapaxes(k, -1, -2)) @ new))
        state = state + np.swapaxes(k, -1, -2) @ new
    return np.concatenate(outputs, axis=-2), state


def substitution(X):
    """Rows one after another."""
    inverse = np.broadcast_to(np.eye(X.shape[-1], dtype=X.dtype), X.shape).copy()
    for i in range(1, X.shape[-1]):
        inverse[..., i, :i] = -(X[..., i : i + 1, :i] @ inverse[..., :i, :i])[..., 0, :]
    return inverse


def powers(X):
    """`(I - X)(I + X^2)(I + X^4)...`: binomials of both signs, which cancel."""
    eye = np.eye(X.shape[-1], dtype=X.dtype)
    inverse, square = eye - X, X @ X
    for _ in range(1, X.shape[-1].bit_length()):
        inverse, square = inverse @ (eye + square), square @ square
    return inverse


def narrow_powers(X):
    """The same where products are kept in half precision: inf - inf."""
    with np.errstate(all="ignore"):
        return powers(X.astype(np.float16)).astype(X.dtype)


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_the_cancelling_inverse_is_found(chunk):
    """It is right for random keys, and off by 1.9e-4 and more at a cosine of 0.99."""
    options = {"update_rule": "delta", "skip": only("golden", "loop", "correlated")}
    wrong = partial(by_chunks, chunk=chunk, solve=powers)
    report = check_recurrence(wrong, **options, on_fail="return")
    failed = {row.check: row.detail for row in report.rows if row.result == "FAILED"}
    assert "keys of cosine" in failed["correlated"]
    assert set(failed) <= {"correlated", "loop"} - ({"loop"} if chunk == 16 else set())
    right = check_recurrence(partial(by_chunks, chunk=chunk, solve=substitution), **options)
    assert right.passed, str(right)


def nan_for_correlated_keys(*tokens, **gates):
    beta, decay = gates["beta"], gates.pop("log_decay")
    assert decay is not None
    return by_chunks(*tokens, beta, gates.get("initial_state"), chunk=64, solve=narrow_powers)


def changed(change):
    """Our kernel with its result changed: `change(output, state, tokens, gates)`."""

    def kernel(*tokens, **gates):
        return change(*ours(*tokens, **gates), tokens, gates)

    return kernel


def zero_keys_are_normalized(*tokens, **gates):
    query, key, value = tokens
    with np.errstate(invalid="ignore"):
        unit = key / np.linalg.norm(key, axis=-1, keepdims=True)
    return ours(query, unit, value, **gates)


def decays_in_half_precision(*tokens, **gates):
    gates["log_decay"] = np.log(np.exp(gates["log_decay"]).astype(np.float16)).astype(np.float32)
    return ours(*tokens, **gates)


def part(gates, stop):
    return {n: x if n == "initial_state" else x[:, :, :stop] for n, x in gates.items()}


def last_chunk_is_left_out(*tokens, **gates):
    length = tokens[0].shape[2]
    full = length - length % 256 if length > 256 else length
    output, state = ours(*(x[:, :, :full] for x in tokens), **part(gates, full))
    zeros = np.zeros((*output.shape[:2], length - full, output.shape[3]), output.dtype)
    return np.concatenate([output, zeros], axis=2), state


def padding_is_written_into_the_state(*tokens, **gates):
    """A last chunk of 127 or 255 tokens is filled up with its last token."""
    output, state = ours(*tokens, **gates)
    if tokens[0].shape[2] in (127, 255):
        last = [np.concatenate([x, x[:, :, -1:]], axis=2) for x in tokens]
        more = {
            n: x if n == "initial_state" else np.concatenate([x, x[:, :, -1:]], axis=2)
            for n, x in gates.items()
        }
        state = ours(*last, **more)[1]
    return output, state


def a_tile_crosses_the_border(output, state, tokens, gates):
    """From 256 tokens on a tile of four tokens sees the first token of the next chunk."""
    if tokens[0].shape[2] > 256:
        output = output.copy()
        output[:, :, 252:256] += 0.01 * tokens[2][:, :, 256:257]
    return output, state


def the_state_misses_the_last_token(output, state, tokens, gates):
    length = tokens[0].shape[2]
    if length % 128 == 1 and length > 128:
        state = ours(*(x[:, :, :-1] for x in tokens), **part(gates, length - 1))[1]
    return output, state


def blocks_wrap(output, state, tokens, gates):
    output = output.copy()
    output[65536:] = output[: len(output[65536:])]
    return output, state


def blocks_beyond_are_not_written(output, state, tokens, gates):
    state = state.copy()
    state[65535:] = 0
    return output, state


FORWARD = {
    "NaN for correlated keys": (nan_for_correlated_keys, "correlated"),
    "zero keys are normalized": (zero_keys_are_normalized, "correlated"),
    "decays in half precision": (decays_in_half_precision, "decay"),
    "a partial last chunk is left out": (last_chunk_is_left_out, "borders"),
    "padding is written into the state": (padding_is_written_into_the_state, "borders"),
    "a tile crosses the border of a chunk": (changed(a_tile_crosses_the_border), "borders"),
    "the state misses a lonely last token": (changed(the_state_misses_the_last_token), "borders"),
    "block indices wrap at 65,536": (changed(blocks_wrap), "many"),
    "blocks beyond 65,535 are not written": (changed(blocks_beyond_are_not_written), "many"),
}
"""What a report says, the kernel, and the check that must name it."""


@pytest.mark.parametrize("name", FORWARD)
def test_reported_mistakes_are_found(name):
    kernel, check = FORWARD[name]
    with np.errstate(all="ignore"):
        report = check_recurrence(kernel, update_rule=RULE, skip=only(check), on_fail="return")
    (row,) = report.rows
    assert row.result == "FAILED", str(report)
    words = {"correlated": "key", "decay": "decays of", "borders": "tokens", "many": "65,537"}
    assert words[check] in row.detail


def wrong_gradients(change):
    def vjp(*tokens, **gates):
        output, pullback = ours_vjp(*tokens, **gates)
        length = tokens[0].shape[2]

        def pulled(grad_output):
            *others, state = pullback(grad_output)
            return change(length, others, state)

        return output, pulled

    return vjp


def short_sequences_have_none(length, others, state):
    return *others, (0 * state if length < 16 else state)


def short_last_chunks_have_none(length, others, state):
    query, key, *rest = others
    if length % 64 < 8:
        key = key.copy()
        key[:, :, length - length % 64 :] = 0
    return query, key, *rest, state


def the_gate_of_the_first_token_has_none(length, others, state):
    query, key, value, decay, beta = others
    decay = decay.copy()
    decay[:, :, 0] = 0
    return query, key, value, decay, beta, state


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (short_sequences_have_none, "gradient of initial_state, 1 tokens"),
        (short_last_chunks_have_none, "gradient of key, 70 tokens"),
        (the_gate_of_the_first_token_has_none, "gradient of log_decay, 70 tokens"),
    ],
)
def test_reported_mistakes_of_gradients_are_found(change, where):
    options = {"update_rule": RULE, "skip": only("gradient"), "on_fail": "return"}
    report = check_recurrence(ours, vjp=wrong_gradients(change), **options)
    assert not report.passed
    assert where in report.rows[0].detail
