"""The site that `mkdocs build` makes of docs/ and of the docstrings.

``LINATTN_SITE`` names the folder of one that was built before.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if built := os.environ.get("LINATTN_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs", reason="mkdocs (extra docs) is not installed")
    folder = tmp_path_factory.mktemp("site")
    finished = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return folder


def signature(site: Path, page: str, name: str) -> list[str]:
    """Return the lines of the signature below a heading."""
    text = (site / page / "index.html").read_text(encoding="utf-8")
    block = text.split(f'id="{name}"')[1].partition("<code>")[2].partition("</code>")[0]
    return html.unescape(re.sub(r"<[^>]+>", "", block)).splitlines()


def test_long_signatures_are_broken_into_lines(site):
    lines = signature(site, "attention", "linattn.functional.linear_attention")
    assert lines[0] == "linear_attention("
    assert "    return_log_normalizer=False," in lines
    assert max(map(len, lines)) < 80


def test_classes_show_how_they_are_made(site):
    name = "linattn.feature_maps.exponential.PositiveFeatures"
    (line,) = ["".join(signature(site, "feature_maps", name))]
    assert line.startswith("PositiveFeatures(")
    assert "rng=None" in line


def test_pages_show_what_is_public(site):
    shown = re.findall(
        r'id="(linattn[\w.]+)"',
        "".join(page.read_text(encoding="utf-8") for page in site.glob("*/index.html")),
    )
    assert "linattn.automatic.attention" in shown
    assert "linattn.automatic.MIN_ERROR_OF_WARNING" not in shown
    special = {name.rpartition(".")[2] for name in shown if name.endswith("__")}
    assert special == {"__call__"}


def test_lists_and_blocks_are_no_text(site):
    """A list without an empty line before it would run on in the paragraph above."""
    broken = {
        (page.parent.name, text)
        for page in site.glob("*/index.html")
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        for text in [re.sub(r"<code>.*?</code>|<[^>]+>", "", paragraph, flags=re.DOTALL)]
        if re.search(r"^\s*[*-] \S|```|\*\*|^\|", text, re.MULTILINE)
    }
    assert broken == set()


SEARCHED = [
    *("memmap", "train_copy", "checkpoint", "Dask", "DataFrame", "pandas", "time series"),
    *("nn.Module", "autocast", "torch.compile", "migrate", "KV cache", "prefix", "ALiBi"),
    *("sliding window", "Mamba", "regression", "MPI", "ONNX", "bfloat16", "autograd"),
    *("scaled_dot_product_attention", "key_padding_mask"),
]


@pytest.fixture(scope="module")
def sections(site: Path) -> list[set[str]]:
    """Return the words of each section that the search box looks up, whole, as it cuts them."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    # Python and JavaScript agree about what this separator matches.
    cut = re.compile(index["config"]["separator"])
    texts = [f"{d['title']} {d['text']}".lower() for d in index["docs"]]
    return [set(cut.split(re.sub("<[^>]+>", " ", text))) for text in texts]


SEARCHES = {
    **{"install": "quickstart", "conda": "quickstart", "cite": "", "licence": ""},
    **{"hugging face": "from_torch", "transformers": "from_torch", "torch.compile": "from_torch"},
    **{"MultiheadAttention": "from_torch", "onnx": "from_torch", "rope": "positions"},
    **{"alibi": "positions", "packed sequences": "positions", "MHA": "choose", "rwkv": "choose"},
    **{"FlashAttention": "choose", "kv cache eviction": "state", "prefix cache": "state"},
    **{"decode": "state", "csv": "cli", "json": "cli", "crossover": "cli", "pandas": "cli"},
    **{"out of memory": "dask", "memmap": "recipes", "mpi": "recipes", "shard_map": "recipes"},
    **{"performer": "feature_maps", "landmarks": "feature_maps", "linformer": "baselines"},
    **{"longformer": "baselines", "mamba": "recurrences", "deltanet": "recurrences"},
    **{"sinkhorn": "kernel_sums", "kernel density": "kernel_sums", "unbiased": "kernels"},
    **{"minhash": "kernels", "stochastic rounding": "kernels", "safetensors": "layers"},
    **{
        "benchmark": "performance",
        "gradient": "gradients",
        "cupy": "gpu",
        "release": "contributing",
    },
}
"""What people type, and the page that should be among the first three."""


@pytest.fixture(scope="module")
def found_by_the_box(site: Path) -> dict[str, list[str]]:
    """Return the pages that the site's own search worker finds, in its order."""
    if not shutil.which("node"):
        pytest.skip("the search box of the pages runs in node, which is not installed")
    finished = subprocess.run(
        ["node", str(ROOT / "tests" / "search_box.js"), str(site)],
        input=json.dumps(list(SEARCHES)), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return {
        query: [place.partition("/")[0].partition("#")[0] for place in places]
        for query, places in json.loads(finished.stdout).items()
    }


@pytest.mark.parametrize("query", SEARCHES)
def test_the_right_page_is_among_the_first_three(found_by_the_box, query):
    assert SEARCHES[query] in found_by_the_box[query][:3]


@pytest.mark.parametrize("phrase", SEARCHED)
def test_search_finds(sections, phrase):
    words = set(re.split(r"[\s._]+", phrase.lower()))
    assert [section for section in sections if words <= section] != []


def test_there_are_few_pages(site):
    assert len(list(site.glob("*/index.html"))) + 1 <= 27
