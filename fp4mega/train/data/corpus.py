"""A corpus of real text from package registries: `python -m fp4mega.train.data.corpus launch/corpus.txt --out data/corpus`.

Stages, each of which keeps what it has made and is not run again by the next call:

1. fetch: the archives of the listed packages, with pip and apt (`packages`);
2. extract: the text of each package (`cleaning`), one file PREFIX_work/text/<registry>_<name>.jsonl;
3. deduplicate: which documents stay (`near_duplicates`), PREFIX_work/kept.json;
4. tokenizer: byte-level BPE, trained on the training documents that stay;
5. tokens: PREFIX_train.bin/.idx and PREFIX_valid.bin/.idx for Megatron.

PREFIX_manifest.json names every package with version, licence and bytes, and what was left out why. PREFIX.json appears last
and vouches for the token files. The same archives give the same files: documents lie in an order made from their content, and
content alone decides which ones are held out.
"""

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fp4mega.train.data.cleaning import SUFFIXES, reason_to_skip, text_of
from fp4mega.train.data.near_duplicates import DuplicateFilter
from fp4mega.train.data.packages import (
    COPYRIGHT,
    Package,
    fetch,
    licence_of,
    read_files,
    read_list,
    version_of,
)
from fp4mega.train.data.tokenizers import Tokenizer, build_tokenizer, identify

END_OF_DOCUMENT = "<|endoftext|>"
DEFAULT_VOCAB = 16384
DEFAULT_VALID_FRACTION = 0.005
DEFAULT_SAMPLE_BYTES = 100_000_000
_ENCODED_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What is asked for. Raises ValueError on values out of range."""

    out: str
    vocab_size: int = DEFAULT_VOCAB
    valid_fraction: float = DEFAULT_VALID_FRACTION
    sample_bytes: int = DEFAULT_SAMPLE_BYTES

    def __post_init__(self) -> None:
        if not 512 <= self.vocab_size <= 65000:
            raise ValueError(
                f"vocab_size={self.vocab_size}: expected 512 to 65000, so that a token is two bytes"
            )
        if not 0.0 < self.valid_fraction < 0.5:
            raise ValueError(
                f"valid_fraction={self.valid_fraction}: expected more than 0 and less than 0.5"
            )
        if self.sample_bytes < 1:
            raise ValueError(f"sample_bytes={self.sample_bytes}: expected 1 or more")

    @property
    def work(self) -> Path:
        """Folder of what the stages keep."""
        return Path(f"{self.out}_work")

    @property
    def tokenizer_file(self) -> Path:
        """The trained tokenizer."""
        return Path(f"{self.out}_tokenizer.json")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kept document lies: text file, byte offset and length of its line, and the SHA-256 of its text."""

    file: Path
    offset: int
    length: int
    digest: bytes

    @property
    def split_point(self) -> float:
        """A number in [0, 1) that depends on the content alone; below the valid fraction means held out."""
        return int.from_bytes(self.digest[:8], "big") / 2**64


def build(packages: Sequence[Package], corpus: Corpus, console: Console) -> dict[str, Any]:
    """Make what is missing of the corpus and return its description. Raises ValueError naming the packages and the reason."""
    asked = _request(packages, corpus)
    description = Path(f"{corpus.out}.json")
    if description.exists():
        made: dict[str, Any] = json.loads(description.read_text())
        if made.get("request") == asked:
            console.print(f"{description}: already made", highlight=False)
            return made
        raise ValueError(
            f"{description}: made from another list or with other options; delete it to make it again"
        )
    entries, files = [], []
    for number, package in enumerate(packages, 1):
        file, entry = extract(package, corpus)
        entries.append(entry)
        files.append(file)
        console.print(
            f"[{number}/{len(packages)}] {package.registry} {package.name} {entry['version']}: "
            f"{entry['documents']:,} documents, {entry['bytes']:,} bytes",
            markup=False,
            highlight=False,
        )
    if unknown := [f"{e['registry']} {e['name']}" for e in entries if not e["licence"]]:
        raise ValueError(
            f"state no licence that could be read: {', '.join(unknown)}; look them up and add licence=NAME to their lines"
        )
    places, outcome = _deduplicate_once(files, entries, corpus)
    console.print(
        f"kept {len(places):,} documents of {sum(outcome.values()):,}; {dict(outcome)}",
        markup=False,
        highlight=False,
    )
    train = [p for p in places if p.split_point >= corpus.valid_fraction]
    valid = [p for p in places if p.split_point < corpus.valid_fraction]
    if not train or not valid:
        raise ValueError(
            f"{len(places)} documents are too few for valid_fraction={corpus.valid_fraction}: one split is empty"
        )
    train_tokenizer(train, corpus)
    tokenizer = build_tokenizer("huggingface", str(corpus.tokenizer_file))
    splits = {
        name: _write_tokens(part, f"{corpus.out}_{name}", tokenizer)
        for name, part in (("valid", valid), ("train", train))
    }
    _write_json(
        Path(f"{corpus.out}_manifest.json"), {"packages": entries, "outcome": dict(outcome)}
    )
    content = {
        "request": asked,
        "tokenizer": identify(tokenizer),
        "splits": splits,
        "digest": sha256(b"".join(p.digest for p in places)).hexdigest(),
    }
    _write_json(description, content)
    return content


