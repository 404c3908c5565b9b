"""What attention keeps for backward: the same bytes for a head on whichever rank it is, and again when recomputed."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType

from fp4mega.kernels.reference import ReferenceBackend
from fp4mega.megatron import Fp4CoreAttention
from fp4mega.testing.distributed import enough_devices, run_distributed
from fp4mega.train.launch import seed_everything, start_model_parallel
from fp4mega.train.model import build_training, transformer_config
from fp4mega.train.recipe import ParallelSection, Recipe
from tests.distributed.training_harness import content

HEADS, GROUPS, DIM, ROWS = 4, 2, 16, 40
POLICIES = ["nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv"]


def attend(world, policy):
    """Forward of one core attention on this rank's heads of common inputs; returns its saved tensors and the output."""
    recipe = content(
        attention={"policy": policy, "backend": "reference"}, parallel={"tensor": world.size}
    )
    config = transformer_config(Recipe.parse(recipe), world.device)
    start_model_parallel(ParallelSection(tensor=world.size))
    model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=world.device.type == "cpu", force_reset_rng=True
    )
    core = Fp4CoreAttention(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
        policy=policy,
        backend="reference",
    ).to(world.device)
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(ROWS, 2, heads, DIM, generator=generator)
        * torch.linspace(0.1, 9, heads)[:, None]
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    mine = [x.chunk(world.size, 2)[world.rank].to(world.device).requires_grad_() for x in whole]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.cpu()) or x, lambda x: x):
        out = core(*mine, None)
    parallel_state.destroy_model_parallel()
    return kept, out.detach().cpu()


def along_heads(whole_shape, part_shape):
    (dim,) = [i for i, (a, b) in enumerate(zip(whole_shape, part_shape, strict=True)) if a != b]
    return dim


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_tensor_parallel_ranks_keep_the_bytes_of_one(policy, device_type):
    if not enough_devices(device_type, 2):
        pytest.skip(f"needs 2 devices of type {device_type}")
    ((one, out),) = run_distributed(attend, 1, policy, device_type=device_type)
    halves = run_distributed(attend, 2, policy, device_type=device_type)
    assert torch.equal(torch.cat([half_out for _, half_out in halves], -1), out)
    assert len(one) == len(halves[0][0]) > 4
    quantized = 0
    for i, whole in enumerate(one):
        parts = [kept[i] for kept, _ in halves]
        if whole.shape == parts[0].shape:  # not a tensor of heads
            assert all(torch.equal(whole, part) for part in parts)
            continue
        joined = torch.cat(parts, along_heads(whole.shape, parts[0].shape))
        assert joined.dtype == whole.dtype
        assert torch.equal(joined, whole), f"saved tensor {i} of shape {tuple(whole.shape)}"
        quantized += whole.dtype == torch.uint8
    assert quantized >= 3  # codes of q, k and v at least


def train_once(world, recompute, policy):
    """One micro-batch: the bytes of every forward of the backend in order, the memory held between the passes, gradients."""
    recipe = Recipe.parse(
        content(
            attention={"policy": policy, "backend": "reference"},
            train={"recompute": recompute, "seq_length": 128, "precision": "bf16"},
        )
    )
    start_model_parallel(recipe.parallel)
    seed_everything(recipe.train.seed, world.device)
    training = build_training(recipe, world.device)
    (chunk,) = training.chunks
    forward, encoded = ReferenceBackend.forward, []

    def spy(self, *arguments):
        result = forward(self, *arguments)
        encoded.append([x.cpu().clone() for x in result[2]])
        return result

    held: dict[int, int] = {}

    def hold(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.randint(64, (1, 129), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(world.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceBackend, "forward", spy)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
            positions = torch.arange(128, device=world.device)[None]
            losses = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        first = len(encoded)
        losses.mean().backward()
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    memory = sum(size for place, size in held.items() if place not in weights)
    gradients = {name: p.main_grad.cpu().clone() for name, p in chunk.named_parameters()}
    parallel_state.destroy_model_parallel()
    return encoded[:first], encoded[first:], memory, gradients


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recompute", ["core_attn", "full"])
def test_recompute_makes_the_same_bytes_again(recompute, device_type):
    """And holds less memory meanwhile when it is full; core attention alone would rather hold q, k and v than codes."""
    if not enough_devices(device_type, 1):
        pytest.skip(f"needs a device of type {device_type}")
    run = {
        kind: run_distributed(train_once, 1, kind, POLICIES[0], device_type=device_type)[0]
        for kind in ("none", recompute)
    }
    plain, again, memory, gradients = run["none"]
    assert (len(plain), len(again)) == (4, 0)
    forward, recomputed, other_memory, same_gradients = run[recompute]
    assert len(forward) == len(recomputed) == 4
    # Backward goes through the layers from the last to the first.
    for layer, (once, twice) in enumerate(zip(forward, reversed(recomputed), strict=True)):
        assert len(once) == len(twice) > 4
        for i, (a, b) in enumerate(zip(once, twice, strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"layer {layer}, saved tensor {i}"
    print(f"held between forward and backward: {memory} bytes, with {recompute} {other_memory}")
    assert (other_memory < 0.5 * memory) if recompute == "full" else (other_memory > memory)
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        if device_type == "cpu":
            assert torch.equal(gradient, same_gradients[name]), name
        else:
            torch.testing.assert_close(gradient, same_gradients[name], rtol=1e-3, atol=1e-6)
