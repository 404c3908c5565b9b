"""tcgen05 instructions: alloc, dealloc, ld, st, wait, cp, mma, commit.

ld gives its registers at once: code generators leave tcgen05.wait::ld out where a register is used, and the assembler waits for it like
for any load; dataflow.py looks for signals sent before either. st is done between its issue and wait::st, at a moment
the policy picks. cp, mma and commit go through the CTA's tensor pipe in order.
"""

from collections.abc import Callable

import numpy as np

from fp4mega.testing.ptx import mma as mma_module
from fp4mega.testing.ptx.context import Context, Handler, only, place
from fp4mega.testing.ptx.descriptors import MatrixDescriptor
from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.hazards import Access
from fp4mega.testing.ptx.machine import RETRY, SPLIT, Bundle, Cta, Work
from fp4mega.testing.ptx.memory_ops import put_octets, read_bytes
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import OFFSET_MASK, WARP, Array, braces


def tensor(ins: Instruction, context: Context) -> Handler:
    """Any tcgen05 instruction."""
    kind = ins.parts[1]
    makers: dict[str, Callable[[Instruction, Context], Handler]] = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": _load,
        "st": _store,
        "cp": _copy,
        "mma": _mma,
        "commit": _commit,
    }
    if kind in makers:
        return makers[kind](ins, context)
    if kind == "wait::st":
        return lambda bundle, mask: deliver_stores(bundle)
    if kind == "wait::ld" or kind.startswith("fence::"):
        return lambda bundle, mask: None
    raise UnsupportedInstructionError(ins.op)


def _first(bundle: Bundle, mask: Array | None) -> int:
    return int(bundle.active(mask)[0])


def _alloc(ins: Instruction, context: Context) -> Handler:
    address, columns = (
        context.operands.address(ins.args[0]),
        context.operands.read(ins.args[1], np.uint32),
    )

    def run(bundle: Bundle, mask: Array | None) -> int | None:
        cta, lane = bundle.cta, _first(bundle, mask)
        if len(bundle.warps) > 1:
            return SPLIT
        start = cta.tensor.allocate(int(columns(bundle)[lane]))
        if start is None:
            bundle.wake = lambda: cta.cluster.progress >= 0
            bundle.waiting = lambda: f"tensor memory: {place(ins)}"
            return RETRY
        offset = int(address(bundle)[lane]) & OFFSET_MASK
        access = cta.cluster.tracker.generic(cta.rank, bundle.issuer(lane), place(ins))
        octets = np.frombuffer(int(start).to_bytes(4, "little"), np.uint8)[None, :]
        put_octets(cta, cta, np.array([offset]), octets, access, ins.op)
        return None

    return run


