"""The kit catches what it is for: wrong maps, samplers and attention, beside their valid twins.

Each wrong one is a line away from its twin, and the assertion that catches it is named. Valid
twins pass; of those that chance decides, at most `TOTAL_FALSE_ALARM_RATE` of all runs fail.

    LINATTN_TEST_SEED=1 pytest tests/test_kit_mutations.py        # fresh draws
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import testing
from linattn.feature_maps import PositiveFeatures
from linattn.sampling import gaussian
from linattn.typing import Features
from tests import kit_inputs
from tests.kit_inputs import full, logs, masked, one_step, outer, read, square, whole

SEED = int(os.environ.get("LINATTN_TEST_SEED", "0"))
RATE = 1e-9
TOTAL_FALSE_ALARM_RATE = 1e-7
D, M = 4, 16


@dataclass(frozen=True)
class Mutation:
    """What is wrong, the assertion that sees it, and the twin that differs in it alone."""

    name: str
    check: str
    assertion: Callable[[Any], testing.Evidence]
    valid: Any
    wrong: Any


MUTATIONS: list[Mutation] = []


def mutation(name: str, assertion: Any, valid: Any, wrong: Any, **options: Any) -> None:
    """Add a pair; `assertion` may be a function of the twin instead of one of the kit's."""
    check = options.pop("check", None) or assertion.__name__
    MUTATIONS.append(Mutation(name, check, partial(assertion, **options), valid, wrong))


# Samplers: rows of projections.


def haar_block(dim, rng):
    q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * np.linalg.norm(rng.standard_normal((dim, dim)), axis=-1, keepdims=True)


def own_norms_block(dim, rng):
    rows = rng.standard_normal((dim, dim))
    q, r = np.linalg.qr(rows)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * np.linalg.norm(rows, axis=-1, keepdims=True)


mutation(
    "norms of the same block's rows",
    partial(testing.assert_gaussian_rows, num=D, dim=D, rng=SEED),
    lambda num, dim, rng: haar_block(dim, rng),
    lambda num, dim, rng: own_norms_block(dim, rng),
    check="assert_gaussian_rows",
)


# Feature maps: functions of vectors and rows.


class Sketch:
    """A map of exp(x.y) from log features of vectors and rows."""

    dim = D
    num_features = M

    def __init__(self, rng, features):
        self.omega, self.features = gaussian(M, D, rng), features

    def query_features(self, x):
        return Features(self.features(x, self.omega), None)

    key_features = query_features


def dot(x, y):
    return x @ np.swapaxes(y, -1, -2)


def kernel(x, y):
    return np.exp(dot(x, y))


def sum_square(x, y):
    return square(x) + np.swapaxes(square(y), -1, -2) + 2 * dot(x, y)


def favor_variance(x, y):
    return kernel(x, y) ** 2 * np.expm1(np.maximum(sum_square(x, y), 0)) / M


def difference_variance(x, y):
    return kernel(x, y) ** 2 * np.expm1(np.maximum(sum_square(x, -y), 0)) / M


def favor(x, omega):
    return x @ omega.T - square(x) / 2 - log(M) / 2


def with_epsilon(x, omega):
    return np.log(np.exp(x @ omega.T - square(x) / 2) + 1e-3) - log(M) / 2


def unbiased(features):
    return testing.assert_unbiased(
        lambda rng: Sketch(rng, features), kernel=kernel, variance=favor_variance, rng=SEED
    )


mutation("epsilon in the features", unbiased, favor, with_epsilon, check="assert_unbiased")


LARGER = np.array([[0.5, 0.3, -0.4, 0.2], [0.0, 0.7, 0.2, 0.0]])


def variance_is(claim):
    return testing.assert_variance(
        lambda rng: Sketch(rng, favor), mean=kernel, variance=claim, rng=SEED
    )


mutation(
    "variance claimed with |x - y| for |x + y|",
    variance_is,
    favor_variance,
    difference_variance,
    check="assert_variance",
)


def fixed_norm_mean(claim):
    feature_map = PositiveFeatures(D, 2 * D, sampler="fixed_norm", rng=0)
    mean = getattr(feature_map, claim)
    return testing.assert_mean(feature_map, LARGER, LARGER, mean=mean, num_draws=6000, rng=SEED)


mutation("bias of fixed norms denied", fixed_norm_mean, "mean", "kernel", check="assert_mean")


# Attention: (query, key, value, **options).


def running(query, key, value, is_causal=True):
    psi = np.exp(key)
    kv, z = np.cumsum(outer(psi, value), axis=-3), np.cumsum(psi, axis=-2)
    return read(np.exp(query), kv, z)


def step_in_float16(query, key, value, state):
    kv, z = (0.0, 0.0) if state is None else state
    psi = np.exp(key)
    state = ((kv + outer(psi, value)).astype(np.float16), (z + psi).astype(np.float16))
    return read(np.exp(query), *state), state


