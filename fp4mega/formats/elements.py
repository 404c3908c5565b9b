"""Element formats: which real numbers 4 or 8 bits can be, and how any number becomes one of them.

A finite code is sign, exponent field E (bias b) and mantissa field M of m bits:

    E > 0:  (-1)^s * 2^(E - b) * (1 + M / 2^m)          E = 0:  (-1)^s * 2^(1 - b) * M / 2^m

Sources: OCP Microscaling Formats specification 1.0 (E2M1, E8M0), OCP 8-bit Floating Point specification 1.0 (E4M3, E5M2).

Rounding works on the number's own exponent: the distance between neighbouring codes at x is a power of two, so x / step is
exact, an integer rounding of it is the only rounding, and the way back is exact. This is one rule for every format,
for float32 and float64 (no double rounding). On a CPU it is also faster than a
cast to torch.float8_e4m3fn and back, several times so.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Rounding = Literal["nearest_even", "stochastic"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
_EXPONENT_MASK = {torch.float32: 0x7F80_0000, torch.float64: 0x7FF0_0000_0000_0000}


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """One element format; `max`, `min_normal`, `min_subnormal` are magnitudes, `emax` is floor(log2(max)).

    `nan_code` is what a NaN is encoded as; E2M1 has no NaN, and its hardware converters return +6.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    emax: int
    nan_code: int

    @property
    def has_nan(self) -> bool:
        """True when a code decodes to NaN."""
        return self.name != "E2M1"


E2M1 = ElementFormat("E2M1", 4, 2, 1, 1, 6.0, 1.0, 0.5, 2, 0x7)
E4M3 = ElementFormat("E4M3", 8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 8, 0x7F)
E5M2 = ElementFormat("E5M2", 8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 15, 0x7F)
E8M0 = ElementFormat("E8M0", 8, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 127, 0xFF)


def check_float(dtype: torch.dtype, what: str = "dtype") -> None:
    """Raise TypeError unless `dtype` is float64, float32, bfloat16 or float16."""
    if dtype not in _FLOATS:
        raise TypeError(f"{what}={dtype}: allowed: {', '.join(str(d) for d in _FLOATS)}")


def working(x: Tensor, what: str = "x") -> Tensor:
    """`x` in the dtype that arithmetic is done in: float64 stays, 16-bit floats become float32 (exact). No gradient.

    Raises TypeError for anything that is not float64, float32, bfloat16 or float16.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: expected a torch.Tensor, got {type(x).__name__}")
    check_float(x.dtype, f"{what}.dtype")
    x = x.detach()
    return x if x.dtype is torch.float64 else x.to(torch.float32)


def check_rounding(rounding: str, random_bits: Tensor | None, shape: torch.Size) -> None:
    """Raise ValueError or TypeError unless `rounding` is known and `random_bits` (int32, `shape`) is there exactly if needed."""
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding={rounding!r}: allowed: {', '.join(get_args(Rounding))}")
    if rounding == "nearest_even":
        if random_bits is not None:
            raise ValueError(
                "random_bits: rounding='nearest_even' uses none; pass rounding='stochastic'"
            )
        return
    if random_bits is None:
        raise ValueError(
            "random_bits=None: rounding='stochastic' needs int32 bits of x's shape (see counter_bits)"
        )
    if random_bits.dtype is not torch.int32:
        raise TypeError(f"random_bits.dtype={random_bits.dtype}: expected torch.int32")
    if random_bits.shape != shape:
        raise ValueError(
            f"random_bits.shape={tuple(random_bits.shape)}: expected x's shape {tuple(shape)}"
        )


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exact, from int32 exponents in [-127, 127]; `dtype` float32 or float64."""
    if dtype is torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(dtype)
    # 2^-127 is a float32 subnormal: its bit is in the mantissa field.
    bits = torch.where(exponent == -127, 0x0040_0000, (exponent.to(torch.int32) + 127) << 23)
    return bits.to(torch.int32).view(dtype)


def round_on_grid(
    x: Tensor,
    fmt: ElementFormat,
    unit: Tensor | None = None,
    *,
    saturate: bool = True,
    random_bits: Tensor | None = None,
) -> Tensor:
    """Round `x` (float32 or float64) to the values of `fmt` times `unit`, powers of two that broadcast to x; None is 1.

    unit * fmt.min_normal must be at least 2^-126 or unit itself 2^-127 with E2M1, so that an exponent read from the bits of a
    float32 subnormal (zero) never matters. NaN and infinity become NaN: saturation is for finite numbers only, an
    overflow must not turn into a number. `saturate=False` skips it where the unit rules it out. With `random_bits`
    (int32) the magnitude goes up with probability floor(fraction * 2^24) / 2^24, the fraction being its place between two codes.
    """
    ints = INT_OF[x.dtype]
    binade = (x.view(ints) & _EXPONENT_MASK[x.dtype]).view(x.dtype)
    lowest = fmt.min_normal if unit is None else unit * fmt.min_normal
    binade = binade.clamp_(min=lowest)
    step = binade.mul_(2.0**-fmt.mantissa_bits)
    steps = x / step
    if random_bits is None:
        rounded = steps.round_().mul_(step)
    else:
        magnitude = steps.abs()
        whole = magnitude.floor()
        # (k + 1) * 2^-24 in (0, 1]: a value on a code has fraction 0 and never moves.
        threshold = ((random_bits >> 8) & 0xFF_FFFF).add_(1).to(x.dtype).mul_(2.0**-24)
        up = (magnitude - whole) >= threshold
        rounded = (whole + up).mul_(step).copysign_(x)
    if not saturate:
        return rounded
    if unit is None:
        return rounded.clamp_(-fmt.max, fmt.max)
    largest = unit * fmt.max
    # Two one-sided clamps: the two-sided one with tensor bounds is several times slower on a CPU.
    return rounded.clamp_(min=-largest).clamp_(max=largest)


