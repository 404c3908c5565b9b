"""Megatron's distributed optimizer over torch's Adam, out of a checkpoint.

Without Transformer Engine and apex, Megatron-Core (0.16.1 to 0.19.2) cannot read back what it wrote: a new optimizer has no
state whose step count could be asked for, loading looks for a `step` among the saved tensors where there is none, and one
tensor becomes the step count of every parameter, so that each update counts once for each of them. Nothing of Megatron is
changed here. Before a load every parameter gets an empty state; then Megatron's own public method loads the tensors while no
state holds a step, and at last each state gets a step count of its own. Parameter groups keep what the recipe and the
schedule say, so it does not matter into how many optimizers Megatron split the parameters when it saved.
"""

from typing import Any

import torch


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron chains: one, or dense and expert parameters apart."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _is_ours_to_load(optimizer: Any) -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and all(
        isinstance(part, distrib_optimizer.DistributedOptimizer) for part in parts_of(optimizer)
    )


def allocate_state(optimizer: Any) -> None:
    """Before a load: give every parameter that has none the state of torch's Adam before its first step."""
    if not _is_ours_to_load(optimizer):
        return
    for adam in (part.optimizer for part in parts_of(optimizer)):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


@torch.no_grad()
def load_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Put the state that dist_checkpointing loaded into the optimizer."""
    if not _is_ours_to_load(optimizer):
        optimizer.load_state_dict(state)
        return
    # One optimizer saves its groups at the top, several each under its number.
    saved = state["optimizer"] if "optimizer" in state else state[0]["optimizer"]
    step = float(saved["param_groups"][0]["step"])
    parts = parts_of(optimizer)
    for i, part in enumerate(parts):
        adam_states = list(part.optimizer.state.values())
        for adam_state in adam_states:
            del adam_state["step"]
        values = state["param_state"] if len(parts) == 1 else state[i]["param_state"]
        part.load_parameter_state_from_fully_reshardable(values)
        for adam_state in adam_states:
            adam_state["step"] = torch.tensor(step, dtype=torch.float32)
