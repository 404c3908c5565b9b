"""What a run's folder says about starting there: anew, onward from a checkpoint, or not at all because it is finished."""

from dataclasses import dataclass
from pathlib import Path

from fp4mega.tracking import read_run
from fp4mega.tracking.manifest import MANIFEST
from fp4mega.train.checkpoint import LATEST, Checkpoint, check_resumable, newest_checkpoint
from fp4mega.train.launch_record import check_launch_has_a_name, published_by_this_launch
from fp4mega.train.recipe import Recipe, RecipeError


@dataclass(frozen=True, slots=True)
class Start:
    """Where training begins. `changed`: recipe fields that differ from the checkpoint's, all of them allowed to."""

    folder: Path
    checkpoint: Checkpoint | None
    finished: bool
    changed: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def step(self) -> int:
        """Updates that are already made."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_start(recipe: Recipe) -> Start:
    """Decide where the run begins.

    - `train.resume=false`: anew, unless this launch itself has already begun anew and saved, and its processes were started
      again. Earlier checkpoints stay until the first new one is complete.
    - A finished run of at least `train.steps` updates: nothing to do.
    - A checkpoint: onward from the newest one. A finished run goes on when `train.steps` was raised.
    - Otherwise anew.

    Raises RecipeError when the folder holds another experiment, or a finished run that has no checkpoint to go on from, and
    when `train.resume=false` and torchrun would restart processes that cannot know their launch.
    """
    folder = Path(recipe.tracking.dir) / recipe.run_name
    anew = Start(folder, None, finished=False)
    if not recipe.train.resume:
        check_launch_has_a_name()
        if not published_by_this_launch(folder, anew.checkpoints / LATEST):
            return anew
    checkpoint = newest_checkpoint(anew.checkpoints)
    changed = (
        tuple(check_resumable(checkpoint.path, checkpoint.recipe, recipe)) if checkpoint else ()
    )
    done = _finished_at(folder)
    if done is not None and done > 0:
        check_resumable(folder, read_run(folder).manifest["recipe"], recipe)
        if done >= recipe.train.steps:
            return Start(folder, checkpoint, finished=True)
        if checkpoint is None:
            raise RecipeError(
                f"train.steps={recipe.train.steps}: the run in {folder} finished at step {done} without a checkpoint to go "
                "on from; start anew under another `name`, or with train.resume=false"
            )
    if checkpoint is not None and checkpoint.step > recipe.train.steps:
        raise RecipeError(
            f"train.steps={recipe.train.steps}: {checkpoint.path} is already beyond it; expected {checkpoint.step} or more"
        )
    return Start(folder, checkpoint, finished=False, changed=changed)


def _finished_at(folder: Path) -> int | None:
    """The step at which the run's last life finished; None when there is none or it ended otherwise."""
    if not (folder / MANIFEST).exists():
        return None
    statuses = [event for event in read_run(folder).events if event["type"] == "status"]
    return statuses[-1]["step"] if statuses and statuses[-1]["status"] == "finished" else None
