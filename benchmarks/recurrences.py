"""Time of recurrences beside the same formula in torch operations and a compiled scan of JAX.

    python -m benchmarks.recurrences [--rounds 9] [--out benchmarks/results/recurrences.json]

One core, float32, 8 heads, d = e = 64. Each is compared with the loop in float64 first. All are
called in turn, in an order that changes from round to round: a time is the median over rounds, a
ratio the median of the ratios within a round. Times are those of the processor, for what else runs
on the core not to count. Needs the extra ``bench``; takes a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

import linattn
from benchmarks.peers.machine import describe

HEADS, DIM, CHUNK = 8, 64, 64
LENGTHS = (1024, 2048, 4096)
RULES = {
    "gated": ("gated", False),
    "gated, a channel": ("gated", True),
    "delta": ("delta", False),
    "gated delta": ("gated_delta", False),
}
TOLERANCE = 2e-5


def arguments(rule: str, by_channel: bool, length: int) -> dict[str, Any]:
    """Return random tokens with keys of norm 1, and the gates of a rule."""
    rng = np.random.default_rng(0)
    shape = (HEADS, length, DIM)
    made = {name: rng.standard_normal(shape) for name in ("query", "key", "value")}
    made["key"] /= np.linalg.norm(made["key"], axis=-1, keepdims=True)
    if "gated" in rule:
        made["log_decay"] = -0.1 * rng.exponential(size=shape if by_channel else shape[:-1])
    if "delta" in rule:
        made["beta"] = rng.random(shape[:-1])
    return {name: array.astype(np.float32) for name, array in made.items()}


def in_torch(rule: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Return the chunked formula in torch: a triangular solve for all chunks, then the states."""
    import torch

    torch.set_num_threads(1)
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}

    def call() -> Any:
        n = tensors["key"].shape[1] // CHUNK
        q, k, v = (tensors[x].reshape(HEADS, n, CHUNK, DIM) for x in ("query", "key", "value"))
        q = q * DIM**-0.5
        if "log_decay" in tensors:
            a = tensors["log_decay"].reshape(HEADS, n, CHUNK).cumsum(-1)
            ratios = (a[..., :, None] - a[..., None, :]).tril().exp().tril()
            before, after = a.exp()[..., None], (a[..., -1:] - a).exp()[..., None]
            k_before, q_before, k_after = k * before, q * before, k * after
            total = before[..., -1:, :]
        else:
            ratios = torch.ones(CHUNK, CHUNK).tril()
            k_before, q_before, k_after, total = k, q, k, torch.ones(HEADS, n, 1, 1)
        scores = (q @ k.mT) * ratios
        reads, weights = v, None
        if "beta" in tensors:
            beta = tensors["beta"].reshape(HEADS, n, CHUNK, 1)
            lower = (beta * (k @ k.mT) * ratios).tril(-1)
            both = beta * torch.cat([v, k_before], dim=-1)
            solved = torch.linalg.solve_triangular(lower, both, upper=False, unitriangular=True)
            reads, weights = solved[..., :DIM], solved[..., DIM:]
        state, outputs = torch.zeros(HEADS, DIM, DIM), []
        for i in range(n):
            u = reads[:, i] if weights is None else reads[:, i] - weights[:, i] @ state
            outputs.append(q_before[:, i] @ state + scores[:, i] @ u)
            state = total[:, i] * state + k_after[:, i].mT @ u
        return torch.stack(outputs, 1).reshape(HEADS, n * CHUNK, DIM)

    return call


