"""Calibrated features against their formula; calibration against what it promises."""

# Tests call with star arguments, and with what types forbid.
# mypy: disable-error-code="arg-type, call-arg"

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn.feature_maps import CalibratedFeatures, _calibration
from linattn.feature_maps._samples import Sample, pool_heads
from tests.attentions import assert_at_most

HEADS, LENGTH, DIM, VALUE_DIM, M = 3, 40, 6, 4, 8
SCALE = 1 / np.sqrt(DIM)


def sequence(seed, length=LENGTH, query_heads=(HEADS,), key_heads=(HEADS,)):
    rng = np.random.default_rng(seed)
    query = 1.5 * rng.standard_normal((*query_heads, length, DIM)) + 1
    key = rng.standard_normal((*key_heads, length, DIM)) - 0.5
    return query, key, rng.standard_normal((*key_heads, length, VALUE_DIM))


SAMPLES = [sequence(0, 30), sequence(1, 50), sequence(2, 1)]
PHI = CalibratedFeatures.calibrate(SAMPLES, num_features=M)
LEARNED = CalibratedFeatures.calibrate(
    SAMPLES[:2], num_features=M, learn=True, num_steps=5, exact_window=4, rng=0
)
MAPS = {"closed": PHI, "learned": LEARNED}
every_map = pytest.mark.parametrize("name", MAPS)


def dense(phi, query, key):
    """Log weights of all pairs, one head after the other."""
    log = np.empty((*query.shape[:-1], key.shape[-2]))
    for h in range(len(query)):
        u = phi.scale * query[h] @ phi.centroids[h].T + phi.query_bias[h]
        z = key[h] @ phi.key_weights[h].T + phi.key_bias[h]
        w = z - phi.power[h] * np.log(np.exp(z).sum(axis=-1, keepdims=True))
        w += (key[h] @ phi.tilt[h])[:, None]
        log[h] = np.log(np.exp(u[:, None, :] + w[None, :, :]).sum(axis=-1))
    return log


def attend(log, value):
    weights = np.exp(log - log.max(axis=-1, keepdims=True))
    return weights @ value / weights.sum(axis=-1, keepdims=True)


# The map, given its parameters.


@every_map
def test_features_are_the_formula(name):
    phi = MAPS[name]
    query, key, _ = sequence(3)
    assert_allclose(phi.estimate(query, key), np.exp(dense(phi, query, key)), rtol=1e-12)
    assert_array_equal(phi.mean(query, key), phi.estimate(query, key))
    assert_array_equal(phi.variance(query, key), 0)
    logits = query @ key.swapaxes(-1, -2) * SCALE
    assert_allclose(phi.kernel(query, key), np.exp(logits), rtol=1e-13)


def test_parameters_may_be_shared_by_heads():
    """One key head and a power for all; the biases of each head its own."""
    b, a, alpha = PHI.centroids[:1], PHI.key_weights[:1], PHI.key_bias[:1]
    options = dict(tilt=PHI.tilt, scale=0.3)
    phi = CalibratedFeatures(b[0], PHI.query_bias, a[0], alpha, power=0.8, **options)
    b, a, alpha = (np.repeat(one, HEADS, axis=0) for one in (b, a, alpha))
    power = np.full(HEADS, 0.8)
    full = CalibratedFeatures(b, PHI.query_bias, a, alpha, power=power, **options)
    query, key, _ = sequence(3)
    assert_allclose(phi.estimate(query, key), np.exp(dense(full, query, key)), rtol=1e-12)


# The closed form.


def test_closed_form_is_exact_at_the_mean_query():
    mean = np.concatenate([q for q, _, _ in SAMPLES], axis=-2).mean(axis=-2, keepdims=True)
    key = 3 * sequence(5)[1]
    exact = np.exp(SCALE * mean @ key.swapaxes(-1, -2))
    assert_allclose(PHI.estimate(mean, key), exact, rtol=1e-12)
    assert_allclose(PHI.tilt, SCALE * mean[:, 0], rtol=1e-12)


