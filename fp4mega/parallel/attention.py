"""`context_parallel_attention`: attention over a sequence that a group of ranks holds in zigzag chunks.

Dims: n ranks, L = S / n rows a rank, H query heads, G kv heads, D head dim of q and k, Dv of v, N packed sequences. Inside,
packed sequences are a dense batch of N, as on one rank; `Layout` moves rows there.

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
from fp4mega.ops.checks import (
    check_side_inputs,
    check_tensors,
    read_softmax_scale,
    read_window,
)
from fp4mega.parallel.checks import ExchangeName, explain_exchange
from fp4mega.parallel.exchange import AllGather, Exchange, Ring
from fp4mega.parallel.operands import Published, group_amax, restore
from fp4mega.parallel.packed import PackedZigzag
from fp4mega.parallel.ulysses import to_heads, to_rows
from fp4mega.parallel.zigzag import Zigzag

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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows on the whole group's keys; every rank of `group` calls it alike, forward and backward.

    q: [B, L, H, D], k: [B, L, G, D], v: [B, L, G, Dv]: chunks r and 2n - 1 - r of the sequence on rank r of n.
    exchange: `all_gather` of the bytes of K and V, `p2p` for the same bytes around a ring, `a2a` for whole sequences of
        H / n heads (Ulysses), in q's dtype.
    causal: False, or True for query i to see keys up to i of the whole sequence.
    window: (left, right) keys beside the diagonal of the whole sequence; None is no limit.
    cu_seqlens: int32 [N + 1], cumulative lengths of N packed sequences, those of the whole group and the same on every rank; B is
        then 1. A rank holds chunks r and 2n - 1 - r of each sequence, one sequence after another.
    cu_seqlens_padded: int32 [N + 1], the same with the padding at the end of each sequence, which makes its length a multiple
        of 2n; None when there is none. Padding is seen by nobody and has output 0, lse -inf and gradient 0.
    sink: [H], as in `attention_func`, the same on every rank; its gradient on a rank is that rank's share, to be summed.
    backend: as in `attention_func` for `a2a`; the others run on the reference.

    Returns out [B, L, H, Dv] in q's dtype and lse [B, H, L]; both carry gradients.

    Raises NotImplementedError with the reason where the exchange cannot be done, ValueError or TypeError for arguments that
    do not fit.
    """
    check_tensors(q, k, v)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: expected a torch.distributed.ProcessGroup that this rank is in"
        )
    # Before anything is sent: what is wrong would fail between two messages.
    sides, scale = read_window(window), read_softmax_scale(softmax_scale, q.shape[3])
    side = SideInputs(sink=sink)
    check_side_inputs(side, q, k)
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"k.shape={tuple(k.shape)}: expected q's length, {q.shape[1]}: under context parallelism a rank holds the same "
            "chunks of queries and keys"
        )
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r}: allowed: False, True")
    policy = get_policy(policy)
    layout = _layout(q, group, cu_seqlens, cu_seqlens_padded)
    wholes = {layout.ranks * q.shape[1]} if isinstance(layout, Zigzag) else set(layout.padded)
    for seqlen in sorted(wholes):
        reason = explain_exchange(
            exchange,
            policy,
            ranks=layout.ranks,
            backend=backend,
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            seqlen=seqlen,
        )
        if reason is not None:
            raise NotImplementedError(reason)

    def dense(x: Tensor) -> tuple[int, ...]:
        return (layout.batch, layout.rows, *x.shape[2:])

    problem = AttentionProblem.of(
        (dense(q), dense(k), dense(v)),
        q.dtype,
        side,
        softmax_scale=scale,
        causal="top_left" if causal else "none",
        window=sides,
    )
    if exchange == "a2a":
        return _whole_heads(
            q,
            k,
            v,
            sink,
            group,
            layout,
            policy=policy,
            causal=causal,
            softmax_scale=scale,
            window=sides,
            backend=backend,
        )
    return _BytesExchanged.apply(q, k, v, sink, _Job(group, exchange, layout, problem, policy))


def _layout(
    q: Tensor, group: dist.ProcessGroup, cu_seqlens: Tensor | None, padded: Tensor | None
) -> Zigzag | PackedZigzag:
    for name, bounds in (("cu_seqlens", cu_seqlens), ("cu_seqlens_padded", padded)):
        if bounds is not None and not isinstance(bounds, Tensor):
            raise TypeError(f"{name}={type(bounds).__name__}: expected a torch.Tensor or None")
        if bounds is not None and bounds.device != q.device:
            raise ValueError(f"{name}.device={bounds.device}: expected q's device, {q.device}")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: packed sequences have a batch of 1, not {q.shape[0]}"
        )
    if cu_seqlens is None:
        if padded is not None:
            raise ValueError("cu_seqlens=None: cu_seqlens_padded needs cu_seqlens beside it")
        return Zigzag(group.size(), q.shape[0], q.shape[1])
    return PackedZigzag.of(
        cu_seqlens, padded, ranks=group.size(), rank=group.rank(), tokens=q.shape[1]
    )


