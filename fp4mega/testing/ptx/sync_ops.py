"""Barriers and fences: bar, barrier.cluster, mbarrier, fence.proxy, mapa.

Arrivals release the warp's clock unless they say .relaxed; successful waits acquire the barrier's.
"""

import numpy as np

from fp4mega.testing.ptx.barriers import MBarrier, NamedBarrier
from fp4mega.testing.ptx.context import Context, Handler, place
from fp4mega.testing.ptx.errors import ProtocolError, UnsupportedInstructionError
from fp4mega.testing.ptx.machine import BLOCK, SPLIT, Bundle, Cta
from fp4mega.testing.ptx.memory_ops import put_octets
from fp4mega.testing.ptx.operands import Read
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.types import DTYPES, RANK_SHIFT, SHARED_WINDOW, WARP, Array
from fp4mega.testing.ptx.warp_ops import nothing

_MBARRIER_BYTES = 8


def barrier(ins: Instruction, context: Context) -> Handler:
    """bar and barrier: warp, sync, arrive, red is refused; barrier.cluster."""
    parts = ins.parts
    if parts[1] == "warp":
        return nothing(ins, context)
    if parts[1] == "cluster":
        return _cluster_barrier(ins, context)
    kind = "sync" if "sync" in parts else "arrive" if "arrive" in parts else ""
    if not kind or set(parts[1:]) - {"sync", "arrive", "cta", "aligned"}:
        raise UnsupportedInstructionError(ins.op)
    number = context.operands.read(ins.args[0], np.uint32)
    count = context.operands.read(ins.args[1], np.uint32) if len(ins.args) > 1 else None
    everyone = context.geometry.warps * WARP

    def run(bundle: Bundle, mask: Array | None) -> int | None:
        cta, tracker = bundle.cta, bundle.cta.cluster.tracker
        numbers, counts = number(bundle), count(bundle) if count else None
        parts = bundle.lockstep(mask)
        if len(parts) < len(bundle.warps):
            return SPLIT
        waits = []
        for warp, lanes in parts:
            which = int(numbers[lanes[0]])
            if which > 15:
                raise ProtocolError(f"{place(ins)}: barrier {which}, allowed are 0 to 15")
            named, expected = (
                cta.named_barrier(which),
                everyone if counts is None else int(counts[lanes[0]]),
            )
            waits.append(_Wait(cta, warp, named, which, named.generation))
            named.arrive(which, WARP, expected, tracker.release(cta.rank, warp))
        cta.cluster.progress += 1
        if kind == "arrive" or all(wait() for wait in waits):
            return None
        bundle.wakes = waits
        bundle.wake = lambda: all(wait() for wait in waits)
        bundle.waiting = lambda: f"{', '.join(str(w) for w in waits if not w())}: {place(ins)}"
        return BLOCK

    return run


class _Wait:
    """One warp at a named barrier; calling it says whether the barrier has let it pass."""

    def __init__(
        self, cta: Cta, warp: int, named: NamedBarrier, number: int, generation: int
    ) -> None:
        self.cta, self.warp, self.named, self.number, self.generation = (
            cta,
            warp,
            named,
            number,
            generation,
        )

    def __call__(self) -> bool:
        if self.named.generation == self.generation:
            return False
        self.cta.cluster.tracker.acquire(self.cta.rank, self.warp, self.named.completed)
        return True

    def __str__(self) -> str:
        return f"named barrier {self.number} ({self.named.arrived} of {self.named.expected} threads arrived)"


def _cluster_barrier(ins: Instruction, context: Context) -> Handler:
    kind = ins.parts[2]
    if kind not in ("arrive", "wait") or set(ins.parts[3:]) - {
        "aligned",
        "relaxed",
        "release",
        "acquire",
    }:
        raise UnsupportedInstructionError(ins.op)
    relaxed = "relaxed" in ins.parts
    everyone = context.geometry.warps * WARP * context.geometry.ctas

    def run(bundle: Bundle, mask: Array | None) -> int | None:
        cluster, rank = bundle.cta.cluster, bundle.cta.rank
        tracker, whole = cluster.tracker, cluster.barrier
        warps = [warp for warp, _ in bundle.lockstep(mask)]
        if len(warps) < len(bundle.warps):
            return SPLIT
        if kind == "arrive":
            bundle.cluster_phase = whole.generation + 1
            for warp in warps:
                clock = tracker.relaxed(rank, warp) if relaxed else tracker.release(rank, warp)
                whole.arrive(0, WARP, everyone, clock)
            cluster.progress += 1
            return None
        wanted = bundle.cluster_phase

        def passed() -> bool:
            if whole.generation < wanted:
                return False
            for warp in warps:
                tracker.acquire(rank, warp, whole.completed)
            return True

        if passed():
            return None
        bundle.wake = passed
        bundle.waiting = lambda: (
            f"cluster barrier ({whole.arrived} of {everyone} threads arrived): {place(ins)}"
        )
        return BLOCK

    return run


