"""Quantizing a tensor: `quantize` to bytes, `fake_quantize` to the values that those bytes stand for.

NVFP4 (s_enc per scope): block scale = E4M3(min(448, amax_b / 6 * s_enc)); q = E2M1(x * s_enc / block scale).
MXFP4: scale = E8M0 by rule; q = E2M1(x / scale), E2M1(6 * x / scale) for `amplitude`. FP8 (g per scope): q = E4M3 or E5M2(x * g).

Rounding has gradient zero almost everywhere, so both functions return tensors without a graph; a straight-through
gradient is the caller's. A non-finite input never becomes a number: it makes its scope (NVFP4, FP8 without `amax`), its block
(NVFP4 with `amax`, MXFP4) or itself (FP8 with `amax`) NaN.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4mega.formats.blocks import Format, get_format
from fp4mega.formats.elements import (
    E2M1,
    E4M3,
    E8M0,
    INT_OF,
    Rounding,
    check_rounding,
    codes_of,
    decode,
    power_of_two,
    round_on_grid,
    working,
)
from fp4mega.formats.qtensor import (
    QTensor,
    from_blocks,
    normalize_axis,
    pack_nibbles,
    scope_shape,
    to_blocks,
    values_of,
)
from fp4mega.formats.scales import (
    mx_scale,
    nvfp4_block_scale,
    nvfp4_global_scale,
    power_of_two_scale,
)


def quantize(
    x: Tensor,
    format: str | Format,
    *,
    axis: int = -1,
    scale_dims: Sequence[int] | None = None,
    amax: Tensor | float | None = None,
    rounding: Rounding = "nearest_even",
    random_bits: Tensor | None = None,
) -> QTensor:
    """`x` (float, any shape with at least one dim, any strides) as codes and scales.

    axis: blocks run and nibbles pack along it; any length, the last block may be short.
    scale_dims: dims that share one float32 scale; None is all of them. NVFP4's must contain `axis`.
    amax: float32 magnitudes that replace the scope's own largest, as a number, a 0-dim tensor, or one that keeps x's dims
        (1 where shared); with `scale_dims` it must broadcast to that scope. Larger inputs saturate.
    rounding, random_bits: of the elements; "stochastic" takes int32 bits of x's shape. Scales always round by their rule.

    Raises TypeError for a dtype that is not a float, and ValueError for an unknown format, an axis out of range, a scope that does
    not fit the format, or missing random bits.
    """
    fmt, axis, x, scope = _check(x, format, axis, scale_dims, amax, rounding, random_bits)
    if fmt.block is None:
        shared = power_of_two_scale(_scope_amax(x.abs, x, scope, amax), fmt.element)
        unit = shared.reciprocal().to(x.dtype)
        # Rounded on x's own grid, where a finite x cannot overflow before it saturates.
        values = round_on_grid(x, fmt.element, unit, random_bits=random_bits)
        codes = codes_of(values.mul_(shared.to(x.dtype)), fmt.element)
        return QTensor(codes.contiguous(), None, shared, fmt, axis, x.shape)
    bits = None if random_bits is None else to_blocks(random_bits, axis, fmt.block)
    q, scale_codes, _, shared_or_none = _quantize_blocks(x, fmt, axis, scope, amax, bits)
    codes = from_blocks(codes_of(q, fmt.element), axis, x.shape[axis])
    return QTensor(
        pack_nibbles(codes, axis),
        scale_codes.squeeze(axis + 1).contiguous(),
        shared_or_none,
        fmt,
        axis,
        x.shape,
    )


def fake_quantize(
    x: Tensor,
    format: str | Format,
    *,
    axis: int = -1,
    scale_dims: Sequence[int] | None = None,
    amax: Tensor | float | None = None,
    rounding: Rounding = "nearest_even",
    random_bits: Tensor | None = None,
) -> Tensor:
    """The values of `quantize(x, ...)`, bit for bit, without making codes: float32, or float64 for float64 input.

    Arguments and errors are those of `quantize`.
    """
    fmt, axis, x, scope = _check(x, format, axis, scale_dims, amax, rounding, random_bits)
    if fmt.block is None:
        shared = power_of_two_scale(_scope_amax(x.abs, x, scope, amax), fmt.element)
        unit = shared.reciprocal().to(x.dtype)
        return round_on_grid(x, fmt.element, unit, random_bits=random_bits)
    bits = None if random_bits is None else to_blocks(random_bits, axis, fmt.block)
    if fmt.scale_rule in ("floor", "rceil", "even"):
        # Scaling by a power of two commutes with rounding, so x is rounded where it is: two passes fewer.
        blocks = to_blocks(x, axis, fmt.block)
        exponent_byte = mx_scale(_block_amax(blocks, axis), fmt.scale_rule)
        unit = _e8m0_scale(exponent_byte, x.dtype)
        # Under `rceil` nothing exceeds 6 * scale, except where float64 runs past the largest scale.
        saturate = fmt.scale_rule != "rceil" or x.dtype is torch.float64
        values = round_on_grid(blocks, fmt.element, unit, saturate=saturate, random_bits=bits)
    else:
        q, _, scale, shared_or_none = _quantize_blocks(x, fmt, axis, scope, amax, bits)
        values = values_of(
            q,
            fmt,
            scale,
            None if shared_or_none is None else shared_or_none.to(x.dtype).unsqueeze(axis + 1),
        )
    return from_blocks(values, axis, x.shape[axis])


def _check(
    x: Tensor,
    format: str | Format,
    axis: int,
    scale_dims: Sequence[int] | None,
    amax: Tensor | float | None,
    rounding: Rounding,
    random_bits: Tensor | None,
) -> tuple[Format, int, Tensor, tuple[int, ...]]:
    """Everything that can be wrong with the arguments; the format, axis and x as used from here on, and the scope's shape."""
    fmt = get_format(format)
    x = working(x)
    axis = normalize_axis(axis, x.ndim)
    check_rounding(rounding, random_bits, x.shape)
    if not fmt.has_global and (scale_dims is not None or amax is not None):
        raise ValueError(
            f"format={fmt.name!r} carries no float32 scale, so it takes neither scale_dims nor amax"
        )
    scope = scope_shape(x.shape, scale_dims)
    if isinstance(amax, Tensor) and amax.ndim:
        allowed = x.shape if scale_dims is None else scope
        if amax.ndim != x.ndim or any(
            n not in (1, m) for n, m in zip(amax.shape, allowed, strict=True)
        ):
            raise ValueError(
                f"amax.shape={tuple(amax.shape)}: must have x's {x.ndim} dims and broadcast to {tuple(allowed)}"
            )
        if scale_dims is None:
            scope = tuple(amax.shape)
    if fmt.scale_rule == "two_level" and scope[axis] != 1:
        raise ValueError(
            f"scale_dims={scale_dims}: a {fmt.name} block lies in one scope, so axis {axis} must be among them"
        )
    return fmt, axis, x, scope


