"""The simulated partition: times that can be worked out by hand, and what must not get faster."""

from dataclasses import replace

import pytest

from fp4mega.bench.model import chain
from fp4mega.bench.model_chip import GB200, LATENCY
from fp4mega.bench.model_kernels import Kernel
from fp4mega.bench.model_schedules import (
    mask_skipped,
    one_query_tile,
    scores_loaded_first,
    whole_tile,
)
from fp4mega.bench.model_simulate import DeadlockError, Partition
from tests.bench.model_doubles import DESCRIPTION, kernel, step


def period(roles, hand_off: float = 0.0, counts=None) -> float:
    return Partition(roles, counts or {}, GB200, hand_off).run(24).period


def of(made: Kernel, hand_off: float = 100.0) -> float:
    return period(made.roles(), hand_off)


def test_stalls_add_up() -> None:
    steps = [step("FFMA R1, R1, R1, R1", stall=4) for _ in range(10)]
    assert period({"softmax 0": steps}) == 40


def test_a_busy_unit_is_waited_for_by_all() -> None:
    steps = [step("MUFU.EX2 R1, R1") for _ in range(10)]
    assert period({"softmax 0": steps}) == 80
    assert period({"softmax 0": steps, "softmax 1": steps}) == 160


def test_one_issue_slot() -> None:
    """Three warps that nothing else holds up share one instruction a cycle."""
    steps = [step("NOP") for _ in range(10)]
    assert period({str(i): steps for i in range(3)}) == pytest.approx(30, abs=0.5)


def test_a_scoreboard_is_waited_for() -> None:
    steps = [step("MUFU.EX2 R1, R1", write=2), step("FADD R1, R1, R1", wait=0b100)]
    assert period({"softmax 0": steps}) == LATENCY["ex2"] + 1


def test_hand_off_and_tensor_core_are_in_the_chain() -> None:
    """Warp A signals, the tensor core works 500 cycles, its commit lets A go on: one round a key tile, two hand-offs."""
    a = [
        step("SYNCS.TRYWAIT", write=0, waits="scores"),
        step("NOP", wait=1),
        step("SYNCS.ARRIVE", arrives="p"),
    ]
    b = [
        step("SYNCS.TRYWAIT", write=0, waits="p"),
        step("NOP", wait=1),
        step("UTCHMMA", mma=500.0),
        step("UTCBAR", arrives="scores", ahead=1, commits=True),
    ]
    # Issues of NOP and ARRIVE, NOP; then the product's way to the tensor core.
    still = 2 + 1 + LATENCY["mma_issue"] + 500
    assert period({"a": a, "b": b}) == pytest.approx(still, abs=3)
    grown = period({"a": a, "b": b}, hand_off=200.0) - period({"a": a, "b": b})
    assert grown == pytest.approx(2 * 200, rel=0.1)


def test_a_barrier_waits_for_its_last_arrival() -> None:
    a = [step("SYNCS.TRYWAIT", write=0, waits="both"), step("NOP", wait=1)]
    b = [step("SYNCS.ARRIVE", arrives="both")]
    c = [*[step("FFMA", stall=10) for _ in range(9)], step("SYNCS.ARRIVE", arrives="both", stall=10)]  # fmt: skip
    assert period({"a": a, "b": b, "c": c}, counts={"both": 2}) == pytest.approx(100, abs=1)
    assert period({"a": a, "b": b, "c": c}) < 20


def test_deadlock_names_who_waits() -> None:
    a = [step("SYNCS.TRYWAIT", write=0, waits="never"), step("NOP", wait=1)]
    with pytest.raises(DeadlockError, match="softmax 0 at instruction 1 of tile 0"):
        period({"softmax 0": a})


def test_too_few_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="tiles=7"):
        Partition({"a": [step("NOP")]}, {}, GB200, 0.0).run(7)


def test_same_answer_twice() -> None:
    assert of(kernel()) == of(kernel())


def test_no_unit_is_more_than_busy_and_none_is_beaten() -> None:
    made = kernel(113)
    result = Partition(made.roles(), {}, GB200, 0.0).run(24)
    assert all(0 <= part <= 1.001 for part in result.use.values())
    # 2 * 113 exponentials of 8 cycles; 32 products of 64.
    assert result.period >= max(2 * 113 * 8, 32 * 64)


def test_more_work_takes_longer() -> None:
    times = [of(kernel(n)) for n in (40, 120, 240)]
    assert times == sorted(times)
    assert times[2] > 240 * 2 * 8


def test_slower_hand_offs_take_longer() -> None:
    made = kernel()
    times = [of(made, h) for h in (0.0, 400.0, 800.0, 1600.0)]
    assert times == sorted(times)


def test_a_mask_costs_what_it_issues() -> None:
    """60 compares and 60 selects of two stall cycles in the chain of every tile; skipping them gives the plain kernel back."""
    plain = kernel(60)
    masked = kernel(60, mask=60, predicated=True)
    assert chain(masked.roles()) == chain(plain.roles()) + 2 * 60 * 2
    assert of(masked) > of(plain)
    assert mask_skipped(plain.roles()) == plain.roles()
    assert period(mask_skipped(masked.roles()), 100.0) == of(plain)


def test_schedules() -> None:
    roles = kernel().roles()
    assert {s.waits for s in whole_tile(roles)["multiply"] if s.waits} == {"last0", "last1"}
    assert period(whole_tile(roles), 100.0) >= period(roles, 100.0) * 0.98
    moved = scores_loaded_first(roles)
    assert sorted(map(str, moved["softmax 0"])) == sorted(map(str, roles["softmax 0"]))
    single = one_query_tile(roles)
    assert set(single) == {"softmax 0", "correction", "multiply"}
    # Half of the work in nearly the same time: nothing hides the chain.
    assert 0.8 * period(roles, 100.0) < period(single, 100.0) < 1.05 * period(roles, 100.0)


def test_one_query_tile_needs_somebody_to_arrive() -> None:
    roles = kernel().roles()
    lone = {**roles, "multiply": [replace(s, arrives=None) for s in roles["multiply"]]}
    with pytest.raises(ValueError, match="scores0"):
        one_query_tile(lone)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("waits", DESCRIPTION.waits[1:], "multiply has 4 waits, its description 3"),
        ("commits", (), "multiply has 2 commits, its description 0"),
        ("products", DESCRIPTION.products[2:], "multiply has 32 products, its description 30"),
        ("correction", (("out0", -1),), "correction has 0 barrier operations, its description 1"),
        ("softmax", ((), ()), "softmax 0 has 3 barrier operations, its description 0"),
    ],
)
def test_a_kernel_that_was_changed_is_refused(field: str, value: object, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        kernel(description=replace(DESCRIPTION, **{field: value})).roles()
