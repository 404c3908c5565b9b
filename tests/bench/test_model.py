"""From cycles to times, the calibrations, the verdict, and the command."""

import os
from pathlib import Path

import pytest

from fp4mega.bench import model
from fp4mega.bench.__main__ import main
from fp4mega.bench.model_chip import GB200, Chip
from fp4mega.bench.model_predict import (
    CALIBRATION,
    POINTS,
    calibrate,
    crossing,
    cycles,
    error,
    key_tiles,
    makespan,
    verdict,
    waves,
)
from fp4mega.bench.shapes import Shape
from tests.bench.model_doubles import kernel

BIG = Shape.parse(CALIBRATION.shape)


def test_the_quoted_cycles_are_the_published_time_on_this_chip() -> None:
    """1926 cycles a tile are quoted for 1.611 ms: 64 heads of 64 x 64 tiles on 152 SMs, waves not counted."""
    tiles = 64 * 64 * 64 / GB200.sms
    assert CALIBRATION.milliseconds * GB200.clock * 1e6 / tiles == pytest.approx(1926, rel=5e-4)


def test_waves() -> None:
    """64 heads of 32 CTAs: 13.5 on 152 SMs, so 14 rounds of 64 key tiles."""
    assert waves(BIG, GB200) == (pytest.approx(2048 / 152), 14)
    assert cycles(BIG, 1000.0, GB200) == 14 * (64 * 1000 + GB200.fixed)
    # One CTA more than fits costs a whole round.
    chip = Chip(sms=32, fixed=0)
    assert cycles(Shape.parse("1,4/4,2048,128"), 10.0, chip) == 160
    assert cycles(Shape.parse("1,5/5,2048,128"), 10.0, chip) == 320


def test_key_tiles() -> None:
    assert key_tiles(Shape.parse("1,1/1,1024,128")) == [8] * 4
    assert key_tiles(Shape.parse("1,1/1,1024,128:causal")) == [2, 4, 6, 8]
    assert key_tiles(Shape.parse("2,3/1,300,128:causal")) == [2] * 6 + [3] * 6


def test_makespan() -> None:
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert makespan([2, 2, 2, 3, 3], 2) == 7
    assert makespan([4, 1, 1, 1, 1], 2) == 4
    assert makespan([1, 1, 1, 1, 4], 2) == 6
    assert makespan([5], 152) == 5


def test_causal_order() -> None:
    """Longest first ends sooner, and never before the work divided by the SMs."""
    shape = Shape.parse("1,32/8,4096,128:causal")
    longest, shortest = (cycles(shape, 100.0, GB200, order=o) for o in ("longest first", "shortest first"))  # fmt: skip
    work = sum(GB200.fixed + 100.0 * n for n in key_tiles(shape)) / GB200.sms
    assert work <= longest < shortest
    persistent = cycles(shape, 100.0, GB200, order="persistent")
    # Items dealt beforehand: the fixed cost once, and an end near that of who goes to the first free.
    tiles = sum(key_tiles(shape)) / GB200.sms
    assert GB200.fixed + 100.0 * tiles <= persistent < longest
    assert cycles(BIG, 1000.0, GB200, order="persistent") == 14 * 64 * 1000 + GB200.fixed
    with pytest.raises(ValueError, match="order='random'"):
        cycles(shape, 100.0, GB200, order="random")  # type: ignore[arg-type]


def test_more_of_anything_takes_no_less_time() -> None:
    texts = ("1,8/8,2048,128", "1,8/8,4096,128", "1,16/16,4096,128", "2,16/16,4096,128")
    times = [cycles(Shape.parse(t), 100.0, GB200) for t in texts]
    assert times == sorted(times)
    assert cycles(BIG, 100.0, Chip(sms=148)) >= cycles(BIG, 100.0, GB200)
    assert cycles(BIG, 101.0, GB200) > cycles(BIG, 100.0, GB200)


def test_crossing() -> None:
    assert crossing(lambda x: x * x, 9.0, 10.0, steps=30) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="200 lies outside of 0 to 100"):
        crossing(lambda x: x * x, 200.0, 10.0)


def test_both_calibrations_reproduce_their_point_and_only_that() -> None:
    made = kernel(113)
    hand_off, clock = calibrate(made)
    for calibration in (hand_off, clock):
        period = calibration.simulate(made.roles(), {}).period
        assert calibration.milliseconds(period, BIG) == pytest.approx(CALIBRATION.milliseconds, rel=0.01)  # fmt: skip
    assert hand_off.chip == GB200
    assert hand_off.hand_off > clock.hand_off
    assert clock.chip.clock < GB200.clock
    # The smaller shape's time follows from rounds of waves alone: 3 of 32 key tiles against 14 of 64.
    small = Shape.parse(POINTS[0].shape)
    ratio = clock.milliseconds(period, BIG) / clock.milliseconds(period, small)
    assert ratio == pytest.approx(14 * (64 * period + 2000) / (3 * (32 * period + 2000)))


