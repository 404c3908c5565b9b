"""Named corner blocks with the bytes they must become, derived by hand, and whole blocks against the exact oracle."""

from fractions import Fraction

import pytest
import torch

from fp4mega.formats import E4M3, fake_quantize, mx_scale, power_of_two_scale, quantize
from tests.formats import oracle

MX = ["mxfp4_floor", "mxfp4_rceil", "mxfp4_even", "mxfp4_amplitude"]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def padded(values, length):
    return torch.tensor([*values, *[0.0] * (length - len(values))])


# One block of 32 that starts with these values: bytes of (floor, rceil, even, amplitude) as (scale byte, first codes).
MX_BLOCKS = {
    # 500 = 1.953 * 2^8. floor: 2^(8-2), 500/64 = 7.8 saturates at 6. rceil: 500/6 = 83.3 -> 2^7, 500/128 = 3.9 -> 4.
    # even: rounds up to 2^9 -> 2^7. amplitude: over 1.5 * 2^8 -> alpha 2^9, 6*500/512 = 5.86 -> 6.
    # 100: 100/64 = 1.56 -> 1.5 (3); 100/128 = .78 -> 1 (2); 600/512 = 1.17 -> 1 (2).
    "amax-500": ([500.0, -100.0], [(133, [7, 11]), (134, [6, 10]), (134, [6, 10]), (136, [7, 10])]),
    # 6 = 1.5 * 2^2: 2^(2-2) by floor; 6/6 = 1 by rceil; 1.5 is a code for even; exactly at the switch: alpha = 2^3, 36/8 = 4.5 -> 4.
    "amax-6": ([6.0], [(127, [7]), (127, [7]), (127, [7]), (130, [6])]),
    # Just over 6, rceil doubles its scale: 6.01/2 = 3.005 -> 3 (5).
    "amax-over-6": ([6.0 + 2.0**-20], [(127, [7]), (128, [5]), (127, [7]), (130, [6])]),
    # 4 is a power of two: floor 2^0; rceil 4/6 -> 2^0; even 2^0; amplitude alpha = 4 and 6*4/4 = 6.
    "amax-4": ([4.0, 1.0], [(127, [6, 2]), (127, [6, 2]), (127, [6, 2]), (129, [7, 3])]),
    # 7 = 1.75 * 2^2 is half way between 6 and 8: even goes to 8, scale 2, 7/2 = 3.5 -> 4 (6). floor: 7 saturates. rceil: 2^1.
    # amplitude: alpha 8, 42/8 = 5.25 -> 6.
    "amax-7-tie": ([7.0], [(127, [7]), (128, [6]), (128, [6]), (130, [7])]),
    # 5 = 1.25 * 2^2 is half way between 4 and 6: even goes to 4, scale 1, and the element 5 ties to 4 (6).
    # amplitude: under the switch, alpha 4, 30/4 = 7.5 saturates.
    "amax-5-tie": ([5.0, -5.0], [(127, [6, 14]), (127, [6, 14]), (127, [6, 14]), (129, [7, 15])]),
    # Every element tie under scale 1 (amax 6), to the even code; amplitude has scale 8/6, so 6x/8 = .1875 .5625 .9375 1.3125 1.875 2.625 3.75.
    "half-ties": (
        [6.0, *TIES, *[-t for t in TIES]],
        [(127, [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14])] * 3
        + [(130, [6, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14])],
    ),
    # An outlier 2^20 flushes the rest to zero, with its sign. 2^20/6 -> 2^18.
    "single-outlier": ([2.0**20, 1.0, -1.0], [(145, [6, 0, 8])] * 3 + [(147, [7, 0, 8])]),
    # All negative: -1 is the largest magnitude. floor 2^-2: -4, -2, -1. amplitude alpha 1: -6, -3, -1.5.
    "all-negative": (
        [-1.0, -0.5, -0.25] + [-0.25] * 29,
        [(125, [14, 12, 10, 10])] * 3 + [(127, [15, 13, 11, 11])],
    ),
    # Zeros keep their sign under the smallest scale, byte 0.
    "zero": ([0.0, 0.0], [(0, [0, 0])] * 4),
    "negative-zero": ([-0.0] * 32, [(0, [8, 8])] * 4),
    # A float32 subnormal, 2^-140: exponents clamp at -127 (byte 0), and 2^-13 of a scale is code 0.
    "subnormal": ([2.0**-140, -(2.0**-140)], [(0, [0, 8])] * 4),
    # 2^-127 is itself a subnormal: 1 under scale 2^-127 (2), 6 under alpha = 2^-127.
    "subnormal-2^-127": ([2.0**-127], [(0, [2])] * 3 + [(0, [7])]),
    # The first block with byte 1 under the three element scales: 2^(-124 - 2).
    "byte-1": ([2.0**-124], [(1, [6])] * 3 + [(3, [7])]),
    # Top of float32, 1.875 * 2^127. floor 2^125, saturates. rceil and even 2^126: 3.75 -> 4. alpha would be 2^128, clamped: saturates.
    "huge": ([1.875 * 2.0**127], [(252, [7]), (253, [6]), (253, [6]), (254, [7])]),
}


