"""Publishers bit for bit as `fp4mega.formats`: saved bytes, and every operand in both orientations, from strided views."""

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from fp4mega.attention import AttentionPolicy
from fp4mega.formats import quantize
from fp4mega.kernels.triton.publish_fp4 import publish_fp4
from fp4mega.kernels.triton.publish_fp8 import Rows, publish_dout, publish_v
from fp4mega.kernels.triton.publish_input import cleared
from fp4mega.kernels.triton.publish_values import publish_values
from fp4mega.testing import VALUES, Case, assert_bitwise
from tests.kernels.triton.harness import (
    TRAINING,
    assert_expanded,
    assert_saved_bytes,
    get_policy,
    in_natural_order,
    policies,
)

CASE = Case(
    batch=1, seqlen_q=35, seqlen_k=35, num_heads=2, num_kv_heads=1, head_dim=40, layout="fused_qkv", dtype=torch.bfloat16,
)  # fmt: skip
FOUR_BIT = tuple(n for n in TRAINING if n != "bf16" and "-" not in n)


@pytest.mark.parametrize("values", VALUES)
@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_saved_bytes(policy: AttentionPolicy, values: str) -> None:
    assert_saved_bytes(CASE.replace(values=values), policy, "cpu")


@policies(*(n for n in FOUR_BIT if n not in ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")))
@pytest.mark.parametrize("values", ["zero_blocks"])
def test_saved_bytes_of_other_policies(policy: AttentionPolicy, values: str) -> None:
    assert_saved_bytes(CASE.replace(values=values), policy, "cpu")


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
@pytest.mark.parametrize(
    "case",
    [
        CASE.replace(mask="padding_all", batch=2),
        CASE.replace(layout="head_major", seqlen_k=70, head_dim=16, head_dim_v=33),
        CASE.replace(dtype=torch.float16, head_dim=136),
    ],
    ids=str,
)
def test_saved_bytes_of_hidden_keys_odd_dims_and_float16(
    policy: AttentionPolicy, case: Case
) -> None:
    assert_saved_bytes(case, policy, "cpu")


def scored(x: Tensor, fmt: str) -> Tensor:
    dims = (1, 3) if fmt == "nvfp4" else None
    return quantize(x, fmt, axis=3, scale_dims=dims).dequantize(torch.float64)


def tensors(values: str) -> list[Tensor]:
    x = CASE.replace(values=values).make()
    return [x.q, x.k, x.v]


@pytest.mark.parametrize("values", ["outlier_channels", "zero_blocks", "denormals"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4_rceil"])
def test_operands_of_scores_and_of_gradients(fmt: str, values: str) -> None:
    """The operand is the represented value exactly; made again from the bytes it is the same; the transposed E4M3 one is `quantize`'s."""
    nvfp4 = fmt == "nvfp4"
    for x in tensors(values):
        inexact, maxima = cleared((1, x.shape[2]), x)
        saved, largest, operand, divisor = publish_fp4(
            x, None, nvfp4=nvfp4, inexact=inexact, maxima=maxima
        )
        want = scored(x, fmt).transpose(1, 2)
        exact = operand[:, :, :35, :40].double() / divisor.double()[..., None, None]
        # The FP32 number of NVFP4 divides after the product: one rounding of its reciprocal apart.
        close = 1e-6 if nvfp4 else 0.0
        error = (exact - want).abs().amax((2, 3))
        held = inexact == 0
        assert (error[held] <= close * want.abs().amax((2, 3))[held]).all()
        assert not nvfp4 or held.all()
        assert not operand[:, :, 35:].view(torch.uint8).any()
        assert not operand[:, :, :, 40:].contiguous().view(torch.uint8).any()
        assert_expanded(saved, largest, operand, inexact, scored(x, fmt).float(), nvfp4=nvfp4)


def published_gradient(dout: Tensor):
    batch, rows, heads, _ = dout.shape
    lse = torch.zeros((batch, heads, rows))
    given = Rows(torch.zeros_like(dout), None, lse, None, 0)
    return publish_dout(dout, cleared((1, 1), dout)[1], given)


@pytest.mark.parametrize("values", ["huge_v", "denormals", "zeros"])
def test_fp8_in_both_orientations(values: str) -> None:
    for x in tensors(values):
        assert_fp8_codes(x)


def assert_fp8_codes(x: Tensor) -> None:
    """V in E4M3 and dO in E5M2, [1, 35, heads, 40], as `quantize` codes them, straight and transposed."""
    saved, across = publish_v(x, None, cleared((1, 1), x)[1])
    want = quantize(x, "e4m3", axis=1, scale_dims=(1, 3))
    for a, b in zip(saved, want.tensors(), strict=True):
        assert_bitwise(a, b, name="v")
    turned = in_natural_order(across.view(torch.uint8))
    assert_bitwise(turned[:, :, :40, :35], want.codes.permute(0, 2, 3, 1), name="v across")
    assert not turned[:, :, 40:].any()
    assert not turned[:, :, :, 35:].any()
    codes, across, power, _ = published_gradient(x)
    want = quantize(x, "e5m2", axis=3, scale_dims=(1, 3))
    straight = codes.view(torch.uint8)
    turned = in_natural_order(across.view(torch.uint8))
    assert_bitwise(straight[:, :, :35, :40], want.codes.permute(0, 2, 1, 3), name="dO")
    assert_bitwise(turned[:, :, :40, :35], want.codes.permute(0, 2, 3, 1), name="dO across")
    assert_bitwise(power, want.global_scale.flatten(1), name="power of dO")
    assert not straight[:, :, 35:].any()
    assert not straight[:, :, :, 40:].any()


def test_values_that_no_scale_brings_into_range_saturate() -> None:
    x = torch.randn(1, 35, 1, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3, 0, 5], x[0, 7, 0, 2] = 3.38e38, -3.25e38
    assert_fp8_codes(x)
    saved, _, _ = publish_values(x, None, forward="mxfp4", saved="e4m3")
    assert_bitwise(
        saved[0], quantize(x, "e4m3", axis=1, scale_dims=(1, 3)).codes, name="v in BF16 products"
    )


WHOLE = CASE.replace(seqlen_q=128, seqlen_k=128, head_dim=32, num_heads=3, num_kv_heads=3)
"""Nothing is padding: bytes and codes go out as words."""


@pytest.mark.parametrize("ahead", [1, 1 << 30])
@pytest.mark.parametrize("values", ["zero_blocks", "denormals", "outlier_channels"])
@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_whole_tiles_and_maxima_one_head_ahead(
    policy: AttentionPolicy, values: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima of one head before they are needed, or of all of them before the first."""
    monkeypatch.setattr("fp4mega.kernels.triton.publish_input.AHEAD_BYTES", ahead)
    tile = {"BLOCK_R": 32, "num_warps": 4}
    monkeypatch.setattr("fp4mega.kernels.triton.publish_fp4._fp4_tile", lambda wide: tile)
    case = WHOLE.replace(values=values)
    assert_saved_bytes(case, policy, "cpu")
    x = case.make()
    nvfp4 = policy.operands["q"].format == "nvfp4"
    inexact, maxima = cleared((1, 3), x.q)
    saved, largest, operand, divisor = publish_fp4(
        x.q, None, nvfp4=nvfp4, inexact=inexact, maxima=maxima
    )
    want = scored(x.q, policy.operands["q"].format).transpose(1, 2)
    exact = operand.double() / divisor.double()[..., None, None]
    held = inexact[0] == 0
    error = ((exact - want).abs().amax((2, 3)) / want.abs().amax((2, 3)).clamp(min=1e-300))[0]
    assert (error[held] <= (1e-6 if nvfp4 else 0.0)).all()
    assert_expanded(saved, largest, operand, inexact, want.transpose(1, 2).float(), nvfp4=nvfp4)
    codes, across, power, _ = published_gradient(x.v)
    want = quantize(x.v, "e5m2", axis=3, scale_dims=(1, 3))
    assert_bitwise(codes.view(torch.uint8), want.codes.permute(0, 2, 1, 3), name="dO")
    turned = in_natural_order(across.view(torch.uint8))
    assert_bitwise(turned, want.codes.permute(0, 2, 3, 1), name="dO across")
    assert_bitwise(power, want.global_scale.flatten(1), name="power of dO")


@pytest.mark.parametrize("case", [CASE, WHOLE], ids=["padded", "whole"])
@pytest.mark.parametrize("represented", [True, False])
def test_row_terms_come_with_the_published_output_gradient(case: Case, represented: bool) -> None:
    x, generator = case.make(), torch.Generator().manual_seed(1)
    dout = torch.randn(x.q.shape, generator=generator).bfloat16()
    out = torch.randn(x.q.shape, generator=generator).bfloat16()
    batch, rows, heads, _ = out.shape
    lse, dlse = (torch.randn((batch, heads, rows), generator=generator) for _ in range(2))
    lse[0, 0, 3] = -torch.inf
    statistics = torch.rand((2, batch, heads, rows), generator=generator) + 0.5
    statistics[1, 0, 0, 3] = 0.0
    given = Rows(out, dlse, lse, statistics if represented else None, 8)
    maxima = cleared((1, 1), dout)[1]
    _, _, _, (shift, inverse, r) = publish_dout(dout, maxima, given)
    seen = quantize(dout, "e5m2", axis=3, scale_dims=(1, 3)).dequantize(torch.float64)
    want = ((out.double() * seen).sum(-1).transpose(1, 2) - dlse.double()) / 256
    assert (r[..., :rows] - want).abs().max() < 2e-6 * want.abs().max()
    assert not r[..., rows:].any()
    if represented:
        top, total = statistics
        shifts = (top - 8).masked_fill(total == 0, torch.inf)
        inverses = (1 / total).masked_fill(total == 0, 0.0)
        assert_bitwise(inverse[..., :rows], inverses, name="inverse")
        assert not inverse[..., rows:].any()
        assert_bitwise(shift[..., :rows], shifts, name="shift")
    else:
        shifts = (lse * 1.4426950408889634 - 8).masked_fill(lse == -torch.inf, torch.inf)
        finite = shifts.isfinite()
        assert torch.equal(shift[..., :rows].isfinite(), finite)
        assert (shift[..., :rows] - shifts)[finite].abs().max() < 2e-6
    assert (shift[..., rows:] == torch.inf).all()


@pytest.mark.parametrize("rows", [128, 70])
def test_what_is_not_finite_stays_in_its_head_or_block(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = interpreter.InterpreterBuilder
    # A GPU's minimum of NaN and a number is the number.
    monkeypatch.setattr(builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))
    monkeypatch.setattr(builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
    x = torch.randn((1, rows, 4, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3, 1, 5] = torch.nan
    x[0, 9, 1, 6] = -torch.nan
    x[0, 7, 2, 3] = -torch.inf
    x[0, 11], x[0, 12] = 0.0, -0.0
    for fmt, dims in (("nvfp4", (1, 3)), ("mxfp4_rceil", None)):
        inexact, maxima = cleared((1, 4), x)
        nvfp4 = fmt == "nvfp4"
        saved, largest, *_ = publish_fp4(x, None, nvfp4=nvfp4, inexact=inexact, maxima=maxima)
        want = quantize(x, fmt, axis=3, scale_dims=dims).tensors()
        for i, (a, b) in enumerate(zip(saved, want, strict=True)):
            assert_bitwise(a, b, name=f"{fmt}[{i}]")
        assert largest.isfinite().tolist() == [[True, False, False, True]]
        assert nvfp4 or inexact.bool().tolist() == [[False, True, True, False]]
    saved, _ = publish_v(x, None, cleared((1, 1), x)[1])
    for a, b in zip(saved, quantize(x, "e4m3", axis=1, scale_dims=(1, 3)).tensors(), strict=True):
        assert_bitwise(a, b, name="v")


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_a_stride_zero_input(policy: AttentionPolicy) -> None:
    assert_saved_bytes(CASE.replace(layout="expanded", batch=2), policy, "cpu")


def test_the_policies_are_there() -> None:
    assert {"nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv"} <= set(FOUR_BIT)
    assert get_policy(FOUR_BIT[0]).operands["q"].quantized
