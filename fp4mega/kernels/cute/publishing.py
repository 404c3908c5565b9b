"""Host side of the publishers: outputs are allocated, kernels launched. Results are those of `operands`, bit for bit. Needs no CUTLASS."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4mega.attention.operand import Operand
from fp4mega.attention.represent import operand_spec
from fp4mega.formats.scale_layout import ATOM_SCALES
from fp4mega.kernels.cute.config import SCALE_ATOM, TILE_N, KernelConfig, PublishConfig
from fp4mega.kernels.cute.operands import Published

Launcher = Callable[[KernelConfig, Sequence[Tensor], Sequence[int | float]], None]
"""Runs one kernel on tensors and numbers in the order of its host function's arguments."""
_ALIGNMENT = 16


def publish_rows(name: str, operand: Operand, x: Tensor, launch: Launcher) -> Published:
    """As `operands.publish_rows`, from BF16 x [B, S, H, D] of any strides."""
    x = loadable(x)
    saved = _outputs(name, operand, x)
    batch, rows, heads, dim = x.shape
    nvfp4 = operand.format == "nvfp4"
    columns = -(-saved[1].shape[3] // ATOM_SCALES)
    # Zeros for scales that no block has, where their number is no multiple of four.
    atoms = x.new_zeros((batch, heads, -(-rows // TILE_N), columns, SCALE_ATOM), dtype=torch.uint8)
    amax = _amax(x, launch) if nvfp4 else x.new_empty((batch, heads), dtype=torch.int32)
    shared = saved[2] if nvfp4 else amax
    launch(PublishConfig("rows", dim, nvfp4), (x, amax, *saved[:2], shared, atoms), _numbers(x))
    return Published(saved, saved[0], atoms, shared)


def publish_values(operand: Operand, v: Tensor, launch: Launcher) -> Published:
    """As `operands.publish_values`, from BF16 v [B, T, G, Dv] of any strides."""
    v = loadable(v)
    codes, shared = _outputs("v", operand, v)
    launch(PublishConfig("values", v.shape[3]), (v, _amax(v, launch), codes, shared), _numbers(v))
    return Published((codes, shared), codes, shared, shared)


def publish_transposed_values(operand: Operand, v: Tensor, launch: Launcher) -> Published:
    """As `operands.publish_transposed_values`, from BF16 v [B, T, G, Dv] of any strides."""
    v = loadable(v)
    codes, scale = _outputs("v", operand, v)
    batch, keys, groups, dim = v.shape
    tiles = -(-keys // TILE_N)
    codes_t = v.new_empty((batch, groups, dim, tiles * TILE_N // 2), dtype=torch.uint8)
    atoms = v.new_empty((batch, groups, tiles, SCALE_ATOM), dtype=torch.uint8)
    launch(PublishConfig("transposed", dim), (v, codes, scale, codes_t, atoms), _numbers(v))
    return Published((codes, scale), codes_t, atoms, atoms)


def loadable(x: Tensor) -> Tensor:
    """x itself when 16-byte loads along its last dim can read it, otherwise a contiguous copy."""
    fits = x.stride(3) == 1 and all(s % 8 == 0 for s in x.stride()[:3])
    return x if fits and x.data_ptr() % _ALIGNMENT == 0 else x.contiguous()


def _amax(x: Tensor, launch: Launcher) -> Tensor:
    """int32 [B, H]: float32 bits of the largest magnitude of every head."""
    amax = torch.zeros((x.shape[0], x.shape[2]), dtype=torch.int32, device=x.device)
    launch(PublishConfig("amax", x.shape[3]), (x, amax), _numbers(x))
    return amax


def _outputs(name: str, operand: Operand, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        x.new_empty(shape, dtype=dtype)
        for shape, dtype in operand_spec(name, operand, tuple(x.shape))
    )


def _numbers(x: Tensor) -> tuple[int, ...]:
    batch, rows, heads, _ = x.shape
    return (*x.stride()[:3], batch, rows, heads)
