"""One core attention beside Megatron's own and beside the definition of attention."""

import copy
import pickle

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_harness import assert_same_attention, core, definition, qkv, tiny_config

from fp4mega.megatron import arm_probes, collect_probes

pytestmark = pytest.mark.usefixtures("megatron")

NOTHING_HIDDEN = torch.zeros(1, dtype=torch.bool)


def above_diagonal(s, t=None, shift=0):
    return torch.ones(s, t or s, dtype=torch.bool).triu(1 + shift)


def padding(t, lengths=(9, 6)):
    """[2, 1, 1, t], True behind each row's length."""
    return (torch.arange(t) >= torch.tensor(lengths)[:, None])[:, None, None]


def documents(s):
    """A causal mask that also cuts between two documents, [2, 1, s, s]."""
    document = torch.stack([torch.arange(s) >= 4, torch.arange(s) >= 7])
    return (above_diagonal(s) | (document[:, :, None] != document[:, None, :]))[:, None]


@pytest.mark.parametrize(
    ("config", "mask_type", "mask"),
    [
        pytest.param({}, "causal", None, id="causal"),
        pytest.param({"num_query_groups": 1}, "causal", None, id="one-kv-head"),
        pytest.param({"num_query_groups": 4}, "causal", None, id="no-groups"),
        pytest.param({}, "no_mask", None, id="no-mask"),
        pytest.param({}, "padding", None, id="padding-without-mask"),
        pytest.param({}, "causal", above_diagonal(9)[None, None], id="causal-materialised"),
        pytest.param({}, "causal", documents(9), id="causal-documents"),
        pytest.param({}, "arbitrary", documents(9), id="arbitrary"),
        pytest.param({}, "padding", padding(9), id="padding"),
        pytest.param({}, "padding", padding(9).expand(2, 1, 9, 9), id="padding-b1ss"),
        pytest.param({"window_size": (3, 0)}, "causal", None, id="window"),
        pytest.param({"window_size": (3, 2)}, "no_mask", None, id="window-both-sides"),
        pytest.param({"softmax_type": "off-by-one"}, "causal", None, id="off-by-one"),
        pytest.param({"softmax_type": "learnable"}, "causal", None, id="learnable"),
        pytest.param({"apply_query_key_layer_scaling": True}, "causal", None, id="layer-scaling"),
    ],
)
def test_exact_policy_equals_megatron(config, mask_type, mask):
    config = tiny_config(**config)
    arguments = {"attn_mask_type": AttnMaskType[mask_type], "layer_number": 2}
    ours = core(config, **arguments)
    theirs = core(config, DotProductAttention, **arguments)
    theirs.load_state_dict(ours.state_dict())
    inputs = qkv(g=config.num_query_groups)
    assert_same_attention(ours(*inputs, mask), theirs(*inputs, mask), inputs)


@pytest.mark.parametrize(
    ("config", "mask_type", "mask", "t", "hidden"),
    [
        pytest.param(
            {}, "causal_bottom_right", None, 13, above_diagonal(9, 13, 4), id="bottom-right"
        ),
        pytest.param({}, "causal", None, 13, above_diagonal(9, 13), id="top-left"),
        pytest.param(
            {}, "padding_causal", padding(9), 9, above_diagonal(9) | padding(9), id="padding-causal"
        ),
        pytest.param(
            {},
            "padding",
            (padding(9), padding(13, (13, 5))),
            13,
            padding(13, (13, 5)),
            id="cross-padding-pair",
        ),
        pytest.param({}, "no_mask", padding(9), 9, NOTHING_HIDDEN, id="no-mask-ignores-mask"),
        pytest.param(
            {"window_size": (-1, 0)}, "no_mask", None, 9, above_diagonal(9), id="window-minus-one"
        ),
        pytest.param(
            {"window_size": (2, -1)},
            "causal",
            None,
            9,
            above_diagonal(9) | torch.ones(9, 9, dtype=torch.bool).tril(-3),
            id="window-causal-right-open",
        ),
        pytest.param(
            {"window_size": (3, 0), "window_attn_skip_freq": 2},
            "causal",
            None,
            9,
            above_diagonal(9),
            id="window-skipped-layer",
        ),
    ],
)
def test_masks_that_megatron_leaves_to_transformer_engine(config, mask_type, mask, t, hidden):
    module = core(
        tiny_config(**config),
        attn_mask_type=AttnMaskType[mask_type],
        layer_number=2,
        attention_type="self" if t == 9 else "cross",
    )
    inputs = qkv(9, t)
    assert_same_attention(module(*inputs, mask), definition(*inputs, hidden), inputs)


