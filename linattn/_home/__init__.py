"""The home of arrays: calls on torch's and JAX's arrays are computed by NumPy, in their memory.

The functions of the driver that solve a problem are decorated with :func:`at_home`. If all arrays
of their arguments are CPU arrays of one library, they are viewed as NumPy's, nothing is
copied, and the results are given back as arrays of that library. CuPy, where it is installed, is
the home of arrays on one CUDA device, by DLPack, in torch's current stream. Everything else runs
by the code of its own library: traced, fake, vmapped and lazy arrays, tensors of a subclass, maps
without specs, libraries with a backend, and calls inside `without_backends`. So do tensors whose
gradients torch asks for, except inside of the node that :mod:`linattn._home.node` makes of a call.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import array_api_compat
import numpy as np

from linattn import _arrays, _dispatch
from linattn._generic.specs import peel_affine
from linattn.typing import Array, Opaque, Problem, Recurrence

_F = TypeVar("_F", bound=Callable[..., Any])
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_NOT_WALKED = ("xp", "dtype", "feature_map", "plans", "policy")
_OF_THE_MAP = ("query_spec", "key_spec", "query_change", "key_change")
_NOTHING_TO_DO = (type(None), bool, int, float, str, np.ndarray, np.dtype, np.generic)


class Home(NamedTuple):
    """How arrays of a library become NumPy's, and results its own."""

    view: Callable[[Array], Array]
    """Raises `Abroad` for an array that NumPy cannot view, or should not."""
    give: Callable[[Array], Array]
    library: Any = np
    device: Any = "cpu"
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the device and the stream of the arrays current."""

    @property
    def namespace(self) -> Any:
        """The array namespace of NumPy, or of CuPy."""
        return _arrays.namespace(self.library.empty(0))

    def record(self, x: Any) -> Any:
        """View all arrays in an argument of the driver."""
        if isinstance(x, Problem | Recurrence):
            return self._problem(x)
        return _changed(x, self.view)

    def covers(self, record: Any) -> bool:
        """Whether all arrays of a record may be viewed."""
        try:
            self.record(record)
        except Abroad:
            return False
        return True

    def results(self, x: Any) -> Any:
        """Give all arrays of a result to the library."""
        if self.library is not np:
            return _changed(x, self.give, self.library.ndarray)
        # A sum of NumPy's may be a number of its own instead of an array.
        return _changed(x, lambda a: self.give(np.asarray(a)), (np.ndarray, np.floating))

    def _problem(self, problem: Any) -> Any:
        wide = _arrays.dtype_bits(problem.dtype) == 64
        changes = {"xp": self.namespace, "dtype": FLOAT64 if wide else FLOAT32}
        for name, x in _walked(problem):
            after = self.record(x)
            if after is not x:
                changes[name] = after
        if is_ours(getattr(problem, "feature_map", None)):
            # Its parameters are on the host, and a function of it takes any array.
            both = problem.feature_map.specs(self.namespace, changes["dtype"], self.device)
            for side, spec in zip(("query", "key"), both, strict=True):
                inside, change = peel_affine(spec)
                changes |= {f"{side}_spec": inside, f"{side}_change": change}
        if isinstance(problem, Recurrence):
            return replace(problem, **changes)
        return problem.replace(policy=problem.policy._replace(lazy=False), **changes)


def is_ours(feature_map: Any) -> bool:
    """Whether a map, and the maps in it, are linattn's."""
    known = getattr(feature_map, "_caches_specs", False)
    if not (known and type(feature_map).__module__.startswith("linattn.")):
        return False
    inside = [x for x in vars(feature_map).values() if hasattr(x, "query_features")]
    return all(map(is_ours, inside))


def _walked(record: Any) -> list[tuple[str, Any]]:
    """List the fields of a problem that may have arrays of the caller's."""
    ours = is_ours(getattr(record, "feature_map", None))
    not_walked = (*_NOT_WALKED, *_OF_THE_MAP) if ours else _NOT_WALKED
    return [(name, x) for name, x in record.__dict__.items() if name not in not_walked]


class Abroad(Exception):
    """Raised for an array that has no home, or must not be computed there."""


