"""What `fp4mega.testing.triton_interpreter` puts in place of the interpreter's own arithmetic, and the kernels' device functions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from fp4mega.bench.accumulation import PRODUCTS, run
from fp4mega.bench.accumulation_kernel import product
from fp4mega.formats import E2M1, E4M3, E5M2, decode
from fp4mega.kernels.triton.arithmetic import (
    e2m1_code,
    e2m1_value,
    e4m3_scale_code,
    e4m3_scale_value,
    e8m0_value,
    fp8_code,
    fp8_magnitude,
    rceil_byte,
    round_magnitude,
    sign_for,
    sixth,
)
from fp4mega.kernels.triton.packing import (
    fp8_tops,
    nibble_pairs,
    nibble_words,
    nibbles_of_bytes,
    nibbles_of_words,
)
from fp4mega.testing import assert_bitwise
from fp4mega.testing.triton_interpreter import convert, fma, install
from tests.formats.oracle import nearest_codes
from tests.kernels.triton.roundings import check_quotients

FP8 = {
    "E4M3": (E4M3, tl.float8e4nv, torch.float8_e4m3fn),
    "E5M2": (E5M2, tl.float8e5, torch.float8_e5m2),
}


def telling_floats(name: str) -> np.ndarray:
    """float32: every BF16 number, every midpoint of two codes, and the float32 neighbours of midpoints and codes."""
    values = decode(torch.arange(256).to(torch.uint8), FP8[name][0], torch.float64).numpy()
    values = np.unique(values[np.isfinite(values)])
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, [1.0625 * values[-1]]])
    edges = edges.astype(np.float32)
    every_bf16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    beside = [np.nextafter(edges, np.float32(s) * np.float32(np.inf)) for s in (-1, 1)]
    return np.concatenate([every_bf16[np.isfinite(every_bf16)], edges, *beside])


@triton.jit
def _cast_kernel(
    x_ptr, out_ptr, back_ptr, count, FP8_TYPE: tl.constexpr, MIDDLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(MIDDLE)
    code = x.to(tl.float32).to(FP8_TYPE)
    tl.store(out_ptr + at, code.to(tl.uint8, bitcast=True), mask=at < count)
    tl.store(back_ptr + at, code.to(tl.float32), mask=at < count)


@pytest.mark.parametrize("name", FP8)
def test_casts_to_fp8_and_back_in_a_kernel(name: str) -> None:
    """Against a brute-force nearest search that shares nothing with the library."""
    element, triton_type, _ = FP8[name]
    x = telling_floats(name)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf], dtype=np.float32)
    want = np.concatenate([nearest_codes(x.astype(np.float64), name), [0x7F, 0x7F]])
    largest = nearest_codes(np.array([1e9]), name)[0]
    want = np.concatenate([want, [largest, largest | 0x80]]).astype(np.uint8)
    given = torch.from_numpy(np.concatenate([x, special]))
    codes, back = torch.empty(given.shape, dtype=torch.uint8), torch.empty(given.shape)
    _cast_kernel[(-(-len(given) // 8192),)](
        given, codes, back, len(given), FP8_TYPE=triton_type, MIDDLE=tl.float32, BLOCK=8192
    )
    assert_bitwise(codes, torch.from_numpy(want), name=name)
    assert_bitwise(back, decode(codes, element), name=f"{name} back")


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("target", [tl.float32, tl.bfloat16, tl.float16])
def test_every_fp8_code_widens_exactly(name: str, target) -> None:
    codes = np.arange(256, dtype=np.uint8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[target.name]
    got = torch.from_numpy(convert(codes, FP8[name][1], target, None).copy()).view(dtype)
    want = torch.from_numpy(codes).view(FP8[name][2]).to(dtype)
    # The bits of a NaN are nobody's business.
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert_bitwise(got[number], want[number], name=name)


@pytest.mark.parametrize("middle", [tl.bfloat16, tl.float16])
def test_casts_to_sixteen_bits_in_a_kernel(middle) -> None:
    """Ties and their neighbours between all BF16 numbers, on the way to E4M3: two roundings, each to nearest even."""
    base = (np.arange(0x3000, 0x4800, dtype=np.uint32) << 16) | 0x8000
    x = torch.from_numpy(np.concatenate([base - 1, base, base + 1]).view(np.float32))
    codes, back = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape)
    _cast_kernel[(-(-len(x) // 8192),)](
        x, codes, back, len(x), FP8_TYPE=tl.float8e4nv, MIDDLE=middle, BLOCK=8192
    )
    dtype = torch.bfloat16 if middle == tl.bfloat16 else torch.float16
    want = nearest_codes(x.to(dtype).double().numpy(), "E4M3")
    assert_bitwise(codes, torch.from_numpy(want), name=str(middle))


def test_fused_multiply_add_rounds_once() -> None:
    """Where product and sum, each rounded, miss: against exact rationals, with cancellation, ties and subnormal results."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    c = (-a.astype(np.float64) * b).astype(np.float32)
    c[::3] = rng.standard_normal(len(c[::3])).astype(np.float32)
    a[::5] *= np.float32(2.0**-120)
    # One ulp and a half, plus what only the exact product holds: a double rounding goes to even and down.
    a[0], b[0], c[0] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-53
    a[1], b[1], c[1] = 2.0**-24, 1 + 2.0**-23, 1.0
    got = fma(a, b, c)
    for x, y, z, r in zip(*(t.tolist() for t in (a, b, c)), got.tolist(), strict=True):
        exact, found = Fraction(x) * Fraction(y) + Fraction(z), np.float32(r)
        error = abs(Fraction(float(found)) - exact)
        for side in (-np.inf, np.inf):
            other = np.nextafter(found, np.float32(side))
            assert error <= abs(Fraction(float(other)) - exact)
    assert got[1] == np.float32(1 + 2.0**-23)


