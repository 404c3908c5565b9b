"""When an arm leaves the band, on curves made for it; thinned runs say the same."""

import json
import math
from dataclasses import replace

import pytest

from fp4mega.tracking import Tracker, build_manifest, read_run
from fp4mega.tracking.divergence import departures, main, outcome_table
from fp4mega.tracking.summary import CompareError
from fp4mega.tracking.thinning import thin


def make(folder, policy, seed=1, *, loss=None, norm=None, probe=None, steps=40, fails=False):
    """A run of 2 layers; each of loss, norm, probe is a function of the step (probe: of step and layer)."""
    manifest = build_manifest(
        run_name=f"s_seed{seed}__{policy}",
        recipe={},
        recipe_digest="0" * 64,
        policy=policy,
        layers=[],
        seed=seed,
        device="cpu",
        world_size=1,
        fingerprints={"init": f"i{seed}", "data": f"d{seed}"},
    )
    path = folder / f"s_seed{seed}__{policy}"
    try:
        with Tracker(path, manifest=manifest, wandb=None) as tracker:
            for step in range(1, steps + 1):
                value = 3 + 4 / step if loss is None else loss(step)
                tracker.log(
                    "train",
                    step,
                    loss=value,
                    grad_norm=1.0 if norm is None else norm(step),
                    lr=1e-3,
                    tokens_per_s=1.0,
                    step_ms=1.0,
                    tokens=step * 1_000_000,
                    mfu=0.123456789,
                )
                if step % 5 == 0:
                    for layer in (0, 1):
                        size = 1e-3 if probe is None else probe(step, layer)
                        tracker.log("probe", step, layer=layer, ds_row_sum=size, q_sqnr_db=20.0)
                if step % 20 == 0 and not math.isnan(value):
                    tracker.log("eval", step, loss=value - 0.1, split="valid")
            if fails:
                raise RuntimeError("not finite")
    except RuntimeError:
        assert fails
    return read_run(path)


def dying(folder, seed=1):
    """Row sums grow in layer 1 from step 10, the gradient norm from 20, the loss from 30; NaN at 40."""
    return make(
        folder,
        "mx-paper",
        seed,
        probe=lambda step, layer: 1e-1 if step >= 10 and layer == 1 else 1e-3,
        norm=lambda step: 50.0 if step >= 20 else 1.0,
        loss=lambda step: math.nan if step == 40 else 3 + 4 / step + (5 if step >= 30 else 0),
        fails=True,
    )


def test_each_quantity_leaves_at_its_own_step(tmp_path):
    runs = [make(tmp_path, "bf16"), make(tmp_path, "mx"), dying(tmp_path)]
    alive, dead = departures(runs, ["bf16"], "ds_row_sum")
    assert (alive.probe, alive.layer, alive.grad_norm, alive.loss, alive.nonfinite) == (None,) * 5
    assert (dead.probe, dead.layer, dead.grad_norm, dead.nonfinite) == (10, 1, 20, 40)
    assert dead.loss in (29, 30)  # smoothing reaches one step back
    assert dead.last == 40


def test_a_spike_that_comes_back_is_no_departure(tmp_path):
    spike = make(
        tmp_path,
        "mx",
        norm=lambda step: 90.0 if step == 12 else 1.0,
        loss=lambda step: 3 + 4 / step + (2 if step == 12 else 0),
    )
    (found,) = departures([make(tmp_path, "bf16"), spike], ["bf16"], "ds_row_sum")
    assert (found.grad_norm, found.loss) == (None, None)


def test_a_spike_that_the_band_survives_later_is_inside(tmp_path):
    band = make(tmp_path, "bf16", norm=lambda step: 30.0 if step == 38 else 1.0)
    run = make(tmp_path, "mx", norm=lambda step: 80.0 if step >= 30 else 1.0)
    (found,) = departures([band, run], ["bf16"], "ds_row_sum")
    assert found.grad_norm == 39


def test_no_band_is_an_error(tmp_path):
    with pytest.raises(CompareError, match="band=fp8: no such run; policies given: bf16"):
        departures([make(tmp_path, "bf16")], ["fp8"], "ds_row_sum")


