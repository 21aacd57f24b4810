"""CUDA graphs: a call captured once and launched again without Python."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from linattn_cupy.device import cupy


class CapturedCall:
    """A call as a CUDA graph; made by :func:`capture`.

    Attributes
    ----------
    output : object
        What the function returned. Its arrays hold the results of the last launch (at first: of
        the call that was made before the capture), and are written anew by the next.
    """

    def __init__(self, graph: Any, output: Any, memory: tuple[Any, ...]) -> None:
        self.output = output
        self._graph = graph
        self._memory = memory

    def launch(self) -> None:
        """Do the call again, in CuPy's current stream, with what its arguments hold by then."""
        self._graph.launch()


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedCall:
    """Capture a call in CuPy's current stream as a CUDA graph.

    Parameters
    ----------
    function : callable
        What to call: attention, a decoding step. It is called twice: once for its results, which
        also builds kernels and moves the parameters of maps to the device, and once while the
        stream captures, which computes nothing.
    *args, **kwargs
        Its arguments. The graph reads their arrays where they lie: to compute with other numbers,
        write them there.

    Returns
    -------
    CapturedCall
        Its ``output``, and ``launch()`` to compute it again.

    Raises
    ------
    RuntimeError
        The current stream is the default one; or the call waits for the device, or calls cuBLAS,
        which CuPy does not do while a stream captures (float32 attention, generic code).

    Notes
    -----
    All memory that the call takes while it is captured comes from a pool of its own, which lives
    as long as the graph: memory of CuPy's default pool that is free at the end of the call would
    become part of other arrays, while every launch still writes to it.

    Examples
    --------
    ::

        with cupy.cuda.Stream(non_blocking=True):
            step = linattn_cupy.capture(linattn.linear_attention, query, key, value, phi)
            query[...] = other_query
            step.launch()
            print(step.output)
    """
    stream = cupy.cuda.get_current_stream()
    if stream.ptr in (0, cupy.cuda.runtime.streamLegacy):
        raise RuntimeError(
            "the current stream must be one that can be captured, got the default stream; call "
            "capture inside `with cupy.cuda.Stream(non_blocking=True):`"
        )
    first = function(*args, **kwargs)
    stream.synchronize()
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        try:
            output = function(*args, **kwargs)
        except BaseException as error:
            with suppress(RuntimeError):
                stream.end_capture()
            # What CuPy and CUDA raise of waits and of cuBLAS.
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"function must be a call that neither waits for the device nor calls cuBLAS, got "
                f"'{error}'; attention in float16 and bfloat16 and decoding steps can be captured, "
                f"other calls are made without a graph"
            ) from error
        graph = stream.end_capture()
    _copy(first, output)
    return CapturedCall(graph, output, (pool, function, args, kwargs))


def _copy(results: Any, output: Any) -> None:
    """Write results into the arrays of the output, which has their structure."""
    if isinstance(output, cupy.ndarray):
        output[...] = results
    elif isinstance(output, tuple | list):
        for result, place in zip(results, output, strict=True):
            _copy(result, place)
