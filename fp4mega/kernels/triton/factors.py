"""What the kernels of the backward read beside the factors of the scores."""

from typing import NamedTuple

from torch import Tensor

from fp4mega.kernels.triton.forward import Operand, Shape


class RowTerms(NamedTuple):
    """Per row, [B, H, padded rows]: published P = 2^(z - shift) * inverse, and r = (rowsum(out * dO) - dlse) / 2^p_exponent."""

    shift: Tensor
    inverse: Tensor
    r: Tensor


class Across(NamedTuple):
    """A transposed 8-bit operand [B, heads, dim, padded rows] and its power of two [B, heads]; None in BF16."""

    data: Tensor | None
    power: Tensor | None


class Factors(NamedTuple):
    """V, dO, the operands of 8-bit gradient products, and the terms of the rows."""

    v: Operand
    do: Operand
    q_across: Across
    k_across: Across
    do_across: Across
    terms: RowTerms

    @property
    def fp8(self) -> bool:
        """Whether gradient products are 8 bit; otherwise they are BF16."""
        return self.do_across.data is not None

    def padding_flags(self, q: Operand, shape: Shape, wide: int, wide_v: int) -> dict[str, bool]:
        """Where loads need masks, for the kernels' compiler: operands that do not end with whole tiles or whole rows of `wide` and `wide_v`."""
        return {
            "PAD_QK": not q.padded,
            "PAD_V": not self.v.padded,
            "PAD_DIM": not q.padded and shape.dim != wide,
            "PAD_DIM_V": not self.v.padded and shape.dim_v != wide_v,
            "PAD_DIM_DO": not self.do.padded and shape.dim_v != wide_v,
        }
