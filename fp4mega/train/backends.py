"""Which backend computes each attention layer of a recipe, asked before anything is built."""

import torch

from fp4mega.attention.policy import get_policy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.kernels import select_backend
from fp4mega.parallel import backend_of
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.validate import layer_policies


def attention_problem(recipe: Recipe, layer: int) -> AttentionProblem:
    """What one process asks of attention in a layer (from 0) at each micro-batch of training."""
    model, train, parallel = recipe.model, recipe.train, recipe.parallel
    # By `a2a` a context-parallel process too computes whole sequences of a part of the heads.
    cut = parallel.tensor * (parallel.context if parallel.cp_comm_type == "a2a" else 1)
    skip = model.window_attn_skip_freq
    windowed = model.window_size is not None and (skip is None or (layer + 1) % skip != 0)
    left, right = model.window_size if windowed and model.window_size else (-1, -1)
    return AttentionProblem(
        batch=train.micro_batch_size,
        seqlen_q=train.seq_length,
        seqlen_k=train.seq_length,
        num_heads=model.num_attention_heads // cut,
        num_kv_heads=max(1, model.num_query_groups // cut),
        head_dim=model.kv_channels,
        head_dim_v=model.kv_channels,
        dtype=torch.bfloat16 if train.precision == "bf16" else torch.float32,
        softmax_scale=model.kv_channels**-0.5,
        causal="top_left",
        window=(None if left < 0 else left, None if right < 0 else right),
        sink=model.softmax_type != "vanilla",
    )


def asked_backend(recipe: Recipe) -> str:
    """`attention.backend`, or what `auto` is where context-parallel processes exchange bytes."""
    asked, parallel = recipe.attention.backend, recipe.parallel
    return backend_of(parallel.cp_comm_type, asked) if parallel.context > 1 else asked


def layer_backends(recipe: Recipe, device: torch.device) -> list[dict[str, int | str]]:
    """Layer (from 0), policy and backend of every layer, as the manifest records them.

    Raises RecipeError naming the backend and its reasons when a layer cannot run.
    """
    chosen: list[dict[str, int | str]] = []
    for layer, policy in enumerate(layer_policies(recipe)):
        try:
            backend = select_backend(
                asked_backend(recipe),
                attention_problem(recipe, layer),
                get_policy(policy),
                device,
            )
        except (NotImplementedError, ValueError) as error:
            raise RecipeError(f"attention.backend={recipe.attention.backend!r}: {error}") from None
        chosen.append({"layer": layer, "policy": policy, "backend": backend.name})
    return chosen
