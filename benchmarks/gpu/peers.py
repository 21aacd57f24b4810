"""Other libraries on the same problem: torch's exact attention, Triton's linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.record import Item, LeftOut
from benchmarks.gpu.timer import Thunk, input_sets, measure
from benchmarks.gpu.timings import BATCH, HEADS, LENGTHS, MAIN, SIZES

__all__ = ["PEERS", "items"]


class _TorchClock:
    """Events on torch's current stream."""

    def __init__(self) -> None:
        import torch

        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, work: Thunk) -> float:
        """Run work and return how long the device took."""
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _captured(calls: Sequence[Thunk]) -> list[Thunk] | None:
    """Capture warm calls as graphs, as linattn's are timed; None where one cannot be."""
    import torch

    replays = []
    try:
        for call in calls:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            replays.append(graph.replay)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return replays


def _need(module: str) -> None:
    if find_spec(module) is None:
        reason = f"{module} is not installed"
        raise LeftOut(reason)


def _sdpa(backend: str, kind: str, length: int) -> tuple[tuple[int, ...], Callable[..., Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(query: Any, key: Any, value: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(query, key, value, is_causal=kind == "causal")

    return (BATCH, HEADS, length, SIZES.dim), call


def _fla(kind: str, length: int) -> tuple[tuple[int, ...], Callable[..., Any]]:
    _need("fla")
    if kind == "full":
        reason = "its linear attention is causal"
        raise LeftOut(reason)
    from fla.ops.linear_attn import chunk_linear_attn

    def call(query: Any, key: Any, value: Any) -> Any:
        # Features are given to it; normalized, as linattn's are.
        return chunk_linear_attn(query, key, value, normalize=True)

    return (BATCH, length, HEADS, SIZES.dim), call


PEERS: dict[str, Callable[[str, int], tuple[tuple[int, ...], Callable[..., Any]]]] = {
    "torch SDPA flash": partial(_sdpa, "FLASH_ATTENTION"),
    "torch SDPA cuDNN": partial(_sdpa, "CUDNN_ATTENTION"),
    "fla linear attention": _fla,
}


def items(*, quick: bool = False) -> Iterator[Item]:
    """Yield the main length first."""
    lengths = [MAIN] if quick else [MAIN, *(n for n in LENGTHS if n != MAIN)]
    for length in lengths:
        for kind in ("full", "causal"):
            for name in PEERS:
                yield _item(name, kind, length)


def _item(name: str, kind: str, length: int) -> Item:
    return Item(f"{name} {kind} {length}", partial(_time, name, kind, length))


def _time(name: str, kind: str, length: int) -> dict[str, Any]:
    _need("torch")
    import torch

    if not torch.cuda.is_available():
        reason = "torch sees no GPU"
        raise LeftOut(reason)
    shape, call = PEERS[name](kind, length)

    def inputs() -> tuple[Any, ...]:
        arrays = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        if name.startswith("fla"):
            query, key, value = arrays
            elu = torch.nn.functional.elu
            return elu(query) + 1, elu(key) + 1, value
        return tuple(arrays)

    first = inputs()
    size = sum(array.numel() * array.element_size() for array in first)
    free, _ = torch.cuda.mem_get_info()
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [first, *(inputs() for _ in range(input_sets(size, cache, size + free // 2) - 1))]
    calls = [partial(call, *s) for s in sets]
    with torch.no_grad():
        found = measure(_TorchClock(), calls)
        found |= {"eager_seconds": found["seconds"], "graph": False}
        replays = _captured(calls)
        if replays is not None:
            found |= measure(_TorchClock(), replays) | {"graph": True}
    described = {"way": name, "dtype": "bfloat16", "kind": kind, "length": length}
    return {
        **described,
        "map": "elu" if name.startswith("fla") else "exact",
        "sets": len(sets),
        **found,
    }
