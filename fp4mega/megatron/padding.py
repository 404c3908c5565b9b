"""Padding between packed sequences on one rank: taken out before attention, which knows none, and put back as zeros.

Over context-parallel ranks, which need sequences of certain lengths and so padding, `fp4mega.parallel` does the same.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


def rows_that_count(packed: PackedSeqParams, side: str, rows: int) -> Tensor | None:
    """Which of the `rows` packed rows of `side` (q or kv) are no padding, int64 [T]; None when all of them are.

    Reads the cumulative lengths where both are given and are two tensors: a synchronization on a GPU. Raises ValueError for a sequence
    longer than its place, or places that are not those of the rows.
    """
    lengths = getattr(packed, f"cu_seqlens_{side}")
    padded = getattr(packed, f"cu_seqlens_{side}_padded")
    if padded is None or padded is lengths or torch.equal(padded, lengths):
        return None
    name = f"packed_seq_params.cu_seqlens_{side}_padded={padded.tolist()}"
    if padded.shape != lengths.shape or (padded.diff() < lengths.diff()).any():
        raise ValueError(
            f"{name}: expected a place for each sequence of cu_seqlens_{side}={lengths.tolist()}, as long or longer"
        )
    if int(padded[0]) != 0 or int(padded[-1]) != rows:
        raise ValueError(f"{name}: expected to start at 0 and to end at the {rows} rows of {side}")
    counts = lengths.diff()
    shift = (padded[:-1] - lengths[:-1]).repeat_interleave(counts)
    return torch.arange(len(shift), device=shift.device) + shift


def put_back(out: Tensor, rows: Tensor, total: int) -> Tensor:
    """out [T, ...] at `rows` of `total`, zeros elsewhere."""
    return out.new_zeros(total, *out.shape[1:]).index_copy(0, rows, out)
