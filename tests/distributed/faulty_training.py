"""`python -m fp4mega.train`, in whose first life one rank dies or hangs: FAULT RANK STEP, then the usual arguments."""

import os
import signal
import sys
import time
from pathlib import Path

from fp4mega.train import __main__, checkpoint, loop


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)


def arrange(fault: str, step: int) -> None:
    original_step, original_flush = loop.train_step, checkpoint._flush
    now = 0

    def train_step(training, recipe, batches, index, device, request):
        nonlocal now
        now = index + 1
        if now == step and fault in ("die-in-step", "hang"):
            # In the middle of it: the gradients are there, and the others wait for this rank's share of them.
            training.config.finalize_model_grads_func = lambda *args, **kwargs: (
                die() if fault == "die-in-step" else hang()
            )
        return original_step(training, recipe, batches, index, device, request)

    def flush(folder: Path) -> None:
        if now == step and fault == "die-in-save":
            die()  # everything is written, and nothing has its final name yet
        original_flush(folder)

    loop.train_step, checkpoint._flush = train_step, flush


if __name__ == "__main__":
    fault, rank, step = sys.argv[1:4]
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and os.environ["RANK"] == rank:
        arrange(fault, int(step))
    sys.exit(__main__.main(sys.argv[4:]))
