"""The same calls on arrays of torch and JAX: time over that of NumPy arrays, in one process.

    python -m benchmarks.libraries [--lengths 512 2048 8192] [--threads 1 2] [--rows .] [--record]
    python -m benchmarks.libraries --page

8 heads, d = e = 64, float32; FAVOR+ has 256 features. Each row is a call, each cell the ratio of
the least times of some rounds, in which the libraries take turns. On one thread it is processor
time, on one core, else wall time. Gradients are a forward and a backward pass: by the functions of
NumPy that return a pullback, by ``backward()`` of the plain function and of
``linattn.interop.torch``, and by ``jax.grad``. Calls under ``jax.jit`` are compiled before. A row
of decoding is a hundred steps, of one token of all heads. The last columns are torch's own
exact attention over ours, and ours under ``jax.jit`` over `chunked`.

``--record`` writes ``benchmarks/results/libraries.json``, in which rows of an earlier run on this
machine stay if they are not measured again; ``--page`` writes the table of
docs/performance.md from it. The number of cores is set as Linux does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.machine import describe

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "benchmarks/results/libraries.json", ROOT / "docs/performance.md"
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
LIBRARIES = ("NumPy", "torch", "interop.torch", "JAX, eager", "JAX, jit", "torch's own", "formula")
CHUNKED = ("FAVOR+, causal", "elu + 1, causal")
ROUNDS, SECONDS = (2, 20), 1.0
"""Fewest and most rounds of a row; between them it takes this long."""

Calls = dict[str, Callable[[], Any]]


def chunked(name: str) -> Callable[..., Any]:
    """Return causal attention as it is written in JAX by hand: chunks of 128, and no checks.

    FAVOR+ has one shift for all keys, and a constant that is added to each feature.
    """
    import jax
    import jax.numpy as jnp

    import linattn

    size = 128
    rows = linattn.feature_maps.PositiveFeatures(DIM, num_features=256, rng=0).projection
    rows, below = jnp.asarray(rows, jnp.float32), jnp.tril(jnp.ones((size, size)))

    def features(x: Any, axes: Any) -> Any:
        if name.startswith("elu"):
            return jax.nn.elu(x) + 1
        exponent = DIM**-0.25 * x @ rows.T
        top = jax.lax.stop_gradient(exponent.max(axes, keepdims=True))
        return jnp.exp(exponent - (x * x).sum(-1, keepdims=True) * DIM**-0.5 / 2 - top) + 1e-4

    def step(sums: Any, chunk: Any) -> Any:
        q, k, v = chunk
        return sums + k.mT @ v, q @ sums + (q @ k.mT * below) @ v

    def attend(query: Any, key: Any, value: Any) -> Any:
        q, k = features(query, -1), features(key, (-1, -2))
        v = jnp.concat([value, jnp.ones_like(value[..., :1])], axis=-1)
        cut = (jnp.moveaxis(x.reshape(HEADS, -1, size, x.shape[-1]), 1, 0) for x in (q, k, v))
        _, out = jax.lax.scan(step, jnp.zeros((HEADS, q.shape[-1], DIM + 1)), tuple(cut))
        out = jnp.moveaxis(out, 0, 1).reshape(HEADS, -1, DIM + 1)
        return out[..., :-1] / out[..., -1:]

    return attend


def main() -> None:
    """Print a table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", default=".", help="a pattern of the names of calls")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--page", action="store_true", help="write the page, and measure nothing")
    given = parser.parse_args()
    if given.page:
        write_page(json.loads(RECORD.read_text()))
        return
    record: dict[str, Any] = {"machine": describe([*os.sched_getaffinity(0)]), "rows": []}
    for name, length, calls_of_row in rows(given.lengths, given.rows):
        for threads in given.threads:
            times = measured(calls_of_row, threads)
            cells = ", ".join(f"{n} {x / times['NumPy']:.2f}" for n, x in times.items())
            print(f"{name}, {length:,} tokens, {threads} threads, {times['NumPy']:.3g} ms: {cells}")
            row = {"call": name, "tokens": length, "threads": threads, "milliseconds": times}
            record["rows"].append({**row, "commit": record["machine"]["commit"]})
    if given.record:
        names = ("call", "tokens", "threads")
        known = {tuple(row[name] for name in names): row for row in _recorded(record["machine"])}
        known |= {tuple(row[name] for name in names): row for row in record["rows"]}
        record["rows"] = list(known.values())
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _recorded(machine: Any) -> list[Any]:
    """Return the rows of an earlier run on this machine: those not measured again stay."""
    earlier = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if earlier.get("machine", {}).get("cpu") != machine["cpu"]:
        return []
    return [{"commit": earlier["machine"]["commit"], **row} for row in earlier["rows"]]


def measured(calls_of_row: Calls, threads: int) -> dict[str, float]:
    """Return the least time of each call, in milliseconds."""
    import torch

    import linattn

    cores, clock = os.sched_getaffinity(0), time.perf_counter
    if threads == 1:
        clock = time.process_time
    torch.set_num_threads(threads)
    _use_cores([*cores][:threads])
    names, least = [*calls_of_row], dict.fromkeys(calls_of_row, float("inf"))
    begun, rounds = time.perf_counter(), 0
    with linattn.config(num_threads=threads):
        while rounds < ROUNDS[0] or (rounds < ROUNDS[1] and time.perf_counter() - begun < SECONDS):
            first = rounds % len(names)
            for name in names[first:] + names[:first]:
                before = clock()
                calls_of_row[name]()
                least[name] = min(least[name], 1e3 * (clock() - before))
            rounds += 1
    _use_cores([*cores])
    return least


