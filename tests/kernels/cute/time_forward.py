"""Milliseconds of the training forward on a Blackwell GPU beside torch's BF16 attention: `python -m tests.kernels.cute.time_forward`.

`fp4mega.bench attention` times policies whose backward the backend has, which for cute_sm100 are those of Direct-P; this fills the gap.
"""

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fp4mega.attention.policy import get_policy
from fp4mega.kernels import get_backend
from fp4mega.kernels.cute.launch import multiprocessors, prepare_forward
from fp4mega.testing import Case

SHAPES = ((1, 4096, 32, 8), (2, 4096, 32, 8), (4, 4096, 32, 8), (1, 16384, 32, 8))
POLICIES = ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
REPEATS = 30


def milliseconds(call: Callable[[], object]) -> float:
    """Median of `REPEATS` calls by CUDA events, after five that warm up."""
    found = []
    for i in range(REPEATS + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= 5:
            found.append(start.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    from fp4mega.kernels.cute.compile import launch

    backend = get_backend("cute_sm100")
    print("shape, policy, whole call ms, kernel ms, kernel TF/s, torch BF16 ms")
    for batch, length, heads, kv_heads in SHAPES:
        case = Case(
            batch=batch,
            seqlen_q=length,
            seqlen_k=length,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=128,
            causal="top_left",
            dtype=torch.bfloat16,
        )
        x = case.make(device="cuda")
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

        def plain(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        bf16 = milliseconds(plain)
        for name in POLICIES:
            policy = get_policy(name)
            arguments = (x.q, x.k, x.v, x.side, case.problem, policy)
            whole = milliseconds(lambda arguments=arguments: backend.forward(*arguments))
            call = prepare_forward(*arguments, launch)
            numbers = call.numbers(multiprocessors(x.q.device))

            def alone(call=call, numbers=numbers) -> None:
                launch(call.config, call.tensors, numbers)

            kernel = milliseconds(alone)
            flop = 4 * batch * heads * math.prod((length, length)) * 128 / 2
            print(
                f"{case.problem}, {name}, {whole:.3f}, {kernel:.3f}, {flop / kernel / 1e9:.0f}, {bf16:.3f}"
            )


if __name__ == "__main__":
    main()
