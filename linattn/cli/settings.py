"""The options of ``linattn compare``, checked."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linattn.cli.errors import CommandError

__all__ = [
    "LENGTHS",
    "MAX_FEATURES",
    "MAX_LENGTH",
    "NUM_FEATURES",
    "Settings",
    "integers",
    "words",
]

NUM_FEATURES = ("64", "128", "256", "1024")
LENGTHS = tuple(str(256 * 2**doubling) for doubling in range(9))

MAX_FEATURES = 2**16
MAX_LENGTH = 2**22


@dataclass(frozen=True)
class Settings:
    """What one run of ``linattn compare`` does.

    Attributes
    ----------
    files : tuple of Path
        The user's: three .npy files, or one with all arrays; none for the shipped sample.
    maps : tuple of str
        Names of the methods measured, at least one.
    baselines : bool
        Whether all published attentions are measured too.
    num_features, lengths : tuple of int
        Ascending, without repetition.
    is_causal : bool
        Whether query i sees the keys up to i only.
    seed : int
        Of everything random.
    time_budget : float
        Seconds for the time against sequence length.
    draws : int
        Of each map with a choice of columns, in the error table.
    max_tokens, max_heads : int
        Of the error table.
    out : Path
        Folder of the results.
    """

    files: tuple[Path, ...]
    maps: tuple[str, ...]
    baselines: bool
    num_features: tuple[int, ...]
    lengths: tuple[int, ...]
    is_causal: bool
    seed: int
    time_budget: float
    draws: int
    max_tokens: int
    max_heads: int
    out: Path

    def __post_init__(self) -> None:
        """Check what the options' types do not say."""
        if self.seed < 0:
            raise CommandError(f"--seed: want a whole number >= 0, got {self.seed}")
        if not (math.isfinite(self.time_budget) and self.time_budget >= 0):
            raise CommandError(f"--time-budget: want seconds >= 0, got {self.time_budget}")
        for option, number in (
            ("--draws", self.draws),
            ("--max-tokens", self.max_tokens),
            ("--max-heads", self.max_heads),
        ):
            if number < 1:
                raise CommandError(f"{option}: want a whole number >= 1, got {number}")

    def command(self) -> str:
        """Return the command line that repeats this run, every option spelled out."""
        line = ["linattn", "compare", *map(str, self.files), "--maps", ",".join(self.maps)]
        line += ["--baselines"] * self.baselines
        line += ["--num-features", ",".join(map(str, self.num_features))]
        line += ["--lengths", ",".join(map(str, self.lengths))]
        line += ["--causal"] * self.is_causal
        line += ["--seed", str(self.seed), "--time-budget", f"{self.time_budget:g}"]
        line += ["--draws", str(self.draws)]
        line += ["--max-tokens", str(self.max_tokens), "--max-heads", str(self.max_heads)]
        return shlex.join([*line, "--out", str(self.out)])


def words(option: str, texts: Sequence[str], kind: str) -> tuple[str, ...]:
    """Split words at commas.

    Raises
    ------
    CommandError
        There is none, or one is empty.
    """
    found = tuple(word.strip() for text in texts for word in text.split(","))
    if not any(found):
        raise CommandError(f"{option}: want at least one {kind}, got none")
    if not all(found):
        raise CommandError(
            f"{option}: want a {kind} between any two commas, got {','.join(texts)!r}"
        )
    return found


def integers(option: str, texts: Sequence[str], *, minimum: int, maximum: int) -> tuple[int, ...]:
    """Return the whole numbers that an option lists, ascending, without repetition.

    Parameters
    ----------
    option : str
        For messages.
    texts : sequence of str
        One for each time that the option was given, each a number or several with commas.
    minimum, maximum : int
        Bounds of each number, themselves allowed.

    Raises
    ------
    CommandError
        There is no number, or something that is not one within the bounds.
    """
    numbers = set()
    for word in words(option, texts, "whole number"):
        try:
            number = int(word)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= maximum:
            raise CommandError(
                f"{option}: want whole numbers from {minimum} to {maximum}, got {word!r}"
            )
        numbers.add(number)
    return tuple(sorted(numbers))
