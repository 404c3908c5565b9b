"""wgmma of sm_90a: products of a warpgroup with the accumulator in registers.

The four warps of a group own 16 rows of 64 each; a warp's share needs only its own rows of A, so each warp is computed by itself. Values are
computed at issue; shared memory counts as read until the group is waited for. Fragment layouts: PTX ISA, "Register fragments for wgmma".
"""

import re
from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx import convert
from fp4mega.testing.ptx.context import Context, Handler, place
from fp4mega.testing.ptx.descriptors import MatrixDescriptor
from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.hazards import Access
from fp4mega.testing.ptx.machine import Bundle, Cta
from fp4mega.testing.ptx.memory_ops import read_bytes
from fp4mega.testing.ptx.mma import operand_addresses
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import WARP, Array, braces

_LAYOUTS = {0: 0, 1: 3, 2: 2, 3: 1}
_BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}
_VALUES: dict[str, Callable[[Array], Array]] = {
    "f16": convert.f16_values,
    "bf16": convert.bf16_values,
    "e4m3": lambda codes: convert.decode(codes, convert.E4M3),
    "e5m2": lambda codes: convert.decode(codes, convert.E5M2),
}
_WORD: dict[int, type[np.generic]] = {16: np.uint16, 8: np.uint8}


def warpgroup(ins: Instruction, context: Context) -> Handler:
    """wgmma.fence, commit_group, wait_group and mma_async."""
    kind = ins.parts[1]
    if kind == "fence":
        return lambda bundle, mask: None
    if kind == "commit_group":
        return _commit
    if kind == "wait_group":
        return _wait(ins)
    if kind == "mma_async":
        return _mma(ins, context)
    raise UnsupportedInstructionError(ins.op)


def _commit(bundle: Bundle, mask: Array | None) -> None:
    tracker = bundle.cta.cluster.tracker
    for warp in bundle.warps:
        bundle.cta.queues[warp].products.append(tracker.queue_close("wgmma", bundle.cta.rank, warp))


def _wait(ins: Instruction) -> Handler:
    keep = int(ins.args[0], 0)

    def run(bundle: Bundle, mask: Array | None) -> None:
        tracker = bundle.cta.cluster.tracker
        for warp in bundle.warps:
            groups = bundle.cta.queues[warp].products
            while len(groups) > keep:
                tracker.queue_wait("wgmma", bundle.cta.rank, warp, groups.pop(0))

    return run


def _descriptor(bits: int) -> MatrixDescriptor:
    layout = _LAYOUTS[(bits >> 62) & 3]
    if (bits >> 49) & 7:
        raise UnsupportedInstructionError("matrix descriptor with a base offset")
    return MatrixDescriptor(
        start=(bits & 0x3FFF) << 4,
        leading=((bits >> 16) & 0x3FFF) << 4,
        stride=((bits >> 32) & 0x3FFF) << 4,
        base_offset=0,
        swizzle=layout,
    )


def _operand(
    cta: Cta, bits: int, rows: slice, k: int, kind: str, transposed: bool, access: Access, what: str
) -> Array:
    """float32 [rows, k] of an operand in shared memory; `rows` are those of the operand that are wanted."""
    size = _BITS[kind] // 8
    descriptor = _descriptor(bits)
    if transposed:
        addresses = operand_addresses(descriptor, rows.stop, k, False, size)[:, rows.start * size :]
    else:
        addresses = operand_addresses(descriptor, rows.stop, k * size, True, size)[rows]
    octets = read_bytes(cta, cta, addresses, access, what)
    elements = np.ascontiguousarray(octets).view(_WORD[8 * size])
    return _VALUES[kind](elements.T if transposed else elements)


def _fragment_rows(count: int) -> tuple[Array, Array]:
    """(row, column) [count, 32] in a warp's 16-row share of accumulator register i in each lane."""
    register, lane = np.arange(count)[:, None], np.arange(WARP)[None, :]
    row = lane // 4 + 8 * (register % 4 // 2)
    column = register // 4 * 8 + lane % 4 * 2 + register % 2
    return row + 0 * register, column


