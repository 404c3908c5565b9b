"""The running softmax of some query rows over key tiles, and its derivative: the two loops of the reference.

Both are objects that hold what belongs to the rows and are fed keys, all at once or one block after another: that is how
context parallelism uses them. Fed in the order of the sequence and in whole tiles, blocks give the numbers of one pass.

Shapes: B batch, S query rows, T keys, G kv heads, R = H / G query heads a kv head, D and Dv head dims.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp4mega.attention.call import Call
from fp4mega.attention.represent import represent_probabilities, represent_score_gradient
from fp4mega.attention.score_map import (
    LOG2E,
    direct_p_reference,
    finite_reference,
    tile_probabilities,
)

LN2 = math.log(2.0)


class ForwardRows:
    """Row reference m, normalizer L and unnormalized output of represented query rows q [B,S,H,D] (accumulator dtype)."""

    def __init__(self, q: Tensor, groups: int) -> None:
        self.q = _by_kv_head(q, groups)
        self.reference: Tensor | None = None
        self.total: Tensor | None = None
        self.out: Tensor | None = None

    def attend(self, call: Call, k: Tensor, v: Tensor) -> None:
        """Go on over represented keys k [B,T,G,D] and v [B,T,G,Dv]; `call` says where they lie and what is masked."""
        q, k, v = self.q, k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        if self.reference is None or self.total is None or self.out is None:
            self.reference, self.total = _initial_statistics(call, q, k)
            self.out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        reference, total, out = self.reference, self.total, self.out
        for tile, start, end in call.tiles:
            row = call.first_row(start)
            if row >= q.shape[3]:
                continue
            z = _scores(call, q, k, row, start, end)
            before = reference[..., row:]
            p, weight, after = tile_probabilities(
                z, before, call.policy, call.side.rounding_key, tile=tile
            )
            rescale = torch.exp2(before - finite_reference(after))
            total[..., row:] = total[..., row:] * rescale + weight.sum(dim=-1)
            out[..., row:, :] = out[..., row:, :] * rescale[..., None] + _fold(
                p, v[:, :, start:end]
            )
            reference[..., row:] = after

    def finish(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """out [B,S,H,Dv] and lse [B,G,R,S] in the accumulator dtype, statistics (m, L) [2,B,G,R,S]."""
        assert self.reference is not None
        assert self.total is not None
        assert self.out is not None
        # A sum that overflowed is no number: what is divided by it is not 0.
        total = self.total.masked_fill(self.total == math.inf, math.nan)
        # L is 0 for a row that sees no key: its output is 0 and its log-sum-exp -inf.
        empty = total == 0
        out = (self.out / total.masked_fill(empty, 1.0)[..., None]).masked_fill(
            empty[..., None], 0.0
        )
        lse = ((finite_reference(self.reference) + total.log2() + _floor(call)) * LN2).masked_fill(
            empty, -math.inf
        )
        return (
            out.permute(0, 3, 1, 2, 4).flatten(2, 3),
            lse,
            torch.stack([self.reference, total]),
        )


class BackwardRows:
    """Gradients of query rows under `policy.backward`.

    q [B,S,H,D] represented, as the scores see it, and q_grad as dK sees it; do the represented dO and out [B,S,H,Dv]; lse
    [B,G,R,S] with +inf for rows that are none; dlse [B,G,R,S] or None; statistics (m, L) of the forward for the rule
    `represented`, else None. Under `centered` every key must pass through `center` before the first `differentiate`.
    """

    def __init__(
        self,
        call: Call,
        q: Tensor,
        q_grad: Tensor,
        do: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        statistics: Tensor | None,
    ) -> None:
        self.q, self.q_grad, self.do = (_by_kv_head(x, call.groups) for x in (q, q_grad, do))
        self.lse = lse.masked_fill(lse == -math.inf, math.inf) * LOG2E
        self.statistics = statistics
        self.running: Tensor | None = None
        if call.policy.backward == "centered":
            self.r = self.q.new_zeros(self.q.shape[:-1])
        else:
            self.r = (_by_kv_head(out.to(call.dtype), call.groups) * self.do).sum(dim=-1)
        if dlse is not None:
            self.r = self.r - dlse
        self.dq = torch.zeros_like(self.q)

    def center(self, call: Call, k: Tensor, v: Tensor) -> None:
        """Add these keys' part of r = rowsum(P * dP). k [B,T,G,D] and v [B,T,G,Dv] represented."""
        k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        for _, start, end, row, p in self._probabilities(call, k):
            self.r[..., row:] += (p * _fold_t(self.do[..., row:, :], v[:, :, start:end])).sum(
                dim=-1
            )

    def differentiate(
        self, call: Call, k: Tensor, k_grad: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """These rows' part of dk [B,T,G,D] and dv [B,T,G,Dv], and on to dq. Keys in the order of the forward."""
        policy, ops, key = call.policy, call.policy.operands, call.side.rounding_key
        k_grad = k_grad.permute(0, 2, 1, 3)
        dk, dv = torch.zeros_like(k.permute(0, 2, 1, 3)), torch.zeros_like(v.permute(0, 2, 1, 3))
        for tile, start, end, row, p, ds in self.score_gradients(call, k, v):
            ds = represent_score_gradient(ops["ds"], ds, policy.tile_m, key, tile=tile)
            p = represent_probabilities("p_bwd", ops["p_bwd"], p, policy.p_exponent, key, tile=tile)
            dv[:, :, start:end] = _reduce_rows(p, self.do[..., row:, :])
            dk[:, :, start:end] = _reduce_rows(ds, self.q_grad[..., row:, :])
            self.dq[..., row:, :] += _fold(ds, k_grad[:, :, start:end])
        return (dk * call.problem.softmax_scale).permute(0, 2, 1, 3), dv.permute(0, 2, 1, 3)

    def score_gradients(
        self, call: Call, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, int, int, int, Tensor, Tensor]]:
        """(tile, start, end, first row, P, dS) of each key tile, both [B,G,R,rows,keys] and not rounded yet; keys as in `differentiate`."""
        k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        for tile, start, end, row, p in self._probabilities(call, k):
            dp = _fold_t(self.do[..., row:, :], v[:, :, start:end])
            yield tile, start, end, row, p, p * (dp - self.r[..., row:, None])

    def finish(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """dq [B,S,H,D] in the accumulator dtype; dsink [H] of these rows, or None without a sink."""
        dq = (self.dq * call.problem.softmax_scale).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if call.side.sink is None:
            return dq, None
        return dq, -(self._sink_mass(call) * self.r).sum(dim=(0, 3)).flatten()

    def _probabilities(self, call: Call, k: Tensor) -> Iterator[tuple[int, int, int, int, Tensor]]:
        """(tile, start, end, first row, P [B,G,R,rows,keys]) of each key tile, P as the backward rule wants it."""
        if self.statistics is not None and self.running is None:
            self.running = _initial_statistics(call, self.q, k)[0]
        for tile, start, end in call.tiles:
            row = call.first_row(start)
            if row >= self.q.shape[3]:
                continue
            z = _scores(call, self.q, k, row, start, end)
            if self.running is None:
                yield tile, start, end, row, torch.exp2(z - self.lse[..., row:, None])
                continue
            # The forward's recurrence again: its P was rounded relative to the reference of that moment.
            p, _, after = tile_probabilities(
                z, self.running[..., row:], call.policy, call.side.rounding_key, tile=tile
            )
            self.running[..., row:] = after
            yield tile, start, end, row, p * self._to_final(after, row)[..., None]

    def _to_final(self, reference: Tensor, row: int) -> Tensor:
        """Factor from P relative to a running reference to P / L relative to the final one; 0 for a row that sees nothing."""
        assert self.statistics is not None
        final, total = self.statistics[0][..., row:], self.statistics[1][..., row:]
        return torch.exp2(reference - finite_reference(final)) * _inverse(total)

    def _sink_mass(self, call: Call) -> Tensor:
        """Probability mass that the sink takes of every row, [B, G, R, S]."""
        sink = _sink(call)
        if self.statistics is None:
            return torch.exp2(sink - self.lse)
        final, total = self.statistics
        return torch.exp2(sink - finite_reference(final) - _floor(call)) * _inverse(total)


def _initial_statistics(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Row reference and normalizer before the first key: nothing seen, the sink, or Direct-P's fixed reference."""
    rule = call.policy.direct_p
    reference = q.new_full(q.shape[:-1], -math.inf)
    total = torch.zeros_like(reference)
    if rule is not None:
        reference = torch.zeros_like(reference)
        if rule.reference == "sampled" and k.shape[2]:
            sampled = _scores(call, q, k, 0, 0, min(rule.samples, k.shape[2]))
            reference = direct_p_reference(sampled, rule)
    if call.side.sink is not None:
        sink = _sink(call)
        if rule is None:
            reference = (
                (sink.ceil() if call.policy.max_rule == "integer" else sink)
                .expand_as(reference)
                .clone()
            )
        total = torch.exp2(sink - finite_reference(reference) - _floor(call))
    return reference, total


def _floor(call: Call) -> int:
    """L of Direct-P: normalizer and output are held 2^L below their worth. 0 for other policies."""
    return 0 if call.policy.direct_p is None else call.policy.direct_p.floor


def _inverse(total: Tensor) -> Tensor:
    """1 / L, and 0 for a row that sees nothing."""
    return (1 / total).masked_fill(total == 0, 0.0)


def _sink(call: Call) -> Tensor:
    """The sink's logit in log2 units, [1, G, R, 1]."""
    assert call.side.sink is not None
    return (call.side.sink.to(call.dtype) * LOG2E).view(
        1, call.problem.num_kv_heads, call.groups, 1
    )


def _scores(call: Call, q: Tensor, k: Tensor, row: int, start: int, end: int) -> Tensor:
    """z = softmax_scale * log2(e) * q k^T of rows `row` on, [B, G, R, rows, keys], -inf where masked."""
    z = _fold_t(q[..., row:, :], k[:, :, start:end]) * (call.problem.softmax_scale * LOG2E)
    order = call.order(q.device)
    keys = torch.arange(start, end, device=q.device) if order is None else order[start:end]
    masked = call.mask.tile(torch.arange(row, q.shape[3], device=q.device), keys)
    if masked is None:
        return z
    if masked.dim() == 4 and masked.shape[1] != 1:
        masked = masked.unflatten(1, (call.problem.num_kv_heads, call.groups))
    elif masked.dim() == 4:
        masked = masked.unsqueeze(1)
    return z.masked_fill_(masked, -math.inf)


def _by_kv_head(x: Tensor, groups: int) -> Tensor:
    """[B, S, H, D] to [B, G, R, S, D]."""
    return x.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)


def _fold(a: Tensor, b: Tensor) -> Tensor:
    """a [B,G,R,S,n] times b [B,G,n,D]: the R query heads of a kv head are rows of one product, so b is not repeated."""
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _fold_t(a: Tensor, b: Tensor) -> Tensor:
    """a [B,G,R,S,D] times the transpose of b [B,G,n,D]."""
    return (a.flatten(2, 3) @ b.transpose(-1, -2)).unflatten(2, a.shape[2:4])


def _reduce_rows(a: Tensor, b: Tensor) -> Tensor:
    """a [B,G,R,S,n] transposed times b [B,G,R,S,D]: the sum over query heads and rows, [B,G,n,D]."""
    return a.flatten(2, 3).transpose(-1, -2) @ b.flatten(2, 3)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """FP32 products stay FP32 whatever TF32 setting or autocast region the caller is in: the reference has one answer."""
    # Not `allow_tf32`: reading that raises once the caller has set a precision by its newer name.
    backends: Any = torch.backends  # whose stubs lack the attributes
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [p.fp32_precision for p in products]
    try:
        for p in products:
            p.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for p, precision in zip(products, before, strict=True):
            p.fp32_precision = "none"  # as whatever is set for all backends, if that was it
            if p.fp32_precision != precision:
                p.fp32_precision = precision
