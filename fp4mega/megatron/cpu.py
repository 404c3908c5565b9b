"""Megatron-Core on a machine without a GPU.

Megatron asks `torch.cuda` for its current device and allocates with `device="cuda"` even where all else would run on a
CPU. `adapt_to_cpu()` answers those calls for the process, and refuses where a GPU exists: nothing here is ever
part of a GPU run. The complete list:

| what                                                        | needed by                                 |
| ----------------------------------------------------------- | ----------------------------------------- |
| `torch.cuda.current_device()` is the CPU device             | rotary embedding, DDP buffers, collectives |
| `torch.cuda.synchronize()` does nothing                     | checkpoint writer, timers, pipeline       |
| `torch.cuda.current_stream()`, `default_stream()`           | DDP buffers of megatron-core 0.19         |
| CUDA generator state in Megatron's recompute is empty       | recompute; the CPU generator's is restored |
| `multi_latent_attention.HAVE_TE`, `moe_utils.te_general_gemm` | megatron-core 0.16.1 without Transformer Engine takes it for installed, or misses the name |
| `device="cuda"` is `"cpu"`, `.cuda()` the tensor itself, `pin_memory` dropped | masks, schedules, optimizer |
| `Tensor.type()` reads `torch.cuda.FloatTensor` and so on    | checks of the optimizer and of clipping   |

The last row makes Megatron's own device checks pass unexamined: a CPU run says nothing about them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

_active: ExitStack | None = None


def adapt_to_cpu() -> None:
    """Make Megatron-Core run on the CPU, for the rest of this process; a second call changes nothing.

    Raises RuntimeError where CUDA is available.
    """
    global _active
    if torch.cuda.is_available():
        raise RuntimeError(
            "adapt_to_cpu() on a machine with CUDA: it would divert tensors from the GPU; "
            "run without it, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    if _active is not None:
        return
    with ExitStack() as stack:
        _answer_cuda_calls(stack)
        mode = _CudaToCpu()
        stack.enter_context(
            patch.object(torch.autograd, "_engine_run_backward", mode.also_backward())
        )
        stack.enter_context(mode)
        _active = stack.pop_all()


@contextmanager
def adapted_to_cpu() -> Iterator[None]:
    """`adapt_to_cpu()` for the length of a `with` block; inside an adapted process it changes nothing."""
    global _active
    already = _active is not None
    adapt_to_cpu()
    try:
        yield
    finally:
        if not already and _active is not None:
            _active.close()
            _active = None


class _NoStream:
    """A stream on which there is nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs asynchronously on the CPU."""

    def synchronize(self) -> None:
        """Nothing runs asynchronously on the CPU."""


def _answer_cuda_calls(stack: ExitStack) -> None:
    def constant(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", torch.device("cpu")),
        (torch.cuda, "synchronize", None),
        (torch.cuda, "current_stream", _NoStream()),
        (torch.cuda, "default_stream", _NoStream()),
        (megatron_random, "_get_cuda_rng_state", torch.empty(0, dtype=torch.uint8)),
        (megatron_random, "_set_cuda_rng_state", None),
    ]
    for owner, name, answer in answers:
        stack.enter_context(patch.object(owner, name, constant(answer)))
    if not isinstance(multi_latent_attention.TELinear, type):
        stack.enter_context(patch.object(multi_latent_attention, "HAVE_TE", False))
    if not hasattr(moe_utils, "te_general_gemm"):
        stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result

    def also_backward(self) -> Callable[..., Any]:
        """The engine's entry with the mode on: it is off while `backward` itself is being handled, and recompute
        runs Megatron's code in there."""
        run_backward = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run_backward(*args, **kwargs)

        return run
