"""Policies: spelling, contradictions refused by name, one name for one set of numbers."""

import dataclasses
import math
import re

import pytest

from fp4mega.attention import (
    AttentionPolicy,
    DirectP,
    get_policy,
    list_policies,
    parse_operand,
    register_policy,
)

VALID = {"name": "p", "q": "nvfp4", "k": "nvfp4", "p": "e4m3/unit", "v": "e4m3/head"}


def test_names_of_the_square_and_of_the_rules():
    names = list_policies()
    for cell in (
        "nvfp4_qk_fp8_pv",
        "mxfp4_qk_fp8_pv",
        "nvfp4_qk_mxfp4_pv",
        "nvfp4_qk_fp8_p_mxfp4_v",
        "nvfp4_qk_mxfp4_p_fp8_v",
    ):
        assert get_policy(cell).backward == "represented"
        assert get_policy(f"{cell}-paper").backward == "paper"
        assert get_policy(f"{cell}-centered").backward == "centered"
    assert {"bf16", "exact", "direct_p_fast", "direct_p_accurate", "direct_p_guarded"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("spelling", "text"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4/head", "nvfp4"),
        ("e4m3/tile+sr", "e4m3/tile+sr"),
        ("mxfp4_even+sr", "mxfp4_even+sr"),
        ("e5m2/row", "e5m2/row"),
        ("bf16", "bf16"),
    ],
)
def test_operand_spelling_round_trip(spelling, text):
    operand = parse_operand(spelling, field="q")
    assert str(operand) == text
    assert parse_operand(str(operand), field="q") == operand


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("nvfp5", "unknown format 'nvfp5'; nearest is 'nvfp4'"),
        ("e4m3/heads", "unknown scope 'heads'; allowed: tensor, head, row, tile, unit"),
        ("mxfp4_rceil/head", "carries no FP32 scale"),
        ("e4m3+rn", "the only rounding suffix is '+sr'"),
        ("none+sr", "not rounded by us"),
        (4, "expected a string"),
    ],
)
def test_operand_errors_name_field_value_and_allowed(spelling, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_operand(spelling, field="attention.policies.x.q")
    assert "attention.policies.x.q=" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backward": "represented", "v_bwd": "e4m3/head"},
            "the represented rule reads the forward's V",
        ),
        ({"backward": "papr"}, "allowed: paper, centered, represented"),
        ({"p": "e4m3/head"}, "write e4m3/unit"),
        ({"v": "e4m3/row"}, "cannot be factored out"),
        ({"q": "e4m3/tile"}, "scopes of this operand: tensor, head, row"),
        ({"q": "same"}, "only q_bwd, k_bwd and v_bwd"),
        ({"ds": "e4m3/head"}, "scopes: tile, unit"),
        ({"ds": "mxfp4_rceil"}, "allowed formats: none, bf16, e4m3, e5m2"),
        ({"ds": "nvfp4/tile"}, "allowed formats: none, bf16, e4m3, e5m2"),
        ({"tile_n": 100}, "multiple of 32"),
        ({"p_exponent": 9}, "from 0 to 8"),
        ({"name": "a b"}, "without spaces"),
        ({"direct_p": DirectP(slope=1, offset=1)}, "Direct-P emits mxfp4_amplitude"),
        ({"max_rule": "int"}, "allowed: exact, integer"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionPolicy(**{**VALID, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slope": math.nan}, "direct_p.slope=nan: expected a finite number"),
        ({"offset": "1"}, "direct_p.offset='1': expected a finite number"),
        ({"samples": 0}, "direct_p.samples=0: expected an integer of 1 or more"),
        ({"exact_every": -1}, "direct_p.exact_every=-1: expected an integer of 0 or more"),
        ({"reference": "sample"}, "direct_p.reference='sample': allowed: zero, sampled"),
        ({"headroom": 100, "floor": 27}, "their sum must not exceed 126"),
    ],
)
def test_direct_p_names_the_field_out_of_range(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DirectP(**{"slope": 1.5, "offset": 1.2, **change})


def test_one_name_one_set_of_numbers():
    base = get_policy("nvfp4_qk_fp8_pv")
    assert register_policy(dataclasses.replace(base)) == base
    with pytest.raises(ValueError, match="already registered with other numbers \\(tile_n\\)"):
        register_policy(dataclasses.replace(base, tile_n=64))
    with pytest.raises(ValueError, match="nearest is 'nvfp4_qk_fp8_pv'"):
        get_policy("nvfp4_qk_fp8_vp")


def test_saved_operands():
    assert not get_policy("nvfp4_qk_fp8_pv").saves_input("q")
    assert get_policy("bf16").saves_input("v")
    paper = get_policy("nvfp4_qk_mxfp4_pv-paper")
    assert paper.backward_v == "v_bwd"
    assert not paper.saves_input("v")
    assert get_policy("nvfp4_qk_mxfp4_pv").four_bit_pv
    assert get_policy("nvfp4_qk_mxfp4_p_fp8_v").four_bit_pv
    assert not get_policy("nvfp4_qk_fp8_pv").four_bit_pv


def test_as_dict_round_trip():
    for name in list_policies():
        policy = get_policy(name)
        fields = policy.as_dict()
        if fields["direct_p"]:
            fields["direct_p"] = DirectP(**fields["direct_p"])
        assert AttentionPolicy(**fields) == policy
