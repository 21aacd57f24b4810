"""Compile CUDA kernels for a GPU without one, by NVRTC, and read what they need.

NVRTC comes from the wheel `nvidia-cuda-nvrtc` (extra `test-kernels`); neither a driver, nor nvcc,
nor CuPy is used.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "nvidia-cuda-nvrtc"


class CompilationError(RuntimeError):
    """A kernel that NVRTC refuses; the message is its log."""


@dataclass(frozen=True)
class Resources:
    """What a kernel needs of a GPU."""

    registers: int
    """A thread."""
    stack_bytes: int
    """Local memory a thread: arrays that are indexed at run time, and spilled registers."""
    spill_bytes: int
    """Bytes of instructions that store spilled registers."""
    shared_bytes: int
    """Static shared memory a block."""


def library_path() -> Path:
    """Return the path of libnvrtc in its wheel; PackageNotFoundError without one."""
    for file in importlib.metadata.files(DISTRIBUTION) or ():
        if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{DISTRIBUTION} holds no libnvrtc.so")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    path = library_path()
    # NVRTC opens this one by its name alone, which finds it once it is loaded.
    (builtins,) = path.parent.glob("libnvrtc-builtins.so.*")
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(status: int) -> None:
    if status:
        raise CompilationError(_nvrtc().nvrtcGetErrorString(status).decode())


def arguments(options: Mapping[str, str | int], arch: str, *, include: Path) -> list[str]:
    """Return the options with which CuPy compiles a kernel, but for the paths of its headers."""
    return [
        "-std=c++17",
        f"-I{include}",
        *(f"-D{macro}={value}" for macro, value in sorted(options.items())),
        "-ftz=true",
        f"-arch={arch}",
        "--device-as-default-execution-space",
    ]


def compile_kernel(
    source_path: Path, options: Mapping[str, str | int], arch: str, *, include: Path
) -> dict[str, Resources]:
    """Return the resources of each kernel of a source, compiled for a GPU such as "sm_90".

    Raises
    ------
    CompilationError
        If NVRTC refuses the source.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    text, name = source_path.read_bytes(), source_path.name.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        given = [*arguments(options, arch, include=include), "--ptxas-options=-v"]
        encoded = (ctypes.c_char_p * len(given))(*(argument.encode() for argument in given))
        status = nvrtc.nvrtcCompileProgram(program, len(given), encoded)
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        if status:
            raise CompilationError(log.value.decode())
        return read_log(log.value.decode())
    finally:
        _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))


def read_log(log: str) -> dict[str, Resources]:
    """Return each kernel's resources from the log that ptxas writes under `-v`."""
    kernels = {}
    for part in log.split("Compiling entry function ")[1:]:
        match = re.match(r"'(\w+)'", part)
        assert match is not None, log
        kernels[match[1]] = Resources(
            registers=_number(r"Used (\d+) registers", part),
            stack_bytes=_number(r"(\d+) bytes stack frame", part),
            spill_bytes=_number(r"(\d+) bytes spill stores", part),
            # Not mentioned where there is none.
            shared_bytes=_number(r"(\d+) bytes smem", part) if " smem" in part else 0,
        )
    return kernels


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1])
