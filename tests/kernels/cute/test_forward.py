"""The forward kernels, executed by the interpreter, against the float64 reference: a subset for every change.

`matrix.py` has all of it. Few kernels are compiled here, so cases are chosen to share them.
"""

import pytest
import torch

from fp4mega.attention.policy import get_policy
from fp4mega.kernels import get_backend
from fp4mega.testing import Case
from fp4mega.testing.assertions import assert_bitwise
from tests.kernels.cute.harness import BASE, check, execute, prepare, run

CAUSAL = BASE.replace(causal="top_left")
DIRECT = BASE.replace(policy="direct_p_fast")
SMALL = {"seqlen_q": 150, "seqlen_k": 150}

CASES = (
    BASE.replace(num_heads=8, seqlen_q=70, seqlen_k=100),
    BASE.replace(seqlen_q=1, seqlen_k=260, num_heads=4),
    CAUSAL.replace(seqlen_q=300, seqlen_k=300),
    CAUSAL.replace(causal="bottom_right", seqlen_q=130, seqlen_k=290),
    CAUSAL.replace(causal="bottom_right", seqlen_q=290, seqlen_k=130),
    CAUSAL.replace(seqlen_q=40, seqlen_k=1, batch=2, num_heads=4, num_kv_heads=2),
    DIRECT.replace(seqlen_q=260, seqlen_k=390),
    DIRECT.replace(seqlen_q=30, seqlen_k=75, num_heads=2),
    BASE.replace(policy="direct_p_accurate", seqlen_k=300),
    BASE.replace(policy="mxfp4_qk_fp8_pv", head_dim=64, **SMALL),
    BASE.replace(lengths_q=(0, 133, 1), lengths_k=(0, 200, 3), causal="bottom_right", sink=True),
    BASE.replace(window=(20, 30), seqlen_q=200, seqlen_k=300),
    CAUSAL.replace(head_dim=192, head_dim_v=128, **SMALL),
    BASE.replace(policy="direct_p_accurate", mask="padding_all", batch=2, seqlen_k=300),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_policies(case: Case) -> None:
    check(case)


VALUES = ("outlier_channels", "large_mean", "zero_blocks", "rising_logits", "sink_key", "tiny")


@pytest.mark.parametrize("values", VALUES)
def test_adversarial_values(values: str) -> None:
    check(CAUSAL.replace(values=values, **SMALL))


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        ("direct_p_fast", "zero_blocks"),
        ("direct_p_fast", "sink_key"),
        # Scores of some hundreds leave float32 under a fixed reference: what the guarded policy is for.
        ("direct_p_guarded", "outlier_channels"),
        ("direct_p_guarded", "large_mean"),
    ],
)
def test_adversarial_values_under_direct_p(policy: str, values: str) -> None:
    check(DIRECT.replace(policy=policy, values=values, **SMALL))


@pytest.mark.parametrize("order", ["lazy", "random-1"])
@pytest.mark.parametrize(
    "case", [CAUSAL.replace(seqlen_q=150, seqlen_k=290), DIRECT.replace(seqlen_k=390)], ids=str
)
def test_the_order_of_asynchronous_work_does_not_matter(case: Case, order: str) -> None:
    forward, eager = execute(case, order=order), execute(case)
    assert_bitwise(forward.out, eager.out, name="out")
    assert_bitwise(forward.lse, eager.lse, name="lse")


@pytest.mark.parametrize("case", [CAUSAL.replace(**SMALL), DIRECT.replace(**SMALL)], ids=str)
def test_the_average_of_ones_is_exactly_one(case: Case) -> None:
    x = case.make()
    out = execute(case, x._replace(v=torch.ones_like(x.v))).out
    assert_bitwise(out, torch.ones_like(out), name="out")


@pytest.mark.parametrize("case", [CAUSAL.replace(**SMALL), DIRECT.replace(**SMALL)], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_not_a_number_stays_in_its_head(case: Case, operand: str) -> None:
    """In MXFP4 V it stays in its block of keys and column, which every row sees."""
    case = case.replace(num_heads=2, num_kv_heads=2, seqlen_q=40, seqlen_k=40)
    x = case.make()
    clean = execute(case)
    getattr(x, operand)[0, 3, 1, 5] = torch.nan
    out = execute(case, x).out
    assert_bitwise(out[:, :, 0], clean.out[:, :, 0], name="the other head")
    if operand == "v" and case.policy == "direct_p_fast":
        assert out[:, :, 1, 5].isnan().all()
    else:
        assert out[:, :, 1].isnan().all()


def test_a_sum_that_overflows_is_nan() -> None:
    """Scores past 2^127 in one row under a fixed reference; the rows beside it are numbers."""
    case = DIRECT.replace(**SMALL)
    x = case.make()
    x.k[0, 7] = 4.0
    x.q[0, 3] = 4.0
    forward = execute(case, x)
    assert forward.out[0, 3].isnan().all()
    assert forward.lse[0, 0, 3].isnan()
    others = torch.arange(150) != 3
    assert forward.out[0, others].isfinite().all()
    assert forward.lse[0, 0, others].isfinite().all()


def test_saved_tensors_are_the_references() -> None:
    """Bytes bitwise; m exactly and L up to codes that a rounding in the score flips."""
    case = CAUSAL.replace(layout="fused_qkv", num_kv_heads=1, num_heads=2, **SMALL)
    x, policy = case.make(), get_policy(case.policy)
    saved = execute(case).saved
    expected = get_backend("reference").forward(x.q, x.k, x.v, x.side, case.problem, policy).saved
    for i, (got, wanted) in enumerate(zip(saved[:-1], expected[:-1], strict=True)):
        assert_bitwise(got, wanted, name=f"saved[{i}]")
    top, total = saved[-1]
    assert_bitwise(top, expected[-1][0], name="m")
    assert ((total / expected[-1][1]).log2().abs() < 0.02).all()


def test_operands_are_not_written_to() -> None:
    """And nothing past an output's end: the interpreter knows no memory but the tensors'."""
    call = prepare(CAUSAL.replace(seqlen_q=131, seqlen_k=131))
    results = (call.out, call.lse, call.statistics)
    operands = [t for t in call.tensors if all(t is not r for r in results)]
    assert len(operands) == 8
    before = [t.clone() for t in operands]
    run(call)
    for t, was in zip(operands, before, strict=True):
        assert_bitwise(t, was, name="operand")
