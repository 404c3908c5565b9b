"""The reference against an independent dense answer, in FP64, on shapes, masks and inputs that broke other kernels."""

import dataclasses
import functools
import math

import pytest
import torch

from fp4mega.attention import (
    AttentionPolicy,
    Saved,
    SideInputs,
    backward,
    forward,
    get_policy,
    list_policies,
    saved_spec,
)
from fp4mega.testing.assertions import assert_bitwise, assert_close
from fp4mega.testing.cases import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
)
from tests.attention.oracle import answer

TRAINING = [n for n in list_policies() if not n.startswith("direct_p")]
EXACT_GRADIENTS = {"do": "none", "p_bwd": "none", "ds": "none", "q_bwd": "same", "k_bwd": "same"}


def run(case: Case, policy: AttentionPolicy, *, dlse: bool = True):
    """Reference forward and backward: (out, lse, dq, dk, dv, dsink)."""
    x = case.make()
    out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    inputs = tuple(
        t if policy.saves_input(n) else None for n, t in (("q", x.q), ("k", x.k), ("v", x.v))
    )
    gradients = backward(
        x.dout,
        x.dlse if dlse else None,
        Saved(out, lse, saved),
        inputs,
        x.side,
        case.problem,
        policy,
    )
    return out, lse, *gradients


def expected(case: Case, policy: AttentionPolicy, *, dlse: bool = True):
    """The same from the oracle, by autograd."""
    x = case.make()
    leaves = [t.double().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    side = x.side
    if side.sink is not None:
        sink = side.sink.double().clone().requires_grad_()
        leaves.append(sink)
        side = dataclasses.replace(side, sink=sink)
    got = answer(*leaves[:3], side, case.problem, policy)
    loss = (got.out * x.dout.double()).sum()
    if dlse:
        loss = loss + (got.lse.masked_fill(got.lse == -math.inf, 0.0) * x.dlse.double()).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return got.out.detach(), got.lse.detach(), *grads


def check(case: Case, policy: AttentionPolicy, limit: float, *, dlse: bool = True) -> None:
    got, want = run(case, policy, dlse=dlse), expected(case, policy, dlse=dlse)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, want, strict=False):
        if a is not None:
            assert_close(a, b, limit=limit, name=f"{case} {name}")


@pytest.mark.parametrize("case", [*SHAPE_CASES, *MASK_CASES, *PACKED_CASES, *LAYOUT_CASES], ids=str)
def test_no_quantizer_is_plain_attention(case):
    check(case.replace(dtype=torch.float64), get_policy("exact"), 1e-12)


@pytest.mark.parametrize("case", VALUE_CASES, ids=str)
def test_no_quantizer_on_adversarial_values(case):
    # Scores of 1e3 lose digits in their exponentials, in the oracle as in the reference.
    check(case.replace(dtype=torch.float64), get_policy("exact"), 1e-9)


