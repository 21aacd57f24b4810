"""Measured constants: where one way to compute becomes faster than another.

They change times only; the bounds that accuracy depends on are in :mod:`linattn_numpy.limits`. Each
was set on the date beside it. Machine and command were not recorded, but docs/record.md, of the
same days, was measured on AMD EPYC, family 25 model 17, with OpenBLAS's SkylakeX kernels. Whoever
measures one again writes machine, date and command beside it.

*Elements* are numbers of an array, *rows* are tokens.
"""

from __future__ import annotations

# 2026-11-22: multiplications of a product that OpenBLAS's kernels for AVX-512 do without packing,
# and least rows of a part into which pairs of a band are cut.
MAX_SMALL_MATMUL, MIN_SUM_ROWS = 1_000_000, 64

# 2026-11-23, AMD EPYC, family 25 model 17: a row of the queries of a short block of a band, d = 64,
# 33 to 2,049 keys a query: 16 in float32, of which 32 take 10 % longer, with OpenBLAS's Haswell
# kernels as long; products in float64 with 8 take .83 to .99 of the time with 16. Pairs of the
# heads that are batched: 16 heads of 512 tokens, 129 keys a query, in .65 of the time.
BAND_ROW_BYTES, MAX_BAND_ELEMENTS = 64, 1 << 19

# 2026-11-20: rows of a causal block that share a triangle; longer ones waste half a square.
SUB_BLOCK_ROWS = 32

# 2026-11-22: features of a side made at once, 1 MB of float32, if that is a sub-block or more; in a
# causal block half of that. 2026-11-21: for assigned keys, which take two such arrays.
# 2026-11-27, AMD EPYC, family 25 model 17: pointwise maps, which take two as well, take 1.1 to 1.3
# times as long with a quarter of it, 8 heads, d = 64, full: Python counts for more than the cache.
TILE_ELEMENTS, CAUSAL_TILE_ELEMENTS, ASSIGNED_TILE_ELEMENTS = 1 << 18, 1 << 17, 1 << 17

# 2026-11-23, AMD EPYC: exponents that tell those of a block, or of more rows; the largest of all is
# about the inverse of this share beyond theirs.
SAMPLED_ELEMENTS, MIN_SAMPLED_ROWS, MAX_SAMPLED_SHARE = 2048, 8, 0.8

# 2026-11-22: arrays of fewer are faster compared with a number than clipped.
MIN_CLIPPED_ELEMENTS = 2048

# 2026-11-23: a vector across two cache lines takes two reads. 2026-11-22: larger buffers, of long
# blocks that a caller asked for, are allocated anew.
# 2026-11-26: shapes of buffers that a thread remembers; a call needs about ten.
CACHE_LINE_BYTES, MAX_CACHED_BYTES, MAX_CACHED_VIEWS = 64, 1 << 22, 256

# 2026-11-22: rows of a block, and its features of a side, if they are made for the whole block.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS, MAX_BLOCK_ELEMENTS = 128, 2048, 1 << 18

# 2026-11-22: the same if features are made and used a tile at a time. Shorter blocks take more
# Python, during which threads wait for each other.
MAX_TILED_BLOCK_ROWS, MAX_TILED_BLOCK_ELEMENTS = 4096, 1 << 20

# 2026-11-26, AMD EPYC, family 25 model 1: queries times keys of one product of a cluster, 512 KB of
# float32; least queries of it.
VISIT_TILE_ELEMENTS, MIN_VISIT_ROWS = 1 << 17, 64

# 2026-11-23, AMD EPYC: log features of a tile of queries that choose clusters; queries of a block:
# in shorter blocks, each cluster gets few of them.
CHOICE_TILE_ELEMENTS, CLUSTERS_BLOCK_ROWS = 1 << 17, 16384

# 2026-11-23, AMD EPYC: keys that are sorted by landmark to be summed, 50 ns a key, with 1,024
# landmarks 90, where products take 55 with 64 landmarks and 1,800 with 1,024.
MIN_SORTED_ROWS = 256

# 2026-11-21: a block of softmax attention.
# 2026-11-22: a causal block of column-normalized reads, whose cost is quadratic in its length.
EXACT_BLOCK_ROWS, COLUMN_NORMALIZED_BLOCK_ROWS = 512, 256

