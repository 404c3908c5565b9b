"""The tracker of a running training: manifest, JSONL events and wandb behind one `log` call."""

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp4mega.tracking.events import LIFE_STARTS, STATUSES, EventWriter, make_event, nearest
from fp4mega.tracking.manifest import MANIFEST, join_lives, read_manifest, write_atomically
from fp4mega.tracking.wandb_sink import WandbSettings, WandbSink

logger = logging.getLogger("fp4mega.tracking")

EVENTS = "events.jsonl"
_END_STATUSES = tuple(status for status in STATUSES if status not in LIFE_STARTS)


class Tracker:
    """Records one life of a run into `run_dir`; construct it on one rank only.

    Opening writes the manifest and a `started` (or, with `resume_step`, a `resumed`) status event. An existing run
    directory is continued: earlier lives stay in both files. What changed since the earlier life (recipe, policy, device, data order)
    is logged and recorded as a warning event.

    Args:
        run_dir: created when missing.
        manifest: from `build_manifest`.
        wandb: None is the same as mode `disabled`.
        resume_step: the step of the checkpoint that training continues from; None when it starts from initialization.

    Raises ValueError for a damaged manifest or events file, OSError when the directory cannot be written, and what
    `WandbSink` raises when wandb cannot start. After that a failing wandb is reported once, in the log and as a warning
    event, and the JSONL events go on.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        manifest: Mapping[str, Any],
        wandb: WandbSettings | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        manifest_path = self.run_dir / MANIFEST
        earlier = read_manifest(manifest_path) if manifest_path.exists() else None
        joined, changes = join_lives(earlier, manifest, step=resume_step or 0)
        joined["wandb_id"] = earlier["wandb_id"] if earlier else uuid.uuid4().hex[:16]

        self._step = resume_step or 0
        self._open = True
        self._wandb_reported = False
        self._wandb: WandbSink | None = None
        self._writer = EventWriter(self.run_dir / EVENTS)
        try:
            if wandb is not None and wandb.mode != "disabled":
                self._wandb = WandbSink(
                    self.run_dir,
                    wandb,
                    run_id=joined["wandb_id"],
                    name=joined["run_name"],
                    config={
                        **joined["recipe"],
                        "manifest": {k: v for k, v in joined.items() if k != "recipe"},
                    },
                    resumed=earlier is not None,
                )
            write_atomically(manifest_path, joined)
        except BaseException:
            self._writer.close()
            raise
        self.log("status", self._step, status="started" if resume_step is None else "resumed")
        if changes:
            logger.warning("%s continues with changes: %s", self.run_dir, "; ".join(changes))
            self.log(
                "warning", self._step, message=f"changed since the last life: {'; '.join(changes)}"
            )

    def log(self, type: str, step: int, /, **values: Any) -> None:
        """Record one event; its types and fields are in `events.EVENT_TYPES`.

        Raises ValueError or TypeError for an event that is none, RuntimeError after `close`, OSError when the events file
        cannot be written.
        """
        if not self._open:
            raise RuntimeError(f"{self.run_dir}: the tracker is closed")
        event = make_event(type, step, values)
        self._writer.write(event)
        self._step = step
        if self._wandb is not None:
            self._wandb.log(event)
            self._report_wandb()

    def _report_wandb(self) -> None:
        if self._wandb is None or self._wandb.failure is None or self._wandb_reported:
            return
        self._wandb_reported = True
        message = (
            f"wandb stopped: {self._wandb.failure}. Events go on in {self.run_dir / EVENTS} only."
        )
        logger.error("%s", message)
        self._writer.write(make_event("warning", self._step, {"message": message}))

    def close(self, status: str = "finished", *, reason: str | None = None) -> None:
        """Record how the run ended (finished, terminated or failed) and close everything; closing twice does nothing."""
        if status not in _END_STATUSES:
            raise ValueError(f"status={status!r}: {nearest(status, _END_STATUSES)}")
        if not self._open:
            return
        try:
            self.log(
                "status",
                self._step,
                status=status,
                **({} if reason is None else {"reason": reason}),
            )
            self._open = False
            if self._wandb is not None:
                self._wandb.close(exit_code=0 if status == "finished" else 1)
                self._report_wandb()
        finally:
            self._open = False
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close("finished")
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.close("terminated", reason=f"{type(error).__name__}: {error}")
        else:
            self.close("failed", reason=f"{type(error).__name__}: {error}")
