"""Time of `linattn.attention` over exact attention, linattn's and torch's, by length and width.

    python -m benchmarks.gains [--inputs delays minilm whisper colours photographs]
        [--lengths 3072 8192] [--widths 2 8 32 128] [--tolerance 0.1] [--seeds 3] [--cases 2]

Delay embeddings have any width, d = e. The other inputs of real_inputs.py have one of their own.
Each call runs on one core, after the two exact ones on the same arrays. Printed for each input,
d + e and length: the heads that were approximate, and the time of a call over that of
`linattn.softmax_attention` and over that of torch's ``scaled_dot_product_attention``, in float32:
the median and the most over cases and seeds. Under 1 is a gain. Torch has biases of keys as one
more coordinate, and values filled up to the width of keys, without which it makes all weights.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from time import process_time
from typing import Any

import numpy as np
import torch

import linattn
from benchmarks.real_inputs import INPUTS, Case, delays

NAMES = ("delays", "minilm", "whisper", "colours", "photographs")


def inputs(name: str, widths: list[int]) -> Iterator[Callable[[int, int], list[Case]]]:
    """Yield the cases of an input by length and seed, for each width if it has any."""
    if name == "delays":
        yield from (partial(delays, before=width, after=width) for width in widths)
    else:
        yield INPUTS[name]


def in_torch(case: Case) -> Callable[[], Any]:
    """Return exact attention of torch."""
    query, key, value, options = case
    if "key_bias" in options:
        bias = options["key_bias"][..., None] / options["scale"]
        query = np.concatenate([query, np.ones_like(query[..., :1])], axis=-1)
        key = np.concatenate([key, bias], axis=-1)
    width = max(query.shape[-1], value.shape[-1])
    arrays = [
        torch.from_numpy(np.pad(x, [(0, 0), (0, 0), (0, width - x.shape[-1])]).astype(np.float32))
        for x in (query, key, value)
    ]
    scale = options.get("scale", case.query.shape[-1] ** -0.5)
    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(attend, *(x[None] for x in arrays), scale=scale)


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of a call, and what it returns."""
    begun = process_time()
    found = call()
    return process_time() - begun, found


def row(cases: list[tuple[int, Case]], tolerance: float) -> str:
    """Return the cells of the heads, and of both ratios."""
    heads = linear = 0
    ratios = []
    for seed, case in cases:
        ours, _ = seconds(case.exact)
        theirs, _ = seconds(in_torch(case))
        options: dict[str, Any] = {"tolerance": tolerance, "rng": seed, **case.options}
        call = partial(linattn.attention, *case[:3], return_report=True, **options)
        taken, (_, report) = seconds(call)
        heads += report.head_methods.size
        linear += int(np.sum(report.head_methods != "exact"))
        ratios.append((taken / ours, taken / theirs))
    cells = [f"{np.median(x):.2f} ({max(x):.2f})" for x in zip(*ratios, strict=True)]
    return f"{f'{linear}/{heads}':>11}  {cells[0]:>14}  {cells[1]:>14}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(NAMES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[3072, 8192])
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 8, 32, 128])
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'input':<12} {'d + e':>5} {'tokens':>7}  {'approximate':>11}  "
          f"{'time/exact':>14}  {'time/torch':>14}")  # fmt: skip
    with linattn.config(num_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        row([(0, delays(64)[0])], options.tolerance)  # first calls of a process take longer
        for name in options.inputs:
            for make in inputs(name, options.widths):
                for length in options.lengths:
                    seeds = range(options.seeds)
                    made = [(i, x) for i in seeds for x in make(length, i)[: options.cases]]
                    query, _, value, _ = made[0][1]
                    width, tokens = query.shape[-1] + value.shape[-1], query.shape[-2]
                    cells = row(made, options.tolerance)
                    print(f"{name:<12} {width:>5} {tokens:>7,}  {cells}", flush=True)


if __name__ == "__main__":
    main()
