"""`context_parallel_attention`: attention over a sequence that a group of ranks holds in zigzag chunks.

Dims: n ranks, L = S / n rows a rank, H query heads, G kv heads, D head dim of q and k, Dv of v.

Nothing that is rounded depends on n: scales that span rows come from the group's largest magnitudes, block scales lie inside
a chunk, and under `all_gather` key tiles are those of the whole sequence. docs/context_parallel.md says what is equal to what.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4mega.attention.call import SAVED_OPERANDS, Call
from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.attention.problem import AttentionProblem, Placement, SideInputs
from fp4mega.attention.represent import represent
from fp4mega.attention.tiles import BackwardRows, ForwardRows, full_precision
from fp4mega.ops import attention_func
from fp4mega.ops.checks import check_side_inputs, check_tensors
from fp4mega.parallel.checks import ExchangeName, explain_exchange
from fp4mega.parallel.exchange import AllGather, Exchange, Ring
from fp4mega.parallel.operands import Published, group_amax, restore
from fp4mega.parallel.ulysses import to_heads, to_rows
from fp4mega.parallel.zigzag import placement_of

DEFAULT_POLICY = "nvfp4_qk_fp8_pv"
Window = tuple[int | None, int | None]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    exchange: ExchangeName = "all_gather",
    policy: str | AttentionPolicy = DEFAULT_POLICY,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows on the whole group's keys; every rank of `group` calls it, forward and backward.

    q: [B, L, H, D], k: [B, L, G, D], v: [B, L, G, Dv]: chunks r and 2n - 1 - r of the sequence on rank r of n.
    exchange: `all_gather` of the bytes of K and V, `p2p` for the same bytes around a ring, `a2a` for whole sequences of
        H / n heads (Ulysses), in q's dtype.
    causal: False, or True for query i to see keys up to i of the whole sequence.
    window: (left, right) keys beside the diagonal of the whole sequence; None is no limit.
    sink: [H], as in `attention_func`, the same on every rank; its gradient on a rank is that rank's share, to be summed.
    backend: as in `attention_func` for `a2a`; the others run on the reference.

    Returns out [B, L, H, Dv] in q's dtype and lse [B, H, L]; both carry gradients.

    Raises NotImplementedError with the reason where the exchange cannot be done, ValueError or TypeError for arguments that
    do not fit.
    """
    check_tensors(q, k, v)
    side = SideInputs(sink=sink)
    check_side_inputs(side, q, k)
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k.shape={tuple(k.shape)}: expected q's length, {q.shape[1]}: under context parallelism a rank holds the same "
            "chunks of queries and keys"
        )
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r}: allowed: False, True")
    policy, ranks = get_policy(policy), group.size()
    reason = explain_exchange(
        exchange,
        policy,
        ranks=ranks,
        backend=backend,
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        seqlen=q.shape[1] * ranks,
    )
    if reason is not None:
        raise NotImplementedError(reason)
    if exchange == "a2a":
        out, lse = attention_func(
            *(to_heads(x, group) for x in (q, k, v)),
            policy=policy,
            causal=causal,
            softmax_scale=softmax_scale,
            window=window,
            sink=None if sink is None else sink.chunk(ranks)[group.rank()],
            backend=backend,
            return_lse=True,
        )
        lse_rows = to_rows(lse.transpose(1, 2)[..., None], group)[..., 0].transpose(1, 2)
        return to_rows(out, group), lse_rows
    problem = AttentionProblem.of(
        (q.shape, k.shape, v.shape),
        q.dtype,
        side,
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        causal="top_left" if causal else "none",
        window=(None, None) if window is None else window,
    )
    return _BytesExchanged.apply(q, k, v, sink, _Job(group, exchange, problem, policy))


