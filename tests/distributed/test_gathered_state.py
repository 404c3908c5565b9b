"""Checkpoints of a distributed optimizer where its parts are gathered late or padded: bit-equal on going on from them."""

import pytest
from megatron.core import distributed, parallel_state

from fp4mega.testing.distributed import enough_devices, run_distributed
from fp4mega.train.recipe import Recipe
from tests.distributed.training_harness import build, content, go_on, state_digest

pytestmark = pytest.mark.skipif(not enough_devices("cpu", 2), reason="compares bits, on a CPU")

SAVED, LAST = 2, 4
SHALLOW = {"num_layers": 2}
SINK = {"softmax_type": "learnable"}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}

# id: (ranks, sections of the recipe, overlapped communication, elements in a bucket)
LAYOUTS = {
    # FP32 parameters are the optimizer's own, BF16 ones are copied from its own
    "overlap": (2, {"model": SHALLOW}, True, None),
    "overlap-bf16-interleaved": (
        4,
        {"parallel": INTERLEAVED, "train": {"precision": "bf16"}},
        True,
        None,
    ),
    # three ranks share no bucket of this model without padding; two share those without the four logits of a layer's sink
    "padded-for-three-ranks": (
        3,
        {"model": SHALLOW, "train": {"global_batch_size": 3}},
        True,
        8000,
    ),
    "padded-behind-sinks": (
        2,
        {"model": {**SHALLOW, **SINK}, "train": {"precision": "bf16"}},
        True,
        8000,
    ),
    # a tied embedding has a bucket of its own
    "padded-behind-a-tied-embedding": (
        2,
        {"model": {**SINK, "tie_embeddings": True}, "parallel": INTERLEAVED},
        False,
        None,
    ),
}


def run_on(world, recipe, overlap, folder, saves):
    """From the newest checkpoint, or from the start, to the last step; with the state on arriving and after the save."""
    training, batches = build(world, recipe, overlap=overlap)
    seen = {}

    def look(step):
        seen[step] = state_digest(training)

    curve = go_on(world, training, batches, recipe, folder, LAST, saves, look)
    padded = sum(
        bucket.offset != sum(b.numel_unpadded for b in buffer.buckets[:i])
        for chunk in training.chunks
        for buffer in chunk.buffers
        for i, bucket in enumerate(buffer.buckets)
    )
    for chunk in training.chunks:
        if overlap:
            chunk.start_param_sync(force_sync=True)
    look(LAST)
    parallel_state.destroy_model_parallel()
    return {"curve": curve, "states": seen, "padded": padded}


def run_three_times(world, plain, overlap, bucket):
    """Without a save, with one, and on from it, in one process."""
    recipe = Recipe.parse(plain)
    original = distributed.DistributedDataParallelConfig
    with pytest.MonkeyPatch.context() as small:
        small.setattr(
            distributed,
            "DistributedDataParallelConfig",
            lambda **options: original(**options, bucket_size=bucket),
        )
        return [
            run_on(world, recipe, overlap, world.folder / "checkpoints", saves)
            for saves in ((), (SAVED,), ())
        ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_repeats_every_bit(layout):
    ranks, sections, overlap, bucket = LAYOUTS[layout]
    options = {"steps": LAST, **sections.get("train", {})}
    plain = content(
        **{
            "optimizer": {"distributed": True},
            "attention": {"policy": "bf16"},
            **sections,
            "train": options,
        }
    )
    results = run_distributed(run_three_times, ranks, plain, overlap, bucket)
    for whole, saving, resumed in results:
        assert saving["curve"] == whole["curve"]  # a save changes nothing
        assert resumed["curve"] == whole["curve"][SAVED:]
        assert resumed["states"][SAVED] == saving["states"][SAVED]
        assert whole["states"][LAST] == saving["states"][LAST] == resumed["states"][LAST]
    padded = sum(whole["padded"] for whole, *_ in results)
    assert (padded > 0) == layout.startswith("padded")
