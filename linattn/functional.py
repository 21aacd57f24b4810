"""Linear attention, exact softmax attention, and linear attention one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, Literal, Unpack, overload

import numpy as np

from linattn import _arrays, _checks
from linattn._driver import forward
from linattn._driver.blocks import take_rows
from linattn._driver.options import SoftmaxOptions, WindowOptions
from linattn._driver.problem import exact_problem, linear_problem, step_problem
from linattn._driver.stamps import stamped
from linattn._home import step_at_home
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
    r"""Return attention with the kernel of a feature map, in time linear in the length.

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
        True = attend. Masked keys and values are ignored, even if they are NaN. They keep their
        positions: `log_decay` acts there too.
    key_bias : floating array, of the shapes that a mask may have, optional
        Log weight of each key: its weights are multiplied by ``exp(key_bias)``. A key of -inf is
        masked. Default 0.
    key_lengths : int or integer array, key.shape[:-2] with axes of 1, optional
        How many leading keys count. The others are masked, and `log_decay` acts there too.
    key_stop : integers, (L,) or (..., L), optional
        Query i sees keys 0 to ``key_stop[i] - 1``; stops must not decrease with i. Leading axes
        broadcast to the ones of key and value. Values are inspected: no traced arrays. Give at most
        one of `is_causal`, `key_stop`, `prefix_length` and `causal_block`.
    prefix_length : int or integers, (...), optional
        P: all queries see the first P keys, and attention is causal after them:
        ``key_stop = max(P, i + 1)``. Needs L = S.
    causal_block : int, optional
        Tokens in blocks of B see their own block and all before it:
        ``key_stop = B ceil((i + 1) / B)``. Needs L = S.
    cu_seqlens : integers, (n + 1,), optional
        The token axis holds n sequences one after the other; the i-th is tokens ``cu_seqlens[i]``
        to ``cu_seqlens[i + 1] - 1``. Each is attended to separately, full or causal. It starts from
        the state ``kvz[i]`` of `initial_state`. The arrays of initial and returned states have a
        first axis of n; their ``length`` is that of the longest sequence. Not with `key_lengths`.
    log_decay : float or floating array, key.shape[:-2] or key.shape[:-1] with axes of 1, optional
        g, at most 0: one number for all, one per head, or one per token. The state decays before a
        token is added: ``S_t = exp(g_t) S_{t-1} + psi(k_t) [v_t, 1]``. So the weight of key j for
        query i is multiplied by ``exp(g_{j+1} + ... + g_i)``. Full attention takes one number for
        all or one per head. It decays with distance in both directions, ``exp(g |i - j|)``, as
        ALiBi does. Exact keys of a window, and of clusters with a window, decay too. In a padded
        batch masked positions still decay the state; ``log_decay=np.where(mask, g, 0)`` leaves it
        unchanged there.
    normalize : bool, optional
        False: return the numerator only. It is on its true scale, which may overflow. Default
        True.
    initial_state : State, optional
        State of earlier keys, which all queries see. A causal stream continues from it; full
        attention attends to the earlier keys and to these.
    return_state : bool, optional
        Also return the state after the last key. Default False.
    return_log_normalizer : bool, optional
        Also return the log of the denominator, ``(..., L)``, in the accumulation dtype; NaN where
        a signed map makes it negative, -inf where no key is seen. Default False.
    return_states_every : int, optional
        c: also return, as the last result, a list of the L // c states after c, 2 c, ... tokens.
        Streams can continue from each of them. Only with ``is_causal=True``, without a window,
        clusters, stops or packed sequences. Default: none.
    chunk_size : int, optional
        Tokens in a block. Default: chosen by length, features and backend. Any value gives the
        same result to rounding.
    exact_window : int, optional
        w: nearby keys count exactly, as ``exp(scale q.k)``, all other keys through the map, with
        one denominator. Blocks of w tokens start at the first token. Nearby keys are in the query's
        block or in a neighboring block; if causal, in the query's block or the one before. Needs a
        map of the softmax kernel. Query i is at position i, with "lower_right" at i + S - L. Full
        and causal attention need L = S. Keys of an initial state are never nearby. Default: no
        window.
    exact_clusters : int, optional
        c: keys of the c landmarks that matter most to a query count exactly, all other keys through
        the map (see Notes). With a window, landmarks add keys outside of it. Needs a map that
        assigns keys to landmarks (:class:`linattn.feature_maps.LandmarkFeatures`), no initial state
        and arrays whose values can be inspected. Default: none.
    sinks : int, optional
        c: the first c keys of each sequence count exactly for every query that sees them. Needs
        `exact_window` and no initial state. Default: none.
    window_bias : floating array, (..., 2 r + 1), optional
        Log weights of nearby keys by their offset j - i from the query, -r to r, as in
        :func:`softmax_attention`; r is at most ``exact_window``. Default 0.
    far_bias : pair (left, right), optional
        Log weights of keys further than r to either side, each a number or an array of heads.
        Keys of an initial state are on the left. Default: the ends of ``window_bias``.

    Returns
    -------
    output : array, (..., L, e)
        In the library, dtype and device of the inputs; or the tuple
        ``(output[, state][, log_normalizer][, states])``. A query that sees no key, or whose
        denominator is exactly 0, gets 0. NaN stays NaN.

    Raises
    ------
    TypeError
        An argument is no array (or is a masked array or a matrix), its dtype is not real floating,
        libraries differ, `feature_map` is no feature map, or a flag is no bool.
    ValueError
        * Shapes, dtypes or devices do not fit, or a mask has an axis for queries.
        * `is_causal` is True and L != S; `return_states_every` is given without `is_causal`.
        * The map was fitted to the whole sequence, and `is_causal` or stops are given.
        * The state belongs to another map.
        * More than one of `is_causal`, `key_stop`, `prefix_length` and `causal_block` is given;
          stops decrease or exceed S; `cu_seqlens` does not increase from 0 to the length.
        * `key_bias` holds NaN or +inf.
        * `log_decay` is positive or not finite. It is given with L != S, stops, `window_bias`,
          clusters without a window, or a map that divides or corrects its state. Full attention
          gets a decay per token.
        * A window is given with L != S in full or causal attention, or with a map of another
          kernel; clusters are given with stops.
        * `window_bias` has an even length, holds NaN or +inf, or r exceeds the window; `far_bias`
          is given without `window_bias`.

    Warns
    -----
    UserWarning
        More than one denominator in a hundred is negative, with a map that is not positive. Values
        of lazy, traced and CuPy arrays are not inspected: they give no warning.

    See Also
    --------
    softmax_attention : exact, in quadratic time.
    decode_step : one token.
    linattn.update_state, linattn.read_state : the same in parts.

    Notes
    -----
    Time O((L + S) m (d + e)), causal O(L m (d + e + c) + L c e) with blocks of c tokens. Extra
    memory is O(c m + m e) for each head that runs in parallel, whatever the length. Full attention
    with a decay needs e + 2 numbers a row more, and stops four positions. Values far from 1 are
    copied. float16 and bfloat16 are accumulated in float32.

    Stops cost as much as causal attention if keys and queries alternate one at a time, or in runs
    of 64 or more. Otherwise, as with a small `causal_block`, keys and queries are padded to common
    positions, at most L + S. With leading axes, stops are computed one row at a time, and joining
    the outputs takes one more copy. Packed sequences cost as much as separate ones; short sequences
    are batched.

    A window adds O(L w (d + e)) time and O(w^2) memory. Full attention also makes a second pass
    over the keys for every factor of 32 in L / c, with 32 states each. With stops, queries that see
    keys beyond their windows are taken in runs, and each key is added at most three times. Windows
    below 64 tokens pad as small blocks do. If the map is unbiased, numerator and
    denominator stay unbiased, with the variance of the far pairs only.

    A cluster holds the keys of one landmark b. Query i chooses the c landmarks with the largest
    ``s q_i.b + log mean_j g_j + log(mean_j |k_j - b|^2) / 2``, with means over the unmasked keys of
    the cluster, sinks included, and distances in the metric of the map. To first order, the weights
    of these keys have the largest errors. `key_bias` does not influence the choice. The chosen keys
    and the other landmarks share one numerator and one denominator. All weights stay positive, and
    with c = m attention is exact. Clusters of equal size add O(L c S / m (d + e)) time. A sorted
    copy of keys and values takes O(S (d + e)) memory. No gradient passes through the choice.

    Random maps estimate the kernel without bias, but the ratio of two estimates has a bias of
    O(1 / m). Its error grows like ``exp(|q + k|^2) / m``: measure the error on your own queries and
    keys first (``linattn compare``).

    Features are summed on a log scale that cancels in the ratio. So no constant is added to a
    denominator, and no scale leaks from later keys. For exponential maps the denominator of a row
    is between 1 and m S on its own scale. If the shared scale of a causal block would cost a row
    its precision, the block is computed again by divide and conquer.

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
    wanted = (return_state, return_log_normalizer, return_states_every is not None)
    output, *extra = _solved(problem, wanted, return_states_every, stamp)
    return (output, *compress(extra, wanted)) if any(wanted) else output


