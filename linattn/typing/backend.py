"""The contract between the driver and a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from linattn.typing.problems import Plan, Problem, Recurrence
from linattn.typing.records import (
    Array,
    Clusters,
    Cotangent,
    Declined,
    Partial,
    State,
    Tokens,
)
from linattn.typing.specs import Assigned, Exact, Spec

__all__ = ["Backend", "BlockTier", "Services", "Stepper", "WholeTier", "implements"]


F = TypeVar("F", bound=Callable[..., Any])


def implements(contract: F) -> Callable[[F], F]:
    """Declare that a function implements one of :class:`Backend`: type checkers compare the two.

    ``implements(Backend.read_block)(read_block)``, or as a decorator. At run time the function
    is returned unchanged; :func:`linattn.testing.check_backend` compares what it returns.

    Examples
    --------
    >>> from linattn.typing import BlockTier, Declined, implements
    >>> @implements(BlockTier.plan)
    ... def plan(problem):
    ...     return Declined("only short sequences")
    >>> plan(None).reason
    'only short sequences'
    """
    return lambda function: function


class Stepper(Protocol):
    """Decoding in place: both attributes are required.

    A method ``copy()`` is optional: it returns a second stepper at the same token. With it, a
    copied decoder returns the same bits as the original; without it, the copy starts from `state`.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> token = np.ones(8)
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> decoder = linattn.Decoder(phi, linattn.init_state(phi, 8, like=token[None]))
    >>> decoder.step(token, token, token).shape, decoder.state.length
    ((8,), 1)
    """

    @property
    def state(self) -> State:
        """A copy of the state after the last step."""
        ...

    def step(self, query: Array, key: Array, value: Array) -> Array | Declined:
        """Take one token, ``(..., d)``, ``(..., d)``, ``(..., e)``: its output ``(..., e)``.

        If it is declined, the state is as before.
        """
        ...


class WholeTier(Protocol):
    """Whole problems. Every function is optional: without it the driver goes block by block."""

    @staticmethod
    def attention(problem: Problem) -> tuple[Array, State | None, Array | None] | Declined:
        """Output, state after the last key, and the log normalizer if ``want_log``."""
        ...

    @staticmethod
    def attention_pullback(
        problem: Problem,
    ) -> tuple[Array, State | None, Array | None, Callable[[Cotangent], Any]] | Declined:
        """Compute what ``attention`` does, and a pullback that reuses the forward pass.

        The pullback returns what ``attention_vjp`` does, or declines. The caller may write over the
        results before it runs.
        """
        ...

    @staticmethod
    def attention_vjp(problem: Problem, cotangent: Cotangent) -> tuple[Array, ...] | Declined:
        """Gradients by query, key, value and the ``kvz`` of the initial state, None without one.

        A backend that serves ``key_bias`` and ``log_decay`` adds their gradients, of their shape or
        with one number for each key. ``cotangent.state`` is merged with the adjoint after the last
        token.
        """
        ...

    @staticmethod
    def merge(first: State, second: State) -> State | Declined:
        """Merge two states that a caller has, the earlier one first; it decays by the second's."""
        ...

    @staticmethod
    def decode(problem: Problem) -> tuple[Array, State] | Declined:
        """One token, ``(..., 1, d)`` each: its output ``(..., e)`` and the state after it."""
        ...

    @staticmethod
    def stepper(problem: Problem, state: State) -> Stepper | Declined:
        """Return a stepper that decodes tokens of the shapes in `problem`, from `state`."""
        ...

    @staticmethod
    def recurrence(problem: Recurrence) -> tuple[Array, Array] | Declined:
        """Output of a recurrence, ``(..., L, e)``, and the state after the last token."""
        ...

    @staticmethod
    def recurrence_vjp(
        problem: Recurrence, grad_output: Array, grad_state: Array | None
    ) -> Sequence[Array] | Declined:
        """Gradients by query, key, value, log decay, beta and initial state; None for none.

        Each has the shape of its argument in the problem, and any floating dtype. ``grad_state``:
        the gradient by the state after the last token.
        """
        ...


