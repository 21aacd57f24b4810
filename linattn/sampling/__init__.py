"""Random projections: the rows omega that random feature maps multiply their inputs with.

Every sampler is called as ``sampler(num, dim, rng=None, *, batch_shape=())`` and returns float64
NumPy rows of shape ``(*batch_shape, num, dim)``, drawn on the host from ``rng`` alone: the same
seed gives the same rows whatever library or device the features are computed with, and NumPy's
global random state is neither read nor changed. A batch is what as many draws in a row from one
Generator would give, up to rounding.

Letters: m is ``num``, d is ``dim``; m = b d + r rows fill b blocks of d rows and one of r < d.
For inputs x and y of a feature map, K = exp(x.y), v = |x + y|^2 and s = |x - y|^2. N_p =
``num_pairs(m, d)`` counts the ordered pairs of rows of one block.
"""

from __future__ import annotations

from linattn.sampling._records import Sampler, num_pairs
from linattn.sampling._seeds import Seed, as_generator
from linattn.sampling.samplers import (
    SAMPLERS,
    fixed_norm,
    gaussian,
    halton,
    orthogonal,
    quantile,
    simplex,
    sobol,
    stratified,
)

__all__ = [
    "SAMPLERS",
    "Sampler",
    "Seed",
    "as_generator",
    "fixed_norm",
    "gaussian",
    "halton",
    "num_pairs",
    "orthogonal",
    "quantile",
    "simplex",
    "sobol",
    "stratified",
]
