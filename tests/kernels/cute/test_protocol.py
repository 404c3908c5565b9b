"""Faults planted in the kernels' PTX, one of each kind: the interpreter must name them, or the numbers must be wrong.

`matrix.py` leaves out every wait and every arrival in turn.
"""

import re
from typing import Any

import pytest

from fp4mega.testing import Case, ptx
from tests.kernels.cute.harness import BASE, assert_forward_agrees, prepare, program, run

CAUSAL = BASE.replace(causal="top_left", seqlen_q=150, seqlen_k=150)
ITEMS = CAUSAL.replace(seqlen_q=700, seqlen_k=100)
"""Three work items of one key tile."""
DIRECT = BASE.replace(policy="direct_p_fast", seqlen_q=150, seqlen_k=260)
CAUGHT = (AssertionError, ptx.PtxError)


def planted(case: Case, pattern: str, replacement: str, which: int | None) -> Any:
    """The prepared case, and its kernel with one occurrence of a pattern replaced, or all of them."""
    call = prepare(case)
    kernel = program(call.config)
    text = kernel.module.text
    found = list(re.finditer(pattern, text))
    assert found, f"nothing in the PTX matches {pattern!r}"
    if which is None:
        return call, kernel.with_text(re.sub(pattern, replacement, text))
    hit = found[which]
    changed = text[: hit.start()] + hit.expand(replacement) + text[hit.end() :]
    return call, kernel.with_text(changed)


SIGNAL = r"mbarrier\.arrive\.shared\.b64[^;]*;"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64\s+(%?\w+), \[(%\w+)[^\]]*\], [^;]*;"
NO_WAIT = r"setp.eq.b32 \1, \2, \2;"
WAIT_BEFORE_PV = (
    r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%\w+\]), %\w+"
    r"(, 10000000;(?:(?!mbarrier)[\s\S])*?kind::f8f6f4)"
)
FAULTS = {
    "scales are copied to the wrong columns": (
        CAUSAL,
        r"(tcgen05\.cp\.\S+\s+\[%\w+)\]",
        r"\1+4]",
        0,
    ),
    "P is stored one column off": (CAUSAL, r"(tcgen05\.st\.\S+\s+\[%\w+)\]", r"\1+1]", 0),
    "the fence between P's scales and their copy is missing": (
        DIRECT,
        r"fence\.proxy\.async\.shared::cta;",
        "",
        -1,
    ),
    "half of P is never announced": (DIRECT, SIGNAL, "", 1),
    "P is multiplied before it is announced": (CAUSAL, WAIT_BEFORE_PV, r"\1, 1\2", 0),
    "scores are announced as read twice": (CAUSAL, f"({SIGNAL})", r"\1 \1", 0),
    "neighbouring codes of P change places": (
        DIRECT,
        r"(relu\.e2m1x2\.f32 b\d), (%\w+), (%\w+);",
        r"\1, \3, \2;",
        None,
    ),
    "a product is not accumulated": (
        CAUSAL,
        r"setp\.ne\.b32 p, %\w+, 0;",
        "setp.ne.b32 p, 0, 0;",
        -1,
    ),
    "Q of the next item but one is loaded over an item's": (ITEMS, WAIT, NO_WAIT, 0),
    "the output of an item is never said to be read": (ITEMS, SIGNAL, "", -1),
    "the output of an item is overwritten before it is read": (
        ITEMS,
        f"{WAIT}(?=(?:(?!{WAIT})[\\s\\S])*{WAIT}(?:(?!mbarrier)[\\s\\S])*?kind::f8f6f4)",
        NO_WAIT,
        0,
    ),
    "tensor memory is not given back": (CAUSAL, r"tcgen05\.dealloc[^;]*;", "", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str) -> None:
    case, pattern, replacement, which = FAULTS[fault]
    call, kernel = planted(case, pattern, replacement, which)
    with pytest.raises(CAUGHT):
        assert_forward_agrees(run(call, kernel=kernel, ctas=1), case)
