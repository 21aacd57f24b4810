"""Plant defects one at a time and see whether what should notice them does.

    python tests/mutants/run.py                         every defect of the two lists
    python tests/mutants/run.py checks                  linters, docs, CI: can each of them fail?
    python tests/mutants/run.py code --only landmarks   those whose name holds a word
    tests/fake_gpu/run.sh python tests/mutants/run.py   those of the marker fake_gpu, and no other

`code.toml` holds careless one-line changes of the library, each with the tests that must turn red,
and with their `marker` where other runs leave them out;
`checks.toml` holds defects for the other checks of `.ci/run`, each with the one that must. Changes
are made in a copy of the tree, in the environment that runs this. Where nothing noticed, the exit
code is 1. Not part of the suite: it takes about an hour.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPTIONS = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
PYTEST = [sys.executable, "-m", "pytest", *OPTIONS]
ON_FAKE_GPU = "libfake_cuda" in os.environ.get("LD_PRELOAD", "")
FAILED, NOTHING_RUN = 1, {2, 3, 4, 5}


class Tree:
    """A copy of what git knows of the working tree, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
                (folder / name).chmod((ROOT / name).stat().st_mode)

    def run(self, command: str) -> tuple[int, str]:
        """Run a shell command in the copy, whose packages come before the installed ones."""
        paths = [self.folder, self.folder / "backends"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "NO_MKDOCS_2_WARNING": "1",
        }
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        return finished.returncode, finished.stdout + finished.stderr


def line_of_ci(beginning: str) -> str:
    """Return the one command of `.ci/run` that begins like this."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands: list[str] = re.findall(r"(?<!\S)\.venv/bin/(.+)", text)
    found = [command for command in commands if command.startswith(beginning)]
    if len(found) != 1:
        raise SystemExit(f".ci/run has {len(found)} commands that begin with {beginning!r}")
    return found[0]


def command_of(defect: dict[str, Any]) -> str:
    """Return what must fail once the defect is planted."""
    if "check" in defect:
        return line_of_ci(defect["check"])
    return shlex.join([*PYTEST, "-m", defect.get("marker", "not frameworks"), *defect["tests"]])


def planted(tree: Tree, defect: dict[str, Any]) -> tuple[str, str]:
    """Return a file of the copy without and with the defect; the place must be unmistakable."""
    text = (tree.folder / defect["file"]).read_text(encoding="utf-8")
    if text.count(defect["old"]) != 1:
        raise SystemExit(
            f"{defect['name']}: what is to be changed stands {text.count(defect['old'])} times in "
            f"{defect['file']}; the list is out of date"
        )
    return text, text.replace(defect["old"], defect["new"])


def main() -> int:
    """Plant all defects that were asked for and say which were noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lists", nargs="*", default=["checks", "code"], help="checks, code")
    parser.add_argument("--only", default="", help="a part of the names of defects")
    arguments = parser.parse_args()
    defects = [
        defect
        for name in arguments.lists
        for defect in tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["defect"]
        if re.search(arguments.only, defect["name"])
        and (defect.get("marker") == "fake_gpu") is ON_FAKE_GPU
    ]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        changes = [planted(tree, defect) for defect in defects]
        for command in dict.fromkeys(map(command_of, defects)):
            code, said = tree.run(command)
            if code:
                raise SystemExit(
                    f"without any defect this fails already:\n{command}\n{said[-2000:]}"
                )
        for defect, (text, changed) in zip(defects, changes, strict=True):
            begun = time.monotonic()
            (tree.folder / defect["file"]).write_text(changed, encoding="utf-8")
            code, said = tree.run(command_of(defect))
            (tree.folder / defect["file"]).write_text(text, encoding="utf-8")
            if "tests" in defect and code in NOTHING_RUN:
                raise SystemExit(f"{defect['name']}: no test ran\n{said[-2000:]}")
            survivors += [] if code else [defect["name"]]
            verdict = "noticed" if code else "NOT NOTICED"
            print(f"{verdict:12} {time.monotonic() - begun:5.0f} s  {defect['name']}", flush=True)
    print(f"{len(defects) - len(survivors)} of {len(defects)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
