"""Hand-written PTX: control flow, lanes, memory, barriers, and the faults and findings they can raise."""

import numpy as np
import pytest

from fp4mega.testing import ptx


def program(body, shared=""):
    """A kernel of one parameter, a pointer; %r0 is the thread, %d1 its own 4-byte slot."""
    return ptx.load(f"""
.version 8.8
.target sm_100a
.address_size 64
{shared}
.visible .entry k(
	.param .u64 out
)
{{
	.reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .pred %p<8>; .reg .f32 %f<16>;
	ld.param.u64 %d0, [out];
	cvta.to.global.u64 %d0, %d0;
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %d1, %r0, 4;
	add.s64 %d1, %d0, %d1;
	{body}
	ret;
}}
""")


def run(
    code,
    threads=32,
    policy="eager",
    shared="",
    shared_bytes=0,
    check=True,
    grid=(1, 1, 1),
    cluster=(1, 1, 1),
    words=None,
):
    loaded = program(code, shared)
    out = np.zeros(words or threads, np.uint32)
    report = ptx.execute(
        loaded,
        grid=grid,
        block=(threads, 1, 1),
        cluster=cluster,
        parameters=[int(out.ctypes.data).to_bytes(8, "little")],
        buffers={"out": out},
        policy=policy,
        shared_bytes=shared_bytes,
    )
    if check:
        report.check()
        return out
    return out, report


SHARED = ".extern .shared .align 16 .b8 s[];"


def test_divergent_loop_and_guards():
    """Each lane counts to its own number; lanes that are done wait for the others."""
    out = run("""
	mov.b32 %r1, 0; mov.b32 %r2, 0;
L:	add.u32 %r1, %r1, 3;
	add.u32 %r2, %r2, 1;
	setp.le.u32 %p0, %r2, %r0;
	@%p0 bra L;
	setp.eq.u32 %p1, %r0, 5;
	@%p1 mov.b32 %r1, 1000;
	@!%p1 add.u32 %r1, %r1, 1;
	st.global.b32 [%d1], %r1;""")
    expected = 3 * (np.arange(32) + 1) + 1
    expected[5] = 1000
    np.testing.assert_array_equal(out, expected)


def test_guarded_exit_and_partial_warp():
    out = run("""
	setp.lt.u32 %p0, %r0, 7;
	@%p0 ret;
	st.global.b32 [%d1], %r0;""", threads=40)  # fmt: skip
    np.testing.assert_array_equal(out, np.where(np.arange(40) < 7, 0, np.arange(40)))


def test_lanes():
    """shfl in its four modes, ballot, elect, redux, match."""
    out = run("""
	shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
	shfl.sync.up.b32 %r2|%p1, %r0, 2, 0, -1;
	shfl.sync.down.b32 %r3, %r0, 4, 31, -1;
	shfl.sync.idx.b32 %r4, %r0, 3, 0x181f, -1;
	and.b32 %r5, %r0, 3;
	setp.eq.u32 %p2, %r5, 0;
	vote.sync.ballot.b32 %r6, %p2, -1;
	redux.sync.max.u32 %r7, %r0, -1;
	elect.sync %r8|%p3, -1;
	selp.b32 %r9, 1, 0, %p3;
	selp.b32 %r10, 1, 0, %p1;
	match.any.sync.b32 %r11, %r5, -1;
	mul.lo.u32 %r12, %r0, 36;
	cvt.u64.u32 %d2, %r12;
	add.s64 %d2, %d0, %d2;
	st.global.b32 [%d2], %r1; st.global.b32 [%d2+4], %r2; st.global.b32 [%d2+8], %r3; st.global.b32 [%d2+12], %r4;
	st.global.b32 [%d2+16], %r6; st.global.b32 [%d2+20], %r7; st.global.b32 [%d2+24], %r9; st.global.b32 [%d2+28], %r10;
	st.global.b32 [%d2+32], %r11;""", words=32 * 9).reshape(32, 9)  # fmt: skip
    lane = np.arange(32)
    np.testing.assert_array_equal(out[:, 0], lane ^ 1)
    np.testing.assert_array_equal(out[:, 1], np.where(lane < 2, lane, lane - 2))
    np.testing.assert_array_equal(out[:, 2], np.where(lane + 4 < 32, lane + 4, lane))
    np.testing.assert_array_equal(out[:, 3], (lane & 24) | 3)
    assert (out[:, 4] == 0x11111111).all()
    assert (out[:, 5] == 31).all()
    np.testing.assert_array_equal(out[:, 6], lane == 0)
    np.testing.assert_array_equal(out[:, 7], lane >= 2)
    np.testing.assert_array_equal(out[:, 8], np.uint32(0x11111111) << (lane & 3).astype(np.uint32))


