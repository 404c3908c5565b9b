"""Publishers: kernels that turn strided [B, rows, heads, dim] tensors into saved bytes and into what matrix products read.

Saved bytes are those of `fp4mega.formats.quantize`, bit for bit. An *operand* is head-major [B, heads, rows, dim] (or transposed
[B, heads, dim, rows], because 8-bit products on Hopper want both factors contiguous along the reduced axis), padded with zeros to
whole tiles, and never saved:

- NVFP4 Q, K for scores: element times block scale, at most 6 significant bits, exact in BF16; the FP32 number is left to the product.
- MXFP4 Q, K for scores: E4M3 under one power of two a head. Exact as long as the head's values span no more than E4M3 does; a head for
  which they do raises its `inexact` flag and is computed from the same values in BF16 instead.
- Q, K for gradients: E4M3 with a power of two a head, transposed. V: E4M3 transposed. dO: E5M2 in both orientations. Rows of transposed
  operands lie in the order that `in_operand_order` says.

What is scaled by a head's maximum has to be read twice. One launch does both: a program takes the maximum of its rows some heads further
on, then publishes its rows of a head whose maximum is known, and which is still in the cache.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

from typing import NamedTuple

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
    with_sign,
)
from fp4mega.kernels.triton.packing import (
    fp8_magnitude,
    fp8_tops,
    nibble_pairs,
    nibble_words,
    nibbles_of_bytes,
    nibbles_of_words,
    rows_by_word,
    words_along_columns,
    words_along_rows,
)
from fp4mega.kernels.triton.tiles import swap_pairs

# Publishers do not specialize on `rows`: with rows = 1 known, the zeros of the rows beyond are known too, and
# ptxas 12.8 packs two equal FP8 pairs of a cast into one register wrongly.

TILE = 128
"""Operands are padded to a multiple of this many rows."""


AHEAD_BYTES = 8 << 20
"""Bytes of a tensor whose maxima publishers take before the first of them is needed: what a GPU's cache keeps beside everything else."""


