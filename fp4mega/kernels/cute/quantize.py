"""Scales and codes of one quantization block in registers, bit for bit those of `fp4mega.formats`.

Magnitudes are handled as the bits of their float32, which are ordered as integers: numbers, then infinity, then NaN.
"""

import math

from cutlass import Float32, Int32

from fp4mega.kernels.cute import instructions as op

INFINITY = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
_MANTISSA = 0x7FFFFF
_E8M0_NAN = 255
_FLOAT32_TINY, _FLOAT32_MAX = 2.0**-126, float.fromhex("0x1.fffffep+127")


def nvfp4_global(largest: Int32) -> Float32:
    """448 * 6 / amax from the bits of amax: finite and positive; 1 for 0, NaN where amax is no number."""
    # torch divides a number by a tensor as number * (1 / tensor), two roundings.
    scale = op.multiply(op.divide(Float32(1.0), op.from_bits(largest)), Float32(448.0 * 6.0))
    scale = op.select(scale > _FLOAT32_MAX, Float32(_FLOAT32_MAX), scale)
    scale = op.select(scale < _FLOAT32_TINY, Float32(_FLOAT32_TINY), scale)
    scale = op.select(largest == 0, Float32(1.0), scale)
    return op.select(largest >= INFINITY, Float32(math.nan), scale)


def nvfp4_block(
    values: list[Float32], largest: Int32, shared: Float32
) -> tuple[list[Int32], Int32]:
    """Words of eight E2M1 codes, and the E4M3 code of the block scale, of 16 values with the largest magnitude's bits `largest`."""
    code = op.e4m3_code(op.multiply(op.divide(op.from_bits(largest), Float32(6.0)), shared))
    scale = op.e4m3_value(code)
    zero = scale == 0.0
    divisor = op.select(zero, Float32(1.0), scale)
    inverse = op.divide(Float32(1.0), divisor)
    scaled = []
    for value in values:
        # A correctly rounded quotient from a correctly rounded reciprocal (Markstein). The last sum loses the sign of a zero.
        dividend = op.multiply(value, shared)
        quotient = op.multiply(dividend, inverse)
        rest = op.fma(-quotient, divisor, dividend)
        quotient = op.fma(rest, inverse, quotient)
        sign = op.bits_of(dividend) & ~MAGNITUDE
        signed = op.from_bits((op.bits_of(quotient) & MAGNITUDE) | sign)
        # A block of scale zero has codes +0.
        scaled.append(op.select(zero, Float32(0.0), signed))
    return _pack(scaled), code


def mxfp4_rceil_block(values: list[Float32], largest: Int32) -> tuple[list[Int32], Int32]:
    """The same for 32 values under the smallest power of two that saturates nothing; the E8M0 byte."""
    exponent = _exponent(largest) - 3 + _more_than_three_quarters(largest)
    byte = _byte(exponent, largest)
    inverse = _inverse(byte)
    return _pack([op.multiply(value, inverse) for value in values]), byte


def mxfp4_amplitude_block(values: list[Float32], largest: Int32) -> tuple[list[Int32], Int32]:
    """The same under the power of two nearest the largest magnitude; codes of 6 x / scale."""
    largest_, lowered = _normalized(largest)
    at_least = op.select((largest_ & _MANTISSA) >= 0x400000, Int32(1), Int32(0))
    exponent = (largest_ >> 23) - 126 - lowered - 1 + at_least
    byte = _byte(exponent, largest)
    inverse = _inverse(byte)
    return _pack([op.multiply(op.multiply(v, inverse), Float32(6.0)) for v in values]), byte


def e4m3_power_of_two(largest: Int32) -> Float32:
    """The largest power of two with amax * scale <= 448; 1 for 0, NaN where amax is no number."""
    largest_, lowered = _normalized(largest)
    # 448 is 0.875 * 2^9: a mantissa above 0.875 needs one power less.
    above = op.select((largest_ & _MANTISSA) > 0x600000, Int32(1), Int32(0))
    exponent = 9 - ((largest_ >> 23) - 126 - lowered) - above
    exponent = op.clamp(exponent, -119, 120)
    scale = op.from_bits((exponent + 127) << 23)
    scale = op.select(largest == 0, Float32(1.0), scale)
    return op.select(largest >= INFINITY, Float32(math.nan), scale)


def _pack(values: list[Float32]) -> list[Int32]:
    return [op.pack_e2m1x8(values[i : i + 8]) for i in range(0, len(values), 8)]


def _normalized(bits: Int32) -> tuple[Int32, Int32]:
    """Bits of a normal number that is 2^24 times a subnormal one, and 24; a normal one as it is, and 0."""
    small = bits < 0x800000
    raised = op.bits_of(op.multiply(op.from_bits(bits), Float32(2.0**24)))
    return op.select(small, raised, bits), op.select(small, Int32(24), Int32(0))


def _exponent(bits: Int32) -> Int32:
    """e of m * 2^e with m in [0.5, 1), for normal numbers; below -126 for subnormal ones, where only that matters."""
    return (bits >> 23) - 126


def _more_than_three_quarters(bits: Int32) -> Int32:
    return op.select((bits & _MANTISSA) > 0x400000, Int32(1), Int32(0))


def _byte(exponent: Int32, largest: Int32) -> Int32:
    byte = op.clamp(exponent, -127, 127) + 127
    byte = op.select(largest == 0, Int32(0), byte)
    return op.select(largest >= INFINITY, Int32(_E8M0_NAN), byte)


def _inverse(byte: Int32) -> Float32:
    """2^(127 - byte); the one below the normal range written out, NaN for NaN."""
    bits = op.select(byte == 254, Int32(0x400000), (254 - byte) << 23)
    return op.from_bits(op.select(byte == _E8M0_NAN, Int32(0x7FC00000), bits))
