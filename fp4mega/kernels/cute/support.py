"""What the CuTe kernels can answer, in words where they cannot, what they save, and which kernel a call takes. Needs no CUTLASS."""

import importlib.util

import torch

from fp4mega.attention import saved_spec as reference_saved_spec
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.problem import AttentionProblem
from fp4mega.kernels.contract import TensorSpec
from fp4mega.kernels.cute.config import DIMS, DIMS_V, TILE_N, ForwardConfig

CAPABILITY = (10, 0)
BACKWARD_REASON = "cute_sm100 has no backward yet; train on this GPU with backend='reference' (with 'triton' for policy 'bf16')"
_PACKAGES = ("cutlass", "cuda.bindings")


def explain(problem: AttentionProblem, policy: AttentionPolicy, device: torch.device) -> str | None:
    """None when these kernels compute exactly this policy on this device, otherwise why not."""
    if device.type != "cuda":
        return (
            f"the kernels need an NVIDIA Blackwell GPU (sm_100), the tensors are on {device.type}"
        )
    return (
        _explain_device(device)
        or explain_policy(policy)
        or explain_problem(problem)
        or explain_order(problem, policy)
    )


def _explain_device(device: torch.device) -> str | None:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            return f"the GPU is sm_{capability[0]}{capability[1]}, the kernels are compiled for sm_100 (GB200, B200)"
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return f"the package {package} is not installed (pip install 'fp4mega[kernels]')"
    return None


def explain_policy(policy: AttentionPolicy) -> str | None:
    """Policies with a forward kernel: NVFP4 or MXFP4 `rceil` Q/K with FP8 P/V, and NVFP4 Q/K with Direct-P."""
    q, k = str(policy.operands["q"]), str(policy.operands["k"])
    if q != k or q not in ("nvfp4", "mxfp4_rceil"):
        return f"q={policy.q!r}, k={policy.k!r}: kernels exist for nvfp4 and mxfp4_rceil, the same for both"
    if policy.tile_n != TILE_N:
        return f"tile_n={policy.tile_n}: kernels exist for {TILE_N}"
    rule = policy.direct_p
    if rule is not None:
        if rule.reference == "sampled" and rule.samples > TILE_N:
            return (
                f"direct_p.samples={rule.samples}: the sampled keys must fit one tile of {TILE_N}"
            )
        return None
    for name, wanted in (("p", "e4m3/unit"), ("v", "e4m3")):
        if str(policy.operands[name]) != wanted:
            return f"{name}={getattr(policy, name)!r}: kernels exist for {wanted!r}, and for mxfp4_amplitude under Direct-P"
    if policy.max_rule != "integer":
        return f"max_rule={policy.max_rule!r}: the kernels keep an integer maximum"
    if policy.v_bwd != "same":
        return f"v_bwd={policy.v_bwd!r}: the kernels publish one V, the forward's"
    return None


def explain_problem(problem: AttentionProblem) -> str | None:
    """Shapes, dtypes and masks the kernels take."""
    if problem.dtype != torch.bfloat16:
        return f"dtype {problem.dtype}: kernels exist for bfloat16"
    for name, allowed in (("head_dim", DIMS), ("head_dim_v", DIMS_V)):
        if getattr(problem, name) not in allowed:
            return (
                f"{name}={getattr(problem, name)}: kernels exist for {', '.join(map(str, allowed))}"
            )
    if problem.attention_mask:
        return "an arbitrary attention_mask has no kernel; causal, window, key_padding_mask and packed sequences do"
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return "there is nothing to compute: batch, query length or key length is 0"
    if problem.packed and not (problem.max_seqlen_q and problem.max_seqlen_k):
        return "there is nothing to compute: every packed sequence is empty"
    return None


def explain_order(problem: AttentionProblem, policy: AttentionPolicy) -> str | None:
    """A sampled row reference takes the keys in another order, which masks by position do not survive."""
    rule = policy.direct_p
    if rule is None or rule.reference != "sampled":
        return None
    if problem.packed or problem.causal != "none" or problem.window != (None, None):
        return (
            f"policy {policy.name!r} permutes the keys: kernels exist without causal mask, window and packed sequences; "
            "direct_p_fast keeps the order"
        )
    return None


def saved_spec(problem: AttentionProblem, policy: AttentionPolicy) -> tuple[TensorSpec, ...]:
    """The reference's bytes and statistics, nothing else."""
    return tuple(TensorSpec(*spec) for spec in reference_saved_spec(problem, policy))


def forward_config(problem: AttentionProblem, policy: AttentionPolicy) -> ForwardConfig:
    """The kernel of a problem that `explain_policy` and `explain_problem` admit; `problem` may be packed."""
    left, right = problem.window
    return ForwardConfig(
        nvfp4=policy.operands["q"].format == "nvfp4",
        dim=problem.head_dim,
        dim_v=problem.head_dim_v,
        right=problem.causal != "none" or right is not None,
        left=left is not None,
        lengths=problem.packed,
        hidden=problem.key_padding_mask,
        sink=problem.sink,
        statistics=policy.backward == "represented",
        p_exponent=policy.p_exponent,
        exact_total=policy.normalizer == "exact",
        direct_p=policy.direct_p,
    )
