"""Loads, stores, atomics, ldmatrix, stmatrix, cp.async and plain bulk copies.

Shared-memory accesses of each warp go through the hazard tracker; a read of bytes never written is a finding.
"""

from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx.context import Context, Handler, place
from fp4mega.testing.ptx.errors import OutOfBoundsError, ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.hazards import Access
from fp4mega.testing.ptx.machine import Bundle, Cta, Work
from fp4mega.testing.ptx.operands import Read
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import (
    DTYPES,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    UNSIGNED,
    WARP,
    Array,
    braces,
    itemsize,
)

_SPACES = ("param", "shared", "global", "local", "const")
_LD_WORDS = {
    "ld",
    "ldu",
    "volatile",
    "relaxed",
    "acquire",
    "weak",
    "nc",
    "mmio",
    "v2",
    "v4",
    "v8",
    "cta",
    "cluster",
    "gpu",
    "sys",
}
_LD_WORDS |= {
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "st",
    "release",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
}
_LD_WORDS |= {
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::cache_hint",
    "L1::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
}
_LD_WORDS |= {"unified", "async", "L1::evict_unchanged", "L2::evict_normal"}


def _space(ins: Instruction) -> str:
    """The state space of a load or store; refuses modifiers that are not known."""
    found = "generic"
    for part in ins.parts[1:-1]:
        base, _, scope = part.partition("::")
        if base in _SPACES and scope in ("", "cta", "cluster", "entry"):
            found = base
        elif part not in _LD_WORDS:
            raise UnsupportedInstructionError(ins.op)
    return found


def octets(cta: Cta, target: Cta, offsets: Array, size: int, access: Access, what: str) -> Array:
    """Read `size` bytes at each offset of `target`'s shared memory: uint8 [len(offsets), size]."""
    return read_bytes(cta, target, offsets[:, None] + np.arange(size), access, what)


def read_bytes(cta: Cta, target: Cta, addresses: Array, access: Access, what: str) -> Array:
    """Read the bytes at `addresses` (any shape) of `target`'s shared memory; never-written ones are a finding."""
    shared = target.shared
    shared.check(addresses, what)
    known = shared.written[addresses]
    if not known.all():
        missing = int(addresses[~known][0])
        cta.cluster.findings.add(
            "uninitialized",
            f"{what}: shared memory byte {missing:#x} was never written",
            access.where,
        )
    cta.cluster.tracker.shared_read(target.shadow, addresses, access)
    return np.asarray(shared.data[addresses])


def put_octets(
    cta: Cta, target: Cta, offsets: Array, data: Array, access: Access, what: str
) -> None:
    """Write uint8 [n, size] at each offset of `target`'s shared memory."""
    addresses = offsets[:, None] + np.arange(data.shape[1])
    target.shared.check(addresses, what)
    cta.cluster.tracker.shared_write(target.shadow, addresses, access)
    target.shared.store(addresses, data)


def targets(bundle: Bundle, addresses: Array) -> list[tuple[Cta, Array]]:
    """Split lanes by the CTA that their shared address names: (cta, positions in `addresses`)."""
    ranks = addresses >> RANK_SHIFT
    if (ranks == bundle.cta.rank).all():
        return [(bundle.cta, np.arange(len(addresses)))]
    out = []
    for rank in np.unique(ranks):
        if not 0 <= rank < len(bundle.cta.cluster.ctas):
            raise OutOfBoundsError(
                f"shared memory address {int(addresses[ranks == rank][0]):#x}: no such CTA"
            )
        out.append((bundle.cta.cluster.ctas[int(rank)], np.flatnonzero(ranks == rank)))
    return out


def load_shared(
    bundle: Bundle, addresses: Array, size: int, mask: Array | None, ins: Instruction
) -> Array:
    """Bytes uint8 [lanes, size]; lanes not in `mask` get zeros."""
    out = np.zeros((bundle.lanes, size), np.uint8)
    cta = bundle.cta
    for warp, lanes in bundle.lockstep(mask):
        access = cta.cluster.tracker.generic(cta.rank, warp, place(ins))
        wanted = addresses[lanes]
        if (wanted % size).any():
            raise ProtocolError(
                f"misaligned shared access of {size} bytes at {int(wanted[wanted % size != 0][0]):#x}"
            )
        for target, positions in targets(bundle, wanted):
            offsets = wanted[positions] & OFFSET_MASK
            out[lanes[positions]] = octets(cta, target, offsets, size, access, ins.op)
    return out


