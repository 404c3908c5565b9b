"""Instruction and shared-memory descriptors of tcgen05.mma as integers. Needs no CUTLASS.

Source: PTX ISA, "tcgen05: instruction descriptor" and "matrix descriptor". Fields are named as there.
"""

from enum import IntEnum

MAX_N = 256
_DENSE_K_BYTES = 32


class Kind(IntEnum):
    """MMA kinds that the kernels use; the value is K, the length of the reduced axis of one instruction."""

    F8F6F4 = 32
    MXF4 = 64
    MXF4NVF4 = 65
    """K is 64 too; an enum needs distinct values, see `k_of`."""


class Swizzle(IntEnum):
    """Shared-memory swizzle modes of a matrix descriptor; the value is the descriptor's code."""

    NONE = 0
    B128 = 2
    B64 = 4
    B32 = 6


def k_of(kind: Kind) -> int:
    """Length of the reduced axis of one instruction of this kind."""
    return 32 if kind is Kind.F8F6F4 else 64


def instruction_descriptor(
    kind: Kind, m: int, n: int, *, b_rows_along_n: bool = False, e8m0_scales: bool = False
) -> int:
    """The 32-bit descriptor: D in FP32, A and B E4M3 (F8F6F4) or E2M1, scale ids 0.

    `b_rows_along_n`: B is MN-major (its contiguous axis is N), which 4-bit operands cannot be. `e8m0_scales`: block scales
    are E8M0, otherwise E4M3. Raises ValueError for sizes that one CTA cannot issue.
    """
    if m != 128 or n % 16 or not 16 <= n <= MAX_N:
        raise ValueError(
            f"m={m}, n={n}: one CTA issues m=128 with n a multiple of 16 from 16 to {MAX_N}"
        )
    if kind is Kind.F8F6F4:
        d_float32, e4m3 = 1, 0
        return (
            d_float32 << 4
            | e4m3 << 7
            | e4m3 << 10
            | int(b_rows_along_n) << 16
            | (n >> 3) << 17
            | (m >> 4) << 24
        )
    if b_rows_along_n:
        raise ValueError(f"b_rows_along_n=True: 4-bit operands of {kind.name} are K-major only")
    e2m1 = 1
    return e2m1 << 7 | e2m1 << 10 | (n >> 3) << 17 | int(e8m0_scales) << 23 | (m >> 7) << 27


def shared_descriptor(swizzle: Swizzle, *, leading: int, stride: int) -> int:
    """The 64-bit matrix descriptor without its start address (bits 0-13, address / 16).

    `leading` and `stride` are byte offsets in the sense of the PTX ISA: between core matrices along the contiguous axis,
    and between groups of eight rows.
    """
    for name, value in (("leading", leading), ("stride", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise ValueError(f"{name}={value}: expected a multiple of 16 below {1 << 18}")
    version = 1
    return (leading >> 4) << 16 | (stride >> 4) << 32 | version << 46 | int(swizzle) << 61
