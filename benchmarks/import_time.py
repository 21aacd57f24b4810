"""What importing linattn, and its first function, costs beside ``import numpy``.

Each statement runs in a fresh interpreter and is timed inside it. They take turns, and their order
changes every round, so a busy machine slows all alike. Run it with::

    python benchmarks/import_time.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

STATEMENTS = (
    "import numpy",
    "import numpy, linattn",
    "from linattn import linear_attention",
)


def import_seconds(statement: str) -> float:
    """Return the seconds that ``statement`` takes in an interpreter of its own."""
    program = (
        "from time import perf_counter\n"
        "start = perf_counter()\n"
        f"{statement}\n"
        "print(perf_counter() - start)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return float(finished.stdout)


def main() -> None:
    """Print the medians, and their ratios to the first."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for statement in STATEMENTS:
        import_seconds(statement)  # the first import may compile bytecode and read a cold disk
    seconds: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for turn in range(rounds):
        for statement in STATEMENTS if turn % 2 == 0 else reversed(STATEMENTS):
            seconds[statement].append(import_seconds(statement))
    medians = {statement: statistics.median(times) for statement, times in seconds.items()}
    base = medians[STATEMENTS[0]]
    for statement, median in medians.items():
        print(f"{statement:<38} {1e3 * median:7.1f} ms  {median / base:5.2f} times")


if __name__ == "__main__":
    main()
