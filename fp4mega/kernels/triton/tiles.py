"""What forward and backward kernels share: tiles and the orders of their rows and columns, order of programs, and which keys a row sees."""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly."""


@triton.jit
def load_tile(
    base, first, stride, rows, dim,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] from row `first` on; columns are contiguous; zeros outside where a mask is asked for."""
    at, cols = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    pointers = base + tl.cast(first, tl.int64) * stride + at[:, None] * stride + cols[None, :]
    if MASK_ROWS and MASK_COLS:
        return tl.load(
            pointers, mask=(first + at < rows)[:, None] & (cols < dim)[None, :], other=0.0
        )
    if MASK_ROWS:
        return tl.load(pointers, mask=(first + at < rows)[:, None], other=0.0)
    if MASK_COLS:
        return tl.load(pointers, mask=(cols < dim)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_rows_at(
    base, rows_at, stride, rows, dim, BLOCK_C: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr,
):  # fmt: skip
    """[len(rows_at), BLOCK_C]: those rows in that order; otherwise as `load_tile`."""
    cols = tl.arange(0, BLOCK_C)
    pointers = base + rows_at.to(tl.int64)[:, None] * stride + cols[None, :]
    if MASK_ROWS and MASK_COLS:
        return tl.load(pointers, mask=(rows_at < rows)[:, None] & (cols < dim)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=(rows_at < rows)[:, None], other=0.0)
    if MASK_COLS:
        return tl.load(pointers, mask=(cols < dim)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def swap_pairs(index):
    """Bits 1 and 2 of an index with bits 3 and 4: its own inverse.

    Of 32 keys laid out so, the pairs that score products give to one register of all threads are every fourth one. What happens to these
    alone then is no divergence within a warp: a compiler that sees the register sees the choice.
    """
    return (index & -31) | ((index & 6) << 2) | ((index & 24) >> 2)


@triton.jit
def in_operand_order(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Columns of an 8-bit [ROWS, COLS] tile as both factors of a product along them are laid out: of every 16, bits 3 and 1-2 of the
    column rotated, so that a result of one product is the left factor of the next in the same registers, without a shuffle.
    """
    groups = tl.reshape(codes, [ROWS, COLS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(groups, (0, 1, 3, 2, 4)), [ROWS, COLS])


@triton.jit
def paired_rows(index):
    """Bits 0 and 3 of an index swapped: its own inverse.

    A tile whose rows are loaded in this order has, in each thread of a product's result, pairs of rows that lie side by side in an operand
    of `in_operand_order`: see `row_pairs`.
    """
    return (index & -10) | ((index & 1) << 3) | ((index & 8) >> 3)


@triton.jit
def row_pairs(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """int16 [ROWS / 2, COLS]: rows g and g + 8 of every 16 of an 8-bit tile, which one thread holds, in one word; g + 8 in the high byte.

    With the tile's rows in the order of `paired_rows`, the bytes of a column are in the order of `in_operand_order`.
    """
    groups = tl.reshape(codes.to(tl.uint8, bitcast=True), [ROWS // 16, 2, 8, COLS])
    low, high = tl.split(tl.permute(groups, (0, 2, 3, 1)))
    if INTERPRETED:
        words = (low.to(tl.int32) | (high.to(tl.int32) << 8)).to(tl.int16)
    else:
        # Two permutes for eight codes, in the registers that are also a product's left factor; shifts become a dozen instructions.
        words = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=r,=r,r,r",
            [low, high], dtype=tl.int16, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.reshape(words, [ROWS // 2, COLS])


@triton.jit
def store_transposed(words, at, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store int16 [ROWS, COLS] words, as `row_pairs` gives them, at a uint8 pointer for `load_transposed`: blocks of 8 columns by 8 words, 128 bytes each.

    A product's result has such a block in one register of every thread of a warp. It is transposed there, so nothing goes through shared
    memory, and stored by one instruction.
    """
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    if INTERPRETED:
        block = (col >> 3) * (ROWS // 8) + (row >> 3)
        tl.store(at.to(tl.pointer_type(tl.int16)) + block * 64 + (col & 7) * 8 + (row & 7), words)
    else:
        # After the transposition a thread has, in the place of one row's words of two columns, those of two rows of one column.
        place = ((col >> 3) * (ROWS // 8) + (row >> 3)) * 128 + (row & 7) * 16 + (col & 7) * 2
        tl.inline_asm_elementwise(
            "{ .reg .b32 t; movmatrix.sync.aligned.m8n8.trans.b16 t, $1; st.global.b32 [$2], t; mov.b32 $0, t; }", "=r,r,l,l",
            [words, at.to(tl.int64) + place.to(tl.int64)], dtype=tl.int16, is_pure=False, pack=2,
        )  # fmt: skip


@triton.jit
def load_transposed(tiles, at, COLS: tl.constexpr, ROWS: tl.constexpr):
    """The [COLS, ROWS] codes that `store_transposed` left at row `at` of a descriptor of tiles [COLS, ROWS], as a left factor's registers have them."""
    blocks = tl.reshape(tiles.load([at, 0]), [COLS // 8, ROWS // 16, 8, 16])
    return tl.reshape(tl.permute(blocks, (0, 2, 1, 3)), [COLS, ROWS])


@triton.jit
def longest_first(pid, steps, heads, SPAN: tl.constexpr):
    """Head and step of a program, `steps` of them a head: SPAN heads together, whose operands a GPU's cache holds, go through them in order.

    With the longest programs at the first steps, those that end a launch are short.
    """
    first = pid // (steps * SPAN) * SPAN
    together = tl.minimum(heads - first, SPAN)
    place = pid - first * steps
    return first + place % together, place // together


@triton.jit
def visible(
    rows, keys, diagonal, left, right, length_k, hidden_at,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Which keys each row sees; rows and keys are index tensors that broadcast to a tile, keys one with a dim of size 1."""
    seen = (keys < length_k) & (rows >= 0)
    if HAS_RIGHT:
        seen = seen & (keys <= rows + diagonal + right)
    if HAS_LEFT:
        seen = seen & (keys >= rows + diagonal - left)
    if HAS_HIDDEN:
        seen = seen & (tl.load(hidden_at + keys, mask=keys < length_k, other=1) == 0)
    return seen


@triton.jit
def gated_out(inexact_ptr, bg, GATE: tl.constexpr):
    """Whether the head's flag says that the other of two launches computes it (`forward.GATE_EXACT`, `GATE_INEXACT`)."""
    out = False
    if GATE == 1:
        out = tl.load(inexact_ptr + bg) != 0
    if GATE == 2:
        out = tl.load(inexact_ptr + bg) == 0
    return out


@triton.jit
def score_scale(softmax_scale_log2, q_scale_ptr, k_scale_ptr, bh, bg, SCALED_QK: tl.constexpr):
    """What makes scores in log2 units of the product of Q and K operands: the softmax's factor over the numbers that divide them."""
    z_scale = softmax_scale_log2
    if SCALED_QK:
        z_scale = tl.math.div_rn(
            tl.math.div_rn(z_scale, tl.load(q_scale_ptr + bh)), tl.load(k_scale_ptr + bg)
        )
    return z_scale


@triton.jit
def lengths(
    length_q_ptr, length_k_ptr, b, rows, keys, BOTTOM_RIGHT: tl.constexpr, LENGTHS: tl.constexpr
):
    """Rows and keys of batch entry b, and the key on the diagonal of row 0."""
    length_q, length_k = rows, keys
    if LENGTHS:
        length_q, length_k = tl.load(length_q_ptr + b), tl.load(length_k_ptr + b)
    diagonal = 0
    if BOTTOM_RIGHT:
        diagonal = length_k - length_q
    return length_q, length_k, diagonal


@triton.jit
def key_range(
    row, diagonal, left, right, length_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Key tiles of rows `row` to `row + BLOCK_M`: [first, end) has any visible key, [free, bound) in it needs no mask."""
    end = length_k
    bound = length_k
    if HAS_RIGHT:
        end = tl.minimum(end, tl.maximum(row + BLOCK_M + diagonal + right, 0))
        bound = tl.minimum(bound, tl.maximum(row + diagonal + right + 1, 0))
    bound = bound // BLOCK_N * BLOCK_N
    first = 0
    free = 0
    if HAS_LEFT:
        first = tl.maximum(row + diagonal - left, 0) // BLOCK_N * BLOCK_N
        free = tl.cdiv(tl.maximum(row + BLOCK_M - 1 + diagonal - left, 0), BLOCK_N) * BLOCK_N
        free = tl.maximum(tl.minimum(free, end), first)
    if HAS_HIDDEN:
        bound = 0
    bound = tl.maximum(bound, free)
    return first, free, bound, end


@triton.jit
def row_range(
    key, diagonal, left, right, length_q, length_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Row tiles that see keys `key` to `key + BLOCK_N`: [first, bound) needs masks, [bound, free) none, [free, end) does again."""
    first = 0
    bound = 0
    if HAS_RIGHT:
        first = tl.maximum(key - diagonal - right, 0) // BLOCK_M * BLOCK_M
        bound = tl.cdiv(tl.maximum(key + BLOCK_N - 1 - diagonal - right, 0), BLOCK_M) * BLOCK_M
    end = length_q
    free = length_q
    if HAS_LEFT:
        end = tl.minimum(end, tl.maximum(key + BLOCK_N - diagonal + left, 0))
        free = tl.maximum(key - diagonal + left + 1, 0) // BLOCK_M * BLOCK_M
    bound = tl.minimum(tl.maximum(bound, first), end)
    free = tl.minimum(tl.maximum(free, bound), end)
    if HAS_HIDDEN:
        bound, free = end, end
    if key + BLOCK_N > length_k:
        bound, free = end, end
    return first, bound, free, end
