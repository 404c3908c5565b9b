"""Checkpoints written while training goes on, in one process: what is in them, when they count, how they fail.

Writers are held at a gate, a file that appears at a chosen step, so that a save is in flight for certain and not by chance.
"""

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager, nullcontext

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from run_harness import events

from fp4mega.megatron import adapted_to_cpu
from fp4mega.train import async_saves, loop
from fp4mega.train.checkpoint import CheckpointError, newest_checkpoint
from fp4mega.train.launch import find_launch, start_process_groups, stop_process_groups
from fp4mega.train.loop import TrainingError
from fp4mega.train.recipe import ParallelSection
from fp4mega.train.signals import TIME_LIMIT, StopRequest
from fp4mega.train.writer_process import noticing_dead_workers
from tests.distributed.writers import wait_for_file, writers_that


@pytest.fixture(autouse=True)
def others_before(monkeypatch):
    """Processes that other tests of this worker left waiting, such as the server their ranks are forked from, are none of ours."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(f"{__name__}._others", before)


_others: set[int] = set()


def own_children(recursive=False):
    """Living child processes that began with the test."""
    children = psutil.Process().children(recursive=recursive)
    return [child for child in children if child.pid not in _others]


def order(folder):
    """The updates and the saves, in the order in which they were told."""
    return [(e["type"], e["step"]) for e in events(folder) if e["type"] in ("train", "checkpoint")]


def names(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


@pytest.fixture
def at_step(monkeypatch):
    """Things to do in the trainer, by step: right after the update, before it looks at the save in flight."""
    actions = {}
    original = loop.train_step

    def train_step(training, recipe, batches, index, device, request):
        result = original(training, recipe, batches, index, device, request)
        actions.get(index + 1, lambda: None)()
        return result

    monkeypatch.setattr(loop, "train_step", train_step)
    return actions


@pytest.fixture
def held_until(at_step, tmp_path):
    """Hold all writers until a step is made, or for good."""

    @contextmanager
    def hold(step):
        gate = tmp_path / f"gate_{step}"
        if step is not None:
            at_step[step] = gate.touch
        with writers_that(lambda: wait_for_file(gate)):
            yield

    return hold


def contents(checkpoint):
    """Bytes of the files that hold state; `.metadata` has a random number in it, and checkpoint.json the recipe."""
    paths = [*checkpoint.glob("*.distcp"), *checkpoint.glob("common.pt")]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.skipif(torch.cuda.is_available(), reason="two runs agree bit by bit on a CPU only")
def test_a_save_in_flight_equals_a_synchronous_one(
    train, content, run_dir, held_until, distributed
):
    content["optimizer"]["distributed"] = distributed
    train(save_interval=2, keep_checkpoints=9)
    content["name"] = "background"
    background = run_dir.with_name("background__bf16")
    with held_until(4):
        assert train(save_interval=2, keep_checkpoints=9, async_save=True) == 0
    told = order(background)
    assert told[:5] == [
        *[("train", 1), ("train", 2), ("train", 3), ("checkpoint", 2), ("train", 4)]
    ]
    assert told[-2:] == [("train", 6), ("checkpoint", 6)]
    for step in (2, 4, 6):
        one, other = (f / "checkpoints" / f"iter_{step:07d}" for f in (run_dir, background))
        assert sum(map(len, contents(one).values())) > 1_000_000
        assert contents(one) == contents(other)
        assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}


def check_state_at_the_save(train, run_dir, held_until, monkeypatch):
    """Parameters and optimizer state of the checkpoint are those at the save, bit by bit, not those of updates since."""
    original, at_save, later = async_saves.sharded_state, {}, {}

    def sharded_state(training, **options):
        state = original(training, **options)
        seen = later if at_save else at_save
        for item in nested_values(dict(state)):
            built = item.build() if isinstance(item, ShardedTensorFactory) else item
            parts = nested_values({"": built}) if isinstance(built, dict | list) else [built]
            for part in (p for p in parts if isinstance(p, ShardedTensor)):
                seen[part.key, part.global_offset] = (part.data.detach().clone().cpu(), part)
        return state

    monkeypatch.setattr(async_saves, "sharded_state", sharded_state)
    with held_until(4):
        assert train(steps=4, save_interval=2, keep_checkpoints=9, async_save=True) == 0
    assert order(run_dir)[2:4] == [("train", 3), ("checkpoint", 2)]
    launch = find_launch({})
    with nullcontext() if torch.cuda.is_available() else adapted_to_cpu():
        start_process_groups(launch, ParallelSection())
        try:
            saved = dist_checkpointing.load_plain_tensors(
                str(run_dir / "checkpoints" / "iter_0000002")
            )
        finally:
            stop_process_groups()
    moments = [key for key, _ in at_save if "exp_avg" in key]
    assert len(moments) >= 2
    assert len(at_save) > len(moments)
    moved = 0
    for (key, offset), (tensor, part) in at_save.items():
        place = (
            *offset[: part.prepend_axis_num],
            *(
                slice(o, o + n)
                for o, n in zip(offset[part.prepend_axis_num :], tensor.shape, strict=True)
            ),
        )
        assert torch.equal(saved[key].cpu()[place], tensor), key
        moved += not torch.equal(later[key, offset][0], tensor)
    assert moved == len(at_save)  # so a checkpoint of a later state would differ everywhere


@pytest.mark.parametrize("distributed", [False, True])
def test_the_state_at_the_save_is_saved(
    train, content, run_dir, held_until, monkeypatch, distributed
):
    content["optimizer"]["distributed"] = distributed
    check_state_at_the_save(train, run_dir, held_until, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("distributed", [False, True])
def test_a_gpu_saves_the_state_at_the_save(
    train, content, run_dir, held_until, monkeypatch, distributed
):
    content["optimizer"]["distributed"] = distributed
    check_state_at_the_save(train, run_dir, held_until, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two runs agree bit by bit on a CPU only")
def test_a_run_resumed_from_a_save_in_flight_repeats_every_bit(train, content, run_dir, held_until):
    def losses(folder):
        return [(e["step"], e["loss"], e["grad_norm"]) for e in events(folder, "train")]

    train()
    content["name"] = "halves"
    halves = run_dir.with_name("halves__bf16")
    with held_until(5):
        train(steps=5, save_interval=3, async_save=True)
    checkpoints = halves / "checkpoints"
    (checkpoints / "latest").write_text("iter_0000003\n")
    assert train(save_interval=3, async_save=True) == 0
    assert losses(halves)[-3:] == losses(run_dir)[-3:]


def test_a_stop_publishes_the_save_in_flight_and_saves_once_more(
    train, run_dir, at_step, held_until
):
    """The writers are sent the signal too, as torchrun and a terminal do."""

    def terminate():
        children = own_children(recursive=True)
        assert children
        for process in [*children, psutil.Process()]:
            process.send_signal(signal.SIGTERM)

    at_step[4] = terminate
    with held_until(5):
        assert train(save_interval=3, async_save=True) == 128 + signal.SIGTERM
    assert order(run_dir)[3:] == [
        *[("train", 4), ("checkpoint", 3), ("train", 5), ("checkpoint", 5)]
    ]
    assert events(run_dir)[-1]["status"] == "terminated"
    assert names(run_dir) == ["iter_0000003", "iter_0000005", "latest"]


def test_a_time_limit_publishes_the_save_in_flight_and_saves_once_more(
    train, run_dir, at_step, held_until, monkeypatch
):
    over = []

    def check_time(request):
        request.signal = TIME_LIMIT if over else 0

    monkeypatch.setattr(StopRequest, "check_time", check_time)
    at_step[3] = lambda: over.append(True)
    with held_until(4):
        assert train(save_interval=3, async_save=True, max_seconds=1e5) == 0
    assert order(run_dir)[2:] == [
        *[("train", 3), ("checkpoint", 3), ("train", 4), ("checkpoint", 4)]
    ]
    assert events(run_dir)[-1]["status"] == "terminated"


def test_a_loss_that_is_not_finite_does_not_lose_the_save_in_flight(
    train, content, run_dir, held_until
):
    content["optimizer"] |= {"lr": 1e30, "clip_grad": 0.0}
    with (
        held_until(3),
        pytest.raises(TrainingError, match=r"step 3: .*newest good checkpoint is .*iter_0000002"),
    ):
        train(save_interval=2, async_save=True)
    assert order(run_dir)[2:] == [("checkpoint", 2), ("train", 3)]
    assert events(run_dir)[-1]["step"] == 3


def test_an_error_of_the_trainer_ends_the_writer_and_leaves_nothing_that_counts(
    train, run_dir, at_step, held_until
):
    train(steps=2, save_interval=2)
    writers = []

    def fail():
        writers.extend(own_children(recursive=True))
        raise RuntimeError("something else went wrong")

    at_step[5] = fail
    with held_until(None), pytest.raises(RuntimeError, match="something else"):
        train(save_interval=2, async_save=True)
    assert len(writers) >= 1
    _, alive = psutil.wait_procs(writers, timeout=10)
    assert not alive
    assert newest_checkpoint(run_dir / "checkpoints").step == 2
    leftover = [name for name in names(run_dir) if name.endswith(".tmp")]
    assert len(leftover) == 1
    assert leftover[0].startswith("iter_0000004.")
    at_step.clear()
    assert train(save_interval=2, async_save=True) == 0
    assert [step for kind, step in order(run_dir) if kind == "train"] == [
        *range(1, 5),
        *range(3, 7),
    ]
    assert names(run_dir) == ["iter_0000004", "iter_0000006", "latest"]


def fill_disk(monkeypatch, at_step):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill_disk_at_the_end(monkeypatch, at_step):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("fp4mega.train.checkpoint._flush", full)
    return monkeypatch.undo


def kill_who_writes_a_file(monkeypatch, at_step):
    block = writers_that(lambda: os.kill(os.getpid(), signal.SIGKILL))
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def kill_the_writer(monkeypatch, at_step):
    def kill():
        (writer,) = own_children()
        below = writer.children(recursive=True)
        writer.kill()
        assert not psutil.wait_procs(below, timeout=10)[1]  # they do not survive it

    at_step[5] = kill
    block = writers_that(lambda: signal.pause())
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def stop_the_writer(monkeypatch, at_step):
    block = writers_that(lambda: signal.pause())
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (fill_disk, r"Worker failure: .* MiB free there\)"),  # torch: "unexpected pos"
        (fill_disk_at_the_end, r".*No space left on device"),
        (kill_who_writes_a_file, r".*process .*that writes .* was killed by SIGKILL"),
        (kill_the_writer, r".*the process of rank 0 that writes it was killed by SIGKILL"),
        (stop_the_writer, r".*the process of rank 0 that writes it was not done in time"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failed_writer_ends_the_run_and_keeps_the_good_checkpoint(
    train, run_dir, at_step, cause, message
):
    train(steps=2, save_interval=2)
    # A writer that has all the time of the others is not mistaken for one that hangs.
    limit = 0.02 if cause is stop_the_writer else 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        undo = cause(monkeypatch, at_step)
        try:
            with pytest.raises(
                CheckpointError,
                match=rf"could not save step 4 to .*iter_0000004: \w+Error: {message}",
            ) as error:
                train(save_interval=2, async_save=True, timeout_minutes=limit)
        finally:
            undo()
    at_step.clear()
    assert f"the newest good checkpoint is {run_dir}/checkpoints/iter_0000002" in str(error.value)
    assert not own_children()
    assert names(run_dir) == ["iter_0000002", "latest"]
    assert events(run_dir)[-1]["status"] == "failed"
    assert "could not save step 4" in events(run_dir)[-1]["reason"]
    assert train(save_interval=2, async_save=True) == 0
    assert names(run_dir) == ["iter_0000004", "iter_0000006", "latest"]


def exit_with(code):
    os._exit(code)


def start_and_wait(process):
    process.start()
    time.sleep(60)


def test_only_processes_that_were_forked_here_are_noticed():
    fork = multiprocessing.get_context("fork")
    with noticing_dead_workers():
        process = fork.Process(target=exit_with, args=(0,))
        process.start()
        assert subprocess.run(["sh", "-c", "exit 3"]).returncode == 3  # another program
        process.join()
    process = fork.Process(target=exit_with, args=(3,))
    message = "a process that writes the files ended with exit code 3"
    with noticing_dead_workers(), pytest.raises(ChildProcessError, match=message):
        start_and_wait(process)
    process.join()
    assert process.exitcode == 3
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.skipif(
    not hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc"),
    reason="from 0.17 on Megatron writes a synchronous save with threads",
)
def test_a_killed_worker_of_a_synchronous_save_ends_the_run(train, run_dir):
    """Megatron 0.16 would wait for it for ever."""
    train(steps=2, save_interval=2)
    with (
        writers_that(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        pytest.raises(CheckpointError, match=r"step 4 .*ChildProcessError: .*killed by SIGKILL"),
    ):
        train(steps=4, save_interval=2)
    assert names(run_dir) == ["iter_0000002", "latest"]


def test_only_the_newest_are_kept_and_none_grows(train, run_dir):
    train(save_interval=1, keep_checkpoints=4, async_save=True)
    found = names(run_dir)
    assert found == [*(f"iter_{step:07d}" for step in (3, 4, 5, 6)), "latest"]
    sizes = [
        sum(p.stat().st_size for p in (run_dir / "checkpoints" / name).iterdir())
        for name in found[:-1]
    ]
    assert max(sizes) - min(sizes) < 200
