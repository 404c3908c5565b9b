"""The runner of the other tests here: results by rank, and a message for everything that can go wrong."""

import os
import time

import pytest
import torch

from fp4mega.testing.distributed import DistributedError, enough_devices, run_distributed

pytestmark = pytest.mark.skipif(not enough_devices("cpu", 2), reason="runs on a CPU")


def add_up(world, extra):
    total = torch.tensor([float(world.rank + 1)])
    torch.distributed.all_reduce(total)
    return world.rank, total.item() + extra


def fail_on_one(world):
    if world.rank == 1:
        raise ValueError("this rank is wrong")
    torch.distributed.barrier()


def die(world):
    if world.rank == 0:
        os._exit(7)


def sleep_long(world):
    if world.rank == 1:
        time.sleep(60)


def test_results_come_by_rank():
    assert run_distributed(add_up, 3, 0.5) == [(0, 6.5), (1, 6.5), (2, 6.5)]


def test_a_failure_names_its_rank_and_its_line():
    with pytest.raises(DistributedError) as failure:
        run_distributed(fail_on_one, 2)
    told = str(failure.value)
    assert "rank 1 failed:" in told
    assert 'raise ValueError("this rank is wrong")' in told


def test_a_dead_rank_is_named():
    with pytest.raises(DistributedError, match="rank 0 died with exit code 7"):
        run_distributed(die, 2)


def test_a_hanging_rank_is_named_with_the_line_where_it_hangs():
    run_distributed(add_up, 2, 0.0)  # what is imported once is imported now
    started = time.monotonic()
    with pytest.raises(DistributedError, match="rank 1 was still running after 5 s") as failure:
        run_distributed(sleep_long, 2, timeout=5)
    assert "sleep_long" in str(failure.value)
    assert "rank 0" not in str(failure.value)
    assert time.monotonic() - started < 30
