"""What :func:`linattn.testing.check_recurrence` tries, a row each.

Letters: ``B`` batch, ``H`` heads of states, ``L`` tokens, ``d`` dim, ``e`` value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays
from linattn.recurrences import linear_recurrence_vjp
from linattn.reference import recurrence
from linattn.testing._evidence import UntestableError, fail, largest, on_host
from linattn.typing import Recurrence

Floats = NDArray[np.float64]
Arguments = dict[str, Floats]

RULES = ("linear", "gated", "delta", "gated_delta", "dplr")
RTOL = {"float16": 4e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-9}
"""Largest difference, in terms of the largest entry but at least 1."""

COSINES = (0.9, 0.99, 0.999)
"""Of keys with each other: inverses of triangles that cancel lose their digits there."""

CHUNKS = (16, 32, 64, 128, 256)
"""Sizes of chunks in use."""

LENGTHS = (1, 2, 3, 17, 64, 65, 130, 333, 600, 1100, 2100)
"""Tokens: a third chunk of every size in use, and of 512; odd numbers and even ones."""

HEADS = (3, 1, 5, 2, 16)
"""Heads of the lengths, in turn."""

SIZES = ((16, 16), (40, 96), (64, 32), (128, 128), (256, 24))
"""d and e."""

GRADIENT_LENGTHS = (70, 1, 5, 65, 257, 600)
"""Tokens: sequences and last chunks that are short, three chunks of 256."""

GATES = (*(0.0, -1e-4, -0.3) * 3, -2.0, -5.5, -7.0, -9.0)
"""Log decays of one sequence, and -30 once: float32 holds their sums over a chunk."""

MANY = 2**16 + 1
"""Sequences; a grid of CUDA has at most 65,535 blocks along its second and third axis."""

GOLDEN = {
    "linear": ([6.0, 7.5], 7.5),
    "gated": ([5.0, 2.75], 2.75),
    "delta": ([3.0, 3.75], 3.75),
    "gated_delta": ([2.5, 1.96875], 1.96875),
    "dplr": ([4.0, 0.5], 0.5),
}
"""By hand: S = 2, k = (1, 1/2), v = (4, 3), decays 1/2, 1/4, beta = (1/2, 1), d = e = 1, q = 1.

