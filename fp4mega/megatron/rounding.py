"""Where the random bits of stochastic rounding come from: a key counted from (seed, layer, step, call, rank).

The counter is explicit, so a resumed run repeats its bits once the trainer has said which step it is in
(`set_rounding_step`), and no generator of the process is read or advanced.

Activation recompute calls a layer twice for one microbatch: once without gradients, then again inside the backward
pass, possibly after other microbatches have gone forward. Pipeline schedules send microbatches backward through a
layer in the order in which they went forward, so the keys of forwards that await their recompute form a queue.
"""

from collections import deque

import torch

_MASK64 = (1 << 64) - 1


def mix(*words: int) -> int:
    """A signed 64-bit key in which every bit depends on every word: the splitmix64 finalizer, chained.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = 0
    for word in words:
        state = (state + (word & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


class RoundingKeys:
    """The counter of one layer on one rank."""

    def __init__(self, *, seed: int, layer: int, rank: tuple[int, ...]) -> None:
        self._identity = (seed, layer, *rank)
        self.start_step(0)

    def start_step(self, step: int) -> None:
        """Begin a training step: calls count from zero, and forwards still awaiting a recompute are forgotten."""
        self._step = step
        self._calls = 0
        self._awaiting: deque[int] = deque()

    def next(self, *, training: bool) -> int:
        """The key of this forward. Evaluation has one key a step and leaves the training count alone."""
        if not training:
            return mix(*self._identity, self._step, -1)
        if torch._C._current_graph_task_id() != -1:
            return self._recomputed()
        call, self._calls = self._calls, self._calls + 1
        if not torch.is_grad_enabled():
            self._awaiting.append(call)
        return mix(*self._identity, self._step, call)

    def _recomputed(self) -> int:
        if not self._awaiting:
            raise RuntimeError(
                "a forward inside the backward pass has no earlier forward to repeat: stochastic rounding recomputes "
                "under reentrant checkpointing only (Megatron's own, or torch.utils.checkpoint with use_reentrant=True)"
            )
        call = self._awaiting.popleft()
        if not torch.is_grad_enabled():
            # The first pass of a checkpoint inside the recomputed region; its own recompute follows.
            self._awaiting.appendleft(call)
        return mix(*self._identity, self._step, call)
