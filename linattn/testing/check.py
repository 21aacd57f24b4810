"""Everything the kit can say of a feature map, as one table."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import Any, TypeVar

import numpy as np

import linattn
from linattn import _arrays
from linattn.diagnostics import denominators
from linattn.feature_maps import BaseFeatureMap
from linattn.sampling import Seed, as_generator
from linattn.testing._attention_cases import LENGTHS
from linattn.testing._draws import (
    MapOrFactory,
    MapSource,
    checked_features,
    feature_products,
    has_positions,
    lead_axes,
    need_one_denominator,
    need_pair_kernel,
    width,
)
from linattn.testing._evidence import (
    CheckFailedError,
    Evidence,
    MalformedFeaturesError,
    UntestableError,
    assert_close,
    fail,
    on_host,
)
from linattn.testing._feature_rows import rows_of_their_own
from linattn.testing.arrays import (
    assert_inputs_unchanged,
    assert_namespace_preserved,
    assert_picklable,
)
from linattn.testing.attention import (
    assert_batch_independent,
    assert_causal,
    assert_mask_is_slice,
    assert_merge_associative,
    assert_normalized,
    assert_permutation_invariant,
    assert_streaming,
)
from linattn.testing.estimates import Claim, assert_mean, assert_unbiased, assert_variance

__all__ = ["CHECKS", "Report", "Row", "check_feature_map", "check_on_fail", "outcome", "row_of"]

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"

KURTOSIS = 25.0
"""Assumed where no variance is known: what one positive feature has at the default pairs."""

SIZES_OF_SIGNS = (0.1, 0.5, 3.0, 10.0)
"""Standard deviations of the tokens whose features and denominators may be negative."""

MAX_BIAS_IN_SD = 0.5
"""Of a mean that counts as checked: larger biases, in standard deviations of a draw, are seen."""


@dataclass(frozen=True)
class Row:
    """One check of a report.

    Attributes
    ----------
    check : str
        Its name, for ``skip=``.
    what : str
        The claim that is checked.
    result : {"passed", "FAILED", "skipped"}
        Outcome.
    detail : str
        What was compared, what went wrong, or why there was nothing to check.
    false_alarm_rate : float
        Probability of "FAILED" although all is right.
    """

    check: str
    what: str
    result: str
    detail: str
    false_alarm_rate: float = 0.0


@dataclass(frozen=True)
class Report:
    """What :func:`check_feature_map` found; printed, it is a table of 80 columns.

    Attributes
    ----------
    title : str
        The map.
    rows : tuple of Row
        In the order of :data:`CHECKS`.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import check_feature_map
    >>> report = check_feature_map(EluFeatures())
    >>> report.passed, len(report.rows) > 5
    (True, True)
    """

    title: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; what was skipped does not count."""
        return all(row.result != FAILED for row in self.rows)

    @property
    def mean_checked(self) -> bool:
        """Whether the mean was compared with the kernel, so that a biased map would have failed."""
        return any(row.check == "mean" and row.result != SKIPPED for row in self.rows)

    @property
    def false_alarm_rate(self) -> float:
        """Probability that a right map fails: the sum over its rows."""
        return sum(row.false_alarm_rate for row in self.rows)

    @property
    def counts(self) -> str:
        """How many checks passed, failed and were skipped."""
        ends = [row.result for row in self.rows]
        return ", ".join(f"{ends.count(end)} {end}" for end in (PASSED, FAILED, SKIPPED))

    @property
    def idle(self) -> str:
        """Names of the checks that were skipped."""
        return ", ".join(row.check for row in self.rows if row.result == SKIPPED)

    @property
    def summary(self) -> str:
        """One sentence: how many checks ended how, and the false-alarm rate."""
        rate = f"{self.false_alarm_rate:.1g}"
        return f"{self.counts}; a right map fails with probability at most {rate}."

    @property
    def reservation(self) -> str:
        """What failures say nothing of, or no failures leave open: a sentence, empty for none."""
        if self.mean_checked:
            passed = any(row.check == "mean" and row.result == PASSED for row in self.rows)
            return "The mean passed: no bias was found." if passed and not self.passed else ""
        return "The mean was not checked: whether the map is biased is not known."

    def __str__(self) -> str:
        """Table of 80 columns at most."""
        name, result = (
            max(len(getattr(row, key)) for row in self.rows) for key in ("check", "result")
        )
        indent = " " * (name + result + 4)
        lines = textwrap.wrap(textwrap.shorten(self.title, 240), 80)
        for row in self.rows:
            first = f"{row.check:<{name}}  {row.result:<{result}}  "
            lines += textwrap.wrap(
                row.detail, 80, initial_indent=first, subsequent_indent=indent
            ) or [first.rstrip()]
        lines += textwrap.wrap(self.summary, 80)
        return "\n".join([*lines, self.reservation] if self.reservation else lines)


