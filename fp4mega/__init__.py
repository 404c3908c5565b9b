"""FP4 FlashAttention for Megatron-Core.

`attention_func` is the functional entry, `fp4mega.megatron` the Megatron modules, and
`python -m fp4mega.train` runs a recipe. Imports are lazy: `import fp4mega` costs no torch import.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "AttentionPolicy": "fp4mega.attention",
    "attention_func": "fp4mega.ops",
    "get_policy": "fp4mega.attention",
    "list_policies": "fp4mega.attention",
    "register_policy": "fp4mega.attention",
}

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fp4mega' has no attribute {name!r}")
