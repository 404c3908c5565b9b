"""One process of a job that is not there: Megatron's groups without peers, tensors without data, and a meter of both.

`imagined_process` sets Megatron up as a given rank of a given number of processes. Inside it every tensor is on the meta
device, and a collective returns at once with whatever its output held. The code that runs is Megatron's own, so what it allocates and
sends is what a real process would. `Meter` writes both down; it also counts in a real process, which is how tests
hold one against the other.

Not seen: memory that a kernel allocates and frees within one call, and messages that NCCL adds of its own.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4mega.attention.call import Call
from fp4mega.train.recipe import Recipe

META = torch.device("meta")

# Operator of torch.ops.c10d: what it is, and which of its arguments holds the whole of what the group works on (the
# gathered output, the scattered input). The process group is the first argument that is one.
_COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 0),
}
_READS_A_NUMBER = ("_local_scalar_dense", "is_nonzero")  # of a tensor without data: 1
_SENDS_NOTHING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or one send, of this process. payload: bytes of the whole that the group works on."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    payload: int

    @property
    def sent(self) -> int:
        """Bytes that leave this process when the group is a ring, as NCCL's is for large messages."""
        n = len(self.ranks)
        if self.kind == "send":
            return self.payload
        return self.payload * (n - 1) // n * (2 if self.kind == "all-reduce" else 1)


class Meter(TorchDispatchMode):
    """Notes the collectives of this process, and the bytes of the tensors that operators made and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def take_messages(self) -> list[Message]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def start_peak(self) -> None:
        """Begin a new peak at what is held now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._opname in _READS_A_NUMBER and args[0].is_meta:
            return 1
        if func.namespace != "c10d":
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._hold(tensor)
            return result
        self._note(func, args)
        if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves(args)):
            return _without_peers(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._opname
        if name in _SENDS_NOTHING:
            return
        if name not in _COLLECTIVES:
            raise NotImplementedError(f"c10d::{name}: the meter does not know what it sends")
        kind, whole = _COLLECTIVES[name]
        group = next(ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
        payload = sum(t.nbytes for t in tree_leaves(args[whole]) if isinstance(t, Tensor))
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.messages.append(Message(kind, group.group_desc, ranks, payload))

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _without_peers(func: Any, args: tuple[Any, ...]) -> Any:
    """What the operator returns: its output argument, which is always the first, and a finished work."""
    returns = [
        FakeWork().boxed() if "Work" in str(r.type) else args[0] for r in func._schema.returns
    ]
    return returns[0] if len(returns) == 1 else tuple(returns)


class _OnMeta(TorchFunctionMode):
    """Every device is the meta device."""

    _constructors = _device_constructors()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._constructors:
            kwargs["device"] = META
            kwargs.pop("pin_memory", None)
        elif func is Tensor.to:
            args = tuple(META if isinstance(a, str | torch.device) else a for a in args)
            if kwargs.get("device") is not None:
                kwargs["device"] = META
        elif func in (Tensor.cuda, Tensor.cpu):
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(
            result, str
        ):  # the optimizer asks for CUDA tensors by this name
            return "torch.cuda." + result.rpartition(".")[2]
        return result

    def also_backward(self) -> Callable[..., Any]:
        """The engine's entry with the mode on: it is off while `backward` is being handled, and Megatron's own
        backward functions allocate."""
        run_backward = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run_backward(*args, **kwargs)

        return run


def _equal_everywhere(gathered: list[Any], mine: Any, group: Any = None) -> None:
    gathered[:] = [mine] * len(gathered)


def _one_by_one(messages: list[Any]) -> list[Any]:
    """Sends and receives without asking the device's backend whether it takes several at once: the meta device has none."""
    return [p.op(p.tensor, p.peer, group=p.group) for p in messages]


@contextmanager
def _without_transformer_engine() -> Iterator[None]:
    """Megatron's own modules, where Transformer Engine is installed too: its own run on a GPU only."""
    if find_spec("transformer_engine") is None:
        yield
        return
    if "transformer_engine" in sys.modules or "megatron.core" in sys.modules:
        raise RuntimeError(
            "with Transformer Engine a process is imagined before Megatron is imported, in an interpreter of its own"
        )
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its import fails
    try:
        yield
    finally:
        del sys.modules["transformer_engine"]


@contextmanager
def imagined_process(recipe: Recipe, rank: int, world_size: int) -> Iterator[Meter]:
    """Megatron set up as `rank` of `world_size` processes of the recipe, on the meta device.

    Raises RuntimeError in a process that already belongs to a process group.
    """
    if torch.distributed.is_initialized():
        raise RuntimeError("a process that belongs to a process group cannot imagine another")
    new_group = torch.distributed.new_group

    def without_peers(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        return new_group(ranks, **{**options, "backend": "fake"})

    with ExitStack() as stack:
        stack.enter_context(_without_transformer_engine())
        from megatron.core import parallel_state

        from fp4mega.megatron import adapted_to_cpu
        from fp4mega.train.launch import seed_everything, start_model_parallel

        # A GPU that exists is not touched: every device argument is the meta device's.
        stack.enter_context(nullcontext() if torch.cuda.is_available() else adapted_to_cpu())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(patch.object(torch.distributed, "new_group", without_peers))
        stack.enter_context(patch.object(torch.distributed, "all_gather_object", _equal_everywhere))
        stack.enter_context(patch.object(torch.distributed, "batch_isend_irecv", _one_by_one))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # The meta device has no autocast, not even one to turn off.
        stack.enter_context(patch.object(torch, "autocast", lambda *args, **kwargs: nullcontext()))
        # Under context parallelism attention runs as torch operators, tile by tile: hours for a long sequence. What the tiles
        # need is gone when they are done, so none is visited.
        stack.enter_context(patch.object(Call, "tiles", ()))
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=world_size
        )
        stack.callback(torch.distributed.destroy_process_group)
        start_model_parallel(recipe.parallel)
        stack.callback(parallel_state.destroy_model_parallel)
        seed_everything(recipe.train.seed, torch.device("cpu"))
        mode = _OnMeta()
        stack.enter_context(
            patch.object(torch.autograd, "_engine_run_backward", mode.also_backward())
        )
        stack.enter_context(mode)
        yield stack.enter_context(Meter())
