"""Runs the bundles of a cluster and its asynchronous units until every warp has left, or nothing can move any more."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp4mega.testing.ptx.blocks import BlockWriter, Step, single, step
from fp4mega.testing.ptx.context import Context, Handler, place
from fp4mega.testing.ptx.dataflow import early_signals, live_registers
from fp4mega.testing.ptx.errors import DeadlockError, PtxError, UnsupportedInstructionError
from fp4mega.testing.ptx.instructions import MAKERS
from fp4mega.testing.ptx.machine import (
    BLOCK,
    EXIT,
    RETRY,
    SPLIT,
    YIELD,
    Bundle,
    Cluster,
    Cta,
    join_bundles,
    make_bundle,
    split_bundle,
)
from fp4mega.testing.ptx.parser import Instruction
from fp4mega.testing.ptx.tcgen05_ops import deliver_stores
from fp4mega.testing.ptx.types import WARP, Array

# A kernel that has executed this many warp instructions per warp without an end is taken to spin for ever.
INSTRUCTION_LIMIT = 50_000_000
# A backward branch over a failed test at most this long is a loop that only waits.
SPIN_LENGTH = 12


class Code:
    """The decoded kernel: a handler for each instruction, and generated functions for runs of computing ones.

    Kept from launch to launch; what changes between launches is in `context`.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.instructions = context.kernel.instructions
        self.steps: list[Step | None] = []
        self.handlers: list[Handler | None] = [None] * len(self.instructions)
        self.targets = {ins.target for ins in self.instructions if ins.target is not None}
        self.live = live_registers(context.kernel, context.operands.slots)
        self.signals = early_signals(context.kernel, context.operands.slots)
        self.blocks: dict[int, tuple[Callable[[Bundle], None], int]] = {}
        self._names: dict[str, object] = {}
        for ins in self.instructions:
            try:
                self.steps.append(step(ins) if ins.parts[0] != "bra" else None)
            except UnsupportedInstructionError:
                self.steps.append(None)

    def block(self, pc: int) -> tuple[Callable[[Bundle], None], int] | None:
        """(function, end) of the run of computing instructions that starts at `pc`, None when there is none."""
        if self.steps[pc] is None:
            return None
        found = self.blocks.get(pc)
        if found is None:
            writer = BlockWriter(self.context.operands, self._names)
            end = pc
            while end < len(self.steps) and (made := self.steps[end]) is not None:
                if end > pc and end in self.targets:
                    break
                writer.add(self.instructions[end], made)
                end += 1
            found = self.blocks[pc] = (writer.compile(self.live[end]), end)
        return found

    def handler(self, pc: int) -> Handler:
        """The handler of one instruction under any mask. Raises UnsupportedInstructionError, naming it."""
        found = self.handlers[pc]
        if found is None:
            ins = self.instructions[pc]
            made = self.steps[pc]
            try:
                if made is not None:
                    found = single(ins, made, self.context.operands)
                else:
                    maker = MAKERS.get(ins.parts[0])
                    if maker is None:
                        step(ins)
                        raise UnsupportedInstructionError(ins.op)
                    found = maker(ins, self.context)
            except (UnsupportedInstructionError, KeyError) as error:
                raise UnsupportedInstructionError(f"{error}: {place(ins)}") from error
            self.handlers[pc] = found
        return found


def _awake(bundle: Bundle) -> bool:
    """Whether what the bundle waits for has happened; asks only once."""
    if bundle.wake is not None:
        if not bundle.wake():
            return False
        bundle.wake = None
    return True


def _guard(bundle: Bundle, ins: Instruction, slot: int) -> Array:
    value = bundle.registers[slot]
    if value is None:
        raise PtxError(f"predicate {ins.guard} was never written: {place(ins)}")
    return ~value if ins.guard_negated else value


