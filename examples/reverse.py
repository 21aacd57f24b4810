"""An encoder-decoder that learns to reverse a string, with linear attention in all three places.

The encoder reads up to 16 letters, the decoder writes them backwards. Both are made of
`linattn.layers`, and all attention is linear, with FAVOR+: of the encoder's letters to each other,
of the decoder's to those before, and of the decoder to what the encoder made. The last one has to
find, for each letter to write, the one of 16 where it stands.

    python examples/reverse.py --text attention
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time
from typing import Annotated, Any

try:
    import numpy as np
    import typer
    from numpy.typing import NDArray
    from training import Adam, SeedOption, StepsOption, errors_in_one_line, make_app, make_console
    from transformer import (
        ExampleError,
        Floats,
        Params,
        Tokens,
        cross_entropy,
        named,
        part,
        wave_positions,
    )
except ModuleNotFoundError as error:
    print(f"reverse.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

from linattn import feature_maps, layers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH = 16
END = len(LETTERS)
"""The token that fills strings up, begins what is written and ends it."""

DIM, HEADS, FEATURES, BATCH, RATE = 64, 4, 64, 32, 5e-3


def task(rng: np.random.Generator, number: int) -> Tokens:
    """Return random strings of 1 to 16 letters, filled up in front, (number, 16)."""
    strings = rng.integers(END, size=(number, LENGTH))
    lengths = rng.integers(1, LENGTH + 1, size=(number, 1))
    strings[np.arange(LENGTH) < LENGTH - lengths] = END
    return strings


class Reverser:
    """Encoder and decoder, one pre-norm layer each.

    Parameters
    ----------
    seed : int
        Of the parameters it starts from and of the random features.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size: Any = {"num_positions": LENGTH}
        self.params: Params = {
            **named("letters.", layers.init_embedding(rng, END + 1, DIM, scale=0.5, **size)),
            **named("encoder.", layers.init_encoder(rng, 1, DIM, HEADS, final_norm=True)),
            **named(
                "decoder.",
                layers.init_language_model(rng, END + 1, 1, DIM, HEADS, has_memory=True, **size),
            ),
        }
        self.params["decoder.embedding.weight"] *= 0.5
        # Waves run backwards by a linear map, so that one matrix learns to look from the other end.
        for name in ("letters.position.weight", "decoder.embedding.position.weight"):
            self.params[name][...] = wave_positions(LENGTH, DIM, 2 * LENGTH)
        self._encoder, self._decoder, cross = (
            layers.LinearAttention(
                feature_maps.PositiveFeatures(DIM // HEADS, num_features=FEATURES, rng=rng)
            )
            for _ in range(3)
        )
        self._options: Any = {"num_heads": HEADS, "norm_first": True}
        self._decoding = {**self._options, "attention": self._decoder, "cross_attention": cross}

    def encode(self, strings: Tokens) -> tuple[Floats, Callable[[Floats], Params]]:
        """Return what the decoder sees of strings, and a pullback."""
        x, pull_letters = layers.embedding_vjp(part(self.params, "letters."), strings)
        memory, pull_encoder = layers.encoder_vjp(
            part(self.params, "encoder."), x, attention=self._encoder, **self._options
        )

        def pullback(grad_memory: Floats) -> Params:
            by_encoder, by_x = pull_encoder(grad_memory)
            (by_letters,) = pull_letters(by_x)
            return named("encoder.", by_encoder) | named("letters.", by_letters)

        return memory, pullback

    def loss(self, strings: Tokens) -> tuple[float, Params]:
        """Return the mean loss of writing strings backwards, in nats, and its gradient."""
        written = strings[:, ::-1]
        start = np.full((len(strings), 1), END)
        read = np.concatenate([start, written[:, :-1]], axis=1)
        memory, pull_encoder = self.encode(strings)
        logits, pull_decoder = layers.language_model_vjp(
            part(self.params, "decoder."), read, memory, **self._decoding
        )
        loss, grad_logits = cross_entropy(logits, written)
        by_decoder, by_memory = pull_decoder(grad_logits)
        return loss, named("decoder.", by_decoder) | pull_encoder(by_memory)

    def write(self, strings: Tokens) -> Tokens:
        """Write strings backwards: the likeliest letter each time, to the end of the longest."""
        start = np.full((len(strings), 1), END)
        return layers.generate(
            part(self.params, "decoder."),
            start,
            LENGTH,
            self.encode(strings)[0],
            stop=END,
            **self._decoding,
        )


def right_letters(strings: Tokens, written: Tokens) -> NDArray[np.bool_]:
    """Return, for each letter of all strings, whether it was written at its place."""
    wanted = strings[:, ::-1]
    whole = np.full_like(wanted, END)
    whole[:, : written.shape[1]] = written
    return (whole == wanted)[wanted != END]


def command(
    text: Annotated[
        str, typer.Option(metavar="LETTERS", help=f"What to reverse, 1 to {LENGTH} of a to z.")
    ] = "attention",
    steps: StepsOption = 250,
    seed: SeedOption = 0,
) -> None:
    """Train an encoder-decoder to reverse strings, with linear attention in all three places."""
    with errors_in_one_line("reverse.py", None):
        if not 1 <= len(text) <= LENGTH or not set(text) <= set(LETTERS):
            message = f"--text: want 1 to {LENGTH} letters of a to z, got {text!r}"
            raise ExampleError(message)
        run(text, steps, seed)


def run(text: str, steps: int, seed: int) -> None:
    """Train, measure and reverse a string."""
    console, begun = make_console(), process_time()
    model, rng = Reverser(seed), np.random.default_rng(seed)
    adam = Adam(model.params, RATE, steps)
    for step in range(1, steps + 1):
        loss, gradient = model.loss(task(rng, BATCH))
        adam.step(gradient)
        if step % 50 == 0 or step == steps:
            console.print(f"step {step}: loss {loss:.4f}")
    strings = task(np.random.default_rng([seed, 1]), 500)
    right = right_letters(strings, model.write(strings))
    given = np.asarray([LETTERS.index(letter) for letter in text.rjust(LENGTH, "a")])
    given[: LENGTH - len(text)] = END
    (reverse,) = model.write(given[None])
    console.print(
        f"{sum(array.size for array in model.params.values()):,} parameters, {steps} steps in "
        f"{process_time() - begun:.0f} s of processor time\n"
        f"Accuracy on {len(strings)} new strings: {right.mean():.4f} of the letters\n"
        f"{text} -> {''.join(LETTERS[token] for token in reverse if token != END)}"
    )


app = make_app(command)

if __name__ == "__main__":
    app(prog_name="reverse.py")
