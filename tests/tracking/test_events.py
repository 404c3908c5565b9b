import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fp4mega.tracking.events import EventWriter, make_event, read_events, resolve_lives

EVAL = '{"type": "eval", "step": 1, "split": "valid", "loss": 1.0, %s}'


def _train(step, loss, train_values):
    return make_event("train", step, train_values(loss), time=0.0)


def _status(step, status):
    return make_event("status", step, {"status": status}, time=0.0)


def test_line_on_disk_is_the_documented_json(tmp_path, train_values):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write(
            make_event("train", 12, train_values(2.5, mfu=None, aux_loss=0.25), time=100.5)
        )
        # Before the file is closed: each line has left the process.
        line = path.read_text()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "type": "train",
        "step": 12,
        "time": 100.5,
        "loss": 2.5,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 128,
        "tokens_per_s": 100.0,
        "step_ms": 10.0,
        "mfu": None,
        "aux_loss": 0.25,
    }


def test_nonfinite_is_null_in_the_file_and_nan_to_the_reader(tmp_path, train_values):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write(
            make_event("train", 1, train_values(math.nan, grad_norm=math.inf, aux=-math.inf))
        )
        writer.write(make_event("train", 2, train_values(1.5, grad_norm=None)))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["loss"], first["grad_norm"], first["aux"]) == (None, None, None)
    assert first["nonfinite"] == ["loss", "grad_norm", "aux"]
    assert "nonfinite" not in second
    read = read_events(path)
    assert math.isnan(read[0]["loss"])
    assert math.isnan(read[0]["grad_norm"])
    assert (read[1]["loss"], read[1]["grad_norm"]) == (1.5, None)


def test_numpy_scalars_become_python_numbers(train_values):
    event = make_event("train", 1, train_values(np.float32(0.5), tokens=np.int64(7)))
    assert type(event["loss"]) is float
    assert type(event["tokens"]) is int
    json.dumps(event)


@pytest.mark.parametrize(
    ("type_", "step", "values", "error", "message"),
    [
        ("trian", 1, {}, ValueError, "event type='trian': allowed: .*Did you mean 'train'"),
        ("eval", 1, {"loss": 1.0}, ValueError, r"'eval' at step 1: missing field\(s\) split"),
        ("eval", 1, {"loss": "1", "split": "valid"}, TypeError, "loss='1': expected a number"),
        ("eval", 1, {"loss": True, "split": "valid"}, TypeError, "loss=True: expected a number"),
        ("eval", 1, {"loss": None, "split": "valid"}, TypeError, "loss=None: expected a number"),
        ("eval", 1, {"loss": 1.0, "split": 3}, TypeError, "split=3: expected a string"),
        (
            "eval",
            1,
            {"loss": 1.0, "split": "valid", "note": "x"},
            TypeError,
            "note='x': expected a number",
        ),
        (
            "eval",
            1,
            {"loss": 1.0, "split": "valid", "time": 3.0},
            ValueError,
            "unknown field 'time'",
        ),
        (
            "checkpoint",
            1,
            {"path": "a", "pth": "b"},
            ValueError,
            "unknown field 'pth'.*Did you mean 'path'",
        ),
        (
            "status",
            1,
            {"status": "finishd"},
            ValueError,
            "status='finishd'.*Did you mean 'finished'",
        ),
        ("probe", 1, {"layer": 0}, ValueError, "at least 1 metric"),
        ("probe", 1, {"layer": 0.0, "x": 1.0}, TypeError, "layer=0.0: expected an integer"),
        ("eval", -1, {"loss": 1.0, "split": "valid"}, TypeError, "step=-1"),
        ("eval", 1.0, {"loss": 1.0, "split": "valid"}, TypeError, "step=1.0"),
    ],
)
def test_wrong_events_are_refused_by_name(type_, step, values, error, message):
    with pytest.raises(error, match=message):
        make_event(type_, step, values)


@pytest.mark.parametrize(
    "tail", [b'{"type": "train", "step": 3, "lo', b"\0\0\0\0", b'{"torn": \n', b'{"type": "eval"}']
)
def test_torn_tail_is_skipped_by_the_reader_and_cut_by_the_next_writer(
    tmp_path, train_values, tail
):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write(_train(1, 3.0, train_values))
        writer.write(_train(2, 2.0, train_values))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with pytest.warns(UserWarning, match="torn last line"):
        assert [e["loss"] for e in read_events(path)] == [3.0, 2.0]
    with pytest.warns(UserWarning, match="cut off a torn last line"):
        writer = EventWriter(path)
    assert path.read_bytes() == whole
    with writer:
        writer.write(_train(3, 1.0, train_values))
    assert [e["loss"] for e in read_events(path)] == [3.0, 2.0, 1.0]


