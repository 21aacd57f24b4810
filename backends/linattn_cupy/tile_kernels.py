"""FAVOR+ attention in NVIDIA's cuTile: kernels on tiles, for arrays (heads, tokens, dim).

A weight of a key is exp(p.k + curvature |k|^2 + col - c_r) with the features' scales c_r, that of a
query exp(p.q + col + c_r - M_i); the query's own curvature cancels. States are sums over keys of
weights and values, (M, E), and of weights, (M,). The last parameters are constants: M features, D
and E dims, T tokens of a tile, G features at a time; CAUSAL; TAIL, whether tokens after the end
must be hidden; F32, whether products are of float32, by three of TF32.

No GPU has run them. The same functions run on NumPy arrays (tests/tile_stand_in.py).
"""

import math

import cuda.tile as ct

Int, Flag = ct.Constant[int], ct.Constant[bool]
LOG2E = 1.4426950408889634
ZERO = ct.PaddingMode.ZERO
NOTHING = -1e30
"""The scale of an empty state."""


def product(a, b, c, F32):
    """Return a @ b + c, of factors in bfloat16 or F32: by the two halves of a number in TF32."""
    if F32:
        high_a, high_b = ct.astype(a, ct.tfloat32), ct.astype(b, ct.tfloat32)
        low_a = ct.astype(a - ct.astype(high_a, ct.float32), ct.tfloat32)
        low_b = ct.astype(b - ct.astype(high_b, ct.float32), ct.tfloat32)
        return ct.mma(high_a, high_b, ct.mma(high_a, low_b, ct.mma(low_a, high_b, c)))
    return ct.mma(ct.astype(a, ct.bfloat16), ct.astype(b, ct.bfloat16), c)


def zeros(n, m):
    """Begin a sum."""
    return ct.zeros((n, m), ct.float32)


def power(x):
    """Return exp(x), 0 where it is subnormal."""
    return ct.exp2(x * LOG2E, flush_to_zero=True)


def tokens(X, head, at, T, D):
    """Load a tile of (heads, tokens, D), or a group of features of states (states, M, E)."""
    return ct.reshape(ct.load(X, index=(head, at, 0), shape=(1, T, D), padding_mode=ZERO), (T, D))


def store_tokens(X, head, at, tile, T, D):
    """Store a tile of (heads, tokens, D), rounded."""
    ct.store(X, index=(head, at, 0), tile=ct.reshape(ct.astype(tile, X.dtype), (1, T, D)))


def column(X, head, at, T):
    """Load a tile of (heads, tokens) as a column."""
    return ct.reshape(ct.load(X, index=(head, at), shape=(1, T), padding_mode=ZERO), (T, 1))


def row(X, s, g, G):
    """Load a group of features of (states, M) as a row."""
    return ct.load(X, index=(s, g), shape=(1, G))


def lifted(kv, z, s, g, shift, G, E, LIFTS):
    """Load a group of features of a state, and its normalizers; LIFTS: times exp(shift)."""
    state, total = tokens(kv, s, g, G, E), row(z, s, g, G)
    if LIFTS:
        state, total = state * ct.reshape(power(shift), (G, 1)), total * power(shift)
    return state, total


def store_state(kv, z, shifts, s, g, acc, total, top, G, E):
    """Store a group of features of a state, its normalizers and scales."""
    ct.store(kv, index=(s, g, 0), tile=ct.reshape(acc, (1, G, E)))
    ct.store(z, index=(s, g), tile=ct.reshape(total, (1, G)))
    ct.store(shifts, index=(s, g), tile=ct.reshape(top, (1, G)))


def within(at, length, T):
    """Say which tokens of a tile are none after the end, as a column."""
    return ct.reshape(ct.arange(T, dtype=ct.int32), (T, 1)) < length - at * T


def seen(scores, T):
    """Set scores to 0 where the query of a row does not see the key of a column."""
    places = ct.arange(T, dtype=ct.int32)
    return ct.where(ct.reshape(places, (1, T)) <= ct.reshape(places, (T, 1)), scores, 0.0)


