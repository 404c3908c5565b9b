"""Which file decodes which mnemonic, for all instructions that do more than compute."""

from collections.abc import Callable

from fp4mega.testing.ptx.context import Context, Handler
from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.memory_ops import (
    atomic,
    bulk_groups,
    cp_async,
    cp_async_group,
    load,
    load_matrix,
    store,
    store_matrix,
)
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.sync_ops import barrier, cluster_rank, fence, map_address, mbarrier
from fp4mega.testing.ptx.tcgen05_ops import tensor
from fp4mega.testing.ptx.tma import bulk
from fp4mega.testing.ptx.warp_ops import (
    activemask,
    elect,
    leave,
    match,
    nothing,
    redux,
    shuffle,
    trap,
    vote,
)
from fp4mega.testing.ptx.wgmma import warpgroup

Maker = Callable[[Instruction, Context], Handler]


def _copy(ins: Instruction, context: Context) -> Handler:
    """cp and its three families."""
    parts = ins.parts
    if "bulk" in parts:
        return (
            bulk_groups(ins, context)
            if parts[3] in ("commit_group", "wait_group")
            else bulk(ins, context)
        )
    if parts[1] == "async" and parts[2] in ("commit_group", "wait_group", "wait_all"):
        return cp_async_group(ins, context)
    if parts[1] == "async" and parts[2] in ("ca", "cg"):
        return cp_async(ins, context)
    raise UnsupportedInstructionError(ins.op)


MAKERS: dict[str, Maker] = {
    "activemask": activemask,
    "atom": atomic,
    "bar": barrier,
    "barrier": barrier,
    "brkpt": trap,
    "cp": _copy,
    "elect": elect,
    "exit": leave,
    "fence": fence,
    "getctarank": cluster_rank,
    "griddepcontrol": nothing,
    "ld": load,
    "ldmatrix": load_matrix,
    "ldu": load,
    "mapa": map_address,
    "match": match,
    "mbarrier": mbarrier,
    "membar": fence,
    "nanosleep": nothing,
    "pragma": nothing,
    "prefetch": nothing,
    "prefetchu": nothing,
    "red": atomic,
    "redux": redux,
    "ret": leave,
    "setmaxnreg": nothing,
    "shfl": shuffle,
    "st": store,
    "stmatrix": store_matrix,
    "tcgen05": tensor,
    "trap": trap,
    "vote": vote,
    "wgmma": warpgroup,
}