def mbarrier(ins: Instruction, context: Context) -> Handler:
    """mbarrier.init, inval, arrive, arrive.expect_tx, expect_tx, complete_tx, try_wait, test_wait."""
    kind = ins.parts[1]
    makers = {"init": _init, "inval": _invalidate, "arrive": _arrive, "expect_tx": _expect}
    makers |= {"try_wait": _wait, "test_wait": _wait}
    if kind not in makers:
        raise UnsupportedInstructionError(ins.op)
    return makers[kind](ins, context)


def _init(ins: Instruction, context: Context) -> Handler:
    address, count = (
        context.operands.address(ins.args[0]),
        context.operands.read(ins.args[1], np.uint32),
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, counts, tracker = address(bundle), count(bundle), bundle.cta.cluster.tracker
        for lane in bundle.active(mask).tolist():
            home, offset = bundle.cta.cluster.locate(bundle.cta, _plain(int(where[lane])))
            expected = int(counts[lane])
            if offset % _MBARRIER_BYTES or not 0 < expected < 1 << 20:
                raise ProtocolError(f"{place(ins)}: address {offset:#x}, count {expected}")
            access = tracker.generic(bundle.cta.rank, bundle.issuer(lane), place(ins))
            put_octets(
                bundle.cta,
                home,
                np.array([offset]),
                np.zeros((1, _MBARRIER_BYTES), np.uint8),
                access,
                ins.op,
            )
            home.mbarriers[offset] = MBarrier(
                offset, expected, expected, tracker.clock(), tracker.clock()
            )

    return run


def _plain(address: int) -> int:
    """A shared address without its generic window."""
    return address - SHARED_WINDOW if address >= SHARED_WINDOW else address


def _invalidate(ins: Instruction, context: Context) -> Handler:
    address = context.operands.address(ins.args[0])

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle)
        for lane in bundle.active(mask).tolist():
            home, offset = bundle.cta.cluster.locate(bundle.cta, _plain(int(where[lane])))
            home.mbarrier(offset)
            del home.mbarriers[offset]

    return run


def _find(bundle: Bundle, lane: int, address: int, ins: Instruction) -> tuple[Cta, MBarrier]:
    """The barrier a lane uses; its initialization has to be ordered before."""
    cluster = bundle.cta.cluster
    home, offset = cluster.locate(bundle.cta, _plain(address))
    found = home.mbarrier(offset)
    cluster.tracker.initialized(
        home.shadow, offset, bundle.cta.rank, bundle.issuer(lane), place(ins)
    )
    return home, found


