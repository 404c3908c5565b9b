"""A model cut over two processes under torchrun trains as in one process."""

import os
import subprocess
import sys

import pytest
import yaml
from run_harness import events

from fp4mega.tracking import read_run


def curve(folder):
    return [(e["loss"], e.get("grad_norm", 0.0)) for e in read_run(folder).events if "loss" in e]


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        ([], 1e-6),  # data parallel: the same sums, reduced over processes
        (
            ["parallel.tensor=2", "parallel.sequence=true"],
            2e-3,
        ),  # other matrix shapes under bf16 attention
    ],
    ids=["data", "tensor-sequence"],
)
def test_two_processes_train_as_one(
    train, content, run_dir, long_corpus, tmp_path, overrides, tolerance
):
    content["data"] = {"kind": "indexed", "train": [long_corpus]}
    train()
    content["name"] = "two"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [
            *torchrun,
            "-m",
            "fp4mega.train",
            str(tmp_path / "recipe.yaml"),
            "train.save_interval=3",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    folder = run_dir.with_name("two__bf16")
    one, two = curve(run_dir), curve(folder)
    assert len(one) == len(two) == 8
    for here, there in zip(one, two, strict=True):
        assert there == pytest.approx(here, rel=tolerance)

    # From the checkpoint of two processes one process goes on.
    content["name"] = "straight"
    train(steps=8)
    content["name"] = "two"
    assert train(steps=8, save_interval=3) == 0
    assert [e["step"] for e in events(folder, "train")] == list(range(1, 9))
    assert curve(folder)[-1] == pytest.approx(
        curve(run_dir.with_name("straight__bf16"))[-1], rel=10 * tolerance
    )
