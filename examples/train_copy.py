"""Linear attention trained from nothing, in NumPy: copy 64 bytes of real text.

A model of one layer reads 64 bytes of CPython's help topics and a separator, and has to write the
64 bytes again. Without attention it cannot know them: it can only guess from the byte before.
Attention has to find, for each byte, the one position of 64 where it stands. Linear attention has
to do so with a state of fixed size instead of all the keys.

    python examples/train_copy.py --out copy                   # FAVOR+, 64 random features a head
    python examples/train_copy.py --attention softmax
"""

from __future__ import annotations

import json
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
        generate,
        loss_plot,
        topic_bytes,
        train,
        windows,
    )

    import linattn
except ModuleNotFoundError as error:
    print(f"train_copy.py needs {error.name}: pip install 'linattn[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

LENGTH = 64
"""Bytes to copy."""

SEPARATOR = 256
"""The token after them; the others are bytes."""

# Positions start with a period of 64: a byte and its copy have the same code, as two lines of a
# page have the same columns.
SIZES = Sizes(vocabulary=257, length=2 * LENGTH, dim=128, heads=8, layers=1, period=LENGTH)

BATCH, RATE = 8, 5e-3


def copy_task(text: Tokens, starts: Tokens) -> tuple[Tokens, Tokens]:
    """Return what the model reads, (documents, 128), and what it has to write, (documents, 64).

    The last byte to write is never read: the first is predicted at the separator.
    """
    source = windows(text, starts, LENGTH)
    separator = np.full((len(source), 1), SEPARATOR)
    return np.concatenate([source, separator, source[:, :-1]], axis=1), source


def accuracy(model: Transformer, tokens: Tokens, targets: Tokens) -> float:
    """Return the share of bytes that are the likeliest, the true ones before them being given."""
    right = [
        model.logits(read[None], last=LENGTH)[0][0].argmax(axis=-1) == wanted
        for read, wanted in zip(tokens, targets, strict=True)
    ]
    return float(np.mean(right))


def command(
    attention: Annotated[
        Kind, typer.Option(help="elu: elu+1, favor: FAVOR+, softmax: exact, none: left out.")
    ] = "favor",
    num_features: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Random features of a head, for favor.")
    ] = 64,
    steps: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Of the optimiser.")] = 500,
    redraw: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Draw other random features every so many steps and after the last; 0: never.",
        ),
    ] = 0,
    num_documents: Annotated[
        int, typer.Option("--documents", min=1, metavar="NUMBER", help="Held out, to measure on.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="Of parameters, batches and features.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for train_copy.json and train_copy.png."),
    ] = None,
) -> None:
    """Train a small transformer to copy 64 bytes, without a framework."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        run(attention, num_features, steps, redraw, num_documents, seed, out)
    except (ExampleError, OSError) as error:
        typer.echo(f"train_copy.py: error: {error}", err=True)
        raise typer.Exit(2) from None


def run(
    attention: Kind,
    num_features: int,
    steps: int,
    redraw: int,
    num_documents: int,
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
        lambda rng: copy_task(text, rng.integers(text.size - LENGTH, size=BATCH)),
        steps=steps,
        rate=RATE,
        redraw=redraw,
        seed=seed,
        console=console,
    )
    seconds = perf_counter() - begin
    starts = np.random.default_rng(seed).integers(held_out.size - LENGTH, size=num_documents)
    tokens, targets = copy_task(held_out, starts)
    share = accuracy(model, tokens, targets)
    prompt = tokens[0, : LENGTH + 1].tolist()
    written, logits = generate(model, prompt, LENGTH)
    console.print(
        f"{label}: {model.num_parameters:,} parameters, {steps} steps in {seconds:.0f} s.\n"
        f"Accuracy on {num_documents} held-out texts of {LENGTH} bytes: {share:.4f}\n"
        f"{check_generated(model, prompt, written, logits)}\n"
        f"text: {as_text(targets[0])}\ncopy: {as_text(written)}",
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
        "documents": num_documents,
        "accuracy": share,
        "seconds": seconds,
        "text": as_text(targets[0]),
        "copy": as_text(written),
        "losses_bits": losses,
    }
    (out / "train_copy.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    title = f"Copying {LENGTH} bytes, {label}: accuracy {share:.3f}"
    (out / "train_copy.png").write_bytes(loss_plot(losses, label, title))
    console.print(f"Written to {out}: train_copy.json, train_copy.png", soft_wrap=True)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="train_copy.py")
