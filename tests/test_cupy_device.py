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


@pytest.fixture
def cupy(monkeypatch):
    """The few names of CuPy that the backend uses: what was built, and an error to raise."""
    fake: Any = SimpleNamespace(capability="90", built=[], launched=0, error=None)
    attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 100_016}

    class Kernel:
        shared_size_bytes = 16

        def __call__(self, *args: Any, **settings: Any) -> None:
            fake.launched += 1

    def build(*, code: str, options: tuple[str, ...] = ()) -> Any:
        fake.built.append((code, options))
        if fake.error is not None and "device.cuh" in code:
            raise fake.error
        return SimpleNamespace(get_function=lambda name: Kernel())

    fake.RawModule = build
    fake.cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(
            compute_capability=fake.capability, attributes=attributes
        ),
        runtime=SimpleNamespace(getDevice=lambda: 1),
        compiler=SimpleNamespace(CompileException=CompileError),
    )
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


NVRTC = "nvrtc: error: failed to open libnvrtc-builtins.so"


@pytest.mark.parametrize(
    ("error", "said", "tries"),
    [
        (None, r"compute capability 7\.5 is below 8\.0", 0),
        (CompileError("ptxas is out"), r"features\.cu does not build here: ptxas is out", 1),
        (OSError("out of memory"), r"features\.cu does not build here: out of memory", 3),
        (CompileError(NVRTC), rf"features\.cu does not build here: {NVRTC}", 3),
    ],
    ids=["old", "broken", "driver", "nvrtc"],
)
def test_what_cannot_be_built_is_tried_once_and_what_may_pass_again(cupy, error, said, tries):
    cupy.error, cupy.capability = error, "90" if error else "75"
    for _ in range(3):
        with pytest.raises(device.KernelUnavailableError, match=said):
            launch(WARPS=8)
    assert len(cupy.built) == tries
    assert device.or_generic(lambda: 3)() == 3
    with pytest.warns(RuntimeWarning, match=said):
        answer = device.or_generic(lambda: launch(WARPS=8))()
    assert isinstance(answer, Declined)
    assert re.match(said, answer.reason)
    cupy.error = None
    if tries == 3:
        launch(WARPS=8)
        assert cupy.launched == 1
