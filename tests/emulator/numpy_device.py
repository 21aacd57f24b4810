"""The GPU of linattn_cupy replaced by NumPy arrays and the emulator of kernels.

All of the backend then runs as it is, but for the few functions that call CuPy and for the matrix
products, which are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import linattn_cupy.device
import linattn_cupy.states
from linattn import _dispatch
from linattn_cupy.layout import is_uniform

SHARED_BYTES = 227 * 1024
MEMORY_BYTES = 80 * 2**30


class NumpyDevice:
    """What linattn_cupy runs on while this is installed.

    Attributes
    ----------
    launches : list of str
        Names of the kernels that were launched, in order.
    redone : int
        Segments of heads whose rows were computed again.
    processors : int
        How many multiprocessors the device says it has.
    shared_bytes : int
        How much shared memory a block may have.
    memory_bytes : int
        How much memory the device has.
    unavailable : str or None
        A reason for which no kernel can be built, or None.
    """

    def __init__(self, emulator: Any) -> None:
        self.launches: list[str] = []
        self.redone = 0
        self.processors = 4
        self.shared_bytes = SHARED_BYTES
        self.memory_bytes = MEMORY_BYTES
        self.unavailable: str | None = None
        self.emulator = emulator

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace CuPy by this device, and NumPy's backend by the one of CuPy."""
        replaced = {
            "launch": self.launch,
            "empty": self.emulator.empty,
            "full": np.full,
            "zeros": np.zeros,
            "address": lambda array: array.ctypes.data,
            "contiguous": np.ascontiguousarray,
            "broadcast": np.broadcast_to,
            "processors": lambda: self.processors,
            "shared_bytes": lambda: self.shared_bytes,
            "memory_bytes": lambda: self.memory_bytes,
            "on_device": lambda array: nullcontext(),
            "open_compiler": lambda: None,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(linattn_cupy.device, name, function)
        monkeypatch.setattr(linattn_cupy.states, "multiply", multiply)
        monkeypatch.setattr(_dispatch, "_entry_points", lambda: {"numpy": "linattn_cupy"})

    def launch(self, source: str, function: str, *args: Any) -> None:
        if self.unavailable is not None:
            raise linattn_cupy.device.KernelUnavailableError(self.unavailable)
        linattn_cupy.device.check_shared_memory(function, args[3], self.shared_bytes)
        self.launches.append(function)
        if function == "redo_rows":
            self.redone += int(args[-1][0].sum())
        self.emulator.launch(source, function, *args)


def multiply(
    a: npt.NDArray[np.float32],
    b: npt.NDArray[np.float32],
    out: npt.NDArray[np.float32],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = False,
) -> None:
    """`linattn_cupy.products.multiply` on NumPy arrays, with its requirements checked."""
    arrays: Sequence[npt.NDArray[np.float32]] = (a, b, out)
    assert all(x.dtype == np.float32 and x.ndim == 3 and is_uniform(x) for x in arrays)
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    product = np.matmul(a, b)
    assert product.shape == out.shape
    if add:
        out += product
    else:
        out[...] = product