def _largest(magnitudes: Tensor, dims: Sequence[int]) -> Tensor:
    """amax over `dims`, kept; 0 where there is nothing to compare."""
    if magnitudes.numel() == 0:
        return magnitudes.new_zeros([1 if d in dims else n for d, n in enumerate(magnitudes.shape)])
    return magnitudes.amax(list(dims), keepdim=True) if dims else magnitudes


def _block_amax(blocks: Tensor, axis: int) -> Tensor:
    return _largest(blocks.abs(), [axis + 1])


def _scope_amax(
    magnitudes: Callable[[], Tensor], x: Tensor, scope: tuple[int, ...], amax: Tensor | float | None
) -> Tensor:
    """Largest magnitude of each scope in x's dtype and the scope's shape: the caller's `amax`, or x's own."""
    if amax is None:
        return _largest(magnitudes(), [d for d, n in enumerate(scope) if n == 1])
    given = (
        amax.detach()
        if isinstance(amax, Tensor)
        else torch.full((), amax, device=x.device, dtype=x.dtype)
    )
    return given.to(x.dtype).expand(scope).contiguous()


def _e8m0_scale(byte: Tensor, dtype: torch.dtype) -> Tensor:
    return power_of_two(byte.clamp(max=254).to(torch.int32) - 127, dtype).masked_fill_(
        byte == E8M0.nan_code, torch.nan
    )


def _quantize_blocks(
    x: Tensor,
    fmt: Format,
    axis: int,
    scope: tuple[int, ...],
    amax: Tensor | float | None,
    bits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Element values [..., N, block, ...], block scale codes and values [..., N, 1, ...], global scale in the scope's shape."""
    assert fmt.block is not None
    blocks = to_blocks(x, axis, fmt.block)
    block_amax = _block_amax(blocks, axis)
    if fmt.scale_rule == "two_level":
        shared = nvfp4_global_scale(
            _scope_amax(lambda: block_amax.squeeze(axis + 1), x, scope, amax)
        )
        in_blocks = shared.to(x.dtype).unsqueeze(axis + 1)
        scale_codes = nvfp4_block_scale(block_amax, in_blocks)
        scale = decode(scale_codes, E4M3, x.dtype)
        scaled = (blocks * in_blocks).div_(scale)
        # Code +0 throughout a zero-scale block: 0 / 0 is cleared by its bits, several times faster than by a selection.
        scaled.view(INT_OF[x.dtype]).bitwise_and_(-(scale != 0).to(INT_OF[x.dtype]))
    else:
        shared = None
        scale_codes = mx_scale(block_amax, fmt.scale_rule)
        scale = _e8m0_scale(scale_codes, x.dtype)
        scaled = blocks / scale
        if fmt.scale_rule == "amplitude":
            scaled.mul_(E2M1.max)
    scaled.clamp_(-E2M1.max, E2M1.max)
    return (
        round_on_grid(scaled, fmt.element, saturate=False, random_bits=bits),
        scale_codes,
        scale,
        shared,
    )
