"""Running a recipe: its schema, loader and checks, the data, the loop, and `python -m fp4mega.train`.

Names resolve on first use, so that checking a recipe imports neither the loop nor Megatron.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "Recipe": "fp4mega.train.recipe",
    "RecipeError": "fp4mega.train.schema",
    "load_recipe": "fp4mega.train.loader",
    "resolved_yaml": "fp4mega.train.loader",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fp4mega.train' has no attribute {name!r}")
