"""What a run says on the terminal: a bar with the latest figures on a terminal, plain lines anywhere else."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1e3:.2f}k" if tokens_per_s < 1e6 else f"{tokens_per_s / 1e6:.2f}M"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class RunConsole:
    """Progress of one run on standard error; silent in all processes but the first."""

    def __init__(self, name: str, steps: int, start: int, *, enabled: bool) -> None:
        self.console = Console(stderr=True, quiet=not enabled, highlight=False, soft_wrap=True)
        self._steps, self._start, self._began = steps, start, time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self.console,
            disable=not enabled or not self.console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=steps, completed=start, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        self.console.print(message, markup=False)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def figures(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_per_s: float,
        step_ms: float,
        mfu: float | None,
    ) -> None:
        """The latest figures: beside the bar, or as a line where there is no terminal."""
        text = f"loss {loss:.4f}  grad {grad_norm:.3f}  lr {lr:.2e}  {_rate(tokens_per_s)} tok/s"
        text += "" if mfu is None else f"  mfu {100 * mfu:.1f}%"
        if self.console.is_terminal:
            self._progress.update(self._task, figures=text)
            return
        left = (time.monotonic() - self._began) / max(1, step - self._start) * (self._steps - step)
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}  {step_ms:.0f} ms  eta {_duration(left)}"
        )
