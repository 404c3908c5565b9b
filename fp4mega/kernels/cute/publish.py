"""Publishers on sm_100a: from strided BF16 tensors to the reference's bytes and the tensor core's layouts, in one pass each.

What they write is, bit for bit, what `fp4mega.kernels.cute.operands` defines with torch operations. A CTA takes 128 rows of one head;
a thread takes one quantization block at a time. Operands whose FP32 scale spans a head need its largest magnitude first: `AmaxKernel`.

Letters: B batch, S rows, H heads, D dim. `x` is BF16 [B, S, H, D] with any strides in multiples of eight elements but 1 along D.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from fp4mega.kernels.cute import instructions as op
from fp4mega.kernels.cute import quantize
from fp4mega.kernels.cute.config import SCALE_ATOM, TILE_N

THREADS = 128
VECTOR = 16
"""BF16 values of one load of a thread: two 16-byte words."""


class RowKernel:
    """What the publishers share: addressing of x, and magnitudes as ordered bits."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _place(self, rows: Int32, heads: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """(tile of 128 rows, head, batch entry, head of the batch) of this CTA."""
        block, _, _ = cute.arch.block_idx()
        tiles = cute.ceil_div(rows, TILE_N)
        pair = block // tiles
        return block % tiles, pair % heads, pair // heads, pair

    def _load(
        self, x: cute.Pointer, strides: Any, entry: Int32, row: Int32, head: Int32, first: Int32
    ) -> list[Int32]:
        """Eight words of two BF16 values: x[entry, row, head, first:first + 16]."""
        at = Int64(entry) * strides[0] + Int64(row) * strides[1] + Int64(head) * strides[2] + first
        words = cute.make_rmem_tensor(VECTOR // 2, Int32)
        pointer = cute.recast_ptr((x + at).align(16), dtype=Int32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR // 2)), words)
        return [words[i] for i in range(VECTOR // 2)]

    @staticmethod
    def _values(words: list[Int32]) -> list[Float32]:
        return [op.from_bits(bits) for word in words for bits in (word << 16, word & -65536)]

    @staticmethod
    def _largest(values: list[Float32]) -> Int32:
        largest = op.bits_of(values[0]) & quantize.MAGNITUDE
        for value in values[1:]:
            largest = cutlass.max(largest, op.bits_of(value) & quantize.MAGNITUDE)
        return largest


class AmaxKernel(RowKernel):
    """Bits of the largest magnitude of every head; `amax` must hold zeros."""

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        amax: cute.Pointer,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        batch: Int32,
        rows: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """x: BF16 [B, S, H, D]. amax: int32 [B, H], float32 bits."""
        self.kernel(x, amax, (stride_b, stride_s, stride_h), rows, heads).launch(
            grid=(cute.ceil_div(rows, TILE_N) * heads * batch, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, amax: cute.Pointer, strides: Any, rows: Int32, heads: Int32
    ) -> None:
        """The maximum of integers does not depend on the order, so neither does the result."""
        thread, _, _ = cute.arch.thread_idx()
        tile, head, entry, pair = self._place(rows, heads)
        units = self.dim // VECTOR
        largest = Int32(0)
        for i in cutlass.range(units, unroll=4):
            unit = i * THREADS + thread
            row = tile * TILE_N + unit // units
            if row < rows:
                values = self._values(
                    self._load(x, strides, entry, row, head, unit % units * VECTOR)
                )
                largest = cutlass.max(largest, self._largest(values))
        largest = cute.arch.warp_redux_sync(largest, "max")
        if thread % 32 == 0:
            cute.arch.atomic_max(amax + pair, largest, sem="relaxed", scope="gpu")


class RowPublisher(RowKernel):
    """Q or K in NVFP4 or MXFP4 `rceil`: codes, block scales row-major (saved) and in tensor-core order, and the FP32 number."""

    def __init__(self, dim: int, *, nvfp4: bool) -> None:
        super().__init__(dim)
        self.nvfp4 = nvfp4
        self.block = 16 if nvfp4 else 32

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        amax: cute.Pointer,
        codes: cute.Pointer,
        scale: cute.Pointer,
        shared: cute.Pointer,
        atoms: cute.Pointer,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        batch: Int32,
        rows: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """codes: uint8 [B, S, H, D / 2]. scale: uint8 [B, S, H, D / block]. shared: float32 [B, H] and amax: int32 [B, H] for NVFP4.

        atoms: uint8 [B, H, ceil(S / 128), D / block / 4, 512]; scales of rows past S are zero.
        """
        self.kernel(
            x, (amax, codes, scale, shared, atoms), (stride_b, stride_s, stride_h), rows, heads
        ).launch(
            grid=(cute.ceil_div(rows, TILE_N) * heads * batch, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, results: Any, strides: Any, rows: Int32, heads: Int32
    ) -> None:
        """Neighbouring threads take neighbouring blocks of a row."""
        amax, codes, scale, shared_out, atoms = results
        thread, _, _ = cute.arch.thread_idx()
        tile, head, entry, pair = self._place(rows, heads)
        blocks = self.dim // self.block
        shared = Float32(1.0)
        if cutlass.const_expr(self.nvfp4):
            shared = quantize.nvfp4_global(op.vector(amax)[pair])
            if tile == 0 and thread == 0:
                number = op.vector(shared_out)
                number[pair] = shared
        atom_columns = -(-blocks // 4)
        first_atom = (Int64(pair) * cute.ceil_div(rows, TILE_N) + tile) * (
            atom_columns * SCALE_ATOM
        )
        tile_atoms = op.vector(atoms + first_atom)
        for i in cutlass.range(blocks, unroll=1):
            unit = i * THREADS + thread
            r, k = unit // blocks, unit % blocks
            row = tile * TILE_N + r
            byte = Int32(0)
            if row < rows:
                words = self._load(x, strides, entry, row, head, k * self.block)
                if cutlass.const_expr(self.block == 32):
                    words = words + self._load(
                        x, strides, entry, row, head, k * self.block + VECTOR
                    )
                values = self._values(words)
                largest = self._largest(values)
                if cutlass.const_expr(self.nvfp4):
                    packed, byte = quantize.nvfp4_block(values, largest, shared)
                else:
                    packed, byte = quantize.mxfp4_rceil_block(values, largest)
                at = (Int64(entry) * rows + row) * heads + head
                self._store(codes + (at * (self.dim // 2) + k * (self.block // 2)), packed)
                row_scales = op.vector(scale + at * blocks)
                row_scales[k] = Uint8(byte)
            tile_atoms[k // 4 * SCALE_ATOM + r % 32 * 16 + r // 32 * 4 + k % 4] = Uint8(byte)

    @staticmethod
    def _store(pointer: cute.Pointer, words: list[Int32]) -> None:
        registers = cute.make_rmem_tensor(len(words), Int32)
        for i, word in enumerate(words):
            registers[i] = word
        target = cute.recast_ptr(pointer.align(4 * len(words)), dtype=Int32)
        cute.autovec_copy(registers, cute.make_tensor(target, cute.make_layout(len(words))))


class ValuePublisher(RowKernel):
    """V in E4M3 under one power of two a head."""

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        amax: cute.Pointer,
        codes: cute.Pointer,
        shared: cute.Pointer,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        batch: Int32,
        rows: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """codes: uint8 [B, S, H, D]. shared: float32 [B, H]. amax: int32 [B, H], float32 bits."""
        self.kernel(x, amax, codes, shared, (stride_b, stride_s, stride_h), rows, heads).launch(
            grid=(cute.ceil_div(rows, TILE_N) * heads * batch, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        amax: cute.Pointer,
        codes: cute.Pointer,
        shared_out: cute.Pointer,
        strides: Any,
        rows: Int32,
        heads: Int32,
    ) -> None:
        """16 values a thread and step."""
        thread, _, _ = cute.arch.thread_idx()
        tile, head, entry, pair = self._place(rows, heads)
        shared = quantize.e4m3_power_of_two(op.vector(amax)[pair])
        if tile == 0 and thread == 0:
            number = op.vector(shared_out)
            number[pair] = shared
        units = self.dim // VECTOR
        for i in cutlass.range(units, unroll=2):
            unit = i * THREADS + thread
            row, k = tile * TILE_N + unit // units, unit % units
            if row < rows:
                values = self._values(self._load(x, strides, entry, row, head, k * VECTOR))
                scaled = [op.multiply(value, shared) for value in values]
                at = ((Int64(entry) * rows + row) * heads + head) * self.dim + k * VECTOR
                words = [op.pack_e4m3x4(*scaled[c : c + 4]) for c in range(0, VECTOR, 4)]
                RowPublisher._store(codes + at, words)


class TransposedValuePublisher(RowKernel):
    """V in MXFP4 `amplitude` along keys, for Direct-P: contiguous along keys for the tensor core, as the reference packs it for saving.

    A thread takes one column, so a block of 32 keys is its own and nothing is transposed in between.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        codes: cute.Pointer,
        scale: cute.Pointer,
        codes_t: cute.Pointer,
        atoms: cute.Pointer,
        stride_b: Int64,
        stride_s: Int64,
        stride_h: Int64,
        batch: Int32,
        rows: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """codes: uint8 [B, ceil(S / 2), H, D]. scale: uint8 [B, ceil(S / 32), H, D]. codes_t: uint8 [B, H, D, ceil(S / 128) * 64].

        atoms: uint8 [B, H, ceil(S / 128), 512]; keys past S are zero in the last two.
        """
        self.kernel(
            x, (codes, scale, codes_t, atoms), (stride_b, stride_s, stride_h), rows, heads
        ).launch(
            grid=(cute.ceil_div(rows, TILE_N) * heads * batch, 1, 1),
            block=(self.dim, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, results: Any, strides: Any, rows: Int32, heads: Int32
    ) -> None:
        """Neighbouring threads take neighbouring columns, so loads and saved bytes are contiguous across a warp."""
        codes, scale, codes_t, atoms = results
        column, _, _ = cute.arch.thread_idx()
        tile, head, entry, pair = self._place(rows, heads)
        tiles = cute.ceil_div(rows, TILE_N)
        source = cute.recast_ptr(x, dtype=cutlass.Uint16)
        half_rows, blocks = (rows + 1) // 2, cute.ceil_div(rows, 32)
        row_t = (Int64(pair) * self.dim + column) * (tiles * (TILE_N // 2)) + tile * (TILE_N // 2)
        scales = Int32(0)
        for block in cutlass.range_constexpr(TILE_N // 32):
            first = tile * TILE_N + 32 * block
            values = []
            for i in cutlass.range_constexpr(32):
                key = first + i
                bits = Int32(0)
                if key < rows:
                    at = (
                        Int64(entry) * strides[0] + Int64(key) * strides[1]
                        + Int64(head) * strides[2] + column
                    )  # fmt: skip
                    bits = Int32(op.vector(source + at)[0]) << 16
                values.append(op.from_bits(bits))
            words, byte = quantize.mxfp4_amplitude_block(values, self._largest(values))
            scales = scales | (byte << (8 * block))
            RowPublisher._store(codes_t + (row_t + 16 * block), words)
            for w in cutlass.range_constexpr(4):
                for b in cutlass.range_constexpr(4):
                    pair_at = first // 2 + 4 * w + b
                    if pair_at < half_rows:
                        at = ((Int64(entry) * half_rows + pair_at) * heads + head) * self.dim
                        saved = op.vector(codes + at)
                        saved[column] = Uint8((words[w] >> (8 * b)) & 255)
            if first < rows:
                at = ((Int64(entry) * blocks + first // 32) * heads + head) * self.dim
                saved_scale = op.vector(scale + at)
                saved_scale[column] = Uint8(byte)
        atom = op.vector(
            cute.recast_ptr(
                (atoms + (Int64(pair) * tiles + tile) * SCALE_ATOM).align(4), dtype=Int32
            )
        )
        atom[column % 32 * 4 + column // 32] = scales
        if cutlass.const_expr(self.dim < TILE_N):
            # The atom's rows past Dv.
            atom[column % 32 * 4 + column // 32 + self.dim // 32] = Int32(0)
