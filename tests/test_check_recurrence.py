"""`check_recurrence`: what is right passes in every layout, and planted mistakes are found."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload"

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import linattn
from linattn import testing
from linattn.testing import CheckFailedError, RecurrenceLayout, check_recurrence
from linattn.testing._recurrence_checks import CHECKS

RULES = ("linear", "gated", "delta", "gated_delta")


def right(query, key, value, log_decay=None, beta=None, initial_state=None, **options):
    """Compute a recurrence token by token, on `(B, H, L, d)`, with knobs that mistakes turn.

    One of `options` is `is_wrong(name)`, and others are the kernel's own.
    """
    is_wrong = options.get("is_wrong", lambda name: False)
    batch, heads, length, dim = key.shape
    state = np.zeros((batch, heads, dim, value.shape[-1]), key.dtype)
    if initial_state is not None:
        state = state + initial_state
    if is_wrong("keys normalized"):
        key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    if is_wrong("query scaled in place"):
        query *= 1.5
    outputs = []
    for t in range(length):
        q, k, v = (x[:, :, t] for x in (query, key, value))
        if is_wrong("a token later is seen") and t + 1 < length:
            k = k + 1e-3 * key[:, :, t + 1]
        gate = np.ones_like(k)
        if log_decay is not None:
            g = log_decay[:, :, t]
            g = g if g.ndim == 3 else g[..., None]
            g = np.maximum(g, -9) if is_wrong("gates clipped") else g
            gate = np.broadcast_to(np.exp(g), k.shape)
            if is_wrong("first gate left out") and t == 0:
                gate = np.ones_like(k)
        before = state
        if not is_wrong("gate after the update"):
            state = gate[..., None] * state
        if beta is not None:
            b = beta[:, :, t, None]
            if is_wrong("beta clipped to 1"):
                b = np.minimum(b, 1)
            seen = before if is_wrong("delta of the state before its decay") else state
            found = np.einsum("bhd,bhde->bhe", k, seen)
            v = b * v - found if is_wrong("beta on the value only") else b * (v - found)
        after = state + k[..., None] * v[..., None, :]
        if is_wrong("gate after the update"):
            after = gate[..., None] * after
        read = state if is_wrong("read before the write") else after
        state = after
        if is_wrong("state in float16"):
            state = state.astype(np.float16).astype(key.dtype)
        outputs.append(dim**-0.5 * np.einsum("bhd,bhde->bhe", q, read))
    if is_wrong("padding decays the state") and log_decay is not None and length % 64:
        state = state * np.exp(np.mean(log_decay))
    if is_wrong("state returned in the first head"):
        state = np.repeat(state[:, :1], heads, axis=1)
    return np.stack(outputs, axis=2), state


SKIPPED = ["packed", "correlated", "borders", "many"]
"""What is left out: `tests/test_recurrence_reports.py` plants what these find."""

MISTAKES = {
    "gate after the update": "golden",
    "gates clipped": "decay",
    "first gate left out": "golden",
    "beta on the value only": "golden",
    "beta clipped to 1": "beta",
    "delta of the state before its decay": "golden",
    "read before the write": "golden",
    "keys normalized": "keys",
    "a token later is seen": "causal",
    "query scaled in place": "inputs",
    "state in float16": "loop",
    "padding decays the state": "split",
    "state returned in the first head": "loop",
}
"""And a check that must find it."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake):
    def wrong(*tokens, **gates):
        return right(*tokens, **gates, is_wrong=lambda name: name == mistake)

    skip = [name for name in CHECKS if name != MISTAKES[mistake]]
    with pytest.raises(CheckFailedError, match=f"{MISTAKES[mistake]} .*FAILED") as caught:
        check_recurrence(wrong, update_rule="gated_delta", skip=skip)
    report = check_recurrence(wrong, update_rule="gated_delta", skip=skip, on_fail="return")
    assert caught.value.report == report
    assert str(caught.value) == str(report)


def test_quotients_of_decays_are_found():
    """The chunked formula by `exp(a_i) exp(-a_j)`, right but where decays are strong."""

    def wrong(query, key, value, log_decay, initial_state):
        total = np.cumsum(log_decay, axis=-1)
        grown, left = np.exp(-total)[..., None], np.exp(total)[..., None]
        scores = np.tril((query * left) @ np.swapaxes(key * grown, -1, -2))
        output = (query * left) @ initial_state + scores @ value
        after = np.swapaxes(key * grown * left[..., -1:, :], -1, -2) @ value
        return output / np.sqrt(key.shape[-1]), left[..., -1:, :] * initial_state + after

    skip = [*SKIPPED, "no state"]
    report = check_recurrence(wrong, update_rule="gated", skip=skip, on_fail="return")
    rows = {row.check: row.result for row in report.rows}
    assert rows["decay"] == "FAILED"
    assert rows["golden"] == rows["inputs"] == "passed"


