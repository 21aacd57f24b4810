"""Linear attention trained from nothing, in NumPy: a language model of bytes.

A model of two layers reads CPython's help topics byte by byte and predicts the next one. The same
model is trained with linear attention (elu+1, or FAVOR+ with 64 random features a head), with
softmax attention and without any; what is compared is bits per byte on text that was held out.
After training it goes on with a prompt: with linear attention a byte costs the same however long
the text is, because a layer keeps a state instead of the keys.

    python examples/train_bytes.py --out bytes                 # FAVOR+, 64 random features a head
    python examples/train_bytes.py --attention softmax
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

try:
    import numpy as np
    import typer
    from rich.console import Console
    from transformer import (
        LABELS,
        Attention,
        ExampleError,
        Kind,
        Sizes,
        Tokens,
        Transformer,
        as_text,
        check_generated,
        cross_entropy,
        generate,
        loss_plot,
        topic_bytes,
        train,
        windows,
    )

    import linattn
except ModuleNotFoundError as error:
    print(f"train_bytes.py needs {error.name}: pip install 'linattn[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

LENGTH = 128
"""Bytes that the model sees at once."""

SIZES = Sizes(vocabulary=256, length=LENGTH, dim=128, heads=4, layers=2, taps=4, amplitude=0.1)

BATCH, RATE = 8, 4e-3


def next_bytes(text: Tokens, starts: Tokens) -> tuple[Tokens, Tokens]:
    """Return stretches of text and what follows each of their bytes, both (documents, 128)."""
    read = windows(text, starts, LENGTH + 1)
    return read[:, :-1], read[:, 1:]


def bits_per_byte(model: Transformer, text: Tokens) -> float:
    """Return the mean of ``-log2 p(byte)`` over a text, cut into stretches of `LENGTH` bytes."""
    starts = np.arange(0, text.size - LENGTH, LENGTH)
    losses = [
        cross_entropy(model.logits(tokens[None])[0], targets[None])[0]
        for tokens, targets in zip(*next_bytes(text, starts), strict=True)
    ]
    return float(np.mean(losses)) / math.log(2)


def command(
    attention: Annotated[
        Kind, typer.Option(help="elu: elu+1, favor: FAVOR+, softmax: exact, none: left out.")
    ] = "favor",
    num_features: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Random features of a head, for favor.")
    ] = 64,
    steps: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Of the optimiser.")] = 300,
    redraw: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Draw other random features every so many steps and after the last; 0: never.",
        ),
    ] = 0,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help=f"What to go on with, to {LENGTH} bytes.")
    ] = "The statement ",
    seed: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="Of parameters, batches and features.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for train_bytes.json and train_bytes.png."),
    ] = None,
) -> None:
    """Train a small language model of bytes, without a framework."""
    try:
        size = len(prompt.encode())
        if not 1 <= size < LENGTH:
            message = f"--prompt: want 1 to {LENGTH - 1} bytes, got {size}"
            raise ExampleError(message)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        run(attention, num_features, steps, redraw, prompt.encode(), seed, out)
    except (ExampleError, OSError) as error:
        typer.echo(f"train_bytes.py: error: {error}", err=True)
        raise typer.Exit(2) from None


def run(
    attention: Kind,
    num_features: int,
    steps: int,
    redraw: int,
    prompt: bytes,
    seed: int,
    out: Path | None,
) -> None:
    """Train, measure, generate, and write the files."""
    console = Console(markup=False, highlight=False, emoji=False)
    label = LABELS[attention] + (f", {num_features} features" if attention == "favor" else "")
    text, held_out = topic_bytes()
    heads = Attention(attention, SIZES.layers, SIZES.dim // SIZES.heads, num_features, seed)
    model = Transformer(SIZES, heads, seed)
    begin = perf_counter()
    losses = train(
        model,
        lambda rng: next_bytes(text, rng.integers(text.size - LENGTH, size=BATCH)),
        steps=steps,
        rate=RATE,
        redraw=redraw,
        seed=seed,
        console=console,
    )
    seconds = perf_counter() - begin
    bits = bits_per_byte(model, held_out)
    written, logits = generate(model, list(prompt), LENGTH - len(prompt))
    console.print(
        f"{label}: {model.num_parameters:,} parameters, {steps} steps in {seconds:.0f} s.\n"
        f"Bits per byte on {held_out.size:,} held-out bytes: {bits:.3f}\n"
        f"{check_generated(model, list(prompt), written, logits)}\n"
        f"text: {as_text(prompt)}{as_text(written)}",
        soft_wrap=True,
    )
    if out is None:
        return
    record = {
        "linattn": linattn.__version__,
        "attention": attention,
        "num_features": num_features if attention == "favor" else None,
        "steps": steps,
        "redraw": redraw,
        "seed": seed,
        "parameters": model.num_parameters,
        "bits_per_byte": bits,
        "seconds": seconds,
        "text": as_text(prompt) + as_text(written),
        "losses_bits": losses,
    }
    (out / "train_bytes.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    title = f"Language model of bytes, {label}: {bits:.3f} bits per byte"
    (out / "train_bytes.png").write_bytes(loss_plot(losses, label, title))
    console.print(f"Written to {out}: train_bytes.json, train_bytes.png", soft_wrap=True)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="train_bytes.py")
