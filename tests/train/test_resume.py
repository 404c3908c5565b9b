"""Runs that end early, as processes of their own: what comes after a resume is what would have come without it.

On a CPU exactly. A GPU adds up gradients in any order, so two runs there agree to rounding only.
"""

import signal

import pytest
import torch
from run_harness import events

from fp4mega.tracking import read_run

STOPS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


def history(folder):
    """Step, loss and gradient norm of every update, and every validation loss, as a reader sees them."""
    seen = [
        (e["type"], e["step"], e["loss"], e.get("grad_norm"))
        for e in read_run(folder).events
        if "loss" in e
    ]
    return sorted(seen)


def same(one, other):
    """Whether two histories agree."""
    if not torch.cuda.is_available():
        return one == other
    return [e[:2] for e in one] == [e[:2] for e in other] and all(
        a[2] == pytest.approx(b[2], rel=1e-2) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_and_three_more_equal_six(train, command, content, run_dir, precision):
    """The first half and the second run in different processes."""
    content["attention"]["policy"] = "nvfp4_qk_fp8_pv"
    folder = run_dir.with_name("t__nvfp4_qk_fp8_pv")
    train(precision=precision)
    straight = history(folder)
    content["name"] = "halves"
    content["train"] |= {"precision": precision, "save_interval": 3}
    train(steps=3, precision=precision, save_interval=3)
    process = command()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "resumed from" in told
    assert same(history(folder.with_name("halves__nvfp4_qk_fp8_pv")), straight)
    assert len(straight) == 6 + 2


@pytest.mark.parametrize(("number", "code"), STOPS, ids=["SIGTERM", "SIGINT"])
def test_a_signal_lets_the_step_finish_saves_and_resumes_exactly(
    train, long_run, content, run_dir, number, code
):
    process = long_run(logged=5, save_interval=1000)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert f"stopped by {number.name} after a whole step" in told
    status = events(run_dir, "status")[-1]
    stopped = events(run_dir, "train")[-1]["step"]
    assert (status["status"], status["reason"], status["step"]) == (
        "terminated",
        number.name,
        stopped,
    )
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [stopped]

    assert train(steps=stopped + 2, save_interval=1000, eval_interval=None) == 0
    resumed = history(run_dir)
    content["name"] = "straight"
    train(steps=stopped + 2, eval_interval=None)
    assert same(resumed, history(run_dir.with_name("straight__bf16")))


def test_a_killed_run_goes_on_from_its_last_checkpoint(train, long_run, run_dir):
    process = long_run(logged=7, save_interval=4)
    process.kill()
    process.communicate(timeout=60)
    saved = events(run_dir, "checkpoint")[-1]["step"]
    assert saved in (4, 8, 12, 16, 20, 24, 28, 32)
    train(steps=saved + 1, eval_interval=None)
    steps = [e["step"] for e in read_run(run_dir).events if e["type"] == "train"]
    assert steps == list(range(1, saved + 2))
