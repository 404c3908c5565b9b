"""Who holds which rows: Megatron's zigzag, in which rank r of n holds chunks r and 2n - 1 - r of 2n equal ones.

Early chunks see few keys under a causal mask and late ones many; a pair of one of each is the same work on every rank.
Dims: n ranks, L = S / n rows a rank, S the whole sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp4mega.attention.problem import Placement


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank."""
    return rank, 2 * ranks - 1 - rank


@dataclass(frozen=True, slots=True)
class Zigzag:
    """A batch of sequences of one length, of which this rank holds `rows` rows each; a `Layout`."""

    ranks: int
    batch: int
    rows: int

    lengths = None

    def placement(self, rank: int) -> Placement:
        return Placement((self.rows // 2,), chunks_of(rank, self.ranks))

    def whole(self) -> Placement:
        return Placement((self.rows // 2,), tuple(range(2 * self.ranks)))

    def enter(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return x

    def leave(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return x

    def enter_whole(self, x: Tensor) -> Tensor:
        return x

    def leave_whole(self, x: Tensor) -> Tensor:
        return x

    def squeeze(self, x: Tensor) -> Tensor:
        return x

    def spread(self, x: Tensor, shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
        return x

    def assemble(self, parts: Tensor) -> Tensor:
        return to_sequence(parts)

    def distribute(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return to_ranks(x, self.ranks)


def to_sequence(parts: Tensor) -> Tensor:
    """[n, B, L, ...] by rank to [B, S, ...] in the order of the sequence."""
    ranks = parts.shape[0]
    held = [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
    order = torch.tensor(held, device=parts.device).argsort()
    chunks = parts.unflatten(2, (2, parts.shape[2] // 2)).transpose(1, 2).flatten(0, 1)
    return chunks[order].transpose(0, 1).flatten(1, 2)


def to_ranks(x: Tensor, ranks: int) -> Tensor:
    """Inverse of `to_sequence`: [B, S, ...] to [n, B, L, ...]."""
    held = [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
    chunks = x.unflatten(1, (2 * ranks, -1)).transpose(0, 1)[torch.tensor(held, device=x.device)]
    return chunks.unflatten(0, (ranks, 2)).transpose(1, 2).flatten(2, 3)
