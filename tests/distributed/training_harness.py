"""Training a tiny recipe on any number of ranks from one common start, and its gradients put together again by name."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)

from fp4mega.testing.distributed import World
from fp4mega.train import checkpoint
from fp4mega.train.data.datasets import Batches
from fp4mega.train.launch import seed_everything, start_model_parallel
from fp4mega.train.model import Training, build_training
from fp4mega.train.recipe import Recipe
from fp4mega.train.signals import StopRequest
from fp4mega.train.step import train_step

VOCAB, LENGTH = 64, 32


def content(**sections: dict[str, Any]) -> dict[str, Any]:
    """The recipe of these tests, with fields of its sections replaced: 4 layers, 4 micro-batches of one sample."""
    base: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 4,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "vocab_size": VOCAB,
            "init_method_std": 0.1,
        },
        "attention": {"policy": "nvfp4_qk_fp8_pv", "backend": "reference"},
        "parallel": {},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 1, "clip_grad": 0.0},
        "data": {"kind": "mock"},
        "train": {
            "seq_length": LENGTH,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "steps": 3,
            "precision": "fp32",
        },
    }
    return {"name": "t", **{k: {**v, **sections.get(k, {})} for k, v in base.items()}}


class Sequences:
    """Samples by position: a walk through the vocabulary that a model can learn, with noise that it cannot."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        steps = torch.randint(1, 4, (LENGTH + 1,), generator=generator)
        tokens = (steps.cumsum(0) + index) % VOCAB
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "position_ids": torch.arange(LENGTH),
            "loss_mask": torch.ones(LENGTH),
        }


def build(world: World, recipe: Recipe, *, overlap: bool = False) -> tuple[Training, Batches]:
    """Megatron's groups, and the recipe's model cut over them."""
    start_model_parallel(recipe.parallel)
    seed_everything(recipe.train.seed, world.device)
    training = build_training(recipe, world.device, overlap=overlap)
    place = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return training, Batches(Sequences(), recipe, *place)


def _model(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _model_state(training: Training) -> dict[str, Any]:
    return {
        f"model{i}": _model(chunk).sharded_state_dict() for i, chunk in enumerate(training.chunks)
    }


def save_weights(training: Training, folder: Path) -> None:
    folder.mkdir()
    checkpoint._write_in_this_process()
    dist_checkpointing.save(_model_state(training), str(folder))


def load_weights(training: Training, folder: Path) -> None:
    state = dist_checkpointing.load(_model_state(training), str(folder))
    for i, chunk in enumerate(training.chunks):
        _model(chunk).load_state_dict(state[f"model{i}"], strict=True)
    training.optimizer.reload_model_params()


def _gather_gradient_shards(chunk: Any) -> None:
    """A distributed optimizer leaves each rank the sum over ranks of its own part only: fetch the others."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def whole_gradients(training: Training, recipe: Recipe) -> dict[str, torch.Tensor] | None:
    """Gradient of every parameter of the uncut model by its name in a checkpoint, on rank 0. Collective.

    Megatron's own map from parts to the whole, that of its checkpoints, says where each part belongs: layers of pipeline
    stages, rows and columns of tensor-parallel ranks, the halves of SwiGLU, experts. Parts that several ranks hold are
    equal on all of them, or this fails.
    """
    pieces = []
    for chunk in training.chunks:
        if recipe.optimizer.distributed:
            _gather_gradient_shards(chunk)
        sharded = {
            name: replace(item, data=item.data.main_grad)
            for name, item in _model(chunk).sharded_state_dict().items()
            if isinstance(item, ShardedTensor | ShardedTensorFactory)
        }
        apply_factories(sharded)
        pieces += [
            (
                item.key,
                item.global_shape,
                item.global_offset,
                item.prepend_axis_num,
                item.data.cpu(),
            )
            for item in nested_values(sharded)
        ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    if dist.get_rank():
        return None
    wholes: dict[str, torch.Tensor] = {}
    for key, shape, offset, prepended, data in (piece for part in gathered for piece in part):
        whole = wholes.setdefault(key, torch.full(shape, torch.nan))
        place = (
            *offset[:prepended],
            *(slice(o, o + n) for o, n in zip(offset[prepended:], data.shape, strict=True)),
        )
        if not whole[place].isnan().all():
            torch.testing.assert_close(whole[place], data, rtol=1e-5, atol=1e-8)
        whole[place] = data
    return wholes


def train(world: World, plain: dict[str, Any], start: str, overlap: bool = False) -> dict[str, Any]:
    """Train the recipe's steps from the weights in `start`, which one rank alone writes first when they are not there.

    Returns losses and gradient norms by step, and on rank 0 the gradients of the first step.
    """
    recipe = Recipe.parse(plain)
    training, batches = build(world, recipe, overlap=overlap)
    if Path(start).exists():
        load_weights(training, Path(start))
    else:
        assert world.size == 1
        save_weights(training, Path(start))
    results, gradients = [], None
    for step in range(recipe.train.steps):
        with StopRequest() as request:
            result = train_step(training, recipe, batches, step, world.device, request)
        results.append((result.loss, result.grad_norm))
        if step == 0:
            gradients = whole_gradients(training, recipe)
    parallel_state.destroy_model_parallel()
    return {"curve": results, "gradients": gradients}


def train_on(
    world: World, plain: dict[str, Any], folder: str, last: int, saves: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Go on from the newest checkpoint in `folder`, or from the start, up to step `last`, saving after some steps.

    Returns losses and gradient norms by step, and a digest of this rank's weights and optimizer state at the end.
    """
    recipe = Recipe.parse(plain)
    training, batches = build(world, recipe)
    curve = go_on(world, training, batches, recipe, Path(folder), last, saves)
    digest = state_digest(training)
    parallel_state.destroy_model_parallel()
    return {"curve": curve, "state": digest}


def go_on(
    world: World,
    training: Training,
    batches: Any,
    recipe: Recipe,
    folder: Path,
    last: int,
    saves: tuple[int, ...] = (),
    look: Callable[[int], None] = lambda step: None,
) -> list[tuple[float, float]]:
    """From the newest checkpoint in `folder`, or from the start, to step `last`; losses and gradient norms by step.

    `look` is called with the step on arriving and after each save.
    """
    newest = checkpoint.newest_checkpoint(folder)
    done = 0 if newest is None else checkpoint.load_checkpoint(newest, training, recipe)
    look(done)
    curve = []
    for step in range(done, last):
        with StopRequest() as request:
            result = train_step(training, recipe, batches, step, world.device, request)
        curve.append((result.loss, result.grad_norm))
        if step + 1 in saves:
            checkpoint.save_checkpoint(folder, step + 1, training, recipe, "data")
            look(step + 1)
    return curve


def state_digest(training: Training) -> str:
    """SHA-256 of every parameter and of every tensor of the inner optimizers, in order."""
    digest = hashlib.sha256()

    def add(tensor: torch.Tensor) -> None:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())

    for chunk in training.chunks:
        for _, parameter in sorted(chunk.named_parameters()):
            add(parameter)
    for part in training.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                add(parameter)
                for _, value in sorted(part.optimizer.state[parameter].items()):
                    add(value)
    return digest.hexdigest()
