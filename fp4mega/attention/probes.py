"""What one looks at when a run goes wrong: how much of Q, K, V and P survives quantization on this batch.

All figures are plain floats of one layer. SQNR is 20 log10(|x| / |x - x^|) in dB. Shares are of values that a scale could
represent: `zeroed` counts non-zero values that became 0, `saturated` those at the largest code of their format.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fp4mega.attention.mask import Mask
from fp4mega.attention.operand import FLOAT_FORMATS, Operand
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.represent import decode_operand, encode_operand, represent
from fp4mega.attention.score_map import LOG2E, tile_probabilities
from fp4mega.formats import decode, encode, get_format

MAX_ROWS = 256


@torch.no_grad()
def probe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> dict[str, float]:
    """Metrics of q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv] under a policy, on the first batch entry.

    Keys: `{q,k,v}_sqnr_db`, `{q,k,v}_zeroed`, `{q,k,v}_saturated` of quantized operands, and `{q,k,v}_scale_range` (log2 of
    the largest over the smallest non-zero scale) of those with scales; `p_sqnr_db`, `p_zeroed`,
    `p_row_sum_error` (mean |sum P^ / sum P - 1|) over the last `MAX_ROWS` query rows, which see most keys; `score_max`
    (largest score, natural units). A packed problem reports the operands only.
    """
    q, k, v = q[:1].float(), k[:1].float(), v[:1].float()
    if side.key_padding_mask is not None:
        # As in the forward: what padding holds reaches no scale.
        hidden = side.key_padding_mask[:1, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    metrics: dict[str, float] = {}
    represented = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        operand = policy.operands[name]
        represented[name] = represent(name, operand, x, torch.float32, side.rounding_key)
        if operand.quantized:
            metrics |= operand_metrics(name, operand, x, side.rounding_key)
    if not problem.packed and problem.seqlen_q and problem.seqlen_k:
        metrics |= _probability_metrics(represented["q"], represented["k"], side, problem, policy)
    return metrics


def operand_metrics(name: str, operand: Operand, x: Tensor, key: Tensor | None) -> dict[str, float]:
    """`<name>_sqnr_db`, `_zeroed`, `_saturated`, `_scale_range` of a quantized operand [B, rows, heads, dim]."""
    encoded = encode_operand(name, operand, x, key)
    decoded = decode_operand(name, operand, list(encoded.tensors()), tuple(x.shape), torch.float32)
    format_ = get_format(operand.format)
    element = format_.element
    codes = encoded.unpack()
    largest = encode(torch.tensor([element.max, -element.max], device=x.device), element)
    metrics = {
        f"{name}_sqnr_db": sqnr_db(x, decoded),
        f"{name}_zeroed": share((decoded == 0) & (x != 0), x != 0),
        f"{name}_saturated": share(
            torch.isin(codes, largest), torch.ones_like(x, dtype=torch.bool)
        ),
    }
    if encoded.scale is not None and format_.scale is not None:
        scales = decode(encoded.scale, format_.scale, torch.float32)
    elif encoded.global_scale is not None:
        scales = encoded.global_scale
    else:
        return metrics
    used = scales[scales > 0].log2()
    range_ = (used.max() - used.min()).item() if used.numel() else 0.0
    return {**metrics, f"{name}_scale_range": range_}


def _probability_metrics(
    q: Tensor, k: Tensor, side: SideInputs, problem: AttentionProblem, policy: AttentionPolicy
) -> dict[str, float]:
    rows = torch.arange(max(problem.seqlen_q - MAX_ROWS, 0), problem.seqlen_q, device=q.device)
    keys = torch.arange(problem.seqlen_k, device=q.device)
    group = problem.num_heads // problem.num_kv_heads
    z = torch.einsum("shd,thd->hst", q[0, rows], k[0].repeat_interleave(group, dim=1)) * (
        problem.softmax_scale * LOG2E
    )
    one = replace(
        side,
        key_padding_mask=_first(side.key_padding_mask),
        attention_mask=_first(side.attention_mask),
    )
    masked = Mask(problem=problem, side=one).tile(rows, keys)
    if masked is not None:
        z = z.masked_fill(masked if masked.dim() == 2 else masked[0], -math.inf)
    largest = z.amax(dim=-1)
    seen = largest > -math.inf
    # The exact maximum as reference for every policy: the probe asks what the format does, not the running maximum.
    result = tile_probabilities(
        z, largest.masked_fill(~seen, 0.0), policy, side.rounding_key, tile=0
    )
    exact = torch.exp2(z - result.reference.masked_fill(~seen, 0.0)[..., None])
    ratio = result.p.sum(dim=-1)[seen] / exact.sum(dim=-1)[seen]
    metrics = {
        "p_row_sum_error": (ratio - 1).abs().mean().item() if seen.any() else 0.0,
        "p_zeroed": share((result.p == 0) & (exact > 0), exact > 0),
        "score_max": (largest[seen].max() / LOG2E).item() if seen.any() else 0.0,
    }
    if policy.operands["p"].format in (*FLOAT_FORMATS, "bf16") or policy.operands["p"].quantized:
        metrics["p_sqnr_db"] = sqnr_db(exact, result.p)
    return metrics


def sqnr_db(x: Tensor, represented: Tensor) -> float:
    """20 log10(|x| / |x - represented|), in dB; infinity when nothing was lost."""
    noise = (x - represented).norm()
    return math.inf if noise == 0 else (20 * torch.log10(x.norm() / noise)).item()


def share(hit: Tensor, among: Tensor) -> float:
    """How many of `among` are hit, from 0 to 1; 0 when there are none."""
    return (hit.sum() / among.sum().clamp(min=1)).item()


def _first(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:1]
