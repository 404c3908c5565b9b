"""Being asked to stop: SIGTERM and a first SIGINT let the present step finish; a second SIGINT interrupts at once."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Context in which SIGTERM and SIGINT set `signal` instead of ending the process."""

    def __init__(self) -> None:
        self.signal = 0
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
