"""Published packages through the tests of a mean of `linattn.testing`; makes docs/bugs.md.

    python -m benchmarks.bugs > docs/bugs.md

Packages that are not installed are named as such. They install, with what they import, by::

    pip install --no-deps performer-pytorch==1.1.4 srf-attention==1.0.16 turboquant-llm==0.1.0 \
        langchain-turboquant==0.1.0 bitpolar==0.3.3 gpytorch==1.15.2 \
        einops axial-positional-embedding local-attention linear_operator jaxtyping wadler-lindig
"""

# Other people's packages, imported where they are used, have no types.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, no-untyped-def"
# mypy: disable-error-code="no-any-return"

# ruff: noqa: D103  (an adapter is its code)

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np

from linattn.feature_maps import PositiveFeatures
from linattn.testing import assert_estimator, assert_gaussian_rows, assert_unbiased, batteries

X = np.random.default_rng(5).uniform(0, 1, (5, 4))
"""Inputs of kernels."""

SOFTMAX = PositiveFeatures(16, 16, scale=1.0, rng=0)
"""A right map, for the kernel and its variance."""

MAX_LINES = 8
"""Of an adapter."""


def seed(rng: np.random.Generator) -> int:
    """Draw a seed for what takes no generator."""
    return int(rng.integers(2**31))


def performer(rng):
    import torch
    from performer_pytorch.performer_pytorch import gaussian_orthogonal_random_matrix

    torch.manual_seed(seed(rng))
    rows = gaussian_orthogonal_random_matrix(16, 16).double().numpy()
    return PositiveFeatures.from_projection(rows, scale=1.0)


def raw_qr(dim, rng):
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


def nystroem(rng):
    from sklearn.kernel_approximation import Nystroem

    approximation = Nystroem(gamma=0.5, n_components=20, random_state=seed(rng))
    Z = approximation.fit(rng.uniform(0, 1, (100, 4))).transform(X)
    return Z @ Z.T


def simplex_rows(num, dim, rng):
    import torch
    from srf_attention import simplex_random_matrix

    torch.manual_seed(seed(rng))
    return simplex_random_matrix(num, dim).double().numpy()


def turboquant_haar(dim, rng):
    from turboquant_llm.rotation import random_orthogonal_matrix

    return random_orthogonal_matrix(dim, rng)


def turboquant_scores(query, key, rng):
    from langchain_turboquant.quantizer import TurboQuantizer

    quantizer = TurboQuantizer(key.shape[-1], bits=1, seed=seed(rng))
    return np.sum(query * quantizer.dequantize(quantizer.quantize(key)), axis=-1)


def rbf_sampler(rng):
    from sklearn.kernel_approximation import RBFSampler

    Z = RBFSampler(gamma=0.5, n_components=20, random_state=seed(rng)).fit_transform(X)
    return Z @ Z.T


def skewed_chi2(rng):
    from sklearn.kernel_approximation import SkewedChi2Sampler

    sampler = SkewedChi2Sampler(skewedness=1.0, n_components=20, random_state=seed(rng))
    Z = sampler.fit_transform(X)
    return Z @ Z.T


def count_sketch(rng):
    from sklearn.kernel_approximation import PolynomialCountSketch

    Z = PolynomialCountSketch(degree=2, n_components=20, random_state=seed(rng)).fit_transform(X)
    return Z @ Z.T


def gaussian_projection(x, rng):
    from sklearn.random_projection import GaussianRandomProjection

    return GaussianRandomProjection(32, random_state=seed(rng)).fit_transform(x)


def sparse_projection(x, rng):
    from sklearn.random_projection import SparseRandomProjection

    return SparseRandomProjection(32, density=0.5, random_state=seed(rng)).fit_transform(x)


def ortho_group(dim, rng):
    from scipy.stats import ortho_group

    return ortho_group.rvs(dim, random_state=rng)


def special_ortho_group(dim, rng):
    from scipy.stats import special_ortho_group

    return special_ortho_group.rvs(dim, random_state=rng)


def clarkson_woodruff(x, rng):
    from scipy.linalg import clarkson_woodruff_transform

    return clarkson_woodruff_transform(x.T, 64, seed=rng).T


def orthogonal_(dim, rng):
    import torch

    torch.manual_seed(seed(rng))
    return torch.nn.init.orthogonal_(torch.empty(dim, dim, dtype=torch.float64)).numpy()


def rff_kernel(rng):
    import gpytorch
    import torch

    torch.manual_seed(seed(rng))
    kernel = gpytorch.kernels.RFFKernel(20, num_dims=4).initialize(lengthscale=1.0)
    with torch.no_grad():
        return kernel(torch.tensor(X, dtype=torch.float32)).to_dense().numpy()


def bitpolar_scores(query, key, rng):
    import bitpolar

    quantizer = bitpolar.TurboQuantizer(key.shape[-1], bits=4, seed=seed(rng))
    pairs = zip(query.astype(np.float32), key.astype(np.float32), strict=True)
    return np.array([quantizer.inner_product(quantizer.encode(k), q) for q, k in pairs])


