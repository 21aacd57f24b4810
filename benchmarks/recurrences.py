"""Time of recurrences beside the same formula in torch operations and a compiled scan of JAX.

    python -m benchmarks.recurrences [--rounds 15] [--processes 7] [--page docs/recurrences.md]

One core, float32, 4,096 tokens, 8 heads, d = e = 64. Each is compared with the loop in float64
first. All are called in turn, in an order that changes from round to round: a time is the median
over rounds, a ratio the median of the ratios within a round. Times are those of the processor, for
what else runs on the core not to count.

The scan of JAX has two speeds, on one thread both: where its buffers start in a page of memory
decides, and most processes keep to one. All is run in several processes: the median of their
ratios is shown, and the least, JAX at its best.

Prints the section of the page; ``--page`` puts it there, ``--from-record`` without measuring. A
peer that is not installed is left out by name. Needs the extra ``bench``; takes five minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

import linattn
from benchmarks.peers.machine import describe

CHUNK = 64
TORCH, JAX = "torch operations", "JAX scan, jit"
LIBRARIES = {TORCH: "torch", JAX: "jax"}
TOLERANCE = 2e-5
START, END = "<!-- recurrences: start -->\n", "<!-- recurrences: end -->\n"


class Sizes(NamedTuple):
    """Sizes of all problems."""

    length: int
    heads: int
    dim: int


class Case(NamedTuple):
    """A rule and its gates."""

    rule: str
    by_channel: bool = False
    decay: float = 0.1
    """The mean of minus the log decays, which are exponentially distributed."""


CASES = {
    "gated": Case("gated"),
    "gated, a channel": Case("gated", by_channel=True),
    "gated, a channel, strong": Case("gated", by_channel=True, decay=5.0),
    "delta": Case("delta"),
    "gated delta": Case("gated_delta"),
    "gated delta, a channel": Case("gated_delta", by_channel=True),
    "gated delta, a channel, strong": Case("gated_delta", by_channel=True, decay=5.0),
}


def arguments(case: Case, sizes: Sizes) -> dict[str, Any]:
    """Return random tokens with keys of norm 1, and the gates of a rule."""
    rng = np.random.default_rng(0)
    shape = (sizes.heads, sizes.length, sizes.dim)
    made = {name: rng.standard_normal(shape) for name in ("query", "key", "value")}
    made["key"] /= np.linalg.norm(made["key"], axis=-1, keepdims=True)
    if "gated" in case.rule:
        size = shape if case.by_channel else shape[:-1]
        made["log_decay"] = -case.decay * rng.exponential(size=size)
    if "delta" in case.rule:
        made["beta"] = rng.random(shape[:-1])
    return {name: array.astype(np.float32) for name, array in made.items()}


def in_torch(given: dict[str, Any]) -> Callable[[], Any]:
    """Return the chunked formula in torch: a triangular solve for all chunks, then the states."""
    import torch

    torch.set_num_threads(1)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}

    heads, length, dim = given["key"].shape
    c = min(CHUNK, length)
    n = length // c

    def call() -> Any:
        q, k, v = (tensors[x].reshape(heads, n, c, dim) for x in ("query", "key", "value"))
        q = q * dim**-0.5
        if "log_decay" in tensors:
            a = tensors["log_decay"].reshape(heads, n, c).cumsum(-1)
            ratios = (a[..., :, None] - a[..., None, :]).tril().exp().tril()
            before, after = a.exp()[..., None], (a[..., -1:] - a).exp()[..., None]
            k_before, q_before, k_after = k * before, q * before, k * after
            total = before[..., -1:, :]
        else:
            ratios = torch.ones(c, c).tril()
            k_before, q_before, k_after, total = k, q, k, torch.ones(heads, n, 1, 1)
        scores = (q @ k.mT) * ratios
        reads, weights = v, None
        if "beta" in tensors:
            beta = tensors["beta"].reshape(heads, n, c, 1)
            lower = (beta * (k @ k.mT) * ratios).tril(-1)
            both = beta * torch.cat([v, k_before], dim=-1)
            solved = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True)
            reads, weights = solved[..., :dim], solved[..., dim:]
        state, outputs = torch.zeros(heads, dim, dim), []
        for i in range(n):
            u = reads[:, i] if weights is None else reads[:, i] - weights[:, i] @ state
            outputs.append(q_before[:, i] @ state + scores[:, i] @ u)
            state = total[:, i] * state + k_after[:, i].mT @ u
        return torch.stack(outputs, 1).reshape(heads, length, dim)

    return call


def in_jax(given: dict[str, Any]) -> Callable[[], Any]:
    """Return the loop as a scan over tokens, compiled."""
    import jax
    import jax.numpy as jnp

    heads, _, dim = given["key"].shape

    def scan(tokens: dict[str, Any]) -> Any:
        def token(state: Any, x: dict[str, Any]) -> tuple[Any, Any]:
            if "log_decay" in x:
                g = x["log_decay"]
                state = jnp.exp(g if g.ndim == 2 else g[:, None])[..., None] * state
            v = x["value"]
            if "beta" in x:
                v = x["beta"][:, None] * (v - jnp.einsum("hd,hde->he", x["key"], state))
            state = state + x["key"][..., None] * v[:, None, :]
            return state, dim**-0.5 * jnp.einsum("hd,hde->he", x["query"], state)

        swapped = {name: jnp.swapaxes(x, 0, 1) for name, x in tokens.items()}
        return jnp.swapaxes(jax.lax.scan(token, jnp.zeros((heads, dim, dim)), swapped)[1], 0, 1)

    arrays = {name: jnp.asarray(array) for name, array in given.items()}
    compiled = jax.jit(scan)
    return lambda: compiled(arrays).block_until_ready()


def timed(call: Callable[[], Any]) -> float:
    """Return seconds of one call."""
    start = process_time()
    call()
    return process_time() - start


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the times of each call, all called in turn in an order that changes."""
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name in rng.permutation(list(calls)):
            times[str(name)].append(timed(calls[str(name)]))
    return times


