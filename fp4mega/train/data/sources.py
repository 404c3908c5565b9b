"""Where documents come from: a folder of text files, or the sources of the running Python's standard library."""

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PYTHON_STDLIB = "python_stdlib"
_NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One file that holds text: where it is, its size in bytes and the SHA-256 of its content."""

    path: Path
    size: int
    digest: bytes

    @property
    def order(self) -> bytes:
        """Sorting key: a fixed pseudo-random order, so that a byte limit samples the whole source."""
        return self.digest[8:]

    @property
    def split_point(self) -> float:
        """A number in [0, 1) that depends on the content alone; below the valid fraction means validation."""
        return int.from_bytes(self.digest[:8], "big") / 2**64


def list_files(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of the source with one of the suffixes, sorted. Raises ValueError when there are none."""
    if source == PYTHON_STDLIB:
        root, skipped = Path(sysconfig.get_path("stdlib")), _NOT_STDLIB
    else:
        root, skipped = Path(os.path.expanduser(source)), set()
    if not root.is_dir():
        raise ValueError(
            f"source={source!r}: {root} is not a folder; expected a folder of text files or {PYTHON_STDLIB}"
        )
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped)
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    if not found:
        raise ValueError(f"source={source!r}: no file under {root} ends in {', '.join(suffixes)}")
    return sorted(found)


def read_text(path: Path) -> str | None:
    """The file's text without a byte order mark, or None when it is not text: not UTF-8, or with NUL bytes.

    Raises OSError when unreadable.
    """
    content = path.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def examine(paths: Iterable[Path]) -> tuple[list[Document], Counter[str]]:
    """Documents worth keeping, each content once, in the fixed pseudo-random order; and how many files were skipped, by reason."""
    kept: dict[bytes, Document] = {}
    skipped: Counter[str] = Counter()
    for path in paths:
        try:
            text = read_text(path) if path.is_file() else None
        except OSError:
            skipped["unreadable"] += 1
            continue
        if text is None:
            skipped["not_text"] += 1
        elif not text.strip():
            skipped["empty"] += 1
        else:
            content = text.encode("utf-8")
            digest = hashlib.sha256(content).digest()
            if digest in kept:
                skipped["duplicate"] += 1
            else:
                kept[digest] = Document(path, len(content), digest)
    return sorted(kept.values(), key=lambda d: d.order), skipped


def limit_bytes(documents: list[Document], max_bytes: int | None) -> list[Document]:
    """The first documents, in the fixed order, that fit into max_bytes; one that does not fit is passed over."""
    if max_bytes is None:
        return documents
    kept, total = [], 0
    for document in documents:
        if total + document.size <= max_bytes:
            kept.append(document)
            total += document.size
    return kept


def split(
    documents: list[Document], valid_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents by content. Both are non-empty unless valid_fraction is 0.

    Raises ValueError when there are too few documents for that.
    """
    needed = 2 if valid_fraction > 0 else 1
    if len(documents) < needed:
        raise ValueError(
            f"{len(documents)} usable documents are too few for valid_fraction={valid_fraction}: expected {needed} or more"
        )
    train = [d for d in documents if d.split_point >= valid_fraction]
    valid = [d for d in documents if d.split_point < valid_fraction]
    if valid_fraction > 0 and not valid:
        lowest = min(train, key=lambda d: d.split_point)
        train.remove(lowest)
        valid.append(lowest)
    if not train:
        highest = max(valid, key=lambda d: d.split_point)
        valid.remove(highest)
        train.append(highest)
    return train, valid
