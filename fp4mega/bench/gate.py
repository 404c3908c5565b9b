"""The correctness gate: a backend against the float64 reference on exactly the bytes it saved, by the rule of two.

`assert_agrees` takes a small case whole. `check_shape` takes a benchmark shape: the backend computes all of it, the reference one kv
head with its query heads at a time, which is exact because no scale spans heads; as many heads as asked, the first and the last of the
batch among them. The others must lie as far from unquantized attention as the checked ones do.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4mega.attention import AttentionProblem, SideInputs, tiles
from fp4mega.attention.call import Call
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.represent import represent
from fp4mega.attention.tiles import BackwardRows, ForwardRows, full_precision
from fp4mega.bench.shapes import Shape, Tensors
from fp4mega.kernels import Backend, Forward
from fp4mega.testing.assertions import assert_rule_of_two
from fp4mega.testing.cases import Case, Inputs

NOISE = 2.0**-11
"""Relative noise of scores and dP in the noisy reference: what FP8 accumulators of 13 bits and BF16 operands leave."""
HEAD_FACTOR, HEAD_FLOOR = 2.0, 0.02
"""An unchecked head may be this much further from unquantized attention than the worst checked one, plus this relL2."""


class Answer(NamedTuple):
    """Output, log-sum-exp and gradients of one evaluation; gradients None for a policy that only infers."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsink: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Which heads of a shape the reference checked, and what failed, in words; green when nothing did."""

    heads: tuple[tuple[int, int], ...]
    """(batch entry, kv head) of each."""
    total: int
    failure: str | None = None

    @property
    def green(self) -> bool:
        """True when every comparison held."""
        return self.failure is None

    def __str__(self) -> str:
        listed = ", ".join(f"{b}.{g}" for b, g in self.heads)
        scope = f"kv heads {listed} (batch entry.head) of {self.total} by the rule of two"
        return f"ok: {scope}" if self.green else f"FAILED: {self.failure}"


def trains(policy: AttentionPolicy) -> bool:
    """True when the policy is one that has a backward to time: Direct-P is for inference."""
    return policy.direct_p is None


def evaluate(
    backend: Backend, x: Inputs, case: Case, policy: AttentionPolicy
) -> tuple[Answer, Forward]:
    """Forward and, where the policy trains, backward of a backend on a case's inputs."""
    result = backend.forward(x.q, x.k, x.v, x.side, case.problem, policy)
    if not trains(policy):
        return Answer(result.out, result.lse), result
    inputs = kept(policy, x.q, x.k, x.v)
    gradients = backend.backward(x.dout, x.dlse, result, inputs, x.side, case.problem, policy)
    return Answer(result.out, result.lse, *gradients), result