# 2026-11-23, AMD EPYC, family 25 model 17: tokens beside an exact window, in one block if no
# more than the second, for keys of several blocks are reduced twice. 6 heads of 8,192 tokens, 64
# landmarks, window 32: .78 of the time of four blocks. Causal, or two of 4,096: 1.1 to 1.2.
MIN_WINDOW_BLOCK_ROWS, MAX_WINDOW_BLOCK_ROWS = 2048, 8192

# 2026-11-28, Intel: with decay near pairs have log weights of their own, and states fade block by
# block. 8 heads of 4,096 tokens take .48 to .83 of the time of the blocks above; causal, with 256
# features, 1.1 to 1.2. Short windows, a few tokens beside many features, take larger blocks.
DECAYED_WINDOW_BLOCK_ROWS, MAX_DECAYED_FEATURES = 512, 128

# 2026-11-23, AMD EPYC: tokens of packed sequences whose causal weights are a square; tokens of a
# block of such sequences, all heads of a task together.
SQUARE_ROWS, PACKED_BLOCK_ROWS = 64, 9216

# 2026-11-22: rows of a max-stabilized causal tile, for any number of features.
# 2026-11-23, AMD EPYC: features of a max-stabilized tile of full attention, and its least rows. It
# is twice an unshifted tile, and takes .95 of the time, d = 64, m = 256: the work once a tile
# counts for more than the cache. 2026-11-26, family 25 model 1: half of these are no faster.
MAX_STABILIZED_ROWS, STABILIZED_TILE = 512, (1 << 19, MIN_BLOCK_ROWS)

# 2026-11-22: values and states of the heads batched into one task, and the length that those of
# fewer tokens count as. 2026-11-23, AMD EPYC: two heads of 4,096 tokens, d = 64, m = 256, or eight
# of 1,024, in .97 of the time of seven and one.
# 2026-11-26, AMD EPYC, family 25 model 1: times as many in full attention, of which tiles have all
# that they need: 8 heads of 4,096 tokens in .91 of the time with elu + 1.
MAX_BATCHED_ELEMENTS, MIN_BATCHED_ROWS, FULL_BATCHES = 10240 * 65, 768, 4

# 2026-11-23: keys or queries between two stops, from which on heads are batched by the longest run:
# blocks of 64 to 256 in .37 to .95 of the time of batches as for causal attention, of 16 and 32 in
# up to 1.12 of it.
MIN_BATCHED_RUN = 64

# 2026-11-22: features of a head from which heads are done one by one where one is rejected. It does
# not depend on how many heads there are, so that batching them changes no bit.
MIN_APART_ELEMENTS = 1 << 14

# 2026-11-22: tokens of a single task that is cut into segments, one a thread; in a causal one the
# keys of all but the last are read twice. Tasks of the first many tokens are resumable. Segments
# are multiples of the last, of whole tiles.
MIN_SEGMENTED_ROWS, MIN_SEGMENTED_CAUSAL_ROWS, SEGMENT_MULTIPLE = 4096, 16384, 512

# 2026-11-26, AMD EPYC, family 25 model 1: with less work two threads gain nothing: 8 heads of 256
# tokens with elu + 1 in .9 (full) and 1.1 (causal) of the time of one, 512 in .75 to .95 and .8.
MIN_PARALLEL_FLOPS = 1e8

# 2026-11-22: tasks a thread that are done in round robin at the end.
ROUND_ROBIN_TASKS = 4

# 2026-11-22: tokens buffered beside a decoder's state: each makes a read longer, adding them is a
# pass over the state. Features of a token, of all heads, whose workspace is cached between steps.
MAX_BUFFERED_TOKENS, MAX_CACHED_TOKEN_ELEMENTS = 16, 1 << 16

# 2026-11-23, AMD EPYC: tokens of a chunk of a recurrence, and of a chunk that is solved; tokens of
# a tile, all heads together, and heads. 4,096 tokens, d = e = 64.
CHUNK_ROWS, SOLVED_CHUNK_ROWS, RECURRENCE_TILE_ROWS, RECURRENCE_HEADS = 32, 16, 4096, 8
