"""cp.async.bulk, with and without tensor maps: loads into shared memory that complete on an mbarrier, stores and reductions out of it.

A load is queued and done by the scheduler at a moment the policy picks; it writes bytes first and then completes its transaction
bytes. A store reads shared memory at such a moment too, at the latest when its bulk group is waited for or the kernel ends.
"""

from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx.context import Context, Handler, only, place
from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.hazards import Access
from fp4mega.testing.ptx.machine import Bundle, Cta, Work
from fp4mega.testing.ptx.memory_ops import octets, put_octets, read_bytes
from fp4mega.testing.ptx.operands import Read
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.tensormap import TensorMap
from fp4mega.testing.ptx.types import OFFSET_MASK, RANK_SHIFT, Array, braces

_PEER_BIT = 1 << RANK_SHIFT
_LOAD_WORDS = {
    *(
        "async",
        "bulk",
        "tensor",
        "1d",
        "2d",
        "3d",
        "4d",
        "5d",
        "shared::cluster",
        "shared::cta",
        "global",
        "tile",
    ),
    *(
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "cta_group::1",
        "cta_group::2",
        "L2::cache_hint",
    ),
}
_STORE_WORDS = {
    *(
        "async",
        "bulk",
        "tensor",
        "1d",
        "2d",
        "3d",
        "4d",
        "5d",
        "shared::cta",
        "global",
        "tile",
        "bulk_group",
    ),
    *("L2::cache_hint", "reduce", "add"),
}


def _tensor_operand(text: str, context: Context) -> tuple[Read, list[Read]]:
    """`[map, {c0, c1}]`: the map's address and the coordinates."""
    pointer, _, rest = text.strip()[1:-1].partition(",")
    reads = [context.operands.read(c, np.int32) for c in braces(rest.strip())]
    return context.operands.address(pointer.strip()), reads


def bulk(ins: Instruction, context: Context) -> Handler:
    """cp.async.bulk and cp.reduce.async.bulk in the directions that are implemented."""
    tensor = "tensor" in ins.parts
    source_shared = ins.op.find("shared::cta") > ins.op.find(".global") >= 0
    if source_shared:
        return _store(ins, context) if tensor else _plain_store(ins, context)
    if not any(p.startswith("shared") for p in ins.parts) or "global" not in ins.parts:
        raise UnsupportedInstructionError(ins.op)
    return _load(ins, context) if tensor else _plain_load(ins, context)


def _destinations(cta: Cta, mask: int | None) -> list[Cta]:
    if mask is None:
        return [cta]
    chosen = [other for other in cta.cluster.ctas if mask >> other.rank & 1]
    if not chosen or mask >> len(cta.cluster.ctas):
        raise ProtocolError(
            f"multicast mask {mask:#x}: the cluster has {len(cta.cluster.ctas)} CTAs"
        )
    return chosen


def _load(ins: Instruction, context: Context) -> Handler:
    only(ins, _LOAD_WORDS)
    to, barrier = context.operands.address(ins.args[0]), context.operands.address(ins.args[2])
    map_address, coordinates = _tensor_operand(ins.args[1], context)
    multicast = (
        context.operands.read(ins.args[3], np.uint16) if "multicast::cluster" in ins.parts else None
    )
    pair = "cta_group::2" in ins.parts

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, bars, maps = to(bundle), barrier(bundle), map_address(bundle)
        points = np.stack([c(bundle) for c in coordinates])
        masks = multicast(bundle) if multicast else None
        for lane in bundle.active(mask).tolist():
            tensor_map = context.tensor_map(int(maps[lane]))
            if tensor_map.rank != len(coordinates):
                raise ProtocolError(f"{place(ins)}: the map has rank {tensor_map.rank}")
            data = _reader(bundle.cta, tensor_map, points[:, lane].tolist(), context)
            _queue_load(
                bundle, lane, tensor_map, data, int(where[lane]), int(bars[lane]),
                None if masks is None else int(masks[lane]), pair, ins,
            )  # fmt: skip

    return run


