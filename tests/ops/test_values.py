"""`attention_func` against dense softmax attention in float64, written here without any part of the library."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4mega import attention_func, list_policies
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
    Inputs,
    assert_bitwise,
    assert_close,
    assert_rule_of_two,
)

ALL_CASES = (*SHAPE_CASES, *MASK_CASES, *PACKED_CASES, *LAYOUT_CASES, *VALUE_CASES)


def visible_block(case: Case, rows: int, keys: int) -> Tensor:
    """Which of `keys` each of `rows` sees by position alone: bool [rows, keys]."""
    shift = keys - rows if case.causal == "bottom_right" else 0
    left, right = case.window
    visible = torch.ones(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for j in range(keys):
            behind = i + shift - j
            too_late = case.causal != "none" and behind < 0
            visible[i, j] = not (
                too_late
                or (left is not None and behind > left)
                or (right is not None and -behind > right)
            )
    return visible


def visibility(case: Case, inputs: Inputs) -> Tensor:
    """True where a query sees a key: bool, broadcastable to [B, H, S, T]."""
    if case.lengths_q is not None:
        blocks = [
            visible_block(case, n, m) for n, m in zip(case.lengths_q, case.lengths_k, strict=True)
        ]
        return torch.block_diag(*(b.float() for b in blocks)).bool()[None, None]
    visible = visible_block(case, case.seqlen_q, case.seqlen_k)[None, None]
    if inputs.side.key_padding_mask is not None:
        visible = visible & ~inputs.side.key_padding_mask[:, None, None, :]
    if inputs.side.attention_mask is not None:
        visible = visible & ~inputs.side.attention_mask
    return visible


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse from the whole score matrix; a row that sees nothing gives 0 and -inf."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
    z = torch.einsum("bshd,bthd->bhst", q, k) * scale
    z = z.masked_fill(~visible, -math.inf)
    if sink is not None:
        z = torch.cat((z, sink[None, :, None, None].expand(*z.shape[:3], 1)), dim=-1)
    alive = (z > -math.inf).any(dim=-1)
    z = z.masked_fill(~alive[..., None], 0.0)
    p = z.softmax(dim=-1) * alive[..., None]
    p = p if sink is None else p[..., :-1]
    lse = torch.where(alive, z.logsumexp(dim=-1), -math.inf)
    return torch.einsum("bhst,bthd->bshd", p, v), lse


def gradients_of(out: Tensor, lse: Tensor | None, inputs: Inputs, leaves: list[Tensor]):
    outputs, upstream = [out], [inputs.dout.to(out.dtype)]
    if lse is not None:
        outputs.append(lse)
        upstream.append(inputs.dlse.to(lse.dtype))
    return torch.autograd.grad(outputs, leaves, upstream)


def dense_answer(case: Case, inputs: Inputs, *, with_lse: bool):
    """out, lse and the gradients of q, k, v (and sink) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in inputs[:3]]
    sink = inputs.side.sink
    if sink is not None:
        leaves.append(sink.detach().double().requires_grad_())
    out, lse = dense_attention(
        *leaves[:3],
        leaves[3] if sink is not None else None,
        visibility(case, inputs),
        case.softmax_scale,
    )
    return out.detach(), lse.detach(), gradients_of(out, lse if with_lse else None, inputs, leaves)


@pytest.mark.parametrize("case", [c.replace(dtype=torch.float64) for c in ALL_CASES], ids=str)
def test_exact_policy_is_softmax_attention(case: Case) -> None:
    inputs = case.make(requires_grad=True)
    leaves = [*inputs[:3]] + ([] if inputs.side.sink is None else [inputs.side.sink])
    out, lse = attention_func(
        inputs.q, inputs.k, inputs.v, return_lse=True, **case.arguments(inputs.side)
    )
    gradients = gradients_of(out, lse, inputs, leaves)
    ref_out, ref_lse, ref_gradients = dense_answer(case, inputs, with_lse=True)
    assert_close(out, ref_out, limit=1e-12, name="out")
    assert_close(lse, ref_lse, limit=1e-12, name="lse")
    for name, mine, ref in zip(("dq", "dk", "dv", "dsink"), gradients, ref_gradients, strict=False):
        assert mine.shape == ref.shape
        assert_close(mine, ref, limit=1e-12, name=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "exact"])
