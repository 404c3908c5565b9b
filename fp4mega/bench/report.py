"""What the attention benchmark found, as a terminal table, Markdown, CSV and a picture. Ratios come first: peer's median over ours."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from fp4mega.bench.attention import CALL, KERNELS, Results, Row
from fp4mega.bench.peers import PEERS
from fp4mega.bench.shapes import PHASES

# Okabe and Ito's palette without yellow: told apart by colour-blind readers and in grey.
COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
SCOPES = {CALL: "with publishers", KERNELS: "attention kernels alone"}


def peers_of(results: Results) -> list[str]:
    """Peers that were timed, in the order of `PEERS`."""
    return [p for p in PEERS if any(r.arm == p for r in results.rows)]


def _ratio(results: Results, row: Row, peer: str) -> str:
    value = None if row.arm == peer else results.ratio(row, peer)
    return "" if value is None else f"{value:.2f}"


def _tables(results: Results) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, head and cells of every table that has rows."""
    peers = peers_of(results)
    for phase in PHASES:
        for scope, words in SCOPES.items():
            rows = [r for r in results.rows if r.phase == phase and r.scope == scope]
            if rows:
                head = ["shape", "arm", *(f"x {p}" for p in peers)]
                cells = [
                    [
                        r.shape, r.arm, *(_ratio(results, r, p) for p in peers),
                        *(f"{t:.3f}" for t in (r.p20, r.p50, r.p80)), f"{r.tflops:.0f}",
                    ]
                    for r in rows
                ]  # fmt: skip
                yield (
                    f"{'forward + backward' if phase == 'both' else phase}, {words}",
                    [*head, "p20 ms", "p50 ms", "p80 ms", "TF/s"],
                    cells,
                )
    if results.publishers:
        head = ["shape", "arm", "phase", "ms", "floor ms", "minimum MB", "moved MB", "GB/s", "of a copy's"]  # fmt: skip
        yield (
            f"publishers; a device copy moves {(results.copy or 0) / 1e9:.0f} GB/s",
            head,
            [
                [
                    p.shape, p.arm, p.phase, f"{p.milliseconds:.3f}", f"{p.floor:.3f}", f"{p.minimum / 1e6:.0f}",
                    f"{p.moved / 1e6:.0f}", f"{p.bandwidth / 1e9:.0f}", f"{p.of_copy:.0%}",
                ]
                for p in results.publishers
            ],
        )  # fmt: skip
    if results.saved:
        yield (
            "kept for backward",
            ["shape", "arm", "MB", "bf16 MB", "of bf16's"],
            [
                [s.shape, s.arm, f"{s.bytes / 1e6:.1f}", f"{s.bf16 / 1e6:.1f}", f"{s.ratio:.3f}"]
                for s in results.saved
            ],
        )
    if results.verdicts:
        yield (
            "gate",
            ["shape", "arm", "verdict"],
            [[shape, arm, str(v)] for (shape, arm), v in results.verdicts.items()],
        )


def markdown(results: Results) -> str:
    """All tables, then what was not run."""
    lines: list[str] = []
    for title, head, cells in _tables(results):
        lines += [f"**{title}**", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        lines += [f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in cells]
        lines.append("")
    lines += [f"- {note}" for note in results.notes]
    return "\n".join(lines).rstrip() + "\n"


def show(results: Results, console: Console) -> None:
    """The same tables on a terminal."""
    for title, head, cells in _tables(results):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in head:
            text = column in ("shape", "arm", "phase", "verdict")
            table.add_column(
                column, justify="left" if text else "right", no_wrap=column != "verdict"
            )
        for row in cells:
            table.add_row(*row)
        console.print(table, markup=False)
    for note in results.notes:
        console.print(note, markup=False)


def as_csv(results: Results) -> str:
    """Every row of times with a ratio to every peer, one header; empty where there is none."""
    peers = peers_of(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Row._fields, *(f"ratio_{p}" for p in peers)])
    for row in results.rows:
        ratios = [None if row.arm == p else results.ratio(row, p) for p in peers]
        writer.writerow([*row, *("" if r is None else repr(r) for r in ratios)])
    return text.getvalue()


def plot(results: Results, path: Path) -> None:
    """TF/s of every arm with publishers, a panel a phase, bars from p50 with p20 and p80; the suffix gives the format.

    Raises ValueError for an unknown suffix or when nothing was timed, OSError when the file cannot be written.
    """
    rows = [r for r in results.rows if r.scope == CALL]
    if not rows:
        raise ValueError("nothing was timed, so there is nothing to plot")
    arms, shapes = (
        list(dict.fromkeys(v)) for v in ([r.arm for r in rows], [r.shape for r in rows])
    )
    colors = [COLORS[i % len(COLORS)] for i in range(len(arms))]
    phases = [p for p in PHASES if any(r.phase == p for r in rows)]
    figure = Figure(figsize=(2.2 + 2.6 * len(shapes), 3.0 * len(phases)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(phases), 1, sharex=True, squeeze=False)[:, 0]
    width = 0.84 / len(arms)
    for axis, phase in zip(axes, phases, strict=True):
        for i, arm in enumerate(arms):
            found = {r.shape: r for r in rows if r.phase == phase and r.arm == arm}
            for j, shape in enumerate(shapes):
                if row := found.get(shape):
                    speeds = [row.tflops * row.p50 / t for t in (row.p20, row.p80)]
                    error = [[row.tflops - speeds[1]], [speeds[0] - row.tflops]]
                    axis.bar(
                        j + (i - (len(arms) - 1) / 2) * width, row.tflops, width * 0.94, color=colors[i],
                        yerr=error, error_kw={"linewidth": 0.8, "ecolor": "#666666"},
                        hatch="//" if arm in PEERS else None, edgecolor="white", linewidth=0,
                    )  # fmt: skip
        axis.set_ylabel(f"{'forward + backward' if phase == 'both' else phase}\nTF/s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xticks(range(len(shapes)), [s.replace(":", "\n") for s in shapes])
    handles = [
        axes[0].bar(
            0, 0, color=c, hatch="//" if a in PEERS else None, edgecolor="white", linewidth=0
        )
        for a, c in zip(arms, colors, strict=True)
    ]
    figure.legend(handles, arms, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)
