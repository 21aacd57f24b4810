"""Words that were given up, because the field has others: none of them comes back.

The words in use are in docs/glossary.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path
    for pattern in (
        "linattn/**/*.py",
        "linattn/**/*.md",
        "backends/**/*.py",
        "backends/**/*.cu",
        "backends/**/*.cuh",
        "docs/*.md",
        "examples/*.*",
        "README.md",
        "CONTRIBUTING.md",
    )
    for path in ROOT.glob(pattern)
)

# What finds a word that was given up, and what to say. Where the word is ordinary English too, or
# a public name, the pattern says where it is not.
WORDS = {
    r"\b(look(s|ed|ing)?|a look) (at|into)\b": "inspect values, check; host synchronization",
    r"(?<![a-z])plain(?!t)|natural scale": "unshifted",
    r"\bshifted_\w|\w_shifted\b": "max_stabilized",
    r"\bquiet\b|\bfirst_special\b": "ignore_fp_warnings, backend_function",
    r"(?<![.])(?<!with_)(?<!remove)suffix": "adjoint state; prefix scan from the end",
    r"\bfar[ _]heads?\b": "head that needs the stabilized path",
    r"\bstepwise\b|\bend together\b|\btake turns\b": "resumable, round-robin, load balancing",
    r"\bKept\b|\b_?[Oo]ffer\b": "Checkpoints, store",
    r"\bby[ _]halves\b": "divide and conquer",
    r"\bColumnMeans\b|\breads? means\b|_(walk|scan)_means\b": "column-normalized read",
    r"\brunning (state|merge|maxim|sum|scale|log scale)": "prefix scan, online softmax",
    r"\bsound\b|\bunsound\b|\bspoil\w*|\brefus\w*": "accepted, rejected, underflowed",
    r"\bstretch(es)?\b": "segment, part",
    r"\bpieces?\b(?! of code)": "block, tile, part",
    r"\brooms?\b|\bthe house\b": "workspace, buffer; layout",
    r"\bv1\b|\bpassing_\w+|\.but\(": "values_and_one, transient_..., replace",
    r"\bnd\b": "num_den",
    r"\b(likes_small|LEAST_APART|AHEAD|REACH|NEAR|MOST_KNOWN|LOWEST)\b": "what is bounded, by what",
    r"\bsettles?\b|\bsettled\b|\brest_on\b": "flush, rebase",
    r"\bknows\b|\bis_known\b": "supports",
    r"\bby heart\b|\bhonest|\bteeth\b|\bdead row": "overfit, valid, mutation, zero denominator",
    r"\blaws?\b": "distribution",
    r"\bspread(s|ing)? (over|by|evenly)\b": "standard deviation; evenly spaced",
    r"\b_?spread\(": "scatter",
    r"\bdef _?(own|every|mine|some|others|put|one|but|under|quiet)\(": "names that say what",
    r"\b(own|total|grad|passing)_v1\b": "values_and_one",
    r"\bHEAD_BY_HEAD\b|(?<!path\.)\bsuffix(es)?\b(?! of a file)": "Declined; adjoint",
    r"(normal|stabil|general|regular|optim|minim|maxim|standard|recogn|factor|synchron|token|initial|"
    r"summar|vector|special|random)is(e|ed|er|ers|es|ing|ation)\b": "-ize, as in normalizer",
}


def uses(pattern: str, text: str) -> list[int]:
    """Return the lines in which a text uses a word."""
    found = re.compile(pattern)
    return [number for number, line in enumerate(text.splitlines(), 1) if found.search(line)]


@pytest.mark.parametrize("pattern", WORDS)
def test_given_up_words_stay_away(pattern):
    found = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := uses(pattern, path.read_text(encoding="utf-8")))
    }
    assert found == {}, f"say instead: {WORDS[pattern]}"


def test_files_are_searched():
    names = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert names == {"linattn", "backends", "docs", "examples", "README.md", "CONTRIBUTING.md"}
