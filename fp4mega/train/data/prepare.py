"""Turn text files into Megatron token files: `python -m fp4mega.train.data.prepare --source FOLDER --out PREFIX`.

Writes PREFIX_train.bin/.idx, PREFIX_valid.bin/.idx and PREFIX.json (counts, tokenizer, what was asked for); with a valid
fraction of 0 one pair, PREFIX.bin/.idx. Everything goes to temporary names first; PREFIX.json appears last, so it vouches
for the other files. The split is by document and depends on the documents' content only, so a document never moves
between splits when others are added. Documents lie in a fixed pseudo-random order, so Megatron's own split by position
is a random one too.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress

from fp4mega.train.data.sources import (
    PYTHON_STDLIB,
    Document,
    examine,
    limit_bytes,
    list_files,
    read_text,
    split,
)
from fp4mega.train.data.tokenizers import Tokenizer, identify, parse_tokenizer

DEFAULT_SUFFIXES = (".py", ".txt", ".md", ".rst")
DEFAULT_VALID_FRACTION = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be prepared. Raises ValueError on values out of range."""

    source: str
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    max_bytes: int | None = None
    valid_fraction: float = DEFAULT_VALID_FRACTION

    def __post_init__(self) -> None:
        if not self.suffixes:
            raise ValueError("suffixes=(): expected at least one, such as .txt")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes={self.max_bytes}: expected 1 or more")
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ValueError(
                f"valid_fraction={self.valid_fraction}: expected 0 or more and less than 1"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain fields, comparable with what a sidecar holds."""
        return {**asdict(self), "suffixes": list(self.suffixes)}


def sidecar_path(out: str) -> Path:
    """The file that describes a prepared pair."""
    return Path(f"{out}.json")


def split_prefixes(request: Request, out: str) -> dict[str, str]:
    """Prefix of each split's .bin/.idx pair."""
    if request.valid_fraction == 0:
        return {"train": out}
    return {"train": f"{out}_train", "valid": f"{out}_valid"}


def read_sidecar(path: Path) -> dict[str, Any]:
    """The description of prepared data. Raises ValueError naming a file that is none."""
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    else:
        if isinstance(made, dict) and "tokenizer" in made:
            return made
        problem = "it names no tokenizer"
    raise ValueError(
        f"{path}: not a description of prepared data ({problem}); rename it when it is another file, delete it to "
        "prepare again"
    )


def is_prepared(request: Request, out: str, tokenizer: Tokenizer) -> bool:
    """True when PREFIX.json vouches for files made from this request, False when there is none.

    Raises ValueError when the files were made from another request or with another tokenizer: training on them would
    not be what was asked for, and replacing them might not be either.
    """
    path = sidecar_path(out)
    if not path.exists():
        return False
    made = read_sidecar(path)
    made_from, made_with = made.get("request"), made["tokenizer"]
    if not isinstance(made_from, dict):
        raise ValueError(
            f"{path}: not a description of prepared data (it holds no request); delete it to prepare again"
        )
    asked = request.as_dict()
    different = [
        f"{k}={made_from.get(k)!r} there, {asked[k]!r} asked for"
        for k in asked
        if made_from.get(k) != asked[k]
    ]
    if made_with != identify(tokenizer):
        different.append(f"tokenizer={made_with} there, {identify(tokenizer)} asked for")
    if different:
        raise ValueError(
            f"{path}: prepared from something else ({'; '.join(different)}); delete it to prepare again"
        )
    return True


def prepare(
    request: Request, out: str, tokenizer: Tokenizer, console: Console | None = None
) -> dict[str, Any]:
    """Prepare and return the sidecar's content. Files that were made from the same request are made anew.

    Raises ValueError when the source holds nothing usable, and when files of that prefix were made from something else. On
    an error, an interrupt or a SIGTERM nothing new is left behind, and earlier files of that prefix are as they were.
    """
    is_prepared(request, out, tokenizer)
    with _unwound_by_sigterm():
        return _prepare(request, out, tokenizer, console or Console(stderr=True))


@contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Have a SIGTERM end this process by an exception, so that files under temporary names are removed."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only that one may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare(request: Request, out: str, tokenizer: Tokenizer, console: Console) -> dict[str, Any]:
    from megatron.core.datasets.indexed_dataset import get_bin_path, get_idx_path

    prefixes = split_prefixes(request, out)
    for path in (prefix + ending for prefix in prefixes.values() for ending in (".bin", ".idx")):
        if os.path.exists(path) and not sidecar_path(out).exists():
            raise ValueError(
                f"{path}: exists, and no {sidecar_path(out).name} says that it was prepared here; delete it or choose another prefix"
            )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        paths = list_files(request.source, request.suffixes)
        documents, skipped = examine(progress.track(paths, description="reading"))
        documents = limit_bytes(documents, request.max_bytes)
        parts = dict(zip(prefixes, split(documents, request.valid_fraction), strict=False))
        suffix = f".{os.getpid()}.tmp"
        written: dict[str, str] = {}  # temporary path -> final path
        try:
            summary = {}
            for name, part in parts.items():
                prefix = prefixes[name]
                written[get_bin_path(prefix) + suffix] = get_bin_path(prefix)
                written[get_idx_path(prefix) + suffix] = get_idx_path(prefix)
                summary[name] = _write(part, prefix, suffix, tokenizer, progress)
            content = {
                "request": request.as_dict(),
                "tokenizer": identify(tokenizer),
                "splits": summary,
                "skipped_files": dict(sorted(skipped.items())),
                "digest": hashlib.sha256(
                    b"".join(d.digest for part in parts.values() for d in part)
                ).hexdigest(),
            }
            sidecar = sidecar_path(out)
            temporary = Path(f"{sidecar}{suffix}")
            written[str(temporary)] = str(sidecar)
            temporary.write_text(json.dumps(content, indent=2) + "\n")
            sidecar.unlink(
                missing_ok=True
            )  # nothing vouches for the mixture while files are renamed
            for source, target in written.items():
                os.replace(source, target)
        finally:
            for source in written:
                Path(source).unlink(missing_ok=True)
    return content


def _write(
    documents: Sequence[Document],
    prefix: str,
    suffix: str,
    tokenizer: Tokenizer,
    progress: Progress,
) -> dict[str, int]:
    from megatron.core.datasets.indexed_dataset import (
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    dtype = tokenizer.document("").dtype
    builder = IndexedDatasetBuilder(get_bin_path(prefix) + suffix, dtype=dtype.type)
    tokens = 0
    for document in progress.track(documents, description=f"tokenizing {Path(prefix).name}"):
        text = read_text(document.path)
        if text is None:
            raise ValueError(f"{document.path}: changed while it was being prepared")
        ids = tokenizer.document(text)
        builder.add_document(ids, [len(ids)])
        tokens += len(ids)
    builder.finalize(get_idx_path(prefix) + suffix)
    return {
        "documents": len(documents),
        "bytes": sum(d.size for d in documents),
        "tokens": tokens,
        "itemsize": np.dtype(dtype).itemsize,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 2 with one message for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4mega.train.data.prepare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--source", required=True, help=f"a folder of text files, or {PYTHON_STDLIB}"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_train.*, PREFIX_valid.*, PREFIX.json",
    )
    parser.add_argument(
        "--tokenizer", default="byte", help="byte, or huggingface:PATH of a tokenizers JSON file"
    )
    parser.add_argument(
        "--suffixes", nargs="+", default=list(DEFAULT_SUFFIXES), help="endings of the files to take"
    )
    parser.add_argument(
        "--max-bytes", type=int, default=None, help="take at most this many bytes of text"
    )
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=DEFAULT_VALID_FRACTION,
        help="share of documents held out; 0: none",
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    try:
        request = Request(
            source=options.source,
            suffixes=tuple(options.suffixes),
            max_bytes=options.max_bytes,
            valid_fraction=options.valid_fraction,
        )
        content = prepare(request, options.out, parse_tokenizer(options.tokenizer), console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("error: interrupted; nothing was changed", markup=False, highlight=False)
        return 128 + signal.SIGINT
    for name, part in content["splits"].items():
        console.print(
            f"{split_prefixes(request, options.out)[name]}: {part['documents']:,} documents, {part['bytes']:,} bytes, {part['tokens']:,} tokens",
            highlight=False,
            soft_wrap=True,
        )
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in content["skipped_files"].items())
    console.print(f"skipped files: {skipped or 'none'}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
