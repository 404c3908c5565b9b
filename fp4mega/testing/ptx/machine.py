"""The state of a running cluster: CTAs with their memories, barriers and queues of asynchronous work, and bundles of warps.

A bundle is one or more neighbouring warps that move in lockstep: registers are arrays over all of its lanes. What a lane may
do alone (branch, leave) is in `pcs` and `alive`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fp4mega.testing.ptx.barriers import MBarrier, NamedBarrier
from fp4mega.testing.ptx.errors import Findings, ProtocolError
from fp4mega.testing.ptx.hazards import Tracker
from fp4mega.testing.ptx.memory import GlobalMemory, SharedMemory, TensorMemory
from fp4mega.testing.ptx.types import (
    OFFSET_MASK,
    POISON,
    RANK_SHIFT,
    UNSIGNED,
    WARP,
    Array,
)

Vector3 = tuple[int, int, int]

# What a handler may return instead of None (go on): give way after a failed test, wait until `bundle.wake` is true, do this
# instruction again later, end of the bundle, do it again with each warp on its own.
YIELD, BLOCK, RETRY, EXIT, SPLIT = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Geometry:
    """Grid, block and cluster of a launch, in CTAs and threads."""

    grid: Vector3
    block: Vector3
    cluster: Vector3 = (1, 1, 1)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return (self.threads + WARP - 1) // WARP

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


@dataclass(slots=True, eq=False)
class Work:
    """One operation of an asynchronous unit, not yet done; `done` runs it."""

    done: Callable[[], None]
    what: str


@dataclass(slots=True)
class WarpQueues:
    """What one warp has issued and not waited for: tcgen05.st, cp.async (open and in groups), bulk stores (open and in groups), wgmma groups."""

    stores: list[Callable[[], None]] = field(default_factory=list)
    cp_async: list[Callable[[], None]] = field(default_factory=list)
    cp_groups: list[tuple[int, list[Callable[[], None]]]] = field(default_factory=list)
    open_bulk: list[Work] = field(default_factory=list)
    bulk: list[tuple[int, list[Work]]] = field(default_factory=list)
    products: list[int] = field(default_factory=list)


class Cta:
    """One CTA: memories, barriers, and the queues of its copy unit (unordered), tensor pipe (in order) and bulk stores."""

    def __init__(self, cluster: "Cluster", rank: int, ctaid: Vector3, shared_bytes: int) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.shared = SharedMemory(shared_bytes)
        self.tensor = TensorMemory()
        self.shadow = cluster.tracker.shadow(self.shared)
        self.tensor_shadow = cluster.tracker.tensor_shadow()
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.copies: list[Work] = []
        self.pipe: list[Work] = []
        self.queues = [WarpQueues() for _ in range(cluster.geometry.warps)]

    @property
    def base(self) -> int:
        """Shared-memory address of this CTA's offset 0, in the cluster's window."""
        return self.rank << RANK_SHIFT

    def mbarrier(self, address: int) -> MBarrier:
        """The mbarrier at an offset. Raises ProtocolError when none was initialized there."""
        found = self.mbarriers.get(address)
        if found is None:
            raise ProtocolError(
                f"mbarrier at {address:#x} of CTA {self.rank} was never initialized"
            )
        return found

    def named_barrier(self, number: int) -> NamedBarrier:
        """Named barrier `number`, made at its first use."""
        if number not in self.named:
            tracker = self.cluster.tracker
            self.named[number] = NamedBarrier(tracker.clock(), tracker.clock())
        return self.named[number]

    def settle(self, barrier: MBarrier) -> None:
        """Complete the barrier's phase if it is due, and say so to the copies' agent."""
        if barrier.settle():
            tracker = self.cluster.tracker
            agent = tracker.mbarrier_agent(self.rank, barrier.address)
            barrier.completed.seen[agent] = barrier.phase
        self.cluster.progress += 1


class Cluster:
    """The CTAs that run together; without clusters one CTA."""

    def __init__(
        self,
        geometry: Geometry,
        first: Vector3,
        shared_bytes: int,
        memory: GlobalMemory,
        findings: Findings,
        track: bool,
    ) -> None:
        self.geometry, self.memory, self.findings = geometry, memory, findings
        self.tracker = Tracker(geometry.ctas, geometry.warps, findings, track)
        self.progress = 0
        x, y, z = geometry.cluster
        places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        self.ctas = [
            Cta(self, rank, (first[0] + i, first[1] + j, first[2] + k), shared_bytes)
            for rank, (i, j, k) in enumerate(places)
        ]
        self.barrier = NamedBarrier(self.tracker.clock(), self.tracker.clock())

    def locate(self, cta: Cta, address: int) -> tuple[Cta, int]:
        """The CTA and offset of a shared-memory address; without rank bits it is `cta` itself only in CTA 0's window."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise ProtocolError(
                f"shared memory address {address:#x}: the cluster has {len(self.ctas)} CTAs"
            )
        return self.ctas[rank], address & OFFSET_MASK


