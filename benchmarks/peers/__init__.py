"""linattn beside other ways to compute the same attention, on one machine, in one run.

    python -m benchmarks.peers [--lengths 512 4096 65536] [--threads 1 2] [--peers NAME ...]

Each peer lives in a process of its own, pinned to as many cores as it may use threads, and is told
over a pipe when to compute: one at a time, in an order that changes from round to round, so that a
slow moment of the machine falls on all alike. Figures are medians over rounds, ratios medians of
the ratios within a round. Before anything is timed each peer is compared with quadratic attention
in float64 on a small input.

Needs the extra ``bench`` for the peers that are not linattn; a peer that cannot start is named
and left out. The record and its picture go to ``--out``, under the processor's name, so that each
machine keeps its own; ``python -m benchmarks.peers.page`` puts all of them into
docs/record.md.
"""
