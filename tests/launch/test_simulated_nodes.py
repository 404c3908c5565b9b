"""Two torchrun agents in two network namespaces train one recipe; one node is killed and comes back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp4mega.tracking import read_run

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "ci" / "tiny_20steps_nvfp4_qk_fp8_pv.yaml"
STEPS, INTERVAL = 40, 10
OVERRIDES = [
    "attention.policy=bf16",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    f"train.steps={STEPS}",
    f"train.save_interval={INTERVAL}",
    "train.eval_interval=null",
    "tracking.probe_interval=null",
]


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def curve(folder):
    return [(e["step"], e["loss"]) for e in read_run(folder).events if e["type"] == "train"]


@pytest.fixture
def environment():
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def test_a_lost_node_comes_back_and_the_loss_curve_joins(tmp_path, environment):
    overrides = [*OVERRIDES, f"tracking.dir={tmp_path}"]
    done = subprocess.run(
        [str(ROOT / "launch" / "simulate_nodes.sh"), str(RECIPE), *overrides, "name=nodes"],
        capture_output=True,
        text=True,
        timeout=150,
        env={
            **environment,
            "KILL_AFTER": str(INTERVAL),
            "LIMIT": "120",
            "LOGS": str(tmp_path / "logs"),
        },
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    killed = re.search(r"killed (\d+) processes of the second node", done.stdout)
    assert int(killed[1]) >= 2  # the agent and its process
    assert not {name for name in namespaces() if name.startswith("fp4mega-")}

    folder = tmp_path / "nodes__bf16"
    run = read_run(folder)
    assert run.manifest["world_size"] == 2
    statuses = [(e["status"], e["step"]) for e in run.events if e["type"] == "status"]
    (resumed,) = [step for status, step in statuses if status == "resumed"]
    assert resumed >= INTERVAL
    assert resumed % INTERVAL == 0
    assert statuses[-1] == ("finished", STEPS)

    # One process that nobody interrupts: the same losses, up to the order of sums.
    subprocess.run(
        [sys.executable, "-m", "fp4mega.train", str(RECIPE), *overrides, "name=alone"],
        check=True,
        capture_output=True,
        timeout=120,
        env=environment,
    )
    alone, nodes = curve(tmp_path / "alone__bf16"), curve(folder)
    assert [step for step, _ in nodes] == list(range(1, STEPS + 1))
    assert [loss for _, loss in nodes] == pytest.approx([loss for _, loss in alone], rel=1e-4)
    assert nodes[-1][1] < 0.7 * nodes[0][1]


def test_a_run_that_is_there_already_is_not_touched(tmp_path, environment):
    folder = tmp_path / "nodes__bf16"
    folder.mkdir()
    done = subprocess.run(
        [
            str(ROOT / "launch" / "simulate_nodes.sh"),
            str(RECIPE),
            "attention.policy=bf16",
            "name=nodes",
            f"tracking.dir={tmp_path}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 2
    assert f"{folder} is there already" in done.stderr
    assert not {name for name in namespaces() if name.startswith("fp4mega-")}