def store_shared(
    bundle: Bundle, addresses: Array, data: Array, mask: Array | None, ins: Instruction
) -> None:
    """Write uint8 [lanes, size] of the active lanes."""
    cta = bundle.cta
    for warp, lanes in bundle.lockstep(mask):
        access = cta.cluster.tracker.generic(cta.rank, warp, place(ins))
        wanted = addresses[lanes]
        if (wanted % data.shape[1]).any():
            raise ProtocolError(f"misaligned shared access of {data.shape[1]} bytes in {ins.op}")
        for target, positions in targets(bundle, wanted):
            offsets = wanted[positions] & OFFSET_MASK
            put_octets(cta, target, offsets, data[lanes[positions]], access, ins.op)


def load(ins: Instruction, context: Context) -> Handler:
    """ld, all spaces."""
    space = _space(ins)
    dtype = DTYPES.get(ins.parts[-1])
    if dtype is None:
        raise UnsupportedInstructionError(ins.op)
    size = itemsize(dtype)
    registers = braces(ins.args[0])
    writes = [context.operands.write(r) for r in registers]
    count = len(registers)
    signed = np.dtype(dtype).kind == "i"
    element = dtype if signed else UNSIGNED[size]
    if space == "param" and (offset := context.parameter(ins.args[1])) is not None:
        return _load_parameter(offset, size, element, count, writes, context)
    address = context.operands.address(ins.args[1])

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle)
        data = _load_any(bundle, where, size * count, mask, space, ins)
        values = np.ascontiguousarray(data).view(element).reshape(bundle.lanes, count)
        for i, write in enumerate(writes):
            write(bundle, np.ascontiguousarray(values[:, i]), mask)

    return run


def _load_parameter(
    offset: int,
    size: int,
    element: type[np.generic],
    count: int,
    writes: list[Callable[..., None]],
    context: Context,
) -> Handler:
    end = offset + size * count
    if end > len(context.parameters):
        raise OutOfBoundsError(f"parameter bytes {offset}..{end - 1}")

    def run(bundle: Bundle, mask: Array | None) -> None:
        # Looked up at each execution: decoded code is kept from launch to launch.
        values = np.frombuffer(context.parameters, element, count, offset)
        for write, value in zip(writes, values, strict=True):
            write(bundle, np.full(bundle.lanes, value), mask)

    return run


def _load_any(
    bundle: Bundle, addresses: Array, size: int, mask: Array | None, space: str, ins: Instruction
) -> Array:
    lanes = bundle.active(mask)
    if space == "generic" and len(lanes):
        first = int(addresses[lanes[0]])
        if SHARED_WINDOW <= first < PARAM_WINDOW:
            return load_shared(bundle, addresses - SHARED_WINDOW, size, mask, ins)
    if space == "shared":
        return load_shared(bundle, addresses, size, mask, ins)
    if space == "local":
        raise UnsupportedInstructionError(f"{ins.op}: local memory")
    out = np.zeros((bundle.lanes, size), np.uint8)
    out[lanes] = bundle.cta.cluster.memory.gather(addresses, size, lanes)
    if (addresses[lanes] % size).any():
        raise ProtocolError(f"misaligned global access of {size} bytes in {place(ins)}")
    return out


def store(ins: Instruction, context: Context) -> Handler:
    """st, all spaces but local."""
    if ins.parts[1] in ("async", "bulk"):
        raise UnsupportedInstructionError(ins.op)
    space = _space(ins)
    dtype = DTYPES.get(ins.parts[-1])
    if dtype is None or space in ("local", "param", "const"):
        raise UnsupportedInstructionError(ins.op)
    size = itemsize(dtype)
    values = [_store_source(text, size, context) for text in braces(ins.args[1])]
    address = context.operands.address(ins.args[0])

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle)
        data = np.stack([value(bundle) for value in values], axis=1).view(np.uint8)
        lanes = bundle.active(mask)
        if (
            space == "generic"
            and len(lanes)
            and SHARED_WINDOW <= int(where[lanes[0]]) < PARAM_WINDOW
        ):
            store_shared(bundle, where - SHARED_WINDOW, data, mask, ins)
        elif space == "shared":
            store_shared(bundle, where, data, mask, ins)
        else:
            bundle.cta.cluster.memory.scatter(where, data[lanes], lanes)

    return run


def _store_source(text: str, size: int, context: Context) -> Read:
    return context.operands.read(text, UNSIGNED[size])


_ATOMIC: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