mutation(
    "state stored in float16",
    lambda step: testing.assert_streaming(attention=running, step=step, rng=SEED),
    one_step,
    step_in_float16,
    check="assert_streaming",
)


def causal(query, key, value, is_causal=True):
    psi = np.exp(key) + 1e-6
    kv, z = np.cumsum(outer(psi, value), axis=-3), np.cumsum(psi, axis=-2)
    return read(np.exp(query), kv, z)


def causal_shifted_by_maximum(query, key, value, is_causal=True):
    psi = np.exp(key - np.max(key, axis=(-2, -1), keepdims=True)) + 1e-6
    kv, z = np.cumsum(outer(psi, value), axis=-3), np.cumsum(psi, axis=-2)
    return read(np.exp(query), kv, z)


mutation(
    "a maximum over later keys as shift",
    lambda attention: testing.assert_causal(attention=attention, rng=SEED),
    causal,
    causal_shifted_by_maximum,
    check="assert_causal",
)


def masked_by_product(query, key, value, key_mask=True):
    keep = np.asarray(key_mask)[..., None]
    psi, value = np.exp(key) * keep, value * keep
    return whole(np.exp(query), psi, value)


mutation(
    "mask multiplied with NaN",
    lambda attention: testing.assert_mask_is_slice(
        attention=attention, garbage=(np.nan,), rng=SEED
    ),
    masked,
    masked_by_product,
    check="assert_mask_is_slice",
)