def _arrive(ins: Instruction, context: Context) -> Handler:
    allowed = {
        "arrive",
        "expect_tx",
        "noComplete",
        "release",
        "relaxed",
        "cta",
        "cluster",
        "shared",
        "shared::cta",
    }
    allowed |= {"shared::cluster", "b64"}
    if set(ins.parts[1:]) - allowed or "noComplete" in ins.parts:
        raise UnsupportedInstructionError(ins.op)
    index = next(i for i, text in enumerate(ins.args) if text.startswith("["))
    # The state token is only good for test_wait without parity, which is refused there.
    token = context.operands.write(ins.args[0]) if index and ins.args[0] != "_" else None
    address = context.operands.address(ins.args[index])
    count: Read | None = None
    if len(ins.args) > index + 1:
        count = context.operands.read(ins.args[index + 1], np.uint32)
    transaction, relaxed = "expect_tx" in ins.parts, "relaxed" in ins.parts

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle)
        counts = count(bundle) if count else None
        tracker, rank = bundle.cta.cluster.tracker, bundle.cta.rank
        if token is not None:
            token(bundle, np.zeros(bundle.lanes, np.uint64), mask)
        for warp, lanes in bundle.lockstep(mask):
            clock = tracker.relaxed(rank, warp) if relaxed else tracker.release(rank, warp)
            for lane, together in _alike(where, counts, lanes):
                home, found = _find(bundle, lane, int(where[lane]), ins)
                amount = 1 if counts is None or transaction else int(counts[lane])
                # Lanes that arrive on one barrier go in one step, unless they pass the end of its phase.
                steps = 1 if amount * together <= found.pending else together
                for _ in range(steps):
                    if transaction and counts is not None:
                        found.tx += int(counts[lane]) * (together // steps)
                    found.clock.join(clock)
                    found.pending -= amount * (together // steps)
                    home.settle(found)

    return run


def _alike(where: Array, counts: Array | None, lanes: Array) -> list[tuple[int, int]]:
    """(lane, how many lanes do the same) for each different address and count."""
    first = int(lanes[0])
    if (where[lanes] == where[first]).all() and (
        counts is None or (counts[lanes] == counts[first]).all()
    ):
        return [(first, len(lanes))]
    return [(lane, 1) for lane in lanes.tolist()]


def _expect(ins: Instruction, context: Context) -> Handler:
    address, count = (
        context.operands.address(ins.args[0]),
        context.operands.read(ins.args[1], np.uint32),
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        where, counts = address(bundle), count(bundle)
        for lane in bundle.active(mask).tolist():
            _, found = _find(bundle, lane, int(where[lane]), ins)
            found.tx += int(counts[lane])

    return run


def _wait(ins: Instruction, context: Context) -> Handler:
    if "parity" not in ins.parts:
        raise UnsupportedInstructionError(f"{ins.op} without .parity")
    write = context.operands.write(ins.args[0])
    address, parity = (
        context.operands.address(ins.args[1]),
        context.operands.read(ins.args[2], np.uint32),
    )
    relaxed = "relaxed" in ins.parts

    def run(bundle: Bundle, mask: Array | None) -> int | None:
        where, parities = address(bundle), parity(bundle)
        tracker, rank = bundle.cta.cluster.tracker, bundle.cta.rank
        out = np.zeros(bundle.lanes, np.bool_)
        failed: tuple[Cta, MBarrier, int] | None = None
        for warp, lanes in bundle.lockstep(mask):
            for lane in _distinct(where, parities, lanes):
                home, found = _find(bundle, lane, int(where[lane]), ins)
                wanted = int(parities[lane])
                same = lanes[(where[lanes] == where[lane]) & (parities[lanes] == wanted)]
                if found.passed(wanted):
                    out[same] = True
                    if not relaxed:
                        tracker.acquire(rank, warp, found.completed)
                else:
                    failed = (home, found, wanted)
        write(bundle, out, mask)
        if failed is None:
            bundle.failed = -1
            return None
        home, found, wanted = failed
        bundle.failed = ins.index
        bundle.waiting = lambda: (
            f"mbarrier {found.address:#x} of CTA {home.rank}, parity {wanted} (phase {found.phase}, "
            f"{found.pending} of {found.expected} arrivals and {found.tx} bytes pending): {place(ins)}"
        )
        bundle.retry = lambda: found.passed(wanted)
        return None

    return run


def _distinct(where: Array, parities: Array, lanes: Array) -> list[int]:
    """One lane per (address, parity)."""
    first = int(lanes[0])
    if (where[lanes] == where[first]).all() and (parities[lanes] == parities[first]).all():
        return [first]
    seen: dict[tuple[int, int], int] = {}
    for lane in lanes.tolist():
        seen.setdefault((int(where[lane]), int(parities[lane])), lane)
    return list(seen.values())


_FENCE_WORDS = {
    *(
        "proxy",
        "alias",
        "tensormap::generic",
        "acq_rel",
        "sc",
        "release",
        "acquire",
        "mbarrier_init",
    ),
    *(
        "cta",
        "cluster",
        "gpu",
        "sys",
        "gl",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    ),
}


def fence(ins: Instruction, context: Context) -> Handler:
    """fence.proxy.async orders the proxies; a releasing fence gives later relaxed arrivals something to carry."""
    parts = ins.parts
    if parts[1] == "proxy" and len(parts) > 2 and parts[2] == "async":

        def order_proxies(bundle: Bundle, mask: Array | None) -> None:
            for warp, _ in bundle.lockstep(mask):
                bundle.cta.cluster.tracker.proxy_fence(bundle.cta.rank, warp)

        return order_proxies
    if set(parts[1:]) - _FENCE_WORDS:
        raise UnsupportedInstructionError(ins.op)
    if "proxy" in parts or "acquire" in parts:
        return nothing(ins, context)

    def release(bundle: Bundle, mask: Array | None) -> None:
        for warp, _ in bundle.lockstep(mask):
            bundle.cta.cluster.tracker.fence(bundle.cta.rank, warp)

    return release


def map_address(ins: Instruction, context: Context) -> Handler:
    """mapa: the address of the same offset in another CTA of the cluster."""
    dtype = DTYPES[ins.parts[-1]]
    generic = not any(p.startswith("shared") for p in ins.parts)
    write = context.operands.write(ins.args[0])
    address, rank = (
        context.operands.address(ins.args[1]),
        context.operands.read(ins.args[2], np.uint32),
    )

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle) - (SHARED_WINDOW if generic else 0)
        mapped = (where & ((1 << RANK_SHIFT) - 1)) | (rank(bundle).astype(np.int64) << RANK_SHIFT)
        write(bundle, (mapped + (SHARED_WINDOW if generic else 0)).astype(dtype), mask)

    return run


def cluster_rank(ins: Instruction, context: Context) -> Handler:
    """getctarank: the rank in a shared::cluster address."""
    write, address = context.operands.write(ins.args[0]), context.operands.address(ins.args[1])
    generic = not any(p.startswith("shared") for p in ins.parts)

    def run(bundle: Bundle, mask: Array | None) -> None:
        where = address(bundle) - (SHARED_WINDOW if generic else 0)
        write(bundle, (where >> RANK_SHIFT).astype(np.uint32), mask)

    return run
