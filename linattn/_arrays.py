"""Arrays of any library: namespace, device, dtype, conversions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn.typing import Array, State

_namespaces: dict[type, ModuleType] = {}
_MARK = "linattn: without autocast"
"""Key in the metadata of the steps of torch's backward pass."""


def namespace(array: Array) -> ModuleType:
    """Return the array-API namespace of an array.

    The result is cached by type: array-api-compat takes 13 us, a step of decoding 50.

    Raises
    ------
    TypeError
        Not an array.
    """
    kind = type(array)
    found = _namespaces.get(kind)
    if found is None:
        if _root(kind) in DENSE_FORMS:
            raise TypeError(not_supported("an array", array))
        found = _namespaces[kind] = array_api_compat.array_namespace(array)
    return found


DENSE_FORMS = {"mlx": "numpy.asarray({})", "scipy": "{}.toarray()", "sparse": "{}.todense()"}
"""How to convert arrays of unsupported libraries to NumPy."""


def not_supported(name: str, array: Any) -> str:
    """Return the end of an error message: the type of the argument, and how to convert it."""
    root, came = _root(type(array)), type(array).__name__
    if root in DENSE_FORMS:
        came = f"{root}.{came}"
    if is_sparse_tensor(array):
        came = f"{came} of layout {array.layout}"
    methods = (f"{{}}.{method}()" for method in ("todense", "to_dense") if hasattr(array, method))
    dense = DENSE_FORMS.get(root) or next(methods, "numpy.asarray({})")
    return f"got {came}; convert it, for example with {dense.format(name)}"


def is_sparse_tensor(array: Any) -> bool:
    """Whether this is a tensor of torch that stores only some of its numbers."""
    return array_api_compat.is_torch_array(array) and str(array.layout) != "torch.strided"


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@cache
def library_name(xp: ModuleType) -> str:
    """Return the root module of an array library: ``numpy``, ``cupy``, ``torch``..."""
    return xp.__name__.removeprefix("array_api_compat.").partition(".")[0]


def place(xp: ModuleType, device: Any) -> tuple[Any, ...] | None:
    """Return the key under which arrays are cached: the device, and for CuPy also the stream.

    An array made on one stream is safe on another only after that stream is done. None for
    libraries whose arrays may belong to a trace: they must not be cached.
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
    """Decorate a public function: run it on the device of its arrays, without autocast.

    CuPy allocates and launches on the current device, wherever the arrays are. So the device of the
    first CuPy array becomes the current one. ``torch.autocast`` rounds the factors of every product
    to 16 bits, so it is switched off inside the function. The caller's ``np.errstate`` does not
    act: overflow and NaN show in the result, and a warning would only repeat that.
    """
    return _entered((), function)


def as_autocast(*names: str) -> Callable[[_F], _F]:
    """Return a decorator as :func:`on_array_device` that also casts these arguments as torch would.

    Inside ``torch.autocast`` torch casts the arguments of ``scaled_dot_product_attention`` to the
    dtype of the context, all but float64. If the function returns a pullback last, the pullback
    returns the gradients of these arguments first, in the dtypes that the caller gave.
    """
    return partial(_entered, names)


def with_autocast(function: _F) -> _F:
    """Decorate as :func:`on_array_device` does, but leave autocast to the function's parts."""
    return _entered(None, function)


def _entered(names: tuple[str, ...] | None, function: _F) -> _F:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The classes are missing while the libraries are being imported.
        cupy_array: Any = getattr(sys.modules.get("cupy"), "ndarray", ())
        tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
        with np.errstate(all="ignore"), jax_broadcasts():
            for argument in (*args, *kwargs.values()) if cupy_array or tensor else ():
                array = argument.kvz if isinstance(argument, State) else argument
                if isinstance(array, cupy_array):
                    with array.device:
                        return function(*args, **kwargs)
                if isinstance(array, tensor) and names is not None:
                    return _call_without_autocast(function, names, array, args, kwargs)
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def jax_broadcasts() -> AbstractContextManager[Any]:
    """Return a context in which JAX broadcasts; its users may have that raise an error."""
    config = getattr(sys.modules.get("jax"), "config", None)
    if getattr(config, "jax_numpy_rank_promotion", "allow") == "allow":
        return nullcontext()
    rank_promotion: Any = sys.modules["jax"].numpy_rank_promotion
    return rank_promotion("allow")  # type: ignore[no-any-return]


