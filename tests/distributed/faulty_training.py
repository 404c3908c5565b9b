"""`python -m fp4mega.train` in which one rank dies or hangs once: FAULT RANK STEP FOLDER, then the usual arguments.

Ranks meet through files in FOLDER, under which the run must lie.

`die-beside-save` is a death in a step while the save of the step before is in flight: nobody's writer gets beyond its first item.

Nothing here depends on how busy the machine is: ranks wait for each other before they form a group, so that a short
timeout does not measure their imports; the fault waits until the step before is on record; and it stays arranged over lives that
ended before it struck, as when another process took the port that torchrun had chosen.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from fp4mega.train import __main__, async_saves, checkpoint, loop
from tests.distributed.writers import wait_for_file, writers_that

FAULTS = ("die-in-step", "die-in-save", "die-beside-save", "hang")


def is_on_record(folder: Path, step: int) -> bool:
    """Whether the run's events have this update."""
    events = [
        json.loads(line)
        for path in folder.rglob("events.jsonl")
        for line in path.read_text().split("\n")[:-1]  # the last one is not whole, or empty
    ]
    return any(event["type"] == "train" and event["step"] == step for event in events)


def strike(fault: str, folder: Path, step: int) -> None:
    """Die or hang, for the only time."""
    while not is_on_record(folder, step - 1):
        time.sleep(0.02)
    (folder / "struck").touch()
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(fault: str, folder: Path, step: int) -> None:
    """Have this rank strike in that step."""
    original_step, original_flush = loop.train_step, checkpoint._flush
    now = 0

    def train_step(training, recipe, batches, index, device, request):
        nonlocal now
        now = index + 1
        if now == step and fault != "die-in-save":
            # In the middle of it: the gradients are there, and the others wait for this rank's share of them.
            training.config.finalize_model_grads_func = lambda *args, **kwargs: strike(
                fault, folder, step
            )
        return original_step(training, recipe, batches, index, device, request)

    def flush(written: Path) -> None:
        if now == step and fault == "die-in-save":
            strike(fault, folder, step)  # everything is written, and nothing has its final name yet
        original_flush(written)

    loop.train_step, checkpoint._flush = train_step, flush


def hold_writers_of(step: int) -> None:
    """Let no writer of that step's save get on."""
    original_start = async_saves.AsyncSaves.start
    starting = 0

    def start(saves, saved_step, training):
        nonlocal starting
        starting = saved_step
        original_start(saves, saved_step, training)

    async_saves.AsyncSaves.start = start
    writers_that(lambda: time.sleep(600 if starting == step else 0)).__enter__()


def meet_before_the_group_forms(folder: Path) -> None:
    """Have every rank of this life wait for the others before it forms a group with them."""
    original = loop.start_process_groups
    life, rank, ranks = (
        os.environ[n] for n in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE")
    )

    def start_process_groups(*args, **kwargs):
        (folder / f"ready_{life}_{rank}").touch()
        for other in range(int(ranks)):
            wait_for_file(folder / f"ready_{life}_{other}", 120)
        original(*args, **kwargs)

    loop.start_process_groups = start_process_groups


if __name__ == "__main__":
    fault, rank, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    assert fault in FAULTS
    folder = Path(sys.argv[4])
    meet_before_the_group_forms(folder)
    if not (folder / "struck").exists():
        if fault == "die-beside-save":
            hold_writers_of(step - 1)
        if os.environ["RANK"] == rank:
            arrange(fault, folder, step)
    sys.exit(__main__.main(sys.argv[5:]))
