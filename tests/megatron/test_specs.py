"""Specs: what is swapped, what is kept, and that the spec handed in is left alone.

Transformer Engine is not installed here. Its specs differ from Megatron's own in the classes they name, so a spec of the
same dataclasses with stand-in classes shows that the swap finds its way; it is not run.
"""

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron_harness import tiny_config

from fp4mega.megatron import (
    Fp4CoreAttention,
    Fp4SpecProvider,
    RMSNorm,
    core_attention_spec,
    gpt_block_spec,
    gpt_layer_spec,
    swap_core_attention,
)
from fp4mega.megatron.swap import dataclasses_within


class FusedAttention:
    """Stands for the core attention of a Transformer Engine spec."""


class FusedNormLinear:
    """Stands for the fused norm and projection of a Transformer Engine spec."""


def fused_layer(core: Any = FusedAttention) -> ModuleSpec:
    """A layer in the shape of Transformer Engine's: norms fused into projections."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=FusedNormLinear, core_attention=core, linear_proj=FusedNormLinear
        ),
    )
    return ModuleSpec(
        module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=attention)
    )


@dataclass
class StackSubmodules:
    """Kinds of layers of one stack, one of them with an attention that selects its keys."""

    attention_layer: Any
    sparse_layer: Any = None


SELECTING = ModuleSpec(module=FusedAttention, submodules=StackSubmodules(None))


def cores(spec: Any) -> list[Any]:
    found = [n.core_attention for n in dataclasses_within(spec) if hasattr(n, "core_attention")]
    return [core.module if isinstance(core, ModuleSpec) else core for core in found]


SPECS = {
    "layer": (get_gpt_layer_local_spec, 1),
    "experts": (lambda: get_gpt_layer_local_spec(num_experts=4), 1),
    "multi-latent": (lambda: get_gpt_layer_local_spec(multi_latent_attention=True), 1),
    "fused": (fused_layer, 1),
    "block": (
        lambda: TransformerBlockSubmodules(
            layer_specs=[fused_layer(), get_gpt_layer_local_spec(num_experts=2)]
        ),
        2,
    ),
    "hybrid": (
        lambda: ModuleSpec(
            module=MambaStack, submodules=MambaStackSubmodules(attention_layer=fused_layer())
        ),
        1,
    ),
    "partial": (
        lambda: ModuleSpec(
            module=MambaStack, submodules=partial(dict, layers={"a": (fused_layer(),)})
        ),
        1,
    ),
    "our-own": (lambda: gpt_layer_spec(policy="bf16"), 1),
    "stock-with-params-of-none": (lambda: fused_layer(ModuleSpec(module=DotProductAttention)), 1),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_self_attention_is_swapped_in_a_copy(name, caplog):
    make, count = SPECS[name]
    spec = make()
    before = copy.deepcopy(spec)
    with caplog.at_level(logging.INFO, logger="fp4mega"):
        swapped = swap_core_attention(spec, policy="mxfp4_qk_fp8_pv", layers=[("layers.0", "bf16")])
    assert cores(swapped) == [Fp4CoreAttention] * count
    assert f"core attention of {count} self-attention" in caplog.text
    assert cores(spec) == cores(before)
    assert type(swapped) is type(spec)
    assert [type(n) for n in dataclasses_within(spec)] == [
        type(n) for n in dataclasses_within(before)
    ]


def test_a_layer_shared_by_a_block_stays_shared():
    layer = get_gpt_layer_local_spec()
    swapped = swap_core_attention(TransformerBlockSubmodules(layer_specs=[layer] * 3))
    assert len({id(spec) for spec in swapped.layer_specs}) == 1
    assert cores(swapped) == [Fp4CoreAttention]


@pytest.mark.usefixtures("megatron")
def test_what_a_spec_names_is_not_copied():
    """A process group cannot be, and a generator would draw apart from its original."""
    group, generator = torch.distributed.group.WORLD, torch.Generator()
    spec = fused_layer()
    spec.params = {"group": group, "options": {"generator": generator}}
    swapped = swap_core_attention(spec)
    assert swapped.params == spec.params
    assert swapped.params["options"] is not spec.params["options"]
    assert swapped.params["group"] is group
    assert swapped.params["options"]["generator"] is generator


def test_cross_attention_keeps_its_core():
    swapped = swap_core_attention(decoder_model_with_local_spec())
    layer = swapped.submodules
    assert layer.self_attention.submodules.core_attention.module is Fp4CoreAttention
    assert layer.cross_attention.submodules.core_attention is DotProductAttention


def test_a_core_with_modules_of_its_own_is_kept(caplog):
    stack = StackSubmodules(attention_layer=fused_layer(), sparse_layer=fused_layer(SELECTING))
    with caplog.at_level(logging.INFO, logger="fp4mega"):
        assert set(cores(swap_core_attention(stack))) == {Fp4CoreAttention, FusedAttention}
    assert "kept: FusedAttention" in caplog.text


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (TransformerLayerSubmodules(), ValueError, "TransformerLayerSubmodules holds no self-att"),
        (fused_layer(IdentityOp), ValueError, "holds no self-attention"),
        (fused_layer(SELECTING), ValueError, "kept, with modules of their own: FusedAttention"),
        (
            fused_layer(ModuleSpec(module=FusedAttention, params={"num_splits": 2})),
            ValueError,
            r"core_attention=FusedAttention carries parameters \{'num_splits': 2\}",
        ),
        (get_gpt_layer_local_spec, TypeError, "call a function that returns one first"),
        (TransformerLayer, TypeError, "expected a ModuleSpec or a dataclass"),
    ],
)
def test_specs_that_cannot_be_swapped(spec, error, message):
    with pytest.raises(error, match=message):
        swap_core_attention(spec)


@pytest.mark.parametrize("make", [core_attention_spec, gpt_layer_spec, Fp4SpecProvider])
def test_options_are_checked_when_the_spec_is_made(make):
    with pytest.raises(ValueError, match="nearest is 'bf16'"):
        make(policy="bf17")
    with pytest.raises(ValueError, match="nearest is 'exact'"):
        make(layers=[("layers.0", "exacd")])
    with pytest.raises(TypeError, match=r"layers=\{'layers.0': 'bf16'\}: expected a list of"):
        make(layers={"layers.0": "bf16"})
    with pytest.raises(TypeError, match="polisy: allowed: policy, backend, layers"):
        make(polisy="bf16")


@pytest.mark.parametrize("name", ["bf16", "nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv"])
def test_command_line_name_is_the_policy_it_gives(name):
    spec = import_module(("fp4mega.megatron.layer_specs", name))
    assert isinstance(spec, ModuleSpec)
    core = spec.submodules.self_attention.submodules.core_attention
    assert (core.module, core.params) == (Fp4CoreAttention, {"policy": name})


def test_provider_delegates_everything_else():
    provider = Fp4SpecProvider(LocalSpecProvider(), policy="bf16")
    assert provider.core_attention().module is Fp4CoreAttention
    assert provider.core_attention().params == {"policy": "bf16"}
    local = LocalSpecProvider()
    for name in ("column_parallel_linear", "row_parallel_linear", "layer_norm", "activation_func"):
        assert getattr(provider, name)() == getattr(local, name)()
    assert isinstance(Fp4SpecProvider().fallback, LocalSpecProvider)
    assert copy.deepcopy(provider).column_parallel_linear() == local.column_parallel_linear()
    ours, theirs = (
        get_moe_module_spec_for_backend(p, num_experts=2, moe_grouped_gemm=False)
        for p in (provider, local)
    )
    assert repr(ours) == repr(theirs)
    with pytest.raises(AttributeError, match="no_such_module"):
        provider.no_such_module()


def norms(spec: Any) -> set[Any]:
    values = [v for node in dataclasses_within(spec) for v in vars(node).values()]
    return {v for v in values if v in (RMSNorm, WrappedTorchNorm)}


def test_norms_of_local_specs():
    assert norms(gpt_layer_spec(qk_layernorm=True)) == {RMSNorm}
    assert norms(gpt_layer_spec(multi_latent_attention=True, qk_layernorm=True)) == {RMSNorm}
    assert norms(gpt_layer_spec(normalization="LayerNorm")) == {WrappedTorchNorm}
    assert norms(get_gpt_layer_local_spec(normalization="RMSNorm")) == {WrappedTorchNorm}
    with pytest.raises(ValueError, match="normalization='L2Norm': allowed: RMSNorm, LayerNorm"):
        gpt_layer_spec(normalization="L2Norm")
    with pytest.raises(ValueError, match="transformer_engine is not installed"):
        gpt_layer_spec(use_transformer_engine=True)


@pytest.mark.usefixtures("megatron")
def test_block_spec_follows_the_configuration():
    config = tiny_config(num_layers=4, num_moe_experts=2, moe_layer_freq=[0, 1, 0, 1])
    spec = gpt_block_spec(config, policy="bf16")
    has_experts = [
        any(hasattr(node, "experts") for node in dataclasses_within(layer))
        for layer in spec.layer_specs
    ]
    assert has_experts == [False, True, False, True]
    assert spec.layer_norm is RMSNorm
    assert set(cores(spec)) == {Fp4CoreAttention}
    assert norms(gpt_block_spec(tiny_config(normalization="LayerNorm"))) == {WrappedTorchNorm}


@pytest.mark.usefixtures("megatron")
def test_multi_token_prediction_is_swapped():
    spec = get_gpt_mtp_block_spec(
        tiny_config(mtp_num_layers=1), get_gpt_layer_local_spec(), use_transformer_engine=False
    )
    assert cores(spec) == [DotProductAttention]
    assert cores(swap_core_attention(spec)) == [Fp4CoreAttention]


def test_rms_norm_is_torchs_and_marks_its_weight():
    config = tiny_config()
    ours = build_module(RMSNorm, config=config, hidden_size=24, eps=1e-3)
    theirs = build_module(WrappedTorchNorm, config=config, hidden_size=24, eps=1e-3)
    with torch.no_grad():
        theirs.weight.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 24)
    assert torch.equal(ours(x), theirs(x))
    assert ours.weight.sequence_parallel is False
    config.sequence_parallel = True
    assert RMSNorm(config, 24).weight.sequence_parallel is True
    config.layernorm_zero_centered_gamma = True
    with pytest.raises(NotImplementedError, match="layernorm_zero_centered_gamma=True"):
        RMSNorm(config, 24)
    with pytest.raises(ValueError, match="normalization='LayerNorm'"):
        RMSNorm(tiny_config(normalization="LayerNorm"), 24)
