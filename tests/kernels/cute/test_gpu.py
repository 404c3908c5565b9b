"""On a Blackwell GPU (GB200, B200): the same cases as the interpreter's and larger ones, repeatability, `auto`. Never run so far."""

import pytest
import torch

from fp4mega import attention_func
from fp4mega.attention.policy import get_policy
from fp4mega.bench.gate import Answer, reference_answers
from fp4mega.kernels import get_backend, select_backend
from fp4mega.kernels.cute import operands, publishing
from fp4mega.testing import Case
from fp4mega.testing.assertions import assert_bitwise, assert_rule_of_two
from fp4mega.testing.cases import VALUES
from tests.kernels.cute.harness import BASE
from tests.kernels.cute.matrix import EXTREME, INFERENCE, LENGTHS, MASKS, TRAINING, of_lengths
from tests.kernels.cute.test_publish import hard_rows


def _on_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _on_blackwell(), reason="needs a Blackwell GPU (sm_100)"),
]
BACKEND = get_backend("cute_sm100")
DEVICE = torch.device("cuda")
LONG = BASE.replace(batch=4, seqlen_q=2048, seqlen_k=2048, num_heads=8, num_kv_heads=2)


def check(case: Case) -> None:
    policy = get_policy(case.policy)
    assert BACKEND.explain(case.problem, policy, DEVICE) is None
    x = case.make(device="cuda")
    forward = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy)
    exact, noisy = reference_answers(x, case, policy, forward.saved)
    got = Answer(forward.out, forward.lse)
    for name in ("out", "lse"):
        value, wanted, noise = (getattr(a, name) for a in (got, exact, noisy))
        assert_rule_of_two(value, wanted, noise, dtype=value.dtype, name=f"{case} {name}")


@pytest.mark.parametrize("policy", [*TRAINING, *INFERENCE])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(policy: str, lengths: tuple[int, int]) -> None:
    check(of_lengths(lengths, policy=policy))


@pytest.mark.parametrize("case", MASKS, ids=str)
@pytest.mark.parametrize("policy", TRAINING[:2])
def test_masks(case: Case, policy: str) -> None:
    check(case.replace(policy=policy))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("policy", [*TRAINING[:2], *INFERENCE])
def test_values(policy: str, values: str) -> None:
    if policy in INFERENCE[:2] and values in EXTREME:
        pytest.skip("scores of some hundreds leave float32 under this policy's reference")
    causal = "none" if policy in INFERENCE else "bottom_right"
    check(BASE.replace(policy=policy, values=values, causal=causal, seqlen_k=260))


@pytest.mark.parametrize("policy", [*TRAINING[:2], *INFERENCE])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_more_tiles_than_multiprocessors(policy: str, causal: str) -> None:
    if causal != "none" and policy in INFERENCE[1:]:
        pytest.skip("permuted keys have no position")
    check(LONG.replace(policy=policy, causal=causal))


@pytest.mark.parametrize("policy", [TRAINING[0], *INFERENCE[:2]])
def test_twenty_runs_give_the_same_bits(policy: str) -> None:
    case, chosen = LONG.replace(policy=policy, causal="top_left"), get_policy(policy)
    x = case.make(device="cuda")
    first = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, chosen)
    for _ in range(20):
        again = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, chosen)
        assert_bitwise(again.out, first.out, name="out")
        assert_bitwise(again.lse, first.lse, name="lse")


@pytest.mark.parametrize("policy", [TRAINING[0], INFERENCE[0]])
def test_the_average_of_ones_is_exactly_one(policy: str) -> None:
    case = LONG.replace(policy=policy)
    x = case.make(device="cuda")
    ones = torch.ones_like(x.v)
    out = BACKEND.forward(x.q, x.k, ones, x.side, case.problem, get_policy(policy)).out
    assert_bitwise(out, torch.ones_like(out), name="out")


@pytest.mark.parametrize("spelling", ["nvfp4", "mxfp4_rceil"])
def test_published_rows_are_the_formats_bytes(spelling: str) -> None:
    from fp4mega.attention.operand import parse_operand
    from fp4mega.kernels.cute.compile import launch

    operand, x = parse_operand(spelling, field="q"), hard_rows(128)
    wanted = operands.publish_rows("q", operand, x)
    got = publishing.publish_rows("q", operand, x.cuda(), launch)
    for a, b in zip((*got.saved, got.scales), (*wanted.saved, wanted.scales), strict=True):
        assert_bitwise(a.cpu(), b, name=spelling)


def test_auto_takes_these_kernels() -> None:
    chosen = select_backend("auto", LONG.problem, get_policy("direct_p_fast"), DEVICE)
    assert chosen is BACKEND
    x = LONG.make(device="cuda")
    out = attention_func(x.q, x.k, x.v, policy="direct_p_fast")
    assert_bitwise(
        out, attention_func(x.q, x.k, x.v, policy="direct_p_fast", backend="cute_sm100"), name="out"
    )


def test_a_side_stream_is_used() -> None:
    """The launch goes to the current stream: a result read there is complete."""
    case = LONG.replace(policy="nvfp4_qk_fp8_pv")
    x, policy = case.make(device="cuda"), get_policy("nvfp4_qk_fp8_pv")
    wanted = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).out
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = BACKEND.forward(x.q, x.k, x.v, x.side, case.problem, policy).out.clone()
        torch.cuda.current_stream().synchronize()
    assert_bitwise(got, wanted, name="out")