def _request(packages: Sequence[Package], corpus: Corpus) -> dict[str, Any]:
    return {
        "packages": [[p.registry, p.name, p.version, p.max_bytes, p.one_in] for p in packages],
        "vocab_size": corpus.vocab_size,
        "valid_fraction": corpus.valid_fraction,
        "sample_bytes": corpus.sample_bytes,
    }


def extract(package: Package, corpus: Corpus) -> tuple[Path, dict[str, Any]]:
    """The package's text file, one JSON object {name, text} a line, and its entry of the manifest; made unless it is there.

    A package with more text than `max_bytes` gives the documents whose digests are smallest.
    """
    archive = fetch(package, corpus.work / "archives")
    stem = f"{package.registry}_{package.name}"
    file, entry_file = (corpus.work / "text" / f"{stem}{end}" for end in (".jsonl", ".json"))
    wanted = {
        "archive": archive.name,
        "max_bytes": package.max_bytes,
        "one_in": package.one_in,
    }
    if entry_file.exists():
        entry: dict[str, Any] = json.loads(entry_file.read_text())
        if entry["made_from"] == wanted:
            return file, {**entry, "licence": package.licence or entry["licence"]}
    file.parent.mkdir(parents=True, exist_ok=True)
    skipped: Counter[str] = Counter()
    lines: list[tuple[bytes, bytes, int]] = []
    stated: bytes | None = None
    for name, content in read_files(archive, (*SUFFIXES, "/copyright")):
        if name.endswith("/copyright"):
            stated = content if COPYRIGHT.search(name) else stated
        if not name.endswith(SUFFIXES) or not package.takes(name):
            continue
        text = text_of(name, content)
        reason = "not_text" if text is None else reason_to_skip(text)
        if text is None or reason is not None:
            skipped[reason or "not_text"] += 1
            continue
        encoded = text.encode("utf-8", errors="replace")
        line = json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n"
        lines.append((sha256(encoded).digest(), line.encode("utf-8"), len(encoded)))
    if not lines:
        raise ValueError(
            f"{package.registry} {package.name}: {archive.name} holds no text to train on ({dict(skipped)})"
        )
    lines.sort(key=lambda item: item[0])
    kept, total = [], 0
    for _, line_bytes, size in lines:
        if total + size > package.max_bytes:
            skipped["beyond_max_bytes"] += 1
            continue
        kept.append(line_bytes)
        total += size
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(file)
    entry = {
        "registry": package.registry,
        "name": package.name,
        "version": version_of(archive),
        "licence": licence_of(package, archive, stated),
        "documents": len(kept),
        "bytes": total,
        "skipped": dict(sorted(skipped.items())),
        "made_from": wanted,
    }
    _write_json(entry_file, entry)
    return file, entry


def deduplicate(
    files: Sequence[Path], entries: Sequence[dict[str, Any]]
) -> tuple[list[Place], Counter[str]]:
    """Documents that repeat none before them, in the order of their digests; each entry gets `kept_documents` and `kept_bytes`."""
    seen = DuplicateFilter()
    outcome: Counter[str] = Counter()
    places: list[Place] = []
    for file, entry in zip(files, entries, strict=True):
        documents, size, offset = 0, 0, 0
        with file.open("rb") as stream:
            for line in stream:
                text = json.loads(line)["text"]
                verdict = seen.admit(text)
                outcome[verdict] += 1
                if verdict == "kept":
                    encoded = text.encode("utf-8", errors="replace")
                    places.append(Place(file, offset, len(line), sha256(encoded).digest()))
                    documents, size = documents + 1, size + len(encoded)
                offset += len(line)
        entry |= {"kept_documents": documents, "kept_bytes": size}
    # The first half of the digest decides the split; the order must not depend on it.
    return sorted(places, key=lambda p: p.digest[8:]), outcome


