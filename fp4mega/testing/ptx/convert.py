"""Conversions between float32 (and 16-bit floats) and the narrow formats, as the cvt instruction does them.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt", "Alternate Floating-Point Data Formats". The code is independent of
fp4mega.formats (a sorted table of all values instead of exponent arithmetic), so that a test can hold one against the other.
NaN gives the canonical NaN of the format, or the largest positive value where there is none (E2M1, E2M3, E3M2).
"""

from dataclasses import dataclass

import numpy as np

from fp4mega.testing.ptx.types import Array


@dataclass(frozen=True)
class Narrow:
    """A narrow float format: decode table by code, and the finite magnitudes by code."""

    name: str
    bits: int
    table: Array
    magnitudes: Array
    nan_code: int

    @property
    def sign_bit(self) -> int:
        """Position of the sign."""
        return self.bits - 1


def _format(name: str, exponent: int, mantissa: int, bias: int, specials: str) -> Narrow:
    bits = 1 + exponent + mantissa
    half = 1 << (bits - 1)
    values = np.empty(half)
    for code in range(half):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        if e == 0:
            values[code] = m * 2.0 ** (1 - bias - mantissa)
        else:
            values[code] = (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
    finite, nan_code = half, half - 1
    if specials == "nan":
        values[half - 1] = np.nan
        finite = half - 1
    elif specials == "ieee":
        first = ((1 << exponent) - 1) << mantissa
        values[first] = np.inf
        values[first + 1 :] = np.nan
        finite = first
    table = np.concatenate([values, -values]).astype(np.float32)
    return Narrow(name, bits, table, values[:finite], nan_code)


E2M1 = _format("e2m1", 2, 1, 1, "none")
E2M3 = _format("e2m3", 2, 3, 1, "none")
E3M2 = _format("e3m2", 3, 2, 3, "none")
E4M3 = _format("e4m3", 4, 3, 7, "nan")
E5M2 = _format("e5m2", 5, 2, 15, "ieee")
NARROW = {f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2)}

UE8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)
# Scales of NVFP4: E4M3 whose sign bit is ignored.
UE4M3 = np.abs(E4M3.table)


def encode(x: Array, fmt: Narrow, relu: bool = False) -> Array:
    """Round to nearest even and saturate to the largest finite value (.rn.satfinite); codes as uint32."""
    values = x.astype(np.float64)
    if relu:
        values = np.where(values > 0, values, np.where(np.isnan(values), values, 0.0))
    magnitudes = fmt.magnitudes
    a = np.minimum(np.abs(values), magnitudes[-1])
    high = np.searchsorted(magnitudes, a, side="left").clip(0, len(magnitudes) - 1)
    low = (high - 1).clip(0)
    below, above = a - magnitudes[low], magnitudes[high] - a
    code = np.where(below < above, low, np.where(above < below, high, np.where(low & 1, high, low)))
    code = code | (np.signbit(values).astype(np.int64) << fmt.sign_bit)
    return np.where(np.isnan(values), fmt.nan_code, code).astype(np.uint32)


def decode(code: Array, fmt: Narrow) -> Array:
    """float32 values of codes; bits above the format's width are ignored."""
    return np.asarray(fmt.table[code & ((1 << fmt.bits) - 1)])


def encode_ue8m0(x: Array, up: bool) -> Array:
    """A power of two at or next above |x| (.rp) or at or next below (.rz), code = exponent + 127; NaN and beyond give 0xFF or saturate.

    2^-127 is the smallest value, 2^127 the largest: .rp of anything above it, and infinity, is the NaN code without
    .satfinite, so callers pass only finite values; this function saturates finite overflow to 254.
    """
    bits = np.ascontiguousarray(np.abs(x.astype(np.float32))).view(np.uint32).astype(np.int64)
    exponent, mantissa = bits >> 23, bits & 0x7F_FFFF
    # Subnormals: 2^-127 has exponent field 0 and mantissa 0x400000.
    code = exponent + (mantissa != 0) if up else exponent
    subnormal = exponent == 0
    above = mantissa > 0x40_0000
    code = np.where(subnormal, np.where(above, 1, 0) if up else 0, code)
    code = np.minimum(code, 254)
    return np.where(np.isnan(x), 255, code).astype(np.uint32)


def bf16_bits(x: Array) -> Array:
    """bfloat16 bits (uint32) of float32 values, round to nearest even, canonical NaN 0x7FFF."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(
        16
    )
    nan = np.isnan(x)
    return np.where(nan, np.uint32(0x7FFF), rounded) if nan.any() else rounded


def bf16_values(bits: Array) -> Array:
    """float32 values of bfloat16 bits in the low half of each element."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def f16_bits(x: Array, saturate: bool = False) -> Array:
    """float16 bits (uint32) of float32 values, round to nearest even."""
    if saturate:
        x = np.clip(x, -65504.0, 65504.0)
    bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), bits)


def f16_values(bits: Array) -> Array:
    """float32 values of float16 bits in the low half of each element."""
    return np.asarray(bits.astype(np.uint16).view(np.float16).astype(np.float32))
