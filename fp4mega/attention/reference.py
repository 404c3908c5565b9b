"""The reference: forward over key tiles and the explicit backward from the saved bytes.

It defines the answer. Every backend is compared with it under the same policy and tile. It runs on any device in FP32
(FP64 for FP64 inputs), one column of key tiles at a time, so memory is O(S * tile_n) a head.

Shapes: B batch, S query rows, T keys, G kv heads, R = H / G query heads a kv head, D and Dv head dims.
Row statistics are kept as [B, G, R, S]; log2 units inside, natural log at the border.

Saved, beside out and lse: the bytes of Q, of K and of the V that backward reads, and for the rule `represented`
the row reference m and the normalizer L, stacked [2, B, G, R, S].
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.call import SAVED_OPERANDS, Call, accumulator_dtype, statistics_dtype
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.represent import operand_spec, represent
from fp4mega.attention.tiles import BackwardRows, ForwardRows, full_precision


class Saved(NamedTuple):
    """What `forward` hands to `backward`: see `saved_spec` for shapes."""

    out: Tensor
    lse: Tensor
    tensors: tuple[Tensor, ...]


def explain(problem: AttentionProblem, policy: AttentionPolicy) -> str | None:
    """What the reference itself cannot answer, in words; None when it can."""
    if policy.direct_p is not None and policy.direct_p.reference == "sampled" and problem.packed:
        return f"policy {policy.name!r} samples its row reference over one whole sequence, which packed sequences do not share"
    return None


def saved_spec(
    problem: AttentionProblem, policy: AttentionPolicy
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of every tensor in `Saved.tensors`, in order."""
    batch, rows, keys = _dense_shape(problem)
    shapes = {
        "q": (batch, rows, problem.num_heads, problem.head_dim),
        "k": (batch, keys, problem.num_kv_heads, problem.head_dim),
        "v": (batch, keys, problem.num_kv_heads, problem.head_dim_v),
    }
    specs: list[tuple[tuple[int, ...], torch.dtype]] = []
    for name in SAVED_OPERANDS:
        operand = policy.operands[policy.backward_v if name == "v" else name]
        if operand.quantized:
            specs += operand_spec(name, operand, shapes[name])
    if policy.backward == "represented":
        groups = problem.num_heads // problem.num_kv_heads
        specs.append(
            (
                (2, batch, problem.num_kv_heads, groups, rows),
                accumulator_dtype(problem.dtype, policy),
            )
        )
    return tuple(specs)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Attention of q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv].

    Returns out [B,S,H,Dv] in q's dtype, lse [B,H,S] (natural log, -inf for a row that sees nothing) and the saved tensors.
    A NaN or Inf in q, k or v makes the output of the heads that share its scale NaN, never a finite number.
    """
    call = Call(problem, policy, side)
    q_in, k_in, v_in = call.enter(q, k, v)
    bytes_, represented = call.encode(q_in, k_in, v_in)
    with full_precision(q.device):
        rows = ForwardRows(represented[0], call.groups)
        rows.attend(call, *represented[1:])
        out, lse, statistics = rows.finish(call)
    saved = [t for name in SAVED_OPERANDS for t in bytes_[name]]
    if policy.backward == "represented":
        saved.append(statistics)
    return call.leave_rows(out.to(q.dtype)), call.leave_lse(lse), tuple(saved)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients dq, dk, dv (inputs' dtype) and dsink (or None) from the saved bytes and `policy.backward`.

    dout [B,S,H,Dv], dlse [B,H,S] or None; `inputs` are q, k, v where `policy.saves_input`, otherwise None.
    """
    with full_precision(dout.device):
        call, rows, (k, k_grad, v) = start_backward(
            dout, dlse, saved, inputs, side, problem, policy
        )
        dk, dv = rows.differentiate(call, k, k_grad, v)
        dq, dsink = rows.finish(call)
    return (
        call.leave_rows(dq.to(problem.dtype)),
        call.leave_keys(dk.to(problem.dtype)),
        call.leave_keys(dv.to(problem.dtype)),
        None if dsink is None else dsink.to(statistics_dtype(problem.dtype)),
    )


def start_backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: Saved,
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> tuple[Call, BackwardRows, tuple[Tensor, Tensor, Tensor]]:
    """What `backward` starts from: rows whose r is known, and represented k, k as dQ sees it, and v; arguments as there."""
    call = Call(problem, policy, side)
    q, k, v = call.restore(saved.tensors, inputs)
    out, upstream = call.enter_rows(saved.out), call.enter_rows(dout)
    lse = call.enter_lse(saved.lse, math.inf)
    gradient_of_lse = None if dlse is None else call.enter_lse(dlse, 0.0)
    statistics = saved.tensors[-1] if policy.backward == "represented" else None
    do = represent("do", policy.operands["do"], upstream, call.dtype, side.rounding_key)
    q_grad, k_grad = (_for_gradient(f"{n}_bwd", x, call) for n, x in (("q", q), ("k", k)))
    rows = BackwardRows(call, q, q_grad, do, out, lse, gradient_of_lse, statistics)
    if policy.backward == "centered":
        rows.center(call, k, v)
    return call, rows, (k, k_grad, v)


def _for_gradient(name: str, x: Tensor, call: Call) -> Tensor:
    """q or k as the gradient products see it, from the values that the scores see."""
    return represent(name, call.policy.operands[name], x, call.dtype, call.side.rounding_key)


def _dense_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    if problem.packed:
        return problem.num_sequences, problem.max_seqlen_q, problem.max_seqlen_k
    return problem.batch, problem.seqlen_q, problem.seqlen_k