@pytest.mark.parametrize("rule", range(4), ids=MX)
@pytest.mark.parametrize("name", MX_BLOCKS)
def test_mxfp4_corner_block(name, rule):
    values, expected = MX_BLOCKS[name]
    byte, codes = expected[rule]
    qt = quantize(padded(values, 32), MX[rule])
    assert qt.scale.tolist() == [byte]
    assert qt.unpack()[: len(codes)].tolist() == codes
    assert torch.equal(qt.codes, qt.unpack()[0::2] | (qt.unpack()[1::2] << 4))


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_mxfp4_block_with_a_non_finite_value_is_nan_and_its_neighbours_are_not(name, bad):
    x = torch.ones(3, 96)
    x[1, 40] = bad
    qt = quantize(x, name)
    assert qt.scale[1].tolist()[1] == 255
    assert (qt.scale == 255).sum() == 1
    for values in (qt.dequantize(), fake_quantize(x, name), fake_quantize(x.double(), name)):
        assert values[1, 32:64].isnan().all()
        assert values.isnan().sum() == 32


def test_amplitude_divides_by_six():
    # alpha = 4: 6x/alpha = 6, 3, 1.5 and 1.05 -> 1; value = 4 * q / 6.
    x = padded([4.0, 2.0, 1.0, 0.7], 32)
    assert quantize(x, "mxfp4_amplitude").dequantize(torch.float64)[:4].tolist() == [
        4.0,
        2.0,
        1.0,
        4 * (1 / 6),
    ]


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e-38, 1e20, 1e36])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mxfp4_blocks_equal_the_exact_oracle(name, magnitude, dtype):
    generator = torch.Generator().manual_seed(11)
    x = (torch.randn(12, 32, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    qt = quantize(x, name)
    values = qt.dequantize(torch.float64)
    for i, row in enumerate(x.double().tolist()):
        byte, codes, exact = oracle.mx_block(row, name.removeprefix("mxfp4_"))
        assert qt.scale[i].item() == byte
        assert qt.unpack()[i].tolist() == codes
        # Values are exact except for the division by six, one float64 rounding.
        assert values[i].tolist() == pytest.approx([float(v) for v in exact], rel=2**-52, abs=0.0)


@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "amplitude"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mx_scale_is_exact_around_every_switch(rule, dtype):
    marks = torch.tensor([1.0, 1.25, 1.5, 1.75], dtype=dtype)
    amax = torch.cat([marks * 2.0**e for e in (-130, -126, -120, -40, -1, 0, 1, 3, 40, 126, 127)])
    one = torch.tensor(0.0, dtype=dtype), torch.tensor(torch.inf, dtype=dtype)
    amax = torch.cat([amax, *(torch.nextafter(amax, end) for end in one)])
    expected = [oracle.mx_exponent(Fraction(a), rule) + 127 for a in amax.tolist()]
    assert mx_scale(amax, rule).tolist() == expected


def test_mx_scale_names_an_unknown_rule():
    with pytest.raises(ValueError, match="rule='nearest': allowed: floor, rceil, even, amplitude"):
        mx_scale(torch.ones(1), "nearest")


def test_nvfp4_corner_blocks():
    # The first block's 2688 makes s_enc = 448 * 6 / 2688 = 1, so that every other block scale is E4M3(amax_b / 6).
    x = torch.zeros(8, 16)
    x[0, :3] = torch.tensor([2688.0, -448.0, 224.0])  # scale 448 (0x7E): 6, -1, .5
    x[1, :8] = torch.tensor([6.0, *TIES])  # scale 1 (0x38): every element tie, to the even code
    x[2, :8] = -x[1, :8]  # the same with signs
    x[3] = 0.0  # zero block: scale 0, codes 0
    x[4] = -0.0  # also all zero
    x[5, :2] = torch.tensor(
        [500.0, -100.0]
    )  # 83.33 -> 80 (0x6A = 1.25 * 2^6): 6.25 saturates, -1.25 ties to -1
    x[6, :2] = torch.tensor(
        [0.005, -0.005]
    )  # .00083 is under half of E4M3's smallest, so scale 0 and codes 0
    x[7, :3] = torch.tensor(
        [-0.01, -0.02, 0.001]
    )  # .0033 -> 2 * 2^-9 = .0039 (2): -2.56 -> -3, -5.12 -> -6, .256 -> .5
    qt = quantize(x, "nvfp4")
    assert qt.global_scale.tolist() == [[1.0]]
    assert qt.scale.flatten().tolist() == [0x7E, 0x38, 0x38, 0, 0, 0x6A, 0, 2]
    codes = qt.unpack()
    assert codes[0, :4].tolist() == [7, 10, 1, 0]
    assert codes[1, :9].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0]
    assert codes[2, :8].tolist() == [15, 8, 10, 10, 12, 12, 14, 14]
    assert codes[3:5].eq(0).all()
    assert codes[5, :2].tolist() == [7, 10]
    assert codes[6].eq(0).all()
    assert codes[7, :3].tolist() == [13, 15, 1]
    # Packed, low nibble first: 7 | 10 << 4, 1 | 0 << 4.
    assert qt.codes[0, :2].tolist() == [0xA7, 0x01]
    assert qt.codes[2, :4].tolist() == [0x8F, 0xAA, 0xCC, 0xEE]
    values = qt.dequantize()
    assert values[5, :2].tolist() == [480.0, -80.0]
    assert values[7, :2].tolist() == [-3 * 2.0**-8, -6 * 2.0**-8]


def test_nvfp4_all_zero_tensor():
    for x in (torch.zeros(2, 32), -torch.zeros(2, 32)):
        qt = quantize(x, "nvfp4")
        assert qt.global_scale.item() == 1.0
        assert not qt.scale.any()
        assert not qt.codes.any()
        assert torch.equal(qt.dequantize(), torch.zeros(2, 32))


@pytest.mark.parametrize("magnitude", [1.0, 1e-20, 1e-34, 1e20, 3e37])
def test_nvfp4_blocks_equal_the_oracle(magnitude):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(5)) * magnitude
    qt = quantize(x, "nvfp4")
    codes, scale, s_enc = oracle.nvfp4(x.numpy())
    assert qt.global_scale.item() == s_enc
    assert torch.equal(qt.scale.flatten(), torch.from_numpy(scale))
    assert torch.equal(qt.unpack(), torch.from_numpy(codes))


