"""Runs the sm_100a kernels without a GPU: the backend's own host code prepares a call, the PTX interpreter executes it.

forward = execute(case, policy)                # what the backend would return on a GPU
assert_forward_agrees(forward, case, policy)   # against the float64 reference, by the rule of two
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp4mega.attention.policy import get_policy
from fp4mega.bench.gate import Answer, reference_answers
from fp4mega.kernels import Forward
from fp4mega.kernels.cute.config import KernelConfig
from fp4mega.kernels.cute.launch import ForwardCall, prepare_forward
from fp4mega.kernels.cute.support import explain_order, explain_policy, explain_problem
from fp4mega.testing import Case
from fp4mega.testing.assertions import assert_rule_of_two
from fp4mega.testing.cases import Inputs

ARCH = "sm_100a"
if not torch.cuda.is_available():
    # The DSL asks for the architecture when it is imported, and here there is no GPU that would tell.
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

BASE = Case(
    policy="nvfp4_qk_fp8_pv",
    batch=1,
    seqlen_q=160,
    seqlen_k=200,
    num_heads=1,
    num_kv_heads=1,
    head_dim=128,
    dtype=torch.bfloat16,
)


@functools.cache
def compiled(config: KernelConfig) -> Any:
    """The kernel compiled for sm_100a, with its PTX and cubin kept."""
    from fp4mega.kernels.cute.compile import fake_arguments, host_function
    from fp4mega.testing import ptx

    arguments = fake_arguments(config)
    return ptx.compile_for(ARCH, host_function(config), *arguments, options="--keep-cubin")


@functools.cache
def program(config: KernelConfig) -> Any:
    """Its PTX, ready to be interpreted, with its host code."""
    from fp4mega.testing import ptx

    return ptx.load(compiled(config))


def interpret(
    config: KernelConfig,
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    *,
    kernel: Any = None,
    order: str = "eager",
    track: bool = True,
) -> None:
    """Launch on the interpreter, by default the kernel of `config`; findings raise. Has the shape of the backend's launcher."""
    from fp4mega.testing import ptx

    report = ptx.launch(
        program(config) if kernel is None else kernel,
        *(t.data_ptr() for t in tensors),
        *numbers,
        None,
        policy=order,
        track=track,
        buffers={f"memory at {t.untyped_storage().data_ptr():#x}": _memory(t) for t in tensors},
    )
    report.check()


def run(call: ForwardCall, *, ctas: int = 148, **options: Any) -> Forward:
    """The forward kernel of a prepared call on a grid of at most `ctas` CTAs; outputs are poisoned before it."""
    for written in (call.out, call.lse, call.statistics):
        written.fill_(torch.nan)
    interpret(call.config, call.tensors, call.numbers(ctas), **options)
    return call.finish()


def prepare(case: Case, inputs: Inputs | None = None, *, publishers: bool = False) -> ForwardCall:
    """A case's inputs, or others of its shape, through the backend's host code; quantized by torch or by the `publishers`."""
    x = case.make() if inputs is None else inputs
    policy = get_policy(case.policy)
    assert explain_policy(policy) is None
    assert explain_problem(case.problem) is None
    assert explain_order(case.problem, policy) is None
    return prepare_forward(
        x.q, x.k, x.v, x.side, case.problem, policy, interpret if publishers else None
    )


def execute(
    case: Case, inputs: Inputs | None = None, *, publishers: bool = False, **options: Any
) -> Forward:
    """What the backend returns for this case, computed by the interpreter."""
    return run(prepare(case, inputs, publishers=publishers), **options)


def assert_forward_agrees(forward: Forward, case: Case) -> None:
    """Output, LSE and saved bytes against the float64 reference on exactly those bytes, by the rule of two."""
    policy = get_policy(case.policy)
    exact, noisy = reference_answers(case.make(), case, policy, forward.saved)
    got = Answer(forward.out, forward.lse)
    for name in ("out", "lse"):
        value = getattr(got, name)
        assert_rule_of_two(
            value,
            getattr(exact, name),
            getattr(noisy, name),
            dtype=value.dtype,
            name=f"{case} {name}",
        )


def check(case: Case, **options: Any) -> Forward:
    """Execute a case and compare."""
    forward = execute(case, **options)
    assert_forward_agrees(forward, case)
    return forward


def _memory(t: Tensor) -> Any:
    """All the memory that a tensor is a view of, as bytes."""
    storage = t.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memory, np.uint8)
