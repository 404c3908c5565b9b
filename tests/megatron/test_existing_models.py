"""Models that Megatron alone built, trained and saved go on training with our core attention in their spec."""

import queue

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_harness import batch, build_gpt, latent, local_spec, tiny_config

from fp4mega.megatron import policies_by_layer, swap_core_attention

pytestmark = pytest.mark.usefixtures("megatron")


def dense():
    return tiny_config(init_method_std=0.05), local_spec()


def experts():
    config = tiny_config(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        init_method_std=0.05,
    )
    return config, local_spec(num_experts=4)


def multi_latent():
    return latent(init_method_std=0.05)


class Trainer:
    """What a user of Megatron-Core has: a model under DDP, Megatron's optimizer, and a distributed checkpoint of both."""

    def __init__(self, config, spec):
        self.model = build_gpt(config, spec)
        self.wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=5e-3, weight_decay=0.1), [self.wrapped]
        )

    def step(self):
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.wrapped(**batch(), attention_mask=None).mean()
        loss.backward()
        finalize_model_grads([self.wrapped])
        self.optimizer.step()
        return loss.item()

    def state(self, *, loading):
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(
            {"model": model}, is_loading=loading, metadata={"chained_optim_avoid_prefix": True}
        )
        return {"model": model, "optimizer": optimizer}

    def save(self, folder):
        dist_checkpointing.save(self.state(loading=False), str(folder))

    def load(self, folder):
        state = dist_checkpointing.load(self.state(loading=True), str(folder))
        self.model.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])


# `exact` computes what Megatron's core does, up to the order of its FP32 sums; the others round.
POLICIES = {"exact": 1e-5, "bf16": 5e-3, "nvfp4_qk_fp8_pv": 5e-2}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [dense, experts, multi_latent], ids=lambda kind: kind.__name__)
def test_training_goes_on_from_a_checkpoint_saved_without_us(kind, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem_async, "_results_queue", queue.Queue())  # no process of its own
    config, spec = kind()
    stock = Trainer(config, spec)
    first = [stock.step() for _ in range(2)]
    stock.save(tmp_path)
    expected = [stock.step() for _ in range(3)]
    assert expected[0] < first[0] - 0.5  # there are two updates to be lost

    ours = Trainer(config, swap_core_attention(spec, policy=policy))
    assert set(policies_by_layer(ours.model).values()) == {policy}
    ours.load(tmp_path)
    continued = [ours.step() for _ in range(3)]
    assert continued == pytest.approx(expected, rel=POLICIES[policy])

    # And back: what ours saves, Megatron alone reads.
    back = tmp_path / "back"
    back.mkdir()
    ours.save(back)
    returned = Trainer(config, spec)
    returned.load(back)
    for name, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, returned.model.get_parameter(name)), name


def test_a_state_with_the_recipes_of_transformer_engine_loads_strictly():
    """Its modules save one beside their weights, its core attention nothing else."""
    config, spec = dense()
    stock = build_gpt(config, spec)
    state = stock.state_dict()
    for layer in (0, 1):
        key = f"decoder.layers.{layer}.self_attention.core_attention._extra_state"
        state[key] = torch.tensor([1, 2], dtype=torch.uint8)
    before = dict(state)
    ours = build_gpt(config, swap_core_attention(spec, policy="exact"))
    for parameter in ours.parameters():
        parameter.data.zero_()
    ours.load_state_dict(state, strict=True)
    assert state.keys() == before.keys()
    for name, parameter in stock.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    stock.load_state_dict(ours.state_dict(), strict=True)
    state["decoder.layers.1.self_attention.core_attention.softmax_offset"] = torch.zeros(4)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*1.*core_attention.softmax_offset"):
        ours.load_state_dict(state, strict=True)
