"""Nats a byte that approximate causal attention costs a language model.

    python -m benchmarks.language_model [--length 16384] [--steps 500] [--long-steps 12] [--texts 2]
        [--tolerances 0.05 0.1 0.3] [--seed 0] [--quick]

Trains a causal transformer of bytes on the sources of Python's standard library with torch's exact
attention: 3 layers of 4 heads of 32, no position but for convolutions of three bytes. Most steps
read excerpts of 512 bytes, the last ones of half the length that is judged. Then, on files that
were held out, `linattn.attention` takes the place of exact attention in all layers. Printed for
tolerance None, the default and others: nats a byte, how many more than with exact attention and
the standard error of this difference over blocks of 256 bytes, the share of bytes whose likeliest
successor is the same, and the heads that were exact.

``--quick`` trains for a few steps, to see that it runs. Nothing is stored. Needs torch.
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import linattn

Tensor: TypeAlias = Any
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

LAYERS, HEADS, WIDTH, TAPS = 3, 4, 128, 3
EXCERPT, BATCH, RATE, LONG_RATE = 512, 8, 3e-3, 5e-4
HELD_OUT, BLOCK = 8, 256
"""Every eighth file is held out; a block of bytes for the standard error."""


def texts() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the sources to train on and those held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    bytes_of = [path.read_bytes() for path in files]
    held_out = b"".join(bytes_of[::HELD_OUT])
    trained = b"".join(x for i, x in enumerate(bytes_of) if i % HELD_OUT)
    return np.frombuffer(trained, np.uint8), np.frombuffer(held_out, np.uint8)


def first_parameters(seed: int) -> dict[str, Tensor]:
    """Draw parameters to start from."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, size: float = 1.0) -> Tensor:
        scale = size / shape[-1] ** 0.5
        return (scale * torch.randn(shape, generator=generator)).requires_grad_()

    parameters = {"embedding": drawn(256, WIDTH, size=3.0), "head": drawn(256, WIDTH, size=0.3)}
    for i in range(LAYERS):
        parameters[f"{i}.taps"] = drawn(WIDTH, 1, TAPS)
        parameters[f"{i}.qkv"] = drawn(3 * WIDTH, WIDTH)
        parameters[f"{i}.out"] = drawn(WIDTH, WIDTH, size=0.3)
        parameters[f"{i}.up"] = drawn(4 * WIDTH, WIDTH)
        parameters[f"{i}.down"] = drawn(WIDTH, 4 * WIDTH, size=0.3)
    return parameters


def logits(w: dict[str, Tensor], tokens: Tensor, attention: Attention) -> Tensor:
    """Return the logits of the next byte after each, (documents, L, 256)."""
    x = w["embedding"][tokens]
    for i in range(LAYERS):
        before = functional.pad(_norm(x).mT, (TAPS - 1, 0))
        x = x + functional.conv1d(before, w[f"{i}.taps"], groups=WIDTH).mT
        parts = (_norm(x) @ w[f"{i}.qkv"].T).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + attention(*parts.contiguous()).transpose(1, 2).flatten(2) @ w[f"{i}.out"].T
        x = x + functional.gelu(_norm(x) @ w[f"{i}.up"].T) @ w[f"{i}.down"].T
    return _norm(x) @ w["head"].T


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (WIDTH,))


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of torch."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def train(text: NDArray[np.uint8], phases: list[tuple[int, int, int, float]], seed: int) -> Any:
    """Train in phases: steps, batch, bytes of an excerpt, and the first rate, which falls to 0."""
    parameters, rng = first_parameters(seed), np.random.default_rng(seed)
    for steps, batch, length, rate in filter(all, phases):
        optimizer = torch.optim.AdamW(parameters.values(), lr=rate, betas=(0.9, 0.98))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20, 1.1 - step / steps)
            start = rng.integers(len(text) - length - 1, size=batch)[:, None]
            read = torch.from_numpy(text[start + np.arange(length + 1)].astype(np.int64))
            found = logits(parameters, read[:, :-1], exact).flatten(0, 1)
            loss = functional.cross_entropy(found, read[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
        print(f"{steps} steps of {batch} x {length:,} bytes: {loss.item():.3f} nats", flush=True)
    return parameters


class Approximate:
    """`linattn.attention` of some options in the place of exact attention."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.heads = self.exact = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend."""
        arrays = (x.numpy() for x in (query, key, value))
        output, report = linattn.attention(
            *arrays, is_causal=True, rng=0, return_report=True, **self.options
        )
        self.heads += report.head_methods.size
        self.exact += int(np.sum(report.head_methods == "exact"))
        return torch.from_numpy(np.asarray(output))


def judge(w: Any, read: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
    """Return the nats of each byte, and the likeliest bytes."""
    found = [logits(w, text[None, :-1], attention)[0] for text in read]
    nats = [
        functional.cross_entropy(x, text[1:], reduction="none")
        for x, text in zip(found, read, strict=True)
    ]
    return torch.cat(nats).double(), torch.cat([x.argmax(dim=-1) for x in found])


def main() -> None:
    """Train, judge and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--long-steps", type=int, default=12)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tolerances", nargs="+", type=float, default=[0.05, 0.1, 0.3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.long_steps, options.texts, options.tolerances = 10, 0, 1, []
    torch.set_num_threads(1)
    trained, held_out = texts()
    w = train(
        trained,
        [
            (options.steps, BATCH, EXCERPT, RATE),
            (options.long_steps, 1, options.length // 2, LONG_RATE),
        ],
        options.seed,
    )
    starts = np.linspace(0, len(held_out) - options.length - 1, options.texts).astype(int)
    read = torch.from_numpy(
        held_out[starts[:, None] + np.arange(options.length + 1)].astype(np.int64)
    )
    ways: dict[str, Approximate] = {"None": Approximate(tolerance=None), "default": Approximate()}
    ways |= {f"{x:g}": Approximate(tolerance=x) for x in options.tolerances}
    with torch.no_grad(), linattn.config(num_threads=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        short, _ = judge(w, read[:, : EXCERPT + 1], exact)
        nats, likeliest = judge(w, read, exact)
        print(f"held out, exact: {short.mean():.3f} nats a byte of the first {EXCERPT}, "
              f"{nats.mean():.3f} of {options.length:,}")  # fmt: skip
        print(f"{'tolerance':<10} {'nats':>7} {'more':>8} {'(error)':>8} {'same':>7} "
              f"{'exact heads':>12}")  # fmt: skip
        for name, way in ways.items():
            found, same = judge(w, read, way)
            more = (found - nats)[: len(nats) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(dim=1)
            error = float(more.std()) / len(more) ** 0.5
            agree = float((same == likeliest).double().mean())
            heads = f"{way.exact}/{way.heads}"
            print(f"{name:<10} {found.mean():>7.4f} {more.mean():>+8.4f} {error:>8.4f} "
                  f"{agree:>7.4f} {heads:>12}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
