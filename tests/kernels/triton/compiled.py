"""Prints, as JSON, the layouts of what `movmatrix` transposes in the kernel of dQ, compiled for a GPU on a machine that needs none.

    python -m tests.kernels.triton.compiled POLICY-HEAD_DIM@CAPABILITY ...

The backend itself is called, on the CPU, so that its own tiles and operands are those that are compiled; nothing is launched. A process of
its own, because the driver that says which GPU there is belongs to the process.
"""

import json
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp4mega.attention import get_policy
from fp4mega.testing import Case
from tests.kernels.triton.harness import BACKEND

Layout = dict[str, Any]


class Driver:
    """What a launch asks Triton's driver, of a GPU that need not be there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps what it compiled by device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def transposed(ttgir: str) -> list[Layout]:
    """Of each `movmatrix` in a kernel: its words' layout by name and, for a linear one, its bases."""
    named = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.MULTILINE))
    layouts = []
    for line in ttgir.splitlines():
        if "movmatrix" in line:
            words = re.search(r" : tensor<\w+xi16, (#\w+)", line)
            assert words is not None, line
            name, _, fields = named[words[1]].partition("<")
            bases = re.findall(r"(\w+) = (\[\[.*?\]\])", fields) if name == "linear" else []
            layouts.append({"name": name, **{field: json.loads(value) for field, value in bases}})
    return layouts


def dq_kernels(policy: str, head_dim: int) -> list[str]:
    """The TTGIR of every kernel of dQ that a causal call compiles: two for MXFP4, of which one is for heads that E4M3 does not hold."""
    case = Case(
        batch=1, seqlen_q=256, seqlen_k=256, num_heads=2, num_kv_heads=2, head_dim=head_dim, causal="top_left", dtype=torch.bfloat16,
    )  # fmt: skip
    kernels: list[str] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self.fn.__name__ == "_dq_kernel":
            compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
            kernels.append(compiled.asm["ttgir"])

    JITFunction.run = run
    try:
        x, chosen = case.make(), get_policy(policy)
        forward = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, chosen)
        BACKEND.backward(x.dout, None, forward, (None,) * 3, x.side, case.problem, chosen)
    finally:
        JITFunction.run = launch
    return kernels


def main() -> None:
    answers = {}
    for wanted in sys.argv[1:]:
        kernel, _, capability = wanted.partition("@")
        policy, _, head_dim = kernel.rpartition("-")
        driver.set_active(Driver(int(capability)))
        answers[wanted] = [transposed(kernel) for kernel in dq_kernels(policy, int(head_dim))]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
