"""Publishers on a GPU: words where nothing is padding, maxima that run ahead, and what an interpreter cannot show of either."""

import pytest
import torch

from fp4mega.attention import AttentionPolicy
from fp4mega.formats import quantize
from fp4mega.kernels.triton.publish_fp4 import publish_fp4
from fp4mega.kernels.triton.publish_fp8 import Rows, publish_dout, publish_v
from fp4mega.kernels.triton.publish_input import cleared
from fp4mega.testing import VALUES, Case, assert_bitwise
from tests.kernels.triton.harness import (
    assert_expanded,
    assert_saved_bytes,
    in_natural_order,
    policies,
)
from tests.kernels.triton.roundings import check_quotients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WHOLE = Case(
    batch=2, seqlen_q=256, seqlen_k=256, num_heads=4, num_kv_heads=2, head_dim=128, layout="fused_qkv", dtype=torch.bfloat16,
)  # fmt: skip


def test_quotients_by_every_block_scale() -> None:
    check_quotients("cuda")


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
@pytest.mark.parametrize("values", VALUES)
def test_saved_bytes_of_whole_tiles(policy: AttentionPolicy, values: str) -> None:
    assert_saved_bytes(WHOLE.replace(values=values), policy)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 256])
def test_saved_bytes_of_whole_tiles_in_other_dtypes(
    policy: AttentionPolicy, dtype: torch.dtype, head_dim: int
) -> None:
    assert_saved_bytes(WHOLE.replace(dtype=dtype, head_dim=head_dim), policy)


@pytest.mark.parametrize("values", ["randn", "outlier_channels", "zero_blocks", "denormals"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands(values: str, dtype: torch.dtype) -> None:
    """Straight and transposed operands are the codes of `quantize` on the CPU; those made again from the bytes are those made with them."""
    x = WHOLE.replace(values=values, dtype=dtype).make(device="cuda")
    for nvfp4 in (True, False):
        inexact, maxima = cleared((2, 4), x.q)
        saved, largest, operand, _ = publish_fp4(
            x.q, None, nvfp4=nvfp4, inexact=inexact, maxima=maxima
        )
        fmt, dims = ("nvfp4", (1, 3)) if nvfp4 else ("mxfp4_rceil", None)
        value = quantize(x.q.cpu(), fmt, axis=3, scale_dims=dims).dequantize(torch.float32)
        assert_expanded(saved, largest, operand, inexact, value, nvfp4=nvfp4)
    (_, maxima) = cleared((1, 1), x.v)
    saved, across = publish_v(x.v, None, maxima)
    want = quantize(x.v.cpu(), "e4m3", axis=1, scale_dims=(1, 3))
    for a, b in zip(saved, want.tensors(), strict=True):
        assert_bitwise(a.cpu(), b, name="v")
    turned = in_natural_order(across.view(torch.uint8)).cpu()
    assert_bitwise(turned, want.codes.permute(0, 2, 3, 1), name="v across")


def published(x: torch.Tensor) -> list[torch.Tensor]:
    inexact, *maxima = cleared((x.shape[0], x.shape[2]), x, x)
    saved, largest, operand, _ = publish_fp4(x, None, nvfp4=True, inexact=inexact, maxima=maxima[0])
    (codes, power), across = publish_v(x, None, maxima[1])
    return [*saved, largest, operand.view(torch.int16), codes, power, across.view(torch.uint8)]


@pytest.mark.parametrize("ahead", [1, 4 << 20, 1 << 40])
@pytest.mark.parametrize("shape", [(2, 4096, 32, 128), (1, 40000, 2, 64), (64, 128, 16, 128)])
def test_heads_that_wait_for_their_maximum(
    shape: tuple[int, ...], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits 20 times over, whatever the lead of the maxima, on two streams at once as well; heads differ by powers of two."""
    monkeypatch.setattr("fp4mega.kernels.triton.publish_input.AHEAD_BYTES", ahead)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda")
    heads = torch.arange(shape[2], device="cuda")
    x = (x * torch.exp2(heads % 7.0)[:, None]).bfloat16()
    # The maximum of each head stands in its last row.
    x[:, -1, :, -1] = (64 * torch.exp2(heads % 7.0)).bfloat16()
    first = published(x)
    largest = first[6]
    want = quantize(x[:1].cpu(), "e4m3", axis=1, scale_dims=(1, 3))
    assert_bitwise(largest[:1].cpu(), want.global_scale, name="power")
    assert_bitwise(first[5][:1].cpu(), want.codes, name="codes")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(published(x))
        torch.cuda.synchronize()
        for result in results:
            for a, b in zip(first, result, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [256, 203])
@pytest.mark.parametrize("represented", [True, False])
def test_row_terms(rows: int, represented: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    dout, out = (
        torch.randn((2, rows, 3, 128), generator=generator, device="cuda").bfloat16()
        for _ in range(2)
    )
    lse, dlse = (torch.randn((2, 3, rows), generator=generator, device="cuda") for _ in range(2))
    statistics = torch.rand((2, 2, 3, rows), generator=generator, device="cuda") + 0.5
    given = Rows(out, dlse, lse, statistics if represented else None, 8)
    (_, maxima) = cleared((1, 1), dout)
    codes, _, _, (shift, inverse, r) = publish_dout(dout, maxima, given)
    seen = quantize(dout.cpu(), "e5m2", axis=3, scale_dims=(1, 3))
    straight = codes.view(torch.uint8)[:, :, :rows].cpu()
    assert_bitwise(straight, seen.codes.permute(0, 2, 1, 3), name="dO")
    product = (out.double().cpu() * seen.dequantize(torch.float64)).sum(-1).transpose(1, 2)
    want = (product - dlse.double().cpu()) / 256
    assert (r[..., :rows].cpu() - want).abs().max() < 2e-6 * want.abs().max()
    assert not r[..., rows:].any()
    assert (shift[..., rows:] == torch.inf).all()
    if represented:
        assert_bitwise(shift[..., :rows], statistics[0] - 8, name="shift")
        assert (inverse[..., :rows] * statistics[1] - 1).abs().max() < 2e-7
