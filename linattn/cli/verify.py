"""Run the verification kit on a map by its name, and show what it found."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from linattn import feature_maps
from linattn.cli.errors import CommandError

if TYPE_CHECKING:
    from linattn.testing import Report

__all__ = ["Choice", "find_map", "num_checks", "report_table", "verify"]


@dataclass(frozen=True)
class Choice:
    """How a shipped map is made.

    Attributes
    ----------
    dim : int
        Of queries and keys.
    num_features : int or None
        Columns; None for the map's own default.
    sampler : str or None
        Name in :data:`linattn.sampling.SAMPLERS`; None for the map's own default.
    seed : int
        Of its first draw.
    """

    dim: int
    num_features: int | None
    sampler: str | None
    seed: int

    def __post_init__(self) -> None:
        """Check what the options' types do not say."""
        if self.seed < 0:
            message = f"--seed: want a whole number >= 0, got {self.seed}"
            raise CommandError(message)


def find_map(target: str, choice: Choice) -> Any:
    """Return the map or factory of that name.

    Raises
    ------
    CommandError
        No such map, module or object, or one that cannot be made from the choice.
    """
    found = _user_object(target) if ":" in target else _shipped_map(target, choice)
    if inspect.isclass(found) or not (callable(found) or hasattr(found, "query_features")):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        message = (
            f"{target}: want a feature map, or a function factory(rng) that makes one; is {kind}"
        )
        raise CommandError(message)
    return found


def _shipped_map(name: str, choice: Choice) -> Any:
    names = [known for known in feature_maps.__all__ if not inspect.isabstract(_class(known))]
    names = [known for known in names if inspect.isclass(_class(known))]
    if name not in names:
        message = (
            f"want one of {', '.join(sorted(names))}, or module:object for a map of your own, "
            f"got {name}"
        )
        raise CommandError(message)
    cls = _class(name)
    parameters = inspect.signature(cls).parameters
    given: dict[str, Any] = {"dim": choice.dim, "num_features": choice.num_features}
    given |= {"sampler": choice.sampler, "rng": choice.seed}
    for option in ("num_features", "sampler"):
        if given[option] is not None and option not in parameters:
            message = f"--{option.replace('_', '-')}: {name} has no such parameter"
            raise CommandError(message)
    arguments = {
        key: value for key, value in given.items() if key in parameters and value is not None
    }
    try:
        if _missing(cls, arguments) and hasattr(cls, "fit"):
            del arguments["dim"]
            return cls.fit(*_sample(choice), **arguments)
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        message = (
            f"{name} cannot be made from these options: {error}; write it into a module and give "
            f"module:object"
        )
        raise CommandError(message) from None


def _class(name: str) -> Any:
    return getattr(feature_maps, name)


def _missing(cls: Any, arguments: dict[str, Any]) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    return any(p.default is p.empty and p.name not in arguments for p in parameters)


def _sample(choice: Choice) -> tuple[Any, Any]:
    rng = np.random.default_rng(choice.seed)
    return rng.standard_normal((64, choice.dim)), rng.standard_normal((64, choice.dim))


def _user_object(target: str) -> Any:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        message = f"want module:object, got {target}"
        raise CommandError(message)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything when it is imported
        message = f"{target}: importing {module_name} fails: {type(error).__name__}: {error}"
        raise CommandError(message) from None
    for name in path.split("."):
        if not hasattr(found, name):
            message = f"{target}: {name} is not in {getattr(found, '__name__', found)}"
            raise CommandError(message)
        found = getattr(found, name)
    return found


def _kit() -> Any:
    if find_spec("hypothesis") is None:
        message = "verify needs hypothesis: pip install 'linattn[testing]'"
        raise CommandError(message)
    return importlib.import_module("linattn.testing.check")


def num_checks() -> int:
    """Return how many steps a run announces.

    Raises
    ------
    CommandError
        The extra ``testing`` is not installed.
    """
    return len(_kit().CHECKS)


def verify(found: Any, *, num_draws: int, seed: int, notify: Callable[[str], None]) -> Report:
    """Run every check that applies.

    Raises
    ------
    CommandError
        No draws; the object is no map and makes none.
    """
    if num_draws < 1:
        message = f"--draws: want a whole number >= 1, got {num_draws}"
        raise CommandError(message)
    try:
        report: Report = _kit().check_feature_map(
            found, num_draws=num_draws, rng=seed, on_fail="return", notify=notify
        )
    except TypeError as error:
        raise CommandError(str(error)) from None
    return report


def report_table(report: Report) -> Table:
    """Return the report as a table of 80 columns."""
    title = " ".join(report.title.split())
    table = Table(
        title=Text(title if len(title) <= 160 else f"{title[:157]}..."),
        title_justify="left",
        caption=Text(report.summary),
        caption_justify="left",
        width=80,
    )
    table.add_column("check")
    table.add_column("shows that", ratio=2)
    table.add_column("result")
    table.add_column("detail", ratio=3, overflow="fold")
    styles = {"FAILED": "bold red", "skipped": "dim"}
    for row in report.rows:
        table.add_row(
            Text(row.check), Text(row.what), Text(row.result), Text(row.detail),
            style=styles.get(row.result, ""),
        )  # fmt: skip
    return table
