"""What happened in a run: manifest, events, wandb, and the comparison of runs. Imports no torch."""

from fp4mega.tracking.manifest import build_manifest
from fp4mega.tracking.reader import Run, read_run
from fp4mega.tracking.tracker import Tracker
from fp4mega.tracking.wandb_sink import WandbSettings

__all__ = ["Run", "Tracker", "WandbSettings", "build_manifest", "read_run"]