def test_table_pairs_seeds_and_names_who_broke(tmp_path):
    runs = [make(tmp_path, "bf16", seed) for seed in (1, 2)]
    runs += [make(tmp_path, "mx", seed, loss=lambda s: 3.02 + 4 / s) for seed in (1, 2)]
    runs.append(dying(tmp_path, 2))
    *_, bf16, mx, paper = outcome_table(runs)
    assert "| 2 | 40 | 40.0 M | finite | 3.0000 | reference |" in bf16
    assert "| 3.0200 | +0.0200 |" in mx
    assert "not finite: seed 2 at 40" in paper
    assert "| - | - | 50 |" in paper


def test_a_thinned_run_gives_the_same_departures(tmp_path):
    runs = [make(tmp_path, "bf16"), dying(tmp_path)]
    for run in runs:
        thin(run, tmp_path / "small" / run.name, every=5, probe_every=5)
    small = [read_run(tmp_path / "small" / run.name) for run in runs]
    (found,) = departures(small, ["bf16"], "ds_row_sum")
    assert (found.probe, found.layer, found.grad_norm, found.nonfinite) == (10, 1, 20, 40)
    assert [run.status for run in small] == ["finished", "failed"]
    assert small[0].series("train", "loss")[0].tolist() == [5, 10, 15, 20, 25, 30, 35, 40]
    assert small[0].series("eval", "loss")[0].tolist() == [20, 40]
    text = (tmp_path / "small" / runs[0].name / "events.jsonl").read_text()
    assert "mfu" not in text
    assert "q_sqnr_db" not in text
    assert len(text) < 0.5 * len((tmp_path / runs[0].name / "events.jsonl").read_text())


