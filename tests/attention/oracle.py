"""An independent answer: dense attention over the whole [S, T] score matrix in FP64, gradients by autograd.

It shares the element codecs with the library and nothing else: masks, tiling, recurrences, packing and the explicit backward
are written again here, the slow and obvious way. Quantizers are straight-through: an input's gradient passes as if it had
not been rounded, and the represented P moves with its score as the exact one would.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4mega.attention import AttentionPolicy, AttentionProblem, SideInputs
from fp4mega.formats import fake_quantize, get_format

LN2 = math.log(2.0)


@dataclass
class Answer:
    """out [B,S,H,Dv], lse [B,H,S], both FP64 and differentiable."""

    out: Tensor
    lse: Tensor


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """`value` forward, identity backward."""
    return x + (value - x).detach()


def quantized(name: str, spelling: str, x: Tensor) -> Tensor:
    """One whole operand [B, rows, heads, dim] in FP64."""
    body = spelling.split("+")[0]
    name_, _, scope = body.partition("/")
    if name_ in ("none", "same"):
        return x
    if name_ == "bf16":
        return x.bfloat16().to(x.dtype)
    scope = scope or ("head" if name_ in ("nvfp4", "e4m3", "e5m2") else "")
    dims = {"": None, "head": (1, 3), "tensor": (0, 1, 2, 3), "row": (3,)}[scope]
    return fake_quantize(
        x, get_format(name_), axis=1 if name.startswith("v") else 3, scale_dims=dims
    )


def hidden(
    problem: AttentionProblem, side: SideInputs, length_q: int, length_k: int, b: int
) -> Tensor:
    """Masked-out pairs of one batch entry, bool [1 or H, S, T], pair by pair from the definition."""
    i, j = torch.arange(length_q)[:, None], torch.arange(length_k)[None, :]
    a = length_k - length_q if problem.causal == "bottom_right" else 0
    out = torch.zeros(1, length_q, length_k, dtype=torch.bool)
    if problem.causal != "none":
        out = out | (j > i + a)
    left, right = problem.window
    if left is not None:
        out = out | (j < i + a - left)
    if right is not None:
        out = out | (j > i + a + right)
    if side.key_padding_mask is not None:
        out = out | side.key_padding_mask[b].cpu()[None, None, :]
    if side.attention_mask is not None:
        out = out | side.attention_mask[min(b, side.attention_mask.shape[0] - 1)].cpu()
    return out


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> Answer:
    """The answer of a policy without Direct-P; differentiable in q, k, v and side.sink when they require gradients."""
    if not problem.packed:
        parts = [
            _one(
                q[b],
                k[b],
                v[b],
                hidden(problem, side, q.shape[1], k.shape[1], b),
                side,
                problem,
                policy,
                b,
            )
            for b in range(q.shape[0])
        ]
        return Answer(torch.stack([o for o, _ in parts]), torch.stack([l for _, l in parts]))
    outs, lses = [], []
    bounds_q, bounds_k = side.cu_seqlens_q.tolist(), side.cu_seqlens_k.tolist()
    for n in range(problem.num_sequences):
        rows, keys = slice(bounds_q[n], bounds_q[n + 1]), slice(bounds_k[n], bounds_k[n + 1])
        qs, ks, vs = q[0, rows], k[0, keys], v[0, keys]
        o, l = _one(
            qs, ks, vs, hidden(problem, side, qs.shape[0], ks.shape[0], 0), side, problem, policy, 0
        )
        outs.append(o)
        lses.append(l)
    return Answer(torch.cat(outs)[None], torch.cat(lses, dim=1)[None])


def _one(q, k, v, masked, side, problem, policy, b):
    """One batch entry: q [S,H,D], k [T,G,D], v [T,G,Dv]."""
    S, T = q.shape[0], k.shape[0]
    sink = None if side.sink is None else side.sink.double() / LN2
    if S == 0 or T == 0:
        lse = (
            torch.full((q.shape[1], S), -math.inf, dtype=torch.float64)
            if sink is None
            else (sink * LN2)[:, None].expand(-1, S)
        )
        return q.new_zeros(S, q.shape[1], v.shape[-1], dtype=torch.float64) + 0 * (
            q.sum() + k.sum() + v.sum()
        ), lse
    unseen = None if side.key_padding_mask is None else side.key_padding_mask[b].cpu()
    if unseen is not None:
        k, v = k.masked_fill(unseen[:, None, None], 0), v.masked_fill(unseen[:, None, None], 0)
    q, k, v = (
        straight_through(x, quantized(n, getattr(policy, n), x[None])[0])
        for n, x in (("q", q), ("k", k), ("v", v))
    )
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    z = torch.einsum("shd,thd->hst", q, k) * (problem.softmax_scale / LN2)
    z = z.masked_fill(masked.expand_as(z), -math.inf)
    value, weight_value, m = represented_p(z.detach(), sink, policy)
    seen = m > -math.inf
    safe = torch.where(seen, m, 0.0)[..., None]
    # value moves with z as 2^z does: d value / d z = value ln 2.
    moving = (z - z.detach()).masked_fill(masked, 0.0)
    p = value * torch.exp2(moving)
    weight = weight_value * torch.exp2(moving)
    total = weight.sum(-1)
    if sink is not None:
        total = total + torch.exp2(sink[:, None] - safe[..., 0])
    alive = total > 0
    total_safe = torch.where(alive, total, 1.0)
    out = torch.einsum("hst,thd->shd", p / total_safe[..., None], v)
    lse = torch.where(alive, (safe[..., 0] + total_safe.log2()) * LN2, -math.inf)
    return out, lse


def represented_p(
    z: Tensor, sink: Tensor | None, policy: AttentionPolicy
) -> tuple[Tensor, Tensor, Tensor]:
    """Represented P and what the normalizer sums, both relative to the final reference m [H,S]; row by row, tile by tile."""
    H, S, T = z.shape
    run = torch.full((H, S), -math.inf, dtype=z.dtype)
    if sink is not None:
        run = sink[:, None].expand(H, S).clone()
        if policy.max_rule == "integer":
            run = run.ceil()
    pieces = []
    for start in range(0, T, policy.tile_n):
        tile = z[..., start : start + policy.tile_n]
        top = tile.max(-1).values
        if policy.max_rule == "integer":
            top = top.ceil()
        run = torch.maximum(run, top)
        safe = torch.where(run == -math.inf, 0.0, run)
        p = torch.exp2(tile - safe[..., None])
        pieces.append((p, p_codes(p, policy), safe))
    final = pieces[-1][2]
    value = torch.cat([c * torch.exp2(s - final)[..., None] for _, c, s in pieces], -1)
    exact = torch.cat([p * torch.exp2(s - final)[..., None] for p, _, s in pieces], -1)
    return value, (value if policy.normalizer == "represented" else exact), run


def p_codes(p: Tensor, policy: AttentionPolicy) -> Tensor:
    """P of one tile as the product sees it."""
    name = policy.p.partition("/")[0]
    if name == "none":
        return p
    if name == "bf16":
        return p.bfloat16().to(p.dtype)
    if name == "e4m3":
        # Scale 2^p_exponent, no other: the cast itself, checked against the codec in tests/formats.
        return (
            fake_quantize(
                p * 2.0**policy.p_exponent,
                get_format("e4m3"),
                amax=torch.full([1] * p.dim(), 448.0, dtype=p.dtype),
            )
            / 2.0**policy.p_exponent
        )
    if name == "nvfp4":
        return fake_quantize(
            p, get_format(name), axis=-1, amax=torch.ones([1] * p.dim(), dtype=p.dtype)
        )
    return fake_quantize(p, get_format(name), axis=-1)
