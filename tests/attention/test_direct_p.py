"""Direct-P against a scalar rebuild of its definition, its published accuracy, and its guard against extreme scores."""

import dataclasses
import math

import pytest
import torch

from fp4mega.attention import Saved, SideInputs, backward, forward, get_policy
from fp4mega.attention.score_map import direct_p_codes, sample_order
from fp4mega.formats import quantize
from fp4mega.testing.assertions import assert_bitwise, assert_close, cosine, rel_l2
from fp4mega.testing.cases import Case
from tests.attention.oracle import quantized

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(u: float) -> float:
    """Nearest code, ties to the even code, saturating: by search."""
    best = min(range(8), key=lambda c: (abs(E2M1_VALUES[c] - u), c % 2))
    return E2M1_VALUES[best]


def scalar_block(z, rule):
    """One 32-key block of one row, number by number."""
    top = max(z)
    if top == -math.inf:
        return [0.0] * len(z)
    # Nearest power of two of 2^top, up from 1.5 * 2^e.
    e = math.floor(top)
    if 2.0 ** (top - e) >= 1.5:
        e += 1
    u = min(max(e + 127, 0), 254)
    if rule.floor:
        u = max(u, rule.floor + 1)
    if u == 0:
        return [0.0] * len(z)
    out = []
    for j, zj in enumerate(z):
        x = zj - (u - 127) + math.log2(6)
        value = (
            2.0**x
            if rule.exact_every and (j // 2) % rule.exact_every == 0
            else max(0.0, rule.slope * x + rule.offset)
        )
        out.append(2.0 ** (u - rule.floor - 127) * e2m1(value) / 6)
    return out


@pytest.mark.parametrize("name", ["direct_p_fast", "direct_p_accurate", "direct_p_guarded"])
@pytest.mark.parametrize("spread", [0.3, 3.0, 60.0])
def test_codes_by_scalar_rebuild(name, spread):
    rule = get_policy(name).direct_p
    z = (
        torch.randn(6, 75, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * spread
        - rule.headroom
    )
    z[1, 32:64] = -math.inf
    z[2, 5] = -math.inf
    z[3, :32] = 3 + math.log2(1.5) + 1e-12  # just past the switch
    z[4, :32] = 3 + math.log2(1.5) - 1e-12  # just before it
    got = direct_p_codes(z, rule)
    want = torch.tensor(
        [
            sum((scalar_block(row[s : s + 32], rule) for s in range(0, 75, 32)), [])
            for row in z.tolist()
        ],
        dtype=torch.float64,
    )
    assert_close(got, want, limit=1e-14, name=name)


def test_sample_order_is_a_permutation_with_strided_head():
    order = sample_order(4096, 32, torch.device("cpu"))
    assert order[:32].tolist() == [i * 128 for i in range(32)]
    assert sorted(order.tolist()) == list(range(4096))
    assert sorted(sample_order(20, 32, torch.device("cpu")).tolist()) == list(range(20))


def test_whole_forward_by_definition():
    """`fast` end to end from quantized operands, with the normalizer of the represented codes."""
    policy = get_policy("direct_p_fast")
    case = Case(
        batch=1,
        seqlen_q=8,
        seqlen_k=70,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        dtype=torch.float64,
    )
    x = case.make()
    out, lse, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    q, k, v = (quantized(n, getattr(policy, n), t) for n, t in (("q", x.q), ("k", x.k), ("v", x.v)))
    for head in range(2):
        for row in range(8):
            z = ((k[0, :, 0] @ q[0, row, head]) / math.sqrt(32) * math.log2(math.e)).tolist()
            p = torch.tensor(
                sum((scalar_block(z[s : s + 32], policy.direct_p) for s in range(0, 70, 32)), []),
                dtype=torch.float64,
            )
            assert_close(
                out[0, row, head], p @ v[0, :, 0] / p.sum(), limit=1e-12, name=f"row {row}"
            )
            assert abs(lse[0, head, row] - p.sum().log()) < 1e-12


def exact_output(x, scale):
    z = torch.einsum("bshd,bthd->bhst", x.q, x.k) * scale
    return torch.einsum("bhst,bthd->bshd", z.softmax(-1), x.v)


@pytest.mark.parametrize(
    ("name", "cos", "rel"),
    [("direct_p_fast", 0.944, 0.337), ("direct_p_accurate", 0.952, 0.327)],
)
def test_published_accuracy(name, cos, rel):
    """Paper: noncausal, D 128, against the unquantized output; within .01 on randn, S 4096."""
    case = Case(batch=1, seqlen_q=256, seqlen_k=4096, num_heads=2, num_kv_heads=2, head_dim=128)
    x = case.make()
    out, _, _ = forward(x.q, x.k, x.v, x.side, case.problem, get_policy(name))
    want = exact_output(x, case.softmax_scale)
    assert abs(cosine(out, want) - cos) < 0.01
    assert abs(rel_l2(out, want) - rel) < 0.01


def test_guarded_survives_scores_that_break_fast():
    """Scores past 500: against exact softmax of the same quantized Q and K, whose own error such scores amplify."""
    case = Case(batch=1, seqlen_q=64, seqlen_k=512, num_heads=2, num_kv_heads=2, head_dim=64)
    x = case.make()
    q, k = x.q * 20, x.k * 7
    represented = x._replace(q=quantized("q", "nvfp4", q), k=quantized("k", "nvfp4", k))
    scores = torch.einsum("bshd,bthd->bhst", represented.q, represented.k) / 8
    assert scores.abs().max() > 500
    want = exact_output(represented, 1 / 8)
    guarded, lse, _ = forward(q, k, x.v, x.side, case.problem, get_policy("direct_p_guarded"))
    fast, _, _ = forward(q, k, x.v, x.side, case.problem, get_policy("direct_p_fast"))
    assert not fast.isfinite().all(), "fast overflows here, and says so with NaN"
    # Close to one-hot rows read single values of V, whose amplitude convention clips up to a third.
    assert rel_l2(guarded, want) < 0.4
    # A row whose maximum lies more than 146 above its 128 sampled keys saturates: finite still, but its LSE is short.
    sampled = scores[..., sample_order(512, 128, torch.device("cpu"))[:128]]
    covered = scores.amax(-1) - sampled.amax(-1) < 146
    assert 0.5 < covered.float().mean() < 1
    assert (lse - scores.logsumexp(-1)).abs()[covered].max() < 1
    assert guarded.isfinite().all()


def test_row_reference_shift_cancels():
    """The floor 2^-L and the headroom M leave ordinary outputs alone, up to the codes' own rounding."""
    case = Case(
        batch=1,
        seqlen_q=64,
        seqlen_k=512,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float64,
    )
    x = case.make()
    plain = get_policy("direct_p_accurate")
    shifted = type(plain)(
        **{
            **plain.as_dict(),
            "name": "shifted",
            "direct_p": type(plain.direct_p)(
                slope=1.65,
                offset=0.8,
                exact_every=4,
                reference="sampled",
                samples=32,
                headroom=40,
                floor=62,
            ),
        }
    )
    a = forward(x.q, x.k, x.v, SideInputs(), case.problem, plain)
    b = forward(x.q, x.k, x.v, SideInputs(), case.problem, shifted)
    assert_close(b[0], a[0], limit=1e-12, name="out")
    assert_close(b[1], a[1], limit=1e-12, name="lse")


def test_masked_keys_get_no_probability():
    policy = get_policy("direct_p_fast")
    case = Case(batch=2, seqlen_q=40, seqlen_k=100, mask="padding")
    x = case.make()
    out, _, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    kept = int((~x.side.key_padding_mask[1]).sum())
    alone = Case(batch=1, seqlen_q=40, seqlen_k=kept)
    short, _, _ = forward(
        x.q[1:], x.k[1:, :kept], x.v[1:, :kept], SideInputs(), alone.problem, policy
    )
    assert_close(out[1:], short, limit=2e-6, name="padded against short")
    assert_bitwise(out, forward(x.q, x.k, x.v, x.side, case.problem, policy)[0], name="repeat")


@pytest.mark.parametrize("name", ["direct_p_fast", "direct_p_accurate", "direct_p_guarded"])
def test_gradient_of_the_sink(name):
    """Against a central difference: the sink moves the normalizer only, so no code flips."""
    case = Case(batch=1, seqlen_q=40, seqlen_k=150, head_dim=32, dtype=torch.float64)
    x, policy = case.make(), get_policy(name)
    problem = dataclasses.replace(case.problem, sink=True)
    sink = torch.tensor([3.0, -1.0, 0.5, 5.0], dtype=torch.float64)

    def output(sink):
        return forward(x.q, x.k, x.v, SideInputs(sink=sink), problem, policy)

    out, lse, saved = output(sink)
    dsink = backward(
        torch.ones_like(out),
        None,
        Saved(out, lse, saved),
        (None, None, None),
        SideInputs(sink=sink),
        problem,
        policy,
    )[3]
    step = 1e-6
    for head in range(4):
        moved = step * torch.nn.functional.one_hot(torch.tensor(head), 4)
        change = (output(sink + moved)[0] - output(sink - moved)[0]).sum() / (2 * step)
        assert dsink[head] == pytest.approx(change.item(), rel=1e-6)


def test_a_sink_too_small_to_count_leaves_hidden_rows_alone():
    """2^sink underflows to 0: as without a sink, and the gradient is 0, not 0 / 0."""
    case = Case(batch=2, seqlen_q=8, seqlen_k=40, mask="padding_all")
    x, policy = case.make(), get_policy("direct_p_fast")
    problem = dataclasses.replace(case.problem, sink=True)
    side = dataclasses.replace(x.side, sink=torch.full((4,), -200.0))
    out, lse, saved = forward(x.q, x.k, x.v, side, problem, policy)
    plain, plain_lse, _ = forward(x.q, x.k, x.v, x.side, case.problem, policy)
    assert_bitwise(out, plain, name="out")
    assert_bitwise(lse, plain_lse, name="lse")
    *_, dsink = backward(
        x.dout, None, Saved(out, lse, saved), (None, None, None), side, problem, policy
    )
    assert (dsink == 0).all()


@pytest.mark.parametrize("name", ["direct_p_fast", "direct_p_accurate", "direct_p_guarded"])
@pytest.mark.parametrize("exponent", [-66, 66])
def test_small_and_large_v_scale_the_output(name, exponent):
    """A power of two on V is the same power of two on the output: near 1e-20 and 1e20 too."""
    case = Case(batch=1, seqlen_q=40, seqlen_k=150, head_dim=32)
    x, policy = case.make(), get_policy(name)
    plain = forward(x.q, x.k, x.v, x.side, case.problem, policy)[0]
    scaled = forward(x.q, x.k, x.v * 2.0**exponent, x.side, case.problem, policy)[0]
    assert_close(scaled, plain * 2.0**exponent, limit=1e-6, name=name)


def test_a_sum_that_overflows_is_nan():
    """Scores beyond 2^127 under `fast`: NaN in out and lse of those rows alone, whatever the size of V."""
    policy, case = (
        get_policy("direct_p_fast"),
        Case(batch=1, seqlen_q=3, seqlen_k=64, num_heads=1, num_kv_heads=1),
    )
    x = case.make()
    x.k.fill_(1.0)
    for row, score in enumerate((96.0, 48.0, -24.0)):
        x.q[0, row] = score / case.head_dim / case.problem.softmax_scale
    for size in (1.0, 1e-30):
        out, lse, _ = forward(x.q, x.k, x.v * size, x.side, case.problem, policy)
        assert out[0, 0].isnan().all()
        assert lse[0, 0, 0].isnan()
        # Equal scores: the mean of V, and the score plus log 64.
        mean = quantized_mean(x.v * size)
        assert_close(out[0, 1:], mean.expand(2, -1)[:, None], limit=1e-4, name="other rows")
        assert lse[0, 0, 1:].tolist() == pytest.approx(
            [48 + math.log(64), -24 + math.log(64)], abs=0.3
        )


def quantized_mean(v):
    return quantize(v, "mxfp4_amplitude", axis=1).dequantize(torch.float64)[0, :, 0].mean(dim=0)
