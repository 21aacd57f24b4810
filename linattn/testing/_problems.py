"""Whole problems for a backend: its plans, and its results without the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import linattn
from linattn import _dispatch
from linattn._driver.blocks import task_index
from linattn._driver.problem import exact_problem, linear_problem, step_problem
from linattn._recurrence.problem import recurrence_problem
from linattn.feature_maps import EluFeatures, HyperbolicFeatures, PositiveFeatures
from linattn.testing._compared import compare_gradient, compare_state, need, to_host
from linattn.typing import Array, Cotangent, Declined, Plan, Problem, State

RTOL = {"float16": 6e-3, "float32": 1e-3, "float64": 1e-9}
"""Tolerance, relative to a head's largest entry."""

GRADIENT_RTOL = RTOL | {"float16": 3e-2}
"""Tolerance of gradients: rounding errors of successive 16-bit products add up."""

DIM, VALUE_DIM = 8, 8


class Whole(NamedTuple):
    """Arguments of attention, in host arrays."""

    name: str
    feature_map: Any
    arrays: Any
    """Query, key and value."""
    is_causal: bool
    key_mask: NDArray[Any] | None
    state: State | None
    want_log: bool


def wholes(rng: np.random.Generator, count: int) -> Iterator[Whole]:
    """Draw problems: the choices alternate, with periods that have no common factor."""
    maps = (
        PositiveFeatures(DIM, 32, rng=rng),
        EluFeatures(),
        None,
        HyperbolicFeatures(DIM, 16, rng=rng),
    )
    leads = ((2, 4), (2, 4)), ((2, 4), (2, 1)), ((), ()), ((0, 2), (0, 2))
    turns = zip(cycle(maps), cycle(leads), cycle((40, 1, 300)), cycle(range(7)), strict=False)
    for feature_map, (lead, key_lead), length, turn in islice(turns, count):
        shapes = (*lead, length, DIM), (*key_lead, length, DIM), (*key_lead, length, VALUE_DIM)
        # What float16 holds, so that all dtypes are given the same numbers.
        arrays = tuple(
            (0.7 * rng.standard_normal(shape)).astype(np.float16).astype(float) for shape in shapes
        )
        mask = rng.random((*key_lead, length)) > 0.3 if turn in (1, 4) else None
        if mask is not None:
            mask[..., : length // 2] &= turn == 1  # padding on the left
        state = None
        if feature_map is not None and turn in (2, 4, 6):
            state = _state(rng, feature_map, key_lead)
        causal = turn % 2 == 0
        name = (
            f"{type(feature_map).__name__ if feature_map else 'softmax'}, {length} tokens, heads "
            f"{lead} of query and {key_lead} of key, {'causal' if causal else 'full'}"
            f"{', masked' if mask is not None else ''}{', with a state' if state else ''}"
        )
        want_log = feature_map is not None and turn in (3, 4)
        yield Whole(name, feature_map, arrays, causal, mask, state, want_log)


def _state(rng: np.random.Generator, feature_map: Any, lead: tuple[int, ...]) -> State:
    key, value = rng.standard_normal((*lead, 20, DIM)), rng.standard_normal((*lead, 20, VALUE_DIM))
    with linattn.without_backends():
        empty = linattn.init_state(feature_map, VALUE_DIM, batch_shape=lead, like=key)
        return linattn.update_state(empty, key, value, feature_map)


class Subject(NamedTuple):
    """A problem in the dtype and library under test."""

    whole: Whole
    dtype: str
    xp: ModuleType

    def array(self, host: Any, dtype: str | None = None) -> Array:
        return None if host is None else self.xp.asarray(host.astype(dtype or self.dtype))

    @property
    def arrays(self) -> Any:
        return tuple(self.array(host) for host in self.whole.arrays)

    @property
    def state(self) -> State | None:
        """The state before the problem, in the dtype that it is accumulated in."""
        state, kind = self.whole.state, "float64" if self.dtype == "float64" else "float32"
        if state is None:
            return None
        return state._replace(
            kvz=self.array(state.kvz, kind), log_scale=self.array(state.log_scale, kind)
        )

    def problem(self) -> Problem:
        whole, (query, key, value) = self.whole, self.arrays
        mask = self.array(whole.key_mask, "bool")
        if whole.feature_map is None:
            return exact_problem(
                query, key, value, scale=None, is_causal=whole.is_causal, key_mask=mask
            )
        return linear_problem(
            query,
            key,
            value,
            whole.feature_map,
            is_causal=whole.is_causal,
            key_mask=mask,
            initial_state=self.state,
            want_log=whole.want_log,
        )

    def step(self, index: int, state: State) -> Problem:
        query, key, value = self.token(index)
        return step_problem(query, key, value, state, self.whole.feature_map)

    def token(self, index: int) -> Any:
        return tuple(array[..., index, :] for array in self.arrays)


def _array(what: str, got: Array, want: NDArray[Any], dtype: str, rtol: float) -> None:
    name = str(got.dtype).rpartition(".")[2]
    need(name == dtype, f"{what} is in {name}, want {dtype}")
    need(tuple(got.shape) == want.shape, f"{what} has shape {tuple(got.shape)}, want {want.shape}")
    compare_gradient(what, to_host(got), want, rtol, tuple(want.shape[:-2]))


def _row(index: int, subject: Subject, got: Array, want: NDArray[Any]) -> None:
    rtol = RTOL[subject.dtype]
    _array(f"output {index}", got[..., None], want[..., None], subject.dtype, rtol)


def _same_state(subject: Subject, got: Any, want: State) -> None:
    need(isinstance(got, State), f"state is a {type(got).__name__}, want a State")
    host = State(to_host(got.kvz), to_host(got.log_scale), got.length)
    compare_state("state", host, want, RTOL[subject.dtype])


# Checks, which return an answer that is declined -------------------------------------------------


def check_plan(plan: Callable[..., Any], subject: Subject) -> Any:
    """Check that every head is in one task, and that all tasks are run."""
    problem = subject.problem()
    answer = plan(problem)
    if _dispatch.is_declined(answer):
        return answer
    need(isinstance(answer, Plan), f"is a {type(answer).__name__}, want a Plan")
    need(answer.block_size >= 1, f"block_size is {answer.block_size}, want at least 1")
    need(answer.segments >= 1, f"segments is {answer.segments}, want at least 1")
    for each in (answer, answer.for_gradients()):
        for lead in (problem.state_lead, problem.lead):
            times = np.zeros(lead, int)
            for task in each.tasks:
                times[task_index(lead, 0, task)] += 1
            need(np.all(times == 1), f"tasks do not hold every head once: {list(each.tasks)}")
    done: list[Any] = []

    def work(task: Any) -> Any:
        done.append(task)
        return iter(()) if answer.resumable else None

    answer.run(work, answer.tasks)
    need(len(done) == len(answer.tasks), f"run does {len(done)} of {len(answer.tasks)} tasks")
    return None


def check_attention(attention: Callable[..., Any], subject: Subject) -> Any:
    """Compare output, state after it and log normalizer."""
    whole = subject.whole
    answer = attention(subject.problem())
    if _dispatch.is_declined(answer):
        return answer
    query, key, value = whole.arrays
    options: dict[str, Any] = {"is_causal": whole.is_causal, "key_mask": whole.key_mask}
    output, state, norm = answer
    with linattn.without_backends():
        if whole.feature_map is None:
            want: Any = linattn.softmax_attention(query, key, value, **options)
            _array("output", output, want, subject.dtype, RTOL[subject.dtype])
            return None
        want, after, log = linattn.linear_attention(
            query,
            key,
            value,
            whole.feature_map,
            initial_state=whole.state,
            return_state=True,
            return_log_normalizer=True,
            **options,
        )
    _array("output", output, want, subject.dtype, RTOL[subject.dtype])
    need(state is not None, "state is None: it may be asked for")
    _same_state(subject, state, after)
    if whole.want_log:
        compare_gradient(
            "log normalizer",
            to_host(norm)[..., None],
            log[..., None],
            RTOL[subject.dtype],
            log.shape[:-1],
        )
    return None


def check_attention_vjp(attention_vjp: Callable[..., Any], subject: Subject) -> Any:
    """Compare gradients by query, key, value and state."""
    whole = subject.whole
    query, key, value = whole.arrays
    options: dict[str, Any] = {"is_causal": whole.is_causal, "key_mask": whole.key_mask}
    with linattn.without_backends():
        if whole.feature_map is None:
            output, pullback = linattn.softmax_attention_vjp(query, key, value, **options)
        else:
            output, pullback = linattn.linear_attention_vjp(
                query, key, value, whole.feature_map, initial_state=whole.state, **options
            )
        # Numbers that float16 holds.
        grad = np.round(4 * np.cos(np.arange(output.size).reshape(output.shape))) / 4
        wanted = pullback(grad)
    answer = attention_vjp(subject.problem(), Cotangent(subject.array(grad), None))
    if _dispatch.is_declined(answer):
        return answer
    names = ("gradient of query", "gradient of key", "gradient of value", "gradient of the state")
    for what, got, want in zip(names, answer, wanted, strict=False):
        dtype = str(subject.state.kvz.dtype) if what == names[3] else subject.dtype  # type: ignore[union-attr]
        _array(what, got, want, dtype, GRADIENT_RTOL[subject.dtype])
    return None


def check_attention_pullback(attention_pullback: Callable[..., Any], subject: Subject) -> Any:
    """Compare results and gradients; results are written over before the gradients are asked."""
    if subject.whole.feature_map is None:
        return Declined("")
    answer = attention_pullback(subject.problem())
    if _dispatch.is_declined(answer):
        return answer
    output, *_, pullback = answer
    check_attention(lambda problem: answer[:3], subject)
    with suppress(TypeError):  # of a library whose arrays cannot be written
        output[...] = np.nan
    return check_attention_vjp(lambda problem, cotangent: pullback(cotangent), subject)


def _steps(subject: Subject) -> Iterator[tuple[int, NDArray[Any], State]]:
    """Yield outputs and states of some steps, one after the other."""
    state: Any = subject.whole.state
    for index in range(min(5, subject.whole.arrays[1].shape[-2])):
        query, key, value = (array[..., index, :] for array in subject.whole.arrays)
        with linattn.without_backends():
            output, state = linattn.decode_step(query, key, value, state, subject.whole.feature_map)
        yield index, output, state


def check_decode(decode: Callable[..., Any], subject: Subject) -> Any:
    """Compare outputs and states of tokens, each from the state that the last step returned."""
    state = subject.state
    if state is None:
        return Declined("")
    for index, output, after in _steps(subject):
        answer = decode(subject.step(index, state))
        if _dispatch.is_declined(answer):
            return answer
        got, state = answer
        _row(index, subject, got, output)
        _same_state(subject, state, after)
    return None


def check_merge(merge: Callable[..., Any], subject: Subject) -> Any:
    """Compare a state merged with itself, which is merged with decay where the state has some."""
    state = subject.state
    if state is None:
        return Declined("")
    answer = merge(state, state)
    if _dispatch.is_declined(answer):
        return answer
    with linattn.without_backends():
        _same_state(subject, answer, linattn.merge_states(state, state))
    return None


def check_stepper(stepper: Callable[..., Any], subject: Subject) -> Any:
    """Compare outputs of a stepper, and its state after them."""
    state, made = subject.state, None
    if state is None:
        return Declined("")
    for index, output, after in _steps(subject):
        token = subject.token(index)
        if made is None:
            made = stepper(subject.step(0, state), state)
            if _dispatch.is_declined(made):
                return made
        got = made.step(*token)
        if _dispatch.is_declined(got):
            return got
        _row(index, subject, got, output)
        _same_state(subject, made.state, after)
    return None


def check_recurrence(recurrence: Callable[..., Any], subject: Subject) -> Any:
    """Compare outputs and states of every rule, after a state that is not 0."""
    query, key, value = subject.whole.arrays
    key = key / 2
    decay, beta = -np.abs(key), np.minimum(np.abs(key[..., 0]), 2)
    decay[..., 9::20, :], decay[..., 10::20, :] = 0, -30
    state = np.ones((*key.shape[:-2], DIM, VALUE_DIM))
    for rule, gates in (
        ("linear", {}),
        ("gated", {"log_decay": decay[..., 0]}),
        ("delta", {"beta": beta}),
        ("gated_delta", {"log_decay": decay[..., 0], "beta": beta}),
        ("gated_delta", {"log_decay": decay, "beta": beta}),
    ):
        options = {"log_decay": None, "beta": None} | gates
        kind = "float64" if subject.dtype == "float64" else "float32"
        arrays = {name: subject.array(array) for name, array in options.items()}
        problem = recurrence_problem(
            map(subject.array, (query, key, value)),
            update_rule=rule,
            scale=None,
            initial_state=subject.array(state, kind),
            **arrays,
        )
        answer = recurrence(problem)
        if _dispatch.is_declined(answer):
            return answer
        with linattn.without_backends():
            wanted = linattn.linear_recurrence(
                query,
                key,
                value,
                update_rule=rule,
                initial_state=state,
                return_state=True,
                **options,
            )
        _array("output", answer[0], wanted[0], subject.dtype, RTOL[subject.dtype])
        _array("state", answer[1], wanted[1], kind, RTOL[subject.dtype])
    return None


WHOLE_CHECKS: dict[str, Callable[..., Any]] = {
    "plan": check_plan,
    "attention": check_attention,
    "attention_pullback": check_attention_pullback,
    "attention_vjp": check_attention_vjp,
    "decode": check_decode,
    "merge": check_merge,
    "stepper": check_stepper,
    "recurrence": check_recurrence,
}
"""By function of a backend."""
