"""Publishers in 8 bits with a power of two a head (see `publish_input`): V in E4M3, transposed, and dO in E5M2 in both orientations, with
what backward needs a number of for each of its rows. Rows of transposed operands lie in the order that `in_operand_order` says.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import (
    fp8_magnitude,
    from_bits,
    power_of_two_scale,
    with_sign,
)
from fp4mega.kernels.triton.packing import (
    fp8_tops,
    rows_by_word,
    words_along_columns,
    words_along_rows,
)
from fp4mega.kernels.triton.publish_input import (
    is_whole,
    load_rows,
    look_ahead,
    maxima_ahead,
    padded_dim,
    padded_rows,
    wait_for_maximum,
)


@triton.jit
def store_fp8(
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
    noted = look_ahead(
        x_ptr, hidden_ptr, maxima_ptr, pid, tiles, bh, next_bh, total, rows_at, cols, rows, heads, dim, sxb, sxr, sxh, sxd,
        HIDDEN, WHOLE,
    )  # fmt: skip
    if next_bh < ahead:
        return
    amax = from_bits(wait_for_maximum(noted, maxima_ptr + bh * tiles, tiles))
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
    store_fp8(
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


def fp8_tile(wide: int) -> tuple[int, int]:
    """Rows and warps of a program that makes a transposed operand: as above, and rows of a word in one thread (`words_along_rows`)."""
    return {32: (128, 4), 64: (64, 4), 128: (64, 8)}.get(wide, (32, 8))


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
    block_rows, warps = fp8_tile(wide)
    total, ahead, programs = maxima_ahead(x, block_rows)
    given = (None,) * 4 if row is None else (row.out, row.dlse, row.lse, row.statistics)
    _publish_fp8_kernel[programs](
        x, hidden, maxima, codes, across, shared, *given, *(terms or (None,) * 3),
        *x.stride(), *strides[:3], rows, tall, codes_rows, codes_cols, heads, dim, total, ahead,
        EMAX=emax, BIAS=bias, TERMS=row is not None,
        REPRESENTED=row is not None and row.statistics is not None, DLSE=row is not None and row.dlse is not None,
        P_EXPONENT=0 if row is None else row.p_exponent,
        HIDDEN=hidden is not None, WHOLE=is_whole(rows, dim, hidden),
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
