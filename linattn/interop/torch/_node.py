"""One operator of torch for every attention: autograd, compilers and ``torch.func`` see one node.

A call is a list of tensors, the length of the state before it, and the name of a :class:`Call`,
which has all that is no tensor. What torch traces keeps the name, so a traced call is remembered
for good, under a name that its content gives; any other lives as long as somebody holds it.
"""

from __future__ import annotations

import hashlib
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch

from linattn import _checks, _settings
from linattn._arrays import has_float64
from linattn._fingerprints import map_fingerprint
from linattn.interop.torch._packing import pack, unpack
from linattn.typing import Array, Recurrence

Named: TypeAlias = dict[str, Any]

TOKENS = ("query", "key", "value")
DIFFERENTIABLE = (*Recurrence.TOKENS, "kvz", "initial_state", "key_bias")


@dataclass(frozen=True, eq=False)
class Call:
    """What a call is beside its tensors.

    ``solve(named, call)`` returns the results, ``pull(named, results, cotangents, call)`` the
    gradients by name, and ``shapes(named, call)`` the shape and dtype of each result.
    """

    kind: str
    names: tuple[str, ...]
    constants: Named
    policy: _settings.Settings = field(default_factory=_settings.current_settings)

    def named(self, tensors: Sequence[Array]) -> Named:
        return dict(zip(self.names, tensors, strict=True))

    def content(self) -> str:
        """Return a name of the same call in any process; exported, it holds the whole call."""
        try:
            constants = [*self.constants.items()]
            text = pack([self.kind, self.names, constants, tuple(self.policy)])
        except TypeError:  # of a map of others
            return uuid.uuid4().hex
        is_exported = getattr(torch.compiler, "is_exporting", bool)()
        return text if is_exported else hashlib.sha256(text.encode()).hexdigest()


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {}
"""Solve, pull back and shapes, by the kind of a call."""

_live: WeakValueDictionary[str, Call] = WeakValueDictionary()
_traced: dict[str, Call] = {}
_count = iter(range(2**63))


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


def fingerprint_of(feature_map: Any) -> int | None:
    """Return the short fingerprint of a map, None for a map that has none."""
    if not torch.compiler.is_compiling():
        return map_fingerprint(feature_map)
    digits = _digits(feature_map)
    return int(digits) if digits else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _digits(feature_map: Any) -> str:
    """Return the fingerprint in digits: of an integer torch would make a variable."""
    return str(map_fingerprint(feature_map) or "")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def widest(device: str) -> torch.dtype:
    """Return float64, or float32 where a device has none."""
    return torch.float64 if has_float64(torch.empty(0, device=device)) else torch.float32


def run(kind: str, arrays: Named, constants: Named, length: Any = 0) -> Any:
    """Run a call; arrays that are no tensors are constants, None is neither."""
    if torch.compiler.is_compiling():
        if isinstance(arrays.get("log_decay"), float | int):
            device = arrays["query"].device
            like = {"dtype": widest(device.type), "device": device}
            arrays["log_decay"] = torch.scalar_tensor(arrays["log_decay"], **like)
        arrays, constants = (
            {n: _known(a) for n, a in part.items()} for part in (arrays, constants)
        )
    tensors = {n: a for n, a in arrays.items() if isinstance(a, torch.Tensor)}
    constants = {**{n: a for n, a in arrays.items() if n not in tensors}, **constants}
    names = tuple(tensors)
    if torch.compiler.is_compiling():
        # Read here, the precision becomes a condition of the compiled code.
        shown = _settings.shown.precision
        name = _traced_name(kind, names, tuple(constants), shown, *constants.values())
        return attend(_cast(tensors), length, name)
    if not isinstance(query := arrays["query"], torch.Tensor):
        _checks.check_arrays(query=query)
        raise TypeError(
            f"query must be a torch.Tensor, got {type(query).__name__}; call the function of this "
            f"name in linattn"
        )
    given = _cast(tensors)
    after = dict(zip(names, given, strict=True))
    _checks.check_arrays(**{name: after.get(name, arrays[name]) for name in TOKENS})
    call = Call(kind, names, constants)
    name = f"live-{next(_count)}"
    _live[name] = call
    return _Attend.apply(length, name, *given)


def _known(value: Any) -> Any:
    """Return numbers that torch traces, and lists of them, as the constants that they are."""
    if isinstance(value, tuple | list):
        return type(value)([_known(item) for item in value])
    if type(value) is float:
        return value.__float__()
    return operator.index(value) if type(value) is int else value