def in_jax(rule: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Return the loop as a scan over tokens, compiled."""
    import jax
    import jax.numpy as jnp

    def scan(tokens: dict[str, Any]) -> Any:
        def token(state: Any, x: dict[str, Any]) -> tuple[Any, Any]:
            if "log_decay" in x:
                g = x["log_decay"]
                state = jnp.exp(g if g.ndim == 2 else g[:, None])[..., None] * state
            v = x["value"]
            if "beta" in x:
                v = x["beta"][:, None] * (v - jnp.einsum("hd,hde->he", x["key"], state))
            state = state + x["key"][..., None] * v[:, None, :]
            return state, DIM**-0.5 * jnp.einsum("hd,hde->he", x["query"], state)

        swapped = {name: jnp.swapaxes(x, 0, 1) for name, x in tokens.items()}
        return jnp.swapaxes(jax.lax.scan(token, jnp.zeros((HEADS, DIM, DIM)), swapped)[1], 0, 1)

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


def ours(rule: str, given: dict[str, Any]) -> Callable[[], Any]:
    """Return the call of linattn."""
    return lambda: linattn.linear_recurrence(**given, update_rule=rule)


def compare(rule: str, by_channel: bool, rounds: int) -> dict[str, Any]:
    """Time a rule beside its peers and at several lengths."""
    given = arguments(rule, by_channel, LENGTHS[-1])
    calls = {"linattn": ours(rule, given), "JAX scan, jit": in_jax(rule, given)}
    if not by_channel:
        calls["torch operations"] = in_torch(rule, given)
    truth, _ = linattn.reference.recurrence(**given, update_rule=rule)
    for name, call in calls.items():
        error = np.max(np.abs(np.asarray(call()) - truth)) / np.max(np.abs(truth))
        if not error < TOLERANCE:
            message = f"{name}, {rule}: off by {error:.2g}"
            raise AssertionError(message)
    shorter = {
        f"linattn {length}": ours(rule, arguments(rule, by_channel, length))
        for length in LENGTHS[:-1]
    }
    times = in_turn(calls | shorter, rounds)
    mine = times["linattn"]
    growth = [
        math.log(long / short) / math.log(LENGTHS[-1] / LENGTHS[0])
        for long, short in zip(mine, times[f"linattn {LENGTHS[0]}"], strict=True)
    ]
    return {
        "milliseconds": {name: 1e3 * statistics.median(each) for name, each in times.items()},
        "over linattn": {
            name: statistics.median(a / b for a, b in zip(times[name], mine, strict=True))
            for name in calls
            if name != "linattn"
        },
        "growth": statistics.median(growth),
    }


def decoding(rounds: int) -> dict[str, float]:
    """Time a step after contexts of two lengths, in microseconds."""
    steps: dict[str, Callable[[], Any]] = {}
    for length in (LENGTHS[0], 4 * LENGTHS[-1]):
        given = arguments("gated_delta", False, length)
        _, state = linattn.linear_recurrence(**given, update_rule="gated_delta", return_state=True)
        token = {name: array[:, 0] for name, array in given.items()}

        def step(token: Any = token, state: Any = state) -> None:
            for _ in range(100):
                linattn.recurrence_step(**token, state=state, update_rule="gated_delta")

        steps[str(length)] = step
    return {name: 1e4 * statistics.median(times) for name, times in in_turn(steps, rounds).items()}


def main() -> None:
    """Print a table and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    default = Path(__file__).parent / "results" / "recurrences.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # before any library counts the cores
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        rules = {
            name: compare(rule, by_channel, options.rounds)
            for name, (rule, by_channel) in RULES.items()
        }
        steps = decoding(options.rounds)
    record = {"machine": describe([core]), "rules": rules, "step, microseconds": steps}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("| rule | linattn, ms | torch operations | JAX scan, jit | growth |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rules.items():
        over = row["over linattn"]
        torch = f"{over['torch operations']:.2f}" if "torch operations" in over else "-"
        print(
            f"| {name} | {row['milliseconds']['linattn']:.1f} | {torch} | "
            f"{over['JAX scan, jit']:.2f} | {row['growth']:.2f} |"
        )
    print("\n" + ", ".join(f"a step after {n} tokens: {t:.0f} us" for n, t in steps.items()))


if __name__ == "__main__":
    main()
