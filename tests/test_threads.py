"""Threads of the NumPy backend: what interrupts and errors leave, and the order of tasks."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import linattn
import linattn_numpy
from linattn.feature_maps import PositiveFeatures
from linattn.typing import Features
from linattn_numpy import blas, threads, tuning
from tests.interrupted import is_interrupted_at

D = 8
HERE = (blas.__file__, threads.__file__)


@pytest.fixture(autouse=True)
def _a_task_a_head(monkeypatch):
    """Let small problems be shared out, a head a task."""
    monkeypatch.setattr(tuning, "MIN_PARALLEL_FLOPS", 0)
    monkeypatch.setattr(tuning, "MAX_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(tuning, "MAX_BATCHED_ELEMENTS", 1)


def inputs(n, heads):
    return np.random.default_rng(0).standard_normal((3, heads, n, D), dtype=np.float32)


def lines_with_locks():
    """Lines that take and release locks.

    Python lets no signal in between a lock and the body of its ``with``.
    """
    return {
        (name, number)
        for name in HERE
        for number, line in enumerate(Path(name).read_text().splitlines(), 1)
        if line.strip().startswith("with ") and "lock" in line
    }


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupt_leaves_the_threads_of_blas_as_they_were(count):
    """Wherever it falls, and while its traceback is still there."""
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="extra 'threads' not installed")
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    query, key, value = inputs(20, 2)
    phi = PositiveFeatures(D, 16, rng=0)

    def attend():
        with linattn.config(num_threads=count):
            return linattn.linear_attention(query, key, value, phi)

    def held() -> list[int]:
        found: list[int] = []
        threads.run(1, lambda _: found.extend(lib.num_threads for lib in libraries), [0])
        return found

    want, left = attend(), []
    with threadpoolctl.threadpool_limits(2, "blas"):
        before = [library.num_threads for library in libraries]
        limited = held()  # all but those loaded since the first call, as SciPy's may be
        if set(before) != {2} or 1 not in limited:
            pytest.skip("the threads of this NumPy's BLAS cannot be set")
        step, kept = 1, list[KeyboardInterrupt]()
        options: Any = {"events": ("call", "opcode"), "skipped": lines_with_locks(), "kept": kept}
        while is_interrupted_at(step, attend, HERE, **options):
            if [library.num_threads for library in libraries] != before:
                left.append(str(traceback.extract_tb(kept[0].__traceback__)[-1]))
                for library, number in zip(libraries, before, strict=True):
                    library.set_num_threads(number)
            kept.clear()
            step += 1
        assert step > 100
        assert not left
        # Nobody is counted who has gone.
        assert held() == limited
    # Nor is a thread taken to be at work that is not: both of these wait for the other.
    barrier = threading.Barrier(2)
    threads.run(2, lambda _: [barrier.wait(5)], [0, 1])
    assert_array_equal(attend(), want)


# The order of tasks ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", ["keys", "queries", "keys of one batch"])
def test_gradients_of_shared_rows_are_the_same_from_run_to_run(shared, is_causal, monkeypatch):
    """Whichever task ends first, and however many threads there are."""
    query, key, value = inputs(300, 6)
    phi = PositiveFeatures(D, 16, rng=0)
    if shared == "queries":
        query = query[:1]
    elif shared == "keys":
        key = key[:1]
    else:
        query, value = (x.reshape(2, 3, *x.shape[1:]) for x in (query, value))
        key = key[:2, None]
    output = linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
    weight = np.random.default_rng(1).standard_normal(output.shape, dtype=np.float32)
    delays, drawing = np.random.default_rng(2), threading.Lock()

    def late(work):
        def done(*args):
            with drawing:
                delay = delays.uniform(0, 2e-3)
            time.sleep(delay)
            return work(*args)

        return done

    def gradients(count):
        with linattn.config(num_threads=count):
            _, pull = linattn.linear_attention_vjp(
                query, key, value, phi, is_causal=is_causal, chunk_size=100
            )
            return pull(weight)[:3]

    want = gradients(1)
    for name in ("reduce_block_vjp", "scan_vjp"):
        monkeypatch.setattr(linattn_numpy, name, late(getattr(linattn_numpy, name)))
    for count in [2, 3] * 4:
        for mine, theirs in zip(gradients(count), want, strict=True):
            assert_array_equal(mine, theirs)


# Errors ------------------------------------------------------------------------------------------


class Failing:
    """Fails for one head, in the first block; counts the heads that were begun."""

    num_features = dim = D

    def __init__(self, fails, here):
        self.fails, self.here = fails, here
        self.begun: list[float] = []
        self.lock, self.failed = threading.Lock(), threading.Event()

    def query_features(self, x):
        return Features(np.zeros_like(x[..., :1]), np.exp(x))

    def key_features(self, x):
        with self.lock:
            self.begun.append(float(x.flat[0]))
        is_here = threading.current_thread() is threading.main_thread()
        if is_here == self.here and not self.failed.is_set():
            self.failed.set()
            raise self.fails("one head")
        # The other thread is in a head of its own until this one has failed.
        assert self.failed.wait(30)
        time.sleep(0.05)
        return self.query_features(x)


@pytest.mark.parametrize("here", [True, False], ids=["caller", "helper"])
@pytest.mark.parametrize("fails", [RuntimeError, KeyboardInterrupt])
def test_an_error_on_any_thread_is_raised_and_no_further_head_is_begun(fails, here):
    query, key, value = np.ones((3, 40, 5, D), np.float32)
    phi = Failing(fails, here)
    with linattn.config(num_threads=2), pytest.raises(fails, match="one head"):
        linattn.linear_attention(query, key, value, phi)
    # Those that were under way; a busy machine may be late to stop.
    assert 1 <= len(phi.begun) < 20
    # Threads that failed work on.
    with linattn.config(num_threads=2):
        out = linattn.linear_attention(query, key, value, PositiveFeatures(D, 16, rng=0))
    np.testing.assert_allclose(out, np.ones_like(out), rtol=1e-5)