def key_terms(k, at, length, curvature, T, TAIL):
    """Sum what all features of a key share, (T, 1)."""
    wide = ct.astype(k, ct.float32)
    terms = ct.sum(wide * wide, axis=1, keepdims=True) * curvature
    return ct.where(within(at, length, T), terms, -math.inf) if TAIL else terms


def key_weights(k, terms, p, c, scale, T, G, F32):
    """Weigh keys in a group of features; on which scale, that of a state before them or more."""
    logits = product(k, ct.transpose(p), zeros(T, G), F32) + terms
    now = ct.maximum(scale, ct.max(logits, axis=0, keepdims=True) + c)
    return power(logits + (c - now)), now


def query_weights(q, p, c, now, top, at, length, T, G, TAIL, F32):
    """Weigh queries in a group of features, on the scales of these and of their rows."""
    reads = product(q, ct.transpose(p), zeros(T, G), F32) + (c + now) - top
    return power(ct.where(within(at, length, T), reads, -math.inf) if TAIL else reads)


@ct.kernel(num_worker_warps=8)
def walk_keys(
    Q, K, V, P, col, kv, z, shifts, out, dens, length: int, n: int, curvature: float,
    M: Int, D: Int, E: Int, T: Int, READS: Flag, TAIL: Flag, F32: Flag,
):  # fmt: skip
    """Walk n tiles of keys of a segment; grid (heads, segments).

    READS: causal rows after the state before them, for 16 bits: in float32 states do not fit in
    registers, and `read_rows` takes its place. Else the keys become a state.
    """
    head, segment = ct.bid(0), ct.bid(1)
    s = head * ct.num_blocks(1) + segment
    p, c = ct.load(P, index=(0, 0), shape=(M, D)), column(col, 0, 0, M)
    if READS:
        acc, total, top = tokens(kv, s, 0, M, E), column(z, s, 0, M), column(shifts, s, 0, M)
    else:
        acc, total, top = zeros(M, E), zeros(M, 1), ct.full((M, 1), NOTHING, ct.float32)
    for j in range(n):
        at = segment * n + j
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        terms = ct.reshape(key_terms(k, at, length, curvature, T, TAIL), (1, T))
        logits = product(p, ct.transpose(k), zeros(M, T), F32) + terms
        now = ct.maximum(top, ct.max(logits, axis=1, keepdims=True) + c)
        phi = power(logits + (c - now))
        factor = power(top - now)
        acc, total, top = acc * factor, total * factor, now
        if READS:
            q = tokens(Q, head, at, T, D)
            reads = product(q, ct.transpose(p), zeros(T, M), F32) + ct.reshape(c + now, (1, M))
            w = power(reads - ct.max(reads, axis=1, keepdims=True))
            scores = seen(product(w, phi, zeros(T, T), F32), T)
            den = ct.sum(w * ct.reshape(total, (1, M)), axis=1, keepdims=True)
            den = den + ct.sum(scores, axis=1, keepdims=True)
            read = product(w, acc, zeros(T, E), F32)
            read = product(scores, v, read, F32)
            store_tokens(out, head, at, read / den, T, E)
            ct.store(dens, index=(head, at), tile=ct.reshape(den, (1, T)))
        total = total + ct.sum(phi, axis=1, keepdims=True)
        acc = product(phi, v, acc, F32)
    if not READS:
        store_state(kv, z, shifts, s, 0, acc, total, top, M, E)


