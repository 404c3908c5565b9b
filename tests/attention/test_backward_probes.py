"""Figures of the backward on inputs whose answer is known."""

from dataclasses import replace

import pytest
import torch

from fp4mega.attention import (
    AttentionPolicy,
    SideInputs,
    backward,
    forward,
    get_policy,
    probe_backward,
)
from fp4mega.attention.reference import Saved
from fp4mega.testing.cases import Case

CASE = Case(batch=2, seqlen_q=200, seqlen_k=200, num_heads=4, num_kv_heads=2, causal="top_left")


def measure(policy, case=CASE, **changes):
    x = case.make()
    tensors = {"q": x.q, "k": x.k, "v": x.v, "dout": x.dout, **changes}
    return probe_backward(**tensors, side=x.side, problem=case.problem, policy=get_policy(policy))


@pytest.mark.parametrize(
    ("policy", "least", "largest"),
    [
        ("nvfp4_qk_mxfp4_pv", 0, 2e-6),
        ("nvfp4_qk_mxfp4_pv-centered", 0, 2e-6),
        ("nvfp4_qk_mxfp4_pv-paper", 2e-2, 1),
        ("nvfp4_qk_fp8_p_mxfp4_v-paper", 2e-2, 1),
        ("nvfp4_qk_fp8_pv", 0, 2e-2),
    ],
)
def test_rows_of_ds_sum_to_zero_where_backward_differentiates_the_forward(policy, least, largest):
    # dO unrounded in r and in dP alike: what is left is the rule's own doing.
    own = AttentionPolicy(**{**get_policy(policy).as_dict(), "name": f"{policy}-do", "do": "none"})
    assert least <= measure(own)["ds_row_sum"] <= largest


def test_row_sums_of_a_gradient_worked_out_by_hand():
    # Two keys of equal score, P = (.5, .5). V moves the forward's output but backward reads its own V.
    policy = AttentionPolicy(
        name="two_keys",
        q="none",
        k="none",
        p="none",
        v="mxfp4_floor",
        v_bwd="none",
        backward="paper",
        normalizer="exact",
    )
    case = Case(batch=1, seqlen_q=1, seqlen_k=2, num_heads=1, num_kv_heads=1, head_dim=16)
    zero = torch.zeros(1, 1, 1, 16)
    v = torch.zeros(1, 2, 1, 16)
    v[0, :, 0, 0] = torch.tensor([7.0, 4.0])  # floor: scale 1, and 7 becomes 6
    dout = torch.zeros(1, 1, 1, 16)
    dout[..., 0] = 1.0
    got = measure(policy, case, q=zero, k=torch.zeros(1, 2, 1, 16), v=v, dout=dout)
    # r = 5, dP = (7, 4), dS = (1, -.5): rowsum .5 of 1.5.
    assert got["ds_row_sum"] == pytest.approx(1 / 3)
    assert got["p_bwd_row_sum_error"] == 0


def test_errors_are_those_of_the_reference():
    got = measure("nvfp4_qk_mxfp4_pv")
    x = CASE.make()
    problem = replace(CASE.problem, batch=1)
    results = []
    for name in ("nvfp4_qk_mxfp4_pv", "bf16"):
        policy = get_policy(name)
        q, k, v = (t[:1] for t in (x.q, x.k, x.v))
        kept = tuple(
            t if policy.saves_input(n) else None for n, t in zip("qkv", (q, k, v), strict=True)
        )
        saved = Saved(*forward(q, k, v, SideInputs(), problem, policy))
        gradients = backward(x.dout[:1], None, saved, kept, SideInputs(), problem, policy)
        results.append((saved.out, *gradients[:3]))
    for name, mine, plain in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        assert got[f"{name}_error"] == pytest.approx(((mine - plain).norm() / plain.norm()).item())
    assert 0.05 < got["dq_error"] < 0.6


def test_bf16_is_its_own_measure():
    got = measure("bf16")
    assert [got[f"{name}_error"] for name in ("o", "dq", "dk", "dv")] == [0, 0, 0, 0]
    assert "do_sqnr_db" not in got


def test_zero_gradient_gives_zeros():
    got = measure("nvfp4_qk_mxfp4_pv-paper", dout=torch.zeros_like(CASE.make().dout))
    assert (got["ds_row_sum"], got["dq_error"], got["ds_zeroed"], got["do_zeroed"]) == (0, 0, 0, 0)


def test_dout_shares_and_range_of_known_values():
    dout = torch.full_like(CASE.make().dout, 1.0)
    dout[0, :, 0] = 2.0**-30
    dout[0, 0, 0, 0] = 57344.0  # the largest E5M2, so that everything beside it is lost
    got = measure("nvfp4_qk_fp8_pv", dout=dout)
    assert got["do_zeroed"] == pytest.approx((dout[0, :, 0].numel() - 1) / dout[0].numel())
    assert got["do_scale_range"] > 10


def test_only_the_first_entry_is_looked_at():
    x = CASE.make()
    other = x.dout.clone()
    other[1] = float("nan")
    assert measure("nvfp4_qk_fp8_pv", dout=other) == measure("nvfp4_qk_fp8_pv")


@pytest.mark.parametrize("mask", ["padding", "none"])
def test_masked_and_empty_rows_give_finite_figures(mask):
    case = Case(batch=2, seqlen_q=40, seqlen_k=100, mask=mask)
    got = measure("nvfp4_qk_mxfp4_pv-paper", case)
    assert all(value == value and abs(value) < 1e3 for value in got.values())


def test_packed_gives_nothing():
    case = Case(lengths_q=(5, 20), lengths_k=(5, 20), causal="top_left")
    assert measure("nvfp4_qk_fp8_pv", case) == {}