@pytest.mark.parametrize("dtypes", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("bf16", "bf16")])
@pytest.mark.parametrize("interval", [64, 128, 256])
def test_products(dtypes: tuple[str, str], interval: int) -> None:
    """The kernel of the accumulation study: transposed factors, two levels, exact products."""
    types = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "bf16": torch.bfloat16,
    }
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(n, 256, generator=generator).to(types[name])
        for n, name in zip((128, 32), dtypes, strict=True)
    )
    want = a.double() @ b.double().T
    got = product(a, b, interval)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 2e-6 * want.abs().max()


def test_the_accumulation_study_from_end_to_end() -> None:
    """With an exact accumulator every arm is as good as float32, and one level as good as two."""
    rows = run(seqlen=256, dim=32, rows=64, means=(0.0, 10.0), intervals=(64,), device="cpu")
    assert {(r.product, r.mean) for r in rows} == {(p, m) for p in PRODUCTS for m in (0.0, 10.0)}
    assert len(rows) == 8 * 4
    for row in rows:
        if row.arm == "rounding":
            assert 5e-4 < row.rel_l2 < 4e-3
        else:
            assert row.interval in (64, 256)
            assert row.rel_l2 < 1e-5


@triton.jit
def _device_functions_kernel(
    x_ptr, code4_ptr, code8_ptr, value_ptr, e4m3_ptr, e8m0_ptr, count, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    magnitude = round_magnitude(tl.minimum(tl.abs(x), 6.0), 1, 1)
    code = e2m1_code(magnitude) | sign_for(x, 4)
    tl.store(code4_ptr + at, code.to(tl.uint8), mask=live)
    code = fp8_code(tl.minimum(tl.maximum(x, -448.0), 448.0), tl.full([1], 1.0, tl.float32), 3, 7)
    tl.store(code8_ptr + at, code.to(tl.uint8), mask=live)
    byte = at & 255
    tl.store(value_ptr + at, e2m1_value(byte & 15), mask=live)
    tl.store(e4m3_ptr + at, e4m3_scale_value(byte & 127), mask=live)
    tl.store(e8m0_ptr + at, e8m0_value(byte), mask=live)


def test_device_functions_are_the_formats_arithmetic() -> None:
    """E2M1 and E4M3 codes of every BF16 number and of every tie, and the values of every code."""
    x = torch.from_numpy(telling_floats("E4M3"))
    code4, code8 = (torch.empty(x.shape, dtype=torch.uint8) for _ in range(2))
    value, e4m3, e8m0 = (torch.empty(x.shape) for _ in range(3))
    _device_functions_kernel[(-(-len(x) // 8192),)](
        x, code4, code8, value, e4m3, e8m0, len(x), BLOCK=8192
    )
    wide = x.double().numpy()
    assert_bitwise(code4, torch.from_numpy(nearest_codes(wide, "E2M1")), name="E2M1")
    assert_bitwise(code8, torch.from_numpy(nearest_codes(wide, "E4M3")), name="E4M3")
    byte = torch.arange(256).to(torch.uint8)
    assert_bitwise(value[:256], decode(byte & 15, E2M1), name="values of E2M1")
    assert_bitwise(e4m3[:256], decode(byte & 127, E4M3), name="values of E4M3")
    exponents = torch.arange(255, dtype=torch.float64) - 127
    assert_bitwise(e8m0[:255].double(), torch.exp2(exponents), name="values of E8M0")
    assert e8m0[255].isnan()


def test_quotients_by_every_block_scale_round_to_e2m1_as_exact_ones_do() -> None:
    check_quotients("cpu")


@triton.jit
def _scales_kernel(x_ptr, sixth_ptr, byte_ptr, code_ptr, largest, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    tl.store(sixth_ptr + at, sixth(x, largest), mask=live)
    tl.store(byte_ptr + at, rceil_byte(x.to(tl.int32, bitcast=True)).to(tl.uint8), mask=live)
    tl.store(code_ptr + at, e4m3_scale_code(e4m3_scale_value(at & 127)), mask=live)


@pytest.mark.parametrize("largest", [1e30, 2.0**-81])
def test_scales_of_blocks(largest: float) -> None:
    """A sixth rounds as a division does, also where its remainder would be a subnormal number; bytes are the definition's."""
    every_bf16 = np.arange(0x7F80, dtype=np.uint32) << 16
    bits = np.concatenate([every_bf16, every_bf16 + 1, every_bf16 + 0x7FFF, every_bf16 + 0xFFFF])
    rng = np.random.default_rng(0)
    bits = np.concatenate([bits, rng.integers(0, 0x7F800000, 1 << 17, dtype=np.uint32)])
    x = bits.view(np.float32)
    given, byte, code = torch.from_numpy(x), *(torch.empty(len(x), dtype=torch.uint8) for _ in "12")
    got = torch.empty(len(x))
    _scales_kernel[(-(-len(x) // 16384),)](given, got, byte, code, largest, len(x), BLOCK=16384)
    compared = (x <= largest) & ((largest < 1e-20) | (x >= 2.0**-100) | (x == 0))
    assert compared.sum() > 40000
    assert_bitwise(got[compared], torch.from_numpy(x / np.float32(6))[compared], name="sixth")
    mantissa, exponent = np.frexp(x.astype(np.float64) / 6)
    up = np.where(mantissa == 0.5, exponent - 1, exponent)
    want = np.where(x == 0, 0, np.clip(up, -127, 127) + 127).astype(np.uint8)
    assert_bitwise(byte, torch.from_numpy(want), name="rceil")
    assert_bitwise(code[:128], torch.arange(128).to(torch.uint8), name="codes of E4M3 scales")


@triton.jit
def _words_kernel(codes_ptr, words_ptr, from_words_ptr, from_bytes_ptr):
    at = tl.arange(0, 256)[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(codes_ptr + at)
    words = nibble_words(nibble_pairs(e2m1_value(code)))
    tl.store(words_ptr + tl.arange(0, 256)[:, None] + tl.arange(0, 1)[None, :], words.to(tl.int32))
    tl.store(from_words_ptr + at, nibbles_of_words(words) * 8.507059173023462e37)
    bytes_at = words_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    bytes_at = bytes_at + tl.arange(0, 256)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(from_bytes_ptr + at, nibbles_of_bytes(tl.load(bytes_at)) * 8.507059173023462e37)


def test_words_of_4_bit_codes_and_back() -> None:
    """Every pair of codes side by side, every one at every place of a word."""
    rng = np.random.default_rng(0)
    rows = [[a, b, b, a, *rng.integers(0, 16, 4)] for a in range(16) for b in range(16)]
    codes = torch.tensor(np.array(rows), dtype=torch.int32)
    words = torch.zeros(256, dtype=torch.int32)
    back, again = torch.empty(256, 8), torch.empty(256, 8)
    _words_kernel[(1,)](codes, words, back, again)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    assert_bitwise(words.view(torch.uint8).view(256, 4), packed, name="words")
    want = decode(codes.to(torch.uint8), E2M1)
    assert_bitwise(back, want, name="from words")
    assert_bitwise(again, want, name="from bytes")


@triton.jit
def _tops_kernel(
    x_ptr, out_ptr, count, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tops = fp8_tops(fp8_magnitude(x, 1.0, MANTISSA, BIAS), x, MANTISSA, BIAS)
    tl.store(out_ptr + at, (tops >> 24).to(tl.uint8), mask=at < count)


@pytest.mark.parametrize("name", FP8)
def test_fp8_codes_at_the_top_of_a_word(name: str) -> None:
    """Every BF16 number and every tie of the range, which a head's power of two keeps, and their neighbours."""
    x = telling_floats(name)
    x = x[np.abs(x) <= {"E4M3": 448, "E5M2": 57344}[name]]
    got = torch.empty(len(x), dtype=torch.uint8)
    mantissa, bias = {"E4M3": (3, 7), "E5M2": (2, 15)}[name]
    _tops_kernel[(-(-len(x) // 8192),)](
        torch.from_numpy(x), got, len(x), MANTISSA=mantissa, BIAS=bias, BLOCK=8192
    )
    want = nearest_codes(x.astype(np.float64), name)
    assert_bitwise(got, torch.from_numpy(want), name=name)


def test_installed_once_and_only_in_an_interpreted_process(monkeypatch) -> None:
    install()
    assert interpreter._convert_float is convert
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is not set"):
        install()
