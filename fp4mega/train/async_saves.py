"""Checkpoints that are written while training goes on, by Megatron's asynchronous strategy.

`start` takes the state as it is (a copy on the host of what a GPU holds; the memory as it is at the fork on a CPU) and lets a process of
each rank write it. `finish` asks whether all of them are done and only then publishes the checkpoint, as a synchronous
save does: whatever dies in between leaves a folder under a temporary name, which counts for nothing.

Of Megatron's two callers this is the one that forks a process for each save; its persistent one asks for a CUDA device even
where there is none. It needs neither Transformer Engine nor CUDA.
"""

import inspect
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fp4mega.train.checkpoint import (
    begin_checkpoint,
    failed_save,
    folder_name,
    publish_checkpoint,
    sharded_state,
)
from fp4mega.train.model import Training
from fp4mega.train.recipe import Recipe
from fp4mega.train.writer_process import WriterProcess


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    temporary: Path
    writer: WriterProcess


class AsyncSaves:
    """The asynchronous saves of a run, at most one in flight. All methods but `abort` are collective.

    Leaving its `with` block by an error ends the writer, so that the process can end.
    """

    def __init__(self, folder: Path, recipe: Recipe, data_fingerprint: str) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._folder, self._recipe, self._data_fingerprint = folder, recipe, data_fingerprint
        self._queue = AsyncCallsQueue(persistent=False)
        self._in_flight: _InFlight | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def start(self, step: int, training: Training) -> None:
        """Begin to save the state after `step` updates. What training does from here on is not in it.

        Raises CheckpointError when it cannot begin.
        """
        assert self._in_flight is None, "finish(wait=True) comes before the next save"
        temporary = None
        try:
            temporary = begin_checkpoint(self._folder, step)
            writer = WriterProcess(torch.distributed.get_rank())
            self._in_flight = _InFlight(step, temporary, writer)
            request = _request(sharded_state(training, loading=False), temporary, writer)
            request.add_finalize_fn(self._publish)
            self._queue.schedule_async_request(request)
            writer.watch(getattr(self._queue.async_calls[-1].async_caller, "process", None))
        except (Exception, CheckpointException) as error:
            self.abort()
            raise failed_save(error, self._folder, step, temporary) from error

    def finish(self, *, wait: bool) -> tuple[int, Path] | None:
        """Publish the save in flight if all writers are done; returns its step and folder when it was published now.

        With `wait` train.timeout_minutes are left to a writer that is not done. Raises CheckpointError when a writer failed,
        died or was not done by then: then nothing was published, and what was written is removed.
        """
        if self._in_flight is None:
            return None
        saving = self._in_flight
        end = time.monotonic() + 60 * self._recipe.train.timeout_minutes
        try:
            while not self._queue.maybe_finalize_async_calls(blocking=False):
                if not wait:
                    return None
                saving.writer.wait(end)
        except (Exception, CheckpointException) as error:
            self.abort()
            raise failed_save(error, self._folder, saving.step, saving.temporary) from error
        saving.writer.close()
        self._in_flight = None
        return saving.step, self._folder / folder_name(saving.step)

    def abort(self) -> None:
        """End this process's writer, if there is one, and forget its save; what it wrote is a leftover."""
        if self._in_flight is not None:
            self._in_flight.writer.abort()
            self._in_flight.writer.close()
            self._in_flight = None
            self._queue.async_calls.clear()

    def _publish(self) -> None:
        """Called by Megatron in every process when all writers have succeeded and its own files are complete."""
        saving = self._in_flight
        assert saving is not None
        publish_checkpoint(saving.temporary, saving.step, self._recipe, self._data_fingerprint)


def _request(state: dict[str, Any], folder: Path, writer: WriterProcess) -> Any:
    """Megatron's request to write the state, whose process obeys and reports to `writer`."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # megatron-core 0.17 added a second strategy in a package of its own, and made that one the default.
    takes = inspect.signature(dist_checkpointing.save).parameters
    strategy = {"async_strategy": "mcore"} if "async_strategy" in takes else {}
    filesystem_async._results_queue = writer
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **strategy)
    if request.async_fn is None:  # nothing to write here
        return request
    return request._replace(async_fn=writer.wrap(request.async_fn))
