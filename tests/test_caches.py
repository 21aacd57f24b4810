"""Every cache is in the table of docs/design.md, and one function clears them all."""

import ast
import functools
import re
import sys
import threading
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path

import numpy as np

import linattn
from linattn.feature_maps import PositiveFeatures
from linattn.testing._caches import clear_caches

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs/design.md").read_text().split("## What is cached")[1].split("\n## ")[0]


def is_cache(node):
    """Whether a statement at the top of a module makes something that outlives calls."""
    if isinstance(node, ast.FunctionDef):
        return any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
    value = getattr(node, "value", None)
    text = ast.unparse(value) if isinstance(value, ast.Call | ast.Dict) else ""
    stores = ("WeakKeyDictionary(", "WeakValueDictionary(", "threading.local(", "ContextVar('last")
    return text == "{}" or text.startswith(stores)


def name_of(node):
    if isinstance(node, ast.FunctionDef):
        return node.name
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


@functools.cache
def caches():
    """Names of all caches in the sources, module by module."""
    found = []
    for root in (ROOT, ROOT / "backends"):
        for path in sorted(root.glob("linattn*/**/*.py")):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            for node in ast.parse(path.read_text()).body:
                if is_cache(node):
                    found.append(f"{module}.{name_of(node)}")
    return found


def test_the_table_lists_every_cache():
    names = re.findall(r"`(linattn[\w.]+)`", TABLE.split("| --- |", 1)[1])
    assert sorted(names) == sorted(caches())


def size_of(name):
    module, _, attribute = name.rpartition(".")
    cache = getattr(import_module(module), attribute)
    if hasattr(cache, "cache_info"):
        return cache.cache_info().currsize
    if isinstance(cache, ContextVar):
        return int(cache.get() is not None)
    return len(cache.__dict__ if isinstance(cache, threading.local) else cache)


def test_one_function_clears_every_cache():
    x = np.random.default_rng(0).normal(size=(2, 70, 8)).astype(np.float32)
    phi = PositiveFeatures(8, 16, rng=0)

    def call():
        return linattn.linear_attention(x, x, x, phi, is_causal=True)

    wanted = call()
    others = ("_cupy", "interop.torch._node")  # the latter names calls, and keeps them
    loaded = [n for n in caches() if n.rpartition(".")[0] in sys.modules]
    loaded = [n for n in loaded if not any(other in n for other in others)]
    kept = {name for name in loaded if size_of(name)}
    assert {"linattn._driver.problem._last_problem", "linattn_numpy.buffers._scratch"} <= kept
    clear_caches()
    assert not {name for name in loaded if size_of(name)}
    np.testing.assert_array_equal(call(), wanted)
