"""Operands as the products see them: quantized, saved as bytes, read back. Layout [B, rows, heads, dim] throughout.

Q, K, dO and the backward's Q and K run their blocks along the head dim. V runs its blocks along the keys, which is the
axis that P V reduces, and every scale of it is shared along the head dim or by a block of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.operand import FLOAT_FORMATS, Operand
from fp4mega.formats import (
    E4M3,
    E5M2,
    QTensor,
    counter_bits,
    fake_quantize,
    get_format,
    qtensor_spec,
    quantize,
)

STREAMS = {
    name: i
    for i, name in enumerate(("q", "k", "v", "p", "do", "p_bwd", "ds", "q_bwd", "k_bwd", "v_bwd"))
}
"""One independent stream of rounding bits for each operand."""
TILE_STREAM = 1 << 20
"""Streams of P and dS go on by tile: stream + TILE_STREAM * tile index."""

_SCOPE_DIMS = {"tensor": (0, 1, 2, 3), "head": (1, 3), "row": (3,)}


class Layout(NamedTuple):
    """Where an operand's blocks run and which dims share its FP32 scale."""

    axis: int
    scale_dims: tuple[int, ...] | None


def layout_of(name: str, operand: Operand) -> Layout:
    """Block axis and scale dims of a [B, rows, heads, dim] operand."""
    axis = 1 if name in ("v", "v_bwd") else 3
    return Layout(axis, _SCOPE_DIMS[operand.scope] if operand.scope else None)


def rounding_bits(
    name: str, operand: Operand, x: Tensor, key: Tensor | None, *, tile: int = 0
) -> Tensor | None:
    """Random bits for x when the operand rounds stochastically. Raises ValueError when there is no key to count from."""
    if operand.rounding == "nearest_even":
        return None
    if key is None:
        raise ValueError(
            f"rounding_key=None: operand {name}={operand} rounds stochastically and needs a key to count from"
        )
    return counter_bits(key, x.shape, stream=STREAMS[name] + TILE_STREAM * tile, device=x.device)


def encode_operand(
    name: str, operand: Operand, x: Tensor, key: Tensor | None, *, amax: Tensor | None = None
) -> QTensor:
    """Quantize a whole operand [B, rows, heads, dim] to bytes. `amax` as `scope_amax` gives it, when x is a part."""
    axis, scale_dims = layout_of(name, operand)
    return quantize(
        x,
        get_format(operand.format),
        axis=axis,
        scale_dims=scale_dims,
        amax=amax,
        rounding=operand.rounding,
        random_bits=rounding_bits(name, operand, x, key),
    )


def scope_amax(name: str, operand: Operand, x: Tensor) -> Tensor | None:
    """Largest magnitude of every scope of x that spans rows, x's dims kept; None when no scale of the operand does.

    Infinite where x holds a value that is not finite, so that a maximum over several parts keeps it, and so NaN in the end.
    """
    _, scale_dims = layout_of(name, operand)
    if not operand.quantized or scale_dims is None or 1 not in scale_dims:
        return None
    amax = x.detach().abs().amax(scale_dims, keepdim=True)
    return amax.masked_fill(~amax.isfinite(), torch.inf)


def operand_spec(
    name: str, operand: Operand, shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of an encoded operand's tensors, without data."""
    axis, scale_dims = layout_of(name, operand)
    return qtensor_spec(shape, get_format(operand.format), axis=axis, scale_dims=scale_dims)


def decode_operand(
    name: str, operand: Operand, tensors: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The represented values of saved bytes."""
    axis, _ = layout_of(name, operand)
    return QTensor.from_tensors(
        tensors, shape=shape, format=get_format(operand.format), axis=axis
    ).dequantize(dtype)


def represent(
    name: str,
    operand: Operand,
    x: Tensor,
    dtype: torch.dtype,
    key: Tensor | None = None,
    *,
    amax: Tensor | None = None,
) -> Tensor:
    """The values that a product sees for operand x, in `dtype`, without making bytes of them; `amax` as in `encode_operand`."""
    if operand.format in ("none", "same"):
        return x.to(dtype)
    if operand.format == "bf16":
        return x.to(torch.bfloat16).to(dtype)
    axis, scale_dims = layout_of(name, operand)
    return fake_quantize(
        x.to(dtype),
        get_format(operand.format),
        axis=axis,
        scale_dims=scale_dims,
        amax=amax,
        rounding=operand.rounding,
        random_bits=rounding_bits(name, operand, x, key),
    )


def represent_probabilities(
    name: str, operand: Operand, p: Tensor, p_exponent: int, key: Tensor | None, *, tile: int
) -> Tensor:
    """P of one tile [..., keys], values in [0, 1], as its product sees it."""
    if operand.format == "none":
        return p
    if operand.format == "bf16":
        return p.to(torch.bfloat16).to(p.dtype)
    format_ = get_format(operand.format)
    bits = rounding_bits(name, operand, p, key, tile=tile)
    if operand.format in FLOAT_FORMATS:
        published = float(2**p_exponent)
        scaled = fake_quantize(
            p * published,
            format_,
            amax=_unit(operand, p),
            rounding=operand.rounding,
            random_bits=bits,
        )
        return scaled / published
    # P never exceeds 1, so its FP32 scale is known before the data: a constant, the same on every tile and rank.
    amax = (
        torch.ones([1] * p.dim(), dtype=p.dtype, device=p.device)
        if operand.format == "nvfp4"
        else None
    )
    return fake_quantize(
        p, format_, axis=-1, amax=amax, rounding=operand.rounding, random_bits=bits
    )


def represent_score_gradient(
    operand: Operand, ds: Tensor, tile_m: int, key: Tensor | None, *, tile: int
) -> Tensor:
    """dS of one column of tiles [B, G, R, rows, keys] as its two products see it; rows start at a multiple of tile_m."""
    if operand.format == "none":
        return ds
    if operand.format == "bf16":
        return ds.to(torch.bfloat16).to(ds.dtype)
    bits = rounding_bits("ds", operand, ds, key, tile=tile)
    amax = _unit(operand, ds) if operand.scope == "unit" else _tile_amax(ds, tile_m)
    return fake_quantize(
        ds, get_format(operand.format), amax=amax, rounding=operand.rounding, random_bits=bits
    )


def _unit(operand: Operand, x: Tensor) -> Tensor:
    """The amax for which the power-of-two scale is 1."""
    largest = E4M3.max if operand.format == "e4m3" else E5M2.max
    return torch.full([1] * x.dim(), largest, dtype=x.dtype, device=x.device)


def _tile_amax(x: Tensor, tile_m: int) -> Tensor:
    """Largest magnitude of the tile that each row belongs to, [..., rows, 1]."""
    per_row = x.abs().amax(dim=-1)
    rows = per_row.shape[-1]
    tiles = -(-rows // tile_m)
    padded = torch.nn.functional.pad(per_row, (0, tiles * tile_m - rows))
    per_tile = padded.unflatten(-1, (tiles, tile_m)).amax(dim=-1)
    return per_tile.repeat_interleave(tile_m, dim=-1)[..., :rows, None]
