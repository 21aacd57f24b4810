"""Non-local means as attention: every pixel looks at all 273,280 pixels of its picture.

A noisy pixel is replaced by the mean of all pixels, weighted by how much the patches around them
look alike:

    out_i = sum_j exp(-|f_i - f_j|^2 / 2) v_j / sum_j exp(-|f_i - f_j|^2 / 2)

That is softmax attention: ``-|f_i - f_j|^2 / 2 = f_i.f_j - |f_j|^2 / 2 - |f_i|^2 / 2``, and the
last term is the same for all keys, so that the softmax cancels it. With one more coordinate, 1 in
the queries and ``-|f_j|^2 / 2`` in the keys, what is left is a product of two vectors. Exact
attention would need 75 billion pairs; linear attention goes over the picture a few times.

    python examples/denoise.py --out pictures
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    import linattn
    from linattn.cli.timing import peak_memory
except ModuleNotFoundError as error:
    print(f"denoise.py needs {error.name}: pip install 'linattn[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

Floats = NDArray[np.float32]

NOISE = 0.1
"""Standard deviation of the noise; colours run from 0 to 1. It makes 20.0 dB."""

PATCH = 3
"""Pixels on a side of a patch."""

COMPONENTS = 6
"""Principal components of the patches; with the pixel's position, features have 8 coordinates."""

POSITION = 2.0
"""How much the width of the picture counts, in the unit of the patches."""


# --- 1. From a picture to queries and keys -------------------------------------------------------


def load_picture() -> Floats:
    """Return scikit-learn's picture of a temple, (427, 640, 3), colours from 0 to 1."""
    from sklearn.datasets import load_sample_image

    return np.asarray(load_sample_image("china.jpg"), dtype=np.float32) / 255


def pixel_features(picture: Floats) -> Floats:
    """Return what pixels are compared by, (pixels, 8), of mean 0.

    Coordinates: the pixel's patch on its 6 leading principal components, then row and column.
    """
    height, width, _ = picture.shape
    r = PATCH // 2
    padded = np.pad(picture, ((r, r), (r, r), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (PATCH, PATCH), axis=(0, 1))
    # All patches at once would be 27 numbers a pixel: one row of the picture at a time.
    mean = windows.mean(axis=(0, 1), dtype=np.float64).ravel().astype(np.float32)
    dim = mean.size
    covariance = np.zeros((dim, dim))
    for row in windows:
        centred = row.reshape(width, dim) - mean
        covariance += centred.T @ centred
    axes = np.linalg.eigh(covariance)[1][:, : -COMPONENTS - 1 : -1].astype(np.float32)
    patches = np.stack([(row.reshape(width, dim) - mean) @ axes for row in windows])
    rows, columns = np.mgrid[:height, :width].astype(np.float32) * (POSITION / width)
    features = np.concatenate([patches, rows[..., None], columns[..., None]], axis=-1)
    features = features.reshape(height * width, COMPONENTS + 2)
    return np.asarray(features - features.mean(axis=0))


def queries_and_keys(features: Floats, bandwidth: float) -> tuple[Floats, Floats]:
    """Return query and key, (pixels, 9): ``exp(q.k)`` is the Gaussian of the distance, to a factor.

    Parameters
    ----------
    features : array, (pixels, 8)
        Pixels at a distance of one bandwidth get the weight ``exp(-1/2)``.
    bandwidth : float
        The smaller, the fewer pixels a mean is over.
    """
    f = features / np.float32(bandwidth)
    query = np.concatenate([f, np.ones_like(f[:, :1])], axis=-1)
    key = np.concatenate([f, -0.5 * np.sum(f**2, axis=-1, keepdims=True)], axis=-1)
    return query, key


# --- 2. Attention over all pixels ----------------------------------------------------------------


def denoise(query: Floats, key: Floats, value: Floats, num_features: int, seed: int) -> Floats:
    """Return linear attention with landmarks: fitting is part of it."""
    phi = linattn.feature_maps.LandmarkFeatures.fit(
        query, key, num_features=num_features, scale=1.0, rng=seed
    )
    return np.asarray(linattn.linear_attention(query, key, value, phi))


def psnr(picture: Floats, original: Floats) -> float:
    """Peak signal-to-noise ratio in dB: ``-10 log10`` of the mean square error."""
    error = np.mean((picture - original).astype(np.float64) ** 2)
    return float(-10 * np.log10(error))


@dataclass(frozen=True)
class Result:
    """What was measured at one bandwidth.

    Attributes
    ----------
    bandwidth : float
        Of the Gaussian.
    error : float
        ``|linear - exact|_F / |exact|_F`` over the sampled pixels and their three colours.
    exact_db, linear_sample_db : float
        PSNR of exact and of linear attention on the sampled pixels.
    linear_db : float
        PSNR of linear attention on the whole picture.
    seconds : float
        Time for the whole picture, fitting included.
    peak_bytes : int
        Memory at most, fitting included, beyond inputs and output.
    """

    bandwidth: float
    error: float
    exact_db: float
    linear_sample_db: float
    linear_db: float
    seconds: float
    peak_bytes: int


def measure(
    features: Floats,
    noisy: Floats,
    original: Floats,
    sampled: NDArray[np.int64],
    bandwidth: float,
    num_features: int,
    seed: int,
) -> tuple[Result, Floats]:
    """Denoise at one bandwidth; return what it cost and the pixels, (pixels, 3)."""
    query, key = queries_and_keys(features, bandwidth)
    begin = perf_counter()
    output = denoise(query, key, noisy, num_features, seed)
    seconds = perf_counter() - begin
    # In a call of its own: to trace memory takes time.
    peak = peak_memory(lambda: denoise(query, key, noisy, num_features, seed))
    exact = linattn.softmax_attention(query[sampled], key, noisy, scale=1.0)
    error = np.linalg.norm(output[sampled] - exact) / np.linalg.norm(exact)
    result = Result(
        bandwidth=bandwidth,
        error=float(error),
        exact_db=psnr(exact, original[sampled]),
        linear_sample_db=psnr(output[sampled], original[sampled]),
        linear_db=psnr(output, original),
        seconds=seconds,
        peak_bytes=peak - output.nbytes,
    )
    return result, output


# --- 3. What is shown ----------------------------------------------------------------------------


def result_table(results: list[Result], noisy_db: float, num_sampled: int, caption: str) -> Table:
    """Return a row for each bandwidth."""
    table = Table(
        title=f"Non-local means by linear attention; the noisy picture has {noisy_db:.1f} dB",
        caption_justify="left",
        caption=caption
        + (
            f" error: |linear - exact| / |exact| over {num_sampled} sampled pixels; "
            "sample: PSNR there; time and memory beyond inputs and output: fitting included."
        ),
    )
    names = ("bandwidth", "error", "exact, sample", "linear, sample", "linear", "time", "memory")
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            f"{result.bandwidth:g}",
            f"{result.error:.3f}",
            f"{result.exact_db:.1f} dB",
            f"{result.linear_sample_db:.1f} dB",
            f"{result.linear_db:.1f} dB",
            f"{result.seconds:.1f} s",
            f"{result.peak_bytes / 2**20:.0f} MiB",
        )
    return table


