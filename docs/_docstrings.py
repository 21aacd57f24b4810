"""Docstrings as the site wants them: the few reStructuredText marks they use become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

DISPLAYED_FORMULA = re.compile(r"^( *)\.\. math::(.*\n(?:\1 +.*\n|\n(?=\1 ))*)", re.MULTILINE)
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
CITED = re.compile(r"(\[\d+\])_")
CITATION = re.compile(r"^( *)\.\. (\[\d+\])", re.MULTILINE)
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
USED = {"__call__", "__init__"}
"""Special methods that pages show: calls, and how a class is made."""

SEE_ALSO = re.compile(r"(?<=^See Also\n--------\n)(?:.+\n)+", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Translate one docstring."""
    text = DISPLAYED_FORMULA.sub(_formula, text + "\n")
    text = SEE_ALSO.sub(_list, text)
    text = ROLE.sub(r"`\1`", text)
    text = CITATION.sub(r"\n\1\2", CITED.sub(r"\1", text))
    return LITERAL_BLOCK.sub(":", text)


def _formula(match: re.Match[str]) -> str:
    indent, body = match.groups()
    return f"{indent}\\[ {' '.join(body.split())} \\]\n\n"


def _list(match: re.Match[str]) -> str:
    items = [line.partition(" : ") for line in match[0].splitlines()]
    return "".join(f"* `{names}`: {text}\n" for names, _, text in items)


class MarkdownDocstrings(griffe.Extension):
    """Translates every docstring before it is parsed, and leaves special methods out.

    Options typed by ``Unpack`` are parameters where the docstring names each.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the docstring of an object that has been read."""
        if obj.is_class:
            for name in [name for name in obj.members if name.startswith("__")]:
                if name not in USED:
                    obj.del_member(name)
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Replace ``**options: Unpack[Options]`` by the keys of ``Options``."""
        for options in list(func.parameters):
            named = f"**{options.name}" in (func.docstring.value if func.docstring else "")
            if options.kind is not griffe.ParameterKind.var_keyword or named:
                continue
            annotation = options.annotation
            if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Unpack":
                continue
            keys = func.modules_collection[annotation.slice.canonical_path].attributes
            del func.parameters[options.name]
            for name, key in keys.items():
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=key.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default="...",
                    )
                )
