"""Attention within each of several sequences on one axis, one sequence at a time."""

from __future__ import annotations

from typing import Any

from linattn._arrays import namespace
from linattn._generic.features import row_features
from linattn._generic.hierarchical import scan_hierarchical
from linattn._generic.states import empty_state, read_block, reduce_block
from linattn.typing import Array, Partial, Spec, Tokens


def sequences_block(
    query_spec: Spec,
    key_spec: Spec,
    query: Tokens,
    key: Tokens,
    values_and_one: Array,
    lengths: Any,
    is_causal: bool,
    want_log: bool,
) -> Partial:
    """Attention within each sequence, every row on the scale of the keys that it sees."""
    xp, num_den, logs, start = namespace(values_and_one), [], [], 0
    features, e = row_features(key_spec, key), values_and_one.shape[-1] - 1
    m = max(x.shape[-1] for x in (features.log, features.values) if x is not None)
    for n in lengths.tolist():
        rows = slice(start, start + n)
        q, k = query.rows(rows), key.rows(rows)
        v, nothing = values_and_one[..., rows, :], empty_state((), m, e, values_and_one)
        if is_causal:
            part, _ = scan_hierarchical(query_spec, key_spec, q, k, v, nothing)
        else:
            state = reduce_block(key_spec, k, v, nothing)
            part = read_block(query_spec, q, state, want_log)
        num_den.append(part.num_den)
        logs.append(xp.broadcast_to(part.log, (*part.num_den.shape[:-1], 1)))
        start = rows.stop
    return Partial(xp.concat(num_den, axis=-2), xp.concat(logs, axis=-2))