def test_nvfp4_global_scale_stops_at_the_float32_maximum():
    # 2688 / amax overflows; block scales are then small (amax_b / 6 * 3.4e38 = .5), but elements are as exact as ever.
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(5)) * 1e-38
    qt = quantize(x, "nvfp4")
    assert qt.global_scale.item() == torch.finfo(torch.float32).max
    error = (qt.dequantize(torch.float64) - x.double()).norm() / x.double().norm()
    assert error < 0.11


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["nvfp4", "e4m3", "e5m2"])
def test_a_non_finite_value_makes_its_scope_nan(name, bad):
    x = torch.ones(2, 3, 32)
    x[1, 2, 5] = bad
    qt = quantize(x, name, scale_dims=(1, 2))
    for values in (qt.dequantize(), fake_quantize(x, name, scale_dims=(1, 2))):
        assert values[0].eq(1).all()
        assert values[1].isnan().all()
    # With the scope's amax given from outside, the non-finite value's own block (NVFP4) or itself (FP8) is NaN, never a number.
    around = fake_quantize(x, name, amax=torch.tensor(6.0))
    assert around[1, 2, 5].isnan()
    assert around.isnan().sum() == (16 if name == "nvfp4" else 1)
    assert torch.equal(
        around.isnan(), quantize(x, name, amax=torch.tensor(6.0)).dequantize().isnan()
    )


