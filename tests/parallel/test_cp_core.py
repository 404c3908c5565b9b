"""`Fp4CoreAttention` on two context-parallel ranks, by each `cp_comm_type`; what it refuses there."""

import copy
import inspect

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from fp4mega.megatron import Fp4CoreAttention
from fp4mega.ops import attention_func
from fp4mega.parallel.zigzag import to_ranks
from fp4mega.testing.distributed import World, enough_devices, run_distributed

S, B, H, G, D = 64, 2, 4, 2, 16


def core(policy: str = "exact", backend: str = "reference", **arguments: object):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H * D,
        num_attention_heads=H,
        num_query_groups=G,
        attention_dropout=0.0,
        context_parallel_size=2,
        softmax_type="learnable",
        use_cpu_initialization=True,
    )
    settings = {
        "config": config,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    }
    return Fp4CoreAttention(**(settings | arguments), policy=policy, backend=backend)


def megatron_rows(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    later = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters  # 0.19
    return get_batch_on_this_cp_rank(batch, **({"is_hybrid_cp": False} if later else {}))


def two_ranks(world: World) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.manual_seed(0)
    whole = [torch.randn(S, B, n, D, device=world.device) for n in (H, G, G)]
    dout = torch.randn(S, B, H * D, device=world.device)

    def rows(x: torch.Tensor) -> torch.Tensor:
        mine = to_ranks(x.transpose(0, 1), 2)[world.rank]
        # Megatron cuts batches itself, and must mean the same rows.
        assert torch.equal(mine, megatron_rows({"x": x.transpose(0, 1)})["x"])
        return mine.transpose(0, 1)

    for kind in (None, "all_gather", "p2p", "a2a"):
        for mask_type, causal in ((AttnMaskType.causal, True), (AttnMaskType.no_mask, False)):
            module = copy.deepcopy(core(cp_comm_type=kind, attn_mask_type=mask_type))
            sink = module.softmax_offset
            with torch.no_grad():
                sink.copy_(torch.linspace(-1, 2, H))
            inputs = [x.clone().requires_grad_() for x in whole]
            q, k, v = (x.transpose(0, 1) for x in inputs)
            expected = attention_func(
                q, k, v, policy="exact", causal=causal, sink=sink, backend="reference"
            )
            wanted = torch.autograd.grad(
                expected.transpose(0, 1).flatten(-2), (*inputs, sink), dout
            )
            mine = [rows(x).clone().requires_grad_() for x in whole]
            out = module(*mine, attention_mask=None)
            got = torch.autograd.grad(out, (*mine, sink), rows(dout))
            torch.distributed.all_reduce(got[-1])
            torch.testing.assert_close(out, rows(expected.transpose(0, 1).flatten(-2)))
            for ours, theirs in zip(got[:-1], wanted[:-1], strict=True):
                torch.testing.assert_close(ours, rows(theirs), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got[-1], wanted[-1], rtol=1e-4, atol=1e-4)
    refusals(mine)
    parallel_state.destroy_model_parallel()


def refusals(qkv: list[torch.Tensor]) -> None:
    with pytest.raises(
        NotImplementedError, match="context_parallel_size=2: cp_comm_type='a2a.p2p'"
    ):
        core(cp_comm_type="a2a+p2p")
    with pytest.raises(NotImplementedError, match="attention_type='cross' with context_parallel"):
        core(attention_type="cross")
    module = core()
    module.config.cp_partition_mode = "contiguous"  # a field of later Megatrons
    with pytest.raises(NotImplementedError, match="cp_partition_mode='contiguous' with context_"):
        core(config=module.config)
    packed_refusals(module, qkv)
    mask = torch.zeros(1, 1, S // 2, S // 2, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="attention_mask=a tensor under context"):
        module(*qkv, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="probe with context_parallel_size=2"):
        module.request_probe()
    with pytest.raises(ValueError, match="allow_divergent_pv=False and 2 processes"):
        core(policy="nvfp4_qk_mxfp4_pv")
    with pytest.raises(NotImplementedError, match="sequence length 64 on 2 .* multiple of 128"):
        core(policy="nvfp4_qk_mxfp4_pv", allow_divergent_pv=True)(*qkv, attention_mask=None)


def packed_refusals(module: Fp4CoreAttention, qkv: list[torch.Tensor]) -> None:
    bounds = torch.tensor([0, 20, S * B], dtype=torch.int32, device=qkv[0].device)
    other = torch.tensor([0, 24, S * B], dtype=torch.int32, device=qkv[0].device)
    whole_world = torch.distributed.new_group([0])
    for error, message, fields in (
        (NotImplementedError, "qkv_format='sbhd': allowed: thd", {"qkv_format": "sbhd"}),
        (NotImplementedError, "local_cp_size=1 with a context-parallel", {"local_cp_size": 1}),
        (NotImplementedError, "micro-batch's own", {"cp_group": whole_world}),
        (NotImplementedError, "cu_seqlens_kv differs from that of q", {"cu_seqlens_kv": other}),
        (
            NotImplementedError,
            "cu_seqlens_kv_padded differs from that of q",
            {"cu_seqlens_q_padded": bounds},
        ),
        (NotImplementedError, "cp_partition_mode='contiguous'", {"mode": "contiguous"}),
        (ValueError, "cu_seqlens_q=None", {"cu_seqlens_q": None, "cu_seqlens_kv": None}),
        (ValueError, "sequence 1 has 6 rows; every one of 2", {"cu_seqlens_q": [0, 20, 26, 128]}),
        (ValueError, "to end at the 128 tokens that 2 ranks of 64", {"cu_seqlens_q": [0, 20, 64]}),
    ):
        mode = fields.pop("mode", None)
        if isinstance(fields.get("cu_seqlens_q"), list):
            own = torch.tensor(fields["cu_seqlens_q"], dtype=torch.int32, device=bounds.device)
            fields |= {"cu_seqlens_q": own, "cu_seqlens_kv": own}
        given = {"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
        params = PackedSeqParams(**{**given, **fields})
        if mode is not None:  # a field of later Megatrons
            params.cp_partition_mode = mode
        with pytest.raises(error, match=message):
            module(*(x.flatten(0, 1) for x in qkv), attention_mask=None, packed_seq_params=params)


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_core_attention_on_two_ranks(device_type):
    if not enough_devices(device_type, 2):
        pytest.skip(f"needs 2 devices of type {device_type}")
    run_distributed(two_ranks, 2, device_type=device_type)
