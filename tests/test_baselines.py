"""Published attentions against their own dense formulas, written out pair by pair in loops."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, var-annotated"

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_array_less

from linattn import baselines
from tests.attentions import assert_at_most

L, D, E = 22, 5, 4
TOLERANCE = 1e-10

# No backend has a say here: NumPy once; Dask and all others are in test_scale_and_dtypes.
libraries = pytest.mark.parametrize(
    "xp",
    [
        "numpy",
        "array-api-strict",
        pytest.param("torch", marks=pytest.mark.frameworks),
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def arrays():
    """Two heads; query, key and value."""
    rng = np.random.default_rng(11)
    shapes = ((2, L, D), (2, L, D), (2, L, E))
    return tuple(1.5 * rng.standard_normal(shape) for shape in shapes)


def check(xp, call, given, expected, **parameters):
    """The function, in this library, is the dense formula."""
    given = [None if x is None else xp.array(x) for x in given]
    options = {n: xp.array(p) if isinstance(p, np.ndarray) else p for n, p in parameters.items()}
    out = call(*given, **options)
    xp.assert_like(out, given[-1], shape=expected.shape)
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=TOLERANCE)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def by_pairs(q, k, v, sees, scale=None):
    """Softmax attention of each query to the keys that ``sees(i, j)`` names, in Python."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for head in np.ndindex(q.shape[:-2]):
        for i, x in enumerate(q[head]):
            chosen = [j for j in range(k.shape[-2]) if sees(i, j)]
            if chosen:
                weights = softmax(np.array([scale * np.dot(x, k[head][j]) for j in chosen]))
                out[(*head, i)] = sum(w * v[head][j] for w, j in zip(weights, chosen, strict=True))
    return out


