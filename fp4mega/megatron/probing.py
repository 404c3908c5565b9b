"""One probe of one forward: the figures of `fp4mega.attention.probes` for the arguments of `attention_func`."""

import torch
from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.probes import probe
from fp4mega.attention.problem import AttentionProblem, Causal, SideInputs


@torch.no_grad()
def probe_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: AttentionPolicy,
    causal: Causal,
    softmax_scale: float,
    window: tuple[int | None, int | None] | None = None,
    sink: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    rounding_key: Tensor | None = None,
) -> dict[str, float]:
    """Metrics by name of q [B, S, H, D], k [B, T, G, D], v [B, T, G, Dv]; keywords as in `attention_func`."""
    side = SideInputs(
        sink=sink,
        key_padding_mask=key_padding_mask,
        attention_mask=attention_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        rounding_key=rounding_key,
    )
    problem = AttentionProblem.of(
        (q.shape, k.shape, v.shape),
        q.dtype,
        side,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window or (None, None),
        max_seqlen_q=max_seqlen_q or 0,
        max_seqlen_k=max_seqlen_k or 0,
    )
    return probe(q, k, v, side, problem, policy)
