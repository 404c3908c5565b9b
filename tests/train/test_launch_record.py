"""`train.resume=false` counts for a launch: its later lives go on from what the first one saved, other launches do not."""

import pytest
from run_harness import events

from fp4mega.train.launch_record import RECORD, check_launch_has_a_name
from fp4mega.train.recipe import Recipe, RecipeError
from fp4mega.train.run_dir import find_start


@pytest.fixture
def as_launch(monkeypatch):
    """Make this process part of a launch."""

    def become(torchrun, job="", requeues=""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", torchrun)
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", requeues)

    return become


@pytest.fixture
def begins_at(content):
    def find(resume):
        options = {**content["train"], "steps": 6, "save_interval": 2, "resume": resume}
        return find_start(Recipe.parse({**content, "train": options})).step

    return find


def test_only_the_launch_that_saved_goes_on(train, content, as_launch, begins_at, run_dir):
    as_launch("one", "77")
    train(steps=2, save_interval=2, resume=False)
    assert begins_at(resume=False) == 2  # an agent that joined late counts no restarts
    as_launch("two", "77")
    assert begins_at(resume=False) == 0  # the next call in the same allocation
    as_launch("two", "77", requeues="1")
    assert begins_at(resume=False) == 2
    as_launch("two", "78", requeues="1")
    assert begins_at(resume=False) == 0
    for nameless in ("none", ""):
        as_launch(nameless)
        assert begins_at(resume=False) == 0
        assert begins_at(resume=True) == 2


def test_a_life_that_saved_nothing_leaves_older_checkpoints_alone(
    train, content, as_launch, begins_at, run_dir
):
    as_launch("one")
    train(steps=2, save_interval=2)
    as_launch("two")
    content["optimizer"] |= {"lr": 1e30, "clip_grad": 0.0}
    with pytest.raises(RuntimeError, match="not finite"):
        train(save_interval=6, resume=False)
    assert [e["step"] for e in events(run_dir, "checkpoint")] == [2]
    assert begins_at(resume=False) == 0
    (run_dir / RECORD).write_text("2")
    with pytest.raises(RecipeError, match=r"launch\.json: not a pair of names: .*remove it"):
        begins_at(resume=False)


def test_restarts_need_a_name_of_the_launch():
    check_launch_has_a_name({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"})
    check_launch_has_a_name({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "x"})
    with pytest.raises(
        RecipeError, match=r"train\.resume=false: with --max-restarts=3 .*--rdzv-id"
    ):
        check_launch_has_a_name({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none"})
