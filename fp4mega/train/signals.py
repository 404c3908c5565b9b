"""Being asked to stop: SIGTERM and a first SIGINT let the present step finish; a second SIGINT interrupts at once.

The recipe's time limit is treated as a third such wish, under the name of SIGALRM, which is not really sent.
"""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

TIME_LIMIT = signal.SIGALRM
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, TIME_LIMIT)


class StopRequest:
    """Context in which SIGTERM, SIGINT and the end of `max_seconds` set `signal` instead of ending the process.

    max_seconds counts from the start of the process, so that imports and building the model are in it; None: no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.signal = 0
        self._end: float | None = None
        if max_seconds is not None:
            age = time.time() - psutil.Process(os.getpid()).create_time()
            self._end = time.monotonic() + max_seconds - age
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def check_time(self) -> None:
        """Set `signal` to `TIME_LIMIT` when the time is over and nothing else asked first."""
        if not self.signal and self._end is not None and time.monotonic() >= self._end:
            self.signal = TIME_LIMIT