def _solved(
    problem: Problem, wanted: tuple[bool, bool, bool], interval: Any, stamp: Callable[..., State]
) -> tuple[Array, State | None, Array | None, list[State] | None]:
    """Solve a problem; with an interval, also return the states of its prefixes."""
    if interval is None:
        output, state, norm = forward.attend(problem, return_state=wanted[0], return_log=wanted[1])
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
    r"""Return exact softmax attention, in quadratic time and linear memory.

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
        Sliding window: query i sees only keys i - left to i + right, and of these only keys before
        its stop. One integer sets both sides; None in a pair sets no bound; if causal, right is 0.
        Query i is at position i, with "lower_right" at i + S - L. Full and causal attention need
        L = S. Default: no window.
    sinks : int, optional
        How many leading keys of each sequence are seen outside of the window too, on either side,
        as in StreamingLLM. Causal queries and queries with stops still see no key at or after their
        stop. Needs `local_window_size`. Default: none.
    window_bias : floating array, (..., 2 r + 1), optional
        c for offsets j - i from -r to r, added to the logits. Leading axes (heads) broadcast to
        the ones of the output. -inf leaves a pair out. Positions as for a window. Default: no bias.
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
        As :func:`linear_attention`. A window or `window_bias` is given with L != S in full or
        causal attention; `window_bias` has an even length; a bias holds NaN or +inf; `far_bias` is
        given without `window_bias`.

    See Also
    --------
    linattn.merge_outputs : merge attention over parts of the keys.

    Notes
    -----
    Time O(L S (d + e)), or O(L w (d + e)) with a window of w keys. Memory beyond inputs and outputs
    is O(c^2 + c e) with blocks of c tokens, combined as in online softmax. Logits of any size are
    safe.

    References
    ----------
    Vaswani et al., "Attention Is All You Need" (2017), eq. 1; Rabe and Staats, "Self-attention
    Does Not Need O(n^2) Memory" (2021); Beltagy et al., "Longformer" (2020), for the window;
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer" (2020), section 2.1, for the bias; Xiao et al., "Efficient Streaming Language
    Models with Attention Sinks" (2024), for sinks.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
    >>> linattn.softmax_attention(query, key, value, is_causal=True, local_window_size=16).shape
    (8, 100, 64)
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
    output, _, log_normalizer = forward.attend(
        problem, return_state=False, return_log=return_log_normalizer
    )
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
    """Attend with one more token: return its output and the new state.

    Parameters
    ----------
    query, key : array, (..., d)
        One token; no length axis. Leading axes of the key broadcast to the ones of the state and
        add none. The query may have more: several queries share a key.
    value : array, (..., e)
        Value of the token, with leading axes like the key.
    state : State
        State of all earlier tokens; it is not changed.
    feature_map : FeatureMap
        The map of the state.
    key_bias : float or floating array of the key's leading axes, up to axes of 1, optional
        Log weight of the key. Default 0.
    log_decay : float or floating array of the key's leading axes, up to axes of 1, optional
        Log of the factor that the state is multiplied by before the token, at most 0. Default 0.

    Returns
    -------
    output : array, (..., e)
        Output of causal attention over the whole sequence at this token.
    state : State
        State after the token, of the same shape.

    Raises
    ------
    TypeError, ValueError
        As :func:`linear_attention`. The state has another shape, dtype or library; keys or values
        have more leading axes than the state; the bias is NaN or +inf; the decay is above 0 or not
        finite.

    See Also
    --------
    linattn.Decoder : an object that does the same and stores the state.

    Notes
    -----
    Time and memory O(m (d + e)), whatever the context length.

    Examples
    --------
    >>> import numpy as np
    >>> import linattn
    >>> phi = linattn.feature_maps.EluFeatures()
    >>> token = np.ones((8, 64), dtype=np.float32)
    >>> state = linattn.init_state(phi, 64, batch_shape=(8,), like=token)
    >>> output, state = linattn.decode_step(token, token, token, state, phi)
    >>> output.shape, state.length
    ((8, 64), 1)
    """
    weights = {"key_bias": key_bias, "log_decay": log_decay}
    if not isinstance(query, np.ndarray) and key_bias is None and log_decay is None:
        answer = step_at_home(decode_step, (query, key, value), state, feature_map)
        if answer is not None:
            return answer  # type: ignore[no-any-return]
    problem = step_problem(query, key, value, state, feature_map, **weights)
    assert problem.state is not None
    output, after = forward.step(problem, problem.state)
    return output, stamped(after, state, feature_map, problem)
