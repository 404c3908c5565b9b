"""Roundings whose proof rests on the reciprocal of a machine: the same check in the interpreter and on a GPU."""

import numpy as np
import torch
import triton
import triton.language as tl

from fp4mega.formats import E4M3, decode
from fp4mega.kernels.triton.arithmetic import quotient, split_reciprocal

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between E2M1 magnitudes."""


@triton.jit
def _quotients_kernel(x_ptr, scale_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    scale = tl.load(scale_ptr + at, mask=at < count, other=1.0)
    inverse, rest, _ = split_reciprocal(scale)
    tl.store(out_ptr + at, quotient(x, inverse, rest), mask=at < count)


def check_quotients(device: str) -> None:
    """All BF16 numbers of the range by all E4M3 scales, and the float32 numbers at and beside each midpoint's multiple of the scale,
    where a quotient that is off in its last place would fall on the other side.
    """
    scales = decode(torch.arange(1, 127).to(torch.uint8), E4M3, torch.float64).numpy()
    bf16 = (np.arange(0x3A00, 0x4680, dtype=np.uint32) << 16).view(np.float32)
    midpoints = np.array(MIDPOINTS)
    ties = (midpoints[None, :] * scales[:, None]).astype(np.float32)
    assert (ties == midpoints[None, :] * scales[:, None]).all()
    near = [ties]
    for side in (np.float32(np.inf), np.float32(0)):
        beside = ties
        for _ in range(3):
            beside = np.nextafter(beside, side)
            near.append(beside)
    x = np.concatenate([*near, np.broadcast_to(bf16, (len(scales), len(bf16)))], axis=1)
    scale = np.broadcast_to(scales.astype(np.float32)[:, None], x.shape)
    given = torch.from_numpy(np.ascontiguousarray(x).reshape(-1)).to(device)
    by = torch.from_numpy(np.ascontiguousarray(scale).reshape(-1)).to(device)
    got = torch.empty_like(given)
    _quotients_kernel[(-(-len(given) // 16384),)](given, by, got, len(given), BLOCK=16384)
    # Numbers of 24 and 4 bits: no quotient but a midpoint itself is within float64's rounding of one.
    want = given.double() / by.double()
    for midpoint in MIDPOINTS:
        assert torch.equal(got < midpoint, want < midpoint)
        assert torch.equal(got == midpoint, want == midpoint)
