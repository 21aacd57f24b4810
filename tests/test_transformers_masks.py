"""Masks of pairs that are read row by row, and the options that say the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.interop import _visibility

Q, K = np.arange(12)[:, None], np.arange(12)[None]
BORDERS = np.array([0, 3, 4, 9, 12])
OWN = np.searchsorted(BORDERS, np.arange(12), side="right") - 1
SAME = OWN[:, None] == OWN[None]
CAUSAL = K <= Q
MASKS = {
    "full": (K >= 0) & (Q >= 0),
    "causal": CAUSAL,
    "window": CAUSAL & (Q - K < 4),
    "window of one": CAUSAL & (Q - K < 1),
    "both sides": abs(Q - K) <= 2,
    "sides": (Q - K <= 3) & (K - Q <= 1),
    "ahead": K - Q <= 2,
    "from here": K >= Q,
    "prefix": CAUSAL | ((Q < 5) & (K < 5)),
    "prefix and window": (CAUSAL & (Q - K < 6)) | ((Q < 5) & (K < 5)),
    "image": CAUSAL | ((Q >= 4) & (Q < 8) & (K >= 4) & (K < 8)),
    "packed": SAME,
    "packed causal": SAME & CAUSAL,
    "packed window": SAME & CAUSAL & (Q - K < 3),
    "chunks": CAUSAL & (Q // 5 == K // 5),
    "last queries": CAUSAL[8:],
    "last queries, window": (CAUSAL & (Q - K < 5))[8:],
    "empty places": np.concatenate([CAUSAL, np.zeros((12, 5), np.bool_)], -1),
    "empty places behind queries": np.concatenate([CAUSAL[7:], np.zeros((5, 5), np.bool_)], -1),
    "last queries, chunks": (CAUSAL & (Q // 5 == K // 5))[7:],
    "one query": (CAUSAL & (Q - K < 5))[9:10],
}
NO_OPTIONS = {
    "gap": CAUSAL & (K != 3),
    "nothing seen": K < Q,
    "falling stops": np.maximum(1, 12 - Q) > K,
    "image outside of the window": (CAUSAL & (Q - K < 3)) | (Q // 6 == K // 6),
    "two windows": CAUSAL & (np.where(Q < 6, 2, 4) > Q - K),
}


def weights(mask):
    """Rows that see all visible keys alike: attention with queries of 0, values of the unit."""
    return mask / mask.sum(-1, keepdims=True)


def shown(found, mask):
    """Return what each query sees, by attention with these options, (batch, L, S)."""
    length, keys = mask.shape[-2:]
    length += found.before
    options = dict(found.options)
    if options.get("key_stop") is not None and np.ndim(options["key_stop"]) == 2:
        assert len(options["key_stop"]) == len(mask)
    shape = (1, len(mask) * length) if found.is_flat else (len(mask), length)
    query = np.zeros((*shape, 2))
    count = found.num_keys if not found.is_flat else shape[1]
    key, value = (
        np.zeros((shape[0], count, 2)),
        np.broadcast_to(np.eye(count), (shape[0], count, count)),
    )
    out = linattn.softmax_attention(query, key, value, **options)
    if found.is_flat:
        out = out.reshape(len(mask), length, len(mask), length)
        out = np.stack([out[b, :, b] for b in range(len(mask))])
    out = out[:, found.before :]
    return np.concatenate([out, np.zeros((*out.shape[:-1], keys - out.shape[-1]))], -1)


def read(mask, block=None):
    return _visibility.read_rows(lambda rows: mask[:, rows], *mask.shape[-2:])


@pytest.mark.parametrize("block", [1, 1 << 18])
@pytest.mark.parametrize("name", MASKS)
def test_options_show_what_the_mask_shows(monkeypatch, name, block):
    monkeypatch.setattr(_visibility, "_PAIRS", block)
    mask = MASKS[name][None]
    found = read(mask)
    assert found is not None
    assert_allclose(shown(found, mask), weights(mask), atol=1e-12)
    assert_allclose(shown(read(mask[[0, 0]]), mask), weights(mask), atol=1e-12)


@pytest.mark.parametrize(
    "names", [("packed", "packed window"), ("prefix", "causal"), ("chunks", "packed causal")]
)
def test_masks_that_differ_in_a_batch(names):
    mask = np.stack([MASKS[name] for name in names])
    found = read(mask)
    if found is None:
        assert names[0] == "packed"  # One has a window and the other has none.
        return
    assert_allclose(shown(found, mask), weights(mask), atol=1e-12)


@pytest.mark.parametrize("name", NO_OPTIONS)
def test_masks_that_no_options_say(name):
    assert read(NO_OPTIONS[name][None]) is None


def test_drawn_masks_are_right_or_refused():
    """Intervals with borders, windows, prefixes and offsets drawn together."""
    rng, number = np.random.default_rng(0), 0
    for _ in range(300):
        keys = int(rng.integers(1, 14))
        length = keys if rng.random() < 0.6 else int(rng.integers(1, keys + 1))
        i, j = np.arange(keys)[:, None], np.arange(keys)[None]
        mask = np.ones((keys, keys), np.bool_)
        if rng.random() < 0.6:
            mask &= j <= i
        if rng.random() < 0.4:
            mask &= i - j <= rng.integers(0, 5)
        if rng.random() < 0.3:
            mask &= j - i <= rng.integers(0, 5)
        if rng.random() < 0.4:
            own = np.cumsum(rng.random(keys) < 0.3)
            mask &= own[:, None] == own[None]
        if rng.random() < 0.3:
            prefix = rng.integers(1, keys + 1)
            mask |= (i < prefix) & (j < prefix)
        mask = mask[None, keys - length :]
        found = read(mask)
        if found is not None:
            number += 1
            assert_allclose(shown(found, mask), weights(mask), atol=1e-12)
    assert number > 200


def test_a_mask_is_read_some_rows_at_a_time():
    length, asked = 4096, []

    def rows(block):
        asked.append(block)
        i = np.arange(length)[block, None]
        return (np.arange(length) <= i)[None]

    found = _visibility.read_rows(rows, length, length)
    assert found is not None
    assert found.options == {"is_causal": True}
    assert_array_equal([b.stop - b.start for b in asked], 64)
