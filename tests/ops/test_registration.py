"""The custom ops as torch sees them: fakes, compile, what autograd keeps, and the modes around a call."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fp4mega.attention
from fp4mega import attention_func, get_policy, list_policies
from fp4mega.ops.registration import Options, attention_backward, attention_forward
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    Case,
    Inputs,
    assert_bitwise,
)

POLICY = "nvfp4_qk_fp8_pv"
STOCHASTIC = "stochastic"
"""Registered for every test here by conftest.py."""


def run(case: Case, inputs: Inputs, function=attention_func) -> list[Tensor]:
    """out, lse and every gradient."""
    leaves = [*inputs[:3]] + ([] if inputs.side.sink is None else [inputs.side.sink])
    out, lse = function(*inputs[:3], return_lse=True, **case.arguments(inputs.side))
    # An empty row has lse -inf; its upstream gradient must not matter.
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))]


def assert_same(mine: list[Tensor], expected: list[Tensor]) -> None:
    for name, x, ref in zip(
        ("out", "lse", "dq", "dk", "dv", "dsink"), mine, expected, strict=False
    ):
        assert_bitwise(x, ref, name=name)
    assert len(mine) == len(expected)


def op_arguments(case: Case, inputs: Inputs) -> tuple:
    problem = case.problem
    options = Options(
        problem.softmax_scale,
        case.causal,
        *case.window,
        problem.max_seqlen_q,
        problem.max_seqlen_k,
        case.policy,
        "auto",
        False,
    )
    return (*inputs[:3], *inputs.side.as_tuple(), *options)


def backward_arguments(case: Case, inputs: Inputs, forward: tuple) -> tuple:
    out, lse, saved = forward
    policy = get_policy(case.policy)
    kept = [x if policy.saves_input(n) else None for n, x in zip("qkv", inputs[:3], strict=True)]
    shapes = [list(x.shape) for x in inputs[:3]]
    return (
        inputs.dout,
        inputs.dlse,
        out,
        lse,
        saved,
        *kept,
        *shapes,
        *op_arguments(case, inputs)[3:],
    )


def layout_of(x: Tensor) -> tuple:
    return tuple(x.shape), x.dtype, x.stride()


@pytest.mark.parametrize("policy", list_policies())
@pytest.mark.parametrize(
    "case",
    [
        Case(
            seqlen_q=37,
            seqlen_k=45,
            num_heads=6,
            head_dim=40,
            head_dim_v=24,
            sink=True,
            dtype=torch.bfloat16,
        ),
        Case(
            lengths_q=(5, 0, 36), lengths_k=(9, 3, 33), causal="bottom_right", dtype=torch.float64
        ),
    ],
    ids=["dense", "packed"],
)
def test_fake_outputs_are_the_real_ones_without_data(case: Case, policy: str) -> None:
    case = case.replace(policy=policy)
    inputs = case.make()
    arguments = op_arguments(case, inputs)
    if fp4mega.attention.explain(case.problem, get_policy(policy)) is not None:
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(NotImplementedError):
            attention_forward(*arguments)
        return
    real = attention_forward(*arguments)
    gradients = attention_backward(*backward_arguments(case, inputs, real))
    with FakeTensorMode() as mode:

        def fake(x):
            return (
                mode.from_tensor(x)
                if isinstance(x, Tensor)
                else [fake(y) for y in x]
                if isinstance(x, list) and x and isinstance(x[0], Tensor)
                else x
            )

        fake_forward = attention_forward(*map(fake, arguments))
        fake_gradients = attention_backward(*map(fake, backward_arguments(case, inputs, real)))
    for mine, expected in (
        ([*fake_forward[:2], *fake_forward[2]], [*real[:2], *real[2]]),
        (fake_gradients, gradients),
    ):
        assert [layout_of(x) for x in mine] == [layout_of(x) for x in expected]
    outputs = [*real[:2], *real[2], *gradients]
    storages = [x.untyped_storage().data_ptr() for x in (*outputs, *inputs[:3]) if x.numel()]
    assert len(set(storages)) == len(storages), "outputs of a custom op own their memory"


@pytest.mark.parametrize("policy", ["bf16", POLICY])
def test_opcheck(policy: str) -> None:
    case = Case(policy=policy, batch=1, seqlen_q=5, seqlen_k=7, head_dim=16, sink=True)
    inputs = case.make(requires_grad=True)
    arguments = op_arguments(case, inputs)
    torch.library.opcheck(torch.ops.fp4mega.attention_forward.default, arguments)
    out, lse, saved = attention_forward(*arguments)
    assert out.requires_grad
    assert lse.requires_grad
    assert not any(x.requires_grad for x in saved), "gradients run through out and lse only"
    inputs = case.make()
    forward = attention_forward(*op_arguments(case, inputs))
    torch.library.opcheck(
        torch.ops.fp4mega.attention_backward.default, backward_arguments(case, inputs, forward)
    )


@pytest.mark.parametrize(
    "case",
    [
        SHAPE_CASES[0].replace(policy="bf16", dtype=torch.bfloat16),
        SHAPE_CASES[0].replace(policy=POLICY, dtype=torch.bfloat16),
        MASK_CASES[6].replace(policy="nvfp4_qk_mxfp4_pv-paper"),
        MASK_CASES[3].replace(policy=STOCHASTIC),
        PACKED_CASES[1].replace(policy=POLICY),
        LAYOUT_CASES[0].replace(policy=POLICY),
    ],
    ids=str,
)
def test_compiled_equals_eager(case: Case) -> None:
    torch.compiler.reset()
    inputs = case.make(requires_grad=True)
    compiled = torch.compile(attention_func, fullgraph=True, backend="aot_eager")
    assert_same(run(case, inputs, compiled), run(case, inputs))


def test_compiled_with_inductor_between_other_ops() -> None:
    torch.compiler.reset()
    case = Case(policy=POLICY, seqlen_q=40, seqlen_k=40, dtype=torch.bfloat16)
    inputs = case.make(requires_grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_func(q + q, k, v, policy=POLICY, causal=True).flatten(2) * 2

    def with_gradients(function) -> list[Tensor]:
        out = function(*inputs[:3])
        return [out, *torch.autograd.grad(out, inputs[:3], inputs.dout.flatten(2))]

    expected = with_gradients(layer)
    for x, ref in zip(with_gradients(torch.compile(layer, fullgraph=True)), expected, strict=True):
        assert_bitwise(x, ref, name="inductor")


def test_compiled_once_for_all_lengths() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention_func, fullgraph=True, backend="aot_eager")
    for length in (40, 50, 61, 77):
        case = Case(policy=POLICY, seqlen_q=length, seqlen_k=length + 9, causal="bottom_right")
        inputs = case.make(requires_grad=True)
        assert_same(run(case, inputs, compiled), run(case, inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, (
        "one static graph, one dynamic"
    )


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="torch 2.11's compiler cannot take a frozen dataclass as an argument; names work",
)
def test_compiled_function_follows_the_policy_object() -> None:
    torch.compiler.reset()
    inputs = Case(seqlen_q=40, seqlen_k=40).make()
    compiled = torch.compile(attention_func, fullgraph=True, backend="aot_eager")
    for base in ("bf16", POLICY, "mxfp4_qk_fp8_pv"):
        policy = dataclasses.replace(get_policy(base), name=f"test_registration_{base}")
        out = compiled(*inputs[:3], policy=policy)
        assert_bitwise(out, attention_func(*inputs[:3], policy=base), name=base)


@pytest.mark.parametrize(
    "policy", ["exact", "bf16", POLICY, "nvfp4_qk_mxfp4_pv-paper", "direct_p_fast"]
)
def test_ops_add_nothing_to_the_reference(policy: str) -> None:
    case = SHAPE_CASES[0].replace(policy=policy, dtype=torch.bfloat16)
    inputs = case.make(requires_grad=True)
    plain = [x.detach() for x in inputs[:3]]
    rules, problem = get_policy(policy), case.problem
    forward = fp4mega.attention.forward(*plain, inputs.side, problem, rules)
    kept = tuple(x if rules.saves_input(n) else None for n, x in zip("qkv", plain, strict=True))
    gradients = fp4mega.attention.backward(
        inputs.dout,
        inputs.dlse,
        fp4mega.attention.Saved(*forward),
        kept,
        inputs.side,
        problem,
        rules,
    )
    assert_same(run(case, inputs), [*forward[:2], *gradients[:3]])


@contextmanager
def recorded_saves() -> Iterator[list[Tensor]]:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def test_saved_bytes_a_token() -> None:
    """The figures in docs/functional.md: Llama 3 8B's attention, 32 query heads on 8 kv heads of 128."""
    tokens, heads, kv_heads, dim = 64, 32, 8, 128
    case = Case(
        batch=1,
        seqlen_q=tokens,
        seqlen_k=tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=torch.bfloat16,
    )
    inputs = case.make(requires_grad=True)
    own = {x.untyped_storage().data_ptr() for x in inputs[:3]}
    four_bits = dim * 9 // 16  # 4-bit codes and one E4M3 scale for 16 of them
    out, lse = heads * dim * 2, heads * 4
    expected = {
        "bf16": (heads + 2 * kv_heads) * dim * 2 + out + lse,
        "nvfp4_qk_fp8_pv-paper": (heads + kv_heads) * four_bits + kv_heads * dim + out + lse,
        # The rule `represented` also keeps the row maximum and the normalizer.
        POLICY: (heads + kv_heads) * four_bits + kv_heads * dim + out + 3 * lse,
    }
    assert expected == {"bf16": 20608, "nvfp4_qk_fp8_pv-paper": 12224, POLICY: 12480}
    for policy, a_token in expected.items():
        with recorded_saves() as saved:
            result = attention_func(*inputs[:3], policy=policy, causal=True)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        scales = 0 if policy == "bf16" else 4 * (heads + 2 * kv_heads)  # one FP32 scale a head
        assert sum(storages.values()) == a_token * tokens + scales, policy
        assert result.data_ptr() in storages, "out is the caller's own, not a copy"
        assert (own <= storages.keys()) == (policy == "bf16"), "a quantized input is not kept"


