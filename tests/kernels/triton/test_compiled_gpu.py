"""The Triton kernels behind `attention_func` under torch.compile: the same bits as eager, forward and backward."""

import pytest
import torch
from torch import Tensor

from fp4mega import attention_func
from fp4mega.testing import Case, Inputs, assert_bitwise
from tests.kernels.triton.harness import QUICK, TRAINING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "bottom_right": QUICK,
    "window_sink": QUICK.replace(
        seqlen_q=150, seqlen_k=150, causal="top_left", window=(40, 0), sink=True
    ),
    "padding_fused": QUICK.replace(
        seqlen_q=140, seqlen_k=140, causal="none", mask="padding_all", layout="fused_qkv"
    ),
    "packed": QUICK.replace(lengths_q=(70, 0, 31), lengths_k=(9, 40, 31)),
}

FEW = ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "bf16")
COMPILED = [
    (case, policy) for case in CASES for policy in (TRAINING if case == "bottom_right" else FEW)
]


def call(case: Case, x: Inputs, function=attention_func) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and of the sink where there is one."""
    out, lse = function(*x[:3], return_lse=True, backend="triton", **case.arguments(x.side))
    leaves = [*x[:3]] if x.side.sink is None else [*x[:3], x.side.sink]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse))]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    names = ("out", "lse", "dq", "dk", "dv", "dsink")[: len(want)]
    for name, a, b in zip(names, got, want, strict=True):
        assert_bitwise(a, b, name=name)


@pytest.fixture(autouse=True)
def _no_compiled_code_left() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize(("name", "policy"), COMPILED)
def test_compiled_equals_eager(name: str, policy: str) -> None:
    case = CASES[name].replace(policy=policy)
    x = case.make(device="cuda", requires_grad=True)
    want = call(case, x)
    assert any(t.abs().max() > 0 for t in want[2:]), "gradients that are all zero compare nothing"
    compiled = torch.compile(attention_func, fullgraph=True)
    assert_same(call(case, x, compiled), want)
    # A second call runs the code that the first compiled, on other values.
    x = case.replace(seed=1).make(device="cuda", requires_grad=True)
    assert_same(call(case, x, compiled), call(case, x))


@pytest.mark.parametrize("policy", FEW)
def test_compiled_with_its_neighbours(policy: str) -> None:
    """Inductor fuses around the op and chooses the strides it is called with: projections in, a product out, one backward."""
    case = QUICK.replace(policy=policy)
    x = case.make(device="cuda")

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention_func(
            (q * 2).transpose(1, 2).contiguous().transpose(1, 2), k, v + 1,
            policy=policy, causal="bottom_right", backend="triton",
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out * 0.5

    def gradients(function) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in x[:3]]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, x.dout)]

    # Powers of two and a sum that each fusion rounds once: the neighbours themselves give the same bits.
    for a, b in zip(gradients(torch.compile(block, fullgraph=True)), gradients(block), strict=True):
        assert_bitwise(a, b, name=policy)


@pytest.mark.parametrize("policy", FEW)
def test_compiled_once_for_all_lengths(policy: str) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention_func, fullgraph=True)
    for seqlen in (200, 136, 61, 330):
        case = QUICK.replace(policy=policy, seqlen_q=seqlen, seqlen_k=seqlen + 9)
        x = case.make(device="cuda", requires_grad=True)
        assert_same(call(case, x, compiled), call(case, x))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2, "one static graph, one dynamic"


@pytest.mark.parametrize("policy", FEW)
def test_reduce_overhead_replays_graphs_on_new_inputs(policy: str) -> None:
    """mode="reduce-overhead" captures forward and backward as CUDA graphs; five calls, the last ones are replays."""
    case = QUICK.replace(policy=policy)
    compiled = torch.compile(attention_func, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        x = case.replace(seed=seed).make(device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        # Outputs live in the graph's own memory until the next step.
        got = [t.clone() for t in call(case, x, compiled)]
        assert_same(got, call(case, x))
