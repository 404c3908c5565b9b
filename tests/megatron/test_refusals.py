"""What the module does not do is said with the setting, its value and the reason."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron_harness import core, qkv, tiny_config

from fp4mega.attention import DIVERGENT_PV_REASON
from fp4mega.megatron import support

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1: .*set attention_dropout=0.0"),
        ({"qk_clip": True}, r"qk_clip=True: the largest attention logit"),
        ({"log_max_attention_logit": True}, r"log_max_attention_logit=True: the largest"),
        ({"fp8_dot_product_attention": True}, r"fp8_dot_product_attention=True .*policy names"),
        ({"fp8_multi_head_attention": True}, r"fp8_multi_head_attention=True .*policy names"),
        ({"flash_decode": True}, r"flash_decode=True: .*unquantized and without its window"),
        ({"attention_backend": AttnBackend.local}, r"attention_backend=local: .*use auto"),
        ({"experimental_attention_variant": "dsa"}, r"experimental_attention_variant='dsa'"),
        ({"kv_channels": 272}, r"head dim of query and key = 272: allowed: 1 to 256"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_at_construction(setting, message):
    config = tiny_config()
    for name, value in setting.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    with pytest.raises(NotImplementedError, match=message):
        core(config)


def test_a_context_parallel_group_of_another_size_than_the_configuration_says():
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=SimpleNamespace(size=lambda: 4))
    with pytest.raises(ValueError, match="context_parallel_size=1: .* group of this layer has 4"):
        core(pg_collection=groups)


def test_dropout_given_by_the_caller_counts_as_well():
    with pytest.raises(NotImplementedError, match="attention_dropout=0.25"):
        core(attention_dropout=0.25)


def test_width_of_value_is_checked():
    with pytest.raises(NotImplementedError, match="head dim of value = 300"):
        core(k_channels=16, v_channels=300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "nvfp4_qk_fp8"}, "nearest is 'nvfp4_qk_fp8_pv'"),
        ({"layers": [("layers.0", "bf61")]}, "nearest is 'bf16'"),
        ({"layers": [("layers.7", "bf16")]}, "matches no layer"),
        ({"backend": "referense"}, "nearest is 'reference'"),
        ({"attention_type": "sideways"}, "attention_type='sideways': allowed: self, cross"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(arguments, message):
    with pytest.raises(ValueError, match=message):
        core(**arguments)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"layers.0": "bf16"}, "layers={'layers.0': 'bf16'}: expected a list of"),
        ("layers.0", "layers='layers.0': expected a list of"),
        ([("layers.1", "bf16"), "bf16"], "layers.1='bf16': expected a pair"),
        ([("bf16",)], r"layers.0=\('bf16',\): expected a pair"),
        ([(0, "bf16")], r"layers.0=\(0, 'bf16'\): expected a pair"),
    ],
)
def test_matchers_that_are_no_pairs_are_named(layers, message):
    with pytest.raises(TypeError, match=message):
        core(layers=layers)


def test_unknown_softmax_type():
    config = tiny_config()
    config.softmax_type = "hard"
    with pytest.raises(ValueError, match="softmax_type='hard': allowed: vanilla"):
        core(config)


def test_four_bit_pv_in_a_job_of_several_processes(monkeypatch):
    core(policy="nvfp4_qk_mxfp4_pv")
    monkeypatch.setattr(support.torch.distributed, "get_world_size", lambda *a: 8)
    with pytest.raises(ValueError, match="allow_divergent_pv=False and 8 processes") as error:
        core(policy="nvfp4_qk_mxfp4_pv")
    assert DIVERGENT_PV_REASON in str(error.value)
    with pytest.raises(ValueError, match="allow_divergent_pv"):
        core(policy="bf16", layers=[("layers.0", "nvfp4_qk_fp8_p_mxfp4_v")])
    core(policy="bf16", layers=[("layers.1", "nvfp4_qk_mxfp4_pv")])
    core(policy="nvfp4_qk_mxfp4_pv", allow_divergent_pv=True)
    core(policy="nvfp4_qk_fp8_pv")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"attention_bias": torch.zeros(1)},
            NotImplementedError,
            r"attention_bias of shape \(1,\)",
        ),
        (
            {"attn_mask_type": AttnMaskType.arbitrary},
            ValueError,
            "arbitrary needs an attention_mask",
        ),
        (
            {"attention_mask": torch.zeros(1, 1, 9, 9)},
            TypeError,
            "dtype=torch.float32: expected torch.bool",
        ),
        (
            {"attention_mask": torch.zeros(1, 1, 9, 8, dtype=torch.bool)},
            ValueError,
            r"shape=\(1, 1, 9, 8\): expected \[2 or 1, heads or 1, 9 or 1, 9\]",
        ),
        ({"attention_mask": torch.zeros(9, 9, dtype=torch.bool)}, ValueError, r"shape=\(9, 9\)"),
    ],
)
def test_refused_in_forward(arguments, error, message):
    arguments = {"attention_mask": None} | arguments
    with pytest.raises(error, match=message):
        core()(*qkv(), **arguments)


def test_absorbed_decoding_and_wrong_layouts_are_refused():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="value=None: .*cache_mla_latents=False"):
        core()(q, k, None, None)
    with pytest.raises(ValueError, match=r"query.shape=\(9, 4, 16\): expected \[s, b"):
        core()(q[:, 0], k, v, None)


def test_a_window_without_a_diagonal_is_refused():
    module = core(tiny_config(window_size=(3, 0)), attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(NotImplementedError, match="3 queries on 8 keys: the window's diagonal"):
        module(*qkv(3, 8), None)


def packed(**changes):
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    fields = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return PackedSeqParams(**fields | {"max_seqlen_q": 5, "max_seqlen_kv": 5} | changes)


@pytest.mark.parametrize(
    ("params", "arguments", "message"),
    [
        (packed(qkv_format="sbhd"), {}, "qkv_format='sbhd': allowed: thd"),
        (packed(local_cp_size=2), {}, "local_cp_size=2"),
        (packed(), {"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type=arbitrary"),
        (
            packed(),
            {"attention_mask": torch.zeros(1, 1, 9, 9, dtype=torch.bool)},
            "attention_mask=a tensor: packed",
        ),
    ],
)
def test_packed_sequences_that_are_refused(params, arguments, message):
    arguments = {"attention_mask": None} | arguments
    with pytest.raises(NotImplementedError, match=message):
        core()(*(x[:, 0] for x in qkv()), packed_seq_params=params, **arguments)


@pytest.mark.parametrize(
    ("side", "places", "message"),
    [
        ("kv", [0, 3, 9], r"cu_seqlens_kv=\[0, 4, 9\], as long or longer"),
        ("q", [0, 9], r"cu_seqlens_q_padded=\[0, 9\]: expected a place for each"),
        ("q", [0, 4, 10], "start at 0 and to end at the 9 rows of q"),
    ],
)
def test_padding_that_is_not_that_of_the_rows(side, places, message):
    places = torch.tensor(places, dtype=torch.int32)
    params = packed(**{f"cu_seqlens_{side}_padded": places})
    with pytest.raises(ValueError, match=message):
        core()(*(x[:, 0] for x in qkv()), None, packed_seq_params=params)


def test_packed_sequences_without_lengths():
    with pytest.raises(ValueError, match="cu_seqlens_kv=None"):
        core()(*(x[:, 0] for x in qkv()), None, packed_seq_params=packed(cu_seqlens_kv=None))
