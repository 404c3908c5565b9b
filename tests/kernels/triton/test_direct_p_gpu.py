"""Direct-P on a GPU: bytes bitwise, output and log-sum-exp by the rule of two, extreme scores, repeatability, graphs."""

from dataclasses import replace

import pytest
import torch

from fp4mega.attention import AttentionPolicy, Saved, backward, forward, get_policy
from fp4mega.attention.call import Call
from fp4mega.attention.score_map import sample_order
from fp4mega.bench.gate import assert_agrees
from fp4mega.formats import quantize
from fp4mega.kernels.triton.backend import _sampled_first
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
    assert_bitwise,
    rel_l2,
)
from tests.kernels.triton.harness import BACKEND, QUICK, half, policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICIES = ("direct_p_fast", "direct_p_accurate", "direct_p_guarded")
FULL = QUICK.replace(causal="none")


def whole(cases):
    """Without causal masks and windows."""
    return [c.replace(causal="none", window=(None, None)) for c in cases]


def check(case: Case, policy: AttentionPolicy, device: str = "cuda") -> None:
    assert BACKEND.explain(case.problem, policy, torch.device(device)) is None
    assert_agrees(BACKEND, case, policy, device)


@half(whole(SHAPE_CASES))
@policies(*POLICIES)
def test_shapes(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(whole(MASK_CASES[3:]) + whole(LAYOUT_CASES))
@policies(*POLICIES)
def test_masks_and_layouts(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(whole(PACKED_CASES))
@policies("direct_p_fast")
def test_packed_sequences(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(whole(VALUE_CASES))
@policies(*POLICIES)
def test_values(case: Case, policy: AttentionPolicy) -> None:
    if policy.name != "direct_p_guarded" and case.values == "outlier_channels":
        pytest.skip("scores further from the reference than this policy holds in float32")
    check(case, policy)


@policies(*POLICIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(policy: AttentionPolicy, dtype: torch.dtype) -> None:
    check(FULL.replace(dtype=dtype), policy)


@policies("direct_p_guarded")
def test_scores_past_five_hundred(policy: AttentionPolicy) -> None:
    """Scores around 800, which float32's 2^z does not hold, and a V of 1e-20 under sums of 2^-102."""

    class Extreme(Case):
        def make(self, **options):
            x = super().make(**options)
            x.q.mul_(12)
            x.k.mul_(12)
            x.v.mul_(1e-20)
            return x

    case = Extreme(**{f: getattr(FULL, f) for f in FULL.__dataclass_fields__})
    x = case.make(device="cuda")
    result = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy)
    assert result.lse.abs().max() > 500
    assert result.out.abs().max() > 1e-21
    check(case, policy)


@policies(*POLICIES)
@pytest.mark.parametrize("values", ["randn", "zero_blocks", "denormals", "huge_v"])
def test_saved_bytes_are_the_formats_bytes(policy: AttentionPolicy, values: str) -> None:
    """In the policy's order of keys; V in the amplitude convention along them."""
    case = FULL.replace(head_dim=40, seqlen_q=203, seqlen_k=203, values=values, layout="fused_qkv")
    x = case.make(device="cuda")
    saved = list(BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).saved)
    order = Call(case.problem, policy, case.make().side).order(torch.device("cpu"))
    for name, t in (("q", x.q.cpu()), ("k", x.k.cpu()), ("v", x.v.cpu())):
        t = t if order is None or name == "q" else t[:, order]
        operand = policy.operands[name]
        dims = (1, 3) if operand.scope else None
        want = quantize(t, operand.format, axis=1 if name == "v" else 3, scale_dims=dims)
        for i, part in enumerate(want.tensors()):
            assert_bitwise(saved.pop(0).cpu(), part, name=f"{name}[{i}]")


@pytest.mark.parametrize(("keys", "samples"), [(1, 32), (31, 32), (32, 32), (333, 32), (4096, 128)])
def test_the_order_of_keys_is_the_references(keys: int, samples: int) -> None:
    device = torch.device("cuda")
    assert torch.equal(_sampled_first(keys, samples, device), sample_order(keys, samples, device))


@policies(*POLICIES)
def test_repeats_and_a_captured_graph_give_the_same_bits(policy: AttentionPolicy) -> None:
    x, other = FULL.make(device="cuda"), FULL.replace(seed=1).make(device="cuda")

    def run(y) -> tuple[torch.Tensor, torch.Tensor]:
        return BACKEND.forward(y.q, y.k, y.v, y.side, FULL.problem, policy)[:2]

    want, want_other = run(x), run(other)
    for _ in range(9):
        assert all(map(torch.equal, run(x), want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    for static, fresh in zip(x[:3], other[:3], strict=True):
        static.copy_(fresh)
    graph.replay()
    assert all(map(torch.equal, captured, want_other))


@policies(*POLICIES)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_never_becomes_a_number(
    policy: AttentionPolicy, operand: str, bad: float
) -> None:
    x = FULL.make(device="cuda")
    clean = BACKEND.forward(x.q, x.k, x.v, x.side, FULL.problem, policy).out
    getattr(x, operand)[0, 50, 0, 3] = bad
    got = BACKEND.forward(x.q, x.k, x.v, x.side, FULL.problem, policy).out
    want = forward(x.q, x.k, x.v, x.side, FULL.problem, policy)[0]
    assert torch.equal(got.isnan(), want.isnan())
    assert got.isnan().any()
    assert got[0, :, 2:].equal(clean[0, :, 2:])
    assert got[1].equal(clean[1])


@policies(*POLICIES)
def test_gradients_are_the_references(policy: AttentionPolicy) -> None:
    x = FULL.make(device="cuda")
    result = BACKEND.forward(x.q, x.k, x.v, x.side, FULL.problem, policy)
    nothing = (None, None, None)
    got = BACKEND.backward(x.dout, x.dlse, result, nothing, x.side, FULL.problem, policy)
    problem = replace(FULL.problem, dtype=torch.float32)
    kept = Saved(*forward(x.q.float(), x.k.float(), x.v.float(), x.side, problem, policy))
    want = backward(x.dout.float(), x.dlse, kept, nothing, x.side, problem, policy)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert rel_l2(a, b) < 0.1, name


def test_causal_is_refused_with_the_reason() -> None:
    reason = BACKEND.explain(QUICK.problem, get_policy("direct_p_fast"), torch.device("cuda"))
    assert reason is not None
    assert "causal='bottom_right'" in reason
