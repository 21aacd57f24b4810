"""What kernel regression and classification share: training rows, bandwidth and method."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from linattn import _checks
from linattn.kernels._gaussian import positive_bandwidth
from linattn.sklearn._attention import Coordinates, Method, Rows, Smoother, make_smoother
from linattn.sklearn._leave_one_out import LeaveOneOut, leave_one_out

METHODS = ("auto", "exact", "landmarks")
DTYPES = (np.float64, np.float32)


class Choice(NamedTuple):
    """What a fit has chosen for all rows; ``tried`` is None where the bandwidth was given."""

    smoother: Smoother
    bandwidth: float | NDArray[np.float64]
    tried: LeaveOneOut | None


def make_generator(random_state: Any) -> np.random.Generator:
    """Make a generator of what scikit-learn takes for one: None, a seed or a RandomState."""
    return np.random.default_rng(check_random_state(random_state).randint(1 << 31))


def check_weight(sample_weight: Any, X: NDArray[Any]) -> NDArray[np.float64]:
    """Check weights of rows: not negative, not all 0; None for 1."""
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not 0 < np.sum(weight) < np.inf:
        raise ValueError(
            "sample_weight must be positive for at least one row and have a finite sum"
        )
    return np.asarray(weight)


class KernelSmoother(BaseEstimator):  # type: ignore[misc]
    """Stores training rows, and makes of them what predicts.

    A chosen bandwidth depends on all rows: after ``partial_fit`` its first use chooses it again.
    """

    n_features_in_: int
    _rows: Rows
    _choice: Choice | None

    def __init__(
        self,
        bandwidth: float | ArrayLike | str = "loo",
        *,
        method: str = "auto",
        num_landmarks: int = 256,
        tolerance: float = 0.05,
        loo_samples: int = 1000,
        random_state: Any = None,
    ) -> None:
        self.bandwidth = bandwidth
        self.method = method
        self.num_landmarks = num_landmarks
        self.tolerance = tolerance
        self.loo_samples = loo_samples
        self.random_state = random_state

    def _target(self, rows: Rows) -> NDArray[Any]:
        """Return the values that are averaged, (n, k), in the dtype of the rows."""
        raise NotImplementedError

    def _offset(self, rows: Rows) -> NDArray[Any]:
        """Return the offset subtracted from the targets, (k,)."""
        raise NotImplementedError

    def _ridge(self) -> float | None:
        """Return the penalty of the slopes of lines; None for weighted means."""
        return None

    def _has_rows(self) -> bool:
        return "_rows" in vars(self)

    def _forget(self) -> None:
        self.__dict__.pop("_rows", None)

    def _check_rows(
        self, X: Any, y: Any, sample_weight: Any, **checks: Any
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]:
        """Check training rows, which have the dtype of the first ones."""
        self._check_parameters()
        dtype = self._rows.X.dtype if self._has_rows() else DTYPES
        X, y = validate_data(self, X, y, reset=not self._has_rows(), dtype=dtype, **checks)
        return X, y, check_weight(sample_weight, X)

    def _check_parameters(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("num_landmarks", "loo_samples"):
            _checks.check_positive_int(name, getattr(self, name))
        _checks.check_finite_number("tolerance", self.tolerance, positive=True)

    def _add(self, rows: Rows) -> None:
        """Store rows behind those that are there; none without weight."""
        there = rows.weight > 0
        # Copies, whatever the caller does with the arrays.
        rows = Rows(*(array[there] for array in rows))
        if self._has_rows():
            rows = Rows(*(np.concatenate(pair) for pair in zip(self._rows, rows, strict=True)))
        self._rows, self._choice = rows, None

    def _chosen(self) -> Choice:
        """Return what predicts; made where rows have come since."""
        check_is_fitted(self, "_rows")
        if self._choice is None:
            self._choice = self._choose()
        return self._choice

    def _choose(self) -> Choice:
        rows = self._rows._replace(target=self._target(self._rows))
        generator, tried = make_generator(self.random_state), None
        if isinstance(self.bandwidth, str) and self.bandwidth == "loo":
            order = generator.permutation(len(rows.X))
            tried = leave_one_out(*rows, np.sort(order[: self.loo_samples]), self._ridge())
        bandwidth = self._given_bandwidth() if tried is None else tried.best
        # Moments of lines are subtracted, which costs digits.
        dtype = rows.X.dtype if self._ridge() is None else np.float64
        coordinates = Coordinates(np.mean(rows.X, axis=0, dtype=float), bandwidth, dtype)
        method = Method(self.method, self.num_landmarks, self.tolerance, self._ridge())
        smoother = make_smoother(rows, coordinates, self._offset(rows), method, generator)
        return Choice(smoother, bandwidth, tried)

    def _given_bandwidth(self) -> float | NDArray[np.float64]:
        """Check a bandwidth that is a number, or one for each coordinate."""
        if isinstance(self.bandwidth, str):
            wanted = "'loo', a number or one for each coordinate"
            raise ValueError(f"bandwidth must be {wanted}, got {self.bandwidth!r}")
        bandwidth = positive_bandwidth(self.bandwidth, "X", self._rows.X.astype(np.float64))
        return bandwidth if bandwidth.ndim else float(bandwidth)

    def _means(self, X: Any) -> NDArray[Any]:
        """Return weighted means of the targets, (n, k)."""
        check_is_fitted(self, "_rows")
        X = validate_data(self, X, reset=False, dtype=self._rows.X.dtype)
        return self._chosen().smoother(X)

    @property
    def bandwidth_(self) -> float | NDArray[np.float64]:
        """The bandwidth: the given one, or the one of least error."""
        return self._chosen().bandwidth

    @property
    def method_(self) -> str:
        """How means are computed: "exact" or "landmarks"."""
        return "exact" if self._chosen().smoother.num_landmarks is None else "landmarks"

    @property
    def num_landmarks_(self) -> int | None:
        """Landmarks; None where every row counts."""
        return self._chosen().smoother.num_landmarks

    @property
    def error_(self) -> float:
        """Estimated distance from exact, over the deviation of exact: root mean squares."""
        return self._chosen().smoother.error

    @property
    def loo_bandwidths_(self) -> NDArray[np.float64]:
        """Bandwidths that were tried, widest first."""
        return self._tried().bandwidths

    @property
    def loo_errors_(self) -> NDArray[np.float64]:
        """Their mean square leave-one-out errors."""
        return self._tried().errors

    def _tried(self) -> LeaveOneOut:
        tried = self._chosen().tried
        if tried is None:
            raise AttributeError(f"no bandwidth was tried: bandwidth={self.bandwidth!r} was given")
        return tried
