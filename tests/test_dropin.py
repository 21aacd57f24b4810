"""`benchmarks/dropin.py --published`: layouts of the authors' packages; what is missing."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import numpy as np
import pytest

import linattn
from benchmarks import dropin


def stand_in(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_formulas_beside_landmarks():
    query, key, value = (x[0, :2, :64] for x in linattn.datasets.pretrained_qkv())
    calls = dropin.published_calls(query, key, value, 16)
    assert {"landmarks", "WildCat's formula", "Thinformer's formula"} <= set(calls)
    assert {call().shape for call in calls.values()} == {(2, 64, 32)}


def test_packages_that_are_missing_are_named(monkeypatch):
    pytest.importorskip("torch", reason="the packages need torch")
    monkeypatch.setitem(sys.modules, "thinformer", None)
    monkeypatch.setattr(dropin, "find_spec", lambda name: name if name == "torch" else None)
    assert dropin.missing("thinformer").startswith("thinformer: not installed; pip install git+")
    monkeypatch.undo()
    stand_in(monkeypatch, "wildcat")
    assert "another package of this name" in dropin.missing("wildcat")


@pytest.mark.frameworks
def test_layouts_of_the_packages(monkeypatch):
    """Stand-ins that are exact attention in the layouts of the packages' READMEs."""
    torch = pytest.importorskip("torch", reason="the packages need torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    asked = {}

    def wildcat(**options):
        asked["wildcat"] = options
        return attend

    def thinformer(**options):
        asked["thinformer"] = options
        return lambda *qkv: (attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2), None)

    stand_in(monkeypatch, "wildcat", WildCat=wildcat)
    stand_in(monkeypatch, "thinformer", ThinformerAttention=thinformer)
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 20, 8), dtype=np.float32)
    value = value[..., :5]
    exact = linattn.softmax_attention(query, key, value)
    calls = dropin.authors_calls(query, key, value, 16, 2)
    assert asked == {"wildcat": {"r": 16}, "thinformer": {"g": 2}}
    for call in calls.values():
        np.testing.assert_allclose(call(), exact, atol=1e-5)
