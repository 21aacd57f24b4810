"""Landmarks: the keys of a sequence grouped by how its own queries see them."""

from __future__ import annotations

import warnings
from functools import partial
from math import sqrt
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks, _dispatch, _numerics
from linattn.feature_maps._base import SoftmaxKernelMap, dots
from linattn.feature_maps._clusters import LLOYD_STEPS, power_of_two
from linattn.feature_maps._drawn_projection import draw_projection
from linattn.feature_maps._landmark_fit import (
    fit_landmarks,
    is_concrete,
    log_normalizers,
    log_sum,
    take_inputs,
)
from linattn.feature_maps.exponential import PositiveFeatures
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Assigned, Corrected, Exponential, Problem
from linattn.typing._shifts import constant

__all__ = ["LandmarkFeatures"]

Floats = NDArray[np.float64]

NUM_PROBES_CHECKED, MAX_LOG_GAP = 8, 0.05
"""How many probes are compared with the fit, and by how much their log normalizers may differ."""

RIDGE = 0.1


class LandmarkFeatures(SoftmaxKernelMap):
    r"""Feature map with one landmark for each cluster of keys, and a weight for each key.

    .. math::
        e^{s\, q \cdot k_j} \approx g_j\, e^{s\, q \cdot b_{a_j}}, \qquad
        g_j = \frac{\sum_i A_{ij} \Phi_{i a_j}}{\sum_i \Phi_{i a_j}^2}

    with ``A_ij = exp(s q_i.k_j - l_i)`` and ``Phi_ic = exp(s q_i.b_c - l_i)`` for p probe queries
    q_i, ``l_i = log sum_j exp(s q_i.k_j)``: ``g_j`` is the least-squares fit of key j's attention
    by its landmark's, over the probes. Key j goes to the landmark ``a_j`` that minimizes
    ``(k_j - b_c).(M (k_j - b_c))``, M the covariance of the queries: the variance over queries of
    the logit difference. Letters: ``d`` dim, ``m`` landmarks, ``p`` probes, ``s`` scale.

    Maps are made by :meth:`fit`. A key has one feature that is not 0, so that the state is a
    scatter-add; a query has the exponentials of its logits with the landmarks.

    Parameters
    ----------
    landmarks : array_like, (..., m, d)
        b; leading axes are heads.
    probes : array_like, (..., p, d)
        Queries q_i, unscaled.
    log_normalizers : array_like, (..., p)
        l; inf for a probe that does not count.
    metric : array_like, (..., d, d)
        M, up to a factor; symmetric, positive definite.
    used : array_like of bool, (..., m), optional
        Landmarks that take keys. Default all.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.
    corrected : bool, optional
        Read a signed least-squares correction of the state. Default False; see Notes.

    Attributes
    ----------
    landmarks, probes, log_normalizers, metric, used, scale, corrected
        As above, float64 (used: bool), read-only.
    dim : int
        d.
    num_features : int
        Columns of the state: m, and m + p when corrected.
    positive, unbiased, causal : bool
        What may be relied on. Never causal: landmarks have seen the whole sequence.

    Raises
    ------
    TypeError, ValueError
        Shapes that do not fit, NaN or inf, a scale that is not positive.

    See Also
    --------
    fit : from queries and keys.
    sample : random features around landmarks, unbiased.

    Notes
    -----
    Deterministic given landmarks and probes, and biased. All weights are positive, so that
    outputs are convex combinations of the values; attention of equal keys, of a landmark with one
    key, and of no more keys than landmarks, is exact. Softmax is unchanged by ``k -> k + b`` and
    ``(q, k) -> (q M, k M^-T)``, and so is this map, to rounding. Unstructured keys with logits
    of standard deviation 1 and more are hard for it.

    There is no ``redraw``: landmarks belong to a sequence, and :meth:`fit` with another seed draws
    others. States of one map merge; states of two fits do not. A map used with other keys than it
    was fitted to is mostly wrong. So :func:`linattn.linear_attention` compares the normalizers of 8
    probes, and warns if one differs by more than a factor of exp(.05). To silence it:
    ``warnings.filterwarnings("ignore", "feature_map was fitted to other keys")``. Traced arrays,
    :func:`linattn.update_state` and :func:`linattn.read_state` are not checked.

    Corrected (``positive`` is False): the p probes are columns of the state as well,
    ``Y_i = sum_j A_ij [v_j, 1]``, and the sums S at the landmarks become, with
    ``N = diag(|Phi_c|)`` and ``P = Phi N^-1``,
    ``S_1 = S + N^-1 (P^T P + I / 10)^-1 P^T (Y - Phi S)``. A query whose denominator D_1 is not
    within a factor of 2 of the uncorrected one, or whose terms in it sum to more than
    ``4 |D_1|`` in absolute value, reads S. The correction helps most without an exact window, and
    cannot be combined with one.

    Time O(n (m + p) d) for keys, O(n m d) for queries; memory O(n m + m p).

    References
    ----------
    Derived in this project. Clustered keys: Vyas et al., "Fast Transformers with Clustered
    Attention" (2020), which clusters queries; landmarks: Xiong et al., "Nystromformer" (2021).

    Examples
    --------
    >>> import linattn
    >>> query, key, value = linattn.datasets.pretrained_qkv()
    >>> phi = linattn.feature_maps.LandmarkFeatures.fit(query, key, num_features=64, rng=0)
    >>> linattn.linear_attention(query, key, value, phi).shape
    (2, 12, 256, 32)
    """

    positive: bool  # type: ignore[misc]
    unbiased = False
    causal = False
    _made_by = "fit(query, key)"
    _parameters = ("scale", "corrected", "landmarks", "probes", "log_normalizers", "metric", "used")

    dim: int
    num_features: int
    corrected: bool
    landmarks: Floats
    probes: Floats
    log_normalizers: Floats
    metric: Floats
    used: NDArray[np.bool_]

    def __init__(
        self,
        landmarks: ArrayLike,
        probes: ArrayLike,
        log_normalizers: ArrayLike,
        metric: ArrayLike,
        *,
        used: ArrayLike | None = None,
        scale: float | None = None,
        corrected: bool = False,
    ) -> None:
        corrected = _checks.check_flag("corrected", corrected)
        given = {"landmarks": landmarks, "probes": probes, "metric": metric}
        given |= {"log_normalizers": log_normalizers}
        arrays = {name: np.array(x, dtype=np.float64) for name, x in given.items()}
        b, q, M, lognorm = arrays.values()
        d = b.shape[-1:]
        fits = min(b.ndim, q.ndim, M.ndim) >= 2 and lognorm.ndim and 0 not in b.shape + q.shape
        if not fits or (q.shape[-1:], M.shape[-2:], lognorm.shape[-1]) != (d, d + d, q.shape[-2]):
            raise ValueError(
                f"landmarks must have shape (..., m, d), probes (..., p, d), metric (..., d, d) "
                f"and log_normalizers (..., p), got {b.shape}, {q.shape}, {M.shape} and "
                f"{lognorm.shape}"
            )
        live = np.ones(b.shape[:-1], dtype=bool) if used is None else np.array(used)
        if live.dtype != bool or live.shape != b.shape[:-1]:
            raise ValueError(
                f"used must be boolean and of shape {b.shape[:-1]}, one for each landmark, got "
                f"{live.dtype} {live.shape}"
            )
        _checks.check_leading_axes(
            **{name: x.shape[: -1 if x is lognorm else -2] for name, x in arrays.items()}
        )
        counts = np.isfinite(lognorm).any(axis=-1).all() and (lognorm > -np.inf).all()
        if not counts or not all(np.isfinite(x).all() for x in (b, q, M)):
            raise ValueError(
                "landmarks, probes and metric must be finite, and log_normalizers finite or inf "
                "with a finite one for each head"
            )
        m, p = b.shape[-2], q.shape[-2]
        scale = 1 / sqrt(b.shape[-1]) if scale is None else scale
        self._set(
            dim=b.shape[-1],
            num_features=m + p if corrected else m,
            scale=_checks.check_finite_number("scale", scale, positive=True),
            corrected=corrected,
            positive=not corrected,
            used=live,
            **arrays,
        )

    def _repr_parameters(self) -> dict[str, Any]:
        """Show sizes instead of numbers."""
        shown: dict[str, Any] = {"dim": self.dim, "num_features": self.num_features}
        if self.landmarks.ndim > 2:
            shown["heads"] = self.landmarks.shape[:-2]
        shown["num_probes"] = int(self.probes.shape[-2])
        shown["scale"] = self.scale
        if self.corrected:
            shown["corrected"] = True
        return shown

    @classmethod
    @_arrays.on_array_device
    def fit(
        cls,
        query: Array,
        key: Array,
        *,
        num_features: int = 64,
        num_probes: int = 128,
        key_mask: Array | None = None,
        key_bias: Array | None = None,
        query_mask: Array | None = None,
        corrected: bool = False,
        scale: float | None = None,
        lloyd_steps: int = LLOYD_STEPS,
        rng: Seed = None,
    ) -> Self:
        """Find landmarks for these queries and keys, for each head.

        Parameters
        ----------
        query : array, (..., L, d)
            Of any array-API library, concrete: values are inspected.
        key : array, (..., S, d)
            Same library, dtype and device. Leading axes broadcast: each pair of a query head and
            a key head has landmarks of its own.
        num_features : int, optional
            m, landmarks. Default 64. With m >= S attention is exact.
        num_probes : int, optional
            p, probe queries; all queries where there are fewer. Default 128.
        key_mask : boolean array, (S,) or key.shape[:-1] with axes of 1, optional
            True = attend. What masked keys hold does not matter.
        key_bias : floating array, of the shapes that a mask may have, optional
            Log weights u_j of keys that attention by the map will be given, as ``key_bias`` of
            :func:`linattn.linear_attention`. -inf masks a key. Default 0.
        query_mask : boolean array, (L,) or query.shape[:-1] with axes of 1, optional
            True = a query to be fitted to.
        corrected : bool, optional
            Correct the state by least squares; needs p >= 2 m. The map then has m + p columns.
            Default False.
        scale : float, optional
            s > 0; default ``1 / sqrt(d)``.
        lloyd_steps : int, optional
            Lloyd steps. Default 3; of them the first takes next to no time.
        rng : int, Generator, SeedSequence or None, optional
            Seed. The same seed gives the same landmarks for every library, to rounding; for Dask
            arrays only if they are taken whole.

        Returns
        -------
        LandmarkFeatures
            For the whole sequence: not causal.

        Raises
        ------
        TypeError, ValueError
            As :func:`linattn.linear_attention` for query, key, masks and biases; a traced array; no
            token at all; NaN or inf in a token that is not masked; corrected with p < 2 m.

        Notes
        -----
        The weight of key j is ``w_j = mean_i (e^{u_j} A_ij)^2``, with the bias in the normalizers
        too, ``l_i = log sum_j exp(s q_i.k_j + u_j)``: to first order, moving it to a landmark
        changes the attention of the queries by ``w_j |k_j - b|^2`` in mean square, distances in
        the metric. The map itself holds no bias. The first landmarks are drawn without replacement
        in four rounds with odds ``w_j`` times the squared distance to the nearest landmark so far;
        Lloyd steps with weights w follow. Probes are queries from equal strata of the sequence.
        Sequences longer than ``max(16 m, 1024)`` are clustered by a sample of that many keys, one
        from each of as many equal strata, and so are the queries; the normalizers l are of all
        keys. Heads share the random numbers.

        Time O(S p d + C m d) a head with C sampled keys; memory O(C (p + d)), whatever the
        length. A mask is copied to the host.

        Dask arrays: ``fit`` computes a sample of rows once, and fits to it, normalizers too. The
        sample has 128 runs of query and of key, one from each of 128 equal strata. A run has 64
        rows, or m / 8 or p / 128 if that is more; it wraps from the end of its stratum to the
        beginning. A shorter sequence is taken whole. ``rng`` draws the runs, whatever the chunks
        are. Strata and runs count tokens that a mask leaves to at least one head, so that masks and
        a bias are computed whole first. Chunks that hold a run are computed. Without a mask, if
        they are longer than strata, these are at most 256 chunks along the tokens of each array.

        Examples
        --------
        >>> import numpy as np
        >>> from linattn.feature_maps import LandmarkFeatures
        >>> query, key = np.random.default_rng(0).standard_normal((2, 8, 500, 16))
        >>> phi = LandmarkFeatures.fit(query, key, num_features=32, rng=0)
        >>> phi.dim, phi.num_features, phi.scale
        (16, 32, 0.25)
        """
        m = _checks.check_positive_int("num_features", num_features)
        p = _checks.check_positive_int("num_probes", num_probes)
        lloyd_steps = _checks.check_positive_int("lloyd_steps", lloyd_steps, least=0)
        corrected = _checks.check_flag("corrected", corrected)
        if corrected and p < 2 * m:
            raise ValueError(
                f"num_probes must be at least 2 num_features, {2 * m}, for corrected=True, got {p}"
            )
        given = take_inputs(query, key, key_mask, query_mask, scale, key_bias)
        found = fit_landmarks(given, m, p, lloyd_steps, as_generator(rng))
        fitted = cls(**found, scale=given.scale, corrected=corrected)
        fitted._set(_unseeded=rng is None)
        return fitted

    @staticmethod
    @_arrays.on_array_device
    def sample(
        query: Array,
        key: Array,
        *,
        num_features: int = 64,
        key_mask: Array | None = None,
        key_bias: Array | None = None,
        query_mask: Array | None = None,
        scale: float | None = None,
        rng: Seed = None,
    ) -> PositiveFeatures:
        r"""Draw positive random features around landmarks of these queries and keys.

        .. math::
            \omega_c \sim N(\mu_c, I), \qquad \mu_c = \sqrt{s}\, (q_i + k_j), \qquad
            \log w_c = -\log \frac1m \sum_{c'} e^{\mu_{c'} \cdot \omega_c - |\mu_{c'}|^2 / 2}

        with query i drawn at random and key j from the attention of query i.

        Parameters
        ----------
        query, key, key_mask, key_bias, query_mask, scale
            As :meth:`fit`.
        num_features : int, optional
            m rows omega. Default 64.
        rng : int, Generator, SeedSequence or None, optional
            Seed.

        Returns
        -------
        PositiveFeatures
            With rows and log weights for each head; not causal. ``unbiased`` is True: for given
            landmarks mu the mean over omega is the kernel.

        Raises
        ------
        TypeError, ValueError
            As :meth:`fit`.

        Notes
        -----
        One row from each of m proposals with weights of the balance heuristic: the sum over c of
        ``p(omega_c) / sum_c' p_c'(omega_c)`` times the product of features has the mean
        ``int p f = exp(s q.k)``. The ratio in attention is biased by O(1 / m), as for every random
        map; the variance has no closed form here.

        Queries i and keys j come from a sample of ``max(16 m, 1024)`` tokens: landmarks decide the
        variance, never the mean. Shifts of queries and keys do not change the estimate; balanced
        coordinates (:class:`Reparametrized`) lower its variance. For Dask arrays rows are computed
        as in :meth:`fit`.

        Time O(m C d + m^2 d) a head, memory O(m (C + m)) with C sampled keys.

        References
        ----------
        Veach, Guibas, "Optimally Combining Sampling Techniques for Monte Carlo Rendering" (1995),
        section 3.3, the balance heuristic.

        Examples
        --------
        >>> import linattn
        >>> query, key, value = linattn.datasets.pretrained_qkv()
        >>> phi = linattn.feature_maps.LandmarkFeatures.sample(query, key, num_features=64, rng=0)
        >>> linattn.linear_attention(query, key, value, phi).shape
        (2, 12, 256, 32)
        """
        m = _checks.check_positive_int("num_features", num_features)
        given = take_inputs(query, key, key_mask, query_mask, scale, key_bias)
        omega, log_weights = draw_projection(given, m, as_generator(rng))
        feature_map = PositiveFeatures.from_projection(
            omega, log_weights=log_weights, scale=given.scale
        )
        feature_map._set(causal=False, unbiased=True, _unseeded=rng is None)
        return feature_map

    def _check_keys(self, problem: Problem) -> None:
        """Warn if probes have other normalizers over these keys than over the keys of the fit.

        A few probes are enough. On the shipped sample, keys rounded to bfloat16 differ by .016,
        keys of the other layer or half by 1 and more. Fresh draws of 8,192 Gaussian keys differ by
        about .05.
        """
        key, weights = problem.key, problem.weights
        if 0 in key.shape or not all(is_concrete(x) for x in (key, *weights[:2]) if x is not None):
            return
        p = self.probes.shape[-2]
        few = np.linspace(0, p - 1, min(p, NUM_PROBES_CHECKED)).round().astype(np.intp)
        probes, known = self.scale * self.probes[..., few, :], self.log_normalizers[..., few]
        with _numerics.ignore_fp_warnings(), _dispatch.limited_threads():
            weights = weights.of_keys(constant)
            found = log_normalizers(probes, constant(key), problem.dtype, weights)
            # In float32 logits of 1e9 are rounded by hundreds.
            rounded = 32 * float(problem.xp.finfo(problem.dtype).eps) * np.abs(known)
            apart = np.abs(found - known) - rounded
        largest = float(np.max(apart, initial=0.0, where=np.isfinite(apart)))
        if largest > MAX_LOG_GAP:
            message = (
                f"feature_map was fitted to other keys: the normalizers of its probes differ by up "
                f"to exp({largest:.2g}); fit it to this sequence, with its key_bias if it has one, "
                f"or ignore this warning where its landmarks are meant for other keys"
            )
            warnings.warn(message, UserWarning, stacklevel=_arrays.caller_level())

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential | Corrected:
        """Spec of the query side: ``exp(s q.b_c)``."""
        to = partial(_arrays.device_array, xp=xp, dtype=dtype, device=device)
        col = np.where(self.used, 0.0, -np.inf)
        spec = Exponential(to(self.scale * self.landmarks.mT), 0.0, to(col))
        return Corrected(spec, *map(to, self._correction())) if self.corrected else spec

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Assigned:
        """Spec of the key side: ``g_j`` at column ``a_j``, and ``A_ij`` after them if corrected."""
        to = partial(_arrays.device_array, xp=xp, dtype=dtype, device=device)
        log_Phi, half_log = self._log_Phi()
        table = np.where(np.isfinite(log_Phi), log_Phi - 2 * half_log, 0.0)
        probes, offset = self.scale * self.probes.mT, -self.log_normalizers
        P, bias, probes, offset, table = map(to, (*self._scores(), probes, offset, table))
        landmarks, metric = to(self.landmarks), to(self.metric)
        return Assigned(P, bias, probes, offset, table, self.corrected, landmarks, metric)

    def _scores(self) -> tuple[Floats, Floats]:
        """P and bias: the nearest landmark in the metric has the largest ``k P + bias``."""
        b, used = self.landmarks, self.used[..., None]
        # About the mean landmark, scores are as small as the distances of the landmarks allow.
        count = np.maximum(np.sum(used, axis=-2, keepdims=True), 1)
        mean = np.sum(b, axis=-2, keepdims=True, where=used) / count
        centred = np.where(used, b - mean, 0.0)
        # The largest score counts, whatever the scores' factor: one with which they are about 1.
        unit = power_of_two(np.max(np.abs(centred), axis=(-2, -1), keepdims=True))
        images = (centred / unit) @ self.metric / unit
        bias = -np.sum(images * (centred / 2 + mean), axis=-1)
        return images.mT, np.where(self.used, bias, -np.inf)

    def _log_Phi(self) -> tuple[Floats, Floats]:
        """Log Phi, and the logs of the norms of its columns, 0 for one that is 0."""
        log = self.scale * dots(self.probes, self.landmarks) - self.log_normalizers[..., None]
        log = np.where(self.used[..., None, :], log, -np.inf)
        half = log_sum(2 * log, -2) / 2
        return log, np.where(np.isfinite(half), half, 0.0)

    def _correction(self) -> tuple[Floats, Floats]:
        """Log norms of the columns of Phi, and the matrix that takes [N S, Y] to N S_1.

        With ``R = (P^T P + ridge I)^-1`` it is ``[ridge R, R P^T]``, because
        ``N S_1 = N S + R P^T (Y - P N S)`` and ``I - R P^T P = ridge R``.
        """
        log_Phi, half_log = self._log_Phi()
        P = np.exp(log_Phi - half_log)
        with _dispatch.limited_threads():
            R = np.linalg.inv(P.mT @ P + RIDGE * np.eye(P.shape[-1]))
            return half_log[..., 0, :], np.concatenate([RIDGE * R, R @ P.mT], axis=-1)

    def variance(self, x: Array, y: Array) -> Array:
        """Refuse: given its landmarks the map is deterministic, and its error is a bias.

        Raises
        ------
        NotImplementedError
            Always: how the estimate varies with the landmarks is not known.
        """
        raise NotImplementedError(
            f"{self!r} is biased, and its variance over landmarks is not known"
        )
