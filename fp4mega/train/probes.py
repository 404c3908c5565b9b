"""Per-layer probes of one step, collected from every process that holds layers, and the tensors they looked at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4mega.megatron import collect_probes
from fp4mega.train.model import Training


def gather_probes(
    training: Training, grad_norm: float, clip_grad: float
) -> dict[int, dict[str, float]]:
    """Figures of each layer (from 0) since `arm_probes`; `qkv_grad_norm` beside attention's own. Collective.

    Tensor-parallel and data-parallel copies of a layer measure their own heads and samples; those of the lowest rank are
    reported. `qkv_grad_norm` is that process's share of the gradient of the QKV projection before clipping.
    """
    own = {layer - 1: dict(values) for layer, values in collect_probes(training.chunks).items()}
    clipped = min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0
    for chunk in training.chunks:
        for module in chunk.modules():
            weight = getattr(getattr(module, "linear_qkv", None), "weight", None)
            gradient = getattr(weight, "main_grad", None)
            if gradient is not None and module.layer_number - 1 in own:
                own[module.layer_number - 1]["qkv_grad_norm"] = (
                    float(gradient.float().norm()) / clipped
                )
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    merged: dict[int, dict[str, float]] = {}
    for figures in reversed(gathered):
        merged |= figures
    return dict(sorted(merged.items()))


def recorder(folder: Path, step: int) -> Callable[[int, dict[str, Tensor]], None] | None:
    """What writes a layer's probed tensors to `<folder>/probes/<step>_<layer>.pt`, the layer from 0, for `fp4mega.bench bias --input`.

    None on processes that hold a copy of the layer or others of its heads: only the first of them writes.
    """
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank() or parallel_state.get_tensor_model_parallel_rank():
        return None

    def record(layer_number: int, tensors: dict[str, Tensor]) -> None:
        path = folder / "probes" / f"{step:06d}_{layer_number - 1:02d}.pt"
        path.parent.mkdir(exist_ok=True)
        # Storage of its own for each: what is a view of a batch would bring the batch along.
        torch.save({name: x.cpu().clone() for name, x in tensors.items()}, path)

    return record
