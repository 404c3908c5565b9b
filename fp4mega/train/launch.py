"""Which process this is, on which device, and the process groups and random generators that Megatron expects."""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch

from fp4mega.train.recipe import ParallelSection, RecipeError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among all of them: set by torchrun, or a single process without it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    under_torchrun: bool

    @property
    def is_first(self) -> bool:
        """True in the process that logs, tracks and prepares data."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Readable device, as the manifest and the table of peaks know it."""
        return "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read torchrun's variables and choose the device: a GPU for each local process where there are GPUs, else the CPU.

    Raises RecipeError when only some of the variables are set, when a machine has fewer GPUs than local processes, or when
    torchrun would restart processes that cannot find each other again.
    """
    given = [name for name in _TORCHRUN if environment.get(name)]
    if given and len(given) < len(_TORCHRUN):
        missing = ", ".join(name for name in _TORCHRUN if name not in given)
        raise RecipeError(
            f"environment: {', '.join(given)} set, {missing} not; start with torchrun, or with none of them set"
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
        restarts := int(environment.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    ):
        raise RecipeError(
            f"--max-restarts={restarts}: torchrun keeps its store over a restart, and the new processes would wait for "
            "addresses of the old ones; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    rank, world_size, local_rank, local_world_size = (
        (int(environment[n]) for n in _TORCHRUN[:4]) if given else (0, 1, 0, 1)
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and local_world_size > gpus:
        raise RecipeError(f"--nproc-per-node={local_world_size}: this machine has {gpus} GPUs")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    return Launch(rank, world_size, local_rank, local_world_size, device, bool(given))


def choose_threads(launch: Launch, environment: Mapping[str, str] = os.environ) -> int:
    """Set and return torch's threads in this process: on a CPU its share of the cores.

    OMP_NUM_THREADS decides when the user set it. torchrun sets it to 1 itself when it starts several processes, which
    cannot be told from a user's 1 and would leave cores idle, so there it does not count.
    """
    asked = environment.get("OMP_NUM_THREADS")
    if launch.device.type == "cpu" and (
        not asked or (launch.local_world_size > 1 and asked == "1")
    ):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // launch.local_world_size))
    return torch.get_num_threads()


def start_process_groups(
    launch: Launch, parallel: ParallelSection, *, timeout_minutes: float = 10.0
) -> None:
    """The default process group (gloo on the CPU, nccl on GPUs) and Megatron's groups over it.

    A process that waits for another longer than the timeout fails.
    """
    if launch.device.type == "cuda":
        torch.cuda.set_device(launch.device)
    backend = "gloo" if launch.device.type == "cpu" else "nccl"
    if launch.under_torchrun:
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    else:  # no port and no address for a process that talks to itself
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    start_model_parallel(parallel, timeout_minutes=timeout_minutes)


def start_model_parallel(parallel: ParallelSection, *, timeout_minutes: float = 10.0) -> None:
    """Megatron's groups over the default process group."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        distributed_timeout_minutes=timeout_minutes,
    )


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed every generator. Pipeline stages get different seeds, as in Megatron, so that they start with different weights."""
    from megatron.core import parallel_state, tensor_parallel

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    else:  # Megatron's tracker forks CUDA generators; its inference variant is the one that does not
        tensor_parallel.model_parallel_cuda_manual_seed(
            seed, inference_rng_tracker=True, force_reset_rng=True
        )


def stop_process_groups() -> None:
    """Undo `start_process_groups`; does nothing when there are none."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
