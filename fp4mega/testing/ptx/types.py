"""Names that every file of the interpreter shares: array alias, PTX type tables, address windows, operand texts."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WARP = 32
# One lane's undefined 32 bits: a NaN as float32, and far from any address or count as an integer.
POISON32 = 0x7FC0_DEAD
POISON = {
    1: np.uint8(0xAD),
    2: np.uint16(0x7FDE),
    4: np.uint32(POISON32),
    8: np.uint64(0x7FC0_DEAD_7FC0_DEAD),
}

# Generic addresses of spaces that are not global memory. Parameters and shared memory get windows of their own, far above
# what a host allocation can be; shared::cluster addresses carry the CTA's rank from bit 24 on, as on the hardware.
PARAM_WINDOW = 0x7F00_0000_0000_0000
SHARED_WINDOW = 0x7E00_0000_0000_0000
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
# The first kilobyte of shared memory belongs to the system.
SHARED_BASE = 1024

DTYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f32x2": np.uint64,
}
UNSIGNED: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def itemsize(dtype: type[np.generic]) -> int:
    """Bytes of one value of `dtype`."""
    return np.dtype(dtype).itemsize


def braces(text: str) -> list[str]:
    """Elements of `{a, b}`, or the operand itself as a list of one."""
    text = text.strip()
    return [part.strip() for part in text[1:-1].split(",")] if text.startswith("{") else [text]
