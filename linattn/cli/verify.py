"""Run the verification kit on a map by its name, and show the findings."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from linattn._extras import remedy
from linattn.cli.errors import CommandError, UserCodeError
from linattn.cli.maps import is_map

if TYPE_CHECKING:
    from linattn.testing import Report

__all__ = [
    "failures",
    "num_checks",
    "record",
    "report_table",
    "verify",
]


def _kit() -> Any:
    if find_spec("hypothesis") is None:
        raise CommandError(f"verify needs hypothesis: {remedy('testing')}")
    return importlib.import_module("linattn.testing.check")


def num_checks() -> int:
    """Return how many steps a run announces.

    Raises
    ------
    CommandError
        The extra ``testing`` is not installed.
    """
    return len(_kit().CHECKS)


def verify(
    found: Any,
    *,
    num_draws: int,
    seed: int,
    notify: Callable[[str], None],
    show_traceback: bool = False,
) -> Report:
    """Run every check that applies.

    Raises
    ------
    CommandError
        No draws; the object makes no map.
    UserCodeError
        The factory raises, or the map where no check reports it.
    """
    if num_draws < 1:
        raise CommandError(f"--draws: want a whole number >= 1, got {num_draws}")
    kit = _kit()

    def blame(error: Exception) -> UserCodeError:
        if show_traceback:
            traceback.print_exception(error)
        hint = "" if show_traceback else "; --traceback shows where"
        what = "the map" if source is found else "the factory"
        return UserCodeError(f"{what} raised {type(error).__name__}: {error}{hint}")

    def factory(rng: np.random.Generator) -> Any:
        try:
            return found(rng)
        except Exception as error:  # a user's factory may raise anything
            raise blame(error) from None

    source = found if is_map(found) else factory
    try:
        report: Report = kit.check_feature_map(
            source, num_draws=num_draws, rng=seed, on_fail="return", notify=notify
        )
    except TypeError as error:
        if source is factory:
            raise CommandError(str(error)) from None
        raise blame(error) from None
    except Exception as error:  # and so may a user's map
        raise blame(error) from None
    return report


def failures(report: Report) -> list[str]:
    """Return what went wrong in each check that failed."""
    return [f"{row.check}: {row.detail}" for row in report.rows if row.result == "FAILED"]


def record(report: Report) -> dict[str, Any]:
    """Return the report as dictionaries, lists and numbers."""
    return {
        **asdict(report),
        "passed": report.passed,
        "summary": report.summary,
        "reservation": report.reservation,
    }


def report_table(report: Report) -> Table:
    """Return the rows of the report as a table of 80 columns."""
    title = " ".join(report.title.split())
    table = Table(
        title=Text(title if len(title) <= 160 else f"{title[:157]}..."),
        title_justify="left",
        width=80,
    )
    table.add_column("check")
    table.add_column("shows that", ratio=2)
    table.add_column("result")
    table.add_column("detail", ratio=3, overflow="fold")
    styles = {"FAILED": "bold red", "skipped": "dim"}
    for row in report.rows:
        table.add_row(
            Text(row.check), Text(row.what), Text(row.result),
            Text("see below" if row.result == "FAILED" else row.detail),
            style=styles.get(row.result, ""),
        )  # fmt: skip
    return table
