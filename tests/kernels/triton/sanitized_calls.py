"""Small calls of every Triton kernel, and planted faults, as a program for compute-sanitizer; see test_sanitizer_gpu.py.

    compute-sanitizer --tool memcheck python -m tests.kernels.triton.sanitized_calls [--plant memcheck]

Without torch's caching allocator every tensor is its own allocation, so that a read beside one is seen.
"""

import argparse
import importlib
import os
import pkgutil
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
import triton
import triton.language as tl

import fp4mega.kernels.triton
from fp4mega.attention import get_policy
from fp4mega.bench.gate import evaluate
from fp4mega.testing import Case
from tests.kernels.triton.harness import BACKEND, POLICIES, TRAINING

BASE = Case(
    batch=1, seqlen_q=70, seqlen_k=150, num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16,
)  # fmt: skip
FEW = tuple(
    name
    for name in ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "nvfp4_qk_mxfp4_pv", "bf16")
    if name in POLICIES
)
CASES = (
    (BASE, POLICIES),
    (BASE.replace(causal="bottom_right", head_dim=40, head_dim_v=48), FEW),
    (BASE.replace(seqlen_q=150, causal="top_left", window=(40, 0), sink=True), FEW),
    (BASE.replace(batch=2, window=(20, 30), mask="padding_all"), FEW),
    (BASE.replace(lengths_q=(7, 0, 33), lengths_k=(40, 9, 0), causal="bottom_right"), FEW),
    (BASE.replace(seqlen_k=70, layout="fused_qkv", dtype=torch.float16), FEW),
    (BASE.replace(seqlen_k=70, head_dim=256, causal="top_left"), FEW),
    (BASE.replace(seqlen_k=70, head_dim=192, head_dim_v=128, gradient="expanded"), FEW),
    (BASE.replace(seqlen_q=1, seqlen_k=1, head_dim=16), FEW),
)


def kernels() -> set[str]:
    """Names of all kernels of the package: its jitted functions that are called `..._kernel`."""
    found = set()
    package = fp4mega.kernels.triton
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                found.add(name)
    return found


def record_launches() -> set[str]:
    """A set that collects the names of launched kernels from now on."""
    launched: set[str] = set()
    run = triton.JITFunction.run

    def recording(self, *args, **kwargs):
        launched.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    triton.JITFunction.run = recording
    return launched


def call_everything() -> None:
    device = torch.device("cuda")
    for case, names in CASES:
        for name in names:
            policy = get_policy(name)
            reason = BACKEND.explain(case.problem, policy, device)
            if reason:
                print(f"refused {case} {name}: {reason}")
                continue
            x = case.make(device="cuda")
            if name.startswith("mxfp4_qk") and case is BASE:
                # A head that E4M3 does not hold: the kernels that run it in BF16.
                x.k[..., :32] *= 2.0**-20
                x.q[..., 32:] *= 64
            if name in TRAINING:
                got, _ = evaluate(BACKEND, x, case, policy)
                results = [t for t in got if t is not None]
            else:
                results = [BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).out]
            # Reads every result, so that an element that no kernel wrote is seen as well.
            print(case, name, float(sum(t.double().nan_to_num().sum() for t in results)))
    torch.cuda.synchronize()


@triton.jit
def _read_kernel(x_ptr, out_ptr, first):
    """out = 128 numbers of x from `first` on."""
    at = tl.arange(0, 128)
    tl.store(out_ptr + at, tl.load(x_ptr + first + at))


RACE = """
extern "C" __global__ void planted_race(float* out) {
  __shared__ float shared[128];
  shared[threadIdx.x] = out[threadIdx.x];
  out[threadIdx.x] = shared[(threadIdx.x + 64) % 128];
}
"""


def plant(tool: str) -> None:
    """A fault that the tool must report."""
    out = torch.zeros(128, device="cuda")
    if tool == "racecheck":
        torch.cuda._compile_kernel(RACE, "planted_race")((1, 1, 1), (128, 1, 1), (out,))
    else:
        x = (
            torch.ones(128, device="cuda")
            if tool == "memcheck"
            else torch.empty(256, device="cuda")
        )
        _read_kernel[(1,)](x, out, 64)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=("memcheck", "racecheck", "initcheck"))
    options = parser.parse_args()
    if options.plant:
        plant(options.plant)
        return 0
    launched = record_launches()
    call_everything()
    print("launched:", *sorted(launched))
    missing = kernels() - launched
    if missing:
        print("never launched:", *sorted(missing))
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
