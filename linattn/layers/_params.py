"""Parameters: flat dictionaries of arrays with dotted names, such as ``layers.0.norm1.weight``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.typing import Array

Params: TypeAlias = Mapping[str, Array]
"""Arrays by name, as in torch's state dictionaries: ``{"out_proj.weight": array, ...}``."""

Pullback: TypeAlias = Callable[..., tuple[Any, ...]]
"""A function of the gradient by the output that returns ``(grad_params, *grad_inputs)``."""

Result: TypeAlias = tuple[Array, Pullback]


class Part(dict[str, Array]):
    """The parameters of one part of a model, and their prefix, for error messages."""

    def __init__(self, params: Params | Iterable[tuple[str, Array]] = (), path: str = "") -> None:
        super().__init__(params)
        self.path = path
        self.splits: dict[tuple[str, ...], list[Part]] = {}
        """Cached results of :func:`split`: a stream splits once, not at every token."""
        self.checked: dict[tuple[Any, ...], ModuleType] = {}
        """NumPy inputs that passed the checks, by parameter, dtype and length."""

    def __missing__(self, name: str) -> Array:
        """Raise an error that names the missing parameter."""
        raise ValueError(
            f"params must have {self.path + name!r}, got "
            f"{', '.join(repr(self.path + key) for key in self) or 'none of its parts'}"
        )


_Vjp = TypeVar("_Vjp", bound=Callable[..., Result])
_Layer = TypeVar("_Layer", bound=Callable[..., Any])


def takes(options: Any = None) -> Callable[[_Layer], _Layer]:
    """Return a decorator that checks the names of ``**options`` against a TypedDict."""

    def decorator(function: _Layer) -> _Layer:
        kinds = inspect.signature(function).parameters.values()
        known = [p.name for p in kinds if p.kind is not p.VAR_KEYWORD]
        known += [] if options is None else options.__annotations__
        needed = frozenset() if options is None else options.__required_keys__

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in known]
            if unknown:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {unknown[0]!r}; it "
                    f"takes {', '.join(known)}"
                )
            if not needed <= kwargs.keys():
                raise TypeError(f"{function.__name__}() needs {', '.join(needed - kwargs.keys())}=")
            return function(*args, **kwargs)

        return _arrays.with_autocast(call)  # type: ignore[return-value]

    return decorator


def with_pullback(vjp: _Vjp) -> _Vjp:
    """Decorate a function: run its pullback on the device of the arrays, without autocast."""

    @wraps(vjp)
    def call(*args: Any, **options: Any) -> Result:
        out, pullback = vjp(*args, **options)
        return out, _arrays.on_array_device(pullback)

    return call  # type: ignore[return-value]


def accumulated(*, narrows: bool) -> Callable[[_Vjp], _Vjp]:
    """Return a decorator: the layer and its pullback compute float16 and bfloat16 in float32.

    Results have the dtype of the inputs: each is rounded once. Inside ``torch.autocast`` inputs and
    parameters are cast as torch does. A layer that ``narrows``, such as a product, uses the dtype
    of the context, other layers use float32. Gradients have the dtypes of the arguments.
    """

    def decorator(vjp: _Vjp) -> _Vjp:
        @wraps(vjp)
        def call(params: Params, x: Array, **options: Any) -> Result:
            part, autocast = as_part(params), _arrays.autocast_dtype(x)
            if autocast is not None:
                dtype = autocast if narrows else _arrays.namespace(x).float32
                return _as_autocast(_arrays.on_array_device(widened), part, x, dtype, options)
            return widened(part, x, **options) if _is_narrow(x) else vjp(part, x, **options)

        def widened(part: Part, x: Array, **options: Any) -> Result:
            return _accumulated(vjp, part, x, options)

        return call  # type: ignore[return-value]

    return decorator


def _accumulated(
    vjp: Callable[..., Result], part: Part, x: Array, options: dict[str, Any]
) -> Result:
    """Compute in the accumulation dtype, and round the results to the dtype of the input."""
    named = {f"params[{part.path + name!r}]": array for name, array in part.items()}
    xp, (x, *arrays) = _checks.check_arrays(1, x=x, **named)
    wide = _arrays.accumulation_dtype(xp, x.dtype, None)
    widened = (xp.astype(array, wide, copy=False) for array in arrays)
    of_wide = Part(zip(part, widened, strict=True), part.path)
    out, pull = vjp(of_wide, xp.astype(x, wide, copy=False), **options)

    def pullback(grad_output: Array) -> tuple[Any, ...]:
        _checks.check_cotangent("grad_output", grad_output, "output", tuple(out.shape), x)
        grads, grad = pull(xp.astype(grad_output, wide, copy=False))
        narrow = {name: xp.astype(g, x.dtype, copy=False) for name, g in grads.items()}
        return narrow, xp.astype(grad, x.dtype, copy=False)

    return xp.astype(out, x.dtype, copy=False), pullback


