"""The custom ops `fp4mega::attention_forward` and `fp4mega::attention_backward`, their fakes and the autograd formula.

Everything that is not a tensor crosses the schema as a plain value: the policy and the backend by name, the shapes not at
all (they are the tensors'). Both the real and the fake kernel rebuild the same `AttentionProblem` from them, so shapes
under `torch.compile` come from the same `saved_spec` as the figures in the documentation.

Between forward and backward autograd keeps out, lse, what the backend saved, and the tensors that the caller owns anyway:
side inputs, and those of q, k, v that the policy leaves unquantized.

Dims: B batch, S query length, T key length, H query heads, G kv heads, D head dim of q and k, Dv of v.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4mega.attention.call import statistics_dtype
from fp4mega.attention.policy import AttentionPolicy, get_policy
from fp4mega.attention.problem import AttentionProblem, Causal, SideInputs
from fp4mega.kernels import Backend, Forward, select_backend
from fp4mega.ops.checks import check_cu_seqlens_values, check_finite_values


class Options(NamedTuple):
    """The arguments of one call that are neither tensors nor shapes, in the order of the op's schema."""

    softmax_scale: float
    causal: Causal
    window_left: int | None
    window_right: int | None
    max_seqlen_q: int
    max_seqlen_k: int
    policy: str
    backend: str
    check_finite: bool


_SIDE_NAMES = tuple(field.name for field in fields(SideInputs))
_SIDE_SCHEMA = ", ".join(f"Tensor? {name}" for name in _SIDE_NAMES)
_OPTIONS_SCHEMA = (
    "float softmax_scale, str causal, SymInt? window_left, SymInt? window_right, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str policy, str backend, bool check_finite"
)
_FORWARD_SCHEMA = (
    f"(Tensor q, Tensor k, Tensor v, {_SIDE_SCHEMA}, {_OPTIONS_SCHEMA}) "
    "-> (Tensor out, Tensor lse, Tensor[] saved)"
)
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] saved, Tensor? q, Tensor? k, Tensor? v, "
    f"SymInt[] shape_q, SymInt[] shape_k, SymInt[] shape_v, {_SIDE_SCHEMA}, {_OPTIONS_SCHEMA}) -> Tensor[] gradients"
)


class _Call(NamedTuple):
    """One call as a backend sees it."""

    side: SideInputs
    problem: AttentionProblem
    policy: AttentionPolicy
    backend: Backend


def _split(rest: Sequence[Any]) -> tuple[SideInputs, Options]:
    """The tail that both schemas share."""
    count = len(_SIDE_NAMES)
    return _side_inputs(rest[:count]), Options(*rest[count:])


def _side_inputs(tensors: Sequence[Tensor | None]) -> SideInputs:
    return SideInputs(**dict(zip(_SIDE_NAMES, tensors, strict=True)))


def _resolve(
    shapes: tuple[Sequence[int], Sequence[int], Sequence[int]],
    like: Tensor,
    side: SideInputs,
    options: Options,
) -> _Call:
    """Problem, policy and backend of a call whose tensors have the dtype and device of `like`."""
    problem = AttentionProblem.of(
        shapes,
        like.dtype,
        side,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window=(options.window_left, options.window_right),
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
    )
    policy = get_policy(options.policy)
    if side.rounding_key is None and policy.stochastic_operands:
        raise ValueError(
            f"rounding_key=None: policy {policy.name!r} rounds {', '.join(policy.stochastic_operands)} stochastically; "
            "expected an int64 scalar tensor, another one for every step and layer"
        )
    return _Call(
        side, problem, policy, select_backend(options.backend, problem, policy, like.device)
    )


def _policy_precision(x: Tensor) -> torch.autocast:
    """No autocast inside a backend: the policy alone says what is rounded, and autocast would round its products."""
    return torch.autocast(x.device.type, enabled=False)


