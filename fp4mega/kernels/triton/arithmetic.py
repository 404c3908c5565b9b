"""Device functions: rounding to E2M1, E4M3 and E5M2, their codes, and power-of-two scales, bit for bit as `fp4mega.formats`.

Everything works on the bits of float32, so it is the same on every GPU and in Triton's interpreter, whose own FP8 casts and those of
older hardware differ. Magnitudes are rounded without their sign; the sign of the input is joined to the code, so underflow keeps it.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl


@triton.jit
def bits_of(x):
    """The int32 with the bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    """The float32 with these int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_magnitude(a, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """a >= 0 to the nearest value, ties to even, of a format with that mantissa and bias; no saturation; NaN and inf become NaN.

    Adding 1.5 * 2^23 steps makes float32 itself round to whole steps.
    """
    binade = from_bits(tl.maximum(bits_of(a) & 0x7F800000, (128 - BIAS) << 23))
    magic = binade * (1.5 * 2 ** (23 - MANTISSA))
    return (a + magic) - magic


@triton.jit
def code_of(a, sign, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr):
    """uint8 code of a magnitude that is a value of the format; `sign` is the sign bit in the code's place; NaN has no sign."""
    MIN_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    below = (tl.minimum(a, MIN_NORMAL) * (2**MANTISSA / MIN_NORMAL)).to(tl.int32)
    above = bits_of(tl.maximum(a, MIN_NORMAL)) >> (23 - MANTISSA)
    code = (below + above - ((128 - BIAS) << MANTISSA)) | sign
    return tl.where(a == a, code, NAN_CODE).to(tl.uint8)


@triton.jit
def sign_for(x, BITS: tl.constexpr):
    """The sign bit of x in the place of a BITS-bit code's sign."""
    return (bits_of(x) >> (32 - BITS)) & (1 << (BITS - 1))


@triton.jit
def e2m1_code(magnitude):
    """int32 code of an E2M1 magnitude: 2^-126 times it has the code as its leading float32 bits, subnormals included."""
    return bits_of(magnitude * 1.1754943508222875e-38) >> 22


@triton.jit
def e2m1_value(code):
    """float32 of a 4-bit code (int32)."""
    return from_bits(
        bits_of(from_bits((code & 7) << 22) * 8.507059173023462e37) | ((code & 8) << 28)
    )


@triton.jit
def with_sign(magnitude, x):
    """magnitude >= 0 with the sign of x, zeros included (a subtraction from zero would lose that of zero)."""
    return from_bits(bits_of(magnitude) | (bits_of(x) & -2147483648))


@triton.jit
def e4m3_scale_value(code):
    """float32 of a non-negative E4M3 block scale (int32 code); 0x7F is NaN."""
    value = tl.where(
        code < 8, code.to(tl.float32) * 0.001953125, from_bits((code << 20) + (120 << 23))
    )
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def e8m0_value(byte):
    """float32 of an E8M0 byte (int32): 2^(byte - 127), a subnormal for byte 0, NaN for 255."""
    value = from_bits(tl.where(byte == 0, 0x00400000, byte << 23))
    return tl.where(byte == 255, float("nan"), value)


@triton.jit
def power_of_two_scale(amax, EMAX: tl.constexpr, BIAS: tl.constexpr):
    """Largest power of two with amax * scale <= 1.75 * 2^EMAX; 1 for amax = 0; NaN when amax is not finite."""
    bits = bits_of(amax)
    exponent = EMAX + 127 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, EMAX - 127), 127 - BIAS)
    scale = from_bits((exponent + 127) << 23)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def nvfp4_global(amax):
    """448 * 6 / amax kept finite and positive; 1 for amax = 0; NaN when amax is not finite. Rounded as torch does: 1 / amax first."""
    scale = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), amax) * 2688.0
    scale = tl.minimum(tl.maximum(scale, 1.1754943508222875e-38), 3.4028234663852886e38)
    bits = bits_of(amax)
    scale = tl.where(bits == 0, 1.0, scale)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def rceil_byte(amax_bits):
    """E8M0 byte of 2^ceil(log2(amax / 6)) from the bits of amax; 0 for a zero block, 255 when amax is not finite."""
    exponent = (amax_bits >> 23) - 129 + ((amax_bits & 0x7FFFFF) > 0x400000).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent, -127), 127) + 127
    byte = tl.where(amax_bits == 0, 0, byte)
    return tl.where(amax_bits >= 0x7F800000, 255, byte)
