"""The same calls on arrays of torch and JAX: time over that of NumPy arrays, in one process.

    python -m benchmarks.libraries [--lengths 512 2048 8192] [--threads 1] [--repeats 5] [--rows .]

8 heads, d = e = 64, float32; FAVOR+ has 256 features. A row is a call, a cell the ratio of the
least processor times (wall times on several threads), NumPy's beside it in milliseconds. Gradients
are a forward and a backward pass, by the functions of NumPy that return a pullback, by
``backward()`` of the plain function and of ``linattn.interop.torch`` on torch, and by ``jax.grad``.
JAX is run eagerly, and under ``jax.jit`` after it was compiled once. A step of decoding takes one
token of all heads, whatever came before. The last column is torch's own exact attention.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

HEADS, DIM = 8, 64


def calls(linattn: Any) -> dict[str, Callable[..., Any]]:
    """Return calls of query, key and value, by name."""
    maps = linattn.feature_maps
    favor, elu = maps.PositiveFeatures(DIM, num_features=256, rng=0), maps.EluFeatures()
    attend, exact, recur = (
        linattn.linear_attention,
        linattn.softmax_attention,
        linattn.linear_recurrence,
    )
    causal = {"is_causal": True}

    def packed(query: Any, key: Any, value: Any) -> Any:
        length = query.shape[-2]
        borders = [0, length // 8, length // 2, length]
        return attend(query, key, value, favor, cu_seqlens=borders, **causal)

    def masked(query: Any, key: Any, value: Any) -> Any:
        return exact(query, key, value, key_mask=key[..., 0] > -1, key_bias=key[..., 1])

    def gated(query: Any, key: Any, value: Any) -> Any:
        return recur(query, key / 8, value, update_rule="gated", log_decay=-(key[..., 0] ** 2))

    def delta(query: Any, key: Any, value: Any) -> Any:
        return recur(query, key / 8, value, update_rule="delta", beta=0.5 + 0 * key[..., 0])

    return {
        "FAVOR+, full": partial(attend, feature_map=favor),
        "FAVOR+, causal": partial(attend, feature_map=favor, **causal),
        "elu + 1, full": partial(attend, feature_map=elu),
        "elu + 1, causal": partial(attend, feature_map=elu, **causal),
        "window of 32, causal": partial(attend, feature_map=favor, exact_window=32, **causal),
        "decay, causal": partial(attend, feature_map=favor, log_decay=-0.01, **causal),
        "packed, causal": packed,
        "gated recurrence": gated,
        "delta recurrence": delta,
        "softmax, full": exact,
        "softmax, causal": partial(exact, **causal),
        "softmax, mask and bias": masked,
        "attention()": partial(linattn.attention, rng=0),
    }


GRADIENTS = (
    *("FAVOR+, full", "FAVOR+, causal", "elu + 1, full", "elu + 1, causal"),
    *("softmax, full", "softmax, causal"),
)
NOT_TRACED = ("attention()",)


def milliseconds(call: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """Return the least time of a call, after one that is not timed."""
    call()
    least = float("inf")
    for _ in range(repeats):
        begun = clock()
        call()
        least = min(least, clock() - begun)
    return 1e3 * least


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", default=".", help="a pattern of the names of calls")
    given = parser.parse_args()
    threads = given.threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads == 1:
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )

    import jax
    import numpy as np
    import torch

    import linattn

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    taken = partial(milliseconds, repeats=given.repeats, clock=clock)
    print(f"{threads} threads, torch {torch.__version__}, JAX {jax.__version__}\n")
    print("| call | tokens | NumPy | torch | JAX, eager | JAX, jit | torch's own over ours |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with linattn.config(num_threads=threads):
        for length in given.lengths:
            shape = 3, HEADS, length, DIM
            host = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            rows = {n: call for n, call in calls(linattn).items() if re.search(given.rows, n)}
            for name, call in rows.items():
                print(_forward(name, call, host, taken), flush=True)
            for name in GRADIENTS:
                if re.search(given.rows, f"{name}, gradients"):
                    print(_gradient(name, calls(linattn)[name], host, taken), flush=True)
        for name in ("decode_step", "Decoder.step"):
            if re.search(given.rows, name):
                print(_step(name, partial(milliseconds, repeats=300, clock=clock)), flush=True)


def _forward(name: str, call: Any, host: Any, taken: Any) -> str:
    """Return the row of a call."""
    import jax
    import torch

    tensors = [torch.from_numpy(x) for x in host]
    arrays = [jax.numpy.asarray(x) for x in host]
    base = taken(lambda: call(*host))
    times = [taken(lambda: call(*tensors)), taken(lambda: jax.block_until_ready(call(*arrays)))]
    if name not in NOT_TRACED:
        compiled = jax.jit(call)
        times.append(taken(lambda: jax.block_until_ready(compiled(*arrays))))
    cells = [f"{x / base:.2f}" for x in times] + ["-"] * (3 - len(times))
    own = "-"
    if name in ("softmax, full", "softmax, causal"):
        theirs = partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=name.endswith("causal")
        )
        own = f"{taken(lambda: theirs(*(x[None] for x in tensors))) / times[0]:.2f}"
    return f"| {name} | {host.shape[-2]:,} | {base:.1f} ms | {' | '.join(cells)} | {own} |"


def _step(name: str, taken: Any) -> str:
    """Return the row of a step of decoding."""
    import jax
    import numpy as np
    import torch

    import linattn

    phi = linattn.feature_maps.PositiveFeatures(DIM, num_features=256, rng=0)
    host = np.random.default_rng(0).standard_normal((3, HEADS, 20, DIM), dtype=np.float32)
    times = []
    for convert in (np.asarray, torch.from_numpy, jax.numpy.asarray):
        tokens = [convert(x[:, 0].copy()) for x in host]
        query, key, value = map(convert, host)
        _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
        step: Any = partial(linattn.decode_step, state=state, feature_map=phi)
        if name == "Decoder.step":
            step = linattn.Decoder(phi, state).step
        times.append(taken(lambda f=step, x=tokens: jax.block_until_ready(f(*x))))
    base, *others = times
    ratios = " | ".join(f"{x / base:.2f}" for x in others)
    return f"| {name} | 1 | {1e3 * base:.0f} us | {ratios} | - | - |"


def _gradient(name: str, call: Any, host: Any, taken: Any) -> str:
    """Return the row of a call and its gradients."""
    import jax
    import numpy as np
    import torch

    import linattn
    from linattn.interop import torch as interop

    leaves = [torch.from_numpy(x).requires_grad_() for x in host]
    arrays = [jax.numpy.asarray(x) for x in host]
    kind = "softmax_attention" if name.startswith("softmax") else "linear_attention"
    options = getattr(call, "keywords", {})
    learn = partial(getattr(interop, kind), **options)
    eager = jax.grad(lambda *x: call(*x).sum(), (0, 1, 2))
    compiled = jax.jit(eager)

    def numpys() -> Any:
        output, pullback = getattr(linattn, f"{kind}_vjp")(*host, **options)
        return pullback(np.ones_like(output))

    base = taken(numpys)
    plain, door = (taken(lambda f=f: f(*leaves).sum().backward()) for f in (call, learn))
    of_jax = [taken(lambda f=f: jax.block_until_ready(f(*arrays))) for f in (eager, compiled)]
    own = "-"
    if kind == "softmax_attention":
        four = [x.detach()[None].requires_grad_() for x in leaves]
        theirs = partial(torch.nn.functional.scaled_dot_product_attention, **options)
        own = f"{taken(lambda: theirs(*four).sum().backward()) / plain:.2f}"
    jax_cells = " | ".join(f"{x / base:.2f}" for x in of_jax)
    return (
        f"| {name}, gradients | {host.shape[-2]:,} | {base:.1f} ms | {plain / base:.2f}, "
        f"interop {door / base:.2f} | {jax_cells} | {own} |"
    )


if __name__ == "__main__":
    main()
