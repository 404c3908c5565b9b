"""A functional interpreter of the PTX that the CuTe DSL emits: kernels for GPUs that are not here, executed on a CPU."""

from fp4mega.testing.ptx.api import (
    FindingsError,
    Program,
    Report,
    aligned,
    compile_for,
    execute,
    launch,
    load,
)
from fp4mega.testing.ptx.errors import (
    DeadlockError,
    Finding,
    OutOfBoundsError,
    ProtocolError,
    PtxError,
    UnsupportedInstructionError,
)
from fp4mega.testing.ptx.host import tensor

__all__ = [
    "DeadlockError",
    "Finding",
    "FindingsError",
    "OutOfBoundsError",
    "Program",
    "ProtocolError",
    "PtxError",
    "Report",
    "UnsupportedInstructionError",
    "aligned",
    "compile_for",
    "execute",
    "launch",
    "load",
    "tensor",
]
