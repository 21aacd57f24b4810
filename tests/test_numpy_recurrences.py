"""Recurrences of the NumPy backend: tiles, strong and weak decays, layouts, heads that share."""

# Star arguments.
# mypy: disable-error-code="arg-type, call-overload, misc, no-untyped-call"

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
from linattn.reference import recurrence
from linattn_numpy import limits, recurrence_chunks, tuning
from tests import test_recurrences

KINDS = ["linear", "gated", "gated-channels", "delta", "gated_delta", "gated_delta-channels"]
RTOL = {"float64": 1e-11, "float32": 5e-6}

kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", ["float64", "float32"])


def problem(kind, *, length=150, lead=(3,), dim=32, dtype="float64"):
    """Random arguments with weak decays, and the name of the rule."""
    rule, _, channels = kind.partition("-")
    sizes = {"length": length, "lead": lead, "dim": dim, "value_dim": 5, "decay": 0.1}
    arguments = test_recurrences.problem(rule, bool(channels), **sizes)
    return {name: array.astype(dtype) for name, array in arguments.items()}, rule


def assert_as_loop(arguments, rule, **options):
    """Compare with the loop what the backend itself returns."""
    with linattn.explain() as report:
        got = linattn.linear_recurrence(**arguments, update_rule=rule, return_state=True, **options)
    assert report.ran("recurrence") == {"linattn_numpy"}
    want = recurrence(**arguments, update_rule=rule)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape
        tolerance = RTOL[ours.dtype.name] * np.max(np.abs(theirs), initial=1)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    return got


@kinds
@dtypes
@pytest.mark.parametrize("chunk_size", [1, 4, 100, None])
def test_tiles_and_chunks(kind, dtype, chunk_size, monkeypatch):
    """Many tiles, and a last chunk that is shorter."""
    monkeypatch.setattr(tuning, "RECURRENCE_TILE_ROWS", 200)
    arguments, rule = problem(kind, dtype=dtype)
    assert_as_loop(arguments, rule, chunk_size=chunk_size)


@pytest.mark.parametrize("dim", [2, 4, 8])
def test_rounding_of_reflections_does_not_add_up(dim):
    """At beta = 2 nothing is forgotten; more keys than dimensions lean on each other."""
    arguments, rule = problem("delta", length=3000, dim=dim, dtype="float32")
    arguments["beta"][...] = 2
    got, _ = assert_as_loop(arguments, rule)
    want, _ = recurrence(**arguments, update_rule=rule)
    assert np.max(np.abs(got - want)) < 1e-6 * np.max(np.abs(want))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gated" in kind])
@dtypes
def test_strong_decays_in_some_tiles(kind, dtype, monkeypatch):
    """From weak to strong to infinite, of one token or of many."""
    monkeypatch.setattr(tuning, "RECURRENCE_TILE_ROWS", 200)
    arguments, rule = problem(kind, dtype=dtype, length=300)
    decay, by_channel = arguments["log_decay"], kind.endswith("channels")
    rows = decay if by_channel else decay[..., None]
    rows[:, 70] = -50
    rows[1, 100:140, ::2] = -3
    rows[:, 200:260] *= 500
    rows[2, 290, -1:] = -np.inf
    assert_as_loop(arguments, rule)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gated" in kind])
@dtypes
@pytest.mark.parametrize("strength", [0.01, 0.05, 0.2, 0.7, 2, 5, 30])
def test_decays_of_any_strength(kind, dtype, strength):
    """Runs of many chunks, of few, of one, and halves of a chunk that meet: all ways there are."""
    arguments, rule = problem(kind, dtype=dtype, length=700)
    arguments["log_decay"] *= 10 * strength
    assert_as_loop(arguments, rule)


@dtypes
@pytest.mark.parametrize("kind", ["gated-channels", "gated_delta-channels"])
def test_small_queries_keep_their_digits_where_decays_are_strong(kind, dtype):
    """Decayed numbers are rounded, in units of their own token."""
    arguments, rule = problem(kind, dtype=dtype)
    arguments["log_decay"] *= 200
    sizes = (10.0 ** np.random.default_rng(1).uniform(-25, 25, (3, 150, 1))).astype(dtype)
    arguments["query"] *= sizes
    got = linattn.linear_recurrence(**arguments, update_rule=rule)
    want = recurrence(**arguments, update_rule=rule)[0] / sizes
    np.testing.assert_allclose(got / sizes, want, rtol=0, atol=RTOL[dtype] * np.abs(want).max())


@dtypes
def test_weak_decays_keep_their_digits_beside_the_limit(dtype, monkeypatch):
    """As strong as the factors of a chunk may be."""
    arguments, rule = problem("gated_delta", length=64, dtype=dtype)
    arguments["log_decay"][...] = -0.99 * limits.MAX_TOKEN_DECAY_EXPONENT / 8
    strong, made = [], recurrence_chunks._strong_by_token

    def noted(*arguments):
        strong.append(1)
        return made(*arguments)

    monkeypatch.setattr(recurrence_chunks, "_strong_by_token", noted)
    assert_as_loop(arguments, rule)
    assert not strong
    arguments["log_decay"] *= 1.2
    assert_as_loop(arguments, rule)
    assert strong


@kinds
@pytest.mark.parametrize("strength", [1, 100])
def test_nan_of_one_call_is_not_met_in_the_next(kind, strength):
    """Workspaces are used again, and 0 times NaN is NaN."""
    arguments, rule = problem(kind, length=33)
    if "log_decay" in arguments:
        arguments["log_decay"] *= strength
    linattn.linear_recurrence(**{n: 0 * a + np.nan for n, a in arguments.items()}, update_rule=rule)
    assert_as_loop(arguments, rule)


@kinds
def test_layouts(kind):
    """Length before heads, backwards, every other column, and one key for all tokens."""
    arguments, rule = problem(kind)
    want = linattn.linear_recurrence(**arguments, update_rule=rule)
    swapped = dict(arguments)
    for name in ("query", "key", "value"):
        swapped[name] = np.ascontiguousarray(arguments[name].swapaxes(0, 1)).swapaxes(0, 1)
    np.testing.assert_allclose(
        linattn.linear_recurrence(**swapped, update_rule=rule), want, atol=1e-12
    )
    strided = dict(arguments)
    for name in ("query", "key", "value"):
        strided[name] = np.repeat(arguments[name], 2, axis=-1)[..., ::2]
    strided["value"] = np.ascontiguousarray(arguments["value"][..., ::-1])[..., ::-1]
    np.testing.assert_allclose(
        linattn.linear_recurrence(**strided, update_rule=rule), want, atol=1e-12
    )
    arguments["key"] = np.broadcast_to(arguments["key"][:, :1], arguments["key"].shape)
    assert_as_loop(arguments, rule)


@kinds
def test_threads_change_no_bit(kind, monkeypatch):
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    arguments, rule = problem(kind, lead=(2, 5))
    results = []
    for number in (1, 2, 3):
        with linattn.config(num_threads=number):
            results.append(
                linattn.linear_recurrence(**arguments, update_rule=rule, return_state=True)
            )
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("heads", [(), (1,), (7,), (3, 5), (12, 1), (2, 20)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_head_is_in_one_task(heads, threads):
    from linattn_numpy.recurrences import _tasks

    times = np.zeros(heads, int)
    for task in _tasks(heads, threads):
        part = times[task]
        assert 1 <= len(part) <= tuning.RECURRENCE_HEADS
        part += 1
    assert_array_equal(times, 1)
