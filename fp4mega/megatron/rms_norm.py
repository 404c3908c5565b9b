"""RMSNorm in plain torch that also runs under sequence parallelism, which Megatron's wrapped torch norms refuse."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight along the last dim, in the place of a norm of Megatron's local specs.

    Same numbers, parameter name and start as `torch.nn.RMSNorm`. Under sequence parallelism each rank holds a slice
    of the tokens; marking the weight makes Megatron add its gradients up over the tensor-parallel ranks.

    Raises ValueError for another normalization than RMSNorm, NotImplementedError for a zero-centered weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"normalization={config.normalization!r}: this spec has RMSNorm")
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                "layernorm_zero_centered_gamma=True: this RMSNorm has no zero-centered weight; allowed: False"
            )
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., hidden_size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
