"""The real sample: what is in it, what its docstring says of it, and how it is loaded."""

from __future__ import annotations

import hashlib
from importlib import resources

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from linattn.datasets import pretrained_long_qkv, pretrained_qkv

SHA256 = {
    "minilm_qkv.npz": "b4ee838788ac671f5bee201d30683ec6a7ae462c013fadba507514da58c2dfc5",
    "minilm_long_qkv.npz": "50654399ce3013b204de070e8e24e5720482584b14bec18617833a85385d86d7",
}


@pytest.mark.parametrize("name", SHA256)
def test_file_is_the_one_that_the_readme_names(name):
    folder = resources.files("linattn.datasets")
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == SHA256[name]
    assert SHA256[name] in (folder / "README.md").read_text(encoding="utf-8")


def test_default_is_float32():
    for array in pretrained_qkv():
        assert array.dtype == np.float32
        assert array.shape == (2, 12, 256, 32)


@pytest.mark.parametrize("dtype", ["float16", np.float32, np.dtype(float), np.longdouble, ">f4"])
def test_dtypes(dtype):
    half = pretrained_qkv(np.float16)
    arrays = pretrained_qkv(dtype)
    assert len(arrays) == 3
    for array, stored in zip(arrays, half, strict=True):
        assert array.dtype == np.dtype(dtype).newbyteorder("=")
        assert array.dtype.isnative
        assert_array_equal(np.isfinite(array), True)
        # float16 fits into every wider dtype: nothing was rounded twice.
        assert_array_equal(array, stored)


@pytest.mark.parametrize(
    "dtype", [np.int32, bool, np.complex64, object, "S4", "float7", None, 32, "f4,f4"]
)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype: want a real floating NumPy dtype, got "):
        pretrained_qkv(dtype)


def test_arrays_are_fresh_and_writable():
    first = pretrained_qkv()
    kept = [array.copy() for array in first]
    for array in first:
        assert array.flags.writeable
        assert array.flags.c_contiguous
        array[...] = 0
    for again, array in zip(pretrained_qkv(), kept, strict=True):
        assert_array_equal(again, array)


def test_query_key_and_value_differ():
    query, key, value = pretrained_qkv()
    assert not np.array_equal(query, key)
    assert not np.array_equal(key, value)
    for array in (query, key, value):
        assert not np.array_equal(array[0], array[1])


def test_the_long_sample():
    """Five windows, none of which repeats another, and the perplexities of the docstring."""
    query, key, value = pretrained_long_qkv()
    for array in (query, key, value):
        assert array.shape == (2, 2, 2560, 32)
        assert array.dtype == np.float32
        assert len(np.unique(array[1, 0], axis=0)) > 2500
    assert pretrained_long_qkv("float16")[0].dtype == np.float16
    logits = query @ np.swapaxes(key, -1, -2) / np.sqrt(32)
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = weight / weight.sum(axis=-1, keepdims=True)
    perplexity = np.exp(-(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1))
    assert [round(float(x)) for x in np.median(perplexity, axis=(1, 2))] == [161, 392]
