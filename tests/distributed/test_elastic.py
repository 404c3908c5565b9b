"""Ranks that are killed or hang under torchrun: the job goes on from the last good checkpoint, or says who is missing."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from fp4mega.testing.distributed import run_distributed
from fp4mega.tracking import read_run
from fp4mega.train import loop
from fp4mega.train.launch import Launch, start_model_parallel
from fp4mega.train.recipe import Recipe
from tests.distributed.training_harness import content

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compares bits, on a CPU")
SCRIPT = Path(__file__).with_name("faulty_training.py")
STEPS, SAVE_INTERVAL = 8, 3


def recipe_in(folder):
    recipe = content(
        train={"steps": STEPS, "save_interval": SAVE_INTERVAL},
        optimizer={"distributed": True},
        # the mock data have the byte tokenizer
        model={"vocab_size": 264},
    )
    recipe["tracking"] = {"dir": str(folder / "runs"), "wandb": {"mode": "disabled"}}
    return recipe


def start(folder, fault, *overrides, restarts=0, ranks=2):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_in(folder)))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(restarts),
        "--monitor-interval",
        "0.2",
    ]
    command += [str(SCRIPT), *fault, str(folder), str(folder / "recipe.yaml"), *overrides]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SCRIPT.parents[2]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


def finish(process):
    try:
        told, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun ends its processes
        told, _ = process.communicate(timeout=60)
        pytest.fail(f"did not end:\n{told}")
    return process.returncode, told


def run_folder(folder):
    return folder / "runs" / "t__nvfp4_qk_fp8_pv"


def history(folder):
    """Step, loss and gradient norm of every update, of the lives that count."""
    found = read_run(run_folder(folder)).events
    return [(e["step"], e["loss"], e["grad_norm"]) for e in found if e["type"] == "train"]


def assert_no_process_of(folder):
    """Every process of the run has the recipe on its command line, the writers of checkpoints too."""
    left = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if any(str(folder) in argument for argument in p.info["cmdline"] or ())
    ]
    assert left == []


def lives(folder):
    lines = (run_folder(folder) / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(e["status"], e["step"]) for e in found if e["type"] == "status"]


def train_undisturbed(world, recipe):
    """The whole run in the process group that is there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop,
            "start_process_groups",
            lambda launch, parallel, **timeout: start_model_parallel(parallel),
        )
        patch.setattr(loop, "stop_process_groups", lambda: None)
        launch = Launch(world.rank, world.size, world.rank, world.size, world.device, True)
        return loop.run(Recipe.parse(recipe), launch)


def train_with_another_view_in_rank_1(world, recipe):
    """As where a file system shows another machine's rename late: rank 1 sees no checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            original = loop.find_start
            patch.setattr(
                loop, "find_start", lambda recipe: replace(original(recipe), checkpoint=None)
            )
        return train_undisturbed(world, recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_distributed(train_undisturbed, 2, recipe_in(folder)) == [0, 0]
    assert [step for step, *_ in history(folder)] == list(range(1, STEPS + 1))
    return history(folder)


def test_every_rank_starts_where_the_first_one_found_the_run(undisturbed, tmp_path):
    recipe = recipe_in(tmp_path)
    first_half = recipe | {"train": recipe["train"] | {"steps": 3}}
    first_half["optimizer"] = recipe["optimizer"] | {"decay_steps": STEPS}
    assert run_distributed(train_undisturbed, 2, first_half) == [0, 0]
    assert run_distributed(train_with_another_view_in_rank_1, 2, recipe) == [0, 0]
    assert history(tmp_path) == undisturbed


@pytest.mark.parametrize(
    ("fault", "first_life_reached", "resume"),
    [(("die-in-step", "1", "5"), 4, "false"), (("die-in-save", "0", "6"), 6, "true")],
    ids=["in-a-step", "in-a-save"],
)
def test_a_killed_rank_is_restarted_from_the_last_good_checkpoint(
    fault, first_life_reached, resume, undisturbed, tmp_path
):
    """`train.resume=false` is about what was there before the launch."""
    # Two restarts to spare: between torchrun's choosing a port and a worker's listening on it, anyone may take it.
    code, told = finish(start(tmp_path, fault, f"train.resume={resume}", restarts=3))
    assert code == 0, told
    assert history(tmp_path) == undisturbed
    first, second = lives(tmp_path)[:-2], lives(tmp_path)[-2:]
    # A rank 0 that survives the other one may have had the time to say so.
    assert first in ([("started", 0)], [("started", 0), ("failed", first_life_reached)])
    assert second == [("resumed", SAVE_INTERVAL), ("finished", STEPS)]
    lines = (run_folder(tmp_path) / "events.jsonl").read_text().splitlines()
    steps = [e["step"] for e in map(json.loads, lines) if e["type"] == "train"]
    first_life = list(range(1, first_life_reached + 1))
    assert steps == [*first_life, *range(SAVE_INTERVAL + 1, STEPS + 1)]
    checkpoints = sorted(p.name for p in (run_folder(tmp_path) / "checkpoints").iterdir())
    assert checkpoints == ["iter_0000006", "iter_0000008", "latest"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_killed_beside_a_save_goes_on_from_the_save_before(ranks, undisturbed, tmp_path):
    """The save of step 6 is half written when a rank dies in step 7: it counts for nothing, and its writers are gone."""
    fault = ("die-beside-save", str(ranks - 1), "7")
    code, told = finish(start(tmp_path, fault, "train.async_save=true", restarts=3, ranks=ranks))
    assert code == 0, told
    assert_no_process_of(tmp_path)
    lines = (run_folder(tmp_path) / "events.jsonl").read_text().splitlines()
    found = [(e["step"], e["loss"]) for e in map(json.loads, lines) if e["type"] == "train"]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    assert found[3:6] == found[6:9]
    if ranks == 2:
        assert history(tmp_path) == undisturbed
    first, second = lives(tmp_path)[:-2], lives(tmp_path)[-2:]
    assert first in ([("started", 0)], [("started", 0), ("failed", 6)])
    assert second == [("resumed", SAVE_INTERVAL), ("finished", STEPS)]
    checkpoints = sorted(p.name for p in (run_folder(tmp_path) / "checkpoints").iterdir())
    assert checkpoints == ["iter_0000006", "iter_0000008", "latest"]


def test_a_hung_rank_ends_the_run_with_a_message_that_names_it(tmp_path):
    code, told = finish(start(tmp_path, ("hang", "1", "5"), "train.timeout_minutes=0.1"))
    assert code == 1
    assert re.search(
        r"error: rank 1 of 2 hung or gone; rank 0 was told: .*; the newest good checkpoint is .*iter_0000003",
        told,
    ), told
    assert lives(tmp_path)[-1] == ("failed", 4)
