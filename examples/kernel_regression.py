#!/usr/bin/env python3
"""Kernel regression of 200,000 rows, and random features, beside what scikit-learn has.

The Nadaraya-Watson estimator is softmax attention to training rows by their distance, so linattn
computes it exactly without the matrix of all pairs, which would take 32 GB here. What is printed:

1. Error, time and memory on two generated surfaces, beside nearest neighbours, ridge regression on
   random features, Gaussian processes (of as many rows as they can take) and statsmodels. On the
   smooth surface ridge regression is better and cheaper by far, on the rippled one kernels are.
2. How far landmarks are from exact, by bandwidth. Read it before you ask for landmarks: where the
   bandwidth is narrow they fail.
3. Both estimators on scikit-learn's diabetes and digits, by cross-validation.
4. Random features on scikit-learn's digits at equal width: the error of the kernel and the accuracy
   of a linear classifier, over 20 seeds.

    python examples/kernel_regression.py --out pictures
"""

from __future__ import annotations

import io
import json
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any, NamedTuple

try:
    import numpy as np
    import typer
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_diabetes, load_digits
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.kernel_approximation import Nystroem, RBFSampler
    from sklearn.linear_model import Ridge, RidgeClassifier
    from sklearn.metrics.pairwise import rbf_kernel
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    import linattn
    from linattn.sklearn import KernelClassifier, KernelRegressor, RandomFeatures
except ModuleNotFoundError as error:
    print(f"kernel_regression.py needs {error.name}: pip install '.[examples]'", file=sys.stderr)
    raise SystemExit(2) from None

Floats = NDArray[np.float64]

NEIGHBORS = (5, 10, 20, 40, 80)
"""Numbers of neighbours: the best on validation rows is shown."""

WIDTH = 256
"""Features of ridge regression."""

GAMMAS = (1.0, 10.0, 100.0, 1000.0)
"""Kernels of these features: the best on validation rows, fitted to a tenth of all, is shown."""

RIDGE = 1e-3

MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Bandwidths that landmarks are measured at, in the one of least error."""


class Sizes(NamedTuple):
    """How much is computed."""

    rows: int
    queries: int
    gaussian_process_rows: int
    statsmodels_queries: int
    landmarks: tuple[int, ...]
    widths: tuple[int, ...]
    seeds: int


FULL = Sizes(200_000, 20_000, 2_000, 50, (256, 512), (64, 128, 256, 512), 20)
QUICK = Sizes(3_000, 300, 200, 5, (32, 64), (64, 128), 2)


# --- 1. Regression -------------------------------------------------------------------------------


def smooth(X: Floats) -> Floats:
    """Return the first four terms of Friedman 1, of 4 coordinates."""
    a, b, c, d = X.T
    return np.asarray(10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d)


def rippled(X: Floats) -> Floats:
    """Return waves that grow shorter away from a corner, of 2 coordinates."""
    return np.asarray(5 * np.sin(60 * np.sum(X**2, axis=1)))


SURFACES = {"smooth": (smooth, 4), "rippled": (rippled, 2)}
"""Surfaces over the unit cube of so many coordinates."""


class Task(NamedTuple):
    """Rows of a surface with noise of variance 1, and others of the surface itself."""

    name: str
    X: Floats
    y: Floats
    validation: Floats
    validation_truth: Floats
    queries: Floats
    truth: Floats

    @classmethod
    def of(cls, name: str, sizes: Sizes, rng: np.random.Generator) -> Task:
        """Draw rows evenly from the cube."""
        surface, dim = SURFACES[name]
        X, validation, queries = (
            rng.random((n, dim)) for n in (sizes.rows, sizes.queries // 4, sizes.queries)
        )
        y = surface(X) + rng.standard_normal(len(X))
        return cls(name, X, y, validation, surface(validation), queries, surface(queries))


@dataclass(frozen=True)
class Result:
    """What was measured of one estimator.

    Attributes
    ----------
    name : str
        With what was chosen.
    error : float
        Root mean square distance from the surface.
    fit_seconds, predict_seconds : float
        Processor time; of what was shown only, not of what was tried beside it.
    mebibytes : float
        Peak of NumPy's memory beyond the task.
    note : str
        What it was not given.
    """

    name: str
    error: float
    fit_seconds: float
    predict_seconds: float
    mebibytes: float
    note: str = ""


def measure(name: str, model: Any, task: Task) -> Result:
    """Fit, predict and compare with the surface."""
    tracemalloc.start()
    begin = process_time()
    model.fit(task.X, task.y)
    fitted = process_time()
    means = model.predict(task.queries)
    end = process_time()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error = root_mean_square(means - task.truth)
    return Result(name, error, fitted - begin, end - fitted, peak / 2**20)


def best(task: Task, models: list[tuple[str, Any]], num_rows: int) -> tuple[str, Any]:
    """Return the model that comes nearest to the surface on validation rows."""

    def error(named: tuple[str, Any]) -> float:
        model = named[1].fit(task.X[:num_rows], task.y[:num_rows])
        means = model.predict(task.validation)
        return root_mean_square(means - task.validation_truth)

    return min(models, key=error)


def root_mean_square(x: Floats) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(x**2)))


def alternatives(task: Task, seed: int) -> Iterator[tuple[str, Any]]:
    """Estimators of scikit-learn, each with its best setting."""
    neighbors = [(f"{k} nearest neighbours", KNeighborsRegressor(k)) for k in NEIGHBORS]
    yield best(task, neighbors, len(task.X))
    makers: dict[str, Callable[[float], Any]] = {
        "RBFSampler": lambda g: RBFSampler(gamma=g, n_components=WIDTH, random_state=seed),
        "Nystroem": lambda g: Nystroem(gamma=g, n_components=WIDTH, random_state=seed),
        "RandomFeatures": lambda g: RandomFeatures(
            bandwidth=(2 * g) ** -0.5, num_features=WIDTH, random_state=seed
        ),
    }
    for name, make in makers.items():
        pipelines = [make_pipeline(make(g), Ridge(RIDGE)) for g in GAMMAS]
        named = [(f"ridge on {WIDTH} {name}", pipeline) for pipeline in pipelines]
        yield best(task, named, len(task.X) // 10)


def gaussian_process(task: Task, num_rows: int) -> Result:
    """Measure exact Gaussian-process regression of the first rows: all would take n^2 memory."""
    kernel = ConstantKernel(30.0) * RBF(0.5) + WhiteKernel(1.0)
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    part = task._replace(X=task.X[:num_rows], y=task.y[:num_rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds of its hyperparameters
        result = measure(f"Gaussian process, {num_rows:,} rows", model, part)
    memory = 8 * len(task.X) ** 2 / 1e9
    note = f"Gaussian process: {num_rows:,} rows; all would take {memory:,.0f} GB"
    return Result(**asdict(result) | {"note": note})


def of_statsmodels(task: Task, bandwidth: float, num_queries: int) -> Result | None:
    """Measure statsmodels' KernelReg at the same bandwidth; None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of changes to come
            from statsmodels.nonparametric.kernel_regression import KernelReg
    except ImportError:
        return None

    class Model:
        def fit(self, X: Floats, y: Floats) -> None:
            self.model = KernelReg(
                y, X, "c" * X.shape[1], reg_type="lc", bw=[bandwidth] * X.shape[1]
            )

        def predict(self, queries: Floats) -> Any:
            return self.model.fit(queries)[0]

    part = task._replace(queries=task.queries[:num_queries], truth=task.truth[:num_queries])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = measure("statsmodels KernelReg", Model(), part)
    factor = len(task.queries) / num_queries
    return Result(
        result.name,
        result.error,
        result.fit_seconds,
        result.predict_seconds * factor,
        result.mebibytes,
        f"KernelReg: {num_queries} queries, time for all {factor:g} times theirs",
    )


