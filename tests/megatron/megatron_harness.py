"""Tiny Megatron models on one CPU process, and an attention written from the definition to compare with."""

import copy
import math
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from fp4mega.megatron import Fp4CoreAttention, adapted_to_cpu

VOCAB, LENGTH = 64, 24


@contextmanager
def megatron_process(store: str, *, rank: int = 0, world_size: int = 1, tensor: int = 1):
    """A gloo process group over a file, Megatron's groups in it, and the CPU adaptation; all undone on leaving."""
    with adapted_to_cpu():
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
        model_parallel_cuda_manual_seed(1234, inference_rng_tracker=True, force_reset_rng=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def settings(**changes: Any) -> dict[str, Any]:
    base = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 64,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "init_method_std": 0.2,
    }
    return base | changes


def tiny_config(**changes: Any) -> TransformerConfig:
    return TransformerConfig(**settings(**changes))


def local_spec(mask_type: AttnMaskType = AttnMaskType.causal, **arguments: Any) -> Any:
    spec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm", **arguments))
    spec.submodules.self_attention.params["attn_mask_type"] = mask_type
    return spec


class WideValueDotProduct(DotProductAttention):
    """Megatron's local core with the two arguments that multi-latent attention passes and it does not take."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def latent(**changes: Any) -> tuple[MLATransformerConfig, Any]:
    """Config and local spec of multi-latent attention with Megatron's own core."""
    only_mla = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12,
        "rope_type": "rope",
        "num_query_groups": 4,
    }
    spec = local_spec(multi_latent_attention=True, qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = WideValueDotProduct
    return MLATransformerConfig(**settings(**only_mla, **changes)), spec


def build_gpt(
    config: TransformerConfig, spec: Any, *, like: torch.nn.Module | None = None
) -> GPTModel:
    torch.manual_seed(7)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model.train()


def batch(seed: int = 0, *, rows: int = 2, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(length).expand(rows, length),
        "labels": tokens[:, 1:].contiguous(),
    }


def loss_and_gradients(
    model: GPTModel,
    inputs: dict[str, torch.Tensor] | None = None,
    *,
    attention_mask: Any = None,
    **arguments: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = model(**(inputs or batch()), attention_mask=attention_mask, **arguments)
    losses.mean().backward()
    return losses.detach(), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(
    ours: tuple, theirs: tuple, *, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=atol)
    assert ours[1].keys() == theirs[1].keys()
    for name in theirs[1]:
        torch.testing.assert_close(
            ours[1][name], theirs[1][name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def core(
    config: TransformerConfig | None = None, cls: type = Fp4CoreAttention, **arguments: Any
) -> Any:
    """One core attention as Megatron's `Attention` builds it."""
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    arguments = (
        {
            "layer_number": 1,
            "attn_mask_type": AttnMaskType.causal,
            "attention_type": "self",
            "pg_collection": groups,
        }
        | ({"policy": "exact"} if cls is Fp4CoreAttention else {})
        | arguments
    )
    return cls(config or tiny_config(), **arguments)


def qkv(
    s: int = 9,
    t: int | None = None,
    *,
    b: int = 2,
    h: int = 4,
    g: int = 2,
    d: int = 16,
    dv: int = 16,
    seed: int = 0,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((s, b, h, d), (t or s, b, g, d), (t or s, b, g, dv))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax over the visible keys, in [s, b, h, d] layout; `hidden` broadcasts to [b, h, s, t]."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        extra = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    p = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("bhst,tbhd->sbhd", p, v).flatten(-2)


def assert_same_attention(
    ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor], *, tolerance: float = 2e-5
) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    dout = torch.linspace(-1, 1, ours.numel()).reshape(ours.shape)
    for name, a, b in zip(
        "qkv",
        torch.autograd.grad(ours, inputs, dout),
        torch.autograd.grad(theirs, inputs, dout),
        strict=True,
    ):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )
