"""Records and protocols: the words in which maps, folds and backends talk to each other.

Shape letters used everywhere: ``L`` queries, ``S`` keys, ``n`` tokens of one block, ``d`` dim,
``m`` features (columns), ``e`` value dim. The sequence axis is always -2; ``...`` are leading
axes (batch, heads), which broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

__all__ = [
    "ELU_PLUS_ONE",
    "HEAD_BY_HEAD",
    "HEAVISIDE",
    "RELU",
    "SQUARED_RELU",
    "Activation",
    "Affine",
    "Array",
    "ArrayT",
    "Assigned",
    "Backend",
    "ColumnNormalized",
    "Corrected",
    "Exact",
    "Exponential",
    "FeatureMap",
    "Features",
    "Index",
    "MapSpec",
    "Normalized",
    "Opaque",
    "Partial",
    "Plan",
    "Pointwise",
    "Problem",
    "RowScale",
    "Spec",
    "State",
    "Tokens",
]

Array: TypeAlias = Any
"""Any array that array-api-compat supports (NumPy, CuPy, torch, JAX, Dask, array-api-strict)."""

ArrayT = TypeVar("ArrayT")
"""The type of the query, which results have: arrays of one library have one type."""

Index: TypeAlias = tuple[slice, ...]
"""One slice for each leading axis of a problem's state, aligned to the right."""


HEAD_BY_HEAD = object()
"""What a backend's ``scan_block`` returns for several heads that it would do one by one."""


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
    """

    x: Array
    log_weight: Array | None
    start: int


class Features(NamedTuple):
    """Features kept in the log domain: ``phi = values * exp(log)``.

    Attributes
    ----------
    log : Array or None
        ``(..., n, m)`` for exponential maps; ``(..., n, 1)`` or None (zero) for all others.
    values : Array or None
        None (one) for exponential maps; ``(..., n, m)`` for all others.
    """

    log: Array
    values: Array


class State(NamedTuple):
    """Everything that linear attention remembers of the keys and values seen so far.

    It stands for ``sum_j phi_j [v_j, 1]^T = kvz * exp(log_scale)``; states of two sets of keys
    merge associatively and commutatively (:func:`linattn.merge_states`).

    Attributes
    ----------
    kvz : Array
        ``(..., m, e + 1)``: weighted values, and in the last column the weights themselves.
    log_scale : Array
        ``(..., m)``: the log shift of each feature, -inf while it has seen nothing.
    length : int
        Positions consumed, masked ones included.
    fingerprint : int or None
        31 bits of the fingerprint of the feature map, which tell its states from those of other
        maps; None where that is not known, and then nothing is rejected.
    """

    kvz: Array
    log_scale: Array
    length: int
    fingerprint: int | None = None

    def __repr__(self) -> str:
        """Show shapes and dtypes in place of the numbers."""
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in self._asdict().items())
        return f"State({shown})"

    @property
    def kv(self) -> Array:
        """View ``(..., m, e)`` of the weighted values, to be read times ``exp(log_scale)``."""
        return self.kvz[..., :-1]

    @property
    def z(self) -> Array:
        """View ``(..., m)`` of the summed features, to be read times ``exp(log_scale)``."""
        return self.kvz[..., -1]


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return f"<{value.dtype} {tuple(shape)}>" if len(shape) else str(value)


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
    """

    num_den: Array
    log: Array
    accepted: bool = False


class RowScale(NamedTuple):
    """What the gradient of a row's numerator and denominator is made of.

    With ``[num, den] = num_den * exp(log)`` and g the cotangent of ``num / den``, the cotangent of
    ``num_den`` is ``[g * inverse, -inner]``. A row that is 0 because its denominator is has none.

    Attributes
    ----------
    log : Array
        ``(..., n, 1)``: the log of the row's scale; inf for a row without gradient.
    inverse : Array
        ``(..., n, 1)``: ``1 / num_den[..., -1:]``, 0 for a row without gradient.
    inner : Array
        ``(..., n, 1)``: ``inverse * (g . num / den)``.
    """

    log: Array
    inverse: Array
    inner: Array


