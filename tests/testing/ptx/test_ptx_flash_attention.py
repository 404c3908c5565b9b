"""flash-attn-4's sm100 forward, unmodified, against exact attention: a kernel nobody here wrote.

The bound on the output is bfloat16's: P and the output are rounded to 8 bits, so 2^-8 of the largest value of a row is what any BF16 kernel
may be off by. The log-sum-exp is float32.
"""

import importlib
import math
import re
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("flash_attn", reason="flash-attn-4 is not installed")

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
from cutlass import Float32, cute  # noqa: E402
from cutlass.base_dsl.dsl import BaseDSL  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream  # noqa: E402

from fp4mega.formats import E4M3, decode, encode  # noqa: E402
from fp4mega.testing import ptx  # noqa: E402
from tests.testing.ptx.packages import flash_attention_4  # noqa: E402

_PROGRAMS = {}


def compile_forward(arch, forward, element, dim, options=""):
    """A forward of FA4 with any batch, lengths and heads."""

    @cute.jit
    def host(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        forward(q, k, v, out, lse, scale, stream=stream)

    def fake(kind):
        shape = (cute.sym_int(), cute.sym_int(), cute.sym_int(), dim)
        return make_fake_compact_tensor(kind, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    shape = (cute.sym_int(), cute.sym_int(), cute.sym_int())
    lse = make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4)
    inputs = [fake(element) for _ in range(3)]
    return ptx.compile_for(
        arch,
        host,
        *inputs,
        fake(cutlass.BFloat16),
        lse,
        Float32(0),
        make_fake_stream(),
        options=options,
    )


def program(causal=False, dim=128, group=2, pair=False, element=cutlass.BFloat16):
    """The forward compiled for sm_100a, once per setting."""
    key = (causal, dim, group, pair, element)
    if key not in _PROGRAMS:
        forward = flash_attention_4()(
            dim,
            dim,
            qhead_per_kvhead=group,
            is_causal=causal,
            is_static_persistent=False,
            q_stage=2,
            use_2cta_instrs=pair,
        )

        _PROGRAMS[key] = ptx.load(compile_forward("sm_100a", forward, element, dim))
    return _PROGRAMS[key]


def hopper_program(causal=True):
    """FA4's sm_90a forward (wgmma, two consumer warpgroups), compiled with its cubin."""
    flash_attention_4()
    module = importlib.import_module("flash_attn.cute.flash_fwd_sm90")
    # The class asks for the architecture when it is made.
    with mock.patch.object(BaseDSL._get_dsl().envar, "arch", "sm_90a"):
        forward = module.FlashAttentionForwardSm90(
            cutlass.BFloat16,
            128,
            128,
            2,
            is_causal=causal,
            pack_gqa=False,
            tile_m=128,
            tile_n=128,
            num_stages=2,
            num_threads=384,
        )
        compiled = compile_forward("sm_90a", forward, cutlass.BFloat16, 128, "--keep-cubin")
    return ptx.load(compiled, sms=132), compiled


def bf16(x):
    """(bits, values) rounded to nearest even; no NaN here."""
    bits = x.view(np.uint32)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits, values(bits)


def values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3(x):
    """(codes, values) rounded to nearest even."""
    codes = encode(torch.from_numpy(x), E4M3)
    return codes.numpy(), decode(codes, E4M3).numpy()


def launch(compiled, batch, queries, keys, heads, kv_heads, dim, policy, seed=0, rounded=bf16):
    """(report, output, lse, q, k, v) with q, k, v [batch, heads, length, dim] as float64."""
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, dim),
        (batch, keys, kv_heads, dim),
        (batch, keys, kv_heads, dim),
    ]
    pairs = [rounded(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]
    out, lse = ptx.aligned(shapes[0], np.uint16), ptx.aligned((batch, heads, queries), np.float32)
    out[:], lse[:] = 0x7FFF, np.nan

    def given(a):
        return ptx.tensor(a, a.shape[:3], (a.shape[1] * a.shape[2] * dim, a.shape[2] * dim))

    report = ptx.launch(
        compiled,
        *(given(bits) for bits, _ in pairs),
        given(out),
        ptx.tensor(lse, lse.shape, (heads * queries, queries)),
        1 / math.sqrt(dim),
        None,
        policy=policy,
    )
    q, k, v = (x.transpose(0, 2, 1, 3).astype(np.float64) for _, x in pairs)
    return report, values(out).transpose(0, 2, 1, 3), lse, q, k, v


def exact(q, k, v, causal):
    """(output, log-sum-exp) in float64; kv heads are repeated, the causal mask is aligned to the end."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1])
    if causal:
        rows, columns = scores.shape[-2:]
        seen = np.arange(columns)[None, :] <= np.arange(rows)[:, None] + columns - rows
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return p / total @ v, np.log(total[..., 0]) + top[..., 0]


def check(compiled, batch, queries, keys, heads, kv_heads, dim, causal, policy):
    report, out, lse, q, k, v = launch(compiled, batch, queries, keys, heads, kv_heads, dim, policy)
    report.check()
    expected, expected_lse = exact(q, k, v, causal)
    bound = 2**-8 * np.abs(np.repeat(v, heads // kv_heads, 1)).max() * 0.5
    print(
        f"output off by {np.abs(out - expected).max():.2e} of {bound:.2e}, lse by {np.abs(lse - expected_lse).max():.2e}"
    )
    np.testing.assert_allclose(out, expected, rtol=2**-8, atol=bound)
    assert np.sqrt(np.mean((out - expected) ** 2)) < 2**-8 * np.sqrt(np.mean(expected**2))
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-5)


@pytest.mark.parametrize(
    ("causal", "queries", "keys", "policy"),
    [
        pytest.param(True, 320, 448, "random-1", id="causal-ragged"),
        pytest.param(False, 256, 200, "lazy", id="full-ragged-keys"),
    ],
)
def test_gqa(causal, queries, keys, policy):
    check(program(causal), 1, queries, keys, 2, 1, 128, causal, policy)


def test_hopper():
    """FA4's sm_90a kernel: wgmma with A from shared memory and from registers."""
    compiled, _ = hopper_program()
    assert "wgmma.mma_async" in compiled.module.text
    check(compiled, 1, 320, 448, 2, 1, 128, True, "eager")


def test_wgmma_group_not_waited_for():
    """A stage given back before the products that read it are done."""
    compiled, _ = hopper_program()
    text = re.sub(r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "", compiled.module.text)
    report = launch(compiled.with_text(text), 1, 128, 512, 2, 1, 128, "eager")[0]
    assert "race" in report.kinds()


def test_e4m3():
    """kind f8f6f4, P in E4M3 out of tensor memory, V not K-major: P's 3 mantissa bits are the whole error."""
    compiled = program(True, element=cutlass.Float8E4M3FN)
    assert "kind::f8f6f4" in compiled.module.text
    report, out, lse, q, k, v = launch(compiled, 1, 200, 300, 2, 1, 128, "eager", rounded=e4m3)
    report.check()
    expected, expected_lse = exact(q, k, v, True)
    error = np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2))
    print(
        f"output off by {error:.2e} in relative RMS, lse by {np.abs(lse - expected_lse).max():.2e}"
    )
    # Uniform rounding errors of relative size up to 2^-4: at most 2^-4 / sqrt(3), averaged over the values of a row.
    assert 2**-8 < error < 2**-4 / 3**0.5
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=4e-5)