def regression(task: Task, sizes: Sizes, seed: int) -> tuple[list[Result], float]:
    """Measure all estimators; return the bandwidth of least leave-one-out error, too."""
    ours = KernelRegressor(random_state=seed)
    results = [measure("KernelRegressor()", ours, task)]
    bandwidth = float(ours.bandwidth_)
    given = KernelRegressor(bandwidth, method="exact")
    results.append(measure("  exact, bandwidth given", given, task))
    m = sizes.landmarks[-1]
    landmarks = KernelRegressor(bandwidth, method="landmarks", num_landmarks=m, random_state=seed)
    results.append(measure(f"  {m} landmarks, the same", landmarks, task))
    results += [measure(*named, task) for named in alternatives(task, seed)]
    results.append(gaussian_process(task, sizes.gaussian_process_rows))
    other = of_statsmodels(task, bandwidth, sizes.statsmodels_queries)
    return results + ([] if other is None else [other]), bandwidth


# --- 2. Where landmarks fail ---------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """Landmarks at one bandwidth.

    Attributes
    ----------
    bandwidth : float
        Of the kernel.
    exact_error : float
        Of exact regression, from the surface.
    from_exact : dict of int to float
        Root mean square distance of landmarks from exact, over the deviation of exact.
    """

    bandwidth: float
    exact_error: float
    from_exact: dict[int, float]


def landmark_distances(task: Task, sizes: Sizes, bandwidth: float, seed: int) -> list[Distance]:
    """Measure landmarks at bandwidths around the one of least error, on fewer queries."""
    queries, truth = (x[: max(200, sizes.queries // 10)] for x in (task.queries, task.truth))
    found = []
    for multiple in MULTIPLES:
        width = multiple * bandwidth
        exact = KernelRegressor(width, method="exact").fit(task.X, task.y).predict(queries)
        from_exact = {}
        for m in sizes.landmarks:
            model = KernelRegressor(width, method="landmarks", num_landmarks=m, random_state=seed)
            means = model.fit(task.X, task.y).predict(queries)
            from_exact[m] = root_mean_square(means - exact) / float(np.std(exact))
        found.append(Distance(width, root_mean_square(exact - truth), from_exact))
    return found


# --- 3. Data that scikit-learn ships -------------------------------------------------------------


def shipped() -> dict[str, tuple[float, float]]:
    """Return R^2 on diabetes and accuracy on digits, each by 5-fold cross-validation."""
    models: dict[str, tuple[Any, Any]] = {
        "kernel": (KernelRegressor(), KernelClassifier()),
        "10 nearest neighbours": (KNeighborsRegressor(10), KNeighborsClassifier(10)),
        "linear": (Ridge(1.0), RidgeClassifier(1.0)),
    }
    folds = KFold(5, shuffle=True, random_state=0)
    found = {}
    for name, (regressor, classifier) in models.items():
        scaled = make_pipeline(StandardScaler(), regressor)
        r2 = cross_val_score(scaled, *load_diabetes(return_X_y=True), cv=folds)
        accuracy = cross_val_score(classifier, *load_digits(return_X_y=True), cv=folds)
        found[name] = (float(r2.mean()), float(accuracy.mean()))
    return found


# --- 4. Random features --------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """One transformer at one width; mean and standard deviation over seeds.

    Attributes
    ----------
    name : str
        Of the transformer.
    width : int
        Columns.
    kernel_error : tuple of float
        Frobenius norm of the difference of estimate and kernel, over that of the kernel.
    accuracy : tuple of float
        Of a ridge classifier on held-out digits.
    """

    name: str
    width: int
    kernel_error: tuple[float, float]
    accuracy: tuple[float, float]


def transformers(width: int, gamma: float, seed: int) -> dict[str, Any]:
    """Return transformers of one kernel and width."""
    given: dict[str, Any] = {"num_features": width, "bandwidth": (2 * gamma) ** -0.5}
    return {
        "RBFSampler": RBFSampler(gamma=gamma, n_components=width, random_state=seed),
        "Nystroem": Nystroem(gamma=gamma, n_components=width, random_state=seed),
        "gaussian rows": RandomFeatures(sampler="gaussian", random_state=seed, **given),
        "orthogonal rows": RandomFeatures(random_state=seed, **given),
        "stratified rows": RandomFeatures(sampler="stratified", random_state=seed, **given),
    }


def digits(sizes: Sizes) -> list[Features]:
    """Measure transformers on scikit-learn's digits, 1,000 to fit and 797 held out."""
    X, y = load_digits(return_X_y=True)
    train, test = slice(0, 1000), slice(1000, None)
    gamma = 1 / (X.shape[1] * float(np.var(X[train])))
    kernel = rbf_kernel(X[test], gamma=gamma)
    found = []
    for width in sizes.widths:
        measured: dict[str, list[tuple[float, float]]] = {}
        for seed in range(sizes.seeds):
            for name, transformer in transformers(width, gamma, seed).items():
                fitted, held_out = (
                    transformer.fit_transform(X[train]),
                    transformer.transform(X[test]),
                )
                error = np.linalg.norm(held_out @ held_out.T - kernel) / np.linalg.norm(kernel)
                accuracy = RidgeClassifier(RIDGE).fit(fitted, y[train]).score(held_out, y[test])
                measured.setdefault(name, []).append((float(error), float(accuracy)))
        for name, pairs in measured.items():
            errors, accuracies = zip(*pairs, strict=True)
            found.append(Features(name, width, summary(errors), summary(accuracies)))
    return found