def test_closed_form_equals_its_equations():
    queries, keys = (np.concatenate([one[i] for one in SAMPLES], axis=-2) for i in (0, 1))
    for h in range(HEADS):
        c, sigma = queries[h].mean(axis=0), np.cov(queries[h].T, bias=True)
        metric = SCALE**2 * sigma + SCALE * 1e-6 * np.eye(DIM)
        b = PHI.centroids[h]
        assert_allclose(PHI.query_bias[h], -SCALE * b @ c, rtol=1e-10)
        assert_allclose(PHI.key_weights[h], b @ metric / 0.05, rtol=1e-10)
        squares = np.einsum("md,de,me->m", b, metric, b)
        assert_allclose(PHI.key_bias[h], -squares / 0.1, rtol=1e-10)
        assert PHI.power[h] == 1
        # Each centroid is the weighted mean of its keys before the last step: in their hull.
        assert_at_most(keys[h].min(axis=0), b.min(axis=0))
        assert_at_most(b.max(axis=0), keys[h].max(axis=0))


def test_pivots_are_those_of_the_matrix():
    rng = np.random.default_rng(6)
    y = rng.standard_normal((25, DIM))
    y[7] = y[3]
    root = rng.standard_normal((DIM, DIM))
    metric = root @ root.T / 20
    difference = y[:, None] - y[None]
    left = np.exp(-np.einsum("ijd,de,ije->ij", difference, metric, difference) / 2)
    expected = []
    for _ in range(9):
        pivot = int(np.argmax(np.diag(left)))
        expected.append(y[pivot])
        left = left - np.outer(left[pivot], left[pivot]) / left[pivot, pivot]
    assert_allclose(_calibration.pivots(y, metric, 9), expected, rtol=1e-12)
    # With as many pivots as keys each is chosen once, coincident ones too.
    every = _calibration.pivots(y, metric, 25)
    assert_array_equal(np.sort(every, axis=0), np.sort(y, axis=0))


def test_centroids_are_weighted_means_of_their_keys():
    rng = np.random.default_rng(7)
    y, weights = rng.standard_normal((30, DIM)), rng.random(30)
    b = np.concatenate([y[:5], y[:1] + 1e6])
    metric = np.diag(rng.random(DIM) + 0.5)
    moved = _calibration.cluster_means(y, weights, metric, b)
    distances = ((y[:, None] - b[None]) ** 2) @ np.diag(metric)
    nearest = distances.argmin(axis=-1)
    for c in range(5):
        mine = nearest == c
        assert_allclose(moved[c], np.average(y[mine], axis=0, weights=weights[mine]), rtol=1e-12)
    assert_array_equal(moved[5], b[5])


