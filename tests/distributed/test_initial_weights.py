"""On a CPU a model starts the same however it is cut, its sinks and experts too."""

import pytest
import torch
from megatron.core import parallel_state

from fp4mega.testing.distributed import enough_devices, run_distributed
from fp4mega.train.recipe import Recipe
from fp4mega.train.signals import StopRequest
from fp4mega.train.step import train_step
from tests.distributed.training_harness import build, content

pytestmark = pytest.mark.skipif(not enough_devices("cpu", 2), reason="weights are drawn on a CPU")


def begin(world):
    """The sinks of each layer on this rank's heads, and the loss of the whole model, before any update."""
    recipe = Recipe.parse(
        content(
            model={"softmax_type": "learnable", "num_layers": 2},
            attention={"policy": "exact"},
            parallel={"tensor": world.size, "sequence": world.size > 1},
        )
    )
    training, batches = build(world, recipe)
    named = training.chunks[0].named_parameters()
    sinks = [p.detach().clone() for name, p in named if name.endswith("softmax_offset")]
    with StopRequest() as request:
        loss = train_step(training, recipe, batches, 0, world.device, request).loss
    parallel_state.destroy_model_parallel()
    return torch.stack(sinks), loss


def test_learnable_sinks_are_drawn_whole():
    ((wanted, wanted_loss),) = run_distributed(begin, 1)
    (left, loss), (right, _) = run_distributed(begin, 2)
    assert torch.equal(torch.cat([left, right], dim=1), wanted)
    assert wanted.unique().numel() == 2 * 4
    assert loss == pytest.approx(wanted_loss, rel=1e-6)


def draw_experts(world):
    """The weights of the routers and of this rank's experts before any update."""
    recipe = Recipe.parse(
        content(
            model={"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "num_layers": 2},
            parallel={"expert": world.size},
        )
    )
    training, _ = build(world, recipe)
    weights = {
        name: p.detach().clone()
        for name, p in training.chunks[0].named_parameters()
        if ".mlp." in name
    }
    parallel_state.destroy_model_parallel()
    return weights


def test_each_rank_draws_its_own_experts():
    (whole,) = run_distributed(draw_experts, 1)
    halves = run_distributed(draw_experts, 2)
    assert len(whole) == 2 * (1 + 4 * 2)
    seen = set()
    for rank, half in enumerate(halves):
        for name, weight in half.items():
            before, experts, after = name.partition(".local_experts.")
            if experts:
                number, _, rest = after.partition(".")
                name = f"{before}{experts}{int(number) + 2 * rank}.{rest}"
            assert torch.equal(weight, whole[name]), name
            seen.add(name)
    assert seen == whole.keys()
