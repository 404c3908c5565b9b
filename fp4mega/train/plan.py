"""What a recipe needs on machines that are not here: memory of each process, and what it sends over which link.

One process of every pipeline stage is imagined (`fp4mega.train.imagined`): its model, gradient buffers and optimizer are
built, one micro-batch goes forward and backward, and one update is made, all on the meta device by Megatron's own code. The
figures are what that code allocated and sent. Computed rather than watched are only the pipeline's own messages and the
number of micro-batches that its schedule holds at once.

docs/planning.md says what the figures leave out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fp4mega.attention import saved_spec
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.train.imagined import META, Message, Meter, imagined_process
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.validate import data_parallel_size, validate

SMALL_MESSAGE = 1024
"""Messages of fewer bytes (losses, norms, token counts) are left out of the tables."""

_GROUPS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "context",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "DATA_PARALLEL_GROUP": "data",
    "DATA_PARALLEL_GROUP_WITH_CP": "data",
    "EMBEDDING_GROUP": "embedding",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one process sends in an update to one group in one way. payload and sent: bytes an update."""

    when: str
    kind: str
    group: str
    ranks: tuple[int, ...]
    count: int
    payload: int
    sent: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One process of a pipeline stage; all bytes. The others of its stage need and send the same.

    held: activations of one micro-batch between its forward and its backward, in all model chunks of the process. in_flight:
    forwards, of one chunk each, whose backward is to come at once. forward_backward and update: the most that is held at
    once in each of the two, everything above included.
    """

    stage: int
    rank: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    held: int
    in_flight: int
    forward_backward: int
    update: int
    traffic: tuple[Traffic, ...]

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return max(self.forward_backward, self.update)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a whole job: its stages, and processes per stage."""

    recipe: Recipe
    world_size: int
    stages: tuple[StagePlan, ...]

    @property
    def processes_per_stage(self) -> int:
        """Processes that hold one pipeline stage, copies and parts together."""
        return self.world_size // len(self.stages)

    def total(self, figure: str) -> int:
        """Sum of a figure of `StagePlan` over all processes."""
        return self.processes_per_stage * sum(getattr(stage, figure) for stage in self.stages)


def make_plan(recipe: Recipe, world_size: int, device_type: str = "cuda") -> Plan:
    """Plan the recipe in `world_size` processes, one device of the type each. Takes seconds.

    Raises RecipeError where `validate` would, and for a mixture of experts.
    """
    validate(recipe, world_size, device_type)
    if recipe.model.num_moe_experts is not None:
        raise RecipeError(
            f"model.num_moe_experts={recipe.model.num_moe_experts}: what an expert holds and receives depends on the tokens "
            "routed to it, which a plan does not know; --plan allows: null"
        )
    # Kernels save what the reference saves, and it alone runs without a device.
    imagined = recipe.model_copy(
        update={"attention": recipe.attention.model_copy(update={"backend": "reference"})}
    )
    ranks = range(0, world_size, world_size // recipe.parallel.pipeline)
    device = torch.device(device_type)
    return Plan(
        recipe, world_size, tuple(_plan_stage(imagined, rank, world_size, device) for rank in ranks)
    )


def _plan_stage(recipe: Recipe, rank: int, world_size: int, device: torch.device) -> StagePlan:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from fp4mega.train.model import build_model, build_optimizer, transformer_config

    train = recipe.train
    micro_batches = train.global_batch_size // (
        train.micro_batch_size * data_parallel_size(recipe, world_size)
    )
    with imagined_process(recipe, rank, world_size) as meter:
        config = transformer_config(recipe, device)
        config.use_cpu_initialization = True  # the other way asks a GPU for random numbers
        chunks = build_model(recipe, config, META)
        optimizer, _ = build_optimizer(_with_fp32_state(recipe), chunks)
        optimizer.step()  # the first one makes AdamW's two moments
        optimizer.zero_grad()
        meter.take_messages()

        parameters = _storages(p for chunk in chunks for p in chunk.parameters())
        gradients = _storages(b.grad_data for chunk in chunks for b in chunk.buffers)
        kept = _storages(_optimizer_tensors(optimizer))
        optimizer_bytes = sum(kept[key] for key in kept.keys() - parameters.keys())
        if recipe.optimizer.state_dtype == "bf16":
            optimizer_bytes = (
                optimizer_bytes // 12 * 6
            )  # three FP32 numbers become three of 16 bits
        state = sum(parameters.values()) + sum(gradients.values()) + optimizer_bytes

        passes = [_micro_batch(chunk, recipe, config, meter) for chunk in chunks]
        in_flight, working = _schedule(passes, micro_batches)
        traffic = list(_summary("micro-batch", meter.take_messages(), micro_batches))
        traffic += _pipeline_traffic(recipe, config, len(chunks), micro_batches)

        meter.start_peak()
        before = meter.live
        finalize_model_grads(chunks, torch.zeros((), dtype=torch.int))
        optimizer.step()
        # Transformer Engine's AdamW, which a BF16 state needs, works in place.
        updating = 0 if recipe.optimizer.state_dtype == "bf16" else meter.peak - before
        traffic += _summary("update", meter.take_messages(), 1)
        return StagePlan(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            rank=rank,
            parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            parameter_bytes=sum(parameters.values()),
            gradient_bytes=sum(gradients.values()),
            optimizer_bytes=optimizer_bytes,
            held=sum(held for held, _ in passes),
            in_flight=in_flight,
            forward_backward=state + working,
            update=state + updating,
            traffic=tuple(traffic),
        )


