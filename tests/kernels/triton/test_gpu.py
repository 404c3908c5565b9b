"""The Triton kernels on a GPU: bytes bitwise, results by the rule of two, repeatability, graphs, streams, non-finite values."""

import pytest
import torch

from fp4mega import attention_func
from fp4mega.attention import AttentionPolicy, get_policy
from fp4mega.bench.gate import assert_agrees, evaluate
from fp4mega.testing import (
    LAYOUT_CASES,
    MASK_CASES,
    PACKED_CASES,
    SHAPE_CASES,
    VALUE_CASES,
    Case,
)
from tests.kernels.triton.harness import (
    BACKEND,
    QUICK,
    TRAINING,
    assert_saved_bytes,
    half,
    policies,
)
from tests.kernels.triton.harness import POLICIES as ALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICIES = ("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper", "bf16")


def check(case: Case, policy: AttentionPolicy) -> None:
    device = torch.device("cuda")
    assert BACKEND.explain(case.problem, policy, device) is None
    assert_agrees(BACKEND, case, policy, "cuda")


@half(SHAPE_CASES)
@policies(*POLICIES)
def test_shapes(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(MASK_CASES)
@policies("nvfp4_qk_fp8_pv", "bf16")
def test_masks(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(PACKED_CASES)
@policies("nvfp4_qk_fp8_pv", "bf16")
def test_packed_sequences(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(LAYOUT_CASES)
@policies("mxfp4_qk_fp8_pv", "bf16")
def test_layouts(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@half(VALUE_CASES)
@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
def test_values(case: Case, policy: AttentionPolicy) -> None:
    check(case, policy)


@policies(*POLICIES, "mxfp4_qk_fp8_pv-paper")
def test_float16(policy: AttentionPolicy) -> None:
    check(QUICK.replace(dtype=torch.float16), policy)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize(
    "values", ["randn", "outlier_channels", "zero_blocks", "denormals", "huge_v"]
)
def test_saved_bytes_are_the_formats_bytes(
    policy: AttentionPolicy, head_dim: int, values: str
) -> None:
    """Against `quantize` on the CPU, from strided views, with odd lengths."""
    case = QUICK.replace(
        head_dim=head_dim, seqlen_q=203, seqlen_k=203, values=values, layout="fused_qkv"
    )
    assert_saved_bytes(case, policy)


@policies("mxfp4_qk_fp8_pv")
@pytest.mark.parametrize("spread", [2.0**-6, 2.0**-20])
def test_mxfp4_heads_wider_than_e4m3_run_in_bf16(policy: AttentionPolicy, spread: float) -> None:
    """One head in which blocks lie 20 octaves apart, beside heads that FP8 holds: all obey the same rule."""
    case = QUICK.replace(num_kv_heads=4)
    x = case.make(device="cuda")
    x.k[:, :, 1, :32] *= spread
    x.q[:, :, 1, 32:] *= 64

    class Spread(Case):
        def make(self, **_):
            return x

    check(Spread(**{f: getattr(case, f) for f in case.__dataclass_fields__}), policy)


LONG = QUICK.replace(seqlen_q=515, seqlen_k=515, num_heads=8, head_dim=128)
REPEATED = {
    "causal": LONG,
    "window_sink_padding": LONG.replace(
        causal="none", window=(200, 100), sink=True, mask="padding_all"
    ),
    "packed": LONG.replace(lengths_q=(200, 0, 315), lengths_k=(330, 40, 1)),
    "wide": LONG.replace(head_dim=256, causal="top_left"),
}


def repeated(name: str, policy: AttentionPolicy) -> bool:
    return name == "causal" or policy.name in POLICIES


@pytest.mark.parametrize(
    ("case", "policy"),
    [(c, get_policy(p)) for n, c in REPEATED.items() for p in ALL if repeated(n, get_policy(p))],
    ids=[f"{n}-{p}" for n in REPEATED for p in ALL if repeated(n, get_policy(p))],
)
def test_twenty_runs_give_the_same_bits(case: Case, policy: AttentionPolicy) -> None:
    """While another stream keeps the GPU busy, so that programs start in another order every time."""
    x = case.make(device="cuda")
    if BACKEND.explain(case.problem, policy, torch.device("cuda")) is not None:
        pytest.skip(BACKEND.explain(case.problem, policy, torch.device("cuda")))
    first, forward = evaluate(BACKEND, x, case, policy)
    torch.cuda.synchronize()
    noise, busy = torch.cuda.Stream(), torch.randn(1500, 1500, device="cuda")
    for repeat in range(20):
        if repeat % 2:
            with torch.cuda.stream(noise):
                for _ in range(1 + repeat):
                    busy @ busy
        again, forward_again = evaluate(BACKEND, x, case, policy)
        for name, a, b in zip(first._fields, again, first, strict=True):
            if a is not None:
                assert torch.equal(a, b), f"{name} in repeat {repeat}"
        for i, (a, b) in enumerate(zip(forward.saved, forward_again.saved, strict=True)):
            assert torch.equal(a, b), f"saved[{i}] in repeat {repeat}"


@policies(*ALL)
def test_a_side_stream_and_a_captured_graph_give_the_same_bits(policy: AttentionPolicy) -> None:
    x, other = QUICK.make(device="cuda"), QUICK.replace(seed=1).make(device="cuda")
    if BACKEND.explain(QUICK.problem, policy, torch.device("cuda")) is not None:
        pytest.skip(BACKEND.explain(QUICK.problem, policy, torch.device("cuda")))
    want, _ = evaluate(BACKEND, x, QUICK, policy)
    want_other, _ = evaluate(BACKEND, other, QUICK, policy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got, _ = evaluate(BACKEND, x, QUICK, policy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = evaluate(BACKEND, x, QUICK, policy)
    for static, fresh in zip(x[:5], other[:5], strict=True):
        static.copy_(fresh)
    for _ in range(3):
        graph.replay()
    for name, a, b, c, d in zip(want._fields, got, want, captured, want_other, strict=True):
        if a is not None:
            assert torch.equal(a, b), name
            assert torch.equal(c, d), name


@policies(*(n for n in TRAINING if n.startswith("mxfp4_qk")))
def test_a_graph_decides_anew_which_heads_run_in_bf16(policy: AttentionPolicy) -> None:
    """Captured when E4M3 holds every head, replayed when it holds one of them not, and back."""
    case = QUICK.replace(num_kv_heads=4)
    x, plain, spread = (case.make(device="cuda") for _ in range(3))
    spread.k[:, :, 1, :32] *= 2.0**-20
    spread.q[:, :, 1, 32:] *= 64
    want = {id(y): evaluate(BACKEND, y, case, policy)[0] for y in (plain, spread)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = evaluate(BACKEND, x, case, policy)
    for y in (spread, plain, spread):
        for static, fresh in zip(x[:5], y[:5], strict=True):
            static.copy_(fresh)
        graph.replay()
        for name, a, b in zip(captured._fields, captured, want[id(y)], strict=True):
            if a is not None:
                assert torch.equal(a, b), name


def differentiate(case: Case, x, policy: str) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    options = case.replace(policy=policy).arguments(x.side)
    out, lse = attention_func(*leaves, return_lse=True, backend="triton", **options)
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad((out, lse), leaves, (x.dout, x.dlse)),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_autograd_in_a_graph_and_on_two_streams_at_once(policy: str) -> None:
    """`attention_func` and its backward: captured whole, and with two calls in flight whose memory the allocator reuses."""
    x, other = QUICK.make(device="cuda"), QUICK.replace(seed=1).make(device="cuda")
    want, want_other = (differentiate(QUICK, y, policy) for y in (x, other))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(5):
        for i, (stream, y) in enumerate(zip(streams, (x, other), strict=True)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                got[i] = differentiate(QUICK, y, policy)
    torch.cuda.synchronize()
    static = [t.clone() for t in (*x[:3], x.dout, x.dlse)]
    replaced = x._replace(q=static[0], k=static[1], v=static[2], dout=static[3], dlse=static[4])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate(QUICK, replaced, policy)
    for t, fresh in zip(static, (*other[:3], other.dout, other.dlse), strict=True):
        t.copy_(fresh)
    graph.replay()
    for a, b, c, d, e in zip(got[0], want, got[1], want_other, captured, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(c, d)
        assert torch.equal(e, d)


@policies("nvfp4_qk_fp8_pv", "mxfp4_qk_fp8_pv")
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_stays_in_its_head(
    policy: AttentionPolicy, operand: str, bad: float
) -> None:
    """Kv head 0 of batch entry 0 turns NaN where the reference does; every other head keeps its bits."""
    x = QUICK.make(device="cuda")
    clean, _ = evaluate(BACKEND, x, QUICK, policy)
    getattr(x, operand)[0, 50, 0, 3] = bad
    got, _ = evaluate(BACKEND, x, QUICK, policy)
    from fp4mega.attention import forward

    want = forward(x.q, x.k, x.v, x.side, QUICK.problem, policy)[0]
    assert torch.equal(got.out.isnan(), want.isnan())
    assert got.out.isnan().any()
    assert got.out[0, :, 2:].equal(clean.out[0, :, 2:])
    assert got.out[1].equal(clean.out[1])
    for name in ("dq", "dk", "dv"):
        assert getattr(got, name)[1].equal(getattr(clean, name)[1]), name


@policies("nvfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper", "bf16")
def test_zero_gradient_is_exactly_zero(policy: AttentionPolicy) -> None:
    x = QUICK.make(device="cuda")
    x.dout.zero_()
    x.dlse.zero_()
    got, _ = evaluate(BACKEND, x, QUICK, policy)
    for gradient in (got.dq, got.dk, got.dv):
        assert not gradient.any()


def test_offsets_past_two_to_the_31() -> None:
    """2.15 G elements in q: the last batch entry is that of a call with it alone."""
    policy = get_policy("nvfp4_qk_fp8_pv")
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1026, 512, 32, 128)
    q = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    k = torch.randn((1026, 512, 1, 128), generator=generator, device="cuda", dtype=torch.bfloat16)
    case = Case(
        batch=1026, seqlen_q=512, seqlen_k=512, num_heads=32, num_kv_heads=1, head_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    side = QUICK.make().side
    whole = BACKEND.forward(q, k, k, side, case.problem, policy)
    whole_gradients = BACKEND.backward(
        q, None, whole, (None, None, None), side, case.problem, policy
    )
    last = case.replace(batch=1)
    part = BACKEND.forward(q[-1:], k[-1:], k[-1:], side, last.problem, policy)
    gradients = BACKEND.backward(q[-1:], None, part, (None, None, None), side, last.problem, policy)
    assert torch.equal(whole.out[-1:], part.out)
    for a, b in zip(whole_gradients[:3], gradients[:3], strict=True):
        assert torch.equal(a[-1:], b)


@policies(*(n for n in TRAINING if n != "bf16"))
def test_a_backward_in_pieces_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, policy: AttentionPolicy
) -> None:
    """One query head a kv head: however kv heads and rows are cut, sums over rows are in the same order."""
    from fp4mega.kernels.triton import backward

    case = LONG.replace(num_heads=4, num_kv_heads=4, seqlen_q=1000, seqlen_k=1000)
    x = case.make(device="cuda")
    if BACKEND.explain(case.problem, policy, torch.device("cuda")) is not None:
        pytest.skip(BACKEND.explain(case.problem, policy, torch.device("cuda")))
    whole, _ = evaluate(BACKEND, x, case, policy)
    monkeypatch.setattr(backward, "LEAST_PROGRAMS", 1)
    for limit in (4 << 20, 1):
        monkeypatch.setattr(backward, "WORKSPACE_BYTES", limit)
        cut, _ = evaluate(BACKEND, x, case, policy)
        for name, a, b in zip(whole._fields, cut, whole, strict=True):
            if a is not None:
                assert torch.equal(a, b), f"{name} in pieces of {limit} bytes"


def test_a_long_sequence_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """131072 rows of one head, whose codes are 16 GiB at once: the bits of another cut, and the first rows of a short sequence."""
    from fp4mega.kernels.triton import backward

    policy = get_policy("mxfp4_qk_fp8_pv")
    case = Case(
        batch=1, seqlen_q=131072, seqlen_k=131072, num_heads=1, num_kv_heads=1, head_dim=128, causal="top_left", dtype=torch.bfloat16,
    )  # fmt: skip
    x = case.make(device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got, _ = evaluate(BACKEND, x, case, policy)
    assert torch.cuda.max_memory_allocated() - before < 5 << 30
    monkeypatch.setattr(backward, "LEAST_PROGRAMS", 50)
    other, _ = evaluate(BACKEND, x, case, policy)
    for name in ("dq", "dk", "dv"):
        assert getattr(got, name).isfinite().all()
        assert getattr(got, name).any()
        assert torch.equal(getattr(got, name), getattr(other, name)), name
    del other
    short = case.replace(seqlen_q=4096, seqlen_k=4096)
    first = x._replace(
        q=x.q[:, :4096], k=x.k[:, :4096], v=x.v[:, :4096], dout=x.dout[:, :4096], dlse=x.dlse[..., :4096]
    )  # fmt: skip
    want, _ = evaluate(BACKEND, first, short, policy)
    error = (got.dq[:, :4096].double() - want.dq.double()).norm() / want.dq.double().norm()
    assert error < 1e-2
