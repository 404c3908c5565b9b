"""Whole tiny GPT models: with an unquantized policy ours and Megatron's core give one loss and one set of gradients."""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron_harness import (
    LENGTH,
    assert_same_training,
    batch,
    build_gpt,
    gradients,
    latent,
    local_spec,
    loss_and_gradients,
    tiny_config,
)

from fp4mega import get_policy
from fp4mega.megatron import (
    arm_probes,
    collect_probes,
    gpt_block_spec,
    policies_by_layer,
    set_rounding_step,
    swap_core_attention,
)

pytestmark = pytest.mark.usefixtures("megatron")

PADDING = (torch.arange(LENGTH) >= torch.tensor([LENGTH, 17])[:, None])[:, None, None]
STOCHASTIC = replace(
    get_policy("nvfp4_qk_fp8_pv"),
    name="stochastic_gradients",
    q="nvfp4+sr",
    do="e5m2/head+sr",
    ds="e4m3/tile+sr",
)


def pair(config, spec, **attention):
    """The same model twice from the same weights: with Megatron's core attention and with ours."""
    theirs = build_gpt(config, spec)
    return build_gpt(config, swap_core_attention(spec, **attention), like=theirs), theirs


@pytest.mark.parametrize(
    ("config", "mask_type", "mask"),
    [
        pytest.param({"num_query_groups": 4}, "causal", None, id="causal"),
        pytest.param({}, "causal", None, id="grouped-queries"),
        pytest.param({}, "padding", PADDING, id="padding-mask"),
        pytest.param({"window_size": (5, 0)}, "causal", None, id="window"),
        pytest.param(
            {"window_size": (5, 0), "window_attn_skip_freq": 2}, "causal", None, id="window-skip"
        ),
        pytest.param({"softmax_type": "off-by-one"}, "causal", None, id="off-by-one"),
        pytest.param({"softmax_type": "learnable"}, "causal", None, id="learnable"),
        pytest.param({"apply_query_key_layer_scaling": True}, "causal", None, id="layer-scaling"),
    ],
)
def test_exact_policy_trains_as_megatron(config, mask_type, mask):
    ours, theirs = pair(tiny_config(**config), local_spec(AttnMaskType[mask_type]), policy="exact")
    expected = loss_and_gradients(theirs, attention_mask=mask)
    assert_same_training(loss_and_gradients(ours, attention_mask=mask), expected)
    assert min(g.abs().max() for g in expected[1].values()) > 0


def test_bf16_policy_trains_nearly_as_megatron():
    ours, theirs = pair(tiny_config(), local_spec(), policy="bf16")
    assert_same_training(loss_and_gradients(ours), loss_and_gradients(theirs), rtol=0.05, atol=0.01)


