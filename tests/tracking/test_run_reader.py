import math

import pytest

from fp4mega.tracking import read_run
from fp4mega.tracking.events import make_event
from fp4mega.tracking.manifest import join_lives
from fp4mega.tracking.wandb_sink import to_wandb


class FakeRemote:
    def __init__(self, config, events):
        self.config = config
        # wandb adds its own columns, gives None for what a row lacks, and writes NaN as a string.
        keys = {key for event in events for key in to_wandb(event)}
        self._rows = [
            {"_step": i, "_timestamp": 100.0 + i, **dict.fromkeys(keys), **to_wandb(event)}
            for i, event in enumerate(events)
        ]
        for row in self._rows:
            row.update({k: "NaN" for k, v in row.items() if isinstance(v, float) and math.isnan(v)})

    def scan_history(self):
        return iter([*self._rows, {"_step": 99, "_timestamp": 1.0, "_runtime": 3}])


class FakeApi:
    def __init__(self, remote):
        self._remote = remote
        self.asked = []

    def run(self, path):
        self.asked.append(path)
        if self._remote is None:
            raise LookupError("could not find run")
        return self._remote


def test_wandb_run_reads_like_the_local_one(make_manifest, train_values):
    joined, _ = join_lives(None, make_manifest(), step=0)
    joined["wandb_id"] = "abc123"
    events = [
        make_event("status", 0, {"status": "started"}),
        make_event("train", 1, train_values(3.0, mfu=None)),
        make_event("train", 2, train_values(math.nan)),
        make_event("probe", 2, {"layer": 11, "q_sqnr_db": 20.5}),
        make_event("train", 3, train_values(9.0)),
        make_event("status", 2, {"status": "resumed"}),
        make_event("train", 3, train_values(1.0, grad_norm=None)),
        make_event("eval", 3, {"loss": 1.25, "split": "valid"}),
        make_event("status", 3, {"status": "finished"}),
    ]
    config = {**joined["recipe"], "manifest": {k: v for k, v in joined.items() if k != "recipe"}}
    api = FakeApi(FakeRemote(config, events))
    run = read_run("team/project/abc123", api=api)
    assert api.asked == ["team/project/abc123"]
    assert run.name == "tiny__bf16"
    assert run.manifest["recipe"] == joined["recipe"]
    steps, losses = run.series("train", "loss")
    assert steps.tolist() == [1, 2, 3]
    assert losses[[0, 2]].tolist() == [3.0, 1.0]
    assert math.isnan(losses[1])
    assert run.series("train", "tokens")[1].tolist() == [128, 128, 128]
    assert run.series("train", "grad_norm")[0].tolist() == [1, 2]
    assert run.series("eval", "loss", split="valid")[1].tolist() == [1.25]
    assert run.series("probe", "q_sqnr_db", layer=11)[1].tolist() == [20.5]
    assert run.status == "finished"


def test_wandb_keys_are_sections_and_layers(train_values):
    row = to_wandb(make_event("probe", 4, {"layer": 3, "p_zeroed": 0.5, "q_sqnr_db": math.inf}))
    assert row["step"] == 4
    assert row["probe/layer_03/p_zeroed"] == 0.5
    assert math.isnan(row["probe/layer_03/q_sqnr_db"])
    assert set(row) == {"step", "probe/layer_03/p_zeroed", "probe/layer_03/q_sqnr_db"}
    assert to_wandb(make_event("train", 1, train_values(2.0, mfu=None))).keys() == {"step"} | {
        f"train/{name}" for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms")
    }


def test_what_is_no_run_is_said(tmp_path, make_run):
    with pytest.raises(ValueError, match=r"run 'nowhere': no such directory, and not a wandb path"):
        read_run("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"it has no manifest.json and no events.jsonl"):
        read_run(tmp_path / "empty")
    with pytest.raises(
        ValueError,
        match=r"'a/b/c': no such directory, and not readable as a wandb run: LookupError: could not",
    ):
        read_run("a/b/c", api=FakeApi(None))
    with pytest.raises(ValueError, match="not written by fp4mega"):
        read_run("a/b/c", api=FakeApi(FakeRemote({"lr": 1}, [])))
    with pytest.raises(ValueError, match="run 'a/b/c': the manifest in its config: schema=None"):
        read_run("a/b/c", api=FakeApi(FakeRemote({"lr": 1, "manifest": 5}, [])))


def test_policy_counts_the_layers_that_differ(make_run):
    layers = [
        {"layer": i, "policy": "bf16" if i in (0, 3) else "nvfp4", "backend": "reference"}
        for i in range(4)
    ]
    assert (
        read_run(make_run("a", [1.0], policy="nvfp4", layers=layers)).policy == "nvfp4 + 2 x bf16"
    )
    assert (
        read_run(make_run("b", [1.0], policy="nvfp4", world_size=8, device="H200")).hardware
        == "8 x H200"
    )
