"""Non-local means as attention: every pixel attends to all 273,280 pixels of its picture.

A noisy pixel is replaced by the mean of all pixels, weighted by how much the patches around them
look alike and how near they are:

    out_i = sum_j exp(-|f_i - f_j|^2 / 2) v_j / sum_j exp(-|f_i - f_j|^2 / 2)

That is softmax attention: ``-|f_i - f_j|^2 / 2 = f_i.f_j - |f_j|^2 / 2 - |f_i|^2 / 2``, and the
last term is the same for all keys, so that the softmax cancels it. With one more coordinate, 1 in
the queries and ``-|f_j|^2 / 2`` in the keys, what is left is a product of two vectors. Exact
attention would need 75 billion pairs. Here pixels stand in the order of square tiles: those of a
pixel's own tile and of the tiles before and after it count exactly, and landmarks stand for all
others.

The table has what that must be compared with: a Gaussian blur, scikit-image's non-local means, and
each half of the method alone. Read it before you use landmarks for this: weights as sharp as these
are too much for 64 landmarks alone, which make the picture worse; and with a window they are no
better than the window alone, since pixels that are alike are nearly always near.

    python examples/denoise.py --out pictures
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    import linattn
except ModuleNotFoundError as error:
    print(f"denoise.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

Floats = NDArray[np.float32]

NOISE = 0.1
"""Standard deviation of the noise; colours run from 0 to 1. It makes 20.0 dB."""

PATCH = 3
"""Pixels on a side of a patch."""

COMPONENTS = 6
"""Principal components of the patches; with the pixel's position, features have 8 coordinates."""

POSITION = 20.0
"""How much the width of the picture counts, in the unit of the patches."""

TILE = 16
"""Pixels on a side of a tile; its pixels are a block of the exact window."""

BLURS = (0.5, 0.6, 0.7, 0.8)
"""Standard deviations of Gaussian blurs, in pixels: the best one by PSNR is shown."""

STRENGTHS = (0.04, 0.05, 0.06, 0.08)
"""The parameter h of scikit-image's non-local means: the best one by PSNR is shown."""


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


def tile_order(height: int, width: int) -> NDArray[np.int64]:
    """Return the numbers of all pixels, tile by tile; the rows of tiles run to and fro."""
    rows, columns = (index.ravel() for index in np.mgrid[:height, :width])
    down, across = rows // TILE, columns // TILE
    to_and_fro = np.where(down % 2, -across, across)
    return np.lexsort((columns, rows, to_and_fro, down))


# --- 2. Attention over all pixels ----------------------------------------------------------------


def denoise(
    query: Floats,
    key: Floats,
    value: Floats,
    num_features: int,
    seed: int,
    window: int | None = None,
) -> Floats:
    """Return linear attention with landmarks, near keys exactly: fitting is part of it."""
    phi = linattn.feature_maps.LandmarkFeatures.fit(
        query, key, num_features=num_features, scale=1.0, rng=seed
    )
    return np.asarray(linattn.linear_attention(query, key, value, phi, exact_window=window))


def window_alone(query: Floats, key: Floats, value: Floats, window: int) -> Floats:
    """Return exact attention to keys of a block and the blocks beside it, and to no others."""
    out = np.empty_like(value)
    for start in range(0, len(query), window):
        block = slice(start, start + window)
        near = slice(max(0, start - window), start + 2 * window)
        out[block] = linattn.softmax_attention(query[block], key[near], value[near], scale=1.0)
    return out


# --- 3. What it is compared with -----------------------------------------------------------------


def blurred(noisy: Floats, sigma: float) -> Floats:
    """Return a Gaussian blur of each colour."""
    from scipy.ndimage import gaussian_filter

    return np.asarray(gaussian_filter(noisy, (sigma, sigma, 0)))


def non_local_means(noisy: Floats, strength: float) -> Floats:
    """Return scikit-image's non-local means, with patches of the same size."""
    from skimage.restoration import denoise_nl_means

    return np.asarray(
        denoise_nl_means(noisy, PATCH, patch_distance=7, h=strength, sigma=NOISE, channel_axis=-1)
    )


def psnr(picture: Floats, original: Floats) -> float:
    """Peak signal-to-noise ratio in dB: ``-10 log10`` of the mean square error."""
    error = np.mean((picture - original).astype(np.float64) ** 2)
    return float(-10 * np.log10(error))


@dataclass(frozen=True)
class Result:
    """What was measured of one way to denoise.

    Attributes
    ----------
    name : str
        With its setting.
    db, sample_db : float
        PSNR on the whole picture and on the sampled pixels.
    error : float
        ``|out - exact|_F / |exact|_F`` over the sampled pixels and their three colours, where exact
        is attention over all pixels.
    seconds : float
        Time for the whole picture, fitting included.
    """

    name: str
    db: float
    sample_db: float
    error: float
    seconds: float


