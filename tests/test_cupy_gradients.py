"""Gradients of the CuPy backend on the fake GPU: its kernels, interpreted, against float64.

The oracle is the generic code in float64, which other tests hold to finite differences.
"""

# mypy: disable-error-code="call-overload"

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_cupy
from linattn._driver.problem import linear_problem
from linattn.typing import Cotangent, Declined, State
from linattn_cupy import device, fused, gradients
from tests.fake_gpu.device import BF16, F16, F32, MAPS, D, Device, error, inputs
from tests.fake_gpu.device import exact as in_float64

pytestmark = pytest.mark.fake_gpu

TOLERANCE = {BF16: 2e-2, F16: 1e-2, F32: 1e-5}
REJECTED = Declined("rows were rejected, or a gradient is not finite")
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def pulled(query, key, value, grad, phi, grad_state=None, **settings):
    _, pullback = linattn.linear_attention_vjp(query, key, value, phi, **settings)
    return pullback(grad, grad_state)


exact = partial(in_float64, pulled)


def pull(dtype, *given, grad_state=None, **settings):
    """The whole tier on arrays of a dtype."""
    *arrays, phi = given

    def work(query, key, value, grad, grad_state, **settings):
        problem = linear_problem(query, key, value, phi, **settings)
        return linattn_cupy.attention_vjp(problem, Cotangent(grad, grad_state))

    return Device.run(work, *(x.astype(dtype) for x in arrays), grad_state, **settings)


def pull_by_the_door(gpu, *given):
    """Causal gradients by the public function."""
    *arrays, phi = given

    def work(query, key, value, grad):
        pullback = linattn.linear_attention_vjp(query, key, value, phi, is_causal=True)[1]
        gpu.launches.clear()
        return pullback(grad)

    return Device.run(work, *arrays)


def agree(found, expected, dtype):
    """Every gradient has the dtype asked for and the value expected."""
    for name, x, y in zip(("query", "key", "value"), found, expected, strict=False):
        assert x.dtype == dtype
        assert x.shape == y.shape
        assert error(x, y) < TOLERANCE[dtype], name


@CAUSAL
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, dtype) for name in MAPS for dtype in (BF16, F32)), ("positive", F16), ("elu", F16)],
)
def test_gradients_of_streams_agree_with_float64(gpu, name, dtype, is_causal, tile):
    """After a state, with a cotangent of the last one; masked keys hold NaN."""
    gpu.processors = 50
    phi, mask = MAPS[name], np.random.default_rng(1).random((2, 1, 150)) < 0.7
    query, key, value, grad = inputs((2, 3))
    attend = partial(linattn.linear_attention, return_state=True)
    first = inputs((2, 3), 90, seed=1)
    settings: dict[str, Any] = {"is_causal": is_causal, "key_mask": mask, "chunk_size": 40}
    with linattn.without_backends():
        _, settings["initial_state"] = attend(*first[:3], phi)
        _, after = attend(query, key, value, phi, **settings)
    by_state = given = None
    if dtype is not F16:
        by_state = np.random.default_rng(3).standard_normal(after.kvz.shape).astype(F32)
        given = State(by_state, -after.log_scale.astype(F32), 0)
    arrays = query, key, value, grad, phi
    has_state = by_state is not None
    expected = exact(*arrays, grad_state=by_state, return_state=has_state, **settings)
    hidden = ~np.broadcast_to(mask, (2, 3, 150))
    key[hidden], value[hidden] = np.nan, np.inf
    found = pull(dtype, *arrays, grad_state=given, **settings)
    agree(found, expected, dtype)
    for x in found[1:3]:
        assert_array_equal(x[hidden], 0)
    kernel = "causal_gradients" if is_causal else "read_gradients"
    assert ("pull_weights" if dtype is F32 else kernel) in gpu.launches
    assert found[3].dtype == F32
    assert error(found[3], expected[3]) < max(TOLERANCE[dtype], 2e-2 * (dtype is F16))


def test_a_state_that_all_heads_share(gpu):
    phi = MAPS["positive"]
    arrays = inputs((3,), 100)
    with linattn.without_backends():
        query, key, value, _ = (x[:1] for x in arrays)
        _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    expected = exact(*arrays, phi, initial_state=state)
    found = pull(BF16, *arrays, phi, initial_state=state)
    agree(found, expected, BF16)
    assert found[3].shape == expected[3].shape == state.kvz.shape
    assert error(found[3], expected[3]) < 2e-2


@CAUSAL
@pytest.mark.parametrize("place", ["query", "key", "value", "grad"])
def test_what_is_not_finite_is_left_to_the_generic_code(gpu, place, is_causal):
    query, key, value, grad = inputs((2,), 100)
    {"query": query, "key": key, "value": value, "grad": grad}[place][1, 75, 3] = np.nan
    answer = pull(BF16, query, key, value, grad, MAPS["positive"], is_causal=is_causal)
    assert answer == REJECTED