def test_a_chip_that_cannot_reach_the_point_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter reproduces it"):
        calibrate(kernel(113), Chip(clock=0.5))


def test_derived_points() -> None:
    bf16, _, fast, accurate = POINTS
    assert bf16.milliseconds / fast.milliseconds == pytest.approx(1.83)
    assert bf16.milliseconds / accurate.milliseconds == pytest.approx(1.53)
    assert error(2.0, 1.6) == pytest.approx(0.25)


def test_verdict() -> None:
    assert "worthless" in verdict([0.03, 1.58])
    assert "+3% to +158%" in verdict([0.03, 1.58])
    assert "worthless" in verdict([-0.4, 0.1])
    assert "worthless" not in verdict([-0.2, 0.1])


def test_no_prediction_before_the_errors() -> None:
    made = kernel(113)
    fresh = model.Model(calibrate(made), made)
    with pytest.raises(RuntimeError, match="errors on published points"):
        _ = fresh.span


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernels", "nothing"], "policy='nothing' is not registered"),
        (["--kernels", "bf16"], "kernel 'bf16'"),
        (["--shapes", "1,8/8,4096"], "expected B,H/G,S,D"),
        (["--shapes", "1,8/8,4096,64"], "head dim 64"),
        (["--sms", "0"], "sms=0"),
        (["--out", "/no/such/folder/x.md"], "does not exist"),
    ],
)
def test_bad_arguments_end_before_anything_is_compiled(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(model, "compile_flash_attention_4", lambda: pytest.fail("compiled"))
    with pytest.raises(SystemExit):
        main(["model", *arguments])
    assert message in capsys.readouterr().err


def test_report_puts_errors_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With doubles for every kernel: the order of sections, the error beside every prediction, the file."""
    monkeypatch.setattr(model, "compile_flash_attention_4", lambda: kernel(113))
    monkeypatch.setattr(model, "_ours", lambda *_, **__: kernel(40, mask=40, predicated=True))
    shapes = ["--shapes", "1,24/24,4096,128", "1,32/8,4096,128:causal"]
    out = tmp_path / "model.md"
    kernels = ["--kernels", "direct_p_fast"]
    assert main(["model", *kernels, *shapes, "--schedules", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert out.read_text().strip() == text.strip()
    places = [text.index(t) for t in ("## Calibration", "## Error on published", "VERDICT", "## Machine code", "## Predictions", "## Schedules", "## Order")]  # fmt: skip
    assert places == sorted(places)
    row = next(r for r in text[places[4] :].splitlines() if r.startswith("| 1,24/24"))
    assert row.split(" | ")[2] == "2.53 -> 3"
    assert row.endswith("% |")


def test_unit_cycles() -> None:
    """Of the double: 113 exponentials of 8 cycles a tile, 16 products of 64, 32 columns loaded by softmax, one by correction for both."""
    use = model.unit_cycles(kernel(113).roles())
    assert use["ex2"] == 113 * 8
    assert use["mma"] == 16 * 64
    assert use["tensor_load"] == 32 + 0.5


@pytest.fixture(scope="module")
def peer():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from fp4mega.bench.model_sass import find_nvdisasm

    try:
        find_nvdisasm()
        return model.compile_flash_attention_4()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flash_attention_4_gives_the_published_time(peer) -> None:
    """The real kernel: what its loop contains is known from its source, and both calibrations reproduce the point."""
    assert (peer.registers, peer.stack, peer.ctas_per_sm) == (128, 0, 1)
    use = model.unit_cycles(peer.roles())
    assert use["mma"] == 1024
    # 128 elements a row, some of them by polynomial; each conversion takes two.
    assert 100 * 8 <= use["ex2"] <= 130 * 8
    assert use["cvt_bf16"] == pytest.approx(64 * 128 / 62)
    for calibration in calibrate(peer):
        period = calibration.simulate(peer.roles(), peer.description.counts).period
        assert calibration.milliseconds(period, BIG) == pytest.approx(CALIBRATION.milliseconds, rel=0.01)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_kernel_fits_its_description(peer) -> None:
    """Direct-P: 64 conversions of two scores a tile to E2M1; half the exponent of each block of 32 costs; no spills; one CTA an SM."""
    ours = model._ours("direct_p_fast")
    assert (ours.registers, ours.stack, ours.ctas_per_sm) == (128, 0, 1)
    use = model.unit_cycles(ours.roles())
    assert use["cvt_e2m1"] == pytest.approx(64 * 128 / 57)
    # Q K^T 128, P V 128, row sums 16, and 8 copies of scales of 4 cycles.
    assert use["mma"] == 128 + 128 + 16 + 8 * 4