@ct.kernel(num_worker_warps=4)
def scan_states(
    kv, z, shifts, before, before_z, before_shifts, after, after_z, after_shifts, count: int,
    E: Int, G: Int, CAUSAL: Flag, BACK: Flag,
):  # fmt: skip
    """Sum states before each, if CAUSAL, and all; BACK from the last, of negated scales."""
    head, g = ct.bid(0), ct.bid(1)
    acc, total, top = zeros(G, E), zeros(1, G), ct.full((1, G), NOTHING, ct.float32)
    for j in range(count):
        s = head * count + (count - 1 - j if BACK else j)
        if CAUSAL:
            store_state(before, before_z, before_shifts, s, g, acc, total, top, G, E)
        shift = 0.0 - row(shifts, s, g, G) if BACK else row(shifts, s, g, G)
        now = ct.maximum(top, shift)
        old, (more, more_z) = power(top - now), lifted(kv, z, s, g, shift - now, G, E, True)
        acc, total, top = acc * ct.reshape(old, (G, 1)) + more, total * old + more_z, now
    store_state(after, after_z, after_shifts, head, g, acc, total, top, G, E)


@ct.kernel(num_worker_warps=8)
def read_rows(
    Q, K, V, P, col, kv, z, shifts, out, tops, dens, length: int, curvature: float,
    M: Int, D: Int, E: Int, T: Int, G: Int, CAUSAL: Flag, TAIL: Flag, F32: Flag,
):  # fmt: skip
    """Read one state a head, or CAUSAL a state a tile and its keys.

    Grid (heads, tiles). ``tops``, ``dens``: log scales and denominators of rows.
    """
    head, at = ct.bid(0), ct.bid(1)
    q = tokens(Q, head, at, T, D)
    s = head * ct.num_blocks(1) + at if CAUSAL else head
    acc, den, top = zeros(T, E), zeros(T, 1), ct.full((T, 1), NOTHING, ct.float32)
    if CAUSAL:
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        terms, scores = key_terms(k, at, length, curvature, T, TAIL), zeros(T, T)
    for g in range(M // G):
        p, c = ct.load(P, index=(g, 0), shape=(G, D)), row(col, 0, g, G)
        last = row(shifts, s, g, G)
        phi, now = key_weights(k, terms, p, c, last, T, G, F32) if CAUSAL else (last, last)
        state, total = lifted(kv, z, s, g, last - now, G, E, CAUSAL)
        reads = product(q, ct.transpose(p), zeros(T, G), F32) + (c + now)
        peak = ct.maximum(top, ct.max(reads, axis=1, keepdims=True))
        w, rescale, top = power(reads - peak), power(top - peak), peak
        den = den * rescale + ct.sum(w * total, axis=1, keepdims=True)
        if CAUSAL:
            scores = product(w, ct.transpose(phi), scores * rescale, F32)
        acc = product(w, state, acc * rescale, F32)
    if CAUSAL:
        scores = seen(scores, T)
        den = den + ct.sum(scores, axis=1, keepdims=True)
        acc = product(scores, v, acc, F32)
    store_tokens(out, head, at, acc / den, T, E)
    ct.store(tops, index=(head, at), tile=ct.reshape(top, (1, T)))
    ct.store(dens, index=(head, at), tile=ct.reshape(den, (1, T)))


def row_cotangents(grads, out, dens, head, at, T, E):
    """Return cotangents of the numerators and denominators of a tile of rows, (T, E) and (T, 1)."""
    g = ct.astype(tokens(grads, head, at, T, E), ct.float32)
    o = ct.astype(tokens(out, head, at, T, E), ct.float32)
    den = column(dens, head, at, T)
    inverse = ct.where(den > 0.0, 1.0 / den, 0.0)
    by_den = ct.sum(g * o, axis=1, keepdims=True) * (0.0 - inverse)
    return ct.astype(g * inverse, grads.dtype), by_den


@ct.kernel(num_worker_warps=8)
def pull_queries(
    Q, K, V, P, col, kv, z, shifts, out, tops, dens, grads, of_query, by_kv, by_z, by_shifts,
    length: int, curvature: float,
    M: Int, D: Int, E: Int, T: Int, G: Int, CAUSAL: Flag, TAIL: Flag, F32: Flag,
):  # fmt: skip
    """Pull queries back, and sum their cotangents of the state a tile; grid (heads, tiles)."""
    head, at = ct.bid(0), ct.bid(1)
    q, top = tokens(Q, head, at, T, D), column(tops, head, at, T)
    to = head * ct.num_blocks(1) + at
    s = to if CAUSAL else head
    by_num, by_den = row_cotangents(grads, out, dens, head, at, T, E)
    if CAUSAL:
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        terms = key_terms(k, at, length, curvature, T, TAIL)
        ds = seen(product(by_num, ct.transpose(v), zeros(T, T), F32) + by_den, T)
    acc = zeros(T, D)
    for g in range(M // G):
        p, c = ct.load(P, index=(g, 0), shape=(G, D)), row(col, 0, g, G)
        last = row(shifts, s, g, G)
        phi, now = key_weights(k, terms, p, c, last, T, G, F32) if CAUSAL else (last, last)
        state, total = lifted(kv, z, s, g, last - now, G, E, CAUSAL)
        dw = product(by_num, ct.transpose(ct.astype(state, Q.dtype)), by_den * total, F32)
        dw = product(ds, phi, dw, F32) if CAUSAL else dw
        w = query_weights(q, p, c, now, top, at, length, T, G, TAIL, F32)
        acc = product(w * dw, p, acc, F32)
        sums = product(ct.transpose(ct.astype(w, Q.dtype)), by_num, zeros(G, E), F32)
        total = ct.sum(w * by_den, axis=0, keepdims=True)
        store_state(by_kv, by_z, by_shifts, to, g, sums, total, now, G, E)
    store_tokens(of_query, head, at, acc, T, D)


@ct.kernel(num_worker_warps=8)
def pull_keys(
    Q, K, V, P, col, shifts, out, tops, dens, grads, sums, sums_z, sums_shifts, of_key, of_value,
    length: int, curvature: float,
    M: Int, D: Int, E: Int, T: Int, G: Int, CAUSAL: Flag, TAIL: Flag, F32: Flag,
):  # fmt: skip
    """Pull keys and values back, which read an adjoint; grid (heads, tiles)."""
    head, at = ct.bid(0), ct.bid(1)
    s = head * ct.num_blocks(1) + at if CAUSAL else head
    k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
    terms = key_terms(k, at, length, curvature, T, TAIL)
    acc, dv, added = zeros(T, D), zeros(T, E), zeros(T, 1)
    if CAUSAL:
        q, top = tokens(Q, head, at, T, D), column(tops, head, at, T)
        by_num, by_den = row_cotangents(grads, out, dens, head, at, T, E)
        ds = ct.transpose(seen(product(by_num, ct.transpose(v), zeros(T, T), F32) + by_den, T))
        scores = zeros(T, T)
    for g in range(M // G):
        p, c = ct.load(P, index=(g, 0), shape=(G, D)), row(col, 0, g, G)
        # In full attention the scale, that of all keys, stays.
        phi, now = key_weights(k, terms, p, c, row(shifts, s, g, G), T, G, F32)
        factor, state = power(row(sums_shifts, s, g, G) + now), tokens(sums, s, g, G, E)
        dphi = product(v, ct.transpose(state), zeros(T, G) + row(sums_z, s, g, G), F32) * factor
        dv = product(phi * factor, state, dv, F32)
        if CAUSAL:
            w = query_weights(q, p, c, now, top, at, length, T, G, TAIL, F32)
            dphi = product(ds, w, dphi, F32)
            scores = product(w, ct.transpose(phi), scores, F32)
        by_log = phi * dphi
        added = added + ct.sum(by_log, axis=1, keepdims=True)
        acc = product(by_log, p, acc, F32)
    if CAUSAL:
        dv = product(ct.transpose(seen(scores, T)), by_num, dv, F32)
    acc = acc + added * (2.0 * curvature) * ct.astype(k, ct.float32)
    store_tokens(of_key, head, at, acc, T, D)
    store_tokens(of_value, head, at, dv, T, E)
