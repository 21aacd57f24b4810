"""A pretrained sentence encoder in NumPy: embeddings of documents, and its attention replaced.

all-MiniLM-L6-v2 stands on `linattn.layers` in minilm_model.py: 6 layers of 12 heads, 22 million
weights. There attention is a value that is handed in, so that something of linear time can take the
place of exact attention in any layer, without retraining. Two questions are asked of each method:

* How far is the embedding of a document from the exact model's, if every layer is replaced?
  (cosine: 1 is no difference)
* How far is the output of one head from exact attention on the same inputs?
  (relative Frobenius error: 0 is no difference)

    python examples/minilm.py --attention landmarks:64,window=32 --layers 3-5
    python examples/minilm.py embed README.md docs/*.md --out embeddings.npz
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

try:
    import minilm_model as model
    import numpy as np
    import typer
    from rich import box
    from rich.table import Table
    from training import ExampleError, errors_in_one_line, make_app, make_console
except ModuleNotFoundError as error:
    print(f"minilm.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

from linattn import feature_maps, layers

# --- 1. The attention that is dropped in ---------------------------------------------------------

LABELS = {
    "exact": "exact softmax",
    "uniform": "uniform attention",
    "window": "window alone",
    "favor": "FAVOR+",
    "landmarks": "landmarks",
    "calibrated": "calibrated",
    "learned": "learned",
    "coreset": "coreset, causal",
}
FORMS = re.compile(
    r"(?P<whole>exact|uniform)|(?P<window>window)(,window=(?P<alone>\d+))?|(?P<coreset>coreset)"
    r"(:(?P<entries>\d+))?|(?P<map>favor|landmarks|calibrated|learned)"
    r"(:(?P<columns>\d+))?(,window=(?P<near>\d+))?"
)


class Method(NamedTuple):
    """One way to compute attention: ``landmarks:64,window=32`` is 64 columns and a window."""

    name: str
    columns: int | None = None
    window: int | None = None

    @property
    def label(self) -> str:
        """For people."""
        name, comma, causal = LABELS[self.name].partition(",")
        if self.name == "window":
            return f"window {self.window} alone"
        columns = "" if self.columns is None else f" {self.columns}"
        return name + columns + (f" + window {self.window}" if self.window else "") + comma + causal

    def __str__(self) -> str:
        """As the option ``--attention`` reads it."""
        columns = "" if self.columns is None else f":{self.columns}"
        return f"{self.name}{columns}" + (f",window={self.window}" if self.window else "")


def parse_method(text: str) -> Method:
    """Read ``NAME[:COLUMNS][,window=TOKENS]``."""
    found = match.groupdict() if (match := FORMS.fullmatch(text)) else {}
    numbers = [int(found[name] or 1) for name in ("alone", "entries", "columns", "near") if found]
    if not found or 0 in numbers:
        message = (
            "--attention: want exact, uniform, window[,window=TOKENS], coreset[:COLUMNS] or "
            f"(favor|landmarks|calibrated|learned)[:COLUMNS][,window=TOKENS], numbers at least 1, "
            f"got {text!r}"
        )
        raise ExampleError(message)
    if found["window"]:
        return Method("window", None, int(found["alone"] or 32))
    if found["whole"]:
        return Method(found["whole"])
    columns, near = int(found["columns"] or found["entries"] or 64), found["near"]
    return Method(found["map"] or found["coreset"], columns, int(near) if near else None)


def parse_layers(text: str) -> tuple[int, ...]:
    """Read ``0,3-5``."""
    is_list = re.fullmatch("([0-5](-[0-5])?(,|$))+", text + ",")
    ends = [part.split("-") for part in text.split(",") if is_list]
    chosen = sorted({layer for pair in ends for layer in range(int(pair[0]), int(pair[-1]) + 1)})
    if not chosen:
        message = f"--layers: want layers out of 0-5 such as 0,3-5, got {text!r}"
        raise ExampleError(message)
    return tuple(chosen)


def make_attention(method: Method, sample: model.Sample, seed: Sequence[int]) -> layers.Attention:
    """Return the attention of a layer, drawn or calibrated on what it has seen of documents."""
    name, columns, window = method.name, method.columns or 0, method.window
    rng = np.random.SeedSequence(list(seed))
    given = {
        "exact": layers.SoftmaxAttention,
        "uniform": model.UniformAttention,
        "window": lambda: model.WindowAttention(window),
        "coreset": lambda: layers.BoundedAttention(columns, rng=rng),
        "landmarks": lambda: layers.LandmarkAttention(columns, exact_window=window, rng=rng),
    }
    if name in given:
        return given[name]()
    if name == "favor":
        phi: Any = feature_maps.PositiveFeatures(sample[0][0].shape[-1], columns, rng=rng)
    else:
        phi = feature_maps.CalibratedFeatures.calibrate(
            sample, num_features=columns, exact_window=window, learn=name == "learned", rng=rng
        )
    return layers.LinearAttention(phi, exact_window=window)


# --- 2. What it costs ----------------------------------------------------------------------------


def measure(
    encoder: model.Encoder,
    method: Method,
    truth: model.Trace,
    samples: dict[int, model.Sample],
    seed: int,
) -> list[str]:
    """Replace the attention of the layers that have samples; return a row of the table."""
    made = {layer: make_attention(method, samples[layer], [seed, layer]) for layer in samples}
    attention = [made.get(layer, layers.SoftmaxAttention()) for layer in range(model.LAYERS)]
    found = encoder(truth.tokens, attention=attention, is_causal=truth.is_causal)
    cosine = np.sum(found * truth.embeddings, axis=-1)
    row = [method.label, f"{cosine.mean():.4f}", f"{cosine.min():.4f}"]
    for layer, attend in made.items():
        output = attend(*truth.inputs[layer], layers.Scope(is_causal=truth.is_causal))
        error = float(np.median(relative_error(output, truth.outputs[layer])))
        # Six of them have to fit: the zero before the point is left out.
        row.append(f"{error:.2f}" if error >= 0.9995 else f"{error:.3f}".removeprefix("0"))
    return row


def relative_error(output: model.Floats, exact: model.Floats) -> model.Floats:
    """``|output - exact|_F / |exact|_F`` of each head of each document."""
    axes = (-2, -1)
    return np.asarray(np.linalg.norm(output - exact, axis=axes) / np.linalg.norm(exact, axis=axes))


# --- 3. The commands -----------------------------------------------------------------------------

DEFAULT = (
    *("exact", "uniform", "window,window=32", "favor:256", "landmarks:64"),
    *("landmarks:64,window=32", "calibrated:64,window=32", "coreset:64"),
)


def compare(
    context: typer.Context,
    attention: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:COLUMNS][,window=TOKENS]", help="Repeat it to compare."),
    ] = None,
    replaced: Annotated[str, typer.Option("--layers", help="Such as 0,3-5.")] = "0-5",
    number: Annotated[int, typer.Option("--documents", min=1, help="To measure on.")] = 12,
    calibration: Annotated[int, typer.Option(min=1, help="Documents to calibrate on.")] = 12,
    length: Annotated[int, typer.Option("--tokens", min=8, max=512, help="Of a document.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of documents and maps.")] = 0,
) -> None:
    """Replace the attention of a pretrained sentence encoder and see what it costs."""
    if context.invoked_subcommand is not None:
        return
    with errors_in_one_line("minilm.py", None):
        methods = [parse_method(text) for text in attention or DEFAULT]
        chosen = parse_layers(replaced)
        encoder, tokenize = model.load()
        corpus = model.documents(pydoc_data.topics.topics, tokenize, length)
        if len(corpus) < number + calibration:
            message = f"--documents, --calibration: want {len(corpus)} at most, got more"
            raise ExampleError(message)
        corpus = np.random.default_rng(seed).permutation(corpus)
        console = make_console()
        console.print(model.check(encoder, tokenize, corpus[:number]))
        samples = model.Trace.of(encoder, corpus[number : number + calibration]).samples()
        causal = [method.name == "coreset" for method in methods]
        truth = {one: model.Trace.of(encoder, corpus[:number], one) for one in set(causal)}
        names = ("attention", "cosine", "lowest", *map(str, chosen))
        table = Table(*names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for method, is_causal in zip(methods, causal, strict=True):
            picked = {layer: samples[layer] for layer in chosen}
            table.add_row(*measure(encoder, method, truth[is_causal], picked, seed))
        console.print(table)


def read_text(path: Path) -> str:
    """Read a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path}: want text in UTF-8, got something else: {error.reason}"
        raise ExampleError(message) from None