def padded_rows(rows: int) -> int:
    """Rows of an operand: a multiple of the largest kernel tile."""
    return -(-rows // TILE) * TILE


def padded_dim(dim: int) -> int:
    """Columns of an operand: a power of two that an 8-bit product accepts."""
    return max(32, triton.next_power_of_2(dim))


@triton.jit
def load_rows(
    x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """float32 [rows, cols] of one head, zeros outside and where a row is hidden; WHOLE: there is nothing outside, and no row is hidden."""
    base = x_ptr + b.to(tl.int64) * sxb + h.to(tl.int64) * sxh
    pointers = base + (rows_at.to(tl.int64)[:, None] * sxr + cols[None, :] * sxd)
    if WHOLE:
        return tl.load(pointers).to(tl.float32)
    live = rows_at < rows
    if HIDDEN:
        hidden = tl.load(hidden_ptr + b.to(tl.int64) * rows + rows_at, mask=live, other=1)
        live = live & (hidden == 0)
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
    tl.atomic_max(amax_ptr + bh, tl.max(bits_of(x) & 0x7FFFFFFF), sem="relaxed")


@triton.jit
def _note_maximum(
    x_ptr, hidden_ptr, maxima_at, bh, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of the tile at `rows_at` as int32 bits under a sign bit that says it is there."""
    # As many as a thread loads at once.
    WIDE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    b, h = bh // heads, bh % heads
    x = load_rows(
        x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN, WHOLE
    )
    magnitude = bits_of(x) & 0x7FFFFFFF
    few = tl.reshape(magnitude, [rows_at.shape[0], cols.shape[0] // WIDE, WIDE])
    tl.store(maxima_at, tl.max(tl.max(few, axis=2)) | -2147483648)


@triton.jit
def _noted_maxima(maxima_at, first, tiles):
    """What `_note_maximum` has stored by now for 256 of a head's tiles: negative where it has, zeros of a head without them included."""
    at = first + tl.arange(0, 256)
    return tl.load(maxima_at + at, mask=at < tiles, other=-2147483648, volatile=True)


@triton.jit
def _wait_for_maximum(noted, maxima_at, tiles):
    """int32 bits of the largest magnitude of a head's tiles, once every one of them has been noted; `noted` is a first look at them.

    A word says by itself that it is there, so nothing has to be ordered. Those who note it have lower numbers than those who wait, and
    programs start in the order of their numbers.
    """
    while tl.max(noted, axis=0) >= 0:
        noted = _noted_maxima(maxima_at, 0, tiles)
    largest = tl.max(noted & 0x7FFFFFFF, axis=0)
    for first in range(256, tiles, 256):
        noted = _noted_maxima(maxima_at, first, tiles)
        while tl.max(noted, axis=0) >= 0:
            noted = _noted_maxima(maxima_at, first, tiles)
        largest = tl.maximum(largest, tl.max(noted & 0x7FFFFFFF, axis=0))
    return largest


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
    maxima_at = maxima_ptr + bh * tiles
    noted = _noted_maxima(maxima_at, 0, tiles)
    if next_bh < total:
        _note_maximum(
            x_ptr, hidden_ptr, maxima_ptr + pid, next_bh, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
            HIDDEN, WHOLE,
        )  # fmt: skip
    if next_bh < ahead:
        return
    amax_bits = _wait_for_maximum(noted, maxima_at, tiles)
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
        _store_fp8(
            value, power, operand_ptr, bh.to(tl.int64) * rows_padded * BLOCK_D, BLOCK_D, rows_padded, BLOCK_D,
            gradient_ptr, bh, tile, rows_at, rows_padded,
            SCORES == "e4m3", GRADIENT, True, 3, 7, BLOCK_R, BLOCK_D,
        )  # fmt: skip
        if SCORES == "e4m3":
            _flag_inexact(value * power, scale * power, inexact_ptr + bh // per_group)


@triton.jit
def _store_fp8(
    x, power, straight_ptr, straight_at, stride, straight_rows, straight_cols, across_ptr, bh, tile, rows_at, rows_padded,
    STRAIGHT: tl.constexpr, ACROSS: tl.constexpr, WHOLE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """FP8 codes of x times a power of two, which is NaN for a head that is: all of its codes are. Straight and transposed.

    Rows of x are those of `rows_by_word`. WHOLE: rows of the straight ones are whole words and all there.
    """
    finite = power == power
    by_row = tl.zeros([BLOCK_R, BLOCK_D // 4], tl.uint32)
    by_column = tl.zeros([BLOCK_R // 4, BLOCK_D], tl.uint32)
    tops = tl.zeros([BLOCK_R, BLOCK_D], tl.uint32)
    # Once around. What leaves a `while` is not computed a second time for a second layout, as triton does with all else that two stores want.
    again = True
    while again:
        magnitude = fp8_magnitude(x, tl.where(finite, power, 1.0), MANTISSA, BIAS)
        tops = fp8_tops(magnitude, x, MANTISSA, BIAS)
        by_row = words_along_columns(tops)
        by_column = words_along_rows(tops)
        again = False
    keep = tl.where(finite, -1, 0).to(tl.uint32, bitcast=True)
    fill = tl.where(finite, 0, 0x7F7F7F7F).to(tl.uint32)
    if STRAIGHT:
        if WHOLE:
            at = (straight_ptr + straight_at).to(tl.pointer_type(tl.uint32), bitcast=True)
            at = at + rows_at.to(tl.int64)[:, None] * (stride // 4)
            tl.store(at + tl.arange(0, BLOCK_D // 4)[None, :], (by_row & keep) | fill)
        else:
            cols = tl.arange(0, BLOCK_D)
            at = straight_ptr + straight_at + rows_at.to(tl.int64)[:, None] * stride
            tl.store(
                at + cols[None, :],
                (((tops >> 24) & keep) | (fill & 0xFF)).to(tl.uint8),
                mask=(rows_at < straight_rows)[:, None] & (cols < straight_cols)[None, :],
            )
    if ACROSS:
        line = bh.to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
        word_at = tile * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)
        at = across_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        at = at + line[:, None] * (rows_padded // 4) + word_at[None, :]
        tl.store(at, tl.trans((by_column & keep) | fill))


@triton.jit(do_not_specialize=["rows"])
def _publish_fp8_kernel(
    x_ptr, hidden_ptr, maxima_ptr, codes_ptr, across_ptr, power_ptr,
    out_ptr, dlse_ptr, lse_ptr, statistics_ptr, shift_ptr, inverse_ptr, r_ptr,
    sxb, sxr, sxh, sxd, scb, scr, sch, rows, rows_padded, codes_rows, codes_cols, heads, dim, total, ahead,
    EMAX: tl.constexpr, BIAS: tl.constexpr,
    TERMS: tl.constexpr, REPRESENTED: tl.constexpr, DLSE: tl.constexpr, P_EXPONENT: tl.constexpr,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """FP8 codes with a power of two a head: [rows, dim] into `codes` (any strides) and transposed into the operand `across`; and the
    maximum of the same tile `ahead` heads further on. TERMS: x is dO, and the row terms of the published one are stored as well.
    """
    pid, tiles = tl.program_id(0), rows_padded // BLOCK_R
    tile, next_bh = pid % tiles, pid // tiles
    bh = tl.maximum(next_bh - ahead, 0)
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + rows_by_word(BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(
        x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN, WHOLE
    )
    if TERMS:
        out = _load_out(out_ptr, b, h, rows_at, cols, rows, heads, dim, WHOLE, BLOCK_D)
    maxima_at = maxima_ptr + bh * tiles
    noted = _noted_maxima(maxima_at, 0, tiles)
    if next_bh < total:
        _note_maximum(
            x_ptr, hidden_ptr, maxima_ptr + pid, next_bh, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
            HIDDEN, WHOLE,
        )  # fmt: skip
    if next_bh < ahead:
        return
    amax = from_bits(_wait_for_maximum(noted, maxima_at, tiles))
    power = power_of_two_scale(amax, EMAX, BIAS)
    if tile == 0:
        tl.store(power_ptr + bh, power)
    MANTISSA: tl.constexpr = 3 if EMAX == 8 else 2
    if TERMS:
        magnitude = fp8_magnitude(x, tl.where(power == power, power, 1.0), MANTISSA, BIAS)
        do = with_sign(magnitude, x) * tl.math.div_rn(tl.full([1], 1.0, tl.float32), power)
        _store_row_terms(
            tl.sum(out * do, axis=1), dlse_ptr, lse_ptr, statistics_ptr, shift_ptr, inverse_ptr, r_ptr,
            bh, rows_at, rows, rows_padded, total, REPRESENTED, DLSE, P_EXPONENT,
        )  # fmt: skip
    _store_fp8(
        x, power, codes_ptr, b.to(tl.int64) * scb + h.to(tl.int64) * sch, scr, codes_rows, codes_cols,
        across_ptr, bh, tile, rows_at, rows_padded,
        True, True, WHOLE, MANTISSA, BIAS, BLOCK_R, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _load_out(
    out_ptr, b, h, rows_at, cols, rows, heads, dim, WHOLE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """float32 rows of the contiguous [B, rows, heads, dim] output, zeros outside."""
    row_index = (b.to(tl.int64) * rows + rows_at) * heads + h
    if WHOLE:
        return tl.load(out_ptr + row_index[:, None] * BLOCK_D + cols[None, :]).to(tl.float32)
    return tl.load(
        out_ptr + row_index[:, None] * dim + cols[None, :],
        mask=(rows_at < rows)[:, None] & (cols < dim)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _store_row_terms(
    r, dlse_ptr, lse_ptr, statistics_ptr, shift_ptr, inverse_ptr, r_ptr, bh, rows_at, rows, rows_padded, total,
    REPRESENTED: tl.constexpr, DLSE: tl.constexpr, P_EXPONENT: tl.constexpr,
):  # fmt: skip
    """What backward needs a number of for each row: r = rowsum(out * dO) - dlse, and how 2^z becomes P.

    2^P_EXPONENT P = 2^(z - shift) * inverse, and r is stored over 2^P_EXPONENT, so that P (dP - r) keeps its worth; rows that see nothing,
    and padding, have shift +inf, so their P is 0 without a mask.
    """
    live = rows_at < rows
    row = bh.to(tl.int64) * rows + rows_at
    if DLSE:
        r = r - tl.load(dlse_ptr + row, mask=live, other=0.0).to(tl.float32)
    padded = bh.to(tl.int64) * rows_padded + rows_at
    tl.store(r_ptr + padded, r * 2.0**-P_EXPONENT)
    if REPRESENTED:
        top = tl.load(statistics_ptr + row, mask=live, other=0.0)
        sums = tl.load(statistics_ptr + tl.cast(total, tl.int64) * rows + row, mask=live, other=0.0)
        seen = sums != 0
        tl.store(shift_ptr + padded, tl.where(seen, top - P_EXPONENT, float("inf")))
        inverse = tl.math.div_rn(tl.full(sums.shape, 1.0, tl.float32), tl.where(seen, sums, 1.0))
        tl.store(inverse_ptr + padded, tl.where(seen, inverse, 0.0))
    else:
        lse = tl.load(lse_ptr + row, mask=live, other=float("-inf"))
        tl.store(
            shift_ptr + padded,
            tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634 - P_EXPONENT),
        )


@triton.jit
def _row_terms_kernel(
    out_ptr, dout_ptr, dlse_ptr, lse_ptr, statistics_ptr, shift_ptr, inverse_ptr, r_ptr,
    sdb, sdr, sdh, sdd, rows, rows_padded, heads, dim, total,
    REPRESENTED: tl.constexpr, DLSE: tl.constexpr, P_EXPONENT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row terms, see `_store_row_terms`, of dO in BF16."""
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    out = _load_out(out_ptr, b, h, rows_at, cols, rows, heads, dim, False, BLOCK_D)
    do = load_rows(dout_ptr, dout_ptr, b, h, rows_at, cols, rows, dim, sdb, sdr, sdh, sdd, False)
    do = do.to(tl.bfloat16).to(tl.float32)
    _store_row_terms(
        tl.sum(out * do, axis=1), dlse_ptr, lse_ptr, statistics_ptr, shift_ptr, inverse_ptr, r_ptr,
        bh, rows_at, rows, rows_padded, total, REPRESENTED, DLSE, P_EXPONENT,
    )  # fmt: skip


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


def _whole(rows: int, dim: int, hidden: Tensor | None) -> bool:
    """Nothing of an operand is padding, and nothing is hidden."""
    return hidden is None and rows == padded_rows(rows) and dim == padded_dim(dim)


def _ahead(x: Tensor, block_rows: int) -> tuple[int, int, tuple[int]]:
    """Heads in all, how many of them the maxima run ahead of what is published, and programs for both, head by head."""
    batch, rows, heads, dim = x.shape
    total = batch * heads
    ahead = max(1, min(total, AHEAD_BYTES // (rows * dim * x.element_size())))
    return total, ahead, (padded_rows(rows) // block_rows * (total + ahead),)


def cleared(flags: tuple[int, int], *tensors: Tensor) -> list[Tensor]:
    """int32 zeros in one fill: a matrix of flags, and for each tensor [B, rows, heads, dim] what its publisher notes maxima in."""
    # Publishers' tiles have at least 16 rows.
    tiles = [padded_rows(x.shape[1]) // 16 * x.shape[0] * x.shape[2] for x in tensors]
    # Each part begins where a compiler of kernels takes it for aligned.
    sizes = [-(-n // 4) * 4 for n in (flags[0] * flags[1], *tiles)]
    words = torch.zeros(sum(sizes), dtype=torch.int32, device=tensors[0].device)
    first, *rest = words.split(sizes)
    return [first[: flags[0] * flags[1]].view(flags), *rest]


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
    total, ahead, programs = _ahead(x, tile["BLOCK_R"])
    _publish_fp4_kernel[programs](
        x, hidden, maxima, codes, scale, shared, largest, operand, inexact,
        *x.stride(), rows, tall, heads, heads // inexact.shape[1], dim, total, ahead,
        NVFP4=nvfp4, HIDDEN=hidden is not None, WHOLE=_whole(rows, dim, hidden), SWAPPED=swapped, BLOCK_D=wide, **tile,
    )  # fmt: skip
    saved = [codes, scale, shared] if nvfp4 else [codes, scale]
    operand = operand if nvfp4 else operand.view(torch.float8_e4m3fn)
    return saved, largest.view(torch.float32), operand, shared.view(batch, heads)


def _fp4_tile(wide: int) -> dict[str, int]:
    """Rows and warps of a program that publishes 4-bit codes: 32 elements a thread."""
    if wide > 128:
        return {"BLOCK_R": 32, "num_warps": 8}
    return {"BLOCK_R": 4096 // wide, "num_warps": 4}


def _fp8_tile(wide: int) -> tuple[int, int]:
    """Rows and warps of a program that makes a transposed operand: as above, and rows of a word in one thread (`words_along_rows`)."""
    return {32: (128, 4), 64: (64, 4), 128: (64, 8)}.get(wide, (32, 8))


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
    block_rows, warps = _fp8_tile(wide)
    _expand_fp4_kernel[(tall // block_rows * batch * heads,)](
        codes, scale, saved[2] if nvfp4 else None, largest.view(torch.int32), operand, across, power, inexact,
        rows, tall, heads, heads // inexact.shape[1], dim,
        NVFP4=nvfp4, SCORES=scores, GRADIENT=gradient, GATED=gated, WHOLE=_whole(rows, dim, None),
        BLOCK_R=block_rows, BLOCK_D=wide, num_warps=warps,
    )  # fmt: skip
    if scores == "e4m3":
        assert operand is not None
        operand = operand.view(torch.float8_e4m3fn)
    return operand, None if across is None else across.view(torch.float8_e4m3fn), power


def publish_v(v: Tensor, hidden: Tensor | None, maxima: Tensor) -> tuple[list[Tensor], Tensor]:
    """V [B, T, G, Dv] as E4M3: the QTensor's tensors (codes, FP32 power of two [B, 1, G, 1]) and the transposed operand."""
    codes = v.new_empty(v.shape, dtype=torch.uint8)
    shared, across = _publish_fp8(
        v, hidden, maxima, codes, codes.stride(), v.shape[1], v.shape[3], "e4m3"
    )
    return [codes, shared.view(v.shape[0], 1, v.shape[2], 1)], across.view(torch.float8_e4m3fn)


class Rows(NamedTuple):
    """What the terms of each row are made of, beside dO: output [B, S, H, Dv], contiguous; dlse and lse [B, H, S]; statistics [2, B, H, S]."""

    out: Tensor
    dlse: Tensor | None
    lse: Tensor
    statistics: Tensor | None
    p_exponent: int

    def unwritten(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for shift, inverse and r, float32 [B, H, padded rows]."""
        batch, rows, heads, _ = self.out.shape
        tall = padded_rows(rows)
        shift, inverse, r = (self.lse.new_empty((batch, heads, tall)) for _ in range(3))
        return shift, inverse, r


def publish_dout(
    dout: Tensor, maxima: Tensor, rows: Rows
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """dO [B, S, H, Dv] as E5M2 operands [B, H, rows, dim] and transposed, the power of two [B, H], and the row terms of what it became:
    shift, inverse and r, float32 [B, H, padded rows], see `_store_row_terms`. `maxima` is from `cleared`.
    """
    batch, seqlen, heads, _ = dout.shape
    tall, wide = padded_rows(seqlen), padded_dim(dout.shape[3])
    codes = dout.new_empty((batch, heads, tall, wide), dtype=torch.uint8)
    strides = (codes.stride(0), codes.stride(2), codes.stride(1))
    terms = rows.unwritten()
    shared, across = _publish_fp8(
        dout, None, maxima, codes, strides, tall, wide, "e5m2", rows, terms
    )
    return codes.view(torch.float8_e5m2), across.view(torch.float8_e5m2), shared, terms


def _publish_fp8(
    x: Tensor, hidden: Tensor | None, maxima: Tensor, codes: Tensor, strides: tuple[int, ...], codes_rows: int, codes_cols: int, element: str,
    row: Rows | None = None, terms: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, rows, heads, dim = x.shape
    tall, wide = padded_rows(rows), padded_dim(dim)
    across = x.new_empty((batch, heads, wide, tall), dtype=torch.uint8)
    shared = x.new_empty((batch, heads), dtype=torch.float32)
    emax, bias = (8, 7) if element == "e4m3" else (15, 15)
    block_rows, warps = _fp8_tile(wide)
    total, ahead, programs = _ahead(x, block_rows)
    given = (None,) * 4 if row is None else (row.out, row.dlse, row.lse, row.statistics)
    _publish_fp8_kernel[programs](
        x, hidden, maxima, codes, across, shared, *given, *(terms or (None,) * 3),
        *x.stride(), *strides[:3], rows, tall, codes_rows, codes_cols, heads, dim, total, ahead,
        EMAX=emax, BIAS=bias, TERMS=row is not None,
        REPRESENTED=row is not None and row.statistics is not None, DLSE=row is not None and row.dlse is not None,
        P_EXPONENT=0 if row is None else row.p_exponent,
        HIDDEN=hidden is not None, WHOLE=_whole(rows, dim, hidden),
        BLOCK_R=block_rows, BLOCK_D=wide, num_warps=warps,
    )  # fmt: skip
    return shared, across


def row_terms(dout: Tensor, given: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """shift, inverse and r, float32 [B, H, padded rows], of dO in BF16: see `_store_row_terms`."""
    batch, rows, heads, dim = given.out.shape
    tall = padded_rows(rows)
    terms = given.unwritten()
    _row_terms_kernel[(tall // 32 * batch * heads,)](
        given.out, dout, given.dlse, given.lse, given.statistics, *terms,
        *dout.stride(), rows, tall, heads, dim, batch * heads,
        REPRESENTED=given.statistics is not None, DLSE=given.dlse is not None, P_EXPONENT=given.p_exponent,
        BLOCK_R=32, BLOCK_D=padded_dim(dim), num_warps=4,
    )  # fmt: skip
    return terms
