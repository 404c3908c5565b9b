"""`python -m fp4mega.bench accuracy [--device cuda] [--write docs/numerics.md]`, `attention [--shapes ...] [--peers ...] [--csv file]`, `accumulation [--seqlen 32768] [--out folder]`, `bias [--draws 64] [--input file]` or `model [--shapes ...] [--schedules]`."""

import argparse
import sys
from pathlib import Path

import torch

from fp4mega.bench import accumulation, bias, command, model
from fp4mega.bench.accuracy import check_markers, tables, write_between_markers
from fp4mega.bench.outputs import check_outputs


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fp4mega.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="output and gradient errors of every policy")
    accuracy.add_argument("--device", default="cpu", help="torch device, default cpu")
    accuracy.add_argument("--write", type=Path, help="document whose accuracy section is replaced")
    speed = commands.add_parser("attention", help="speed of the GPU kernels beside torch's own")
    command.add_arguments(speed)
    sums = commands.add_parser("accumulation", help="what the accumulator of FP8 products costs")
    sums.add_argument("--seqlen", type=int, default=32768, help="length summed over, default 32768")
    sums.add_argument("--dim", type=int, default=128, help="head dim, default 128")
    sums.add_argument("--rows", type=int, default=512, help="rows of each result, default 512")
    sums.add_argument(
        "--means", nargs="+", type=float, default=accumulation.DEFAULT_MEANS, help="of the inputs"
    )
    sums.add_argument(
        "--intervals", nargs="+", type=int, default=accumulation.DEFAULT_INTERVALS,
        help="steps between two levels",
    )  # fmt: skip
    sums.add_argument("--out", type=Path, help="folder for accumulation.csv and accumulation.md")
    drawn = commands.add_parser("bias", help="bias and noise of the gradient of each backward rule")
    drawn.add_argument("--policies", nargs="+", default=bias.DEFAULT_POLICIES)
    drawn.add_argument("--draws", type=int, default=64, help="rounding draws, default 64")
    drawn.add_argument(
        "--seqlen", type=int, default=512, help="of the batch made here, default 512"
    )
    drawn.add_argument("--device", default="cpu", help="torch device, default cpu")
    drawn.add_argument("--input", type=Path, help="batch to use: torch.save of q, k, v, dout")
    drawn.add_argument("--out", type=Path, help="file that the table is written to as well")
    predicted = commands.add_parser("model", help="speed on a GB200, predicted without one")
    model.add_arguments(predicted)
    options = parser.parse_args(arguments)
    if options.command == "model":
        return model.main(predicted, options)
    if options.command == "bias":
        return _bias(parser, options)
    if options.command == "accuracy":
        try:
            torch.empty(0, device=options.device)
            if options.write:
                check_outputs([options.write])
                check_markers(options.write)
        except (RuntimeError, AssertionError, OSError, ValueError) as error:
            parser.error(str(error).splitlines()[0])
        text = tables(device=options.device)
        sys.stdout.write(text + "\n")
        if options.write:
            write_between_markers(options.write, text)
        return 0
    if options.command == "accumulation":
        return _accumulation(parser, options)
    return command.main(speed, options)


def _accumulation(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        accumulation.check(options.seqlen, options.dim, options.rows, options.intervals)
        if options.out is not None and options.out.exists() and not options.out.is_dir():
            raise ValueError(f"{options.out}: is a file, expected a folder")
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("accumulation measures a GPU's matrix unit: no CUDA device")
    rows = accumulation.run(
        seqlen=options.seqlen,
        dim=options.dim,
        rows=options.rows,
        means=options.means,
        intervals=options.intervals,
    )
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    heading = f"{torch.cuda.get_device_name()} (sm_{capability}), S {options.seqlen}, D {options.dim}, {options.rows} rows, torch {torch.__version__}"
    sys.stdout.write(f"{heading}\n\n{accumulation.markdown(rows)}\n")
    if options.out:
        accumulation.write(rows, options.out)
    return 0


def _bias(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        check_outputs([options.out], inputs=[options.input])
        torch.empty(0, device=options.device)
        batch = (
            bias.make_batch(seqlen=options.seqlen, device=options.device)
            if options.input is None
            else bias.load_batch(options.input, options.device)
        )
        rows = bias.run(options.policies, batch, options.draws)
    except (RuntimeError, AssertionError, OSError, ValueError) as error:
        parser.error(str(error).splitlines()[0])
    text = bias.markdown(rows, options.draws)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
