"""An independent second opinion on every format: exact rationals, explicit code lists, brute-force nearest search.

Nothing here is shared with the library. It is slow and written from the specifications' own words.
"""

from fractions import Fraction

import numpy as np

E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def float_magnitudes(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> list[float]:
    """The first `count` non-negative values of a small float format in code order."""
    values = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        assert exponent < 2**exponent_bits
        fraction = Fraction(mantissa, 2**mantissa_bits)
        value = (
            fraction * Fraction(2) ** (1 - bias)
            if exponent == 0
            else (1 + fraction) * Fraction(2) ** (exponent - bias)
        )
        values.append(float(value))
    return values


# E4M3 code 0x7F and E5M2 codes 0x7C to 0x7F are not numbers.
MAGNITUDES = {
    "E2M1": E2M1_MAGNITUDES,
    "E4M3": float_magnitudes(4, 3, 7, 127),
    "E5M2": float_magnitudes(5, 2, 15, 124),
}


def nearest_codes(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of finite float64 `x` by looking at every code: the nearest, of two equally near the even one; saturating."""
    table = np.array(MAGNITUDES[name])
    magnitude = np.minimum(np.abs(x), table[-1])[:, None]
    distance = np.abs(magnitude - table)
    even = distance[:, 0::2].argmin(1) * 2
    odd = distance[:, 1::2].argmin(1) * 2 + 1
    rows = np.arange(len(x))
    code = np.where(distance[rows, even] <= distance[rows, odd], even, odd)
    sign_bit = 8 if name == "E2M1" else 128
    return (code + np.where(np.signbit(x), sign_bit, 0)).astype(np.uint8)


def nearest_code(x: Fraction, name: str) -> int:
    """`nearest_codes` for one exact rational of known non-zero sign, in exact arithmetic."""
    table = [Fraction(v) for v in MAGNITUDES[name]]
    magnitude = min(abs(x), table[-1])
    code = min(range(len(table)), key=lambda c: (abs(table[c] - magnitude), c % 2))
    return code + ((8 if name == "E2M1" else 128) if x < 0 else 0)


def floor_log2(x: Fraction) -> int:
    """floor(log2(x)) of a positive rational, by comparing powers of two."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** guess > x:
        guess -= 1
    while Fraction(2) ** (guess + 1) <= x:
        guess += 1
    return guess


def mx_exponent(amax: Fraction, rule: str) -> int:
    """Scale exponent of an MXFP4 block by the words of its rule; amax > 0."""
    e = floor_log2(amax)
    if rule == "floor":
        exponent = e - 2
    elif rule == "rceil":
        low = floor_log2(amax / 6)
        exponent = low if Fraction(2) ** low == amax / 6 else low + 1
    elif rule == "even":
        # Candidates with one mantissa bit, the even one first at a tie.
        candidates = [
            (Fraction(2) ** e, 0),
            (Fraction(2) ** e * Fraction(3, 2), 1),
            (Fraction(2) ** (e + 1), 0),
        ]
        rounded = min(candidates, key=lambda c: (abs(c[0] - amax), c[1]))[0]
        exponent = floor_log2(rounded) - 2
    else:
        exponent = e + (amax >= Fraction(3, 2) * Fraction(2) ** e)
    return max(-127, min(127, exponent))


def mx_block(block: list[float], rule: str) -> tuple[int, list[int], list[Fraction]]:
    """(scale byte, codes, exact represented values) of one MXFP4 block of finite numbers, not all zero."""
    exact = [Fraction(v) for v in block]
    exponent = mx_exponent(max(abs(v) for v in exact), rule)
    gain = Fraction(6) if rule == "amplitude" else Fraction(1)
    scale = Fraction(2) ** exponent
    codes, values = [], []
    for given, v in zip(block, exact, strict=True):
        code = nearest_code(v * gain / scale, "E2M1")
        if v == 0 and np.signbit(given):
            code = 8
        sign = -1 if code & 8 else 1
        codes.append(code)
        values.append(sign * Fraction(E2M1_MAGNITUDES[code & 7]) * scale / gain)
    return exponent + 127, codes, values


def nvfp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, block scale codes, s_enc) of float32 blocks [N, 16] in IEEE float32 steps; finite, not all zero."""
    assert x.dtype == np.float32
    f32 = np.float32
    s_enc = f32(2688) / np.abs(x).max()
    target = np.abs(x).max(1) / f32(6) * s_enc
    scale_codes = nearest_codes(target.astype(np.float64), "E4M3")
    scale = np.array(MAGNITUDES["E4M3"], dtype=f32)[scale_codes]
    codes = np.zeros(x.shape, np.uint8)
    for i, s in enumerate(scale):
        if s > 0:
            codes[i] = nearest_codes((x[i] * s_enc / s).astype(np.float64), "E2M1")
    return codes, scale_codes, s_enc
