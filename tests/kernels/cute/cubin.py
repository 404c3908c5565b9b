"""What a cubin says about its kernels, without NVIDIA's tools: registers, stack frame, shared memory.

An ELF file; every kernel's attributes lie in `.nv.info` as (format byte, attribute byte, 16-bit size, payload), and those read here
carry the symbol's number and a 32-bit value. Source: the layout that `cuobjdump --dump-elf` prints, checked against `cuobjdump -res-usage`.
"""

import struct
from dataclasses import dataclass

_SIZED = 4
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


@dataclass(frozen=True)
class Usage:
    """Registers a thread at launch, and bytes of stack: spilled registers, or arrays that registers could not hold."""

    registers: int
    stack: int


def usage(cubin: bytes) -> Usage:
    """Of the only kernel of a cubin. Raises ValueError when it is no ELF file or says nothing of a kernel."""
    found: dict[int, dict[int, int]] = {_FRAME_SIZE: {}, _REGISTERS: {}}
    payload = _section(cubin, b".nv.info")
    at = 0
    while at < len(payload):
        form, attribute, size = struct.unpack_from("<BBH", payload, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute in found:
            symbol, value = struct.unpack_from("<II", payload, at)
            found[attribute][symbol] = value
        at += size
    if not found[_REGISTERS]:
        raise ValueError("the cubin's .nv.info names no kernel")
    return Usage(max(found[_REGISTERS].values()), max(found[_FRAME_SIZE].values(), default=0))


def _section(elf: bytes, wanted: bytes) -> bytes:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * entry) for i in range(count)]
    start = headers[names][4]
    for header in headers:
        first = start + header[0]
        if elf[first : elf.index(b"\0", first)] == wanted:
            return elf[header[4] : header[4] + header[5]]
    raise ValueError(f"no section {wanted.decode()}")
