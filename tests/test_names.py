"""The table from formulas and names of papers to functions: each call of it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import baselines, feature_maps, kernels, layers, positions

PAGE = Path(__file__).parents[1].joinpath("docs", "names.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("|")
][2:]
LENGTH, DIM = 12, 8


def arrays() -> dict[str, Any]:
    """Return what the calls take."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, LENGTH, DIM)) / 2
    gates = -0.1 * rng.random((1, 2, LENGTH, DIM))
    bias = rng.standard_normal((2, 7))
    return {
        **{
            "q": q,
            "k": k,
            "v": v,
            "grouped": np.stack([q, -q], axis=2),
            "q2": k,
            "k2": q,
            "gates": gates,
        },
        **{"g": gates[..., 0], "b": rng.random((1, 2, LENGTH)), "i": gates[..., 1], "bias": bias},
        **{
            "mask": np.arange(LENGTH) < 9,
            "x": rng.standard_normal((9, 2)),
            "exp": np.exp,
            "rng": rng,
        },
        **{"weights": rng.standard_normal((2, DIM, DIM)), "latent": k, "up": np.eye(DIM)},
        **{"slopes": positions.alibi_slopes(2)[:, None], "offsets": np.arange(-LENGTH, LENGTH + 1)},
        "twice": lambda array: np.repeat(array, 2, axis=2),
        "landmarks": feature_maps.LandmarkFeatures.fit(q, k, num_features=4, rng=0),
    }


NAMES = {
    **{name: getattr(linattn, name) for name in linattn.__all__},
    **{name: getattr(feature_maps, name) for name in feature_maps.__all__},
    **{"baselines": baselines, "kernels": kernels, "layers": layers, "positions": positions},
}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_runs(row):
    name, formula, call = row
    assert name
    assert formula
    (code,) = re.findall(r"`([^`]+)`", call)
    rest = call.replace(f"`{code}`", "").strip()
    assert rest == "" or (rest.startswith("nearest") and rest.endswith(":"))
    result = eval(code, {}, {**NAMES, **arrays()})
    for array in result if type(result) is tuple else (result,):
        if isinstance(array, np.ndarray):
            assert np.count_nonzero(~np.isfinite(array)) == 0


def test_there_are_many():
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 45
    assert sum(row[2].startswith("nearest") for row in ROWS) >= 8
