"""Texts of seven kinds, and what the layers of all-MiniLM-L6-v2 make of them.

    python -m benchmarks.texts --sample FILE.npz

Windows of 512 tokens of unlike documents go through the encoder one at a time, and the queries,
keys and values of its layers are put on end. The numbers in the code were chosen by "manual"
(prose of CPython's manual) and "code" (its library). Nothing was chosen by "licences" (of installed
packages), "docstrings" (of SciPy), "tables" (of scikit-learn), "changes" (changelogs in
/usr/share/doc) and "German" (manual pages: ``apt-get install manpages-de``).

``--sample`` writes the long sample that ships with the package: two layers and two heads of 2,560
tokens of the manual. Needs the weights: examples/minilm_model.py says how to install them.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
minilm: Any = import_module("minilm_model")

WINDOW, WINDOWS_A_TEXT = 512, 4


def manual() -> Iterator[str]:
    """Prose of CPython's manual, a topic a text."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield " ".join(dict.fromkeys(minilm.paragraphs(topics[name])))


def code() -> Iterator[str]:
    """Modules of CPython's library, each a text."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def licences() -> Iterator[str]:
    """Licences of installed packages, each text once."""
    found = set()
    for distribution in distributions():
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICEN", "COPYING", "NOTICE")):
                path = Path(str(file.locate()))
                if path.is_file() and path.suffix in ("", ".txt", ".md", ".rst", ".APACHE", ".BSD"):
                    found.add(path.read_text(encoding="utf-8", errors="replace"))
    yield from sorted(found)


def docstrings() -> Iterator[str]:
    """Docstrings of SciPy's functions and classes."""
    names = "fft integrate interpolate linalg ndimage optimize signal sparse spatial special stats"
    for name in names.split():
        module = import_module(f"scipy.{name}")
        for thing in sorted(getattr(module, "__all__", ())):
            yield inspect.getdoc(getattr(module, thing)) or ""


def tables() -> Iterator[str]:
    """Numbers of scikit-learn's data sets, a file a text."""
    yield from _files(Path(str(files("sklearn.datasets"))), "data/*.csv*")


def changes() -> Iterator[str]:
    """Changelogs of Debian's packages in /usr/share/doc."""
    yield from _files(Path("/usr/share/doc"), "*/changelog.gz")


def german() -> Iterator[str]:
    """German manual pages (Debian: manpages-de), without their markup."""
    for text in _files(Path("/usr/share/man/de"), "man*/*.gz"):
        yield re.sub(r"(?m)^[.'].*$|\\f.|\\", "", text)


def _files(folder: Path, pattern: str) -> Iterator[str]:
    """Read files, packed or not, each once."""
    for path in sorted({path.resolve() for path in folder.glob(pattern)}):
        raw = path.read_bytes()
        yield (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(errors="replace")


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "manual": manual,
    "code": code,
    "licences": licences,
    "docstrings": docstrings,
    "tables": tables,
    "changes": changes,
    "German": german,
}


def windows(
    kind: str, tokenize: Callable[[str], list[int]], count: int, seed: int
) -> NDArray[np.int64]:
    """Windows of 512 tokens, at most four of one text, in random order; no two overlap."""
    start, end = tokenize("")
    inner, found = WINDOW - 2, []
    for text in KINDS[kind]():
        tokens = tokenize(text[: 8 * WINDOWS_A_TEXT * WINDOW])[1:-1]
        cuts = range(0, len(tokens) - inner + 1, inner)[:WINDOWS_A_TEXT]
        found += [[start, *tokens[i : i + inner], end] for i in cuts]
    if len(found) < count:
        # Texts on end, where few are long enough for a window of their own.
        tokens = [token for text in KINDS[kind]() for token in tokenize(text)[1:-1]]
        cuts = range(0, len(tokens) - inner + 1, inner)
        found = [[start, *tokens[i : i + inner], end] for i in cuts]
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return np.asarray(found, dtype=np.int64)[order]


def inputs(kind: str, length: int, layers: list[int], seed: int = 0) -> NDArray[np.float32]:
    """Put queries, keys and values on end, ``(layers, 3, heads, length, dim)``."""
    encoder, tokenize = minilm.load()
    tokens = windows(kind, tokenize, -(-length // WINDOW), seed)
    if len(tokens) * WINDOW < length:
        message = f"length: {kind} has {len(tokens) * WINDOW:,} tokens, got {length:,}: "
        message += str(KINDS[kind].__doc__)
        raise SystemExit(message)
    parts = []
    for window in tokens:
        trace = minilm.Trace.of(encoder, window[None])
        parts.append(np.stack([np.stack(trace.inputs[layer])[:, 0] for layer in layers]))
    return np.concatenate(parts, axis=-2)[..., :length, :]


def write_sample(path: Path) -> None:
    """Write the sample that ships with the package."""
    layers, heads = [1, 4], [0, 6]
    qkv = inputs("manual", 5 * WINDOW, layers).astype(np.float16)[:, :, heads]
    arrays = dict(zip(("query", "key", "value"), qkv.swapaxes(0, 1), strict=True))
    np.savez_compressed(path, **arrays, layers=np.array(layers), heads=np.array(heads))


def main() -> None:
    """Write the sample."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=Path, required=True)
    write_sample(parser.parse_args().sample)


if __name__ == "__main__":
    main()