def test_quantized_policy_lowers_the_loss():
    model = build_gpt(tiny_config(init_method_std=0.02), gpt_block_spec(tiny_config()))
    assert set(policies_by_layer(model).values()) == {"nvfp4_qk_fp8_pv"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(loss_and_gradients(model)[0].mean().item())
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_query_key_norms_and_experts():
    config = tiny_config(
        num_moe_experts=4,
        moe_router_topk=2,
        qk_layernorm=True,
        moe_router_load_balancing_type="none",
    )
    spec = local_spec(num_experts=4, qk_layernorm=True)
    ours, theirs = pair(config, spec, policy="exact")
    assert_same_training(loss_and_gradients(ours), loss_and_gradients(theirs))
    ours = build_gpt(config, gpt_block_spec(config, policy="exact"), like=theirs)
    assert_same_training(loss_and_gradients(ours), loss_and_gradients(theirs))


@pytest.mark.parametrize("recompute", [False, True])
def test_multi_latent_attention(recompute):
    selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config, spec = latent(**(selective if recompute else {}))
    ours, theirs = pair(config, spec, policy="exact")
    assert_same_training(loss_and_gradients(ours), loss_and_gradients(theirs))


def test_packed_sequences_train_as_their_sequences_alone():
    config = tiny_config()
    model = build_gpt(config, gpt_block_spec(config, policy="exact"))
    inputs = batch(rows=1)
    lengths = (7, 1, 16)
    inputs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seqlens = torch.tensor([0, 7, 8, 24], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=16,
        max_seqlen_kv=16,
    )
    together = loss_and_gradients(model, inputs, packed_seq_params=packed)
    model.zero_grad()
    parts = [
        {k: v[:, start : start + n] for k, v in inputs.items()}
        for start, n in zip((0, 7, 8), lengths, strict=True)
    ]
    losses = torch.cat([model(**part, attention_mask=None) for part in parts], dim=1)
    losses.mean().backward()
    assert_same_training(together, (losses.detach(), gradients(model)))


RECOMPUTE = {
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.mark.parametrize("policy", ["nvfp4_qk_fp8_pv", STOCHASTIC], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recompute_changes_no_bit(recompute, policy):
    plain = build_gpt(tiny_config(), swap_core_attention(local_spec(), policy=policy))
    config = tiny_config(**RECOMPUTE[recompute])
    recomputed = build_gpt(config, swap_core_attention(local_spec(), policy=policy), like=plain)
    results = []
    for model in (plain, recomputed):
        set_rounding_step(model, 3)
        # Two microbatches in flight before either goes backward, as in a pipeline's warm-up.
        losses = [model(**batch(seed), attention_mask=None).mean() for seed in (0, 1)]
        for loss in losses:
            loss.backward()
        results.append(([loss.item() for loss in losses], gradients(model)))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_stochastic_rounding_differs_by_call_and_repeats_by_step():
    model = build_gpt(tiny_config(), gpt_block_spec(tiny_config(), policy=STOCHASTIC))
    set_rounding_step(model, 4)
    first, second = loss_and_gradients(model), loss_and_gradients(model)
    set_rounding_step(model, 5)
    third = loss_and_gradients(model)
    resumed = build_gpt(tiny_config(), gpt_block_spec(tiny_config(), policy=STOCHASTIC), like=model)
    set_rounding_step([resumed], 4)
    again = [loss_and_gradients(resumed) for _ in range(2)]
    assert torch.equal(first[0], again[0][0])
    assert torch.equal(second[0], again[1][0])
    assert len({first[0].mean().item(), second[0].mean().item(), third[0].mean().item()}) == 3
    model.eval()
    evaluations = [model(**batch(), attention_mask=None) for _ in range(2)]
    assert torch.equal(*evaluations)


def test_stock_checkpoint_loads_into_ours_and_back():
    config = tiny_config(softmax_type="learnable", init_method_std=0.5)
    ours, theirs = pair(config, local_spec(), policy="exact")
    for name, parameter in ours.named_parameters():
        torch.nn.init.normal_(parameter, std=0.1 if "softmax_offset" not in name else 1.0)
    theirs.load_state_dict(ours.state_dict())
    assert_same_training(loss_and_gradients(ours), loss_and_gradients(theirs))
    sharded = [model.sharded_state_dict() for model in (ours, theirs)]
    assert sharded[0].keys() == sharded[1].keys()
    assert sum("softmax_offset" in key for key in sharded[0]) == 2


def test_policies_land_on_their_layers_and_probes_name_them():
    config = tiny_config(num_layers=4)
    layers = [("layers.0", "bf16"), ("layers.-1", "exact")]
    model = build_gpt(config, gpt_block_spec(config, layers=layers))
    assert policies_by_layer(model) == {
        1: "bf16",
        2: "nvfp4_qk_fp8_pv",
        3: "nvfp4_qk_fp8_pv",
        4: "exact",
    }
    arm_probes(model)
    loss_and_gradients(model)
    probes = collect_probes(model)
    assert list(probes) == [1, 2, 3, 4]
    assert 15 < probes[2]["q_sqnr_db"] < 30
    assert "q_sqnr_db" not in probes[4]
    assert collect_probes(model) == {}


def test_layer_number_of_a_later_pipeline_stage_selects_the_policy():
    config = tiny_config(num_layers=4)
    spec = gpt_block_spec(config, policy="exact", layers=[("layers.-[1-2]", "bf16")])
    attention = spec.layer_specs[0].submodules.self_attention
    built = [
        attention.module(config, attention.submodules, layer_number=n, **attention.params)
        for n in (2, 3)
    ]
    assert [module.core_attention.policy.name for module in built] == ["exact", "bf16"]


def test_static_inference_decodes_as_megatron():
    ours, theirs = pair(tiny_config(), local_spec(), policy="exact")
    tokens = batch()["input_ids"]
    outputs = []
    for model in (ours.eval(), theirs.eval()):
        context = StaticInferenceContext(max_batch_size=2, max_sequence_length=LENGTH)
        logits = []
        with torch.no_grad():
            for start, end in ((0, 10), (10, 11), (11, 12)):
                positions = torch.arange(start, end).expand(2, -1)
                logits.append(
                    model(
                        tokens[:, start:end],
                        positions,
                        None,
                        inference_context=context,
                        runtime_gather_output=True,
                    )
                )
                context.increment_sequence_len_offset(end - start)
        outputs.append(logits)
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    full = ours(tokens[:, :12], torch.arange(12).expand(2, -1), None)
    torch.testing.assert_close(outputs[0][2][:, -1], full[:, -1], rtol=1e-4, atol=1e-5)
