"""Meddling with the processes that write a checkpoint, once each has written its first tensor or object."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async


@contextmanager
def writers_that(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` in each process other than this one, after each item that it writes, for the length of the block."""
    original, trainer = filesystem_async._write_item, os.getpid()

    @functools.wraps(original)  # Megatron looks at the signature
    def write_item(transforms, stream, *args, **kwargs):
        result = original(transforms, stream, *args, **kwargs)
        if os.getpid() != trainer:
            stream.flush()
            act()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, "_write_item", write_item)
        yield


def wait_for_file(path: Path, seconds: float = 60.0) -> None:
    """Wait until the file exists; TimeoutError when it does not in time."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= end:
            raise TimeoutError(f"{path} did not appear in {seconds:g} s")
        time.sleep(0.02)
