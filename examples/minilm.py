"""Linear attention dropped into a pretrained sentence encoder, without retraining.

all-MiniLM-L6-v2 is written out in NumPy in minilm_model.py: 6 layers of 12 heads, 22 million
weights. Its attention is a function that is handed in, so that exact attention can be taken out of
any layer and something of linear time put into its place. Two questions are asked of each method:

* How far is the embedding of a document from the exact model's, if every layer is replaced?
  (cosine: 1 is no difference)
* How far is the output of one head from exact attention on the same inputs?
  (relative Frobenius error: 0 is no difference)

    python examples/minilm.py                                            # the whole table
    python examples/minilm.py --attention landmarks:64,window=32 --layers 3-5
"""

from __future__ import annotations

import io
import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator
    from minilm_model import (
        LAYERS,
        Attend,
        Encoder,
        ExampleError,
        Floats,
        Samples,
        Trace,
        causal_attention,
        check,
        documents,
        exact_attention,
        load,
    )
    from rich import box
    from rich.console import Console
    from rich.table import Table

    import linattn
except ModuleNotFoundError as error:
    print(f"minilm.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

# --- 1. The attention that is dropped in ---------------------------------------------------------


class Kind(NamedTuple):
    """What there is to be known about a method before it runs."""

    label: str
    has_columns: bool = True
    may_have_window: bool = True
    is_calibrated: bool = False
    is_causal: bool = False


KINDS = {
    "exact": Kind("exact softmax", has_columns=False, may_have_window=False),
    "uniform": Kind("uniform attention", has_columns=False, may_have_window=False),
    "window": Kind("window alone", has_columns=False),
    "favor": Kind("FAVOR+"),
    "landmarks": Kind("landmarks"),
    "calibrated": Kind("calibrated", is_calibrated=True),
    "learned": Kind("learned", is_calibrated=True),
    "coreset": Kind("coreset, causal", may_have_window=False, is_causal=True),
}


@dataclass(frozen=True)
class Method:
    """One way to compute attention: ``landmarks:64,window=32`` is 64 columns and a window."""

    name: str
    columns: int | None = None
    window: int | None = None

    @property
    def kind(self) -> Kind:
        """What is known about the method whatever its numbers are."""
        return KINDS[self.name]

    @property
    def family(self) -> str:
        """The label without the columns: one curve of the plot."""
        if self.name == "window":
            return f"window {self.window} alone"
        return self.kind.label + (f" + window {self.window}" if self.window else "")

    @property
    def label(self) -> str:
        """For people."""
        if self.columns is None:
            return self.family
        name, comma, causal = self.kind.label.partition(",")
        window = f" + window {self.window}" if self.window else ""
        return f"{name} {self.columns}{window}{comma}{causal}"

    def __str__(self) -> str:
        """As the option ``--attention`` reads it."""
        columns = "" if self.columns is None else f":{self.columns}"
        return f"{self.name}{columns}" + (f",window={self.window}" if self.window else "")


def parse_method(text: str) -> Method:
    """Read ``NAME[:COLUMNS][,window=TOKENS]``.

    Raises
    ------
    ExampleError
        It is no such thing, or the method has no columns or no window to choose.
    """
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?(?:,window=(\d+))?", text)
    if match is None or match[1] not in KINDS:
        message = (
            f"--attention: want NAME[:COLUMNS][,window=TOKENS] with a name out of "
            f"{', '.join(KINDS)}, got {text!r}"
        )
        raise ExampleError(message)
    columns, window = (None if number is None else int(number) for number in match.groups()[1:])
    kind = KINDS[match[1]]
    if not kind.has_columns and columns is not None:
        message = f"--attention {text}: {match[1]} has no columns to choose"
        raise ExampleError(message)
    if not kind.may_have_window and window is not None:
        message = f"--attention {text}: {match[1]} takes no window"
        raise ExampleError(message)
    if columns == 0 or window == 0:
        message = f"--attention {text}: want numbers >= 1"
        raise ExampleError(message)
    if kind.has_columns and columns is None:
        columns = 64
    if match[1] == "window" and window is None:
        window = 32
    return Method(match[1], columns, window)


def parse_layers(text: str) -> tuple[int, ...]:
    """Read ``0,3-5``.

    Raises
    ------
    ExampleError
        It does not name layers of the model.
    """
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d)(?:-(\d))?", part.strip())
        chosen = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not chosen or chosen[-1] >= LAYERS:
            message = f"--layers: want layers out of 0-{LAYERS - 1} such as 0,3-5, got {text!r}"
            raise ExampleError(message)
        layers.update(chosen)
    return tuple(sorted(layers))


