"""Single instructions of sm_100a that the CuTe DSL does not spell, or spells only inside its own layout algebra.

Everything here is called inside a kernel. Addresses are 32-bit integers: shared memory in bytes, tensor memory as
(lane << 16) + column.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass._mlir.dialects import arith, llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op

from fp4mega.kernels.cute.descriptors import Kind

_LANE_STRIDE = 1 << 16
EXP2_CUBIC = (0.07706717, 0.22764485, 0.69511682, 1.0)
"""2^f = ((a f + b) f + c) f + d."""
_MMA = {
    Kind.F8F6F4: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    Kind.MXF4: "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32",
    Kind.MXF4NVF4: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
}


_REGISTER = {Float32: "f", Int32: "r"}
"""Constraint letter of a 32-bit operand."""


def _asm(
    text: str, constraints: str, operands: list[Any], result: Any = None, *, effects: bool = True
) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _computed(result: Any, text: str, *operands: Float32 | Int32, loc: Any, ip: Any) -> Any:
    """$0, a `result` (Float32 or Int32), by instructions that only compute it from $1, $2 ..."""
    letters = ",".join(_REGISTER[kind] for kind in (result, *map(type, operands)))
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    return result(_asm(text, f"={letters}", values, result.mlir_type, effects=False))


@dsl_user_op
def mma(
    kind: cutlass.Constexpr,
    d: Int32,
    a: Int32 | Int64,
    b: Int64,
    descriptor: cutlass.Constexpr,
    accumulate: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D (tensor memory) (+)= A B with A a tensor-memory address (Int32) or matrix descriptor (Int64). One thread issues it."""
    in_tensor_memory = isinstance(a, Int32)
    left, constraint = ("[$1]", "r") if in_tensor_memory else ("$1", "l")
    _asm(
        f"{{ .reg .pred p; setp.ne.b32 p, $4, 0; {_MMA[kind]} [$0], {left}, $2, $3, p; }}",
        f"r,{constraint},l,r,r",
        [
            Int32(d).ir_value(loc=loc, ip=ip),
            a.ir_value(loc=loc, ip=ip),
            b.ir_value(loc=loc, ip=ip),
            Int32(descriptor).ir_value(loc=loc, ip=ip),
            Int32(accumulate).ir_value(loc=loc, ip=ip),
        ],
    )


