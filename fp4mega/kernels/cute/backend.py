"""The backend: prepares operands, launches the kernel, saves the reference's bytes. CUTLASS is imported on first use only."""

import torch
from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem, SideInputs
from fp4mega.kernels.contract import Forward, Gradients, TensorSpec
from fp4mega.kernels.cute import support
from fp4mega.kernels.cute.launch import multiprocessors, prepare_forward


class CuteSm100Backend:
    """Attention forward in CuTe DSL kernels for NVIDIA Blackwell (sm_100): 4-bit scores, FP8 P/V or Direct-P."""

    name = "cute_sm100"
    has_backward = False

    def explain(
        self, problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
    ) -> str | None:
        """None when the kernels compute exactly this policy and problem on this device."""
        return support.explain(problem, policy, device)

    def saved_spec(
        self, problem: AttentionProblem, policy: AttentionPolicy
    ) -> tuple[TensorSpec, ...]:
        """The reference's bytes and statistics."""
        return support.saved_spec(problem, policy)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        side: SideInputs,
        problem: AttentionProblem,
        policy: AttentionPolicy,
    ) -> Forward:
        """Attention, its log-sum-exp, and the reference's saved bytes."""
        from fp4mega.kernels.cute.compile import launch

        with torch.cuda.device(q.device):
            call = prepare_forward(q, k, v, side, problem, policy, launch)
            launch(call.config, call.tensors, call.numbers(multiprocessors(q.device)))
            return call.finish()

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
        """Raises NotImplementedError: there are forward kernels only."""
        raise NotImplementedError(support.BACKWARD_REASON)