def gaussian_kernel() -> Any:
    """Return ``exp(-|x - y|^2 / 2)`` of all pairs."""
    return np.exp(-np.sum((X[:, None] - X) ** 2, axis=-1) / 2)


def skewed_chi2_kernel() -> Any:
    """Return the skewed chi-squared kernel with skewedness 1."""
    roots = np.sqrt(X + 1)
    factors = 2 * roots[:, None] * roots / (X[:, None] + X + 2)
    return np.prod(factors, axis=-1)


class Subject(NamedTuple):
    """A function of a package, its adapter, and the test of what it claims."""

    name: str
    package: str
    adapter: Callable[..., Any]
    claim: str
    check: Callable[[Any], Any]
    right: str = ""
    """What should have been seen, for those that fail."""
    twin: Callable[..., Any] | None = None
    """A right one, whose result says the power, where the message of a failure does not."""


def unbiased(draw: Any) -> Any:
    """Test a map of the softmax kernel."""
    return assert_unbiased(draw, kernel=SOFTMAX.kernel, variance=SOFTMAX.variance)


def gram(expected: Callable[[], Any], **claim: Any) -> Callable[[Any], Any]:
    """Test the matrix of an approximated kernel."""
    return partial(assert_estimator, expected=expected, **claim)


def rows_of_64(draw: Any) -> Any:
    """Test rows of N(0, I) in 64 dimensions."""
    return assert_gaussian_rows(draw, 64, 64, num_draws=1000)


BOUNDED = {"bounds": (-2, 2)}
"""Averages of ``2 cos(.) cos(.)``."""

SUBJECTS = (
    Subject(
        "`gaussian_orthogonal_random_matrix`", "performer-pytorch", performer,
        "unbiased features of exp(x.y)", unbiased,
        "the kernel; multiply by the signs of diag R", SOFTMAX.redraw,
    ),
    Subject(
        "rows straight from `np.linalg.qr`", "numpy", raw_qr, "Haar matrix", batteries.haar,
        "E Q = 0; multiply by the signs of diag R",
    ),
    Subject(
        "`Nystroem`, rows picked at random", "scikit-learn", nystroem,
        "unbiased kernel exp(-abs(x - y)^2 / 2)", gram(gaussian_kernel, bounds=(-1, 1)),
        "it claims no such thing: a projection is never above the kernel",
    ),
    Subject(
        "`simplex_random_matrix`", "srf-attention", simplex_rows, "rows are N(0, I), d = 64",
        rows_of_64, "E abs(w)^2 = 64; these rows have 1",
        lambda num, dim, rng: rng.standard_normal((num, dim)),
    ),
    Subject(
        "`random_orthogonal_matrix`", "turboquant-llm", turboquant_haar,
        "Haar matrix (its docstring)", batteries.haar,
        "E Q = 0; the signs are those of diag R, not of diag Q",
    ),
    Subject(
        "`TurboQuantizer`, 1 bit", "langchain-turboquant", turboquant_scores,
        "unbiased dot products (its docstring)", partial(batteries.quantizer, dims=(8, 64)),
        "factor 1; the correction lacks a factor sqrt(m)",
    ),
    Subject("`RBFSampler`", "scikit-learn", rbf_sampler, "kernel exp(-abs(x - y)^2 / 2)",
            gram(gaussian_kernel, **BOUNDED)),
    Subject("`SkewedChi2Sampler`", "scikit-learn", skewed_chi2, "skewed chi-squared kernel",
            gram(skewed_chi2_kernel, **BOUNDED)),
    Subject("`PolynomialCountSketch`", "scikit-learn", count_sketch, "kernel (x.y)^2",
            gram(lambda: (X @ X.T) ** 2, kurtosis=25)),
    Subject("`GaussianRandomProjection`", "scikit-learn", gaussian_projection,
            "dot products are kept", batteries.sketch),
    Subject("`SparseRandomProjection`", "scikit-learn", sparse_projection,
            "dot products are kept", batteries.sketch),
    Subject("`ortho_group`", "scipy", ortho_group, "Haar matrix", batteries.haar),
    Subject("`special_ortho_group`", "scipy", special_ortho_group, "Haar rotation",
            partial(batteries.haar, rotations=True)),
    Subject("`clarkson_woodruff_transform`", "scipy", clarkson_woodruff, "dot products are kept",
            batteries.sketch),
    Subject("`torch.nn.init.orthogonal_`", "torch", orthogonal_, "Haar matrix", batteries.haar),
    Subject("`RFFKernel`", "gpytorch", rff_kernel, "kernel exp(-abs(x - y)^2 / 2)",
            gram(gaussian_kernel, bounds=(-1, 1))),
    Subject("`TurboQuantizer`, 4 bits", "bitpolar", bitpolar_scores, "unbiased dot products",
            partial(batteries.quantizer, dims=(8, 64))),
)  # fmt: skip

