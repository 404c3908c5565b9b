"""Other people's attention kernels, to be timed beside a backend in the same run.

`cudnn_bf16` and `flash_bf16` are torch's scaled_dot_product_attention with one of its backends. `fa4` is the CuTe DSL FlashAttention of
the package flash-attn-4, in BF16; its backward adds to dQ with atomics unless told otherwise, and is timed as it comes. `cudnn_fp8` is
in `cudnn_fp8.py`. A peer says in words why it is not there, and which shapes it cannot run.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp4mega.bench import cudnn_fp8
from fp4mega.bench.arms import Arm
from fp4mega.bench.gate import Answer
from fp4mega.bench.shapes import Shape, Tensors

AVAILABLE, NONE = "available", "none"
BF16_LIMIT, FP8_LIMIT = 0.02, 0.2
"""Largest relL2 of a peer's output and gradients against float32 attention on the same inputs: it must compute attention at all."""


@dataclass(frozen=True)
class Peer:
    """One peer: how it is opened on a shape, what it needs, and how exact it has to be."""

    name: str
    what: str
    open: Callable[[Shape, Tensors], Arm]
    packages: tuple[str, ...] = ()
    """Distributions that it needs beyond torch."""
    limit: float = BF16_LIMIT
    explain_shape: Callable[[Shape], str | None] = lambda shape: None

    def missing(self) -> str | None:
        """Why this peer cannot run here at all, in words; None when it can be tried. Imports nothing."""
        for package in self.packages:
            if _version(package) is None:
                return f"the package {package} is not installed (pip install {package})"
        return None

    def versions(self) -> str:
        """Versions of its packages, for the heading."""
        return ", ".join(f"{name} {_version(name)}" for name in self.packages)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _autograd_arm(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], dout: Tensor, run: Callable[..., Tensor], *, heads_first: bool
) -> Arm:  # fmt: skip
    """An arm whose backward is torch's autograd over `run(q, k, v)`."""

    def forward() -> Tensor:
        return run(*tensors)

    def backward(out: Tensor) -> Any:
        # The graph is kept because backward alone is timed many times on one forward.
        return torch.autograd.grad(out, tensors, dout, retain_graph=True)

    def answer() -> Answer:
        out = forward()
        results = [out.detach(), *backward(out)]
        if heads_first:
            results = [t.transpose(1, 2) for t in results]
        return Answer(results[0], out.new_empty(0), *results[1:])

    return Arm(name, forward, backward, answer)


def _open_sdpa(name: str, backend: SDPBackend) -> Callable[[Shape, Tensors], Arm]:
    def open_(shape: Shape, x: Tensors) -> Arm:
        q, k, v, dout = (t.transpose(1, 2) for t in x)
        leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
                )

        return _autograd_arm(name, (leaves[0], leaves[1], leaves[2]), dout, run, heads_first=True)

    return open_


def _open_fa4(shape: Shape, x: Tensors) -> Arm:
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flash_attn_func(q, k, v, causal=shape.causal)
        return result[0] if isinstance(result, tuple) else result

    return _autograd_arm("fa4", (q, k, v), x.dout, run, heads_first=False)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "cudnn_bf16",
            "torch's attention, cuDNN backend",
            _open_sdpa("cudnn_bf16", SDPBackend.CUDNN_ATTENTION),
        ),
        Peer(
            "cudnn_fp8",
            "cuDNN's FP8 graphs; its quantization is not timed",
            cudnn_fp8.open_arm,
            ("nvidia-cudnn-frontend",),
            FP8_LIMIT,
            cudnn_fp8.explain_shape,
        ),
        Peer(
            "flash_bf16",
            "torch's attention, flash backend",
            _open_sdpa("flash_bf16", SDPBackend.FLASH_ATTENTION),
        ),
        Peer(
            "fa4",
            "FlashAttention in the CuTe DSL",
            _open_fa4,
            ("flash-attn-4", "nvidia-cutlass-dsl"),
        ),
    )
}


def choose(names: Iterable[str]) -> tuple[list[Peer], dict[str, str], bool]:
    """The peers asked for, those left out with the reason, and whether they were asked for by name.

    `available` takes what is installed and `none` takes none. Raises ValueError for an unknown name, and for one asked for
    by name that is not installed.
    """
    names = list(names)
    if names in ([AVAILABLE], [NONE], []):
        known = PEERS.values() if names == [AVAILABLE] else ()
        reasons = {p.name: p.missing() for p in known}
        missing = {name: why for name, why in reasons.items() if why is not None}
        return [p for p in known if p.name not in missing], missing, False
    for name in names:
        if name not in PEERS:
            allowed = [*PEERS, AVAILABLE, NONE]
            near = get_close_matches(name, allowed, n=1)
            hint = f"; nearest is {near[0]!r}" if near else ""
            raise ValueError(f"peer={name!r} is unknown{hint}; allowed: {', '.join(allowed)}")
    chosen = [PEERS[name] for name in dict.fromkeys(names)]
    for peer in chosen:
        if why := peer.missing():
            raise ValueError(
                f"peer={peer.name!r} cannot run: {why}; '{AVAILABLE}' takes those that can"
            )
    return chosen, {}, True
