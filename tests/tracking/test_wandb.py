import asyncio
import http.server
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from fp4mega.tracking import Tracker, WandbSettings, read_run
from fp4mega.tracking import wandb_sink as sink_module

TRAIN = "dict(loss=2.0, grad_norm=1.0, lr=1e-3, tokens=128, tokens_per_s=100.0, step_ms=10.0)"


class RefusingHandler(http.server.BaseHTTPRequestHandler):
    """Answers everything with "unauthorized" and notes that it was asked."""

    def do_GET(self):
        self.server.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(401)

    def do_POST(self):
        self.do_GET()

    def do_CONNECT(self):
        self.do_GET()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def clean_environment(tmp_path, monkeypatch):
    """No credentials and no settings of this machine; every way out leads to the server returned here, see its `asked`."""
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RefusingHandler)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def _run_python(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done


def _records(path):
    """The records of a .wandb file: a LevelDB log of protobuf messages after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def _history(path):
    for record in _records(path):
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }


def test_offline_run_is_on_disk_and_calls_nobody(tmp_path, clean_environment, make_manifest):
    program = (
        "import json, sys\n"
        "from fp4mega.tracking import Tracker, WandbSettings\n"
        "settings = WandbSettings(mode='auto', project='p', group='g')\n"
        "with Tracker(sys.argv[1], manifest=json.loads(sys.argv[2]), wandb=settings) as tracker:\n"
        f"    tracker.log('train', 1, **{TRAIN})\n"
        "    tracker.log('probe', 1, layer=3, q_sqnr_db=20.25)\n"
        "    tracker.log('eval', 2, loss=float('nan'), split='valid')\n"
    )
    run_dir = tmp_path / "run"
    _run_python(program, run_dir, json.dumps(make_manifest()))
    assert clean_environment.asked == []

    [folder] = (run_dir / "wandb").glob("offline-run-*")
    wandb_id = read_run(run_dir).manifest["wandb_id"]
    assert folder.name.endswith(wandb_id)
    file = folder / f"run-{wandb_id}.wandb"
    history = list(_history(file))
    assert {"train/loss": 2.0, "step": 1}.items() <= history[1].items()
    assert history[2]["probe/layer_03/q_sqnr_db"] == 20.25
    assert math.isnan(float(history[3]["eval/loss"]))
    assert history[3]["step"] == 2
    [run] = [r.run for r in _records(file) if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name) == ("p", "g", "tiny__bf16")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train"] == {"steps": 20, "seed": 1}
    assert config["manifest"]["fingerprints"] == {"init": "init-1", "data": "data-1"}


def test_training_outlives_a_killed_wandb(tmp_path, clean_environment, make_manifest):
    program = (
        "import json, os, signal, subprocess, sys, time\n"
        "from fp4mega.tracking import Tracker, WandbSettings\n"
        "with Tracker(sys.argv[1], manifest=json.loads(sys.argv[2]), wandb=WandbSettings(mode='offline')) as tracker:\n"
        f"    tracker.log('train', 1, **{TRAIN})\n"
        "    children = subprocess.run(['ps', '-o', 'pid=,comm=', '--ppid', str(os.getpid())], capture_output=True, text=True)\n"
        "    [pid] = [int(line.split()[0]) for line in children.stdout.splitlines() if 'wandb' in line or 'gpu' in line]\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    time.sleep(0.3)\n"
        "    for step in range(2, 30):\n"
        f"        tracker.log('train', step, **{TRAIN})\n"
        "        time.sleep(0.01)\n"
    )
    done = _run_python(program, tmp_path / "run", json.dumps(make_manifest()))
    run = read_run(tmp_path / "run")
    assert run.series("train", "loss")[0].tolist() == list(range(1, 30))
    assert run.status == "finished"
    [warning] = run.of_type("warning")
    assert warning["message"].startswith("wandb stopped: ")
    assert done.stderr.count("wandb stopped: ") == 1


def _ends(pid):
    """Whether the process is gone within some seconds; one that nobody has collected yet is."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_process_ends_though_its_wandb_hangs(tmp_path, clean_environment, make_manifest):
    """wandb itself would wait for its own process, which has stopped, forever."""
    program = (
        "import json, os, signal, sys, psutil\n"
        "from fp4mega.tracking import Tracker, WandbSettings, wandb_sink\n"
        "wandb_sink.CLOSE_TIMEOUT_S = 0.5\n"
        "with Tracker(sys.argv[1], manifest=json.loads(sys.argv[2]), wandb=WandbSettings(mode='offline')) as tracker:\n"
        f"    tracker.log('train', 1, **{TRAIN})\n"
        "    [wandb] = [c for c in psutil.Process().children() if c.name().startswith('wandb')]\n"
        "    wandb.suspend()\n"
        f"    tracker.log('train', 2, **{TRAIN})\n"
        "    sys.stdout.write(str(wandb.pid))\n"
    )
    done = _run_python(program, tmp_path / "run", json.dumps(make_manifest()))
    assert _ends(int(done.stdout))
    run = read_run(tmp_path / "run")
    assert (run.status, len(run.of_type("train"))) == ("finished", 2)
    [warning] = run.of_type("warning")
    assert "wandb stopped: not finished after 0 s" in warning["message"]


class FakeWandb:
    """The parts of the wandb module that the sink uses; `log` and `finish` do what the test says."""

    def __init__(self, log=lambda row: None, finish=lambda: None, logged_in=False):
        self.rows, self.init_arguments, self.exit_codes = [], {}, []
        self._log, self._finish, self._logged_in = log, finish, logged_in
        self.url = "http://example.invalid"

    def login(self, **arguments):
        assert arguments == {"prompt": False, "verify": False}
        return self._logged_in

    def Settings(self, **settings):
        return SimpleNamespace(**settings)

    def init(self, **arguments):
        self.init_arguments = arguments
        return self

    def define_metric(self, *arguments, **keywords):
        pass

    def log(self, row):
        self._log(row)
        self.rows.append(row)

    def finish(self, exit_code):
        self._finish()
        self.exit_codes.append(exit_code)


@pytest.fixture
def use_fake(monkeypatch, clean_environment):
    def use(fake):
        monkeypatch.setattr(sink_module, "import_wandb", lambda mode: fake)
        return fake

    return use


@pytest.mark.parametrize(
    ("mode", "variable", "logged_in", "expected"),
    [
        ("auto", None, False, "offline"),
        ("auto", None, True, "online"),
        ("auto", "", True, "online"),
        ("auto", "offline", True, "offline"),
        ("offline", "online", True, "offline"),
        ("online", "offline", True, "online"),
    ],
)
def test_mode(tmp_path, use_fake, make_manifest, monkeypatch, mode, variable, logged_in, expected):
    fake = use_fake(FakeWandb(logged_in=logged_in))
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    with Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode=mode)):
        pass
    assert fake.init_arguments["mode"] == expected
    assert fake.init_arguments["resume"] == ("allow" if expected == "online" else None)
    assert fake.exit_codes == [0]
    assert [row.get("status/status") for row in fake.rows] == ["started", "finished"]


