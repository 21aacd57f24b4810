"""Arrays of another library on a GPU reach linattn_cupy by DLPack, on the fake GPU.

torch and JAX have no GPU there: a stand-in hands its memory over as their arrays do. Nothing of
this was run on a real card.
"""

from __future__ import annotations

from typing import Any, ClassVar

import array_api_compat
import numpy as np
import pytest

import linattn
from linattn import _home
from linattn._driver import forward
from linattn._driver.problem import exact_problem, linear_problem
from tests.fake_gpu.device import cupy

pytestmark = pytest.mark.fake_gpu

RNG = np.random.default_rng(0)
HOST = RNG.standard_normal((3, 2, 70, 8), dtype=np.float32)
PHI = linattn.feature_maps.PositiveFeatures(8, 16, rng=0)


class Foreign:
    """An array of another library: memory of a GPU that DLPack shares, and nothing to compute."""

    streams: ClassVar[list[Any]] = []

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array_namespace__(self, **_: Any) -> Any:
        return array_api_compat.array_namespace(self.array)

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def abroad(problem: Any) -> Any:
    """Hand the arrays of a problem to the other library."""
    arrays = {n: Foreign(getattr(problem, n)) for n in ("query", "key", "value")}
    return problem.replace(dtype=np.dtype(problem.dtype), **arrays)


@pytest.mark.parametrize("name", ["full", "causal", "softmax"])
def test_it_runs_there_in_the_stream_of_the_caller(name, monkeypatch):
    query, key, value = map(cupy.asarray, HOST)
    if name == "softmax":
        problem = exact_problem(query, key, value)
        want = linattn.softmax_attention(*HOST)
    else:
        is_causal = name == "causal"
        problem = linear_problem(query, key, value, PHI, is_causal=is_causal)
        attend: Any = linattn.linear_attention
        want = attend(*HOST, PHI, is_causal=is_causal)
    stream, ran = cupy.cuda.Stream(non_blocking=True), []

    def view(array: Any) -> Any:
        ran.append(cupy.cuda.get_current_stream().ptr)
        found = _home._shared(array)
        assert found.data.ptr == array.array.data.ptr
        return found

    home = _home.on_gpu(0, stream.ptr, view, Foreign)
    monkeypatch.setattr(_home, "home_of", lambda array: home if type(array) is Foreign else None)
    Foreign.streams.clear()
    with linattn.explain() as report:
        output, *_ = forward.solve(abroad(problem), return_state=False)
    stream.synchronize()
    assert set(ran) == {stream.ptr} == set(Foreign.streams)
    assert report.ran("home") == {"cupy"}
    assert "linattn_cupy" in {choice.code for choice in report.choices}
    assert type(output) is Foreign
    np.testing.assert_allclose(cupy.asnumpy(output.array), want, atol=1e-5)


def test_what_cannot_be_shared_stays(monkeypatch):
    """An array that another library cannot hand over, as of a dtype that CuPy lacks."""

    class Closed(Foreign):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("no DLPack of this")

    with pytest.raises(_home.Abroad):
        _home._shared(Closed(cupy.zeros(3)))
    home = _home.on_gpu(0, None, _home._shared, Foreign)
    assert home is not None
    assert not home.covers((Closed(cupy.zeros(3)),))
    assert home.covers((Foreign(cupy.zeros(3)),))
