"""Checks of Megatron token files before anything is built on them: a broken pair is an error with sizes, not a crash later.

PREFIX.idx: the magic `MMIDIDX\\0\\0`, version (uint64, 1), dtype code (uint8), number of sequences (uint64), number of
document boundaries (uint64), then lengths (int32), byte offsets (int64) and boundaries (int64). PREFIX.bin: the tokens.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4mega.train.data.prepare import read_sidecar
from fp4mega.train.data.tokenizers import Tokenizer, identify

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_SCANNED_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TokenFile:
    """A checked pair PREFIX.bin/.idx. lengths: [sequences] int32, tokens of each sequence (document)."""

    prefix: str
    lengths: np.ndarray
    dtype: np.dtype

    @property
    def tokens(self) -> int:
        """Tokens of the whole file."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def identity(self) -> str:
        """Changes when the files are rewritten: sizes and modification times."""
        stats = [os.stat(self.prefix + ending) for ending in (".idx", ".bin")]
        return "-".join(f"{s.st_size:x}.{s.st_mtime_ns:x}" for s in stats)


def check_token_file(prefix: str) -> TokenFile:
    """Check that PREFIX.bin and PREFIX.idx exist and agree. Raises ValueError naming the file and both sizes."""
    idx, binary = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, binary):
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; expected the pair {idx.name} and {binary.name}"
            )
    idx_size, bin_size = idx.stat().st_size, binary.stat().st_size
    with idx.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(
            f"{idx}: {idx_size} bytes are less than the {_HEADER.size} of a header; the file is truncated"
        )
    magic, version, code, sequences, boundaries = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1:
        raise ValueError(
            f"{idx}: starts with {magic!r}, version {version}; expected {_MAGIC!r}, version 1"
        )
    if code not in _DTYPES:
        raise ValueError(
            f"{idx}: dtype code {code} holds no token ids; allowed: {', '.join(map(str, _DTYPES))}"
        )
    dtype = np.dtype(_DTYPES[code])
    expected = _HEADER.size + sequences * (4 + 8) + boundaries * 8
    # A multimodal index has one more byte for each sequence; it is not a text file, so it is refused here too.
    if idx_size != expected:
        raise ValueError(
            f"{idx}: {idx_size} bytes, expected {expected} for {sequences} sequences and {boundaries} boundaries; "
            "the file is truncated or damaged"
        )
    lengths = np.fromfile(idx, dtype=np.int32, count=sequences, offset=_HEADER.size)
    offsets = np.fromfile(idx, dtype=np.int64, count=sequences, offset=_HEADER.size + 4 * sequences)
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens * dtype.itemsize != bin_size:
        raise ValueError(
            f"{binary}: {bin_size} bytes, but {idx.name} describes {tokens} tokens of {dtype.itemsize} bytes "
            f"= {tokens * dtype.itemsize} bytes; one of the two is truncated or belongs to another pair"
        )
    if sequences == 0 or tokens == 0:
        raise ValueError(f"{idx}: holds no tokens")
    ends = offsets + lengths.astype(np.int64) * dtype.itemsize
    if lengths.min() < 0 or offsets.min() < 0 or int(ends.max()) > bin_size:
        raise ValueError(
            f"{idx}: describes a sequence outside the {bin_size} bytes of {binary.name}; the index is damaged"
        )
    return TokenFile(prefix, lengths, dtype)


def check_vocabulary(file: TokenFile, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that the file's ids fit the model. Raises ValueError naming the file, the id and the vocabulary.

    A sidecar of `prepare` states the tokenizer, which must be the recipe's. Without one, up to 16 Mi tokens spread over
    the file are looked at; every batch is checked again when it is drawn.
    """
    for out in {
        file.prefix,
        file.prefix.removesuffix("_train"),
        file.prefix.removesuffix("_valid"),
    }:
        sidecar = Path(f"{out}.json")
        if sidecar.is_file():
            made = read_sidecar(sidecar)["tokenizer"]
            if made != identify(tokenizer):
                raise ValueError(
                    f"{file.prefix}.bin: tokenized with {made}, the recipe's tokenizer is {identify(tokenizer)}"
                )
    ids = np.memmap(f"{file.prefix}.bin", dtype=file.dtype, mode="r")
    pieces = 64
    piece = max(1, _SCANNED_TOKENS // pieces)
    starts = range(0, len(ids), max(piece, len(ids) // pieces))
    low, high = (int(f(int(f(ids[s : s + piece])) for s in starts)) for f in (min, max))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{file.prefix}.bin: holds token id {low if low < 0 else high}, model.vocab_size={vocab_size} allows 0 to {vocab_size - 1}"
        )
