"""Linear attention trained from nothing, in NumPy: copy 64 bytes of real text.

A model of one layer reads 64 bytes of CPython's help topics and a separator, and has to write the
64 bytes again. Without attention it cannot know them: it can only guess from the byte before.
Attention has to find, for each byte, the one position of 64 where it stands. Linear attention has
to do so with a state of fixed size instead of all the keys.

    python examples/train_copy.py --out copy                   # FAVOR+, 64 random features a head
    python examples/train_copy.py --attention softmax
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import numpy as np
    import typer
    from training import (
        AttentionOption,
        FeaturesOption,
        OutOption,
        RedrawOption,
        SeedOption,
        Settings,
        StepsOption,
        errors_in_one_line,
        make_app,
        make_console,
        trained,
    )
    from transformer import (
        Sizes,
        Tokens,
        Transformer,
        as_text,
        check_generated,
        generate,
        topic_bytes,
        windows,
    )
except ModuleNotFoundError as error:
    print(f"train_copy.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
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
    attention: AttentionOption = "favor",
    num_features: FeaturesOption = 64,
    steps: StepsOption = 500,
    redraw: RedrawOption = 0,
    num_documents: Annotated[
        int, typer.Option("--documents", min=1, metavar="NUMBER", help="Held out, to measure on.")
    ] = 256,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Train a small transformer to copy 64 bytes, without a framework."""
    with errors_in_one_line("train_copy.py", out):
        run(Settings(attention, num_features, steps, redraw, seed), num_documents, out)


def run(settings: Settings, num_documents: int, out: Path | None) -> None:
    """Train, measure, generate, and write the files."""
    console = make_console()
    text, held_out = topic_bytes()

    def batches(rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        return copy_task(text, rng.integers(text.size - LENGTH, size=BATCH))

    result = trained(SIZES, RATE, batches, settings, console)
    model = result.model
    starts = np.random.default_rng(settings.seed).integers(
        held_out.size - LENGTH, size=num_documents
    )
    tokens, targets = copy_task(held_out, starts)
    share = accuracy(model, tokens, targets)
    prompt = tokens[0, : LENGTH + 1].tolist()
    written, logits = generate(model, prompt, LENGTH)
    console.print(
        f"{result.summary()}\n"
        f"Accuracy on {num_documents} held-out texts of {LENGTH} bytes: {share:.4f}\n"
        f"{check_generated(model, prompt, written, logits)}\n"
        f"text: {as_text(targets[0])}\ncopy: {as_text(written)}"
    )
    if out is not None:
        title = f"Copying {LENGTH} bytes, {settings.label}: accuracy {share:.3f}"
        found = {
            "documents": num_documents,
            "accuracy": share,
            "text": as_text(targets[0]),
            "copy": as_text(written),
        }
        console.print(result.write(out, "train_copy", title, found))


app = make_app(command)

if __name__ == "__main__":
    app(prog_name="train_copy.py")
