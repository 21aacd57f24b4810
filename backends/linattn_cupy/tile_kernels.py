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

C = ct.Constant
LOG2E = 1.4426950408889634
ZERO = ct.PaddingMode.ZERO
NOTHING = -1e30
"""The scale of an empty state."""


def product(a, b, c, F32):
    """Multiply a @ b + c; float32 to its own precision, by the two halves of a number in TF32."""
    if F32:
        high_a, high_b = ct.astype(a, ct.tfloat32), ct.astype(b, ct.tfloat32)
        low_a = ct.astype(a - ct.astype(high_a, ct.float32), ct.tfloat32)
        low_b = ct.astype(b - ct.astype(high_b, ct.float32), ct.tfloat32)
        return ct.mma(high_a, high_b, ct.mma(high_a, low_b, ct.mma(low_a, high_b, c)))
    return ct.mma(a, b, c)


def narrow(x, F32):
    """Round factors as products take them."""
    return x if F32 else ct.astype(x, ct.bfloat16)


def power(x):
    """Return exp(x), 0 where it is subnormal."""
    return ct.exp2(x * LOG2E, flush_to_zero=True)


def tokens(X, head, at, T, D):
    """Load a tile of (heads, tokens, D)."""
    return ct.reshape(ct.load(X, index=(head, at, 0), shape=(1, T, D), padding_mode=ZERO), (T, D))


def column(X, head, at, T):
    """Load a tile of (heads, tokens) as a column."""
    return ct.reshape(ct.load(X, index=(head, at), shape=(1, T), padding_mode=ZERO), (T, 1))


def sums_of(X, s, g, G, E):
    """Load a group of features of a state (states, M, E)."""
    return ct.reshape(ct.load(X, index=(s, g, 0), shape=(1, G, E)), (G, E))


def within(at, length, T):
    """Say which tokens of a tile are none after the end, as a column."""
    return ct.reshape(ct.arange(T, dtype=ct.int32), (T, 1)) < length - at * T


def triangle(T):
    """Say whether the query of a row sees the key of a column."""
    places = ct.arange(T, dtype=ct.int32)
    return ct.reshape(places, (1, T)) <= ct.reshape(places, (T, 1))


def key_terms(k, at, length, curvature, T, TAIL):
    """Sum what all features of a key share, (T, 1)."""
    wide = ct.astype(k, ct.float32)
    row = ct.sum(wide * wide, axis=1, keepdims=True) * curvature
    return ct.where(within(at, length, T), row, -math.inf) if TAIL else row


@ct.kernel(num_worker_warps=8)
def segment_states(
    K, V, P, col, kv, z, shifts, length: int, n: int, curvature: float,
    M: C[int], D: C[int], E: C[int], T: C[int], TAIL: C[bool], F32: C[bool],
):  # fmt: skip
    """Sum the keys of segments of n tiles of keys; grid (heads, segments)."""
    head, segment = ct.bid(0), ct.bid(1)
    p = ct.load(P, index=(0, 0), shape=(M, D))
    c = ct.reshape(ct.load(col, index=(0,), shape=(M,)), (M, 1))
    acc = ct.zeros((M, E), ct.float32)
    total = ct.zeros((M, 1), ct.float32)
    top = ct.full((M, 1), NOTHING, ct.float32)
    for j in range(n):
        at = segment * n + j
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        row = ct.reshape(key_terms(k, at, length, curvature, T, TAIL), (1, T))
        logits = product(p, ct.transpose(k), ct.zeros((M, T), ct.float32), F32) + row
        now = ct.maximum(top, ct.max(logits, axis=1, keepdims=True) + c)
        w = power(logits + (c - now))
        factor = power(top - now)
        total = total * factor + ct.sum(w, axis=1, keepdims=True)
        acc = product(narrow(w, F32), v, acc * factor, F32)
        top = now
    s = head * ct.num_blocks(1) + segment
    ct.store(kv, index=(s, 0, 0), tile=ct.reshape(acc, (1, M, E)))
    ct.store(z, index=(s, 0), tile=ct.reshape(total, (1, M)))
    ct.store(shifts, index=(s, 0), tile=ct.reshape(top, (1, M)))


