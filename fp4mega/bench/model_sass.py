"""Machine code of a compiled kernel: instructions with their scheduling fields, and the loop that each warp role runs for a key tile.

nvdisasm (PyPI nvidia-cuda-nvdisasm) prints the instructions; the fields are bits 105 to 125 of the 128-bit word, the same since Volta:
stall cycles, the scoreboard that a result (write) or an operand (read) releases, and those that must be free before issue.
"""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NO_SCOREBOARD = 7
_LABEL = re.compile(r"^(\.L_x_\d+):")
_FIRST = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_GUARD = re.compile(r"^@!?U?PT?\d*\s+")
_NVDISASM = "nvdisasm"
_MASK_OPS = ("FSEL", "ISETP", "R2P", "LOP3", "VIADD", "IADD3", "MOV", "SHF", "SEL")
_COLD_LENGTH = 24


@dataclass(frozen=True, slots=True)
class Instruction:
    """One SASS instruction. `write`, `read`: scoreboard or NO_SCOREBOARD; `wait`: mask of six scoreboards."""

    text: str
    stall: int
    write: int = NO_SCOREBOARD
    read: int = NO_SCOREBOARD
    wait: int = 0

    @property
    def opcode(self) -> str:
        """With modifiers, without its guard and operands."""
        return _GUARD.sub("", self.text).split()[0].rstrip(",")

    @property
    def base(self) -> str:
        """Without modifiers."""
        return self.opcode.split(".")[0]


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel in order; `labels` maps to indices."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def find_nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or where its package puts it. Raises RuntimeError naming the package when there is none."""
    found = shutil.which(_NVDISASM)
    if found:
        return found
    root = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for path in sorted(root.glob(f"*/bin/{_NVDISASM}"), reverse=True):
        return str(path)
    raise RuntimeError("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")


def disassemble(cubin: bytes) -> Listing:
    """Listing of the only kernel of a cubin. Raises RuntimeError when nvdisasm is missing or fails."""
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", "-hex", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()[:300]}")
    return parse(done.stdout)


def parse(text: str) -> Listing:
    """Read what `nvdisasm -c -hex` printed. Raises ValueError when there is no instruction in it."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    code: str | None = None
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif first := _FIRST.match(line):
            code = first[2].strip()
        elif code is not None and (second := _SECOND.match(line)):
            found.append(_decode(code, int(second[1], 16)))
            code = None
    if not found:
        raise ValueError("no instructions: expected the output of nvdisasm -c -hex")
    return Listing(tuple(found), labels)


def _decode(text: str, high: int) -> Instruction:
    return Instruction(
        text=text,
        stall=high >> 41 & 15,
        write=high >> 46 & 7,
        read=high >> 49 & 7,
        wait=high >> 52 & 63,
    )


def _target(listing: Listing, index: int) -> int | None:
    instruction = listing.instructions[index]
    if instruction.base != "BRA":
        return None
    found = _TARGET.search(instruction.text)
    return listing.labels.get(found[1]) if found else None


def loops(listing: Listing) -> Iterator[tuple[int, int]]:
    """(first, last) of every loop that computes: back edges over code with no exit and no sleeping retry in it."""
    for index in range(len(listing.instructions)):
        target = _target(listing, index)
        if target is None or target > index:
            continue
        bases = {i.base for i in listing.instructions[target : index + 1]}
        if not bases & {"EXIT", "NANOSLEEP"} and index - target > 12:
            yield target, index


ROLES = {
    "softmax": ({"LDTM", "STTM", "F2FP"}, {"STG"}),
    "correction": ({"LDTM"}, {"F2FP", "UTCBAR"}),
    "multiply": ({"UTCBAR"}, set[str]()),
    "load": ({"UTMALDG"}, {"UTCBAR"}),
}
"""What the loop of a role contains, and what it does not."""


def role_loop(listing: Listing, role: str) -> tuple[Instruction, ...]:
    """Instructions of one role for one key tile as they are executed when no row is masked and no output is rescaled.

    The last of the shortest loops with the role's instructions; blocks that only mask or rescale, where a branch jumps over them, are left
    out. Raises ValueError for an unknown role, or when the kernel has no such loop.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r}: expected one of {', '.join(ROLES)}")
    wanted, unwanted = ROLES[role]
    found = []
    for first, last in loops(listing):
        bases = {i.base for i in listing.instructions[first : last + 1]}
        if wanted <= bases and not unwanted & bases:
            found.append((last - first, -first, first, last))
    if not found:
        raise ValueError(f"role={role!r}: the kernel has no loop with {', '.join(sorted(wanted))}")
    _, _, first, last = min(found)
    return tuple(_hot(listing, first, last, role))


def _hot(listing: Listing, first: int, last: int, role: str) -> Iterator[Instruction]:
    index = first
    while index <= last:
        yield listing.instructions[index]
        target = _target(listing, index)
        if target is not None and index < target <= last:
            block = listing.instructions[index + 1 : target]
            if _is_cold(listing.instructions[index], block, role):
                index = target
                continue
        index += 1


def _is_cold(branch: Instruction, block: Sequence[Instruction], role: str) -> bool:
    """Whether a block that a branch can skip is skipped for most key tiles: masking, rescaling the output, a wait once an item."""
    if role == "multiply":
        # Where the branch is uniform. One by two predicates jumps over what only the last key tile of a CTA has not.
        bases = {i.base for i in block}
        return (
            branch.opcode == "BRA.U"
            and "SYNCS" in bases
            and not any(b.startswith("UTC") for b in bases)
        )
    if len(block) < _COLD_LENGTH:
        return False
    if role == "correction":
        return any(i.base == "STTM" for i in block)
    return sum(i.base in _MASK_OPS for i in block) > 0.8 * len(block)


def histogram(instructions: Sequence[Instruction]) -> Counter[str]:
    """How many of each opcode, modifiers dropped."""
    return Counter(i.base for i in instructions)


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread at launch, bytes of stack) of the only kernel, from the ELF section `.nv.info`.

    Raises ValueError when the bytes are no 64-bit ELF file or name no kernel.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")

    def number(at: int, size: int) -> int:
        return int.from_bytes(cubin[at : at + size], "little")

    table, entry, count, names = number(40, 8), number(58, 2), number(60, 2), number(62, 2)
    strings = number(table + names * entry + 24, 8)
    values: dict[int, int] = {}
    for i in range(count):
        header = table + i * entry
        name = strings + number(header, 4)
        if cubin[name : cubin.index(b"\0", name)] != b".nv.info":
            continue
        at = number(header + 24, 8)
        end = at + number(header + 32, 8)
        while at < end:
            form, attribute, size = cubin[at], cubin[at + 1], number(at + 2, 2)
            at += 4
            if form == 4 and attribute in (0x11, 0x2F):
                values[attribute] = max(values.get(attribute, 0), number(at + 4, 4))
            at += size if form == 4 else 0
    if 0x2F not in values:
        raise ValueError("the cubin's .nv.info names no kernel")
    return values[0x2F], values.get(0x11, 0)