def kept(
    policy: AttentionPolicy, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The caller's own tensors that backward asks for."""
    return (
        q if policy.saves_input("q") else None,
        k if policy.saves_input("k") else None,
        v if policy.saves_input("v") else None,
    )


def reference_answers(
    x: Inputs, case: Case, policy: AttentionPolicy, saved: tuple[Tensor, ...]
) -> tuple[Answer, Answer]:
    """The float64 answer on exactly the bytes a backend saved (the reference's come first in `saved`), and a noisy one.

    The noise: that of `NOISE`, the rounding of the output, and values that are decoded in float32.
    """
    side = replace(x.side, sink=None if x.side.sink is None else x.side.sink.double())
    call = Call(replace(case.problem, dtype=torch.float64), policy, side)

    def answer(decoded: torch.dtype, rounded: torch.dtype) -> Answer:
        values = _represented(x, case.problem, policy, saved, decoded)
        return _answer(call, values, x.dout, x.dlse, rounded)

    exact = answer(torch.float64, torch.float64)
    with _noisy_products():
        return exact, answer(torch.float32, case.dtype)


class Values(NamedTuple):
    """What the products see, float64, dense and in the reference's order of keys: q, k, the forward's v and the backward's."""

    q: Tensor
    k: Tensor
    v: Tensor
    v_bwd: Tensor


def _represented(
    x: Inputs | Tensors,
    problem: AttentionProblem,
    policy: AttentionPolicy,
    saved: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Values:
    """q, k, v as the policy represents them, decoded in `dtype` from saved bytes. A V that only the forward sees is encoded again."""
    side = x.side if isinstance(x, Inputs) else SideInputs()
    call = Call(replace(problem, dtype=dtype), policy, side)
    # A backend that only infers may save nothing; then there is nothing but the inputs to start from.
    stored = trains(policy) or bool(saved)
    if stored:
        q, k, v_bwd = call.restore(saved, (x.q, x.k, x.v))
        v = v_bwd
    if not stored or policy.backward_v != "v":
        encoded = call.encode(*call.enter(x.q, x.k, x.v))[1]
        v = encoded[2]
    if not stored:
        q, k, v_bwd = encoded[0], encoded[1], v
    return Values(q.double(), k.double(), v.double(), v_bwd.double())


def _answer(
    call: Call, values: Values, dout: Tensor, dlse: Tensor | None, rounded: torch.dtype
) -> Answer:
    """The reference's loops on represented values, with the output rounded to `rounded`."""
    policy, ops, key = call.policy, call.policy.operands, call.side.rounding_key
    with full_precision(dout.device):
        forward = ForwardRows(values.q, call.groups)
        forward.attend(call, values.k, values.v)
        out, lse, statistics = forward.finish(call)
        out = out.to(rounded).double()
        left = (call.leave_rows(out), call.leave_lse(lse))
        if not trains(policy):
            return Answer(*left)
        do = represent("do", ops["do"], call.enter_rows(dout.double()), call.dtype, key)
        gradient = [
            represent(name, ops[name], value, call.dtype, key)
            for name, value in (("q_bwd", values.q), ("k_bwd", values.k))
        ]
        upstream = None if dlse is None else call.enter_lse(dlse.double(), 0.0)
        used = statistics if policy.backward == "represented" else None
        rows = BackwardRows(call, values.q, gradient[0], do, out, lse, upstream, used)
        if policy.backward == "centered":
            rows.center(call, values.k, values.v_bwd)
        dk, dv = rows.differentiate(call, values.k, gradient[1], values.v_bwd)
        dq, dsink = rows.finish(call)
    return Answer(*left, call.leave_rows(dq), call.leave_keys(dk), call.leave_keys(dv), dsink)


@contextmanager
def _noisy_products() -> Iterator[None]:
    """Within it the reference's scores and dP carry relative noise of `NOISE`, the same in forward and backward."""
    original = tiles._fold_t

    def noisy(a: Tensor, b: Tensor) -> Tensor:
        product = original(a, b)
        generator = torch.Generator(device=product.device).manual_seed(0)
        noise = torch.randn(product.shape, generator=generator, device=product.device)
        return product * (1 + NOISE * noise)

    tiles._fold_t = noisy
    try:
        yield
    finally:
        tiles._fold_t = original


def _compare(got: Answer, exact: Answer, noisy: Answer, name: str) -> None:
    for field, value, wanted, noise in zip(Answer._fields, got, exact, noisy, strict=True):
        if value is not None and wanted is not None and noise is not None:
            assert_rule_of_two(value, wanted, noise, dtype=value.dtype, name=f"{name} {field}")


def assert_agrees(backend: Backend, case: Case, policy: AttentionPolicy, device: str) -> None:
    """Raise AssertionError unless every result of the backend obeys the rule of two on this case."""
    x = case.make(device=device)
    got, result = evaluate(backend, x, case, policy)
    _compare(got, *reference_answers(x, case, policy, result.saved), name=str(case))


def chosen_heads(shape: Shape, count: int) -> tuple[tuple[int, int], ...]:
    """`count` of the shape's (batch entry, kv head) pairs, evenly spread from the first to the last."""
    total = shape.batch * shape.kv_heads
    count = min(count, total)
    picked = [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
    return tuple(divmod(i, shape.kv_heads) for i in picked)


def check_shape(
    backend: Backend, shape: Shape, policy: AttentionPolicy, device: str, *, heads: int = 2
) -> Verdict:
    """Whether the backend is right on this very shape; see the module. `heads` kv heads go through the reference.

    Raises ValueError for a policy with a scale that spans heads, which no single head can be checked under.
    """
    for name, operand in policy.operands.items():
        if operand.scope == "tensor":
            raise ValueError(f"policy {policy.name!r}: {name}={operand}: its scale spans all heads")
    picked = chosen_heads(shape, heads)
    verdict = Verdict(picked, shape.batch * shape.kv_heads)
    problem, x = shape.problem, shape.tensors(device, seed=1)
    result = backend.forward(x.q, x.k, x.v, SideInputs(), problem, policy)
    got = Answer(result.out, result.lse)
    if trains(policy):
        inputs = kept(policy, x.q, x.k, x.v)
        gradients = backend.backward(x.dout, None, result, inputs, SideInputs(), problem, policy)
        got = Answer(result.out, result.lse, *gradients)
    try:
        # One line a comparison is for tests; here the verdict is the line.
        with redirect_stdout(io.StringIO()):
            _check_heads(got, x, shape, policy, result.saved, picked)
        _check_others(got, x, shape, picked)
    except AssertionError as error:
        return replace(verdict, failure=str(error).splitlines()[0])
    return verdict


def _check_heads(
    got: Answer,
    x: Tensors,
    shape: Shape,
    policy: AttentionPolicy,
    saved: tuple[Tensor, ...],
    picked: tuple[tuple[int, int], ...],
) -> None:
    """Rule of two on each picked kv head."""
    group = shape.heads // shape.kv_heads
    single = replace(shape.problem, batch=1, num_heads=group, num_kv_heads=1, dtype=torch.float64)
    call = Call(single, policy, SideInputs())
    decoded = {
        dtype: _represented(x, shape.problem, policy, saved, dtype)
        for dtype in (torch.float64, torch.float32)
    }
    for b, g in picked:

        def cut(t: Tensor, b: int = b, g: int = g) -> Tensor:
            """Batch entry b, and kv head g or its query heads, of a [B, S, heads, D] tensor."""
            heads = t.shape[2] // shape.kv_heads
            return t[b : b + 1, :, g * heads : (g + 1) * heads]

        values = {dtype: Values(*map(cut, tensors)) for dtype, tensors in decoded.items()}
        exact = _answer(call, values[torch.float64], cut(x.dout), None, torch.float64)
        with _noisy_products():
            noisy = _answer(call, values[torch.float32], cut(x.dout), None, x.q.dtype)
        lse = got.lse[b : b + 1, g * group : (g + 1) * group]
        part = Answer(
            cut(got.out), lse, *(None if t is None else cut(t) for t in (got.dq, got.dk, got.dv))
        )
        _compare(part, exact, noisy, name=f"{shape} {policy.name} head {b}.{g}")


def _check_others(
    got: Answer, x: Tensors, shape: Shape, picked: tuple[tuple[int, int], ...]
) -> None:
    """Every head lies about as far from unquantized attention as the checked ones: inputs are alike, so errors are too."""
    plain = unquantized(x, causal=shape.causal)
    for field in ("out", "dq", "dk", "dv"):
        value = getattr(got, field)
        if value is None:
            continue
        errors = head_errors(value, getattr(plain, field), shape.kv_heads)
        allowed = HEAD_FACTOR * max(float(errors[b, g]) for b, g in picked) + HEAD_FLOOR
        # Negated, so that a NaN is a failure.
        wrong = ~(errors <= allowed)
        if wrong.any():
            b, g = (int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{shape} {field}: kv head {b}.{g} has relL2 {float(errors[b, g]):.3g} against unquantized attention, "
                f"allowed {allowed:.3g} ({int(wrong.sum())} of {errors.numel()} heads)"
            )


def unquantized(x: Tensors, *, causal: bool) -> Answer:
    """Attention of the tensors as they are, by torch's own scaled_dot_product_attention in their dtype; lse is left empty."""
    q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v))
    group = q.shape[1] // k.shape[1]
    # In float32 torch groups heads by way of the whole score matrix only.
    wide = x.q.dtype == torch.float32
    keys, values = (t.repeat_interleave(group, 1) if wide else t for t in (k, v))
    out = F.scaled_dot_product_attention(
        q, keys, values, is_causal=causal, enable_gqa=group > 1 and not wide
    )
    gradients = torch.autograd.grad(out, (q, k, v), x.dout.transpose(1, 2))
    return Answer(
        out.detach().transpose(1, 2), x.q.new_empty(0), *(t.transpose(1, 2) for t in gradients)
    )


def head_errors(value: Tensor, wanted: Tensor, kv_heads: int) -> Tensor:
    """relL2 of every batch entry and kv head, float32 [B, G], of [B, S, heads, D] tensors."""

    def squares(x: Tensor) -> Tensor:
        return x.unflatten(2, (kv_heads, -1)).square().sum(dim=(1, 3, 4))

    return (squares(value.float() - wanted.float()) / squares(wanted.float())).sqrt()
