"""`attention_func`: quantized attention on [B, S, H, D] tensors, differentiable and compilable.

Dims: B batch, S query length, T key length, H query heads, G kv heads, D head dim of q and k, Dv of v, N sequences.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.attention.problem import Causal, SideInputs
from fp4mega.ops.checks import (
    Window,
    check_side_inputs,
    check_tensors,
    read_softmax_scale,
    read_window,
)
from fp4mega.ops.registration import Options, attention_forward

DEFAULT_POLICY = "nvfp4_qk_fp8_pv"

_CAUSAL: dict[bool | str, Causal] = {
    False: "none",
    True: "top_left",
    "none": "none",
    "top_left": "top_left",
    "bottom_right": "bottom_right",
}


# The overloads only tell a type checker what `return_lse` returns; the other arguments are written once, below.
@overload
def attention_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def attention_func(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


def attention_func(  # type: ignore[misc]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: str | AttentionPolicy = DEFAULT_POLICY,
    causal: bool | str = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    key_padding_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sink: Tensor | None = None,
    rounding_key: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    check_finite: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v with the numbers that `policy` names. Boolean masks are True where masked *out*.

    q: [B, S, H, D] in bfloat16, float16, float32 or float64, any strides.
    k: [B, T, G, D], v: [B, T, G, Dv], q's dtype and device; H a multiple of G; D and Dv from 1 to 256.
    policy: a registered name, or a policy, which is registered under its name.
    causal: False or "none"; True or "top_left" (query i sees keys up to i, as in torch); "bottom_right" (up to i + T - S).
    softmax_scale: None for 1 / sqrt(D).
    window: (left, right), keys beside the diagonal that a query sees; None in place of either or both is no limit.
    key_padding_mask: bool [B, T]. attention_mask: bool [B or 1, H or 1, S, T].
    cu_seqlens_q, cu_seqlens_k: int32 [N + 1], cumulative lengths of N sequences laid end to end; B is then 1.
    max_seqlen_q, max_seqlen_k: bounds of one sequence's length. On the CPU None takes the longest one.
    sink: [H], a logit per head that enters the normalizer only; float32 (float64 for float64 q) or q's dtype.
    rounding_key: int64 scalar that stochastic rounding counts from; the same key rounds the same way again.
    backend: "auto" for the fastest that can, or a name: that one or an error.
    return_lse: also return the log-sum-exp of each row's scaled scores.
    check_finite: read q, k, v and the cumulative lengths back and raise ValueError on what does not belong.

    Returns out [B, S, H, Dv] in q's dtype; with `return_lse` also lse [B, H, S], natural log, float32 (float64 for
    float64). Both carry gradients to q, k, v and sink. A row that sees no key has output 0, lse -inf and gradient 0.
    A NaN or Inf in one head of a quantized q, k or v makes what is computed from it NaN in that head, never a finite
    number, and no other head changes; an operand the policy leaves unquantized follows IEEE arithmetic.

    Raises TypeError or ValueError naming the argument, its value and what is allowed, NotImplementedError with every
    backend's reason when none can run the problem, and NotImplementedError from a second or a forward-mode derivative.
    """
    check_tensors(q, k, v)
    _check_options(backend, check_finite)
    side = SideInputs(
        sink=sink,
        key_padding_mask=key_padding_mask,
        attention_mask=attention_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        rounding_key=rounding_key,
    )
    check_side_inputs(side, q, k)
    _refuse_forward_mode(q, k, v, sink)
    window_left, window_right = read_window(window)
    options = Options(
        softmax_scale=read_softmax_scale(softmax_scale, q.shape[3]),
        causal=_causal(causal),
        window_left=window_left,
        window_right=window_right,
        max_seqlen_q=_longest("q", max_seqlen_q, cu_seqlens_q),
        max_seqlen_k=_longest("k", max_seqlen_k, cu_seqlens_k),
        policy=policy if isinstance(policy, str) else _registered_name(policy),
        backend=backend,
        check_finite=check_finite,
    )
    out, lse, _ = attention_forward(q, k, v, *side.as_tuple(), *options)
    return (out, lse) if return_lse else out


@torch.compiler.assume_constant_result
def _registered_name(policy: AttentionPolicy) -> str:
    """The name that crosses the op's schema. torch.compile runs this while tracing: the fake kernel looks the name up."""
    if not isinstance(policy, AttentionPolicy):
        raise TypeError(f"policy={policy!r}: expected the name of a policy or an AttentionPolicy")
    return get_policy(policy).name


def _causal(causal: bool | str) -> Causal:
    if not isinstance(causal, bool | str) or causal not in _CAUSAL:
        allowed = ", ".join(repr(value) for value in _CAUSAL)
        raise ValueError(f"causal={causal!r}: allowed: {allowed}")
    return _CAUSAL[causal]


def _check_options(backend: str, check_finite: bool) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend={backend!r}: expected 'auto' or the name of a backend")
    if not isinstance(check_finite, bool):
        raise TypeError(f"check_finite={check_finite!r}: expected True or False")


def _refuse_forward_mode(*inputs: Tensor | None) -> None:
    """An operator without a forward-mode rule would answer with a tangent of zero."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            "attention_func has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); reverse mode works"
        )


def _longest(name: str, given: int | None, cu_seqlens: Tensor | None) -> int:
    """The bound of one sequence's length: the one given, or on the CPU the longest sequence itself."""
    if cu_seqlens is None:
        if given is not None:
            raise ValueError(
                f"max_seqlen_{name}={given}: only for packed sequences, with cu_seqlens_{name}"
            )
        return 0
    if given is None:
        if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
            raise ValueError(
                f"max_seqlen_{name}=None: expected the length of the longest sequence; it is read from "
                f"cu_seqlens_{name} only for CPU tensors outside torch.compile, where that costs nothing"
            )
        return int(cu_seqlens.diff().max())
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"max_seqlen_{name}={given!r}: expected an integer of 0 or more")
    return given
