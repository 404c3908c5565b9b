"""Twenty updates of `recipes/ci` on the reference backend, against a stored record.

On the kind of machine that made the record (same processor, torch and thread count) every number is equal to the last bit;
elsewhere sums are taken in another order, and loss and gradient norm agree to 2 % and 10 %. After a change of numerics
that is meant, and named by its policy, write the records again:

    python tests/train/test_goldens.py
"""

import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fp4mega.tracking import read_run
from fp4mega.train.launch import find_launch
from fp4mega.train.loader import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "ci" / "tiny_20steps_nvfp4_qk_fp8_pv.yaml"
GOLDENS = Path(__file__).parent / "goldens"
POLICIES = ("bf16", "nvfp4_qk_fp8_pv")


def machine():
    """What decides the order of sums."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": 1,
    }


def record(policy, folder):
    """Train and return the header and the record: one row for each update and each evaluation."""
    from fp4mega.train.loop import run

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE, [f"attention.policy={policy}", f"tracking.dir={folder}"])
    assert run(recipe, find_launch({})) == 0
    rows = [
        {key: event[key] for key in ("type", "step", "loss", "grad_norm") if key in event}
        for event in read_run(Path(folder) / recipe.run_name).events
        if "loss" in event
    ]
    return [{"policy": policy, **machine()}, *rows]


def path_of(policy):
    return GOLDENS / f"tiny_20steps__{policy}.jsonl"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the record is of a CPU run")
@pytest.mark.parametrize("policy", POLICIES)
def test_twenty_updates_equal_the_record(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    try:
        header, *rows = record(policy, tmp_path)
    finally:
        torch.set_num_threads(threads)
    golden_header, *golden = [json.loads(line) for line in path_of(policy).read_text().splitlines()]
    assert len(golden) == 20 + 2
    if header == golden_header:
        assert rows == golden
        return
    for row, expected in zip(rows, golden, strict=True):
        assert (row["type"], row["step"]) == (expected["type"], expected["step"])
        assert row["loss"] == pytest.approx(expected["loss"], rel=0.02)
        if "grad_norm" in expected:
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)


def test_the_policies_records_differ():
    """A policy that changed nothing would have the record of the other."""
    one, other = (path_of(policy).read_text().splitlines()[1:] for policy in POLICIES)
    assert sum(a == b for a, b in zip(one, other, strict=True)) == 0


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        with tempfile.TemporaryDirectory() as place:
            lines = [json.dumps(row) for row in record(name, place)]
        GOLDENS.mkdir(exist_ok=True)
        path_of(name).write_text("\n".join(lines) + "\n")
