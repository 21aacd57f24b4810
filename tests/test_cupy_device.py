"""What linattn_cupy asks of CuPy, with a CuPy that only takes notes."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linattn_cupy import device


class FakeCupy:
    """The few names that the backend uses."""

    def __init__(self) -> None:
        self.capability = "90"
        self.built: list[tuple[str, tuple[str, ...]]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.broken = False
        self.cuda = SimpleNamespace(
            Device=lambda number: SimpleNamespace(
                compute_capability=self.capability, attributes={"MultiProcessorCount": 132}
            ),
            runtime=SimpleNamespace(getDevice=lambda: 1),
        )

    def RawModule(self, *, code: str, options: tuple[str, ...]) -> Any:
        self.built.append((code, options))
        if self.broken:
            message = "ptxas is out of sorts"
            raise OSError(message)

        def run(*args: Any, **settings: Any) -> None:
            self.launched.append((*args, settings))

        class Kernel:
            max_dynamic_shared_size_bytes = 0
            __call__ = staticmethod(run)

        self.kernel = Kernel()
        return SimpleNamespace(get_function=lambda name: self.kernel)


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(device, "_pid", [])
    device._kernel.cache_clear()
    device._warn_once.cache_clear()
    yield fake
    device._kernel.cache_clear()


def launch(shared=0, args=(), **options):
    device.launch("features.cu", "triangle", options, (2, 1, 1), (32, 1, 1), shared, args)


def test_a_variant_is_built_once(cupy):
    for _ in range(3):
        launch(WARPS=8)
    launch(WARPS=4)
    assert [len(cupy.built), len(cupy.launched)] == [2, 4]
    code, options = cupy.built[0]
    assert "triangle" in code
    assert "-DWARPS=8" in options
    assert f"-I{device.KERNELS}" in options


def test_null_pointers_and_shared_memory(cupy):
    array = np.zeros(3)
    launch(100_000, (array, None, np.int64(3)), WARPS=8)
    (grid, block, args, settings) = cupy.launched[0]
    assert (grid, block) == ((2, 1, 1), (32, 1, 1))
    assert args[0] is array
    assert args[1:] == (0, np.int64(3))
    assert settings == {"shared_mem": 100_000}
    assert cupy.kernel.max_dynamic_shared_size_bytes == 100_000


def test_what_is_included_counts_as_source(cupy, monkeypatch, tmp_path):
    """CuPy keeps compiled kernels by source and options, and does not look into headers."""
    before = device.compile_options({})
    device._headers.cache_clear()
    (tmp_path / "device.cuh").write_text("// another")
    monkeypatch.setattr(device, "KERNELS", tmp_path)
    after = device.compile_options({})
    device._headers.cache_clear()
    assert [x for x in before if x.startswith("-DHEADERS=")] != [
        x for x in after if x.startswith("-DHEADERS=")
    ]


@pytest.mark.parametrize("reason", ["old", "broken"])
def test_what_cannot_be_built_is_tried_once(cupy, reason):
    if reason == "old":
        cupy.capability = "75"
        words = r"compute capability 7\.5 is below 8\.0"
    else:
        cupy.broken = True
        words = r"features\.cu does not build here: ptxas is out of sorts"
    for _ in range(3):
        with pytest.raises(device.KernelUnavailableError, match=words):
            launch(WARPS=8)
    assert len(cupy.built) == (reason == "broken")
    assert device.or_generic(lambda: 3)() == 3
    with pytest.warns(RuntimeWarning, match=words):
        assert device.or_generic(lambda: launch(WARPS=8))() is NotImplemented


def test_a_forked_process_is_told(cupy, monkeypatch):
    launch(WARPS=8)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(RuntimeError, match=r"forked from one that has used it; start processes"):
        launch(WARPS=8)


def test_the_size_of_the_device(cupy):
    assert device.processors() == 132
