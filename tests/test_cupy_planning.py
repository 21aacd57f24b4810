"""How the CuPy backend cuts problems for a device, and what fits one; nothing is launched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linattn._driver.problem import linear_problem
from linattn.feature_maps import EluFeatures, PositiveFeatures
from linattn.typing import Visible
from linattn_cupy import device, fused, gradients, layout, planning

F16, F32 = np.float16, np.float32


@pytest.fixture
def gpu(monkeypatch):
    """Limits of a device, to set; arrays are NumPy's."""
    given = SimpleNamespace(processors=4, shared_bytes=227 * 1024, memory_bytes=80 * 2**30)
    for name in vars(given):
        monkeypatch.setattr(device, name, lambda name=name: getattr(given, name))
    monkeypatch.setattr(device._Lazy, "__getattr__", lambda self, name: getattr(np, name))
    monkeypatch.setattr(device, "address", lambda array: array.ctypes.data)
    return given


def inputs(lead: tuple[int, ...], length: int, value_dim: int, dim: int) -> Any:
    rng = np.random.default_rng(0)
    shapes = ((length, dim), (length, dim), (length, value_dim))
    return [rng.standard_normal((*lead, *shape)).astype(F32) for shape in shapes]


def test_float32_blocks_fill_the_workspace(gpu):
    """A tenth of the launches of blocks of 128 tokens; fewer tokens where there is less memory."""
    query, key, value = inputs((4, 16), 8192, 64, 64)
    problem = linear_problem(query, key, value, PositiveFeatures(64, 256, rng=0))
    for is_causal, most in ((False, 4), (True, 10)):
        causal = problem.replace(sees=Visible(right=0 if is_causal else None))
        tokens = planning.tokens_of(causal)
        blocks = planning.blocks_of(8192, tokens, is_causal=is_causal)
        assert len(blocks) <= most
        assert [row for b in blocks for row in range(8192)[b.rows]] == list(range(8192))
        assert all((b.rows.stop - b.rows.start) % b.tile == 0 for b in blocks)
        gpu.memory_bytes = 8 * 2**30
        assert tokens // 5 < planning.tokens_of(causal) < tokens // 3
        gpu.memory_bytes = 80 * 2**30
        assert planning.plan(causal).block_size == (256 if is_causal else tokens)
    assert planning.blocks_of(1000, 128, is_causal=True)[-1] == (slice(896, 1000), 104)


CARDS = {"163 KB": 166_912, "99 KB": 101_376, "227 KB": 232_448}
GPU_PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"


def test_the_page_says_what_fits_which_card(gpu):
    """The largest m of full and causal attention by d, and that gradients take as many."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GPU_PAGE.read_text(encoding="utf-8").splitlines()
        if " KB | " in line
    ]
    assert [row[1] for row in rows] == list(CARDS)
    for row in rows:
        gpu.shared_bytes = CARDS[row[1]]
        found = [", ".join(str(largest(dim, causal)) for causal in (False, True)) for dim in DIMS]
        assert row[2:] == found
        widest = [dim for dim in range(16, 129, 8) if fits(EluFeatures(), dim, is_causal=True)]
        assert max(widest) == (112 if row[1] == "99 KB" else 128)


DIMS = (32, 64, 96, 128)


def largest(dim, is_causal):
    return max(
        m
        for m in range(16, 257, 16)
        if fits(PositiveFeatures(dim, m, rng=0), dim, is_causal=is_causal)
    )


def fits(phi, dim, *, is_causal):
    query, key, value = (x.astype(F16) for x in inputs((1,), 1, 64, dim))
    problem = linear_problem(query, key, value, phi, is_causal=is_causal)
    try:
        work = fused.work_of(problem)
    except device.KernelUnavailableError:
        return False
    assert gradients._least_memory(work) <= device.shared_bytes()
    return True


@pytest.mark.parametrize(("features", "dim"), [(128, 16), (160, 32), (192, 32)])
def test_gradients_of_few_coordinates_and_many_features_are_padded(gpu, features, dim):
    """With d = 16 they would spill registers: test_kernel_compilation.py compiles none of these."""
    query, key, value = (x.astype(F16) for x in inputs((2,), 50, 24, 16))
    phi = PositiveFeatures(16, features, rng=0)
    problem = linear_problem(query, key, value, phi, is_causal=True)
    assert gradients._work_of(problem).variant.dim == dim
    assert fused.work_of(problem).variant.dim == 16


def test_heads_are_three_axes_at_most():
    heads = layout.heads_of((2, 1, 5, 7))
    assert heads.sizes == (2, 5, 7)
    assert heads.total == 70
    array = np.zeros((5, 1, 3, 4), F32)
    assert layout.strides(heads, array) == [0, 12, 0, 4]
    assert layout.unit_strides(heads, (1, 5, 7)) == [0, 7, 1]
    assert layout.unit_strides(heads, ()) == [0, 0, 0]
    with pytest.raises(device.UnsupportedError, match="4 axes of heads are more than 3"):
        layout.heads_of((2, 3, 4, 5))
    scalar = layout.heads_of(())
    assert scalar.sizes == (1, 1, 1)


def test_segments_fill_the_device(gpu):
    gpu.processors = 132
    for heads, length in [(64, 8192), (1, 65536), (1, 100), (300, 512), (132, 64)]:
        segments = fused.segments_of(length, heads, 64, 10**6)
        assert segments.number * segments.length >= length
        assert length > (segments.number - 1) * segments.length
        assert segments.length % 64 == 0
        waves = -(-heads * segments.number // 132)
        work = heads * -(-length // 64) / 132
        assert waves * segments.length / 64 <= max(1.3 * work, 1)
    assert fused.segments_of(8192, 64, 64, 3).number <= 3


def test_both_passes_of_a_causal_call_fill_the_device(gpu):
    gpu.processors = 132
    for heads, length in [(64, 8192), (64, 1000), (1, 65536), (1, 100), (8, 8192), (32, 8192)]:
        segments, parts = cut = fused.cut_of(length, heads, heads, 1000)
        assert segments.number * segments.length >= length
        assert length > (segments.number - 1) * segments.length
        assert parts.length % 64 == 0
        assert segments.length == cut.parts_per_segment * parts.length
        assert parts.number == cut.parts_per_segment * segments.number
        needed = heads * (segments.number - 1) * cut.parts_per_segment
        waves = -(-needed // 132)
        work = needed * parts.length / 64 / 132
        assert waves * parts.length / 64 <= max(1.4 * work, 1)
    assert fused.cut_of(8192, 64, 64, 9).parts_per_segment == 2
    # Two segments and the state of one of them are three states.
    assert fused.cut_of(8192, 64, 64, 3).parts_per_segment == 1
    assert fused.cut_of(8192, 64, 64, 2).segments.number == 1
    # Heads that share keys share the states of segments.
    assert fused.cut_of(8192, 64, 8, 100).parts_per_segment == 16
