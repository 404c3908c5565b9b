"""When asynchronous units do their work, and in what order warps run: eager, lazy, or seeded random.

A correct kernel gives the same bits under every policy. Eager finds what a wait that is too long hides, lazy what a missing wait
hides, random the rest.
"""

import re
from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Policy:
    """A policy by name: "eager", "lazy" or "random-<seed>"."""

    name: str
    kind: str
    random: Random = field(repr=False)

    @classmethod
    def parse(cls, name: str) -> "Policy":
        """Read a policy's name. Raises ValueError for anything else."""
        match = re.fullmatch(r"(eager|lazy)|random-(\d+)", name)
        if match is None:
            raise ValueError(f"policy={name!r}: allowed: 'eager', 'lazy', 'random-<seed>'")
        return cls(name, match.group(1) or "random", Random(int(match.group(2) or 0)))

    def late(self) -> bool:
        """For one operation of a warp: at its wait (True) or at its issue."""
        if self.kind == "random":
            return self.random.random() < 0.5
        return self.kind == "lazy"

    def drained(self) -> int | None:
        """How many queued operations the units do between two warps' turns; None is all."""
        if self.kind == "random":
            return self.random.choice((0, 0, 0, 1, 2, 5))
        return None if self.kind == "eager" else 0

    def quantum(self) -> int:
        """Instructions in a warp's turn, if nothing makes it wait."""
        return self.random.choice((40, 200, 4000)) if self.kind == "random" else 4000