@dataclass(frozen=True, slots=True)
class _Job:
    """What is not a tensor of one call. `problem` is that of this rank's rows on its own keys."""

    group: dist.ProcessGroup
    exchange: ExchangeName
    problem: AttentionProblem
    policy: AttentionPolicy

    def meeting(self) -> Exchange:
        return Ring(self.group) if self.exchange == "p2p" else AllGather(self.group)

    def call(self, side: SideInputs, keys: Placement) -> Call:
        """This rank's rows on keys that lie at `keys`."""
        rows = placement_of(self.group.rank(), self.group.size(), self.problem.seqlen_q)
        problem = replace(self.problem, seqlen_k=keys.rows)
        return Call(problem, self.policy, side, rows=rows, keys=keys)

    def own(self, side: SideInputs) -> Call:
        """This rank's rows on its own keys: for what does not depend on keys."""
        return self.call(
            side, placement_of(self.group.rank(), self.group.size(), self.problem.seqlen_k)
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        p = self.problem
        return {
            "q": (p.batch, p.seqlen_q, p.num_heads, p.head_dim),
            "k": (p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim),
            "v": (p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim_v),
        }


class _BytesExchanged(torch.autograd.Function):
    """Saved between forward and backward: out, lse, the bytes of this rank's own Q, K and V, and m and L of its rows.

    The group's K and V are exchanged again in backward: to keep them would cost n times the memory.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, job: _Job
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False), full_precision(q.device):
            out, lse, tensors = _forward(job, SideInputs(sink=sink), q, k, v)
        ctx.job = job
        ctx.save_for_backward(out, lse, sink, *tensors)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, sink, *tensors = ctx.saved_tensors
        side = SideInputs(sink=sink)
        with torch.autocast(dout.device.type, enabled=False), full_precision(dout.device):
            gradients = _backward(ctx.job, side, dout, dlse, out, lse, tensors)
        return (*gradients, None)


def _forward(
    job: _Job, side: SideInputs, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    policy, call = job.policy, job.own(side)
    named = [(name, policy.operands[name], x) for name, x in (("q", q), ("k", k), ("v", v))]
    if policy.backward_v == "v_bwd":
        named.append(("v_bwd", policy.operands["v_bwd"], v))
    amax = group_amax(named, call.dtype, job.group)
    published = {name: Published.of(name, operand, x, amax) for name, operand, x in named}
    rows = ForwardRows(published["q"].values(call.dtype), call.groups)

    def attend(keys: Placement, values: list[Tensor]) -> list[Tensor]:
        rows.attend(job.call(side, keys), *values)
        return []

    job.meeting().visit([published["k"], published["v"]], call.dtype, attend)
    out, lse, statistics = rows.finish(call)
    tensors = [t for name in ("q", "k", policy.backward_v) for t in published[name].tensors]
    if policy.backward == "represented":
        tensors.append(statistics)
    return out.to(q.dtype), call.leave_lse(lse), tensors


def _backward(
    job: _Job,
    side: SideInputs,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    policy, call, dtype = job.policy, job.own(side), job.problem.dtype
    ops, shapes = policy.operands, job.shapes()
    names = {"q": "q", "k": "k", "v": policy.backward_v}
    published = {n: restore(names[n], ops[names[n]], tensors, shapes[n]) for n in SAVED_OPERANDS}
    q, own_k = (published[n].values(call.dtype) for n in ("q", "k"))
    amax = group_amax(
        [("do", ops["do"], dout), ("q_bwd", ops["q_bwd"], q), ("k_bwd", ops["k_bwd"], own_k)],
        call.dtype,
        job.group,
    )

    def for_gradient(name: str, x: Tensor) -> Tensor:
        return represent(name, ops[name], x, call.dtype, amax=amax.get(name))

    rows = BackwardRows(
        call,
        q,
        for_gradient("q_bwd", q),
        for_gradient("do", dout),
        out,
        call.enter_lse(lse, math.inf),
        call.enter_lse(dlse, 0.0),
        tensors[-1] if policy.backward == "represented" else None,
    )
    meeting, travelling = job.meeting(), [published["k"], published["v"]]
    if policy.backward == "centered":

        def center(keys: Placement, values: list[Tensor]) -> list[Tensor]:
            rows.center(job.call(side, keys), *values)
            return []

        meeting.visit(travelling, call.dtype, center)

    def differentiate(keys: Placement, values: list[Tensor]) -> list[Tensor]:
        k, v = values
        return list(rows.differentiate(job.call(side, keys), k, for_gradient("k_bwd", k), v))

    dk, dv = meeting.visit(travelling, call.dtype, differentiate)
    dq, dsink = rows.finish(call)
    if dsink is not None and side.sink is not None:
        dsink = dsink.to(side.sink.dtype)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsink
