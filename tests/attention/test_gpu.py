"""The reference on a GPU is the reference on a CPU: bytes bit for bit, sums to FP32 rounding and flipped codes."""

import pytest
import torch

from fp4mega.attention import Saved, backward, forward, get_policy, list_policies
from fp4mega.formats import counter_bits, list_formats, quantize
from fp4mega.testing.assertions import assert_bitwise, rel_l2
from fp4mega.testing.cases import MASK_CASES, PACKED_CASES, VALUE_CASES, Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list_formats())
@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@pytest.mark.parametrize(
    "values", ["randn", "outlier_channels", "tiny", "zero_blocks", "denormals"]
)
def test_quantizers_give_the_same_bytes(name, rounding, values):
    x = Case(seqlen_q=203, head_dim=40, values=values).make().q
    bits = {
        d: counter_bits(torch.tensor(5, device=d), x.shape, stream=1, device=d)
        for d in ("cpu", "cuda")
    }
    assert_bitwise(bits["cuda"].cpu(), bits["cpu"], name="random bits")
    for axis in (1, 3):
        made = {
            d: quantize(
                x.to(d),
                name,
                axis=axis,
                rounding=rounding,
                random_bits=bits[d] if rounding == "stochastic" else None,
            )
            for d in ("cpu", "cuda")
        }
        for a, b in zip(made["cuda"].tensors(), made["cpu"].tensors(), strict=True):
            assert_bitwise(a.cpu(), b, name=f"{name} axis {axis}")


@pytest.mark.parametrize("name", list_formats())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_with_few_bits_and_ties_give_the_same_bytes(name, dtype):
    """Quotients of BF16 values often lie on a tie, where one more rounding shows: 2^20 of them."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(7)).bfloat16().to(dtype)
    on_gpu, on_cpu = quantize(x.cuda(), name, axis=1), quantize(x, name, axis=1)
    for a, b in zip(on_gpu.tensors(), on_cpu.tensors(), strict=True):
        assert_bitwise(a.cpu(), b, name=name)
    assert_bitwise(on_gpu.dequantize().cpu(), on_cpu.dequantize(), name=f"{name} values")


def run(case, policy, device):
    x = case.make(device=device)
    out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    gradients = backward(
        x.dout, x.dlse, Saved(out, lse, saved), (x.q, x.k, x.v), x.side, case.problem, policy
    )
    return [t.cpu() for t in (out, lse, *gradients) if t is not None]


@pytest.mark.parametrize("name", list_policies())
@pytest.mark.parametrize(
    "case",
    [
        Case(seqlen_q=113, seqlen_k=203, num_heads=6, head_dim=64, causal="bottom_right"),
        MASK_CASES[3],
        PACKED_CASES[1],
        VALUE_CASES[0],
    ],
    ids=str,
)
def test_same_answer_in_double(name, case):
    """FP64 leaves no rounding noise to flip codes with: GPU and CPU agree to its precision."""
    policy = get_policy(name)
    if policy.direct_p and policy.direct_p.reference == "sampled" and case.lengths_q:
        pytest.skip("refused: packed sequences share no sampled reference")
    case = case.replace(dtype=torch.float64)
    for a, b in zip(run(case, policy, "cuda"), run(case, policy, "cpu"), strict=True):
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        assert rel_l2(a[finite], b[finite]) < 1e-6


def test_tf32_setting_does_not_change_the_reference():
    case = Case(seqlen_q=113, seqlen_k=203, head_dim=64)
    want = run(case, get_policy("exact"), "cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        got = run(case, get_policy("exact"), "cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for a, b in zip(got, want, strict=True):
        assert_bitwise(a, b, name="TF32 allowed against not")