def test_bf16_is_at_most_twice_as_wrong_as_torch(policy: str, causal: bool) -> None:
    case = Case(
        policy=policy,
        seqlen_q=150,
        seqlen_k=150,
        head_dim=64,
        causal="top_left" if causal else "none",
        dtype=torch.bfloat16,
    )
    inputs = case.make(requires_grad=True)
    out = attention_func(inputs.q, inputs.k, inputs.v, policy=policy, causal=causal)
    gradients = gradients_of(out, None, inputs, list(inputs[:3]))
    sdpa = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in inputs[:3]), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    sdpa_gradients = gradients_of(sdpa, None, inputs, list(inputs[:3]))
    ref_out, _, ref_gradients = dense_answer(case, inputs, with_lse=False)
    assert_rule_of_two(out, ref_out, sdpa, dtype=torch.bfloat16, name="out")
    for name, mine, ref, noisy in zip(
        ("dq", "dk", "dv"), gradients, ref_gradients, sdpa_gradients, strict=True
    ):
        assert_rule_of_two(mine, ref, noisy, dtype=torch.bfloat16, name=name)


@pytest.mark.parametrize("policy", [p for p in list_policies() if p not in ("exact", "bf16")])
def test_quantized_policies_stay_near_softmax_attention(policy: str) -> None:
    """Catches a wrong wiring (scale, head, transpose), which costs far more than the coarsest format here."""
    case = Case(policy=policy, seqlen_q=160, seqlen_k=160, head_dim=64)
    inputs = case.make(requires_grad=True)
    out, lse = attention_func(inputs.q, inputs.k, inputs.v, policy=policy, return_lse=True)
    gradients = gradients_of(out, None, inputs, list(inputs[:3]))
    ref_out, ref_lse, ref_gradients = dense_answer(case, inputs, with_lse=False)
    assert_close(out, ref_out, limit=0.45, name="out")
    # Direct-P replaces the exponential by a line, which shifts every row's sum.
    assert float((lse.detach() - ref_lse).abs().max()) < (
        0.6 if policy.startswith("direct_p") else 0.3
    )
    for name, mine, ref in zip(("dq", "dk", "dv"), gradients, ref_gradients, strict=True):
        assert_close(mine, ref, limit=0.7, name=name)


