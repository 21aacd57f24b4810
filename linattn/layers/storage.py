"""Parameters in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn import _arrays, _checks
from linattn._extras import remedy
from linattn._files import Path, checked_path, write_bytes
from linattn.layers._params import Params, as_part

__all__ = ["load_safetensors", "save_safetensors"]


def load_safetensors(
    path: Path, mapping: Mapping[str, str | Sequence[str]] | None = None
) -> dict[str, NDArray[Any]]:
    """Load parameters from a safetensors file, under their names or others.

    Parameters
    ----------
    path : str, bytes or path-like
        The file.
    mapping : dict, optional
        Name of a parameter -> name of an array in the file, or a list of names. The arrays of a
        list are concatenated along their first axis, for example queries, keys and values. Only
        these arrays are read. Default: all arrays under their names.

    Returns
    -------
    dict
        NumPy arrays of the dtypes of the file.

    Raises
    ------
    ImportError
        The package safetensors is not installed: it is in the extra ``layers``.
    TypeError
        A mapping that is not of names to names or lists of names.
    ValueError
        A name is not in the file, shapes of a list do not fit, an array is bfloat16 and the package
        ml_dtypes is not installed, or the file is no safetensors file.
    OSError
        The file cannot be read.

    Notes
    -----
    Linear layers of most models store ``weight`` as (out, in), as the layers here do. Transpose it
    if a model stores (in, out), as GPT-2 does. Convert to another library ``xp`` by
    ``{name: xp.asarray(array) for name, array in params.items()}``.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from linattn import layers
    >>> params = layers.init_norm(8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "norm.safetensors"
    ...     layers.save_safetensors(path, params)
    ...     loaded = layers.load_safetensors(path, {"norm.weight": "weight"})
    >>> sorted(loaded)
    ['norm.weight']
    """
    safetensors = _package()
    with suppress(ImportError):  # which gives NumPy bfloat16
        import ml_dtypes as ml_dtypes
    name = checked_path(path)
    if mapping is not None:
        _check_mapping(mapping)
    with open(name, "rb"):  # an error of the system where there is no such file
        pass
    try:
        file = safetensors.safe_open(name, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{name} is not a safetensors file: {error}") from error
    with file:
        there = set(file.keys())
        if mapping is None:
            mapping = {key: key for key in sorted(there)}
        missing = sorted({key for wanted in mapping.values() for key in _names(wanted)} - there)
        if missing:
            raise ValueError(
                f"mapping must name arrays of the file, got {', '.join(map(repr, missing[:5]))}; "
                f"{name} holds {', '.join(map(repr, sorted(there)[:5]))} and so on, "
                f"{len(there)} arrays"
            )
        return {key: _loaded(name, file, key, wanted) for key, wanted in mapping.items()}


def _check_mapping(mapping: Any) -> None:
    """Check that names are mapped to names, or to lists of them."""
    wanted = "mapping must be a dictionary of names, or of lists of names, by name"
    if not isinstance(mapping, Mapping):
        message = f"{wanted}, got {type(mapping).__name__}; for parameters of the same names give "
        message += "{name: name for name in names}"
        raise TypeError(message)
    for key, value in mapping.items():
        listed = [value] if isinstance(value, str) else value
        is_list = isinstance(listed, list | tuple) and all(isinstance(n, str) for n in listed)
        if not isinstance(key, str) or not is_list:
            raise TypeError(f"{wanted}, got {key!r}: {value!r}")


def _loaded(name: str, file: Any, key: str, wanted: str | Sequence[str]) -> NDArray[Any]:
    """Read an array, or read several arrays and concatenate them."""
    arrays: list[NDArray[Any]]
    try:
        arrays = [file.get_tensor(part) for part in _names(wanted)]
    except (TypeError, AttributeError) as error:
        raise ValueError(
            f"{name} must hold arrays of NumPy's dtypes, got {wanted!r}: {error}; save it as "
            f"float32 with the library that wrote it"
        ) from error
    if isinstance(wanted, str):
        return arrays[0]
    try:
        return np.concatenate(arrays)
    except ValueError as error:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ValueError(
            f"mapping[{key!r}] must name arrays that go behind each other, got shapes {shapes}"
        ) from error


def _names(wanted: str | Sequence[str]) -> Sequence[str]:
    return [wanted] if isinstance(wanted, str) else wanted


def save_safetensors(path: Path, params: Params) -> None:
    """Save parameters to a safetensors file, which replaces an existing one in one step.

    Parameters
    ----------
    path : str, bytes or path-like
        The file.
    params : dict
        Arrays of any array-API library by name.

    Raises
    ------
    ImportError
        The package safetensors is not installed: it is in the extra ``layers``.
    TypeError
        Not a dictionary of arrays by name, or a dtype that safetensors has not.
    OSError
        As :func:`linattn.save_state`.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from linattn import layers
    >>> params = layers.init_norm(8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "norm.safetensors"
    ...     layers.save_safetensors(path, params)
    ...     loaded = layers.load_safetensors(path)
    >>> sorted(loaded)
    ['bias', 'weight']
    """
    _package()
    from safetensors.numpy import save

    target = checked_path(path)
    arrays = {}
    for key, array in as_part(params).items():
        if not isinstance(key, str):
            raise TypeError(f"params must be a dictionary of arrays by name, got the name {key!r}")
        checked = _checks.check_array(f"params[{key!r}]", array)
        arrays[key] = np.ascontiguousarray(_arrays.to_numpy(checked))
        if arrays[key].dtype.kind not in "biuf":
            raise TypeError(
                f"params[{key!r}] must hold booleans, integers or floats of NumPy, got dtype "
                f"{checked.dtype}; convert it to float32"
            )
    write_bytes(target, save(arrays))


def _package() -> Any:
    """Return the package safetensors, or say how to install it."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            f"safetensors files need the package safetensors: {remedy('layers')}"
        ) from error
    return safetensors
