"""One update and one evaluation of a model cut in any of Megatron's ways."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp4mega.parallel.zigzag import to_ranks
from fp4mega.train.data.datasets import Batches
from fp4mega.train.model import Training
from fp4mega.train.recipe import Recipe
from fp4mega.train.signals import STOP_SIGNALS, StopRequest


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one update reports. loss: mean over the global batch's tokens, in nats. stop: the signal to stop for, or 0."""

    loss: float
    grad_norm: float
    lr: float
    stop: int


def _loss_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over tokens, their number, and both in float64 for the report."""
    mask = loss_mask.reshape(-1)
    total = (losses.float().reshape(-1) * mask).sum()
    count = mask.sum()
    return total, count.to(torch.int), torch.stack([total.detach(), count]).double()


def _rows_of_this_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The chunks of the sequence that this context-parallel rank holds, of [micro_batch_size, seq_length] tensors."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    return {name: to_ranks(x, ranks)[rank] for name, x in batch.items()}


def _forward(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss_sum, batch["loss_mask"])


def _run(
    training: Training,
    recipe: Recipe,
    batches: Batches,
    batch: int,
    device: torch.device,
    *,
    forward_only: bool,
) -> Tensor:
    """Forward (and backward) over this process's micro-batches; returns [2] float64: sum of losses, number of tokens.

    Zero on processes that do not compute the loss, and on all but one of those that hold the same loss.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    micro_batches = [_rows_of_this_rank(loaded) for loaded in batches.load(batch, device)]
    reports = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[iter(micro_batches) for _ in training.chunks],
        model=training.chunks,
        num_microbatches=len(micro_batches),
        seq_length=recipe.train.seq_length,
        micro_batch_size=recipe.train.micro_batch_size,
        forward_only=forward_only,
    )
    mine = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    if not mine:
        return torch.zeros(2, dtype=torch.float64, device=device)
    return torch.stack(reports).sum(0)


def train_step(
    training: Training,
    recipe: Recipe,
    batches: Batches,
    step: int,
    device: torch.device,
    request: StopRequest,
) -> StepResult:
    """Update number `step` (from 0). All processes learn of a reason to stop that any of them had until its end."""
    for chunk in training.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    report = _run(training, recipe, batches, step, device, forward_only=False)
    lr = float(training.optimizer.param_groups[0]["lr"])
    _, grad_norm, _ = training.optimizer.step()
    if recipe.optimizer.clip_grad == 0:  # then Megatron does not compute it
        grad_norm = training.optimizer.get_grad_norm()
    training.scheduler.step(increment=1)

    # One sum over all processes carries the loss and the wish to stop, so that every process stops after the same step.
    asked = [float(request.signal == number) for number in STOP_SIGNALS]
    totals = torch.cat([report, torch.tensor(asked, dtype=torch.float64, device=device)])
    torch.distributed.all_reduce(totals)
    loss_sum, tokens, *votes = totals.tolist()
    stop = next((n for n, vote in zip(STOP_SIGNALS, votes, strict=True) if vote), 0)
    return StepResult(loss_sum / tokens, float(grad_norm), lr, int(stop))


@torch.no_grad()
def evaluate(training: Training, recipe: Recipe, batches: Batches, device: torch.device) -> float:
    """Mean loss in nats over the tokens of the first `eval_batches` validation batches: the same ones every time."""
    for chunk in training.chunks:
        chunk.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in range(recipe.train.eval_batches):
        totals += _run(training, recipe, batches, batch, device, forward_only=True)
    torch.distributed.all_reduce(totals)
    loss_sum, tokens = totals.tolist()
    return loss_sum / tokens
