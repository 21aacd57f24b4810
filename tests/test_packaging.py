"""The wheel that users install: what is in it, and what it says of itself."""

from __future__ import annotations

import configparser
import email.message
import email.parser
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import linattn

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"linattn", "linattn_numpy", "linattn_cupy", "linattn_dask"}
EXTRAS = {
    "cli",
    "threads",
    "testing",
    "qmc",
    "dask",
    "sklearn",
    "layers",
    "all",
    "test",
    "test-kernels",
    "test-onnx",
    "lint",
    "docs",
    "bench",
    "examples",
    "cuda12",
    "cuda13",
    "tile",
}


def build(kind: str, source: Path, out: Path) -> Path:
    finished = subprocess.run(
        [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    # From the unpacked sdist, as an installer without a ready wheel would: it covers both.
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python 3.11.4 is the first that has filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(unpacked)
    (source,) = unpacked.iterdir()
    return zipfile.Path(build("wheel", source, tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def dist_info(wheel: zipfile.Path) -> zipfile.Path:
    return wheel / f"linattn-{linattn.__version__}.dist-info"


@pytest.fixture(scope="module")
def metadata(dist_info: zipfile.Path) -> email.message.Message:
    return email.parser.Parser().parsestr((dist_info / "METADATA").read_text(encoding="utf-8"))


def test_wheel_holds_exactly_the_packages(wheel, dist_info):
    assert {path.name for path in wheel.iterdir()} == PACKAGES | {dist_info.name}


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("linattn", "linattn"),
        ("linattn_numpy", "backends/linattn_numpy"),
        ("linattn_cupy", "backends/linattn_cupy"),
        ("linattn_dask", "backends/linattn_dask"),
    ],
)
def test_wheel_holds_every_file_of_a_package(wheel, package, folder):
    source = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package}/py.typed" in source
    shipped = {
        name
        for name in wheel.root.namelist()
        if name.startswith(f"{package}/") and not name.endswith("/")
    }
    assert shipped == source


def test_wheel_holds_the_real_sample(wheel):
    data = wheel / "linattn" / "datasets" / "minilm_qkv.npz"
    assert data.read_bytes() == (ROOT / "linattn/datasets/minilm_qkv.npz").read_bytes()


def test_wheel_registers_the_backends_and_the_command(dist_info):
    entry_points = configparser.ConfigParser()
    entry_points.read_string((dist_info / "entry_points.txt").read_text(encoding="utf-8"))
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "console_scripts": {"linattn": "linattn.cli:main"},
        "linattn.backends": {
            "numpy": "linattn_numpy",
            "cupy": "linattn_cupy",
            "dask": "linattn_dask",
        },
    }


def test_metadata_is_light_and_names_every_extra(metadata):
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = metadata.get_all("Requires-Dist", [])
    required = {item for item in requirements if "extra ==" not in item}
    assert required == {"numpy>=2.0", "array-api-compat>=1.15"}
    unbounded = [item for item in requirements if ">=" not in item and "linattn[" not in item]
    assert unbounded == []


def test_all_is_every_extra_of_users_but_the_gpu(metadata):
    """The others are for work on linattn itself, or bring a CUDA that may not fit."""

    def brought_by(*extras):
        requirements = metadata.get_all("Requires-Dist", [])
        marker = f"extra == .({'|'.join(extras)})."
        return {item.split(";")[0] for item in requirements if re.search(marker, item)}

    users = ("cli", "threads", "testing", "qmc", "sklearn", "layers")
    assert brought_by("all") == brought_by(*users) != set()


def test_test_extra_needs_no_framework_and_no_gpu(metadata):
    tested = [
        item for item in metadata.get_all("Requires-Dist", []) if re.search("extra == .test.", item)
    ]
    assert any(item.startswith("pytest>=9") for item in tested)
    assert not any(re.match(r"torch|jax|cupy", item) for item in tested)


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_cuda_extras_bring_what_kernels_are_compiled_with(metadata, cuda):
    own = [
        item.partition(";")[0].strip()
        for item in metadata.get_all("Requires-Dist", [])
        if item.endswith(f"extra == 'cuda{cuda}'")
    ]
    assert own == [f"cupy-cuda{cuda}x[ctk]>=14.0", "ml-dtypes>=0.5", "numpy>=2.1.2"]


def test_licence_goes_with_the_wheel(metadata, dist_info):
    assert metadata["License-Expression"] == "Apache-2.0"
    text = (dist_info / "licenses" / "LICENSE").read_text(encoding="utf-8")
    assert text == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Copyright 2026 linattn contributors" in text


def test_version_is_the_same_everywhere(metadata):
    version = linattn.__version__
    assert metadata["Version"] == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)[0] == version


def test_folder_of_backends_is_no_package():
    assert not (ROOT / "backends" / "__init__.py").exists()
