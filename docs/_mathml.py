"""Formulas as MathML, made when the site is built: its pages need no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(page_html: str, **kwargs: Any) -> str:
    """Replace every formula of a page (an MkDocs event)."""
    return FORMULA.sub(_to_mathml, page_html)


def _to_mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return str(convert(html.unescape(found[2]), display=display))
