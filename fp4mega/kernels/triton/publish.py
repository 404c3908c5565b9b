"""Publishers: kernels that turn strided [B, rows, heads, dim] tensors into saved bytes and into what matrix products read.

Saved bytes are those of `fp4mega.formats.quantize`, bit for bit. An *operand* is head-major [B, heads, rows, dim] (or transposed
[B, heads, dim, rows], because 8-bit products on Hopper want both factors contiguous along the reduced axis), padded with zeros to
whole tiles, and never saved:

- NVFP4 Q, K for scores: element times block scale, at most 6 significant bits, exact in BF16; the FP32 number is left to the product.
- MXFP4 Q, K for scores: E4M3 under one power of two a head. Exact as long as the head's values span no more than E4M3 does; a head for
  which they do raises its `inexact` flag and is computed from the same values in BF16 instead.
- Q, K for gradients: E4M3 with a power of two a head, transposed. V: E4M3 transposed. dO: E5M2 in both orientations. Rows of transposed
  operands lie in the order that `in_operand_order` says.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import (
    bits_of,
    code_of,
    e2m1_code,
    e2m1_value,
    e4m3_scale_value,
    e8m0_value,
    fp8_code,
    from_bits,
    nvfp4_global,
    power_of_two_scale,
    rceil_byte,
    round_magnitude,
    sign_for,
    with_sign,
)
from fp4mega.kernels.triton.tiles import in_operand_order, swap_pairs

# The three kernels below that cast to FP8 do not specialize on `rows`: with rows = 1 known, the zeros of the rows beyond are known too, and
# ptxas 12.8 packs two equal FP8 pairs into one register wrongly.

TILE = 128
"""Operands are padded to a multiple of this many rows."""


def padded_rows(rows: int) -> int:
    """Rows of an operand: a multiple of the largest kernel tile."""
    return -(-rows // TILE) * TILE


def padded_dim(dim: int) -> int:
    """Columns of an operand: a power of two that an 8-bit product accepts."""
    return max(32, triton.next_power_of_2(dim))


@triton.jit
def load_rows(
    x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN: tl.constexpr
):
    """float32 [rows, cols] of one head, zeros outside and where a row is hidden."""
    live = rows_at < rows
    if HIDDEN:
        hidden = tl.load(hidden_ptr + b.to(tl.int64) * rows + rows_at, mask=live, other=1)
        live = live & (hidden == 0)
    base = x_ptr + b.to(tl.int64) * sxb + h.to(tl.int64) * sxh
    pointers = base + rows_at.to(tl.int64)[:, None] * sxr + cols[None, :] * sxd
    return tl.load(pointers, mask=live[:, None] & (cols < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _amax_kernel(
    x_ptr, hidden_ptr, amax_ptr, sxb, sxr, sxh, sxd, rows, heads, dim, tiles,
    HIDDEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each head as int32 bits (NaN above inf above every number): an order-free, so repeatable, maximum."""
    pid = tl.program_id(0)
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN)
    largest = tl.max(tl.max(bits_of(x) & 0x7FFFFFFF, axis=1), axis=0)
    tl.atomic_max(amax_ptr + bh, largest, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _publish_fp4_kernel(
    x_ptr, hidden_ptr, amax_ptr, codes_ptr, scale_ptr, global_ptr, largest_ptr, operand_ptr, inexact_ptr,
    sxb, sxr, sxh, sxd, rows, rows_padded, heads, per_group, dim,
    NVFP4: tl.constexpr, HIDDEN: tl.constexpr, SWAPPED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Codes, block scales, FP32 number, largest represented magnitude (times the FP32 number) and scores operand of one tile.

    SWAPPED: rows of the operand, not of the bytes, are at `swap_pairs` of their place.
    """
    BLOCK: tl.constexpr = 16 if NVFP4 else 32
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN)
    amax_bits = tl.load(amax_ptr + bh)
    amax = from_bits(amax_bits)
    blocks = tl.reshape(x, [BLOCK_R, BLOCK_D // BLOCK, BLOCK])
    block_bits = tl.max(bits_of(blocks) & 0x7FFFFFFF, axis=2)
    if NVFP4:
        shared = nvfp4_global(amax)
        target = tl.minimum(
            tl.math.div_rn(from_bits(block_bits), tl.full(block_bits.shape, 6.0, tl.float32))
            * shared,
            448.0,
        )
        block_scale = round_magnitude(tl.where(shared == shared, target, float("nan")), 3, 7)
        scale_code = code_of(block_scale, 0, 3, 7, 0x7F)
        # A correctly rounded quotient from a correctly rounded reciprocal of the block's scale (Markstein), without a division an element.
        zero = block_scale == 0
        divisor = tl.where(zero, 1.0, block_scale)
        inverse = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        divisor = tl.broadcast_to(tl.expand_dims(divisor, 2), blocks.shape)
        inverse = tl.broadcast_to(tl.expand_dims(inverse, 2), blocks.shape)
        dividend = blocks * shared
        quotient = dividend * inverse
        scaled = tl.fma(tl.fma(-quotient, divisor, dividend), inverse, quotient)
        # The sum loses the sign of a zero; a block of scale 0 has none.
        signed = tl.where(tl.expand_dims(zero, 2), 0.0, dividend)
    else:
        byte = rceil_byte(block_bits)
        scale_code = byte.to(tl.uint8)
        block_scale = e8m0_value(byte)
        inverse = from_bits(tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23))
        scaled = blocks * tl.broadcast_to(tl.expand_dims(inverse, 2), blocks.shape)
        signed = scaled
    # NaN becomes 6 here, whose code is also NaN's; the block's scale keeps it NaN.
    magnitude = round_magnitude(tl.minimum(tl.abs(scaled), 6.0), 1, 1)
    code = (e2m1_code(magnitude) | sign_for(signed, 4)).to(tl.uint8)
    value = with_sign(magnitude, signed) * tl.expand_dims(block_scale, 2)
    value = tl.reshape(value, [BLOCK_R, BLOCK_D])

    low, high = tl.split(tl.reshape(code, [BLOCK_R, BLOCK_D // 2, 2]))
    pairs, pair_at = (dim + 1) // 2, tl.arange(0, BLOCK_D // 2)
    row_index = (b.to(tl.int64) * rows + rows_at) * heads + h
    inside = (rows_at < rows)[:, None]
    tl.store(
        codes_ptr + row_index[:, None] * pairs + pair_at[None, :],
        low | (high << 4),
        mask=inside & (pair_at < pairs)[None, :],
    )
    count, block_at = (dim + BLOCK - 1) // BLOCK, tl.arange(0, BLOCK_D // BLOCK)
    tl.store(
        scale_ptr + row_index[:, None] * count + block_at[None, :],
        scale_code,
        mask=inside & (block_at < count)[None, :],
    )

    finite = amax_bits < 0x7F800000
    slots = swap_pairs(rows_at) if SWAPPED else rows_at
    at = operand_ptr + (bh.to(tl.int64) * rows_padded + slots)[:, None] * BLOCK_D + cols[None, :]
    if NVFP4:
        # The largest value of a head is 6 in a block of scale 448, except where the FP32 number had to be kept finite.
        largest = bits_of(tl.where(amax_bits == 0, 0.0, amax * 0.0 + 2688.0))
        if shared >= 3.4028234663852886e38:
            tile_largest = tl.max(tl.max(bits_of(value) & 0x7FFFFFFF, axis=1), axis=0)
            tl.atomic_max(largest_ptr + bh, tile_largest, sem="relaxed")
        elif tile == 0:
            tl.store(largest_ptr + bh, tl.where(finite, largest, 0x7FC00000))
        if tile == 0:
            tl.store(global_ptr + bh, shared)
        tl.store(at, value.to(tl.bfloat16))
    else:
        # That of a head's largest value: rceil never rounds another above it.
        head_scale = e8m0_value(rceil_byte(amax_bits))
        rounded = round_magnitude(
            tl.where(amax_bits == 0, 0.0, tl.math.div_rn(amax, head_scale)), 1, 1
        )
        head_largest = tl.where(amax_bits == 0, 0.0, rounded * head_scale)
        power = power_of_two_scale(head_largest, 8, 7)
        if tile == 0:
            tl.store(largest_ptr + bh, tl.where(finite, bits_of(head_largest), 0x7FC00000))
            tl.store(global_ptr + bh, tl.where(finite, power, 1.0))
        _store_e4m3(value * power, at, inexact_ptr + bh // per_group)


@triton.jit
def _store_e4m3(value, at, inexact_at):
    """Store E4M3 codes of values within its range; raise the flag when one is no multiple of the smallest code (NaN never is)."""
    tl.store(at, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
    steps = value * 512.0
    wrong = (steps + 12582912.0) - 12582912.0 != steps
    if tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0) != 0:
        tl.atomic_or(inexact_at, 1, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _expand_fp4_kernel(
    codes_ptr, scale_ptr, global_ptr, largest_ptr, operand_ptr, gradient_ptr, power_ptr, inexact_ptr,
    rows, rows_padded, heads, per_group, dim,
    NVFP4: tl.constexpr, SCORES: tl.constexpr, GRADIENT: tl.constexpr, GATED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Operands from saved bytes. SCORES: `bf16`, `e4m3` or `none`; GRADIENT: also the transposed E4M3 one; GATED: only flagged heads."""
    BLOCK: tl.constexpr = 16 if NVFP4 else 32
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    if GATED:  # noqa: SIM102 - a compile-time condition around one at run time
        if tl.load(inexact_ptr + bh // per_group) == 0:
            return
    b, h = bh // heads, bh % heads
    rows_at = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    pairs, pair_at = (dim + 1) // 2, tl.arange(0, BLOCK_D // 2)
    row_index = (b.to(tl.int64) * rows + rows_at) * heads + h
    inside = (rows_at < rows)[:, None]
    packed = tl.load(
        codes_ptr + row_index[:, None] * pairs + pair_at[None, :],
        mask=inside & (pair_at < pairs)[None, :],
        other=0,
    ).to(tl.int32)
    elements = tl.reshape(
        tl.join(e2m1_value(packed & 15), e2m1_value(packed >> 4)),
        [BLOCK_R, BLOCK_D // BLOCK, BLOCK],
    )
    count, block_at = (dim + BLOCK - 1) // BLOCK, tl.arange(0, BLOCK_D // BLOCK)
    scale_code = tl.load(
        scale_ptr + row_index[:, None] * count + block_at[None, :],
        mask=inside & (block_at < count)[None, :],
        other=0,
    ).to(tl.int32)
    scale = e4m3_scale_value(scale_code) if NVFP4 else e8m0_value(scale_code)
    value = tl.reshape(elements * tl.expand_dims(scale, 2), [BLOCK_R, BLOCK_D])
    cols = tl.arange(0, BLOCK_D)
    at = operand_ptr + (bh.to(tl.int64) * rows_padded + rows_at)[:, None] * BLOCK_D + cols[None, :]
    if SCORES == "bf16":
        tl.store(at, value.to(tl.bfloat16))
    if GRADIENT or SCORES == "e4m3":
        largest = from_bits(tl.load(largest_ptr + bh))
        divisor = 1.0
        if NVFP4:
            divisor = tl.load(global_ptr + bh)
            largest = tl.math.div_rn(largest, divisor)
        power = power_of_two_scale(largest, 8, 7)
        if tile == 0:
            tl.store(power_ptr + bh, power)
        if SCORES == "e4m3":
            finite = power == power
            _store_e4m3(value * tl.where(finite, power, 1.0), at, inexact_ptr + bh // per_group)
        if GRADIENT:
            if NVFP4:
                # Correctly rounded as above: values lie on ties of E4M3, which a rounding before must not move.
                inverse = tl.math.div_rn(1.0, divisor)
                quotient = value * inverse
                remainder = tl.fma(-quotient, tl.zeros_like(value) + divisor, value)
                value = tl.fma(remainder, tl.zeros_like(value) + inverse, quotient)
            code = fp8_code(value, power, 3, 7).to(tl.uint8)
            across = (
                gradient_ptr
                + (bh.to(tl.int64) * BLOCK_D + cols)[:, None] * rows_padded
                + rows_at[None, :]
            )
            tl.store(across, in_operand_order(tl.trans(code), BLOCK_D, BLOCK_R))


@triton.jit(do_not_specialize=["rows"])
def _publish_fp8_kernel(
    x_ptr, hidden_ptr, amax_ptr, codes_ptr, across_ptr, power_ptr,
    sxb, sxr, sxh, sxd, scb, scr, sch, rows, rows_padded, codes_rows, codes_cols, heads, dim,
    EMAX: tl.constexpr, BIAS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """FP8 codes with a power of two a head: [rows, dim] into `codes` (any strides) and transposed into the operand `across`."""
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN)
    power = power_of_two_scale(from_bits(tl.load(amax_ptr + bh)), EMAX, BIAS)
    if tile == 0:
        tl.store(power_ptr + bh, power)
    code = fp8_code(x, power, 3 if EMAX == 8 else 2, BIAS).to(tl.uint8)
    at = (
        codes_ptr
        + b.to(tl.int64) * scb
        + h.to(tl.int64) * sch
        + rows_at.to(tl.int64)[:, None] * scr
        + cols[None, :]
    )
    tl.store(at, code, mask=(rows_at < codes_rows)[:, None] & (cols < codes_cols)[None, :])
    across = (
        across_ptr + (bh.to(tl.int64) * BLOCK_D + cols)[:, None] * rows_padded + rows_at[None, :]
    )
    tl.store(across, in_operand_order(tl.trans(code), BLOCK_D, BLOCK_R))


@triton.jit
def _row_terms_kernel(
    out_ptr, dout_ptr, dlse_ptr, lse_ptr, statistics_ptr, power_ptr, shift_ptr, inverse_ptr, r_ptr,
    sdb, sdr, sdh, sdd, rows, rows_padded, heads, dim, total_rows,
    FP8: tl.constexpr, REPRESENTED: tl.constexpr, DLSE: tl.constexpr, P_EXPONENT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What backward needs a number of for each row: r = rowsum(out * dO) - dlse, and how 2^z becomes P.

    2^P_EXPONENT P = 2^(z - shift) * inverse, and r is stored over 2^P_EXPONENT, so that P (dP - r) keeps its worth; rows that see nothing, and padding, have shift +inf, so their P is 0 without a mask.
    dO is the published one: E5M2 under the head's power of two, or BF16.
    """
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    live = rows_at < rows
    keep = live[:, None] & (cols < dim)[None, :]
    out = tl.load(
        out_ptr + ((b.to(tl.int64) * rows + rows_at) * heads + h)[:, None] * dim + cols[None, :],
        mask=keep,
        other=0.0,
    ).to(tl.float32)
    at = (
        dout_ptr
        + b.to(tl.int64) * sdb
        + h.to(tl.int64) * sdh
        + rows_at.to(tl.int64)[:, None] * sdr
        + cols[None, :] * sdd
    )
    do = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    if FP8:
        power = tl.load(power_ptr + bh)
        magnitude = round_magnitude(tl.abs(do * power), 2, 15)
        do = with_sign(magnitude, do) * tl.math.div_rn(tl.full([1], 1.0, tl.float32), power)
    else:
        do = do.to(tl.bfloat16).to(tl.float32)
    r = tl.sum(out * do, axis=1)
    row = bh.to(tl.int64) * rows + rows_at
    if DLSE:
        r = r - tl.load(dlse_ptr + row, mask=live, other=0.0).to(tl.float32)
    padded = bh.to(tl.int64) * rows_padded + rows_at
    tl.store(r_ptr + padded, r * 2.0**-P_EXPONENT)
    if REPRESENTED:
        top = tl.load(statistics_ptr + row, mask=live, other=0.0)
        total = tl.load(statistics_ptr + total_rows + row, mask=live, other=0.0)
        seen = total != 0
        tl.store(shift_ptr + padded, tl.where(seen, top - P_EXPONENT, float("inf")))
        inverse = tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(seen, total, 1.0))
        tl.store(inverse_ptr + padded, tl.where(seen, inverse, 0.0))
    else:
        lse = tl.load(lse_ptr + row, mask=live, other=float("-inf"))
        tl.store(
            shift_ptr + padded,
            tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634 - P_EXPONENT),
        )


def in_natural_order(across: Tensor) -> Tensor:
    """A transposed operand [..., rows] with its rows where they were: the inverse of `in_operand_order`."""
    groups = across.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2)
    return groups.flatten(-4)


def head_amax(x: Tensor, hidden: Tensor | None) -> Tensor:
    """int32 [B, heads]: bits of the largest magnitude of each head of x [B, rows, heads, dim]."""
    batch, rows, heads, dim = x.shape
    amax = torch.zeros((batch, heads), dtype=torch.int32, device=x.device)
    tiles = -(-rows // TILE)
    _amax_kernel[(tiles * batch * heads,)](
        x, hidden, amax, *x.stride(), rows, heads, dim, tiles,
        HIDDEN=hidden is not None, BLOCK_R=TILE, BLOCK_D=padded_dim(dim), num_warps=8,
    )  # fmt: skip
    return amax


def publish_fp4(
    x: Tensor, hidden: Tensor | None, *, nvfp4: bool, inexact: Tensor, swapped: bool = False
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """x [B, rows, heads, dim] as NVFP4 or MXFP4 `rceil`.

    Returns the QTensor's tensors (codes, scale, and for NVFP4 the FP32 number [B, 1, heads, 1]), the largest represented magnitude
    float32 [B, heads] (times that number), the scores operand (BF16, or E4M3 for MXFP4) and what divides it, float32 [B, heads].
    `inexact` int32 [B, kv heads] is raised where E4M3 does not hold a head's MXFP4 values. With `swapped` the operand's row i is row
    `swap_pairs(i)` of x.
    """
    batch, rows, heads, dim = x.shape
    block, wide, tall = 16 if nvfp4 else 32, padded_dim(dim), padded_rows(rows)
    new = x.new_empty
    codes = new((batch, rows, heads, -(-dim // 2)), dtype=torch.uint8)
    scale = new((batch, rows, heads, -(-dim // block)), dtype=torch.uint8)
    shared = new((batch, 1, heads, 1), dtype=torch.float32)
    largest = torch.zeros((batch, heads), dtype=torch.int32, device=x.device)
    operand = new((batch, heads, tall, wide), dtype=torch.bfloat16 if nvfp4 else torch.uint8)
    block_rows = 32 if wide <= 128 else 16
    _publish_fp4_kernel[(tall // block_rows * batch * heads,)](
        x, hidden, head_amax(x, hidden), codes, scale, shared, largest, operand, inexact,
        *x.stride(), rows, tall, heads, heads // inexact.shape[1], dim,
        NVFP4=nvfp4, HIDDEN=hidden is not None, SWAPPED=swapped, BLOCK_R=block_rows, BLOCK_D=wide, num_warps=4,
    )  # fmt: skip
    saved = [codes, scale, shared] if nvfp4 else [codes, scale]
    operand = operand if nvfp4 else operand.view(torch.float8_e4m3fn)
    return saved, largest.view(torch.float32), operand, shared.view(batch, heads)


def expand_fp4(
    saved: list[Tensor],
    largest: Tensor,
    dim: int,
    *,
    nvfp4: bool,
    scores: str,
    gradient: bool,
    inexact: Tensor,
    gated: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Operands from the bytes of `publish_fp4`: scores operand (`bf16`, `e4m3`, `none`), transposed E4M3 one, its power [B, heads].

    `gated` touches only the heads whose `inexact` flag is up; the rest of the operand is left unwritten.
    """
    codes, scale = saved[:2]
    batch, rows, heads, _ = codes.shape
    wide, tall = padded_dim(dim), padded_rows(rows)
    dtype = torch.bfloat16 if scores == "bf16" else torch.uint8
    operand = None if scores == "none" else codes.new_empty((batch, heads, tall, wide), dtype=dtype)
    across = codes.new_empty((batch, heads, wide, tall)) if gradient else None
    power = codes.new_empty((batch, heads), dtype=torch.float32)
    block_rows = 64 if wide <= 128 else 32
    _expand_fp4_kernel[(tall // block_rows * batch * heads,)](
        codes, scale, saved[2] if nvfp4 else None, largest.view(torch.int32), operand, across, power, inexact,
        rows, tall, heads, heads // inexact.shape[1], dim,
        NVFP4=nvfp4, SCORES=scores, GRADIENT=gradient, GATED=gated, BLOCK_R=block_rows, BLOCK_D=wide, num_warps=4,
    )  # fmt: skip
    if scores == "e4m3":
        assert operand is not None
        operand = operand.view(torch.float8_e4m3fn)
    return operand, None if across is None else across.view(torch.float8_e4m3fn), power


def publish_v(v: Tensor, hidden: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """V [B, T, G, Dv] as E4M3: the QTensor's tensors (codes, FP32 power of two [B, 1, G, 1]) and the transposed operand."""
    codes = v.new_empty(v.shape, dtype=torch.uint8)
    shared, across = _publish_fp8(v, hidden, codes, codes.stride(), v.shape[1], v.shape[3], "e4m3")
    return [codes, shared.view(v.shape[0], 1, v.shape[2], 1)], across.view(torch.float8_e4m3fn)


def publish_dout(dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dO [B, S, H, Dv] as E5M2 operands [B, H, rows, dim] and transposed, and the power of two [B, H]."""
    batch, rows, heads, dim = dout.shape
    tall, wide = padded_rows(rows), padded_dim(dim)
    codes = dout.new_empty((batch, heads, tall, wide), dtype=torch.uint8)
    strides = (codes.stride(0), codes.stride(2), codes.stride(1))
    shared, across = _publish_fp8(dout, None, codes, strides, tall, wide, "e5m2")
    return codes.view(torch.float8_e5m2), across.view(torch.float8_e5m2), shared


def _publish_fp8(
    x: Tensor, hidden: Tensor | None, codes: Tensor, strides: tuple[int, ...], codes_rows: int, codes_cols: int, element: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, rows, heads, dim = x.shape
    tall, wide = padded_rows(rows), padded_dim(dim)
    across = x.new_empty((batch, heads, wide, tall), dtype=torch.uint8)
    shared = x.new_empty((batch, heads), dtype=torch.float32)
    emax, bias = (8, 7) if element == "e4m3" else (15, 15)
    block_rows = 64 if wide <= 128 else 32
    _publish_fp8_kernel[(tall // block_rows * batch * heads,)](
        x, hidden, head_amax(x, hidden), codes, across, shared,
        *x.stride(), *strides[:3], rows, tall, codes_rows, codes_cols, heads, dim,
        EMAX=emax, BIAS=bias, HIDDEN=hidden is not None,
        BLOCK_R=block_rows, BLOCK_D=wide, num_warps=4,
    )  # fmt: skip
    return shared, across


def row_terms(
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    statistics: Tensor | None,
    power: Tensor | None,
    p_exponent: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """shift, inverse and r, float32 [B, H, padded rows]: see the kernel. `power` is None for a BF16 dO."""
    batch, rows, heads, dim = out.shape
    tall = padded_rows(rows)
    shift, inverse, r = (torch.empty((batch, heads, tall), device=out.device) for _ in range(3))
    _row_terms_kernel[(tall // 32 * batch * heads,)](
        out, dout, dlse, lse, statistics, power, shift, inverse, r,
        *dout.stride(), rows, tall, heads, dim, batch * heads * rows,
        FP8=power is not None, REPRESENTED=statistics is not None, DLSE=dlse is not None, P_EXPONENT=p_exponent,
        BLOCK_R=32, BLOCK_D=padded_dim(dim), num_warps=4,
    )  # fmt: skip
    return shift, inverse, r
