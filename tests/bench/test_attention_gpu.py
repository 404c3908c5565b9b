"""The attention benchmark on a GPU, from end to end on a tiny shape, and that what it times is there."""

import csv

import pytest
import torch

from fp4mega.attention import get_policy
from fp4mega.bench import attention, traffic
from fp4mega.bench.__main__ import main
from fp4mega.bench.arms import backend_arm
from fp4mega.bench.gate import check_shape
from fp4mega.bench.shapes import Shape
from fp4mega.bench.timing import Stopwatch
from fp4mega.kernels import get_backend
from tests.bench.attention_doubles import WrongBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = Shape.parse("2,8/2,512,128:causal")


@pytest.fixture(scope="module")
def stopwatch() -> Stopwatch:
    return Stopwatch()


def test_command_from_end_to_end(tmp_path, capsys):
    files = [tmp_path / name for name in ("a.csv", "a.md", "a.png")]
    arguments = ["--shapes", str(SHAPE), "--policies", "mxfp4_qk_fp8_pv,bf16", "--peers", "available", "--repeats", "3"]  # fmt: skip
    outputs = ["--csv", str(files[0]), "--markdown", str(files[1]), "--plot", str(files[2])]
    assert main(["attention", *arguments, *outputs]) == 0
    shown = capsys.readouterr().out
    assert torch.cuda.get_device_name() in shown
    assert "x cudnn_bf16" in shown
    rows = list(csv.DictReader(files[0].open()))
    ours = [r for r in rows if r["arm"] == "triton/mxfp4_qk_fp8_pv"]
    assert {(r["phase"], r["scope"]) for r in ours} == {
        (p, s) for p in ("forward", "backward", "both") for s in ("call", "kernels")
    }
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
        if row["arm"] not in ("cudnn_bf16",):
            peer = next(
                r for r in rows if (r["arm"], r["phase"], r["scope"]) == ("cudnn_bf16", row["phase"], row["scope"])
            )  # fmt: skip
            wanted = float(peer["p50"]) / float(row["p50"])
            assert float(row["ratio_cudnn_bf16"]) == pytest.approx(wanted)
    assert "publishers" in files[1].read_text()
    assert files[2].stat().st_size > 5000


def test_kernels_alone_and_publishers_add_up_to_less_than_the_call(stopwatch):
    policy, backend = get_policy("mxfp4_qk_fp8_pv"), get_backend("triton")
    arm = backend_arm(backend, policy, SHAPE, SHAPE.tensors("cuda"))
    arm.forward()
    with traffic.recorded_launches() as launches:
        arm.forward()
    samples = stopwatch.kernels(arm.forward)
    assert len(samples) == 7
    for sample in samples:
        publishers = [n for n in sample if launches.is_publisher(n)]
        assert publishers
        assert set(sample) - set(publishers)
        assert set(launches.modules) <= set(sample)
    # q, k and v are read at least once each.
    assert launches.publisher_bytes > traffic.minimum_traffic(SHAPE.problem, policy, "forward")


def test_a_copy_moves_what_such_memory_can(stopwatch):
    assert 1e11 < stopwatch.copy_bandwidth(repeats=3) < 1e13


@pytest.mark.parametrize("policy", ["mxfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv"])
def test_gate_on_the_device(policy):
    backend = get_backend("triton")
    assert check_shape(backend, SHAPE, get_policy(policy), "cuda").green
    assert not check_shape(WrongBackend("dq sign"), SHAPE, get_policy(policy), "cuda").green


def test_a_wrong_backend_gets_no_times():
    chosen = attention.plan(
        shapes=[str(SHAPE)], policies=["bf16"], backends=[WrongBackend("scaled output")],
        peers=["none"], repeats=2,
    )  # fmt: skip
    results = attention.Results()
    attention.run(chosen, results)
    assert not results.green
    assert not results.rows
