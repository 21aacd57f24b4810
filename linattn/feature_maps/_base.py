"""What all feature maps share: immutability, equality, evaluation from specs, kernel estimates."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks, _generic, _numerics
from linattn._fingerprints import map_fingerprint
from linattn.typing import Array, Features, MapSpec, Tokens
from linattn.typing._shifts import largest

NOT_PICKLED = ("_cached_specs", "_cached_fingerprint", "_unseeded")
"""Attributes that hold what was made from the others, or that a pickled map has no use for."""

PairFunction: TypeAlias = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


class BaseFeatureMap(ABC):
    """A feature map described by its specs; subclasses give the specs and the kernel.

    Maps are immutable: to change one, make a new one. Two are equal if they give the same
    features. They pickle, copy and may be shared by threads.
    """

    positive: ClassVar[bool]
    """Whether no feature is negative, so that the denominator cannot cancel."""
    unbiased: bool
    """Whether ``estimate`` has ``kernel`` as its mean."""
    softmax_kernel: ClassVar[bool] = False
    """Whether the kernel is ``exp(scale x.y)``."""
    causal: bool = True
    """Whether the map may be used causally: it has not seen the sequence."""
    _unseeded: bool = False
    """Whether numbers were drawn with ``rng=None``, so that only a pickle brings the map back."""
    _parameters: ClassVar[tuple[str, ...]]
    """Names of the attributes that determine the features, in the order of ``repr``."""
    _caches_specs: ClassVar[bool] = True
    """Whether :meth:`specs` is this class's own; another map may use the name as it likes."""
    _made_by: ClassVar[str] = ""
    """The class method that finds what the constructor takes; empty where a user has that."""

    dim: int | None
    num_features: int | None
    scale: float

    def __init_subclass__(cls, **options: Any) -> None:
        """Have the constructor name its parameters when it is given others."""
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _explained(cls.__init__)  # type: ignore[method-assign]

    def _set(self, **attributes: Any) -> None:
        for value in attributes.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        self.__dict__.update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse: maps are immutable."""
        raise AttributeError(f"{type(self).__name__} is immutable: make a new map to change {name}")

    def __delattr__(self, name: str) -> None:
        """Refuse: maps are immutable."""
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be deleted")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out caches."""
        return {name: value for name, value in self.__dict__.items() if name not in NOT_PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled map, read-only as it was."""
        self._set(**state)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the features; made once.

        States carry 31 bits of it and files of states all of it, so that they are not read with
        another map.

        Raises
        ------
        ValueError
            A parameter is a function without a name of its own (a lambda, a local function).
        """
        cached: str | None = self.__dict__.get("_cached_fingerprint")
        if cached is None:
            cached = self.__dict__["_cached_fingerprint"] = self._hash_parameters()
        return cached

    def __dask_tokenize__(self) -> object:
        """Name graphs of Dask by what determines the features."""
        try:
            return type(self).__qualname__, self.fingerprint()
        except ValueError:
            return type(self), self.__getstate__()

    def _hash_parameters(self) -> str:
        import hashlib  # loads OpenSSL, for those who use states

        digest = hashlib.sha256(type(self).__qualname__.encode())
        for name in self._parameters:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                digest.update(f"{name}:{value.shape}".encode())
                digest.update(np.ascontiguousarray(value, dtype="<f8").tobytes())
            elif isinstance(value, BaseFeatureMap):
                digest.update(f"{name}={value.fingerprint()}".encode())
            elif callable(value):
                digest.update(f"{name}={_qualified_name(name, value)}".encode())
            else:
                digest.update(f"{name}={value!r}".encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether the other map is of this class and gives the same features."""
        if type(other) is not type(self):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self._parameters
        )

    def __hash__(self) -> int:
        """Hash of the class and the scale; equal maps have equal hashes."""
        return hash((type(self), self.scale))

    def _repr_parameters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._parameters}

    def __repr__(self) -> str:
        """Show the class and its parameters; of arrays, which are not shown, the fingerprint."""
        parameters = self._repr_parameters()
        if any(isinstance(getattr(self, name), np.ndarray) for name in self._parameters):
            parameters["fingerprint"] = map_fingerprint(self)
        shown = ", ".join(f"{name}={value!r}" for name, value in parameters.items())
        return f"{type(self).__name__}({shown})"

    @abstractmethod
    def query_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the query side, with its arrays in this namespace, dtype and device."""

    def key_spec(self, xp: ModuleType, dtype: Any, device: Any) -> MapSpec:
        """Spec of the key side; the query side's unless a map says otherwise."""
        return self.query_spec(xp, dtype, device)

    def specs(self, xp: ModuleType, dtype: Any, device: Any) -> tuple[MapSpec, MapSpec]:
        """Specs of both sides, one object where they are alike; cached: a map never changes.

        To cast and move a projection takes as long as attention over a few hundred tokens. What
        libraries other than NumPy and CuPy make may belong to a trace, and is not cached.
        """
        place = _arrays.place(xp, device)
        if place is None:
            return self._make_specs(xp, dtype, device)
        cached: dict[Any, tuple[MapSpec, MapSpec]] = self.__dict__.setdefault("_cached_specs", {})
        where = (np.dtype(dtype), *place)
        if where not in cached:
            cached[where] = self._make_specs(xp, dtype, device)
        return cached[where]

    def _make_specs(self, xp: ModuleType, dtype: Any, device: Any) -> tuple[MapSpec, MapSpec]:
        query_spec = self.query_spec(xp, dtype, device)
        return query_spec, query_spec if self._is_symmetric else self.key_spec(xp, dtype, device)

    @property
    def _is_symmetric(self) -> bool:
        """Whether both sides have one spec."""
        return type(self).key_spec is BaseFeatureMap.key_spec

    def _check(self, **named: Any) -> tuple[ModuleType, list[Array]]:
        xp, arrays = _checks.check_arrays(**named)
        for name, array in zip(named, arrays, strict=True):
            if self.dim is not None and array.shape[-1] != self.dim:
                raise ValueError(
                    f"{name} must have {self.dim} coordinates, the dim of the map, got shape "
                    f"{tuple(array.shape)}"
                )
        if len({array.shape[-1] for array in arrays}) > 1:
            raise ValueError(f"x and y must have one dim, got {[tuple(a.shape) for a in arrays]}")
        _checks.check_leading_axes(**{n: tuple(named[n].shape[:-2]) for n in named})
        return xp, arrays

    @_arrays.on_array_device
    def _features(self, x: Array, side: str) -> Features:
        xp, (x,) = self._check(x=x)
        dtype = _arrays.accumulation_dtype(xp, x.dtype, None)
        make = self.query_spec if side == "query" else self.key_spec
        spec = make(xp, dtype, array_api_compat.device(x))
        with _numerics.ignore_fp_warnings():
            log, values = _generic.evaluate(spec, Tokens(xp.astype(x, dtype, copy=False), None, 0))
            if values is not None and log.shape[-1] > 1:
                # In a state a value of 0 has a log of its own, -inf; as features it needs none.
                log = xp.max(log, axis=-1, keepdims=True)
            return Features(log, values)

    def query_features(self, x: Array) -> Features:
        """Features of queries.

        Parameters
        ----------
        x : array, (..., n, d)
            Queries, unscaled.

        Returns
        -------
        Features
            ``phi = values * exp(log)``, m columns, in the accumulation dtype.

        Raises
        ------
        TypeError, ValueError
            Not a floating array, or of another dim.
        """
        return self._features(x, "query")

    def key_features(self, x: Array) -> Features:
        """Features of keys; see :meth:`query_features`."""
        return self._features(x, "key")

    @abstractmethod
    def kernel(self, x: Array, y: Array) -> Array:
        """Exact kernel that the map estimates or equals.

        Parameters
        ----------
        x : array, (..., n, d)
            Queries, unscaled: the scale is inside.
        y : array, (..., s, d)
            Keys.

        Returns
        -------
        array, (..., n, s)
            In the library, dtype and device of the inputs.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim; traced arrays, where the
            closed form is computed on the host.
        NotImplementedError
            No closed form is known; the message says of what.
        """

    @_arrays.on_array_device
    def _on_host(self, function: PairFunction, x: Array, y: Array) -> Array:
        """Apply a closed form in float64 NumPy to arrays of any library."""
        xp, (x, y) = self._check(x=x, y=y)
        with _numerics.ignore_fp_warnings():
            hosts = (_arrays.to_numpy(a, name) for name, a in (("x", x), ("y", y)))
            result = function(*(host.astype(np.float64) for host in hosts))
            array = xp.asarray(np.asarray(result), device=array_api_compat.device(x))
            return xp.astype(array, x.dtype, copy=False)

    @_arrays.on_array_device
    def estimate(self, x: Array, y: Array) -> Array:
        """Return the map's kernel estimate ``phi(x) . phi(y)``, shapes as :meth:`kernel`."""
        xp, (x, y) = self._check(x=x, y=y)
        with _numerics.ignore_fp_warnings():
            (log_x, unit_x), (log_y, unit_y) = (
                _unit_rows(features, xp)
                for features in (self.query_features(x), self.key_features(y))
            )
            products = xp.matmul(unit_x, xp.matrix_transpose(unit_y))
            result = products * xp.exp(log_x + xp.matrix_transpose(log_y))
            return xp.astype(result, x.dtype, copy=False)

    def mean(self, x: Array, y: Array) -> Array:
        """Exact mean of :meth:`estimate` over draws, shapes as :meth:`kernel`.

        Raises
        ------
        NotImplementedError
            The map is biased, and its mean is not known.
        """
        if not self.unbiased:
            raise NotImplementedError(
                f"{self!r} is not known to be unbiased, and its mean is not known"
            )
        return self.kernel(x, y)

    @_arrays.on_array_device
    def variance(self, x: Array, y: Array) -> Array:
        """Exact variance of :meth:`estimate`, shapes as :meth:`kernel`; 0 for a deterministic map.

        Raises
        ------
        NotImplementedError
            No closed form is known; the message names the missing one.
        """
        xp, (x, y) = self._check(x=x, y=y)
        lead = _checks.check_leading_axes(x=tuple(x.shape[:-2]), y=tuple(y.shape[:-2]))
        shape = (*lead, x.shape[-2], y.shape[-2])
        return xp.zeros(shape, dtype=x.dtype, device=array_api_compat.device(x))


class SoftmaxKernelMap(BaseFeatureMap):
    """A map whose kernel is ``exp(scale x.y)``."""

    softmax_kernel = True

    def kernel(self, x: Array, y: Array) -> Array:
        """Return ``exp(scale x.y)``, ``(..., n, d)`` and ``(..., s, d)`` to ``(..., n, s)``.

        Raises
        ------
        TypeError, ValueError
            Not floating arrays of one library, dtype, device and dim.
        """
        return self._on_host(lambda a, b: np.exp(self.scale * dots(a, b)), x, y)


def _explained(init: Callable[..., None]) -> Callable[..., None]:
    """Name the parameters, and the remedy, where arguments do not fit a constructor's."""

    @functools.wraps(init)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            from inspect import signature  # only for who has to be told

            takes = signature(init)
            try:
                takes.bind(self, *args, **kwargs)
            except TypeError as misfit:
                raise TypeError(_misfit(type(self), misfit, takes, kwargs)) from None
            raise error

    return explained


def _misfit(cls: Any, misfit: TypeError, takes: Any, given: dict[str, Any]) -> str:
    names = [name for name in takes.parameters if name != "self"]
    remedy = f"; make one by {cls.__name__}.{cls._made_by}" if cls._made_by else ""
    if "seed" in given and "rng" in names:
        remedy = "; a seed is given as rng="
    return f"{cls.__name__} takes {', '.join(names)}: {misfit}{remedy}"


def _qualified_name(name: str, function: Any) -> str:
    # A ufunc of NumPy 2.0 has a name and no module.
    module = getattr(function, "__module__", type(function).__module__)
    qualname = getattr(function, "__qualname__", getattr(function, "__name__", "<object>"))
    qualified = f"{module}.{qualname}"
    if "<" in qualified:
        raise ValueError(
            f"{name} must be a function defined at the top of a module to be recognized in "
            f"another process, got {qualified}"
        )
    return qualified


def dots(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """All inner products, ``(..., n, s)``."""
    return np.asarray(x @ np.swapaxes(y, -1, -2))


def square_norms(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``|x|^2`` as ``(..., n, 1)`` and ``|y|^2`` as ``(..., 1, s)``."""
    return np.sum(x * x, axis=-1)[..., :, None], np.sum(y * y, axis=-1)[..., None, :]


def square_distances(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """All ``|x - y|^2``, ``(..., n, s)``, never negative."""
    xx, yy = square_norms(x, y)
    return np.maximum(xx + yy - 2 * dots(x, y), 0)


def _unit_rows(features: Features, xp: ModuleType) -> tuple[Array, Array]:
    """Split features into a log for each row and values of moderate size."""
    log, values = features
    row = _numerics.finite_shift(largest(log, keepdims=True), xp)
    weights = xp.exp(log - row)
    return row, weights if values is None else weights * values