@pytest.mark.parametrize(
    ("later", "size"), [("keys", 8), ("keys", 12), ("queries", 30)], ids=["keys", "all", "queries"]
)
def test_what_underflows_at_a_shared_scale_is_left_to_the_generic_code(gpu, later, size):
    """The first 40 rows of a chunk see keys that weigh nothing beside those behind them."""
    phi = MAPS["positive"]
    query, key, value, grad = inputs((2,), 64)
    if later == "keys":
        key[1, :40] *= size
    else:
        direction = size * phi.projection[3] / np.linalg.norm(phi.projection[3])
        key[1, :40] -= direction
        key[1, 40:] += direction
        query[1, :40] += direction
    query, key = (x.astype(F16) for x in (query, key))
    value, grad = (x.astype(F16) for x in (value, grad))
    assert pull(BF16, query, key, value, grad, phi, is_causal=True) == REJECTED
    found = pull_by_the_door(gpu, query, key, value, grad, phi)
    assert "causal_gradients" in gpu.launches
    agree(found, exact(query, key, value, grad, phi, is_causal=True), F16)


@CAUSAL
def test_a_device_with_little_shared_memory(gpu, is_causal):
    device._warn_once.cache_clear()
    gpu.shared_bytes = 15_000
    with pytest.warns(RuntimeWarning, match="bytes of shared memory a block, this device has"):
        answer = pull(BF16, *inputs(), MAPS["positive"], is_causal=is_causal)
    assert isinstance(answer, Declined)
    assert gpu.launches == []


def test_reads_of_shorter_chunks_where_memory_is_short(gpu):
    query, key, value, grad = inputs()
    phi = MAPS["positive"]
    variant = fused.Variant("exponential", False, D, 48, 32, 3)
    gpu.shared_bytes = gradients._shared(variant, 128, sources=False, targets=True) - 1
    found = pull(BF16, query, key, value, grad, phi)
    assert gpu.launches.count("read_gradients") == 2
    agree(found, exact(query, key, value, grad, phi), BF16)


# The first pass is reused ------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_pullback_takes_what_the_first_pass_made(gpu, dtype, is_causal):
    """Nothing is computed again, and the caller may write over the output, and pull twice."""
    gpu.processors = 50
    *arrays, grad = (x.astype(dtype) for x in inputs())
    expected = exact(*arrays, grad, MAPS["positive"], is_causal=is_causal)

    def work(query, key, value, grad):
        output, pullback = linattn.linear_attention_vjp(
            query, key, value, MAPS["positive"], is_causal=is_causal
        )
        output[...] = np.nan
        gpu.launches.clear()
        with linattn.explain() as report:
            first = pullback(grad)
            second = pullback(grad)
        assert report.choices == ()  # the pullback of the first pass, and no other code
        return first, second

    first, second = Device.run(work, *arrays, grad)
    for x, y, z in zip(first, second, expected, strict=True):
        assert_array_equal(x, y)
        assert error(x, z) < (2e-2 if dtype is BF16 else 1e-5)
    again = {"read_states", "causal_rows", "segment_states", "redo_rows"}
    assert not again & set(gpu.launches)
    if dtype is F32:
        # Keys of each block once in each pullback: no block makes states for the next.
        assert gpu.launches.count("key_weights") == (4 if is_causal else 2)


def test_a_pullback_after_rejected_rows_is_the_generic_codes(gpu):
    """The first pass computes such rows again; its states are not for the pullback."""
    query, key, value, grad = (x.astype(F16) for x in inputs((2,), 64))
    key[1, :40] *= 8
    phi = MAPS["positive"]
    output = Device.run(
        lambda *x: linattn.linear_attention_vjp(*x, phi, is_causal=True)[0], query, key, value
    )
    attend = linattn.linear_attention
    assert error(output, in_float64(attend, query, key, value, phi, is_causal=True)) < 5e-3
    found = pull_by_the_door(gpu, query, key, value, grad, phi)
    agree(found, exact(query, key, value, grad, phi, is_causal=True), F16)


# Float32 -----------------------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize("what", ["nan", "jump"])
def test_float32_gradients_that_are_left_to_generic_code(gpu, what, is_causal):
    query, key, value, grad = inputs((2,), 64)
    if what == "nan":
        grad[1, 40, 3] = np.nan
    else:
        key[1, :40] *= 12
    phi = MAPS["positive"]

    def work(query, key, value, grad):
        problem = linear_problem(query, key, value, phi, is_causal=is_causal)
        return linattn_cupy.attention_vjp(problem, Cotangent(grad, None))

    rejects = is_causal or what == "nan"
    answer = Device.run(work, query, key, value, grad)
    assert (answer == REJECTED) is rejects
    if not rejects:
        agree_32 = exact(query, key, value, grad, phi)
        assert all(error(x, y) < 1e-5 for x, y in zip(answer, agree_32, strict=False))
