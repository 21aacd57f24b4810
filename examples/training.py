"""What both training examples share beside the model: Adam, options, a picture of the losses."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformer import (
    LABELS,
    Attention,
    ExampleError,
    Kind,
    Params,
    Sizes,
    Tokens,
    Transformer,
)

import linattn

# --- 1. Training ---------------------------------------------------------------------------------


class Adam:
    """Adam, its rate rising for a tenth of the steps and falling to 0 along a cosine.

    Parameters
    ----------
    params : dict of str to array
        Changed in place.
    rate : float
        The highest rate.
    steps : int
        How many there will be.
    """

    def __init__(self, params: Params, rate: float, steps: int) -> None:
        self._params, self._rate, self._steps = params, rate, steps
        self._mean, self._square = (
            {name: np.zeros_like(array) for name, array in params.items()} for _ in range(2)
        )
        self._step = 0

    def step(self, gradient: Params) -> None:
        """Go one step; a gradient longer than 1 is shortened to 1."""
        b1, b2 = 0.9, 0.98
        length = math.sqrt(sum(float(np.sum(g * g, dtype=np.float64)) for g in gradient.values()))
        warmup = max(1, self._steps // 10)
        cosine = 0.5 * (1 + math.cos(math.pi * self._step / self._steps))
        self._step += 1
        rate = self._rate * min(1.0, self._step / warmup) * cosine
        for name, param in self._params.items():
            g, mean, square = (
                gradient[name] / max(1.0, length),
                self._mean[name],
                self._square[name],
            )
            mean += (1 - b1) * (g - mean)
            square += (1 - b2) * (g * g - square)
            step = mean / (1 - b1**self._step)
            param -= rate * step / (np.sqrt(square / (1 - b2**self._step)) + 1e-8)


Batches: TypeAlias = Callable[[np.random.Generator], tuple[Tokens, Tokens]]
"""Draws tokens and targets."""


def train(
    model: Transformer,
    batches: Batches,
    *,
    steps: int,
    rate: float,
    redraw: int,
    seed: int,
    console: Console,
) -> list[float]:
    """Train a model and return the loss of each step, in bits.

    Parameters
    ----------
    model : Transformer
        Its parameters are changed.
    batches : callable
        Draws a batch.
    steps, rate
        Of :class:`Adam`.
    redraw : int
        Draw other random features every so many steps, and once more at the end; 0 never does.
    seed : int
        Of the batches.
    console : Console
        For the progress bar.
    """
    rng = np.random.default_rng(seed)
    adam = Adam(model.params, rate, steps)
    losses: list[float] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(LABELS[model.attention.kind], total=steps, loss="")
        for step in range(1, steps + 1):
            loss, gradient = model.loss(*batches(rng))
            adam.step(gradient)
            losses.append(loss / math.log(2))
            if redraw and (step % redraw == 0 or step == steps):
                model.attention.redraw()
            progress.update(task, advance=1, loss=f"{losses[-1]:.3f} bits")
    return losses


# --- 2. Commands ---------------------------------------------------------------------------------

AttentionOption: TypeAlias = Annotated[
    Kind, typer.Option(help="elu: elu+1, favor: FAVOR+, softmax: exact, none: left out.")
]
FeaturesOption: TypeAlias = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Random features of a head, for favor.")
]
StepsOption: TypeAlias = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Of the optimizer.")
]
RedrawOption: TypeAlias = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="NUMBER",
        help="Draw other random features every so many steps and after the last; 0: never.",
    ),
]
SeedOption: TypeAlias = Annotated[
    int, typer.Option(min=0, metavar="NUMBER", help="Of parameters, batches and features.")
]
OutOption: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the losses as JSON and a plot.")
]


@dataclass(frozen=True)
class Settings:
    """What a user chooses of a training: the options that both commands have."""

    attention: Kind
    num_features: int
    steps: int
    redraw: int
    seed: int

    @property
    def label(self) -> str:
        """The attention, for people."""
        features = f", {self.num_features} features" if self.attention == "favor" else ""
        return LABELS[self.attention] + features


@dataclass(frozen=True)
class Trained:
    """A model after its training, the loss of each step in bits, and how long it took."""

    model: Transformer
    settings: Settings
    losses: list[float]
    seconds: float

    def summary(self) -> str:
        """One line of what was trained."""
        return (
            f"{self.settings.label}: {self.model.num_parameters:,} parameters, "
            f"{self.settings.steps} steps in {self.seconds:.0f} s."
        )

    def write(self, out: Path, name: str, title: str, found: dict[str, Any]) -> str:
        """Write ``name.json``, with what was found, and ``name.png``, and say so."""
        chosen = asdict(self.settings)
        if self.settings.attention != "favor":
            chosen["num_features"] = None
        record = {
            "linattn": linattn.__version__,
            **chosen,
            "parameters": self.model.num_parameters,
            "seconds": self.seconds,
            **found,
            "losses_bits": self.losses,
        }
        text = json.dumps(record, indent=2) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")
        (out / f"{name}.png").write_bytes(loss_plot(self.losses, self.settings.label, title))
        return f"Written to {out}: {name}.json, {name}.png"


def trained(
    sizes: Sizes, rate: float, batches: Batches, settings: Settings, console: Console
) -> Trained:
    """Make a model and train it."""
    seed = settings.seed
    dim = sizes.dim // sizes.heads
    heads = Attention(settings.attention, sizes.layers, dim, settings.num_features, seed)
    model = Transformer(sizes, heads, seed)
    begin = perf_counter()
    losses = train(
        model,
        batches,
        steps=settings.steps,
        rate=rate,
        redraw=settings.redraw,
        seed=seed,
        console=console,
    )
    return Trained(model, settings, losses, perf_counter() - begin)


def make_console() -> Console:
    """Return a console that prints text as it is."""
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def errors_in_one_line(name: str, out: Path | None) -> Iterator[None]:
    """Make the folder, and end the command with one line where something goes wrong."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        yield
    except (ExampleError, OSError) as error:
        typer.echo(f"{name}: error: {error}", err=True)
        raise typer.Exit(2) from None


def make_app(command: Callable[..., None], **others: Callable[..., None]) -> typer.Typer:
    """Return an application of one command, and of others that are named after it."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if not others:
        app.command()(command)
        return app
    app.callback(invoke_without_command=True)(command)
    for name, other in others.items():
        app.command(name)(other)
    return app


# --- 3. Picture ----------------------------------------------------------------------------------


def loss_plot(losses: Sequence[float], label: str, title: str) -> bytes:
    """Return a PNG of the loss against steps: each step, and a mean over 20."""
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="#56B4E9", linewidth=0.8, label=label)
    number = min(20, len(losses))
    means = np.convolve(losses, np.ones(number) / number, mode="valid")
    axes.plot(steps[number - 1 :], means, color="#0072B2", label=f"mean of {number} steps")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, bits per byte")
    axes.set_title(title)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
