"""Attention in linear time, exact attention, and one token at a time: check, then fold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, Literal, Unpack, overload

from linattn import _arrays, _checks
from linattn._driver import forward
from linattn._driver.blocks import take_rows
from linattn._driver.options import SoftmaxOptions, WindowOptions
from linattn._driver.problem import exact_problem, linear_problem, step_problem
from linattn._driver.stamps import stamped
from linattn.typing import Array, ArrayT, FeatureMap, Problem, State

__all__ = ["decode_step", "linear_attention", "softmax_attention"]


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[False] = False,
    return_log_normalizer: Literal[False] = False,
    return_states_every: None = None,
    **options: Unpack[WindowOptions],
) -> ArrayT: ...


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[True],
    return_log_normalizer: Literal[False] = False,
    return_states_every: None = None,
    **options: Unpack[WindowOptions],
) -> tuple[ArrayT, State]: ...


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[False] = False,
    return_log_normalizer: Literal[True],
    return_states_every: None = None,
    **options: Unpack[WindowOptions],
) -> tuple[ArrayT, Array]: ...


@overload
def linear_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: Literal[True],
    return_log_normalizer: Literal[True],
    return_states_every: None = None,
    **options: Unpack[WindowOptions],
) -> tuple[ArrayT, State, Array]: ...


@overload
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    return_state: bool = False,
    return_log_normalizer: bool = False,
    return_states_every: int | None = None,
    **options: Unpack[WindowOptions],
) -> Any: ...


@_arrays.as_autocast("query", "key", "value")
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    feature_map: FeatureMap,
    *,
    is_causal: bool | Literal["lower_right"] = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    key_lengths: Any = None,
    key_stop: Any = None,
    prefix_length: Any = None,
    causal_block: int | None = None,
    cu_seqlens: Any = None,
    log_decay: Array | float | None = None,
    normalize: bool = True,
    initial_state: State | None = None,
    return_state: bool = False,
    return_log_normalizer: bool = False,
    return_states_every: int | None = None,
    chunk_size: int | None = None,
    exact_window: int | None = None,
    exact_clusters: int | None = None,
    sinks: int | None = None,
    window_bias: Array | None = None,
    far_bias: tuple[Any, Any] | None = None,
) -> Any:
    r"""Attention whose time grows with the length, not its square.

    .. math::
        o_i = \frac{\sum_j \phi(q_i) \cdot \psi(k_j) \, v_j}{\sum_j \phi(q_i) \cdot \psi(k_j)}

    over all keys j, or j <= i when causal. Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``m``
    features, ``e`` value dim, ``...`` leading axes (batch, heads), which broadcast: grouped
    queries are a key with a heads axis of 1.

    Parameters
    ----------
    query : array, (..., L, d)
        float16, bfloat16, float32 or float64, of any array-API library.
    key : array, (..., S, d)
        Same library, dtype and device.
    value : array, (..., S, e)
        Same library, dtype and device.
    feature_map : FeatureMap
        From :mod:`linattn.feature_maps`, or any object with ``num_features``,
        ``query_features(x)`` and ``key_features(x)``. The scale of the logits is the map's.
    is_causal : bool or "lower_right", optional
        Query i sees keys 0..i only; needs L = S. With "lower_right" the queries stand at the last
        L positions of the keys: query i sees keys 0..i + S - L. Default False.
    key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
        True = attend. What a masked key and value hold does not matter, NaN included. Masked keys
        keep their positions: `log_decay` acts there too.
    key_bias : floating array, of the shapes that a mask may have, optional
        Log weight of each key: its weights are multiplied by ``exp(key_bias)``. A key of -inf is
        masked. Default 0.
    key_lengths : int or integer array, key.shape[:-2] with axes of 1, optional
        How many keys count, the first ones; the others are masked, and `log_decay` acts there too.
    key_stop : integers, (L,) or (..., L), optional
        Query i sees the keys before ``key_stop[i]``, which does not decrease with i. Leading axes
        broadcast to those of key and value. The integers are needed: no traced arrays. At most one
        of `is_causal`, `key_stop`, `prefix_length` and `causal_block` may be given.
    prefix_length : int or integers, (...), optional
        Causal but for the first keys, which all queries see: ``key_stop = max(P, i + 1)``. Needs
        L = S.
    causal_block : int, optional
        Tokens in blocks of B see their own block and all before it:
        ``key_stop = B ceil((i + 1) / B)``. Needs L = S.
    cu_seqlens : integers, (n + 1,), optional
        The axis of the tokens holds n sequences end to end, the i-th from ``cu_seqlens[i]`` to
        ``cu_seqlens[i + 1]``: each is attended to by itself, full or causal, from the state
        ``kvz[i]`` of `initial_state`, whose arrays, as those of the returned state, have a first
        axis of n. Their length is that of the longest. Not beside `key_lengths`, whose part the
        borders have.
    log_decay : float or floating array, key.shape[:-2] or key.shape[:-1] with axes of 1, optional
        At most 0: one for all, one a head, or one a token. The state decays by it before a token
        is added, ``S_t = exp(g_t) S_{t-1} + psi(k_t) [v_t, 1]``, so that the weight of key j for
        query i is multiplied by ``exp(g_{j+1} + ... + g_i)``. Full attention takes one for all or
        one a head, and decays with distance in both directions: ``exp(g |i - j|)``, as ALiBi. Exact
        keys, of a window and of clusters beside it, decay too. A padded batch: positions behind a
        mask still decay the state. Use ``log_decay=np.where(mask, g, 0)`` to leave it unchanged.
    normalize : bool, optional
        False: the output is the numerator alone, on its true scale, which may overflow. Default
        True.
    initial_state : State, optional
        Keys seen before these, by all queries: full attention attends to both, a causal stream goes
        on.
    return_state : bool, optional
        Also return the state after the last key. Default False.
    return_log_normalizer : bool, optional
        Also return the log of the denominator, ``(..., L)``, in the accumulation dtype; NaN where
        a signed map makes it negative, -inf where no key is seen. Default False.
    return_states_every : int, optional
        c: also return, as the last result, a list of the L // c states after c, 2 c, ... tokens, to
        go back to or to begin others from. Causal only, without a window, clusters, stops or packed
        sequences. Default: none.
    chunk_size : int, optional
        Tokens a block. By default chosen by length, features and backend; any value gives the
        same result to rounding.
    exact_window : int, optional
        w: with tokens in blocks of w from the first one, keys of a query's own block and of those
        beside it (causal: the one before) count exactly, ``exp(scale q.k)``, and only the others
        by the map; one denominator for both. Needs a map of the softmax kernel. Query i stands at
        position i, with "lower_right" at i + S - L; L = S without a rule for what it sees. The keys
        of an initial state are far from every query. Default: no window.
    exact_clusters : int, optional
        c: keys of the c landmarks that matter most to a query count exactly, only the others by
        the map (see Notes); with a window, keys outside of it. Needs a map that assigns keys to
        landmarks (:class:`linattn.feature_maps.LandmarkFeatures`), no initial state and arrays
        whose values can be inspected. Default: none.
    sinks : int, optional
        c: the first c keys of the sequence, of each packed one, count exactly for every query that
        sees them, as those in its window do; needs `exact_window`, and no initial state. Default:
        none.
    window_bias : floating array, (..., 2 r + 1), optional
        Log weights of keys by their offset j - i from the query, -r to r, with r at most
        ``exact_window``: those of near keys, as in :func:`softmax_attention`. Default 0.
    far_bias : pair (left, right), optional
        Log weights of keys further than r to either side, each a number or an array of heads.
        Keys of an initial state stand to the left. Default: the ends of ``window_bias``.

    Returns
    -------
    output : array, (..., L, e)
        In the library, dtype and device of the inputs; or the tuple
        ``(output[, state][, log_normalizer][, states])``. A query that sees no key, or whose
        denominator is exactly 0, gets 0. NaN stays NaN.

    Raises
    ------
    TypeError
        Not an array, masked array or matrix, not a real floating dtype, arrays of different
        libraries, not a feature map, a flag that is neither True nor False.
    ValueError
        Shapes, dtypes or devices that do not fit; causal with L != S; a mask for pairs; a map
        fitted to the whole sequence with `is_causal` or stops; a window with L != S in full or
        causal attention, or with a map of another kernel; clusters with stops; states on the way
        of what is not causal; the state of
        another map. `key_bias` of NaN or +inf; `log_decay` that is positive or not finite, or
        beside L != S, stops, `window_bias`, clusters without a window, or a map that divides or
        corrects its state, or one a token in full attention. More than one of `is_causal` and the
        rules of stops; stops that decrease or lie beyond S; borders that do not rise from 0 to the
        length. `window_bias` without a middle, of NaN or +inf, without a window of at least its
        reach, or `far_bias` without it.

    Warns
    -----
    UserWarning
        More than one denominator in a hundred is negative, by a map that is not positive. Not for
        lazy and traced arrays, nor for those of CuPy, whose values are not inspected.

    See Also
    --------
    softmax_attention : exact, in quadratic time.
    decode_step : one token.
    linattn.update_state, linattn.read_state : the same in parts.

    Notes
    -----
    Time O((L + S) m (d + e)), causal O(L m (d + e + c) + L c e) with blocks of c tokens. Extra
    memory O(c m + m e) for each head worked on at once, whatever the length. float16 and bfloat16
    are accumulated in float32.

    Stops cost as causal attention where keys and queries alternate one by one, or by 64 or more.
    Otherwise, as with a small `causal_block`, they are put on common positions, at most L + S.
    Stops with leading axes are done one by one of these, and their outputs then joined, which takes
    one more copy. Packed sequences cost as much as each by itself; short ones are batched.

    A window adds O(L w (d + e)) time and O(w^2) memory, full attention also a second pass over
    the keys for every factor of 64 in L / c, and 64 states at each. Stops are done run by run:
    queries of one stop, or causal ones. A run adds up the keys of 3 w tokens, and those between its
    window and its stop, again. Numerator and denominator stay unbiased where the map is, with the
    variance of far pairs only.

    Clusters are the keys of one landmark, b_c. Query i chooses the c with the largest
    ``s q_i.b_c + log mean_j g_j + log(mean_j |k_j - b_c|^2) / 2``, means over the keys of a
    cluster outside of masks: to first order, where a key's weight is most wrong. `key_bias` has no
    say in what is chosen. Numerator and
    denominator of its keys are added to those of the landmarks that it has not chosen; all
    weights stay positive, and with c = m attention is exact. They add O(L c S / m (d + e)) time
    for clusters of equal size and O(S (d + e)) memory, a sorted copy of keys and values. What is
    chosen has no gradient.

    Random maps estimate the kernel without bias, but the ratio of two estimates is biased by
    O(1 / m), and its error grows like ``exp(|q + k|^2) / m``: on real queries and keys compute
    the error first (``linattn compare``).

    Features are summed on a log scale that cancels in the ratio, so that no constant is
    added anywhere and no scale leaks from later keys; for exponential maps the denominator of a
    row lies in [1, m S] on its own scale. A causal block whose shared scale would cost a row its
    precision is computed again by divide and conquer.

    References
    ----------
    Katharopoulos et al., "Transformers are RNNs" (2020), section 3.2; Choromanski et al.,
    "Rethinking Attention with Performers" (2021), section 2.2.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 8, 1000, 64), dtype=np.float32)
    >>> phi = linattn.feature_maps.PositiveFeatures(64, num_features=256, rng=0)
    >>> linattn.linear_attention(query, key, value, phi, is_causal=True).shape
    (8, 1000, 64)
    """
    return_state = _checks.check_flag("return_state", return_state)
    problem = linear_problem(
        query,
        key,
        value,
        feature_map,
        is_causal=is_causal,
        key_mask=key_mask,
        key_bias=key_bias,
        key_lengths=key_lengths,
        key_stop=key_stop,
        prefix_length=prefix_length,
        causal_block=causal_block,
        cu_seqlens=cu_seqlens,
        log_decay=log_decay,
        normalize=normalize,
        initial_state=initial_state,
        chunk_size=chunk_size,
        want_log=return_log_normalizer,
        exact_window=exact_window,
        exact_clusters=exact_clusters,
        sinks=sinks,
        window_bias=window_bias,
        far_bias=far_bias,
    )
    if initial_state is None and hasattr(feature_map, "_check_keys"):
        feature_map._check_keys(problem)
    stamp = partial(stamped, before=initial_state, feature_map=feature_map)
    output, *extra = _solved(problem, return_state, return_states_every, stamp)
    wanted = (return_state, return_log_normalizer, return_states_every is not None)
    return (output, *compress(extra, wanted)) if any(wanted) else output


def _solved(
    problem: Problem, return_state: bool, interval: Any, stamp: Callable[..., State]
) -> tuple[Array, State | None, Array | None, list[State] | None]:
    """Solve a problem, also for the states on the way, each as that of its prefix."""
    if interval is None:
        output, state, norm = forward.solve(problem, return_state=return_state)
        return output, None if state is None else stamp(state, problem=problem), norm, None
    interval = _checks.check_positive_int("return_states_every", interval)
    output, last, norm, states = forward.solve_in_parts(problem, interval)
    prefixes = [take_rows(problem, slice(i * interval)) for i in range(1, len(states) + 1)]
    on_the_way = [stamp(s, problem=part) for s, part in zip(states, prefixes, strict=True)]
    return output, stamp(last, problem=problem), norm, on_the_way


@overload
def softmax_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_log_normalizer: Literal[False] = False,
    **options: Unpack[SoftmaxOptions],
) -> ArrayT: ...


@overload
def softmax_attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    return_log_normalizer: Literal[True],
    **options: Unpack[SoftmaxOptions],
) -> tuple[ArrayT, Array]: ...


@overload
def softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_log_normalizer: bool = False,
    **options: Unpack[SoftmaxOptions],
) -> Any: ...


@_arrays.as_autocast("query", "key", "value")
def softmax_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    is_causal: bool | Literal["lower_right"] = False,
    key_mask: Array | None = None,
    key_bias: Array | None = None,
    key_lengths: Any = None,
    key_stop: Any = None,
    prefix_length: Any = None,
    causal_block: int | None = None,
    cu_seqlens: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    sinks: int | None = None,
    window_bias: Array | None = None,
    far_bias: tuple[Any, Any] | None = None,
    return_log_normalizer: bool = False,
) -> Any:
    r"""Exact softmax attention in linear memory.

    .. math::
        o_i = \sum_j \mathrm{softmax}_j(s \, q_i \cdot k_j + b_j + c_{j - i}) \, v_j

    over the keys j that query i sees. Letters: ``L`` queries, ``S`` keys, ``d`` dim, ``e`` value
    dim, ``s`` scale, ``b`` and ``c`` biases, 0 unless given.

    Parameters
    ----------
    query : array, (..., L, d)
        float16, bfloat16, float32 or float64, of any array-API library.
    key : array, (..., S, d)
        Same library, dtype and device.
    value : array, (..., S, e)
        Same library, dtype and device.
    scale : float, optional
        s; default ``1 / sqrt(d)``.
    is_causal, key_mask, key_lengths, key_stop, prefix_length, causal_block, cu_seqlens
        As for :func:`linear_attention`.
    key_bias : floating array, of the shapes that a mask may have, optional
        b_j, added to the logits of key j. A key of -inf is masked. Default 0.
    local_window_size : int or pair (left, right), optional
        Sliding window: query i sees keys i - left to i + right only, of those before its stop; one
        integer is both, None in a pair is no bound, and when causal right is 0. Query i stands at
        position i, with "lower_right" at i + S - L; full and causal attention need L = S. Default:
        no window.
    sinks : int, optional
        The first so many keys of the sequence, of each packed one, are seen outside of the window
        too, as in StreamingLLM; causal queries and those with stops see them where they see keys
        there at all. Needs `local_window_size`. Default: none.
    window_bias : floating array, (..., 2 r + 1), optional
        c for offsets j - i from -r to r, added to the logits; leading axes (heads) broadcast to
        those of the output. -inf leaves a pair out. Positions as for a window. Default: no bias.
    far_bias : pair (left, right), optional
        c for offsets below -r and above r, each a number or an array of heads, ``(...)``. Default:
        the first and the last of ``window_bias``, as in T5.
    return_log_normalizer : bool, optional
        Also return the log of the denominator, ``(..., L)``, in the accumulation dtype; -inf where
        no key is seen. Default False.

    Returns
    -------
    output : array, (..., L, e)
        In the library, dtype and device of the inputs; or the tuple ``(output, log_normalizer)``.
        0 for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear_attention`; a window or bias of offsets with L != S in full or causal
        attention; a `window_bias` without a middle, a bias of NaN or +inf, a `far_bias` alone.

    See Also
    --------
    linattn.merge_outputs : attention over all keys from that over some and over the others.

    Notes
    -----
    Time O(L S (d + e)), O(L w (d + e)) with a window of w keys; memory O(c^2 + c e) beyond inputs
    and outputs, c tokens a block: blocks of keys are combined as in online softmax. Logits of any
    size are safe.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), eq. 1; Rabe and Staats, "Self-attention
    Does Not Need O(n^2) Memory" (2021); Beltagy et al., "Longformer" (2020), for the window;
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), section 2.1, for the bias; Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks" (2024), for sinks.
    """
    problem = exact_problem(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        key_mask=key_mask,
        key_bias=key_bias,
        key_lengths=key_lengths,
        key_stop=key_stop,
        prefix_length=prefix_length,
        causal_block=causal_block,
        cu_seqlens=cu_seqlens,
        local_window_size=local_window_size,
        sinks=sinks,
        window_bias=window_bias,
        far_bias=far_bias,
        want_log=return_log_normalizer,
    )
    output, _, log_normalizer = forward.solve(problem, return_state=False)
    return (output, log_normalizer) if return_log_normalizer else output


@_arrays.as_autocast("query", "key", "value")
def decode_step(
    query: ArrayT,
    key: Array,
    value: Array,
    state: State,
    feature_map: FeatureMap,
    *,
    key_bias: Array | float | None = None,
    log_decay: Array | float | None = None,
) -> tuple[ArrayT, State]:
    """Causal linear attention of one token after a state.

    Parameters
    ----------
    query, key : array, (..., d)
        One token; no length axis. Leading axes of the key broadcast to those of the state and add
        none; the query may have more: several queries for one key.
    value : array, (..., e)
        Its value, with leading axes as of the key.
    state : State
        Everything seen before; it is not changed.
    feature_map : FeatureMap
        The map of the state.
    key_bias : float or floating array of the key's leading axes, up to axes of 1, optional
        Log weight of the key. Default 0.
    log_decay : likewise, optional
        What the state decays by before the token, at most 0. Default 0.

    Returns
    -------
    output : array, (..., e)
        What causal attention over the whole sequence gives at this token.
    state : State
        The state after it, of the same shape.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear_attention`; a state of another shape, dtype or library; keys or values
        with more leading axes than the state; a bias of NaN or +inf, a decay above 0 or not finite.

    See Also
    --------
    linattn.Decoder : the same, keeping the state.

    Notes
    -----
    Time and memory O(m (d + e)), whatever the context length.
    """
    weights = {"key_bias": key_bias, "log_decay": log_decay}
    problem = step_problem(query, key, value, state, feature_map, **weights)
    assert problem.state is not None
    output, after = forward.step(problem, problem.state)
    return output, stamped(after, state, feature_map, problem)
