"""From a caller's arguments to a :class:`~linattn.typing.Problem`: all checks, no work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from linattn import _arrays, _checks, _generic, _settings
from linattn._driver.options import (
    Options,
    check_one_sequence,
    check_stop_axes,
    pairs_tokens,
    visibility,
    with_local_window,
)
from linattn._driver.stamps import check_map_of_state, check_sequences
from linattn._driver.weights import (
    check_reach,
    check_relative_bias,
    check_sinks,
    exact_keys,
    weights_of,
)
from linattn._fingerprints import known_integer
from linattn._generic.specs import peel_affine
from linattn.typing import (
    Array,
    ColumnNormalized,
    Corrected,
    Exact,
    ExactKeys,
    FeatureMap,
    Features,
    MapSpec,
    Opaque,
    Policy,
    Problem,
    SeparateDenominator,
    State,
    Tokens,
    Visible,
)


def check_feature_map(feature_map: Any) -> None:
    """Check that an object is a feature map (and not, say, the class of one)."""
    # Not isinstance: a protocol that is checked at run time takes 15 us.
    names = ("num_features", "query_features", "key_features")
    if isinstance(feature_map, type) or not all(hasattr(feature_map, name) for name in names):
        name = feature_map.__name__ if isinstance(feature_map, type) else type(feature_map).__name__
        came = f"the class {name}; make one, {name}(...)" if isinstance(feature_map, type) else name
        raise TypeError(
            f"feature_map must have num_features, query_features and key_features, such as "
            f"linattn.feature_maps.PositiveFeatures(dim), got {came}"
        )


def num_features_of(feature_map: FeatureMap, name: str, dim: int) -> int:
    """Count features for inputs of this dim, which must be the map's own if it has one."""
    wanted = getattr(feature_map, "dim", None)
    if wanted is not None and wanted != dim:
        raise ValueError(
            f"{name} must have {wanted} coordinates, the dim of feature_map, got a last axis of "
            f"{dim}"
        )
    m = feature_map.num_features
    return dim if m is None else _checks.check_positive_int("feature_map.num_features", m)


def map_specs(feature_map: Any, xp: ModuleType, dtype: Any, device: Any) -> tuple[MapSpec, MapSpec]:
    """Specs of the query and the key side, with parameters on the device."""
    if getattr(feature_map, "_caches_specs", False):
        specs: tuple[MapSpec, MapSpec] = feature_map.specs(xp, dtype, device)
        return specs
    if hasattr(feature_map, "query_spec") and hasattr(feature_map, "key_spec"):
        return feature_map.query_spec(xp, dtype, device), feature_map.key_spec(xp, dtype, device)
    sides = ("query_features", "key_features")
    query, key = (Opaque(_checked(feature_map, name)) for name in sides)
    return query, key


def _checked(feature_map: FeatureMap, name: str) -> Callable[[Tokens], Features]:
    """Return a method of a map that is not linattn's, with its result checked."""
    method = getattr(feature_map, name)

    def features(tokens: Tokens) -> Features:
        return _checks.check_features(f"{name}(x)", method(tokens.x), tokens.x, feature_map)

    return features


def linear_problem(query: Any, key: Any, value: Any, feature_map: Any, **options: Any) -> Problem:
    """Check the arguments of linear attention and describe the computation.

    ``options``: the fields of :class:`~linattn._driver.options.Options`. If all are flags, the
    description is cached for the next call of the same map with arrays of the same kinds.
    """
    arrays = [query, key, value]
    flags = tuple(options.items()) if all(map(_is_flag, options.values())) else None
    if flags is not None:
        known = _recall(_last_problem, feature_map, arrays, flags)
        if known is not None:
            return known.replace(query=query, key=key, value=value, plans=known.plans)
    given = Options(**options)
    want_log = _checks.check_flag("return_log_normalizer", given.want_log)
    check_feature_map(feature_map)
    xp, arrays = _checks.check_arrays(query=query, key=key, value=value)
    problem = _describe(xp, arrays, feature_map, given._replace(want_log=want_log))
    if flags is not None:
        _remember(_last_problem, problem, arrays, flags)
    return problem


def _is_flag(option: Any) -> bool:
    return option is None or option is False or option is True


