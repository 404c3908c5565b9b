"""The cvt instruction: which of convert.py's functions each form means, and integer conversions.

Packed forms put operand a in the upper half of the result and b in the lower one (PTX ISA, "cvt").
"""

from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx import convert
from fp4mega.testing.ptx.arithmetic import F32, U16, U32, Dtype, Pure, flush
from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.types import DTYPES, Array, itemsize

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _unsupported(parts: tuple[str, ...]) -> UnsupportedInstructionError:
    return UnsupportedInstructionError(".".join(parts))


def _low(x: Array, bits: int) -> Array:
    return np.asarray(x) & ((1 << bits) - 1)


def conversion(parts: tuple[str, ...], operands: int) -> Pure:
    """The function of a cvt with `operands` sources. Raises UnsupportedInstructionError for forms not implemented."""
    to, source = parts[-2], parts[-1]
    modifiers = set(parts[1:-2])
    if "rs" in modifiers:
        # How the bits of rbits belong to the elements is not stated in a form that could be checked here.
        raise _unsupported(parts)
    if to.endswith("x2") and to[:-2] in convert.NARROW:
        return _to_narrow(parts, convert.NARROW[to[:-2]], source, modifiers)
    if source.endswith("x2") and source[:-2] in convert.NARROW:
        return _from_narrow(parts, convert.NARROW[source[:-2]], to, modifiers)
    if to == "ue8m0x2":
        return _to_ue8m0(parts, source, modifiers)
    if source == "ue8m0x2":
        if to != "bf16x2" or modifiers != {"rn"}:
            raise _unsupported(parts)
        return Pure(_ue8m0_to_bf16, (U16,), U32)
    if to in ("f16x2", "bf16x2") and source == "f32" and operands == 2:
        return _pack16(parts, to, modifiers)
    return _scalar(parts, to, source, modifiers)


def _to_narrow(
    parts: tuple[str, ...], fmt: convert.Narrow, source: str, modifiers: set[str]
) -> Pure:
    if not {"rn", "satfinite"} <= modifiers or modifiers - {"rn", "satfinite", "relu"}:
        raise _unsupported(parts)
    relu = "relu" in modifiers
    # E2M1 pairs share one byte; 6-bit and 8-bit codes have a byte each.
    width = 4 if fmt.bits == 4 else 8
    result: Dtype = np.uint8 if width == 4 else U16

    def join(high: Array, low: Array) -> Array:
        codes = (convert.encode(high, fmt, relu) << width) | convert.encode(low, fmt, relu)
        return codes.astype(result)

    if source == "f32":
        return Pure(join, (F32, F32), result)
    if source in ("f16x2", "bf16x2"):
        values = convert.f16_values if source == "f16x2" else convert.bf16_values
        return Pure(lambda x: join(values(x >> 16), values(_low(x, 16))), (U32,), result)
    raise _unsupported(parts)


def _from_narrow(parts: tuple[str, ...], fmt: convert.Narrow, to: str, modifiers: set[str]) -> Pure:
    if to not in ("f16x2", "bf16x2") or modifiers - {"rn", "relu"}:
        raise _unsupported(parts)
    width = 4 if fmt.bits == 4 else 8
    pack = convert.f16_bits if to == "f16x2" else convert.bf16_bits
    relu = "relu" in modifiers

    def spread(x: Array) -> Array:
        wide = np.asarray(x).astype(np.uint32)
        low, high = convert.decode(_low(wide, width), fmt), convert.decode(wide >> width, fmt)
        if relu:
            low, high = np.fmax(low, np.float32(0)), np.fmax(high, np.float32(0))
        return np.asarray(pack(low) | (pack(high) << np.uint32(16))).astype(np.uint32)

    return Pure(spread, (np.uint8 if width == 4 else U16,), U32)


def _to_ue8m0(parts: tuple[str, ...], source: str, modifiers: set[str]) -> Pure:
    if modifiers - {"rp", "rz", "satfinite"} or not modifiers & {"rp", "rz"}:
        raise _unsupported(parts)
    up = "rp" in modifiers

    def join(high: Array, low: Array) -> Array:
        return ((convert.encode_ue8m0(high, up) << 8) | convert.encode_ue8m0(low, up)).astype(
            np.uint16
        )

    if source == "f32":
        return Pure(join, (F32, F32), U16)
    if source == "bf16x2":
        return Pure(
            lambda x: join(convert.bf16_values(x >> 16), convert.bf16_values(_low(x, 16))),
            (U32,),
            U16,
        )
    raise _unsupported(parts)


def _ue8m0_to_bf16(x: Array) -> Array:
    codes = np.asarray(x).astype(np.uint32)
    low, high = convert.UE8M0[codes & 0xFF], convert.UE8M0[codes >> 8]
    return np.asarray(convert.bf16_bits(low) | (convert.bf16_bits(high) << np.uint32(16)))


