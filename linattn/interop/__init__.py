"""Attention inside frameworks with a gradient of their own, in constant extra memory.

On arrays of torch and JAX :func:`linattn.linear_attention` is differentiated by the framework,
which keeps every block for the backward pass. The functions here are the same functions with
linattn's pullback in its place: nothing but the arguments is stored. Neither framework is imported
before its module, :mod:`linattn.interop.torch` or :mod:`linattn.interop.jax`, is.
"""

from __future__ import annotations

__all__: list[str] = []
