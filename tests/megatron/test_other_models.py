"""Models other than a plain GPT: with policy `exact` ours and Megatron's core give one output and one set of gradients."""

import pytest
import torch
from megatron.core.models.bert import bert_model
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_harness import (
    LENGTH,
    VOCAB,
    assert_same_training,
    batch,
    gradients,
    local_spec,
    tiny_config,
)

from fp4mega.megatron import (
    arm_probes,
    core_attention_spec,
    policies_by_layer,
    swap_core_attention,
)

pytestmark = pytest.mark.usefixtures("megatron")

COUNTS = torch.arange(LENGTH) < torch.tensor([LENGTH, 17])[:, None]


def plain(**changes):
    return tiny_config(
        **{
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "init_method_std": 0.1,
        }
        | changes
    )


def assert_same(theirs, ours, call):
    ours.load_state_dict(theirs.state_dict())
    results = []
    for model in (theirs, ours):
        out = call(model)
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).mean().backward()
        results.append((out.detach(), gradients(model)))
    assert_same_training(results[1], results[0], atol=1e-5)
    return ours


def test_multi_token_prediction_takes_the_policy_of_the_last_layer():
    config = tiny_config(num_layers=3, mtp_num_layers=2)

    def build(spec):
        torch.manual_seed(7)
        predicting = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        return GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            mtp_block_spec=predicting,
        )

    def swapped(policy, *layers):
        return build(swap_core_attention(local_spec(), policy=policy, layers=layers))

    assert_same(
        build(local_spec()), swapped("exact"), lambda model: model(**batch(), attention_mask=None)
    )
    assert policies_by_layer(swapped("exact", ("layers.-1", "bf16"))) == {
        1: "exact",
        2: "exact",
        3: "bf16",
        4: "bf16",
        5: "bf16",
    }
    with pytest.raises(ValueError, match=r"'layers.3': matches no layer"):
        swapped("exact", ("layers.3", "bf16"))


@pytest.mark.parametrize("cross", [False, True])
def test_t5(cross):
    config, length = plain(num_query_groups=4), 10
    specs = (
        t5_spec.get_t5_encoder_with_local_block_spec(2),
        t5_spec.get_t5_decoder_with_local_block_spec(2),
    )
    swapped = [swap_core_attention(spec, policy="exact") for spec in specs]
    if cross:
        for layer in swapped[1].layer_specs:
            attention = layer.submodules.cross_attention.submodules
            attention.core_attention = core_attention_spec(policy="exact")

    def build(encoder, decoder):
        return T5Model(config, config, encoder, decoder, VOCAB, LENGTH)

    padded = ~COUNTS[:, None, None]
    future = torch.ones(length, length, dtype=torch.bool).triu(1).expand(2, 1, -1, -1)
    words = batch(3, length=length)

    def call(model):
        return model(
            batch()["input_ids"],
            words["input_ids"],
            padded.expand(-1, -1, LENGTH, -1),
            future,
            padded.expand(-1, -1, length, -1),
            lm_labels=words["labels"],
        )

    assert_same(build(*specs), build(*swapped), call)


def test_layers_of_one_number_are_not_taken_for_one():
    config = plain(num_query_groups=4)
    encoder, decoder = (
        swap_core_attention(spec, policy=policy)
        for spec, policy in (
            (t5_spec.get_t5_encoder_with_local_block_spec(2), "bf16"),
            (t5_spec.get_t5_decoder_with_local_block_spec(2), "exact"),
        )
    )
    model = T5Model(config, config, encoder, decoder, VOCAB, LENGTH)
    assert policies_by_layer(model.encoder) == {1: "bf16", 2: "bf16"}
    assert policies_by_layer(model.decoder) == {1: "exact", 2: "exact"}
    with pytest.raises(ValueError, match="layer_number=1: .* 'bf16', another 'exact'"):
        policies_by_layer(model)
    with pytest.raises(ValueError, match="layer_number=1: 2 attention layers have it"):
        arm_probes(model)
    arm_probes(model.encoder)


def test_bert(monkeypatch):
    """It asks for Transformer Engine's version where the core is not Megatron's own, and chooses the mask's shape by it."""
    monkeypatch.setattr(bert_model, "is_te_min_version", lambda version: True)
    config = plain()

    def build(spec):
        return bert_model.BertModel(config, 0, spec, VOCAB, LENGTH, add_binary_head=False)

    def call(model):
        losses, _ = model(batch()["input_ids"], COUNTS.long(), lm_labels=batch()["labels"])
        return losses * COUNTS

    swapped = swap_core_attention(bert_layer_local_spec, policy="exact")
    assert_same(build(bert_layer_local_spec), build(swapped), call)


def test_vision():
    config, spec = plain(), get_vit_layer_with_local_spec()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def build(spec):
        return CLIPViTModel(
            config, spec, ln_pre_impl=WrappedTorchNorm, patch_dim=4, img_h=16, img_w=16
        )

    swapped = swap_core_attention(spec, policy="exact")
    assert_same(build(spec), build(swapped), lambda model: model(images, None))
