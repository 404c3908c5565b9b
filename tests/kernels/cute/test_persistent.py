"""Fewer CTAs than work items: buffers, barriers and tensor memory go from one item to the next.

Results are those of a grid with a CTA an item, bit for bit. Items of one key tile are the hardest: their warps get furthest ahead
of one another. Kernels are those of `test_forward.py`.
"""

import pytest

from fp4mega.kernels import Forward
from fp4mega.testing import Case
from fp4mega.testing.assertions import assert_bitwise
from tests.kernels.cute.harness import BASE, assert_forward_agrees, execute, prepare, run

CAUSAL = BASE.replace(causal="top_left")
DIRECT = BASE.replace(policy="direct_p_fast")
GROUPED = {"num_heads": 2, "num_kv_heads": 1}
PACKED = {"lengths_q": (0, 300, 1, 0, 40), "lengths_k": (0, 390, 3, 9, 0)}
UNEVEN = CAUSAL.replace(seqlen_q=515, seqlen_k=515, **GROUPED)
"""Items of 5, 5, 4, 4, 2 and 2 key tiles."""
SHORT = BASE.replace(seqlen_q=1100, seqlen_k=100)
"""Five items of one."""
UNSEEN = BASE.replace(seqlen_q=900, seqlen_k=200, window=(20, 30))
"""Four items, of which two see no key."""

CASES = (
    (UNEVEN, 2, "eager"),
    (UNEVEN, 3, "random-1"),
    (UNEVEN, 4, "lazy"),
    (SHORT, 1, "lazy"),
    (SHORT, 2, "random-1"),
    (UNSEEN, 2, "eager"),
    (BASE.replace(causal="bottom_right", sink=True, **GROUPED, **PACKED), 3, "eager"),
    (DIRECT.replace(seqlen_q=515, seqlen_k=260, **GROUPED), 2, "random-1"),
    (SHORT.replace(policy="direct_p_fast"), 1, "lazy"),
)


def assert_same(forward: Forward, other: Forward) -> None:
    """Every bit that the kernel writes: output, LSE, and (m, L) among what is saved."""
    assert_bitwise(forward.out, other.out, name="out")
    assert_bitwise(forward.lse, other.lse, name="lse")
    for i, (a, b) in enumerate(zip(forward.saved, other.saved, strict=True)):
        assert_bitwise(a, b, name=f"saved[{i}]")


def check_persistent(case: Case, ctas: int, order: str) -> None:
    """Against the reference, and against a CTA an item."""
    forward = execute(case, ctas=ctas, order=order)
    assert_forward_agrees(forward, case)
    assert_same(forward, execute(case, ctas=1_000))


@pytest.mark.parametrize(("case", "ctas", "order"), CASES, ids=str)
def test_fewer_ctas_than_items(case: Case, ctas: int, order: str) -> None:
    check_persistent(case, ctas, order)


def test_a_grid_without_ctas_is_refused() -> None:
    with pytest.raises(ValueError, match="ctas=0: expected 1 or more"):
        run(prepare(SHORT), ctas=0)