def codes_of(values: Tensor, fmt: ElementFormat) -> Tensor:
    """uint8 codes of numbers that are already values of `fmt` (or NaN), one code a byte.

    Clamps and integer arithmetic instead of selections, which are slow on a CPU.
    """
    exact = values.to(torch.float32).nan_to_num(nan=_value_at_nan_code(fmt))
    magnitude = exact.abs()
    subnormal = magnitude.clamp(max=fmt.min_normal).mul_(1.0 / fmt.min_subnormal).to(torch.int32)
    # The float32 exponent field with the leading mantissa bits below it, less the difference of the biases.
    codes = (
        magnitude.clamp_(min=fmt.min_normal)
        .view(torch.int32)
        .bitwise_right_shift_(23 - fmt.mantissa_bits)
    )
    # Both parts are 2^mantissa_bits at min_normal; below it the one counts, above it the other.
    codes.add_(subnormal).sub_((127 - fmt.bias + 1) << fmt.mantissa_bits)
    sign = (
        exact.view(torch.int32)
        .bitwise_right_shift_(32 - fmt.bits)
        .bitwise_and_(1 << (fmt.bits - 1))
    )
    return codes.bitwise_or_(sign).to(torch.uint8)


def _value_at_nan_code(fmt: ElementFormat) -> float:
    """What `fmt.nan_code` would be worth if its exponent field were an ordinary one."""
    mantissa = fmt.nan_code & ((1 << fmt.mantissa_bits) - 1)
    return (1 + mantissa / (1 << fmt.mantissa_bits)) * 2.0 ** (
        (fmt.nan_code >> fmt.mantissa_bits) - fmt.bias
    )


def _reject_e8m0(fmt: ElementFormat) -> None:
    if fmt.name == "E8M0":
        raise ValueError(
            "fmt=E8M0: a block scale follows a named scale rule, never a cast; see fp4mega.formats.scales"
        )


def round_to(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rounding: Rounding = "nearest_even",
    random_bits: Tensor | None = None,
) -> Tensor:
    """The value of `fmt` that `x` rounds to: the same numbers as decode(encode(x)), without codes.

    Any shape; float32 out (float64 for float64 input). Nearest is ties to even code; |x| > max, infinity included, becomes
    max with x's sign; underflow keeps the sign; NaN stays NaN for E4M3 and E5M2 and is +6 for E2M1.
    `rounding="stochastic"` takes int32 `random_bits` of x's shape. Raises TypeError (dtype) and ValueError (rounding, E8M0).
    """
    _reject_e8m0(fmt)
    x = working(x)
    check_rounding(rounding, random_bits, x.shape)
    saturated = x.clamp(-fmt.max, fmt.max)
    values = round_on_grid(saturated, fmt, saturate=False, random_bits=random_bits)
    return values if fmt.has_nan else values.nan_to_num_(nan=fmt.max)


def encode(
    x: Tensor,
    fmt: ElementFormat,
    *,
    rounding: Rounding = "nearest_even",
    random_bits: Tensor | None = None,
) -> Tensor:
    """uint8 codes of `x`, one a byte and x's shape (E2M1 in the low nibble). Rounds as `round_to`; same errors."""
    return codes_of(round_to(x, fmt, rounding=rounding, random_bits=random_bits), fmt)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """uint8 E8M0 bytes of 2^exponent for integer exponents, clamped to [-127, 127]; byte 255 (NaN) is never made here."""
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 `codes` (one a byte; bits above `fmt.bits` are ignored), exact in float32 and float64.

    E8M0 byte 0 is 2^-127 and byte 255 is NaN, as OCP says. Raises TypeError unless codes are uint8 and dtype a float dtype.
    """
    if codes.dtype is not torch.uint8:
        raise TypeError(f"codes.dtype={codes.dtype}: expected torch.uint8")
    check_float(dtype)
    work = dtype if dtype is torch.float64 else torch.float32
    index = codes.reshape(-1).to(torch.int32)
    if fmt.bits < 8:
        index.bitwise_and_((1 << fmt.bits) - 1)
    return _values(fmt, work, codes.device).index_select(0, index).view(codes.shape).to(dtype)


def _values(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every code's value in code order, built on the device (a table copied from the host would synchronize)."""
    code = torch.arange(1 << fmt.bits, dtype=torch.int32, device=device)
    if fmt.name == "E8M0":
        return power_of_two(code.clamp(max=254) - 127, dtype).masked_fill_(code == 255, torch.nan)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    significand = mantissa + ((exponent > 0).to(torch.int32) << fmt.mantissa_bits)
    scale = power_of_two(exponent.clamp(min=1) - (fmt.bias + fmt.mantissa_bits), dtype)
    values = significand.to(dtype) * scale
    if fmt.name == "E5M2":
        values = torch.where(
            exponent == 31, torch.where(mantissa == 0, torch.inf, torch.nan), values
        )
    elif fmt.name == "E4M3":
        values = torch.where((code & 0x7F) == 0x7F, torch.nan, values)
    return torch.where(code >= (1 << (fmt.bits - 1)), -values, values).to(dtype)
