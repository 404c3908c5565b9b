"""Comparisons of tensors. Each assertion prints one line with the measured numbers, whether it passes or not.

Positions that are not finite (the LSE of a fully masked row is -inf) must agree exactly and are left out of the norms.
"""

import torch
from torch import Tensor

RULE_RMS = 2.0
"""A result may be this many times as wrong as a reference with deliberate rounding noise (FlashAttention's rule of two)."""
RULE_MAX = 4.0
"""The same for the largest element, which is the noisier norm."""


def rms(x: Tensor) -> float:
    """Root mean square in float64; 0.0 for an empty tensor."""
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def rel_l2(x: Tensor, ref: Tensor) -> float:
    """|x - ref| / |ref| in float64; 0.0 when both are zero."""
    difference, size = float((x.double() - ref.double()).norm()), float(ref.double().norm())
    return difference / size if size else (float("inf") if difference else 0.0)


def cosine(x: Tensor, ref: Tensor) -> float:
    """Cosine of the angle between x and ref as vectors, in float64; 1.0 when both are zero."""
    size, size_ref = float(x.double().norm()), float(ref.double().norm())
    if not size and not size_ref:
        return 1.0
    return (
        float((x.double() * ref.double()).sum()) / (size * size_ref) if size and size_ref else 0.0
    )


def _report(name: str, verdict: bool, text: str) -> str:
    line = f"{name}: {text} {'ok' if verdict else 'FAILED'}"
    print(line)  # noqa: T201 - the measured numbers are what one reads when a test fails
    return line


def _same_shape(x: Tensor, ref: Tensor, name: str) -> None:
    if x.shape != ref.shape:
        raise AssertionError(f"{name}: shape {tuple(x.shape)}, expected {tuple(ref.shape)}")


def _finite_part(x: Tensor, ref: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, ref in float64 at the finite positions of ref, and those positions."""
    _same_shape(x, ref, name)
    x, ref = x.detach().double(), ref.detach().double()
    finite = ref.isfinite()
    same = torch.equal(x.isfinite(), finite) and torch.equal(
        x[~finite].nan_to_num(nan=0.5), ref[~finite].nan_to_num(nan=0.5)
    )
    if not same:
        raise AssertionError(
            f"{name}: non-finite positions differ: {int((~x.isfinite()).sum())} in the result, "
            f"{int((~finite).sum())} in the reference"
        )
    return x[finite], ref[finite], finite


def assert_rule_of_two(
    x: Tensor, ref: Tensor, noisy: Tensor, *, dtype: torch.dtype, name: str
) -> None:
    """x is at most twice as wrong as `noisy`, plus the rounding of the output dtype.

    rms(x - ref) <= 2 rms(noisy - ref) + floor with floor = 2 rms(ref + 0.3 - 0.3 - ref) evaluated in `dtype`; the
    largest element likewise with factor 4. `ref` is the float64 answer on x's own represented inputs, `noisy` the
    same answer with rounding noise of a kernel's size.
    """
    _same_shape(noisy, ref, name)
    x64, ref64, finite = _finite_part(x, ref, name)
    error = (x64 - ref64).abs()
    noise = (noisy.detach().double()[finite] - ref64).abs()
    rounded = ref64.to(dtype)
    # 0.3 is added as a tensor of that dtype: a Python scalar would be added in a wider one.
    shift = torch.tensor(0.3, dtype=dtype, device=ref64.device)
    rounding = (((rounded + shift) - shift).double() - ref64).abs()
    allowed_rms = RULE_RMS * rms(noise) + 2 * rms(rounding)
    largest = [float(t.max()) if t.numel() else 0.0 for t in (error, noise, rounding)]
    allowed_max = RULE_MAX * largest[1] + 2 * largest[2]
    passed = rms(error) <= allowed_rms and largest[0] <= allowed_max
    text = (
        f"rms {rms(error):.3e} (allowed {allowed_rms:.3e}), max {largest[0]:.3e} "
        f"(allowed {allowed_max:.3e}), rel_l2 {rel_l2(x64, ref64):.3e}"
    )
    line = _report(name, passed, text)
    if not passed:
        raise AssertionError(line)


def assert_close(x: Tensor, ref: Tensor, *, limit: float, name: str) -> None:
    """rel_l2(x, ref) <= limit on the finite positions; an all-zero reference must be met exactly."""
    x64, ref64, _ = _finite_part(x, ref, name)
    error = rel_l2(x64, ref64)
    line = _report(name, error <= limit, f"rel_l2 {error:.3e} (allowed {limit:.1e})")
    if error > limit:
        raise AssertionError(line)


def assert_bitwise(x: Tensor, expected: Tensor, *, name: str) -> None:
    """Same shape, dtype and bits; NaN equals the same NaN, and 0.0 differs from -0.0."""
    _same_shape(x, expected, name)
    if x.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {x.dtype}, expected {expected.dtype}")
    bytes_x, bytes_expected = (
        t.detach().contiguous().reshape(-1).view(torch.uint8).reshape(t.numel(), t.element_size())
        for t in (x, expected)
    )
    different = (bytes_x != bytes_expected).any(dim=1)
    count = int(different.sum())
    line = _report(name, count == 0, f"{count} of {x.numel()} elements differ in bits")
    if count:
        first = int(different.nonzero()[0])
        raise AssertionError(
            f"{line}; first at flat index {first}: {x.reshape(-1)[first].item()!r}, "
            f"expected {expected.reshape(-1)[first].item()!r}"
        )
