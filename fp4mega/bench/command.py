"""The command `python -m fp4mega.bench attention`: arguments in, tables and files out."""

import argparse
import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from fp4mega.bench import attention, report
from fp4mega.bench.outputs import check_outputs
from fp4mega.bench.peers import AVAILABLE, NONE, PEERS

PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `attention`. Lists take spaces or, except shapes, commas."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=attention.DEFAULT_SHAPES,
        help="B,H/G,S,D or B,H/G,S,D:causal",
    )
    parser.add_argument("--backends", nargs="+", default=("triton",), help="default triton")
    parser.add_argument("--policies", nargs="+", default=attention.DEFAULT_POLICIES)
    parser.add_argument(
        "--peers", nargs="+", default=(AVAILABLE,),
        help=f"{', '.join(PEERS)}; {AVAILABLE} (default) takes those that are installed, {NONE} takes none",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="timed calls an arm, default 20")
    parser.add_argument(
        "--gate-heads", type=int, default=2,
        help="kv heads of each shape that the float64 reference checks, default 2; the others are compared with them",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, help="file for all rows")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument("--plot", type=Path, help=f"file for the picture: {', '.join(PICTURES)}")


def words(values: Iterable[str]) -> list[str]:
    """Comma-separated and space-separated names as one list."""
    return [name for value in values for name in value.split(",") if name]


def heading(chosen: attention.Plan) -> str:
    """Device and versions, one line."""
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    parts = [
        f"{torch.cuda.get_device_name()} (sm_{capability})",
        f"torch {torch.__version__}",
        f"cuDNN {torch.backends.cudnn.version()}",
    ]
    try:
        parts.append(f"triton {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        parts.append("no triton")
    parts += [v for v in (peer.versions() for peer in chosen.peers) if v]
    return ", ".join(parts)


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run it; 0 when every gate was green, 1 otherwise. Bad arguments end through `parser.error` before any device work."""
    try:
        check_outputs((options.csv, options.markdown, options.plot))
        if options.plot is not None and options.plot.suffix not in PICTURES:
            raise ValueError(f"--plot {options.plot}: allowed suffixes: {', '.join(PICTURES)}")
        chosen = attention.plan(
            shapes=options.shapes,
            policies=words(options.policies),
            backends=words(options.backends),
            peers=words(options.peers),
            repeats=options.repeats,
            heads=options.gate_heads,
        )
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("attention times kernels on a GPU: no CUDA device")
    title = heading(chosen)
    console = Console(file=sys.stdout, width=max(Console().width, 170))
    console.print(title, markup=False)
    results, failure = attention.Results(), None
    try:
        attention.run(chosen, results, say=lambda line: console.print(line, markup=False))
    except RuntimeError as error:
        # What was measured before it is worth having.
        failure = f"{type(error).__name__}: {error}"
    report.show(results, console)
    if options.csv:
        options.csv.write_text(report.as_csv(results))
    if options.markdown:
        options.markdown.write_text(f"{title}\n\n{report.markdown(results)}")
    if options.plot and results.rows:
        report.plot(results, options.plot)
    if failure is not None:
        sys.stderr.write(f"{parser.prog}: {failure}\n")
    return 0 if results.green and failure is None else 1
