"""Publishers of V for products in BF16, which holds E4M3 and MXFP4 values exactly: saved bytes and the operand [B, heads, rows, dim].

`amplitude` values are a sixth of E2M1 times a power of two; their operand is 6/8 of them, which is exact.

MXFP4 V has its blocks along the keys, 32 of one column, because keys are what P V reduces. Saved bytes are those of
`fp4mega.formats.quantize`, bit for bit; where backward reads another V than forward, the bytes are those of backward's.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4mega.kernels.triton.arithmetic import (
    amplitude_byte,
    bits_of,
    e2m1_code,
    e2m1_value,
    e8m0_value,
    fp8_code,
    from_bits,
    power_of_two_scale,
    rceil_byte,
    round_magnitude,
    sign_for,
    with_sign,
)
from fp4mega.kernels.triton.publish_input import head_amax, load_rows, padded_dim, padded_rows
from fp4mega.kernels.triton.tiles import swap_pairs

BLOCK = 32
"""Keys of an MXFP4 block."""


@triton.jit(do_not_specialize=["rows"])
def _publish_values_kernel(
    x_ptr, hidden_ptr, amax_ptr, codes_ptr, scale_ptr, power_ptr, operand_ptr,
    sxb, sxr, sxh, sxd, rows, rows_padded, heads, dim,
    FORMAT: tl.constexpr, SAVED: tl.constexpr, HIDDEN: tl.constexpr, POWER: tl.constexpr, SWAPPED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of V: the operand in FORMAT (`mxfp4`, `amplitude`, or `e4m3` times its power of two), and the bytes in SAVED.

    POWER: `amplitude` values are brought near 1 by a power of two a head. SWAPPED: rows of the operand are at `swap_pairs` of their place.
    """
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    rows_at, cols = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, hidden_ptr, b, h, rows_at, cols, rows, dim, sxb, sxr, sxh, sxd, HIDDEN)
    slots = swap_pairs(rows_at) if SWAPPED else rows_at
    at = operand_ptr + (bh.to(tl.int64) * rows_padded + slots)[:, None] * BLOCK_D + cols[None, :]
    row_index = (b.to(tl.int64) * rows + rows_at) * heads + h
    if FORMAT != "e4m3":
        blocks = tl.reshape(x, [BLOCK_R // 32, 32, BLOCK_D])
        largest = tl.max(bits_of(blocks) & 0x7FFFFFFF, axis=1)
        byte = amplitude_byte(largest) if FORMAT == "amplitude" else rceil_byte(largest)
        # 2^(127 - byte); that of 254 is below the normal numbers.
        inverse_bits = tl.where(byte == 254, 0x00400000, (254 - byte) << 23)
        inverse = from_bits(tl.where(byte == 255, 0x7FC00000, inverse_bits))
        scaled = blocks * tl.expand_dims(inverse, 1)
        unit = e8m0_value(byte)
        if FORMAT == "amplitude":
            scaled = scaled * 6.0
            unit = unit * 0.125
            if POWER:
                power = power_of_two_scale(from_bits(tl.load(amax_ptr + bh)), 1, 7)
                # What is not finite stays in its own block.
                power = tl.where(power == power, power, 1.0)
                if tile == 0:
                    tl.store(power_ptr + bh, power)
                unit = unit * power
        # NaN becomes 6 here, whose code is also NaN's; the block's scale keeps it NaN.
        magnitude = round_magnitude(tl.minimum(tl.abs(scaled), 6.0), 1, 1)
        value = with_sign(magnitude, scaled) * tl.expand_dims(unit, 1)
        tl.store(at, tl.reshape(value, [BLOCK_R, BLOCK_D]).to(tl.bfloat16))
        if SAVED != "e4m3":
            code = (e2m1_code(magnitude) | sign_for(scaled, 4)).to(tl.uint8)
            pairs = tl.permute(tl.reshape(code, [BLOCK_R // 2, 2, BLOCK_D]), (0, 2, 1))
            low, high = tl.split(pairs)
            half = (rows + 1) // 2
            pair_at = tile * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
            pair_index = (b.to(tl.int64) * half + pair_at) * heads + h
            keep = (pair_at < half)[:, None] & (cols < dim)[None, :]
            tl.store(
                codes_ptr + pair_index[:, None] * dim + cols[None, :], low | (high << 4), mask=keep
            )
            count = (rows + 31) // 32
            block_at = tile * (BLOCK_R // 32) + tl.arange(0, BLOCK_R // 32)
            block_index = (b.to(tl.int64) * count + block_at) * heads + h
            keep = (block_at < count)[:, None] & (cols < dim)[None, :]
            tl.store(
                scale_ptr + block_index[:, None] * dim + cols[None, :], byte.to(tl.uint8), mask=keep
            )
    if SAVED == "e4m3":
        power = power_of_two_scale(from_bits(tl.load(amax_ptr + bh)), 8, 7)
        if tile == 0:
            tl.store(power_ptr + bh, power)
        if FORMAT == "e4m3":
            rounded = with_sign(round_magnitude(tl.abs(x * power), 3, 7), x)
            tl.store(at, rounded.to(tl.bfloat16))
        code = fp8_code(x, power, 3, 7).to(tl.uint8)
        keep = (rows_at < rows)[:, None] & (cols < dim)[None, :]
        tl.store(codes_ptr + row_index[:, None] * dim + cols[None, :], code, mask=keep)


@triton.jit(do_not_specialize=["rows"])
def _expand_values_kernel(
    codes_ptr, scale_ptr, operand_ptr, rows, rows_padded, heads, dim,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the operand from saved MXFP4 bytes."""
    pid = tl.program_id(0)
    tiles = rows_padded // BLOCK_R
    tile, bh = pid % tiles, pid // tiles
    b, h = bh // heads, bh % heads
    cols = tl.arange(0, BLOCK_D)
    half = (rows + 1) // 2
    pair_at = tile * (BLOCK_R // 2) + tl.arange(0, BLOCK_R // 2)
    pair_index = (b.to(tl.int64) * half + pair_at) * heads + h
    packed = tl.load(
        codes_ptr + pair_index[:, None] * dim + cols[None, :],
        mask=(pair_at < half)[:, None] & (cols < dim)[None, :],
        other=0,
    ).to(tl.int32)
    pairs = tl.join(e2m1_value(packed & 15), e2m1_value(packed >> 4))
    elements = tl.reshape(tl.permute(pairs, (0, 2, 1)), [BLOCK_R // 32, 32, BLOCK_D])
    count = (rows + 31) // 32
    block_at = tile * (BLOCK_R // 32) + tl.arange(0, BLOCK_R // 32)
    block_index = (b.to(tl.int64) * count + block_at) * heads + h
    byte = tl.load(
        scale_ptr + block_index[:, None] * dim + cols[None, :],
        mask=(block_at < count)[:, None] & (cols < dim)[None, :],
        other=0,
    ).to(tl.int32)
    value = tl.reshape(elements * tl.expand_dims(e8m0_value(byte), 1), [BLOCK_R, BLOCK_D])
    rows_at = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    at = operand_ptr + (bh.to(tl.int64) * rows_padded + rows_at)[:, None] * BLOCK_D + cols[None, :]
    tl.store(at, value.to(tl.bfloat16))


def _block_rows(wide: int) -> int:
    return 64 if wide <= 128 else 32


def publish_values(
    v: Tensor,
    hidden: Tensor | None,
    *,
    forward: str,
    saved: str,
    power_a_head: bool = False,
    swapped: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """V [B, T, G, Dv]: the saved bytes in format `saved`, the BF16 operand of values in `forward`, what divides it float32 [B, G].

    Formats are `mxfp4`, `amplitude`, and `e4m3` (a power of two a head); `e4m3` in forward is saved as it is. With `power_a_head` the
    operand of `amplitude` values is near 1. With `swapped` the operand's row i is row `swap_pairs(i)` of v.
    """
    assert saved in ("e4m3", forward)
    batch, rows, heads, dim = v.shape
    wide, tall, block_rows = padded_dim(dim), padded_rows(rows), _block_rows(padded_dim(dim))
    operand = v.new_empty((batch, heads, tall, wide), dtype=torch.bfloat16)
    power = torch.ones((batch, heads), dtype=torch.float32, device=v.device)
    if saved != "e4m3":
        codes = v.new_empty((batch, -(-rows // 2), heads, dim), dtype=torch.uint8)
        scale = v.new_empty((batch, -(-rows // BLOCK), heads, dim), dtype=torch.uint8)
        amax, bytes_ = head_amax(v, hidden) if power_a_head else None, [codes, scale]
    else:
        codes, scale = v.new_empty(v.shape, dtype=torch.uint8), None
        amax, bytes_ = head_amax(v, hidden), [codes, power.view(batch, 1, heads, 1)]
    _publish_values_kernel[(tall // block_rows * batch * heads,)](
        v, hidden, amax, codes, scale, power, operand, *v.stride(), rows, tall, heads, dim,
        FORMAT=forward, SAVED=saved, HIDDEN=hidden is not None, POWER=power_a_head, SWAPPED=swapped,
        BLOCK_R=block_rows, BLOCK_D=wide, num_warps=4,
    )  # fmt: skip
    scaled = forward == "e4m3" or power_a_head
    return bytes_, operand, power if scaled else torch.ones_like(power)


def expand_values(saved: list[Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """The BF16 operand [B, G, padded rows, padded dim] from MXFP4 bytes of `publish_values`, and what divides it: ones [B, G]."""
    codes, scale = saved
    batch, _, heads, dim = codes.shape
    wide, tall, block_rows = padded_dim(dim), padded_rows(rows), _block_rows(padded_dim(dim))
    operand = codes.new_empty((batch, heads, tall, wide), dtype=torch.bfloat16)
    _expand_values_kernel[(tall // block_rows * batch * heads,)](
        codes, scale, operand, rows, tall, heads, dim, BLOCK_R=block_rows, BLOCK_D=wide, num_warps=4,
    )  # fmt: skip
    return operand, torch.ones((batch, heads), dtype=torch.float32, device=codes.device)
