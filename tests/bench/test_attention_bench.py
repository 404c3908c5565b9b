"""The attention benchmark without a device: arguments, operations and bytes, percentiles, order, and a run on a clock of our own."""

import math

import numpy as np
import pytest
import torch

from fp4mega.attention import get_policy
from fp4mega.bench import attention, peers, traffic
from fp4mega.bench.__main__ import main
from fp4mega.bench.gate import Answer, unquantized
from fp4mega.bench.shapes import Shape
from fp4mega.bench.timing import Activity, interleaved, percentile, split_calls, times
from fp4mega.kernels import ReferenceBackend
from tests.bench.attention_doubles import CountingStopwatch, WrongBackend

SMALL = "1,2/1,64,32"


def run(chosen, **arguments):
    results = attention.Results()
    attention.run(chosen, results, stopwatch=CountingStopwatch(), **arguments)
    return results


def plan(**changes):
    chosen = {"shapes": [SMALL], "policies": ["bf16"], "backends": [ReferenceBackend()], "peers": ["none"], "device": "cpu"}  # fmt: skip
    return attention.plan(**(chosen | changes))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "4,32,4096,128"], "shape='4,32,4096,128': expected B,H/G,S,D"),
        (["--shapes", "4,32/3,4096,128"], "num_kv_heads=3"),
        (["--shapes", "4,32/32,4096,512"], "head_dim=512"),
        (["--shapes", "0,32/32,4096,64"], "batch"),
        (["--shapes", "1,2/1,64,32:full"], "expected"),
        (["--policies", "nvfp4_qk_fp8_p"], "nearest is 'nvfp4_qk_fp8_pv'"),
        (["--backends", "tritn"], "nearest is 'triton'"),
        (["--peers", "fa3"], "nearest is 'fa4'"),
        (["--peers", "cudnn_bf16,nobody"], "peer='nobody' is unknown"),
        (["--repeats", "0"], "repeats=0"),
        (["--gate-heads", "0"], "gate_heads=0"),
        (["--plot", "figure.bmp"], "allowed suffixes: .png"),
        (["--csv", "nowhere/at/all.csv"], "does not exist"),
        (["--csv", "rows", "--markdown", "./rows"], "rows: given for two outputs"),
    ],
)
def test_bad_arguments_end_before_any_device_work(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a device"))
    with pytest.raises(SystemExit) as stop:
        main(["attention", "--backends", "reference", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_nothing_to_time(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["attention", "--backends", "reference", "--shapes", SMALL, "--peers", "none"])
    assert stop.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_an_error_by_name_and_a_note_otherwise(monkeypatch):
    monkeypatch.setattr(peers, "_version", lambda package: None)
    with pytest.raises(ValueError, match="peer='fa4' cannot run: the package flash-attn-4"):
        plan(peers=["cudnn_bf16", "fa4"])
    chosen = plan(peers=["available"])
    assert [p.name for p in chosen.peers] == ["cudnn_bf16", "flash_bf16"]
    assert set(chosen.left_out) == {"cudnn_fp8", "fa4"}
    assert not chosen.strict
    assert plan(peers=["cudnn_bf16"]).strict


def test_what_a_backend_declines_is_a_note_on_some_shapes_and_an_error_on_all():
    class NoncausalOnly(ReferenceBackend):
        def explain(self, problem, policy, device):
            return None if problem.causal == "none" else "only noncausal"

    chosen = plan(shapes=[SMALL, SMALL + ":causal"], backends=[NoncausalOnly()])
    assert [str(s) for s in chosen.contestants[0].shapes] == [SMALL]
    assert chosen.contestants[0].declined == {SMALL + ":causal": "only noncausal"}
    with pytest.raises(
        ValueError, match="policy='bf16' does not run on backend 'reference': only noncausal"
    ):
        plan(shapes=[SMALL + ":causal"], backends=[NoncausalOnly()])


# Operations and bytes


def test_operations_follow_the_convention():
    full = Shape.parse("4,32/8,4096,128")
    assert full.flops("forward") == 4 * 4 * 32 * 4096 * 4096 * 128
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert full.flops("both") == 3.5 * full.flops("forward")
    assert Shape.parse("4,32/8,4096,128:causal").flops("both") == full.flops("both") / 2
    assert str(Shape.parse("4,32/8,4096,128:causal")) == "4,32/8,4096,128:causal"


def test_bytes_for_backward_are_those_of_the_tensors():
    shape, backend = Shape.parse("2,8/2,64,128:causal"), ReferenceBackend()
    rows, kv = 2 * 64 * 8, 2 * 64 * 2
    bf16 = 2 * 128 * (2 * rows + 2 * kv) + 4 * rows
    assert traffic.bf16_saved_bytes(shape.problem) == bf16
    assert traffic.saved_bytes(shape.problem, get_policy("bf16"), backend) == bf16
    # NVFP4 q and k: half a byte and a scale byte for 16, a float32 for each of B and head; E4M3 v with one too; m and L of each row.
    four_bit = (64 + 8) * (rows + kv) + 4 * 2 * (8 + 2)
    v = 128 * kv + 4 * 2 * 2
    want = 2 * 128 * rows + 4 * rows + four_bit + v + 2 * 4 * rows
    policy = get_policy("nvfp4_qk_fp8_pv")
    assert traffic.saved_bytes(shape.problem, policy, backend) == want
    row = traffic.saved_row(shape, "arm", policy, backend)
    assert row.ratio == want / bf16
    # Counted another way: what forward really returns.
    x = shape.tensors("cpu")
    result = backend.forward(x.q, x.k, x.v, shape.case.make().side, shape.problem, policy)
    held = sum(t.numel() * t.itemsize for t in (result.out, result.lse, *result.saved))
    assert held == want


def test_the_least_that_publishers_move():
    problem = Shape.parse("2,8/2,64,128").problem
    q, kv, rows = 2 * 64 * 8 * 128, 2 * 64 * 2 * 128, 2 * 64 * 8
    nvfp4, mxfp4 = get_policy("nvfp4_qk_fp8_pv"), get_policy("mxfp4_qk_fp8_pv")
    assert traffic.minimum_traffic(problem, nvfp4, "forward") == (q + kv) * 2.5625 + kv * 3
    assert traffic.minimum_traffic(problem, mxfp4, "forward") == (q + kv) * 2.53125 + kv * 3
    assert traffic.minimum_traffic(problem, nvfp4, "backward") == q * 6 + 4 * rows
    assert traffic.minimum_traffic(problem, get_policy("bf16"), "forward") == 0
    assert traffic.minimum_traffic(problem, get_policy("bf16"), "backward") == 0


def test_launches_count_each_tensor_once_and_idle_ones_not_at_all():
    launches = traffic.Launches()
    x, y = torch.zeros(10, dtype=torch.bfloat16), torch.zeros(4, 4)
    launches.add(
        "_amax_kernel", "fp4mega.kernels.triton.publish_input", (x, x, 3, None, y), idle=False
    )
    launches.add("_amax_kernel", "fp4mega.kernels.triton.publish_input", (x,), idle=False)
    launches.add("_expand", "fp4mega.kernels.triton.publish_values", (y,), idle=True)
    launches.add("_forward_kernel", "fp4mega.kernels.triton.forward", ((x, (y,)),), idle=False)
    assert launches.bytes == {"_amax_kernel": 20 + 64 + 20, "_expand": 0, "_forward_kernel": 84}
    assert launches.publisher_bytes == 104
    assert launches.is_publisher("_expand")
    assert launches.is_publisher("void at::native::fill")
    assert not launches.is_publisher("_forward_kernel")


def test_publisher_figures():
    row = traffic.PublisherRow("s", "a", "forward", 2.0, 1_000_000_000, 4_000_000_000, 4e12)
    assert row.bandwidth == 2e12
    assert row.of_copy == 0.5
    assert row.floor == 0.25


# Times


@pytest.mark.parametrize("count", [1, 2, 5, 20, 21])
def test_percentiles_are_numpys(count):
    samples = np.random.default_rng(count).normal(size=count).tolist()
    for percent in (0, 20, 50, 80, 100):
        assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent))
    assert times(samples) == pytest.approx(np.percentile(samples, [20, 50, 80]))


def test_percentile_of_nothing():
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_arms_take_turns_in_an_order_that_rotates():
    stopwatch, called = CountingStopwatch(), []
    calls = {name: (lambda n=name: called.append(n)) for name in "abc"}
    found = interleaved(calls, repeats=3, stopwatch=stopwatch)
    assert "".join(called) == "aaabbbccc" + "abc" + "bca" + "cab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_profile_is_split_at_the_flushes():
    flush = "flush"
    seen = [
        Activity("k", 9, 500), Activity(flush, 0, 90), Activity("k", 1, 1000), Activity("m", 5, 250),
        Activity(flush, 20, 90), Activity("m", 21, 100), Activity("m", 23, 100), Activity("before", -1, 7),
    ]  # fmt: skip
    assert split_calls(seen, flush) == [{"k": 1.5, "m": 0.25}, {"m": pytest.approx(0.2)}]
    with pytest.raises(RuntimeError, match="0 calls"):
        split_calls([Activity("k", 0, 1)], flush)
    with pytest.raises(RuntimeError, match="2 calls, 1 with kernels"):
        split_calls([*seen[1:3], Activity(flush, 30, 1)], flush)


# Peers


def test_a_peer_must_compute_attention():
    shape = Shape.parse("2,4/2,96,32:causal")
    x = shape.tensors("cpu")
    right = unquantized(x, causal=True)
    peer = peers.PEERS["flash_bf16"]
    assert attention.peer_error(right, peer, shape, x) is None
    full = unquantized(x, causal=False)
    assert "out has relL2" in str(attention.peer_error(full, peer, shape, x))
    assert right.dv is not None
    halved = right._replace(dv=right.dv * 0.5)
    assert "dv has relL2 0.5" in str(attention.peer_error(halved, peer, shape, x))
    nothing = right._replace(dq=torch.full_like(x.q, math.nan))
    assert "dq has relL2 nan" in str(attention.peer_error(nothing, peer, shape, x))


def test_fp8_quantization_uses_the_range_and_comes_back():
    x = torch.randn(2, 16, 2, 16, generator=torch.Generator().manual_seed(0)) * 100
    for dtype, largest, error in (
        (torch.float8_e4m3fn, 448.0, 0.03),
        (torch.float8_e5m2, 57344.0, 0.06),
    ):
        codes, descale = peers.cudnn_fp8.quantize(x.bfloat16(), dtype, largest)
        assert codes.dtype == dtype
        assert codes.float().abs().max() == largest
        back = codes.float() * descale
        assert (back - x).norm() / x.norm() < error


# A whole run


def fake_peer(name, answer=None, **changes):
    """A peer that is torch's own attention, in BF16, or that gives another answer."""

    def open_(shape, x):
        def both(result=None):
            return answer(x) if answer else unquantized(x, causal=shape.causal)

        return attention.Arm(name, both, both, both)

    return peers.Peer(name, "", open_, **changes)


def test_a_run_times_what_the_gate_lets_through(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fa4", fake_peer("fa4"))
    chosen = plan(
        shapes=[SMALL, SMALL + ":causal"],
        backends=[ReferenceBackend(), WrongBackend("scaled output")],
        policies=["bf16", "direct_p_fast"],
        peers=["fa4"],
        repeats=3,
    )
    lines = []
    results = run(chosen, say=lines.append)
    assert not results.green
    for (_, arm), verdict in results.verdicts.items():
        assert verdict.green == (not arm.startswith("wrong/"))
    assert {r.arm for r in results.rows} == {"reference/bf16", "reference/direct_p_fast", "fa4"}
    assert {r.phase for r in results.rows if r.arm == "reference/direct_p_fast"} == {"forward"}
    assert {(r.phase, r.scope) for r in results.rows if r.arm == "fa4"} == {
        (p, s) for p in ("forward", "backward", "both") for s in ("call", "kernels")
    }
    # Kernels of two profiled calls take .75 and 1.5 ms on this stopwatch.
    alone = next(r for r in results.rows if r.scope == "kernels")
    assert alone[4:7] == pytest.approx((0.9, 1.125, 1.35))
    assert alone.tflops == Shape.parse(alone.shape).flops(alone.phase) / alone.p50 / 1e9
    assert any("FAILED" in line for line in lines)
    assert {s.arm for s in results.saved} == {"reference/bf16", "wrong/bf16"}


def test_a_backend_that_raises_has_failed_the_gate_and_others_go_on():
    results = run(plan(backends=[WrongBackend("raises"), ReferenceBackend()]))
    assert "RuntimeError: out of resource" in str(results.verdicts[SMALL, "wrong/bf16"])
    assert {r.arm for r in results.rows} == {"reference/bf16"}
    assert not results.green


def test_no_speedup_without_a_green_gate():
    row = attention.Row(SMALL, "arm", "forward", "call", 1, 2, 3, 1)
    peer = row._replace(arm="fa4", p50=5)
    results = attention.Results(rows=[row, peer])
    assert results.ratio(row, "fa4") == 2.5
    assert results.ratio(row, "cudnn_bf16") is None
    verdict = attention.Verdict(((0, 0),), 1, failure="wrong")
    results.verdicts[SMALL, "arm"] = verdict
    assert results.ratio(row, "fa4") is None
    assert not results.green


def test_a_peer_that_fails_is_an_error_by_name_and_a_note_otherwise(monkeypatch):
    def broken(x):
        raise RuntimeError("no kernel image\nand more")

    def wrong(x):
        return unquantized(x, causal=True)

    monkeypatch.setattr(
        peers, "PEERS", {"broken": fake_peer("broken", broken), "wrong": fake_peer("wrong", wrong)}
    )
    with pytest.raises(RuntimeError, match="peer broken on .*: RuntimeError: no kernel image$"):
        run(plan(peers=["broken"]))
    results = run(plan(peers=["available"]))
    assert any("peer broken not run" in note for note in results.notes)
    assert any("peer wrong not run" in note and "relL2" in note for note in results.notes)
    assert {r.arm for r in results.rows} == {"reference/bf16"}


def test_shapes_a_peer_cannot_run_are_said(monkeypatch):
    why = "D=32: too small"
    peer = fake_peer("fa4", explain_shape=lambda shape: why)
    monkeypatch.setattr(peers, "PEERS", {"fa4": peer})
    results = run(plan(peers=["available"]))
    assert results.notes == [f"peer fa4 not run on {SMALL}: {why}"]
    with pytest.raises(RuntimeError, match="too small"):
        run(plan(peers=["fa4"]))


def test_answers_have_the_shapes_of_their_inputs():
    x = Shape.parse(SMALL).tensors("cpu")
    answer = unquantized(x, causal=False)
    assert isinstance(answer, Answer)
    for got, like in ((answer.out, x.q), (answer.dq, x.q), (answer.dk, x.k), (answer.dv, x.v)):
        assert got is not None
        assert got.shape == like.shape
