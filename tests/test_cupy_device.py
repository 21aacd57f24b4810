"""When linattn_cupy builds a kernel, with a CuPy that only takes notes."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from linattn.typing import Declined
from linattn_cupy import device


class CompileError(Exception):
    """CuPy's CompileException."""


class FakeCupy:
    """The few names that the backend uses."""

    def __init__(self) -> None:
        self.capability = "90"
        self.built: list[tuple[str, tuple[str, ...]]] = []
        self.launched = 0
        self.error: Exception | None = None
        self.cuda = SimpleNamespace(
            Device=lambda number: SimpleNamespace(
                compute_capability=self.capability,
                attributes={"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 100_016},
            ),
            runtime=SimpleNamespace(getDevice=lambda: 1),
            compiler=SimpleNamespace(CompileException=CompileError),
        )

    def RawModule(self, *, code: str, options: tuple[str, ...] = ()) -> Any:
        self.built.append((code, options))
        if self.error is not None and "device.cuh" in code:
            raise self.error

        def run(*args: Any, **settings: Any) -> None:
            self.launched += 1

        class Kernel:
            shared_size_bytes = 16
            __call__ = staticmethod(run)

        return SimpleNamespace(get_function=lambda name: Kernel())


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    kept = (device._kernel, device._attribute, device.open_compiler, device._warn_once)
    for function in kept:
        function.cache_clear()
    yield fake
    for function in kept:
        function.cache_clear()


def launch(**options):
    device.launch("features.cu", "pack_rows", options, (2, 1, 1), (32, 1, 1), 0, ())


def test_a_variant_is_built_once(cupy):
    for _ in range(3):
        launch(WARPS=8)
    launch(WARPS=4)
    assert [len(cupy.built), cupy.launched] == [2, 4]
    code, options = cupy.built[0]
    assert "pack_rows" in code
    assert "-DWARPS=8" in options
    assert f"-I{device.KERNELS}" in options


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
        cupy.error = CompileError("ptxas is out of sorts")
        words = r"features\.cu does not build here: ptxas is out of sorts"
    for _ in range(3):
        with pytest.raises(device.KernelUnavailableError, match=words):
            launch(WARPS=8)
    assert len(cupy.built) == (reason == "broken")
    assert device.or_generic(lambda: 3)() == 3
    with pytest.warns(RuntimeWarning, match=words):
        answer = device.or_generic(lambda: launch(WARPS=8))()
    assert isinstance(answer, Declined)
    assert re.match(words, answer.reason)


@pytest.mark.parametrize(
    "error",
    [OSError("out of memory"), CompileError("nvrtc: error: failed to open libnvrtc-builtins.so")],
    ids=["driver", "nvrtc"],
)
def test_what_may_pass_is_tried_again(cupy, error):
    cupy.error = error
    for _ in range(2):
        with pytest.raises(
            device.KernelUnavailableError, match=r"does not build here: (out|nvrtc)"
        ):
            launch(WARPS=8)
    cupy.error = None
    launch(WARPS=8)
    assert [len(cupy.built), cupy.launched] == [3, 1]