def _describe(
    xp: ModuleType, arrays: Sequence[Array], feature_map: FeatureMap, options: Options
) -> Problem:
    """Describe linear attention of a map and arrays that have been checked one by one."""
    query, key, value = arrays
    remedy = (
        "to continue a stream pass its state as initial_state with the new query, key and "
        'value; to attend to earlier keys only use read_state; is_causal="lower_right" takes the '
        "queries for the last positions of the keys"
    )
    sees = visibility(query, key, options)
    _checks.check_pairing(query, key, value, is_causal=pairs_tokens(sees), remedy=remedy)
    m = num_features_of(feature_map, "query and key", query.shape[-1])
    _check_sees_no_later_keys(feature_map, sees.option)
    settings = _settings.current_settings()
    dtype = _arrays.accumulation_dtype(xp, query.dtype, settings.precision, query)
    specs = map_specs(feature_map, xp, dtype, array_api_compat.device(query))
    exact = exact_keys(arrays, feature_map, specs, options, sees)
    if options.log_decay is not None:
        _check_decays(peel_affine(specs[0])[0], feature_map, sees)
    weights, state = weights_of(xp, arrays, dtype, options, sees), options.initial_state
    normalize = _checks.check_flag("normalize", options.normalize)
    if state is not None:
        e, name = value.shape[-1], options.state_name
        state = _checks.check_state(name, state, m=m, e=e, dtype=dtype, like=query)
        check_map_of_state(name, state, feature_map)
        if options.one_token:
            _check_one_token(tuple(state.kvz.shape[:-2]), key, value)
        count = None if sees.cu_seqlens is None else len(sees.cu_seqlens) - 1
        check_sequences(name, state, count, key=key, value=value)
    more = _axes_beside(specs, state, options.state_name, sees)
    state_lead, lead = _leading_axes(arrays, **more)
    bias = check_relative_bias(options, query, lead, dtype)
    check_reach(bias, options.exact_window)
    check_stop_axes(sees.key_stop, state_lead)
    size = options.chunk_size
    chunk_size = None if size is None else _checks.check_positive_int("chunk_size", size)
    (query_spec, query_change), (key_spec, key_change) = map(peel_affine, specs)
    return Problem(
        xp=xp,
        dtype=dtype,
        query=query,
        key=key,
        value=value,
        query_spec=query_spec,
        key_spec=key_spec,
        num_features=m,
        state_lead=state_lead,
        lead=lead,
        query_change=query_change,
        key_change=key_change,
        state=state,
        sees=sees,
        weights=weights._replace(relative_bias=bias),
        exact=exact,
        policy=_policy(settings, query, chunk_size),
        # Numerators on the true scale need it.
        want_log=options.want_log or not normalize,
        normalize=normalize,
        # A map that says nothing of it is not positive.
        signed=not getattr(feature_map, "positive", False),
        feature_map=feature_map,
    )


def _policy(settings: _settings.Settings, query: Array, chunk_size: int | None = None) -> Policy:
    """How the work may be done, as the caller has set it."""
    tf32 = settings.precision == "tf32"
    return Policy(chunk_size, settings.num_threads, tf32, _arrays.is_lazy(query))


def _check_sees_no_later_keys(feature_map: FeatureMap, option: str) -> None:
    if option and not getattr(feature_map, "causal", True):
        raise ValueError(
            f"{option} needs a feature map that has not seen the whole sequence, got "
            f"{feature_map!r}, fitted to it: its features would leak later keys"
        )


def _check_decays(spec: MapSpec, feature_map: FeatureMap, sees: Visible) -> None:
    if sees.option not in ("", "is_causal"):
        raise ValueError(
            f"log_decay must be None with {sees.option}: queries have no time of their own there; "
            f"use is_causal=True"
        )
    if isinstance(spec, ColumnNormalized | Corrected | SeparateDenominator):
        raise ValueError(
            f"log_decay needs a feature map that reads the state unchanged, got {feature_map!r}, "
            f"which divides or corrects it first; use another map"
        )


