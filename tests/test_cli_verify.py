"""`linattn verify`, by what it prints and returns."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from functools import partial

import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from linattn.cli import maps, verify
from linattn.testing import check_feature_map
from tests import command

FEW = ("--draws", "600", "--dim", "4")

MINE = '''
from linattn.feature_maps import PositiveFeatures
from linattn.typing import Features

good = PositiveFeatures(4, 16, rng=0)


def factory(rng):
    return PositiveFeatures(4, 16, rng=rng)


class Scaled:
    """A thousandth too large: not the kernel it claims."""

    dim, num_features = 4, 4

    def query_features(self, x):
        return Features(None, x * 1.001)

    key_features = query_features

    def kernel(self, x, y):
        return x @ y.swapaxes(-1, -2)


class holder:
    bad = Scaled()


number = 7
calls = []


def raises(rng):
    return 1 / 0


def raises_later(rng):
    calls.append(rng)
    return good.redraw(rng) if len(calls) < 5 else 1 / 0


class NoVariance:
    """The least that a random map needs for its mean to be checked."""

    dim, num_features = 4, 16
    inner = good

    def query_features(self, x):
        return self.inner.query_features(x)

    def key_features(self, x):
        return self.inner.key_features(x)

    def kernel(self, x, y):
        return self.inner.kernel(x, y)

    def redraw(self, rng):
        twin = type(self)()
        twin.inner = self.inner.redraw(rng)
        return twin


class NoKernel(NoVariance):
    kernel = None


class Plain(NoVariance):
    def query_features(self, x):
        return x


no_variance, no_kernel, plain = NoVariance(), NoKernel(), Plain()
'''


call, passed = (partial(run, "verify") for run in (command.call, command.passed))


@pytest.fixture(autouse=True)
def one_length(monkeypatch):
    """What chance does not decide is tried at one length here; test_testing.py tries all."""
    monkeypatch.setitem(inspect.unwrap(check_feature_map).__kwdefaults__, "length", 33)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Make a module of the user's, in a folder that is the current one; its name is returned."""
    name = "mine_to_verify"
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "broken_to_verify.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


def test_shipped_map_passes():
    result = passed("PositiveFeatures", *FEW)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for text in ("PositiveFeatures(dim=4", "variance", "600 draws", "0 FAILED", "2e-09"):
        assert text in result.stdout


def test_fitted_map_is_fitted_to_a_sample():
    result = passed("DenseExponentialFeatures", *FEW, "--sampler", "gaussian")
    assert "causal is False" in " ".join(result.stdout.replace("│", " ").split())


