"""What the backend asks of CuPy: memory, kernels and their launch.

Kernels are compiled when they are first used, for the device at hand, and cached by CuPy on disk.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from linattn.typing import Array, Declined

KERNELS = Path(__file__).with_name("kernels")
MIN_CAPABILITY = 80
"""Least compute capability, times 10: the kernels use its instructions."""

LOAD_FAILURE = "libnvrtc-builtins"
"""In NVRTC's message where it could not load a library of its own, and has not read the source."""

Options = Mapping[str, int]
Grid = tuple[int, int, int]
_F = TypeVar("_F", bound=Callable[..., Any])


class _Lazy:
    """CuPy, imported when it is first used: this package is imported where there is none too."""

    def __getattr__(self, name: str) -> Any:
        try:
            import cupy
        except ModuleNotFoundError as error:
            raise AttributeError(f"{error}, which has {name}") from error
        return getattr(cupy, name)


cupy: Any = _Lazy()


class UnsupportedError(Exception):
    """No kernel takes this problem; the generic code does."""


class KernelUnavailableError(Exception):
    """A kernel cannot run here; the generic code can."""


def require(condition: bool, reason: str) -> None:
    """Raise UnsupportedError, with a reason, where what the kernels need does not hold."""
    if not condition:
        raise UnsupportedError(reason)


def compile_options(options: Options) -> tuple[str, ...]:
    """Options of the compiler for one variant of a source file."""
    defined = tuple(f"-D{name}={value}" for name, value in sorted(options.items()))
    return ("-std=c++17", f"-I{KERNELS}", f"-DHEADERS={_headers()}", *defined)


@cache
def _headers() -> str:
    """Hash of what the sources include: CuPy caches compiled kernels by source and options."""
    texts = (path.read_bytes() for path in sorted(KERNELS.glob("*.cuh")))
    return "x" + hashlib.sha256(b"".join(texts)).hexdigest()


_first_compilation = threading.Lock()


@cache
def open_compiler() -> None:
    """Compile a kernel while no other thread does; the first call of a process.

    NVRTC 13.0 loads a library of its own when it first compiles, and fails in the threads that
    compile meanwhile; so would CuPy's own kernels, whatever they are for.
    """
    try:
        with _first_compilation:
            code = 'extern "C" __global__ void nothing() {}'
            cupy.RawModule(code=code).get_function("nothing")
    except Exception as error:  # compilers and drivers each have errors of their own
        raise KernelUnavailableError(f"nothing can be compiled: {error}") from error


class _Kernel(NamedTuple):
    """A function, and how much dynamic shared memory it may be launched with."""

    function: Any
    shared_bytes: int


@lru_cache(maxsize=512)
def _kernel(
    source: str, function: str, options: tuple[tuple[str, int], ...], device: int
) -> _Kernel | str:
    """Build a kernel, or return the reason why it never can be built; either is cached."""
    capability = int(cupy.cuda.Device(device).compute_capability)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability / 10} is below {MIN_CAPABILITY / 10}"
    code = (KERNELS / source).read_text(encoding="utf-8")
    try:
        given = compile_options(dict(options))
        kernel = cupy.RawModule(code=code, options=given).get_function(function)
        # CuPy has one function for all callers: the limit of one launch would hold for the next.
        dynamic_bytes = shared_bytes() - kernel.shared_size_bytes
        kernel.max_dynamic_shared_size_bytes = dynamic_bytes
    except Exception as error:  # of drivers and devices, and perhaps temporary
        reason = f"{source} does not build here: {error}"
        is_compilers = isinstance(error, cupy.cuda.compiler.CompileException)
        if is_compilers and LOAD_FAILURE not in str(error):
            return reason
        raise KernelUnavailableError(reason) from error
    return _Kernel(kernel, dynamic_bytes)


def launch(
    source: str,
    function: str,
    options: Options,
    grid: Grid,
    block: Grid,
    shared: int,
    args: Sequence[Any],
) -> None:
    """Launch a kernel on the current device and stream; None is a null pointer.

    Raises
    ------
    KernelUnavailableError
        It cannot be built for this device, or not now, or needs more shared memory than that has.
    """
    device = cupy.cuda.runtime.getDevice()
    kernel = _kernel(source, function, tuple(options.items()), device)
    if isinstance(kernel, str):
        raise KernelUnavailableError(kernel)
    check_shared_memory(function, shared, kernel.shared_bytes)
    pointers = tuple([0 if arg is None else arg for arg in args])  # half the time of a generator
    kernel.function(grid, block, pointers, shared_mem=shared)


def check_shared_memory(what: str, needed: int, available: int) -> None:
    """Raise KernelUnavailableError where a block may not have so much shared memory."""
    if needed > available:
        raise KernelUnavailableError(
            f"{what} needs {needed:,} bytes of shared memory a block, this device has {available:,}"
        )


def address(array: Array) -> int:
    """Return where an array's first element lies."""
    return int(array.data.ptr)


def processors() -> int:
    """Count the multiprocessors of the current device."""
    return _attribute("MultiProcessorCount", cupy.cuda.runtime.getDevice())


def shared_bytes() -> int:
    """Return how much shared memory a block may have on the current device."""
    return _attribute("MaxSharedMemoryPerBlockOptin", cupy.cuda.runtime.getDevice())


def capability() -> int:
    """Return ten times the compute capability of the current device."""
    return int(cupy.cuda.Device().compute_capability)


def name() -> str:
    """Return what the current device is called."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return str(properties["name"].decode())


def stream() -> Any:
    """Return CuPy's current stream."""
    return cupy.cuda.get_current_stream()


def memory_bytes() -> int:
    """Return how much memory the current device has."""
    return _memory_bytes(cupy.cuda.runtime.getDevice())


@lru_cache(maxsize=64)
def _memory_bytes(device: int) -> int:
    with cupy.cuda.Device(device):
        return int(cupy.cuda.runtime.memGetInfo()[1])


@lru_cache(maxsize=64)
def _attribute(name: str, device: int) -> int:
    return int(cupy.cuda.Device(device).attributes[name])


def or_generic(function: _F) -> _F:
    """Decline a call that no kernel takes; with one warning where a kernel cannot be built."""

    @wraps(function)
    def with_fallback(*args: Any) -> Any:
        try:
            open_compiler()
            return function(*args)
        except UnsupportedError as error:
            return Declined(str(error))
        except KernelUnavailableError as error:
            _warn_once(str(error))
            return Declined(str(error))

    return with_fallback  # type: ignore[return-value]


@cache
def _warn_once(reason: str) -> None:
    message = (
        f"linattn's CUDA kernels are not used here: {reason}. Results are the same, slower; "
        f"linattn.without_backends() silences this"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=5)