def test_integer_corner_cases():
    """Shifts of 32 and more, signed division and remainder, mul.hi, bfe, bfi, prmt, clz, brev."""
    code = """
	mov.b32 %r1, 0x80000001; mov.b32 %r2, 40; mov.b32 %r3, -7; mov.b32 %r4, 3;
	shl.b32 %r5, %r1, %r2; shr.s32 %r6, %r1, %r2; shr.u32 %r7, %r1, 1;
	div.s32 %r8, %r3, %r4; rem.s32 %r9, %r3, %r4; mul.hi.u32 %r10, %r1, %r1; mul.hi.s32 %r11, %r3, %r4;
	bfe.u32 %r12, %r1, 28, 4; bfe.s32 %r13, %r1, 28, 4; bfi.b32 %r14, 0xF, 0, 4, 8; prmt.b32 %r15, %r1, 0, 0x0123;
	clz.b32 %r16, %r4; brev.b32 %r17, %r4; popc.b32 %r18, %r3; shf.l.wrap.b32 %r19, %r1, %r4, 4; bfind.u32 %r20, %r4;
	prmt.b32 %r21, %r1, 0, 0xB0B0;
"""
    code += "\n".join(f"\tst.global.b32 [%d0+{4 * i}], %r{i + 5};" for i in range(17))
    out = run(code, words=32)
    expected = [
        0,
        0xFFFFFFFF,
        0x40000000,
        -2,
        -1,
        0x40000001,
        0xFFFFFFFF,
        8,
        0xFFFFFFF8,
        0xF0,
        0x01000080,
    ]
    expected += [30, 0xC0000000, 30, 0x38, 1, 0xFF01FF01]
    np.testing.assert_array_equal(
        out[:17].astype(np.int64), np.array(expected, np.int64) & 0xFFFFFFFF
    )


def test_float_rules():
    """ftz, max with NaN, unordered comparisons, fma in one rounding, packed float32, rounding down."""
    out = run("""
	mov.b32 %f0, 0f00000001; add.ftz.f32 %f1, %f0, %f0; add.f32 %f2, %f0, %f0;
	mov.b32 %f3, 0f7FC00000; mov.b32 %f4, 0f3F800000; max.f32 %f5, %f3, %f4; max.NaN.f32 %f6, %f3, %f4;
	setp.ltu.f32 %p0, %f3, %f4; setp.lt.f32 %p1, %f3, %f4; selp.b32 %r1, 1, 0, %p0; selp.b32 %r2, 1, 0, %p1;
	mov.b32 %f7, 0f3F800001; mov.b32 %f8, 0fBF800002; fma.rn.f32 %f9, %f7, %f7, %f8;
	mov.b64 %d2, {%f4, %f7}; add.rn.f32x2 %d3, %d2, %d2; mov.b64 {%r3, %r4}, %d3;
	mov.b32 %f10, 0f33000000; add.rm.f32 %f11, %f8, %f10; neg.f32 %f12, %f10; add.rm.f32 %f13, %f4, %f12;
	max.f32 %f14, %f0, %f4, %f10;
	st.global.b32 [%d0], %f1; st.global.b32 [%d0+4], %f2; st.global.b32 [%d0+8], %f5; st.global.b32 [%d0+12], %f6;
	st.global.b32 [%d0+16], %r1; st.global.b32 [%d0+20], %r2; st.global.b32 [%d0+24], %f9; st.global.b32 [%d0+28], %r3;
	st.global.b32 [%d0+32], %r4; st.global.b32 [%d0+36], %f13; st.global.b32 [%d0+40], %f14;""")  # fmt: skip
    f = out.view(np.float32)
    assert out[0] == 0
    assert out[1] == 2
    assert f[2] == 1.0
    assert np.isnan(f[3])
    assert list(out[4:6]) == [1, 0]
    assert f[6] == np.float32(2.0**-46)
    assert f[7] == 2.0
    assert f[8] == np.float32(2 * (1 + 2**-23))
    assert f[9] == np.nextafter(np.float32(1), np.float32(0))
    assert f[10] == 1.0


def test_shared_memory_over_a_barrier():
    """Reversal through shared memory; without the barrier the tracker sees the race, and random order the wrong numbers."""
    code = """
	shl.b32 %r1, %r0, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1;
	st.shared.b32 [%r3], %r0;
	bar.sync 0;
	sub.u32 %r4, 127, %r0; shl.b32 %r4, %r4, 2; add.u32 %r4, %r2, %r4;
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%d1], %r5;"""
    np.testing.assert_array_equal(run(code, 128, "random-3", SHARED, 512), 127 - np.arange(128))
    _, report = run(code.replace("bar.sync 0;", ""), 128, "random-3", SHARED, 512, check=False)
    assert "race" in report.kinds() or "uninitialized" in report.kinds()


