"""One test body on several processes: gloo on the CPU, nccl where there are GPUs enough.

`run_distributed(body, 2, arguments...)` starts fresh processes, forms the process group over a file, so that no port is
taken, calls `body(world, *arguments)` in each and returns what they returned, by rank. What goes wrong in any of them is one
`DistributedError` with the traceback of every rank that failed, or, past the time limit, where each hanging rank was.

Processes on the CPU are forked from a server that has imported torch and Megatron once, which is most of what starting one costs.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch

_PRELOADED = ["torch", "megatron.core.models.gpt", "fp4mega.megatron", "fp4mega.train.loop"]
_GRACE = 5.0


class DistributedError(AssertionError):
    """A test body failed or hung on some rank; the message has each such rank's traceback."""


@dataclass(frozen=True, slots=True)
class World:
    """Where a test body runs. folder: shared by the ranks, removed afterwards."""

    rank: int
    size: int
    device: torch.device
    folder: Path


def enough_devices(device_type: str, world_size: int) -> bool:
    """Whether `world_size` processes of this type can run here: any number on a CPU without GPUs, one a GPU."""
    if device_type == "cpu":  # where there is a GPU, Megatron would use it
        return not torch.cuda.is_available()
    return torch.cuda.is_available() and torch.cuda.device_count() >= world_size


def _start_method(device_type: str) -> ForkServerContext | SpawnContext:
    """A fork of a process that has imported everything starts at once; CUDA, which those imports touch, allows no fork."""
    if device_type == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_distributed(
    body: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    device_type: str = "cpu",
    timeout: float = 120.0,
) -> list[Any]:
    """Call the module-level function `body(world, *arguments)` in `world_size` processes; returns the results by rank.

    `device_type` is `cpu` (gloo) or `cuda` (nccl, one GPU a process); `timeout` is in seconds, for the whole of it.
    Arguments and results are pickled. Raises DistributedError naming every rank that failed, died or hung.
    """
    context = _start_method(device_type)
    with tempfile.TemporaryDirectory(prefix="fp4mega-test-") as name:
        folder = Path(name)
        processes, pipes = [], []
        for rank in range(world_size):
            pipe, far_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(far_end, body, rank, world_size, device_type, folder, timeout, arguments),
            )
            process.start()
            far_end.close()
            processes.append(process)
            pipes.append(pipe)
        outcomes: dict[int, tuple[str, Any]] = {}
        try:
            outcomes = _collect(pipes, timeout)
            for rank, process in enumerate(processes):
                if rank not in outcomes and process.pid is not None:
                    os.kill(process.pid, signal.SIGUSR1)  # it writes down where it is
                    time.sleep(0.3)
        finally:
            for rank, process in enumerate(processes):
                process.join(_GRACE if rank in outcomes else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
        problems = [
            _problem(rank, outcomes.get(rank), folder, process.exitcode, timeout)
            for rank, process in enumerate(processes)
        ]
        told = [problem for problem in problems if problem is not None]
        if told:
            raise DistributedError("\n".join(told))
        return [outcomes[rank][1] for rank in range(world_size)]


def _collect(pipes: list[Connection], timeout: float) -> dict[int, tuple[str, Any]]:
    """Outcome by rank; a rank that told nothing in time is missing. Once one failed, the others have a little longer."""
    end = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    outcomes: dict[int, tuple[str, Any]] = {}
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[rank] = ("died", None)
            if outcomes[rank][0] != "returned":
                end = min(end, time.monotonic() + _GRACE)
    return outcomes


def _problem(
    rank: int, outcome: tuple[str, Any] | None, folder: Path, code: int | None, timeout: float
) -> str | None:
    if outcome is None:
        stack = _stack_file(folder, rank)
        where = stack.read_text() if stack.exists() else "not even started\n"
        return (
            f"rank {rank} was still running after {timeout:g} s, or after another failed:\n{where}"
        )
    kind, value = outcome
    if kind == "died":
        return f"rank {rank} died with exit code {code}"
    return f"rank {rank} failed:\n{value}" if kind == "raised" else None


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"


def _run_rank(
    pipe: Connection,
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    device_type: str,
    folder: Path,
    timeout: float,
    arguments: tuple[Any, ...],
) -> None:
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            result = _in_group(body, rank, world_size, device_type, folder, timeout, arguments)
            code, message = 0, pickle.dumps(("returned", result))
        except BaseException:
            code, message = 1, pickle.dumps(("raised", traceback.format_exc()))
        pipe.send_bytes(message)
        pipe.close()
        if code:
            os._exit(code)  # the threads of a broken process group may never end
        faulthandler.unregister(signal.SIGUSR1)


def _await_others(folder: Path, rank: int, world_size: int) -> None:
    """Until every rank is connected: one that returned sooner would close the connections others still make."""
    (folder / f"connected_{rank}").touch()
    while not all((folder / f"connected_{r}").exists() for r in range(world_size)):
        time.sleep(0.01)


def _in_group(
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    device_type: str,
    folder: Path,
    timeout: float,
    arguments: tuple[Any, ...],
) -> Any:
    from fp4mega.megatron import adapted_to_cpu

    on_gpu = device_type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with nullcontext() if on_gpu else adapted_to_cpu():
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        _await_others(folder, rank, world_size)
        result = body(World(rank, world_size, device, folder), *arguments)
        torch.distributed.destroy_process_group()
    return result
