"""Random bits from a counter: the same key, stream and shape give the same bits on every device and in every run.

Bit source: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the state advances by an odd constant
and two multiply-xorshift rounds mix it. Here the state is key-dependent start + index * constant, so any element is
computed on its own, and recomputation or a resumed run repeats exactly.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E37_79B9_7F4A_7C15)
_MIX_1 = _signed(0xBF58_476D_1CE4_E5B9)
_MIX_2 = _signed(0x94D0_49BB_1331_11EB)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic on int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def counter_bits(
    key: Tensor, shape: Sequence[int], *, stream: int, device: torch.device | str | None = None
) -> Tensor:
    """int32 random bits of `shape`, all 32 bits uniform.

    key: int64 tensor with one element (for example mixed from seed, layer and step). stream: a different number for each
    use of one key, in [0, 2^31). Elements are counted in logical row-major order. device: None is the key's.
    Raises TypeError or ValueError for another kind of key or stream. Integer torch operations only, without a host sync.
    """
    if not isinstance(key, Tensor) or key.dtype is not torch.int64:
        raise TypeError(
            f"key: expected an int64 tensor, got {key.dtype if isinstance(key, Tensor) else type(key).__name__}"
        )
    if key.numel() != 1:
        raise ValueError(f"key.shape={tuple(key.shape)}: expected one element")
    if not 0 <= stream < 1 << 31:
        raise ValueError(f"stream={stream}: allowed: 0 to {(1 << 31) - 1}")
    device = key.device if device is None else torch.device(device)
    start = _mix(_mix(key.reshape(()).to(device)) + (stream + 1) * _GAMMA_32)
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    return (_mix(start + index * _GAMMA) >> 32).to(torch.int32).view(tuple(shape))


# stream * this stays inside int64 for every stream.
_GAMMA_32 = 0x9E37_79B9
