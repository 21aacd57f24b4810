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
from math import log, sqrt
from typing import Any

import numpy as np
import pytest

import linattn
from linattn import testing
from linattn.feature_maps import PositiveFeatures
from linattn.sampling import gaussian, orthogonal
from linattn.typing import Features

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


def blocks_of(num, dim, rng, make):
    return np.concatenate([make(dim, rng) for _ in range(-(-num // dim))])[:num]


def haar_block(dim, rng):
    q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * np.linalg.norm(rng.standard_normal((dim, dim)), axis=-1, keepdims=True)


def raw_qr_block(dim, rng):
    q, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    return q * np.linalg.norm(rng.standard_normal((dim, dim)), axis=-1, keepdims=True)


def root_d_block(dim, rng):
    q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * sqrt(dim)


def own_norms_block(dim, rng):
    rows = rng.standard_normal((dim, dim))
    q, r = np.linalg.qr(rows)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    return q * np.linalg.norm(rows, axis=-1, keepdims=True)


def fresh_blocks(num, dim, rng):
    return blocks_of(num, dim, rng, haar_block)


def one_seed_for_all_blocks(num, dim, rng):
    seed = int(rng.integers(2**32))
    return blocks_of(num, dim, None, lambda d, _: haar_block(d, np.random.default_rng(seed)))


def plane_norms(u):
    """Quantiles of the norm of N(0, I) in the plane."""
    return np.sqrt(-2 * np.log1p(-u))


def directions(num, dim, rng):
    rows = rng.standard_normal((num, dim))
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def random_strata(num, dim, rng):
    u = (np.arange(num) + rng.random(num)) / num
    return directions(num, dim, rng) * plane_norms(u)[:, None]


def deterministic_strata(num, dim, rng):
    u = (np.arange(num) + 1) / (num + 1)
    return directions(num, dim, rng) * plane_norms(u)[:, None]


rows_are_gaussian = partial(testing.assert_gaussian_rows, num=D, dim=D, rng=SEED)
for name, wrong_block in (
    ("raw QR", raw_qr_block),
    ("norms of sqrt(d)", root_d_block),
    ("norms of the same block's rows", own_norms_block),
):
    mutation(
        name,
        rows_are_gaussian,
        lambda num, dim, rng: haar_block(dim, rng),
        lambda num, dim, rng, make=wrong_block: make(dim, rng),
        check="assert_gaussian_rows",
    )
mutation(
    "raw QR in many dimensions",
    partial(testing.assert_gaussian_rows, num=64, dim=64, num_draws=1000, rng=SEED),
    lambda num, dim, rng: haar_block(dim, rng),
    lambda num, dim, rng: raw_qr_block(dim, rng),
    check="assert_gaussian_rows",
)
mutation(
    "rows 5 % too long",
    partial(testing.assert_gaussian_rows, num=32, dim=32, rng=SEED),
    lambda num, dim, rng: haar_block(dim, rng),
    lambda num, dim, rng: 1.05 * haar_block(dim, rng),
    check="assert_gaussian_rows",
)
mutation(
    "deterministic strata",
    partial(testing.assert_gaussian_rows, num=4, dim=2, rng=SEED),
    random_strata,
    deterministic_strata,
    check="assert_gaussian_rows",
)


def softmax_kernel(x, y):
    return np.exp(x @ np.swapaxes(y, -1, -2) / sqrt(D))


def favor_plus_with(sampler, assertion=testing.assert_unbiased, **options):
    reference = PositiveFeatures(D, 2 * D, sampler="orthogonal", rng=0)
    return assertion(
        lambda rng: PositiveFeatures(D, 2 * D, sampler=sampler, rng=rng),
        variance=reference.variance,
        rng=SEED,
        **options,
    )


mutation(
    "raw QR, seen by the features",
    favor_plus_with,
    fresh_blocks,
    lambda num, dim, rng: blocks_of(num, dim, rng, raw_qr_block),
    check="assert_unbiased",
)
mutation(
    "one seed for all blocks",
    partial(
        favor_plus_with,
        assertion=testing.assert_variance,
        mean=softmax_kernel,
        relation="at_most",
        num_draws=4000,
    ),
    fresh_blocks,
    one_seed_for_all_blocks,
    check="assert_variance",
)


# Feature maps: functions of vectors and rows.


def square(x):
    return np.sum(x * x, axis=-1, keepdims=True)


class Sketch:
    """A map of exp(x.y) from functions of vectors and rows; log features unless `signed`."""

    dim = D
    num_features = M
    signed = False

    def __init__(self, rng, query, key=None):
        self.omega = gaussian(self.num_features, D, rng)
        self.query, self.key = query, key or query

    def wrap(self, features):
        return Features(None, features) if self.signed else Features(features, None)

    def query_features(self, x):
        return self.wrap(self.query(x, self.omega))

    def key_features(self, x):
        return self.wrap(self.key(x, self.omega))


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


def without_root_m(x, omega):
    return x @ omega.T - square(x) / 2


def without_square(x, omega):
    return x @ omega.T - log(M) / 2


def with_epsilon(x, omega):
    return np.log(np.exp(x @ omega.T - square(x) / 2) + 1e-3) - log(M) / 2


def scaled_twice(x, omega):
    x = x * D**-0.25
    return x @ omega.T - square(x) / 2 - log(M) / 2


def half_negated(x, omega):
    omega = np.concatenate([omega[: M // 2], -omega[M // 2 :]])
    return x @ omega.T - square(x) / 2 - log(M) / 2


def shifted_by_key(x, omega):
    log_features = x @ omega.T - square(x) / 2 - log(M) / 2
    return log_features - np.max(log_features, axis=-1, keepdims=True)


def unbiased(features, variance=favor_variance, kind=Sketch):
    pair = features if isinstance(features, tuple) else (features,)
    return testing.assert_unbiased(
        lambda rng: kind(rng, *pair), kernel=kernel, variance=variance, rng=SEED
    )


for name, wrong in (
    ("1 / sqrt(m) missing", without_root_m),
    ("|x|^2 / 2 missing", without_square),
    ("epsilon in the features", with_epsilon),
    ("scale applied twice", scaled_twice),
    ("half the projections of the keys negated", (favor, half_negated)),
    ("a shift for each key", (favor, shifted_by_key)),
):
    mutation(name, unbiased, favor, wrong, check="assert_unbiased")


class Signed(Sketch):
    signed = True
    num_features = 2 * M

    def __init__(self, rng, query, key=None):
        super().__init__(rng, query, key)
        self.omega = self.omega[:M]


def trigonometric_variance(x, y):
    norms = square(x) + np.swapaxes(square(y), -1, -2)
    return np.exp(norms) * np.expm1(-np.maximum(sum_square(x, -y), 0)) ** 2 / (2 * M)


def cos_sin(x, omega):
    u = x @ omega.T
    return np.exp(square(x) / 2) / sqrt(M) * np.concatenate([np.cos(u), np.sin(u)], axis=-1)


def cos_minus_sin(x, omega):
    u = x @ omega.T
    return np.exp(square(x) / 2) / sqrt(M) * np.concatenate([np.cos(u), -np.sin(u)], axis=-1)


mutation(
    "sign error in the sine part",
    partial(unbiased, variance=trigonometric_variance, kind=Signed),
    cos_sin,
    (cos_sin, cos_minus_sin),
    check="assert_unbiased",
)


class Phases(Sketch):
    signed = True
    width: float

    def __init__(self, rng):
        super().__init__(rng, self.features)
        self.phase = rng.uniform(0, self.width, M)

    def features(self, x, omega):
        return np.exp(square(x) / 2) * sqrt(2 / M) * np.cos(x @ omega.T + self.phase)


class WholePhases(Phases):
    width = 2 * np.pi


class NoPhases(Phases):
    width = 0.0


def phase_variance(x, y):
    norms = square(x) + np.swapaxes(square(y), -1, -2)
    s = np.maximum(sum_square(x, -y), 0)
    return np.exp(norms) * (1 + np.exp(-2 * s) / 2 - np.exp(-s)) / M


mutation(
    "phases forgotten",
    lambda kind: testing.assert_unbiased(kind, kernel=kernel, variance=phase_variance, rng=SEED),
    WholePhases,
    NoPhases,
    check="assert_unbiased",
)

TILT = -0.1


def tilted_variance(x, y, A=TILT):
    v, rho = np.maximum(sum_square(x, y), 0), 1 / (1 - 8 * A)
    return kernel(x, y) ** 2 * (((rho + 1) ** 2 / (4 * rho)) ** (D / 2) * np.exp(rho * v) - 1) / M


def tilted(x, omega, A=TILT):
    log_features = A * square(omega)[:, 0] + sqrt(1 - 4 * A) * x @ omega.T - square(x) / 2
    return log_features + D / 4 * log(1 - 4 * A) - log(M) / 2


def tilted_without_factor(x, omega, A=TILT):
    log_features = A * square(omega)[:, 0] + sqrt(1 - 4 * A) * x @ omega.T - square(x) / 2
    return log_features - log(M) / 2


mutation(
    "(1 - 4A)^(d/4) forgotten",
    partial(unbiased, variance=tilted_variance),
    tilted,
    tilted_without_factor,
    check="assert_unbiased",
)


def best_tilt(v):
    t = v / D
    return (1 - 2 * t - sqrt((2 * t + 1) ** 2 + 8 * t)) / 16


def notes_tilt(v):
    """The slip that circulates: 8 where 16 belongs."""
    t = v / D
    return (1 - 2 * t - sqrt((2 * t + 1) ** 2 + 8 * t)) / 8


LARGER = np.array([[0.5, 0.3, -0.4, 0.2], [0.0, 0.7, 0.2, 0.0]])


def variance_at_best_tilt(tilt):
    """At x = y with v = 2, A* has the variance that its closed form says; other A have more."""
    x = LARGER / np.linalg.norm(LARGER, axis=-1, keepdims=True) / sqrt(2)
    return testing.assert_variance(
        lambda rng: Sketch(rng, partial(tilted, A=tilt(2.0))),
        x, x, mean=kernel, variance=partial(tilted_variance, A=best_tilt(2.0)),
        relation="at_most", num_draws=20_000, rng=SEED,
    )  # fmt: skip


mutation("wrong A*", variance_at_best_tilt, best_tilt, notes_tilt, check="assert_variance")


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


def read(phi, kv, z):
    return np.einsum("...m,...me->...e", phi, kv) / np.sum(phi * z, axis=-1, keepdims=True)


def outer(psi, value):
    return psi[..., :, None] * value[..., None, :]


def running(query, key, value, is_causal=True):
    psi = np.exp(key)
    kv, z = np.cumsum(outer(psi, value), axis=-3), np.cumsum(psi, axis=-2)
    return read(np.exp(query), kv, z)


def running_on_wrong_axis(query, key, value, is_causal=True):
    psi = np.exp(key)
    kv, z = np.cumsum(outer(psi, value), axis=-2), np.cumsum(psi, axis=-1)
    return read(np.exp(query), kv, z)


def one_step(query, key, value, state):
    kv, z = (0.0, 0.0) if state is None else state
    psi = np.exp(key)
    state = (kv + outer(psi, value), z + psi)
    return read(np.exp(query), *state), state


def step_in_float16(query, key, value, state):
    kv, z = (0.0, 0.0) if state is None else state
    psi = np.exp(key)
    state = ((kv + outer(psi, value)).astype(np.float16), (z + psi).astype(np.float16))
    return read(np.exp(query), *state), state


def step_without_normalizer(query, key, value, state):
    kv, z = (0.0, np.exp(key)) if state is None else state
    psi = np.exp(key)
    state = (kv + outer(psi, value), z)
    return read(np.exp(query), *state), state


mutation(
    "cumulative sum on the wrong axis",
    lambda attention: testing.assert_streaming(attention=attention, step=one_step, rng=SEED),
    running,
    running_on_wrong_axis,
    check="assert_streaming",
)
for name, wrong_step in (
    ("state stored in float16", step_in_float16),
    ("normalizer not updated", step_without_normalizer),
):
    mutation(
        name,
        lambda step: testing.assert_streaming(attention=running, step=step, rng=SEED),
        one_step,
        wrong_step,
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


def strictly_upper(query, key, value, is_causal=True):
    weights = np.exp(query) @ np.swapaxes(np.exp(key), -1, -2)
    weights = np.tril(weights)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def off_by_one(query, key, value, is_causal=True):
    weights = np.exp(query) @ np.swapaxes(np.exp(key), -1, -2)
    weights = np.tril(weights, k=1)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


for name, valid_attention, wrong_attention in (
    ("a maximum over later keys as shift", causal, causal_shifted_by_maximum),
    ("triangle off by one", strictly_upper, off_by_one),
):
    mutation(
        name,
        lambda attention: testing.assert_causal(attention=attention, rng=SEED),
        valid_attention,
        wrong_attention,
        check="assert_causal",
    )


def whole(phi, psi, value):
    return read(phi, np.swapaxes(psi, -1, -2)[..., None, :, :] @ value[..., None, :, :],
                np.sum(psi, axis=-2, keepdims=True))  # fmt: skip


def masked(query, key, value, key_mask=True):
    keep = np.asarray(key_mask)[..., None]
    psi, value = np.where(keep, np.exp(key), 0), np.where(keep, value, 0)
    return whole(np.exp(query), psi, value)


def masked_values_only(query, key, value, key_mask=True):
    keep = np.asarray(key_mask)[..., None]
    psi, value = np.exp(key), np.where(keep, value, 0)
    return whole(np.exp(query), psi, value)


def masked_by_product(query, key, value, key_mask=True):
    keep = np.asarray(key_mask)[..., None]
    psi, value = np.exp(key) * keep, value * keep
    return whole(np.exp(query), psi, value)


for name, wrong_mask, garbage in (
    ("mask on values only", masked_values_only, (1.0,)),
    ("mask multiplied with NaN", masked_by_product, (np.nan,)),
):
    mutation(
        name,
        lambda attention, garbage=garbage: testing.assert_mask_is_slice(
            attention=attention, garbage=garbage, rng=SEED
        ),
        masked,
        wrong_mask,
        check="assert_mask_is_slice",
    )


def logs(x):
    return x - square(x) / 2


def full(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def full_with_epsilon(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / (np.sum(weights, axis=-1, keepdims=True) + 1e-6)


def full_scaled_by_batch(query, key, value):
    key = key / np.std(key)
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def full_scaled_by_itself(query, key, value):
    key = key / np.std(key, axis=(-2, -1), keepdims=True)
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def full_with_recency(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    weights = weights * 0.99 ** np.arange(key.shape[-2])
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


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
mutation(
    "standardized over the batch",
    lambda attention: testing.assert_batch_independent(attention=attention, rng=SEED),
    full_scaled_by_itself,
    full_scaled_by_batch,
    check="assert_batch_independent",
)
mutation(
    "weights by position",
    lambda attention: testing.assert_permutation_invariant(attention=attention, rng=SEED),
    full,
    full_with_recency,
    check="assert_permutation_invariant",
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


def doubled_in_float64(x):
    return np.float64(2) * x


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
    "float32 becomes float64",
    lambda function: testing.assert_namespace_preserved(function, LARGER.astype(np.float32)),
    doubled,
    doubled_in_float64,
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

# Inputs that small tests have not: lengths, heads, dtypes, runs of masked keys.


def by_blocks(query, key, value, key_mask=True, guard=True):
    """Softmax attention that takes up blocks of 32 keys, as kernels do."""
    visible = np.broadcast_to(np.asarray(key_mask), key.shape[-2:-1])
    key, value = (np.where(visible[:, None], x, 0) for x in (key, value))
    largest: Any = -np.inf
    norm: Any = 0.0
    total: Any = 0.0
    for start in range(0, key.shape[-2], 32):
        block = np.s_[..., start : start + 32, :]
        scores = query @ np.swapaxes(key[block], -1, -2)
        scores = np.where(visible[start : start + 32], scores, -np.inf)
        now = np.maximum(largest, np.max(scores, axis=-1, keepdims=True))
        shift = np.where(np.isneginf(now), 0, now) if guard else now
        weights, kept = np.exp(scores - shift), np.exp(largest - shift)
        norm = norm * kept + np.sum(weights, axis=-1, keepdims=True)
        total, largest = total * kept + weights @ value[block], now
    return total / norm


def by_blocks_of_nan(query, key, value, key_mask=True):
    """The first block that is masked whole: exp(-inf + inf)."""
    return by_blocks(query, key, value, key_mask, guard=False)


def masked_in_the_numerator(query, key, value, key_mask=True):
    """The mask multiplies the weights after their sum was taken, beyond 64 keys."""
    keep = np.broadcast_to(np.asarray(key_mask), key.shape[-2:-1])
    late = np.arange(len(keep)) >= 64
    psi = np.where((keep | late)[:, None], np.exp(key), 0)
    z = np.sum(psi, axis=-2, keepdims=True)
    psi, value = np.where(keep[:, None], psi, 0), np.where(keep[:, None], value, 0)
    return read(np.exp(query), (np.swapaxes(psi, -1, -2) @ value)[..., None, :, :], z)


def seen(query, key, value, is_causal=True, *, visible=None):
    n = key.shape[-2]
    weights = np.exp(query @ np.swapaxes(key, -1, -2) / 2)
    weights = np.where(np.tri(n, dtype=bool) if visible is None else visible(n), weights, 0)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def one_token_ahead_from(first):
    def visible(n):
        return np.tri(n, dtype=bool) | (
            np.tri(n, k=1, dtype=bool) & (np.arange(n) >= first)[:, None]
        )

    return partial(seen, visible=visible)


def last_block_is_open(n):
    """The triangle is left out in a last block of 128 that is not full."""
    block = np.arange(n) // 128
    late = (block == n // 128) & (n % 128 > 0) & (n > 128)
    return np.tri(n, dtype=bool) | (late & late[:, None])


def keys_of_head(pick):
    def attention(query, key, value, is_causal=True):
        heads = np.arange(key.shape[1]) if key.ndim > 3 else None
        moved = key if heads is None else key[:, pick(heads)]
        return full(query, moved, value)

    return attention


def first_256_keys(query, key, value):
    return full(query, key[..., :256, :], value[..., :256, :])


def sixteen_columns(query, key, value):
    return full(query, key, value * (np.arange(value.shape[-1]) < 16))


def summed_in_float16(query, key, value):
    weights = np.exp(logs(query)) @ np.swapaxes(np.exp(logs(key)), -1, -2)
    narrow = np.float16 if weights.dtype == np.float32 else weights.dtype
    norm = np.cumsum(weights, axis=-1, dtype=narrow)[..., -1:]
    return weights @ value / norm


def faded(query, key, value, is_causal=True):
    """Weights that fade with the distance, 1 / (1 + i - j)."""
    i = np.arange(key.shape[-2], dtype=query.dtype)
    weights = np.exp(query @ np.swapaxes(key, -1, -2) / 2) / (1 + np.abs(i[:, None] - i))
    weights = np.tril(weights)
    return weights @ value / np.sum(weights, axis=-1, keepdims=True)


def faded_step(query, key, value, state, most=10**6):
    before = state or (key[..., None, :][..., :0, :], value[..., None, :][..., :0, :])
    last = key[..., None, :], value[..., None, :]
    keys, values = (np.concatenate(pair, axis=-2) for pair in zip(before, last, strict=True))
    distance = np.minimum(np.arange(keys.shape[-2], dtype=query.dtype)[::-1], most)
    weights = np.exp(query[..., None, :] @ np.swapaxes(keys, -1, -2) / 2) / (1 + distance)
    return (weights @ values / np.sum(weights, axis=-1, keepdims=True))[..., 0, :], (keys, values)


def chunked(query, key, value, is_causal=True, lost=None):
    """Chunks of 64 with a state; the one before chunk `lost` is lost."""
    outputs: list[Any] = []
    kv: Any = 0.0
    z: Any = 0.0
    for index, start in enumerate(range(0, key.shape[-2], 64)):
        if index == lost:
            kv, z = 0.0, 0.0
        q, k, v = (x[..., start : start + 64, :] for x in (query, key, value))
        psi = np.exp(k)
        sums = kv + np.cumsum(outer(psi, v), axis=-3), z + np.cumsum(psi, axis=-2)
        outputs.append(read(np.exp(q), *sums))
        kv, z = sums[0][..., -1:, :, :], sums[1][..., -1:, :]
    return np.concatenate(outputs, axis=-2)


ATTENTION: dict[str, Any] = {
    "NaN from a first block that is masked whole": (
        testing.assert_mask_is_slice, by_blocks, by_blocks_of_nan,
    ),
    "a mask in the numerator alone, beyond 64 keys": (
        testing.assert_mask_is_slice, masked, masked_in_the_numerator,
    ),
    "a leak after token 64": (testing.assert_causal, seen, one_token_ahead_from(64)),
    "a leak after token 300": (testing.assert_causal, seen, one_token_ahead_from(300)),
    "a last block without its triangle": (
        testing.assert_causal, seen, partial(seen, visible=last_block_is_open),
    ),
    "keys of head 0 for all heads": (
        testing.assert_batch_independent, keys_of_head(lambda h: h), keys_of_head(lambda h: 0 * h),
    ),
    "keys of the next head": (
        testing.assert_batch_independent,
        keys_of_head(lambda h: h),
        keys_of_head(lambda h: (h + 1) % len(h)),
    ),
    "keys beyond 256 left out": (testing.assert_permutation_invariant, full, first_256_keys),
    "a sum in float16 for float32": (
        testing.assert_permutation_invariant, full, summed_in_float16,
    ),
    "columns beyond 16 left out": (
        partial(testing.assert_normalized, magnitudes=(0.5,)), full, sixteen_columns,
    ),
    "a state that the third chunk does not get": (
        partial(testing.assert_streaming, step=one_step), chunked, partial(chunked, lost=2),
    ),
}  # fmt: skip
for name, (assertion, right, wrong) in ATTENTION.items():
    check = getattr(assertion, "func", assertion).__name__
    mutation(
        name,
        lambda attention, assertion=assertion: assertion(attention=attention, rng=SEED),
        right,
        wrong,
        check=check,
    )
mutation(
    "distances counted up to 128",
    lambda step: testing.assert_streaming(attention=faded, step=step, rng=SEED),
    faded_step,
    partial(faded_step, most=128),
    check="assert_streaming",
)


class Exponentials:
    """exp(x), exp(-x), and a change of the vectors."""

    num_features, dim, positive = 8, 4, True

    def __init__(self, change=lambda x: x):
        self.change = change

    def query_features(self, x):
        x = self.change(x)
        return Features(None, np.concatenate([np.exp(x), np.exp(-x)], axis=-1))

    key_features = query_features


def unit_over_heads(x):
    norm = np.sqrt(1 + np.sum(x * x, axis=1, keepdims=True))
    return x / norm if x.ndim > 3 else x


MAPS = {
    "a map wrong in float32": lambda x: x * np.float32(1.001) if x.dtype == np.float32 else x,
    "float16 within a map for float32": (
        lambda x: x.astype(np.float16).astype(x.dtype) if x.dtype == np.float32 else x
    ),
    "a map wrong after 64 tokens": lambda x: (
        x * np.where(np.arange(x.shape[-2]) < 64, 1, 1.01)[:, None]
    ),
    "a map wrong after 300 tokens": lambda x: x - 0.01 * (np.arange(x.shape[-2]) >= 300)[:, None],
    "a map wrong with an axis of heads": unit_over_heads,
}
for name, change in MAPS.items():
    mutation(
        name,
        lambda phi: only_row(testing.check_feature_map, "features", phi),
        Exponentials(),
        Exponentials(change),
        check="features",
    )


def only_row(check, name, *subject, **options):
    """Run one row of a table; raise as the table does."""
    known = (
        testing.recurrences.CHECKS if check is testing.check_recurrence else testing.check.CHECKS
    )
    report = check(*subject, skip=[other for other in known if other != name], **options)
    (detail,) = (row.detail for row in report.rows if row.check == name)
    return testing.Evidence(name, detail)


# Kernels of recurrences.

ours = partial(linattn.linear_recurrence, update_rule="gated_delta", return_state=True)


def gated_delta(query, key, value, log_decay, beta, initial_state=None, **wrong):
    """Loop over tokens, `(B, H, L, d)`; `wrong` replaces a line."""
    shape = (*key.shape[:2], key.shape[3], value.shape[3])
    state = np.zeros(shape, np.float32) if initial_state is None else initial_state
    scale = wrong.get("scale", lambda d, e: d**-0.5)(*shape[2:])
    length, outputs = key.shape[2], []
    for t in range(length):
        q, k, v, g, b = (x[:, :, t] for x in (query, key, value, log_decay, beta))
        state = wrong.get("before", lambda state, t: state)(state, t)
        gate = wrong.get("gate", lambda g, t, n: np.exp(g))(g, t, length)[..., None]
        k, v, b = wrong.get("token", lambda k, v, b, t: (k, v, b))(k, v, b[..., None], t)
        state = gate[..., None] * state
        state = (
            state + k[..., None] * (b * (v - np.einsum("bhd,bhde->bhe", k, state)))[..., None, :]
        )
        state = wrong.get("after", lambda state: state)(state)
        outputs.append(np.einsum("bhd,bhde->bhe", scale * q, state))
    return np.stack(outputs, axis=2), state


def memory_read_in_a_row(*tokens, **gates):
    """As if arrays were contiguous: the strides are ignored."""

    def flat(x):
        base = x if x.base is None else x.base
        return base.ravel()[: x.size].reshape(x.shape)

    return gated_delta(*map(flat, tokens), **{name: flat(x) for name, x in gates.items()})


class Remembering:
    """Keeps the output for the shape of the last call."""

    def __init__(self):
        self.outputs = {}

    def __call__(self, *tokens, **gates):
        output, state = gated_delta(*tokens, **gates)
        return self.outputs.setdefault(output.shape, output), state


KERNELS: dict[str, Any] = {
    "a log decay of 0 taken for a token left out": (
        "decay", {"gate": lambda g, t, n: np.where(g == 0, 0, np.exp(g))},
    ),
    "decays of e^-30 taken for 0.001": (
        "decay", {"gate": lambda g, t, n: np.exp(np.maximum(g, -7))},
    ),
    "key channels beyond 8 left out": (
        "sizes", {"token": lambda k, v, b, t: (k * (np.arange(k.shape[-1]) < 8), v, b)},
    ),
    "value columns beyond 64 left out": (
        "sizes", {"token": lambda k, v, b, t: (k, v * (np.arange(v.shape[-1]) < 64), b)},
    ),
    "1 / sqrt(e) for 1 / sqrt(d)": ("loop", {"scale": lambda d, e: e**-0.5}),
    "a state that the third chunk of 512 does not get": (
        "loop", {"before": lambda state, t: 0 * state if t == 1024 else state},
    ),
    "no gate at the end of a last chunk that is not full": (
        "loop", {"gate": lambda g, t, n: np.exp(g) if n % 64 == 0 or t < n - 1 else 1 + 0 * g},
    ),
    "beta applied twice": ("loop", {"token": lambda k, v, b, t: (k, v, b * b)}),
    "beta of batch element 0": ("loop", {"token": lambda k, v, b, t: (k, v, 0 * b + b[:1])}),
    "gates of head 0": ("loop", {"gate": lambda g, t, n: np.exp(0 * g + g[:, :1])}),
    "a state in float16": (
        "keys", {"after": lambda state: state.astype(np.float16).astype(np.float32)},
    ),
    "keys of norm 0 normalized": (
        "correlated",
        {"token": lambda k, v, b, t: (k / np.linalg.norm(k, axis=-1, keepdims=True), v, b)},
    ),
}  # fmt: skip
for name, (check, lines) in KERNELS.items():
    mutation(
        name,
        partial(only_row, testing.check_recurrence, check, update_rule="gated_delta"),
        gated_delta,
        partial(gated_delta, **lines),
        check=check,
    )
for name, check, subject in (
    ("strides ignored", "strided", memory_read_in_a_row),
    ("outputs of the call before", "inputs", Remembering()),
):
    mutation(
        name,
        partial(only_row, testing.check_recurrence, check, update_rule="gated_delta"),
        gated_delta,
        subject,
        check=check,
    )


def grouped(query, key, value, log_decay, initial_state=None, *, transposed=False):
    """The gated rule in the layout of ONNX: two query heads for each head of the state."""
    batch, length, heads = log_decay.shape
    k, v = (np.moveaxis(x.reshape(batch, length, heads, 1, -1), 1, 3) for x in (key, value))
    q = query.reshape(batch, length, *((2, heads) if transposed else (heads, 2)), k.shape[-1])
    q = np.transpose(q, (0, 3, 2, 1, 4) if transposed else (0, 2, 3, 1, 4))
    output, state = linattn.linear_recurrence(
        q, k, v, log_decay=np.moveaxis(log_decay, 1, 2)[:, :, None], update_rule="gated",
        initial_state=None if initial_state is None else initial_state[:, :, None],
        return_state=True,
    )  # fmt: skip
    return np.moveaxis(output, 3, 1).reshape(batch, length, -1), state[:, :, 0]


mutation(
    "grouped heads transposed",
    partial(
        only_row, testing.check_recurrence, "loop", update_rule="gated", layout="onnx",
        lengths=(5, 70),
    ),
    grouped,
    partial(grouped, transposed=True),
    check="loop",
)  # fmt: skip


def sixteen_bits(*tokens, channels=128, **gates):
    query, key, value = (x.astype(np.float32) for x in tokens)
    return ours(query, key * (np.arange(key.shape[-1]) < channels), value, **gates)


def tried_in_16_bits(kernel, dtype="bfloat16"):
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    options = {"dtype": dtype, "dim": 128, "value_dim": 128, "lengths": (64, 320)}
    return only_row(testing.check_recurrence, "loop", kernel, update_rule="gated_delta", **options)


mutation(
    "key channels beyond 64 left out, in bfloat16 of d = 128",
    tried_in_16_bits,
    sixteen_bits,
    partial(sixteen_bits, channels=64),
    check="loop",
)


# Their gradients.


def gradients(change=lambda named, gates: named, *, last=True, rule="gated_delta"):
    """Return our pullback, whose gradients `change` changes."""

    def vjp(*tokens, **gates):
        results, pullback = linattn.linear_recurrence_vjp(
            *tokens, **gates, update_rule=rule, return_state=True
        )

        def pulled(grad_output, grad_state):
            found = pullback(grad_output, grad_state if last else 0 * grad_state)
            named = dict(zip(("query", "key", "value", *gates), found, strict=True))
            return list(change(named, gates).values())

        return results, pulled

    return vjp


def where(name, condition):
    """A gradient that is 0 where an argument is as told."""

    def change(named, gates):
        return named | {name: np.where(condition(gates[name]), 0, named[name])}

    return change


def cut_between(size):
    """No gradient goes from one chunk of tokens to the one before it."""

    def vjp(*tokens, **gates):
        length, state = tokens[1].shape[2], gates.get("initial_state")
        outputs, pullbacks, cuts = [], [], range(0, length, size)
        for start in cuts:
            part = [x[:, :, start : start + size] for x in tokens]
            own = {
                n: x[:, :, start : start + size] for n, x in gates.items() if n != "initial_state"
            }
            if state is not None:
                own["initial_state"] = state
            (output, state), pullback = gradients()(*part, **own)
            outputs.append(output)
            pullbacks.append(pullback)

        def pulled(grad_output, grad_state):
            found = [
                pullback(grad_output[:, :, start : start + size], grad_state * (start == cuts[-1]))
                for start, pullback in zip(cuts, pullbacks, strict=True)
            ]
            joined = [np.concatenate(x, axis=2) for x in zip(*(f[:5] for f in found), strict=True)]
            return joined + ([found[0][5]] if "initial_state" in gates else [])

        return (np.concatenate(outputs, axis=2), state), pulled

    return vjp


GRADIENTS = {
    "a gate's gradient clamped below e^-5": gradients(where("log_decay", lambda g: g < -5)),
    "no gate's gradient at 0": gradients(where("log_decay", lambda g: g == 0)),
    "no gradient between chunks of 128": cut_between(128),
    "no gradient between chunks of 256": cut_between(256),
    "no gradient by beta above 1": gradients(where("beta", lambda b: b > 1)),
    "no gradient by keys where there is no initial state": gradients(
        lambda named, gates: named | {"key": named["key"] * ("initial_state" in gates)}
    ),
    "the sign of the decay in the backward pass": gradients(
        lambda named, gates: named | {"log_decay": -named["log_decay"]}
    ),
    "no gradient of values beyond 64 columns": gradients(
        lambda named, gates: (
            named | {"value": named["value"] * (np.arange(named["value"].shape[-1]) < 64)}
        )
    ),
    "no gradient through the final state": gradients(last=False),
}
for name, vjp in GRADIENTS.items():
    mutation(
        name,
        lambda vjp: only_row(
            testing.check_recurrence, "gradient", ours, vjp=vjp, update_rule="gated_delta"
        ),
        gradients(),
        vjp,
        check="gradient",
    )


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


def test_orthogonal_blocks_of_this_file_are_those_of_the_library():
    rows = fresh_blocks(8, D, np.random.default_rng(SEED))
    ours = orthogonal(8, D, SEED)
    for block in (rows[:D], ours[:D]):
        gram = block @ block.T
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-12)
