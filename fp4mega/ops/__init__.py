"""What torch sees: the functional entry and the custom ops behind it."""

from fp4mega.ops.functional import attention_func

__all__ = ["attention_func"]
