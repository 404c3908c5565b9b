"""Reading a run back: from its directory, or from a wandb server by path."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4mega.tracking.events import (
    EVENT_TYPES,
    Event,
    make_event,
    read_events,
    resolve_lives,
    restore_nonfinite,
)
from fp4mega.tracking.manifest import MANIFEST, check_manifest, read_manifest
from fp4mega.tracking.tracker import EVENTS
from fp4mega.tracking.wandb_sink import import_wandb

_WANDB_PATH = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+")


@dataclass(frozen=True)
class Run:
    """One run: its manifest and its one history (see `events.resolve_lives`)."""

    path: str
    manifest: Mapping[str, Any]
    events: list[Event]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.manifest["run_name"]

    @cached_property
    def policy(self) -> str:
        """The default policy, followed by the number of layers that have another, e.g. "x + 4 x bf16"."""
        default = self.manifest["policy"]
        others: dict[str, int] = {}
        for entry in self.manifest["layers"]:
            if entry["policy"] != default:
                others[entry["policy"]] = others.get(entry["policy"], 0) + 1
        return " + ".join([default, *(f"{count} x {name}" for name, count in others.items())])

    @property
    def hardware(self) -> str:
        """World size and device, e.g. "8 x NVIDIA H200"."""
        return f"{self.manifest['world_size']} x {self.manifest['device']}"

    @property
    def status(self) -> str:
        """The last recorded status; "running" for a run that has begun and not ended, which a killed one looks like too."""
        last = next(
            (e["status"] for e in reversed(self.events) if e["type"] == "status"), "running"
        )
        return "running" if last in ("started", "resumed") else last

    def of_type(self, type: str, **fields: Any) -> list[Event]:
        """The events of one type whose fields have the given values."""
        return [
            e
            for e in self.events
            if e["type"] == type and all(e.get(k) == v for k, v in fields.items())
        ]

    def series(
        self, type: str, value: str, **fields: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one field, ordered by step; events in which it is None or absent are left out."""
        events = self.of_type(type, **fields)
        points = sorted(
            ((e["step"], e[value]) for e in events if e.get(value) is not None),
            key=lambda point: point[0],
        )
        steps = np.array([step for step, _ in points], dtype=np.int64)
        return steps, np.array([number for _, number in points], dtype=np.float64)


def read_run(path: str | Path, *, api: Any = None) -> Run:
    """The run in a directory, or on a wandb server when `path` is "entity/project/run_id" and no such directory exists.

    Args:
        api: a `wandb.Api` to use; None makes one when it is needed.

    Raises ValueError naming the path when there is no run, or a damaged one.
    """
    directory = Path(path)
    if directory.is_dir():
        return _read_local(directory)
    if _WANDB_PATH.fullmatch(str(path)):
        return _read_wandb(str(path), api)
    raise ValueError(
        f"run {str(path)!r}: no such directory, and not a wandb path entity/project/run_id"
    )


def _read_local(directory: Path) -> Run:
    if missing := [name for name in (MANIFEST, EVENTS) if not (directory / name).is_file()]:
        raise ValueError(
            f"run {str(directory)!r}: not a run directory, it has no {' and no '.join(missing)}"
        )
    events = resolve_lives(read_events(directory / EVENTS))
    return Run(path=str(directory), manifest=read_manifest(directory / MANIFEST), events=events)


def _read_wandb(path: str, api: Any) -> Run:
    try:
        api = import_wandb("online").Api() if api is None else api
        remote = api.run(path)
        config, rows = dict(remote.config), list(remote.scan_history())
    # Every failure there is (no key, no network, no such run) has its own exception class in wandb.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"run {path!r}: no such directory, and not readable as a wandb run: {reason}"
        ) from error
    manifest = config.pop("manifest", None)
    if manifest is None:
        raise ValueError(
            f"run {path!r}: this wandb run was not written by fp4mega (its config has no manifest)"
        )
    if isinstance(manifest, dict):
        manifest = {**manifest, "recipe": config}
    manifest = check_manifest(manifest, f"run {path!r}: the manifest in its config")
    events = resolve_lives(event for row in rows if (event := _event_of_row(row)) is not None)
    return Run(path=path, manifest=manifest, events=events)


def _event_of_row(row: Mapping[str, Any]) -> Event | None:
    """The event that `wandb_sink.to_wandb` made this row of; None for a row of something else."""
    values: dict[str, Any] = {}
    kind = ""
    for key, value in row.items():
        head, _, name = key.partition("/")
        if head not in EVENT_TYPES or not name or value is None:
            continue
        kind = head
        if head == "probe":
            layer, _, name = name.partition("/")
            values["layer"] = int(layer.removeprefix("layer_"))
        values[name] = math.nan if value in ("NaN", "Infinity", "-Infinity") else value
    if not kind:
        return None
    for name, expected in EVENT_TYPES[kind].required.items():
        if expected is int and isinstance(values.get(name), float) and values[name].is_integer():
            values[name] = int(values[name])
    for name in EVENT_TYPES[kind].nullable:
        values.setdefault(name, None)
    return restore_nonfinite(make_event(kind, int(row["step"]), values, time=row.get("_timestamp")))
