"""A backend against the generic code: every function that it defines, on random problems."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _dispatch, _numerics
from linattn._checks import check_positive_int
from linattn._driver.causal_blocks import rejected_rows
from linattn.sampling import Seed, as_generator
from linattn.testing._blocks import REFERENCES, Block, blocks, cast, leaves
from linattn.testing._compared import KINDS, WrongResultError, need, to_host
from linattn.testing._evidence import check_not_empty, name_of
from linattn.testing._problems import WHOLE_CHECKS, Subject, wholes
from linattn.testing.check import FAILED, PASSED, SKIPPED, Report, Row, check_on_fail, outcome
from linattn.typing import Array, Backend, BlockTier, Declined, Partial, Services, Tokens, WholeTier

__all__ = ["BackendReport", "check_backend"]

RTOL = {"float32": 1e-3, "float64": 1e-9}
"""Largest difference, in terms of the largest entry of a row, of a state's column or of a head."""

RESULTS = {
    "reduce_block": ("state",),
    "reduce_values": ("state",),
    "read_block": ("partial",),
    "read_output": ("array",),
    "scan_block": ("partial", "state"),
    "scan_decayed_block": ("partial", "state"),
    "sequences_block": ("partial",),
    "exact_block": ("partial",),
    "exact_more": ("partial",),
    "divide": ("array",),
    "band_block": ("partial",),
    "assign_block": ("state", "choice", "array"),
    "choose_block": ("choice", "partial"),
    "clusters_block": ("partial",),
    "read_block_vjp": ("query gradient", "adjoint"),
    "reduce_block_vjp": ("key gradient", "gradient of [v, 1]"),
    "scan_vjp": ("query gradient", "key gradient", "gradient of [v, 1]", "adjoint"),
    "exact_vjp": ("query gradient", "key gradient", "gradient of [v, 1]"),
}
"""What each block function returns."""

PLACES = ("divide", "read_output")
"""Those whose last argument is where the result may go."""

TOKENS = re.compile(r"(\d+) tokens")
"""In the name of a problem."""

SCANS = ("scan_block", "scan_decayed_block")
"""Those that scan causal blocks, whose rows the driver accepts or not."""


class BackendReport(Report):
    """What :func:`check_backend` found, a row a function; printed, a table of 80 columns."""

    @property
    def summary(self) -> str:
        """One sentence: how many functions ended how."""
        return f"{self.counts}."

    @property
    def reservation(self) -> str:
        """Which functions no problem was compared for, as a sentence; empty for none."""
        return f"Never compared: {self.idle}." if self.idle else ""


