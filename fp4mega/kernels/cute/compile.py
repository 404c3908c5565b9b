"""Compiled kernels, one for each configuration, and how they are called with plain tensors.

A host function takes addresses and sizes only, so one compiled function serves every shape, and a test can call it on memory
that is no GPU's. Nothing here needs a GPU: `CUTE_DSL_ARCH=sm_100a` compiles on any machine.
"""

import functools
from collections.abc import Sequence
from typing import Any

import cuda.bindings.driver as cuda
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from torch import Tensor

from fp4mega.kernels.cute.config import ForwardConfig, KernelConfig, PublishConfig
from fp4mega.kernels.cute.forward import AttentionForward
from fp4mega.kernels.cute.publish import (
    AmaxKernel,
    RowPublisher,
    TransposedValuePublisher,
    ValuePublisher,
)

_WIDE, _BYTE, _WORD = (Uint8, 16), (Uint8, 1), (Int32, 4)
_NUMBER, _ROWS = (Float32, 4), (BFloat16, 16)
_STRIDES_AND_EXTENTS = (Int64, Int64, Int64, Int32, Int32, Int32)


def host_function(config: KernelConfig) -> Any:
    """What `cute.compile` takes."""
    if isinstance(config, ForwardConfig):
        return AttentionForward(config)
    if config.kind == "amax":
        return AmaxKernel(config.dim)
    if config.kind == "rows":
        return RowPublisher(config.dim, nvfp4=config.nvfp4)
    if config.kind == "values":
        return ValuePublisher(config.dim)
    return TransposedValuePublisher(config.dim)


def signature(config: KernelConfig) -> tuple[tuple[tuple[Any, int], ...], tuple[Any, ...]]:
    """(element type, alignment) of every pointer of the host function, and the types of the numbers that follow, in order."""
    if isinstance(config, PublishConfig):
        pointers = {
            "amax": (_ROWS, _WORD),
            "rows": (_ROWS, _WORD, _WIDE, _BYTE, _NUMBER, _BYTE),
            "values": (_ROWS, _WORD, _WIDE, _NUMBER),
            "transposed": (_ROWS, _BYTE, _BYTE, _WIDE, _WIDE),
        }
        return pointers[config.kind], _STRIDES_AND_EXTENTS
    operand = (_WIDE, _WIDE, _NUMBER)
    v_scales = _NUMBER if config.direct_p is None else _WIDE
    beside = (_WORD, _WORD, _WORD, (Int32, 16), _NUMBER)
    results = (_ROWS, _NUMBER, _NUMBER)
    numbers = (*[Int32] * 9, Float32)
    return (*operand, *operand, _WIDE, v_scales, *beside, *results), numbers


def fake_arguments(config: KernelConfig) -> tuple[Any, ...]:
    """Arguments to compile with: types and alignments count, values do not."""
    pointers, numbers = signature(config)
    return (
        *[_pointer(dtype, 1 << 12, alignment) for dtype, alignment in pointers],
        *[dtype(1) for dtype in numbers],
        make_fake_stream(),
    )


@functools.cache
def compiled(config: KernelConfig) -> Any:
    """The kernel of this configuration for the GPU of this machine; some seconds on the first call."""
    return cute.compile(host_function(config), *fake_arguments(config))


def launch(config: KernelConfig, tensors: Sequence[Tensor], numbers: Sequence[int | float]) -> None:
    """Run on the current stream of the tensors' device; arguments in the order of the host function's."""
    pointers, _ = signature(config)
    stream = cuda.CUstream(torch.cuda.current_stream(tensors[0].device).cuda_stream)
    addresses = [
        _pointer(dtype, tensor.data_ptr(), alignment)
        for (dtype, alignment), tensor in zip(pointers, tensors, strict=True)
    ]
    compiled(config)(*addresses, *numbers, stream)


def _pointer(dtype: Any, address: int, alignment: int) -> Any:
    return make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)
