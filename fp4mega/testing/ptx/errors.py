"""What can go wrong in an interpreted kernel: faults that stop it, findings that are collected in the report."""

from dataclasses import dataclass


class PtxError(RuntimeError):
    """A kernel did something that the hardware would not survive or that makes its result undefined."""


class DeadlockError(PtxError):
    """No warp can move and no asynchronous unit has work; the message names each barrier and each warp's position."""


class OutOfBoundsError(PtxError):
    """An access outside of every registered buffer, of shared memory, or of the tensor-memory columns allocated."""


class ProtocolError(PtxError):
    """A rule of the ISA was broken: barrier over-arrived, allocation refused, descriptor malformed, and so on."""


class UnsupportedInstructionError(NotImplementedError):
    """An instruction, modifier or operand form that this interpreter does not implement; it never guesses."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of suspicious event at one place: `kind` is a name from docs/ptx_interpreter.md, `count` how often."""

    kind: str
    message: str
    where: str
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"[{self.kind}] {self.message} at {self.where}{times}"


class Findings:
    """Collects findings, one per (kind, place); the first message of each is kept."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[str, int]] = {}

    def add(self, kind: str, message: str, where: str) -> None:
        """Count one event of `kind` at `where`."""
        key = (kind, where)
        first, count = self._seen.get(key, (message, 0))
        self._seen[key] = (first, count + 1)

    def list(self) -> tuple[Finding, ...]:
        """All findings, in the order in which they first happened."""
        return tuple(
            Finding(kind, message, where, count)
            for (kind, where), (message, count) in self._seen.items()
        )
