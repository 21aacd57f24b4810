"""Attention for scikit-learn: densities, kernel regression and classification, features.

Softmax attention of rows by their distance is the Nadaraya-Watson estimator, and random features of
a kernel are what linear models need of one. The estimators here are scikit-learn's in all that a
user sees, and need it, in the extra ``sklearn``; nothing else of linattn imports them.
"""

from __future__ import annotations

try:
    from sklearn.utils.validation import validate_data  # noqa: F401
except ImportError as error:
    from linattn._extras import remedy

    raise ImportError(
        f"linattn.sklearn needs scikit-learn 1.6 or newer: {remedy('sklearn')}"
    ) from error

from linattn.sklearn._classification import KernelClassifier
from linattn.sklearn._density import KernelDensity
from linattn.sklearn._features import RandomFeatures
from linattn.sklearn._regression import KernelRegressor

__all__ = ["KernelClassifier", "KernelDensity", "KernelRegressor", "RandomFeatures"]
