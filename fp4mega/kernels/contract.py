"""The one interface of a backend: plain tensors in, plain tensors out; no autograd, no process group, no configuration.

A backend is stateless. `forward` returns the output, the log-sum-exp, and the tensors its own `backward` needs beside
them. An operand that the policy leaves unquantized is not among those: the caller keeps its own tensor and hands it back
(`AttentionPolicy.saves_input`), so nothing is held twice.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs


class Forward(NamedTuple):
    """out [B, S, H, Dv] in the inputs' dtype; lse [B, H, S] natural log, float32 (float64 for float64 inputs)."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """dq, dk, dv in the shapes and dtype of q, k, v; dsink [H] float32 (float64) or None without a sink."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


class TensorSpec(NamedTuple):
    """Shape and dtype of one saved tensor, known without data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Backend(Protocol):
    """How attention is computed. Same policy, same answer on every backend within the rounding rule."""

    name: str
    has_backward: bool
    """False where `backward` always raises. `auto` takes such a backend only for policies that serve inference."""

    def explain(
        self, problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
    ) -> str | None:
        """None when this backend can run, otherwise the reason in words a user can act on."""
        ...

    def saved_spec(
        self, problem: AttentionProblem, policy: AttentionPolicy
    ) -> tuple[TensorSpec, ...]:
        """What `forward` puts into `saved`, in order: the shapes behind `torch.compile` and the memory figures."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Forward:
        """Compute attention. Inputs may have any strides and are never written to."""
        ...

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
        """Gradients from the saved bytes. `inputs` holds q, k, v where `policy.saves_input` says so, otherwise None."""
        ...
