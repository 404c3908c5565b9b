"""A compact FP4 attention tile in the CuTe DSL, to test the interpreter with: scores, P in tensor memory, P times V, one CTA.

128 queries, 128 keys, head dim 128. S = Q K^T in NVFP4 (kind mxf4nvf4, E4M3 scale per 16), P = exp2(S / 16) in MXFP4 (E8M0 scale per 32 keys,
rounded up), O = P V in MXFP4 (kind mxf4) with P as operand A out of tensor memory. Warps 0-3 do the softmax, one row per thread;
warp 4 copies and issues. Every protocol that the interpreter checks is here once: TMA with a transaction count,
commits, arrivals, proxy fences, scale copies.

Tensor memory columns: S 0-127, O 128-255, P 256-271, scales of Q 288, of K 296, of P 304, of V 308.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float4E2M1FN, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

TILE = (128, 128, 128)
FULL, SCORES, P_READY, OUT = range(4)
COLUMNS = {"S": 0, "O": 128, "P": 256, "SFQ": 288, "SFK": 296, "SFP": 304, "SFV": 308}
BYTES = 3 * 128 * 64


@cute.jit
def _copy_scales(tiled_mma, smem, tmem, kind):
    """One tcgen05.cp per 4 scales of K, smem [1 stage] to tensor memory."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), kind)
    compact_t, compact_s = cute.filter_zeros(tmem), cute.filter_zeros(smem)
    tiled = tcgen05.make_s2t_copy(atom, compact_t)
    thread = tiled.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(tiled, thread.partition_S(compact_s))
    cute.copy(tiled, source[(None, None, None, None, 0)], thread.partition_D(compact_t))


