"""Every cvt to and from a narrow format, executed as PTX, bit for bit against fp4mega.formats."""

import numpy as np
import pytest
import torch

from fp4mega.formats import E2M1, E4M3, E5M2, E8M0, decode, encode
from fp4mega.testing import ptx

FORMATS = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}


def kernel(body, registers=""):
    """One warp; `in` and `out` are 64-bit pointers, thread t reads and writes at 8 t."""
    return ptx.load(f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(
	.param .u64 .ptr .global .align 16 in,
	.param .u64 .ptr .global .align 16 out
)
{{
	.reg .b8 %c<4>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .pred %p<4>;
	{registers}
	ld.param.u64 %d0, [in];
	ld.param.u64 %d1, [out];
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d2, %r0, 8;
	mov.u32 %r1, %ctaid.x;
	mad.wide.u32 %d2, %r1, 256, %d2;
	add.s64 %d0, %d0, %d2;
	add.s64 %d1, %d1, %d2;
	ld.global.v2.b32 {{%r2, %r3}}, [%d0];
	{body}
	st.global.v2.b32 [%d1], {{%r4, %r5}};
	ret;
}}
""")


def run(program, words):
    """uint32 [n, 2] through the kernel."""
    words = np.ascontiguousarray(words, np.uint32)
    blocks = -(-len(words) // 32)
    given = ptx.aligned((blocks * 32, 2), np.uint32)
    given[: len(words)] = words
    out = ptx.aligned((blocks * 32, 2), np.uint32)
    parameters = [int(a.ctypes.data).to_bytes(8, "little") for a in (given, out)]
    ptx.execute(
        program,
        grid=(blocks, 1, 1),
        block=(32, 1, 1),
        parameters=parameters,
        buffers={"in": given, "out": out},
    ).check()
    return out[: len(words)].copy()


def floats():
    """Every code of every format, every midpoint of neighbours and both its float32 neighbours, both signs, specials."""
    found = [
        np.array(
            [
                0.0,
                np.inf,
                1e-45,
                1e-38,
                3.4e38,
                0.1,
                447.9,
                448.0,
                464.0,
                465.0,
                5.0,
                5.1,
                6.0,
                7.0,
                1e9,
            ],
            np.float32,
        )
    ]
    for fmt in FORMATS.values():
        codes = torch.arange(1 << (fmt.bits - 1), dtype=torch.uint8)
        values = decode(codes, fmt).numpy()
        values = np.sort(values[np.isfinite(values)])
        middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        found += [
            values,
            middle,
            np.nextafter(middle, np.float32(np.inf)),
            np.nextafter(middle, np.float32(0)),
        ]
    rng = np.random.default_rng(0)
    found.append(
        (rng.standard_normal(256) * np.exp2(rng.integers(-20, 20, 256))).astype(np.float32)
    )
    x = np.concatenate(found)
    return np.concatenate([x, -x])


@pytest.mark.parametrize("name", FORMATS)
def test_from_float32(name):
    """.rn.satfinite: nearest, ties to even, saturated; infinity saturates too."""
    fmt = FORMATS[name]
    low = floats()
    high = np.roll(low, 7)
    register = "%c0" if fmt.bits == 4 else "%h0"
    widen = "cvt.u32.u8 %r4, %c0;" if fmt.bits == 4 else "cvt.u32.u16 %r4, %h0;"
    program = kernel(f"cvt.rn.satfinite.{name}x2.f32 {register}, %r3, %r2; {widen} mov.b32 %r5, 0;")
    out = run(program, np.stack([low.view(np.uint32), high.view(np.uint32)], 1))[:, 0]
    expected = [
        encode(torch.from_numpy(np.clip(x, -fmt.max, fmt.max)), fmt).numpy().astype(np.uint32)
        for x in (low, high)
    ]
    np.testing.assert_array_equal(out, expected[0] | expected[1] << fmt.bits)


def test_nan():
    """The canonical NaN of each format; E2M1 has none and gives +6."""
    nan = np.full((1, 2), 0x7FC00000, np.uint32)
    for name, code in (("e2m1", 0x77), ("e4m3", 0x7F7F), ("e5m2", 0x7F7F)):
        register, widen = ("%c0", "u8") if name == "e2m1" else ("%h0", "u16")
        program = kernel(
            f"cvt.rn.satfinite.{name}x2.f32 {register}, %r3, %r2; cvt.u32.{widen} %r4, {register}; mov.b32 %r5, 0;"
        )
        assert run(program, nan)[0, 0] == code


@pytest.mark.parametrize("name", FORMATS)
def test_to_half_pair(name):
    """Every code to float16, exactly: f16 holds all of them but E5M2's NaN payloads."""
    fmt = FORMATS[name]
    codes = np.arange(256, dtype=np.uint32)
    register, narrow = ("%c0", "u8") if fmt.bits == 4 else ("%h0", "u16")
    program = kernel(
        f"cvt.{narrow}.u32 {register}, %r2; cvt.rn.f16x2.{name}x2 %r4, {register}; mov.b32 %r5, 0;"
    )
    words = codes if fmt.bits == 4 else codes | (255 - codes) << 8
    out = run(program, np.stack([words, words], 1))[:, 0]
    halves = np.ascontiguousarray(out).view(np.float16).reshape(-1, 2).astype(np.float32)
    pairs = (words & 15, words >> 4) if fmt.bits == 4 else (words & 255, words >> 8)
    for column, part in enumerate(pairs):
        expected = decode(torch.from_numpy(part.astype(np.uint8)), fmt).numpy()
        np.testing.assert_array_equal(halves[:, column], expected)


def test_ue8m0_up():
    """.rp: the power of two at or above, for normals, powers of two themselves and subnormals."""
    exponents = np.arange(-149, 127)
    x = np.concatenate(
        [np.exp2(exponents.astype(np.float64)), 1.5 * np.exp2(exponents[1:].astype(np.float64))]
    ).astype(np.float32)
    x = x[np.isfinite(x)]
    program = kernel(
        "cvt.rp.ue8m0x2.f32 %h0, %r3, %r2; cvt.u32.u16 %r4, %h0; cvt.rn.bf16x2.ue8m0x2 %r5, %h0;"
    )
    out = run(program, np.stack([x.view(np.uint32)] * 2, 1))
    expected = np.clip(np.ceil(np.log2(x.astype(np.float64))), -127, 127)
    codes = (expected + 127).astype(np.uint32)
    np.testing.assert_array_equal(out[:, 0], codes | codes << 8)
    back = decode(torch.from_numpy(codes.astype(np.uint8)), E8M0).numpy()
    bits = (np.ascontiguousarray(out[:, 1]) & 0xFFFF) << 16
    np.testing.assert_array_equal(bits.view(np.float32), back)


@pytest.mark.parametrize("to", ["bf16", "f16"])
def test_sixteen_bit_pairs(to):
    x = floats()
    program = kernel(f"cvt.rn.{to}x2.f32 %r4, %r3, %r2; mov.b32 %r5, 0;")
    out = run(program, np.stack([x.view(np.uint32), np.roll(x, 3).view(np.uint32)], 1))[:, 0]
    dtype = torch.bfloat16 if to == "bf16" else torch.float16
    halves = [
        torch.from_numpy(v.copy())
        .to(dtype)
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
        .astype(np.uint32)
        for v in (x, np.roll(x, 3))
    ]
    np.testing.assert_array_equal(out, halves[0] | halves[1] << 16)


@pytest.mark.parametrize(
    ("modifier", "function"),
    [("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil), ("rzi", np.trunc)],
)
def test_rounding_to_integers(modifier, function):
    x = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 2.3, -2.7, 1e9, -1e9, 3e9, -3e9, np.inf, -np.inf, np.nan],
        np.float32,
    )
    program = kernel(f"cvt.{modifier}.f32.f32 %r4, %r2; cvt.{modifier}.s32.f32 %r5, %r2;")
    out = run(program, np.stack([x.view(np.uint32)] * 2, 1))
    np.testing.assert_array_equal(np.ascontiguousarray(out[:, 0]).view(np.float32), function(x))
    wanted = np.clip(np.nan_to_num(function(x).astype(np.float64), nan=0.0), -(2**31), 2**31 - 1)
    np.testing.assert_array_equal(
        np.ascontiguousarray(out[:, 1]).view(np.int32), wanted.astype(np.int32)
    )


def test_stochastic_rounding_is_refused_by_name():
    program = kernel(
        "cvt.rs.satfinite.e2m1x4.f32 %h0, {%r2, %r3, %r2, %r3}, %r2; mov.b32 %r4, 0; mov.b32 %r5, 0;"
    )
    with pytest.raises(ptx.UnsupportedInstructionError, match=r"cvt\.rs\.satfinite\.e2m1x4\.f32"):
        run(program, np.zeros((1, 2), np.uint32))