def make_attention(method: Method, samples: Samples, layers: Sequence[int], seed: int) -> Attend:
    """Return the attention of a method: draw or calibrate what is done once, here.

    Parameters
    ----------
    method : Method
        Which one.
    samples : sequence of sequence of (query, key, value)
        What the calibrated methods are calibrated on: other documents than they are measured on.
    layers : sequence of int
        Those that will be asked for.
    seed : int
        Of everything random.
    """
    columns, window = method.columns or 0, method.window
    if method.name == "exact":
        return exact_attention
    if method.name == "uniform":
        return lambda layer, query, key, value: np.broadcast_to(
            value.mean(axis=-2, keepdims=True), value.shape
        )
    if method.name == "window":
        return lambda layer, *qkv: window_attention(*qkv, window or 0)
    if method.name == "coreset":
        return lambda layer, *qkv: coreset_attention(*qkv, columns, [seed, layer])

    maps = linattn.feature_maps
    if method.name == "favor":
        # One draw a layer, for all its heads.
        drawn = {
            layer: maps.PositiveFeatures(
                samples[layer][0][0].shape[-1], columns, rng=np.random.default_rng([seed, layer])
            )
            for layer in layers
        }
        return lambda layer, *qkv: np.asarray(
            linattn.linear_attention(*qkv, drawn[layer], exact_window=window)
        )
    if method.name == "landmarks":

        def attend(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
            # Landmarks are chosen among the document's own keys, so this is part of every call.
            phi = maps.LandmarkFeatures.fit(
                query, key, num_features=columns, rng=np.random.default_rng([seed, layer])
            )
            return np.asarray(linattn.linear_attention(query, key, value, phi, exact_window=window))

        return attend

    frozen = {
        layer: maps.CalibratedFeatures.calibrate(
            samples[layer],
            num_features=columns,
            exact_window=window,
            learn=method.name == "learned",
            rng=np.random.default_rng([seed, layer]),
        )
        for layer in layers
    }
    return lambda layer, *qkv: np.asarray(
        linattn.linear_attention(*qkv, frozen[layer], exact_window=window)
    )


def window_attention(query: Floats, key: Floats, value: Floats, window: int) -> Floats:
    """Each block of `window` queries sees its own block of keys, the one before and the next."""
    output = np.empty_like(value)
    for begin in range(0, query.shape[-2], window):
        here = np.s_[..., begin : begin + window, :]
        near = np.s_[..., max(begin - window, 0) : begin + 2 * window, :]
        output[here] = linattn.softmax_attention(query[here], key[near], value[near])
    return output


def coreset_attention(
    query: Floats, key: Floats, value: Floats, columns: int, seed: Sequence[int]
) -> Floats:
    """Causal attention that reads the documents as a stream and remembers `columns` entries."""
    stream = linattn.CoresetAttention(num_entries=columns, rng=np.random.default_rng(seed))
    return np.asarray(stream.extend(query, key, value))


# --- 2. Measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What was measured for one method.

    Attributes
    ----------
    method : Method
        Which one.
    cosine_mean, cosine_min : float
        Over documents: embedding against the exact model's.
    errors : dict of int to float
        By layer: median over documents and heads of ``|output - exact|_F / |exact|_F``, on what
        the exact model gives the layer.
    calibration_seconds : float
        Time spent before the first document, once.
    """

    method: Method
    cosine_mean: float
    cosine_min: float
    errors: dict[int, float]
    calibration_seconds: float

    def record(self) -> dict[str, Any]:
        """Return the same for the JSON file."""
        return {
            "attention": str(self.method),
            "label": self.method.label,
            "columns": self.method.columns,
            "cosine_mean": self.cosine_mean,
            "cosine_min": self.cosine_min,
            "median_head_error_by_layer": self.errors,
            "calibration_seconds": self.calibration_seconds,
        }


def measure(
    encoder: Encoder,
    method: Method,
    truth: Trace,
    samples: Samples,
    layers: Sequence[int],
    seed: int,
) -> Result:
    """Replace the attention of `layers` by a method and compare with the exact model."""
    begin = perf_counter()
    attend = make_attention(method, samples, layers, seed)
    seconds = perf_counter() - begin

    def replaced(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        chosen = attend if layer in layers else truth.attend
        return chosen(layer, query, key, value)

    cosine = np.sum(encoder(truth.tokens, replaced) * truth.embeddings, axis=-1)
    errors = {
        layer: float(
            np.median(relative_error(attend(layer, *truth.inputs[layer]), truth.outputs[layer]))
        )
        for layer in layers
    }
    return Result(method, float(cosine.mean()), float(cosine.min()), errors, seconds)


def relative_error(output: Floats, exact: Floats) -> Floats:
    """``|output - exact|_F / |exact|_F`` of each head of each document."""
    axes = (-2, -1)
    return np.asarray(np.linalg.norm(output - exact, axis=axes) / np.linalg.norm(exact, axis=axes))


# --- 3. Table and picture ------------------------------------------------------------------------


def result_table(
    results: Sequence[Result], layers: Sequence[int], num_documents: int, length: int
) -> Table:
    """Return the results as a table of at most 80 columns."""
    table = Table(
        title="Attention replaced without retraining",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption_justify="left",
        caption=(
            f"{num_documents} documents of {length} tokens. cosine: embedding against the exact "
            "model's (of a causal method: the causally masked exact model's). 0 to 5: median "
            "relative output error of the heads of a layer, on the exact model's inputs to it."
        ),
    )
    table.add_column("attention")
    table.add_column("cosine", justify="right")
    table.add_column("lowest", justify="right")
    for layer in layers:
        table.add_column(str(layer), justify="right")
    for result in results:
        table.add_row(
            result.method.label,
            f"{result.cosine_mean:.4f}",
            f"{result.cosine_min:.4f}",
            *(short(result.errors[layer]) for layer in layers),
        )
    return table


def short(error: float) -> str:
    """Three digits, the zero before the point left out: six of them have to fit."""
    return f"{error:.2f}" if error >= 0.9995 else f"{error:.3f}".removeprefix("0")


# The palette of Okabe and Ito, which people with any colour vision tell apart; markers say the
# same again.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TICKS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


def cosine_plot(results: Sequence[Result], title: str) -> bytes:
    """Return a PNG of the mean cosine against the number of columns, best method first."""
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.method.family, []).append(result)
    style = {name: index % len(COLORS) for index, name in enumerate(families)}
    best = {name: max(r.cosine_mean for r in group) for name, group in families.items()}
    for name in sorted(families, key=lambda name: -best[name]):
        color, marker = COLORS[style[name]], MARKERS[style[name]]
        group = sorted(families[name], key=lambda result: result.method.columns or 0)
        # Equal cosines to the rounding of float32 are drawn at its limit.
        gaps = [max(1 - result.cosine_mean, 1e-7) for result in group]
        if group[0].method.columns is None:
            axes.axhline(gaps[0], color=color, linestyle="--", label=f"{name}: {best[name]:.3f}")
        else:
            columns = [result.method.columns or 0 for result in group]
            axes.plot(columns, gaps, color=color, marker=marker, label=name)
    shown = sorted({r.method.columns for r in results if r.method.columns is not None})
    # What matters is the distance from 1, so that is what the scale is even in.
    axes.set_yscale("log")
    axes.invert_yaxis()
    low, high = axes.get_ylim()
    ticks = [1 - cosine for cosine in TICKS if high <= 1 - cosine <= low]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{1 - tick:.7g}" for tick in ticks])
    axes.set_ylabel("cosine with the exact embedding, mean")
    if shown:
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [str(number) for number in shown])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("columns (number, log scale)")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# --- 4. The command ------------------------------------------------------------------------------

DEFAULT = (
    "exact",
    "uniform",
    "window,window=32",
    "favor:256",
    "landmarks:64",
    "landmarks:64,window=32",
    "calibrated:64,window=32",
    "coreset:64",
)


def command(
    attention: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:COLUMNS][,window=TOKENS]",
            help=f"What to put into the place of exact attention; repeat it to compare. Names: "
            f"{', '.join(KINDS)}.  [default: {' '.join(DEFAULT)}]",
        ),
    ] = None,
    layers: Annotated[
        str, typer.Option(metavar="LAYERS", help="Layers to replace, such as 0,3-5.")
    ] = f"0-{LAYERS - 1}",
    learn: Annotated[
        bool,
        typer.Option("--learn", help="Add learned:64,window=32 to the defaults. Takes minutes."),
    ] = False,
    num_features: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="Columns to try each method at for the picture, learned ones excepted; '' for "
            "the methods as given only.",
        ),
    ] = "16,32,64,128,256",
    num_documents: Annotated[
        int, typer.Option("--documents", min=1, metavar="NUMBER", help="Documents to measure on.")
    ] = 12,
    num_calibration: Annotated[
        int, typer.Option("--calibration", min=1, metavar="NUMBER", help="Documents to learn from.")
    ] = 12,
    length: Annotated[
        int, typer.Option("--tokens", min=8, max=512, metavar="NUMBER", help="Of a document.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="Of the choice of documents and of maps.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for minilm.json and minilm.png.")
    ] = None,
) -> None:
    """Replace the attention of a pretrained sentence encoder and see what it costs."""
    try:
        methods = [parse_method(text) for text in attention or DEFAULT]
        if learn:
            methods.append(parse_method("learned:64,window=32"))
        replaced = parse_layers(layers)
        try:
            sweep = sorted({int(number) for number in num_features.split(",") if number.strip()})
        except ValueError:
            sweep = [0]
        if sweep and sweep[0] < 1:
            message = f"--num-features: want numbers >= 1 such as 32,64, got {num_features!r}"
            raise ExampleError(message)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        sizes = Sizes(num_documents, num_calibration, length, seed)
        run(methods, replaced, sweep, sizes, out)
    except (ExampleError, OSError) as error:
        typer.echo(f"minilm.py: error: {error}", err=True)
        raise typer.Exit(2) from None


class Sizes(NamedTuple):
    """How much is measured, and from which seed."""

    documents: int
    calibration: int
    tokens: int
    seed: int


def run(
    methods: Sequence[Method],
    layers: Sequence[int],
    sweep: Sequence[int],
    sizes: Sizes,
    out: Path | None,
) -> None:
    """Measure, print the table and write the files."""
    import pydoc_data.topics

    console = Console(markup=False, highlight=False, emoji=False)
    encoder, tokenize = load()
    corpus = documents(pydoc_data.topics.topics, tokenize, sizes.tokens)
    if len(corpus) < sizes.documents + sizes.calibration:
        message = (
            f"--documents, --calibration: want {len(corpus)} documents of {sizes.tokens} tokens at "
            f"most, got {sizes.documents} + {sizes.calibration}"
        )
        raise ExampleError(message)
    corpus = np.random.default_rng(sizes.seed).permutation(corpus)
    tokens, rest = corpus[: sizes.documents], corpus[sizes.documents :]
    console.print(check(encoder, tokenize, tokens), soft_wrap=True)

    samples = Trace.of(encoder, rest[: sizes.calibration], exact_attention).samples()
    truth = {
        is_causal: Trace.of(encoder, tokens, causal_attention if is_causal else exact_attention)
        for is_causal in {method.kind.is_causal for method in methods}
    }
    wanted = list(methods)
    if out is not None:
        for method in methods:
            if method.kind.has_columns and method.name != "learned":
                wanted += [Method(method.name, number, method.window) for number in sweep]
    results = {}
    for method in dict.fromkeys(wanted):
        results[method] = measure(
            encoder, method, truth[method.kind.is_causal], samples, layers, sizes.seed
        )
        if method.kind.is_calibrated:
            console.print(
                f"{method.label}: calibrated on {sizes.calibration} other documents in "
                f"{results[method].calibration_seconds:.0f} s"
            )
    shown = [results[method] for method in methods]
    console.print(result_table(shown, layers, sizes.documents, sizes.tokens))
    if out is not None:
        write_files(out, list(results.values()), layers, sizes)
        console.print(f"Written to {out}: minilm.json, minilm.png", soft_wrap=True)


def write_files(out: Path, results: Sequence[Result], layers: Sequence[int], sizes: Sizes) -> None:
    """Write numbers and picture."""
    record = {
        "linattn": linattn.__version__,
        "python": platform.python_version(),
        "documents": sizes.documents,
        "calibration": sizes.calibration,
        "tokens": sizes.tokens,
        "layers": list(layers),
        "seed": sizes.seed,
        "results": [result.record() for result in results],
    }
    (out / "minilm.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    title = (
        f"all-MiniLM-L6-v2, attention of layers {', '.join(map(str, layers))} replaced\n"
        f"{sizes.documents} documents of {sizes.tokens} tokens, no retraining"
    )
    (out / "minilm.png").write_bytes(cosine_plot(results, title))


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="minilm.py")
