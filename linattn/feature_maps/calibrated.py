"""Frozen features calibrated on sample queries and keys: a drop-in for pretrained attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import sqrt
from types import ModuleType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn import _arrays, _checks, _files
from linattn.feature_maps import _calibration
from linattn.feature_maps._base import SoftmaxKernelMap
from linattn.feature_maps._samples import Sample, check_samples, pool_heads
from linattn.sampling import Seed, as_generator
from linattn.typing import Array, Exponential, Normalized

__all__ = ["CalibratedFeatures"]

Floats = NDArray[np.float64]


class CalibratedFeatures(SoftmaxKernelMap):
    r"""Exponential features around fixed centroids, each key shared out among them.

    .. math::
        \phi_c(q) = e^{s\, b_c \cdot q + \beta_c}, \qquad
        \psi_c(k) = e^{z_c} \Big( \sum_r e^{z_r} \Big)^{-\eta} e^{t \cdot k}, \quad
        z_c = a_c \cdot k + \alpha_c

    and ``phi(q).psi(k)`` approximates ``exp(s q.k)``, its size included, for queries and keys like
    the samples. :meth:`calibrate` makes the map. Letters: ``d`` dim, ``m`` features,
    ``s`` scale.

    Parameters
    ----------
    centroids : array_like, (..., m, d)
        b; leading axes are heads, each with a map of its own.
    query_bias : array_like, (..., m)
        beta.
    key_weights : array_like, (..., m, d)
        a.
    key_bias : array_like, (..., m)
        alpha.
    tilt : array_like, (..., d)
        t.
    power : float or array_like (heads), optional
        eta. Default 1: a softmax over the centroids.
    scale : float, optional
        s > 0; default ``1 / sqrt(d)``.

    Attributes
    ----------
    centroids, query_bias, key_weights, key_bias, tilt, power : ndarray
        As above, float64, read-only.
    dim, num_features : int
        d and m.
    scale : float
        s.
    positive, unbiased, causal : bool
        What may be relied on: positive, biased, and causal, for the map has not seen the sequence
        it is used on.

    Raises
    ------
    TypeError, ValueError
        Shapes that do not fit, NaN or inf, a scale that is not positive.

    Notes
    -----
    Deterministic: the variance is 0, and the error a bias that depends on how well the samples
    cover what comes. All features are positive: the denominator is, and outputs are in the convex
    hull of the values. States merge, and the map may be used causally. It fails on queries and
    keys unlike all of the samples (other positions, lengths, texts); an exact window
    (``linear_attention(..., exact_window=w)``) takes most of that error away. Time O(n m d),
    memory O(n m).

    References
    ----------
    Derived in this project. Pivots: Harbrecht, Peters and Schneider, "On the low-rank
    approximation by the pivoted Cholesky decomposition" (2012). Features learned from a pretrained
    model's own weights: Zhang et al., "The Hedgehog & the Porcupine" (2024).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.feature_maps import CalibratedFeatures
    >>> rng = np.random.default_rng(0)
    >>> samples = [tuple(rng.standard_normal((2, 8, 100, 4))) for _ in range(3)]
    >>> CalibratedFeatures.calibrate(samples, num_features=16)  # doctest: +ELLIPSIS
    CalibratedFeatures(dim=4, num_features=16, heads=(8,), scale=0.5, fingerprint=...)
    """

    positive = True
    unbiased = False
    _made_by = "calibrate(samples)"
    _parameters = (
        "scale",
        "centroids",
        "query_bias",
        "key_weights",
        "key_bias",
        "tilt",
        "power",
    )

    dim: int
    num_features: int
    centroids: Floats
    query_bias: Floats
    key_weights: Floats
    key_bias: Floats
    tilt: Floats
    power: Floats
    _heads: tuple[int, ...]

    def __init__(
        self,
        centroids: ArrayLike,
        query_bias: ArrayLike,
        key_weights: ArrayLike,
        key_bias: ArrayLike,
        *,
        tilt: ArrayLike,
        power: ArrayLike = 1.0,
        scale: float | None = None,
    ) -> None:
        b = _checks.check_parameter("centroids", centroids)
        if b.ndim < 2 or 0 in b.shape[-2:]:
            raise ValueError(f"centroids must have shape (..., num_features, dim), got {b.shape}")
        m, d = b.shape[-2:]
        wanted = {
            "centroids": (b, (m, d)),
            "query_bias": (query_bias, (m,)),
            "key_weights": (key_weights, (m, d)),
            "key_bias": (key_bias, (m,)),
            "tilt": (tilt, (d,)),
            "power": (power, ()),
        }
        arrays = {name: _checks.check_parameter(name, *pair) for name, pair in wanted.items()}
        leads = {
            name: array.shape[: array.ndim - len(wanted[name][1])] for name, array in arrays.items()
        }
        scale = 1 / sqrt(d) if scale is None else scale
        self._set(
            dim=d,
            num_features=m,
            scale=_checks.check_finite_number("scale", scale, positive=True),
            _heads=_checks.check_leading_axes(**leads),
            **arrays,
        )

    def _repr_parameters(self) -> dict[str, Any]:
        """Show sizes instead of the numbers."""
        heads = {"heads": self._heads} if self._heads else {}
        return {"dim": self.dim, "num_features": self.num_features, **heads, "scale": self.scale}

    @classmethod
    @_arrays.on_array_device
    def calibrate(
        cls,
        samples: Any,
        *,
        num_features: int = 64,
        exact_window: int | None = None,
        is_causal: bool = False,
        learn: bool = False,
        bandwidth: float | None = None,
        num_steps: int = 400,
        learning_rate: float = 0.05,
        batch_size: int = 2,
        scale: float | None = None,
        rng: Seed = None,
        callback: Callable[[int, float], None] | None = None,
    ) -> Self:
        r"""Make a map for queries and keys like these, one for each head of the keys.

        Parameters
        ----------
        samples : sequence of tuples, or one tuple
            Each ``(query, key)`` or ``(query, key, value)`` of one sequence, ``(..., L, d)``,
            ``(..., S, d)`` and ``(..., S, e)``, valid tokens only: there is no mask, leave padding
            out. Leading axes are heads, the same in all samples; lengths may differ. A batch is
            given as a list of its sequences. Values are needed to learn. Of Dask arrays a sample of
            rows is computed: see Notes.
        num_features : int, optional
            m, at most the number of keys in all samples together. Default 64.
        exact_window : int, optional
            The window that the map will be used with; None for none. Only pairs outside of it are
            left to the map: by them keys are weighed, and the map is learned.
        is_causal : bool, optional
            Whether the map will be used causally; as ``exact_window``. Default False.
        learn : bool, optional
            Improve the closed form by gradient steps on the samples. Default False.
        bandwidth : float, optional
            h, in squared logits: keys whose logits differ by less than ``sqrt(h)`` over the queries
            share a centroid. Default 0.05, and 0.5 to start learning from.
        num_steps : int, optional
            Steps of learning. Default 400.
        learning_rate : float, optional
            Of learning, by Adam. Default 0.05.
        batch_size : int, optional
            Sequences a step. Default 2.
        scale : float, optional
            s; default ``1 / sqrt(d)``.
        rng : int, Generator, SeedSequence or None, optional
            Seed of the order in which sequences are learned from, and of the sample of rows of Dask
            arrays; nothing else is random.
        callback : callable, optional
            ``callback(step, loss)`` after each step of learning, with the mean loss of its batch.

        Returns
        -------
        CalibratedFeatures
            With the leading axes of the keys: query heads that share a key head share its map.

        Raises
        ------
        TypeError
            Samples that are not tuples of arrays; as :func:`linattn.linear_attention` for each.
        ValueError
            No sample, no token, NaN or inf, shapes that do not fit, fewer keys than features,
            learning without values or causally from unequal lengths; numbers out of range; learning
            that has diverged.

        Notes
        -----
        Closed form, of c the mean and Sigma the covariance of all queries and the metric
        ``|x|^2 = s^2 x.Sigma x``, under which a squared distance of two keys is the variance of
        their logits' difference: b are keys chosen by pivoted Cholesky factorization of
        ``exp(-|k - k'|^2 / 2)`` (the Gram matrix of the keys' columns of attention, each of norm 1,
        under Gaussian queries), then moved by three steps of Lloyd's algorithm to the weighted
        means of their clusters, a key weighing ``sqrt(mean_i A_ij^2)`` of the exact weights A of at
        most 256 queries of its sequence, pairs in the window left out; ``a_c = s^2 Sigma b_c / h``,
        ``alpha_c = -|b_c|^2 / (2 h)``, ``beta_c = -s c.b_c``, ``t = s c``, ``eta = 1``. At q = c
        it is exact for every key; when all keys are shifted the attention does not change. Time
        O(n m (m + d)) a head, memory O(n m), n keys in all.

        Learning minimizes by Adam, over all parameters of all heads together, the mean over
        sequences of ``|out - exact| / |exact| + 0.1 KL(exact weights || weights)``, through the
        window and the mask that are asked for: tokens are in blocks of ``exact_window`` from the
        start, a key in the block of the query or a neighbour of it is exact. Inputs are scaled by
        ``sqrt(s)`` for it. Time O(num_steps batch_size n^2 (m + d + e)) a head, memory O(n^2) a
        head, n tokens of a sequence. Few and short samples are overfit.

        A sequence of Dask arrays stands for itself by 128 runs of 64 rows, one after the other,
        drawn as by :meth:`LandmarkFeatures.fit`; a shorter one is taken whole. Between tokens of
        different runs there is no distance, so that a window should be no longer than a run.
        """
        m = _checks.check_positive_int("num_features", num_features)
        if exact_window is not None:
            exact_window = _checks.check_positive_int("exact_window", exact_window)
        is_causal = _checks.check_flag("is_causal", is_causal)
        learn = _checks.check_flag("learn", learn)
        h = (0.5 if learn else 0.05) if bandwidth is None else bandwidth
        h = _checks.check_finite_number("bandwidth", h, positive=True)
        steps = _checks.check_positive_int("num_steps", num_steps)
        batch_size = _checks.check_positive_int("batch_size", batch_size)
        rate = _checks.check_finite_number("learning_rate", learning_rate, positive=True)
        generator = as_generator(rng)
        unused = generator.bit_generator.state
        sequences, heads, _, scale = check_samples(samples, scale, generator, with_value=learn)
        _check_sequences(sequences, m, is_causal=is_causal)
        x = np.concatenate([pool_heads(sample.x, heads) for sample in sequences], axis=-2)
        y = np.concatenate([sample.y for sample in sequences], axis=-2)
        pattern = _calibration.Pattern(exact_window, is_causal)
        weights = [_calibration.importance(sample, pattern) for sample in sequences]
        found = _calibration.closed_form(x, y, np.concatenate(weights, axis=-1), m, h)
        if learn:
            found = _calibration.learn(
                found,
                sequences,
                pattern,
                steps=steps,
                learning_rate=rate,
                batch_size=batch_size,
                rng=generator,
                callback=callback,
            )
            if not all(np.isfinite(p).all() for p in found):
                raise ValueError(
                    f"learning_rate must be small enough to converge, {learning_rate} is not"
                )
        root, drew = sqrt(scale), generator.bit_generator.state != unused
        fitted = cls(
            *(found.b / root, found.beta, found.a * root, found.alpha),
            tilt=found.t * root,
            power=found.eta[..., 0],
            scale=scale,
        )
        fitted._set(_unseeded=rng is None and drew)
        return fitted

    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Exponential:
        """Spec of the query side: ``P = s b^T``, no curvature, ``col = beta``."""
        return Exponential(
            _arrays.device_array(
                self.scale * np.swapaxes(self.centroids, -1, -2), xp, dtype, device
            ),
            0.0,
            _arrays.device_array(self.query_bias, xp, dtype, device),
        )

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> Normalized:
        """Spec of the key side: ``P = a^T``, ``col = alpha``, power eta, tilt t."""
        return Normalized(
            _arrays.device_array(np.swapaxes(self.key_weights, -1, -2), xp, dtype, device),
            _arrays.device_array(self.key_bias, xp, dtype, device),
            _arrays.device_array(self.power[..., None, None], xp, dtype, device),
            _arrays.device_array(self.tilt[..., :, None], xp, dtype, device),
        )

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of :meth:`estimate`: the estimate, for nothing in it is random."""
        return self.estimate(x, y)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the map to a file, for :meth:`load`.

        Parameters
        ----------
        path : str or path-like
            Where to; the name is used as it is. An existing file is replaced in one step, so that
            an interruption leaves the old file or the new one.

        Raises
        ------
        OSError
            The file cannot be written.

        Notes
        -----
        An uncompressed npz file, without pickle, of ``m (2 d + 2) + d + 1`` float64 a head.
        """
        arrays = {name: getattr(self, name) for name in self._parameters}
        self._format().write(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a map that :meth:`save` saved.

        Parameters
        ----------
        path : str or path-like
            The file; it need not be trusted.

        Returns
        -------
        CalibratedFeatures
            Equal to the map that was saved, bit for bit.

        Raises
        ------
        StateFileError
            Not such a file, damaged, or of a newer format.
        OSError
            The file cannot be read.

        Notes
        -----
        Nothing is unpickled, and no more is read than the file holds.
        """

        def build(arrays: _files.Arrays) -> CalibratedFeatures:
            parameters: dict[str, Any] = {name: arrays[name] for name in cls._parameters}
            return cls(**parameters | {"scale": float(arrays["scale"])})

        return cast(Self, cls._format().read(path, build))

    @classmethod
    def _format(cls) -> _files.Format:
        arrays = {name: ("f", None) for name in cls._parameters}
        return _files.Format(cls.__name__, 1, {**arrays, "scale": ("f", 0)})


def _check_sequences(sequences: list[Sample], num_features: int, *, is_causal: bool) -> None:
    num_keys = sum(sample.y.shape[-2] for sample in sequences)
    if num_keys < num_features:
        raise ValueError(
            f"num_features must be at most the {num_keys} keys of the samples, got {num_features}; "
            f"give more samples, or ask for fewer features"
        )
    for i, sample in enumerate(sequences):
        num_queries, num_keys = sample.x.shape[-2], sample.y.shape[-2]
        if is_causal and num_queries != num_keys:
            raise ValueError(
                f"samples[{i}] must have as many queries as keys with is_causal, got "
                f"{num_queries} and {num_keys}"
            )
