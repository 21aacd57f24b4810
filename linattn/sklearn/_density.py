"""Kernel density estimates with scikit-learn's interface."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from linattn import _arrays, _checks
from linattn.kernels import log_sum_exp
from linattn.sklearn._leave_one_out import leave_one_out_density
from linattn.sklearn._smoother import DTYPES, check_weight, make_generator


class KernelDensity(BaseEstimator):  # type: ignore[misc]
    r"""Kernel density estimate with Gaussian kernels, exact in any number of dimensions.

    .. math::
        p(x) = \sum_i w_i \, \mathcal{N}(x; x_i, h^2 I), \qquad \sum_i w_i = 1

    with the interface of :class:`sklearn.neighbors.KernelDensity` (``kernel="gaussian"``). Letters:
    ``n`` training rows, ``d`` coordinates, ``h`` bandwidth, ``w`` weights, ``N`` queries.

    Parameters
    ----------
    bandwidth : float, "scott", "silverman" or "loo", optional
        h. As in scikit-learn, "scott" is ``n^(-1 / (d + 4))`` and "silverman" is
        ``(n (d + 2) / 4)^(-1 / (d + 4))``, n counting rows of positive weight: bring coordinates to
        variance 1 first. "loo" takes the number under which left-out rows are most likely. Default
        1.0.
    loo_samples : int, optional
        Rows that "loo" leaves out, each judged by all others; drawn at random where there are
        more. Default 1000.
    random_state : int, RandomState or None, optional
        Seed of these rows.

    Attributes
    ----------
    bandwidth_ : float
        h.
    loo_bandwidths_, loo_errors_ : ndarray
        With "loo": bandwidths that were tried, widest first, and their mean negative log
        likelihoods.
    n_features_in_ : int
        d.
    feature_names_in_ : ndarray of str
        Names of the columns of a data frame.

    Raises
    ------
    TypeError, ValueError
        By ``fit``: parameters out of range, NaN or inf, negative weights, no row of positive
        weight, equal rows or a single one with "loo".

    See Also
    --------
    linattn.kernels.kernel_density : the same with SciPy's interface, on any array library.

    Notes
    -----
    Time O(N n d), memory O((N + n) d). No tree is built and no tolerance is needed: every row
    counts. "loo" tries the bandwidths of :class:`KernelRegressor`; a sample weight counts repeats,
    and leaving a row out takes 1 off it. Where every row has a repeat, ever narrower bandwidths are
    likelier, and "loo" takes the narrowest: leave repeats out first.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.sklearn import KernelDensity
    >>> X = np.random.default_rng(0).standard_normal((500, 2))
    >>> model = KernelDensity(bandwidth="scott").fit(X)
    >>> model.score_samples(X[:3]).shape, model.sample(2, random_state=0).shape
    ((3,), (2, 2))
    """

    n_features_in_: int
    bandwidth_: float

    def __init__(
        self,
        bandwidth: float | str = 1.0,
        *,
        loo_samples: int = 1000,
        random_state: Any = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.loo_samples = loo_samples
        self.random_state = random_state

    @_arrays.on_array_device
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Store the rows and choose the bandwidth.

        Parameters
        ----------
        X : array_like, (n, d)
            float32 and float64 are kept.
        y : None
            Not used.
        sample_weight : array_like, (n,), optional
            w; 0 leaves a row out. Default 1.

        Returns
        -------
        KernelDensity
            Itself.
        """
        X = validate_data(self, X, dtype=DTYPES)
        weight = check_weight(sample_weight, X)
        there = weight > 0
        self._rows, self._weight = X[there], weight[there]
        self.bandwidth_ = self._choose_bandwidth(*self._rows.shape)
        return self

    def _choose_bandwidth(self, n: int, d: int) -> float:
        _checks.check_positive_int("loo_samples", self.loo_samples)
        for name in ("loo_bandwidths_", "loo_errors_"):
            self.__dict__.pop(name, None)
        if self.bandwidth == "loo":
            order = make_generator(self.random_state).permutation(len(self._rows))
            left_out = np.sort(order[: self.loo_samples])
            tried = leave_one_out_density(self._rows, self._weight, left_out)
            self.loo_bandwidths_, self.loo_errors_ = tried
            return tried.best
        if isinstance(self.bandwidth, str):
            counts = {"scott": n, "silverman": n * (d + 2) / 4}
            if self.bandwidth not in counts:
                rules = "'scott', 'silverman' or 'loo'"
                raise ValueError(f"bandwidth must be a number, {rules}, got {self.bandwidth!r}")
            return float(counts[self.bandwidth] ** (-1 / (d + 4)))
        return _checks.check_finite_number("bandwidth", self.bandwidth, positive=True)

    @_arrays.on_array_device
    def score_samples(self, X: Any) -> NDArray[Any]:
        """Return the logarithm of the density.

        Parameters
        ----------
        X : array_like, (N, d)
            Queries.

        Returns
        -------
        ndarray, (N,)
            In the dtype of the rows that were fitted to.
        """
        check_is_fitted(self, "_rows")
        X = validate_data(self, X, reset=False, dtype=self._rows.dtype)
        h, d = self.bandwidth_, self.n_features_in_
        logs = log_sum_exp(X, self._rows, bandwidth=h, weights=self._weight)
        volume = np.log(np.sum(self._weight)) + d * (np.log(h) + np.log(2 * np.pi) / 2)
        return np.asarray(logs - self._rows.dtype.type(volume))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the log likelihood of rows: the sum of :meth:`score_samples`.

        Parameters
        ----------
        X : array_like, (N, d)
            Rows.
        y : None
            Not used.

        Returns
        -------
        float
            What a search over bandwidths makes large.
        """
        return float(np.sum(self.score_samples(X), dtype=np.float64))

    def sample(self, n_samples: int = 1, random_state: Any = None) -> NDArray[Any]:
        """Draw rows from the density.

        Parameters
        ----------
        n_samples : int, optional
            How many. Default 1.
        random_state : int, RandomState or None, optional
            Seed.

        Returns
        -------
        ndarray, (n_samples, d)
            In the dtype of the rows that were fitted to.
        """
        check_is_fitted(self, "_rows")
        size = _checks.check_positive_int("n_samples", n_samples)
        random = check_random_state(random_state)
        chosen = random.choice(len(self._rows), size, p=self._weight / np.sum(self._weight))
        noise = random.standard_normal((size, self.n_features_in_)) * self.bandwidth_
        return np.asarray(self._rows[chosen] + noise, dtype=self._rows.dtype)
