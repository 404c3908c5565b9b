"""What a probe says of a whole layer does not depend on how many processes share its gradient."""

import pytest
from megatron.core import parallel_state

from fp4mega.megatron import arm_probes
from fp4mega.testing.distributed import enough_devices, run_distributed
from fp4mega.train.probes import gather_probes
from fp4mega.train.recipe import Recipe
from fp4mega.train.signals import StopRequest
from fp4mega.train.step import train_step
from tests.distributed.training_harness import build, content

pytestmark = pytest.mark.skipif(not enough_devices("cpu", 2), reason="compares digits, on a CPU")

CLIP = 0.5


def probe_each(world, recipes):
    """By recipe: norms of the gradients of the QKV projections by layer, in the second step."""
    found = []
    for recipe in map(Recipe.parse, recipes):
        training, batches = build(world, recipe)
        for step in range(2):
            arm_probes(training.chunks)
            with StopRequest() as request:
                result = train_step(training, recipe, batches, step, world.device, request)
            assert result.grad_norm > 2 * CLIP
            probes = gather_probes(training, result.grad_norm, CLIP)
        found.append([figures["qkv_grad_norm"] for figures in probes.values()])
        parallel_state.destroy_model_parallel()
    return found


def test_gradient_norms_are_those_of_one_process():
    recipes = [
        content(
            optimizer={"distributed": distributed, "clip_grad": CLIP},
            attention={"policy": "bf16"},
            train={"precision": precision},
        )
        for precision in ("fp32", "bf16")
        for distributed in (False, True)
    ]
    ((wanted, alone, wanted_bf16, alone_bf16),) = run_distributed(probe_each, 1, recipes)
    assert len(wanted) == 4
    assert alone == pytest.approx(wanted, rel=1e-5)
    assert alone_bf16 == pytest.approx(wanted_bf16, rel=1e-5)
    for ranks in run_distributed(probe_each, 2, recipes):
        for norms, expected in zip(ranks, [wanted] * 2 + [wanted_bf16] * 2, strict=True):
            assert norms == pytest.approx(expected, rel=1e-2 if expected == wanted_bf16 else 1e-5)
