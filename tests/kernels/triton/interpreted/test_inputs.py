"""Adversarial inputs by the rule of two; where NaN and infinity go; gradients that must be exactly zero; memory laid out in unusual ways."""

import mmap

import pytest
import torch
from torch import Tensor

from fp4mega.attention import AttentionPolicy, Saved, SideInputs, backward, forward, get_policy
from fp4mega.bench.gate import evaluate
from fp4mega.kernels.triton.backend import _as_stored
from fp4mega.testing import VALUE_CASES, Case
from fp4mega.testing.assertions import rel_l2
from tests.kernels.triton.harness import BACKEND, TRAINING, policies
from tests.kernels.triton.interpreted.harness import check, small

VALUES = [small(c) for c in VALUE_CASES]
TWO_HEADS = Case(
    batch=1, seqlen_q=20, seqlen_k=40, num_heads=2, num_kv_heads=2, causal="bottom_right", dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=str)
@policies("nvfp4_qk_fp8_pv")
def test_values(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize("case", VALUES[1::3], ids=str)
@policies("mxfp4_qk_fp8_pv")
def test_every_third_kind_of_values(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@pytest.mark.parametrize(
    "case", [c for c in VALUES if c.values in ("large_mean", "rising_logits")], ids=str
)
@policies("bf16", "nvfp4_qk_fp8_pv-paper")
def test_values_with_other_policies(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies("nvfp4_qk_fp8_pv", "bf16")
def test_a_non_finite_value_stays_in_its_head(policy: AttentionPolicy) -> None:
    """NaN where the reference has it; the other head keeps its bits, gradients included."""
    clean, _ = evaluate(BACKEND, TWO_HEADS.make(), TWO_HEADS, policy)
    for operand, bad in (("q", torch.inf), ("k", torch.nan), ("v", -torch.inf)):
        x = TWO_HEADS.make()
        getattr(x, operand)[0, 15, 0, 3] = bad
        got, _ = evaluate(BACKEND, x, TWO_HEADS, policy)
        want = forward(x.q, x.k, x.v, x.side, TWO_HEADS.problem, policy)[0]
        assert torch.equal(got.out.isfinite(), want.isfinite()), (operand, bad)
        assert not got.out.isfinite().all()
        for name in ("out", "dq", "dk", "dv"):
            a, b = getattr(got, name), getattr(clean, name)
            assert torch.equal(a[0, :, 1], b[0, :, 1]), (operand, bad, name)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv-paper", "bf16")
def test_zero_gradient_is_exactly_zero(policy: AttentionPolicy) -> None:
    x = TWO_HEADS.make()
    x.dout.zero_()
    x.dlse.zero_()
    got, _ = evaluate(BACKEND, x, TWO_HEADS, policy)
    for gradient in (got.dq, got.dk, got.dv):
        assert not gradient.any()


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_rows_of_ds_sum_to_zero(policy: AttentionPolicy) -> None:
    """Equal keys make dQ = K rowsum(dS), zero up to the rounding of dS under the rule `represented`."""
    x = TWO_HEADS.make()
    x.dlse.zero_()
    other, _ = evaluate(BACKEND, x, TWO_HEADS, policy)
    x.k.copy_(x.k[:, :1].clone())
    same, _ = evaluate(BACKEND, x, TWO_HEADS, policy)
    assert same.dq.double().norm() < 0.05 * other.dq.double().norm()


@pytest.mark.parametrize("policy_name", ["nvfp4_qk_fp8_pv", "bf16", "direct_p_accurate"])
def test_a_sink_of_any_strides_and_one_that_is_none(policy_name: str) -> None:
    """Every second number of a tensor, one number for all heads, and -inf, which is no sink: as the reference has it."""
    policy = get_policy(policy_name)
    case = TWO_HEADS.replace(causal="none", sink=True)
    inputs = case.make()
    kept = tuple(
        t if policy.saves_input(n) else None for n, t in zip("qkv", inputs[:3], strict=True)
    )
    for sink in (
        torch.tensor([1.0, 50.0, -1.0, 50.0])[::2],
        torch.tensor([2.0]).expand(2),
        torch.tensor([-torch.inf, 1.0]),
    ):
        side = SideInputs(sink=sink)
        want = forward(*inputs[:3], side, case.problem, policy)
        got = BACKEND.forward(*inputs[:3], side, case.problem, policy)
        torch.testing.assert_close(got.lse, want[1], rtol=1e-4, atol=1e-4)
        assert rel_l2(got.out, want[0]) < 0.02
        if policy.direct_p is None:
            ours = BACKEND.backward(inputs.dout, None, got, kept, side, case.problem, policy)
            theirs = backward(inputs.dout, None, Saved(*want), kept, side, case.problem, policy)
            for a, b in zip(ours, theirs, strict=True):
                assert rel_l2(a, b) < 0.02
            assert not sink[0].isinf() or ours[3][0] == 0


def test_a_direct_p_sum_that_overflows_is_nan() -> None:
    policy, case = get_policy("direct_p_fast"), TWO_HEADS.replace(causal="none")
    x = case.make()
    x.q[0, 0] = 40.0
    x.k.fill_(4.0)
    out, lse, _ = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy)[:3]
    assert out[0, 0].isnan().all()
    assert lse[0, :, 0].isnan().all()
    assert out[0, 1:].isfinite().all()


def far_apart(x: Tensor, dim: int) -> Tensor:
    """The same values in bfloat16 with so large a stride of this dim that the last of them lies 2^31 elements or more from the first.

    In memory that exists where it is touched only, as much before the first element as behind it: an offset that wrapped reads zeros there.
    """
    stride = -(-(2**31) // (x.shape[dim] - 1))
    memory = mmap.mmap(-1, 4 * (2**31 + 2 * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    strides = [*x.contiguous().stride()]
    strides[dim] = stride
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    return flat.as_strided(x.shape, strides, 2**31 + stride).copy_(x)


@pytest.mark.parametrize("dim", [1, 3])
@policies("nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "bf16")
def test_offsets_of_a_tile_beyond_32_bits(policy: AttentionPolicy, dim: int) -> None:
    """Rows as far apart as in a huge [S, B, H, D], and a head dim that is the outermost: the bits of contiguous tensors."""
    case = Case(
        batch=1, seqlen_q=60, seqlen_k=128, num_heads=1, num_kv_heads=1, dtype=torch.bfloat16
    )
    x = case.make()
    far = x._replace(
        k=far_apart(x.k, dim), v=far_apart(x.v, dim), dout=far_apart(x.dout, 3), q=far_apart(x.q, 3)
    )
    want, _ = evaluate(BACKEND, x, case, policy)
    got, _ = evaluate(BACKEND, far, case, policy)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a is b is None or torch.equal(a, b), name


@policies(*TRAINING)
def test_saved_tensors_with_other_strides(policy: AttentionPolicy) -> None:
    """As hooks of autograd may give them back: the same gradients, bit for bit."""
    case = TWO_HEADS
    x = case.make()
    kept = tuple(
        t if policy.saves_input(n) else None for n, t in zip("qkv", (x.q, x.k, x.v), strict=True)
    )
    first = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy)

    def spread(t: Tensor) -> Tensor:
        return torch.stack([t, t.flip(0)], dim=-1)[..., 0]

    other = first._replace(
        out=spread(first.out), lse=spread(first.lse), saved=tuple(map(spread, first.saved))
    )
    assert not any(t.is_contiguous() for t in other.saved)
    want, got = (
        BACKEND.backward(x.dout, x.dlse, f, kept, x.side, case.problem, policy)
        for f in (first, other)
    )
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a is b is None or torch.equal(a, b), name


def test_a_saved_tensor_in_the_middle_of_a_buffer_is_moved() -> None:
    """4-bit codes are read as 32-bit words."""
    buffer = torch.arange(64, dtype=torch.uint8)
    skewed = buffer[1 + (-buffer.data_ptr()) % 16 :][:32]
    moved = _as_stored(skewed)
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, skewed)
    assert _as_stored(moved) is moved