def embed_files(
    files: list[Path],
    out: Annotated[Path, typer.Option(metavar="FILE", help="NumPy file.")] = Path("embeddings.npz"),
    by_line: Annotated[bool, typer.Option("--lines", help="Each line is a document.")] = False,
    beside_torch: Annotated[bool, typer.Option(help="Also time the model in torch.")] = False,
) -> None:
    """Write an embedding of each text file, of any length, without torch."""
    with errors_in_one_line("minilm.py", None):
        texts = {str(path): read_text(path) for path in files}
        if by_line:
            lines = ((name, enumerate(text.splitlines(), 1)) for name, text in texts.items())
            texts = {
                f"{n}:{i}": line for n, of_file in lines for i, line in of_file if line.strip()
            }
        encoder, tokenize = model.load()
        begun = perf_counter()
        found = model.embed(encoder.means, texts.values(), tokenize)
        seconds, console = perf_counter() - begun, make_console()
        console.print(f"{len(found)} documents, {len(found) / seconds:.1f} a second")
        if beside_torch:
            means = model.torch_means(encoder)
            begun = perf_counter()
            other = model.embed(means, texts.values(), tokenize)
            seconds, largest = perf_counter() - begun, np.max(np.abs(found - other))
            console.print(
                f"torch.nn.TransformerEncoder with the same weights: {len(other) / seconds:.1f} a "
                f"second; embeddings differ by {largest:.0e} at most"
            )
        with out.open("wb") as file:  # np.savez puts .npz behind other names
            np.savez(file, names=np.asarray(list(texts)), embeddings=found)
        console.print(f"Written to {out}: names, embeddings {found.shape}")


app = make_app(compare, embed=embed_files)

if __name__ == "__main__":
    app(prog_name="minilm.py")
