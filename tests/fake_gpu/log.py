"""What the fake GPU was asked to do while a block ran, and which device gave memory out."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Loaded before all else (run.sh), so that its functions are those of the process.
_process = ctypes.CDLL(None)
_process.fake_gpu_recorded.restype = ctypes.c_char_p
_process.fake_gpu_findings.restype = ctypes.c_char_p
_process.fake_gpu_counts.restype = ctypes.c_char_p


def findings() -> list[str]:
    """Return what the interpreter found since the last call: how often, what and where."""
    text: bytes = _process.fake_gpu_findings()
    return text.decode().splitlines()


def counts() -> dict[str, list[int]]:
    """Return each kernel's instructions of warps since the beginning, and those of mma."""
    text: bytes = _process.fake_gpu_counts()
    found: dict[str, list[int]] = {}
    for name, *numbers in map(str.split, text.decode().splitlines()):
        found[name] = [x + int(y) for x, y in zip(found.get(name, (0, 0)), numbers, strict=True)]
    return found


@dataclass
class Log:
    """Lines of the fake GPU's log, in order, filled when the block ends."""

    lines: list[str] = field(default_factory=list)

    def of(self, *kinds: str) -> list[str]:
        """Lines that begin with one of these words."""
        return [line for line in self.lines if line.partition(" ")[0] in kinds]

    @property
    def devices(self) -> set[int]:
        """Devices that had something to do or gave memory out."""
        lines = "\n".join(self.of("LAUNCH", "ALLOC"))
        return {int(device) for device in re.findall(r"\b(?:device|on) (\d+)", lines)}

    @property
    def waits(self) -> list[str]:
        """Lines in which the host waits for a device."""
        return [line for line in self.lines if line.startswith("WAIT") or line.endswith("waits")]

    @property
    def pageable(self) -> list[str]:
        """Copies from memory of the host that is not pinned: they wait as well."""
        return [line for line in self.of("COPY") if " pageable" in line]

    @property
    def written(self) -> set[int]:
        """Addresses that kernels and fills were given while a stream captured."""
        captured = "\n".join(line for line in self.lines if " captured" in line)
        return {int(address, 16) for address in re.findall(r" (0x[0-9a-f]+)", captured)}


@contextmanager
def recorded() -> Iterator[Log]:
    """Keep the log of a block."""
    log = Log()
    _process.fake_gpu_record()
    try:
        yield log
    finally:
        log.lines += _process.fake_gpu_recorded().decode().splitlines()


@contextmanager
def uncomputed() -> Iterator[None]:
    """Launches are checked and logged, and nothing is computed."""
    before = _process.fake_gpu_compute(0)
    try:
        yield
    finally:
        _process.fake_gpu_compute(before)
