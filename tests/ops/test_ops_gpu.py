"""The same calls on a CUDA device: same numbers, compiled with Triton's inductor, and the checks that wait for it."""

import pytest
import torch

from fp4mega import attention_func
from fp4mega.testing import (
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    Case,
    assert_bitwise,
    assert_close,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(case: Case, device: str, function=attention_func) -> list[torch.Tensor]:
    inputs = case.make(device=device, requires_grad=True)
    out, lse = function(*inputs[:3], return_lse=True, **case.arguments(inputs.side))
    gradients = torch.autograd.grad((out, lse), inputs[:3], (inputs.dout, inputs.dlse))
    return [out, lse, *gradients]


@pytest.mark.parametrize("case", [*SHAPE_CASES[:3], *MASK_CASES, *PACKED_CASES], ids=str)
def test_a_gpu_gives_the_cpu_answer(case: Case) -> None:
    case = case.replace(dtype=torch.float64)
    for name, mine, ref in zip(
        ("out", "lse", "dq", "dk", "dv"), run(case, "cuda"), run(case, "cpu"), strict=True
    ):
        assert_close(mine.cpu(), ref, limit=1e-12, name=name)


@pytest.mark.parametrize("policy", ["bf16", "nvfp4_qk_fp8_pv", "stochastic"])
def test_compiled_equals_eager_on_a_gpu(policy: str) -> None:
    torch.compiler.reset()
    case = SHAPE_CASES[0].replace(policy=policy, dtype=torch.bfloat16)
    compiled = torch.compile(attention_func, fullgraph=True)
    for mine, ref in zip(run(case, "cuda", compiled), run(case, "cuda"), strict=True):
        assert_bitwise(mine, ref, name=policy)


def test_cumulative_lengths_on_a_gpu_are_checked_on_request() -> None:
    case = PACKED_CASES[0]
    inputs = case.make(device="cuda")
    arguments = case.arguments(inputs.side)
    attention_func(*inputs[:3], check_finite=True, **arguments)
    arguments["cu_seqlens_k"] = arguments["cu_seqlens_k"].clone()
    arguments["cu_seqlens_k"][-1] -= 1
    with pytest.raises(ValueError, match="cu_seqlens_k=\\[0, 5, 69, 99\\]: expected to start at 0"):
        attention_func(*inputs[:3], check_finite=True, **arguments)
