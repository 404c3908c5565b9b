"""launch/slurm.sbatch against a Slurm of one node made of three small programs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fp4mega.tracking import read_run

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "ci" / "tiny_20steps_nvfp4_qk_fp8_pv.yaml"

PROGRAMS = {
    # Leaves srun's own options out and runs the rest as the node's task.
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        SLURM_NODEID=0 SLURM_NNODES=1 "$@" &
        task=$!
        echo "$task" >"$SLURM_LOG.task"
        wait "$task"
    """,
    "scancel": """
        echo "scancel $*" >>"$SLURM_LOG"
        kill -TERM "$(cat "$SLURM_LOG.task")"
    """,
    "scontrol": """
        if [[ $1 == show ]]; then echo 127.0.0.1; else echo "scontrol $*" >>"$SLURM_LOG"; fi
    """,
}


@pytest.fixture
def job(tmp_path):
    """Start the batch script on a tiny recipe, as Slurm would in a life of the job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(text)}")
        (folder / name).chmod(0o755)

    def start(life):
        return subprocess.Popen(
            [
                *("bash", str(ROOT / "launch" / "slurm.sbatch"), str(RECIPE)),
                *("attention.policy=bf16", "model.num_layers=1", "train.steps=60"),
                *("train.save_interval=50", "train.eval_interval=null"),
                *("tracking.probe_interval=null", f"tracking.dir={tmp_path}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "SLURM_JOB_ID": "4242",
                "SLURM_JOB_NODELIST": "node[1]",
                "SLURM_RESTART_COUNT": str(life),
                "SLURM_LOG": str(tmp_path / "slurm.log"),
            },
        )

    return start


def test_usr1_saves_and_queues_again_and_the_next_life_finishes(job, tmp_path):
    events = tmp_path / "tiny_20steps__bf16" / "events.jsonl"
    calls = tmp_path / "slurm.log"
    first = job(0)
    end = time.monotonic() + 90
    while not events.exists() or '"train"' not in events.read_text():
        assert time.monotonic() < end, "no step within 90 s"
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    told, _ = first.communicate(timeout=90)
    assert first.returncode == 0, told
    assert calls.read_text().splitlines() == [
        "scancel --signal=TERM 4242.0",
        "scontrol requeue 4242",
    ]
    run = read_run(events.parent)
    assert run.status == "terminated"
    stopped = run.events[-1]["step"]
    assert 0 < stopped < 60
    assert f"saved {events.parent}/checkpoints/iter_{stopped:07d}" in told

    calls.unlink()
    second = job(1)
    told, _ = second.communicate(timeout=90)
    assert second.returncode == 0, told
    run = read_run(events.parent)
    assert [(e["status"], e["step"]) for e in run.events if e["type"] == "status"][-2:] == [
        ("resumed", stopped),
        ("finished", 60),
    ]
    assert [e["step"] for e in run.events if e["type"] == "train"] == list(range(1, 61))
    assert not calls.exists()  # nothing to queue again
