"""Kernel classification: kernel regression of classes."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from linattn import _arrays
from linattn.sklearn._attention import Rows
from linattn.sklearn._smoother import KernelSmoother


class KernelClassifier(ClassifierMixin, KernelSmoother):  # type: ignore[misc]
    r"""Classes by kernel regression of their indicators.

    .. math::
        p_c(x) = \frac{\sum_i w_i K_h(x - x_i) \, [y_i = c]}{\sum_i w_i K_h(x - x_i)}

    with the kernel of :class:`KernelRegressor`.

    Parameters
    ----------
    bandwidth, method, num_landmarks, tolerance, loo_samples, random_state
        As for :class:`KernelRegressor`. The error of "loo" is the mean square difference of
        probabilities and indicators (Brier score, over the number of classes).

    Attributes
    ----------
    classes_ : ndarray
        Labels, sorted.
    bandwidth_, method_, num_landmarks_, error_, loo_bandwidths_, loo_errors_
        As of :class:`KernelRegressor`.
    n_features_in_, feature_names_in_
        As of :class:`KernelRegressor`.

    Raises
    ------
    TypeError, ValueError
        As :class:`KernelRegressor`; targets that are no classes.

    See Also
    --------
    KernelRegressor : notes on exactness, landmarks and cost, with k the number of classes.

    Notes
    -----
    Probabilities are means of indicators, so that they are never negative and sum to 1, by
    landmarks too.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from linattn.sklearn import KernelClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> model = KernelClassifier(bandwidth=7.0).fit(X[:1000], y[:1000])
    >>> bool(model.score(X[1000:], y[1000:]) > 0.95)
    True
    """

    classes_: NDArray[Any]

    @_arrays.on_array_device
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Store rows, and choose the bandwidth if it is to be chosen.

        Parameters
        ----------
        X : array_like, (n, d)
            float32 and float64 are kept.
        y : array_like, (n,)
            Labels.
        sample_weight : array_like, (n,), optional
            w; 0 leaves a row out. Default 1.

        Returns
        -------
        KernelClassifier
            Itself.
        """
        self._forget()
        self.partial_fit(X, y, sample_weight=sample_weight)
        self._chosen()
        return self

    @_arrays.on_array_device
    def partial_fit(
        self, X: Any, y: Any, classes: ArrayLike | None = None, sample_weight: Any = None
    ) -> Self:
        """Add rows to the fitted ones, as if `fit` had been given all of them.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`; rows take the dtype of the first ones.
        classes : array_like, optional
            Labels that rows to come may have; those not named here are added as they come.

        Returns
        -------
        KernelClassifier
            Itself.
        """
        X, y, weight = self._check_rows(X, y, sample_weight)
        check_classification_targets(y)
        labels = [y] if classes is None else [y, np.asarray(classes)]
        if self._has_rows():
            labels.append(self.classes_)
        known = np.unique(np.concatenate(labels))
        if self._has_rows():
            codes = np.searchsorted(known, self.classes_)
            self._rows = self._rows._replace(target=codes[self._rows.target])
        self.classes_ = known
        self._add(Rows(X, np.searchsorted(known, y), weight))
        return self

    @_arrays.on_array_device
    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the share of each class in the weights of the rows.

        Parameters
        ----------
        X : array_like, (N, d)
            Queries.

        Returns
        -------
        ndarray, (N, classes)
            In the dtype of the rows that were fitted to, in the order of ``classes_``.
        """
        means = self._means(X)
        return np.asarray(means / np.sum(means, axis=1, keepdims=True))

    @_arrays.on_array_device
    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable classes.

        Parameters
        ----------
        X : array_like, (N, d)
            Queries.

        Returns
        -------
        ndarray, (N,)
            Labels.
        """
        index = np.argmax(self.predict_proba(X), axis=1)
        return np.asarray(self.classes_[index])

    def _target(self, rows: Rows) -> NDArray[Any]:
        return np.asarray(rows.target[:, None] == np.arange(len(self.classes_)), rows.X.dtype)

    def _offset(self, rows: Rows) -> NDArray[Any]:
        # Indicators stay as they are, so that no probability is negative.
        return np.zeros(rows.target.shape[1], dtype=rows.X.dtype)
