"""Tokenizers that a recipe can name: raw bytes, or a Hugging Face `tokenizers` file read from disk.

Both have the part of Megatron's tokenizer interface that its GPT datasets use: `vocab_size`, `eod`,
`special_tokens_dict` and `unique_identifiers` (which name the cached sample index).
"""

import hashlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eod|>",
    "<eod>",
    "</s>",
    "<eos>",
    "[EOS]",
)


class Tokenizer(ABC):
    """Text to ids and back. Ids are 0 .. vocab_size - 1; `eod` ends a document; there is no padding token."""

    def __init__(self, kind: str, digest: str) -> None:
        self.unique_identifiers = {"kind": kind, "digest": digest}

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Ids of the text, without special tokens."""

    def tokenize_many(self, texts: list[str]) -> list[list[int]]:
        """`tokenize` of each text."""
        return [self.tokenize(text) for text in texts]

    @abstractmethod
    def detokenize(self, ids: list[int]) -> str:
        """The text of the ids; `eod` contributes nothing."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """Id of the end of a document."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Megatron compares these with its padding id."""
        return {"eod_token": self.eod}

    def document(self, text: str) -> np.ndarray:
        """Ids of one whole document with `eod` at its end, in the smallest dtype that Megatron's files use."""
        dtype = (
            np.uint16 if self.vocab_size < 65500 else np.int32
        )  # the limit of Megatron's DType.optimal_dtype
        return np.array([*self.tokenize(text), self.eod], dtype=dtype)


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 text, and 256 as the end of a document."""

    def __init__(self) -> None:
        super().__init__("byte", "bytes-0-255-eod-256")

    def tokenize(self, text: str) -> list[int]:
        """Ids of the text: its UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: list[int]) -> str:
        """The text of the ids. A character cut at either end becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    @property
    def eod(self) -> int:
        """Id of the end of a document."""
        return 256

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 257

    def document(self, text: str) -> np.ndarray:
        """As `Tokenizer.document`, without a Python list in between."""
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)
        return np.append(ids, np.uint16(self.eod))


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library (or the folder that holds one); nothing is downloaded.

    Raises ValueError when the file is missing, unreadable, or has none of `END_OF_DOCUMENT_NAMES`.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Library

        file = Path(os.path.expanduser(path))
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(
                f"tokenizer path={path!r}: {file} is not a file; expected a tokenizers JSON file"
            )
        try:
            self._library = Library.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"tokenizer path={path!r}: not a tokenizers JSON file ({error})"
            ) from error
        super().__init__("huggingface", hashlib.sha256(file.read_bytes()).hexdigest()[:16])
        # A file may ask for texts of one length. Documents are whole, and a text that spells a special token is text.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        named = [name for name in END_OF_DOCUMENT_NAMES if name in self._vocab]
        if not named:
            raise ValueError(
                f"tokenizer path={path!r}: no end-of-document token; looked for {', '.join(END_OF_DOCUMENT_NAMES)}"
            )
        self._eod = self._vocab[named[0]]

    def tokenize(self, text: str) -> list[int]:
        """Ids of the text, without special tokens."""
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def tokenize_many(self, texts: list[str]) -> list[list[int]]:
        """`tokenize` of each text, on as many threads as the library finds right (RAYON_NUM_THREADS)."""
        made = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [list(encoding.ids) for encoding in made]

    def detokenize(self, ids: list[int]) -> str:
        """The text of the ids; `eod` contributes nothing."""
        return str(
            self._library.decode([int(i) for i in ids if i != self._eod], skip_special_tokens=False)
        )

    @property
    def eod(self) -> int:
        """Id of the end of a document."""
        return self._eod

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._vocab.values()) + 1


def build_tokenizer(kind: str, path: str | None = None) -> Tokenizer:
    """The tokenizer that a recipe names. Raises ValueError for an unknown kind or a path that does not fit it."""
    if kind == "byte":
        if path is not None:
            raise ValueError(
                f"tokenizer kind='byte', path={path!r}: the byte tokenizer has no file"
            )
        return ByteTokenizer()
    if kind == "huggingface":
        if not path:
            raise ValueError(
                "tokenizer kind='huggingface': path is missing; expected a tokenizers JSON file"
            )
        return HuggingFaceTokenizer(path)
    raise ValueError(f"tokenizer kind={kind!r}: allowed: byte, huggingface")


def parse_tokenizer(spelling: str) -> Tokenizer:
    """The tokenizer of a command line: `byte` or `huggingface:PATH`."""
    kind, _, path = spelling.partition(":")
    return build_tokenizer(kind, path or None)


def identify(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a prepared file records of its tokenizer, comparable with `==`."""
    return {**tokenizer.unique_identifiers, "vocab_size": tokenizer.vocab_size}