def summary(numbers: tuple[float, ...]) -> tuple[float, float]:
    """Return mean and standard deviation."""
    return float(np.mean(numbers)), float(np.std(numbers, ddof=1))


# --- 5. Tables and pictures ----------------------------------------------------------------------


def table_of(title: str, caption: str, names: list[str]) -> Table:
    """Return an empty table."""
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column(names[0])
    for name in names[1:]:
        table.add_column(name, justify="right")
    return table


def result_table(results: list[Result], task: Task) -> Table:
    """Return a row for each estimator."""
    notes = "".join(f" {result.note}." for result in results if result.note)
    shape = f"{len(task.X):,} rows of {task.X.shape[1]} coordinates"
    caption = (
        f"{shape}, noise of variance 1, {len(task.queries):,} queries, one "
        f" core. RMSE: from the surface; time: of the processor; memory: beyond the rows.{notes}"
    )
    table = table_of(
        f"A {task.name} surface", caption, ["estimator", "RMSE", "fit", "predict", "memory"]
    )
    for result in results:
        table.add_row(
            result.name,
            f"{result.error:.3f}",
            f"{result.fit_seconds:.1f} s",
            f"{result.predict_seconds:,.1f} s",
            f"{result.mebibytes:,.0f} MiB",
        )
    return table


def distance_table(distances: list[Distance]) -> Table:
    """Return a row for each bandwidth."""
    caption = (
        "Smooth surface. Landmarks: root mean square distance from exact regression, over its "
        "deviation."
    )
    numbers = list(distances[0].from_exact)
    names = ["bandwidth", "RMSE of exact", *(f"{m} landmarks" for m in numbers)]
    table = table_of("Where landmarks fail", caption, names)
    for found in distances:
        shares = [f"{found.from_exact[m]:.3f}" for m in numbers]
        table.add_row(f"{found.bandwidth:.3g}", f"{found.exact_error:.3f}", *shares)
    return table


def shipped_table(found: dict[str, tuple[float, float]]) -> Table:
    """Return a row for each kind of estimator."""
    caption = "5-fold cross-validation."
    table = table_of("Shipped data", caption, ["estimator", "diabetes, R^2", "digits, accuracy"])
    for name, (r2, accuracy) in found.items():
        table.add_row(name, f"{r2:.3f}", f"{100 * accuracy:.1f} %")
    return table


