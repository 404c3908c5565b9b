"""Probe figures on inputs whose answer is known."""

import math

import pytest
import torch

from fp4mega.attention import SideInputs, get_policy, probe
from fp4mega.testing.cases import Case


def test_zero_input_has_nothing_zeroed():
    case = Case(values="zeros")
    x = case.make()
    metrics = probe(x.q, x.k, x.v, x.side, case.problem, get_policy("nvfp4_qk_fp8_pv"))
    assert metrics["q_zeroed"] == 0
    assert metrics["q_sqnr_db"] == math.inf
    assert metrics["p_row_sum_error"] < 1e-6
    assert metrics["score_max"] == 0


def test_known_sqnr_and_shares():
    case = Case(batch=1, seqlen_q=512, seqlen_k=512, head_dim=128, causal="top_left")
    x = case.make()
    metrics = probe(x.q, x.k, x.v, x.side, case.problem, get_policy("nvfp4_qk_mxfp4_pv"))
    # NVFP4 of standard normals loses about 9.5 % (20.4 dB), MXFP4 with the rceil rule 11.9 % (18.5 dB).
    assert metrics["q_sqnr_db"] == pytest.approx(20.4, abs=0.5)
    assert metrics["v_sqnr_db"] == pytest.approx(18.5, abs=0.5)
    assert 0.02 < metrics["q_zeroed"] < 0.2
    # rceil never clips, and the block maximum lands in (3, 6] times the scale.
    assert metrics["v_saturated"] > 0
    assert 0 < metrics["p_row_sum_error"] < 0.1


def test_one_query_value_that_vanishes():
    case = Case(batch=1, seqlen_q=1, seqlen_k=1, num_heads=1, num_kv_heads=1, head_dim=16)
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0], q[..., 1] = 6.0, 0.1
    metrics = probe(q, q, q, SideInputs(), case.problem, get_policy("nvfp4_qk_fp8_pv"))
    assert metrics["q_zeroed"] == 0.5
    assert metrics["q_saturated"] == 1 / 16


def test_packed_reports_operands_only():
    case = Case(lengths_q=(5, 20), lengths_k=(5, 20), causal="top_left")
    x = case.make()
    metrics = probe(x.q, x.k, x.v, x.side, case.problem, get_policy("nvfp4_qk_fp8_pv"))
    assert "p_sqnr_db" not in metrics
    assert metrics["k_sqnr_db"] > 15


def test_contents_of_padding_reach_no_figure():
    case = Case(batch=2, seqlen_q=40, seqlen_k=100, mask="padding")
    x = case.make()
    mask = x.side.key_padding_mask.flip(0)
    assert mask[0].any()
    side = SideInputs(key_padding_mask=mask)
    policy = get_policy("nvfp4_qk_fp8_pv")
    clean = probe(x.q, x.k, x.v, side, case.problem, policy)
    hidden = mask[..., None, None]
    junk = [t.masked_fill(hidden, 1e6) for t in (x.k, x.v)]
    zeros = [t.masked_fill(hidden, 0.0) for t in (x.k, x.v)]
    assert probe(x.q, *junk, side, case.problem, policy) == clean
    assert probe(x.q, *zeros, side, case.problem, policy) == clean