def _whole_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    group: dist.ProcessGroup,
    layout: Zigzag | PackedZigzag,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`a2a`: ordinary attention on whole sequences of this rank's share of the heads, between two exchanges."""
    if isinstance(layout, PackedZigzag):
        longest = max(layout.tokens)
        options |= {"cu_seqlens_q": layout.cu_seqlens, "cu_seqlens_k": layout.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out, lse = attention_func(
        *(to_heads(x, group, layout) for x in (q, k, v)),
        sink=None if sink is None else sink.chunk(layout.ranks)[group.rank()],
        return_lse=True,
        **options,
    )
    lse_rows = to_rows(lse.transpose(1, 2)[..., None], group, layout, -math.inf)
    return to_rows(out, group, layout), lse_rows[..., 0].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _Job:
    """What is not a tensor of one call. `problem` is that of this rank's rows on its own keys, as a dense batch."""

    group: dist.ProcessGroup
    exchange: ExchangeName
    layout: Zigzag | PackedZigzag
    problem: AttentionProblem
    policy: AttentionPolicy

    def anew(self) -> "_Job":
        """For one pass: a packed layout holds on to the indices that it made, and those of whole sequences grow with n."""
        return replace(self, layout=replace(self.layout))

    def meeting(self) -> Exchange:
        return (Ring if self.exchange == "p2p" else AllGather)(self.group, self.layout)

    def call(self, side: SideInputs, keys: Placement) -> Call:
        """This rank's rows on keys that lie at `keys`."""
        rows = self.layout.placement(self.group.rank())
        problem = replace(self.problem, seqlen_k=keys.rows)
        call = Call(problem, self.policy, side, rows=rows, keys=keys)
        lengths = self.layout.lengths
        call.mask = replace(call.mask, lengths_q=lengths, lengths_k=lengths)
        return call

    def own(self, side: SideInputs) -> Call:
        """This rank's rows on its own keys: for what does not depend on keys."""
        return self.call(side, self.layout.placement(self.group.rank()))

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
            out, lse, tensors = _forward(job.anew(), SideInputs(sink=sink), q, k, v)
        ctx.job = job
        ctx.save_for_backward(out, lse, sink, *tensors)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, sink, *tensors = ctx.saved_tensors
        side = SideInputs(sink=sink)
        with torch.autocast(dout.device.type, enabled=False), full_precision(dout.device):
            gradients = _backward(ctx.job.anew(), side, dout, dlse, out, lse, tensors)
        return (*gradients, None)


def _forward(
    job: _Job, side: SideInputs, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    policy, layout, call = job.policy, job.layout, job.own(side)
    entered = {"q": layout.enter(q), "k": layout.enter(k), "v": layout.enter(v)}
    if policy.backward_v == "v_bwd":
        entered["v_bwd"] = entered["v"]
    named = [(name, policy.operands[name], x) for name, x in entered.items()]
    amax = group_amax(named, call.dtype, job.group)
    published = {name: Published.of(name, operand, x, amax, layout) for name, operand, x in named}
    rows = ForwardRows(published["q"].values(call.dtype), call.groups)

    def attend(keys: Placement, values: list[Tensor]) -> list[Tensor]:
        rows.attend(job.call(side, keys), *values)
        return []

    job.meeting().visit([published["k"], published["v"]], call.dtype, attend)
    out, lse, statistics = rows.finish(call)
    tensors = [t for name in ("q", "k", policy.backward_v) for t in published[name].tensors]
    if policy.backward == "represented":
        tensors.append(layout.squeeze(_rows_first(statistics)))
    lse_rows = layout.leave(call.leave_lse(lse).transpose(1, 2), -math.inf).transpose(1, 2)
    return layout.leave(out.to(q.dtype)).contiguous(), lse_rows.contiguous(), tensors


def _rows_first(statistics: Tensor) -> Tensor:
    """m and L [2, N, G, H / G, R] as [N, R, 2, G, H / G]."""
    return statistics.movedim((1, 4), (0, 1))


def _rows_last(rows: Tensor) -> Tensor:
    return rows.movedim((0, 1), (1, 4))


def _backward(
    job: _Job,
    side: SideInputs,
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    policy, layout, call, dtype = job.policy, job.layout, job.own(side), job.problem.dtype
    ops, shapes = policy.operands, job.shapes()
    names = {"q": "q", "k": "k", "v": policy.backward_v}
    published = {
        n: restore(names[n], ops[names[n]], tensors, shapes[n], layout) for n in SAVED_OPERANDS
    }
    statistics = None
    if policy.backward == "represented":
        rows_first = (layout.batch, layout.rows, 2, job.problem.num_kv_heads, call.groups)
        statistics = _rows_last(layout.spread(tensors[-1], rows_first))
    dout, out = layout.enter(dout), layout.enter(out)
    lse = layout.enter(lse.transpose(1, 2), math.inf).transpose(1, 2)
    dlse = layout.enter(dlse.transpose(1, 2)).transpose(1, 2)
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
        statistics,
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
    return layout.leave(dq.to(dtype)), dk.to(dtype), dv.to(dtype), dsink
