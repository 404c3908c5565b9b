"""Attention forward on sm_100a: four-bit Q and K; P and V in FP8 or, for Direct-P, in MXFP4.

A CTA takes work items one after the other (`schedule`): two tiles of 128 query rows ("stages") of one head, against their key
tiles. Roles, by warp:

    0-3, 4-7   softmax of stage 0 and 1: a thread owns a row; scores from tensor memory, P back into the same columns
    8-11       correction: sums L, rescales O where a row maximum rose; in the end normalizes and stores
    12         issues every tcgen05 instruction
    13         issues every TMA load
    14, 15     idle (registers are handed out by groups of four warps)

L, the row sum of the represented P, is a product too: P times columns of ones. The softmax warps never decode what they
rounded, and with V = 1 the output is exactly 1. Tensor memory: `config.Columns`. Order of the tensor core's work, with what
each step waits for, in docs/kernels_blackwell.md.

No role waits for another at the end of an item: key tiles are counted on through all items of a CTA (t: "steps"), and a ring's
buffer or a barrier's phase is one of the step, or of the number of the item (`turn`) for what happens once an item.

Letters: S query rows, T keys, H query heads, G kv heads, D head dim of Q and K, Dv of V.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync

from fp4mega.attention.policy import DirectP
from fp4mega.kernels.cute import instructions as op
from fp4mega.kernels.cute import places, softmax
from fp4mega.kernels.cute.config import (
    ATOM_COLUMNS,
    ITEM_BUFFERS,
    ONES,
    QUERY_STAGES,
    SCALE_ATOM,
    TILE_M,
    TILE_N,
    Columns,
    ForwardConfig,
)
from fp4mega.kernels.cute.descriptors import (
    Kind,
    Swizzle,
    instruction_descriptor,
    k_of,
    shared_descriptor,
)
from fp4mega.kernels.cute.places import Limits, Place, Shape, Work
from fp4mega.kernels.cute.storage import HALVES, barriers, shared_storage

THREADS = 512
CORRECTION, MMA_WARP, LOAD_WARP = 8, 12, 13
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, OTHER_REGISTERS = 184, 80, 64
LN2 = math.log(2.0)
_LN2_HIGH = 355.0 / 512.0
_LN2_LOW = LN2 - _LN2_HIGH
_E4M3_ONE, _E2M1_ONES, _E8M0_ONE = 0x38, 0x22, 0x7F
_WIDE_K = 64
_UNIT = 16
"""Bytes that addresses in matrix descriptors count in."""
_ATOM_UNITS = SCALE_ATOM // _UNIT
_LEAST_SCALE = 2.0**-126
_PAST_ALL_KEYS = 1 << 30


class AttentionForward:
    """Host function and kernel of one `ForwardConfig`."""

    def __init__(self, config: ForwardConfig) -> None:
        self.config = config
        self.columns = Columns(config)
        self.storage = shared_storage(config)

    @property
    def rule(self) -> DirectP:
        """The score map of a Direct-P kernel."""
        rule = self.config.direct_p
        assert rule is not None
        return rule

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        q_scales: cute.Pointer,
        q_global: cute.Pointer,
        k: cute.Pointer,
        k_scales: cute.Pointer,
        k_global: cute.Pointer,
        v: cute.Pointer,
        v_scales: cute.Pointer,
        lengths_q: cute.Pointer,
        lengths_k: cute.Pointer,
        order: cute.Pointer,
        hidden: cute.Pointer,
        sink: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        statistics: cute.Pointer,
        batch: Int32,
        rows: Int32,
        keys: Int32,
        heads: Int32,
        kv_heads: Int32,
        bottom_right: Int32,
        left: Int32,
        right: Int32,
        ctas: Int32,
        scale_log2: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        q: uint8 [B, S, H, D / 2], two E2M1 codes a byte. q_scales: [B, H, ceil(S / 128), atoms, 512] bytes in tensor-core order.
        q_global: float32 [B, H] that values are divided by (NVFP4). k, k_scales, k_global: the same over [B, T, G].
        v: E4M3 [B, T, G, Dv] with v_scales float32 [B, G] that values are divided by; for Direct-P E2M1
        [B, G, Dv, ceil(T / 128) * 64] with keys packed, and v_scales [B, G, ceil(T / 128), 512] bytes.
        lengths_q, lengths_k: int32 [B], and order of `schedule.packed_order`, with `lengths`. hidden: int32 [B, ceil(T / 128), 4], a bit a key, with `hidden`. sink: float32 [H] with `sink`, natural-log units.
        out: BF16 [B, S, H, Dv]; lse: float32 [B, H, S]; statistics: float32 [2, B, H, S], m and L.
        bottom_right: 1 if the diagonal of row 0 is key T - S, else 0. left, right: of the window, with `left`, `right`.
        ctas: of the grid, if there are as many work items; multiprocessors of the device. scale_log2: softmax scale * log2(e).
        """
        config = self.config
        shape = Shape(batch, rows, keys, heads, kv_heads)
        maps = [
            self._row_map(q, rows, heads, batch, config.row_bytes, config.chunk_bytes),
            self._scale_map(q_scales, rows, heads, batch, config.scale_atoms),
            self._row_map(k, keys, kv_heads, batch, config.row_bytes, config.chunk_bytes),
            self._scale_map(k_scales, keys, kv_heads, batch, config.scale_atoms),
        ]
        if cutlass.const_expr(config.direct_p is None):
            maps.append(self._row_map(v, keys, kv_heads, batch, config.dim_v, config.dim_v))
            # Not used: a kernel has one signature.
            maps.append(self._scale_map(k_scales, keys, kv_heads, batch, 1))
        else:
            maps.append(self._transposed_map(v, keys, kv_heads, batch))
            maps.append(self._scale_map(v_scales, keys, kv_heads, batch, 1))
        atoms = tuple(m.atom for m in maps)
        tensors = tuple(m.tma_tensor for m in maps)
        work = Work(shape, lengths_q, lengths_k, order, bottom_right, left, right)
        self.kernel(
            atoms, tensors, (q_global, k_global, v_scales), (hidden, sink), (out, lse, statistics), work, scale_log2,
        ).launch(
            grid=(cutlass.min(ctas, places.items(shape)), 1, 1),
            block=(THREADS, 1, 1),
            smem=self.storage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _row_map(
        self,
        pointer: cute.Pointer,
        rows: Int32,
        heads: Int32,
        batch: Int32,
        width: int,
        box: int,
    ) -> cpasync.TmaInfo:
        """TMA over [B, rows, heads, width bytes]: boxes of 128 rows of one head and `box` bytes, swizzled over all of these."""
        row = cute.assume(Int64(heads) * width, divby=width)
        entry = cute.assume(Int64(rows) * row, divby=width)
        layout = cute.make_layout((rows, width, heads, batch), stride=(row, 1, width, entry))
        return self._box_map(pointer, layout, TILE_N, box)

    def _transposed_map(
        self, pointer: cute.Pointer, keys: Int32, heads: Int32, batch: Int32
    ) -> cpasync.TmaInfo:
        """TMA over [B, heads, Dv, packed keys]: boxes of all Dv rows and 128 keys."""
        width, dim_v = TILE_N // 2, self.config.dim_v
        row = cute.assume(Int64(cute.ceil_div(keys, TILE_N)) * width, divby=width)
        head = cute.assume(row * dim_v, divby=width)
        entry = cute.assume(Int64(heads) * head, divby=width)
        layout = cute.make_layout((dim_v, row, heads, batch), stride=(row, 1, head, entry))
        return self._box_map(pointer, layout, dim_v, width)

    def _box_map(
        self, pointer: cute.Pointer, layout: cute.Layout, rows: int, width: int
    ) -> cpasync.TmaInfo:
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(pointer, layout),
            self._box_layout(rows, width),
            (rows, width),
        )

    @staticmethod
    def _box_layout(rows: int, width: int) -> cute.ComposedLayout:
        bits = {32: 1, 64: 2, 128: 3}[width]
        return cute.make_composed_layout(
            cute.make_swizzle(bits, 4, 3), 0, cute.make_layout((rows, width), stride=(width, 1))
        )

    def _scale_map(
        self, pointer: cute.Pointer, rows: Int32, heads: Int32, batch: Int32, atoms: int
    ) -> cpasync.TmaInfo:
        """TMA over [B, heads, tiles, words of one tile's scales]."""
        words = atoms * SCALE_ATOM // 4
        tiles = cute.ceil_div(rows, TILE_N)
        head = cute.assume(Int64(tiles) * words, divby=words)
        entry = cute.assume(Int64(heads) * head, divby=words)
        layout = cute.make_layout((words, tiles, heads, batch), stride=(1, words, head, entry))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), layout),
            cute.make_layout((words, 1)),
            (words, 1),
        )

    @cute.kernel
    def kernel(
        self,
        atoms: Any,
        tensors: Any,
        scalars: Any,
        beside: Any,
        results: Any,
        work: Work,
        scale_log2: Float32,
    ) -> None:
        """One CTA: its work items, one after the other in every role."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        storage = smem.allocate(self.storage)
        if warp == LOAD_WARP:
            self._init_barriers(storage)
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(self.columns.allocated, storage.tensor_memory)
        if warp == CORRECTION:
            self._fill_constants(storage, thread % 32)
        op.fence_before_sync()
        cute.arch.sync_threads()
        op.fence_after_sync()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_memory)
        q_global, k_global, v_scales = scalars
        hidden, sink = beside

        # Every role works out its items for itself: carried over the branches, they would be spilled.
        if warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == LOAD_WARP:
                self._load(storage, atoms, tensors, work)
            if warp == MMA_WARP:
                self._multiply(storage, base, work)
        if warp < CORRECTION:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            stage = cute.arch.make_warp_uniform(thread // TILE_M)
            scales = (scale_log2, q_global, k_global)
            self._softmax(storage, base, thread % TILE_M, stage, work, hidden, sink, scales)
        if warp >= CORRECTION and warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(CORRECTION_REGISTERS)
            self._correct(storage, base, thread % TILE_M, work, v_scales, sink, results)
        op.fence_before_sync()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            op.fence_after_sync()
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(base, self.columns.allocated)

    @cute.jit
    def _init_barriers(self, storage: Any) -> None:
        with cute.arch.elect_one():
            for name, count, arrivals in cutlass.const_expr(barriers(self.config)):
                for i in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(getattr(storage, name).data_ptr() + i, arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def _fill_constants(self, storage: Any, lane: Int32) -> None:
        """Ones for L, in the element format of P's partner, and for MXFP4 their block scale 1."""
        words = SCALE_ATOM // 4
        four_bit = cutlass.const_expr(self.config.direct_p is not None)
        ones = storage.ones.get_tensor(cute.make_layout(words))
        scale = storage.one_scale.get_tensor(cute.make_layout(words))
        for i in cutlass.range_constexpr(words // 32):
            ones[i * 32 + lane] = Int32((_E2M1_ONES if four_bit else _E4M3_ONE) * 0x01010101)
            scale[i * 32 + lane] = Int32(_E8M0_ONE * 0x01010101)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def _load(self, storage: Any, atoms: Any, tensors: Any, work: Work) -> None:
        """As far ahead as buffers are free, so that an item's first loads run during the item before."""
        config = self.config
        turns = places.turns(work.shape)
        done = Int32(0)
        for turn in cutlass.range(turns, unroll=1):
            place, _ = places.place(config, turn, work)
            self._load_item(storage, atoms, tensors, place, turn, done)
            done = done + place.count
        # Every arrival that the tensor core still owes this CTA's barriers must have come before its memory goes away.
        for i in cutlass.range_constexpr(ITEM_BUFFERS):
            self._wait_for_buffer(storage.q_empty, turns + i, ITEM_BUFFERS)
        for i in cutlass.range_constexpr(config.stages):
            self._wait_for_buffer(storage.k_empty, done + i, config.stages)
            self._wait_for_buffer(storage.v_empty, done + i, config.stages)

    @cute.jit
    def _wait_for_buffer(self, empty: Any, use: Int32, buffers: cutlass.Constexpr) -> None:
        """Until a ring's buffer may be filled for the `use`-th time of the ring; at once the first time."""
        buffer, parity = op.ring(use, buffers)
        cute.arch.mbarrier_wait(empty.data_ptr() + buffer, parity ^ 1)

    @cute.jit
    def _load_item(
        self,
        storage: Any,
        atoms: Any,
        tensors: Any,
        place: Place,
        turn: Int32,
        done: Int32,
    ) -> None:
        """Both Q tiles into one of the two buffers for them, then K and V of every key tile through rings of `stages` buffers."""
        config = self.config
        scale_bytes = config.scale_atoms * SCALE_ATOM
        words = scale_bytes // 4
        q, q_scales, k, k_scales, v, v_scales = (
            self._views(
                atoms[i], tensors[i][None, None, head, place.entry], buffer.data_ptr(), box, count
            )
            for i, head, buffer, box, count in (
                (
                    0,
                    place.head,
                    storage.q,
                    (TILE_M, config.chunk_bytes),
                    ITEM_BUFFERS * QUERY_STAGES * config.chunks,
                ),
                (1, place.head, storage.q_scales, (words, 1), ITEM_BUFFERS * QUERY_STAGES),
                (
                    2,
                    place.group,
                    storage.k,
                    (TILE_N, config.chunk_bytes),
                    config.stages * config.chunks,
                ),
                (3, place.group, storage.k_scales, (words, 1), config.stages),
                (4, place.group, storage.v, (config.v_rows, config.v_row_bytes), config.stages),
                (5, place.group, storage.v_scales, (SCALE_ATOM // 4, 1), config.stages),
            )
        )
        self._wait_for_buffer(storage.q_empty, turn, ITEM_BUFFERS)
        pair, _ = op.ring(turn, ITEM_BUFFERS)
        for i in cutlass.range_constexpr(QUERY_STAGES):
            buffer = pair * QUERY_STAGES + i
            full = storage.q_full.data_ptr() + buffer
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    full, TILE_M * config.row_bytes + scale_bytes
                )
            tile = place.tile * QUERY_STAGES + i
            for c in cutlass.range_constexpr(config.chunks):
                target = q[1][None, buffer * config.chunks + c]
                cute.copy(atoms[0], q[0][None, tile, c], target, tma_bar_ptr=full)
            cute.copy(
                atoms[1], q_scales[0][None, 0, tile], q_scales[1][None, buffer], tma_bar_ptr=full
            )
        for j in cutlass.range(place.count, unroll=1):
            t = done + j
            stage, _ = op.ring(t, config.stages)
            tile = place.first + j
            full = storage.k_full.data_ptr() + stage
            self._wait_for_buffer(storage.k_empty, t, config.stages)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    full, TILE_N * config.row_bytes + scale_bytes
                )
            for c in cutlass.range_constexpr(config.chunks):
                target = k[1][None, stage * config.chunks + c]
                cute.copy(atoms[2], k[0][None, tile, c], target, tma_bar_ptr=full)
            cute.copy(
                atoms[3], k_scales[0][None, 0, tile], k_scales[1][None, stage], tma_bar_ptr=full
            )
            full = storage.v_full.data_ptr() + stage
            self._wait_for_buffer(storage.v_empty, t, config.stages)
            if cutlass.const_expr(config.direct_p is None):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.v_bytes)
                cute.copy(atoms[4], v[0][None, tile, 0], v[1][None, stage], tma_bar_ptr=full)
            else:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.v_bytes + SCALE_ATOM)
                cute.copy(atoms[4], v[0][None, 0, tile], v[1][None, stage], tma_bar_ptr=full)
                cute.copy(
                    atoms[5], v_scales[0][None, 0, tile], v_scales[1][None, stage], tma_bar_ptr=full
                )

    def _views(
        self, atom: Any, tensor: Any, buffers: Any, box: tuple[int, int], stages: int
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """One head's boxes in global memory [box, tile row, tile column] and their ring of buffers [box, stage]."""
        rows, width = box
        if width > 1:
            swizzle = self._box_layout(rows, width).inner
            ring = cute.make_tensor(
                cute.recast_ptr(buffers, swizzle, Uint8),
                cute.make_layout((rows, width, stages), stride=(width, 1, rows * width)),
            )
        else:
            ring = cute.make_tensor(
                buffers, cute.make_layout((rows, width, stages), stride=(1, 0, rows))
            )
        tiles = cute.local_tile(tensor, box, (None, None))
        shared, memory = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return memory, shared

    @cute.jit
    def _multiply(self, storage: Any, base: cute.Pointer, work: Work) -> None:
        """The tensor core's program: for either query tile in turn, P V of step t, then the scores of step t + 1.

        Behind the last key tile of an item these are scores of the next, so the tensor core does not stop between items.
        """
        tensor = base.toint()
        turns = places.turns(work.shape)
        for i in cutlass.range_constexpr(QUERY_STAGES):
            cute.arch.mbarrier_wait(storage.q_full.data_ptr() + i, 0)
            if cutlass.const_expr(i == 0):
                cute.arch.mbarrier_wait(storage.k_full.data_ptr(), 0)
            else:
                cute.arch.mbarrier_wait(storage.s_read.data_ptr(), 0)
            op.fence_after_sync()
            self._scores(storage, tensor, i, Int32(0), Int32(0))
        done, buffer, phase = Int32(0), Int32(0), Int32(0)
        for turn in cutlass.range(turns, unroll=1):
            place, _ = places.place(self.config, turn, work)
            for j in cutlass.range(place.count, unroll=1):
                # Carried along: a division by three would stand in front of every product.
                wraps = buffer == self.config.stages - 1
                ahead = op.select(wraps, Int32(0), buffer + 1), phase ^ Int32(wraps)
                last = j + 1 == place.count
                self._step(
                    storage, tensor, turn, j, done + j, (buffer, phase), ahead, last,
                    turn + 1 == turns,
                )  # fmt: skip
                buffer, phase = ahead
            done = done + place.count

    @cute.jit
    def _step(
        self,
        storage: Any,
        tensor: Int32,
        turn: Int32,
        j: Int32,
        t: Int32,
        here: Any,
        ahead: Any,
        last: cutlass.Boolean,
        last_item: cutlass.Boolean,
    ) -> None:
        """P V of key tile j of an item, and the scores that follow; `here`, `ahead`: buffer and parity of either in the rings."""
        # Buffer of Q for the scores that follow.
        queries = op.ring(turn, ITEM_BUFFERS)[0] ^ Int32(last)
        more = not (last and last_item)
        cute.arch.mbarrier_wait(storage.v_full.data_ptr() + here[0], here[1])
        for i in cutlass.range_constexpr(QUERY_STAGES):
            self._weighted_values(storage, tensor, i, turn, j, t, here[0], last, more)
            # Row sums of the other query tile lie in this tile's columns, and the next of them will: read before either.
            if cutlass.const_expr(i == 0):
                cute.arch.mbarrier_wait(storage.total_read.data_ptr() + 1, op.parity(t))
            if more:
                if cutlass.const_expr(i == 0):
                    cute.arch.mbarrier_wait(storage.k_full.data_ptr() + ahead[0], ahead[1])
                else:
                    cute.arch.mbarrier_wait(storage.total_read.data_ptr(), op.parity(t))
                if last:
                    _, phase = op.ring(turn + 1, ITEM_BUFFERS)
                    full = storage.q_full.data_ptr() + (queries * QUERY_STAGES + i)
                    cute.arch.mbarrier_wait(full, phase)
                op.fence_after_sync()
                self._scores(storage, tensor, i, queries, ahead[0])

    @cute.jit
    def _scores(
        self, storage: Any, tensor: Int32, i: cutlass.Constexpr, queries: Int32, stage: Int32
    ) -> None:
        """S_i = Q_i K^T, with Q in buffer `queries` and K in `stage`. The scales lie in the other query tile's retired columns, copied in front of every product."""
        config, columns = self.config, self.columns
        query = queries * QUERY_STAGES + i
        width = config.chunk_bytes
        swizzle = Swizzle.B64 if width == 64 else Swizzle.B32
        rows = shared_descriptor(swizzle, leading=16, stride=8 * width)
        descriptor = instruction_descriptor(
            config.kind, TILE_M, TILE_N, e8m0_scales=not config.nvfp4
        )
        atoms = config.scale_atoms
        q = self._units(storage.q, query, TILE_M * config.row_bytes)
        k = self._units(storage.k, stage, TILE_N * config.row_bytes)
        q_scales = self._units(storage.q_scales, query, atoms * SCALE_ATOM)
        k_scales = self._units(storage.k_scales, stage, atoms * SCALE_ATOM)
        other = tensor + (1 - i) * TILE_N
        step = k_of(config.kind)
        with cute.arch.elect_one():
            for a in cutlass.range_constexpr(atoms):
                op.copy_scales(
                    other + columns.q_scale + ATOM_COLUMNS * a,
                    self._atom(q_scales + a * _ATOM_UNITS),
                )
                op.copy_scales(
                    other + columns.k_scale + ATOM_COLUMNS * a,
                    self._atom(k_scales + a * _ATOM_UNITS),
                )
            for n in cutlass.range_constexpr(config.dim // step):
                # NVFP4 takes four scales a step, a whole atom; MXFP4 two, so every other step starts in the middle of one.
                atom, byte = divmod(n * step // config.block, 4)
                chunk, within = divmod(n * step // 2, width)
                offset = (chunk * TILE_N * width + within) // _UNIT
                op.mma_block_scaled(
                    config.kind,
                    tensor + i * TILE_N,
                    op.matrix_at(rows, q + offset),
                    op.matrix_at(rows, k + offset),
                    op.with_scale_bytes(descriptor, byte, byte),
                    op.scale_address(other + columns.q_scale + ATOM_COLUMNS * atom, byte),
                    op.scale_address(other + columns.k_scale + ATOM_COLUMNS * atom, byte),
                    Int32(n != 0),
                )
            op.commit(storage.s_full.data_ptr() + i)
            if cutlass.const_expr(i == QUERY_STAGES - 1):
                op.commit(storage.k_empty.data_ptr() + stage)

    @staticmethod
    def _units(member: Any, buffer: Int32, size: int) -> Int32:
        """Address of one of several buffers of `size` bytes, as matrix descriptors have it."""
        return (member.data_ptr().toint() >> 4) + buffer * (size // _UNIT)

    @staticmethod
    def _atom(address: Int32) -> Int64:
        """512 bytes as 32 rows of 16: eight-row groups 128 bytes apart."""
        return op.matrix_at(shared_descriptor(Swizzle.NONE, leading=16, stride=128), address)

    @cute.jit
    def _weighted_values(
        self,
        storage: Any,
        tensor: Int32,
        i: cutlass.Constexpr,
        turn: Int32,
        j: Int32,
        t: Int32,
        stage: Int32,
        last: cutlass.Boolean,
        more: cutlass.Boolean,
    ) -> None:
        """O_i (+)= P_i(t) V(t), half by half as P is published, and the row sums of P_i(t) into the other tile's columns."""
        config = self.config
        # O is rescaled; behind the first key tile of an item, the output of the item before is in registers.
        if cutlass.const_expr(config.direct_p is None):
            cute.arch.mbarrier_wait(storage.o_ready.data_ptr() + i, op.parity(t))
        else:
            if j == 0:
                cute.arch.mbarrier_wait(storage.o_ready.data_ptr() + i, op.parity(turn))
        for half in cutlass.range_constexpr(HALVES):
            cute.arch.mbarrier_wait(storage.p_full.data_ptr() + (i * HALVES + half), op.parity(t))
            op.fence_after_sync()
            with cute.arch.elect_one():
                self._half_product(storage, tensor, i, j, stage, half)
        # Scores of the other query tile must be in registers before the sums go where they were.
        if cutlass.const_expr(i == 0):
            cute.arch.mbarrier_wait(storage.s_read.data_ptr() + 1, op.parity(t))
        else:
            if more:
                cute.arch.mbarrier_wait(storage.s_read.data_ptr(), op.parity(t + 1))
        op.fence_after_sync()
        with cute.arch.elect_one():
            self._row_sums(storage, tensor, i)
            op.commit(storage.o_full.data_ptr() + i)
            if cutlass.const_expr(i == QUERY_STAGES - 1):
                op.commit(storage.v_empty.data_ptr() + stage)
                if last:
                    op.commit(storage.q_empty.data_ptr() + op.ring(turn, ITEM_BUFFERS)[0])

    def _half_product(
        self, storage: Any, tensor: Int32, i: int, j: Int32, stage: Int32, half: int
    ) -> None:
        config, columns = self.config, self.columns
        own = tensor + i * TILE_N
        out = tensor + columns.out[i]
        v = self._units(storage.v, stage, config.v_bytes)
        first = Int32(j > 0) if half == 0 else Int32(1)
        if config.direct_p is None:
            # V lies as keys x dim: the reduced axis is the slow one, in groups of eight keys.
            swizzle = Swizzle.B128 if config.dim_v == 128 else Swizzle.B64
            rows = shared_descriptor(swizzle, leading=0, stride=8 * config.dim_v)
            descriptor = instruction_descriptor(
                Kind.F8F6F4, TILE_M, config.dim_v, b_rows_along_n=True
            )
            step = k_of(Kind.F8F6F4)
            for n in range(_WIDE_K // step):
                key = half * _WIDE_K + n * step
                op.mma(
                    Kind.F8F6F4, out, own + columns.p + key // 4,
                    op.matrix_at(rows, v + key * config.dim_v // _UNIT), descriptor,
                    first if n == 0 else Int32(1),
                )  # fmt: skip
            return
        scales = self._units(storage.p_scales, Int32(i * HALVES + half), SCALE_ATOM)
        p_scale = own + columns.p_scale + half * ATOM_COLUMNS
        op.copy_scales(p_scale, self._atom(scales))
        if half == 0:
            v_scales = self._units(storage.v_scales, stage, SCALE_ATOM)
            op.copy_scales(own + columns.v_scale, self._atom(v_scales))
            one_scale = self._units(storage.one_scale, Int32(0), SCALE_ATOM)
            op.copy_scales(own + columns.one_scale, self._atom(one_scale))
        rows = shared_descriptor(Swizzle.B64, leading=16, stride=8 * config.v_row_bytes)
        descriptor = instruction_descriptor(Kind.MXF4, TILE_M, config.dim_v, e8m0_scales=True)
        byte = 2 * half
        op.mma_block_scaled(
            Kind.MXF4, out, own + columns.p + half * _WIDE_K // 8,
            op.matrix_at(rows, v + half * _WIDE_K // 2 // _UNIT), op.with_scale_bytes(descriptor, 0, byte),
            p_scale, op.scale_address(own + columns.v_scale, byte), first,
        )  # fmt: skip

    def _row_sums(self, storage: Any, tensor: Int32, i: int) -> None:
        config, columns = self.config, self.columns
        own, total = tensor + i * TILE_N, tensor + (1 - i) * TILE_N + columns.total
        ones = op.matrix_at(
            shared_descriptor(Swizzle.NONE, leading=128, stride=256),
            self._units(storage.ones, Int32(0), SCALE_ATOM),
        )
        if config.direct_p is None:
            step = k_of(Kind.F8F6F4)
            descriptor = instruction_descriptor(Kind.F8F6F4, TILE_M, ONES)
            for n in range(TILE_N // step):
                op.mma(
                    Kind.F8F6F4, total, own + columns.p + n * step // 4, ones, descriptor,
                    Int32(n != 0),
                )  # fmt: skip
            return
        descriptor = instruction_descriptor(Kind.MXF4, TILE_M, ONES, e8m0_scales=True)
        for half in range(HALVES):
            op.mma_block_scaled(
                Kind.MXF4, total, own + columns.p + half * _WIDE_K // 8, ones, descriptor,
                own + columns.p_scale + half * ATOM_COLUMNS, own + columns.one_scale,
                Int32(half != 0),
            )  # fmt: skip

    @cute.jit
    def _arrive(self, barrier: cute.Pointer) -> None:
        """One arrival for the warp, after all its threads are through."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _softmax(
        self,
        storage: Any,
        base: cute.Pointer,
        thread: Int32,
        stage: Int32,
        work: Work,
        hidden: cute.Pointer,
        sink: cute.Pointer,
        scales: Any,
    ) -> None:
        """Scores into P, item by item; both query tiles run this code, `stage` says which."""
        shape = work.shape
        scale_log2, q_global, k_global = scales
        done = Int32(0)
        for turn in cutlass.range(places.turns(shape), unroll=1):
            place, limits = places.place(self.config, turn, work)
            scale = scale_log2
            if cutlass.const_expr(self.config.nvfp4):
                # Divided one after the other: the product of the two globals may leave float32.
                scale = scale / op.vector(q_global)[place.entry * shape.heads + place.head]
                scale = scale / op.vector(k_global)[place.entry * shape.kv_heads + place.group]
            # Not 0 for operands so small that it underflows: a masked score is -inf, and -inf * 0 is NaN.
            scale = cute.arch.fmax(scale, _LEAST_SCALE, nan=True)
            self._softmax_item(
                storage, base, thread, stage, place, limits, hidden, sink, scale, turn, done
            )
            done = done + place.count

    @cute.jit
    def _softmax_item(
        self,
        storage: Any,
        base: cute.Pointer,
        thread: Int32,
        stage: Int32,
        place: Place,
        limits: Limits,
        hidden: cute.Pointer,
        sink: cute.Pointer,
        scale: Float32,
        turn: Int32,
        done: Int32,
    ) -> None:
        """One row a thread, key tile by key tile."""
        config, columns = self.config, self.columns
        first_row = (place.tile * QUERY_STAGES + stage) * TILE_M
        low, high = places.visible(config, first_row + thread, limits)
        masked_from, masked_below = places.all_visible(config, first_row, limits)
        own = base + stage * TILE_N
        top, exact = -Float32.inf, Float32(0.0)
        if cutlass.const_expr(config.direct_p is not None):
            top = Float32(0.0)
        elif cutlass.const_expr(config.sink):
            top = op.ceil(op.vector(sink)[place.head] * (1 / LN2))
        for j in cutlass.range(place.count, unroll=1):
            if cutlass.const_expr(config.hidden):
                bits = self._hidden_bits(hidden, place, limits, j)
            cute.arch.mbarrier_wait(storage.s_full.data_ptr() + stage, op.parity(done + j))
            op.fence_after_sync()
            scores = cute.make_rmem_tensor(TILE_N, Float32)
            for part in cutlass.range_constexpr(TILE_N // 32):
                loaded = op.load_columns(own, 32 * part, 32, thread)
                for c in cutlass.range_constexpr(32):
                    scores[32 * part + c] = loaded[c]
            cute.arch.fence_view_async_tmem_load()
            op.fence_before_sync()
            self._arrive(storage.s_read.data_ptr() + stage)
            key = (place.first + j) * TILE_N
            if cutlass.const_expr(config.direct_p is None and not config.exact_total):
                if key + TILE_N > masked_from or key < masked_below:
                    self._mask(scores, low - key, high - key)
            else:
                # One pass or none, but in a loop: here ptxas would turn an `if` into predicated instructions, which every tile
                # issues, and move arithmetic in front of the arrival. This step is past any number of keys.
                unseen = cutlass.max(key + TILE_N - masked_from, masked_below - key)
                for _ in cutlass.range(0, unseen, _PAST_ALL_KEYS, unroll=1):
                    self._mask(scores, low - key, high - key)
            if cutlass.const_expr(config.hidden):
                self._hide(scores, bits)
            if cutlass.const_expr(config.direct_p is None):
                before = top
                largest = softmax.row_maximum(scores, 0, TILE_N)
                top = softmax.raise_maximum(top, largest * scale)
                reference = softmax.finite(top)
                rise = storage.rise.get_tensor(cute.make_layout(QUERY_STAGES * TILE_M))
                factor = cute.math.exp2(before - reference, fastmath=True)
                rise[stage * TILE_M + thread] = factor
                self._arrive(storage.rise_full.data_ptr() + stage)
                shift = config.p_exponent - reference
                exact = exact * factor
                for half in cutlass.range_constexpr(HALVES):
                    codes, total = softmax.e4m3_codes(
                        scores, half * _WIDE_K, _WIDE_K, scale, shift, config.polynomial_of_8
                    )
                    if cutlass.const_expr(config.exact_total):
                        exact = exact + total
                    width = _WIDE_K // 4
                    op.store_columns(codes, own, columns.p + half * width, width, thread)
                    cute.arch.fence_view_async_tmem_store()
                    op.fence_before_sync()
                    self._arrive(storage.p_full.data_ptr() + (stage * HALVES + half))
            else:
                if cutlass.const_expr(self.rule.reference == "sampled"):
                    top = self._sampled(scores, scale, j, top)
                for half in cutlass.range_constexpr(HALVES):
                    self._publish_direct_p(storage, own, thread, stage, half, scores, scale, top)
        result = op.ring(turn, ITEM_BUFFERS)[0] * QUERY_STAGES + stage
        self._per_row(storage.top)[result * TILE_M + thread] = top
        if cutlass.const_expr(config.exact_total):
            self._per_row(storage.total)[result * TILE_M + thread] = exact
        self._arrive(storage.top_full.data_ptr() + result)

    @staticmethod
    def _per_row(member: Any) -> cute.Tensor:
        """A number for every row of both query tiles, for this item and the next."""
        return member.get_tensor(cute.make_layout(ITEM_BUFFERS * QUERY_STAGES * TILE_M))

    @cute.jit
    def _sampled(self, scores: cute.Tensor, scale: Float32, j: Int32, top: Float32) -> Float32:
        """Direct-P's row reference: the largest of the sampled keys, which come first; as it is after the first tile."""
        if j == 0:
            largest = softmax.row_maximum(scores, 0, min(self.rule.samples, TILE_N))
            top = softmax.finite(largest * scale) + self.rule.headroom
        return top

    def _hidden_bits(
        self, hidden: cute.Pointer, place: Place, limits: Limits, j: Int32
    ) -> cute.Tensor:
        """The four words of a key tile. A tile past the last, of rows that see nothing, has none: any will do."""
        tiles = cute.ceil_div(limits.keys, TILE_N)
        tile = cutlass.min(place.first + j, tiles - 1)
        words = cute.make_rmem_tensor(TILE_N // 32, Int32)
        source = hidden + (Int64(place.entry) * tiles + tile) * (TILE_N // 32)
        cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(TILE_N // 32)), words)
        return words

    @cute.jit
    def _hide(self, scores: cute.Tensor, bits: cute.Tensor) -> None:
        """-inf to the scores of hidden keys."""
        for part in cutlass.range_constexpr(TILE_N // 32):
            for i in cutlass.range_constexpr(32):
                c = 32 * part + i
                hidden = (bits[part] & op.signed(1 << i)) != 0
                scores[c] = -Float32.inf if hidden else scores[c]

    @cute.jit
    def _mask(self, scores: cute.Tensor, low: Int32, high: Int32) -> None:
        """-inf to all scores but scores[low:high]."""
        for part in cutlass.range_constexpr(TILE_N // 32):
            for i in cutlass.range_constexpr(32):
                c = 32 * part + i
                seen = c < high
                if cutlass.const_expr(self.config.left):
                    seen = seen and c >= low
                scores[c] = scores[c] if seen else -Float32.inf

    @cute.jit
    def _publish_direct_p(
        self,
        storage: Any,
        own: cute.Pointer,
        thread: Int32,
        stage: Int32,
        half: cutlass.Constexpr,
        scores: cute.Tensor,
        scale: Float32,
        reference: Float32,
    ) -> None:
        """Two blocks of 32 keys: codes to tensor memory, the two scale bytes to shared memory in tensor-core order."""
        columns = self.columns
        width = _WIDE_K // 8
        codes = cute.make_rmem_tensor(width, Int32)
        scales = Int32(0)
        for block in cutlass.range_constexpr(2):
            words, byte = softmax.direct_p_block(
                scores,
                half * _WIDE_K + block * softmax.MX_BLOCK,
                scale,
                reference,
                self.rule,
            )
            for w in cutlass.range_constexpr(4):
                codes[4 * block + w] = words[w]
            scales = scales | (byte << (8 * block))
        op.store_columns(codes, own, columns.p + half * width, width, thread)
        atom = storage.p_scales.get_tensor(
            cute.make_layout(QUERY_STAGES * HALVES * SCALE_ATOM // 4)
        )
        place = (stage * HALVES + half) * (SCALE_ATOM // 4)
        atom[place + thread % 32 * 4 + thread // 32] = scales
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.fence_view_async_tmem_store()
        op.fence_before_sync()
        self._arrive(storage.p_full.data_ptr() + (stage * HALVES + half))

    @cute.jit
    def _correct(
        self,
        storage: Any,
        base: cute.Pointer,
        thread: Int32,
        work: Work,
        v_scales: cute.Pointer,
        sink: cute.Pointer,
        results: Any,
    ) -> None:
        """Item by item; the output of one is normalized and stored while the next one's first scores become P."""
        # O is free, and there are no row sums of a step before the first.
        for i in cutlass.range_constexpr(QUERY_STAGES):
            self._arrive(storage.o_ready.data_ptr() + i)
        self._arrive(storage.total_read.data_ptr() + 1)
        done = Int32(0)
        for turn in cutlass.range(places.turns(work.shape), unroll=1):
            place, _ = places.place(self.config, turn, work)
            unscale = Float32(1.0 / 6.0)
            if cutlass.const_expr(self.config.direct_p is None):
                kv_pair = place.entry * work.shape.kv_heads + place.group
                unscale = 1.0 / op.vector(v_scales)[kv_pair]
            self._correct_item(
                storage, base, thread, place, unscale, sink, results, work.shape, turn, done
            )
            done = done + place.count

    @cute.jit
    def _correct_item(
        self,
        storage: Any,
        base: cute.Pointer,
        thread: Int32,
        place: Place,
        unscale: Float32,
        sink: cute.Pointer,
        results: Any,
        shape: Shape,
        turn: Int32,
        done: Int32,
    ) -> None:
        """L of every row in a register; O rescaled where the maximum rose, which most tiles of most rows do not do."""
        config = self.config
        totals = [Float32(0.0), Float32(0.0)]
        for j in cutlass.range(1, place.count, unroll=1):
            t = done + j
            for i in cutlass.range_constexpr(QUERY_STAGES):
                totals[i] = totals[i] + self._total(storage, base, thread, i, op.parity(t - 1))
                if cutlass.const_expr(config.direct_p is None):
                    cute.arch.mbarrier_wait(storage.rise_full.data_ptr() + i, op.parity(t))
                    rise = storage.rise.get_tensor(cute.make_layout(QUERY_STAGES * TILE_M))
                    factor = rise[i * TILE_M + thread]
                    totals[i] = totals[i] * factor
                    if cute.arch.vote_any_sync(factor != 1.0):
                        self._rescale(base, thread, i, factor)
                        op.fence_before_sync()
                    self._arrive(storage.o_ready.data_ptr() + i)
        for i in cutlass.range_constexpr(QUERY_STAGES):
            phase = op.parity(done + place.count - 1)
            total = totals[i] + self._total(storage, base, thread, i, phase)
            pair, parity = op.ring(turn, ITEM_BUFFERS)
            result = pair * QUERY_STAGES + i
            cute.arch.mbarrier_wait(storage.top_full.data_ptr() + result, parity)
            top = self._per_row(storage.top)[result * TILE_M + thread]
            if cutlass.const_expr(config.exact_total):
                total = self._per_row(storage.total)[result * TILE_M + thread]
            self._finish(storage, base, thread, i, place, top, total, unscale, sink, results, shape)

    @cute.jit
    def _total(
        self, storage: Any, base: cute.Pointer, thread: Int32, i: cutlass.Constexpr, phase: Int32
    ) -> Float32:
        """Row sum of one key tile's P, once the products with it are done."""
        cute.arch.mbarrier_wait(storage.o_full.data_ptr() + i, phase)
        op.fence_after_sync()
        loaded = op.load_columns(base, (1 - i) * TILE_N + self.columns.total, 1, thread)
        cute.arch.fence_view_async_tmem_load()
        op.fence_before_sync()
        self._arrive(storage.total_read.data_ptr() + i)
        return loaded[0]

    @cute.jit
    def _rescale(
        self, base: cute.Pointer, thread: Int32, i: cutlass.Constexpr, factor: Float32
    ) -> None:
        for part in cutlass.range_constexpr(self.config.dim_v // 16):
            column = self.columns.out[i] + 16 * part
            values = op.load_columns(base, column, 16, thread)
            cute.arch.fence_view_async_tmem_load()
            for c in cutlass.range_constexpr(16):
                values[c] = values[c] * factor
            op.store_columns(values, base, column, 16, thread)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def _finish(
        self,
        storage: Any,
        base: cute.Pointer,
        thread: Int32,
        i: cutlass.Constexpr,
        place: Place,
        top: Float32,
        total: Float32,
        unscale: Float32,
        sink: cute.Pointer,
        results: Any,
        shape: Shape,
    ) -> None:
        """O / L, LSE and (m, L) of one row; O is free as soon as it is in registers."""
        config = self.config
        out, lse, statistics = results
        # Products are 2^p_exponent too large for FP8 P; for Direct-P six times for each of P and V, so L is six times too large.
        unit = 2.0**-config.p_exponent if config.direct_p is None else 1.0 / 6.0
        represented = total * unit
        mass = represented
        reference = softmax.finite(top)
        floor = 0 if config.direct_p is None else config.direct_p.floor
        if cutlass.const_expr(config.sink):
            logit = op.vector(sink)[place.head] * (1 / LN2)
            mass = mass + cute.math.exp2(logit - reference - floor, fastmath=True)
        if cutlass.const_expr(config.direct_p is not None):
            mass = mass + (mass - mass)  # a sum that overflowed is no number
        empty = mass == 0.0
        inverse = Float32(0.0) if empty else unscale * unit / mass
        row = (place.tile * QUERY_STAGES + i) * TILE_M + thread
        for part in cutlass.range_constexpr(config.dim_v // 32):
            values = op.load_columns(base, self.columns.out[i] + 32 * part, 32, thread)
            cute.arch.fence_view_async_tmem_load()
            if row < shape.rows:
                at = (Int64(place.entry) * shape.rows + row) * shape.heads + place.head
                target = cute.make_tensor(
                    (out + (at * config.dim_v + 32 * part)).align(16), cute.make_layout(32)
                )
                rounded = cute.make_rmem_tensor(32, BFloat16)
                for c in cutlass.range_constexpr(32):
                    rounded[c] = (values[c] * inverse).to(BFloat16)
                cute.autovec_copy(rounded, target)
        op.fence_before_sync()
        self._arrive(storage.o_ready.data_ptr() + i)
        if row < shape.rows:
            at = (Int64(place.entry) * shape.heads + place.head) * shape.rows + row
            value = self._natural_log(mass, reference)
            lse_out = op.vector(lse + at)
            lse_out[0] = -Float32.inf if empty else value
            if cutlass.const_expr(config.statistics):
                plane = Int64(shape.batch) * shape.heads * shape.rows
                pair = cute.make_tensor(statistics + at, cute.make_layout(2, stride=plane))
                pair[0] = top
                pair[1] = mass

    def _natural_log(self, mass: Float32, reference: Float32) -> Float32:
        """ln of the mass in units of the row reference."""
        rule = self.config.direct_p
        floor, lowered = (0, 0) if rule is None else (rule.floor, rule.floor + rule.headroom)
        whole = reference + floor
        if lowered:
            # Held far below its worth, the mass is raised by that power of two: a logarithm of -100 has lost its last digits.
            small = mass < 1.0
            mass = op.select(small, mass * 2.0**lowered, mass)
            whole = op.select(small, whole - lowered, whole)
        fraction = cute.math.log2(mass, fastmath=True)
        # ln 2 in two parts, of which the first times an integer is exact.
        return op.fma(whole, _LN2_HIGH, op.fma(fraction, LN2, whole * _LN2_LOW))