The erase key is (1/2, 1), the read key (1, 1/2).
"""

NAMES = (*Recurrence.TOKENS, "initial_state")
"""Arguments in the order of their gradients."""


@dataclass(frozen=True)
class Kernel:
    """The function under test, called with arrays of ours."""

    function: Callable[..., Any]
    rule: str
    by_channel: bool
    layout: Any
    asarray: Callable[[Any], Any]
    dtype: str
    rtol: float
    vjp: Callable[..., Any] | None
    dim: int | None
    value_dim: int | None
    lengths: tuple[int, ...] | None
    step: int = 1
    """Of the last axis of arrays in memory; above 1 they are not contiguous."""
    tried: dict[str, set[Any]] = field(default_factory=dict)

    def problem(self, length: int, seed: int = 0, **sizes: float) -> Arguments:
        """Random arguments, as many tokens or the next number of ``lengths``.

        ``sizes``: of batch and heads, d and e, the mean log decay, the largest beta.

        Keys have norm 1, and the state before them is not zero.
        """
        if self.lengths is not None:
            length = min([n for n in self.lengths if n >= length] or [max(self.lengths)])
        rng, heads = np.random.default_rng(seed), int(sizes.get("heads", 3))
        dim = self.dim or int(sizes.get("dim", 8))
        value_dim = self.value_dim or int(sizes.get("value_dim", 4))
        batch = int(sizes.get("batch", 2))
        lead = (batch, heads, length)
        key = rng.standard_normal((*lead, dim))
        arguments = {
            "query": rng.standard_normal((batch, heads * self.layout.group, length, dim)),
            "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
            "value": rng.standard_normal((*lead, value_dim)),
            "initial_state": rng.standard_normal((batch, heads, dim, value_dim)),
        }
        if has_decay(self.rule):
            shape = (*lead, dim) if self.by_channel else lead
            arguments["log_decay"] = -sizes.get("decay", 0.3) * rng.exponential(size=shape)
        if self.rule == "dplr":
            read = rng.standard_normal((*lead, dim))
            arguments["read_key"] = read / np.linalg.norm(read, axis=-1, keepdims=True)
            # As RWKV-7 has it: what is read is erased in part, another part in each channel.
            arguments["erase_key"] = rng.random((*lead, dim)) * arguments["read_key"]
        if "delta" in self.rule:
            arguments["beta"] = sizes.get("beta", 1.0) * rng.random(lead)
        return self.rounded(arguments)

    def kind(self, name: str) -> str:
        """Dtype of an argument: beside tokens of 16 bits, states and gates have 32."""
        is_wide = name in ("initial_state", "grad_state", *NAMES[3:])
        return "float32" if is_wide and "16" in self.dtype else self.dtype

    def rounded(self, arguments: Arguments) -> Arguments:
        """Arguments in float64, as the kernel will have them."""
        return {name: _rounded(array, self.kind(name)) for name, array in arguments.items()}

    def in_layout(self, name: str, array: Floats) -> Any:
        """One argument as the kernel wants it."""
        if "state" not in name:
            array = (self.layout.tokens if array.ndim == 4 else self.layout.numbers)(array)
        kind = self.kind(name)
        host = np.array(array, dtype="float32" if kind == "bfloat16" else kind)
        given = self.asarray(host if self.step == 1 else np.repeat(host, self.step, axis=-1))
        given = _bfloat16(given) if kind == "bfloat16" else given
        return given if self.step == 1 else given[..., :: self.step]

    def run(self, arguments: Arguments, **options: Any) -> tuple[Floats, Floats]:
        """Return the output ``(B, H, L, e)`` and the state; options are passed on unchanged."""
        self.note(arguments)
        given = {name: self.in_layout(name, array) for name, array in arguments.items()}
        result = self.function(
            given.pop("query"), given.pop("key"), given.pop("value"), **given, **options
        )
        if not isinstance(result, tuple | list) or len(result) != 2:
            fail("returns", f"want (output, state), got {type(result).__name__}")
        heads = arguments["query"].shape[1]
        return self.layout.output(on_host(result[0]), heads), on_host(result[1])

    def note(self, arguments: Arguments) -> None:
        """Remember what the kernel is given, for the report."""
        batch, heads, length, dim = arguments["key"].shape
        size = f"{dim} x {arguments['value'].shape[-1]}"
        seen = {"tokens": {length}, "batch x heads": {f"{batch:,} x {heads}"}, "d x e": {size}}
        gates = {n: {x.min(), x.max()} for n, x in arguments.items() if n in ("log_decay", "beta")}
        for name, values in (seen | gates).items():
            self.tried.setdefault(name, set()).update(values)

    def seen(self) -> str:
        """Say at which lengths, heads, sizes, gates and dtype the kernel was tried."""
        parts = [
            f"{name} {min(values):.3g} to {max(values):.3g}"
            if name in ("log_decay", "beta")
            else f"{name} {', '.join(map(str, sorted(values)))}"
            for name, values in self.tried.items()
        ]
        return "; ".join([*parts, self.dtype])

    def truth(self, arguments: Arguments) -> tuple[Floats, Floats]:
        """Return what the loop gives, in float64."""
        arguments = self.rounded(arguments)
        query = arguments["query"]
        batch, heads, length, dim = query.shape
        group = self.layout.group
        grouped = query.reshape(batch, heads // group, group, length, dim)
        of_keys = {name: x[:, :, None] for name, x in arguments.items() if name != "query"}
        loop: Any = recurrence
        output, state = loop(grouped, update_rule=self.rule, **of_keys)
        return output.reshape(batch, heads, *output.shape[3:]), state[:, :, 0]

    def compare(self, what: str, got: Floats, want: Floats, rtol: float | None = None) -> None:
        if got.shape != want.shape:
            fail(what, f"want shape {want.shape}, got {got.shape}")
        error, allowed = largest(got - want), (rtol or self.rtol) * max(1.0, largest(want))
        if not error <= allowed:
            fail(what, f"largest difference {error:.3g}, want at most {allowed:.3g}")

    def check(self, what_is_tried: str, arguments: Arguments) -> str:
        """Compare one call with the loop."""
        what = f"{what_is_tried}{', ' * bool(what_is_tried)}{arguments['key'].shape[2]} tokens"
        results, wanted = self.run(arguments), self.truth(arguments)
        for name, got, want in zip(("output", "state"), results, wanted, strict=True):
            self.compare(f"{name}, {what}", got, want)
        return what_is_tried

    def need(self, condition: object, message: str) -> None:
        if not condition:
            raise UntestableError(message)


def has_decay(rule: str) -> bool:
    return "gated" in rule or rule == "dplr"


def _rounded(array: Floats, dtype: str) -> Floats:
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        array, dtype = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32), "float32"
    return np.asarray(array).astype(dtype).astype(np.float64)


def _bfloat16(array: Any) -> Any:
    """Cast an array of float32, unless ``asarray`` has done that."""
    xp = _arrays.namespace(array)
    if xp.__name__.endswith("numpy") and "bfloat16" not in np.sctypeDict:
        raise ValueError(
            "dtype='bfloat16' needs asarray=torch.from_numpy or another library's; or ml_dtypes"
        )
    return xp.astype(array, getattr(xp, "bfloat16", "bfloat16"))


def _rows(arguments: Arguments, start: int, stop: int) -> Arguments:
    """Arguments of tokens from start up to stop."""
    return {
        name: array if name == "initial_state" else array[:, :, start:stop]
        for name, array in arguments.items()
    }


def _golden(kernel: Kernel) -> str:
    kernel.need(not (kernel.dim or kernel.value_dim), "has d = e = 1")
    group, ones = kernel.layout.group, np.ones((1, 1, 2, 1))
    arguments = {
        "query": np.repeat(ones, group, axis=1),
        "key": np.array([1.0, 0.5]).reshape(ones.shape),
        "value": np.array([4.0, 3.0]).reshape(ones.shape),
        "initial_state": np.full((1, 1, 1, 1), 2.0),
    }
    if kernel.rule == "dplr":
        arguments["erase_key"] = np.array([0.5, 1.0]).reshape(ones.shape)
        arguments["read_key"] = np.array([1.0, 0.5]).reshape(ones.shape)
    if has_decay(kernel.rule):
        decay = np.log([0.5, 0.25])
        arguments["log_decay"] = decay.reshape(ones.shape if kernel.by_channel else (1, 1, 2))
    if "delta" in kernel.rule:
        arguments["beta"] = np.array([[[0.5, 1.0]]])
    output, state = kernel.run(arguments)
    wanted, last = GOLDEN[kernel.rule]
    kernel.compare("output", output, np.broadcast_to(wanted, (1, group, 2))[..., None])
    kernel.compare("state", state, np.full((1, 1, 1, 1), last))
    return "two tokens by hand"


def _loop(kernel: Kernel) -> Cases:
    for turn, length in enumerate(kernel.lengths or LENGTHS):
        heads, batch = HEADS[turn % len(HEADS)], 2 - turn % 2
        yield "", kernel.problem(length, seed=length, heads=heads, batch=batch, decay=0.05)


def _sizes(kernel: Kernel) -> Cases:
    kernel.need(not (kernel.dim or kernel.value_dim), "dim or value_dim was given")
    for dim, value_dim in SIZES:
        yield "", kernel.problem(130, dim, dim=dim, value_dim=value_dim, heads=2, batch=1)


def _no_state(kernel: Kernel) -> Cases:
    for length in (20, 300):
        arguments = kernel.problem(length)
        del arguments["initial_state"]
        yield "no initial state", arguments


def _split(kernel: Kernel) -> str:
    for length, *all_cuts in ((150, [1], [64], [77, 128], [149]), (400, [128], [256], [200, 320])):
        arguments = kernel.problem(length)
        whole, last = kernel.run(arguments)
        for cuts in all_cuts:
            state, outputs = arguments["initial_state"], []
            for start, stop in pairwise([0, *cuts, length]):
                part = _rows(arguments, start, stop) | {"initial_state": state}
                output, state = kernel.run(part)
                outputs.append(output)
            kernel.compare(f"split at {cuts}", np.concatenate(outputs, axis=2), whole)
            kernel.compare(f"state, split at {cuts}", state, last)
    return "chunks that hand their state on"


def _step(kernel: Kernel) -> str:
    arguments = kernel.problem(70)
    whole, _ = kernel.run(arguments)
    state = arguments["initial_state"]
    for t in range(70):
        output, state = kernel.run(_rows(arguments, t, t + 1) | {"initial_state": state})
        kernel.compare(f"token {t} by itself", output, whole[:, :, t : t + 1])
    return "token by token"


def _causal(kernel: Kernel) -> str:
    for wanted, cuts in ((130, (1, 63, 64, 100)), (400, (65, 127, 200, 257, 383))):
        arguments = kernel.problem(wanted)
        other = kernel.problem(wanted, seed=1, decay=3.0)
        before, _ = kernel.run(arguments)
        for t in (t for t in cuts if t < before.shape[2]):
            changed = {
                name: array
                if name == "initial_state"
                else np.concatenate([array[:, :, :t], 3 * other[name][:, :, t:]], axis=2)
                for name, array in arguments.items()
            }
            if "beta" in changed:
                changed["beta"] = np.minimum(changed["beta"], 2)
            # Three times as large they would make a state grow that is corrected.
            for name in ("key", "erase_key", "read_key"):
                if name in changed and kernel.rule not in ("linear", "gated"):
                    parts = arguments[name][:, :, :t], other[name][:, :, t:]
                    changed[name] = np.concatenate(parts, axis=2)
            output, _ = kernel.run(changed)
            kernel.compare(f"outputs before token {t}", output[:, :, :t], before[:, :, :t])
    return "changed tokens are not felt before them"


def _long_decay(kernel: Kernel) -> Cases:
    kernel.need(has_decay(kernel.rule), f"update_rule={kernel.rule!r} has no gate")
    slow = kernel.problem(130, decay=1e-3)
    given = slow["log_decay"]
    chosen = np.random.default_rng(1).random(given.shape)
    in_runs = np.moveaxis(np.zeros_like(given), 2, -1) + np.arange(given.shape[2]) // 40 % 2
    for what, log_decay in (
        ("e^-50", np.full_like(given, -50.0)),
        ("e^-30", np.full_like(given, -30.0)),
        ("1 (log decay 0)", np.zeros_like(given)),
        ("e^-50 among slow ones", np.where(chosen < 0.3, -50.0, given)),
        ("1 among others", np.where(chosen < 0.3, 0.0, -chosen)),
        ("1 and e^-30 in runs", -30 * np.moveaxis(in_runs, -1, 2)),
    ):
        yield f"decays of {what}", slow | {"log_decay": log_decay}
    yield "decays of e^-0.0001", kernel.problem(1000, decay=1e-4)


def _beta(kernel: Kernel) -> Cases:
    kernel.need(kernel.rule not in ("linear", "gated"), f"update_rule={kernel.rule!r} has no beta")
    arguments = kernel.problem(100)
    by_channel = kernel.rule == "dplr" and kernel.by_channel
    shape = arguments["key"].shape[: 4 if by_channel else 3]
    for value in (0.0, 1.0, 2.0):
        yield f"beta = {value:g}", arguments | {"beta": np.full(shape, value)}
    yield "beta at random", arguments | {"beta": np.random.default_rng(6).random(shape)}


def _keys(kernel: Kernel) -> Cases:
    for size, beta in ((0.5, 2.0), (1.5, 0.5)):
        arguments = kernel.problem(100, beta=beta)
        yield f"keys of norm {size:g}", arguments | {"key": size * arguments["key"]}
    arguments, size = kernel.problem(100), 1e3 if kernel.dtype == "float16" else 1e5
    yield f"values of size {size:g}", arguments | {"value": size * arguments["value"]}


def _correlated(kernel: Kernel) -> Cases:
    """Nearly parallel keys, written whole and in part, and zero keys."""
    arguments = kernel.problem(130, seed=5, decay=0.01)
    key = arguments["key"]
    common = key[:, :, :1]
    across = key - np.sum(key * common, axis=-1, keepdims=True) * common
    across /= np.maximum(np.linalg.norm(across, axis=-1, keepdims=True), 1e-300)
    for cosine in COSINES:
        # Keys a e + b u, u random across e: two of them have a cosine of about a^2.
        keys = np.sqrt(cosine) * common + np.sqrt(1 - cosine) * across
        if "read_key" in arguments:
            rates = np.random.default_rng(7).random(keys.shape)
            arguments |= {"read_key": keys, "erase_key": rates * keys}
        yield f"keys of cosine {cosine:g}", arguments | {"key": keys}
        if "beta" in arguments:
            ones = {"beta": np.ones_like(arguments["beta"])}
            yield f"keys of cosine {cosine:g}, beta 1", arguments | {"key": keys} | ones
    third = key * (np.arange(key.shape[2]) % 3 > 0)[:, None]
    yield "every third key zero", arguments | {"key": third}
    yield "all keys zero", arguments | {"key": 0 * key}


def _borders(kernel: Kernel) -> Cases:
    for chunk in CHUNKS:
        for length in (chunk - 1, chunk, chunk + 1):
            yield "", kernel.problem(length, seed=length, batch=1)


def _many(kernel: Kernel) -> Cases:
    size = MANY * (kernel.dim or 4) * (kernel.value_dim or 2)
    kernel.need(size < 2**25, f"{MANY:,} states of this size take {size * 8 / 1e9:.1f} GB")
    yield f"{MANY:,} sequences", kernel.problem(2, 7, batch=MANY, heads=1, dim=4, value_dim=2)


def _packed(kernel: Kernel) -> str:
    for borders in ([0, 5, 5, 70, 71, 130], [0, 270, 271, 600]):
        arguments = {name: x[:1] for name, x in kernel.problem(borders[-1]).items()}
        # One batch: packed sequences take its place, in states too.
        shape = (len(borders) - 1, *arguments["initial_state"].shape[1:])
        # The second has no state: kernels have a path of its own for that.
        initial = (borders[-1] < 200) * np.random.default_rng(2).standard_normal(shape)
        packed = arguments | {"initial_state": kernel.layout.packed_states(initial)}
        if borders[-1] > 200:
            del packed["initial_state"]
        output, states = kernel.run(packed, cu_seqlens=borders)
        for i, (start, stop) in enumerate(pairwise(borders)):
            part = _rows(arguments, start, stop) | {"initial_state": initial[i : i + 1]}
            want, state = kernel.truth(part)
            kernel.compare(f"output of sequence {i}", output[:, :, start:stop], want)
            kernel.compare(f"state of sequence {i}", states.reshape(shape)[i : i + 1], state)
    return "cu_seqlens against one by one"


def _gradient(kernel: Kernel) -> str:
    kernel.need(kernel.vjp, "no vjp was given")
    return max((_compare_gradients(kernel, *x) for x in _gradient_problems(kernel)), key=len)


def _gradient_problems(kernel: Kernel) -> Cases:
    for length in kernel.lengths or GRADIENT_LENGTHS:
        decay = 0.3 if length < 100 else 0.02
        yield "", kernel.problem(length, seed=length, beta=2.0, decay=decay)
    ends = kernel.problem(130, seed=1, dim=128, value_dim=144, heads=2, batch=1)
    for name, values in (("log_decay", GATES), ("beta", (0.0, 1.0, 1.5, 2.0))):
        if name in ends:
            ends[name] = np.random.default_rng(4).choice(values, ends[name].shape)
        if name == "log_decay" and name in ends:
            ends[name][:, :, 40:41] = -30
    yield "gates and beta at their ends, ", ends
    if "log_decay" in ends:
        yield "log decays of 0, ", ends | {"log_decay": 0 * ends["log_decay"]}
    del ends["initial_state"]
    yield "no initial state, ", ends


def _compare_gradients(kernel: Kernel, what: str, arguments: Arguments) -> str:
    """Compare output and every gradient with ours, and say which."""
    wide = kernel.rounded({name: arguments[name] for name in NAMES if name in arguments})
    kernel.note(wide)
    group, (batch, heads, length, dim) = kernel.layout.group, wide["query"].shape
    ours = {name: x[:, :, None] for name, x in wide.items()}
    ours["query"] = wide["query"].reshape(batch, heads // group, group, length, dim)
    ours_vjp: Any = linear_recurrence_vjp
    results, pullback = ours_vjp(**ours, update_rule=kernel.rule, return_state=True)
    given = {name: kernel.in_layout(name, array) for name, array in wide.items()}
    tokens, vjp = [given.pop(name) for name in NAMES[:3]], kernel.vjp
    assert vjp is not None
    found, theirs = vjp(*tokens, **given)
    has_state = isinstance(found, tuple | list)
    rng, results = np.random.default_rng(3), results if has_state else results[:1]
    drawn = [rng.standard_normal(result.shape) for result in results]
    cotangents = kernel.rounded(dict(zip(("grad_output", "grad_state"), drawn, strict=False)))
    wanted = pullback(*cotangents.values())
    flat = {n: x.reshape(batch, -1, *x.shape[3:]) for n, x in cotangents.items()}
    got = theirs(*(kernel.in_layout(name, x) for name, x in flat.items()))
    output = kernel.layout.output(on_host(found[0] if has_state else found), heads)
    what, summed = f"{what}{length} tokens", kernel.rtol * (4 if "16" in kernel.dtype else 1)
    kernel.compare(f"output of vjp, {what}", output, results[0].reshape(output.shape))
    for name, ours_given, theirs in zip(wide, wanted, got, strict=True):
        expected = on_host(kernel.in_layout(name, ours_given.reshape(wide[name].shape)))
        # A sum of as many terms as there are tokens.
        scale = largest(expected) or 1.0
        pulled = on_host(theirs) / scale
        kernel.compare(f"gradient of {name}, {what}", pulled, expected / scale, summed)
    final = "through the final state too" if has_state else "not through the final state"
    return f"by {', '.join(wide)}; {final}"


def _strided(kernel: Kernel) -> str:
    try:
        replace(kernel, step=2).check("", kernel.problem(130, seed=8))
    except AssertionError:
        raise
    except Exception as error:  # an error is an answer, whatever it is
        raise UntestableError(f"rejected: {type(error).__name__}: {error}") from error
    return "every second number of larger arrays"


def _inputs(kernel: Kernel) -> str:
    arguments = kernel.problem(70)
    given = {name: kernel.in_layout(name, array) for name, array in arguments.items()}
    before = {name: on_host(array) for name, array in given.items()}
    tokens = [given[name] for name in ("query", "key", "value")]
    rest = {name: given[name] for name in given if name not in ("query", "key", "value")}
    kernel.function(*tokens, **rest)
    for name, array in given.items():
        if not np.array_equal(on_host(array), before[name]):
            fail(name, "was changed")
    kernel.check("a second call", kernel.problem(70, seed=9))
    return "left alone; a second call is right too"


Cases = Iterator[tuple[str, Arguments]]
"""Problems that are compared with the loop, and what is what_is_tried about each."""

CHECKS: dict[str, tuple[str, Callable[[Kernel], str | Cases]]] = {
    "golden": ("values worked out by hand", _golden),
    "loop": ("output and state of the loop", _loop),
    "sizes": ("any d and e", _sizes),
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
    "strided": ("arrays that are not contiguous", _strided),
    "inputs": ("inputs are left alone", _inputs),
}
"""The checks by name: what each shows, and how."""

OWN_LENGTHS = ("golden", "split", "step", "borders", "many", "packed")
"""Those that need numbers of tokens of their own."""
