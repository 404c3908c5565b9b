"""Copies of runs with fewer events, small enough to be kept beside a document; they are runs like any other.

The manifest of such a copy says so under `thinned`. Nothing else is ever overwritten: neither a run nor a folder of anything
else.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4mega.tracking.events import Event
from fp4mega.tracking.manifest import MANIFEST, read_manifest, write_atomically
from fp4mega.tracking.reader import Run
from fp4mega.tracking.tracker import EVENTS

KEPT_PROBES = (
    *("ds_row_sum", "o_error", "dq_error", "dk_error", "dv_error", "p_row_sum_error", "p_bwd_row_sum_error"),
    *("v_zeroed", "p_zeroed", "do_zeroed", "ds_zeroed", "v_scale_range", "score_max", "qkv_grad_norm"),
)  # fmt: skip
THINNED = "thinned"
_KEPT_TRAIN = ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms")


def thin_all(runs: Sequence[Run], out: Path, every: int, probe_every: int) -> None:
    """`thin` each run to the folder of its name under `out`; all is checked before the first is written.

    Raises ValueError as `thin` does, and for two runs of one name.
    """
    targets: dict[Path, Run] = {}
    sources = {Path(run.path).resolve(): run for run in runs}
    for run in runs:
        if Path(run.name).name != run.name or run.name == "..":
            raise ValueError(f"run {run.path}: run_name={run.name!r}: cannot name a folder")
        target = (out / run.name).resolve()
        if (other := targets.get(target)) is not None:
            raise ValueError(
                f"{target}: both {other.path} and {run.path} would be copied there; copy them to different folders"
            )
        if (source := sources.get(target)) is not None:
            raise ValueError(f"{target}: this is {source.path} itself; expected another folder")
        targets[target] = run
        _check(run, target, every, probe_every)
    for target, run in targets.items():
        thin(run, target, every, probe_every)


def thin(run: Run, folder: Path, every: int, probe_every: int) -> None:
    """Write the run with every `every`-th training event, the probes of each `probe_every`-th step, and four digits.

    Evaluations and the last step are all kept, and so is what is not finite. Raises ValueError for steps below 1, a run
    without events, and a folder that holds anything but an earlier thinned copy.
    """
    _check(run, folder, every, probe_every)
    statuses = run.of_type("status")
    last = max((e["step"] for e in run.of_type("train")), default=0)
    # One life, whatever the run had: what it resumed from is resolved already.
    opening = {"type": "status", "step": 0, "time": run.events[0]["time"], "status": "started"}
    kept: list[Event] = [opening]
    for event in run.events:
        kind, step = event["type"], event["step"]
        bad = any(isinstance(v, float) and not math.isfinite(v) for v in event.values())
        if kind == "train" and (step % every == 0 or step == last or bad):
            kept.append(_reduced(event, _KEPT_TRAIN))
        elif kind == "eval":
            kept.append(_reduced(event, ("loss", "split")))
        elif (
            kind == "probe"
            and (step % probe_every == 0 or step == last or bad)
            # A probe event without a figure is not one.
            and any(name in event for name in KEPT_PROBES)
        ):
            kept.append(_reduced(event, ("layer", *KEPT_PROBES)))
    if statuses and statuses[-1]["status"] not in ("started", "resumed"):
        kept.append({**statuses[-1], "step": last})
    text = "".join(
        json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n" for event in kept
    )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{EVENTS}.tmp"
    try:
        temporary.write_text(text)
        # First, so that whatever a killed process leaves here is known as a copy that may be replaced.
        thinned = {"every": every, "probe_every": probe_every}
        write_atomically(folder / MANIFEST, {**run.manifest, THINNED: thinned})
        temporary.replace(folder / EVENTS)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _check(run: Run, folder: Path, every: int, probe_every: int) -> None:
    for name, value in (("every", every), ("probe_every", probe_every)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
    if not run.events:
        raise ValueError(f"run {run.path}: {EVENTS} holds no event, there is nothing to copy")
    if folder.resolve() == Path(run.path).resolve():
        raise ValueError(f"{folder}: this is the run itself; expected another folder")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file() or THINNED not in read_manifest(folder / MANIFEST):
        raise ValueError(
            f"{folder}: exists and is no thinned copy of a run; remove it, or name another folder"
        )


def _reduced(event: Event, names: Sequence[str]) -> Event:
    values = {name: event[name] for name in names if name in event}
    bad = [n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
    made: Event = {"type": event["type"], "step": event["step"], "time": round(event["time"], 1)}
    for name, value in values.items():
        made[name] = None if name in bad else _rounded(name, value)
    return {**made, "nonfinite": bad} if bad else made


def _rounded(name: str, value: Any) -> Any:
    digits = 6 if name == "loss" else 4
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
