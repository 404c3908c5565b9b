import importlib.metadata
import json
import os
import platform
import subprocess

import pytest

from fp4mega.tracking.manifest import (
    git_state,
    join_lives,
    package_versions,
    read_manifest,
    write_atomically,
)


def _git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_versions_are_the_installed_ones():
    versions = package_versions()
    assert versions["python"] == platform.python_version()
    assert versions["numpy"] == importlib.metadata.version("numpy")
    assert versions["fp4mega"] == importlib.metadata.version("fp4mega")
    assert "transformer-engine" in versions


def test_git_state_follows_the_repository(tmp_path):
    file = tmp_path / "package.py"
    file.write_text("a = 1\n")
    _git(tmp_path, "init", "-q")
    assert git_state(file) is None, "an untracked file is not of this repository"
    _git(tmp_path, "add", "package.py")
    _git(tmp_path, "commit", "-q", "-m", "first")
    assert git_state(file) == {"commit": _git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    file.write_text("a = 2\n")
    state = git_state(file)
    assert state is not None
    assert state["dirty"] is True


def test_manifest_names_no_machine_and_is_json(make_manifest):
    manifest = make_manifest()
    text = json.dumps(manifest)
    assert platform.node() not in text
    assert manifest["policy"] == "bf16"
    assert manifest["layers"][1] == {"layer": 1, "policy": "bf16", "backend": "reference"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [{"layer": 0, "policy": "x"}]}, "expected the keys layer, policy, backend"),
        ({"fingerprints": {"init": "a"}}, "expected the keys init, data"),
    ],
)
def test_wrong_arguments_are_refused(make_manifest, changes, message):
    with pytest.raises(ValueError, match=message):
        make_manifest(**changes)


def test_lives_keep_step_digest_and_what_changed(make_manifest):
    first, changes = join_lives(None, make_manifest(), step=0)
    assert changes == []
    later = make_manifest(
        recipe_digest="ffffffffffff", fingerprints={"init": None, "data": "data-1"}
    )
    second, changes = join_lives(first, later, step=40)
    assert changes == ['recipe_digest changed from "0123456789ab" to "ffffffffffff"']
    assert [(life["step"], life["recipe_digest"]) for life in second["lives"]] == [
        (0, "0123456789ab"),
        (40, "ffffffffffff"),
    ]
    assert second["lives"][0]["changes"] == []
    assert second["lives"][1]["changes"] == changes
    assert second["fingerprints"] == {"init": "init-1", "data": "data-1"}, (
        "the weights began in the first life"
    )

    third, changes = join_lives(second, make_manifest(recipe_digest="ffffffffffff"), step=60)
    assert changes == []
    assert [life["step"] for life in third["lives"]] == [0, 40, 60]


def test_recipe_fields_that_a_life_changed_are_named(make_manifest):
    recipe = {"name": "tiny", "train": {"steps": 20, "seed": 1}, "data": {"train": ["a"]}}
    first, _ = join_lives(None, make_manifest(recipe=recipe), step=0)
    longer = recipe | {"train": {"steps": 60, "seed": 1, "resume": True}}
    joined, changes = join_lives(first, make_manifest(recipe=longer, device="gpu"), step=20)
    assert changes == [
        'device changed from "cpu" to "gpu"',
        "train.resume changed from null to true",
        "train.steps changed from 20 to 60",
    ]
    assert [life["changes"] for life in joined["lives"]] == [[], changes]


def test_changed_policy_and_data_are_visible_at_a_resume(make_manifest):
    first, _ = join_lives(None, make_manifest(), step=0)
    other = make_manifest(
        policy="nvfp4_qk_fp8_pv", fingerprints={"init": "loaded", "data": "data-2"}
    )
    joined, changes = join_lives(first, other, step=5)
    assert joined["fingerprints"] == {"init": "init-1", "data": "data-2"}
    assert 'policy changed from "bf16" to "nvfp4_qk_fp8_pv"' in changes
    assert "data order changed from data-1 to data-2" in changes


def test_a_new_start_takes_the_new_fingerprints(make_manifest):
    first, _ = join_lives(None, make_manifest(), step=0)
    joined, _ = join_lives(first, make_manifest(fingerprints={"init": "b", "data": "d"}), step=0)
    assert joined["fingerprints"] == {"init": "b", "data": "d"}


def test_failed_write_keeps_the_old_manifest(tmp_path, make_manifest, monkeypatch):
    path = tmp_path / "manifest.json"
    old, _ = join_lives(None, make_manifest(recipe_digest="old"), step=0)
    write_atomically(path, {**old, "wandb_id": "a"})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, make_manifest(recipe_digest="new"))
    assert read_manifest(path)["recipe_digest"] == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ("[]", "schema=None"),
        ('{"schema": 9}', "schema=9"),
        ('{"schema": 1}', "run_name: Field required"),
    ],
)
def test_damaged_manifest_is_named(tmp_path, text, message):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"manifest.json: .*{message}"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": None}, "layers=null: Input should be a valid list"),
        ({"layers": [{"layer": 0, "policy": 1, "backend": "x"}]}, "layers.0.policy=1: "),
        ({"policy": ["bf16"]}, r'policy=\["bf16"\]: Input should be a valid string'),
        ({"world_size": "1"}, 'world_size="1": Input should be a valid integer'),
        ({"fingerprints": None}, "fingerprints=null: Input should be a valid dictionary"),
        ({"recipe": {"optimizer": 3}}, "recipe.optimizer=3: Input should be a valid dictionary"),
        ({"lives": [{"step": 0, "recipe_digest": "a"}]}, "lives.0.changes: Field required"),
        ({"lives": [{"step": -1, "recipe_digest": "a", "changes": []}]}, "lives.0.step=-1: "),
        ({"wandb_id": 5}, "wandb_id=5: Input should be a valid string"),
    ],
)
def test_a_field_that_readers_cannot_use_is_named(tmp_path, make_manifest, changes, message):
    joined, _ = join_lives(None, make_manifest(), step=0)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**joined, "wandb_id": "a"}))
    assert read_manifest(path)["policy"] == "bf16"
    path.write_text(json.dumps({**joined, "wandb_id": "a", **changes}))
    with pytest.raises(ValueError, match=f"manifest.json: {message}"):
        read_manifest(path)
