"""Shared memory of a forward CTA: mbarriers, rings of K and V, and what the warps tell one another."""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint8, cute

from fp4mega.kernels.cute.config import (
    ITEM_BUFFERS,
    QUERY_STAGES,
    SCALE_ATOM,
    TILE_M,
    TILE_N,
    ForwardConfig,
)

HALVES = 2
"""P of a key tile is published in halves of 64 keys."""
_WARPS = TILE_M // 32


def barriers(config: ForwardConfig) -> tuple[tuple[str, int, int], ...]:
    """(name, how many, arrivals of one phase) of every mbarrier.

    Rings: one a buffer; of K and V a phase for every `stages`-th key tile, of Q, and of the last row maxima (`top_full`), for every
    second work item. The others: one a query tile, one phase a key tile, counted on through all items. `s_full` scores are
    written; `s_read` they are in registers; `p_full` half of P is written; `rise_full` the factor of O is known; `o_ready` O is
    rescaled, at the first key tile of an item: read (Direct-P, which never rescales, has only these phases); `o_full` O and the row
    sums are up to date; `total_read` the row sums are in registers, those of tile 1 of the step before.

    Nobody is more than one phase ahead of who waits: then a parity would mean another phase.
    """
    tiles = QUERY_STAGES
    return (
        ("q_full", ITEM_BUFFERS * tiles, 1),
        ("q_empty", ITEM_BUFFERS, 1),
        ("k_full", config.stages, 1),
        ("k_empty", config.stages, 1),
        ("v_full", config.stages, 1),
        ("v_empty", config.stages, 1),
        ("s_full", tiles, 1),
        ("s_read", tiles, _WARPS),
        ("p_full", tiles * HALVES, _WARPS),
        ("rise_full", tiles, _WARPS),
        ("o_ready", tiles, _WARPS),
        ("o_full", tiles, 1),
        ("total_read", tiles, _WARPS),
        ("top_full", ITEM_BUFFERS * tiles, _WARPS),
    )


def shared_storage(config: ForwardConfig) -> Any:
    """The struct to allocate."""
    scale_words = config.scale_atoms * SCALE_ATOM // 4
    atom_words = SCALE_ATOM // 4
    rows = QUERY_STAGES * TILE_M

    def scales(words: int) -> Any:
        return cute.struct.Align[cute.struct.MemRange[Int32, words], 128]

    def codes(count: int) -> Any:
        # Swizzles are functions of the address, so a buffer starts where their pattern does.
        return cute.struct.Align[cute.struct.MemRange[Uint8, count], 1024]

    members = {name: cute.struct.MemRange[Int64, count] for name, count, _ in barriers(config)}
    members |= {
        "tensor_memory": Int32,
        "rise": cute.struct.MemRange[Float32, rows],
        "top": cute.struct.MemRange[Float32, ITEM_BUFFERS * rows],
        "total": cute.struct.MemRange[Float32, ITEM_BUFFERS * rows],
        "ones": scales(atom_words),
        "one_scale": scales(atom_words),
        "p_scales": scales(QUERY_STAGES * HALVES * atom_words),
        "q_scales": scales(ITEM_BUFFERS * QUERY_STAGES * scale_words),
        "k_scales": scales(config.stages * scale_words),
        "v_scales": scales(config.stages * atom_words),
        "q": codes(ITEM_BUFFERS * QUERY_STAGES * TILE_M * config.row_bytes),
        "k": codes(config.stages * TILE_N * config.row_bytes),
        "v": codes(config.stages * config.v_bytes),
    }
    return cute.struct(type("Storage", (), {"__annotations__": members}))
