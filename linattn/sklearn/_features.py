"""Random features of kernels of the difference, for linear models."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from linattn import _arrays, _checks
from linattn.feature_maps import RandomFourierFeatures
from linattn.sklearn._smoother import DTYPES, make_generator

MAX_ROWS_OF_PAIRS = 256

BLOCK_ELEMENTS = 1 << 18
"""Elements of a block of features: it fits the cache and bounds memory."""


class RandomFeatures(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    r"""Random Fourier features of a kernel, by any sampler and with an exact variance.

    .. math::
        \phi(x) = (m / 2)^{-1/2} [\cos \Omega x / h, \sin \Omega x / h], \qquad
        \mathrm{E}\, \phi(x) \cdot \phi(y) = k((x - y) / h)

    In the place of :class:`sklearn.kernel_approximation.RBFSampler`, whose ``gamma`` is
    ``1 / (2 h^2)`` and whose ``n_components`` are m. Letters: ``d`` coordinates, ``m`` features,
    ``h`` bandwidth.

    Parameters
    ----------
    kernel : str or callable, optional
        k: "gaussian", "laplace", "exponential", "cauchy", "matern32", "matern52", or one of your
        own, as for :class:`linattn.feature_maps.RandomFourierFeatures`. Default "gaussian".
    num_features : int, optional
        m, even. Default 100.
    bandwidth : float or "scale", optional
        h; "scale" is ``sqrt(d var(X) / 2)``, the bandwidth of ``gamma="scale"``. Default "scale".
    sampler : str or callable, optional
        How rows of Omega are drawn: a name in :data:`linattn.sampling.SAMPLERS`, or a callable.
        Default "orthogonal".
    compute_variance : bool, optional
        Whether ``fit`` computes ``variance_``. Default False.
    random_state : int, RandomState or None, optional
        Seed.

    Attributes
    ----------
    feature_map_ : RandomFourierFeatures
        The map; its ``kernel(x, y)``, ``estimate(x, y)`` and ``variance(x, y)`` are of pairs.
    bandwidth_ : float
        h.
    variance_ : float
        Exact variance of ``phi(x).phi(y)`` over draws of Omega, mean over all pairs of different
        training rows, or of 256 of them; with ``compute_variance`` only.
    n_features_in_ : int
        d.
    feature_names_in_ : ndarray of str
        Names of the columns of a data frame.

    Raises
    ------
    TypeError, ValueError
        By ``fit``: parameters out of range, an odd m, an unknown kernel or sampler, NaN or inf.
    NotImplementedError
        ``compute_variance`` where no closed form is known: of kernels other than the Gaussian one
        for samplers other than "gaussian", and of the samplers "sobol" and "halton".

    Notes
    -----
    With independent rows the variance is ``(1 + k(2 t) - 2 k(t)^2) / m`` at the difference t, over
    h: 0 at t = 0, and for the Gaussian kernel at every t less than the
    ``(1 + k(2 t) / 2 - k(t)^2) / m`` of cosines with random phases, which RBFSampler takes.
    Orthogonal rows have less where pairs are not many bandwidths apart. Time O(n m d), memory
    O(n m).

    References
    ----------
    Rahimi and Recht, "Random Features for Large-Scale Kernel Machines" (2007); Yu et al.,
    "Orthogonal Random Features" (2016); Sutherland and Schneider, "On the Error of Random Fourier
    Features" (2015).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import RidgeClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> from linattn.sklearn import RandomFeatures
    >>> X, y = load_digits(return_X_y=True)
    >>> model = make_pipeline(RandomFeatures(num_features=256, random_state=0), RidgeClassifier())
    >>> bool(model.fit(X[:1000], y[:1000]).score(X[1000:], y[1000:]) > 0.9)
    True
    """

    n_features_in_: int

    def __init__(
        self,
        kernel: Any = "gaussian",
        *,
        num_features: int = 100,
        bandwidth: float | str = "scale",
        sampler: Any = "orthogonal",
        compute_variance: bool = False,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.num_features = num_features
        self.bandwidth = bandwidth
        self.sampler = sampler
        self.compute_variance = compute_variance
        self.random_state = random_state

    @_arrays.on_array_device
    def fit(self, X: Any, y: Any = None) -> Self:
        """Draw features for rows of this many coordinates.

        Parameters
        ----------
        X : array_like, (n, d)
            Training rows; their values matter to ``bandwidth="scale"`` and ``variance_`` only.
        y : None
            Not used.

        Returns
        -------
        RandomFeatures
            Itself.
        """
        compute_variance = _checks.check_flag("compute_variance", self.compute_variance)
        X = validate_data(self, X, dtype=DTYPES)
        generator = make_generator(self.random_state)
        self.bandwidth_ = self._bandwidth(X)
        self.feature_map_ = RandomFourierFeatures(
            X.shape[1],
            self.num_features,
            kernel=self.kernel,
            bandwidth=self.bandwidth_,
            sampler=self.sampler,
            rng=generator,
        )
        if compute_variance:
            pairs = generator.permutation(len(X))[:MAX_ROWS_OF_PAIRS]
            x = np.asarray(X[pairs], dtype=np.float64)
            variance = self.feature_map_.variance(x, x)
            different = ~np.eye(len(x), dtype=bool)
            self.variance_ = float(np.mean(variance[different])) if len(x) > 1 else 0.0
        return self

    @_arrays.on_array_device
    def transform(self, X: Any) -> NDArray[Any]:
        """Return the features of rows.

        Parameters
        ----------
        X : array_like, (n, d)
            Rows.

        Returns
        -------
        ndarray, (n, m)
            float32 for float32, else float64.
        """
        check_is_fitted(self, "feature_map_")
        X = validate_data(self, X, reset=False, dtype=DTYPES)
        features = np.empty((len(X), self._n_features_out), dtype=X.dtype)
        size = max(1, BLOCK_ELEMENTS // self._n_features_out)
        for start in range(0, len(X), size):
            block = slice(start, start + size)
            log, values = self.feature_map_.query_features(X[block])
            features[block] = values if log is None else values * np.exp(log)
        return features

    def _bandwidth(self, X: NDArray[Any]) -> float:
        if isinstance(self.bandwidth, str) and self.bandwidth == "scale":
            variance = float(np.var(X, dtype=np.float64))
            return float(np.sqrt(X.shape[1] * variance / 2)) if variance > 0 else 1.0
        if isinstance(self.bandwidth, str):
            raise ValueError(
                f"bandwidth must be 'scale' or a positive number, got {self.bandwidth!r}"
            )
        return _checks.check_finite_number("bandwidth", self.bandwidth, positive=True)

    @property
    def _n_features_out(self) -> int:
        return int(self.feature_map_.num_features or 0)

    def __sklearn_tags__(self) -> Any:
        """Say that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
