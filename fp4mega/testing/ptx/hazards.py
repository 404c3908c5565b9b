"""Happens-before over warps and asynchronous units: finds races that the schedule at hand did not happen to expose.

Every warp, every tensor pipe, every warp's queues (tcgen05.st, bulk copies, cp.async) and every mbarrier (for the copies that
complete on it) is an agent with a counter. A clock holds, per agent, the last event known to have happened; barriers carry clocks
from those who arrive to those who wait. Each word of memory remembers its last writer and, per agent, the last read. An access
that its issuer's clock does not order behind them is a race. A second vector holds what is known to have been fenced
between the generic and the asynchronous proxy: a generic write read by an asynchronous unit has to be in it
(PTX ISA, "Memory Consistency Model", causality order with proxies: a proxy fence anywhere along the path).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4mega.testing.ptx.errors import Findings, ProtocolError
from fp4mega.testing.ptx.memory import TMEM_COLUMNS, TMEM_LANES, SharedMemory
from fp4mega.testing.ptx.types import Array

_MBARRIERS = 512
_NEVER = -1


class Clock:
    """`seen[a]`: events of agent a known to be done; `fenced[a]`: those of them that a proxy fence covers."""

    __slots__ = ("fenced", "seen")

    def __init__(self, seen: Array, fenced: Array) -> None:
        self.seen, self.fenced = seen, fenced

    def join(self, other: "Clock") -> None:
        """Learn everything that `other` knows."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def copy(self) -> "Clock":
        """A snapshot."""
        return Clock(self.seen.copy(), self.fenced.copy())


@dataclass(frozen=True, slots=True)
class Access:
    """Who touches memory: the agent and the number its event gets, what its issuer knew, proxy, and the place in the code."""

    agent: int
    number: int
    clock: Clock
    asynchronous: bool
    where: str

    @property
    def place(self) -> int:
        """Index of the instruction, out of `where`."""
        return int(self.where[1 : self.where.index(" ")])


class SharedShadow:
    """Per 4-byte word of one CTA's shared memory: last writer, and last read by each agent."""

    def __init__(self, memory: SharedMemory, agents: int) -> None:
        words = (memory.end + 3) // 4
        self.writer = np.full(words, _NEVER, np.int16)
        self.number = np.zeros(words, np.int32)
        self.generic = np.zeros(words, np.bool_)
        self.place = np.zeros(words, np.int32)
        self.reads = np.zeros((words, agents), np.int32)


def _words(addresses: Array) -> tuple[Array, bool]:
    """(word indices of byte addresses [..., n], whether every word is touched as a whole)."""
    if addresses.shape[-1] % 4 == 0:
        starts = addresses[..., ::4].reshape(-1)
        if not (starts & 3).any():
            return starts >> 2, True
    return np.unique(addresses.reshape(-1) >> 2), False