def test_mask_type_of_the_call_overrides_that_of_the_layer():
    inputs = qkv()
    module = core(attn_mask_type=AttnMaskType.causal)
    given = module(*inputs, None, attn_mask_type=AttnMaskType.no_mask)
    assert_same_attention(given, definition(*inputs, NOTHING_HIDDEN), inputs)


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_static_decoding_sees_the_whole_cache_or_its_window(window):
    inputs = qkv(1, 8)
    out = core(tiny_config(window_size=window))(
        *inputs, above_diagonal(8)[None, None], attn_mask_type=AttnMaskType.no_mask
    )
    hidden = NOTHING_HIDDEN if window is None else torch.arange(8) < 4
    assert_same_attention(out, definition(*inputs, hidden), inputs)


def test_value_of_another_width_strides_and_a_softmax_scale():
    q, k, v = qkv(dv=24)
    wide = torch.randn(9, 2, 2, 48)
    value = wide[..., ::2].requires_grad_()
    assert not value.is_contiguous()
    module = core(k_channels=16, v_channels=24, softmax_scale=0.5)
    expected = definition(q * 0.5 * 4, k, value, above_diagonal(9))
    assert_same_attention(module(q, k, value, None), expected, [q, k, value])
    assert module(q, k, value, None).shape == (9, 2, 4 * 24)


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal", "no_mask", "padding"])
def test_packed_sequences_equal_each_sequence_alone(mask_type):
    lengths = (5, 0, 9, 1)
    cu_seqlens = torch.tensor([0, 5, 5, 14, 15], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens.clone(),
        max_seqlen_q=9,
        max_seqlen_kv=9,
    )
    module = core(attn_mask_type=AttnMaskType[mask_type])
    inputs = [x.detach().requires_grad_() for x in (x[:, 0] for x in qkv(15, dv=24))]
    out = module(*inputs, None, packed_seq_params=packed)
    assert out.shape == (15, 4 * 24)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    causal = "causal" in mask_type
    alone = [
        definition(*(x[:, None] for x in part), above_diagonal(n) if causal else NOTHING_HIDDEN)[
            :, 0
        ]
        for n, part in zip(lengths, parts, strict=True)
    ]
    assert_same_attention(out, torch.cat(alone), inputs)


def test_a_row_that_sees_no_key_is_zero_and_leaves_no_gradient():
    inputs = qkv()
    mask = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    mask[0, :, 3] = True
    out = core(attn_mask_type=AttnMaskType.arbitrary)(*inputs, mask)
    assert out[3, 0].abs().max() == 0
    dq = torch.autograd.grad(out.sum(), inputs)[0]
    assert dq[3, 0].abs().max() == 0
    assert dq[3, 1].abs().max() > 0


def test_quantized_policy_changes_numbers_a_little():
    inputs = qkv(64, b=1)
    exact = core()(*inputs, None)
    quantized = core(policy="nvfp4_qk_fp8_pv")(*inputs, None)
    relative = (quantized - exact).norm() / exact.norm()
    assert 0.01 < relative < 0.3


