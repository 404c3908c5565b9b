"""What the Triton kernels can answer, in words where they cannot, and what they save. Needs no Triton."""

import importlib.util

import torch

from fp4mega.attention import explain as reference_explain
from fp4mega.attention import saved_spec as reference_saved_spec
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.kernels.contract import TensorSpec

LOWEST_CAPABILITY = (8, 9)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNCOMPILED = (10, 11)
"""Major capabilities with tcgen05. Triton's compiler (3.6) stops at the 8-bit kernel of dQ for them; one that did not would give products
other registers than `tiles.store_transposed` takes apart."""
SMALL_SHARED_MEMORY = (8, 12)
"""Major capabilities whose programs have 99 KiB of shared memory, not 227."""
TILE_M, TILE_N = 64, 128
SMALLEST_HEAD_DIM = 16
_FOUR_BIT_SCORES: dict[str, tuple[str, ...]] = {
    "p": ("e4m3/unit", "mxfp4_rceil", "bf16"),
    "v": ("e4m3", "mxfp4_rceil"),
    "do": ("e5m2",),
    "p_bwd": ("e4m3/unit",),
    "ds": ("e4m3/tile",),
    "q_bwd": ("e4m3",),
    "k_bwd": ("e4m3",),
    "v_bwd": ("same", "e4m3"),
}
_BF16_SCORES: dict[str, tuple[str, ...]] = {
    "p": ("bf16",),
    "v": ("bf16",),
    "do": ("bf16",),
    "p_bwd": ("bf16",),
    "ds": ("bf16",),
    "q_bwd": ("same",),
    "k_bwd": ("same",),
    "v_bwd": ("same",),
}


def explain(problem: AttentionProblem, policy: AttentionPolicy, device: torch.device) -> str | None:
    """None when these kernels compute exactly this policy on this device, otherwise why not."""
    if device.type != "cuda":
        return f"the kernels need an NVIDIA GPU, the tensors are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return (
        _explain_device(device)
        or explain_policy(policy)
        or explain_problem(problem)
        or _explain_direct_p(problem, policy)
        or _explain_compiled(problem, policy, device)
    )


def _explain_device(device: torch.device) -> str | None:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < LOWEST_CAPABILITY:
            return f"{_gpu(capability)}, FP8 products need sm_89 or later"
    return None


def _explain_compiled(
    problem: AttentionProblem, policy: AttentionPolicy, device: torch.device
) -> str | None:
    """What Triton does not compile, or not into what a program may have, on GPUs other than Hopper."""
    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    eight_bit_backward = policy.operands["q"].quantized and policy.direct_p is None
    if capability[0] in UNCOMPILED and eight_bit_backward:
        return (
            f"{_gpu(capability)}, for which Triton does not compile the backward of q={policy.q!r}"
        )
    if capability[0] in SMALL_SHARED_MEMORY:
        largest = _largest_head_dim(policy, capability[0])
        if max(problem.head_dim, problem.head_dim_v) > largest:
            return (
                f"{_gpu(capability)}, whose shared memory holds this policy's tiles for head dims up to {largest}, "
                f"not {problem.head_dim}/{problem.head_dim_v}"
            )
    return None


def _gpu(capability: tuple[int, int]) -> str:
    return f"the GPU is sm_{capability[0]}{capability[1]}"


def _largest_head_dim(policy: AttentionPolicy, major: int) -> int:
    """Where programs have 99 KiB of shared memory, as the kernels compile (Triton 3.6)."""
    if policy.direct_p is not None:
        return 64
    p, v, read = (policy.operands[n].format for n in ("p", "v", policy.backward_v))
    if major == 8:
        return 256 if p == v == "e4m3" else 128
    # Descriptors, which sm_89 has not, keep whole tiles there.
    return 64 if policy.operands["q"].format == "nvfp4" and read == "e4m3" else 128


def explain_policy(policy: AttentionPolicy) -> str | None:
    """Policies the kernels implement: NVFP4 or MXFP4 `rceil` Q/K, FP8 or MXFP4 `rceil` P and V, FP8 gradients; BF16 throughout; Direct-P."""
    spelled = {name: str(operand) for name, operand in policy.operands.items()}
    if policy.direct_p is not None:
        return _explain_direct_p_policy(policy, spelled)
    if spelled["q"] != spelled["k"] or spelled["q"] not in ("nvfp4", "mxfp4_rceil", "bf16"):
        return f"q={policy.q!r}, k={policy.k!r}: kernels exist for nvfp4, mxfp4_rceil and bf16, the same for both"
    for name, able in (_BF16_SCORES if spelled["q"] == "bf16" else _FOUR_BIT_SCORES).items():
        if spelled[name] not in able:
            exist = ", ".join(map(repr, able))
            return f"{name}={getattr(policy, name)!r}: with q={policy.q!r} kernels exist for {exist} only"
    if policy.backward == "represented" and policy.max_rule != "integer":
        return f"max_rule={policy.max_rule!r}: the represented rule rounds P again, which needs an integer maximum"
    if (policy.tile_m, policy.tile_n) != (TILE_M, TILE_N):
        return f"tile {policy.tile_m}x{policy.tile_n}: kernels exist for {TILE_M}x{TILE_N} only"
    return None


def _explain_direct_p_policy(policy: AttentionPolicy, spelled: dict[str, str]) -> str | None:
    for name in ("q", "k"):
        if spelled[name] != "nvfp4":
            return f"{name}={getattr(policy, name)!r}: Direct-P has a kernel for 'nvfp4' only"
    for name in ("p", "v"):
        if policy.operands[name].rounding != "nearest_even":
            return f"{name}={getattr(policy, name)!r}: Direct-P has a kernel for rounding to nearest only"
    rule = policy.direct_p
    assert rule is not None
    if rule.reference == "sampled" and rule.samples > TILE_N:
        return f"direct_p.samples={rule.samples}: the kernel samples from one tile of {TILE_N} keys"
    return None


def _explain_direct_p(problem: AttentionProblem, policy: AttentionPolicy) -> str | None:
    if policy.direct_p is None:
        return None
    if problem.causal != "none" or problem.window != (None, None):
        return f"causal={problem.causal!r}, window={problem.window}: Direct-P has a kernel without either"
    return reference_explain(problem, policy)


def explain_problem(problem: AttentionProblem) -> str | None:
    """Shapes, dtypes and masks the kernels take."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}: kernels exist for bfloat16, float16 and float32"
    if min(problem.head_dim, problem.head_dim_v) < SMALLEST_HEAD_DIM:
        return f"head dims {problem.head_dim}/{problem.head_dim_v}: kernels exist from {SMALLEST_HEAD_DIM} on"
    if problem.attention_mask:
        return "an arbitrary attention_mask has no Triton kernel; causal, window, key_padding_mask and packed sequences do"
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return "there is nothing to compute: batch, query length or key length is 0"
    if problem.packed and not (problem.max_seqlen_q and problem.max_seqlen_k):
        return "there is nothing to compute: every packed sequence is empty"
    return None


def saved_spec(problem: AttentionProblem, policy: AttentionPolicy) -> tuple[TensorSpec, ...]:
    """The reference's bytes and statistics, then for quantized Q and K the largest represented magnitude of each head.

    Packed problems save a padded batch of sequences, as the reference does.
    """
    specs = [TensorSpec(*spec) for spec in reference_saved_spec(problem, policy)]
    if policy.operands["q"].quantized:
        batch = problem.num_sequences if problem.packed else problem.batch
        specs += [
            TensorSpec((batch, n), torch.float32) for n in (problem.num_heads, problem.num_kv_heads)
        ]
    return tuple(specs)
