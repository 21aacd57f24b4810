"""Real attention inputs that ship with the package, so that not every test is on Gaussians."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["pretrained_long_qkv", "pretrained_qkv"]


def pretrained_qkv(
    dtype: npt.DTypeLike = np.float32,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return queries, keys and values of a pretrained sentence encoder reading English prose.

    Two attention layers (1 and 4) of all-MiniLM-L6-v2, 12 heads of 32 each, reading 256 tokens of
    CPython's documentation.

    Parameters
    ----------
    dtype : data type, default float32
        Any real floating NumPy dtype. The file holds float16, so float16 loses nothing and wider
        dtypes add nothing; the byte order is always native.

    Returns
    -------
    query, key, value : ndarray, each (2, 12, 256, 32)
        Axes: layer, head, token, dim. Fresh, writable arrays at each call. They are unscaled: the
        model's attention is ``softmax(query @ key.mT / sqrt(32)) @ value``.

    Raises
    ------
    TypeError
        `dtype` is not a real floating NumPy dtype.

    Notes
    -----
    These are not small Gaussians. The logits ``q.k / sqrt(32)`` run from -24.2 to 14.5 in layer 1
    and from -18.4 to 12.4 in layer 4; the median lengths are 8.3 and 7.2 of queries, 9.3 and 7.1 of
    keys; the median softmax row has a perplexity of 14 and of 35, out of 256 keys.

    Each call reads 1.1 MB and returns three arrays of 196,608 numbers.

    The encoder (sentence-transformers/all-MiniLM-L6-v2) is under the Apache-2.0 licence, the text
    it reads under the PSF licence of CPython; neither is contained in the file. See the README
    beside it.

    Examples
    --------
    Head 5 of layer 4, the second of the two layers:

    >>> query, key, value = pretrained_qkv()
    >>> query[1, 5].shape
    (256, 32)
    """
    return _arrays("minilm_qkv.npz", dtype)


def pretrained_long_qkv(
    dtype: npt.DTypeLike = np.float32,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return longer queries, keys and values of the encoder of :func:`pretrained_qkv`.

    Two heads (0 and 6) of each of two attention layers (1 and 4), five windows of 512 tokens of
    unlike topics of CPython's documentation, each read alone, one after the other.

    Parameters
    ----------
    dtype : data type, default float32
        As for :func:`pretrained_qkv`.

    Returns
    -------
    query, key, value : ndarray, each (2, 2, 2560, 32)
        Axes: layer, head, token, dim. Fresh, writable arrays at each call, unscaled.

    Raises
    ------
    TypeError
        `dtype` is not a real floating NumPy dtype.

    Notes
    -----
    A window has attended to itself only, while here every query meets all keys: as in a model
    that reads one long sequence. The median softmax row has a perplexity of 161 in layer 1
    and of 392 in layer 4, out of 2,560 keys.

    Each call reads 1.8 MB. Provenance and licences as for the short sample.

    Examples
    --------
    >>> query, key, value = pretrained_long_qkv()
    >>> query.shape
    (2, 2, 2560, 32)
    """
    return _arrays("minilm_long_qkv.npz", dtype)


def _arrays(
    name: str, dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Read query, key and value of a file of this folder."""
    # Imported here to keep `import linattn` light: it brings two dozen modules with it.
    from importlib import resources

    message = f"dtype: want a real floating NumPy dtype, got {dtype!r}"
    if dtype is None:
        raise TypeError(message)
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(message) from error
    if wanted.kind != "f":
        raise TypeError(message)
    native = wanted.newbyteorder("=")
    path = resources.files(__name__) / name
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        query, key, value = (arrays[part].astype(native) for part in ("query", "key", "value"))
    return query, key, value
