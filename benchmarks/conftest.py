"""What ``pytest benchmarks`` needs beyond the settings of the tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--long``."""
    parser.addoption("--long", action="store_true", help="time 16,384 tokens and more as well")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Time one thing at a time, whatever the tests do."""
    return 0


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of long calls."""
    config.addinivalue_line("markers", "long: 16,384 tokens and more; needs --long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long calls out unless they are asked for."""
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long") is not None]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
