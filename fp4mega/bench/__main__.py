"""`python -m fp4mega.bench accuracy [--device cuda] [--write docs/numerics.md]` or `attention [--shapes ...] [--out folder]`."""

import argparse
import sys
from pathlib import Path

import torch

from fp4mega.bench import attention
from fp4mega.bench.accuracy import check_markers, tables, write_between_markers


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fp4mega.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="output and gradient errors of every policy")
    accuracy.add_argument("--device", default="cpu", help="torch device, default cpu")
    accuracy.add_argument("--write", type=Path, help="document whose accuracy section is replaced")
    speed = commands.add_parser("attention", help="speed of the GPU kernels beside torch's own")
    speed.add_argument(
        "--shapes", nargs="+", default=attention.DEFAULT_SHAPES, help="B,H/G,S,D or ...:causal"
    )
    speed.add_argument("--policies", nargs="+", default=attention.DEFAULT_POLICIES)
    speed.add_argument("--backends", nargs="+", default=("triton",))
    speed.add_argument(
        "--peers", nargs="*", default=tuple(attention.PEERS), choices=tuple(attention.PEERS)
    )
    speed.add_argument("--repeats", type=int, default=30, help="timed calls, default 30")
    speed.add_argument("--out", type=Path, help="folder for attention.csv and attention.md")
    options = parser.parse_args(arguments)
    if options.command == "accuracy":
        try:
            torch.empty(0, device=options.device)
            if options.write:
                check_markers(options.write)
        except (RuntimeError, AssertionError, OSError, ValueError) as error:
            parser.error(str(error).splitlines()[0])
        text = tables(device=options.device)
        sys.stdout.write(text + "\n")
        if options.write:
            write_between_markers(options.write, text)
        return 0
    rows = attention.run(
        shapes=options.shapes,
        policies=options.policies,
        backends=options.backends,
        peers=options.peers,
        repeats=options.repeats,
    )
    sys.stdout.write(attention.markdown(rows) + "\n")
    if options.out:
        attention.write(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
