"""The compact FP4 attention kernel: right under every policy, and every planted bug is caught."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from fp4mega.formats import E2M1, decode, encode  # noqa: E402
from fp4mega.testing import ptx  # noqa: E402
from tests.testing.ptx import direct_p_kernel  # noqa: E402
from tests.testing.ptx.operands import block_scaled  # noqa: E402


@pytest.fixture(scope="module")
def program():
    compiled = ptx.compile_for("sm_100a", direct_p_kernel.attend, *direct_p_kernel.arguments())
    return ptx.load(compiled)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(3)
    q, sfq, q_values = block_scaled(rng, 128, 128, "e2m1", "e4m3", 16)
    k, sfk, k_values = block_scaled(rng, 128, 128, "e2m1", "e4m3", 16)
    v, sfv, v_values = block_scaled(rng, 128, 128, "e2m1", "e8m0", 32)
    scores = (q_values @ k_values.T).astype(np.float32)
    p = _quantized(np.exp2(scores * np.float32(0.0625)))
    words = [s.view(np.int32) for s in (sfq, sfk, sfv)]
    return (q, k, v, *words), p @ v_values.T


def _quantized(p):
    """MXFP4 along 32 keys, scale the power of two at or above amax / 4; by fp4mega.formats."""
    blocks = torch.from_numpy(p).reshape(128, 4, 32)
    limit = blocks.amax(-1, keepdim=True) * 0.25
    exponent = torch.ceil(torch.log2(limit.double()))
    scale = torch.exp2(exponent)
    codes = encode((blocks.double() / scale).float(), E2M1)
    return (decode(codes, E2M1).double() * scale).reshape(128, 128).numpy()


def run(program, case, policy="eager", **options):
    out = ptx.aligned((128, 128), np.float32)
    out[:] = np.nan
    report = ptx.launch(program, *case[0], out, None, policy=policy, **options)
    error = np.abs(out - case[1]).max() / np.abs(case[1]).max()
    return report, float(error)


@pytest.mark.parametrize("policy", ["eager", "lazy", "random-1", "random-2", "random-3"])
def test_right_and_clean(program, case, policy):
    report, error = run(program, case, policy)
    report.check()
    assert error < 1e-6
    assert report.launches[0].block == (160, 1, 1)


def line(program, pattern, index=0):
    """The index-th line of the PTX that matches."""
    return [text for text in program.module.text.splitlines() if re.search(pattern, text)][index]


def without(program, pattern, index=0):
    """The program with one matching line taken out."""
    lines = program.module.text.splitlines()
    found = [i for i, text in enumerate(lines) if re.search(pattern, text)]
    del lines[found[index]]
    return program.with_text("\n".join(lines))


def replaced(program, pattern, old, new, index=0):
    """The program with `old` replaced in one matching line."""
    lines = program.module.text.splitlines()
    i = [i for i, text in enumerate(lines) if re.search(pattern, text)][index]
    assert old in lines[i]
    lines[i] = lines[i].replace(old, new)
    return program.with_text("\n".join(lines))


def kinds(report):
    return set(report.kinds())


@pytest.mark.parametrize("index", [0, 1], ids=["operand_scales", "p_scales"])
@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_dropped_proxy_fence(program, case, index, policy):
    """Scale bytes written by ordinary stores and read by tcgen05.cp: the fence is missed whatever the schedule."""
    report, error = run(without(program, r"fence\.proxy\.async", index), case, policy)
    assert kinds(report) == {"proxy-fence"}
    assert error < 1e-6, "the schedule hides it: only the fence discipline shows it"
    with pytest.raises(ptx.FindingsError, match="fence.proxy.async"):
        report.check()


def test_wrong_phase_bit(program, case):
    """The softmax waits for the wrong parity of the scores' barrier: it reads before the product is there."""
    broken = replaced(program, r"mbarrier\.try_wait", ", 0, ", ", 1, ", 2)
    report, error = run(broken, case, "lazy")
    assert "race" in kinds(report)
    assert not error < 1e-3


def test_wrong_phase_bit_shows_without_bad_luck(program, case):
    """Eager units finish before the early reader looks: the numbers are right and the race is still found."""
    broken = replaced(program, r"mbarrier\.try_wait", ", 0, ", ", 1, ", 3)
    report, _ = run(broken, case, "eager")
    assert "race" in kinds(report)


