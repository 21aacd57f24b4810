"""Samplers: their draws, marginals and moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn.sampling import _moments
from linattn.sampling._arguments import check_integer, check_shape
from linattn.sampling._seeds import Seed

Floats: TypeAlias = NDArray[np.float64]


class _Draw(Protocol):
    # Positional-only, because a sampler may call its parameters what it likes.
    __name__: str

    def __call__(
        self, num: int, dim: int, rng: Seed = None, /, *, batch_shape: tuple[int, ...] = ()
    ) -> Floats: ...


_Moment: TypeAlias = Callable[[str, Floats, int, int, float], Floats]


def _no_pair_function(sq_norm: ArrayLike, dim: int) -> Floats:
    """Refuse: pairs of rows differ, or their distribution is not known."""
    raise NotImplementedError(
        "this sampler has no function of one pair of rows: see Sampler.variance_gap"
    )


def num_pairs(num: int, dim: int) -> int:
    """Count the ordered pairs of different rows that share a block.

    N_p(m, d) = b d (d - 1) + r (r - 1), with m = b d + r: b full blocks and one of r rows.

    Parameters
    ----------
    num, dim : int
        Rows m and dimension d, both at least 1.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        If an argument is no int, or below 1.

    Examples
    --------
    >>> from linattn import sampling
    >>> sampling.num_pairs(8, 4)
    24
    """
    return _moments.count_pairs(
        check_integer(num, "num", least=1), check_integer(dim, "dim", least=1)
    )


@dataclass(frozen=True)
class Sampler:
    """A way to draw projection rows, with the exact moments of its rows.

    Made by decorating the function that draws: ``@partial(Sampler, unbiased=..., ...)``. It
    takes the function's name, docstring and module, and pickles as a function does, by its name in
    its module.

    Parameters
    ----------
    draw : callable
        ``draw(num, dim, rng, batch_shape=...)``: num, dim and batch_shape come checked, rng as the
        caller gave it, for `as_generator`.
    unbiased : bool
        Whether each single row is exactly N(0, I), so that every map that is unbiased with
        independent rows is unbiased with these.
    pair_gap : callable, optional
        For samplers whose blocks of d rows are independent, and whose pairs of rows in a block are
        all alike, with norms independent of the directions: ``pair_gap(v, dim)`` =
        1 - exp(-v) E[exp(w1.z) exp(w2.z)], v = |z|^2 >= 0. float64, shape of ``v``.
    pair_gap_trig : callable, optional
        For such samplers, ``pair_gap_trig(s, dim)`` = exp(-s) - E[cos(w1.z) cos(w2.z)],
        s = |z|^2 >= 0. It may be negative.
    gap : callable, optional
        For others: ``gap(kind, sq_norm, num, dim, A)``, what `variance_gap` returns, of checked
        arguments.
    mean : callable, optional
        For biased ones: ``mean(kind, sq_norm, num, dim, A)``, what `mean_factor` returns.

    Attributes
    ----------
    name : str
        Name of the drawing function, and the key in `SAMPLERS`.

    Examples
    --------
    >>> from linattn import sampling
    >>> sampling.orthogonal.name, sampling.orthogonal.unbiased
    ('orthogonal', True)
    """

    draw: _Draw = field(repr=False)
    name: str = field(init=False)
    unbiased: bool
    pair_gap: Callable[[ArrayLike, int], Floats] = field(default=_no_pair_function, repr=False)
    pair_gap_trig: Callable[[ArrayLike, int], Floats] = field(default=_no_pair_function, repr=False)
    gap: _Moment | None = field(default=None, repr=False)
    mean: _Moment | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Take name, module and documentation from the drawing function."""
        object.__setattr__(self, "name", self.draw.__name__)
        object.__setattr__(self, "__doc__", self.draw.__doc__)
        object.__setattr__(self, "__module__", self.draw.__module__)

    def __reduce__(self) -> str:
        """Pickle and copy by name, as functions do: the decorated name holds this object."""
        return self.name

    def variance_gap(
        self, kind: str, sq_norm: ArrayLike, num: int, dim: int, *, A: float = 0.0
    ) -> Floats:
        """Return what this sampler takes from the variance of independent N(0, I) rows.

        Var = Var_iid / m - gap, in units of K^2 ("trigonometric": of exp(|x|^2 + |y|^2)), around
        the sampler's own mean, also where it is biased. With rho = 1/(1 - 8A) and
        t = ((rho + 1)^2 / (4 rho))^(d/2), both 1 for A = 0, Var_iid of one row is

        * t e^(rho v) - 1 for "positive": one feature exp(w.x - |x|^2/2) a row;
        * t (e^(rho v) + e^-v)/2 - 1 for "paired": one of w and one of -w, each over sqrt(2);
        * (1 - e^-s)^2 / 2 for "trigonometric": cosine and sine.

        Parameters
        ----------
        kind : {"positive", "paired", "trigonometric"}
            The features of a row.
        sq_norm : array_like
            v; for "trigonometric" s.
        num, dim : int
            Rows m (not features) and dimension d.
        A : float
            Parameter of generalized exponential features (1 - 4A)^(d/4) exp(A |w|^2 +
            sqrt(1 - 4A) w.x - |x|^2/2), below 1/8; 0 for "trigonometric".

        Returns
        -------
        numpy.ndarray
            float64, shape of ``sq_norm``. Zero for independent rows; negative where the sampler
            does worse.

        Raises
        ------
        NotImplementedError
            No closed form is known for this sampler.
        ImportError
            The sampler needs SciPy, which is missing.
        TypeError, ValueError
            An unknown kind, a negative ``sq_norm``, sizes that are no positive ints, or an ``A``
            outside its range.

        Notes
        -----
        Where norms are independent of each other and of the directions the gap does not depend on
        A: tilting the norms by A rescales all rows alike. With a pair function it is N_p / m^2
        times that [1]_. Each formula is a series whose coefficients depend on m, d and A only;
        its weights sum to 1, so that the error is one of rounding, relative to Var_iid. Terms:
        about v + 12 sqrt(v) + 40 for the largest entry. v or s above 300 counts as 300, with
        `orthogonal` v above 700 as 700 and s above 1400 as 1400. The gap of a biased sampler is
        inf where Var_iid leaves float64.

        References
        ----------
        .. [1] K. Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, Lemma 2,
           and V. Likhosherstov et al., "Chefs' Random Tables", NeurIPS 2022, for independent rows;
           the gaps are derived in this project.
        """
        v = _check_moment(kind, sq_norm, num, dim, A, below=0.125)
        if self.gap is not None:
            return self.gap(kind, v, num, dim, float(A))
        pair_gap = self.pair_gap_trig if kind == "trigonometric" else self.pair_gap
        if pair_gap is _no_pair_function:
            raise NotImplementedError(
                f"no closed form of the variance is known for the sampler {self.name!r}: estimate "
                f"it from independent draws, sampler(num, dim, rng, batch_shape=...)"
            )
        return num_pairs(num, dim) / num**2 * pair_gap(v, dim)

    def mean_factor(
        self, kind: str, sq_norm: ArrayLike, num: int, dim: int, *, A: float = 0.0
    ) -> Floats:
        """Return E[estimate] / kernel: 1 for unbiased samplers.

        Parameters
        ----------
        kind, sq_norm, num, dim, A
            As for `variance_gap`; A below 1/4.

        Returns
        -------
        numpy.ndarray
            float64, shape of ``sq_norm``, exact to rounding, for "trigonometric" to e^(s/2) times
            that. ``sq_norm`` above 1400 counts as 1400.

        Raises
        ------
        NotImplementedError
            The sampler is biased and its mean is not known.
        ImportError, TypeError, ValueError
            As for `variance_gap`.
        """
        v = _check_moment(kind, sq_norm, num, dim, A, below=0.25)
        if self.unbiased:
            return np.ones_like(v)
        if self.mean is None:
            raise NotImplementedError(
                f"no closed form of the mean is known for the biased sampler {self.name!r}"
            )
        return self.mean(kind, v, num, dim, float(A))

    def __call__(
        self, num: int, dim: int, rng: Seed = None, *, batch_shape: tuple[int, ...] = ()
    ) -> Floats:
        """Draw ``(*batch_shape, num, dim)`` rows after checking the arguments.

        Parameters
        ----------
        num : int
            Rows m of one draw, at least 1.
        dim : int
            Dimension d of a row, at least 1.
        rng : int, SeedSequence, BitGenerator, Generator or None
            See `as_generator`.
        batch_shape : tuple of int
            Shape of independent draws: verification wants thousands in one call.

        Returns
        -------
        numpy.ndarray
            float64, shape ``(*batch_shape, num, dim)``.

        Raises
        ------
        TypeError
            If ``num`` or ``dim`` is no int (bool included), ``batch_shape`` is no tuple of ints,
            or NumPy rejects ``rng``.
        ValueError
            If ``num`` or ``dim`` is below 1, a batch axis is negative, or NumPy rejects ``rng``.
        """
        num = check_integer(num, "num", least=1)
        dim = check_integer(dim, "dim", least=1)
        return self.draw(num, dim, rng, batch_shape=check_shape(batch_shape))


def no_gap(sq_norm: ArrayLike, dim: int) -> Floats:
    return np.zeros_like(check_sq_norm(sq_norm, dim))


def check_sq_norm(value: ArrayLike, dim: int) -> Floats:
    check_integer(dim, "dim", least=1)
    value = np.asarray(value, dtype=np.float64)
    if np.any(value < 0):
        raise ValueError(f"a squared norm must be at least 0, got {float(np.min(value))!r}")
    return value


def _check_moment(
    kind: str, sq_norm: ArrayLike, num: int, dim: int, A: float, *, below: float
) -> Floats:
    if kind not in ("positive", "paired", "trigonometric"):
        raise ValueError(f"kind must be 'positive', 'paired' or 'trigonometric', got {kind!r}")
    value = float(A)
    if not -math.inf < value < below:
        raise ValueError(
            f"A must be finite and below {below}, where the moment is finite, got {A!r}"
        )
    if kind == "trigonometric" and value != 0:
        raise ValueError(
            f"A must be 0 for trigonometric features, which have no such parameter, got {A!r}"
        )
    check_integer(num, "num", least=1)
    return check_sq_norm(sq_norm, dim)