def _use_cores(cores: list[int]) -> None:
    """Let all threads of this process run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def rows(lengths: list[int], pattern: str) -> Iterator[tuple[str, int, Calls]]:
    """Yield the name and length of each row, and a call of each library."""
    import numpy as np

    import linattn

    known = calls(linattn)
    for length in lengths:
        shape = 3, HEADS, length, DIM
        host = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        for name, call in known.items():
            if re.search(pattern, name):
                yield name, length, _forward(name, call, host)
        for name in GRADIENTS:
            if re.search(pattern, f"{name}, gradients"):
                yield f"{name}, gradients", length, _gradient(name, known[name], host)
    for name in ("decode_step", "Decoder.step"):
        if re.search(pattern, name):
            yield name, 1, _step(name)


def _forward(name: str, call: Any, host: Any) -> Calls:
    """Return a call of each library."""
    import jax
    import torch

    tensors = [torch.from_numpy(x) for x in host]
    arrays = [jax.numpy.asarray(x) for x in host]
    found: Calls = {
        "NumPy": lambda: call(*host),
        "torch": lambda: call(*tensors),
        "JAX, eager": lambda: jax.block_until_ready(call(*arrays)),
    }
    if name not in NOT_TRACED:
        compiled = jax.jit(call).lower(*arrays).compile()
        found["JAX, jit"] = lambda: jax.block_until_ready(compiled(*arrays))
    if name in CHUNKED:
        by_hand = jax.jit(chunked(name)).lower(*arrays).compile()
        found["formula"] = lambda: jax.block_until_ready(by_hand(*arrays))
    if name in ("softmax, full", "softmax, causal"):
        theirs = partial(
            torch.nn.functional.scaled_dot_product_attention, is_causal=name.endswith("causal")
        )
        found["torch's own"] = lambda: theirs(*(x[None] for x in tensors))
    return found


def _step(name: str) -> Calls:
    """Return a hundred steps of decoding in each library."""
    import jax
    import numpy as np
    import torch

    import linattn

    phi = linattn.feature_maps.PositiveFeatures(DIM, num_features=256, rng=0)
    host = np.random.default_rng(0).standard_normal((3, HEADS, 20, DIM), dtype=np.float32)
    converted = (np.asarray, torch.from_numpy, jax.numpy.asarray)
    found: Calls = {}
    for library, convert in zip(("NumPy", "torch", "JAX, eager"), converted, strict=True):
        tokens = [convert(x[:, 0].copy()) for x in host]
        query, key, value = map(convert, host)
        _, state = linattn.linear_attention(query, key, value, phi, return_state=True)
        step: Any = partial(linattn.decode_step, state=state, feature_map=phi)
        if name == "Decoder.step":
            step = linattn.Decoder(phi, state).step

        def steps(step: Any = step, tokens: Any = tokens) -> None:
            for _ in range(100):
                jax.block_until_ready(step(*tokens))

        found[library] = steps
    return found


def _gradient(name: str, call: Any, host: Any) -> Calls:
    """Return a call with its gradients of each library."""
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
    compiled = jax.jit(eager).lower(*arrays).compile()

    def numpys() -> Any:
        output, pullback = getattr(linattn, f"{kind}_vjp")(*host, **options)
        return pullback(np.ones_like(output))

    found: Calls = {
        "NumPy": numpys,
        "torch": lambda: call(*leaves).sum().backward(),
        "interop.torch": lambda: learn(*leaves).sum().backward(),
        "JAX, eager": lambda: jax.block_until_ready(eager(*arrays)),
        "JAX, jit": lambda: jax.block_until_ready(compiled(*arrays)),
    }
    if name in CHUNKED:
        of_formula = jax.grad(lambda *x: chunked(name)(*x).sum(), (0, 1, 2))
        by_hand = jax.jit(of_formula).lower(*arrays).compile()
        found["formula"] = lambda: jax.block_until_ready(by_hand(*arrays))
    if kind == "softmax_attention":
        four = [x.detach()[None].requires_grad_() for x in leaves]
        theirs = partial(torch.nn.functional.scaled_dot_product_attention, **options)
        found["torch's own"] = lambda: theirs(*four).sum().backward()
    return found


# The page ---------------------------------------------------------------------------------------

BEGIN, END = "<!-- benchmarks.libraries -->", "<!-- end of benchmarks.libraries -->"


def table(record: Any) -> str:
    """Return the table: in each cell a ratio for each length, in order."""
    lines = []
    for threads in sorted({row["threads"] for row in record["rows"]}):
        several = f"{threads} threads" if threads > 1 else "one thread"
        last = "torch's own over ours", "JAX, jit, over a formula"
        head = f"{several}; NumPy, ms", *LIBRARIES[1:5], *last
        lines += ["", f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
        by_call: dict[str, list[Any]] = {}
        for row in record["rows"]:
            if row["threads"] == threads:
                by_call.setdefault(row["call"], []).append(row["milliseconds"])
        for call, times in by_call.items():
            base = "/".join(f"{each['NumPy']:.3g}" for each in times)
            cells = [_ratios(times, name, "NumPy") for name in LIBRARIES[1:5]]
            cells.append(_ratios(times, "torch's own", "torch"))
            cells.append(_ratios(times, "JAX, jit", "formula", of="formula"))
            lines.append(f"| {call}; {base} | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


def _ratios(times: list[Any], name: str, base: str, of: str = "") -> str:
    measured = [each for each in times if (of or name) in each]
    return "/".join(f"{each[name] / each[base]:.2f}" for each in measured) or "-"


def write_page(record: Any) -> None:
    """Put the table into docs/performance.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
