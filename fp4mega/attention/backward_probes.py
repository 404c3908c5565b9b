"""What one looks at when a run diverges: does backward differentiate what forward computed, and how far are both from BF16.

Computed by the reference from q, k, v and the gradient that reached the output, on the first batch entry, whatever backend
trains. All figures are plain floats of one layer.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.attention.probes import operand_metrics
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.attention.reference import Saved, backward, forward, start_backward
from fp4mega.attention.represent import represent_score_gradient
from fp4mega.attention.tiles import full_precision

MEASURED_AGAINST = "bf16"
"""Policy that the errors are relative to."""


@torch.no_grad()
def probe_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> dict[str, float]:
    """Metrics of q [B,S,H,D], k [B,T,G,D], v [B,T,G,Dv] and dout [B,S,H,Dv]; none for packed or empty problems.

    - `ds_row_sum`: sum over rows of |rowsum(dS)| over the sum of |dS|, before dS is rounded. 0 for the gradient of any
      softmax without a sink; what remains is of one sign along a row and goes through K and Q into every layer below.
    - `p_bwd_row_sum_error`: mean |rowsum(P) - 1| of the P that dS and dV are made of, over rows that see a key.
    - `ds_zeroed`: share of the non-zero dS that rounding makes 0; `do_sqnr_db`, `do_zeroed`, `do_saturated`,
      `do_scale_range` as for q.
    - `o_error`, `dq_error`, `dk_error`, `dv_error`: |x - x of policy bf16| / |x of policy bf16|; 0 where both are 0.
    """
    if problem.packed or not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return {}
    side, problem = first_entry(side, problem)
    q, k, v, dout = (x[:1].detach() for x in (q, k, v, dout))
    metrics: dict[str, float] = {}
    if policy.operands["do"].quantized:
        metrics |= operand_metrics("do", policy.operands["do"], dout.float(), side.rounding_key)
    saved, kept = forward_saved(q, k, v, side, problem, policy)
    total, size, mass, lost = score_gradient_sums(dout, saved, kept, side, problem, policy)
    seen = mass > 0
    metrics |= {
        "ds_row_sum": (total.abs().sum() / size.sum()).item() if size.any() else 0.0,
        "p_bwd_row_sum_error": (mass[seen] - 1).abs().mean().item() if seen.any() else 0.0,
        "ds_zeroed": lost,
    }
    mine = (saved.out, *backward(dout, None, saved, kept, side, problem, policy)[:3])
    plain = get_policy(MEASURED_AGAINST)
    saved, kept = forward_saved(q, k, v, side, problem, plain)
    exact = (saved.out, *backward(dout, None, saved, kept, side, problem, plain)[:3])
    for name, x, y in zip(("o", "dq", "dk", "dv"), mine, exact, strict=True):
        metrics[f"{name}_error"] = relative_error(x, y)
    return metrics


def first_entry(side: SideInputs, problem: AttentionProblem) -> tuple[SideInputs, AttentionProblem]:
    """The same problem for the first batch entry alone."""
    masks = {
        name: None if mask is None else mask[:1]
        for name, mask in (
            ("key_padding_mask", side.key_padding_mask),
            ("attention_mask", side.attention_mask),
        )
    }
    return replace(side, **masks), replace(problem, batch=1)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in the Euclidean norm; 0 when both are 0."""
    x, reference = x.float(), reference.float()
    size = reference.norm()
    distance = (x - reference).norm()
    return 0.0 if distance == 0 else (distance / size).item()


def forward_saved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> tuple[Saved, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """What the forward saves, and those of q, k, v that its backward wants back."""
    kept = (
        q if policy.saves_input("q") else None,
        k if policy.saves_input("k") else None,
        v if policy.saves_input("v") else None,
    )
    return Saved(*forward(q, k, v, side, problem, policy)), kept


def score_gradient_sums(
    dout: Tensor,
    saved: Saved,
    kept: tuple[Tensor | None, Tensor | None, Tensor | None],
    side: SideInputs,
    problem: AttentionProblem,
    policy: AttentionPolicy,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """rowsum(dS), rowsum(|dS|) and rowsum(P) of the backward, each [B,G,R,S], dS before rounding; and the share of dS lost by it.

    Arguments as in `reference.backward`.
    """
    with full_precision(dout.device):
        call, rows, (k, _, v) = start_backward(dout, None, saved, kept, side, problem, policy)
        total, size, mass = (torch.zeros_like(rows.r) for _ in range(3))
        lost, nonzero = total.new_zeros(()), total.new_zeros(())
        for tile, _, _, row, p, ds in rows.score_gradients(call, k, v):
            total[..., row:] += ds.sum(dim=-1)
            size[..., row:] += ds.abs().sum(dim=-1)
            mass[..., row:] += p.sum(dim=-1)
            rounded = represent_score_gradient(
                policy.operands["ds"], ds, policy.tile_m, side.rounding_key, tile=tile
            )
            lost += ((rounded == 0) & (ds != 0)).sum()
            nonzero += (ds != 0).sum()
    return total, size, mass, (lost / nonzero.clamp(min=1)).item()
