"""Measured constants: where one way to compute becomes faster than another.

They change times, not what is accurate, which :mod:`linattn_numpy.limits` holds. Each was set on
the date beside it; machine and command were not recorded (docs/performance.md, of the same days,
was measured on AMD EPYC, family 25 model 17, with OpenBLAS's SkylakeX kernels). Whoever measures
one again writes machine, date and command beside it.

*Elements* are numbers of an array, *rows* are tokens.
"""

from __future__ import annotations

# Products

MAX_SMALL_MATMUL = 1_000_000
"""Multiplications of a matrix product that OpenBLAS does without packing (2026-11-22)."""

AVX512_KERNELS = ("skylakex", "cooperlake", "sapphirerapids")
"""OpenBLAS's names for the sets of kernels that can: elsewhere small products lose (2026-11-22)."""

MIN_PRODUCT_ROWS, MAX_PRODUCT_ROWS = 8, 32
"""Rows of such a product: fewer take as long as the whole, more gain nothing (2026-11-22)."""

MIN_SUM_ROWS = 64
"""Tokens of a sum over tokens that is cut, and of a part of it (2026-11-22)."""

# Tiles

SUB_BLOCK_ROWS = 32
"""Rows of a causal block that share one triangle; longer ones waste half a square (2026-11-20)."""

TILE_ELEMENTS = 1 << 18
"""Features of a side made at once, 1 MB of float32, if that is a sub-block or more (2026-11-22)."""

CAUSAL_TILE_ELEMENTS = 1 << 17
"""The same in a causal block: half a MB, beside the other side and the states (2026-11-22)."""

ASSIGNED_TILE_ELEMENTS = 1 << 17
"""The same for keys that are assigned, which take two such arrays (2026-11-21)."""

MIN_UNCOPIED_ROWS = 32
"""Products of fewer rows are worth a copy that makes one of many (2026-11-22)."""

MIN_CLIPPED_ELEMENTS = 2048
"""Arrays of fewer are faster compared with a number than clipped (2026-11-22)."""

MAX_CACHED_BYTES = 1 << 22
"""Larger buffers, of long blocks that a caller asked for, are allocated anew (2026-11-22)."""

# Blocks

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS, MAX_BLOCK_ELEMENTS = 128, 2048, 1 << 18
"""Tokens of a block, and its features of a side, where they are there at once (2026-11-22)."""

MAX_TILED_BLOCK_ROWS, MAX_TILED_BLOCK_ELEMENTS = 4096, 1 << 20
"""The same where features are made and used a tile at a time: of shorter blocks Python does more,
and threads wait for each other meanwhile (2026-11-22)."""

EXACT_BLOCK_ROWS = 512
"""Tokens of a block of softmax attention (2026-11-20)."""

WINDOW_BLOCK_ROWS = 2048
"""Tokens of a block beside an exact window: shorter ones are too little at once (2026-11-21)."""

COLUMN_NORMALIZED_BLOCK_ROWS = 256
"""Tokens of a causal block of column-normalized reads, quadratic in their number (2026-11-22)."""

MAX_STABILIZED_ROWS = 512
"""Rows that may share one scale however many features they have; the driver cuts to as many, and
a block of more is tried again as shorter ones (2026-11-22)."""

# Heads and threads

MAX_BATCHED_ELEMENTS, MIN_BATCHED_ROWS = 9216 * 65, 768
"""Values and states of the heads that are batched into one causal task, and the length that those
of fewer tokens count as: two heads of 4,096 tokens, d = 64, m = 256 (2026-11-22)."""

MIN_APART_ELEMENTS = 1 << 14
"""Features of a head from which heads are done one by one where one is rejected (2026-11-22).

It does not depend on how many heads there are, so that batching them changes no bit.
"""

MIN_SEGMENTED_ROWS, MIN_SEGMENTED_CAUSAL_ROWS = 4096, 16384
"""Tokens of a single task that is cut into segments where there are threads for them: in a causal
one the keys of all but the last are read twice. Tasks of the first many are resumable (2026-11-22).
"""

SEGMENT_MULTIPLE = 512
"""Segments are of a multiple of so many tokens, of whole tiles (2026-11-22)."""

MIN_PARALLEL_FLOPS = 2e8
"""With less work two threads may take longer than one: elu + 1 of 8 heads of 512 tokens
(2026-11-22)."""

ROUND_ROBIN_TASKS = 4
"""Tasks a thread that are done in round robin at the end (2026-11-22)."""
