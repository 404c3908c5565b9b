import errno
import json
import random
import resource
import shutil

import numpy as np
import pytest
import torch
from run_harness import events

from fp4mega.train import checkpoint
from fp4mega.train.checkpoint import (
    CheckpointError,
    describe_newest,
    list_checkpoints,
    newest_checkpoint,
)
from fp4mega.train.recipe import Recipe, RecipeError


def names(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_only_the_newest_are_kept(train, run_dir):
    train(save_interval=1, keep_checkpoints=3)
    assert names(run_dir) == ["iter_0000004", "iter_0000005", "iter_0000006", "latest"]
    assert newest_checkpoint(run_dir / "checkpoints").step == 6
    assert [e["path"] for e in events(run_dir, "checkpoint")][-1] == "checkpoints/iter_0000006"


def test_unfinished_folders_are_ignored_and_removed(train, run_dir):
    train(steps=2, save_interval=2)
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "iter_0000002", checkpoints / "iter_0000009.tmp")
    shutil.copytree(checkpoints / "iter_0000002", checkpoints / "iter_0000008")
    (checkpoints / "iter_0000008" / "checkpoint.json").write_text('{"schema": 1, "st')
    assert [c.step for c in list_checkpoints(checkpoints)] == [2]
    train(steps=4, save_interval=2)
    assert "iter_0000009.tmp" not in names(run_dir)
    assert newest_checkpoint(checkpoints).step == 4


GOOD = {"schema": 1, "step": 2, "recipe": {}, "recipe_digest": "a", "data_fingerprint": "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "this version reads 1"),
        ('{"schema": 2}', "schema=2: this version reads 1"),
        (
            '{"schema": 1, "step": 2, "recipe": {}}',
            "recipe_digest, data_fingerprint missing: the file is damaged; remove",
        ),
        ("", "not a JSON file: .*: the file is damaged; remove .*iter_0000002 to resume from an"),
        ("\xff", "not a JSON file: .*: the file is damaged"),
        (json.dumps(GOOD | {"step": "2"}), 'step="2": expected an integer'),
        (json.dumps(GOOD | {"step": True}), "step=true: expected an integer"),
        (json.dumps(GOOD | {"step": 8}), "step=8: expected that of the folder's name"),
        (json.dumps(GOOD | {"recipe": [1]}), r"recipe=\[1\]: expected a mapping"),
        (json.dumps(GOOD | {"data_fingerprint": None}), "data_fingerprint=null: expected a string"),
        (None, "No such file or directory: the file is damaged"),
    ],
)
@pytest.mark.parametrize("latest", ["iter_0000002", None])
def test_a_damaged_description_is_an_error_that_names_it(tmp_path, content, message, latest):
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    if content is not None:
        (folder / "checkpoint.json").write_text(content, encoding="latin-1")
    if latest is not None:
        (tmp_path / "latest").write_text(f"{latest}\n")
    with pytest.raises(RecipeError, match=f"iter_0000002/checkpoint.json: .*{message}"):
        newest_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_not_passed_over_in_silence(train, run_dir, monkeypatch):
    train(steps=4, save_interval=2)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "iter_0000004" / "checkpoint.json").write_text("")
    before = names(run_dir), (run_dir / "events.jsonl").read_bytes()
    told = r"iter_0000004/checkpoint.json: .*; remove .*iter_0000004 to resume from an older one"
    with monkeypatch.context() as patch:
        patch.setattr("fp4mega.train.loop.start_process_groups", None)
        with pytest.raises(RecipeError, match=told):
            train(steps=6, save_interval=2)
        (checkpoints / "latest").unlink()
        with pytest.raises(RecipeError, match=told):
            train(steps=6, save_interval=2)
    assert (run_dir / "events.jsonl").read_bytes() == before[1]
    assert "iter_0000004" in describe_newest(checkpoints)
    shutil.rmtree(checkpoints / "iter_0000004")
    assert newest_checkpoint(checkpoints).step == 2
    (checkpoints / "iter_0000002" / "checkpoint.json").write_text("")
    with pytest.raises(RecipeError, match="iter_0000002/checkpoint.json"):
        train(steps=6, save_interval=2)