def test_two_cta():
    """cta_group::2: one product over both CTAs of a cluster, distributed shared memory, multicast commits."""
    compiled = program(pair=True)
    assert "tcgen05.mma.cta_group::2" in compiled.module.text
    check(compiled, 1, 512, 256, 2, 1, 128, False, "eager")


def test_dropped_commit_deadlocks():
    compiled = program(True)
    lines = compiled.module.text.splitlines()
    commits = [i for i, text in enumerate(lines) if "tcgen05.commit" in text]
    del lines[commits[1]]
    with pytest.raises(
        ptx.DeadlockError,
        match=r"warp \d+ at #\d+: waits for mbarrier 0x[0-9a-f]+ of CTA 0, parity",
    ):
        launch(compiled.with_text("\n".join(lines)), 1, 128, 128, 2, 1, 128, "eager")


def test_p_signalled_early_is_a_race():
    """P is published without waiting for its stores: numbers may be right, the order is not."""
    compiled = program(True)
    lines = [text for text in compiled.module.text.splitlines() if "tcgen05.wait::st" not in text]
    report = launch(compiled.with_text("\n".join(lines)), 1, 256, 256, 2, 1, 128, "eager")[0]
    assert "race" in report.kinds()


def test_k_released_early_is_a_race():
    """A stage of K and V is given back to the copies while the product still reads it: the release's commit is an arrive."""
    compiled = program(True)
    lines = compiled.module.text.splitlines()
    waits = [i for i, text in enumerate(lines) if re.search(r"mbarrier\.try_wait", text)]
    seen = set()
    for i in waits:
        broken = list(lines)
        # Passing a wait at once: the parity flipped.
        match = re.search(r"(mbarrier\.try_wait\S+\s+\S+, \[\S+\], )(%r\d+)", broken[i])
        if match is None:
            continue
        broken[i] = broken[i].replace(match.group(0), match.group(1) + "1")
        try:
            report = launch(
                compiled.with_text("\n".join(broken)), 1, 128, 384, 2, 1, 128, "random-2"
            )[0]
        except ptx.PtxError as error:
            seen.add(type(error).__name__)
            continue
        seen |= set(report.kinds())
        if len(seen) > 3 or len(seen & {"race"}):
            break
    assert "race" in seen


@pytest.mark.ptx_matrix
@pytest.mark.parametrize("policy", ["eager", "lazy", "random-1", "random-2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "kv_heads"),
    [(1, 128, 128, 2, 1), (2, 300, 520, 4, 2), (1, 1, 333, 2, 2)],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_matrix(dim, batch, queries, keys, heads, kv_heads, causal, policy):
    check(
        program(causal, dim, heads // kv_heads),
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        dim,
        causal,
        policy,
    )


@pytest.mark.ptx_matrix
@pytest.mark.parametrize("policy", ["lazy", "random-1"])
def test_two_cta_matrix(policy):
    check(program(pair=True), 1, 600, 520, 2, 1, 128, False, policy)


@pytest.mark.ptx_matrix
@pytest.mark.parametrize("policy", ["eager", "lazy", "random-1"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_hopper_matrix(causal, policy):
    check(hopper_program(causal)[0], 2, 200, 333, 4, 2, 128, causal, policy)
