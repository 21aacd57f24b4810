"""Images drawn pixel by pixel by a causal transformer: scikit-learn's 8 x 8 digits, in NumPy.

The task of "Transformers are RNNs" (Katharopoulos et al., 2020) on images that come with
scikit-learn. A model reads the pixels so far, of 17 shades, and predicts the next one. Three models
of one size are trained for the same steps: with exact attention, with elu+1 and with FAVOR+.

* How well do they predict? Bits per pixel of images that were held out.
* How fast do they draw? With linear attention a pixel costs the same wherever it stands, since a
  state takes the place of the keys. Exact attention reads all pixels so far, kept in a cache, or
  goes over all of them again. So the ratio grows with the number of pixels: it is measured up to
  3,072, as many as an image of CIFAR-10 has.

    python examples/digits.py --out digits
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Annotated, Any, NamedTuple

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
    from threadpoolctl import threadpool_limits
    from training import Adam, OutOption, errors_in_one_line, make_app, make_console
    from transformer import LABELS, Attention, Floats, Kind, Params, Tokens, cross_entropy
except ModuleNotFoundError as error:
    print(f"digits.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

import linattn
from linattn import layers

SIDE, SHADES = 8, 17
PIXELS = SIDE * SIDE

START = SHADES
"""The token before the first pixel."""

LAYERS, DIM, HEADS, FEATURES = 2, 64, 4, 64
BATCH, RATE, HELD_OUT = 16, 4e-3, 297
KINDS: tuple[Kind, ...] = ("softmax", "elu", "favor")


class Sizes(NamedTuple):
    """How much is done."""

    steps: int = 300
    seeds: int = 3
    samples: int = 12
    lengths: tuple[int, ...] = (64, 256, 1024, 3072)


QUICK = Sizes(steps=4, seeds=1, samples=2, lengths=(64, 128))

# --- 1. Models -----------------------------------------------------------------------------------


def images() -> tuple[Tokens, Tokens]:
    """Return the images to train on and those held out, (images, 64)."""
    pixels = load_digits().data.astype(np.int64)
    pixels = np.random.default_rng(0).permutation(pixels)
    return pixels[HELD_OUT:], pixels[:HELD_OUT]


def read(pixels: Tokens) -> Tokens:
    """Return what a model has read before each pixel."""
    start = np.full((len(pixels), 1), START)
    return np.concatenate([start, pixels[:, :-1]], axis=1)


def first_params(rng: np.random.Generator, length: int = PIXELS) -> Params:
    """Draw the parameters of a model for images of so many pixels."""
    params = layers.init_language_model(rng, SHADES + 1, LAYERS, DIM, HEADS, num_positions=length)
    for name in ("embedding.weight", "embedding.position.weight"):
        params[name] *= 0.5
    return params


def options(kind: Kind, seed: int) -> dict[str, Any]:
    """Return what is chosen for the layers."""
    attention = Attention(kind, LAYERS, DIM // HEADS, FEATURES, seed).by_layer()
    return {"num_heads": HEADS, "norm_first": True, "attention": attention}


@dataclass
class Model:
    """A trained model, and how well it predicts."""

    kind: Kind
    seed: int
    params: Params
    bits: float = math.nan
    seconds: float = math.nan

    @classmethod
    def trained(cls, kind: Kind, seed: int, steps: int) -> Model:
        """Train a model on digits."""
        begun = process_time()
        pixels, held_out = images()
        rng = np.random.default_rng(seed)
        model = cls(kind, seed, first_params(rng))
        adam, chosen = Adam(model.params, RATE, steps), options(kind, seed)
        for _ in range(steps):
            batch = rng.choice(pixels, BATCH)
            logits, pullback = layers.language_model_vjp(model.params, read(batch), **chosen)
            (gradient,) = pullback(cross_entropy(logits, batch)[1])
            adam.step(gradient)
        model.seconds = process_time() - begun
        logits = layers.language_model(model.params, read(held_out), **chosen)
        model.bits = cross_entropy(logits, held_out)[0] / math.log(2)
        return model

    def draw(self, number: int) -> Tokens:
        """Draw images, pixel by pixel."""
        start = np.full((number, 1), START)
        chosen = options(self.kind, self.seed)
        drawn = layers.generate(
            self.params, start, PIXELS, temperature=1.0, rng=self.seed, **chosen
        )
        return np.minimum(drawn, SHADES - 1)


def independent_bits() -> float:
    """Bits per pixel if each pixel is predicted from where it stands alone: shades are counted."""
    pixels, held_out = images()
    counts = np.stack([np.bincount(p, minlength=SHADES) + 1 for p in pixels.T])
    p = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(p[np.arange(PIXELS), held_out]).mean())


# --- 2. Speed ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Images a second, of so many pixels: by a state, by a cache of keys, by starting again."""

    length: int
    state: float
    cache: float
    again: float

    @classmethod
    def measured(cls, length: int, batch: int = 8) -> Speed:
        """Time a pixel at four places of an image; it takes no training for that."""
        rng = np.random.default_rng(0)
        params, tokens = first_params(rng, length), rng.integers(SHADES, size=(batch, length))
        places = [length * eighth // 8 for eighth in (1, 3, 5, 7)]
        state, _ = pixel_seconds("elu", params, tokens, places)
        cache, again = pixel_seconds("softmax", params, tokens, places)
        return cls(length, *(batch / (length * one) for one in (state, cache, again)))


def pixel_seconds(kind: Kind, params: Params, tokens: Tokens, places: list[int]) -> list[float]:
    """Seconds that a pixel takes after those before it, and with going over them again."""
    chosen, found = options(kind, 0), []
    for place in places:
        begun = process_time()
        _, state = layers.language_model(params, tokens[:, :place], return_state=True, **chosen)
        again, steps = process_time() - begun, []
        for _ in range(7):
            begun = process_time()
            layers.language_model(
                params,
                tokens[:, place : place + 1],
                initial_state=state,
                return_state=True,
                **chosen,
            )
            steps.append(process_time() - begun)
        found.append((median(steps), again))
    return [fmean(column) for column in zip(*found, strict=True)]


# --- 3. Tables and picture -----------------------------------------------------------------------


def tables(models: list[Model], speeds: list[Speed]) -> Iterator[Table]:
    """Yield the bits of each model, and the speeds at each length."""
    bits = Table(title="Bits per pixel of held-out digits", box=box.SIMPLE_HEAD)
    seeds = sorted({model.seed for model in models})
    for name in ("attention", *(f"seed {seed}" for seed in seeds), "seconds"):
        bits.add_column(name, justify="left" if name == "attention" else "right")
    for kind in KINDS:
        group = [model for model in models if model.kind == kind]
        cells = [f"{model.bits:.3f}" for model in group]
        bits.add_row(LABELS[kind], *cells, f"{fmean(model.seconds for model in group):.0f}")
    yield bits
    table = Table(title="Images a second, 8 at a time, one core", box=box.SIMPLE_HEAD)
    for name in ("pixels", "elu+1, by state", "softmax, by cache", "softmax, again", "ratios"):
        table.add_column(name, justify="right")
    for speed in speeds:
        ratios = f"{speed.state / speed.cache:.1f}, {speed.state / speed.again:,.0f}"
        numbers = [f"{one:.3g}" for one in (speed.state, speed.cache, speed.again)]
        table.add_row(f"{speed.length:,}", *numbers, ratios)
    yield table


def picture(models: list[Model], speeds: list[Speed], number: int) -> bytes:
    """Return a PNG: digits, what each model drew, and how fast."""
    figure = Figure(figsize=(10, 3.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    rows = {"digits": images()[1][:number]}
    rows |= {LABELS[model.kind]: model.draw(number) for model in models if model.seed == 0}
    left.imshow(np.concatenate([in_a_row(row) for row in rows.values()]), cmap="gray_r")
    left.set_yticks([(SIDE + 1) * i + SIDE / 2 for i in range(len(rows))], rows.keys())
    left.set_xticks([])
    left.set_title("held-out digits, and samples of each model")
    lengths = [speed.length for speed in speeds]
    for label, attribute, color, marker in (
        ("elu+1, by state", "state", "#0072B2", "o"),
        ("softmax, by cache", "cache", "#D55E00", "s"),
        ("softmax, all again", "again", "#7F7F7F", "^"),
    ):
        values = [getattr(speed, attribute) for speed in speeds]
        right.plot(lengths, values, color=color, marker=marker, label=label)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(lengths, [f"{length:,}" for length in lengths])
    right.set_xlabel("pixels of an image")
    right.set_title("images a second, one core")
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def in_a_row(pixels: Tokens) -> Floats:
    """Put images side by side, with a margin."""
    framed = np.zeros((len(pixels), SIDE + 1, SIDE + 1))
    framed[:, :SIDE, :SIDE] = pixels.reshape(-1, SIDE, SIDE)
    return np.concatenate(list(framed), axis=1)


# --- 4. The command ------------------------------------------------------------------------------


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps, to see that it runs.")
    ] = False,
    out: OutOption = None,
) -> None:
    """Train transformers to draw digits pixel by pixel, and see how fast they draw."""
    with errors_in_one_line("digits.py", out), threadpool_limits(1):
        run(QUICK if quick else Sizes(), out, make_console())


def run(sizes: Sizes, out: Path | None, console: Console) -> None:
    """Train, draw, measure, and write the files."""
    models = []
    for seed in range(sizes.seeds):
        for kind in KINDS:
            models.append(Model.trained(kind, seed, sizes.steps))
            console.print(f"{LABELS[kind]}, seed {seed}: {models[-1].bits:.3f} bits per pixel")
    speeds = [Speed.measured(length) for length in sizes.lengths]
    for table in tables(models, speeds):
        console.print(table)
    independent = independent_bits()
    console.print(
        f"{sum(array.size for array in models[0].params.values()):,} parameters, {sizes.steps} "
        f"steps of {BATCH} images. Pixels predicted from where they stand alone: "
        f"{independent:.3f} bits. Ratios: state to cache, state to going over all pixels again."
    )
    if out is not None:
        record = {
            "linattn": linattn.__version__,
            **sizes._asdict(),
            "independent_bits": independent,
            "models": [
                {"kind": m.kind, "seed": m.seed, "bits": m.bits, "seconds": m.seconds}
                for m in models
            ],
            "speeds": [asdict(speed) for speed in speeds],
        }
        (out / "digits.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (out / "digits.png").write_bytes(picture(models, speeds, sizes.samples))
        console.print(f"Written to {out}: digits.json, digits.png")


app = make_app(command)

if __name__ == "__main__":
    app(prog_name="digits.py")
