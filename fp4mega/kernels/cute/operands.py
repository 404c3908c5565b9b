"""Operands in the two layouts that they are needed in: the reference's bytes, which are saved, and the tensor core's.

Written with torch operations. They define what the publishing kernels write, and serve wherever those do not exist.

Letters: B batch, S rows, T keys, H heads, D dim; atoms and their order as in `fp4mega.formats.scale_layout`.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fp4mega.attention.operand import Operand
from fp4mega.attention.represent import encode_operand
from fp4mega.formats.scale_layout import ATOM_ROWS, ATOM_SCALES
from fp4mega.kernels.cute.config import TILE_N


class Published(NamedTuple):
    """One operand. `saved`: what the reference saves. `codes`, `scales`, `shared`: what a kernel reads."""

    saved: tuple[Tensor, ...]
    codes: Tensor
    scales: Tensor
    """Block scales in tensor-core order, uint8; `shared` again where the format has none."""
    shared: Tensor
    """Float32 that values are divided by, a number for each batch entry and head; a placeholder where there is none."""


def publish_rows(name: str, operand: Operand, x: Tensor) -> Published:
    """Q or K [B, S, H, D]: codes [B, S, H, D / 2], scales [B, H, ceil(S / 128), atoms, 512]."""
    saved = encode_operand(name, operand, x, None).tensors()
    scales = scale_atoms(saved[1].transpose(1, 2))
    shared = saved[2] if len(saved) == 3 else scales
    return Published(saved, saved[0], scales, shared)


def publish_values(operand: Operand, v: Tensor) -> Published:
    """V [B, T, G, Dv] in E4M3, as it is, and one scale a head."""
    codes, shared = encode_operand("v", operand, v, None).tensors()
    return Published((codes, shared), codes, shared, shared)


def publish_transposed_values(operand: Operand, v: Tensor) -> Published:
    """V [B, T, G, Dv] in MXFP4 along keys: codes [B, G, Dv, tiles * 64], scales [B, G, tiles, 512], tiles of 128 keys.

    4-bit operands of the tensor core must be contiguous along the reduced axis, which is that of the keys.
    """
    codes, scale = encode_operand("v", operand, v, None).tensors()
    tiles = -(-v.shape[1] // TILE_N)
    codes_t = _pad_dim1(codes, tiles * TILE_N // 2).permute(0, 2, 3, 1).contiguous()
    blocks = _pad_dim1(scale, tiles * ATOM_SCALES).unflatten(1, (tiles, ATOM_SCALES))
    # [B, tiles, 4, G, Dv] to [B, G, tiles, Dv, 4]: one atom a tile.
    scales_t = scale_atoms(blocks.permute(0, 3, 1, 4, 2)).flatten(2, 4)
    return Published((codes, scale), codes_t, scales_t, scales_t)


def scale_atoms(scale: Tensor) -> Tensor:
    """Block scales [..., rows, k] (one byte each) to [..., ceil(rows / 128), ceil(k / 4), 512]; padding is zero."""
    rows, k = scale.shape[-2:]
    padded = F.pad(scale, (0, -k % ATOM_SCALES, 0, -rows % ATOM_ROWS))
    split = padded.unflatten(-1, (-1, ATOM_SCALES)).unflatten(-3, (-1, 4, 32))
    # [..., tile, quarter, lane, j, k % 4] to [..., tile, j, lane, quarter, k % 4]
    order = [*range(scale.ndim - 2), *(scale.ndim - 2 + d for d in (0, 3, 2, 1, 4))]
    return split.permute(order).flatten(-3).contiguous()


def _pad_dim1(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))
