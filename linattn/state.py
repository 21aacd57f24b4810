"""The state of linear attention: make, update, read, merge, keep."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from linattn import _arrays, _checks, _dispatch, _generic, _numerics, _settings
from linattn._driver import forward
from linattn._driver.problem import (
    check_feature_map,
    linear_problem,
    map_specs,
    num_features_of,
    step_problem,
)
from linattn._driver.stamps import (
    axes_behind_first,
    broadcast_decay,
    check_map_of_state,
    check_sequences,
    known_sequences,
    stamped,
)
from linattn._fingerprints import known_integer
from linattn._generic import units
from linattn._generic.decay import fade
from linattn._home import Abroad, Home, home_of, is_ours
from linattn.typing import Array, ArrayT, Declined, FeatureMap, Problem, State

__all__ = ["Decoder", "State", "init_state", "merge_states", "read_state", "update_state"]


@_arrays.on_array_device
def init_state(
    feature_map: FeatureMap,
    value_dim: int,
    *,
    batch_shape: tuple[int, ...] = (),
    like: Array,
) -> State:
    """Return the state before any key: the identity of :func:`merge_states`.

    Parameters
    ----------
    feature_map : FeatureMap
        Gives the number of columns m.
    value_dim : int
        e, the last axis of the values to come.
    batch_shape : tuple of int, optional
        Leading axes of the keys and values to come. Default ().
    like : array
        Gives library, device and dtype: float64 for a float64 array, else float32. For maps without
        a dim of their own its last axis is the dim.

    Returns
    -------
    State
        ``kvz`` (*batch_shape, m, e + 1) of zeros, ``log_scale`` of -inf, ``length`` 0, and the
        ``fingerprint`` of the map.

    Raises
    ------
    TypeError, ValueError
        Not a feature map or array; a value_dim below 1; a bad batch_shape.

    Notes
    -----
    Memory m (e + 2) numbers a head.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> linattn.init_state(phi, 64, batch_shape=(8,), like=np.ones(32)).kvz.shape
    (8, 32, 65)
    """
    check_feature_map(feature_map)
    xp, (like,) = _checks.check_arrays(1, like=like)
    e = _checks.check_positive_int("value_dim", value_dim)
    lead = _check_batch_shape(batch_shape)
    m = feature_map.num_features
    if m is None:
        m = num_features_of(feature_map, "like", like.shape[-1])
    precision = _settings.current_settings().precision
    dtype = _arrays.accumulation_dtype(xp, like.dtype, precision, like)
    device = array_api_compat.device(like)
    lead = _checks.check_leading_axes(
        batch_shape=lead,
        feature_map=_generic.spec_lead(map_specs(feature_map, xp, dtype, device)[1]),
    )
    nothing = _generic.empty_state(lead, m, e, xp.empty((0,), dtype=dtype, device=device))
    return stamped(nothing, None, feature_map)


def _check_batch_shape(batch_shape: Any) -> tuple[int, ...]:
    if not isinstance(batch_shape, tuple | list):
        raise TypeError(f"batch_shape must be a tuple of lengths, got {batch_shape!r}")
    for axis in batch_shape:
        _checks.check_positive_int("batch_shape", axis, least=0)
    return tuple(batch_shape)


@_arrays.as_autocast("key", "value")
def update_state(
    state: State,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    key_lengths: Any = None,
    log_decay: Array | float | None = None,
) -> State:
    """Return a new state with keys and values added.

    Parameters
    ----------
    state : State
        State of the earlier keys; it is not changed.
    key : array, (..., S, d)
        New keys.
    value : array, (..., S, e)
        Their values.
    feature_map : FeatureMap
        The map of the state.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend. Masked keys keep their positions: `log_decay` acts there too.
    key_bias : floating array, of the shapes that a mask may have, optional
        Log weight of each key. Default 0.
    key_lengths : int or integer array, key.shape[:-2] with axes of 1, optional
        How many leading keys count. The others are masked, and `log_decay` acts there too.
    log_decay : float or floating array, key.shape[:-2] or key.shape[:-1] with axes of 1, optional
        Log of the factor that the state is multiplied by before each token, at most 0. Default 0.
        In a padded batch masked positions still decay the state;
        ``log_decay=np.where(mask, g, 0)`` leaves it unchanged there.

    Returns
    -------
    State
        State after these keys; masked positions count in ``length``.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`.

    Notes
    -----
    Time O(S m (d + e)); extra memory O(c m) with blocks of c tokens.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> key, value = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> empty = linattn.init_state(phi, 64, batch_shape=(8,), like=key)
    >>> state = linattn.update_state(empty, key, value, phi)
    >>> state.kvz.shape, state.length
    ((8, 64, 65), 100)
    """
    _checks.check_state_record("state", state)
    _, (key, value) = _checks.check_arrays(key=key, value=value)
    problem = linear_problem(
        key[..., :0, :],
        key,
        value,
        feature_map,
        key_mask=key_mask,
        key_bias=key_bias,
        key_lengths=key_lengths,
        log_decay=log_decay,
        initial_state=state,
        state_name="state",
        reads=False,
    )
    after = forward.attend(problem, return_state=True)[1]
    assert after is not None
    return stamped(after, state, feature_map, problem)


@_arrays.as_autocast("query")
def read_state(query: ArrayT, state: State, feature_map: FeatureMap) -> ArrayT:
    """Return full attention of queries to all keys of a state.

    Parameters
    ----------
    query : array, (..., L, d)
        Any number of queries.
    state : State
        State of the keys and values.
    feature_map : FeatureMap
        The map of the state.

    Returns
    -------
    array, (..., L, e)
        Full linear attention to all these keys; 0 for an empty state.

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.linear_attention`.

    Warns
    -----
    UserWarning
        As :func:`linattn.linear_attention`.

    Notes
    -----
    Time O(L m (d + e)).

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> full, state = linattn.linear_attention(query, key, value, phi, return_state=True)
    >>> bool(np.allclose(linattn.read_state(query, state, phi), full))
    True
    """
    xp, (queries,) = _checks.check_arrays(query=query)
    _checks.check_state_record("state", state)
    check_sequences("state", state, None, query=queries)
    e = state.kvz.shape[-1] - 1
    lead = tuple(state.kvz.shape[:-2])
    device = array_api_compat.device(queries)
    nothing = xp.empty((*lead, 0, e), dtype=queries.dtype, device=device)
    no_key = xp.empty((*lead, 0, queries.shape[-1]), dtype=queries.dtype, device=device)
    before = {"initial_state": state, "state_name": "state"}
    problem = linear_problem(queries, no_key, nothing, feature_map, **before)
    output: ArrayT = forward.attend(problem, return_state=False)[0]
    return output


@_arrays.on_array_device
def merge_states(first: State, second: State) -> State:
    """Merge the states of two sets of keys, one after the other, into the state of both.

    Merging is associative, and :func:`init_state` returns its identity. So states may be reduced
    anywhere, in their order: the first state decays by the ``log_decay`` of the second. Without
    decay the order does not matter.

    Parameters
    ----------
    first, second : State
        Of one feature map, the earlier keys first; neither is changed.

    Returns
    -------
    State
        Equal, to rounding, to the state after both sets of keys.

    Raises
    ------
    TypeError, ValueError
        Not states, or their shape, dtype, library, feature map or packed sequences differ.

    Notes
    -----
    Both sides are rescaled to the log scale ``c = max(c_1 + g_2, c_2)``, with the log decay g_2 of
    the second. Time O(m e).

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 100, 64))
    >>> empty = linattn.init_state(phi, 64, like=key)
    >>> first, second = (
    ...     linattn.update_state(empty, key[rows], value[rows], phi)
    ...     for rows in (slice(0, 30), slice(30, 100))
    ... )
    >>> linattn.merge_states(first, second).length
    100
    """
    _, first = _checks.check_state_record("first", first)
    m, width = first.kvz.shape[-2:]
    second = _checks.check_state(
        "second", second, m=m, e=width - 1, dtype=first.kvz.dtype, like=first.kvz
    )
    first, second = _with_sequences_in_front(first, second)
    _checks.check_leading_axes(
        first=tuple(first.kvz.shape[:-2]), second=tuple(second.kvz.shape[:-2])
    )
    known = [state.fingerprint for state in (first, second) if state.fingerprint is not None]
    came = [known_integer(state.fingerprint) for state in (first, second)]
    if None not in came and came[0] != came[1]:
        raise ValueError(
            f"first and second must be states of one feature map, got the fingerprints {came[0]} "
            f"and {came[1]}; make both with the same map, such as one drawn with the same seed"
        )
    merge = _dispatch.find("merge", _arrays.namespace(first.kvz))
    merged = None if merge is None else merge(first, second)
    with _numerics.ignore_fp_warnings():
        if merged is None or _dispatch.is_declined(merged):
            decay = second.log_decay
            earlier = first if decay is None else fade(first, decay[..., None])
            merged = _generic.merge(earlier, second)
    decays = [state.log_decay for state in (first, second) if state.log_decay is not None]
    numbers = [s.num_sequences for s in (first, second) if s.num_sequences is not None]
    return merged._replace(
        fingerprint=known[0] if known else None,
        log_decay=broadcast_decay(decays, merged),
        # Of two that differ one is 0, of a state that has seen nothing; traced ones have no value.
        num_sequences=numbers[0] | numbers[-1] if numbers else None,
    )


def _with_sequences_in_front(first: State, second: State) -> tuple[State, State]:
    """Check that two states hold equally many packed sequences, and align their first axes."""
    states = [first, second]
    numbers = [known_sequences(state) for state in states]
    if None not in numbers and numbers[0] != numbers[1]:
        raise ValueError(
            f"first and second must be states of the same packed sequences, or of none, got "
            f"num_sequences {numbers[0]} and {numbers[1]}; merge the state of one sequence, "
            f"State(state.kvz[i], state.log_scale[i], state.length), with that of no other"
        )
    ndim = max(state.kvz.ndim for state in states)
    for i, number in enumerate(numbers):
        if number and states[i].kvz.ndim < ndim:
            index = axes_behind_first(ndim - states[i].kvz.ndim)
            arrays = {name: getattr(states[i], name) for name in ("kvz", "log_scale", "log_decay")}
            given = {name: array[index] for name, array in arrays.items() if array is not None}
            states[i] = states[i]._replace(**given)
    return states[0], states[1]


class Decoder:
    """Causal linear attention one token at a time, keeping the state.

    Parameters
    ----------
    feature_map : FeatureMap
        The map of the state.
    state : State
        State to start from: :func:`init_state`, or the state after a prompt
        (``linear_attention(..., return_state=True)``). Steps add no leading axes to it.

    Attributes
    ----------
    state : State
        Copy of the state after the last step. Later steps do not change it.

    Raises
    ------
    TypeError
        Not a feature map or not a state.
    ValueError
        The state of another map.

    Notes
    -----
    Checks run in full when the shapes or dtypes of a step differ from the step before. One object
    serves one stream: it is not meant to be shared by threads.

    NumPy arrays: values below 2^-20 or above 2^40 (float64: 2^400) are divided by a power of two,
    and outputs multiplied by it.
    The first value and the state decide which, and later values after 1, 2, 4, 8, ... tokens.
    Products of subnormal numbers take a hundred times as long on some processors. They occur in
    the first 16 steps at most: until then sums may be too small to ignore tiny weights.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> token = np.ones((8, 64), dtype=np.float32)
    >>> decoder = linattn.Decoder(phi, linattn.init_state(phi, 64, batch_shape=(8,), like=token))
    >>> decoder.step(token, token, token).shape
    (8, 64)
    >>> decoder.state.length
    1
    """

    def __init__(self, feature_map: FeatureMap, state: State) -> None:
        check_feature_map(feature_map)
        _, state = _checks.check_state_record("state", state)
        check_map_of_state("state", state, feature_map)
        self._feature_map = feature_map
        self._state = state
        """State before the steps of the stepper, if there is a stepper."""
        self._stepper: Any = None
        self._stepped = 0
        self._unit: units.TokenUnit | None = None
        """Of values and numerators in the stepper; None for 1."""
        self._checked: tuple[Problem, tuple[Any, ...]] | None = None
        """A fully checked step, and its `_step_kind`: equal steps skip the checks."""
        self._at_home: tuple[Home, Decoder] | None = None
        """The home of torch's or JAX's arrays, and a decoder there, which then has the state."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stepper and the checked step, which a copy makes anew."""
        written = {"_stepper": None, "_stepped": 0, "_checked": None, "_at_home": None}
        return {**self.__dict__, **written, "_state": self.state}

    def __repr__(self) -> str:
        """Show the map, and shapes in place of the numbers of the state."""
        state = self._state._replace(length=self._state.length + self._stepped)
        if self._at_home is not None:
            state = state._replace(length=self._at_home[1].state.length)
        return f"Decoder({self._feature_map!r}, {state!r})"

    def copy(self) -> Decoder:
        """Return an independent decoder with the same state; its steps give the same bits.

        To undo a draft, continue with a copy made before the draft.

        Examples
        --------
        >>> import numpy as np
        >>> import linattn
        >>> phi, token = linattn.feature_maps.EluFeatures(), np.ones(8)
        >>> decoder = linattn.Decoder(phi, linattn.init_state(phi, 8, like=token))
        >>> before = decoder.copy()
        >>> _ = decoder.step(token, token, token)
        >>> before.state.length, decoder.state.length
        (0, 1)
        """
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        if self._at_home is not None:
            twin._at_home = (self._at_home[0], self._at_home[1].copy())
        if self._stepper is not None:
            duplicate = getattr(self._stepper, "copy", None)
            if duplicate is None:
                twin.__dict__.update(self.__getstate__())
            else:
                twin._stepper = duplicate()
        return twin

    @property
    def state(self) -> State:
        """The state after the last step."""
        if self._at_home is not None:
            home, decoder = self._at_home
            state: State = home.results(decoder.state)
            return state
        with _numerics.ignore_fp_warnings():
            stepper = self._stepper
            kvz, log_scale, length, *_ = _copied(self._state) if stepper is None else stepper.state
            if stepper is not None and self._unit is not None:
                kvz = units.numerators_times(kvz, self._unit.log)
        return self._state._replace(kvz=kvz, log_scale=log_scale, length=length)

    @_arrays.as_autocast("query", "key", "value")
    def step(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        key_bias: Array | float | None = None,
        log_decay: Array | float | None = None,
    ) -> Array:
        """Take one token, ``(..., d)``, ``(..., d)``, ``(..., e)``; return its output ``(..., e)``.

        Leading axes, ``key_bias`` and ``log_decay`` as of :func:`linattn.decode_step`.

        Raises
        ------
        TypeError, ValueError
            As :func:`linattn.decode_step`; the state is then as before.
        """
        arrays: tuple[Array, ...] = (query, key, value)
        if not isinstance(query, np.ndarray):
            output = self._step_at_home(arrays, {"key_bias": key_bias, "log_decay": log_decay})
            if output is not None:
                return output
        if key_bias is not None or log_decay is not None:
            before, phi = self.state, self._feature_map
            weights = {"key_bias": key_bias, "log_decay": log_decay}
            weighted = step_problem(query, key, value, before, phi, **weights)
            self._leave_stepper()
            return self._by_driver(weighted)
        problem, kind = self._checked or (None, None)
        if problem is None or kind != _step_kind(problem.xp, arrays) or self._may_need_units(value):
            problem, arrays = self._check(*arrays)
        if self._stepper is not None:
            if self._unit is None:
                output = self._stepper.step(*arrays)
            else:
                output = self._unit.step(self._stepper, *arrays)
            _dispatch.note("stepper", problem.xp, output)
            if not isinstance(output, Declined):
                self._stepped += 1
                return output
            # One step by other means; the next asks for a stepper again.
            self._leave_stepper()
        query, key, value = (array[..., None, :] for array in arrays)
        return self._by_driver(problem.replace(query=query, key=key, value=value))

    def _step_at_home(self, arrays: Any, weights: dict[str, Any]) -> Array | None:
        """Take a step at the home of the arrays; None if they have none, or must not go there."""
        home = home_of(arrays[0])
        try:
            if home is None or home.library is not np or not is_ours(self._feature_map):
                raise Abroad
            tokens = home.record(arrays)
            weights = {name: home.record(x) for name, x in weights.items()}
            if self._at_home is None:
                query, key, value = arrays
                step_problem(query, key, value, self._state, self._feature_map)
                decoder = Decoder(self._feature_map, home.record(self._state))
                self._at_home = home, decoder
        except Abroad:
            if self._at_home is not None:
                self._state, self._at_home = self.state, None
            return None
        self._at_home = home, self._at_home[1]
        _dispatch.note_home(home.namespace, _arrays.namespace(arrays[0]))
        output: Array = home.results(self._at_home[1].step(*tokens, **weights))
        return output

    def _may_need_units(self, value: Array) -> bool:
        """Look at a value of the stream again; rarely: after 1, 2, 4, 8, ... tokens."""
        if self._stepper is None or self._unit is not None:
            return False
        length = self._state.length + self._stepped
        return not length & (length - 1) and not units.is_moderate(value)

    def _by_driver(self, problem: Problem) -> Array:
        """Take a step without a backend's stepper."""
        output, after = forward.step(problem, self._state)
        self._state = stamped(after, self._state, self._feature_map, problem)
        return output

    def _check(self, query: Array, key: Array, value: Array) -> tuple[Problem, tuple[Array, ...]]:
        """Check a step in full and try to get a stepper; return the problem and checked arrays."""
        self._leave_stepper()
        problem = step_problem(query, key, value, self._state, self._feature_map)
        # Not what came but what it became: bytes in foreign order are byte-swapped at every step.
        arrays = tuple(row[..., 0, :] for row in (problem.query, problem.key, problem.value))
        kind = _step_kind(problem.xp, arrays)
        begin = kind[-1]
        stepper: Any = NotImplemented
        if begin is not None:
            self._unit = units.token_unit(problem)
            log = 0 if self._unit is None else self._unit.log
            kvz = units.numerators_times(self._state.kvz, -log)
            stepper = begin(units.in_units(problem, log), self._state._replace(kvz=kvz))
        self._stepper = None if _dispatch.is_declined(stepper) else stepper
        if begin is not None and self._stepper is None:
            _dispatch.note("stepper", problem.xp, stepper)
        self._checked = problem, kind
        return problem, arrays

    def _leave_stepper(self) -> None:
        """Drop the backend's stepper, store its state, and check the next step in full."""
        if self._stepper is not None:
            self._state, self._stepper, self._stepped = self.state, None, 0
        self._checked = None


def _step_kind(xp: ModuleType, arrays: Iterable[Array]) -> tuple[Any, ...]:
    """Return the kinds of the arrays, the settings, and the backend's ``stepper`` or None."""
    begin = _dispatch.find("stepper", xp)
    return _arrays.kinds(arrays), _settings.current_settings(), begin


@_arrays.on_array_device
def _copied(state: State) -> State:
    # Sums are arrays of their own, and stay on a framework's tape.
    return State(state.kvz + 0, state.log_scale + 0, state.length)
