"""Dask backend of linattn: lazy attention over blocks, a graph of few tasks for each.

Tasks call linattn's public functions with the chunks of a block, which the backend of their own
library serves. Nothing is computed while a graph is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linattn.typing import Backend, implements
from linattn_dask.gradients import attention_vjp
from linattn_dask.merging import merge
from linattn_dask.recurrences import recurrence, recurrence_vjp
from linattn_dask.whole import attention

__all__ = [
    "attention",
    "attention_vjp",
    "merge",
    "modifiers",
    "recurrence",
    "recurrence_vjp",
]


def modifiers() -> tuple[str, ...]:
    """All that tasks hand on to linattn's public functions, and what raises here."""
    return (
        "local_window",
        "relative_bias",
        "key_bias",
        "log_decay",
        "normalize",
        "exact_clusters",
        "key_stop",
        "sinks",
        "read_key",
    )


if TYPE_CHECKING:
    # A type checker compares each with the contract.
    implements(Backend.attention)(attention)
    implements(Backend.attention_vjp)(attention_vjp)
    implements(Backend.merge)(merge)
    implements(Backend.modifiers)(modifiers)
    implements(Backend.recurrence)(recurrence)
    implements(Backend.recurrence_vjp)(recurrence_vjp)
