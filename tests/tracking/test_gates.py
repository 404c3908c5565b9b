import math

import pytest

from fp4mega.tracking import read_run
from fp4mega.tracking.gates import check_gate, parse_gate
from fp4mega.tracking.summary import CompareError, compare_runs


def _verdict(gate, *paths, **options):
    return check_gate(
        parse_gate(gate), compare_runs([read_run(path) for path in paths], **{"last": 1, **options})
    )


def _seed(number):
    return {"seed": number, "fingerprints": {"init": f"init-{number}", "data": f"data-{number}"}}


@pytest.mark.parametrize(
    ("gate", "losses", "passed"),
    [
        # The reference ends at 2.0 (validation 4.0); a gap of 0.04 is 2 %.
        ("final_loss_gap=2%", [5.0, 2.039], True),
        ("final_loss_gap=2%", [5.0, 2.041], False),
        ("final_loss_gap=2%", [5.0, 1.959], False),
        ("final_loss_gap=2%", [5.0, math.nan], False),
        ("final_loss_gap=0.05", [5.0, 2.049], True),
        ("final_loss_gap=0.05", [5.0, 2.051], False),
        (" final_loss_gap = 2 % ", [5.0, 2.039], True),
        ("loss_falls=2.5", [5.0, 2.4], True),
        ("loss_falls=2.5", [5.0, 2.5], False),
        ("loss_falls=2.5", [5.0, math.nan], False),
        ("loss_falls=2.5", [math.nan, 2.0], False),
        ("finite", [5.0, 2.0], True),
        ("finite", [math.inf, 2.0], False),
    ],
)
def test_loss_gates(make_run, gate, losses, passed):
    a, b = make_run("a", [5.0, 2.0]), make_run("b", losses, policy="p")
    assert _verdict(gate, a, b).passed is passed


@pytest.mark.parametrize(
    ("gate", "valid", "passed"),
    [
        ("valid_loss_gap=0.05", 4.04, True),
        ("valid_loss_gap=0.05", 3.94, False),
        ("valid_loss_gap=1%", 4.039, True),
        ("valid_loss_gap=1%", 4.041, False),
        ("valid_loss_gap=1%", math.nan, False),
        ("finite", math.nan, False),
    ],
)
def test_validation_gates(make_run, gate, valid, passed):
    a = make_run("a", [5.0, 2.0], valid={2: 4.0})
    assert (
        _verdict(gate, a, make_run("b", [5.0, 2.0], valid={2: valid}, policy="p")).passed is passed
    )


@pytest.mark.parametrize(
    ("norms", "passed"),
    [([10.0, 1.0], True), ([10.1, 1.0], False), ([1.0, math.inf], False), ([None, 3.0], True)],
)
def test_max_grad_norm(make_run, norms, passed):
    a = make_run("a", [5.0, 2.0])
    verdict = _verdict(
        "max_grad_norm=10", a, make_run("b", [5.0, 2.0], fields={"grad_norm": norms}, policy="p")
    )
    assert verdict.passed is passed


@pytest.mark.parametrize(
    ("loss", "passed"), [(1.0, True), (2.9, True), (3.1, False), (0.9, False), (math.nan, False)]
)
def test_band(make_run, loss, passed):
    base = [make_run(f"a{n}", [5.0, float(n)], **_seed(n)) for n in (1, 2, 3)]
    verdict = _verdict("band", *base, make_run("b", [5.0, loss], policy="p", **_seed(2)))
    assert verdict.passed is passed
    assert "band of 3 seeds of bf16: 1.0000 to 3.0000" in verdict.detail


def test_band_around_a_diverged_reference_passes_nobody(make_run):
    base = [
        make_run(f"a{n}", [5.0, math.nan if n == 2 else float(n)], **_seed(n)) for n in (1, 2, 3)
    ]
    assert not _verdict("band", *base, make_run("b", [5.0, 2.0], policy="p", **_seed(1))).passed


def test_band_does_not_count_one_seed_twice(make_run):
    base = [make_run(f"a{n}", [5.0, float(n)], **_seed(min(n, 2))) for n in (1, 2, 3)]
    with pytest.raises(
        CompareError,
        match="needs >= 3 seeds of the first policy and a run of another; got 2 of 'bf16' and 1",
    ):
        _verdict("band", *base, make_run("b", [5.0, 2.0], policy="p", **_seed(1)))


def test_the_worst_run_decides_and_is_named(make_run):
    a = make_run("a", [5.0, 2.0])
    good, bad = make_run("b", [5.0, 2.01], policy="p"), make_run("c", [5.0, 1.9], policy="q")
    verdict = _verdict("final_loss_gap=2%", a, good, bad)
    assert not verdict.passed
    assert verdict.detail == "largest gap -5 % (q), limit 2 %"


@pytest.mark.parametrize("gate", ["final_loss_gap=100%", "valid_loss_gap=100%", "loss_falls=0"])
def test_a_run_that_stopped_early_does_not_pass(make_run, gate):
    a = make_run("a", [5.0, 4.0, 2.0], valid={2: 4.0})
    b = make_run("b", [5.0, 4.0], valid={2: 4.0}, policy="p", status="failed")
    verdict = _verdict(gate, a, b)
    assert not verdict.passed
    assert "bf16 at 3, p at 2" in verdict.detail
    assert _verdict(gate, a, b, until=2).passed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "final_los_gap=2%",
            r"unknown name 'final_los_gap'; allowed: band, .*Did you mean 'final_loss_gap'\?",
        ),
        ("final_loss_gap", "value='': expected a number >= 0, as in final_loss_gap=2%"),
        ("final_loss_gap=two", "value='two'"),
        ("final_loss_gap=-1", "value='-1'"),
        ("max_grad_norm=inf", "value='inf'"),
        ("max_grad_norm=10%", "max_grad_norm takes no percentage"),
        ("finite=1", "finite takes no value"),
    ],
)
def test_wrong_gates(text, message):
    with pytest.raises(CompareError, match=message):
        parse_gate(text)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("final_loss_gap=1%", "needs at least two runs"),
        ("band", "needs >= 3 seeds"),
    ],
)
def test_gates_that_one_run_cannot_answer(make_run, gate, message):
    with pytest.raises(CompareError, match=message):
        _verdict(gate, make_run("a", [1.0]))


def test_gate_on_a_loss_that_was_not_measured(make_run):
    a, b = make_run("a", [1.0], valid={1: 1.0}), make_run("b", [1.0], policy="p")
    with pytest.raises(CompareError, match="no such loss in p"):
        _verdict("valid_loss_gap=1", a, b)
    c = make_run("c", [1.0], fields={"grad_norm": [None]}, policy="q")
    with pytest.raises(CompareError, match="no gradient norm in q"):
        _verdict("max_grad_norm=1", a, c)
