"""Megatron glue: the core attention module, specs that hold it, a policy for each layer, and running on a CPU."""

from fp4mega.megatron.core_attention import Fp4CoreAttention
from fp4mega.megatron.cpu import adapt_to_cpu, adapted_to_cpu
from fp4mega.megatron.layer_specs import gpt_block_spec, gpt_layer_spec
from fp4mega.megatron.model import (
    arm_probes,
    attention_layers,
    collect_probes,
    policies_by_layer,
    set_rounding_step,
)
from fp4mega.megatron.rms_norm import RMSNorm
from fp4mega.megatron.spec_provider import Fp4SpecProvider, core_attention_spec
from fp4mega.megatron.swap import swap_core_attention

__all__ = [
    "Fp4CoreAttention",
    "Fp4SpecProvider",
    "RMSNorm",
    "adapt_to_cpu",
    "adapted_to_cpu",
    "arm_probes",
    "attention_layers",
    "collect_probes",
    "core_attention_spec",
    "gpt_block_spec",
    "gpt_layer_spec",
    "policies_by_layer",
    "set_rounding_step",
    "swap_core_attention",
]
