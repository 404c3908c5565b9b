"""One partition of a multiprocessor, instruction by instruction: the warps of a CTA that live in it, their units, and the tensor core.

A CTA of 16 warps puts one warp of each role into partition 0: softmax of either query tile, correction, and the warp that issues MMAs. They
run their own machine code, loop after loop, share one issue slot and the units, and meet at barriers. The other partitions are taken to
move alike. Loads never make anybody wait.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fp4mega.bench.model_chip import Chip, busy, columns, unit_of
from fp4mega.bench.model_sass import NO_SCOREBOARD, Instruction

_LONG = ("alu", "fma", "ex2", "shared", "uniform")


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction of a role, and what it means to others.

    `waits`, `arrives`: name of a barrier. `ahead`: of how many key tiles later the phase is; earlier ones than the first are over at the
    start. `mma`: cycles of the tensor core. `commits`: the arrival comes when the tensor core has done everything before it.
    """

    instruction: Instruction
    waits: str | None = None
    arrives: str | None = None
    ahead: int = 0
    mma: float = 0.0
    commits: bool = False


@dataclass(slots=True)
class _Cost:
    unit: str
    busy: float
    latency: float


@dataclass(slots=True)
class _Warp:
    name: str
    steps: Sequence[Step]
    costs: list[_Cost]
    pc: int = 0
    tile: int = 0
    ready: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)
    stored: float = 0.0
    blocked: bool = False
    last: float = -1.0
    """When it last issued: of warps that could issue at the same time the one that waited longest does."""


@dataclass(frozen=True, slots=True)
class Result:
    """`period`: cycles from one key tile to the next, all query tiles of the CTA. `first`: until the first tile is over.

    `use`: fraction of the time that each unit is busy; `slot` is the issue slot, `mma` the tensor core.
    """

    period: float
    first: float
    use: dict[str, float]


class DeadlockError(RuntimeError):
    """Every warp waits: the barriers of a schedule do not fit one another."""


def _cost(step: Step, chip: Chip) -> _Cost:
    opcode = step.instruction.opcode
    unit, base = unit_of(opcode), step.instruction.base
    if unit in ("tensor_load", "tensor_store"):
        latency = chip.latency(unit) + columns(opcode)
    elif unit.startswith("cvt"):
        latency = chip.latency("cvt")
    elif unit in _LONG:
        latency = chip.latency(unit)
    elif base == "MEMBAR":
        latency = chip.latency("membar")
    elif base == "FENCE":
        latency = chip.latency("fence")
    elif base == "SYNCS":
        latency = chip.latency("test")
    elif base == "BAR":
        latency = chip.latency("barrier")
    elif base.startswith("LDC"):
        latency = chip.latency("constant")
    else:
        latency = chip.latency("other")
    return _Cost(unit, busy(opcode), latency)