@ct.kernel(num_worker_warps=4)
def scan_states(
    kv, z, shifts, before, before_z, before_shifts, after, after_z, after_shifts, segments: int,
    E: C[int], G: C[int], CAUSAL: C[bool],
):  # fmt: skip
    """Sum the states before each segment, if CAUSAL, and all; grid (heads, M / G)."""
    head, g = ct.bid(0), ct.bid(1)
    acc = ct.zeros((G, E), ct.float32)
    total = ct.zeros((1, G), ct.float32)
    top = ct.full((1, G), NOTHING, ct.float32)
    for j in range(segments):
        s = head * segments + j
        if CAUSAL:
            ct.store(before, index=(s, g, 0), tile=ct.reshape(acc, (1, G, E)))
            ct.store(before_z, index=(s, g), tile=total)
            ct.store(before_shifts, index=(s, g), tile=top)
        shift = ct.load(shifts, index=(s, g), shape=(1, G))
        now = ct.maximum(top, shift)
        old, new = power(top - now), power(shift - now)
        acc = acc * ct.reshape(old, (G, 1)) + sums_of(kv, s, g, G, E) * ct.reshape(new, (G, 1))
        total = total * old + ct.load(z, index=(s, g), shape=(1, G)) * new
        top = now
    ct.store(after, index=(head, g, 0), tile=ct.reshape(acc, (1, G, E)))
    ct.store(after_z, index=(head, g), tile=total)
    ct.store(after_shifts, index=(head, g), tile=top)