def caller_level() -> int:
    """Return the ``stacklevel`` at which a warning names the first caller outside of linattn."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "linattn"


def autocast_dtype(array: Array) -> Any:
    """Return the dtype that ``torch.autocast`` casts this array to, None where it does not."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return None
    device = array.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_floats(array: Any, dtype: Any) -> Any:
    """Cast a tensor as ``torch.autocast`` does: floats but float64. Return others unchanged."""
    torch = sys.modules["torch"]
    if not isinstance(array, torch.Tensor) or not array.is_floating_point():
        return array
    return array if array.dtype == torch.float64 else array.to(dtype)


def _call_without_autocast(
    function: Callable[..., Any],
    names: tuple[str, ...],
    tensor: Array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Cast the named arguments, then call the function without this tensor's autocast."""
    torch = sys.modules["torch"]
    device, dtype = tensor.device.type, autocast_dtype(tensor)
    if dtype is None:
        return function(*args, **kwargs)
    at = [function.__code__.co_varnames.index(name) for name in names]
    given: list[Any] = [
        args[i] if i < len(args) else kwargs.get(name) for name, i in zip(names, at, strict=True)
    ]
    args = tuple(cast_floats(a, dtype) if i in at else a for i, a in enumerate(args))
    kwargs = {n: cast_floats(a, dtype) if n in names else a for n, a in kwargs.items()}
    with torch.autocast(device, enabled=False):
        result = function(*args, **kwargs)
    if not torch.compiler.is_compiling():  # which runs backward passes as forward passes ran
        switch_off = partial(torch.set_autocast_enabled, device, False)
        _keep_backward_out(result, (args, *kwargs.values()), switch_off)
    if names and isinstance(result, tuple) and callable(result[-1]):
        return (*result[:-1], _uncast(result[-1], [array.dtype for array in given], dtype))
    return result


def _uncast(pullback: Callable[..., Any], came: list[Any], dtype: Any) -> Callable[..., Any]:
    """Return a pullback that casts its cotangent, and its first gradients to these dtypes."""

    @wraps(pullback)
    def uncast(grad_output: Any, *rest: Any, **named: Any) -> tuple[Array, ...]:
        gradients = pullback(cast_floats(grad_output, dtype), *rest, **named)
        first = (gradient.to(kind) for gradient, kind in zip(gradients, came, strict=False))
        return (*first, *gradients[len(came) :])

    return uncast


def _keep_backward_out(results: Any, given: Any, switch_off: Callable[[], None]) -> None:
    """Switch autocast off in every step of the backward pass, from results to arguments.

    torch runs each step in the mode of whoever started the backward pass. Inside an autocast
    context that mode rounds the factors of products to 16 bits. The mode returns after each step.
    """

    def keep_second_out(gradients: Any, cotangents: Any) -> None:
        if sys.modules["torch"].is_grad_enabled():
            _keep_backward_out(gradients, cotangents, switch_off)

    reached = {tensor.grad_fn for tensor in _tensors(given)}
    left = [tensor.grad_fn for tensor in _tensors(results)]
    while left:
        node = left.pop()
        # What has no next function accumulates the gradient of a leaf, which outlives this call.
        if node is None or node in reached or not node.next_functions or _MARK in node.metadata:
            continue
        node.metadata[_MARK] = True
        node.register_prehook(lambda _: switch_off())
        node.register_hook(keep_second_out)
        left += [function for function, _ in node.next_functions]


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors in tuples, lists, dictionaries and records."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def is_staged(array: Array) -> bool:
    """Whether JAX traces an array to compile a program, not only to differentiate or map it."""
    jax = sys.modules.get("jax")
    while jax is not None and isinstance(array, jax.core.Tracer):
        if "Jaxpr" in type(array).__name__:
            return True
        array = getattr(array, "primal", getattr(array, "val", None))
    return False


def is_tracked(array: Array) -> bool:
    """Whether torch or JAX may differentiate what is computed of an array."""
    jax = sys.modules.get("jax")
    is_tracer = jax is not None and isinstance(array, jax.core.Tracer)
    return is_tracer or bool(getattr(array, "requires_grad", False))


def is_lazy(array: Array) -> bool:
    """Whether inspecting the array's values is impossible (traced) or expensive (lazy)."""
    if array_api_compat.is_torch_array(array):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return False
        functorch = torch._C._functorch
        levels = functorch.get_interpreter_stack() or ()
        return any(level.key() == functorch.TransformType.Vmap for level in levels)
    return bool(array_api_compat.is_lazy_array(array))


def inspected(condition: Array) -> bool | None:
    """Whether a condition holds everywhere, computed even by Dask; None for traced arrays."""
    try:
        return bool(namespace(condition).all(condition))
    except (TypeError, RuntimeError):  # of JAX, and of torch inside vmap
        return None


def is_exact(array: Any) -> bool:
    """Whether this is an array of integers or booleans."""
    dtype = str(array.dtype) if array_api_compat.is_array_api_obj(array) else ""
    return "int" in dtype or "bool" in dtype


def is_differentiated(*arrays: Array | None) -> bool:
    """Whether torch differentiates what is computed from any of these arrays."""
    tensors = [x for x in arrays if array_api_compat.is_torch_array(x)]
    if not tensors:
        return False
    torch = sys.modules["torch"]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return any(torch.autograd.forward_ad.unpack_dual(x)[1] is not None for x in tensors)


def moveaxis(x: Array, source: int, target: int) -> Array:
    """Move an axis; torch's function of this name cannot be mapped by ``torch.func.vmap``."""
    if array_api_compat.is_torch_array(x):
        return x.movedim(source, target)
    return namespace(x).moveaxis(x, source, target)


def to_numpy(
    array: Array, name: str = "an array that is computed with on the host"
) -> NDArray[Any]:
    """Copy an array of any library to the host as NumPy.

    Raises
    ------
    TypeError
        A traced array, or a batched one, which has no values.
    """
    if array_api_compat.is_cupy_array(array):
        return np.asarray(array.get())
    if array_api_compat.is_torch_array(array):
        functorch = sys.modules["torch"]._C._functorch
        # Inside of torch.func.grad even a tensor from outside may be wrapped.
        while functorch.is_gradtrackingtensor(array):
            array = functorch.get_unwrapped(array)
        if functorch.is_batchedtensor(array):
            raise TypeError(
                f"{name} must have values, got a Tensor that torch.func.vmap maps; give the same "
                f"one to each call, from outside"
            )
        if functorch.peek_interpreter_stack() is not None:
            # What is done with it would be wrapped again.
            pyfunctorch = import_module("torch._functorch.pyfunctorch")
            with pyfunctorch.temporarily_clear_interpreter_stack():
                return to_numpy(array, name)
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
        raise TypeError(
            f"{name} must have values, got a traced {type(array).__name__}; call the function "
            f"outside of jax.jit, jax.grad and jax.vmap"
        ) from error


def device_array(array: NDArray[np.float64], xp: ModuleType, dtype: Any, device: Any) -> Array:
    """Cast float64 numbers on the host, where all libraries round alike, then move them."""
    host = array.astype(np.float64 if dtype == xp.float64 else np.float32, order="C")
    return xp.asarray(host, device=device)


_PLAIN_DTYPES = {np.dtype(np.float32), np.dtype(np.float64)}
"""Dtypes that pass without further checks: checks take as long as a step of decoding."""


def are_ordinary(arrays: Iterable[Any]) -> bool:
    """Whether all are ``numpy.ndarray`` with a native dtype that needs no further check."""
    return all(_is_ordinary(array) for array in arrays)


def _is_ordinary(array: Any) -> bool:
    """Whether this is a ``numpy.ndarray`` with a native dtype that needs no further check."""
    return type(array) is np.ndarray and array.dtype in _PLAIN_DTYPES


def kinds(arrays: Iterable[Any]) -> list[Any]:
    """Return types, shapes, dtypes and devices: later arrays with equal ones need no check."""
    return [
        (type(a), *(getattr(a, n, None) for n in ("shape", "dtype", "device", "layout")))
        for a in arrays
    ]


def dtype_bits(dtype: Any) -> int:
    """Width of a floating dtype of any library."""
    bits = getattr(dtype, "itemsize", None)
    if bits is not None:
        return 8 * int(bits)
    # Its own name ends with the width, where it is no dtype of NumPy's: ndonnx, array-api-strict.
    digits = re.search(r"float(\d+)$", str(getattr(dtype, "_np_dtype", dtype)).lower())
    return int(digits[1]) if digits else 8 * np.dtype(dtype).itemsize


def has_float64(array: Array) -> bool:
    """Whether the device of an array has float64: torch's "mps" and some GPUs have not."""
    xp, device = namespace(array), array_api_compat.device(array)
    if getattr(device, "type", None) == "xpu":
        return bool(getattr(xp.xpu.get_device_properties(device), "has_fp64", True))
    return "float64" in xp.__array_namespace_info__().dtypes(device=device, kind="real floating")


def accumulation_dtype(
    xp: ModuleType, dtype: Any, precision: str | None, array: Array | None = None
) -> Any:
    """float64 for float64 or when the precision asks for it (of this array), else float32."""
    if dtype == xp.float64:
        return dtype
    if precision != "float64":
        return xp.float32
    if not has_float64(array):
        raise ValueError(
            f"precision='float64' needs a library with float64 switched on, which "
            f"{library_name(xp)} has not on {array_api_compat.device(array)}"
        )
    return xp.float64