class Partition:
    """Runs `roles` (name to steps) until each has done `tiles` key tiles."""

    def __init__(
        self,
        roles: Mapping[str, Sequence[Step]],
        counts: dict[str, int],
        chip: Chip,
        hand_off: float,
        starts: dict[str, float] | None = None,
    ) -> None:
        starts = starts or {}
        self.chip, self.hand_off, self.counts = chip, hand_off, counts
        self.warps = [_Warp(n, s, [_cost(x, chip) for x in s]) for n, s in roles.items()]
        self.arrivals: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self.sleepers: defaultdict[tuple[str, int], list[tuple[_Warp, int, float]]] = defaultdict(list)  # fmt: skip
        self.free: defaultdict[str, float] = defaultdict(float)
        self.used: defaultdict[str, float] = defaultdict(float)
        for warp in self.warps:
            for step in warp.steps:
                if step.arrives is not None:
                    for tile in range(step.ahead):
                        self.arrivals[step.arrives, tile].append(starts.get(step.arrives, 0.0))
        self.random = random.Random(0)
        self.slot = 0.0
        self.tensor = 0.0
        self.ends: list[float] = []

    def run(self, tiles: int) -> Result:
        """Simulate. Raises DeadlockError, and ValueError for fewer than eight tiles, which are no steady state."""
        if tiles < 8:
            raise ValueError(f"tiles={tiles}: expected 8 or more for a steady state")
        lead = self.warps[0]
        while True:
            best: _Warp | None = None
            when = 0.0
            for warp in self.warps:
                if warp.blocked or warp.tile >= tiles:
                    continue
                at = self._earliest(warp)
                if best is None or (at, warp.last) < (when, best.last):
                    best, when = warp, at
            if best is None:
                break
            self._issue(best, when)
            if best.pc == len(best.steps):
                best.pc = 0
                best.tile += 1
                if best is lead:
                    self.ends.append(when)
        if len(self.ends) < tiles - 1:
            stuck = ", ".join(f"{w.name} at instruction {w.pc} of tile {w.tile}" for w in self.warps if w.blocked)  # fmt: skip
            raise DeadlockError(f"no warp can move: {stuck}")
        half = len(self.ends) // 2
        period = (self.ends[-1] - self.ends[half]) / (len(self.ends) - 1 - half)
        total = self.ends[-1]
        return Result(period, self.ends[0], {u: t / total for u, t in sorted(self.used.items())})

    def _earliest(self, warp: _Warp) -> float:
        step, cost = warp.steps[warp.pc], warp.costs[warp.pc]
        at = max(warp.ready, self.slot)
        if cost.busy:
            at = max(at, self.free[cost.unit])
        mask = step.instruction.wait
        if mask:
            for board in range(6):
                if mask >> board & 1:
                    at = max(at, warp.boards[board])
        return at

    def _issue(self, warp: _Warp, at: float) -> None:
        step, cost = warp.steps[warp.pc], warp.costs[warp.pc]
        instruction, base = step.instruction, step.instruction.base
        warp.pc += 1
        warp.last = at
        self.slot = at + 1
        self.used["slot"] += 1
        warp.ready = at + max(1, instruction.stall)
        done = at + cost.latency
        if cost.busy:
            self.free[cost.unit] = at + cost.busy
            self.used[cost.unit] += cost.busy
        if cost.unit == "tensor_store":
            warp.stored = max(warp.stored, done)
        elif base == "FENCE":
            done = max(done, warp.stored)
        elif base == "MEMBAR":
            warp.ready = done
        if step.mma:
            start = max(self.tensor, at + self.chip.latency("mma_issue"))
            self.tensor = start + step.mma
            self.used["mma"] += step.mma
        for board in (instruction.write, instruction.read):
            if board < 6:
                warp.boards[board] = max(warp.boards[board], done)
        if step.arrives is not None:
            self._arrive(step.arrives, warp.tile + step.ahead, self.tensor if step.commits else at)
        if step.waits is not None:
            self._wait(warp, step, done)

    def _arrive(self, name: str, tile: int, at: float) -> None:
        key = (name, tile)
        arrived = self.arrivals[key]
        arrived.append(at)
        if len(arrived) == self.counts.get(name, 1):
            for warp, board, done in self.sleepers.pop(key, ()):
                warp.blocked = False
                self._wake(warp, board, max(done, max(arrived) + self._hop()))

    def _wait(self, warp: _Warp, step: Step, done: float) -> None:
        assert step.waits is not None
        key = (step.waits, warp.tile + step.ahead)
        board = step.instruction.write
        arrived = self.arrivals[key]
        if key[1] < 0:
            self._wake(warp, board, done)
        elif len(arrived) >= self.counts.get(step.waits, 1):
            self._wake(warp, board, max(done, max(arrived) + self._hop()))
        else:
            warp.blocked = True
            self.sleepers[key].append((warp, board, done))

    def _hop(self) -> float:
        return self.hand_off * self.random.uniform(0.5, 1.5)

    @staticmethod
    def _wake(warp: _Warp, board: int, at: float) -> None:
        if board != NO_SCOREBOARD:
            warp.boards[board] = max(warp.boards[board], at)
        warp.ready = max(warp.ready, at)
