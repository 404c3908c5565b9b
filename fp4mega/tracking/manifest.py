"""The manifest of a run: everything that says which run this was, in one JSON file beside the events.

The top level describes the present life of the run. `lives` holds one entry per life, oldest first, so that a recipe or a
policy that changed at a resume can be seen.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp4mega.tracking.schedule import schedule_of

MANIFEST = "manifest.json"
SCHEMA = 1
_PACKAGES = (
    "fp4mega",
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "nvidia-cutlass-dsl",
    "numpy",
    "tokenizers",
    "wandb",
)
_LIFE_FIELDS = (
    "started",
    "recipe_digest",
    "policy",
    "layers",
    "device",
    "world_size",
    "fingerprints",
    "git",
    "schedule",
)
_WATCHED_FIELDS = ("recipe_digest", "policy", "layers", "device", "world_size")


class _Part(BaseModel):
    """What readers need of a manifest; everything else in it is for people."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Layer(_Part):
    layer: int
    policy: str
    backend: str


class _Life(_Part):
    step: Annotated[int, Field(ge=0)]
    recipe_digest: str
    changes: list[str]
    schedule: dict[str, Any] = {}


class _Recipe(_Part):
    optimizer: dict[str, Any] = {}
    train: dict[str, Any] = {}


class _Manifest(_Part):
    run_name: str
    recipe: _Recipe
    recipe_digest: str
    policy: str
    layers: list[_Layer]
    seed: int
    device: str
    world_size: int
    fingerprints: dict[str, str | None]
    lives: list[_Life]
    wandb_id: str


def build_manifest(
    *,
    run_name: str,
    recipe: Mapping[str, Any],
    recipe_digest: str,
    policy: str,
    layers: Sequence[Mapping[str, Any]],
    seed: int,
    device: str,
    world_size: int,
    fingerprints: Mapping[str, str | None],
) -> dict[str, Any]:
    """The manifest of one life of a run, from what the caller knows and this process can find out.

    Args:
        recipe: the resolved recipe as plain JSON data.
        recipe_digest: its digest.
        policy: the default policy's name.
        layers: one {"layer": int, "policy": str, "backend": str} per attention layer.
        seed: of initialization and data order.
        device: readable device name, e.g. "NVIDIA H200" or "cpu".
        fingerprints: "init" (of the initial weights) and "data" (of the order of the batches); runs are compared only when both are
            equal. On a resume `init` may be None: the one of the first life is kept.

    Raises ValueError for a layer entry or a fingerprint under another name.
    """
    for entry in layers:
        if set(entry) != {"layer", "policy", "backend"}:
            raise ValueError(f"layers: {dict(entry)!r}: expected the keys layer, policy, backend")
    if set(fingerprints) != {"init", "data"}:
        raise ValueError(f"fingerprints: {sorted(fingerprints)}: expected the keys init, data")
    return {
        "schema": SCHEMA,
        "run_name": run_name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": dict(recipe),
        "recipe_digest": recipe_digest,
        "policy": policy,
        "layers": [dict(entry) for entry in layers],
        "schedule": schedule_of(recipe),
        "seed": seed,
        "device": device,
        "world_size": world_size,
        "fingerprints": dict(fingerprints),
        "versions": package_versions(),
        "git": git_state(Path(__file__)),
    }


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that can change a number; None where one is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def git_state(tracked_file: Path) -> dict[str, Any] | None:
    """{"commit": str, "dirty": bool} of the repository that tracks this file, None when none does.

    A package installed inside somebody's repository (a virtual environment in the working tree) is not tracked by it.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tracked_file.parent), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", tracked_file.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def join_lives(
    earlier: Mapping[str, Any] | None, manifest: Mapping[str, Any], *, step: int
) -> tuple[dict[str, Any], list[str]]:
    """The manifest with its list `lives`, and in words what changed since the earlier life.

    `step` is where this life begins; 0 is a new start, and anything else continues the earlier life's weights, so the
    fingerprint of the initialization stays that of the earlier one.
    """
    joined = dict(manifest)
    changes: list[str] = []
    lives: list[Any] = []
    if earlier is not None:
        lives = list(earlier["lives"])
        if step > 0:
            before, now = earlier["fingerprints"], joined["fingerprints"]
            joined["fingerprints"] = {"init": before["init"], "data": now["data"] or before["data"]}
            if joined["fingerprints"]["data"] != before["data"]:
                changes.append(f"data order changed from {before['data']} to {now['data']}")
        changes += [
            f"{name} changed from {_short(earlier[name])} to {_short(joined[name])}"
            for name in _WATCHED_FIELDS
            if earlier[name] != joined[name]
        ]
        before, now = flat_fields(earlier["recipe"]), flat_fields(joined["recipe"])
        changes += [
            f"{name} changed from {_short(before.get(name))} to {_short(now.get(name))}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
    joined["lives"] = [
        *lives,
        {"step": step, **{name: joined[name] for name in _LIFE_FIELDS}, "changes": changes},
    ]
    return joined, changes


def flat_fields(recipe: Mapping[str, Any], levels: int | None = None) -> dict[str, Any]:
    """Fields of a resolved recipe by their dotted names; with `levels`, sections further down are values."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value and levels != 1:
            below = flat_fields(value, None if levels is None else levels - 1)
            flat |= {f"{key}.{name}": field for name, field in below.items()}
        else:
            flat[key] = value
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, and ValueError naming the file when it is not a manifest of this schema."""
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from None
    return check_manifest(manifest, str(path))


def check_manifest(manifest: Any, where: str) -> dict[str, Any]:
    """The manifest itself. Raises ValueError, naming `where` and the field, when readers could not use it."""
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ValueError(f"{where}: schema={found!r}: expected a run manifest of schema {SCHEMA}")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f"={_short(first['input'])}"
        raise ValueError(f"{where}: {field}{given}: {first['msg']}") from None
    return manifest


def write_atomically(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write JSON so that after a crash the file is either the old one or the new one, whole.

    Raises ValueError when a value is not JSON, OSError when the disk refuses; the old file then stays.
    """
    data = json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n"
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only once the directory is.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
