"""Test cases and assertions shared by the tests of every room; the library itself never imports them."""

from fp4mega.testing.assertions import (
    assert_bitwise,
    assert_close,
    assert_rule_of_two,
    cosine,
    rel_l2,
    rms,
)
from fp4mega.testing.cases import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    VALUES,
    Case,
    Inputs,
)

__all__ = [
    "LAYOUT_CASES",
    "MASK_CASES",
    "PACKED_CASES",
    "SHAPE_CASES",
    "VALUES",
    "VALUE_CASES",
    "Case",
    "Inputs",
    "assert_bitwise",
    "assert_close",
    "assert_rule_of_two",
    "cosine",
    "rel_l2",
    "rms",
]
