"""The CPU adaptation answers Megatron's calls, refuses next to a GPU, and leaves nothing behind."""

import subprocess
import sys

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from fp4mega.megatron import adapt_to_cpu, adapted_to_cpu

PATCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "default_stream"),
    (torch.autograd, "_engine_run_backward"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (multi_latent_attention, "HAVE_TE"),
    (moe_utils, "te_general_gemm"),
]


def originals():
    return [getattr(owner, name, "missing") for owner, name in PATCHED]


def test_refused_where_cuda_is_available(monkeypatch):
    before = originals()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="adapt_to_cpu.. on a machine with CUDA"):
        adapt_to_cpu()
    with pytest.raises(RuntimeError, match="machine with CUDA"), adapted_to_cpu():
        pass
    assert originals() == before


def test_answers_and_is_undone():
    before = originals()
    x = torch.ones(2)
    with adapted_to_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.cuda.synchronize() is None
        assert torch.zeros(3, device="cuda", pin_memory=True).device.type == "cpu"
        assert torch.ones(2, device=torch.device("cuda:0")).device.type == "cpu"
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.type(torch.float64).dtype == torch.float64
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    assert originals() == before
    assert x.type() == "torch.FloatTensor"


def test_calls_inside_backward_are_answered_too():
    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy + torch.ones(2, device="cuda")

    x = torch.zeros(2, requires_grad=True)
    with adapted_to_cpu():
        Allocates.apply(x).sum().backward()
        torch.autograd.backward(Allocates.apply(x).sum())
        (dx,) = torch.autograd.grad(Allocates.apply(x).sum(), x)
    assert x.grad.tolist() == [4, 4]
    assert dx.tolist() == [2, 2]


def test_idempotent_for_the_process():
    program = (
        "import torch; from fp4mega.megatron import adapt_to_cpu, adapted_to_cpu\n"
        "adapt_to_cpu(); answer = torch.cuda.current_device; adapt_to_cpu()\n"
        "assert torch.cuda.current_device is answer\n"
        "with adapted_to_cpu(): pass\n"
        "assert torch.cuda.current_device is answer\n"
        "assert torch.ones(1).type() == 'torch.cuda.FloatTensor'"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)
