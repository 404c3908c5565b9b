"""The learning rate and batch size that a run trained with, step by step, over all its lives.

A run whose `train.steps` was raised before a resume went on under another schedule (the decay follows the number of steps),
so its weights are not those of a run that had that schedule from the start.
"""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "not recorded"
_FIELDS = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.decay_style",
    "train.global_batch_size",
)
_OF_A_DECAY = ("optimizer.min_lr", "optimizer.decay_steps")

History = tuple[tuple[int, Any], ...]
"""A field's values, each with the step after which it held."""


def schedule_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a resolved recipe that set the learning rate and the batch at every step, by their dotted names.

    The number of decay steps is the one in force where the recipe leaves it to `train.steps`. What a constant rate does not
    depend on, and what the recipe does not have, is None.
    """
    found = {}
    for name in _FIELDS:
        section, _, field = name.partition(".")
        found[name] = recipe.get(section, {}).get(field)
    if found["optimizer.decay_steps"] is None:
        found["optimizer.decay_steps"] = recipe.get("train", {}).get("steps")
    if found["optimizer.decay_style"] == "constant":
        found.update(dict.fromkeys(_OF_A_DECAY))
    return found


def histories(manifest: Mapping[str, Any]) -> dict[str, History]:
    """What each field was from which step on. A life whose steps were all trained again counts for nothing."""
    lives: list[Mapping[str, Any]] = []
    for life in manifest.get("lives", ()):
        lives = [earlier for earlier in lives if earlier["step"] < life["step"]] + [life]
    schedules = [(life["step"], _of_life(life, manifest)) for life in lives]
    # A manifest that was not joined with any other describes one life.
    schedules = schedules or [(0, schedule_of(manifest["recipe"]))]
    found = {}
    for name in _FIELDS:
        values: list[tuple[int, Any]] = []
        for step, schedule in schedules:
            value = schedule.get(name, UNKNOWN)
            if not values or value != values[-1][1]:
                values.append((step, value))
        found[name] = tuple(values)
    return found


def _of_life(life: Mapping[str, Any], manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    if "schedule" in life:
        return life["schedule"]
    same = life.get("recipe_digest") == manifest["recipe_digest"]
    return schedule_of(manifest["recipe"]) if same else {}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """In words, the fields whose values differ at some step; the arguments are manifests.

    What is not recorded of a life equals nothing.
    """
    a, b = histories(first), histories(second)
    return [
        f"{name}: {_words(a[name])} and {_words(b[name])}"
        for name in _FIELDS
        if a[name] != b[name] or any(value == UNKNOWN for _, value in a[name])
    ]


def _words(history: History) -> str:
    (_, value), *later = history
    return ", ".join([str(value), *(f"{v} after step {step}" for step, v in later)])
