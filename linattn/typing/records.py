"""Records that blocks of tokens, features, states and results travel in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

__all__ = [
    "Array",
    "ArrayT",
    "Clusters",
    "Cotangent",
    "Declined",
    "Features",
    "Index",
    "Partial",
    "RowScale",
    "State",
    "Tokens",
    "one_line",
]

Array: TypeAlias = Any
"""Any array that array-api-compat supports (NumPy, CuPy, torch, JAX, Dask, array-api-strict)."""


ArrayT = TypeVar("ArrayT")
"""The type of the query, which results have: arrays of one library have one type."""


Index: TypeAlias = tuple[slice, ...]
"""One slice for each leading axis of a problem's state, aligned to the right."""


def one_line(record: Any) -> str:
    """Show a record in one line: its verdict first, arrays by dtype and shape."""
    names = getattr(record, "_fields", None) or tuple(record.__dataclass_fields__)
    fields = {name: getattr(record, name) for name in names}
    verdict = fields.pop("verdict", None)
    shown = ", ".join(f"{name}={_brief(value)}" for name, value in fields.items())
    start = "" if verdict is None else f"{verdict}; "
    return f"{type(record).__name__}({start}{shown})"


def _brief(value: Any) -> str:
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        return f"<{value.dtype} {shape}>"
    if type(value) is float:
        return f"{value:.4g}"
    if isinstance(value, ModuleType):
        return value.__name__
    if type(value) in (tuple, list, dict) and len(value) > 4:
        return f"<{type(value).__name__} of {len(value)}>"
    if type(value) in (tuple, list):
        inside = ", ".join(map(_brief, value))
        return f"({inside})" if type(value) is tuple else f"[{inside}]"
    return str(value)


@dataclass(frozen=True, slots=True)
class Declined:
    """Returned by a function of a backend in place of a result: the generic code takes over.

    Attributes
    ----------
    reason : str
        Why, for :func:`linattn.explain`: "m = 300 is above 256".
    by_head : bool
        Whether ``scan_block`` would take the heads of this block one by one; only where there are
        several.

    Examples
    --------
    >>> from linattn.typing import Declined
    >>> Declined("m = 300 is above 256").reason
    'm = 300 is above 256'
    """

    reason: str
    by_head: bool = False


