"""Probes of one forward and its backward: the figures of `fp4mega.attention` for the arguments of `attention_func`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp4mega.attention.backward_probes import first_entry, probe_backward
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.probes import probe
from fp4mega.attention.problem import AttentionProblem, Causal, SideInputs


def _asked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
) -> tuple[SideInputs, AttentionProblem]:
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
    return side, problem


@torch.no_grad()
def probe_forward(
    q: Tensor, k: Tensor, v: Tensor, *, policy: AttentionPolicy, **arguments: Any
) -> dict[str, float]:
    """Metrics by name of q [B, S, H, D], k [B, T, G, D], v [B, T, G, Dv]; keywords as in `attention_func`."""
    return probe(q, k, v, *_asked(q, k, v, **arguments), policy)


def watch_backward(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    into: dict[str, float],
    record: Callable[[dict[str, Tensor]], None] | None,
    policy: AttentionPolicy,
    **arguments: Any,
) -> None:
    """Add the metrics of `probe_backward` to `into` when the gradient of out [B, S, H, Dv] is known; keywords as in `attention_func`.

    `record` is given what they were measured on: q, k, v and dout of the first batch entry, [1, rows, heads, dim].
    """
    side, problem = _asked(q, k, v, **arguments)
    if problem.packed or not problem.batch:
        return
    side, problem = first_entry(side, problem)
    # A copy of one entry, so that nothing of the batch is held.
    first_q, first_k, first_v = (x[:1].detach().clone() for x in (q, k, v))

    def measure(dout: Tensor) -> None:
        into.update(probe_backward(first_q, first_k, first_v, dout[:1], side, problem, policy))
        if record is not None:
            record({"q": first_q, "k": first_k, "v": first_v, "dout": dout[:1].detach()})

    out.register_hook(measure)
