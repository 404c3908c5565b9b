"""FP32 inputs on a GPU: publishers round from FP32 exactly as the reference does, output and gradients come back in FP32."""

import pytest
import torch

from fp4mega.attention import AttentionPolicy
from fp4mega.bench.gate import evaluate, reference_answers
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
    assert_rule_of_two,
)
from tests.kernels.triton.harness import (
    BACKEND,
    QUICK,
    TRAINING,
    assert_saved_bytes,
    half,
    policies,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICIES = ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "bf16")
FLOAT32 = QUICK.replace(dtype=torch.float32)


def check(case: Case, policy: AttentionPolicy) -> None:
    """The rule of two; 8-bit products are held to the rounding of a BF16 result at the least.

    Hopper adds 8-bit products in an accumulator of about 14 bits, relative to the largest term: 2^-14 of it stays, which BF16 outputs
    hide and FP32 outputs show, also where the noisy reference has no noise at all (scores of zero, a single key).
    """
    if case.seqlen_q == 1:
        # One row a head: enough of them that one code of dS more or less on either side does not decide.
        case = case.replace(batch=16)
    assert BACKEND.explain(case.problem, policy, torch.device("cuda")) is None
    x = case.make(device="cuda")
    got, result = evaluate(BACKEND, x, case, policy)
    exact, noisy = reference_answers(x, case, policy, result.saved)
    eight_bit = policy.operands["q"].quantized
    for name, value, wanted, noise in zip(got._fields, got, exact, noisy, strict=True):
        if value is not None and wanted is not None and noise is not None:
            dtype = torch.bfloat16 if eight_bit and name != "lse" else value.dtype
            assert_rule_of_two(value, wanted, noise, dtype=dtype, name=f"{case} {name}")


@half(SHAPE_CASES, torch.float32)
@policies(*POLICIES)
def test_shapes(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half((*MASK_CASES, *PACKED_CASES, *LAYOUT_CASES), torch.float32)
@policies("nvfp4_qk_fp8_pv", "bf16")
def test_masks_and_layouts(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(VALUE_CASES, torch.float32)
@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv")
def test_values(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies(*TRAINING)
def test_every_policy(policy: AttentionPolicy) -> None:
    check(FLOAT32, policy)
    result, _ = evaluate(BACKEND, FLOAT32.make(device="cuda"), FLOAT32, policy)
    for name in ("out", "dq", "dk", "dv"):
        assert getattr(result, name).dtype == torch.float32, name


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv")
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize(
    "values", ["randn", "outlier_channels", "large_mean", "denormals", "huge_v", "tiny"]
)
def test_saved_bytes_are_the_formats_bytes(
    policy: AttentionPolicy, head_dim: int, values: str
) -> None:
    """Full 24-bit mantissas against `quantize` on the CPU, from strided views, with odd lengths."""
    case = FLOAT32.replace(
        head_dim=head_dim, seqlen_q=203, seqlen_k=203, values=values, layout="fused_qkv"
    )
    assert_saved_bytes(case, policy)
