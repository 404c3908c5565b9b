"""Which processes are missing, told after a collective failed.

What a process group reports is that a peer closed its connection or that a wait timed out, not which process is to blame.
Those that got such an error sign in at the store of the rendezvous; whoever has not after a while hangs or is gone.
"""

import time
from collections.abc import Callable

import torch

from fp4mega.train.launch import Launch

SIGN_IN_SECONDS = 10.0
_LISTED = 16


def _is_from_a_collective(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistBackendError) or "gloo/" in str(error):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and _is_from_a_collective(cause)


def describe_lost_ranks(
    error: BaseException, launch: Launch, give_up: Callable[[], bool]
) -> str | None:
    """A sentence that names the ranks which do not answer; None when the error does not come from a collective.

    Takes SIGN_IN_SECONDS when some are missing, or until `give_up()`. Under nccl a hung peer ends the waiting processes from its watchdog
    thread, where nobody can be asked any more: then its log has the name of the collective only.
    """
    if launch.world_size == 1 or not _is_from_a_collective(error):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    keys = [f"fp4mega/lost_ranks/{rank}" for rank in range(launch.world_size)]
    told = str(error).splitlines()[0]
    try:
        store.set(keys[launch.rank], "here")
        end = time.monotonic() + SIGN_IN_SECONDS
        while not store.check(keys) and not give_up() and time.monotonic() < end:
            time.sleep(0.2)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as lost:
        return f"the other processes cannot be asked any more ({lost}) after: {told}"
    if not missing:
        return f"all ranks answer, after: {told}"
    names = ", ".join(str(rank) for rank in missing[:_LISTED])
    more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    plural = "s" if len(missing) > 1 else ""
    return f"rank{plural} {names}{more} of {launch.world_size} hung or gone; rank {launch.rank} was told: {told}"
