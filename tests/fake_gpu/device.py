"""CuPy arrays on the fake GPU, as tests of kernels see them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if not hasattr(ctypes.CDLL(None), "fake_gpu_record"):
    pytest.skip("needs the fake GPU: tests/fake_gpu/run.sh", allow_module_level=True)

import cupy
import ml_dtypes

import linattn
import linattn_cupy.device
from linattn.feature_maps import GeneralizedExponentialFeatures, PositiveFeatures
from tests.attentions import maps

__all__ = [
    "BF16",
    "F16",
    "F32",
    "MAPS",
    "D",
    "Device",
    "E",
    "content",
    "cupy",
    "error",
    "exact",
    "inputs",
    "moved",
]

D, E = 16, 24
"""Sizes that most tests share, as every other size is compiled too."""

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
MAPS: dict[str, Any] = {
    **maps(D, 40, "positive", "hyperbolic", "elu", "relu"),
    "tilted": GeneralizedExponentialFeatures(D, 40, A=-0.1, rng=0),
    "per-head": PositiveFeatures.from_projection(
        np.random.default_rng(7).standard_normal((3, 40, D))
    ),
}


def inputs(
    lead: tuple[int, ...] = (3,),
    length: int = 150,
    value_dim: int = E,
    dim: int = D,
    keys: int | None = None,
    seed: int = 0,
) -> list[Any]:
    """Queries, keys, values and a cotangent that bfloat16 and float16 hold exactly."""
    rng = np.random.default_rng(seed)
    keys = length if keys is None else keys
    shapes = ((length, dim), (keys, dim), (keys, value_dim), (length, value_dim))
    arrays = [rng.standard_normal((*lead, *shape)) for shape in shapes]
    return [x.astype(BF16).astype(F16).astype(BF16).astype(F32) for x in arrays]


def error(first: Any, second: Any) -> Any:
    """Norm of the difference over the norm of what is wanted."""
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    return np.linalg.norm(first - second) / np.linalg.norm(second)


def content(state: Any) -> Any:
    """What a state says, whatever its scale."""
    return state.kvz.astype(np.float64) * np.exp(state.log_scale.astype(np.float64))[..., None]


def moved(move: Callable[[Any], Any], value: Any) -> Any:
    """Return tuples, lists and dicts with their arrays moved."""
    if isinstance(value, np.ndarray | cupy.ndarray):
        return move(value)
    if isinstance(value, dict):
        return {name: moved(move, one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        made = [moved(move, one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def exact(function: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    """Call generic code in float64, which other tests hold to the dense oracle."""

    def wide(x: Any) -> Any:
        return x if x.dtype == bool else x.astype(np.float64)

    with linattn.without_backends():
        return function(*moved(wide, given), **moved(wide, settings))


class Device:
    """The fake GPU: what linattn_cupy launches, and limits to set.

    Attributes
    ----------
    launches : list of str
        Names of the kernels of linattn_cupy that were launched, in order.
    redone : int
        Segments of heads whose rows were computed again.
    processors, shared_bytes, memory_bytes : int
        Multiprocessors, shared memory of a block and memory that linattn_cupy is told of.
    unavailable : str or None
        A reason for which no kernel can be built, or None.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.redone = 0
        self.processors = 4
        self.shared_bytes = 227 * 1024
        self.memory_bytes = 80 * 2**30
        self.unavailable: str | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have linattn_cupy ask this object for limits, and tell it of launches."""
        inner = linattn_cupy.device.launch

        def launch(source: str, function: str, *args: Any) -> None:
            if self.unavailable is not None:
                raise linattn_cupy.device.KernelUnavailableError(self.unavailable)
            linattn_cupy.device.check_shared_memory(function, args[3], self.shared_bytes)
            self.launches.append(function)
            if function == "redo_rows":
                self.redone += int(args[-1][0].get().sum())
            inner(source, function, *args)

        monkeypatch.setattr(linattn_cupy.device, "launch", launch)
        for name in ("processors", "shared_bytes", "memory_bytes"):
            monkeypatch.setattr(linattn_cupy.device, name, lambda name=name: getattr(self, name))

    @staticmethod
    def run(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Call a function with arrays on the device; return its results on the host."""
        on_device = moved(cupy.asarray, args), moved(cupy.asarray, settings)
        return moved(cupy.asnumpy, function(*on_device[0], **on_device[1]))
