"""`fp4mega.attention` behind the backend contract: it defines the answer, so there is nothing to compute here."""

import torch
from torch import Tensor

from fp4mega.attention import Saved, backward, explain, forward, saved_spec
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.kernels.contract import Forward, Gradients, TensorSpec


class ReferenceBackend:
    """Attention in FP32 (FP64 for FP64 inputs) on any device, at the speed of a definition."""

    name = "reference"
    has_backward = True

    def explain(
        self, problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
    ) -> str | None:
        """None unless the policy itself has no meaning for this problem; the device never matters."""
        return explain(problem, policy)

    def saved_spec(
        self, problem: AttentionProblem, policy: AttentionPolicy
    ) -> tuple[TensorSpec, ...]:
        """Shape and dtype of every tensor that `forward` saves."""
        return tuple(TensorSpec(*spec) for spec in saved_spec(problem, policy))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Forward:
        """Attention, its log-sum-exp, and the bytes that `backward` reads."""
        return Forward(*forward(q, k, v, side, problem, policy))

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        forward: Forward,
        inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Gradients:
        """Gradients under `policy.backward`."""
        return Gradients(*backward(dout, dlse, Saved(*forward), inputs, side, problem, policy))
