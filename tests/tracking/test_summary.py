import json
import math

import numpy as np
import pytest

from fp4mega.tracking import read_run
from fp4mega.tracking.manifest import join_lives
from fp4mega.tracking.summary import CompareError, compare_runs


def _compare(*paths, **options):
    return compare_runs([read_run(path) for path in paths], **options)


def _seed(number):
    return {"seed": number, "fingerprints": {"init": f"init-{number}", "data": f"data-{number}"}}


def test_numbers_of_a_pair(make_run):
    a = make_run(
        "a",
        [4.0, 3.0, 2.0, 1.0],
        valid={2: 3.0, 4: 2.0},
        fields={"grad_norm": [1.0, 5.0, 2.0, None], "tokens_per_s": [1.0, 1.0, 200.0, 400.0]},
    )
    b = make_run(
        "b",
        [4.0, 3.2, 2.4, 1.2],
        valid={2: 3.5, 4: 2.1},
        fields={"tokens_per_s": [1.0, 1.0, 90.0, 60.0]},
        policy="nvfp4_qk_fp8_pv",
    )
    comparison = _compare(a, b, last=2)
    first, second = comparison.summaries
    assert (first.final_loss, second.final_loss) == pytest.approx((1.5, 1.8))
    assert (second.gap, second.gap_percent) == pytest.approx((0.3, 20.0))
    assert (first.gap, first.gap_percent, first.valid_gap) == (None, None, None)
    assert (first.valid_loss, second.valid_loss, second.valid_gap) == pytest.approx((2.0, 2.1, 0.1))
    assert second.valid_gap_percent == pytest.approx(5.0)
    assert (first.mean_grad_norm, first.max_grad_norm) == pytest.approx((8 / 3, 5.0))
    # Of four events the first two are warm-up: medians of (200, 400) and (90, 60).
    assert (first.tokens_per_s, second.tokens_per_s, second.speed_ratio) == (300.0, 75.0, 0.25)
    assert (second.partner, second.matched, second.label) == (0, True, "nvfp4_qk_fp8_pv")
    assert (comparison.final_step, comparison.final_valid_step, comparison.last) == (4, 4, 2)
    assert comparison.shown_steps == (1, 2, 3, 4)
    np.testing.assert_array_equal(comparison.losses, [[4.0, 3.0, 2.0, 1.0], [4.0, 3.2, 2.4, 1.2]])
    assert comparison.notes == ()
    assert (comparison.references, comparison.candidates) == ((0,), (1,))


def test_speed_leaves_out_five_events_of_a_long_run(make_run):
    speeds = [1.0] * 5 + [10.0, 20.0, 30.0] * 5
    run = make_run("a", [1.0] * 20, fields={"tokens_per_s": speeds})
    assert _compare(run).summaries[0].tokens_per_s == 20.0


def test_losses_are_taken_where_all_runs_logged(make_run):
    a = make_run("a", [9.0, 8.0, 7.0, 6.0, 5.0, 4.0])
    b = make_run("b", [8.5, 6.5, 4.5], steps=[2, 4, 6], policy="p")
    comparison = _compare(a, b, last=2)
    assert [s.final_loss for s in comparison.summaries] == [5.0, 5.5]
    assert comparison.shown_steps == (2, 4, 6)
    assert comparison.same_length


def test_a_run_that_stopped_early_is_compared_where_it_stopped(make_run):
    a = make_run("a", [4.0, 3.0, 2.0, 1.0], valid={2: 5.0, 4: 0.5})
    b = make_run("b", [4.0, 2.5], valid={2: 6.0}, policy="p", status="failed")
    comparison = _compare(a, b, last=1)
    assert [s.final_loss for s in comparison.summaries] == [3.0, 2.5]
    assert [s.valid_loss for s in comparison.summaries] == [5.0, 6.0]
    assert [s.steps for s in comparison.summaries] == [4, 2]
    assert not comparison.same_length
    assert any("runs differ in length" in note for note in comparison.notes)
    assert "p: status failed at step 2" in comparison.notes
    cut = _compare(a, b, last=1, until=2)
    assert cut.same_length
    assert [s.status for s in cut.summaries] == ["finished", "failed"]