def full_with_epsilon(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / (np.sum(weights, axis=-1, keepdims=True) + 1e-6)


def full_with_gain_by_query(query, key, value):
    return full(query, key, value) * (1 + 1e-3 * np.arange(query.shape[-2]))[:, None]


def full_less_maximum(query, key, value, axis=(-2, -1)):
    weights = np.exp(query) @ np.swapaxes(np.exp(key - np.max(key, axis, keepdims=True)), -1, -2)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def full_less_maximum_of_batch(query, key, value):
    """Right for moderate numbers; a NaN is in every element, a large one lets others underflow."""
    return full_less_maximum(query, key, value, axis=None)


mutation(
    "a maximum over the batch as shift",
    lambda attention: testing.assert_batch_independent(attention=attention, rng=SEED),
    full_less_maximum,
    full_less_maximum_of_batch,
    check="assert_batch_independent",
)
mutation(
    "outputs by the position of the query",
    lambda attention: testing.assert_permutation_invariant(attention=attention, rng=SEED),
    full,
    full_with_gain_by_query,
    check="assert_permutation_invariant",
)
mutation(
    "epsilon in the denominator",
    lambda attention: testing.assert_normalized(
        attention=attention, magnitudes=(0.5, 2.5), rng=SEED
    ),
    full,
    full_with_epsilon,
    check="assert_normalized",
)


def reduced(key, value):
    log_scale = np.max(key, axis=-2)
    psi = np.exp(key - log_scale[..., None, :])
    values_and_one = np.concatenate([value, np.ones_like(value[..., :1])], axis=-1)
    return np.swapaxes(psi, -1, -2) @ values_and_one, log_scale


def merged(first, second):
    log_scale = np.maximum(first[1], second[1])
    kvz = sum(part[0] * np.exp(part[1] - log_scale)[..., None] for part in (first, second))
    return kvz, log_scale


def merged_without_rescaling(first, second):
    log_scale = np.maximum(first[1], second[1])
    kvz = sum(part[0] for part in (first, second))
    return kvz, log_scale


def read_state(query, state):
    out = np.exp(query) @ (state[0] * np.exp(state[1])[..., None])
    return out[..., :-1] / out[..., -1:]


mutation(
    "merge without rescaling",
    lambda merge: testing.assert_merge_associative(
        reduce=reduced, merge=merge, read=read_state, rng=SEED
    ),
    merged,
    merged_without_rescaling,
    check="assert_merge_associative",
)


# Gradients.


def average(logits):
    weights = np.exp(logits)
    return np.sum(weights * LARGER, axis=-1) / np.sum(weights, axis=-1)


def average_vjp(logits):
    out, share = average(logits), np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    return out, lambda g: (share * (LARGER - out[:, None]) * g[:, None],)


def average_vjp_without_denominator(logits):
    out, share = average(logits), np.exp(logits) / np.sum(np.exp(logits), axis=-1, keepdims=True)
    return out, lambda g: (share * LARGER * g[:, None],)


mutation(
    "gradient without the denominator's term",
    lambda vjp: testing.assert_gradient(average, vjp, np.sin(LARGER), rng=SEED),
    average_vjp,
    average_vjp_without_denominator,
    check="assert_gradient",
)


# Arrays and objects.


def doubled(x):
    return 2 * x


def doubled_through_numpy(x):
    return np.asarray(2 * x)


def doubled_in_place(x):
    x *= 2
    return x


def strict_array():
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    return strict.asarray(LARGER)


mutation(
    "NumPy returned for another library's arrays",
    lambda function: testing.assert_namespace_preserved(function, strict_array()),
    doubled,
    doubled_through_numpy,
    check="assert_namespace_preserved",
)
mutation(
    "input scaled in place",
    lambda function: testing.assert_inputs_unchanged(function, LARGER.copy()),
    doubled,
    doubled_in_place,
    check="assert_inputs_unchanged",
)
mutation(
    "a lambda in the map",
    testing.assert_picklable,
    Sketch(np.random.default_rng(0), favor),
    Sketch(np.random.default_rng(0), lambda x, omega: favor(x, omega)),
    rng=SEED,
)


class Redrawn(Sketch):
    def __init__(self, rng):
        super().__init__(rng, favor)

    def redraw(self, rng):
        return Redrawn(rng)

    def kernel(self, x, y):
        return kernel(x, y)


class RedrawnFromEntropy(Redrawn):
    def redraw(self, rng):
        return RedrawnFromEntropy(None)


def checked(feature_map):
    skipped = set(testing.check.CHECKS) - {"redraw", "features"}
    report = testing.check_feature_map(feature_map, skip=skipped, rng=SEED)
    return testing.Evidence("check_feature_map", report.summary, report.false_alarm_rate)


mutation(
    "a redraw that ignores its seed",
    checked,
    Redrawn(np.random.default_rng(0)),
    RedrawnFromEntropy(np.random.default_rng(0)),
    check="redraw",
)


def rolled_back(snapshot):
    return testing.assert_rollback(
        begin=lambda: linattn.CoresetAttention(8, block_size=4, rng=0),
        step=linattn.CoresetAttention.step,
        snapshot=snapshot,
        num_drafts=10,
        rng=SEED,
    )


mutation(
    "a snapshot that goes on with the stream",
    rolled_back,
    copy.deepcopy,
    lambda stream: stream,
    check="assert_rollback",
)

mutation(
    "a median in the place of a mean",
    lambda average: testing.assert_estimator(
        lambda rng: average(rng.exponential(size=9)), 1.0, kurtosis=25.0, rng=SEED
    ),
    np.mean,
    np.median,
    check="assert_estimator",
)

mutation(
    "a variance of a sum of dependent draws",
    lambda spread: testing.assert_estimator_variance(
        lambda rng: spread * rng.standard_normal(), 1.0, kurtosis=3.0, rng=SEED
    ),
    1.0,
    2**0.5,
    check="assert_estimator_variance",
)

mutation(
    "entries that share their noise",
    lambda size: testing.assert_estimator_covariance(
        lambda rng: rng.standard_normal(size) * np.ones(2), np.eye(2), kurtosis=3.0, rng=SEED
    ),
    2,
    1,
    check="assert_estimator_covariance",
)

mutation(
    "half of the rows that an error was promised for",
    lambda rows: testing.assert_at_most(
        lambda rng: np.mean(rng.standard_normal(rows) ** 2) - 1, 0.5, 0.05, rng=SEED
    ),
    32,
    16,
    check="assert_at_most",
)

for pair in kit_inputs.PAIRS:
    mutation(*pair[:4], check=pair[4])

NAMES = [case.name for case in MUTATIONS]


WITHOUT_INPUTS = NAMES.index("NaN from a first block that is masked whole")


def says_what_was_tried(case, words):
    """Whether a result names lengths and dtypes, where a mistake needs some of its own."""
    words = " ".join(words.split())
    is_named = re.search(r"\b(tokens|rows)\b", words) and re.search(r"float\d\d", words)
    return is_named or NAMES.index(case.name) < WITHOUT_INPUTS


@pytest.fixture(params=MUTATIONS, ids=NAMES)
def case(request):
    return request.param


def test_valid_twin_passes(case):
    with np.errstate(all="ignore"):
        evidence = case.assertion(case.valid)
    assert evidence.false_alarm_rate in (0.0, RATE)
    assert says_what_was_tried(case, evidence.detail), evidence.detail


def test_wrong_twin_is_caught_by_the_named_assertion(case):
    with (
        np.errstate(all="ignore"),
        pytest.raises(AssertionError, match=rf"\b{case.check}\b") as caught,
    ):
        case.assertion(case.wrong)
    assert says_what_was_tried(case, str(caught.value)), str(caught.value)


def test_every_kind_of_defect_is_planted():
    assert len(set(NAMES)) == len(NAMES) >= 20
    assertions = {name for name in testing.__all__ if name.startswith("assert_")}
    assert assertions <= {case.check for case in MUTATIONS}


def test_total_false_alarm_rate():
    """Stated at the top: every valid twin decided by chance has its rate, and they add up."""
    assert len(MUTATIONS) * RATE <= TOTAL_FALSE_ALARM_RATE < 1e-6