class TensorShadow:
    """The same for tensor memory, per 32-lane partition and column."""

    def __init__(self, agents: int) -> None:
        self.writer = np.full((TMEM_LANES // 32, TMEM_COLUMNS), _NEVER, np.int16)
        self.number = np.zeros((TMEM_LANES // 32, TMEM_COLUMNS), np.int32)
        self.place = np.zeros((TMEM_LANES // 32, TMEM_COLUMNS), np.int32)
        self.reads = np.zeros((TMEM_LANES // 32, TMEM_COLUMNS, agents), np.int32)


class Tracker:
    """Agents, clocks and shadows of the CTAs of one cluster."""

    def __init__(self, ctas: int, warps: int, findings: Findings, enabled: bool = True) -> None:
        self.ctas, self.warps, self.enabled, self.findings = ctas, warps, enabled, findings
        # Agents that read (warps, their bulk and wgmma queues, pipes) come first, so that a shadow's read table is narrow.
        self._readers = 3 * ctas * warps + ctas
        self._mbarrier_base = 5 * ctas * warps + ctas
        self.agents = self._mbarrier_base + _MBARRIERS
        self._mbarriers: dict[tuple[int, int], int] = {}
        self.counter = np.zeros(self.agents, np.int32)
        self.clocks = [[self.clock() for _ in range(warps)] for _ in range(ctas)]
        self.fences: list[list[Clock | None]] = [[None] * warps for _ in range(ctas)]
        for rank in range(ctas):
            for warp in range(warps):
                agent = self.agent("warp", rank, warp)
                self.clocks[rank][warp].seen[agent] = 1

    def clock(self) -> Clock:
        """A clock that knows nothing."""
        return Clock(np.zeros(self.agents, np.int32), np.zeros(self.agents, np.int32))

    def agent(self, queue: str, rank: int, warp: int = 0) -> int:
        """Index of a warp ("warp"), of one of its queues ("bulk", "wgmma", "st", "cp_async") or of a CTA's tensor "pipe"."""
        block = self.ctas * self.warps
        place = rank * self.warps + warp
        if queue == "pipe":
            return 3 * block + rank
        order = {"warp": 0, "bulk": 1, "wgmma": 2}
        if queue in order:
            return order[queue] * block + place
        return 3 * block + self.ctas + (block if queue == "cp_async" else 0) + place

    def mbarrier_agent(self, rank: int, address: int) -> int:
        """The agent of copies that complete on this mbarrier."""
        key = (rank, address)
        if key not in self._mbarriers:
            if len(self._mbarriers) == _MBARRIERS:
                raise ProtocolError(f"more than {_MBARRIERS} mbarriers in one cluster")
            self._mbarriers[key] = self._mbarrier_base + len(self._mbarriers)
        return self._mbarriers[key]

    def name(self, agent: int) -> str:
        """The agent in words."""
        block = self.ctas * self.warps
        if agent >= self._mbarrier_base:
            rank, address = next(k for k, v in self._mbarriers.items() if v == agent)
            return f"a copy on mbarrier {address:#x} of CTA {rank}"
        if 3 * block <= agent < 3 * block + self.ctas:
            return f"the tensor pipe of CTA {agent - 3 * block}"
        if agent < 3 * block:
            kind = ("", "a bulk copy of ", "wgmma of ")[agent // block]
        else:
            agent -= 3 * block + self.ctas
            kind = ("tcgen05.st of ", "cp.async of ")[agent // block]
        return f"{kind}warp {agent % block % self.warps} of CTA {agent % block // self.warps}"

    # What a warp does to its own clock.

    def release(self, rank: int, warp: int) -> Clock:
        """The clock that an arrival carries; the warp's later accesses are not in it."""
        clock = self.clocks[rank][warp]
        snapshot = clock.copy()
        clock.seen[self.agent("warp", rank, warp)] += 1
        return snapshot

    def fence(self, rank: int, warp: int) -> None:
        """A releasing fence: a relaxed arrival behind it carries what the warp knew here."""
        self.fences[rank][warp] = self.release(rank, warp)

    def relaxed(self, rank: int, warp: int) -> Clock:
        """The clock of a relaxed arrival: that of the last releasing fence, or nothing."""
        return self.fences[rank][warp] or self.clock()

    def acquire(self, rank: int, warp: int, clock: Clock) -> None:
        """A wait succeeded: the warp knows what the barrier knows."""
        self.clocks[rank][warp].join(clock)

    def proxy_fence(self, rank: int, warp: int) -> None:
        """fence.proxy.async: every generic write that this warp knows of becomes visible to asynchronous units."""
        clock = self.clocks[rank][warp]
        np.maximum(clock.fenced, clock.seen, out=clock.fenced)
        clock.seen[self.agent("warp", rank, warp)] += 1

    def queue_number(self, queue: str, rank: int, warp: int) -> int:
        """The number of the batch that the warp's queue is collecting."""
        return int(self.counter[self.agent(queue, rank, warp)]) + 1

    def queue_wait(self, queue: str, rank: int, warp: int, number: int | None = None) -> None:
        """The warp waited for its queue: all batches, or those up to `number`."""
        agent = self.agent(queue, rank, warp)
        if number is None:
            self.counter[agent] += 1
            number = int(self.counter[agent])
        seen = self.clocks[rank][warp].seen
        seen[agent] = max(int(seen[agent]), number)

    def queue_close(self, queue: str, rank: int, warp: int) -> int:
        """Close the batch that the queue collects (commit_group); returns its number."""
        agent = self.agent(queue, rank, warp)
        self.counter[agent] += 1
        return int(self.counter[agent])

    # Accesses.

    def generic(self, rank: int, warp: int, where: str) -> Access:
        """An ordinary access of a warp."""
        clock = self.clocks[rank][warp]
        agent = self.agent("warp", rank, warp)
        return Access(agent, int(clock.seen[agent]), clock, False, where)

    def queued(self, queue: str, rank: int, warp: int, where: str) -> Access:
        """An access by one of the warp's queues, done at an unknown time between issue and wait."""
        clock = self.clocks[rank][warp]
        number = self.queue_number(queue, rank, warp)
        return Access(
            self.agent(queue, rank, warp), number, clock.copy(), queue in ("bulk", "wgmma"), where
        )

    def piped(self, rank: int, issuer: int, where: str) -> Access:
        """An access by the CTA's tensor pipe, which is in order with itself."""
        agent = self.agent("pipe", rank)
        self.counter[agent] += 1
        clock = self.clocks[rank][issuer].copy()
        clock.seen[agent] = self.counter[agent]
        return Access(agent, int(self.counter[agent]), clock, True, where)

    def _report(
        self, kind: str, what: str, access: Access, other: int, place: int | None = None
    ) -> None:
        at = "" if place is None else f" (#{place})"
        message = f"{what}: {self.name(access.agent)} against {self.name(other)}{at}"
        self.findings.add(kind, message, access.where)

    def _against_writers(
        self, shadow: "SharedShadow | TensorShadow", index: Any, what: str, access: Access
    ) -> None:
        writer = shadow.writer[index]
        bad = (shadow.number[index] > access.clock.seen[writer]) & (writer != _NEVER)
        if bad.any():
            i = np.flatnonzero(bad)[0]
            other, place = int(writer.flat[i]), int(shadow.place[index].flat[i])
            self._report("race", f"{what} not ordered behind the last write", access, other, place)

    def _against_readers(self, space: str, access: Access, reads: Array) -> None:
        bad = reads > access.clock.seen[: self._readers]
        if bad.any():
            reader = int(np.flatnonzero(bad.reshape(-1, self._readers).any(axis=0))[0])
            self._report("race", f"write of {space} not ordered behind a read", access, reader)

    def shadow(self, memory: SharedMemory) -> SharedShadow:
        """A shadow for one CTA's shared memory."""
        return SharedShadow(memory, self._readers)

    def tensor_shadow(self) -> TensorShadow:
        """A shadow for one CTA's tensor memory."""
        return TensorShadow(self._readers)

    def shared_read(self, shadow: SharedShadow, addresses: Array, access: Access) -> None:
        """Check and record a read of shared-memory bytes."""
        if not self.enabled or addresses.size == 0:
            return
        words, _ = _words(addresses)
        self._against_writers(shadow, words, "read of shared memory", access)
        if access.asynchronous:
            writer, number = shadow.writer[words], shadow.number[words]
            unfenced = shadow.generic[words] & (number > access.clock.fenced[writer])
            if unfenced.any():
                first = np.flatnonzero(unfenced)[0]
                culprit, at = int(writer[first]), int(shadow.place[words[first]])
                self._report(
                    "proxy-fence",
                    "asynchronous read of shared memory written by ordinary stores without fence.proxy.async",
                    access,
                    culprit,
                    at,
                )
        shadow.reads[words, access.agent] = access.number

    def shared_write(self, shadow: SharedShadow, addresses: Array, access: Access) -> None:
        """Check and record a write of shared-memory bytes."""
        if not self.enabled or addresses.size == 0:
            return
        words, whole = _words(addresses)
        if whole:
            # Neighbouring bytes of one word may be written by different warps without any order between them.
            self._against_writers(shadow, words, "write of shared memory", access)
        self._against_readers("shared memory", access, shadow.reads[words])
        shadow.writer[words] = access.agent
        shadow.number[words] = access.number
        shadow.place[words] = access.place
        shadow.generic[words] = not access.asynchronous

    def initialized(
        self, shadow: SharedShadow, offset: int, rank: int, warp: int, where: str
    ) -> None:
        """Check that an mbarrier's initialization at `offset` is ordered before this warp's use of it."""
        word = offset >> 2
        writer = int(shadow.writer[word])
        if not self.enabled or writer == _NEVER:
            return
        if shadow.number[word] > self.clocks[rank][warp].seen[writer]:
            access = self.generic(rank, warp, where)
            what = "use of an mbarrier not ordered behind its initialization"
            self._report("race", what, access, writer, int(shadow.place[word]))

    def tensor_read(
        self, shadow: TensorShadow, parts: slice, columns: slice, access: Access
    ) -> None:
        """Check and record a read of tensor memory: 32-lane partitions and columns."""
        if not self.enabled:
            return
        self._against_writers(shadow, (parts, columns), "read of tensor memory", access)
        shadow.reads[parts, columns, access.agent] = access.number

    def tensor_write(
        self, shadow: TensorShadow, parts: slice, columns: slice, access: Access
    ) -> None:
        """Check and record a write of tensor memory."""
        if not self.enabled:
            return
        self._against_writers(shadow, (parts, columns), "write of tensor memory", access)
        self._against_readers("tensor memory", access, shadow.reads[parts, columns])
        shadow.writer[parts, columns] = access.agent
        shadow.number[parts, columns] = access.number
        shadow.place[parts, columns] = access.place
