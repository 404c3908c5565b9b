"""What can be said of a kernel without running it: which registers each instruction reads and writes, which are live, and signals that
may overtake a tcgen05.ld.

A tcgen05.ld is asynchronous. Its registers are safe to use, since the assembler waits where one is read, but a barrier arrival between
the load and the first use (or tcgen05.wait::ld) tells others that the columns are free while they may still be read.
"""

import re
from collections.abc import Iterable

from fp4mega.testing.ptx.parser import Instruction, Kernel

_REGISTER = re.compile(r"[%\w$.]+")
# Instructions whose first operand is written; all others only read.
_WRITES_FIRST = {
    *(
        "ld",
        "ldu",
        "atom",
        "shfl",
        "elect",
        "vote",
        "redux",
        "match",
        "activemask",
        "mapa",
        "getctarank",
        "ldmatrix",
    ),
    *(
        "mov",
        "setp",
        "cvta",
        "selp",
        "cvt",
        "add",
        "sub",
        "mul",
        "mad",
        "fma",
        "max",
        "min",
        "and",
        "or",
        "xor",
        "not",
    ),
    *(
        "shl",
        "shr",
        "shf",
        "div",
        "rem",
        "neg",
        "abs",
        "ex2",
        "lg2",
        "rcp",
        "rsqrt",
        "sqrt",
        "tanh",
        "sin",
        "cos",
    ),
    *("copysign", "popc", "clz", "bfind", "bfe", "bfi", "brev", "prmt", "lop3"),
}


def _names(texts: Iterable[str]) -> list[str]:
    return [name for text in texts for name in _REGISTER.findall(text)]


def reads_and_writes(ins: Instruction, slots: dict[str, int]) -> tuple[set[int], set[int]]:
    """(registers read, registers written) of one instruction, as slots. A guarded write also reads the old value."""
    writes_first = ins.parts[0] in _WRITES_FIRST or ins.op.startswith(
        ("tcgen05.ld", "mbarrier.try_wait", "mbarrier.test_wait")
    )
    if ins.op.startswith("mbarrier.arrive") and not ins.args[0].startswith("["):
        writes_first = True
    split = 1 if writes_first and ins.args else 0
    written = {slots[n] for n in _names(ins.args[:split]) if n in slots}
    read = {slots[n] for n in _names(ins.args[split:]) if n in slots}
    if ins.guard is not None:
        read |= {slots[ins.guard]} | written
    return read, written


def successors(ins: Instruction, count: int) -> list[int]:
    """Indices of what may be executed next."""
    if ins.parts[0] in ("ret", "exit", "trap") and ins.guard is None:
        return []
    following = [ins.index + 1] if ins.index + 1 < count else []
    if ins.target is None:
        return following
    return [ins.target] if ins.guard is None else [ins.target, *following]


def live_registers(kernel: Kernel, slots: dict[str, int]) -> list[int]:
    """Per instruction, and for the end, the registers that are read later before they are written: bit masks of slots."""
    code = kernel.instructions
    live = [0] * (len(code) + 1)
    used, written = [0] * len(code), [0] * len(code)
    for ins in code:
        read, wrote = reads_and_writes(ins, slots)
        used[ins.index] = sum(1 << s for s in read)
        # A guarded write keeps what it does not overwrite.
        written[ins.index] = 0 if ins.guard is not None else sum(1 << s for s in wrote)
    changed = True
    while changed:
        changed = False
        for ins in reversed(code):
            after = 0
            for target in successors(ins, len(code)):
                after |= live[target]
            before = used[ins.index] | (after & ~written[ins.index])
            if before != live[ins.index]:
                live[ins.index] = before
                changed = True
    return live


def _releases(ins: Instruction) -> bool:
    """Whether the instruction tells other warps something."""
    if ins.op.startswith(("bar.warp", "barrier.warp")):
        return False
    return ins.op.startswith(("mbarrier.arrive", "bar.", "barrier."))


def _copies(kernel: Kernel, slots: dict[str, int]) -> list[tuple[set[int], set[int]]]:
    """(read, written) of each mov: it may cost no instruction, so it is no use of what it copies."""
    return [reads_and_writes(ins, slots) for ins in kernel.instructions if ins.parts[0] == "mov"]


def _aliases(registers: set[int], copies: list[tuple[set[int], set[int]]]) -> set[int]:
    """The registers and all that they are copied to."""
    found, size = set(registers), 0
    while size != len(found):
        size = len(found)
        for read, written in copies:
            if read & found:
                found |= written
    return found


def early_signals(kernel: Kernel, slots: dict[str, int]) -> list[tuple[Instruction, Instruction]]:
    """(tcgen05.ld, arrival) pairs with a path between them on which the load is neither used nor waited for."""
    code = kernel.instructions
    copies = _copies(kernel, slots)
    found = []
    for load in code:
        if not load.op.startswith("tcgen05.ld"):
            continue
        loaded = _aliases(reads_and_writes(load, slots)[1], copies)
        seen: set[int] = set()
        front = successors(load, len(code))
        while front:
            index = front.pop()
            if index in seen:
                continue
            seen.add(index)
            ins = code[index]
            read, _ = reads_and_writes(ins, slots)
            used = bool(read & loaded) and ins.parts[0] != "mov"
            if used or ins.op.startswith("tcgen05.wait::ld"):
                continue
            if _releases(ins):
                found.append((load, ins))
                continue
            front += successors(ins, len(code))
    return found