def test_compiled_forward_saves_the_same_bytes() -> None:
    torch.compiler.reset()
    inputs = Case(seqlen_q=64, seqlen_k=64, dtype=torch.bfloat16).make(requires_grad=True)
    compiled = torch.compile(attention_func, fullgraph=True, backend="aot_eager")
    with recorded_saves() as eager:
        attention_func(*inputs[:3], policy=POLICY)
    out = compiled(*inputs[:3], policy=POLICY)
    kept = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert sorted((tuple(x.shape), str(x.dtype)) for x in kept) == sorted(
        (tuple(x.shape), str(x.dtype)) for x in eager
    )


def test_nothing_is_kept_without_gradients() -> None:
    inputs = Case(policy=POLICY).make(requires_grad=True)
    expected = attention_func(*inputs[:3])
    with recorded_saves() as saved:
        with torch.no_grad():
            no_grad = attention_func(*inputs[:3])
        with torch.inference_mode():
            inference = attention_func(*inputs[:3])
        detached = attention_func(*(x.detach() for x in inputs[:3]))
    assert not saved
    assert inference.is_inference()
    assert no_grad.grad_fn is None
    for out in (no_grad, inference, detached):
        assert_bitwise(out, expected, name="out")


@pytest.mark.parametrize("policy", [POLICY, STOCHASTIC])
def test_recompute_gives_the_same_bits(policy: str) -> None:
    case = Case(policy=policy, seqlen_q=70, seqlen_k=70, causal="top_left", dtype=torch.bfloat16)
    inputs = case.make(requires_grad=True)

    def recomputed(q: Tensor, k: Tensor, v: Tensor, **arguments):
        return checkpoint(attention_func, q, k, v, use_reentrant=False, **arguments)

    assert_same(run(case, inputs, recomputed), run(case, inputs))