class Task(NamedTuple):
    """A noisy picture as queries, keys and values of its pixels, and what they should become."""

    noisy: Floats
    order: NDArray[np.int64]
    """Of the pixels in all arrays below."""
    query: Floats
    key: Floats
    value: Floats
    truth: Floats
    sampled: NDArray[np.int64]
    exact: Floats
    """Exact attention of the sampled pixels."""

    @classmethod
    def of(
        cls, original: Floats, bandwidth: float, num_sampled: int, rng: np.random.Generator
    ) -> Task:
        """Add noise to a picture."""
        noise = rng.standard_normal(original.shape, dtype=np.float32)
        noisy = original + np.float32(NOISE) * noise
        order = tile_order(*original.shape[:2])
        query, key = queries_and_keys(pixel_features(noisy)[order], bandwidth)
        value, truth = noisy.reshape(-1, 3)[order], original.reshape(-1, 3)[order]
        sampled = rng.permutation(len(value))[:num_sampled]
        exact = linattn.softmax_attention(query[sampled], key, value, scale=1.0)
        return cls(noisy, order, query, key, value, truth, sampled, exact)

    def measure(self, name: str, way: Callable[[], Floats]) -> tuple[Result, Floats]:
        """Run one way to denoise; return what was measured, and the pixels."""
        begin = perf_counter()
        output = way()
        seconds = perf_counter() - begin
        if output.shape == self.noisy.shape:
            output = output.reshape(-1, 3)[self.order]
        distance = np.linalg.norm(output[self.sampled] - self.exact) / np.linalg.norm(self.exact)
        scores = (psnr(output, self.truth), psnr(output[self.sampled], self.truth[self.sampled]))
        return Result(name, *scores, float(distance), seconds), output

    def best(
        self, name: str, way: Callable[[Floats, float], Floats], settings: tuple[float, ...]
    ) -> tuple[Result, Floats]:
        """Return the setting of a way that comes nearest to the original."""
        tried = [
            self.measure(f"{name} {setting:g}", partial(way, self.noisy, setting))
            for setting in settings
        ]
        return max(tried, key=lambda pair: pair[0].db)


def result_table(results: list[Result], exact_db: float, caption: str) -> Table:
    """Return a row for each way, and exact attention on the sample."""
    table = Table(title="Denoising a photograph", caption=caption, caption_justify="left")
    table.add_column("method")
    for name in ("PSNR", "sample", "from exact", "time"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.db:.1f} dB",
            f"{result.sample_db:.1f} dB",
            f"{result.error:.3f}",
            f"{result.seconds:.1f} s",
        )
    table.add_row("exact attention", "", f"{exact_db:.1f} dB", "0", "")
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


# --- 5. The command ------------------------------------------------------------------------------


def command(
    num_features: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Landmarks: columns of the state.")
    ] = 64,
    bandwidth: Annotated[
        float,
        typer.Option(
            min=0.01, max=100, metavar="NUMBER", help="How unlike pixels may be that are averaged."
        ),
    ] = 0.22,
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
        import scipy.ndimage  # noqa: F401
        import skimage.restoration  # noqa: F401

        original = load_picture()
    except ModuleNotFoundError as error:
        message = f"denoise.py needs {error.name}: pip install '.[examples]'"
        typer.echo(message, err=True)
        raise typer.Exit(2) from None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run(original, bandwidth, num_features, num_sampled, seed, out)


def run(
    original: Floats,
    bandwidth: float,
    num_features: int,
    num_sampled: int,
    seed: int,
    out: Path | None,
) -> None:
    """Measure, print the table and write the files."""
    task = Task.of(original, bandwidth, num_sampled, np.random.default_rng(seed))
    query, key, value = task.query, task.key, task.value
    window = TILE * TILE
    attend = partial(denoise, query, key, value, num_features, seed)
    measured = [
        task.measure("the noisy picture", lambda: task.noisy),
        task.best("Gaussian blur, sigma", blurred, BLURS),
        task.best("non-local means, h", non_local_means, STRENGTHS),
        task.measure(f"{num_features} landmarks alone", attend),
        task.measure("window alone", lambda: window_alone(query, key, value, window)),
        task.measure(f"{num_features} landmarks and window", lambda: attend(window)),
    ]
    results = [result for result, _ in measured]
    exact_db = psnr(task.exact, task.truth[task.sampled])
    height, width, _ = original.shape
    caption = (
        f"{height} x {width} = {len(value):,} pixels in tiles of {TILE} x {TILE}; bandwidth "
        f"{bandwidth:g}. Sample: {len(task.sampled)} pixels; from exact: |out - exact| / |exact| "
        f"there."
    )
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(result_table(results, exact_db, caption))
    if out is None:
        return
    record: dict[str, Any] = {
        "linattn": linattn.__version__,
        "pixels": len(value),
        "num_features": num_features,
        "bandwidth": bandwidth,
        "sampled_pixels": len(task.sampled),
        "seed": seed,
        "exact_sample_db": exact_db,
        "results": [asdict(result) for result in results],
    }
    shown = [("original", task.truth)]
    shown += [
        (f"{measured[i][0].name}: {measured[i][0].db:.1f} dB", measured[i][1]) for i in (0, 1, 5)
    ]
    write_files(out, record, [(title, in_rows(x, task.order, original)) for title, x in shown])
    console.print(f"Written to {out}: denoise.json, denoise.png", soft_wrap=True)


def write_files(out: Path, record: dict[str, Any], shown: list[tuple[str, Floats]]) -> None:
    """Write numbers and pictures."""
    (out / "denoise.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (out / "denoise.png").write_bytes(pictures(shown))


def in_rows(pixels: Floats, order: NDArray[np.int64], like: Floats) -> Floats:
    """Return pixels that stand in this order as a picture."""
    picture = np.empty_like(pixels)
    picture[order] = pixels
    return picture.reshape(like.shape)


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="denoise.py")