def test_shared_memory_bounds_and_first_reads():
    with pytest.raises(ptx.OutOfBoundsError, match="shared memory bytes"):
        run("mov.u32 %r1, s; ld.shared.b32 %r2, [%r1+512];", shared=SHARED, shared_bytes=512)
    _, report = run(
        "mov.u32 %r1, s; ld.shared.b32 %r2, [%r1];", shared=SHARED, shared_bytes=512, check=False
    )
    assert report.kinds() == {"uninitialized": 1}
    with pytest.raises(ptx.ProtocolError, match="misaligned"):
        run("mov.u32 %r1, s; ld.shared.b32 %r2, [%r1+2];", shared=SHARED, shared_bytes=512)


def test_mbarrier_phases():
    """Two warps hand a value over and back through two barriers, eight times."""
    code = """
	mov.u32 %r1, s; setp.ne.u32 %p0, %r0, 0;
	@%p0 bra A;
	mbarrier.init.shared.b64 [%r1], 32; mbarrier.init.shared.b64 [%r1+8], 32;
	mov.b32 %r9, 0; st.shared.b32 [%r1+16], %r9;
A:	bar.sync 0;
	mov.b32 %r2, 0; mov.b32 %r3, 0;
	setp.ge.u32 %p1, %r0, 32;
	@%p1 bra SECOND;
FIRST:	ld.shared.b32 %r5, [%r1+16]; bar.warp.sync -1; add.u32 %r5, %r5, 1; st.shared.b32 [%r1+16], %r5;
	mbarrier.arrive.shared.b64 _, [%r1];
W1:	mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], %r3; @%p2 bra D1; bra W1;
D1:	xor.b32 %r3, %r3, 1; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 8; @%p3 bra FIRST;
	bra END;
SECOND:
W2:	mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r3; @%p2 bra D2; bra W2;
D2:	ld.shared.b32 %r5, [%r1+16]; bar.warp.sync -1; mul.lo.u32 %r5, %r5, 2; st.shared.b32 [%r1+16], %r5;
	mbarrier.arrive.shared.b64 _, [%r1+8];
	xor.b32 %r3, %r3, 1; add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 8; @%p3 bra SECOND;
END:	ld.shared.b32 %r5, [%r1+16];
	st.global.b32 [%d1], %r5;"""
    expected = 0
    for _ in range(8):
        expected = 2 * (expected + 1)
    for policy in ("eager", "random-1", "random-2"):
        out = run(code, 64, policy, SHARED, 64)
        assert (out == expected).all()
    with pytest.raises(
        ptx.DeadlockError, match=r"warp 1 .*mbarrier 0x400 of CTA 0, parity 0 \(phase 0, 1 of 33"
    ):
        run(code.replace("[%r1], 32", "[%r1], 33"), 64, "eager", SHARED, 64)
    with pytest.raises(ptx.ProtocolError, match="more arrivals than the 32"):
        run(
            code.replace("arrive.shared.b64 _, [%r1];", "arrive.shared.b64 _, [%r1], 33;"),
            64,
            "eager",
            SHARED,
            64,
        )
    with pytest.raises(ptx.ProtocolError, match="never initialized"):
        run(code.replace("mbarrier.init.shared.b64 [%r1+8], 32;", ""), 64, "eager", SHARED, 64)


def test_named_barrier_deadlock_names_the_barrier():
    with pytest.raises(
        ptx.DeadlockError, match=r"warp 0 at #\d+: waits for named barrier 3 \(32 of 64"
    ):
        run("setp.ge.u32 %p0, %r0, 32; @%p0 ret; bar.sync 3, 64;", 64)


def test_distributed_shared_memory():
    """Each CTA of a pair writes into the other's shared memory, over the cluster barrier."""
    code = """
	mov.u32 %r1, s; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1;
	mapa.shared::cluster.u32 %r4, %r1, %r3;
	shl.b32 %r5, %r0, 2; add.u32 %r4, %r4, %r5; add.u32 %r6, %r1, %r5;
	mad.lo.u32 %r7, %r2, 1000, %r0;
	st.shared::cluster.b32 [%r4], %r7;
	barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
	ld.shared.b32 %r8, [%r6];
	mad.lo.u32 %r9, %r2, 128, %r5; cvt.u64.u32 %d2, %r9; add.s64 %d2, %d0, %d2;
	st.global.b32 [%d2], %r8;"""
    out = run(code, 32, "random-1", SHARED, 128, grid=(2, 1, 1), cluster=(2, 1, 1), words=64)
    np.testing.assert_array_equal(out, np.concatenate([1000 + np.arange(32), np.arange(32)]))
    broken = code.replace(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", ""
    )
    _, report = run(
        broken, 32, "eager", SHARED, 128, grid=(2, 1, 1), cluster=(2, 1, 1), words=64, check=False
    )
    assert report.findings