def test_waiting_for_a_phase_that_never_ends(program, case):
    init = line(program, r"mbarrier\.init.*\+16\]")
    broken = program.mutate(init, init.rpartition(",")[0] + ", 129;")
    with pytest.raises(ptx.DeadlockError, match=r"1 of 129 arrivals.*mbarrier\.try_wait"):
        run(broken, case)


def test_scale_address_tid_times_four(program, case):
    """Row r's scales belong at (r % 32) * 16 + (r // 32) * 4, not at r * 4."""
    text = program.module.text
    lines = text.splitlines()
    store = next(
        i
        for i, t in enumerate(lines)
        if "st.shared.b32" in t and i > next(j for j, u in enumerate(lines) if "tcgen05.st" in u)
    )
    address = re.search(r"\[(%r\d+)\+", lines[store]).group(1)
    made = next(i for i in range(store, 0, -1) if re.search(rf"add\.s32\s+{address},", lines[i]))
    base, offset = re.search(r"add\.s32\s+%r\d+, (%r\d+), (%r\d+);", lines[made]).groups()
    tid = next(
        re.search(r"mov\.u32\s+(%r\d+), %tid\.x", t).group(1) for t in lines if "%tid.x" in t
    )
    lines[made] = f"\tmad.lo.s32 \t{address}, {tid}, 4, {base};"
    assert offset != tid
    report, error = run(program.with_text("\n".join(lines)), case)
    assert not error < 1e-2


def test_nibbles_in_the_wrong_order(program, case):
    """The even key goes to the low nibble."""
    text = re.sub(
        r"(cvt\.rn\.satfinite\.e2m1x2\.f32\s+%?\w+), (%\w+), (%\w+)",
        r"\1, \3, \2",
        program.module.text,
    )
    assert text != program.module.text
    report, error = run(program.with_text(text), case)
    report.check()
    assert error > 1e-2


def test_nibbles_packed_along_the_wrong_axis(program, case):
    """V^T packed along the head dim instead of along the keys."""
    q, k, v, *scales = case[0]
    nibbles = np.stack([v & 15, v >> 4], axis=-1).reshape(128, 128)
    wrong = (
        np.ascontiguousarray((nibbles[0::2] | nibbles[1::2] << 4).T)
        .reshape(64, 128)
        .reshape(128, 64)
    )
    report, error = run(program, ((q, k, np.ascontiguousarray(wrong), *scales), case[1]))
    report.check()
    assert error > 1e-2


@pytest.mark.parametrize("policy", ["eager", "random-5"])
def test_p_one_column_off(program, case, policy):
    """Column 256 is never written, and the product says so."""
    register = re.search(r"tcgen05\.st\.\S+\s+\[(%r\d+)\]", program.module.text).group(1)
    broken = replaced(program, r"tcgen05\.st\.", f"[{register}]", f"[{register}+1]")
    report, error = run(broken, case, policy)
    assert kinds(report) == {"uninitialized"}
    assert not error < 1e-2


def test_scales_one_column_off(program, case):
    """The copy of P's scales goes one column too far: the product reads what was never written."""
    copies = [t for t in program.module.text.splitlines() if "tcgen05.cp." in t]
    target = re.search(r"\[(%r\d+)\]", copies[4]).group(1)
    broken = replaced(program, r"tcgen05\.cp\.", f"[{target}]", f"[{target}+1]", 4)
    report, error = run(broken, case)
    assert "uninitialized" in kinds(report)
    assert not error < 1e-2


@pytest.mark.parametrize(("index", "barrier"), [(0, 0x408), (1, 0x418)], ids=["scores", "out"])
def test_dropped_commit(program, case, index, barrier):
    with pytest.raises(
        ptx.DeadlockError, match=rf"warp 0 at #\d+: waits for mbarrier {barrier:#x}"
    ):
        run(without(program, r"tcgen05\.commit", index), case)


def test_missing_arrive(program, case):
    with pytest.raises(ptx.DeadlockError, match=r"warp 4 .*mbarrier 0x410 .*128 of 128 arrivals"):
        run(without(program, r"mbarrier\.arrive\.shared"), case)


