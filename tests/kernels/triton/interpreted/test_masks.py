"""Windows, padding, packed sequences, sinks: by the rule of two, and what rows that see nothing leave."""

import pytest
import torch

from fp4mega.attention import AttentionPolicy
from fp4mega.bench.gate import evaluate
from fp4mega.testing import MASK_CASES, PACKED_CASES, Case
from tests.kernels.triton.harness import BACKEND, POLICIES, policies
from tests.kernels.triton.interpreted.harness import check, small

MASKS = [small(c) for c in MASK_CASES if c.mask != "arbitrary"]
PACKED = [small(c) for c in PACKED_CASES]


@pytest.mark.parametrize("case", MASKS, ids=str)
@policies("nvfp4_qk_fp8_pv", "bf16")
def test_masks(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


OTHERS = tuple(n for n in ("mxfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv") if n in POLICIES)


@pytest.mark.parametrize("case", [MASKS[0], MASKS[-1]], ids=str)
@policies(*OTHERS)
def test_some_masks_with_other_policies(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize("case", PACKED, ids=str)
@policies("nvfp4_qk_fp8_pv")
def test_packed_sequences(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize("case", [PACKED[2], PACKED[4]], ids=str)
@policies("bf16")
def test_packed_sequences_in_bf16(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies("nvfp4_qk_fp8_pv", "bf16")
@pytest.mark.parametrize("sink", [False, True])
def test_rows_that_see_nothing(policy: AttentionPolicy, sink: bool) -> None:
    """Exactly 0 in output and gradients and -inf (the sink's logit) as log-sum-exp, for a hidden entry and for early rows."""
    hidden = small(MASK_CASES[4]).replace(sink=sink)
    early = Case(
        batch=1, seqlen_q=40, seqlen_k=20, num_heads=2, num_kv_heads=1, causal="bottom_right", sink=sink, dtype=torch.bfloat16,
    )  # fmt: skip
    for case, blind in ((hidden, (1, slice(None))), (early, (0, slice(0, 20)))):
        x = case.make()
        x.dlse.zero_()
        got, _ = evaluate(BACKEND, x, case, policy)
        entry, rows = blind
        assert not got.out[entry, rows].any()
        assert not got.dq[entry, rows].any()
        lse = got.lse[entry, :, rows]
        want = x.side.sink[:, None].expand_as(lse) if sink else torch.full_like(lse, -torch.inf)
        torch.testing.assert_close(lse, want, rtol=1e-6, atol=1e-6)
        assert got.out[0, -1].any()
        assert all(t.isfinite().all() for t in (got.out, got.dq, got.dk, got.dv))
        if case is hidden:
            assert not got.dk[1].any()
            assert not got.dv[1].any()
