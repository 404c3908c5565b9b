"""Speed of a backend beside torch's own attention, in one run: correctness first, then times.

A shape is `B,H/G,S,D` with `:causal` behind it, for example `4,32/8,4096,128:causal`. Each policy must agree with the reference on
one kv head of that shape before it is timed. Times are device times of whole calls (CUDA events, p20, p50, p80) with publishers; the
attention kernels alone are taken from the profiler. FLOPs are 4 B H S S D forward, half of it when causal, and 2.5 times that backward.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp4mega.attention import Saved, SideInputs, backward, forward, get_policy, tiles
from fp4mega.attention.mask import unpack_problem
from fp4mega.attention.policy import AttentionPolicy
from fp4mega.attention.represent import decode_operand, operand_spec
from fp4mega.kernels import Backend, Forward, get_backend
from fp4mega.testing.assertions import assert_rule_of_two
from fp4mega.testing.cases import Case, Inputs

DEFAULT_SHAPES = (
    "4,32/32,4096,128",
    "4,32/32,4096,128:causal",
    "2,32/8,8192,128:causal",
    "1,32/8,16384,128:causal",
)
DEFAULT_POLICIES = ("mxfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv", "nvfp4_qk_fp8_pv-paper", "bf16")
PEERS = {
    "cudnn_bf16": SDPBackend.CUDNN_ATTENTION,
    "flash_bf16": SDPBackend.FLASH_ATTENTION,
}
ATTENTION_KERNELS = {
    "forward": ("_forward_kernel",),
    "backward": ("_dk_dv_kernel", "_dq_kernel"),
}
"""Names of the kernels that are attention itself; everything else that runs in a call prepares operands."""
NOISE = 2.0**-11
"""Relative noise of scores and dP in the noisy reference: what FP8 accumulators of 13 bits and BF16 operands leave."""


class Answer(NamedTuple):
    """Output, log-sum-exp and gradients of one evaluation."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


def evaluate(
    backend: Backend, x: Inputs, case: Case, policy: AttentionPolicy
) -> tuple[Answer, Forward]:
    """Forward and backward of a backend on a case's inputs."""
    result = backend.forward(x.q, x.k, x.v, x.side, case.problem, policy)
    inputs = _kept(policy, x.q, x.k, x.v)
    gradients = backend.backward(x.dout, x.dlse, result, inputs, x.side, case.problem, policy)
    return Answer(result.out, result.lse, *gradients), result