@ct.kernel(num_worker_warps=8)
def read_rows(
    Q, K, V, P, col, kv, z, shifts, out, tops, dens, length: int, curvature: float,
    M: C[int], D: C[int], E: C[int], T: C[int], G: C[int], CAUSAL: C[bool], TAIL: C[bool],
    F32: C[bool],
):  # fmt: skip
    """Read one state a head, or CAUSAL a state a tile and its keys.

    Grid (heads, tiles). ``tops``, ``dens``: log scales and denominators of rows.
    """
    head, at = ct.bid(0), ct.bid(1)
    q = tokens(Q, head, at, T, D)
    s = head * ct.num_blocks(1) + at if CAUSAL else head
    acc = ct.zeros((T, E), ct.float32)
    den = ct.zeros((T, 1), ct.float32)
    top = ct.full((T, 1), NOTHING, ct.float32)
    if CAUSAL:
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        row = key_terms(k, at, length, curvature, T, TAIL)
        scores = ct.zeros((T, T), ct.float32)
    for g in range(M // G):
        p = ct.transpose(ct.load(P, index=(g, 0), shape=(G, D)))
        c = ct.reshape(ct.load(col, index=(g,), shape=(G,)), (1, G))
        now = ct.load(shifts, index=(s, g), shape=(1, G))
        zz, state = ct.load(z, index=(s, g), shape=(1, G)), sums_of(kv, s, g, G, E)
        if CAUSAL:
            logits = product(k, p, ct.zeros((T, G), ct.float32), F32) + row
            last = now
            now = ct.maximum(last, ct.max(logits, axis=0, keepdims=True) + c)
            phi = narrow(power(logits + (c - now)), F32)
            factor = power(last - now)
            zz, state = zz * factor, state * ct.reshape(factor, (G, 1))
        reads = product(q, p, ct.zeros((T, G), ct.float32), F32) + (c + now)
        peak = ct.maximum(top, ct.max(reads, axis=1, keepdims=True))
        wide = power(reads - peak)
        rescale = power(top - peak)
        den = den * rescale + ct.sum(wide * zz, axis=1, keepdims=True)
        w = narrow(wide, F32)
        if CAUSAL:
            scores = product(w, ct.transpose(phi), scores * rescale, F32)
        acc = product(w, narrow(state, F32), acc * rescale, F32)
        top = peak
    if CAUSAL:
        scores = ct.where(triangle(T), scores, 0.0)
        den = den + ct.sum(scores, axis=1, keepdims=True)
        acc = product(narrow(scores, F32), v, acc, F32)
    ct.store(out, index=(head, at, 0), tile=ct.reshape(narrow(acc / den, F32), (1, T, E)))
    ct.store(tops, index=(head, at), tile=ct.reshape(top, (1, T)))
    ct.store(dens, index=(head, at), tile=ct.reshape(den, (1, T)))


@ct.kernel(num_worker_warps=8)
def causal_rows(
    Q, K, V, P, col, before, before_z, before_shifts, out, dens, length: int, n: int,
    curvature: float, M: C[int], D: C[int], E: C[int], T: C[int], TAIL: C[bool], F32: C[bool],
):  # fmt: skip
    """Walk causal rows of n tiles after the state before them; grid (heads, segments).

    For 16 bits: in float32 states do not fit in registers, and `read_rows` takes its place.
    """
    head, segment = ct.bid(0), ct.bid(1)
    s = head * ct.num_blocks(1) + segment
    p = ct.load(P, index=(0, 0), shape=(M, D))
    c = ct.reshape(ct.load(col, index=(0,), shape=(M,)), (M, 1))
    acc = sums_of(before, s, 0, M, E)
    total, top = column(before_z, s, 0, M), column(before_shifts, s, 0, M)
    for j in range(n):
        at = segment * n + j
        k, v, q = tokens(K, head, at, T, D), tokens(V, head, at, T, E), tokens(Q, head, at, T, D)
        row = ct.reshape(key_terms(k, at, length, curvature, T, TAIL), (1, T))
        logits = product(p, ct.transpose(k), ct.zeros((M, T), ct.float32), F32) + row
        now = ct.maximum(top, ct.max(logits, axis=1, keepdims=True) + c)
        phi = narrow(power(logits + (c - now)), F32)
        factor = power(top - now)
        acc = acc * factor
        total = total * factor
        reads = product(q, ct.transpose(p), ct.zeros((T, M), ct.float32), F32)
        reads = reads + ct.reshape(c + now, (1, M))
        wide = power(reads - ct.max(reads, axis=1, keepdims=True))
        den = ct.sum(wide * ct.reshape(total, (1, M)), axis=1, keepdims=True)
        w = narrow(wide, F32)
        scores = product(w, phi, ct.zeros((T, T), ct.float32), F32)
        scores = ct.where(triangle(T), scores, 0.0)
        den = den + ct.sum(scores, axis=1, keepdims=True)
        o = product(w, narrow(acc, F32), ct.zeros((T, E), ct.float32), F32)
        o = product(narrow(scores, F32), v, o, F32)
        ct.store(out, index=(head, at, 0), tile=ct.reshape(narrow(o / den, F32), (1, T, E)))
        ct.store(dens, index=(head, at), tile=ct.reshape(den, (1, T)))
        acc = product(phi, v, acc, F32)
        total = total + ct.sum(ct.astype(phi, ct.float32), axis=1, keepdims=True)
        top = now


def row_cotangents(grads, out, dens, head, at, T, E):
    """Return cotangents of the numerators and denominators of a tile of rows, (T, E) and (T, 1)."""
    g = ct.astype(tokens(grads, head, at, T, E), ct.float32)
    o = ct.astype(tokens(out, head, at, T, E), ct.float32)
    den = column(dens, head, at, T)
    inverse = ct.where(den > 0.0, 1.0 / den, 0.0)
    return g * inverse, ct.sum(g * o, axis=1, keepdims=True) * (0.0 - inverse)


@ct.kernel(num_worker_warps=8)
def pull_queries(
    Q, K, V, P, col, kv, z, shifts, out, tops, dens, grads, of_query, by_kv, by_z, length: int,
    curvature: float, M: C[int], D: C[int], E: C[int], T: C[int], G: C[int], CAUSAL: C[bool],
    TAIL: C[bool], F32: C[bool],
):  # fmt: skip
    """Pull queries back, and sum their cotangents of the state a tile; grid (heads, tiles)."""
    head, at = ct.bid(0), ct.bid(1)
    q = tokens(Q, head, at, T, D)
    to = head * ct.num_blocks(1) + at
    s = to if CAUSAL else head
    gn, gd = row_cotangents(grads, out, dens, head, at, T, E)
    top, thin = column(tops, head, at, T), narrow(gn, F32)
    if CAUSAL:
        k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
        row = key_terms(k, at, length, curvature, T, TAIL)
        ds = product(thin, ct.transpose(v), ct.zeros((T, T), ct.float32), F32) + gd
        ds = narrow(ct.where(triangle(T), ds, 0.0), F32)
    acc = ct.zeros((T, D), ct.float32)
    for g in range(M // G):
        p = ct.load(P, index=(g, 0), shape=(G, D))
        c = ct.reshape(ct.load(col, index=(g,), shape=(G,)), (1, G))
        now = ct.load(shifts, index=(s, g), shape=(1, G))
        zz, state = ct.load(z, index=(s, g), shape=(1, G)), sums_of(kv, s, g, G, E)
        dw = ct.zeros((T, G), ct.float32)
        if CAUSAL:
            logits = product(k, ct.transpose(p), dw, F32) + row
            last = now
            now = ct.maximum(last, ct.max(logits, axis=0, keepdims=True) + c)
            factor = power(last - now)
            zz, state = zz * factor, state * ct.reshape(factor, (G, 1))
            dw = product(ds, narrow(power(logits + (c - now)), F32), dw, F32)
        dw = product(thin, ct.transpose(narrow(state, F32)), dw + gd * zz, F32)
        reads = product(q, ct.transpose(p), ct.zeros((T, G), ct.float32), F32) + (c + now) - top
        w = power(ct.where(within(at, length, T), reads, -math.inf) if TAIL else reads)
        acc = product(narrow(w * dw, F32), p, acc, F32)
        b = ct.zeros((G, E), ct.float32)
        b = product(ct.transpose(narrow(w, F32)), thin, b, F32)
        ct.store(by_kv, index=(to, g, 0), tile=ct.reshape(b, (1, G, E)))
        ct.store(by_z, index=(to, g), tile=ct.sum(w * gd, axis=0, keepdims=True))
    ct.store(of_query, index=(head, at, 0), tile=ct.reshape(narrow(acc, F32), (1, T, D)))


@ct.kernel(num_worker_warps=4)
def scan_adjoints(
    by_kv, by_z, shifts, last_shifts, sums, sums_z, tiles: int, E: C[int], G: C[int],
    CAUSAL: C[bool],
):  # fmt: skip
    """Sum cotangents over all tiles, or CAUSAL over later ones; grid (heads, M / G)."""
    head, g = ct.bid(0), ct.bid(1)
    acc = ct.zeros((G, E), ct.float32)
    total = ct.zeros((1, G), ct.float32)
    scale = ct.load(last_shifts, index=(head, g), shape=(1, G))
    for j in range(tiles):
        s = head * tiles + tiles - 1 - j
        if CAUSAL:
            ct.store(sums, index=(s, g, 0), tile=ct.reshape(acc, (1, G, E)))
            ct.store(sums_z, index=(s, g), tile=total)
        acc = acc + sums_of(by_kv, s, g, G, E)
        total = total + ct.load(by_z, index=(s, g), shape=(1, G))
        if CAUSAL:
            before = ct.load(shifts, index=(s, g), shape=(1, G))
            factor = power(before - scale)
            acc, total, scale = acc * ct.reshape(factor, (G, 1)), total * factor, before
    if not CAUSAL:
        ct.store(sums, index=(head, g, 0), tile=ct.reshape(acc, (1, G, E)))
        ct.store(sums_z, index=(head, g), tile=total)


@ct.kernel(num_worker_warps=8)
def pull_keys(
    Q, K, V, P, col, shifts, out, tops, dens, grads, sums, sums_z, of_key, of_value, length: int,
    curvature: float, M: C[int], D: C[int], E: C[int], T: C[int], G: C[int], CAUSAL: C[bool],
    TAIL: C[bool], F32: C[bool],
):  # fmt: skip
    """Pull keys and values back, which read an adjoint; grid (heads, tiles)."""
    head, at = ct.bid(0), ct.bid(1)
    s = head * ct.num_blocks(1) + at if CAUSAL else head
    k, v = tokens(K, head, at, T, D), tokens(V, head, at, T, E)
    row = key_terms(k, at, length, curvature, T, TAIL)
    acc = ct.zeros((T, D), ct.float32)
    dv = ct.zeros((T, E), ct.float32)
    added = ct.zeros((T, 1), ct.float32)
    if CAUSAL:
        q = tokens(Q, head, at, T, D)
        gn, gd = row_cotangents(grads, out, dens, head, at, T, E)
        top, thin = column(tops, head, at, T), narrow(gn, F32)
        ds = product(thin, ct.transpose(v), ct.zeros((T, T), ct.float32), F32) + gd
        ds = ct.transpose(narrow(ct.where(triangle(T), ds, 0.0), F32))
        scores = ct.zeros((T, T), ct.float32)
    for g in range(M // G):
        p = ct.load(P, index=(g, 0), shape=(G, D))
        c = ct.reshape(ct.load(col, index=(g,), shape=(G,)), (1, G))
        now = ct.load(shifts, index=(s, g), shape=(1, G))
        logits = product(k, ct.transpose(p), ct.zeros((T, G), ct.float32), F32) + row
        if CAUSAL:
            now = ct.maximum(now, ct.max(logits, axis=0, keepdims=True) + c)
        phi = power(logits + (c - now))
        few, state = narrow(phi, F32), narrow(sums_of(sums, s, g, G, E), F32)
        dphi = ct.zeros((T, G), ct.float32) + ct.load(sums_z, index=(s, g), shape=(1, G))
        dphi = product(v, ct.transpose(state), dphi, F32)
        dv = product(few, state, dv, F32)
        if CAUSAL:
            reads = product(q, ct.transpose(p), ct.zeros((T, G), ct.float32), F32) + (c + now) - top
            w = power(ct.where(within(at, length, T), reads, -math.inf) if TAIL else reads)
            w = narrow(w, F32)
            dphi = product(ds, w, dphi, F32)
            scores = product(w, ct.transpose(few), scores, F32)
        dl = phi * dphi
        added = added + ct.sum(dl, axis=1, keepdims=True)
        acc = product(narrow(dl, F32), p, acc, F32)
    if CAUSAL:
        scores = narrow(ct.where(triangle(T), scores, 0.0), F32)
        dv = product(ct.transpose(scores), thin, dv, F32)
    acc = acc + added * (2.0 * curvature) * ct.astype(k, ct.float32)
    ct.store(of_key, index=(head, at, 0), tile=ct.reshape(narrow(acc, F32), (1, T, D)))
    ct.store(of_value, index=(head, at, 0), tile=ct.reshape(narrow(dv, F32), (1, T, E)))