class Runner:
    """Moves one bundle by up to a quantum of instructions."""

    def __init__(self, code: Code) -> None:
        self.code = code
        slots = code.context.operands.slots
        self.guards = [slots[i.guard] if i.guard is not None else -1 for i in code.instructions]

    def run(self, bundle: Bundle, quantum: int) -> int | None:
        """Execute until the bundle waits, gives way, ends, or the quantum is used up."""
        code, instructions = self.code, self.code.instructions
        end = bundle.steps + quantum
        while bundle.steps < end:
            if bundle.pcs is None and bundle.full and (block := code.block(bundle.pc)) is not None:
                function, after = block
                try:
                    function(bundle)
                except (AttributeError, TypeError) as error:
                    self._explain(bundle, bundle.pc, after, error)
                bundle.steps += after - bundle.pc
                bundle.pc = after
                continue
            pc, mask = self._pick(bundle)
            ins = instructions[pc]
            bundle.steps += 1
            active = mask
            if self.guards[pc] >= 0:
                active = _guard(bundle, ins, self.guards[pc])
                active = active if mask is None else active & mask
            if ins.target is not None:
                status = self._branch(bundle, ins, pc, mask, active)
                if status is not None:
                    return status
                continue
            status = None
            if active is None or active.any():
                if active is not None and mask is None and active.all():
                    active = None
                status = self._execute(bundle, pc, active)
            if status in (RETRY, SPLIT):
                return status
            # Behind a guarded exit the lanes that stay go on.
            if status == EXIT and self._leave(bundle, active):
                return EXIT
            self._advance(bundle, pc, mask)
            if status == BLOCK:
                return BLOCK
        return None

    def _execute(self, bundle: Bundle, pc: int, active: Array | None) -> int | None:
        handler = self.code.handler(pc)
        try:
            return handler(bundle, active)
        except PtxError as error:
            ins = self.code.instructions[pc]
            text = str(error)
            if place(ins) not in text:
                text = f"{text}: {place(ins)}"
            raise type(error)(f"{text} [CTA {bundle.cta.ctaid}, warps {bundle.warps}]") from error
        except (AttributeError, TypeError) as error:
            self._explain(bundle, pc, pc + 1, error)
            raise

    def _explain(self, bundle: Bundle, start: int, end: int, error: Exception) -> None:
        """Turn the use of a predicate that was never written into a fault that says so."""
        operands = self.code.context.operands
        for ins in self.code.instructions[start:end]:
            for text in (*ins.args, ins.guard or ""):
                slot = operands.slots.get(text.lstrip("!"))
                if (
                    slot is not None
                    and operands.widths[slot] == 0
                    and bundle.registers[slot] is None
                ):
                    raise PtxError(f"predicate {text} was never written: {place(ins)}") from error
        raise error

    @staticmethod
    def _pick(bundle: Bundle) -> tuple[int, Array | None]:
        """The next instruction and the lanes that execute it (None: all): the lowest program counter first."""
        if bundle.pcs is None:
            return bundle.pc, None if bundle.full else bundle.alive
        places = bundle.pcs[bundle.alive]
        pc = int(places.min())
        if (places == pc).all():
            bundle.pc, bundle.pcs = pc, None
            return pc, None if bundle.full else bundle.alive
        return pc, bundle.alive & (bundle.pcs == pc)

    @staticmethod
    def _advance(bundle: Bundle, pc: int, mask: Array | None) -> None:
        if bundle.pcs is None:
            bundle.pc = pc + 1
        else:
            bundle.pcs = np.where(mask if mask is not None else True, pc + 1, bundle.pcs)

    @staticmethod
    def _branch(
        bundle: Bundle, ins: Instruction, pc: int, mask: Array | None, taken: Array | None
    ) -> int | None:
        """Follow a branch; YIELD when it goes back behind a failed test, SPLIT when warps disagree."""
        target = ins.target
        assert target is not None
        everyone = taken is None or bool((taken if mask is None else taken == mask).all())
        if everyone or (taken is not None and not taken.any()):
            after = target if everyone else pc + 1
            if bundle.pcs is None:
                bundle.pc = after
            else:
                bundle.pcs = np.where(mask if mask is not None else True, after, bundle.pcs)
            if everyone and target <= bundle.failed <= pc and pc - target < SPIN_LENGTH:
                bundle.wake, bundle.failed = bundle.retry, -1
                return YIELD
            return None
        assert taken is not None
        if len(bundle.warps) > 1:
            rows = taken.reshape(len(bundle.warps), -1)
            if not (rows == rows[0]).all():
                return SPLIT
        if bundle.pcs is None:
            bundle.pcs = np.full(bundle.lanes, bundle.pc)
        rest = np.where(mask if mask is not None else True, pc + 1, bundle.pcs)
        bundle.pcs = np.where(taken, target, rest)
        return None

    @staticmethod
    def _leave(bundle: Bundle, leaving: Array | None) -> bool:
        """Lanes end; True when none is left."""
        if leaving is None:
            bundle.alive = np.zeros(bundle.lanes, np.bool_)
        else:
            bundle.alive = bundle.alive & ~leaving
        bundle.full = False
        return not bundle.alive.any()


# Warps of a CTA that start in lockstep, under the policies that do not play with their order.
_LOCKSTEP = 4


@dataclass(slots=True)
class _Group:
    """Bundles of the warps that started together; joined again when all of them stand at one place."""

    bundles: list[Bundle]
    # Just split: the warps stand where they could not go on together.
    parted: bool = False


