"""Shared cases made small enough for the interpreter, which takes half a second for one with two heads."""

import torch

from fp4mega.attention import AttentionPolicy
from fp4mega.bench.gate import evaluate, reference_answers
from fp4mega.testing import Case, assert_close, assert_rule_of_two
from tests.kernels.triton.harness import BACKEND

LSE_NOISE = 2.0**-22
"""A log-sum-exp is rounded to float32 after a logarithm; where no code of P moves, that is all its error."""


def small(case: Case) -> Case:
    """The case in BF16 with one kv head: one batch entry and at most two query heads, or one query head where entries differ."""
    entries = case.mask != "none" or case.layout == "expanded"
    single = entries or case.lengths_q is not None
    heads = 1 if single else min(case.num_heads // case.num_kv_heads, 2)
    if entries and case.seqlen_q > 100:
        case = case.replace(seqlen_q=case.seqlen_q // 2)
    return case.replace(
        batch=2 if entries else 1, num_heads=heads, num_kv_heads=1, dtype=torch.bfloat16
    )


def check(case: Case, policy: AttentionPolicy) -> None:
    """The rule of two against the float64 reference on the bytes that the kernels saved."""
    x = case.make()
    got, result = evaluate(BACKEND, x, case, policy)
    exact, noisy = reference_answers(x, case, policy, result.saved)
    noisy = noisy._replace(lse=noisy.lse + LSE_NOISE)
    compared = 0
    for name, value, wanted, noise in zip(got._fields, got, exact, noisy, strict=True):
        if name == "dsink" and value is not None:
            # One number a head: whether it is lucky in its rounding is no property of a kernel.
            assert_close(value, wanted, limit=0.02, name=f"{case} {name}")
        elif value is not None:
            assert_rule_of_two(value, wanted, noise, dtype=value.dtype, name=f"{case} {name}")
            compared += 1
    assert compared >= (2 if policy.direct_p else 5)
