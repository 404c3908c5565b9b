"""What the accumulator of FP8 matrix products costs at long sequences: the four long sums of attention against float64.

    PV = P V    dV = P^T dO    dK = dS^T Q    dQ = dS K

Each is summed over a whole sequence, from the 8-bit codes that the kernels multiply (P at 2^8 in E4M3, V, K, Q in E4M3, dO in E5M2,
dS in E4M3), with the FP8 accumulator emptied into float32 every `interval` steps, or never: one level against two. BF16 products of the
same codes, which are exact in BF16, are the control. All arms and the reference read the same bytes, so only accumulation differs;
dS has one power of two for the whole head here, because a sum without a second level can have no other.

q, k, v and dO are standard normal plus `mean` in every channel. Keys are centered over channels before that, so the mean of q and of
k leaves the softmax as it is, while every sum but dK's and dQ's, whose weights cancel, grows with it.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fp4mega.formats import E4M3, decode, encode, get_format, quantize

PRODUCTS = ("PV", "dV", "dK", "dQ")
DEFAULT_MEANS = (0.0, 1.0, 10.0)
DEFAULT_INTERVALS = (64, 128, 512, 2048)
P_EXPONENT = 8
"""P is multiplied at 2^8, as the policies publish it."""
CHUNK = 1024
"""Query rows whose scores are held at a time."""


class Factors(NamedTuple):
    """One product: FP8 factors a [rows, S] and b [D, S], both contiguous along the sequence, and what divides a row (or None)."""

    a: Tensor
    b: Tensor
    divisor: Tensor | None


class Row(NamedTuple):
    """Errors of one arm, all against float64 on the same codes."""

    product: str
    mean: float
    """Of q, k, v and dO."""
    arm: str
    """fp8 or bf16 products, or `rounding`: the reference rounded to BF16, which any output is."""
    interval: int
    """Steps between two levels; the sequence length is one level; 0 where nothing is accumulated."""
    rel_l2: float
    max_error: float
    """Largest error over the RMS of the reference."""
    shrinkage: float
    """Mean of -error * sign(reference) over the mean magnitude: what truncation takes away on average."""
    of_deviation: float
    """|error| / |reference - its mean over rows|: what is left for what differs from row to row."""


def check(seqlen: int, dim: int, rows: int, intervals: Iterable[int]) -> None:
    """Raise ValueError for sizes that the kernel does not take."""
    if seqlen < 64 or seqlen % 64:
        raise ValueError(f"seqlen={seqlen}: expected a multiple of 64")
    if dim not in (32, 64, 128, 256):
        raise ValueError(f"dim={dim}: allowed: 32, 64, 128, 256")
    if not 64 <= rows <= seqlen or rows % 64:
        raise ValueError(f"rows={rows}: expected a multiple of 64, at most seqlen={seqlen}")
    for interval in intervals:
        if interval < 64 or interval % 64 or seqlen % interval:
            raise ValueError(
                f"interval={interval}: expected a multiple of 64 that divides seqlen={seqlen}"
            )


def operands(
    *, seqlen: int, dim: int, rows: int, mean: float, device: str, seed: int = 0
) -> dict[str, Factors]:
    """The factors of all four products for the first `rows` queries (PV, dQ) and the first `rows` keys (dV, dK)."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        x = torch.randn(seqlen, dim, generator=generator, dtype=torch.float64)
        return x.to(device)

    q, k, v, dout = normal(), normal(), normal(), normal()
    k = k - k.mean(dim=1, keepdim=True)
    q, k, v, dout = (t + mean for t in (q, k, v, dout))
    p_keys, ds_keys = (q.new_empty((rows, seqlen)) for _ in range(2))
    p_rows, ds_rows = (q.new_empty((rows, seqlen)) for _ in range(2))
    for start in range(0, seqlen, CHUNK):
        here = slice(start, min(start + CHUNK, seqlen))
        scores = q[here] @ k.T / math.sqrt(dim)
        p = torch.softmax(scores, dim=1)
        dp = dout[here] @ v.T
        ds = p * (dp - (p * dp).sum(dim=1, keepdim=True))
        p_keys[:, here], ds_keys[:, here] = p[:, :rows].T, ds[:, :rows].T
        if start < rows:
            count = min(rows, here.stop) - start
            into = slice(start, start + count)
            # The forward's P is relative to an integer reference, not normalized.
            z = scores[:count] / math.log(2)
            top = z.amax(dim=1, keepdim=True).ceil()
            p_rows[into], ds_rows[into] = torch.exp2(z - top), ds[:count]
    p_codes = _e4m3(p_rows * 2.0**P_EXPONENT)
    total = p_codes.to(torch.float64).sum(dim=1, keepdim=True)
    return {
        "PV": Factors(p_codes, _across(v, "e4m3"), total),
        "dV": Factors(_e4m3(p_keys * 2.0**P_EXPONENT), _across(dout, "e5m2"), None),
        "dK": Factors(_whole(ds_keys), _across(q, "e4m3"), None),
        "dQ": Factors(_whole(ds_rows), _across(k, "e4m3"), None),
    }


