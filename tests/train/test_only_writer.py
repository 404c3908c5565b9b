"""The lock of a run's folder: who is refused, what they are told, and when it ends."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from run_harness import events

from fp4mega.train.launch import find_launch
from fp4mega.train.loop import _patience
from fp4mega.train.only_writer import only_writer
from fp4mega.train.recipe import Recipe, RecipeError

FORK = multiprocessing.get_context("fork")


class Holder:
    """Another process that holds the folder until `release`, or until it is killed."""

    def __init__(self, folder, fork_a_writer=False):
        self._held, self._go = FORK.Event(), FORK.Event()
        self.writer = FORK.Value("i", 0)
        self._process = FORK.Process(target=self._hold, args=(folder, fork_a_writer))
        self._process.start()
        assert self._held.wait(30)
        self.pid = self._process.pid

    def _hold(self, folder, fork_a_writer):
        with only_writer(folder):
            if fork_a_writer:
                pid = os.fork()
                if not pid:
                    time.sleep(60)
                    os._exit(0)
                self.writer.value = pid
            self._held.set()
            self._go.wait(60)

    def release(self):
        self._go.set()
        self._process.join()

    def kill(self):
        self._process.kill()
        self._process.join()


@pytest.fixture
def hold():
    holders = []

    def start(*args, **options):
        holders.append(Holder(*args, **options))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def test_a_second_process_is_refused_and_told_who_writes(tmp_path, hold):
    holder = hold(tmp_path / "runs" / "a")
    told = (
        rf'tracking.dir=".*/runs": .*/runs/a is being written by process {holder.pid} on host {socket.gethostname()}; '
        r".* remove .*/runs/a/lock if that process no longer exists"
    )
    with pytest.raises(RecipeError, match=told), only_writer(tmp_path / "runs" / "a"):
        pytest.fail("held by two")
    with only_writer(tmp_path / "runs" / "b"):
        pass
    holder.release()
    with only_writer(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a" / "lock").read_text().split()[1] == str(os.getpid())


def test_it_ends_with_its_process_though_a_forked_writer_lives_on(tmp_path, hold):
    holder = hold(tmp_path / "a", fork_a_writer=True)
    holder.kill()
    assert holder.writer.value > 1
    try:
        os.kill(holder.writer.value, 0)
        with only_writer(tmp_path / "a"):
            pass
    finally:
        os.kill(holder.writer.value, signal.SIGKILL)


def test_patience_waits_for_the_life_before(tmp_path, hold, caplog):
    holder = hold(tmp_path / "a")
    caplog.set_level("INFO", logger="fp4mega.train")
    threading.Timer(0.3, holder.release).start()
    began = time.monotonic()
    with only_writer(tmp_path / "a", patience=30):
        assert 0.2 < time.monotonic() - began < 20
    assert f"waiting up to 30 s for process {holder.pid}" in caplog.text


@pytest.mark.parametrize(
    ("under_torchrun", "timeout_minutes", "seconds"),
    [(False, 10.0, 0.0), (True, 10.0, 100.0), (True, 0.1, 3.0)],
)
def test_only_torchruns_processes_wait_and_less_than_the_others_wait_for_them(
    content, under_torchrun, timeout_minutes, seconds
):
    content["train"]["timeout_minutes"] = timeout_minutes
    launch = replace(find_launch({}), under_torchrun=under_torchrun)
    assert _patience(Recipe.parse(content), launch) == pytest.approx(seconds)


def test_a_folder_that_nothing_came_into_is_removed(tmp_path):
    with only_writer(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a" / "lock").exists()
    assert not (tmp_path / "runs" / "a").exists()
    with only_writer(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "events.jsonl").touch()
    assert (tmp_path / "runs" / "a" / "events.jsonl").exists()


def test_a_lock_that_was_removed_does_not_count(tmp_path, hold):
    hold(tmp_path / "a")
    (tmp_path / "a" / "lock").unlink()
    with only_writer(tmp_path / "a"):
        assert str(os.getpid()) in (tmp_path / "a" / "lock").read_text()


def test_a_file_system_without_locks_is_named_and_does_not_stop_the_run(
    tmp_path, caplog, monkeypatch
):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with only_writer(tmp_path / "a"):
        assert "a: the file system has no locks (No locks available)" in caplog.text


@pytest.mark.parametrize("place", ["file", "file/deeper", "file/deeper/still"])
def test_a_folder_that_cannot_be_made_is_named_before_data_are_prepared(
    train, content, tmp_path, place
):
    (tmp_path / "file").touch()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("words " * 500)
    content["tracking"]["dir"] = str(tmp_path / place)
    prepared = {"train": [str(tmp_path / "p")], "prepare": {"source": str(tmp_path / "in")}}
    content["data"] = {"kind": "indexed", **prepared}
    with pytest.raises(RecipeError, match=rf"tracking.dir=.*/{place}/t__bf16 cannot be written: "):
        train()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "in"]


def test_a_second_run_leaves_the_first_ones_files_alone(train, long_run, run_dir):
    process = long_run(logged=2, save_interval=2000)
    leftover = run_dir / "checkpoints" / "iter_0000009.1234.tmp"
    leftover.mkdir(parents=True)
    with pytest.raises(RecipeError, match=rf"is being written by process {process.pid} on host"):
        train(steps=4)
    assert leftover.exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    stopped = events(run_dir, "checkpoint")[-1]["step"]
    assert train(steps=stopped + 1) == 0
    assert [(e["status"], e["step"]) for e in events(run_dir, "status")] == [
        ("started", 0),
        ("terminated", stopped),
        ("resumed", stopped),
        ("finished", stopped + 1),
    ]
