"""A recurrence of yours against the loop: any framework, any layout.

Letters: ``B`` batch, ``H`` heads of states, ``L`` tokens, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn.recurrences import linear_recurrence_vjp
from linattn.reference import recurrence
from linattn.testing._evidence import (
    Evidence,
    UntestableError,
    check_function,
    fail,
    largest,
    on_host,
)
from linattn.testing.backend import BackendReport
from linattn.testing.check import Row, row_of

__all__ = ["LAYOUTS", "RecurrenceLayout", "RecurrenceReport", "check_recurrence"]

Floats = NDArray[np.float64]
Arguments = dict[str, Floats]

RULES = ("linear", "gated", "delta", "gated_delta")
RTOL = {"float32": 2e-5, "float64": 1e-9}
"""Largest difference, in terms of the largest entry but at least 1."""

COSINES = (0.9, 0.99, 0.999)
"""Of keys with each other: inverses of triangles that cancel lose their digits there."""

CHUNKS = (16, 32, 64, 128, 256)
"""Sizes of chunks in use."""

GRADIENT_LENGTHS = (70, 1, 5, 65)
"""Tokens: sequences and last chunks that are short."""

MANY = 2**16 + 1
"""Sequences; a grid of CUDA has at most 65,535 blocks along its second and third axis."""

GOLDEN = {
    "linear": ([6.0, 7.5], 7.5),
    "gated": ([5.0, 2.75], 2.75),
    "delta": ([3.0, 3.75], 3.75),
    "gated_delta": ([2.5, 1.96875], 1.96875),
}
"""By hand: S = 2, k = (1, 1/2), v = (4, 3), decays 1/2, 1/4, beta = (1/2, 1), d = e = 1, q = 1."""


@dataclass(frozen=True)
class RecurrenceLayout:
    """How a kernel wants its arrays: from ``(B, H, L, n)`` and back.

    Attributes
    ----------
    tokens : callable
        ``tokens(x)`` of queries, keys, values and gates a channel ``(B, H, L, n)``.
    numbers : callable
        ``numbers(x)`` of one number a token ``(B, H, L)``.
    output : callable
        ``output(y, heads)`` gives ``(B, H, L, e)`` back.
    group : int
        Query heads that share a head of keys, values and states, next to each other.
    packed_states : callable
        ``packed_states(s)`` of the states ``(n, H, d, e)`` of n packed sequences.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.testing import RecurrenceLayout
    >>> def swap(x):
    ...     return np.swapaxes(x, 1, 2)
    >>> layout = RecurrenceLayout(swap, swap, lambda y, heads: swap(y))
    >>> layout.tokens(np.zeros((1, 2, 5, 4))).shape
    (1, 5, 2, 4)
    """

    tokens: Callable[[Floats], Floats]
    numbers: Callable[[Floats], Floats]
    output: Callable[[Floats, int], Floats]
    group: int = 1
    packed_states: Callable[[Floats], Floats] = field(default_factory=lambda: np.asarray)


def _heads_last(x: Floats) -> Floats:
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def _packed_heads(x: Floats) -> Floats:
    return _heads_last(x).reshape(x.shape[0], x.shape[2], -1)


LAYOUTS = {
    "linattn": RecurrenceLayout(
        lambda x: x, lambda x: x, lambda y, heads: y, packed_states=lambda s: s[:, None]
    ),
    "fla": RecurrenceLayout(_heads_last, _heads_last, lambda y, heads: np.swapaxes(y, 1, 2)),
    "onnx": RecurrenceLayout(
        _packed_heads,
        _heads_last,
        lambda y, heads: np.swapaxes(y.reshape(*y.shape[:2], heads, -1), 1, 2),
        group=2,
    ),
}
"""``linattn``, ``(B, H, L, d)``; ``fla``, ``(B, L, H, d)``; ``onnx``, ``(B, L, H d)``."""


class RecurrenceReport(BackendReport):
    """What :func:`check_recurrence` found, a row a property; printed, a table of 80 columns."""


@dataclass(frozen=True)
class _Kernel:
    """The function under test, called with arrays of ours."""

    function: Callable[..., Any]
    rule: str
    by_channel: bool
    layout: RecurrenceLayout
    asarray: Callable[[Any], Any]
    dtype: str
    rtol: float
    vjp: Callable[..., Any] | None

    def problem(self, length: int, seed: int = 0, **sizes: float) -> Arguments:
        """Random arguments in the precision of the kernel.

        ``sizes``: of batch and heads, the mean log decay, the largest beta.

        Keys have norm 1, and the state before them is not zero.
        """
        rng, heads, dim, value_dim = np.random.default_rng(seed), int(sizes.get("heads", 3)), 8, 4
        batch = int(sizes.get("batch", 2))
        lead = (batch, heads, length)
        key = rng.standard_normal((*lead, dim))
        arguments = {
            "query": rng.standard_normal((batch, heads * self.layout.group, length, dim)),
            "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
            "value": rng.standard_normal((*lead, value_dim)),
            "initial_state": rng.standard_normal((batch, heads, dim, value_dim)),
        }
        if "gated" in self.rule:
            shape = (*lead, dim) if self.by_channel else lead
            arguments["log_decay"] = -sizes.get("decay", 0.3) * rng.exponential(size=shape)
        if "delta" in self.rule:
            arguments["beta"] = sizes.get("beta", 1.0) * rng.random(lead)
        return {name: array.astype(self.dtype) for name, array in arguments.items()}

    def in_layout(self, name: str, array: Floats) -> Any:
        """One argument as the kernel wants it."""
        if name != "initial_state":
            kind = self.layout.tokens if array.ndim == 4 else self.layout.numbers
            array = kind(array)
        return self.asarray(np.array(array, dtype=self.dtype))

    def run(self, arguments: Arguments, **options: Any) -> tuple[Floats, Floats]:
        """Return the output ``(B, H, L, e)`` and the state; options are passed on unchanged."""
        given = {name: self.in_layout(name, array) for name, array in arguments.items()}
        result = self.function(
            given.pop("query"), given.pop("key"), given.pop("value"), **given, **options
        )
        if not isinstance(result, tuple | list) or len(result) != 2:
            fail("returns", f"want (output, state), got {type(result).__name__}")
        heads = arguments["query"].shape[1]
        return self.layout.output(on_host(result[0]), heads), on_host(result[1])

    def truth(self, arguments: Arguments) -> tuple[Floats, Floats]:
        """Return what the loop gives, in float64."""
        query = arguments["query"]
        batch, heads, length, dim = query.shape
        group = self.layout.group
        grouped = query.reshape(batch, heads // group, group, length, dim)
        of_keys = {name: x[:, :, None] for name, x in arguments.items() if name != "query"}
        loop: Any = recurrence
        output, state = loop(grouped, update_rule=self.rule, **of_keys)
        return output.reshape(batch, heads, *output.shape[3:]), state[:, :, 0]

    def compare(self, what: str, got: Floats, want: Floats) -> None:
        if got.shape != want.shape:
            fail(what, f"want shape {want.shape}, got {got.shape}")
        error, allowed = largest(got - want), self.rtol * max(1.0, largest(want))
        if not error <= allowed:
            fail(what, f"largest difference {error:.3g}, want at most {allowed:.3g}")

    def check(self, what: str, arguments: Arguments) -> None:
        """Compare one call with the loop."""
        output, state = self.run(arguments)
        want, want_state = self.truth(arguments)
        self.compare(f"output, {what}", output, want)
        self.compare(f"state, {what}", state, want_state)

    def need(self, kind: str) -> None:
        if kind not in self.rule:
            message = f"update_rule={self.rule!r} has no {'gate' if kind == 'gated' else 'beta'}"
            raise UntestableError(message)


def _rows(arguments: Arguments, start: int, stop: int) -> Arguments:
    """Arguments of tokens from start up to stop."""
    return {
        name: array if name == "initial_state" else array[:, :, start:stop]
        for name, array in arguments.items()
    }


def _golden(kernel: _Kernel) -> str:
    group, ones = kernel.layout.group, np.ones((1, 1, 2, 1))
    arguments = {
        "query": np.repeat(ones, group, axis=1),
        "key": np.array([1.0, 0.5]).reshape(ones.shape),
        "value": np.array([4.0, 3.0]).reshape(ones.shape),
        "initial_state": np.full((1, 1, 1, 1), 2.0),
    }
    if "gated" in kernel.rule:
        decay = np.log([0.5, 0.25])
        arguments["log_decay"] = decay.reshape(ones.shape if kernel.by_channel else (1, 1, 2))
    if "delta" in kernel.rule:
        arguments["beta"] = np.array([[[0.5, 1.0]]])
    output, state = kernel.run(arguments)
    wanted, last = GOLDEN[kernel.rule]
    kernel.compare("output", output, np.broadcast_to(wanted, (1, group, 2))[..., None])
    kernel.compare("state", state, np.full((1, 1, 1, 1), last))
    return "two tokens by hand"


def _loop(kernel: _Kernel) -> str:
    for length in (1, 2, 17, 64, 65, 130):
        kernel.check(f"{length} tokens", kernel.problem(length, seed=length))
    return "1 to 130 tokens"


def _no_state(kernel: _Kernel) -> str:
    arguments = kernel.problem(20)
    del arguments["initial_state"]
    kernel.check("no initial state", arguments)
    return "zeros before the first token"


def _split(kernel: _Kernel) -> str:
    arguments = kernel.problem(150)
    whole, last = kernel.run(arguments)
    for cuts in ([0, 1, 150], [0, 64, 150], [0, 77, 128, 150], [0, 149, 150]):
        state, outputs = arguments["initial_state"], []
        for start, stop in pairwise(cuts):
            part = _rows(arguments, start, stop) | {"initial_state": state}
            output, state = kernel.run(part)
            outputs.append(output)
        kernel.compare(f"split at {cuts[1:-1]}", np.concatenate(outputs, axis=2), whole)
        kernel.compare(f"state, split at {cuts[1:-1]}", state, last)
    return "chunks that hand their state on"


def _step(kernel: _Kernel) -> str:
    arguments = kernel.problem(70)
    whole, _ = kernel.run(arguments)
    state = arguments["initial_state"]
    for t in range(70):
        output, state = kernel.run(_rows(arguments, t, t + 1) | {"initial_state": state})
        kernel.compare(f"token {t} by itself", output, whole[:, :, t : t + 1])
    return "token by token"


def _causal(kernel: _Kernel) -> str:
    before, _ = kernel.run(kernel.problem(130))
    for t in (1, 63, 64, 100):
        arguments = kernel.problem(130)
        other = kernel.problem(130, seed=1, decay=3.0)
        changed = {
            name: array
            if name == "initial_state"
            else np.concatenate([array[:, :, :t], 3 * other[name][:, :, t:]], axis=2)
            for name, array in arguments.items()
        }
        if "beta" in changed:
            changed["beta"] = np.minimum(changed["beta"], 2)
            changed["key"] = np.concatenate(
                [arguments["key"][:, :, :t], other["key"][:, :, t:]], axis=2
            )
        output, _ = kernel.run(changed)
        kernel.compare(f"outputs before token {t}", output[:, :, :t], before[:, :, :t])
    return "changed tokens are not felt before them"


def _long_decay(kernel: _Kernel) -> str:
    kernel.need("gated")
    strong = kernel.problem(130)
    mixed = kernel.problem(130, decay=1e-3)
    chosen = np.random.default_rng(1).random(mixed["log_decay"].shape) < 0.3
    strong["log_decay"] = np.full_like(strong["log_decay"], -50.0)
    mixed["log_decay"] = np.where(chosen, -50.0, mixed["log_decay"]).astype(kernel.dtype)
    slow = kernel.problem(1000, decay=1e-4)
    kernel.check("decays of e^-50", strong)
    kernel.check("decays of e^-50 among slow ones", mixed)
    kernel.check("decays of e^-0.0001, 1,000 tokens", slow)
    return "e^-50 and e^-0.0001 a token"


def _beta(kernel: _Kernel) -> str:
    kernel.need("delta")
    for value in (0.0, 1.0, 2.0):
        arguments = kernel.problem(100)
        arguments["beta"] = np.full_like(arguments["beta"], value)
        kernel.check(f"beta = {value:g}", arguments)
    return "0, 1 and 2"


def _keys(kernel: _Kernel) -> str:
    for size, beta in ((0.5, 2.0), (1.5, 0.5)):
        arguments = kernel.problem(100, beta=beta)
        arguments["key"] = (size * arguments["key"]).astype(kernel.dtype)
        kernel.check(f"keys of norm {size:g}", arguments)
    return "norms of 0.5 and 1.5"


def _correlated(kernel: _Kernel) -> str:
    """Nearly parallel keys, written whole and in part, and zero keys."""
    length = 130
    for cosine in COSINES:
        arguments = kernel.problem(length, seed=5, decay=0.01)
        key = arguments["key"].astype(np.float64)
        common = key[:, :, :1]
        across = key - np.sum(key * common, axis=-1, keepdims=True) * common
        across /= np.maximum(np.linalg.norm(across, axis=-1, keepdims=True), 1e-300)
        # Keys a e + b u, u random across e: two of them have a cosine of about a^2.
        keys = np.sqrt(cosine) * common + np.sqrt(1 - cosine) * across
        arguments["key"] = keys.astype(kernel.dtype)
        kernel.check(f"keys of cosine {cosine:g}", arguments)
        if "beta" in arguments:
            arguments["beta"] = np.ones_like(arguments["beta"])
            kernel.check(f"keys of cosine {cosine:g}, beta 1", arguments)
    zeros = kernel.problem(length, seed=6)
    zeros["key"][:, :, ::3] = 0
    kernel.check("every third key zero", zeros)
    return f"cosines {', '.join(f'{cosine:g}' for cosine in COSINES)}, zero keys"


def _borders(kernel: _Kernel) -> str:
    for chunk in CHUNKS:
        for length in (chunk - 1, chunk, chunk + 1):
            kernel.check(f"{length} tokens", kernel.problem(length, seed=length, batch=1))
    return f"one token less, as many and one more than {', '.join(map(str, CHUNKS))}"


def _many(kernel: _Kernel) -> str:
    sizes: dict[str, float] = {"batch": MANY, "heads": 1}
    kernel.check(f"{MANY:,} sequences", kernel.problem(2, seed=7, **sizes))
    return f"{MANY:,} sequences of 2 tokens"


def _packed(kernel: _Kernel) -> str:
    borders = [0, 5, 5, 70, 71, 130]
    arguments = {name: x[:1] for name, x in kernel.problem(130).items()}
    # One batch: packed sequences take its place, in states too.
    shape = (len(borders) - 1, *arguments["initial_state"].shape[1:])
    initial = np.random.default_rng(2).standard_normal(shape).astype(kernel.dtype)
    packed = arguments | {"initial_state": kernel.layout.packed_states(initial)}
    output, states = kernel.run(packed, cu_seqlens=borders)
    for i, (start, stop) in enumerate(pairwise(borders)):
        part = _rows(arguments, start, stop) | {"initial_state": initial[i : i + 1]}
        want, state = kernel.truth(part)
        kernel.compare(f"output of sequence {i}", output[:, :, start:stop], want)
        kernel.compare(f"state of sequence {i}", states.reshape(shape)[i : i + 1], state)
    return "cu_seqlens against one by one"


def _gradient(kernel: _Kernel) -> str:
    if kernel.vjp is None:
        message = "no vjp was given"
        raise UntestableError(message)
    for length in GRADIENT_LENGTHS:
        names = _compare_gradients(kernel, kernel.vjp, kernel.problem(length, seed=length))
    lengths = ", ".join(map(str, GRADIENT_LENGTHS))
    return f"by {', '.join(names)}; {lengths} tokens"


def _compare_gradients(kernel: _Kernel, vjp: Callable[..., Any], arguments: Arguments) -> list[str]:
    """Compare every gradient with ours, and return their names."""
    names = ("query", "key", "value", "log_decay", "beta", "initial_state")
    order = [name for name in names if name in arguments]
    wide = {name: arguments[name].astype(np.float64) for name in order}
    group = kernel.layout.group
    ours = {name: x if name == "query" else x[:, :, None] for name, x in wide.items()}
    batch, heads, length, dim = wide["query"].shape
    ours["query"] = wide["query"].reshape(batch, heads // group, group, length, dim)
    ours_vjp: Any = linear_recurrence_vjp
    output, pullback = ours_vjp(**ours, update_rule=kernel.rule)
    cotangent = np.random.default_rng(3).standard_normal(output.shape)
    want = dict(zip(order, pullback(cotangent), strict=True))
    given = {name: kernel.in_layout(name, arguments[name]) for name in order}
    tokens = [given.pop(name) for name in ("query", "key", "value")]
    _, theirs = vjp(*tokens, **given)
    flat = cotangent.reshape(batch, heads, length, -1)
    got = dict(zip(order, theirs(kernel.in_layout("grad_output", flat)), strict=True))
    for name in order:
        expected = on_host(kernel.in_layout(name, want[name].reshape(wide[name].shape)))
        # A sum of as many terms as there are tokens.
        scale = largest(expected)
        kernel.compare(
            f"gradient of {name}, {length} tokens", on_host(got[name]) / scale, expected / scale
        )
    return order


def _inputs(kernel: _Kernel) -> str:
    arguments = kernel.problem(70)
    given = {name: kernel.in_layout(name, array) for name, array in arguments.items()}
    before = {name: on_host(array) for name, array in given.items()}
    tokens = [given[name] for name in ("query", "key", "value")]
    rest = {name: given[name] for name in given if name not in ("query", "key", "value")}
    kernel.function(*tokens, **rest)
    for name, array in given.items():
        if not np.array_equal(on_host(array), before[name]):
            fail(name, "was changed")
    return "left alone"


CHECKS: dict[str, tuple[str, Callable[[_Kernel], str]]] = {
    "golden": ("values worked out by hand", _golden),
    "loop": ("output and state of the loop", _loop),
    "no state": ("starts from zeros", _no_state),
    "split": ("chunks hand on their state", _split),
    "step": ("step == whole", _step),
    "causal": ("later tokens change no earlier output", _causal),
    "decay": ("strong and slow decays", _long_decay),
    "beta": ("beta at its ends", _beta),
    "keys": ("keys are used as they come", _keys),
    "correlated": ("keys that are nearly parallel", _correlated),
    "borders": ("sequences that end near a border of chunks", _borders),
    "many": ("more sequences than a grid of blocks has", _many),
    "packed": ("packed == separate", _packed),
    "gradient": ("the pullback is the derivative", _gradient),
    "inputs": ("inputs are left alone", _inputs),
}
"""The checks by name: what each shows, and how."""


@_arrays.on_array_device
def check_recurrence(
    function: Callable[..., Any],
    *,
    update_rule: str,
    layout: str | RecurrenceLayout = "linattn",
    by_channel: bool = False,
    vjp: Callable[..., Any] | None = None,
    asarray: Callable[[Any], Any] = np.asarray,
    dtype: str = "float32",
    rtol: float | None = None,
    skip: Collection[str] = (),
) -> RecurrenceReport:
    """Try a kernel for a gated or delta recurrence against the loop over tokens.

    Compared are outputs and states with :func:`linattn.reference.recurrence` in float64 and with
    two tokens worked out by hand; whole sequences with any split and with single tokens; what
    changed tokens do to earlier outputs; decays from e^-50 to e^-0.0001 a token, beta of 0 and 2,
    keys that have not norm 1, nearly parallel and zero keys, lengths around every size of chunk
    from 16 to 256, 65,537 sequences, packed sequences, gradients.

    Parameters
    ----------
    function : callable
        ``function(query, key, value, log_decay=, beta=, initial_state=)`` returns ``(output,
        state)``; it is given what the rule has, and multiplies outputs with ``1 / sqrt(d)``. States
        are ``(B, H, d, e)``. For the check "packed" it is also given ``cu_seqlens=``, a list.
    update_rule : {"linear", "gated", "delta", "gated_delta"}
        As for :func:`linattn.linear_recurrence`.
    layout : {"linattn", "fla", "onnx"} or RecurrenceLayout, optional
        Of tokens: ``(B, H, L, d)``; ``(B, L, H, d)``, as in flash-linear-attention; or
        ``(B, L, H d)``, as in ONNX's LinearAttention, with two query heads for each head of the
        state. Numbers a token are ``(B, H, L)``, in the other two ``(B, L, H)``. Default "linattn".
    by_channel : bool, optional
        Whether decays have a number for each key channel. Default False.
    vjp : callable, optional
        ``vjp(query, key, value, ...)`` gives ``(output, pullback)``, and ``pullback(grad_output)``
        the gradients by query, key, value, ``log_decay``, ``beta`` and ``initial_state``, in this
        order, those that the rule has.
    asarray : callable, optional
        Makes an array of the kernel's framework of a NumPy array, such as ``torch.from_numpy``.
    dtype : {"float32", "float64"}, optional
        Of what the kernel is given. Default "float32".
    rtol : float, optional
        Largest difference, in terms of the largest entry but at least 1. Default 2e-5 in float32
        and 1e-9 in float64.
    skip : collection of str, optional
        Checks to leave out, such as "packed".

    Returns
    -------
    RecurrenceReport
        ``report.passed``; printed, a table.

    Raises
    ------
    TypeError, ValueError
        Not a function, an unknown rule, layout, dtype or check.

    Examples
    --------
    >>> from functools import partial
    >>> import linattn
    >>> from linattn.testing import check_recurrence
    >>> kernel = partial(linattn.linear_recurrence, update_rule="delta", return_state=True)
    >>> check_recurrence(kernel, update_rule="delta").passed
    True
    """
    check_function("function", function, "(query, key, value, ...) -> (output, state)")
    check_function("asarray", asarray, "(array) -> array")
    if vjp is not None:
        check_function("vjp", vjp, "(query, key, value, ...) -> (output, pullback)")
    _checks.check_flag("by_channel", by_channel)
    for name, value, known in (
        ("update_rule", update_rule, RULES),
        ("dtype", dtype, tuple(RTOL)),
        *(("skip", check, tuple(CHECKS)) for check in skip),
    ):
        if value not in known:
            message = f"{name} must be one of {', '.join(known)}, got {value!r}"
            raise ValueError(message)
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            message = f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}"
            raise ValueError(message)
        layout = LAYOUTS[layout]
    allowed = RTOL[dtype] if rtol is None else _checks.check_finite_number("rtol", rtol)
    kernel = _Kernel(function, update_rule, by_channel, layout, asarray, dtype, allowed, vjp)
    title = f"{getattr(function, '__name__', type(function).__name__)}, {update_rule}, {dtype}"
    rows = (
        _row(name, what, check, kernel)
        for name, (what, check) in CHECKS.items()
        if name not in skip
    )
    return RecurrenceReport(title, tuple(rows))


def _row(name: str, what: str, check: Callable[[_Kernel], str], kernel: _Kernel) -> Row:
    def checked() -> Evidence:
        with np.errstate(all="ignore"):
            return Evidence(name, check(kernel))

    return row_of(name, what, checked)
