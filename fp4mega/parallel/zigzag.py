"""Who holds which rows: Megatron's zigzag, in which rank r of n holds chunks r and 2n - 1 - r of 2n equal ones.

Early chunks see few keys under a causal mask and late ones many; a pair of one of each is the same work on every rank.
Dims: n ranks, L = S / n rows a rank, S the whole sequence.
"""

import torch
from torch import Tensor

from fp4mega.attention.problem import Placement


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a rank."""
    return rank, 2 * ranks - 1 - rank


def placement_of(rank: int, ranks: int, rows: int) -> Placement:
    """Where the `rows` rows of a rank lie in the whole sequence."""
    return Placement(rows // 2, chunks_of(rank, ranks))


def whole_placement(ranks: int, rows: int) -> Placement:
    """The whole sequence, of which every rank holds `rows` rows."""
    return Placement(rows // 2, tuple(range(2 * ranks)))


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