def test_policy_of_a_layer_counts_layers_of_the_whole_model():
    config = tiny_config(num_layers=6)
    layers = [("layers.[0-1]", "bf16"), ("layers.-1", "exact"), ("layers.-[12]", "mxfp4_qk_fp8_pv")]
    got = [
        core(config, layer_number=i + 1, policy="nvfp4_qk_fp8_pv", layers=layers).policy.name
        for i in range(6)
    ]
    assert got == ["bf16", "bf16", "nvfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "exact"]


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_checkpoint_keys_are_those_of_megatron(softmax_type):
    config = tiny_config(softmax_type=softmax_type)
    torch.manual_seed(5)
    ours = core(config)
    torch.manual_seed(5)
    theirs = core(config, DotProductAttention)
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert state.keys() == ({"softmax_offset"} if softmax_type == "learnable" else set())
    for name, value in state.items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = [m.sharded_state_dict("core.", (), metadata) for m in (ours, theirs)]
    for incomplete in (None, {}, {"distrib_optim_sharding_type": "fully_reshardable"}):
        assert ours.sharded_state_dict("core.", (), incomplete).keys() == sharded[0].keys()
    assert sharded[0].keys() == sharded[1].keys()
    for name in sharded[1]:
        a, b = (s[name] for s in sharded)
        assert (a.key, a.global_shape, a.global_offset, a.dtype) == (
            b.key,
            b.global_shape,
            b.global_offset,
            b.dtype,
        )
    assert ours.sharded_state_dict("core.").keys() == sharded[1].keys()


def test_gradient_of_the_learnable_sink():
    config = tiny_config(softmax_type="learnable", init_method_std=1.0)
    module, inputs = core(config), qkv()
    module(*inputs, None).square().sum().backward()
    sink = module.softmax_offset.detach().clone().requires_grad_()
    definition(*inputs, above_diagonal(9), sink).square().sum().backward()
    assert sink.grad.abs().min() > 1e-3
    torch.testing.assert_close(module.softmax_offset.grad, sink.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(duplicate):
    module = core(
        tiny_config(softmax_type="learnable"),
        policy="nvfp4_qk_fp8_pv",
        layers=[("layers.0", "bf16")],
    )
    inputs = qkv()
    expected = module(*inputs, None)
    twin = duplicate(module)
    assert twin.softmax_offset is not module.softmax_offset
    assert torch.equal(twin(*inputs, None), expected)
    assert twin.sharded_state_dict().keys() == module.sharded_state_dict().keys()
    assert module.tp_group is not None


def test_probe_measures_one_training_forward_and_changes_nothing():
    module, inputs = core(policy="nvfp4_qk_fp8_pv"), qkv(40)
    plain = module(*inputs, None)
    assert collect_probes(module) == {}
    arm_probes(module)
    module.eval()(*inputs, None)
    assert collect_probes(module) == {}
    assert torch.equal(module.train()(*inputs, None), plain)
    measured = collect_probes(module)
    assert list(measured) == [1]
    assert 15 < measured[1]["q_sqnr_db"] < 30
    assert 0 <= measured[1]["k_zeroed"] < 0.2
    module(*inputs, None)
    assert collect_probes(module) == {}


def test_probe_measures_the_backward_too_and_changes_no_gradient():
    module, inputs = core(policy="nvfp4_qk_mxfp4_pv-paper"), qkv(40)
    gradients = []
    for armed in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        if armed:
            arm_probes(module)
        module(*leaves, None).square().sum().backward()
        gradients.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    measured = collect_probes(module)[1]
    assert measured["ds_row_sum"] > 1e-3
    assert 0 < measured["dq_error"] < 1
    assert 0 < measured["o_error"] < 1


def test_probe_of_the_backward_waits_for_the_forward_that_has_a_gradient():
    module = core(policy="nvfp4_qk_fp8_pv")
    leaves = [x.detach().clone().requires_grad_() for x in qkv(40)]
    arm_probes(module)
    recomputed = torch.utils.checkpoint.checkpoint(
        lambda q, k, v: module(q, k, v, None), *leaves, use_reentrant=True
    )
    recomputed.square().sum().backward()
    measured = collect_probes(module)[1]
    assert 15 < measured["q_sqnr_db"] < 30
    assert 0 < measured["dv_error"] < 1