def _e4m3(x: Tensor) -> Tensor:
    return encode(x, E4M3).view(torch.float8_e4m3fn)


def _whole(x: Tensor) -> Tensor:
    """E4M3 under one power of two."""
    return quantize(x, "e4m3", axis=1).codes.view(torch.float8_e4m3fn)


def _across(x: Tensor, name: str) -> Tensor:
    """[S, D] as FP8 [D, S] under one power of two."""
    dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    return quantize(x, name, axis=0).codes.T.contiguous().view(dtype)


def reference(factors: Factors) -> Tensor:
    """float64 [rows, D] of the product, divided as the output is."""
    a, b = (_decoded(t) for t in factors[:2])
    out = a @ b.T
    return out if factors.divisor is None else out / factors.divisor


def _decoded(x: Tensor) -> Tensor:
    name = "e4m3" if x.dtype == torch.float8_e4m3fn else "e5m2"
    return decode(x.view(torch.uint8), get_format(name).element, torch.float64)


def errors(got: Tensor, ref: Tensor) -> tuple[float, float, float, float]:
    """relL2, largest error over RMS, shrinkage, and error over deviation of `got` against `ref` (float64), as `Row` has them."""
    error = got.double() - ref
    size, deviation = ref.norm(), (ref - ref.mean(dim=0, keepdim=True)).norm()
    root = size / ref.numel() ** 0.5
    shrinkage = -(error * ref.sign()).mean() / ref.abs().mean()
    found = (error.norm() / size, error.abs().max() / root, shrinkage, error.norm() / deviation)
    return tuple(float(x) for x in found)  # type: ignore[return-value]


def run(
    *,
    seqlen: int = 32768,
    dim: int = 128,
    rows: int = 512,
    means: Sequence[float] = DEFAULT_MEANS,
    intervals: Sequence[int] = DEFAULT_INTERVALS,
    device: str = "cuda",
) -> list[Row]:
    """All arms of all products. Raises ValueError for sizes that the kernel does not take."""
    from fp4mega.bench.accumulation_kernel import product

    check(seqlen, dim, rows, intervals)
    found = []
    for mean in means:
        made = operands(seqlen=seqlen, dim=dim, rows=rows, mean=mean, device=device)
        for name, factors in made.items():
            ref = reference(factors)
            half = [t.to(torch.bfloat16) for t in factors[:2]]
            arms: list[tuple[str, int, Tensor]] = [("rounding", 0, ref.to(torch.bfloat16))]
            for arm, (a, b), chosen in (
                ("bf16", half, (seqlen,)),
                ("fp8", factors[:2], sorted({*intervals, seqlen})),
            ):
                for interval in chosen:
                    out = product(a, b, interval).double()
                    if factors.divisor is not None:
                        out = out / factors.divisor
                    arms.append((arm, interval, out))
            found += [Row(name, mean, arm, at, *errors(out, ref)) for arm, at, out in arms]
    return found


def markdown(rows: Sequence[Row]) -> str:
    """A table of all rows."""
    head = ("product", "mean", "arm", "interval", "relL2", "max / RMS", "shrinkage", "/ deviation")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for r in rows:
        cells = [r.product, f"{r.mean:g}", r.arm, str(r.interval) if r.interval else ""]
        cells += [f"{x:.2e}" for x in r[4:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_csv(rows: Sequence[Row]) -> str:
    """All rows with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    return text.getvalue()


def write(rows: Sequence[Row], folder: Path) -> None:
    """accumulation.csv and accumulation.md in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accumulation.csv").write_text(as_csv(rows))
    (folder / "accumulation.md").write_text(markdown(rows) + "\n")