def test_disabled_needs_no_wandb(tmp_path, make_manifest, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Tracker(tmp_path / "a", manifest=make_manifest(), wandb=WandbSettings(mode="disabled")):
        pass
    with pytest.raises(
        ModuleNotFoundError, match="wandb.mode='offline' needs the wandb package: pip install wandb"
    ):
        Tracker(tmp_path / "b", manifest=make_manifest(), wandb=WandbSettings(mode="offline"))


def test_auto_goes_on_without_wandb(tmp_path, make_manifest, train_values, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="auto")) as tracker:
        tracker.log("train", 1, **train_values())
    run = read_run(tmp_path)
    assert len(run.of_type("train")) == 1
    [warning] = run.of_type("warning")
    assert "wandb stopped: ModuleNotFoundError: wandb.mode='auto' needs" in warning["message"]


def test_a_key_that_is_none(tmp_path, clean_environment, make_manifest, monkeypatch):
    """What the page says of a mode that cannot be had holds for credentials that wandb itself refuses."""
    program = (
        "import json, sys\n"
        "from fp4mega.tracking import Tracker, WandbSettings\n"
        "manifest = json.loads(sys.argv[2])\n"
        "with Tracker(sys.argv[1] + '/a', manifest=manifest, wandb=WandbSettings(mode='auto')):\n"
        "    pass\n"
        "try:\n"
        "    Tracker(sys.argv[1] + '/b', manifest=manifest, wandb=WandbSettings(mode='online'))\n"
        "except Exception as error:\n"
        "    sys.stdout.write(str(error))\n"
    )
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    done = _run_python(program, tmp_path, json.dumps(make_manifest()))
    [warning] = read_run(tmp_path / "a").of_type("warning")
    assert "wandb stopped: AuthenticationError: WANDB_API_KEY invalid" in warning["message"]
    assert "WANDB_API_KEY invalid" in done.stdout


def test_online_without_a_key_says_so_and_prompts_nobody(
    tmp_path, clean_environment, make_manifest, monkeypatch
):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(
        ValueError, match="wandb mode 'online': no credentials found; run `wandb login`"
    ):
        Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="online"))


