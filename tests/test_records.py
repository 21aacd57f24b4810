"""Public records print as one line: the verdict first, no numbers of arrays."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import linattn

MODULES = (
    "automatic",
    "coreset",
    "datasets",
    "diagnostics",
    "layers",
    "reference",
    "sampling",
    "typing",
)
NUMBERS = np.random.default_rng(0).standard_normal((24, 31, 5))


def records():
    """Record classes that the library exports, and that may hold arrays."""
    modules = [linattn, *(importlib.import_module(f"linattn.{name}") for name in MODULES)]
    exported = [getattr(module, name) for module in modules for name in module.__all__]
    found = {each for each in exported if inspect.isclass(each)}
    for each in sorted(found, key=lambda kind: str(kind.__name__)):
        names = getattr(each, "_fields", None)
        if dataclasses.is_dataclass(each):
            fields = dataclasses.fields(each)
            # A policy or a sampler has numbers and functions.
            if any("Array" in str(f.type) and "Callable" not in str(f.type) for f in fields):
                names = tuple(field.name for field in fields)
        if names:
            yield pytest.param(each, names, id=each.__name__)


def filled(kind: Any, values: dict[str, Any]) -> Any:
    record = kind._make(values.values()) if hasattr(kind, "_make") else object.__new__(kind)
    if not hasattr(kind, "_make"):
        for name, value in values.items():
            object.__setattr__(record, name, value)
    return record


@pytest.mark.parametrize(("kind", "names"), list(records()))
def test_is_shown_in_one_line(kind, names):
    special: dict[str, Any] = {
        "verdict": "use exact softmax attention",
        "cost": 0.42,
        "method": "landmarks",
        "head_methods": np.array(["exact", "landmarks"]),
    }
    record = filled(kind, {name: special.get(name, NUMBERS) for name in names})
    for text in (repr(record), str(record)):
        assert "\n" not in text
        assert text.startswith(f"{kind.__name__}(")
        assert len(text) < 60 + 40 * len(names)
        if "verdict" in names:
            assert text.startswith(f"{kind.__name__}(use exact softmax attention; ")


def test_real_ones():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 80, 8))
    _, report = linattn.attention(q, k, v, return_report=True)
    assert repr(report).startswith("AttentionReport(6 of 6 heads exact, error 0 <= bound 0, cost 1")
    phi = linattn.feature_maps.PositiveFeatures(8, num_features=64, rng=0)
    found = linattn.diagnostics.relative_variance(q, k, phi)
    assert repr(found).startswith(f"RelativeVariance({found.verdict}; mean=<float64 (2, 3)>")