@pytest.mark.parametrize(
    ("name", "amax", "scale"),
    [
        ("e4m3", 448.0, 1.0),
        ("e4m3", 448.1, 0.5),
        ("e4m3", 224.0, 2.0),
        ("e4m3", 1.0, 256.0),  # 448 / 1 -> 2^8
        ("e4m3", 1e-45, 2.0**120),  # exponent clamped
        # 3.4e38 = 1.999 * 2^127 asks for 2^-120; the exponent stops at -119, so the outlier saturates.
        ("e4m3", 3.4e38, 2.0**-119),
        ("e5m2", 57344.0, 1.0),
        ("e5m2", 57345.0, 0.5),
        ("e5m2", 1.0, 32768.0),
        ("e5m2", 1e-45, 2.0**112),
    ],
)
def test_fp8_scale_is_the_largest_power_of_two_that_fits(name, amax, scale):
    x = torch.tensor([[amax, -amax / 2, 0.0]])
    qt = quantize(x, name)
    assert qt.global_scale.tolist() == [[scale]]
    assert qt.global_scale.dtype is torch.float32


def test_fp8_bytes():
    # amax 448, scale 1: codes are the plain E4M3 ones. 0.9375 = 1.875 * 2^-1 -> (6 << 3) | 7.
    x = torch.tensor([448.0, -448.0, 1.0, 0.9375, 2.0**-9, -0.0])
    assert quantize(x, "e4m3").codes.tolist() == [0x7E, 0xFE, 0x38, 0x37, 0x01, 0x80]
    # Scale 2^8 for amax 1: 448 / 1 = 448 > 256. -0.5 * 256 = -2^7 -> (14 << 3) | 128.
    assert quantize(torch.tensor([1.0, -0.5]), "e4m3").codes.tolist() == [0x78, 0xF0]
    assert quantize(torch.tensor([57344.0, -1.0]), "e5m2").codes.tolist() == [0x7B, 0xBC]


def test_fp8_normal_codes_do_not_depend_on_the_scope():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).clamp(min=0.05)
    assert torch.equal(fake_quantize(x, "e4m3", scale_dims=(1,)), fake_quantize(x, "e4m3"))


def test_zero_fp8_scope_has_scale_one():
    qt = quantize(torch.zeros(2, 3), "e5m2", scale_dims=(1,))
    assert qt.global_scale.tolist() == [[1.0], [1.0]]
    assert power_of_two_scale(torch.tensor([0.0, torch.nan, torch.inf]), E4M3).isnan().tolist() == [
        False,
        True,
        True,
    ]