def test_auto_finds_a_configured_key(tmp_path, clean_environment):
    program = (
        "import os, pathlib, sys, wandb\n"
        "from fp4mega.tracking.wandb_sink import resolve_mode\n"
        "first = resolve_mode('auto', wandb)\n"
        "host = os.environ['WANDB_BASE_URL'].removeprefix('http://')\n"
        "entry = f'machine {host}\\n  login user\\n  password {40 * chr(48)}\\n'\n"
        "pathlib.Path(os.environ['NETRC']).write_text(entry)\n"
        "sys.stdout.write(f'{first} {resolve_mode(\"auto\", wandb)}')\n"
    )
    assert _run_python(program).stdout == "offline online"


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_server_that_is_down_at_the_start(tmp_path, use_fake, make_manifest, train_values, mode):
    fake = use_fake(FakeWandb(logged_in=True))

    def refuse(**arguments):
        raise ConnectionError("no route")

    fake.init = refuse
    if mode == "online":
        with pytest.raises(ConnectionError, match="no route"):
            Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode=mode))
        return
    with Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode=mode)) as tracker:
        tracker.log("train", 1, **train_values())
    run = read_run(tmp_path)
    assert len(run.of_type("train")) == 1
    assert [e["message"] for e in run.of_type("warning")] == [
        f"wandb stopped: ConnectionError: no route. Events go on in {tmp_path / 'events.jsonl'} only."
    ]


def test_second_life_has_the_same_id(tmp_path, use_fake, make_manifest):
    ids, folders = [], []
    for resume_step in (None, 2):
        fake = use_fake(FakeWandb())
        with Tracker(
            tmp_path,
            manifest=make_manifest(),
            wandb=WandbSettings(mode="offline"),
            resume_step=resume_step,
        ):
            pass
        ids.append(fake.init_arguments["id"])
        folders.append(fake.init_arguments["dir"])
    assert ids[0] == ids[1] == read_run(tmp_path).manifest["wandb_id"]
    assert folders == [str(tmp_path)] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mode": "ofline"},
            "wandb.mode='ofline': allowed: auto, disabled, offline, online. Did you mean 'offline'",
        ),
        ({"entity": "team"}, "wandb.entity='team' needs wandb.project"),
    ],
)
def test_wrong_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        WandbSettings(**fields)


def test_failure_is_reported_once_and_jsonl_goes_on(
    tmp_path, use_fake, make_manifest, train_values, caplog
):
    def fail(row):
        if row["step"] == 2:
            raise ConnectionError("server gone")

    fake = use_fake(FakeWandb(log=fail))
    with (
        caplog.at_level(logging.ERROR, "fp4mega.tracking"),
        Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="offline")) as tracker,
    ):
        for step in range(1, 20):
            tracker.log("train", step, **train_values())
            time.sleep(0.002)
    run = read_run(tmp_path)
    assert len(run.of_type("train")) == 19
    [warning] = run.of_type("warning")
    assert "ConnectionError: server gone" in warning["message"]
    assert caplog.text.count("server gone") == 1
    assert [row["step"] for row in fake.rows] == [0, 1]


def test_a_cancelled_task_of_wandb_is_a_failure_too(
    tmp_path, use_fake, make_manifest, train_values
):
    """asyncio's is no Exception."""

    def cancel(row):
        raise asyncio.CancelledError("stopped")

    use_fake(FakeWandb(log=cancel))
    with Tracker(
        tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="offline")
    ) as tracker:
        tracker.log("train", 1, **train_values())
    [warning] = read_run(tmp_path).of_type("warning")
    assert "wandb stopped: CancelledError: stopped" in warning["message"]


def test_wedged_wandb_slows_neither_log_nor_close(
    tmp_path, use_fake, make_manifest, train_values, monkeypatch
):
    monkeypatch.setattr(sink_module, "CLOSE_TIMEOUT_S", 0.2)
    release = threading.Event()
    use_fake(FakeWandb(log=lambda row: release.wait(30)))
    start = time.monotonic()
    with Tracker(
        tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="offline")
    ) as tracker:
        for step in range(200):
            tracker.log("train", step, **train_values())
    elapsed = time.monotonic() - start
    release.set()
    assert elapsed < 5
    run = read_run(tmp_path)
    assert len(run.of_type("train")) == 200
    assert "not finished after" in run.of_type("warning")[0]["message"]


def test_full_queue_is_a_failure_not_a_wait(
    tmp_path, use_fake, make_manifest, train_values, monkeypatch
):
    monkeypatch.setattr(sink_module, "QUEUE_EVENTS", 10)
    release = threading.Event()
    use_fake(FakeWandb(log=lambda row: release.wait(30)))
    with Tracker(
        tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="offline")
    ) as tracker:
        for step in range(50):
            tracker.log("train", step, **train_values())
    release.set()
    run = read_run(tmp_path)
    assert len(run.of_type("train")) == 50
    assert "took none of the last 10 events" in run.of_type("warning")[0]["message"]


def test_failed_run_is_failed_in_wandb(tmp_path, use_fake, make_manifest):
    fake = use_fake(FakeWandb())
    with (
        pytest.raises(RuntimeError),
        Tracker(tmp_path, manifest=make_manifest(), wandb=WandbSettings(mode="offline")),
    ):
        raise RuntimeError("diverged")
    assert fake.exit_codes == [1]
