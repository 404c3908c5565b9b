import json
import logging
import subprocess
import sys

import pytest

from fp4mega.tracking import Tracker, read_run


def _statuses(run):
    return [(e["status"], e["step"]) for e in run.of_type("status")]


def test_one_life(tmp_path, make_manifest, train_values):
    with Tracker(tmp_path / "runs" / "tiny", manifest=make_manifest()) as tracker:
        for step in (1, 2, 3):
            tracker.log("train", step, **train_values(4.0 - step))
        tracker.log("eval", 3, loss=1.5, split="valid")
    run = read_run(tmp_path / "runs" / "tiny")
    assert _statuses(run) == [("started", 0), ("finished", 3)]
    assert run.status == "finished"
    steps, losses = run.series("train", "loss")
    assert (steps.tolist(), losses.tolist()) == ([1, 2, 3], [3.0, 2.0, 1.0])
    assert run.manifest["lives"][0]["step"] == 0


def test_resume_continues_both_files(tmp_path, make_manifest, train_values, caplog):
    tracker = Tracker(tmp_path, manifest=make_manifest())
    for step in (1, 2, 3, 4):
        tracker.log("train", step, **train_values(10.0 + step))
    wandb_id = json.loads((tmp_path / "manifest.json").read_text())["wandb_id"]
    # No close: the process was killed, in the middle of a line.
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"type": "train", "step": 5, "ti')

    resumed = make_manifest(
        recipe_digest="ffffffffffff", fingerprints={"init": None, "data": "data-1"}
    )
    with (
        pytest.warns(UserWarning, match="cut off a torn last line"),
        caplog.at_level(logging.WARNING, "fp4mega.tracking"),
        Tracker(tmp_path, manifest=resumed, resume_step=2) as tracker,
    ):
        tracker.log("train", 3, **train_values(23.0))
    run = read_run(tmp_path)
    assert run.series("train", "loss")[1].tolist() == [11.0, 12.0, 23.0]
    assert _statuses(run) == [("started", 0), ("resumed", 2), ("finished", 3)]
    assert [life["step"] for life in run.manifest["lives"]] == [0, 2]
    assert run.manifest["wandb_id"] == wandb_id
    assert run.manifest["fingerprints"]["init"] == "init-1"
    [warning] = run.of_type("warning")
    assert "recipe_digest changed" in warning["message"]
    assert "recipe_digest changed" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("bad loss"), "failed", "ValueError: bad loss"),
        (KeyboardInterrupt(), "terminated", "KeyboardInterrupt: "),
        (SystemExit(3), "terminated", "SystemExit: 3"),
    ],
)
def test_status_says_how_it_ended(tmp_path, make_manifest, train_values, error, status, reason):
    def train():
        with Tracker(tmp_path, manifest=make_manifest()) as tracker:
            tracker.log("train", 7, **train_values())
            raise error

    with pytest.raises(type(error)):
        train()
    run = read_run(tmp_path)
    last = run.of_type("status")[-1]
    assert (last["status"], last["step"], last["reason"]) == (status, 7, reason)


def test_close_by_hand_wins_and_closed_is_closed(tmp_path, make_manifest, train_values):
    with Tracker(tmp_path, manifest=make_manifest()) as tracker:
        with pytest.raises(
            ValueError, match="status='stopped': allowed: failed, finished, terminated"
        ):
            tracker.close("stopped")
        tracker.close("terminated")
        with pytest.raises(RuntimeError, match="closed"):
            tracker.log("train", 1, **train_values())
    assert _statuses(read_run(tmp_path)) == [("started", 0), ("terminated", 0)]


def test_wrong_event_is_refused_and_the_file_stays_good(tmp_path, make_manifest, train_values):
    with Tracker(tmp_path, manifest=make_manifest()) as tracker:
        with pytest.raises(ValueError, match="missing field"):
            tracker.log("train", 1, loss=1.0)
        tracker.log("train", 1, **train_values(2.0))
    assert read_run(tmp_path).series("train", "loss")[1].tolist() == [2.0]


def test_running_and_killed_look_alike(make_run):
    path = make_run("a", [1.0], status="finished")
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "events.jsonl").write_text("".join(lines[:-1]))
    assert read_run(path).status == "running"


def test_tracking_imports_neither_torch_nor_wandb_nor_matplotlib():
    program = (
        "import sys, fp4mega.tracking, fp4mega.tracking.compare\n"
        "found = {'torch', 'megatron', 'wandb', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
