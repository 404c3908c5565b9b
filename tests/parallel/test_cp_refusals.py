"""What an exchange cannot do is said with the setting, its value and what is allowed."""

from dataclasses import replace

import pytest

from fp4mega.attention import get_policy
from fp4mega.parallel import explain_exchange

STOCHASTIC = replace(get_policy("nvfp4_qk_fp8_pv"), name="cp-stochastic", ds="e4m3/tile+sr")
ONE_SCALE = replace(get_policy("nvfp4_qk_fp8_pv"), name="cp-one_scale", v="e4m3/tensor")
FP8, FP4 = get_policy("nvfp4_qk_fp8_pv"), get_policy("nvfp4_qk_mxfp4_pv")


@pytest.mark.parametrize(
    ("exchange", "policy", "asked", "reason"),
    [
        ("a2a+p2p", FP8, {}, r"cp_comm_type='a2a\+p2p': two levels"),
        ("ring", FP8, {}, "cp_comm_type='ring': allowed: all_gather, p2p, a2a"),
        ("p2p", FP8, {"seqlen": 66}, "sequence length 66: .* multiple of 4"),
        ("all_gather", STOCHASTIC, {}, "rounds ds stochastically"),
        ("a2a", STOCHASTIC, {}, "rounds ds stochastically"),
        ("a2a", FP8, {"num_heads": 3}, "3 query heads on 2 .* allowed: all_gather, p2p"),
        ("a2a", FP8, {"num_heads": 4, "num_kv_heads": 1}, "1 kv heads on 2"),
        ("a2a", ONE_SCALE, {}, "v share one scale over all heads"),
        ("all_gather", FP8, {"backend": "triton"}, "backend='triton' .*cp_comm_type='a2a'"),
        ("p2p", get_policy("direct_p_accurate"), {}, "sampled over the whole sequence"),
        ("all_gather", FP4, {"seqlen": 192}, "v=mxfp4_rceil has blocks of 32 .* multiple of 128"),
        (
            "p2p",
            get_policy("nvfp4_qk_mxfp4_p_fp8_v"),
            {"seqlen": 192},
            "p=mxfp4_rceil has blocks of 32",
        ),
    ],
)
def test_refused(exchange, policy, asked, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(explain_exchange(exchange, policy, ranks=2, **asked))


@pytest.mark.parametrize(
    ("exchange", "policy", "asked"),
    [
        ("all_gather", FP8, {"num_heads": 3, "num_kv_heads": 1, "seqlen": 36}),
        ("all_gather", ONE_SCALE, {}),
        ("all_gather", get_policy("nvfp4_qk_mxfp4_p_fp8_v"), {"seqlen": 192}),
        ("p2p", FP4, {"seqlen": 256, "backend": "reference"}),
        ("p2p", get_policy("direct_p_fast"), {"seqlen": 256}),
        ("a2a", FP4, {"seqlen": 192, "backend": "triton", "num_heads": 4, "num_kv_heads": 2}),
        ("a2a", get_policy("direct_p_accurate"), {}),
    ],
)
def test_not_refused(exchange, policy, asked):
    assert explain_exchange(exchange, policy, ranks=2, **asked) is None
