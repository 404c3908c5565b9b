import math
import shutil
from dataclasses import replace

import pytest
import torch
from run_harness import events

from fp4mega.attention import SideInputs, get_policy
from fp4mega.attention.backward_probes import probe_backward
from fp4mega.bench.bias import load_batch
from fp4mega.tracking import read_run
from fp4mega.train.loop import TrainingError
from fp4mega.train.recipe import Recipe, RecipeError


def losses(folder):
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(folder, "train")]


def test_loss_falls_far_below_that_of_guessing(train, run_dir, content):
    assert train(steps=40) == 0
    run = read_run(run_dir)
    first, *_, last = [e["loss"] for e in run.events if e["type"] == "train"]
    assert first == pytest.approx(math.log(264), abs=0.1)  # nothing is known of 264 tokens
    assert last < 0.45 * first
    valid = [e["loss"] for e in run.events if e["type"] == "eval"]
    assert valid[-1] < 0.5 * valid[0] + 0.5


def test_events_and_manifest_say_what_happened(train, run_dir, content):
    content["tracking"]["probe_interval"] = 4
    content["attention"] = {
        "policy": "nvfp4_qk_fp8_pv",
        "layers": [{"match": "layers.-1", "policy": "bf16"}],
    }
    folder = run_dir.with_name("t__nvfp4_qk_fp8_pv")
    assert train(log_interval=2) == 0
    kinds = [(e["type"], e["step"]) for e in events(folder)]
    assert kinds == [
        ("status", 0),
        ("train", 2),
        ("eval", 3),
        ("train", 4),
        ("probe", 4),
        ("probe", 4),
        ("train", 6),
        ("eval", 6),
        ("status", 6),
    ]
    last = events(folder, "train")[-1]
    assert last["tokens"] == 6 * 4 * 32
    assert last["tokens_per_s"] == pytest.approx(4 * 32 / (last["step_ms"] / 1e3))
    assert torch.cuda.is_available() or last["mfu"] is None
    manifest = read_run(folder).manifest
    assert [(layer["layer"], layer["policy"]) for layer in manifest["layers"]] == [
        (0, "nvfp4_qk_fp8_pv"),
        (1, "bf16"),
    ]
    content["train"]["log_interval"] = 2
    assert manifest["recipe"] == Recipe.parse(content).as_dict()
    probes = events(folder, "probe")
    assert [p["layer"] for p in probes] == [0, 1]
    assert 15 < probes[0]["q_sqnr_db"] < 30  # NVFP4
    assert all(p["qkv_grad_norm"] > 0 for p in probes)


def test_probed_tensors_are_what_the_bench_of_bias_reads(train, run_dir, content):
    content["tracking"] |= {"probe_interval": 3, "probe_tensors": True}
    content["attention"] = {"policy": "nvfp4_qk_mxfp4_pv-paper"}
    folder = run_dir.with_name("t__nvfp4_qk_mxfp4_pv-paper")
    assert train(steps=3) == 0
    paths = sorted((folder / "probes").iterdir())
    assert [path.name for path in paths] == ["000003_00.pt", "000003_01.pt"]
    assert all(path.stat().st_size < 100_000 for path in paths)  # one sample, not the batch
    for path, event in zip(paths, events(folder, "probe"), strict=True):
        seen = torch.load(path, weights_only=True)
        batch = load_batch(path, "cpu")
        problem = replace(batch.problem, dtype=seen["q"].dtype)
        policy = get_policy("nvfp4_qk_mxfp4_pv-paper")
        again = probe_backward(*seen.values(), SideInputs(), problem, policy)
        assert again["ds_row_sum"] == event["ds_row_sum"]


def test_learning_rate_warms_up_and_decays(train, run_dir, content):
    content["optimizer"]["decay_steps"] = 6
    train()
    rates = [e["lr"] for e in events(run_dir, "train")]
    assert rates[:3] == [0.0, pytest.approx(5e-3), pytest.approx(1e-2)]
    assert rates[5] < rates[4] < rates[3] < rates[2]
    assert rates[5] >= 1e-3


def test_policies_start_from_the_same_weights_and_batches(train, run_dir, content):
    train(steps=3)
    content["attention"]["policy"] = "nvfp4_qk_fp8_pv"
    train(steps=3)
    one, other = (read_run(run_dir.with_name(f"t__{p}")) for p in ("bf16", "nvfp4_qk_fp8_pv"))
    assert one.manifest["fingerprints"] == other.manifest["fingerprints"]
    first = [next(e["loss"] for e in run.events if e["type"] == "train") for run in (one, other)]
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    content["train"]["seed"] = 7
    content["name"] = "seed"
    train(steps=3)
    third = read_run(run_dir.with_name("seed__nvfp4_qk_fp8_pv")).manifest["fingerprints"]
    assert third["init"] != one.manifest["fingerprints"]["init"]
    assert third["data"] != one.manifest["fingerprints"]["data"]


