"""Feature maps by their names, or out of a module of the user's."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linattn import feature_maps
from linattn.cli.errors import CommandError
from linattn.cli.text import find_name

__all__ = ["NAMES", "Choice", "find_map", "is_map", "map_names"]

NAMES = {
    "favor+": "PositiveFeatures",
    "hyperbolic": "HyperbolicFeatures",
    "trigonometric": "TrigonometricFeatures",
    "relu-performer": "ActivationFeatures",
    "elu+1": "EluFeatures",
    "relu": "ReluFeatures",
    "landmarks": "LandmarkFeatures",
}
"""Names that ``linattn compare`` gives to maps."""


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
    sample : callable or None
        Returns what a map is fitted to, by the names of arguments; None for random numbers.
    also : tuple of str
        Names beside those of maps that the command takes.
    """

    dim: int
    num_features: int | None
    sampler: str | None
    seed: int
    sample: Callable[[], dict[str, Any]] | None = None
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what the options' types do not say."""
        if self.seed < 0:
            raise CommandError(f"--seed: want a whole number >= 0, got {self.seed}")


def is_map(found: Any) -> bool:
    """Whether an object has what makes a feature map."""
    return hasattr(found, "query_features") and hasattr(found, "key_features")


def map_names() -> list[str]:
    """Return the maps that can be made by their name."""
    classes = {name: getattr(feature_maps, name) for name in feature_maps.__all__}
    return sorted(
        name
        for name, cls in classes.items()
        if inspect.isclass(cls) and not inspect.isabstract(cls) and _maker(cls) is not None
    )


def _maker(cls: Any) -> Callable[..., Any] | None:
    """Return what makes a map from a choice, or from a choice and a sample; None for neither."""
    if not _required(cls) - {"dim"}:
        return cls  # type: ignore[no-any-return]
    fit = getattr(cls, "fit", None)
    return fit if fit is not None and _required(fit) == {"query", "key"} else None


def _required(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty}


def find_map(target: str, choice: Choice, *, show_traceback: bool = False) -> Any:
    """Return the map or factory of that name.

    Raises
    ------
    CommandError
        No such map, module or object, or one that cannot be made from the choice.
    """
    found = _user_object(target, show_traceback) if ":" in target else _shipped_map(target, choice)
    if inspect.isclass(found) or not (callable(found) or is_map(found)):
        kind = "a class" if inspect.isclass(found) else f"of type {type(found).__name__}"
        raise CommandError(
            f"{target}: want a feature map, or a function factory(rng) that makes one; is {kind}"
        )
    return found


def _shipped_map(name: str, choice: Choice) -> Any:
    known = {each: each for each in (*map_names(), *choice.also)} | NAMES
    try:
        name = find_name(name, known)
    except ValueError as error:
        needs_more = name in feature_maps.__all__
        got = f"{name}, which needs more than these options" if needs_more else error
        raise CommandError(
            f"want one of {', '.join(known)}, or module:object for a map of your own, got {got}"
        ) from None
    make: Any = _maker(getattr(feature_maps, name))
    parameters = inspect.signature(make).parameters
    given: dict[str, Any] = {"dim": choice.dim, "num_features": choice.num_features}
    given |= {"sampler": choice.sampler, "rng": choice.seed}
    for option in ("num_features", "sampler"):
        if given[option] is not None and option not in parameters:
            raise CommandError(f"--{option.replace('_', '-')}: {name} has no such parameter")
    if "query" in parameters:
        given |= (choice.sample or partial(_noise, choice))()
    arguments = {
        key: value for key, value in given.items() if key in parameters and value is not None
    }
    try:
        return make(**arguments)
    except (ImportError, TypeError, ValueError) as error:
        raise CommandError(f"{name} cannot be made from these options: {error}") from None


def _noise(choice: Choice) -> dict[str, Any]:
    query, key = np.random.default_rng(choice.seed).standard_normal((2, 64, choice.dim))
    return {"query": query, "key": key}


def _user_object(target: str, show_traceback: bool) -> Any:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise CommandError(f"want module:object, got {target}")
    here = str(Path.cwd())
    if here not in sys.path:
        # Last: a file here must not take the place of what the command itself imports.
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        if show_traceback:
            traceback.print_exception(error)
        raise CommandError(
            f"{target}: importing {module_name} fails: {type(error).__name__}: {error}"
        ) from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise CommandError(f"{target}: {name} is not in {getattr(found, '__name__', found)}")
        found = getattr(found, name)
    return found