@dataclass
class _Tally:
    """What came of the problems of one function."""

    wrong: str = ""
    labels: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def take(self, label: str, check: Callable[[], Any]) -> None:
        """Run one check, which returns an answer of the backend where that is declined."""
        if self.wrong:
            return
        try:
            with _numerics.ignore_fp_warnings(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                declined = check()
        except WrongResultError as wrong:
            self.wrong = f"{wrong} ({label})"
        except Exception as error:  # whatever the backend raises is to be reported
            self.wrong = f"raises {type(error).__name__}: {error} ({label})"
        else:
            if declined is None:
                self.labels.append(label)
            else:
                self.reasons[getattr(declined, "reason", "")] += 1

    def row(self, name: str) -> Row:
        what = "agrees with the generic code"
        if self.wrong:
            return Row(name, what, FAILED, self.wrong)
        declined = sum(self.reasons.values())
        detail = f"{len(self.labels)} problems" + (f", {declined} declined" if declined else "")
        common = [reason for reason, _ in self.reasons.most_common(2) if reason]
        detail += f": {'; '.join(common)}" if common else ""
        lengths = sorted({int(n) for label in self.labels for n in TOKENS.findall(label)})
        dtypes = sorted({label.rpartition(", ")[2] for label in self.labels})
        if lengths:
            detail += f"; {', '.join(map(str, lengths))} tokens, {', '.join(dtypes)}"
        return Row(name, what, PASSED if self.labels else SKIPPED, detail)


@_arrays.on_array_device
def check_backend(
    module: ModuleType,
    *,
    num_problems: int = 90,
    dtypes: Collection[str] = ("float32", "float64"),
    extras: Collection[str] = (),
    xp: ModuleType = np,
    rng: Seed = 0,
    on_fail: str = "raise",
) -> BackendReport:
    """Run every function that a backend defines, on random problems, against the generic code.

    Compared are names and parameters with those of :class:`linattn.typing.Backend`, results on a
    common log scale, their shapes and dtypes, and the arguments before and after: none may be
    changed. A function may decline any problem. Blocks are of every kind of spec, one to 150
    tokens, with and without log weights, wholly masked, with heads that broadcast and with none,
    after no key, some, or keys whose logs lie 60 above or below theirs.

    Parameters
    ----------
    module : module
        The backend; it need not be registered.
    num_problems : int, optional
        Blocks that each function of the block tier is given in every dtype; a third as many
        problems for ``plan`` and each function of the whole tier. Default 90: every spec with
        every kind of heads.
    dtypes : collection of str, optional
        Accumulation dtypes. Default both, "float32" and "float64".
    extras : collection of str, optional
        Public functions of the module that are none of the contract. Default none: a misspelt name
        would never be called.
    xp : module, optional
        Array namespace that the module works on. Default NumPy.
    rng : int, Generator, SeedSequence or None, optional
        Of the problems. Default 0.
    on_fail : {"raise", "return"}, optional
        Whether a wrong function raises at the end, or is only in the report. Default "raise".

    Returns
    -------
    BackendReport
        ``report.passed`` says whether nothing was wrong; ``print(report)`` shows a row a function:
        how many problems were compared and declined, or the first result that is wrong, with the
        problem that it is of. "skipped" stands where all were declined.

    Raises
    ------
    CheckFailedError
        A function is wrong: an AssertionError, whose message is the whole table.
    TypeError, ValueError
        Not a module; ``num_problems`` is not a positive integer; another dtype or ``on_fail``.

    Notes
    -----
    The generic code computes in float64, from the same rounded arguments. Allowed is 1e-3 (float64:
    1e-9) of the largest entry of a row, of a state's column or of a head's gradient: rounding of
    150 tokens stays below, sums that are 1 % off do not. About 5 s for the backend of NumPy.

    Examples
    --------
    >>> import linattn_numpy
    >>> from linattn.testing import check_backend
    >>> check_backend(linattn_numpy, num_problems=3, extras=["limited_threads"]).passed
    True
    """
    if not isinstance(module, ModuleType):
        raise TypeError(f"module must be a module, got {name_of(module)}")
    check_on_fail(on_fail)
    count = check_positive_int("num_problems", num_problems)
    check_not_empty("dtypes", dtypes)
    for dtype in dtypes:
        if dtype not in RTOL:
            raise ValueError(f"dtypes must be of 'float32' and 'float64', got {dtype!r}")
    generator = as_generator(rng)
    functions = dict(_public_functions(module))
    known = [name for name in (*WHOLE_CHECKS, *REFERENCES) if name in functions]
    tallies = {name: _Tally(_signature(name, functions[name])) for name in known}
    for block in blocks(generator, count):
        for name, dtype in product(block.arguments, dtypes):
            if name in tallies:
                check = partial(_compare, functions[name], name, block, dtype, xp)
                tallies[name].take(f"{block.name}, {dtype}", check)
    for whole in wholes(generator, -(-count // 3)):
        for name, dtype in product(WHOLE_CHECKS, ("float16", *dtypes)):
            if name in tallies:
                check = partial(WHOLE_CHECKS[name], functions[name], Subject(whole, dtype, xp))
                tallies[name].take(f"{whole.name}, {dtype}", check)
    rows = [tally.row(name) for name, tally in tallies.items()]
    rows.insert(0, _names(module, functions, extras))
    return outcome(BackendReport(module.__name__, tuple(rows)), on_fail)


# Names ------------------------------------------------------------------------------------------


def _contract() -> dict[str, inspect.Signature]:
    """Functions of the protocol and their signatures."""
    return {
        name: inspect.signature(getattr(Backend, name))
        for tier in (WholeTier, BlockTier, Services)
        for name in vars(tier)
        if not name.startswith("_")
    }


def _public_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions that a module offers: those in ``__all__``, or else without an underscore."""
    listed = getattr(module, "__all__", None)
    for name in vars(module) if listed is None else listed:
        function = getattr(module, name)
        root = str(getattr(function, "__module__", "")).partition(".")[0]
        offered = listed is not None or root == module.__name__.partition(".")[0]
        if inspect.isroutine(function) and not name.startswith("_") and offered:
            yield name, function


def _names(module: ModuleType, functions: dict[str, Any], extras: Collection[str]) -> Row:
    what, known = "every public function is one of the contract", _contract()
    unknown = [name for name in functions if name not in known and name not in extras]
    if not unknown and not any(name in known for name in functions):
        where = "__all__"
        if not hasattr(module, "__all__"):
            package = module.__name__.partition(".")[0]
            where = f"what is made in {package!r}; name functions made elsewhere in __all__"
        wanted = ", ".join(list(known)[:3])
        detail = f"no function of linattn.typing.Backend, such as {wanted}, is in {where}"
        return Row("names", what, FAILED, detail)
    if not unknown:
        return Row("names", what, PASSED, f"{len(functions)} functions of {len(known)}")
    lines = []
    for name in unknown:
        close = get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]}?" if close else "; name it in extras if it is meant"
        lines.append(f"{name} is no function of linattn.typing.Backend{hint}")
    return Row("names", what, FAILED, ". ".join(lines))


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Say how the parameters of a function differ from the contract's; empty for not at all."""
    wanted = list(_contract()[name].parameters.values())
    got = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in got[: len(wanted)]]
    if names != [parameter.name for parameter in wanted]:
        return f"has the parameters {', '.join(names)}, want {', '.join(p.name for p in wanted)}"
    empty = inspect.Parameter.empty
    for ours, theirs in zip(got, wanted, strict=False):
        if theirs.default is not empty and ours.default is empty:
            return f"needs {ours.name}, which must have the default {theirs.default}"
    extra = [parameter.name for parameter in got[len(wanted) :] if parameter.default is empty]
    return f"needs {', '.join(extra)}, which the driver does not pass" if extra else ""


# Block functions --------------------------------------------------------------------------------


def _to_library(array: NDArray[Any], dtype: str, xp: ModuleType) -> Array:
    return xp.asarray(array.astype(dtype) if array.dtype.kind == "f" else array)


def _compare(
    function: Callable[..., Any], name: str, block: Block, dtype: str, xp: ModuleType
) -> Any:
    """Compare one result with the generic one; the answer where that is declined, or None."""
    arguments = cast(block.arguments[name], lambda array: _to_library(array, dtype, xp))
    before = cast(arguments, to_host)
    result = function(*arguments)
    if name in PLACES and arguments[-1] is not None:
        result = arguments[-1] if result is None else result
        arguments = arguments[:-1]
    for ours, theirs in zip(leaves(arguments), leaves(before), strict=False):
        same = np.array_equal(to_host(ours), theirs, equal_nan=True)
        need(same, f"changes an argument of shape {tuple(ours.shape)} in place")
    if _dispatch.is_declined(result):
        if isinstance(result, Declined) and result.by_head:
            heads = arguments[5].kvz.shape[:-2] if name in SCANS else ()
            need(np.prod(heads) > 1, "declines by head what has one head, or no causal block")
        return result
    names = RESULTS[name]
    results = (result,) if len(names) == 1 else result
    need(
        isinstance(results, tuple) and len(results) == len(names),
        f"returns {type(result).__name__}, want {', '.join(names)}",
    )
    rejected = _rejected(name, results, arguments)
    for what, part in zip(names, results, strict=True):
        for array in leaves(part):
            kind = str(array.dtype).rpartition(".")[2]
            need(what == "choice" or kind == dtype, f"returns a {what} in {kind}, want {dtype}")
    wanted = REFERENCES[name](*before[: len(arguments)])
    wanted = (wanted,) if len(names) == 1 else wanted
    answers: Any = zip(names, cast(results, to_host), wanted, strict=True)
    for what, got, want in answers:
        options: dict[str, Any] = {}
        if what == "partial" and name in ("read_block", "sequences_block", *SCANS):
            options["want_log"] = arguments[-1]
        if what == "partial" and rejected is not None:
            got, want = _without(got, rejected), _without(want, rejected)
        if "gradient" in what:
            options["lead"] = _lead(what, before)
        KINDS[what](what, got, want, RTOL[dtype], **options)
    return None


def _rejected(name: str, results: Any, arguments: tuple[Any, ...]) -> NDArray[Any] | None:
    """Rows of a causal block that the driver would do again."""
    if name not in SCANS or not isinstance(results[0], Partial) or results[0].accepted:
        return None
    key, state = arguments[3], arguments[5]
    m = state.kvz.shape[-2]
    rows = rejected_rows(results[0], key.log_weight, arguments[4], state, m)
    return None if rows is None else to_host(rows)


def _without(part: Partial, rows: NDArray[Any]) -> Partial:
    return Partial(np.where(rows, 0.0, part.num_den), np.where(rows, 0.0, part.log))


def _lead(what: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Leading axes of what a gradient is of; more of the gradient are summed by the driver."""
    tokens = [index for index, part in enumerate(arguments) if isinstance(part, Tokens)]
    if what == "gradient of [v, 1]":
        array = arguments[tokens[-1] + 1]
    else:
        array = arguments[tokens[0 if what == "query gradient" else -1]].x
    return tuple(array.shape[:-2])
