"""The two descriptors of tcgen05: of a matrix in shared memory and of the instruction (PTX ISA, "Tensor Core 5th generation")."""

from dataclasses import dataclass

from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError

# Layout type of a shared-memory descriptor to tensormap.swizzle's mode; the span of one swizzled row in bytes.
_SWIZZLE = {0: 0, 6: 1, 4: 2, 2: 3}


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """Start address and the byte offsets of the leading and the stride dimension; `swizzle` as in tensormap.swizzle."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> "MatrixDescriptor":
        """Read the 64 bits. Raises ProtocolError for a wrong constant field or layout."""
        if (bits >> 46) & 7 != 1:
            raise ProtocolError(
                f"matrix descriptor {bits:#x}: bits 46-48 are {(bits >> 46) & 7}, must be 1"
            )
        layout = (bits >> 61) & 7
        if layout == 1:
            raise UnsupportedInstructionError(
                "matrix descriptor: 128-byte swizzle with 32-byte atoms"
            )
        if layout not in _SWIZZLE:
            raise ProtocolError(f"matrix descriptor {bits:#x}: layout type {layout}")
        if (bits >> 52) & 1:
            raise UnsupportedInstructionError(
                "matrix descriptor: absolute leading-dimension offset"
            )
        return cls(
            start=(bits & 0x3FFF) << 4,
            leading=((bits >> 16) & 0x3FFF) << 4,
            stride=((bits >> 32) & 0x3FFF) << 4,
            base_offset=(bits >> 49) & 7,
            swizzle=_SWIZZLE[layout],
        )


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """Shape, element types and majorness of an mma; `a_type`, `b_type` as the kind numbers them; `m`, `n` of the whole operation."""

    m: int
    n: int
    a_type: int
    b_type: int
    d_type: int
    transpose_a: bool
    transpose_b: bool
    negate_a: bool
    negate_b: bool
    scale_ue8m0: bool
    a_scale_id: int
    b_scale_id: int

    @classmethod
    def decode(cls, bits: int, kind: str) -> "InstructionDescriptor":
        """Read the 32 bits for an mma of `kind` (f16, f8f6f4, mxf8f6f4, mxf4, mxf4nvf4)."""
        scaled = kind.startswith("mx")
        if bits & 7:
            raise UnsupportedInstructionError(f"instruction descriptor {bits:#x}: sparsity")
        if not scaled and bits & 8:
            raise UnsupportedInstructionError(f"instruction descriptor {bits:#x}: saturation")
        four_bit = kind in ("mxf4", "mxf4nvf4")
        if scaled:
            # N in bits 17-22, scale type in bit 23, M / 128 in bits 27-28 (mxf4 kinds) or M / 16 in bits 24-28.
            m = ((bits >> 27) & 3) * 128
            if bits >> 24 & 7:
                raise ProtocolError(
                    f"instruction descriptor {bits:#x}: reserved bits 24-26 are set"
                )
            d_type, a_id, b_id = 1, (bits >> 29) & 3, (bits >> 4) & 3
        else:
            m = ((bits >> 24) & 31) << 4
            d_type, a_id, b_id = (bits >> 4) & 3, 0, 0
        if bits >> 31:
            raise UnsupportedInstructionError(f"instruction descriptor {bits:#x}: K = 96")
        return cls(
            m=m,
            n=((bits >> 17) & 63) << 3,
            a_type=(bits >> 7) & 7,
            b_type=(bits >> 10) & (3 if four_bit else 7),
            d_type=d_type,
            transpose_a=bool(bits >> 15 & 1),
            transpose_b=bool(bits >> 16 & 1),
            negate_a=bool(bits >> 13 & 1),
            negate_b=bool(bits >> 14 & 1),
            scale_ue8m0=scaled and bool(bits >> 23 & 1),
            a_scale_id=a_id,
            b_scale_id=b_id,
        )