@dataclass(frozen=True)
class Activation:
    """A named pointwise function of a :class:`Pointwise` spec.

    A backend recognizes a function by the whole record (``spec.f == RELU``), which a copy is equal
    to, and never by its name, which is the caller's to choose.

    Attributes
    ----------
    name : str
        What messages call it.
    apply : callable
        ``apply(u, xp) -> (values, log)``: ``f(u) = values * exp(log)``, log ``(..., n, 1)`` or
        None. It may widen the last axis (cosine and sine).
    vjp : callable or None
        ``vjp(u, g, xp) -> grad_u``: the cotangent of ``f(u)``, given as ``g * exp(-log)``, pulled
        back to u. None where f has no derivative to use.
    """

    name: str
    apply: Callable[[Array, ModuleType], tuple[Array, Array | None]]
    vjp: Callable[[Array, Array, ModuleType], Array] | None = None


def _elu_plus_one(u: Array, xp: ModuleType) -> tuple[Array, Array]:
    # A row of large negative numbers would underflow to no feature at all; its largest
    # coordinate goes to the log, which is 0 for every row that has a positive one.
    row = xp.max(u, axis=-1, keepdims=True)
    zero = xp.zeros_like(u)
    log = xp.minimum(row, xp.zeros_like(row))
    return xp.where(u > 0, u + 1, xp.exp(xp.minimum(u, zero) - log)), log


def _relu(u: Array, xp: ModuleType) -> tuple[Array, None]:
    return xp.maximum(u, xp.zeros_like(u)), None


def _heaviside(u: Array, xp: ModuleType) -> tuple[Array, None]:
    # What is not finite has no sign: NaN, where a comparison would give a plausible 0 or 1.
    return xp.where(u > 0, xp.ones_like(u), xp.zeros_like(u)) + (u - u), None


def _squared_relu(u: Array, xp: ModuleType) -> tuple[Array, None]:
    positive = xp.maximum(u, xp.zeros_like(u))
    return positive * positive, None


def _elu_plus_one_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    # Where a row's log is not 0 no coordinate is positive, and the derivative is the value.
    values, _ = _elu_plus_one(u, xp)
    return g * xp.where(u > 0, xp.ones_like(u), values)


def _relu_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    return xp.where(u > 0, g, xp.zeros_like(u))


def _squared_relu_vjp(u: Array, g: Array, xp: ModuleType) -> Array:
    return 2 * g * xp.maximum(u, xp.zeros_like(u))


ELU_PLUS_ONE = Activation("elu_plus_one", _elu_plus_one, _elu_plus_one_vjp)
"""``u + 1`` where u > 0, ``exp(u)`` elsewhere."""

HEAVISIDE = Activation("heaviside", _heaviside)
"""1 where u > 0, 0 elsewhere; it has no gradient."""

RELU = Activation("relu", _relu, _relu_vjp)
"""``max(u, 0)``."""

SQUARED_RELU = Activation("squared_relu", _squared_relu, _squared_relu_vjp)
"""``max(u, 0)^2``."""


@dataclass(frozen=True, eq=False)
class Exponential:
    """Spec of a positive exponential map: ``log phi = x P - x.(Q x) / 2 + col``.

    Attributes
    ----------
    P : Array
        ``(..., d, r)``, r = m, or m / 2 when paired.
    Q : float or Array
        The curvature: a number, or ``(..., d, d)``.
    col : Array
        ``(..., m)``: ``-log(m) / 2``, log importance weights and the like.
    paired : bool
        Whether the second half of the columns uses ``-P``.
    """

    P: Array
    Q: Array | float
    col: Array
    paired: bool = False


@dataclass(frozen=True, eq=False)
class Pointwise:
    """Spec of a pointwise map: ``phi = factor * (f(x P + bias) + offset) * exp(quad |x|^2)``.

    Attributes
    ----------
    f : Activation
        The function.
    P : Array or float
        ``(..., d, r)``, or a number that multiplies every coordinate (no projection).
    bias : Array or None
        ``(..., r)``.
    quad : float or None
        The curvature of the row's log.
    offset : float
        Added to every feature; only for activations whose log is None.
    factor : float or Array
        Multiplies every feature, or each column, ``(..., m)``.
    """

    f: Activation
    P: Array | float
    bias: Array | None = None
    quad: float | None = None
    offset: float = 0.0
    factor: Array | float = 1.0


