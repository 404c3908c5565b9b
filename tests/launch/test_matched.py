"""launch/matched.sh: which arms it starts, with what, what it refuses, and a real pair."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4mega.tracking import read_run

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "ci" / "tiny_20steps_nvfp4_qk_fp8_pv.yaml")

# In the place of training: writes a run whose loss depends on policy and seed, with the fingerprints of its seed, and
# notes the command line. DIVERGES names a policy whose arm fails; OTHER_DATA one that sees other batches; SLEEP is how long
# an arm takes in seconds.
ARM = """
import json, os, sys, time
from fp4mega.tracking import Tracker, build_manifest

fields = dict(argument.split("=", 1) for argument in sys.argv[2:])
name, policy, seed = fields["name"], fields["attention.policy"], int(fields["train.seed"])
run_name = f"{name}__{policy}"
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps([run_name, seed, fields["tracking.wandb.group"]]) + "\\n")
with open(os.environ["NOTES"] + ".times", "a") as times:
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    times.write(json.dumps([run_name, device, fields.get("train.max_seconds"), time.time()]) + "\\n")
time.sleep(float(os.environ.get("SLEEP", 0)))
data = f"data{seed}" + ("x" if policy == os.environ.get("OTHER_DATA") else "")
manifest = build_manifest(
    run_name=run_name, recipe={}, recipe_digest="0" * 64, policy=policy, layers=[],
    seed=seed, device="cpu", world_size=1, fingerprints={"init": f"init{seed}", "data": data},
)
fails = policy == os.environ.get("DIVERGES")
with Tracker(f"{fields['tracking.dir']}/{run_name}", manifest=manifest, wandb=None) as tracker:
    for step in (1, 2):
        loss = float("nan") if fails and step == 2 else 3.0 + seed / 10 + (policy != "bf16") / 100
        tracker.log("train", step, loss=loss, grad_norm=1.0, lr=1.0, tokens_per_s=1.0, step_ms=1.0, tokens=step)
    if fails:
        raise RuntimeError("not finite")
