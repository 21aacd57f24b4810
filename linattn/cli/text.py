"""Sentences as people and programs read them. Needs no extra."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

__all__ = ["count", "duration", "find_name", "reason", "say", "wrap"]

T = TypeVar("T")


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the singular where it is one."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def reason(error: Exception) -> str:
    """Return what an error says, or its name if it says nothing."""
    return str(error) or type(error).__name__


def find_name(name: str, known: Mapping[str, T]) -> T:
    """Return what a name is known for, whatever its case and its spaces.

    Raises
    ------
    ValueError
        It is unknown; the message is the name, and known ones that are near.
    """
    spelled = {_bare(each): each for each in known}
    word = _bare(name)
    if word in spelled:
        return known[spelled[word]]
    begin = (each for each in spelled if word and each.startswith(word))
    near = dict.fromkeys((*begin, *get_close_matches(word, spelled)))
    guess = " or ".join([spelled[each] for each in near][:3])
    raise ValueError(f"{name}; did you mean {guess}?" if guess else name)


def _bare(name: str) -> str:
    return "".join(name.casefold().split())


def wrap(text: str, width: int, indent: str = "") -> str:
    """Return the text in lines of at most the width, broken between words only."""
    return textwrap.fill(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(sentence: str, *, error: bool = False, whole: bool = False) -> None:
    """Print a sentence, wrapped; errors and `whole` sentences are wrapped only on a terminal.

    A program finds them in one line.
    """
    stream = sys.stderr if error else sys.stdout
    if stream.isatty() or not (error or whole):
        sentence = wrap(sentence, shutil.get_terminal_size().columns)
    print(sentence, file=stream, flush=True)
