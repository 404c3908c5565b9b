"""Publishers bit for bit as `fp4mega.formats`: saved bytes, and every operand in both orientations, from strided views."""

import pytest
import torch
from torch import Tensor

from fp4mega.attention import AttentionPolicy
from fp4mega.formats import quantize
from fp4mega.kernels.triton import publish
from fp4mega.testing import VALUES, Case, assert_bitwise
from tests.kernels.triton.harness import BACKEND, TRAINING, get_policy, policies

CASE = Case(
    batch=1, seqlen_q=35, seqlen_k=35, num_heads=2, num_kv_heads=1, head_dim=40, layout="fused_qkv", dtype=torch.bfloat16,
)  # fmt: skip
FOUR_BIT = tuple(n for n in TRAINING if n != "bf16" and "-" not in n)


def assert_saved(case: Case, policy: AttentionPolicy) -> None:
    x = case.make()
    saved = list(BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).saved)
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v)):
        if x.side.key_padding_mask is not None and name != "q":
            t = t.masked_fill(x.side.key_padding_mask[..., None, None], 0)
        operand = policy.operands[policy.backward_v if name == "v" else name]
        dims = (1, 3) if operand.scope else None
        want = quantize(t, operand.format, axis=1 if name == "v" else 3, scale_dims=dims)
        for i, part in enumerate(want.tensors()):
            assert_bitwise(saved.pop(0), part, name=f"{case.values} {name}[{i}]")


@pytest.mark.parametrize("values", VALUES)
@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_saved_bytes(policy: AttentionPolicy, values: str) -> None:
    assert_saved(CASE.replace(values=values), policy)


@policies(*(n for n in FOUR_BIT if n not in ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")))
@pytest.mark.parametrize("values", ["zero_blocks"])
def test_saved_bytes_of_other_policies(policy: AttentionPolicy, values: str) -> None:
    assert_saved(CASE.replace(values=values), policy)


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
    assert_saved(case, policy)


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
        inexact = torch.zeros((1, x.shape[2]), dtype=torch.int32)
        saved, largest, operand, divisor = publish.publish_fp4(x, None, nvfp4=nvfp4, inexact=inexact)  # fmt: skip
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
        again = torch.zeros_like(inexact)
        made, across, power = publish.expand_fp4(
            saved, largest, 40, nvfp4=nvfp4, scores="bf16" if nvfp4 else "e4m3", gradient=True, inexact=again,
        )  # fmt: skip
        assert_bitwise(again, inexact, name="inexact")
        assert_bitwise(made.view(torch.uint8), operand.view(torch.uint8), name="made again")
        gradient = quantize(scored(x, fmt).float(), "e4m3", axis=3, scale_dims=(1, 3))
        codes = publish.in_natural_order(across.view(torch.uint8))
        # The quotient by NVFP4's FP32 number loses the sign of a zero, which no product sees.
        turned = codes[:, :, :40, :35]
        want = gradient.codes.permute(0, 2, 3, 1)
        turned, want = (t.masked_fill(t == 0x80, 0) if nvfp4 else t for t in (turned, want))
        assert_bitwise(turned, want, name="gradient")
        assert_bitwise(power, gradient.global_scale.flatten(1), name="power")
        assert not codes[:, :, 40:].any()
        assert not codes[:, :, :, 35:].any()


@pytest.mark.parametrize("values", ["huge_v", "denormals", "zeros"])
def test_fp8_in_both_orientations(values: str) -> None:
    for x in tensors(values):
        saved, across = publish.publish_v(x, None)
        want = quantize(x, "e4m3", axis=1, scale_dims=(1, 3))
        for a, b in zip(saved, want.tensors(), strict=True):
            assert_bitwise(a, b, name="v")
        turned = publish.in_natural_order(across.view(torch.uint8))
        assert_bitwise(turned[:, :, :40, :35], want.codes.permute(0, 2, 3, 1), name="v across")
        assert not turned[:, :, 40:].any()
        assert not turned[:, :, :, 35:].any()
        codes, across, power = publish.publish_dout(x)
        want = quantize(x, "e5m2", axis=3, scale_dims=(1, 3))
        straight = codes.view(torch.uint8)
        turned = publish.in_natural_order(across.view(torch.uint8))
        assert_bitwise(straight[:, :, :35, :40], want.codes.permute(0, 2, 1, 3), name="dO")
        assert_bitwise(turned[:, :, :40, :35], want.codes.permute(0, 2, 3, 1), name="dO across")
        assert_bitwise(power, want.global_scale.flatten(1), name="power of dO")
        assert not straight[:, :, 35:].any()
        assert not straight[:, :, :, 40:].any()


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_a_stride_zero_input(policy: AttentionPolicy) -> None:
    assert_saved(CASE.replace(layout="expanded", batch=2), policy)


def test_the_policies_are_there() -> None:
    assert {"nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv"} <= set(FOUR_BIT)
    assert get_policy(FOUR_BIT[0]).operands["q"].quantized