def atomic(ins: Instruction, context: Context) -> Handler:
    """atom and red on global and shared memory, lane after lane."""
    parts = ins.parts
    reduction = parts[0] == "red"
    name = next((p for p in parts if p in _ATOMIC or p in ("cas", "inc", "dec")), None)
    dtype = DTYPES.get(parts[-1])
    if (
        name is None
        or dtype is None
        or parts[-1] in ("f16", "bf16", "f16x2", "bf16x2")
        or "async" in parts
    ):
        raise UnsupportedInstructionError(ins.op)
    if name in ("inc", "dec") or any(p in ("v2", "v4", "v8") for p in parts):
        raise UnsupportedInstructionError(ins.op)
    shared = any(p.startswith("shared") for p in parts)
    write = None if reduction else context.operands.write(ins.args[0])
    first = 0 if reduction else 1
    address = context.operands.address(ins.args[first])
    value = context.operands.read(ins.args[first + 1], dtype)
    swap = context.operands.read(ins.args[first + 2], dtype) if name == "cas" else None
    size = itemsize(dtype)

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, values = address(bundle), value(bundle)
        swaps = swap(bundle) if swap else None
        old = np.zeros(bundle.lanes, dtype)
        for lane in bundle.active(mask).tolist():
            at = int(where[lane])
            in_shared = shared or SHARED_WINDOW <= at < PARAM_WINDOW
            if in_shared:
                target, offset = bundle.cta.cluster.locate(
                    bundle.cta, at - (0 if shared else SHARED_WINDOW)
                )
                target.shared.check(np.arange(offset, offset + size), ins.op)
                view, start = target.shared.data, offset
                target.shared.written[offset : offset + size] = True
            else:
                view, start = bundle.cta.cluster.memory.locate(at, size, write=True)
            cell = view[start : start + size].view(dtype)
            old[lane] = cell[0]
            if swaps is not None:
                if cell[0] == values[lane]:
                    cell[0] = swaps[lane]
            else:
                cell[0] = _ATOMIC[name](cell[0], values[lane])
        bundle.cta.cluster.progress += 1
        if write is not None:
            write(bundle, old, mask)

    return run


def _matrix(ins: Instruction) -> tuple[int, bool]:
    count = {"x1": 1, "x2": 2, "x4": 4}.get(
        next((p for p in ins.parts if p in ("x1", "x2", "x4")), "")
    )
    if count is None or "m8n8" not in ins.parts or ins.parts[-1] != "b16":
        raise UnsupportedInstructionError(ins.op)
    return count, "trans" in ins.parts


def load_matrix(ins: Instruction, context: Context) -> Handler:
    """ldmatrix.m8n8.x1/x2/x4(.trans).b16: matrix i's rows are at the addresses of lanes 8i to 8i+7."""
    count, transposed = _matrix(ins)
    writes = [context.operands.write(r) for r in braces(ins.args[0])]
    address = context.operands.address(ins.args[1])

    def run(bundle: Bundle, mask: Array | None) -> None:
        if mask is not None:
            raise ProtocolError(f"{place(ins)}: not all lanes of the warp are active")
        where = address(bundle)
        out = np.zeros((count, bundle.lanes), np.uint32)
        row_lanes = np.zeros(bundle.lanes, np.bool_)
        for i in range(len(bundle.warps)):
            row_lanes[WARP * i : WARP * i + 8 * count] = True
        data = load_shared(bundle, where, 16, row_lanes, ins)
        for i in range(len(bundle.warps)):
            rows = data[WARP * i : WARP * i + 8 * count].view(np.uint16).reshape(count, 8, 8)
            if transposed:
                rows = rows.transpose(0, 2, 1)
            # Lane l holds elements (row l/4, columns 2(l%4), 2(l%4)+1) of each matrix.
            words = np.ascontiguousarray(rows).view(np.uint32).reshape(count, WARP)
            out[:, WARP * i : WARP * (i + 1)] = words
        for write, words in zip(writes, out, strict=True):
            write(bundle, words, mask)

    return run


def store_matrix(ins: Instruction, context: Context) -> Handler:
    """stmatrix.m8n8.x1/x2/x4(.trans).b16, the inverse of ldmatrix."""
    count, transposed = _matrix(ins)
    address = context.operands.address(ins.args[0])
    reads = [context.operands.read(r, np.uint32) for r in braces(ins.args[1])]

    def run(bundle: Bundle, mask: Array | None) -> None:
        if mask is not None:
            raise ProtocolError(f"{place(ins)}: not all lanes of the warp are active")
        where = address(bundle)
        words = np.stack([read(bundle) for read in reads])
        rows_of = np.zeros((bundle.lanes, 16), np.uint8)
        row_lanes = np.zeros(bundle.lanes, np.bool_)
        for i in range(len(bundle.warps)):
            part = np.ascontiguousarray(words[:, WARP * i : WARP * (i + 1)])
            rows = part.view(np.uint16).reshape(count, 8, 8)
            if transposed:
                rows = rows.transpose(0, 2, 1)
            rows_of[WARP * i : WARP * i + 8 * count] = (
                np.ascontiguousarray(rows).view(np.uint8).reshape(8 * count, 16)
            )
            row_lanes[WARP * i : WARP * i + 8 * count] = True
        store_shared(bundle, where, rows_of, row_lanes, ins)

    return run


