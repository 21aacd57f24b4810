"""The contract between the driver and a backend."""

from __future__ import annotations

from typing import Any, Protocol

from linattn.typing.problems import Plan, Problem
from linattn.typing.records import Array, Partial, RowScale, State, Tokens
from linattn.typing.specs import Exact, Spec

__all__ = ["Backend"]


class Backend(Protocol):
    """The block tier that a backend may replace, function by function.

    A backend is a module that defines any of these, and optionally the whole tier:

    * ``attention(problem) -> (output, state, log_normalizer)``;
    * ``attention_vjp(problem, cotangent) -> (query, key, value, state)``: gradients, that of the
      initial state's ``kvz`` None without one. ``cotangent.output`` is that of the output,
      ``cotangent.state`` None or a ``State`` to merge with the adjoint after the last token;
    * ``decode(problem) -> (output, state)``;
    * ``stepper(problem, state)``, an object with a method ``step(query, key, value) -> output`` or
      None and an attribute ``state``.

    Each may return :class:`~linattn.typing.Declined`, with the reason, or ``NotImplemented`` for a
    problem that it does not do; the generic code then takes over. Where ``scan_block`` declines
    several heads ``by_head``, it is called for each alone. A module with compiled kernels may also
    define ``kernel_status() -> str``, where they have run, which ``linattn info`` prints. That of
    NumPy may define ``limited_threads()``, a context manager for what the core computes on the host
    between blocks, such as the fit of landmarks to arrays of any library.

    In the gradients a *adjoint* is a state of queries: ``sum_i phi_i g1_i^T / exp(log_i)`` over
    queries after the keys in hand, ``g1_i`` the cotangent of a row's ``[num, den]`` on the scale
    ``exp(log_i)``. Gradients may have leading axes that their tokens lack; the driver sums over
    them.
    """

    def plan(self, problem: Problem) -> Plan:
        """Choose tasks, block length and threads."""
        ...

    def reduce_block(
        self, key_spec: Spec, tokens: Tokens, values_and_one: Array, state: State
    ) -> State:
        """Add a block of keys and values to the state."""
        ...

    def read_block(self, query_spec: Spec, tokens: Tokens, state: State, want_log: bool) -> Partial:
        """Read the state with a block of queries."""
        ...

    def scan_block(
        self,
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        want_log: bool,
    ) -> tuple[Partial, State] | object:
        """Causal attention within a block, after the state; also the state after it."""
        ...

    def exact_block(
        self,
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        visible: Array | None = None,
    ) -> Partial:
        """Softmax attention of a block of queries to a block of keys, or to the visible ones."""
        ...

    def exact_more(
        self, spec: Exact, query: Tokens, key: Tokens, values_and_one: Array, part: Partial
    ) -> Partial:
        """Add a block of keys to a partial of the same queries."""
        ...

    def values_block(self, value: Array, mask: Array | None, dtype: Any) -> Array:
        """Values of a block with a column of 1 appended, masked ones as 0; for one use."""
        ...

    def divide(self, part: Partial, out: Array | None = None) -> Array | None:
        """Numerator over denominator; None where it has been put into ``out``."""
        ...

    def window_block(
        self,
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        is_causal: bool,
        lazy: bool,
    ) -> Partial:
        """Softmax attention of blocks of queries to the keys of their own block and beside it."""
        ...

    def far_states(
        self, before: State, states: State, after: State | None, lazy: bool
    ) -> tuple[State, State]:
        """Merge the states of all blocks that are far of each block of an exact window."""
        ...

    def read_block_vjp(
        self, query_spec: Spec, tokens: Tokens, state: State, grad_output: Array, adjoint: State
    ) -> tuple[Array, State]:
        """Gradient of a block of queries that read a state, and the adjoint with them added."""
        ...

    def reduce_block_vjp(
        self, key_spec: Spec, tokens: Tokens, values_and_one: Array, adjoint: State
    ) -> tuple[Array, Array]:
        """Gradients of a block of keys and of their ``[v, 1]``, all read by an adjoint."""
        ...

    def scan_query_vjp(
        self,
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        grad_output: Array,
    ) -> tuple[Array, RowScale, State]:
        """Gradient of a causal block of queries, their scales, and the state after the block."""
        ...

    def scan_key_vjp(
        self,
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        adjoint: State,
        grad_num_den: Array,
        log: Array,
    ) -> tuple[Array, Array, State]:
        """Gradients of a causal block of keys and of ``[v, 1]``, and the adjoint before the block.

        ``grad_num_den``, ``(..., n, e + 1)``, is the cotangent of the rows on the scale
        ``exp(log)``.
        """
        ...

    def scan_vjp(
        self,
        query_spec: Spec,
        key_spec: Spec,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        state: State,
        adjoint: State,
        grad_output: Array,
    ) -> tuple[Array, Array, Array, State]:
        """Gradients of a causal block by queries, keys and ``[v, 1]``, and the adjoint before it.

        What the two functions above do, at once, from the state before the block and the adjoint
        behind it. Where a backend has it, the forward pass stores checkpoints for it.
        """
        ...

    def exact_query_vjp(
        self,
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        grad_num_den: Array,
        log: Array,
        visible: Array | None,
    ) -> Array:
        """Gradient of a block of queries through their softmax weights for a block of keys."""
        ...

    def exact_key_vjp(
        self,
        spec: Exact,
        query: Tokens,
        key: Tokens,
        values_and_one: Array,
        grad_num_den: Array,
        log: Array,
        visible: Array | None,
    ) -> tuple[Array, Array]:
        """Gradients of a block of keys and of ``[v, 1]`` by the softmax weights of queries."""
        ...
