"""Experts that start the same on however many processes they are spread.

Where Megatron draws weights on the CPU, each process draws its own experts from a generator that is in the same state on all of them:
the first expert of every process is the same one, and what is drawn after them depends on how many processes there are. (On a
GPU the generators of expert-parallel processes have seeds of their own.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def experts_drawn_whole() -> Iterator[None]:
    """Let each process draw all experts that are built in the block, in order, and keep its own."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.experts import SequentialMLP

    draw = SequentialMLP.__init__

    def draw_all(experts: Any, *args: Any, **kwargs: Any) -> None:
        own = parallel_state.get_expert_model_parallel_rank()
        for rank in range(parallel_state.get_expert_model_parallel_world_size()):
            draw(experts if rank == own else object.__new__(SequentialMLP), *args, **kwargs)

    with patch.object(SequentialMLP, "__init__", draw_all):
        yield
