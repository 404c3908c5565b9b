"""mbarrier objects and named barriers.

An mbarrier phase completes when no arrival is pending and the transaction count is zero (PTX ISA, "Phase of the mbarrier object").
The clocks that travel with arrivals belong to hazards.py.
"""

from dataclasses import dataclass

from fp4mega.testing.ptx.errors import ProtocolError
from fp4mega.testing.ptx.hazards import Clock

_MAX_COUNT = (1 << 20) - 1


@dataclass(slots=True)
class MBarrier:
    """One mbarrier; `phase` counts completed phases, so its lowest bit is the parity of the running one."""

    address: int
    expected: int
    pending: int
    clock: Clock
    completed: Clock
    tx: int = 0
    phase: int = 0

    def settle(self) -> bool:
        """Complete the phase if it is complete; True when it was."""
        if self.pending < 0:
            raise ProtocolError(
                f"mbarrier {self.address:#x}: more arrivals than the {self.expected} of its count in phase {self.phase}"
            )
        if abs(self.tx) > _MAX_COUNT:
            raise ProtocolError(
                f"mbarrier {self.address:#x}: transaction count {self.tx} out of range"
            )
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.expected
        self.completed.join(self.clock)
        return True

    def passed(self, parity: int) -> bool:
        """Whether a wait on the phase of `parity` returns true."""
        return (self.phase & 1) != (parity & 1)


@dataclass(slots=True)
class NamedBarrier:
    """One of the 16 barriers of a CTA: threads arrived, generations done, and threads expected in this one.

    `clock` keeps what earlier generations carried, which is what `completed` holds anyway.
    """

    clock: Clock
    completed: Clock
    arrived: int = 0
    generation: int = 0
    expected: int = 0

    def arrive(self, number: int, threads: int, expected: int, clock: Clock) -> None:
        """Count `threads` arrivals. Raises ProtocolError when counts disagree or overflow."""
        if self.arrived and self.expected != expected:
            raise ProtocolError(
                f"named barrier {number}: thread counts {self.expected} and {expected} in one generation"
            )
        if expected % 32:
            raise ProtocolError(
                f"named barrier {number}: thread count {expected} is no multiple of 32"
            )
        self.expected = expected
        self.arrived += threads
        if self.arrived > expected:
            raise ProtocolError(
                f"named barrier {number}: {self.arrived} threads arrived, {expected} expected"
            )
        self.clock.join(clock)
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
            self.completed.join(self.clock)