def test_matrix_moves():
    """stmatrix then ldmatrix gives the registers back; transposed on the way out, the transposed fragment."""
    code = """
	mov.u32 %r1, s; and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 4; add.u32 %r3, %r1, %r2;
	mul.lo.u32 %r4, %r0, 0x20002; add.u32 %r4, %r4, 0x10000; add.u32 %r5, %r4, 0x1000100;
	stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r4, %r5};
	ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r6, %r7}, [%r3];
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r8}, [%r3];
	setp.eq.u32 %p0, %r6, %r4; setp.eq.and.u32 %p0, %r7, %r5, %p0; selp.b32 %r9, %r8, 0xFFFFFFFF, %p0;
	st.global.b32 [%d1], %r9;"""
    out = run(code, 32, "eager", SHARED, 256).view(np.uint16).reshape(32, 2)
    matrix = np.zeros((8, 8), np.uint16)
    for lane in range(32):
        matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1] = (
            2 * lane,
            2 * lane + 1,
        )
    np.testing.assert_array_equal(out.reshape(8, 8), matrix.T)


def test_cp_async_is_late():
    """cp.async data is not there before its group is waited for, and using it without the wait is found."""
    code = """
	mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;
	st.global.b32 [%d1], %r0;
	cp.async.ca.shared.global [%r3], [%d1], 4;
	cp.async.commit_group;
	cp.async.wait_group 0;
	ld.shared.b32 %r4, [%r3]; add.u32 %r4, %r4, 7;
	st.global.b32 [%d1], %r4;"""
    np.testing.assert_array_equal(run(code, 32, "eager", SHARED, 128), np.arange(32) + 7)
    _, report = run(
        code.replace("cp.async.wait_group 0;", ""), 32, "eager", SHARED, 128, check=False
    )
    assert "uninitialized" in report.kinds()


def test_bulk_copies_without_a_tensor_map():
    """Global to shared on an mbarrier, shared to global in a bulk group; the store reads what a proxy fence let through."""
    code = """
	mov.u32 %r1, s; setp.ne.u32 %p0, %r0, 0;
	@%p0 bra A;
	mbarrier.init.shared.b64 [%r1], 1;
	fence.mbarrier_init.release.cluster;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
	cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+128], [%d0], 128, [%r1];
A:	bar.sync 0;
W:	mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @%p1 bra D; bra W;
D:	shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;
	ld.shared.b32 %r4, [%r3+128]; add.u32 %r4, %r4, %r0; st.shared.b32 [%r3+128], %r4;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	@%p0 bra E;
	cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1+128], 128;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
E:"""
    for policy in ("eager", "lazy", "random-4"):
        np.testing.assert_array_equal(run(code, 32, policy, SHARED, 512), np.arange(32))
    _, report = run(
        code.replace("fence.proxy.async.shared::cta;", ""), 32, "lazy", SHARED, 512, check=False
    )
    assert "proxy-fence" in report.kinds()


def test_global_bounds_and_unknown_instructions():
    with pytest.raises(ptx.OutOfBoundsError, match=r"out, 128 bytes from .*4 past its end"):
        run("st.global.b32 [%d1+4], %r0;")
    with pytest.raises(ptx.UnsupportedInstructionError, match=r"mma\.sync\.aligned"):
        run("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0}, {%r1}, {%r2}, {%f0};")
    with pytest.raises(ptx.UnsupportedInstructionError, match=r"ld\.global\.b32\.bogus|ld\.bogus"):
        run("ld.bogus.global.b32 %r1, [%d0];")
    with pytest.raises(ptx.PtxError, match=r"predicate %p5 was never written"):
        run("@%p5 add.u32 %r1, %r0, 1;")
    with pytest.raises(ValueError, match="policy='late'"):
        run("mov.b32 %r1, 0;", policy="late")


def test_atomics_on_both_memories():
    out = run("""
	mov.u32 %r1, s; mov.b32 %r2, 0; st.shared.b32 [%r1], %r2;
	atom.shared.add.u32 %r3, [%r1], 2;
	atom.global.max.u32 %r4, [%d0+8], %r0;
	red.global.add.u32 [%d0], 1;
	atom.global.cas.b32 %r5, [%d0+12], 0, 9;
	ld.shared.b32 %r6, [%r1]; st.global.b32 [%d0+4], %r6;""", shared=SHARED, shared_bytes=16)  # fmt: skip
    assert list(out[:4]) == [32, 64, 31, 9]