def _pack16(parts: tuple[str, ...], to: str, modifiers: set[str]) -> Pure:
    if modifiers - {"rn", "relu", "satfinite"} or "rn" not in modifiers:
        raise _unsupported(parts)
    if "satfinite" in modifiers and to == "bf16x2":
        raise _unsupported(parts)
    saturate, relu = "satfinite" in modifiers, "relu" in modifiers

    def bits(x: Array) -> Array:
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0)))
        return convert.f16_bits(x, saturate) if to == "f16x2" else convert.bf16_bits(x)

    return Pure(lambda a, b: (bits(a) << np.uint32(16)) | bits(b), (F32, F32), U32)


def _to_integer(parts: tuple[str, ...], to: str, source: str, modifiers: set[str]) -> Pure:
    rounding = modifiers & set(_TO_INTEGER)
    if len(rounding) != 1 or modifiers - set(_TO_INTEGER) - {"ftz", "sat"}:
        raise _unsupported(parts)
    function = _TO_INTEGER[rounding.pop()]
    dtype = DTYPES[to]
    info = np.iinfo(np.dtype(dtype))
    ftz = "ftz" in modifiers

    def convert_to(x: Array) -> Array:
        values = function(flush(x) if ftz else x).astype(np.float64)
        # Out of range saturates, NaN is 0; the largest 64-bit integers are not float64, hence the two comparisons.
        inside = np.where(
            np.isnan(values) | (values < info.min) | (values >= float(info.max) + 1), 0, values
        )
        out = inside.astype(dtype)
        out = np.where(values < info.min, dtype(info.min), out)
        return np.where(values >= float(info.max) + 1, dtype(info.max), out)

    return Pure(_reader(convert_to, source), (DTYPES[source],), dtype)


def _reader(function: Callable[[Array], Array], source: str) -> Callable[[Array], Array]:
    """`function` on the values of a source type: bfloat16 lanes are bits."""
    return (lambda x: function(convert.bf16_values(x))) if source == "bf16" else function


def _scalar(parts: tuple[str, ...], to: str, source: str, modifiers: set[str]) -> Pure:
    known = {*_INTEGERS, "f16", "bf16", "f32", "f64"}
    if to not in known or source not in known:
        raise _unsupported(parts)
    dtype = DTYPES[to]
    if to in _INTEGERS and source in _INTEGERS:
        if modifiers - {"sat"}:
            raise _unsupported(parts)
        return _integer(to, source, "sat" in modifiers)
    if to in _INTEGERS:
        return _to_integer(parts, to, source, modifiers)
    if to == "f32" and source == "f32":
        return _round_f32(parts, modifiers)
    if modifiers - {"rn", "ftz", "sat", "relu", "satfinite"}:
        raise _unsupported(parts)
    if {"sat", "satfinite"} & modifiers:
        raise _unsupported(parts)
    ftz, relu = "ftz" in modifiers, "relu" in modifiers

    def change(x: Array) -> Array:
        y = np.asarray(x).astype(
            np.float64 if to == "f64" or source in ("f64", "s64", "u64") else np.float32
        )
        if ftz and source == "f32":
            y = flush(y)
        if relu:
            y = np.asarray(
                np.where(np.greater(y, 0), y, np.where(np.isnan(y), y, np.zeros_like(y)))
            )
        if to == "bf16":
            return convert.bf16_bits(y).astype(np.uint16)
        return y.astype(dtype)

    return Pure(_reader(change, source), (DTYPES[source],), dtype)


def _round_f32(parts: tuple[str, ...], modifiers: set[str]) -> Pure:
    rounding = modifiers & set(_TO_INTEGER)
    if modifiers - set(_TO_INTEGER) - {"ftz", "sat"} or len(rounding) > 1:
        raise _unsupported(parts)
    function = _TO_INTEGER[rounding.pop()] if rounding else np.positive
    ftz, sat = "ftz" in modifiers, "sat" in modifiers

    def change(x: Array) -> Array:
        y = function(flush(x) if ftz else x)
        return np.where(np.isnan(y), np.float32(0), np.clip(y, 0, 1)) if sat else np.asarray(y)

    return Pure(change, (F32,), F32)


def _integer(to: str, source: str, saturate: bool) -> Pure:
    dtype, info = DTYPES[to], np.iinfo(np.dtype(DTYPES[to]))

    def change(x: Array) -> Array:
        if not saturate or itemsize(dtype) > itemsize(DTYPES[source]):
            return np.asarray(x).astype(dtype)
        lanes = [min(max(int(v), info.min), info.max) for v in np.atleast_1d(x)]
        return np.array(lanes, dtype)

    return Pure(change, (DTYPES[source],), dtype)
