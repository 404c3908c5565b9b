"""What the Triton backend refuses, in words, on any machine."""

from dataclasses import replace

import pytest
import torch

from fp4mega import get_policy
from fp4mega.attention import list_policies
from fp4mega.attention.reference import saved_spec as reference_saved_spec
from fp4mega.kernels.triton import TritonBackend
from fp4mega.kernels.triton.support import _explain_direct_p, explain_policy, explain_problem
from fp4mega.testing import Case

BF16 = Case(dtype=torch.bfloat16)
ABLE = {"bf16", "direct_p_fast", "direct_p_accurate", "direct_p_guarded"} | {
    f"{cell}{rule}"
    for cell in (
        "nvfp4_qk_fp8_pv",
        "mxfp4_qk_fp8_pv",
        "nvfp4_qk_mxfp4_pv",
        "nvfp4_qk_fp8_p_mxfp4_v",
        "nvfp4_qk_mxfp4_p_fp8_v",
    )
    for rule in ("", "-paper", "-centered")
}


def test_the_cpu_is_refused_with_the_reason() -> None:
    reason = TritonBackend().explain(
        BF16.problem, get_policy("nvfp4_qk_fp8_pv"), torch.device("cpu")
    )
    assert reason == "the kernels need an NVIDIA GPU, the tensors are on cpu"


def reason_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], policy: str, case: Case = BF16
) -> str | None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return TritonBackend().explain(case.problem, get_policy(policy), torch.device("cuda"))


def test_the_8_bit_backward_is_refused_where_triton_does_not_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    for capability in ((10, 0), (10, 3), (11, 0)):
        for name in ABLE:
            reason = reason_on(monkeypatch, capability, name)
            if name == "bf16" or name.startswith("direct_p"):
                assert reason is None
            else:
                assert f"the GPU is sm_{capability[0]}{capability[1]}, for which" in str(reason)
    assert all(reason_on(monkeypatch, (9, 0), name) is None for name in ABLE)
    assert "need sm_89" in str(reason_on(monkeypatch, (8, 0), "bf16"))


@pytest.mark.parametrize(
    ("policy", "of_89", "of_120"),
    [
        ("bf16", 128, 128),
        ("direct_p_fast", 64, 64),
        ("nvfp4_qk_fp8_pv", 256, 64),
        ("mxfp4_qk_fp8_pv", 256, 128),
        ("nvfp4_qk_mxfp4_pv", 128, 128),
        ("nvfp4_qk_mxfp4_pv-paper", 128, 64),
        ("nvfp4_qk_mxfp4_p_fp8_v", 128, 64),
    ],
)
def test_head_dims_are_refused_whose_tiles_shared_memory_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, policy: str, of_89: int, of_120: int
) -> None:
    """Of `_dq_kernel` and the like, compiled for sm_89 and sm_120 with these head dims and with twice as many: the last that fits 99 KiB."""
    pytest.importorskip("triton")
    for capability, largest in (((8, 9), of_89), ((12, 0), of_120), ((9, 0), 256)):
        for dims in ((16, largest), (largest, 16)):
            fits = BF16.replace(head_dim=dims[0], head_dim_v=dims[1])
            assert reason_on(monkeypatch, capability, policy, fits) is None
        if largest < 256:
            wide = BF16.replace(head_dim=largest + 1)
            reason = reason_on(monkeypatch, capability, policy, wide)
            assert f"up to {largest}, not {largest + 1}/{largest + 1}" in str(reason)


def test_policies_without_kernels_are_refused_by_the_field_that_differs() -> None:
    refused = {n: explain_policy(get_policy(n)) for n in list_policies() if n in BUILT_IN}
    assert {n for n, reason in refused.items() if reason is None} == ABLE
    assert "q='none'" in refused["exact"]


BUILT_IN = tuple(list_policies())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": "mxfp4_floor"}, "q='mxfp4_floor'"),
        ({"v": "mxfp4_floor"}, "v='mxfp4_floor'"),
        ({"p": "mxfp4_amplitude"}, "p='mxfp4_amplitude'"),
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
    assert "float64" in explain_problem(Case(dtype=torch.float64).problem)
    assert explain_problem(Case().problem) is None
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


def test_direct_p_is_refused_where_it_has_no_kernel() -> None:
    policy = get_policy("direct_p_accurate")
    assert "causal='top_left'" in _explain_direct_p(BF16.replace(causal="top_left").problem, policy)
    assert "window=(3, None)" in _explain_direct_p(BF16.replace(window=(3, None)).problem, policy)
    packed = BF16.replace(lengths_q=(5, 1), lengths_k=(5, 1)).problem
    assert "packed" in _explain_direct_p(packed, policy)
    assert _explain_direct_p(packed, get_policy("direct_p_fast")) is None
    wide = replace(policy, name="wide", direct_p=replace(policy.direct_p, samples=129))
    assert "samples=129" in explain_policy(wide)
    assert "q='bf16'" in explain_policy(replace(policy, name="changed", q="bf16"))


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
