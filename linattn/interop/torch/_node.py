"""One operator of torch for every attention: compilers and ``torch.func`` see one node.

Eager calls on tensors that have a home (:mod:`linattn._home`) need none: they are what the
functions of linattn do. Any other call is a list of tensors, the length of the state before it, and
the name of a :class:`Call`, which has all that is no tensor. What torch traces keeps the name, so a
traced call is remembered for good, under a name that its content gives; any other lives as long as
somebody holds it.
"""

from __future__ import annotations

import hashlib
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch

from linattn import _checks, _settings
from linattn._arrays import autocast_dtype, cast_floats
from linattn._home import home_of
from linattn.interop.torch._kinds import DIFFERENTIABLE, KINDS, TOKENS, Named
from linattn.interop.torch._packing import pack, unpack
from linattn.typing import Array

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Call:
    """What a call is beside its tensors."""

    kind: str
    names: tuple[str, ...]
    constants: Named
    policy: _settings.Settings = field(default_factory=_settings.current_settings)

    def named(self, tensors: Sequence[Array]) -> Named:
        """Return the first tensors, which are arguments, by name."""
        return dict(zip(self.names, tensors, strict=False))

    @property
    def returns_scale(self) -> bool:
        """Whether the third result is the scale of a state, which has no gradient."""
        return self.kind == "linear" and self.constants["return_state"]

    def after(self, tensors: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        """Return those after the arguments: the scale of a returned state, and cotangents."""
        begin = len(self.names) + int(self.returns_scale)
        return tensors[len(self.names) : begin], tensors[begin:]

    def content(self) -> str:
        """Return a name of the same call in any process; exported, it holds the whole call."""
        try:
            constants = [*self.constants.items()]
            text = pack([self.kind, self.names, constants, tuple(self.policy)])
        except TypeError:  # of a map of others
            return uuid.uuid4().hex
        is_exported = getattr(torch.compiler, "is_exporting", bool)()
        return text if is_exported else hashlib.sha256(text.encode()).hexdigest()


_live: WeakValueDictionary[str, Call] = WeakValueDictionary()
_traced: dict[str, Call] = {}
_count = iter(range(2**63))

ARRAYS: tuple[str, ...] = (*DIFFERENTIABLE, "log_scale", "key_mask", "key_lengths", "key_stop")
ARRAYS += ("window_bias", "far_bias[0]", "far_bias[1]")
"""Arguments that a tensor is passed on as. Of others the values are read."""


def find(name: str) -> Call:
    call = _live.get(name) or _traced.get(name)
    if call is None and name.startswith("["):
        kind, names, constants, policy = unpack(name)
        call = _traced[name] = Call(kind, names, dict(constants), _settings.Settings(*policy))
    if call is None:
        raise RuntimeError(
            f"a traced call of linattn.interop.torch must be known in this process, got {name!r}; "
            f"trace the same call here first: same map, same options, such as by torch.export"
        )
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_name(
    kind: str, names: tuple[str, ...], keys: tuple[str, ...], _: str | None, *values: Any
) -> str:
    call = Call(kind, names, dict(zip(keys, values, strict=True)))
    name = call.content()
    _traced[name] = call
    return name


def operator_of(kind: str) -> Callable[[_F], _F]:
    """Return a decorator that makes a function, which has a signature alone, one of this kind."""

    def decorate(function: _F) -> _F:
        code, defaults = function.__code__, function.__kwdefaults__ or {}
        positional = code.co_varnames[: code.co_argcount]

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            # Python says which arguments are missing or unknown.
            function(*args, **options)
            named = {**dict(zip(positional, args, strict=False)), **defaults, **options}
            return _run(kind, named)

        return call  # type: ignore[return-value]

    return decorate


def _run(kind: str, named: Named) -> Any:
    """Run a call; arguments that are no tensors are constants."""
    if not isinstance(query := named["query"], torch.Tensor):
        _checks.check_arrays(query=query)
        raise TypeError(
            f"query must be a torch.Tensor, got {type(query).__name__}; call the function of this "
            f"name in linattn"
        )
    if "return_state" in named:
        named["return_state"] = _checks.check_flag("return_state", named["return_state"])
    is_traced = torch.compiler.is_compiling()
    parts, length = _parts(kind, named, is_traced)
    if is_traced:
        parts = {n: _known(a) for n, a in parts.items()}
    tensors = {n: a for n, a in parts.items() if n in ARRAYS and isinstance(a, torch.Tensor)}
    constants = {n: a for n, a in parts.items() if n not in tensors}
    tensors, names = _cast(tensors), tuple(tensors)
    given = [*tensors.values()]
    if is_traced:
        # Read here, the precision becomes a condition of the compiled code.
        shown = _settings.shown.precision
        name = _traced_name(kind, names, tuple(constants), shown, *constants.values())
        return KINDS[kind].answer(attend(given, length, name), named)
    _checks.check_arrays(**{name: tensors.get(name, parts[name]) for name in TOKENS})
    call = Call(kind, names, constants)
    if _is_at_home(given):
        held = {n: a if n in DIFFERENTIABLE else a.detach() for n, a in tensors.items()}
        with _outside_modes(call, query):
            return KINDS[kind].answer(KINDS[kind].solve(held, call, length), named)
    name = f"live-{next(_count)}"
    _live[name] = call
    return KINDS[kind].answer([*_Attend.apply(length, name, *given)], named)


def _parts(kind: str, named: Named, is_traced: bool) -> tuple[Named, Any]:
    """Return the arguments of a call, arrays in a state or a pair too, and the state's length."""
    parts, length, far_bias = dict(named), 0, named.get("far_bias")
    if kind == "linear":
        before, parts["initial_state"] = named["initial_state"], None
        if before is not None:
            if not is_traced:  # else the operator does, when it runs
                _checks.check_state_record("initial_state", before)
            parts["kvz"], parts["log_scale"], length = before[:3]
            for name in ("fingerprint", "num_sequences"):
                parts[name] = getattr(before, name)
    if isinstance(far_bias, tuple | list) and len(far_bias) == 2:
        parts["far_bias[0]"], parts["far_bias[1]"] = far_bias
        parts["far_bias"] = None
    return parts, length


def _is_at_home(tensors: Sequence[Array]) -> bool:
    """Whether a call on these tensors is computed in the memory that they have."""
    home = home_of(tensors[0])
    with torch.no_grad():
        return home is not None and home.covers(tensors)


def _known(value: Any) -> Any:
    """Return numbers that torch traces, and lists of them, as the constants that they are."""
    if isinstance(value, tuple | list):
        return type(value)([_known(item) for item in value])
    if type(value) is float:
        return value.__float__()
    return operator.index(value) if type(value) is int else value


def _cast(tensors: Named) -> Named:
    """Cast tokens as ``torch.autocast`` does for ``scaled_dot_product_attention``."""
    dtype = autocast_dtype(tensors["query"])
    if dtype is None:
        return tensors
    return {n: cast_floats(a, dtype) if n in TOKENS else a for n, a in tensors.items()}


@contextmanager
def _outside_modes(call: Call, tensor: Array) -> Iterator[None]:
    """Compute with the settings of the call, and nothing of torch's modes."""
    with ExitStack() as modes:
        modes.enter_context(_settings.use_settings(call.policy))
        modes.enter_context(np.errstate(all="ignore"))
        if autocast_dtype(tensor) is not None:
            modes.enter_context(torch.autocast(tensor.device.type, enabled=False))
        yield


def _unshared(results: Sequence[Any], given: Sequence[Array]) -> list[Array]:
    """Results as an operator must return them: contiguous, sharing no memory."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    owned = []
    for result in results:
        result = result.contiguous()
        place = result.untyped_storage().data_ptr()
        owned.append(result.clone() if place in seen else result)
        seen.add(place)
    return owned


@torch.library.custom_op("linattn::attend", mutates_args=())  # type: ignore[untyped-decorator]
def attend(tensors: Sequence[torch.Tensor], length: int, name: str) -> list[torch.Tensor]:
    call, asked = find(name), _settings.current_settings().precision
    if asked == "float64" != call.policy.precision:
        raise RuntimeError(
            f"precision must be {call.policy.precision!r}, under which this call was traced, got "
            f"{asked!r}; export or compile it inside linattn.config(precision={asked!r})"
        )
    with _outside_modes(call, tensors[0]):
        return _unshared(KINDS[call.kind].solve(call.named(tensors), call, length), tensors)


@torch.library.custom_op("linattn::pull_back", mutates_args=())  # type: ignore[untyped-decorator]
def pull_back(tensors: Sequence[torch.Tensor], length: int, name: str) -> list[torch.Tensor]:
    call = find(name)
    named = call.named(tensors)
    with _outside_modes(call, tensors[0]):
        gradients = KINDS[call.kind].pull(named, *call.after(tensors), call, length)
        return _unshared([gradients[n] for n in named if n in gradients], tensors)


def _of_results(call: Call, tensors: Sequence[Array]) -> list[Any]:
    return KINDS[call.kind].shapes(call.named(tensors), call)


def _of_gradients(call: Call, tensors: Sequence[Array]) -> list[Any]:
    named = call.named(tensors)
    return [(x.shape, x.dtype) for n, x in named.items() if n in DIFFERENTIABLE]


SHAPES = {attend: _of_results, pull_back: _of_gradients}
"""Functions that return the shape and dtype of each result of an operator."""


def _register_fake(op: Any, shapes: Any) -> None:
    @op.register_fake  # type: ignore[untyped-decorator]
    def _(tensors: Any, length: Any, name: str) -> Any:
        found = shapes(find(name), tensors)
        return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in found]


for _op, _shapes in SHAPES.items():
    _register_fake(_op, _shapes)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.length, ctx.name = inputs
    ctx.call = find(ctx.name)
    scale = output[2:] if ctx.call.returns_scale else ()
    saved = [*tensors, *scale]
    ctx.count = len(saved)
    ctx.mark_non_differentiable(*scale)
    # torch's checkpointing counts what is saved: with the setting one tensor more.
    marks = [tensors[0].new_empty(0)] * (ctx.call.policy.precision == "float64")
    ctx.save_for_backward(*saved, *marks)


def _gradients(ctx: Any, cotangents: Any, pull: Any) -> list[Array | None]:
    saved = ctx.saved_tensors[: ctx.count]
    used = cotangents[:2] if ctx.call.returns_scale else cotangents
    found = iter(pull([*saved, *used], ctx.length, ctx.name))
    return [next(found) if name in DIFFERENTIABLE else None for name in ctx.call.names]


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "the gradient of linattn.interop.torch cannot be differentiated again where torch compiles "
        "or transforms the call; that of the function of this name in linattn can"
    )


def _pulled(ctx: Any, cotangents: Any) -> Any:
    return _gradients(ctx, cotangents, pull_back), None, None


# `torch.compile` takes no function with a `jvp`, `torch.func` no operator with a gradient.
attend.register_autograd(_pulled, setup_context=_keep)
pull_back.register_autograd(_refuse)


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(length: int, name: str, *tensors: Array) -> tuple[Array, ...]:
        return tuple(attend([*tensors], length, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        length, name, *tensors = inputs
        _keep(ctx, (tensors, length, name), output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "derivatives of linattn.interop.torch must be taken in reverse, as by backward() or "
            "torch.func.grad, got one in forward mode, as of torch.func.jvp or jacfwd; call the "
            "function of this name in linattn"
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Array) -> Any:
        def pull(tensors: list[Array], length: int, name: str) -> Any:
            return _PullBack.apply(length, name, *tensors)

        return None, None, *_gradients(ctx, cotangents, pull)


class _PullBack(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(length: int, name: str, *tensors: Array) -> tuple[Array, ...]:
        return tuple(pull_back([*tensors], length, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    backward = staticmethod(_refuse)