def _reader(
    cta: Cta, tensor_map: TensorMap, coordinates: list[int], context: Context
) -> Callable[[], Array]:
    def read() -> Array:
        addresses, inside = tensor_map.rows(coordinates)
        low, high = tensor_map.columns(coordinates)
        out = np.zeros((len(addresses), tensor_map.row_bytes), np.uint8)
        start = coordinates[0] * tensor_map.bits // 8 + low
        rows = np.flatnonzero(inside)
        if high > low and len(rows):
            out[rows, low:high] = context.memory.gather(addresses + start, high - low, rows)
        return out

    return read


def _queue_load(
    bundle: Bundle,
    lane: int,
    tensor_map: TensorMap,
    data: Callable[[], Array],
    where: int,
    bar: int,
    multicast: int | None,
    pair: bool,
    ins: Instruction,
) -> None:
    cta = bundle.cta
    cluster = cta.cluster
    issued = cluster.tracker.clocks[cta.rank][bundle.issuer(lane)].copy()
    home, offset = cluster.locate(cta, where)
    bar_home, bar_offset = cluster.locate(cta, bar)
    if offset % 128:
        raise ProtocolError(
            f"{place(ins)}: shared memory destination {offset:#x} is not 128-byte aligned"
        )

    def load() -> None:
        box = data()
        for target in _destinations(home, multicast):
            # A multicast signals the barrier at the same offset of each destination; in a pair, the one of the CTA whose
            # rank the address names within the destination's pair.
            signalled = bar_home
            if multicast is not None:
                rank = target.rank
                if pair:
                    rank = (target.rank & ~1) | (bar_home.rank & 1)
                signalled = cluster.ctas[rank]
            barrier = signalled.mbarrier(bar_offset)
            agent = cluster.tracker.mbarrier_agent(signalled.rank, bar_offset)
            access = Access(agent, barrier.phase + 1, issued, True, place(ins))
            addresses = tensor_map.shared_addresses(offset)
            target.shared.check(addresses, ins.op)
            cluster.tracker.shared_write(target.shadow, addresses, access)
            target.shared.store(addresses, box)
            barrier.tx -= box.size
            signalled.settle(barrier)

    cta.copies.append(Work(load, place(ins)))
    cluster.progress += 1


def _plain_load(ins: Instruction, context: Context) -> Handler:
    only(ins, _LOAD_WORDS - {"tensor", "cta_group::1", "cta_group::2"})
    to, source = context.operands.address(ins.args[0]), context.operands.address(ins.args[1])
    size, barrier = (
        context.operands.read(ins.args[2], np.uint32),
        context.operands.address(ins.args[3]),
    )
    if "multicast::cluster" in ins.parts:
        raise UnsupportedInstructionError(ins.op)

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, sources, sizes, bars = to(bundle), source(bundle), size(bundle), barrier(bundle)
        for lane in bundle.active(mask).tolist():
            _queue_plain(
                bundle,
                lane,
                int(where[lane]),
                int(sources[lane]),
                int(sizes[lane]),
                int(bars[lane]),
                ins,
            )

    return run


def _queue_plain(
    bundle: Bundle, lane: int, where: int, source: int, size: int, bar: int, ins: Instruction
) -> None:
    cluster = bundle.cta.cluster
    issued = cluster.tracker.clocks[bundle.cta.rank][bundle.issuer(lane)].copy()
    target, offset = cluster.locate(bundle.cta, where)
    signalled, bar_offset = cluster.locate(bundle.cta, bar)
    if offset % 16 or source % 16 or size % 16:
        raise ProtocolError(f"{place(ins)}: addresses and size must be multiples of 16")

    def load() -> None:
        view, start = cluster.memory.locate(source, size)
        barrier = signalled.mbarrier(bar_offset)
        agent = cluster.tracker.mbarrier_agent(signalled.rank, bar_offset)
        access = Access(agent, barrier.phase + 1, issued, True, place(ins))
        data = np.array(view[start : start + size])[None, :]
        put_octets(bundle.cta, target, np.array([offset]), data, access, ins.op)
        barrier.tx -= size
        signalled.settle(barrier)

    bundle.cta.copies.append(Work(load, place(ins)))
    cluster.progress += 1


