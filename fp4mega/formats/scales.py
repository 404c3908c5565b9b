"""Scale rules: from the largest magnitude of a block or scope to its scale, exactly.

Exponents come from frexp (a = m * 2^e, m in [0.5, 1)), never from a float logarithm, which is off by one near powers of two.
"""

import torch
from torch import Tensor

from fp4mega.formats.blocks import ScaleRule
from fp4mega.formats.elements import (
    E2M1,
    E4M3,
    E8M0,
    ElementFormat,
    codes_of,
    encode_e8m0,
    power_of_two,
    round_on_grid,
)

_FLOAT32 = torch.finfo(torch.float32)


def mx_scale(amax: Tensor, rule: ScaleRule) -> Tensor:
    """E8M0 bytes (uint8, amax's shape) of MXFP4 blocks with largest magnitudes `amax` (float32 or float64, >= 0).

    - `floor`: 2^(floor(log2 amax) - 2), the OCP rule; magnitudes over 6 * scale saturate.
    - `rceil`: 2^ceil(log2(amax / 6)), the smallest scale under which nothing saturates.
    - `even`: amax first rounded to E2M1's one mantissa bit, ties to even (1.75 * 2^e goes up), then `floor`.
    - `amplitude`: the power of two nearest amax, switching at 1.5 * 2^e; elements are 6 * x / scale.

    Exponents are clamped to [-127, 127]; a zero block takes byte 0; a NaN or infinite amax takes byte 255, NaN.
    """
    mantissa, exponent = torch.frexp(amax)
    if rule == "floor":
        exponent = exponent - 3
    elif rule == "rceil":
        # amax / 6 = (m / 0.75) * 2^(e - 3).
        exponent = exponent - 3 + (mantissa > 0.75).to(torch.int32)
    elif rule == "even":
        exponent = exponent - 3 + (mantissa >= 0.875).to(torch.int32)
    elif rule == "amplitude":
        exponent = exponent - 1 + (mantissa >= 0.75).to(torch.int32)
    else:
        raise ValueError(f"rule={rule!r}: allowed: floor, rceil, even, amplitude")
    codes = encode_e8m0(exponent).masked_fill_(amax == 0, 0)
    return codes.masked_fill_(~amax.isfinite(), E8M0.nan_code)


def quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device: CUDA takes a Python number's reciprocal and multiplies, which rounds twice."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def nvfp4_global_scale(amax: Tensor) -> Tensor:
    """s_enc = 448 * 6 / amax as float32, amax's shape: the scope's largest magnitude reaches 6 in a block of scale 448.

    Kept finite and positive in float32; 1 for an all-zero scope; NaN for a NaN or infinite amax, so that every value of the
    scope dequantizes to NaN.
    """
    scale = ((E4M3.max * E2M1.max) / amax).clamp_(_FLOAT32.tiny, _FLOAT32.max).to(torch.float32)
    return scale.masked_fill_(amax == 0, 1.0).masked_fill_(~amax.isfinite(), torch.nan)


def nvfp4_block_scale(block_amax: Tensor, global_scale: Tensor) -> Tensor:
    """E4M3 codes (uint8) of min(448, amax / 6 * s_enc), to nearest even. NaN where the block or its scope is not finite."""
    target = quotient(block_amax, E2M1.max).mul_(global_scale.to(block_amax.dtype))
    target.clamp_(max=E4M3.max)
    target.masked_fill_(~block_amax.isfinite(), torch.nan)
    return codes_of(round_on_grid(target, E4M3, saturate=False), E4M3)


def power_of_two_scale(amax: Tensor, element: ElementFormat) -> Tensor:
    """The largest power of two with amax * scale <= element.max, float32, amax's shape.

    A power of two, so that codes in the normal range do not depend on the scope. Exponents are kept where max / scale is
    finite and min_normal / scale is a normal float32 ([-119, 120] for E4M3, [-112, 112] for E5M2); 1 for an all-zero scope;
    NaN for a NaN or infinite amax.
    """
    mantissa, exponent = torch.frexp(amax)
    max_mantissa = element.max / 2.0 ** (element.emax + 1)
    exponent = (element.emax + 1) - exponent - (mantissa > max_mantissa).to(torch.int32)
    exponent = exponent.clamp_(element.emax - 127, 127 - element.bias)
    scale = power_of_two(exponent, torch.float32)
    return scale.masked_fill_(amax == 0, 1.0).masked_fill_(~amax.isfinite(), torch.nan)
