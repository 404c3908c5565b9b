"""How far each policy's output and gradients are from unquantized attention, on standard normal and on outlier inputs.

Two tables. Forward: noncausal, S = T = 4096, D 128, standard normal q, k, v, beside the paper's figures where it gives any.
Gradients: causal, against the `exact` policy's gradients on the same inputs. Errors are relL2 = |x - ref| / |ref|.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from fp4mega.attention import Saved, backward, forward, get_policy, list_policies
from fp4mega.testing.assertions import cosine, rel_l2
from fp4mega.testing.cases import Case

PAPER = {"direct_p_fast": (0.944, 0.337), "direct_p_accurate": (0.952, 0.327)}
"""Published cos and relL2 of the noncausal forward on normal inputs, against BF16."""
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"


class ForwardRow(NamedTuple):
    """Cosine and relL2 of a policy's output."""

    policy: str
    cos: float
    rel: float


class GradientRow(NamedTuple):
    """relL2 of out, dq, dk, dv of a policy."""

    policy: str
    values: str
    errors: tuple[float, float, float, float]


def forward_rows(
    policies: Iterable[str], *, seqlen: int, heads: int, device: str
) -> list[ForwardRow]:
    """Noncausal forward of every policy against `exact` on the same inputs."""
    case = Case(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads, num_kv_heads=heads, head_dim=128
    )
    x = case.make(device=device)

    def output(name: str) -> torch.Tensor:
        return forward(x.q, x.k, x.v, x.side, case.problem, get_policy(name))[0]

    want = output("exact")
    rows = []
    for name in policies:
        got = output(name)
        rows.append(ForwardRow(name, cosine(got, want), rel_l2(got, want)))
    return rows


def gradient_rows(
    policies: Iterable[str], values: str, *, seqlen: int, heads: int, device: str
) -> list[GradientRow]:
    """Causal forward and backward of every policy against `exact` on the same inputs."""
    case = Case(
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads=heads,
        num_kv_heads=max(heads // 4, 1),
        head_dim=128,
        causal="top_left",
        values=values,
    )
    x = case.make(device=device)

    def run(name: str) -> tuple[torch.Tensor, ...]:
        policy = get_policy(name)
        out, lse, saved = forward(x.q, x.k, x.v, x.side, case.problem, policy)
        inputs = (
            x.q if policy.saves_input("q") else None,
            x.k if policy.saves_input("k") else None,
            x.v if policy.saves_input("v") else None,
        )
        dq, dk, dv, _ = backward(
            x.dout, None, Saved(out, lse, saved), inputs, x.side, case.problem, policy
        )
        return out, dq, dk, dv

    want = run("exact")
    rows = []
    for name in policies:
        out, dq, dk, dv = (rel_l2(a, b) for a, b in zip(run(name), want, strict=True))
        rows.append(GradientRow(name, values, (out, dq, dk, dv)))
    return rows


def tables(*, device: str, forward_seqlen: int = 4096, gradient_seqlen: int = 1024) -> str:
    """Both tables as Markdown."""
    policies = [n for n in list_policies() if n != "exact"]
    lines = [
        f"Noncausal forward, B1 S{forward_seqlen} H4 D128, standard normal inputs, against `exact`:",
        "",
        "| policy | cos | relL2 | paper cos | paper relL2 |",
        "| --- | --- | --- | --- | --- |",
    ]
    # The backward rule does not change the forward: one row for each set of forward formats.
    for row in forward_rows(
        [n for n in policies if "-" not in n], seqlen=forward_seqlen, heads=4, device=device
    ):
        paper = PAPER.get(row.policy)
        cells = (f"{paper[0]:.3f}", f"{paper[1]:.3f}") if paper else ("", "")
        lines.append(
            f"| `{row.policy}` | {row.cos:.4f} | {row.rel:.4f} | {cells[0]} | {cells[1]} |"
        )
    lines += [
        "",
        f"Causal forward and backward, B1 S{gradient_seqlen} H8/2 D128, relL2 against `exact`:",
        "",
        "| policy | randn: out | dq | dk | dv | outlier channels: out | dq | dk | dv |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_values = [
        gradient_rows(policies, values, seqlen=gradient_seqlen, heads=8, device=device)
        for values in ("randn", "outlier_channels")
    ]
    for normal, outlier in zip(*by_values, strict=True):
        errors = " | ".join(f"{e:.3f}" for e in (*normal.errors, *outlier.errors))
        lines.append(f"| `{normal.policy}` | {errors} |")
    return "\n".join(lines)


def check_markers(path: Path) -> None:
    """Raise ValueError when the document has no markers to write between, OSError when it cannot be read."""
    document = path.read_text()
    if BEGIN not in document or END not in document.partition(BEGIN)[2]:
        raise ValueError(f"{path}: no '{BEGIN}' ... '{END}' to write between")


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the markers of a document; raises as `check_markers`."""
    check_markers(path)
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