def test_wrong_transaction_count(program, case):
    expect = re.search(
        r"mbarrier\.arrive\.expect_tx\S+\s+%rd\d+, \[\S+\], (%r\d+)", program.module.text
    ).group(1)
    broken = replaced(program, rf"mov\.b32\s+{expect}, 24576", "24576", "24592")
    with pytest.raises(ptx.DeadlockError, match=r"0 of 1 arrivals and 16 bytes pending"):
        run(broken, case)


def test_dropped_wait_for_the_store(program, case):
    """P signalled before tcgen05.wait::st: late stores give wrong numbers, early ones are still a race."""
    broken = without(program, r"tcgen05\.wait::st")
    report, error = run(broken, case, "lazy")
    assert kinds(report) & {"race", "uninitialized"}
    assert not error < 1e-2
    report, error = run(broken, case, "eager")
    assert kinds(report) == {"race"}
    assert error < 1e-6


def test_dropped_wait_for_the_operands(program, case):
    """The product issued without waiting for the copies it reads."""
    broken = replaced(program, r"mbarrier\.try_wait", ", 0, ", ", 1, ", 0)
    assert "race" in kinds(run(broken, case, "eager")[0])
    errors = [run(broken, case, f"random-{seed}")[1] for seed in range(6)]
    assert not max(errors, default=0.0) < 1e-2 or any(np.isnan(errors))


def test_dropped_cta_barrier(program, case):
    """Without the first bar.sync the barriers are used before their initialization is ordered (or found missing)."""
    broken = without(program, r"bar\.sync")
    with pytest.raises(ptx.PtxError, match=r"never initialized|not allocated|column"):
        run(broken, case, "random-1")


def test_signal_before_the_load_is_done(program, case):
    """The scores' columns given back (a barrier arrival) between tcgen05.ld and the first use of what it loads."""
    load = line(program, r"tcgen05\.ld\.")
    broken = program.mutate(load, load + "\n\tbar.arrive 7, 256;")
    report, error = run(broken, case)
    assert kinds(report) == {"early-signal"}
    assert "bar.arrive 7" in report.findings[0].message
    waited = program.mutate(load, load + "\n\ttcgen05.wait::ld.sync.aligned;\n\tbar.arrive 7, 256;")
    run(waited, case)[0].check()
    assert error < 1e-6


def test_tensor_memory_leak(program, case):
    report, error = run(without(program, r"tcgen05\.dealloc"), case)
    assert kinds(report) == {"tensor-leak"}
    assert error < 1e-6


def test_output_out_of_bounds(program, case):
    """The kernel writes 128 rows; a buffer of 127 is caught at its end."""
    small = ptx.aligned((127, 128), np.float32)
    with pytest.raises(ptx.OutOfBoundsError, match=r"out, 65024 bytes"):
        ptx.launch(program, *case[0], small, None)


def test_tensor_memory_out_of_bounds(program, case):
    """Fewer columns allocated than used."""
    register = re.search(r"tcgen05\.alloc\S+\s+\[%r\d+\], (%r\d+)", program.module.text).group(1)
    broken = replaced(program, rf"mov\.b32\s+{register}, 512", "512", "256")
    broken = broken.with_text(re.sub(r"(mov\.b32\s+%r\d+, )512;", r"\g<1>256;", broken.module.text))
    with pytest.raises(ptx.OutOfBoundsError, match="column 2[5-9][0-9] is not allocated"):
        run(broken, case)


def test_unsupported_instruction_is_named(program, case):
    text = program.module.text.replace("ex2.approx.ftz.f32", "ex3.approx.ftz.f32", 1)
    with pytest.raises(ptx.UnsupportedInstructionError, match=r"ex3\.approx\.ftz\.f32"):
        run(program.with_text(text), case)


def test_wrong_warp_for_a_lane_partition(program, case):
    """A warp may only touch tensor memory lanes 32 (w % 4) and up."""
    text = program.module.text
    assert text.count("shl.b32") > 2
    store = re.search(r"tcgen05\.st\.\S+\s+\[(%r\d+)\]", text).group(1)
    broken = replaced(program, r"tcgen05\.st\.", f"[{store}]", f"[{store}+2097152]")
    with pytest.raises(ptx.ProtocolError, match="it may only touch"):
        run(broken, case)