def _from_registers(words: Array, kind: str) -> Array:
    """float32 [16, K] of operand A out of a warp's four registers, uint32 [4, 32]."""
    per_word = 32 // _BITS[kind]
    elements = np.ascontiguousarray(words).view(_WORD[_BITS[kind]]).reshape(4, WARP, per_word)
    out = np.zeros((16, 8 * per_word), np.float32)
    lane = np.arange(WARP)
    for register in range(4):
        row = lane // 4 + 8 * (register % 2)
        column = lane % 4 * per_word + 4 * per_word * (register // 2)
        for i in range(per_word):
            out[row, column + i] = _VALUES[kind](elements[register, :, i])
    return out


def _mma(ins: Instruction, context: Context) -> Handler:
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", ins.parts[4])
    types = ins.parts[5:]
    if (
        shape is None
        or types[0] != "f32"
        or len(types) != 3
        or types[1] not in _BITS
        or types[2] not in _BITS
    ):
        raise UnsupportedInstructionError(ins.op)
    n, k = int(shape[1]), int(shape[2])
    if k * _BITS[types[1]] != 256:
        raise UnsupportedInstructionError(ins.op)
    operands = context.operands
    names = braces(ins.args[0])
    reads = [operands.read(name, np.float32) for name in names]
    writes = [operands.write(name) for name in names]
    in_registers = ins.args[1].startswith("{")
    a_reads = (
        [operands.read(name, np.uint32) for name in braces(ins.args[1])] if in_registers else []
    )
    a_bits = None if in_registers else operands.read(ins.args[1], np.uint64)
    b_bits, scale = operands.read(ins.args[2], np.uint64), operands.read(ins.args[3], np.bool_)
    flags = [int(x, 0) for x in ins.args[4:]]
    if any(f != 1 for f in flags[:2]):
        raise UnsupportedInstructionError(f"{ins.op} with a negated operand")
    transposes = [bool(f) for f in flags[2:]]
    transpose_b = transposes[-1] if transposes else False
    transpose_a = transposes[0] if len(transposes) == 2 else False
    if len(names) != n // 2:
        raise ProtocolError(f"{place(ins)}: {len(names)} accumulator registers for N = {n}")
    row, column = _fragment_rows(len(names))

    def run(bundle: Bundle, mask: Array | None) -> None:
        if mask is not None:
            raise ProtocolError(f"{place(ins)}: not all lanes of the warps are active")
        cta = bundle.cta
        old = np.stack([read(bundle) for read in reads])
        words = np.stack([read(bundle) for read in a_reads]) if in_registers else None
        descriptors_a, descriptors_b, keep = (
            a_bits(bundle) if a_bits else None,
            b_bits(bundle),
            scale(bundle),
        )
        out = np.empty_like(old)
        for i, warp in enumerate(bundle.warps):
            lanes, first = slice(WARP * i, WARP * (i + 1)), WARP * i
            access = cta.cluster.tracker.queued("wgmma", cta.rank, warp, place(ins))
            b = _operand(
                cta,
                int(descriptors_b[first]),
                slice(0, n),
                k,
                types[2],
                transpose_b,
                access,
                "operand B",
            )
            if words is not None:
                a = _from_registers(words[:, lanes], types[1])
            else:
                assert descriptors_a is not None
                share = slice(16 * (warp % 4), 16 * (warp % 4) + 16)
                a = _operand(
                    cta,
                    int(descriptors_a[first]),
                    share,
                    k,
                    types[1],
                    transpose_a,
                    access,
                    "operand A",
                )
            product = (a @ b.T)[row, column]
            out[:, lanes] = product + old[:, lanes] if keep[first] else product
        for write, values in zip(writes, out, strict=True):
            write(bundle, np.ascontiguousarray(values), None)

    return run