@dsl_user_op
def mma_block_scaled(
    kind: cutlass.Constexpr,
    d: Int32,
    a: Int32 | Int64,
    b: Int64,
    descriptor: cutlass.Constexpr,
    scale_a: Int32,
    scale_b: Int32,
    accumulate: Int32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """As `mma` with block scales at two tensor-memory addresses."""
    in_tensor_memory = isinstance(a, Int32)
    left, constraint = ("[$1]", "r") if in_tensor_memory else ("$1", "l")
    _asm(
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; "
        f"{_MMA[kind]} [$0], {left}, $2, $3, [$4], [$5], p; }}",
        f"r,{constraint},l,r,r,r,r",
        [
            Int32(d).ir_value(loc=loc, ip=ip),
            a.ir_value(loc=loc, ip=ip),
            b.ir_value(loc=loc, ip=ip),
            Int32(descriptor).ir_value(loc=loc, ip=ip),
            Int32(scale_a).ir_value(loc=loc, ip=ip),
            Int32(scale_b).ir_value(loc=loc, ip=ip),
            Int32(accumulate).ir_value(loc=loc, ip=ip),
        ],
    )


@dsl_user_op
def copy_scales(to: Int32, source: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """512 bytes of scales (32 rows x 16 bytes, a matrix descriptor) to four columns, repeated in the four lane quarters."""
    _asm(
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;",
        "r,l",
        [Int32(to).ir_value(loc=loc, ip=ip), source.ir_value(loc=loc, ip=ip)],
    )


@dsl_user_op
def commit(barrier: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive on an mbarrier when every tensor-core operation that this thread issued so far is done."""
    tcgen05.commit(barrier, loc=loc, ip=ip)


@dsl_user_op
def fence_after_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order the tensor-core operations that follow after the barrier just waited for."""
    _asm("tcgen05.fence::after_thread_sync;", "", [])


@dsl_user_op
def fence_before_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order the tensor-memory operations so far before the arrival that follows."""
    _asm("tcgen05.fence::before_thread_sync;", "", [])


@dsl_user_op
def pack_e4m3x4(
    a: Float32, b: Float32, c: Float32, d: Float32, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Four E4M3 codes in one word, `a` lowest; to nearest even, saturating, NaN stays NaN."""
    return _computed(
        Int32,
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        *(Float32(x) for x in (a, b, c, d)),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_e2m1x8(
    values: list[Float32], *, relu: bool = False, loc: Any = None, ip: Any = None
) -> Int32:
    """Eight E2M1 codes in one word, the first lowest; to nearest even code, saturating at 6. `relu`: of max(0, value)."""
    cvt = f"cvt.rn.satfinite{'.relu' if relu else ''}.e2m1x2.f32"
    pairs = "; ".join(f"{cvt} b{i}, ${2 * i + 2}, ${2 * i + 1}" for i in range(4))
    return _computed(
        Int32,
        f"{{ .reg .b8 b0, b1, b2, b3; {pairs}; mov.b32 $0, {{b0, b1, b2, b3}}; }}",
        *(Float32(x) for x in values),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def e4m3_code(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The E4M3 code of one number; to nearest even, saturating, NaN stays NaN."""
    return _computed(
        Int32,
        "{ .reg .b16 code; .reg .f32 zero; mov.f32 zero, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 code, zero, $1; cvt.u32.u16 $0, code; }",
        Float32(x),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def e4m3_value(code: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The number that an E4M3 code (0 to 255) stands for."""
    return _computed(
        Float32,
        "{ .reg .b16 pair, low, high; .reg .b32 halves; cvt.u16.u32 pair, $1; "
        "cvt.rn.f16x2.e4m3x2 halves, pair; mov.b32 {low, high}, halves; cvt.f32.f16 $0, low; }",
        Int32(code),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def divide(x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x / y, correctly rounded."""
    return _computed(Float32, "div.rn.f32 $0, $1, $2;", Float32(x), Float32(y), loc=loc, ip=ip)


@dsl_user_op
def fma(x: Float32, y: Float32, z: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x y + z with one rounding."""
    operands = (Float32(v) for v in (x, y, z))
    return _computed(Float32, "fma.rn.f32 $0, $1, $2, $3;", *operands, loc=loc, ip=ip)


@dsl_user_op
def multiply(x: Float32, y: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """x y as a product of its own, which no compiler merges into a sum."""
    return _computed(Float32, "mul.rn.f32 $0, $1, $2;", Float32(x), Float32(y), loc=loc, ip=ip)


@dsl_user_op
def bits_of(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The bits of a float32."""
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def from_bits(bits: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float32 of these bits."""
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def exp2_polynomial(
    x: Float32, y: Float32, *, loc: Any = None, ip: Any = None
) -> tuple[Float32, Float32]:
    """2^x and 2^y on the FMA units: a cubic on the fraction, the integer part added to the exponent field.

    For x <= 127; relative error below 1e-4. Below -126 the result is below 2^-125, for E4M3 zero. Coefficients: minimax cubic
    of 2^f on [0, 1) with value 1 at 0 (`tests/kernels/cute` checks the error).
    """
    lowest = -127.0
    magic = 1.5 * 2**23
    x = cute.arch.fmax(x, lowest, loc=loc, ip=ip)
    y = cute.arch.fmax(y, lowest, loc=loc, ip=ip)
    # Rounded down, the sum's low bits are floor(x).
    whole = cute.arch.add_packed_f32x2((x, y), (magic, magic), rnd="rm", loc=loc, ip=ip)
    below = cute.arch.add_packed_f32x2(whole, (-magic, -magic), loc=loc, ip=ip)
    fraction = cute.arch.sub_packed_f32x2((x, y), below, loc=loc, ip=ip)
    value = (EXP2_CUBIC[0], EXP2_CUBIC[0])
    for coefficient in EXP2_CUBIC[1:]:
        value = cute.arch.fma_packed_f32x2(
            value, fraction, (coefficient, coefficient), loc=loc, ip=ip
        )
    result = [
        _computed(
            Float32,
            "{ .reg .b32 e, p; mov.b32 e, $2; shl.b32 e, e, 23; mov.b32 p, $1; "
            "add.s32 p, p, e; mov.b32 $0, p; }",
            Float32(part),
            Float32(bits),
            loc=loc,
            ip=ip,
        )
        for part, bits in zip(value, whole, strict=True)
    ]
    return result[0], result[1]


@dsl_user_op
def floor(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Largest integer not above x."""
    return _computed(Float32, "cvt.rmi.f32.f32 $0, $1;", Float32(x), loc=loc, ip=ip)


@dsl_user_op
def to_int(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """An integral float32 as an integer; 0 for NaN."""
    return _computed(Int32, "cvt.rni.s32.f32 $0, $1;", Float32(x), loc=loc, ip=ip)


@dsl_user_op
def ceil(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Smallest integer not below x."""
    return _computed(Float32, "cvt.rpi.f32.f32 $0, $1;", Float32(x), loc=loc, ip=ip)


def select(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the runtime condition holds, else `no`: a select instruction, both sides evaluated. Same type on both."""
    return type(yes)(
        arith.select(cutlass.Boolean(condition).ir_value(), yes.ir_value(), no.ir_value())
    )


def clamp(x: Int32, low: int, high: int) -> Int32:
    """x between low and high."""
    return cutlass.min(cutlass.max(x, Int32(low)), Int32(high))


def matrix_at(base: int, address: Int32) -> Int64:
    """A matrix descriptor of `descriptors.shared_descriptor` with its start address, in units of 16 bytes."""
    # The upper word is a constant, and the lower a sum of which all parts but the address are.
    low = Uint32(address) + (base & 0xFFFF_FFFF)
    return Int64(base >> 32 << 32) | Int64(low)


def ring(use: Int32, buffers: int) -> tuple[Int32, Int32]:
    """(buffer, parity of its phase) that the `use`-th use of a ring has, counted from 0."""
    # Without a sign, division by a power of two is a shift.
    count = Uint32(use)
    return Int32(count % buffers), Int32(count // buffers % 2)


def parity(phase: Int32) -> Int32:
    """Of the phase with that number, counted from 0."""
    return phase & 1


def with_scale_bytes(descriptor: int, a: int, b: int) -> int:
    """An instruction descriptor that starts at byte `a` and `b` of the scale words of A and B, as a signed 32-bit integer."""
    return signed(descriptor | b << 4 | a << 29)


def scale_address(address: Int32, byte: int) -> Int32:
    """A scale address with the first byte's number in its top two bits, where the tensor core expects it too."""
    return address if byte == 0 else address + signed(byte << 30)


def signed(word: int) -> int:
    """A 32-bit word as the integer that Int32 takes."""
    return word - (1 << 32) if word >= 1 << 31 else word


def vector(pointer: cute.Pointer) -> cute.Tensor:
    """Elements that follow one another from `pointer` on."""
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))


def tensor_columns(base: cute.Pointer, column: int, count: int) -> cute.Tensor:
    """`count` 32-bit columns of all 128 lanes from `column` on, as a [128, count] tensor."""
    return cute.make_tensor(base + column, cute.make_layout((128, count), stride=(_LANE_STRIDE, 1)))


def load_columns(base: cute.Pointer, column: int, count: int, thread: Int32) -> cute.Tensor:
    """This thread's lane of `count` columns in registers, Float32 [count]. Asynchronous: wait before use.

    `thread` counts within four consecutive warps, of which warp w reads lanes 32 w to 32 w + 31.
    """
    source = tensor_columns(base, column, count)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(count)), Float32)
    copy = tcgen05.make_tmem_copy(atom, source).get_slice(thread)
    shape = copy.partition_D(cute.make_identity_tensor((128, count))).shape
    registers = cute.make_rmem_tensor(shape, Float32)
    cute.copy(copy, copy.partition_S(source), registers)
    return cute.make_tensor(registers.iterator, cute.make_layout(count))


def store_columns(
    values: cute.Tensor, base: cute.Pointer, column: int, count: int, thread: Int32
) -> None:
    """`values`, 32-bit [count], to this thread's lane of `count` columns. Asynchronous: wait before an arrival."""
    target = tensor_columns(base, column, count)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32)
    copy = tcgen05.make_tmem_copy(atom, target).get_slice(thread)
    shape = copy.partition_S(cute.make_identity_tensor((128, count))).shape
    registers = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), shape)
    cute.copy(copy, registers, copy.partition_D(target))
