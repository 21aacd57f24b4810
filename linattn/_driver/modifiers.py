"""What changes the weights that a map gives: options as fields of a problem, checked."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from linattn import _checks
from linattn._driver.options import Options
from linattn.typing import Array

__all__ = ["weight_fields"]


def weight_fields(xp: ModuleType, arrays: Sequence[Array], options: Options) -> dict[str, Any]:
    """Fields of a problem that say which keys count, and how much, beside the map."""
    query, key, _ = arrays
    mask = options.key_mask
    if mask is not None:
        mask = _checks.check_key_mask(mask, key, xp, query_len=query.shape[-2])
    return {"key_mask": mask}
