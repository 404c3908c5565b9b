"""The same runner on a GPU: bf16 weights, Megatron's fused functions, nccl."""

import pytest
import torch
from run_harness import events

from fp4mega.tracking import read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("policy", ["bf16", "nvfp4_qk_fp8_pv"])
def test_a_gpu_trains_saves_and_resumes(train, content, run_dir, policy):
    content["attention"]["policy"] = policy
    content["tracking"]["probe_interval"] = 10
    folder = run_dir.with_name(f"t__{policy}")
    assert train(steps=20, precision="bf16", save_interval=10) == 0
    assert train(steps=40, precision="bf16", save_interval=10) == 0
    run = read_run(folder)
    first, *_, last = [e["loss"] for e in run.events if e["type"] == "train"]
    assert last < 0.6 * first
    assert [e["step"] for e in events(folder, "train")] == list(range(1, 41))
    assert "cpu" not in run.manifest["device"]
    assert events(folder, "train")[-1]["tflops_per_gpu"] > 0


def test_a_gpu_starts_like_a_cpu_does(train, content, run_dir):
    """Not from the same weights, but from the same loss of knowing nothing, with gradients of the same size."""
    train(steps=2)
    first = events(run_dir, "train")[0]
    assert first["loss"] == pytest.approx(5.58, abs=0.1)
    assert 1.0 < first["grad_norm"] < 5.0
