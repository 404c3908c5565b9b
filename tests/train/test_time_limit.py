"""`train.max_seconds`: a run ends in good order when its time is over, and the next call goes on as if nothing had been."""

import pytest
from run_harness import events

from fp4mega.tracking import read_run
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.signals import TIME_LIMIT, StopRequest


def losses(folder):
    return read_run(folder).series("train", "loss")[1].tolist()


def test_time_is_over_after_a_step_and_the_next_call_goes_on(
    train, command, content, run_dir, long_corpus
):
    content["data"] = {"kind": "indexed", "train": [long_corpus]}
    content["train"] |= {"steps": 2000, "save_interval": 1000, "eval_interval": None}
    process = command("train.max_seconds=1")  # which importing torch alone takes longer than
    _, told = process.communicate(timeout=200)
    assert process.returncode == 0, told
    assert "stopped by train.max_seconds after a whole step" in told
    status = events(run_dir, "status")[-1]
    assert (status["status"], status["reason"]) == ("terminated", "train.max_seconds")
    stopped = events(run_dir, "train")[-1]["step"]
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [stopped]
    assert stopped == 1

    assert train(steps=4, save_interval=1000, eval_interval=None) == 0
    resumed = losses(run_dir)
    content["name"] = "straight"
    train(steps=4, eval_interval=None)
    assert resumed == losses(run_dir.with_name("straight__bf16"))
    assert len(resumed) == 4


def test_the_evaluation_due_at_a_stop_is_made_up_for(train, content, run_dir):
    content["optimizer"]["decay_steps"] = 3
    assert train(max_seconds=1e-3, save_interval=4, eval_interval=1, steps=3) == 0
    assert train(max_seconds=1e-3, save_interval=4, eval_interval=1, steps=3) == 0
    assert train(save_interval=4, eval_interval=1, steps=3) == 0
    found = read_run(run_dir).series("eval", "loss")
    content["name"] = "straight"
    assert train(eval_interval=1, steps=3) == 0
    wanted = read_run(run_dir.with_name("straight__bf16")).series("eval", "loss")
    assert found[0].tolist() == wanted[0].tolist() == [1, 2, 3]
    assert found[1].tolist() == wanted[1].tolist()


def test_a_run_that_finishes_in_time_is_finished(train, content, run_dir):
    content["train"] |= {"save_interval": 6}
    assert train(max_seconds=1e9) == 0
    assert events(run_dir, "status")[-1]["status"] == "finished"


def test_a_time_limit_needs_checkpoints(content):
    content["train"]["max_seconds"] = 60.0
    with pytest.raises(RecipeError, match=r"train\.max_seconds=60\.0: needs save_interval"):
        Recipe.parse(content)


def test_time_counts_from_the_start_of_the_process():
    request = StopRequest(1e-3)
    request.check_time()
    assert request.signal == TIME_LIMIT
    patient = StopRequest(1e9)
    patient.check_time()
    assert patient.signal == 0


def test_another_wish_to_stop_comes_first():
    with StopRequest(1e-3) as request:
        request.signal = 15
        request.check_time()
        assert request.signal == 15
    assert StopRequest().signal == 0
