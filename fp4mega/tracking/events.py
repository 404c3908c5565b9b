"""Events of one run: what may be written, the append-only JSONL file, and what a reader makes of it.

One event is one JSON object on one line, complete once its newline is in the file. A process killed while writing
leaves a torn last line; the reader skips it with a warning and the next writer cuts it off.

JSON has no NaN and no infinity: such a value is written as null and its name listed in `nonfinite`. Reading puts NaN
back, so that whoever computes with the value sees that it was not a number.

A run may live several times (a job is killed, resumed, killed again). Every life opens with a `status` event, `started`
or `resumed`, whose step is where it continues. `resolve_lives` keeps one history: what an earlier life wrote beyond that
step never led anywhere and is dropped, and of two events for the same thing the later one stands.
"""

import json
import math
import time as clock
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

Event = dict[str, Any]

STATUSES = ("started", "resumed", "finished", "terminated", "failed")
LIFE_STARTS = ("started", "resumed")
_OWN_FIELDS = ("type", "step", "time", "nonfinite")
INTEGERS = 2**63
"""Integers are below it: a reader keeps them in 64 bits."""
_KIND_WORDS = {float: "a number", int: "an integer", str: "a string"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EventType:
    """What one type of event carries.

    `required` and `optional` map a field to its kind: float (any real number), int or str. A field in `nullable` may be
    None, "not measured". With `extra_numbers`, fields under other names are taken too when they are numbers. A history
    event is replaced when a later life passes its step again; others are a record of what happened and stay.
    """

    required: Mapping[str, type]
    optional: Mapping[str, type] = field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    extra_numbers: bool = False
    min_extra: int = 0
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    history: bool = True


EVENT_TYPES: Mapping[str, EventType] = MappingProxyType(
    {
        "train": EventType(
            required={
                "loss": float,
                "grad_norm": float,
                "lr": float,
                "tokens": int,
                "tokens_per_s": float,
                "step_ms": float,
            },
            optional={"mfu": float, "tflops_per_gpu": float},
            nullable=("grad_norm", "mfu", "tflops_per_gpu"),
            extra_numbers=True,
        ),
        "eval": EventType(required={"loss": float, "split": str}, extra_numbers=True),
        "probe": EventType(required={"layer": int}, extra_numbers=True, min_extra=1),
        "checkpoint": EventType(required={"path": str}),
        "status": EventType(
            required={"status": str},
            optional={"reason": str},
            choices={"status": STATUSES},
            history=False,
        ),
        "warning": EventType(required={"message": str}, history=False),
    }
)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the allowed names, and the nearest one if any is near."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"allowed: {', '.join(names)}" + (f". Did you mean {close[0]!r}?" if close else "")


def make_event(
    type: str, step: int, values: Mapping[str, Any], *, time: float | None = None
) -> Event:
    """One checked event, ready for `json.dumps(..., allow_nan=False)`.

    `time` is in seconds since the epoch (None: now). A value with an `item` method (numpy scalar, 0-d tensor) is taken
    as the Python number it holds.

    Raises ValueError for an unknown type or field, a missing field or a value outside its choices, TypeError for a
    value of the wrong kind.
    """
    if type not in EVENT_TYPES:
        raise ValueError(f"event type={type!r}: {nearest(type, EVENT_TYPES)}")
    spec = EVENT_TYPES[type]
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < INTEGERS:
        raise TypeError(f"event {type!r}: step={step!r}: expected an integer from 0 to 2**63 - 1")
    if time is not None and not _is_time(time):
        raise TypeError(
            f"event {type!r} at step {step}: time={time!r}: expected a number of seconds"
        )
    if missing := [name for name in spec.required if name not in values]:
        raise ValueError(f"event {type!r} at step {step}: missing field(s) {', '.join(missing)}")

    known = {**spec.required, **spec.optional}
    event: Event = {"type": type, "step": step, "time": clock.time() if time is None else time}
    nonfinite: list[str] = []
    for name, given in values.items():
        if name in _OWN_FIELDS or (name not in known and not spec.extra_numbers):
            raise ValueError(
                f"event {type!r} at step {step}: unknown field {name!r}; {nearest(name, known)}"
            )
        value = given.item() if hasattr(given, "item") else given
        optional = name in spec.nullable or name not in known
        if not (value is None and optional):
            _check_kind(type, step, name, value, known.get(name, float))
        if name in spec.choices and value not in spec.choices[name]:
            raise ValueError(
                f"event {type!r}: {name}={value!r}: {nearest(value, spec.choices[name])}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            value = None
        event[name] = value
    if len(values) - len(spec.required) < spec.min_extra:
        raise ValueError(
            f"event {type!r} at step {step}: expected at least {spec.min_extra} metric beside {', '.join(known)}"
        )
    if nonfinite:
        event["nonfinite"] = nonfinite
    return event


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < INTEGERS


def _check_kind(type_name: str, step: int, name: str, value: Any, kind: type) -> None:
    accepted = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(
            f"event {type_name!r} at step {step}: {name}={value!r}: expected {_KIND_WORDS[kind]}"
        )
    if isinstance(value, int) and abs(value) >= INTEGERS:
        raise ValueError(
            f"event {type_name!r} at step {step}: {name}={value!r}: expected an integer below 2**63"
        )


def restore_nonfinite(event: Event) -> Event:
    """The event with NaN where `nonfinite` says that a value was NaN or infinite."""
    return {**event, **dict.fromkeys(event.get("nonfinite", ()), math.nan)}


class EventWriter:
    """Appends events to a JSONL file; every line has left the process when `write` returns.

    Opening cuts off a torn last line. When a write fails (a full disk), the part of the line that got through is cut off
    again and the OSError is raised, so that the file stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        complete = _complete_size(path.read_bytes())
        if complete < path.stat().st_size:
            warnings.warn(
                f"{path}: cut off a torn last line (the process that wrote it was killed)",
                stacklevel=2,
            )
            self._file.truncate(complete)

    def write(self, event: Event) -> None:
        """Append one event made by `make_event`. Raises OSError when it could not be written whole."""
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        start = self.path.stat().st_size
        try:
            written = self._file.write(line)
        except OSError:
            self._file.truncate(start)
            raise
        if written != len(line):
            self._file.truncate(start)
            raise OSError(
                f"{self.path}: wrote {written} of {len(line)} bytes of an event; is the disk full?"
            )

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _complete_size(data: bytes) -> int:
    """Bytes up to the end of the last complete, parsable line."""
    end = data.rfind(b"\n") + 1
    last = data[data.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
    return end if not last or _parse(last) is not None else end - len(last)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def read_events(path: Path) -> list[Event]:
    """Every event of the file in the order written, all lives.

    A torn last line is skipped with a warning. Raises FileNotFoundError, and ValueError with the line number for a line
    that is no event anywhere else: the file was damaged by something other than a kill.
    """
    data = path.read_bytes()
    complete = _complete_size(data)
    if complete < len(data):
        warnings.warn(
            f"{path}: skipped a torn last line (the process that wrote it was killed)", stacklevel=2
        )
    return list(_checked_lines(path, data[:complete]))


def _checked_lines(path: Path, data: bytes) -> Iterator[Event]:
    for number, line in enumerate(data.splitlines(), start=1):
        event = _parse(line)
        if event is None:
            raise ValueError(f"{path}: line {number} is not a JSON object: {line[:80]!r}")
        missing = event.get("nonfinite", [])
        if not isinstance(missing, list) or not all(
            isinstance(name, str) and name not in _OWN_FIELDS and event.get(name, 0) is None
            for name in missing
        ):
            raise ValueError(
                f"{path}: line {number}: nonfinite={missing!r}: expected a list of fields that are null"
            )
        values = {k: v for k, v in restore_nonfinite(event).items() if k not in _OWN_FIELDS}
        try:
            make_event(event["type"], event["step"], values, time=event["time"])
        except KeyError as error:
            raise ValueError(f"{path}: line {number}: missing field {error}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        yield restore_nonfinite(event)


def resolve_lives(events: Iterable[Event]) -> list[Event]:
    """One history out of all lives, by the rule in the module docstring; status and warning events all stay."""
    kept: dict[tuple[Any, ...], Event] = {}
    for number, event in enumerate(events):
        if not EVENT_TYPES[event["type"]].history:
            if event.get("status") in LIFE_STARTS:
                kept = {key: old for key, old in kept.items() if _survives(old, event["step"])}
            kept[(number,)] = event
            continue
        key = (event["type"], event["step"], event.get("layer"), event.get("split"))
        kept.pop(key, None)
        kept[key] = event
    return list(kept.values())


def _survives(event: Event, resume_step: int) -> bool:
    return not EVENT_TYPES[event["type"]].history or event["step"] <= resume_step