class Tokens(NamedTuple):
    """A block of queries or keys, already masked, clean and in the accumulation dtype.

    Attributes
    ----------
    x : Array
        ``(..., n, d)``.
    log_weight : Array or None
        ``(..., n, 1)``: exact log weight of each token, -inf where it is masked.
    start : int
        Position of the first token of the block in its sequence.
    log_decay : Array or None
        ``(..., n, 1)``, at most 0: added to the log scale of the state before each of these keys.
        A backend is given it in ``scan_decayed_block`` only.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Tokens
    >>> Tokens(np.ones((2, 64, 8)), log_weight=None, start=128)
    Tokens(x=<float64 (2, 64, 8)>, log_weight=None, start=128, log_decay=None)
    """

    x: Array
    log_weight: Array | None
    start: int
    log_decay: Array | None = None

    def each(self, change: Callable[[Array], Array]) -> Tokens:
        """Apply ``change`` to every array that there is."""
        x, weight, _, decay = self
        weight, decay = (None if array is None else change(array) for array in (weight, decay))
        return Tokens(change(x), weight, self.start, decay)

    def rows(self, rows: slice) -> Tokens:
        """Take some tokens, ``rows.start`` after the first."""
        taken = self.each(lambda x: x[..., rows, :])
        return taken._replace(start=self.start + rows.start)

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Clusters(NamedTuple):
    """Keys of one head, ordered by the column that they are assigned to: a cluster each.

    Attributes
    ----------
    key : Tokens
        ``(s, d)``, without masked keys.
    values_and_one : Array
        ``(s, e + 1)``.
    bounds : ndarray of int, (m + 1,)
        Cluster c holds the keys ``bounds[c]`` up to ``bounds[c + 1]``; on the host, as below.
    positions : ndarray of int, (s,)
        Position of each key in its sequence; ascending within a cluster.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Clusters, Tokens
    >>> key = Tokens(np.ones((3, 8)), None, 0)
    >>> clusters = Clusters(key, np.ones((3, 5)), np.array([0, 2, 3]), np.array([0, 2, 1]))
    >>> clusters.positions[clusters.bounds[0] : clusters.bounds[1]].tolist()
    [0, 2]
    """

    key: Tokens
    values_and_one: Array
    bounds: Any
    positions: Any

    def visits(
        self, chosen: Any, most: int = 1 << 62, least: int = 1
    ) -> Iterator[tuple[Any, slice]]:
        """Yield the queries that chose each cluster that has keys, and the slice of its keys.

        ``chosen`` is ``(n, m)`` on the host. At most ``most`` pairs, or ``least`` queries, come
        together.
        """
        places, m = np.flatnonzero(chosen), chosen.shape[-1]
        numbers = places % m
        # Numbers of two bytes are sorted by counting.
        narrow = numbers.astype(np.uint16 if m <= 1 << 16 else np.intp)
        queries = (places // m)[np.argsort(narrow, kind="stable")]
        ends = np.cumsum(np.bincount(numbers, minlength=m))
        for first, end, start, stop in zip(
            np.append(0, ends), ends, self.bounds, self.bounds[1:], strict=False
        ):
            if start < stop:
                size = min(max(least, most // int(stop - start)), 1 + len(places))
                for begin in range(first, end, size):
                    yield queries[begin : min(begin + size, end)], slice(int(start), int(stop))

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Features(NamedTuple):
    """Features kept in the log domain: ``phi = values * exp(log)``.

    Attributes
    ----------
    log : Array or None
        ``(..., n, m)`` for exponential maps; ``(..., n, 1)`` or None (zero) for all others.
    values : Array or None
        None (one) for exponential maps; ``(..., n, m)`` for all others.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> x = np.random.default_rng(0).standard_normal((50, 8))
    >>> linattn.feature_maps.PositiveFeatures(8, num_features=16, rng=0).query_features(x)
    Features(log=<float64 (50, 16)>, values=None)
    """

    log: Array
    values: Array

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class State(NamedTuple):
    """Everything that linear attention remembers of the keys and values seen so far.

    It represents ``sum_j phi_j [v_j, 1]^T = kvz * exp(log_scale)``. States of two sets of keys
    merge associatively and in order (:func:`linattn.merge_states`): the earlier state decays by the
    total decay of the later one. Without decay they commute.

    Attributes
    ----------
    kvz : Array
        ``(..., m, e + 1)``: weighted values, and in the last column the weights themselves.
    log_scale : Array
        ``(..., m)``: the log shift of each feature, -inf while it has seen nothing.
    length : int
        Positions consumed, masked ones included.
    fingerprint : int or None
        31 bits of the fingerprint of the feature map. A state with another map's fingerprint is
        rejected; with None, for unknown, no state is.
    log_decay : Array or None
        ``(...)``: the sum of all log decays since this state began; None where there were none.
    num_sequences : int or None
        n for a state of n packed sequences, one along the first axis; 0 for a state of none. None
        where that is not known, and then nothing is rejected.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 50, 8))
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    >>> state.length, state.kvz.shape
    (50, (8, 9))
    """

    kvz: Array
    log_scale: Array
    length: int
    fingerprint: int | None = None
    log_decay: Array | None = None
    num_sequences: int | None = None

    def __repr__(self) -> str:
        """Show shapes and dtypes in place of numbers, and optional fields only if they are set."""
        fields = self._asdict()
        if self.log_decay is None:
            del fields["log_decay"]
        if type(self.num_sequences) is not int or not self.num_sequences:
            del fields["num_sequences"]
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in fields.items())
        return f"State({shown})"

    @property
    def kv(self) -> Array:
        """View ``(..., m, e)`` of the weighted values, to be read times ``exp(log_scale)``."""
        return self.kvz[..., :-1]

    @property
    def z(self) -> Array:
        """View ``(..., m)`` of the summed features, to be read times ``exp(log_scale)``."""
        return self.kvz[..., -1]


class Partial(NamedTuple):
    """An attention numerator and denominator on an explicit scale.

    Attributes
    ----------
    num_den : Array
        ``(..., n, e + 1)``: ``[numerator, denominator] = num_den * exp(log)``.
    log : Array
        ``(..., n, 1)``, or ``(..., 1, 1)`` for one scale; -inf for a row that sees no key.
    accepted : bool
        Whether every row of a causal block has been accepted already, by the rule of the driver.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Partial
    >>> part = Partial(num_den=np.array([[6.0, 2.0]]), log=np.array([[-1000.0]]))
    >>> (part.num_den[:, :-1] / part.num_den[:, -1:]).tolist()  # the scale cancels
    [[3.0]]
    """

    num_den: Array
    log: Array
    accepted: bool = False

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class RowScale(NamedTuple):
    """Scale of a row, from which the cotangents of its numerator and denominator are made.

    With ``[num, den] = num_den * exp(log)`` and g the cotangent of ``num / den``, the cotangent of
    ``num_den`` is ``[g * inverse, -inner]``. A row that is 0 because its denominator is has none.

    Attributes
    ----------
    log : Array
        ``(..., n, 1)``: the log of the row's scale; inf for a row without gradient.
    inverse : Array
        ``(..., n, 1)``: ``1 / num_den[..., -1:]``, 0 for a row without gradient. Where ``log`` is
        the log normalizer, it is the sign.
    inner : Array
        ``(..., n, 1)``: ``inverse * (g . num / den)``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import RowScale
    >>> scale = RowScale(np.zeros((1, 1)), inverse=np.array([[0.5]]), inner=np.array([[3.0]]))
    >>> grad_output = np.array([[2.0]])
    >>> np.concatenate([grad_output * scale.inverse, -scale.inner], axis=-1).tolist()
    [[1.0, -3.0]]
    """

    log: Array
    inverse: Array
    inner: Array

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Cotangent(NamedTuple):
    """Cotangents of the results of attention.

    Attributes
    ----------
    output : Array
        ``(..., L, e)``.
    state : State or None
        Its ``kvz`` is the cotangent of the returned state's ``kvz``; its ``log_scale`` is minus the
        returned state's.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Cotangent
    >>> Cotangent(np.ones((50, 8)), state=None)
    Cotangent(output=<float64 (50, 8)>, state=None)
    """

    output: Array
    state: State | None

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)