@dataclass(frozen=True, eq=False)
class Opaque:
    """Spec of a map that only the map itself can evaluate.

    Attributes
    ----------
    fn : callable
        ``fn(tokens) -> Features``. It need not know about ``tokens.log_weight``, which is added
        outside.
    vjp : callable or None
        ``vjp(tokens, cotangent) -> grad_x``: the cotangents of what ``fn`` returned, a
        ``Features``, pulled back to ``tokens.x``. ``cotangent.values`` is None where the values
        are; ``cotangent.log`` is None where it is zero. None: the map has no gradient.
    """

    fn: Callable[[Tokens], Features]
    vjp: Callable[[Tokens, Features], Array] | None = None


@dataclass(frozen=True, eq=False)
class Assigned:
    """Spec of a sparse key side: each key has one feature, at the column it is assigned to.

    The column is ``a = argmax_c (x P + bias)_c`` and its log feature
    ``log sum_i exp((x probes)_i + offset_i + table_ia)``; all other features are 0. With
    ``dense`` the p terms ``exp(x probes + offset)`` follow as columns of their own.

    Attributes
    ----------
    P : Array
        ``(..., d, m)``.
    bias : Array
        ``(..., m)``; -inf for a column that takes no key.
    probes : Array
        ``(..., d, p)``.
    offset : Array
        ``(..., p)``.
    table : Array
        ``(..., p, m)``, finite.
    dense : bool
        Whether there are m + p columns.
    """

    P: Array
    bias: Array
    probes: Array
    offset: Array
    table: Array
    dense: bool = False


@dataclass(frozen=True, eq=False)
class Normalized:
    """Spec of an exponential map divided by its own sum over the columns, to a power.

    ``log phi = u - power log sum_r exp(u_r) + x.tilt`` with ``u = x P + col``.

    Attributes
    ----------
    P : Array
        ``(..., d, m)``.
    col : Array
        ``(..., m)``.
    power : Array
        ``(..., 1, 1)``.
    tilt : Array
        ``(..., d, 1)``.
    """

    P: Array
    col: Array
    power: Array
    tilt: Array


@dataclass(frozen=True, eq=False)
class Affine:
    """A change of coordinates before a spec: ``x' = (x - shift) transform``, and a log weight.

    The driver applies it to the tokens, so that block bodies only ever see the spec inside.

    Attributes
    ----------
    spec : Spec
        What is evaluated at ``x'``.
    shift : Array
        ``(..., 1, d)``.
    transform : Array
        ``(..., d, d)``.
    weight : Array
        ``(..., d, 1)``: the log weight of a token is ``(x - shift).weight + offset``.
    offset : Array
        ``(..., 1, 1)``.
    """

    spec: Spec
    shift: Array
    transform: Array
    weight: Array
    offset: Array


@dataclass(frozen=True, eq=False)
class ColumnNormalized:
    """Spec of a column-normalized read: every column of the state divided by its own normalizer.

    ``out = sum_r phi_r (kv_r / z_r) / sum_r phi_r`` over the columns that have seen a key. The
    driver divides: block bodies only ever see the spec inside and a divided state, and are not
    asked for causal blocks.

    Attributes
    ----------
    spec : Spec
        What the queries are evaluated by; exponential (``values`` None), as the key side is.
    """

    spec: Spec


@dataclass(frozen=True, eq=False)
class Corrected:
    """Spec of queries that read a least-squares correction of the state, under a guard.

    The state has m + p columns, the spec inside m. With ``N = diag(exp(half_log))``, S the first m
    columns of the state and Y the others, queries read ``S_1 = N^-1 matrix [N S, Y]``, or S where
    the correction is not to be trusted. The driver does both: block bodies only ever see the spec
    inside and a state of m columns, and are not asked for causal blocks.

    Attributes
    ----------
    spec : Spec
        What the queries are evaluated by; exponential (``values`` None), as the key side is.
    half_log : Array
        ``(..., m)``.
    matrix : Array
        ``(..., m, m + p)``.
    """

    spec: Spec
    half_log: Array
    matrix: Array


