"""Batteries: everything that one claim about a randomized estimator implies, as one table.

Each takes your function, tries it where known mistakes show, and returns a report; a failure is
raised unless ``on_fail="return"``. Wrap what takes a seed:
``lambda x, rng: f(x, seed=int(rng.integers(2**31)))``.

Common to all: ``num_draws`` (draws for each row of the table), ``false_alarm`` (probability that a
right estimator fails, all rows together; default 1e-9) and ``rng`` (default 0). Where no variance
is known in closed form, ``kurtosis`` is an upper bound of ``E (X - mu)^4 / Var(X)^2`` of one draw,
by default 25.

Every battery raises CheckFailedError where a check fails, with the whole table; TypeError for what
is not such a function; ValueError for draws of another shape, another ``on_fail``, and whatever
:func:`linattn.testing.assert_estimator` raises it for.
"""

from __future__ import annotations

from linattn.testing._battery import BatteryReport
from linattn.testing._matrices import haar, isotropic
from linattn.testing._scalars import stochastic_rounding, trace
from linattn.testing._sketches import normalized, quantizer, sketch

__all__ = [
    "BatteryReport",
    "haar",
    "isotropic",
    "normalized",
    "quantizer",
    "sketch",
    "stochastic_rounding",
    "trace",
]
