import pytest
import torch

from fp4mega.train.launch import choose_threads, find_launch
from fp4mega.train.recipe import RecipeError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_without_torchrun_it_is_the_only_process():
    launch = find_launch({})
    assert (launch.rank, launch.world_size, launch.local_world_size) == (0, 1, 1)
    assert launch.is_first
    assert not launch.under_torchrun


def test_half_of_torchruns_variables_is_an_error():
    with pytest.raises(RecipeError, match="environment: RANK set, WORLD_SIZE, LOCAL_RANK"):
        find_launch({"RANK": "0"})


def test_restarts_over_a_store_of_dead_addresses_are_refused():
    kept = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(RecipeError, match="--max-restarts=3: torchrun keeps its store over a"):
        find_launch(kept)
    assert find_launch({**kept, "TORCHELASTIC_MAX_RESTARTS": "0"}).world_size == 4
    assert find_launch({**kept, "TORCHELASTIC_USE_AGENT_STORE": "False"}).world_size == 4


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RecipeError, match="--nproc-per-node=2: this machine has 1 GPUs"):
        find_launch(TORCHRUN)


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads are shared out on a CPU only")
@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "1"}, 3),  # 3: left as it was
        ({**TORCHRUN, "OMP_NUM_THREADS": "1"}, 4),
        ({**TORCHRUN, "OMP_NUM_THREADS": "2"}, 3),
    ],
)
def test_processes_share_the_cores_unless_the_user_said_otherwise(
    monkeypatch, environment, threads
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    torch.set_num_threads(3)
    launch = find_launch({k: v for k, v in environment.items() if k in TORCHRUN})
    if launch.under_torchrun:
        assert (launch.rank, launch.local_rank, launch.world_size) == (3, 1, 4)
    assert choose_threads(launch, environment) == threads
