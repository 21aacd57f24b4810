"""The names, signatures and docstrings that users rely on."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import linattn
import linattn_numpy

# One public name a line: a reader of this file sees the whole interface, and so does a review.
SIGNATURES = {
    name: f"({rest}"
    for line in (Path(__file__).parent / "signatures.txt").read_text(encoding="utf-8").splitlines()
    for name, _, rest in [line.partition("(")]
}

MAP_METHODS = {
    "query_features": "(self, x)",
    "key_features": "(self, x)",
    "kernel": "(self, x, y)",
    "estimate": "(self, x, y)",
    "variance": "(self, x, y)",
}
RANDOM_METHODS = {"redraw": "(self, rng=None)"}
RANDOM_MAPS = [
    "PositiveFeatures",
    "HyperbolicFeatures",
    "TrigonometricFeatures",
    "ActivationFeatures",
]
DETERMINISTIC_MAPS = ["EluFeatures", "ReluFeatures"]


def is_public(name: str) -> bool:
    # The command's interface is its command line: the modules behind `main` are its own affair.
    # Those of frameworks are in test_interop.py, with what they need.
    return not name.startswith(("linattn.cli.", "linattn.interop.")) and "._" not in name


def public_modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(linattn.__path__, "linattn.")]
    submodules = [importlib.import_module(name) for name in names if is_public(name)]
    return [linattn, linattn_numpy, *submodules]


def resolve(path: str) -> object:
    found: object = linattn
    for name in path.split("."):
        found = getattr(found, name)
    return found


def signature(function: object) -> str:
    bare = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))


def written_docstring(thing: object) -> str:
    """Return the docstring that somebody wrote: not inherited, not made by a decorator."""
    text = vars(thing).get("__doc__") if isinstance(thing, type) else inspect.getdoc(thing)
    made = isinstance(thing, type) and (text or "").startswith(f"{thing.__name__}(")
    return "" if made else text or ""


@pytest.fixture(params=public_modules(), ids=lambda module: module.__name__)
def module(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def test_public_modules_are_the_designed_ones():
    names = {module.__name__ for module in public_modules()}
    assert names >= {
        "linattn",
        "linattn.baselines",
        "linattn.functional",
        "linattn.cli",
        "linattn.datasets",
        "linattn.diagnostics",
        "linattn.diagnostics.costs",
        "linattn.diagnostics.outputs",
        "linattn.diagnostics.variance",
        "linattn.diagnostics.weights",
        "linattn.feature_maps",
        "linattn.feature_maps.elementwise",
        "linattn.feature_maps.exponential",
        "linattn.feature_maps.trigonometric",
        "linattn.kernels",
        "linattn.layers",
        "linattn.positions",
        "linattn.reference",
        "linattn.sampling",
        "linattn.sklearn",
        "linattn.state",
        "linattn.stream",
        "linattn.typing",
    }


def test_all_names_exist_once(module):
    names = module.__all__
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(names) == len(set(names))


def test_all_holds_what_the_module_defines_in_public(module):
    defined = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and thing.__module__ == module.__name__
    }
    assert defined - set(module.__all__) == set()


def test_public_names_are_documented(module):
    assert written_docstring(module)
    things = {name: getattr(module, name) for name in module.__all__}
    documentable = {
        name: thing
        for name, thing in things.items()
        if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)
    }
    assert [name for name, thing in documentable.items() if not written_docstring(thing)] == []


def test_public_methods_are_documented(module):
    undocumented = [
        f"{owner.__name__}.{name}"
        for owner in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(owner) and owner.__module__ == module.__name__
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and not inspect.getdoc(member)
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature_is_the_designed_one(path):
    assert signature(resolve(path)) == SIGNATURES[path]


@pytest.mark.parametrize("path", SIGNATURES)
def test_designed_name_is_exported(path):
    parent, _, name = f"linattn.{path}".rpartition(".")
    owner = linattn if parent == "linattn" else resolve(parent.removeprefix("linattn."))
    assert name in (owner.__all__ if inspect.ismodule(owner) else vars(owner))


def test_top_level_exports_its_modules_and_version():
    wanted = {"datasets", "diagnostics", "feature_maps", "reference", "sampling", "__version__"}
    assert wanted - set(linattn.__all__) == set()


def test_version_is_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", linattn.__version__)


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_random_map_has_the_designed_members(name):
    check_members(name, getattr(linattn.feature_maps, name)(4, rng=0), MAP_METHODS | RANDOM_METHODS)


@pytest.mark.parametrize("name", DETERMINISTIC_MAPS)
def test_deterministic_map_has_the_designed_members(name):
    check_members(name, getattr(linattn.feature_maps, name)(), MAP_METHODS)


def check_members(name, feature_map, methods):
    assert name in linattn.feature_maps.__all__
    assert {name: signature(getattr(type(feature_map), name)) for name in methods} == methods
    attributes = ["dim", "num_features", "scale", "positive", "unbiased", "causal"]
    assert [name for name in attributes if not hasattr(feature_map, name)] == []


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_random_map_comes_back_from_its_projection(name):
    cls = getattr(linattn.feature_maps, name)
    first, *others = inspect.signature(cls.from_projection).parameters.values()
    assert first.name == "projection"
    assert {parameter.kind for parameter in others} <= {inspect.Parameter.KEYWORD_ONLY}
    feature_map = cls(4, rng=0)
    assert cls.from_projection(feature_map.projection) == feature_map
    assert cls.from_projection(feature_map.projection + 1) != feature_map


def test_samplers_are_found_by_name():
    samplers = linattn.sampling.SAMPLERS
    assert samplers["gaussian"] is linattn.sampling.gaussian
    assert samplers["orthogonal"] is linattn.sampling.orthogonal


def test_state_fields_keep_their_order():
    names = ("kvz", "log_scale", "length", "fingerprint", "log_decay", "num_sequences")
    assert linattn.State._fields == (*names,)
    assert linattn.State(None, None, 0) == (None, None, 0, None, None, None)
    assert isinstance(linattn.State.kv, property)
    assert isinstance(linattn.State.z, property)
