"""The assertions that other tests rest on must be able to fail."""

import math

import pytest
import torch

from fp4mega.testing import assert_bitwise, assert_close, assert_rule_of_two, cosine, rel_l2, rms

REF = torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_measures() -> None:
    x = torch.tensor([3.0, 4.0])
    assert rms(x) == pytest.approx(math.sqrt(12.5))
    assert rel_l2(x * 1.5, x) == pytest.approx(0.5)
    assert cosine(x, torch.tensor([4.0, -3.0])) == 0.0
    assert cosine(x, 2 * x) == pytest.approx(1.0)
    zero = torch.zeros(3)
    assert (rms(torch.zeros(0)), rel_l2(zero, zero), cosine(zero, zero)) == (0.0, 0.0, 1.0)
    assert rel_l2(zero + 1, zero) == math.inf


@pytest.mark.parametrize(("factor", "passes"), [(1.9, True), (2.1, False)])
def test_rule_of_two_at_its_limit(factor: float, passes: bool, capsys) -> None:
    x, noisy = REF + factor * 1e-3 * NOISE.flip(0), REF + 1e-3 * NOISE
    if passes:
        assert_rule_of_two(x, REF, noisy, dtype=torch.float64, name="x")
    else:
        with pytest.raises(AssertionError, match="x: rms"):
            assert_rule_of_two(x, REF, noisy, dtype=torch.float64, name="x")
    assert capsys.readouterr().out.count("\n") == 1


def test_rule_of_two_sees_one_bad_element() -> None:
    x = REF.clone()
    x[3, 5] += 0.02
    noisy = REF + 1e-3 * NOISE
    assert rms(x - REF) < rms(noisy - REF)
    with pytest.raises(AssertionError, match="max 2"):
        assert_rule_of_two(x, REF, noisy, dtype=torch.float64, name="x")


def test_rule_of_two_allows_the_rounding_of_the_output() -> None:
    x = REF.bfloat16()
    assert_rule_of_two(x, REF, REF, dtype=torch.bfloat16, name="x")
    with pytest.raises(AssertionError):
        assert_rule_of_two(x, REF, REF, dtype=torch.float32, name="x")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_nonfinite_positions_must_agree(bad: float) -> None:
    ref = REF.clone()
    ref[0, 0] = -math.inf
    x = ref.clone()
    assert_close(x, ref, limit=0.0, name="x")
    x[0, 0] = bad
    with pytest.raises(AssertionError, match="non-finite positions differ"):
        assert_close(x, ref, limit=1.0, name="x")
    with pytest.raises(AssertionError, match="non-finite positions differ"):
        assert_rule_of_two(x, ref, REF + NOISE, dtype=torch.float64, name="x")


def test_close_has_a_limit_and_a_shape() -> None:
    assert_close(REF * 1.001, REF, limit=1.1e-3, name="x")
    with pytest.raises(AssertionError, match="rel_l2 1"):
        assert_close(REF * 1.001, REF, limit=0.9e-3, name="x")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(REF[:1], REF, limit=1.0, name="x")


def test_bitwise_tells_zeros_apart_and_nan_from_nan() -> None:
    nan = torch.tensor([1.0, math.nan, math.inf])
    assert_bitwise(nan, nan.clone(), name="x")
    assert_bitwise(torch.zeros(0, 3), torch.zeros(0, 3), name="empty")
    assert_bitwise(torch.tensor(1.0), torch.tensor(1.0), name="scalar")
    assert_bitwise(REF.t(), REF.t().contiguous(), name="strides do not matter")
    with pytest.raises(AssertionError, match="first at flat index 1: -0.0, expected 0.0"):
        assert_bitwise(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), name="x")
    with pytest.raises(AssertionError, match="dtype torch.float32, expected torch.float64"):
        assert_bitwise(REF.float(), REF, name="x")
