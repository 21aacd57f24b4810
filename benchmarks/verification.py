"""What docs/verification.md shows: variances from the closed forms, and every map against them.

Prints three tables and writes a picture. Run it with::

    python benchmarks/verification.py [DRAWS [PICTURE]]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from linattn import testing
from linattn.feature_maps import (
    ActivationFeatures,
    DenseExponentialFeatures,
    GeneralizedExponentialFeatures,
    HyperbolicFeatures,
    PositiveFeatures,
    TrigonometricFeatures,
)
from linattn.feature_maps.fourier import RandomFourierFeatures
from linattn.sampling import SAMPLERS

Floats = NDArray[np.float64]

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "verification.png"
DIM = 16
COLUMNS = 32
SIZE = 0.5  # v = |x + y|^2 and s = |x - y|^2 of the pair that is measured
SPECTRA = ("gaussian", "laplace", "exponential", "cauchy", "matern32", "matern52")


def best_tilt(v: float, dim: int) -> float:
    """Return the closed-form optimum A of generalized exponential features for one v."""
    query = np.zeros((1, dim))
    query[0, 0] = sqrt(v) / 2
    fitted = GeneralizedExponentialFeatures.fit(query, query, num_features=2, scale=1.0, rng=0)
    return float(np.asarray(fitted.A))


def relative_variance(feature_map: Any, v: float) -> float:
    """Relative variance, from the closed form, of a pair with ``|x + y|^2 = v``."""
    x = np.zeros((1, feature_map.dim))
    x[0, 0] = sqrt(v) / 2
    return float(feature_map.variance(x, x)[0, 0] / feature_map.kernel(x, x)[0, 0] ** 2)


def lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the lowest value of a function with one minimum, by golden sections."""
    ratio = (sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return function((low + high) / 2)


def variance_row(dim: int, v: float) -> dict[str, float]:
    """Relative variances with 2 d columns."""
    A = best_tilt(v, dim)
    sizes: Any = {"dim": dim, "num_features": 2 * dim, "scale": 1.0, "rng": 0}

    def tilted(A: float, sampler: str, antithetic: bool) -> float:
        phi = GeneralizedExponentialFeatures(**sizes, A=A, sampler=sampler, antithetic=antithetic)
        return relative_variance(phi, v)

    return {
        "FAVOR+ iid": relative_variance(PositiveFeatures(**sizes, sampler="gaussian"), v),
        "FAVOR+ ort": relative_variance(PositiveFeatures(**sizes), v),
        "FAVOR+ simplex": relative_variance(PositiveFeatures(**sizes, sampler="simplex"), v),
        "cosh ort": relative_variance(HyperbolicFeatures(**sizes), v),
        "FAVOR++ iid": tilted(A, "gaussian", False),
        "FAVOR++ ort": tilted(A, "orthogonal", False),
        "OPRF simplex": tilted(A, "simplex", False),
        "cosh OPRF ort": tilted(A, "orthogonal", True),
        "the same, own A": lowest(lambda a: tilted(a, "orthogonal", True), 2 * A, 0.0),
    }


def print_variances() -> None:
    """Print the table of relative variances at equal columns."""
    for dim in (4, 16, 64, 128):
        for v in (0.25, 1.0, 4.0, 16.0):
            row = variance_row(dim, v)
            if (dim, v) == (4, 0.25):
                print(f"| d | v | {' | '.join(row)} |")
                print("|---|---|" + "---|" * len(row))
            least = f"{min(row.values()):.2g}"
            shown = (f"{value:.2g}" for value in row.values())
            cells = (f"**{cell}**" if cell == least else cell for cell in shown)
            print(f"| {dim} | {v:g} | {' | '.join(cells)} |")


def raw_qr(num: int, dim: int, rng: Any, *, batch_shape: tuple[int, ...]) -> Floats:
    """Draw orthogonal blocks as existing libraries do: the factor of a QR, signs not fixed."""
    blocks = -(-num // dim)
    generator = np.random.default_rng(rng)
    normals = generator.standard_normal((*batch_shape, blocks, dim, dim))
    q = np.swapaxes(np.linalg.qr(normals)[0], -1, -2).reshape(*batch_shape, blocks * dim, dim)
    norms = np.linalg.norm(generator.standard_normal((*batch_shape, num, dim)), axis=-1)
    return np.asarray(q[..., :num, :] * norms[..., None])


class Case(NamedTuple):
    """A random map to measure.

    ``make(sampler)`` makes one; ``draw(rows)`` the maps of given rows, ``(draws, rows, d)``;
    ``spectrum`` is the kernel of a map whose rows are not normal.
    """

    name: str
    make: Callable[[str], Any]
    draw: Callable[[Floats], Any]
    spectrum: str | None = None


class Measured(NamedTuple):
    """Measured over exact: mean less 1 and variance, each with its standard error."""

    name: str
    sampler: str
    stated_bias: float
    bias: float
    bias_error: float
    variance: float
    variance_error: float


def _case(name: str, cls: Any, **options: Any) -> Case:
    return Case(
        name,
        lambda sampler: cls(DIM, COLUMNS, sampler=sampler, rng=0, **options),
        lambda rows: cls.from_projection(rows, **options),
        options.get("kernel"),
    )


def cases() -> Iterator[Case]:
    """Yield every random map."""
    A = best_tilt(SIZE, DIM)
    yield _case("FAVOR+", PositiveFeatures, scale=1.0)
    yield _case("cosh", HyperbolicFeatures, scale=1.0)
    yield _case("trigonometric", TrigonometricFeatures, scale=1.0)
    yield _case("OPRF", GeneralizedExponentialFeatures, scale=1.0, A=A, antithetic=False)
    yield _case("cosh OPRF", GeneralizedExponentialFeatures, scale=1.0, A=A)
    tilts = np.linspace(-0.1, 0.02, DIM)
    shear = np.eye(DIM) + 0.1 * np.eye(DIM, k=1)
    yield _case("DERF", DenseExponentialFeatures, scale=1.0, A=tilts, transform=shear)
    for activation in ("heaviside", "relu", "squared_relu"):
        yield _case(activation, ActivationFeatures, activation=activation)
    for kernel in SPECTRA:
        yield _case(f"Fourier {kernel}", RandomFourierFeatures, kernel=kernel)


def pair() -> tuple[Floats, Floats]:
    """Return x and y with ``x + y`` along (1, ..., 1), where unfixed signs show most."""
    total = np.full(DIM, sqrt(SIZE / DIM))
    difference = total * np.where(np.arange(DIM) % 2, 1.0, -1.0)
    return ((total + difference) / 2)[None], ((total - difference) / 2)[None]


def drawn_rows(case: Case, sampler: str, draws: int) -> Floats:
    """Return the rows of so many independent draws of a map."""
    num = case.make("gaussian").projection.shape[0]
    if sampler == "raw QR":
        return raw_qr(num, DIM, 1, batch_shape=(draws,))
    if case.spectrum is None:
        return SAMPLERS[sampler](num, DIM, 1, batch_shape=(draws,))
    # Whole independent blocks: the rows of one large map are those of many small ones.
    large = RandomFourierFeatures(
        DIM, COLUMNS * draws, kernel=case.spectrum, sampler=sampler, rng=1
    )
    return np.asarray(large.projection.reshape(draws, num, DIM))


def measure(case: Case, sampler: str, draws: int) -> Measured | None:
    """Measure a map with a sampler; None where the variance is not known in closed form."""
    x, y = pair()
    known = case.make("orthogonal" if sampler == "raw QR" else sampler)
    try:
        mean, variance = (float(f(x, y)[0, 0]) for f in (known.mean, known.variance))
    except NotImplementedError:
        return None
    rows = drawn_rows(case, sampler, draws)
    estimates = np.concatenate(
        [case.draw(part).estimate(x, y)[:, 0, 0] for part in np.array_split(rows, 20)]
    )
    centred = estimates - np.mean(estimates)
    square, fourth = np.mean(centred**2), np.mean(centred**4)
    return Measured(
        case.name,
        sampler,
        mean / float(known.kernel(x, y)[0, 0]) - 1,
        float(np.mean(estimates)) / mean - 1,
        sqrt(variance / draws) / mean,
        float(square) / variance,
        sqrt((fourth - square**2) / draws) / variance,
    )


def measurements(draws: int) -> list[Measured]:
    """Measure every map with every sampler that states its variance, and with raw QR."""
    found = []
    for case in cases():
        # The marginal law of a spectrum's rows is its own: samplers of independent blocks only.
        samplers = ("gaussian", "orthogonal") if case.spectrum else tuple(SAMPLERS)
        signed = case.name in ("FAVOR+", "OPRF", "cosh", "trigonometric")
        for sampler in (*samplers, *(("raw QR",) if signed else ())):
            row = measure(case, sampler, draws)
            if row is not None:
                found.append(row)
    return found


def print_measurements(rows: list[Measured]) -> None:
    """Print the table of the picture."""
    print("| map | sampler | stated bias, % | measured mean / exact - 1, % | variance / exact |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.name} | {row.sampler} | {100 * row.stated_bias:.2f} | "
            f"{100 * row.bias:+.2f} ± {100 * row.bias_error:.2f} | "
            f"{row.variance:.3f} ± {row.variance_error:.3f} |"
        )


def picture(rows: list[Measured], draws: int, path: Path) -> None:
    """Draw bias and variance of each map, two standard errors to each side."""
    figure = Figure(figsize=(10, 1.6 + 0.24 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    bias, variance = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(reversed(rows)):
        raw = row.sampler == "raw QR"
        style: Any = {
            "color": "#D55E00" if raw else "#0072B2",
            "marker": "X" if raw else "o",
            "markersize": 7 if raw else 4,
            "capsize": 2,
        }
        bias.errorbar(100 * row.bias, place, xerr=200 * row.bias_error, **style)
        variance.errorbar(row.variance, place, xerr=2 * row.variance_error, **style)
    labels = [f"{row.name}, {row.sampler}" for row in reversed(rows)]
    bias.set_yticks(range(len(rows)), labels)
    bias.set_ylim(-1, len(rows))
    for axes, exact in ((bias, 0.0), (variance, 1.0)):
        axes.axvline(exact, color="black", linewidth=1)
        axes.grid(axis="y", alpha=0.3)
    bias.set_xlabel("mean / exact mean - 1 (%)")
    variance.set_xlabel("variance / exact variance")
    figure.suptitle(
        f"Every random map with every sampler whose variance is known: {draws:,} draws,\n"
        f"d = {DIM}, {COLUMNS} columns, |x + y|² = |x - y|² = {SIZE:g}; bars: 2 standard errors;\n"
        f"orange crosses: orthogonal rows from a QR whose signs are not fixed",
        fontsize=11,
    )
    figure.savefig(path)


def alarms(check: Callable[..., Any], declared: float, runs: int) -> int:
    """Count the runs, each with draws of its own, in which an assertion fails."""
    failed = 0
    for seed in range(runs):
        try:
            check(false_alarm_rate=declared, rng=seed)
        except AssertionError:
            failed += 1
    return failed


def print_rates(runs: int = 300) -> None:
    """Print how often assertions fail, for right maps and for rows of a raw QR."""
    sizes: Any = {"dim": 4, "num_features": 8, "scale": 1.0}

    def unbiased(cls: Any, **options: Any) -> Callable[..., Any]:
        return partial(testing.assert_unbiased, cls(**sizes, rng=0), num_draws=600, **options)

    def from_raw(rng: Any) -> PositiveFeatures:
        rows = raw_qr(8, 4, rng, batch_shape=())
        return PositiveFeatures.from_projection(rows, scale=1.0)

    known = PositiveFeatures(**sizes, rng=0)
    claims: Any = {"kernel": known.kernel, "num_draws": 600}
    rows: Any = {"num": 8, "dim": 4, "num_draws": 600}
    checks: dict[str, Callable[..., Any]] = {
        "mean, FAVOR+": unbiased(PositiveFeatures),
        "mean, cosh": unbiased(HyperbolicFeatures),
        "mean, trigonometric": unbiased(TrigonometricFeatures),
        "mean, FAVOR+, variance measured": partial(
            testing.assert_unbiased, redrawn_by(known), **claims, kurtosis=5.0
        ),
        "rows, orthogonal": partial(testing.assert_gaussian_rows, SAMPLERS["orthogonal"], **rows),
        "mean, raw QR": partial(
            testing.assert_unbiased, from_raw, **claims, variance=known.variance
        ),
        "rows, raw QR": partial(
            testing.assert_gaussian_rows, partial(raw_qr, batch_shape=()), **rows
        ),
    }
    print("| 600 draws | declared 20 % | declared 5 % | declared 1e-9 |")
    print("|---|---|---|---|")
    for name, check in checks.items():
        cells = (f"{alarms(check, rate, runs) / runs:.1%}" for rate in (0.2, 0.05, 1e-9))
        print(f"| {name} | {' | '.join(cells)} |")


def redrawn_by(feature_map: Any) -> Callable[[Any], Any]:
    """Return a factory of maps that do not know their variance."""
    return lambda rng: type(feature_map).from_projection(
        feature_map.redraw(rng).projection, scale=feature_map.scale
    )


def main() -> None:
    """Print the tables and write the picture."""
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    print("Relative variance with 2 d columns, from the closed forms\n")
    print_variances()
    rows = measurements(draws)
    print(f"\nMonte Carlo, {draws} draws\n")
    print_measurements(rows)
    picture(rows, draws, path)
    print("\nHow often assertions fail, of 300 runs\n")
    print_rates()


if __name__ == "__main__":
    main()
