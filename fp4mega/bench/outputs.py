"""Whether the files that a benchmark is to write can be written: asked before it runs for minutes or hours."""

import os
from collections.abc import Iterable
from pathlib import Path


def check_outputs(outputs: Iterable[Path | None], *, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ValueError for a file that cannot be written, that is given twice, or that is one of those read; None is no file."""
    read = {path.resolve() for path in inputs if path is not None}
    seen: set[Path] = set()
    for path in (path for path in outputs if path is not None):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist")
        if path.is_dir():
            raise ValueError(f"{path}: is a folder, expected the name of a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path}: no permission to write it")
        if path.resolve() in read:
            raise ValueError(f"{path}: is read as input, expected another file")
        if path.resolve() in seen:
            raise ValueError(f"{path}: given for two outputs, expected two files")
        seen.add(path.resolve())
