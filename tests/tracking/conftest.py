import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp4mega.tracking import build_manifest
from fp4mega.tracking.events import EventWriter, make_event
from fp4mega.tracking.manifest import join_lives


def _manifest(**changes: Any) -> dict[str, Any]:
    """A manifest of a two-layer run; `changes` are arguments of build_manifest."""
    policy = changes.get("policy", "bf16")
    arguments: dict[str, Any] = {
        "run_name": f"tiny__{policy}",
        "recipe": {"name": "tiny", "train": {"steps": 20, "seed": 1}},
        "recipe_digest": "0123456789ab",
        "policy": policy,
        "layers": [{"layer": i, "policy": policy, "backend": "reference"} for i in range(2)],
        "seed": 1,
        "device": "cpu",
        "world_size": 1,
        "fingerprints": {"init": "init-1", "data": "data-1"},
    }
    return build_manifest(**{**arguments, **changes})


def _train_values(loss: float = 1.0, **changes: Any) -> dict[str, Any]:
    values = {
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 128,
        "tokens_per_s": 100.0,
        "step_ms": 10.0,
    }
    return {**values, **changes}


@pytest.fixture
def make_manifest() -> Callable[..., dict[str, Any]]:
    return _manifest


@pytest.fixture
def train_values() -> Callable[..., dict[str, Any]]:
    return _train_values


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory: losses (and other train fields) at the given steps, valid losses, an end status."""

    def make(
        name: str,
        losses: Sequence[float],
        *,
        steps: Sequence[int] | None = None,
        valid: Mapping[int, float] | None = None,
        fields: Mapping[str, Sequence[float | None]] | None = None,
        status: str = "finished",
        **changes: Any,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        joined, _ = join_lives(None, _manifest(run_name=name, **changes), step=0)
        (directory / "manifest.json").write_text(json.dumps({**joined, "wandb_id": name}))
        with EventWriter(directory / "events.jsonl") as writer:
            writer.write(make_event("status", 0, {"status": "started"}))
            for i, (step, loss) in enumerate(
                zip(steps or range(1, len(losses) + 1), losses, strict=True)
            ):
                extra = {key: values[i] for key, values in (fields or {}).items()}
                writer.write(
                    make_event("train", step, _train_values(loss, tokens=128 * step, **extra))
                )
                if valid and step in valid:
                    writer.write(make_event("eval", step, {"loss": valid[step], "split": "valid"}))
            writer.write(make_event("status", step, {"status": status}))
        return directory

    return make