def test_seed_makes_other_draws():
    first, again = (call("PositiveFeatures", *FEW, "--seed", 1) for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == again.stdout
    found = [maps.find_map("PositiveFeatures", maps.Choice(4, 8, None, s)) for s in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", ["good", "factory"])
def test_map_of_the_user_passes(mine, name):
    passed(f"{mine}:{name}", *FEW)


def test_wrong_map_of_the_user_fails(mine):
    result = call(f"{mine}:holder.bad")
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.stdout
    assert "assert_unbiased" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Positive"], ["PositiveFeatures", "module:object", "got Positive"]),
        (["BaseFeatureMap"], ["want one of"]),
        (["Reparametrized"], ["Reparametrized", "module:object"]),
        (["no.such.module:name"], ["importing no.such.module fails"]),
        (["broken_to_verify:name"], ["RuntimeError: no licence"]),
        ([":name"], ["want module:object"]),
        (["mine_to_verify:nothing"], ["nothing is not in mine_to_verify"]),
        (["mine_to_verify:number"], ["of type int"]),
        (["mine_to_verify:Scaled"], ["is a class"]),
        (["PositiveFeatures", "--sampler", "dice"], ["sampler must be one of"]),
        (["PositiveFeatures", "--dim", "0"], ["dim"]),
        (["EluFeatures", "--sampler", "gaussian"], ["--sampler", "EluFeatures"]),
        (["PositiveFeatures", "--seed", "-1"], ["--seed", "-1"]),
        (["PositiveFeatures", "--draws", "0"], ["--draws", "0"]),
    ],
)
def test_bad_names_are_one_line_and_exit_code_2(mine, arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("linattn: error: ")
    for word in words:
        assert word in result.stderr


RAW_QR = '''
from functools import partial
from math import log

import numpy as np
from linattn.feature_maps import PositiveFeatures
from linattn.sampling import Sampler
from linattn.typing import Features


def raw_qr(num, dim, rng, batch_shape=()):
    """Rows of a QR whose signs are not fixed."""
    rng = np.random.default_rng(rng)
    blocks = -(-num // dim)
    q = np.linalg.qr(rng.standard_normal((*batch_shape, blocks, dim, dim)))[0]
    rows = q.reshape(*batch_shape, blocks * dim, dim)[..., :num, :]
    norms = np.linalg.norm(rng.standard_normal((*batch_shape, num, dim)), axis=-1)
    return rows * norms[..., None]


@partial(Sampler, unbiased=True)
def known(num, dim, rng, *, batch_shape=()):
    """The same, as a sampler that says of itself that it is unbiased."""
    return raw_qr(num, dim, rng, batch_shape)


DIM, ROWS = {dim}, {rows}


def by_callable(rng):
    return PositiveFeatures(DIM, ROWS, sampler=raw_qr, rng=rng)


def by_sampler(rng):
    return PositiveFeatures(DIM, ROWS, sampler=known, rng=rng)


class Own:
    dim, num_features = DIM, ROWS

    def __init__(self, rng):
        self.omega = raw_qr(ROWS, DIM, rng)

    def query_features(self, x):
        xp = x.__array_namespace__()
        omega = xp.asarray(self.omega.T.copy(), dtype=x.dtype)
        squares = xp.sum(x * x, axis=-1, keepdims=True)
        return Features(x @ omega - squares / 2 - log(ROWS) / 2, None)

    key_features = query_features

    def kernel(self, x, y):
        return np.exp(x @ np.swapaxes(y, -1, -2))

    def redraw(self, rng):
        return type(self)(rng)


class WithVariance(Own):
    """The variance that independent rows would have, which orthogonal ones stay below."""

    factor = 1.0

    def variance(self, x, y):
        total = np.sum(x**2, axis=-1)[..., :, None] + np.sum(y**2, axis=-1)[..., None, :]
        v = np.maximum(total + 2 * x @ np.swapaxes(y, -1, -2), 0)
        return self.factor * self.kernel(x, y) ** 2 * np.expm1(v) / ROWS


class WithLargeVariance(WithVariance):
    """A claim so large that any mean is within it."""

    factor = 40.0


class WithProjection(Own):
    """A map of rows that are given, which cannot be redrawn."""

    redraw = None

    def __init__(self, rng):
        super().__init__(rng)
        self.projection = self.omega


own, own_variance = Own(np.random.default_rng(0)), WithVariance(np.random.default_rng(0))
own_large = WithLargeVariance(np.random.default_rng(0))
projection, projected = WithProjection(np.random.default_rng(0)), by_callable(0)
given = PositiveFeatures.from_projection(raw_qr(ROWS, DIM, 0))


def new_own(rng):
    return Own(rng)


def new_own_variance(rng):
    return WithVariance(rng)


class Claims(PositiveFeatures):
    """A subclass that says of itself that it is unbiased."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, sampler=raw_qr, **options)
        self._set(unbiased=True)


def claims(rng):
    return Claims(DIM, ROWS, rng=rng)
'''
JUDGED = ("mean: assert_", "variance: assert_")
WAYS = (
    "by_callable", "by_sampler", "own", "own_variance", "own_large", "projection", "projected",
    "given", "new_own", "new_own_variance", "claims",
)  # fmt: skip


@pytest.fixture
def raw_qr(tmp_path, monkeypatch):
    """Make a module of maps whose rows are biased, for a dim and a number of rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = "raw_qr_to_verify"

    def make(dim, rows):
        text = RAW_QR.replace("{dim}", str(dim)).replace("{rows}", str(rows))
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    yield make
    sys.modules.pop(name, None)


class TestRawQr:
    """Rows of a QR whose signs are not fixed: biased by 5 to 50 %, and never called good."""

    @pytest.mark.parametrize(
        ("way", "draws"),
        [(way, 1200) for way in WAYS] + [("claims", 4000)],
    )
    def test_never_exit_code_0(self, raw_qr, way, draws):
        result = call(f"{raw_qr(4, 8)}:{way}", "--draws", draws)
        assert result.exit_code in (1, 3), result.output
        lines = result.stdout.splitlines()
        assert (result.exit_code == 1) == any(line.startswith(JUDGED) for line in lines)
        if result.exit_code == 3:
            assert "The mean was not checked" in lines[-1]

    @pytest.mark.parametrize(
        ("way", "dim", "rows"),
        [("by_sampler", 8, 3), ("own_variance", 4, 8), ("own", 2, 1), ("own", 16, 16)],
    )
    def test_is_seen_whatever_the_rows(self, raw_qr, way, dim, rows):
        result = call(f"{raw_qr(dim, rows)}:{way}")
        assert result.exit_code == 1, result.output
        assert "mean: assert_unbiased: mean of phi(x) . psi(y) over" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80
        after = result.stdout[result.stdout.index("└") :].split("\n", 1)[1]
        for word in ("assert_unbiased:", f"linattn.testing.standard_pairs({dim},", "errors"):
            assert word in after.split()

    @pytest.mark.parametrize(("draws", "seed"), [(560, 0), (700, 2)])
    def test_draws_that_count_are_enough(self, raw_qr, draws, seed):
        """At as many rows as coordinates the bias is smallest beside the spread of a draw."""
        result = call(f"{raw_qr(32, 32)}:own_variance", "--draws", draws, "--seed", seed)
        assert result.exit_code in (1, 3), result.output


@pytest.mark.parametrize("draws", [1, 400])
def test_few_draws_do_not_pass(draws):
    """Pairs of vectors at which a map does not vary say nothing of its mean."""
    result = call("PositiveFeatures", "--dim", "4", "--draws", draws)
    assert result.exit_code == 3, result.output
    assert result.stdout.splitlines()[-1] == (
        "The mean was not checked: whether the map is biased is not known."
    )


def test_map_without_variance_passes_by_a_measured_one(mine):
    result = passed(f"{mine}:no_variance")
    assert "a kurtosis of at most 25" in " ".join(result.stdout.replace("│", " ").split())


def test_map_without_kernel_is_told_what_to_add(mine):
    result = call(f"{mine}:no_kernel")
    assert result.exit_code == 3, result.output
    assert "kernel= must be given" in result.stdout


@pytest.mark.parametrize("name", maps.map_names())
def test_every_listed_map_can_be_verified(name):
    result = call(name, "--dim", "4", "--draws", "1")
    assert result.exit_code in (0, 3), result.output


def test_list():
    result = call("--list")
    assert result.exit_code == 0
    assert result.stdout.split() == maps.map_names()
    assert "LandmarkFeatures" in maps.map_names()
    assert not {"CalibratedFeatures", "Reparametrized"} & set(maps.map_names())


def test_fitted_map_sees_options_and_seed():
    result = call("LandmarkFeatures", "--num-features", "8")
    assert result.exit_code == 3, result.output
    assert "num_features=8" in result.stdout


def test_sampler_without_scipy_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    result = call("PositiveFeatures", "--sampler", "sobol", "--dim", "5")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert "scipy" in result.stderr.lower()


@pytest.mark.parametrize("name", ["raises", "raises_later"])
def test_error_of_a_factory_has_its_own_exit_code(mine, name):
    result = call(f"{mine}:{name}")
    assert result.exit_code == 4, result.output
    assert len(result.stderr.splitlines()) == 1
    assert "the factory raised ZeroDivisionError: division by zero" in result.stderr
    result = call(f"{mine}:{name}", "--traceback")
    assert result.exit_code == 4
    assert f"in {name}" in result.stderr


def test_folder_does_not_hide_installed_modules(tmp_path):
    """A file beside the user's module must not take the place of what the command imports."""
    (tmp_path / "mine_here.py").write_text(MINE)
    (tmp_path / "hypothesis.py").write_text("raise SystemExit('stray')")
    program = "import sys; sys.argv[0] = 'linattn'; from linattn.cli.app import app; app()"
    command = [sys.executable, "-P", "-c", program, "verify", "mine_here:good", *FEW]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_plain_array_is_named(mine):
    result = call(f"{mine}:plain")
    assert result.exit_code == 1, result.output
    assert result.stdout.count("FAILED") == 2
    assert "must return Features(log, values), got ndarray" in " ".join(result.stdout.split())


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    result = call("PositiveFeatures")
    assert result.exit_code == 2
    assert "pip install '.[testing]'" in result.stderr