def test_a_resumed_run_is_thinned_to_one_life(tmp_path):
    make(tmp_path, "bf16", steps=20)
    run = make(tmp_path, "bf16", steps=40)  # the folder's second life, from the start
    thin(run, tmp_path / "small", every=10, probe_every=10)
    assert read_run(tmp_path / "small").series("train", "loss")[0].tolist() == [10, 20, 30, 40]
    lines = (tmp_path / "small" / "events.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["type"] == "status" for line in lines) == 2


def test_command_line_writes_tables_and_pictures(tmp_path, capsys):
    runs = [make(tmp_path, "bf16"), make(tmp_path, "mx"), dying(tmp_path)]
    paths = [run.path for run in runs]
    assert main(["thin", *paths, "--out", str(tmp_path / "small")]) == 0
    small = [str(tmp_path / "small" / run.name) for run in runs]
    out = tmp_path / "out"
    assert main(["report", *small, "--out", str(out), "--name", "s", "--band", "bf16,mx"]) == 0
    assert "| `mx-paper`, seed 1 | 10 (1) | 20 |" in capsys.readouterr().out
    assert (out / "s.md").read_text().count("\n|") > 5
    assert all((out / f"s_{kind}.png").stat().st_size > 10_000 for kind in ("loss", "probes"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["thin", "/nowhere", "--out", "x"], "no such directory"),
        (["thin", "{run}", "--every", "0", "--out", "x"], "every=0: expected 1 or more"),
        (["report", "{run}", "--name", "n", "--band", "fp8", "--out", "x"], "band=fp8"),
        (
            ["report", "{run}", "--name", "../n", "--out", "x"],
            "name='../n': expected the beginning",
        ),
        (["report", "{run}", "{run}", "--name", "n", "--out", "x"], "are one run"),
    ],
)
def test_bad_input(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    run = make(tmp_path, "bf16")
    assert main([argument.format(run=run.path) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/{name}", "--out", "a"], "this is a/{name} itself"),
        (["a/{name}", "--out", "link"], "this is a/{name} itself"),
        (["b/{name}", "a/{name}", "--out", "b"], "this is b/{name} itself"),
        (
            ["a/{name}", "b/{name}", "--out", "o"],
            "both a/{name} and b/{name} would be copied there",
        ),
        (["a/{name}", "--out", "b"], "exists and is no thinned copy of a run; remove it"),
        (["a/{name}", "--out", "notes"], "exists and is no thinned copy of a run; remove it"),
        (["empty/{name}", "--out", "o"], "run empty/{name}: events.jsonl holds no event"),
    ],
)
def test_thinning_overwrites_nothing_but_its_own_copies(
    tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "empty"):
        name = make(tmp_path / folder, "bf16", steps=20).name
    (tmp_path / "empty" / name / "events.jsonl").write_text("")
    (tmp_path / "notes" / name).mkdir(parents=True)
    (tmp_path / "notes" / name / "mine").write_text("x")
    (tmp_path / "link").symlink_to("a")
    before = contents(tmp_path)
    assert main(["thin", *(argument.format(name=name) for argument in arguments)]) == 2
    assert message.format(name=name) in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_thinned_copy_is_made_anew_and_keeps_the_old_one_when_the_disk_is_full(
    tmp_path, monkeypatch
):
    run, small = make(tmp_path / "a", "bf16"), tmp_path / "small"
    thin(run, small, every=20, probe_every=20)
    thin(run, small, every=10, probe_every=20)
    assert read_run(small).series("train", "loss")[0].tolist() == [10, 20, 30, 40]
    assert read_run(small).manifest["thinned"] == {"every": 10, "probe_every": 20}

    def full(path, manifest):
        raise OSError(28, "No space left on device")

    before = contents(small)
    monkeypatch.setattr("fp4mega.tracking.thinning.write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        thin(run, small, every=5, probe_every=5)
    assert contents(small) == before


def test_what_changed_at_a_resume_is_kept_in_a_thinned_copy(tmp_path):
    run = make(tmp_path, "bf16", steps=20)
    life = {**run.manifest["lives"][0], "step": 10, "changes": ["recipe_digest changed"]}
    manifest = {**run.manifest, "lives": [*run.manifest["lives"], life]}
    thin(replace(run, manifest=manifest), tmp_path / "small", every=5, probe_every=5)
    assert [x["changes"] for x in read_run(tmp_path / "small").manifest["lives"]] == [
        *([], ["recipe_digest changed"])
    ]


def test_a_figure_that_the_band_or_a_run_lacks_is_refused(tmp_path):
    runs = [make(tmp_path, "bf16"), make(tmp_path, "mx")]
    with pytest.raises(CompareError, match=r"probe='ds_rowsum': no such figure in 's_seed1__bf16'; allowed: ds_row_sum, q_sqnr_db. Did you mean 'ds_row_sum'"):  # fmt: skip
        departures(runs, ["bf16"], "ds_rowsum")
    silent = [e for e in runs[0].events if e["type"] != "probe"]
    # A band without probes used to make every other run leave it.
    with pytest.raises(
        CompareError, match="no such figure in 's_seed1__bf16'; no probe was logged at all"
    ):
        departures([replace(runs[0], events=silent), runs[1]], ["bf16"], "ds_row_sum")
    silent = [e for e in runs[1].events if e["type"] != "probe"]
    with pytest.raises(CompareError, match="no such figure in 's_seed1__mx'"):
        departures([runs[0], replace(runs[1], events=silent)], ["bf16"], "ds_row_sum")
    bare = [{**e, "grad_norm": None} if e["type"] == "train" else e for e in runs[1].events]
    with pytest.raises(CompareError, match="no gradient norm was logged in 's_seed1__mx'"):
        departures([runs[0], replace(runs[1], events=bare)], ["bf16"], "ds_row_sum")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"loss": lambda step: math.nan if step == 7 else 3.0},
            "run 's_seed1__bf16' is not finite from step 7; a band is made of runs that train",
        ),
        (
            {"probe": lambda step, layer: math.nan if step == 10 else 1e-3},
            "probe='ds_row_sum': not finite in a run of the band",
        ),
    ],
)
def test_a_band_that_is_not_finite_is_refused(tmp_path, broken, message):
    runs = [make(tmp_path, "bf16", **broken), make(tmp_path, "mx")]
    with pytest.raises(CompareError, match=message):
        departures(runs, ["bf16"], "ds_row_sum")