def _kept(
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
    plain = replace(
        policy, name=f"{policy.name}-on-its-bytes", q="none", k="none", v="none", v_bwd="same"
    )
    side = replace(x.side, sink=None if x.side.sink is None else x.side.sink.double())
    problem = replace(case.problem, dtype=torch.float64)

    def run(decoded: torch.dtype, rounded: torch.dtype) -> Answer:
        q, k, v = _represented(x, case, policy, saved, decoded)
        out, lse, tensors = forward(q, k, v, side, problem, plain)
        out = out.to(rounded).double()
        kept = Saved(out, lse, tensors)
        gradients = backward(
            x.dout.double(), x.dlse.double(), kept, (q, k, v), side, problem, plain
        )
        return Answer(out, lse, *gradients)

    exact = run(torch.float64, torch.float64)
    with _noisy_products():
        return exact, run(torch.float32, case.dtype)


def _represented(
    x: Inputs, case: Case, policy: AttentionPolicy, saved: tuple[Tensor, ...], dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v as the policy represents them, decoded in `dtype` from saved bytes, in the caller's layout, float64."""
    dense, _, pack_q, pack_k = unpack_problem(case.problem, x.side)
    shapes = {
        "q": (dense.batch, dense.seqlen_q, dense.num_heads, dense.head_dim),
        "k": (dense.batch, dense.seqlen_k, dense.num_kv_heads, dense.head_dim),
        "v": (dense.batch, dense.seqlen_k, dense.num_kv_heads, dense.head_dim_v),
    }
    values, remaining = [], list(saved)
    for name, given in zip("qkv", (x.q, x.k, x.v), strict=True):
        operand = policy.operands[name]
        if not operand.quantized:
            values.append(given.to(torch.bfloat16).double())
            continue
        count = len(operand_spec(name, operand, shapes[name]))
        taken, remaining = remaining[:count], remaining[count:]
        value = decode_operand(name, operand, taken, shapes[name], dtype).double()
        packing = pack_q if name == "q" else pack_k
        values.append(value if packing is None else packing.unpad(value, given.shape[1]))
    return values


@contextmanager
def _noisy_products():  # type: ignore[no-untyped-def]
    """Within it the reference's scores and dP carry relative noise of `NOISE`, the same in forward and backward."""
    original = tiles._fold_t

    def noisy(a, b):  # type: ignore[no-untyped-def]
        product = original(a, b)
        generator = torch.Generator(device=product.device).manual_seed(0)
        noise = torch.randn(product.shape, generator=generator, device=product.device)
        return product * (1 + NOISE * noise)

    tiles._fold_t = noisy
    try:
        yield
    finally:
        tiles._fold_t = original


def assert_agrees(backend: Backend, case: Case, policy: AttentionPolicy, device: str) -> None:
    """Raise AssertionError unless every result of the backend obeys the rule of two on this case."""
    x = case.make(device=device)
    got, result = evaluate(backend, x, case, policy)
    exact, noisy = reference_answers(x, case, policy, result.saved)
    for name, value, wanted, noise in zip(Answer._fields, got, exact, noisy, strict=True):
        if value is not None and wanted is not None and noise is not None:
            dtype = value.dtype
            assert_rule_of_two(value, wanted, noise, dtype=dtype, name=f"{case} {name}")


@dataclass(frozen=True)
class Shape:
    """One benchmark shape; S = T and D = Dv."""

    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    dim: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read `B,H/G,S,D[:causal]`. Raises ValueError for anything else."""
        found = re.fullmatch(r"(\d+),(\d+)/(\d+),(\d+),(\d+)(:causal)?", text)
        if not found:
            raise ValueError(f"shape={text!r}: expected B,H/G,S,D or B,H/G,S,D:causal")
        batch, heads, kv_heads, seqlen, dim = (int(n) for n in found.groups()[:5])
        return cls(batch, heads, kv_heads, seqlen, dim, causal=bool(found[6]))

    def __str__(self) -> str:
        return f"{self.batch},{self.heads}/{self.kv_heads},{self.seqlen},{self.dim}{':causal' if self.causal else ''}"

    @property
    def flops(self) -> float:
        """Of the forward."""
        whole = 4.0 * self.batch * self.heads * self.seqlen**2 * self.dim
        return whole / 2 if self.causal else whole

    def case(self, *, small: bool = False) -> Case:
        """As a test case; `small` keeps one kv head with its query heads."""
        kv_heads = 1 if small else self.kv_heads
        return Case(
            batch=1 if small else self.batch,
            seqlen_q=self.seqlen,
            seqlen_k=self.seqlen,
            num_heads=kv_heads * (self.heads // self.kv_heads),
            num_kv_heads=kv_heads,
            head_dim=self.dim,
            causal="top_left" if self.causal else "none",
            dtype=torch.bfloat16,
        )


class Row(NamedTuple):
    """Milliseconds of one arm in one phase."""

    shape: str
    arm: str
    phase: str
    p20: float
    p50: float
    p80: float
    kernels: float
    """Attention kernels alone, mean; equal to p50 for a peer."""
    tflops: float
    """By p50."""


def measure(call: Callable[[], object], *, repeats: int) -> tuple[float, float, float]:
    """p20, p50 and p80 in milliseconds of device time."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) for start, end in pairs])
    p20, p50, p80 = times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return p20, p50, p80


def kernel_times(call: Callable[[], object], *, repeats: int = 5) -> dict[str, float]:
    """Mean milliseconds a call of every kernel that runs in it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / 1e3 / repeats for e in profiler.key_averages()}


def _inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(heads: int) -> Tensor:
        size = (shape.batch, shape.seqlen, heads, shape.dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    return normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads), normal(shape.heads)


def backend_rows(
    shape: Shape, policy: AttentionPolicy, backend: Backend, *, repeats: int
) -> list[Row]:
    """Times of a backend under one policy."""
    q, k, v, dout = _inputs(shape)
    problem, side = shape.case().problem, SideInputs()
    result = backend.forward(q, k, v, side, problem, policy)
    inputs = _kept(policy, q, k, v)

    def run_forward() -> Forward:
        return backend.forward(q, k, v, side, problem, policy)

    def run_backward(saved: Forward = result) -> object:
        return backend.backward(dout, None, saved, inputs, side, problem, policy)

    arm = f"{backend.name}/{policy.name}"
    both = lambda: run_backward(run_forward())  # noqa: E731
    return _rows(shape, arm, run_forward, run_backward, both, repeats=repeats)


def peer_rows(shape: Shape, peer: str, *, repeats: int) -> list[Row]:
    """Times of torch's scaled_dot_product_attention with one of its backends."""
    q, k, v, dout = (t.transpose(1, 2) for t in _inputs(shape))
    for t in (q, k, v):
        t.requires_grad_()

    def run_forward() -> Tensor:
        with sdpa_kernel(PEERS[peer]):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    result = run_forward()

    def run_backward(out: Tensor = result, *, keep: bool = True) -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=keep)

    both = lambda: run_backward(run_forward(), keep=False)  # noqa: E731
    return _rows(shape, peer, run_forward, run_backward, both, repeats=repeats)


def _rows(
    shape: Shape,
    arm: str,
    forward: Callable[[], object],
    backward: Callable[[], object],
    both: Callable[[], object],
    *,
    repeats: int,
) -> list[Row]:
    rows = []
    for phase, call, flops in (
        ("forward", forward, shape.flops),
        ("backward", backward, 2.5 * shape.flops),
        ("both", both, 3.5 * shape.flops),
    ):
        times = measure(call, repeats=repeats)
        alone = times[1]
        if arm not in PEERS:
            names = sum(
                (ATTENTION_KERNELS[p] for p in ATTENTION_KERNELS if phase in (p, "both")), ()
            )
            spent = kernel_times(call)
            alone = sum(t for name, t in spent.items() if name in names)
        rows.append(Row(str(shape), arm, phase, *times, alone, flops / times[1] / 1e9))
    return rows


def run(
    *,
    shapes: Iterable[str] = DEFAULT_SHAPES,
    policies: Iterable[str] = DEFAULT_POLICIES,
    backends: Iterable[str | Backend] = ("triton",),
    peers: Iterable[str] = tuple(PEERS),
    repeats: int = 30,
    gate: bool = True,
) -> list[Row]:
    """Check, then time every backend, policy and peer on every shape. Raises AssertionError when a backend disagrees."""
    rows = []
    chosen = [get_backend(b) if isinstance(b, str) else b for b in backends]
    for shape in (Shape.parse(text) for text in shapes):
        for peer in peers:
            rows += peer_rows(shape, peer, repeats=repeats)
        for backend in chosen:
            for policy in (get_policy(name) for name in policies):
                if gate:
                    assert_agrees(backend, shape.case(small=True), policy, "cuda")
                rows += backend_rows(shape, policy, backend, repeats=repeats)
    return rows


def markdown(rows: list[Row]) -> str:
    """A table a phase, with the ratio of every peer's median to that of the arm (above 1: the arm is faster)."""
    peers = [p for p in PEERS if any(r.arm == p for r in rows)]
    by_key = {(r.shape, r.arm, r.phase): r for r in rows}
    lines = []
    for phase in ("forward", "backward", "both"):
        head = ["shape", "arm", "p20 ms", "p50 ms", "p80 ms", "kernels ms", "TF/s"]
        head += [f"x {p}" for p in peers]
        lines += [f"**{phase}**", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        for r in (r for r in rows if r.phase == phase):
            cells = [r.shape, r.arm, *(f"{t:.3f}" for t in r[3:7]), f"{r.tflops:.0f}"]
            cells += [f"{by_key[r.shape, p, phase].p50 / r.p50:.2f}" for p in peers]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def as_csv(rows: list[Row]) -> str:
    """All rows with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    return text.getvalue()


def write(rows: list[Row], folder: Path) -> None:
    """attention.csv and attention.md in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attention.csv").write_text(as_csv(rows))
    (folder / "attention.md").write_text(markdown(rows))
