"""What the core attention module cannot do, said before anything is built.

Every setting of Megatron's `TransformerConfig` that asks attention for something is either honoured by
`Fp4CoreAttention` or refused here with the reason; none is dropped silently.
"""

from importlib.util import find_spec

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from fp4mega.attention.policy import DIVERGENT_PV_REASON, AttentionPolicy
from fp4mega.attention.problem import MAX_HEAD_DIM, AttentionProblem
from fp4mega.kernels import select_backend
from fp4mega.parallel import explain_exchange

ATTENTION_TYPES = ("self", "cross")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


def check_config(
    config: TransformerConfig,
    *,
    attention_type: str,
    attention_dropout: float | None,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Raise NotImplementedError (or ValueError for an unknown name) where the module cannot do what is asked."""
    if attention_type not in ATTENTION_TYPES:
        raise ValueError(
            f"attention_type={attention_type!r}: allowed: {', '.join(ATTENTION_TYPES)}"
        )
    if config.softmax_type not in SOFTMAX_TYPES:
        raise ValueError(
            f"softmax_type={config.softmax_type!r}: allowed: {', '.join(SOFTMAX_TYPES)}"
        )
    cp_group = getattr(pg_collection, "cp", None)
    cp_size = 1 if cp_group is None else cp_group.size()
    if cp_size != config.context_parallel_size:
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size}: the context-parallel group of this layer has {cp_size} ranks"
        )
    mode = getattr(config, "cp_partition_mode", None) or "zigzag"  # later Megatrons have another
    if cp_size > 1 and mode != "zigzag":
        raise NotImplementedError(
            f"cp_partition_mode={mode!r} with context_parallel_size={cp_size}: allowed: zigzag"
        )
    if cp_size > 1 and attention_type == "cross":
        raise NotImplementedError(
            f"attention_type='cross' with context_parallel_size={cp_size}: queries and keys are not chunks of one sequence; "
            "allowed: self"
        )
    dropout = config.attention_dropout if attention_dropout is None else attention_dropout
    if dropout:
        raise NotImplementedError(
            f"attention_dropout={dropout}: probabilities are never held as a whole, so none can be dropped; "
            "set attention_dropout=0.0 (Megatron's own default is 0.1)"
        )
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{name}=True: the largest attention logit is not returned by Fp4CoreAttention; allowed: False"
            )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{name}=True asks Transformer Engine for FP8 attention; here the policy names the formats; "
                "allowed: False"
            )
    if getattr(config, "flash_decode", False):
        raise NotImplementedError(
            "flash_decode=True: Megatron then decodes past the core attention, unquantized and without its window and sink; "
            "allowed: False"
        )
    if config.attention_backend == AttnBackend.local:
        raise NotImplementedError(
            "attention_backend=local: Megatron Bridge and megatron.training replace the core attention of every "
            "spec by DotProductAttention under this setting; use auto"
        )
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        raise NotImplementedError(
            "experimental_attention_variant='dsa': its core attention selects keys with an indexer of its own and "
            "is not a dot-product core; allowed: None"
        )


def check_head_dims(head_dim: int, head_dim_v: int) -> None:
    """Raise NotImplementedError for a head dim of q and k, or of v, beyond what any backend has."""
    for name, value in (("head dim of query and key", head_dim), ("head dim of value", head_dim_v)):
        if value > MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} = {value}: allowed: 1 to {MAX_HEAD_DIM}")


def explain_latent_training(config: TransformerConfig, tensor_ranks: int) -> str | None:
    """Why multi-latent attention over tensor-parallel ranks would train on wrong gradients; None when it would not.

    The rotary part of the key is one for all heads, so its gradient is a sum over the heads of all ranks. Megatron sums it
    only where a Transformer Engine linear makes it under sequence parallelism (NVIDIA/Megatron-LM issue 1699).
    """
    if not config.multi_latent_attention or tensor_ranks == 1:
        return None
    if config.sequence_parallel and find_spec("transformer_engine") is not None:
        return None
    return (
        f"multi_latent_attention=True with tensor_model_parallel_size={tensor_ranks} and sequence_parallel="
        f"{config.sequence_parallel}: this Megatron does not sum the gradient of the key's rotary part over tensor-parallel "
        "ranks (NVIDIA/Megatron-LM issue 1699), whatever the core attention, so that every weight below it gets a wrong "
        "gradient; allowed in training: tensor_model_parallel_size=1, or sequence_parallel=True with Transformer Engine's layers"
    )


def check_policy(policy: AttentionPolicy, *, allow_divergent_pv: bool) -> None:
    """Raise ValueError for 4-bit P or V in a job of several processes, unless it is allowed by name."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world_size > 1 and policy.four_bit_pv and not allow_divergent_pv:
        raise ValueError(
            f"policy={policy.name!r} with allow_divergent_pv=False and {world_size} processes: {DIVERGENT_PV_REASON}"
        )


def check_context_parallel(
    exchange: str,
    policy: AttentionPolicy,
    backend: str,
    *,
    ranks: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raise NotImplementedError when the ranks cannot exchange keys this way; what depends on lengths is said by the first forward."""
    reason = explain_exchange(
        exchange,
        policy,
        ranks=ranks,
        backend=backend,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    if reason is not None:
        raise NotImplementedError(f"context_parallel_size={ranks}: {reason}")


def check_backend(
    backend: str,
    policy: AttentionPolicy,
    config: TransformerConfig,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
) -> None:
    """Raise NotImplementedError when no backend, or not the one named, can run this layer on this machine.

    Asked on a short causal sequence, since lengths are not known yet: what depends on them is said by the first forward.
    """
    problem = AttentionProblem(
        batch=1,
        seqlen_q=policy.tile_n,
        seqlen_k=policy.tile_n,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=config.params_dtype,
        softmax_scale=1.0,
        causal="top_left",
        sink=config.softmax_type != "vanilla",
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    select_backend(backend, problem, policy, device)