class BlockTier(Protocol):
    """One block of tokens. Every function is optional: the generic one is its fallback.

    No array that a function is given has an axis of length 0.
    """

    @staticmethod
    def plan(problem: Problem) -> Plan | Declined:
        """Choose tasks, block length and threads."""
        ...

    @staticmethod
    def reduce_block(
        key_spec: Spec, tokens: Tokens, values_and_one: Array, state: State
    ) -> State | Declined:
        """Add a block of keys and values to the state."""
        ...

    @staticmethod
    def read_block(
        query_spec: Spec, tokens: Tokens, state: State, want_log: bool
    ) -> Partial | Declined:
        """Read the state with a block of queries."""
        ...

    @staticmethod
    def reduce_values(
        key_spec: Spec, tokens: Tokens, value: Array, mask: Array | None, state: State
    ) -> State | Declined:
        """Add a block of keys and values, with their mask, to the state.

        The generic one calls ``reduce_block`` with ``[v, 1]``.
        """
        ...

    @staticmethod
    def read_output(
        query_spec: Spec, tokens: Tokens, state: State, out: Array | None = None
    ) -> Array | Declined | None:
        """Read the state with a block of queries, divide, and return the result of ``divide``.

        The generic function calls ``read_block`` and ``divide``.
        """
        ...

    @staticmethod
    def scan_block(
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        want_log: bool,
    ) -> tuple[Partial, State] | Declined:
        """Causal attention within a block, after the state; also the state after it."""
        ...

    @staticmethod
    def scan_decayed_block(
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        want_log: bool,
    ) -> tuple[Partial, State] | Declined:
        """Compute the same with keys that have a ``log_decay``."""
        ...

    @staticmethod
    def sequences_block(
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        lengths: Array,
        is_causal: bool,
        want_log: bool,
    ) -> Partial | Declined:
        """Attention within each of the packed sequences of a block.

        ``lengths``: tokens of each sequence, at least 1, on the host. The driver does not check
        the rows.
        """
        ...

    @staticmethod
    def exact_block(
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        visible: Array | None = None,
    ) -> Partial | Declined:
        """Softmax attention of a block of queries to a block of keys, or to the visible ones.

        ``visible`` is ``(n, s)``, or has leading axes of blocks too. Log weights are 0 or -inf,
        here and in all of softmax attention but :meth:`exact_vjp`, where a key's bias is one.
        """
        ...

    @staticmethod
    def exact_more(
        spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, part: Partial
    ) -> Partial | Declined:
        """Add a block of keys to a partial of the same queries."""
        ...

    @staticmethod
    def band_block(
        spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, band: tuple[int, int]
    ) -> Partial | Declined:
        """Softmax attention of queries, each to the keys near its place.

        ``band`` is ``(low, high)``: query i sees keys i + low to i + high, as far as there are any.
        Masked keys are zeros, and so are their values and ones. A value outside its band must not
        reach a query, even if it is NaN or inf.
        """
        ...

    @staticmethod
    def divide(part: Partial, out: Array | None = None) -> Array | Declined | None:
        """Numerator over denominator as a new array, or None where it has been put into ``out``."""
        ...

    @staticmethod
    def assign_block(
        key_spec: Assigned, tokens: Tokens, values_and_one: Array, state: State
    ) -> tuple[State, Array, Array] | Declined:
        """Add a block of keys to the state; the column of each and its squared distance to it.

        Both are ``(..., n)``, on the host.
        """
        ...

    @staticmethod
    def choose_block(
        query_spec: Spec,
        tokens: Tokens,
        state: State,
        bias: Array,
        count: int,
        diagonal: tuple[Array, Array] | None,
    ) -> tuple[Array, Partial] | Declined:
        """Choose columns by the largest log features and bias; read the others of the state.

        The chosen columns are a mask ``(..., n, m)`` on the host. ``diagonal``, also there: a
        column for each query, ``(..., n)``, and the least value of its log feature and bias.
        """
        ...

    @staticmethod
    def clusters_block(
        spec: Exact,
        query: Tokens,
        chosen: Array,
        clusters: Clusters,
        exact_window: int | None,
        part: Partial,
    ) -> Partial | Declined:
        """Add the keys of the clusters that queries ``(n, d)`` chose to the queries' partial.

        Keys in the block of ``exact_window`` tokens of a query, or in a block beside it, are left
        out.
        """
        ...

    @staticmethod
    def read_block_vjp(
        query_spec: Spec, tokens: Tokens, state: State, grad_output: Array, adjoint: State
    ) -> tuple[Array, State] | Declined:
        """Gradient of a block of queries that read a state, and the adjoint with them added."""
        ...

    @staticmethod
    def reduce_block_vjp(
        key_spec: Spec, tokens: Tokens, values_and_one: Array, adjoint: State
    ) -> tuple[Array, Array] | Declined:
        """Gradients of a block of keys and of their ``[v, 1]``, all read by an adjoint."""
        ...

    @staticmethod
    def scan_vjp(
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        adjoint: State,
        grad_output: Array,
    ) -> tuple[Array, Array, Array, State] | Declined:
        """Gradients of a causal block by queries, keys and ``[v, 1]``, and the adjoint before it.

        ``state`` is the one before the block, ``adjoint`` the one after it. Where a backend has
        this function, the forward pass stores checkpoints for it.
        """
        ...

    @staticmethod
    def exact_vjp(
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        grad_num_den: Array,
        log: Array,
        visible: Array | None,
    ) -> tuple[Array, Array, Array] | Declined:
        """Gradients of blocks of queries, keys and ``[v, 1]`` through their softmax weights.

        ``log`` is the log scale of the rows, ``(..., n, 1)``, or with a bias of pairs less that,
        ``(..., n, s)``.
        """
        ...


class Services(Protocol):
    """Optional functions of a backend beside attention.

    Examples
    --------
    >>> import linattn_numpy
    >>> with linattn_numpy.limited_threads():
    ...     pass  # BLAS has one thread here
    """

    @staticmethod
    def modifiers() -> Sequence[str]:
        """Attributes of problems in :data:`MODIFIERS` that its whole tier serves; else none.

        ``"read_key"``: it serves recurrences of the rule ``"dplr"``.
        """
        ...

    @staticmethod
    def kernel_status() -> str:
        """Where compiled kernels have run, for ``linattn info``."""
        ...

    @staticmethod
    def limited_threads() -> AbstractContextManager[None]:
        """Return a context that limits threads while the core computes on the host, as in fits.

        Only the NumPy backend is asked for it.
        """
        ...


class Backend(WholeTier, BlockTier, Services, Protocol):
    """The functions that a backend may define: a module with any of them, called by position.

    No function is required, and none needs another. Each may return a
    :class:`~linattn.typing.Declined` (or ``NotImplemented``) for a problem that it does not do; the
    generic code then takes over. Arguments are never written to, but for ``out`` of ``divide``.
    A result may be valid until the next call only.

    In the gradients an *adjoint* is a state of queries: ``sum_i phi_i g1_i^T / exp(log_i)`` over
    queries after the keys in hand, ``g1_i`` the cotangent of a row's ``[num, den]`` on the scale
    ``exp(log_i)``. Gradients may have leading axes that their tokens lack; the driver sums over
    them.

    Examples
    --------
    >>> import linattn_numpy
    >>> [name for name in ("plan", "attention", "scan_block") if hasattr(linattn_numpy, name)]
    ['plan', 'scan_block']
    """
