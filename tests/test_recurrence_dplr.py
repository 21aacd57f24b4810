"""The general rule of recurrences, diagonal plus low rank: against the papers' equations.

The tests of all rules, in test_recurrences.py, run it too.
"""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call, no-untyped-def"

from __future__ import annotations

import numpy as np
import pytest

import linattn
from linattn.reference import recurrence
from linattn.testing import check_recurrence
from linattn.testing._recurrence_checks import CHECKS

LEAD, LENGTH, DIM, VALUE_DIM = (2, 3), 37, 6, 4


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def tokens(seed):
    """Queries, keys of norm 1, values, and three numbers in [0, 1] for each channel of a key."""
    rng = np.random.default_rng(seed)
    shape = (*LEAD, LENGTH, DIM)
    query, key = rng.standard_normal((2, *shape))
    return (
        query,
        unit(key),
        rng.standard_normal((*LEAD, LENGTH, VALUE_DIM)),
        rng.random((3, *shape)),
    )


def loop(transition, written, query):
    """Outputs of ``S_t = S_{t-1} A_t + v_t k_t^T``, states (e, d) as in the papers, ``o = S q``."""
    state, outputs = np.zeros((*LEAD, VALUE_DIM, DIM)), []
    for t in range(LENGTH):
        state = state @ transition[..., t, :, :] + written[..., t, :, :]
        outputs.append(np.einsum("...ed,...d->...e", state, query[..., t, :]))
    return np.stack(outputs, axis=-2), np.swapaxes(state, -1, -2)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


def diagonal(x):
    return x[..., None] * np.eye(x.shape[-1])


def rwkv7():
    """Peng et al., "RWKV-7" (2025): ``S (diag(w) - kappa^T (a kappa)) + v^T k``, read by r."""
    query, kappa, value, (w, a, _) = tokens(1)
    w, key = 0.55 + 0.45 * w, draw(*kappa.shape) / 3
    transition = diagonal(w) - outer(kappa, a * kappa)
    arguments = {"log_decay": np.log(w), "beta": a, "erase_key": kappa, "read_key": kappa}
    return (transition, outer(value, key), query), {"key": key, "value": value, **arguments}


def gated_deltanet_2():
    """Hatamizadeh et al. (2026): ``S_t = (I - k (b k)^T) D S_{t-1} + k (w v)^T``."""
    query, key, value, (alpha, b, _) = tokens(2)
    write = np.random.default_rng(3).random(value.shape)
    after = np.eye(DIM) - outer(key, b * key)  # of states (d, e)
    transition = np.swapaxes(after @ diagonal(alpha), -1, -2)
    arguments = {"log_decay": np.log(alpha), "erase_key": key, "read_key": alpha * b * key}
    return (
        (transition, outer(write * value, key), query),
        {"key": key, "value": write * value, **arguments},
    )


def comba():
    """Hu et al., "Comba" (2025): ``S (alpha - b~ k k^T) + b v k^T``, read by ``q - d k``."""
    query, key, value, (alpha, beta, _) = tokens(4)
    alpha, beta, scaled, feedback = alpha[..., :1], beta[..., :1], 0.7, 0.2
    transition = alpha[..., None] * np.eye(DIM) - outer(scaled * beta * key, key)
    corrected = query - feedback * key
    arguments = {
        "log_decay": np.log(alpha)[..., 0],
        "beta": scaled * beta[..., 0],
        "erase_key": key,
        "read_key": key,
    }
    return (
        (transition, outer(beta * value, key), corrected),
        {"key": key, "value": beta * value, **arguments},
    )