def _reduction(ins: Instruction, context: Context) -> type[np.generic] | None:
    """The dtype of a reducing store, None for a plain one. Only addition of float32 and float16 values is there."""
    if ins.parts[0] != "cp" or "reduce" in ins.parts:
        if "add" not in ins.parts:
            raise UnsupportedInstructionError(ins.op)
        return np.float32
    return None


def _queue_store(bundle: Bundle, lane: int, work: Callable[[], None], ins: Instruction) -> None:
    item = Work(work, place(ins))
    bundle.cta.queues[bundle.issuer(lane)].open_bulk.append(item)
    bundle.cta.copies.append(item)
    bundle.cta.cluster.progress += 1


def _store(ins: Instruction, context: Context) -> Handler:
    only(ins, _STORE_WORDS)
    map_address, coordinates = _tensor_operand(ins.args[0], context)
    source = context.operands.address(ins.args[1])
    reduction = _reduction(ins, context)

    def run(bundle: Bundle, mask: Array | None) -> None:
        sources, maps = source(bundle), map_address(bundle)
        points = np.stack([c(bundle) for c in coordinates])
        for lane in bundle.active(mask).tolist():
            tensor_map = context.tensor_map(int(maps[lane]))
            if reduction is not None and tensor_map.type_code != 7:
                raise UnsupportedInstructionError(
                    f"{ins.op} on element type {tensor_map.type_code}"
                )
            access = bundle.cta.cluster.tracker.queued(
                "bulk", bundle.cta.rank, bundle.issuer(lane), place(ins)
            )
            work = _writer(
                bundle.cta,
                tensor_map,
                points[:, lane].tolist(),
                int(sources[lane]),
                access,
                reduction,
                context,
            )
            _queue_store(bundle, lane, work, ins)

    return run


def _writer(
    cta: Cta,
    tensor_map: TensorMap,
    coordinates: list[int],
    source: int,
    access: Access,
    reduction: type[np.generic] | None,
    context: Context,
) -> Callable[[], None]:
    def write() -> None:
        addresses, inside = tensor_map.rows(coordinates)
        low, high = tensor_map.columns(coordinates)
        rows = np.flatnonzero(inside)
        if high <= low or not len(rows):
            return
        # Elements outside of the tensor are neither read nor written.
        shared = tensor_map.shared_addresses(source & OFFSET_MASK)[rows, low:high]
        data = read_bytes(cta, cta, shared, access, "bulk store")
        start = coordinates[0] * tensor_map.bits // 8 + low
        context.memory.scatter(addresses + start, data, rows, reduction)

    return write


def _plain_store(ins: Instruction, context: Context) -> Handler:
    only(ins, (_STORE_WORDS | {"f32"}) - {"tensor"})
    to, source = context.operands.address(ins.args[0]), context.operands.address(ins.args[1])
    size = context.operands.read(ins.args[2], np.uint32)
    reduction = _reduction(ins, context)
    if reduction is not None and ins.parts[-1] != "f32":
        raise UnsupportedInstructionError(ins.op)

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, sources, sizes = to(bundle), source(bundle), size(bundle)
        for lane in bundle.active(mask).tolist():
            access = bundle.cta.cluster.tracker.queued(
                "bulk", bundle.cta.rank, bundle.issuer(lane), place(ins)
            )
            work = _plain_writer(
                bundle.cta,
                int(where[lane]),
                int(sources[lane]) & OFFSET_MASK,
                int(sizes[lane]),
                access,
                reduction,
            )
            _queue_store(bundle, lane, work, ins)

    return run


def _plain_writer(
    cta: Cta, where: int, source: int, size: int, access: Access, reduction: type[np.generic] | None
) -> Callable[[], None]:
    def write() -> None:
        data = octets(cta, cta, np.array([source]), size, access, "bulk store")[0]
        view, at = cta.cluster.memory.locate(where, size, write=True)
        if reduction is None:
            view[at : at + size] = data
        else:
            target = view[at : at + size].view(reduction)
            target += np.ascontiguousarray(data).view(reduction)

    return write
