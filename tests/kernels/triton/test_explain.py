"""What the Triton backend refuses, in words, on any machine."""

from dataclasses import replace

import pytest
import torch

from fp4mega import get_policy
from fp4mega.attention import list_policies
from fp4mega.attention.reference import saved_spec as reference_saved_spec
from fp4mega.kernels.triton import TritonBackend
from fp4mega.kernels.triton.support import explain_policy, explain_problem
from fp4mega.testing import Case

BF16 = Case(dtype=torch.bfloat16)
ABLE = {
    "bf16",
    "nvfp4_qk_fp8_pv",
    "nvfp4_qk_fp8_pv-paper",
    "mxfp4_qk_fp8_pv",
    "mxfp4_qk_fp8_pv-paper",
}


def test_the_cpu_is_refused_with_the_reason() -> None:
    reason = TritonBackend().explain(
        BF16.problem, get_policy("nvfp4_qk_fp8_pv"), torch.device("cpu")
    )
    assert reason == "the kernels need an NVIDIA GPU, the tensors are on cpu"


def test_policies_without_kernels_are_refused_by_the_field_that_differs() -> None:
    refused = {n: explain_policy(get_policy(n)) for n in list_policies() if n in BUILT_IN}
    assert {n for n, reason in refused.items() if reason is None} == ABLE
    assert "centered" in refused["nvfp4_qk_fp8_pv-centered"]
    assert "v='mxfp4_rceil'" in refused["nvfp4_qk_fp8_p_mxfp4_v"]
    assert "Direct-P" in refused["direct_p_fast"]


BUILT_IN = tuple(list_policies())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": "mxfp4_floor"}, "q='mxfp4_floor'"),
        ({"v": "e4m3/tensor"}, "v='e4m3/tensor'"),
        ({"do": "e4m3/head"}, "do='e4m3/head'"),
        ({"ds": "bf16"}, "ds='bf16'"),
        ({"q": "nvfp4+sr", "k": "nvfp4+sr"}, "q='nvfp4+sr'"),
        ({"tile_n": 64}, "64x64"),
        ({"max_rule": "exact"}, "max_rule='exact'"),
    ],
)
def test_a_changed_number_is_refused(change: dict, named: str) -> None:
    policy = replace(get_policy("nvfp4_qk_fp8_pv"), name="changed", **change)
    assert named in explain_policy(policy)


def test_problems_without_kernels_are_refused() -> None:
    assert "float32" in explain_problem(Case().problem)
    assert "attention_mask" in explain_problem(BF16.replace(mask="arbitrary").problem)
    assert "nothing to compute" in explain_problem(BF16.replace(seqlen_k=0).problem)
    assert "head dims 32/8" in explain_problem(BF16.replace(head_dim_v=8).problem)
    for able in (
        BF16,
        BF16.replace(window=(3, 0), causal="top_left", sink=True),
        BF16.replace(mask="padding"),
        BF16.replace(lengths_q=(5, 0), lengths_k=(5, 0)),
    ):
        assert explain_problem(able.problem) is None


def test_what_is_saved_begins_with_the_reference_bytes() -> None:
    """BF16 Q and K are never beside them: two numbers a head are."""
    case = BF16.replace(head_dim=40)
    for name in ABLE:
        policy = get_policy(name)
        ours = TritonBackend().saved_spec(case.problem, policy)
        theirs = reference_saved_spec(case.problem, policy)
        assert [tuple(s) for s in ours[: len(theirs)]] == list(theirs)
        extra = [] if name == "bf16" else [((2, 4), torch.float32), ((2, 2), torch.float32)]
        assert [tuple(s) for s in ours[len(theirs) :]] == extra