def test_mistakes_of_packing_and_of_gradients_are_found():
    rule = {"update_rule": "delta"}
    kernel = partial(linattn.linear_recurrence, **rule, return_state=True)

    def one_sequence(*tokens, cu_seqlens=None, **gates):
        if cu_seqlens is None:
            return kernel(*tokens, **gates)
        first = gates.pop("initial_state")
        output, state = kernel(*tokens, **gates, initial_state=first[0])
        return output, np.repeat(state[None], len(first), axis=0)

    def vjp(*tokens, **gates):
        output, pullback = linattn.linear_recurrence_vjp(*tokens, **gates, **rule)

        def without_the_triangle(grad_output):
            *others, beta, state = pullback(grad_output)
            return *others, 1.01 * beta, state

        return output, without_the_triangle

    report = check_recurrence(one_sequence, **rule, vjp=vjp, skip=["many"], on_fail="return")
    failed = {row.check: row.detail for row in report.rows if row.result == "FAILED"}
    assert set(failed) == {"packed", "gradient"}
    assert "gradient of beta" in failed["gradient"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by_channel", [False, True])
def test_ours_passes(rule, by_channel):
    if by_channel and "gated" not in rule:
        pytest.skip("the rule has no gate")
    kernel = partial(linattn.linear_recurrence, update_rule=rule, return_state=True)
    vjp = partial(linattn.linear_recurrence_vjp, update_rule=rule)
    for dtype in ("float32", "float64") if rule == "gated_delta" else ("float32",):
        report = check_recurrence(
            kernel, update_rule=rule, by_channel=by_channel, vjp=vjp, dtype=dtype,
            skip=[] if (rule, dtype) == ("delta", "float32") else ["many"],
        )  # fmt: skip
        assert report.passed, str(report)
        skipped = {row.check for row in report.rows if row.result == "skipped"}
        assert skipped == {"decay"} - {"decay" * ("gated" in rule)} | {"beta"} - {
            "beta" * ("delta" in rule)
        }
        assert max(len(line) for line in str(report).splitlines()) <= 80


def heads_last(*tokens, xp, **gates):
    """Our kernel on `(B, L, H, d)`, as a user of flash-linear-attention would call theirs."""
    cu_seqlens, state = gates.pop("cu_seqlens", None), gates.pop("initial_state", None)
    ours = [xp.swapaxes(x, 1, 2) for x in tokens]
    swapped = {name: xp.swapaxes(x, 1, 2) for name, x in gates.items()}
    if cu_seqlens is not None:
        ours = [x[0] for x in ours]
        swapped = {name: x[0] for name, x in swapped.items()}
    output, state = linattn.linear_recurrence(
        *ours, **swapped, initial_state=state, cu_seqlens=cu_seqlens, update_rule="gated_delta",
        return_state=True, chunk_size=32,
    )  # fmt: skip
    if cu_seqlens is not None:
        output = output[None]
    return xp.swapaxes(output, 1, 2), state


def test_the_layout_of_flash_linear_attention():
    report = check_recurrence(
        partial(heads_last, xp=np), update_rule="gated_delta", layout="fla", skip=["many"]
    )
    assert report.passed, str(report)


@pytest.mark.frameworks
def test_kernels_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kernel = partial(heads_last, xp=torch)
    report = check_recurrence(
        kernel,
        update_rule="gated_delta",
        layout="fla",
        by_channel=True,
        asarray=torch.from_numpy,
        skip=["many"],
    )
    assert report.passed, str(report)


def autograd(kernel):
    """Make a `vjp` of a kernel of torch, through the final state too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def vjp(*tokens, **gates):
        leaves = [x.clone().requires_grad_() for x in (*tokens, *gates.values())]
        results = kernel(*leaves[:3], **dict(zip(gates, leaves[3:], strict=True)))
        return results, lambda *grads: torch.autograd.grad(results, leaves, grads)

    return vjp


@pytest.mark.frameworks
def test_attention_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def attention(query, key, value, is_causal=False, key_mask=None):
        q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (query, key, value))
        visible = np.tri(q.shape[-2], k.shape[-2], dtype=bool) | (not is_causal)
        visible = torch.from_numpy(visible if key_mask is None else visible & key_mask)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(
            q, k, v, **({"attn_mask": visible} if is_causal or key_mask is not None else {})
        )

    def step(query, key, value, state):
        new = [x[..., None, :] for x in (key, value)]
        if state is not None:
            new = [np.concatenate(pair, axis=-2) for pair in zip(state, new, strict=True)]
        return attention(query[..., None, :], *new)[..., 0, :], new

    # A weight of 0 times a value of NaN is NaN there.
    for is_causal in (False, True):
        testing.assert_mask_is_slice(attention=attention, is_causal=is_causal, garbage=(1e3,))
        testing.assert_batch_independent(attention=attention, is_causal=is_causal)
    evidence = testing.assert_causal(attention=attention)
    assert "33, 70, 333 tokens; heads 0, 3; float64, float32" in evidence.detail
    testing.assert_permutation_invariant(attention=attention)
    testing.assert_normalized(attention=attention)
    testing.assert_streaming(attention=attention, step=step, length=(33, 333))


def test_sizes_and_lengths_of_one_kernel():
    """A kernel made for d = 128 and chunks of 64, as many are."""

    def kernel(query, key, value, **gates):
        assert key.shape[-1] == value.shape[-1] == 128
        assert key.shape[2] % 64 == 0
        return linattn.linear_recurrence(
            query, key, value, **gates, update_rule="gated", return_state=True
        )

    options = {"update_rule": "gated", "dim": 128, "value_dim": 128, "lengths": (64, 320)}
    report = check_recurrence(kernel, dtype="float16", **options)
    assert report.passed
    skipped = {row.check for row in report.rows if row.result == "skipped"}
    assert skipped == {
        *("golden", "sizes", "split", "step", "beta", "borders", "many", "packed", "gradient")
    }
    details = [row.detail for row in report.rows if row.result == "passed"]
    assert all("d x e 128 x 128" in detail and "float16" in detail for detail in details)


def test_strided_arrays_may_be_refused():
    def kernel(*tokens, **gates):
        if not tokens[0].flags.c_contiguous:
            raise ValueError("query must be contiguous")
        return right(*tokens, **gates)

    skip = [name for name in CHECKS if name != "strided"]
    (row,) = check_recurrence(kernel, update_rule="linear", skip=skip).rows
    assert (row.result, row.detail[:8]) == ("skipped", "rejected")


@pytest.mark.frameworks
def test_kernels_of_jax():
    """A scan, as models in JAX have it."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jnp = jax.numpy

    @jax.jit
    def kernel(query, key, value, log_decay, beta, initial_state=0.0):
        def token(state, x):
            q, k, v, g, b = x
            state = jnp.exp(g)[..., None, None] * state
            new = b[..., None] * (v - jnp.einsum("bhd,bhde->bhe", k, state))
            state = state + k[..., None] * new[..., None, :]
            return state, jnp.einsum("bhd,bhde->bhe", q, state) / jnp.sqrt(q.shape[-1])

        shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
        start = jnp.zeros(shape, key.dtype) + initial_state
        tokens = [jnp.moveaxis(x, 2, 0) for x in (query, key, value, log_decay, beta)]
        state, output = jax.lax.scan(token, start, tuple(tokens))
        return jnp.moveaxis(output, 0, 2), state

    report = check_recurrence(
        kernel,
        update_rule="gated_delta",
        asarray=jnp.asarray,
        lengths=(1, 65),  # each is compiled
        skip=["packed", "split", "borders", "many"],
    )
    assert report.passed, str(report)


def test_the_layout_of_onnx():
    """`(B, L, H d)`, two query heads for each head of the state."""

    def kernel(query, key, value, log_decay, initial_state=None):
        batch, length, _ = query.shape
        heads, group = log_decay.shape[-1], 2
        q = np.moveaxis(query.reshape(batch, length, heads, group, -1), 1, 3)
        k, v = (np.moveaxis(x.reshape(batch, length, heads, 1, -1), 1, 3) for x in (key, value))
        g = np.moveaxis(log_decay, 1, 2)[:, :, None]
        state = None if initial_state is None else initial_state[:, :, None]
        output, state = linattn.linear_recurrence(
            q, k, v, log_decay=g, initial_state=state, update_rule="gated", return_state=True
        )
        return np.moveaxis(output, 3, 1).reshape(batch, length, -1), state[:, :, 0]

    report = check_recurrence(kernel, update_rule="gated", layout="onnx", skip=SKIPPED)
    assert report.passed, str(report)


def test_a_layout_of_your_own():
    """Length first."""
    layout = RecurrenceLayout(
        tokens=lambda x: np.moveaxis(x, 2, 0),
        numbers=lambda x: np.moveaxis(x, 2, 0),
        output=lambda y, heads: np.moveaxis(y, 0, 2),
    )

    def kernel(*tokens, **gates):
        gates = {n: x if n == "initial_state" else np.moveaxis(x, 0, 2) for n, x in gates.items()}
        output, state = right(*(np.moveaxis(x, 0, 2) for x in tokens), **gates)
        return np.moveaxis(output, 2, 0), state

    report = check_recurrence(kernel, update_rule="delta", layout=layout, skip=SKIPPED)
    assert report.passed, str(report)


def test_what_a_kernel_raises_or_returns_is_reported():
    options = {"update_rule": "linear", "skip": SKIPPED, "on_fail": "return"}
    report = check_recurrence(lambda *tokens, **gates: 1 / 0, **options)
    assert "raises ZeroDivisionError" in report.rows[0].detail
    report = check_recurrence(lambda q, k, v, **gates: q, **options)
    assert "want (output, state)" in report.rows[0].detail


def test_bad_arguments():
    for match, options in (
        ("update_rule must be one of linear", {"update_rule": "rwkv"}),
        ("layout must be one of linattn, fla, onnx", {"layout": "bhtd"}),
        ("dtype must be one of", {"dtype": "float8"}),
        ("skip must be one of golden", {"skip": ["golden", "steps"]}),
        ("on_fail must be 'raise' or 'return'", {"on_fail": "warn"}),
        ("lengths must not be empty", {"lengths": ()}),
        ("value_dim must be", {"value_dim": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            check_recurrence(right, **({"update_rule": "linear"} | options))
