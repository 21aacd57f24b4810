"""Calls of linattn as model files of ONNX, for every place without Python.

:func:`export` runs a function on arrays of ndonnx, whose operations build a graph, and lets the
sizes of chosen axes vary. :func:`scan` is a loop over tokens inside the graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations_with_replacement
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

try:
    import ndonnx
    import onnx
    import spox.opset.ai.onnx.v21 as op
    from ndonnx._typed_array import onnx as typed
    from onnx import helper, numpy_helper
    from spox._future import ValuePropBackend, value_prop_backend
except ImportError as error:
    raise ImportError(
        "linattn.interop.onnx needs ndonnx, which is not installed: pip install ndonnx onnxruntime"
    ) from error

from linattn import _checks, _dispatch
from linattn.typing import Array

__all__ = ["export", "scan"]


def export(
    function: Callable[..., Any],
    arguments: Mapping[str, Sequence[int | str]],
    largest: Mapping[str, int] | None = None,
    *,
    dtypes: Mapping[str, str] | None = None,
    opset_version: int | None = None,
) -> Any:
    """Return a model of ONNX that computes a function.

    Parameters
    ----------
    function : callable
        ``function(**arguments)`` on arrays of ndonnx. It returns an array or a sequence of arrays.
        Weights are constants of the model.
    arguments : mapping of str to sequence of int or str
        Names and shapes of the inputs. A string in a shape names an axis whose size varies.
    largest : mapping of str to int, optional
        The largest size of each named axis, at least 4. Larger ones are an error of
        onnxruntime.
    dtypes : mapping of str to str, optional
        Dtypes of inputs by name. Default ``"float32"``.
    opset_version : int, optional
        The newest operator set that the model may use, at least 21. From 27 on, a call of
        :func:`linattn.linear_recurrence` on float32 arrays is the operator ``LinearAttention``:
        the first axis is the batch, the others are heads of fixed sizes. Default: the newest of the
        installed onnx.

    Returns
    -------
    onnx.ModelProto
        With outputs ``output``, or ``output0``, ``output1``... for a sequence. Write it by
        ``onnx.save(model, "model.onnx")``.

    Raises
    ------
    ImportError
        When this module is imported: ndonnx is missing.
    TypeError, ValueError
        A size is wrong or missing, or a dtype is unknown.
    NotImplementedError
        The graph depends on a named size in another way than by shapes and tables of positions.

    Notes
    -----
    The function runs three times: at the largest sizes and at two smaller ones. No other thread may
    use ndonnx meanwhile. The three graphs must have the same operations. Integers that differ must
    be ``a n + b``, with the same a and b in all three and n a product of at most two named sizes;
    the model computes them from the shapes of its inputs. Arrays that differ must be the beginning
    of the largest, and are sliced. Anything else is an error: no graph is guessed.

    Full linear attention takes 256 tokens at a time in a loop of Python. For a larger length pass
    ``chunk_size=`` of that length. Exact attention makes an array of all pairs.

    Examples
    --------
    >>> import linattn
    >>> from linattn.interop.onnx import export
    >>> shapes = dict.fromkeys(("query", "key", "value"), ("batch", "length", 4))
    >>> model = export(linattn.softmax_attention, shapes, {"batch": 8, "length": 256})
    >>> [output.name for output in model.graph.output]
    ['output']
    """
    operators, dtypes = _operators(opset_version), dtypes or {}
    names = dict.fromkeys(n for shape in arguments.values() for n in shape if isinstance(n, str))
    sizes = [_three(name, i, largest or {}) for i, name in enumerate(names)]
    models = [
        _traced(function, arguments, dict(zip(names, at, strict=True)), dtypes, operators)
        for at in (zip(*sizes, strict=True) if names else [()])
    ]
    return _Joined(models, dict(zip(names, sizes, strict=True)), arguments).model


def scan(
    step: Callable[..., tuple[Sequence[Array], Array]],
    state: Sequence[Array],
    sequences: Sequence[Array],
    *,
    axis: int,
) -> tuple[list[Array], Array]:
    """Apply a step to one token after the other, as a loop of the graph.

    Parameters
    ----------
    step : callable
        ``step(state, *tokens) -> (state, output)``, such as :func:`linattn.recurrence_step`.
    state : sequence of array
        What the first step is given. The shapes of a state must stay the same.
    sequences : sequence of array
        Arrays of ndonnx with the same number of tokens.
    axis : int
        Axis of tokens, in all sequences and in the output.

    Returns
    -------
    state : list of array
        What the last step returned.
    output : array
        Outputs of the steps along `axis`.

    Notes
    -----
    The loop takes O(n) time for n tokens, and its graph has one step, whatever n is.

    Examples
    --------
    >>> import linattn
    >>> from linattn.interop.onnx import export, scan
    >>> def attend(query, key, value, state):
    ...     def step(states, *token):
    ...         output, after = linattn.recurrence_step(*token, *states, update_rule="linear")
    ...         return [after], output
    ...     (state,), output = scan(step, [state], [query, key, value], axis=0)
    ...     return output, state
    >>> shapes = dict.fromkeys(("query", "key", "value"), ("length", 4)) | {"state": (4, 4)}
    >>> model = export(attend, shapes, {"length": 1000})
    >>> len(model.graph.output)
    2
    """
    count = op.const(sequences[0].shape[axis], np.int64)

    def body(place: Any, go_on: Any, *given: Any) -> list[Any]:
        # spox gives the place an axis of 1.
        tokens = [op.squeeze(op.gather(v, place, axis=axis), axes) for v in captured]
        after, output = step([ndonnx.asarray(v) for v in given], *map(ndonnx.asarray, tokens))
        return [go_on, *(array.unwrap_spox() for array in (*after, output))]

    captured, axes = [a.unwrap_spox() for a in sequences], op.const([axis], np.int64)
    given = [array.unwrap_spox() for array in state]
    *last, outputs = op.loop(count, op.const(np.array([True])), given, body=body)
    shape = op.const([sequences[0].shape[axis], *outputs.unwrap_tensor().shape[1:]], np.int64)
    output = ndonnx.asarray(op.reshape(outputs, shape))
    return [ndonnx.asarray(var) for var in last], ndonnx.moveaxis(output, 0, axis)


def _three(name: str, place: int, largest: Mapping[str, int]) -> tuple[int, int, int]:
    """Sizes to run at; a remainder of 1 shows what is padded, and no two axes are alike."""
    if name not in largest:
        raise ValueError(f"largest must have the size of each named axis, got none of {name!r}")
    size = _checks.check_positive_int(f"largest[{name!r}]", largest[name], least=4)
    return (size, size // 2 | 1, 2) if place % 2 == 0 else (size, 2, size // 2 | 1)


def _operators(opset_version: Any) -> Any:
    """Return the module that writes the operators of an opset, None if it has none of them."""
    newest = onnx.defs.onnx_opset_version()
    version = newest if opset_version is None else opset_version
    if _checks.check_positive_int("opset_version", version, least=21) > newest:
        raise ValueError(f"opset_version must be at most {newest}, that of onnx, got {version}")
    if version < 27 or importlib.util.find_spec("spox.opset.ai.onnx.v27") is None:
        return None
    return importlib.import_module("linattn.interop._operators")


def _traced(
    function: Any, arguments: Any, sizes: Mapping[str, int], dtypes: Any, operators: Any
) -> Any:
    given = {
        name: ndonnx.argument(
            shape=tuple(sizes.get(size, size) for size in shape),
            dtype=ndonnx.from_numpy_dtype(np.dtype(dtypes.get(name, "float32"))),
        )
        for name, shape in arguments.items()
    }
    # The other backend starts a session of onnxruntime for each constant.
    constants = value_prop_backend(ValuePropBackend.REFERENCE)
    with constants, _bare_products(), _dispatch.with_operators(operators):
        results = function(**given)
        many = isinstance(results, tuple | list)
        outputs = {f"output{i}": a for i, a in enumerate(results)} if many else {"output": results}
        return ndonnx.build(given, outputs)


@contextmanager
def _bare_products() -> Iterator[None]:
    """Leave out ndonnx's branch around each product, for a defect of onnxruntime with constants.

    With it graphs are twice as large and take three times as long.
    """
    name = "_matmul_mitigate_zero_sized"
    original = getattr(typed, name, None)
    try:
        setattr(typed, name, lambda a, b: type(a)(op.matmul(a._var, b._var)))
        yield
    finally:
        setattr(typed, name, original)


class _Joined:
    """Three models of one function as one: see :func:`export`."""

    def __init__(self, models: list[Any], sizes: Mapping[str, Any], arguments: Any) -> None:
        self.model, self.sizes = models[0], sizes
        self.products = {
            names: np.prod([sizes[name] for name in names], axis=0)
            for degree in (1, 2)
            for names in combinations_with_replacement(sizes, degree)
        }
        self.used: dict[tuple[str, ...], str] = {}
        graph = self.model.graph
        self._join([model.graph for model in models])
        nodes = [*self._sizes(arguments), *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        for entry in graph.input:
            for dim, size in zip(_dims(entry), arguments[entry.name], strict=True):
                if isinstance(size, str):
                    dim.dim_param = size

    def _reject(self, reason: str) -> NoReturn:
        raise NotImplementedError(
            f"function must make one graph for all sizes of {', '.join(self.sizes)}, but {reason}; "
            f"give that axis a fixed size and pad, or call one step in linattn.interop.onnx.scan"
        )

    def _join(self, graphs: list[Any]) -> None:
        """Make the first graph right at all sizes."""
        first = graphs[0]
        if len({len(graph.node) for graph in graphs}) > 1:
            self._reject("the number of its operations depends on them")
        nodes = [
            n for same in zip(*(g.node for g in graphs), strict=True) for n in self._node(same)
        ]
        del first.node[:], first.value_info[:]
        first.node.extend(nodes)
        for entries in zip(*([*graph.input, *graph.output] for graph in graphs), strict=True):
            for dims in zip(*map(_dims, entries), strict=True):
                values = [dim.dim_value for dim in dims]
                if len(set(values)) > 1:
                    dims[0].Clear()
                    for name in [n for n, size in self.sizes.items() if list(size) == values]:
                        dims[0].dim_param = name

    def _node(self, same: Sequence[Any]) -> Iterator[Any]:
        """Compare one operation of the three graphs; compute a constant that differs."""
        node = same[0]
        if any(
            (node.op_type, node.domain, node.input, node.output, len(node.attribute))
            != (other.op_type, other.domain, other.input, other.output, len(other.attribute))
            for other in same
        ):
            self._reject(f"its operation {node.op_type} depends on them")
        for attributes in zip(*(each.attribute for each in same), strict=True):
            if attributes[0].type == onnx.AttributeProto.GRAPH:
                self._join([attribute.g for attribute in attributes])
            elif any(attribute != attributes[0] for attribute in attributes):
                if node.op_type != "Constant":
                    self._reject(f"{attributes[0].name} of its {node.op_type} depends on them")
                arrays = [numpy_helper.to_array(attribute.t) for attribute in attributes]
                yield from self._constant(node.output[0], arrays)
                return
        yield node

    def _constant(self, name: str, arrays: list[NDArray[Any]]) -> Iterator[Any]:
        first, shapes = arrays[0], [array.shape for array in arrays]
        if len(set(shapes)) == 1 and first.dtype.kind == "i":
            yield from self._integers(name, np.stack(arrays))
            return
        for array in arrays:
            part = first[tuple(map(slice, array.shape))]
            if len(set(shapes)) == 1 or part.tobytes() != array.tobytes():
                self._reject(f"it has numbers of shape {first.shape} that depend on them")
        yield _constant(f"{name}_largest", first)
        yield _constant(f"{name}_starts", np.zeros(first.ndim, np.int64))
        yield from self._integers(f"{name}_ends", np.asarray(shapes, np.int64))
        given = [f"{name}_largest", f"{name}_starts", f"{name}_ends"]
        yield helper.make_node("Slice", given, [name])

    def _integers(self, name: str, values: NDArray[Any]) -> Iterator[Any]:
        """Nodes that compute integers, given those of the three graphs along the first axis."""
        offsets = np.array(values[0], np.int64)
        slopes: dict[tuple[str, ...], NDArray[Any]] = {}
        for at in np.ndindex(offsets.shape):
            if np.ptp(column := values[(slice(None), *at)].astype(np.int64)):
                names, times = self._fit(column)
                slopes.setdefault(names, np.zeros_like(offsets))[at] = times
                offsets[at] -= times * self.products[names][0]
        yield _constant(f"{name}_0", offsets)
        for i, (names, slope) in enumerate(slopes.items()):
            size = self.used.setdefault(names, f"linattn_{'_times_'.join(names)}")
            yield _constant(f"{name}_slope{i}", slope)
            yield helper.make_node("Mul", [f"{name}_slope{i}", size], [f"{name}_part{i}"])
            yield helper.make_node("Add", [f"{name}_{i}", f"{name}_part{i}"], [f"{name}_{i + 1}"])
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        yield helper.make_node("Cast", [f"{name}_{len(slopes)}"], [name], to=kind)

    def _fit(self, column: NDArray[np.int64]) -> tuple[tuple[str, ...], int]:
        """Which product of sizes, and the slope, explain an integer of the three graphs."""
        found = []
        for names, sizes in self.products.items():
            slope = (column[1] - column[0]) // (sizes[1] - sizes[0])
            if np.ptp(column - slope * sizes) == 0:
                found.append((names, int(slope)))
        if len(found) != 1:
            self._reject(f"the integer {column[0]} of its largest size has no one reason")
        return found[0]

    def _sizes(self, arguments: Any) -> Iterator[Any]:
        """Nodes that read the named sizes; one above the largest is no index of its table."""
        for name in dict.fromkeys(name for names in self.used for name in names):
            given, axis = next((g, s.index(name)) for g, s in arguments.items() if name in s)
            top = f"linattn_{name}"
            numbers = {"zero": 0, "one": 1, "stop": self.sizes[name][0] + 1, "axis": axis}
            for key, number in numbers.items():
                yield _constant(f"{top}_{key}", np.asarray(number, np.int64))
            for kind, inputs, result in (
                ("Shape", [given], f"{top}_shape"),
                ("Gather", [f"{top}_shape", f"{top}_axis"], f"{top}_given"),
                ("Range", [f"{top}_zero", f"{top}_stop", f"{top}_one"], f"{top}_allowed"),
                ("Gather", [f"{top}_allowed", f"{top}_given"], top),
            ):
                yield helper.make_node(kind, inputs, [result])
        for names, result in self.used.items():
            if len(names) == 2:
                inputs = [f"linattn_{name}" for name in names]
                yield helper.make_node("Mul", inputs, [result])


def _dims(entry: Any) -> Any:
    return entry.type.tensor_type.shape.dim


def _constant(name: str, array: NDArray[Any]) -> Any:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