def _with_fp32_state(recipe: Recipe) -> Recipe:
    """The recipe with the optimizer that Megatron has without Transformer Engine; it sends the same."""
    optimizer = recipe.optimizer.model_copy(update={"state_dtype": "fp32"})
    return recipe.model_copy(update={"optimizer": optimizer})


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage behind the tensors: views of one buffer count once."""
    return {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and the state of each."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _hidden(recipe: Recipe, config: Any) -> tuple[int, int, int]:
    """Shape [S, B, h] of the hidden state that this process hands to the next pipeline stage."""
    cut = recipe.parallel.context * (recipe.parallel.tensor if recipe.parallel.sequence else 1)
    return recipe.train.seq_length // cut, recipe.train.micro_batch_size, config.hidden_size


def _micro_batch(chunk: Any, recipe: Recipe, config: Any, meter: Meter) -> tuple[int, int]:
    """Forward and backward of one micro-batch: bytes held between the two, and the most held at once."""
    from megatron.core.utils import get_attr_wrapped_model

    train = recipe.train
    before = meter.live
    meter.start_peak()
    tokens = torch.zeros(
        train.micro_batch_size, train.seq_length // recipe.parallel.context, dtype=torch.int64
    )
    if not get_attr_wrapped_model(chunk, "pre_process"):
        received = torch.empty(
            _hidden(recipe, config), dtype=config.params_dtype, requires_grad=True
        )
        get_attr_wrapped_model(chunk, "set_input_tensor")(received)
        del received
    out = chunk(tokens, tokens, None, labels=tokens)
    if get_attr_wrapped_model(chunk, "post_process"):
        out = out.float().sum()
    held = meter.live - before
    torch.autograd.backward([out], [torch.empty_like(out)])
    return held, meter.peak - before


def _schedule(passes: Sequence[tuple[int, int]], micro_batches: int) -> tuple[int, int]:
    """Forwards that await their backward at most, and the bytes held at most, in Megatron's 1F1B schedule.

    `passes`: for each model chunk of this process what `_micro_batch` gives. Interleaved chunks take turns, each for as
    many micro-batches as there are stages; backward takes the chunks in the opposite order.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    total, _, warmup, _ = get_pp_rank_microbatches(micro_batches, len(passes), stages)
    turns = [i // stages % len(passes) for i in range(total)]
    now = sum(passes[chunk][0] for chunk in turns[:warmup])
    most = now
    for i, chunk in enumerate(turns):
        if warmup + i < total:
            now += passes[turns[warmup + i]][0]
        held, peak = passes[len(passes) - 1 - chunk]
        now -= held
        most = max(most, now + peak)
    return min(total, warmup + 1), most


def _summary(when: str, messages: Sequence[Message], times: int) -> Iterator[Traffic]:
    """Messages of one kind to one group taken together; `times` in an update."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[Message]] = {}
    for message in messages:
        if message.payload >= SMALL_MESSAGE:
            group = _GROUPS.get(message.group, message.group.lower())
            alike.setdefault((message.kind, group, message.ranks), []).append(message)
    for (kind, group, ranks), some in alike.items():
        payload, sent = sum(m.payload for m in some), sum(m.sent for m in some)
        yield Traffic(when, kind, group, ranks, len(some) * times, payload * times, sent * times)


def _pipeline_traffic(
    recipe: Recipe, config: Any, chunks: int, micro_batches: int
) -> Iterator[Traffic]:
    """Hidden states to the next stage, their gradients to the one before; interleaved stages form a ring."""
    from megatron.core import parallel_state

    ranks = torch.distributed.get_process_group_ranks(
        parallel_state.get_pipeline_model_parallel_group()
    )
    stages, here = len(ranks), parallel_state.get_pipeline_model_parallel_rank()
    if stages == 1:
        return
    size = prod(_hidden(recipe, config)) * config.params_dtype.itemsize
    for name, step, end in (("send hidden states", 1, stages - 1), ("send gradients", -1, 0)):
        # The model's two ends have nobody to send to.
        count = (chunks - (here == end)) * micro_batches
        if count:
            pair = (ranks[here], ranks[(here + step) % stages])
            yield Traffic("micro-batch", name, "pipeline", pair, count, count * size, count * size)


def attention_saves(problem: AttentionProblem, policy: AttentionPolicy) -> int:
    """Bytes that one attention layer keeps for the backward of one micro-batch.

    Output and log-sum-exp, the bytes and scales of quantized operands, and the operands that the policy leaves as they are.
    """
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    keys = problem.batch * problem.seqlen_k * problem.num_kv_heads
    size = problem.dtype.itemsize
    total = rows * problem.head_dim_v * size + rows * torch.float32.itemsize
    if policy.saves_input("q"):
        total += rows * problem.head_dim * size
    if policy.saves_input("k"):
        total += keys * problem.head_dim * size
    if policy.saves_input("v"):
        total += keys * problem.head_dim_v * size
    return total + sum(prod(shape) * dtype.itemsize for shape, dtype in saved_spec(problem, policy))