REPORTS = (
    ("google-research/google-research", 436, "orthogonal features from a QR without signs", "haar"),
    ("lucidrains/performer-pytorch", 8, "the same, in the matrix above", "haar"),
    ("idiap/fast-transformers", 87, "the same, in a third library", "haar"),
    ("carnotresearch/cr-sparse", 28, "random orthonormal bases without signs", "haar"),
    ("quantumlib/Cirq", 1480, "random orthogonal matrices without signs", "haar"),
    ("chainer/chainer", 5615, "an initializer whose signs were not random", "haar"),
    ("scipy/scipy", 8187, "2 x 2 matrices whose determinants were not random", "haar"),
    ("vprusso/toqito", 1031, "uniform numbers in the place of normal ones before a QR", "haar"),
    ("fla-org/flash-linear-attention", 1077, "over 65,535 sequences", "check_recurrence"),
)
"""Repository, number, what in ordinary words, and the test that finds it."""


class Result(NamedTuple):
    """How a subject ended."""

    verdict: str
    power: str
    seen: str


def attempt(subject: Subject, draw: Callable[..., Any]) -> Result:
    """Run a subject's test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's code
        try:
            found = subject.check(draw)
        except AssertionError as error:
            return Result("**fails**", power_in(str(error)), seen_in(str(error)))
        except ImportError as error:
            return Result(f"not run: {error.name} is not installed", "", "")
    return Result("passes", power_in(str(getattr(found, "detail", found))), "")


def words(text: str) -> str:
    """Return a text without breaks of lines."""
    return " ".join(text.split())


def power_in(text: str) -> str:
    """Return the largest of the biases that rows of a report would have seen, or a sentence."""
    shares = sorted(map(float, re.findall(r"relative bias of ([\d.e+-]+) %", words(text))))
    if shares:
        least, largest = (f"{share:.2g}" for share in (shares[0], shares[-1]))
        return f"{largest} %" if least == largest else f"{least} to {largest} %"
    found = re.search(r"; sees (?:a bias of )?(.*?)(?:;|$)", words(text))
    return found[1].replace("|omega|", "abs(omega)") if found else ""


def seen_in(text: str) -> str:
    """Return what a failure saw and wanted."""
    found = re.search(
        r"mean of (?:.(?!mean of ))*? is (\S+), .{0,60}?(?:is|it is) (\S+)[ :.]*(\([^)]*\))?",
        words(text),
    )
    if found is None:
        return words(text)[:120]
    ratio = f" {found[3]}" if found[3] and "no ratio" not in found[3] else ""
    return f"{found[1]} for {found[2].rstrip(':.')}{ratio}"


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def adapters() -> str:
    """Return the source of every adapter."""
    return "\n\n".join(dedent(inspect.getsource(subject.adapter)) for subject in SUBJECTS)


def page() -> str:
    """Run everything and return the page."""
    failing, passing = [], []
    for subject in SUBJECTS:
        begun = time.process_time()
        result = attempt(subject, subject.adapter)
        power = result.power
        if subject.twin is not None and result.verdict != "passes":
            power = attempt(subject, subject.twin).power
        package = f"{subject.package} {version_of(subject.package)}"
        row = [subject.name, package, subject.claim, result.verdict, power]
        if subject.right:
            failing.append([*row, result.seen, subject.right])
        else:
            passing.append([*row, *([result.seen] if result.seen else [])])
        print(f"{row} {result.seen} {time.process_time() - begun:.0f} s", file=sys.stderr)
    head = ["what", "package", "claim tested", "verdict", "visible bias"]
    return PAGE.format(
        failing=table([*head, "seen, for what", "right"], failing),
        passing=table(head, passing),
        adapters=adapters().strip(),
        reports=table(["report", "what", "found by"], [report(*row) for row in REPORTS]),
    )


def report(repository: str, number: int, what: str, test: str) -> list[str]:
    """Return a row with a link."""
    link = f"[{repository}#{number}](https://github.com/{repository}/issues/{number})"
    return [link, what, f"`{test}`"]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PAGE = """\
## Bugs this finds

What [the tests of randomized estimators](#any-randomized-estimator) say of published packages. A
right estimator fails with a probability of at most 1e-9. `python -m benchmarks.bugs` makes this
page; each package is reached by an adapter of at most eight lines.

### What fails

{failing}

`Nystroem` is here to show what the test sees: nobody calls it unbiased. *Visible bias* is what
each test announces: a bias of that size is found with a probability of .99, a smaller one with
luck. It is relative to the mean, or to one standard deviation of a draw where the mean is near 0.
A battery has one for each of its rows.

### What passes

{passing}

### Reports in other projects

Found there by somebody who met them. The last column names the test that tries this.

{reports}

### The adapters

`X` holds five vectors; `seed(rng)` draws an integer.

```py
{adapters}
```
"""

if __name__ == "__main__":
    print(page(), end="")
