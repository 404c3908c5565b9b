"""The reference: forward over key tiles and the explicit backward from the saved bytes.

It defines the answer. Every backend is compared with it under the same policy and tile. It runs on any device in FP32
(FP64 for FP64 inputs), one column of key tiles at a time, so memory is O(S * tile_n) a head.

Shapes: B batch, S query rows, T keys, G kv heads, R = H / G query heads a kv head, D and Dv head dims.
Row statistics are kept as [B, G, R, S]; log2 units inside, natural log at the border.

Saved, beside out and lse: the bytes of Q, of K and of the V that backward reads, and for the rule `represented`
the row reference m and the normalizer L, stacked [2, B, G, R, S].
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.mask import Mask, Packing, unpack_problem
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.represent import (
    decode_operand,
    encode_operand,
    operand_spec,
    represent,
    represent_probabilities,
    represent_score_gradient,
)
from fp4mega.attention.score_map import (
    LOG2E,
    direct_p_reference,
    finite_reference,
    sample_order,
    tile_probabilities,
)

LN2 = math.log(2.0)
SAVED_OPERANDS = ("q", "k", "v")


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


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of lse and dsink: FP64 for FP64 inputs, otherwise FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulator_dtype(dtype: torch.dtype, policy: AttentionPolicy) -> torch.dtype:
    """FP64 for FP64 inputs, otherwise FP32.

    FP64 too where Direct-P holds its sums far below their worth: FP32's range would end where a small V begins.
    """
    wide = policy.direct_p is not None and policy.direct_p.floor > 0
    return torch.float64 if wide else statistics_dtype(dtype)


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
    call = _Call(problem, policy, side)
    q_in, k_in, v_in = call.enter(q, k, v)
    bytes_, represented = call.encode(q_in, k_in, v_in)
    with _full_precision(q.device):
        out, lse, statistics = _forward_tiles(call, *represented)
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
    call = _Call(problem, policy, side)
    q, k, v = call.restore(saved.tensors, inputs)
    out, upstream = call.enter_rows(saved.out), call.enter_rows(dout)
    lse = call.enter_lse(saved.lse, math.inf)
    gradient_of_lse = None if dlse is None else call.enter_lse(dlse, 0.0)
    statistics = saved.tensors[-1] if policy.backward == "represented" else None
    with _full_precision(dout.device):
        dq, dk, dv, dsink = _backward_tiles(
            call, q, k, v, out, upstream, lse, gradient_of_lse, statistics
        )
    return (
        call.leave_rows(dq.to(problem.dtype)),
        call.leave_keys(dk.to(problem.dtype)),
        call.leave_keys(dv.to(problem.dtype)),
        None if dsink is None else dsink.to(statistics_dtype(problem.dtype)),
    )


@dataclass(slots=True)
class _Call:
    """One problem under one policy: moves tensors between the caller's layout and the dense, possibly permuted one."""

    outer: AttentionProblem
    policy: AttentionPolicy
    side: SideInputs
    problem: AttentionProblem = None  # type: ignore[assignment]
    mask: Mask = None  # type: ignore[assignment]
    pack_q: Packing | None = None
    pack_k: Packing | None = None
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        self.problem, self.mask, self.pack_q, self.pack_k = unpack_problem(self.outer, self.side)

    @property
    def dtype(self) -> torch.dtype:
        return accumulator_dtype(self.problem.dtype, self.policy)

    @property
    def groups(self) -> int:
        return self.problem.num_heads // self.problem.num_kv_heads

    @property
    def tiles(self) -> list[tuple[int, int, int]]:
        """Tile index, first key and end of every key tile."""
        step = self.policy.tile_n
        keys = self.problem.seqlen_k
        return [(t, start, min(start + step, keys)) for t, start in enumerate(range(0, keys, step))]

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dense and with hidden rows zeroed: what nobody may see must not reach a scale."""
        q, k, v = self.enter_rows(q), self._enter_keys(k), self._enter_keys(v)
        hidden = self.mask.hidden_keys()
        if hidden is not None:
            k = k.masked_fill(hidden[..., None, None], 0)
            v = v.masked_fill(hidden[..., None, None], 0)
        return q, k, v

    def enter_rows(self, x: Tensor) -> Tensor:
        return x if self.pack_q is None else self.pack_q.pad(x)

    def leave_rows(self, x: Tensor) -> Tensor:
        return x if self.pack_q is None else self.pack_q.unpad(x, self.outer.seqlen_q)

    def _enter_keys(self, x: Tensor) -> Tensor:
        x = x if self.pack_k is None else self.pack_k.pad(x)
        order = self.order(x.device)
        return x if order is None else x[:, order]

    def leave_keys(self, x: Tensor) -> Tensor:
        order = self.order(x.device)
        if order is not None:
            x = torch.empty_like(x).index_copy_(1, order, x)
        hidden = self.mask.hidden_keys()
        if hidden is not None:
            x = x.masked_fill(hidden[..., None, None], 0)
        return x if self.pack_k is None else self.pack_k.unpad(x, self.outer.seqlen_k)

    def order(self, device: torch.device) -> Tensor | None:
        """Key permutation of a sampled Direct-P reference; None keeps the order."""
        rule = self.policy.direct_p
        if rule is None or rule.reference != "sampled":
            return None
        if self.permutation is None:
            self.permutation = sample_order(self.problem.seqlen_k, rule.samples, device)
        return self.permutation

    def first_row(self, first_key: int) -> int:
        """First row of the first query tile that can see `first_key` or a later key; all rows for permuted keys."""
        if self.permutation is not None:
            return 0
        return self.mask.first_row(first_key) // self.policy.tile_m * self.policy.tile_m

    def enter_lse(self, x: Tensor, fill: float) -> Tensor:
        """[B, H, S] (packed: [1, H, total]) to [B, G, R, S] in log2 units' dtype; rows of no sequence get `fill`."""
        if self.pack_q is not None:
            padded = self.pack_q.pad(x.transpose(1, 2)).masked_fill(
                ~self.pack_q.valid[..., None], fill
            )
            x = padded.transpose(1, 2)
        return x.to(self.dtype).unflatten(1, (self.problem.num_kv_heads, self.groups))

    def leave_lse(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2).to(statistics_dtype(self.problem.dtype))
        if self.pack_q is None:
            return x
        return (
            self.pack_q.unpad(x.transpose(1, 2), self.outer.seqlen_q, -math.inf)
            .transpose(1, 2)
            .contiguous()
        )

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[dict[str, tuple[Tensor, ...]], tuple[Tensor, Tensor, Tensor]]:
        """The bytes that backward needs, and the values that the forward multiplies."""
        bytes_: dict[str, tuple[Tensor, ...]] = {}
        represented = []
        for name, x in zip(SAVED_OPERANDS, (q, k, v), strict=True):
            operand = self.policy.operands[name]
            wanted = self.policy.backward_v if name == "v" else name
            bytes_[name] = ()
            if operand.quantized:
                encoded = encode_operand(name, operand, x, self.side.rounding_key)
                represented.append(encoded.dequantize(self.dtype))
                if wanted == name:
                    bytes_[name] = encoded.tensors()
            else:
                represented.append(represent(name, operand, x, self.dtype))
            if wanted != name and self.policy.operands[wanted].quantized:
                bytes_[name] = encode_operand(
                    wanted, self.policy.operands[wanted], x, self.side.rounding_key
                ).tensors()
        return bytes_, (represented[0], represented[1], represented[2])

    def restore(
        self, saved: tuple[Tensor, ...], inputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Represented q, k and the backward's v: from bytes, or from the caller's own tensors where those were kept."""
        remaining = list(saved)
        q_dense, k_dense = (
            (self.problem.batch, self.problem.seqlen_q),
            (self.problem.batch, self.problem.seqlen_k),
        )
        shapes = (
            (*q_dense, self.problem.num_heads, self.problem.head_dim),
            (*k_dense, self.problem.num_kv_heads, self.problem.head_dim),
            (*k_dense, self.problem.num_kv_heads, self.problem.head_dim_v),
        )
        values = []
        for i, name in enumerate(SAVED_OPERANDS):
            operand = self.policy.operands[self.policy.backward_v if name == "v" else name]
            if operand.quantized:
                count = len(operand_spec(name, operand, shapes[i]))
                taken, remaining = remaining[:count], remaining[count:]
                values.append(decode_operand(name, operand, taken, shapes[i], self.dtype))
                continue
            x = inputs[i]
            assert x is not None, (
                f"{name} is unquantized under {self.policy.name}, so the caller must hand it back"
            )
            x = self.enter_rows(x) if name == "q" else self._enter_keys(x)
            hidden = self.mask.hidden_keys() if name != "q" else None
            if hidden is not None:
                x = x.masked_fill(hidden[..., None, None], 0)
            values.append(represent(name, operand, x, self.dtype))
        return values[0], values[1], values[2]


def _forward_tiles(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out [B,S,H,Dv] and lse [B,G,R,S] in the accumulator dtype, statistics [2,B,G,R,S]."""
    policy = call.policy
    q, k, v = _by_kv_head(q, call.groups), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    reference, total = _initial_statistics(call, q, k)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for tile, start, end in call.tiles:
        row = call.first_row(start)
        if row >= q.shape[3]:
            continue
        z = _scores(call, q, k, row, start, end)
        before = reference[..., row:]
        p, weight, after = tile_probabilities(z, before, policy, call.side.rounding_key, tile=tile)
        rescale = torch.exp2(before - finite_reference(after))
        total[..., row:] = total[..., row:] * rescale + weight.sum(dim=-1)
        out[..., row:, :] = out[..., row:, :] * rescale[..., None] + _fold(p, v[:, :, start:end])
        reference[..., row:] = after
    # L is 0 for a row that sees no key: its output is 0 and its log-sum-exp -inf.
    empty = total == 0
    out = (out / total.masked_fill(empty, 1.0)[..., None]).masked_fill(empty[..., None], 0.0)
    lse = ((finite_reference(reference) + total.log2() + _floor(call)) * LN2).masked_fill(
        empty, -math.inf
    )
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse, torch.stack([reference, total])


def _backward_tiles(
    call: _Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    statistics: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    policy, ops, key = call.policy, call.policy.operands, call.side.rounding_key
    do = represent("do", ops["do"], dout, call.dtype, key)
    q_grad = q if policy.q_bwd == "same" else represent("q_bwd", ops["q_bwd"], q, call.dtype, key)
    k_grad = k if policy.k_bwd == "same" else represent("k_bwd", ops["k_bwd"], k, call.dtype, key)
    q, q_grad, do, out = (_by_kv_head(x.to(call.dtype), call.groups) for x in (q, q_grad, do, out))
    k, k_grad, v = (x.permute(0, 2, 1, 3) for x in (k, k_grad, v))
    probabilities = _Probabilities(call, q, k, lse, statistics)
    if policy.backward == "centered":
        r = q.new_zeros(q.shape[:-1])
        for _, start, end, row, p in probabilities:
            r[..., row:] += (p * _fold_t(do[..., row:, :], v[:, :, start:end])).sum(dim=-1)
    else:
        r = (out * do).sum(dim=-1)
    if dlse is not None:
        r = r - dlse
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile, start, end, row, p in probabilities:
        dp = _fold_t(do[..., row:, :], v[:, :, start:end])
        ds = represent_score_gradient(
            ops["ds"], p * (dp - r[..., row:, None]), policy.tile_m, key, tile=tile
        )
        p = represent_probabilities("p_bwd", ops["p_bwd"], p, policy.p_exponent, key, tile=tile)
        dv[:, :, start:end] = _reduce_rows(p, do[..., row:, :])
        dk[:, :, start:end] = _reduce_rows(ds, q_grad[..., row:, :])
        dq[..., row:, :] += _fold(ds, k_grad[:, :, start:end])
    scale = call.problem.softmax_scale
    dsink = (
        None if call.side.sink is None else -(probabilities.sink() * r).sum(dim=(0, 3)).flatten()
    )
    dq = (dq * scale).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return dq, (dk * scale).permute(0, 2, 1, 3), dv.permute(0, 2, 1, 3), dsink


class _Probabilities:
    """P of each key tile as `policy.backward` wants it: iterate for (tile, start, end, first row, P [B,G,R,rows,keys])."""

    def __init__(
        self, call: _Call, q: Tensor, k: Tensor, lse: Tensor, statistics: Tensor | None
    ) -> None:
        self.call, self.q, self.k = call, q, k
        self.lse = lse.masked_fill(lse == -math.inf, math.inf) * LOG2E
        self.statistics = statistics

    def __iter__(self) -> Iterator[tuple[int, int, int, int, Tensor]]:
        call, policy = self.call, self.call.policy
        running = None if self.statistics is None else _initial_statistics(call, self.q, self.k)[0]
        for tile, start, end in call.tiles:
            row = call.first_row(start)
            if row >= self.q.shape[3]:
                continue
            z = _scores(call, self.q, self.k, row, start, end)
            if running is None:
                yield tile, start, end, row, torch.exp2(z - self.lse[..., row:, None])
                continue
            # The forward's recurrence again: its P was rounded relative to the reference of that moment.
            p, _, after = tile_probabilities(
                z, running[..., row:], policy, call.side.rounding_key, tile=tile
            )
            running[..., row:] = after
            yield tile, start, end, row, p * self._to_final(after, row)[..., None]

    def _to_final(self, reference: Tensor, row: int) -> Tensor:
        """Factor from P relative to a running reference to P / L relative to the final one; 0 for a row that sees nothing."""
        assert self.statistics is not None
        final, total = self.statistics[0][..., row:], self.statistics[1][..., row:]
        return torch.exp2(reference - finite_reference(final)) * _inverse(total)

    def sink(self) -> Tensor:
        """Probability mass that the sink takes of every row, [B, G, R, S]."""
        sink = _sink(self.call)
        if self.statistics is None:
            return torch.exp2(sink - self.lse)
        final, total = self.statistics
        return torch.exp2(sink - finite_reference(final) - _floor(self.call)) * _inverse(total)


def _initial_statistics(call: _Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
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


def _floor(call: _Call) -> int:
    """L of Direct-P: normalizer and output are held 2^L below their worth. 0 for other policies."""
    return 0 if call.policy.direct_p is None else call.policy.direct_p.floor


def _inverse(total: Tensor) -> Tensor:
    """1 / L, and 0 for a row that sees nothing."""
    return (1 / total).masked_fill(total == 0, 0.0)


def _sink(call: _Call) -> Tensor:
    """The sink's logit in log2 units, [1, G, R, 1]."""
    assert call.side.sink is not None
    return (call.side.sink.to(call.dtype) * LOG2E).view(
        1, call.problem.num_kv_heads, call.groups, 1
    )


def _scores(call: _Call, q: Tensor, k: Tensor, row: int, start: int, end: int) -> Tensor:
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


def _dense_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    if problem.packed:
        return problem.num_sequences, problem.max_seqlen_q, problem.max_seqlen_k
    return problem.batch, problem.seqlen_q, problem.seqlen_k


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """FP32 products stay FP32 whatever TF32 setting or autocast region the caller is in: the reference has one answer."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
