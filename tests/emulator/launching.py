"""Run CUDA kernels on a CPU: `Emulator.launch`, and what it checks.

The kernels include `device.cuh` and use no other intrinsic; the `device.cuh` of this folder gives
its functions C++ bodies, `runtime.cpp` runs the threads. Other headers are beside the kernels. A
launch fails with `EmulationError`

* where outputs differ, in any bit, between orders in which threads, warps and blocks take turns:
  the mark of a missing barrier;
* on writes beyond an array, between the elements of a view, or to a read-only array (what is
  around an array reads as NaN), and beyond dynamic shared memory;
* on warp functions that not all 32 lanes reach, and barriers that some threads never reach;
* on addresses that are not aligned, shared memory addressed beyond its size, indices beyond a local
  array, division by zero;
* on arguments whose types are not those of the kernel's parameters.

Shared memory holds NaN at the start of a block, and the 16 bytes of a `copy_async` are NaN until
`copies_done`. Threads take turns only where they wait for each other: a kernel in which one spins
until another has written never ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).resolve().parent
FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    # What nvcc does: reinterpreted memory and signed overflow mean what they say.
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    # Its checks forbid a longjmp from one stack to another.
    "-U_FORTIFY_SOURCE",
    "-w",
    f"-I{FOLDER}",
]
CHECKS = [
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
]
# Named one by one, without the library of the checks: runtime.cpp is what they call.
LIBRARIES = ["-nodefaultlibs", "-Wl,-z,defs", "-lstdc++", "-lm", "-lgcc_s", "-lc", "-lgcc"]
WRAPPER = """#include "device.cuh"
namespace {{
#line 1 "{name}"
{text}
}}
EMULATED_KERNEL({function})
"""
# A kernel's library, and in it the state of the launch, is one for all emulators.
_LOCK = threading.Lock()
ASCENDING, DESCENDING = 0, 1
GUARD = 1 << 14
# NaN of the signalling kind, which x += y changes. The second is of float64, whose upper half is a
# quiet NaN of float32; both are NaN in float16 and bfloat16.
GUARD_PATTERN = 0x7FB57FB57FB57FB5
GUARD_PATTERN_OF_DOUBLES = 0x7FF57FB57FB57FB5
ALIGNMENT = 256
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_SHARED = 227 * 1024


class EmulationError(RuntimeError):
    """A kernel that does not compile, or does what a GPU would not forgive."""


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(frozen=True)
class _Kernel:
    launch: Any
    kinds: str
    sizes: str


class _Memory:
    """A copy, between guards, of the memory that some arguments share."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.size = low, high - low
        self._buffer = np.empty(self.size + 2 * GUARD + ALIGNMENT, np.uint8)
        skip = -self._buffer.ctypes.data % ALIGNMENT
        self._whole = self._buffer[skip : skip + self.size + 2 * GUARD]
        self.bytes = self._whole[GUARD : GUARD + self.size]
        self.begin = self._whole.ctypes.data + GUARD
        # Elements of arguments that may be written.
        self.writable = np.zeros(self.size, np.bool_)
        self.arguments: list[tuple[int, npt.NDArray[Any]]] = []
        self._guards = (self._whole[:GUARD], self._whole[GUARD + self.size :])
        self._pattern = _pattern(GUARD_PATTERN)
        self.original = np.empty(self.size, np.uint8)
        ctypes.memmove(self.original.ctypes.data, low, self.size)

    def address(self, array: npt.NDArray[Any]) -> int:
        return self.begin + _pointer(array) - self.low

    def add(self, number: int, array: npt.NDArray[Any]) -> None:
        self.arguments.append((number, array))
        if array.itemsize == 8:
            self._pattern = _pattern(GUARD_PATTERN_OF_DOUBLES)
        if array.flags.writeable:
            self._elements(self.writable, array)[...] = True

    def _elements(self, flat: npt.NDArray[Any], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the bytes of an argument's elements as a view of one byte each of `flat`."""
        return np.ndarray(
            (*array.shape, array.itemsize),
            flat.dtype,
            flat,
            _pointer(array) - self.low if array.size else 0,
            (*array.strides, 1),
        )

    def reset(self) -> None:
        self.bytes[...] = self.original
        for guard in self._guards:
            guard[...] = self._pattern

    def check(self, function: str) -> None:
        names = " and ".join(f"args[{number}]" for number, _ in self.arguments)
        before, after = (np.flatnonzero(guard != self._pattern) for guard in self._guards)
        if before.size:
            message = f"{function}: a write {GUARD - before[-1]} bytes before the memory of {names}"
            raise EmulationError(message)
        if after.size:
            message = f"{function}: a write {after[0]} bytes after the memory of {names}"
            raise EmulationError(message)
        wrong = (self.bytes != self.original) & ~self.writable
        if not wrong.any():
            return
        for number, array in self.arguments:
            if self._elements(wrong, array).any():
                message = f"{function}: args[{number}] is read-only and was written"
                raise EmulationError(message)
        message = f"{function}: a write between the elements of {names}"
        raise EmulationError(message)

    def assert_same(self, result: npt.NDArray[Any], function: str, orders: str) -> None:
        different = self.bytes != result
        if not different.any():
            return
        for number, array in self.arguments:
            elements = self._elements(different, array).any(axis=-1)
            if elements.any():
                where = tuple(int(i[0]) for i in np.nonzero(elements))
                message = (
                    f"{function}: args[{number}] differs between orders of the threads ({orders}), "
                    f"in {int(elements.sum())} elements, first at {where}: a barrier is missing, "
                    "or blocks depend on each other"
                )
                raise EmulationError(message)

    def store(self, result: npt.NDArray[Any]) -> None:
        if (result != self.original).any():
            ctypes.memmove(self.low, result.ctypes.data, self.size)


def _pattern(word: int) -> npt.NDArray[np.uint8]:
    return np.full(GUARD // 8, word, "<u8").view(np.uint8)


def _pointer(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _bounds(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the first byte of the memory that an array is a view of, and the one after it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if array.size == 0:
        return _pointer(array), _pointer(array)
    return np.lib.array_utils.byte_bounds(array)


def _memories(arrays: Mapping[int, npt.NDArray[Any]]) -> tuple[dict[int, int], list[_Memory]]:
    """Return each array's address in a copy of its memory, and the copies; aliases share one."""
    bounds = {number: _bounds(array) for number, array in arrays.items()}
    memories: list[_Memory] = []
    ranges: list[list[int]] = []
    for low, high in sorted(bounds.values()):
        if ranges and low < ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], high)
        else:
            ranges.append([low, high])
    for low, high in ranges:
        memories.append(_Memory(low, high))
    addresses = {}
    for number, array in arrays.items():
        low, high = bounds[number]
        memory = next(m for m in memories if m.low <= low and high <= m.low + m.size)
        memory.add(number, array)
        addresses[number] = memory.address(array) if array.size else memory.begin
    return addresses, memories


class Emulator:
    """Compiles kernels with g++ and runs them on NumPy arrays.

    Parameters
    ----------
    cache : Path
        Folder for what is compiled; several processes may share it.
    kernels : Path
        Folder of the sources that `launch` is given by a relative name.

    Attributes
    ----------
    orders : sequence of int
        In which threads, warps and blocks take turns: 0 ascending, 1 descending, any other number
        the seed of a shuffle. Every launch runs once an order.
    """

    def __init__(self, cache: Path, kernels: Path) -> None:
        self.orders: Sequence[int] = (ASCENDING, DESCENDING, 2)
        self._cache, self._kernels_folder = cache, kernels
        self._kernels: dict[tuple[str, str, tuple[str, ...]], _Kernel] = {}

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of NaN, or of bytes 0xff: what nobody has written yet."""
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    def launch(
        self,
        source: str,
        function: str,
        options: Mapping[str, str | int],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: Sequence[npt.NDArray[Any] | np.generic | None],
    ) -> None:
        """Run a kernel once in each of `orders`, and write its results into the arrays of `args`.

        Parameters
        ----------
        source : str
            Path of the source; a relative one is below the folder of the kernels.
        function : str
            Name of the kernel.
        options : mapping
            Macros and their values.
        grid, block : tuple of int
            Numbers of blocks and threads along x, y, z.
        shared : int
            Bytes of dynamic shared memory.
        args : sequence
            Arrays become pointers to their first element, None a null pointer; NumPy scalars are
            passed by value.

        Raises
        ------
        EmulationError
            See the module.
        """
        _check_size("grid", grid, MAX_GRID)
        _check_size("block", block, MAX_BLOCK)
        if block[0] * block[1] * block[2] > MAX_BLOCK[0]:
            message = f"{function}: block must have at most {MAX_BLOCK[0]} threads, got {block}"
            raise EmulationError(message)
        if not 0 <= shared <= MAX_SHARED:
            message = f"{function}: shared must be from 0 to {MAX_SHARED} bytes, got {shared}"
            raise EmulationError(message)
        with _LOCK:
            kernel = self._kernel(source, function, options)
            _check_types(function, kernel, args)
            self._run(kernel, function, grid, block, shared, args)

    def _run(
        self,
        kernel: _Kernel,
        function: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        args: Sequence[npt.NDArray[Any] | np.generic | None],
    ) -> None:
        arrays = {i: arg for i, arg in enumerate(args) if isinstance(arg, np.ndarray)}
        addresses, memories = _memories(arrays)
        values = [
            np.array(addresses.get(i, 0), np.uintp)
            if arg is None or isinstance(arg, np.ndarray)
            else np.array(arg)
            for i, arg in enumerate(args)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        ranges = (_Range * len(memories))(*(_Range(m.begin, m.size) for m in memories))
        results: list[npt.NDArray[np.uint8]] = []
        for order in self.orders:
            for memory in memories:
                memory.reset()
            error = kernel.launch(
                function.encode(),
                pointers,
                (ctypes.c_uint * 3)(*grid),
                (ctypes.c_uint * 3)(*block),
                shared,
                order,
                ranges,
                len(memories),
            )
            if error is not None:
                raise EmulationError(error.decode())
            for memory in memories:
                memory.check(function)
            if not results:
                results = [memory.bytes.copy() for memory in memories]
            for memory, result in zip(memories, results, strict=True):
                memory.assert_same(result, function, f"{self.orders[0]} and {order}")
        for memory, result in zip(memories, results, strict=True):
            memory.store(result)

    def _kernel(self, source: str, function: str, options: Mapping[str, str | int]) -> _Kernel:
        path = self._kernels_folder / source
        text = path.read_text()
        macros = tuple(f"-D{name}={value}" for name, value in sorted(options.items()))
        key = (text, function, macros)
        if key not in self._kernels:
            wrapper = WRAPPER.format(name=path.name, text=text, function=function)
            library = ctypes.CDLL(str(self._library(wrapper, macros)))
            library.launch.restype = ctypes.c_char_p
            library.launch.argtypes = [
                ctypes.c_char_p,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_uint64,
                ctypes.c_void_p,
                ctypes.c_size_t,
            ]
            texts = []
            for call in (library.parameter_kinds, library.parameter_sizes):
                call.restype = ctypes.c_char_p
                texts.append(call().decode())
            self._kernels[key] = _Kernel(library.launch, *texts)
        return self._kernels[key]

    def _library(self, wrapper: str, macros: tuple[str, ...]) -> Path:
        runtime = self._build((FOLDER / "runtime.cpp").read_text(), ["-O3", "-c"], [])
        # After the folder of FLAGS, so that the device.cuh found is the one there.
        flags = [*CHECKS, *macros, "-shared", f"-I{self._kernels_folder}"]
        return self._build(wrapper, flags, [str(runtime), *LIBRARIES])

    def _build(self, text: str, flags: Sequence[str], inputs: Sequence[str]) -> Path:
        headers = [(FOLDER / name).read_text() for name in ("runtime.h", "device.cuh")]
        headers += [path.read_text() for path in sorted(self._kernels_folder.glob("*.cuh"))]
        # Headers count by what they say, not by where they are.
        options = [flag for flag in (*FLAGS, *flags) if not flag.startswith("-I")]
        parts = [_compiler(), text, *headers, *options, *inputs]
        built = self._cache / hashlib.sha256("\0".join(parts).encode()).hexdigest()
        if built.exists():
            return built
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            unit, out = Path(folder) / "unit.cpp", Path(folder) / "out"
            unit.write_text(text)
            command = ["g++", *FLAGS, *flags, "-o", str(out), str(unit), *inputs]
            finished = subprocess.run(command, capture_output=True, text=True)
            if finished.returncode:
                raise EmulationError(finished.stderr)
            # In one step, as another process may be building the same.
            os.replace(out, built)
        return built


@cache
def _compiler() -> str:
    asked = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    return asked.stdout


def _check_size(name: str, size: tuple[int, int, int], largest: tuple[int, int, int]) -> None:
    if len(size) != 3 or not all(1 <= n <= most for n, most in zip(size, largest, strict=True)):
        message = f"{name} must be three numbers from 1 to {largest}, got {size}"
        raise EmulationError(message)


def _check_types(
    function: str, kernel: _Kernel, args: Sequence[npt.NDArray[Any] | np.generic | None]
) -> None:
    if len(args) != len(kernel.kinds):
        message = f"{function} takes {len(kernel.kinds)} arguments, got {len(args)}"
        raise EmulationError(message)
    for i, (arg, kind, size) in enumerate(zip(args, kernel.kinds, kernel.sizes, strict=True)):
        if arg is None or isinstance(arg, np.ndarray):
            got = "P8"
        elif isinstance(arg, np.generic):
            got = f"{arg.dtype.kind}{arg.dtype.itemsize}"
        else:
            message = f"{function}: args[{i}] must be an array, a NumPy scalar or None, got {arg!r}"
            raise EmulationError(message)
        if got != kind + size:
            message = f"{function}: args[{i}] must be of type {kind}{size}, got {got}"
            raise EmulationError(message)