@dataclass(frozen=True)
class Exact:
    """Spec of exact attention with weights ``exp(scale q.k)``: no features, no state.

    Attributes
    ----------
    scale : float
        Multiplies every logit.
    """

    scale: float


Spec: TypeAlias = Exponential | Pointwise | Assigned | Normalized | Opaque
MapSpec: TypeAlias = Spec | Affine | ColumnNormalized | Corrected
"""What a feature map may say of a side; block bodies are given a ``Spec``."""


@dataclass(frozen=True)
class Problem:
    """One attention computation, validated: what a backend's ``plan`` and whole tier are given.

    Attributes
    ----------
    xp : module
        The array namespace.
    dtype : dtype
        The accumulation dtype: float32 or float64.
    query, key, value : Array
        ``(..., L, d)``, ``(..., S, d)``, ``(..., S, e)`` in the caller's dtype.
    key_mask : Array or None
        ``(..., S, 1)``, True = attend.
    query_spec, key_spec : Spec or Exact
        The two sides of the feature map; both ``Exact`` for softmax attention.
    query_change, key_change : Affine or None
        Changes of coordinates that the tokens go through first.
    num_features : int
        Columns m of the map; 0 for softmax attention.
    state_lead, lead : tuple of int
        Leading axes of the state (those of key, value and the map) and of the output.
    state : State or None
        What was seen before, or None.
    is_causal : bool
        Whether query i sees keys up to i only.
    chunk_size : int or None
        Tokens a block, or None for the plan's choice.
    want_log : bool
        Whether the log normalizer is asked for.
    lazy : bool
        Whether values must not be inspected (traced or lazy arrays).
    num_threads : int or None
        What the caller allows; None leaves it to the plan.
    tf32 : bool
        Whether float32 products may round their factors to TF32.
    exact_window : int or None
        Length of the blocks whose keys are exact in their own block and in those beside it.
    near_spec : Exact or None
        How they are; None without a window.
    signed : bool
        Whether features take both signs, so that a denominator may cancel.
    """

    xp: ModuleType
    dtype: Any
    query: Array
    key: Array
    value: Array
    key_mask: Array | None
    query_spec: Any
    key_spec: Any
    num_features: int
    state_lead: tuple[int, ...]
    lead: tuple[int, ...]
    query_change: Affine | None
    key_change: Affine | None
    state: State | None
    is_causal: bool
    chunk_size: int | None
    want_log: bool
    lazy: bool
    num_threads: int | None
    tf32: bool = False
    exact_window: int | None = None
    near_spec: Exact | None = None
    signed: bool = False

    def replace(self, **changes: Any) -> Problem:
        """Copy with other values of some attributes, in 1 us instead of the 9 of ``replace``."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__, **changes)
        return other


class Plan(NamedTuple):
    """How a problem is walked.

    Attributes
    ----------
    block_size : int
        Tokens a block.
    tasks : sequence of Index
        Independent parts along the leading axes of the state; ``[()]`` is everything at once.
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


@runtime_checkable
class FeatureMap(Protocol):
    """What linear attention needs of a feature map; any object with these will do.

    ``num_features`` is the number of columns, None meaning "as many as the inputs have
    coordinates". A map that has ``query_spec(xp, dtype, device)`` and ``key_spec(...)`` as well is
    evaluated by the backends from those records; otherwise the two methods here are called on
    blocks of tokens. A method ``fingerprint()`` that returns a string, another one for every map
    that gives other features, lets states be told from those of other maps; it is called whenever
    a state is checked.
    """

    @property
    def num_features(self) -> int | None:
        """Columns m."""
        ...

    def query_features(self, x: Array) -> Features:
        """Features of queries ``(..., n, d)``."""
        ...

    def key_features(self, x: Array) -> Features:
        """Features of keys ``(..., n, d)``."""
        ...


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

    Each may return ``NotImplemented`` for a problem that it does not know; the generic code then
    takes over. ``scan_block`` may return ``HEAD_BY_HEAD`` for a block of several heads: it is then
    called for each alone. A module with compiled kernels may also define
    ``kernel_status() -> str``, where they have run, which ``linattn info`` prints. That of NumPy
    may define ``limited_threads()``, a context manager for what the core computes on the host
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
