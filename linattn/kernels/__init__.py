"""Sums of Gaussian kernels without the matrix: densities, regression, transport, mean shift.

Each function computes exactly what its dense formula says, in memory that grows with the points and
not with the pairs, on arrays of NumPy, torch, JAX, CuPy, Dask and others.
"""

from __future__ import annotations

from linattn.kernels._density import kernel_density
from linattn.kernels._regression import local_regression
from linattn.kernels._sums import log_sum_exp, mean_shift, mmd
from linattn.kernels._transport import Transport, sinkhorn

__all__ = [
    "Transport",
    "kernel_density",
    "local_regression",
    "log_sum_exp",
    "mean_shift",
    "mmd",
    "sinkhorn",
]