"""


@pytest.fixture
def matched(tmp_path):
    """Run the script with pretended arms; returns the finished process."""
    (tmp_path / "arm.py").write_text(ARM)

    def run(*arguments, launcher=f"{sys.executable} {tmp_path / 'arm.py'}", **environment):
        return subprocess.run(
            [
                *(str(ROOT / "launch" / "matched.sh"), RECIPE, f"tracking.dir={tmp_path / 'runs'}"),
                *(["--launcher", launcher] if launcher else []),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=550,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "NOTES": str(tmp_path / "notes"),
                **environment,
            },
            check=False,
        )

    return run


def started(tmp_path):
    notes = tmp_path / "notes"
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def test_every_policy_under_every_seed_in_one_group_and_a_band(matched, tmp_path):
    done = matched(
        *("--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "3"),
        *("--gate", "final_loss_gap=1%", "--gate", "loss_falls=0.5"),
    )
    assert done.returncode == 1, done.stderr
    assert "FAIL loss_falls=0.5" in done.stdout
    assert started(tmp_path) == [
        [f"tiny_20steps_seed{seed}__{policy}", seed, "tiny_20steps_matched"]
        for seed in (1, 2, 3)
        for policy in ("bf16", "nvfp4_qk_fp8_pv")
    ]
    assert "bf16, 3 seeds: train loss mean 3.2000, from 3.1000 to 3.3000" in done.stdout
    assert "nvfp4_qk_fp8_pv, 3 seeds: train loss mean 3.2100" in done.stdout
    assert "mean gap +0.0100" in done.stdout
    assert "PASS final_loss_gap=1%" in done.stdout
    compared = json.loads((tmp_path / "runs" / "tiny_20steps_matched.json").read_text())
    assert [band["policy"] for band in compared["bands"]] == ["bf16", "nvfp4_qk_fp8_pv"]
    assert (tmp_path / "runs" / "tiny_20steps_matched.png").stat().st_size > 10_000


def test_arms_on_other_data_are_refused_before_the_next_seed(matched, tmp_path):
    done = matched(
        *("--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "4,9"), OTHER_DATA="nvfp4_qk_fp8_pv"
    )
    assert done.returncode == 2
    assert "data order (fingerprints.data): data4 and data4x" in done.stderr
    assert [seed for _, seed, _ in started(tmp_path)] == [4, 4]


def test_a_diverged_arm_is_a_result(matched, tmp_path):
    policies = "bf16,nvfp4_qk_fp8_pv,mxfp4_qk_fp8_pv"
    done = matched("--policies", policies, "--group", "study", DIVERGES="nvfp4_qk_fp8_pv")
    assert done.returncode == 1
    assert [group for _, _, group in started(tmp_path)] == ["study"] * 3
    assert "not finite from step 2" in done.stdout
    assert "FAIL finite" in done.stdout


def test_a_diverged_arm_is_not_run_again(matched, tmp_path):
    arguments = ("--policies", "bf16,nvfp4_qk_fp8_pv")
    assert matched(*arguments, DIVERGES="nvfp4_qk_fp8_pv").returncode == 1
    again = matched(*arguments)
    assert again.returncode == 1
    assert "diverged before, not run again" in again.stdout
    assert [name.partition("__")[2] for name, *_ in started(tmp_path)] == [
        *("bf16", "nvfp4_qk_fp8_pv", "bf16"),
    ]


def times(tmp_path):
    return [json.loads(line) for line in (tmp_path / "notes.times").read_text().splitlines()]


def test_jobs_run_at_once_spread_over_the_gpus(matched, tmp_path):
    done = matched(
        *("--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "2", "--jobs", "4"),
        CUDA_VISIBLE_DEVICES="3,5",
        SLEEP="4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    began = times(tmp_path)
    # All four were there before the first had slept, two on each GPU.
    assert max(at for *_, at in began) - min(at for *_, at in began) < 4
    assert sorted(device for _, device, *_ in began) == ["3", "3", "5", "5"]
    assert "nvfp4_qk_fp8_pv, 2 seeds: train loss mean 3.1600" in done.stdout
    assert (tmp_path / "runs" / "tiny_20steps_seed1__bf16.log").exists()


def test_jobs_wait_for_a_place_and_outlive_a_divergence(matched, tmp_path):
    policies = "bf16,nvfp4_qk_fp8_pv,mxfp4_qk_fp8_pv"
    done = matched(
        *("--policies", policies, "--jobs", "1"),
        CUDA_VISIBLE_DEVICES="0",
        DIVERGES="nvfp4_qk_fp8_pv",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name.partition("__")[2] for name, *_ in times(tmp_path)] == policies.split(",")
    assert "FAIL finite" in done.stdout


def test_jobs_on_other_data_are_refused(matched):
    done = matched(
        *("--policies", "bf16,nvfp4_qk_fp8_pv", "--jobs", "2"),
        CUDA_VISIBLE_DEVICES="0",
        OTHER_DATA="nvfp4_qk_fp8_pv",
    )
    assert done.returncode == 2
    assert "data order (fingerprints.data): data1 and data1x" in done.stderr


def test_no_arm_starts_when_the_time_is_up(matched, tmp_path):
    arguments = ("--policies", "bf16,nvfp4_qk_fp8_pv,mxfp4_qk_fp8_pv", "--jobs", "2")
    limited = (*arguments, "--max-seconds", "30", "train.save_interval=10")
    done = matched(*limited, CUDA_VISIBLE_DEVICES="0", SLEEP="30")
    assert done.returncode == 0, done.stdout + done.stderr
    began = times(tmp_path)
    assert {name.partition("__")[2] for name, *_ in began} == {"bf16", "nvfp4_qk_fp8_pv"}
    assert len(began) == 2
    assert all(1 <= int(limit) <= 30 for _, _, limit, _ in began)
    assert "mxfp4_qk_fp8_pv, seed 1: not begun" in done.stdout
    rest = matched(*arguments, CUDA_VISIBLE_DEVICES="0")
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "mxfp4_qk_fp8_pv-" not in rest.stdout
    assert "not begun" not in rest.stdout


def test_without_a_gpu_jobs_run_one_after_another(matched, tmp_path):
    done = matched("--policies", "bf16,nvfp4_qk_fp8_pv", "--jobs", "2", SLEEP="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU is visible" in done.stdout
    first, second = (at for *_, at in times(tmp_path))
    assert second - first > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "bf16"], "expected two or more"),
        (["--policies", "bf16,bf16"], "given twice: bf16"),
        (["--policies", "bf16,nvfp4", "--seeds", "2"], 'attention.policy="nvfp4": unknown policy'),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "zero"], "--seeds zero"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "train.seed=3"], "sets this field itself"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "train.max_seconds=3"], "sets this field itself"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--jobs", "0"], "--jobs 0"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--jobs", "2", "--gpus", "2"], "--gpus 2"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--max-seconds", "1.5"], "--max-seconds 1.5"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "train.stepz=3"], "train.stepz=3: unknown field"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--gpus", "x"], "--gpus x: expected 1 or more"),
        (
            ["--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "01,2"],
            'train.seed="01": expected integer',
        ),
        (
            ["--policies", "bf16,nvfp4_qk_fp8_pv", "--seeds", "1,3000000000"],
            "train.seed=3000000000",
        ),
        (
            ["--policies", "bf16, nvfp4_qk_fp8_pv"],
            "--policies: ' nvfp4_qk_fp8_pv' is read as 'nvfp4_qk_fp8_pv'",
        ),
        (
            ["--policies", "bf16,nvfp4_qk_fp8_pv", "--gate", "final_los_gap=2%"],
            "gate 'final_los_gap=2%': unknown name 'final_los_gap'",
        ),
        (
            ["--policies", "bf16,nvfp4_qk_fp8_pv", "--gate", "band", "--seeds", "2"],
            "--gate band: needs 3 seeds or more; --seeds gives 2",
        ),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--group", "a/b"], "--group a/b"),
        (["--policies", "bf16,nvfp4_qk_fp8_pv", "--group", "7"], "tracking.wandb.group=7"),
        (
            [
                "--policies",
                "bf16,nvfp4_qk_fp8_pv",
                "--max-seconds",
                "9",
                "train.save_interval=null",
            ],
            "save_interval",
        ),
    ],
)
def test_bad_input_starts_no_arm(matched, tmp_path, arguments, message):
    done = matched(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not started(tmp_path)


def test_arms_that_make_no_step_are_said_to_have_made_none(matched):
    done = matched("--policies", "bf16,nvfp4_qk_fp8_pv", launcher="false")
    assert done.returncode == 2
    assert "error: fewer than two arms made a step" in done.stderr
    assert "--max-seconds" not in done.stderr


def test_a_real_pair_is_matched_and_not_run_again(matched, tmp_path):
    arguments = [
        *("--policies", "bf16,nvfp4_qk_fp8_pv", "--gate", "final_loss_gap=1%"),
        *(
            "model.num_layers=1",
            "train.steps=3",
            "optimizer.warmup_steps=1",
            "train.eval_interval=null",
        ),
        "tracking.probe_interval=null",
    ]
    done = matched(*arguments, launcher=None)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [
        read_run(tmp_path / "runs" / f"tiny_20steps_seed1__{policy}")
        for policy in ("bf16", "nvfp4_qk_fp8_pv")
    ]
    assert runs[0].manifest["fingerprints"] == runs[1].manifest["fingerprints"]
    losses = [run.series("train", "loss")[1].tolist() for run in runs]
    assert losses[0] != losses[1]
    assert "PASS final_loss_gap=1%" in done.stdout

    again = matched(*arguments, launcher=None)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (again.stdout + again.stderr).count("already finished 3 steps") == 2
    assert "step 1/3" not in again.stdout