@pytest.mark.parametrize("is_causal", [False, True])
def test_importance_is_attention_outside_the_window(is_causal):
    query, key, _ = sequence(8, 12)
    sample = Sample(query, key, None)
    found = _calibration.importance(sample, _calibration.Pattern(3, is_causal))
    logits = query @ key.swapaxes(-1, -2)
    for h in range(HEADS):
        total = np.zeros(12)
        for i in range(12):
            seen = range(i + 1) if is_causal else range(12)
            row = np.exp([logits[h, i, j] for j in seen])
            for j in seen:
                if abs(i // 3 - j // 3) > 1:
                    total[j] += (row[j] / row.sum()) ** 2
        assert_allclose(found[h], np.sqrt(total / 12), rtol=1e-12)


def test_the_scale_is_that_of_the_logits():
    """A scale is the same as scaled queries, and the default is ``1 / sqrt(d)``."""
    assert PHI.scale == SCALE
    factor = 2.5
    scaled = [(q * factor, k, v) for q, k, v in SAMPLES]
    one = CalibratedFeatures.calibrate(SAMPLES, num_features=M, scale=factor * SCALE)
    two = CalibratedFeatures.calibrate(scaled, num_features=M)
    query, key, _ = sequence(3)
    first, second = one.estimate(query, key), two.estimate(query * factor, key)
    assert_allclose(first, second, rtol=1e-4)  # the ridge of 1e-6 is on the scaled covariance


def test_one_sample_is_a_list_of_one_and_values_do_not_matter():
    one = SAMPLES[1]
    phi = CalibratedFeatures.calibrate([one], num_features=M)
    assert phi == CalibratedFeatures.calibrate(one, num_features=M)
    assert phi == CalibratedFeatures.calibrate(list(one[:2]), num_features=M)
    assert phi != PHI


@pytest.mark.parametrize("learn", [False, True])
def test_query_heads_that_share_a_key_head_share_its_map(learn):
    query, key, value = sequence(11, 20, query_heads=(2, 4), key_heads=(2, 1))
    options = dict(num_features=M, learn=learn, num_steps=3, bandwidth=0.3)
    phi = CalibratedFeatures.calibrate((query, key, value), **options)
    assert phi.centroids.shape == (2, 1, M, DIM)
    for h in range(2):
        flat = query[h].reshape(1, -1, DIM)
        assert_allclose(pool_heads(query, (2, 1))[h], flat)
    out = linattn.linear_attention(query, key, value, phi)
    assert out.shape == (2, 4, 20, VALUE_DIM)
    for g in range(4):
        names = ("centroids", "query_bias", "key_weights", "key_bias", "tilt", "power")
        of_keys = CalibratedFeatures(**{name: getattr(phi, name)[:, 0] for name in names})
        log = dense(of_keys, query[:, g], key[:, 0])
        assert_allclose(out[:, g], attend(log, value[:, 0]), rtol=0, atol=1e-12)


def test_queries_without_heads_serve_all_heads_of_keys():
    query, key, _ = sequence(11, 20, query_heads=())
    pooled = pool_heads(query, (HEADS,))
    assert_array_equal(pooled, np.broadcast_to(query, (HEADS, 20, DIM)))
    phi = CalibratedFeatures.calibrate((query, key), num_features=M)
    each = CalibratedFeatures.calibrate((pooled, key), num_features=M)
    for name in phi._parameters:
        # Equal to rounding: heads that share queries are one product, heads of their own are not.
        assert_allclose(getattr(phi, name), getattr(each, name), rtol=1e-12)


def test_samples_come_from_every_library(xp):
    samples = [tuple(xp.array(a, "float64") for a in one) for one in SAMPLES]
    phi = CalibratedFeatures.calibrate(samples, num_features=M)
    for name in PHI._parameters:
        assert_allclose(getattr(phi, name), getattr(PHI, name), rtol=1e-12)


# Learning.


def exact_loss(parameters, sample, window, is_causal):
    """Written out pair by pair."""
    b, beta, a, alpha, eta, t = parameters
    x, y, v = sample
    losses = np.zeros(len(x))
    for h in range(len(x)):
        n = len(x[h])
        exact, approximate = np.zeros((2, n, n))
        for i in range(n):
            for j in range(i + 1 if is_causal else n):
                exact[i, j] = approximate[i, j] = np.exp(x[h, i] @ y[h, j])
                if window is None or abs(i // window - j // window) > 1:
                    phi = np.exp(b[h] @ x[h, i] + beta[h])
                    z = np.exp(a[h] @ y[h, j] + alpha[h])
                    psi = z / z.sum() ** eta[h, 0] * np.exp(t[h] @ y[h, j])
                    approximate[i, j] = phi @ psi
        exact /= exact.sum(axis=-1, keepdims=True)
        approximate /= approximate.sum(axis=-1, keepdims=True)
        error = np.linalg.norm((approximate - exact) @ v[h]) / np.linalg.norm(exact @ v[h])
        seen = exact > 0
        divergence = np.sum(exact[seen] * np.log(exact[seen] / approximate[seen])) / n
        losses[h] = error + 0.1 * divergence
    return losses


def random_parameters(rng, lead, m=5):
    shapes = ((m, DIM), (m,), (m, DIM), (m,), (1,), (DIM,))
    return _calibration.Parameters(*(0.5 * rng.standard_normal((*lead, *s)) for s in shapes))


settings = pytest.mark.parametrize(
    ("window", "is_causal"), [(None, False), (None, True), (3, False), (2, True)]
)


@settings
def test_the_loss_is_the_one_stated(window, is_causal):
    sample = Sample(*sequence(12, 13))
    parameters = random_parameters(np.random.default_rng(13), (HEADS,))
    pattern = _calibration.Pattern(window, is_causal)
    loss, _ = _calibration.loss_and_gradient(parameters, sample, pattern)
    assert_allclose(loss, exact_loss(parameters, sample, window, is_causal), rtol=1e-11)


@settings
@pytest.mark.parametrize("heads", [((3,), (3,)), ((2, 3), (2, 1)), ((3,), ()), ((), (2,))])
def test_the_gradient_is_the_slope_of_the_loss(window, is_causal, heads):
    rng = np.random.default_rng(14)
    sample = Sample(*sequence(15, 11, *heads))
    parameters = random_parameters(rng, heads[1])

    def loss(p):
        return _calibration.loss_and_gradient(p, sample, _calibration.Pattern(window, is_causal))

    gradient = loss(parameters)[1]
    for name in parameters._fields:
        place, slope = getattr(parameters, name), getattr(gradient, name)
        assert slope.shape == place.shape
        # Along itself, in part, so that the slope is not small beside its parts.
        direction = slope / np.linalg.norm(slope) + 0.1 * rng.standard_normal(place.shape)
        step = 1e-4
        far, near = (
            [loss(parameters._replace(**{name: place + f * step * direction}))[0].sum() for f in fs]
            for fs in ((-2, 2), (-1, 1))
        )
        measured = (8 * (near[1] - near[0]) - (far[1] - far[0])) / (12 * step)
        assert_allclose(measured, np.sum(slope * direction), rtol=1e-6)


@settings
def test_learning_lowers_the_loss(window, is_causal):
    samples = [sequence(seed, length) for seed, length in ((20, 24), (21, 31), (22, 24))]
    options = dict(num_features=M, exact_window=window, is_causal=is_causal)
    seen = []
    learned = CalibratedFeatures.calibrate(
        samples,
        learn=True,
        num_steps=40,
        rng=0,
        callback=lambda step, loss: seen.append((step, loss)),
        **options,
    )
    assert [step for step, _ in seen] == list(range(1, 41))
    start = CalibratedFeatures.calibrate(samples, bandwidth=0.5, **options)

    def loss(phi):
        total = 0.0
        root = np.sqrt(phi.scale)
        found = (
            phi.centroids * root,
            phi.query_bias,
            phi.key_weights / root,
            phi.key_bias,
            phi.power[:, None],
            phi.tilt / root,
        )
        for q, k, v in samples:
            total += exact_loss(found, (root * q, root * k, v), window, is_causal).mean()
        return total / len(samples)

    before, after = loss(start), loss(learned)
    assert after < 0.9 * before
    assert abs(seen[0][1] - before) < 0.2 * before
    assert learned.causal


def test_learning_is_reproducible_and_float32_is_close_to_float64():
    options = dict(num_features=M, learn=True, num_steps=4, batch_size=1)
    one, two = (CalibratedFeatures.calibrate(SAMPLES[:2], rng=3, **options) for _ in range(2))
    assert one == two
    sample = Sample(*sequence(15, 30))
    parameters = random_parameters(np.random.default_rng(14), (HEADS,))
    results = []
    for dtype in (np.float32, np.float64):
        p = _calibration.Parameters(*(a.astype(dtype) for a in parameters))
        s = Sample(*(np.asarray(a, dtype=dtype) for a in sample))
        loss, gradient = _calibration.loss_and_gradient(p, s, _calibration.Pattern(5, True))
        assert loss.dtype == gradient.b.dtype == dtype
        results.append((loss, *gradient))
    for narrow, wide in zip(*results, strict=True):
        assert_allclose(narrow, wide, rtol=0, atol=1e-4 * np.abs(wide).max())


# The object.


def test_save_and_load(tmp_path):
    path = tmp_path / "map.bin"
    headless = CalibratedFeatures.calibrate(
        (SAMPLES[1][0][0], SAMPLES[1][1][0]), num_features=M, scale=0.3
    )
    for phi in (PHI, headless, LEARNED):
        phi.save(path)
        loaded = CalibratedFeatures.load(path)
        assert loaded == phi
        assert loaded.fingerprint() == phi.fingerprint()
        for name in phi._parameters:
            assert_array_equal(getattr(loaded, name), getattr(phi, name))
    assert [p.name for p in tmp_path.iterdir()] == ["map.bin"]
    with np.load(path, allow_pickle=False) as archive:
        assert set(archive.files) == {"format_version", *PHI._parameters}


def test_files_that_are_not_maps(tmp_path):
    path = tmp_path / "map.npz"
    said = "not a linattn CalibratedFeatures file"
    arrays = {name: np.asarray(getattr(PHI, name)) for name in PHI._parameters}

    def refuse(match, **changes):
        np.savez(path, **({"format_version": np.int64(1)} | arrays | changes))
        with pytest.raises(ValueError, match=f"{said}.*{match}"):
            CalibratedFeatures.load(path)

    refuse("format version 2, this linattn reads 1", format_version=np.int64(2))
    refuse("must hold the arrays", more=np.zeros(2))
    refuse("scale must be a positive finite number", scale=np.float64(-1))
    refuse("tilt must be finite", tilt=np.full((HEADS, DIM), np.nan))
    refuse("query_bias must have last axes", query_bias=np.zeros((HEADS, M + 1)))
    refuse("power has dtype int64", power=np.ones(HEADS, dtype=np.int64))
    refuse("leading axes must broadcast", power=np.ones(HEADS + 1))
    refuse("tilt has dtype object", tilt=np.array([None], dtype=object))
    PHI.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=said):
        CalibratedFeatures.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("scale.npy", b"")
    with pytest.raises(ValueError, match=said):
        CalibratedFeatures.load(path)
    with pytest.raises(FileNotFoundError):
        CalibratedFeatures.load(tmp_path / "none")


def test_maps_are_values():
    assert (PHI.positive, PHI.unbiased, PHI.softmax_kernel, PHI.causal) == (True, False, True, True)
    assert (PHI.dim, PHI.num_features) == (DIM, M)
    assert LEARNED != PHI
    assert LEARNED.fingerprint() != PHI.fingerprint()


def parameters_of(**changes):
    names = ("centroids", "query_bias", "key_weights", "key_bias", "tilt")
    return {name: getattr(PHI, name) for name in names} | changes


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"centroids": np.ones(3)}, ValueError, r"centroids must have shape \(..., num_features"),
        ({"query_bias": np.ones(7)}, ValueError, r"query_bias must have last axes \(8,\), got"),
        ({"key_weights": np.ones((8, 5))}, ValueError, r"key_weights must have last axes \(8, 6\)"),
        ({"key_bias": 1.0}, ValueError, r"key_bias must have last axes \(8,\), got shape \(\)"),
        ({"tilt": np.full(6, np.inf)}, ValueError, "tilt must be finite"),
        ({"power": np.ones(4)}, ValueError, "leading axes must broadcast"),
        ({"scale": 0.0}, ValueError, "scale must be a positive finite number"),
        ({"scale": "1"}, TypeError, "scale must be a real number"),
    ],
)
def test_bad_parameters(changes, error, said):
    with pytest.raises(error, match=said):
        CalibratedFeatures(**parameters_of(**changes))


