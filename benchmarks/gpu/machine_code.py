"""Instructions of a compiled kernel, by class and by loop, from what nvdisasm prints."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["CLASSES", "Loop", "Part", "disassemble", "parts_of"]

DISTRIBUTION = "nvidia-cuda-nvdisasm"

CLASSES = {
    "HMMA": r"HMMA",
    "LDSM": r"LDSM",
    "MUFU": r"MUFU",
    "FFMA": r"FFMA",
    "float": r"F(ADD|MUL|MNMX|SEL|SETP|SET|CHK)|F2F.*|F2FP|HADD2|PRMT",
    "LDS": r"LDS",
    "STS": r"STS",
    "LDG": r"LDG",
    "LDGSTS": r"LDGSTS",
    "STG": r"STG",
    "SHFL": r"SHFL",
    "BAR": r"BAR|WARPSYNC|DEPBAR|LDGDEPBAR",
    "branch": r"BRA|BSSY|BSYNC|CALL|RET|EXIT|BRX",
}
"""Opcodes of each class, as regular expressions; all others are "rest"."""

_LABEL = re.compile(r"^(\.L_x_\d+):")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class _Instruction(NamedTuple):
    opcode: str
    target: str | None
    may_go_on: bool
    line: str


class Part(NamedTuple):
    """Instructions that are executed together: a loop but for the loops in it, or what is in none.

    Attributes
    ----------
    counts : dict of str to int
        By class, without those that are 0, and "total".
    wavefronts : int
        Shared memory's, of a warp that goes through all of it, without conflicts of banks: an
        instruction moves 128 bytes in each.
    """

    counts: dict[str, int]
    wavefronts: int


class Loop(NamedTuple):
    """A loop: where in the source its branch stands, in how many loops it is, and its part."""

    line: str
    depth: int
    part: Part


def disassemble(cubin: bytes) -> str:
    """Return nvdisasm's text; PackageNotFoundError without the wheel."""
    (program,) = (
        Path(str(file.locate()))
        for file in importlib.metadata.files(DISTRIBUTION) or ()
        if file.name == "nvdisasm"
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-c", "-g", file.name], capture_output=True, check=True)
    return done.stdout.decode()


def parts_of(text: str) -> dict[str, tuple[Part, list[Loop]]]:
    """Return of each kernel what is in no loop, and its loops in the order of the code."""
    return {name: _parts(*_blocks(lines)) for name, lines in _sections(text)}


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    pieces = re.split(_SECTION.pattern, text, flags=re.MULTILINE)
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        yield name, body.splitlines()


def _blocks(lines: list[str]) -> tuple[list[list[_Instruction]], list[list[int]]]:
    """Cut a kernel into basic blocks; which ones follow each."""
    blocks: list[list[_Instruction]] = [[]]
    labels: dict[str, int] = {}
    where = ""
    for text in lines:
        if label := _LABEL.match(text):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif line := _LINE.match(text):
            where = f"{Path(line[1]).name}:{line[2]}"
        elif found := _INSTRUCTION.match(text):
            predicate, opcode, operands = found.groups()
            base = opcode.split(".")[0]
            target = _TARGET.search(operands) if base == "BRA" else None
            always = predicate is None and "," not in operands and opcode == "BRA"
            leaves = always or (predicate is None and base in ("EXIT", "RET"))
            blocks[-1].append(_Instruction(opcode, target and target[1], not leaves, where))
            if base in ("BRA", "EXIT", "RET"):
                blocks.append([])
    if not blocks[-1]:
        blocks.pop()
    following = []
    for number, block in enumerate(blocks):
        last = block[-1]
        goes_on = [number + 1] if last.may_go_on and number + 1 < len(blocks) else []
        jumps = [labels[last.target]] if last.target in labels else []
        following.append([*goes_on, *jumps])
    return blocks, following


def _dominators(following: list[list[int]]) -> list[set[int]]:
    """Return for each block those that all ways to it go through; none without a way."""
    before = defaultdict(list)
    for number, blocks in enumerate(following):
        for block in blocks:
            before[block].append(number)
    everything = set(range(len(following)))
    found = [{0}, *(everything for _ in following[1:])]
    changed = True
    while changed:
        changed = False
        for number in range(1, len(following)):
            ways = [found[block] for block in before[number]]
            here = set.intersection(*ways) | {number} if ways else everything
            changed = changed or here != found[number]
            found[number] = here
    return [set() if len(here) == len(everything) > 1 else here for here in found]


def _loops(following: list[list[int]]) -> dict[int, set[int]]:
    """Return the blocks of each loop by its first one: a loop's last branch goes to a dominator."""
    dominators = _dominators(following)
    before = defaultdict(list)
    for number, blocks in enumerate(following):
        for block in blocks:
            before[block].append(number)
    loops: dict[int, set[int]] = {}
    for number, blocks in enumerate(following):
        for head in blocks:
            if head in dominators[number]:
                body = loops.setdefault(head, {head})
                wanted = [number]
                while wanted:
                    block = wanted.pop()
                    if block not in body:
                        body.add(block)
                        wanted += before[block]
    return loops


def _parts(blocks: list[list[_Instruction]], following: list[list[int]]) -> tuple[Part, list[Loop]]:
    loops = _loops(following)
    # The smallest loop that a block is in has it.
    owners: dict[int, list[int]] = defaultdict(list)
    for number in range(len(blocks)):
        around = [head for head, body in loops.items() if number in body]
        owners[min(around, key=lambda head: len(loops[head]), default=-1)].append(number)

    def part(head: int) -> Part:
        return _count([i for number in owners[head] for i in blocks[number]])

    found = []
    for head, body in sorted(loops.items()):
        depth = sum(head in other for other in loops.values())
        last = blocks[max(n for n in body if head in following[n])][-1]
        found.append(Loop(last.line, depth, part(head)))
    return part(-1), found


def _count(instructions: list[_Instruction]) -> Part:
    counts: Counter[str] = Counter()
    wavefronts = 0
    for opcode, *_ in instructions:
        base, *suffixes = opcode.split(".")
        if base == "NOP":
            continue
        counts["total"] += 1
        kind = next((k for k, p in CLASSES.items() if re.fullmatch(p, base)), "rest")
        counts[kind] += 1
        if base == "LDSM":
            wavefronts += int(suffixes[-1]) if suffixes[-1].isdigit() else 1
        elif base in ("LDS", "STS", "LDGSTS"):
            wavefronts += 4 if "128" in suffixes else 2 if "64" in suffixes else 1
    return Part(dict(counts), wavefronts)
