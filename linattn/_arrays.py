"""Arrays of any library: namespace, device, dtype, conversions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType
from typing import Any, TypeVar

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn.typing import Array, State

__all__ = [
    "_is_ordinary",
    "accumulation_dtype",
    "are_ordinary",
    "device_array",
    "dtype_bits",
    "is_lazy",
    "kinds",
    "library_name",
    "namespace",
    "on_array_device",
    "to_numpy",
]

_namespaces: dict[type, ModuleType] = {}


def namespace(array: Array) -> ModuleType:
    """Return the array-API namespace of an array.

    Remembered by type: asking array-api-compat takes 13 us, and a step of decoding takes 50.

    Raises
    ------
    TypeError
        Not an array.
    """
    kind = type(array)
    found = _namespaces.get(kind)
    if found is None:
        found = _namespaces[kind] = array_api_compat.array_namespace(array)
    return found


@cache
def library_name(xp: ModuleType) -> str:
    """Root module of the array library of a namespace: ``numpy``, ``cupy``, ``torch``..."""
    return xp.__name__.removeprefix("array_api_compat.").partition(".")[0]


def place(xp: ModuleType, device: Any) -> tuple[Any, ...] | None:
    """Where arrays live that are kept from call to call: the device, and for CuPy the stream too.

    What one stream makes another may use only when it is done. None for libraries whose arrays may
    belong to a trace, and must not be cached.
    """
    library = library_name(xp)
    if library == "numpy":
        return (device,)
    if library == "cupy":
        # Its number: a Device of CuPy has no hash.
        return int(device), sys.modules["cupy"].cuda.get_current_stream(int(device)).ptr
    return None


_F = TypeVar("_F", bound=Callable[..., Any])


def on_array_device(function: _F) -> _F:
    """Let a public function run where its arrays are, and without NumPy's floating-point errors.

    CuPy allocates and launches on the current device: that of the first CuPy array is made the
    current one. Other libraries know no current device. Overflow and NaN show in the result, by
    contract; what ``np.errstate`` of the caller would raise or warn only repeats it.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        cupy = sys.modules.get("cupy")
        with np.errstate(all="ignore"):
            return function(*args, **kwargs) if cupy is None else on_device(cupy, *args, **kwargs)

    def on_device(cupy: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind: Any = getattr(cupy, "ndarray", ())  # it has none yet while it is being imported
        for argument in (*args, *kwargs.values()):
            array = argument.kvz if isinstance(argument, State) else argument
            if isinstance(array, kind):
                with array.device:
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def is_lazy(array: Array) -> bool:
    """Whether inspecting the array's values is impossible (traced) or expensive (lazy)."""
    return bool(array_api_compat.is_lazy_array(array))


def to_numpy(
    array: Array, name: str = "an array that is computed with on the host"
) -> NDArray[Any]:
    """Copy an array of any library to the host as NumPy.

    Raises
    ------
    TypeError
        A traced array, which has no values.
    """
    if array_api_compat.is_cupy_array(array):
        return np.asarray(array.get())
    if array_api_compat.is_torch_array(array):
        array = array.detach().cpu()
        return np.asarray(array.float() if str(array.dtype) == "torch.bfloat16" else array)
    if library_name(namespace(array)) == "array_api_strict":
        xp = namespace(array)
        array = array_api_compat.to_device(array, xp.Device("CPU_DEVICE"))
    try:
        return np.asarray(array)
    except TypeError as error:
        if not array_api_compat.is_jax_array(array):
            raise
        message = (
            f"{name} must have values, got a traced {type(array).__name__}; call the function "
            f"outside of jax.jit, jax.grad and jax.vmap"
        )
        raise TypeError(message) from error


def device_array(array: NDArray[np.float64], xp: ModuleType, dtype: Any, device: Any) -> Array:
    """Cast float64 numbers on the host, so that all libraries get the same bits, and move them."""
    host = array.astype(np.float64 if dtype == xp.float64 else np.float32, order="C")
    return xp.asarray(host, device=device)


_PLAIN_DTYPES = {np.dtype(np.float32), np.dtype(np.float64)}
"""Dtypes of which nothing else need be asked: to ask takes as long as a step of decoding."""


def are_ordinary(arrays: Iterable[Any]) -> bool:
    """Whether all are NumPy's own arrays, of native dtypes that are always taken."""
    return all(_is_ordinary(array) for array in arrays)


def _is_ordinary(array: Any) -> bool:
    """Whether this is NumPy's own array, of a native dtype that is always taken."""
    return type(array) is np.ndarray and array.dtype in _PLAIN_DTYPES


def kinds(arrays: Iterable[Any]) -> list[Any]:
    """Return what must stay the same from call to call for arrays to be checked once."""
    return [
        (type(a), getattr(a, "shape", None), getattr(a, "dtype", None), getattr(a, "device", None))
        for a in arrays
    ]


def dtype_bits(dtype: Any) -> int:
    """Width of a floating dtype of any library."""
    bits = getattr(dtype, "itemsize", None)
    if bits is None:
        bits = np.dtype(dtype._np_dtype if hasattr(dtype, "_np_dtype") else dtype).itemsize
    return 8 * int(bits)


def accumulation_dtype(xp: ModuleType, dtype: Any, precision: str | None) -> Any:
    """float64 for float64 or when the precision asks for it, else float32."""
    if precision != "float64" and dtype != xp.float64:
        return xp.float32
    if "float64" not in xp.__array_namespace_info__().dtypes(kind="real floating"):
        message = (
            f"precision='float64' needs a library with float64 switched on, which "
            f"{library_name(xp)} has not"
        )
        raise ValueError(message)
    return xp.float64
