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
    reported. `qkv_grad_norm` is of the gradient of that process's heads in the QKV projection, before clipping.
    """
    own = {layer - 1: dict(values) for layer, values in collect_probes(training.chunks).items()}
    clipped = min(1.0, clip_grad / (grad_norm + 1e-6)) if clip_grad > 0 else 1.0
    for chunk in training.chunks:
        for layer_number, norm in _qkv_grad_norms(chunk).items():
            if layer_number - 1 in own:
                own[layer_number - 1]["qkv_grad_norm"] = norm / clipped
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own)
    merged: dict[int, dict[str, float]] = {}
    for figures in reversed(gathered):
        merged |= figures
    return dict(sorted(merged.items()))


def _qkv_grad_norms(chunk: Any) -> dict[int, float]:
    """Norm of the gradient of each QKV projection by layer number. Collective among data-parallel processes."""
    weights = {
        module.layer_number: module.linear_qkv.weight
        for module in chunk.modules()
        if hasattr(getattr(getattr(module, "linear_qkv", None), "weight", None), "main_grad")
    }
    if not weights:
        return {}
    if not chunk.ddp_config.use_distributed_optimizer:
        return {layer: float(w.main_grad.float().norm()) for layer, w in weights.items()}
    # Each process has the sum over all of them in its own shard of a bucket only, beside what it alone had.
    shards = {}
    for buffer in chunk.buffers:
        group = buffer.data_parallel_group
        for weight, (begin, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            size = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * size - begin
            shards[weight] = slice(max(first, 0), max(min(first + size, end - begin), 0))
    squares = torch.stack(
        [w.main_grad.view(-1)[shards[w]].float().norm().square() for w in weights.values()]
    )
    torch.distributed.all_reduce(squares, group=group)
    return dict(zip(weights, squares.sqrt().tolist(), strict=True))


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