def _leading_axes(
    arrays: Sequence[Array], **more: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading axes of the state and of the output, broadcast from all arguments."""
    query, key, value = (tuple(array.shape[:-2]) for array in arrays)
    shapes = {"key": key, "value": value, **more}
    state_lead = _checks.check_leading_axes(**shapes)
    return state_lead, _checks.check_leading_axes(query=query, **shapes)


def _axes_beside(
    specs: tuple[MapSpec, MapSpec], state: State | None, state_name: str, sees: Visible
) -> dict[str, tuple[int, ...]]:
    """Leading axes of the feature map and of the state."""
    shapes = {}
    query_lead, key_lead = map(_generic.spec_lead, specs)
    if key_lead or query_lead:
        shapes["feature_map"] = _checks.check_leading_axes(key=key_lead, query=query_lead)
    if state is not None:
        # The first axis of a packed state is the axis of sequences, which no other array has.
        packed = sees.cu_seqlens is not None
        shapes[state_name] = tuple(state.kvz.shape[1 if packed else 0 : -2])
    return shapes


class _Known(NamedTuple):
    """The settings and kinds of arguments of a call, and its description without arrays."""

    settings: _settings.Settings
    kinds: list[Any]
    rest: Any
    problem: Problem


_last_step: ContextVar[_Known | None] = ContextVar("last step", default=None)
_last_problem: ContextVar[_Known | None] = ContextVar("last problem", default=None)


def _recall(
    last: ContextVar[_Known | None], feature_map: Any, given: Sequence[Any], rest: Any
) -> Problem | None:
    """Return the description of the last call, if this one is like it."""
    known = last.get()
    if (
        known is not None
        and known.problem.feature_map is feature_map
        and known.kinds == _arrays.kinds(given)
        and known.settings == _settings.current_settings()
        and known.rest == rest
    ):
        return known.problem
    return None


def _remember(
    last: ContextVar[_Known | None], problem: Problem, given: Sequence[Any], rest: Any
) -> None:
    # linattn's own maps keep their specs, and never change; what other libraries' arrays make may
    # belong to a trace.
    if getattr(problem.feature_map, "_caches_specs", False) and _arrays.are_ordinary(given):
        bare = problem.replace(query=None, key=None, value=None, state=None, plans=[])
        last.set(_Known(_settings.current_settings(), _arrays.kinds(given), rest, bare))


def step_problem(
    query: Any, key: Any, value: Any, state: Any, feature_map: Any, **weights: Any
) -> Problem:
    """Check the arguments of one decoding step, ``(..., dim)`` each, and describe it.

    ``weights``: ``key_bias`` and ``log_decay`` of the token, a number or ``(...)`` each.

    Keys and values add no leading axis to the state: that would take several tokens for several
    streams.

    The description is cached for the next step of the same map with arrays of the same kinds: to
    make it takes a sixth of a step.
    """
    given = [query, key, value]
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    if isinstance(state, State) and not weights:
        given += [state.kvz, state.log_scale]
        stamps = [known_integer(n) for n in (state.fingerprint, state.num_sequences)]
        known = _recall(_last_step, feature_map, given, stamps)
        if known is not None:
            query, key, value = (array[..., None, :] for array in given[:3])
            return known.replace(query=query, key=key, value=value, state=state)
    xp, arrays = _checks.check_arrays(1, query=query, key=key, value=value)
    query, key, value = (array[..., None, :] for array in arrays)
    if state is None:
        # Elsewhere None means that nothing came before.
        _checks.check_state_record("state", state)
    check_feature_map(feature_map)
    weights = {name: _checks.of_one_token(name, weight, key) for name, weight in weights.items()}
    options = Options(
        is_causal=True, initial_state=state, state_name="state", one_token=True, **weights
    )
    problem = _describe(xp, (query, key, value), feature_map, options)
    if not weights:
        _remember(_last_step, problem, given, stamps)
    return problem


def _check_one_token(lead: tuple[int, ...], key: Array, value: Array) -> None:
    """Check that a token adds no leading axis to a state."""
    shapes = tuple(key.shape[:-2]), tuple(value.shape[:-2])
    with suppress(ValueError):
        if shapes == (lead, lead) or np.broadcast_shapes(lead, *shapes) == lead:
            return
    raise ValueError(
        f"key and value must be one token, no length axis, with leading axes that broadcast to "
        f"those of the state, got key {shapes[0]}, value {shapes[1]} and state {lead}; for several "
        f"tokens use linear_attention with is_causal=True and initial_state, for several streams a "
        f"state with an axis for them"
    )


# Softmax attention --------------------------------------------------------------------------------


LAST_POSITIONS = 'pass equal lengths, or is_causal="lower_right" for the last positions of the keys'


def exact_problem(
    query: Any,
    key: Any,
    value: Any,
    *,
    remedy: str = LAST_POSITIONS,
    **options: Any,
) -> Problem:
    """Check the arguments of softmax attention and describe the computation.

    ``remedy``: what to do about causal attention of unequal lengths. ``options``: the fields of
    :class:`~linattn._driver.options.Options`.
    """
    given = Options(**options)
    xp, arrays = _checks.check_arrays(query=query, key=key, value=value)
    query, key, value = arrays
    sees = visibility(query, key, given)
    _checks.check_pairing(query, key, value, is_causal=pairs_tokens(sees), remedy=remedy)
    scale = query.shape[-1] ** -0.5 if given.scale is None else given.scale
    spec = Exact(_checks.check_finite_number("scale", scale))
    settings = _settings.current_settings()
    dtype = _arrays.accumulation_dtype(xp, query.dtype, settings.precision, query)
    weights = weights_of(xp, arrays, dtype, given, sees)
    state_lead, lead = _leading_axes(arrays)
    check_stop_axes(sees.key_stop, state_lead)
    sinks = check_sinks(given.sinks, local_window_size=given.local_window_size)
    sees = with_local_window(given.local_window_size, query, key, sees, sinks)
    bias = check_relative_bias(given, query, lead, dtype)
    if bias is not None:
        check_one_sequence("window_bias", sees, query, key)
    return Problem(
        xp=xp,
        dtype=dtype,
        query=query,
        key=key,
        value=value,
        query_spec=spec,
        key_spec=spec,
        num_features=0,
        state_lead=state_lead,
        lead=lead,
        sees=sees,
        weights=weights._replace(relative_bias=bias),
        exact=ExactKeys(sinks=0 if sees.left is None else sinks),
        policy=_policy(settings, query),
        want_log=_checks.check_flag("return_log_normalizer", given.want_log),
    )
