"""The events of a run in Weights & Biases.

The same events as in the JSONL file, one `log` call each: `train/loss`, `eval/loss`, `probe/layer_03/q_sqnr_db`, with `step` as
the x axis. wandb's own step counter is not used for it, because it cannot go back when a run resumes from an earlier
checkpoint.

wandb must neither slow nor stop training. A thread hands events over, so that a wedged wandb process blocks that thread
and not the training loop; the first failure stops the sink and is kept for the tracker to report.
"""

import atexit
import importlib
import logging
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import psutil

from fp4mega.tracking.events import Event, nearest

logger = logging.getLogger("fp4mega.tracking")

Mode = Literal["auto", "offline", "online", "disabled"]
QUEUE_EVENTS = 100_000
CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbSettings:
    """Where the events go in wandb.

    `auto` is what WANDB_MODE says if it is set, otherwise online when wandb finds credentials (WANDB_API_KEY, netrc, its
    settings files) and offline when not. Raises ValueError for another mode, or for an entity without a project.
    """

    mode: Mode = "auto"
    project: str | None = None
    entity: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"wandb.mode={self.mode!r}: {nearest(str(self.mode), get_args(Mode))}")
        if self.entity is not None and self.project is None:
            raise ValueError(f"wandb.entity={self.entity!r} needs wandb.project as well")


def import_wandb(mode: str) -> ModuleType:
    """The wandb package. Raises ModuleNotFoundError saying how to install it or do without."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ModuleNotFoundError(
            f"wandb.mode={mode!r} needs the wandb package: pip install wandb, or set tracking.wandb.mode=disabled",
            name="wandb",
        ) from None


def resolve_mode(mode: Mode, wandb: ModuleType) -> Literal["offline", "online", "disabled"]:
    """The mode that `auto` stands for here; another mode is itself. Never prompts.

    Offline asks no server. Raises ValueError for `online` without credentials, and for a WANDB_MODE that is none; what
    wandb raises for credentials that cannot be any.
    """
    asked = (os.environ.get("WANDB_MODE") or "auto") if mode == "auto" else mode
    if asked in ("offline", "disabled"):
        return asked  # type: ignore[return-value]
    if asked not in get_args(Mode):
        raise ValueError(f"WANDB_MODE={asked!r}: {nearest(asked, get_args(Mode))}")
    if wandb.login(prompt=False, verify=False):
        return "online"
    if asked == "online":
        raise ValueError(
            "wandb mode 'online': no credentials found; run `wandb login`, set WANDB_API_KEY, or use mode offline"
        )
    return "offline"


def to_wandb(event: Event) -> dict[str, Any]:
    """The flat keys under which one event is logged; None values are left out, NaN stays NaN."""
    prefix = event["type"]
    if prefix == "probe":
        prefix = f"probe/layer_{event['layer']:02d}"
    own = ("type", "step", "time", "nonfinite", "layer")
    values = {f"{prefix}/{name}": value for name, value in event.items() if name not in own}
    nonfinite = {f"{prefix}/{name}": float("nan") for name in event.get("nonfinite", ())}
    return {
        "step": event["step"],
        **{k: v for k, v in values.items() if v is not None},
        **nonfinite,
    }


def _end_wandb() -> None:
    """Kill wandb's process: at the end of this one wandb would wait for it, however long it takes."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name().startswith("wandb"):
                child.kill()


class WandbSink:
    """One wandb run, fed by a thread. `failure` holds the first error in words, None while all is well.

    Constructing raises ValueError for a WANDB_MODE that cannot be had and, when the mode was asked for by name,
    ModuleNotFoundError without wandb and whatever `wandb.init` raises. Under `auto` nobody asked for wandb in particular, so
    that a wandb that is missing, a damaged API key or a server that is down at the start is a failure like one later.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: WandbSettings,
        *,
        run_id: str,
        name: str,
        config: Mapping[str, Any],
        resumed: bool,
    ) -> None:
        self.mode: Literal["offline", "online", "disabled"] = "disabled"
        self.failure: str | None = None
        self._events: queue.Queue[Event | None] = queue.Queue(maxsize=QUEUE_EVENTS)
        self._exit_code = 0
        self._thread: threading.Thread | None = None
        try:
            wandb = import_wandb(settings.mode)
            self.mode = resolve_mode(settings.mode, wandb)
        except Exception as error:
            if settings.mode != "auto" or isinstance(error, ValueError):
                raise
            self.failure = f"{type(error).__name__}: {error}"
            return
        if self.mode == "disabled":
            return
        if self.mode == "offline":
            # wandb reports its own usage to its server even then (seen in 0.31), unless this says no.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            self._run = wandb.init(
                mode=self.mode,
                dir=str(run_dir),
                id=run_id,
                name=name,
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                config=dict(config),
                # Offline there is no server to resume from: the pieces share the id and are joined when they are synced.
                resume="allow" if self.mode == "online" else None,
                allow_val_change=resumed or None,
                reinit="create_new",
                settings=wandb.Settings(
                    console="off", silent=self.mode == "offline", finish_timeout=CLOSE_TIMEOUT_S
                ),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            if settings.mode != "auto":
                raise
            self.failure = f"{type(error).__name__}: {error}"
            return
        self._thread = threading.Thread(target=self._forward, name="wandb-sink", daemon=True)
        self._thread.start()
        if self.mode == "offline":
            folder = run_dir / "wandb"
            logger.info("wandb is offline: files in %s, upload them with `wandb sync`", folder)
        else:
            logger.info("wandb is online: %s", self._run.url)

    def _forward(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._run.log(to_wandb(event))
            self._run.finish(exit_code=self._exit_code)
        # Whatever wandb raises (its own errors, a lost connection, a full disk, a cancelled task), training goes on without it.
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"

    def log(self, event: Event) -> None:
        """Hand one event over; returns at once. After a failure events are no longer taken."""
        if self._thread is None or self.failure is not None:
            return
        self._put(event)

    def _put(self, event: Event | None) -> None:
        """None is the end."""
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self.failure = f"wandb took none of the last {QUEUE_EVENTS} events"

    def close(self, exit_code: int) -> None:
        """Send what is left and finish the wandb run, in at most CLOSE_TIMEOUT_S seconds.

        A wandb that has not finished by then goes on while this process does, and ends with it.
        """
        if self._thread is None:
            return
        if self.failure is None:
            self._exit_code = exit_code
            self._put(None)
            self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            # Called before wandb's own, which was registered earlier.
            atexit.register(_end_wandb)
            if self.failure is None:
                self.failure = f"not finished after {CLOSE_TIMEOUT_S:.0f} s; what is on disk is for `wandb sync`"
        self._thread = None
