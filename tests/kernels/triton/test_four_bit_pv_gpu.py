"""MXFP4 P and V, and the rule `centered`, on a GPU: bytes bitwise, results by the rule of two, rows of dS."""

import pytest
import torch

from fp4mega.attention import AttentionPolicy, forward
from fp4mega.bench.gate import assert_agrees, evaluate
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
)
from tests.kernels.triton.harness import BACKEND, QUICK, assert_saved_bytes, half, policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CELLS = ("nvfp4_qk_mxfp4_pv", "nvfp4_qk_fp8_p_mxfp4_v", "nvfp4_qk_mxfp4_p_fp8_v")
CENTERED = ("nvfp4_qk_fp8_pv-centered", "mxfp4_qk_fp8_pv-centered")
POLICIES = (*CELLS, *(f"{cell}-paper" for cell in CELLS), *(f"{c}-centered" for c in CELLS))


def check(case: Case, policy: AttentionPolicy) -> None:
    if case.seqlen_q == 1:
        # One row a head: enough of them that one code of dS more or less on either side does not decide.
        case = case.replace(batch=16)
    assert BACKEND.explain(case.problem, policy, torch.device("cuda")) is None
    assert_agrees(BACKEND, case, policy, "cuda")


@half(SHAPE_CASES)
@policies(*POLICIES, *CENTERED)
def test_shapes(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(MASK_CASES)
@policies(*CELLS, "nvfp4_qk_mxfp4_pv-paper", "nvfp4_qk_mxfp4_pv-centered", *CENTERED)
def test_masks(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(PACKED_CASES)
@policies("nvfp4_qk_mxfp4_pv", "nvfp4_qk_mxfp4_pv-centered")
def test_packed_sequences(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(LAYOUT_CASES)
@policies("nvfp4_qk_mxfp4_pv", "nvfp4_qk_mxfp4_p_fp8_v", "nvfp4_qk_fp8_p_mxfp4_v-centered")
def test_layouts(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(VALUE_CASES)
@policies(*CELLS, "nvfp4_qk_mxfp4_pv-paper", "nvfp4_qk_mxfp4_pv-centered")
def test_values(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies(*POLICIES, *CENTERED)
def test_float16(policy: AttentionPolicy) -> None:
    check(QUICK.replace(dtype=torch.float16), policy)


@policies(*CELLS, "nvfp4_qk_mxfp4_pv-paper")
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize(
    "values", ["randn", "outlier_channels", "zero_blocks", "denormals", "huge_v"]
)
def test_saved_bytes_are_the_formats_bytes(
    policy: AttentionPolicy, head_dim: int, values: str
) -> None:
    """Against `quantize` on the CPU, from strided views, with odd lengths: MXFP4 V packs and scales along the keys."""
    case = QUICK.replace(
        head_dim=head_dim, seqlen_q=203, seqlen_k=203, values=values, layout="fused_qkv"
    )
    assert_saved_bytes(case, policy)


@policies(*CELLS)
def test_ones_attend_to_one(policy: AttentionPolicy) -> None:
    """With the represented normalizer, and V = 1 exact in every format, the output is 1 whatever P was rounded to."""
    case = QUICK.replace(head_dim=128)
    x = case.make(device="cuda")
    out = BACKEND.forward(x.q, x.k, torch.ones_like(x.v), x.side, case.problem, policy).out
    assert torch.equal(out, torch.ones_like(out))


@policies(*CELLS, *(f"{c}-centered" for c in CELLS), *CENTERED)
def test_rows_of_ds_sum_to_zero(policy: AttentionPolicy) -> None:
    """Equal keys make dQ = K rowsum(dS): zero up to the rounding of dS where the rule is consistent."""
    case = QUICK.replace(causal="none", num_kv_heads=4)
    x = case.make(device="cuda")
    x.k.copy_(x.k[:, :1])
    x.dlse.zero_()
    same, _ = evaluate(BACKEND, x, case, policy)
    x = case.make(device="cuda")
    x.dlse.zero_()
    other, _ = evaluate(BACKEND, x, case, policy)
    # .016 here, the rounding of dS; .07 to .11 under the rule `paper`.
    assert same.dq.double().norm() < 0.03 * other.dq.double().norm()


@policies("nvfp4_qk_mxfp4_pv")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_v_stays_in_its_block(policy: AttentionPolicy, bad: float) -> None:
    """One column of one kv head turns NaN where the reference does; everything else keeps its bits."""
    x = QUICK.make(device="cuda")
    clean, _ = evaluate(BACKEND, x, QUICK, policy)
    x.v[0, 50, 0, 3] = bad
    got, _ = evaluate(BACKEND, x, QUICK, policy)
    want = forward(x.q, x.k, x.v, x.side, QUICK.problem, policy)[0]
    assert torch.equal(got.out.isnan(), want.isnan())
    assert got.out.isnan().any()
    assert not got.out.isnan().all()
    assert got.out[0, :, 2:].equal(clean.out[0, :, 2:])
    assert got.out[1].equal(clean.out[1])


@policies(*POLICIES)
def test_zero_gradient_is_exactly_zero(policy: AttentionPolicy) -> None:
    x = QUICK.make(device="cuda")
    x.dout.zero_()
    x.dlse.zero_()
    got, _ = evaluate(BACKEND, x, QUICK, policy)
    for gradient in (got.dq, got.dk, got.dv):
        assert not gradient.any()
