"""Recurrences of Dask arrays: block by block, nothing computed, those of the call in memory."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import linattn
from tests.dask_arrays import D, E, chunkings, close, one_thread, refuse

dask: Any = pytest.importorskip("dask")
da: Any = pytest.importorskip("dask.array")

__all__ = ["one_thread"]

recur: Any = linattn.linear_recurrence
vjp: Any = linattn.linear_recurrence_vjp

RULES = ["linear", "gated", "channels", "delta", "gated_delta"]


def problem(rule, length, *, lead=(2,), dtype=np.float64, seed=0):
    """Arguments of a recurrence, with a state that is not 0."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, *lead, length, D))
    arrays = {"query": query, "key": key / 3, "value": rng.standard_normal((*lead, length, E))}
    if rule == "channels":
        arrays["log_decay"] = -rng.exponential(0.5, (*lead, length, D))
    elif "gated" in rule:
        arrays["log_decay"] = -rng.exponential(0.5, (*lead, length))
    if "delta" in rule:
        arrays["beta"] = rng.random((*lead, length))
    arrays["initial_state"] = rng.standard_normal((*lead, D, E))
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    return arrays, "gated" if rule == "channels" else rule


def lazily(arrays, rows):
    """Dask arrays of NumPy's: tokens in chunks of these rows, and of one head."""
    return {
        name: da.from_array(array, chunks=(*(1,) * (array.ndim - 2), rows, -1))
        if name in ("query", "key", "value", "grad_output")
        else da.from_array(array)
        for name, array in arrays.items()
    }


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=4, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 99),
    dtypes=st.sampled_from([("float64",) * 2, ("float32", "float64"), ("float32",) * 2]),
)
def test_any_chunks_give_the_call_in_memory(rule, data, seed, dtypes):
    """Of tokens and of sums, in either dtype."""
    length = data.draw(st.integers(1, 40), "length")
    rows = data.draw(chunkings(length), "rows")
    arrays, update_rule = problem(rule, length, dtype=dtypes[0], seed=seed)
    arrays["initial_state"] = arrays["initial_state"].astype(dtypes[1])
    flags: Any = {"update_rule": update_rule, "return_state": True}
    with linattn.config(precision="float64" if "float64" in dtypes else None):
        want = recur(**arrays, **flags)
        with dask.config.set(scheduler=refuse):
            got = recur(**lazily(arrays, rows), **flags)
    assert got[0].chunks[-2] == rows
    for array, wanted, dtype in zip(dask.compute(*got), want, dtypes, strict=True):
        assert array.dtype == wanted.dtype == dtype
        close(array, wanted, tol=4e-6 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("rule", ["channels", "gated_delta"])
def test_through_many_states(rule):
    """Where states of groups of blocks are merged first; no state is given."""
    arrays, update_rule = problem(rule, 40, lead=(1,))
    del arrays["initial_state"]
    output = recur(**lazily(arrays, 1), update_rule=update_rule).compute()
    close(output, recur(**arrays, update_rule=update_rule), tol=1e-12)


def test_tasks_of_a_block():
    arrays, update_rule = problem("gated_delta", 700)
    del arrays["initial_state"]
    lazy = lazily(arrays, 7)
    numbers = ("log_decay", "beta")
    lazy |= {name: lazy[name].rechunk((1, 7)) for name in numbers}
    output = recur(**lazy, update_rule=update_rule)
    given = {key for array in lazy.values() for key in array.__dask_graph__()}
    # Two give log_decay and beta an axis more.
    assert len(set(output.__dask_graph__()) - given) <= (8 + 2) * 200


def test_chunks_that_do_not_fit():
    arrays, update_rule = problem("linear", 40)
    lazy = lazily(arrays, 20)
    with pytest.raises(ValueError, match=r"key and value must have equal chunks along axis -2, "):
        recur(**lazy | {"value": lazy["value"].rechunk((1, 10, E))}, update_rule=update_rule)


def test_gradients_are_those_of_short_sequences_alone():
    arrays, update_rule = problem("gated_delta", 6)
    output, pullback = vjp(**arrays, update_rule=update_rule)
    lazy = lazily(arrays, 6)
    (cotangent,) = lazily({"query": np.sin(output)}, 6).values()
    got = dask.compute(*vjp(**lazy, update_rule=update_rule)[1](cotangent))
    for array, wanted in zip(got, pullback(np.sin(output)), strict=True):
        close(array, wanted, tol=1e-12)
    message = r"query must be one chunk of at most 1024 rows for gradients of a recurrence"
    with pytest.raises(ValueError, match=message):
        vjp(**lazily(arrays, 3), update_rule=update_rule)[1](cotangent)
