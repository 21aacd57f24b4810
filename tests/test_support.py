"""The table of docs/choose.md: which functions run on which arrays, in which dtypes.

Each cell is what ran here; what ran and is not near `linattn.reference` fails. JAX's calls are
compiled whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import linattn
from linattn import reference
from linattn.feature_maps import LandmarkFeatures, PositiveFeatures
from tests.attentions import TOLERANCE

PATH = Path(__file__).resolve().parents[1] / "docs" / "choose.md"
PAGE = PATH.read_text(encoding="utf-8")
COLUMNS = {
    "numpy": "NumPy",
    "numpy-without-backends": "NumPy",
    "array-api-strict": "array-api-strict",
    "dask": "Dask",
    "torch": "torch",
    "jax": "JAX",
}
DTYPES = {"bfloat16": "bfloat16", "float16": "16", "float32": "32", "float64": "64"}
# Central differences are less exact than float64.
BOUNDS = TOLERANCE | {"float64": 1e-9}

# Sixteenths, which every dtype holds.
RNG = np.random.default_rng(0)
PHI = PositiveFeatures(4, 8, rng=0)
LENGTH, WINDOW = 3, 1
QUERY, KEY, VALUE, WEIGHTS = (
    np.round(8 * RNG.standard_normal((LENGTH, n))) / 16 for n in (4, 4, 3, 3)
)
BETA, LOG_DECAY = RNG.integers(1, 9, LENGTH) / 16, -RNG.integers(1, 9, LENGTH) / 16
LANDMARKS = LandmarkFeatures.fit(QUERY, KEY, num_features=2)
ARRAYS = (QUERY, KEY, VALUE, WEIGHTS, BETA, LOG_DECAY)

AT = np.arange(LENGTH)
BLOCK = AT // WINDOW
NEAR = abs(BLOCK[:, None] - BLOCK) <= 1
IN_REACH = abs(AT[:, None] - AT) <= WINDOW


def linear(q, k, v, **options):
    return linattn.linear_attention(q, k, v, PHI, **options)


def windowed(q, k, v, *_):
    return linattn.softmax_attention(q, k, v, local_window_size=WINDOW)


def clustered(q, k, v, *_):
    return linattn.linear_attention(q, k, v, LANDMARKS, exact_clusters=1)


def decoded(q, k, v, *_):
    state = linattn.init_state(PHI, v.shape[-1], like=k)
    state = linattn.update_state(state, k[:-1, :], v[:-1, :], PHI)
    return linattn.decode_step(q[-1, :], k[-1, :], v[-1, :], state, PHI)[0]


def pulled_back(q, k, v, weights, *_):
    return linattn.linear_attention_vjp(q, k, v, PHI)[1](weights)


def recurrent(q, k, v, _, beta, log_decay):
    gates = {"beta": beta, "log_decay": log_decay}
    return linattn.linear_recurrence(q, k, v, update_rule="gated_delta", **gates)


CALLS: dict[str, Any] = {
    "`attention`": lambda q, k, v, *_: linattn.attention(q, k, v),
    "`softmax_attention`": lambda q, k, v, *_: linattn.softmax_attention(q, k, v),
    "`local_window_size=`": windowed,
    "`linear_attention`": lambda q, k, v, *_: linear(q, k, v),
    "`is_causal=True`": lambda q, k, v, *_: linear(q, k, v, is_causal=True),
    "`exact_window=`": lambda q, k, v, *_: linear(q, k, v, exact_window=WINDOW),
    "`exact_clusters=`": clustered,
    "`linear_attention_vjp`": pulled_back,
    "`decode_step`": decoded,
    "`linear_recurrence`": recurrent,
}


def kernel_of_exact_window(x, y):
    log_q, log_k = PHI.query_features(x).log, PHI.key_features(y).log
    far = np.exp(log_q) @ np.exp(log_k).swapaxes(-1, -2)
    return np.where(NEAR, np.exp(x @ y.swapaxes(-1, -2) / 2), far)


def gradients():
    """Gradient of the weighted sum of the outputs, by central differences."""
    found = []
    for i in range(3):
        gradient = np.zeros_like(ARRAYS[i])
        for place in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in ARRAYS[:3]]
                moved[i][place] += step
                query, key, value = moved
                output = reference.kernel_attention(query, key, value, PHI)
                ends.append((output * WEIGHTS).sum())
            gradient[place] = (ends[0] - ends[1]) / 2e-5
        found.append(gradient)
    return found


@pytest.fixture(scope="module")
def expected():
    """Return the arrays that each call should return, float64 NumPy."""
    qkv = QUERY, KEY, VALUE
    softmax = reference.softmax_attention(*qkv)
    causal = reference.kernel_attention(*qkv, PHI, is_causal=True)
    gates: dict[str, Any] = {"beta": BETA, "log_decay": LOG_DECAY}
    return {
        "`attention`": [softmax],
        "`softmax_attention`": [softmax],
        "`local_window_size=`": [reference.softmax_attention(*qkv, visible=IN_REACH)],
        "`linear_attention`": [reference.kernel_attention(*qkv, PHI)],
        "`is_causal=True`": [causal],
        "`exact_window=`": [reference.kernel_attention(*qkv, kernel_of_exact_window)],
        "`exact_clusters=`": [reference.clustered_attention(*qkv, LANDMARKS, exact_clusters=1)],
        "`linear_attention_vjp`": gradients(),
        "`decode_step`": [causal[-1]],
        "`linear_recurrence`": [reference.recurrence(*qkv, update_rule="gated_delta", **gates)[0]],
    }


def arrays_of(xp, dtype):
    """Return the arguments in this dtype, None where the library lacks it."""
    if xp.name.startswith(("numpy", "dask")):
        kind = getattr(ml_dtypes, dtype, dtype)
        return [xp.array(array).astype(kind) for array in ARRAYS]
    if not hasattr(xp.xp, dtype):
        return None
    return [xp.array(array, dtype) for array in ARRAYS]


def runs(xp, name, arrays, wanted, bound):
    """Whether this call runs on these arrays; fail where its results are wrong."""
    try:
        results = xp.compiled(CALLS[name])(*arrays)
    except TypeError as error:
        words = str(error).partition(",")[0]
        assert words in " ".join(PAGE.replace("`", "").split())
        return False
    results = results if isinstance(results, tuple | list) else [results]
    for result, array in zip(results, wanted, strict=True):
        xp.assert_like(result, arrays[0], shape=array.shape)
    for result, array in zip(xp.numpy_each(results), wanted, strict=True):
        np.testing.assert_allclose(result, array, rtol=0, atol=bound * abs(array).max())
    return True


def cell(xp, name, wanted):
    given = {dtype: arrays_of(xp, dtype) for dtype in DTYPES}
    right = [
        short
        for dtype, short in DTYPES.items()
        if given[dtype] and runs(xp, name, given[dtype], wanted, BOUNDS[dtype])
    ]
    return "all" if len(right) == len(DTYPES) else ", ".join(right) or "no"


def test_the_page_shows_what_runs(xp, expected):
    if xp.name not in COLUMNS:
        pytest.skip(f"{xp.name}: the page has no column")
    table = PAGE.split("## Array libraries")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    head, _, *body = [[text.strip() for text in row] for row in rows]
    column = head.index(COLUMNS[xp.name])
    shown = {row[0]: row[column] for row in body}
    assert shown == {name: cell(xp, name, expected[name]) for name in CALLS}
