"""Names of maps and methods, for ``--list`` and for the shell. Imports what it lists only then."""

from __future__ import annotations

__all__ = ["complete_map", "complete_method", "list_maps", "list_methods"]


def list_methods() -> str:
    """Return what each method of ``linattn compare`` is, a line each."""
    from linattn.cli.methods import METHODS
    from linattn.cli.published import PUBLISHED

    return "\n".join(f"{method.name:18} {method.about}" for method in (*METHODS, *PUBLISHED))


def list_maps() -> str:
    """Return the names of the maps that can be made by name, a line each."""
    from linattn.cli.maps import map_names

    return "\n".join(map_names())


def complete_method(incomplete: str) -> list[str]:
    """Return how a list of names may go on; the shell takes what begins as the list does."""
    given = incomplete.rpartition(",")
    return ["".join([*given[:2], line.split()[0]]) for line in list_methods().splitlines()]


def complete_map() -> list[str]:
    """Return the names that ``--map`` and ``linattn verify`` know."""
    from linattn.cli.maps import NAMES

    return [*list_maps().splitlines(), *NAMES, "exact"]
