"""Forward and backward by the rule of two: every shape of the shared cases, and every policy that has kernels on one."""

import pytest
import torch

from fp4mega.attention import AttentionPolicy
from fp4mega.testing import LAYOUT_CASES, SHAPE_CASES, Case
from tests.kernels.triton.harness import BACKEND, POLICIES, policies
from tests.kernels.triton.interpreted.harness import check, small

SHAPES = [small(c) for c in SHAPE_CASES]
GQA = Case(
    batch=1, seqlen_q=70, seqlen_k=150, num_heads=2, num_kv_heads=1, causal="bottom_right", dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize("case", SHAPES, ids=str)
@policies("nvfp4_qk_fp8_pv", "bf16")
def test_shapes(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize("case", SHAPES[1::3], ids=str)
@policies("mxfp4_qk_fp8_pv")
def test_every_third_shape(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize("case", [small(c) for c in LAYOUT_CASES], ids=str)
@policies("nvfp4_qk_fp8_pv")
def test_layouts(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies(*POLICIES)
def test_every_policy(policy: AttentionPolicy) -> None:
    """Two query heads on one kv head; a row's keys in two tiles, of which the second is masked."""
    case = GQA if policy.direct_p is None else GQA.replace(causal="none")
    check(case, policy)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "bf16")
def test_float16(policy: AttentionPolicy) -> None:
    check(GQA.replace(dtype=torch.float16), policy)


@policies("mxfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv-paper")
def test_a_head_that_e4m3_does_not_hold_runs_in_bf16(policy: AttentionPolicy) -> None:
    """Blocks 20 octaves apart in one kv head, beside one that FP8 holds."""

    class Spread(Case):
        def make(self, **options):
            x = super().make(**options)
            x.k[:, :, 1, :32] *= 2.0**-20
            x.q[:, :, 1, 32:] *= 64
            return x

    fields = {f: getattr(GQA, f) for f in GQA.__dataclass_fields__}
    check(Spread(**{**fields, "head_dim": 64, "num_kv_heads": 2}), policy)


def test_the_policies_of_the_kernels_are_all_here() -> None:
    assert {"nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "bf16"} < set(POLICIES)
    assert {p for p in POLICIES if p.endswith("-paper")}
    assert BACKEND.name == "triton"
