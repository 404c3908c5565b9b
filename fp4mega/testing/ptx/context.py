"""What a decoder of one instruction sees of the launch: operands, parameter bytes, tensor maps, the random order of units."""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fp4mega.testing.ptx.errors import UnsupportedInstructionError
from fp4mega.testing.ptx.machine import Bundle, Geometry
from fp4mega.testing.ptx.memory import GlobalMemory
from fp4mega.testing.ptx.operands import Operands
from fp4mega.testing.ptx.parser import Instruction, Kernel
from fp4mega.testing.ptx.policy import Policy
from fp4mega.testing.ptx.tensormap import TensorMap
from fp4mega.testing.ptx.types import Array

Handler = Callable[[Bundle, Array | None], int | None]


def place(ins: Instruction) -> str:
    """The instruction as findings name it."""
    return f"#{ins.index} {ins.text[:120]}"


@dataclass(slots=True)
class Context:
    """One launch as its instructions see it."""

    kernel: Kernel
    geometry: Geometry
    operands: Operands
    parameters: bytes
    memory: GlobalMemory
    policy: Policy
    maps: dict[bytes, TensorMap] = field(default_factory=dict)

    def renew(
        self, geometry: Geometry, parameters: bytes, memory: GlobalMemory, policy: Policy
    ) -> None:
        """Set what differs from launch to launch; block and cluster must be those of before."""
        self.geometry, self.parameters, self.memory, self.policy = (
            geometry,
            parameters,
            memory,
            policy,
        )
        self.operands.geometry = geometry

    def late(self) -> bool:
        """Whether an operation that may happen now or at its wait happens at its wait."""
        return self.policy.late()

    def parameter(self, text: str) -> int | None:
        """Offset of `[name+offset]` in the parameter block, None for an address in a register."""
        match = re.match(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]$", text)
        if match is None:
            return None
        for parameter in self.kernel.parameters:
            if parameter.name == match.group(1):
                return parameter.offset + int(match.group(2) or 0)
        return None

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address: 128 bytes of parameter or global memory."""
        view, offset = self.memory.locate(address, 128)
        raw = view[offset : offset + 128].tobytes()
        found = self.maps.get(raw)
        if found is None:
            found = self.maps[raw] = TensorMap.decode(raw)
        return found


def only(ins: Instruction, allowed: AbstractSet[str]) -> None:
    """Raise UnsupportedInstructionError for any modifier that is not in `allowed`."""
    unknown = [p for p in ins.parts[1:] if p not in allowed]
    if unknown:
        raise UnsupportedInstructionError(f"{ins.op} (.{unknown[0]})")