def test_valid_loss_that_one_run_lacks_is_none(make_run):
    comparison = _compare(
        make_run("a", [1.0, 1.0], valid={1: 1.0}), make_run("b", [1.0, 1.0], policy="p")
    )
    assert [s.valid_loss for s in comparison.summaries] == [1.0, None]
    assert comparison.summaries[1].valid_gap is None


def test_nonfinite_stays_visible(make_run):
    a = make_run("a", [3.0, 2.0, 1.0])
    b = make_run("b", [3.0, math.nan, 1.0], fields={"grad_norm": [1.0, 2.0, math.inf]}, policy="p")
    summary = _compare(a, b).summaries[1]
    assert math.isnan(summary.final_loss)
    assert math.isnan(summary.gap)
    assert math.isnan(summary.max_grad_norm)
    assert summary.first_nonfinite == 2
    assert math.isfinite(_compare(a, b, last=1).summaries[1].final_loss)


@pytest.mark.parametrize(
    ("fingerprints", "message"),
    [
        (
            {"init": "other", "data": "data-1"},
            r"initialization \(fingerprints.init\): init-1 and other\. Use",
        ),
        (
            {"init": "init-1", "data": "other"},
            r"policies; data order \(fingerprints.data\): data-1 and other\. Use",
        ),
        (
            {"init": None, "data": "data-1"},
            r"initialization \(fingerprints.init\): init-1 and none",
        ),
    ],
)
def test_unmatched_runs_are_refused(make_run, fingerprints, message):
    a, b = (
        make_run("a", [2.0, 1.0]),
        make_run("b", [2.0, 1.5], policy="p", fingerprints=fingerprints),
    )
    with pytest.raises(CompareError, match=message):
        _compare(a, b)
    comparison = _compare(a, b, allow_unmatched=True)
    assert comparison.summaries[1].matched is False
    assert comparison.summaries[1].gap == pytest.approx(0.25)
    assert comparison.notes == ("NOT MATCHED in initialization, data order or schedule: p",)


def test_same_policy_and_seed_but_other_data_is_no_further_seed(make_run):
    a = make_run("a", [2.0])
    with pytest.raises(CompareError, match="data order"):
        _compare(a, make_run("b", [2.0], fingerprints={"init": "init-1", "data": "other"}))
    # Equal in all: a comparison of two runs of one policy, e.g. on two backends.
    assert _compare(a, make_run("c", [3.0])).summaries[1].gap == pytest.approx(1.0)


def test_several_seeds_pair_by_seed_and_make_bands(make_run):
    base = [
        make_run(f"a{n}", [5.0, loss], **_seed(n)) for n, loss in ((1, 1.0), (2, 2.0), (3, 3.0))
    ]
    other = [
        make_run(f"b{n}", [5.0, loss], policy="p", **_seed(n)) for n, loss in ((3, 3.5), (1, 1.1))
    ]
    comparison = _compare(*base, *other, last=1)
    assert comparison.references == (0, 1, 2)
    assert [s.partner for s in comparison.summaries] == [0, 1, 2, 2, 0]
    assert [comparison.summaries[i].gap for i in (3, 4)] == pytest.approx([0.5, 0.1])
    first, second = comparison.bands
    assert (first.policy, first.members, first.mean_final_loss) == ("bf16", (0, 1, 2), 2.0)
    assert (first.min_final_loss, first.max_final_loss, first.mean_gap) == (1.0, 3.0, None)
    assert (second.members, second.mean_final_loss) == ((3, 4), pytest.approx(2.3))
    assert second.mean_gap == pytest.approx(0.3)
    assert comparison.summaries[3].label == "p [b3]"


