"""One process at a time writes a run's folder: a second one would remove the first one's checkpoints and mix its events in."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fp4mega.train.schema import RecipeError, show

logger = logging.getLogger("fp4mega.train")

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_POLL_SECONDS = 0.2


@contextmanager
def only_writer(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Make the run's folder and hold its lock in the block; a folder that nothing else came into is removed again.

    The lock is a POSIX one: it ends with this process, however that ends, processes forked to write checkpoints do not
    inherit it, and over NFS other machines see it. Where the file system has no locks this is logged, and the block runs.

    Raises RecipeError when the folder cannot be written, and when another process holds it for longer than `patience`
    seconds.
    """
    end = time.monotonic() + patience
    told = ""
    try:
        file = _open(folder)
        while not _lock(file, folder):
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if time.monotonic() >= end:
                raise RecipeError(
                    f"tracking.dir={show(str(folder.parent))}: {folder} is being written by {holder}; choose another `name` "
                    f"or `tracking.dir`, or remove {folder / LOCK} if that process no longer exists"
                )
            if holder != told:
                logger.info("%s: waiting up to %.0f s for %s to end", folder, patience, holder)
                told = holder
            time.sleep(_POLL_SECONDS)
            file = _open(folder)
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
        file.flush()
    except RecipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        problem = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(
            f"tracking.dir={show(str(folder.parent))}: {folder} cannot be written: {problem}"
        ) from None
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                if os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()


def _open(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / LOCK).open("a+")


def _lock(file: TextIO, folder: Path) -> bool:
    """Whether this process now holds the file, and it is still the one that others will open."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: the file system has no locks (%s): nothing keeps a second process from writing this run",
            folder,
            error.strerror,
        )
        return True
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False