@cute.kernel
def kernel(
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    q_atom: cute.CopyAtom,
    q_map: cute.Tensor,
    k_atom: cute.CopyAtom,
    k_map: cute.Tensor,
    v_atom: cute.CopyAtom,
    v_map: cute.Tensor,
    q_layout: cute.ComposedLayout,
    k_layout: cute.ComposedLayout,
    p_layout: cute.ComposedLayout,
    v_layout: cute.ComposedLayout,
    sfq_layout: cute.Layout,
    sfk_layout: cute.Layout,
    sfp_layout: cute.Layout,
    sfv_layout: cute.Layout,
    sfq: cute.Tensor,
    sfk: cute.Tensor,
    sfv: cute.Tensor,
    out: cute.Tensor,
):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, 4]
        columns: Int32

    smem = SmemAllocator()
    storage = smem.allocate(Storage)
    bars = storage.barriers.data_ptr()
    sQ = smem.allocate_tensor(Float4E2M1FN, q_layout.outer, 1024, q_layout.inner)
    sK = smem.allocate_tensor(Float4E2M1FN, k_layout.outer, 1024, k_layout.inner)
    sV = smem.allocate_tensor(Float4E2M1FN, v_layout.outer, 1024, v_layout.inner)
    sSFQ = smem.allocate_tensor(Float8E4M3FN, sfq_layout, 128)
    sSFK = smem.allocate_tensor(Float8E4M3FN, sfk_layout, 128)
    sSFP = smem.allocate_tensor(Float8E8M0FNU, sfp_layout, 128)
    sSFV = smem.allocate_tensor(Float8E8M0FNU, sfv_layout, 128)

    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(bars + FULL, 1)
            cute.arch.mbarrier_init(bars + SCORES, 1)
            cute.arch.mbarrier_init(bars + P_READY, 128)
            cute.arch.mbarrier_init(bars + OUT, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(512, storage.columns.ptr)
    # The scale factors of Q, K and V lie in memory as the hardware wants them; ordinary stores bring them into shared memory.
    if tid < 128:
        for source, target in ((sfq, sSFQ), (sfk, sSFK), (sfv, sSFV)):
            words = cute.cosize(target.layout) // 4
            wide = cute.make_tensor(
                cute.recast_ptr(target.iterator, dtype=Int32), cute.make_layout(words)
            )
            for i in cutlass.range_constexpr(words // 128):
                wide[tid + 128 * i] = source[tid + 128 * i]
        cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.columns.ptr)

    shape = qk_mma.partition_shape_C(TILE[:2])
    tS = cute.make_tensor(base + COLUMNS["S"], qk_mma.make_fragment_C(shape).layout)
    tO = cute.make_tensor(base + COLUMNS["O"], pv_mma.make_fragment_C(shape).layout)

    if warp == 4:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars + FULL, BYTES)
        thr = qk_mma.get_slice(0)
        thr_pv = pv_mma.get_slice(0)
        for atom, tensor, s, part in (
            (q_atom, q_map, sQ, thr.partition_A),
            (k_atom, k_map, sK, thr.partition_B),
            (v_atom, v_map, sV, thr_pv.partition_B),
        ):
            g = part(cute.local_tile(tensor, (128, 128), (0, 0)))
            ts, tg = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
            )
            cute.copy(atom, tg, ts[(None, 0)], tma_bar_ptr=bars + FULL)
        cute.arch.mbarrier_wait(bars + FULL, 0)
        one = (None, None, None, 0)
        sfq_t = blockscaled.make_tmem_layout_sfa(qk_mma, TILE, 16, cute.slice_(sfq_layout, one))
        sfk_t = blockscaled.make_tmem_layout_sfb(qk_mma, TILE, 16, cute.slice_(sfk_layout, one))
        tSFQ = cute.make_tensor(cute.recast_ptr(base + COLUMNS["SFQ"], dtype=Float8E4M3FN), sfq_t)
        tSFK = cute.make_tensor(cute.recast_ptr(base + COLUMNS["SFK"], dtype=Float8E4M3FN), sfk_t)
        _copy_scales(qk_mma, sSFQ, tSFQ, Float8E4M3FN)
        _copy_scales(qk_mma, sSFK, tSFK, Float8E4M3FN)
        rQ, rK = qk_mma.make_fragment_A(sQ), qk_mma.make_fragment_B(sK)
        for k in cutlass.range_constexpr(cute.size(rQ, mode=[2])):
            qk_mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            qk_mma.set(tcgen05.Field.SFA, tSFQ[None, None, k].iterator)
            qk_mma.set(tcgen05.Field.SFB, tSFK[None, None, k].iterator)
            cute.gemm(qk_mma, tS, rQ[None, None, k, 0], rK[None, None, k, 0], tS)
        with cute.arch.elect_one():
            tcgen05.commit(bars + SCORES)
        cute.arch.mbarrier_wait(bars + P_READY, 0)
        sfp_t = blockscaled.make_tmem_layout_sfa(pv_mma, TILE, 32, cute.slice_(sfp_layout, one))
        sfv_t = blockscaled.make_tmem_layout_sfb(pv_mma, TILE, 32, cute.slice_(sfv_layout, one))
        tSFP = cute.make_tensor(cute.recast_ptr(base + COLUMNS["SFP"], dtype=Float8E8M0FNU), sfp_t)
        tSFV = cute.make_tensor(cute.recast_ptr(base + COLUMNS["SFV"], dtype=Float8E8M0FNU), sfv_t)
        _copy_scales(pv_mma, sSFP, tSFP, Float8E8M0FNU)
        _copy_scales(pv_mma, sSFV, tSFV, Float8E8M0FNU)
        fragment = pv_mma.make_fragment_A(pv_mma.partition_shape_A((TILE[0], TILE[2])))
        tP = cute.make_tensor(
            cute.recast_ptr(base + COLUMNS["P"], dtype=Float4E2M1FN), fragment.layout
        )
        rV = pv_mma.make_fragment_B(sV)
        for k in cutlass.range_constexpr(cute.size(rV, mode=[2])):
            pv_mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            pv_mma.set(tcgen05.Field.SFA, tSFP[None, None, k].iterator)
            pv_mma.set(tcgen05.Field.SFB, tSFV[None, None, k].iterator)
            cute.gemm(pv_mma, tO, tP[None, None, k], rV[None, None, k, 0], tO)
        with cute.arch.elect_one():
            tcgen05.commit(bars + OUT)

    if warp < 4:
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(32)), Float32)
        tile = tS[(None, None), 0, 0]
        tiled = tcgen05.make_tmem_copy(load, tile)
        thread = tiled.get_slice(tid)
        identity = cute.make_identity_tensor(TILE[:2])
        row = cute.make_rmem_tensor(thread.partition_D(identity).shape, Float32)
        cute.arch.mbarrier_wait(bars + SCORES, 0)
        cute.copy(tiled, thread.partition_S(tile), row)
        # P and its scale per 32 keys: the power of two at or above amax / 4, so that no code saturates.
        flat = cute.make_tensor(row.iterator, cute.make_layout(128))
        scaled = cute.make_rmem_tensor(cute.make_layout(128), Float32)
        codes = cute.make_rmem_tensor(cute.make_layout(4), Float8E8M0FNU)
        limits = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        for q in cutlass.range_constexpr(4):
            top = Float32(0.0)
            for i in cutlass.range_constexpr(32):
                p = cute.math.exp2(flat[32 * q + i] * 0.0625, fastmath=True)
                scaled[32 * q + i] = p
                top = cute.arch.fmax(top, p)
            limits[q] = top * 0.25
        codes.store(limits.load().to(Float8E8M0FNU))
        scales = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        scales.store(codes.load().to(Float32))
        packed = cute.make_rmem_tensor(cute.make_layout(128), Float4E2M1FN)
        for q in cutlass.range_constexpr(4):
            # The reciprocal of a power of two is exact.
            inverse = cute.arch.rcp_approx(scales[q])
            for i in cutlass.range_constexpr(32):
                scaled[32 * q + i] = scaled[32 * q + i] * inverse
        packed.store(scaled.load().to(Float4E2M1FN))
        words = cute.make_tensor(
            cute.recast_ptr(base + COLUMNS["P"], dtype=Float32),
            cute.make_layout((128, 16), stride=(65536, 1)),
        )
        store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(16)), Float32), words
        )
        mine = store.get_slice(tid)
        shape_w = mine.partition_S(cute.make_identity_tensor((128, 16))).shape
        cute.copy(
            store,
            cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=Float32), shape_w),
            mine.partition_D(words),
        )
        cute.arch.fence_view_async_tmem_store()
        for q in cutlass.range_constexpr(4):
            sSFP[((((tid % 32), (tid // 32)), 0), (0, q)), 0, 0, 0] = codes[q]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(bars + P_READY)
        cute.arch.mbarrier_wait(bars + OUT, 0)
        result = cute.make_rmem_tensor(thread.partition_D(identity).shape, Float32)
        cute.copy(tiled, thread.partition_S(tO[(None, None), 0, 0]), result)
        cute.autovec_copy(result, thread.partition_D(out))
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(base, 512)


@cute.jit
def attend(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    sfq: cute.Tensor,
    sfk: cute.Tensor,
    sfv: cute.Tensor,
    out: cute.Tensor,
    stream: cuda.CUstream,
):
    """q, k [128, 128] and v [head dim, keys], packed along the last axis; scale factors as int32 words in tcgen05 order."""
    major, group = OperandMajorMode.K, tcgen05.CtaGroup.ONE
    qk = sm100.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN, Float4E2M1FN, major, major, Float8E4M3FN, 16, group, TILE[:2]
    )
    pv = sm100.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN,
        Float4E2M1FN,
        major,
        major,
        Float8E8M0FNU,
        32,
        group,
        TILE[:2],
        tcgen05.OperandSource.TMEM,
    )
    layouts = [
        sm100.make_smem_layout_a(qk, TILE, Float4E2M1FN, 1),
        sm100.make_smem_layout_b(qk, TILE, Float4E2M1FN, 1),
    ]
    p_layout = sm100.make_smem_layout_a(pv, TILE, Float4E2M1FN, 1)
    v_layout = sm100.make_smem_layout_b(pv, TILE, Float4E2M1FN, 1)
    op, one = cpasync.CopyBulkTensorTileG2SOp(group), (None, None, None, 0)
    cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (qk.thr_id.shape,)).shape
    q_atom, q_map = cute.nvgpu.make_tiled_tma_atom_A(
        op, q, cute.slice_(layouts[0], one), TILE, qk, cluster
    )
    k_atom, k_map = cute.nvgpu.make_tiled_tma_atom_B(
        op, k, cute.slice_(layouts[1], one), TILE, qk, cluster
    )
    v_atom, v_map = cute.nvgpu.make_tiled_tma_atom_B(
        op, v, cute.slice_(v_layout, one), TILE, pv, cluster
    )
    kernel(
        qk, pv, q_atom, q_map, k_atom, k_map, v_atom, v_map,
        layouts[0], layouts[1], p_layout, v_layout,
        blockscaled.make_smem_layout_sfa(qk, TILE, 16, 1), blockscaled.make_smem_layout_sfb(qk, TILE, 16, 1),
        blockscaled.make_smem_layout_sfa(pv, TILE, 32, 1), blockscaled.make_smem_layout_sfb(pv, TILE, 32, 1),
        sfq, sfk, sfv, out,
    ).launch(grid=(1, 1, 1), block=(160, 1, 1), stream=stream)  # fmt: skip


def arguments():
    """Fake tensors to compile `attend` with."""
    packed = [
        make_fake_compact_tensor(Float4E2M1FN, (128, 128), stride_order=(1, 0), assumed_align=16)
        for _ in range(3)
    ]
    words = [make_fake_compact_tensor(Int32, (n,), assumed_align=16) for n in (256, 256, 128)]
    out = make_fake_compact_tensor(Float32, (128, 128), stride_order=(1, 0), assumed_align=16)
    return (*packed, *words, out, make_fake_stream())
