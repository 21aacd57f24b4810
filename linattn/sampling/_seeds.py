"""Where random numbers come from: an explicit seed or generator."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

# Quoted, because numpy.random is loaded by its first use only.
Seed: TypeAlias = (
    "int | np.random.SeedSequence | np.random.BitGenerator | np.random.Generator | None"
)
"""What ``rng`` may be. None draws a fresh seed from the operating system."""


def as_generator(rng: Seed) -> np.random.Generator:
    """Make a generator of random numbers from a seed, by the rules of ``numpy.random.default_rng``.

    Parameters
    ----------
    rng : int, SeedSequence, BitGenerator, Generator or None
        A Generator is returned as it is, so that drawing moves it on; an int or a SeedSequence
        starts the same stream each time; None takes entropy from the operating system.

    Returns
    -------
    numpy.random.Generator

    Raises
    ------
    TypeError
        If ``rng`` is a bool, which NumPy would read as 0 or 1, or anything that NumPy rejects.
    ValueError
        If ``rng`` is a negative int.

    Examples
    --------
    >>> from linattn import sampling
    >>> generator = sampling.as_generator(0)
    >>> sampling.as_generator(generator) is generator
    True
    """
    message = f"rng must be a non-negative int, a numpy.random.Generator or None, got {rng!r}"
    if isinstance(rng, bool | np.bool_):
        raise TypeError(message)
    try:
        return np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        raise type(error)(message) from None
