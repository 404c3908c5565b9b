"""From scores in registers to P codes: FP8 P under a running maximum, and Direct-P. One thread owns one row.

Nothing here knows of tensor memory or barriers. Scores are raw accumulators s; z = scale * s is in log2 units.
"""

import math

import cutlass
from cutlass import Float32, Int32, cute

from fp4mega.attention.policy import DirectP
from fp4mega.kernels.cute import instructions as op

MX_BLOCK = 32
_LOG2_6 = math.log2(6.0)
_PAST_SWITCH = 1.0 - math.log2(1.5)
"""floor(z + this) is the exponent of the power of two nearest 2^z, switching at 1.5."""


def row_maximum(scores: cute.Tensor, first: int, last: int) -> Float32:
    """Largest of scores[first:last]; NaN if one is NaN, as torch's amax."""
    # Four chains: one chain of dependent maxima would wait for its own latency.
    chains = [scores[first + i] for i in range(min(4, last - first))]
    for c in range(first + len(chains), last):
        i = (c - first) % len(chains)
        chains[i] = cute.arch.fmax(chains[i], scores[c], nan=True)
    largest = chains[0]
    for other in chains[1:]:
        largest = cute.arch.fmax(largest, other, nan=True)
    return largest


def raise_maximum(top: Float32, largest: Float32) -> Float32:
    """The running maximum after a tile whose largest z is `largest`: an integer in log2 units."""
    return cute.arch.fmax(top, op.ceil(largest), nan=True)


def finite(top: Float32) -> Float32:
    """`top` with 0 for a row that has seen no key, so that -inf minus it stays -inf."""
    return op.select(top == -Float32.inf, Float32(0.0), top)


def e4m3_codes(
    scores: cute.Tensor,
    first: int,
    count: int,
    scale: Float32,
    shift: Float32,
    polynomial_of_8: int,
) -> tuple[cute.Tensor, Float32]:
    """E4M3 codes of 2^(scale * s + shift) of scores[first:first + count], four to a word, and the sum before rounding.

    A sum that nobody reads costs nothing: it is not compiled.
    """
    codes = cute.make_rmem_tensor(count // 4, Int32)
    total = (Float32(0.0), Float32(0.0))
    for c in range(0, count, 4):
        p = []
        for e in range(0, 4, 2):
            at = first + c + e
            x = cute.arch.fma_packed_f32x2(
                (scores[at], scores[at + 1]), (scale, scale), (shift, shift)
            )
            # Pairs, spread evenly: both units work all the time.
            pair = at // 2
            if (pair + 1) * polynomial_of_8 // 8 > pair * polynomial_of_8 // 8:
                powers = op.exp2_polynomial(*x)
            else:
                powers = tuple(cute.math.exp2(value, fastmath=True) for value in x)
            total = cute.arch.add_packed_f32x2(total, powers)
            p += list(powers)
        codes[c // 4] = op.pack_e4m3x4(*p)
    return codes, total[0] + total[1]


def direct_p_block(
    scores: cute.Tensor, first: int, scale: Float32, reference: Float32, rule: DirectP
) -> tuple[list[Int32], Int32]:
    """E2M1 codes of one block of 32 keys (four words) and its E8M0 byte, from scores[first:first + 32].

    The byte b stands for 2^(b - 127) relative to the row reference; u = max(0, slope * x + offset) with x the score relative
    to 2^b plus log2(6), or 2^x for every `rule.exact_every`-th pair. A zero byte goes with zero codes.
    """
    largest = row_maximum(scores, first, first + MX_BLOCK) * scale - reference
    exponent = op.floor(largest + _PAST_SWITCH)
    exponent = cute.arch.fmin(cute.arch.fmax(exponent, -127.0, nan=True), 127.0, nan=True)
    if rule.floor > 0:
        lifted = cute.arch.fmax(exponent, rule.floor + 1 - 127.0, nan=True)
        exponent = op.select(largest == -Float32.inf, Float32(-127.0), lifted)
    # A zero block: every u becomes -inf, and so its codes zero.
    base = _LOG2_6 - reference - exponent
    base = op.select(exponent == -127.0, Float32(-math.inf), base)
    line_scale, line_shift = scale * rule.slope, base * rule.slope + rule.offset
    words = []
    for c in range(0, MX_BLOCK, 8):
        u = []
        for e in range(0, 8, 2):
            at = first + c + e
            pair = (scores[at], scores[at + 1])
            if rule.exact_every and (c + e) // 2 % rule.exact_every == 0:
                x = cute.arch.fma_packed_f32x2(pair, (scale, scale), (base, base))
                u += [cute.math.exp2(value, fastmath=True) for value in x]
            else:
                u += list(
                    cute.arch.fma_packed_f32x2(
                        pair, (line_scale, line_scale), (line_shift, line_shift)
                    )
                )
        words.append(op.pack_e2m1x8(u, relu=True))
    return words, _stored(exponent, rule)


def _stored(exponent: Float32, rule: DirectP) -> Int32:
    """The byte of a block: its exponent biased and lowered by the rule's floor; 255 (NaN) for a NaN exponent."""
    byte = op.to_int(exponent) + 127
    if rule.floor > 0:
        byte = cutlass.max(byte - rule.floor, 0)
    return op.select(exponent != exponent, Int32(255), byte)