@torch.library.custom_op("fp4mega::attention_forward", mutates_args=(), schema=_FORWARD_SCHEMA)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out [B,S,H,Dv], lse [B,H,S] and what the backend saved; all contiguous. Data-dependent checks happen here."""
    side, options = _split(rest)
    call = _resolve((q.shape, k.shape, v.shape), q, side, options)
    check_cu_seqlens_values(side, call.problem, synchronize=options.check_finite)
    if options.check_finite:
        check_finite_values(q=q, k=k, v=v)
    with _policy_precision(q):
        out, lse, saved = call.backend.forward(q, k, v, side, call.problem, call.policy)
    return out.contiguous(), lse.contiguous(), [t.contiguous() for t in saved]


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    side, options = _split(rest)
    call = _resolve((q.shape, k.shape, v.shape), q, side, options)
    batch, seqlen_q, num_heads, _ = q.shape
    return (
        q.new_empty((batch, seqlen_q, num_heads, v.shape[-1])),
        q.new_empty((batch, num_heads, seqlen_q), dtype=statistics_dtype(q.dtype)),
        [
            q.new_empty(shape, dtype=dtype)
            for shape, dtype in call.backend.saved_spec(call.problem, call.policy)
        ],
    )


@torch.library.custom_op("fp4mega::attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    shape_q: Sequence[int],
    shape_k: Sequence[int],
    shape_v: Sequence[int],
    *rest: Any,
) -> list[Tensor]:
    """dq, dk, dv in the shapes of q, k, v, and dsink [H] when there is a sink; all contiguous."""
    side, options = _split(rest)
    call = _resolve((shape_q, shape_k, shape_v), out, side, options)
    with _policy_precision(out):
        gradients = call.backend.backward(
            dout,
            dlse,
            Forward(out, lse, tuple(saved)),
            (q, k, v),
            side,
            call.problem,
            call.policy,
        )
    return [t.contiguous() for t in gradients if t is not None]


@attention_backward.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    saved: list[Tensor],
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    shape_q: Sequence[int],
    shape_k: Sequence[int],
    shape_v: Sequence[int],
    *rest: Any,
) -> list[Tensor]:
    side, _ = _split(rest)
    gradients = [out.new_empty(tuple(shape)) for shape in (shape_q, shape_k, shape_v)]
    if side.sink is not None:
        gradients.append(out.new_empty((shape_q[2],), dtype=statistics_dtype(out.dtype)))
    return gradients


def _keep_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]
) -> None:
    q, k, v, *rest = inputs
    out, lse, saved = output
    _, options = _split(rest)
    policy = get_policy(options.policy)
    kept = (
        q if policy.saves_input("q") else None,
        k if policy.saves_input("k") else None,
        v if policy.saves_input("v") else None,
    )
    ctx.save_for_backward(out, lse, *kept, *rest[: len(_SIDE_NAMES)], *saved)
    ctx.shapes = (q.shape, k.shape, v.shape)
    ctx.options = options
    ctx.mark_non_differentiable(*saved)
    # A loss that uses only one of out and lse leaves the other's gradient None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dsaved: Any
) -> tuple[Tensor | None, ...]:
    out, lse, q, k, v, *rest = ctx.saved_tensors
    side, saved = _side_inputs(rest[: len(_SIDE_NAMES)]), rest[len(_SIDE_NAMES) :]
    by_name: dict[str, Tensor] = {}
    if dout is not None or dlse is not None:
        by_name = dict(
            zip(
                ("q", "k", "v", "sink"),
                attention_backward(
                    torch.zeros_like(out) if dout is None else dout,
                    dlse,
                    out,
                    lse,
                    saved,
                    q,
                    k,
                    v,
                    *(list(shape) for shape in ctx.shapes),
                    *side.as_tuple(),
                    *ctx.options,
                ),
                strict=False,
            )
        )
    return tuple(by_name.get(name) for name in _FORWARD_ARGUMENTS)


def _refuse_second_derivative(ctx: Any, *_gradients: Any) -> None:
    raise NotImplementedError(
        "attention_func has no second derivative: its backward reads quantized bytes, of which nothing is differentiable"
    )


_FORWARD_ARGUMENTS = ("q", "k", "v", *_SIDE_NAMES, *Options._fields)
attention_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)
attention_backward.register_autograd(_refuse_second_derivative)
