"""Published attentions that choose keys by their contents, against loops; and wrong uses of all."""

# mypy: disable-error-code="arg-type, call-arg, call-overload, misc, var-annotated"

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import linattn
from linattn import baselines

L, D, E = 24, 5, 4
TOLERANCE = 1e-10

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
    rng = np.random.default_rng(12)
    return tuple(1.2 * rng.standard_normal(shape) for shape in ((2, L, D), (2, L, D), (2, L, E)))


def check(xp, call, given, expected, **options):
    given = [None if x is None else xp.array(x) for x in given]
    out = call(*given, **options)
    xp.assert_like(out, given[0], shape=expected.shape)
    assert_allclose(xp.numpy(out), expected, rtol=0, atol=TOLERANCE)


def softmax(logits):
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def over(q, k, v, chosen):
    """Softmax attention of one query to chosen keys; 0 for none."""
    chosen = list(chosen)
    if not chosen:
        return np.zeros(v.shape[-1])
    return softmax(k[chosen] @ q / np.sqrt(len(q))) @ v[chosen]


# Clusters of queries ----------------------------------------------------------------------------


def clusters_by_loops(q, num, num_bits, num_steps, seed):
    """Lloyd's algorithm by Hamming distance on bits, in Python."""
    rng = np.random.default_rng(seed)
    projection = rng.standard_normal((q.shape[-1], num_bits))
    first = sorted(rng.permutation(len(q))[:num])
    bits = [[float(np.dot(x, column)) > 0 for column in projection.T] for x in q]
    centroids = [list(bits[i]) for i in first]

    def nearest():
        return [
            min(
                range(num),
                key=lambda c, b=b: sum(x != y for x, y in zip(b, centroids[c], strict=True)),
            )
            for b in bits
        ]

    for _ in range(num_steps):
        labels = nearest()
        for c in range(num):
            members = [b for b, label in zip(bits, labels, strict=True) if label == c]
            for bit in range(num_bits):
                ayes = sum(b[bit] for b in members)
                if 2 * ayes != len(members):
                    centroids[c][bit] = 2 * ayes > len(members)
    return nearest()


@libraries
@pytest.mark.parametrize("num_clusters", [1, 5, L])
def test_clustered(xp, arrays, num_clusters):
    q, k, v = arrays
    expected = np.zeros((2, L, E))
    for h in range(2):
        labels = clusters_by_loops(q[h], num_clusters, 17, 4, seed=3)
        for i in range(L):
            members = [j for j in range(L) if labels[j] == labels[i]]
            expected[h, i] = over(q[h, members].mean(axis=0), k[h], v[h], range(L))
    options = {"num_clusters": num_clusters, "num_bits": 17, "num_steps": 4, "rng": 3}
    check(xp, baselines.clustered, arrays, expected, **options)


@libraries
@pytest.mark.parametrize("num_keys", [1, 6, L])
def test_improved_clustered(xp, arrays, num_keys):
    q, k, v = arrays
    expected = np.zeros((2, L, E))
    for h in range(2):
        labels = clusters_by_loops(q[h], 5, 17, 4, seed=3)
        for i in range(L):
            members = [j for j in range(L) if labels[j] == labels[i]]
            weights = softmax(k[h] @ q[h, members].mean(axis=0) / np.sqrt(D))
            top = sorted(range(L), key=lambda j, w=weights: -w[j])[:num_keys]
            exact = softmax(k[h, top] @ q[h, i] / np.sqrt(D))
            mixed = weights.copy()
            mixed[top] = weights[top].sum() * exact
            expected[h, i] = mixed @ v[h]
    options = {"num_clusters": 5, "num_keys": num_keys, "num_bits": 17, "num_steps": 4, "rng": 3}
    check(xp, baselines.improved_clustered, arrays, expected, **options)


