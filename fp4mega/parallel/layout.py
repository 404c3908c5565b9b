"""`Layout`: how the rows that a caller hands over become a dense batch, and how ranks' rows become whole sequences.

Dims: n ranks, L rows a rank in the caller's tensors, N sequences, R rows of the longest one on a rank, S of it on all.
"""

from typing import Protocol

from torch import Tensor

from fp4mega.attention.problem import Placement


class Layout(Protocol):
    """Sequences over `ranks` ranks, a dense batch of `batch` of them with `rows` rows each on this one.

    lengths: rows that each sequence has on all ranks together, int [N]; None when all that are there count.
    """

    @property
    def ranks(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def lengths(self) -> Tensor | None: ...

    def placement(self, rank: int) -> Placement:
        """Where the rows of a rank's dense batch lie in their sequences."""
        ...

    def whole(self) -> Placement:
        """The same for a dense batch of whole sequences."""
        ...

    def enter(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's rows [B, L, ...] as a dense batch [N, R, ...]; `fill` in rows that do not count."""
        ...

    def leave(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `enter`: [N, R, ...] to [B, L, ...]."""
        ...

    def assemble(self, parts: Tensor) -> Tensor:
        """Every rank's rows [n, B, L, ...] in the order of the sequences, without those that do not count."""
        ...

    def distribute(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `assemble`; `fill` in rows that do not count."""
        ...

    def enter_whole(self, x: Tensor) -> Tensor:
        """What `assemble` gives as a dense batch [N, S, ...], zeros in rows that do not count."""
        ...

    def leave_whole(self, x: Tensor) -> Tensor:
        """Inverse of `enter_whole`."""
        ...

    def squeeze(self, x: Tensor) -> Tensor:
        """x [N, R / f, ...], with a place for every f rows, as [B, L / f, ...], without those behind a shorter sequence's chunks.

        A tensor with one place for all rows of a sequence, [N, 1, ...], stays as it is.
        """
        ...

    def spread(self, x: Tensor, shape: tuple[int, ...], fill: float = 0.0) -> Tensor:
        """Inverse of `squeeze`, `fill` in the places that it left out; `shape` is [N, R / f, ...]."""
        ...
