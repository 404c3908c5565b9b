"""The publishers, executed by the interpreter, bit for bit against the torch definition of the same layouts."""

import pytest
import torch
from torch import Tensor

from fp4mega.attention.operand import parse_operand
from fp4mega.formats.quantize import quantize
from fp4mega.formats.scale_layout import from_tcgen05
from fp4mega.kernels.cute import operands, publishing
from fp4mega.kernels.cute.operands import Published
from fp4mega.testing.assertions import assert_bitwise
from tests.kernels.cute.harness import BASE, check, interpret

ROWS = 130


def hard_rows(dim: int, *, tail: int = 3) -> Tensor:
    """BF16 [2, 130, 2, dim], a strided view: zero rows and blocks, negative zeros, tiny, huge and subnormal values."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, 2 + tail, dim, generator=generator).bfloat16()[:, :, 1:3]
    x[0, 5] = 0
    x[0, 7, 0, :16] = 0
    x[0, 9, 1, 3] = -0.0
    x[0, 11, 1, 16:32] *= 1e-5
    x[0, 32:64, 0, 7] *= 1e-39
    x[1, :, 0] *= 1e-30
    x[1, 3, 1] *= 3e38
    # Ties of every E2M1 step in one block.
    x[0, 20, 0, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2).bfloat16()
    return x


def same(got: Published, wanted: Published) -> None:
    for i, (a, b) in enumerate(zip(got.saved, wanted.saved, strict=True)):
        assert_bitwise(a, b, name=f"saved[{i}]")
    assert_bitwise(got.codes, wanted.codes, name="codes")
    assert_bitwise(got.scales, wanted.scales, name="scales")


@pytest.mark.parametrize(
    ("spelling", "dim"), [("nvfp4", 128), ("nvfp4", 64), ("mxfp4_rceil", 128), ("mxfp4_rceil", 192)]
)
def test_rows(spelling: str, dim: int) -> None:
    operand, x = parse_operand(spelling, field="q"), hard_rows(dim)
    same(
        publishing.publish_rows("q", operand, x, interpret), operands.publish_rows("q", operand, x)
    )


def test_values() -> None:
    operand, v = parse_operand("e4m3", field="v"), hard_rows(128)
    same(publishing.publish_values(operand, v, interpret), operands.publish_values(operand, v))


@pytest.mark.parametrize("dim", [128, 64])
def test_transposed_values(dim: int) -> None:
    operand, v = parse_operand("mxfp4_amplitude", field="v"), hard_rows(dim)
    same(
        publishing.publish_transposed_values(operand, v, interpret),
        operands.publish_transposed_values(operand, v),
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_published_as_none(bad: float) -> None:
    """NVFP4 and E4M3 lose the head, MXFP4 the block; the other head keeps its bits."""
    x = hard_rows(128)
    x[1, 40, 1, 77] = bad
    for spelling in ("nvfp4", "mxfp4_rceil"):
        operand = parse_operand(spelling, field="q")
        got, wanted = (
            publishing.publish_rows("q", operand, x, interpret),
            operands.publish_rows("q", operand, x),
        )
        assert_bitwise(got.saved[1], wanted.saved[1], name=f"{spelling} scales")
        assert_bitwise(got.saved[0][:, :, 0], wanted.saved[0][:, :, 0], name="codes, other head")
    operand = parse_operand("e4m3", field="v")
    got = publishing.publish_values(operand, x, interpret)
    assert got.shared[1, 0, 1, 0].isnan()
    assert torch.equal(got.shared.isnan().sum(), torch.tensor(1))


def test_scale_atoms_are_the_formats_layout() -> None:
    """The batched layout of this backend against the one of `fp4mega.formats`, head by head, and what lies in it."""
    x = hard_rows(128)
    scale = quantize(x, "nvfp4", scale_dims=(1, 3)).scale
    assert scale is not None
    atoms = operands.scale_atoms(scale.transpose(1, 2))
    assert atoms.shape == (2, 2, 2, 2, 512)
    for b in range(2):
        for h in range(2):
            back = from_tcgen05(atoms[b, h].flatten(), ROWS, 8)
            assert_bitwise(back, scale[b, :, h].contiguous(), name="scales")


def test_unaligned_inputs_are_copied() -> None:
    x = torch.randn(1, 40, 2, 65).bfloat16()[..., 1:]
    assert publishing.loadable(x).is_contiguous()
    view = torch.randn(2, 40, 6, 64).bfloat16()[:, :, 2:4]
    assert publishing.loadable(view) is view


@pytest.mark.parametrize("policy", ["nvfp4_qk_fp8_pv", "direct_p_fast"])
def test_published_operands_give_the_answer(policy: str) -> None:
    """Publishers and forward kernel together, from one fused buffer."""
    check(
        BASE.replace(policy=policy, seqlen_q=140, seqlen_k=140, layout="fused_qkv"), publishers=True
    )