# Hashing ----------------------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_reformer(xp, arrays, is_causal, is_shared, chunk_size):
    q, k, v = arrays
    if is_shared:
        k = q / np.linalg.norm(q, axis=-1, keepdims=True)
    rotations = np.random.default_rng(6).standard_normal((3, D, 2))
    size = 2 * L // 4 if chunk_size is None else chunk_size
    expected = np.zeros((2, L, E))
    for h in range(2):
        chosen = [set() for _ in range(L)]
        for R in rotations:
            buckets = [[int(np.argmax([*(x @ R), *(-x @ R)])) for x in y[h]] for y in (q, k)]
            orders = [sorted(range(L), key=lambda i, b=b: (b[i], i)) for b in buckets]
            chunk_of = [{t: place // size for place, t in enumerate(order)} for order in orders]
            for i in range(L):
                chosen[i] |= {
                    j
                    for j in range(L)
                    if buckets[0][i] == buckets[1][j]
                    and chunk_of[1][j] in (chunk_of[0][i], chunk_of[0][i] - 1)
                }
        for i in range(L):
            keys = {j for j in chosen[i] if j <= i} if is_causal else chosen[i]
            if is_shared and len(keys) > 1:
                keys = keys - {i}
            expected[h, i] = over(q[h, i], k[h], v[h], sorted(keys))
    options = {"num_buckets": 4, "num_rounds": 3, "chunk_size": chunk_size, "rng": 6}
    given = (q, None if is_shared else k, v)
    check(xp, baselines.reformer, given, expected, is_causal=is_causal, **options)


# Routing ----------------------------------------------------------------------------------------


def normal(x):
    centred = x - np.mean(x)
    return centred / np.sqrt(np.mean(centred**2))


def routes_by_loops(q, k, num, size, steps, seed):
    """For each cluster its queries and keys."""
    tokens = [normal(x) for x in (*q, *k)]
    first = np.random.default_rng(seed).permutation(2 * len(q))[:num]
    centroids = [tokens[i] for i in first]
    for _ in range(steps):
        nearest = [max(range(num), key=lambda c, x=x: np.dot(x, centroids[c])) for x in tokens]
        for c in range(num):
            members = [x for x, label in zip(tokens, nearest, strict=True) if label == c]
            if members:
                centroids[c] = normal(np.mean(members, axis=0))
    sides = tokens[: len(q)], tokens[len(q) :]
    return [
        [
            sorted(range(len(q)), key=lambda i, s=side, c=c: -np.dot(s[i], c))[:size]
            for side in sides
        ]
        for c in centroids
    ]


@libraries
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [None, 4])
def test_routing(xp, arrays, is_causal, size):
    q, k, v = arrays
    expected = np.zeros((2, L, E))
    for h in range(2):
        found = [[] for _ in range(L)]
        for queries, keys in routes_by_loops(q[h], k[h], 5, size or 5, 3, seed=2):
            for i in queries:
                seen = [j for j in keys if not is_causal or j <= i]
                if seen:
                    found[i].append(over(q[h, i], k[h], v[h], seen))
        for i, outputs in enumerate(found):
            expected[h, i] = np.mean(outputs, axis=0) if outputs else 0
    options = {"num_clusters": 5, "cluster_size": size, "num_steps": 3, "rng": 2}
    check(xp, baselines.routing, arrays, expected, is_causal=is_causal, **options)


# Thinning ---------------------------------------------------------------------------------------


def wildcat_by_loops(q, k, v, num, tau, rng):
    """Residuals from the Schur complement anew for each key; weights by a solved system."""
    length, k = len(k), k - k.mean(axis=0)
    scale = 1 / math.sqrt(D)
    if tau is None:
        longest = [max(np.linalg.norm(x) for x in y) for y in (k, q)]
        tau = math.sqrt(3.94582 * longest[0] / longest[1])
    kernel = np.array([[math.exp(scale * np.dot(a, b) / tau**2) for b in k] for a in k])
    drawn = []
    for _ in range(num):
        left = kernel.diagonal().copy()
        if drawn:
            inner, cross = kernel[np.ix_(drawn, drawn)], kernel[drawn]
            left -= np.sum(cross * np.linalg.solve(inner, cross), axis=0)
        odds = np.log(np.maximum(left, 1e-300)) + rng.gumbel(size=length)
        odds[drawn] = -np.inf
        drawn.append(int(np.argmax(odds)))
    W = np.linalg.solve(kernel[np.ix_(drawn, drawn)], kernel[drawn])
    out = np.zeros((len(q), v.shape[-1]))
    for i, x in enumerate(q):
        scores = np.exp(scale * k[drawn] @ x)
        denominator = scores @ W.sum(axis=1)
        if denominator > 0:
            out[i] = scores @ W @ v / denominator
    return np.clip(out, v.min(axis=0), v.max(axis=0))


@libraries
@pytest.mark.parametrize("temperature", [None, 1.3])
def test_wildcat(xp, arrays, temperature):
    expected = np.array(
        [
            wildcat_by_loops(*head, 7, temperature, np.random.default_rng(4))
            for head in zip(*arrays, strict=True)
        ]
    )
    options = {"num_keys": 7, "temperature": temperature, "rng": 4}
    check(xp, baselines.wildcat, arrays, expected, **options)


def test_wildcat_stays_within_the_values():
    """Long keys: Nyström weights leave the range, and then clipped rows hold its ends."""
    ends = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        query, key = rng.standard_normal((2, 20, 4)), 3 * rng.standard_normal((2, 20, 4))
        value = rng.standard_normal((2, 20, 2))
        out = baselines.wildcat(query, key, value, num_keys=8, rng=0)
        least, most = value.min(axis=-2, keepdims=True), value.max(axis=-2, keepdims=True)
        assert_array_equal((least <= out) & (out <= most), True)
        ends += np.sum((out == least) | (out == most))
    assert ends > 0


def test_wildcat_with_keys_that_repeat_is_exact(arrays):
    """Four distinct keys: after them nothing is left to draw."""
    q, k, v = arrays
    k = np.tile(k[:, :4], (1, L // 4, 1))
    exact = linattn.softmax_attention(q, k, v)
    assert_allclose(baselines.wildcat(q, k, v, num_keys=9, rng=0), exact, atol=1e-7)


def halved(kernel, delta, rng):
    """Choose one of each two neighbours, with the sums of the kernel added up anew each time."""
    num = len(kernel) // 2
    bound = 0.5 + math.log(2 * len(kernel) / delta)
    uniform, flip = rng.uniform(-bound, bound, num), rng.random() < 0.5

    def product(a, b):
        first, second = (2 * a, 2 * a + 1), (2 * b, 2 * b + 1)
        signs = (1, -1)
        return sum(
            s * t * kernel[i, j]
            for s, i in zip(signs, first, strict=True)
            for t, j in zip(signs, second, strict=True)
        )

    signs, largest = [1], math.sqrt(product(0, 0))
    for i in range(1, num):
        size = math.sqrt(product(i, i))
        largest = max(largest, size)
        walk = sum(sign * product(j, i) for j, sign in enumerate(signs))
        signs.append(-1 if uniform[i] * size * largest <= walk else 1)
    return [2 * i + ((sign < 0) != flip) for i, sign in enumerate(signs)]


@libraries
@pytest.mark.parametrize(("length", "g"), [(70, 1), (64, 0), (16, 2), (256, 2)])
def test_thinformer(xp, length, g):
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((2, length, dim)) for dim in (D, D, E))
    expected = np.zeros((2, length, E))
    for h in range(2):
        walk = np.random.default_rng(5)
        rounds = int(math.log(length, 4))
        n = 4**rounds
        T = [t * (length // n) for t in range(n)]
        most = np.abs(v[h]).max() ** 2
        buckets = 4 ** (g + 1)
        for _ in range(max(0, rounds - g)):
            left = []
            for start in range(0, len(T), buckets):
                bucket = T[start : start + buckets]
                kernel = [
                    [
                        math.exp(k[h, a] @ k[h, b] / math.sqrt(D)) * (v[h, a] @ v[h, b] + most)
                        for b in bucket
                    ]
                    for a in bucket
                ]
                delta = 0.5 / 4 ** (g + 1) / (rounds - g) / n * buckets**2
                left += [bucket[t] for t in halved(np.array(kernel), delta, walk)]
            T, buckets = left, 2 * buckets
        assert len(T) == min(n, 2**g * 2**rounds)
        for i in range(length):
            expected[h, i] = over(q[h, i], k[h], v[h], T)
    check(xp, baselines.thinformer, (q, k, v), expected, oversampling=g, rng=5)


# Wrong uses -------------------------------------------------------------------------------------

LENGTHS = np.ones((1, 6, 3)), np.ones((1, 8, 3)), np.ones((1, 8, 3))
PARAMETERS = {
    "local_window": {"window_size": 1},
    "strided": {"stride": 2},
    "fixed": {"stride": 2},
    "longformer": {"window_size": 1},
    "bigbird": {"block_size": 2},
    "linformer": {"num_landmarks": 2},
    "nystromformer": {"num_landmarks": 2},
    "clustered": {"num_clusters": 2},
    "improved_clustered": {"num_clusters": 2, "num_keys": 2},
    "reformer": {"num_buckets": 2},
    "routing": {"num_clusters": 2},
    "compressive": {"block_size": 2, "memory_size": 2, "compressed_size": 1},
    "truncated_svd": {"rank": 2},
    "top_k": {"num_keys": 2},
    "wildcat": {"num_keys": 2},
    "thinformer": {},
    "aft_simple": {},
}
FULL = {
    *("longformer", "bigbird", "linformer", "nystromformer", "clustered", "improved_clustered"),
    *("wildcat", "thinformer"),
}
CAUSAL = {"strided", "fixed", "compressive"}
BY_POSITION = CAUSAL | {"local_window", "longformer", "bigbird", "reformer", "routing"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_wrong_uses_are_named(name):
    call, options = getattr(baselines, name), PARAMETERS[name]
    x = np.ones((1, 8, 3))
    if name in FULL:
        with pytest.raises(ValueError, match=r"is for full attention: .* must be False, got True"):
            call(x, x, x, is_causal=True, **options)
    elif name in CAUSAL:
        with pytest.raises(ValueError, match="is_causal must be True, got False"):
            call(x, x, x, is_causal=False, **options)
    else:
        assert call(x, x, x, is_causal=True, **options).shape == x.shape
        for flag in (True, np.True_):
            with pytest.raises(ValueError, match="one length"):
                call(*LENGTHS, is_causal=flag, **options)
    with pytest.raises(TypeError, match="is_causal must be True or False"):
        call(x, x, x, is_causal=1, **options)
    if name in BY_POSITION:
        with pytest.raises(ValueError, match="one length"):
            call(*LENGTHS, **options)
    with pytest.raises(ValueError, match="at least one token"):
        call(*(a[:, :0] for a in (x, x, x)), **options)
    with pytest.raises(ValueError, match="one dim"):
        call(x, x[..., :2], x, **options)
    with pytest.raises(TypeError, match="query must be an array"):
        call([[1.0]], x, x, **options)


X = np.ones((1, 8, 3))
MISTAKES = {
    "no projection": (
        lambda: baselines.linformer(X, X, X),
        TypeError,
        "num_landmarks must be given with projection='mean', got None",
    ),
    "unknown projection": (
        lambda: baselines.linformer(X, X, X, num_landmarks=2, projection="max"),
        ValueError,
        "projection must be an array, 'mean' or 'random', got 'max'",
    ),
    "projection of another length": (
        lambda: baselines.linformer(X, X, X, projection=np.ones((2, 9))),
        ValueError,
        r"projection must have last axes \(2, 8\), got shape \(2, 9\)",
    ),
    "more landmarks than tokens": (
        lambda: baselines.nystromformer(X, X, X, num_landmarks=9),
        ValueError,
        "num_landmarks must be at most 8, got 9",
    ),
    "odd buckets": (
        lambda: baselines.reformer(X, None, X, num_buckets=3),
        ValueError,
        "num_buckets must be even, got 3",
    ),
    "more summaries than tokens of a block": (
        lambda: baselines.fixed(X, X, X, stride=2, num_summary=3),
        ValueError,
        "num_summary must be at most 2, got 3",
    ),
    "memory that is no multiple": (
        lambda: baselines.compressive(X, X, X, block_size=4, memory_size=6, compressed_size=1),
        ValueError,
        "memory_size must be a multiple of 4, got 6",
    ),
    "causal external memory": (
        lambda: baselines.external(X, key_memory=X[0, :2], value_memory=X[0, :2], is_causal=True),
        ValueError,
        "normalized over the queries",
    ),
    "gates of another dim": (
        lambda: baselines.aft_simple(X, X, X[..., :2]),
        ValueError,
        "query, key and value must have one dim",
    ),
    "bias of other lengths": (
        lambda: baselines.aft_full(X, X, X, position_bias=np.ones((8, 7))),
        ValueError,
        r"position_bias must have last axes \(8, 8\), got shape \(8, 7\)",
    ),
    "logits of another length": (
        lambda: baselines.random_synthesizer(X, logits=np.ones((8, 7))),
        ValueError,
        r"logits must have last axes \(8, 8\), got shape \(8, 7\)",
    ),
    "factors of another length": (
        lambda: baselines.factorized_dense_synthesizer(
            X, X, first_weight=np.ones((3, 3)), second_weight=np.ones((3, 3))
        ),
        ValueError,
        "whose product is the length of value, 8, got 3 and 3",
    ),
    "causal rows without a value each": (
        lambda: baselines.random_synthesizer(X, logits=np.ones((7, 8)), is_causal=True),
        ValueError,
        "as many rows as values",
    ),
    "negative scale": (
        lambda: baselines.top_k(X, X, X, num_keys=1, scale=-1.0),
        ValueError,
        "scale must be a positive finite number, got -1.0",
    ),
    "no temperature": (
        lambda: baselines.wildcat(X, X, X, num_keys=1, temperature=0.0),
        ValueError,
        "temperature must be a positive finite number, got 0.0",
    ),
    "projection of no rows": (
        lambda: baselines.linformer(X, X, X, projection=np.ones((0, 8))),
        ValueError,
        r"projection must have at least one row, got shape \(0, 8\)",
    ),
    "parameters of other heads": (
        lambda: baselines.aft_full(*(np.ones((2, 8, 3)),) * 3, position_bias=np.ones((3, 8, 8))),
        ValueError,
        r"must broadcast against each other, got position_bias \(3,\), inputs \(2,\)",
    ),
    "values of other heads": (
        lambda: baselines.factorized_dense_synthesizer(
            np.ones((2, 8, 3)),
            np.ones((3, 8, 3)),
            first_weight=np.ones((2, 3)),
            second_weight=np.ones((4, 3)),
        ),
        ValueError,
        r"must broadcast against each other, got query \(2,\), value \(3,\)",
    ),
    "no value": (
        lambda: baselines.random_synthesizer(X[:, :0], logits=np.ones((8, 0))),
        ValueError,
        "value must have at least one token",
    ),
    "no head": (
        lambda: baselines.top_k(X[:0], X[:0], X[:0], num_keys=1),
        ValueError,
        "at least one head",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", baselines.__all__)
def test_each_says_source_cost_and_where_it_fails(name):
    text = inspect.getdoc(getattr(baselines, name)) or ""
    assert re.search(r"References\n-+\n.*\(\d{4}\)|References\n-+\n.*\(1936\)", text), name
    assert "Multiplications for a head" in text
    assert re.search(r"[Ff]ails", text)
    assert ".. math::" in text or name == "bigbird"
    assert "is_causal" in inspect.signature(getattr(baselines, name)).parameters
