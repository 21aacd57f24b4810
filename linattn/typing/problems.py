"""A validated problem, and the plan by which it is walked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from linattn.typing.records import Array, Index, State, one_line
from linattn.typing.specs import Affine, Exact

__all__ = [
    "MODIFIERS",
    "ExactKeys",
    "Plan",
    "Policy",
    "Problem",
    "Recurrence",
    "RelativeBias",
    "Visible",
    "Weights",
]

MODIFIERS = (
    "key_bias",
    "log_decay",
    "local_window",
    "relative_bias",
    "normalize",
    "exact_clusters",
    "key_stop",
    "sinks",
)
"""Attributes that change the weights of a problem. A whole function of a backend is called for a
problem with one of them only if :meth:`Services.modifiers` of the backend names it."""


class RelativeBias(NamedTuple):
    """Log weights of pairs that depend on the offset of the key from the query, j - i, alone.

    Attributes
    ----------
    table : Array
        ``(..., 2 r + 3)`` in the accumulation dtype: the log weight of keys further left than r,
        then of offsets -r to r, then of keys further right. Leading axes are heads.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import RelativeBias
    >>> RelativeBias(np.zeros((12, 2 * 32 + 3))).reach
    32
    """

    table: Array

    @property
    def reach(self) -> int:
        """The largest offset r that has a log weight of its own."""
        return (int(self.table.shape[-1]) - 3) // 2

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Visible(NamedTuple):
    """Which keys each query sees, beside a mask; query i has position ``query_start + i``, key j j.

    Attributes
    ----------
    left, right : int or None
        Keys before and after its own place that a query sees; None for all.
    key_stop : ndarray or None
        ``(..., L)`` integers on the host, non-decreasing: query i sees the keys before the i-th.
    query_start : int
        Position of the first query among the keys; a map counts both from the length of ``state``.
    cu_seqlens : ndarray or None
        Borders of packed sequences, ``(n + 1,)``, on the host; the state of the problem then has an
        axis of n before all others, which nothing else has. Backends are given the sequences as
        problems of their own.
    option : str
        The caller's option by which queries do not see all keys; "" where they do.
    sinks_ahead : bool
        Whether a query whose window ends at its own place sees the sinks after it.

    Examples
    --------
    >>> from linattn.typing import Visible
    >>> Visible(left=16, right=0).local_window, Visible(right=0).is_causal
    ((16, 0), True)
    """

    left: int | None = None
    right: int | None = None
    key_stop: Any = None
    query_start: int = 0
    cu_seqlens: Any = None
    option: str = ""
    sinks_ahead: bool = False

    @property
    def is_causal(self) -> bool:
        """Whether query i sees no key after its own place."""
        return not self.ahead

    @property
    def ahead(self) -> bool:
        """Whether query i sees keys after its own place."""
        return self.right != 0 or self.sinks_ahead

    @property
    def local_window(self) -> tuple[int, int] | None:
        """Keys ``(left, right)`` of a query that softmax attention sees; None for all."""
        return None if self.left is None or self.right is None else (self.left, self.right)

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Weights(NamedTuple):
    """Weights of a pair of query and key, beside the map.

    Attributes
    ----------
    key_mask : Array or None
        ``(..., S, 1)``, True = attend.
    key_bias : Array or None
        ``(..., S, 1)`` in the accumulation dtype: log weight of each key, beside the mask.
    log_decay : Array or None
        ``(..., S, 1)``, or ``(..., 1, 1)`` if all tokens share it: added to the log scale of the
        state before each token.
    relative_bias : RelativeBias or None
        Log weights of offsets, of softmax attention and beside an exact window.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Weights
    >>> weights = Weights(key_mask=np.ones((4, 50, 1), dtype=bool))
    >>> weights.of_keys(lambda rows: rows[:, :10]).key_mask.shape
    (4, 10, 1)
    """

    key_mask: Array | None = None
    key_bias: Array | None = None
    log_decay: Array | None = None
    relative_bias: RelativeBias | None = None

    def of_keys(self, change: Callable[[Array], Array]) -> Weights:
        """Apply ``change`` to every array that has a row for each key."""
        mask, bias, decay = (None if x is None else change(x) for x in self[:3])
        return Weights(mask, bias, decay, self.relative_bias)

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class ExactKeys(NamedTuple):
    """Keys that a query weighs exactly beside a map.

    Attributes
    ----------
    window : int or None
        Length w of blocks: the keys of a query's block and of the blocks beside it are exact.
    clusters : int or None
        Clusters whose keys are exact for a query, chosen by the query.
    spec : Exact or None
        Spec of the exact weights; None if no key is exact.
    assigned : AssignedKeys or None
        Clusters of the keys and the state after them, where they are known.
    sinks : int
        First keys that are exact beside a window; in softmax attention they are seen outside of it.

    Examples
    --------
    >>> from linattn.typing import Exact, ExactKeys
    >>> ExactKeys(window=32, spec=Exact(0.125)).spec.scale
    0.125
    """

    window: int | None = None
    clusters: int | None = None
    spec: Exact | None = None
    assigned: Any = None
    sinks: int = 0

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


class Policy(NamedTuple):
    """How the work may be done.

    Attributes
    ----------
    chunk_size : int or None
        Tokens a block, or None for the plan's choice.
    num_threads : int or None
        The most threads that the caller allows; None leaves it to the plan.
    tf32 : bool
        Whether float32 products may round their factors to TF32.
    lazy : bool
        Whether values must not be inspected (traced or lazy arrays).

    Examples
    --------
    >>> from linattn.typing import Policy
    >>> Policy(chunk_size=64)
    Policy(chunk_size=64, num_threads=None, tf32=False, lazy=False)
    """

    chunk_size: int | None = None
    num_threads: int | None = None
    tf32: bool = False
    lazy: bool = False

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@dataclass(frozen=True)
class Problem:
    """One validated call of attention: the argument of a backend's ``plan`` and whole tier.

    Attributes
    ----------
    xp : module
        The array namespace.
    dtype : dtype
        The accumulation dtype: float32 or float64.
    query, key, value : Array
        ``(..., L, d)``, ``(..., S, d)``, ``(..., S, e)`` in the caller's dtype.
    query_spec, key_spec : Spec or Exact
        The two sides of the feature map; both ``Exact`` for softmax attention.
    query_change, key_change : Affine or None
        Changes of coordinates that the tokens go through first.
    num_features : int
        Columns m of the map; 0 for softmax attention.
    state_lead, lead : tuple of int
        Leading axes of the state (broadcast of key, value and the map) and of the output.
    state : State or None
        State of the tokens before these, or None.
    sees : Visible
        Which keys a query sees.
    weights : Weights
        Weights of pairs beside the map.
    exact : ExactKeys
        Keys that a query weighs exactly beside the map.
    policy : Policy
        How the work may be done.
    want_log : bool
        Whether rows are read on the true scale, as where the log normalizer is asked for.
    normalize : bool
        Whether numerators are divided by denominators.
    signed : bool
        Whether features may take both signs, so that a denominator may cancel.
    feature_map : FeatureMap or None
        The caller's, for backends whose tasks call public functions; None for softmax attention.
    plans : list or None
        Where the driver keeps its plan for calls that differ from this one in numbers alone. A copy
        has none.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import typing
    >>> x, spec = np.ones((50, 8)), typing.Exact(0.125)
    >>> sees, weights, exact = typing.Visible(right=0), typing.Weights(), typing.ExactKeys()
    >>> lead, policy = (), typing.Policy()
    >>> problem = typing.Problem(
    ...     np, x.dtype, x, x, x, spec, spec, 0, lead, lead, sees, weights, exact, policy
    ... )
    >>> problem.mode, problem.sees.is_causal
    ('exact', True)
    """

    __repr__ = one_line

    xp: ModuleType
    dtype: Any
    query: Array
    key: Array
    value: Array
    query_spec: Any
    key_spec: Any
    num_features: int
    state_lead: tuple[int, ...]
    lead: tuple[int, ...]
    sees: Visible
    weights: Weights
    exact: ExactKeys
    policy: Policy
    query_change: Affine | None = None
    key_change: Affine | None = None
    state: State | None = None
    want_log: bool = False
    normalize: bool = True
    signed: bool = False
    feature_map: Any = None
    plans: list[Any] | None = None

    @property
    def modifiers(self) -> list[str]:
        """Names in :data:`MODIFIERS` that apply to this problem."""
        weights, sees = self.weights, self.sees
        values = (
            weights.key_bias,
            weights.log_decay,
            sees.left,
            weights.relative_bias,
            None if self.normalize else False,
            self.exact.clusters,
            sees.key_stop,
            self.exact.sinks or None,
        )
        return [name for name, x in zip(MODIFIERS, values, strict=True) if x is not None]

    @property
    def longest(self) -> int:
        """How many keys there are; of packed sequences, in the longest."""
        borders = self.sees.cu_seqlens
        return int(self.key.shape[-2] if borders is None else np.diff(borders).max())

    @property
    def mode(self) -> str:
        """What queries read, by name: full, causal, stops, two-sided, window, clusters, exact."""
        if isinstance(self.query_spec, Exact):
            return "exact"
        if self.exact.window is not None:
            return "window"
        if self.exact.clusters is not None:
            return "clusters"
        if self.sees.key_stop is not None:
            return "stops"
        if self.sees.is_causal:
            return "causal"
        # Without queries there is a state, which has seen its keys in their order.
        decays = self.weights.log_decay is not None and self.query.shape[-2] > 0
        return "two-sided" if decays else "full"

    def replace(self, **changes: Any) -> Problem:
        """Copy with other values of some attributes, in 1 us instead of the 9 of ``replace``."""
        if not changes.keys() <= self.__dict__.keys():
            unknown = sorted(changes.keys() - self.__dict__.keys())
            raise TypeError(f"changes must name attributes of a problem, got {', '.join(unknown)}")
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__, plans=None)
        other.__dict__.update(changes)
        return other


class Plan(NamedTuple):
    """How a problem is walked.

    Attributes
    ----------
    block_size : int
        Tokens a block.
    tasks : sequence of Index
        Independent parts along the leading axes of the state; ``[()]`` is one task of all heads.
    run : callable
        ``run(work, tasks)`` calls ``work(task)`` for each task, in any order, and returns when
        all are done. Errors are raised.
    segments : int
        Pieces of the sequence to be run side by side, where there is one task only.
    backward_size : int or None
        Tokens a block of the backward pass; None is ``block_size``.
    backward_tasks : sequence of Index or None
        Tasks of the backward pass; None is ``tasks``.
    resumable : bool
        ``run`` expects of ``work(task)`` an iterator: each of its steps does a block of the task.
        They may be taken up by one thread after the other, for load balancing.

    Examples
    --------
    >>> from linattn.typing import Plan
    >>> def run(work, tasks):
    ...     for task in tasks:
    ...         work(task)
    >>> plan = Plan(128, [(slice(0, 4),), (slice(4, 8),)], run)
    >>> plan.run(print, plan.tasks)
    (slice(0, 4, None),)
    (slice(4, 8, None),)
    """

    block_size: int
    tasks: Sequence[Index]
    run: Callable[[Callable[[Any], Any], Sequence[Any]], None]
    segments: int = 1
    backward_size: int | None = None
    backward_tasks: Sequence[Index] | None = None
    resumable: bool = False

    def for_gradients(self) -> Plan:
        """Tasks and blocks of the backward pass, and of a forward pass that keeps states for it."""
        return self._replace(
            block_size=self.backward_size or self.block_size,
            tasks=self.tasks if self.backward_tasks is None else self.backward_tasks,
        )

    def __repr__(self) -> str:
        """Show one line, without the numbers of arrays."""
        return one_line(self)


@dataclass(frozen=True)
class Recurrence:
    """One validated call of a recurrence: L tokens of dim d, values of dim e.

    Attributes
    ----------
    xp : module
        The array namespace.
    query, key, value : Array
        ``(..., L, d)``, ``(..., L, d)``, ``(..., L, e)`` in the caller's dtype.
    log_decay : Array or None
        ``(..., L, 1)`` or ``(..., L, d)``, None without a gate.
    beta : Array or None
        ``(..., L, 1)``, None without the delta rule.
    initial_state : Array or None
        ``(..., d, e)`` in the accumulation dtype, None for zeros.
    scale : float
        Factor of the outputs.
    dtype : dtype
        The accumulation dtype: float32 or float64.
    state_lead, lead : tuple of int
        Leading axes of states (broadcast of all arrays but the query), and of outputs.
    chunk_size : int
        Tokens that are solved together; a backend may choose another number.
    num_threads : int or None
        The most threads that the caller allows, or None for the default.
    borders : list of int or None
        Where packed sequences begin and end; states then have an axis for them in front. Backends
        are given the sequences as problems of their own.
    erase_key, read_key : Array or None
        ``(..., L, d)``, of the rule ``"dplr"`` only. The erase key is multiplied by beta already,
        and ``beta`` is None. A backend receives them if its ``modifiers`` names ``"read_key"``.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.typing import Recurrence
    >>> x, decay = np.ones((50, 8)), np.full((50, 1), -0.1)
    >>> problem = Recurrence(np, x, x, x, decay, None, None, 1.0, x.dtype, (), (), 32, None)
    >>> problem.log_decay.shape
    (50, 1)
    """

    __repr__ = one_line

    xp: ModuleType
    query: Array
    key: Array
    value: Array
    log_decay: Array | None
    beta: Array | None
    initial_state: Array | None
    scale: float
    dtype: Any
    state_lead: tuple[int, ...]
    lead: tuple[int, ...]
    chunk_size: int
    num_threads: int | None
    borders: list[int] | None = None
    erase_key: Array | None = None
    read_key: Array | None = None

    TOKENS: ClassVar = ("query", "key", "value", "log_decay", "beta", "erase_key", "read_key")
    """Names of the arrays with one row for each token, in the order of their gradients."""

    @property
    def modifiers(self) -> list[str]:
        """What a backend must serve by name."""
        return [] if self.read_key is None else ["read_key"]
