"""Publishers of Q and K in 4 bits (see `publish_input`):

- NVFP4 for scores: element times block scale, at most 6 significant bits, exact in BF16; the FP32 number is left to the product.
- MXFP4 for scores: E4M3 under one power of two a head. Exact as long as the head's values span no more than E4M3 does; a head for
  which they do raises its `inexact` flag and is computed from the same values in BF16 instead.
- For gradients, from the saved bytes: E4M3 with a power of two a head, transposed, rows in the order that `in_operand_order` says.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import (
    bits_of,
    e4m3_scale_code,
    e4m3_scale_value,
    e8m0_value,
    from_bits,
    nvfp4_global,
    power_of_two_scale,
    quotient,
    rceil_byte,
    round_magnitude,
    sixth,
    split_reciprocal,
)
from fp4mega.kernels.triton.packing import (
    nibble_pairs,
    nibble_words,
    nibbles_of_bytes,
    nibbles_of_words,
    rows_by_word,
)
from fp4mega.kernels.triton.publish_fp8 import fp8_tile, store_fp8
from fp4mega.kernels.triton.publish_input import (
    is_whole,
    load_rows,
    look_ahead,
    maxima_ahead,
    padded_dim,
    padded_rows,
    wait_for_maximum,
)
from fp4mega.kernels.triton.tiles import swap_pairs


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["codes_ptr"])
def _publish_fp4_kernel(
    x_ptr, hidden_ptr, maxima_ptr, codes_ptr, scale_ptr, global_ptr, largest_ptr, operand_ptr, inexact_ptr,
    sxb, sxr, sxh, sxd, rows, rows_padded, heads, per_group, dim, total, ahead,
    NVFP4: tl.constexpr, HIDDEN: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Codes, block scales, FP32 number, largest represented magnitude (times the FP32 number) and scores operand of a tile, and the
    maximum of the same rows `ahead` heads further on; `total` heads in all.

    SWAPPED: rows of the operand, not of the bytes, are at `swap_pairs` of their place. The alignment of `codes_ptr` is kept from the
    compiler so that a thread stores the word that it has made.
    """
    pid, tiles = tl.program_id(0), rows_padded // BLOCK_R
    tile, next_bh = pid % tiles, pid // tiles
    bh = tl.maximum(next_bh - ahead, 0)
    b, h = bh // heads, bh % heads
    first_row = tile * BLOCK_R
    rows_at, cols = first_row + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(
        x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN, WHOLE
    )
    noted = look_ahead(
        x_ptr, hidden_ptr, maxima_ptr, pid, tiles, bh, next_bh, total, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
        HIDDEN, WHOLE,
    )  # fmt: skip
    if next_bh < ahead:
        return
    amax_bits = wait_for_maximum(noted, maxima_ptr + bh * tiles, tiles)
    amax, finite = from_bits(amax_bits), amax_bits < 0x7F800000
    if NVFP4:
        shared = nvfp4_global(amax)
        # The largest value of a head is 6 in a block of scale 448, except where the FP32 number had to be kept finite.
        largest = bits_of(tl.where(amax_bits == 0, 0.0, amax * 0.0 + 2688.0))
        if tile == 0:
            tl.store(global_ptr + bh, shared)
            if not (shared >= 3.4028234663852886e38):
                tl.store(largest_ptr + bh, tl.where(finite, largest, 0x7FC00000))
    else:
        # That of a head's largest value: rceil never rounds another above it.
        head_scale = e8m0_value(rceil_byte(amax_bits))
        rounded = round_magnitude(
            tl.where(amax_bits == 0, 0.0, tl.math.div_rn(amax, head_scale)), 1, 1
        )
        head_largest = tl.where(amax_bits == 0, 0.0, rounded * head_scale)
        shared = power_of_two_scale(head_largest, 8, 7)
        if tile == 0:
            tl.store(largest_ptr + bh, tl.where(finite, bits_of(head_largest), 0x7FC00000))
            tl.store(global_ptr + bh, tl.where(finite, shared, 1.0))
    _publish_fp4_tile(
        x, amax, shared, codes_ptr, scale_ptr, largest_ptr, operand_ptr, inexact_ptr,
        b, h, bh, first_row, cols, rows, rows_padded, heads, per_group, dim, NVFP4, WHOLE, SWAPPED,
    )  # fmt: skip


