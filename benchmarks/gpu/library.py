"""The array library that is checked: CuPy, and what the checks ask of it."""

from __future__ import annotations

import datetime
import importlib.util
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

import linattn
from benchmarks.gpu.paths import IS_FAKE, ROOT
from linattn import _dispatch
from linattn.typing import Declined

__all__ = ["GENERIC", "CupyLibrary", "describe", "host_dtype", "register"]


GENERIC = "generic code after kernels"
"""Stands among launches where kernels ran and left the result to generic code."""


def host_dtype(name: str) -> Any:
    """NumPy's dtype of that name; tf32 are float32 arrays."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype("float32" if name == "tf32" else name)


def register() -> bool:
    """Have the CuPy backend found; False where nothing needed doing.

    Backends are found by entry points, which only an installed linattn has. A checkout alone, on a
    machine where nothing can be installed, gets what pyproject.toml says in their place.
    """
    found = linattn.registered_backends().get("cupy")
    if found is not None:
        return False
    if importlib.util.find_spec("linattn_cupy") is None:
        sys.path.append(str(ROOT / "backends"))
    backends = {"numpy": "linattn_numpy", "cupy": "linattn_cupy"}
    _dispatch._entry_points = lambda: backends  # type: ignore[assignment]
    return True


def describe() -> dict[str, Any]:
    """Describe the first device, its software, and the kernels by their hashes."""
    import cupy

    from linattn_cupy.hardware import kernel_hashes

    runtime = cupy.cuda.runtime
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    try:
        commit = subprocess.run(described, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "kernels": kernel_hashes(),
        "python": sys.version.split()[0],
        "cupy": cupy.__version__,
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "cuda_driver": runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }


class CupyLibrary:
    """CuPy on the current device; so many bytes of memory are filled before a call.

    ``launches`` are the names of the kernels that were launched, and ``GENERIC``; where ``waits``
    is set a launch waits for the device, so that the kernel that faults has a name.
    """

    def __init__(self, poisoned: int = 2**28) -> None:
        import cupy

        from linattn_cupy import device, gradients, state_vjps

        self._cupy: Any = cupy
        self._poisoned = poisoned
        self.launches: list[str] = []
        self.waits = False
        launch = device.launch

        def note(source: str, function: str, *args: Any) -> None:
            self.launches.append(function)
            try:
                launch(source, function, *args)
                stream = cupy.cuda.get_current_stream()
                if self.waits and not stream.is_capturing():
                    stream.synchronize()
            except Exception as error:
                if not type(error).__module__.startswith("cupy_backends.cuda"):
                    raise
                raise RuntimeError(
                    f"in {function}, grid {args[1]}, block {args[2]}: {error}"
                ) from error

        def note_declined(reason: str) -> Declined:
            self.launches.append(GENERIC)
            return Declined(reason)

        device.launch = note  # type: ignore[assignment]
        for module in (gradients, state_vjps):
            module.Declined = note_declined  # type: ignore[attr-defined]
        # Else results of generic code would be taken for those of a kernel.
        warnings.filterwarnings("error", message="linattn's CUDA kernels are not used")

    def array(self, host: NDArray[Any], dtype: str) -> Any:
        """Copy to the device; masks stay boolean."""
        kind = host.dtype if host.dtype == bool else host_dtype(dtype)
        with np.errstate(all="ignore"):
            return self._cupy.asarray(np.ascontiguousarray(host.astype(kind)))

    def findings(self) -> list[str]:
        """Return what the interpreter of the fake GPU found since the last call."""
        if not IS_FAKE:
            return []
        from tests.fake_gpu.log import findings

        return findings()

    def numpy(self, array: Any) -> NDArray[Any]:
        """Copy to the host, as float64."""
        return np.asarray(array.get()).astype(np.float64)

    def poison(self, byte: int) -> None:
        """Fill free memory with a byte; allocations then come of it."""
        if IS_FAKE:
            return  # the interpreter knows what nobody wrote
        pool = self._cupy.get_default_memory_pool()
        pool.free_all_blocks()
        memory = self._cupy.empty(self._poisoned, dtype="uint8")
        memory.data.memset(byte, self._poisoned)
        del memory