def _deduplicate_once(
    files: Sequence[Path], entries: list[dict[str, Any]], corpus: Corpus
) -> tuple[list[Place], Counter[str]]:
    """`deduplicate`, read back from kept.json when that was made from these very text files."""
    note = corpus.work / "kept.json"
    made_from = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    if note.exists():
        kept = json.loads(note.read_text())
        if kept["made_from"] == made_from:
            for entry, counts in zip(entries, kept["entries"], strict=True):
                entry |= counts
            places = [Place(files[i], o, n, bytes.fromhex(d)) for i, o, n, d in kept["places"]]
            return places, Counter(kept["outcome"])
    places, outcome = deduplicate(files, entries)
    number = {file: i for i, file in enumerate(files)}
    content = {
        "made_from": made_from,
        "entries": [{name: e[name] for name in ("kept_documents", "kept_bytes")} for e in entries],
        "outcome": dict(outcome),
        "places": [[number[p.file], p.offset, p.length, p.digest.hex()] for p in places],
    }
    temporary = note.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(note)
    return places, outcome


def texts(places: Sequence[Place]) -> Iterator[str]:
    """The documents' texts, in the order of `places`."""
    streams = {file: file.open("rb") for file in {p.file for p in places}}
    try:
        for place in places:
            stream = streams[place.file]
            stream.seek(place.offset)
            yield json.loads(stream.read(place.length))["text"]
    finally:
        for stream in streams.values():
            stream.close()


def train_tokenizer(places: Sequence[Place], corpus: Corpus) -> None:
    """Byte-level BPE with `END_OF_DOCUMENT`, trained on the first documents up to `sample_bytes`; kept when it is there."""
    if corpus.tokenizer_file.exists():
        return
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_sample(places, corpus.sample_bytes), trainer)
    temporary = corpus.tokenizer_file.with_suffix(".tmp")
    library.save(str(temporary))
    temporary.replace(corpus.tokenizer_file)


def _sample(places: Sequence[Place], size: int) -> Iterator[str]:
    taken = 0
    for text in texts(places):
        if taken >= size:
            return
        taken += len(text)
        yield text


def _write_tokens(places: Sequence[Place], prefix: str, tokenizer: Tokenizer) -> dict[str, int]:
    from megatron.core.datasets.indexed_dataset import (
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    suffix = f".{os.getpid()}.tmp"
    builder = IndexedDatasetBuilder(get_bin_path(prefix) + suffix, dtype=np.uint16)
    tokens = size = 0
    try:
        for batch in _batches(texts(places), _ENCODED_AT_ONCE):
            for text, ids in zip(batch, tokenizer.tokenize_many(batch), strict=True):
                document = np.array([*ids, tokenizer.eod], dtype=np.uint16)
                builder.add_document(document, [len(document)])
                tokens += len(document)
                size += len(text.encode("utf-8", errors="replace"))
        builder.finalize(get_idx_path(prefix) + suffix)
        for path in (get_bin_path(prefix), get_idx_path(prefix)):
            os.replace(path + suffix, path)
    finally:
        for path in (get_bin_path(prefix), get_idx_path(prefix)):
            Path(path + suffix).unlink(missing_ok=True)
    return {"documents": len(places), "bytes": size, "tokens": tokens, "itemsize": 2}


def _batches(items: Iterator[str], count: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for item in items:
        batch.append(item)
        if len(batch) == count:
            yield batch
            batch = []
    if batch:
        yield batch


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 2 with one message for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4mega.train.data.corpus", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("list", type=Path, help="packages, such as launch/corpus.txt")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="such as data/corpus")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB)
    parser.add_argument("--valid-fraction", type=float, default=DEFAULT_VALID_FRACTION)
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=DEFAULT_SAMPLE_BYTES,
        help="text that the tokenizer is trained on",
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True)
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    try:
        corpus = Corpus(
            out=options.out,
            vocab_size=options.vocab_size,
            valid_fraction=options.valid_fraction,
            sample_bytes=options.sample_bytes,
        )
        content = build(read_list(options.list), corpus, console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        return 2
    for name, part in content["splits"].items():
        console.print(
            f"{options.out}_{name}: {part['documents']:,} documents, {part['bytes']:,} bytes, {part['tokens']:,} tokens",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
