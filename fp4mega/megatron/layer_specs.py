"""GPT layer specs with our core attention, as functions and as objects for `--spec fp4mega.megatron.layer_specs NAME`.

Megatron's `--spec` looks a name up among the attributes of this module and takes an object, not a function. The objects
are dense RMSNorm layers without query-key norms, of Transformer Engine where it is installed and of Megatron-Core where
it is not; whatever they do not fit is a few lines with the functions.
"""

from dataclasses import fields
from typing import Unpack

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from fp4mega.megatron.rms_norm import RMSNorm
from fp4mega.megatron.spec_provider import HAVE_TRANSFORMER_ENGINE, AttentionOptions
from fp4mega.megatron.swap import Spec, dataclasses_within, swap_core_attention

__all__ = [
    "bf16",
    "gpt_block_spec",
    "gpt_layer_spec",
    "mxfp4_qk_fp8_pv",
    "nvfp4_qk_fp8_pv",
    "swap_core_attention",
]

NORMALIZATIONS = ("RMSNorm", "LayerNorm")


def gpt_layer_spec(
    *,
    use_transformer_engine: bool | None = None,
    normalization: str = "RMSNorm",
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    **attention: Unpack[AttentionOptions],
) -> ModuleSpec:
    """The spec of one GPT layer, Megatron's own but for the core attention and, without Transformer Engine, RMSNorm.

    `use_transformer_engine=None` takes it where it is installed. `attention` are the options of `Fp4CoreAttention`;
    the others mean what they mean in Megatron's spec functions. Raises ValueError for an unknown normalization, an
    unknown policy, or Transformer Engine where it is missing.
    """
    _check_normalization(normalization)
    if _use_transformer_engine(use_transformer_engine):
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=moe_grouped_gemm,
            qk_layernorm=qk_layernorm,
            multi_latent_attention=multi_latent_attention,
        )
        return swap_core_attention(spec, **attention)
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=moe_grouped_gemm,
        qk_layernorm=qk_layernorm,
        multi_latent_attention=multi_latent_attention,
        normalization=normalization,
    )
    return _with_rms_norm(swap_core_attention(spec, **attention), normalization)


def gpt_block_spec(
    config: TransformerConfig,
    *,
    use_transformer_engine: bool | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    **attention: Unpack[AttentionOptions],
) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's decoder block, read from the configuration; the final norm included.

    Dense and expert layers alternate as `config.moe_layer_freq` says. Works under sequence parallelism without
    Transformer Engine too. Errors as for `gpt_layer_spec`.
    """
    _check_normalization(config.normalization)
    with_te = _use_transformer_engine(use_transformer_engine)
    spec = swap_core_attention(
        get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=with_te,
            normalization=config.normalization,
            vp_stage=vp_stage,
            pp_rank=pp_rank,
        ),
        **attention,
    )
    return spec if with_te else _with_rms_norm(spec, config.normalization)


def _check_normalization(normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: allowed: {', '.join(NORMALIZATIONS)}")


def _use_transformer_engine(asked: bool | None) -> bool:
    if asked and not HAVE_TRANSFORMER_ENGINE:
        raise ValueError(
            "use_transformer_engine=True, but transformer_engine is not installed; allowed here: False, None"
        )
    return HAVE_TRANSFORMER_ENGINE if asked is None else asked


def _with_rms_norm(spec: Spec, normalization: str) -> Spec:
    if normalization == "RMSNorm":
        for node in dataclasses_within(spec):
            for field in fields(node):
                if getattr(node, field.name) is WrappedTorchNorm:
                    setattr(node, field.name, RMSNorm)
            if isinstance(node, TransformerBlockSubmodules):
                # With apex installed Megatron puts its fused LayerNorm here, whatever the configuration says.
                node.layer_norm = RMSNorm
    return spec


bf16 = gpt_layer_spec(policy="bf16")
nvfp4_qk_fp8_pv = gpt_layer_spec(policy="nvfp4_qk_fp8_pv")
mxfp4_qk_fp8_pv = gpt_layer_spec(policy="mxfp4_qk_fp8_pv")