@triton.jit
def _publish_fp4_tile(
    x, amax, shared, codes_ptr, scale_ptr, largest_ptr, operand_ptr, inexact_ptr,
    b, h, bh, first_row, cols, rows, rows_padded, heads, per_group, dim,
    NVFP4: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """What belongs to the tile x of rows from `first_row` on; `shared` is NVFP4's FP32 number or, for MXFP4, the power of two of the scores operand."""
    BLOCK: tl.constexpr = 16 if NVFP4 else 32
    BLOCK_R: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [BLOCK_R, BLOCK_D // BLOCK, BLOCK])
    if NVFP4:
        # What is not finite makes NaN of the whole head, by its maximum.
        target = sixth(tl.max(tl.abs(blocks), axis=2), amax) * shared
        unit = round_magnitude(tl.minimum(target, 448.0), 3, 7) + shared * 0.0
        scale_code = e4m3_scale_code(unit)
        inverse, rest, signed = split_reciprocal(unit)
        scaled = quotient(
            blocks * shared,
            tl.broadcast_to(tl.expand_dims(inverse, 2), blocks.shape),
            tl.expand_dims(rest, 2),
        )
    else:
        byte = rceil_byte(tl.max(bits_of(blocks) & 0x7FFFFFFF, axis=2))
        scale_code = byte.to(tl.uint8)
        signed = byte != 255
        inverse = from_bits(tl.where(signed, (254 - byte) << 23, 0x7FC00000))
        scaled = blocks * tl.expand_dims(inverse, 2)
        unit = e8m0_value(byte) * shared
    # NaN becomes 6 here, whose code is also NaN's; the block's scale keeps it NaN. A block of scale 0, or NaN, has no signs.
    magnitude = round_magnitude(tl.minimum(tl.abs(scaled), 6.0), 1, 1)
    signs = tl.expand_dims(tl.where(signed, -2147483648, 0), 2)
    element = from_bits(bits_of(magnitude) | (bits_of(blocks) & signs))
    value = tl.reshape(element * tl.expand_dims(unit, 2), [BLOCK_R, BLOCK_D])

    pairs = nibble_pairs(tl.reshape(element, [BLOCK_R, BLOCK_D]))
    # One 64-bit offset a tile; within it 32 bits are enough.
    at, block_at = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D // BLOCK)
    row_index = (b.to(tl.int64) * rows + first_row) * heads + h
    if WHOLE:
        words = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + row_index * (BLOCK_D // 8)
        word_at = at[:, None] * (heads * (BLOCK_D // 8)) + tl.arange(0, BLOCK_D // 8)[None, :]
        tl.store(words + word_at, nibble_words(pairs))
        place = at[:, None] * (heads * (BLOCK_D // BLOCK)) + block_at[None, :]
        tl.store(scale_ptr + row_index * (BLOCK_D // BLOCK) + place, scale_code)
    else:
        inside = (first_row + at < rows)[:, None]
        count, pair_at = (dim + 1) // 2, tl.arange(0, BLOCK_D // 2)
        place = at[:, None] * (heads * count) + pair_at[None, :]
        tl.store(
            codes_ptr + row_index * count + place,
            (pairs >> 18).to(tl.uint8),
            mask=inside & (pair_at < count)[None, :],
        )
        count = (dim + BLOCK - 1) // BLOCK
        place = at[:, None] * (heads * count) + block_at[None, :]
        tl.store(
            scale_ptr + row_index * count + place,
            scale_code,
            mask=inside & (block_at < count)[None, :],
        )

    if SWAPPED:
        # Tiles of whole groups of 32 rows.
        tl.static_assert(BLOCK_R % 32 == 0)
        at = swap_pairs(at)
    operand_at = operand_ptr + (bh.to(tl.int64) * rows_padded + first_row) * BLOCK_D
    operand_at = operand_at + (at[:, None] * BLOCK_D + cols[None, :])
    if NVFP4:
        if shared >= 3.4028234663852886e38:
            tl.atomic_max(largest_ptr + bh, tl.max(bits_of(value) & 0x7FFFFFFF), sem="relaxed")
        tl.store(operand_at, value.to(tl.bfloat16))
    else:
        tl.store(operand_at, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
        _flag_inexact(value, unit, inexact_ptr + bh // per_group)


@triton.jit
def _flag_inexact(value, unit, inexact_at):
    """Raise the flag when E4M3 does not hold one of these values, which are within its range: one that is no multiple of the smallest
    code, as NaN never is. Values are multiples of half of `unit`, so most tiles need no look at them.
    """
    if tl.min((unit >= 0.00390625).to(tl.int32)) == 0:
        steps = value * 512.0
        wrong = (steps + 12582912.0) - 12582912.0 != steps
        if tl.max(wrong.to(tl.int32)) != 0:
            tl.atomic_or(inexact_at, 1, sem="relaxed")


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["codes_ptr"])
def _expand_fp4_kernel(
    codes_ptr, scale_ptr, global_ptr, largest_ptr, operand_ptr, gradient_ptr, power_ptr, inexact_ptr,
    rows, rows_padded, heads, per_group, dim,
    NVFP4: tl.constexpr, SCORES: tl.constexpr, GRADIENT: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Operands from saved bytes. SCORES: `bf16`, `e4m3` or `none`; GRADIENT: also the transposed E4M3 one; GATED: only flagged heads.

    WHOLE, and the alignment of `codes_ptr`: as in `_publish_fp4_kernel`.
    """
    BLOCK: tl.constexpr = 16 if NVFP4 else 32
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    if GATED:  # noqa: SIM102 - a compile-time condition around one at run time
        if tl.load(inexact_ptr + bh // per_group) == 0:
            return
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + rows_by_word(BLOCK_R), tl.arange(0, BLOCK_D)
    row_index = (b.to(tl.int64) * rows + rows_at) * heads + h
    block_at = tl.arange(0, BLOCK_D // BLOCK)
    if WHOLE:
        codes_at = codes_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        word_at = row_index[:, None] * (BLOCK_D // 8) + tl.arange(0, BLOCK_D // 8)[None, :]
        elements = nibbles_of_words(tl.load(codes_at + word_at))
        scale_code = tl.load(
            scale_ptr + row_index[:, None] * (BLOCK_D // BLOCK) + block_at[None, :]
        )
    else:
        inside = (rows_at < rows)[:, None]
        count, pair_at = (dim + 1) // 2, tl.arange(0, BLOCK_D // 2)
        packed = tl.load(
            codes_ptr + row_index[:, None] * count + pair_at[None, :],
            mask=inside & (pair_at < count)[None, :],
            other=0,
        )
        elements = nibbles_of_bytes(packed)
        count = (dim + BLOCK - 1) // BLOCK
        scale_code = tl.load(
            scale_ptr + row_index[:, None] * count + block_at[None, :],
            mask=inside & (block_at < count)[None, :],
            other=0,
        )
    scale_code = scale_code.to(tl.int32)
    scale = e4m3_scale_value(scale_code) if NVFP4 else e8m0_value(scale_code)
    elements = tl.reshape(elements * 8.507059173023462e37, [BLOCK_R, BLOCK_D // BLOCK, BLOCK])
    value = tl.reshape(elements * tl.expand_dims(scale, 2), [BLOCK_R, BLOCK_D])
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
        if NVFP4:
            # Correctly rounded: values lie on ties of E4M3, which a rounding before must not move.
            inverse = tl.math.div_rn(1.0, divisor)
            rough = value * inverse
            remainder = tl.fma(-rough, tl.zeros_like(value) + divisor, value)
            value = tl.fma(remainder, tl.zeros_like(value) + inverse, rough)
        store_fp8(
            value, power, operand_ptr, bh.to(tl.int64) * rows_padded * BLOCK_D, BLOCK_D, rows_padded, BLOCK_D,
            gradient_ptr, bh, tile, rows_at, rows_padded,
            SCORES == "e4m3", GRADIENT, True, 3, 7, BLOCK_R, BLOCK_D,
        )  # fmt: skip
        if SCORES == "e4m3":
            _flag_inexact(value * power, scale * power, inexact_ptr + bh // per_group)


def _fp4_tile(wide: int) -> dict[str, int]:
    """Rows and warps of a program that publishes 4-bit codes: 32 elements a thread."""
    if wide > 128:
        return {"BLOCK_R": 32, "num_warps": 8}
    return {"BLOCK_R": 4096 // wide, "num_warps": 4}


def publish_fp4(
    x: Tensor,
    hidden: Tensor | None,
    *,
    nvfp4: bool,
    inexact: Tensor,
    maxima: Tensor,
    swapped: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """x [B, rows, heads, dim] as NVFP4 or MXFP4 `rceil`.

    Returns the QTensor's tensors (codes, scale, and for NVFP4 the FP32 number [B, 1, heads, 1]), the largest represented magnitude
    float32 [B, heads] (times that number), the scores operand (BF16, or E4M3 for MXFP4) and what divides it, float32 [B, heads].
    `inexact` int32 [B, kv heads] is raised where E4M3 does not hold a head's MXFP4 values; it and `maxima` are from `cleared`. With `swapped`
    the operand's row i is row `swap_pairs(i)` of x.
    """
    batch, rows, heads, dim = x.shape
    block, wide, tall = 16 if nvfp4 else 32, padded_dim(dim), padded_rows(rows)
    new = x.new_empty
    codes = new((batch, rows, heads, -(-dim // 2)), dtype=torch.uint8)
    scale = new((batch, rows, heads, -(-dim // block)), dtype=torch.uint8)
    shared = new((batch, 1, heads, 1), dtype=torch.float32)
    largest = new((batch, heads), dtype=torch.int32)
    if nvfp4:
        largest.zero_()
    operand = new((batch, heads, tall, wide), dtype=torch.bfloat16 if nvfp4 else torch.uint8)
    tile = _fp4_tile(wide)
    total, ahead, programs = maxima_ahead(x, tile["BLOCK_R"])
    _publish_fp4_kernel[programs](
        x, hidden, maxima, codes, scale, shared, largest, operand, inexact,
        *x.stride(), rows, tall, heads, heads // inexact.shape[1], dim, total, ahead,
        NVFP4=nvfp4, HIDDEN=hidden is not None, WHOLE=is_whole(rows, dim, hidden), SWAPPED=swapped, BLOCK_D=wide, **tile,
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
    block_rows, warps = fp8_tile(wide)
    _expand_fp4_kernel[(tall // block_rows * batch * heads,)](
        codes, scale, saved[2] if nvfp4 else None, largest.view(torch.int32), operand, across, power, inexact,
        rows, tall, heads, heads // inexact.shape[1], dim,
        NVFP4=nvfp4, SCORES=scores, GRADIENT=gradient, GATED=gated, WHOLE=is_whole(rows, dim, None),
        BLOCK_R=block_rows, BLOCK_D=wide, num_warps=warps,
    )  # fmt: skip
    if scores == "e4m3":
        assert operand is not None
        operand = operand.view(torch.float8_e4m3fn)
    return operand, None if across is None else across.view(torch.float8_e4m3fn), power
