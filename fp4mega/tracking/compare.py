"""`python -m fp4mega.tracking.compare RUN_A RUN_B ...`: table, verdicts and picture of runs side by side.

Exit code 0: every gate passed (or none was asked for), 1: a gate failed, 2: the input cannot be compared.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fp4mega.tracking.gates import Verdict, check_gate, parse_gate
from fp4mega.tracking.manifest import MANIFEST
from fp4mega.tracking.reader import read_run
from fp4mega.tracking.summary import (
    DEFAULT_LAST,
    CompareError,
    Comparison,
    RunSummary,
    compare_runs,
)
from fp4mega.tracking.tracker import EVENTS

FAILED_GATE = 1
BAD_INPUT = 2


def build_table(comparison: Comparison) -> Table:
    """One column per run, one row per number, then the losses at common steps."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", style="bold", no_wrap=True)
    for summary in comparison.summaries:
        table.add_column(Text(summary.policy), justify="right", overflow="fold")

    def row(name: str, cell: Callable[[RunSummary], str], *, section: bool = False) -> None:
        table.add_row(name, *(Text(cell(s)) for s in comparison.summaries), end_section=section)

    def gap(
        absolute: Callable[[RunSummary], float | None],
        percent: Callable[[RunSummary], float | None],
    ) -> Callable[[RunSummary], str]:
        def cell(s: RunSummary) -> str:
            value = absolute(s)
            if s.partner == s.index:
                return "reference"
            return "-" if value is None else f"{value:+.4f} ({_number(percent(s), '+.2f')} %)"

        return cell

    row("run", lambda s: s.run)
    row("status", lambda s: s.status)
    row("steps", lambda s: str(s.steps), section=True)
    row(f"train loss, mean of last {comparison.last}", lambda s: _number(s.final_loss, ".4f"))
    row("  gap", gap(lambda s: s.gap, lambda s: s.gap_percent))
    valid_at = (
        "" if comparison.final_valid_step is None else f", step {comparison.final_valid_step}"
    )
    row(f"valid loss{valid_at}", lambda s: _number(s.valid_loss, ".4f"))
    row("  gap", gap(lambda s: s.valid_gap, lambda s: s.valid_gap_percent))
    row("grad norm, mean", lambda s: _number(s.mean_grad_norm, ".4g"))
    row("grad norm, max", lambda s: _number(s.max_grad_norm, ".4g"))
    row("matched with", lambda s: _partner(comparison, s), section=True)
    row(
        "speed, ratio to first",
        lambda s: "other hardware" if s.speed_ratio is None else f"{s.speed_ratio:.2f}",
    )
    row("tokens/s, median", lambda s: f"{s.tokens_per_s:,.0f}")
    row("  on", lambda s: s.hardware, section=True)
    for j, step in enumerate(comparison.shown_steps):
        table.add_row(
            f"train loss, step {step}",
            *(Text(_number(float(v), ".4f")) for v in comparison.losses[:, j]),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _partner(comparison: Comparison, summary: RunSummary) -> str:
    if summary.partner == summary.index:
        return "-"
    partner = comparison.summaries[summary.partner]
    return partner.run if summary.matched else f"NOT MATCHED ({partner.run})"


def report(comparison: Comparison, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print table, bands over seeds, notes and one line per gate."""
    console.print(build_table(comparison))
    for band in comparison.bands:
        gap = "" if band.mean_gap is None else f", mean gap {band.mean_gap:+.4f}"
        console.print(
            escape(
                f"{band.policy}, {len(band.members)} seeds: train loss mean {band.mean_final_loss:.4f}, "
                f"from {band.min_final_loss:.4f} to {band.max_final_loss:.4f}{gap}"
            )
        )
    for note in comparison.notes:
        console.print(f"[yellow]note[/]: {escape(note)}")
    for verdict in verdicts:
        word = "[green]PASS[/]" if verdict.passed else "[bold red]FAIL[/]"
        console.print(f"{word} {escape(verdict.gate.text)}: {escape(verdict.detail)}")


def as_json(comparison: Comparison, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The comparison as plain JSON data; what is not finite is null."""
    return _finite_or_null(
        {
            "runs": [
                {**asdict(s), "path": run.path}
                for s, run in zip(comparison.summaries, comparison.runs, strict=True)
            ],
            "bands": [asdict(band) for band in comparison.bands],
            "last": comparison.last,
            "final_step": comparison.final_step,
            "final_valid_step": comparison.final_valid_step,
            "steps": list(comparison.shown_steps),
            "losses": comparison.losses.tolist(),
            "notes": list(comparison.notes),
            "gates": [
                {"gate": v.gate.text, "passed": v.passed, "detail": v.detail} for v in verdicts
            ],
            "passed": all(v.passed for v in verdicts),
        }
    )


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _steps(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected step numbers separated by commas"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp4mega.tracking.compare",
        description="Compare runs with the first one. A run is a directory or a wandb path entity/project/run_id.",
        epilog="exit code: 0 every gate passed, 1 a gate failed, 2 the input cannot be compared",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument(
        "--gate",
        action="append",
        default=[],
        metavar="GATE",
        help="final_loss_gap=2%%, valid_loss_gap=0.05, loss_falls=0.5, max_grad_norm=10, band or finite; repeatable",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=DEFAULT_LAST,
        help="logged steps in the final loss (default %(default)s)",
    )
    parser.add_argument(
        "--until", type=int, metavar="STEP", help="leave out everything after this step"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="A,B,...",
        help="steps whose losses are shown (default: about six)",
    )
    parser.add_argument(
        "--allow-unmatched",
        action="store_true",
        help="compare runs of other weights or data order too",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the curves as png, svg or pdf"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers and verdicts as JSON"
    )
    return parser


def _check_outputs(json_path: Path | None, plot: Path | None) -> None:
    for name, path in (("--json", json_path), ("--plot", plot)):
        if path is not None and path.resolve().name in (MANIFEST, EVENTS):
            raise CompareError(f"{name} {path}: a run's own file has this name; expected another")
    if json_path is not None and plot is not None and json_path.resolve() == plot.resolve():
        raise CompareError(f"--json and --plot: both name {json_path}; expected two files")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. argparse itself exits with 2 on a wrong option."""
    options = _parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        # A log file has no width: keep every column on one line.
        console.width = 40 + 32 * len(options.runs)
    try:
        _check_outputs(options.json, options.plot)
        gates = [parse_gate(text) for text in options.gate]
        comparison = compare_runs(
            [read_run(path) for path in options.runs],
            last=options.last,
            until=options.until,
            steps=options.steps,
            allow_unmatched=options.allow_unmatched,
        )
        verdicts = [check_gate(gate, comparison) for gate in gates]
        if options.json is not None:
            options.json.write_text(
                json.dumps(as_json(comparison, verdicts), indent=2, allow_nan=False) + "\n"
            )
        if options.plot is not None:
            # matplotlib takes a second to import, and a table needs none of it.
            from fp4mega.tracking.plot import plot_comparison

            plot_comparison(comparison, options.plot)
    except (CompareError, ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/]: {escape(str(error))}")
        return BAD_INPUT
    report(comparison, verdicts, console)
    return 0 if all(verdict.passed for verdict in verdicts) else FAILED_GATE


if __name__ == "__main__":
    sys.exit(main())