def test_matches_torch_sdpa_and_gradcheck():
    case = Case(
        batch=1, seqlen_q=9, seqlen_k=9, head_dim=16, causal="top_left", dtype=torch.float64
    )
    x, policy = case.make(), get_policy("exact")
    out, _, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (x.q, x.k, x.v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert_close(out, sdpa, limit=1e-13, name="out against SDPA")
    dq, dk, dv, _ = run(case, policy, dlse=False)[2:]

    def value(q, k, v):
        return (forward(q, k, v, x.side, case.problem, policy)[0] * x.dout).sum()

    for name, tensor, gradient in (("q", x.q, dq), ("k", x.k, dk), ("v", x.v, dv)):
        direction = torch.randn(
            tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        step = 1e-6
        moved = [
            {
                n: t + s * step * direction if n == name else t
                for n, t in (("q", x.q), ("k", x.k), ("v", x.v))
            }
            for s in (1, -1)
        ]
        numeric = (value(**moved[0]) - value(**moved[1])) / (2 * step)
        assert abs(numeric - (gradient * direction).sum()) < 1e-7 * abs(numeric) + 1e-8, name


@pytest.mark.parametrize("name", [n for n in TRAINING if get_policy(n).backward == "represented"])
@pytest.mark.parametrize(
    "case",
    [
        Case(seqlen_q=113, seqlen_k=203, num_heads=6, head_dim=64, causal="bottom_right"),
        Case(seqlen_q=150, seqlen_k=150, head_dim=40, causal="top_left", sink=True, window=(70, 0)),
        Case(lengths_q=(50, 0, 140), lengths_k=(50, 0, 140), causal="top_left"),
        Case(seqlen_q=70, seqlen_k=300, values="rising_logits", head_dim=128, head_dim_v=64),
        Case(seqlen_q=70, seqlen_k=140, values="sink_key", mask="padding"),
        Case(seqlen_q=70, seqlen_k=140, values="outlier_channels"),
        Case(seqlen_q=70, seqlen_k=140, values="zero_blocks", num_heads=8, num_kv_heads=1),
    ],
    ids=str,
)
def test_represented_backward_is_autograd_through_the_quantized_operator(name, case):
    """With unrounded gradient operands the explicit backward is the derivative of what the forward computed."""
    policy = dataclasses.replace(get_policy(name), name=f"test_{name}", **EXACT_GRADIENTS)
    check(case.replace(dtype=torch.float64), policy, 1e-11)


@pytest.mark.parametrize("name", TRAINING)
def test_forward_of_every_policy(name):
    case = Case(
        policy=name,
        seqlen_q=113,
        seqlen_k=203,
        num_heads=6,
        head_dim=64,
        causal="bottom_right",
        dtype=torch.float64,
    )
    policy = get_policy(name)
    x = case.make()
    out, lse, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    want = answer(x.q, x.k, x.v, x.side, case.problem, policy)
    assert_close(out, want.out, limit=1e-12, name=f"{name} out")
    assert_close(lse, want.lse, limit=1e-12, name=f"{name} lse")


@pytest.mark.parametrize("name", [n for n in TRAINING if get_policy(n).p != "none"])
@pytest.mark.parametrize("values", ["randn", "rising_logits", "sink_key", "outlier_channels"])
def test_rows_of_score_gradient_sum_to_zero_under_represented_and_centered(name, values):
    """rowsum(dS) = scale^-1 * (dq . k) summed the other way: with K = 1 everywhere dq is rowsum(dS) itself."""
    policy = dataclasses.replace(get_policy(name), name=f"rows_{name}", **EXACT_GRADIENTS)
    case = Case(batch=1, seqlen_q=64, seqlen_k=256, head_dim=64, values=values, dtype=torch.float64)
    x = case.make()
    out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    sums, mass = row_sums(x, case, policy, Saved(out, lse, saved))
    relative = (sums.abs() / mass).max().item()
    print(f"{name} {values}: max |rowsum dS| / bound of P dP = {relative:.2e}")
    if policy.backward == "paper" and policy.four_bit_pv and values != "sink_key":
        assert relative > 1e-3, (
            "the paper's rule is biased with 4-bit P or V; if it is not, this test measures nothing"
        )
    elif policy.backward != "paper":
        assert relative < 1e-12


def row_sums(x, case, policy, saved):
    """rowsum(dS) and rowsum |P dP| (what cancels in it), by watching dS on its way to its representation."""
    from fp4mega.attention import tiles

    seen = []
    original = tiles.represent_score_gradient

    def spy(operand, ds, tile_m, key, *, tile):
        seen.append(ds)
        return original(operand, ds, tile_m, key, tile=tile)

    tiles.represent_score_gradient = spy
    try:
        backward(x.dout, None, saved, (x.q, x.k, x.v), x.side, case.problem, policy)
    finally:
        tiles.represent_score_gradient = original
    sums = sum(ds.sum(-1) for ds in seen)
    v = x.v.abs().amax(dim=(0, 1, 2))
    mass = (x.dout.abs() * v).sum(-1).transpose(1, 2).view_as(sums)
    return sums, mass


def test_fp8_gradient_operands_by_hand():
    """One tile, one head: every rounding of the backward written out."""
    from fp4mega.formats import fake_quantize, get_format

    policy = get_policy("nvfp4_qk_fp8_pv-paper")
    case = Case(
        batch=1,
        seqlen_q=64,
        seqlen_k=64,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        causal="top_left",
        dtype=torch.float64,
    )
    x = case.make()
    out, lse, dq, dk, dv, _ = run(case, policy, dlse=False)
    nv, e4, e5 = get_format("nvfp4"), get_format("e4m3"), get_format("e5m2")
    q, k = fake_quantize(x.q[0, :, 0], nv), fake_quantize(x.k[0, :, 0], nv)
    v, do = fake_quantize(x.v[0, :, 0], e4), fake_quantize(x.dout[0, :, 0], e5)
    z = q @ k.T / 8
    z = z.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -math.inf)
    p = torch.exp(z - lse[0, 0, :, None])
    r = (out[0, :, 0] * do).sum(-1, keepdim=True)
    ds = fake_quantize(p * (do @ v.T - r), e4)
    p8 = fake_quantize(p * 256, e4, amax=torch.full((1, 1), 448.0, dtype=torch.float64)) / 256
    assert_close(dv[0, :, 0], p8.T @ do, limit=1e-12, name="dv")
    assert_close(dq[0, :, 0], ds @ fake_quantize(k, e4) / 8, limit=1e-12, name="dq")
    assert_close(dk[0, :, 0], ds.T @ fake_quantize(q, e4) / 8, limit=1e-12, name="dk")


def test_score_gradient_scale_belongs_to_its_tile():
    """An outlier row scales its own tile_m x tile_n tile of dS only; the answer must not depend on the rest."""
    policy = get_policy("nvfp4_qk_fp8_pv")
    case = Case(
        batch=1,
        seqlen_q=128,
        seqlen_k=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        dtype=torch.float64,
    )
    x = case.make()
    out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    loud = x.dout.clone()
    loud[:, 64:] *= 2.0**12
    plain = dataclasses.replace(policy, name="dout_unrounded", do="none")
    a = backward(x.dout, None, Saved(out, lse, saved), (None,) * 3, x.side, case.problem, plain)[0]
    b = backward(loud, None, Saved(out, lse, saved), (None,) * 3, x.side, case.problem, plain)[0]
    assert_bitwise(a[:, :64], b[:, :64], name="dq of the quiet tile")


@pytest.mark.parametrize("name", ["nvfp4_qk_mxfp4_pv", "nvfp4_qk_mxfp4_p_fp8_v"])
@pytest.mark.parametrize("values", ["randn", "rising_logits", "sink_key"])
def test_mxfp4_probabilities_do_not_depend_on_the_tile(name, values):
    case = Case(
        seqlen_q=96,
        seqlen_k=384,
        head_dim=64,
        causal="bottom_right",
        values=values,
        dtype=torch.float64,
    )
    x = case.make()
    outs = []
    for tile in (32, 64, 128, 384):
        policy = dataclasses.replace(get_policy(name), name=f"{name}_tile{tile}", tile_n=tile)
        outs.append(forward(x.q, x.k, x.v, x.side, case.problem, policy)[0])
    for other in outs[1:]:
        assert_close(other, outs[0], limit=1e-12, name=f"{name} {values}")


@pytest.mark.parametrize(
    "name", ["exact", *(n for n in list_policies() if get_policy(n).normalizer == "represented")]
)
def test_values_of_one_give_one(name):
    """A convex combination of ones is one whenever the normalizer sums what the product multiplies."""
    policy = get_policy(name)
    case = Case(
        batch=1,
        seqlen_q=70,
        seqlen_k=203,
        head_dim=64,
        causal="none" if policy.direct_p else "bottom_right",
    )
    x = case.make()
    out, _, _ = forward(x.q, x.k, torch.ones_like(x.v), x.side, case.problem, policy)
    assert (out - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", list_policies())
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_zero_upstream_gives_exactly_zero(name, causal):
    policy = get_policy(name)
    case = Case(seqlen_q=40, seqlen_k=70, causal=causal)
    x = case.make()
    out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    got = backward(
        torch.zeros_like(x.dout),
        None,
        Saved(out, lse, saved),
        (x.q, x.k, x.v),
        x.side,
        case.problem,
        policy,
    )
    assert all(torch.count_nonzero(g) == 0 for g in got[:3])


@pytest.mark.parametrize(
    "name",
    ["exact", "bf16", "nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "direct_p_fast", "direct_p_accurate"],
)
def test_fully_masked_rows(name):
    policy = get_policy(name)
    case = Case(batch=2, seqlen_q=40, seqlen_k=70, mask="padding_all")
    out, lse, dq, dk, dv, _ = run(case, policy)
    assert torch.count_nonzero(out[1]) == 0
    assert (lse[1] == -math.inf).all()
    assert out[0].abs().amax(-1).min() > 0
    assert lse[0].isfinite().all()
    for gradient in (dq[1], dk[1], dv[1]):
        assert torch.count_nonzero(gradient) == 0
    assert dq.isfinite().all()


@pytest.mark.parametrize(
    "name", ["nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "nvfp4_qk_fp8_pv-paper", "direct_p_fast"]
)
def test_packed_equals_each_sequence_alone(name):
    lengths = (33, 0, 128, 1, 70)
    policy = get_policy(name)
    causal = "none" if policy.direct_p else "top_left"
    case = Case(lengths_q=lengths, lengths_k=lengths, causal=causal)
    x = case.make()
    packed = run(case, policy)
    start = 0
    for n in lengths:
        if n:
            rows = slice(start, start + n)
            alone = Case(batch=1, seqlen_q=n, seqlen_k=n, causal=causal)
            out, lse, saved = forward(
                x.q[:, rows], x.k[:, rows], x.v[:, rows], SideInputs(), alone.problem, policy
            )
            got = backward(
                x.dout[:, rows],
                x.dlse[..., rows],
                Saved(out, lse, saved),
                (None,) * 3,
                SideInputs(),
                alone.problem,
                policy,
            )
            for part, whole in (
                (out, packed[0]),
                (got[0], packed[2]),
                (got[1], packed[3]),
                (got[2], packed[4]),
            ):
                # Batched matmuls of another size may sum in another order.
                assert_close(whole[:, rows], part, limit=2e-6, name=f"{name} length {n}")
        start += n


@pytest.mark.parametrize(
    "name",
    ["nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "direct_p_fast", "direct_p_accurate", "direct_p_guarded", "exact"],
)  # fmt: skip
def test_padding_contents_do_not_matter(name):
    """Nor does it matter whether the padding is hidden by its own mask or by an arbitrary one that spells it out."""
    policy = get_policy(name)
    case = Case(seqlen_q=70, seqlen_k=300, mask="padding")
    x = case.make()
    hidden = x.side.key_padding_mask[..., None, None]
    x.k.masked_fill_(hidden, 0)
    x.v.masked_fill_(hidden, 0)
    out, lse, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    spelled = SideInputs(
        attention_mask=x.side.key_padding_mask[:, None, None].expand(-1, -1, 70, -1)
    )
    arbitrary = dataclasses.replace(case.problem, key_padding_mask=False, attention_mask=True)
    for a, b in zip(
        forward(x.q, x.k, x.v, spelled, arbitrary, policy)[:2], (out, lse), strict=True
    ):
        assert_bitwise(a, b, name="as an arbitrary mask")
    garbage = (x.q, x.k.masked_fill(hidden, 1e4), x.v.masked_fill(hidden, math.nan))
    kept = [
        tuple(t if policy.saves_input(n) else None for n, t in zip("qkv", given, strict=True))
        for given in ((x.q, x.k, x.v), garbage)
    ]
    before, after = (
        (o, gradients_of(o, inputs, x, case, policy))
        for o, inputs in (
            (forward(x.q, x.k, x.v, x.side, case.problem, policy), kept[0]),
            (forward(*garbage, x.side, case.problem, policy), kept[1]),
        )
    )
    for a, b in zip((*after[0][:2], *after[1]), (*before[0][:2], *before[1]), strict=True):
        assert_bitwise(a, b, name="garbage in the padding")


def gradients_of(made, inputs, x, case, policy):
    return backward(x.dout, None, Saved(*made), inputs, x.side, case.problem, policy)[:3]


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4_qk_fp8_pv",
        "mxfp4_qk_fp8_pv",
        "nvfp4_qk_mxfp4_pv",
        "direct_p_fast",
        "direct_p_accurate",
        "bf16",
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_non_finite_input_never_becomes_a_finite_answer(name, bad, which):
    policy = get_policy(name)
    case = Case(batch=2, seqlen_q=33, seqlen_k=64)
    x = case.make()
    tensors = {"q": x.q.clone(), "k": x.k.clone(), "v": x.v.clone()}
    clean, _, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    tensors[which][0, 5, 0, 3] = bad
    out, _, _ = forward(**tensors, side=x.side, problem=case.problem, policy=policy)
    # An infinite score is a legitimate one-hot row for an unquantized policy, so only NaN must show there.
    if policy.operands[which].quantized or math.isnan(bad):
        assert out[0, 5, 0].isnan().any(), "the row whose query, key or value is not finite"
    assert_bitwise(out[1], clean[1], name="the other batch entry")


@pytest.mark.parametrize("name", list_policies())
def test_saved_spec_is_what_forward_saves(name):
    policy = get_policy(name)
    for case in (
        Case(seqlen_q=33, seqlen_k=65, head_dim=40, head_dim_v=72),
        Case(lengths_q=(5, 30), lengths_k=(9, 31))
        if name not in ("direct_p_accurate", "direct_p_guarded")
        else Case(),
        Case(dtype=torch.bfloat16, head_dim=128),
    ):
        x = case.make()
        saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)[2]
        assert [(tuple(t.shape), t.dtype) for t in saved] == [
            (tuple(s), d) for s, d in saved_spec(case.problem, policy)
        ]


@pytest.mark.parametrize("name", list_policies())
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty(name, seqlen_q, seqlen_k):
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse, dq, dk, dv, _ = run(case, get_policy(name))
    assert out.shape == (2, seqlen_q, 4, 32)
    assert torch.count_nonzero(out) == 0
    assert (lse == -math.inf).all()
    for gradient in (dq, dk, dv):
        assert torch.count_nonzero(gradient) == 0


@pytest.mark.parametrize("name", ["nvfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "mxfp4_qk_fp8_pv"])
@pytest.mark.parametrize("values", ["tiny", "huge_v", "huge_q_tiny_k", "denormals"])
def test_extreme_magnitudes_give_the_right_answer(name, values):
    """Scales follow the data over the whole FP32 range: the answer is as good as on ordinary magnitudes."""
    case = Case(seqlen_q=70, seqlen_k=140, head_dim=64, causal="bottom_right", values=values)
    x = case.make()
    out, _, _ = forward(x.q, x.k, x.v, x.side, case.problem, get_policy(name))
    exact = case.replace(dtype=torch.float64).make()
    want = answer(exact.q, exact.k, exact.v, exact.side, case.problem, get_policy("exact")).out
    assert out.isfinite().all()
    assert_close(out, want, limit=0.25, name=f"{name} {values}")


def test_stochastic_rounding_is_unbiased_and_repeats():
    policy = dataclasses.replace(
        get_policy("nvfp4_qk_mxfp4_pv"), name="sr_test", v="mxfp4_rceil+sr", p="mxfp4_rceil+sr"
    )
    case = Case(batch=1, seqlen_q=32, seqlen_k=160, head_dim=32)
    x = case.make()

    def out(key):
        side = dataclasses.replace(x.side, rounding_key=torch.tensor(key))
        return forward(x.q, x.k, x.v, side, case.problem, policy)[0]

    assert_bitwise(out(7), out(7), name="same key")
    assert not torch.equal(out(7), out(8))
    qk_only = dataclasses.replace(policy, name="sr_base", v="none", p="none", v_bwd="same")
    want = forward(x.q, x.k, x.v, x.side, case.problem, qk_only)[0]
    draws = torch.stack([out(k) for k in range(200)])
    mean_error = (draws.mean(0) - want).norm() / want.norm()
    single_error = (draws[0] - want).norm() / want.norm()
    assert mean_error < 0.25 * single_error, (mean_error, single_error)
    with pytest.raises(ValueError, match="rounding_key"):
        forward(x.q, x.k, x.v, SideInputs(), case.problem, policy)


def test_stochastic_probabilities_are_the_same_in_backward():
    """The represented rule needs the forward's very P, so its random bits must come again."""
    policy = dataclasses.replace(
        get_policy("nvfp4_qk_mxfp4_pv"),
        name="sr_rows",
        p="mxfp4_rceil+sr",
        v="mxfp4_rceil+sr",
        **EXACT_GRADIENTS,
    )
    case = Case(batch=1, seqlen_q=64, seqlen_k=256, head_dim=64, dtype=torch.float64)
    x = case.make()
    side = dataclasses.replace(x.side, rounding_key=torch.tensor(11))
    x = x._replace(side=side)
    out, lse, saved = forward(x.q, x.k, x.v, side, case.problem, policy)
    sums, mass = row_sums(x, case, policy, Saved(out, lse, saved))
    assert (sums.abs() / mass).max() < 1e-12


def test_inputs_are_not_written_to():
    for name in list_policies():
        case = Case(seqlen_q=33, seqlen_k=65)
        x, before = case.make(), case.make()
        # Other tests may have registered policies that round stochastically.
        x = x._replace(side=dataclasses.replace(x.side, rounding_key=torch.tensor(11)))
        run_inputs = (x.q, x.k, x.v, x.dout)
        out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, get_policy(name))
        backward(
            x.dout,
            x.dlse,
            Saved(out, lse, saved),
            (x.q, x.k, x.v),
            x.side,
            case.problem,
            get_policy(name),
        )
        for a, b in zip(run_inputs, (before.q, before.k, before.v, before.dout), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["exact", "nvfp4_qk_fp8_pv"])
def test_autocast_does_not_change_the_reference(name):
    case = Case(seqlen_q=33, seqlen_k=65)
    want = run(case, get_policy(name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(case, get_policy(name))
    for a, b in zip(got[:5], want[:5], strict=True):
        assert_bitwise(a, b, name=f"{name} under autocast")


@pytest.mark.parametrize("name", ["exact", "nvfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper"])
def test_a_sink_of_minus_infinity_is_no_sink(name):
    case = Case(seqlen_q=40, seqlen_k=40, causal="top_left", mask="padding")
    x, policy = case.make(), get_policy(name)
    problem = dataclasses.replace(case.problem, sink=True)
    side = dataclasses.replace(x.side, sink=torch.full((4,), -math.inf))
    with_sink, without = (
        forward(x.q, x.k, x.v, s, p, policy) for s, p in ((side, problem), (x.side, case.problem))
    )
    assert_bitwise(with_sink[0], without[0], name="out")
    assert_bitwise(with_sink[1], without[1], name="lse")
    inputs = tuple(
        t if policy.saves_input(n) else None for n, t in (("q", x.q), ("k", x.k), ("v", x.v))
    )
    *gradients, dsink = backward(x.dout, None, Saved(*with_sink), inputs, side, problem, policy)
    wanted = backward(x.dout, None, Saved(*without), inputs, x.side, case.problem, policy)
    for got, want in zip(gradients, wanted[:3], strict=True):
        assert_bitwise(got, want, name="gradient")
    assert (dsink == 0).all()


@pytest.mark.parametrize("owner", ["cuda.matmul", "mkldnn.matmul", ""])
def test_the_callers_precision_of_products_is_kept(owner):
    """Set by its newer name, which makes reading the older one an error; without a call that names it, nothing is set."""
    case = Case(seqlen_q=33, seqlen_k=65)
    want = run(case, get_policy("exact"))
    settings = functools.reduce(getattr, filter(None, owner.split(".")), torch.backends)
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    assert [p.fp32_precision for p in products] == ["none", "none"]
    settings.fp32_precision = "tf32"
    try:
        before = [p.fp32_precision for p in products]
        got = run(case, get_policy("exact"))
        assert [p.fp32_precision for p in products] == before
        assert "tf32" in before
    finally:
        settings.fp32_precision = "none"
    assert [p.fp32_precision for p in products] == ["none", "none"]
    for a, b in zip(got[:5], want[:5], strict=True):
        assert_bitwise(a, b, name="TF32 asked for")
