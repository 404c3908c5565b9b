"""Bytes: what a policy keeps for backward, what its publishers have to move, and what they do move.

A publisher is a kernel that prepares operands: any kernel of a module named `publish...`, and whatever torch itself runs in a call.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.bench.shapes import Shape
from fp4mega.kernels import Backend
from fp4mega.kernels.contract import TensorSpec

PUBLISHERS = "publish"


def spec_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """Bytes of tensors of these shapes and dtypes."""
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _elements(problem: AttentionProblem) -> dict[str, int]:
    rows, keys = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    return {
        "q": rows * problem.num_heads * problem.head_dim,
        "k": keys * problem.num_kv_heads * problem.head_dim,
        "v": keys * problem.num_kv_heads * problem.head_dim_v,
        "out": rows * problem.num_heads * problem.head_dim_v,
        "rows": rows * problem.num_heads,
    }


def saved_bytes(problem: AttentionProblem, policy: AttentionPolicy, backend: Backend) -> int:
    """Bytes alive between forward and backward: output, log-sum-exp, the backend's own, and inputs that backward asks for."""
    elements, width = _elements(problem), problem.dtype.itemsize
    kept = sum(elements[n] for n in ("q", "k", "v") if policy.saves_input(n))
    own = spec_bytes(backend.saved_spec(problem, policy))
    return width * (kept + elements["out"]) + 4 * elements["rows"] + own


def bf16_saved_bytes(problem: AttentionProblem) -> int:
    """What unquantized attention keeps: q, k, v, output and a float32 log-sum-exp."""
    elements = _elements(problem)
    return 2 * sum(elements[n] for n in ("q", "k", "v", "out")) + 4 * elements["rows"]


def minimum_traffic(problem: AttentionProblem, policy: AttentionPolicy, phase: str) -> int:
    """The least that publishers must move; see below. 0 for a policy that quantizes nothing.

    Forward: q, k, v read once, and each operand that is quantized written once at its bits. Backward: dO and the output read
    once, dO written once in 8 bits in each of the two orientations that its products read, and a float32 r for every row.
    """
    elements, width = _elements(problem), problem.dtype.itemsize
    if phase == "forward":
        quantized = [n for n in ("q", "k", "v") if policy.operands[n].quantized]
        return int(sum(elements[n] * (width + policy.operands[n].bits / 8) for n in quantized))
    if not policy.operands["do"].quantized:
        return 0
    return elements["out"] * (2 * width + 2) + 4 * elements["rows"]


@dataclass
class Launches:
    """What Triton launched while it was recorded."""

    modules: dict[str, str] = field(default_factory=dict)
    """Kernel name to the last part of the module it is defined in."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Kernel name to the bytes of its distinct tensor arguments, summed over launches: what it moves if it touches each once, or a second
    time in the cache, as a publisher's input that is scaled by its maximum."""

    def add(self, name: str, module: str, arguments: tuple[Any, ...], *, idle: bool) -> None:
        """One launch; an `idle` one touches nothing but a flag."""
        self.modules[name] = module.rpartition(".")[2]
        distinct = {(t.data_ptr(), t.dtype): t.numel() * t.itemsize for t in _tensors(arguments)}
        self.bytes[name] = self.bytes.get(name, 0) + (0 if idle else sum(distinct.values()))

    def is_publisher(self, name: str) -> bool:
        """True for kernels of a publisher's module, and for those that are not Triton's: torch's own fills and copies."""
        return name not in self.modules or self.modules[name].startswith(PUBLISHERS)

    @property
    def publisher_bytes(self) -> int:
        """Bytes of all publishers that are Triton's."""
        return sum(size for name, size in self.bytes.items() if self.is_publisher(name))


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)
        elif isinstance(base := getattr(argument, "base", None), Tensor):
            yield base


@contextmanager
def recorded_launches() -> Iterator[Launches]:
    """Every Triton launch within it. A kernel launched with GATED=True returns at once unless its flag is up, so counts nothing.

    Without triton there are none.
    """
    launches = Launches()
    if importlib.util.find_spec("triton") is None:
        yield launches
        return
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            idle = bool(kwargs.get("GATED"))
            tensors = (*args, *kwargs.values())
            launches.add(self.fn.__name__, self.fn.__module__, tensors, idle=idle)
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


@dataclass(frozen=True)
class PublisherRow:
    """Publishers of one arm in one phase: median milliseconds, bytes and bandwidth."""

    shape: str
    arm: str
    phase: str
    milliseconds: float
    minimum: int
    """Bytes, `minimum_traffic`."""
    moved: int
    """Bytes, every tensor argument of every launch once."""
    copy: float
    """Bytes a second of a device copy in the same run."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second, by what was moved."""
        return self.moved / (self.milliseconds / 1e3)

    @property
    def of_copy(self) -> float:
        """Bandwidth as a share of the copy's."""
        return self.bandwidth / self.copy

    @property
    def floor(self) -> float:
        """Milliseconds that the minimum takes at the copy's bandwidth."""
        return 1e3 * self.minimum / self.copy


@dataclass(frozen=True)
class SavedRow:
    """What one arm keeps for backward on one shape."""

    shape: str
    arm: str
    bytes: int
    bf16: int

    @property
    def ratio(self) -> float:
        """Of BF16's."""
        return self.bytes / self.bf16


def saved_row(shape: Shape, arm: str, policy: AttentionPolicy, backend: Backend) -> SavedRow:
    """The figures of one arm; needs no device."""
    problem = shape.problem
    return SavedRow(
        str(shape), arm, saved_bytes(problem, policy, backend), bf16_saved_bytes(problem)
    )
