"""The gate: right answers pass on a whole shape, every planted fault is refused, and only a green gate lets a speedup be printed."""

from dataclasses import replace

import pytest
import torch

from fp4mega.attention import get_policy
from fp4mega.bench.gate import assert_agrees, check_shape, chosen_heads, head_errors
from fp4mega.bench.shapes import Shape
from fp4mega.kernels import ReferenceBackend
from fp4mega.testing.cases import Case
from tests.bench.attention_doubles import WrongBackend

CAUSAL, FULL = Shape.parse("2,6/3,160,32:causal"), Shape.parse("1,3/3,192,32")
TRAINING = ("mxfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper", "nvfp4_qk_fp8_pv-centered", "bf16")


@pytest.mark.parametrize("policy", TRAINING)
def test_the_reference_itself_passes(policy):
    verdict = check_shape(ReferenceBackend(), CAUSAL, get_policy(policy), "cpu")
    assert verdict.green, verdict
    assert verdict.heads == ((0, 0), (1, 2))
    assert verdict.total == 6
    assert "0.0, 1.2" in str(verdict)


@pytest.mark.parametrize("policy", ["direct_p_fast", "direct_p_accurate", "direct_p_guarded"])
def test_direct_p_is_checked_forward_only(policy):
    assert check_shape(ReferenceBackend(), FULL, get_policy(policy), "cpu").green
    wrong = check_shape(WrongBackend("scaled output"), FULL, get_policy(policy), "cpu")
    assert not wrong.green
    assert " out:" in str(wrong)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("scaled output", "out"),
        ("one unchecked head", "kv head 0.1"),
        ("nan in an unchecked head", "kv head 0.1"),
        ("lse", "lse"),
        ("dk of one row", "dk"),
        ("dq sign", "dq"),
    ],
)
def test_planted_faults_are_refused(fault, where):
    policy = get_policy("nvfp4_qk_fp8_pv")
    assert check_shape(WrongBackend("none"), FULL, policy, "cpu").green
    verdict = check_shape(WrongBackend(fault), FULL, policy, "cpu")
    assert not verdict.green
    assert str(verdict).startswith("FAILED")
    assert where in str(verdict)


def test_all_heads_can_go_through_the_reference():
    policy = get_policy("nvfp4_qk_fp8_pv")
    verdict = check_shape(WrongBackend("one unchecked head"), FULL, policy, "cpu", heads=99)
    assert verdict.heads == ((0, 0), (0, 1), (0, 2))
    assert "head 0.1 out" in str(verdict)


def test_a_scale_over_all_heads_cannot_be_checked_head_by_head():
    policy = replace(get_policy("nvfp4_qk_fp8_pv"), name="tensor-do", do="e5m2/tensor")
    with pytest.raises(ValueError, match="do=e5m2/tensor"):
        check_shape(ReferenceBackend(), FULL, policy, "cpu")


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths_q=(5, 64, 31), lengths_k=(5, 64, 31), causal="top_left", sink=True),
        Case(seqlen_q=40, seqlen_k=140, mask="padding_all"),
    ],
    ids=str,
)
def test_small_cases_take_masks_packing_and_sinks(case):
    case = case.replace(dtype=torch.bfloat16)
    assert_agrees(ReferenceBackend(), case, get_policy("nvfp4_qk_fp8_pv"), "cpu")
    with pytest.raises(AssertionError, match="FAILED"):
        assert_agrees(WrongBackend("scaled output"), case, get_policy("nvfp4_qk_fp8_pv"), "cpu")


@pytest.mark.parametrize(
    ("text", "count", "picked"),
    [
        ("4,32/32,128,64", 2, ((0, 0), (3, 31))),
        ("1,8/1,128,64", 2, ((0, 0),)),
        ("1,8/4,128,64", 3, ((0, 0), (0, 2), (0, 3))),
    ],
)
def test_first_and_last_heads_are_among_the_checked(text, count, picked):
    assert chosen_heads(Shape.parse(text), count) == picked


def test_head_errors_are_relative_and_by_kv_head():
    wanted = torch.ones(2, 3, 4, 5)
    value = wanted.clone()
    value[1, :, 2] += 0.5
    errors = head_errors(value, wanted, 2)
    assert errors.shape == (2, 2)
    # Half of kv head 1's two query heads is off by half: sqrt(.5 * .25).
    assert errors[1, 1] == pytest.approx(0.125**0.5)
    assert errors.count_nonzero() == 1
