"""The same cubin, the same parameters: what an H200 computes against what the interpreter computes."""

import ctypes
import math

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("flash_attn", reason="flash-attn-4 is not installed")

from cuda.bindings import driver  # noqa: E402

from fp4mega.testing import ptx  # noqa: E402
from tests.testing.ptx import test_ptx_flash_attention as fa4  # noqa: E402


def checked(result):
    """The values of a driver call. Raises RuntimeError with the driver's name of the error."""
    code, *rest = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(checked(driver.cuGetErrorName(code)).decode())
    return rest[0] if len(rest) == 1 else rest


def launch_on_device(cubin, kernel, launch):
    """Run one captured launch on the current device and wait for it."""
    module = checked(driver.cuModuleLoadData(cubin))
    function = checked(driver.cuModuleGetFunction(module, launch.kernel.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, attribute, launch.shared_bytes))
    block = ctypes.create_string_buffer(launch.parameters, len(launch.parameters) + 128)
    # Tensor maps want 64-byte alignment, which a plain buffer need not have.
    start = -ctypes.addressof(block) % 128
    aligned = ctypes.addressof(block) + start
    ctypes.memmove(aligned, launch.parameters, len(launch.parameters))
    pointers = (ctypes.c_void_p * len(kernel.parameters))(
        *(aligned + p.offset for p in kernel.parameters)
    )
    checked(
        driver.cuLaunchKernel(
            function,
            *launch.grid,
            *launch.block,
            launch.shared_bytes,
            0,
            ctypes.addressof(pointers),
            0,
        )
    )
    torch.cuda.synchronize()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_flash_attention_hopper(causal):
    """FA4's sm_90a forward, ragged lengths, GQA: output within BF16's last bit, log-sum-exp within float32's rounding."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    program, compiled = fa4.hopper_program(causal)
    batch, queries, keys, heads, kv_heads, dim = 1, 320, 448, 4, 2, 128
    report, out, lse, *inputs = fa4.launch(
        program, batch, queries, keys, heads, kv_heads, dim, "eager"
    )
    report.check()
    on_device = [
        torch.from_numpy(x).transpose(1, 2).contiguous().to("cuda", torch.bfloat16) for x in inputs
    ]
    gpu_out = torch.full_like(on_device[0], math.nan)
    gpu_lse = torch.full((batch, heads, queries), math.nan, device="cuda")

    def given(t):
        return ptx.tensor(
            t.data_ptr(), tuple(t.shape[:3]), (t.shape[1] * t.shape[2] * dim, t.shape[2] * dim)
        )

    lse_argument = ptx.tensor(gpu_lse.data_ptr(), tuple(gpu_lse.shape), (heads * queries, queries))
    launches, _ = program.host(
        *map(given, on_device), given(gpu_out), lse_argument, 1 / math.sqrt(dim), None
    )
    torch.cuda.synchronize()
    for one in launches:
        launch_on_device(compiled.__cubin__, program.kernel(one.kernel), one)
    got = gpu_out.float().transpose(1, 2).cpu().numpy()
    print(
        f"output differs by {np.abs(got - out).max():.2e}, lse by {np.abs(gpu_lse.cpu().numpy() - lse).max():.2e}"
    )
    np.testing.assert_allclose(got, out, rtol=2**-7, atol=2**-9)
    np.testing.assert_allclose(gpu_lse.cpu().numpy(), lse, rtol=0, atol=2e-5)
