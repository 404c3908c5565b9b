"""tcgen05.mma: reads operands as the hardware lays them out, multiplies in float32, accumulates in tensor memory.

K per instruction: f16 16, f8f6f4 and mxf8f6f4 32, mxf4 and mxf4nvf4 64. Products and sums are float32 in numpy's order, which is not
the hardware's; operands and scales are exact. Layouts (PTX ISA, "Canonical layouts", "Data path layout", "Scale factor layout"):
docs/ptx_interpreter.md.
"""

from dataclasses import dataclass

import numpy as np

from fp4mega.testing.ptx import convert
from fp4mega.testing.ptx.descriptors import InstructionDescriptor, MatrixDescriptor
from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.hazards import Access
from fp4mega.testing.ptx.machine import Cta
from fp4mega.testing.ptx.memory_ops import read_bytes
from fp4mega.testing.ptx.tensormap import SWIZZLE_SPAN, swizzle
from fp4mega.testing.ptx.types import Array

K_OF = {"f16": 16, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_ELEMENT_BITS = {"f16": 16, "f8f6f4": 8, "mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
_F8F6F4 = {0: convert.E4M3, 1: convert.E5M2, 3: convert.E2M3, 4: convert.E3M2, 5: convert.E2M1}
# Scale-vector modifier to scales per instruction.
SCALES = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}


@dataclass(frozen=True, slots=True)
class Mma:
    """One mma as issued: operands as addresses or descriptors. `a` is a tensor-memory address when `a_in_tensor`."""

    kind: str
    scales: int
    pair: bool
    d: int
    a_in_tensor: bool
    a: int
    b: int
    descriptor: int
    scale_a: int
    scale_b: int
    accumulate: bool
    op: str


def operand_addresses(
    descriptor: MatrixDescriptor, rows: int, columns: int, k_major: bool, element_bytes: int
) -> Array:
    """Shared-memory byte addresses of an operand.

    k_major: [rows, columns] with `columns` bytes of K per row. Otherwise [columns, rows * element_bytes] with `columns` K-rows.
    """
    d = descriptor
    span = SWIZZLE_SPAN[d.swizzle]
    if k_major:
        row, byte = np.arange(rows)[:, None], np.arange(columns)[None, :]
        if d.swizzle == 0:
            # Core matrices of 8 rows of 16 bytes: leading offset along K, stride offset along rows.
            return d.start + row // 8 * d.stride + row % 8 * 16 + byte // 16 * d.leading + byte % 16
        if columns > span:
            raise ProtocolError(f"{columns} bytes of K in a {span}-byte swizzle")
        return swizzle(d.start + row // 8 * d.stride + row % 8 * span + byte, d.swizzle)
    k, byte = np.arange(columns)[:, None], np.arange(rows * element_bytes)[None, :]
    if d.swizzle == 0:
        raise UnsupportedInstructionError("operand that is not K-major, without a swizzle")
    linear = d.start + byte // span * d.leading + byte % span + k // 8 * d.stride + k % 8 * span
    return swizzle(linear, d.swizzle)


def _nibbles(octets: Array) -> Array:
    out = np.empty((*octets.shape[:-1], octets.shape[-1] * 2), np.uint8)
    out[..., 0::2], out[..., 1::2] = octets & 15, octets >> 4
    return out


def values(octets: Array, kind: str, element: int) -> Array:
    """float32 [rows, K] of an operand's bytes [rows, bytes] (K-major)."""
    if kind == "f16":
        halves = np.ascontiguousarray(octets).view(np.uint16)
        if element == 0:
            return convert.f16_values(halves)
        if element == 1:
            return convert.bf16_values(halves)
        raise ProtocolError(f"kind::f16 with element type {element}")
    if kind in ("mxf4", "mxf4nvf4"):
        if element != 1:
            raise ProtocolError(f"kind::{kind} with element type {element}: only E2M1 (1) exists")
        return np.asarray(convert.E2M1.table[_nibbles(octets)])
    fmt = _F8F6F4.get(element)
    if fmt is None:
        raise ProtocolError(f"kind::{kind} with element type {element}")
    if fmt.bits < 8:
        raise UnsupportedInstructionError(
            f"kind::{kind} with {fmt.name} elements in 8-bit containers"
        )
    return np.asarray(fmt.table[octets])


def _from_shared(
    cta: Cta, bits: int, rows: int, kind: str, transposed: bool, access: Access, what: str
) -> Array:
    """Operand bytes [rows, bytes of K] out of shared memory."""
    element_bits, k = _ELEMENT_BITS[kind], K_OF[kind]
    descriptor = MatrixDescriptor.decode(bits)
    if descriptor.base_offset:
        raise UnsupportedInstructionError("matrix descriptor with a base offset")
    size = element_bits // 8
    if transposed:
        if element_bits == 4:
            raise ProtocolError(f"kind::{kind} takes K-major operands only")
        addresses = operand_addresses(descriptor, rows, k, False, size)
    else:
        addresses = operand_addresses(descriptor, rows, k * element_bits // 8, True, size)
    octets = read_bytes(cta, cta, addresses, access, what)
    if not transposed:
        return octets
    elements = np.ascontiguousarray(octets).view({1: np.uint8, 2: np.uint16}[size])
    return np.ascontiguousarray(elements.T).view(np.uint8)


def _from_tensor(cta: Cta, address: int, rows: int, kind: str, access: Access, what: str) -> Array:
    """Operand A out of tensor memory: lane = row, K packed along columns, 32 bits each, lowest element in the lowest bits."""
    column, lane = address & 0xFFFF, address >> 16
    if lane:
        raise UnsupportedInstructionError(f"{what}: operand A from tensor memory lane {lane}")
    count = K_OF[kind] * _ELEMENT_BITS[kind] // 32
    words = _read_tensor(cta, column, count, rows, access, what)
    return np.ascontiguousarray(words).view(np.uint8)


def _read_tensor(cta: Cta, column: int, count: int, rows: int, access: Access, what: str) -> Array:
    cta.tensor.check(column, count, what)
    columns = slice(column, column + count)
    if not cta.tensor.written[:rows, columns].all():
        cta.cluster.findings.add(
            "uninitialized",
            f"{what}: tensor memory columns {column}.. were never written",
            access.where,
        )
    cta.cluster.tracker.tensor_read(cta.tensor_shadow, slice(0, (rows + 31) // 32), columns, access)
    return cta.tensor.data[:rows, columns]


def scale_factors(
    cta: Cta, address: int, rows: int, scales: int, identifier: int, ue8m0: bool, access: Access
) -> Array:
    """float32 [rows, scales]: row r is in lane r % 32 (of every partition), column r // 32, one byte per scale.

    Bits 30-31 of the address and the descriptor's identifier name the first byte; both are given and must agree.
    """
    column, top = address & 0x1FF, (address >> 30) & 3
    if top not in (0, identifier):
        raise ProtocolError(f"scale factor id {identifier} in the descriptor, {top} in the address")
    if identifier + scales > 4:
        raise ProtocolError(f"scale factor id {identifier} with {scales} scales")
    row = np.arange(rows)
    count = (rows + 31) // 32
    words_all = _read_tensor(cta, column, count, 128, access, "scale factors")
    words = words_all[row % 32, row // 32]
    for partition in range(1, 4):
        if not np.array_equal(words_all[row % 32 + 32 * partition, row // 32], words):
            cta.cluster.findings.add(
                "scale-copies",
                "scale factors differ between the four lane partitions of tensor memory",
                access.where,
            )
            break
    octets = (
        np.ascontiguousarray(words)
        .view(np.uint8)
        .reshape(rows, 4)[:, identifier : identifier + scales]
    )
    return np.asarray((convert.UE8M0 if ue8m0 else convert.UE4M3)[octets])


def _scaled(elements: Array, factors: Array) -> Array:
    return elements * np.repeat(factors, elements.shape[1] // factors.shape[1], axis=1)


def execute(issuer: Cta, mma: Mma, access: Access) -> None:
    """Do one mma. With `pair` the CTA pair's two halves of A, B and D take part."""
    d = InstructionDescriptor.decode(mma.descriptor, mma.kind)
    if d.n % 8 or not 8 <= d.n <= 256:
        raise ProtocolError(f"mma with N = {d.n}")
    if d.negate_a or d.negate_b:
        raise UnsupportedInstructionError(f"{mma.op}: negated operand")
    if d.d_type != 1:
        raise UnsupportedInstructionError(f"{mma.op}: accumulator type {d.d_type} (only float32)")
    ctas = [issuer]
    if mma.pair:
        base = issuer.rank & ~1
        ctas = issuer.cluster.ctas[base : base + 2]
        if len(ctas) != 2:
            raise ProtocolError("cta_group::2 without a CTA pair")
    allowed = (128, 256) if mma.pair else (128,)
    if d.m not in allowed:
        raise UnsupportedInstructionError(f"{mma.op}: M = {d.m} (allowed here: {allowed})")
    rows = d.m // len(ctas)
    if mma.pair and rows != 128:
        raise UnsupportedInstructionError(f"{mma.op}: M = {d.m} over two CTAs")
    share = d.n // len(ctas)
    bs = [
        values(
            _from_shared(cta, mma.b, share, mma.kind, d.transpose_b, access, "operand B"),
            mma.kind,
            d.b_type,
        )
        for cta in ctas
    ]
    b = np.concatenate(bs)
    for cta in ctas:
        if mma.a_in_tensor:
            octets = _from_tensor(cta, mma.a, rows, mma.kind, access, "operand A")
        else:
            octets = _from_shared(cta, mma.a, rows, mma.kind, d.transpose_a, access, "operand A")
        a = values(octets, mma.kind, d.a_type)
        b_here = b
        if mma.scales:
            a = _scaled(
                a,
                scale_factors(
                    cta, mma.scale_a, rows, mma.scales, d.a_scale_id, d.scale_ue8m0, access
                ),
            )
            factors = scale_factors(
                cta, mma.scale_b, d.n, mma.scales, d.b_scale_id, d.scale_ue8m0, access
            )
            b_here = _scaled(b, factors)
        _accumulate(cta, mma.d, a @ b_here.T, mma.accumulate, access)


def _accumulate(cta: Cta, address: int, product: Array, accumulate: bool, access: Access) -> None:
    column, lane = address & 0xFFFF, address >> 16
    rows, n = product.shape
    if lane:
        raise UnsupportedInstructionError(f"accumulator at tensor memory lane {lane}")
    cta.tensor.check(column, n, "accumulator")
    columns = slice(column, column + n)
    cell = cta.tensor.data[:rows, columns]
    if accumulate:
        product = product + _read_tensor(cta, column, n, rows, access, "accumulator").view(
            np.float32
        )
    cta.cluster.tracker.tensor_write(
        cta.tensor_shadow, slice(0, (rows + 31) // 32), columns, access
    )
    cell[...] = np.ascontiguousarray(product, np.float32).view(np.uint32)
    cta.tensor.written[:rows, columns] = True
