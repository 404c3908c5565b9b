"""`python -m fp4mega.bench accuracy [--device cuda] [--write docs/numerics.md]`."""

import argparse
import sys
from pathlib import Path

from fp4mega.bench.accuracy import tables, write_between_markers


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fp4mega.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="output and gradient errors of every policy")
    accuracy.add_argument("--device", default="cpu", help="torch device, default cpu")
    accuracy.add_argument("--write", type=Path, help="document whose accuracy section is replaced")
    options = parser.parse_args(arguments)
    text = tables(device=options.device)
    sys.stdout.write(text + "\n")
    if options.write:
        write_between_markers(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