def _dealloc(ins: Instruction, context: Context) -> Handler:
    address, columns = (
        context.operands.address(ins.args[0]),
        context.operands.read(ins.args[1], np.uint32),
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        lane = _first(bundle, mask)
        start = int(address(bundle)[lane]) & 0xFFFF
        if not bundle.cta.tensor.free(start, int(columns(bundle)[lane])):
            bundle.cta.cluster.findings.add(
                "tensor-dealloc", f"column {start} is not allocated", place(ins)
            )
        bundle.cta.cluster.progress += 1

    return run


def _relinquish(ins: Instruction, context: Context) -> Handler:
    def run(bundle: Bundle, mask: Array | None) -> None:
        bundle.cta.tensor.permit = False

    return run


def _window(
    bundle: Bundle, warp: int, lanes: Array, addresses: Array, columns: int, ins: Instruction
) -> tuple[int, int]:
    """(first lane, first column) of a warp's 32x32b access, which must lie in the warp's own 32 lanes."""
    address = int(addresses[lanes[0]])
    column, lane, own = address & 0xFFFF, (address >> 16) & 0xFFFF, (warp % 4) * WARP
    if lane != own:
        raise ProtocolError(
            f"{place(ins)}: warp {warp} addresses tensor memory lane {lane}, it may only touch {own}..{own + 31}"
        )
    if len(lanes) != WARP:
        raise ProtocolError(f"{place(ins)}: not all lanes of warp {warp} are active")
    bundle.cta.tensor.check(column, columns, ins.op)
    return own, column


def _shape(ins: Instruction) -> None:
    allowed = {"ld", "st", "sync", "aligned", "32x32b", "b32", *(f"x{1 << i}" for i in range(8))}
    only(ins, allowed)


def _load(ins: Instruction, context: Context) -> Handler:
    _shape(ins)
    writes = [context.operands.write(name) for name in braces(ins.args[0])]
    address = context.operands.address(ins.args[1])

    def run(bundle: Bundle, mask: Array | None) -> None:
        cta, where = bundle.cta, address(bundle)
        out = np.zeros((len(writes), bundle.lanes), np.uint32)
        for warp, lanes in bundle.lockstep(mask):
            own, column = _window(bundle, warp, lanes, where, len(writes), ins)
            access = cta.cluster.tracker.generic(cta.rank, warp, place(ins))
            out[:, lanes] = _fetch(cta, own, column, len(writes), access)
        for write, row in zip(writes, out, strict=True):
            write(bundle, row, mask)

    return run


def _fetch(cta: Cta, own: int, column: int, columns: int, access: Access) -> Array:
    span = slice(column, column + columns)
    cta.cluster.tracker.tensor_read(
        cta.tensor_shadow, slice(own // WARP, own // WARP + 1), span, access
    )
    if not cta.tensor.written[own : own + WARP, span].all():
        cta.cluster.findings.add(
            "uninitialized", "tensor memory that was never written", access.where
        )
    return np.ascontiguousarray(cta.tensor.data[own : own + WARP, span].T)


def _store(ins: Instruction, context: Context) -> Handler:
    _shape(ins)
    reads = [context.operands.read(name, np.uint32) for name in braces(ins.args[1])]
    address = context.operands.address(ins.args[0])
    late = context.late

    def run(bundle: Bundle, mask: Array | None) -> None:
        cta, where = bundle.cta, address(bundle)
        data = np.stack([read(bundle) for read in reads], axis=1)
        for warp, lanes in bundle.lockstep(mask):
            own, column = _window(bundle, warp, lanes, where, len(reads), ins)
            access = cta.cluster.tracker.queued("st", cta.rank, warp, place(ins))
            write = _tensor_writer(cta, own, column, data[lanes], access)
            if late():
                cta.queues[warp].stores.append(write)
            else:
                write()

    return run


def _tensor_writer(
    cta: Cta, own: int, column: int, data: Array, access: Access
) -> Callable[[], None]:
    def write() -> None:
        span = slice(column, column + data.shape[1])
        cta.cluster.tracker.tensor_write(
            cta.tensor_shadow, slice(own // WARP, own // WARP + 1), span, access
        )
        cta.tensor.data[own : own + WARP, span] = data
        cta.tensor.written[own : own + WARP, span] = True

    return write


def deliver_stores(bundle: Bundle) -> None:
    """tcgen05.wait::st: everything this bundle stored is in tensor memory."""
    for warp in bundle.warps:
        queue = bundle.cta.queues[warp]
        for write in queue.stores:
            write()
        queue.stores.clear()
        bundle.cta.cluster.tracker.queue_wait("st", bundle.cta.rank, warp)


def _group(bundle: Bundle, pair: bool) -> list[Cta]:
    """The CTAs that an instruction of cta_group::1 or ::2 touches."""
    cta = bundle.cta
    if not pair:
        return [cta]
    base = cta.rank & ~1
    ctas = cta.cluster.ctas[base : base + 2]
    if len(ctas) != 2:
        raise ProtocolError("cta_group::2 outside of a cluster of at least two CTAs")
    return ctas


def _enqueue(bundle: Bundle, work: Callable[[], None], ins: Instruction) -> None:
    bundle.cta.pipe.append(Work(work, place(ins)))
    bundle.cta.cluster.progress += 1


def _copy(ins: Instruction, context: Context) -> Handler:
    allowed = {"cp", "cta_group::1", "cta_group::2", "32x128b", "warpx4", "128x128b", "128x256b"}
    only(ins, allowed)
    rows = 32 if "32x128b" in ins.parts else 128
    if (rows == 32) != ("warpx4" in ins.parts):
        raise UnsupportedInstructionError(ins.op)
    words = 8 if "128x256b" in ins.parts else 4
    pair = "cta_group::2" in ins.parts
    address, source = (
        context.operands.address(ins.args[0]),
        context.operands.read(ins.args[1], np.uint64),
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, descriptors = address(bundle), source(bundle)
        for lane in bundle.active(mask).tolist():
            access = bundle.cta.cluster.tracker.piped(
                bundle.cta.rank, bundle.issuer(lane), place(ins)
            )
            descriptor = MatrixDescriptor.decode(int(descriptors[lane]))
            column = int(where[lane]) & 0xFFFF
            _enqueue(
                bundle, _copier(_group(bundle, pair), column, descriptor, rows, words, access), ins
            )

    return run


def _copier(
    ctas: list[Cta],
    column: int,
    descriptor: MatrixDescriptor,
    rows: int,
    words: int,
    access: Access,
) -> Callable[[], None]:
    def copy() -> None:
        addresses = mma_module.operand_addresses(descriptor, rows, 4 * words, True, 1)
        for cta in ctas:
            octets = read_bytes(cta, cta, addresses, access, "tcgen05.cp")
            data = np.ascontiguousarray(octets).view(np.uint32)
            span = slice(column, column + words)
            cta.tensor.check(column, words, "tcgen05.cp")
            cta.cluster.tracker.tensor_write(cta.tensor_shadow, slice(0, 4), span, access)
            cta.tensor.data[:, span] = np.tile(data, (128 // rows, 1))
            cta.tensor.written[:, span] = True

    return copy


_MMA_WORDS = {
    *("mma", "cta_group::1", "cta_group::2", "block_scale", "block16", "block32"),
    *("scale_vec::1X", "scale_vec::2X", "scale_vec::4X"),
    *(f"kind::{kind}" for kind in mma_module.K_OF),
    # The collector keeps A from one mma to the next; it changes no value.
    *(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")),
}


def _mma(ins: Instruction, context: Context) -> Handler:
    only(ins, _MMA_WORDS)
    kind = next(p for p in ins.parts if p.startswith("kind::")).removeprefix("kind::")
    scaled = "block_scale" in ins.parts
    scales = 0
    if scaled:
        vector = next((p for p in ins.parts if p.startswith(("scale_vec", "block1", "block3"))), "")
        if kind not in mma_module.SCALES or vector not in mma_module.SCALES[kind]:
            raise UnsupportedInstructionError(ins.op)
        scales = mma_module.SCALES[kind][vector]
    elif kind.startswith("mx"):
        raise UnsupportedInstructionError(ins.op)
    operands, pair = context.operands, "cta_group::2" in ins.parts
    in_tensor = ins.args[1].startswith("[")
    d = operands.address(ins.args[0])
    a = operands.address(ins.args[1]) if in_tensor else operands.read(ins.args[1], np.uint64)
    b, descriptor = operands.read(ins.args[2], np.uint64), operands.read(ins.args[3], np.uint32)
    rest = list(ins.args[4:])
    sf = [operands.address(rest.pop(0)) for _ in range(2)] if scaled else []
    disabled = (
        [operands.read(r, np.uint32) for r in braces(rest.pop(0))]
        if rest[0].startswith("{")
        else []
    )
    if len(rest) != 1:
        raise UnsupportedInstructionError(f"{ins.op} with a scale of the accumulator")
    accumulate = operands.read(rest[0], np.bool_)

    def run(bundle: Bundle, mask: Array | None) -> None:
        cta = bundle.cta
        columns = [read(bundle) for read in (d, a, b, descriptor, *sf)]
        flags = accumulate(bundle)
        for lane in bundle.active(mask).tolist():
            if any(read(bundle)[lane] for read in disabled):
                raise UnsupportedInstructionError(f"{ins.op} with disabled output lanes")
            picked = [int(c[lane]) for c in columns]
            sfa, sfb = picked[4:] if scaled else (0, 0)
            one = mma_module.Mma(
                kind,
                scales,
                pair,
                picked[0],
                in_tensor,
                picked[1],
                picked[2],
                picked[3],
                sfa,
                sfb,
                bool(flags[lane]),
                ins.op,
            )
            if pair:
                _group(bundle, True)
            access = cta.cluster.tracker.piped(cta.rank, bundle.issuer(lane), place(ins))
            _enqueue(bundle, _bind(cta, one, access), ins)

    return run


def _bind(cta: Cta, one: mma_module.Mma, access: Access) -> Callable[[], None]:
    return lambda: mma_module.execute(cta, one, access)


def _commit(ins: Instruction, context: Context) -> Handler:
    allowed = {
        "commit",
        "cta_group::1",
        "cta_group::2",
        "mbarrier::arrive::one",
        "shared::cluster",
        "b64",
        "multicast::cluster",
    }
    only(ins, allowed)
    address = context.operands.address(ins.args[0])
    multicast = (
        context.operands.read(ins.args[1], np.uint16) if "multicast::cluster" in ins.parts else None
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, cluster = address(bundle), bundle.cta.cluster
        masks = multicast(bundle) if multicast else None
        for lane in bundle.active(mask).tolist():
            home, offset = cluster.locate(bundle.cta, int(where[lane]))
            homes = [home]
            if masks is not None:
                homes = [cta for cta in cluster.ctas if int(masks[lane]) >> cta.rank & 1]
            access = cluster.tracker.piped(bundle.cta.rank, bundle.issuer(lane), place(ins))
            _enqueue(bundle, _signal(homes, offset, access), ins)

    return run


def _signal(homes: list[Cta], offset: int, access: Access) -> Callable[[], None]:
    def signal() -> None:
        for home in homes:
            barrier = home.mbarrier(offset)
            barrier.clock.join(access.clock)
            barrier.pending -= 1
            home.settle(barrier)

    return signal