def _as_autocast(
    vjp: Callable[..., Result], part: Part, x: Array, dtype: Any, options: dict[str, Any]
) -> Result:
    """Cast all arguments to a dtype; return gradients in the dtypes of the arguments."""
    xp = _arrays.namespace(x)
    cast = Part(
        {name: _arrays.cast_floats(array, dtype) for name, array in part.items()}, part.path
    )
    out, pull = vjp(cast, _arrays.cast_floats(x, dtype), **options)

    def pullback(grad_output: Array) -> tuple[Any, ...]:
        grads, grad = pull(_arrays.cast_floats(grad_output, dtype))
        as_came = {name: xp.astype(g, part[name].dtype) for name, g in grads.items()}
        return as_came, xp.astype(grad, x.dtype)

    return out, pullback


def _is_narrow(x: Any) -> bool:
    """Whether the dtype is below 32 bits, so that sums need a wider dtype."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and _arrays.dtype_bits(dtype) < 32


def as_part(params: Any, *names: str) -> Part:
    """Return parameters as a :class:`Part`; with ``names``, check that there are no others."""
    if isinstance(params, Part):
        part = params
    elif isinstance(params, Mapping):
        part = Part(params)
    else:
        raise TypeError(
            f"params must be a dictionary of arrays by name, got {type(params).__name__}"
        )
    if names:
        _check_names(part, part, names)
    return part


def split(params: Any, *prefixes: str) -> list[Part]:
    """Group parameters by these prefixes of their names; other names raise an error."""
    whole = as_part(params)
    if prefixes in whole.splits:
        return whole.splits[prefixes]
    parts = [Part(path=whole.path + prefix) for prefix in prefixes]
    for key, array in whole.items():
        for part, prefix in zip(parts, prefixes, strict=True):
            if key.startswith(prefix):
                part[key.removeprefix(prefix)] = array
                break
        else:
            _check_names(whole, [key], prefixes)
    whole.splits[prefixes] = parts
    return parts


def split_layers(whole: Part) -> list[Part]:
    """Group parameters by the number before their first dot: 0, 1, ..."""
    if () in whole.splits:
        return whole.splits[()]
    layers: dict[str, Part] = {}
    for key, array in whole.items():
        number, _, rest = key.partition(".")
        if number not in layers:
            layers[number] = Part(path=f"{whole.path}{number}.")
        layers[number][rest] = array
    missing = [str(i) for i in range(len(layers)) if str(i) not in layers]
    if missing or not layers:
        raise ValueError(
            f"params must have layers 0, 1, ... without a gap, got no "
            f"{whole.path + (missing or ['0'])[0]!r}"
        )
    whole.splits[()] = [layers[str(i)] for i in range(len(layers))]
    return whole.splits[()]


def _check_names(whole: Part, found: Iterable[str], names: tuple[str, ...]) -> None:
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ValueError(
            f"params must have no other names than {', '.join(whole.path + n for n in names)} "
            f"here, got {whole.path + unknown[0]!r}; an option may be missing that uses it"
        )


def join(parts: Mapping[str, Params]) -> dict[str, Array]:
    """Return the parameters, or gradients, of all parts in one dictionary, with prefixes."""
    return {prefix + key: array for prefix, part in parts.items() for key, array in part.items()}


def check_pair(part: Part, name: str, x: Array, last: int | None = None) -> tuple[ModuleType, Any]:
    """Check that a parameter's last axis fits the inputs' last axis, or has length ``last``."""
    array = part[name]
    kind = (name, x.dtype, last or x.shape[-1]) if type(x) is np.ndarray and x.ndim else None
    if kind in part.checked:
        return part.checked[kind], array
    named = {"x": x, f"params[{part.path + name!r}]": array}
    autocast = _arrays.autocast_dtype(x)
    if autocast is not None:
        named = {of: _arrays.cast_floats(given, autocast) for of, given in named.items()}
    xp, (_, array) = _checks.check_arrays(1, **named)
    wanted = x.shape[-1] if last is None else last
    if array.shape[-1] != wanted:
        raise ValueError(
            f"params[{part.path + name!r}] must have a last axis of {wanted}, as its input has, "
            f"got shape {tuple(array.shape)}"
        )
    if kind is not None:
        part.checked[kind] = xp
    return xp, array


def all_tokens(x: Array) -> Array:
    """Reshape (..., d) to (n, d), so that one matrix product serves all sequences."""
    shape = tuple(x.shape)
    return _arrays.namespace(x).reshape(x, (math.prod(shape[:-1]), shape[-1]))


def normal_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: Any
) -> NDArray[Any]:
    """Draw independent normal numbers from an explicit generator."""
    if not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng must be a numpy.random.Generator, got {type(rng).__name__}; make one by "
            f"numpy.random.default_rng(seed)"
        )
    return (deviation * rng.standard_normal(shape)).astype(floating(dtype))


def floating(dtype: Any) -> np.dtype[Any]:
    """Check the dtype of drawn parameters."""
    found: np.dtype[Any] = np.dtype(dtype)
    if found not in (np.float16, np.float32, np.float64):
        raise TypeError(f"dtype must be float16, float32 or float64, got {found}")
    return found
