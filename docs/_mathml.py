r"""Formulas as MathML, made when the site is built: its pages need no script and no network.

Knows the TeX that these pages and docstrings use, and stops the build at any other command: add
it to a table below. ``\text`` and ``\mathrm`` hold plain words.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

LETTERS = dict(phi="φ", psi="ψ", omega="ω", Omega="Ω", epsilon="ε")
OPERATORS = dict(cdot="⋅", le="≤", sum="∑", lVert="‖", rVert="‖")
FUNCTIONS = {"cos", "exp", "log", "max", "sin"}
SPACES = {",": "0.17em", "qquad": "2em"}

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TOKEN = re.compile(r"\\(?:text|mathrm)\{[^}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]|\d+(?:\.\d+)?|\S")


def on_page_content(page_html: str, **kwargs: Any) -> str:
    """Replace every formula of a page (an MkDocs event)."""
    return FORMULA.sub(
        lambda found: mathml(html.unescape(found[2]), display=found[1] == "div"), page_html
    )


def mathml(tex: str, *, display: bool) -> str:
    """Translate one formula."""
    tokens = iter(TOKEN.findall(tex))
    body = _row(tokens, end=None)
    kind = ' display="block"' if display else ""
    return f'<math xmlns="http://www.w3.org/1998/Math/MathML"{kind}>{body}</math>'


def _row(tokens: Iterator[str], end: str | None) -> str:
    """Translate up to a closing token, which is consumed."""
    parts: list[str] = []
    for token in tokens:
        if token == end:
            return f"<mrow>{''.join(parts)}</mrow>"
        if token in ("^", "_"):
            tag = "msup" if token == "^" else "msub"
            parts[-1] = f"<{tag}>{parts[-1]}{_one(next(tokens), tokens)}</{tag}>"
        elif token == "&":
            parts.append("</mtd><mtd>")
        elif token == r"\\":
            parts.append("</mtd></mtr><mtr><mtd>")
        else:
            parts.append(_one(token, tokens))
    if end is not None:
        message = f"the formula ends before {end}"
        raise ValueError(message)
    return f"<mrow>{''.join(parts)}</mrow>"


def _one(token: str, tokens: Iterator[str]) -> str:
    """Translate one token and what belongs to it."""
    name = token[1:]
    if token == "{":
        return _row(tokens, end="}")
    if token == r"\frac":
        over, under = (_one(next(tokens), tokens) for _ in range(2))
        return f"<mfrac>{over}{under}</mfrac>"
    if token == r"\sqrt":
        return f"<msqrt>{_one(next(tokens), tokens)}</msqrt>"
    if token == r"\left":
        inside = f'<mo stretchy="true">{next(tokens)}</mo>{_row(tokens, end=chr(92) + "right")}'
        return f'<mrow>{inside}<mo stretchy="true">{next(tokens)}</mo></mrow>'
    if token == r"\begin":
        return _cases(tokens)
    if token.startswith((r"\text{", r"\mathrm{")):
        return f"<mtext>{html.escape(token[token.index('{') + 1 : -1])}</mtext>"
    if not token.startswith("\\"):
        tag = "mi" if token.isalpha() else "mn" if token[0].isdigit() else "mo"
        return f"<{tag}>{html.escape(token)}</{tag}>"
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name in OPERATORS:
        return f"<mo>{OPERATORS[name]}</mo>"
    if name in FUNCTIONS:
        return f"<mi>{name}</mi><mo>&#x2061;</mo>"
    if name in SPACES:
        return f'<mspace width="{SPACES[name]}"/>'
    message = f"docs/_mathml.py does not know the TeX command {token}"
    raise ValueError(message)


def _cases(tokens: Iterator[str]) -> str:
    """Translate ``{cases} ... \\end{cases}``, whose ``\\begin`` has been read."""
    if "".join(next(tokens) for _ in range(7)) != "{cases}":
        message = "docs/_mathml.py knows no environment but cases"
        raise ValueError(message)
    rows = _row(tokens, end=r"\end").removeprefix("<mrow>").removesuffix("</mrow>")
    for _ in range(7):
        next(tokens)
    return (
        f'<mrow><mo stretchy="true">{{</mo><mtable columnalign="left">'
        f"<mtr><mtd>{rows}</mtd></mtr></mtable></mrow>"
    )