def test_latest_decides_and_its_absence_does_not_hurt(train, run_dir):
    train(steps=4, save_interval=2)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "latest").write_text("iter_0000002\n")
    assert newest_checkpoint(checkpoints).step == 2
    (checkpoints / "latest").write_text("iter_0000077\n")
    assert newest_checkpoint(checkpoints).step == 4
    (checkpoints / "latest").unlink()
    assert newest_checkpoint(checkpoints).step == 4
    assert newest_checkpoint(run_dir / "nowhere") is None


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (
            "model",
            {"hidden_size": 128, "kv_channels": 16},
            r"model.hidden_size=128: .*iter_0000002 was trained with 64",
        ),
        ("model", {"num_layers": 3}, r"model.num_layers=3: .* was trained with 2"),
        (
            "attention",
            {"policy": "mxfp4_qk_fp8_pv"},
            r'attention.policy="mxfp4_qk_fp8_pv": .* was trained with "bf16"',
        ),
        (
            "attention",
            {"layers": [{"match": "layers.0", "policy": "exact"}]},
            r'attention.layers=.*"exact"',
        ),
        ("train", {"precision": "bf16"}, r'train.precision="bf16": .* was trained with "fp32"'),
        ("train", {"global_batch_size": 8}, r"train.global_batch_size=8: .* was trained with 4"),
    ],
)
def test_a_checkpoint_of_another_experiment_is_refused(
    train, content, run_dir, section, changes, message, monkeypatch
):
    train(steps=2, save_interval=2)
    content[section] |= changes
    recipe = Recipe.parse(content)
    other = run_dir.with_name(recipe.run_name)
    if other != run_dir:  # another policy has another folder: move the checkpoint there
        shutil.copytree(run_dir / "checkpoints", other / "checkpoints")
    monkeypatch.setattr(
        "fp4mega.train.loop.start_process_groups", None
    )  # refused before any process group
    with pytest.raises(RecipeError, match=message) as refused:
        train(save_interval=2)
    assert "To start anew choose another `name`" in str(refused.value)


def test_a_damaged_checkpoint_is_an_error_that_names_it(train, run_dir):
    train(steps=2, save_interval=2)
    data = run_dir / "checkpoints" / "iter_0000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000002: could not be loaded: .*remove it to resume from an older",
    ):
        train(steps=4, save_interval=2)


def assert_good_checkpoint_survives(train, run_dir, error):
    assert f"the newest good checkpoint is {run_dir}/checkpoints/iter_0000002" in str(error.value)
    assert names(run_dir) == ["iter_0000002", "latest"]
    assert events(run_dir)[-1]["status"] == "failed"
    assert "could not save step 4" in events(run_dir)[-1]["reason"]
    assert train(steps=4, save_interval=2) == 0
    assert [e["step"] for e in events(run_dir, "train")] == [1, 2, 3, 4, 3, 4]


def test_a_full_disk_in_the_writer_keeps_the_good_checkpoint(train, run_dir):
    """The forked writer of tensors hits a limit on the size of a file, as it would hit the end of the disk."""
    train(steps=2, save_interval=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"could not save step 4 to .*iter_0000004: .* MiB free there\)"
        ) as error:
            train(steps=4, save_interval=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_good_checkpoint_survives(train, run_dir, error)


def test_a_full_disk_at_the_end_keeps_the_good_checkpoint(train, run_dir, monkeypatch):
    train(steps=2, save_interval=2)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr("fp4mega.train.checkpoint._flush", full)
        with pytest.raises(CheckpointError, match="OSError: .*No space left on device") as error:
            train(steps=4, save_interval=2)
    assert_good_checkpoint_survives(train, run_dir, error)


def test_the_checkpoint_says_what_it_is(train, run_dir, content):
    train(steps=2, save_interval=2)
    meta = json.loads((run_dir / "checkpoints" / "iter_0000002" / "checkpoint.json").read_text())
    assert (meta["step"], meta["consumed_samples"], meta["policy"]) == (2, 8, "bf16")
    assert meta["recipe"]["model"]["hidden_size"] == 64
    recipe = Recipe.parse(meta["recipe"])
    assert recipe.digest == meta["recipe_digest"]


def test_random_generators_come_back(train, monkeypatch):
    """They go through the checkpoint although a step without dropout draws nothing: the next draws are the same."""
    drawn = []

    def draw():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    save, restore = checkpoint._rng_state, checkpoint._set_rng_state

    def save_and_draw():
        state = save()
        drawn.append(draw())
        return state

    def restore_and_draw(state):
        draw()  # somewhere else in the sequence
        restore(state)
        drawn.append(draw())

    monkeypatch.setattr(checkpoint, "_rng_state", save_and_draw)
    train(steps=2, save_interval=2)
    monkeypatch.setattr(checkpoint, "_rng_state", save)
    monkeypatch.setattr(checkpoint, "_set_rng_state", restore_and_draw)
    train(steps=4, save_interval=2)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]