@dataclass(slots=True, eq=False)
class Bundle:
    """Neighbouring warps in lockstep. `registers` are arrays over lanes, never changed in place."""

    cta: Cta
    warps: tuple[int, ...]
    registers: list[Array | None]
    tid: Array
    alive: Array
    full: bool
    pc: int = 0
    pcs: Array | None = None
    done: bool = False
    wake: Callable[[], bool] | None = None
    # The same per warp, where warps in lockstep wait for different barriers.
    wakes: Sequence[Callable[[], bool]] = ()
    # In words, what the last wait was for.
    waiting: Callable[[], str] = lambda: "nothing known"
    # The last test that failed: its place, and when it is worth another try.
    failed: int = -1
    retry: Callable[[], bool] | None = None
    steps: int = 0
    cluster_phase: int = 0

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.tid)

    @property
    def laneid(self) -> Array:
        """Lane number in its warp."""
        return np.tile(np.arange(WARP, dtype=np.uint32), len(self.warps))

    def active(self, mask: Array | None) -> Array:
        """Indices of lanes that execute under `mask` (None is all)."""
        return np.flatnonzero(self.alive if mask is None else mask)

    def active_mask(self, mask: Array | None) -> Array:
        """The mask as booleans."""
        return self.alive if mask is None else mask

    def lockstep(self, mask: Array | None) -> list[tuple[int, Array]]:
        """(warp, indices of its active lanes) for each warp with any."""
        indices = self.active(mask)
        if len(self.warps) == 1:
            return [(self.warps[0], indices)] if len(indices) else []
        parts = [(w, indices[indices // WARP == i]) for i, w in enumerate(self.warps)]
        return [(w, part) for w, part in parts if len(part)]

    def issuer(self, lane: int) -> int:
        """The warp of a lane of this bundle."""
        return self.warps[lane // WARP]


def split_bundle(bundle: Bundle, live: int) -> list[Bundle]:
    """Each warp on its own; `live` is the bit mask of registers that are still read."""
    parts = []
    for i, warp in enumerate(bundle.warps):
        lanes = slice(WARP * i, WARP * (i + 1))
        registers: list[Array | None] = [
            r[lanes] if r is not None and live >> slot & 1 else None
            for slot, r in enumerate(bundle.registers)
        ]
        alive = bundle.alive[lanes]
        part = Bundle(
            bundle.cta, (warp,), registers, bundle.tid[lanes], alive, bool(alive.all()), bundle.pc
        )
        part.pcs = None if bundle.pcs is None else bundle.pcs[lanes]
        part.failed, part.retry, part.waiting = bundle.failed, bundle.retry, bundle.waiting
        part.steps, part.cluster_phase = bundle.steps, bundle.cluster_phase
        if bundle.wake is not None:
            part.wake = bundle.wakes[i] if bundle.wakes else bundle.wake
        parts.append(part)
    return parts


def join_bundles(parts: list[Bundle], live: int) -> Bundle:
    """Neighbouring warps that stand at the same instruction in lockstep again."""
    first = parts[0]
    registers: list[Array | None] = [None] * len(first.registers)
    for slot in range(len(registers)):
        if live >> slot & 1:
            columns = [part.registers[slot] for part in parts]
            given = [column for column in columns if column is not None]
            if len(given) == len(parts):
                # float32 pairs and 64-bit lanes may hold the same register.
                kind = given[0].dtype
                registers[slot] = np.concatenate(
                    [g if g.dtype == kind else g.view(kind) for g in given]
                )
    joined = Bundle(
        first.cta,
        tuple(warp for part in parts for warp in part.warps),
        registers,
        np.concatenate([part.tid for part in parts]),
        np.concatenate([part.alive for part in parts]),
        True,
        first.pc,
    )
    joined.failed, joined.retry, joined.waiting = first.failed, first.retry, first.waiting
    joined.steps, joined.cluster_phase = max(part.steps for part in parts), first.cluster_phase
    return joined


def make_bundle(cta: Cta, warps: tuple[int, ...], widths: list[int], block: Vector3) -> Bundle:
    """A bundle at its kernel's first instruction; registers hold a poison pattern, predicates nothing."""
    lanes = WARP * len(warps)
    threads = block[0] * block[1] * block[2]
    linear = np.arange(warps[0] * WARP, warps[0] * WARP + lanes, dtype=np.uint32)
    alive = linear < threads
    poison = {width: np.full(lanes, value) for width, value in POISON.items()}
    registers: list[Array | None] = [poison[w] if w in UNSIGNED else None for w in widths]
    return Bundle(cta, warps, registers, linear, alive, bool(alive.all()))
