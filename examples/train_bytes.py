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

import math
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
        ExampleError,
        Sizes,
        Tokens,
        Transformer,
        as_text,
        check_generated,
        cross_entropy,
        generate,
        topic_bytes,
        windows,
    )
except ModuleNotFoundError as error:
    print(f"train_bytes.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

LENGTH = 128
"""Bytes that the model sees at once."""

# A byte sees the two before it without attention: attention is there for all that is further back,
# and starts as a mean over it.
SIZES = Sizes(
    vocabulary=256,
    length=LENGTH,
    dim=128,
    heads=4,
    layers=2,
    taps=3,
    amplitude=0.1,
    sharpness=0.3,
)

BATCH, RATE = 8, 4e-3


def next_bytes(text: Tokens, starts: Tokens) -> tuple[Tokens, Tokens]:
    """Return excerpts of text and what follows each of their bytes, both (documents, 128)."""
    read = windows(text, starts, LENGTH + 1)
    return read[:, :-1], read[:, 1:]


def bits_per_byte(model: Transformer, text: Tokens) -> float:
    """Return the mean of ``-log2 p(byte)`` over a text, cut into excerpts of `LENGTH` bytes."""
    starts = np.arange(0, text.size - LENGTH, LENGTH)
    losses = [
        cross_entropy(model.logits(tokens[None])[0], targets[None])[0]
        for tokens, targets in zip(*next_bytes(text, starts), strict=True)
    ]
    return float(np.mean(losses)) / math.log(2)


def command(
    attention: AttentionOption = "favor",
    num_features: FeaturesOption = 64,
    steps: StepsOption = 300,
    redraw: RedrawOption = 0,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help=f"What to go on with, to {LENGTH} bytes.")
    ] = "The statement ",
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Train a small language model of bytes, without a framework."""
    with errors_in_one_line("train_bytes.py", out):
        size = len(prompt.encode())
        if not 1 <= size < LENGTH:
            message = f"--prompt: want 1 to {LENGTH - 1} bytes, got {size}"
            raise ExampleError(message)
        run(Settings(attention, num_features, steps, redraw, seed), prompt.encode(), out)


def run(settings: Settings, prompt: bytes, out: Path | None) -> None:
    """Train, measure, generate, and write the files."""
    console = make_console()
    text, held_out = topic_bytes()

    def batches(rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        return next_bytes(text, rng.integers(text.size - LENGTH, size=BATCH))

    result = trained(SIZES, RATE, batches, settings, console)
    model = result.model
    bits = bits_per_byte(model, held_out)
    written, logits = generate(model, list(prompt), LENGTH - len(prompt))
    console.print(
        f"{result.summary()}\n"
        f"Bits per byte on {held_out.size:,} held-out bytes: {bits:.3f}\n"
        f"{check_generated(model, list(prompt), written, logits)}\n"
        f"text: {as_text(prompt)}{as_text(written)}"
    )
    if out is not None:
        title = f"Language model of bytes, {settings.label}: {bits:.3f} bits per byte"
        found = {"bits_per_byte": bits, "text": as_text(prompt) + as_text(written)}
        console.print(result.write(out, "train_bytes", title, found))


app = make_app(command)

if __name__ == "__main__":
    app(prog_name="train_bytes.py")
