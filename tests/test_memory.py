"""Memory: nothing is held between calls, and what a call needs does not grow with length."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import linattn
from tests.attentions import LENGTH, MAPS, PHI, attentions, filled_state, tokens


def _repeated() -> dict[str, Callable[[], Any]]:
    query, key, value = tokens()
    state = filled_state(PHI)
    decoder = linattn.Decoder(PHI, state)
    token = query[:, 0], key[:, 0], value[:, 0]
    mask = np.arange(LENGTH) > 0
    return {
        "full": lambda: linattn.linear_attention(query, key, value, PHI, key_mask=mask),
        "causal": lambda: linattn.linear_attention(query, key, value, PHI, is_causal=True),
        "threads": lambda: linattn.linear_attention(query, key, value, MAPS["elu"], chunk_size=2),
        "softmax": lambda: linattn.softmax_attention(query, key, value, is_causal=True),
        "decode_step": lambda: linattn.decode_step(*token, state, PHI),
        "Decoder": lambda: decoder.step(*token),
        "update_state": lambda: linattn.update_state(state, key, value, PHI),
        "redraw": lambda: PHI.redraw(0),
        "refused": lambda: _ignore(lambda: linattn.linear_attention(query, key, value[:, 1:], PHI)),
    }


def _ignore(call):
    try:
        call()
    except ValueError:
        return
    raise AssertionError


@pytest.mark.parametrize("name", _repeated())
def test_memory_is_flat_over_many_calls(name):
    call = _repeated()[name]
    # Free lists of Python fill up first.
    for _ in range(300):
        call()
    threads = threading.active_count()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(500):
        call()
    gc.collect()
    # One forgotten object a call would be 500.
    assert sys.getallocatedblocks() - before < 300
    assert threading.active_count() <= threads


def extra_memory(call, arrays):
    """Bytes that a call takes beside its results, on one thread.

    The least of a few: the first fills lists, and threads of other libraries allocate in between.
    """
    peaks = []
    with linattn.config(num_threads=1):
        tracemalloc.start()
        try:
            for _ in range(3):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                found = call(*arrays)
                used = tracemalloc.get_traced_memory()[1] - before
                peaks.append(used - sum(x.nbytes for x in found))
                del found
            return min(peaks)
        finally:
            tracemalloc.stop()


# Blocks of relu are done again where rows vanish, which depends on the data.
@pytest.mark.parametrize("attend", attentions("positive", "elu", "softmax"))
def test_extra_memory_does_not_grow_with_length(attend):
    def extra(length):
        arrays = tokens(lead=(), length=length)
        return extra_memory(lambda *x: (attend(*x, chunk_size=64),), arrays)

    short, long = (1050, 2100) if attend.feature_map is None else (1000, 4000)
    assert extra(long) < 1.2 * extra(short) + 20_000


def _of_rows():
    """Calls on (q, k, v, v) that need some numbers for each row, and how many bytes of them."""
    phi, stops = MAPS["elu"], lambda n: np.minimum(np.arange(n) // 100 * 100 + 100, n)

    def pulled(query, key, value, grad, **options):
        output, pullback = linattn.linear_attention_vjp(query, key, value, phi, **options)
        return output, *pullback(grad)

    def solved(query, key, value, _, **options):
        return (linattn.linear_attention(query, key, value, phi, **options),)

    def small(call):
        return lambda *x: call(*x[:2], *(np.float32(1e-30) * y for y in x[2:]))

    return {
        "decay": (lambda *x: solved(*x, log_decay=-0.01), 4 * (16 + 2)),
        "decay pulled": (lambda *x: pulled(*x, log_decay=-0.01), 4 * (16 + 6)),
        "stops": (lambda *x: solved(*x, key_stop=stops(len(x[0]))), 32),
        # Beside the arguments that are small.
        "small": (small(solved), 4 * 16 + 2 * 4 * 16),
        "small pulled": (small(pulled), 2 * 4 * 16 + 2 * 4 * 16),
    }


@pytest.mark.parametrize("name", _of_rows())
def test_memory_of_each_row(name):
    """Beside arguments and results, as docs/gradients.md and the docstrings say."""
    call, allowed = _of_rows()[name]

    def extra(length):
        return extra_memory(
            call, np.random.default_rng(0).standard_normal((4, length, 16), dtype=np.float32)
        )

    assert (extra(16000) - extra(8000)) / 8000 <= 1.1 * allowed
