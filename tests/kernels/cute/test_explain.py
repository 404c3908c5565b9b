"""What the backend refuses, in words, on any machine, and what it saves. Needs no CUTLASS."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fp4mega.attention import list_policies
from fp4mega.attention.policy import get_policy
from fp4mega.attention.reference import saved_spec as reference_saved_spec
from fp4mega.kernels.cute import CuteSm100Backend, support
from fp4mega.kernels.cute.support import (
    explain_order,
    explain_policy,
    explain_problem,
    forward_config,
)
from fp4mega.testing import Case

BF16 = Case(dtype=torch.bfloat16, head_dim=128)
POLICY = get_policy("nvfp4_qk_fp8_pv")
BUILT_IN = tuple(list_policies())
ABLE = {
    *(f"{q}_qk_fp8_pv{rule}" for q in ("nvfp4", "mxfp4") for rule in ("", "-paper", "-centered")),
    *(f"direct_p_{kind}" for kind in ("fast", "accurate", "guarded")),
}


def test_other_devices_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    explain = CuteSm100Backend().explain
    assert "the tensors are on cpu" in str(explain(BF16.problem, POLICY, torch.device("cpu")))
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "the GPU is sm_90, the kernels are compiled for sm_100" in str(
        explain(BF16.problem, POLICY, gpu)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(support, "_PACKAGES", ("cutlass_that_is_not_there",))
    assert "is not installed" in str(explain(BF16.problem, POLICY, gpu))
    monkeypatch.setattr(support, "_PACKAGES", ())
    assert explain(BF16.problem, POLICY, gpu) is None


def test_policies_with_kernels() -> None:
    reasons = {name: explain_policy(get_policy(name)) for name in BUILT_IN}
    assert {name for name, reason in reasons.items() if reason is None} == ABLE
    assert "q='bf16'" in str(reasons["bf16"])
    assert "v='mxfp4_rceil'" in str(reasons["nvfp4_qk_fp8_p_mxfp4_v"])
    assert "p='mxfp4_rceil'" in str(reasons["nvfp4_qk_mxfp4_p_fp8_v"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": "mxfp4_floor", "k": "mxfp4_floor"}, "q='mxfp4_floor'"),
        ({"q": "nvfp4/row"}, "q='nvfp4/row'"),
        ({"q": "nvfp4+sr", "k": "nvfp4+sr"}, "q='nvfp4+sr'"),
        ({"v": "e4m3/tensor"}, "v='e4m3/tensor'"),
        ({"p": "e4m3/unit+sr"}, "p='e4m3/unit+sr'"),
        ({"tile_n": 64}, "tile_n=64"),
        ({"max_rule": "exact"}, "max_rule='exact'"),
    ],
)
def test_a_changed_number_is_refused(change: dict, named: str) -> None:
    assert named in str(explain_policy(replace(POLICY, name="changed", **change)))


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (BF16.replace(dtype=torch.float16), "float16"),
        (BF16.replace(head_dim=96), "head_dim=96"),
        (BF16.replace(head_dim_v=32), "head_dim_v=32"),
        (BF16.replace(head_dim_v=192), "head_dim_v=192"),
        (BF16.replace(mask="arbitrary"), "attention_mask"),
        (BF16.replace(seqlen_k=0), "nothing to compute"),
        (BF16.replace(lengths_q=(0, 0), lengths_k=(0, 0)), "nothing to compute"),
    ],
    ids=str,
)
def test_problems_without_kernels_are_refused(case: Case, named: str) -> None:
    assert named in str(explain_problem(case.problem))


@pytest.mark.parametrize(
    "case",
    [
        BF16.replace(causal="top_left"),
        BF16.replace(window=(3, None)),
        BF16.replace(lengths_q=(5, 5), lengths_k=(5, 5)),
    ],
    ids=str,
)
def test_permuted_keys_have_no_position(case: Case) -> None:
    sampled, fixed = get_policy("direct_p_accurate"), get_policy("direct_p_fast")
    assert "permutes the keys" in str(explain_order(case.problem, sampled))
    assert explain_order(case.problem, fixed) is None
    assert explain_order(BF16.replace(mask="padding").problem, sampled) is None


def test_the_kernel_of_a_problem() -> None:
    case = BF16.replace(window=(7, None), causal="bottom_right", sink=True, head_dim_v=64)
    config = forward_config(case.problem, POLICY)
    assert (config.dim, config.dim_v) == (128, 64)
    assert config.left
    assert config.right
    assert config.sink
    assert not config.lengths
    assert not forward_config(BF16.replace(window=(7, None)).problem, POLICY).right
    packed = BF16.replace(lengths_q=(3, 4), lengths_k=(3, 4))
    assert forward_config(packed.problem, POLICY).lengths


@pytest.mark.parametrize("name", sorted(ABLE))
def test_saved_bytes_are_the_references(name: str) -> None:
    policy = get_policy(name)
    spec = CuteSm100Backend().saved_spec(BF16.problem, policy)
    assert [tuple(s) for s in spec] == list(reference_saved_spec(BF16.problem, policy))


def test_backward_is_refused_with_what_to_do() -> None:
    x = BF16.make()
    with pytest.raises(NotImplementedError, match="no backward yet.*backend='reference'"):
        CuteSm100Backend().backward(
            x.dout, None, None, (None, None, None), x.side, BF16.problem, POLICY
        )


def test_importing_the_backend_needs_no_cutlass() -> None:
    code = "import sys, fp4mega.kernels; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