@pytest.mark.parametrize("policy", ["exact", "nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv-paper"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)]
)
def test_empty_tensors(policy: str, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    case = Case(policy=policy, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal="top_left")
    inputs = case.make(requires_grad=True)
    out, lse = attention_func(
        inputs.q, inputs.k, inputs.v, return_lse=True, **case.arguments(inputs.side)
    )
    assert_bitwise(out, torch.zeros(batch, seqlen_q, 4, 32), name="out")
    assert_bitwise(lse, torch.full((batch, 4, seqlen_q), -math.inf), name="lse")
    for leaf, gradient in zip(
        inputs[:3], gradients_of(out, lse, inputs, list(inputs[:3])), strict=True
    ):
        assert_bitwise(gradient, torch.zeros_like(leaf), name="gradient")


@pytest.mark.parametrize("policy", ["exact", "nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv-centered"])
def test_rows_that_see_nothing(policy: str) -> None:
    """A query row without keys: output 0, lse -inf, and its gradients are zero and reach nobody else."""
    case = Case(policy=policy, seqlen_q=40, seqlen_k=70, mask="arbitrary")
    inputs = case.make(requires_grad=True)
    arguments = case.arguments(inputs.side)
    out, lse = attention_func(inputs.q, inputs.k, inputs.v, return_lse=True, **arguments)
    assert_bitwise(out[:, 0], torch.zeros_like(out[:, 0]), name="out")
    assert_bitwise(lse[..., 0], torch.full_like(lse[..., 0], -math.inf), name="lse")
    only_masked_row = torch.zeros_like(inputs.dout)
    only_masked_row[:, 0] = inputs.dout[:, 0]
    for gradient in torch.autograd.grad(out, inputs[:3], only_masked_row):
        assert not gradient.any()


def test_packed_equals_each_sequence_alone() -> None:
    """The scale of a quantized head is per sequence, so packing changes no number."""
    lengths = (33, 0, 64, 1)
    case = Case(policy="nvfp4_qk_fp8_pv", lengths_q=lengths, lengths_k=lengths, causal="top_left")
    inputs = case.make(requires_grad=True)
    out = attention_func(inputs.q, inputs.k, inputs.v, **case.arguments(inputs.side))
    gradients = torch.autograd.grad(out, inputs[:3], inputs.dout)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        leaves = [t[:, rows].detach().requires_grad_() for t in inputs[:3]]
        alone = attention_func(*leaves, policy=case.policy, causal=True)
        assert_close(out[:, rows], alone, limit=1e-6, name=f"out of {length}")
        alone_gradients = torch.autograd.grad(alone, leaves, inputs.dout[:, rows])
        for mine, ref in zip(gradients, alone_gradients, strict=True):
            # The padded batch sums in another order, and a flipped FP8 code of dS is worth 2^-4 of it.
            assert_close(mine[:, rows], ref, limit=1e-2, name=f"gradient of {length}")
        start += length


def test_max_seqlen_is_found_on_the_cpu() -> None:
    case = PACKED_CASES[1].replace(policy="nvfp4_qk_fp8_pv")
    inputs = case.make()
    arguments = case.arguments(inputs.side)
    expected = attention_func(inputs.q, inputs.k, inputs.v, **arguments)
    del arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    out = attention_func(inputs.q, inputs.k, inputs.v, **arguments)
    assert_bitwise(out, expected, name="out")


def test_defaults_and_spellings() -> None:
    inputs = Case(seqlen_q=20, seqlen_k=30).make()
    tensors = inputs[:3]
    default = attention_func(*tensors)
    named = attention_func(
        *tensors,
        policy="nvfp4_qk_fp8_pv",
        causal="none",
        softmax_scale=32**-0.5,
        window=(None, None),
    )
    assert_bitwise(default, named, name="defaults")
    top_left = attention_func(*tensors, causal=True)
    assert_bitwise(attention_func(*tensors, causal="top_left"), top_left, name="causal")
    assert not torch.equal(top_left, default)
    assert not torch.equal(attention_func(*tensors, causal="bottom_right"), top_left)
    assert not torch.equal(attention_func(*tensors, softmax_scale=1.0), default)


NAN, INF = float("nan"), float("inf")
QUANTIZED = [p for p in list_policies() if p not in ("exact", "bf16")]


@pytest.mark.parametrize(
    ("policy", "bad"),
    [("exact", NAN), ("bf16", NAN), *((p, bad) for p in QUANTIZED for bad in (NAN, INF))],
)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_nonfinite_values_stay_in_their_head(policy: str, bad: float, operand: str) -> None:
    """What is computed from a non-finite value is NaN, and every other head keeps its bits."""
    case = Case(policy=policy, seqlen_q=24, seqlen_k=40, head_dim=16)
    clean = case.make()
    tensors = {"q": clean.q.clone(), "k": clean.k.clone(), "v": clean.v.clone()}
    tensors[operand][0, 3, 1, 5] = bad
    out = attention_func(**tensors, policy=policy)
    expected = attention_func(*clean[:3], policy=policy)
    poisoned = {
        "q": (0, 3, slice(1, 2), slice(None)),
        "k": (0, slice(None), slice(2, 4), slice(None)),
        "v": (0, slice(None), slice(2, 4), 5),
    }[operand]
    assert out[poisoned].isnan().all()
    heads = slice(1, 2) if operand == "q" else slice(2, 4)
    untouched = torch.ones_like(out, dtype=torch.bool)
    untouched[0, :, heads] = False
    assert_bitwise(out[untouched], expected[untouched], name="other heads")
    if policy.startswith("nvfp4") and (operand != "v" or "fp8_v" in policy or "fp8_pv" in policy):
        assert out[0, :, heads].isnan().all(), "one scale for the head: the whole head is NaN"
