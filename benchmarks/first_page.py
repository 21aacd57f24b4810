"""The two pictures of the site's first page, as SVG that fits a phone and both colour schemes.

    python -m benchmarks.first_page

Writes docs/images/first.svg, times out of a kept record of `benchmarks.peers`, and
docs/images/idea.svg.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import log

from benchmarks.peers.page import PAGE, records
from benchmarks.peers.record import Record

__all__ = ["idea", "main", "times"]

RECORD = "amd-epyc-25-17"
CURVES = (
    ("torch-exact", "torch, exact", "#e0691a"),
    ("linattn-favor", "random features", "#1f83c9"),
    ("linattn-elu", "elu + 1", "#15a077"),
)
LENGTHS = (512, 1024, 4096, 16384)
TICKS = {0.001: "1 ms", 0.01: "10 ms", 0.1: "100 ms", 1.0: "1 s"}
GREY = "#888888"
LEFT, RIGHT, TOP, BOTTOM = 80, 440, 20, 290


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="17" fill="{GREY}">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{text}</text>'


def _line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'


def _x(length: int) -> float:
    share = log(length / LENGTHS[0]) / log(LENGTHS[-1] / LENGTHS[0])
    return LEFT + (RIGHT - LEFT) * share


def _y(seconds: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * log(seconds / 0.001) / log(1000)


def times(record: Record) -> str:
    """Draw time against length, one thread, full attention."""
    parts = []
    for seconds, label in TICKS.items():
        parts.append(_line([(LEFT, _y(seconds)), (RIGHT, _y(seconds))], GREY, 0.4))
        parts.append(_text(LEFT - 10, _y(seconds) + 6, label, 'text-anchor="end"'))
    for length in LENGTHS:
        parts.append(_text(_x(length), BOTTOM + 25, f"{length:,}", 'text-anchor="middle"'))
    parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 48, "tokens", 'text-anchor="middle"'))
    for peer, label, color in CURVES:
        points = [
            (_x(item.length), _y(statistics.median(item.rounds)))
            for item in sorted(record.timings, key=lambda item: item.length)
            if (item.peer, item.kind, item.threads) == (peer, "full", 1)
        ]
        parts.append(_line(points, color, 4))
        x, y = points[-1]
        parts.append(_text(x + 10, y + 6, label, f'fill="{color}" font-weight="bold"'))
    return _svg(620, 345, "Time of one call against the number of tokens", parts)


def idea() -> str:
    """Draw the matrix of all pairs beside states that merge."""
    blue, orange = CURVES[1][2], CURVES[0][2]
    parts = [f'<rect x="30" y="50" width="190" height="190" fill="{orange}" opacity=".75"/>']
    parts.append(_text(125, 35, "exact: L x S weights", 'text-anchor="middle"'))
    parts.append(_text(125, 270, "grows with L and S", 'text-anchor="middle"'))
    for x, label in ((300, "keys 1 to n"), (400, "the rest"), (530, "all keys")):
        parts.append(f'<rect x="{x}" y="110" width="60" height="70" fill="{blue}" opacity=".85"/>')
        parts.append(_text(x + 30, 205, label, 'text-anchor="middle" font-size="14"'))
    parts.append(_text(380, 152, "+", 'text-anchor="middle" font-size="26"'))
    parts.append(_text(495, 152, "=", 'text-anchor="middle" font-size="26"'))
    parts.append(_text(445, 35, "linear: a state of m x (e + 1)", 'text-anchor="middle"'))
    parts.append(_text(445, 270, "states merge, and never grow", 'text-anchor="middle"'))
    return _svg(620, 290, "A matrix of all pairs beside states that merge", parts)


def main() -> None:
    """Write both."""
    folder = PAGE.parent / "images"
    folder.joinpath("first.svg").write_text(times(records()[RECORD]), encoding="utf-8")
    folder.joinpath("idea.svg").write_text(idea(), encoding="utf-8")


if __name__ == "__main__":
    main()