@pytest.mark.parametrize("model", [rwkv7, gated_deltanet_2, comba])
def test_models_as_the_papers_write_them(model):
    equation, arguments = model()
    want, last = loop(*equation)
    options = {"query": equation[2], "update_rule": "dplr", "scale": 1.0}
    for compute in (linattn.linear_recurrence, recurrence):
        flags = {} if compute is recurrence else {"return_state": True}
        output, state = compute(**arguments, **options, **flags)
        np.testing.assert_allclose(output, want, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(state, last, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_the_other_rules_are_cases_of_it(rule, by_channel):
    query, key, value, (alpha, beta, _) = tokens(5)
    log_decay = np.log(alpha) if by_channel else np.log(alpha[..., 0])
    given = {"log_decay": log_decay} if "gated" in rule else {}
    decay = np.exp(log_decay if by_channel else log_decay[..., None]) if given else 1.0
    rates = beta[..., 0]
    own = given | ({"beta": rates} if "delta" in rule else {})
    general = given | {"erase_key": key, "read_key": decay * key}
    general |= {"beta": rates if "delta" in rule else np.zeros_like(rates)}
    written = rates[..., None] * value if "delta" in rule else value
    want = linattn.linear_recurrence(query, key, value, update_rule=rule, **own)
    got = linattn.linear_recurrence(query, key, written, update_rule="dplr", **general)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_strong_decays_read_what_was_there():
    """A read key acts before the decay of its token: nothing is divided by e^-60."""
    query, key, value, (_, beta, _) = tokens(6)
    decay = np.where(np.arange(LENGTH) % 4 == 3, -60.0, -0.01) * np.ones((*LEAD, LENGTH))
    given = {"erase_key": key, "read_key": key, "beta": beta, "log_decay": decay}
    want, _ = recurrence(query, key, value, update_rule="dplr", **given)
    for chunk_size in (4, 32):
        got = linattn.linear_recurrence(
            query, key, value, update_rule="dplr", chunk_size=chunk_size, **given
        )
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def read_after(query, key, value, *, read_key, log_decay, **given):
    """A kernel with the mistake of reading after the decay."""
    g = log_decay if log_decay.ndim == key.ndim else log_decay[..., None]
    return linattn.linear_recurrence(
        *(query, key, value),
        update_rule="dplr",
        read_key=np.exp(g) * read_key,
        log_decay=log_decay,
        return_state=True,
        **given,
    )


def erased_by_token(query, key, value, *, beta=None, **given):
    """A kernel with the mistake of taking the first channel of beta for all."""
    beta = beta if beta is None or beta.ndim < key.ndim else beta[..., 0]
    options = {"update_rule": "dplr", "return_state": True}
    return linattn.linear_recurrence(query, key, value, beta=beta, **given, **options)


def test_the_kit_tells_kernels_of_it_from_wrong_ones():
    options = {"update_rule": "dplr", "return_state": True}

    def right(query, key, value, **given):
        return linattn.linear_recurrence(query, key, value, **given, **options)

    def vjp(query, key, value, **given):
        return linattn.linear_recurrence_vjp(query, key, value, **given, **options)

    def run(kernel, *checks, **more):
        skip = [name for name in CHECKS if name not in checks]
        report = check_recurrence(
            kernel, update_rule="dplr", by_channel=True, skip=skip, on_fail="return", **more
        )
        return {row.check: row.result for row in report.rows}

    few = ("loop", "beta", "decay", "gradient")
    assert {*run(right, *few, vjp=vjp, lengths=[70]).values()} == {"passed"}
    assert run(right, "golden") == {"golden": "passed"}
    assert run(read_after, "golden") == {"golden": "FAILED"}
    assert run(erased_by_token, "beta", lengths=[70]) == {"beta": "FAILED"}


def test_what_cannot_be():
    query, key, value, _ = tokens(7)
    good = {"erase_key": key, "read_key": key}
    for message, options in (
        ("erase_key must be given", {"erase_key": None}),
        ("read_key must be given", {"read_key": None}),
        ("read_key must have the length and dim of key", {"read_key": key[..., :3]}),
        ("beta must have a number for each token", {"beta": key[..., :3]}),
        ("log_decay must be at most 0", {"log_decay": np.ones(LENGTH)}),
    ):
        with pytest.raises(ValueError, match=message):
            linattn.linear_recurrence(query, key, value, update_rule="dplr", **good | options)
    with pytest.raises(ValueError, match="erase_key must be None"):
        recurrence(query, key, value, update_rule="linear", **good)
