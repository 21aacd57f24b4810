"""Kernel regression: the Nadaraya-Watson estimator."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin

from linattn import _arrays, _checks
from linattn.kernels._regression import RIDGE
from linattn.sklearn._attention import Rows
from linattn.sklearn._smoother import KernelSmoother


class KernelRegressor(RegressorMixin, KernelSmoother):  # type: ignore[misc]
    r"""Kernel regression of any number of outputs, in memory that does not grow with the queries.

    .. math::
        f(x) = \frac{\sum_i w_i K_h(x - x_i) \, y_i}{\sum_i w_i K_h(x - x_i)}, \qquad
        K_h(t) = \exp\left(-\tfrac12 \sum_c (t_c / h_c)^2\right)

    over the training rows: softmax attention to rows by their distance. With ``degree=1``, f(x) is
    the constant of a line that is fitted around x with these weights: local linear regression,
    right to first order at the borders of the data and where these are uneven. Letters: ``n``
    training rows, ``d`` coordinates, ``k`` outputs, ``m`` landmarks, ``h`` bandwidth, ``w`` sample
    weight.

    Parameters
    ----------
    bandwidth : float, array_like of shape (d,), or "loo", optional
        h; one number for all coordinates, or one for each; "loo" takes the number whose
        leave-one-out error is least. Default "loo".
    method : {"auto", "exact", "landmarks"}, optional
        "exact" counts every training row; "landmarks" sums them up at m points; "auto" takes
        landmarks where their estimated error is within the tolerance. Default "auto".
    num_landmarks : int, optional
        m; "auto" tries 2 m, too, where m is not far off, and no m above n / 16. Default 256.
    tolerance : float, optional
        What "auto" allows: the root mean square difference from exact over the standard deviation
        of exact. Default 0.05.
    degree : {0, 1}, optional
        Weighted means, or lines. Default 0.
    ridge : float, optional
        With degree 1: penalty of slopes in units of the bandwidth, as for
        :func:`linattn.kernels.local_regression`. Default 1e-3.
    loo_samples : int, optional
        Rows that "loo" leaves out, each predicted from all others; drawn at random where there are
        more. Default 1000.
    random_state : int, RandomState or None, optional
        Seed of landmarks and of the rows drawn.

    Attributes
    ----------
    bandwidth_ : float or ndarray, (d,)
        h.
    method_ : str
        "exact" or "landmarks".
    num_landmarks_ : int or None
        m; None when exact.
    error_ : float
        Of landmarks, estimated at up to 256 training rows that they are not fitted to, in the unit
        of the tolerance; 0 when exact.
    loo_bandwidths_, loo_errors_ : ndarray
        Bandwidths that "loo" tried, widest first, and their mean square errors.
    n_features_in_ : int
        d.
    feature_names_in_ : ndarray of str
        Names of the columns of a data frame.

    Raises
    ------
    TypeError, ValueError
        By ``fit`` and ``partial_fit``: parameters out of range, NaN or inf, negative weights, no
        row of positive weight, a single row with "loo".

    See Also
    --------
    KernelClassifier : the same for classes.
    linattn.kernels.local_regression : the same on any array library.
    linattn.softmax_attention, linattn.feature_maps.LandmarkFeatures : the computation inside.

    Notes
    -----
    With the key ``[x_i / h, log w_i - |x_i / h|^2 / 2]`` and the query ``[x / h, 1]`` the inner
    product is ``log w_i K_h(x - x_i)`` but for ``|x / h|^2 / 2``, which cancels. So nothing
    underflows: far from all rows the mean is the nearest row's, never 0/0. Coordinates are taken
    less their mean, and computed in the dtype of X; the logarithms have rounding errors of a few
    ``eps |x / h|^2``, which matter in float32 where a bandwidth is 1/1000 of the data's extent.

    "loo" tries ``2^2, 2^1, ..., 2^-10`` standard deviations (of all coordinates together) and six
    bandwidths between the neighbours of the best. The row's own term never enters the sums, so
    that nothing is subtracted where it would dominate. A sample weight counts repeats: leaving one
    out takes 1 off the weight. Scale weights of another kind to at most 1. One bandwidth serves
    all coordinates: bring them to one scale first.

    The training rows are stored, so that ``partial_fit`` of parts is ``fit`` of the whole, with
    the same random_state; what depends on all of them is chosen by the next use.

    Landmarks are biased. They fail where a bandwidth is narrow: a mean over a few near rows is not
    seen by m points for all rows. ``error_`` says so, and "auto" then takes exact.

    Lines are computed in float64, by weighted means of ``d^2 + d k`` more numbers than the targets.
    Their bandwidth may be wider, and is chosen anew by "loo".

    Time O(N n (d + k)) for N queries exactly and O(N m (d + k)) by landmarks; fitting these takes
    O(n m d), "loo" ``19 n (d + k)`` for each row left out. Memory O(n (d + k)), nothing that grows
    with N n.

    References
    ----------
    Nadaraya, "On Estimating Regression" (1964); Watson, "Smooth Regression Analysis" (1964).

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.sklearn import KernelRegressor
    >>> X = np.linspace(0, 6, 500)[:, None]
    >>> model = KernelRegressor().fit(X, np.sin(X[:, 0]))
    >>> bool(abs(model.predict([[1.5]])[0] - np.sin(1.5)) < 1e-3)
    True
    """

    _num_outputs: int | None

    def __init__(
        self,
        bandwidth: float | ArrayLike | str = "loo",
        *,
        degree: int = 0,
        method: str = "auto",
        num_landmarks: int = 256,
        tolerance: float = 0.05,
        loo_samples: int = 1000,
        ridge: float = RIDGE,
        random_state: Any = None,
    ) -> None:
        self.degree = degree
        self.ridge = ridge
        super().__init__(
            bandwidth,
            method=method,
            num_landmarks=num_landmarks,
            tolerance=tolerance,
            loo_samples=loo_samples,
            random_state=random_state,
        )

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.degree not in (0, 1) or isinstance(self.degree, bool):
            raise ValueError(f"degree must be 0 or 1, got {self.degree!r}")
        _checks.check_finite_number("ridge", self.ridge, positive=True)

    def _ridge(self) -> float | None:
        return float(self.ridge) if self.degree == 1 else None

    @_arrays.on_array_device
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Store rows, and choose the bandwidth if it is to be chosen.

        Parameters
        ----------
        X : array_like, (n, d)
            float32 and float64 are kept.
        y : array_like, (n,) or (n, k)
            Targets.
        sample_weight : array_like, (n,), optional
            w; 0 leaves a row out. Default 1.

        Returns
        -------
        KernelRegressor
            Itself.
        """
        self._forget()
        self.partial_fit(X, y, sample_weight)
        self._chosen()
        return self

    @_arrays.on_array_device
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Add rows to the fitted ones, as if `fit` had been given all of them.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`; they take the dtype of the first rows.

        Returns
        -------
        KernelRegressor
            Itself.
        """
        X, y, weight = self._check_rows(X, y, sample_weight, multi_output=True, y_numeric=True)
        outputs = y.shape[1] if y.ndim == 2 else None
        if self._has_rows() and outputs != self._num_outputs:
            before = self._num_outputs
            raise ValueError(
                f"y must have the outputs of the rows before, {before}, got {outputs} (None: 1)"
            )
        target = np.asarray(y, dtype=X.dtype).reshape(len(X), -1)
        self._num_outputs = outputs
        self._add(Rows(X, target, weight))
        return self

    @_arrays.on_array_device
    def predict(self, X: Any) -> NDArray[Any]:
        """Return weighted means of the targets.

        Parameters
        ----------
        X : array_like, (N, d)
            Queries.

        Returns
        -------
        ndarray, (N,) or (N, k)
            In the dtype of the rows that were fitted to.
        """
        means = self._means(X)
        return means[:, 0] if self._num_outputs is None else means

    def _target(self, rows: Rows) -> NDArray[Any]:
        return rows.target

    def _offset(self, rows: Rows) -> NDArray[Any]:
        mean = np.average(rows.target, axis=0, weights=rows.weight)
        return np.asarray(mean, dtype=rows.target.dtype)

    def __sklearn_tags__(self) -> Any:
        """Say that any number of outputs is predicted."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
