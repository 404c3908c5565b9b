"""A recipe's model, optimizer and schedule, built from Megatron-Core's parts."""

import hashlib
import inspect
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fp4mega.train.expert_start import experts_drawn_whole
from fp4mega.train.recipe import ParallelSection, Recipe, RecipeError

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Training:
    """What a step works on. `chunks`: one Megatron DDP module for each virtual pipeline stage of this process."""

    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any


def _lost_share_of_balancing(parallel: ParallelSection) -> int:
    """By what Megatron divides the gradient of the load-balancing loss too often when the loss is averaged over tokens.

    That divides gradients by the tokens of all processes, and the router makes up for those of its own process. Where tensor
    and context parallelism share a sequence out, these are too few: megatron-core 0.16.1 to 0.18.2 (NVIDIA/Megatron-LM issue
    1652), repaired in 0.19.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    attach = inspect.getsource(TopKRouter.attach_and_log_load_balancing_loss)
    if "self.tp_cp_group.size()" in attach:
        return 1
    return (parallel.tensor if parallel.sequence else 1) * parallel.context


def transformer_config(recipe: Recipe, device: torch.device) -> Any:
    """Megatron's TransformerConfig: RMSNorm, SwiGLU, no biases, no dropout, loss averaged over tokens."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, parallel = recipe.model, recipe.parallel
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {}
    if model.num_moe_experts is not None:
        options = {
            "num_moe_experts": model.num_moe_experts,
            "moe_router_topk": model.moe_router_topk,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2 * _lost_share_of_balancing(parallel),
        }
    if recipe.train.recompute == "core_attn":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif recipe.train.recompute == "full":
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        qk_layernorm=model.qk_layernorm,
        window_size=model.window_size,
        window_attn_skip_freq=model.window_attn_skip_freq,
        softmax_type=model.softmax_type,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        init_method_std=model.init_method_std,
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=recipe.train.precision == "bf16",
        params_dtype=_DTYPES[recipe.train.precision],
        pipeline_dtype=_DTYPES[recipe.train.precision],
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        cp_comm_type=parallel.cp_comm_type,
        expert_model_parallel_size=parallel.expert,
        sequence_parallel=parallel.sequence,
        calculate_per_token_loss=True,
        # On the CPU weights are drawn whole and then cut, so a model starts the same however it is cut, but for stages of a
        # pipeline, which have seeds of their own.
        use_cpu_initialization=not on_gpu,
        # Interleaved stages on two ranks send activations and gradients between the same pair at once. A batch of sends and
        # receives would pair them by position, one for the other; the overlapped form has a channel for each direction.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=on_gpu and parallel.virtual_pipeline is None,
        # Megatron's fusions are torch.compile'd functions: on a CPU compiling them costs more than they save.
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        # These come with apex or Transformer Engine only.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **options,
    )


def build_model(
    recipe: Recipe, config: Any, device: torch.device, *, overlap: bool | None = None
) -> list[Any]:
    """One GPTModel for each virtual pipeline stage of this process, wrapped for its precision and for data parallelism.

    `overlap`: reduce gradients, and with a distributed optimizer gather parameters, while computing; None: on a GPU.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from fp4mega.megatron import gpt_block_spec

    overlap = device.type == "cuda" if overlap is None else overlap
    attention = recipe.attention
    stages: list[int | None] = (
        [None]
        if recipe.parallel.virtual_pipeline is None
        else list(range(recipe.parallel.virtual_pipeline))
    )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=recipe.optimizer.state_dtype == "fp32",
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and recipe.optimizer.distributed,
        use_distributed_optimizer=recipe.optimizer.distributed,
    )
    build = experts_drawn_whole()(GPTModel) if config.use_cpu_initialization else GPTModel
    chunks = []
    for stage in stages:
        model: Any = build(
            config=config,
            transformer_layer_spec=gpt_block_spec(
                config,
                vp_stage=stage,
                policy=attention.policy,
                backend=attention.backend,
                layers=[(rule.match, rule.policy) for rule in attention.layers],
                allow_divergent_pv=attention.allow_divergent_pv,
                rounding_seed=recipe.train.seed,
            ),
            vocab_size=recipe.model.vocab_size,
            max_sequence_length=recipe.train.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            share_embeddings_and_output_weights=recipe.model.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=recipe.model.rotary_base,
            vp_stage=stage,
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.to(device)
        if config.bf16:
            model = Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(config, ddp_config, model, disable_bucketing=bool(stage))
        )
    return chunks


def check_installed(recipe: Recipe) -> None:
    """Raise RecipeError when the recipe needs a package that is not there."""
    if recipe.optimizer.state_dtype == "bf16" and find_spec("transformer_engine") is None:
        raise RecipeError(
            "optimizer.state_dtype=bf16: Megatron's precision-aware optimizer needs Transformer Engine, which is not "
            "installed (pip install 'fp4mega[te]'); allowed without it: fp32"
        )


def _state_options(dtype: str) -> dict[str, Any]:
    """Megatron's precision-aware optimizer: gradients and moments in BF16, FP32 weights kept as BF16 plus a remainder."""
    if dtype == "fp32":
        return {}
    return {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.bfloat16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "store_param_remainders": True,
    }


def build_optimizer(recipe: Recipe, chunks: list[Any]) -> tuple[Any, Any]:
    """Megatron's AdamW over the chunks, and the schedule of its learning rate in updates."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    section = recipe.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            min_lr=section.min_lr,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            weight_decay=section.weight_decay,
            clip_grad=section.clip_grad,
            bf16=recipe.train.precision == "bf16",
            params_dtype=_DTYPES[recipe.train.precision],
            use_distributed_optimizer=section.distributed,
            **_state_options(section.state_dtype),
            overlap_param_gather=section.distributed and chunks[0].ddp_config.overlap_param_gather,
        ),
        chunks,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=recipe.decay_steps,
        lr_decay_style=section.decay_style,
        # The scheduler overwrites the optimizer's weight decay, so both must say the same.
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=recipe.decay_steps,
        wd_incr_style="constant",
        # A resumed run keeps its position; the schedule's shape comes from the recipe.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, scheduler


def build_training(
    recipe: Recipe, device: torch.device, *, overlap: bool | None = None
) -> Training:
    """Model, optimizer and schedule of this process. Needs process groups and seeds; `overlap` as in `build_model`."""
    from megatron.core.distributed import finalize_model_grads

    config = transformer_config(recipe, device)
    chunks = build_model(recipe, config, device, overlap=overlap)
    optimizer, scheduler = build_optimizer(recipe, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        hooks = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = hooks[0] if len(hooks) == 1 else hooks
    if chunks[0].ddp_config.overlap_param_gather:
        syncs = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = syncs[0] if len(syncs) == 1 else syncs
    return Training(config, chunks, optimizer, scheduler)


def initial_fingerprint(chunks: list[Any]) -> str:
    """SHA-256 over names, shapes and values of all parameters of all processes: equal for runs that start the same.

    Collective. Every process hashes its own parameters in the order of their names; the digests are hashed in the order
    of ranks, each different one once, so that data-parallel copies do not count.
    """
    digest = hashlib.sha256()
    for i, chunk in enumerate(chunks):
        for name, parameter in sorted(chunk.named_parameters()):
            value = parameter.detach().cpu().contiguous()
            digest.update(f"{i} {name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.view(torch.uint8).numpy())
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, digest.hexdigest())
    return hashlib.sha256("".join(dict.fromkeys(gathered)).encode()).hexdigest()
