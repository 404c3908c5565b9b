"""One long product whose accumulator is emptied into float32 every INTERVAL steps, or never: what the accumulation study runs."""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_K = 64, 64
"""Rows a program owns (one wgmma is 64 high), and the reduced length of one product."""


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, out_ptr, length,
    INTERVAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, BLOCK_N] = a [M, length] b [BLOCK_N, length]^T, both contiguous along the reduced axis.

    `part` stays the accumulator of the matrix unit over INTERVAL / BLOCK_K products: on sm_90 Triton leaves FP8 products in it
    unless told otherwise. `total` is float32 in registers.
    """
    rows_at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols, at = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows_at.to(tl.int64)[:, None] * length + at[None, :]
    b_at = b_ptr + cols.to(tl.int64)[:, None] * length + at[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, length, INTERVAL):
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(start, start + INTERVAL, BLOCK_K):
            part = tl.dot(tl.load(a_at + k), tl.trans(tl.load(b_at + k)), part)
        total += part
    tl.store(out_ptr + rows_at[:, None] * BLOCK_N + cols[None, :], total)


def product(a: Tensor, b: Tensor, interval: int) -> Tensor:
    """float32 a b^T of a [M, L] and b [N, L] (FP8 or BF16, contiguous), accumulated anew every `interval` of the L steps.

    M is a multiple of 64, N a power of two from 16 to 256, L a multiple of `interval`, that one of 64. Raises ValueError otherwise.
    """
    (rows, length), (cols, other) = a.shape, b.shape
    if length != other or rows % BLOCK_M or length % interval or interval % BLOCK_K:
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}, interval={interval}: expected [64 n, L] and [N, L], "
            "L a multiple of the interval, the interval one of 64"
        )
    out = a.new_empty((rows, cols), dtype=torch.float32)
    _product_kernel[(rows // BLOCK_M,)](
        a, b, out, length, INTERVAL=interval, BLOCK_M=BLOCK_M, BLOCK_N=cols, BLOCK_K=BLOCK_K, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
