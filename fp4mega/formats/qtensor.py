"""QTensor: a quantized tensor as plain byte tensors plus what they mean. Not a torch.Tensor subclass.

Dims: L length of the reduced axis, N = ceil(L / block) blocks along it. `codes` has the logical shape, with the axis
ceil(L / 2) long for 4-bit elements (low nibble = even index; the high nibble behind an odd L is 0). `scale` has the logical shape
with N at the axis. `global_scale` has the logical shape with 1 at every dim that shares one scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4mega.formats.blocks import Format, get_format
from fp4mega.formats.elements import E2M1, check_float, decode
from fp4mega.formats.scales import quotient


def normalize_axis(axis: int, ndim: int, what: str = "axis") -> int:
    """`axis` as a non-negative int. Raises ValueError naming the allowed range."""
    if not -ndim <= axis < ndim:
        allowed = f"{-ndim} to {ndim - 1}" if ndim else "none, the tensor has no dims"
        raise ValueError(f"{what}={axis}: out of range for {ndim} dims; allowed: {allowed}")
    return axis % ndim


def scope_shape(shape: Sequence[int], scale_dims: Sequence[int] | None) -> tuple[int, ...]:
    """Shape of an FP32 scale shared over `scale_dims` (None: all dims), kept as dims of size 1."""
    ndim = len(shape)
    dims = (
        range(ndim)
        if scale_dims is None
        else [normalize_axis(d, ndim, "scale_dims") for d in scale_dims]
    )
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


def to_blocks(x: Tensor, axis: int, block: int) -> Tensor:
    """[..., L, ...] -> [..., N, block, ...]; a view when L is a multiple of block, otherwise zeros fill the last block."""
    length = x.shape[axis]
    missing = -length % block
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    return x.unflatten(axis, ((length + missing) // block, block))


def from_blocks(x: Tensor, axis: int, length: int) -> Tensor:
    """Inverse of `to_blocks`: [..., N, block, ...] -> [..., length, ...]."""
    return x.flatten(axis, axis + 1).narrow(axis, 0, length)


def pack_nibbles(codes: Tensor, axis: int) -> Tensor:
    """Two 4-bit codes a byte along `axis`, low nibble = even index: uint8 [..., L, ...] -> [..., ceil(L / 2), ...]."""
    axis = normalize_axis(axis, codes.ndim)
    pairs = to_blocks(codes, axis, 2)
    return (pairs.select(axis + 1, 0) | (pairs.select(axis + 1, 1) << 4)).contiguous()


def unpack_nibbles(packed: Tensor, axis: int, length: int) -> Tensor:
    """Inverse of `pack_nibbles` for an axis of `length` codes."""
    axis = normalize_axis(axis, packed.ndim)
    return from_blocks(torch.stack((packed & 0xF, packed >> 4), dim=axis + 1), axis, length)


def values_of(
    q: Tensor, format: Format, scale: Tensor | None, global_scale: Tensor | None
) -> Tensor:
    """Represented values, in place in `q` (element values, float32 or float64); scales broadcast to it, in its dtype.

    The one place that says how scales multiply, for dequantization and fake quantization alike.
    """
    if format.scale_rule == "two_level":
        assert scale is not None
        assert global_scale is not None
        return q.mul_(scale).div_(global_scale)
    if format.scale_rule == "power_of_two":
        assert global_scale is not None
        return q.div_(global_scale)
    assert scale is not None
    if format.scale_rule == "amplitude":
        # In this order scale * q cannot overflow, and q / 6 is the only rounding.
        return quotient(q, E2M1.max).mul_(scale)
    return q.mul_(scale)


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """Codes, scales and their meaning; `shape` is the logical one, `axis` (non-negative) the reduced and packed axis."""

    codes: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    format: Format
    axis: int
    shape: torch.Size

    def unpack(self) -> Tensor:
        """uint8 codes, one a byte, in the logical shape."""
        return (
            unpack_nibbles(self.codes, self.axis, self.shape[self.axis])
            if self.format.packed
            else self.codes
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Represented values in `dtype`; computed in float64 for float64, otherwise in float32.

        In float32 a product of element and scale above the float32 range (MXFP4 near 3e38) is infinite.
        Raises TypeError for a dtype that is not float64, float32, bfloat16 or float16.
        """
        check_float(dtype)
        work = torch.float64 if dtype is torch.float64 else torch.float32
        format, axis = self.format, self.axis
        q = decode(self.unpack(), format.element, work)
        shared = None if self.global_scale is None else self.global_scale.to(work)
        if format.block is None or format.scale is None or self.scale is None:
            return values_of(q, format, None, shared).to(dtype)
        blocks = to_blocks(q, axis, format.block)
        scale = decode(self.scale, format.scale, work).unsqueeze(axis + 1)
        values = values_of(
            blocks, format, scale, None if shared is None else shared.unsqueeze(axis + 1)
        )
        return from_blocks(values, axis, self.shape[axis]).contiguous().to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of codes, scale, global_scale that the format has, in this order; all contiguous."""
        return tuple(t for t in (self.codes, self.scale, self.global_scale) if t is not None)

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor], shape: Sequence[int], format: str | Format, axis: int = -1
    ) -> "QTensor":
        """Inverse of `tensors()`. Raises ValueError when their number, shapes or dtypes do not fit shape, format and axis."""
        fmt = get_format(format)
        axis = normalize_axis(axis, len(shape))
        spec = qtensor_spec(shape, fmt, axis)
        if len(tensors) != len(spec):
            raise ValueError(f"tensors: {fmt.name} has {len(spec)}, got {len(tensors)}")
        for i, (tensor, (size, dtype)) in enumerate(zip(tensors, spec, strict=True)):
            is_global = fmt.has_global and i == len(spec) - 1
            fits = tensor.ndim == len(shape) and (
                all(n in (1, m) for n, m in zip(tensor.shape, shape, strict=True))
                if is_global
                else tuple(tensor.shape) == size
            )
            if not fits or tensor.dtype is not dtype:
                raise ValueError(
                    f"tensors[{i}]: {tuple(tensor.shape)} {tensor.dtype} is not {'broadcastable to ' if is_global else ''}"
                    f"{tuple(shape) if is_global else size} {dtype} ({fmt.name}, shape {tuple(shape)}, axis {axis})"
                )
        rest = list(tensors[1:])
        scale = rest.pop(0) if fmt.block is not None else None
        return cls(tensors[0], scale, rest.pop(0) if rest else None, fmt, axis, torch.Size(shape))


def qtensor_spec(
    shape: Sequence[int],
    format: str | Format,
    axis: int = -1,
    scale_dims: Sequence[int] | None = None,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of each of `QTensor.tensors()`, without data: what `quantize` with the same arguments returns."""
    fmt = get_format(format)
    axis = normalize_axis(axis, len(shape))

    def along(length: int) -> tuple[int, ...]:
        return (*shape[:axis], length, *shape[axis + 1 :])

    spec = [(along(-(-shape[axis] // 2) if fmt.packed else shape[axis]), torch.uint8)]
    if fmt.block is not None:
        spec.append((along(-(-shape[axis] // fmt.block)), torch.uint8))
    if fmt.has_global:
        spec.append((scope_shape(shape, scale_dims), torch.float32))
    return spec
