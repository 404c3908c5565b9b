"""How kernels are launched, on any GPU from sm_90 on: the two publishers that need no Blackwell instruction, bit for bit."""

import pytest
import torch

from fp4mega.attention.operand import parse_operand
from fp4mega.kernels.cute import operands, publishing
from fp4mega.testing.assertions import assert_bitwise


def _hopper_or_later() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _hopper_or_later(), reason="needs an sm_90 GPU or later"),
]


@pytest.mark.parametrize("layout", ["contiguous", "fused"])
def test_values_are_published_on_the_current_stream(layout: str) -> None:
    """Pointers, strides, sizes and stream arrive as they were passed: two kernels, one after the other, and a side stream."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from fp4mega.kernels.cute.compile import launch

    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(3, 259, 6, 128, generator=generator).bfloat16()
    x = fused[:, :, 2:4] if layout == "fused" else fused[:, :, 2:4].contiguous()
    x[1, :, 0] *= 1e-20
    x[2, 5] = 0
    operand = parse_operand("e4m3", field="v")
    wanted = operands.publish_values(operand, x)
    on_device = fused.cuda()[:, :, 2:4] if layout == "fused" else x.cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = publishing.publish_values(operand, on_device, launch)
        torch.cuda.current_stream().synchronize()
    for a, b in zip(got.saved, wanted.saved, strict=True):
        assert_bitwise(a.cpu(), b, name=layout)
