"""The process that writes a checkpoint while training goes on: how it is run, how it ends, and what it tells.

Megatron forks it, so it sees the memory of the moment of the fork whatever the trainer does afterwards, and shares the
trainer's open sockets. Hence the rules here: it dies with the trainer (a survivor would keep connections open that the other
ranks wait on), it leaves signals to the trainer, and it tells its result through a file in memory that can neither fill up
nor block, in place of Megatron's queue, which is a third process that a SIGTERM to the group would end first.
"""

import ctypes
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)
_POLL_SECONDS = 0.2


def describe_end(code: int) -> str:
    """How a process ended, from an exit code in which minus a number is the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request
        os._exit(1)


@contextmanager
def noticing_dead_workers() -> Iterator[None]:
    """Raise ChildProcessError in the block when a process that it forked dies of anything but its own accord.

    Megatron 0.16 writes files in processes and waits for all to report; one that was killed never does, and the wait has no end.
    """
    this = psutil.Process()
    earlier = {child.pid for child in this.children()}

    def look(number: int, frame: FrameType | None) -> None:
        for child in this.children():
            try:
                if child.pid in earlier or child.name() != this.name():  # another program
                    continue
                # WNOWAIT: multiprocessing still wants to read the exit code itself
                told = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except (ChildProcessError, psutil.Error):  # gone, and asked about already
                continue
            if told is not None and told.si_status:
                killed = told.si_code != os.CLD_EXITED
                end = describe_end(-told.si_status if killed else told.si_status)
                raise ChildProcessError(f"a process that writes the files {end}")

    before = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


class WriterProcess:
    """One rank's writer of one checkpoint, and the queue of one place through which Megatron takes its result."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._file = os.fdopen(os.memfd_create("checkpoint_writer"), "w+b")
        self._process: BaseProcess | None = None
        self._overdue_after = ""

    def wrap(self, write: Callable[..., None]) -> Callable[..., None]:
        """The function that the writer runs in place of Megatron's."""
        return partial(self._run, write, os.getpid())

    def _run(self, write: Callable[..., None], trainer: int, *args: Any, **kwargs: Any) -> None:
        """In the writer: Megatron's function, with these rules around it."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _die_with(trainer)
        os.register_at_fork(after_in_child=partial(_die_with, os.getpid()))
        try:
            with noticing_dead_workers():
                write(*args, **kwargs)
        except Exception as error:
            self.put(error)

    def watch(self, process: BaseProcess | None) -> None:
        """In the trainer: this is the process; None when this rank has nothing to write."""
        self._process = process

    def put(self, result: Any) -> None:
        """In the writer: tell the result, which Megatron gives as results by file or an error."""
        try:
            told = pickle.dumps(result)
        except Exception:
            told = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
        self._file.write(told)
        self._file.flush()

    def get_nowait(self) -> Any:
        """In the trainer, once the writer has ended: what it told, or an error that says how it ended."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):  # nothing, or not all of it
            code = None if self._process is None else self._process.exitcode
            end = self._overdue_after or describe_end(code or 0)
            return ChildProcessError(f"the process of rank {self._rank} that writes it {end}")

    def wait(self, end: float) -> None:
        """Wait a little for the writer; at time.monotonic() == `end` end it."""
        if self._process is None:
            return
        self._process.join(max(0.0, min(_POLL_SECONDS, end - time.monotonic())))
        if self._process.is_alive() and time.monotonic() >= end:
            self._overdue_after = "was not done in time"
            self.abort()

    def abort(self) -> None:
        """End the writer, and with it the processes that write its files."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()

    def close(self) -> None:
        """Free the file in memory."""
        self._file.close()
