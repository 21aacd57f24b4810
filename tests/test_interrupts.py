"""An interrupt inside a context manager of the library leaves no setting behind."""

from __future__ import annotations

import contextlib
import gc
import inspect
from pathlib import Path
from typing import Any

import pytest

import linattn
import linattn_numpy
from linattn import _dispatch, _settings
from linattn_numpy import blas
from tests.interrupted import is_interrupted_at

SOURCES = str(Path(inspect.getfile(linattn)).parent)
BACKEND = str(Path(inspect.getfile(linattn_numpy)).parent)


def _state():
    found = blas.controller()
    threads = [] if found is None else [each.num_threads for each in found.lib_controllers]
    return _settings.current_settings(), _dispatch._mode.get(), dict(blas.blas._users), threads


def _interrupted(make, step):
    """Enter and leave a block; raise at the opcode of that number; say whether there was one."""

    def enter():
        with make():
            pass

    files = (contextlib.__file__, SOURCES, BACKEND)
    found = is_interrupted_at(step, enter, files, events=("opcode",))
    # A trace also raises where Python looks for no signal: before a lock is released.
    lock: Any = blas.blas._lock
    while lock._is_owned():
        lock.release()
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: linattn.config(num_threads=1, precision="float64"),
        linattn.without_backends,
        linattn.explain,
        lambda: _settings.use_settings(_settings.Settings(3, "tf32")),
        linattn_numpy.limited_threads,
    ],
    ids=["config", "without_backends", "explain", "use_settings", "limited_threads"],
)
def test_an_interrupt_at_any_opcode_leaves_no_setting(make):
    with make():
        pass
    before = _state()
    step = 1
    while _interrupted(make, step):
        assert _state() == before, step
        step += 1
    assert step > 60
    assert _state() == before
    gc.collect()