def test_file_of_only_a_torn_line_reads_as_empty(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type"')
    with pytest.warns(UserWarning, match="torn"):
        assert read_events(path) == []
    path.write_bytes(b"")
    assert read_events(path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        (
            '{"type": "eval", "step": 1, "time": 0, "split": "valid"}',
            "line 2: .*missing field.*loss",
        ),
        ('{"step": 1, "time": 0}', "line 2: missing field 'type'"),
        ('{"type": "new", "step": 1, "time": 0}', "line 2: event type='new'"),
        ('{"type": [], "step": 1, "time": 0}', "line 2: "),
        (EVAL % '"time": 0, "nonfinite": 5', "line 2: nonfinite=5: expected a list of fields"),
        (EVAL % '"time": 0, "nonfinite": ["step"]', r"line 2: nonfinite=\['step'\]: expected"),
        (
            EVAL % '"time": 0, "nonfinite": [["loss"]]',
            r"line 2: nonfinite=\[\['loss'\]\]: expected",
        ),
        (EVAL % '"time": 0, "nonfinite": ["loss"]', r"line 2: nonfinite=\['loss'\]: expected"),
        (EVAL % '"time": "now"', "line 2: event 'eval' at step 1: time='now': expected a number"),
        (EVAL % '"time": NaN', "line 2: event 'eval' at step 1: time=nan: expected a number"),
        (EVAL % f'"time": 0, "x": {10**400}', "line 2: .*: expected an integer below 2"),
        (
            f'{{"type": "eval", "step": {10**30}, "time": 0, "split": "valid", "loss": 1.0}}',
            "line 2: event 'eval': step=10+: expected an integer from 0 to 2",
        ),
        ("[" * 100_000, "line 2 is not a JSON object"),
    ],
)
def test_damage_before_the_last_line_is_an_error_with_its_line_number(
    tmp_path, train_values, line, message
):
    path = tmp_path / "events.jsonl"
    good = json.dumps(_train(1, 3.0, train_values))
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=message):
        read_events(path)


def test_resume_drops_what_the_earlier_life_did_beyond_its_step(train_values):
    first = [_status(0, "started")]
    for step in range(1, 6):
        first.append(_train(step, 10.0 + step, train_values))
        first.append(make_event("probe", step, {"layer": 0, "x": 1.0}, time=0.0))
        first.append(make_event("probe", step, {"layer": 1, "x": 2.0}, time=0.0))
    first.append(make_event("eval", 2, {"loss": 5.0, "split": "valid"}))
    first.append(make_event("eval", 4, {"loss": 4.0, "split": "valid"}))
    second = [
        _status(3, "resumed"),
        make_event("eval", 2, {"loss": 7.0, "split": "test"}),
        make_event("probe", 3, {"layer": 1, "x": 9.0}, time=0.0),
        _train(4, 24.0, train_values),
    ]
    history = resolve_lives(first + second)

    losses = {e["step"]: e["loss"] for e in history if e["type"] == "train"}
    assert losses == {1: 11.0, 2: 12.0, 3: 13.0, 4: 24.0}
    evals = {(e["step"], e["split"]): e["loss"] for e in history if e["type"] == "eval"}
    assert evals == {(2, "valid"): 5.0, (2, "test"): 7.0}
    probes = {(e["step"], e["layer"]): e["x"] for e in history if e["type"] == "probe"}
    assert probes == {(1, 0): 1.0, (1, 1): 2.0, (2, 0): 1.0, (2, 1): 2.0, (3, 0): 1.0, (3, 1): 9.0}
    assert [e["status"] for e in history if e["type"] == "status"] == ["started", "resumed"]


def test_a_new_start_drops_the_whole_earlier_life(train_values):
    events = [_status(0, "started"), _train(1, 3.0, train_values), _train(2, 2.0, train_values)]
    history = resolve_lives([*events, _status(0, "started"), _train(1, 8.0, train_values)])
    assert [(e["step"], e["loss"]) for e in history if e["type"] == "train"] == [(1, 8.0)]


def test_full_disk_leaves_a_readable_file(tmp_path, train_values, monkeypatch):
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    writer.write(_train(1, 3.0, train_values))

    class HalfFull:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            return self._file.write(data[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(self._file, name)

    monkeypatch.setattr(writer, "_file", HalfFull(writer._file))
    with pytest.raises(OSError, match="disk full"):
        writer.write(_train(2, 2.0, train_values))
    monkeypatch.undo()
    writer.write(_train(3, 1.0, train_values))
    writer.close()
    assert [e["step"] for e in read_events(path)] == [1, 3]


def test_kill_loses_no_written_event(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import sys, pathlib\n"
        "from fp4mega.tracking.events import EventWriter, make_event\n"
        "writer = EventWriter(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1000):\n"
        "    writer.write(make_event('eval', step, {'loss': 1.0, 'split': 'valid'}))\n"
        "    sys.stdout.write(f'{step}\\n'); sys.stdout.flush()\n"
        "    if step == 50: sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path.cwd(),
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < 50:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert [e["step"] for e in read_events(path)] == list(range(51))
