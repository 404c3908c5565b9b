"""Which launch began a run anew, so that the same launch, when torchrun or Slurm starts it again, goes on with that run.

`train.resume=false` means the launch, not each life of it: a process that fails must not cost the run its checkpoints. torchrun's
count of restarts does not tell, because an agent that joins later counts from 0; its id of the launch stays the same.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fp4mega.train.schema import RecipeError

RECORD = "launch.json"


def check_launch_has_a_name(environment: Mapping[str, str] = os.environ) -> None:
    """Raise RecipeError when torchrun may start processes again and could not be told from another launch."""
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if restarts and not _names(environment)[0]:
        raise RecipeError(
            f"train.resume=false: with --max-restarts={restarts} a restart could not tell this launch's checkpoints from "
            "earlier ones; give torchrun an --rdzv-id that no launch had before, or --standalone on one machine"
        )


def note_launch(folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Remember in the run's folder that this launch begins it anew."""
    (folder / RECORD).write_text(json.dumps(_names(environment)) + "\n")


def published_by_this_launch(
    folder: Path, pointer: Path, environment: Mapping[str, str] = os.environ
) -> bool:
    """Whether `pointer`, which each new checkpoint of the run replaces, is one of the launch that this process is part of."""
    try:
        torchrun, job = json.loads((folder / RECORD).read_text())
        newer = pointer.stat().st_mtime_ns > (folder / RECORD).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{folder / RECORD}: not a pair of names: {error}; remove it to start anew"
        ) from None
    own_torchrun, own_job = _names(environment)
    # Two launches in one allocation have the same job, two lives of a requeued job have not the same torchrun.
    requeued = int(environment.get("SLURM_RESTART_COUNT") or 0) > 0
    same = (own_torchrun and own_torchrun == torchrun) or (requeued and own_job and own_job == job)
    return bool(same) and newer


def _names(environment: Mapping[str, str]) -> tuple[str, str]:
    """Of the launch by torchrun, and of the Slurm job; empty where there is none."""
    torchrun = environment.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's default where it is not told and does not choose
    return "" if torchrun == "none" else torchrun, environment.get("SLURM_JOB_ID", "")
