"""Two ranks of tensor and sequence parallelism give the gradients of one; 4-bit P and V are refused there."""

import pytest
import torch
import torch.multiprocessing
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron_harness import batch, build_gpt, megatron_process, tiny_config

from fp4mega.megatron import gpt_block_spec


def share(whole: torch.Tensor, like: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's part of a tensor that two ranks hold halves of, or all of it where both hold the same."""
    for axis, (total, part) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if total != part:
            return whole.chunk(2, axis)[rank]
    return whole


def train_once(weights: dict[str, torch.Tensor] | None, rank: int, **parallel):
    # Not gated: Megatron lays the gate and up projections out by rank, so halves of one layer are another function.
    config = tiny_config(
        softmax_type="learnable",
        gated_linear_unit=False,
        activation_func=torch.nn.functional.gelu,
        **parallel,
    )
    model = build_gpt(config, gpt_block_spec(config, policy="exact"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is not None:
                parameter.copy_(share(weights[name], parameter, rank))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    losses = wrapped(**batch(), attention_mask=None)
    losses.mean().backward()
    finalize_model_grads([wrapped])
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    return weights, losses.detach(), gradients


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    weights, expected_losses, expected = torch.load(f"{folder}/whole.pt")
    with megatron_process(f"{folder}/store", rank=rank, world_size=2, tensor=2):
        _, losses, gradients = train_once(
            weights, rank, tensor_model_parallel_size=2, sequence_parallel=True
        )
        torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            wanted = share(expected[name], gradient, rank)
            torch.testing.assert_close(
                gradient, wanted, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        config = tiny_config(tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match="allow_divergent_pv=False and 2 processes"):
            build_gpt(config, gpt_block_spec(config, policy="nvfp4_qk_mxfp4_pv"))


def test_two_ranks_equal_one(tmp_path):
    with megatron_process(str(tmp_path / "single")):
        whole = train_once(None, 0)
    assert min(gradient.abs().max() for gradient in whole[2].values()) > 1e-6
    torch.save(whole, tmp_path / "whole.pt")
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