def _cast(tensors: Named) -> list[Array]:
    """Cast tokens as ``torch.autocast`` does for ``scaled_dot_product_attention``."""
    device = tensors["query"].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return [*tensors.values()]
    dtype = torch.get_autocast_dtype(device)
    return [
        array.to(dtype) if name in TOKENS and array.dtype != torch.float64 else array
        for name, array in tensors.items()
    ]


@contextmanager
def _outside_modes(call: Call, tensor: Array) -> Iterator[None]:
    """Compute with the settings of the call, and nothing of torch's modes."""
    device = tensor.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with _settings.use_settings(call.policy), np.errstate(all="ignore"):
        if not enabled:
            yield
            return
        with torch.autocast(device, enabled=False):
            yield


def _unshared(results: Sequence[Any], given: Sequence[Array]) -> list[Array]:
    """Results as an operator must return them: contiguous, sharing no memory."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in given}
    owned = []
    for result in results:
        result = result.contiguous()
        if result.untyped_storage().data_ptr() in seen:
            result = result.clone()
        seen.add(result.untyped_storage().data_ptr())
        owned.append(result)
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
        return _unshared(KINDS[call.kind][0](call.named(tensors), call, length), tensors)


@attend.register_fake  # type: ignore[untyped-decorator]
def _(tensors: Any, length: Any, name: str) -> Any:
    call = find(name)
    shapes = KINDS[call.kind][2](call.named(tensors), call)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes]


@torch.library.custom_op("linattn::pull_back", mutates_args=())  # type: ignore[untyped-decorator]
def pull_back(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    length: int,
    name: str,
) -> list[torch.Tensor]:
    call = find(name)
    named = call.named(tensors)
    with _outside_modes(call, tensors[0]):
        gradients = KINDS[call.kind][1](named, results, cotangents, call, length)
        found = [gradients[n] for n in named if n in gradients]
        return _unshared(found, (*tensors, *results, *cotangents))


@pull_back.register_fake  # type: ignore[untyped-decorator]
def _(tensors: Any, results: Any, cotangents: Any, length: Any, name: str) -> Any:
    return [
        torch.empty_like(a, memory_format=torch.contiguous_format) for a in _sources(tensors, name)
    ]


def _sources(tensors: Any, name: str) -> list[Array]:
    """Tensors that have a gradient."""
    return [a for n, a in find(name).named(tensors).items() if n in DIFFERENTIABLE]


def _keep(ctx: Any, inputs: Any, output: Any, *more: Array) -> None:
    tensors, ctx.length, ctx.name = inputs
    # Of the results only the scale of the state is read.
    saved, ctx.call = [*tensors, *output[2:3]], find(ctx.name)
    ctx.count, ctx.stop = len(tensors), len(saved)
    ctx.save_for_backward(*saved, *more)


def _gradients(ctx: Any, cotangents: Any, pull: Any) -> list[Array | None]:
    saved = [*ctx.saved_tensors]
    groups = saved[: ctx.count], saved[ctx.count : ctx.stop], [*cotangents[:2]]
    found = iter(pull(*groups, ctx.length, ctx.name))
    return [next(found) if name in DIFFERENTIABLE else None for name in ctx.call.names]


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "the gradient of linattn.interop.torch cannot be differentiated again; that of "
        "linattn.linear_attention and linattn.softmax_attention can"
    )


def _pulled(ctx: Any, cotangents: Any) -> Any:
    return _gradients(ctx, cotangents, pull_back), None, None


# For compilers; `torch.func` wants functions.
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
        # torch's checkpointing counts what is saved: with the setting one tensor more.
        wide = find(name).policy.precision == "float64"
        _keep(ctx, (tensors, length, name), output, *[tensors[0].new_empty(0)] * wide)
        ctx.mark_non_differentiable(*output[2:3])

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "derivatives of linattn.interop.torch must be taken in reverse, as by backward() or "
            "torch.func.grad, got one in forward mode, as of torch.func.jvp or jacfwd; call the "
            "function of this name in linattn"
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Array) -> Any:
        return None, None, *_gradients(ctx, cotangents, _PullBack.of)


class _PullBack(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @classmethod
    def of(cls, tensors: Any, results: Any, cotangents: Any, length: int, name: str) -> Any:
        counts = (len(tensors), len(tensors) + len(results))
        return cls.apply(length, name, counts, *tensors, *results, *cotangents)

    @staticmethod
    def forward(length: int, name: str, counts: tuple[int, int], *tensors: Array) -> Any:
        a, b = counts
        groups = ([*tensors[:a]], [*tensors[a:b]], [*tensors[b:]])
        return tuple(pull_back(*groups, length, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    backward = staticmethod(_refuse)
