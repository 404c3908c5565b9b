"""Tensor maps as the CuTe DSL's host code builds them, and the swizzles of shared memory.

The 128 bytes are opaque in the CUDA documentation. The field positions here were found by building maps of known shape with the DSL
(docs/ptx_interpreter.md lists them); a map with bits outside of the understood fields is refused.
"""

import struct
from dataclasses import dataclass

import numpy as np

from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.types import Array

# Element type code to bits.
_BITS = {0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 64, 9: 16, 10: 16, 11: 4, 12: 4}
# Swizzle modes: number of 16-byte-chunk bits that are exchanged; the span is 16 << bits bytes.
SWIZZLE_SPAN = {0: 16, 1: 32, 2: 64, 3: 128}


def swizzle(addresses: Array, mode: int) -> Array:
    """Byte addresses under swizzle `mode` (0 none, 1 32 B, 2 64 B, 3 128 B): bits 7.. are xored onto bits 4.. ."""
    if mode == 0:
        return addresses
    return np.asarray(addresses ^ (((addresses >> 7) & ((1 << mode) - 1)) << 4))


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tiled tensor map: sizes and boxes in elements, innermost first; strides in bytes (the innermost is implied)."""

    base: int
    rank: int
    type_code: int
    bits: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    flags: int

    @classmethod
    def decode(cls, raw: bytes) -> "TensorMap":
        """Read a map. Raises UnsupportedInstructionError for an element type that is not known."""
        words = struct.unpack("<16I", raw[:64])
        flags = words[2]
        rank = ((flags >> 4) & 7) + 1
        type_code = (flags >> 7) & 15
        if type_code not in _BITS:
            raise UnsupportedInstructionError(f"tensor map element type {type_code}")
        if rank > 5:
            raise ProtocolError(f"tensor map of rank {rank}")
        boxes = struct.pack("<3I", *words[13:16])
        box = [boxes[3] + 1] + [b + 1 for b in boxes[4:8]]
        return cls(
            base=words[0] | (words[1] << 32),
            rank=rank,
            type_code=type_code,
            bits=_BITS[type_code],
            swizzle=(flags >> 13) & 3,
            sizes=tuple(size + 1 for size in words[8 : 8 + rank]),
            strides=(0, *(stride << 4 for stride in words[3:7]))[:rank],
            box=tuple(box[:rank]),
            flags=flags,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of the innermost box row in shared memory."""
        return self.box[0] * self.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of the whole box: what a load adds to the transaction count, filled elements included."""
        return self.row_bytes * int(np.prod(self.box[1:], dtype=np.int64))

    def rows(self, coordinates: list[int]) -> tuple[Array, Array]:
        """(global byte address of each box row's start of the tensor, whether the row is inside), in shared-memory order."""
        count = int(np.prod(self.box[1:], dtype=np.int64))
        index = np.arange(count)
        address = np.full(count, self.base, np.int64)
        inside = np.ones(count, np.bool_)
        for dim in range(1, self.rank):
            place = coordinates[dim] + index % self.box[dim]
            index = index // self.box[dim]
            inside &= (place >= 0) & (place < self.sizes[dim])
            address += place * self.strides[dim]
        return address, inside

    def columns(self, coordinates: list[int]) -> tuple[int, int]:
        """(first byte, end byte) of a box row that lie inside the tensor."""
        low = max(0, -coordinates[0])
        high = max(low, min(self.box[0], self.sizes[0] - coordinates[0]))
        return low * self.bits // 8, high * self.bits // 8

    def shared_addresses(self, start: int) -> Array:
        """Byte addresses [rows, row bytes] of the box at shared-memory offset `start`."""
        count = self.box_bytes // self.row_bytes
        linear = start + np.arange(count)[:, None] * self.row_bytes + np.arange(self.row_bytes)
        return swizzle(linear, self.swizzle)