def test_a_seed_that_the_reference_lacks_is_refused(make_run):
    base = [make_run(f"a{n}", [5.0], **_seed(n)) for n in (1, 2)]
    with pytest.raises(CompareError, match="init-1 and init-9"):
        _compare(*base, make_run("b", [5.0], policy="p", **_seed(9)))


def test_speeds_on_other_hardware_have_no_ratio(make_run):
    comparison = _compare(
        make_run("a", [1.0]), make_run("b", [1.0], policy="p", device="NVIDIA H200")
    )
    assert comparison.summaries[1].speed_ratio is None
    assert comparison.summaries[1].hardware == "1 x NVIDIA H200"
    assert "runs differ in hardware; their speeds are not comparable" in comparison.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"steps": [1, 7]},
            r"steps=\[7\]: not logged by every run; logged by all: 2 steps from 1 to 2",
        ),
        ({"last": 0}, "last=0"),
        ({"until": 0}, r"no training step in common \(a: no step, b: no step\)"),
    ],
)
def test_wrong_options(make_run, options, message):
    with pytest.raises(CompareError, match=message):
        _compare(make_run("a", [2.0, 1.0]), make_run("b", [2.0, 1.0, 0.5], policy="p"), **options)


def test_no_runs_is_an_error():
    with pytest.raises(CompareError, match="no runs"):
        compare_runs([])


def test_asked_steps_are_shown(make_run):
    comparison = _compare(make_run("a", [5.0, 4.0, 3.0]), steps=[3, 1])
    assert comparison.shown_steps == (1, 3)
    np.testing.assert_array_equal(comparison.losses, [[5.0, 3.0]])
    long = _compare(make_run("b", [float(n) for n in range(101)], steps=range(101)))
    assert long.shown_steps == (0, 20, 40, 60, 80, 100)


def test_a_recipe_changed_at_a_resume_is_noted(tmp_path, make_manifest, train_values):
    from fp4mega.tracking import Tracker

    for digest, resume_step in (("0123456789ab", None), ("ffffffffffff", 1)):
        with Tracker(
            tmp_path, manifest=make_manifest(recipe_digest=digest), resume_step=resume_step
        ) as tracker:
            tracker.log("train", (resume_step or 0) + 1, **train_values())
    notes = _compare(tmp_path).notes
    assert notes == (
        'bf16: at its resume from step 1 recipe_digest changed from "0123456789ab" to "ffffffffffff"',
    )


def _recipe(steps=20, **optimizer):
    values = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "decay_steps": None}
    return {
        "train": {"steps": steps, "global_batch_size": 8},
        "optimizer": {**values, "decay_style": "cosine", **optimizer},
    }


def _lived(make_run, make_manifest, name, policy, *lives):
    """A run of 60 steps and the given lives, each the step it began at and its recipe."""
    path = make_run(name, [5.0, 2.0], steps=[20, 60], policy=policy)
    joined = None
    for step, recipe in lives:
        changes = {"recipe": recipe, "recipe_digest": str(hash(str(recipe)))}
        manifest = make_manifest(run_name=name, policy=policy, **changes)
        joined, _ = join_lives(joined, manifest, step=step)
    (path / "manifest.json").write_text(json.dumps({**joined, "wandb_id": name}))
    return path


@pytest.mark.parametrize(
    ("lives", "message"),
    [
        # train.steps was raised after the run had finished: it resumed with the rate already decayed.
        (
            [(0, _recipe(20)), (20, _recipe(60))],
            "policies; schedule: optimizer.decay_steps: 20, 60 after step 20 and 60. Use",
        ),
        ([(0, _recipe(80))], "schedule: optimizer.decay_steps: 80 and 60. Use"),
        ([(0, _recipe(60, decay_steps=50))], "schedule: optimizer.decay_steps: 50 and 60. Use"),
        ([(0, _recipe(60, lr=2e-3))], "schedule: optimizer.lr: 0.002 and 0.001. Use"),
        ([(0, _recipe(60, warmup_steps=3))], "schedule: optimizer.warmup_steps: 3 and 2. Use"),
        (
            [(0, _recipe(60, decay_style="constant"))],
            "schedule: optimizer.min_lr: None and 0.0001; schedule: optimizer.decay_steps: None and 60; "
            "schedule: optimizer.decay_style: constant and cosine. Use",
        ),
    ],
)
def test_runs_under_other_schedules_are_not_matched(make_run, make_manifest, lives, message):
    a = _lived(make_run, make_manifest, "a", "bf16", *lives)
    b = _lived(make_run, make_manifest, "b", "p", (0, _recipe(60)))
    with pytest.raises(CompareError) as error:
        _compare(a, b)
    assert message in str(error.value)
    comparison = _compare(a, b, allow_unmatched=True)
    assert [s.matched for s in comparison.summaries] == [True, False]
    assert (
        "NOT MATCHED in initialization, data order or schedule: p" in comparison.notes
    )  # the reference is matched with itself


