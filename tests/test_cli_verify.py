"""`linattn verify`, by what it prints and returns."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from typer.testing import CliRunner

from linattn import feature_maps
from linattn.cli import verify
from linattn.cli.app import app

PLAIN = {"COLUMNS": "80", "FORCE_COLOR": None, "TTY_COMPATIBLE": None, "NO_COLOR": "1"}
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
'''


def call(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], env=PLAIN)


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
    result = call("PositiveFeatures", *FEW)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for text in ("PositiveFeatures(dim=4", "variance", "600 draws", "0 FAILED", "2e-09"):
        assert text in result.stdout


def test_options_reach_the_map():
    result = call("TrigonometricFeatures", *FEW, "--num-features", "12", "--sampler", "gaussian")
    assert result.exit_code == 0, result.output
    assert "num_features=12" in result.stdout
    assert "gaussian" in result.stdout


def test_deterministic_map_skips_what_chance_decides():
    result = call("EluFeatures")
    assert result.exit_code == 0, result.output
    assert "the map is deterministic" in result.stdout
    assert "2 skipped" in result.stdout


def test_fitted_map_is_fitted_to_a_sample():
    result = call("DenseExponentialFeatures", *FEW, "--sampler", "gaussian")
    assert result.exit_code == 0, result.output
    assert "causal is False" in " ".join(result.stdout.replace("│", " ").split())


def test_seed_makes_other_draws():
    first, again, other = (call("PositiveFeatures", *FEW, "--seed", seed) for seed in (1, 1, 2))
    assert first.exit_code == other.exit_code == 0
    assert first.stdout == again.stdout
    maps = [verify.find_map("PositiveFeatures", verify.Choice(4, 8, None, s)) for s in (1, 1, 2)]
    assert maps[0] == maps[1] != maps[2]


@pytest.mark.parametrize("name", ["good", "factory"])
def test_map_of_the_user_passes(mine, name):
    result = call(f"{mine}:{name}", *FEW)
    assert result.exit_code == 0, result.output


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


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    result = call("PositiveFeatures")
    assert result.exit_code == 2
    assert "pip install 'linattn[testing]'" in result.stderr


def test_every_announced_step_is_a_check():
    steps: list[str] = []
    feature_map = feature_maps.EluFeatures(4)
    report = verify.verify(feature_map, num_draws=10, seed=0, notify=steps.append)
    assert len(steps) == verify.num_checks() == len(report.rows)
    assert steps == [row.what for row in report.rows]


def test_command_runs_in_a_process():
    command = [sys.executable, "-m", "linattn", "verify", "ReluFeatures"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert "0 FAILED" in finished.stdout