def test_evaluation_leaves_training_as_it_was(train, run_dir, content):
    train()
    with_evaluation = losses(run_dir)
    content["name"] = "u"
    train(eval_interval=None)
    assert losses(run_dir.with_name("u__bf16")) == with_evaluation


def test_micro_batches_accumulate_to_the_same_update(train, run_dir, content):
    train()
    content["name"] = "u"
    train(micro_batch_size=4)
    for one, other in zip(losses(run_dir), losses(run_dir.with_name("u__bf16")), strict=True):
        assert one == pytest.approx(other, rel=2e-3)  # bf16 attention, sums in another order


def test_gradient_norm_is_logged_without_clipping_too(train, run_dir, content):
    train(steps=3)
    content["name"] = "u"
    content["optimizer"]["clip_grad"] = 0.0
    train(steps=3)
    # The first update has learning rate 0, so two norms must agree.
    for one, other in zip(
        losses(run_dir)[:2], losses(run_dir.with_name("u__bf16"))[:2], strict=True
    ):
        assert one == pytest.approx(other)


def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_checkpoint(train, run_dir, content):
    content["optimizer"] |= {"lr": 1e30, "clip_grad": 0.0}
    with pytest.raises(
        TrainingError,
        match=r"step 3: loss=.*, grad_norm=nan.*newest good checkpoint is .*iter_0000002",
    ):
        train(save_interval=2, log_interval=5)
    history = read_run(run_dir).events
    assert [(e["type"], e["step"]) for e in history] == [
        ("status", 0),
        ("checkpoint", 2),
        ("train", 3),
        ("status", 3),
    ]
    assert math.isnan(history[2]["grad_norm"])
    assert history[-1]["status"] == "failed"
    assert "not finite" in history[-1]["reason"]


def test_a_finished_run_is_left_alone(train, run_dir, capsys):
    train(steps=2)
    before = (run_dir / "events.jsonl").read_bytes()
    assert train(steps=2) == 0
    assert (run_dir / "events.jsonl").read_bytes() == before
    assert "already finished 2 steps" in capsys.readouterr().err


def test_a_finished_run_goes_on_when_steps_are_raised(train, run_dir):
    train(steps=2, save_interval=2)
    assert train(steps=4, save_interval=2) == 0
    assert [s for s, *_ in losses(run_dir)] == [1, 2, 3, 4]
    assert [e["status"] for e in events(run_dir, "status")] == [
        "started",
        "finished",
        "resumed",
        "finished",
    ]


def test_a_finished_run_without_checkpoint_cannot_go_on(train):
    train(steps=2)
    with pytest.raises(RecipeError, match="finished at step 2 without a checkpoint"):
        train(steps=4)
    assert train(steps=4, resume=False) == 0


def test_a_folder_of_another_experiment_is_refused(train, content):
    train(steps=2)
    content["optimizer"]["lr"] = 5e-3
    with pytest.raises(RecipeError, match=r"optimizer.lr=0.005: .*t__bf16 was trained with 0.01"):
        train(steps=4)


def test_resume_false_starts_anew_and_replaces_the_checkpoints(train, run_dir):
    train(steps=4, save_interval=2)
    train(steps=2, save_interval=1, resume=False)
    assert [s for s, *_ in losses(run_dir)] == [1, 2, 3, 4, 1, 2]
    assert sorted(p.name for p in run_dir.glob("checkpoints/iter*")) == [
        "iter_0000001",
        "iter_0000002",
    ]


def test_rewritten_data_is_refused_on_resume(train, content, corpus, run_dir, tmp_path):
    for ending in ("_train.bin", "_train.idx"):
        shutil.copy(f"{corpus}{ending}", tmp_path / f"own{ending}")
    content["data"]["train"] = [str(tmp_path / "own_train")]
    train(steps=4, save_interval=2)
    shutil.rmtree(run_dir / "checkpoints" / "iter_0000004")
    (run_dir / "manifest.json").unlink()
    words = bytearray((tmp_path / "own_train.bin").read_bytes())
    words[0::2] = words[0::2].replace(b"q", b"z")
    (tmp_path / "own_train.bin").write_bytes(words)
    with pytest.raises(RecipeError, match="the token files were rewritten since"):
        train(steps=4, save_interval=2)