@pytest.mark.parametrize(
    "lives",
    [
        # Interrupted, and the rest of the training under the same schedule, whatever else changed.
        [(0, _recipe(60)), (30, _recipe(60)), (40, {**_recipe(60), "name": "x"})],
        # Begun anew, or resumed from before the other schedule: no step of it is left.
        [(0, _recipe(20)), (0, _recipe(60))],
        [(0, _recipe(60)), (30, _recipe(80)), (30, _recipe(60))],
        [(0, _recipe(60)), (30, _recipe(80)), (20, _recipe(60))],
        [(0, _recipe(100, decay_steps=60))],
    ],
)
def test_lives_under_one_schedule_are_matched(make_run, make_manifest, lives):
    a = _lived(make_run, make_manifest, "a", "bf16", *lives)
    b = _lived(make_run, make_manifest, "b", "p", (0, _recipe(60)))
    assert _compare(a, b).summaries[1].matched


def test_schedules_are_those_of_the_steps_compared(make_run, make_manifest):
    a = _lived(make_run, make_manifest, "a", "bf16", (0, _recipe(20)), (20, _recipe(60)))
    b = _lived(make_run, make_manifest, "b", "p", (0, _recipe(20)), (20, _recipe(60)))
    c = _lived(make_run, make_manifest, "c", "q", (0, _recipe(20)))
    assert _compare(a, b).summaries[1].matched
    with pytest.raises(CompareError, match="decay_steps: 20, 60 after step 20 and 20. Use"):
        _compare(a, b, c)
    assert _compare(a, b, c, until=20).summaries[2].matched


def test_a_constant_rate_has_no_decay_to_differ_in(make_run, make_manifest):
    recipes = [_recipe(steps, decay_style="constant", min_lr=0.0) for steps in (60, 80)]
    a = _lived(make_run, make_manifest, "a", "bf16", (0, recipes[0]))
    b = _lived(make_run, make_manifest, "b", "p", (0, recipes[1]))
    assert _compare(a, b).summaries[1].matched


def test_a_seed_under_another_schedule_is_no_further_seed(make_run, make_manifest):
    a = make_run("a", [5.0, 2.0], recipe=_recipe(60), **_seed(1))
    b = make_run("b", [5.0, 2.0], recipe=_recipe(80), **_seed(2))
    with pytest.raises(CompareError, match="schedule: optimizer.decay_steps: 60 and 80"):
        _compare(a, b)


def test_a_life_whose_schedule_was_not_recorded_is_matched_with_nothing(make_run):
    def forget(path, digest):
        manifest = json.loads((path / "manifest.json").read_text())
        for life in manifest["lives"]:
            life.pop("schedule", None)
            life["recipe_digest"] = digest
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    a, b = (
        make_run("a", [2.0], recipe=_recipe()),
        make_run("b", [2.0], recipe=_recipe(), policy="p"),
    )
    # The manifest's own recipe is that of a life with its digest.
    assert _compare(forget(a, "0123456789ab"), b).summaries[1].matched
    with pytest.raises(CompareError, match="optimizer.decay_steps: not recorded and 20"):
        _compare(forget(a, "other"), b)