def test_the_rounding_key_decides_the_bits() -> None:
    case = Case(policy=STOCHASTIC, seqlen_q=70, seqlen_k=70)
    inputs = case.make()

    def out(key: int) -> Tensor:
        return attention_func(*inputs[:3], policy=STOCHASTIC, rounding_key=torch.tensor(key))

    assert_bitwise(out(1), out(1), name="same key")
    assert not torch.equal(out(1), out(2))


def test_autocast_changes_no_dtype() -> None:
    case = Case(policy=POLICY)
    inputs = case.make(requires_grad=True)
    expected = run(case, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = run(case, inputs)
    assert_same(mine, expected)


@pytest.mark.parametrize(
    "case",
    [
        *LAYOUT_CASES,
        MASK_CASES[3],
        MASK_CASES[6],
        PACKED_CASES[1],
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["bf16", POLICY])
def test_inputs_are_never_written_to(case: Case, policy: str) -> None:
    case = case.replace(policy=policy)
    inputs = case.make(requires_grad=True)
    tensors = [x for x in (*inputs[:5], *inputs.side.as_tuple()) if x is not None]
    before = [x.detach().clone() for x in tensors]
    versions = [x._version for x in tensors]
    run(case, inputs)
    for x, expected, version in zip(tensors, before, versions, strict=True):
        assert_bitwise(x, expected, name="input")
        assert x._version == version


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)
def test_strides_do_not_change_the_answer(case: Case) -> None:
    case = case.replace(policy=POLICY)
    inputs = case.make(requires_grad=True)
    dense = Inputs(
        *(x.detach().contiguous().requires_grad_() for x in inputs[:3]),
        inputs.dout.contiguous(),
        inputs.dlse.contiguous(),
        inputs.side,
    )
    assert_same(run(case, inputs), run(case, dense))


def test_one_tensor_in_two_roles() -> None:
    """k and v the same leaf, and q used again outside: gradients add up."""
    inputs = Case(policy="exact", num_heads=2, seqlen_q=20, seqlen_k=20, dtype=torch.float64).make()
    q, k = (x.clone().requires_grad_() for x in inputs[:2])
    (attention_func(q, k, k, policy="exact").sum() + (q * 3).sum()).backward()
    separate = [x.detach().clone().requires_grad_() for x in (q, k, k)]
    attention_func(*separate, policy="exact").sum().backward()
    assert_bitwise(q.grad, separate[0].grad + 3, name="dq")
    assert_bitwise(k.grad, separate[1].grad + separate[2].grad, name="dk")


def test_only_lse_in_the_loss() -> None:
    case = Case(policy=POLICY, seqlen_q=20, seqlen_k=20)
    inputs = case.make(requires_grad=True)
    _, lse = attention_func(*inputs[:3], return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, inputs[:3], inputs.dlse)
    expected = run(case, inputs._replace(dout=torch.zeros_like(inputs.dout)))[2:]
    assert_same([dq, dk, dv], expected)
    assert dq.any()
    assert not dv.any()


def test_backward_twice_through_a_kept_graph() -> None:
    inputs = Case(policy=POLICY).make(requires_grad=True)
    out = attention_func(*inputs[:3])
    first = torch.autograd.grad(out, inputs[:3], inputs.dout, retain_graph=True)
    second = torch.autograd.grad(out, inputs[:3], inputs.dout)
    assert_same(list(second), list(first))


def test_a_sink_in_bfloat16_gets_a_gradient_in_bfloat16() -> None:
    torch.compiler.reset()
    case = Case(policy=POLICY, dtype=torch.bfloat16, sink=True)
    inputs = case.make(requires_grad=True)
    sink = inputs.side.sink.detach().bfloat16().requires_grad_()
    gradients = []
    for function in (
        attention_func,
        torch.compile(attention_func, fullgraph=True, backend="aot_eager"),
    ):
        out = function(*inputs[:3], policy=POLICY, sink=sink)
        gradients += torch.autograd.grad(out, sink, inputs.dout)
    assert gradients[0].any()
    assert_bitwise(gradients[0], gradients[1], name="dsink")
    assert gradients[0].dtype == torch.bfloat16
