"""Calls from several threads at once, and after a fork."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import linattn
from tests.attentions import (
    Attention,
    assert_equal_and_native,
    every_attention,
    every_map,
    filled_state,
    tokens,
)


@every_attention
def test_eight_threads_share_one_object(attend):
    arrays = tokens(length=40)
    shared = Attention(attend.name, copy.deepcopy(attend.feature_map), attend.is_causal)
    start = threading.Barrier(8)

    def work(index):
        start.wait()
        return [shared(*arrays, chunk_size=16 if index % 2 else None) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for parity in (0, 1):
        expected = attend(*arrays, chunk_size=16 if parity else None)
        for outputs in results[parity::2]:
            for out in outputs:
                np.testing.assert_array_equal(out, expected)


@every_map
def test_eight_threads_share_one_state(feature_map):
    query, key, value = tokens()
    state = filled_state(feature_map)
    kept = copy.deepcopy(state)
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        return (
            linattn.update_state(state, key, value, feature_map),
            linattn.decode_step(query[:, 0], key[:, 0], value[:, 0], state, feature_map),
            linattn.read_state(query, state, feature_map),
            linattn.merge_states(state, state),
        )

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for result in results[1:]:
        assert_equal_and_native(result, results[0])
    assert_equal_and_native(state, kept)


FORK = """
import os, signal, threading
import numpy as np
import linattn

phi = linattn.feature_maps.PositiveFeatures(16, 64, rng=0)
query, key, value = np.random.default_rng(0).standard_normal((3, 8, 700, 16), dtype=np.float32)

def call():
    with linattn.config(num_threads=4):
        return [
            linattn.linear_attention(query, key, value, phi, is_causal=is_causal)
            for is_causal in (False, True)
        ] + [linattn.softmax_attention(query[:, :100], key, value)]

expected = call()
threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
if child == 0:
    signal.alarm(60)
    same = all(np.array_equal(a, b) for a, b in zip(call(), expected, strict=True))
    os._exit(0 if same else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert all(np.array_equal(a, b) for a, b in zip(call(), expected, strict=True))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="numpy: this platform has no fork")
def test_fork_after_threads():
    finished = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_settings_hold_for_one_thread_only():
    seen = {}

    def work():
        with linattn.config() as settings:
            seen["inside"] = settings.num_threads

    with linattn.config(num_threads=3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with linattn.config() as settings:
            assert settings.num_threads == 3
    assert seen["inside"] is None
