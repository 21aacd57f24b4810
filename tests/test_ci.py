"""The script of CI: whatever it runs can fail it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# In the place of every tool: writes down how it was called, says so, and fails where it is told to.
TOOL = r"""#!/bin/bash
call="${0##*/.venv}"; call="${call##*/stub/} $*"
call=$(sed -E 's#[^ ]*/tmp\.[[:alnum:]]+#NEW#g' <<<"$call")
if [[ $call == *--version ]]; then exit; fi
echo "$call" | tee -a "$CALLS"
case $call in
    python3*" -m venv "*) folder=$3 ;;
    *fake_gpu/build.sh*) folder=.venv-fake-gpu ;;
esac
if [[ ${folder:-} ]]; then
    mkdir -p "$folder/bin"
    tools="pip python pytest ruff mypy lint-imports mkdocs"
    for tool in $tools; do cp "$0" "$folder/bin/$tool"; done
fi
[[ $call != "$FAILING" ]]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that holds the script, the README that it reads, and nothing to test."""
    if os.name != "posix" or not all(map(shutil.which, ("bash", "git", "tar"))):
        pytest.skip("the script of CI needs bash, git and tar")
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("build.sh", "run.sh"):
        script = folder / "tests" / "fake_gpu" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(TOOL, encoding="utf-8")
        script.chmod(0o755)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    stub, newest = tmp_path / "stub", folder / ".ci" / "newest-python"
    stub.mkdir()
    for tool in (*(stub / name for name in ("python3", "python3.13", "chroot")), newest):
        tool.write_text(TOOL, encoding="utf-8")
        tool.chmod(0o755)
    return folder


def run(checkout: Path, failing: str = "") -> tuple[int, list[str], list[str]]:
    """Run the script with tools that do nothing; return its exit code, their calls, its output."""
    calls = checkout.parent / "calls"
    calls.write_text("", encoding="utf-8")
    environment = os.environ | {
        "PATH": f"{checkout.parent / 'stub'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "FAILING": failing,
    }
    finished = subprocess.run(
        ["bash", ".ci/run"], cwd=checkout, env=environment, capture_output=True, text=True
    )
    made = calls.read_text(encoding="utf-8").splitlines()
    return finished.returncode, made, finished.stdout.splitlines()


def test_every_call_can_fail_it(checkout):
    code, calls, _ = run(checkout)
    assert code == 0
    assert len(set(calls)) >= 12
    for call in dict.fromkeys(calls):
        code, _, output = run(checkout, failing=call)
        assert code != 0, call
        assert call in output or call.endswith("/oldest-versions test"), call


def test_another_python_is_tried_where_the_newest_cannot_be_had(checkout):
    def tried():
        code, calls, _ = run(checkout)
        assert code == 0
        pythons = {"newest": "chroot NEW", "between": ".venv-between/bin/python -m pytest"}
        return [name for name in pythons if any(pythons[name] in call for call in calls)]

    assert tried() == ["newest"]
    (checkout / ".ci" / "newest-python").write_text("#!/bin/bash\nexit 3\n", encoding="utf-8")
    assert tried() == ["between"]


def test_it_runs_what_contributors_are_told_to_run(checkout):
    _, calls, _ = run(checkout)
    commands = [call.partition("bin/")[2] for call in calls]
    # The whole suite, in the environment of the wheel.
    assert "pytest" in [command.strip() for command in commands]
    assert any(call.startswith("python3 -m pip wheel") for call in calls)
    assert any("linattn-" in call and ".whl[test]" in call for call in calls)
    assert {"ruff check", "ruff format --check", "mypy", "lint-imports"} <= {
        command.strip() for command in commands
    }
    # --quiet hides warnings, which --strict then does not count.
    assert "mkdocs build --strict" in commands


def test_a_readme_without_its_test_command_fails_it(checkout):
    readme = checkout / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("[test]", "[tests]"))
    assert run(checkout)[0] != 0


def test_every_planted_defect_has_its_place():
    """A list that is out of date plants nothing; it is run by hand."""
    lists = sorted((ROOT / "tests" / "mutants").glob("*.toml"))
    defects = [
        defect for path in lists for defect in tomllib.loads(path.read_text("utf-8"))["defect"]
    ]
    texts = {name: (ROOT / name).read_text("utf-8") for name in {d["file"] for d in defects}}
    lost = [d["name"] for d in defects if texts[d["file"]].count(d["old"]) != 1]
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    checks = {d["check"] for d in defects if "check" in d}
    assert {script.count(f" .venv/bin/{check}") for check in checks} == {1}
    assert len(lists) == 2
    assert not lost


def test_no_test_file_lends_to_another_what_a_missing_library_takes_from_both():
    """A file that pytest skips while it reads it stays half read, and lends nothing after that."""
    texts = {path.stem: path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    skipped = [
        name
        for name, text in texts.items()
        if re.search(r"^\w+: Any = pytest\.importorskip", text, re.M)
    ]
    lent = [
        (one, name) for one, text in texts.items() for name in skipped if f"tests.{name} " in text
    ]
    assert "test_dask" in skipped
    assert not lent


def test_a_plugin_for_benchmarks_beside_xdist_ends_nothing():
    warnings.warn(
        "Benchmarks are automatically disabled because xdist plugin is active.", stacklevel=1
    )
