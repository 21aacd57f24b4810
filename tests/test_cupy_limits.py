"""Limits of devices, and first calls of threads: the real CuPy on the simulated driver.

Nothing is computed unless a test says so: each asks which kernels were launched and what was raised
or warned of, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from benchmarks.gpu import cases
from linattn_cupy import device

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RUN = TESTS / "fake_gpu" / "run.sh"
BUILT = Path(os.environ.get("FAKE_GPU_ENV", ROOT / ".venv-fake-gpu"))

START = """
import sys, threading, warnings
import numpy as np
import cupy
import linattn
from benchmarks.gpu.library import register
register()
from linattn_cupy import device
launched = []
launch = device.launch
def noted(source, function, *rest):
    launch(source, function, *rest)
    launched.append(function)
device.launch = noted
def inputs(lead, n, d, dtype="float16"):
    rng = np.random.default_rng(0)
    return [cupy.asarray(rng.standard_normal((*lead, n, d)).astype(dtype)) for _ in range(3)]
"""


@pytest.fixture
def on_simulated_driver(tmp_path):
    """Run a program on the simulated driver, with those of its settings; return what it prints."""
    if not (RUN.exists() and (BUILT / "lib-fake").is_dir()):
        pytest.skip("CuPy on the simulated driver: tests/fake_gpu has not been built")

    def run(program: str, **settings: str) -> list[str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
        environment = {"PYTHONPATH": path, "FAKE_GPU_ENV": str(BUILT), "FAKE_GPU_COMPUTE": "0"}
        environment |= settings
        command = [str(RUN), "python", "-W", "error::RuntimeWarning", "-c"]
        finished = subprocess.run(
            [*command, START + textwrap.dedent(program)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished.stdout.splitlines()

    return run


def test_maps_of_several_sizes_decode_in_one_process(on_simulated_driver):
    """The limit of shared memory is the function's, whoever launches it."""
    on_simulated_driver(
        """
        for m in (8192, 4096, 16, 8192):
            phi = linattn.feature_maps.PositiveFeatures(64, m, rng=0)
            q, k, v = (a[:, 0] for a in inputs((2,), 1, 64, "float32"))
            state = linattn.init_state(phi, 64, batch_shape=(2,), like=q)
            for _ in range(2):
                linattn.decode_step(q, k, v, state, phi)
        assert launched == ["decode"] * 8, launched
        """
    )


def test_a_map_too_large_for_the_device_is_said_to_be(on_simulated_driver):
    (said,) = on_simulated_driver(
        """
        phi = linattn.feature_maps.PositiveFeatures(64, 24000, rng=0)
        q, k, v = (a[:, 0] for a in inputs((2,), 1, 64, "float32"))
        state = linattn.init_state(phi, 64, batch_shape=(2,), like=q)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                linattn.decode_step(q, k, v, state, phi)
        assert "decode" not in launched
        (one,) = seen
        print(one.message)
        """
    )
    assert "decode needs 290,884 bytes of shared memory a block, this device has 232,4" in said


def test_threads_that_are_the_first_to_call(on_simulated_driver, tmp_path):
    """NVRTC 13.0 fails in all threads but the first that use it at once."""
    on_simulated_driver(
        """
        arrays = [inputs((1,), 100, 16 * i) for i in range(1, 4)]
        phi = linattn.feature_maps.EluFeatures()
        failed = []
        begin = threading.Barrier(3)
        def one(own):
            begin.wait()
            try:
                linattn.linear_attention(*own, phi)
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=one, args=(own,)) for own in arrays]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not failed, failed
        assert sorted(launched) == sorted(["segment_states", "scan_states", "read_states"] * 3)
        """,
        CUPY_CACHE_DIR=str(tmp_path),
    )


def test_a_forked_process_is_told(on_simulated_driver):
    (said,) = on_simulated_driver(
        """
        import os
        attend = linattn.linear_attention
        arrays, phi = inputs((2,), 100, 32, "float32"), linattn.feature_maps.EluFeatures()
        attend(*arrays, phi)
        if os.fork() == 0:
            try:
                attend(*arrays, phi)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert said.startswith("CUDARuntimeError cudaErrorInitializationError")


def test_kernels_are_compiled_as_the_tests_compile_them(on_simulated_driver, nvrtc, tmp_path):
    """What NVRTC is given, but for CuPy's own headers and the hash of the backend's."""
    (given,) = on_simulated_driver(
        """
        from cupy.cuda import compiler
        compile_now = compiler._NVRTCProgram.compile
        seen = []
        def noted(self, options=(), log_stream=None):
            seen.append(options)
            return compile_now(self, options, log_stream)
        compiler._NVRTCProgram.compile = noted
        options = device.compile_options({"WARPS": 8, "COLUMNS": 3})
        code = (device.KERNELS / "features.cu").read_text()
        cupy.RawModule(code=code, options=options).get_function("key_tops")
        own = f"-I{device.KERNELS}"
        other = "-DHEADERS=", "-I"
        print(*(x for x in seen[-1] if x == own or not x.startswith(other)))
        """,
        CUPY_CACHE_DIR=str(tmp_path),
    )
    # PTX is made for a virtual architecture, kernels for a real one.
    expected = nvrtc.arguments({"WARPS": 8, "COLUMNS": 3}, "compute_90", include=device.KERNELS)
    assert given.split() == expected


def test_first_contact_fails_where_nothing_is_computed(on_simulated_driver):
    names = [case.name for case in cases.telling_first()[:4]]
    machine, *said = on_simulated_driver(
        f"""
        from benchmarks.gpu import first_contact
        assert first_contact.main(["--only", *{names}]) == 1
        """
    )
    assert machine.startswith("date ")
    assert [line.removeprefix("begun ") for line in said[:8:2]] == list(names)
    for name, line in zip(names, said[1:8:2], strict=True):
        assert line.startswith(f"FAIL  {name}: ")
        assert "Error" not in line
    assert said[8].startswith("----- 4 of 4 failed")
    assert said[9:] == said[1:8:2]


@pytest.mark.parametrize(
    ("capability", "dim", "shared", "needs"),
    [("80", 128, 166912, 219392), ("86", 64, 101376, 162048), ("120", 64, 101376, 162048)],
    ids=["A100", "RTX 3090", "RTX 5090"],
)
def test_cards_with_less_shared_memory(on_simulated_driver, capability, dim, shared, needs):
    """Full attention reads 64 tokens at a time, not 128; causal does not fit, which is said."""
    (said,) = on_simulated_driver(
        f"""
        phi = linattn.feature_maps.PositiveFeatures({dim}, 256, rng=0)
        arrays = inputs((2,), 100, {dim})
        linattn.linear_attention(*arrays, phi)
        assert launched == ["segment_states", "scan_states", "read_states"], launched
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                linattn.linear_attention(*arrays, phi, is_causal=True)
        assert "causal_rows" not in launched
        print(*(warning.message for warning in seen), sep="\\n")
        """,
        FAKE_GPU_CC=capability,
        FAKE_GPU_SHARED=str(shared),
    )
    assert (
        f"causal attention with d = {dim}, m = 256 needs {needs:,} bytes of shared memory a block, "
        f"this device has {shared:,}"
    ) in said
