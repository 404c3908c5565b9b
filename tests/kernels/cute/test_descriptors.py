"""Descriptors against words that NVIDIA's own library computes, and what they refuse. Needs no CUTLASS."""

import pytest

from fp4mega.kernels.cute.config import ForwardConfig, PublishConfig
from fp4mega.kernels.cute.descriptors import (
    Kind,
    Swizzle,
    instruction_descriptor,
    shared_descriptor,
)


def test_instruction_descriptors_field_by_field() -> None:
    """PTX ISA, instruction descriptor tables: D format, A and B formats, B major, N / 8, scale format, M / 16 or M / 128."""
    wide = instruction_descriptor(Kind.F8F6F4, 128, 64, b_rows_along_n=True)
    assert wide == (1 << 4) | (1 << 16) | (8 << 17) | (8 << 24)
    assert instruction_descriptor(Kind.F8F6F4, 128, 16) == (1 << 4) | (2 << 17) | (8 << 24)
    nvfp4 = instruction_descriptor(Kind.MXF4NVF4, 128, 128)
    assert nvfp4 == (1 << 7) | (1 << 10) | (16 << 17) | (1 << 27)
    mxfp4 = instruction_descriptor(Kind.MXF4, 128, 128, e8m0_scales=True)
    assert mxfp4 == nvfp4 | 1 << 23


def test_words_that_the_dsl_computes() -> None:
    """What CuTe DSL 4.8.1 puts into its own kernels for the same operands."""
    scores, value = {"leading": 16}, {"leading": 0}
    assert instruction_descriptor(Kind.F8F6F4, 128, 128, b_rows_along_n=True) == 0x8210010
    assert instruction_descriptor(Kind.F8F6F4, 128, 64, b_rows_along_n=True) == 0x8110010
    assert instruction_descriptor(Kind.MXF4NVF4, 128, 128) == 0x8200480
    assert shared_descriptor(Swizzle.B64, stride=512, **scores) == 0x8000402000010000
    assert shared_descriptor(Swizzle.B32, stride=256, **scores) == 0xC000401000010000
    assert shared_descriptor(Swizzle.NONE, stride=128, **scores) == 0x400800010000
    assert shared_descriptor(Swizzle.B128, stride=1024, **value) == 0x4000404000000000
    assert shared_descriptor(Swizzle.B64, stride=512, **value) == 0x8000402000000000


def test_shared_descriptors_field_by_field() -> None:
    """Leading and stride in 16 bytes, version 1, swizzle code."""
    assert shared_descriptor(Swizzle.B64, leading=16, stride=512) == (
        (1 << 16) | (32 << 32) | (1 << 46) | (4 << 61)
    )
    assert shared_descriptor(Swizzle.NONE, leading=128, stride=256) >> 61 == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: instruction_descriptor(Kind.F8F6F4, 64, 64), "m=64"),
        (lambda: instruction_descriptor(Kind.F8F6F4, 128, 24), "n=24"),
        (lambda: instruction_descriptor(Kind.F8F6F4, 128, 272), "n=272"),
        (lambda: instruction_descriptor(Kind.MXF4, 128, 64, b_rows_along_n=True), "K-major"),
        (lambda: shared_descriptor(Swizzle.B64, leading=8, stride=512), "leading=8"),
        (lambda: shared_descriptor(Swizzle.B64, leading=16, stride=1 << 18), "stride=262144"),
        (lambda: ForwardConfig(nvfp4=True, dim=96), "dim=96"),
        (lambda: ForwardConfig(nvfp4=True, polynomial_of_8=9), "polynomial_of_8=9"),
        (lambda: PublishConfig("rows", 40), "dim=40"),
        (lambda: PublishConfig("values", 192), "dim=192"),
    ],
)
def test_what_no_instruction_can_do_is_refused(call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()
