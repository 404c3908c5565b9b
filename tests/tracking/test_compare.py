import json
import math
import re
import subprocess
import sys

import pytest

from fp4mega.tracking import compare


def _command(*arguments):
    command = [sys.executable, "-m", "fp4mega.tracking.compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def _row(output, name):
    [line] = [line for line in output.splitlines() if line.strip().startswith(name)]
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.fixture
def pair(make_run):
    a = make_run(
        "tiny__a", [5.0, 4.0, 2.0], valid={3: 2.5}, fields={"tokens_per_s": [900.0, 1000.0, 1000.0]}
    )
    b = make_run(
        "tiny__b",
        [5.0, 4.1, 2.02],
        valid={3: 2.45},
        fields={"tokens_per_s": [300.0, 500.0, 500.0], "grad_norm": [3.0, 1.0, 2.0]},
        policy="nvfp4_qk_fp8_pv",
    )
    return a, b


def test_command_passes_and_writes_everything(pair, tmp_path):
    done = _command(
        *pair,
        "--last",
        1,
        "--gate",
        "final_loss_gap=2%",
        "--gate",
        "finite",
        "--json",
        tmp_path / "out.json",
        "--plot",
        tmp_path / "out.png",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert _row(done.stdout, "policy") == ["bf16", "nvfp4_qk_fp8_pv"]
    assert _row(done.stdout, "train loss, mean of last 1") == ["2.0000", "2.0200"]
    assert _row(done.stdout, "valid loss, step 3") == ["2.5000", "2.4500"]
    gaps = [line.split()[1:] for line in done.stdout.splitlines() if line.strip().startswith("gap")]
    assert gaps == [
        ["reference", "+0.0200", "(+1.00", "%)"],
        ["reference", "-0.0500", "(-2.00", "%)"],
    ]
    assert _row(done.stdout, "grad norm, mean") == ["1", "2"]
    assert _row(done.stdout, "grad norm, max") == ["1", "3"]
    assert _row(done.stdout, "speed, ratio to first") == ["1.00", "0.50"]
    assert _row(done.stdout, "tokens/s, median") == ["1,000", "500"]
    assert _row(done.stdout, "on ") == ["1 x cpu", "1 x cpu"]
    assert _row(done.stdout, "train loss, step 2") == ["4.0000", "4.1000"]
    assert "PASS final_loss_gap=2%: largest gap +1 % (nvfp4_qk_fp8_pv), limit 2 %" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["passed"] is True
    assert written["runs"][1]["gap"] == pytest.approx(0.02)
    assert written["losses"] == [[5.0, 4.0, 2.0], [5.0, 4.1, 2.02]]
    assert [g["passed"] for g in written["gates"]] == [True, True]
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_failed_gate_exits_1_after_the_whole_report(pair):
    done = _command(*pair, "--last", 1, "--gate", "final_loss_gap=0.5%", "--gate", "loss_falls=1")
    assert done.returncode == 1
    assert "FAIL final_loss_gap=0.5%: largest gap +1 %" in done.stdout
    assert "PASS loss_falls=1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: run 'nowhere': no such directory"),
        (
            ["--gate", "finit"],
            "error: gate 'finit': unknown name 'finit'; allowed: band, final_loss_gap, finite",
        ),
        (["--steps", "2,9"], "error: steps=[9]: not logged by every run"),
        (["--plot", "out.docx"], "error: Format 'docx' is not supported"),
        (["--plot", "/no/such/folder/out.png"], "error: [Errno 2] No such file or directory"),
    ],
)
def test_bad_input_returns_2_with_one_message(pair, capsys, arguments, message):
    assert compare.main([*map(str, pair), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.out == ""


def test_unmatched_runs_exit_2_unless_allowed(make_run, tmp_path):
    a = make_run("a", [5.0, 2.0])
    b = make_run("b", [5.0, 2.1], policy="p", fingerprints={"init": "init-1", "data": "other"})
    done = _command(a, b)
    assert done.returncode == 2
    assert "data order (fingerprints.data): data-1 and other" in done.stderr
    assert done.stdout == ""
    done = _command(a, b, "--allow-unmatched")
    assert done.returncode == 0
    assert _row(done.stdout, "matched with") == ["-", "NOT MATCHED (a)"]
    assert "NOT MATCHED in initialization, data order or schedule: p" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--steps", "a,b", "x"], ["x", "--nonsense"]])
def test_wrong_options_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        compare.main(arguments)
    assert error.value.code == 2
    assert "usage: python -m fp4mega.tracking.compare" in capsys.readouterr().err


def test_nan_is_null_in_json_and_nan_in_the_table(make_run, tmp_path, capsys):
    a, b = make_run("a", [5.0, 2.0]), make_run("b", [5.0, math.nan], policy="p")
    assert (
        compare.main(
            [str(a), str(b), "--last", "1", "--gate", "finite", "--json", str(tmp_path / "o.json")]
        )
        == 1
    )
    output = capsys.readouterr().out
    assert _row(output, "train loss, mean of last 1") == ["2.0000", "nan"]
    assert "FAIL finite: not finite: p from step 2" in output
    written = json.loads((tmp_path / "o.json").read_text())
    assert written["runs"][1]["final_loss"] is None
    assert written["losses"][1] == [5.0, None]


def test_seeds_are_summed_up_in_a_line(make_run, capsys):
    runs = [
        make_run(
            f"{policy}{n}",
            [5.0, n + shift],
            policy=policy,
            seed=n,
            fingerprints={"init": f"i{n}", "data": f"d{n}"},
        )
        for policy, shift in (("bf16", 0.0), ("p", 0.25))
        for n in (1, 2, 3)
    ]
    assert compare.main([*map(str, runs), "--last", "1"]) == 0
    output = capsys.readouterr().out
    assert "bf16, 3 seeds: train loss mean 2.0000, from 1.0000 to 3.0000" in output
    assert "p, 3 seeds: train loss mean 2.2500, from 1.2500 to 3.2500, mean gap +0.2500" in output
    assert _row(output, "matched with") == ["-", "-", "-", "bf161", "bf162", "bf163"]


def test_names_are_not_read_as_markup(make_run, capsys):
    path = make_run("run[bold]x", [1.0], policy="p[red]")
    assert compare.main([str(path)]) == 0
    output = capsys.readouterr().out
    assert "run[bold]x" in output
    assert "p[red]" in output


def test_a_run_is_not_compared_with_itself(make_run, tmp_path, capsys):
    a = make_run("a", [5.0, 2.0])
    (tmp_path / "link").symlink_to(a)
    for other in (a, f"{tmp_path}/./a", tmp_path / "link"):
        assert compare.main([str(a), str(other), "--gate", "final_loss_gap=0%"]) == 2
        captured = capsys.readouterr()
        assert f"{a} and {other} are one run".replace("/./", "/") in captured.err
        assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--json", "{a}/manifest.json"],
            "--json {a}/manifest.json: a run's own file has this name",
        ),
        (["--plot", "{a}/events.jsonl"], "--plot {a}/events.jsonl: a run's own file has this name"),
        (["--json", "o.png", "--plot", "./o.png"], "--json and --plot: both name o.png"),
    ],
)
def test_the_runs_that_are_read_are_not_written_over(make_run, capsys, arguments, message):
    a, b = make_run("a", [5.0, 2.0]), make_run("b", [5.0, 2.0], policy="p")
    before = [(path, path.read_bytes()) for path in sorted(a.iterdir())]
    assert compare.main([str(a), str(b), *(x.format(a=a) for x in arguments)]) == 2
    assert message.format(a=a) in capsys.readouterr().err
    assert [(path, path.read_bytes()) for path in sorted(a.iterdir())] == before


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("manifest.json", lambda text: '{"schema": 1}', "manifest.json: run_name: Field required"),
        (
            "manifest.json",
            lambda text: text.replace('"world_size": 1', '"world_size": null', 1),
            "manifest.json: world_size=null: ",
        ),
        (
            "events.jsonl",
            lambda text: text.replace('"step": 1,', f'"step": {10**30},'),
            "events.jsonl: line 2: event 'train': step=1",
        ),
        (
            "events.jsonl",
            lambda text: text.replace('"loss": 5.0', '"nonfinite": 5, "loss": null'),
            "events.jsonl: line 2: nonfinite=5: ",
        ),
    ],
)
def test_a_damaged_run_is_named(make_run, capsys, file, damage, message):
    a = make_run("a", [5.0, 2.0])
    path = a / file
    path.write_text(damage(path.read_text()))
    assert compare.main([str(a)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {a}/{message}")