def runs(length, num):
    """Runs of tokens of nearly one length: which run each token is in."""
    members = [[] for _ in range(num)]
    for i in range(length):
        members[i * num // length].append(i)
    return members


# Patterns ---------------------------------------------------------------------------------------


PATTERNS = {
    "window": (
        baselines.local_window,
        {"window_size": 3},
        lambda i, j: abs(i - j) <= 3,
    ),
    "window, causal": (
        baselines.local_window,
        {"window_size": 3, "is_causal": True},
        lambda i, j: i - 3 <= j <= i,
    ),
    "window of itself": (baselines.local_window, {"window_size": 0}, lambda i, j: i == j),
    "window beyond the ends": (baselines.local_window, {"window_size": 99}, lambda i, j: True),
    "strided": (
        baselines.strided,
        {"stride": 5},
        lambda i, j: j <= i and (i - j <= 5 or (i - j) % 5 == 0),
    ),
    "stride 1": (baselines.strided, {"stride": 1}, lambda i, j: j <= i),
    "long stride": (baselines.strided, {"stride": 40}, lambda i, j: j <= i),
    "fixed": (
        baselines.fixed,
        {"stride": 6, "num_summary": 2},
        lambda i, j: j <= i and (i // 6 == j // 6 or j % 6 >= 4),
    ),
    "longformer": (
        baselines.longformer,
        {"window_size": 2, "num_global": 3},
        lambda i, j: abs(i - j) <= 2 or min(i, j) < 3,
    ),
    "longformer without global tokens": (
        baselines.longformer,
        {"window_size": 2, "num_global": 0},
        lambda i, j: abs(i - j) <= 2,
    ),
    "longformer, all global": (
        baselines.longformer,
        {"window_size": 0, "num_global": L},
        lambda i, j: True,
    ),
    "bigbird without random blocks": (
        baselines.bigbird,
        {"block_size": 4, "num_global": 1, "num_random": 0},
        lambda i, j: abs(i // 4 - j // 4) <= 1 or min(i, j) < 4,
    ),
}


@libraries
@pytest.mark.parametrize(("call", "options", "sees"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(xp, arrays, call, options, sees):
    check(xp, call, arrays, by_pairs(*arrays, sees), **options)


@libraries
def test_random_blocks(xp, arrays):
    """Those of BigBird are found by attention to indicators; then it is attention to them."""
    options = {"block_size": 3, "num_global": 1, "num_random": 2, "rng": 4}
    indicators = np.broadcast_to(np.eye(L), (2, L, L))
    weights = baselines.bigbird(*arrays[:2], indicators, **options)[0]
    num_blocks = -(-L // 3)
    for block in range(1, num_blocks):
        rows = weights[3 * block : 3 * block + 3] > 0
        assert_array_equal(rows, np.broadcast_to(rows[0], rows.shape))
        seen = {j // 3 for j in np.flatnonzero(rows[0])}
        near = {0, block - 1, block, min(block + 1, num_blocks - 1)}
        assert near <= seen
        assert len(seen) == len(near) + 2
        assert rows[0].sum() == sum(min(3, L - 3 * b) for b in seen)
    assert_array_less(0, weights[:3])
    assert len({tuple(row > 0) for row in weights}) > 3
    expected = by_pairs(*arrays, lambda i, j: weights[i, j] > 0)
    check(xp, baselines.bigbird, arrays, expected, **options)


# Projections and landmarks ----------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("kind", ["mean", "random", "given", "given twice"])
def test_linformer(xp, arrays, kind):
    q, k, v = arrays
    rng = np.random.default_rng(3)
    m = 6
    E_ = np.zeros((m, L))
    options = {"num_landmarks": m, "projection": kind}
    if kind == "mean":
        for row, members in zip(E_, runs(L, m), strict=True):
            row[members] = 1 / len(members)
    elif kind == "random":
        E_ = np.random.default_rng(8).standard_normal((m, L)) / np.sqrt(m)
        options["rng"] = 8
    else:
        E_ = rng.standard_normal((m, L))
        options = {"projection": E_}
    F = E_
    if kind == "given twice":
        options["value_projection"] = F = rng.standard_normal((2, m, L))
    keys = np.einsum("cj,hjd->hcd", E_, k)
    values = np.einsum("hcj,hjd->hcd", np.broadcast_to(F, (2, m, L)), v)
    expected = by_pairs(q, keys, values, lambda i, j: True)
    check(xp, baselines.linformer, arrays, expected, **options)


@libraries
@pytest.mark.parametrize("iterations", [1, 6])
def test_nystromformer(xp, arrays, iterations):
    q, k, v = arrays
    m = 4
    expected = np.zeros((2, L, E))
    for h in range(2):
        means = [np.array([x[h][run].mean(axis=0) for run in runs(L, m)]) for x in (q, k)]

        def weights(x, y):
            return np.array([softmax(row) for row in x @ y.T / np.sqrt(D)])

        first, A, last = (
            weights(q[h], means[1]),
            weights(means[0], means[1]),
            weights(means[0], k[h]),
        )
        Z = A.T / (np.abs(A).sum(axis=0).max() * np.abs(A).sum(axis=1).max())
        for _ in range(iterations):
            inner = 7 * np.eye(m) - A @ Z
            Z = Z @ (13 * np.eye(m) - A @ Z @ (15 * np.eye(m) - A @ Z @ inner)) / 4
        expected[h] = first @ Z @ last @ v[h]
    options = {"num_landmarks": m, "num_iterations": iterations}
    check(xp, baselines.nystromformer, arrays, expected, **options)


# Synthesizers -----------------------------------------------------------------------------------


def mixed(logits, value, is_causal):
    out = np.zeros((*logits.shape[:-1], value.shape[-1]))
    for row in np.ndindex(logits.shape[:-1]):
        stop = row[-1] + 1 if is_causal else logits.shape[-1]
        out[row] = softmax(logits[row][:stop]) @ value[row[:-1]][:stop]
    return out


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_synthesizer(xp, arrays, is_causal):
    x, _, value = arrays
    rng = np.random.default_rng(5)
    W1, b1, W2, b2 = (rng.standard_normal(s) for s in ((7, D), (7,), (L, 7), (L,)))
    logits = np.zeros((2, L, L))
    for h, i, j in np.ndindex(2, L, L):
        hidden = [max(float(np.dot(W1[c], x[h, i]) + b1[c]), 0.0) for c in range(7)]
        logits[h, i, j] = np.dot(W2[j], hidden) + b2[j]
    options = {"hidden_weight": W1, "hidden_bias": b1, "weight": W2, "bias": b2}
    expected = mixed(logits, value, is_causal)
    call = baselines.dense_synthesizer
    check(xp, call, (x, value), expected, is_causal=is_causal, **options)


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
def test_factorized_dense_synthesizer(xp, arrays, is_causal):
    x, _, value = arrays
    first, second = np.random.default_rng(6).standard_normal((2, 11, D))
    second = second[:2]
    logits = np.zeros((2, L, L))
    for h, i, j in np.ndindex(2, L, L):
        logits[h, i, j] = np.dot(first[j % 11], x[h, i]) * np.dot(second[j // 11], x[h, i])
    options = {"first_weight": first, "second_weight": second, "is_causal": is_causal}
    expected = mixed(logits, value, is_causal)
    check(xp, baselines.factorized_dense_synthesizer, (x, value), expected, **options)


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
def test_random_synthesizers(xp, arrays, is_causal):
    value = arrays[2]
    left, right = np.random.default_rng(7).standard_normal((2, 2, L, 3))
    logits = np.einsum("hik,hjk->hij", left, right)
    expected = mixed(logits, value, is_causal)
    options = {"is_causal": is_causal}
    check(xp, baselines.random_synthesizer, (value,), expected, logits=logits, **options)
    options |= {"left": left, "right": right}
    check(xp, baselines.factorized_random_synthesizer, (value,), expected, **options)


# Attention-free transformers --------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("kind", ["full", "local", "simple"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_free(xp, arrays, kind, is_causal):
    rng = np.random.default_rng(9)
    q, k, v = (2 * rng.standard_normal((2, L, E)) for _ in range(3))
    bias = rng.standard_normal((L, L))
    used = {
        "full": bias,
        "local": np.where(np.abs(np.subtract.outer(range(L), range(L))) < 4, bias, 0.0),
        "simple": np.zeros((L, L)),
    }[kind]
    expected = np.zeros((2, L, E))
    for h, i, c in np.ndindex(2, L, E):
        stop = i + 1 if is_causal else L
        weights = np.exp(k[h, :stop, c] + used[i, :stop])
        mean = float(np.sum(weights * v[h, :stop, c]) / np.sum(weights))
        expected[h, i, c] = mean / (1 + np.exp(-q[h, i, c]))
    call, options = {
        "full": (baselines.aft_full, {"position_bias": bias}),
        "local": (baselines.aft_local, {"position_bias": bias, "window_size": 4}),
        "simple": (baselines.aft_simple, {}),
    }[kind]
    check(xp, call, (q, k, v), expected, is_causal=is_causal, **options)


# Memories ---------------------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize(("memory_size", "compressed_size"), [(4, 2), (0, 3), (8, 0), (4, 50)])
def test_compressive(xp, arrays, memory_size, compressed_size):
    q, k, v = arrays
    size, rate = 4, 2
    expected = np.zeros((2, L, E))
    for h, i in np.ndindex(2, L):
        begin = i // size * size
        oldest = max(0, begin - memory_size)
        recent = range(oldest, i + 1)
        pooled = [range(a, a + rate) for a in range(0, oldest, rate)]
        pooled = pooled[max(0, len(pooled) - compressed_size) :]
        keys = [k[h, list(run)].mean(axis=0) for run in pooled] + [k[h, j] for j in recent]
        values = [v[h, list(run)].mean(axis=0) for run in pooled] + [v[h, j] for j in recent]
        expected[h, i] = softmax(np.array(keys) @ q[h, i] / np.sqrt(D)) @ np.array(values)
    options = {"block_size": size, "memory_size": memory_size, "rate": rate}
    call = baselines.compressive
    check(xp, call, arrays, expected, compressed_size=compressed_size, **options)


@libraries
def test_external_memory(xp, arrays):
    query = arrays[0]
    rng = np.random.default_rng(10)
    keys, values = rng.standard_normal((3, D)), rng.standard_normal((3, E))
    expected = np.zeros((2, L, E))
    for h in range(2):
        columns = np.array([softmax(query[h] @ key) for key in keys]).T
        expected[h] = [row / row.sum() @ values for row in columns]
    options = {"key_memory": keys, "value_memory": values}
    check(xp, baselines.external, (query,), expected, **options)


# Bounds -----------------------------------------------------------------------------------------


def weights_of(q, k, is_causal):
    logits = q @ np.swapaxes(k, -1, -2) / np.sqrt(D)
    if is_causal:
        logits = np.where(np.tri(L) > 0, logits, -np.inf)
    return np.array([[softmax(row) for row in head] for head in logits])


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
def test_truncated_svd(xp, arrays, is_causal):
    """From the eigenvectors of P P^T, which are the left singular vectors."""
    q, k, v = arrays
    weights, rank = weights_of(q, k, is_causal), 7
    expected = np.zeros((2, L, E))
    for h, P in enumerate(weights):
        _, vectors = np.linalg.eigh(P @ P.T)
        expected[h] = vectors[:, -rank:] @ vectors[:, -rank:].T @ P @ v[h]
    check(xp, baselines.truncated_svd, arrays, expected, rank=rank, is_causal=is_causal)


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
def test_top_k(xp, arrays, is_causal):
    q, k, v = arrays
    weights = weights_of(q, k, is_causal)
    ranks = [[sorted(range(L), key=lambda j, p=p: -p[j])[:6] for p in head] for head in weights]
    expected = np.zeros((2, L, E))
    for h, i in np.ndindex(2, L):
        chosen = [j for j in ranks[h][i] if weights[h, i, j] > 0]
        expected[h, i] = weights[h, i, chosen] @ v[h, chosen] / weights[h, i, chosen].sum()
    check(xp, baselines.top_k, arrays, expected, num_keys=6, is_causal=is_causal)


def test_bounds_are_bounds(arrays):
    """No landmark method of rank r is nearer to the weights than the truncated SVD."""
    q, k, _ = arrays
    truth = weights_of(q, k, is_causal=False)
    indicators = np.broadcast_to(np.eye(L), (2, L, L))

    def distance(call, **options):
        return np.linalg.norm(call(q, k, indicators, **options) - truth, axis=(-2, -1))

    bound = distance(baselines.truncated_svd, rank=6)
    assert_array_less(bound, distance(baselines.linformer, num_landmarks=6))
    assert_array_less(bound, distance(baselines.nystromformer, num_landmarks=6))
    assert_array_less(bound, distance(baselines.clustered, num_clusters=6, rng=0))
    kept = [
        np.sum(truth * (call(q, k, indicators, **options) > 0), axis=-1)
        for call, options in (
            (baselines.top_k, {"num_keys": 5}),
            (baselines.local_window, {"window_size": 2}),
        )
    ]
    assert_at_most(kept[1] - 1e-12, kept[0])


def test_scale_and_dtypes(xp, arrays):
    """float32 in, float32 out; float16 is computed in float32; leading axes broadcast."""
    query, key, value = (x[0] for x in arrays)
    value = np.stack([value, -value])[:, None]
    for dtype, tolerance in (("float32", 1e-5), ("float16", 5e-3)):
        given = [xp.array(x, dtype) for x in (query, key, value)]
        out = baselines.top_k(*given, num_keys=4, scale=0.3)
        xp.assert_like(out, given[-1], shape=(2, 1, L, E))
        rounded = [xp.numpy(x).astype(np.float64) for x in given]
        expected = baselines.top_k(*rounded, num_keys=4, scale=0.3)
        assert_allclose(xp.numpy(out), expected, atol=tolerance)


def test_blocks_of_queries_do_not_matter(arrays, monkeypatch):
    whole = baselines.local_window(*arrays, window_size=3)
    monkeypatch.setattr(baselines._shared, "MAX_GATHERED", 300)
    assert_array_equal(baselines.local_window(*arrays, window_size=3), whole)


# Any scale --------------------------------------------------------------------------------------


def attention_free_in_logs(q, k, v, bias):
    logits = bias[:, :, None] + k[None]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    average = np.sum(weights * v, axis=1) / np.sum(weights, axis=1)
    return average * np.exp(-np.logaddexp(0, -q))


def external_in_logs(q, keys, values):
    logs = q @ keys.T
    logs = logs - np.logaddexp.reduce(logs, axis=0)
    return np.exp(logs - np.logaddexp.reduce(logs, axis=1)[:, None]) @ values


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 40),
    log_scale=st.floats(-1, 2),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_any_scale_of_inputs(seed, length, log_scale, dtype):
    """Weights that leave the range of exponentials are those of the formula in logs."""
    rng = np.random.default_rng(seed)
    q, k = (10**log_scale * rng.standard_normal((2, length, 3))).astype(dtype)
    bias = (10**log_scale * rng.standard_normal((length, length))).astype(dtype)
    v = rng.standard_normal((length, 3)).astype(dtype)
    Q, K, V, B = (x.astype(np.float64) for x in (q, k, v, bias))
    found = {
        "AFT": (
            baselines.aft_full(q, k, v, position_bias=bias),
            attention_free_in_logs(Q, K, V, B),
        ),
        "causal AFT": (
            baselines.aft_full(q, k, v, position_bias=bias, is_causal=True),
            attention_free_in_logs(Q, K, V, np.where(np.tri(length) > 0, B, -np.inf)),
        ),
        "external": (
            baselines.external(q, key_memory=k, value_memory=v),
            external_in_logs(Q, K, V),
        ),
        "WildCat with every key": (
            baselines.wildcat(q, k, v, num_keys=length, rng=0),
            by_pairs(Q, K, V, lambda i, j: True),
        ),
    }
    tolerance = 1e-2 if dtype == "float16" else 1e-5 * (3 + 10 ** (2 * log_scale))
    for name, (out, expected) in found.items():
        assert_allclose(out.astype(np.float64), expected, atol=tolerance, err_msg=name)


def test_a_later_key_moves_no_earlier_row():
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 6, 2), dtype=np.float32)
    bias = rng.standard_normal((6, 6), dtype=np.float32)
    longer = k.copy()
    longer[-1] = 200
    for call, options in (
        (baselines.aft_full, {"position_bias": bias}),
        (baselines.aft_local, {"position_bias": bias, "window_size": 2}),
        (baselines.aft_simple, {}),
    ):
        rows = [call(q, key, v, **options, is_causal=True)[:-1] for key in (k, longer)]
        assert_array_equal(*rows)


def test_a_query_without_a_visible_pair_gets_zero():
    bias = np.where(np.arange(L)[:, None] == 3, -np.inf, np.zeros((L, L)))
    x = np.ones((L, E))
    out = baselines.aft_full(x, x, x, position_bias=bias)
    assert_array_equal(out[3], np.zeros(E))
    assert_array_less(0.5, out[:3])
