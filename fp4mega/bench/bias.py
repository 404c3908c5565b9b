"""Error of the attention gradient on one fixed batch, split into bias and noise over rounding draws, for each backward rule.

Every operand of P, V, dO and dS rounds stochastically, so that each draw is an unbiased picture of its operand and what is
left of the mean over draws is the doing of the rule. Q and K keep one rounding to nearest throughout: the operator, and so the
gradient that is compared with, is that of the represented Q and K with everything else exact.

With bias b and the spread of one draw s, both relative to the exact gradient, |mean of N draws - exact|^2 is b^2 + s^2 / N on
average; b below has the second term taken off. The `nearest` column is the error of the policy as it is, without a draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4mega.attention import AttentionPolicy, AttentionProblem, SideInputs, backward, get_policy
from fp4mega.attention.backward_probes import (
    forward_saved,
    relative_error,
    score_gradient_sums,
)

DEFAULT_POLICIES = (
    *("nvfp4_qk_mxfp4_pv-paper", "nvfp4_qk_mxfp4_pv-centered", "nvfp4_qk_mxfp4_pv"),
    *("nvfp4_qk_fp8_pv-paper", "nvfp4_qk_fp8_pv-centered", "nvfp4_qk_fp8_pv"),
)
DRAWN = ("p", "v", "do", "p_bwd", "ds", "v_bwd")
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Batch:
    """q [B,S,H,D], k and v [B,S,G,D], dout [B,S,H,D], causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def problem(self) -> AttentionProblem:
        """Causal self-attention with the usual scale."""
        return AttentionProblem.of(
            (self.q.shape, self.k.shape, self.v.shape),
            self.q.dtype,
            SideInputs(),
            softmax_scale=self.q.shape[-1] ** -0.5,
            causal="top_left",
            window=(None, None),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: for dq, dk, dv the error to nearest, and bias and noise over draws; the same of rowsum(dS) over sum |dS|."""

    policy: str
    nearest: tuple[float, float, float]
    bias: tuple[float, float, float]
    noise: tuple[float, float, float]
    row_sum_nearest: float
    row_sum_bias: float
    row_sum_noise: float


def make_batch(
    *,
    batch: int = 2,
    seqlen: int = 512,
    heads: int = 4,
    head_dim: int = 64,
    device: str,
    seed: int = 0,
) -> Batch:
    """Normal q, k, v, dout in FP32; k and v have a mean per channel, as trained projections do.

    Raises ValueError for a `seqlen` below 2.
    """
    if seqlen < 2:
        raise ValueError(f"seqlen={seqlen}: expected 2 or more; scores of one key have no gradient")
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, seqlen, heads, head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))
    k = k + torch.randn(heads, head_dim, generator=generator)
    v = v + torch.randn(heads, head_dim, generator=generator)
    return Batch(*(x.to(device) for x in (q, k, v, dout)))


def load_batch(path: Path, device: str) -> Batch:
    """A batch from a file of `torch.save({"q": ..., "k": ..., "v": ..., "dout": ...})`. Raises ValueError naming what is missing or odd."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    # Which exception a file that is none of torch.save's ends in depends on its first bytes.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path}: not readable as a file of torch.save: {reason}") from error
    names = ("q", "k", "v", "dout")
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError(f"{path}: expected a mapping with the tensors {', '.join(names)}")
    for name, x in content.items():
        if not isinstance(x, Tensor) or x.dim() != 4 or x.numel() == 0:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{path}: {name}={shape}: expected tensors of four dims, [batch, rows, heads, head_dim], none of them 0"
            )
        if x.is_complex() or not x.isfinite().all():
            raise ValueError(f"{path}: {name}: expected finite real numbers")
    if content["q"].shape[1] < 2:
        raise ValueError(
            f"{path}: q has one row, expected 2 or more; scores of one key have no gradient"
        )
    if content["dout"].shape != content["q"].shape:
        shapes = [list(content[name].shape) for name in ("dout", "q")]
        raise ValueError(f"{path}: dout={shapes[0]}: expected the shape of q, {shapes[1]}")
    return Batch(*(content[name].float() for name in names))


def drawn_policy(policy: AttentionPolicy) -> AttentionPolicy:
    """The policy with stochastic rounding of P, V, dO and dS, and Q and K of the gradient products left as the scores see them."""
    changes: dict[str, Any] = {
        name: f"{policy.operands[name]}+sr"
        for name in DRAWN
        if policy.operands[name].quantized and policy.operands[name].rounding == "nearest_even"
    }
    return replace(policy, name=f"{policy.name}-drawn", q_bwd="same", k_bwd="same", **changes)