def cp_async(ins: Instruction, context: Context) -> Handler:
    """cp.async.ca/cg.shared.global of 4, 8 or 16 bytes with optional zero fill; done when its group is waited for."""
    if not set(ins.parts[2:]) <= {
        "ca",
        "cg",
        "shared",
        "shared::cta",
        "global",
        "L2::128B",
        "L2::256B",
        "L2::64B",
        "L2::cache_hint",
    }:
        raise UnsupportedInstructionError(ins.op)
    to, source = context.operands.address(ins.args[0]), context.operands.address(ins.args[1])
    size = int(ins.args[2], 0)
    hinted = "L2::cache_hint" in ins.parts
    filled = ins.args[3 : len(ins.args) - (1 if hinted else 0)]
    amount = context.operands.read(filled[0], np.uint32) if filled else None

    def run(bundle: Bundle, mask: Array | None) -> None:
        cta, where, sources = bundle.cta, to(bundle), source(bundle)
        amounts = amount(bundle) if amount else np.full(bundle.lanes, size, np.uint32)
        for warp, lanes in bundle.lockstep(mask):
            access = cta.cluster.tracker.queued("cp_async", cta.rank, warp, place(ins))
            cta.queues[warp].cp_async.append(
                _copy_lanes(bundle, where, sources, amounts, size, lanes, access, ins)
            )

    return run


def _copy_lanes(
    bundle: Bundle,
    where: Array,
    sources: Array,
    amounts: Array,
    size: int,
    lanes: Array,
    access: Access,
    ins: Instruction,
) -> Callable[[], None]:
    cta = bundle.cta

    def copy() -> None:
        data = np.zeros((len(lanes), size), np.uint8)
        for i, lane in enumerate(lanes.tolist()):
            count = int(amounts[lane])
            if count:
                view, offset = cta.cluster.memory.locate(int(sources[lane]), count)
                data[i, :count] = view[offset : offset + count]
        put_octets(cta, cta, where[lanes] & OFFSET_MASK, data, access, ins.op)

    return copy


def cp_async_group(ins: Instruction, context: Context) -> Handler:
    """cp.async.commit_group, wait_group N and wait_all."""
    kind = ins.parts[2]
    keep = int(ins.args[0], 0) if kind == "wait_group" else 0

    def run(bundle: Bundle, mask: Array | None) -> None:
        tracker, rank = bundle.cta.cluster.tracker, bundle.cta.rank
        for warp, _ in bundle.lockstep(mask):
            queue = bundle.cta.queues[warp]
            if kind in ("commit_group", "wait_all"):
                queue.cp_groups.append(
                    (tracker.queue_close("cp_async", rank, warp), queue.cp_async)
                )
                queue.cp_async = []
            if kind == "commit_group":
                continue
            while len(queue.cp_groups) > keep:
                number, copies = queue.cp_groups.pop(0)
                for copy in copies:
                    copy()
                tracker.queue_wait("cp_async", rank, warp, number)

    return run


def bulk_groups(ins: Instruction, context: Context) -> Handler:
    """cp.async.bulk.commit_group and wait_group N (.read), per thread; here per warp, whose one elected lane issues."""
    kind = ins.parts[3]
    keep = int(ins.args[0], 0) if ins.args else 0

    def run(bundle: Bundle, mask: Array | None) -> None:
        tracker, rank = bundle.cta.cluster.tracker, bundle.cta.rank
        for warp, _ in bundle.lockstep(mask):
            queue = bundle.cta.queues[warp]
            if kind == "commit_group":
                queue.bulk.append((tracker.queue_close("bulk", rank, warp), queue.open_bulk))
                queue.open_bulk = []
                continue
            while len(queue.bulk) > keep:
                number, stores = queue.bulk.pop(0)
                finish(bundle, stores)
                tracker.queue_wait("bulk", rank, warp, number)

    return run


def finish(bundle: Bundle, stores: list[Work]) -> None:
    """Run the bulk stores that have not run yet."""
    waiting = bundle.cta.copies
    for work in stores:
        if work in waiting:
            waiting.remove(work)
            work.done()