NAN = np.full((HEADS, 5, DIM), np.nan)
INTEGERS = np.ones((HEADS, 20, DIM), dtype=np.int64)


@pytest.mark.parametrize(
    ("samples", "options", "error", "said"),
    [
        (3, {}, TypeError, "samples must be a list of sequences, each a tuple"),
        ([SAMPLES[0][0]], {}, TypeError, "samples must be a list of sequences, each a tuple"),
        ([], {}, ValueError, "samples must hold at least one sequence"),
        (([[1.0]], [[1.0]]), {}, TypeError, "samples must be a list"),
        ([SAMPLES[0], SAMPLES[1][:2]], {}, ValueError, r"the same leading axes.*samples\[1\]"),
        ([SAMPLES[0], tuple(a[0] for a in SAMPLES[1])], {}, ValueError, "the same leading axes"),
        ((SAMPLES[0][0], NAN), {}, ValueError, r"samples\[0\] key must be finite.*leave masked"),
        ((SAMPLES[0][0], SAMPLES[0][1][..., :3]), {}, ValueError, "query and key of one dim"),
        ((SAMPLES[0][0], SAMPLES[0][1], SAMPLES[1][2]), {}, ValueError, "key and value of one le"),
        ((NAN[:, :0], NAN[:, :0]), {}, ValueError, "at least one token"),
        ((INTEGERS, INTEGERS), {}, TypeError, "must have dtype"),
        ((SAMPLES[0][0][:2], SAMPLES[0][1]), {}, ValueError, "leading axes must broadcast"),
        (
            SAMPLES[0],
            {"num_features": 31},
            ValueError,
            "at most the 30 keys of the samples, got 31",
        ),
        (SAMPLES[0], {"num_features": 0}, ValueError, "num_features must be at least 1"),
        (SAMPLES[0], {"exact_window": 0}, ValueError, "exact_window must be at least 1"),
        (SAMPLES[0], {"bandwidth": 0.0}, ValueError, "bandwidth must be a positive"),
        (SAMPLES[0], {"num_steps": 0}, ValueError, "num_steps must be at least 1"),
        (SAMPLES[0], {"batch_size": 1.5}, TypeError, "batch_size must be a positive integer"),
        (SAMPLES[0], {"learning_rate": -1.0}, ValueError, "learning_rate must be a positive"),
        (SAMPLES[0], {"scale": np.nan}, ValueError, "scale must be a positive finite"),
        (
            SAMPLES[0][:2],
            {"learn": True},
            ValueError,
            r"samples\[0\] must be \(query, key, value\)",
        ),
        (
            (SAMPLES[0][0], SAMPLES[1][1]),
            {"is_causal": True},
            ValueError,
            "as many queries as keys with is_causal, got 30 and 50",
        ),
    ],
)
def test_bad_samples_and_options(samples, options, error, said):
    with pytest.raises(error, match=said):
        CalibratedFeatures.calibrate(samples, **({"num_features": M} | options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_learning_that_diverges_says_so():
    options = dict(num_features=M, learn=True, num_steps=20, learning_rate=1e30)
    with pytest.raises(ValueError, match="learning_rate must be small enough to converge"):
        CalibratedFeatures.calibrate(SAMPLES[0], **options)


def test_without_a_window_the_far_pairs_are_all_pairs():
    """A window as long as the sequence leaves nothing to learn: the gradient is 0."""
    sample = Sample(*sequence(15, 8))
    parameters = random_parameters(np.random.default_rng(14), (HEADS,))
    pattern = _calibration.Pattern(4, False)
    loss, gradient = _calibration.loss_and_gradient(parameters, sample, pattern)
    assert_allclose(loss, 0, atol=1e-12)
    assert not any(g.any() for g in gradient)