def pictures(named: list[tuple[str, Floats]]) -> bytes:
    """Return a PNG of pictures side by side."""
    height, width, _ = named[0][1].shape
    figure = Figure(
        figsize=(5 * len(named), 5 * height / width + 0.4), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    for axes, (title, picture) in zip(figure.subplots(1, len(named)), named, strict=True):
        axes.imshow(np.clip(picture, 0, 1), interpolation="none")
        axes.set_title(title)
        axes.set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# --- 4. The command ------------------------------------------------------------------------------


def command(
    num_features: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Landmarks: columns of the state.")
    ] = 64,
    bandwidths: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="How unlike patches may be that are averaged; the best one by PSNR is drawn.",
        ),
    ] = "0.73,0.5,0.38",
    num_sampled: Annotated[
        int,
        typer.Option("--sample", min=1, metavar="NUMBER", help="Pixels to compute exactly."),
    ] = 400,
    seed: Annotated[
        int, typer.Option(min=0, metavar="NUMBER", help="Of noise, sample and landmarks.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for denoise.json and denoise.png.")
    ] = None,
) -> None:
    """Denoise a photograph by attention over all its pixels, in linear time."""
    try:
        chosen = [float(number) for number in bandwidths.split(",")]
        if not all(0.01 <= number <= 100 for number in chosen):
            raise ValueError
    except ValueError:
        typer.echo(
            f"denoise.py: error: --bandwidths: want numbers from 0.01 to 100 such as 0.5,0.25, "
            f"got {bandwidths!r}",
            err=True,
        )
        raise typer.Exit(2) from None
    try:
        original = load_picture()
    except ModuleNotFoundError as error:
        message = f"denoise.py needs {error.name}: pip install 'linattn[examples]'"
        typer.echo(message, err=True)
        raise typer.Exit(2) from None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run(original, chosen, num_features, num_sampled, seed, out)


def run(
    original: Floats,
    bandwidths: list[float],
    num_features: int,
    num_sampled: int,
    seed: int,
    out: Path | None,
) -> None:
    """Measure, print the table and write the files."""
    console = Console(markup=False, highlight=False, emoji=False)
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal(original.shape, dtype=np.float32)
    noisy = original + np.float32(NOISE) * noise
    features = pixel_features(noisy)
    pixels, truth = noisy.reshape(-1, 3), original.reshape(-1, 3)
    sampled = rng.permutation(len(pixels))[:num_sampled]
    measured = [
        measure(features, pixels, truth, sampled, bandwidth, num_features, seed)
        for bandwidth in bandwidths
    ]
    results = [result for result, _ in measured]
    height, width, _ = original.shape
    caption = f"{height} x {width} = {len(pixels):,} pixels, {num_features} landmarks."
    noisy_db = psnr(noisy, original)
    console.print(result_table(results, noisy_db, len(sampled), caption))
    if out is None:
        return
    best, pixels = max(measured, key=lambda pair: pair[0].linear_db)
    record: dict[str, Any] = {
        "linattn": linattn.__version__,
        "pixels": len(pixels),
        "num_features": num_features,
        "sampled_pixels": len(sampled),
        "seed": seed,
        "noisy_db": noisy_db,
        "results": [asdict(result) for result in results],
    }
    (out / "denoise.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    image = pictures(
        [
            ("original", original),
            (f"noisy: {noisy_db:.1f} dB", noisy),
            (
                f"linear attention, {num_features} landmarks: {best.linear_db:.1f} dB",
                pixels.reshape(original.shape),
            ),
        ]
    )
    (out / "denoise.png").write_bytes(image)
    console.print(f"Written to {out}: denoise.json, denoise.png", soft_wrap=True)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="denoise.py")
