"""The backward: which kernels run, in which order, on which part of the heads and rows.

In 8 bit the kernel of dQ computes P and dS once and leaves their codes in a workspace, from which the kernel of dK and dV multiplies them: five
products and the elementwise work once. In BF16 each of the two kernels computes them for itself.
"""

from typing import Any

from torch import Tensor

from fp4mega.kernels.triton.factors import Factors
from fp4mega.kernels.triton.forward import Operand, Shape
from fp4mega.kernels.triton.gradient_products import gradient_products
from fp4mega.kernels.triton.gradient_tiles import (
    LEAST_PROGRAMS,
    WORKSPACE_BYTES,
    Piece,
    pieces,
    workspace,
)
from fp4mega.kernels.triton.key_gradients import key_gradients
from fp4mega.kernels.triton.row_gradients import row_gradients, row_tile


def attention_backward(
    scores: list[tuple[Operand, Operand, int]],
    factors: Factors,
    shape: Shape,
    gradients: tuple[Tensor, Tensor, Tensor],
    *,
    softmax_scale: float,
    wide: int,
    wide_v: int,
    represented: bool,
    p_format: str,
    p_exponent: int,
    inexact: Tensor | None = None,
) -> None:
    """Fill dq, dk, dv (contiguous, [B, rows, heads, dim]).

    `scores`: q, k and the gate that selects the heads whose scores are their product; together the gates select every head.
    """
    dq, dk, dv = gradients
    common: dict[str, Any] = {
        "softmax_scale": softmax_scale, "wide": wide, "wide_v": wide_v, "represented": represented, "p_format": p_format,
    }  # fmt: skip
    q_bytes, v_bytes = (x.data.element_size() for x in (scores[0][0], factors.v))
    config = row_tile(wide, wide_v, factors.fp8, q_bytes == 1, factors.fp8 and v_bytes == 2)
    block_rows = config["BLOCK_M"]
    if not factors.fp8:
        ((q, k, _),) = scores
        key_gradients(q, k, factors, shape, (dk, dv), **common)
        whole = Piece(0, shape.batch * shape.kv_heads, 0, -(-shape.rows // block_rows), 0, 0)
        row_gradients(
            q, k, factors, shape, dq, config, whole, None, p_exponent=p_exponent, **common
        )
        return
    plan = pieces(shape, block_rows, WORKSPACE_BYTES, LEAST_PROGRAMS)
    form = {"rows": block_rows, "unit_keys": config["BLOCK_N"]}
    tiles = workspace(plan, shape.heads // shape.kv_heads, like=dq, **form)
    sums: tuple[Tensor | None, Tensor | None] = (None, None)
    if any(piece.first_tile for piece in plan):
        new = factors.terms.r.new_empty
        sums = (new((shape.keys, wide)), new((shape.keys, wide_v)))
    for i, piece in enumerate(plan):
        for q, k, gate in scores:
            row_gradients(
                q, k, factors, shape, dq, config, piece, tiles, p_exponent=p_exponent, gate=gate, inexact=inexact, **common
            )  # fmt: skip
        gradient_products(
            tiles, piece, factors.q_across, factors.do_across, shape, (dk, dv), sums,
            softmax_scale=softmax_scale, p_exponent=p_exponent,
            first=piece.first_tile == 0, last=not any(p.first_tile for p in plan[i + 1 : i + 2]), **form,
        )  # fmt: skip