@dataclass
class _Subject:
    """The map under test, and how to test it."""

    source: Any
    feature_map: Any
    statistics: dict[str, Any]
    kernel: Claim | None
    variance: Claim | None
    why_not_random: str
    length: int | Sequence[int]
    is_malformed: bool = False

    @property
    def dim(self) -> int:
        return getattr(self.feature_map, "dim", None) or 4

    def tokens(self, count: int = 3, length: int = 9) -> tuple[Any, ...]:
        """Return ``count`` arrays of tokens, with the heads of the map."""
        shape = (2, *lead_axes(self.feature_map, self.dim), length, self.dim)
        rng = np.random.default_rng(5)
        return tuple(0.5 * rng.standard_normal(shape) for _ in range(count))

    def attend(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return linattn.linear_attention(query, key, value, self.feature_map, **options)

    def rejection_of_nan(self) -> str:
        """Say that the map raises an error for NaN, which is an answer; empty if it does not."""
        x = np.full_like(self.tokens(1)[0], np.nan)
        try:
            self.feature_map.query_features(x)
            self.feature_map.key_features(x)
        except Exception as error:  # whatever a user's map raises
            return f"; the map rejects NaN: {type(error).__name__}"
        return ""

    def need_source(self) -> None:
        if self.source is None:
            raise UntestableError(self.why_not_random)

    def need_random(self) -> None:
        self.need_source()
        if not MapSource(self.source, 0).is_random:
            raise UntestableError("the map is deterministic")

    def need_causal(self) -> None:
        if not getattr(self.feature_map, "causal", True):
            raise UntestableError("the map has seen the whole sequence (causal is False)")

    def need_no_positions(self) -> None:
        if has_positions(self.feature_map, self.dim):
            raise UntestableError("features depend on the position")


def _features(subject: _Subject) -> Evidence:
    check = "features"
    x, y = subject.tokens(2)
    products = feature_products(subject.feature_map, x, y)
    if not np.all(np.isfinite(products)):
        fail(check, "features of moderate vectors are not finite")
    m = width(checked_features(subject.feature_map, "query_features", x))
    wanted = subject.feature_map.num_features
    if wanted is not None and m != wanted:
        fail(check, f"want num_features = {wanted} columns, got {m}")
    estimate = getattr(subject.feature_map, "estimate", None)
    if estimate is not None and _has_pair_kernel(subject.feature_map):
        assert_close(check, "estimate(x, y) against features", estimate(x, y), products, 1e-9)
    return Evidence(check, f"{m} columns, finite; {rows_of_their_own(subject)}")


def _signs(subject: _Subject) -> Evidence:
    """Look for negative features and denominators, of small, moderate and large tokens."""
    feature_map, check = subject.feature_map, "signs"
    stated = getattr(feature_map, "positive", None)
    is_signed, shares = False, []
    for size in SIZES_OF_SIGNS:
        query, key = (size / 0.5 * array for array in subject.tokens(2))
        for side, x in (("query_features", query), ("key_features", key)):
            values = checked_features(feature_map, side, x).values
            least = 0.0 if values is None else float(np.nanmin(on_host(values), initial=0.0))
            is_signed = is_signed or least < 0
            if stated and least < 0:
                message = (
                    f"declared wrongly: positive is {stated!r}, and a feature of {side} is "
                    f"{least:.3g} for tokens of size {size:g}; set positive = False"
                )
                fail(check, message)
        shares.append(float(np.max(denominators(query, key, feature_map).negative)))
    if stated:
        return Evidence(check, "positive")
    worst = max(shares)
    may_cancel = is_signed or worst > 0
    advice = "" if stated is not None else f"; undeclared: set positive = {not may_cancel}"
    if not may_cancel:
        return Evidence(check, f"no feature is negative here{advice}")
    size = SIZES_OF_SIGNS[shares.index(worst)]
    seen = f"{worst:.0%} are negative for tokens of size {size:g}" if worst else "here none is"
    return Evidence(check, f"signed: denominators may cancel; {seen}{advice}")


def _has_pair_kernel(feature_map: Any) -> bool:
    try:
        need_pair_kernel(feature_map)
    except UntestableError:
        return False
    return True


def _mean(subject: _Subject) -> Evidence:
    subject.need_source()
    unbiased = getattr(subject.feature_map, "unbiased", True) or subject.kernel is not None
    claims = {"variance": subject.variance, "kurtosis": KURTOSIS, **subject.statistics}
    if unbiased:
        evidence = assert_unbiased(subject.source, kernel=subject.kernel, **claims)
    else:
        evidence = assert_mean(subject.source, **claims)
        evidence = replace(evidence, detail=f"biased as it says; {evidence.detail}")
    if evidence.detectable_sd > MAX_BIAS_IN_SD:
        raise UntestableError(
            f"num_draws is too small: a bias of {evidence.detectable_sd:.2g} standard deviations "
            f"of one draw could pass, want at most {MAX_BIAS_IN_SD:g}; "
            f"{_enough(subject, evidence)}"
        )
    return evidence


def _enough(subject: _Subject, evidence: Evidence) -> str:
    """Say how many draws would do: biases that are seen shrink as their square root."""
    if not np.isfinite(evidence.detectable_sd):
        return "the draws do not differ where the stated variance says that they do"
    wanted = (evidence.detectable_sd / MAX_BIAS_IN_SD) ** 2 * subject.statistics["num_draws"]
    return f"want num_draws of about {100 * ceil(wanted / 100):,}"


def _variance(subject: _Subject) -> Evidence:
    subject.need_random()
    return assert_variance(
        subject.source, mean=subject.kernel, variance=subject.variance, **subject.statistics
    )


def _redraw(subject: _Subject) -> Evidence:
    subject.need_random()
    x, y = subject.tokens(2)

    def drawn(seed: int) -> Any:
        return feature_products(MapSource(subject.source, seed).draw(), x, y)

    first = drawn(0)
    if not np.array_equal(first, drawn(0)):
        fail("redraw", "one seed gave two maps: something random does not come from rng")
    # Many, because a map of a few bits (the sign of one row) may come twice.
    if all(np.array_equal(first, drawn(seed)) for seed in range(1, 65)):
        fail("redraw", "65 seeds gave one map")
    return Evidence("redraw", "one seed, one map; another seed, another map")


def _namespace(subject: _Subject) -> Evidence:
    tokens = subject.tokens()
    names = []
    for dtype in (np.float64, np.float32, np.float16):
        arrays = [array.astype(dtype) for array in tokens]
        assert_namespace_preserved(subject.attend, *arrays)
        if dtype is not np.float16 and _is_ours(subject.feature_map):
            assert_namespace_preserved(subject.feature_map.query_features, arrays[0])
            assert_namespace_preserved(subject.feature_map.key_features, arrays[1])
        names.append(f"{np.dtype(dtype)}")
    if find_spec("array_api_strict") is not None:
        strict = import_module("array_api_strict")
        try:
            assert_namespace_preserved(subject.attend, *(strict.asarray(a) for a in tokens))
        except Exception as error:
            if isinstance(error, AssertionError) or _is_ours(subject.feature_map):
                raise
            raise UntestableError(
                f"out as in: NumPy's {', '.join(names)}; the map does not take arrays of "
                f"array-api-strict: {type(error).__name__}: {error}"
            ) from error
        names.append("array-api-strict")
    return Evidence("namespace", f"out as in: {', '.join(names)}")


def _is_ours(feature_map: Any) -> bool:
    return isinstance(feature_map, BaseFeatureMap)


def _batch(subject: _Subject) -> Evidence:
    rejection = subject.rejection_of_nan()
    garbage = (30.0,) if rejection else (30.0, np.nan)
    options: Any = {"garbage": garbage, "length": subject.length}
    evidence = assert_batch_independent(subject.feature_map, **options)
    if getattr(subject.feature_map, "causal", True):
        assert_batch_independent(subject.feature_map, is_causal=True, **options)
    return replace(evidence, detail=f"{evidence.detail}{rejection}")


def _causal(subject: _Subject) -> Evidence:
    subject.need_causal()
    return assert_causal(subject.feature_map, length=subject.length)


def _streaming(subject: _Subject) -> Evidence:
    subject.need_causal()
    return assert_streaming(subject.feature_map, length=subject.length)


def _mask(subject: _Subject) -> Evidence:
    if getattr(subject.feature_map, "causal", True):
        assert_mask_is_slice(subject.feature_map, is_causal=True, length=subject.length)
    return assert_mask_is_slice(subject.feature_map, length=subject.length)


def _merge(subject: _Subject) -> Evidence:
    subject.need_no_positions()
    return assert_merge_associative(subject.feature_map)


def _permutation(subject: _Subject) -> Evidence:
    subject.need_no_positions()
    return assert_permutation_invariant(subject.feature_map, length=subject.length)


def _normalized(subject: _Subject) -> Evidence:
    need_one_denominator(subject.feature_map)
    return assert_normalized(subject.feature_map, length=subject.length)


def _inputs(subject: _Subject) -> Evidence:
    return assert_inputs_unchanged(subject.attend, *subject.tokens())


def _pickle(subject: _Subject) -> Evidence:
    if "<locals>" in type(subject.feature_map).__qualname__:
        raise UntestableError(
            "the class of the map is made inside a function, where pickle finds none"
        )
    return assert_picklable(subject.feature_map)


CHECKS: dict[str, tuple[str, Callable[[_Subject], Evidence]]] = {
    "features": ("features are finite, as many as num_features", _features),
    "signs": ("signs are the ones stated", _signs),
    "mean": ("the mean of estimates is the kernel", _mean),
    "variance": ("their variance is the one claimed", _variance),
    "redraw": ("one seed gives one map", _redraw),
    "causal": ("later tokens change no earlier output", _causal),
    "streaming": ("step == chunk == whole", _streaming),
    "mask": ("masked keys count as cut out", _mask),
    "merge": ("states merge in any order", _merge),
    "permutation": ("the order of keys does not matter", _permutation),
    "batch": ("elements of a batch do not meet", _batch),
    "normalized": ("weights sum to 1", _normalized),
    "namespace": ("library, dtype and device out as in", _namespace),
    "inputs": ("inputs are left alone", _inputs),
    "pickle": ("pickles and copies", _pickle),
}
"""The checks by name: what each shows, and how."""


@_arrays.on_array_device
def check_feature_map(
    map_or_factory: MapOrFactory,
    *,
    kernel: Claim | None = None,
    variance: Claim | None = None,
    num_draws: int = 4000,
    false_alarm_rate: float = 1e-9,
    rng: Seed = 0,
    length: int | Sequence[int] = LENGTHS,
    skip: Collection[str] = (),
    on_fail: str = "raise",
    notify: Callable[[str], None] | None = None,
) -> Report:
    """Run every check that applies to a feature map, as scikit-learn's check_estimator does.

    Parameters
    ----------
    map_or_factory : feature map or callable
        A map that ``redraw(rng)`` draws again, a deterministic map, or ``factory(rng)``.
    kernel, variance : callable or array_like, optional
        Claimed mean and variance, as for :func:`assert_unbiased`. Default: the map's own ``kernel``
        (``mean`` for maps that say they are biased) and ``variance``. An unknown variance is
        measured, for a kurtosis of at most 25, and the row says so.
    num_draws : int, optional
        For mean and variance each. Default 4000.
    false_alarm_rate : float, optional
        For mean and variance each. Default 1e-9.
    rng : int, Generator, SeedSequence or None, optional
        Default 0. None for fresh draws.
    length : int or sequence of int, optional
        Tokens of the rows that chance does not decide. Default (33, 70, 333); 33 alone takes a
        tenth of their time.
    skip : collection of str, optional
        Names of :data:`CHECKS` to leave out.
    on_fail : {"raise", "return"}, optional
        Whether a failed check raises at the end, or is only in the report. Default "raise".
    notify : callable, optional
        Called with what a check shows before it runs: for a progress bar.

    Returns
    -------
    Report

    Raises
    ------
    CheckFailedError
        A check failed: an AssertionError, whose message is the whole table.
    TypeError
        Not a feature map or factory.
    ValueError
        An unknown name in ``skip``, another ``on_fail``.

    Notes
    -----
    Deterministic maps skip the statistical rows, and each row that does not apply says why. A check
    in which the map itself raises an error has failed. Where features are malformed, nothing else
    is tried.

    The mean counts as checked (``Report.mean_checked``) if a bias of half a standard deviation of
    one draw would have been found, by about 570 draws where the variance is known: orthogonal rows
    from a QR whose signs are not fixed have at least that.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import check_feature_map
    >>> check_feature_map(EluFeatures()).passed
    True
    """
    unknown = sorted(set(skip) - set(CHECKS))
    if unknown:
        raise ValueError(
            f"skip must name checks out of {', '.join(CHECKS)}, got {', '.join(unknown)}"
        )
    check_on_fail(on_fail)
    generator = as_generator(rng)
    statistics = {
        "num_draws": num_draws,
        "false_alarm_rate": false_alarm_rate,
        "rng": generator,
    }
    try:
        first = MapSource(map_or_factory, generator).first
        source, reason = map_or_factory, ""
    except UntestableError:
        first, source = map_or_factory, None
        reason = "the projection was given: want a sampler, or factory(rng)"
    subject = _Subject(source, first, statistics, kernel, variance, reason, length)
    rows: list[Row] = []
    for name, (what, run) in CHECKS.items():
        if notify is not None:
            notify(what)
        if subject.is_malformed:
            rows.append(Row(name, what, SKIPPED, "needs features that can be read"))
        else:
            rows.append(_row(name, what, run, subject, name in skip))
    return outcome(Report(repr(first), tuple(rows)), on_fail)


def check_on_fail(on_fail: str) -> None:
    """Refuse anything but "raise" and "return", before any work."""
    if on_fail not in ("raise", "return"):
        raise ValueError(f"on_fail must be 'raise' or 'return', got {on_fail!r}")


_R = TypeVar("_R", bound=Report)


def outcome(report: _R, on_fail: str) -> _R:
    """Return a report, or raise it if a check failed and that was asked for."""
    if on_fail == "raise" and not report.passed:
        raise CheckFailedError(report)
    return report


def _row(
    name: str,
    what: str,
    run: Callable[[_Subject], Evidence],
    subject: _Subject,
    is_skipped: bool,
) -> Row:
    if is_skipped:
        return Row(name, what, SKIPPED, "as asked")

    def checked() -> Evidence:
        with warnings.catch_warnings():
            # The inputs are made up here: no fitted map was fitted to them, and the signs of
            # denominators have a row of their own.
            for message in ("feature_map was fitted to other keys", ".* denominators are negative"):
                warnings.filterwarnings("ignore", message, UserWarning)
            try:
                return run(subject)
            except MalformedFeaturesError:
                subject.is_malformed = True
                raise

    row = row_of(name, what, checked)
    is_random = row.result == FAILED and name in ("mean", "variance")
    rate = subject.statistics["false_alarm_rate"] if is_random else row.false_alarm_rate
    return replace(row, false_alarm_rate=rate)


def row_of(name: str, what: str, check: Callable[[], Evidence]) -> Row:
    """Run one check, whatever it raises, and make a row of it."""
    try:
        evidence = check()
    except UntestableError as error:
        return Row(name, what, SKIPPED, str(error))
    except (AssertionError, MalformedFeaturesError) as error:
        return Row(name, what, FAILED, str(error))
    except Exception as error:  # whatever a user's code raises belongs into the report
        return Row(name, what, FAILED, f"raises {type(error).__name__}: {error}")
    return Row(name, what, PASSED, evidence.detail, evidence.false_alarm_rate)