def exact_policy(policy: AttentionPolicy) -> AttentionPolicy:
    """The operator of the policy's represented Q and K, with everything else exact."""
    return AttentionPolicy(
        name=f"{policy.name}-scores", q=policy.q, k=policy.k, p="none", v="none", max_rule="exact"
    )


def measure(batch: Batch, policy: AttentionPolicy, draws: int) -> Row:
    """Errors of one policy on the batch. Raises ValueError for fewer than two draws, and for an exact gradient of zero."""
    if draws < 2:
        raise ValueError(f"draws={draws}: expected 2 or more, to tell bias from noise")
    exact, _, size = _gradients(batch, exact_policy(policy), None)
    for name, x in zip((*GRADIENTS, "sum of |dS|"), (*exact, size), strict=True):
        if not 0 < float(x.double().norm()) < math.inf:
            raise ValueError(
                f"{name} of the exact gradient is zero or not finite: no error is relative to it"
            )
    plain = replace(policy, name=f"{policy.name}-plain", q_bwd="same", k_bwd="same")
    nearest, sums, sizes = _gradients(batch, plain, None)
    random = drawn_policy(policy)
    mean = [torch.zeros_like(x, dtype=torch.float64) for x in (*exact, size)]
    square = [torch.zeros((), dtype=torch.float64, device=size.device) for _ in mean]
    for draw in range(draws):
        key = torch.full((), draw, dtype=torch.int64, device=batch.q.device)
        gradients, row_sums, _ = _gradients(batch, random, key)
        for i, x in enumerate((*gradients, row_sums)):
            mean[i] += x.double() / draws
            square[i] += x.double().square().sum() / draws
    bias, noise = [], []
    for m, s, reference, scale in zip(
        mean, square, (*exact, torch.zeros_like(size)), (*exact, size), strict=True
    ):
        spread = (s - m.square().sum()).clamp(min=0) * draws / (draws - 1)
        off = (m - reference.double()).square().sum() - spread / draws
        bias.append((off.clamp(min=0).sqrt() / scale.double().norm()).item())
        noise.append((spread.sqrt() / scale.double().norm()).item())
    return Row(
        policy=policy.name,
        nearest=_three([relative_error(x, y) for x, y in zip(nearest, exact, strict=True)]),
        bias=_three(bias),
        noise=_three(noise),
        row_sum_nearest=(sums.norm() / sizes.norm()).item(),
        row_sum_bias=bias[3],
        row_sum_noise=noise[3],
    )


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return values[0], values[1], values[2]


def _gradients(
    batch: Batch, policy: AttentionPolicy, key: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """dq, dk, dv; rowsum(dS); rowsum(|dS|)."""
    side, problem = SideInputs(rounding_key=key), batch.problem
    saved, kept = forward_saved(batch.q, batch.k, batch.v, side, problem, policy)
    dq, dk, dv, _ = backward(batch.dout, None, saved, kept, side, problem, policy)
    total, size, _, _ = score_gradient_sums(batch.dout, saved, kept, side, problem, policy)
    return (dq, dk, dv), total, size


def run(policies: Sequence[str], batch: Batch, draws: int) -> list[Row]:
    """One row for each policy. Raises ValueError for an unknown policy and for one without quantized P, V, dO and dS to draw."""
    chosen = [get_policy(name) for name in policies]
    for policy in chosen:
        if not drawn_policy(policy).stochastic_operands:
            raise ValueError(f"policy {policy.name!r} rounds none of {', '.join(DRAWN)}")
    return [measure(batch, policy, draws) for policy in chosen]


def markdown(rows: Sequence[Row], draws: int) -> str:
    """The rows as a Markdown table."""
    head = [
        f"Relative to the exact gradient of the represented scores; bias and noise over {draws} draws.",
        "",
        "| policy | dq nearest | dq bias | dq noise | dk nearest | dk bias | dk noise | dv nearest | dv bias | dv noise "
        "| rowsum(dS) nearest | bias | noise |",
        "| --- |" + " --- |" * 12,
    ]
    lines = []
    for row in rows:
        cells = [
            x for i in range(len(GRADIENTS)) for x in (row.nearest[i], row.bias[i], row.noise[i])
        ]
        cells += [row.row_sum_nearest, row.row_sum_bias, row.row_sum_noise]
        lines.append(f"| `{row.policy}` | " + " | ".join(f"{x:.4f}" for x in cells) + " |")
    return "\n".join([*head, *lines])
