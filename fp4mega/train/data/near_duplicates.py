"""Documents that repeat one another: equal after normalization, or sharing most of their runs of lines.

A shingle is `SHINGLE_LINES` consecutive lines, white space collapsed and lines without content left out. Of all shingles
a fixed eighth, chosen by hash, stands for the document. A document is a near duplicate when more than
`LARGEST_SHARE` of its sample occurs in documents kept before it. One pass, no pairwise comparison: the first of a family stays.
"""

import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

SHINGLE_LINES = 5
SAMPLED = 8
LARGEST_SHARE = 0.5
SHORTEST_LINE = 3
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def normalize(text: str) -> str:
    """The text with each run of white space as one space: equal normal forms are exact duplicates."""
    return " ".join(text.split())


def digest_of(text: str) -> bytes:
    """SHA-256 of the normalized text."""
    return hashlib.sha256(normalize(text).encode("utf-8")).digest()


def shingles_of(text: str) -> NDArray[np.uint64]:
    """The sampled shingles of a document, each once, sorted."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    kept = [line for line in lines if len(line) >= SHORTEST_LINE]
    if not kept:
        return np.empty(0, dtype=np.uint64)
    # Two CRCs of different start values, because 32 bits alone would collide among tens of millions of lines.
    encoded = [line.encode("utf-8") for line in kept]
    low = np.array([zlib.crc32(line) for line in encoded], dtype=np.uint64)
    high = np.array([zlib.adler32(line, 7) for line in encoded], dtype=np.uint64)
    hashes = (high << np.uint64(32)) | low
    count = max(1, len(hashes) - SHINGLE_LINES + 1)
    combined = np.zeros(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for i in range(min(SHINGLE_LINES, len(hashes))):
            combined = (combined ^ hashes[i : i + count]) * _MULTIPLIER
            combined ^= combined >> np.uint64(29)
    return np.unique(combined[combined % np.uint64(SAMPLED) == 0])


class DuplicateFilter:
    """Remembers what was kept; `admit` says whether a document is new and, when it is, remembers it too."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._shingles: set[int] = set()

    def admit(self, text: str) -> str:
        """`kept`, `exact_duplicate` or `near_duplicate`."""
        digest = digest_of(text)[:16]
        if digest in self._digests:
            return "exact_duplicate"
        sample = shingles_of(text).tolist()
        if sample and sum(s in self._shingles for s in sample) > LARGEST_SHARE * len(sample):
            return "near_duplicate"
        self._digests.add(digest)
        self._shingles.update(sample)
        return "kept"
