"""Drafts that are taken back: a stream after them is as if they had never been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn
from linattn import _arrays, _checks
from linattn.sampling import Seed, as_generator
from linattn.testing._draws import check_map_or, lead_axes
from linattn.testing._evidence import Evidence, check_function, fail, on_host
from linattn.typing import FeatureMap

__all__ = ["assert_rollback"]

MAX_DRAFT = 8
"""Tokens of a draft, at most."""


@_arrays.on_array_device
def assert_rollback(
    feature_map: FeatureMap | None = None,
    *,
    begin: Callable[[], Any] | None = None,
    step: Callable[..., Any] | None = None,
    snapshot: Callable[[Any], Any] | None = None,
    num_drafts: int = 100,
    dtype: str = "float32",
    rng: Seed = 0,
) -> Evidence:
    """Assert that a stream gives the same bits after rollback as without a draft.

    A stream takes a draft of up to eight tokens; only the first few are right. Then it goes back to
    the snapshot before the draft, takes the right tokens and one more, and so on. Every output must
    have the same bits as in a stream that takes only the right tokens.

    Parameters
    ----------
    feature_map : FeatureMap, optional
        Gives the functions below: :class:`linattn.Decoder` and :meth:`linattn.Decoder.copy`.
    begin : callable, optional
        ``begin() -> stream``, before the first token.
    step : callable, optional
        ``step(stream, query, key, value) -> output``, arrays ``(2, d)``; it may change the stream.
    snapshot : callable, optional
        ``snapshot(stream)`` returns a copy of the stream, which later steps of it do not change.
    num_drafts : int, optional
        Default 100.
    dtype : {"float32", "float64"}, optional
        Of the tokens. Default "float32".
    rng : int, Generator, SeedSequence or None, optional
        Default 0.

    Returns
    -------
    Evidence

    Raises
    ------
    AssertionError
        An output differs.
    TypeError
        Neither a map nor all three functions.

    Examples
    --------
    >>> from linattn.feature_maps import EluFeatures
    >>> from linattn.testing import assert_rollback
    >>> assert_rollback(EluFeatures()).check
    'assert_rollback'
    """
    check = "assert_rollback"
    _checks.check_positive_int("num_drafts", num_drafts)
    check_map_or(feature_map, "")
    dim = getattr(feature_map, "dim", None) or 4
    lead: tuple[int, ...] = (2,)
    if feature_map is not None:
        lead = (2, *lead_axes(feature_map, dim))
        begin, step, snapshot = _decoding(feature_map, lead, dim, dtype)
    if begin is None or step is None or snapshot is None:
        raise TypeError("want a feature_map, or begin=, step= and snapshot=")
    check_function("step", step, "(stream, query, key, value) -> output")
    # A class makes a stream as well as a function does.
    for name, makes, call in (
        ("begin", begin, "() -> stream"),
        ("snapshot", snapshot, "(stream) -> stream"),
    ):
        if not callable(makes):
            check_function(name, makes, call)
    generator = as_generator(rng)

    def token() -> list[Any]:
        return [generator.standard_normal((*lead, dim)).astype(dtype) for _ in range(3)]

    straight, stream, count = begin(), begin(), 0
    for _ in range(num_drafts):
        tokens = [token() for _ in range(int(generator.integers(1, MAX_DRAFT + 1)))]
        num_right = int(generator.integers(0, len(tokens) + 1))
        before = snapshot(stream)
        for right in tokens[:num_right]:
            step(stream, *right)
        for _ in tokens[num_right:]:
            step(stream, *token())
        stream = before
        for right in [*tokens[:num_right], token()]:
            wanted, got = on_host(step(straight, *right)), on_host(step(stream, *right))
            if not np.array_equal(wanted, got):
                difference = float(np.max(np.abs(wanted - got)))
                fail(check, f"token {count} after a rollback: largest difference {difference:.3g}")
            count += 1
    return Evidence(check, f"{num_drafts} drafts taken back, {count} tokens taken")


def _decoding(
    feature_map: FeatureMap, lead: tuple[int, ...], dim: int, dtype: str
) -> tuple[Callable[[], Any], Callable[..., Any], Callable[[Any], Any]]:
    like = np.zeros(dim, dtype)
    state = linattn.init_state(feature_map, dim, batch_shape=lead, like=like)
    return (
        lambda: linattn.Decoder(feature_map, state),
        linattn.Decoder.step,
        linattn.Decoder.copy,
    )
