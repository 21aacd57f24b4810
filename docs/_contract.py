"""The functions of a backend in docs/typing.md, as the protocol has them."""

from __future__ import annotations

import inspect
import re
from typing import Any

from linattn.typing import BlockTier, Services, WholeTier

MARKER = "<!-- functions of a backend -->"
TIERS = {"block": BlockTier, "whole": WholeTier, "beside": Services}


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the table in its place (an MkDocs event)."""
    return markdown.replace(MARKER, table())


def table() -> str:
    """List every function of the contract: tier, call, and the first paragraph of its docstring."""
    lines = ["| Tier | Function | Work |", "| --- | --- | --- |"]
    for tier, protocol in TIERS.items():
        for name in vars(protocol):
            if not name.startswith("_"):
                function = getattr(protocol, name)
                call = f"{name}({', '.join(inspect.signature(function).parameters)})"
                work = inspect.getdoc(function) or ""
                work = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(work.split("\n\n")[0].split()))
                lines.append(f"| {tier} | `{call}` | {work.replace('``', '`')} |")
    return "\n".join(lines)
