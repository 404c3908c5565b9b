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

    a - 2^(23 - MANTISSA) a in float32 keeps MANTISSA + 1 bits of a, because the other term is a multiple of what is kept; subtracted, not
    added, so that a power of two is approached from the side of the finer grid. Below the smallest binade the other term is a constant.
    """
    return _keep_bits(a, tl.maximum(a, 1.5 * 2.0 ** (1 - BIAS)), MANTISSA)


@triton.jit
def _keep_bits(a, other, MANTISSA: tl.constexpr):
    """Three operations an element with the maximum before: in the kernels' loops every one shows."""
    SHIFT: tl.constexpr = 2.0 ** (23 - MANTISSA)
    return tl.fma(other, SHIFT, tl.fma(other, -SHIFT, a))


@triton.jit
def round_mxfp4(p, AXIS: tl.constexpr):
    """p >= 0, float32 [rows, columns], to MXFP4 `rceil` values in blocks of 32 along AXIS; a block with NaN gives NaN where it stood.

    The block's scale is 2^ceil(log2(largest / 6)), so nothing saturates; as `round_magnitude` with that scale for the smallest binade.
    """
    if AXIS == 1:
        blocks = tl.reshape(p, [p.shape[0], p.shape[1] // 32, 32])
    else:
        blocks = tl.reshape(p, [p.shape[0] // 32, 32, p.shape[1]])
    largest = tl.max(bits_of(blocks), axis=2 if AXIS == 1 else 1)
    # Up by one binade exactly when the mantissa is above 1.5 (6 / 4), then down by two.
    scale = tl.maximum(((largest + 0x3FFFFF) & 0x7F800000) - (2 << 23), 1 << 23)
    least = from_bits(tl.expand_dims(scale, 2 if AXIS == 1 else 1) | 0x400000)
    return tl.reshape(_keep_bits(blocks, tl.maximum(blocks, least), 1), p.shape)


@triton.jit
def round_probabilities(p, FORMAT: tl.constexpr, AXIS: tl.constexpr):
    """p >= 0, published, to the float32 values of P's format; AXIS is that of the keys."""
    if FORMAT == "e4m3":
        return round_magnitude(p, 3, 7)
    if FORMAT == "mxfp4":
        return round_mxfp4(p, AXIS)
    return p.to(tl.bfloat16).to(tl.float32)


@triton.jit
def fp8_magnitude(x, power, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """|x| times a power of two, rounded to the format; saturates where the power could not be small enough, for x beyond 2.98e38."""
    rounded = round_magnitude(tl.abs(x * power), MANTISSA, BIAS)
    return tl.minimum(rounded, 448.0 if MANTISSA == 3 else 57344.0)


@triton.jit
def fp8_code(x, power, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """int32 code that x times a power of two rounds to, saturating as `fp8_magnitude` does: all NaN when the power is.

    In integers, not by a cast: ptxas 12.8 loses the way among 8-bit pairs that are packed in two ways, as a tile that is stored straight
    and transposed is. 2^(BIAS - 127) times a value has its code as its leading float32 bits, subnormals included.
    """
    magnitude = fp8_magnitude(x, power, MANTISSA, BIAS)
    code = bits_of(magnitude * 2.0 ** (BIAS - 127)) >> (23 - MANTISSA)
    return tl.where(power == power, code | sign_for(x * power, 8), 0x7F)


@triton.jit
def natural_log(value, octaves):
    """ln(value * 2^octaves), float32, for value > 0: to about one unit in the last place even where the two cancel; NaN and inf stay."""
    # A mantissa in [sqrt(1/2), sqrt(2)) and the power of two beside it; 2^64 keeps subnormals out.
    small = value < 1.1754943508222875e-38
    bits = bits_of(tl.where(small, value * 1.8446744073709552e19, value))
    shifted = bits - 0x3F3504F3
    whole = (shifted >> 23).to(tl.float32) - tl.where(small, 64.0, 0.0)
    mantissa = from_bits((shifted & 0x7FFFFF) + 0x3F3504F3)
    # ln m = 2 artanh((m - 1) / (m + 1)).
    ratio = tl.math.div_rn(mantissa - 1.0, mantissa + 1.0)
    square = ratio * ratio
    series = 0.2222222222222222 + square * 0.18181818181818182
    series = square * (
        0.6666666666666666 + square * (0.4 + square * (0.2857142857142857 + square * series))
    )
    part = 2.0 * ratio + ratio * series
    whole = octaves + whole
    # ln 2 in two parts: the first has few bits, so its product with a whole number is exact.
    result = tl.fma(whole, 0.693145751953125, tl.fma(whole, 1.42860682030941723e-06, part))
    return tl.where(value < float("inf"), result, value)


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
    value = from_bits(code << 20) * 1.329227995784916e36
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
def amplitude_byte(amax_bits):
    """E8M0 byte of the power of two nearest amax, up from 1.5 * 2^e, from the bits of amax; 0 for a zero block, 255 when amax is not finite."""
    # Below 2^-126 the switch is at 1.5 * 2^-127.
    switch = tl.where(amax_bits < 0x00800000, 0x600000, 0x400000)
    byte = (amax_bits >> 23) + ((amax_bits & 0x7FFFFF) >= switch).to(tl.int32)
    return tl.where(amax_bits >= 0x7F800000, 255, tl.minimum(byte, 254))


@triton.jit
def rceil_byte(amax_bits):
    """E8M0 byte of 2^ceil(log2(amax / 6)) from the bits of amax; 0 for a zero block, 255 when amax is not finite."""
    # Up by one binade exactly when the mantissa is above 1.5 (6 / 4), then down by two; below 2^-126 the binade is 0 either way.
    byte = tl.maximum(((amax_bits + 0x3FFFFF) >> 23) - 2, 0)
    return tl.where(amax_bits >= 0x7F800000, 255, byte)


@triton.jit
def sixth(x, largest):
    """x / 6 correctly rounded, for x of at most `largest` and where that is below 2^-80 as well; elsewhere below 2^-100 nearly so.

    By a reciprocal and one correction, exact as long as the remainder is no subnormal: the division that holds always takes four times as many.
    """
    if largest < 8.271806125530277e-25:
        quotient = tl.math.div_rn(x, tl.full(x.shape, 6.0, tl.float32))
    else:
        rough = x * 0.16666667163372040
        quotient = tl.fma(tl.fma(rough, -6.0, x), 0.16666667163372040, rough)
    return quotient


@triton.jit
def e4m3_scale_code(scale):
    """uint8 code of a non-negative E4M3 value or NaN: 2^-120 times it has the code as its leading float32 bits."""
    code = bits_of(scale * 7.52316384526264e-37) >> 20
    return tl.where(scale == scale, code, 0x7F).to(tl.uint8)


@triton.jit
def split_reciprocal(scale):
    """1 / scale as a sum of two float32, good to 2^-43, and whether scale > 0; zeros where it is not, NaN included.

    x / scale from it, `quotient`, then is on the same side of every midpoint of E2M1 as the exact quotient, or on it: x and the midpoints'
    multiples of an E4M3 scale are float32 numbers, so a quotient that is no midpoint is farther from it than the rounding of a sum reaches.
    """
    usable = scale > 0
    inverse = tl.where(usable, 1.0 / scale, 0.0)
    return inverse, tl.fma(-inverse, scale, tl.full(scale.shape, 1.0, tl.float32)) * inverse, usable


@triton.jit
def quotient(x, inverse, rest):
    """x / scale by the results of `split_reciprocal`."""
    return tl.fma(x, inverse, x * rest)