class Scheduler:
    """Runs one cluster."""

    def __init__(self, code: Code, cluster: Cluster) -> None:
        self.code, self.runner, self.cluster = code, Runner(code), cluster
        self.policy = code.context.policy
        widths, geometry = code.context.operands.widths, cluster.geometry
        size = 1 if self.policy.kind == "random" or geometry.threads % WARP else _LOCKSTEP
        self.groups = [
            _Group(
                [
                    make_bundle(
                        cta,
                        tuple(range(start, min(start + size, geometry.warps))),
                        widths,
                        geometry.block,
                    )
                ]
            )
            for cta in cluster.ctas
            for start in range(0, geometry.warps, size)
        ]
        self.instructions = 0

    def run(self) -> int:
        """To the end; returns warp instructions executed. Raises DeadlockError and what the instructions raise."""
        idle = 0
        while self.groups:
            before, moved = self.cluster.progress, False
            if self.policy.kind == "random":
                self.policy.random.shuffle(self.groups)
            for group in self.groups:
                if not group.parted:
                    self._join(group)
                group.parted = False
                for bundle in list(group.bundles):
                    moved |= self._turn(bundle, group)
            self.groups = [group for group in self.groups if group.bundles]
            if moved or self.cluster.progress != before:
                idle = 0
            elif not self.drain(1) and not self._part():
                idle += 1
                if idle > 3:
                    raise DeadlockError(self.report())
        self.drain(None)
        return self.instructions

    def _turn(self, bundle: Bundle, group: _Group) -> bool:
        """One turn of a bundle; True when it moved on."""
        if not _awake(bundle):
            return False
        start = bundle.steps
        status = self.runner.run(bundle, self.policy.quantum())
        self.instructions += (bundle.steps - start) * len(bundle.warps)
        if status == EXIT:
            deliver_stores(bundle)
            group.bundles.remove(bundle)
        elif status == SPLIT:
            self._split(bundle, group)
        if bundle.steps > INSTRUCTION_LIMIT:
            raise PtxError(
                f"warps {bundle.warps}: {bundle.steps} instructions without an end; last wait: {bundle.waiting()}"
            )
        self.drain(self.policy.drained())
        return status not in (YIELD, RETRY)

    def _split(self, bundle: Bundle, group: _Group) -> None:
        live = 0
        for pc in {bundle.pc} if bundle.pcs is None else set(bundle.pcs.tolist()):
            live |= self.code.live[pc]
        parts = split_bundle(bundle, live)
        for part in parts:
            if not part.alive.any():
                deliver_stores(part)
        index = group.bundles.index(bundle)
        group.bundles[index : index + 1] = [part for part in parts if part.alive.any()]
        group.parted = True

    def _part(self) -> bool:
        """Nothing moves: let warps go on alone that wait together for different barriers; True when there are any."""
        found = False
        for group in self.groups:
            for bundle in list(group.bundles):
                if len(bundle.warps) > 1 and bundle.wake is not None and bundle.wakes:
                    self._split(bundle, group)
                    found = True
        return found

    def _join(self, group: _Group) -> None:
        """Put a group's warps in lockstep again when all of them stand at the same instruction."""
        bundles = group.bundles
        if len(bundles) < 2 or self.policy.kind == "random":
            return
        pc = bundles[0].pc
        if any(b.pc != pc or b.pcs is not None or not b.full for b in bundles):
            return
        if len({b.cluster_phase for b in bundles}) == 1 and all(_awake(b) for b in bundles):
            group.bundles = [join_bundles(bundles, self.code.live[pc])]

    def drain(self, count: int | None) -> bool:
        """Do queued asynchronous operations, `count` per CTA or all; True when there was any."""
        any_done = False
        for cta in self.cluster.ctas:
            left = 1 << 60 if count is None else count
            while left > 0 and (cta.copies or cta.pipe):
                self._one(cta)
                any_done = True
                left -= 1
        return any_done

    def _one(self, cta: Cta) -> None:
        random = self.policy.random
        if cta.copies and (not cta.pipe or random.random() < 0.5):
            index = random.randrange(len(cta.copies)) if self.policy.kind == "random" else 0
            work = cta.copies.pop(index)
        else:
            work = cta.pipe.pop(0)
        try:
            work.done()
        except PtxError as error:
            if work.what in str(error):
                raise
            raise type(error)(f"{error}: {work.what} [CTA {cta.ctaid}]") from error

    def report(self) -> str:
        """Where every warp stands and what every barrier holds."""
        lines = ["no warp can move and no asynchronous operation is pending"]
        for bundle in (b for group in self.groups for b in group.bundles):
            pc = bundle.pc if bundle.pcs is None else int(bundle.pcs[bundle.alive].min())
            lines += [
                f"  CTA {bundle.cta.ctaid} warp {warp} at #{pc}: waits for {bundle.waiting()}"
                for warp in bundle.warps
            ]
        for cta in self.cluster.ctas:
            for address, bar in sorted(cta.mbarriers.items()):
                lines.append(
                    f"  CTA {cta.ctaid} mbarrier {address:#x}: phase {bar.phase}, pending {bar.pending} of {bar.expected}, tx {bar.tx}"
                )
        return "\n".join(lines)