def ours(case: Case, given: dict[str, Any]) -> Callable[[], Any]:
    """Return the call of linattn."""
    return lambda: linattn.linear_recurrence(**given, update_rule=case.rule)


def installed(peer: str) -> bool:
    """Say whether the library of a peer is there."""
    return importlib.util.find_spec(LIBRARIES[peer]) is not None


def compare(case: Case, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Time a rule beside its peers, and a quarter of the tokens."""
    given = arguments(case, sizes)
    calls = {"linattn": ours(case, given)}
    if installed(JAX):
        calls[JAX] = in_jax(given)
    if installed(TORCH) and not case.by_channel:
        calls[TORCH] = in_torch(given)
    truth, _ = linattn.reference.recurrence(**given, update_rule=case.rule)
    for name, call in calls.items():
        error = np.max(np.abs(np.asarray(call()) - truth)) / np.max(np.abs(truth))
        if not error < TOLERANCE:
            raise AssertionError(f"{name}, {case}: off by {error:.2g}")
    short = arguments(case, sizes._replace(length=sizes.length // 4))
    times = in_turn(calls | {"a quarter": ours(case, short)}, rounds)
    mine = times["linattn"]
    growth = (math.log(a / b, 4) for a, b in zip(mine, times["a quarter"], strict=True))
    return {
        "milliseconds": {name: 1e3 * statistics.median(times[name]) for name in calls},
        "over linattn": {
            name: statistics.median(a / b for a, b in zip(times[name], mine, strict=True))
            for name in calls
            if name != "linattn"
        },
        "growth": statistics.median(growth),
    }


def decoding(sizes: Sizes, rounds: int) -> dict[str, float]:
    """Time a step after contexts of two lengths, in microseconds."""
    case = CASES["gated delta"]
    steps: dict[str, Callable[[], Any]] = {}
    for length in (sizes.length // 4, 4 * sizes.length):
        given = arguments(case, sizes._replace(length=length))
        _, state = linattn.linear_recurrence(**given, update_rule=case.rule, return_state=True)
        token = {name: array[:, 0] for name, array in given.items()}

        def step(token: Any = token, state: Any = state) -> None:
            for _ in range(100):
                linattn.recurrence_step(**token, state=state, update_rule=case.rule)

        steps[str(length)] = step
    return {name: 1e4 * statistics.median(times) for name, times in in_turn(steps, rounds).items()}


def one_process(sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Time everything once."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        rules = {name: compare(case, sizes, rounds) for name, case in CASES.items()}
        return {"rules": rules, "step, microseconds": decoding(sizes, rounds)}


def measure(sizes: Sizes, rounds: int, processes: int) -> list[dict[str, Any]]:
    """Time everything in some new processes, one after the other, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # before any library of a process counts the cores
    try:
        found = []
        for _ in range(processes):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found.append(pool.submit(one_process, sizes, rounds).result())
        return found
    finally:
        os.sched_setaffinity(0, cores)


def section(record: dict[str, Any]) -> str:
    """Return the part of the page that holds numbers."""
    found, machine = record["processes"], record["machine"]
    lines = [
        f"Measured on {machine['cpu']}, commit {machine['commit']}, {machine['date']}; medians of "
        f"{len(found)} processes with {record['rounds']} rounds each.",
        "",
        "| rule | linattn, ms | torch operations | JAX scan | JAX scan at its best | growth |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in CASES:
        rows = [each["rules"][name] for each in found]
        torch, jax = ([x for r in rows if (x := r["over linattn"].get(p))] for p in (TORCH, JAX))
        cells = [
            f"{statistics.median(row['milliseconds']['linattn'] for row in rows):.1f}",
            ratio(statistics.median, torch),
            ratio(statistics.median, jax),
            ratio(min, jax),
            f"{statistics.median(row['growth'] for row in rows):.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps = {
        length: statistics.median(each["step, microseconds"][length] for each in found)
        for length in found[0]["step, microseconds"]
    }
    said = ", ".join(f"{time:.0f} us after {int(n):,} tokens" for n, time in steps.items())
    lines += ["", f"A step of decoding took {said}."]
    missing = [peer for peer in LIBRARIES if peer in record["left out"]]
    lines += [f"Left out, not installed: {', '.join(missing)}."] if missing else []
    return "\n".join([*lines, ""])


def ratio(of: Callable[[Iterable[float]], float], ratios: list[float]) -> str:
    """Return a cell: a dash where a peer does not compute the rule or was left out."""
    return f"{of(ratios):.2f}" if ratios else "-"


def replace_section(path: Path, record: dict[str, Any]) -> None:
    """Put the numbers of a record between the marks of the page."""
    text = path.read_text(encoding="utf-8")
    before, after = text.split(START)[0], text.split(END)[1]
    path.write_text(before + START + section(record) + END + after, encoding="utf-8")


def main(given: list[str] | None = None) -> None:
    """Write a record, print the section of the page, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=7)
    default = Path(__file__).parent / "results" / "recurrences.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--from-record", action="store_true")
    options = parser.parse_args(given)
    if not options.from_record:
        sizes = Sizes(options.length, options.heads, options.dim)
        record: dict[str, Any] = {
            "machine": describe([min(os.sched_getaffinity(0))]),
            "sizes": sizes._asdict(),
            "rounds": options.rounds,
            "left out": [peer for peer in LIBRARIES if not installed(peer)],
            "processes": measure(sizes, options.rounds, options.processes),
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record = json.loads(options.out.read_text(encoding="utf-8"))
    print(section(record))
    if options.page is not None:
        replace_section(options.page, record)


if __name__ == "__main__":
    main()
