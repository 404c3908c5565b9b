"""Instructions that only compute: from lanes of registers to lanes of registers, no memory, no other lanes.

Each entry maps an instruction's dotted parts to `Pure`: a numpy function with the dtypes of its operands. Numerics: .rn is IEEE float32
as numpy has it; fma is one rounding (through float64, whose product of two float32 is exact; the sum then rounds twice in rare
double-rounding cases, at most one unit in the last place of float64 before the final rounding); .approx functions are correctly
rounded or close to it, where the hardware promises about 2^-22 relative. `.ftz` flushes inputs and results.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp4mega.testing.ptx import convert
from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.types import DTYPES, Array, itemsize

Function = Callable[..., Array]
Dtype = type[np.generic]
PRED: Dtype = np.bool_


class F32x2(np.generic):
    """Marks a 64-bit operand read as two float32 per lane: a flat float32 array of twice the lanes."""


F32: Dtype = np.float32
U16: Dtype = np.uint16
U32: Dtype = np.uint32


@dataclass(frozen=True, slots=True)
class Pure:
    """`function(*operands)` gives the destination's lanes; `sources` are the dtypes the operands are read as."""

    function: Function
    sources: tuple[Dtype, ...]
    result: Dtype


_TINY = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Subnormal float32 to zero of the same sign."""
    return np.asarray(x * (np.abs(x) >= _TINY))


def _down(exact: Array) -> Array:
    """float64 to float32, round towards minus infinity."""
    near = exact.astype(np.float32)
    return np.where(near.astype(np.float64) > exact, np.nextafter(near, np.float32(-np.inf)), near)


def _up(exact: Array) -> Array:
    near = exact.astype(np.float32)
    return np.where(near.astype(np.float64) < exact, np.nextafter(near, np.float32(np.inf)), near)


def _zero(exact: Array) -> Array:
    return np.where(exact >= 0, _down(exact), _up(exact))


_DIRECTED: dict[str, Function] = {"rm": _down, "rp": _up, "rz": _zero}


def _fma(a: Array, b: Array, c: Array) -> Array:
    product = np.multiply(a, b, dtype=np.float64)
    return np.add(product, c, out=product if product.shape else None).astype(np.float32)


def _unsupported(parts: tuple[str, ...]) -> UnsupportedInstructionError:
    return UnsupportedInstructionError(".".join(parts))


def _float_function(parts: tuple[str, ...], exact: Function, wide: Function) -> Function:
    """`exact` in float32, or `wide` in float64 with a directed rounding; `.sat` and `.ftz` are applied around it."""
    allowed = {"rn", "rm", "rp", "rz", "ftz", "sat", "f32", "f32x2"}
    if not set(parts[1:]) <= allowed:
        raise _unsupported(parts)
    function = exact
    for name, rounding in _DIRECTED.items():
        if name in parts:
            function = _rounded(wide, rounding)
    if "ftz" in parts:
        function = _flushed(function)
    if "sat" in parts:
        function = _saturated(function)
    return function


def _rounded(wide: Function, rounding: Function) -> Function:
    return lambda *x: rounding(wide(*(np.asarray(v, np.float64) for v in x)))


def _flushed(function: Function) -> Function:
    return lambda *x: flush(function(*(flush(v) for v in x)))


def _saturated(function: Function) -> Function:
    def saturate(*x: Array) -> Array:
        y = function(*x)
        return np.where(np.isnan(y), np.float32(0), np.clip(y, np.float32(0), np.float32(1)))

    return saturate


def _binary(parts: tuple[str, ...], function: Function) -> Pure:
    kind = parts[-1]
    dtype = DTYPES.get(kind)
    if dtype is None or kind in ("f64",):
        raise _unsupported(parts)
    if kind in ("f32", "f32x2"):
        dtype = F32 if kind == "f32" else F32x2
        return Pure(_float_function(parts, function, function), (dtype, dtype), dtype)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(parts, function, 2)
    if len(parts) > 2 and set(parts[1:-1]) - {"lo"}:
        raise _unsupported(parts)
    return Pure(function, (dtype, dtype), dtype)


def _unpack_half(x: Array, kind: str) -> Array:
    halves = np.ascontiguousarray(np.atleast_1d(x)).view(np.uint16)
    return convert.bf16_values(halves) if kind.startswith("bf16") else convert.f16_values(halves)


def _half(parts: tuple[str, ...], function: Function, operands: int) -> Pure:
    """16-bit float arithmetic: in float32 with one rounding (exact sums and products of two 16-bit values fit)."""
    kind = parts[-1]
    if not set(parts[1:-1]) <= {"rn", "ftz", "NaN", "relu"}:
        raise _unsupported(parts)
    pack = convert.bf16_bits if kind.startswith("bf16") else convert.f16_bits
    dtype = U32 if kind.endswith("x2") else U16
    relu = "relu" in parts

    def half(*x: Array) -> Array:
        y = function(*(_unpack_half(v, kind) for v in x))
        if relu:
            y = np.where(y > 0, y, np.where(np.isnan(y), y, np.float32(0)))
        bits = pack(y.astype(np.float32)).astype(np.uint16)
        return np.ascontiguousarray(bits).view(dtype)

    return Pure(half, (dtype,) * operands, dtype)


def _mul(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in ("f32", "f32x2", "f16", "bf16", "f16x2", "bf16x2"):
        return _binary(parts, np.multiply)
    dtype = DTYPES[kind]
    size = itemsize(dtype)
    if parts[1] == "wide":
        wide = DTYPES[f"{kind[0]}{16 * size}"]
        return Pure(lambda a, b: np.multiply(a, b, dtype=wide), (dtype, dtype), wide)
    if parts[1] == "hi" and size == 4:
        wide = DTYPES[f"{kind[0]}64"]
        return Pure(
            lambda a, b: (np.multiply(a, b, dtype=wide) >> wide(32)).astype(dtype),
            (dtype, dtype),
            dtype,
        )
    if parts[1] == "hi" and size == 8:
        return Pure(lambda a, b: _mulhi64(a, b, dtype), (dtype, dtype), dtype)
    if parts[1] != "lo":
        raise _unsupported(parts)
    return Pure(np.multiply, (dtype, dtype), dtype)


def _mulhi64(a: Array, b: Array, dtype: Dtype) -> Array:
    lanes = np.broadcast(a, b)
    bits = (1 << 64) - 1
    high = [((int(x) * int(y)) >> 64) & bits for x, y in lanes]
    return np.array(high, np.uint64).reshape(lanes.shape).view(dtype)


def _mad(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    dtype = DTYPES[kind]
    if parts[1] == "wide":
        wide = DTYPES[f"{kind[0]}{16 * itemsize(dtype)}"]
        return Pure(lambda a, b, c: np.multiply(a, b, dtype=wide) + c, (dtype, dtype, wide), wide)
    if parts[1] != "lo" or kind[0] == "f":
        raise _unsupported(parts)
    return Pure(lambda a, b, c: a * b + c, (dtype, dtype, dtype), dtype)


def _fma_pure(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(parts, _fma, 3)
    if kind not in ("f32", "f32x2"):
        raise _unsupported(parts)
    dtype = F32 if kind == "f32" else F32x2
    wide = lambda a, b, c: a * b + c  # noqa: E731
    return Pure(_float_function(parts, _fma, wide), (dtype,) * 3, dtype)


def _extremum(parts: tuple[str, ...], largest: bool) -> Pure:
    kind = parts[-1]
    dtype = DTYPES[kind]
    if kind[0] in "su":
        if len(parts) > 2:
            raise _unsupported(parts)
        return Pure(np.maximum if largest else np.minimum, (dtype, dtype), dtype)
    if not set(parts[1:-1]) <= {"ftz", "NaN", "xorsign", "abs"} or "xorsign" in parts:
        raise _unsupported(parts)
    propagate = "NaN" in parts
    function: Function = (
        (np.maximum if propagate else np.fmax)
        if largest
        else (np.minimum if propagate else np.fmin)
    )
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _half(parts, function, 2)
    if kind != "f32":
        raise _unsupported(parts)
    if "ftz" in parts:
        function = _flushed(function)
    if "abs" in parts:
        plain = function
        function = lambda *x: plain(*(np.abs(v) for v in x))  # noqa: E731
    return Pure(function, (F32, F32), F32)


def three_input(pure: Pure) -> Pure:
    """max and min of three float32 (sm_100 and later): the two-input function twice."""
    f = pure.function
    return Pure(lambda a, b, c: f(f(a, b), c), pure.sources + pure.sources[:1], pure.result)


def _logic(parts: tuple[str, ...], function: Function) -> Pure:
    dtype = PRED if parts[-1] == "pred" else DTYPES[parts[-1]]
    return Pure(function, (dtype, dtype), dtype)


def _shift(parts: tuple[str, ...], left: bool) -> Pure:
    dtype = DTYPES[parts[-1]]
    bits = itemsize(dtype) * 8
    signed = parts[-1][0] == "s"

    def shift(x: Array, amount: Array) -> Array:
        capped = np.minimum(amount, np.uint32(bits - 1)).astype(dtype)
        y = np.left_shift(x, capped) if left else np.right_shift(x, capped)
        return y if signed and not left else np.where(np.asarray(amount) >= bits, dtype(0), y)

    return Pure(shift, (dtype, U32), dtype)


def _funnel(parts: tuple[str, ...]) -> Pure:
    if parts[1] not in ("l", "r") or parts[2] not in ("wrap", "clamp"):
        raise _unsupported(parts)
    left, clamp = parts[1] == "l", parts[2] == "clamp"

    def funnel(low: Array, high: Array, amount: Array) -> Array:
        both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(
            np.uint64
        )
        n = np.minimum(amount, np.uint32(32)) if clamp else np.asarray(amount) & np.uint32(31)
        n = n.astype(np.uint64)
        moved = (both << n) >> np.uint64(32) if left else both >> n
        return moved.astype(np.uint32)

    return Pure(funnel, (U32, U32, U32), U32)


def _divide(parts: tuple[str, ...], remainder: bool) -> Pure:
    kind = parts[-1]
    dtype = DTYPES[kind]
    if kind == "f32" and not remainder and set(parts[1:-1]) & {"rn", "full", "approx"}:
        function: Function = np.divide
        return Pure(_flushed(function) if "ftz" in parts else function, (F32, F32), F32)
    if kind[0] not in "su":
        raise _unsupported(parts)

    def divide(a: Array, b: Array) -> Array:
        # Division by zero gives an unspecified value; all bits set is what the hardware's sequences give.
        zero = np.equal(b, 0)
        safe = np.where(zero, np.ones_like(b), b)
        rest = np.fmod(a, safe)
        if remainder:
            return rest
        quotient = np.asarray((a - rest) // safe)
        return np.where(zero, ~np.zeros_like(quotient), quotient).astype(dtype)

    return Pure(divide, (dtype, dtype), dtype)


def _popc(x: Array) -> Array:
    return np.bitwise_count(x).astype(np.uint32)


def _clz(parts: tuple[str, ...]) -> Pure:
    dtype = DTYPES[parts[-1]]
    bits = itemsize(dtype) * 8

    def clz(x: Array) -> Array:
        return np.array([bits - int(v).bit_length() for v in np.atleast_1d(x)], np.uint32)

    return Pure(clz, (dtype,), U32)


def _bfind(parts: tuple[str, ...]) -> Pure:
    if parts[-1] not in ("u32", "u64"):
        raise _unsupported(parts)
    dtype, shift = DTYPES[parts[-1]], "shiftamt" in parts
    bits = itemsize(dtype) * 8

    def bfind(x: Array) -> Array:
        found = [int(v).bit_length() - 1 for v in np.atleast_1d(x)]
        out = [0xFFFF_FFFF if f < 0 else bits - 1 - f if shift else f for f in found]
        return np.array(out, np.uint32)

    return Pure(bfind, (dtype,), U32)


def _bfe(parts: tuple[str, ...]) -> Pure:
    if parts[-1] not in ("u32", "s32"):
        raise _unsupported(parts)
    signed = parts[-1] == "s32"

    def bfe(x: Array, position: Array, length: Array) -> Array:
        pos, count = np.asarray(position) & np.uint32(0xFF), np.asarray(length) & np.uint32(0xFF)
        wide = np.asarray(x).astype(np.int64)
        moved = wide >> np.minimum(pos, 63).astype(np.int64)
        mask = (np.int64(1) << np.minimum(count, 32).astype(np.int64)) - 1
        out = moved & mask
        if signed:
            out = np.where(
                (count > 0) & ((out >> np.maximum(count.astype(np.int64) - 1, 0)) & 1 == 1),
                out | ~mask,
                out,
            )
        return out.astype(np.uint64).astype(np.uint32) if not signed else out.astype(np.int32)

    return Pure(bfe, (DTYPES[parts[-1]], U32, U32), DTYPES[parts[-1]])


def _bfi(insert: Array, base: Array, position: Array, length: Array) -> Array:
    pos = np.minimum(np.asarray(position) & 0xFF, 63).astype(np.uint64)
    count = np.minimum(np.asarray(length) & 0xFF, 32).astype(np.uint64)
    mask = ((np.uint64(1) << count) - np.uint64(1)) << pos
    out = (np.asarray(base, np.uint64) & ~mask) | ((np.asarray(insert, np.uint64) << pos) & mask)
    return out.astype(np.uint32)


def _brev(x: Array) -> Array:
    octets = np.ascontiguousarray(np.atleast_1d(x)).view(np.uint8).reshape(-1, 4)[:, ::-1]
    flipped = np.packbits(np.unpackbits(octets, axis=1, bitorder="little"), axis=1, bitorder="big")
    return np.ascontiguousarray(flipped).view(np.uint32).reshape(-1)


def _prmt(parts: tuple[str, ...]) -> Pure:
    if parts[1:] != ("b32",):
        raise _unsupported(parts)

    def prmt(a: Array, b: Array, selector: Array) -> Array:
        shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(selector), (1,))
        both = np.empty((*shape, 2), np.uint32)
        both[..., 0], both[..., 1] = a, b
        octets = both.view(np.uint8)
        select = np.broadcast_to(selector, shape)
        out = np.empty((*shape, 4), np.uint8)
        lane = np.arange(shape[0])
        for i in range(4):
            nibble = (select >> np.uint32(4 * i)) & np.uint32(15)
            octet = octets[lane, nibble & 7]
            replicated = np.where(octet & 0x80, np.uint8(0xFF), np.uint8(0))
            out[..., i] = np.where(nibble & 8, replicated, octet)
        return out.view(np.uint32).reshape(shape)

    return Pure(prmt, (U32, U32, U32), U32)


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    lut = int(np.asarray(table).reshape(-1)[0])
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
    for i in range(8):
        if lut >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


_COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str, kind: str, parts: tuple[str, ...]) -> Function:
    """The comparison of setp and set: ordered unless the name ends in u; integers know no order of NaN."""
    floating = kind[0] == "f" or kind.startswith("bf")
    if kind in ("f16", "bf16", "f16x2", "bf16x2", "f64"):
        raise _unsupported(parts)
    if name in ("num", "nan"):
        if name == "nan":
            return lambda a, b: np.isnan(a) | np.isnan(b)
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    unordered = floating and len(name) == 3 and name[-1] == "u"
    function = _COMPARE.get(name[:2] if unordered else name)
    if function is None:
        raise _unsupported(parts)
    if unordered:
        return lambda a, b: function(a, b) | np.isnan(a) | np.isnan(b)
    if floating and name == "ne":
        return lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))
    return function


def _unary(function: Function, kind: str, parts: tuple[str, ...], allowed: set[str]) -> Pure:
    if not set(parts[1:-1]) <= allowed:
        raise _unsupported(parts)
    dtype = DTYPES[kind]
    return Pure(_flushed(function) if "ftz" in parts else function, (dtype,), dtype)


def _exp2(x: Array) -> Array:
    return flush(np.exp2(x))


def _special(parts: tuple[str, ...], function: Function) -> Pure:
    kind = parts[-1]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        if "approx" not in parts or not set(parts[1:-1]) <= {"approx", "ftz"}:
            raise _unsupported(parts)
        return _half((parts[0], "rn", kind), function, 1)
    if kind != "f32":
        raise _unsupported(parts)
    if parts == ("ex2", "approx", "ftz", "f32"):
        # Flushing the input changes nothing: 2^x of a subnormal rounds to 1.
        return Pure(_exp2, (F32,), F32)
    return _unary(function, kind, parts, {"approx", "ftz", "rn"})


def _rcp(x: Array) -> Array:
    return np.asarray(np.float32(1) / x)


def _rsqrt(x: Array) -> Array:
    return (1.0 / np.sqrt(np.asarray(x, np.float64))).astype(np.float32)


def _negate(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        dtype = U32 if kind.endswith("x2") else U16
        sign = np.uint32(0x8000_8000) if kind.endswith("x2") else np.uint16(0x8000)
        return Pure(lambda x: x ^ sign, (dtype,), dtype)
    return _unary(np.negative, kind, parts, {"ftz"})


def _absolute(parts: tuple[str, ...]) -> Pure:
    kind = parts[-1]
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        dtype = U32 if kind.endswith("x2") else U16
        keep = np.uint32(0x7FFF_7FFF) if kind.endswith("x2") else np.uint16(0x7FFF)
        return Pure(lambda x: x & keep, (dtype,), dtype)
    return _unary(np.abs, kind, parts, {"ftz"})


_LOGIC: dict[str, Function] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SPECIAL: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": _rcp,
    "rsqrt": _rsqrt,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


def pure(parts: tuple[str, ...], operands: int) -> Pure | None:
    """The function of an instruction with `operands` sources, None when the mnemonic is not purely arithmetic.

    Raises UnsupportedInstructionError for a form of a known mnemonic that is not implemented.
    """
    name = parts[0]
    if name in ("add", "sub"):
        return _binary(parts, np.add if name == "add" else np.subtract)
    if name == "mul":
        return _mul(parts)
    if name == "mad":
        return _mad(parts)
    if name == "fma":
        return _fma_pure(parts)
    if name in ("max", "min"):
        found = _extremum(parts, name == "max")
        return three_input(found) if operands == 3 else found
    if name in _LOGIC:
        return _logic(parts, _LOGIC[name])
    if name == "not":
        dtype = PRED if parts[-1] == "pred" else DTYPES[parts[-1]]
        return Pure(np.invert, (dtype,), dtype)
    if name in ("shl", "shr"):
        return _shift(parts, name == "shl")
    if name == "shf":
        return _funnel(parts)
    if name in ("div", "rem"):
        return _divide(parts, name == "rem")
    if name == "neg":
        return _negate(parts)
    if name == "abs":
        return _absolute(parts)
    if name in _SPECIAL:
        return _special(parts, _SPECIAL[name])
    if name == "copysign" and parts[-1] == "f32":
        return Pure(lambda a, b: np.copysign(b, a), (F32, F32), F32)
    return _bits(parts)


def _bits(parts: tuple[str, ...]) -> Pure | None:
    name = parts[0]
    if name == "popc":
        return Pure(_popc, (DTYPES[parts[-1]],), U32)
    if name == "clz":
        return _clz(parts)
    if name == "bfind":
        return _bfind(parts)
    if name == "bfe":
        return _bfe(parts)
    if name == "bfi" and parts[-1] == "b32":
        return Pure(_bfi, (U32, U32, U32, U32), U32)
    if name == "brev" and parts[-1] == "b32":
        return Pure(_brev, (U32,), U32)
    if name == "prmt":
        return _prmt(parts)
    if name == "lop3" and parts[-1] == "b32":
        return Pure(_lop3, (U32, U32, U32, U32), U32)
    if name == "cvta":
        return None
    return None
