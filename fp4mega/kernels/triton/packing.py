"""Device functions: 4-bit and 8-bit codes to and from 32-bit words, so that what is stored and transposed is words, not bytes.

Codes stay in int32 registers until two or four of them are joined by shifts; triton packs bytes by permutes, twice as many of them, and
ptxas 12.8 loses the way among 8-bit pairs that are packed in two ways.
"""

# A kernel's arguments have Triton's own types.
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from fp4mega.kernels.triton.arithmetic import bits_of


@triton.jit
def nibble_pairs(values):
    """E2M1 values, float32 [rows, columns], to uint32 [rows, columns / 2]: two codes each, even column low, at bits 18 to 25; zeros above,
    anything below.

    2^-126 times a value has its code's three magnitude bits as its leading bits, subnormals included, and its sign far above; of two such
    numbers, one four bits down, the signs are brought beside their magnitudes together.
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    codes = bits_of(values * 1.1754943508222875e-38).to(tl.uint32, bitcast=True)
    low, high = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
    both = high | (low >> 4)
    # Magnitudes at 18-20 and 22-24 stay; signs at 27 and 31 go to 21 and 25.
    return (both & 0x01DC0000) | ((both >> 6) & 0xFE23FFFF)


@triton.jit
def nibble_words(pairs):
    """uint32 [rows, columns / 4] of four bytes each from the results of `nibble_pairs` [rows, columns]."""
    ROWS: tl.constexpr = pairs.shape[0]
    COLUMNS: tl.constexpr = pairs.shape[1]
    even, odd = tl.split(tl.reshape(pairs, [ROWS, COLUMNS // 2, 2]))
    halves = (even >> 18) | ((odd >> 10) & 0xFF00)
    low, high = tl.split(tl.reshape(halves, [ROWS, COLUMNS // 4, 2]))
    return low | (high << 16)


@triton.jit
def nibbles_of_words(words):
    """float32 [rows, 8 columns] of the 4-bit codes in uint32 [rows, columns]: E2M1 values times 2^-126."""
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    halves = tl.join(words << 16, words)
    bytes_ = tl.join(halves << 8, halves)
    return _at_the_top(tl.reshape(tl.join(bytes_ << 4, bytes_), [ROWS, 8 * COLUMNS]))


@triton.jit
def nibbles_of_bytes(bytes_):
    """As `nibbles_of_words` from uint8 [rows, columns]: [rows, 2 columns]."""
    ROWS: tl.constexpr = bytes_.shape[0]
    COLUMNS: tl.constexpr = bytes_.shape[1]
    top = bytes_.to(tl.uint32) << 24
    return _at_the_top(tl.reshape(tl.join(top << 4, top), [ROWS, 2 * COLUMNS]))


@triton.jit
def _at_the_top(codes):
    """The value times 2^-126 of a code in the highest four bits."""
    bits = ((codes >> 6) & 0x01C00000) | (codes & 0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_tops(magnitude, x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint32 whose highest byte is the code of a magnitude that is a value of the format, with the sign of x; the rest is anything.

    2^(BIAS - 127) times a value has its code as its leading float32 bits, subnormals included.
    """
    bits = bits_of(magnitude * 2.0 ** (BIAS - 127)) << (MANTISSA + 1)
    return (bits | (bits_of(x) & -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _upper_halves(even, odd):
    return ((even >> 8) & 0x00FF0000) | (odd & 0xFF000000)


@triton.jit
def words_along_columns(tops):
    """uint32 [rows, columns / 4] of the highest bytes of [rows, columns], first column lowest."""
    ROWS: tl.constexpr = tops.shape[0]
    COLUMNS: tl.constexpr = tops.shape[1]
    even, odd = tl.split(tl.reshape(tops, [ROWS, COLUMNS // 2, 2]))
    low, high = tl.split(tl.reshape(_upper_halves(even, odd), [ROWS, COLUMNS // 4, 2]))
    return (low >> 16) | high


@triton.jit
def words_along_rows(tops):
    """uint32 [rows / 4, columns] of the highest bytes of [rows, columns], whose rows lie as `rows_by_word` says."""
    ROWS: tl.constexpr = tops.shape[0]
    COLUMNS: tl.constexpr = tops.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(tops, [2, 2, ROWS // 4, COLUMNS]), (2, 3, 0, 1)))
    low, high = tl.split(_upper_halves(even, odd))
    return (low >> 16) | high


@triton.jit
def rows_by_word(ROWS: tl.constexpr):
    """Which row of a tile to hold at each place, so that `words_along_rows` gives the columns of a transposed operand in `in_operand_order`.

    Word w has rows 0, 1, 8 and 9 after its first one, which are at places w, w + ROWS / 4, w + ROWS / 2 and w + 3 ROWS / 4: in one thread,
    when its rows are as far apart as loads of whole rows leave them.
    """
    place = tl.arange(0, ROWS)
    word, byte = place % (ROWS // 4), place // (ROWS // 4)
    return word // 4 * 16 + word % 4 * 2 + byte // 2 * 8 + byte % 2
