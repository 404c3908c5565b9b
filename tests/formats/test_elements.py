"""Every code, every bf16 input, ties and double rounding of the element formats, against a brute-force nearest search."""

import numpy as np
import pytest
import torch

from fp4mega.formats import E2M1, E4M3, E5M2, E8M0, decode, encode, encode_e8m0, round_to
from tests.formats import oracle

FORMATS = [E2M1, E4M3, E5M2]
BY_NAME = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def same_bits(a, b):
    """Equal numbers with equal signs of zero; NaN where NaN."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)) and torch.equal(
        a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()
    )


@BY_NAME
def test_fields_follow_from_the_bit_counts(fmt):
    table = oracle.MAGNITUDES[fmt.name]
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.max == table[-1]
    assert fmt.min_subnormal == table[1]
    assert fmt.min_normal == table[2**fmt.mantissa_bits]
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_code_decodes_and_round_trips(fmt, dtype):
    table = oracle.MAGNITUDES[fmt.name]
    half = 1 << (fmt.bits - 1)
    codes = torch.arange(2 * half, dtype=torch.uint8)
    values = decode(codes, fmt, dtype)
    assert values.dtype is dtype
    assert values[: len(table)].tolist() == table
    assert values[half : half + len(table)].tolist() == [-v for v in table]
    assert values[half].signbit()
    numbers = values.isfinite()
    assert torch.equal(encode(values, fmt)[numbers], codes[numbers])


def test_codes_that_are_no_numbers():
    assert decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8), E4M3).isnan().all()
    assert decode(torch.tensor([0x7C, 0xFC], dtype=torch.uint8), E5M2).tolist() == [
        float("inf"),
        float("-inf"),
    ]
    assert (
        decode(torch.tensor([0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], dtype=torch.uint8), E5M2)
        .isnan()
        .all()
    )


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["E4M3", "E5M2"]
)
def test_decode_agrees_with_torch_on_every_code(fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(decode(codes, fmt), codes.view(dtype).to(torch.float32))


@BY_NAME
def test_all_bf16_inputs_round_to_the_nearest_code(fmt):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = x[x.isfinite()]
    expected = torch.from_numpy(oracle.nearest_codes(finite.double().numpy(), fmt.name))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(encode(finite.to(dtype), fmt), expected)
        rounded = round_to(finite.to(dtype), fmt)
        assert rounded.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert same_bits(rounded, decode(expected, fmt, rounded.dtype))
    sign = 1 << (fmt.bits - 1)
    top = len(oracle.MAGNITUDES[fmt.name]) - 1
    assert encode(torch.tensor([torch.inf, -torch.inf]), fmt).tolist() == [top, top | sign]
    nans = x[x.isnan()]
    assert len(nans) == 254
    assert encode(nans, fmt).unique().tolist() == [
        {"E2M1": 7, "E4M3": 0x7F, "E5M2": 0x7F}[fmt.name]
    ]
    assert (round_to(nans, fmt) == 6).all() if fmt is E2M1 else round_to(nans, fmt).isnan().all()


@BY_NAME
def test_ties_go_to_the_even_code_and_float64_is_rounded_once(fmt):
    table = torch.tensor(oracle.MAGNITUDES[fmt.name], dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2
    below = torch.arange(len(middle))
    even = below + below % 2
    # One float64 ulp: a detour over float32 would land on the tie and go to the even code instead.
    for x, code in (
        (middle, even),
        (torch.nextafter(middle, torch.tensor(0.0, dtype=torch.float64)), below),
        (torch.nextafter(middle, torch.tensor(1e6, dtype=torch.float64)), below + 1),
    ):
        assert torch.equal(encode(x, fmt).long(), code)
        assert torch.equal(encode(-x, fmt).long(), code | (1 << (fmt.bits - 1)))
        assert torch.equal(round_to(x, fmt), table[code])


def test_e2m1_half_ties_by_name():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(x, E2M1).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert encode(x, E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(-x, E2M1).tolist() == [8, 10, 10, 12, 12, 14, 14]


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_float_inputs_round_to_the_nearest_code(fmt, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(20000, generator=generator, dtype=dtype) * torch.exp2(
        torch.randint(-20, 18, (20000,), generator=generator).to(dtype)
    )
    expected = torch.from_numpy(oracle.nearest_codes(x.double().numpy(), fmt.name))
    assert torch.equal(encode(x, fmt), expected)


@BY_NAME
def test_extreme_magnitudes(fmt):
    top, sign = len(oracle.MAGNITUDES[fmt.name]) - 1, 1 << (fmt.bits - 1)
    for dtype, tiny, huge in ((torch.float32, 1e-45, 3.4e38), (torch.float64, 5e-324, 1.7e308)):
        x = torch.tensor([tiny, -tiny, 0.0, -0.0, huge, -huge], dtype=dtype)
        assert encode(x, fmt).tolist() == [0, sign, 0, sign, top, top | sign]
        assert round_to(x, fmt).signbit().tolist() == [False, True, False, True, False, True]


def test_e8m0_bytes():
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64):
        assert decode(codes, E8M0, dtype)[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
        assert decode(codes, E8M0, dtype)[4].isnan()
    every = decode(torch.arange(255, dtype=torch.uint8), E8M0)
    assert every.tolist() == [2.0 ** (b - 127) for b in range(255)]
    exponents = torch.tensor([-500, -128, -127, -126, 0, 127, 128, 500], dtype=torch.int32)
    assert encode_e8m0(exponents).tolist() == [0, 0, 0, 1, 127, 254, 254, 254]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_is_unbiased_and_moves_at_most_one_code(fmt, dtype):
    table = np.array(oracle.MAGNITUDES[fmt.name])
    top = fmt.max
    points = [
        0.3,
        0.26,
        0.7,
        1.3,
        2.1,
        3.9,
        5.7,
        0.01,
        1e-3,
        top * 0.99,
        top * 0.9,
        -0.3,
        -1.9,
        -top * 0.97,
    ]
    draws = 4000
    x = torch.tensor(points, dtype=dtype)[:, None].expand(-1, draws)
    bits = torch.randint(-(2**31), 2**31, x.shape, generator=torch.Generator().manual_seed(3)).to(
        torch.int32
    )
    rounded = round_to(x, fmt, rounding="stochastic", random_bits=bits)
    assert torch.equal(
        rounded, decode(encode(x, fmt, rounding="stochastic", random_bits=bits), fmt, rounded.dtype)
    )
    for i, exact in enumerate(x[:, 0].double().tolist()):
        above = table[table >= abs(exact)].min()
        below = table[table <= abs(exact)].max()
        seen = set(rounded[i].abs().tolist())
        assert seen <= {below, above}
        assert rounded[i].signbit().all() if exact < 0 else not rounded[i].signbit().any()
        probability = (abs(exact) - below) / (above - below)
        sigma = (above - below) * np.sqrt(probability * (1 - probability) / draws)
        assert abs(rounded[i].abs().double().mean().item() - abs(exact)) <= 4 * sigma + 2**-23 * (
            above - below
        )


@BY_NAME
def test_stochastic_rounding_leaves_codes_alone_and_saturates(fmt):
    values = torch.tensor(oracle.MAGNITUDES[fmt.name])
    values = torch.cat((values, -values))
    for word in (0, -1, 2**31 - 1, -(2**31), 0x12345678):
        bits = torch.full(values.shape, word, dtype=torch.int32)
        assert same_bits(round_to(values, fmt, rounding="stochastic", random_bits=bits), values)
        beyond = torch.tensor([fmt.max * 1.01, -fmt.max * 1e4, torch.inf])
        kept = round_to(beyond, fmt, rounding="stochastic", random_bits=bits[:3])
        assert kept.tolist() == [fmt.max, -fmt.max, fmt.max]


def test_stochastic_threshold_is_the_fraction():
    # 1.125 lies a quarter of the way from 1 to 1.5, so exactly the lowest quarter of the words goes up.
    words = torch.tensor([0, 2**30 - 256, 2**30, 2**31 - 1, -(2**31), -1], dtype=torch.int64).to(
        torch.int32
    )
    x = torch.full((6,), 1.125)
    assert round_to(x, E2M1, rounding="stochastic", random_bits=words).tolist() == [
        1.5,
        1.5,
        1.0,
        1.0,
        1.0,
        1.0,
    ]


def test_bad_arguments_are_named():
    x = torch.ones(4)
    bits = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"x\.dtype=torch\.int64.*torch\.float64"):
        encode(torch.arange(4), E2M1)
    with pytest.raises(ValueError, match="random_bits=None"):
        round_to(x, E4M3, rounding="stochastic")
    with pytest.raises(ValueError, match=r"rounding='up'.*nearest_even, stochastic"):
        round_to(x, E4M3, rounding="up")
    with pytest.raises(ValueError, match=r"random_bits\.shape=\(4,\)"):
        round_to(torch.ones(5), E4M3, rounding="stochastic", random_bits=bits)
    with pytest.raises(TypeError, match=r"random_bits\.dtype=torch\.int64"):
        round_to(x, E4M3, rounding="stochastic", random_bits=bits.long())
    with pytest.raises(ValueError, match="uses none"):
        round_to(x, E4M3, random_bits=bits)
    with pytest.raises(ValueError, match="scale rule"):
        encode(x, E8M0)
    with pytest.raises(TypeError, match=r"codes\.dtype=torch\.int32"):
        decode(bits, E4M3)
    with pytest.raises(TypeError, match=r"dtype=torch\.int32"):
        decode(torch.zeros(1, dtype=torch.uint8), E4M3, torch.int32)