def feature_table(features: list[Features], seeds: int) -> Table:
    """Return a row for each transformer, a column for each width: kernel error and accuracy."""
    widths = sorted({found.width for found in features})
    caption = (
        f"Kernel error, and accuracy of a ridge classifier in percent, on 797 digits held out; "
        f"means of {seeds} seeds. The last three are RandomFeatures."
    )
    table = table_of("Random features", caption, ["transformer", *map(str, widths)])
    for name in dict.fromkeys(found.name for found in features):
        cells = [
            f"{found.kernel_error[0]:.3f} {100 * found.accuracy[0]:.1f}"
            for found in features
            if found.name == name
        ]
        table.add_row(name, *cells)
    return table


def picture(
    tables: dict[str, list[Result]], distances: list[Distance], features: list[Features]
) -> bytes:
    """Return a PNG of all tables."""
    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    (*panels, second, third) = figure.subplots(2, 2).ravel()
    for axes, (name, results) in zip(panels, tables.items(), strict=True):
        for result in results:
            seconds = result.fit_seconds + result.predict_seconds
            axes.plot(seconds, result.error, "o", label=result.name.strip())
        axes.set(xscale="log", yscale="log", title=f"A {name} surface")
        axes.set(xlabel="seconds, fit and predict", ylabel="RMSE from the surface")
        axes.legend(fontsize=7)
    for m in distances[0].from_exact:
        points = [(found.bandwidth, found.from_exact[m]) for found in distances]
        second.plot(*zip(*points, strict=True), "o-", label=f"{m} landmarks")
    second.set(xscale="log", yscale="log", title="Where landmarks fail")
    second.set(xlabel="bandwidth", ylabel="distance from exact over its deviation")
    second.legend()
    for name in dict.fromkeys(found.name for found in features):
        rows = [found for found in features if found.name == name]
        widths, errors = [row.width for row in rows], [row.kernel_error for row in rows]
        means, deviations = zip(*errors, strict=True)
        third.errorbar(widths, means, deviations, marker="o", capsize=2, label=name)
    third.set(xscale="log", yscale="log", title="Random features of digits")
    third.set(xlabel="columns", ylabel="kernel error")
    third.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# --- 6. The command ------------------------------------------------------------------------------


def command(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a few seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Of rows and maps.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for kernel_regression.json and .png.")
    ] = None,
) -> None:
    """Compare kernel regression and random features with what scikit-learn has."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    run(QUICK if quick else FULL, seed, out)


def run(sizes: Sizes, seed: int, out: Path | None) -> None:
    """Measure on one core, print the tables and write the files."""
    begin = perf_counter()
    console = Console(markup=False, highlight=False, emoji=False, width=80)
    with threadpool_limits(1), linattn.config(num_threads=1):
        tables, bandwidths = {}, {}
        tasks = [Task.of(name, sizes, np.random.default_rng(seed)) for name in SURFACES]
        for task in tasks:
            tables[task.name], bandwidths[task.name] = regression(task, sizes, seed)
            console.print(result_table(tables[task.name], task))
        distances = landmark_distances(tasks[0], sizes, bandwidths["smooth"], seed)
        console.print(distance_table(distances))
        scores = shipped()
        console.print(shipped_table(scores))
        features = digits(sizes)
        console.print(feature_table(features, sizes.seeds))
    console.print(f"{perf_counter() - begin:.0f} s in all.")
    if out is None:
        return
    record = {
        "linattn": linattn.__version__,
        "sizes": sizes._asdict(),
        "seed": seed,
        "bandwidths": bandwidths,
        "regression": {name: list(map(asdict, table)) for name, table in tables.items()},
        "landmarks": [asdict(found) for found in distances],
        "shipped": scores,
        "features": [asdict(found) for found in features],
    }
    text = json.dumps(record, indent=2) + "\n"
    (out / "kernel_regression.json").write_text(text, encoding="utf-8")
    (out / "kernel_regression.png").write_bytes(picture(tables, distances, features))
    console.print(
        f"Written to {out}: kernel_regression.json, kernel_regression.png", soft_wrap=True
    )


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(command)

if __name__ == "__main__":
    app(prog_name="kernel_regression.py")