def _changed(x: Any, change: Callable[[Array], Array], kind: Any = None) -> Any:
    """Apply a function to all arrays in a record; arrays of one kind only, if given."""
    if kind is not None and isinstance(x, kind):
        return change(x)
    if isinstance(x, _NOTHING_TO_DO):
        return x
    if isinstance(x, tuple | list):
        parts = [_changed(part, change, kind) for part in x]
        if all(new is old for new, old in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if is_dataclass(x):
        if isinstance(x, Opaque):
            raise Abroad
        given = {each.name: getattr(x, each.name) for each in fields(x) if each.init}
        of_fields = {name: _changed(part, change, kind) for name, part in given.items()}
        found = {name: part for name, part in of_fields.items() if part is not given[name]}
        return replace(x, **found) if found else x  # type: ignore[type-var]
    return change(x) if kind is None and array_api_compat.is_array_api_obj(x) else x


def _arrays_of(record: Any) -> list[Array]:
    """List the arrays of a problem or recurrence that are not the host's; none of a map's code."""
    found: list[Array] = []

    def note(array: Array) -> Array:
        found.append(array)
        return array

    try:
        for _, x in _walked(record):
            _changed(x, note)
    except Abroad:
        return []
    return found


def home_of(array: Array) -> Home | None:
    """Return the home of arrays of a library; None if it has none, or has a backend."""
    if isinstance(array, np.ndarray) or not array_api_compat.is_array_api_obj(array):
        return None
    if not _dispatch.uses_home(_arrays.namespace(array)):
        return None
    if array_api_compat.is_torch_array(array):
        return _of_torch(sys.modules["torch"], array)
    if array_api_compat.is_jax_array(array):
        return _of_jax(sys.modules["jax"], array)
    return None


def at_home(instead: Callable[..., Any] | None = None) -> Callable[[_F], _F]:
    """Decorate a function of the driver, whose first argument has arrays, to run at their home.

    ``instead``: a function of torch's tensors that is tried first, and returns None to decline.
    """

    def decorate(function: _F) -> _F:
        @wraps(function)
        def call(record: Any, *args: Any, **kwargs: Any) -> Any:
            first = record.query if isinstance(record, Problem | Recurrence) else record.kvz
            if isinstance(first, np.ndarray):
                return function(record, *args, **kwargs)
            home = home_of(first)
            try:
                if home is None:
                    raise Abroad
                with home.entered():
                    given = [home.record(x) for x in (record, *args)]
                    options = {name: home.record(x) for name, x in kwargs.items()}
            except Abroad:
                return function(record, *args, **kwargs)
            if instead is not None and home.view is _tensor_view:
                answer = instead(record, *args, **kwargs)
                if answer is not None:
                    _dispatch.note_home(_arrays.namespace(first), _arrays.namespace(first))
                    return answer
            _dispatch.note_home(home.namespace, _arrays.namespace(first))
            with home.entered():
                return home.results(function(*given, **options))

        return call  # type: ignore[return-value]

    return decorate


def step_at_home(step: Callable[..., Any], tokens: Any, state: Any, feature_map: Any) -> Any:
    """Take a decoding step of NumPy's arrays; None for arrays without a home, and for mistakes."""
    home = home_of(tokens[0])
    if home is None or home.library is not np:
        return None
    if not (is_ours(feature_map) and hasattr(state, "kvz")):
        return None
    if any(isinstance(x, np.ndarray) for x in (*tokens, state.kvz, state.log_scale)):
        return None
    view, give = home.view, home.give
    try:
        before = state._replace(kvz=view(state.kvz), log_scale=view(state.log_scale))
        output, after = step(*map(view, tokens), before, feature_map)
    except (Abroad, AttributeError, TypeError, ValueError):
        # Of a mistake the caller's own arrays tell.
        return None
    _dispatch.note_home(home.namespace, _arrays.namespace(tokens[0]))
    return give(output), after._replace(kvz=give(after.kvz), log_scale=give(after.log_scale))


def wants_gradients(problem: Problem | Recurrence) -> bool:
    """Whether torch, or JAX in eager reverse mode, asks for gradients by arrays of a problem."""
    query = problem.query
    may = array_api_compat.is_jax_array(query)
    if array_api_compat.is_torch_array(query):
        may = sys.modules["torch"].is_grad_enabled()
    return may and any(primal(x) is not x for x in _arrays_of(problem))


def primal(array: Any) -> Any:
    """Return the value of an array by which torch, or JAX in eager mode, asks for a gradient.

    Others are returned unchanged. JAX's tracers of reverse mode are of a class that it does not
    export, and its older versions do not have. Those of ``jax.linearize`` are for forward mode.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach() if array.requires_grad and torch.is_grad_enabled() else array
    if type(array).__name__ != "LinearizeTracer" or not array._trace.is_vjp:
        return array
    value, tracer = array.primal, sys.modules["jax"].core.Tracer
    return array if isinstance(value, tracer) else value


# torch --------------------------------------------------------------------------------------------


def _of_torch(torch: Any, tensor: Any) -> Home | None:
    functorch, state = torch._C._functorch, torch._C
    is_watched = (
        torch.compiler.is_compiling()
        or state._get_tracing_state() is not None
        or state._len_torch_dispatch_stack()
        or functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
    if is_watched:
        return None
    if tensor.device.type != "cuda":
        return Home(_tensor_view, _as_tensor)
    device = tensor.device

    def view(x: Any) -> Array:
        return _shared(_ordinary(x, device).detach())

    stream = torch.cuda.current_stream(device).cuda_stream
    return on_gpu(device.index, stream, view, torch.from_dlpack)


def _ordinary(tensor: Any, device: Any) -> Any:
    """Return a tensor whose numbers lie in the memory of a device, ready to be read."""
    torch = sys.modules["torch"]
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.device != device
        or tensor.layout != torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or (tensor.requires_grad and torch.is_grad_enabled())
        or torch._is_functional_tensor(tensor)
    ):
        raise Abroad
    return tensor


def _tensor_view(tensor: Any) -> Array:
    torch = sys.modules["torch"]
    tensor = _ordinary(tensor, torch.device("cpu"))
    try:
        if tensor.dtype != torch.bfloat16:
            return tensor.detach().numpy()
        import ml_dtypes

        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    except (ImportError, RuntimeError) as error:
        # The latter of a tensor of the vmap behind `is_grads_batched`.
        raise Abroad from error


def _as_tensor(array: Any) -> Any:
    torch = sys.modules["torch"]
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.kind == "V":  # bfloat16, of ml_dtypes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# JAX ----------------------------------------------------------------------------------------------


def _of_jax(jax: Any, array: Any) -> Home | None:
    if isinstance(array, jax.core.Tracer):
        return None
    device = next(iter(array.devices()))
    if device.platform not in ("cpu", "gpu"):
        return None

    def view(x: Any) -> Array:
        if isinstance(x, jax.core.Tracer) or x.devices() != {device}:
            raise Abroad
        return np.asarray(x) if device.platform == "cpu" else _shared(x)

    if device.platform == "gpu":
        # JAX's streams are its own: DLPack makes each library wait for the other's.
        return on_gpu(device.local_hardware_id, None, view, jax.dlpack.from_dlpack)
    return Home(view, lambda x: jax.device_put(x, device, may_alias=True))


# GPUs ---------------------------------------------------------------------------------------------


def on_gpu(
    number: int,
    stream: int | None,
    view: Callable[[Array], Array],
    give: Callable[[Array], Array],
) -> Home | None:
    """Return CuPy as the home of arrays on a CUDA device; None where it is not installed.

    ``stream``: address of the caller's current stream, None to leave CuPy's as it is.
    """
    cupy = _cupy()
    if cupy is None:
        return None
    device = cupy.cuda.Device(number)

    def entered() -> AbstractContextManager[Any]:
        both = ExitStack()
        both.enter_context(device)
        if stream is not None:
            protocol = SimpleNamespace(__cuda_stream__=lambda: (0, stream))
            both.enter_context(cupy.cuda.Stream.from_external(protocol))
        return both

    return Home(view, give, cupy, device, entered)


@cache
def _cupy() -> Any:
    if "cupy" not in _dispatch.registered_backends():
        return None
    try:
        return importlib.import_module("cupy")
    except ImportError:
        return None


def _shared(array: Any) -> Array:
    """View the memory of an array on a GPU as CuPy's."""
    try:
        return sys.modules["cupy"].from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        # Of a dtype that CuPy lacks, or of memory that it cannot see.
        raise Abroad from error
